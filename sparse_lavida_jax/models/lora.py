# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters for frozen matrices (LoRA, arXiv:2106.09685).

    model = lora.attach(model, settings, key)    x W  becomes  x W + (alpha / rank) (x A) B
    model = lora.merged(model)                   W    becomes  W + (alpha / rank) A B, on the host

A and B are stored in the `Linear` that they change, so that the layers of a stack can still be
scanned and no merged matrix exists during training. B starts at 0: at first, a model with adapters
computes the same as its base.
"""

import re
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from sparse_lavida_jax import config
from sparse_lavida_jax.models import quantize
from sparse_lavida_jax.models.layers import Linear, linears, with_linears

M = TypeVar("M", bound=nnx.Module)

HEADS = ("text_head", "image_head/logits")  # the loss reads them in chunks, without adapters
NAME = re.compile(r"(^|/)lora_[ab]$")  # parameters of adapters


def attach(model: M, settings: config.Lora, key: PRNGKeyArray) -> M:
    """Returns the model with an adapter for every matrix whose path matches `settings.targets`.

    Parameters of the adapters are float32; everything else is shared with the given model. The
    matrices of the logits get none: `settings.also` trains them in full.

    Args:
        model: with arrays, or with shapes from `jax.eval_shape` (inside another `eval_shape`).

    Raises:
        ConfigError: the rank is 0, or no matrix is a target.
    """
    if not settings.rank:
        raise config.ConfigError("Lora.rank=0 means no adapters: give a rank of 1 or more.")
    targets, others = [], []

    def with_adapter(name: str, linear: Linear) -> Linear:
        if name in HEADS:
            return linear
        if not re.search(settings.targets, name):
            others.append(name)
            return linear
        targets.append(name)
        *stack, i, o = linear.kernel.shape
        normal = jax.random.normal(
            jax.random.fold_in(key, len(targets)), (*stack, i, settings.rank)
        )
        linear.lora_a = nnx.Param(normal * i**-0.5)
        linear.lora_b = nnx.Param(jnp.zeros((*stack, settings.rank, o)))
        linear.lora_scale = settings.alpha / settings.rank
        return linear

    model = with_linears(model, with_adapter)
    if not targets:
        raise config.ConfigError(
            f"Lora.targets={settings.targets!r} is found in the path of no matrix. They are:"
            f" {', '.join(others)}."
        )
    return model


def begin(settings: config.Config, model: M, key: PRNGKeyArray) -> M:
    """Returns the model to train: with its adapters, and its base in 8 bits if asked for.

    Raises:
        ConfigError: as in `attach`.
    """
    if settings.optimizer.frozen_dtype == "int8":
        model = quantize.quantized(model, "int8")
    return attach(model, settings.lora, key) if settings.lora.rank else model


def merged(model: M) -> M:
    """Returns the model with its adapters added to their matrices, which are then on the host.

    One matrix of one layer is added at a time, in float32. A model without adapters is returned
    unchanged.
    """
    if not any(linear.lora_scale for linear in linears(model).values()):
        return model

    def without_adapter(_: str, linear: Linear) -> Linear:
        if linear.lora_scale:
            linear.kernel = nnx.Param(merged_kernel(linear))
            del linear.lora_a, linear.lora_b, linear.lora_scale
        return linear

    return with_linears(model, without_adapter)


def merged_kernel(linear: Any) -> Float[np.ndarray, "*n i o"]:
    """Returns the matrix of a `Linear` with its adapter added, on the host."""
    kernel: Float[Array, "*n i o"] = linear.kernel[...]
    a, b = (np.asarray(part[...], np.float32) for part in (linear.lora_a, linear.lora_b))
    total = np.empty(kernel.shape, kernel.dtype)
    for layer in np.ndindex(kernel.shape[:-2]):
        wide = np.asarray(kernel[layer], np.float32)
        total[layer] = wide + np.float32(linear.lora_scale) * (a[layer] @ b[layer])
    return total
