# SPDX-License-Identifier: Apache-2.0
"""How parameters are split over a mesh: one table of rules by name.

Mesh axes are data, fsdp, tensor and sequence; any of them may be missing. `tensor` splits heads and
hidden widths, so that a layer needs two sums over chips; `fsdp` splits another axis, to be gathered
when it is used.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sparse_lavida_jax.kernels.sharded import BATCH_AXES, HEADS_AXIS, TOKENS_AXIS
from sparse_lavida_jax.models.parameters import ChooseSharding, mapped
from sparse_lavida_jax.schema import ConfigError

AXES = (*BATCH_AXES, HEADS_AXIS, TOKENS_AXIS)
PARTS = ("params", "ema", "frozen")  # of `step.TrainState` that hold parameters or arrays like them

T = TypeVar("T")
AnyMesh = Mesh | AbstractMesh

# The last axes of a parameter, by its path in the model; axes before them (layers) are not split.
# Every parameter matches exactly one rule.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(^|/)(q|k|v|gate|up|fc1|into|gate_up)/kernel$", ("fsdp", "tensor")),
    (r"(^|/)(attn_out|down|out|fc2)/kernel$", ("tensor", "fsdp")),
    (r"(^|/)(into|gate_up)/kernel_t$", ("tensor", "fsdp")),
    (r"(^|/)(down|out)/kernel_t$", ("fsdp", "tensor")),
    (r"^text_embedding$|^image_embedding/table$", ("tensor", "fsdp")),
    (r"^text_head/(tiles/\d+/)?kernel$|^image_head/logits/kernel$", ("fsdp", "tensor")),
    (r"^image_(embedding/(merge|cell|code)|head/(spread|cell|code))/kernel$", ("fsdp", "tensor")),
    (r"^vision/(pool|tower/patch_embedding)/kernel$", ("fsdp", "tensor")),
    # Adapters: split like their matrix, but not along the rank.
    (r"(^|/)(q|k|v|gate|up|merge|spread|cell|code)/lora_a$", ("fsdp", None)),
    (r"(^|/)(q|k|v|gate|up|merge|spread|cell|code)/lora_b$", (None, "tensor")),
    (r"(^|/)(attn_out|down)/lora_a$", ("tensor", None)),
    (r"(^|/)(attn_out|down)/lora_b$", (None, "fsdp")),
    # The style code, and the part of the image head that sees earlier codes of a cell: not split.
    (r"^(style_code|image_head/earlier_codes)/(?!.*(weight|scale|bias)$)", ()),
    # Vectors, and tables of a few rows.
    (r"/(weight|scale|bias)$", ()),
    (r"^(register_\w+|image_newline|(cell|seen)_(row|column))$|position_embedding$", ()),
)


def rule_of(name: str) -> tuple[str | None, ...]:
    """Returns the mesh axes of the last axes of a parameter.

    Raises:
        ValueError: no rule, or more than one, matches.
    """
    found = _rules_of(name)
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} rules of sharding.RULES are for the parameter {name}: it needs one."
        )
    return found[0]


def spec_of(name: str, shape: tuple[int, ...], mesh: AnyMesh) -> PartitionSpec:
    """Returns how a parameter is split, wherever its shape is divisible by the mesh.

    If an axis of the mesh does not divide its side (a vocabulary is seldom a round number), it
    splits another side that the rule splits, if it divides that: so no large matrix is left whole.
    """
    axes = rule_of(name)
    own = (None,) * (len(shape) - len(axes)) + axes
    split: list[list[str]] = [[] for _ in shape]

    def divides(side: int, axis: str) -> bool:
        parts = math.prod(mesh.shape[taken] for taken in split[side])
        return shape[side] % (parts * mesh.shape[axis]) == 0

    sides = {side: axis for side, axis in enumerate(own) if axis is not None}
    waiting = []
    for side, axis in sides.items():
        if axis in mesh.shape:
            (split[side] if divides(side, axis) else waiting).append(axis)
    for axis in waiting:
        other = next((side for side in sides if divides(side, axis)), None)
        if other is not None:
            split[other].append(axis)
    return PartitionSpec(*(
        None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in split
    ))  # fmt: skip


def over(mesh: Mesh | Mapping[str, int]) -> ChooseSharding:
    """Returns an argument for `model_folder.load_model` that splits parameters over a mesh.

    Args:
        mesh: see `automatic`.

    Raises:
        ConfigError: as `automatic`.
    """
    mesh = automatic(mesh)

    def choose(name: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        return NamedSharding(mesh, spec_of(name, shape, mesh))

    return choose


def placed(model: T, mesh: Mesh) -> T:
    """Returns a model with its parameters split over a mesh."""
    choose = over(mesh)
    return mapped(lambda name, leaf: jax.device_put(leaf, choose(name, leaf.shape)), model)


def automatic(mesh: Mesh | Mapping[str, int]) -> Mesh:
    """Returns a mesh with automatic axes, unlike those of `jax.make_mesh`.

    Args:
        mesh: one with axes of any type; or sizes of axes, -1 for all remaining devices.

    Raises:
        ConfigError: an unknown axis, or sizes whose product is not the number of devices.
    """
    if not isinstance(mesh, Mesh):
        whole = whole_sizes(mesh, jax.device_count())
        axis_types = (jax.sharding.AxisType.Auto,) * len(whole)
        return jax.make_mesh(tuple(whole.values()), tuple(whole), axis_types=axis_types)
    _check_axes(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names)


# ---------------------------------------------------------------------------------------------
# Training.


def whole_sizes(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Returns the sizes of the axes of a mesh of `count` devices, in the order of `AXES`.

    Args:
        sizes: of the axes; -1 for all remaining devices.

    Raises:
        ConfigError: an unknown axis, or sizes whose product is not the number of devices.
    """
    _check_axes(sizes)
    known = math.prod(size for size in sizes.values() if size > 0)
    whole = {axis: count // known if size == -1 else size for axis, size in sizes.items()}
    if math.prod(whole.values()) != count:
        asked = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ConfigError(
            "{setting}={value} does not fit the {allowed}: the sizes multiply to the number of"
            " devices, and -1 stands for all that remain.",
            setting="mesh",
            value=asked,
            allowed="1 device there is" if count == 1 else f"{count} devices there are",
        )
    return {axis: whole[axis] for axis in AXES if axis in whole}


def spec_of_state(name: str, shape: tuple[int, ...], mesh: AnyMesh) -> PartitionSpec:
    """Returns how a leaf of a training state is split: like the parameter that its name ends with.

    Anything an optimizer keeps besides its moments, such as the step number, is never split.

    Raises:
        ValueError: for a parameter or its average, no rule, or more than one, matches.
    """
    part, _, parameter = name.partition("/")
    if part in PARTS:
        return spec_of(parameter, shape, mesh)
    parts = name.split("/")
    for start in range(len(parts)):
        own = "/".join(parts[start:])
        found = _rules_of(own)
        if len(found) == 1 and len(found[0]) <= len(shape):
            return spec_of(own, shape, mesh)
    return PartitionSpec()


def shared_by(name: str, shape: tuple[int, ...], mesh: AnyMesh) -> int:
    """Returns how many equal parts a leaf of a training state is split into."""
    split = jax.tree.leaves(tuple(spec_of_state(name, shape, mesh)))
    return math.prod(mesh.shape[axis] for axis in split)


def over_state(call: Callable[[Any, NamedSharding], Any], state: T, mesh: AnyMesh) -> T:
    """Calls a function with each leaf of a training state, or of its shapes, and its sharding."""

    def with_sharding(name, leaf):
        return call(leaf, NamedSharding(mesh, spec_of_state(name, leaf.shape, mesh)))

    return mapped(with_sharding, state)


def place_state(state: T, mesh: Mesh) -> T:
    """Distributes a training state over a mesh.

    If the devices belong to several processes, all of them must pass the same state.
    """

    def place(leaf, where):
        if where.is_fully_addressable or not getattr(leaf, "is_fully_addressable", True):
            return jax.device_put(leaf, where)
        held = np.asarray(leaf)
        return jax.make_array_from_callback(held.shape, where, held.__getitem__)

    return over_state(place, state, mesh)


def constrained(state: T) -> T:
    """Keeps a training state where `place_state` put it, inside a program."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return state

    def keep(leaf, where):
        return jax.lax.with_sharding_constraint(leaf, where.spec)

    return over_state(keep, state, mesh)


def replicated(arrays: T) -> T:
    """Keeps arrays whole on every device, inside a program."""
    if jax.sharding.get_abstract_mesh().empty:
        return arrays
    return jax.lax.with_sharding_constraint(arrays, PartitionSpec())


def row_parts(mesh: Mesh) -> int:
    """Returns how many parts the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in _row_axes(mesh))


def share_of_rows(mesh: Mesh) -> tuple[int, int]:
    """Returns which share of the rows of a batch is on devices of this process.

    Returns:
        Its index, and the number of shares. If the rows of a process are not contiguous, or
        processes have rows in common, each makes the smallest share that contains its own: all
        of them if necessary.
    """
    parts = row_parts(mesh)
    rows = NamedSharding(mesh, PartitionSpec(_row_axes(mesh)))
    indices = rows.addressable_devices_indices_map((parts,)).values()
    held = [index[0].indices(parts)[0] for index in indices if index]
    for count in range(parts, 1, -1):
        first, last = (part * count // parts for part in (min(held), max(held)))
        if parts % count == 0 and first == last:
            return first, count
    return 0, 1


def of_batch(batch: T, mesh: Mesh) -> T:
    """Returns the sharding of every array of a batch: by rows, or unsplit if they do not divide.

    Rows are split over data and fsdp.
    """
    return jax.tree.map(lambda x: _of_rows(mesh, x.shape[0]), batch)


def _of_rows(mesh: Mesh, rows: int) -> NamedSharding:
    axes = _row_axes(mesh)
    spec = PartitionSpec(axes) if axes and rows % row_parts(mesh) == 0 else PartitionSpec()
    return NamedSharding(mesh, spec)


def place_batch(batch: T, mesh: Mesh, process: tuple[int, int] = (0, 1)) -> T:
    """Splits the rows of a batch over a mesh, as `of_batch` says.

    Args:
        process: the index of this process, and how many make equal numbers of rows.
    """
    index, count = process

    def place(x):
        total, first = x.shape[0] * count, x.shape[0] * index
        where = _of_rows(mesh, total)
        if where.is_fully_addressable:
            return jax.device_put(x, where)

        def rows(wanted):
            begin, end, _ = wanted[0].indices(total)
            return x[(slice(begin - first, end - first), *wanted[1:])]

        return jax.make_array_from_callback((total, *x.shape[1:]), where, rows)

    return jax.tree.map(place, batch)


def _row_axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in BATCH_AXES if axis in mesh.shape)


def _rules_of(name: str) -> list[tuple[str | None, ...]]:
    return [axes for pattern, axes in RULES if re.search(pattern, name)]


def _check_axes(names: Iterable[str]) -> None:
    if unknown := [axis for axis in names if axis not in AXES]:
        raise ConfigError(
            "{setting} has no axis {value}: {allowed}.",
            setting="mesh",
            value=repr(unknown[0]),
            allowed=f"its axes are among {', '.join(AXES)}",
        )
