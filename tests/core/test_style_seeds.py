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
from sparse_lavida_jax.inference.requests import RequestMaker
from sparse_lavida_jax.models import parameters
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling.presets import RowRequest, step_settings
from sparse_lavida_jax.sampling.prompts import sample_input
from sparse_lavida_jax.sampling.state import keys_from
from sparse_lavida_jax.scenes.tokenizer import SHIPPED
from sparse_lavida_jax.training import flops, memory, sources, style
from sparse_lavida_jax.training.start import init_state
from sparse_lavida_jax.visibility import PAD_BLOCK

STYLE = {"style_parts": 2, "style_groups": 3, "style_values": 2}


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
        pipe.generate("a red circle", seed=3, style_seed=own_seed, steps=1)
        for own_seed in (3, 4, 5, None)
    ]
    own, *others, by_seed = (one.pixels[0] for one in drawn)
    np.testing.assert_array_equal(own, by_seed)
    assert any((own != other).any() for other in others)  # codes are few
    for one, own_seed in zip(drawn, (3, 4, 5, None), strict=True):
        (record,) = one.records
        assert record["recipe"].get("style_seed") == own_seed
        np.testing.assert_array_equal(pipe.replay(record).pixels, one.pixels)
    with pytest.raises(RequestError, match="style_seed"):
        pipe.generate("a red circle", style_seed=2.5)


def test_every_attempt_has_the_style_that_was_asked_for():
    given = [RowRequest(seed=1, style_seed=2), RowRequest(seed=1)]
    later = [dataclasses.replace(one, attempt=3) for one in given]
    for stage, alike in ("style", [True, False]), ("image", [False, False]):
        first, second = (jax.random.key_data(keys_from(one, stage, 0)) for one in (given, later))
        assert (first == second).all(axis=1).tolist() == alike


def test_branches_keep_the_style_of_what_they_branch_from(pipe):
    """A replay draws each branch from its start, by itself."""
    drawn = pipe.generate("a red circle", seed=3, steps=3)
    branches = pipe.branch(drawn.records[0], at="image:1", num_images=2, seed=9)
    assert (branches.pixels[0] != branches.pixels[1]).any()
    for record, pixels in zip(branches.records, branches.pixels, strict=True):
        np.testing.assert_array_equal(pipe.replay(record).pixels[0], pixels)


@pytest.mark.parametrize(
    "how", [{"registers": 0}, {"sampler": "dense"}, {"sampling": {"style_code": False}}]
)
def test_a_style_seed_is_refused_where_images_have_no_style_code(pipe, how):
    if "sampling" in how:
        how = {"sampling": config.changed(pipe.settings.sampling, how["sampling"])}
    assert pipe.requests("generate", "a red circle", **how)
    with pytest.raises(RequestError, match="have no style code: leave out style_seed"):
        pipe.requests("generate", "a red circle", style_seed=1, **how)


def test_without_its_code_a_model_draws_as_one_that_never_had_any(pipe):
    how = config.changed(pipe.settings.sampling, {"style_code": False})
    asked = {"seed": 3, "layout": False}
    without = pipe.generate("a red circle", sampling=how, **asked)
    bare = config.changed(pipe.settings, {"model": {"style_parts": 0}})
    known = parameters.by_name(pipe.engine.model)
    model = parameters.mapped(lambda name, _: known[name], tiny.denoiser(bare.model))
    with stand_ins.quick_compilation():
        plain = SparseLaViDa(model, bare, stand_ins.prompts(bare), stand_ins.Codec(), 2)
        same = plain.generate("a red circle", **asked)
    np.testing.assert_array_equal(without.pixels, same.pixels)
    # Both give an image the same bits.
    image = without.pixels[0]
    bits = [one.surprise(image, "a red circle", num_plans=1).bits for one in (pipe, plain)]
    np.testing.assert_array_equal(*bits)
    # The pass that draws a code is counted.
    more = pipe.generate("a red circle", **asked).passed[0] - without.passed[0]
    assert more == sum(without.prompted[0]) + STYLE["style_parts"]


def test_smaller_images_have_no_code(pipe):
    model = dataclasses.replace(pipe.settings.model, cell_positions=False)
    given, side = dataclasses.replace(pipe.settings, model=model), pipe.codec.image_size
    run = dataclasses.replace(pipe.task_run(given.sampling), settings=given)
    maker, parts = RequestMaker(given, pipe.prompts, side), []
    for size in (side, side), (side // 2, side):
        (made,) = maker.make("generate", "a red circle", None, {"size": size})
        how = step_settings(made.sampling, model, "image")
        parts.append(sample_input(run.image_example(made), made, model, how).style_parts)
    assert parts == [STYLE["style_parts"], 0]
    with pytest.raises(RequestError, match=f"only images of {side}x{side} pixels have a style"):
        maker.make("generate", "a red circle", None, {"size": size, "style_seed": 1})


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
    optimizer = {"style_warmup_steps": 4, "weight_decay": 0.1}
    given = settings(optimizer=optimizer, train={"batch_size": 8})
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
    still = {name for name, size in parameters.by_name(moved).items() if not size}
    assert still == {"seen_mean", "seen_whitening"}


def test_the_pass_that_asks_for_codes_is_forecast():
    """Its operations, and the activations that it keeps."""
    given, plain = settings(train={"batch_size": 4}), settings(model=stand_ins.settings().model)
    batch = sources.open_source(given, tiny.denoiser(given.model)).batches.dataset()[0]
    works = [flops.work_of(batch, one.model) for one in (given, plain)]
    assert dataclasses.replace(works[0], flops=0.0) == dataclasses.replace(works[1], flops=0.0)
    cells = given.model.num_cells
    stream = style.asked(batch, given.model)
    assert (np.asarray(stream.tags.block) < PAD_BLOCK).sum(axis=1).tolist() == [cells + 4] * 4
    products = flops.layer_size("generation", given.model) * given.model.num_layers
    assert works[0].flops - works[1].flops > 6 * 4 * (cells + 4) * products
    sizes = memory.BatchSize(4, 16, cells)
    assert memory.kept(given, sizes) > 1.3 * memory.kept(plain, sizes)


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("diffusion", {"blocks": "uniform"}),
        ("diffusion", {"blocks": "plan", "attention": "full"}),
        ("data", {"packing": 2}),
    ],
)
def test_rows_that_do_not_predict_a_whole_image_are_refused(section, changes):
    with pytest.raises(config.ConfigError, match="style_parts=2 needs registers"):
        settings(**{section: changes})
    with pytest.raises(config.ConfigError, match="0, or with registers"):
        config.Model(style_parts=1, num_registers=0)
    with pytest.raises(config.ConfigError, match="rows and columns of them fit into"):
        config.Model(style_parts=11, style_groups=1, style_values=2, grid_size=6)
