# SPDX-License-Identifier: Apache-2.0
"""Converts ComfyUI's images, float tensors [b h w c] in [0, 1], to files and back."""

import base64
import importlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image


def arrays(tensor: Any) -> np.ndarray:
    """Returns a tensor of any device and type as an array."""
    for plain in ("detach", "float", "cpu"):
        tensor = getattr(tensor, plain)() if hasattr(tensor, plain) else tensor
    return np.asarray(tensor)


def masks(tensor: Any) -> np.ndarray:
    """Returns masks [b h w]; ComfyUI also uses single ones [h w]."""
    found = arrays(tensor)
    return found.reshape(-1, *found.shape[-2:])


def tensor(array: np.ndarray) -> Any:
    """Returns an array as a float tensor for ComfyUI."""
    torch = importlib.import_module("torch")  # ComfyUI brings it
    return torch.from_numpy(np.ascontiguousarray(array, np.float32))


def png(pixels: np.ndarray) -> bytes:
    """Returns the PNG file of an image [h w c] in [0, 1], with three or four channels."""
    file = io.BytesIO()
    Image.fromarray(np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def holed(mask: np.ndarray) -> bytes:
    """Returns the PNG file of a mask [h w]: transparent, so to be drawn, from 0.5 up."""
    return png(np.repeat(mask[..., None] < 0.5, 4, axis=-1).astype(np.float32))


def data_uri(pixels: np.ndarray) -> str:
    """Returns an image as a data URI."""
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"


def images_of(answers: Sequence[dict[str, Any]]) -> Any:
    """Returns the images in responses of the server, all of one size, as a tensor [b h w 3]."""
    files = [base64.b64decode(one["b64_json"]) for answer in answers for one in answer["data"]]
    pixels = [np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in files]
    return tensor(np.stack(pixels).astype(np.float32) / 255)
