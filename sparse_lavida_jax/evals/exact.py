# SPDX-License-Identifier: Apache-2.0
"""Exact scores on small worlds: programs read pixels or text to judge the output of a model.

`evals/benchmarks/scenes.py` is the benchmark; reports of training runs use the same scores.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.art import judge as art_judge
from sparse_lavida_jax.art import rules as art_rules
from sparse_lavida_jax.art import tasks as art_tasks
from sparse_lavida_jax.art import world as art_world
from sparse_lavida_jax.art.sheet import taught
from sparse_lavida_jax.evals.chance import ART_CHANCE, CHANCE
from sparse_lavida_jax.evals.scorers import Metric, grouped, wilson_interval
from sparse_lavida_jax.scenes import grammar, tasks, world
from sparse_lavida_jax.scenes.task import Judgement, Sample

Output = np.ndarray | str


class SmallWorld(NamedTuple):
    """A world whose examples programs make and judge.

    Attributes:
        tasks: the package of its tasks.
        sample, score: make and judge an example: `tasks.sample`, `tasks.score`.
        render: draws a scene as the model is shown it.
        empty: a scene without anything.
        frame: the place of the right and the bottom edge of an image.
        chance: scores without looking, by task (`evals/chance.py`).
    """

    tasks: Any
    sample: Callable[..., Sample]
    score: Callable[[Sample, Any], Judgement]
    render: Callable[[Any], np.ndarray]
    empty: Any
    frame: int
    chance: Mapping[str, float]


SCENES = SmallWorld(
    tasks,
    tasks.sample,
    tasks.score,
    world.render,
    world.EMPTY_SCENE,
    grammar.LOCATIONS - 1,
    CHANCE,
)


def world_of(settings: config.Config) -> SmallWorld:
    """Returns the world that a model learned; that of shapes if it learned none."""
    if settings.data.source != "art":
        return SCENES
    side, sheet = art_world.CELL * settings.model.grid_size, taught(settings.data)
    return SmallWorld(
        art_tasks,
        functools.partial(art_tasks.sample, sheet=sheet, side=side),
        functools.partial(art_tasks.score, side=side),
        functools.partial(art_world.render, side=side, sheet=sheet.whole),
        art_world.ArtScene("white", ()),
        side // art_world.STEP,
        ART_CHANCE,
    )


EVAL_SEED = 2026  # for the prompts; the test stream is disjoint from training, whatever the seed


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """Scores of one task.

    Attributes:
        task: its name; for held-out combinations followed by "/held_out".
        correct, total: prompts answered correctly, and asked.
        columns: (correct, total) for each column of a task, and for each part of "edit".
        attribute_precision: share of drawn objects whose shape and colour were asked for; None for
            tasks that do not draw from words.
        reasons: the most common reasons for a score of 0, with their counts.
        chance: the score without looking; None: it is not known.
    """

    task: str
    correct: int
    total: int
    columns: dict[str, tuple[int, int]]
    attribute_precision: float | None
    reasons: dict[str, int]
    chance: float | None = None

    @property
    def share(self) -> float:
        return self.correct / max(self.total, 1)

    @property
    def metrics(self) -> list[Metric]:
        """The lines of a table: the whole, each column, the precision of the drawings."""
        found = [Metric(self.task, self.share, self.total, self.correct, self.chance)]
        for column, (hits, total) in sorted(self.columns.items()):
            found.append(Metric(f"- {column}", hits / total, total, hits))
        if self.attribute_precision is not None and self.columns:
            found.append(Metric("- attribute precision", self.attribute_precision, self.total))
        return found


def answer(
    pipe: Any,
    samples: Sequence[tasks.Sample],
    *,
    sampling: config.Sampling | None = None,
    seed: int | Sequence[int] = 0,
    layout: bool | None = None,
    callback: Callable[..., None] | None = None,
) -> list[Output]:
    """Returns the model's output for samples of one task: images or text.

    Args:
        pipe: a `SparseLaViDa`.
        samples: all with an image or none, and likewise for given tokens.
        layout: whether to lay an image out in words first; None: as in the sampling settings.
        callback: see `SparseLaViDa.run`.
    """
    task, prompts = samples[0].task, [sample.prompt for sample in samples]
    here = world_of(pipe.settings)
    how = {"sampling": sampling, "seed": seed, "callback": callback}
    if any(sample.given for sample in samples):
        examples = [pipe.encoder.scene_example(sample) for sample in samples]
        return list(pipe.texts(pipe.sample(examples, **how)))
    shown = [here.render(s.image) for s in samples if s.image is not None]
    known = [s.known_grid for s in samples if s.known_grid is not None]
    if known:
        fill = pipe.inpaint if task == "inpaint" else pipe.outpaint
        how |= {"as_written": True, "layout": layout}
        return list(fill(shown, prompts, known=known, **how).pixels)
    if here.tasks.TABLE[task].is_image and here.tasks.TABLE[task].command is None:
        # No command asks for it: it is asked as in training, without a layout.
        examples = [pipe.encoder.scene_example(sample, with_layout=False) for sample in samples]
        dtype = (sampling or pipe.settings.sampling).vq_dtype
        return list(pipe.codec.to_pixels(np.stack(pipe.sample(examples, **how)), None, dtype))
    if here.tasks.TABLE[task].is_image:
        how |= {"as_written": True, "layout": layout}
        drawn = pipe.edit(shown, prompts, **how) if shown else pipe.generate(prompts, **how)
        return list(drawn.pixels)
    short = here.tasks.TABLE[task].group == "answer"
    room = pipe.prompts.answer_tokens if short else pipe.prompts.long_answer_tokens
    examples = [
        pipe.prompts.ask(prompt, shown[i : i + 1], room) for i, prompt in enumerate(prompts)
    ]
    return list(pipe.texts(pipe.sample(examples, **how)))


def evaluate(
    pipe: Any,
    task: str,
    prompts: int,
    *,
    split: str = "test",
    sampling: config.Sampling | None = None,
    seed: int = EVAL_SEED,
    callback: Callable[..., None] | None = None,
) -> TaskResult:
    """Scores `prompts` samples of a task.

    Args:
        pipe: a `SparseLaViDa`.
        split: "test", or "held_out" for attribute combinations that training never showed.
    """
    here = world_of(pipe.settings)
    samples = [here.sample(task, seed, index, split) for index in range(prompts)]
    outputs = answer(pipe, samples, sampling=sampling, seed=seed, callback=callback)
    return tally(task if split == "test" else f"{task}/{split}", samples, outputs, here)


def evaluate_several(
    pipe: Any,
    prompts: int,
    *,
    images: int = 4,
    sampling: config.Sampling | None = None,
    seed: int = EVAL_SEED,
) -> tuple[TaskResult, float]:
    """Draws several images of each prompt, which are to differ and still be right.

    Returns:
        The scores of all images; and the mean number of different layouts per prompt, where a
        layout is the set of cells with an object. Images that cannot be read have none.
    """
    asked = [tasks.sample("draw", seed, index, "test") for index in range(prompts)]
    samples = [sample for sample in asked for _ in range(images)]
    outputs = answer(pipe, samples, sampling=sampling, seed=seed)
    scenes = [world.read(np.asarray(output)) for output in outputs]
    layouts = [
        {frozenset(dict(s.objects())) for s in scenes[i : i + images] if isinstance(s, world.Scene)}
        for i in range(0, len(scenes), images)
    ]
    return tally(f"draw/{images} images", samples, outputs), float(np.mean([*map(len, layouts)]))


def tally(
    name: str,
    samples: Sequence[tasks.Sample],
    outputs: Sequence[Output],
    here: SmallWorld = SCENES,
) -> TaskResult:
    """Adds up the scores of outputs."""
    scores = [here.score(*pair) for pair in zip(samples, outputs, strict=True)]
    named = zip(samples, scores, strict=True)
    columns = grouped((sample.column, score.ok) for sample, score in named if sample.column)
    counted = grouped(pair for score in scores for pair in score.parts.items())
    parts = {
        part: (sum(h for h, _ in own), sum(n for _, n in own)) for part, own in counted.items()
    }
    right, drawn = (sum(score.attributes[i] for score in scores) for i in (0, 1))
    reasons = collections.Counter(score.reason for score in scores if not score.ok)
    return TaskResult(
        task=name,
        correct=sum(score.ok for score in scores),
        total=len(samples),
        columns={column: (sum(hits), len(hits)) for column, hits in columns.items()} | parts,
        attribute_precision=right / drawn if drawn else None,
        reasons=dict(reasons.most_common(8)),
        chance=here.chance.get(name),
    )


def coherence(samples: Sequence[tasks.Sample], images: Sequence[np.ndarray]) -> dict[str, float]:
    """Returns the shares of the things of the art world that requests ask for: found, coherent.

    A thing is coherent if all its cells are of one style and one facing.
    """
    pairs = zip(samples, images, strict=True)
    counts = [art_rules.coherence(one, art_judge.read(image, one.sheet)) for one, image in pairs]
    coherent, found, asked = (sum(column) for column in zip(*counts, strict=True))
    return {"found": found / asked, "coherent": coherent / asked}


def as_json(result: TaskResult) -> dict[str, Any]:
    """Returns the values for rows of `benchmarks/quality.py`."""
    low, high = wilson_interval(result.correct, result.total)
    return dataclasses.asdict(result) | {"share": result.share, "interval_95": [low, high]}


def from_json(row: Mapping[str, Any]) -> TaskResult:
    """Returns the scores in a row of `benchmarks/quality.py`."""
    row = {"chance": CHANCE.get(row["task"]), **row}  # older rows hold none
    given = {field.name: row[field.name] for field in dataclasses.fields(TaskResult)}
    given["columns"] = {name: (right, total) for name, (right, total) in row["columns"].items()}
    return TaskResult(**given)
