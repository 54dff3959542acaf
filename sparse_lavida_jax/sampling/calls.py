# SPDX-License-Identifier: Apache-2.0
"""The calls of compiled programs that a batch consists of: those of its prefill, and of its steps.

A prompt is passed all at once, or in parts of one shape each; what was passed for an earlier batch
is found in a `ContentCache`. Calls are yielded, not made, so that their programs can be compiled
side by side before the first one runs.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import config
from sparse_lavida_jax.kernels.attention import (
    mesh_in_use,
    query_multiple,
    slot_multiple,
    takes_tables,
)
from sparse_lavida_jax.models.cache import KVCache
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.stack import implementation_of, step_implementation_of
from sparse_lavida_jax.programs import side_by_side
from sparse_lavida_jax.programs.persistent_jit import Call, finish, make
from sparse_lavida_jax.sampling import plans
from sparse_lavida_jax.sampling.content_cache import ContentCache, digest, num_tokens, row_digests
from sparse_lavida_jax.sampling.plans import Steps
from sparse_lavida_jax.sampling.presets import StepSettings
from sparse_lavida_jax.sampling.prompts import (
    Prompt,
    PromptPart,
    SampleInput,
    batched,
    lengths_of,
    padded_lengths,
    parted,
)
from sparse_lavida_jax.sampling.state import (
    NOT_DECODED,
    Features,
    Prompts,
    Rows,
    SamplerState,
    apart,
    capacity,
    draw_styles,
    first_responses,
    forked,
    gather,
    keys_from,
    pass_prompt,
    prefill,
    prompt_bytes,
    rows_of,
    see,
)
from sparse_lavida_jax.sequence import RESPONSE_STREAM, Modality, SeenBatch
from sparse_lavida_jax.tags import GIVEN_BLOCK, STREAMS
from sparse_lavida_jax.visibility import AnyArray

# The most steps of one call of a program, which takes their number as an argument. So requests with
# any number of steps share one program for each width. On CPUs a program holds just the steps of
# its phase.
STEPS = 16

# Without a kernel that skips empty slots, a phase on a CPU reads the cache up to a multiple of so
# many slots. Texts, whose blocks share a program if they read the same length, have at most so many
# lengths.
READ_SLOTS, TEXT_LENGTHS = 16, 8


@dataclasses.dataclass(frozen=True)
class ModelConstants:
    """What no request changes of a loaded model: what computes it here, and what that needs.

    Attributes:
        attention, step: the implementations of attention and of steps (`models.stack`).
        slot_multiple, query_multiple: what cache slots, and tokens of a step, are padded to.
        takes_tables: whether attention runs over listed tiles.
        mask_ids: by the modality of the response.
    """

    settings: config.Model
    attention: str
    step: str
    slot_multiple: int
    query_multiple: int
    takes_tables: bool
    mask_ids: dict[Modality, int]

    @classmethod
    def of(cls, model: Denoiser) -> "ModelConstants":
        """Returns those of a model, whose arrays may be only types."""
        settings, attention = model.settings, implementation_of(model.settings)
        kernel = slot_multiple(attention), query_multiple(attention), takes_tables(attention)
        masks: dict[Modality, int] = {
            "text": settings.text_mask_id,
            "image": settings.image_mask_id,
        }
        return cls(settings, attention, step_implementation_of(model), *kernel, masks)


@dataclasses.dataclass(frozen=True)
class PrefilledBatch:
    """A batch after its prefill.

    Attributes:
        responses: the initial responses, on the host.
        prompts: what steps need of them, on the device.
        settings: of the steps, compiled in.
        state: None if nothing is left to decode.
        phases: the steps, padded to what the kernels need.
        split_phases: see `sample.sample`.
    """

    responses: Int[np.ndarray, "b l g"]
    prompts: Prompts
    settings: StepSettings
    state: SamplerState | None
    phases: Sequence[Steps] = ()
    split_phases: bool = False

    def phase_calls(self, phase: Steps, draws: Any = None) -> Iterator["PhaseCall"]:
        """Yields the calls of `sample.run_phase` for a phase.

        Args:
            draws: recorded random numbers of its steps (`draw.Draws`); None: there are none.
        """
        end, options = len(phase.block), dict[str, Any](settings=self.settings)
        if draws is not None:
            options["draws"] = draws
        if not self.split_phases:
            yield PhaseCall(phase, options)
            return
        for start in range(0, end, STEPS):
            # The last step is repeated to fill the program, and not run again.
            own = np.minimum(np.arange(start, start + STEPS), end - 1)
            options["number"] = np.int32(min(STEPS, end - start))
            if draws is not None:
                options["draws"] = jax.tree.map(lambda x, own=own: x[own], draws)
            yield PhaseCall(phase[own], {**options})


@dataclasses.dataclass(frozen=True)
class PhaseCall:
    """A call of `sample.run_phase`: steps of a phase, and options."""

    steps: Steps
    options: dict[str, Any]

    @property
    def shapes(self) -> Hashable:
        """What its compiled program depends on, within a batch."""
        leaves, structure = jax.tree.flatten(self.steps)
        return tuple(x.shape for x in leaves), structure


class BatchArrays(NamedTuple):
    """What every program of a batch starts from."""

    model: Denoiser
    responses: Int[AnyArray, "b l g"]
    decoded_at: Int[AnyArray, "b l"]
    rows: Rows


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A batch laid out, before its prefill.

    Attributes:
        batch: as it is before its prefill, without a state.
        constants: of the model.
        arrays: what every program starts from.
        parts: of the prompt, each of one shape.
        one_by_one: whether each part is passed by itself, before the first step.
        prompt_len: slots of the decoded stream's prompt in the longest part.
        room: slots of the two regions of the cache.
        kept: the indices of the parts whose rows may be kept.
        pixels: of the images, if they are encoded by themselves; else they are in the prompt.
        style: what `state.draw_styles` takes after the model; None: no row has a style code.
    """

    batch: PrefilledBatch
    constants: ModelConstants
    arrays: BatchArrays
    parts: Sequence[PromptPart] = ()
    one_by_one: bool = False
    prompt_len: int = 0
    room: tuple[int, int] = (0, 0)
    kept: frozenset[int] = frozenset()
    pixels: SeenBatch | None = None
    style: tuple[Any, ...] | None = None

    def passed(
        self, run_phase: Callable[..., Any], cache: ContentCache | None, until: int = NOT_DECODED
    ) -> PrefilledBatch:
        """Runs the prefill; where programs are made ahead, makes those of the steps with it.

        Args:
            until: the block before which steps are going to be run.
        """
        model, batch = self.arrays.model, self.batch
        with over_mesh(model):
            if jax.sharding.get_abstract_mesh().empty and side_by_side.are_made_ahead():
                phases = [phase for phase in batch.phases if phase.block[0] < until]
                phase_calls = {
                    call.shapes: call for part in phases for call in batch.phase_calls(part)
                }
                calls = self.all_calls(run_phase, [*phase_calls.values()])
                make(calls, 2 * len(self.parts) + 2 + len(phase_calls))
            state = finish(self.calls(cache), Call.__call__)
        return dataclasses.replace(batch, state=state)

    def forked(self, state: SamplerState) -> PrefilledBatch:
        """Returns the batch with rows that all go on from the state of one row."""
        with over_mesh(self.arrays.model):
            copies = forked(state, self.arrays.rows, copies=len(self.batch.responses))
        return dataclasses.replace(self.batch, state=copies)

    def all_calls(
        self, run_phase: Callable[..., Any], phase_calls: Sequence[PhaseCall]
    ) -> Generator[Call, Any, SamplerState]:
        """Yields the calls of the prefill and of phases; is sent the result, or type, of each.

        Returns:
            The state after the last call.
        """
        state = yield from self.calls()
        for call in phase_calls:
            given = self.arrays.model, state, call.steps, self.batch.prompts
            state = yield Call(run_phase, given, call.options)
        return state

    def calls(self, cache: ContentCache | None = None) -> Generator[Call, Any, SamplerState]:
        """Yields the calls of the prefill; is sent the result, or its type, of each.

        Args:
            cache: what is found there is not called for.

        Returns:
            The state before the first step.
        """
        state = yield from self._prefill(cache)
        if self.style is None:
            return state
        style = yield Call(draw_styles, (self.arrays.model, *self.style), {})
        return dataclasses.replace(state, rows=dataclasses.replace(state.rows, style=style))

    def _prefill(self, cache: ContentCache | None) -> Generator[Call, Any, SamplerState]:
        """Yields the calls that fill the cache with the prompt; returns the state after them."""
        if not self.one_by_one and not self.kept:
            return (yield (yield from self._pass(self.parts[-1], cache)))
        caches, first = [], []
        for number, part in enumerate(self.parts):
            keeps = number in self.kept
            caches.append((yield from self._rows(part, keeps, cache)))
            first += [part.first + i for i in range(keeps * len(part.prompt.length) or 1)]
        joining = {
            "first": tuple(first),
            "modality": self.batch.settings.modality,
            "capacity": self.room,
            "prompt_len": self.prompt_len,
        }
        return (yield Call(gather, (*self.arrays, tuple(caches)), joining))

    def _rows(
        self, part: PromptPart, keeps: bool, cache: ContentCache | None
    ) -> Generator[Call, Any, KVCache | tuple[KVCache, ...]]:
        """Returns the cache of a part; if its rows are kept, that of each: found, or new ones."""
        if not keeps:
            return (yield (yield from self._pass(part, cache)))
        names, rows, prompt = [], None, part.prompt
        if cache is not None:
            how = *self._by, len(prompt.length), *self._pass_options.items()
            names = [(*how, one) for one in row_digests(prompt, self._images)]
            rows = cache.get("prefill", names, num_tokens(prompt))
        if rows is None:
            passed = yield (yield from self._pass(part, cache))
            rows = (passed,)
            if len(prompt.length) > 1 or not self.one_by_one:
                rows = yield Call(apart, (passed,), {"lengths": padded_lengths(prompt)})
            if cache is not None:
                cache.add("prefill", names, rows)
        return rows

    def _pass(self, part: PromptPart, cache: ContentCache | None) -> Generator[Call, Any, Call]:
        """Returns the call that passes a part: into a cache of its own if there are others."""
        (model, *_), prompt, seen = self.arrays, part.prompt, {}
        if self.pixels is not None and prompt.pixels is not None:
            prompt = dataclasses.replace(prompt, pixels=None)
            seen = {"features": (yield from self._features(cache))}
        given = (model, prompt) if self.one_by_one else (*self.arrays, prompt)
        return Call(pass_prompt if self.one_by_one else prefill, given, self._pass_options | seen)

    def _features(self, cache: ContentCache | None) -> Generator[Call, Any, Features]:
        """Returns the vision features of each request: kept ones if all are there."""
        names = (
            [] if cache is None else [(*self._by, len(self._images), one) for one in self._images]
        )
        found = None if cache is None else cache.get("vision", names)
        if found is None:
            found = yield Call(see, (self.arrays.model, self.pixels), {})
            if cache is not None:
                cache.add("vision", names, found)
        return found

    @property
    def _pass_options(self) -> dict[str, Any]:
        """The options of the call that passes a part."""
        if self.one_by_one:
            return {"modality": self.batch.settings.modality}
        return {"settings": self.batch.settings, "capacity": self.room}

    @functools.cached_property
    def _by(self) -> tuple[Hashable, ...]:
        """What makes the entries of a cache, and by which they are found."""
        return weakref.ref(self.arrays.model), self.constants.attention, self.constants.step

    @functools.cached_property
    def _images(self) -> list[str]:
        """The digests of the images of each request."""
        return [""] if self.pixels is None else [digest(one) for one in self.pixels]


def prepared(
    model: Denoiser,
    inputs: Sequence[SampleInput],
    phases: list[Steps],
    *,
    settings: StepSettings,
    prompt_len: tuple[int, int] = (0, 0),
    most_kept: int | None = None,
    stage: str = "",
    split_phases: bool | None = None,
    constants: ModelConstants | None = None,
) -> Prepared:
    """Makes the arrays of a batch (`sample.sample`); no program of the model runs.

    Args:
        model: arrays, or their types.
        inputs: its rows.
        most_kept: bytes that a `ContentCache` may keep: images are then encoded, and rows that
            requests share are passed, by themselves, even if it keeps none. None: without one.
        constants: of the model; None: they are found.
    """
    constants = constants or ModelConstants.of(model)
    responses, given = first_responses(inputs, constants.mask_ids[settings.modality])
    if phases and phases[0].decode.shape[1] != len(inputs):
        raise ValueError(
            f"the plan is for {phases[0].decode.shape[1]} rows, got {len(inputs)} requests."
        )
    rows = rows_of(inputs, settings, stage)
    compiled_in = dataclasses.replace(settings, greedy=not np.any(rows.temperature))
    decoded_at = np.where(given, GIVEN_BLOCK, NOT_DECODED).astype(np.int32)
    if not phases:
        arrays = BatchArrays(model, responses, decoded_at, rows)
        return Prepared(PrefilledBatch(responses, (), compiled_in, None), constants, arrays)
    with over_mesh(model):
        alone = jax.sharding.get_abstract_mesh().empty
    keeping = alone and most_kept is not None
    parts = _parts(inputs, constants.settings, settings, prompt_len, keeping=keeping, alone=alone)
    if split_phases is None:
        split_phases = side_by_side.are_made_ahead()
    if settings.uses_cache and constants.query_multiple > 1:
        phases = [plans.in_groups(phase, constants.query_multiple) for phase in phases]
    lengths, own = lengths_of(inputs, prompt_len), STREAMS.index(RESPONSE_STREAM[settings.modality])
    room, used = capacity(lengths, phases, settings, constants.slot_multiple)
    if settings.uses_cache and not split_phases and not constants.takes_tables:
        phases = _reading_less(phases, used, settings.modality, room[own])
    kept_parts = frozenset(
        number
        for number, part in enumerate(parts)
        if keeping
        and settings.caches_prompt
        and prompt_bytes(constants.settings, part.prompt, settings.modality) <= (most_kept or 0)
    )
    on_device, rows = jax.device_put((_for_steps(parts, settings), rows))
    prefilled = PrefilledBatch(responses, on_device, compiled_in, None, phases, split_phases)
    arrays = BatchArrays(model, responses, decoded_at, rows)
    pixels, one_by_one = parts[-1].prompt.pixels, settings.caches_prompt and len(parts) > 1
    how = {"room": room, "kept": kept_parts, "pixels": pixels if keeping else None}
    how["style"] = styled(inputs, parts[-1].prompt)
    return Prepared(prefilled, constants, arrays, parts, one_by_one, lengths[own], **how)


def styled(inputs: Sequence[SampleInput], prompt: Prompt) -> tuple[Any, ...] | None:
    """Returns what `state.draw_styles` takes after the model; None: no row has a style code.

    Args:
        prompt: of any rows, whose last ones are the full rows of all inputs.
    """
    has_style = np.array([one.prompt_tokens.style > 0 for one in inputs])
    if not has_style.any():
        return None
    full = jax.tree.map(lambda x: x[-len(inputs) :], dataclasses.replace(prompt, pixels=None))
    requests = [one.request for one in inputs]
    values = max(1, *(len(one.style_code) for one in requests))
    fixed = np.array([one.style_code or (-1,) * values for one in requests], np.int32)
    keys = keys_from(requests, "style", 0)
    return dataclasses.replace(full, generation=None), keys, has_style, fixed


def _parts(
    inputs: Sequence[SampleInput],
    model: config.Model,
    settings: StepSettings,
    prompt_len: tuple[int, int],
    *,
    keeping: bool,
    alone: bool,
) -> list[PromptPart]:
    """Returns the prompt in parts that are passed one by one, in the prefill or in each step."""
    # Over a mesh, rows are split over devices; parts with few rows could not be.
    if not alone or (settings.uses_cache and not settings.caches_prompt):
        return [PromptPart(0, batched(inputs, model, prompt_len))]
    keeping = keeping and settings.caches_prompt
    apart = keeping and keeps_rows_apart()
    return parted(inputs, model, prompt_len, keeping=keeping, apart=apart)


def _for_steps(parts: Sequence[PromptPart], settings: StepSettings) -> Prompts:
    """Returns what steps need: where rows continue, and the streams unless they are cached."""
    if not settings.caches_prompt:
        return tuple(dataclasses.replace(part.prompt, pixels=None) for part in parts)
    position, length = (
        np.concatenate([getattr(part.prompt, name) for part in parts])
        for name in ("response_position", "length")
    )
    return (Prompt(None, None, None, position, length),)


def keeps_rows_apart() -> bool:
    """Whether each guidance row is passed, and found, by itself if rows are kept.

    On a CPU, rows of one shape are passed together: passed alone, their bits would be others.
    """
    return jax.default_backend() != "cpu"


def _reading_less(
    phases: list[Steps], used: list[int], modality: Modality, room: int
) -> list[Steps]:
    """Returns phases that read only the slots in use (`Steps.reach`) of a region of `room`."""
    unit = READ_SLOTS
    if modality == "text":
        unit = max(4 * unit, -(-room // TEXT_LENGTHS))
    slots = [-(-number // unit) * unit for number in used]
    return [
        dataclasses.replace(phase, reach=number if number < room else None)
        for phase, number in zip(phases, slots, strict=True)
    ]


def over_mesh(model: Denoiser) -> contextlib.AbstractContextManager:
    """Returns the context in which programs see the mesh of the parameters, if there is one."""
    alone = jax.device_count() == 1
    return contextlib.nullcontext() if alone else mesh_in_use(model)


def mask_id_of(model: config.Model, modality: Modality) -> int:
    return model.text_mask_id if modality == "text" else model.image_mask_id
