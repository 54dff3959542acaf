# SPDX-License-Identifier: Apache-2.0
"""How a benchmark starts, and how Ctrl-C ends it."""

import pathlib
import sys
from collections.abc import Callable

from absl import app


def run(main: Callable[[list[str]], None]) -> None:
    """Runs the `main` of a benchmark. Ctrl-C ends it with exit code 130 and without a traceback."""
    name = f"benchmarks.{pathlib.Path(sys.argv[0]).stem}"

    def begin(argv: list[str]) -> None:
        print(f"{name}: started; compiling may take minutes.", file=sys.stderr)
        main(argv)

    try:
        app.run(begin)
    except KeyboardInterrupt:
        print(f"\n{name}: stopped. Rows that are written are kept.", file=sys.stderr)
        sys.exit(130)
