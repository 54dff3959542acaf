# SPDX-License-Identifier: Apache-2.0
"""How long a run on own images should be, and whether it was long enough.

A run is planned in steps, since they decide what a model learns, and limited in seconds. How many
steps fit depends on the machine, so the speed is measured in the first minutes. Numbers are ours.
"""

import dataclasses
import math
import pathlib

import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.training import metrics

# When the speed is known: after these seconds, or this share of the time given if that is less.
MEASURED_AFTER, MEASURED_SHARE = 120.0, 0.1
FEWEST_STEPS = 2  # over which it is measured
# Of our finished runs: steps by number of images (colabs/train_own_images.ipynb with drawings,
# docs/own_images.md with emoji), and the loss of the first, in nats per image code, whose samples
# show their captions. The second ended at 0.09.
PLANNED = {150: 500, 400: 2200}
SAMPLES_SHOW = 0.15
LOGGED = 3  # the last lines of metrics, of which the loss is the mean


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Whether a run was long enough.

    Attributes:
        enough: whether all planned steps were done, or images appear at its loss.
        sentence: steps done of steps planned, the loss, and what to type if that is not enough.
    """

    enough: bool
    sentence: str


def planned_steps(images: int) -> int:
    """Returns the number of steps to plan for a number of images; a line through `PLANNED`."""
    (few, fewest), (many, most) = PLANNED.items()
    return max(fewest, fewest + (images - few) * (most - fewest) // (many - few))


def forecast(train: config.Train, step: int, seconds: float, measured: tuple[int, float]) -> str:
    """Returns a warning if the planned steps do not fit into `train.seconds`; "" if they do.

    Args:
        step, seconds: of the whole run so far.
        measured: steps, and the seconds that they took without compiling.
    """
    per_step = measured[1] / measured[0]
    needed = seconds + (train.train_steps - step) * per_step
    if needed <= train.seconds:
        return ""
    fit = step + int((train.seconds - seconds) / per_step)
    return (
        f"about {fit} of {train.train_steps} planned steps fit into {in_words(train.seconds)} at"
        f" this speed. All of them take about {in_words(needed)}: {_longer(needed)} (the same"
        " command with it goes on, now or later)"
    )


def is_measured(train: config.Train, measured: tuple[int, float]) -> bool:
    """Whether so many steps, in so many seconds, suffice for a forecast."""
    enough = min(MEASURED_AFTER, MEASURED_SHARE * train.seconds)
    return measured[0] >= FEWEST_STEPS and measured[1] >= enough


def outcome(settings: config.Config, log: pathlib.Path, step: int, seconds: float) -> Outcome:
    """Returns whether a run on own images was long enough.

    Args:
        log: the metrics of the run.
        step, seconds: of the whole run.
    """
    train, needed, appeared = settings.train, settings.train.train_steps, ""
    rows = [row["image_nll"] for row in metrics.read_metrics(log) if row.get("image_nll")]
    loss = float(np.mean(rows[-LOGGED:])) if rows else math.inf
    if rows and not train.init_from:  # a model that was trained before starts at another loss
        needed = max(needed, min(PLANNED.values()))
        appeared = (
            f"; the loss of an image code is {loss:.2f}, and images appeared in our runs by"
            f" {SAMPLES_SHOW:g}"
        )
    enough = step >= needed or (bool(appeared) and loss <= SAMPLES_SHOW)
    few = "" if enough else ", too few"
    goes_on = ""
    if step < train.train_steps:
        goes_on = _longer(seconds / step * train.train_steps)
    elif not enough:
        goes_on = f"--config.train.train_steps={needed}"
    sentence = f"{step} of {train.train_steps} planned steps{few}{appeared}"
    return Outcome(enough, sentence + (goes_on and f"; the same command with {goes_on} goes on"))


def _longer(seconds: float) -> str:
    return f"--config.train.seconds={60 * math.ceil(seconds / 60)}"


def in_words(seconds: float) -> str:
    """Returns a time, such as "25 minutes"."""
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"
