# SPDX-License-Identifier: Apache-2.0
"""Faces: commands, page, server."""
