# SPDX-License-Identifier: Apache-2.0
"""User errors give one sentence and exit code 2, and nothing is half-written or lost."""

import collections
import hashlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
import stand_ins
from PIL import Image

from sparse_lavida_jax import config, main, train
from sparse_lavida_jax.checkpoints import manifest, model_folder, named_arrays, stores
from sparse_lavida_jax.cli import usage_errors
from sparse_lavida_jax.evals import training_report
from sparse_lavida_jax.training import metrics

CHECKOUT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def complaint(capsys):
    """Runs a command line that must fail; returns the one sentence that it prints."""

    def run(*words):
        assert main.main(["main", *map(str, words)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        # The lines before it report progress.
        sentence = printed.err.splitlines()[-1]
        assert sentence.startswith("sparse_lavida_jax: ")
        assert "Traceback" not in printed.err
        return sentence

    return run


def contents(folder):
    """A digest of every file in a folder and its subfolders."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.fixture
def words(tmp_path):
    """A command line that would train in `tmp_path / "run"`."""
    return [
        *stand_ins.command_line(tmp_path, stand_ins.settings()),
        f"--workdir={tmp_path / 'run'}",
    ]


# ---------------------------------------------------------------------------------------------
# Settings.

OUT_OF_RANGE = "Data.prompt_drop=1.5 is out of range: it must lie in [0, 1]."


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"optimizer": {"lr": 1e-3}},
            "Optimizer has no lr. It has: kind, learning_rate, final_fraction",
        ),
        ({"data": {"prompt_drop": 1.5}}, OUT_OF_RANGE),
        ({"model": {"width": "wide"}}, "Model.width='wide' is a str; it must be a int."),
    ],
)
def test_a_mistake_in_a_config_file_names_what_is_allowed(tmp_path, complaint, sections, told):
    path = tmp_path / "mine.py"
    path.write_text(f"def get_config():\n    return {sections}\n")
    assert told in complaint(f"--config={path}", f"--workdir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


def test_a_value_out_of_range_says_the_range(tmp_path, words, complaint):
    assert OUT_OF_RANGE in complaint(*words, "--config.data.prompt_drop=1.5")
    sentence = complaint(*words, "--config.diffusion.num_masked_blocks=99")
    assert "num_masked_blocks=99 is out of range: it must lie in 1..16." in sentence
    assert not (tmp_path / "run").exists()


def test_unknown_tasks_and_tokenizers_list_the_known_ones(tmp_path, words, complaint):
    given = stand_ins.settings(data={"tasks": {"drawing": 1.0}})
    unknown = stand_ins.command_line(tmp_path, given)
    sentence = complaint(*unknown, f"--workdir={tmp_path / 'run'}")
    assert "Data.tasks has no drawing. It has: answer, arithmetic" in sentence
    words = [*stand_ins.command_line(tmp_path, stand_ins.settings()), *words[-1:]]
    sentence = complaint(*words, "--config.data.image_codec=scenes_g9")
    assert "or a bundled model: art, scenes." in sentence
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------
# Folders.


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", "[" * 999 + "]" * 999, "nested more than 100 deep"),
        ("config.json", '{"model": null}', "Config.model is None"),
        ("config.json", '{"model": {"num_layers": 1000000}}', "must lie in 0..1024"),
        ("config.json", '{"seed": 3}', "and 125 more"),
        ("vq/config.json", "[" * 999 + "]" * 999, "nested more than 100 deep"),
        ("tokenizer.json", "{}", "tokenizer.json is damaged"),
        ("model.safetensors", np.nan, "NaN or infinite"),
        ("vq/params.safetensors", np.nan, "NaN or infinite"),
    ],
)
def test_a_folder_that_only_its_lists_approve_of_is_not_verified(
    tmp_path, capsys, name, content, told
):
    """Whoever changes a file can change the lists of digests as well."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder.find_model("scenes"), folder)
    path = folder / name
    if name == "config.json":
        path.write_text(content.replace("{", f'{{"format": "{model_folder.FORMAT}", ', 1))
    elif isinstance(content, str):
        path.write_text(content)
    else:
        loaded = safetensors.numpy.load_file(path)
        last = max(loaded)
        safetensors.numpy.save_file(loaded | {last: np.full_like(loaded[last], content)}, path)
    named_arrays.write_digests(folder, stores.open_params(folder).digests())
    manifest.write(folder)
    assert main.main(["main", "--mode=verify", f"--src={folder}"]) == 2
    printed = capsys.readouterr()
    assert told in printed.err and "Traceback" not in printed.err and not printed.out


def test_a_run_directory_of_another_config_is_left_as_it_is(finished, complaint):
    before = contents(finished.folder)
    sentence = complaint(
        *finished.words, f"--workdir={finished.folder}", "--config.optimizer.learning_rate=0.5"
    )
    assert "is a run of another config: choose another --workdir" in sentence
    assert "optimizer.learning_rate was 0.01 and is 0.5" in sentence
    after = contents(finished.folder)
    assert after.pop("lock") and before.pop("lock")
    assert after == before


def test_a_run_without_a_model_yet_says_how_to_get_it(finished, tmp_path, complaint):
    shutil.copytree(finished.folder / "state", tmp_path / "run" / "state")
    sentence = complaint("--mode=sample", f"--checkpoint={tmp_path / 'run'}", "--prompt=x")
    assert "has not written its model yet" in sentence
    assert "it resumes" in sentence


def test_another_world_is_not_judged_as_scenes(tmp_path, complaint):
    (tmp_path / "params").mkdir()
    given = stand_ins.settings(data={"source": "prepared"})
    model_folder.write_config(tmp_path, given)
    assert "judges models of scenes" in complaint("--mode=evaluate", f"--checkpoint={tmp_path}")


# ---------------------------------------------------------------------------------------------
# Images.


@pytest.mark.parametrize("kind", ["missing", "folder", "text", "cut off"])
def test_an_image_that_cannot_be_read_is_named(finished, tmp_path, complaint, kind):
    path = tmp_path / "image.png"
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("a red circle")
    elif kind == "cut off":
        Image.fromarray(stand_ins.EMPTY).save(path)
        path.write_bytes(path.read_bytes()[:100])
    out = tmp_path / "out.png"
    sentence = complaint(
        "--mode=sample", f"--checkpoint={finished.folder}", "--task=edit", f"--image={path}",
        "--prompt=add a circle", f"--out={out}",
    )  # fmt: skip
    told = {"missing": f"there is no image {path}.", "folder": f"{path} is not a regular file"}
    told = told.get(kind, f"{path} is not an image that can")
    assert told in sentence
    assert not out.exists()


def test_an_image_that_cannot_be_written_is_reported(finished, tmp_path, complaint):
    (tmp_path / "file").write_text("")
    words = ["--mode=sample", f"--checkpoint={finished.folder}", "--prompt=a red circle"]
    for out in (tmp_path / "file" / "image.png", tmp_path / "image.unknown"):
        assert f"cannot be written to {out}" in complaint(*words, f"--out={out}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---------------------------------------------------------------------------------------------
# The disk.

Usage = collections.namedtuple("Usage", "total used free")


@pytest.mark.slow
def test_a_full_disk_costs_nothing_that_was_saved(finished, tmp_path, monkeypatch, capsys):
    real, usage = train.train_step, shutil.disk_usage
    monkeypatch.setattr(training_report, "write", lambda pipe, folder, **_: folder / "report.md")
    words = [*finished.words, f"--workdir={tmp_path / 'run'}"]

    def stop_at_3(state, *args, **more):
        if int(state.state.step) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(state, *args, **more)

    monkeypatch.setattr(train, "train_step", stop_at_3)
    assert main.main(["main", *words]) == 0
    capsys.readouterr()
    monkeypatch.setattr(train, "train_step", real)
    saved = contents(tmp_path / "run" / "state")

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 1000))
    assert main.main(["main", *words]) == 1  # a failure of the machine, not a mistake
    sentence = capsys.readouterr().err
    assert "has 0 MB free" in sentence
    assert "What was saved before is intact: free some space and run the same" in sentence
    assert contents(tmp_path / "run" / "state") == saved
    assert not (tmp_path / "run" / "model").exists()
    assert not list((tmp_path / "run").glob(".*"))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert main.main(["main", *words]) == 0
    ours, theirs = (
        [
            {name: value for name, value in line.items() if name not in metrics.TIMED}
            for line in metrics.read_metrics(run / "metrics.jsonl")
        ]
        for run in (tmp_path / "run", finished.folder)
    )
    assert ours == theirs


# ---------------------------------------------------------------------------------------------
# The process.


def test_a_mistake_ends_the_process_with_code_2(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "sparse_lavida_jax.main", "--config=nowhere.py"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(CHECKOUT)},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == usage_errors.MISTAKE == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("sparse_lavida_jax: there is no config file nowhere.py.")
    assert len(ended.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_every_error_of_ours_is_a_mistake_and_not_a_crash():
    assert issubclass(train.DivergedError, usage_errors.MISTAKES)
    assert issubclass(config.ConfigError, usage_errors.MISTAKES)
