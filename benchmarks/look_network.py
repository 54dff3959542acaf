# SPDX-License-Identifier: Apache-2.0
"""A small network that names the look in a box: a thing, its style and where it faces.

It compares nothing with the sheet: it was trained on crops of true scenes (`judged_crops`).
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree, UInt8

from benchmarks.judged_crops import SEED, SIDE, Box, crop, examples, padded
from sparse_lavida_jax.art import sheet
from sparse_lavida_jax.art.world import STEP, Placed

WEIGHTS = pathlib.Path(__file__).with_name("second_judge.safetensors")
BATCH, ROUNDS, POOL, EPOCHS = 128, 10, 24_576, 3  # a round learns from POOL new crops
FEW = 8  # crops, as of one image, that are judged in a smaller batch
LEARNING_RATE, WARM_UP, WEIGHT_DECAY = 2e-3, 200, 0.01
WIDTHS = ((5, 2, 24), (3, 2, 48), (3, 1, 64), (3, 2, 80))  # kernel, stride, channels
HIDDEN = 96
UNSURE = 0.5  # a smaller margin names nothing for certain; ours
NOTHING = ("nothing", "", "")

Look = tuple[str, str, str]  # name, style, facing


@dataclasses.dataclass(frozen=True)
class Judged:
    """What the network names in boxes.

    Attributes:
        names: English names of the sheet, or "nothing".
        styles, facings: "" for nothing; a thing without a front faces "".
        margins: probability of the named look, less that of the next one.
    """

    names: list[str]
    styles: list[str]
    facings: list[str]
    margins: Float[np.ndarray, " n"]

    @property
    def looks(self) -> list[Look]:
        return list(zip(self.names, self.styles, self.facings, strict=True))


def judge(pixels: UInt8[np.ndarray, "h w 3"], boxes: Sequence[Box]) -> Judged:
    """Names what is in boxes of an image.

    Raises:
        ValueError: a box is not square, or not inside the image.
        FileNotFoundError: there are no weights.
    """
    bordered = padded(pixels)
    for left, top, right, bottom in boxes:
        height, width = (side // STEP for side in pixels.shape[:2])
        if not (0 <= left < right <= width and 0 <= top < bottom <= height) or (
            right - left != bottom - top
        ):
            raise ValueError(
                f"the box {(left, top, right, bottom)} is not a square inside the image, which is"
                f" {width}x{height} steps of {STEP} pixels. Give left, top, right and bottom in"
                " steps, as `Placed.box` does."
            )
    return judge_crops(np.array([crop(bordered, box) for box in boxes], np.uint8))


def judge_crops(crops: UInt8[np.ndarray, "*n"]) -> Judged:
    """Names crops [n 32 32 3], which may be none."""
    network, found, known = load(), list[np.ndarray](), looks()
    batch = FEW if len(crops) <= FEW else BATCH
    for start in range(0, len(crops), batch):
        part = crops[start : start + batch]
        filled = np.zeros((batch, SIDE, SIDE, 3), np.uint8)
        filled[: len(part)] = part
        found.append(np.asarray(_probabilities(network, filled))[: len(part)])
    shares = np.concatenate(found) if found else np.zeros((0, len(known)), np.float32)
    best = shares.argmax(axis=1)
    top = np.sort(shares, axis=1)[:, -2:]
    names, styles, facings = ([known[number][part] for number in best] for part in range(3))
    return Judged(names, styles, facings, top[:, 1] - top[:, 0])


@functools.cache
def looks() -> tuple[Look, ...]:
    """Lists what the network can say: a class for each look, the last one for nothing."""
    return (
        *(
            (thing.name, style, facing)
            for thing in sheet.load().things
            for style in sheet.STYLES
            for facing in (("left", "right") if thing.drawn else ("",))
        ),
        NOTHING,
    )


@functools.cache
def _numbers() -> dict[Look, int]:
    return {look: number for number, look in enumerate(looks())}


class Network(nnx.Module):
    """Four convolutions and two dense layers; each but the last is normalised over channels."""

    def __init__(self, *, rngs: nnx.Rngs):
        convolutions, norms, channels, side = [], [], 3, SIDE
        for kernel, stride, width in WIDTHS:
            convolutions.append(
                nnx.Conv(channels, width, (kernel, kernel), strides=stride, rngs=rngs)
            )
            norms.append(nnx.LayerNorm(width, rngs=rngs))
            channels, side = width, side // stride
        self.convolutions, self.norms = nnx.List(convolutions), nnx.List(norms)
        self.hidden = nnx.Linear(side * side * channels, HIDDEN, rngs=rngs)
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.looks = nnx.Linear(HIDDEN, len(looks()), rngs=rngs)

    def __call__(self, crops: UInt8[Array, "b 32 32 3"]) -> Float[Array, "b looks"]:
        """Returns the logits of looks."""
        x = crops.astype(jnp.float32) / 127.5 - 1
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = jax.nn.relu(norm(convolution(x)))
        return self.looks(jax.nn.relu(self.norm(self.hidden(x.reshape(len(x), -1)))))


@jax.jit
def _probabilities(network: Network, crops: UInt8[Array, "b 32 32 3"]) -> Float[Array, "b looks"]:
    return jax.nn.softmax(network(crops), axis=-1)


def train(rounds: int, pool: int) -> Network:
    """Returns a network that learned from rounds of new crops; weights are kept after each."""
    network = Network(rngs=nnx.Rngs(SEED))
    steps = rounds * EPOCHS * (pool // BATCH)
    rates = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, min(WARM_UP, steps // 2), steps)
    optimizer = optax.adamw(rates, weight_decay=WEIGHT_DECAY)
    opt_state: PyTree = optimizer.init(network)  # pyright: ignore[reportArgumentType]  it is a pytree
    run, start = _make_step(optimizer), time.perf_counter()
    for number in range(rounds):
        crops, things = examples(f"train/{number}", pool)
        labels, loss = labels_of(things), jnp.zeros(())
        for epoch in range(EPOCHS):
            order = np.random.default_rng((SEED, number, epoch)).permutation(pool)
            for batch in order[: pool // BATCH * BATCH].reshape(-1, BATCH):
                network, opt_state, loss = run(network, opt_state, crops[batch], labels[batch])
        save(network)
        load.cache_clear()
        seconds = time.perf_counter() - start
        print(f"round {number + 1} of {rounds}: loss {loss:.4f}, {seconds:.0f} s", flush=True)
    return network


def _make_step(optimizer: optax.GradientTransformation) -> Callable:
    def loss_of(network: Network, crops, labels) -> Float[Array, ""]:
        losses = optax.softmax_cross_entropy_with_integer_labels(network(crops), labels)
        return jnp.mean(losses)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(network: PyTree, opt_state: PyTree, crops, labels):
        loss, gradient = jax.value_and_grad(loss_of)(network, crops, labels)
        updates, opt_state = optimizer.update(gradient, opt_state, network)
        return jax.tree.map(jnp.add, network, updates), opt_state, loss

    return step


def labels_of(things: Sequence[Placed | None]) -> Int[np.ndarray, " n"]:
    """Returns the number of the look of each thing."""
    return np.array([_numbers()[look_of(thing)] for thing in things], np.int32)


def look_of(thing: Placed | None) -> Look:
    return (thing.name, thing.style, thing.facing) if thing else NOTHING


def save(network: Network) -> None:
    """Writes the weights in half precision."""
    leaves = jax.tree_util.tree_leaves_with_path(network)
    safetensors.numpy.save_file(
        {jax.tree_util.keystr(path): np.asarray(leaf, np.float16) for path, leaf in leaves}, WEIGHTS
    )
    WEIGHTS.chmod(0o644)  # the library makes the file private


@functools.cache
def load() -> Network:
    """Reads the weights.

    Raises:
        FileNotFoundError: there are none.
    """
    if not WEIGHTS.exists():
        raise FileNotFoundError(
            f"the second judge has no weights at {WEIGHTS}: make them with"
            " `python -m benchmarks.second_judge --train`."
        )
    arrays = safetensors.numpy.load_file(WEIGHTS)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(arrays[jax.tree_util.keystr(path)], jnp.float32),
        Network(rngs=nnx.Rngs(0)),
    )
