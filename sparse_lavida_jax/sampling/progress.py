# SPDX-License-Identifier: Apache-2.0
"""What callers are told while a batch is sampled."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Int

from sparse_lavida_jax.sampling.plans import Steps
from sparse_lavida_jax.sampling.presets import StepSettings
from sparse_lavida_jax.sampling.prompts import PromptTokens, SampleInput
from sparse_lavida_jax.sampling.state import NOT_DECODED, SamplerState, first_responses
from sparse_lavida_jax.tags import GIVEN_BLOCK


@dataclasses.dataclass(frozen=True)
class Progress:
    """The state of a batch before its first step, or between two phases.

    Attributes:
        stage: what is being made: "layout", "image", "revision" or "text".
        steps, total: forward passes done so far, and in the whole plan.
        responses: ids or codes; `mask_id` where nothing is decoded yet.
        decoded_at: the block that decoded each token (`SamplerState`).
        blocks: those of the phase that has just ended; none before the first step.
        rows: request numbers of the first rows; any further rows fill the batch up.
        plan, settings: what each step passes.
        prompted: for each of `rows`, the tokens of its prompt.
    """

    stage: str
    steps: int
    total: int
    responses: Int[np.ndarray, "b l g"]
    decoded_at: Int[np.ndarray, "b l"]
    blocks: range
    mask_id: int
    rows: tuple[int, ...] = ()
    plan: Sequence[Steps] = ()
    settings: StepSettings | None = None
    prompted: tuple[PromptTokens, ...] = ()

    def after(self, block: int) -> Int[np.ndarray, "b l g"]:
        """Returns the responses as they were after a block, whole tokens at a time."""
        later = self.decoded_at > block
        return np.where(later[..., None], self.mask_id, self.responses)


Callback = Callable[[Progress], None]


@dataclasses.dataclass(frozen=True)
class ProgressReporter:
    """Calls a callback with the state of a batch.

    Attributes:
        stage: see `Progress`.
        phases: the whole plan.
    """

    callback: Callback
    stage: str
    phases: Sequence[Steps]
    settings: StepSettings
    mask_id: int

    def before(self, inputs: Sequence[SampleInput]) -> None:
        """Reports the responses before the first step."""
        responses, given = first_responses(inputs, self.mask_id)
        self._report(0, responses, np.where(given, GIVEN_BLOCK, NOT_DECODED), range(0))

    def after(self, phase: Steps, state: SamplerState) -> None:
        """Waits for a phase, and reports the responses after it; a single row stands for all."""
        blocks = range(int(phase.block[0]), int(phase.block[-1]) + 1)
        seen = jax.device_get((state.passes, state.responses, state.decoded_at))
        copies = self.phases[0].decode.shape[1] // len(seen[1])
        responses, decoded_at = (np.repeat(x, copies, axis=0) for x in seen[1:])
        self._report(int(seen[0]), responses, decoded_at, blocks)

    def _report(self, steps: int, responses, decoded_at, blocks: range) -> None:
        total = sum(len(phase.block) for phase in self.phases)
        done = self.stage, steps, total, responses, decoded_at, blocks, self.mask_id
        self.callback(Progress(*done, plan=self.phases, settings=self.settings))
