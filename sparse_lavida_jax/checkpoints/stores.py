# SPDX-License-Identifier: Apache-2.0
"""Storage for the parameters of a model folder: safetensors files, or the array store of orbax.

Only this file and `training/states.py` use the array store.
"""

import abc
import contextlib
import ctypes
import dataclasses
import gc
import logging
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from sparse_lavida_jax.checkpoints import contents, named_arrays, tensors
from sparse_lavida_jax.checkpoints.named_arrays import (
    CheckpointError,
    ChooseDtype,
    ChooseParameters,
)
from sparse_lavida_jax.checkpoints.tensors import Tensor
from sparse_lavida_jax.models import parameters
from sparse_lavida_jax.models.parameters import ChooseSharding

Format = Literal["safetensors", "orbax"]

PARAMS = "params"  # folder of the array store
FILES = "model*.safetensors"
# Goes into the headers; the tensor names are those of docs/checkpoints.md.
METADATA = {"format": "flax", "names": "sparse-lavida-jax/1"}
# The array store reads and writes this many bytes at a time, or one tensor if that is larger: the
# host never holds more than a few times this, however deep the model.
BATCH_BYTES = 256 * 2**20


def holds_params(folder: pathlib.Path) -> bool:
    """Whether there are parameters in a folder."""
    names = (PARAMS, tensors.SINGLE, tensors.INDEX)
    return any((folder / name).exists() for name in names)


def open_params(folder: pathlib.Path) -> "ParamsReader":
    """Returns the parameters of a model folder without reading any of them.

    Raises:
        CheckpointError: there are none, or they are damaged.
    """
    return _OrbaxReader(folder) if (folder / PARAMS).is_dir() else _SafetensorsReader(folder)


def narrow_dtype(folder: pathlib.Path) -> str:
    """Returns the dtype of the 8-bit matrices in a folder (`quantize.DTYPES`); "": none."""
    kinds = {leaf.dtype for leaf in open_params(folder).leaves.values()}
    return next((kind.name.partition("_")[0] for kind in kinds if kind.itemsize == 1), "")


def load_params(
    folder: pathlib.Path,
    module: nnx.Module,
    *,
    sharding: ChooseSharding | None = None,
    dtype: str | ChooseDtype | None = None,
    digests: Mapping[str, str] | None = None,
    check_finite: bool = True,
    wanted: ChooseParameters | None = None,
) -> Any:
    """Returns a module with the parameters of a model folder.

    Args:
        module: holds shapes, as `jax.eval_shape` makes it.
        sharding: where each parameter goes; every device reads only its part. By default, the
            default device.
        dtype: of the parameters in memory, or a function that chooses it by name (of the stack, as
            for `sharding`); by default that of the module.
        digests: SHA-256 of each array (`named_arrays.read_digests`), compared with the arrays
            that are read whole; None or empty: not compared.
        check_finite: whether to refuse arrays that hold a NaN or an infinite number.
        wanted: whether to read a parameter, by name; the others are None.

    Raises:
        CheckpointError: lists every missing, unknown or misshapen parameter, or names one that is
            damaged or not finite.
    """
    store = open_params(folder)
    store.check({name: leaf.shape for name, leaf in named_arrays.by_layer(module).items()})

    def read(targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        found = store.read(targets) if sharding is None else store.read_into(targets)
        for name, array in found.items():
            store.check_array(name, array, None if sharding else digests, check_finite)
        return found

    how: Any = {"sharding": sharding, "dtype": dtype, "batch_bytes": store.batch_bytes}
    return named_arrays.filled(module, read, wanted=wanted, **how)


class ParamsReader(abc.ABC):
    """The parameters of a model folder, each read only on request.

    Attributes:
        leaves: names, such as `joint_layers/03/attn_out/kernel`, with shapes and dtypes.
        batch_bytes: how many bytes are best read together; 0: one array at a time.
    """

    batch_bytes = 0

    def __init__(self, folder: pathlib.Path, leaves: Mapping[str, Any]):
        self.folder, self.leaves = folder, dict(leaves)
        self._kept: dict[str, np.ndarray] = {}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compares the arrays with those of a model.

        Raises:
            CheckpointError: lists every missing, unknown or misshapen parameter.
        """
        wanted = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
        if problems := parameters.differences(wanted, self.leaves):
            raise CheckpointError(
                f"the parameters in {self.folder} do not fit the model:\n{problems}"
            )

    def check_array(
        self, name: str, array: Any, digests: Mapping[str, str] | None, check_finite: bool = True
    ) -> None:
        """Checks an array that was read; see `load_params`.

        Raises:
            CheckpointError: it is damaged, or not finite.
        """
        if digests and named_arrays.digest_of({name: array}) != digests.get(name):
            raise CheckpointError(
                f"the parameter {name} in {self.folder} is not what was written: its SHA-256 is not"
                f" the one in {named_arrays.TENSORS}. Copy the model folder again."
            )
        if check_finite:
            named_arrays.refuse_nonfinite(f"the parameter {name} in {self.folder}", array)

    @abc.abstractmethod
    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns arrays on the host as they are on disk.

        Raises:
            CheckpointError: one of them cannot be read.
        """

    @abc.abstractmethod
    def read_into(self, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Returns arrays by name, with the dtype and sharding of their targets.

        Raises:
            CheckpointError: one of them cannot be read.
        """

    def read_one(self, name: str) -> np.ndarray:
        """Returns one array; calls in the order of `leaves` are served from batches read ahead."""
        if name not in self._kept:
            self._kept = {}
            _give_back_memory()
            together = named_arrays.batches(self.leaves, self.batch_bytes)
            self._kept = self.read(next(batch for batch in together if name in batch))
        return self._kept[name]

    def digests(self) -> dict[str, str]:
        """Returns the SHA-256 of each array that can be read, by name."""
        found = {}
        for name in self.leaves:
            with contextlib.suppress(CheckpointError):
                found[name] = named_arrays.digest_of(self.read([name]))
        return found


def write_params(
    folder: pathlib.Path,
    wanted: Sequence[Tensor],
    kind: Format,
    most_bytes: int = tensors.SHARD_BYTES,
) -> None:
    """Writes the parameters of a new model folder, a few at a time, and their digests.

    Args:
        most_bytes: of the tensors in one safetensors file.

    Raises:
        OSError: the disk is full.
    """
    digests: dict[str, str] = {}

    def noted(tensor: Tensor) -> Tensor:
        def read() -> np.ndarray:
            array = np.ascontiguousarray(tensor.read())
            digests[tensor.name] = named_arrays.digest_of({tensor.name: array})
            return array

        return dataclasses.replace(tensor, read=read)

    if kind == "orbax":
        _write_orbax(folder, map(noted, wanted))
    else:
        every = [*map(noted, wanted)]
        tensors.write_sharded(folder, every, most_bytes, metadata=METADATA)
    named_arrays.write_digests(folder, digests)


# ---------------------------------------------------------------------------------------------
# Safetensors files.


class _SafetensorsReader(ParamsReader):
    def __init__(self, folder: pathlib.Path):
        index = folder / tensors.INDEX
        is_sharded = index.is_file() and not (folder / tensors.SINGLE).is_file()
        placed = tensors.read_index(index) if is_sharded else {}
        self._files: dict[str, pathlib.Path] = {}
        leaves = {}
        for name in sorted({*placed.values()}) or [tensors.SINGLE]:
            path = contents.inside(folder, name)
            for tensor in tensors.list_tensors(path).values():
                kind = tensors.STORED.get(tensor.dtype)
                if kind is None or tensor.name in leaves:
                    what = f"is {tensor.dtype}" if kind is None else "is in two files"
                    raise CheckpointError(f"{tensor.name} in {path} {what}.")
                leaves[tensor.name] = jax.ShapeDtypeStruct(tensor.shape, kind)
                self._files[tensor.name] = path
        super().__init__(folder, leaves)

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        return {name: tensors.read(self._files[name], name) for name in names}

    def read_into(self, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        def array(name: str, target: jax.ShapeDtypeStruct) -> jax.Array:
            def part(index: tuple[slice, ...] | None) -> np.ndarray:
                found = tensors.read(self._files[name], name, index)
                return found.astype(target.dtype, copy=False)

            return jax.make_array_from_callback(target.shape, target.sharding, part)

        _give_back_memory()  # of the previous arrays
        return {name: array(name, target) for name, target in targets.items()}


# ---------------------------------------------------------------------------------------------
# The array store.


class _OrbaxReader(ParamsReader):
    def __init__(self, folder: pathlib.Path):
        from orbax.checkpoint import v1 as ocp  # takes a quarter of a second

        self.batch_bytes = BATCH_BYTES
        contents.names(folder / PARAMS)  # the store would wait for a pipe
        self._store = (folder / PARAMS).resolve()
        try:
            with silence():
                self._metadata = ocp.metadata(str(self._store)).metadata
        except Exception as error:  # the store raises whatever its layers raise
            raise self._unreadable(error) from error
        super().__init__(folder, parameters.by_name(self._metadata))

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        return self.read_into({name: self.leaves[name] for name in names})

    def read_into(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        from orbax.checkpoint import v1 as ocp

        def target(name: str, _: Any) -> Any:
            return targets.get(name, ocp.PLACEHOLDER)

        if not targets:
            return {}
        try:
            with silence():
                tree = ocp.load(str(self._store), parameters.mapped(target, self._metadata))
        except Exception as error:
            raise self._unreadable(error) from error
        return {name: leaf for name, leaf in parameters.by_name(tree).items() if name in targets}

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"the parameters in {self._store} cannot be read: {cause_of(error)}")


def _write_orbax(folder: pathlib.Path, wanted: Iterable[Tensor]) -> None:
    from orbax.checkpoint import v1 as ocp

    held: dict[str, np.ndarray] = {}

    def write() -> None:
        with _plain_errors():
            ocp.partial.save(str(folder / PARAMS), parameters.nest(held))
        held.clear()
        _give_back_memory()

    for tensor in wanted:
        if held and sum(array.nbytes for array in held.values()) + tensor.nbytes > BATCH_BYTES:
            write()
        held[tensor.name] = tensor.read()
    write()
    with _plain_errors():
        ocp.partial.finalize(str(folder / PARAMS))


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Replaces the store's long errors by the short error of the operating system.

    Raises:
        OSError: in place of whatever the store raises.
    """
    try:
        with silence():
            yield
    except OSError:
        raise
    except Exception as error:  # the store raises whatever its layers raise
        raise OSError(cause_of(error)) from error


def cause_of(error: Exception) -> str:
    """Returns the message of a store's error, or the system's own if the system caused it."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else str(error).partition(" [tensorstore_spec=")[0]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keeps the store from logging a page for each failure, which it raises as well.

    Only what the store itself logs is left out, from any thread: a server may load a model while
    it logs other things.
    """
    # A task of the store may fail later, in another thread.
    logging.getLogger("asyncio").addFilter(_is_news)

    def is_of_others(record: logging.LogRecord) -> bool:  # a new function for each call
        return not _is_of_the_store(record)

    logger = logging.getLogger("absl")  # the one that the store uses
    logger.addFilter(is_of_others)
    try:
        yield
    except BaseException:
        gc.collect()  # futures whose results were never retrieved complain now, silenced
        raise
    finally:
        logger.removeFilter(is_of_others)


def silence_background() -> None:
    """Keeps the store's writing threads from logging errors that it raises later anyway."""
    logging.getLogger("absl").addFilter(_is_no_error_of_the_store)


def _is_of_the_store(record: logging.LogRecord) -> bool:
    return "orbax" in record.pathname


def _is_no_error_of_the_store(record: logging.LogRecord) -> bool:
    return not (record.exc_info and _is_of_the_store(record))


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record is more than a failed read of the store, which was raised as well."""
    error = record.exc_info[1] if record.exc_info else None
    return "never retrieved" not in record.getMessage() or "ocdbt" not in str(error).lower()


def _give_back_memory() -> None:
    """Returns freed memory to the system.

    The allocator of Linux keeps freed buffers: as measured, half a gigabyte for every two that the
    array store writes, and twice the largest parameter when reading into a mesh.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system
        ctypes.CDLL("libc.so.6").malloc_trim(0)
