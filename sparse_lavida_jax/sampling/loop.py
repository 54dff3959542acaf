# SPDX-License-Identifier: Apache-2.0
"""The phases of a batch, one after another, with the noise that each takes."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from sparse_lavida_jax import runtime
from sparse_lavida_jax.programs.persistent_jit import persistent_jit
from sparse_lavida_jax.sampling import plans
from sparse_lavida_jax.sampling.calls import PrefilledBatch
from sparse_lavida_jax.sampling.draw import Draws
from sparse_lavida_jax.sampling.progress import ProgressReporter
from sparse_lavida_jax.sampling.prompts import SampleInput
from sparse_lavida_jax.sampling.state import SamplerState, has_ended, keys_from
from sparse_lavida_jax.tags import FIRST_BLOCK


@dataclasses.dataclass(frozen=True)
class PhaseLoop:
    """Runs phases on the host, and stops where every text has ended; see `sample.sample`.

    Attributes:
        advance: runs the steps of a phase (`sample.advance`, of a model).
        stage: what is made, a key of `state.NOISE`.
        stops_at: the id that ends a text; None: all phases are run.
    """

    advance: Callable[..., SamplerState]
    stage: str
    stops_at: int | None = None
    report: ProgressReporter | None = None
    draws: Draws | None = None

    def run(
        self, prefilled: PrefilledBatch, inputs: Sequence[SampleInput], blocks: range
    ) -> SamplerState:
        """Returns the state after the steps of some blocks.

        A phase is cut where the noise of a row turns to another seed (`presets.Turn`).

        Args:
            inputs: the rows of the batch.
        """
        state, ended = prefilled.state, None
        assert state is not None
        requests = [one.request for one in inputs]
        turns = {step for one in requests for step, _ in one.seeds(self.stage)} - {0}
        cuts = sorted({FIRST_BLOCK + step for step in turns} | {blocks.start, blocks.stop})
        for before, phase in plans.cut(prefilled.phases, cuts):
            block, own = int(phase.block[0]), slice(before, before + phase.num_steps)
            if block not in blocks:
                continue
            if turns:
                key = keys_from(requests, self.stage, block - FIRST_BLOCK)
                rows = dataclasses.replace(state.rows, key=key)
                state = dataclasses.replace(state, rows=rows)
            recorded = self.draws and jax.tree.map(lambda x, own=own: x[own], self.draws)
            state = self.advance(prefilled, state, phase, draws=recorded)
            if self.report is not None:
                self.report.after(phase, state)
            # One phase is started ahead, and no more, so that an interrupt is noticed early.
            jax.block_until_ready(ended)
            ended = _copy(state.passes)  # the next phase overwrites the state
            runtime.check_interrupt()
            if self.stops_at is not None and has_ended(state, self.stops_at):
                break
        return state


@persistent_jit()
def _copy(x: Array) -> Array:
    return jnp.copy(x)
