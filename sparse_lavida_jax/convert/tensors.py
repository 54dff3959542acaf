# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, one tensor at a time: plain reads and writes, nothing is mapped or unpickled.

The library loads whole files or maps them, and then the whole file counts as used memory. Its
`safe_open` still judges every file first: lengths, overlaps, and the size of the header.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import safetensors

from sparse_lavida_jax.checkpoints import model_folder

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": jnp.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
}
_LENGTH_BYTES = 8  # of the number in front that says how long the header is


class TensorFileError(model_folder.CheckpointError):
    """A file that is no safetensors file, or a part of one."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor lies in a file.

    Attributes:
        dtype: as the format calls it: "BF16".
        start: of its bytes in the file.
    """

    path: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self) -> np.ndarray:
        """Returns the tensor.

        Raises:
            TensorFileError: the file has become shorter, or cannot be read.
        """
        count = int(np.prod(self.shape))
        try:
            flat = np.fromfile(self.path, DTYPES[self.dtype], count, offset=self.start)
        except OSError as error:
            raise TensorFileError(f"{self.path} cannot be read: {error}") from error
        if len(flat) != count:
            raise TensorFileError(f"{self.path} is cut short. Download it again.")
        return flat.reshape(self.shape)


def list_tensors(path: pathlib.Path) -> dict[str, Stored]:
    """Returns the tensors of a file by name.

    Raises:
        TensorFileError: it is cut short or damaged.
    """
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise TensorFileError(
            f"{path.name} is cut short or damaged ({error}). Download it again."
        ) from error
    return {
        name: Stored(
            path,
            entry["dtype"],
            tuple(entry["shape"]),
            _LENGTH_BYTES + length + entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


@dataclasses.dataclass(frozen=True)
class ToStore:
    """A tensor that is made when its turn to be written comes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


def write(path: pathlib.Path, tensors: Sequence[ToStore]) -> None:
    """Writes a file that PyTorch users can load, holding one tensor at a time, in this order.

    Raises:
        OSError: the disk is full.
    """
    # Wide numbers first, as the library does it: every tensor is aligned to its own numbers.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    known = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": known[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for tensor in tensors:
            np.ascontiguousarray(tensor.make()).tofile(file)
