# SPDX-License-Identifier: Apache-2.0
"""The sampler: one prefill, then one jitted loop per phase (paper Sec. 3.2).

A host-side plan (`sampling/plans.py`) says which positions each step passes; consecutive steps of
equal width form a phase, and a phase is one compiled program: a loop over `step`. On
accelerators, it is called for up to 16 steps at a time (`calls.STEPS`). Within a call nothing
returns to Python and no shape changes. Image and text, every preset and
every ablation row run this same `step`; which tokens are passed and which are committed is data
(`sampling/presets.py`).

A plan decodes whole cells, or single codes of cells that are then partly known: the masked codes
are those that the response has the mask id for, and a token is decoded when all its codes are.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.stack import StepTables
from sparse_lavida_jax.programs.persistent_jit import persistent_jit
from sparse_lavida_jax.sampling import draw, plans
from sparse_lavida_jax.sampling.calls import (
    ModelConstants,
    PrefilledBatch,
    mask_id_of,
    over_mesh,
    prepared,
)
from sparse_lavida_jax.sampling.content_cache import ContentCache
from sparse_lavida_jax.sampling.draw import Draws
from sparse_lavida_jax.sampling.forward import step_hidden, step_logits, tables_ahead
from sparse_lavida_jax.sampling.loop import PhaseLoop
from sparse_lavida_jax.sampling.plans import Steps
from sparse_lavida_jax.sampling.presets import StepSettings
from sparse_lavida_jax.sampling.progress import Callback, ProgressReporter
from sparse_lavida_jax.sampling.prompts import SampleInput
from sparse_lavida_jax.sampling.state import (
    NOT_DECODED,
    Prompts,
    SamplerState,
    attention,
    cut_at_end,
    open_codes,
)
from sparse_lavida_jax.tags import FIRST_BLOCK, AnyArray

OWN_DRAWS = Draws()  # drawn here, not read from a record


def step(
    model: Denoiser,
    state: SamplerState,
    now: Steps,
    prompts: Prompts,
    *,
    settings: StepSettings,
    draws: Draws = OWN_DRAWS,
    tables: StepTables | None = None,
) -> SamplerState:
    """One denoising step: passes the tokens of `now`, draws the candidates, commits some.

    The body of the phase loop, for image and text and for every preset.

    Args:
        draws: where random numbers come from.
        tables: for attention, if they were made before the loop (`forward.tables_ahead`).
    """
    if settings.head_tile:
        hidden, cache = step_hidden(model, state, now, prompts, settings, tables)
        proposal = draw.draw_by_tiles(model, hidden, state.rows, now, settings)
    elif settings.modality == "image" and model.settings.sequential_codes:
        hidden, cache = step_hidden(model, state, now, prompts, settings, tables)
        proposal = draw.draw_in_turn(model, hidden, state.rows, now, settings, draws)
    else:
        logits, cache = step_logits(model, state, now, prompts, settings, tables)
        proposal = draw.draw_from(logits, state.rows, now, model.settings, settings, draws)
    mask_id = mask_id_of(model.settings, settings.modality)
    known, masked, candidate = open_codes(state, now, mask_id)
    confidence = draw.confidences(state.rows.key, now, proposal, settings.commit, draws)
    commit = masked & settings.commit(confidence, candidate, now.count)
    codes = jnp.where(commit, proposal.codes, known)
    changed = commit.any(axis=-1)
    finished = changed & (codes != mask_id).all(axis=-1)
    # Positions outside the response are dropped by the scatter.
    outside = state.responses.shape[1]
    rows = jnp.arange(codes.shape[0])[:, None]
    at, done = (jnp.where(where, now.decode, outside) for where in (changed, finished))
    return dataclasses.replace(
        state,
        responses=state.responses.at[rows, at].set(codes, mode="drop"),
        decoded_at=state.decoded_at.at[rows, done].set(now.block, mode="drop"),
        cache=cache,
        passes=state.passes + 1,
    )


@persistent_jit(static=("settings",), donate=("state",), depends=attention)
def run_phase(
    model: Denoiser,
    state: SamplerState,
    phase: Steps,
    prompts: Prompts,
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
    num_steps = phase.block.shape[0]
    asked = num_steps if number is None else number
    ahead = tables_ahead(model, state, phase, prompts, settings)

    def body(i, state):
        drawn, tables = jax.tree.map(lambda x: x[i], (draws, ahead))
        how = {"settings": settings, "draws": drawn, "tables": tables}
        return step(model, state, phase[i], prompts, **how)

    if not settings.commit.ends_early:
        return jax.lax.fori_loop(0, asked, body, state)

    def goes_on(carry):
        i, state = carry
        now = phase[jnp.minimum(i, num_steps - 1)]
        *_, candidate = open_codes(state, now, mask_id_of(model.settings, settings.modality))
        return (i < asked) & candidate.any()

    return jax.lax.while_loop(goes_on, lambda c: (c[0] + 1, body(*c)), (jnp.int32(0), state))[1]


def sample(
    model: Denoiser,
    inputs: Sequence[SampleInput],
    phases: list[Steps],
    *,
    settings: StepSettings,
    prompt_len: tuple[int, int] = (0, 0),
    stop_early: bool = True,
    callback: Callback | None = None,
    last: Callable[[AnyArray, AnyArray], None] | None = None,
    stage: str = "",
    shared: int = 0,
    draws: Draws | None = None,
    split_phases: bool | None = None,
    content_cache: ContentCache | None = None,
    constants: ModelConstants | None = None,
) -> Int[np.ndarray, "b l g"]:
    """Samples a batch of examples of one modality and one response length.

    Args:
        inputs: the examples, laid out for the same `settings` (`prompts.sample_input`).
        phases: the plan (`presets.plan`), a row for each example.
        prompt_len: smallest padded lengths of the two streams, so that batches share programs.
        stop_early: for text, skip phases once every row has an end-of-text after everything
            given, with all tokens before it decoded (never with `settings.released`).
        callback: called before the first step and after each phase, for which the host then
            waits; without one, it starts each phase while the previous one runs.
        last: called with the responses and `decoded_at` after the last step, before what follows
            the end of a text is replaced.
        stage: what is made, a key of `state.NOISE`, which gives it noise of its own; also
            passed to `callback`. By default the modality.
        shared: the steps before this one (`presets.Turn`) are the same in all rows: they are passed
            for the first row alone, and its state is copied.
        draws: recorded random numbers for every step of the plan.
        split_phases: whether phases run in programs of `calls.STEPS` steps; by default not on CPUs.
        content_cache: keeps features of images and rows of prompts for later batches.
        constants: of the model; None: they are found.

    Returns:
        The responses.

    Raises:
        ValueError: the examples differ in response length, or the plan is for another batch.
    """
    constants = constants or ModelConstants.of(model)
    report, mask_id = None, constants.mask_ids[settings.modality]
    if callback is not None:
        report = ProgressReporter(callback, stage, phases, settings, mask_id)
        report.before(inputs)
    how = {"prompt_len": prompt_len, "stage": stage, "split_phases": split_phases}
    how |= {"settings": settings, "constants": constants, "content_cache": content_cache}
    ends, end = (
        settings.modality == "text" and not settings.released,
        constants.settings.end_of_text_id,
    )
    stops_at = end if stop_early and ends else None
    loop = PhaseLoop(
        functools.partial(advance, model), stage or settings.modality, stops_at, report, draws
    )
    first = FIRST_BLOCK + shared
    if shared and phases:
        one = prefill_batch(model, inputs[:1], plans.first_row(phases), until=first, **how)
        how.pop("content_cache")
        laid_out = prepared(model, inputs, phases, **how)
        prefilled = laid_out.forked(loop.run(one, inputs[:1], range(FIRST_BLOCK, first)))
    else:
        prefilled = prefill_batch(model, inputs, phases, **how)
    if prefilled.state is None:  # everything is given
        return prefilled.responses
    state = loop.run(prefilled, inputs, range(first, NOT_DECODED))
    if last is not None:
        last(np.array(state.responses), np.asarray(state.decoded_at))
    return cut_at_end(state, end) if ends else np.array(state.responses)


def prefill_batch(
    model: Denoiser,
    inputs: Sequence[SampleInput],
    phases: list[Steps],
    *,
    content_cache: ContentCache | None = None,
    until: int = NOT_DECODED,
    **how: Any,
) -> PrefilledBatch:
    """Makes the arrays of a batch (`calls.prepared`), and passes its prompts.

    Args:
        until: the block before which steps are going to be run.
    """
    most = None if content_cache is None else content_cache.most_bytes
    laid_out = prepared(model, inputs, phases, most_kept=most, **how)
    cache = content_cache if most else None
    return laid_out.passed(run_phase, cache, until) if phases else laid_out.batch


def advance(
    model: Denoiser,
    prefilled: PrefilledBatch,
    state: SamplerState,
    phase: Steps,
    *,
    draws: Draws | None = None,
) -> SamplerState:
    """Runs the steps of a phase (`sample`) with the `draws` of these steps."""
    for call in prefilled.phase_calls(phase, draws):
        with over_mesh(model):
            state = run_phase(model, state, call.steps, prefilled.prompts, **call.options)
    return state
