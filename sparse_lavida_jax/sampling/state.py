# SPDX-License-Identifier: Apache-2.0
"""The state of a batch while it is sampled, and its prefill."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from sparse_lavida_jax import config
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.models.cache import KVCache
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.stack import (
    implementation_of,
    step_implementation_of,
)
from sparse_lavida_jax.models.style_code import queries
from sparse_lavida_jax.programs.persistent_jit import persistent_jit
from sparse_lavida_jax.sampling.plans import Steps
from sparse_lavida_jax.sampling.presets import RowRequest, StepSettings, guidance_of
from sparse_lavida_jax.sampling.prompts import Prompt, SampleInput, padded_lengths
from sparse_lavida_jax.sequence import RESPONSE_STREAM, Modality, SeenBatch
from sparse_lavida_jax.tags import STREAMS
from sparse_lavida_jax.visibility import PAD_BLOCK, AnyArray

# So that stages with one seed differ in noise.
NOISE = {"text": 0, "layout": 1, "image": 2, "style": 3, "revision": 4}
NOT_DECODED = PAD_BLOCK  # in `decoded_at`: no step has decoded the position yet
UNTOLD = 0  # in `decoded_at`: nobody knows which step decoded the token, or none did


def attention(model: Denoiser, *_: Any, **__: Any) -> str:
    """Returns the implementations of attention and of steps that programs are traced with.

    They may be others after the device's kernels were checked again (`kernels.admission`).
    """
    return f"{implementation_of(model.settings)}, {step_implementation_of(model)}"


@flax.struct.dataclass
class Rows:
    """Values of each row, other than its prompt; none of them is compiled in.

    Attributes:
        key: of its seed, the stage and the attempt; noise depends on (key, block, position) alone.
        temperature: 0 takes the most probable token or code.
        guidance, guidance_image: scales; read only if the settings have guidance rows.
        ends_from: for a text, the first position at which it may end.
        style: the style code of each row's image, zeros for a row without one; None: none has one.
    """

    key: Key[Array, " b"]
    temperature: Float[AnyArray, " b"]
    guidance: Float[AnyArray, " b"]
    guidance_image: Float[AnyArray, " b"]
    ends_from: Int[AnyArray, " b"]
    style: Float[Array, "b n c"] | None = None


def rows_of(inputs: Sequence[SampleInput], settings: StepSettings, stage: str = "") -> Rows:
    """Returns the values of the rows of a batch, from their requests.

    Args:
        stage: a key of `NOISE`; "": the modality of the responses.
    """
    requests, edits = [one.request for one in inputs], settings.guidance_rows == 3
    scales = [
        (one.temperature, guidance_of(one, has_source=edits), one.guidance_image)
        for one in requests
    ]
    temperature, guidance, guidance_image = np.array(scales, np.float32).T
    key = keys_from(requests, stage or settings.modality, 0)
    ends = np.array([ends_from(one.example) for one in inputs], np.int32)
    return Rows(key, temperature, guidance, guidance_image, ends)


def keys_from(requests: Sequence[RowRequest], stage: str, step: int) -> Key[Array, " b"]:
    """Returns the keys of the rows' noise from a step on, until the next turn.

    Args:
        stage: a key of `NOISE`.
    """
    seeds = [[seed for first, seed in one.seeds(stage) if first <= step][-1] for one in requests]
    # A style that was asked for is that of every attempt.
    fixed = [stage == "style" and one.style_seed is not None for one in requests]
    attempts = [0 if own else one.attempt for own, one in zip(fixed, requests, strict=True)]
    return _keys(np.array(seeds), np.array(attempts), stage=NOISE[stage])


@persistent_jit(static=("stage",))
def _keys(seed: Int[Array, " b"], attempt: Int[Array, " b"], *, stage: int) -> Key[Array, " b"]:
    def key(seed, attempt):
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stage), attempt)

    return jax.vmap(key)(seed, attempt)


def ends_from(example: Example) -> int:
    """Returns the first position at which a text may end: never before its last given token."""
    if not example.ends:
        return len(example.given)
    return int(np.flatnonzero(example.given)[-1]) if example.given.any() else 0


@flax.struct.dataclass
class SamplerState:
    """A batch of responses between all masked and fully decoded.

    Attributes:
        responses: ids or codes, the mask id where nothing is decoded yet.
        decoded_at: the block of the step that decoded each token, `GIVEN_BLOCK` if it was given,
            `NOT_DECODED` if it is masked.
        rows: seeds and scales.
        features: vision features of each request, for presets that pass the prompt again.
        cache: keys and values of all guidance rows; None if the preset caches nothing.
        passes: forward passes so far, not counting that of the prompt.
    """

    responses: Int[Array, "b l g"]
    decoded_at: Int[Array, "b l"]
    rows: Rows
    features: Float[Array, "b v e"] | None
    cache: KVCache | None
    passes: Int[Array, ""]


def first_responses(
    inputs: Sequence[SampleInput], mask_id: int
) -> tuple[Int[np.ndarray, "b l g"], Bool[np.ndarray, "b l"]]:
    """Returns the initial responses, and which of their tokens are known."""
    lengths = sorted({len(one.example.given) for one in inputs})
    if len(lengths) > 1:
        raise ValueError(
            f"requests of one batch have one response length, got {lengths}: sample them apart."
        )
    given = np.stack([one.example.given for one in inputs])
    tokens = np.stack([one.example.response for one in inputs])
    return np.where(given[..., None], tokens, mask_id).astype(np.int32), given


def open_codes(
    state: SamplerState, now: Steps, mask_id: int
) -> tuple[Int[Array, "b w g"], Bool[Array, "b w g"], Bool[Array, "b w u"]]:
    """Returns the codes of the tokens to decode, where they are masked, and the candidates."""
    known = take(state.responses, jnp.maximum(now.decode, 0))
    masked = (known == mask_id) & (now.decode >= 0)[..., None]
    together = now.candidates.shape[-1] == 1
    any_masked = masked.any(axis=-1, keepdims=True) if together else masked
    return known, masked, any_masked & now.candidates


def ends_of(state: SamplerState, end: int) -> Bool[np.ndarray, "b l"]:
    """Returns where texts have an end-of-text that counts."""
    decoded = np.asarray(state.decoded_at) != NOT_DECODED
    may_end = np.arange(decoded.shape[1]) >= np.asarray(state.rows.ends_from)[:, None]
    return (np.asarray(state.responses)[..., 0] == end) & decoded & may_end


def has_ended(state: SamplerState, end: int) -> bool:
    """Whether every text has an end-of-text with everything before it decoded."""
    ended, decoded = ends_of(state, end), np.asarray(state.decoded_at) != NOT_DECODED
    first_end = np.where(ended.any(1), ended.argmax(1), ended.shape[1])
    before = np.arange(ended.shape[1])[None] < first_end[:, None]
    return bool(ended.any(1).all() and decoded[before].all())


def cut_at_end(state: SamplerState, end: int) -> Int[np.ndarray, "b l 1"]:
    """Returns the texts with nothing but end-of-text after the first one that counts.

    What follows it would depend on when the batch stopped.
    """
    responses = np.array(state.responses)
    responses[np.cumsum(ends_of(state, end), axis=1) > 0] = end
    return responses


Features = tuple[Float[Array, "1 v e"], ...]  # of the images of each request
Prompts = tuple[Prompt, ...]  # of all rows, or only for steps without a cache in several shapes


@persistent_jit(static=("settings", "capacity"), depends=attention)
def prefill(
    model: Denoiser,
    responses: Int[Array, "b l g"],
    decoded_at: Int[Array, "b l"],
    rows: Rows,
    prompt: Prompt,
    features: Features | None = None,
    *,
    settings: StepSettings,
    capacity: tuple[int, int],
) -> SamplerState:
    """Encodes the images and fills the cache with the prompt and the given tokens.

    Args:
        prompt: of all rows; without a cache, of any rows that contain the images.
        features: what `see` returned for the images, if they are encoded already.
        capacity: slots of the understanding and of the generation region.
    """
    seen, passes = _seen(model, prompt, features), jnp.int32(0)
    if not settings.uses_cache:
        return SamplerState(responses, decoded_at, rows, seen, None, passes)
    region = RESPONSE_STREAM[settings.modality]
    cache = model.empty_cache(prompt.length.shape[0], *capacity, region)
    if settings.caches_prompt:
        cache, seen = _written(model, prompt, seen, cache), None
        cache = cache.advance(padded_lengths(prompt)[STREAMS.index(region)])
    return SamplerState(responses, decoded_at, rows, seen, cache, passes)


@persistent_jit(depends=attention)
def see(model: Denoiser, pixels: SeenBatch) -> Features:
    """Returns the vision features of each request, as arrays of their own."""
    return tuple(jnp.split(model.see(pixels), len(pixels)))


@persistent_jit(static=("modality",), depends=attention)
def pass_prompt(
    model: Denoiser, prompt: Prompt, features: Features | None = None, *, modality: Modality
) -> KVCache:
    """Returns a cache that holds just the prompts of some rows, without spare slots.

    Args:
        features: see `prefill`.
    """
    cache = model.empty_cache(
        prompt.length.shape[0], *padded_lengths(prompt), RESPONSE_STREAM[modality]
    )
    return _written(model, prompt, _seen(model, prompt, features), cache)


@persistent_jit(depends=attention)
def draw_styles(
    model: Denoiser,
    prompt: Prompt,
    keys: Key[Array, " b"],
    has_style: Bool[AnyArray, " b"],
    fixed: Int[AnyArray, "b _n"],
) -> Float[Array, "b n c"]:
    """Returns a style code for each row, drawn from what its prompt leaves open.

    Args:
        prompt: of the rows that are not guided.
        keys: of their noise.
        has_style: which rows have a code; the others get zeros.
        fixed: as in `StyleCode.drawn`.
    """
    asked = queries(model.settings, prompt.length)
    hidden, _ = model.style_states(prompt.understanding, asked)
    return model.style_code.drawn(hidden, keys, jnp.asarray(fixed)) * has_style[:, None, None]


@persistent_jit(static=("lengths",))
def apart(passed: SamplerState | KVCache, *, lengths: tuple[int, int]) -> tuple[KVCache, ...]:
    """Returns a cache for each row that holds just its prompt, without spare slots.

    Args:
        lengths: slots of the prompt in the understanding and in the generation region.
    """
    cache = passed.cache if isinstance(passed, SamplerState) else passed
    assert cache is not None
    return tuple(cache.row(number, lengths) for number in range(cache.block.shape[0]))


@persistent_jit(static=("first", "modality", "capacity", "prompt_len"))
def gather(
    model: Denoiser,
    responses: Int[Array, "b l g"],
    decoded_at: Int[Array, "b l"],
    rows: Rows,
    parts: tuple[KVCache | tuple[KVCache, ...], ...],
    *,
    first: tuple[int, ...],
    modality: Modality,
    capacity: tuple[int, int],
    prompt_len: int,
) -> SamplerState:
    """Returns the state that `prefill` would, from caches of prompts, new or kept.

    Args:
        parts: whole, or as the caches of their rows.
        first: index of the first row of each of these caches.
        capacity: slots of the understanding and of the generation region.
        prompt_len: slots of the decoded stream's prompt in the longest part.
    """
    caches = [row for part in parts for row in (part if isinstance(part, tuple) else (part,))]
    cache = model.empty_cache(
        first[-1] + caches[-1].block.shape[0], *capacity, RESPONSE_STREAM[modality]
    )
    for row, own in zip(first, caches, strict=True):
        cache = cache.with_rows(row, own)
    cache = cache.advance(prompt_len)
    return SamplerState(responses, decoded_at, rows, None, cache, jnp.int32(0))


@persistent_jit(static=("copies",))
def forked(state: SamplerState, rows: Rows, *, copies: int) -> SamplerState:
    """Returns the state of a batch whose rows all go on from the only row of another one.

    Args:
        state: of one row, in all its guidance rows.
        rows: of the batch.
        copies: how many rows it has.
    """

    def copied(x, axis: int = 0):
        return None if x is None else jnp.repeat(x, copies, axis=axis)

    return dataclasses.replace(
        state,
        responses=copied(state.responses),
        decoded_at=copied(state.decoded_at),
        rows=dataclasses.replace(rows, style=copied(state.rows.style)),
        features=copied(state.features),
        cache=None if state.cache is None else state.cache.copied(copies),
    )


def prompt_bytes(model: config.Model, prompt: Prompt, modality: Modality) -> int:
    """Returns the bytes of the keys and values of a prompt, without spare slots."""
    slots = model.num_joint_layers * sum(padded_lengths(prompt))
    slots += (
        model.num_split_layers * padded_lengths(prompt)[STREAMS.index(RESPONSE_STREAM[modality])]
    )
    width = model.num_heads * model.head_dim * jnp.dtype(model.compute_dtype).itemsize
    return 2 * len(prompt.length) * slots * width


def _seen(
    model: Denoiser, prompt: Prompt, features: Features | None
) -> Float[Array, "b v e"] | None:
    """Returns the vision features of every request."""
    if features is not None:
        # A copy: steps overwrite their state, and these are for other requests too.
        return jnp.copy(jnp.concatenate(features))
    return None if prompt.pixels is None else model.see(prompt.pixels)


def _written(model: Denoiser, prompt: Prompt, features, cache: KVCache) -> KVCache:
    """Returns an empty cache filled with the keys and values of the prompts."""
    _, written = model(
        prompt.understanding,
        prompt.generation,
        None if features is None else repeat(features, len(prompt.length) // len(features)),
        wanted=cache.decodes,
        cache=cache,
        attend_cache=False,
    )
    assert written is not None
    return written


def capacity(
    prompt_len: tuple[int, int], phases: list[Steps], settings: StepSettings, multiple: int = 1
) -> tuple[tuple[int, int], list[int]]:
    """Returns the cache slots that a run needs: understanding and generation region.

    Never too few, because an update past the end of a buffer would silently shift and overwrite.

    Args:
        prompt_len: slots of the longest row of the prompt in the two streams.

    Returns:
        The slots of the two regions, whole multiples; and how many slots of the decoded stream's
        region each phase uses, with those before it.
    """
    lengths, own = [*prompt_len], STREAMS.index(RESPONSE_STREAM[settings.modality])
    used = _reaches(lengths[own], phases, settings)
    lengths[own] = max(used, default=lengths[own])
    text, image = (-(-length // multiple) * multiple for length in lengths)
    return (text, image), used


def _reaches(prompt_len: int, phases: list[Steps], settings: StepSettings) -> list[int]:
    found, committed = [], 0
    for phase in phases:
        kept = phase.clean.shape[-1] if settings.preset.cache_response else 0
        committed = len(phase.block) * kept + (0 if phase.refreshes else committed)
        found.append(prompt_len + committed - kept + phase.width)
    return found


def take(values: AnyArray, at: Int[Array, "b w"]) -> Array:
    """Returns the values of each row at some positions."""
    return jnp.take_along_axis(values, at.reshape(*at.shape, *[1] * (values.ndim - 2)), axis=1)


def repeat(values: Array, rows: int) -> Array:
    """Returns the values of a batch for each of its guidance rows."""
    return jnp.concatenate([values] * rows, axis=0) if rows > 1 else values
