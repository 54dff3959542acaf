# SPDX-License-Identifier: Apache-2.0
"""The sampler: one prefill, then one jitted loop per phase (paper Sec. 3.2).

A host-side plan (`sampling/plans.py`) says which positions each step passes; consecutive steps of
equal width form a phase, and a phase is one compiled program: `lax.fori_loop` over `step`.
Within a phase nothing returns to Python and no shape changes. Image and text, every preset and
every ablation row run this same `step`; which tokens are passed and which are committed is data
(`sampling/presets.py`).

A plan decodes whole cells, or single codes of cells that are then partly known: the masked codes
are those whose canvas entry is the mask id, and a token is decoded when all its codes are.
"""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sparse_lavida_jax import runtime
from sparse_lavida_jax.models.cache import KVCache
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.stack import StepTables
from sparse_lavida_jax.programs import side_by_side
from sparse_lavida_jax.programs.kept import Call, finish, kept, make
from sparse_lavida_jax.sampling import draw, plans
from sparse_lavida_jax.sampling.calls import (
    Begun,
    ModelConstants,
    Prepared,
    Trip,
    first_canvas,
    mask_id_of,
    over_mesh,
    prepared,
)
from sparse_lavida_jax.sampling.content_cache import ContentCache
from sparse_lavida_jax.sampling.draw import Draws
from sparse_lavida_jax.sampling.presets import StepSettings
from sparse_lavida_jax.sampling.prompts import LaidOut, Prompt
from sparse_lavida_jax.sampling.state import (
    NOT_DECODED,
    SamplerState,
    StepTokens,
    attention,
    forked,
    keys_from,
    response_stream,
    step_hidden,
    take,
)
from sparse_lavida_jax.tags import FIRST_BLOCK, GIVEN_BLOCK, AnyArray, TokenTags

OWN_DRAWS = Draws()  # drawn here, not read from a record


def step(
    model: Denoiser,
    state: SamplerState,
    now: StepTokens,
    prompt: Prompt,
    *,
    policy: draw.Policy,
    settings: StepSettings,
    draws: Draws = OWN_DRAWS,
    tables: StepTables | None = None,
) -> SamplerState:
    """One denoising step: passes the tokens of `now`, draws the candidates, commits some.

    The body of the phase loop, for image and text and for every preset.

    Args:
        policy: chooses which candidates to commit.
        draws: where random numbers come from.
        tables: for attention, if they were made before the loop (`_tables_ahead`).
    """
    how = settings.choice.confidence
    if settings.head_tile:
        hidden, cache = step_hidden(model, state, now, prompt, settings, tables)
        by_tiles = draw.draw_by_tiles(model, hidden, state.rows, now, settings)
        drawn = by_tiles.token[..., None]

        def sure():
            return by_tiles.confidence(how)[..., None]
    else:
        logits, cache = step_logits(model, state, now, prompt, settings, tables)
        logits = draw.allowed(logits, state.rows, now, model.settings, settings)
        drawn = draws.codes(state.rows, now, logits, settings)

        def sure():
            return draw.confidence(how, logits, drawn)

    mask_id = mask_id_of(model.settings, settings.kind)
    known, masked, candidate = _open(state, now, mask_id)
    confidence = draw.confidences(state.rows.key, now, sure, settings.choice, draws)
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


def _open(
    state: SamplerState, now: StepTokens, mask_id: int
) -> tuple[Int[Array, "b w g"], Bool[Array, "b w g"], Bool[Array, "b w u"]]:
    """Returns the codes of the tokens to decode, where they are masked, and the candidates."""
    known = take(state.canvas, jnp.maximum(now.decode, 0))
    masked = (known == mask_id) & (now.decode >= 0)[..., None]
    together = now.candidates.shape[-1] == 1
    any_masked = masked.any(axis=-1, keepdims=True) if together else masked
    return known, masked, any_masked & now.candidates


def step_logits(
    model: Denoiser,
    state: SamplerState,
    now: StepTokens,
    prompt: Prompt,
    settings: StepSettings,
    tables: StepTables | None = None,
) -> tuple[Float[Array, "b w g v"], KVCache | None]:
    """Returns guided logits of the tokens to decode, in float32, and the cache after this step."""
    hidden, cache = step_hidden(model, state, now, prompt, settings, tables)
    candidates = hidden.reshape(-1, *hidden.shape[2:])
    if settings.kind == "text":
        logits = model.text_logits(candidates)[:, :, None]
    else:
        logits = model.image_logits(candidates)
    logits = logits.reshape(*hidden.shape[:2], *logits.shape[1:])
    return draw.guided(logits, settings, state.rows, now.guidance), cache


# ---------------------------------------------------------------------------------------------
# Compiled programs.


@dataclasses.dataclass(frozen=True)
class Progress:
    """The state of a batch before its first step, or between two phases.

    Attributes:
        making: what is being made: "layout", "image" or "text".
        steps, total: forward passes done so far, and in the whole plan.
        canvas: the responses; `mask_id` where nothing is decoded yet.
        decoded_at: the block that decoded each token (`SamplerState`).
        blocks: those of the phase that has just ended; none before the first step.
        rows: request numbers of the first rows; any further rows fill the batch up.
        plan, settings: what each step passes.
        prompted: for each of `rows`, the tokens of its prompts (`LaidOut.prompt_tokens`).
    """

    making: str
    steps: int
    total: int
    canvas: Int[np.ndarray, "b l g"]
    decoded_at: Int[np.ndarray, "b l"]
    blocks: range
    mask_id: int
    rows: tuple[int, ...] = ()
    plan: Sequence[plans.Phase] = ()
    settings: StepSettings | None = None
    prompted: tuple[tuple[int, ...], ...] = ()

    def after(self, block: int) -> Int[np.ndarray, "b l g"]:
        """Returns the canvas as it was after a block, whole tokens at a time."""
        later = self.decoded_at > block
        return np.where(later[..., None], self.mask_id, self.canvas)


Callback = Callable[[Progress], None]


@kept(static=("settings",), donate=("state",), depends=attention)
def run_phase(
    model: Denoiser,
    state: SamplerState,
    phase: StepTokens,
    prompt: Prompt,
    *,
    settings: StepSettings,
    draws: Draws = OWN_DRAWS,
    number: Int[AnyArray, ""] | None = None,
) -> SamplerState:
    """Runs the steps of one phase, all of equal width, in one compiled loop.

    It ends early if nothing is left to decode, which can happen only with some commit rules.

    Args:
        number: of the steps to run, from the first; None: all.
    """
    policy = draw.policy_of(settings.choice)
    num_steps = phase.block.shape[0]
    asked = num_steps if number is None else number
    ahead = _tables_ahead(model, state, phase, prompt, settings)

    def body(i, state):
        now, drawn, tables = jax.tree.map(lambda x: x[i], (phase, draws, ahead))
        how = {"policy": policy, "settings": settings, "draws": drawn, "tables": tables}
        return step(model, state, now, prompt, **how)

    if not settings.choice.ends_early:
        return jax.lax.fori_loop(0, asked, body, state)

    def goes_on(carry):
        i, state = carry
        now = jax.tree.map(lambda x: x[jnp.minimum(i, num_steps - 1)], phase)
        *_, candidate = _open(state, now, mask_id_of(model.settings, settings.kind))
        return (i < asked) & candidate.any()

    return jax.lax.while_loop(goes_on, lambda c: (c[0] + 1, body(*c)), (jnp.int32(0), state))[1]


def _tables_ahead(
    model: Denoiser,
    state: SamplerState,
    phase: StepTokens,
    prompt: Prompt,
    settings: StepSettings,
) -> StepTables | None:
    """Returns the attention tables of every step, stacked along a first axis.

    None if each step makes its own: if decoding times depend on what is drawn, if the prompt is
    passed again, or if devices share the work. The reference implementation needs no tables.
    """
    cache, whole = state.cache, phase.candidates.shape[-1] == 1
    known = settings.kind == "image" and settings.choice.commit == "all" and whole
    alone = settings.preset.cache_prompt and not settings.refreshing
    possible = settings.tables_ahead and known and alone
    if cache is None or not possible or jax.sharding.get_abstract_mesh().size > 1:
        return None
    # The time at which each token is decoded, in this phase or before it.
    candidates = phase.candidates[..., 0] & (phase.decode >= 0)
    at = jnp.where(candidates, phase.decode, state.decoded_at.shape[1])
    rows = jnp.arange(at.shape[1])[None, :, None]
    decoded_at = state.decoded_at.at[rows, at].set(phase.block[:, None, None], mode="drop")

    def tags_of(now: StepTokens) -> tuple[AnyArray, ...]:
        until_now = jnp.where(decoded_at > now.block, NOT_DECODED, decoded_at)
        before = dataclasses.replace(state, decoded_at=until_now)
        tags = response_stream(model.settings, before, now, prompt, settings).tags
        return tags.position, tags.block, tags.horizon

    tags = jax.vmap(tags_of)(phase)
    stays = phase.clean.shape[-1] if settings.preset.cache_response else 0
    clean = jnp.moveaxis(tags[1][:, :, :stays], 0, 1)
    # Steps beyond those that are run may find no slots.
    stored = cache.tagged(clean.reshape(clean.shape[0], -1)) if stays else cache

    def tables_of(i, *tags) -> StepTables:
        return model.step_tables(TokenTags(*tags), stored.commit(i * stays))

    return jax.vmap(tables_of)(jnp.arange(phase.block.shape[0]), *tags)


def sample(
    model: Denoiser,
    laid: Sequence[LaidOut],
    phases: list[plans.Phase],
    *,
    settings: StepSettings,
    prompt_len: tuple[int, int] = (0, 0),
    stop_early: bool = True,
    callback: Callback | None = None,
    last: Callable[[AnyArray, AnyArray], None] | None = None,
    making: str = "",
    shared: int = 0,
    draws: Draws | None = None,
    in_trips: bool | None = None,
    content_cache: ContentCache | None = None,
    constants: ModelConstants | None = None,
) -> Int[np.ndarray, "b l g"]:
    """Decodes a batch of examples of one kind and one response length.

    Args:
        laid: the examples, laid out for the same `settings` (`prompts.lay_out`).
        phases: the plan (`presets.plan`), a row for each example.
        prompt_len: smallest padded lengths of the two streams, so that batches share programs.
        stop_early: for text, skip phases once every row has an end-of-text after everything
            given, with all tokens before it decoded (never with `settings.released`).
        callback: called before the first step and after each phase, for which the host then
            waits; without one, it starts each phase while the previous one runs.
        last: called with the canvas and `decoded_at` after the last step, before what follows the
            end of a text is replaced.
        making: what is made, a key of `state.NOISE`, which gives it noise of its own; also
            passed to `callback`. By default the kind.
        shared: the steps before this one (`presets.Turn`) are the same in all rows: they are passed
            for the first row alone, and its state is copied.
        draws: recorded random numbers for every step of the plan.
        in_trips: whether phases run in programs of `calls.STEPS` steps; by default not on CPUs.
        content_cache: keeps features of images and rows of prompts for later batches.
        constants: of the model; None: they are found.

    Returns:
        The responses.

    Raises:
        ValueError: the examples differ in response length, or the plan is for another batch.
    """
    ends = settings.kind == "text" and not settings.released
    constants = constants or ModelConstants.of(model)
    stage = making or settings.kind
    loop = _Loop(model, laid, phases, settings, making, stage, stop_early and ends, callback, draws)
    if callback is not None:
        canvas, given = first_canvas(laid, constants.mask_ids[settings.kind])
        loop.tell(0, canvas, np.where(given, GIVEN_BLOCK, NOT_DECODED), range(0))
    how = {"prompt_len": prompt_len, "making": making, "in_trips": in_trips}
    how |= {"settings": settings, "constants": constants, "content_cache": content_cache}
    first = FIRST_BLOCK + shared
    if shared and phases:
        one = begin(model, laid[:1], plans.first_row(phases), until=first, **how)
        begun = _forked(model, laid, phases, loop.run(one, last=first), **how)
    else:
        begun = begin(model, laid, phases, **how)
    if begun.state is None:  # everything is given
        return begun.canvas
    state = loop.run(begun, first=first)
    canvas = np.array(state.canvas)
    if last is not None:
        last(canvas.copy(), np.asarray(state.decoded_at))
    if ends:
        # Anything after the first end-of-text would depend on when the batch stopped.
        ended = np.cumsum(_ends(state, model.settings.end_of_text_id), axis=1) > 0
        canvas[ended] = model.settings.end_of_text_id
    return canvas


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The phases of a batch, for all its rows or for the first one alone; see `sample`."""

    model: Denoiser
    laid: Sequence[LaidOut]
    phases: list[plans.Phase]
    settings: StepSettings
    making: str
    stage: str
    stop_early: bool
    callback: Callback | None
    draws: Draws | None

    def tell(self, steps: int, canvas: AnyArray, decoded_at: AnyArray, blocks: range) -> None:
        """Calls the callback; a single row stands for all."""
        assert self.callback is not None
        mask_id = mask_id_of(self.model.settings, self.settings.kind)
        how = {"plan": self.phases, "settings": self.settings}
        total = sum(phase.num_steps for phase in self.phases)
        copies = len(self.laid) // len(canvas)
        rows = (np.repeat(x, copies, axis=0) for x in (canvas, decoded_at))
        self.callback(Progress(self.making, steps, total, *rows, blocks, mask_id, **how))

    def run(self, begun: Begun, first: int = FIRST_BLOCK, last: int = NOT_DECODED) -> SamplerState:
        """Runs the blocks from `first` to before `last`, and returns the state after them."""
        state, ended = begun.state, None
        assert state is not None
        requests = [one.request for one in self.laid[: len(begun.canvas)]]
        turns = {step for one in requests for step, _ in one.seeds(self.stage)} - {0}
        blocks = sorted({FIRST_BLOCK + step for step in turns} | {first, last})
        phases = self.phases if len(requests) == len(self.laid) else plans.first_row(self.phases)
        for before, phase, start, stop in plans.cut(phases, blocks):
            block = int(phase.block[start])
            if not first <= block < last:
                continue
            if turns:
                key = keys_from(requests, self.stage, block - FIRST_BLOCK)
                rows = dataclasses.replace(state.rows, key=key)
                state = dataclasses.replace(state, rows=rows)
            own = slice(before + start, before + stop)
            recorded = self.draws and jax.tree.map(lambda x, own=own: x[own], self.draws)
            state = advance(self.model, begun, state, phase, start, stop, draws=recorded)
            if self.callback is not None:
                seen = jax.device_get((state.passes, state.canvas, state.decoded_at))
                done = range(block, int(phase.block[stop - 1]) + 1)
                self.tell(int(seen[0]), seen[1], seen[2], done)
            # One phase is started ahead, and no more, so that an interrupt is noticed early.
            jax.block_until_ready(ended)
            ended = _copy(state.passes)  # the next phase overwrites the state
            runtime.check_interrupt()
            if self.stop_early and _has_ended(state, self.model.settings.end_of_text_id):
                break
        return state


@kept()
def _copy(x: Array) -> Array:
    return jnp.copy(x)


def _ends(state: SamplerState, end: int) -> Bool[np.ndarray, "b l"]:
    """Returns where texts have an end-of-text that counts."""
    decoded = np.asarray(state.decoded_at) != NOT_DECODED
    may_end = np.arange(decoded.shape[1]) >= np.asarray(state.rows.ends_from)[:, None]
    return (np.asarray(state.canvas)[..., 0] == end) & decoded & may_end


def _has_ended(state: SamplerState, end: int) -> bool:
    """Whether every text has an end-of-text with everything before it decoded."""
    ended, decoded = _ends(state, end), np.asarray(state.decoded_at) != NOT_DECODED
    first_end = np.where(ended.any(1), ended.argmax(1), ended.shape[1])
    before = np.arange(ended.shape[1])[None] < first_end[:, None]
    return bool(ended.any(1).all() and decoded[before].all())


def calls_of(
    batch: Prepared, trips: Sequence[Trip] = (), cache: ContentCache | None = None
) -> Generator[Call, Any, SamplerState]:
    """Yields the calls of the prefill and of some trips; is sent the result, or type, of each.

    Args:
        cache: what is found there is not called for.

    Returns:
        The state after the last call.
    """
    state = yield from batch.calls(cache)
    for trip in trips:
        given = batch.arrays[0], state, trip.steps, batch.begun.prompt
        state = yield Call(run_phase, given, trip.options)
    return state


def begin(
    model: Denoiser,
    laid: Sequence[LaidOut],
    phases: list[plans.Phase],
    *,
    content_cache: ContentCache | None = None,
    until: int = NOT_DECODED,
    **how: Any,
) -> Begun:
    """Makes the arrays of a batch (`calls.prepared`), and passes its prompts.

    Args:
        until: the block before which steps are going to be run.
    """
    most = None if content_cache is None else content_cache.most_bytes
    batch = prepared(model, laid, phases, most_kept=most, **how)
    begun = batch.begun
    if not phases:
        return begun
    with over_mesh(model):
        alone = jax.sharding.get_abstract_mesh().empty
        if alone and side_by_side.are_made_ahead():
            parts = [part for part in phases if part.block[0] < until]
            trips = {trip.program: trip for part in parts for trip in begun.trips(part)}
            make(calls_of(batch, [*trips.values()]), 2 * len(batch.parts) + 2 + len(trips))
        state = finish(batch.calls(content_cache if most else None), Call.__call__)
    return dataclasses.replace(begun, state=state)


def _forked(
    model: Denoiser,
    laid: Sequence[LaidOut],
    phases: list[plans.Phase],
    state: SamplerState,
    *,
    content_cache: ContentCache | None = None,
    **how: Any,
) -> Begun:
    """Returns a batch whose rows all go on from the state of one row."""
    most = None if content_cache is None else content_cache.most_bytes
    batch = prepared(model, laid, phases, most_kept=most, **how)
    with over_mesh(model):
        copies = forked(state, batch.arrays[3], copies=len(laid))
    return dataclasses.replace(batch.begun, state=copies)


def advance(
    model: Denoiser,
    begun: Begun,
    state: SamplerState,
    phase: plans.Phase,
    start: int = 0,
    stop: int | None = None,
    *,
    draws: Draws | None = None,
) -> SamplerState:
    """Runs the steps of a phase (`sample`), or some, with the `draws` of these steps."""
    for trip in begun.trips(phase, start, stop):
        recorded = {}
        if draws is not None:
            recorded["draws"] = jax.tree.map(lambda x, own=trip.own - start: x[own], draws)
        with over_mesh(model):
            state = run_phase(model, state, trip.steps, begun.prompt, **trip.options, **recorded)
    return state
