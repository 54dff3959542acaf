# SPDX-License-Identifier: Apache-2.0
"""The arguments of the commands of `cli.py`: names, values, defaults and help."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparse_lavida_jax import config
from sparse_lavida_jax.apps import completion
from sparse_lavida_jax.apps.errors import DEFAULT_MODEL
from sparse_lavida_jax.data.files import expanded as _path
from sparse_lavida_jax.data.image_files import MOST_SCALE, SUFFIXES
from sparse_lavida_jax.inference.checks import LARGEST_SEED, MOST_IMAGES, SEEDS
from sparse_lavida_jax.inference.requests import ROUNDS
from sparse_lavida_jax.inference.warmup import REHEARSED
from sparse_lavida_jax.sampling import options
from sparse_lavida_jax.schema import LARGEST_SCALE

ADAPTERS = "adapters to add: folders, or ids on the hub, each with its weight, by default 1"


def _text(text: str) -> str:
    """Reads a value that may not be empty, as that of an unset shell variable would be."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: give a value, or leave it out")
    return text


def _layout(text: str) -> str:
    if _text(text).count("<LOC_") < 4:
        raise argparse.ArgumentTypeError(f"it has no box. It is a {_PLAN}")
    return text


def _whole(text: str) -> int:
    """Reads a whole number that 64 bits hold: Python does not write all larger ones."""
    if not -(2**63) <= (number := int(text)) < 2**63:
        raise ValueError(text)
    return number


def _size(text: str) -> tuple[int, int]:
    """Reads `512` or `512x768`, height first."""
    height, _, width = text.partition("x")
    return _whole(height), _whole(width or height)


def _box(text: str) -> tuple[float, ...]:
    """Reads `x1,y1,x2,y2`."""
    return tuple(map(float, text.split(",")))


def _crop(text: str) -> tuple[int, ...]:
    """Reads `x1,y1,x2,y2` in whole numbers."""
    x1, y1, x2, y2 = map(_whole, text.split(","))
    return x1, y1, x2, y2


def _scale(text: str) -> int:
    if not 1 <= (scale := _whole(text)) <= MOST_SCALE:
        raise ValueError(text)
    return scale


def _registers(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    counts = _whole(first), _whole(last) if last else -1
    if counts[0] < 0 or (last and not 0 <= counts[1] <= counts[0]):
        raise ValueError(text)
    return counts


def _settings(text: str) -> tuple[int, int | None]:
    """Reads `12` or `12:16`, steps and registers."""
    steps, _, registers = text.partition(":")
    return _whole(steps), _whole(registers) if registers else None


def _mesh(text: str) -> dict[str, int]:
    """Reads `fsdp=2,tensor=4`."""
    return {axis: _whole(size) for axis, size in (part.split("=") for part in text.split(","))}


# argparse names these in its messages.
_settings.__name__ = "number of steps such as 12, or 12:16 with the registers"
_whole.__name__ = "int"
_size.__name__, _box.__name__ = "size such as 512x512", "box such as 16,16,48,48"
_crop.__name__, _scale.__name__ = "part such as 16,16,80,80", f"scale from 1 to {MOST_SCALE}"
_registers.__name__ = "number of registers such as 64 or 64:8"
_mesh.__name__ = "mesh such as tensor=4 or fsdp=2,tensor=4"


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
    if default not in (None, []):
        help += f"; by default {default}"
    return group, names.split(), {"help": help, **how}


def _sampler(*presets: str) -> str:
    """Returns the help of `--sampler` with the presets of a task."""
    published = ", ".join(options.SAMPLERS)
    return f"how steps are made: {', '.join(presets)}; or as published: {published}; {_OWN}"


_EDGES = "X1,Y1,X2,Y2"
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
_PLAN = (
    "layout to follow, instead of the model's own: after each name the left, top, right and bottom"
    " of its box (bundled model: in 24ths), as in ' large red circle<LOC_4><LOC_8><LOC_8><LOC_12>'"
)
_OWN = "by default the model's own"
_LOCAL = "127.0.0.1"
_SEED = (
    f"seed of the first result, 0 to {LARGEST_SEED}, of which the remainder of {SEEDS} counts; the"
    " others count up from it; by default 0"
)
_TEMPERATURE = f"randomness of the draws, 0 to {LARGEST_SCALE}; 0 takes the most probable"
# By key: group, names and settings for `argparse`.
ARGUMENTS = {
    # Inputs of a task.
    "prompt": _argument("prompt", "the prompt, instruction, question or text", str, nargs="?"),
    "image": _argument("image", "the image: PNG, JPEG or WebP", str, nargs="?"),
    "needed_image": _argument("image", "the image: PNG, JPEG or WebP"),
    "shown": _argument("--image --picture", "the image that the text is about", metavar="FILE"),
    "phrases": _argument("phrases", "the things to find, one argument each", str, nargs="+"),
    "size": _argument(
        "--size", "pixels, height first, as 512x768; by default the largest", _size, metavar="HxW"
    ),
    "mask": _argument("--mask", _MASK, _path, group="hole", metavar="FILE"),
    "hole": _argument("--box", f"where to draw: {_BOX}", _box, group="hole", metavar=_EDGES),
    "place": _argument("--box", _PLACE, _box, metavar=_EDGES),
    "rounds": _argument(
        "--rounds", f"maximum number of attempts, 1 to {MOST_IMAGES}", _whole, ROUNDS, metavar="N"
    ),
    "max_new_tokens": _argument(
        "--max-new-tokens", "maximum length in tokens; by default as trained", _whole, metavar="N"
    ),
    "template": _argument("--template", "the text with gaps: ___ is one token, {4} is four"),
    "words": _argument("--words", "words that must occur, in this order", str, [], nargs="+"),
    "batch": _argument("--batch", _LINES, _path, metavar="FILE"),
    # Outputs.
    "out": _argument("--out", _OUT, _path, Path("out.png"), metavar="FILE"),
    "boxes": _argument(
        "--out", "file to draw the boxes into; by default none is written", _path, metavar="FILE"
    ),
    "turns": _argument(
        "--out", "folder for the images, one file per turn", _path, Path("turns"), metavar="FOLDER"
    ),
    "crop": _argument(
        "--crop", f"write only this part of each image: {_BOX}", _crop, metavar=_EDGES
    ),
    "scale": _argument(
        "--scale",
        "save every pixel as NxN for a viewer's eye; a PNG is read again as it was drawn; by"
        " default 4 if both sides are under 128 pixels, else 1",
        _scale,
        metavar="N",
    ),
    "grid": _argument("--grid", "put all images on one sheet", None),
    "save_steps": _argument(
        "--save-steps", "write an animation of how the first image unmasks", _path, metavar="GIF"
    ),
    "kernels": _argument("--kernels", "check the attention kernel on this device", None),
    "json": _argument("--json", "print each result as a line of JSON", None),
    "json_full": _argument(
        "--json-full", "the same, with the settings, the checkpoint and the seconds", None
    ),
    # Sampling.
    "steps": _argument(
        "--steps --num-inference-steps",
        f"steps of an image or of each text block, 1 to the number of its tokens; {_OWN}",
        _whole,
        metavar="N",
    ),
    "sampler": _argument(
        "--sampler", _sampler(*config.PRESETS, *config.TEXT_PRESETS), metavar="NAME"
    ),
    "image_sampler": _argument("--sampler", _sampler(*config.PRESETS), metavar="NAME"),
    "registers": _argument(
        "--registers",
        "registers in each step, at most (and by default) as in training; 64:8 falls from 64 to 8",
        _registers,
        metavar="M[:END]",
    ),
    "temperature": _argument("--temperature", f"{_TEMPERATURE}; {_OWN}", float, metavar="NUMBER"),
    "layout_temperature": _argument(
        "--layout-temperature",
        f"randomness of the layout that is written before an image, 0 to {LARGEST_SCALE}; {_OWN}",
        float,
        metavar="NUMBER",
    ),
    "image_steps": _argument(
        "--steps --num-inference-steps",
        f"steps of an image, 1 or more; {_OWN}",
        _whole,
        metavar="N",
    ),
    "image_temperature": _argument(
        "--temperature", f"for images: {_TEMPERATURE}; {_OWN}", float, metavar="NUMBER"
    ),
    "quantize": _argument(
        "--quantize",
        f"multiply matrices in 8 bits: {', '.join(config.QUANTIZED)}; by default not",
        metavar="KIND",
    ),
    "guidance": _argument(
        "--guidance --guidance-scale",
        f"scale of classifier-free guidance, 0 (none) to {LARGEST_SCALE}; {_OWN}",
        float,
        metavar="NUMBER",
    ),
    "order": _argument(
        "--order", f"order of the cells: stratified, halton, random, raster or confidence; {_OWN}"
    ),
    "plan": _argument("--plan", _PLAN, _layout, group="plan", metavar="LAYOUT"),
    "no_plan": _argument("--no-plan", "draw without a layout", None, group="plan"),
    "num_images": _argument(
        "--num-images", f"images per prompt, 1 to {MOST_IMAGES}", _whole, 1, metavar="N"
    ),
    "vq_dtype": _argument(
        "--vq-dtype",
        f"number type of the image decoder: {' or '.join(config.VQ_DTYPES)}; {_OWN}",
        metavar="DTYPE",
    ),
    "seed": _argument("--seed", _SEED, int),
    # The model and its server.
    "checkpoint": _argument("--checkpoint", _CHECKPOINT, metavar="MODEL"),
    "checked": _argument("checkpoint", _CHECKED, str, nargs="?", metavar="MODEL"),
    "adapters": _argument("--adapters", ADAPTERS, metavar="FOLDER[:WEIGHT],..."),
    "convert": _argument(
        "--convert", "convert a released LaViDa-O from the hub first; this is done only once", None
    ),
    "mesh": _argument("--mesh", _OVER, _mesh, metavar="AXIS=SIZE,..."),
    "batch_size": _argument(
        "--batch-size", "maximum rows decoded together, 1 to 1024", _whole, 16, metavar="N"
    ),
    "quiet": _argument("--quiet", "print nothing but results and errors", None),
    "debug": _argument("--debug", "show where in the program an error occurs", None),
    "replay": _argument("--replay", "draw the image of this PNG again", _path, metavar="PNG"),
    "replayed": _argument("replay", "the image to draw again", _path, metavar="PNG"),
    "source": _argument(
        "--image --picture", "source image of the edit; by default the recorded one", metavar="FILE"
    ),
    "first_image": _argument("--image --picture", "image for the first line", metavar="FILE"),
    "host": _argument("--host", "address; the default is for this machine alone", _text, _LOCAL),
    "port": _argument("--port", "port to listen on, 0 to 65535; 0 takes a free one", _whole, 8000),
    "max_waiting": _argument(
        "--max-waiting", "maximum waiting requests, 0 to 100000; more are refused", _whole, 64
    ),
    "longest_wait": _argument(
        "--longest-wait",
        "seconds that a request waits for others to share its batch, 0 to 60",
        float,
        0.5,
        metavar="SECONDS",
    ),
    "programs": _argument(
        "--programs",
        "kinds of batches whose programs stay in memory, besides those of the warm-up, 1 to 100000",
        _whole,
        32,
        metavar="N",
    ),
    "content_cache_gb": _argument(
        "--content-cache-gb",
        "memory, in 10**9 bytes, for images and prompts that come again, 0 (none) to 10000; by"
        " default a twentieth of the device's memory, at most 4",
        float,
        metavar="GB",
    ),
    "only": _argument(
        "--only",
        "accept only these numbers of steps and registers for images, besides the model's own; if"
        " none are given, only the model's own settings",
        _settings,
        nargs="*",
        metavar="STEPS[:REGISTERS]",
    ),
    "grace": _argument(
        "--grace",
        "seconds for running requests to finish, 0 to 86400",
        _whole,
        5,
        metavar="SECONDS",
    ),
    "api_key": _argument(
        "--api-key",
        "key that clients must send; by default $SPARSE_LAVIDA_API_KEY, or none",
        metavar="KEY",
    ),
    "insecure": _argument("--insecure", "serve other machines without a key", None),
    "shell": _argument("shell", "the shell", choices=completion.SHELLS),
    "warmup": (
        "",
        ["--warmup"],
        {
            "action": argparse.BooleanOptionalAction,
            "default": None,
            "help": "compile usual requests in the background first; /ready says when that is done;"
            " by default serve does, and demo on a GPU or TPU",
        },
    ),
    "compilation_cache": _argument(
        "--compilation-cache",
        "folder for compiled programs, by default in ~/.cache; empty: none are kept",
        str,
        metavar="FOLDER",
    ),
    "rehearsed": _argument(
        "--tasks",
        f"what to warm up: {', '.join(REHEARSED)}; by default all that the model can do",
        _text,
        [],
        nargs="+",
        metavar="TASK",
    ),
    "sizes": _argument(
        "--size",
        "pixels of images to draw, height first, as 512x768; by default the largest",
        _size,
        [],
        nargs="+",
        metavar="HxW",
    ),
    "rows": _argument(
        "--batch-size",
        "rows that are decoded together, and all fewer, 1 to 1024",
        _whole,
        1,
        metavar="N",
    ),
}
