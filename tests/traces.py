# SPDX-License-Identifier: Apache-2.0
"""The sampler step by step, and what training computes for each of its states.

`moments` runs the complete sampler (prefill, cache, truncation) and records its states.
`training_logits` lays out the same states with `CorruptedRow` and `data.batch.stack`, as
in training, and runs the model once without a cache.
"""

import contextlib
import dataclasses
import functools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from sparse_lavida_jax import config, diffusion, orders, sample, sequence
from sparse_lavida_jax.data.corrupted_rows import Corrupted, CorruptedRow
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.sampling import calls, plans, presets
from sparse_lavida_jax.sampling.state import NOT_DECODED


@dataclasses.dataclass(frozen=True)
class Moment:
    """One step of the sampler: what it knew, and what it predicted.

    Attributes:
        block: number of the step.
        responses, decoded_at: the state before the step.
        masked: the tokens it predicts [b l].
        logits: guided logits [b l g v], 0 where nothing is predicted.
    """

    block: int
    responses: np.ndarray
    decoded_at: np.ndarray
    masked: np.ndarray
    logits: np.ndarray


def settings_of(
    preset: str, modality: sequence.Modality, model: config.Model, *, has_source=False, **changes
) -> tiny.StepSettings:
    """Returns step settings at temperature 0.8, so that draws differ from the modes."""
    hot = {"preset": preset, "temperature": 0.8, "text": {"temperature": 0.8}}
    asked = config.build(config.Sampling, hot | changes)
    return tiny.step_settings(asked, model, modality, has_source=has_source)


def plan(
    requests: list[Example],
    settings: presets.StepSettings,
    num_steps: int = 4,
    *,
    block_len: int = tiny.TEXT_BLOCK_LEN,
    cell_passes: int = 1,
    **options,
) -> list[plans.Steps]:
    """Returns the phases of a preset; for images, each row has its own stratified order.

    For text, there are `num_steps` steps per text block.
    """
    given = np.stack([request.given for request in requests])
    passes = {
        "passes_clean": "newest" if settings.preset.cache_response else "all",
        "passes_rest": not settings.preset.truncate,
    }
    if settings.modality == "text":
        parts = plans.text_plan(tiny.TEXT_LEN, block_len, num_steps, given, **passes)
        return [dataclasses.replace(part, registers=settings.num_registers) for part in parts]
    cells = np.stack([orders.order("stratified", 3, 3, one.request.seed) for one in requests])
    whole = plans.image_plan(cells, schedule="shift", num_steps=num_steps, shift=3.0, given=given)
    parts = plans.phases(whole, **passes, **({"max_phases": 1} | options))
    parts = [dataclasses.replace(part, registers=settings.num_registers) for part in parts]
    stored = settings.preset.cache_response
    return plans.in_passes(parts, cell_passes, side=2, clean_once=stored)


_prefill = tiny.quick_jit(
    functools.partial(calls.prefill), static_argnames=("settings", "capacity")
)
_pass_prompt = tiny.quick_jit(functools.partial(calls.pass_prompt), static_argnames=("modality",))
_gather = tiny.quick_jit(
    functools.partial(calls.gather),
    static_argnames=("first", "modality", "capacity", "prompt_len"),
)
_see = tiny.quick_jit(functools.partial(calls.see))
_apart = tiny.quick_jit(functools.partial(calls.apart), static_argnames=("lengths",))
_run_phase = tiny.quick_jit(functools.partial(sample.run_phase), static_argnames=("settings",))


def finished(
    model,
    requests: list[Example],
    phases: list[plans.Steps],
    settings: tiny.StepSettings,
    **options,
) -> np.ndarray:
    """Returns what `sample.sample` returns, compiled without optimisation."""
    settings = tiny.without_tiles(settings, options.get("draws"))
    with _patched(**_quick(), run_phase=_run_phase):
        inputs = tiny.sample_inputs(requests, model.settings, settings)
        return sample.sample(model, inputs, phases, settings=settings, **options)


def moments(
    model,
    requests: list[Example],
    phases: list[plans.Steps],
    settings: presets.StepSettings,
    **options,
) -> tuple[list[Moment], np.ndarray]:
    """Returns every step of `sample.sample`, and the finished responses."""
    steps = []

    def step_by_step(model, state, phase, prompts, *, settings):
        for i in range(len(phase.block)):
            now = step_of(phase, i)
            logits, after = _step(model, state, now, prompts, settings)
            if state.cache is not None:
                assert_room(state.cache, after.cache, now, prompts, settings)
            steps.append(_moment(state, now, logits))
            state = after
        return state

    with _patched(**_quick(), run_phase=step_by_step):
        inputs = tiny.sample_inputs(requests, model.settings, settings)
        responses = sample.sample(
            model, inputs, phases, settings=settings, stop_early=False, **options
        )
    return steps, responses


def step_of(stacked, i):
    """Returns one step, sliced on the host: on the device every slice would be a program."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[i]), stacked)


def _quick():
    own = {"prefill": _prefill, "pass_prompt": _pass_prompt, "gather": _gather}
    return own | {"see": _see, "apart": _apart}


@contextlib.contextmanager
def _patched(**functions):
    """Replaces functions of the sampler, in the module that calls them."""
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            owner = sample if hasattr(sample, name) else calls
            stack.enter_context(unittest.mock.patch.object(owner, name, function))
        yield


@functools.partial(tiny.quick_jit, static_argnames=("settings",))
def _step(model, state, now, prompts, settings):
    """Runs `sample.step`; returns the logits for its draws, and the state after it."""
    step_logits, seen = sample.step_logits, []

    def observed(*args):
        logits, cache = step_logits(*args)
        seen.append(logits)
        return logits, cache

    with _patched(step_logits=observed):
        after = sample.step(model, state, now, prompts, settings=settings)
    return seen[0], after


def assert_room(before, after, now, prompts, settings):
    """Fails if the step wrote past the end of the region it decodes into."""
    (prompt,) = prompts
    own = prompt.understanding if settings.modality == "text" else prompt.generation
    start, written = 0 if now.refreshes else int(before.offset), now.width
    kept = now.clean.shape[-1] if settings.preset.cache_response else 0
    if settings.passes_prompt(now) and own is not None:
        written += own.index.shape[1]
        kept += own.index.shape[1] * now.refreshes
    assert start + written <= before.split[0].shape[2]
    assert int(after.offset) == start + kept


def _moment(state, now, logits) -> Moment:
    responses, decoded_at, logits = (
        np.asarray(x) for x in (state.responses, state.decoded_at, logits)
    )
    masked = np.zeros(decoded_at.shape, bool)
    spread = np.zeros((*decoded_at.shape, *logits.shape[2:]), np.float32)
    for row, positions in enumerate(np.asarray(now.decode)):
        for slot, position in enumerate(positions):
            if position >= 0 and decoded_at[row, position] == NOT_DECODED:
                masked[row, position] = True
                spread[row, position] = logits[row, slot]
    return Moment(int(now.block), responses, decoded_at, masked, spread)


def training_logits(
    model,
    requests: list[Example],
    steps: list[Moment],
    settings: presets.StepSettings,
    *,
    with_rest: bool = False,
) -> list[np.ndarray]:
    """Returns what a training forward without cache predicts at each step, guided [b l g v].

    Args:
        with_rest: other masked tokens are in the masked block too (no truncation).
    """
    drops = {1: [(False, False)], 2: [(True, True), (False, False)]}.get(
        settings.guidance_rows, [(True, True), (True, False), (False, False)]
    )
    full = settings.preset.full_attention
    rows, pixels, starts = [], [], []
    for moment in steps:
        for drop_prompt, drop_source in drops:
            for r, request in enumerate(requests):
                prompt = tiny.sample_input(
                    request, model.settings, drop_prompt=drop_prompt, drop_source=drop_source
                )
                mask_id = model.settings.image_mask_id if settings.modality == "image" else None
                rows.append(
                    CorruptedRow(
                        prompt,
                        moment.responses[r],
                        settings.modality,
                        blocks_of(moment, r, with_rest, mask_id),
                        model.settings,
                        full_attention=full,
                    )
                )
                pixels.append(request.pixels)
                starts.append(prompt.response_position)
    batch = tiny.stacked(
        rows, model.settings, full_attention=full, pixels=sequence.stack_images(pixels)
    )
    logits = spread_logits(model, batch, settings.modality, starts, len(requests[0].given))
    logits = logits.reshape(len(steps), len(drops), len(requests), *logits.shape[1:])
    masked = np.stack([moment.masked for moment in steps])[..., None, None]
    return [guide(rows, settings) * seen for rows, seen in zip(logits, masked, strict=True)]


def blocks_of(moment: Moment, row: int, with_rest: bool, mask_id: int | None) -> diffusion.Blocks:
    """Returns the training blocks of the state before a step: N = 1.

    Args:
        mask_id: of codes; a masked cell may have some known codes.
    """
    decoded_at = moment.decoded_at[row]
    is_masked = decoded_at == NOT_DECODED
    masked = is_masked if with_rest else moment.masked[row]
    block = np.where(is_masked, diffusion.ABSENT, decoded_at)
    block = np.where(masked, moment.block, block).astype(np.int32)
    known = None if mask_id is None else masked[:, None] & (moment.responses[row] != mask_id)
    return diffusion.Blocks(
        block, masked, moment.block - 1, (moment.block,), masked.astype(float), 1.0, known
    )


def training_pass(model, batch: Corrupted):
    """Returns (text logits, image logits) of a training pass without cache."""
    features = None if batch.pixels is None else model.see(batch.pixels)
    hidden, _ = model(batch.understanding, batch.generation, features, wanted=batch.predicts)
    text = image = None
    if "understanding" in hidden:
        text = model.text_logits(hidden["understanding"])[:, :, None]
    if "generation" in hidden:
        image = model.image_logits(hidden["generation"])
    return text, image


forward = tiny.quick_jit(training_pass)


def spread_logits(
    model,
    batch: Corrupted,
    modality: sequence.Modality,
    starts: list[int],
    length: int,
) -> np.ndarray:
    """Returns logits [rows l g v] at the response tokens whose weight is not 0, 0 elsewhere.

    Args:
        starts: position of the first response token of each row.
    """
    text, image = forward(model, jax.tree.map(jnp.asarray, batch))
    logits = np.asarray(text if modality == "text" else image)
    stream = batch.understanding if modality == "text" else batch.generation
    weight = batch.text_weight if modality == "text" else batch.image_weight
    spread = np.zeros((len(starts), length, *logits.shape[2:]), np.float32)
    for row, start in enumerate(starts):
        held = weight[row] > 0
        slots = np.flatnonzero(held if held.ndim == 1 else held.any(axis=1))
        spread[row, stream.tags.position[row, slots] - start] = logits[row, slots]
    return spread


def guide(rows, settings: tiny.StepSettings):
    """Returns the guided logits: away from the unconditional row, away from the source-only row."""
    guided = rows[-1]
    if len(rows) == 3:
        guided = guided + settings.guidance_image * (guided - rows[1])
    if len(rows) > 1:
        guided = guided + settings.guidance * (guided - rows[0])
    return guided
