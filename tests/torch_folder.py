# SPDX-License-Identifier: Apache-2.0
"""A folder like the LaViDa-O release, tiny and with arbitrary numbers."""

import dataclasses
import json
import pathlib

import chat_tokenizer
import numpy as np
import safetensors.numpy
import tiny

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import tensors
from sparse_lavida_jax.convert import from_torch, names, settings

INDEX = "model.safetensors.index.json"

VQ = config.VQ(
    image_size=24,
    channels=(8, 8, 12),
    layers_per_block=1,
    latent_channels=4,
    codebook_size=12,
    norm_groups=4,
)
SETTINGS = config.Config(
    name="lavida-o",
    model=tiny.model_settings(
        cell_positions=False,
        codes_per_token=4,
        end_of_text_id=0,
        grid_size=VQ.image_size // VQ.factor // 2,
        image_table_rows=20,
        num_registers=64,
        trained_attention="full",
        vision=dataclasses.replace(
            tiny.VISION, newline=True, grid_sizes=((8, 16), (16, 8)), unused_post_norm=True
        ),
    ),
    vq=VQ,
)


def arbitrary(made: config.Config = SETTINGS, dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    """Returns a released state dict without registers."""
    rng = np.random.default_rng(0)
    return {
        name.official: rng.normal(size=name.shape).astype(dtype_of(dtype))
        for name in names.table(made)
        if not name.optional
    }


def dtype_of(name: str) -> np.dtype:
    """Returns a dtype by name, including bfloat16."""
    return next(dtype for dtype in tensors.DTYPES.values() if str(dtype) == name)


def write(
    folder: pathlib.Path,
    state: dict[str, np.ndarray] | None = None,
    made: config.Config = SETTINGS,
    shards: int = 3,
    **changes,
) -> pathlib.Path:
    """Writes a released folder; `changes` are settings of its config.json, None removes one."""
    state = arbitrary(made) if state is None else state
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(state.values())).dtype)
    given = settings.official_config(made, dtype) | changes
    given = {key: value for key, value in given.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(given))
    chat_tokenizer.made_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    (folder / "LICENSE").write_text("For research only.")
    if not made.model.understanding_only:
        (folder / "vqvae").mkdir(exist_ok=True)
        described = json.dumps(settings.official_vq_config(made.vq))
        (folder / "vqvae" / "config.json").write_text(described)
    placed = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in sorted(state)[i::shards]}
        safetensors.numpy.save_file(part, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def read(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the state dict that the index of a folder lists."""
    placed = json.loads((folder / INDEX).read_text())["weight_map"]
    found = {}
    for file in set(placed.values()):
        found |= safetensors.numpy.load_file(folder / file)
    assert set(found) == set(placed)
    return found


def convert(scratch: pathlib.Path) -> pathlib.Path:
    """Writes a released folder and converts it."""
    from_torch.convert(write(scratch / "released"), scratch / "model")
    return scratch / "model"
