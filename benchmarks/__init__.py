# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each writes one JSON file per row; `table.py` and others make tables of them."""
