# SPDX-License-Identifier: Apache-2.0
"""Muon: orthogonalised momentum of matrices, for all matrices of one shape at once.

The result is that of `optax.contrib.scale_by_muon`, up to rounding, and the state is the same.
optax orthogonalises every leaf separately: a small model has dozens of leaves in few shapes, and
each costs fifteen products to compile and to start.
"""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree
from optax.contrib import scale_by_muon

BETA = 0.95  # of the momentum
STEPS = 5  # of the Newton-Schulz iteration
# Root mean square of an update relative to the learning rate, so that matrices take steps as large
# as Adam's would be (arXiv:2502.16982, Sec. 2.2).
RMS = 0.2


def orthogonal_momentum(eps: float) -> optax.GradientTransformation:
    """Returns Nesterov's momentum, orthogonalised, with root mean square `RMS`.

    A leaf is a matrix, or a stack of matrices [n i o]; a convolution [h w i o] is a matrix from its
    window to its channels.

    Args:
        eps: added to the norm that a matrix is divided by.
    """

    def update(updates, state, params=None):
        del params
        after = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, BETA, 1)
        ahead = jax.tree.map(
            lambda mu, gradient: BETA * mu + (1 - BETA) * gradient,
            optax.tree.bias_correction(mu, BETA, optax.safe_increment(after)),
            optax.tree.bias_correction(updates, BETA, after),
        )
        step = _orthogonal(ahead, state.ns_coeffs, eps)
        return step, state._replace(count=after, mu=mu)

    return optax.GradientTransformation(scale_by_muon().init, update)


def _orthogonal(tree: PyTree, coefficients: Float[Array, "3"], eps: float) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    stacks = [leaf.reshape(_stack_shape(leaf.shape)) for leaf in leaves]
    is_tall = [x.shape[1] > x.shape[2] for x in stacks]
    stacks = [x.mT if tall else x for x, tall in zip(stacks, is_tall, strict=True)]
    groups = collections.defaultdict(list)
    for number, x in enumerate(stacks):
        groups[x.shape[1:]].append(number)
    for (_, width), numbers in groups.items():
        group = jnp.concatenate([stacks[number] for number in numbers])
        group = _newton_schulz(group, coefficients, eps) * (RMS * math.sqrt(width))
        ends = np.cumsum([len(stacks[number]) for number in numbers])
        for number, part in zip(numbers, jnp.split(group, ends[:-1]), strict=True):
            part = part.mT if is_tall[number] else part
            leaves[number] = part.reshape(leaves[number].shape)
    return jax.tree.unflatten(structure, leaves)


def _stack_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns the shape of a leaf as a stack of matrices."""
    *stack, rows, columns = (math.prod(shape[:3]), shape[3]) if len(shape) == 4 else shape
    return math.prod(stack), rows, columns


def _newton_schulz(
    x: Float[Array, "n i o"], coefficients: Float[Array, "3"], eps: float
) -> Float[Array, "n i o"]:
    """Brings the singular values of matrices to within about a third of 1."""
    a, b, c = coefficients
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + eps)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x
