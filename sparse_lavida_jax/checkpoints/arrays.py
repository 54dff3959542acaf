# SPDX-License-Identifier: Apache-2.0
"""The arrays of models on disk: a `params/` folder with one leaf a layer.

The only file that takes modules apart, and with `training/states.py` the only one that knows the
array store.
"""

import contextlib
import ctypes
import gc
import hashlib
import logging
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from flax import nnx

from sparse_lavida_jax import runtime
from sparse_lavida_jax.models import parameters
from sparse_lavida_jax.models.parameters import ChooseSharding

ChooseDtype = Callable[[str], str]  # of a parameter, by its path in the model

PARAMS = "params"  # folder of the arrays
TENSORS = "TENSORS.sha256"
STACKED = ("joint_layers", "split_layers", "layers")  # what `models.layers.init_stack` made
# Parameters are read and written this many bytes at a time, or one tensor if that is larger: on
# the host never more than a few times this is held, however deep the model.
BATCH_BYTES = 256 * 2**20


class CheckpointError(Exception):
    """A checkpoint that is missing, damaged, of another model, or cannot be written."""


# ---------------------------------------------------------------------------------------------
# Modules from arrays, and back.


def by_layer(module: Any) -> dict[str, Any]:
    """Returns the parameters of a module as they are named on disk, stacked ones layer by layer.

    Args:
        module: of arrays, or of shapes as `jax.eval_shape` makes it.
    """
    leaves = parameters.by_name(nnx.to_pure_dict(nnx.state(module)))
    return {name: part for path, leaf in leaves.items() for name, part in _layers(path, leaf)}


def load_params(
    folder: pathlib.Path,
    module: nnx.Module,
    *,
    sharding: ChooseSharding | None = None,
    dtype: str | ChooseDtype | None = None,
    digests: Mapping[str, str] | None = None,
    check_finite: bool = True,
) -> Any:
    """Returns a module with the parameters in `folder`.

    Args:
        module: of shapes as `jax.eval_shape` makes it.
        sharding: where each parameter goes; every device reads only its part. Without it, to the
            default device.
        dtype: of the parameters in memory, or what chooses it by name (stacked, as for `sharding`);
            that of the module by default.
        digests: SHA-256 of each array (`read_digests`), compared with what is read whole; None or
            none at all: not compared.
        check_finite: whether to refuse arrays that hold a NaN or an infinite number.

    Raises:
        CheckpointError: lists every missing, unknown or misshapen parameter, or names one that is
            damaged or holds what is no number.
    """
    store = ParamsReader(folder)
    store.check({name: leaf.shape for name, leaf in by_layer(module).items()})

    def read(leaves: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        where = {name: sharding and sharding(name, leaf.shape) for name, leaf in leaves.items()}
        found = store.read_into(
            {
                part: jax.ShapeDtypeStruct(one.shape, leaf.dtype, sharding=_of_a_layer(name, to))
                if (to := where[name])
                else store.leaves[part]
                for name, leaf in leaves.items()
                for part, one in _layers(name, leaf)
            }
        )
        for part, array in found.items():
            if digests and sharding is None and digest_of({part: array}) != digests.get(part):
                raise CheckpointError(
                    f"the parameter {part} in {folder} is not what was written: its SHA-256 is not"
                    f" the one in {TENSORS}. Copy the model folder again."
                )
            if check_finite:
                refuse_nonfinite(f"the parameter {part} in {folder}", array)
        return {name: _stacked(name, leaf, found, where[name]) for name, leaf in leaves.items()}

    return _filled(module, read, dtype)


def module_of(module: nnx.Module, leaves: Mapping[str, np.ndarray]) -> Any:
    """Returns a module of shapes with arrays, which are named as they are on disk.

    Raises:
        CheckpointError: lists every missing, unknown or misshapen parameter.
    """
    if problems := parameters.differences(by_layer(module), dict(leaves)):
        raise CheckpointError(f"the parameters do not fit the model:\n{problems}")
    return _filled(
        module, lambda wanted: {n: _stacked(n, leaf, leaves) for n, leaf in wanted.items()}, None
    )


def _filled(
    module: Any,
    read: Callable[[dict[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]],
    dtype: str | ChooseDtype | None,
) -> Any:
    """Returns a module of shapes with arrays in their place, read a few at a time."""
    graph, state = nnx.split(module)
    abstract = nnx.to_pure_dict(state)
    wanted = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, (dtype(name) if callable(dtype) else dtype) or leaf.dtype
        )
        for name, leaf in parameters.by_name(abstract).items()
    }
    filled: dict[str, jax.Array] = {}
    for names in _batches(wanted):
        runtime.check_interrupt()
        filled |= read({name: wanted[name] for name in names})
    nnx.replace_by_pure_dict(
        state,
        jax.tree_util.tree_map_with_path(
            lambda path, _: filled[parameters.leaf_name(path)], abstract
        ),
    )
    return nnx.merge(graph, state)


def _stacked(
    name: str,
    leaf: jax.ShapeDtypeStruct,
    found: Mapping[str, Any],
    where: jax.sharding.Sharding | None = None,
) -> jax.Array:
    """Returns a parameter, all layers in one array."""
    parts = [found[part] for part, _ in _layers(name, leaf)]
    if where is None:
        whole = parts[0] if _layer_depth(name) is None else np.stack(parts or [np.zeros(0)])
        return jnp.asarray(whole.reshape(leaf.shape), leaf.dtype)
    if _layer_depth(name) is None:
        return parts[0]
    if not parts:
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), where)
    return jax.jit(lambda *layers: jnp.stack(layers), out_shardings=where)(*parts)


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


def _batches(leaves: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields names of arrays whose bytes together reach `BATCH_BYTES`."""
    batch, held = [], 0
    for name, leaf in leaves.items():
        batch.append(name)
        held += math.prod(leaf.shape) * leaf.dtype.itemsize
        if held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


# ---------------------------------------------------------------------------------------------
# The array store.


class ParamsReader:
    """The arrays of a `params/` folder, of which only those asked for are read.

    Attributes:
        leaves: names, such as `joint_layers/03/attn_out/kernel`, with shapes and dtypes.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder.resolve()
        try:
            with silence():
                self._metadata = ocp.metadata(str(self.folder)).metadata
        except Exception as error:  # the store raises whatever its layers raise
            raise self._unreadable(error) from error
        self.leaves: dict[str, Any] = parameters.by_name(self._metadata)
        self._kept: dict[str, np.ndarray] = {}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compares the arrays with those that a model has.

        Raises:
            CheckpointError: lists every missing, unknown or misshapen parameter.
        """
        wanted = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
        if problems := parameters.differences(wanted, self.leaves):
            raise CheckpointError(
                f"the parameters in {self.folder} do not fit the model:\n{problems}"
            )

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns arrays on the host as they are on disk.

        Raises:
            CheckpointError: one of them cannot be read.
        """
        return self.read_into({name: self.leaves[name] for name in names})

    def read_one(self, name: str) -> np.ndarray:
        """Returns one array; in the order of `leaves`, many are read at a time and kept."""
        if name not in self._kept:
            self._kept = {}
            _give_back_memory()
            self._kept = self.read(next(batch for batch in _batches(self.leaves) if name in batch))
        return self._kept[name]

    def read_into(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arrays by name, of the dtype and in the sharding of their `ShapeDtypeStruct`."""

        def target(path: tuple, _: Any) -> Any:
            return targets.get(parameters.leaf_name(path), ocp.PLACEHOLDER)

        if not targets:
            return {}
        try:
            with silence():
                tree = ocp.load(
                    str(self.folder), jax.tree_util.tree_map_with_path(target, self._metadata)
                )
        except Exception as error:
            raise self._unreadable(error) from error
        return {name: leaf for name, leaf in parameters.by_name(tree).items() if name in targets}

    def digests(self) -> dict[str, str]:
        """Returns the SHA-256 of those arrays that can be read, by name."""
        found = {}
        for name in self.leaves:
            with contextlib.suppress(CheckpointError):
                found[name] = digest_of(self.read([name]))
        return found

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"the parameters in {self.folder} cannot be read: {cause_of(error)}")


class ParamsWriter:
    """Writes the `params/` of a new model folder, a few tensors at a time, and their digests.

    with ParamsWriter(folder) as writer:
        writer.add("final_norm/weight", array)
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._held: dict[str, np.ndarray] = {}
        self._digests: dict[str, str] = {}

    def __enter__(self) -> "ParamsWriter":
        return self

    def add(self, name: str, array: np.ndarray) -> None:
        """Writes an array, now or with the next ones.

        Raises:
            OSError: the disk is full.
        """
        array = np.ascontiguousarray(array)
        if self._held_bytes + array.nbytes > BATCH_BYTES:
            self._write()
        self._held[name] = array
        self._digests[name] = digest_of({name: array})
        if self._held_bytes >= BATCH_BYTES:
            self._write()

    @property
    def _held_bytes(self) -> int:
        return sum(array.nbytes for array in self._held.values())

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            self._write()
            with _plain_errors():
                ocp.partial.finalize(str(self.folder / PARAMS))
            write_digests(self.folder, self._digests)

    def _write(self) -> None:
        if self._held:
            with _plain_errors():
                ocp.partial.save(str(self.folder / PARAMS), parameters.nest(self._held))
        self._held = {}
        _give_back_memory()


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises what the system refused, which the store wraps in a paragraph of its own.

    Raises:
        OSError: whatever the store raises.
    """
    try:
        with silence():
            yield
    except OSError:
        raise
    except Exception as error:  # the store raises whatever its layers raise
        raise OSError(cause_of(error)) from error


def cause_of(error: Exception) -> str:
    """Returns what an error of the store says, in the words of the system if it was the system."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else str(error).partition(" [tensorstore_spec=")[0]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keeps the store from logging a page for each thing that fails; it raises that too."""
    # A task of the store may die later, in a thread of its own.
    logging.getLogger("asyncio").addFilter(_is_news)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        gc.collect()
        logging.disable(before)


def silence_background() -> None:
    """Keeps the threads in which the store writes from logging what it raises later, too."""
    logging.getLogger("absl").addFilter(_is_none_of_the_store)


def _is_none_of_the_store(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record says more than that the store could not read, which was raised too."""
    error = record.exc_info[1] if record.exc_info else None
    return "never retrieved" not in record.getMessage() or "ocdbt" not in str(error).lower()


def _give_back_memory() -> None:
    """Returns freed memory to the system.

    The allocator of Linux keeps the store's buffers, growing with the bytes written: half a
    gigabyte in every two, measured.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system
        ctypes.CDLL("libc.so.6").malloc_trim(0)


# ---------------------------------------------------------------------------------------------
# Digests: the store does not notice a flipped bit. And numbers that are none.


def refuse_nonfinite(what: str, array: np.ndarray | jax.Array) -> None:
    """Refuses an array, named `what`, that holds a NaN or an infinite number.

    Raises:
        CheckpointError: it does.
    """
    if isinstance(array, jax.Array) and not array.is_fully_replicated:
        is_finite = bool(jnp.isfinite(array).all())
    else:  # a part at a time: the answers need a byte for each number
        flat = np.asarray(array).reshape(-1)
        parts = (flat[i : i + BATCH_BYTES // 64] for i in range(0, flat.size, BATCH_BYTES // 64))
        is_finite = all(np.isfinite(part).all() for part in parts)
    if not is_finite:
        raise CheckpointError(
            f"{what} holds NaN or infinite numbers, so the model computes nothing. Get it again, or"
            " pass check_finite=False to look at it in Python all the same."
        )


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
