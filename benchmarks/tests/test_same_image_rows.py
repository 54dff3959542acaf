# SPDX-License-Identifier: Apache-2.0
"""First differences from kept codes are told apart from their consequences, with their margins."""

import pathlib

import numpy as np

from benchmarks import measurements, same_image

PAGE = pathlib.Path(__file__).parents[2] / "docs/log/2026-11-same-image.md"


def kept():
    """Three images of four cells, two a step, and layouts of three tokens, one a step."""
    return {
        "codes": np.arange(12).reshape(3, 4),
        "step": np.array([[0, 1, 1, 0]] * 3),
        "image_margins": np.array([[0.5, 0.1, 0.2, 0.3]] * 3, np.float32),
        "layout_tokens": np.array([[7, 8, 9]] * 3),
        "decoded_at": np.array([[2, 1, 3]] * 3),
        "layout_margins": np.array([[0.04, 0.05, 0.06]] * 3, np.float32),
    }


def test_what_is_the_same_has_no_differences():
    found = same_image.compared(kept(), kept())
    assert (found["layouts"], found["layouts_same"]) == (3, 3)
    assert (found["compared"], found["same"]) == (3, 3)
    assert found["first_cells"] == found["layout_first_margins"] == []
    assert found["image"]["moved_median_99_most"] == [0, 0, 0] and not found["image"]["lost"]


def test_cells_of_the_first_step_that_differs_count():
    here = kept()
    here["codes"][1, [0, 1, 3]] = 60  # cell 1 is of a later step
    here["codes"][2, 2] = 60
    here["image_margins"][1, 0] = -0.25
    found = same_image.compared(kept(), here)
    assert (found["compared"], found["same"]) == (3, 1)
    cells = [(one["image"], one["cell"]) for one in found["first_cells"]]
    assert cells == [(1, 0), (1, 3), (2, 2)]
    np.testing.assert_allclose([one["margin"] for one in found["first_cells"]], [0.5, 0.3, 0.2])
    assert found["image"]["lost"] == 1 and found["image"]["largest_lost_margin"] == 0.5
    assert found["image"]["moved_median_99_most"][2] == 0.75


def test_images_of_other_layouts_are_not_compared():
    here = kept()
    here["layout_tokens"][0, 0] = 70
    here["decoded_at"][1] = [3, 1, 2]
    here["codes"][:2] = 60
    found = same_image.compared(kept(), here)
    assert (found["layouts"], found["layouts_same"]) == (3, 1)
    assert (found["compared"], found["same"]) == (1, 1)
    np.testing.assert_allclose(found["layout_first_margins"], [0.04, 0.04])


def test_the_page_has_the_table_of_the_rows():
    rows = [row for row in measurements.read_rows("firsts") if row["id"].startswith("same/")]
    assert rows and same_image.summary(rows) in PAGE.read_text()
