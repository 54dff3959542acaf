# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each writes one JSON file per row; only `table.py` reads them."""
