# SPDX-License-Identifier: Apache-2.0
"""A world of real art: things in three styles, at places and in two sizes, and its exact judge."""
