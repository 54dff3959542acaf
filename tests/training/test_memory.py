# SPDX-License-Identifier: Apache-2.0
"""Training memory computed from shapes, against sums by hand and the arrays of a real state."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import stand_ins
import tiny
from flax import nnx
from jax.sharding import Mesh

from sparse_lavida_jax import config, diffusion, orders, train
from sparse_lavida_jax.models import parameters, sharding
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.training import memory, optimizer

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
LAYERS, LENGTHS, WIDTHS = 3, (64, 32), (32, 24)  # of `tiny`, and a batch


def settings(**changes):
    """Settings of a tiny model whose loss is computed in chunks."""
    model = tiny.model_settings(codes_per_token=4, **changes)
    return config.Config(model=model, train=config.Train(loss_chunk=8))


@pytest.fixture(scope="module")
def plans():
    batch = memory.BatchSize(2, *LENGTHS)
    return {name: memory.plan(way, batch) for name, way in memory.ways(settings()).items()}


@pytest.mark.slow
def test_the_ways_to_train_hold_what_they_train(plans):
    size = sum(leaf.size for leaf in jax.tree.leaves(tiny.denoiser(settings().model)))
    full = plans["full"]
    assert (full.trained, full.parameters, full.gradients) == (size, 4 * size, 4 * size)
    step = 4  # the number of the step
    assert full.moments == 8 * size + step
    assert plans["full, bfloat16 moments"].moments == 4 * size + step
    branch, low_rank = plans["generation branch"], plans["LoRA of rank 16"]
    for part in (branch, low_rank):
        assert 0 < part.trained < full.trained
        assert part.gradients == 4 * part.trained
        assert part.moments == 8 * part.trained + step
    assert branch.parameters == 4 * branch.trained + 2 * (size - branch.trained)
    assert branch.kept < full.kept
    in_8_bits = plans["LoRA of rank 16, int8 base"]
    assert in_8_bits.trained == low_rank.trained
    assert low_rank.trained * 4 < in_8_bits.parameters < low_rank.parameters
    assert full.total > plans["full, bfloat16 moments"].total > branch.total


def test_what_is_kept_is_the_input_of_every_layer():
    """The difference between two depths, by hand: everything else is equal."""
    batch = memory.BatchSize(2, *LENGTHS)
    kept = [memory.kept(settings(remat="layer", num_layers=n), batch) for n in (LAYERS, LAYERS + 2)]
    tokens = sum(length * width for length, width in zip(LENGTHS, WIDTHS, strict=True))
    assert kept[1] - kept[0] == 2 * 2 * tokens * 4  # two layers, two rows, float32


@pytest.mark.slow
def test_rematerialised_layers_keep_less_than_whole_ones():
    """The difference between two depths: the tags of all layers are laid out once."""
    none, attention, layer = (
        np.subtract(
            *(
                memory.kept(settings(remat=remat, num_layers=n), memory.BatchSize(2, *LENGTHS))
                for n in (LAYERS + 2, LAYERS)
            )
        )
        for remat in ("none", "attention", "layer")
    )
    assert none > 2 * attention > 2 * layer


@pytest.mark.slow
def test_the_state_of_a_run_is_as_large_as_planned():
    """Includes the average; the sum over microbatches is a second gradient."""
    given = stand_ins.settings(
        optimizer={"ema": 0.9, "groups": ((memory.BRANCH, 1e-3), ("", 0.0))},
        train={"microbatches": 2},
    )
    state = train.init_state(given, tiny.denoiser(given.model))
    planned = memory.plan(given, memory.BatchSize(1, 16, 16))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    counters = 2 * np.int32().nbytes  # step, skipped
    assert held - counters == planned.parameters + planned.moments + planned.average
    assert planned.gradients == 2 * planned.average == 8 * planned.trained


@pytest.mark.slow
def test_a_device_of_a_mesh_holds_its_share_of_a_run():
    """Compared with the part of a real state on the first of four devices."""
    given = stand_ins.settings(
        optimizer={"ema": 0.9, "groups": ((memory.BRANCH, 1e-3), ("", 0.0))},
        train={"batch_size": 8, "microbatches": 2},
    )
    axes = {"data": 2, "fsdp": 2}
    state = train.init_state(given, tiny.denoiser(given.model))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), tuple(axes))
    state = sharding.place_state(state, mesh)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert memory.rows_of(given, axes) == 1 and memory.rows_of(given, {}) == 4
    planned = memory.plan(given, memory.BatchSize(1, 16, 16), axes)
    counters = 2 * np.int32().nbytes  # step, skipped
    assert held - counters == planned.parameters + planned.moments + planned.average
    alone = memory.plan(given, memory.BatchSize(1, 16, 16))
    assert planned.parameters < 0.6 * alone.parameters
    # A layer and a head are gathered to be used.
    assert planned.kept == alone.kept and planned.layer > alone.layer


def test_the_mesh_of_a_plan_is_that_of_the_config():
    mesh = config.read(CONFIGS / "sft_1024.py").train.mesh
    assert memory.axes_of(mesh, 64) == {"data": 1, "fsdp": 64}
    assert memory.axes_of({"fsdp": 4}) == {"fsdp": 4}
    assert memory.axes_of({}) == {}
    for sizes, devices, told in (
        (mesh, 0, "say how many, such as --devices=64"),
        ({"fsdp": 4}, 6, "Train.mesh=fsdp=4 does not fit the 6 devices"),
        ({}, 2, "has no train.mesh, so its run takes one device"),
    ):
        with pytest.raises(config.ConfigError, match=told):
            memory.axes_of(sizes, devices)


def test_the_branch_of_the_plan_is_that_of_the_config():
    given = config.read(CONFIGS / "lavida_o_branch.py")
    model = jax.eval_shape(lambda: Denoiser(given.model, rngs=nnx.Rngs(0)))
    parts = [
        jax.eval_shape(lambda m, s=s: optimizer.parted(s, m), model)
        for s in (given, memory.ways(given)["generation branch"])
    ]
    for ours, theirs in zip(*parts, strict=True):
        assert parameters.by_name(ours) == parameters.by_name(theirs)


@pytest.mark.slow
def test_the_release_fits_as_it_should():
    """LoRA of the release, with the rows that `sparse-lavida fits` counts."""
    given = config.read(CONFIGS / "lavida_o_lora.py")
    found = memory.plan(given, memory.BatchSize(1, 1024, memory.image_tokens(given)))
    assert found.fits(32 * 2**30) and not found.fits(24 * 2**30)
    branch = memory.ways(given)["generation branch"]
    assert memory.plan(branch, memory.BatchSize(1, 1024, 0)).kept == 0  # it has no text head
    for page in ("lavida_o", "training"):
        assert f"{found.total / 1e9:.1f}" in (CONFIGS.parent / f"docs/{page}.md").read_text()


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", "sparse_lavida_jax", "fits", *words],
        capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_that_cannot_fit_is_refused_with_the_numbers(tmp_path):
    path = tmp_path / "small.py"
    model = config.to_dict(tiny.model_settings(codes_per_token=4))
    path.write_text(f"def get_config():\n    return {{'name': 'small', 'model': {model}}}\n")
    words = (path, "--image-tokens=36", "--text-tokens=64")
    done = command(*words, "--device-gb=0.001")
    assert done.returncode == 1, done.stderr
    assert "small needs 0." in done.stderr and "nothing of the above" in done.stderr
    assert "too large" in done.stdout  # for this device; it fits the larger ones of the table
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"attention": "full"}, 1024),
        ({"num_masked_blocks": 8}, 1024 + 8 * 64),
        ({"blocks": "plan", "plan_steps": (64,)}, None),
    ],
)
def test_the_tokens_of_the_longest_image_row(changes, tokens):
    given = config.changed(config.read(CONFIGS / "lavida_o.py"), {"diffusion": changes})
    if tokens is None:
        order, nothing = np.arange(1024), np.zeros(1024, bool)
        blocks = diffusion.plan_blocks(order, orders.counts("shift", 64, 1024, 5.0), nothing, 64)
        tokens = len(blocks.block) + 64 * len(blocks.masked_blocks)
    assert memory.image_tokens(given) == tokens
