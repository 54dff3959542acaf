# SPDX-License-Identifier: Apache-2.0
"""Where parameters lie on a mesh: one table of rules by name.

Mesh axes are data, fsdp, tensor and sequence; any of them may be missing. `tensor` splits heads and
hidden widths, so that a layer needs two sums over chips; `fsdp` splits what is left, to be gathered
when it is used.
"""

import re

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparse_lavida_jax.checkpoint import ChooseSharding
from sparse_lavida_jax.kernels.sharded import BATCH_AXES, HEADS_AXIS, TOKENS_AXIS

AXES = (*BATCH_AXES, HEADS_AXIS, TOKENS_AXIS)

# The last axes of a parameter, by its path in the model; what stands before them (layers) is whole.
# Every parameter matches exactly one rule.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(^|/)(q|k|v|gate|up|fc1)/kernel$", ("fsdp", "tensor")),
    (r"(^|/)(attn_out|down|out|fc2)/kernel$", ("tensor", "fsdp")),
    (r"^text_embedding$|^image_embedding/table$", ("tensor", "fsdp")),
    (r"^text_head/kernel$|^image_head/logits/kernel$", ("fsdp", "tensor")),
    (r"^image_(embedding/(merge|cell|code)|head/(spread|cell|code))/kernel$", ("fsdp", "tensor")),
    (r"^vision/(pool|tower/patch_embedding)/kernel$", ("fsdp", "tensor")),
    # Vectors, and tables of a few rows.
    (r"/(weight|scale|bias)$", ()),
    (r"^(register_\w+|image_newline|(cell|seen)_(row|column))$|position_embedding$", ()),
)


def rule_of(name: str) -> tuple[str | None, ...]:
    """Returns the mesh axes of the last axes of a parameter.

    Raises:
        ValueError: no rule, or more than one, is for it.
    """
    found = [axes for pattern, axes in RULES if re.search(pattern, name)]
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} rules of sharding.RULES are for the parameter {name}: it needs one."
        )
    return found[0]


def spec_of(name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns how a parameter is split: where an axis of the mesh divides it."""
    axes = rule_of(name)
    own = (None,) * (len(shape) - len(axes)) + axes
    return PartitionSpec(*(
        axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(own, shape, strict=True)
    ))  # fmt: skip


def over(mesh: Mesh) -> ChooseSharding:
    """Returns what `checkpoint.load_model` takes to split parameters over a mesh.

    Raises:
        ValueError: the mesh has other axes.
    """
    if unknown := [axis for axis in mesh.axis_names if axis not in AXES]:
        raise ValueError(
            f"the mesh has an axis {unknown[0]!r}: its axes are among {', '.join(AXES)}."
        )
    mesh = Mesh(mesh.devices, mesh.axis_names)  # `jax.make_mesh` leaves nothing to the compiler

    def choose(name: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        return NamedSharding(mesh, spec_of(name, shape, mesh))

    return choose
