# SPDX-License-Identifier: Apache-2.0
"""The state of a batch while it is sampled, its prefill, and what each step passes."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from sparse_lavida_jax import config
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.models.cache import KVCache, StreamName
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.stack import (
    STREAMS,
    StepTables,
    implementation_of,
    step_implementation_of,
)
from sparse_lavida_jax.programs.kept import kept
from sparse_lavida_jax.sampling import plans
from sparse_lavida_jax.sampling.presets import RowRequest, StepSettings, guidance_of
from sparse_lavida_jax.sampling.prompts import LaidOut, Prompt, cut_rows, padded_lengths
from sparse_lavida_jax.sequence import Kind, SeenBatch
from sparse_lavida_jax.tags import (
    NO_CELL,
    NO_FEATURE,
    AnyArray,
    Stream,
    concatenate,
    make_tags,
    without_blocks,
)
from sparse_lavida_jax.visibility import PAD_BLOCK

NOISE = {"text": 0, "layout": 1, "image": 2}  # so that kinds with one seed differ in noise
NOT_DECODED = PAD_BLOCK  # in `decoded_at`: no step has decoded the position yet


def attention(model: Denoiser, *_: Any, **__: Any) -> str:
    """Returns the implementations of attention and of steps that programs are traced with.

    They may be others after the device's kernels were checked again (`kernels.admission`).
    """
    return f"{implementation_of(model.settings)}, {step_implementation_of(model)}"


@flax.struct.dataclass
class Rows:
    """Values of each row, other than its prompt; none of them is compiled in.

    Attributes:
        key: noise depends on (key of the row, step, position) and on nothing else.
        temperature: 0 takes the most probable token or code.
        guidance, guidance_image: scales; read only if the settings have guidance rows.
        ends_from: for a text, the first position at which it may end.
    """

    key: Key[Array, " b"]
    temperature: Float[AnyArray, " b"]
    guidance: Float[AnyArray, " b"]
    guidance_image: Float[AnyArray, " b"]
    ends_from: Int[AnyArray, " b"]


def rows_of(laid: Sequence[LaidOut], settings: StepSettings, making: str = "") -> Rows:
    """Returns the values of the rows of a batch, from their requests.

    Args:
        making: a key of `NOISE`; "": the kind of the responses.
    """
    requests, edits = [one.request for one in laid], settings.guidance_rows == 3
    scales = [
        (one.temperature, guidance_of(one, has_source=edits), one.guidance_image)
        for one in requests
    ]
    temperature, guidance, guidance_image = np.array(scales, np.float32).T
    key = keys_from(requests, making or settings.kind, 0)
    ends = np.array([ends_from(one.example) for one in laid], np.int32)
    return Rows(key, temperature, guidance, guidance_image, ends)


def keys_from(requests: Sequence[RowRequest], making: str, step: int) -> Key[Array, " b"]:
    """Returns the keys of the rows' noise from a step on, until the next turn.

    Args:
        making: a key of `NOISE`.
    """
    seeds = [[seed for first, seed in one.seeds(making) if first <= step][-1] for one in requests]
    attempts = [one.attempt for one in requests]
    return _keys(np.array(seeds), np.array(attempts), making=NOISE[making])


@kept(static=("making",))
def _keys(seed: Int[Array, " b"], attempt: Int[Array, " b"], *, making: int) -> Key[Array, " b"]:
    def key(seed, attempt):
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), making), attempt)

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
        canvas: ids or codes, the mask id where nothing is decoded yet.
        decoded_at: the step that decoded each token, `GIVEN_BLOCK` if it was given,
            `NOT_DECODED` if it is masked.
        rows: seeds and scales.
        features: vision features of the prompt, for presets that pass the prompt again.
        cache: keys and values of all guidance rows; None if the preset caches nothing.
        passes: forward passes so far, not counting that of the prompt.
    """

    canvas: Int[Array, "b l g"]
    decoded_at: Int[Array, "b l"]
    rows: Rows
    features: Float[Array, "r v e"] | None
    cache: KVCache | None
    passes: Int[Array, ""]


@flax.struct.dataclass
class StepTokens:
    """What one step passes, as positions in the response; -1 is padding (see `plans.Phase`).

    Attributes:
        block: number of the step.
        clean: decoded tokens that are passed (again); they are stored if responses are cached.
        decode: tokens that this step predicts; some may be decoded already (text).
        candidates: which of their codes it may commit; one entry per token: all codes or none.
        rest: tokens that are passed but not predicted.
        count: how many candidates to commit.
        noise: scale of the noise on the confidence.
        temperature: share of the temperature.
        guidance: share of the guidance scales.
    """

    block: Int[AnyArray, "*n"]
    clean: Int[AnyArray, "*n b wc"]
    decode: Int[AnyArray, "*n b w"]
    candidates: Bool[AnyArray, "*n b w u"]
    rest: Int[AnyArray, "*n b wr"]
    count: Int[AnyArray, "*n b"]
    noise: Float[AnyArray, "*n"]
    temperature: Float[AnyArray, "*n"]
    guidance: Float[AnyArray, "*n"]

    @classmethod
    def of(cls, phase: plans.Phase) -> "StepTokens":
        """Returns the steps of a phase, along a first axis."""
        return cls(*(getattr(phase, field.name) for field in dataclasses.fields(cls)))


Features = tuple[Float[Array, "1 v e"], ...]  # of the images of each request


@kept(static=("settings", "capacity"), depends=attention)
def prefill(
    model: Denoiser,
    canvas: Int[Array, "b l g"],
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
        features: what `see` returned for the images, if they are encoded already.
        capacity: slots of the understanding and of the generation region.
    """
    seen, passes = _seen(model, prompt, features), jnp.int32(0)
    if not settings.uses_cache:
        return SamplerState(canvas, decoded_at, rows, seen, None, passes)
    region = decodes(settings.kind)
    cache = model.empty_cache(prompt.length.shape[0], *capacity, region)
    if settings.caches_prompt:
        cache, seen = _written(model, prompt, seen, cache), None
        cache = cache.commit(own_len(prompt, region))
    return SamplerState(canvas, decoded_at, rows, seen, cache, passes)


@kept(depends=attention)
def see(model: Denoiser, pixels: SeenBatch) -> Features:
    """Returns the vision features of each request, as arrays of their own."""
    return tuple(jnp.split(model.see(pixels), len(pixels)))


@kept(static=("kind",), depends=attention)
def pass_prompt(
    model: Denoiser, prompt: Prompt, features: Features | None = None, *, kind: Kind
) -> KVCache:
    """Returns a cache that holds just the prompts of some rows, without spare slots.

    Args:
        features: see `prefill`.
    """
    cache = model.empty_cache(prompt.length.shape[0], *padded_lengths(prompt), decodes(kind))
    return _written(model, prompt, _seen(model, prompt, features), cache)


@kept(static=("lengths",))
def apart(passed: SamplerState | KVCache, *, lengths: tuple[int, int]) -> tuple[KVCache, ...]:
    """Returns a cache for each row that holds just its prompt, without spare slots.

    Args:
        lengths: slots of the prompt in the understanding and in the generation region.
    """
    cache = passed.cache if isinstance(passed, SamplerState) else passed
    assert cache is not None
    return tuple(cache.row(number, lengths) for number in range(cache.block.shape[0]))


@kept(static=("first", "kind", "capacity", "prompt_len"))
def gather(
    model: Denoiser,
    canvas: Int[Array, "b l g"],
    decoded_at: Int[Array, "b l"],
    rows: Rows,
    parts: tuple[KVCache | tuple[KVCache, ...], ...],
    *,
    first: tuple[int, ...],
    kind: Kind,
    capacity: tuple[int, int],
    prompt_len: int,
) -> SamplerState:
    """Returns the state that `prefill` would, from parts of the batch passed one by one.

    Args:
        parts: whole, or as the caches of their rows.
        first: index of the first row of each of these caches.
        capacity: slots of the understanding and of the generation region.
        prompt_len: slots of the decoded stream's prompt in the longest part.
    """
    caches = [row for part in parts for row in (part if isinstance(part, tuple) else (part,))]
    cache = model.empty_cache(first[-1] + caches[-1].block.shape[0], *capacity, decodes(kind))
    for row, own in zip(first, caches, strict=True):
        cache = cache.with_rows(row, own)
    cache = cache.commit(prompt_len)
    return SamplerState(canvas, decoded_at, rows, None, cache, jnp.int32(0))


@kept(static=("copies",))
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
        canvas=copied(state.canvas),
        decoded_at=copied(state.decoded_at),
        rows=rows,
        features=copied(state.features),
        cache=None if state.cache is None else state.cache.copied(copies),
    )


def prompt_bytes(model: config.Model, prompt: Prompt, kind: Kind) -> int:
    """Returns the bytes of the keys and values of a prompt, without spare slots."""
    slots = model.num_joint_layers * sum(padded_lengths(prompt))
    slots += model.num_split_layers * own_len(prompt, decodes(kind))
    width = model.num_heads * model.head_dim * jnp.dtype(model.compute_dtype).itemsize
    return 2 * len(prompt.length) * slots * width


def decodes(kind: Kind) -> StreamName:
    """Returns the stream that holds a response of this kind."""
    return "understanding" if kind == "text" else "generation"


def own_len(prompt: Prompt, name: StreamName) -> int:
    """Returns the slots of a row in a stream of the prompt."""
    return padded_lengths(prompt)[STREAMS.index(name)]


def _seen(
    model: Denoiser, prompt: Prompt, features: Features | None
) -> Float[Array, "r v e"] | None:
    """Returns the vision features of every row; each image is encoded once."""
    if features is not None:
        # A copy: steps overwrite their state, and these are for other requests too.
        seen = jnp.copy(jnp.concatenate(features))
    elif prompt.pixels is not None:
        seen = model.see(prompt.pixels)
    else:
        return None
    return repeat(seen, len(prompt.length) // len(seen))


def _written(model: Denoiser, prompt: Prompt, features, cache: KVCache) -> KVCache:
    """Returns an empty cache filled with the keys and values of the prompts."""
    _, written = model(
        prompt.understanding,
        prompt.generation,
        features,
        wanted=cache.decodes,
        cache=cache,
        attend_cache=False,
    )
    assert written is not None
    return written


def capacity(
    prompt: Prompt, phases: list[plans.Phase], settings: StepSettings, multiple: int = 1
) -> tuple[int, int]:
    """Returns the cache slots that a run needs: understanding and generation region.

    Never too few, because an update past the end of a buffer would silently shift and overwrite.
    """
    lengths = dict(zip(("text", "image"), padded_lengths(prompt), strict=True))
    lengths[settings.kind] = max(reaches(prompt, phases, settings), default=lengths[settings.kind])
    text, image = (-(-lengths[kind] // multiple) * multiple for kind in ("text", "image"))
    return text, image


def reaches(prompt: Prompt, phases: list[plans.Phase], settings: StepSettings) -> list[int]:
    """Returns how many slots of the decoded stream each phase uses, and those before it."""
    found, own, committed = [], own_len(prompt, decodes(settings.kind)), 0
    for s in phases:
        registers = num_registers(s, settings)
        committed = 0 if s.refresh[0] else committed
        clean, others = s.clean.shape[-1], s.decode.shape[-1] + s.rest.shape[-1]
        kept = clean if settings.preset.cache_response else 0
        committed += len(s.block) * kept
        found.append(own + committed - kept + clean + others + registers)
    return found


def num_registers(phase: plans.Phase, settings: StepSettings) -> int:
    """Returns how many registers the steps of a phase pass."""
    asked = int(phase.registers[0])
    return settings.num_registers if asked < 0 else asked


def take(values: AnyArray, at: Int[Array, "b w"]) -> Array:
    """Returns the values of each row at some positions."""
    return jnp.take_along_axis(values, at.reshape(*at.shape, *[1] * (values.ndim - 2)), axis=1)


def repeat(values: Array, rows: int) -> Array:
    """Returns the values of a batch for each of its guidance rows."""
    return jnp.concatenate([values] * rows, axis=0) if rows > 1 else values


def step_hidden(
    model: Denoiser,
    state: SamplerState,
    now: StepTokens,
    prompt: Prompt,
    settings: StepSettings,
    tables: StepTables | None,
) -> tuple[Float[Array, "r b w e"], KVCache | None]:
    """Returns the final hidden states of the tokens to decode, and the updated cache."""
    if settings.uses_cache:
        return _pass(model, state, now, prompt, settings, tables)
    # A step without guidance passes only the full rows, which are last.
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
    """Passes guidance rows whose prompts have one shape; returns the same as `step_hidden`."""
    is_text, preset_ = settings.kind == "text", settings.preset
    cache, features = state.cache, state.features
    if cache is not None:
        cache = dataclasses.replace(cache, reach=settings.reach)
        if settings.refreshing:
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
        cache = dataclasses.replace(cache, reach=None)
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
    tags = make_tags(position, block, now.block - 1)
    if settings.preset.full_attention:
        tags = without_blocks(tags)
    return Stream(tokens[..., 0] if is_text else tokens, index, tags)


def _prompt_again(prompt: Prompt, settings: StepSettings) -> dict[str, Stream | None]:
    """The prompt's streams, if this preset passes them in every step."""
    streams = {"understanding": prompt.understanding, "generation": prompt.generation}
    if settings.preset.cache_prompt and not settings.refreshing:
        return dict.fromkeys(streams)
    if settings.preset.full_attention:
        streams = {
            name: s if s is None else s.replace(tags=without_blocks(s.tags))
            for name, s in streams.items()
        }
    return streams


def _join(response: Stream, prompt: Stream | None, clean_len: int) -> Stream:
    """[clean | prompt | others]: committed tokens come first, so that they stay contiguous."""
    if prompt is None:
        return response
    first, second = (
        jax.tree.map(lambda x, s=s: x[:, s], response)
        for s in (slice(None, clean_len), slice(clean_len, None))
    )
    return concatenate(first, prompt, second)
