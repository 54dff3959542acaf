# SPDX-License-Identifier: Apache-2.0
"""The best plan of an image for a number of steps, found one setting after another.

The values of each of `SETTINGS` are tried with the best values found so far of the others,
beginning with those of the model, and the value that draws most prompts rightly is kept. In the
world of real art, things that are coherent are counted too, with the entropy of their styles:
coherence that is bought by drawing always the same style is none.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import measurements
from sparse_lavida_jax import config
from sparse_lavida_jax.art import judge, rules
from sparse_lavida_jax.data.image_files import Pixels
from sparse_lavida_jax.evals import exact
from sparse_lavida_jax.evals.benchmarks import art
from sparse_lavida_jax.evals.scorers import wilson_interval
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.scenes.task import Sample

SUITE, PROMPT_SEED = "plan_search", 56
TAUGHT = {"open": "test"}  # the split of the world that prompts are from
Changes = dict[str, Any]  # of `config.Sampling`

# In the order in which they are searched.
SETTINGS: dict[str, list[Changes]] = {
    "counts": [
        {"schedule": "linear"},
        {"schedule": "cosine"},
        *({"schedule": "shift", "shift": shift} for shift in (2.0, 4.0, 12.0)),
    ],
    "order": [{"order": one} for one in ("stratified", "halton", "random", "layout")],
    "temperature": [{"temperature": one} for one in (0.0, 0.3, 0.6, 1.0)],
    "guidance": [{"guidance": one} for one in (0.0, 1.0, 2.0)],
    "registers": [{"registers_end": one} for one in (-1, 1, 0)],
    "revisions": [{"revisions": one} for one in (0, 2, 4)],  # each takes the place of a step
}


def search(scorer: Any, steps: int, settings: Sequence[str]) -> Changes:
    """Returns the best changes of the model's own plan, with as many steps as asked for.

    Args:
        scorer: a `Scorer`.
        settings: keys of `SETTINGS`; none: the model's own plan is scored, and nothing searched.
    """
    if not settings:
        scorer.scored(steps, {})
        return {}
    best: Changes = {"merge_cells": 0}
    for name in settings:
        tried = [best | one for one in SETTINGS[name]]
        if name == "revisions":
            tried = [one for one in tried if steps > one[name]]
        rows = [scorer.scored(steps, one) for one in tried]
        shares = [(row["share"], row.get("coherent", 0.0)) for row in rows]
        best = tried[shares.index(max(shares))]
    return best


def changes_of(told: Iterable[str], own: config.Sampling) -> Changes:
    """Returns the changes of a plan that is given in words, such as "schedule=linear".

    Args:
        own: the plan that is changed.

    Raises:
        ConfigError: a word does not set a number or a string of `sampling`.
    """
    changes: Changes = {}
    for word in told:
        name, _, value = word.partition("=")
        kind = type(getattr(own, name, None))
        try:
            if kind not in (int, float, str):
                raise ValueError
            changes[name] = kind(value)
        except ValueError as error:
            raise config.ConfigError(
                f"--plan={word}: give settings of `sampling` as name=value, with commas between"
                " them, such as schedule=linear,revisions=2."
            ) from error
    return changes


@dataclasses.dataclass
class Scorer:
    """Scores plans on the same prompts.

    Attributes:
        model: what the model is called.
        given: what images are drawn from: "words" or "layout".
        prompts: of a score.
        seed: of the images.
        split: of the prompts: "held_out" for combinations that training never showed, which say a
            style, or "open" for prompts that leave styles and facings to the model.
    """

    pipe: SparseLaViDa
    model: str
    given: str
    prompts: int
    seed: int = 0
    split: str = "held_out"

    def __post_init__(self):
        self._bench = measurements.Bench(SUITE)
        self._rows = {row["id"]: row for row in measurements.read_rows(SUITE)}

    def scored(self, steps: int, changes: Changes) -> dict[str, Any]:
        """Returns the row of a plan, which is made only if there is none with as many prompts.

        Args:
            steps: those of revisions too.
        """
        told = ",".join(f"{name}={value}" for name, value in changes.items()) or "own"
        name = f"{self.model}/{self.given}/k{steps}/{told}/s{self.seed}"
        name += "/open" if self.split == "open" else ""
        row = self._rows.get(name)
        if row is None or row["prompts"] < self.prompts:
            how = {"revisions": 0, **changes} if changes else {}
            own = self.pipe.settings.sampling
            how["num_steps"] = steps - how.get("revisions", own.revisions)
            sampling = config.changed(own, how)
            row = {"model": self.model, "method": told, "steps": steps, "given": self.given}
            row |= {"split": self.split, "seed": self.seed, **changes, **self.score(sampling)}
            self._bench.write(name, row)
            self._rows[name] = row
        print(name, f"{row['share']:.3f}", row.get("coherent", ""), flush=True)
        return row

    def score(self, sampling: config.Sampling) -> dict[str, Any]:
        """Returns what a plan draws, and the seconds that an image takes."""
        batch = self.pipe.batch_size
        samples = [*itertools.islice(samples_of(self.pipe.settings, self.split), self.prompts)]
        drawn, seconds = [], []
        for start in range(0, len(samples), batch):
            requests = [
                self.pipe.requests("generate", one.prompt, as_written=True, sampling=sampling,
                                   seed=number + (self.seed << 32),
                                   layout=self.given == "layout" and one.layout)[0]
                for number, one in enumerate(samples[start : start + batch], start)
            ]  # fmt: skip
            result = self.pipe.run(requests)
            drawn += result.pixels
            seconds.append(result.seconds["image"] / len(requests))
        found = judged(self.pipe.settings, samples, drawn, TAUGHT.get(self.split, self.split))
        note = f"the image loop, in batches of {batch}, without the first, which compiles"
        return {**found, "image_s": float(np.median(seconds[1:] or seconds)), "note": note}


def samples_of(settings: config.Config, split: str) -> Iterator[Sample]:
    """Yields prompts of a split, which are as in `Scorer`, with their scenes."""
    here = exact.world_of(settings)
    for number in itertools.count():
        sample = here.sample("draw", PROMPT_SEED, number, TAUGHT.get(split, split))
        if split != "open" or here is exact.SCENES or art.is_open(sample):
            yield sample


def judged(
    settings: config.Config,
    samples: Sequence[Sample],
    drawn: Sequence[Pixels],
    split: str = "held_out",
) -> dict[str, Any]:
    """Returns how many prompts are drawn rightly, and how many of their things are coherent.

    `of_each` says it of each prompt, in a digit, so that plans can be compared on the same prompts.
    """
    here = exact.world_of(settings)
    right = [here.score(*pair).ok for pair in zip(samples, drawn, strict=True)]
    found: dict[str, Any] = {
        "prompts": len(right), "correct": sum(right), "share": sum(right) / len(right),
        "interval_95": list(wilson_interval(sum(right), len(right))),
        "chance": here.chance.get("draw" if split == "test" else f"draw/{split}"),
        "of_each": {"correct": _digits(right)},
    }  # fmt: skip
    if here is exact.SCENES:
        return found
    readings = [judge.read(image) for image in drawn]
    counts = zip(*map(rules.coherence, samples, readings), strict=True)
    coherent, _, asked = map(_digits, counts)
    found["of_each"] |= {"coherent": coherent, "things": asked}
    values = {one.name: one.value for one in art.coherence(samples, readings)}
    return found | {
        "found": values["- things found"],
        "coherent": values["- things coherent"],
        "entropy_bits": values["- entropy of open styles, bits"],
    }


def _digits(numbers: Iterable[int]) -> str:
    return "".join(str(int(one)) for one in numbers)
