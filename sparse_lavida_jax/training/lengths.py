# SPDX-License-Identifier: Apache-2.0
"""How long a run on own images should be, and whether it was long enough.

A run is planned in steps, since they decide what a model learns, and limited in seconds. How many
steps fit depends on the machine, so the speed is measured in the first minutes. Numbers are ours.
"""

import math
import pathlib

import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.training import metrics

# When the speed is known: after these seconds, or this share of the time given if that is less.
MEASURED_AFTER, MEASURED_SHARE = 120.0, 0.1
LEAST_MEASURED = 5  # steps: the first ones vary
# Of our finished runs: steps by number of images (colabs/train_own_images.ipynb with drawings,
# docs/own_images.md with emoji), and the loss of the first, in nats per image code, whose samples
# show their captions. The second ended at 0.09.
PLANNED = {150: 500, 400: 2200}
SAMPLES_SHOW = 0.15
LOGGED = 3  # the last lines of metrics, of which the loss is the mean


def planned_steps(images: int) -> int:
    """Returns the number of steps to plan for a number of images; a line through `PLANNED`."""
    (few, fewest), (many, most) = PLANNED.items()
    return max(fewest, fewest + (images - few) * (most - fewest) // (many - few))


def forecast(
    train: config.Train, step: int, seconds: float, measured: tuple[int, float]
) -> str | None:
    """Returns a warning if the planned steps do not fit into `train.seconds`, "" if they do.

    Args:
        step, seconds: of the whole run so far.
        measured: steps of this process, and their seconds without compiling; None is returned
            while they are too few.
    """
    if measured[0] < LEAST_MEASURED or measured[1] < min(
        MEASURED_AFTER, MEASURED_SHARE * train.seconds
    ):
        return None
    per_step = measured[1] / measured[0]
    needed = seconds + (train.train_steps - step) * per_step
    if needed <= train.seconds:
        return ""
    return (
        f"about {step + int((train.seconds - seconds) / per_step)} of {train.train_steps} planned"
        f" steps fit into {in_words(train.seconds)} at this speed. All of them take about"
        f" {in_words(needed)}: {_longer(needed)} in the same command lets it go on, now or later"
    )


def outcome(
    settings: config.Config, log: pathlib.Path, step: int, seconds: float
) -> tuple[bool, str]:
    """Returns whether a run was long enough, and a sentence: its steps, its loss, how to go on.

    Args:
        log: the metrics of the run.
        step, seconds: of the whole run.
    """
    train, needed, loss, shown = settings.train, settings.train.train_steps, math.inf, ""
    rows = [row["image_nll"] for row in metrics.read_metrics(log) if row.get("image_nll")]
    if rows and not train.init_from:  # a model that was trained before starts at another loss
        needed, loss = max(needed, min(PLANNED.values())), float(np.mean(rows[-LOGGED:]))
        shown = f"; the loss of an image code is {loss:.2f}, and our runs with good samples ended"
        shown += f" at {SAMPLES_SHOW:g} or less"
    enough = step >= needed or loss <= SAMPLES_SHOW
    sentence = f"{step} of {train.train_steps} planned steps{'' if enough else ', too few'}{shown}"
    if step < train.train_steps:
        sentence += f"; the same command with {_longer(seconds / step * train.train_steps)} goes on"
    elif not enough:
        sentence += f"; the same command with --config.train.train_steps={needed} goes on"
    return enough, sentence


def _longer(seconds: float) -> str:
    return f"--config.train.seconds={60 * math.ceil(seconds / 60)}"


def in_words(seconds: float) -> str:
    """Returns a time, such as "25 minutes"."""
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"
