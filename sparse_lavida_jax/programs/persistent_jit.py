# SPDX-License-Identifier: Apache-2.0
"""A `jax.jit` whose programs can be made before they run, and whose executables are kept on disk.

A program is found by its types, without being traced or lowered: by the function, the code of this
package, versions, the device, flags and jax's settings, static arguments, and the structure and
types of its arrays.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import inspect
import itertools
import os
import pathlib
import pickle
import re
import threading
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from importlib import metadata
from typing import Any, TypeVar, cast

import jax
from jax import core
from jax._src import config as jax_config  # no public function returns the settings of a thread
from jax.experimental import serialize_executable

from sparse_lavida_jax.programs import executables, jax_settings, side_by_side
from sparse_lavida_jax.programs.program_arguments import Arguments, Types, arguments, type_of

T = TypeVar("T")
# Entered around compiled programs, with the key that chooses them.
Programs = Callable[[Hashable], contextlib.AbstractContextManager[None]]

PACKAGE = pathlib.Path(__file__).parents[1]
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# jax's settings that say nothing about what a program computes.
OTHER_SETTINGS = ("cache", "compilation", "log", "dir", "distributed", "platforms", "traceback")
# Options of the compiler for a mesh of TPUs. By default it may turn a product with a split matrix
# into a loop over the exchanges of its parts, which takes longer for the few rows of a step.
OVER_TPUS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def persistent_jit(
    static: Sequence[str] = (),
    donate: Sequence[str] = (),
    depends: Callable[..., Hashable] | None = None,
) -> "Callable[[Callable[..., Any]], PersistentJit]":
    """Returns a decorator: `jax.jit` with kept programs (`PersistentJit`).

    Args:
        static: names of static arguments, which are given by name. Their representation has to say
            all of what they hold.
        donate: names of arguments whose arrays are overwritten.
        depends: returns, from the same arguments, what else the program depends on.
    """
    return lambda function: PersistentJit(function, static, donate, depends)


class PersistentJit:
    """A jitted function. Anything but a call is an attribute of `jax.jit`'s result.

    On one device, programs are kept in memory here and, after `folder.keep_programs`, on disk. Over
    a mesh, in a run of several processes, and inside other programs it is just the jitted function:
    there the placement of each result is known only when its program has been compiled.

    Attributes:
        jitted, over_tpus: the results of `jax.jit`, and with `OVER_TPUS` for a mesh of TPUs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        static: Sequence[str],
        donate: Sequence[str],
        depends: Callable[..., Hashable] | None,
    ):
        how: Any = {"static_argnames": (*static,), "donate_argnames": (*donate,)}
        self.jitted = jax.jit(function, **how)
        self.over_tpus = jax.jit(function, **how, compiler_options=OVER_TPUS)
        self.function, self.static, self.depends = function, frozenset(static), depends
        names = [*inspect.signature(function).parameters]
        self.donated = frozenset(names.index(name) for name in donate)
        self._programs: dict[Hashable, Program] = {}
        self._lock = threading.Lock()
        functools.update_wrapper(self, function)
        _all.append(self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if _are_used() and _is_alone():
            given = self._given(args, named)
            if given.are_here:
                return self._program(given, args, named)(*given.leaves)
        jitted = self.over_tpus if _is_over_tpus((args, named)) else self.jitted
        return jitted(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)

    def program(self, *args: Any, **named: Any) -> "Program":
        """Returns the program for arguments, or for their types; it is being made if it is new."""
        return self._program(self._given(args, named), args, named)

    def _given(self, args: tuple, named: dict[str, Any]) -> Arguments:
        """Takes the arrays among the arguments apart; named ones are in order of their names."""
        return arguments((args, tuple(named[name] for name in self._names(named))))

    def _names(self, named: dict[str, Any]) -> list[str]:
        return sorted(name for name in named if name not in self.static)

    def _program(self, given: Arguments, args: tuple, named: dict[str, Any]) -> "Program":
        static = {name: value for name, value in named.items() if name in self.static}
        names = tuple(self._names(named))
        more = self.depends(*args, **named) if self.depends else None
        told = names, tuple(sorted(static.items())), more, jax_config.trace_context()
        with self._lock:
            found = self._programs.get((given.key, told))
            if found is None:
                name = self._name(given, told)
                found = self._programs[given.key, told] = Program(self, given, names, static, name)
            return found

    def _name(self, given: Arguments, told: tuple) -> str:
        """Returns the name of the kept executable; empty if it is not kept."""
        if not executables.are_kept():
            return ""
        types = [(x.shape, str(x.dtype), getattr(x, "weak_type", False)) for x in given.leaves]
        whole = self.__module__, self.__qualname__, given.structure, types, told, _circumstances()
        # Functions of a module, such as those of flax's convolutions, are told by their names.
        described = re.sub(r" at 0x[0-9a-f]+", "", repr(whole))
        return hashlib.sha256(described.encode()).hexdigest()

    def in_memory(self) -> "list[Program]":
        """Returns the programs that were made or loaded, or are about to be."""
        with self._lock:
            return [*self._programs.values()]

    def forget(self, spared: "Collection[Program]" = ()) -> None:
        """Frees the programs in memory, except some."""
        with self._lock:
            kept = {key: one for key, one in self._programs.items() if one in spared}
            self._programs = kept


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a `PersistentJit`.

    Attributes:
        args: arrays, or their types if it is only to be made.
        named: further arguments.
    """

    function: Callable[..., Any]
    args: tuple
    named: dict[str, Any]

    def __call__(self) -> Any:
        return self.function(*self.args, **self.named)


def finish(calls: Generator[Call, Any, T], run: Callable[[Call], Any]) -> T:
    """Runs calls, each of which is yielded once the last one's result was sent."""
    result = None
    while True:
        try:
            call = calls.send(result)
        except StopIteration as end:
            return end.value
        result = run(call)


def make(calls: Generator[Call, Any, Any], number: int) -> None:
    """Makes the programs of calls side by side, unless they are there, and waits for all.

    Args:
        calls: yields calls, with types as arguments; is sent the types of their results.
        number: of the programs, at most, for the line of progress.
    """
    programs: dict[int, Program] = {}

    def made(call: Call) -> Any:
        program = cast(PersistentJit, call.function).program(*call.args, **call.named)
        programs[id(program)] = program
        progress.show([one.future for one in programs.values()])
        return program.out

    with side_by_side.ProgressLine(number) as progress:
        finish(calls, made)
        side_by_side.wait([one.future for one in programs.values()], progress)


def shapes_of(make: Callable[[], T], *settings: Hashable) -> T:
    """Returns what a function returns, with shapes instead of arrays; kept like executables.

    Args:
        make: traced, as by `jax.eval_shape`, unless its shapes are kept.
        settings: everything that they depend on besides the code; their representation says it.
    """
    name = ""
    if executables.are_kept() and _is_alone():
        whole = make.__module__, make.__qualname__, settings, _circumstances()
        name = hashlib.sha256(repr(whole).encode()).hexdigest()
    found = _read(name)
    if found is None:
        with side_by_side.uncollected():
            leaves, structure = jax.tree.flatten(jax.eval_shape(make))
        found = Types(leaves, structure), b""
        if name:
            executables.write(name, pickle.dumps(found))
    return jax.tree.unflatten(found[0].structure, found[0].leaves)


_all: list[PersistentJit] = []


def in_memory() -> "set[Program]":
    """Returns the programs of every `PersistentJit` in this process."""
    return {program for one in _all for program in one.in_memory()}


def forget(spared: "Collection[Program]" = ()) -> None:
    """Frees all compiled programs of this process, except some; those on disk stay."""
    for one in _all:
        one.forget(spared)
    jax.clear_caches()
    gc.collect()  # executables that are kept on disk are in cycles


class Program:
    """A program that is being made in another thread: loaded if it was kept, else compiled.

    It takes leaves, whatever the structure they are in: to take a model apart is slower than
    everything else in a call.

    Args:
        given: positional arguments, and those with `names`.
        static: further arguments.
        name: of the kept executable; empty: it is not kept.

    Attributes:
        out: the types of what it returns.
        future: the executable, once it is made.
        was_kept: whether it was found on disk.
    """

    def __init__(
        self,
        function: PersistentJit,
        given: Arguments,
        names: Sequence[str],
        static: dict[str, Any],
        name: str,
    ):
        types, structure = [*map(type_of, given.leaves)], given.structure
        args, _ = structure.children()
        ends = [*itertools.accumulate((one.num_leaves for one in args.children()), initial=0)]
        donated = [i for arg in function.donated for i in range(ends[arg], ends[arg + 1])]

        def flat(*leaves: Any) -> list:
            args, named = jax.tree.unflatten(structure, leaves)
            returned = function.function(*args, **dict(zip(names, named, strict=True)), **static)
            leaves_out, structure_out = jax.tree.flatten(returned)
            self.out = Types([*map(type_of, leaves_out)], structure_out)
            return leaves_out

        flat.__name__ = function.__name__  # by which jax reports it

        def lower() -> jax.stages.Lowered:
            with side_by_side.uncollected(), jax_settings.options():
                return jax.jit(flat, donate_argnums=donated).trace(*types).lower()

        self._lower, self._name = lower, name
        found = _read(name)
        self.was_kept = found is not None
        if found is None:
            self.future = self._compiled()
        else:
            self.out, payload = found
            number = len(self.out.leaves)
            self.future = side_by_side.start(lambda: _load(payload, len(types), number))

    def __call__(self, *leaves: Any) -> Any:
        """Runs it as soon as it is made.

        Raises:
            jax.errors.JaxRuntimeError: it cannot be compiled, or fails, such as for lack of memory.
        """
        self._wait()
        if self.was_kept and self.future.exception():  # damaged, or of another machine
            self.was_kept = False
            executables.delete(self._name)
            self.future = self._compiled()
            self._wait()
        return jax.tree.unflatten(self.out.structure, self.future.result()(*leaves))

    def _wait(self) -> None:
        if not self.future.done():
            side_by_side.wait([self.future])

    def _compiled(self) -> "side_by_side.Future":
        lowered = self._lower()
        return side_by_side.start(lambda: _compile(lowered, self.out, self._name))


def _compile(lowered: jax.stages.Lowered, out: Types, name: str) -> jax.stages.Compiled:
    """Compiles a program, and keeps it if it has a name."""
    from sparse_lavida_jax.programs.folder import compiling_anew

    with compiling_anew() if name else contextlib.nullcontext():
        compiled = lowered.compile()
    if name:
        with contextlib.suppress(ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
            payload, *_ = serialize_executable.serialize(compiled)  # not every program can be
            executables.write(name, pickle.dumps((out, payload)))
    return compiled


def _load(payload: bytes, given: int, returned: int) -> jax.stages.Compiled:
    """Loads a kept program that is given, and returns, so many arrays."""
    trees = (((0,) * given, {}), [0] * returned)
    return serialize_executable.deserialize_and_load(
        payload, *map(jax.tree.structure, trees), execution_devices=jax.devices()[:1]
    )


def _read(name: str) -> tuple[Types, bytes] | None:
    """Returns the types of what a kept program returns, and the program; None if there is none."""
    contents = executables.read(name) if name else None
    if contents is None:
        return None
    try:
        return pickle.loads(contents)
    except Exception:  # of another version: unpickling raises anything then
        return None


def _are_used() -> bool:
    return executables.are_kept() or side_by_side.are_made_ahead()


def _is_alone() -> bool:
    """Whether programs run on the first device, of a single process."""
    chosen = jax.default_device.value in (None, jax.devices()[0])
    return chosen and jax.process_count() == 1 and jax.sharding.get_abstract_mesh().empty


def _is_over_tpus(tree: Any) -> bool:
    """Whether a call is a program of its own, not a part of another, over a mesh of TPUs."""
    if jax.sharding.get_abstract_mesh().empty or jax.default_backend() != "tpu":
        return False
    return not any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves(tree))


def _sources() -> list[pathlib.Path]:
    """Returns the files that programs are made from: code, and the sizes of tiles."""
    return sorted([*PACKAGE.rglob("*.py"), *PACKAGE.glob("kernels/*.json")])


@functools.cache
@jax_settings.options()
def _circumstances() -> str:
    """Returns a digest of everything that all programs of this process depend on."""
    digest, device = hashlib.sha256(), jax.devices()[0]
    for path in _sources():
        digest.update(path.read_bytes())
    settings = {
        name: value
        for name, value in sorted(jax.config.values.items())
        if not any(word in name for word in OTHER_SETTINGS)
    }
    flags = {name: os.environ.get(name) for name in FLAGS}
    versions = [metadata.version(name) for name in ("jax", "jaxlib", "flax")]
    versions.append(device.client.platform_version)
    told = device.device_kind, jax.device_count(), versions, settings, flags, _processor(device)
    digest.update(repr(told).encode())
    return digest.hexdigest()


def _processor(device: Any) -> str:
    """Returns what a CPU can do, since several machines may share a home folder."""
    if device.platform != "cpu":
        return ""
    with contextlib.suppress(OSError):
        told = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return "".join(re.findall(r"^(?:flags|Features|model name)\s*:.*", told, re.M)[:2])
    return ""
