# SPDX-License-Identifier: Apache-2.0
"""Converts modules to named arrays, one per layer as in model folders, and back.

The only file that takes modules apart. It also computes the digests of arrays, because no store
notices a flipped bit.
"""

import functools
import hashlib
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_lavida_jax import runtime
from sparse_lavida_jax.data import files
from sparse_lavida_jax.models import parameters
from sparse_lavida_jax.models.parameters import ChooseSharding

ChooseDtype = Callable[[str], str]  # of a parameter, by its path in the model
ChooseParameters = Callable[[str], bool]  # whether to read a parameter, by its path
# Returns arrays by name: on the host, or sharded where their `ShapeDtypeStruct` has a sharding.
Read = Callable[[Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, Any]]

TENSORS = "TENSORS.sha256"
MOST_LISTED = 2**24  # bytes of a list of digests
_LINE = re.compile(r"[0-9a-f]{64}  \S.*")  # of a list of digests
STACKED = ("joint_layers", "split_layers", "layers")  # made by `models.layers.init_stack`
CHECKED_TOGETHER = 4 * 2**20  # numbers


class CheckpointError(Exception):
    """A checkpoint is missing or damaged, belongs to another model, or cannot be written."""


def by_layer(module: Any) -> dict[str, Any]:
    """Returns the parameters of a module under their names on disk, stacks split into layers.

    Args:
        module: holds arrays, or shapes as `jax.eval_shape` makes them.
    """
    return layers_of(parameters.by_name(nnx.to_pure_dict(nnx.state(module))))


def layers_of(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the leaves of a model under their names on disk, stacks split into layers."""
    return {name: part for path, leaf in leaves.items() for name, part in _layers(path, leaf)}


def module_of(module: nnx.Module, leaves: Mapping[str, np.ndarray]) -> Any:
    """Fills a module of shapes with arrays that have their names on disk.

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
    wanted: ChooseParameters | None = None,
) -> Any:
    """Returns a module of shapes with the shapes replaced by arrays.

    Layers are read and copied into their stack one after another: the host holds at most
    `batch_bytes` or one array, and without a sharding also one stack.

    Args:
        module: holds shapes, as `jax.eval_shape` makes it.
        read: returns arrays by their names on disk.
        sharding, dtype, wanted: see `stores.load_params`.
        batch_bytes: how many bytes of arrays are read together; 0: one array at a time.
    """
    graph, state = nnx.split(module)
    abstract = nnx.to_pure_dict(state)
    wholes: dict[str, jax.ShapeDtypeStruct] = {}
    found: dict[str, Any] = {}
    parts: dict[str, tuple[str, int]] = {}  # name in the module, and layer number or -1
    targets: dict[str, jax.ShapeDtypeStruct] = {}
    for name, leaf in parameters.by_name(abstract).items():
        if wanted is not None and not wanted(name):
            found[name] = None
            continue
        kind = (dtype(name) if callable(dtype) else dtype) or leaf.dtype
        where = sharding(name, leaf.shape) if sharding else None
        wholes[name] = jax.ShapeDtypeStruct(leaf.shape, kind, sharding=where)
        is_stack, of_a_layer = _layer_depth(name) is not None, where and _of_a_layer(name, where)
        for i, (part, one) in enumerate(_layers(name, leaf)):
            parts[part] = name, i if is_stack else -1
            targets[part] = jax.ShapeDtypeStruct(one.shape, kind, sharding=of_a_layer)
    for batch in batches(targets, batch_bytes):
        runtime.check_interrupt()
        for part, array in read({part: targets[part] for part in batch}).items():
            name, layer = parts[part]
            found[name] = _placed(found.get(name), array, layer, wholes[name])
    for name in wholes.keys() - found.keys():  # stacks without layers
        leaf = wholes[name]
        found[name] = jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)
    nnx.replace_by_pure_dict(state, parameters.mapped(lambda name, _: found[name], abstract))
    return nnx.merge(graph, state)


def _placed(stack: Any, array: Any, layer: int, wanted: jax.ShapeDtypeStruct) -> Any:
    """Returns a parameter with an array put in: the whole parameter, or one layer of a stack."""
    where = wanted.sharding
    if layer < 0:
        return array if where else _on_device(array, wanted.dtype)
    if stack is None and where:
        stack = jax.jit(lambda: jnp.zeros(wanted.shape, wanted.dtype), out_shardings=where)()
    elif stack is None:
        stack = np.empty(wanted.shape, wanted.dtype)
    if where:
        return _put_layer(where)(stack, array, np.int32(layer))
    stack[layer] = array
    return _on_device(stack, wanted.dtype) if layer + 1 == len(stack) else stack


def _on_device(array: Any, dtype: Any) -> jax.Array:
    """Returns a copy on the device; `jnp.asarray` would compile a program for every shape."""
    if isinstance(array, jax.Array):
        return jnp.asarray(array, dtype)
    return jax.device_put(np.asarray(array, dtype), may_alias=False)


@functools.cache
def _put_layer(where: jax.sharding.Sharding) -> Callable[[jax.Array, jax.Array, Any], jax.Array]:
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
    return jax.jit(put, donate_argnums=0, out_shardings=where)


def _of_a_layer(name: str, where: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Returns the sharding in which one layer is read before the layers are stacked."""
    if _layer_depth(name) is None or not isinstance(where, jax.sharding.NamedSharding):
        return where
    return where.update(spec=jax.sharding.PartitionSpec(*where.spec[1:]))


def _layers(name: str, leaf: Any) -> list[tuple[str, Any]]:
    """Returns the names on disk and the values of a leaf: one for each layer if it is stacked."""
    depth = _layer_depth(name)
    if depth is None:
        return [(name, leaf)]
    parts = name.split("/")
    names = ["/".join([*parts[:depth], f"{i:02d}", *parts[depth:]]) for i in range(leaf.shape[0])]
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return [(name, jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)) for name in names]
    return list(zip(names, np.asarray(leaf), strict=True))


def _layer_depth(name: str) -> int | None:
    """Returns the position of the layer number in a name; None if the leaf is not stacked.

    A plain list of modules already has numbers in its names.
    """
    parts = name.split("/")
    for depth, part in enumerate(parts[:-1], start=1):
        if part in STACKED and not parts[depth].isdigit():
            return depth
    return None


def batches(leaves: Mapping[str, Any], most_bytes: int) -> Iterator[list[str]]:
    """Yields lists of array names; each list but the last reaches `most_bytes` bytes."""
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
# Digests and checks for non-finite numbers.


def refuse_nonfinite(what: str, array: np.ndarray | jax.Array) -> None:
    """Refuses an array that holds a NaN or an infinite number; `what` names it in the message.

    Raises:
        CheckpointError: it does.
    """
    if isinstance(array, jax.Array) and not array.is_fully_replicated:
        is_finite = bool(_all_finite(array))
    else:  # a part at a time: the boolean result needs a byte for each number
        flat = np.asarray(array).reshape(-1)
        parts = (flat[i : i + CHECKED_TOGETHER] for i in range(0, flat.size, CHECKED_TOGETHER))
        is_finite = all(np.isfinite(part).all() for part in parts)
    if not is_finite:
        raise CheckpointError(
            f"{what} holds NaN or infinite numbers, so the model computes nothing. Get it again, or"
            " pass check_finite=False to look at it in Python all the same."
        )


@jax.jit  # one program, which does not store the boolean array
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
    files.write_text(folder / TENSORS, "".join(lines))


def read_digests(folder: pathlib.Path) -> dict[str, str]:
    """Returns the digests of the arrays of a model folder.

    Raises:
        CheckpointError: the file is missing, empty or damaged.
    """
    try:
        return read_list(folder / TENSORS)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {TENSORS}, the digests of its arrays. Copy the folder again."
        ) from None


def read_list(path: pathlib.Path) -> dict[str, str]:
    """Returns the digests in a file, by name.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is empty or damaged.
    """
    try:
        text = files.read_text(path, MOST_LISTED).removesuffix("\n")
        lines = files.lines(text) if text else []
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}. Copy the folder {path.parent} again."
        ) from error
    parts = [line.partition("  ") for line in lines if _LINE.fullmatch(line)]
    found = {name: digest for digest, _, name in parts}
    if not lines or len(found) < len(lines):  # a line of another form, or a name twice
        what = "is damaged" if lines else "is empty"
        raise CheckpointError(f"{path} {what}. Copy the folder {path.parent} again.")
    return found
