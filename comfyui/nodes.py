# SPDX-License-Identifier: Apache-2.0
"""The nodes: each sends one request per image of its batch, all at the same time."""

import concurrent.futures
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from . import files
from .client import Server, address_of

TOGETHER = 16  # simultaneous requests: the server's usual batch
SEEDS = 2**31  # how many the model tells apart
CATEGORY = "Sparse-LaViDa"
SERVER = ("SPARSE_LAVIDA_SERVER", {"tooltip": "What the node Sparse-LaViDa Connect returns."})
IMAGE = ("IMAGE", {})
SEED = (
    "INT",
    {
        "default": 0,
        "min": 0,
        "max": 2**64 - 1,  # as of ComfyUI's own nodes
        "control_after_generate": True,
        "tooltip": "Of the first image; the others count up. Seeds 2**31 apart are the same.",
    },
)
SETTINGS = {
    "steps": ("INT", {"default": 0, "min": 0, "max": 65536, "tooltip": "0: the model's own."}),
    "guidance": (
        "FLOAT",
        {
            "default": -1.0,
            "min": -1.0,
            "max": 100.0,
            "step": 0.1,
            "tooltip": "0: none; -1: the model's own.",
        },
    ),
}


def text(tooltip: str, default: str = "") -> tuple[str, dict[str, Any]]:
    """Returns a multi-line text input."""
    return "STRING", {"multiline": True, "default": default, "tooltip": tooltip}


def size(name: str) -> tuple[str, dict[str, Any]]:
    """Returns an input for a size in pixels."""
    told = f"The {name} in pixels; 0 in both: the model's own."
    return "INT", {"default": 0, "min": 0, "max": 16384, "tooltip": told}


class Connect:
    """Finds a running server, which holds the model: `sparse-lavida serve`."""

    CATEGORY = CATEGORY
    FUNCTION = "connect"
    RETURN_TYPES = ("SPARSE_LAVIDA_SERVER", "STRING")
    RETURN_NAMES = ("server", "model")

    @classmethod
    def INPUT_TYPES(cls):
        seconds = {"default": 600, "min": 1, "max": 86400, "tooltip": "Seconds to wait."}
        return {
            "required": {"address": ("STRING", {"default": "http://127.0.0.1:8000"})},
            "optional": {"timeout": ("INT", seconds)},
        }

    def connect(self, address: str, timeout: int = 600):
        server = Server(address_of(address), timeout)
        return server, server.get("/v1/models")["data"][0]["id"]


class Generate:
    """Draws images from a prompt."""

    CATEGORY = CATEGORY
    FUNCTION = "generate"
    RETURN_TYPES = ("IMAGE",)
    RETURN_NAMES = ("images",)

    @classmethod
    def INPUT_TYPES(cls):
        count = {"default": 1, "min": 1, "max": 64, "tooltip": "How many images."}
        return {
            "required": {
                "server": SERVER,
                "prompt": text("What to draw.", "a red circle above a blue square"),
                "seed": SEED,
            },
            "optional": {
                "count": ("INT", count),
                "width": size("width"),
                "height": size("height"),
                **SETTINGS,
            },
        }

    def generate(self, server, prompt, seed, count=1, width=0, height=0, steps=0, guidance=-1.0):
        asked = {"prompt": prompt, **_settings(steps, guidance)}
        if width or height:
            asked["size"] = f"{width}x{height}"

        def draw(row: int) -> dict[str, Any]:
            return server.post("/v1/images/generations", {**asked, "seed": _seed(seed, row)})

        return (files.images_of(_each(count, draw)),)


class Edit:
    """Edits each image as instructed."""

    CATEGORY = CATEGORY
    FUNCTION = "edit"
    RETURN_TYPES = ("IMAGE",)
    RETURN_NAMES = ("images",)

    @classmethod
    def INPUT_TYPES(cls):
        told = text("What to change.", "make the red circle green")
        return {
            "required": {"server": SERVER, "images": IMAGE, "instruction": told, "seed": SEED},
            "optional": SETTINGS,
        }

    def edit(self, server, images, instruction, seed, steps=0, guidance=-1.0):
        return (_changed(server, images, None, instruction, seed, steps, guidance),)


class Inpaint:
    """Redraws the masked part of each image."""

    CATEGORY = CATEGORY
    FUNCTION = "inpaint"
    RETURN_TYPES = ("IMAGE",)
    RETURN_NAMES = ("images",)

    @classmethod
    def INPUT_TYPES(cls):
        where = ("MASK", {"tooltip": "Where to draw; of the size of the images, one or as many."})
        told = text("What the whole image shows.", "a red circle above a blue square")
        return {
            "required": {
                "server": SERVER,
                "images": IMAGE,
                "mask": where,
                "prompt": told,
                "seed": SEED,
            },
            "optional": SETTINGS,
        }

    def inpaint(self, server, images, mask, prompt, seed, steps=0, guidance=-1.0):
        return (_changed(server, images, mask, prompt, seed, steps, guidance),)


class Ask:
    """Answers a question, about each image if there are any."""

    CATEGORY = CATEGORY
    FUNCTION = "ask"
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("answers",)
    OUTPUT_IS_LIST = (True,)

    @classmethod
    def INPUT_TYPES(cls):
        most = {"default": 0, "min": 0, "max": 65536, "tooltip": "0: room for a short answer."}
        return {
            "required": {
                "server": SERVER,
                "question": text("The question.", "how many squares are there?"),
                "seed": SEED,
            },
            "optional": {"images": IMAGE, "max_tokens": ("INT", most)},
        }

    def ask(self, server, question, seed, images=None, max_tokens=0):
        asked = {"max_tokens": max_tokens} if max_tokens else {}
        shown = [None] if images is None else files.arrays(images)

        def answer(row: int) -> str:
            return _said(server, question, shown[row], {**asked, "seed": _seed(seed, row)})

        return (_each(len(shown), answer),)


class Ground:
    """Finds things in an image; the result can be used as a mask to inpaint."""

    CATEGORY = CATEGORY
    FUNCTION = "ground"
    RETURN_TYPES = ("MASK", "STRING")
    RETURN_NAMES = ("masks", "boxes")

    @classmethod
    def INPUT_TYPES(cls):
        told = text("What to find, one a line.", "blue square")
        return {"required": {"server": SERVER, "image": IMAGE, "phrases": told, "seed": SEED}}

    def ground(self, server, image, phrases, seed):
        shown = files.arrays(image)
        if len(shown) != 1:
            raise ValueError(f"things are found in one image, and {len(shown)} were given.")
        said = _said(server, phrases, shown[0], {"task": "ground", "seed": _seed(seed)})
        boxes = [found["bbox_2d"] for found in json.loads(said)]
        masks = np.zeros((len(boxes), *shown.shape[1:3]), np.float32)
        for number, box in enumerate(boxes):
            if box:  # x1, y1, x2, y2 in pixels; null where nothing was found
                left, top, right, bottom = map(round, box)
                masks[number, top:bottom, left:right] = 1
        return files.tensor(masks), said


NODES = (Connect, Generate, Edit, Inpaint, Ask, Ground)


# ---------------------------------------------------------------------------------------------
# Requests.


def _settings(steps: int, guidance: float) -> dict[str, Any]:
    """Returns the settings that are not left to the model."""
    chosen = {"steps": steps or None, "guidance": None if guidance < 0 else guidance}
    return {name: value for name, value in chosen.items() if value is not None}


def _seed(first: int, row: int = 0) -> int:
    """Returns the seed of a row; any whole number is one, by its remainder."""
    return (int(first) + row) % SEEDS


def _each(rows: int, ask: Callable[[int], Any]) -> list[Any]:
    """Returns the answer for each row; sent at once, the requests share the server's batches."""
    with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
        return list(pool.map(ask, range(rows)))


def _changed(server: Server, shown, mask, words: str, seed: int, steps: int, guidance: float):
    """Returns edited images, or inpainted ones if there is a mask.

    Raises:
        ValueError: the numbers or sizes of images and masks do not match.
    """
    pixels = files.arrays(shown)
    masks = [] if mask is None else files.masks(mask)
    rows = max(len(pixels), len(masks))
    if {len(pixels), len(masks) or 1} - {1, rows}:
        raise ValueError(
            f"{len(pixels)} images and {len(masks)} masks do not go together: give as many, or one"
            " of either."
        )

    def change(row: int) -> dict[str, Any]:
        fields = {"prompt": words, "seed": _seed(seed, row), **_settings(steps, guidance)}
        pngs = {"image": files.png(pixels[row % len(pixels)])}
        if len(masks):
            pngs["mask"] = files.holed(masks[row % len(masks)])
        return server.post_form("/v1/images/edits", fields, pngs)

    return files.images_of(_each(rows, change))


def _said(server: Server, words: str, pixels: np.ndarray | None, asked: dict[str, Any]) -> str:
    """Returns the text of an answer, about an image if there is one."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": words}]
    if pixels is not None:
        parts.append({"type": "image_url", "image_url": {"url": files.data_uri(pixels)}})
    body = {"messages": [{"role": "user", "content": parts}], **asked}
    return server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
