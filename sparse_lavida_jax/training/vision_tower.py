# SPDX-License-Identifier: Apache-2.0
r"""Teaches a vision tower to see things of the sheet, before the model that it is for is trained.

    python -m sparse_lavida_jax.training.vision_tower --config=configs/art.py \
        --out=runs/art.safetensors

LaViDa-O begins with a tower that can see (SigLIP); this is that of a small model. Answers to
questions say little about an image. Here every cell of it has labels: the thing and its style, its
size, where it faces, and which part of it is there. A linear head, which is thrown away, reads them
from the vision tokens. Runs take the tower by `train.vision_from`.
"""

import argparse
import functools
import pathlib
import time
from collections.abc import Callable, Iterator

import einops
import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.art.cell_labels import examples, kinds
from sparse_lavida_jax.art.sheet import taught
from sparse_lavida_jax.data import files
from sparse_lavida_jax.models import parameters
from sparse_lavida_jax.models.vision import VisionEncoder

STEPS, BATCH, TESTED, EVERY = 6000, 32, 256, 500
LEARNING_RATE, WARM_UP, WEIGHT_DECAY, LAST = 2e-3, 100, 0.01, 0.03
BACKGROUND_WEIGHT = 0.1  # of a cell without a thing; ours


class Seeing(nnx.Module):
    """A vision encoder, and a linear head on its normalised tokens."""

    def __init__(self, model: config.Model, values: int, *, rngs: nnx.Rngs):
        self.vision = VisionEncoder(model.vision, model.width, rngs=rngs)
        self.side = model.vision.grid_side
        self.cells = model.grid_size // self.side  # of a token, along each side
        self.head = nnx.Linear(model.width, self.cells**2 * values, rngs=rngs)

    def __call__(self, images: UInt8[Array, "b h w 3"]) -> Float[Array, "b y x n"]:
        """Returns the logits of all labels of each cell, kind by kind."""
        tokens = self.vision(images)
        size = jnp.mean(jnp.square(tokens), axis=-1, keepdims=True)
        return einops.rearrange(
            self.head(tokens * jax.lax.rsqrt(size + 1e-6)),
            "b (y x) (i j n) -> b (y i) (x j) n",
            y=self.side,
            i=self.cells,
            j=self.cells,
        )


def losses(
    logits: Float[Array, "b y x n"], labels: Int[Array, "b kinds y x"], values: tuple[int, ...]
) -> tuple[Float[Array, ""], Float[Array, " kinds"]]:
    """Returns the loss, and of the cells of things the shares labelled rightly, by kind."""
    is_thing = labels[:, 0] < values[0] - 1
    total, right = jnp.zeros(()), []
    for number, part in enumerate(jnp.split(logits, np.cumsum(values)[:-1], axis=-1)):
        own = labels[:, number]
        weight = is_thing if number else jnp.where(is_thing, 1.0, BACKGROUND_WEIGHT)
        loss = optax.softmax_cross_entropy_with_integer_labels(part, own)
        total += (loss * weight).sum() / weight.sum() / (1 if number == 0 else 2)
        right.append(((part.argmax(axis=-1) == own) & is_thing).sum() / is_thing.sum())
    return total, jnp.stack(right)


def train(settings: config.Config, steps: int) -> Iterator[tuple[int, Seeing, str]]:
    """Yields the number of steps done, the parameters, and what they see, from time to time.

    Raises:
        ConfigError: it is not a model of the art world whose vision tokens cover whole cells.
    """
    vision = settings.model.vision
    fits = vision and settings.model.grid_size % (vision.grid_side or 1) == 0
    if settings.data.source != "art" or not fits:
        raise config.ConfigError(
            f"{settings.name!r} is not a model of the art world whose vision tokens cover whole"
            " cells. Give a config such as configs/art.py."
        )
    sheet, cells = taught(settings.data), settings.model.grid_size
    values = tuple(kinds(sheet).values())
    seeing = Seeing(settings.model, sum(values), rngs=nnx.Rngs(settings.seed))
    rates = optax.warmup_cosine_decay_schedule(
        0.0, LEARNING_RATE, min(WARM_UP, steps // 2), steps, LAST * LEARNING_RATE
    )
    rule = optax.adamw(rates, weight_decay=WEIGHT_DECAY)
    state: PyTree = rule.init(seeing)  # pyright: ignore[reportArgumentType]  it is a pytree
    run, judge = _step(rule, values), jax.jit(functools.partial(_loss, values=values))
    tests = {
        name: examples(sheet, cells, f"see/{name}", 0, TESTED, held_out=name == "held_out")
        for name in ("test", "held_out")
    }
    begin = time.perf_counter()
    for number in range(steps):
        batch = examples(sheet, cells, "see/train", BATCH * number, BATCH)
        seeing, state = run(seeing, state, *batch)
        if (number + 1) % EVERY == 0 or number + 1 == steps:
            said = [f"step {number + 1} of {steps}, {time.perf_counter() - begin:.0f} s"]
            for name, (images, labels) in tests.items():
                shares = zip(kinds(sheet), judge(seeing, images, labels)[1], strict=True)
                said.append(name + "".join(f" {kind} {share:.3f}" for kind, share in shares))
            yield number + 1, seeing, ", ".join(said)


def _loss(seeing: Seeing, images: Array, labels: Array, *, values: tuple[int, ...]):
    return losses(seeing(images), labels, values)


def _step(rule: optax.GradientTransformation, values: tuple[int, ...]) -> Callable:
    @functools.partial(jax.jit, donate_argnums=1)
    def step(seeing: PyTree, state: PyTree, images: Array, labels: Array):
        call = functools.partial(_loss, values=values)
        gradient, _ = jax.grad(call, has_aux=True)(seeing, images, labels)
        updates, state = rule.update(gradient, state, seeing)
        return jax.tree.map(jnp.add, seeing, updates), state

    return step


def save(seeing: Seeing, path: pathlib.Path) -> None:
    """Writes the tower under the names that its parameters have in a model."""
    leaves = parameters.by_name(seeing).items()
    own = {name: np.asarray(leaf) for name, leaf in leaves if name.startswith("vision/")}
    with files.replacing(path) as new:
        safetensors.numpy.save_file(own, new)
        new.chmod(0o644)  # the library makes the file private


def main() -> None:
    parser = argparse.ArgumentParser(description="Teaches a vision tower to see the things of art.")
    parser.add_argument("--config", type=pathlib.Path, required=True, help="of the model")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="file to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps={given.steps} must be 1 or more")
    try:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        for _, seeing, said in train(config.read(given.config), given.steps):
            save(seeing, given.out)
            print(said, flush=True)
    except (config.ConfigError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
