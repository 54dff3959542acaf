# SPDX-License-Identifier: Apache-2.0
r"""The `sparse-lavida` command: draw, edit, ask, train, convert and serve.

    sparse-lavida generate "a red circle above a blue square" --out out.png
    sparse-lavida ask out.png "how many squares are there?"
    sparse-lavida convert LaViDa-O-v1.0 models/lavida-o
    sparse-lavida verify models/lavida-o
    sparse-lavida export runs/mine for-pytorch

`sparse-lavida COMMAND --help` shows an example and all options. Exit codes: 0 done, 2 a mistake in
what was asked, 1 what the machine could not do, such as a full disk, 130 stopped by Ctrl-C.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence

from sparse_lavida_jax import __version__, runtime
from sparse_lavida_jax.cli import completion
from sparse_lavida_jax.cli.parser import COMMANDS, MODES, Parser, overview
from sparse_lavida_jax.cli.terminal import output_escaped, quiet, say, warnings_said
from sparse_lavida_jax.cli.usage_errors import FAILURE, MISTAKE, STOPPED, UsageError, explained
from sparse_lavida_jax.programs import jax_settings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` by default, and returns the exit code."""
    _, *words = sys.argv if argv is None else argv
    name, *rest = words or ["help"]
    if name in ("help", "-h", "--help", "--version"):
        about = __version__ if name == "--version" else f"{__doc__}\n{overview()}"
        return printed(about)
    if name not in COMMANDS | MODES:
        near = difflib.get_close_matches(name, (*COMMANDS, *MODES), 1)
        meant = f"Did you mean {near[0]!r}? " if near else ""
        say(f"there is no command {name!r}. {meant}`sparse-lavida --help` lists all commands.")
        return MISTAKE
    return run(Parser(name), rest)


def printed(text: str) -> int:
    """Prints a text, and returns the exit code."""
    try:
        with output_escaped():
            print(text)
    except OSError as error:
        say(str(error))
        return FAILURE
    return 0


def run(parser: Parser, words: Sequence[str]) -> int:
    """Runs a command and returns the exit code. What is wrong is reported in a sentence.

    Raises:
        Exception: an error of the program in a mode of `main.py`; with --debug, every error.
    """
    try:
        with quiet("--quiet" in words), output_escaped(), warnings_said():
            with runtime.interrupts_heard():
                return _run(parser, words)
    except Exception as error:
        found = explained(error, parser)
        if "--debug" in words or (parser.is_mode and found is None):
            raise
        sentence, code = found or (
            f"an error of the program: {type(error).__name__}: {error} Run it with --debug to see"
            " where.",
            FAILURE,
        )
        # What is wrong with a run may be a list, one per line.
        say(sentence if parser.name in MODES and code == MISTAKE else " ".join(sentence.split()))
        return code
    except KeyboardInterrupt:
        if "--debug" in words:
            raise
        say("stopped.")
        return STOPPED


@jax_settings.defaults()
def _run(parser: Parser, words: Sequence[str]) -> int:
    try:
        asked, name = parser.parse_args(words), parser.name
    except SystemExit:  # --help
        return 0
    if name in MODES:
        from sparse_lavida_jax.cli import modes

        return modes.run(name, asked)
    if name == "generate" and asked.replay is not None:
        _check_replay(parser, asked)
    if name == "completion":
        print(completion.script(asked.shell, {one: Parser(one) for one in (*COMMANDS, *MODES)}))
        return 0
    if name in ("demo", "serve"):
        from sparse_lavida_jax.cli import hosting

        return hosting.run(name, asked)
    from sparse_lavida_jax.cli import commands  # takes seconds

    return commands.run(name, asked)


def _check_replay(parser: Parser, asked: argparse.Namespace) -> None:
    """Refuses options of `generate --replay` that `replay` does not take."""
    taken = vars(Parser("replay").parse_args(["PNG"]))
    for key, value in vars(asked).items():
        if key not in taken and value != parser.get_default(key):
            named = "the prompt" if key == "prompt" else parser.spelled(key)
            raise UsageError(f"--replay draws an image as it was drawn: leave {named} out.")
