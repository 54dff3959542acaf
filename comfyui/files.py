# SPDX-License-Identifier: Apache-2.0
"""Images of ComfyUI, float tensors [b h w c] in [0, 1], as files for the server and back."""

import base64
import importlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image


def arrays(tensor: Any) -> np.ndarray:
    """Returns a tensor, on whatever device, as an array."""
    return np.asarray(tensor.cpu() if hasattr(tensor, "cpu") else tensor)


def masks(tensor: Any) -> np.ndarray:
    """Returns masks [b h w]; ComfyUI also has single ones [h w]."""
    found = arrays(tensor)
    return found.reshape(-1, *found.shape[-2:])


def tensor(array: np.ndarray) -> Any:
    """Returns an array as ComfyUI's float tensor."""
    torch = importlib.import_module("torch")  # of ComfyUI
    return torch.from_numpy(np.ascontiguousarray(array, np.float32))


def png(pixels: np.ndarray) -> bytes:
    """Returns the file of an image: [h w c] in [0, 1], with three channels or four."""
    file = io.BytesIO()
    Image.fromarray(np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def holed(mask: np.ndarray) -> bytes:
    """Returns the file of a mask [h w]: transparent, where to draw, if it is 0.5 or more."""
    return png(np.repeat(mask[..., None] < 0.5, 4, axis=-1).astype(np.float32))


def data_uri(pixels: np.ndarray) -> str:
    """Returns an image as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"


def images_of(answers: Sequence[dict[str, Any]]) -> Any:
    """Returns the images of answers of the server, all of one size, as a tensor [b h w 3]."""
    files = [base64.b64decode(one["b64_json"]) for answer in answers for one in answer["data"]]
    pixels = [np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in files]
    return tensor(np.stack(pixels).astype(np.float32) / 255)
