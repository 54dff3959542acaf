# SPDX-License-Identifier: Apache-2.0
"""Loading needs little more memory than what is loaded; here host and devices share memory."""

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
from sparse_lavida_jax.checkpoints import model_folder, named_arrays, stores
from sparse_lavida_jax.checkpoints.tensors import Tensor
from sparse_lavida_jax.models import denoiser, fuse, sharding

SPAWN = multiprocessing.get_context("spawn")
MESH = {"fsdp": 4, "tensor": 2}
PROGRAMS = 64 * 2**20  # bytes allowed for programs for these shapes


def settings(width: int) -> config.Config:
    """Settings of two layers, each with almost all parameters in four matrices."""
    model = config.Model(
        width=width, mlp_hidden=4 * width, num_layers=2, dual_tower_layers=1, num_heads=8,
        head_dim=width // 8, generation_width=64, generation_mlp_hidden=64,
        compute_dtype="bfloat16",
    )  # fmt: skip
    return config.Config(model=model)


def sizes(width: int) -> list[int]:
    """Bytes of the arrays on disk, in bfloat16."""
    shapes = named_arrays.by_layer(denoiser.shapes(settings(width).model))
    return [2 * leaf.size for leaf in shapes.values()]


def write(folder: pathlib.Path, width: int) -> None:
    shapes = named_arrays.by_layer(denoiser.shapes(settings(width).model))
    wanted = [
        Tensor(name, "BF16", leaf.shape, lambda leaf=leaf: np.full(leaf.shape, 0.01, jnp.bfloat16))
        for name, leaf in shapes.items()
    ]
    with model_folder.new_model_folder(folder, settings(width), sum(sizes(width))) as new:
        stores.write_params(new, wanted, "safetensors")
        (new / "tokenizer.json").write_text("{}")


def measure(small: pathlib.Path, large: pathlib.Path, out: pathlib.Path, task: str) -> None:
    """Writes by how much memory grows at most while `large` is loaded, and how much is loaded.

    Args:
        task: that the parameters are fused for; "": none, they are split over a mesh.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1 if task else 8)
    over = None if task else sharding.over(sharding.automatic(MESH))

    def load(folder: pathlib.Path):
        if task:
            model = model_folder.load_model(folder, dtype="bfloat16", wanted=fuse.reads(task)).model
            return fuse.for_inference(model, task=task, consume=True)
        return model_folder.load_model(folder, sharding=over, dtype="bfloat16").model

    held = [load(small)]  # programs, libraries

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
    held.append(load(large))
    jax.block_until_ready(jax.live_arrays())
    is_done.set()
    watcher.join()
    out.write_text(json.dumps([peak[0] - before, fuse.parameter_bytes(held[1])]))


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """Returns a function that measures loading for a task, or into a mesh."""
    scratch = tmp_path_factory.mktemp("memory")
    for width in (64, 4096):
        write(scratch / str(width), width)

    def extra(task: str = "") -> int:
        """Returns the bytes that loading needs in addition to the parameters."""
        folders = scratch / "64", scratch / "4096", scratch / "grown.json"
        process = SPAWN.Process(target=measure, args=(*folders, task))
        process.start()
        process.join()
        grown, kept = json.loads(folders[2].read_text())
        print(f"{(grown - kept) / 2**20:.0f} MiB in addition to the parameters")
        return grown - kept

    return extra


linux = pytest.mark.skipif(
    not pathlib.Path("/proc/self/statm").exists(), reason="reads /proc, of Linux"
)


@linux
@pytest.mark.slow
def test_no_more_is_held_than_the_parameters_and_two_arrays_of_a_layer(grown):
    assert grown() <= 2 * max(sizes(4096)) + PROGRAMS


@linux
@pytest.mark.slow
def test_no_more_than_one_matrix_is_held_twice_when_it_is_fused(grown):
    gate_up = 2 * 2 * 2 * 4096 * 4 * 4096  # bytes of gate and up of both layers
    assert grown("image") <= gate_up + PROGRAMS
