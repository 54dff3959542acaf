# SPDX-License-Identifier: Apache-2.0
"""Plans that begin with a cell of each thing of a layout: the same in training and in sampling."""

import dataclasses

import numpy as np
import pytest
import stand_ins

from sparse_lavida_jax import config, orders
from sparse_lavida_jax.data import batch
from sparse_lavida_jax.inference import engine
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.sampling.presets import RowRequest
from sparse_lavida_jax.sampling.prompts import sample_input
from sparse_lavida_jax.scenes.prompts import first_cells

CELLS, STEPS = 36, 4
LAYOUT = " a circle<LOC_4><LOC_8><LOC_8><LOC_12>, a cross<LOC_0><LOC_0><LOC_4><LOC_4>"
FIRST = (2 * 6 + 1, 0, 1)  # the middles of both things, and the first cell of neither
SETTINGS = stand_ins.settings(
    diffusion={"blocks": "plan", "plan_steps": (STEPS,), "layout_first": 1.0, "merge_cells": 0},
    sampling={"order": "layout", "num_steps": STEPS, "order_seed": -1},
)
PLAIN = config.changed(SETTINGS, {"sampling": {"order": "stratified"}})


def example(layout: str | None, given=()):
    known = np.isin(np.arange(CELLS), given)
    codes = np.arange(CELLS)[:, None]
    return stand_ins.encoder(SETTINGS).image_example(
        "two things", codes, layout=layout, given=known
    )


def planned(one, settings=SETTINGS) -> list[list[int]]:
    """Returns the cells that each step of the sampler decodes."""
    sampling, model = settings.sampling, settings.model
    chosen = presets.step_settings(sampling, model, "image", has_source=False)
    rows = sample_input(one, RowRequest(), model, chosen)
    phases = engine._plan_of([rows], sampling, chosen, model, 1)
    steps = [step[0] for phase in phases for step in phase.decode]
    return [step[step >= 0].tolist() for step in steps]


@pytest.mark.parametrize("first", [1, 5, 8, 12])
def test_further_steps_leave_room_for_the_cells_that_come_first(first):
    sizes = orders.counts_after(first, "shift", 5, 144, 2.0)
    assert sizes[0] == first and sizes.sum() == 144 and len(sizes) == 5
    room = max(first, orders.ROOM_FOR_FIRST)
    expected = orders.counts("shift", 4, 144 - room, 2.0)
    assert (sizes[1:-1] == expected[:-1]).all() and sizes[-1] >= expected[-1]


def test_too_few_tokens_or_steps_are_counted_as_usual():
    for first, steps, length in ((0, 4, 36), (3, 1, 36), (3, 4, 10)):
        expected = orders.counts("linear", steps, length, 1.0)
        assert (orders.counts_after(first, "linear", steps, length, 1.0) == expected).all()


def test_the_sampler_begins_with_a_cell_of_each_thing():
    assert example(LAYOUT).first == FIRST
    cells = planned(example(LAYOUT))
    assert sorted(cells[0]) == sorted(FIRST) and len(cells) == STEPS
    after = [cell for cell in orders.order("stratified", 6, 6, 0) if cell not in FIRST]
    for step in cells[1:]:
        assert sorted(step) == sorted(after[: len(step)])
        del after[: len(step)]
    assert not after


def test_given_cells_do_not_come_first_and_without_a_layout_none_do():
    assert sorted(planned(example(LAYOUT, given=FIRST[:2]))[0]) == [FIRST[2]]
    for layout in (None, "", " nonsense<LOC_4>"):
        assert example(layout).first == ()
        assert planned(example(layout)) == planned(example(layout), PLAIN)


def test_training_takes_the_steps_of_the_sampler(monkeypatch):
    monkeypatch.setattr(batch, "ORDER_SEEDS", 1)
    one = dataclasses.replace(example(LAYOUT), given=np.zeros(CELLS, bool))
    row = batch.make_row(one, SETTINGS, np.random.default_rng(0)).tokens.generation
    predicted = row.weight > 0
    steps = row.last_clean[predicted] - row.last_clean[predicted].min()
    taken = [sorted(row.index[predicted][steps == step].tolist()) for step in range(STEPS)]
    assert taken == [sorted(step) for step in planned(one)]


def test_cells_of_a_layout_lie_in_its_things_whatever_it_says():
    rng = np.random.default_rng(0)
    for _ in range(50):
        edges = rng.integers(0, 40, (rng.integers(1, 6), 4))
        layout = ", ".join(" thing" + "".join(f"<LOC_{edge}>" for edge in box) for box in edges)
        cells = first_cells(layout, 6, 4)
        assert len({*cells}) == len(cells) > 0 and 0 <= min(cells) <= max(cells) < CELLS


@pytest.mark.parametrize(
    "changes", [{"merge_cells": -1}, {"attention": "full"}, {"blocks": "uniform"}]
)
def test_rows_that_do_not_take_every_step_of_a_plan_are_refused(changes):
    with pytest.raises(config.ConfigError, match="layout_first=1"):
        config.changed(SETTINGS, {"diffusion": changes})


def test_another_order_plans_images_of_different_layouts_once():
    engine._plan.cache_clear()
    for layout in (LAYOUT, LAYOUT.partition(",")[0]):
        planned(example(layout), PLAIN)
    assert engine._plan.cache_info().misses == 1


@pytest.mark.parametrize("changes", [{"merge_cells": 4}, {"grid": "code", "preset": "dense"}])
def test_what_would_break_the_first_step_is_refused(changes):
    settings = config.changed(SETTINGS, {"sampling": changes, "model": {"codes_per_token": 4}})
    one = dataclasses.replace(example(LAYOUT), response=np.zeros((CELLS, 4), np.int32))
    with pytest.raises(config.ConfigError, match="decodes a few whole cells first"):
        planned(one, settings)
