# SPDX-License-Identifier: Apache-2.0
"""The figures show what the code does: entries, steps and token counts are read back from them."""

import numpy as np
import pytest
import tiny

from sparse_lavida_jax import config
from sparse_lavida_jax.apps import figures
from sparse_lavida_jax.layout import make_layout
from sparse_lavida_jax.sampling import costs


def colour_at(image, x, y):
    return image.getpixel((int(x), int(y)))


def test_the_matrix_is_the_figure_of_the_docstring():
    """Prompt 0, clean 1 and 2, masked 3 and 4, as in the docstring of `visibility.visible`."""
    block = np.arange(5, dtype=np.int32)[None]
    image = figures.visibility_matrix(make_layout(block, block, 2))
    wanted = ["x....", "xx...", "xxx..", "xxxx.", "xxx.x"]
    for query, row in enumerate(wanted):
        for key, seen in enumerate(row):
            x, y = (figures.MARGIN + (i + 0.5) * figures.SQUARE for i in (key, query))
            kind = (figures.PROMPT, figures.CLEAN, figures.CLEAN, figures.MASKED, figures.MASKED)
            assert colour_at(image, x, y) == (kind[key] if seen == "x" else figures.PAPER)


def test_the_order_is_drawn_from_dark_to_light():
    model = tiny.model_settings(grid_size=4)
    segments, _ = figures.plan_of(config.Sampling(num_steps=4, order="raster"), model)
    image = figures.order_grid(segments, 4)
    assert image.size == (4 * figures.CELL + 1,) * 2
    corner = figures.CELL - 4
    assert colour_at(image, 3, 3) == tuple(figures.EARLY)
    assert colour_at(image, 3 * figures.CELL + corner, 3 * figures.CELL + corner) == tuple(
        figures.LATE
    )


@pytest.mark.parametrize("preset", ["sparse", "dense", "p", "rt", "none"])
def test_the_costs_of_steps_add_up_to_what_the_sampler_passes(preset):
    model, sampling = tiny.model_settings(grid_size=4), config.Sampling(num_steps=5, preset=preset)
    segments, settings = figures.plan_of(sampling, model)
    steps = costs.costs(segments, settings, [11])
    assert sum(step.decode for step in steps) == 16
    assert len(steps) == 5 + settings.preset.cache_prompt


def test_bars_and_strips_have_their_sizes():
    model = tiny.model_settings(grid_size=4)
    runs = {
        name: costs.costs(*figures.plan_of(config.Sampling(num_steps=4, preset=name), model), [9])
        for name in ("dense", "sparse")
    }
    assert figures.cost_bars(runs).width == 620
    frames = [np.full((6, 6, 3), i, np.uint8) for i in range(20)]
    strip = figures.strip(frames, scale=2, most=5)
    assert strip.size == (5 * 12 + 4 * 4, 12)
    assert colour_at(strip, 0, 0) == (0, 0, 0)
    assert colour_at(strip, strip.width - 1, 0) == (19, 19, 19)
