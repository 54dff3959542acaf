# SPDX-License-Identifier: Apache-2.0
"""Errors as sentences of the command line, with their exit codes."""

import argparse
import traceback
from typing import Any

from sparse_lavida_jax import runtime
from sparse_lavida_jax.checkpoints import model_folder, room
from sparse_lavida_jax.evals.official_files import EvaluationError
from sparse_lavida_jax.mixture.recipe import PrepareError
from sparse_lavida_jax.mixture.records import RecordError
from sparse_lavida_jax.schema import InputError
from sparse_lavida_jax.training import runs

FAILURE, MISTAKE, STOPPED = 1, 2, 130  # exit codes
LONGEST_NAME = 200  # characters of a path in a message
LONGEST_MESSAGE = 500  # characters of the messages of parsers, which repeat the arguments
# What can be wrong with a command.
MISTAKES = (
    InputError, model_folder.CheckpointError, runs.RunError, PrepareError, RecordError,
    EvaluationError, runtime.ProcessError,
)  # fmt: skip
NO_DEVICE = ("Unable to initialize backend", "Unknown backend")  # jax's messages in that case
MEMORY = {  # what to do, by command
    "train": "lower train.batch_size or raise train.microbatches (docs/training.md)",
    "evaluate": "lower evaluate.batch_size",
    **dict.fromkeys(
        ("sample", "convert", "export", "verify", "prepare"), "use a machine that has more"
    ),
}


class UsageError(InputError):
    """A command line that asks for something impossible."""


def need(asked: argparse.Namespace, setting: str, meaning: str) -> None:
    """Refuses a command line without an argument.

    Raises:
        UsageError: it is not there.
    """
    if not getattr(asked, setting):
        message = f"{asked.command} needs {{setting}}: {{allowed}}.{asked.example}"
        raise UsageError(message, setting=setting, allowed=meaning)


def about_path(error: BaseException) -> str:
    """Returns the sentence for a path that Python or the system refuses; "" for other errors.

    Paths come from many options, and only using one shows that it leads around in a circle, is too
    long, or names a device.
    """
    told, name = "", ""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        told, name = error.strerror, str(_text(error.filename))
    elif isinstance(error, ValueError) and "embedded null" in str(error):
        told = "a path holds the character NUL"
    shown = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
    return f"{shown}: {told}." if name else told and f"{told}."


def _text(name: Any) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def explained(error: Exception, parser: Any) -> tuple[str, int] | None:
    """Returns the sentence that reports an error, and the exit code; None: it is the program's.

    Args:
        parser: of the command, see `parser.Parser`; it spells the names of settings.
    """
    if isinstance(error, (model_folder.WriteError, room.RoomError)):
        return str(error), FAILURE
    if isinstance(error, InputError):
        return error.worded(parser.spelled), MISTAKE
    if isinstance(error, MISTAKES):
        return str(error), MISTAKE
    if sentence := about_path(error):
        return sentence, FAILURE if isinstance(error, OSError) else MISTAKE
    if isinstance(error, OSError):
        return str(error), FAILURE
    if runtime.out_of_memory(error):
        where = "there is" if isinstance(error, MemoryError) else "the device has"
        what = MEMORY.get(parser.name, "lower --batch-size")
        return f"{where} not enough memory: {what}.", FAILURE
    said, at = str(error), [one.filename for one in traceback.extract_tb(error.__traceback__)]
    if any(part in said for part in NO_DEVICE) or (at and at[-1].endswith("xla_bridge.py")):
        said = said.rstrip(".") or "no package for its platform is installed"
        return (
            f"jax cannot use the device that was asked for: {said}. JAX_PLATFORMS=cpu takes the"
            " CPU; without that variable, `sparse-lavida doctor` says which devices there are."
        ), FAILURE
    return None
