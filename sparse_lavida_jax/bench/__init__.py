# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each writes one JSON a row; `table.py` is the only reader."""
