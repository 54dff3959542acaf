# SPDX-License-Identifier: Apache-2.0
"""Prepared data, in the fields of the released mixture."""
