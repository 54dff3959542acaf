# SPDX-License-Identifier: Apache-2.0
"""The command `sparse-lavida`, also as `python -m sparse_lavida_jax`."""

import sys


def main() -> int:
    """Runs the command line of this process, and returns the exit code."""
    try:
        from sparse_lavida_jax import cli  # takes seconds, in which Ctrl-C may be pressed
    except KeyboardInterrupt:
        print("sparse_lavida_jax: stopped.", file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
