# SPDX-License-Identifier: Apache-2.0
"""`python -m sparse_lavida_jax` is the command `sparse-lavida`."""

import sys

from sparse_lavida_jax import cli

if __name__ == "__main__":
    sys.exit(cli.main())
