# SPDX-License-Identifier: Apache-2.0
"""AdamW with a learning rate that follows the progress of the run."""

import math

import jax
import optax

from sparse_lavida_jax import config

VECTORS = ("norm", "bias", "register")  # words in the names of parameters of one axis


def make_optimizer(settings: config.Optimizer) -> optax.GradientTransformation:
    """Returns clipping, Adam and decoupled weight decay; the caller scales by -learning rate.

    Vectors (norms, biases, registers) are not decayed. In a stack of layers they have a second
    axis, so they are told by their names too.
    """
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.scale_by_adam(settings.b1, settings.b2),
        optax.add_decayed_weights(settings.weight_decay, mask=_decays),
    )


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
