# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a step: which tokens go through the network, and with which tags."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sparse_lavida_jax import config
from sparse_lavida_jax.models.cache import KVCache
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.stack import StepTables
from sparse_lavida_jax.sampling import draw
from sparse_lavida_jax.sampling.plans import Steps
from sparse_lavida_jax.sampling.presets import StepSettings
from sparse_lavida_jax.sampling.prompts import Prompt
from sparse_lavida_jax.sampling.state import NOT_DECODED, Prompts, SamplerState, repeat, take
from sparse_lavida_jax.tags import (
    NO_CELL,
    NO_FEATURE,
    AnyArray,
    Stream,
    TokenTags,
    concatenate,
    make_tags,
    without_blocks,
)
from sparse_lavida_jax.visibility import PAD_BLOCK


def step_hidden(
    model: Denoiser,
    state: SamplerState,
    now: Steps,
    prompts: Prompts,
    settings: StepSettings,
    tables: StepTables | None,
) -> tuple[Float[Array, "r b w e"], KVCache | None]:
    """Returns the final hidden states of the tokens to decode, and the updated cache."""
    if not settings.passes_all_rows(now):
        # The full rows are last.
        full_rows = now.decode.shape[0]
        prompts = (jax.tree.map(lambda x: x[-full_rows:], prompts[-1]),)
    passed = [_pass(model, state, now, prompt, settings, tables) for prompt in prompts]
    hidden, caches = zip(*passed, strict=True)
    return jnp.concatenate(hidden), caches[-1]


def step_logits(
    model: Denoiser,
    state: SamplerState,
    now: Steps,
    prompts: Prompts,
    settings: StepSettings,
    tables: StepTables | None = None,
) -> tuple[Float[Array, "b w g v"], KVCache | None]:
    """Returns guided logits of the tokens to decode, in float32, and the cache after this step."""
    hidden, cache = step_hidden(model, state, now, prompts, settings, tables)
    candidates = hidden.reshape(-1, *hidden.shape[2:])
    if settings.modality == "text":
        logits = model.text_logits(candidates)[:, :, None]
    else:
        logits = model.image_logits(candidates)
    logits = logits.reshape(*hidden.shape[:2], *logits.shape[1:])
    return draw.guided(logits, state.rows, now, settings), cache


def _pass(
    model: Denoiser,
    state: SamplerState,
    now: Steps,
    prompt: Prompt,
    settings: StepSettings,
    tables: StepTables | None,
) -> tuple[Float[Array, "r b w e"], KVCache | None]:
    """Passes guidance rows whose prompts have one shape; returns the same as `step_hidden`."""
    is_text, preset_ = settings.modality == "text", settings.preset
    cache, features, rows = state.cache, None, len(prompt.length) // len(now.decode)
    if state.features is not None and settings.passes_prompt(now):
        features = repeat(state.features, rows)
    if cache is not None:
        cache = dataclasses.replace(cache, reach=now.reach)
        if now.refreshes:
            cache = dataclasses.replace(cache, offset=jnp.int32(0))
    response = response_stream(model.settings, state, now, prompt, settings)
    clean_len, decode_len = now.clean.shape[-1], now.decode.shape[-1]
    again = _prompt_again(prompt, now, settings)
    own = again["understanding" if is_text else "generation"]
    before = clean_len + (0 if own is None else own.index.shape[1])
    kept = clean_len if preset_.cache_response else 0
    stream = _join(response, own, clean_len)
    other = again["generation" if is_text else "understanding"]
    style = state.rows.style
    hidden, cache = model(
        stream if is_text else other,
        other if is_text else stream,
        features,
        wanted="understanding" if is_text else "generation",
        cache=cache,
        tables=tables,
        style=None if style is None else repeat(style, rows),
    )
    if cache is not None:
        cache = dataclasses.replace(cache, reach=None)
        cache = cache.advance(before if now.refreshes else kept)
    candidates = hidden["understanding" if is_text else "generation"]
    candidates = candidates[:, before : before + decode_len]
    return candidates.reshape(rows, -1, *candidates.shape[1:]), cache


def response_stream(
    model: config.Model,
    state: SamplerState,
    now: Steps,
    prompt: Prompt,
    settings: StepSettings,
) -> Stream:
    """[clean | decode | rest | registers] for every guidance row."""
    is_text = settings.modality == "text"
    positions = jnp.concatenate([now.clean, now.decode, now.rest], axis=-1)
    at = jnp.maximum(positions, 0)
    tokens = take(state.responses, at)
    decoded_at = take(state.decoded_at, at)
    block = jnp.where(decoded_at == NOT_DECODED, now.block, decoded_at)
    block = jnp.where(positions < 0, PAD_BLOCK, block)
    index = jnp.full_like(at, NO_FEATURE) if is_text else at
    b, m = positions.shape[0], now.registers
    if m:
        register_id = model.text_register_id if is_text else model.image_register_id
        registers = jnp.full((b, m, tokens.shape[-1]), register_id)
        tokens = jnp.concatenate([tokens, registers], axis=1)
        block = jnp.concatenate([block, jnp.full((b, m), now.block)], axis=1)
        index = jnp.concatenate([index, jnp.full((b, m), NO_CELL)], axis=1)
    tokens, index, block, at = (
        repeat(x, len(prompt.length) // b) for x in (tokens, index, block, at)
    )
    register_position = prompt.length[:, None] + jnp.arange(m)[None]
    position = jnp.concatenate([prompt.response_position[:, None] + at, register_position], axis=1)
    tags = make_tags(position, block, now.block - 1)
    if settings.preset.full_attention:
        tags = without_blocks(tags)
    return Stream(tokens[..., 0] if is_text else tokens, index, tags)


def _prompt_again(prompt: Prompt, now: Steps, settings: StepSettings) -> dict[str, Stream | None]:
    """The prompt's streams, if this preset passes them in every step."""
    streams = {"understanding": prompt.understanding, "generation": prompt.generation}
    if not settings.passes_prompt(now):
        return dict.fromkeys(streams)
    if settings.preset.full_attention:
        streams = {
            name: s if s is None else s.replace(tags=without_blocks(s.tags))
            for name, s in streams.items()
        }
    return streams


def _join(response: Stream, prompt: Stream | None, clean_len: int) -> Stream:
    """[clean | prompt | others]: what the cache keeps comes first, in slots next to each other."""
    if prompt is None:
        return response
    first, second = (
        jax.tree.map(lambda x, s=s: x[:, s], response)
        for s in (slice(None, clean_len), slice(clean_len, None))
    )
    return concatenate(first, prompt, second)


def tables_ahead(
    model: Denoiser,
    state: SamplerState,
    phase: Steps,
    prompts: Prompts,
    settings: StepSettings,
) -> StepTables | None:
    """Returns the attention tables of every step, stacked along a first axis.

    None if each step makes its own: if decoding times depend on what is drawn, if the prompt is
    passed again, or if devices share the work. The reference implementation needs no tables.
    """
    cache, whole = state.cache, phase.candidates.shape[-1] == 1
    known = settings.modality == "image" and settings.commit.name == "all" and whole
    alone = not settings.passes_prompt(phase)
    possible = settings.tables_ahead and known and alone
    if cache is None or not possible or jax.sharding.get_abstract_mesh().size > 1:
        return None
    # The time at which each token is decoded, in this phase or before it.
    candidates = phase.candidates[..., 0] & (phase.decode >= 0)
    at = jnp.where(candidates, phase.decode, state.decoded_at.shape[1])
    rows = jnp.arange(at.shape[1])[None, :, None]
    decoded_at = state.decoded_at.at[rows, at].set(phase.block[:, None, None], mode="drop")

    def tags_of(now: Steps) -> tuple[AnyArray, ...]:
        until_now = jnp.where(decoded_at > now.block, NOT_DECODED, decoded_at)
        before = dataclasses.replace(state, decoded_at=until_now)
        tags = response_stream(model.settings, before, now, prompts[0], settings).tags
        return tags.position, tags.block, tags.horizon

    tags = jax.vmap(tags_of)(phase)
    stays = phase.clean.shape[-1] if settings.preset.cache_response else 0
    clean = jnp.moveaxis(tags[1][:, :, :stays], 0, 1)
    # Steps beyond those that are run may find no slots.
    stored = cache.tagged(clean.reshape(clean.shape[0], -1)) if stays else cache

    def tables_of(i, *tags) -> StepTables:
        return model.step_tables(TokenTags(*tags), stored.advance(i * stays))

    return jax.vmap(tables_of)(jnp.arange(phase.block.shape[0]), *tags)
