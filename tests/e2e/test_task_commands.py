# SPDX-License-Identifier: Apache-2.0
"""Every task from the command line, on a tiny model with arbitrary weights."""

import dataclasses
import io
import json
import sys

import numpy as np
import pytest
import stand_ins
from PIL import Image

from sparse_lavida_jax import sample
from sparse_lavida_jax.cli import program, usage_errors
from sparse_lavida_jax.data import files, image_files
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.scenes import grammar, tasks, world

PROMPT = "a red circle above a blue square"
LONG = f"{PROMPT} and {PROMPT} and {PROMPT}"
ALL_TASKS = dict.fromkeys((*tasks.TASKS, "fill_layout"), 1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder marked as trained on every task."""
    return stand_ins.model_of_every_task(tmp_path_factory.mktemp("tasks") / "model")


@pytest.fixture
def replay(model):
    """Draws a PNG again, with the model of the other commands; returns the exit code."""

    def done(*words):
        return program.main(["sparse-lavida", *map(str, words), f"--checkpoint={model}"])

    return done


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "shown.png"
    scene = tasks.sample("edit", 0, 0).image
    image_files.write(path, world.render(scene))
    return path


@pytest.fixture
def run(model, capsys):
    """Runs a command on the model; returns what it prints."""

    def done(name, *words):
        code = program.main(["sparse-lavida", name, *map(str, words), f"--checkpoint={model}"])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed.out

    return done


def test_generate_writes_what_replay_draws_again(run, replay, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the folder of --out is created below it
    out, steps = tmp_path / "out" / "one.png", tmp_path / "steps.gif"
    told = run("generate", PROMPT, "--seed=3", "--steps=4", f"--out={out}", f"--save-steps={steps}")
    assert told == f"{out}: {PROMPT}\n"
    first = image_files.read(out)
    assert first.shape == (96, 96, 3)
    with Image.open(steps) as animation:
        assert animation.n_frames == 1 + 4  # an empty image, and one per step
    record = image_files.read_record(out)
    assert (record["prompt"], record["seed"], record["task"]) == (PROMPT, 3, "generate")
    again = tmp_path / "again.png"
    assert replay("replay", out, f"--out={again}") == 0
    assert capsys.readouterr().out == f"{again}: {PROMPT}\n"
    np.testing.assert_array_equal(image_files.read(again), first)
    assert image_files.read_record(again) == record


@pytest.mark.slow
def test_a_row_of_a_batch_is_replayed_alone(run, replay, tmp_path, capsys):
    batch = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": PROMPT, "seed": 7, "temperature": 0.5, "guidance": 3},
        {"prompt": "two green crosses and a red circle"},
    ]
    batch.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    out = tmp_path / "out.png"
    words = [f"--batch={batch}", f"--out={out}", "--num-images=2", "--guidance=1.5", "--json-full"]
    told = json.loads(run("generate", *words))
    assert told["files"] == [str(tmp_path / f"out-{i}.png") for i in range(4)]
    assert told["seeds"] == [7, 8, 1, 2]
    assert told["sampling"]["guidance"] == 1.5
    for path, scale in zip(told["files"], (3.0, 3.0, 1.5, 1.5), strict=True):
        assert image_files.read_record(path)["sampling"]["guidance"] == scale
        again = tmp_path / "again.png"
        assert replay("generate", f"--replay={path}", f"--out={again}") == 0
        np.testing.assert_array_equal(image_files.read(again), image_files.read(path))


@pytest.mark.slow
def test_edit_shows_the_image_and_is_replayed_with_it(run, replay, tmp_path, image, capsys):
    out, again = tmp_path / "edited.png", tmp_path / "again.png"
    image = image.rename(tmp_path / "caf\udce9.png")  # not text in UTF-8
    run("edit", image, "make the red circle green", f"--out={out}", "--no-layout")
    assert replay("replay", out, f"--out={again}") == 0
    np.testing.assert_array_equal(image_files.read(again), image_files.read(out))
    image_files.write(image, stand_ins.EMPTY)
    capsys.readouterr()
    assert replay("replay", out, f"--out={again}") == 2
    assert "is not the image that it was drawn after" in capsys.readouterr().err


@pytest.mark.slow
def test_inpaint_and_outpaint_keep_what_is_known(run, tmp_path, image, model):
    codec = SparseLaViDa.from_pretrained(model).codec
    (before,) = codec.encode(image_files.read(image)[None])
    mask, out = tmp_path / "mask.png", tmp_path / "out.png"
    white = np.zeros((96, 96, 3), np.uint8)
    white[20:30, 40:50] = 255  # touches the cells (1, 2) and (1, 3)
    image_files.write(mask, white)
    run("inpaint", image, PROMPT, f"--mask={mask}", f"--out={out}")
    (after,) = codec.encode(image_files.read(out)[None])
    kept = np.ones((6, 6), bool)
    kept[1, 2:4] = False
    np.testing.assert_array_equal(after[kept.ravel()], before[kept.ravel()])
    record = image_files.read_record(out)
    assert record["recipe"]["known"] == kept.tolist()

    cut = tmp_path / "cut.png"
    image_files.write(cut, image_files.read(image)[:64, :64])
    run("outpaint", cut, PROMPT, f"--out={out}")
    (after,) = codec.encode(image_files.read(out)[None])
    np.testing.assert_array_equal(after.reshape(6, 6)[1:5, 1:5], before.reshape(6, 6)[:4, :4])
    assert image_files.read_record(out)["recipe"] == {"box": [16, 16, 80, 80]}


@pytest.mark.slow
def test_reflect_draws_until_it_is_content(run, replay, tmp_path):
    out, again = tmp_path / "out.png", tmp_path / "again.png"
    batch, steps = tmp_path / "prompts.txt", tmp_path / "steps.gif"
    batch.write_text("a red circle\ntwo crosses\n")
    words = [f"--batch={batch}", "--rounds=2", "--steps=4", f"--save-steps={steps}"]
    told = run("reflect", *words, f"--out={tmp_path / 'all.png'}").splitlines()
    assert [line.split(": ")[1].split(" (")[0] for line in told] == ["a red circle", "two crosses"]
    with Image.open(steps) as animation:
        assert animation.n_frames % 5 == 0
    told = run("reflect", "a red circle", "--rounds=2", "--steps=4", f"--out={out}")
    assert told.startswith(f"{out}: a red circle")
    np.testing.assert_array_equal(image_files.read(tmp_path / "all-0.png"), image_files.read(out))
    assert replay("replay", out, f"--out={again}") == 0
    np.testing.assert_array_equal(image_files.read(again), image_files.read(out))
    at_once = ["reflect", "a red circle", "--rounds=1", "--steps=4", "--no-layout"]
    run(*at_once, f"--out={out}")
    assert replay("replay", out, f"--out={again}") == 0
    np.testing.assert_array_equal(image_files.read(again), image_files.read(out))


def test_answers_are_printed(run, image):
    asked = json.loads(run("ask", image, "how many circles are there?", "--json"))
    assert asked["task"] == "ask"
    assert len(asked["texts"]) == 1
    assert run("reason", image, "how many circles plus how many crosses?").count("\n") >= 1
    run("ask", "how many?")
    assert run("caption", image).strip() == run("caption", image).strip()


@pytest.mark.slow
def test_given_words_come_out_as_they_went_in(run, image):
    said = run("caption", image, "--template", "a ___ red circle and {2} square").strip()
    assert said.startswith("a")
    assert " red circle and" in said
    assert said.endswith(" square")
    said = run("caption", image, "--words", "red", "cross").strip()
    assert said.index("red") < said.index("cross")
    said = run("infill", "a red ___ above a blue square").strip()
    assert said.startswith("a red")
    assert said.endswith(" above a blue square")


def test_boxes_are_in_pixels_of_the_image_that_was_shown(model, run, tmp_path, monkeypatch):
    shown = tmp_path / "wide.png"
    image_files.write(shown, np.zeros((48, 240, 3), np.uint8))
    told = json.loads(run("ground", shown, "red circle", "blue square", "--json"))
    assert told["prompts"] == ["red circle", "blue square"]
    assert len(told["boxes"]) == 2
    pipe = SparseLaViDa.from_pretrained(model)

    def found(examples, *_, **__):
        text = grammar.box_text((6, 12, 12, 24))
        said = [pipe.encoder.text_example("", text, length=8).response for _ in examples]
        return stand_ins.sample_output(said)

    monkeypatch.setattr(pipe.engine, "sample", found)
    result = pipe.ground(shown, "a red circle")
    assert result.box == (60, 24, 120, 48)
    assert pipe.ground(shown, ["the cross", "x"]).prompts == ("the cross", "x")


@pytest.mark.slow
def test_a_conversation_is_about_the_last_image(run, tmp_path, monkeypatch, capsys):
    lines = [f"generate {PROMPT}", "ask how many circles are there?", "", "edit remove the circle"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    monkeypatch.chdir(tmp_path)
    told = run("chat", f"--out={tmp_path / 'turns'}").splitlines()
    assert told[0] == f"{tmp_path / 'turns' / '1.png'}: {PROMPT}"
    assert told[-1] == f"{tmp_path / 'turns' / '3.png'}: remove the circle"
    assert sorted(path.name for path in (tmp_path / "turns").iterdir()) == ["1.png", "3.png"]


def test_a_warm_pipeline_compiles_nothing_for_its_first_image(model):
    pipe = SparseLaViDa.from_pretrained(model)
    sampling = dataclasses.replace(pipe.settings.sampling, layout=False)
    pipe = pipe.with_sampling(sampling)
    pipe.warmup(["a", LONG])
    traced = sample.run_phase._cache_size()
    pipe.generate("a cross")
    pipe.generate(LONG.replace("red", "blue"))
    pipe.ask(None, "why?")
    assert sample.run_phase._cache_size() == traced


def test_an_image_of_another_program_is_reported(tmp_path, model, capsys):
    path = tmp_path / "old.png"
    image_files.write(path, stand_ins.EMPTY, {"format": "another/1"})
    words = ["replay", str(path), f"--checkpoint={model}", f"--out={tmp_path / 'new.png'}"]
    assert program.main(["sparse-lavida", *words]) == 2
    assert "the record has format 'another/1'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_grid_is_one_image(run, tmp_path):
    out = tmp_path / "out.png"
    words = ("generate", PROMPT, "--num-images=3", "--grid", "--scale=1", f"--out={out}")
    assert run(*words) == f"{out}\n"
    assert image_files.read(out).shape == (196, 196, 3)


# ---------------------------------------------------------------------------------------------
# Mistakes.


@pytest.fixture
def complaint(model, tmp_path, capsys):
    """Runs a command that must fail; returns its message. No files may be left behind."""

    def told(*words, code=2, of=model):
        before = sorted(tmp_path.rglob("*"))
        out = [f"--out={tmp_path / 'never.png'}"] if words[0] != "ask" else []
        words = [*map(str, words), *out, f"--checkpoint={of}"]
        assert program.main(["sparse-lavida", *words]) == code
        assert sorted(tmp_path.rglob("*")) == before
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("sparse_lavida_jax: ")
        sentences = [line for line in printed.err.splitlines() if "s to compile" not in line]
        assert len(sentences) == 1
        return sentences[0]

    return told


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([""], "the prompt is empty"),
        (["a red circle and " * 60], "tokens long, images included: at most 96 fit"),
        (["a circle", "--steps=37"], "--steps=37 is more than there are tokens of the image"),
        (["a", "--steps=0"], "--steps=0 is out of range"),
        (["a", "--order=spiral"], "choose one of stratified, halton"),
        (["a", "--temperature=-1"], "--temperature=-1.0 is out of range: it must be 0"),
        (["a", "--temperature=inf"], "--temperature=inf is out of range: it must be 0"),
        (["a", "--sampler=fast"], "choose one of dense, none, p"),
        (["a", "--seed=-1"], "--seed=-1 is out of range: 0 to 18446744073709551615"),
        (["a", "--num-images=0"], "--num-images=0 is out of range"),
        (["a", "--size=100x50"], "--size=100x50 cannot be drawn"),
        (["a", "--registers=-2"], "number of registers such as 64 or 64:8"),
        (["a", "--registers=2:3"], "number of registers such as 64 or 64:8"),
    ],
)
def test_a_request_out_of_range_is_reported(complaint, words, part):
    assert part in complaint("generate", *words)


def test_a_box_outside_and_a_mask_of_another_size_are_reported(complaint, image, tmp_path):
    said = complaint("inpaint", image, "a", "--box=0,0,97,10")
    assert "the box 0,0,97,10 is not inside the image: x1 < x2 lie in 0..96" in said
    mask = tmp_path / "mask.png"
    image_files.write(mask, np.full((50, 96, 3), 255, np.uint8))
    said = complaint("inpaint", image, "a", f"--mask={mask}")
    assert f"{mask} is 96x50 and the image 96x96" in said
    assert "needs a mask or a box" in complaint("inpaint", image, "a")
    assert "leaves nothing to draw" in complaint("outpaint", image, "a", "--box=0,0,96,96")


def test_a_checkpoint_of_another_model_is_reported(complaint, image, tmp_path, finished):
    said = complaint("edit", image, "remove the circle", of=finished.folder)
    assert "this checkpoint was not trained to edit: it was trained on answer, draw" in said
    released = tmp_path / "released"
    released.mkdir()
    (released / "model.safetensors.index.json").write_text("{}")
    assert "is a PyTorch folder: convert it first" in complaint("generate", "a", of=released)


def test_a_record_of_another_checkpoint_is_reported(run, tmp_path, finished, capsys):
    out = tmp_path / "out.png"
    run("generate", PROMPT, f"--out={out}")
    words = ["replay", str(out), f"--checkpoint={finished.folder}", f"--out={tmp_path / 'x.png'}"]
    assert program.main(["sparse-lavida", *words]) == 2
    assert "it was drawn by another checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


def test_a_full_disk_leaves_no_part_of_an_image(complaint, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    said = complaint("generate", PROMPT, code=1)
    assert "No space left on device" in said


def test_an_error_of_ours_has_no_traceback_unless_asked_for(complaint, monkeypatch, model):
    def broken(*_, **__):
        raise ZeroDivisionError("x")

    monkeypatch.setattr(SparseLaViDa, "run", broken)
    assert "an error of the program: ZeroDivisionError: x" in complaint(
        "generate", "a circle", code=1
    )
    with pytest.raises(ZeroDivisionError):
        program.main(["sparse-lavida", "generate", "a circle", f"--checkpoint={model}", "--debug"])


def test_the_modes_of_main_are_commands(finished, capsys):
    assert program.main(["sparse-lavida", "verify", str(finished.folder)]) == 0
    assert capsys.readouterr().out.endswith("files, all as they were written\n")
    assert program.main(["sparse-lavida", "train", "nowhere.py"]) == usage_errors.MISTAKE
    assert "there is no config file nowhere.py" in capsys.readouterr().err
