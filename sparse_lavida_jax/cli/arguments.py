# SPDX-License-Identifier: Apache-2.0
"""The arguments of the commands: names, values, defaults and help."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparse_lavida_jax import config
from sparse_lavida_jax.cli.completion import SHELLS
from sparse_lavida_jax.cli.usage_errors import UsageError
from sparse_lavida_jax.data.files import expanded as _path
from sparse_lavida_jax.data.image_files import MOST_SCALE, SUFFIXES
from sparse_lavida_jax.inference.checks import LARGEST_SEED, MOST_IMAGES, SEEDS
from sparse_lavida_jax.inference.requests import BRANCHES, ROUNDS
from sparse_lavida_jax.inference.warmup import REHEARSED
from sparse_lavida_jax.models import quantize
from sparse_lavida_jax.sampling import options
from sparse_lavida_jax.sampling.content_cache import MOST_GB
from sparse_lavida_jax.schema import LARGEST_SCALE

DEFAULT_MODEL = "scenes"  # bundled
MODEL_NAMES = "a model folder, a run directory, a bundled model, or one on the hub (org/name)"
# Tasks of `sample`, with their names in the other commands.
SAMPLE_TASKS = {"draw": "generate", "edit": "edit", "ask": "ask", "point": "ground"}
MOST_ROWS = 1024  # of a batch


def _text(text: str) -> str:
    """Reads a value that may not be empty, as that of an unset shell variable would be."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: give a value, or leave it out")
    return text


def _reader(what: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a type for `argparse`, which says what a value must be if `read` refuses it."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what}") from error

    return value


def _int(text: str) -> int:
    """Reads a whole number that 64 bits hold: Python refuses to print some larger ones."""
    if not -(2**63) <= (number := int(text)) < 2**63:
        raise ValueError(text)
    return number


def _above_0(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise ValueError(text)
    return number


def _height_width(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    return _int(height), _int(width or height)


def _edges(text: str) -> tuple[int, ...]:
    x1, y1, x2, y2 = map(_int, text.split(","))
    return x1, y1, x2, y2


def _enlargement(text: str) -> int:
    if not 1 <= (scale := _int(text)) <= MOST_SCALE:
        raise ValueError(text)
    return scale


def _first_last(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    counts = _int(first), _int(last) if last else -1
    if counts[0] < 0 or (last and not 0 <= counts[1] <= counts[0]):
        raise ValueError(text)
    return counts


def _steps_registers(text: str) -> tuple[int, int | None]:
    steps, _, registers = text.partition(":")
    return _int(steps), _int(registers) if registers else None


def _axes(text: str) -> dict[str, int]:
    return {axis: _int(size) for axis, size in (part.split("=") for part in text.split(","))}


def _layout(text: str) -> str:
    if _text(text).count("<LOC_") < 4:
        raise argparse.ArgumentTypeError(f"it has no box. It is a {_LAYOUT}")
    return text


def place(text: str) -> str:
    """Reads a path or a name; expands `~`, which shells leave as it is after `=`."""
    return str(_path(text)) if "~" in text else text


def _converted_dtype(text: str) -> str:
    if text not in ("float32", "bfloat16"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither float32 nor bfloat16; for 8 bits, convert as released, and then"
            " `sparse-lavida export FOLDER NEW --dtype=int8`"
        )
    return text


_whole, _number = _reader("whole number", _int), _reader("number", float)
_size = _reader("size such as 512x512", _height_width)
_box = _reader("box such as 16,16,48,48", lambda text: tuple(map(float, text.split(","))))
_crop = _reader("part such as 16,16,80,80", _edges)
_scale = _reader(f"scale from 1 to {MOST_SCALE}", _enlargement)
_registers = _reader("number of registers such as 64 or 64:8", _first_last)
_settings = _reader("number of steps such as 12, or 12:16 with the registers", _steps_registers)
_mesh = _reader("mesh such as tensor=4 or fsdp=2,tensor=4", _axes)
# What the help writes for a value, by its type.
METAVARS = {
    _whole: "N", _number: "NUMBER", _path: "FILE", place: "PATH", _size: "HxW", _scale: "N",
    _box: "X1,Y1,X2,Y2", _crop: "X1,Y1,X2,Y2", _registers: "M[:END]", _mesh: "AXIS=SIZE,...",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of commands, as `argparse` takes it.

    Attributes:
        names: separated by spaces; one without dashes is positional.
        help: what it means.
        type: reads its value; None: it is a flag without a value.
        default, nargs, choices, action: see `argparse`.
        metavar: what the help writes for its value; by default as for its type.
        group: a command line may contain at most one argument of a group.
        needed: whether a command line must contain it.
        bounds: its smallest and largest value.
    """

    names: str
    help: str
    type: Callable[[str], Any] | None = _text
    default: Any = None
    _: dataclasses.KW_ONLY
    metavar: str | None = None
    nargs: str | None = None
    choices: Sequence[str] | None = None
    action: Any = None
    group: str = ""
    needed: bool = False
    bounds: tuple[int, int] | None = None

    @property
    def is_option(self) -> bool:
        """Whether it is named, and not positional."""
        return self.names.startswith("-")

    @property
    def key(self) -> str:
        """Its name in the parsed arguments."""
        return self.names.split()[0].lstrip("-").replace("-", "_")

    def add_to(self, parser: Any, *, is_hidden: bool = False) -> None:
        """Adds it to a parser, or to a group of one."""
        how = {name: getattr(self, name) for name in ("metavar", "nargs", "choices", "action")}
        how["metavar"] = self.metavar or METAVARS.get(self.type)
        how = {name: value for name, value in how.items() if value is not None}
        if self.type is not None:
            how |= {"type": self.type, "default": self.default}
        elif self.action is None:
            how["action"] = "store_true"
        meaning = f"{self.help}; by default {self.default}" if self.default else self.help
        parser.add_argument(
            *self.names.split(), help=argparse.SUPPRESS if is_hidden else meaning, **how
        )

    def check(self, value: Any) -> None:
        """Refuses a value outside the bounds.

        Raises:
            UsageError: names the argument, the value and the bounds.
        """
        if self.bounds and value is not None and not self.bounds[0] <= value <= self.bounds[1]:
            least, most = self.bounds
            allowed = f"{least} to {most}{'; 0 takes a free one' * (self.key == 'port')}"
            raise UsageError(setting=self.key, value=str(value), allowed=allowed)


def _sampler(*presets: str) -> str:
    """Returns the help of `--sampler` with the presets of a task."""
    published = ", ".join(options.PUBLISHED)
    return f"how steps are made: {', '.join(presets)}; or as published: {published}; {_OWN}"


_BOX = "left, top, right and bottom edge in pixels (before --scale)"
_MASK = "where to draw: an image of the same size that is white there, and black elsewhere"
_PLACE = (
    f"where the image goes: {_BOX} of the new one; by default its middle, at half its size if the"
    " image is not smaller. For other shapes, use inpaint with --mask on a larger image"
)
_LINES = (
    "one prompt per line (.txt), or one object per line (.jsonl):"
    ' {"prompt": ..., "image": ..., "seed": ..., "temperature": ..., "guidance": ...}; only the'
    " prompt is required"
)
_CHECKPOINT = (
    "the model: a folder, a run directory, a bundled model, or org/name on the Hugging Face hub;"
    f" by default {DEFAULT_MODEL} (for replay, the model that the PNG names)"
)
_CHECKED = (
    f"the model to check: a folder, a run directory or a bundled model; by default {DEFAULT_MODEL}"
)
_OVER = (
    "split the model over all devices, as tensor=4 or fsdp=2,tensor=4; the axes are data, fsdp and"
    " tensor, and a size of -1 takes the rest; by default one device"
)
_OUT = (
    f"the image file to write ({', '.join(SUFFIXES)}); several images get numbers; folders are"
    " created only below the current one"
)
_LAYOUT = (
    "layout to follow, instead of the model's own: after each name the left, top, right and bottom"
    " of its box (bundled model: in 24ths), as in ' large red circle<LOC_4><LOC_8><LOC_8><LOC_12>'"
)
_HELD = (
    "the layout, or a part of it with gaps: {3} is a name, {4} a box, and ___ at the end whatever"
    " follows, as in ' large red circle<LOC_4><LOC_8><LOC_8><LOC_12>___'"
)
_OWN = "by default the model's own"
_AT = (
    "where branches begin: a step of the layout or the image, as layout:8, or a share of its tokens"
    " or cells, as image:0.5; by default in the layout, if there is one"
)
_LOCAL = "127.0.0.1"
FORMATS = ("safetensors", "orbax")
_SEED = (
    f"seed of the first result, 0 to {LARGEST_SEED}, of which the remainder of {SEEDS} counts; the"
    " others count up from it; by default 0"
)
_BRANCH_SEED = (
    "seed of the first branch, from its step on; the others count up from it; by default the one"
    " after the seed of the image"
)
_TEMPERATURE = f"randomness of the draws, 0 to {LARGEST_SCALE}; 0 takes the most probable"
ARGUMENTS = {
    # Inputs of a task.
    "prompt": Argument("prompt", "the prompt, instruction, question or text", str, nargs="?"),
    "image": Argument("image", "the image: PNG, JPEG or WebP", str, nargs="?"),
    "needed_image": Argument("image", "the image: PNG, JPEG or WebP"),
    "shown": Argument("--image", "the image that the text is about", metavar="FILE"),
    "phrases": Argument("phrases", "the things to find, one argument each", str, nargs="+"),
    "size": Argument("--size", "pixels, height first, as 512x768; by default the largest", _size),
    "mask": Argument("--mask", _MASK, _path, group="hole"),
    "hole": Argument("--box", f"where to draw: {_BOX}", _box, group="hole"),
    "place": Argument("--box", _PLACE, _box),
    "rounds": Argument(
        "--rounds", f"maximum number of attempts, 1 to {MOST_IMAGES}", _whole, ROUNDS
    ),
    "max_new_tokens": Argument(
        "--max-new-tokens", "maximum length in tokens; by default as trained", _whole
    ),
    "template": Argument("--template", "the text with gaps: ___ is one token, {4} is four"),
    "held_words": Argument(
        "--words", "the words, or a part of them with gaps: ___ is one token, {4} is four", str
    ),
    "held_layout": Argument("--layout", _HELD, str),
    "held_image": Argument(
        "--image", "the image, of which --mask or --box is to be drawn", metavar="FILE"
    ),
    "words": Argument("--words", "words that must occur, in this order", str, [], nargs="+"),
    "batch": Argument("--batch", _LINES, _path),
    # Outputs.
    "out": Argument("--out", _OUT, _path, Path("out.png")),
    "boxes": Argument("--out", "file to draw the boxes into; by default none is written", _path),
    "turns": Argument(
        "--out", "folder for the images, one file per turn", _path, Path("turns"), metavar="FOLDER"
    ),
    "crop": Argument("--crop", f"write only this part of each image: {_BOX}", _crop),
    "scale": Argument(
        "--scale",
        "save every pixel as NxN for a viewer's eye; a PNG is read again as it was drawn; by"
        " default 4 if both sides are under 128 pixels, else 1",
        _scale,
    ),
    "grid": Argument("--grid", "put all images on one sheet", None),
    "save_steps": Argument(
        "--save-steps", "write an animation of how the first image unmasks", _path, metavar="GIF"
    ),
    # Memory of training.
    "device_gb": Argument(
        "--device-gb",
        "memory of a device in GiB (2**30 bytes, a vendor's GB); an H200 has 141",
        _reader("number above 0", _above_0),
        141.0,
        metavar="GIB",
    ),
    "devices": Argument(
        "--devices",
        "devices that train.mesh is laid over; by default as many as it names",
        _whole,
        bounds=(1, 1_000_000),
    ),
    "text_tokens": Argument(
        "--text-tokens", "text tokens of an example", _whole, 1024, bounds=(1, 1_000_000)
    ),
    "image_tokens": Argument(
        "--image-tokens",
        "image tokens of an example; by default those of the longest row of the config",
        _whole,
        bounds=(0, 1_000_000),
    ),
    "kernels": Argument("--kernels", "check the attention kernel on this device", None),
    "json": Argument("--json", "print each result as a line of JSON", None),
    "json_full": Argument(
        "--json-full", "the same, with the settings, the checkpoint and the seconds", None
    ),
    # Sampling.
    "steps": Argument(
        "--steps --num-inference-steps",
        f"steps of an image or of each text block, 1 to the number of its tokens; {_OWN}",
        _whole,
        group="steps",
    ),
    "sampler": Argument(
        "--sampler", _sampler(*config.PRESETS, *config.TEXT_PRESETS), metavar="NAME"
    ),
    "image_sampler": Argument("--sampler", _sampler(*config.PRESETS), metavar="NAME"),
    "registers": Argument(
        "--registers",
        "registers in each step, at most (and by default) as in training; 64:8 falls from 64 to 8",
        _registers,
    ),
    "temperature": Argument("--temperature", f"{_TEMPERATURE}; {_OWN}", _number),
    "layout_temperature": Argument(
        "--layout-temperature",
        f"randomness of the layout that is written before an image, 0 to {LARGEST_SCALE}; {_OWN}",
        _number,
    ),
    "image_steps": Argument(
        "--steps --num-inference-steps", f"steps of an image, 1 or more; {_OWN}", _whole
    ),
    "image_temperature": Argument("--temperature", f"for images: {_TEMPERATURE}; {_OWN}", _number),
    "quantize": Argument(
        "--quantize",
        f"multiply matrices in 8 bits: {', '.join(config.QUANTIZED)}; by default not",
        metavar="KIND",
    ),
    "guidance": Argument(
        "--guidance --guidance-scale",
        f"scale of classifier-free guidance, 0 (none) to {LARGEST_SCALE}; {_OWN}",
        _number,
    ),
    "order": Argument(
        "--order",
        "order of the cells: stratified, halton, random, raster, confidence or layout: first a"
        f" cell of each thing of the layout; {_OWN}",
    ),
    "layout": Argument("--layout", _LAYOUT, _layout, group="layout", metavar="LAYOUT"),
    "no_layout": Argument("--no-layout", "draw without a layout", None, group="layout"),
    "quality": Argument(
        "--quality",
        f"instead of --steps: {', '.join(options.QUALITIES)}; medium is the model's own plan",
        choices=options.QUALITIES,
        group="steps",
    ),
    "num_images": Argument("--num-images", f"images per prompt, 1 to {MOST_IMAGES}", _whole, 1),
    "best_of": Argument(
        "--best-of",
        f"most tries to draw an image that the model accepts, 1 to {MOST_IMAGES}",
        _whole,
    ),
    "margins": Argument(
        "--margins",
        "record how far each draw was above the next best; one more pass per stage",
        None,
    ),
    "revisions": Argument(
        "--revisions",
        f"how many times cells of a finished image are drawn again, with the others known; {_OWN}",
        _whole,
    ),
    "vq_dtype": Argument(
        "--vq-dtype",
        f"number type of the image decoder: {' or '.join(config.VQ_DTYPES)}; {_OWN}",
        metavar="DTYPE",
    ),
    "seed": Argument("--seed", _SEED, _reader("whole number", int)),
    "style_seed": Argument(
        "--style-seed",
        f"seed of the style that cells share, 0 to {LARGEST_SEED}, if the model has a style code;"
        " by default that of each image",
        _reader("whole number", int),
    ),
    # The model and its server.
    "checkpoint": Argument("--checkpoint", _CHECKPOINT, metavar="MODEL"),
    "checked": Argument("checkpoint", _CHECKED, str, nargs="?", metavar="MODEL"),
    "adapters": Argument(
        "--adapters",
        "adapters to add: folders, or ids on the hub, each with its weight, by default 1",
        metavar="FOLDER[:WEIGHT],...",
    ),
    "convert": Argument(
        "--convert", "convert a released LaViDa-O from the hub first; this is done only once", None
    ),
    "mesh": Argument("--mesh", _OVER, _mesh),
    "batch_size": Argument(
        "--batch-size",
        f"maximum rows decoded together, 1 to {MOST_ROWS}",
        _whole,
        16,
        bounds=(1, MOST_ROWS),
    ),
    "quiet": Argument("--quiet", "print nothing but results and errors", None),
    "debug": Argument("--debug", "show where in the program an error occurs", None),
    "replay": Argument("--replay", "draw the image of this PNG again", _path, metavar="PNG"),
    "replayed": Argument("replay", "the image to draw again", _path, metavar="PNG"),
    "proved": Argument("replay", "the image to prove", _path, metavar="PNG"),
    "captions": Argument(
        "--caption", "what the image may show; give it again to rank several", action="append"
    ),
    "map": Argument(
        "--out", "file for a map of the bits of the cells; by default none is written", _path
    ),
    "branched": Argument("replay", "the image to branch", _path, metavar="PNG"),
    "at": Argument("--at", _AT, str, metavar="STAGE:PLACE"),
    "branch_seed": Argument("--seed", _BRANCH_SEED, _reader("whole number", int)),
    "branches": Argument("--num-images", f"branches, 1 to {MOST_IMAGES}", _whole, BRANCHES),
    "source": Argument(
        "--image", "source image of the edit; by default the recorded one", metavar="FILE"
    ),
    "first_image": Argument("--image", "image for the first line", metavar="FILE"),
    "host": Argument("--host", "address; the default is for this machine alone", _text, _LOCAL),
    "port": Argument(
        "--port",
        "port to listen on, 0 to 65535; 0 takes a free one",
        _whole,
        8000,
        bounds=(0, 65535),
    ),
    "max_waiting": Argument(
        "--max-waiting",
        "maximum waiting requests, 0 to 100000; more are refused",
        _whole,
        64,
        bounds=(0, 100_000),
    ),
    "longest_wait": Argument(
        "--longest-wait",
        "seconds that a request waits for others to share its batch, 0 to 60",
        _number,
        0.5,
        metavar="SECONDS",
        bounds=(0, 60),
    ),
    "programs": Argument(
        "--programs",
        "kinds of batches whose programs stay in memory, besides those of the warm-up, 1 to 100000",
        _whole,
        32,
        bounds=(1, 100_000),
    ),
    "content_cache_gb": Argument(
        "--content-cache-gb",
        "memory, in 10**9 bytes, for images and prompts that come again, 0 (none) to 10000; by"
        " default a twentieth of the device's memory, at most 4",
        _number,
        metavar="GB",
        bounds=(0, MOST_GB),
    ),
    "only": Argument(
        "--only",
        "accept only these numbers of steps and registers for images, besides the model's own; if"
        " none are given, only the model's own settings",
        _settings,
        nargs="*",
        metavar="STEPS[:REGISTERS]",
    ),
    "grace": Argument(
        "--grace",
        "seconds for running requests to finish, 0 to 86400",
        _whole,
        5,
        metavar="SECONDS",
        bounds=(0, 86_400),
    ),
    "api_key": Argument(
        "--api-key",
        "key that clients must send; by default $SPARSE_LAVIDA_API_KEY, or none",
        metavar="KEY",
    ),
    "insecure": Argument("--insecure", "serve other machines without a key", None),
    "shell": Argument("shell", "the shell", choices=SHELLS),
    "warmup": Argument(
        "--warmup",
        "compile usual requests in the background first; /ready says when that is done; by default"
        " serve does, and demo on a GPU or TPU",
        None,
        action=argparse.BooleanOptionalAction,
    ),
    "compilation_cache": Argument(
        "--compilation-cache",
        "folder for compiled programs, by default in ~/.cache; empty: none are kept",
        str,
        metavar="FOLDER",
    ),
    "rehearsed": Argument(
        "--tasks",
        f"what to warm up: {', '.join(REHEARSED)}; by default all that the model can do",
        _text,
        [],
        nargs="+",
        metavar="TASK",
    ),
    "sizes": Argument(
        "--size",
        "pixels of images to draw, height first, as 512x768; by default the largest",
        _size,
        [],
        nargs="+",
    ),
    "rows": Argument(
        "--batch-size",
        f"largest batch to compile for, in rows, with all smaller ones, 1 to {MOST_ROWS}",
        _whole,
        1,
        bounds=(1, MOST_ROWS),
    ),
    # The modes of `main.py`.
    "config": Argument(
        "--config",
        "config file, as configs/scenes.py or, with a name, configs/evaluate.py:dpg",
        place,
    ),
    "workdir": Argument(
        "--workdir", "folder of the run, for its states and results; by default runs/NAME", place
    ),
    "data": Argument("--data", "prepared folder to train on, without a config", place),
    "init_from": Argument(
        "--init-from", "with --data: the model to start from; by default, none", place
    ),
    "profile_steps": Argument(
        "--profile-steps", "steps to trace, as 10:13 for 10 to 12, into profile/ of the run", str
    ),
    "stopped_exit_code": Argument(
        "--stopped-exit-code",
        "exit code of training that SIGTERM stopped, 0 to 255; by default 0",
        _whole,
        bounds=(0, 255),
    ),
    "distributed": Argument(
        "--distributed", "train in several processes, which the environment describes", None
    ),
    "coordinator": Argument("--coordinator", "address of process 0, as ADDRESS:PORT", str),
    "num_processes": Argument(
        "--num-processes", "number of processes that train together, 1 or more", _whole
    ),
    "process_id": Argument("--process-id", "number of this process, from 0", _whole),
    "sampled_image": Argument(
        "--image", "the image to edit or to look at: PNG, JPEG or WebP", place
    ),
    "sampled_out": Argument(
        "--out", "file for the image that is drawn, by default image.png", place
    ),
    "task": Argument(
        "--task",
        "what to do; draw edits if there is an image",
        str,
        "draw",
        choices=tuple(SAMPLE_TASKS),
    ),
    "shard": Argument(
        "--shard", "items to evaluate: i/n takes every n-th, from i (0 to n-1); by default all", str
    ),
    "format": Argument(
        "--format", "file format of the parameters, by default safetensors", str, choices=FORMATS
    ),
    "exported_format": Argument(
        "--format",
        "file format of the parameters, by default safetensors. With it, export writes a model"
        " folder instead of one for PyTorch",
        str,
        choices=FORMATS,
    ),
    "converted_dtype": Argument(
        "--dtype",
        "number type of the parameters that are written; by default as they are",
        _converted_dtype,
        metavar="{float32,bfloat16}",
    ),
    "dtype": Argument(
        "--dtype",
        "number type of the parameters that are written; by default as they are. With it, export"
        " writes a model folder; int8 and float8 apply only to the matrices in the layers",
        str,
        choices=("float32", "bfloat16", *quantize.DTYPES),
    ),
    "image_tokenizer": Argument(
        "--image-tokenizer", "image tokenizer to use, by default one trained on the images", place
    ),
    "tokenizer": Argument(
        "--tokenizer", "text tokenizer to use, by default one that is trained on the texts", place
    ),
    "dry_run": Argument(
        "--dry-run", "read all that would be prepared, say what would be used, write nothing", None
    ),
    "fits_json": Argument("--json", "print the memory in bytes as JSON", None),
    "report_json": Argument("--json", "print what was used and left out as JSON", None),
}
