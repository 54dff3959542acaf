# SPDX-License-Identifier: Apache-2.0
"""Images are proved from their records, planted faults are found, and surprise adds up.

`tests/proofs/test_whole_plan.py` proves the pass that both use.
"""

import dataclasses
import json
from unittest import mock

import numpy as np
import pytest
import stand_ins
from PIL import Image

from sparse_lavida_jax.cli import commands, program
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference import differences, proofs, provenance, surprise
from sparse_lavida_jax.inference.whole_plan import UNTOLD
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.scenes import tasks, world
from sparse_lavida_jax.schema import InputError

TASKS = (*tasks.TASKS, "fill_layout")
SAMPLING = {"num_steps": 4, "layout_temperature": 1.0, "text": {"steps": 4}}
IMAGE = world.render(tasks.sample("edit", 0, 0).image)
LAYOUT = " large red circle<LOC_4><LOC_8><LOC_8><LOC_12>"


@pytest.fixture(scope="module")
def pipe():
    with stand_ins.quick_compilation():
        yield stand_ins.pipe_of_tasks(TASKS, 2, **SAMPLING)


@pytest.fixture(scope="module")
def drawn(pipe):
    """Two images with a layout, and one of every other task, with what it was drawn after."""
    return {
        "generate": (pipe.generate(["a red circle", "two blue squares"], seed=3), None),
        "edit": (pipe.edit(IMAGE, "remove the circle", seed=3, layout=False, guidance=1.5), IMAGE),
        "inpaint": (
            pipe.inpaint(IMAGE, "a cross", box=(0, 0, 64, 96), seed=3, layout=False),
            IMAGE,
        ),
        "outpaint": (
            pipe.outpaint(IMAGE[:48, :48], "a cross", seed=3, layout=False),
            IMAGE[:48, :48],
        ),
    }


def with_changes(result, row=0, **changes):
    """Returns a result of one image, as read from its PNG, with changes to its record."""
    read = json.loads(json.dumps(result.records[row])) | changes
    return dataclasses.replace(result.part(row, row + 1), records=(read,))


@pytest.mark.parametrize("task", ["generate", "edit", "inpaint", "outpaint"])
def test_what_was_drawn_follows(pipe, drawn, task):
    result, shown = drawn[task]
    for row, proof in enumerate(pipe.prove(result, shown=shown)):
        record = result.records[row]
        assert proof.follows and "it could have been drawn so" in proof.lines[-1]
        known = record["recipe"].get("known") or [[False] * 6] * 6
        if task != "outpaint":
            assert proof.image.tokens == 36 - np.sum(known)
        assert proof.image.bits > 20
        assert (proof.layout is not None) == (task == "generate")
        if proof.layout:
            assert proof.layout.tokens == sum(at != UNTOLD for at in record["decoded_at"]) > 0
            assert proof.layout.bits > 20
        assert proof.bits == pytest.approx(sum(stage.bits for stage in proof.stages))


@pytest.mark.parametrize("row", [0, 1])
def test_another_seed_or_prompt_does_not_follow(pipe, drawn, row):
    result, _ = drawn["generate"]
    for change in ({"seed": 77}, {"prompt": "three green crosses"}):
        (proof,) = pipe.prove(with_changes(result, row, **change))
        assert not proof.follows and proof.lines[-1] == "it was not drawn so"


def test_every_planted_code_is_found(pipe, drawn):
    """In every fifth cell; it is among the cells that do not follow."""
    result, _ = drawn["generate"]
    order = None
    for cell in range(0, 36, 5):
        codes = json.loads(json.dumps(result.records[0]["codes"]))
        codes[cell][0] = (codes[cell][0] + 1) % 64
        (proof,) = pipe.prove(with_changes(result, codes=codes))
        assert cell in proof.image.places and not proof.follows
        order = order or proof.image.step
    assert order is not None


def test_a_code_of_the_last_step_is_found(pipe, drawn):
    result, shown = drawn["inpaint"]
    run = pipe.task_run(pipe.settings.sampling)
    _, request, _ = pipe.recorded(result.records[0], shown)
    ((steps, _),) = run.engine.scores(
        [run.image_example(request)], [request], request.sampling, result.tokens, stage="image"
    )
    last = int(steps[-1].at[-1])
    codes = [list(one) for one in result.records[0]["codes"]]
    codes[last][0] = (codes[last][0] + 3) % 64
    (proof,) = pipe.prove(with_changes(result, codes=codes), shown=shown)
    assert (proof.image.wrong, proof.image.step, proof.image.places) == (1, len(steps) - 1, (last,))


def test_a_given_cell_and_a_pixel_are_found(pipe, drawn):
    result, shown = drawn["inpaint"]
    known = np.flatnonzero(np.array(result.records[0]["recipe"]["known"]).reshape(-1))
    codes = [list(one) for one in result.records[0]["codes"]]
    codes[known[0]][0] = (codes[known[0]][0] + 1) % 49
    (proof,) = pipe.prove(with_changes(result, codes=codes), shown=shown)
    assert proof.given == (known[0],) and known[0] in proof.pixels
    pixels = result.pixels[0].copy()
    pixels[20, 40] = 255 - pixels[20, 40]
    (proof,) = pipe.prove(dataclasses.replace(result, pixels=(pixels,)), shown=shown)
    assert proof.pixels == (1 * 6 + 2,) and proof.image.wrong == 0 and not proof.follows


def test_planted_layout_tokens_and_orders_are_found(pipe, drawn):
    result, _ = drawn["generate"]
    tokens, order = (result.records[0][name] for name in ("layout_tokens", "decoded_at"))
    for at in np.flatnonzero(order).tolist():
        changed = [*tokens]
        changed[at] = (changed[at] + 1) % 300
        (proof,) = pipe.prove(with_changes(result, layout_tokens=changed))
        assert not proof.follows and proof.layout.wrong
    turned = [*order]
    first, second = sorted(set(order) - {UNTOLD})[:2]
    a, b = order.index(first), order.index(second)
    turned[a], turned[b] = second, first
    (proof,) = pipe.prove(with_changes(result, decoded_at=turned))
    assert not proof.follows and proof.layout.step == 0
    for other in (UNTOLD, 1, 200):  # the step of a token is not told, or is none
        hidden = [other if at == max(order) else at for at in order]
        (proof,) = pipe.prove(with_changes(result, decoded_at=hidden))
        assert not proof.follows
    (proof,) = pipe.prove(with_changes(result, layout=LAYOUT))
    assert not proof.follows and not proof.text


def test_a_branch_follows_with_its_turns(pipe, drawn):
    for at in ("layout:1", "image:2"):
        branches = pipe.branch(drawn["generate"][0].part(0, 1), at, num_images=2)
        assert all(proof.follows and proof.layout for proof in pipe.prove(branches))
        (proof,) = pipe.prove(with_changes(branches, turns=[]))
        assert not proof.follows


def test_the_best_of_several_follows(pipe):
    result = pipe.generate("a red circle", seed=3, best_of=2)
    assert result.records[0]["recipe"]["attempt"] == 1
    (proof,) = pipe.prove(result)
    assert proof.follows and proof.layout
    first = result.records[0]["recipe"] | {"attempt": 0}
    (proof,) = pipe.prove(with_changes(result, recipe=first))
    assert not proof.follows


def test_a_replayed_image_has_the_same_record(pipe, drawn):
    for result, shown in drawn.values():
        assert pipe.replay(with_changes(result).records[0], shown).records == result.records[:1]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"codes": None}, "before records held codes"),
        ({"task": "reflect"}, "only the last of its images"),
        ({"sampling": {"order": "confidence", "preset": "none"}}, "confidences"),
        ({"sampling": {"preset": "p"}}, "all masks"),
        ({"sampling": {"text": {"preset": "prefix"}}}, "all masks"),
        ({"sampling": {"text": {"commit": "threshold"}}}, "stop early"),
        ({"sampling": {"quantize": "int8"}}, "8 bits"),
        ({"codes": [[1]] * 35}, r"its codes are not \[36, 1\]"),
        ({"codes": [[64]] * 36}, "below 64"),
        ({"codes": [[1, 2]] * 36}, r"\[36, 1\]"),
        ({"codes": [[-1]] * 36}, "a list of codes"),
        ({"codes": [[1]] * 200_000}, "a list of codes"),
        ({"layout_tokens": [2**40]}, "whole numbers"),
        ({"layout_tokens": [1], "decoded_at": [2]}, "its layout tokens are not"),
        ({"layout_tokens": [1]}, "1 tokens, and decoded_at has 16"),
        ({"margins": {"image": [float("nan")] * 36}}, "a list of numbers"),
        ({"margins": {"image": [True] * 36}}, "a list of numbers"),
        ({"margins": {"layout": "0.5"}}, "a list of numbers"),
        ({"margins": [0.5]}, "margins is"),
        ({"margins": {"pixels": []}}, "pixels"),
    ],
)
def test_what_cannot_be_proved_is_refused(pipe, drawn, changes, told):
    result, _ = drawn["generate"]
    if "sampling" in changes:
        changes = {"sampling": result.records[0]["sampling"] | changes["sampling"]}
    if changes.get("task") == "reflect":
        changes["recipe"] = {"rounds": 1, "layout": None}
    with pytest.raises(InputError, match=told):
        pipe.prove(with_changes(result, **changes))


def test_records_of_the_first_format_are_read(pipe, drawn):
    record = with_changes(drawn["generate"][0], format="sparse-lavida-picture/1").records[0]
    older = {k: v for k, v in record.items() if k not in ("codes", "layout_tokens", "decoded_at")}
    provenance.check(older)
    np.testing.assert_array_equal(pipe.replay(older).pixels[0], drawn["generate"][0].pixels[0])


def planted(result, *cells, row=0):
    """Returns the record of an image, as read from its PNG, with other codes in some cells."""
    record = with_changes(result, row).records[0]
    for cell in cells:
        record["codes"][cell][0] = (record["codes"][cell][0] + 1) % 49
    return record


def differing(caplog):
    """Returns what was said of cells that differ, and not of words that no model knows."""
    return [one for one in caplog.messages if "cells differ" in one]


def test_margins_are_recorded(pipe, drawn):
    result, _ = drawn["generate"]
    records = pipe.with_margins(result).records
    for record, proof, before in zip(records, pipe.prove(result), result.records, strict=True):
        margins = record["margins"]
        assert record == before | {"margins": margins}
        for stage in (proof.layout, proof.image):
            told = [one for one in margins[stage.name] if one is not None]
            assert min(told) == pytest.approx(stage.smallest[0], abs=1e-4) and min(told) > 0
            assert (
                f"the smallest margin is {stage.smallest[0]:.2g} logits"
                in proof.lines[-3:][stage.name == "image"]
            )
        order = record["decoded_at"]
        assert [x is None for x in margins["layout"]] == [x == UNTOLD for x in order]
        assert len(margins["image"]) == 36 and None not in margins["image"]
        provenance.check(json.loads(json.dumps(record)))


def test_the_cells_that_differ_are_told(pipe, drawn, caplog):
    result, _ = drawn["generate"]
    result = pipe.with_margins(result)
    assert not differences.cells(result.records[0], pipe.replay(result.records[0]))
    assert not differing(caplog)
    record = planted(result, 7)
    again = pipe.replay(record)
    np.testing.assert_array_equal(again.tokens[0], result.tokens[0])
    assert differences.cells(record, again) == (7,)
    (told,) = differing(caplog)
    then = result.records[0]["margins"]["image"][7]
    assert "1 of 36 cells differ from the record; step " in told
    assert "cell 7 (margin here -" in told and f", when it was drawn {then:.2g} logits)" in told


def test_only_cells_of_the_first_step_that_differs_are_named(pipe, drawn, caplog):
    result, _ = drawn["generate"]
    _, request, _ = pipe.recorded(result.records[1], None)
    counts = pipe.task_run(request.sampling).step_counts(request, "image")
    pipe.replay(planted(result, *range(36), row=1))
    (told,) = differing(caplog)
    assert "36 of 36 cells differ from the record; step 0 is the first: cell " in told
    assert told.count("cell ") == min(counts[0], differences.MOST_NAMED)
    assert "when it was drawn" not in told


def test_cells_whose_margins_no_pass_tells_are_reported(pipe, drawn, caplog):
    result, shown = drawn["inpaint"]
    known = np.flatnonzero(np.array(result.records[0]["recipe"]["known"]).reshape(-1))
    pipe.replay(planted(result, known[0]), shown)
    pipe.replay(planted(result) | {"codes": [[1]] * 35}, shown)
    given, shape = differing(caplog)
    assert "1 of 36 cells differ" in given and "its given cells" in given
    assert "36 of 36 cells differ" in shape and "its codes are not [36, 1]" in shape


def test_less_than_float32_needs_a_tolerance(pipe, drawn):
    result, _ = drawn["generate"]
    _, request, _ = pipe.recorded(result.records[0], None)
    run = pipe.task_run(request.sampling)
    model = dataclasses.replace(run.settings.model, compute_dtype="bfloat16")
    run.settings = dataclasses.replace(run.settings, model=model)
    proofs.check_plan(run, request, result.records[0], 0.5)
    with pytest.raises(RequestError, match="name a tolerance"):
        proofs.check_plan(run, request, result.records[0], None)


def test_surprise_is_the_mean_of_the_plans_bits(pipe):
    found = pipe.surprise(IMAGE, ["a red circle", "two blue squares"], num_plans=2)
    assert found.bits.shape == (2, 36) and found.error == 0
    alone = pipe.surprise(IMAGE, "two blue squares", num_plans=1)
    sampling = surprise.sampling_of(pipe.settings.sampling, pipe.settings.model)
    (made,) = pipe.requests("generate", "two blue squares", layout=False, sampling=sampling)
    run = pipe.task_run(sampling)
    bits = []
    for seed in (surprise.FIRST_SEED, surprise.FIRST_SEED + 1):
        row = dataclasses.replace(made, seed=seed)
        how = [run.image_example(made)], [row], sampling, [pipe.codec.encode(IMAGE[None])[0]]
        ((_, scores),) = run.engine.scores(*how, stage="image")
        bits.append(scores.bits[np.argsort(scores.at), 0])
    np.testing.assert_allclose(found.bits[1], np.mean(bits, axis=0), atol=1e-4)
    np.testing.assert_allclose(alone.bits[0], bits[0], atol=1e-4)
    assert found.bits.min() >= 0 and found.bits.sum() > 36


def test_surprise_ranks_captions_and_maps_cells():
    bits = np.zeros((2, 36))
    bits[0, 7], bits[1, 9] = 8.0, 4.0
    found = surprise.Surprise(("worse", "better"), bits, (6, 6), 0.0, 10)
    assert found.ranked == [1, 0] and found.cell(0) == (1, 1) and found.cell(1) == (1, 3)
    image = found.map(1, side=2)
    assert image.shape == (12, 12, 3) and image[2, 6, 0] == 128 and image.sum() == 128 * 12
    assert [one["caption"] for one in found.as_json()["captions"]] == ["better", "worse"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"num_plans": 0}, "num_plans"), ({"num_plans": 65}, "num_plans"),
     ({"captions": [""]}, "empty"), ({"captions": ["a circle"] * 65}, "captions")],
)  # fmt: skip
def test_surprise_is_bounded(pipe, changes, told):
    with pytest.raises(InputError, match=told):
        pipe.surprise(IMAGE, **{"captions": ["a red circle"]} | changes)


def test_surprise_needs_a_plan(pipe):
    own = dataclasses.replace(pipe.settings.sampling, order="confidence", preset="none")
    with pytest.raises(RequestError, match="only a plan made beforehand"):
        pipe.with_sampling(own).surprise(IMAGE, "a red circle")


def test_the_commands(pipe, drawn, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "load", lambda *_: pipe)
    result, _ = drawn["generate"]
    result.save("out.png")
    assert program.main(["sparse-lavida", "prove", "out.png"]) == 0
    assert "it could have been drawn so" in capsys.readouterr().out
    image_files.write("other.png", result.pixels[1], result.records[0])
    assert program.main(["sparse-lavida", "prove", "other.png", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["follows"]
    assert program.main(["sparse-lavida", "replay", "out.png", "--out=again.png"]) == 0
    assert "differ" not in capsys.readouterr().err
    image_files.write("other.png", result.pixels[0], planted(result, 7))
    assert program.main(["sparse-lavida", "replay", "other.png", "--out=again.png"]) == 1
    assert "cell 7 (margin here -" in capsys.readouterr().err
    draw = ["sparse-lavida", "generate", "a red circle", "--margins", "--no-layout", "--out=m.png"]
    assert program.main(draw) == 0
    record = image_files.read_record("m.png")
    assert len(record["margins"]["image"]) == 36 and "layout" not in record["margins"]
    with mock.patch.object(type(pipe), "prove", side_effect=RequestError("no plan.")):
        assert program.main(draw) == 0
    assert "the records hold no margins: no plan." in capsys.readouterr().err
    assert "margins" not in image_files.read_record("m.png")
    image_files.write("scene.png", IMAGE)
    words = ["surprise", "scene.png", "--caption", "a red circle", "--caption", "a cross"]
    assert program.main(["sparse-lavida", *words, "--out", "map.png"]) == 0
    assert capsys.readouterr().out.count(" bits, ") == 2
    assert image_files.read("map.png").shape == (96, 96, 3)
    assert Image.open("map.png").size == (384, 384)  # enlarged for the eye, as other small images
    assert program.main(["sparse-lavida", *words, "--out", "map.png", "--scale", "1"]) == 0
    assert Image.open("map.png").size == (96, 96)
    assert program.main(["sparse-lavida", "surprise", "scene.png"]) == 2
    assert "--caption" in capsys.readouterr().err
    assert program.main(["sparse-lavida", "prove", "scene.png"]) == 2
