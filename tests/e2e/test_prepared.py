# SPDX-License-Identifier: Apache-2.0
"""A converted model is trained on a prepared folder from the command line, or refused."""

import dataclasses
import json
import pathlib
import re
import shutil
import types

import numpy as np
import pytest
import raw_data
import stand_ins
import tiny

from sparse_lavida_jax import config, main
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.evals import training_report
from sparse_lavida_jax.mixture import record_batches
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.training import metrics

README = "# base\n\nThe licence of the base.\n"
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
STEPS = 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return raw_data.tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def given(tokenizer, tmp_path_factory):
    """Settings that name a prepared folder of captions, and a base model without a codec."""
    folder = tmp_path_factory.mktemp("data")
    raw_data.prepared(raw_data.captioned(folder), folder / "prepared")
    base = folder / "base"
    of_model = raw_data.settings(tokenizer, data={"source": "none"})
    model_folder.save_model(
        base, tiny.denoiser(of_model.model), of_model,
        tokenizer_path=tokenizer.path, vq_folder=None, readme=README,
    )  # fmt: skip
    data = {"source": "prepared", "folder": str(folder / "prepared")}
    train = {"init_from": str(base), "train_steps": STEPS, "batch_size": 2, "log_every": 1}
    train |= {"image_seconds": 1e-9}
    return raw_data.settings(tokenizer, data=data, train=train, sampling={"num_steps": 4})


def words(given, folder):
    path = folder / "given.py"
    path.write_text(
        "import json, ml_collections\n\ndef get_config():\n"
        f"    return ml_collections.ConfigDict(json.loads({json.dumps(config.to_dict(given))!r}))\n"
    )
    return ["main", f"--config={path}", f"--workdir={folder / 'run'}"]


@pytest.mark.slow
def test_a_prepared_folder_is_trained_on(given, tokenizer, tmp_path, capsys):
    with stand_ins.quick_compilation():
        assert main.main(words(given, tmp_path)) == 0, capsys.readouterr().err
    run = tmp_path / "run"
    lines = [line for line in metrics.read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(np.isfinite(line["image_nll"]) for line in lines)
    text = (run / "report.md").read_text()
    assert f"{training_report.NLL}\n\n| up to step | loss | image_nll |" in text
    assert "Exact scores" not in text and "Speed" not in text
    loaded = model_folder.load_model(run)
    assert loaded.tokenizer_path.read_bytes() == tokenizer.path.read_bytes()
    card = (run / "model" / "README.md").read_text()
    assert "from the model `base`" in card and card.endswith(README)
    before = model_folder.load_model(given.train.init_from).model
    changed = loaded.model.image_head.logits.kernel[...] != before.image_head.logits.kernel[...]
    assert np.asarray(changed).mean() > 0.5


@pytest.mark.slow
def test_a_converted_model_learns_to_draw_in_few_steps(given, tmp_path, capsys):
    """`configs/lavida_o_few.py`, at the size of the base: adapters and a code, then halving."""
    base, folders = given.train.init_from, {}
    for way in ("style", "distil"):
        few = config.read(CONFIGS / f"lavida_o_few.py:{way}")
        wanted = {
            "name": few.name, "lora": {"rank": 2, "also": few.lora.also},
            "diffusion": {"blocks": few.diffusion.blocks, "plan_steps": (1, 2, 4)},
            "optimizer": {
                name: getattr(few.optimizer, name)
                for name in ("style_warmup_steps", "distil", "frozen_dtype")
            } | {"learning_rate": 0.1, "warmup_steps": 0, "ema": min(few.optimizer.ema, 0.5)},
            "model": {"style_parts": 2, "style_values": 4},
            "train": {"init_from": str(folders.get("style", base)), "train_steps": 2},
        }  # fmt: skip
        folders[way] = tmp_path / way
        folders[way].mkdir()
        asked = words(config.changed(given, wanted), folders[way])
        assert main.main(asked) == 0, capsys.readouterr().err
        folders[way] /= "run"
        lines = metrics.read_metrics(folders[way] / "metrics.jsonl")
        assert all(np.isfinite(line["loss"]) for line in lines if "loss" in line)
        # The first run adds the code, which a base without one could not load as an adapter.
        assert (folders[way] / "adapters").exists() == (way == "distil")
    before, after = (model_folder.load_model(folders[way]).model for way in folders)
    tables = [model.style_code.values[...] for model in (before, after)]
    assert (np.asarray(tables[0]) != np.asarray(tables[1])).any()


def complaint(given, folder, capsys):
    assert main.main(words(given, folder)) == 2
    said = capsys.readouterr().err
    assert said.startswith("sparse_lavida_jax: ") and "Traceback" not in said
    return said


def changed(given, section, **changes):
    new = dataclasses.replace(getattr(given, section), **changes)
    return dataclasses.replace(given, **{section: new})


def test_a_folder_that_is_not_there_is_reported(given, tmp_path, capsys):
    said = complaint(changed(given, "data", folder=str(tmp_path / "no")), tmp_path, capsys)
    assert "no/mixture.json cannot be read" in said and "is the preparation of" in said


def test_a_missing_shard_is_reported(given, tmp_path, capsys):
    copied = tmp_path / "copy"
    shutil.copytree(given.data.folder, copied)
    shard = next(copied.glob("*/*.arrayrecord"))
    shard.unlink()
    said = complaint(changed(given, "data", folder=str(copied)), tmp_path, capsys)
    assert f"the shard {shard} is missing: copy it again" in said


def test_a_base_that_is_not_there_is_reported(given, tmp_path, capsys):
    said = complaint(changed(given, "train", init_from=str(tmp_path / "no")), tmp_path, capsys)
    assert "there is no model in" in said
    said = complaint(changed(given, "train", init_from=""), tmp_path, capsys)
    assert "or one that `prepare` made in data.folder: there is no tokenizer" in said


def test_a_tokenizer_of_another_model_is_reported(given, tmp_path, capsys):
    said = complaint(changed(given, "model", text_mask_id=7), tmp_path, capsys)
    assert re.search(r"has another model than the config: text_mask_id \d+, not 7\. `sparse", said)
    said = complaint(changed(given, "train", init_from="scenes"), tmp_path, capsys)
    assert "data.source='prepared' needs the tokenizer of a LaViDa-O" in said


def test_what_the_data_asks_for_is_drawn(given, tokenizer, tmp_path):
    """There is no judge: the result is a sheet without a score."""
    asked = record_batches.MixtureBatches(given.data.folder, given, tokenizer).prompts(4)
    assert len(asked) == 4 and all(prompt.startswith("image ") for prompt in asked)

    class Pipe(SparseLaViDa):
        def __init__(self):
            self.settings = given

        def generate(self, prompts):
            drawn = [np.full((32, 32, 3), 10 * i, np.uint8) for i, _ in enumerate(prompts)]
            return types.SimpleNamespace(pixels=drawn)

    assert training_report.check(Pipe(), tmp_path / "images/000001.png", asked) == {}
    assert (tmp_path / "images/000001.png").is_file()
    assert "images/000001.png" in training_report._newest_sheet(tmp_path)[0]
    assert training_report.check(Pipe(), tmp_path / "none.png") == {}
    assert not (tmp_path / "none.png").exists()
