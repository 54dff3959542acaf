# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: the header is checked before the library maps the file into memory."""

import math
import pathlib
from typing import NamedTuple

import numpy as np
import safetensors

from sparse_lavida_jax.data import files

LENGTH_BYTES = 8  # of the number at the start of a file: the length of its header
LONGEST_HEADER = 2**24  # bytes; the library takes 100 MB
LARGEST_EMPTY = 2**20  # elements of an empty tensor if its axes of 0 had a 1
FLOATS = ("F64", "F32", "F16", "BF16")


class Stored(NamedTuple):
    """What the header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: pathlib.Path) -> dict[str, Stored]:
    """Returns the dtypes and shapes of the tensors in a file, by name.

    Raises:
        OSError: as `files.open_regular`.
        ValueError: a tensor is there twice, or the header is too long, does not fit the file, or
            is not a header.
    """
    with files.open_regular(path) as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"its header would have {length} bytes; the most is {LONGEST_HEADER}")
        files.parse_json(file.read(length), unique=True)  # the library takes the last of two
    try:
        with safetensors.safe_open(path, "numpy") as file:  # checks sizes and offsets
            parts = {name: file.get_slice(name) for name in file.offset_keys()}
            found = {name: Stored(p.get_dtype(), tuple(p.get_shape())) for name, p in parts.items()}
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error
    for name, (_, shape) in found.items():
        if 0 in shape and math.prod(max(n, 1) for n in shape) > LARGEST_EMPTY:
            raise ValueError(f"the tensor {name:.200} of shape {shape} holds nothing")
    return found


def read_floats(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, all of them floating-point numbers.

    Raises:
        OSError, ValueError: as `read_header`, or a tensor has another dtype.
    """
    for name, stored in read_header(path).items():
        if stored.dtype not in FLOATS:
            raise ValueError(f"{name:.200} is {stored.dtype}; it must be {', '.join(FLOATS)}")
    try:
        with safetensors.safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error
