# SPDX-License-Identifier: Apache-2.0
"""Ways to train are compared on the same examples, with correct operation counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import segment_programs
import stand_ins
import tiny

from benchmarks import objectives, table
from sparse_lavida_jax.training import loss
from sparse_lavida_jax.visibility import PAD_BLOCK

COUNT, ROWS = 2, 4
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(scope="module")
def settings():
    return stand_ins.settings(diffusion={"num_masked_blocks": 2, "plan_steps": (4,)})


@pytest.fixture(scope="module")
def ways(settings):
    return objectives.methods(settings)


@pytest.fixture(scope="module")
def found(settings, ways):
    make_example = objectives.scene_examples(stand_ins.encoder(settings), seed=0)
    return {name: objectives.batches(way, make_example, COUNT, ROWS) for name, way in ways.items()}


def test_all_ways_see_the_same_images(found):
    cells = {}
    for name, batches in found.items():
        for number, batch in enumerate(batches):
            for row in range(ROWS):
                seen = np.asarray(batch.image_weight[row]) > 0
                codes = cells.setdefault((number, row), {})
                stream = batch.generation
                for cell, code in zip(
                    stream.index[row][seen], batch.image_target[row][seen], strict=True
                ):
                    assert codes.setdefault(int(cell), int(code[0])) == int(code[0]), name


def test_masked_diffusion_has_no_registers_and_sees_everything(settings, found):
    model = settings.model
    for batch in found["vanilla"]:
        block = batch.generation.layout.block
        assert set(np.unique(block)) <= {0, PAD_BLOCK}
        assert (batch.generation.tokens != model.image_register_id).all()
    assert any((b.generation.tokens == model.image_register_id).any() for b in found["step_causal"])


def test_operations_are_those_that_the_objective_needs(settings, found):
    """As counted by `training/flops.py`, independent of the attention implementation."""
    counted = {name: objectives.counted(own, settings.model) for name, own in found.items()}
    assert counted["step_causal"] == counted["step_causal_mask"] != counted["vanilla"]
    for one in counted.values():
        assert 0 < one["tokens"]["loss"] < one["tokens"]["useful"] <= one["tokens"]["padded"]
        assert one["flops"]["useful"] > 0


@pytest.mark.slow
def test_a_step_changes_nothing_and_can_be_taken_again(settings, ways, found):
    way = ways["step_causal_mask"]
    plain = dataclasses.replace(way.optimizer, ema=0.0)
    with segment_programs.unchecked():
        trainer = objectives.Trainer(
            dataclasses.replace(way, optimizer=plain), found["step_causal"], QUICK
        )
    leaves = objectives.arrays_of(
        dataclasses.replace(settings, optimizer=plain), tiny.denoiser(settings.model)
    )
    losses = [trainer.run(leaves, index)[1] for index in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]
    assert trainer.temporaries > 0


@pytest.mark.parametrize("tokens", [2048, 4096])
def test_the_loss_in_tiles_takes_less_memory(tokens):
    """From shapes of the release: in float32 the head itself is used, and its gradient is one."""
    device, words = jax.sharding.SingleDeviceSharding(jax.devices()[0]), (4096, 127_378)
    kernel = jax.ShapeDtypeStruct(words, jnp.float32)
    tile = loss.tile_of(1, tokens, kernel, jnp.dtype(jnp.float32))
    assert tile == 1024
    plain, tiled = (
        objectives.head_program(*words, tokens, chunk, "float32", "float32", device)
        for chunk in (0, tile)
    )
    temporaries = tiled.memory_analysis().temp_size_in_bytes
    assert temporaries < plain.memory_analysis().temp_size_in_bytes
    assert temporaries < 4 * (4096 + 1.5 * tile) * 127_378


def test_the_table_holds_every_way_against_masked_diffusion():
    def row(method, seconds, loss, flops, std):
        return {
            "run": "a", "task": "draw", "batch": 16, "method": method, "model": "scenes",
            "attention": "reference", "times_s": [seconds], "median_s": seconds,
            "tokens": {"loss": loss, "padded": 2 * loss}, "flops": {"computed": flops},
            "loss": {"mean": 2.0, "std": std}, "device": {"kind": "cpu"},
        }  # fmt: skip

    rows = [row("vanilla", 1.0, 100, 4e9, 0.2), row("step_causal", 0.5, 150, 2e9, 0.4)]
    ours, theirs = table.table("training", rows).splitlines()[2:]
    assert "| 3.00 x | 3.00 x | 0.200 |" in ours and "| 150 | 50 % |" in ours
    assert "| 1.00 x | 1.00 x | 0.100 |" in theirs
