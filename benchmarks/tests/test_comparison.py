# SPDX-License-Identifier: Apache-2.0
"""Each way to train is trained and scored once, and reported with its scores."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
import stand_ins
import tiny

from benchmarks import ablation_report, comparison, measurements
from benchmarks.comparison import Study
from sparse_lavida_jax import config, train
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.models import parameters
from sparse_lavida_jax.sampling.progress import Progress
from sparse_lavida_jax.scenes import scene_batches as data_batches
from sparse_lavida_jax.scenes.scene_batches import SceneBatches
from sparse_lavida_jax.visibility import PAD_BLOCK

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("ablation_*.py"))
COMMITTED = measurements.RESULTS
QUICKLY = {"train_steps": 2, "eval_prompts": 0, "init_from": ""}


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path):
    monkeypatch.setattr(data_batches, "LENGTH_PROBE", 16)
    monkeypatch.setattr(train, "Denoiser", lambda settings, rngs: tiny.denoiser(settings))
    monkeypatch.setattr(measurements, "RESULTS", tmp_path / "results")
    with stand_ins.quick_compilation():
        yield


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_way_of_a_file_can_be_trained(path):
    study = Study.read(path)
    shared, found = study.shared, study.ablation
    assert f"benchmarks.ablation --config=configs/{path.name}" in path.read_text()
    assert shared.name == path.stem
    assert not shared.train.eval_prompts and not shared.train.image_seconds
    for way in found.ways:
        made = study.settings(way, 1)
        assert made.seed == (1001 if found.ways[way].after else 1)
        assert made.name.endswith("_s1")
        same = dataclasses.replace(made, name=shared.name, seed=shared.seed)
        assert (same == shared) == (not found.ways[way].changes and not found.ways[way].after)
        for changes in found.ways[way].sampled.values():
            config.changed(made, {"sampling": changes})


def test_ways_that_train_alike_share_a_run_and_others_do_not():
    """Steps, seed and starting point distinguish runs; the suite and sampling settings do not."""
    ways = {
        (path.stem, way): study.settings(way, 0)
        for path in CONFIGS
        for study in [Study.read(path)]
        for way in study.ablation.ways
    }
    names = {key: made.name for key, made in ways.items()}
    plain = names["ablation_blocks", "schedule"]
    assert {key for key, name in names.items() if name == plain} == {
        ("ablation_blocks", "schedule"), ("ablation_cells", "one_code"),
        ("ablation_quality", "sparse_draw"), ("ablation_registers", "4"),
        ("ablation_sampling", "sparse"), ("ablation_training", "scratch_step_causal"),
    }  # fmt: skip
    others = len(names) - len({*names.values()})
    # These are also requested twice each: uniform blocks, a dense model that draws, one that
    # answers, and a sparse one that answers, trained with one step of a text per row.
    assert others == 5 + 4
    study = Study.read(CONFIGS[0])
    one = study.settings("schedule", 0)
    for changes in ({"train": {"train_steps": 7}}, {"sampling": {"shift": 1.0}}):
        changed = dataclasses.replace(study, shared=config.changed(study.shared, changes))
        assert changed.settings("schedule", 0).name != one.name
    assert study.settings("schedule", 1).name != one.name


def test_committed_rows_are_of_the_trainings_of_their_files():
    """Otherwise a file has changed, and its training can no longer be reproduced."""
    names = {
        (path.stem, way, seed): study.settings(way, seed).name
        for path in CONFIGS
        for study in [Study.read(path)]
        for way in study.ablation.ways
        for seed in range(3)
    }
    rows = [json.loads(path.read_text()) for path in (COMMITTED / "cpu").glob("comparison/*.json")]
    assert {(row["ablation"], row["way"], row["seed"]) for row in rows} == set(names)
    for row in rows:
        name = names[row["ablation"], row["way"], row["seed"]]
        assert row["training"] == name, row["id"]


def test_a_way_learns_its_own_tasks_and_no_others():
    """Weights are not merged like sections: those of a way replace the shared ones."""
    (path,) = (path for path in CONFIGS if path.stem == "ablation_quality")
    study = Study.read(path)
    learned = {way: set(study.settings(way, 0).data.tasks) for way in study.ablation.ways}
    of_a_skill = {
        "draw": {"layout", "draw"}, "edit": {"edit"}, "answer": {"quiz", "answer"},
        "point": {"locate", "point"}, "infill": {"infill"},
    }  # fmt: skip
    assert learned == {
        f"{kind}_{skill}": tasks
        for skill, tasks in of_a_skill.items()
        for kind in ("sparse", "dense")
    }


def test_ways_that_make_no_sense_are_reported():
    with pytest.raises(config.ConfigError, match="'b' starts after 'c', which is none of b"):
        comparison.Ablation(question="?", tasks=("draw",), ways={"b": comparison.Way(after="c")})
    with pytest.raises(config.ConfigError, match="'a b' is part of file names"):
        comparison.Ablation(question="?", tasks=("draw",), ways={"a b": comparison.Way()})


def shared():
    return stand_ins.settings(name="tried", data={"tasks": {"draw": 1.0}}, train=QUICKLY)


def compared():
    slow = {"optimizer": {"learning_rate": 1e-12, "warmup_steps": 1, "ema": 0.0}}
    return comparison.Ablation(
        question="Which?",
        tasks=("draw",),
        prompts=2,
        ways={
            "one": comparison.Way(sampled={"": {}, "steps": {"num_steps": 1}}),
            "two": comparison.Way(after="one", changes=slow),
        },
    )


def measured(way, folder):
    study = Study(shared(), compared(), folder / "runs")
    rows = study.measure(measurements.Bench(comparison.SUITE), way, 3)
    return [(row["way"], row["sampled"], row["total"]) for row in rows]


@pytest.mark.slow
def test_a_way_is_trained_and_scored_once(tmp_path):
    """The second starts from the first, whose model does not change at this learning rate."""
    assert measured("two", tmp_path) == [("two", "", 2)]
    one, two = (
        Study(shared(), compared(), tmp_path / "runs").settings(way, 3).name
        for way in ("one", "two")
    )
    first = model_folder.load_model(tmp_path / "runs" / one)
    second = model_folder.load_model(tmp_path / "runs" / two)
    assert (second.config.seed, second.config.name) == (1003, two)
    ones, twos = (parameters.by_name(found.model) for found in (first, second))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ones, twos)
    trained = tmp_path / "runs" / one / "metrics.jsonl"
    before = trained.read_text()
    assert not (tmp_path / "runs" / one / "report.md").exists()
    assert measured("one", tmp_path) == [("one", "", 2), ("one", "steps", 2)]
    assert measured("one", tmp_path) == measured("two", tmp_path) == []
    assert trained.read_text() == before
    rows = measurements.read_rows(comparison.SUITE)
    (of_one_step,) = (row for row in rows if row["sampled"])
    assert of_one_step["sampling"]["num_steps"] == 1
    assert of_one_step["passes"]["image"] == 1
    assert all(row["passes"]["image"] > 1 for row in rows if not row["sampled"])
    # A row from another training, or with other prompts, is measured again.
    path = measurements.path_of(comparison.SUITE, "tried/one//draw/s3")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"training": "ablation_other_s3"}))
    assert measured("one", tmp_path) == [("one", "", 2)]
    assert measured("one", tmp_path) == []
    # A row older than a setting was sampled with its default, and is not measured again.
    row = json.loads(path.read_text())
    del row["sampling"]["top_k"]
    path.write_text(json.dumps(row))
    assert measured("one", tmp_path) == []


def row(way, seed, share, sampled="", *, passes=4.0, curve=False):
    return {
        "place": [way == "b", 0],
        "ablation": "tried", "question": "Which?", "way": way, "group": way, "sampled": sampled,
        "seed": seed,
        "task": "draw", "share": share, "correct": int(100 * share), "total": 100,
        "train_steps": 7, "after": "a" if way == "b" else "", "created": f"{seed}",
        "passes": {"text": passes}, "curve": curve,
    }  # fmt: skip


ROWS = [row("a", 0, 0.5), row("a", 1, 0.7), row("b", 0, 0.25, "fast")]


def test_the_table_holds_means_and_spreads():
    assert ablation_report.summary(ROWS).splitlines()[2:] == [
        "| a | 0.600 ± 0.141 | 4.0 | 7 | 2 |",
        "| b: fast | 0.250 | 4.0 | a, then 7 | 1 |",
    ]
    both = [row("a", 0, 0.5), row("b", 0, 0.25) | {"task": "edit", "group": "a", "after": ""}]
    both[1]["train_steps"] = 9
    assert ablation_report.summary(both).splitlines()[2:] == [
        "| a | 0.500 | 0.250 | 4.0 | 7 to 9 | 1 |"
    ]
    again = row("a", 0, 0.9) | {"created": "9"}
    assert ablation_report.newest([again, *ROWS]) == [again, *ROWS[1:]]
    assert ablation_report.newest([*reversed(ROWS)]) == ROWS


def test_passes_are_counted_batch_by_batch():
    passes = comparison.Passes()
    for stage, done in (
        ("layout", 0), ("layout", 1), ("layout", 3), ("image", 0), ("image", 6),
        ("layout", 0), ("layout", 4), ("image", 0), ("image", 6),
    ):  # fmt: skip
        responses = np.zeros((1, 1, 1), np.int32)
        passes(Progress(stage, done, 8, responses, responses[..., 0], range(0), 0))
    assert passes.of_a_batch == {"layout": 3.5, "image": 6.0}


def test_a_curve_is_drawn_over_passes(tmp_path):
    pytest.importorskip("matplotlib", reason="the report needs pip install '.[plots]'")
    rows = [
        row("a", seed, share, sampled, passes=passes, curve=True)
        for sampled, share, passes in (("count_1", 0.2, 1), ("count_4", 0.6, 4), ("sure_1", 0.5, 2))
        for seed in (0, 1)
    ]
    assert "| a: count_4 | 0.600 ± 0.000 | 4.0 | 7 | 2 |" in ablation_report.summary(rows)
    ablation_report.plot(rows, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def speed(method, seconds, tokens, batch=2, run="a"):
    return {
        "run": run, "task": "draw", "method": method, "batch": batch, "random_weights": False,
        "median_s": seconds, "tokens": {"useful": tokens}, "model": "scenes", "steps": 8,
        "device": {"kind": "cpu"},
    }  # fmt: skip


def test_speed_is_told_of_few_at_a_time_and_next_to_dense():
    rows = [speed("dense", 4.0, 300), speed("sparse", 1.0, 100), speed("pt", 2.0, 150, run="b")]
    many = [speed("dense", 4.0, 300, 16, run="c"), speed("sparse", 1.0, 100, 16, run="c")]
    assert ablation_report.of_bundled_model(rows + many) == rows[:2]


def test_the_report_is_written_between_its_marks(tmp_path):
    pytest.importorskip("matplotlib", reason="the report needs pip install '.[plots]'")
    with pytest.raises(config.ConfigError, match=r"no row in .* run --config="):
        ablation_report.write_report(tmp_path)
    folder = measurements.RESULTS / "cpu" / comparison.SUITE
    folder.mkdir(parents=True)
    for number, one in enumerate(ROWS):
        (folder / f"{number}.json").write_text(json.dumps(one))
    path = ablation_report.write_report(tmp_path)
    assert "## Which?" in path.read_text() and "0.600 ± 0.141" in path.read_text()
    assert (tmp_path / "tried.png").stat().st_size > 1000
    path.write_text(f"before\n\n{ablation_report.BEGIN}\nold\n{ablation_report.END}\nafter\n")
    ablation_report.write_report(tmp_path)
    told = path.read_text()
    assert told.startswith("before\n") and told.endswith("\nafter\n") and "\nold\n" not in told
    path.write_text("without marks")
    with pytest.raises(config.ConfigError, match="the page has no lines"):
        ablation_report.write_report(tmp_path)
    assert path.read_text() == "without marks"


def test_truncated_rows_hold_what_a_sampler_passes_and_all_of_it_sees_all():
    """The same draws as a step-causal row with one masked block, except for the tags."""
    found = {}
    for attention in ("step_causal", "truncated"):
        changes = {"attention": attention, "num_masked_blocks": 1, "plan_steps": (4,)}
        given = stand_ins.settings(diffusion=changes)
        batches = SceneBatches(given, stand_ins.encoder(given))
        found[attention] = batches.batch("draw", 0)
    causal, truncated = found["step_causal"], found["truncated"]
    for name in ("tokens", "index"):
        ours, theirs = (
            np.sort(getattr(batch.generation, name).reshape(2, -1)) for batch in found.values()
        )
        np.testing.assert_array_equal(ours, theirs)
    assert (truncated.generation.tokens == given.model.image_register_id).any()
    assert len(np.unique(causal.generation.tags.block)) > 2
    assert set(np.unique(truncated.generation.tags.block)) <= {0, PAD_BLOCK}
    one = {"attention": "truncated", "num_masked_blocks": 1, "text_masked_blocks": 1}
    assert stand_ins.settings(diffusion=one).diffusion.attention == "truncated"
    for name in ("num_masked_blocks", "text_masked_blocks"):
        with pytest.raises(config.ConfigError, match=f"needs .*{name}=1"):
            stand_ins.settings(diffusion=one | {name: 2})
