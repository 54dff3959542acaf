# SPDX-License-Identifier: Apache-2.0
r"""Compares ways to train at an equal number of operations, or at equal CPU time.

    taskset -c 0 python -m benchmarks.learning --world=scenes
    taskset -c 0 python -m benchmarks.learning --world=art --seeds=0 --ways=plan_merged,dense
    python -m benchmarks.learning --table
    taskset -c 0 python -m benchmarks.learning --world=art --time_steps=10 --ways=plan_merged,dense

Every way trains a small model from the same random parameters on the same examples, at a constant
learning rate, until its budgets are spent. At each quarter of a budget, the negative
log-likelihood of held-out images under the sampler's own plan is computed, in nats per code, with
the averaged parameters, which sampling uses. Step-causal training is judged by the plan of the
sparse sampler, dense training by that of the dense sampler. Images of the world `scenes` have 6 x 6
cells; those of `art` have 12 x 12 cells of four codes, and half an hour for each way.

Writes one row per way and seed to `results/<device>/learning`. Time is the CPU time of the process,
including batches but not compilation: give it one core. With `--time_steps`, only steps are timed,
each way's in turn on the same examples, and rows are written to `results/<device>/learning_time`.
"""

import dataclasses
import itertools
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags, logging
from flax import nnx

from benchmarks import command
from benchmarks.measurements import Bench, path_of, read_rows
from sparse_lavida_jax import config, diffusion, orders
from sparse_lavida_jax.data import markdown
from sparse_lavida_jax.data.batch import ORDER_SEEDS, RowShape, longest_of, stack
from sparse_lavida_jax.data.corrupted_rows import Corrupted, CorruptedRow
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.diffusion import Blocks
from sparse_lavida_jax.evals import exact, scorers
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs.folder import keep_programs
from sparse_lavida_jax.scenes.scene_batches import SceneBatches
from sparse_lavida_jax.scenes.task import Sample
from sparse_lavida_jax.sequence import prompt_row
from sparse_lavida_jax.tags import FIRST_BLOCK
from sparse_lavida_jax.training import flops, optimizer, step
from sparse_lavida_jax.training.sources import open_source
from sparse_lavida_jax.training.start import init_state

WORLD = flags.DEFINE_enum("world", "scenes", ["scenes", "art"], "World to train on.")
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of parameters and batches.")
WAYS = flags.DEFINE_list("ways", [], "Ways to train; default: all.")
TABLE = flags.DEFINE_boolean("table", False, "Print the results over all seeds.")
TIME_STEPS = flags.DEFINE_integer("time_steps", 0, "Steps of each way to time.", lower_bound=0)

SUITE = "learning"
PARTS = 4  # of a budget; likelihoods are computed at the end of each


@dataclasses.dataclass(frozen=True)
class World:
    """What the ways are compared on.

    Attributes:
        file: the config that all ways share, in `configs/`.
        changes: to its settings.
        operations: the budget, in 1e12 floating-point operations (`training/flops.py`); 0: none.
        seconds: the budget of CPU time.
        held_out: the number of images whose likelihood is computed.
        together: rows per forward pass over them.
        scored: prompts of `draw` that are scored at the end.
        more: further ways, as changes to `plan_merged`.
    """

    file: str
    changes: dict[str, dict[str, Any]]
    operations: float
    seconds: float
    held_out: int
    together: int
    scored: int
    more: Mapping[str, dict[str, dict[str, Any]]] = dataclasses.field(default_factory=dict)


FLAT = {"optimizer": {"final_fraction": 1.0}, "train": {"batch_size": 16}}
WORLDS = {
    "scenes": World("ablation", FLAT, 3.6, 240.0, held_out=256, together=16, scored=500),
    "art": World(
        "art",
        {
            "optimizer": FLAT["optimizer"],
            "data": {"things": 40, "lessons": {}, "tasks": {"draw": 1.0, "draw_part": 1.0}},
            "train": {"batch_size": 32, "vision_from": ""},
            # Measured before `plan_bounds` said why `configs/art.py` has other plans and codes.
            "model": {"sequential_codes": False},
            "diffusion": {"plan_steps": (8, 12, 18), "merge_cells": 16, "layout_first": 0.0},
            "sampling": {
                "num_steps": 12,
                "order": "stratified",
                "shift": 2.0,
                "merge_cells": 16,
                "temperature": 0.3,
                "revisions": 0,
            },
        },
        0.0,
        1800.0,
        held_out=64,
        together=8,
        scored=200,
        more={
            "things_24": {"data": {"things": 24}},
            "things_120": {"data": {"things": 0}},
            "whole_images": {"data": {"tasks": {"draw": 1.0}}},
            "batch_16": {"train": {"batch_size": 16}},
            "packing_2": {"data": {"packing": 2}},
            "blockwise": {"model": {"attention_implementation": "blockwise"}},
        },
    ),
}


def ways_of(
    settings: config.Config, more: Mapping[str, dict[str, dict[str, Any]]]
) -> dict[str, config.Config]:
    """Returns the settings of every way to train; all have equally many masked blocks of text.

    Args:
        more: further ways, as changes to `plan_merged`.
    """
    merged = settings.diffusion.merge_cells

    def way(**diffusion: Any) -> config.Config:
        return config.changed(settings, {"diffusion": {"text_masked_blocks": 8, **diffusion}})

    return {
        "schedule_4": way(num_masked_blocks=4),
        "schedule_8": way(num_masked_blocks=8),
        "plan": way(blocks="plan", merge_cells=1),
        "plan_merged": way(blocks="plan"),
        "plan_merged_twice": way(blocks="plan", merge_cells=2 * merged),
        "dense": way(attention="full"),
        **{name: config.changed(way(blocks="plan"), changes) for name, changes in more.items()},
    }


# ---------------------------------------------------------------------------------------------
# The likelihood of a plan.


class Likelihood:
    """Negative log-likelihoods under a sampler's plan; all ways share the images and orders.

    Args:
        merge_cells: steps of the sampler's plan are merged until each has at least this many cells.
    """

    def __init__(
        self, settings: config.Config, examples: Sequence[Example], merge_cells: int, together: int
    ):
        self._settings = settings
        rows = [row for n, one in enumerate(examples) for row in self._rows(one, n, merge_cells)]
        lengths = [RowShape(len(r.understanding.block), len(r.generation.block)) for r in rows]
        shape, dense = longest_of(lengths, 8), settings.diffusion.attention == "full"
        self._batches = [
            stack(rows[i : i + together], shape, settings.model, full_attention=dense)
            for i in range(0, len(rows), together)
        ]

    def _rows(self, example: Example, number: int, merge_cells: int) -> Iterator[CorruptedRow]:
        """Yields one row for the whole plan; for a dense model, one row per step of the plan."""
        settings, model = self._settings, self._settings.model
        rng = np.random.default_rng(number)
        sampling, side = settings.sampling, model.grid_size
        sizes = orders.counts(sampling.schedule, sampling.num_steps, side**2, sampling.shift)
        sizes = orders.merged(sizes, merge_cells)
        order = orders.order(sampling.order, side, side, int(rng.integers(ORDER_SEEDS)))
        prompt = prompt_row(
            example.parts, text_mask_id=model.text_mask_id, codes_per_token=model.codes_per_token
        )

        def corrupted(blocks: Blocks, *, full_attention: bool) -> CorruptedRow:
            return CorruptedRow(
                prompt, example.response, "image", blocks, model, full_attention=full_attention
            )

        if settings.diffusion.attention != "full":
            blocks = diffusion.plan_blocks(order, sizes, example.given, 1)
            yield corrupted(blocks, full_attention=False)
            return
        rank = np.argsort(order)
        for stop, size in zip(np.cumsum(sizes), sizes, strict=True):
            blocks = Blocks(
                np.full(len(order), FIRST_BLOCK, np.int32),
                rank >= stop - size,
                FIRST_BLOCK,
                (),
                ((stop - size <= rank) & (rank < stop)).astype(float),
                float(size),
            )
            yield corrupted(blocks, full_attention=True)

    def of(self, params: Denoiser) -> float:
        """Returns nats per code."""
        total = cells = 0.0
        for batch in self._batches:
            here = flops.count_tokens(batch.image_weight)
            total += here * float(_mean_nll(params, batch))
            cells += here
        return total / cells


@jax.jit
def _mean_nll(params: Denoiser, batch: Corrupted) -> jax.Array:
    return step.loss(params, batch)[1]["image_nll"]


# ---------------------------------------------------------------------------------------------
# A way to train.


def learn(settings: config.Config, here: World, merge_cells: int) -> dict[str, Any]:
    """Trains from random parameters until the budgets are spent; returns the values of its row.

    Args:
        merge_cells: of the merged plan, the same for all ways of a world.
    """
    model = Denoiser(settings.model, rngs=nnx.Rngs(settings.seed))
    data = open_source(settings, model)
    batches = data.batches
    assert isinstance(batches, SceneBatches)
    sample = exact.world_of(settings).sample
    samples = [sample("draw", exact.EVAL_SEED, i, "test") for i in range(here.scored)]
    examples = [batches.encoder.scene_example(one) for one in samples[: here.held_out]]
    taken = {
        name: Likelihood(settings, examples, merge, here.together)
        for name, merge in (("full", 1), ("merged", merge_cells))
    }
    state = _warm(init_state(settings, model), settings, batches)
    curve, pending = list[dict[str, Any]](), _marks(here)
    spent, seconds, begin = flops.Work(), 0.0, time.process_time()
    kept: Denoiser | None = None
    dataset = batches.dataset()
    for number in itertools.count():
        batch = dataset[number]
        assert batch is not None
        rate = optimizer.learning_rate(settings.optimizer, number, 0.0)
        state, logged = _step(state, batch, rate, settings)
        jax.block_until_ready(logged)
        spent = spent.plus(flops.work_of(batch, settings.model))
        seconds += time.process_time() - begin
        passed = {"operations": spent.flops / 1e12, "seconds": seconds}
        if due := [mark for mark in pending if passed[mark[0]] >= mark[1]]:
            pending = [mark for mark in pending if mark not in due]
            point = {"steps": number + 1, "loss_tokens": spent.with_loss, **passed}
            point |= {name: one.of(state.ema) for name, one in taken.items()}
            curve += [point | {"mark": mark} for mark in due]
            print({k: round(v, 4) for k, v in point.items()}, [*due], flush=True)
            if _marks(here)[PARTS - 1] in due:  # the first budget is spent
                kept = jax.tree.map(np.asarray, state.ema)
        if not pending:
            break
        begin = time.process_time()
    assert kept is not None
    pipe = data.pipe(jax.tree.map(jax.numpy.asarray, kept))
    row = {"curve": curve, "slots": spent.slots, "loss_tokens": spent.with_loss}
    scores = {
        name: _scores(pipe, samples, sampling)
        for name, sampling in _samplers(settings, merge_cells).items()
    }
    return row | {"scores": scores}


def step_times(ways: Mapping[str, config.Config], count: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each way: the CPU time of its steps, which alternate with those of others.

    Args:
        count: steps of each way.
    """
    runs = {}
    for name, settings in ways.items():
        model = Denoiser(settings.model, rngs=nnx.Rngs(settings.seed))
        batches = open_source(settings, model).batches
        assert isinstance(batches, SceneBatches)
        runs[name] = batches, _warm(init_state(settings, model), settings, batches)
    seconds = {name: list[float]() for name in runs}
    spent = dict.fromkeys(runs, flops.Work())
    for number, name in itertools.product(range(count), runs):
        (batches, state), settings = runs[name], ways[name]
        batch = batches.dataset()[number]
        assert batch is not None
        begin = time.process_time()
        state, logged = _step(
            state, batch, optimizer.learning_rate(settings.optimizer, number, 0.0), settings
        )
        jax.block_until_ready(logged)
        seconds[name].append(time.process_time() - begin)
        spent[name] = spent[name].plus(flops.work_of(batch, settings.model))
        runs[name] = batches, state
    for name, own in seconds.items():
        yield {"method": name, "steps": count, "step_s": float(np.median(own)),
               "operations": spent[name].flops / 1e12 / count,
               "note": "CPU seconds, median; operations of a step in 1e12"}  # fmt: skip


def _scores(pipe: SparseLaViDa, samples: list[Sample], sampling: config.Sampling) -> dict[str, Any]:
    """Draws scenes; art with the true layout, which names neither styles nor facings."""
    if pipe.settings.data.source != "art":
        return exact.as_json(exact.evaluate(pipe, "draw", len(samples), sampling=sampling))
    assert pipe.codec is not None
    examples = [pipe.encoder.scene_example(one) for one in samples]
    codes = np.stack(pipe.sample(examples, sampling=sampling, seed=exact.EVAL_SEED))
    images = list(pipe.codec.to_pixels(codes, None, sampling.vq_dtype))
    result = exact.tally("draw", samples, images, exact.world_of(pipe.settings))
    return exact.as_json(result) | exact.coherence(samples, images)


def _marks(here: World) -> list[tuple[str, float]]:
    budgets = {"operations": here.operations, "seconds": here.seconds}
    return [
        (name, whole * part / PARTS)
        for name, whole in budgets.items()
        if whole
        for part in range(1, PARTS + 1)
    ]


def _warm(state: step.TrainState, settings: config.Config, batches: SceneBatches):
    """Compiles the step of every group of tasks; returns the state as it was."""
    for group in batches.groups:
        copy = jax.tree.map(jax.numpy.copy, state)
        jax.block_until_ready(_step(copy, batches.batch(group, 0), 0.0, settings))
    return state


def _step(state: step.TrainState, batch: Corrupted, rate: float, settings: config.Config):
    return step.train_step(state, batch, np.float32(rate), settings=settings.optimizer)


def _samplers(settings: config.Config, merge_cells: int) -> dict[str, config.Sampling]:
    dense = settings.diffusion.attention == "full"
    whole = dataclasses.replace(
        settings.sampling, preset="dense" if dense else "sparse", merge_cells=0
    )
    merged = dataclasses.replace(whole, merge_cells=merge_cells)
    return {"full": whole, "merged": merged}


# ---------------------------------------------------------------------------------------------
# What was measured.

MEASURED = {
    "full plan, equal operations": lambda row: _at(row, "operations").get("full"),
    "merged plan, equal operations": lambda row: _at(row, "operations").get("merged"),
    "full plan, equal CPU time": lambda row: _at(row, "seconds").get("full"),
    "drawn correctly": lambda row: _score(row, "full", "share"),
    "drawn correctly, merged": lambda row: _score(row, "merged", "share"),
}


def _at(row: Mapping[str, Any], budget: str) -> dict[str, Any]:
    """Returns the point of the curve at which a budget was spent; {} if there was none."""
    mark = [budget, row["budget"][budget]]
    return next((point for point in row["curve"] if point["mark"] == mark), {})


def _score(row: Mapping[str, Any], plan: str, name: str) -> float | None:
    return row.get("scores", {}).get(plan, {}).get(name)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of ways with a budget of operations: mean ± standard deviation over seeds.

    Likelihoods are in nats per code. Tokens with a loss per operation are relative to the dense way
    with the same seed.
    """
    rows = [row for row in rows if row["budget"]["operations"]]
    lines, of = [], {(row["world"], row["method"], row["seed"]): row for row in rows}
    for here, method in dict.fromkeys((row["world"], row["method"]) for row in rows):
        own = {seed: row for (w, m, seed), row in of.items() if (w, m) == (here, method)}
        ratios = [
            _taught(row) / _taught(of[here, "dense", seed])
            for seed, row in own.items()
            if (here, "dense", seed) in of
        ]
        told = [scorers.mean_and_spread(ratios, 2)]
        for value in MEASURED.values():
            found = [value(row) for row in own.values()]
            told.append(scorers.mean_and_spread([one for one in found if one is not None]))
        lines.append((here, method, len(own), *told))
    taught = "tokens with a loss per operation, relative to dense"
    return markdown.table(("world", "way", "seeds", taught, *MEASURED), lines)


def curves(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of ways of the art world: the curve of each, as nats per code (TFLOP)."""
    rows = [row for row in rows if not row["budget"]["operations"]]
    lines = [
        (
            row["method"],
            row["curve"][-1]["steps"],
            *(f"{point['full']:.3f} ({point['operations']:.1f})" for point in row["curve"]),
            *(
                None if (share := _score(row, "full", name)) is None else f"{share:.3f}"
                for name in ("found", "coherent")
            ),
        )
        for row in rows
    ]
    quarters = (f"{round(point['mark'][1])} s" for point in rows[0]["curve"]) if rows else ()
    return markdown.table(("way", "steps", *quarters, "things found", "coherent"), lines)


def _taught(row: Mapping[str, Any]) -> float:
    point = _at(row, "operations")
    return point["loss_tokens"] / point["operations"]


def main(_: list[str]) -> None:
    """Trains every way and seed that has no row yet, and writes its row; or prints the table."""
    logging.set_verbosity(logging.WARNING)
    if TABLE.value:
        print(summary(rows := read_rows(SUITE)), curves(rows), sep="\n\n")
        return
    keep_programs()
    here, bench = WORLDS[WORLD.value], Bench(SUITE)
    shared = config.changed(config.read(pathlib.Path(f"configs/{here.file}.py")), here.changes)
    ways = ways_of(shared, here.more)
    if unknown := set(WAYS.value) - set(ways):
        sys.exit(
            f"benchmarks.learning: --ways={','.join(sorted(unknown))} is unknown: choose one of"
            f" {', '.join(ways)}."
        )
    if TIME_STEPS.value:
        timed = {name: ways[name] for name in WAYS.value or ways}
        for row in step_times(timed, TIME_STEPS.value):
            row_id = f"{WORLD.value}/{row['method']}"
            Bench("learning_time").write(row_id, {"world": WORLD.value} | row)
            print(row_id, f"{row['step_s']:.3f} s", f"{row['operations']:.4f} TFLOP", flush=True)
        return
    for seed in map(int, SEEDS.value):
        for name in WAYS.value or ways:
            row_id = f"{WORLD.value}/{name}/s{seed}"
            if (path := path_of(SUITE, row_id)).exists():
                print(f"{row_id}: has a row; to train it again, delete {path}")
                continue
            settings = dataclasses.replace(ways[name], seed=seed)
            print(row_id, flush=True)
            row = {"world": WORLD.value, "method": name, "seed": seed}
            row |= {"budget": {"operations": here.operations, "seconds": here.seconds}}
            bench.write(row_id, row | learn(settings, here, shared.diffusion.merge_cells))


if __name__ == "__main__":
    command.run(main)
