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
from collections.abc import Callable, Sequence

from sparse_lavida_jax import config
from sparse_lavida_jax import main as full
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.main import DEFAULT_MODEL, MISTAKES, UsageError
from sparse_lavida_jax.version import __version__

# Modes of `main`, with what may be given without its name.
MODES = {"train": ["config"], "sample": ["checkpoint", "prompt"], "evaluate": ["checkpoint"]} | {
    mode: list(folders) for mode, folders in full.FOLDERS.items()
}
MISTAKE, FAILURE, STOPPED = 2, 1, 130
NO_DEVICE = ("Unable to initialize backend", "Unknown backend")  # what jax says then


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: what it does, an example, and which groups of options it has."""

    does: str
    example: str
    add: tuple[Callable[[argparse.ArgumentParser], None], ...]


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
        print(
            f"sparse_lavida_jax: there is no command {name!r}. {meant}`sparse-lavida --help` lists"
            " what there is.",
            file=sys.stderr,
        )
        return MISTAKE
    if "--debug" in rest:
        return _run(program, name, rest)
    try:
        return _run(program, name, rest)
    except (model_folder.WriteError, OSError) as error:
        return _told(str(error), FAILURE)
    except MISTAKES as error:
        # Of a mode it may be a list, a line each.
        return _told(str(error), MISTAKE, keep_lines=name in MODES)
    except MemoryError:
        return _told(f"there is not enough memory: {_less(name)}.", FAILURE)
    except KeyboardInterrupt:
        return _told("stopped.", STOPPED)
    except Exception as error:  # ours to mend, yet no page of traceback for a person
        if "RESOURCE_EXHAUSTED" in str(error):
            return _told(f"the device has not enough memory: {_less(name)}.", FAILURE)
        if any(part in str(error) for part in NO_DEVICE):
            return _told(
                f"jax cannot use the device that was asked for: {error} JAX_PLATFORMS=cpu takes the"
                " CPU; `sparse-lavida doctor` says which devices there are.",
                FAILURE,
            )
        said = f"{type(error).__name__}: {error}"
        return _told(f"an error of the program: {said} Run it with --debug to see where.", FAILURE)


def _run(program: str, name: str, words: Sequence[str]) -> int:
    if name in MODES:
        return full.run([program, *_mode_words(name, [w for w in words if w != "--debug"])])
    try:
        asked = _parser(name).parse_args(words)
    except SystemExit:  # --help
        return 0
    if name in ("demo", "serve"):
        from sparse_lavida_jax.apps import hosting

        return hosting.run(name, asked)
    from sparse_lavida_jax.apps import commands  # takes seconds

    return commands.run(name, asked)


def _less(name: str) -> str:
    """Returns what makes a command need less memory."""
    if name == "train":
        return "lower train.batch_size or raise train.microbatches (docs/training.md)"
    if name == "evaluate":
        return "lower evaluate.batch_size"
    return "use a machine that has more" if name in MODES else "lower --batch-size"


def _told(sentence: str, code: int, *, keep_lines: bool = False) -> int:
    said = sentence if keep_lines else " ".join(sentence.split())
    print(f"sparse_lavida_jax: {said}", file=sys.stderr)
    return code


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


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", default=None,
        help=f"a model folder, a run directory or a bundled model; by default {DEFAULT_MODEL}",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=None, help="of the first row; by default 0")
    parser.add_argument("--batch-size", type=int, default=16, help="most rows decoded together")
    parser.add_argument("--json", action="store_true", help="print results for programs")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")


def _sampling(parser: argparse.ArgumentParser) -> None:
    presets = ", ".join((*config.PRESETS, *config.TEXT_PRESETS))
    parser.add_argument("--steps", type=int, help="of an image, or of a text block")
    parser.add_argument("--sampler", metavar="PRESET", help=f"one of {presets}")
    parser.add_argument(
        "--registers", type=_registers, metavar="M[:END]",
        help="how many are passed; 64:8 falls from 64 to 8; by default as trained",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, help="0: the most probable")
    parser.add_argument("--quantize", help=f"matrices in 8 bits: {', '.join(config.QUANTIZED)}")


def _drawing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out.png"))
    parser.add_argument(
        "--vq-dtype", help=f"of the decoder of images: {' or '.join(config.VQ_DTYPES)}"
    )
    parser.add_argument("--num-images", type=int, default=1, metavar="N", help="of each prompt")
    parser.add_argument("--guidance", type=float, help="scale of classifier-free guidance; 0: none")
    parser.add_argument("--order", help="in which cells are decoded: stratified, halton, ...")
    parser.add_argument("--grid", action="store_true", help="all images on one sheet")
    parser.add_argument(
        "--save-steps", type=pathlib.Path, metavar="GIF", help="the unmasking of the first image"
    )
    plan = parser.add_mutually_exclusive_group()
    plan.add_argument("--plan", help="the layout to follow, in place of the model's own")
    plan.add_argument("--no-plan", action="store_true", help="do not lay the image out first")


def _batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch", type=pathlib.Path, metavar="FILE",
        help='.txt: a prompt a line; .jsonl: {"prompt": ..., "image": ..., "seed": ...,'
        ' "temperature": ..., "guidance": ...} a line, of which all but the prompt may be left out',
    )  # fmt: skip


def _prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="in words")


def _image(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", nargs="?", help="PNG, JPEG or WebP")


def _needed_image(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", help="PNG, JPEG or WebP")


def _shown(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", "--picture", help="that the text is about")


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=_size, help="height x width in pixels, such as 512x512")
    parser.add_argument("--replay", type=pathlib.Path, metavar="PNG", help="draw this one again")


def _inpaint(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--mask", type=pathlib.Path, help="white where to draw")
    where.add_argument("--box", type=_box, help="where to draw: x1,y1,x2,y2 in pixels")


def _outpaint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--box", type=_box,
        help="where the image stands in the new one: x1,y1,x2,y2 in pixels of that, by default"
        " its middle; any other shape is a --mask of `inpaint`, on a canvas with room around",
    )  # fmt: skip


def _tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-new-tokens", type=int, help="room for the answer")


def _caption(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--template", help="the text with gaps: ___ one token, {4} four")
    parser.add_argument("--words", nargs="+", default=[], help="that must occur, in this order")


def _ground(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("phrases", nargs="+", help="what to find")
    parser.add_argument("--out", type=pathlib.Path, help="the image with the boxes in it")


def _reflect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="most attempts at an image")


def _replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("replay", type=pathlib.Path, metavar="PNG", help="to draw again")
    parser.add_argument(
        "--image", "--picture", help="that it was drawn after; by default the file recorded"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out.png"))


def _chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", "--picture", help="on the table at first")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("turns"), help="a folder")


def _address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", default=None,
        help=f"a model folder, a run directory or a bundled model; by default {DEFAULT_MODEL}",
    )  # fmt: skip
    parser.add_argument(
        "--host", default="127.0.0.1", help="by default this machine alone reaches it"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument(
        "--max-waiting", type=int, default=8, metavar="N", help="requests; more are refused"
    )
    parser.add_argument("--warmup", action="store_true", help="compile before the first request")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print it for programs")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")


_CIRCLE = '"a red circle above a blue square"'
COMMANDS = {
    "generate": Command(
        "draw images", f"generate {_CIRCLE} --out out.png --save-steps steps.gif",
        (_prompt, _generate, _drawing, _batch, _sampling, _model),
    ),
    "edit": Command(
        "change an image as told", 'edit out.png "make the red circle green" --out edited.png',
        (_image, _prompt, _drawing, _batch, _sampling, _model),
    ),
    "inpaint": Command(
        "draw a part of an image anew",
        f"inpaint out.png {_CIRCLE} --box 0,0,48,48 --out inpainted.png",
        (_image, _prompt, _inpaint, _drawing, _batch, _sampling, _model),
    ),
    "outpaint": Command(
        "draw what surrounds an image",
        f"outpaint out.png {_CIRCLE} --box 16,16,80,80 --out outpainted.png",
        (_image, _prompt, _outpaint, _drawing, _batch, _sampling, _model),
    ),
    "reflect": Command(
        "draw, judge what was drawn, and draw again", f"reflect {_CIRCLE} --rounds 3 --out out.png",
        (_prompt, _reflect, _drawing, _batch, _sampling, _model),
    ),
    "ask": Command(
        "answer a question about an image", 'ask out.png "how many squares are there?"',
        (_image, _prompt, _tokens, _batch, _sampling, _model),
    ),
    "reason": Command(
        "answer a question step by step",
        'reason out.png "how many red things plus how many squares?"',
        (_image, _prompt, _tokens, _batch, _sampling, _model),
    ),
    "caption": Command(
        "describe an image, freely or in given words",
        'caption out.png --template "a ___ red circle and a ___ ___ square"',
        (_needed_image, _caption, _sampling, _model),
    ),
    "infill": Command(
        "fill the gaps of a text", 'infill "a red circle is ___ {2} blue square" --image out.png',
        (_prompt, _shown, _batch, _sampling, _model),
    ),
    "ground": Command(
        "find things in an image", 'ground out.png "red circle" "blue square" --out boxes.png',
        (_needed_image, _ground, _sampling, _model),
    ),
    "chat": Command(
        "do what each line of the input says: a task and its words",
        "chat --out turns < lines.txt", (_chat, _sampling, _model),
    ),
    "replay": Command(
        "draw an image again, bit for bit", "replay out.png --out again.png", (_replay, _model)
    ),
    "demo": Command("serve a page to play with", "demo --port 8000", (_address,)),
    "serve": Command(
        "serve OpenAI-shaped endpoints: /v1/images/generations, ...", "serve --port 8000",
        (_address,),
    ),
    "doctor": Command("say what is installed and what fits", "doctor", (_json,)),
}  # fmt: skip


def _parser(name: str) -> Parser:
    command = COMMANDS[name]
    parser = Parser(
        prog=f"sparse-lavida {name}",
        description=f"{command.does.capitalize()}.",
        epilog=f"example: sparse-lavida {command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for add in command.add:
        add(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
