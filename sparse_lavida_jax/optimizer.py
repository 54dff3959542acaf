# SPDX-License-Identifier: Apache-2.0
"""AdamW, or Muon for matrices, with a learning rate that follows the progress of the run."""

import math
from typing import TypeVar, cast

import jax
import optax
from jaxtyping import PyTree
from optax.contrib import MuonDimensionNumbers, muon

from sparse_lavida_jax import config

T = TypeVar("T")  # a module: a pytree of parameters, or of their gradients

VECTORS = ("norm", "bias", "register")  # words in the names of parameters of one axis
# Root mean square of a Muon update relative to the learning rate, so that matrices take steps of
# the size that Adam's would have (arXiv:2502.16982, Sec. 2.2).
MUON_RMS = 0.2


def make_optimizer(settings: config.Optimizer) -> optax.GradientTransformation:
    """Returns clipping, preconditioning and decoupled weight decay; the caller scales by -rate.

    Norms, biases and registers are not decayed, nor is what Muon leaves to Adam. A stacked layer
    has one axis more, so they are told by their names.
    """
    if settings.kind == "adamw":
        step = optax.chain(
            optax.scale_by_adam(settings.b1, settings.b2),
            optax.add_decayed_weights(settings.weight_decay, mask=_decays),
        )
    else:
        step = muon(
            learning_rate=-1.0,  # this chain returns a direction, the caller turns it round
            beta=0.95,
            weight_decay=settings.weight_decay,
            weight_decay_mask=_decays,
            adam_b1=settings.b1,
            adam_b2=settings.b2,
            muon_weight_dimension_numbers=_matrices,
            consistent_rms=MUON_RMS,
        )
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), step)


def init(settings: config.Optimizer, params: PyTree) -> optax.OptState:
    """Returns the state of the optimizer before the first step."""
    return make_optimizer(settings).init(cast(optax.Params, params))


def update(
    settings: config.Optimizer, gradient: T, state: optax.OptState, params: T
) -> tuple[T, optax.OptState]:
    """Returns the direction of a step, to be subtracted times the rate, and the next state."""
    direction, state = make_optimizer(settings).update(
        cast(optax.Updates, gradient), state, cast(optax.Params, params)
    )
    return cast(T, direction), state


def learning_rate(settings: config.Optimizer, step: int, progress: float) -> float:
    """Returns the learning rate: linear warm-up by step, cosine decay by progress in [0, 1].

    Progress is the share of steps or of seconds that has passed, whichever is larger, so that a
    run limited by time ends with a decayed rate too.
    """
    warm = min(1.0, (step + 1) / max(settings.warmup_steps, 1))
    decay = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    fraction = settings.final_fraction + (1 - settings.final_fraction) * decay
    return settings.learning_rate * warm * fraction


def _decays(params):
    def decays(path, leaf):
        name = jax.tree_util.keystr(path)
        return leaf.ndim >= 2 and not any(word in name for word in VECTORS)

    return jax.tree_util.tree_map_with_path(decays, params)


def _matrices(params):
    """Which axes of a leaf Muon orthogonalises: matrices inside the network, stacked or not.

    A convolution is a matrix from its window to its channels. Left to Adam, the patches of a mostly
    empty picture would all move by their whole size in every step.
    """

    def axes(path, leaf):
        name = jax.tree_util.keystr(path)
        if "kernel" not in name or any(word in name for word in ("text_head", ".logits")):
            return None
        if leaf.ndim == 4:
            return MuonDimensionNumbers((0, 1, 2), 3)
        return MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(axes, params)
