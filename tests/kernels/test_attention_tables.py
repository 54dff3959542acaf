# SPDX-License-Identifier: Apache-2.0
"""Attention tables for all steps of an image are made before the loop, and are correct."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces

from sparse_lavida_jax import sample
from sparse_lavida_jax.kernels import attention
from sparse_lavida_jax.kernels.tile_lists import TileSizes
from sparse_lavida_jax.sampling import forward

SETTINGS = tiny.model_settings(attention_implementation="blockwise")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Tiles so small that even tiny steps can skip some."""
    monkeypatch.setattr(attention.devices, "blockwise_sizes", lambda *_: TileSizes(4, 4, 4))


def watched(name, modality="image", given=0.0, **changes):
    """Runs a request step by step; returns the tables made ahead, and those of each step."""
    asked = traces.settings_of(name, modality, SETTINGS, **changes)
    requests = [tiny.request(modality, SETTINGS, seed, words=3, given=given) for seed in (0, 1)]
    model, found = tiny.denoiser(SETTINGS), []

    @functools.partial(tiny.quick_jit, static_argnames=("settings",))
    def ahead_of(state, segment, prompts, *, settings):
        return forward.tables_ahead(model, state, segment, prompts, settings)

    @functools.partial(tiny.quick_jit, static_argnames=("settings",))
    def own_of(state, now, prompts, *, settings):
        stream = forward.response_stream(model.settings, state, now, *prompts, settings)
        after = sample.step(model, state, now, prompts, settings=settings)
        return model.step_tables(stream.tags, state.cache), after

    def step_by_step(_, state, segment, prompts, *, settings):
        ahead = ahead_of(state, segment, prompts, settings=settings)
        for i in range(len(segment.block)):
            now = traces.step_of(segment, i)
            own, state = own_of(state, now, prompts, settings=settings)
            found.append((traces.step_of(ahead, i), own))
        return state

    with traces._patched(prefill=traces._prefill, run_phase=step_by_step):
        inputs = tiny.sample_inputs(requests, model.settings, asked)
        sample.sample(model, inputs, traces.plan(requests, asked, num_steps=4), settings=asked)
    return found


@pytest.mark.parametrize(
    ("name", "given", "changes"),
    [
        ("sparse", 0.0, {"guidance": 2.0}),
        ("sparse", 0.4, {}),
        *(pytest.param(name, 0.0, {}, marks=pytest.mark.slow) for name in ("pt", "pr")),
    ],
)
def test_tables_made_ahead_are_those_of_every_step(name, given, changes):
    found = watched(name, given=given, **changes)
    assert len(found) == 4 and found[0][1].joint.by_key is None  # there are no gradients
    for ahead, own in found:
        assert jax.tree.structure(ahead) == jax.tree.structure(own)
        for ours, expected in zip(*map(jax.tree.leaves, (ahead, own)), strict=True):
            np.testing.assert_array_equal(ours, expected)
    assert len({str(own.joint.by_query.flags) for _, own in found}) > 1  # steps differ


@pytest.mark.parametrize(
    ("name", "modality", "ahead"),
    [("sparse", "text", True), ("rt", "image", True), ("sparse", "image", False)],
)
def test_what_is_not_known_before_is_made_in_the_step(name, modality, ahead):
    """For text, for a prompt that is passed again, and if requested."""
    asked = dataclasses.replace(traces.settings_of(name, modality, SETTINGS), tables_ahead=ahead)
    requests = [tiny.request(modality, SETTINGS, 0, words=3)]
    seen, made = [], sample.tables_ahead

    def kept(*args):
        seen.append(made(*args))
        return seen[-1]

    with traces._patched(tables_ahead=kept):
        segment = traces.plan(requests, asked, num_steps=2)[:1]
        loop_of(requests, segment, asked)
    assert seen == [None]


def loop_of(requests, segments, asked, model=None):
    """Returns the loop of a segment's program."""
    model = model or tiny.denoiser(SETTINGS)
    with traces._patched(prefill=traces._prefill):
        inputs = tiny.sample_inputs(requests, model.settings, asked)
        prefilled = sample.prefill_batch(model, inputs, segments, settings=asked)
    steps = jax.tree.map(jnp.asarray, segments[0])
    run = functools.partial(sample.run_phase.__wrapped__, settings=prefilled.settings)
    program = jax.make_jaxpr(run)(model, prefilled.state, steps, prefilled.prompts)
    loops = [e for e in program.eqns if e.primitive.name in ("while", "scan")]
    return loops[-1]


def test_the_loop_makes_no_tables(monkeypatch):
    """Making a list of tiles takes a cumulative sum: there is none in the loop."""
    asked = traces.settings_of("sparse", "image", SETTINGS)
    requests = [tiny.request("image", SETTINGS, 0, words=3)]
    segments = traces.plan(requests, asked, num_steps=2)[:1]
    assert "cumsum" not in str(loop_of(requests, segments, asked))
    monkeypatch.setattr(sample, "tables_ahead", lambda *_: None)
    assert "cumsum" in str(loop_of(requests, segments, asked))


def laid_out(equations):
    """Returns the primitives that pad or stack whole numbers, including inner programs."""
    for equation in equations:
        tags = [var.aval for var in equation.outvars if getattr(var.aval, "ndim", 0) > 1]
        if any(tag.dtype == jnp.int32 for tag in tags):
            yield from {equation.primitive.name} & {"pad", "concatenate"}
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from laid_out(inner.eqns)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "blockwise"])
def test_tags_are_laid_out_once_for_all_layers(implementation, monkeypatch):
    """In the loops over layers, no tags are padded or stacked; they are padded before."""
    settings = dataclasses.replace(SETTINGS, attention_implementation=implementation)
    asked = traces.settings_of("sparse", "image", settings)
    requests = [tiny.request("image", settings, 0, words=3)]
    segments = traces.plan(requests, asked, num_steps=2)[:1]
    monkeypatch.setattr(sample, "tables_ahead", lambda *_: None)
    loop = loop_of(requests, segments, asked, tiny.denoiser(settings))
    body = [*jax.extend.core.jaxprs_in_params(loop.params)][-1]
    layers = [equation for equation in body.eqns if equation.primitive.name == "scan"]
    assert len(layers) == 2  # joint and split
    assert not [*laid_out(layers)]
    assert "pad" in laid_out([e for e in body.eqns if e.primitive.name != "scan"])
