# SPDX-License-Identifier: Apache-2.0
"""Loading into a mesh needs little extra host memory; here host and devices share memory."""

import json
import multiprocessing
import os
import pathlib
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import arrays, model_folder, stores
from sparse_lavida_jax.checkpoints.tensors import Tensor
from sparse_lavida_jax.models import denoiser, sharding

SPAWN = multiprocessing.get_context("spawn")
MESH = {"fsdp": 4, "tensor": 2}
PROGRAMS = 64 * 2**20  # bytes allowed for programs for these shapes


def settings(width: int) -> config.Config:
    """Settings of two layers, each with almost all parameters in four matrices."""
    model = config.Model(
        width=width, mlp_hidden=4 * width, num_layers=2, dual_tower_layers=1, num_heads=8,
        head_dim=width // 8, generation_width=64, generation_mlp_hidden=64,
    )  # fmt: skip
    return config.Config(model=model)


def sizes(width: int) -> list[int]:
    """Bytes of the arrays on disk, in bfloat16."""
    shapes = arrays.by_layer(denoiser.shapes(settings(width).model))
    return [2 * leaf.size for leaf in shapes.values()]


def write(folder: pathlib.Path, width: int) -> None:
    shapes = arrays.by_layer(denoiser.shapes(settings(width).model))
    wanted = [
        Tensor(name, "BF16", leaf.shape, lambda leaf=leaf: np.full(leaf.shape, 0.01, jnp.bfloat16))
        for name, leaf in shapes.items()
    ]
    with model_folder.new_model_folder(folder, settings(width), sum(sizes(width))) as new:
        stores.write_params(new, wanted, "safetensors")
        (new / "tokenizer.json").write_text("{}")


def measure(small: pathlib.Path, large: pathlib.Path, out: pathlib.Path) -> None:
    """Writes the largest growth of this process's memory in bytes while it loads `large`."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    over = sharding.over(sharding.automatic(MESH))
    held = [model_folder.load_model(small, sharding=over, dtype="bfloat16")]  # programs, libraries

    def memory() -> int:
        pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")

    before, peak, is_done = memory(), [0], threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            peak[0] = max(peak[0], memory())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    held.append(model_folder.load_model(large, sharding=over, dtype="bfloat16"))
    jax.block_until_ready(jax.live_arrays())
    is_done.set()
    watcher.join()
    out.write_text(json.dumps(peak[0] - before))


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").exists(), reason="reads /proc, of Linux")
def test_no_more_is_held_than_two_arrays_of_a_layer_beside_the_parameters(tmp_path):
    for width in (64, 4096):
        write(tmp_path / str(width), width)
    process = SPAWN.Process(
        target=measure, args=(tmp_path / "64", tmp_path / "4096", tmp_path / "grown.json")
    )
    process.start()
    process.join()
    grown = json.loads((tmp_path / "grown.json").read_text())
    beside = grown - sum(sizes(4096))
    print(f"{beside / 2**20:.0f} MiB beside the parameters, {max(sizes(4096)) / 2**20:.0f} a layer")
    assert beside <= 2 * max(sizes(4096)) + PROGRAMS
