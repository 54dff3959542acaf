# SPDX-License-Identifier: Apache-2.0
"""What a plan can make agree is counted rightly."""

import numpy as np
import pytest

from benchmarks import plan_bounds
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.sheet import shipped

# Two things of two cells, the first with 6 looks, the second with 3, which hides its background.
SCENE = plan_bounds.Shown(
    np.array([[0, 0, 1, 1, -1, -1]]).T,
    np.array([[True, True, False, False, True, True]]).T,
    [6, 3],
)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1] * 6, (1.0, 1.0, 1.0)),
        ([6], ((1 / 6 + 1 / 3) / 2, 5.0**-3, 5.0**-3 / 18)),
        ([2, 4], ((1 / 6 + 1 / 3) / 2, 1 / 5, 1 / 5 / 18)),  # the background is settled at once
        ([1, 5], ((1 + 1 / 3) / 2, 1.0, 1 / 3)),  # and the first thing
        ([3, 3], ((1 / 6 + 1) / 2, 1 / 5, 1 / 30)),
    ],
)
def test_cells_agree_unless_one_step_shows_a_look_for_the_first_time(sizes, expected):
    assert plan_bounds.agreement(SCENE, np.arange(6), np.array(sizes)) == pytest.approx(expected)


def test_cells_of_a_scene_show_what_is_drawn_in_them():
    sheet, of_things = shipped(plan_bounds.THINGS), []
    for index in range(5):
        scene = ArtDice(1, "bounds", index, sheet=sheet).scene()
        shown = plan_bounds.shown(scene, sheet)
        owner = shown.owner.reshape(plan_bounds.SIDE, plan_bounds.SIDE)
        for number, thing in enumerate(scene.things):
            inside = np.zeros_like(owner, bool)
            inside[thing.cells] = True
            assert 0 < (owner == number).sum() and not (owner[~inside] == number).any()
        assert shown.background[shown.owner == -1].all()
        assert shown.looks == [6 if thing.facing else 3 for thing in scene.things]
        one_by_one = np.ones(144, int)
        assert plan_bounds.agreement(shown, np.arange(144), one_by_one) == (1.0, 1.0, 1.0)
        apart = plan_bounds.shown(scene, sheet, together=False)
        assert (apart.owner.max(axis=1) >= shown.owner[:, 0]).all()
        of_things.append(plan_bounds.agreement(apart, np.arange(144), one_by_one)[0])
    assert 0 < np.mean(of_things) < 0.8  # four independent codes show most things at once
