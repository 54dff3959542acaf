# SPDX-License-Identifier: Apache-2.0
"""A style code in requests, records, runs and configurations."""

import dataclasses

import jax
import numpy as np
import pytest
import stand_ins
import tiny

from sparse_lavida_jax import config, train
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.models import parameters
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.scenes.tokenizer import SHIPPED
from sparse_lavida_jax.training import sources
from sparse_lavida_jax.training.start import init_state

STYLE = {"style_groups": 2, "style_values": 3}


def settings(**sections) -> config.Config:
    model = dataclasses.replace(stand_ins.settings().model, **STYLE)
    data, diffusion = {"tasks": {"draw": 1.0}, "given": 0.0}, {"blocks": "plan", "plan_steps": (2,)}
    given = {"model": model, "data": data, "diffusion": diffusion}
    return stand_ins.settings(
        **{name: sections.pop(name, own) for name, own in given.items()}, **sections
    )


@pytest.fixture(scope="module")
def pipe():
    given = settings(sampling={"schedule": "linear", "temperature": 1.0})
    with stand_ins.quick_compilation():
        parts = tiny.denoiser(given.model), given, stand_ins.prompts(given), stand_ins.Codec()
        yield SparseLaViDa(*parts, 2)


def test_a_style_seed_changes_the_style_alone_and_is_replayed(pipe):
    drawn = [
        pipe.generate("a red circle", seed=3, style_seed=style, steps=1)
        for style in (3, 4, 5, None)
    ]
    own, *others, by_seed = (one.pixels[0] for one in drawn)
    np.testing.assert_array_equal(own, by_seed)
    assert any((own != other).any() for other in others)  # codes are few
    for one, style in zip(drawn, (3, 4, 5, None), strict=True):
        (record,) = one.records
        assert record["recipe"].get("style_seed") == style
        np.testing.assert_array_equal(pipe.replay(record).pixels, one.pixels)
    with pytest.raises(RequestError, match="style_seed"):
        pipe.generate("a red circle", style_seed=2.5)


def test_a_model_without_a_code_refuses_a_style_seed():
    with pytest.raises(RequestError, match="no style code: leave out style_seed"):
        stand_ins.pipe_of_tasks(("draw",), 1).requests("generate", "a red circle", style_seed=1)


def test_a_run_adds_a_code_to_a_model_without_one(tmp_path):
    plain = stand_ins.settings()
    base = tiny.denoiser(plain.model)
    model_folder.save_model(
        tmp_path / "base", base, plain, tokenizer_path=SHIPPED, vq_folder=None, readme=""
    )
    given = settings(train={"init_from": str(tmp_path / "base")})
    state = init_state(given, jax.tree.map(np.zeros_like, base))
    known, found = parameters.by_name(base), parameters.by_name(state.params)
    assert {name.split("/")[0] for name in found.keys() - known.keys()} == {"style_code"}
    for name, leaf in known.items():
        np.testing.assert_array_equal(found[name], leaf)


def test_steps_train_a_code(monkeypatch):
    stand_ins.without_waiting(monkeypatch)
    given = settings(optimizer={"style_warmup_steps": 4}, train={"batch_size": 8})
    model = tiny.denoiser(given.model)
    batch = sources.open_source(given, model).batches.dataset()[0]
    state = init_state(given, model)
    with stand_ins.quick_compilation():
        for _ in range(3):
            state, logged = train.train_step(
                state, batch, np.float32(1e-2), settings=given.optimizer
            )
            assert np.isfinite(logged["loss"]) and logged["style_nll"] > 0
    moved = jax.tree.map(
        lambda a, b: np.abs(a - b).max(), state.params.style_code, model.style_code
    )
    assert all(size > 0 for size in jax.tree.leaves(moved))


@pytest.mark.parametrize(
    ("section", "changes"), [("diffusion", {"blocks": "uniform"}), ("data", {"packing": 2})]
)
def test_rows_that_do_not_predict_a_whole_image_are_refused(section, changes):
    with pytest.raises(config.ConfigError, match="style_groups=2 needs rows"):
        settings(**{section: changes})
    with pytest.raises(config.ConfigError, match="a model with registers"):
        config.Model(style_groups=1, num_registers=0)
