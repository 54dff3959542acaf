# SPDX-License-Identifier: Apache-2.0
"""Modules from arrays by name, as model folders hold them, one leaf a layer; and back.

The only file that takes modules apart. Also the digests of arrays: no store notices a flipped bit.
"""

import functools
import hashlib
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_lavida_jax import runtime
from sparse_lavida_jax.models import parameters
from sparse_lavida_jax.models.parameters import ChooseSharding

ChooseDtype = Callable[[str], str]  # of a parameter, by its path in the model
# Returns arrays, on the host or where their `ShapeDtypeStruct` has a sharding, by name.
Read = Callable[[Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, Any]]

TENSORS = "TENSORS.sha256"
STACKED = ("joint_layers", "split_layers", "layers")  # what `models.layers.init_stack` made
CHECKED_TOGETHER = 4 * 2**20  # numbers


class CheckpointError(Exception):
    """A checkpoint that is missing, damaged, of another model, or cannot be written."""


def by_layer(module: Any) -> dict[str, Any]:
    """Returns the parameters of a module as they are named on disk, stacked ones layer by layer.

    Args:
        module: of arrays, or of shapes as `jax.eval_shape` makes it.
    """
    return layers_of(parameters.by_name(nnx.to_pure_dict(nnx.state(module))))


def layers_of(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns leaves that are named as in a model as they are named on disk, layer by layer."""
    return {name: part for path, leaf in leaves.items() for name, part in _layers(path, leaf)}


def module_of(module: nnx.Module, leaves: Mapping[str, np.ndarray]) -> Any:
    """Returns a module of shapes with arrays, which are named as they are on disk.

    Raises:
        CheckpointError: lists every missing, unknown or misshapen parameter.
    """
    if problems := parameters.differences(by_layer(module), dict(leaves)):
        raise CheckpointError(f"the parameters do not fit the model:\n{problems}")
    return filled(module, lambda wanted: {name: leaves[name] for name in wanted})


def filled(
    module: Any,
    read: Read,
    *,
    sharding: ChooseSharding | None = None,
    dtype: str | ChooseDtype | None = None,
    batch_bytes: int = 0,
) -> Any:
    """Returns a module of shapes with arrays in their place.

    Layers are read and put into their stack one after another: on the host no more is held than
    `batch_bytes` or one array, and without a sharding one stack.

    Args:
        module: of shapes as `jax.eval_shape` makes it.
        read: returns arrays by their names on disk.
        sharding, dtype: see `stores.load_params`.
        batch_bytes: of the arrays that are read together; 0: one at a time.
    """
    graph, state = nnx.split(module)
    abstract = nnx.to_pure_dict(state)
    wanted, found = {}, {}
    parts: dict[str, tuple[str, int]] = {}  # name in the module and number of the layer, or -1
    targets: dict[str, jax.ShapeDtypeStruct] = {}
    for name, leaf in parameters.by_name(abstract).items():
        kind = (dtype(name) if callable(dtype) else dtype) or leaf.dtype
        where = sharding(name, leaf.shape) if sharding else None
        wanted[name] = jax.ShapeDtypeStruct(leaf.shape, kind, sharding=where)
        is_stack, of_a_layer = _layer_depth(name) is not None, where and _of_a_layer(name, where)
        for i, (part, one) in enumerate(_layers(name, leaf)):
            parts[part] = name, i if is_stack else -1
            targets[part] = jax.ShapeDtypeStruct(one.shape, kind, sharding=of_a_layer)
    for batch in batches(targets, batch_bytes):
        runtime.check_interrupt()
        for part, array in read({part: targets[part] for part in batch}).items():
            name, layer = parts[part]
            found[name] = _placed(found.get(name), array, layer, wanted[name])
    for name in wanted.keys() - found.keys():  # stacks of no layers
        leaf = wanted[name]
        found[name] = jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)
    nnx.replace_by_pure_dict(
        state,
        jax.tree_util.tree_map_with_path(
            lambda path, _: found[parameters.leaf_name(path)], abstract
        ),
    )
    return nnx.merge(graph, state)


def _placed(stack: Any, array: Any, layer: int, wanted: jax.ShapeDtypeStruct) -> Any:
    """Returns a parameter with an array in it: the whole of it, or a layer of a stack."""
    where = wanted.sharding
    if layer < 0:
        return array if where else jnp.asarray(array, wanted.dtype)
    if stack is None and where:
        stack = jax.jit(lambda: jnp.zeros(wanted.shape, wanted.dtype), out_shardings=where)()
    elif stack is None:
        stack = np.empty(wanted.shape, wanted.dtype)
    if where:
        return _put_layer(where)(stack, array, np.int32(layer))
    stack[layer] = array
    return jnp.asarray(stack) if layer + 1 == len(stack) else stack


@functools.cache
def _put_layer(where: jax.sharding.Sharding) -> Callable[[jax.Array, jax.Array, Any], jax.Array]:
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
    return jax.jit(put, donate_argnums=0, out_shardings=where)


def _of_a_layer(name: str, where: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Returns where one layer of a stack is read to before the layers are stacked."""
    if _layer_depth(name) is None or not isinstance(where, jax.sharding.NamedSharding):
        return where
    return where.update(spec=jax.sharding.PartitionSpec(*where.spec[1:]))


def _layers(name: str, leaf: Any) -> list[tuple[str, Any]]:
    """Returns the names and values of a leaf on disk: one for each layer if it is stacked."""
    depth = _layer_depth(name)
    if depth is None:
        return [(name, leaf)]
    parts = name.split("/")
    names = ["/".join([*parts[:depth], f"{i:02d}", *parts[depth:]]) for i in range(leaf.shape[0])]
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return [(name, jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)) for name in names]
    return list(zip(names, np.asarray(leaf), strict=True))


def _layer_depth(name: str) -> int | None:
    """Returns where the number of the layer goes into a name; None without layers.

    A plain list of modules already has numbers in its names.
    """
    parts = name.split("/")
    for depth, part in enumerate(parts[:-1], start=1):
        if part in STACKED and not parts[depth].isdigit():
            return depth
    return None


def batches(leaves: Mapping[str, Any], most_bytes: int) -> Iterator[list[str]]:
    """Yields names of arrays whose bytes together reach `most_bytes`."""
    batch, held = [], 0
    for name, leaf in leaves.items():
        batch.append(name)
        held += math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        if held >= most_bytes:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


# ---------------------------------------------------------------------------------------------
# Digests, and numbers that are none.


def refuse_nonfinite(what: str, array: np.ndarray | jax.Array) -> None:
    """Refuses an array, named `what`, that holds a NaN or an infinite number.

    Raises:
        CheckpointError: it does.
    """
    if isinstance(array, jax.Array) and not array.is_fully_replicated:
        is_finite = bool(_all_finite(array))
    else:  # a part at a time: the answers need a byte for each number
        flat = np.asarray(array).reshape(-1)
        parts = (flat[i : i + CHECKED_TOGETHER] for i in range(0, flat.size, CHECKED_TOGETHER))
        is_finite = all(np.isfinite(part).all() for part in parts)
    if not is_finite:
        raise CheckpointError(
            f"{what} holds NaN or infinite numbers, so the model computes nothing. Get it again, or"
            " pass check_finite=False to look at it in Python all the same."
        )


@jax.jit  # as one program, which holds no answers
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def digest_of(leaves: Mapping[str, np.ndarray]) -> str:
    """Returns the SHA-256 of arrays and their names."""
    digest = hashlib.sha256()
    for name in sorted(leaves):
        leaf = np.ascontiguousarray(leaves[name])
        digest.update(f"{name} {leaf.dtype} {leaves[name].shape} ".encode())
        digest.update(leaf.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def write_digests(folder: pathlib.Path, digests: Mapping[str, str]) -> None:
    """Writes the digests of the arrays of a model folder, by name."""
    lines = [f"{digests[name]}  {name}\n" for name in sorted(digests)]
    (folder / TENSORS).write_text("".join(lines))


def read_digests(folder: pathlib.Path) -> dict[str, str]:
    """Returns the digests of the arrays of a model folder; none where they cannot be read."""
    try:
        lines = (folder / TENSORS).read_text().splitlines()
    except (OSError, ValueError):
        return {}
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
