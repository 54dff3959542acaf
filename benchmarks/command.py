# SPDX-License-Identifier: Apache-2.0
"""How a benchmark starts, and how Ctrl-C ends it."""

import pathlib
import sys
from collections.abc import Callable

from absl import app

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.training import runs


def run(main: Callable[[list[str]], None]) -> None:
    """Runs the `main` of a benchmark.

    A mistake in what was asked for ends it in one sentence with exit code 2, Ctrl-C with 130.
    """
    name = f"benchmarks.{pathlib.Path(sys.argv[0]).stem}"

    def begin(argv: list[str]) -> None:
        print(f"{name}: started; compiling may take minutes.", file=sys.stderr)
        try:
            main(argv)
        except (config.ConfigError, model_folder.CheckpointError, runs.RunError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            sys.exit(2)

    try:
        app.run(begin)
    except KeyboardInterrupt:
        print(f"\n{name}: stopped. Rows that are written are kept.", file=sys.stderr)
        sys.exit(130)
