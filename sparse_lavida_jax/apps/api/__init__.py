# SPDX-License-Identifier: Apache-2.0
"""The endpoints of OpenAI's API, each in its own file; `apps/server.py` assembles them."""
