# SPDX-License-Identifier: Apache-2.0
r"""The `sparse-lavida` command: every task, and the modes of `main`.

    sparse-lavida generate "a red circle above a blue square" --out out.png
    sparse-lavida ask out.png "how many squares are there?"
    sparse-lavida convert LaViDa-O-v1.0 models/lavida-o
    sparse-lavida verify models/lavida-o
    sparse-lavida export runs/mine for-pytorch

`sparse-lavida COMMAND --help` shows an example and all options. Exit codes: 0 done, 2 a mistake in
what was asked, 1 what the machine could not do, such as a full disk.
"""

import argparse
import dataclasses
import difflib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from sparse_lavida_jax import config
from sparse_lavida_jax import main as full
from sparse_lavida_jax.apps.errors import DEFAULT_MODEL, MISTAKES, UsageError
from sparse_lavida_jax.apps.tasks import FORMS
from sparse_lavida_jax.apps.terminal import say
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.inference.requests import TASKS
from sparse_lavida_jax.main import MISTAKE, STOPPED
from sparse_lavida_jax.version import __version__

# Modes of `main`, with what may be given without its name.
MODES = {"train": ["config"], "sample": ["checkpoint", "prompt"], "evaluate": ["checkpoint"]} | {
    mode: list(folders) for mode, folders in full.FOLDERS.items()
}
FAILURE = 1
NO_DEVICE = ("Unable to initialize backend", "Unknown backend")  # what jax says then


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str):
        raise UsageError(f"{message.rstrip('.')}. See `{self.prog} --help`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` by default, and returns the exit code."""
    program, *words = sys.argv if argv is None else argv
    if not words or words[0] in ("help", "-h", "--help"):
        print(_overview())
        return 0
    name, *rest = words
    if name == "--version":
        print(__version__)
        return 0
    if name not in COMMANDS and name not in MODES:
        near = difflib.get_close_matches(name, (*COMMANDS, *MODES), 1)
        meant = f"Did you mean {near[0]!r}? " if near else ""
        say(f"there is no command {name!r}. {meant}`sparse-lavida --help` lists all commands.")
        return MISTAKE
    if "--debug" in rest:
        return _run(program, name, rest)
    try:
        return _run(program, name, rest)
    except Exception as error:
        sentence, code = _explained(error, name)
        # A mistake in what a mode was given may be told as a list, a line each.
        say(sentence if name in MODES and code == MISTAKE else " ".join(sentence.split()))
        return code
    except KeyboardInterrupt:
        say("stopped.")
        return STOPPED


def _run(program: str, name: str, words: Sequence[str]) -> int:
    if name in MODES:
        return full.run([program, *_mode_words(name, [w for w in words if w != "--debug"])])
    try:
        asked = parser_of(name).parse_args(words)
    except SystemExit:  # --help
        return 0
    if name in ("demo", "serve"):
        from sparse_lavida_jax.apps import hosting

        return hosting.run(name, asked)
    from sparse_lavida_jax.apps import commands  # takes seconds

    return commands.run(name, asked)


def _explained(error: Exception, name: str) -> tuple[str, int]:
    """Returns the sentence that tells an error of a command, and the exit code."""
    said = str(error)
    if isinstance(error, OSError | model_folder.WriteError):
        return said, FAILURE
    if isinstance(error, MISTAKES):
        return said, MISTAKE
    less = {
        "train": "lower train.batch_size or raise train.microbatches (docs/training.md)",
        "evaluate": "lower evaluate.batch_size",
    }.get(name, "use a machine that has more" if name in MODES else "lower --batch-size")
    if isinstance(error, MemoryError):
        return f"there is not enough memory: {less}.", FAILURE
    if "RESOURCE_EXHAUSTED" in said:
        return f"the device has not enough memory: {less}.", FAILURE
    if any(part in said for part in NO_DEVICE):
        return (
            f"jax cannot use the device that was asked for: {said} JAX_PLATFORMS=cpu takes the"
            " CPU; `sparse-lavida doctor` says which devices there are."
        ), FAILURE
    return (
        f"an error of the program: {type(error).__name__}: {said} Run it with --debug to see where."
    ), FAILURE


def _overview() -> str:
    width = max(map(len, COMMANDS))
    tasks = (f"    {name:{width}}  {command.does}" for name, command in COMMANDS.items())
    modes = f"    {', '.join(MODES)}: as --mode of `python -m sparse_lavida_jax.main`, with --debug"
    return "\n".join([__doc__ or "", "Commands:", "", *tasks, modes])


def _mode_words(mode: str, words: Sequence[str]) -> list[str]:
    """Returns a command line of `main`: what stands without a name gets it."""
    plain = [word for word in words if not word.startswith("-")]
    settings = [word for word in words if word.startswith("-")]
    names = MODES[mode]
    named = [f"--{name}={value}" for name, value in zip(names, plain, strict=False)]
    return [f"--mode={mode}", *named, *settings, *plain[len(names) :]]


# ---------------------------------------------------------------------------------------------
# Options.


def _size(text: str) -> tuple[int, int]:
    """Reads `512` or `512x768`, height first."""
    height, _, width = text.partition("x")
    return int(height), int(width or height)


def _box(text: str) -> tuple[float, ...]:
    """Reads `x1,y1,x2,y2`."""
    return tuple(map(float, text.split(",")))


def _registers(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    counts = int(first), int(last) if last else -1
    if counts[0] < 0 or (last and not 0 <= counts[1] <= counts[0]):
        raise ValueError(text)
    return counts


# argparse names these in its messages.
_size.__name__, _box.__name__ = "size such as 512x512", "box such as 16,16,48,48"
_registers.__name__ = "number of registers such as 64 or 64:8"


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of commands: its names, and what else `add_argument` takes."""

    names: tuple[str, ...]
    more: dict[str, Any]
    excludes: str = ""  # options with the same word here cannot be given together


def _option(*names: str, excludes: str = "", **more: Any) -> Option:
    return Option(names, more, excludes)


_FILE: dict[str, Any] = {"type": pathlib.Path}
_IMAGE = "PNG, JPEG or WebP"
OPTIONS = {
    # What a task is about.
    "prompt": _option("prompt", nargs="?", help="in words"),
    "image": _option("image", nargs="?", help=_IMAGE),
    "needed_image": _option("image", help=_IMAGE),
    "shown": _option("--image", "--picture", help="that the text is about"),
    "phrases": _option("phrases", nargs="+", help="what to find"),
    "size": _option("--size", type=_size, help="height x width in pixels, such as 512x512"),
    "mask": _option("--mask", **_FILE, excludes="hole", help="white where to draw"),
    "hole": _option(
        "--box", type=_box, excludes="hole", help="where to draw: x1,y1,x2,y2 in pixels"
    ),
    "place": _option(
        "--box",
        type=_box,
        help="where the image stands in the new one: x1,y1,x2,y2 in pixels of that, by default"
        " its middle; any other shape is a --mask of `inpaint`, on a canvas with room around",
    ),
    "rounds": _option("--rounds", type=int, default=3, help="most attempts at an image"),
    "max_new_tokens": _option("--max-new-tokens", type=int, help="room for the answer"),
    "template": _option("--template", help="the text with gaps: ___ one token, {4} four"),
    "words": _option("--words", nargs="+", default=[], help="that must occur, in this order"),
    "batch": _option(
        "--batch",
        **_FILE,
        metavar="FILE",
        help='.txt: a prompt a line; .jsonl: {"prompt": ..., "image": ..., "seed": ...,'
        ' "temperature": ..., "guidance": ...} a line, of which all but the prompt may be left out',
    ),
    # Results.
    "out": _option("--out", **_FILE, default=pathlib.Path("out.png"), help="a file"),
    "boxes": _option("--out", **_FILE, help="the image with the boxes in it"),
    "turns": _option("--out", **_FILE, default=pathlib.Path("turns"), help="a folder"),
    "grid": _option("--grid", action="store_true", help="all images on one sheet"),
    "save_steps": _option(
        "--save-steps", **_FILE, metavar="GIF", help="the unmasking of the first image"
    ),
    "json": _option("--json", action="store_true", help="print results for programs"),
    # Sampling.
    "steps": _option(
        "--steps", "--num-inference-steps", type=int, help="of an image, or of a text block"
    ),
    "sampler": _option(
        "--sampler",
        metavar="PRESET",
        help=f"one of {', '.join((*config.PRESETS, *config.TEXT_PRESETS))}",
    ),
    "registers": _option(
        "--registers",
        type=_registers,
        metavar="M[:END]",
        help="how many are passed; 64:8 falls from 64 to 8; by default as trained",
    ),
    "temperature": _option("--temperature", type=float, help="0: the most probable"),
    "quantize": _option("--quantize", help=f"matrices in 8 bits: {', '.join(config.QUANTIZED)}"),
    "guidance": _option(
        "--guidance",
        "--guidance-scale",
        type=float,
        help="scale of classifier-free guidance; 0: none",
    ),
    "order": _option("--order", help="in which cells are decoded: stratified, halton, ..."),
    "plan": _option(
        "--plan", excludes="plan", help="the layout to follow, in place of the model's own"
    ),
    "no_plan": _option(
        "--no-plan", action="store_true", excludes="plan", help="do not lay the image out first"
    ),
    "num_images": _option("--num-images", type=int, default=1, metavar="N", help="of each prompt"),
    "vq_dtype": _option(
        "--vq-dtype", help=f"of the decoder of images: {' or '.join(config.VQ_DTYPES)}"
    ),
    "seed": _option("--seed", type=int, help="of the first row; by default 0"),
    # The model, and how it is served.
    "checkpoint": _option(
        "--checkpoint",
        help=f"a model folder, a run directory or a bundled model; by default {DEFAULT_MODEL}",
    ),
    "batch_size": _option("--batch-size", type=int, default=16, help="most rows decoded together"),
    "debug": _option("--debug", action="store_true", help="show where an error comes from"),
    "replay": _option("--replay", **_FILE, metavar="PNG", help="draw this one again"),
    "replayed": _option("replay", **_FILE, metavar="PNG", help="to draw again"),
    "source": _option(
        "--image", "--picture", help="that it was drawn after; by default the file recorded"
    ),
    "first_image": _option("--image", "--picture", help="that the first line is about"),
    "host": _option("--host", default="127.0.0.1", help="by default only this machine reaches it"),
    "port": _option("--port", type=int, default=8000, help="0: any that is free"),
    "max_waiting": _option(
        "--max-waiting", type=int, default=8, metavar="N", help="requests; more are refused"
    ),
    "warmup": _option("--warmup", action="store_true", help="compile before the first request"),
}

_MODEL = ("seed", "checkpoint", "batch_size", "json", "debug")
_SAMPLING = ("steps", "sampler", "registers", "temperature", "quantize")
_DRAWING = (
    "out",
    "grid",
    "save_steps",
    "num_images",
    "plan",
    "no_plan",
    "guidance",
    "order",
    "vq_dtype",
)
_HOSTING = ("checkpoint", "host", "port", "max_waiting", "warmup", "debug")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: what it does, an example without its name, and the options it has."""

    does: str
    example: str
    options: tuple[str, ...]


COMMANDS = {
    name: Command(
        form.does,
        form.example,
        (*form.options, *(_DRAWING if TASKS[name].draws else ()), *_SAMPLING, *_MODEL),
    )
    for name, form in FORMS.items()
} | {
    "chat": Command(
        "do what each line of the input says: a task and its words",
        "--out turns < lines.txt",
        ("first_image", "turns", *_SAMPLING, *_MODEL),
    ),
    "replay": Command(
        "draw an image again, bit for bit",
        "out.png --out again.png",
        ("replayed", "source", "out", *_MODEL),
    ),
    "demo": Command("serve a page to play with", "--port 8000", _HOSTING),
    "serve": Command(
        "serve OpenAI-shaped endpoints: /v1/images/generations, ...", "--port 8000", _HOSTING
    ),
    "doctor": Command("say what is installed and what fits", "", ("json", "debug")),
}


def parser_of(name: str) -> Parser:
    """Returns the parser of a command."""
    command = COMMANDS[name]
    parser = Parser(
        prog=f"sparse-lavida {name}",
        description=f"{command.does.capitalize()}.",
        epilog=f"example: sparse-lavida {name} {command.example}".rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    groups: dict[str, Any] = {"": parser}
    for option in (OPTIONS[key] for key in command.options):
        if option.excludes not in groups:
            groups[option.excludes] = parser.add_mutually_exclusive_group()
        groups[option.excludes].add_argument(*option.names, **option.more)
    return parser


if __name__ == "__main__":
    sys.exit(main())
