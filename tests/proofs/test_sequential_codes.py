# SPDX-License-Identifier: Apache-2.0
"""Codes of a cell drawn one after another have the joint distribution that training fits."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stand_ins
import tiny
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.inference.engine import Engine
from sparse_lavida_jax.models import fuse, parameters
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sampling.presets import RowRequest
from sparse_lavida_jax.scenes.tokenizer import SHIPPED
from sparse_lavida_jax.training import flops, start, step

TOLERANCE = 2e-5
CODES = 3  # in the codebook of the model whose cells are enumerated
CELLS = np.array([*itertools.product(range(CODES), repeat=4)])


def made(strength: float = 3.0, **settings):
    """Returns a model whose codes depend on those before them, at strength 0 on none."""
    model = tiny.denoiser(tiny.model_settings(codes_per_token=4, sequential_codes=True, **settings))
    model.image_head.earlier_codes.add.kernel[...] *= strength
    return model


@pytest.fixture(scope="module")
def model():
    return made()


def hidden_of(model, *shape):
    return jax.random.normal(jax.random.key(0), (*shape, model.settings.generation_width))


def test_what_is_drawn_has_the_probabilities_of_the_loss_and_codes_agree():
    model, draws = made(codebook_size=CODES), 40_000
    hidden = hidden_of(model, 1, 1)
    logits = model.image_logits(jnp.tile(hidden, (1, len(CELLS), 1)), jnp.asarray(CELLS)[None])
    each = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits))[0], CELLS[..., None], axis=-1)
    joint = np.exp(each.sum(axis=(1, 2)))
    assert joint.sum() == pytest.approx(1, abs=1e-5)

    def choose(logits, number):
        return jax.random.categorical(jax.random.key(number), logits)

    draw = jax.jit(lambda x: model.image_head.draw(x, choose))
    drawn = np.asarray(draw(jnp.tile(hidden, (1, draws, 1)))[0])
    found = np.bincount(drawn @ CODES ** np.arange(4)[::-1], minlength=len(CELLS)) / draws
    np.testing.assert_allclose(found, joint, rtol=0, atol=5 * np.sqrt(joint.max() / draws))
    of_each = [np.bincount(drawn[:, i], minlength=CODES) / draws for i in range(4)]
    independent = np.prod([share[CELLS[:, i]] for i, share in enumerate(of_each)], axis=0)
    assert np.abs(independent - joint).sum() > 5 * np.abs(found - joint).sum()


def test_a_code_depends_on_those_before_it_alone_and_at_first_on_none(model):
    hidden = hidden_of(model, 1, 1)
    codes = jnp.array([[[5, 9, 2, 7]]])
    for i in range(4):
        other = model.image_logits(hidden, codes.at[..., i].add(1))
        changed = np.abs(other - model.image_logits(hidden, codes)).max(axis=(0, 1, 3)) > 1e-3
        np.testing.assert_array_equal(changed, np.arange(4) > i)
    begun = Denoiser(model.settings, rngs=nnx.Rngs(0)).image_head
    plain = tiny.denoiser(tiny.model_settings(codes_per_token=4)).image_head
    for name in ("spread_norm", "spread", "cell_norm", "cell", "code", "code_norm", "logits"):
        setattr(plain, name, getattr(begun, name))
    np.testing.assert_array_equal(begun(hidden, codes), plain(hidden))


@pytest.mark.parametrize("preset", ["sparse", "dense"])
def test_one_pass_over_a_plan_draws_the_image_of_the_sampler(model, preset):
    requests = [
        tiny.request("image", model.settings, 0, words=2, vision=True, source=True, given=0.4),
        tiny.request("image", model.settings, 1, words=5),
    ]
    sampling = config.build(
        config.Sampling,
        {"preset": preset, "num_steps": 3, "temperature": 0.8, "order_seed": -1, "guidance": 0.7},
    )
    rows = [RowRequest(seed=5 + i, temperature=0.8, guidance=0.7) for i in range(2)]
    engine = Engine(model, 2, tiny.TEXT_BLOCK_LEN)
    drawn = engine.sample(requests, rows, sampling).drawn
    if preset == "dense":  # a plan cannot be passed at once: nothing to compare but the cache
        fused = Engine(fuse.for_inference(model), 2, tiny.TEXT_BLOCK_LEN)
        np.testing.assert_array_equal(fused.sample(requests, rows, sampling).drawn, drawn)
        return

    def least_margin(model, rows) -> float:
        found = Engine(model, 2, tiny.TEXT_BLOCK_LEN)
        scored = found.scores(requests, rows, sampling, drawn, stage="image")
        return min(scores.margin[scores.decided].min() for _, scores in scored)

    assert least_margin(model, rows) > -TOLERANCE
    others = [dataclasses.replace(one, seed=one.seed + 9) for one in rows]
    assert least_margin(model, others) < -100 * TOLERANCE
    assert least_margin(made(2.7), rows) < -100 * TOLERANCE


def test_the_loss_in_chunks_has_the_same_value_and_gradient(model):
    batch = jax.tree.map(jnp.asarray, tiny.batch(["image", "image"], model.settings))
    results = [
        jax.jit(jax.value_and_grad(lambda params, c=c: step.loss(params, batch, chunk=c)[0]))(model)
        for c in (0, 5)
    ]
    (plain, gradient), (chunked, same) = results
    assert float(plain) == pytest.approx(float(chunked), abs=TOLERANCE)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(same), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE)
    earlier = jax.tree.leaves(gradient.image_head.earlier_codes)
    assert all(np.abs(leaf).max() > 1e-6 for leaf in earlier)


def test_the_matrices_of_the_head_are_counted(model):
    head = model.image_head
    each = sum(part.kernel.size for part in (head.cell, head.code, head.logits))
    later = sum(
        see.kernel.size + head.earlier_codes.add.kernel.size for see in head.earlier_codes.see
    )
    counted = flops.head_size("generation", model.settings)
    assert counted == head.spread.kernel.size + 4 * each + later


def test_a_run_adds_it_to_a_model_without_it(tmp_path):
    changes = {"codes_per_token": 4, "grid_size": 3, "codebook_size": 64}
    base = stand_ins.settings(model=config.to_dict(stand_ins.settings().model) | changes)
    trained = tiny.denoiser(base.model)
    model_folder.save_model(
        tmp_path, trained, base, tokenizer_path=SHIPPED, vq_folder=None, readme=""
    )
    given = config.changed(
        base, {"model": {"sequential_codes": True}, "train": {"init_from": str(tmp_path)}}
    )
    begun = start.init_state(given, trained).params
    taken = parameters.by_name(begun)
    for name, leaf in parameters.by_name(trained).items():
        np.testing.assert_array_equal(taken.pop(name), leaf)
    assert taken and all(name.startswith("image_head/earlier_codes/") for name in taken)
    hidden, codes = hidden_of(trained, 1, 2), jnp.ones((1, 2, 4), jnp.int32)
    np.testing.assert_array_equal(begun.image_logits(hidden, codes), trained.image_logits(hidden))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model": {"codes_per_token": 1}}, "sequential_codes"),
        ({"diffusion": {"partial_cells": 0.5}}, "partial_cells"),
    ],
)
def test_what_contradicts_it_is_refused(changes, word):
    base = {"model": {"codes_per_token": 4, "sequential_codes": True}}
    merged = {name: {**base.get(name, {}), **changes.get(name, {})} for name in base | changes}
    with pytest.raises(config.ConfigError, match=word):
        config.build(config.Config, merged)


def test_passes_over_the_codes_of_a_cell_are_refused(model):
    sampling = config.build(config.Sampling, {"num_steps": 3, "cell_passes": 2})
    asked = [tiny.request("image", model.settings, 0, words=2)]
    with pytest.raises(config.ConfigError, match="one after another"):
        Engine(model, 1, tiny.TEXT_BLOCK_LEN).sample(asked, [RowRequest(seed=1)], sampling)
