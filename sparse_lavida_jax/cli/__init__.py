# SPDX-License-Identifier: Apache-2.0
"""The command line: `sparse-lavida COMMAND`, and `main.py` with the same commands as modes."""
