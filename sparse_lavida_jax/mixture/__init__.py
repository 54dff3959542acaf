# SPDX-License-Identifier: Apache-2.0
"""Prepared training data, with the fields of the released mixture."""
