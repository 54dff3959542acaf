# SPDX-License-Identifier: Apache-2.0
"""What teacher and student see in distillation is what training rows of their own plans show."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stand_ins
import tiny

from sparse_lavida_jax import config, diffusion, orders
from sparse_lavida_jax.data.corrupted_rows import CorruptedRow
from sparse_lavida_jax.tags import FIRST_BLOCK
from sparse_lavida_jax.training import distil, step

TOLERANCE = 2e-5
FINE = [2, 1, 3, 1, 2]  # cells of each step; the last is in no pair
COARSE = [3, 4, 2]


@pytest.fixture(scope="module", params=[False, True], ids=["independent", "sequential"])
def model(request):
    return tiny.denoiser(tiny.model_settings(codes_per_token=4, sequential_codes=request.param))


def batch_of(model, requests, sizes):
    """Returns a training batch of whole plans, in an order of each row."""
    rows = []
    for one in requests:
        order = orders.order("random", 3, 3, one.request.seed)
        cut = diffusion.plan_blocks(order, np.array(sizes), one.given, 1)
        rows.append(
            CorruptedRow(tiny.sample_input(one, model.settings), one.response, "image", cut,
                         model.settings)
        )  # fmt: skip
    return jax.tree.map(jnp.asarray, tiny.stacked(rows, model.settings))


def asked(model, count: int):
    return [tiny.request("image", model.settings, i, words=2 + i) for i in range(count)]


def log_probabilities(model, batch, stream):
    hidden, _ = model(batch.understanding, stream, wanted="generation")
    true = jnp.maximum(batch.image_target, 0)
    return np.asarray(jax.nn.log_softmax(model.image_logits(hidden["generation"], true)))


def by_cell(stream, values, block, is_mask):
    """Returns the values of the masks of a block, by row and cell."""
    where = np.asarray(is_mask) & (np.asarray(stream.tags.horizon) + 1 == block)
    cells = np.asarray(stream.index)
    return {
        (row, cells[row, at]): values[row, at] for row, at in zip(*where.nonzero(), strict=True)
    }


@pytest.mark.parametrize("pair", [0, 1])
def test_passes_see_what_rows_of_their_plans_show(model, pair):
    requests = asked(model, 2)
    fine, coarse = batch_of(model, requests, FINE), batch_of(model, requests, COARSE)
    stream, is_mask = fine.generation, fine.image_weight > 0
    pairs = distil.pairs_of(fine, model, jax.random.split(jax.random.key(0), 2))
    first = FIRST_BLOCK + 2 * pair
    earlier = (pairs.step == 0) & (stream.tags.block < first)
    pairs = dataclasses.replace(pairs, first=jnp.full((2, 1), first), is_earlier=earlier)

    rows = log_probabilities(model, fine, stream)
    masks = np.asarray(is_mask)
    passes = {
        first: distil.first_step(stream, pairs),
        # Drawn as the true image is, the first step leaves what the row of training shows.
        first + 1: distil.second_step(stream, pairs, fine.image_target),
    }
    for block, own in passes.items():
        found = by_cell(stream, log_probabilities(model, fine, own), block, masks)
        wanted = by_cell(stream, rows, block, masks)
        assert len(found) == 2 * FINE[block - FIRST_BLOCK] and found.keys() == wanted.keys()
        assert max(np.abs(found[at] - wanted[at]).max() for at in found) < TOLERANCE

    student = log_probabilities(model, fine, distil.both_steps(stream, pairs))
    found = {}
    for block in passes:
        found |= by_cell(stream, student, block, masks)
    merged = log_probabilities(model, coarse, coarse.generation)
    wanted = by_cell(coarse.generation, merged, FIRST_BLOCK + pair, coarse.image_weight > 0)
    assert found.keys() == wanted.keys() and len(found) == 2 * COARSE[pair]
    assert max(np.abs(found[at] - wanted[at]).max() for at in found) < TOLERANCE
    # Other draws are seen by the second step.
    others = distil.second_step(stream, pairs, (fine.image_target + 1) % 8)
    changed = by_cell(stream, log_probabilities(model, fine, others), first + 1, masks)
    assert max(np.abs(changed[at] - rows_at).max() for at, rows_at in
               by_cell(stream, rows, first + 1, masks).items()) > 100 * TOLERANCE  # fmt: skip


def test_pairs_are_those_of_the_plan_and_drawn_alike(model):
    batch = batch_of(model, asked(model, 1), FINE)
    rows = jax.tree.map(lambda x: jnp.repeat(x, 400, axis=0), batch)
    pairs = distil.pairs_of(rows, model, jax.random.split(jax.random.key(3), 400))
    found, counts = np.unique(pairs.first, return_counts=True)
    assert found.tolist() == [FIRST_BLOCK, FIRST_BLOCK + 2] and counts.min() > 150
    single = batch_of(model, asked(model, 1), [9])
    keys = jax.random.split(jax.random.key(0), 1)
    assert not distil.pairs_of(single, model, keys).taught.any()
    given = distil.teaching(jnp.int32(0), 1)
    assert distil.loss(model, model, single, None, None, given) == 0


def test_a_student_that_is_its_teacher_learns_marginals_whatever_the_microbatches(model):
    batch = batch_of(model, asked(model, 4), FINE)
    taught = distil.teaching(jnp.int32(5), 4)
    found = []
    for parts in (1, 2):
        gradient_of = jax.jit(
            functools.partial(step.gradient, microbatches=parts, distil_weight=0.5)
        )
        value, logged, gradient = gradient_of(model, batch, taught=taught, teacher=model)
        plain, _, _ = gradient_of(model, batch)
        np.testing.assert_allclose(value, plain + 0.5 * logged["distil_nll"], rtol=1e-5)
        found.append((value, logged["distil_nll"], gradient))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    # Nothing flows into the teacher.
    to_teacher = jax.jit(
        jax.grad(lambda teacher: distil.loss(model, teacher, batch, None, None, taught).sum())
    )(model)
    assert all(np.abs(leaf).max() == 0 for leaf in jax.tree.leaves(to_teacher))


def test_a_config_that_has_no_teacher_or_no_steps_is_refused():
    with pytest.raises(config.ConfigError, match=r"needs Optimizer\.ema above 0"):
        config.Config(optimizer=config.Optimizer(distil=1.0, ema=0.0))
    for name, changes in {"data": {"packing": 2}, "diffusion": {"partial_cells": 0.5}}.items():
        given = {"optimizer": {"distil": 1.0, "ema": 0.9}, "diffusion": {"blocks": "plan"}}
        given[name] = given.get(name, {}) | changes
        with pytest.raises(config.ConfigError, match="by steps over whole cells of one plan"):
            stand_ins.settings(**given)
