# SPDX-License-Identifier: Apache-2.0
"""The sampler: prefill once, then one jitted loop a segment (paper Sec. 3.2).

A host-side plan (`sampling/plans.py`) says which positions a step passes; consecutive steps of one
width form a segment, and a segment is one compiled program: `lax.fori_loop` over `step`. Nothing
returns to Python inside a segment and no shape changes. Image and text, every preset and every
ablation row run this same `step`; which tokens the plan passes and which are committed is data
(`sampling/presets.py`).

A plan decodes whole cells, or single codes of cells that are then known in part: what is masked
is what the canvas holds the mask id for, and a token is decoded when all its codes are.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from sparse_lavida_jax import config
from sparse_lavida_jax.kernels import sharded
from sparse_lavida_jax.kernels.attention import slot_multiple
from sparse_lavida_jax.layout import (
    GIVEN_BLOCK,
    NO_CELL,
    NO_FEATURE,
    AnyArray,
    Stream,
    TokenLayout,
    concatenate,
    make_layout,
    without_blocks,
)
from sparse_lavida_jax.models import text_head
from sparse_lavida_jax.models.cache import KVCache, StreamName
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.stack import STREAMS, StepTables
from sparse_lavida_jax.sampling import choose, plans
from sparse_lavida_jax.sampling.prefixes import Prefixes
from sparse_lavida_jax.sampling.presets import Choice, StepSettings, num_registers
from sparse_lavida_jax.sampling.prompts import (
    Prompt,
    PromptPart,
    Request,
    cut_rows,
    guidance_shapes,
    padded_lengths,
    parted,
    prepare,
)
from sparse_lavida_jax.sequence import Kind
from sparse_lavida_jax.visibility import PAD_BLOCK

NOT_DECODED = PAD_BLOCK  # in `decoded_at`: no step has decoded the position yet
RANKING = 2**31 - 1  # keys the noise on confidences apart from that of the draws; no block is this

# Steps of one width are run by programs of so many steps, so that requests of any number of steps
# share them. Programs of small models on CPUs compile sooner whole.
TRIPS = (16, 8, 4, 2, 1)

AVERAGED = ("no_source", "no_image")  # rows that the full one is averaged with (spec Sec. 7.2)


@flax.struct.dataclass
class Rows:
    """What every row has of its own besides its prompt; none of it is compiled in.

    Attributes:
        key: noise depends on (key of the row, step, position) and on nothing else.
        temperature: 0 takes the most probable.
        guidance, guidance_image: scales; read where the settings have guidance rows.
    """

    key: Key[Array, " b"]
    temperature: Float[AnyArray, " b"]
    guidance: Float[AnyArray, " b"]
    guidance_image: Float[AnyArray, " b"]


def rows_of(requests: list[Request], settings: StepSettings) -> Rows:
    """Returns what the requests say of themselves, and the settings where they do not."""

    def own(name: str) -> np.ndarray:
        values = (getattr(request, name) for request in requests)
        default = getattr(settings, name)
        return np.array([default if value is None else value for value in values], np.float32)

    key = jax.vmap(jax.random.key)(np.array([request.seed for request in requests]))
    return Rows(key, own("temperature"), own("guidance"), own("guidance_image"))


@flax.struct.dataclass
class SamplerState:
    """A batch of responses on the way from all masks to clean.

    Attributes:
        canvas: ids or codes, the mask id where nothing is decoded.
        decoded_at: the step that decoded each token, `GIVEN_BLOCK` if it was given,
            `NOT_DECODED` if it is masked.
        rows: seeds and scales.
        features: vision features of the prompt, for presets that pass the prompt again.
        cache: keys and values, all guidance rows; None where the preset caches nothing.
        passes: forward passes so far, without the prompt's own.
    """

    canvas: Int[Array, "b l g"]
    decoded_at: Int[Array, "b l"]
    rows: Rows
    features: Float[Array, "r v e"] | None
    cache: KVCache | None
    passes: Int[Array, ""]


@flax.struct.dataclass
class StepTokens:
    """What one step passes; positions in the response, -1 pads (see `plans.Segment`).

    Attributes:
        block: number of the step.
        clean: decoded tokens that are passed (again); they are stored if responses are cached.
        decode: tokens that this step predicts; some may be decoded already (text).
        candidates: which of their codes it may commit; one entry a token: all or none of them.
        rest: tokens that are passed but not predicted.
        count: how many candidates to commit.
        noise: scale of the noise on the confidence.
        temperature: share of the temperature.
        guidance: share of the guidance scales.
    """

    block: Int[Array, "*n"]
    clean: Int[Array, "*n b wc"]
    decode: Int[Array, "*n b w"]
    candidates: Bool[Array, "*n b w u"]
    rest: Int[Array, "*n b wr"]
    count: Int[Array, "*n b"]
    noise: Float[Array, "*n"]
    temperature: Float[Array, "*n"]
    guidance: Float[Array, "*n"]


@flax.struct.dataclass
class Draws:
    """Random numbers recorded elsewhere, used in place of our own; None: our own.

    Attributes:
        codes: what is drawn for each code in each step, wherever it is masked.
        noise: Gumbel noise that decides what is drawn (`choose.gumbel`); the temperature is that
            of the settings.
        confidence: Gumbel noise on the confidence; the confidence itself where it is "random".
            One entry a candidate.
    """

    codes: Int[AnyArray, "*n b l g"] | None = None
    noise: Float[AnyArray, "*n b l g v"] | None = None
    confidence: Float[AnyArray, "*n b l u"] | None = None


def policy_of(choice: Choice) -> choose.Policy:
    """Returns the function that chooses what is committed."""
    policy = {
        "all": choose.commit_all,
        "count": choose.commit_most_confident,
        "threshold": functools.partial(choose.commit_above, threshold=choice.level),
        "factor": functools.partial(
            choose.commit_by_factor, factor=choice.level, released=choice.released
        ),
        "entropy": functools.partial(choose.commit_within_entropy, bound=choice.level),
    }[choice.commit]
    return choose.at_most(policy, choice.most) if choice.most else policy


def step(
    model: Denoiser,
    state: SamplerState,
    now: StepTokens,
    prompt: Prompt,
    *,
    policy: choose.Policy,
    settings: StepSettings,
    draws: Draws | None = None,
    tables: StepTables | None = None,
) -> SamplerState:
    """One denoising step: passes the tokens of `now`, draws the candidates, commits some.

    The body of the segment loop, for image and text and for every preset.

    Args:
        tables: of attention, where they were made before the loop (`_tables_ahead`).
    """
    draws = draws or Draws()
    how = settings.choice.confidence
    if settings.head_tile and draws.codes is None and draws.noise is None:
        hidden, cache = _step_hidden(model, state, now, prompt, settings, tables)
        by_tiles = _draw_by_tiles(model, hidden, state.rows, now, settings)
        drawn = by_tiles.token[..., None]

        def sure():
            return by_tiles.confidence(how)[..., None]
    else:
        logits, cache = step_logits(model, state, now, prompt, settings, tables)
        logits = _allowed(logits, model.settings, settings)
        drawn = _draw(state.rows, now, logits, draws, settings)

        def sure():
            return choose.confidence(how, logits, drawn)

    mask_id = _mask_id(model.settings, settings.kind)
    known, masked, candidate = _open(state, now, mask_id)
    confidence = _confidence(state.rows.key, now, sure, settings.choice, draws)
    commit = masked & policy(confidence, candidate, now.count)
    codes = jnp.where(commit, drawn, known)
    changed = commit.any(axis=-1)
    finished = changed & (codes != mask_id).all(axis=-1)
    # Positions outside the response are dropped by the scatter.
    outside = state.canvas.shape[1]
    rows = jnp.arange(codes.shape[0])[:, None]
    at, done = (jnp.where(where, now.decode, outside) for where in (changed, finished))
    return dataclasses.replace(
        state,
        canvas=state.canvas.at[rows, at].set(codes, mode="drop"),
        decoded_at=state.decoded_at.at[rows, done].set(now.block, mode="drop"),
        cache=cache,
        passes=state.passes + 1,
    )


def _mask_id(model: config.Model, kind: Kind) -> int:
    return model.text_mask_id if kind == "text" else model.image_mask_id


def _open(
    state: SamplerState, now: StepTokens, mask_id: int
) -> tuple[Int[Array, "b w g"], Bool[Array, "b w g"], Bool[Array, "b w u"]]:
    """Returns the codes of the tokens to decode, which are masked, and the candidates."""
    known = _take(state.canvas, jnp.maximum(now.decode, 0))
    masked = (now.decode >= 0)[..., None] & (known == mask_id)
    together = now.candidates.shape[-1] == 1
    any_masked = masked.any(axis=-1, keepdims=True) if together else masked
    return known, masked, now.candidates & any_masked


def step_logits(
    model: Denoiser,
    state: SamplerState,
    now: StepTokens,
    prompt: Prompt,
    settings: StepSettings,
    tables: StepTables | None = None,
) -> tuple[Float[Array, "b w g v"], KVCache | None]:
    """Returns guided logits of the tokens to decode, float32, and the cache behind this step."""
    hidden, cache = _step_hidden(model, state, now, prompt, settings, tables)
    candidates = hidden.reshape(-1, *hidden.shape[2:])
    if settings.kind == "text":
        logits = model.text_logits(candidates)[:, :, None]
    else:
        logits = model.image_logits(candidates)
    logits = logits.reshape(*hidden.shape[:2], *logits.shape[1:])
    return _guide(logits, settings, state.rows, now.guidance), cache


def _step_hidden(
    model: Denoiser,
    state: SamplerState,
    now: StepTokens,
    prompt: Prompt,
    settings: StepSettings,
    tables: StepTables | None,
) -> tuple[Float[Array, "r b w e"], KVCache | None]:
    """Returns the final hidden states of the tokens to decode, and the cache behind this step."""
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
    """Passes guidance rows whose prompts have one shape; returns what `_step_hidden` does."""
    is_text, preset_ = settings.kind == "text", settings.preset
    cache, features = state.cache, state.features
    if settings.refreshing and cache is not None:
        cache = dataclasses.replace(cache, offset=jnp.int32(0))
    rows = settings.guidance_rows
    response = _response_stream(model.settings, state, now, prompt, settings)
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
        wanted="both" if settings.discards else "understanding" if is_text else "generation",
        cache=cache,
        tables=tables,
    )
    unread = _unread(model, hidden) if settings.discards else 0.0
    if cache is not None:
        cache = cache.commit(before if settings.refreshing else kept)
    candidates = hidden["understanding" if is_text else "generation"]
    candidates = candidates[:, before : before + decode_len]
    if settings.discards:
        candidates += jnp.asarray(unread, candidates.dtype)
    return candidates.reshape(rows, -1, *candidates.shape[1:]), cache


def _unread(model: Denoiser, hidden: dict[StreamName, Float[Array, "r _s _e"]]) -> Float[Array, ""]:
    """Returns 0 by way of the text head over all tokens of a pass, as released (spec Sec. 2.4)."""
    width = model.settings.width
    wide = [jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1]))) for x in hidden.values()]
    # The compiler drops what nothing depends on, but may not know that 0 times it is 0.
    return 0.0 * jnp.max(model.text_logits(jnp.concatenate(wide, axis=1)))


def _response_stream(
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
    tokens = _take(state.canvas, at)
    decoded_at = _take(state.decoded_at, at)
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
        _repeat(x, settings.guidance_rows) for x in (tokens, index, block, at)
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


def _guide(
    logits: Float[Array, "r b *w v"],
    settings: StepSettings,
    rows: Rows,
    share: Float[Array, ""],
) -> Float[Array, "b *w v"]:
    """Classifier-free guidance over the leading axis (spec Sec. 7.2: (1+g) cond - g uncond)."""
    full = logits[-1]
    if not settings.guided:
        return full
    if settings.guidance_rows == 3:
        g = _of_row(rows.guidance_image, full) * share
        if settings.edit_guidance in AVERAGED:
            full = (full + g * logits[1]) / (1 + g)
        else:
            full = (1 + g) * full - g * logits[1]
    if settings.guidance_rows > 1:
        g = _of_row(rows.guidance, full) * share
        full = (1 + g) * full - g * logits[0]
    return full


def _of_row(values: Float[AnyArray, " b"], like: Array) -> Array:
    """A number of each row, to go with arrays [b ...]."""
    return jnp.asarray(values).reshape(-1, *[1] * (like.ndim - 1))


def _allowed(
    logits: Float[Array, "b w g v"], model: config.Model, settings: StepSettings
) -> Float[Array, "b w g v"]:
    """Returns logits with -inf for what may not be drawn: text never becomes a mask again."""
    if settings.kind == "text" and not settings.released:
        logits = logits.at[..., model.text_mask_id].set(-jnp.inf)
    return choose.filtered(logits, settings.top_k, settings.top_p)


def _draw(
    rows: Rows,
    now: StepTokens,
    logits: Float[Array, "b w g v"],
    draws: Draws,
    settings: StepSettings,
) -> Int[Array, "b w g"]:
    """Draws each code independently; at temperature 0 takes the most probable."""
    at = jnp.maximum(now.decode, 0)
    if draws.codes is not None:
        return _take(draws.codes, at)
    if settings.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if draws.noise is not None:
        noise = _take(draws.noise, at)
    else:
        noise = _noise(rows.key, now, logits.shape[2:])
    return jnp.argmax(_scores(rows, now, logits, noise), axis=-1).astype(jnp.int32)


def _scores(
    rows: Rows, now: StepTokens, logits: Float[Array, "b *w v"], noise: Float[Array, "b *w v"]
) -> Float[Array, "b *w v"]:
    """The largest is drawn: Gumbel-max, or the most probable where the row's temperature is 0."""
    temperature = _of_row(rows.temperature, logits)
    drawn = logits / jnp.where(temperature > 0, temperature, 1) / now.temperature + noise
    return jnp.where(temperature > 0, drawn, logits)


def _draw_by_tiles(
    model: Denoiser,
    hidden: Float[Array, "r b w e"],
    rows: Rows,
    now: StepTokens,
    settings: StepSettings,
) -> text_head.Drawn:
    """Draws text as `_draw` does from `_allowed` logits, of which only a tile exists at a time."""

    def logits_of(hidden, columns, start):
        hidden = hidden.astype(model.settings.compute_dtype)
        logits = (hidden @ columns.astype(hidden.dtype)).astype(jnp.float32)
        logits = _guide(logits, settings, rows, now.guidance)
        if settings.released:
            return logits
        banned = start + jnp.arange(logits.shape[-1]) == model.settings.text_mask_id
        return jnp.where(banned[None, None], -jnp.inf, logits)

    def score_of(logits, number):
        if settings.temperature == 0:
            return logits
        noise = _noise(rows.key, now, (settings.head_tile,), number)[..., : logits.shape[-1]]
        return _scores(rows, now, logits, noise)

    return text_head.draw(
        hidden, model.text_kernel, logits_of=logits_of, score_of=score_of, tile=settings.head_tile
    )


def _noise(
    row_key: Key[Array, " b"],
    now: StepTokens,
    shape: tuple[int, ...],
    tile: Int[Array, ""] | int | None = None,
) -> Array:
    """Gumbel noise of each token to decode: depends on (row, step, position) and nothing else.

    Args:
        tile: of the vocabulary, where that is drawn from by tiles.
    """

    def noise_at(key, position):
        key = jax.random.fold_in(jax.random.fold_in(key, now.block), position)
        return jax.random.gumbel(key if tile is None else jax.random.fold_in(key, tile), shape)

    return jax.vmap(jax.vmap(noise_at, in_axes=(None, 0)))(row_key, now.decode)


def _confidence(
    row_key: Key[Array, " b"],
    now: StepTokens,
    sure: Callable[[], Float[Array, "b w g"]],
    choice: Choice,
    draws: Draws,
) -> Float[Array, "b w u"]:
    """How sure the model is of each candidate: of a whole token, as of its least sure code.

    Args:
        sure: how sure it is of each code.
    """
    shape, is_random = now.candidates.shape, choice.confidence == "random"
    noise = jnp.zeros(shape)
    if choice.commit == "all":
        return noise
    if draws.confidence is not None:
        noise = _take(draws.confidence, jnp.maximum(now.decode, 0))
    elif choice.noisy or is_random:
        apart = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_key, RANKING)
        noise = _noise(apart, now, shape[2:])
        noise = jnp.exp(-jnp.exp(-noise)) if is_random else noise  # uniform in [0, 1]
    if is_random:
        return noise
    confidence = sure()
    if shape[-1] == 1:
        confidence = confidence.min(axis=-1, keepdims=True)
    return choose.with_noise(confidence, noise, now.noise) if choice.noisy else confidence


def _take(values: AnyArray, at: Int[Array, "b w"]) -> Array:
    return jnp.take_along_axis(values, at.reshape(*at.shape, *[1] * (values.ndim - 2)), axis=1)


def _repeat(values: Array, rows: int) -> Array:
    return jnp.concatenate([values] * rows, axis=0) if rows > 1 else values


# ---------------------------------------------------------------------------------------------
# Compiled programs.


@dataclasses.dataclass(frozen=True)
class Progress:
    """A batch before its first step, or between two segments.

    Attributes:
        making: what is made: "layout", "image" or "text".
        steps, total: forward passes that are done, and all of the plan.
        canvas: the responses; `mask_id` where nothing is decoded yet.
        decoded_at: the block that decoded each token (`SamplerState`).
        blocks: of the segment that has ended; none before the first step.
    """

    making: str
    steps: int
    total: int
    canvas: Int[np.ndarray, "b l g"]
    decoded_at: Int[np.ndarray, "b l"]
    blocks: range
    mask_id: int

    def after(self, block: int) -> Int[np.ndarray, "b l g"]:
        """Returns the canvas as it was after a block, whole tokens at a time."""
        later = self.decoded_at > block
        return np.where(later[..., None], self.mask_id, self.canvas)


Callback = Callable[[Progress], None]


@functools.partial(jax.jit, static_argnames=("settings", "capacity"))
def prefill(
    model: Denoiser,
    canvas: Int[Array, "b l g"],
    decoded_at: Int[Array, "b l"],
    rows: Rows,
    prompt: Prompt,
    *,
    settings: StepSettings,
    capacity: tuple[int, int],
) -> SamplerState:
    """Encodes the images and fills the cache with prompt and given tokens.

    Args:
        capacity: slots of the understanding and of the generation region.
    """
    features, passes = _see(model, prompt), jnp.int32(0)
    if not settings.uses_cache:
        return SamplerState(canvas, decoded_at, rows, features, None, passes)
    decodes = _decodes(settings.kind)
    cache = model.empty_cache(prompt.length.shape[0], *capacity, decodes)
    if settings.caches_prompt:
        cache, features = _written(model, prompt, features, cache), None
        cache = cache.commit(_own_len(prompt, decodes))
    return SamplerState(canvas, decoded_at, rows, features, cache, passes)


@functools.partial(jax.jit, static_argnames=("kind",))
def pass_prompt(model: Denoiser, prompt: Prompt, *, kind: Kind) -> KVCache:
    """Returns a cache of the prompts of some rows, without a slot more."""
    text, image = (_own_len(prompt, name) for name in STREAMS)
    cache = model.empty_cache(prompt.length.shape[0], text, image, _decodes(kind))
    return _written(model, prompt, _see(model, prompt), cache)


@functools.partial(jax.jit, static_argnames=("first", "kind", "capacity", "prompt_len"))
def gather(
    model: Denoiser,
    canvas: Int[Array, "b l g"],
    decoded_at: Int[Array, "b l"],
    rows: Rows,
    parts: tuple[KVCache, ...],
    *,
    first: tuple[int, ...],
    kind: Kind,
    capacity: tuple[int, int],
    prompt_len: int,
) -> SamplerState:
    """Returns what `prefill` does, from parts of the batch that were passed one by one.

    Args:
        first: row of each part.
        capacity: slots of the understanding and of the generation region.
        prompt_len: slots of the decoded stream's prompt in the longest part.
    """
    number = first[-1] + parts[-1].block.shape[0]
    cache = model.empty_cache(number, *capacity, _decodes(kind))
    for row, part in zip(first, parts, strict=True):
        cache = cache.with_rows(row, part)
    cache = cache.commit(prompt_len)
    return SamplerState(canvas, decoded_at, rows, None, cache, jnp.int32(0))


def _decodes(kind: Kind) -> StreamName:
    return "understanding" if kind == "text" else "generation"


def _own_len(prompt: Prompt, name: StreamName) -> int:
    stream = prompt.understanding if name == "understanding" else prompt.generation
    return 0 if stream is None else stream.index.shape[1]


def _see(model: Denoiser, prompt: Prompt) -> Float[Array, "r v e"] | None:
    """Returns the vision features of every row; each image is seen once."""
    if prompt.pixels is None:
        return None
    return _repeat(model.see(prompt.pixels), len(prompt.length) // len(prompt.pixels))


def _written(model: Denoiser, prompt: Prompt, features, cache: KVCache) -> KVCache:
    """Returns a cache that was empty with the keys and values of the prompts."""
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


@functools.partial(jax.jit, static_argnames=("settings",), donate_argnames=("state",))
def run_segment(
    model: Denoiser,
    state: SamplerState,
    segment: StepTokens,
    prompt: Prompt,
    *,
    settings: StepSettings,
    draws: Draws | None = None,
) -> SamplerState:
    """Runs the steps of one segment, all of one width, in one compiled loop.

    It ends early where nothing is left to decode, which only some choices can bring about.
    """
    policy = policy_of(settings.choice)
    num_steps = segment.block.shape[0]
    ahead = _tables_ahead(model, state, segment, prompt, settings)

    def body(i, state):
        now, drawn, tables = jax.tree.map(lambda x: x[i], (segment, draws, ahead))
        how = {"policy": policy, "settings": settings, "draws": drawn, "tables": tables}
        return step(model, state, now, prompt, **how)

    if not settings.choice.ends_early:
        return jax.lax.fori_loop(0, num_steps, body, state)

    def goes_on(carry):
        i, state = carry
        now = jax.tree.map(lambda x: x[jnp.minimum(i, num_steps - 1)], segment)
        *_, candidate = _open(state, now, _mask_id(model.settings, settings.kind))
        return (i < num_steps) & candidate.any()

    return jax.lax.while_loop(goes_on, lambda c: (c[0] + 1, body(*c)), (jnp.int32(0), state))[1]


def _tables_ahead(
    model: Denoiser,
    state: SamplerState,
    segment: StepTokens,
    prompt: Prompt,
    settings: StepSettings,
) -> StepTables | None:
    """Returns the tables of attention of every step, a first axis counting steps.

    None where a step makes its own: who decodes when depends on what was drawn, the prompt is
    passed again, or devices share the work. Nothing at all is made for the reference.
    """
    cache, whole = state.cache, segment.candidates.shape[-1] == 1
    known = settings.kind == "image" and settings.choice.commit == "all" and whole
    alone = settings.preset.cache_prompt and not settings.refreshing and not settings.discards
    possible = settings.tables_ahead and known and alone
    if cache is None or not possible or sharded.split_of(*cache.block.shape) is not None:
        return None
    # When each token is decoded, by this segment or before it.
    candidates = segment.candidates[..., 0] & (segment.decode >= 0)
    at = jnp.where(candidates, segment.decode, state.decoded_at.shape[1])
    rows = jnp.arange(at.shape[1])[None, :, None]
    decoded_at = state.decoded_at.at[rows, at].set(segment.block[:, None, None], mode="drop")

    def tags_of(now: StepTokens) -> tuple[AnyArray, ...]:
        until_now = jnp.where(decoded_at > now.block, NOT_DECODED, decoded_at)
        before = dataclasses.replace(state, decoded_at=until_now)
        layout = _response_stream(model.settings, before, now, prompt, settings).layout
        return layout.position, layout.block, layout.horizon

    tags = jax.vmap(tags_of)(segment)
    kept = segment.clean.shape[-1] if settings.preset.cache_response else 0
    clean = jnp.moveaxis(tags[1][:, :, :kept], 0, 1)
    stored = cache.begin(cache.decodes, clean.reshape(clean.shape[0], -1)) if kept else cache

    def tables_of(i, *tags) -> StepTables:
        return model.step_tables(TokenLayout(*tags), stored.commit(i * kept))

    return jax.vmap(tables_of)(jnp.arange(segment.block.shape[0]), *tags)


def sample(
    model: Denoiser,
    requests: list[Request],
    segments: list[plans.Segment],
    *,
    settings: StepSettings,
    prompt_len: tuple[int, int] = (0, 0),
    stop_early: bool = True,
    callback: Callback | None = None,
    making: str = "",
    draws: Draws | None = None,
    in_trips: bool | None = None,
    prefixes: Prefixes | None = None,
) -> Int[np.ndarray, "b l g"]:
    """Decodes a batch of requests of one kind and one response length.

    Args:
        segments: the plan (`plan`), a row for each request.
        prompt_len: least padded prompt lengths (`prepare`).
        stop_early: for text, leave out segments once every row holds an end-of-text with
            everything before it decoded (never with `settings.released`).
        callback: called before the first step and after each segment.
        making: what it is told.
        draws: recorded random numbers of every step of the plan.
        in_trips: whether a segment is run by programs of `TRIPS` steps; by default not on CPUs.
        prefixes: where what requests share is kept (`sampling/prefixes.py`), of this very model.

    Returns:
        The responses.

    Raises:
        ValueError: the requests differ in response length, or the plan is for another batch.
    """
    ends = settings.kind == "text" and not settings.released
    total = sum(segment.num_steps for segment in segments)

    def tell(steps: int, canvas, decoded_at, blocks: range) -> None:
        if callback is not None:
            canvas, decoded_at = np.asarray(canvas), np.asarray(decoded_at)
            callback(Progress(making, steps, total, canvas, decoded_at, blocks, mask_id))

    mask_id = _mask_id(model.settings, settings.kind)
    canvas, given = _begun_canvas(requests, mask_id)
    tell(0, canvas, np.where(given, GIVEN_BLOCK, NOT_DECODED), range(0))
    begun = begin(
        model, requests, segments, settings=settings, prompt_len=prompt_len, prefixes=prefixes
    )
    state = begun.state
    if state is None:  # everything is given
        return begun.canvas
    start = 0
    for segment in segments:
        own = slice(start, start + segment.num_steps)
        recorded = None if draws is None else jax.tree.map(lambda x, own=own: x[own], draws)
        state = advance(model, begun, state, segment, draws=recorded, in_trips=in_trips)
        start = own.stop
        blocks = range(int(segment.block[0]), int(segment.block[-1]) + 1)
        tell(int(state.passes), state.canvas, state.decoded_at, blocks)
        if stop_early and ends:
            decoded = np.asarray(state.decoded_at) != NOT_DECODED
            ended = (np.asarray(state.canvas)[..., 0] == model.settings.end_of_text_id) & decoded
            first_end = np.where(ended.any(1), ended.argmax(1), ended.shape[1])
            before = np.arange(ended.shape[1])[None] < first_end[:, None]
            if ended.any(1).all() and decoded[before].all():
                break
    canvas = np.array(state.canvas)
    if ends:
        # What stands behind the first end-of-text would depend on when the batch stopped.
        ended = np.cumsum(canvas[..., 0] == model.settings.end_of_text_id, axis=1) > 0
        canvas[ended & ~begun.given] = model.settings.end_of_text_id
    return canvas


@dataclasses.dataclass(frozen=True)
class Begun:
    """A batch behind its prefill.

    Attributes:
        canvas: the responses at first, on the host.
        given: known tokens.
        prompt: on the device.
        program: what chooses the compiled programs.
        state: None where nothing is left to decode.
    """

    canvas: Int[np.ndarray, "b l g"]
    given: Bool[np.ndarray, "b l"]
    prompt: Prompt | None
    program: StepSettings
    state: SamplerState | None


def begin(
    model: Denoiser,
    requests: list[Request],
    segments: list[plans.Segment],
    *,
    settings: StepSettings,
    prompt_len: tuple[int, int] = (0, 0),
    prefixes: Prefixes | None = None,
) -> Begun:
    """Lays a batch out and passes its prompts (`sample`)."""
    model_settings = model.settings
    mask_id = _mask_id(model_settings, settings.kind)
    lengths = sorted({len(request.given) for request in requests})
    if len(lengths) > 1:
        raise ValueError(
            f"requests of one batch have one response length, got {lengths}: sample them apart."
        )
    canvas, given = _begun_canvas(requests, mask_id)
    if segments and segments[0].decode.shape[1] != len(requests):
        raise ValueError(
            f"the plan is for {segments[0].decode.shape[1]} rows, got {len(requests)} requests."
        )
    rows = rows_of(requests, settings)
    program = settings.program(greedy=not np.any(rows.temperature))
    if not segments:
        return Begun(canvas, given, None, program, None)
    decoded_at = np.where(given, GIVEN_BLOCK, NOT_DECODED).astype(np.int32)
    prompt = prepare(
        requests,
        settings.kind,
        model_settings,
        settings.guidance_rows,
        prompt_len,
        edit_guidance=settings.edit_guidance,
        with_given=not settings.preset.passes_given,
    )
    on_device, rows = jax.tree.map(jnp.asarray, (prompt, rows))
    room = capacity(
        prompt, segments, settings, slot_multiple(model_settings.attention_implementation or None)
    )
    with sharded.mesh_in_use(model):
        parts = []
        # Over a mesh rows are split: parts of a few would not be.
        if jax.sharding.get_abstract_mesh().empty:
            if settings.caches_prompt:
                keeping = prefixes is not None
                parts = parted(prompt, settings.guidance_rows, keeping=keeping)
            elif not settings.uses_cache:
                shapes = guidance_shapes(prompt, settings.guidance_rows)
                program = dataclasses.replace(program, shapes=shapes)
        if len(parts) <= 1:
            state = prefill(
                model, canvas, decoded_at, rows, on_device, settings=program, capacity=room
            )
        else:
            state = gather(
                model,
                canvas,
                decoded_at,
                rows,
                _passed(model, parts, settings.kind, prefixes),
                first=tuple(part.first for part in parts),
                kind=settings.kind,
                capacity=room,
                prompt_len=_own_len(prompt, _decodes(settings.kind)),
            )
    return Begun(canvas, given, on_device, program, state)


def _begun_canvas(
    requests: list[Request], mask_id: int
) -> tuple[Int[np.ndarray, "b l g"], Bool[np.ndarray, "b l"]]:
    """Returns the responses at first, and which of their tokens are known."""
    given = np.stack([request.given for request in requests])
    tokens = np.stack([request.tokens for request in requests])
    return np.where(given[..., None], tokens, mask_id).astype(np.int32), given


def _passed(
    model: Denoiser, parts: list[PromptPart], kind: Kind, prefixes: Prefixes | None
) -> tuple[KVCache, ...]:
    """Passes the parts of a batch, but for what is kept."""

    def make(part: PromptPart) -> KVCache:
        return pass_prompt(model, jax.tree.map(jnp.asarray, part.prompt), kind=kind)

    return tuple(
        prefixes.get(part.prompt, kind, functools.partial(make, part))
        if prefixes is not None and part.keeps
        else make(part)
        for part in parts
    )


def advance(
    model: Denoiser,
    begun: Begun,
    state: SamplerState,
    segment: plans.Segment,
    *,
    draws: Draws | None = None,
    in_trips: bool | None = None,
) -> SamplerState:
    """Runs the steps of a segment (`sample`); `draws` are those of its steps."""
    if in_trips is None:
        in_trips = jax.default_backend() != "cpu"
    now = dataclasses.replace(
        begun.program,
        guided=bool(segment.guided[0]),
        refreshing=bool(segment.refresh[0]),
        num_registers=num_registers(segment, begun.program),
    )
    start = 0
    for part in trips(segment) if in_trips and not now.choice.ends_early else [segment]:
        steps = StepTokens(
            *(jnp.asarray(getattr(part, f.name)) for f in dataclasses.fields(StepTokens))
        )
        own = slice(start, start + part.num_steps)
        start = own.stop
        recorded = {}
        if draws is not None:
            recorded["draws"] = jax.tree.map(lambda x, own=own: jnp.asarray(x[own]), draws)
        with sharded.mesh_in_use(model):
            state = run_segment(model, state, steps, begun.prompt, settings=now, **recorded)
    return state


def trips(segment: plans.Segment) -> list[plans.Segment]:
    """Returns a segment in parts of `TRIPS` steps, the long ones first."""
    parts, start = [], 0
    for length in TRIPS:
        while segment.num_steps - start >= length:
            parts.append(segment.steps(start, start + length))
            start += length
    return parts


def capacity(
    prompt: Prompt, segments: list[plans.Segment], settings: StepSettings, multiple: int = 1
) -> tuple[int, int]:
    """Returns the cache slots that a run needs: understanding and generation region.

    Never too few, because an update past the end of a buffer would silently shift and overwrite.
    """
    committed = furthest = 0
    for s in segments:
        registers = num_registers(s, settings)
        committed = 0 if s.refresh[0] else committed
        clean, others = s.clean.shape[-1], s.decode.shape[-1] + s.rest.shape[-1]
        kept = clean if settings.preset.cache_response else 0
        committed += len(s.block) * kept
        furthest = max(furthest, committed - kept + clean + others + registers)
    lengths = {
        "text": prompt.understanding.index.shape[1],
        "image": 0 if prompt.generation is None else prompt.generation.index.shape[1],
    }
    lengths[settings.kind] += furthest
    text, image = (-(-lengths[kind] // multiple) * multiple for kind in ("text", "image"))
    return text, image
