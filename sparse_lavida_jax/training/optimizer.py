# SPDX-License-Identifier: Apache-2.0
"""AdamW, or Muon for matrices, with a learning rate that depends on the progress of the run.

Groups of parameters may have their own learning rate or be frozen: frozen parameters are taken out
of the model before it comes here (`parted`).
"""

import functools
import math
import re
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from sparse_lavida_jax import config
from sparse_lavida_jax.models import lora, parameters
from sparse_lavida_jax.training import muon

T = TypeVar("T")  # a module: a pytree of parameters, or of their gradients

# Words in the names of parameters that do not decay: with a single axis, or measured.
NOT_DECAYED = ("norm", "bias", "register", "whitening")


def make_optimizer(settings: config.Optimizer) -> optax.GradientTransformation:
    """Returns clipping, preconditioning and decoupled weight decay; the caller scales by -rate.

    Norms, biases and registers are not decayed, nor is anything that Muon leaves to Adam. They are
    recognised by name, as a stacked layer has one axis more. The direction of a group is scaled by
    the ratio of its rate to `learning_rate`.
    """
    if settings.kind == "adamw":
        adam = optax.scale_by_adam if settings.moments_dtype == "float32" else _narrow_adam
        step = optax.chain(
            adam(settings.b1, settings.b2, settings.eps),
            optax.add_decayed_weights(settings.weight_decay, mask=_decays),
        )
    else:
        step = _muon(settings)
    clip = optax.clip_by_global_norm(settings.clip_norm)
    if not settings.groups:
        return optax.chain(clip, step)

    def label(name, _):
        rate = _group_rate(settings, name)
        return str(settings.learning_rate if rate is None else rate)

    rates = {settings.learning_rate, *(float(rate) for _, rate in settings.groups)}
    scales: dict[Hashable, optax.GradientTransformation] = {
        str(rate): optax.scale(rate / settings.learning_rate) for rate in rates
    }
    labels = functools.partial(parameters.mapped, label)
    return optax.chain(clip, step, optax.partition(scales, labels))


def parted(settings: config.Config, params: T) -> tuple[T, T | None]:
    """Returns the part of a model that is trained, and the frozen part in its own dtype.

    Groups apply in order. A model with adapters is frozen except for these, `lora.also`, and
    whatever a group names. The frozen part is None if everything is trained.

    Raises:
        ConfigError: nothing is trained, or a regular expression matches no parameter.
    """
    names = parameters.by_name(params)
    for pattern, _ in settings.optimizer.groups:
        if not any(re.search(pattern, name) for name in names):
            raise config.ConfigError(
                f"Optimizer.groups has {pattern!r}, which is found in no parameter. Parameters have"
                f" names such as {', '.join(list(names)[::20])}."
            )
    is_trained = _trained(settings)
    if not any(map(is_trained, names)):
        raise config.ConfigError(
            f"Optimizer.groups={settings.optimizer.groups!r} freezes every parameter: give a group"
            " before them a rate above 0."
        )
    if settings.optimizer.frozen_dtype == "int8" and (
        wrong := [n for n, leaf in names.items() if leaf.dtype == jnp.int8 and is_trained(n)]
    ):
        raise config.ConfigError(
            'Optimizer.frozen_dtype="int8" holds the matrices of the layers in 8 bits, and the'
            f' settings train {wrong[0]}: freeze it, or use "bfloat16".'
        )
    return parameters.parted(params, is_trained, frozen_dtype(settings.optimizer))


def frozen_dtype(settings: config.Optimizer) -> str:
    """Returns the dtype in which frozen parameters are read and written, before any rounding."""
    return "bfloat16" if settings.frozen_dtype == "int8" else settings.frozen_dtype


def dtypes(settings: config.Config) -> Callable[[str], str]:
    """Returns a function from the name of a parameter to its dtype."""
    is_trained, frozen = _trained(settings), frozen_dtype(settings.optimizer)
    return lambda name: "float32" if is_trained(name) else frozen


def _trained(settings: config.Config) -> Callable[[str], bool]:
    def is_trained(name: str) -> bool:
        own = _group_rate(settings.optimizer, name)
        if own is not None:
            return own > 0
        adapts = lora.NAME.search(name) or re.search(settings.lora.also, name)
        return not settings.lora.rank or bool(adapts)

    return is_trained


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

    Progress is the elapsed share of steps or of seconds, whichever is larger, so that the rate also
    decays fully in a run limited by time.
    """
    warm = min(1.0, (step + 1) / max(settings.warmup_steps, 1))
    decay = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    fraction = settings.final_fraction + (1 - settings.final_fraction) * decay
    return settings.learning_rate * warm * fraction


def _group_rate(settings: config.Optimizer, name: str) -> float | None:
    rates = (float(rate) for pattern, rate in settings.groups if re.search(pattern, name))
    return next(rates, None)


def _narrow_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam with both moments stored in bfloat16, computed in float32.

    With 8 bits of precision, moments rounded to nearest would never change: with b1 = 0.99 and
    b2 = 0.999 a step changes the first by 1 % and the second by 0.1 %, while neighbouring numbers
    are 0.4 to 0.8 % apart. (`mu_dtype` of optax rounds to nearest.) So both are rounded up or down
    at random, correct on average, with the number of the step as the key.
    """
    wide = optax.scale_by_adam(b1, b2, eps)

    def init(params):
        state = cast(optax.ScaleByAdamState, wide.init(params))
        return state._replace(mu=_cast(state.mu, jnp.bfloat16), nu=_cast(state.nu, jnp.bfloat16))

    def update(updates, state, params=None):
        mu, nu = _cast(state.mu, jnp.float32), _cast(state.nu, jnp.float32)
        updates, after = wide.update(updates, state._replace(mu=mu, nu=nu), params)
        after = cast(optax.ScaleByAdamState, after)
        mu, nu = _rounded((after.mu, after.nu), jnp.asarray(after.count))
        return updates, after._replace(mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


def _cast(tree: Any, dtype: Any) -> Any:
    return optax.tree.cast(tree, dtype)


def _rounded(tree: PyTree, step: Int[Array, ""]) -> PyTree:
    """Returns float32 numbers in bfloat16, each rounded to a neighbour at random.

    A carry into the upper half of the bits moves a number to the next one away from zero.
    """
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), step), len(leaves))

    def one(leaf: Float[Array, "*b"], key) -> Float[Array, "*b"]:
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
        carry = jax.random.bits(key, leaf.shape, jnp.uint16).astype(jnp.uint32)
        kept = ((bits + carry) >> 16).astype(jnp.uint16)
        return jax.lax.bitcast_convert_type(kept, jnp.bfloat16)

    return jax.tree.unflatten(structure, [one(*each) for each in zip(leaves, keys, strict=True)])


def _muon(settings: config.Optimizer) -> optax.GradientTransformation:
    """Returns Muon for matrices, Adam for the rest; state names are `optax.contrib.muon`'s."""
    adam = optax.scale_by_adam(settings.b1, settings.b2, settings.eps, nesterov=True)
    decay = optax.add_decayed_weights(settings.weight_decay, mask=_decays)
    steps: dict[Hashable, optax.GradientTransformation] = {
        "muon": optax.chain(muon.orthogonal_momentum(settings.eps), decay),
        "adam": optax.chain(adam),
    }

    def labels(params):
        return jax.tree.map(lambda inner: "muon" if inner else "adam", _matrices(params))

    return optax.partition(steps, labels)


def _decays(params):
    def decays(name, leaf):
        return leaf.ndim >= 2 and not any(word in name for word in NOT_DECAYED)

    return parameters.mapped(decays, params)


def _matrices(params):
    """Returns which leaves Muon orthogonalises: matrices inside the network, stacked or not.

    They include kernels of convolutions: with Adam, the patches of a mostly empty image would
    all change by their full size in every step.
    """

    def is_inside(path, leaf):
        name = jax.tree_util.keystr(path)
        return "kernel" in name and not any(word in name for word in ("text_head", ".logits"))

    return jax.tree_util.tree_map_with_path(is_inside, params)
