# SPDX-License-Identifier: Apache-2.0
"""The sampler: one prefill, then one jitted loop per segment (paper Sec. 3.2).

A host-side plan (`sampling/plans.py`) says which positions each step passes; consecutive steps of
equal width form a segment, and a segment is one compiled program: `lax.fori_loop` over `step`.
Within a segment nothing returns to Python and no shape changes. Image and text, every preset and
every ablation row run this same `step`; which tokens are passed and which are committed is data
(`sampling/presets.py`).

A plan decodes whole cells, or single codes of cells that are then partly known: the masked codes
are those whose canvas entry is the mask id, and a token is decoded when all its codes are.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.kernels.attention import (
    mesh_in_use,
    query_multiple,
    slot_multiple,
    takes_tables,
)
from sparse_lavida_jax.layout import GIVEN_BLOCK, AnyArray, TokenLayout
from sparse_lavida_jax.models.cache import KVCache
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.stack import StepTables, implementation_of
from sparse_lavida_jax.programs import side_by_side
from sparse_lavida_jax.programs.kept import Call, finish, kept, make
from sparse_lavida_jax.sampling import draw, plans
from sparse_lavida_jax.sampling.content_cache import ContentCache, digest, num_tokens, row_digests
from sparse_lavida_jax.sampling.draw import Draws
from sparse_lavida_jax.sampling.presets import StepSettings
from sparse_lavida_jax.sampling.prompts import (
    Prompt,
    PromptPart,
    guidance_shapes,
    padded_lengths,
    parted,
    prepare,
)
from sparse_lavida_jax.sampling.state import (
    NOT_DECODED,
    Features,
    SamplerState,
    StepTokens,
    apart,
    attention,
    capacity,
    decodes,
    gather,
    num_registers,
    own_len,
    pass_prompt,
    prefill,
    program_of,
    prompt_bytes,
    reaches,
    response_stream,
    rows_of,
    see,
    step_hidden,
    take,
)
from sparse_lavida_jax.sequence import Kind, SeenBatch

# The most steps of one call of a program, which takes their number as an argument. So requests with
# any number of steps share one program for each width. On CPUs a program holds just the steps of
# its segment.
STEPS = 16

# Without a kernel that skips empty slots, a segment on a CPU reads the cache up to a multiple of so
# many slots. Texts, whose blocks share a program if they read the same length, have at most so many
# lengths.
READ_SLOTS, TEXT_LENGTHS = 16, 8

OWN_DRAWS = Draws()  # drawn here, not read from a record

_slot_multiple = functools.cache(slot_multiple)


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

    The body of the segment loop, for image and text and for every preset.

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

    mask_id = _mask_id(model.settings, settings.kind)
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


def _mask_id(model: config.Model, kind: Kind) -> int:
    return model.text_mask_id if kind == "text" else model.image_mask_id


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
    """The state of a batch before its first step, or between two segments.

    Attributes:
        making: what is being made: "layout", "image" or "text".
        steps, total: forward passes done so far, and in the whole plan.
        canvas: the responses; `mask_id` where nothing is decoded yet.
        decoded_at: the block that decoded each token (`SamplerState`).
        blocks: those of the segment that has just ended; none before the first step.
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
    plan: Sequence[plans.Segment] = ()
    settings: StepSettings | None = None
    prompted: tuple[tuple[int, ...], ...] = ()

    def after(self, block: int) -> Int[np.ndarray, "b l g"]:
        """Returns the canvas as it was after a block, whole tokens at a time."""
        later = self.decoded_at > block
        return np.where(later[..., None], self.mask_id, self.canvas)


Callback = Callable[[Progress], None]


@kept(static=("settings",), donate=("state",), depends=attention)
def run_segment(
    model: Denoiser,
    state: SamplerState,
    segment: StepTokens,
    prompt: Prompt,
    *,
    settings: StepSettings,
    draws: Draws = OWN_DRAWS,
    number: Int[AnyArray, ""] | None = None,
) -> SamplerState:
    """Runs the steps of one segment, all of equal width, in one compiled loop.

    It ends early if nothing is left to decode, which can happen only with some commit rules.

    Args:
        number: of the steps to run, from the first; None: all.
    """
    policy = draw.policy_of(settings.choice)
    num_steps = segment.block.shape[0]
    asked = num_steps if number is None else number
    ahead = _tables_ahead(model, state, segment, prompt, settings)

    def body(i, state):
        now, drawn, tables = jax.tree.map(lambda x: x[i], (segment, draws, ahead))
        how = {"policy": policy, "settings": settings, "draws": drawn, "tables": tables}
        return step(model, state, now, prompt, **how)

    if not settings.choice.ends_early:
        return jax.lax.fori_loop(0, asked, body, state)

    def goes_on(carry):
        i, state = carry
        now = jax.tree.map(lambda x: x[jnp.minimum(i, num_steps - 1)], segment)
        *_, candidate = _open(state, now, _mask_id(model.settings, settings.kind))
        return (i < asked) & candidate.any()

    return jax.lax.while_loop(goes_on, lambda c: (c[0] + 1, body(*c)), (jnp.int32(0), state))[1]


def _tables_ahead(
    model: Denoiser,
    state: SamplerState,
    segment: StepTokens,
    prompt: Prompt,
    settings: StepSettings,
) -> StepTables | None:
    """Returns the attention tables of every step, stacked along a first axis.

    None if each step makes its own: if decoding times depend on what is drawn, if the prompt is
    passed again, or if devices share the work. The reference implementation needs no tables.
    """
    cache, whole = state.cache, segment.candidates.shape[-1] == 1
    known = settings.kind == "image" and settings.choice.commit == "all" and whole
    alone = settings.preset.cache_prompt and not settings.refreshing
    possible = settings.tables_ahead and known and alone
    if cache is None or not possible or jax.sharding.get_abstract_mesh().size > 1:
        return None
    # The time at which each token is decoded, in this segment or before it.
    candidates = segment.candidates[..., 0] & (segment.decode >= 0)
    at = jnp.where(candidates, segment.decode, state.decoded_at.shape[1])
    rows = jnp.arange(at.shape[1])[None, :, None]
    decoded_at = state.decoded_at.at[rows, at].set(segment.block[:, None, None], mode="drop")

    def tags_of(now: StepTokens) -> tuple[AnyArray, ...]:
        until_now = jnp.where(decoded_at > now.block, NOT_DECODED, decoded_at)
        before = dataclasses.replace(state, decoded_at=until_now)
        layout = response_stream(model.settings, before, now, prompt, settings).layout
        return layout.position, layout.block, layout.horizon

    tags = jax.vmap(tags_of)(segment)
    stays = segment.clean.shape[-1] if settings.preset.cache_response else 0
    clean = jnp.moveaxis(tags[1][:, :, :stays], 0, 1)
    # Steps beyond those that are run may find no slots.
    stored = cache.tagged(clean.reshape(clean.shape[0], -1)) if stays else cache

    def tables_of(i, *tags) -> StepTables:
        return model.step_tables(TokenLayout(*tags), stored.commit(i * stays))

    return jax.vmap(tables_of)(jnp.arange(segment.block.shape[0]), *tags)


def sample(
    model: Denoiser,
    examples: Sequence[Example],
    segments: list[plans.Segment],
    *,
    settings: StepSettings,
    prompt: Prompt | None = None,
    stop_early: bool = True,
    callback: Callback | None = None,
    making: str = "",
    draws: Draws | None = None,
    in_trips: bool | None = None,
    content_cache: ContentCache | None = None,
) -> Int[np.ndarray, "b l g"]:
    """Decodes a batch of examples of one kind and one response length.

    Args:
        examples: each with its request.
        segments: the plan (`presets.plan`), a row for each example.
        prompt: the examples already laid out; by default that is done here.
        stop_early: for text, skip segments once every row has an end-of-text after everything
            given, with all tokens before it decoded (never with `settings.released`).
        callback: called before the first step and after each segment, for which the host then
            waits; without one, it starts each segment while the previous one runs.
        making: what is made, a key of `state.NOISE`, which gives it noise of its own; also
            passed to `callback`. By default the kind.
        draws: recorded random numbers for every step of the plan.
        in_trips: whether segments are run by programs of `STEPS` steps; by default not on CPUs.
        content_cache: keeps features of images and rows of prompts for later batches.

    Returns:
        The responses.

    Raises:
        ValueError: the examples differ in response length, or the plan is for another batch.
    """
    ends = settings.kind == "text" and not settings.released
    total = sum(len(segment.block) for segment in segments)

    def tell(steps: int, canvas, decoded_at, blocks: range) -> None:
        assert callback is not None
        how = {"plan": segments, "settings": settings}
        callback(Progress(making, steps, total, canvas, decoded_at, blocks, mask_id, **how))

    mask_id = _mask_id(model.settings, settings.kind)
    canvas, given = _first_canvas(examples, mask_id)
    if callback is not None:
        tell(0, canvas, np.where(given, GIVEN_BLOCK, NOT_DECODED), range(0))
    how = {"settings": settings, "prompt": prompt, "making": making, "in_trips": in_trips}
    begun = begin(model, examples, segments, content_cache=content_cache, **how)
    state = begun.state
    if state is None:  # everything is given
        return begun.canvas
    start, ended = 0, None
    for segment in segments:
        own = slice(start, start + len(segment.block))
        recorded = None if draws is None else jax.tree.map(lambda x, own=own: x[own], draws)
        state = advance(model, begun, state, segment, draws=recorded)
        start = own.stop
        if callback is not None:
            blocks = range(int(segment.block[0]), int(segment.block[-1]) + 1)
            seen = jax.device_get((state.passes, state.canvas, state.decoded_at))
            tell(int(seen[0]), seen[1], seen[2], blocks)
        # One segment is started ahead, and no more, so that an interrupt is noticed early.
        jax.block_until_ready(ended)
        ended = _copy(state.passes)  # the next segment overwrites the state
        runtime.check_interrupt()
        if stop_early and ends and _has_ended(state, model.settings.end_of_text_id):
            break
    canvas = np.array(state.canvas)
    if ends:
        # Anything after the first end-of-text would depend on when the batch stopped.
        ended = np.cumsum(_ends(state, model.settings.end_of_text_id), axis=1) > 0
        canvas[ended] = model.settings.end_of_text_id
    return canvas


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


@dataclasses.dataclass(frozen=True)
class Begun:
    """A batch after its prefill.

    Attributes:
        canvas: the initial responses, on the host.
        prompt: on the device.
        program: the key of the compiled programs.
        state: None if nothing is left to decode.
        reach: by the first step of a segment: the slots that it reads, if these are not all.
        in_trips: see `sample`.
        multiple: of the tokens that a step passes.
    """

    canvas: Int[np.ndarray, "b l g"]
    prompt: Prompt | None
    program: StepSettings
    state: SamplerState | None
    reach: dict[int, int] = dataclasses.field(default_factory=dict)
    in_trips: bool = False
    multiple: int = 1

    def trips(self, segment: plans.Segment) -> Iterator["Trip"]:
        """Yields the calls of `run_segment` for a segment."""
        segment = _in_groups(segment, self.program, self.multiple)
        settings = dataclasses.replace(
            self.program,
            guided=bool(segment.guided[0]),
            refreshing=bool(segment.refresh[0]),
            num_registers=num_registers(segment, self.program),
            reach=self.reach.get(int(segment.block[0])),
        )
        steps, end = StepTokens.of(segment), segment.num_steps
        if not self.in_trips:
            yield Trip(np.arange(end), steps, {"settings": settings})
            return
        for start in range(0, end, STEPS):
            # The last step is repeated to fill the program, and not run again.
            own = np.minimum(np.arange(start, start + STEPS), end - 1)
            number = np.int32(min(STEPS, end - start))
            part = jax.tree.map(lambda x, own=own: np.asarray(x)[own], steps)
            yield Trip(own, part, {"settings": settings, "number": number})


@dataclasses.dataclass(frozen=True)
class Trip:
    """A call of `run_segment`: the numbers of its steps in the segment, the steps, and options."""

    own: Int[np.ndarray, " n"]
    steps: StepTokens
    options: dict[str, Any]

    @property
    def program(self) -> Hashable:
        """What its program depends on, within a batch."""
        return tuple(x.shape for x in jax.tree.leaves(self.steps)), self.options["settings"]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A batch laid out, before its prefill.

    Attributes:
        begun: without a state.
        arrays: the model, the canvas, when it was decoded, and the values of its rows.
        parts: of the prompt, which are passed one by one; none or one: it is passed as a whole.
        room: slots of the two regions of the cache.
        kept: the indices of the parts whose rows may be kept.
        pixels: of the images, if they are encoded by themselves; else they are in the prompt.
    """

    begun: Begun
    arrays: tuple
    parts: Sequence[PromptPart] = ()
    room: tuple[int, int] = (0, 0)
    kept: frozenset[int] = frozenset()
    pixels: SeenBatch | None = None

    def calls(
        self, trips: Sequence[Trip] = (), cache: ContentCache | None = None
    ) -> Generator[Call, Any, SamplerState]:
        """Yields the calls of the prefill and of some trips; is sent the result, or type, of each.

        Args:
            cache: what is found there is not called for.

        Returns:
            The state after the last call.
        """
        (model, *_), program, prompt = self.arrays, self.begun.program, self.begun.prompt
        assert prompt is not None
        if len(self.parts) <= 1 and not self.kept:
            state = yield (yield from self._passed(None, cache))
        else:
            caches, first = [], []
            for number, part in enumerate(self.parts):
                keeps = number in self.kept
                caches.append((yield from self._rows(part, keeps, cache)))
                first += [part.first + i for i in range(keeps * len(part.prompt.length) or 1)]
            joining = {
                "first": tuple(first),
                "kind": program.kind,
                "capacity": self.room,
                "prompt_len": own_len(prompt, decodes(program.kind)),
            }
            state = yield Call(gather, (*self.arrays, tuple(caches)), joining)
        for trip in trips:
            given = model, state, trip.steps, prompt
            state = yield Call(run_segment, given, trip.options)
        return state

    def _rows(
        self, part: PromptPart, keeps: bool, cache: ContentCache | None
    ) -> Generator[Call, Any, KVCache | tuple[KVCache, ...]]:
        """Returns the cache of a part; if its rows are kept, that of each: found, or new ones."""
        if not keeps:
            return (yield (yield from self._passed(part, cache)))
        names, rows, prompt = [], None, part.prompt
        if cache is not None:
            how = *self._by, len(prompt.length), *self._pass_options.items()
            names = [(*how, one) for one in row_digests(prompt, self._images)]
            rows = cache.get("prefill", names, num_tokens(prompt))
        if rows is None:
            passed = yield (yield from self._passed(part, cache))
            rows = (passed,)
            if len(prompt.length) > 1 or len(self.parts) == 1:
                rows = yield Call(apart, (passed,), {"lengths": padded_lengths(prompt)})
            if cache is not None:
                cache.add("prefill", names, rows)
        return rows

    def _passed(
        self, part: PromptPart | None, cache: ContentCache | None
    ) -> Generator[Call, Any, Call]:
        """Returns the call that passes a part, or all of the prompt if there are no others."""
        (model, *_), whole, seen = self.arrays, len(self.parts) <= 1, {}
        prompt = self.begun.prompt if whole or part is None else part.prompt
        assert prompt is not None
        if self.pixels is not None and (whole or prompt.pixels is not None):
            prompt = dataclasses.replace(prompt, pixels=None)
            seen = {"features": (yield from self._features(cache))}
        given = (*self.arrays, prompt) if whole else (model, prompt)
        return Call(prefill if whole else pass_prompt, given, self._pass_options | seen)

    def _features(self, cache: ContentCache | None) -> Generator[Call, Any, Features]:
        """Returns the vision features of each request: kept ones if all are there."""
        names = (
            [] if cache is None else [(*self._by, len(self._images), one) for one in self._images]
        )
        found = None if cache is None else cache.get("vision", names)
        if found is None:
            found = yield Call(see, (self.arrays[0], self.pixels), {})
            if cache is not None:
                cache.add("vision", names, found)
        return found

    @property
    def _pass_options(self) -> dict[str, Any]:
        """The options of the call that passes a part."""
        if len(self.parts) > 1:
            return {"kind": self.begun.program.kind}
        return {"settings": self.begun.program, "capacity": self.room}

    @functools.cached_property
    def _by(self) -> tuple[Hashable, ...]:
        """What makes the entries of a cache, and by which they are found."""
        model = self.arrays[0]
        return weakref.ref(model), attention(model)

    @functools.cached_property
    def _images(self) -> list[str]:
        """The digests of the images of each request."""
        return [""] if self.pixels is None else [digest(one) for one in self.pixels]

    def make(self, segments: Sequence[plans.Segment]) -> None:
        """Makes all programs of a plan side by side."""
        trips = {trip.program: trip for part in segments for trip in self.begun.trips(part)}
        make(self.calls([*trips.values()]), 2 * len(self.parts) + 2 + len(trips))


def begin(
    model: Denoiser,
    examples: Sequence[Example],
    segments: list[plans.Segment],
    *,
    content_cache: ContentCache | None = None,
    **how: Any,
) -> Begun:
    """Lays a batch out (`prepared`), and passes its prompts."""
    most = None if content_cache is None else content_cache.most_bytes
    batch = prepared(model, examples, segments, most_kept=most, **how)
    if not segments:
        return batch.begun
    with _over_mesh(model):
        alone = jax.sharding.get_abstract_mesh().empty
        if alone and side_by_side.are_made_ahead():
            batch.make(segments)
        state = finish(batch.calls(cache=content_cache if most else None), Call.__call__)
        return dataclasses.replace(batch.begun, state=state)


def prepared(
    model: Denoiser,
    examples: Sequence[Example],
    segments: list[plans.Segment],
    *,
    settings: StepSettings,
    prompt_len: tuple[int, int] = (0, 0),
    prompt: Prompt | None = None,
    most_kept: int | None = None,
    making: str = "",
    in_trips: bool | None = None,
) -> Prepared:
    """Lays a batch out (`sample`), unless that was done already; no program of the model runs.

    Args:
        model: arrays, or their types.
        most_kept: bytes that a `ContentCache` may keep: images are then encoded, and rows that
            requests share are passed, by themselves, even if it keeps none. None: without one.
    """
    canvas, given = _first_canvas(examples, _mask_id(model.settings, settings.kind))
    if segments and segments[0].decode.shape[1] != len(examples):
        raise ValueError(
            f"the plan is for {segments[0].decode.shape[1]} rows, got {len(examples)} requests."
        )
    rows = rows_of(examples, settings, making)
    program = program_of(settings, greedy=not np.any(rows.temperature))
    if not segments:
        return Prepared(Begun(canvas, None, program, None), ())
    if prompt is None:
        prompt = prepare(examples, model.settings, settings, prompt_len)
    if in_trips is None:
        in_trips = side_by_side.are_made_ahead()
    decoded_at = np.where(given, GIVEN_BLOCK, NOT_DECODED).astype(np.int32)
    implementation = implementation_of(model.settings)
    multiple = query_multiple(implementation) if settings.uses_cache else 1
    segments = [_in_groups(segment, settings, multiple) for segment in segments]
    room = capacity(prompt, segments, settings, _slot_multiple(implementation))
    reach = {}
    if settings.uses_cache and not in_trips and not takes_tables(implementation):
        reach = _read_slots(prompt, segments, settings, room[settings.kind == "image"])
    parts, pixels = [], None
    with _over_mesh(model):
        # Over a mesh, rows are split over devices; parts with few rows could not be.
        if jax.sharding.get_abstract_mesh().empty:
            if settings.caches_prompt:
                parts = parted(prompt, settings.guidance_rows, keeping=most_kept is not None)
            elif not settings.uses_cache:
                shapes = guidance_shapes(prompt, settings.guidance_rows)
                program = dataclasses.replace(program, shapes=shapes)
            pixels = None if most_kept is None else prompt.pixels
    kept_parts = frozenset(
        number
        for number, part in enumerate(parts)
        if prompt_bytes(model.settings, part.prompt, settings.kind) <= (most_kept or 0)
    )
    if pixels is not None:
        prompt = dataclasses.replace(prompt, pixels=None)
    on_device, rows = jax.device_put((prompt, rows))
    begun = Begun(canvas, on_device, program, None, reach, in_trips, multiple)
    return Prepared(begun, (model, canvas, decoded_at, rows), parts, room, kept_parts, pixels)


def _in_groups(segment: plans.Segment, settings: StepSettings, multiple: int) -> plans.Segment:
    return plans.in_groups(segment, num_registers(segment, settings), multiple)


def _read_slots(
    prompt: Prompt, segments: list[plans.Segment], settings: StepSettings, room: int
) -> dict[int, int]:
    """Returns `Begun.reach` for a region of `room` slots."""
    unit = READ_SLOTS
    if settings.kind == "text":
        unit = max(4 * unit, -(-room // TEXT_LENGTHS))
    used = zip(segments, reaches(prompt, segments, settings), strict=True)
    read = {int(segment.block[0]): -(-slots // unit) * unit for segment, slots in used}
    return {block: slots for block, slots in read.items() if slots < room}


def _first_canvas(
    examples: Sequence[Example], mask_id: int
) -> tuple[Int[np.ndarray, "b l g"], Bool[np.ndarray, "b l"]]:
    """Returns the initial responses, and which of their tokens are known."""
    lengths = sorted({len(example.given) for example in examples})
    if len(lengths) > 1:
        raise ValueError(
            f"requests of one batch have one response length, got {lengths}: sample them apart."
        )
    given = np.stack([example.given for example in examples])
    tokens = np.stack([example.response for example in examples])
    return np.where(given[..., None], tokens, mask_id).astype(np.int32), given


def _over_mesh(model: Denoiser) -> contextlib.AbstractContextManager:
    """Returns the context in which programs see the mesh of the parameters, if there is one."""
    alone = jax.device_count() == 1
    return contextlib.nullcontext() if alone else mesh_in_use(model)


def advance(
    model: Denoiser,
    begun: Begun,
    state: SamplerState,
    segment: plans.Segment,
    *,
    draws: Draws | None = None,
) -> SamplerState:
    """Runs the steps of a segment (`sample`) with the `draws` of these steps."""
    for trip in begun.trips(segment):
        recorded = {}
        if draws is not None:
            recorded["draws"] = jax.tree.map(lambda x, own=trip.own: x[own], draws)
        with _over_mesh(model):
            state = run_segment(model, state, trip.steps, begun.prompt, **trip.options, **recorded)
    return state
