# SPDX-License-Identifier: Apache-2.0
"""The tokens of a request, counted from its plan: the one count behind every number of tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparse_lavida_jax.sampling import plans
from sparse_lavida_jax.sampling.presets import StepSettings
from sparse_lavida_jax.sampling.prompts import PromptTokens
from sparse_lavida_jax.tags import FIRST_BLOCK

# Repeated word for word wherever numbers are shown.
DEFINITION = (
    "Tokens are those that pass through the network: in all steps and all guidance rows, with"
    " prompt and registers, without padding. A layout (what is where) comes first and is counted"
    " separately."
)


class StepCost(NamedTuple):
    """Tokens of one request that one step passes through the network, by kind."""

    prompt: int
    newest: int = 0
    decode: int = 0
    rest: int = 0
    registers: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def costs(
    phases: Sequence[plans.Steps],
    settings: StepSettings,
    prompt: PromptTokens,
    row: int = 0,
    end: int | None = None,
) -> list[StepCost]:
    """Returns the cost of each step of a plan; the prefill of a cached prompt comes first.

    The pass that draws a style code counts with the first of them.

    Args:
        prompt: tokens of the request's prompt.
        row: of the plan.
        end: position of the last token of a text that ended early: steps after its text block are
            left out. None: all steps count.
    """
    if end is not None:
        used = [bool(np.isin(np.arange(end + 1), part.decode[:, row]).any()) for part in phases]
        phases = phases[: len(used) - used[::-1].index(True)] if any(used) else ()
    steps = [StepCost(sum(prompt.rows))] if phases and settings.caches_prompt else []
    for part in phases:
        rows = len(prompt.rows) if settings.passes_all_rows(part) else 1
        again = settings.passes_prompt(part) * sum(prompt.rows[-rows:])
        for newest, decode, rest in (rows * part.tokens()[:, row]).tolist():
            steps.append(StepCost(again, newest, decode, rest, rows * part.registers))
    if steps and prompt.style:
        steps[0] = steps[0]._replace(prompt=steps[0].prompt + prompt.style)
    return steps


def before(phases: Sequence[plans.Steps], settings: StepSettings, step: int) -> int:
    """Returns how many entries of `costs` come before a step (`presets.Turn`)."""
    blocks = np.concatenate([phase.block for phase in phases])
    return int((blocks < FIRST_BLOCK + step).sum()) + settings.caches_prompt


def total(steps: Sequence[StepCost]) -> int:
    """Returns the tokens of some steps."""
    return sum(map(sum, steps))
