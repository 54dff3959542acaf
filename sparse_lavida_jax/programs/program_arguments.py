# SPDX-License-Identifier: Apache-2.0
"""Arguments of compiled programs, taken apart: their arrays, the structure, and a key for both."""

import dataclasses
import itertools
import threading
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar, cast

import jax
from jax import core

M = TypeVar("M")


@dataclasses.dataclass(frozen=True)
class Types:
    """The types of a tree of arrays, such as of what a program will return."""

    leaves: list[jax.ShapeDtypeStruct]
    structure: Any


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A tree of arrays, or of their types, or of both.

    Attributes:
        leaves: the arrays.
        structure: of the tree.
        key: equal for trees of the same structure and types.
        are_here: whether a program for the first device can run with these arrays.
    """

    leaves: list[Any]
    structure: Any
    key: Hashable
    are_here: bool


@jax.tree_util.register_pytree_node_class
class TakenApart:
    """The result of `taken_apart`: it has the class and the attributes of the module."""

    def __init__(self, module: Any):
        self._module = module
        leaves, structure = jax.tree.flatten(module)
        self._arguments = dataclasses.replace(
            _of_leaves(leaves, structure), key=_interned(structure, leaves)
        )

    @property
    def __class__(self) -> type:
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self._arguments.leaves, self._arguments.structure

    @staticmethod
    def tree_unflatten(structure: Any, arrays: Iterable[Any]) -> Any:
        return jax.tree.unflatten(structure, arrays)


def taken_apart(module: M) -> M:
    """Returns a module whose arrays are already listed, as an argument of compiled programs.

    A program flattens the module itself again in every call, which takes the host longer than
    everything else in the call. Inside the program it is the original module. One that is taken
    apart already is returned as it is.
    """
    return module if type(module) is TakenApart else cast(M, TakenApart(module))


def arguments(tree: Any) -> Arguments:
    """Takes a tree apart."""
    if type(tree) is TakenApart:
        return tree._arguments
    if type(tree) is Types:
        return _of_leaves(tree.leaves, tree.structure)
    if type(tree) is not tuple:
        return _of_leaves(*jax.tree.flatten(tree))
    parts = [arguments(part) for part in tree]
    return Arguments(
        [leaf for part in parts for leaf in part.leaves],
        jax.tree_util.treedef_tuple([part.structure for part in parts]),
        tuple(part.key for part in parts),
        all(part.are_here for part in parts),
    )


def type_of(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def _of_leaves(leaves: list[Any], structure: Any) -> Arguments:
    return Arguments(leaves, structure, _key(structure, leaves), all(map(_is_here, leaves)))


def _key(structure: Any, leaves: list[Any]) -> Hashable:
    return structure, tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves)


def _is_here(leaf: Any) -> bool:
    if isinstance(leaf, core.Tracer):
        return False
    return not isinstance(leaf, jax.Array) or leaf.sharding.device_set == {jax.devices()[0]}


_numbers: dict[Hashable, int] = {}
_next = itertools.count()
_lock = threading.Lock()


def _interned(structure: Any, leaves: list[Any]) -> Hashable:
    """Returns a key that is quick to compare, for a module of many arrays."""
    with _lock:
        return _numbers.setdefault(_key(structure, leaves), next(_next))
