# SPDX-License-Identifier: Apache-2.0
"""Prompts and training objective specific to the released LaViDa-O."""
