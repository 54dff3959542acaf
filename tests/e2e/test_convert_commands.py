# SPDX-License-Identifier: Apache-2.0
"""Converting, verifying and exporting from the command line; errors are one sentence."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
import torch_folder

from sparse_lavida_jax import main
from sparse_lavida_jax.cli import program
from sparse_lavida_jax.convert import from_torch

CHECKOUT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    """A released folder, tiny."""
    return torch_folder.write(tmp_path / "released")


def run(*words):
    return main.main(["main", *map(str, words)])


def front(*words):
    return program.main(["sparse-lavida", *map(str, words)])


def test_there_and_back(tmp_path, folder, capsys):
    assert run("--mode=convert", f"--src={folder}", f"--dst={tmp_path / 'model'}") == 0
    state = torch_folder.arbitrary()
    parameters = sum(x.size for x in state.values())
    told = f"{len(state):,} tensors, {parameters:,} parameters"
    assert capsys.readouterr().out == f"{tmp_path / 'model'}: {told}, bfloat16\n"
    assert run("--mode=verify", f"--src={tmp_path / 'model'}") == 0
    assert capsys.readouterr().out.endswith("files, all as they were written\n")
    assert run("--mode=export", f"--src={tmp_path / 'model'}", f"--dst={tmp_path / 'back'}") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'back'}: {told}, safetensors files: 1\n"
    back = torch_folder.read(tmp_path / "back")
    assert {name: x.tobytes() for name, x in back.items()} == {
        name: x.tobytes() for name, x in state.items()
    }


def test_the_short_command_does_the_same(tmp_path, folder, capsys):
    assert front("convert", folder, tmp_path / "model", "--dtype=float32") == 0
    assert capsys.readouterr().out.endswith("float32\n")
    assert front("verify", tmp_path / "model") == 0
    assert front("export", f"--src={tmp_path / 'model'}", f"--dst={tmp_path / 'back'}") == 0
    assert (tmp_path / "back" / torch_folder.INDEX).is_file()


def test_adapters_go_into_an_export(tmp_path, folder, capsys):
    assert front("convert", folder, tmp_path / "model", "--dtype=float32") == 0
    module = "model.transformer.blocks.0.attn_out"
    width, _ = torch_folder.arbitrary()[f"{module}.weight"].shape
    factors = {"A": np.full((1, width), 0.5, np.float32), "B": np.ones((width, 1), np.float32)}
    mine = tmp_path / "mine"
    mine.mkdir()
    safetensors.numpy.save_file(
        {f"base_model.model.{module}.lora_{side}.weight": x for side, x in factors.items()},
        mine / "adapter_model.safetensors",
    )
    told = {"peft_type": "LORA", "r": 1, "lora_alpha": 2}
    (mine / "adapter_config.json").write_text(json.dumps(told))
    words = ("export", tmp_path / "model")
    assert front(*words, tmp_path / "plain") == 0
    assert front(*words, tmp_path / "back", f"--adapters={mine}:0.25") == 0
    plain, back = torch_folder.read(tmp_path / "plain"), torch_folder.read(tmp_path / "back")
    changed = {name for name in plain if plain[name].tobytes() != back[name].tobytes()}
    assert changed == {f"{module}.weight"}
    difference = back[f"{module}.weight"] - plain[f"{module}.weight"]
    np.testing.assert_allclose(difference, 0.25 * 2 * 0.5, atol=1e-5)
    # Into a model folder of ours, before it is rounded to 8 bits, but not after.
    narrow = tmp_path / "narrow"
    assert front(*words, narrow, "--dtype=int8", f"--adapters={mine}") == 0
    capsys.readouterr()
    assert front("export", narrow, tmp_path / "no", f"--adapters={mine}", "--format=orbax") == 2
    assert "add them to the model that it was made of" in capsys.readouterr().err
    assert front("verify", tmp_path / "model", f"--adapters={mine}") == 2
    assert "unrecognized arguments: --adapters=" in capsys.readouterr().err


def test_the_short_command_shows_how_it_is_used(capsys):
    assert front() == 0
    assert "sparse-lavida convert LaViDa-O-v1.0 models/lavida-o" in capsys.readouterr().out
    assert front("covnert", "x") == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "sparse_lavida_jax: there is no command 'covnert'. Did you mean 'convert'?"
    )


# ---------------------------------------------------------------------------------------------
# Mistakes.


@pytest.fixture
def complaint(tmp_path, capsys):
    """Runs a command that must fail; returns its message. No files may be left behind."""

    def told(*words, code=2):
        before = sorted(tmp_path.rglob("*"))
        assert run(*words) == code
        assert sorted(tmp_path.rglob("*")) == before
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("sparse_lavida_jax: ")
        assert "Traceback" not in printed.err
        return printed.err

    return told


def converting(tmp_path, folder):
    return "--mode=convert", f"--src={folder}", f"--dst={tmp_path / 'model'}"


def test_folders_that_were_not_given(complaint):
    told = "--mode=convert needs --src: the released PyTorch folder, or its id on the hub."
    assert told in complaint("--mode=convert")
    assert "--mode=export needs --dst: " in complaint("--mode=export", "--src=x")
    assert "--mode=verify needs --src: " in complaint("--mode=verify")


def test_settings_that_a_conversion_does_not_have(tmp_path, folder, complaint):
    words = [*converting(tmp_path, folder), "--config.model.width=8"]
    assert "unrecognized arguments: --config.model.width=8" in complaint(*words)


def test_the_wrong_folder(tmp_path, complaint):
    told = complaint(*converting(tmp_path, tmp_path))
    assert f"{tmp_path} has no config.json, so it is no released model." in told
    assert len(told.splitlines()) == 1


def test_a_shard_that_was_half_downloaded(tmp_path, folder, complaint):
    shard = folder / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:5000])
    told = complaint(*converting(tmp_path, folder))
    assert f"{shard.name} is cut short or damaged" in told
    assert len(told.splitlines()) == 1


def test_llada_instead_of_lavida_o(tmp_path, folder, complaint):
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, "dual_tower": False}))
    told = complaint(*converting(tmp_path, folder))
    assert "that is LLaDA, which draws nothing. Give the folder of LaViDa-O." in told


def test_a_dtype_that_is_written_by_another_command(tmp_path, folder, complaint):
    told = complaint(*converting(tmp_path, folder), "--dtype=int8")
    assert "--dtype=int8" in told
    assert "sparse-lavida export" in told


def test_a_full_disk(tmp_path, folder, complaint, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1))
    told = complaint(*converting(tmp_path, folder), code=1)
    assert "has 0 MB free and 0 MB are needed" in told


def test_a_model_that_is_not_there(tmp_path, complaint):
    told = complaint("--mode=export", f"--src={tmp_path / 'x'}", f"--dst={tmp_path / 'y'}")
    assert f"there is no model in {tmp_path / 'x'}" in told
    assert "there is no model in" in complaint("--mode=verify", f"--src={tmp_path}")


def test_a_damaged_model_is_neither_verified_nor_exported(tmp_path, folder, complaint):
    from_torch.convert(folder, tmp_path / "model")
    with (tmp_path / "model" / "vq" / "params.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    for words in (["--mode=verify"], ["--mode=export", f"--dst={tmp_path / 'back'}"]):
        told = complaint(*words, f"--src={tmp_path / 'model'}")
        assert "params.safetensors is damaged" in told


def test_a_terminated_conversion_leaves_nothing(tmp_path, folder):
    """The process signals itself at the first tensor, so that the moment is certain."""
    program = (
        "import os, signal, sys\n"
        "from sparse_lavida_jax import main\n"
        "from sparse_lavida_jax.checkpoints import named_arrays\n"
        "digest_of = named_arrays.digest_of\n"
        "def stop(*given):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return digest_of(*given)\n"
        "named_arrays.digest_of = stop\n"
        "sys.exit(main.main())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *converting(tmp_path, folder)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(CHECKOUT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["released"]
