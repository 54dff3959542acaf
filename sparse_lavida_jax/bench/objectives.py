# SPDX-License-Identifier: Apache-2.0
"""Ways to train on the same examples, as batches and as compiled steps that can be timed.

Step-causal training shows several rival masked blocks of a response at once and leaves the rest of
it out; masked diffusion as LaViDa-O has it shows every token of the response, some of them masked,
and lets all see all.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_lavida_jax import config, train
from sparse_lavida_jax.data.batch import corrupt, longest_of, make_row, stack
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.diffusion import Corrupted
from sparse_lavida_jax.kernels import attention
from sparse_lavida_jax.models import lora
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.scenes import tasks
from sparse_lavida_jax.scenes.encoder import Encoder
from sparse_lavida_jax.sequence import Response, Text, stack_images
from sparse_lavida_jax.training import optimizer
from sparse_lavida_jax.training.flops import count_tokens
from sparse_lavida_jax.training.loss import linear_cross_entropy, weighted_cross_entropy
from sparse_lavida_jax.visibility import PAD_BLOCK, visible

LENGTH_MULTIPLE = 8  # tokens; as of the scenes
RANDOM_PROMPT = 250  # words of a prompt where there are no data

MakeExample = Callable[[int], Example]


def methods(settings: config.Config) -> dict[str, config.Config]:
    """Returns the settings of each way to train; attention of the first two gives the same.

    Where there is no kernel, tiles are skipped in plain `lax` (`kernels/blockwise.py`).
    """
    default = attention.default_implementation()
    tiles = "blockwise" if default == "reference" else default

    def way(implementation: str, **changes: Any) -> config.Config:
        return dataclasses.replace(
            settings,
            model=dataclasses.replace(settings.model, attention_implementation=implementation),
            diffusion=dataclasses.replace(settings.diffusion, weighting="1/t", **changes),
        )

    sparse = {"attention": "step_causal", "corruption": "blocks"}
    return {
        "step_causal": way(tiles, **sparse),
        "step_causal_mask": way("reference", **sparse),
        "vanilla": way(default, **(sparse | {"attention": "full", "blocks": "uniform"})),
    }


def scene_examples(encoder: Encoder, seed: int) -> MakeExample:
    """Returns images to draw, by number."""
    return lambda index: encoder.scene_example(tasks.sample("draw", seed, index))


def random_examples(model: config.Model, seed: int) -> MakeExample:
    """Returns prompts of random words and images of random codes, by number."""

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
    """Returns batches of one static shape, the longest row's: the same examples for all ways."""
    made = [
        make_row(make_example(index), settings, np.random.default_rng(index))
        for index in range(count * rows)
    ]
    shape = longest_of([row.length for row in made], LENGTH_MULTIPLE)
    return [
        stack(
            [corrupt(row, settings.model) for row in made[start : start + rows]],
            shape,
            settings.model,
            full_attention=settings.diffusion.attention != "step_causal",
            pixels=stack_images([row.example.pixels for row in made[start : start + rows]]),
        )
        for start in range(0, len(made), rows)
    ]


def counted(found: list[Corrupted]) -> dict[str, float]:
    """Returns means of a batch: tokens with a loss, that are something, and that are computed."""
    loss, useful, padded = 0, 0, 0
    for batch in found:
        for stream, weight in (
            (batch.understanding, batch.text_weight),
            (batch.generation, batch.image_weight),
        ):
            if stream is None:
                continue
            useful += int((stream.layout.block != PAD_BLOCK).sum())
            padded += stream.layout.block.size
            loss += count_tokens(weight)
    return {name: n / len(found) for name, n in
            (("loss", loss), ("useful", useful), ("padded", padded))}  # fmt: skip


def flops(settings: config.Config, found: list[Corrupted], per_token: dict[str, int]) -> float:
    """Returns what a step computes on average: matrices on all tokens, attention on its pairs.

    Six for every element of a matrix and token, 12 for every pair of tokens and channel of the
    heads. A kernel computes the pairs that see each other (the tiles around them are not counted),
    everything else all pairs. What is computed again for `remat` is not counted, nor the heads: the
    chunked loss runs them on the tokens with a loss alone.

    Args:
        per_token: `described.matrices`.
    """
    model, total = settings.model, 0.0
    implementation = model.attention_implementation
    for batch in found:
        streams = [s for s in (batch.understanding, batch.generation) if s is not None]
        sizes = [(per_token["understanding"], batch.understanding),
                 (per_token["generation"] + per_token["shared"], batch.generation)]  # fmt: skip
        total += sum(6.0 * size * s.tokens.shape[0] * s.tokens.shape[1]
                     for size, s in sizes if s is not None)  # fmt: skip
        block, horizon = (
            np.concatenate([np.asarray(getattr(s.layout, name)) for s in streams], axis=1)
            for name in ("block", "horizon")
        )
        joint = _pairs(block, horizon, implementation)
        own = sum(
            _pairs(np.asarray(s.layout.block), np.asarray(s.layout.horizon), implementation)
            for s in streams
            if batch.predicts == "both" or s is batch.generation
        )
        pairs = model.num_joint_layers * joint + model.num_split_layers * own
        total += 12.0 * model.num_heads * model.head_dim * pairs
    return total / len(found)


def _pairs(block: np.ndarray, horizon: np.ndarray, implementation: str) -> int:
    if implementation == "reference":
        return block.shape[0] * block.shape[1] ** 2
    sees = visible(block[:, :, None], horizon[:, :, None], block[:, None, :])
    return int((sees & (block != PAD_BLOCK)[:, :, None]).sum())


@dataclasses.dataclass
class State:
    """What all ways to train pass on: the arrays of one `TrainState`, in turn donated by each."""

    leaves: list[Any]

    @classmethod
    def of(cls, settings: config.Config, params: Denoiser) -> "State":
        # A step donates what it is given, and the parameters are the caller's.
        return cls(jax.tree.leaves(jax.tree.map(jnp.copy, _state(settings, params))))


class Trainer:
    """A way to train, compiled.

    Args:
        settings: of the way.
        found: batches of one shape.
        options: of the compiler.
    """

    def __init__(
        self,
        settings: config.Config,
        found: list[Corrupted],
        options: dict[str, Any] | None = None,
    ):
        self.found = found
        # How to attend is told by the settings of the model, which are in no array.
        shapes = jax.eval_shape(
            lambda: _state(settings, Denoiser(settings.model, rngs=nnx.Rngs(0)))
        )
        self.structure = jax.tree.structure(shapes)
        begin = time.perf_counter()
        self.step = train.train_step.lower(
            shapes,
            found[0],
            np.float32(0),
            settings=settings.optimizer,
            microbatches=settings.train.microbatches,
            loss_chunk=settings.train.loss_chunk,
        ).compile(compiler_options=options)
        self.compile_s = time.perf_counter() - begin
        memory: Any = self.step.memory_analysis()
        self.temporaries: int = memory.temp_size_in_bytes

    def run(self, state: State, index: int) -> tuple[float, float]:
        """Returns the seconds of a step on one of the batches, and its loss.

        The learning rate is 0: every step is of the same parameters.
        """
        batch = jax.block_until_ready(jax.device_put(self.found[index % len(self.found)]))
        given = jax.tree.unflatten(self.structure, state.leaves)
        begin = time.perf_counter()
        after, logged = self.step(given, batch, np.float32(0))
        loss = float(logged["loss"])
        jax.block_until_ready(after)
        seconds = time.perf_counter() - begin
        state.leaves = jax.tree.leaves(after)
        return seconds, loss


def _state(settings: config.Config, params: Denoiser) -> train.TrainState:
    params = lora.begin(settings, params, jax.random.key(settings.seed))
    trained, frozen = optimizer.parted(settings, params)
    opt_state = optimizer.init(settings.optimizer, trained)
    return train.TrainState(jnp.int32(0), trained, None, opt_state, jnp.int32(0), frozen)


def head_memory(
    width: int, vocabulary: int, tokens: int, chunk: int, dtype: str
) -> tuple[int, int]:
    """Returns bytes of temporaries and results of the loss over a vocabulary and its gradients.

    Compiled for this device from shapes: nothing is allocated.

    Args:
        chunk: tokens whose logits exist at a time; 0: all, by the plain cross-entropy.
    """

    def loss(hidden, kernel, target, weight):
        if chunk:
            return linear_cross_entropy(hidden, kernel, target, weight, chunk)[0]
        logits = hidden @ kernel.astype(hidden.dtype)
        return weighted_cross_entropy(logits, target, weight)[0]

    given = (
        jax.ShapeDtypeStruct((1, tokens, width), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((width, vocabulary), jnp.float32),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
        jax.ShapeDtypeStruct((1, tokens), jnp.float32),
    )
    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*given).compile()
    found: Any = program.memory_analysis()
    return found.temp_size_in_bytes, found.output_size_in_bytes
