# SPDX-License-Identifier: Apache-2.0
"""Operations of the products and convolutions of a function, counted from shapes."""

import math
from collections.abc import Callable
from typing import Any

import jax


def operations(function: Callable[..., Any], *args: Any) -> float:
    """Returns the operations of all products and convolutions in a call, counted from shapes.

    The compilers for some devices count none. The border of a convolution counts like its inside;
    a loop whose length is not known runs once, and of branches the longest counts.

    Args:
        args: arrays, or their types.
    """
    leaves, structure = jax.tree.flatten(args)
    made = jax.make_jaxpr(lambda *leaves: jax.tree.leaves(
        function(*jax.tree.unflatten(structure, leaves))
    ))(*leaves)  # fmt: skip
    return _operations(made.jaxpr)


def _operations(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            summed = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * equation.outvars[0].aval.size * summed
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval
            outputs = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
            total += 2 * equation.outvars[0].aval.size * (kernel.size // outputs)
        elif name == "cond":
            total += max(_operations(branch.jaxpr) for branch in params["branches"])
        else:
            within = (getattr(value, "jaxpr", value) for value in params.values())
            runs = params["length"] if name == "scan" else 1
            total += runs * sum(_operations(one) for one in within if hasattr(one, "eqns"))
    return total
