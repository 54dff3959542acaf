# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a step: which tokens go through the network, and what it returns of them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sparse_lavida_jax import config
from sparse_lavida_jax.layout import (
    NO_CELL,
    NO_FEATURE,
    Stream,
    concatenate,
    make_layout,
    without_blocks,
)
from sparse_lavida_jax.models.cache import KVCache
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.stack import StepTables
from sparse_lavida_jax.sampling.presets import StepSettings
from sparse_lavida_jax.sampling.prompts import Prompt, cut_rows, padded_lengths
from sparse_lavida_jax.sampling.state import NOT_DECODED, SamplerState, StepTokens, repeat, take
from sparse_lavida_jax.visibility import PAD_BLOCK


def step_hidden(
    model: Denoiser,
    state: SamplerState,
    now: StepTokens,
    prompt: Prompt,
    settings: StepSettings,
    tables: StepTables | None,
) -> tuple[Float[Array, "r b w e"], KVCache | None]:
    """Returns the final hidden states of the tokens to decode, and the cache after this step."""
    if settings.uses_cache:
        return _pass(model, state, now, prompt, settings, tables)
    # Of a step without guidance, the full rows alone: the last ones.
    numbers = range(0 if settings.guided else settings.guidance_rows - 1, settings.guidance_rows)
    shapes = settings.shapes or (padded_lengths(prompt),) * settings.guidance_rows
    b, hidden = now.decode.shape[0], []
    for shape, group in itertools.groupby(numbers, shapes.__getitem__):
        first, *others = group
        rows = range(first * b, (first + len(others) + 1) * b)
        features = None if state.features is None else state.features[rows.start : rows.stop]
        own = cut_rows(dataclasses.replace(prompt, pixels=None), b, rows, shape)
        how = dataclasses.replace(settings, guidance_rows=len(others) + 1)
        part = dataclasses.replace(state, features=features)
        hidden.append(_pass(model, part, now, own, how, tables)[0])
    return jnp.concatenate(hidden), state.cache


def _pass(
    model: Denoiser,
    state: SamplerState,
    now: StepTokens,
    prompt: Prompt,
    settings: StepSettings,
    tables: StepTables | None,
) -> tuple[Float[Array, "r b w e"], KVCache | None]:
    """Passes guidance rows whose prompts have one shape; returns what `step_hidden` does."""
    is_text, preset_ = settings.kind == "text", settings.preset
    cache, features = state.cache, state.features
    if settings.refreshing and cache is not None:
        cache = dataclasses.replace(cache, offset=jnp.int32(0))
    rows = settings.guidance_rows
    response = response_stream(model.settings, state, now, prompt, settings)
    clean_len, decode_len = now.clean.shape[-1], now.decode.shape[-1]
    again = _prompt_again(prompt, settings)
    own = again["understanding" if is_text else "generation"]
    before = clean_len + (0 if own is None else own.index.shape[1])
    kept = clean_len if preset_.cache_response else 0
    stream = _join(response, own, clean_len)
    other = again["generation" if is_text else "understanding"]
    hidden, cache = model(
        stream if is_text else other,
        other if is_text else stream,
        None if preset_.cache_prompt and not settings.refreshing else features,
        wanted="understanding" if is_text else "generation",
        cache=cache,
        tables=tables,
    )
    if cache is not None:
        cache = cache.commit(before if settings.refreshing else kept)
    candidates = hidden["understanding" if is_text else "generation"]
    candidates = candidates[:, before : before + decode_len]
    return candidates.reshape(rows, -1, *candidates.shape[1:]), cache


def response_stream(
    model: config.Model,
    state: SamplerState,
    now: StepTokens,
    prompt: Prompt,
    settings: StepSettings,
) -> Stream:
    """[clean | decode | rest | registers] for every guidance row."""
    is_text = settings.kind == "text"
    positions = jnp.concatenate([now.clean, now.decode, now.rest], axis=-1)
    at = jnp.maximum(positions, 0)
    tokens = take(state.canvas, at)
    decoded_at = take(state.decoded_at, at)
    block = jnp.where(decoded_at == NOT_DECODED, now.block, decoded_at)
    block = jnp.where(positions < 0, PAD_BLOCK, block)
    index = jnp.full_like(at, NO_FEATURE) if is_text else at
    b, m = positions.shape[0], settings.num_registers
    if m:
        register_id = model.text_register_id if is_text else model.image_register_id
        registers = jnp.full((b, m, tokens.shape[-1]), register_id)
        tokens = jnp.concatenate([tokens, registers], axis=1)
        block = jnp.concatenate([block, jnp.full((b, m), now.block)], axis=1)
        index = jnp.concatenate([index, jnp.full((b, m), NO_CELL)], axis=1)
    tokens, index, block, at = (
        repeat(x, settings.guidance_rows) for x in (tokens, index, block, at)
    )
    register_position = prompt.length[:, None] + jnp.arange(m)[None]
    position = jnp.concatenate([prompt.response_position[:, None] + at, register_position], axis=1)
    layout = make_layout(position, block, now.block - 1)
    if settings.preset.full_attention:
        layout = without_blocks(layout)
    return Stream(tokens[..., 0] if is_text else tokens, index, layout)


def _prompt_again(prompt: Prompt, settings: StepSettings) -> dict[str, Stream | None]:
    """The prompt's streams if this preset passes them in every step."""
    streams = {"understanding": prompt.understanding, "generation": prompt.generation}
    if settings.preset.cache_prompt and not settings.refreshing:
        return dict.fromkeys(streams)
    if settings.preset.full_attention:
        streams = {
            name: s if s is None else s.replace(layout=without_blocks(s.layout))
            for name, s in streams.items()
        }
    return streams


def _join(response: Stream, prompt: Stream | None, clean_len: int) -> Stream:
    """[clean | prompt | others]: what is committed comes first, so that it stays contiguous."""
    if prompt is None:
        return response
    first, second = (
        jax.tree.map(lambda x, s=s: x[:, s], response)
        for s in (slice(None, clean_len), slice(clean_len, None))
    )
    parts = (first, prompt, second)
    return Stream(
        jnp.concatenate([p.tokens for p in parts], axis=1),
        jnp.concatenate([p.index for p in parts], axis=1),
        concatenate(*(p.layout for p in parts)),
    )
