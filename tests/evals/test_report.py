# SPDX-License-Identifier: Apache-2.0
"""Sheets show images with captions, the report has its sections, and counts match manual ones."""

import dataclasses

import numpy as np
import pytest
import stand_ins
from PIL import Image, ImageFont

from benchmarks import card as bench_card
from sparse_lavida_jax import config, old_names
from sparse_lavida_jax.checkpoints import manifest, model_folder
from sparse_lavida_jax.data import files
from sparse_lavida_jax.evals import exact, training_report
from sparse_lavida_jax.inference import engine
from sparse_lavida_jax.sampling import costs
from sparse_lavida_jax.scenes import tasks, world
from sparse_lavida_jax.training import metrics

TRAINED = {"draw": 1.0, "edit": 1.0, "answer": 1.0, "point": 1.0, "infill": 1.0, "fill_layout": 1.0}


def asked(count, *names):
    return [tasks.sample(task, exact.EVAL_SEED, i, "test") for task in names for i in range(count)]


def pixels_of(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_a_sheet_shows_every_image_and_writes_in_the_colour_of_the_judgement():
    images = [world.render(sample.target) for sample in asked(4, "draw")]
    tiles = [
        training_report.Tile(pixels, "a very long caption that needs more than one line", ok)
        for pixels, ok in zip(images, (None, True, False, None), strict=True)
    ]
    page = np.asarray(training_report.sheet(tiles, columns=3))
    side = world.IMAGE_SIZE
    height = side + training_report.CAPTION_HEIGHT + 8
    assert page.shape == (2 * height, 3 * (side + 8), 3)
    for i, pixels in enumerate(images):
        y, x = i // 3 * height + 4, i % 3 * (side + 8) + 4
        np.testing.assert_array_equal(page[y : y + side, x : x + side], pixels)
        below = page[y + side : y + side + training_report.CAPTION_HEIGHT, x : x + side].astype(int)
        darkest = below[np.unravel_index(below.sum(axis=2).argmin(), below.shape[:2])]
        expected = {None: (0, 0, 0), True: (0, 100, 0), False: (178, 34, 34)}[tiles[i].ok]
        assert abs(darkest - expected).max() < 60
        # The caption stays below its own image.
        assert (below[:, -1] == 255).all()
    assert (page[height:, 2 * (side + 8) :] == 255).all()


@pytest.mark.parametrize(
    "caption",
    ["nearest: a middling green square", "Donaudampfschifffahrt" * 9, "MW" * 99, "猫" * 40, ""],
)
@pytest.mark.parametrize("side", [8, 32, 64, 256])
def test_a_caption_stays_below_its_image_however_small_that_is(side, caption):
    blank = np.full((side, side, 3), 255, np.uint8)
    page = np.asarray(
        training_report.sheet(
            [training_report.Tile(blank, caption), training_report.Tile(blank, "")], 2
        )
    )
    y, x = np.nonzero((page < 128).any(axis=2))
    assert page.shape[1] >= 2 * world.IMAGE_SIZE
    assert bool(caption) == bool(len(x))
    assert (x < page.shape[1] / 2).all() and (y < len(page) - 1).all()


def test_a_caption_with_room_is_shown_to_its_end():
    font = ImageFont.load_default(9)
    for caption in ("nearest: a middling green square", "a small red circle left of a blue square"):
        assert " ".join(training_report._wrap(caption, font, world.IMAGE_SIZE)) == caption
    assert training_report._wrap("word " * 99, font, world.IMAGE_SIZE)[-1].endswith("...")


def test_a_check_scores_prompts_and_saves_a_sheet(tmp_path):
    pipe = stand_ins.Knowing(stand_ins.settings(), asked(training_report.CHECK_PROMPTS, "draw"))
    scores = training_report.check(pipe, tmp_path / "images" / "000007.png")
    assert scores == {"draw": 1.0, "single": 1.0, "attribute_precision": 1.0}
    rows = 4 * (world.IMAGE_SIZE + training_report.CAPTION_HEIGHT + 8)
    assert pixels_of(tmp_path / "images" / "000007.png").shape[0] == rows
    ignorant = stand_ins.Knowing(stand_ins.settings(), [], ignorant=True)
    assert training_report.check(ignorant, tmp_path / "empty.png") == {
        "draw": 0.0, "single": 0.0, "attribute_precision": 0.0,
    }  # fmt: skip
    more = stand_ins.settings(train={"eval_tasks": ("answer", "point")})
    known = asked(training_report.CHECK_PROMPTS, "draw", "answer", "point")
    pipe = stand_ins.Knowing(more, known)
    scores = training_report.check(pipe, tmp_path / "more.png")
    assert (scores["draw"], scores["answer"], scores["point"]) == (1.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The report of a model with perfect responses, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    with metrics.Reporter(config.Config(), folder, 0) as log:
        log.write(20, {"loss": 3.0})
        for step, score in ((50, 0.25), (90, 0.5)):
            log.write(
                step,
                {"draw": score, "single": 1.0, "attribute_precision": 0.75, "seconds": 60.0 * step}
                | ({"answer": 0.5} if step == 90 else {}),
            )
    given = stand_ins.settings(data={"tasks": TRAINED}, train={"eval_prompts": 14})
    pipe = stand_ins.Knowing(given, asked(14, *TRAINED.keys() - {"fill_layout"}))
    path = training_report.write(pipe, folder, step=90, seconds=330.0)
    assert path == folder / "report.md"
    return path.read_text(), folder


def test_the_report_has_its_sections_in_order(written):
    text, _ = written
    sections = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert sections == [
        "While it trained", "Exact scores", "Drawn", "Edited", "Answered", "Pointed", "Speed",
    ]  # fmt: skip
    assert text.startswith("# tiny\n")
    assert "90 steps in 5.5 minutes" in text


def test_the_report_has_the_curve_of_the_run(written):
    lines = written[0].splitlines()
    assert "| step | minutes | attribute precision | single | draw | answer |" in lines
    assert "| 50 | 50.0 | 0.75 | 1.00 | 0.25 |  |" in lines
    assert "| 90 | 90.0 | 0.75 | 1.00 | 0.50 | 0.50 |" in lines


def test_the_report_has_a_score_for_every_task(written):
    for task in ("draw", "edit", "answer", "point", "infill"):
        assert f"| {task} | 1 | 14 | 14 | 0.785 to 1.000 |" in written[0]
    assert "| answer | 1 | 14 | 14 | 0.785 to 1.000 | 0.35 |" in written[0]


def test_the_images_of_the_report_are_there(written):
    text, folder = written
    for name in ("drawn", "edited", "answered", "pointed"):
        assert f"![{name}](images/{name}.png)" in text
        assert pixels_of(folder / "images" / f"{name}.png").min() < 200


def test_the_report_says_how_fast_sparse_is(written):
    speed = written[0].partition("## Speed")[2]
    assert "times faster" in speed
    assert "sparse" in speed and "dense" in speed


def test_without_checks_the_report_says_so(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 20, "loss": 3.0}\n')
    assert "No image was scored" in training_report._curve(tmp_path / "metrics.jsonl")


def test_the_report_of_own_images_explains_its_losses_and_shows_the_newest_samples(tmp_path):
    (tmp_path / "images").mkdir()
    for name in ("000007.png", "000012.png", "nearest.png"):
        (tmp_path / "images" / name).touch()
    assert training_report._newest_sheet(tmp_path) == [
        "## Samples\n\n![samples](images/000012.png)"
    ]
    assert (
        "negative log-likelihood" in training_report.NLL
        and "lower is better" in training_report.NLL
    )


def test_a_box_is_drawn_around_what_was_pointed_at():
    empty = stand_ins.EMPTY
    marked = training_report._with_box(empty, " <LOC_4><LOC_8><LOC_8><LOC_16>")
    changed = np.argwhere((marked != empty).any(axis=2))
    assert (changed.min(axis=0).tolist(), changed.max(axis=0).tolist()) == ([32, 16], [64, 32])
    np.testing.assert_array_equal(training_report._with_box(empty, "somewhere"), empty)


@pytest.fixture
def counted():
    """Three steps over 36 cells: 13, 11 and 12, three registers each."""
    return stand_ins.Knowing(
        stand_ins.settings(sampling={"num_steps": 3, "schedule": "linear"}), []
    )


def passed_by(pipe, sampling, example):
    block = pipe.settings.data.text_block_len
    return costs.total(engine.planned_costs(pipe.settings.model, sampling, example, block))


@pytest.mark.parametrize(
    ("preset", "passed"),
    [
        # The prompt once; of the response, each step's own tokens, registers, and newest tokens.
        ("sparse", lambda prompt: prompt + 36 + 3 * 3 + (0 + 13 + 11)),
        # The prompt and the whole response three times, no registers.
        ("dense", lambda prompt: 3 * (prompt + 36)),
        # No cache, but truncated: prompt and everything decoded so far again.
        ("t", lambda prompt: 3 * (prompt + 3) + 36 + (0 + 13 + 24)),
        # Both caches, not truncated: also the tokens still masked.
        ("pr", lambda prompt: prompt + 36 + 3 * 3 + (0 + 13 + 11) + (23 + 12 + 0)),
    ],
)
def test_passed_tokens_are_counted_as_by_hand(counted, preset, passed):
    blank = np.zeros((36, 1), np.int32)
    drawn = counted.encoder.image_example("a red circle", blank)
    # user, three words, end of turn, assistant; end of turn after the response
    assert len(counted.tokenizer.encode("a red circle")) == 3
    sampling = dataclasses.replace(counted.settings.sampling, preset=preset)
    assert passed_by(counted, sampling, drawn) == passed(1 + 3 + 2 + 1)
    image = stand_ins.EMPTY[::2, ::2]
    edited = counted.encoder.image_example("remove the", blank, image=image, source=blank)
    vision = counted.settings.model.vision.num_tokens
    words = len(counted.tokenizer.encode("remove the"))
    assert passed_by(counted, sampling, edited) == passed(1 + words + 2 + 1 + vision + 36)


@pytest.mark.parametrize(
    ("preset", "passed"),
    [
        # The prompt once and the whole response every step.
        ("prefix", lambda prompt, b: prompt + 6 * 2 * b),
        # All in the first step of a text block; then the block and later ones, or only the block.
        ("fast_dllm_prefix", lambda prompt, b: 2 * (prompt + 2 * b) + 2 * 2 * b + 2 * b),
        ("fast_dllm_dual", lambda prompt, b: 2 * (prompt + 2 * b) + 2 * b + 2 * b),
        # The text block and registers every step, the first text block once more.
        ("sparse", lambda prompt, b: prompt + 6 * (b + 3) + b),
    ],
)
def test_passed_tokens_of_a_text_are_counted_as_by_hand(counted, preset, passed):
    block = counted.settings.data.text_block_len
    asked = counted.encoder.text_example("a red circle", length=2 * block)
    sampling = config.changed(counted.settings.sampling, {"text": {"preset": preset, "steps": 3}})
    assert passed_by(counted, sampling, asked) == passed(1 + 3 + 2, block)


def test_the_scores_go_into_the_readme_of_the_model(tmp_path):
    model_folder.copy("scenes", tmp_path / "model")
    digest = manifest.digest(tmp_path / "model")
    for table in ("| first |", "| second |"):
        training_report._show_scores(tmp_path / "model", table)
    readme = (tmp_path / "model" / "README.md").read_text()
    assert "\n## Scores\n\n| second |\n" in readme
    assert "first" not in readme
    assert digest in model_folder.lineage(tmp_path / "model")
    manifest.verify(tmp_path / "model")
    training_report._show_scores(tmp_path / "none", "| third |")
    assert not (tmp_path / "none").exists()


def test_the_card_of_the_bundled_model_is_made_of_its_rows(tmp_path):
    bench_card.write("scenes", str(tmp_path / "scenes"))
    readme = (tmp_path / "scenes" / "README.md").read_text()
    bundled = (model_folder.BUNDLED / "scenes" / "README.md").read_text()
    for name, new in old_names.NAMES.items():  # the bundled file keeps the old names
        bundled = bundled.replace(f"| {name} |", f"| {new} |")
    assert sorted(readme.splitlines()) == sorted(bundled.splitlines())
    assert readme.startswith("---\nlibrary_name: sparse-lavida-jax\n")
    assert "\nlicense: apache-2.0\n" in readme
    assert "| point | 1 | 2000 | 2000 | 0.998 to 1.000 | 0.42 |" in readme
    assert "$ sparse-lavida evaluate scenes\n" in readme
    model_folder.copy("scenes", tmp_path / "unknown", dtype="bfloat16")
    files.write_json(tmp_path / "unknown" / "made_of.json", [])
    manifest.write(tmp_path / "unknown")
    with pytest.raises(model_folder.CheckpointError, match="was not scored: leave --card out"):
        bench_card.write(str(tmp_path / "unknown"), str(tmp_path / "no"))


def test_the_model_card_says_how_it_was_made():
    card = training_report.model_card(config.Config(name="scenes", seed=3), 1234, 600.0)
    assert "--config=configs/scenes.py` (seed 3, 1234 steps, 10 minutes)" in card
    assert "Apache-2.0" in card
