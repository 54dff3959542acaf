# SPDX-License-Identifier: Apache-2.0
"""The benchmarks, a file each, which `evals.benchmark` finds by name."""
