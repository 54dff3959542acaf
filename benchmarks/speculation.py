# SPDX-License-Identifier: Apache-2.0
r"""Speculation across the steps of an image: fewer passes for the sampler's own result.

    python -m benchmarks.speculation
    python -m benchmarks.speculation --models=scenes --step-counts=8,36 --num-images=64

A guess of all cells is passed as the clean cells of a whole plan (`inference/whole_plan.py`), each
step draws with its own noise, and the draws are the next guess. Steps up to the first whose draws
changed are final, that one too: they saw final cells only. So it ends when no step but the last
changes (a Jacobi iteration; after parallel decoding, arXiv:2305.10427). The first guess is empty,
or drawn in one pass in which no step sees another's cells. The loop is one program; it and the
sampler take turns on the same images, and their codes are compared. For
LaViDa-O on an H200: `benchmarks/aot_whole_plan.py`.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Array, Int

from benchmarks import command, measurements, requests, suites
from benchmarks.timing import in_turn
from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.inference import whole_plan
from sparse_lavida_jax.inference.engine import Engine
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs.folder import keep_programs
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.sampling.presets import RowRequest, StepSettings
from sparse_lavida_jax.sampling.prompts import sample_input
from sparse_lavida_jax.scenes import tasks, world
from sparse_lavida_jax.scenes.grammar import Layout
from sparse_lavida_jax.tags import FIRST_BLOCK, GIVEN_BLOCK

MODELS = flags.DEFINE_list("models", ["scenes", "art_grid"], "Models to measure.")
SETTINGS = flags.DEFINE_list("settings", [], "Names of settings of a model; default: all.")
STEPS = flags.DEFINE_list(
    "step-counts", ["8", "18", "36", "64"], "Steps of an image; at most as many as its cells."
)
BATCHES = flags.DEFINE_list("batch-sizes", ["1", "16"], "Images per batch.")
IMAGES = flags.DEFINE_integer(
    "num-images", 64, "Images of each setting; at least one batch.", lower_bound=1
)

Draft = Literal["one pass", "empty"]
SEED = 58  # of the scenes, which no training has
SUITE = "speculation"
# Of the bundled art tokenizer; with random weights, in a model otherwise as large as `scenes`.
ART_GRID = {"grid_size": 12, "codes_per_token": 4, "codebook_size": 1024}
UNCHANGED = np.iinfo(np.int32).max  # block of the first change of a row in which nothing changes
SCENES = {"layout T .3": 0.3, "no layout T 1": 1.0}  # of the bundled model; temperatures
HEAT = {"random weights T 1": 1.0, "random weights T .1": 0.1}


class Drawn(NamedTuple):
    """A batch of images: codes [b l g], passes of each row [b], tokens, and seconds."""

    codes: np.ndarray
    passes: np.ndarray
    tokens: int
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is drawn.

    Attributes:
        example: returns the example of an image by its number.
        empty: the codes of an empty image.
    """

    engine: Engine
    sampling: config.Sampling
    example: Callable[[int], Example]
    empty: Int[np.ndarray, "l g"]

    def rows(self, batch: int, turn: int) -> tuple[list[Example], list[RowRequest]]:
        """Returns the examples and the requests of a batch."""
        numbers = range(turn * batch, (turn + 1) * batch)
        rows = [RowRequest(seed=i, temperature=self.sampling.temperature) for i in numbers]
        return [self.example(i) for i in numbers], rows


def main(_: list[str]) -> None:
    """Measures every model, and writes its rows."""
    keep_programs()
    bench = measurements.Bench(SUITE)
    for model in MODELS.value:
        for name, row in measured(model):
            path = bench.write(f"{model}/{name}", {"model": model, **row})
            print(path.name, {key: row[key] for key in row if key != "times_s"}, flush=True)


# ---------------------------------------------------------------------------------------------
# The loop.


def speculate(
    engine: Engine,
    examples: Sequence[Example],
    rows: Sequence[RowRequest],
    sampling: config.Sampling,
    draft: Draft,
    empty: Int[np.ndarray, "l g"],
) -> Drawn:
    """Returns the codes that the sampler would draw for images, from passes over whole plans.

    Args:
        empty: the codes of an empty image.
    """
    model = engine.model.settings
    settings = presets.step_settings(sampling, model, "image", guided=False)
    inputs = [sample_input(*pair, model, settings) for pair in zip(examples, rows, strict=True)]
    plans = [presets.plan(sampling, settings, model, x.given[None], 1, [0]) for x in examples]
    orders = [whole_plan.image_order(own, x.given) for own, x in zip(plans, examples, strict=True)]
    guess = [np.where(x.given[:, None], x.response, empty) for x in examples]
    steps = [
        whole_plan.steps_of(own, settings, order, one.shape[1])
        for own, order, one in zip(plans, orders, guess, strict=True)
    ]
    blind = [np.where(order == GIVEN_BLOCK, order, whole_plan.UNTOLD) for order in orders]
    how = {"settings": settings, "stage": "image"}
    given, _, tokens = whole_plan.arrays(engine.model, inputs, steps, guess, orders, **how)
    before, first = 0, jnp.asarray(np.stack(guess))
    if draft == "one pass":
        own, _, spent = whole_plan.arrays(engine.model, inputs, steps, guess, blind, **how)
        first, before = drawn(engine.model, own, first, settings=settings), spent
    last = jnp.asarray([own[-1].block for own in steps])
    codes, passes = repeated(engine.model, given, first, last, settings=settings)
    spent = before + np.asarray(passes).max() * tokens  # rows that are done stay in the batch
    return Drawn(np.asarray(codes), np.asarray(passes) + (draft != "empty"), int(spent.sum()))


@functools.partial(jax.jit, static_argnames="settings")
def drawn(
    model: Denoiser, given: tuple[Any, ...], codes: Int[Array, "b l g"], *, settings: StepSettings
) -> Int[Array, "b l g"]:
    """Returns what all steps draw in one pass of `whole_plan.arrays`."""
    how = dataclasses.replace(settings, greedy=False)
    new = whole_plan.scored(model, *given, jnp.float32(0), settings=how)[0]
    row, _, at = given[-1][:3]
    return codes.at[row, at].set(new)


@functools.partial(jax.jit, static_argnames="settings")
def repeated(
    model: Denoiser,
    given: tuple[Any, ...],
    first: Int[Array, "b l g"],
    last: Int[Array, " b"],
    *,
    settings: StepSettings,
) -> tuple[Int[Array, "b l g"], Int[Array, " b"]]:
    """Returns the codes at which passes end, and how many each row needed.

    Args:
        given: of a pass in which every step sees the guess of those before.
        first: the guess.
        last: the block of the last step of each row.
    """
    words, cells, *rest = given
    row, at, block = (rest[-1][i] for i in (0, 2, 4))
    clean = (cells.index >= 0) & (cells.tags.block >= FIRST_BLOCK)
    clean &= cells.tags.block < last[:, None]

    def again(carry):
        codes, passes, done = carry
        seen = jnp.take_along_axis(codes, jnp.maximum(cells.index, 0)[..., None], axis=1)
        now = cells.replace(tokens=jnp.where(clean[..., None], seen, cells.tokens))
        new = drawn(model, (words, now, *rest), codes, settings=settings)
        changed = (new != codes).any(axis=-1)[row, at]
        step = jnp.full_like(last, UNCHANGED).at[row].min(jnp.where(changed, block, UNCHANGED))
        return new, passes + ~done, done | is_final(step, last)

    none = jnp.zeros(len(last), int), jnp.zeros(len(last), bool)
    codes, passes, _ = jax.lax.while_loop(lambda x: ~x[2].all(), again, (first, *none))
    return codes, passes


def is_final(step: Int[Array, " b"], last: Int[Array, " b"]) -> Array:
    """Returns whether all draws of a row are the sampler's.

    Args:
        step: the block of the first step whose draws changed, which saw final cells only.
        last: of its last step, which no step sees.
    """
    return step >= last


# ---------------------------------------------------------------------------------------------
# Against the sampler.


def measured(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a name and a row for each setting, batch and first guess of a model."""
    found = subjects(model)
    for name in SETTINGS.value or found:
        own = found[name]
        cells = len(own.empty)
        for steps in [int(x) for x in STEPS.value if int(x) <= cells]:
            sampling = dataclasses.replace(own.sampling, num_steps=steps)
            subject = dataclasses.replace(own, sampling=sampling)
            for batch in map(int, BATCHES.value):
                how = {"setting": name, "cells": cells, "steps": steps, "batch": batch}
                for draft, row in compared(subject, batch, max(-(-IMAGES.value // batch), 5)):
                    row_id = f"{name}/{steps}_steps/b{batch}/{draft}".replace(" ", "_")
                    yield row_id, {"method": f"first guess {draft}", **how, **row}


def subjects(model: str) -> dict[str, Subject]:
    """Returns what is drawn with a model, by name."""
    if model == "scenes":
        pipe = SparseLaViDa.from_pretrained("scenes", batch_size=16)
        assert pipe.codec is not None
        (empty,) = pipe.codec.encode(world.render(world.EMPTY_SCENE)[None])
        plain = pipe.settings.sampling
        return {
            name: Subject(
                pipe.engine,
                dataclasses.replace(plain, temperature=heat),
                functools.partial(_scene, pipe, name.startswith("layout")),
                empty,
            )
            for name, heat in SCENES.items()
        }
    trained = model_folder.read_config(model_folder.find_model("scenes"))
    settings = config.changed(trained, {"model": ART_GRID})
    own = requests.random_subject(settings, "image", draws=False, vq_dtype="float32")
    case = suites.cases("cpu", settings)[0]
    engine = Engine(own.model, 16, settings.data.text_block_len)
    return {
        name: Subject(
            engine,
            dataclasses.replace(case.sampling, temperature=heat),
            lambda _: case.example,
            np.zeros_like(case.example.response),
        )
        for name, heat in HEAT.items()
    }


def _scene(pipe: SparseLaViDa, has_layout: bool, index: int) -> Example:
    """Returns what draws a scene, after its layout or without one."""
    made = tasks.sample("draw", SEED, index, "test")
    layout = str(Layout(tuple(made.target.objects()))) if has_layout else False
    (request,) = pipe.requests("generate", made.prompt, layout=layout)
    return pipe.task_run(request.sampling).image_example(request)


def compared(subject: Subject, batch: int, turns: int) -> Iterator[tuple[Draft, dict[str, Any]]]:
    """Yields a first guess and its row: passes, tokens, seconds, and images that differ."""

    def timed(draw: Callable[..., Drawn], turn: int) -> Drawn:
        given = subject.rows(batch, turn)
        begin = time.perf_counter()
        return draw(*given)._replace(seconds=time.perf_counter() - begin)

    def sampler(examples: list[Example], rows: list[RowRequest]) -> Drawn:
        made = subject.engine.sample(examples, rows, subject.sampling, stage="image")
        return Drawn(np.stack(made.responses), np.zeros(0), sum(made.tokens))

    def guessed(draft: Draft, examples: list[Example], rows: list[RowRequest]) -> Drawn:
        return speculate(subject.engine, examples, rows, subject.sampling, draft, subject.empty)

    drafts: tuple[Draft, ...] = ("one pass", "empty")
    runs = {"sampler": functools.partial(timed, sampler)} | {
        draft: functools.partial(timed, functools.partial(guessed, draft)) for draft in drafts
    }
    in_turn(runs, 1)  # compiles
    found = in_turn(runs, turns)
    for draft in drafts:
        pairs = list(zip(found["sampler"], found[draft], strict=True))
        margins = [
            x for turn, pair in enumerate(pairs) for x in differing(subject, batch, turn, *pair)
        ]
        passes = np.concatenate([one.passes for one in found[draft]])
        median = {name: float(np.median([x.seconds for x in own])) for name, own in found.items()}
        tokens = [sum(x.tokens for x in found[name]) for name in (draft, "sampler")]
        yield draft, {
            "images": len(passes), "different": len(margins), "margins": margins,
            "passes_mean": float(passes.mean()), "passes_max": int(passes.max()),
            "passes_of_a_batch": float(np.mean([x.passes.max() for x in found[draft]])),
            "tokens_x": tokens[0] / tokens[1], "seconds_x": median[draft] / median["sampler"],
            "seconds_interval": interval(found[draft], found["sampler"]), "turns": turns,
            "times_s": [x.seconds for x in found[draft]],
            "sampler_times_s": [x.seconds for x in found["sampler"]],
            "note": "times the sampler's; medians of turns of one run, each in turn on one machine",
        }  # fmt: skip


def interval(ours: Sequence[Drawn], theirs: Sequence[Drawn]) -> list[float]:
    """Returns the interval of 95 % of the ratio of medians, from 1,000 resamples of the turns."""
    pairs = np.array([(a.seconds, b.seconds) for a, b in zip(ours, theirs, strict=True)])
    turns = np.random.default_rng(0).integers(len(pairs), size=(1000, len(pairs)))
    medians = np.median(pairs[turns], axis=1)
    return np.quantile(medians[:, 0] / medians[:, 1], (0.025, 0.975)).tolist()


def differing(subject: Subject, batch: int, turn: int, ours: Drawn, theirs: Drawn) -> list[float]:
    """Returns a margin for each image whose codes differ.

    In logits: how far draws of the sampler, or of the passes, are from the largest scores, at most.
    """
    examples, rows = subject.rows(batch, turn)
    found = []
    for i in np.flatnonzero((ours.codes != theirs.codes).any(axis=(1, 2))):
        both = [ours.codes[i], theirs.codes[i]]
        how = [examples[i]] * 2, [rows[i]] * 2, subject.sampling, both
        scored = subject.engine.scores(*how, stage="image")
        found.append(max(float(scores.deficit.max()) for _, scores in scored))
    return found


if __name__ == "__main__":
    command.run(main)
