# SPDX-License-Identifier: Apache-2.0
"""The loss on held-out records, compared with the loss on equally many training records."""

from collections import defaultdict
from collections.abc import Sequence

import jax
import numpy as np

from sparse_lavida_jax.data import markdown
from sparse_lavida_jax.mixture.record_batches import FEWEST, MixtureBatches
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.training import step

NAMES = ("text_nll", "image_nll")  # the logged values to compare
_loss = jax.jit(step.loss, static_argnames="chunk")


def compare(model: Denoiser, data: MixtureBatches) -> str:
    """Returns a sentence or two and a table of the mean losses of both, by group."""
    held = {group: numbers for group, numbers in data.held.items() if numbers}
    if not held:
        return f"No record was held out: that needs at least {FEWEST} records in a group."
    counts = ", ".join(
        f"{len(numbers)} of {len(data.records[group])} ({group})" for group, numbers in held.items()
    )
    lines = []
    for group, numbers in held.items():
        learned = [*data.taken[group][: len(numbers)]]
        for called, which in (("held out", numbers), ("trained on", learned)):
            found = losses(model, data, group, which)
            means = (f"{found[name]:.4f}" if name in found else "" for name in NAMES)
            lines.append((group, called, len(which), *means))
    return (
        f"Records that were never trained on: {counts}, compared with as many that were. The larger"
        " the difference between their losses, the more the model has memorised.\n\n"
    ) + markdown.table(("group", "records", "number", *NAMES), lines)


def losses(
    model: Denoiser, data: MixtureBatches, group: str, numbers: Sequence[int]
) -> dict[str, float]:
    """Returns the mean loss per text token and per image code over the given records."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for batch in data.measured(group, numbers):
        _, logged = _loss(model, batch, chunk=data.settings.train.loss_chunk)
        for name, value in logged.items():
            found[name].append(float(value))
    return {name: float(np.mean(values)) for name, values in found.items()}
