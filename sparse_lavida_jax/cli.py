# SPDX-License-Identifier: Apache-2.0
r"""The `sparse-lavida` command: `main` with fewer words to type.

    sparse-lavida convert LaViDa-O-v1.0 models/lavida-o
    sparse-lavida verify models/lavida-o
    sparse-lavida export runs/mine for-pytorch

Every setting of `main` may follow as --name=value.
"""

import sys
from collections.abc import Sequence

from sparse_lavida_jax import main as full

COMMANDS = {mode: list(folders) for mode, folders in full.FOLDERS.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` by default, and returns the exit code."""
    program, *words = sys.argv if argv is None else argv
    if not words or words[0] not in COMMANDS:
        wanted = words and words[0] not in ("help", "-h", "--help")
        print(__doc__, file=sys.stderr if wanted else sys.stdout)
        if wanted:
            print(f"sparse_lavida_jax: there is no command {words[0]!r}.", file=sys.stderr)
        return full.MISTAKE if wanted else 0
    mode, *rest = words
    folders = [word for word in rest if not word.startswith("-")]
    settings = [word for word in rest if word.startswith("-")]
    names = COMMANDS[mode]
    named = [f"--{name}={folder}" for name, folder in zip(names, folders, strict=False)]
    return full.main([program, f"--mode={mode}", *named, *settings, *folders[len(names) :]])


if __name__ == "__main__":
    sys.exit(main())
