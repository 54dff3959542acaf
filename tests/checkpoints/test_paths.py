# SPDX-License-Identifier: Apache-2.0
"""Paths, names, encodings and leftovers of the world change nothing, or are told in a sentence."""

import dataclasses
import io
import json
import os
import pathlib
import shutil
import sys

import numpy as np
import pytest
import torch_folder

from sparse_lavida_jax import config, main
from sparse_lavida_jax.checkpoints import adapter_names, manifest, model_folder
from sparse_lavida_jax.cli import parser, program, terminal
from sparse_lavida_jax.convert import from_torch, to_torch
from sparse_lavida_jax.data import files, image_files
from sparse_lavida_jax.inference import provenance, requests
from sparse_lavida_jax.mixture import recipe
from sparse_lavida_jax.training import own_images, runs

IMAGE = np.full((4, 6, 3), 9, np.uint8)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 132\n"
LEFTOVERS = (
    ".DS_Store", "._config.json", "._model.safetensors", "Thumbs.db", "desktop.ini", "config.json~",
    ".gitattributes", ".git/HEAD", ".cache/huggingface/x.lock", ".ipynb_checkpoints/config.json",
    "@eaDir/config.json@SynoEAStream", "__MACOSX/._a.safetensors",
)  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


@pytest.fixture
def released(tmp_path):
    return torch_folder.write(tmp_path / "released")


def litter(folder):
    """Leaves in a folder, and in the folders in it, what systems and editors leave."""
    for place in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        for name in LEFTOVERS:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(b"\0\xff")


# ---------------------------------------------------------------------------------------------
# `~`.


def test_every_argument_that_is_a_path_is_expanded_and_its_literal_form_is_not(home):
    parsers = map(parser.Parser, parser.COMMANDS)
    types = [one.type for parser in parsers for one in parser._actions if one.metavar == "FILE"]
    assert types.count(files.expanded) >= 15
    assert files.expanded("~/x.png") == home / "x.png"
    literal = files.expanded("./~/x.png")
    assert literal == files.expanded(literal) == pathlib.Path.cwd() / "~" / "x.png"


def test_every_flag_and_setting_that_is_a_path_is_expanded(home):
    shutil.copytree(model_folder.find_model("scenes"), home / "m")
    (home / "c.py").write_text("def get_config():\n    return {'data': {'folder': '~/p'}}\n")
    words = ["--config=~/c.py", "--workdir=~/w", "--config.train.init_from=~/i"]
    parsed = main.parse(["main", *words, "--config.data.image_codec=~/v"])
    assert parsed is not None
    asked, settings = parsed
    told = (settings.data.folder, settings.data.image_codec, settings.train.init_from)
    assert (asked.workdir, *told) == tuple(str(home / name) for name in ("w", "p", "v", "i"))
    parsed = main.parse(["main", "--mode=convert", "--src=~/s", "--dst=./~/d"])
    assert parsed is not None
    assert (parsed[0].src, parsed[0].dst) == (f"{home}/s", f"{pathlib.Path.cwd()}/~/d")
    evaluated = config.Evaluate(checkpoint="~/m", data="~/d")
    assert (evaluated.checkpoint, evaluated.data) == (f"{home}/m", f"{home}/d")
    assert model_folder.find_model("~/m") == home / "m"
    assert model_folder.place_of("~/new") == home / "new"
    assert adapter_names.parse("~/a:0.5,b") == {f"{home}/a": 0.5, "b": 1.0}
    assert adapter_names.parse({"~/a": 2.0}) == {f"{home}/a": 2.0}
    image_files.write("~/x.png", IMAGE)
    (shown,) = requests.shown_images("~/x.png")
    assert shown.path == home / "x.png"
    row = {"name": "a", "json_path": "~/a.jsonl", "image_root": "~/i", "preprocess_fn": "edit"}
    pathlib.Path("m.json").write_text(json.dumps({"datasets": [row]}), encoding="utf-8-sig")
    (dataset,) = recipe.read(pathlib.Path("m.json")).datasets
    assert (*dataset.patterns, dataset.image_root) == (f"{home}/a.jsonl", f"{home}/i")
    assert [*pathlib.Path.cwd().iterdir()] == [pathlib.Path.cwd() / "m.json"]


# ---------------------------------------------------------------------------------------------
# Output.


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_output_that_cannot_be_encoded_is_escaped_and_json_stays_json(monkeypatch, encoding):
    values = {"files": ["caf\udce9.png"], "texts": ["圆 é \U0001f600"]}
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    with terminal.output_escaped():
        print(values["texts"][0], values["files"][0])
        terminal.say_json(values)
    line, row = written.getvalue().decode(encoding).splitlines()
    assert json.loads(row) == values
    assert line.endswith(r"caf\udce9.png") and ("圆" in line) == (encoding == "utf-8")


@pytest.mark.parametrize("place", ["a closed pipe", "/dev/full"])
@pytest.mark.parametrize("words", [["--help"], ["generate", "--help"], ["completion", "bash"]])
def test_output_that_cannot_be_written_is_no_traceback(monkeypatch, capsys, place, words):
    if words[0] == "completion":
        pytest.importorskip("shtab", reason="needs pip install '.[completion]'")
    read, write = os.pipe()
    os.close(read)
    stream = open(place, "w") if place == "/dev/full" else os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    if place == "/dev/full":
        assert program.main(["sparse-lavida", *words]) == 1
    else:
        with pytest.raises(SystemExit, match="1"):
            program.main(["sparse-lavida", *words])
    full = "sparse_lavida_jax: [Errno 28] No space left on device\n"
    assert capsys.readouterr().err == (full if place == "/dev/full" else "")
    stream.close()


# ---------------------------------------------------------------------------------------------
# Names of any bytes, and long ones.


@pytest.mark.parametrize("name", [b"caf\xe9.png", b"\xff\xfe.png", "圆.png".encode(), b"a\nb.png"])
def test_an_image_whose_name_is_any_bytes_is_recorded_and_found_again(tmp_path, name):
    source = tmp_path / os.fsdecode(name)
    image_files.write(source, IMAGE)
    (shown,) = requests.shown_images(source)
    record = {"picture": shown.as_json(), "checkpoint": {"name": "scenes"}}
    image_files.write(tmp_path / "out.png", IMAGE, record)
    read = image_files.read_record(tmp_path / "out.png")
    assert read == record
    provenance.check_names(read, set(), tmp_path)
    assert requests.recorded_image(read, None).path == source
    files.write_text(tmp_path / "report.md", f"{source}")
    assert os.fsencode(name).isascii() or (tmp_path / "report.md").read_text()


def test_a_model_folder_may_have_any_name_and_lists_only_what_can_be_listed(tmp_path, released):
    (released / "caf\udce9.md").touch()
    (released / "a\nb.txt").touch()
    folder = tmp_path / "m\udce9"
    from_torch.convert(released, folder)
    assert model_folder.verify(folder) and not (folder / "official" / "caf\udce9.md").exists()
    model_folder.copy(folder, tmp_path / "n\udce9", readme="from \udce9")
    to_torch.export(tmp_path / "n\udce9", tmp_path / "back\udce9")
    told = "is not text in UTF-8: choose another --workdir"
    with pytest.raises(runs.RunError, match=told), runs.Run(tmp_path / "w\udce9", config.Config()):
        pass
    assert not (tmp_path / "w\udce9").exists()


def test_a_name_of_the_longest_length_can_be_written(tmp_path):
    path = tmp_path / ("é" * 125 + ".png")
    image_files.write(path, IMAGE)
    assert path.is_file() and len(os.fsencode(path.name)) == 254


# ---------------------------------------------------------------------------------------------
# Byte order marks, other encodings, pointers of Git LFS.


def texts_of(folder):
    return [path for path in sorted(folder.rglob("*")) if path.suffix in (".json", ".txt", ".md")]


def test_a_byte_order_mark_changes_nothing_of_a_released_folder(tmp_path, released, converted):
    for path in texts_of(released):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    from_torch.convert(released, tmp_path / "model")
    same = ("config.json", "model.safetensors", "vq/params.safetensors", "TENSORS.sha256")
    for name in same:
        assert (tmp_path / "model" / name).read_bytes() == (converted / name).read_bytes()
    for path in texts_of(tmp_path / "model"):
        marked = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        path.write_bytes(b"\xef\xbb\xbf" + marked)
    manifest.write(tmp_path / "model")
    model_folder.verify(tmp_path / "model")
    assert model_folder.read_config(tmp_path / "model") == model_folder.read_config(converted)


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", torch_folder.INDEX, "model-00002-of-00003.safetensors"],
)
@pytest.mark.parametrize("kind", ["pointer", "UTF-16"])
def test_a_pointer_of_git_lfs_and_another_encoding_are_named_with_the_remedy(
    tmp_path, released, converted, name, kind
):
    damaged = tmp_path / "model"
    shutil.copytree(converted, damaged)
    ours = damaged / (
        "model.safetensors" if name not in ("config.json", "tokenizer.json") else name
    )
    for path in (released / name, ours):
        if kind == "UTF-16" and path.suffix == ".safetensors":
            continue
        text = POINTER if kind == "pointer" else path.read_text()
        path.write_text(text, encoding="utf-8" if kind == "pointer" else "utf-16")
        folder = released if path.is_relative_to(released) else damaged
        with pytest.raises(model_folder.CheckpointError) as error:
            if folder is released:
                from_torch.convert(released, tmp_path / "new")
            else:
                model_folder.verify(damaged)
        said = str(error.value)
        told = "`git lfs pull`" if kind == "pointer" else "save it in that encoding"
        assert (told in said) or (kind == "UTF-16" and folder is damaged), said
        assert "again" not in said or kind == "UTF-16", said


def test_an_image_that_is_a_pointer_is_named_with_the_remedy(tmp_path):
    (tmp_path / "a.png").write_text(POINTER)
    with pytest.raises(image_files.ImageError, match="`git lfs pull`"):
        image_files.read(tmp_path / "a.png")


@pytest.mark.parametrize("prefix", ["module.model.", "", "_orig_mod.model.", "model.model.", "x."])
def test_names_that_all_have_another_beginning_are_one_sentence(tmp_path, prefix):
    state = {
        prefix + name.removeprefix("model."): tensor
        for name, tensor in torch_folder.arbitrary().items()
    }
    folder = torch_folder.write(tmp_path / "released", state=state)
    with pytest.raises(model_folder.CheckpointError) as error:
        from_torch.convert(folder, tmp_path / "new")
    assert f"begin with {prefix!r} instead of 'model.'" in str(error.value)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------
# Leftovers.


def test_leftovers_change_nothing_of_a_model_folder(tmp_path, released, converted):
    litter(released)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ".DS_Store").touch()
    from_torch.convert(released, tmp_path / "model")
    written = {path.relative_to(converted) for path in converted.rglob("*")}
    assert {
        path.relative_to(tmp_path / "model") for path in (tmp_path / "model").rglob("*")
    } == written
    count = model_folder.verify(converted)
    litter(tmp_path / "model")
    assert model_folder.verify(tmp_path / "model") == count
    assert model_folder.find_model(tmp_path / "model") == tmp_path / "model"
    model_folder.copy(tmp_path / "model", tmp_path / "copy")
    assert {path.relative_to(tmp_path / "copy") for path in (tmp_path / "copy").rglob("*")} == (
        written | {pathlib.Path(model_folder.MADE_OF)}
    )
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "Thumbs.db").touch()
    to_torch.export(tmp_path / "model", tmp_path / "back")
    assert not any(path.name in LEFTOVERS for path in (tmp_path / "back").rglob("*"))
    (tmp_path / "model" / "more.txt").touch()
    with pytest.raises(model_folder.CheckpointError, match=r"more.txt is not in MANIFEST"):
        model_folder.verify(tmp_path / "model")


def test_a_folder_with_more_than_leftovers_is_not_replaced(tmp_path, released):
    (tmp_path / "model" / ".git").mkdir(parents=True)
    with pytest.raises(model_folder.CheckpointError, match="is no model folder"):
        from_torch.convert(released, tmp_path / "model")


def test_a_run_begins_in_a_folder_that_systems_have_seen(tmp_path):
    (tmp_path / ".DS_Store").touch()
    with runs.Run(tmp_path, config.Config()) as run:
        (tmp_path / "state" / ".DS_Store").touch()
        assert run.states.steps == []


# ---------------------------------------------------------------------------------------------
# Places that are named by mistake, and places that cannot be written to.


def test_a_part_of_a_run_names_the_run(tmp_path, converted, monkeypatch):
    run = tmp_path / "runs" / "a"
    shutil.copytree(converted, run / "model")
    model_folder.write_config(run, model_folder.read_config(converted))
    (run / "state" / "4" / "state").mkdir(parents=True)
    for part, whole in [("state/4", ""), ("state", ""), ("model/vq", "model")]:
        with pytest.raises(model_folder.CheckpointError) as error:
            model_folder.find_model(run / part)
        assert str(error.value).endswith(
            f"is a part of {run / whole}, which holds a model: give that."
        )
    monkeypatch.chdir(run / "state" / "4")
    with pytest.raises(model_folder.CheckpointError, match=f"part of {run}"):
        model_folder.find_model(".")
    shutil.copytree(converted, run / "copy")
    assert model_folder.find_model(run / "copy") == run / "copy"
    shutil.rmtree(run / "model")
    with pytest.raises(model_folder.CheckpointError, match=f"the run in {run} has not written"):
        model_folder.find_model(run / "state" / "4")


@pytest.mark.parametrize("name", [".", "..", "../p", "../p/"])
def test_a_run_is_named_after_the_folder_that_its_data_are_in(tmp_path, monkeypatch, name):
    (tmp_path / "p" / "..p").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "p" / ("..p" if name == ".." else ""))
    assert files.title(name) == "p" and files.title("/") == "root"
    monkeypatch.setattr(own_images, "from_scratch", lambda _: config.Config())
    monkeypatch.setattr(own_images, "_kinds", lambda _: ())
    base = model_folder.read_config(model_folder.find_model("scenes"))
    chat = dataclasses.replace(base, prompts="chat")
    monkeypatch.setattr(model_folder, "read_config", lambda _: chat)
    assert own_images.continued(pathlib.Path(name), "scenes").name == "p"


def test_a_place_that_cannot_be_written_to_is_found_before_the_work(
    tmp_path, monkeypatch, converted
):
    def full(folder):
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(files, "check_place", full)
    monkeypatch.setattr(manifest, "verify", None)
    monkeypatch.setattr(from_torch, "_look_through", None)
    for write in (from_torch.convert, to_torch.export):
        with pytest.raises(model_folder.WriteError, match="No space left"):
            write(converted, tmp_path / "new")
