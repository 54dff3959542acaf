# SPDX-License-Identifier: Apache-2.0
"""The server: a queue, a service, and the endpoints of OpenAI's API."""
