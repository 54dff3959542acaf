# SPDX-License-Identifier: Apache-2.0
"""The endpoints of OpenAI's API, each in a file of its own; `apps/server.py` puts them together."""
