# SPDX-License-Identifier: Apache-2.0
"""The figures show what the code does: entries, steps and token counts are read back from them."""

import importlib.util
import pathlib
import re

import numpy as np
import pytest
import tiny

from benchmarks import suites, work
from sparse_lavida_jax import SparseLaViDa, config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.page import figures
from sparse_lavida_jax.sampling import costs
from sparse_lavida_jax.sampling.prompts import PromptTokens
from sparse_lavida_jax.sequence import Text
from sparse_lavida_jax.tags import make_tags

ROOT = pathlib.Path(__file__).parents[2]
EIGHT = ["none", "p", "r", "t", "pr", "pt", "rt", "sparse"]
PAGES = ("README.md", "docs/method.md", "docs/log/2026-11-ablations.md",
         "colabs/how_it_works.ipynb", "colabs/generate_image.ipynb")  # fmt: skip


@pytest.fixture(scope="module")
def method():
    """The script of `docs/method.md`."""
    spec = importlib.util.spec_from_file_location("method", ROOT / "docs/method.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def colour_at(image, x, y):
    return image.getpixel((int(x), int(y)))


def test_the_matrix_is_the_figure_of_the_docstring():
    """Prompt 0, clean 1 and 2, masked 3 and 4, as in the docstring of `visibility.visible`."""
    block = np.arange(5, dtype=np.int32)[None]
    image = figures.visibility_matrix(make_tags(block, block, 2))
    wanted = ["x....", "xx...", "xxx..", "xxxx.", "xxx.x"]
    for query, row in enumerate(wanted):
        for key, seen in enumerate(row):
            x, y = (figures.MARGIN + (i + 0.5) * figures.SQUARE for i in (key, query))
            kind = (figures.PROMPT, figures.CLEAN, figures.CLEAN, figures.MASKED, figures.MASKED)
            assert colour_at(image, x, y) == (kind[key] if seen == "x" else figures.PAPER)


def test_the_order_is_drawn_from_dark_to_light():
    model = tiny.model_settings(grid_size=4)
    phases, _ = figures.plan_of(config.Sampling(num_steps=4, order="raster"), model)
    image = figures.order_grid(phases, 4)
    assert image.size == (4 * figures.CELL + 1,) * 2
    corner = figures.CELL - 4
    assert colour_at(image, 3, 3) == tuple(figures.EARLY)
    assert colour_at(image, 3 * figures.CELL + corner, 3 * figures.CELL + corner) == tuple(
        figures.LATE
    )


@pytest.mark.parametrize("preset", ["sparse", "dense", "p", "rt", "none"])
def test_the_costs_of_steps_add_up_to_what_the_sampler_passes(preset):
    model, sampling = tiny.model_settings(grid_size=4), config.Sampling(num_steps=5, preset=preset)
    phases, settings = figures.plan_of(sampling, model)
    steps = costs.costs(phases, settings, PromptTokens((11,)))
    assert sum(step.decode for step in steps) == 16
    assert len(steps) == 5 + settings.preset.cache_prompt


def test_bars_and_strips_have_their_sizes():
    model = tiny.model_settings(grid_size=4)
    runs = {
        name: costs.costs(
            *figures.plan_of(config.Sampling(num_steps=4, preset=name), model), PromptTokens((9,))
        )
        for name in ("dense", "sparse")
    }
    assert figures.cost_bars(runs).width == 620
    frames = [np.full((6, 6, 3), i, np.uint8) for i in range(20)]
    strip = figures.strip(frames, scale=2, most=5)
    assert strip.size == (5 * 12 + 4 * 4, 12)
    assert colour_at(strip, 0, 0) == (0, 0, 0)
    assert colour_at(strip, strip.width - 1, 0) == (19, 19, 19)


@pytest.mark.parametrize("guidance", [{}, {"guidance": 2.0, "guidance_interval": (0.0, 0.5)}])
@pytest.mark.parametrize("name", [*config.PRESETS, *config.TEXT_PRESETS])
def test_tokens_are_those_of_the_prompts_and_steps_that_are_laid_out(name, guidance):
    """`benchmarks.work` counts rows x tokens from the arrays of the prompts, for operations."""
    settings = config.Config(
        model=tiny.model_settings(grid_size=4), sampling=config.Sampling(num_steps=4, **guidance)
    )
    words = (Text(np.arange(1, 12, dtype=np.int32)),)
    examples = {
        "draw": suites._example(words, "image", 16, settings.model.codes_per_token),
        "text": suites._example(words, "text", 32, 1),
    }
    asked = {"draw": {"preset": name}, "text": {"text": {"preset": name}}}
    for task, changes in asked.items():
        if task == "draw" and name in config.TEXT_PRESETS:
            continue
        sampling = config.changed(settings.sampling, changes)
        case = suites.RequestCase(
            id=name, task=task, method=name, example=examples[task], sampling=sampling,
            text_block_len=8,
        )  # fmt: skip
        prompt, how = case.prompt(settings.model), case.settings(settings.model)
        held = (np.asarray(prompt.understanding.tags.horizon) >= 0).sum(axis=1)
        assert len(held) == (2 if guidance and task == "draw" else 1)
        found = costs.costs(case.plan(settings.model), how, PromptTokens(tuple(held.tolist())))
        assert costs.total(found) == work.of_case(case, settings.model).total("tokens")


def test_a_text_counts_up_to_the_text_block_in_which_it_ends():
    settings = config.Config(model=tiny.model_settings())
    case = suites.RequestCase(
        id="", task="text", method="sparse", example=suites._example((), "text", 32, 1),
        sampling=config.changed(settings.sampling, {"text": {"steps": 2}}), text_block_len=8,
    )  # fmt: skip
    plan, how = case.plan(settings.model), case.settings(settings.model)
    for end, blocks in ((0, 1), (7, 1), (8, 2), (31, 4), (32, 4)):
        assert len(costs.costs(plan, how, PromptTokens((5,)), end=end)) == 1 + 2 * blocks


@pytest.mark.parametrize("page", PAGES)
def test_pages_that_show_tokens_say_what_they_are(page):
    assert costs.DEFINITION in " ".join((ROOT / page).read_text().split())


def test_the_page_shows_the_tokens_of_eight_samplers(method):
    settings = model_folder.read_config(model_folder.find_model("scenes"))
    page = (ROOT / "docs/method.md").read_text()
    (row,) = re.findall(r"^\| tokens of the image \| (.*) \|$", page, re.M)
    planned = {
        name: costs.total(
            costs.costs(
                *figures.plan_of(method.with_preset(settings, name), settings.model),
                PromptTokens((method.PROMPT_TOKENS,)),
            )
        )
        for name in EIGHT
    }
    assert [*method.EXACT_PRESETS] == EIGHT
    assert [*map(int, row.split(" | "))] == [*planned.values()]
    assert len(set(planned.values())) == 8


@pytest.mark.slow  # 16 plans are compiled: three minutes
def test_eight_samplers_draw_the_same_image_at_the_costs_on_the_page(method):
    drawn = method.samplers(SparseLaViDa.from_pretrained("scenes"))
    assert [*drawn] == EIGHT
    for result in drawn.values():
        np.testing.assert_array_equal(result.pixels[0], drawn["none"].pixels[0])
        np.testing.assert_array_equal(result.tokens[0], drawn["none"].tokens[0])
        assert result.layouts == drawn["none"].layouts
    assert method.table(drawn) in (ROOT / "docs/method.md").read_text()
