# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, one tensor at a time; one file, or several with an index."""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from sparse_lavida_jax.checkpoints.named_arrays import CheckpointError
from sparse_lavida_jax.data import files, tensor_files

DTYPES = {"F32": jnp.dtype("float32"), "BF16": jnp.dtype("bfloat16"), "F16": jnp.dtype("float16")}
# Model folders may also hold 8-bit matrices (`models/quantize.py`).
NARROW = {"I8": jnp.dtype("int8"), "F8_E4M3": jnp.dtype("float8_e4m3fn")}
STORED = DTYPES | NARROW
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_INDEXED = 2**24  # bytes of an index
SHARD_BYTES = 5_000_000_000  # most bytes of a file if there are several
FOR_PYTORCH = {"format": "pt"}  # goes into the header of a file


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that is in a file, or that is computed when it is about to be written.

    Attributes:
        dtype: as the format calls it: "BF16".
        read: returns it.
        file: name of the file that holds it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    file: str = ""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * STORED[self.dtype].itemsize


def dtype_name(dtype: np.dtype) -> str:
    """Returns the name of a dtype in the format."""
    return next(name for name, known in STORED.items() if known == dtype)


def list_tensors(path: pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors of a file by name, in their order in the file.

    Raises:
        CheckpointError: it is cut short or damaged.
    """
    try:
        found = tensor_files.read_header(path)
    except (OSError, ValueError) as error:
        told = f"{path.name} is cut short or damaged ({error}).{files.remedy(error)}"
        raise CheckpointError(told) from error
    return {
        name: Tensor(name, *stored, functools.partial(read, path, name), path.name)
        for name, stored in found.items()
    }


def read(path: pathlib.Path, name: str, part: Any = None) -> np.ndarray:
    """Returns a tensor of a file, or a part of it: a row, or a tuple of slices.

    The library maps the file into memory, and mapped pages count as used until it is closed:
    therefore the file is reopened for each tensor.

    Raises:
        CheckpointError: the file has become shorter, or cannot be read.
    """
    try:
        with safetensors.safe_open(path, "numpy") as file:
            if file.get_slice(name).get_dtype() == "F8_E4M3":
                return _read_float8(path, name)[... if part is None else part]
            return file.get_tensor(name) if part is None else file.get_slice(name)[part]
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Download it again.") from error


def _read_float8(path: pathlib.Path, name: str) -> np.ndarray:
    """Returns a tensor of a dtype that the library cannot read into NumPy."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(tensor_files.LENGTH_BYTES), "little")
        about = files.parse_json(file.read(length))[name]
        start, end = about["data_offsets"]
        file.seek(start, 1)
        return np.frombuffer(file.read(end - start), NARROW["F8_E4M3"]).reshape(about["shape"])


def write(
    path: pathlib.Path, tensors: Iterable[Tensor], metadata: Mapping[str, str] = FOR_PYTORCH
) -> None:
    """Writes a file while holding one tensor at a time.

    The library itself needs all tensors in memory at once.

    Raises:
        OSError: the disk is full.
    """
    # Wide dtypes first, as in the library, so that every tensor is aligned to its dtype.
    tensors = sorted(tensors, key=lambda tensor: -STORED[tensor.dtype].itemsize)
    header: dict[str, dict] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % tensor_files.LENGTH_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(tensor_files.LENGTH_BYTES, "little") + text)
        for tensor in tensors:
            file.write(np.ascontiguousarray(tensor.read()).reshape(-1).view(np.uint8).data)


def write_sharded(
    folder: pathlib.Path,
    tensors: Sequence[Tensor],
    most_bytes: int = SHARD_BYTES,
    *,
    always_indexed: bool = False,
    metadata: Mapping[str, str] = FOR_PYTORCH,
    written: Callable[[pathlib.Path], None] | None = None,
) -> int:
    """Writes `SINGLE`, or several files with their `INDEX`; returns the number of files.

    Args:
        most_bytes: of the tensors in one file; a larger tensor gets a file of its own.
        always_indexed: numbers the file and writes the index even if there is only one file.
        written: called with each numbered file once it is written.

    Raises:
        OSError: the disk is full.
    """
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        held = sum(other.nbytes for other in shards[-1])
        if shards[-1] and held + tensor.nbytes > most_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1 and not always_indexed:
        write(folder / SINGLE, tensors, metadata)
        return 1
    placed: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write(folder / file, shard, metadata)
        if written is not None:
            written(folder / file)
        placed |= {tensor.name: file for tensor in shard}
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    files.write_json(folder / INDEX, index, indent=2)
    return len(shards)


def read_index(path: pathlib.Path) -> dict[str, str]:
    """Returns the file of each tensor according to an index.

    Raises:
        CheckpointError: the index is damaged.
    """
    try:
        placed = (files.read_json(path, MOST_INDEXED) or {}).get("weight_map")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.{files.remedy(error)}") from error
    is_whole = isinstance(placed, dict) and all(isinstance(file, str) for file in placed.values())
    if not placed or not is_whole:
        raise CheckpointError(
            f"{path} is damaged: its weight_map does not say which tensor is in which file."
            " Download it again."
        )
    return placed
