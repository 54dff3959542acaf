# SPDX-License-Identifier: Apache-2.0
"""The sampler: prefill once, then one jitted loop a segment (paper Sec. 3.2).

A host-side plan (`orders.py`) says which positions a step passes; consecutive steps of one width
form a segment, and a segment is one compiled program: `lax.fori_loop` over `step`. Nothing returns
to Python inside a segment and no shape changes. Image and text, every preset and every ablation row
run this same `step`; they differ in which tokens the plan passes and which of them are committed.

| preset | passes besides the tokens to decode and the registers | cache |
| --- | --- | --- |
| sparse (prt) | the tokens decoded in the previous step | prompt, response |
| without p; without r | the prompt again; all clean tokens again | not of that |
| without t | all other masked tokens | |
| dense | everything, in block 0, without registers: LaViDa-O itself | none |
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.layout import (
    GIVEN_BLOCK,
    NO_CELL,
    NO_FEATURE,
    PROMPT_BLOCK,
    AnyArray,
    Part,
    Stream,
    concatenate,
    make_layout,
    prompt_row,
    stack_pictures,
    without_blocks,
)
from sparse_lavida_jax.models.cache import KVCache
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.orders import Segment
from sparse_lavida_jax.visibility import PAD_BLOCK

NOT_DECODED = PAD_BLOCK  # in `decoded_at`: no step has decoded the position yet
PROMPT_BUCKET = 16  # prompts are padded to a multiple of this many tokens

Kind = Literal["text", "image"]


# ---------------------------------------------------------------------------------------------
# Settings.


@dataclasses.dataclass(frozen=True)
class Preset:
    """What is cached and what is left out: a row of the paper's ablation (Table 6)."""

    cache_prompt: bool
    cache_response: bool
    truncate: bool
    full_attention: bool = False


def preset(name: str) -> Preset:
    """Returns the preset of that name (`config.PRESETS`).

    Raises:
        ValueError: an unknown name.
    """
    if name not in config.PRESETS:
        raise ValueError(f"preset {name!r} is unknown: use one of {', '.join(config.PRESETS)}.")
    if name == "dense":
        return Preset(False, False, False, full_attention=True)
    letters = {"sparse": "prt", "none": ""}.get(name, name)
    return Preset("p" in letters, "r" in letters, "t" in letters)


def default_preset(model: config.Model) -> str:
    """Returns what a checkpoint was trained for: sparse, or dense for a "full" one."""
    return "sparse" if model.trained_attention == "step_causal" else "dense"


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """Everything about a step that is compiled into it."""

    kind: Kind
    preset: Preset
    num_registers: int
    temperature: float
    guidance_rows: int  # 1: none; 2: [dropped, full]; 3: [dropped, source only, full]
    guidance: float
    guidance_image: float

    @property
    def uses_cache(self) -> bool:
        return self.preset.cache_prompt or self.preset.cache_response


# ---------------------------------------------------------------------------------------------
# Prompts.


@dataclasses.dataclass(frozen=True)
class Request:
    """One thing to be sampled.

    Attributes:
        parts: the sequence; its `Response` says how many tokens to decode.
        tokens: the response's known tokens [l g]; what `given` does not mark is ignored.
        given: which response tokens are known.
        pixels: the picture that a `Vision` part stands for.
        seed: all randomness of this row.
    """

    parts: tuple[Part, ...]
    tokens: Int[np.ndarray, "l g"]
    given: Bool[np.ndarray, " l"]
    pixels: UInt8[np.ndarray, "h w 3"] | None
    seed: int


@flax.struct.dataclass
class Prompt:
    """Prompts of a batch, a row for each request and guidance row (guidance-major: r b).

    Attributes:
        understanding, generation: prompt and given tokens, with tags; None where there are none.
        pixels: pictures for the vision tower, or None.
        response_position: position of the first response token.
        length: L, where register positions start.
    """

    understanding: Stream
    generation: Stream | None
    pixels: UInt8[AnyArray, "r h w 3"] | None
    response_position: Int[AnyArray, " r"]
    length: Int[AnyArray, " r"]


def prepare(
    requests: list[Request],
    kind: Kind,
    model: config.Model,
    guidance_rows: int = 1,
    prompt_len: tuple[int, int] = (0, 0),
) -> Prompt:
    """Lays out the prompts of a batch on the host, all guidance rows, padded to a bucket.

    Args:
        guidance_rows: 1: the prompt; 2: [dropped, full]; 3: [dropped, source only, full].
        prompt_len: least padded lengths of the two streams, so that batches share programs.
    """
    drops = {1: [(False, False)], 2: [(True, True), (False, False)]}.get(
        guidance_rows, [(True, True), (True, False), (False, False)]
    )
    rows = [
        (request, prompt_row(
            request.parts,
            text_mask_id=model.text_mask_id,
            codes_per_token=model.codes_per_token,
            drop_prompt=drop_prompt,
            drop_source=drop_source,
        ))
        for drop_prompt, drop_source in drops
        for request in requests
    ]  # fmt: skip
    text, image = [], []
    for request, row in rows:
        known = np.flatnonzero(request.given)
        position = row.response_position + known
        block = np.full(len(known), GIVEN_BLOCK)
        text.append((row.ids, row.feature, row.position, np.full_like(row.position, PROMPT_BLOCK)))
        image.append(
            (row.codes, row.cell, row.source_position, np.full_like(row.cell, PROMPT_BLOCK))
        )
        if kind == "text":
            given = (request.tokens[known, 0], np.full(len(known), NO_FEATURE), position, block)
            text[-1] = tuple(np.concatenate(pair) for pair in zip(text[-1], given, strict=True))
        else:
            given = (request.tokens[known], known, position, block)
            image[-1] = tuple(np.concatenate(pair) for pair in zip(image[-1], given, strict=True))
    return Prompt(
        _stack(text, model.end_of_text_id, prompt_len[0]),
        _stack(image, model.image_mask_id, prompt_len[1])
        if any(len(row[1]) for row in image)
        else None,
        stack_pictures([request.pixels for request, _ in rows]),
        np.array([row.response_position for _, row in rows], np.int32),
        np.array([row.length for _, row in rows], np.int32),
    )


def prompt_lengths(requests: list[Request], kind: Kind, model: config.Model) -> tuple[int, int]:
    """Returns the padded prompt lengths that hold every one of `requests` without guidance."""
    prompt = prepare(requests, kind, model)
    generation = 0 if prompt.generation is None else prompt.generation.index.shape[1]
    return prompt.understanding.index.shape[1], generation


def _stack(rows, pad_token: int, least: int) -> Stream:
    longest = max(least, *(len(row[1]) for row in rows))
    length = -(-longest // PROMPT_BUCKET) * PROMPT_BUCKET

    def padded(values, fill):
        missing = ((0, length - len(values)),) + ((0, 0),) * (values.ndim - 1)
        return np.pad(values, missing, constant_values=fill).astype(np.int32)

    tokens, index, position, block = (
        np.stack([padded(row[i], fill) for row in rows])
        for i, fill in enumerate((pad_token, NO_CELL, 0, PAD_BLOCK))
    )
    return Stream(tokens, index, make_layout(position, block, GIVEN_BLOCK))


# ---------------------------------------------------------------------------------------------
# State and step.


@flax.struct.dataclass
class SamplerState:
    """A batch of responses on the way from all masks to clean.

    Attributes:
        canvas: ids or codes, the mask id where nothing is decoded.
        decoded_at: the step that decoded each token, `GIVEN_BLOCK` if it was given,
            `NOT_DECODED` if it is masked.
        row_key: one key a row; noise depends on (row, step, position) and on nothing else.
        features: vision features of the prompt, for presets that pass the prompt again.
        cache: keys and values, all guidance rows; None where the preset caches nothing.
    """

    canvas: Int[Array, "b l g"]
    decoded_at: Int[Array, "b l"]
    row_key: Key[Array, " b"]
    features: Float[Array, "r v e"] | None
    cache: KVCache | None


@flax.struct.dataclass
class StepTokens:
    """What one step passes; positions in the response, -1 pads (see `orders.Segment`).

    Attributes:
        block: number of the step.
        clean: decoded tokens that are passed (again); they are stored if responses are cached.
        decode: candidates of this step; some may be decoded already (text).
        rest: masked tokens that are passed but not predicted.
        count: how many candidates to commit.
    """

    block: Int[Array, "*n"]
    clean: Int[Array, "*n b wc"]
    decode: Int[Array, "*n b w"]
    rest: Int[Array, "*n b wr"]
    count: Int[Array, "*n b"]


# Chooses which candidates to commit: (probability of the drawn codes [b w g], candidate is masked
# [b w], count [b]) -> [b w].
Policy = Callable[[Float[Array, "b w g"], Bool[Array, "b w"], Int[Array, " b"]], Bool[Array, "b w"]]


def commit_all(probability, masked, count):
    """Image policy: the plan chose the tokens before the forward pass."""
    del probability, count
    return masked


def commit_most_confident(probability, masked, count):
    """Text policy: the `count` most probable candidates (spec Sec. 6, "low_confidence")."""
    confidence = jnp.where(masked, probability.min(axis=-1), -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-confidence, axis=-1), axis=-1)
    return masked & (rank < count[:, None])


POLICIES: dict[Kind, Policy] = {"image": commit_all, "text": commit_most_confident}


def step(
    model: Denoiser,
    state: SamplerState,
    now: StepTokens,
    prompt: Prompt,
    *,
    policy: Policy,
    settings: StepSettings,
) -> SamplerState:
    """One denoising step: passes the tokens of `now`, draws the candidates, commits some.

    The body of the segment loop, for image and text and for every preset.
    """
    logits, cache = step_logits(model, state, now, prompt, settings)
    drawn, probability = _draw(state.row_key, now, logits, settings.temperature)
    at = jnp.maximum(now.decode, 0)
    masked = (now.decode >= 0) & (_take(state.decoded_at, at) == NOT_DECODED)
    commit = policy(probability, masked, now.count)
    # Positions outside the response are dropped by the scatter.
    target = jnp.where(commit, now.decode, state.canvas.shape[1])
    rows = jnp.arange(target.shape[0])[:, None]
    return dataclasses.replace(
        state,
        canvas=state.canvas.at[rows, target].set(drawn, mode="drop"),
        decoded_at=state.decoded_at.at[rows, target].set(now.block, mode="drop"),
        cache=cache,
    )


def step_logits(
    model: Denoiser,
    state: SamplerState,
    now: StepTokens,
    prompt: Prompt,
    settings: StepSettings,
) -> tuple[Float[Array, "b w g v"], KVCache | None]:
    """Returns guided logits of the candidates, float32, and the cache behind this step."""
    is_text, preset_ = settings.kind == "text", settings.preset
    rows = settings.guidance_rows
    response = _response_stream(model.settings, state, now, prompt, settings)
    clean_len, decode_len = now.clean.shape[-1], now.decode.shape[-1]
    again = _prompt_again(prompt, settings)
    own = again["understanding" if is_text else "generation"]
    before = clean_len + (0 if own is None else own.index.shape[1])
    stream = _join(response, own, clean_len)
    other = again["generation" if is_text else "understanding"]
    hidden, cache = model(
        stream if is_text else other,
        other if is_text else stream,
        None if preset_.cache_prompt else state.features,
        wanted="understanding" if is_text else "generation",
        cache=state.cache,
    )
    if cache is not None:
        cache = cache.commit(clean_len if preset_.cache_response else 0)
    candidates = hidden["understanding" if is_text else "generation"]
    candidates = candidates[:, before : before + decode_len]
    if is_text:
        logits = model.text_logits(candidates)[:, :, None]
    else:
        logits = model.image_logits(candidates)
    return _guide(logits.reshape(rows, -1, *logits.shape[1:]), settings), cache


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
    if settings.preset.cache_prompt:
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


def _guide(logits: Float[Array, "r b w g v"], settings: StepSettings) -> Float[Array, "b w g v"]:
    """Classifier-free guidance over the leading axis (spec Sec. 7.2: (1+g) cond - g uncond)."""
    full = logits[-1]
    if settings.guidance_rows == 3:
        g = settings.guidance_image
        full = (1 + g) * full - g * logits[1]
    if settings.guidance_rows > 1:
        full = (1 + settings.guidance) * full - settings.guidance * logits[0]
    return full


def _draw(
    row_key: Key[Array, " b"], now: StepTokens, logits: Float[Array, "b w g v"], temperature: float
) -> tuple[Int[Array, "b w g"], Float[Array, "b w g"]]:
    """Draws each code independently; returns it and its un-tempered probability."""
    scores = logits
    if temperature > 0:

        def noise_at(key, position):
            key = jax.random.fold_in(jax.random.fold_in(key, now.block), position)
            return jax.random.gumbel(key, logits.shape[2:])

        noise = jax.vmap(jax.vmap(noise_at, in_axes=(None, 0)))(row_key, now.decode)
        scores = logits / temperature + noise
    drawn = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    log_probability = jax.nn.log_softmax(logits, axis=-1)
    return drawn, jnp.exp(jnp.take_along_axis(log_probability, drawn[..., None], axis=-1)[..., 0])


def _take(values: Array, at: Int[Array, "b w"]) -> Array:
    return jnp.take_along_axis(values, at.reshape(*at.shape, *[1] * (values.ndim - 2)), axis=1)


def _repeat(values: Array, rows: int) -> Array:
    return jnp.concatenate([values] * rows, axis=0) if rows > 1 else values


# ---------------------------------------------------------------------------------------------
# Compiled programs.


@functools.partial(jax.jit, static_argnames=("settings", "capacity"))
def prefill(
    model: Denoiser,
    canvas: Int[Array, "b l g"],
    decoded_at: Int[Array, "b l"],
    row_key: Key[Array, " b"],
    prompt: Prompt,
    *,
    settings: StepSettings,
    capacity: tuple[int, int],
) -> SamplerState:
    """Encodes the pictures and fills the cache with prompt and given tokens.

    Args:
        capacity: slots of the understanding and of the generation region.
    """
    features = None if prompt.pixels is None else model.see(prompt.pixels)
    if not settings.uses_cache:
        return SamplerState(canvas, decoded_at, row_key, features, None)
    decodes = "understanding" if settings.kind == "text" else "generation"
    cache = model.empty_cache(prompt.length.shape[0], *capacity, decodes)
    if settings.preset.cache_prompt:
        _, cache = model(
            prompt.understanding,
            prompt.generation,
            features,
            wanted=decodes,
            cache=cache,
            attend_cache=False,
        )
        own = prompt.understanding if settings.kind == "text" else prompt.generation
        if cache is not None and own is not None:
            cache = cache.commit(own.index.shape[1])
        features = None
    return SamplerState(canvas, decoded_at, row_key, features, cache)


@functools.partial(jax.jit, static_argnames=("settings",), donate_argnames=("state",))
def run_segment(
    model: Denoiser,
    state: SamplerState,
    segment: StepTokens,
    prompt: Prompt,
    *,
    settings: StepSettings,
) -> SamplerState:
    """Runs the steps of one segment, all of one width, in one compiled loop."""
    policy = POLICIES[settings.kind]

    def body(i, state):
        now = jax.tree.map(lambda x: x[i], segment)
        return step(model, state, now, prompt, policy=policy, settings=settings)

    return jax.lax.fori_loop(0, segment.block.shape[0], body, state)


def sample(
    model: Denoiser,
    requests: list[Request],
    segments: list[Segment],
    *,
    settings: StepSettings,
    prompt_len: tuple[int, int] = (0, 0),
    stop_early: bool = True,
    on_segment: Callable[[Int[np.ndarray, "b l g"], int], None] | None = None,
) -> Int[np.ndarray, "b l g"]:
    """Decodes a batch of requests of one kind and one response length.

    Args:
        segments: the plan (`orders.segments` or `orders.text_plan`), a row for each request.
        prompt_len: least padded prompt lengths (`prepare`).
        stop_early: for text, leave out segments once every row holds an end-of-text with
            everything before it decoded.
        on_segment: called with the canvas and the number of steps done after each segment.

    Returns:
        The responses.

    Raises:
        ValueError: the requests differ in response length, or the plan is for another batch.
    """
    model_settings = model.settings
    mask_id = (
        model_settings.text_mask_id if settings.kind == "text" else model_settings.image_mask_id
    )
    lengths = sorted({len(request.given) for request in requests})
    if len(lengths) > 1:
        raise ValueError(
            f"requests of one batch have one response length, got {lengths}: sample them apart."
        )
    given = np.stack([request.given for request in requests])
    tokens = np.stack([request.tokens for request in requests])
    if segments and segments[0].decode.shape[1] != len(requests):
        raise ValueError(
            f"the plan is for {segments[0].decode.shape[1]} rows, got {len(requests)} requests."
        )
    canvas = np.where(given[..., None], tokens, mask_id).astype(np.int32)
    if not segments:  # everything is given
        return canvas
    decoded_at = np.where(given, GIVEN_BLOCK, NOT_DECODED).astype(np.int32)
    row_key = jax.vmap(jax.random.key)(np.array([request.seed for request in requests]))
    prompt = prepare(requests, settings.kind, model_settings, settings.guidance_rows, prompt_len)
    on_device = jax.tree.map(jnp.asarray, prompt)
    state = prefill(
        model,
        canvas,
        decoded_at,
        row_key,
        on_device,
        settings=settings,
        capacity=capacity(prompt, segments, settings),
    )
    done = 0
    for segment in segments:
        steps = StepTokens(
            *(jnp.asarray(getattr(segment, f.name)) for f in dataclasses.fields(StepTokens))
        )
        state = run_segment(model, state, steps, on_device, settings=settings)
        done += len(segment.block)
        if on_segment is not None:
            on_segment(np.asarray(state.canvas), done)
        if stop_early and settings.kind == "text":
            decoded = np.asarray(state.decoded_at) != NOT_DECODED
            ended = (np.asarray(state.canvas)[..., 0] == model_settings.end_of_text_id) & decoded
            first_end = np.where(ended.any(1), ended.argmax(1), ended.shape[1])
            before = np.arange(ended.shape[1])[None] < first_end[:, None]
            if ended.any(1).all() and decoded[before].all():
                break
    canvas = np.array(state.canvas)
    if settings.kind == "text":
        # What stands behind the first end-of-text would depend on when the batch stopped.
        ended = np.cumsum(canvas[..., 0] == model_settings.end_of_text_id, axis=1) > 0
        canvas[ended & ~given] = model_settings.end_of_text_id
    return canvas


def capacity(prompt: Prompt, segments: list[Segment], settings: StepSettings) -> tuple[int, int]:
    """Returns the cache slots that a run needs: understanding and generation region.

    Exact, because an update past the end of a buffer would silently shift and overwrite.
    """
    committed = furthest = 0
    for s in segments:
        clean, others = s.clean.shape[-1], s.decode.shape[-1] + s.rest.shape[-1]
        kept = clean if settings.preset.cache_response else 0
        committed += len(s.block) * kept
        furthest = max(furthest, committed - kept + clean + others)
    lengths = {
        "text": prompt.understanding.index.shape[1],
        "image": 0 if prompt.generation is None else prompt.generation.index.shape[1],
    }
    lengths[settings.kind] += furthest + settings.num_registers
    return lengths["text"], lengths["image"]


def step_settings(
    sampling: config.Sampling, model: config.Model, kind: Kind, *, has_source: bool = False
) -> StepSettings:
    """Returns the compiled-in settings of a sampling configuration."""
    chosen = preset(sampling.preset or default_preset(model))
    guided = kind == "image" and (sampling.guidance > 0 or sampling.guidance_image > 0)
    return StepSettings(
        kind=kind,
        preset=chosen,
        num_registers=0 if chosen.full_attention else model.num_registers,
        temperature=sampling.temperature if kind == "image" else sampling.text_temperature,
        guidance_rows=(3 if has_source else 2) if guided else 1,
        guidance=sampling.guidance if guided else 0.0,
        guidance_image=sampling.guidance_image if guided else 0.0,
    )
