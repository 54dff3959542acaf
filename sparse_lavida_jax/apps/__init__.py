# SPDX-License-Identifier: Apache-2.0
"""User interfaces: the commands, the web page and the server."""
