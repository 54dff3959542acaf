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
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparse_lavida_jax import config
from sparse_lavida_jax import main as full
from sparse_lavida_jax.apps import completion
from sparse_lavida_jax.apps.errors import DEFAULT_MODEL, UsageError
from sparse_lavida_jax.apps.tasks import FORMS
from sparse_lavida_jax.apps.terminal import quiet, say, warnings_said
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.inference.requests import TASKS
from sparse_lavida_jax.main import MISTAKE, MISTAKES, STOPPED
from sparse_lavida_jax.version import __version__

# Modes of `main`, with the arguments that may be given by position.
MODES = {"train": ["config"], "sample": ["checkpoint", "prompt"], "evaluate": ["checkpoint"]} | {
    mode: list(folders) for mode, folders in full.FOLDERS.items()
}
FAILURE = 1
LONGEST_MESSAGE = 500  # of argparse's messages, which repeat the arguments
NO_DEVICE = ("Unable to initialize backend", "Unknown backend")  # jax's messages in that case


class Parser(argparse.ArgumentParser):
    """Reports mistakes in one sentence."""

    def error(self, message: str):
        said = message.rstrip(".")
        said = said if len(said) <= LONGEST_MESSAGE else f"{said[:LONGEST_MESSAGE]}..."
        raise UsageError(f"{said}. See `{self.prog} --help`.")


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
        with quiet("--quiet" in rest), warnings_said():
            return _run(program, name, rest)
    except Exception as error:
        sentence, code = _explained(error, name)
        # A mistake in the arguments of a mode may be reported as a list, one per line.
        say(sentence if name in MODES and code == MISTAKE else " ".join(sentence.split()))
        return code
    except KeyboardInterrupt:
        say("stopped.")
        return STOPPED


def _run(program: str, name: str, words: Sequence[str]) -> int:
    if name in MODES:
        own = [word for word in words if word not in ("--debug", "--quiet")]
        return full.run([program, *_mode_words(name, own)])
    parser = parser_of(name)
    try:
        asked = parser.parse_args(words)
    except SystemExit:  # --help
        return 0
    if name == "generate" and asked.replay is not None:
        _check_replay(parser, asked)
    if name == "completion":
        parsers = {one: _any_parser(one) for one in (*COMMANDS, *MODES)}
        print(completion.script(asked.shell, parsers))
        return 0
    if name in ("demo", "serve"):
        from sparse_lavida_jax.apps import hosting

        return hosting.run(name, asked)
    from sparse_lavida_jax.apps import commands  # takes seconds

    return commands.run(name, asked)


def _explained(error: Exception, name: str) -> tuple[str, int]:
    """Returns the sentence that reports an error of a command, and the exit code."""
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
    modes += "\n    and --quiet"
    return "\n".join([__doc__ or "", "Commands:", "", *tasks, modes])


def _mode_words(mode: str, words: Sequence[str]) -> list[str]:
    """Returns a command line of `main`, with names added to positional arguments."""
    plain = [word for word in words if not word.startswith("-")]
    settings = [word for word in words if word.startswith("-")]
    names = MODES[mode]
    named = [f"--{name}={value}" for name, value in zip(names, plain, strict=False)]
    return [f"--mode={mode}", *named, *map(_underscored, settings), *plain[len(names) :]]


def _underscored(word: str) -> str:
    """Returns an option in the spelling of `main`: `--init-from=x` as `--init_from=x`."""
    name, equals, value = word.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value


def _check_replay(parser: Parser, asked: argparse.Namespace) -> None:
    """Refuses options of `generate --replay` that `replay` does not take."""
    taken = vars(parser_of("replay").parse_args(["PNG"]))
    for key, value in vars(asked).items():
        if key not in taken and value != parser.get_default(key):
            named = "the prompt" if key == "prompt" else f"--{key.replace('_', '-')}"
            raise UsageError(f"--replay draws an image as it was drawn: leave {named} out.")


# ---------------------------------------------------------------------------------------------
# Options.


def _text(text: str) -> str:
    """Reads a value that may not be empty, as that of an unset shell variable would be."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: give a value, or leave it out")
    return text


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


def _settings(text: str) -> tuple[int, int | None]:
    """Reads `12` or `12:16`, steps and registers."""
    steps, _, registers = text.partition(":")
    return int(steps), int(registers) if registers else None


# argparse names these in its messages.
_settings.__name__ = "number of steps such as 12, or 12:16 with the registers"
_size.__name__, _box.__name__ = "size such as 512x512", "box such as 16,16,48,48"
_registers.__name__ = "number of registers such as 64 or 64:8"


def _argument(
    names: str,
    help: str,
    type: Callable[[str], Any] | None = _text,
    default: Any = None,
    *,
    group: str = "",
    **how: Any,
) -> tuple[str, list[str], dict[str, Any]]:
    """Returns an argument of commands: its group, its names and its settings for `argparse`.

    Args:
        names: separated by spaces; one without dashes is positional.
        help: what it means.
        type: reads its value; None: it is a flag without a value.
        group: a command line may contain at most one argument of a group.
        default, how: see `argparse`.
    """
    how |= {"action": "store_true"} if type is None else {"type": type, "default": default}
    return group, names.split(), {"help": help, **how}


_PRESETS = ", ".join((*config.PRESETS, *config.TEXT_PRESETS))
_PLACE = (
    "where the image stands in the new one: x1,y1,x2,y2 in pixels of that, by default its middle;"
    " any other shape is a --mask of `inpaint`, on a canvas with room around"
)
_LINES = (
    '.txt: a prompt a line; .jsonl: {"prompt": ..., "image": ..., "seed": ..., "temperature": ...,'
    ' "guidance": ...} a line, of which all but the prompt may be left out'
)
_CHECKPOINT = (
    "a model folder, a run directory, a bundled model or one of the hub, org/name; by default"
    f" {DEFAULT_MODEL}"
)
ARGUMENTS = {
    # Inputs of a task.
    "prompt": _argument("prompt", "what is wanted, in words", str, nargs="?"),
    "image": _argument("image", "PNG, JPEG or WebP", str, nargs="?"),
    "needed_image": _argument("image", "PNG, JPEG or WebP"),
    "shown": _argument("--image --picture", "the image that the text is about"),
    "phrases": _argument("phrases", "what to find", str, nargs="+"),
    "size": _argument("--size", "height x width in pixels, such as 512x512", _size),
    "mask": _argument("--mask", "an image that is white where to draw", Path, group="hole"),
    "hole": _argument("--box", "where to draw: x1,y1,x2,y2 in pixels", _box, group="hole"),
    "place": _argument("--box", _PLACE, _box),
    "rounds": _argument("--rounds", "most attempts at an image", int, 3),
    "max_new_tokens": _argument("--max-new-tokens", "room for the answer, in tokens", int),
    "template": _argument("--template", "the text with gaps: ___ is one token, {4} four"),
    "words": _argument("--words", "words that must occur, in this order", str, [], nargs="+"),
    "batch": _argument("--batch", _LINES, Path, metavar="FILE"),
    # Outputs.
    "out": _argument("--out", "the file to write", Path, Path("out.png")),
    "boxes": _argument("--out", "the image with the boxes in it", Path),
    "turns": _argument("--out", "the folder to write to", Path, Path("turns")),
    "grid": _argument("--grid", "put all images on one sheet", None),
    "save_steps": _argument(
        "--save-steps", "write how the first image unmasks", Path, metavar="GIF"
    ),
    "kernels": _argument("--kernels", "check the attention kernel on this device", None),
    "json": _argument("--json", "print results for programs", None),
    # Sampling.
    "steps": _argument("--steps --num-inference-steps", "steps of an image or a text block", int),
    "sampler": _argument(
        "--sampler",
        f"how steps are made: {_PRESETS}; or as published: released, fast_dllm",
        metavar="NAME",
    ),
    "registers": _argument(
        "--registers",
        "how many are used; 64:8 falls from 64 to 8; by default as trained",
        _registers,
        metavar="M[:END]",
    ),
    "temperature": _argument(
        "--temperature", "how random draws are; 0 takes the most probable", float
    ),
    "image_steps": _argument("--steps --num-inference-steps", "steps of an image", int),
    "image_temperature": _argument(
        "--temperature", "how random draws of images are; 0 takes the most probable", float
    ),
    "quantize": _argument("--quantize", f"run matrices in 8 bits: {', '.join(config.QUANTIZED)}"),
    "guidance": _argument(
        "--guidance --guidance-scale", "scale of classifier-free guidance; 0: none", float
    ),
    "order": _argument("--order", "in which cells are decoded: stratified, halton, ..."),
    "plan": _argument("--plan", "the layout to follow, in place of the model's own", group="plan"),
    "no_plan": _argument("--no-plan", "do not lay the image out first", None, group="plan"),
    "num_images": _argument("--num-images", "images of each prompt", int, 1, metavar="N"),
    "vq_dtype": _argument(
        "--vq-dtype", f"number type of the image decoder: {' or '.join(config.VQ_DTYPES)}"
    ),
    "seed": _argument("--seed", "seed of the first row; by default 0", int),
    # The model and its server.
    "checkpoint": _argument("--checkpoint", _CHECKPOINT),
    "adapters": _argument("--adapters", full.ADAPTERS, metavar="FOLDER[:WEIGHT],..."),
    "convert": _argument("--convert", "convert a released LaViDa-O of the hub, once", None),
    "batch_size": _argument("--batch-size", "most rows decoded together", int, 16),
    "quiet": _argument("--quiet", "print results and errors, nothing else", None),
    "debug": _argument("--debug", "show where an error comes from", None),
    "replay": _argument("--replay", "draw this image again", Path, metavar="PNG"),
    "replayed": _argument("replay", "the image to draw again", Path, metavar="PNG"),
    "source": _argument(
        "--image --picture", "the image it was drawn after; by default the recorded file"
    ),
    "first_image": _argument("--image --picture", "the image that the first line is about"),
    "host": _argument(
        "--host", "address; by default only this machine reaches it", default="127.0.0.1"
    ),
    "port": _argument("--port", "port; 0 takes any that is free", int, 8000),
    "max_waiting": _argument(
        "--max-waiting", "requests that may wait; more are refused", int, 64, metavar="N"
    ),
    "longest_wait": _argument(
        "--longest-wait",
        "most seconds that a request waits for others to share its batch",
        float,
        0.5,
    ),
    "programs": _argument(
        "--programs", "kinds of batches whose compiled programs are kept", int, 64, metavar="N"
    ),
    "only": _argument(
        "--only",
        "refuse steps and registers of images, and all other settings, except these and the"
        " model's own; none: except the model's own",
        _settings,
        nargs="*",
        metavar="STEPS[:REGISTERS]",
    ),
    "grace": _argument(
        "--grace", "seconds that running requests have to end when it is stopped", int, 5
    ),
    "api_key": _argument(
        "--api-key", "what clients have to send; by default $SPARSE_LAVIDA_API_KEY", metavar="KEY"
    ),
    "insecure": _argument("--insecure", "let other machines in without a key", None),
    "shell": _argument("shell", ", ".join(completion.SHELLS), choices=completion.SHELLS),
    "warmup": _argument("--warmup", "compile at the start; /ready says when that is done", None),
}

_MODEL = "checkpoint adapters convert batch_size json quiet debug"
_SAMPLING = "steps sampler registers temperature quantize"
_CHATTING = "image_steps sampler registers image_temperature quantize seed"
_DRAWING = "out grid save_steps num_images plan no_plan guidance order vq_dtype"
_HOSTING = (
    "checkpoint adapters convert host port batch_size longest_wait max_waiting programs only grace"
    " api_key insecure warmup quiet debug"
)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: what it does, an example without its name, and the keys of its arguments."""

    does: str
    example: str
    arguments: str


_SERVED = "serve OpenAI-shaped endpoints: /v1/images/generations, ..."
_CHAT = "do what each line of the input says: a task and its words"
COMMANDS = {
    name: Command(
        form.does,
        form.example,
        f"{form.options} {_DRAWING * TASKS[name].draws} {_SAMPLING} seed {_MODEL}",
    )
    for name, form in FORMS.items()
} | {
    "chat": Command(_CHAT, "--out turns < lines.txt", f"first_image turns {_CHATTING} {_MODEL}"),
    "replay": Command(
        "draw an image again, bit for bit",
        "out.png --out again.png",
        f"replayed source out {_MODEL}",
    ),
    "demo": Command("serve a page to play with", "--port 8000", _HOSTING),
    "serve": Command(_SERVED, "--port 8000", _HOSTING),
    "completion": Command(
        "print what lets a shell complete commands",
        "bash > ~/.local/share/bash-completion/completions/sparse-lavida",
        "shell debug",
    ),
    "doctor": Command("say what is installed and what fits", "", "kernels json quiet debug"),
}


def parser_of(name: str) -> Parser:
    """Returns the parser of a command."""
    command = COMMANDS[name]
    parser = Parser(
        prog=f"sparse-lavida {name}",
        description=f"{command.does[0].upper()}{command.does[1:]}.",
        epilog=f"example: sparse-lavida {name} {command.example}".rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    groups: dict[str, Any] = {"": parser}
    for group, names, how in (ARGUMENTS[key] for key in command.arguments.split()):
        if group not in groups:
            groups[group] = parser.add_mutually_exclusive_group()
        groups[group].add_argument(*names, **how)
    return parser


def _any_parser(name: str) -> argparse.ArgumentParser:
    """Returns the parser of a command, or one with the options of a mode of `main`."""
    if name in COMMANDS:
        return parser_of(name)
    parser = Parser(prog=f"sparse-lavida {name}", description=f"As --mode={name} of main.")
    parser.add_argument("folder", nargs="*")
    for flag in (*full.TAKES.get(name, "").split(), "quiet", "debug"):
        parser.add_argument(f"--{flag.replace('_', '-')}", dest=flag)
    return parser


if __name__ == "__main__":
    sys.exit(main())
