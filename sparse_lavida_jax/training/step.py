# SPDX-License-Identifier: Apache-2.0
"""One step of training: the state, the loss, its gradient, and the update."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from sparse_lavida_jax import config
from sparse_lavida_jax.data.corrupted_rows import Corrupted
from sparse_lavida_jax.models import parameters, sharding
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.training import distil, optimizer, style
from sparse_lavida_jax.training.loss import (
    linear_cross_entropy,
    tile_of,
    weighted_cross_entropy,
)

# Of a microbatch on a CPU, ours: their activations fit in the caches of a core, and a step of a
# small model takes two thirds of the time.
CPU_TOKENS = 600

S = TypeVar("S", "TrainState", "HeldState")


@flax.struct.dataclass
class TrainState:
    """Everything that a run needs to be resumed exactly, bit for bit.

    Attributes:
        step: optimizer steps done; also the index of the next batch.
        params: the model, or the trained part of it.
        ema: moving average of `params`, or None.
        opt_state: of the optimizer.
        skipped: the current number of consecutive steps skipped for a non-finite gradient.
        frozen: the part that is not trained, or None. Not saved: `init_state` makes it again.
    """

    step: Int[Array, ""]
    params: Denoiser
    ema: Denoiser | None
    opt_state: PyTree
    skipped: Int[Array, ""]
    frozen: Denoiser | None = None

    @property
    def saved(self) -> "TrainState":
        """The part that is written to disk."""
        return dataclasses.replace(self, frozen=None)


class _Structure:
    """The structure of a state, compared by identity: to compare trees of modules takes long."""

    def __init__(self, tree: Any):
        self.tree = tree


# Equal structures are the same object, so that a second run uses the programs of the first.
_structure_of = functools.cache(_Structure)


@jax.tree_util.register_pytree_node_class
class HeldState:
    """A state as a flat list of arrays, which a step takes and returns in its place.

    At every call modules are taken apart and put together again in Python: for the 277 arrays of
    `configs/scenes.py` 15.5 ms on the host of an H200, and 1.1 ms for a list (measured by hand).
    """

    def __init__(self, leaves: Iterable[Any], structure: _Structure):
        self._leaves, self._structure = list(leaves), structure

    @classmethod
    def of(cls, state: TrainState) -> "HeldState":
        """Returns the list of a state."""
        leaves, tree = jax.tree.flatten(state)
        return cls(leaves, _structure_of(tree))

    @property
    def state(self) -> TrainState:
        """The state with its modules."""
        return self._structure.tree.unflatten(self._leaves)

    def tree_flatten(self) -> tuple[list[Any], _Structure]:
        return self._leaves, self._structure

    @classmethod
    def tree_unflatten(cls, structure: _Structure, leaves: Iterable[Any]) -> "HeldState":
        return cls(leaves, structure)


# For "text" and for "image": what the weighted sum of a loss is divided by (in tokens, in codes),
# and the number of targets with a loss.
Denominators = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]


def denominators(batch: Corrupted) -> Denominators:
    """Returns the divisors of the loss for a whole batch, however it will be split."""
    codes = 1 if batch.image_target is None else batch.image_target.shape[2]

    def count(weight, each: int):
        if weight is None:
            return jnp.float32(1)
        each = each if weight.ndim == 2 else 1
        return jnp.maximum((weight > 0).sum() * each, 1).astype(jnp.float32)

    totals = (
        ("text", batch.text_total, batch.text_weight, 1),
        ("image", batch.image_total, batch.image_weight, codes),
    )
    return {
        modality: (jnp.maximum(total.sum() * each, 1), count(weight, each))
        for modality, total, weight, each in totals
    }


def loss(
    params: Denoiser,
    batch: Corrupted,
    over: Denominators | None = None,
    chunk: int = 0,
    draws: style.StyleDraws | None = None,
    warmth: style.Warmth = style.WARM,
    taught: distil.Teaching | None = None,
    teacher: Denoiser | None = None,
    distil_weight: float = 0.0,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns the training loss and values to log (diffusion.py explains the weights).

    Text and image are averaged separately, each over the whole batch, and added.

    Args:
        over: of the whole batch, if this one is a part; by default this one is whole.
        chunk: tokens per row whose logits exist at a time; 0: by size.
        draws: for the style codes of images; None: they have none.
        warmth: of the codes (`training.style`).
        taught, teacher: by whom images are taught (`training.distil`); None: by nobody.
        distil_weight: of what it teaches.
    """
    over = over or denominators(batch)
    features = None if batch.pixels is None else params.see(batch.pixels)
    total, logged, code = jnp.float32(0), {}, None
    if draws is not None and batch.predicts != "understanding":
        code, divergence, _ = style.coded(params, batch, features, draws, warmth.hardness)
        logged["style_nll"] = divergence.sum() / over["image"][0]
        total += warmth.weight * logged["style_nll"]
    streams = batch.understanding, batch.generation
    hidden, _ = params(*streams, features, wanted=batch.predicts, style=code)
    for modality, stream, target, weight in (
        ("text", "understanding", batch.text_target, batch.text_weight),
        ("image", "generation", batch.image_target, batch.image_weight),
    ):
        if stream not in hidden or weight is None:
            continue
        assert target is not None
        if weight.ndim < target.ndim:
            weight = jnp.broadcast_to(weight[..., None], target.shape)
        x, is_text = hidden[stream], modality == "text"
        kernel = (params.text_head if is_text else params.image_head.logits).kernel[...]
        rows, tokens = len(target), math.prod(target.shape[1:])
        if tile := chunk or tile_of(rows, tokens, kernel, x.dtype):
            x = x if is_text else params.image_head.codes(x, target)
            target, weight = (part.reshape(rows, tokens) for part in (target, weight))
            weighted, plain = linear_cross_entropy(x, kernel, target, weight, tile)
        else:
            logits = params.text_logits(x) if is_text else params.image_logits(x, target)
            weighted, plain = weighted_cross_entropy(logits, target, weight)
        of_weighted, of_plain = over[modality]
        total += weighted / of_weighted
        logged[f"{modality}_nll"] = plain / of_plain
    if taught is not None and teacher is not None and batch.predicts != "understanding":
        each = distil.loss(params, teacher, batch, features, code, taught)
        logged["distil_nll"] = (each * taught.share).sum()
        total += distil_weight * logged["distil_nll"]
    return total, logged


def gradient(
    params: Denoiser,
    batch: Corrupted,
    *,
    frozen: Denoiser | None = None,
    microbatches: int = 1,
    chunk: int = 0,
    draws: style.StyleDraws | None = None,
    warmth: style.Warmth = style.WARM,
    taught: distil.Teaching | None = None,
    teacher: Denoiser | None = None,
    distil_weight: float = 0.0,
) -> tuple[Float[Array, ""], dict[str, Array], Denoiser]:
    """Returns loss, values to log, and the gradient, computed a few rows at a time.

    Every part of a batch is divided by the divisors of the whole (docs/method.md), so the parts add
    up to the same result. Rows are dealt to the microbatches in turn, so that each has rows from
    every device.

    Args:
        frozen: the part of the model that gets no gradient, if `params` are not all of it.
        microbatches: number of parts that are processed in turn; it divides the number of rows.
        draws, warmth, taught, distil_weight: as in `loss`.
        teacher: as in `loss`; like `params`, without the part of `frozen`.
    """
    over = denominators(batch)

    whole_teacher = None if teacher is None else parameters.joined(teacher, frozen)

    def loss_of(params: Denoiser, rows: tuple[Any, ...]):
        batch, draws, taught = rows
        whole = parameters.joined(params, frozen)
        styled = draws, warmth
        return loss(whole, batch, over, chunk, *styled, taught, whole_teacher, distil_weight)

    part_of = jax.value_and_grad(loss_of, has_aux=True)
    if microbatches == 1:
        (value, logged), found = part_of(params, (batch, draws, taught))
        return value, logged, found

    leaves, tree = jax.tree.flatten((batch, draws, taught))
    parts = [jnp.asarray(x).reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1) for x in leaves]

    def part(leaves):
        return part_of(params, tree.unflatten(leaves))

    def add(sums, leaves):
        return jax.tree.map(jnp.add, sums, part(leaves)), None

    like = jax.eval_shape(part, [x[0] for x in parts])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    ((value, logged), found), _ = jax.lax.scan(add, zeros, parts)
    return value, logged, found


def default_microbatches(batch: Corrupted) -> int:
    """Returns how many microbatches a step makes of a batch unless it is told.

    One; on a CPU so many that `CPU_TOKENS` are passed at a time, or a single row.
    """
    if jax.default_backend() != "cpu" or jax.sharding.get_abstract_mesh().size > 1:
        return 1
    streams = (one for one in (batch.understanding, batch.generation) if one is not None)
    shapes = [one.tags.block.shape for one in streams]
    rows, tokens = shapes[0][0], sum(rows * length for rows, length in shapes)
    numbers = (n for n in range(1, rows + 1) if rows % n == 0 and tokens <= n * CPU_TOKENS)
    return next(numbers, rows)


@functools.partial(
    jax.jit, static_argnames=("settings", "microbatches", "loss_chunk"), donate_argnames=("state",)
)
def train_step(
    state: S,
    batch: Corrupted,
    learning_rate: Float[Array, ""],
    *,
    settings: config.Optimizer,
    microbatches: int = 0,
    loss_chunk: int = 0,
) -> tuple[S, dict[str, Array]]:
    """Returns the state after one optimizer step, held as it was given, and scalars to log.

    A step with a non-finite gradient leaves parameters and optimizer unchanged.

    Args:
        microbatches: as in `gradient`; 0: `default_microbatches`.
    """
    now = state.state if isinstance(state, HeldState) else state
    microbatches = microbatches or default_microbatches(batch)
    draws = style.draws(now.params.settings, now.step, len(batch.image_total))
    value, logged, found = gradient(
        now.params,
        batch,
        frozen=now.frozen,
        microbatches=microbatches,
        chunk=loss_chunk,
        draws=draws,
        warmth=style.warmth(settings, now.step),
        taught=distil.teaching(now.step, len(batch.image_total)) if settings.distil else None,
        teacher=now.ema,
        distil_weight=settings.distil,
    )
    norm = optax.tree.norm(found)
    update, opt_state = optimizer.update(settings, found, now.opt_state, now.params)
    params = jax.tree.map(lambda p, u: p - learning_rate * u, now.params, update)
    ema = now.ema
    if ema is not None:
        # Early in a run the decay is lower, so that the average forgets the initial parameters.
        decay = jnp.minimum(settings.ema, (1 + now.step) / (10 + now.step))
        ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, params)
    finite = jnp.isfinite(value) & jnp.isfinite(norm)
    before = (now.params, now.ema, now.opt_state)
    params, ema, opt_state = jax.tree.map(
        functools.partial(jnp.where, finite), (params, ema, opt_state), before
    )
    skipped = jnp.where(finite, 0, now.skipped + 1)
    logged |= {"loss": value, "gradient_norm": norm, "skipped": skipped}
    after = TrainState(now.step + 1, params, ema, opt_state, skipped, now.frozen)
    after = sharding.constrained(after)
    held: Any = HeldState.of(after) if isinstance(state, HeldState) else after
    return held, logged
