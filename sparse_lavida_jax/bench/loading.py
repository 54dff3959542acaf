# SPDX-License-Identifier: Apache-2.0
r"""Sizes of model folders of the release's structure, and how long it takes to load them.

    python -m sparse_lavida_jax.bench.loading --scratch=/tmp
    python -m sparse_lavida_jax.bench.loading --tiny

Folders of 2 and of 8 layers are filled with arbitrary numbers, with everything else at full size
(4 and 8 GB; both forms and their source take 21 GB of disk), and are loaded whole, for images
alone, and with their matrices in int8, each in its own process. Half of the layers have a
generation branch, as in the release: every pair of layers adds the same, so bytes and seconds of
all 32 layers follow from the two; their rows say so. Seconds are CPU time, which other work on the
machine does not change much. With --tiny the layers are narrow, which only shows that the command
works.
"""

import pathlib
import tempfile
import time
from typing import Any

import jax
from absl import app, flags

from sparse_lavida_jax import config
from sparse_lavida_jax.bench import timing
from sparse_lavida_jax.bench.convert import SCRATCH
from sparse_lavida_jax.bench.record import Bench
from sparse_lavida_jax.bench.release import ALL_LAYERS, SPAWN, load_for, settings
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.convert import from_torch, stand_in
from sparse_lavida_jax.models import fuse

TINY = flags.DEFINE_bool("tiny", False, "Narrow layers in place of the release's.")
Taken = dict[str, float]  # see `load`
LAYERS = (2, 8)
LOADS = 2
# What is loaded: the folder, and the task that the parameters are for.
WAYS: dict[str, tuple[str, fuse.Task]] = {
    "whole": ("model", "both"),
    "image": ("model", "image"),
    "int8": ("int8", "both"),
}


def main(argv: list[str]) -> None:
    """Loads every folder in every way, and writes a row for each number of layers."""
    del argv
    bench, found = Bench("loading"), {way: [] for way in WAYS}
    for layers in LAYERS:
        with (
            tempfile.TemporaryDirectory(dir=SCRATCH.value or None) as scratch,
            SPAWN.Pool(1, maxtasksperchild=1) as pool,
        ):
            pool.apply(make_folders, (pathlib.Path(scratch), settings(layers, tiny=TINY.value)))
            for way, (name, task) in WAYS.items():
                found[way].append(pool.apply(load, (pathlib.Path(scratch) / name, task)))
    size = "tiny" if TINY.value else "release"
    for way, measured in found.items():
        rows = [*zip(LAYERS, measured, strict=True), (ALL_LAYERS, scaled(measured))]
        for layers, one in rows:
            path = bench.write(f"{size}/{way}/layers{layers}", row(way, layers, one))
            print(f"{path.name}: {one['disk'] / 1e9:.3f} GB, {one['seconds']:.1f} s")


def make_folders(scratch: pathlib.Path, given: config.Config) -> None:
    """Writes a model folder of arbitrary numbers, and one with its matrices in int8."""
    stand_in.write(scratch / "released", given)
    from_torch.convert(scratch / "released", scratch / "model")
    model_folder.copy(scratch / "model", scratch / "int8", dtype="int8")


def load(folder: pathlib.Path, task: fuse.Task) -> Taken:
    """Loads a model folder as `from_pretrained` does, in bfloat16 and with all checks.

    Returns:
        `seconds` of CPU time of the faster of two loads (the first one compiles), and the bytes of
        the parameters on `disk` and of those that are kept in memory, `parameters`.
    """
    seconds, leaves = [], []
    for _ in range(LOADS):
        leaves.clear()
        begin = time.process_time()
        model = load_for(folder, task)
        leaves += jax.block_until_ready(jax.tree.leaves(model))
        del model
        seconds.append(time.process_time() - begin)
    disk = sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    kept = sum(leaf.nbytes for leaf in leaves)
    return {"seconds": min(seconds), "disk": disk, "parameters": kept}


def scaled(measured: list[Taken]) -> Taken:
    """Returns what all layers take, from the two numbers of layers that were measured.

    Never less than the more of them, which only happens to narrow layers.
    """
    few, more = measured
    steps = (ALL_LAYERS - LAYERS[0]) // (LAYERS[1] - LAYERS[0])
    return {name: max(few[name] + steps * (more[name] - few[name]), more[name]) for name in few}


def row(way: str, layers: int, one: Taken) -> dict[str, Any]:
    """Returns the values of a row."""
    is_scaled = layers == ALL_LAYERS
    how = f"computed from {LAYERS[0]} and {LAYERS[1]} layers" if is_scaled else "measured"
    return {
        "task": "load",
        "method": way,
        "dtype": "bfloat16",
        "layers": layers,
        "scaled": is_scaled,
        "bytes": {name: one[name] for name in ("disk", "parameters")},
        **timing.times([one["seconds"]]),
        "note": f"arbitrary numbers, {how}; CPU time, checks included",
    }


if __name__ == "__main__":
    app.run(main)
