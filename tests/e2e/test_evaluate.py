# SPDX-License-Identifier: Apache-2.0
"""Every benchmark from its official files to its scorer's input, on a tiny LaViDa-O."""

import ast
import dataclasses
import json
import pathlib
import shutil

import chat_tokenizer
import numpy as np
import pytest
import torch_folder
from PIL import Image

from sparse_lavida_jax import config, main
from sparse_lavida_jax.checkpoints import manifest, model_folder
from sparse_lavida_jax.cli import program
from sparse_lavida_jax.convert import from_torch, stand_in
from sparse_lavida_jax.evals import benchmarks
from sparse_lavida_jax.lavida_o import chat
from sparse_lavida_jax.sampling import prompts

CHECKOUT = pathlib.Path(__file__).parents[2]
SAMPLES = CHECKOUT / "tests" / "data" / "evals"
EVALUATE = CHECKOUT / "configs" / "evaluate.py"
NEEDS_PARQUET = {"mathvista", "mmmu"}

# The number of items in a sample, and the files in the export other than images.
QUESTIONS = {
    "chartqa": (5, {"test_human.json", "test_augmented.json"}),
    "docvqa": (5, {"val_submission.json"}),
    "mathverse": (5, {"output_testmini.json"}),
    "mathvista": (5, {"output.json"}),
    "mmbench": (5, {"MMBench_DEV_EN.tsv"}),
    "mme": (8, {"color.txt", "count.txt", "landmark.txt"}),
    "mmmu": (5, {"total_val_output.json"}),
    "refcoco": (3, {"refcoco_val.json"}),
    "refcoco_plus": (3, {"refcoco+_val.json"}),
    "refcocog": (3, {"refcocog_val.json"}),
}
IMAGES = ("geneval", "dpg", "mjhq", "imgedit")
# Configs that share a benchmark.
BENCHMARKS = {"refcoco_plus": "refcoco", "refcocog": "refcoco"}


@pytest.fixture
def _one_program(monkeypatch):
    """Gives all prompts one padded length, so that they share a compiled program."""
    monkeypatch.setattr(prompts, "PROMPT_BUCKET", 640)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A converted LaViDa-O with arbitrary weights, marked as trained sparsely."""
    folder = tmp_path_factory.mktemp("lavida-o")
    sizes = dataclasses.replace(
        torch_folder.SETTINGS.model,
        vocab_size=stand_in.byte_tokenizer().get_vocab_size(),
        end_of_text_id=chat.CONTROL.index(chat.END_OF_TEXT),
        text_mask_id=chat.CONTROL.index(chat.MASK),
        num_registers=2,
    )
    made = dataclasses.replace(torch_folder.SETTINGS, model=sizes)
    state = torch_folder.arbitrary(made, "float32")
    torch_folder.write(folder / "released", state, made)
    chat_tokenizer.made_tokenizer(folder / "released")
    from_torch.convert(folder / "released", folder / "model")
    return folder / "model"


def evaluated(model, name, workdir, *words):
    """Runs a shipped config on the sample of its benchmark; returns its results and export."""
    sample = SAMPLES / BENCHMARKS.get(name, name)
    code = main.main(
        [
            "main", "--mode=evaluate", f"--config={EVALUATE}:{name}",
            f"--checkpoint={model}", f"--config.evaluate.data={sample}",
            f"--workdir={workdir}", *words,
        ]
    )  # fmt: skip
    assert code == 0
    return json.loads((workdir / "results.json").read_text()), workdir / "export"


@pytest.mark.usefixtures("_one_program")
@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_are_answered_and_scored(model, name, tmp_path, capsys):
    if name in NEEDS_PARQUET:
        pytest.importorskip("pyarrow", reason="Parquet: pip install '.[data]'")
    count, files = QUESTIONS[name]
    words = ["--config.sampling.text.step_ratio=0.0", "--config.sampling.text.steps=1"]
    words += ["--config.evaluate.max_new_tokens=32", "--config.evaluate.limit=8"]
    results, export = evaluated(model, name, tmp_path / "run", *words)
    assert results["items"] == count
    assert {path.name for path in export.iterdir()} == files
    assert results["scores"]
    assert all(np.isfinite(score["value"]) for score in results["scores"])
    assert results["evaluate"]["benchmark"] == BENCHMARKS.get(name, name)
    assert results["sampling"]["text"]["steps"] == 1
    table = (tmp_path / "run" / "table.md").read_text()
    assert table.strip() in capsys.readouterr().out
    for score in results["scores"]:
        assert f"| {score['name']} | " in table
    assert results["checkpoint"]["sha256"][:12] in table


@pytest.mark.usefixtures("_one_program")
@pytest.mark.parametrize("name", IMAGES)
def test_images_are_drawn_for_the_judges(model, name, tmp_path, capsys):
    changes = ("num_steps=1", "guidance=0", "guidance_image=0")
    words = [f"--config.sampling.{change}" for change in changes]
    # Four images of four prompts, or one of five: batches of eight rows, one compiled program.
    count = 4 if name in ("geneval", "dpg") else 5
    words.append(f"--config.evaluate.limit={count}")
    results, export = evaluated(model, name, tmp_path / "run", *words)
    assert (results["items"], results["scores"]) == (count, [])
    assert "To judge " in capsys.readouterr().out
    files = {str(path.relative_to(export)) for path in export.rglob("*.*")}
    expected = {
        "geneval": {f"{i:05}/samples/{j:05}.png" for i in range(4) for j in range(4)}
        | {f"{i:05}/metadata.jsonl" for i in range(4)},
        "dpg": {f"{i}.png" for i in range(4)},
        "mjhq": {"animals/1f.png", "art/2e.png", "animals/3d.png", "food/4c.png", "art/5b.png"}
        | {"prompts.jsonl"},
        "imgedit": {f"{70 + i}.png" for i in range(5)},
    }
    assert files == expected[name]
    side = 48 if name == "dpg" else 24
    for file in files:
        if file.endswith(".png"):
            with Image.open(export / file) as image:
                assert image.size == (side, side)


@pytest.mark.slow
def test_a_scenes_model_has_its_exact_table(finished, tmp_path, capsys):
    words = [str(finished.folder), f"--config={EVALUATE}:scenes", f"--workdir={tmp_path}"]
    few = ["--config.evaluate.limit=2", "--config.evaluate.batch_size=2"]
    assert program.main(["sparse-lavida", "evaluate", *words, *few]) == 0
    table = capsys.readouterr().out
    for task in ("draw", "answer", "draw/held_out"):
        assert f"| {task} | " in table
    assert len([*tmp_path.glob("export/draw/held_out/*.png")]) == 2


def test_another_checkpoint_needs_another_folder(model, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    settings = model_folder.read_config(other)
    model_folder.write_config(other, dataclasses.replace(settings, name="other"))
    path = other / manifest.MANIFEST
    line = ["main", "--mode=evaluate", f"--config={EVALUATE}:docvqa",
            f"--config.evaluate.data={SAMPLES / 'docvqa'}", f"--workdir={tmp_path / 'run'}",
            "--shard=5/6"]  # fmt: skip
    assert main.main([*line, f"--checkpoint={model}"]) == 0  # the shard has no item
    path.write_text(path.read_text() + "\n")
    assert main.main([*line, f"--checkpoint={other}"]) == 2
    assert "is another evaluation: checkpoint was" in capsys.readouterr().err


@pytest.mark.parametrize("name", [*QUESTIONS, *IMAGES, "scenes", "art"])
def test_every_benchmark_has_a_config(name):
    settings = config.read(EVALUATE.with_name(f"evaluate.py:{name}"))
    assert settings.name == f"eval_{name}"
    assert settings.evaluate.benchmark == BENCHMARKS.get(name, name)
    assert name in (ast.get_docstring(ast.parse(EVALUATE.read_text())) or "")


def test_a_config_for_no_benchmark_lists_those_that_there_are():
    known = [*QUESTIONS, *IMAGES, "scenes", "art"]
    with pytest.raises(config.ConfigError) as error:
        config.read(EVALUATE.with_name("evaluate.py:genevil"))
    assert f"no benchmark 'genevil'. There are: {', '.join(sorted(known))}." in str(error.value)
    assert {BENCHMARKS.get(name, name) for name in known} == {*benchmarks.names()}
