# SPDX-License-Identifier: Apache-2.0
"""Examples that share a row train as they would alone, and less of a batch is padding."""

import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import optax
import pytest
import stand_ins
import tiny

from sparse_lavida_jax import config
from sparse_lavida_jax.data import batch as making
from sparse_lavida_jax.data.batch import RowShape
from sparse_lavida_jax.training import step as training_step
from sparse_lavida_jax.visibility import PAD_BLOCK

SIZE, SHARED = 6, 3
TASKS = {"answer": 1.0, "arithmetic": 1.0, "draw": 1.0}
lengths = st.builds(RowShape, st.integers(0, 90), st.integers(0, 40))


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        stand_ins.without_waiting(patch)
        yield


@functools.cache
def batches(**changes):
    data = {"tasks": TASKS, "max_answer_len": 40} | changes
    given = stand_ins.settings(data=data, train={"batch_size": SIZE})
    # A joint layer and a split one: fewer compile in two thirds of the time.
    model = dataclasses.replace(given.model, num_layers=2)
    return stand_ins.batches(dataclasses.replace(given, model=model))


@pytest.mark.parametrize("group", [pytest.param("answer", marks=pytest.mark.slow), "draw"])
def test_a_packed_batch_has_the_loss_and_the_gradient_of_its_examples(group):
    """For answers with and without images, and for drawn images."""
    alone, packed = batches(), batches(packing=SHARED)
    model = tiny.denoiser(alone.settings.model)
    gradient = tiny.quick_jit(training_step.gradient)
    found = [gradient(model, each.batch(group, 0)) for each in (alone, packed)]
    (loss, logged, wanted), (packed_loss, packed_logged, ours) = found
    np.testing.assert_allclose(packed_loss, loss, rtol=2e-5)
    assert {k: float(v) for k, v in packed_logged.items()} == pytest.approx(
        {k: float(v) for k, v in logged.items()}, rel=2e-5
    )
    scale = float(optax.tree.norm(wanted))
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * scale)


def padding(batch) -> tuple[int, int]:
    """The numbers of padding tokens and of all others."""
    blocks = [s.tags.block for s in (batch.understanding, batch.generation) if s is not None]
    padded = sum(int((block == PAD_BLOCK).sum()) for block in blocks)
    return padded, sum(block.size for block in blocks) - padded


def test_less_of_a_packed_batch_is_padding():
    for group in ("answer", "draw"):
        counts = []
        for each in (batches(), batches(packing=SHARED), batches(length_buckets=4)):
            found = [padding(each.batch(group, index)) for index in range(4)]
            counts.append(tuple(map(sum, zip(*found, strict=True))))
        (alone, real), (packed, same), (bucketed, also) = counts
        if real == same:  # unless an example had to be redrawn
            assert packed < alone
        assert bucketed <= alone if real == also else True
    assert batches(packing=SHARED).batch("draw", 0).generation.tokens.shape[0] == SIZE // SHARED


def test_a_packed_row_is_sorted_by_example_and_block():
    batch = batches(packing=SHARED).batch("answer", 1)
    layout = batch.understanding.tags
    for block, segment in zip(layout.block, layout.segment, strict=True):
        real = block != PAD_BLOCK
        order = list(zip(segment[real], block[real], strict=True))
        assert order == sorted(order)
        assert set(segment[real]) == {*range(SHARED)} and set(segment[~real]) <= {SHARED}
    assert batch.pixels.shape[:2] == (SIZE // SHARED, SHARED)


@hypothesis.given(st.lists(lengths, min_size=1, max_size=6), st.integers(1, 4))
def test_every_example_is_dealt_once_and_rows_end_up_alike(rows, per_row):
    found = [shape for shape in rows for _ in range(per_row)]
    dealt = making.deal(found, per_row)
    assert sorted(i for row in dealt for i in row) == [*range(len(found))]
    assert all(len(row) == per_row for row in dealt)
    whole = making.longest(found, dealt)
    in_order = [[*range(i, i + per_row)] for i in range(0, len(found), per_row)]
    in_turn = making.longest(found, in_order)  # the worst: equals together
    assert whole.understanding + whole.generation <= 2 * (
        in_turn.understanding + in_turn.generation
    )


@hypothesis.given(st.lists(lengths, min_size=1, max_size=30), st.integers(1, 5))
def test_the_last_bucket_holds_every_batch_and_others_are_smaller(found, count):
    shapes = making.buckets(found, batch_size=4, per_row=2, count=count, multiple=8)
    assert 1 <= len(shapes) <= count
    assert all(n % 8 == 0 for shape in shapes for n in (shape.understanding, shape.generation))
    for before, after in itertools.pairwise(shapes):
        assert after.holds(before)
    for start in range(0, len(found) - 3, 4):
        batch = found[start : start + 4]
        assert shapes[-1].holds(making.longest(batch, making.deal(batch, 2)))


def test_settings_that_do_not_make_whole_rows_are_refused():
    with pytest.raises(
        config.ConfigError, match=r"batch_size=6 must be a multiple of Data.packing=4"
    ):
        config.Config(data=config.Data(packing=4), train=config.Train(batch_size=6))
    with pytest.raises(config.ConfigError, match="end-of-text that is learned"):
        config.Config(
            data=config.Data(packing=2),
            diffusion=config.Diffusion(corruption="released", attention="full", weighting="mean"),
        )
    with pytest.raises(ValueError, match=r"3 examples do not make rows of 2"):
        making.deal([RowShape(1, 1)] * 3, 2)
