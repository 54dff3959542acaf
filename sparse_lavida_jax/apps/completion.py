# SPDX-License-Identifier: Apache-2.0
"""What completes the command line in a shell, written by shtab."""

import argparse
import pathlib
from collections.abc import Mapping

from sparse_lavida_jax.apps.errors import UsageError

SHELLS = ("bash", "zsh", "tcsh")
FILES = ("image", "checkpoint", "folder", "config", "data", "init_from", "workdir", "src", "dst")


def script(shell: str, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Returns a script for a shell.

    Args:
        commands: their parsers by name.

    Raises:
        UsageError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise UsageError(
            "`sparse-lavida completion` needs a package that is not installed: pip install"
            " 'sparse-lavida-jax[completion]'."
        ) from error
    whole = argparse.ArgumentParser("sparse-lavida")
    names = whole.add_subparsers()
    for name, parser in commands.items():
        names.add_parser(name, parents=[parser], help=parser.description, add_help=False)
        for action in parser._actions:  # completed where they are, as shtab has it
            if action.type is pathlib.Path or action.dest in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(whole, shell)
