# SPDX-License-Identifier: Apache-2.0
"""Several ways to train on the same examples, as batches and as compiled steps that can be timed.

Step-causal training includes several rival masked blocks of a response at once and leaves the rest
of it out; masked diffusion as in LaViDa-O includes every token of the response, some of them
masked, with full attention.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from benchmarks import timing
from sparse_lavida_jax import config
from sparse_lavida_jax.data.batch import GroupShape, TrainingRow, longest_of, make_row
from sparse_lavida_jax.data.corrupted_rows import Corrupted
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.kernels import attention
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.scenes import tasks
from sparse_lavida_jax.scenes.prompts import ExampleMaker
from sparse_lavida_jax.sequence import Response, Text
from sparse_lavida_jax.training import flops, memory
from sparse_lavida_jax.training.loss import linear_cross_entropy, weighted_cross_entropy

LENGTH_MULTIPLE = 8  # tokens, as for the scenes
RANDOM_PROMPT = 250  # words per prompt when there are no data

MakeExample = Callable[[int], Example]


def methods(settings: config.Config) -> dict[str, config.Config]:
    """Returns the settings of each way to train; attention of the first two gives the same result.

    Without a kernel for the platform, tiles are skipped in plain `lax` (`kernels/blockwise.py`).
    """
    default = attention.default_implementation()
    tiles = "blockwise" if default == "reference" else default

    def way(implementation: str, **changes: Any) -> config.Config:
        model = {"attention_implementation": implementation}
        diffusion = {"weighting": "1/t", **changes}
        changes = {"model": model, "diffusion": diffusion, "data": {"packing": 1}}
        return config.changed(settings, changes)

    sparse = {"attention": "step_causal", "corruption": "blocks"}
    return {
        "step_causal": way(tiles, **sparse),
        "step_causal_mask": way("reference", **sparse),
        "vanilla": way(default, **(sparse | {"attention": "full", "blocks": "uniform"})),
    }


def scene_examples(encoder: ExampleMaker, seed: int) -> MakeExample:
    """Returns a function from numbers to examples of images to draw."""
    return lambda index: encoder.scene_example(tasks.sample("draw", seed, index))


def random_examples(model: config.Model, seed: int) -> MakeExample:
    """Returns a function from numbers to prompts of random words with images of random codes."""

    def make(index: int) -> Example:
        rng = np.random.default_rng((seed, index))
        words = rng.integers(0, model.text_mask_id, RANDOM_PROMPT)
        codes = rng.integers(0, model.codebook_size, (model.num_cells, model.codes_per_token))
        parts = (Text(words.astype(np.int32)), Response(len(codes)))
        given = np.zeros(len(codes), bool)
        return Example(parts, codes.astype(np.int32), given, "image", None, len(codes))

    return make


def batches(
    settings: config.Config, make_example: MakeExample, count: int, rows: int
) -> list[Corrupted]:
    """Returns batches of one static shape, set by the longest row, with the same examples each."""
    made = [
        make_row(make_example(index), settings, np.random.default_rng(index))
        for index in range(count * rows)
    ]
    room = longest_of([row.length for row in made], LENGTH_MULTIPLE)
    shape = GroupShape(room, views=0, predicts="generation", rows=(room,))
    each = [made[start : start + rows] for start in range(0, len(made), rows)]
    return [batch for own in each if (batch := TrainingRow.batch(own, shape, settings))]


def counted(found: list[Corrupted], model: config.Model) -> dict[str, dict[str, float]]:
    """Returns means per batch: tokens, tokens with a loss, slots, and operations."""
    works = [flops.work_of(batch, model) for batch in found]
    tokens = {
        "loss": statistics.mean(one.with_loss for one in works),
        "useful": statistics.mean(one.tokens for one in works),
        "padded": statistics.mean(one.slots for one in works),
    }
    return {"tokens": tokens, "flops": {"useful": statistics.mean(one.flops for one in works)}}


class Trainer:
    """A compiled way to train.

    Args:
        settings: of this way.
        found: batches of one shape.
        options: for the compiler.
    """

    def __init__(
        self, settings: config.Config, found: list[Corrupted], options: dict[str, Any] | None = None
    ):
        self.found = found
        # How attention is computed is part of the model's settings, which are not in its arrays.
        shapes = jax.eval_shape(lambda: memory.first_state(settings))
        self.structure = jax.tree.structure(shapes)
        begin = time.perf_counter()
        lowered = memory.lowered_step(settings, shapes, found[0], np.float32(0))
        self.step = lowered.compile(compiler_options=options)
        self.compile_s = time.perf_counter() - begin
        held: Any = self.step.memory_analysis()
        self.temporaries: int = held.temp_size_in_bytes

    def run(self, leaves: list[Any], index: int) -> tuple[float, float]:
        """Returns the seconds of a step on one of the batches, and its loss.

        The learning rate is 0, so every step uses the same parameters.

        Args:
            leaves: `arrays_of` a state, donated and replaced: all ways to train share them.
        """
        batch = jax.block_until_ready(jax.device_put(self.found[index % len(self.found)]))
        given = jax.tree.unflatten(self.structure, leaves)
        begin = time.perf_counter()
        after, logged = self.step(given, batch, np.float32(0))
        loss = float(logged["loss"])
        jax.block_until_ready(after)
        seconds = time.perf_counter() - begin
        leaves[:] = jax.tree.leaves(after)
        return seconds, loss


def arrays_of(settings: config.Config, params: Denoiser) -> list[Any]:
    """Returns the arrays of the state of a run at step 0, with copies of the parameters."""
    return jax.tree.leaves(jax.tree.map(jnp.copy, memory.first_state(settings, params)))


def head_program(
    width: int, words: int, tokens: int, chunk: int, dtype: str, kernel_dtype: str, place: Sharding
) -> Any:
    """Returns the loss over a vocabulary with its gradients, compiled from shapes.

    Args:
        chunk: tokens whose logits exist at a time; 0: all, with the plain cross-entropy.
        dtype: of hidden states and products.
        kernel_dtype: float32, or another for a frozen kernel.
        place: the device.
    """

    def loss(hidden, kernel, target, weight):
        if chunk:
            return linear_cross_entropy(hidden, kernel, target, weight, chunk)[0]
        logits = hidden @ kernel.astype(hidden.dtype)
        return weighted_cross_entropy(logits, target, weight)[0]

    given = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place)
        for shape, dtype in (
            ((1, tokens, width), dtype),
            ((width, words), kernel_dtype),
            ((1, tokens), "int32"),
            ((1, tokens), "float32"),
        )
    ]
    by = (0, 1) if kernel_dtype == "float32" else (0,)
    return jax.jit(jax.value_and_grad(loss, argnums=by)).lower(*given).compile()


def measure(
    settings: config.Config, params: Denoiser, make_example: MakeExample, *, runs: int, batch: int
) -> dict[str, dict[str, Any]]:
    """Times all ways to train in turn; returns the values of a row for each, by name.

    Args:
        runs: timed steps per way, each on its own batch.
        batch: examples per step.
    """
    rows, trainers = {}, {}
    for name, way in methods(settings).items():
        found = batches(way, make_example, runs, batch)
        trainers[name] = trainer = Trainer(way, found)
        print(f"{name}: compiled in {trainer.compile_s:.0f} s", flush=True)
        rows[name] = {
            "task": "draw",
            "model": settings.name,
            "method": name,
            "attention": way.model.attention_implementation,
            "dtype": settings.model.compute_dtype,
            "batch": batch,
            "compile_s": trainer.compile_s,
            **counted(found, way.model),
            "bytes": {"temporaries": trainer.temporaries},
        }
    leaves = arrays_of(settings, params)
    del params
    for trainer in trainers.values():
        trainer.run(leaves, 0)  # to warm up
    steps = {name: functools.partial(one.run, leaves) for name, one in trainers.items()}
    for name, pairs in timing.in_turn(steps, runs).items():
        seconds, losses = zip(*pairs, strict=True)
        loss = {"mean": statistics.mean(losses), "std": statistics.stdev(losses), "batches": runs}
        rows[name] |= {**timing.times(seconds), "loss": loss}
    return rows
