# SPDX-License-Identifier: Apache-2.0
"""A report on a model says what came out, and names no folder (test_selfcheck_runs.py runs it)."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from sparse_lavida_jax.checkpoints import manifest, model_folder
from sparse_lavida_jax.cli import program, selfcheck
from sparse_lavida_jax.cli.selfcheck import Check
from sparse_lavida_jax.convert import from_torch, stand_in


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    stand_in.write(folder / "released", stand_in.tiny_settings())
    from_torch.convert(folder / "released", folder / "model")
    return folder / "model"


def test_settings_are_compared_with_those_of_the_release(converted, monkeypatch):
    assert selfcheck._settings(converted).passed
    ours = model_folder.read_config(converted)
    for changes, same in (
        ({"norm_eps": 1e-3}, False),
        ({"trained_attention": "step_causal"}, True),
    ):
        changed = dataclasses.replace(ours, model=dataclasses.replace(ours.model, **changes))
        monkeypatch.setattr(model_folder, "read_config", lambda _, changed=changed: changed)
        assert selfcheck._settings(converted).passed is same
    assert selfcheck._settings(model_folder.find_model("scenes")).passed is None


@pytest.mark.parametrize(("passed", "code", "count"), [(True, 0, "1 of 1"), (False, 1, "0 of 1")])
def test_a_report_is_for_an_issue(converted, monkeypatch, capsys, passed, code, count):
    made = [Check("ask: answer", "1 or one", "7", passed), Check("same", "all", "99%", None)]
    monkeypatch.setattr(selfcheck, "_settings", lambda _: made[1])
    monkeypatch.setattr(selfcheck, "checks", lambda _: iter(made))
    assert program.main(["sparse-lavida", "selfcheck", str(converted)]) == code
    printed = capsys.readouterr()
    assert f"{count} checks passed" in printed.out and "paste this" in printed.err
    assert f"MANIFEST.sha256 {manifest.digest(converted)}" in printed.out
    assert f"| ask: answer | 1 or one | 7 | {'yes' if passed else 'NO'} |" in printed.out
    assert "| same | all | 99% | no bar |" in printed.out
    assert str(converted.parent) not in printed.out


def test_a_damaged_model_is_a_sentence(converted, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(converted, copy)
    written = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(written, indent=9))
    assert program.main(["sparse-lavida", "selfcheck", str(copy)]) == 2
    printed = capsys.readouterr()
    assert "damaged" in printed.err and not printed.out and "Traceback" not in printed.err


def test_the_height_of_a_colour():
    image = np.full((10, 10, 3), 128, np.uint8)
    assert np.isnan(selfcheck._height(image, "red"))
    image[2, :5], image[8, :5] = (255, 0, 0), (0, 0, 255)
    assert selfcheck._height(image, "red") == 0.2 and selfcheck._height(image, "blue") == 0.8
    noise = np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    above = selfcheck._height(noise, "blue") - selfcheck._height(noise, "red")
    assert abs(above) < selfcheck.LEAST_ABOVE / 2
