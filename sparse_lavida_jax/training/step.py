# SPDX-License-Identifier: Apache-2.0
"""One step of training: the state, the loss, its gradient, and the update."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from sparse_lavida_jax import config
from sparse_lavida_jax.diffusion import Corrupted
from sparse_lavida_jax.models import parameters, sharding
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.training import optimizer
from sparse_lavida_jax.training.loss import linear_cross_entropy, weighted_cross_entropy


@flax.struct.dataclass
class TrainState:
    """Everything a run needs to go on to the bit.

    Attributes:
        step: optimizer steps done; also the next batch.
        params: the model, or the trained part of it.
        ema: moving average of `params`, or None.
        opt_state: of the optimizer.
        skipped: steps that were left out in a row until now, their gradient not being finite.
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
        """What is written to disk."""
        return dataclasses.replace(self, frozen=None)


@flax.struct.dataclass
class Denominators:
    """What the sums of a loss are divided by: of a whole batch, however it is cut.

    Attributes:
        text, image: of the weighted sums; in tokens and in codes.
        text_count, image_count: targets with a loss.
    """

    text: Float[Array, ""]
    image: Float[Array, ""]
    text_count: Float[Array, ""]
    image_count: Float[Array, ""]

    @classmethod
    def of(cls, batch: Corrupted) -> "Denominators":
        codes = 1 if batch.image_target is None else batch.image_target.shape[2]

        def count(weight, each: int):
            if weight is None:
                return jnp.float32(1)
            each = each if weight.ndim == 2 else 1
            return jnp.maximum((weight > 0).sum() * each, 1).astype(jnp.float32)

        return cls(
            jnp.maximum(batch.text_total.sum(), 1),
            jnp.maximum(batch.image_total.sum() * codes, 1),
            count(batch.text_weight, 1),
            count(batch.image_weight, codes),
        )


def loss(
    params: Denoiser, batch: Corrupted, over: Denominators | None = None, chunk: int = 0
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns the training loss and what is logged (diffusion.py says what the weights mean).

    Text and image are averaged apart and added, each over the whole batch.

    Args:
        over: of the batch that this one is a part of; by default this one is whole.
        chunk: tokens of a row whose logits exist at a time; 0: all of them.
    """
    over = over or Denominators.of(batch)
    features = None if batch.pixels is None else params.see(batch.pixels)
    hidden, _ = params(batch.understanding, batch.generation, features, wanted=batch.predicts)
    total, logged = jnp.float32(0), {}
    if "understanding" in hidden and batch.text_weight is not None:
        assert batch.text_target is not None
        target, weight = batch.text_target, batch.text_weight
        if chunk:
            kernel = params.text_head.kernel[...]
            weighted, plain = linear_cross_entropy(
                hidden["understanding"], kernel, target, weight, chunk
            )
        else:
            logits = params.text_logits(hidden["understanding"])
            weighted, plain = weighted_cross_entropy(logits, target, weight)
        total += weighted / over.text
        logged["text_nll"] = plain / over.text_count
    if "generation" in hidden and batch.image_weight is not None:
        assert batch.image_target is not None
        target, weight = batch.image_target, batch.image_weight
        if weight.ndim == 2:
            weight = jnp.broadcast_to(weight[..., None], target.shape)
        if chunk:
            head = params.image_head
            codes, kernel = head.codes(hidden["generation"]), head.logits.kernel[...]
            target_of, weight_of = (x.reshape(x.shape[0], -1) for x in (target, weight))
            weighted, plain = linear_cross_entropy(codes, kernel, target_of, weight_of, chunk)
        else:
            logits = params.image_logits(hidden["generation"])
            weighted, plain = weighted_cross_entropy(logits, target, weight)
        total += weighted / over.image
        logged["image_nll"] = plain / over.image_count
    return total, logged


def gradient(
    params: Denoiser,
    batch: Corrupted,
    *,
    frozen: Denoiser | None = None,
    microbatches: int = 1,
    chunk: int = 0,
) -> tuple[Float[Array, ""], dict[str, Array], Denoiser]:
    """Returns loss, what is logged, and the gradient, of a few rows at a time.

    However a batch is cut, every part is divided by what the whole would be (design of the loss in
    `diffusion.py`), so the parts add up to the same. Rows are dealt to the microbatches in turn,
    so that each has rows of every device.

    Args:
        frozen: the part of the model that gets no gradient, if `params` are not all of it.
        microbatches: parts that the batch is cut into, one after another; they divide its rows.
    """
    over = Denominators.of(batch)

    def loss_of(params: Denoiser, batch: Corrupted, over: Denominators):
        return loss(parameters.joined(params, frozen), batch, over, chunk)

    part_of = jax.value_and_grad(loss_of, has_aux=True)
    if microbatches == 1:
        (value, logged), found = part_of(params, batch, over)
        return value, logged, found

    leaves, tree = jax.tree.flatten(batch)
    parts = [jnp.asarray(x).reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1) for x in leaves]

    def part(leaves):
        return part_of(params, tree.unflatten(leaves), over)

    def add(sums, leaves):
        return jax.tree.map(jnp.add, sums, part(leaves)), None

    like = jax.eval_shape(part, [x[0] for x in parts])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    ((value, logged), found), _ = jax.lax.scan(add, zeros, parts)
    return value, logged, found


@functools.partial(
    jax.jit,
    static_argnames=("settings", "microbatches", "loss_chunk"),
    donate_argnames=("state",),
)
def train_step(
    state: TrainState,
    batch: Corrupted,
    learning_rate: Float[Array, ""],
    *,
    settings: config.Optimizer,
    microbatches: int = 1,
    loss_chunk: int = 0,
) -> tuple[TrainState, dict[str, Array]]:
    """Returns the state after one optimizer step, and scalars to log.

    A step whose gradient is not finite leaves parameters and optimizer as they were.
    """
    value, logged, found = gradient(
        state.params, batch, frozen=state.frozen, microbatches=microbatches, chunk=loss_chunk
    )
    norm = optax.tree.norm(found)
    update, opt_state = optimizer.update(settings, found, state.opt_state, state.params)
    params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, update)
    ema = state.ema
    if ema is not None:
        # An average that starts from scratch forgets its start as fast as it has seen steps.
        decay = jnp.minimum(settings.ema, (1 + state.step) / (10 + state.step))
        ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, params)
    finite = jnp.isfinite(value) & jnp.isfinite(norm)
    before = (state.params, state.ema, state.opt_state)
    params, ema, opt_state = jax.tree.map(
        functools.partial(jnp.where, finite), (params, ema, opt_state), before
    )
    skipped = jnp.where(finite, 0, state.skipped + 1)
    logged |= {"loss": value, "gradient_norm": norm, "skipped": skipped}
    after = TrainState(state.step + 1, params, ema, opt_state, skipped, state.frozen)
    return sharding.constrained(after), logged
