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
from collections.abc import Generator, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

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
from sparse_lavida_jax.programs.kept import Call
from sparse_lavida_jax.sampling import plans
from sparse_lavida_jax.sampling.content_cache import ContentCache, digest, num_tokens, row_digests
from sparse_lavida_jax.sampling.presets import StepSettings
from sparse_lavida_jax.sampling.prompts import (
    LaidOut,
    Prompt,
    PromptPart,
    batched,
    guidance_shapes,
    padded_lengths,
    parted,
)
from sparse_lavida_jax.sampling.state import (
    NOT_DECODED,
    Features,
    SamplerState,
    StepTokens,
    apart,
    capacity,
    decodes,
    gather,
    num_registers,
    own_len,
    pass_prompt,
    prefill,
    prompt_bytes,
    reaches,
    rows_of,
    see,
)
from sparse_lavida_jax.sequence import Kind, SeenBatch
from sparse_lavida_jax.tags import GIVEN_BLOCK

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
        mask_ids: by the kind of the response.
    """

    settings: config.Model
    attention: str
    step: str
    slot_multiple: int
    query_multiple: int
    takes_tables: bool
    mask_ids: dict[Kind, int]

    @classmethod
    def of(cls, model: Denoiser) -> "ModelConstants":
        """Finds them for a model, or for one of types."""
        settings, attention = model.settings, implementation_of(model.settings)
        kernel = slot_multiple(attention), query_multiple(attention), takes_tables(attention)
        masks: dict[Kind, int] = {"text": settings.text_mask_id, "image": settings.image_mask_id}
        return cls(settings, attention, step_implementation_of(model), *kernel, masks)


@dataclasses.dataclass(frozen=True)
class Begun:
    """A batch after its prefill.

    Attributes:
        canvas: the initial responses, on the host.
        prompt: on the device.
        program: the key of the compiled programs.
        state: None if nothing is left to decode.
        reach: by the first step of a phase: the slots that it reads, if these are not all.
        in_trips: see `sample.sample`.
        multiple: of the tokens that a step passes.
    """

    canvas: Int[np.ndarray, "b l g"]
    prompt: Prompt | None
    program: StepSettings
    state: SamplerState | None
    reach: dict[int, int] = dataclasses.field(default_factory=dict)
    in_trips: bool = False
    multiple: int = 1

    def trips(
        self, phase: plans.Phase, start: int = 0, stop: int | None = None
    ) -> Iterator["Trip"]:
        """Yields the calls of `run_phase` for a phase, or some of its steps."""
        phase = _in_groups(phase, self.program, self.multiple)
        settings = dataclasses.replace(
            self.program,
            guided=bool(phase.guided[0]),
            refreshing=bool(phase.refresh[0]),
            num_registers=num_registers(phase, self.program),
            reach=self.reach.get(int(phase.block[0])),
        )
        steps, end = StepTokens.of(phase), phase.num_steps if stop is None else stop
        if not self.in_trips:
            part = jax.tree.map(lambda x: x[start:end], steps)
            yield Trip(np.arange(start, end), part, {"settings": settings})
            return
        for first in range(start, end, STEPS):
            # The last step is repeated to fill the program, and not run again.
            own = np.minimum(np.arange(first, first + STEPS), end - 1)
            number = np.int32(min(STEPS, end - first))
            part = jax.tree.map(lambda x, own=own: np.asarray(x)[own], steps)
            yield Trip(own, part, {"settings": settings, "number": number})


@dataclasses.dataclass(frozen=True)
class Trip:
    """A call of `run_phase`: the numbers of its steps in the phase, the steps, and options."""

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
        constants: of the model.
        arrays: the model, the canvas, when it was decoded, and the values of its rows.
        parts: of the prompt, which are passed one by one; none or one: it is passed as a whole.
        room: slots of the two regions of the cache.
        kept: the indices of the parts whose rows may be kept.
        pixels: of the images, if they are encoded by themselves; else they are in the prompt.
    """

    begun: Begun
    constants: ModelConstants
    arrays: tuple = ()
    parts: Sequence[PromptPart] = ()
    room: tuple[int, int] = (0, 0)
    kept: frozenset[int] = frozenset()
    pixels: SeenBatch | None = None

    def calls(self, cache: ContentCache | None = None) -> Generator[Call, Any, SamplerState]:
        """Yields the calls of the prefill; is sent the result, or its type, of each.

        Args:
            cache: what is found there is not called for.

        Returns:
            The state before the first step.
        """
        program, prompt = self.begun.program, self.begun.prompt
        assert prompt is not None
        if len(self.parts) <= 1 and not self.kept:
            return (yield (yield from self._passed(None, cache)))
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
        return (yield Call(gather, (*self.arrays, tuple(caches)), joining))

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
        return weakref.ref(self.arrays[0]), self.constants.attention, self.constants.step

    @functools.cached_property
    def _images(self) -> list[str]:
        """The digests of the images of each request."""
        return [""] if self.pixels is None else [digest(one) for one in self.pixels]


def prepared(
    model: Denoiser,
    laid: Sequence[LaidOut],
    phases: list[plans.Phase],
    *,
    settings: StepSettings,
    prompt_len: tuple[int, int] = (0, 0),
    most_kept: int | None = None,
    making: str = "",
    in_trips: bool | None = None,
    constants: ModelConstants | None = None,
) -> Prepared:
    """Makes the arrays of a batch (`sample.sample`); no program of the model runs.

    Args:
        model: arrays, or their types.
        laid: its rows.
        most_kept: bytes that a `ContentCache` may keep: images are then encoded, and rows that
            requests share are passed, by themselves, even if it keeps none. None: without one.
        constants: of the model; None: they are found.
    """
    constants = constants or ModelConstants.of(model)
    canvas, given = first_canvas(laid, constants.mask_ids[settings.kind])
    if phases and phases[0].decode.shape[1] != len(laid):
        raise ValueError(
            f"the plan is for {phases[0].decode.shape[1]} rows, got {len(laid)} requests."
        )
    rows = rows_of(laid, settings, making)
    program = dataclasses.replace(settings, greedy=not np.any(rows.temperature))
    if not phases:
        return Prepared(Begun(canvas, None, program, None), constants)
    prompt = batched(laid, constants.settings, prompt_len)
    if in_trips is None:
        in_trips = side_by_side.are_made_ahead()
    decoded_at = np.where(given, GIVEN_BLOCK, NOT_DECODED).astype(np.int32)
    multiple = constants.query_multiple if settings.uses_cache else 1
    phases = [_in_groups(phase, settings, multiple) for phase in phases]
    room = capacity(prompt, phases, settings, constants.slot_multiple)
    reach = {}
    if settings.uses_cache and not in_trips and not constants.takes_tables:
        reach = _read_slots(prompt, phases, settings, room[settings.kind == "image"])
    parts, pixels = [], None
    with over_mesh(model):
        # Over a mesh, rows are split over devices; parts with few rows could not be.
        if jax.sharding.get_abstract_mesh().empty:
            if settings.caches_prompt:
                keeping = most_kept is not None
                apart = keeping and keeps_rows_apart()
                parts = parted(prompt, settings.guidance_rows, keeping=keeping, apart=apart)
            elif not settings.uses_cache:
                shapes = guidance_shapes(prompt, settings.guidance_rows)
                program = dataclasses.replace(program, shapes=shapes)
            pixels = None if most_kept is None else prompt.pixels
    kept_parts = frozenset(
        number
        for number, part in enumerate(parts)
        if prompt_bytes(constants.settings, part.prompt, settings.kind) <= (most_kept or 0)
    )
    if pixels is not None:
        prompt = dataclasses.replace(prompt, pixels=None)
    on_device, rows = jax.device_put((prompt, rows))
    begun = Begun(canvas, on_device, program, None, reach, in_trips, multiple)
    arrays = model, canvas, decoded_at, rows
    return Prepared(begun, constants, arrays, parts, room, kept_parts, pixels)


def keeps_rows_apart() -> bool:
    """Whether each guidance row is passed, and found, by itself if rows are kept.

    On a CPU, rows of one shape are passed together: passed alone, their bits would be others.
    """
    return jax.default_backend() != "cpu"


def _in_groups(phase: plans.Phase, settings: StepSettings, multiple: int) -> plans.Phase:
    if multiple == 1:
        return phase
    return plans.in_groups(phase, num_registers(phase, settings), multiple)


def _read_slots(
    prompt: Prompt, phases: list[plans.Phase], settings: StepSettings, room: int
) -> dict[int, int]:
    """Returns `Begun.reach` for a region of `room` slots."""
    unit = READ_SLOTS
    if settings.kind == "text":
        unit = max(4 * unit, -(-room // TEXT_LENGTHS))
    used = zip(phases, reaches(prompt, phases, settings), strict=True)
    read = {int(phase.block[0]): -(-slots // unit) * unit for phase, slots in used}
    return {block: slots for block, slots in read.items() if slots < room}


def first_canvas(
    laid: Sequence[LaidOut], mask_id: int
) -> tuple[Int[np.ndarray, "b l g"], Bool[np.ndarray, "b l"]]:
    """Returns the initial responses, and which of their tokens are known."""
    lengths = sorted({len(one.example.given) for one in laid})
    if len(lengths) > 1:
        raise ValueError(
            f"requests of one batch have one response length, got {lengths}: sample them apart."
        )
    given = np.stack([one.example.given for one in laid])
    tokens = np.stack([one.example.response for one in laid])
    return np.where(given[..., None], tokens, mask_id).astype(np.int32), given


def over_mesh(model: Denoiser) -> contextlib.AbstractContextManager:
    """Returns the context in which programs see the mesh of the parameters, if there is one."""
    alone = jax.device_count() == 1
    return contextlib.nullcontext() if alone else mesh_in_use(model)


def mask_id_of(model: config.Model, kind: Kind) -> int:
    return model.text_mask_id if kind == "text" else model.image_mask_id
