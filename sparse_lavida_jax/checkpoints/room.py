# SPDX-License-Identifier: Apache-2.0
"""Whether the parameters of a model fit a device, from shapes alone, before any is read."""

import dataclasses
import logging
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder, stores
from sparse_lavida_jax.checkpoints.named_arrays import CheckpointError, ChooseDtype
from sparse_lavida_jax.models import fuse, parameters, sharding

SPARE = 1.2  # times the parameters (ours): a matrix held twice, caches and activations
# The fraction of a GPU's memory that jax takes by default, the most that works, and its setting.
DEFAULT_FRACTION, MOST_FRACTION = 0.75, 0.95
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
NARROW = "int8"

log = logging.getLogger(__name__)


class RoomError(CheckpointError):
    """The parameters of a model need more memory than a device has."""


@dataclasses.dataclass(frozen=True)
class ModelLoad:
    """A model, and how its parameters are loaded.

    Attributes:
        settings: of the model.
        stored: dtype of the matrices of its layers if they are in 8 bits (`quantize.DTYPES`).
        task: whose parameters are read.
        dtype: of the parameters in memory, see `stores.load_params`.
        mesh: that they are split over; None: one device.
    """

    settings: config.Config
    stored: str = ""
    task: fuse.Task = "both"
    dtype: str | ChooseDtype | None = None
    mesh: jax.sharding.Mesh | Mapping[str, int] | None = None

    def bytes(self) -> int:
        """Returns the bytes of the parameters on a device."""
        module, reads = model_folder.shapes(self.settings, self.stored), fuse.reads(self.task)
        dtype_of = model_folder.wide_dtypes(module, self.dtype)
        split = None if self.mesh is None else sharding.over(self.mesh)
        return sum(
            math.prod(split(name, leaf.shape).shard_shape(leaf.shape) if split else leaf.shape)
            * jnp.dtype(dtype_of(name) or leaf.dtype).itemsize
            for name, leaf in parameters.by_name(module).items()
            if reads(name)
        )


def check(folder: pathlib.Path, **how: Any) -> None:
    """Refuses a model whose parameters alone are larger than the memory of a device.

    Memory that something else holds is not subtracted. If the parameters fit but leave little for
    caches and activations, a warning says so. CPUs are never checked, nor devices that do not say
    how much memory they have.

    Args:
        folder: of the model.
        how: `task`, `dtype` and `mesh` of `ModelLoad`.

    Raises:
        RoomError: they do not fit; the message says what would.
        CheckpointError: the folder is damaged.
    """
    devices = _devices(how.get("mesh"))
    limit = min(map(_limit, devices), default=math.inf)
    if limit == math.inf:
        return
    load = ModelLoad(model_folder.read_config(folder), stores.narrow_dtype(folder), **how)
    needed = load.bytes()
    if SPARE * needed <= limit:
        return
    sizes = (
        f"{needed / 1e9:.1f} GB, and jax may use {limit / 1e9:.1f} GB of {devices[0].device_kind}"
    )
    smaller = "; ".join(_smaller(load, folder, needed, limit))
    if needed > limit:
        raise RoomError(
            f"the parameters of {folder} need {sizes}. What fits: {smaller or 'none of its forms'}."
        )
    tight = f"the parameters of {folder} leave little memory for caches and images: they need"
    log.warning("%s %s.%s", tight, sizes, smaller and f" If it runs out: {smaller}.")


def _smaller(load: ModelLoad, folder: pathlib.Path, needed: int, limit: float) -> Iterator[str]:
    """Yields the ways to use a model that fit a device, with memory to spare where possible."""
    narrow = f"a copy in 8 bits, `sparse-lavida export {folder} COPY --dtype={NARROW}`"
    changes: dict[str, dict[str, Any]] = {"dtype='bfloat16' in Python": {"dtype": "bfloat16"}}
    if load.task == "both":
        changes["task='image' in Python, for images alone"] = {"task": "image"}
    if not load.stored:
        dtype = load.dtype or fuse.dtypes(load.settings.model)
        changes[narrow] = {"stored": NARROW, "dtype": dtype}
    if load.task == "both" and not load.stored:
        changes["both"] = changes[narrow] | {"task": "image"}
    if load.mesh is None and (count := jax.local_device_count()) > 1:
        changes[f"--mesh=fsdp={count}, over all devices"] = {"mesh": {"fsdp": count}}
    for words, change in changes.items():
        size = dataclasses.replace(load, **change).bytes()
        if size < needed and SPARE * size <= limit:
            yield f"{words} ({size / 1e9:.1f} GB)"
    more = limit * MOST_FRACTION / DEFAULT_FRACTION
    if jax.default_backend() == "gpu" and FRACTION not in os.environ and needed <= more:
        yield f"{FRACTION}={MOST_FRACTION}, with which jax may use {more / 1e9:.1f} GB"


def _devices(mesh: jax.sharding.Mesh | Mapping[str, int] | None) -> Sequence[Any]:
    """Returns the devices of this process that hold parameters."""
    if mesh is not None:
        return list(sharding.automatic(mesh).local_devices)
    return jax.local_devices()[:1]


def _limit(device: Any) -> float:
    """Returns the bytes of a device's memory that jax may use; infinite if it is not known."""
    known = (device.memory_stats() or {}) if device.platform != "cpu" else {}
    return float(known.get("bytes_limit") or math.inf)
