# SPDX-License-Identifier: Apache-2.0
"""Raw user data for tests: images, tables, and a mixture file that names them."""

import functools
import io
import json
import pathlib

import numpy as np
import tiny
from chat_tokenizer import made_tokenizer
from PIL import Image

from sparse_lavida_jax import config
from sparse_lavida_jax.lavida_o import chat
from sparse_lavida_jax.mixture import record_examples
from sparse_lavida_jax.mixture.prepare import prepare

ROWS = 10


class Averages:
    """An image tokenizer that needs no training: a code is a quarter of the mean of its pixels."""

    side, factor, codebook_size, digest = 32, 8, 64, "averages"

    def encode(self, pixels):
        n, side, _, _ = pixels.shape
        codes = side // self.factor
        blocks = pixels.reshape(n, codes, self.factor, codes, self.factor, 3)
        return (blocks.mean(axis=(2, 4, 5)) // 4).astype(np.int64)


def png(seed: int, width: int = 48, height: int = 40) -> bytes:
    """Returns an image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def images(folder: pathlib.Path, count: int = ROWS, **size) -> list[str]:
    """Writes 0.png, 1.png, ... and returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{i}.png" for i in range(count)]
    for i, name in enumerate(names):
        (folder / name).write_bytes(png(i, **size))
    return names


def lines(path: pathlib.Path, rows: list) -> pathlib.Path:
    """Writes rows as JSON lines; strings are written unchanged."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def mixture(path: pathlib.Path, *datasets: dict, **top) -> pathlib.Path:
    """Writes a mixture file."""
    path.write_text(json.dumps({"datasets": list(datasets), **top}))
    return path


def captioned(folder: pathlib.Path, rows: list | None = None, **fields) -> pathlib.Path:
    """Writes images, a table of captions and a mixture file for them."""
    names = images(folder / "pictures")
    if rows is None:
        rows = [{"image": name, "caption": f"image {name}"} for name in names]
    lines(folder / "captions.jsonl", rows)
    dataset = {
        "name": "captions", "json_path": "captions.jsonl", "image_root": "pictures",
        "preprocess_fn": "text_to_image", **fields,
    }  # fmt: skip
    return mixture(folder / "mixture.json", dataset)


def settings(tokenizer: chat.ChatTokenizer | None = None, **sections) -> config.Config:
    """Returns a configuration whose model uses the codes of `Averages`."""
    model = {
        "codes_per_token": 4,
        "grid_size": 2,
        "codebook_size": 64,
        "cell_positions": False,
        "vision": config.Vision(
            image_size=8, patch_size=2, width=16, num_layers=1, num_heads=2, mlp_hidden=24,
            pool=2, newline=True, grid_sizes=((8, 16), (16, 8)),
        ),
    }  # fmt: skip
    if tokenizer is not None:
        model |= {
            "vocab_size": tokenizer.vocab_size,
            "text_mask_id": tokenizer.id_of(chat.MASK),
            "end_of_text_id": tokenizer.id_of(chat.END_OF_TEXT),
        }
    values = {
        "model": tiny.model_settings(**model),
        "prepare": {"shard_rows": 4, "encode_batch": 4},
        "data": {"text_block_len": 8},
        "train": {"batch_size": 4},
        "diffusion": {"plan_steps": (2,), "plan_text_steps": (2,)},
    }
    for name, changes in sections.items():
        values[name] = values.get(name, {}) | changes
    return config.build(config.Config, values)


def prepared(source: pathlib.Path, folder: pathlib.Path, load=Averages, **settings_of_prepare):
    """Prepares a mixture file with the stand-in image tokenizer; returns the summary."""
    return prepare(source, folder, settings(prepare=settings_of_prepare), load)


@functools.cache
def tokenizer(folder: pathlib.Path) -> chat.ChatTokenizer:
    """Returns a tokenizer whose text tokens are bytes, made in `folder`."""
    control = (*chat.CONTROL, record_examples.NO_IMAGE)
    return chat.ChatTokenizer(made_tokenizer(folder, control=control))


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns the bytes of every file in a folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}
