# SPDX-License-Identifier: Apache-2.0
"""Parameters by name: which are trained, and models with only a part of their parameters.

If some parameters of a model are frozen, it is represented by two models of the same structure,
each with None where the other has an array. JAX sees no leaf there: no gradient, moments, average.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

M = TypeVar("M")

MOST_NAMED = 20  # parameters in a message
# Where a parameter is placed, by its path in the model (`joint_layers/attn_out/kernel`, all layers
# in one array) and its shape.
ChooseSharding = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]


def leaf_name(path: tuple) -> str:
    """Returns the name of a leaf, such as `joint_layers/attn_out/kernel`, from its path."""
    # The last step, into an nnx.Param, is left out of the name.
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def by_name(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by name."""
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def mapped(call: Callable[[str, Any], Any], tree: M) -> M:
    """Calls a function with the name and the value of every leaf; returns a tree of the results."""
    return jax.tree.map_with_path(lambda path, leaf: call(leaf_name(path), leaf), tree)


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns leaves by name as nested dicts: the inverse of `by_name`."""
    return traverse_util.unflatten_dict(dict(leaves), sep="/")


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Returns a line for every leaf that is missing, unknown or has another shape.

    Of a folder from elsewhere there may be very many: the first `MOST_NAMED` are returned.
    """
    lines = [
        f"  {name}: missing, the model has {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() - found.keys())
    ]
    lines += [
        f"  {name} {tuple(np.shape(found[name]))}: the model has no such parameter"
        for name in sorted(found.keys() - wanted.keys())
    ]
    lines += [
        f"  {name}: {np.shape(found[name])} on disk, {tuple(wanted[name].shape)} in the model"
        for name in sorted(wanted.keys() & found.keys())
        if np.shape(found[name]) != tuple(wanted[name].shape)
    ]
    more = [f"  and {len(lines) - MOST_NAMED} more"] if len(lines) > MOST_NAMED else []
    return "\n".join([*lines[:MOST_NAMED], *more])


def parted(
    params: M, is_trained: Callable[[str], bool], frozen_dtype: str | None = None
) -> tuple[M, M | None]:
    """Returns the trained part and the frozen part; None for the latter if all is trained.

    Args:
        frozen_dtype: of the frozen part; by default it is unchanged. Matrices in 8 bits and
            their scales are never changed.
    """
    names = by_name(params)
    if all(map(is_trained, names)):
        return params, None

    def trained(name, leaf):
        return leaf if is_trained(name) else None

    is_integer = {name: jnp.issubdtype(leaf.dtype, jnp.integer) for name, leaf in names.items()}
    in_8_bits = {name.rpartition("/")[0] for name in names if is_integer[name]}

    def frozen(name, leaf):
        if is_trained(name):
            return None
        stays = frozen_dtype is None or name.rpartition("/")[0] in in_8_bits
        return leaf if stays else leaf.astype(frozen_dtype)

    return mapped(trained, params), mapped(frozen, params)


def joined(trained: M, frozen: M | None) -> M:
    """Combines the two parts of a model."""
    if frozen is None:
        return trained

    def either(one, other):
        return other if one is None else one

    return jax.tree.map(either, trained, frozen, is_leaf=lambda leaf: leaf is None)


def replaced(model: M, leaves: Mapping[str, Any]) -> M:
    """Returns the model with other arrays for these names, in the dtype of the old ones.

    Raises:
        ValueError: the model has no such parameter, or one of another shape.
    """
    found = by_name(model)
    for name, leaf in leaves.items():
        if name not in found:
            raise ValueError(f"the model has no parameter {name}.")
        if tuple(leaf.shape) != tuple(found[name].shape):
            raise ValueError(
                f"{name} has the shape {tuple(leaf.shape)}, and {tuple(found[name].shape)} in the"
                " model."
            )

    def choose(name, leaf):
        return jnp.asarray(leaves[name], leaf.dtype) if name in leaves else leaf

    return mapped(choose, model)
