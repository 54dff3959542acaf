# SPDX-License-Identifier: Apache-2.0
"""The endpoints of OpenAI's API, each in its own file; `server/endpoints.py` assembles them."""
