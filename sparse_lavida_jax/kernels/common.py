# SPDX-License-Identifier: Apache-2.0
"""What the kernels of every device do around themselves."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def whole_tiles(x: Float[Array, "*n t hd"], multiple: int) -> Float[Array, "*n t2 hd"]:
    """Fills the tokens of [... t (h d)] up to whole tiles."""
    missing = -x.shape[-2] % multiple
    return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, missing), (0, 0))) if missing else x


def row_sums(
    out: Float[Array, "b s hd"],
    pulled: Float[Array, "b s hd"],
    pulled_lse: Float[Array, "b h *one s"],
    num_heads: int,
) -> Float[Array, "b h *one s"]:
    """Returns what is taken off the gradient of every weight of a row (FlashAttention's delta).

    Args:
        pulled, pulled_lse: gradients of the output and of its log-sum-exp.
    """
    products = out.astype(jnp.float32) * pulled.astype(jnp.float32)
    sums = products.reshape(*out.shape[:2], num_heads, -1).sum(axis=-1).swapaxes(1, 2)
    return sums.reshape(pulled_lse.shape) - pulled_lse
