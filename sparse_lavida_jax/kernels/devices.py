# SPDX-License-Identifier: Apache-2.0
"""Numbers for each device: its vendor's specification, and the tiles for calls on it.

Tiles are those measured to be best for the device and the lengths, or follow a rule.
`tile_sizes.json` next to this file has the results of
`python -m benchmarks.attention --tune`: device kind, width of a head, lengths, sizes.
The rule applies to everything else.
"""

import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib
from typing import Any

import jax

from sparse_lavida_jax.kernels.tile_lists import GPU_ROWS, GpuSizes, TileSizes


@dataclasses.dataclass(frozen=True)
class Device:
    """The vendor's specification of a device.

    Attributes:
        flops: dense bfloat16 products a second, at most.
        memory: bytes; 0 if nothing here needs it, likewise below.
        hertz: cycles per second, from `flops` and the 8 (v5p), 4 (v5e) matrix units of 128 x 128
            or 4 (v6e) of 256 x 256 of a chip.
        link: bytes per second that it can send to its neighbours, over all links.
    """

    flops: float
    memory: int = 0
    hertz: float = 0
    link: float = 0


# By prefix of `device_kind`, from the vendors' tables; those of TPUs from
# https://cloud.google.com/tpu/docs/system-architecture-tpu-vm.
DEVICES = {
    ("TPU v4",): Device(275e12),
    ("TPU v5 lite", "TPU v5e"): Device(197e12, 16 * 2**30, 1.5e9, 200e9),
    ("TPU v5",): Device(459e12, 95 * 2**30, 1.75e9, 600e9),
    ("TPU v6 lite", "TPU v6e"): Device(918e12, 32 * 2**30, 1.75e9, 448e9),
    ("TPU7x",): Device(2307e12),
    ("NVIDIA A100",): Device(312e12),
    ("NVIDIA H100", "NVIDIA H200"): Device(989e12),
    ("NVIDIA B200",): Device(2250e12),
    ("NVIDIA GB200",): Device(2500e12),
}

# PCI numbers of the vendors whose accelerators have a kernel here, and the packages with which jax
# uses them. A machine with none of these packages computes on its CPU, whatever hardware it has.
NVIDIA = "0x10de"
VENDORS = {NVIDIA: ("jax_cuda12_plugin", "jax_cuda13_plugin"), "0x1ae0": ("libtpu",)}
PCI = pathlib.Path("/sys/bus/pci/devices")

TABLE = pathlib.Path(__file__).with_name("tile_sizes.json")
QUERY_TILES, KEY_TILES, PARTS = (512, 256), (1024, 512, 256), (256,)
SMALLEST_TILE = 128
SLOTS = 256  # multiple for a TPU's cache: whole tiles, since padding would copy the cache
MOST_FILLED = 1 / 8  # largest share of padding for larger tiles; ours, not tuned on a TPU
RELEASE_HEAD_DIM = 128
# Kernels of NVIDIA GPUs, and their compute capability: a prefix, and the least major number.
OF_GPUS = ("pallas_gpu", "pallas_triton")
HOPPER, AMPERE = "9.", 8
# Queries times keys of a call up to which the reference is used if there is no kernel. On a CPU
# core the reference takes .7 of the time of blockwise attention at 640 tokens and twice as long at
# 1024 (forward; docs/kernels.md). On a GPU, a loop over tiles keeps few of its processors busy: on
# an H200, training `configs/scenes.py` with the reference made 760 steps in 55 s (by hand, on 26
# November 2026), and was slower in blocks. Its limit there is set by memory, not by a measurement:
# 16 MB of logits for each head and row.
FEW_PAIRS, FEW_PAIRS_OF_GPU = 2**19, 2**22
# For `splits_of`. A tile of 128 queries and 128 keys takes a processor of an H200 about 2 us at the
# measured rate of products; the other costs are in such tiles, and are ours, not tuned on a GPU.
PROCESSORS = 132  # of an H100 or H200
TYPICAL_ROWS = 2  # of a request with guidance
TYPICAL_SHARE = 0.5  # of the slots of a cache, those with a token that a step sees
START_COST, COMBINE_COST = 3.0, 2.0  # of a program's first and last tiles; of adding up the parts
MOST_SPLITS = 4
LARGEST_BLOCK = 512  # logits of such a tile for 32 heads are 34 MB; ours, not tuned on a GPU


def device(kind: str) -> Device | None:
    """Returns the entry of a kind of device; None if it is not in the table."""
    names = {name: row for names, row in DEVICES.items() for name in names}
    found = [name for name in names if kind.startswith(name)]
    return names[max(found, key=len)] if found else None


def accelerators() -> tuple[str, ...]:
    """Returns the PCI numbers of the accelerators that jax may use here, such as `0x10de:0x2335`.

    Does not initialize any device. Empty on a CPU, and if jax is set to use only the CPU.
    """
    platforms = jax.config.values["jax_platforms"] or ""
    able = [
        vendor
        for vendor, packages in VENDORS.items()
        if platforms.split(",")[0] != "cpu" and any(map(importlib.util.find_spec, packages))
    ]
    found = set()
    for device in PCI.iterdir() if able and PCI.is_dir() else ():
        vendor, number = ((device / part).read_text().strip() for part in ("vendor", "device"))
        if vendor in able:
            found.add(f"{vendor}:{number}")
    return tuple(sorted(found))


def sizes_of(
    implementation: str, query_len: int, key_len: int, head_dim: int = RELEASE_HEAD_DIM
) -> TileSizes | GpuSizes:
    """Returns the tiles of a call that runs over tiles."""
    if implementation == "blockwise":
        return blockwise_sizes(query_len, key_len)
    if implementation in OF_GPUS:
        return gpu_sizes(query_len, key_len, head_dim, implementation=implementation)
    return tile_sizes(query_len, key_len, head_dim)


def tile_sizes(
    query_len: int, key_len: int, head_dim: int = RELEASE_HEAD_DIM, *, device: str | None = None
) -> TileSizes:
    """Returns the tiles of a call on a TPU.

    The rule takes the largest tiles that need no more padding than `SMALLEST_TILE`; failing that,
    the largest that pad by at most `MOST_FILLED`. Multiples of 1024 get the largest tiles, and
    caches, multiples of `SLOTS`, are never padded. `PARTS` were chosen so that the kernels fit the
    memory of v5e, v5p and v6e (`tests/devices/tpu_aot`). Measured tiles that would add more padding
    are not used.

    Args:
        device: kind of the device; by default the one that programs are compiled for.
    """
    measured = _measured(query_len, key_len, head_dim, device)
    if measured is not None:
        sizes = TileSizes(**measured)
        if _fits(sizes.queries, query_len) and _fits(sizes.keys, key_len):
            return sizes
    return rule(query_len, key_len)


def gpu_sizes(
    query_len: int,
    key_len: int,
    head_dim: int = RELEASE_HEAD_DIM,
    *,
    implementation: str = "pallas_gpu",
    device: str | None = None,
) -> GpuSizes:
    """Returns the tiles of a call on a GPU; without measurements, those of `gpu_rule`."""
    measured = _measured(query_len, key_len, head_dim, device)
    return gpu_rule(implementation) if measured is None else GpuSizes(**measured)


def splits_of(num_heads: int, query_len: int, key_len: int) -> int:
    """Returns how many programs share the keys of a row, if few rows would leave a GPU idle.

    Programs run in waves of one for each processor. The number of rows in the batch does not count:
    the bits of a row would depend on what it is batched with.
    """
    if num_heads % 8:  # otherwise 8 tokens (steps pass multiples of 8) have 64 heads or a multiple
        return 1
    programs = TYPICAL_ROWS * num_heads * -(-query_len // GPU_ROWS)
    key_tiles = TYPICAL_SHARE * key_len / GPU_ROWS

    def cost(splits: int) -> float:
        waves = -(-programs * splits // PROCESSORS)
        return waves * (key_tiles / splits + START_COST) + COMBINE_COST * (splits > 1)

    return min(range(1, MOST_SPLITS + 1), key=cost)


def gpu_rule(implementation: str) -> GpuSizes:
    """Returns the tiles of a call on a GPU without measurements.

    Triton's fit the shared memory of an L4. It spends the first stage on the number of a tile.
    """
    return GpuSizes() if implementation == "pallas_gpu" else GpuSizes(64, 3, 64, 3, 64, 3)


def rule(query_len: int, key_len: int) -> TileSizes:
    """Returns the tiles of a call on a TPU without measurements."""
    keys = _largest(KEY_TILES, key_len)
    return TileSizes(_largest(QUERY_TILES, query_len), keys, _largest(PARTS, keys))


def blockwise_sizes(query_len: int, key_len: int) -> TileSizes:
    """Returns the tiles of a call without a kernel: as few as possible, all of the same size."""

    def size(length: int) -> int:
        return _filled(-(-length // -(-length // LARGEST_BLOCK)))

    keys = size(key_len)
    return TileSizes(size(query_len), keys, keys)


def bucket(query_len: int, key_len: int) -> str:
    """Returns the key of an entry: lengths rounded up to powers of two."""
    return "x".join(
        str(max(SMALLEST_TILE, 1 << (n - 1).bit_length())) for n in (query_len, key_len)
    )


def device_kind() -> str:
    """Returns the kind of the device that programs are compiled for.

    A described topology (`jax.experimental.topologies`) is named by the abstract mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    described = None if mesh.empty else mesh.abstract_device
    return jax.devices()[0].device_kind if described is None else described.device_kind


def tpu_candidates(query_len: int, key_len: int) -> list[TileSizes]:
    """Returns the candidate tiles for a call on a TPU; not all of them may compile."""
    return [
        TileSizes(queries, keys, part)
        for queries, keys, part in itertools.product(
            (*QUERY_TILES, SMALLEST_TILE), (*KEY_TILES, SMALLEST_TILE), (512, 256, SMALLEST_TILE)
        )
        if keys % part == 0 and _fits(queries, query_len) and _fits(keys, key_len)
    ]


def gpu_candidates(head_dim: int, implementation: str = "pallas_gpu") -> dict[str, list[GpuSizes]]:
    """Returns the candidate tiles for a GPU, separately for the kernels of the backward pass.

    They compile for Hopper without spilling registers (`tests/devices/gpu_aot`); other sizes do
    not. Those of Triton may need more memory than a GPU has.
    """
    if implementation == "pallas_triton":
        forward = dq = dkv = list(itertools.product((64, 128), (3, 4)))
    elif head_dim == RELEASE_HEAD_DIM:
        dq = [(128, 2), (64, 2), (64, 3), (64, 4)]
        forward = [*dq, (128, 3)]
        dkv = [(64, 3), (64, 4)]  # (64, 2) spills with jax 0.12, not with 0.11
    else:
        forward = dq = list(itertools.product((128, 64), (2, 3, 4)))
        dkv = forward[1:]  # (128, 2) spills with jax 0.12, not with 0.11
    sized = functools.partial(dataclasses.replace, gpu_rule(implementation))
    return {
        "forward": [sized(forward_keys=size, forward_stages=n) for size, n in forward],
        "backward": [
            sized(dq_keys=size, dq_stages=n, dkv_queries=queries, dkv_stages=m)
            for (size, n), (queries, m) in itertools.product(dq, dkv)
        ],
    }


def _measured(query_len, key_len, head_dim, device) -> dict[str, int] | None:
    of_device = _table().get(device or device_kind(), {})
    entry = of_device.get(str(head_dim), {}).get(bucket(query_len, key_len))
    return None if entry is None else entry["sizes"]


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


def _filled(length: int) -> int:
    return -(-length // SMALLEST_TILE) * SMALLEST_TILE


def _divides(size: int, length: int) -> bool:
    return _filled(length) % size == 0


def _fits(size: int, length: int) -> bool:
    """Whether tiles pad a length only a little, and not at all if it may be that of a cache."""
    little = length % SLOTS != 0 and -length % size <= MOST_FILLED * length
    return little or _divides(size, length)


def _largest(sizes: tuple[int, ...], length: int) -> int:
    dividing = [size for size in sizes if _divides(size, length)]
    fitting = [size for size in sizes if _fits(size, length)]
    return next(iter(dividing + fitting), SMALLEST_TILE)
