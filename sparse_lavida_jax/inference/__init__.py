# SPDX-License-Identifier: Apache-2.0
"""Requests in, results out."""
