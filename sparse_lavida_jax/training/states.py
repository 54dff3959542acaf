# SPDX-License-Identifier: Apache-2.0
"""The saved states of a training run: complete or absent, with any number of processes."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import logging
import operator
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32
from orbax.checkpoint import v1 as ocp

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.checkpoints import manifest, model_folder, named_arrays, stores
from sparse_lavida_jax.data import files
from sparse_lavida_jax.models import parameters
from sparse_lavida_jax.programs import jax_settings

T = TypeVar("T")

SUM_FACTORS = (0x9E3779B1, 0x85EBCA77)  # a prime near 2**32 / golden ratio, and another
# Words in errors caused by the machine: its memory, its network, its permissions.
OF_THE_MACHINE = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "PERMISSION_DENIED", "os_error_code")
NO_SUCH_FILE = "os_error_code='2'"
# Where the model is in the state of a run: the average, if one is kept, comes first.
MODELS = ("state/ema/", "state/params/")

log = logging.getLogger(__name__)


def load_unfinished(
    run_folder: pathlib.Path | str, *, make_model: Callable[[config.Config], T]
) -> T:
    """Reads the parameters from the newest state of a run that has not written its model yet.

    The run may still be in progress: nothing in its folder is changed.

    Raises:
        CheckpointError: nothing is saved there, or it cannot be read.
    """
    run_folder = pathlib.Path(run_folder)
    settings = model_folder.read_config(run_folder)
    with contextlib.closing(States(run_folder / "state", read_only=True)) as states:
        found = states.restore(jax.eval_shape(lambda: make_model(settings)), only=MODELS)
    if found is None:
        raise model_folder.CheckpointError(f"the run in {run_folder} has saved nothing yet.")
    return found[1]


def is_unfinished(folder: pathlib.Path | str) -> bool:
    """Whether a folder is a run that has saved states but no model."""
    folder = pathlib.Path(folder)
    saved = (path.name.isdigit() for path in folder.glob("state/*"))
    return any(saved) and not stores.holds_params(folder / "model")


@dataclasses.dataclass
class States:
    """The saved training states of a run: any pytree of arrays and numbers.

    If several processes train together, all of them call the same methods with the same arguments,
    and all must have access to the folder.

    Attributes:
        folder: contains one folder per step.
        keep: how many of the newest to keep.
        keep_every: in steps; the state closest to each multiple is kept too; 0: no others.
            The one with the best score is always kept.
        read_only: another process may be writing here, so nothing is deleted or moved.
    """

    folder: pathlib.Path
    keep: int = 2
    keep_every: int = 0
    read_only: bool = False

    def __post_init__(self):
        self.folder = files.resolve(self.folder)
        self._checkpointer = self._open()

    def _open(self) -> ocp.training.Checkpointer:
        stores.silence_background()
        if runtime.is_first() and not self.read_only:
            for half_written in self.folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(half_written)
        runtime.wait_for_all("states swept")
        policies = ocp.training.preservation_policies
        kept: list[Any] = [
            policies.LatestN(self.keep),
            policies.BestN(
                get_metric_fn=operator.itemgetter("score"),
                n=1,
                keep_checkpoints_without_metrics=False,
            ),
        ]
        if self.keep_every:
            kept.append(policies.EveryNStepsClosest(self.keep_every))
        any_of_them: Any = policies.AnyPreservationPolicy(kept)
        return ocp.training.Checkpointer(str(self.folder), preservation_policy=any_of_them)

    @property
    def steps(self) -> list[int]:
        """Saved steps, ascending."""
        return sorted(saved.step for saved in self._checkpointer.checkpoints)

    def save(
        self,
        step: int,
        state: Any,
        *,
        note: dict[str, Any] | None = None,
        score: float | None = None,
    ) -> None:
        """Copies the state and writes it in the background, unless this step is already saved.

        Args:
            note: saved with it; anything that JSON can represent.
            score: its quality; larger is better.

        Raises:
            CheckpointError: the disk is too full, or writing the previous state failed.
        """
        self.wait()
        if step in self.steps:
            return
        # The store refuses arrays without elements, such as a stack of no layers.
        named = parameters.by_name(state).items()
        leaves: Any = {name: leaf for name, leaf in named if np.size(leaf)}
        if runtime.are_several():
            leaves = _shared_arrays(leaves)
        else:  # copies, because the next step donates its buffers
            leaves = {name: np.array(leaf) for name, leaf in leaves.items()}
        size = sum(leaf.nbytes for leaf in leaves.values())
        runtime.first_does(lambda: model_folder.check_free_space(self.folder, size))
        metadata: Any = {"sha256": _known(leaves), "note": note}
        with self._writing():
            more = {"metrics": None if score is None else {"score": score}, "force": True}
            self._checkpointer.save_checkpointables_async(
                step, {"state": parameters.nest(leaves)}, custom_metadata=metadata, **more
            )

    def restore(self, template: T, only: tuple[str, ...] = ()) -> tuple[int, T] | None:
        """Returns the newest readable state and its step; None if nothing was saved.

        A damaged state (its checksums are wrong, or bytes are missing) is skipped with a warning,
        and moved aside once an older one has been read. Other errors, such as too little memory,
        move nothing.

        Args:
            template: a state of the same shapes; it says where to put the arrays, which may differ
                from where they were when they were saved.
            only: prefixes of names. Only names with the first prefix that occurs are read; the
                template then has just this part, with names that omit the prefix.

        Raises:
            CheckpointError: none of the states is readable, or they belong to another model, or
                the newest one cannot be read on this machine at the moment.
        """
        self.wait()
        steps, damaged = self.steps, []
        for step in reversed(steps):
            trouble: Any = None
            try:
                leaves = self._read(step, template, only)
            except model_folder.CheckpointError:
                raise
            except Exception as error:  # the store passes on exceptions of any kind
                leaves, trouble = {}, error
            if runtime.holds_everywhere(trouble is None):
                self._put_aside(damaged)
                return step, _filled(template, leaves)
            said = "another process says" if trouble is None else _first_cause(trouble)
            if not runtime.holds_everywhere(trouble is None or _is_damage(trouble)):
                raise model_folder.CheckpointError(
                    f"the state of step {step} in {self.folder} cannot be read just now ({said})."
                    " It was left as it is: see to the memory or the file system, or take the"
                    " train.mesh that it was saved with, and run the same command again."
                ) from trouble
            if runtime.is_first():
                log.warning(
                    "The state of step %d in %s is damaged (%s); trying the one before it.",
                    step, self.folder, said,
                )  # fmt: skip
            damaged.append(step)
        if steps:
            again = "" if self.read_only else f" Delete {self.folder.parent} to start again."
            raise model_folder.CheckpointError(
                f"none of the states of steps {steps} in {self.folder} can be read.{again}"
            )
        if not self.read_only and any(self._aside.glob("*")):
            raise model_folder.CheckpointError(
                f"{self.folder} holds no state, and {self._aside} holds damaged ones: starting at"
                " step 0 would write over what this run has reported. Move one of them back to try"
                f" it again, or delete {self.folder.parent} to start again."
            )
        return None

    def note(self, step: int) -> dict[str, Any]:
        """Returns the note that was saved with a state; {} if there was none."""
        found: Any = self._checkpointer.checkpointables_metadata(step).custom_metadata
        return (found or {}).get("note") or {}

    @property
    def _aside(self) -> pathlib.Path:
        return self.folder.parent / "damaged"

    def wait(self) -> None:
        """Waits until the last state is written.

        Raises:
            CheckpointError: it could not be written.
        """
        with self._writing():
            self._checkpointer.wait()

    def close(self) -> None:
        """Waits, and closes the folder."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the store passes on exceptions of any kind
            # The store would count a step whose writing failed as saved, so open it again. With
            # several processes that is not possible, as the others do not know of the error yet.
            if not runtime.are_several():
                self._checkpointer = self._open()
            raise model_folder.WriteError(
                f"a state could not be written to {self.folder} ({stores.cause_of(error)})."
                f" Intact are those of steps {self.steps}: run the same command again to go on"
                " from there."
            ) from error

    def _read(self, step: int, template: Any, only: tuple[str, ...]) -> dict[str, Any]:
        """Returns leaves by name; if `only` names groups, just the first one that exists.

        Raises:
            CheckpointError: they belong to another model.
        """
        metadata: Any = self._checkpointer.checkpointables_metadata(step)
        known = (metadata.custom_metadata or {}).get("sha256")
        saved = metadata.metadata["state"]
        names = parameters.by_name(saved)
        prefix = next((p for p in only if any(name.startswith(p) for name in names)), "")
        asked = parameters.by_name(template).items()
        given = {prefix + name: leaf for name, leaf in asked if np.size(leaf)}
        wanted = {name: jax.eval_shape(lambda x: x, leaf) for name, leaf in given.items()}
        there = {name: leaf for name, leaf in names.items() if name.startswith(prefix)}
        if problems := parameters.differences(wanted, there):
            raise model_folder.CheckpointError(
                f"the states in {self.folder} are of another model:\n{problems}"
            )
        if not (only or runtime.are_several() or _is_of_several(known)):
            tree = self._checkpointer.load_checkpointables(step, {"state": None})["state"]
            leaves = {name: np.asarray(leaf) for name, leaf in parameters.by_name(tree).items()}
            _check_known(known, leaves)
            return leaves
        anywhere = _anywhere(given)

        def target(name: str, found: Any) -> Any:
            if name not in wanted:
                return ocp.PLACEHOLDER
            where = getattr(given[name], "sharding", None) or anywhere
            return jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=where)

        abstract = parameters.mapped(target, saved)
        tree = self._checkpointer.load_checkpointables(step, {"state": abstract})["state"]
        leaves = {name: leaf for name, leaf in parameters.by_name(tree).items() if name in wanted}
        if isinstance(known, dict):
            _check_known(known, leaves)
        return {name.removeprefix(prefix): leaf for name, leaf in leaves.items()}

    def _put_aside(self, steps: list[int]) -> None:
        if self.read_only or not steps:
            return
        if runtime.is_first():
            self._aside.mkdir(exist_ok=True)
            for step in steps:
                shutil.rmtree(self._aside / str(step), ignore_errors=True)
                (self.folder / str(step)).rename(self._aside / str(step))
        runtime.wait_for_all("put aside")
        self._checkpointer.reload()


def _is_damage(error: BaseException) -> bool:
    """Whether an error is about the bytes of a state, not about the machine that reads them."""
    for cause in _causes(error):
        if isinstance(cause, MemoryError | jax.errors.JaxRuntimeError):
            return False
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            return False
        said = str(cause).replace(NO_SUCH_FILE, "")
        if any(words in said for words in OF_THE_MACHINE):
            return False
    return True


def _first_cause(error: BaseException) -> str:
    *_, first = _causes(error)
    return str(first) or type(first).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes: the store wraps them in its own errors."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _shared_arrays(leaves: dict[str, Any]) -> dict[str, jax.Array]:
    """Returns arrays spread over several processes, left where they are.

    Numbers, the same in all processes, become such arrays. The store copies arrays on accelerators
    to the host before it returns; on CPU it would read the very buffers that the next step donates,
    so it gets copies.
    """
    anywhere = _anywhere(leaves)

    def shared(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf
        held = np.asarray(leaf, None if np.ndim(leaf) else jnp.result_type(leaf))
        return jax.make_array_from_callback(held.shape, anywhere, held.__getitem__)

    arrays = {name: shared(leaf) for name, leaf in leaves.items()}
    if jax.default_backend() != "cpu":
        return arrays
    where = {name: array.sharding for name, array in arrays.items()}
    return jax.jit(lambda held: jax.tree.map(jnp.copy, held), out_shardings=where)(arrays)


def _anywhere(leaves: Mapping[str, Any]) -> jax.sharding.Sharding:
    """Returns the sharding with a copy on every device that holds a part of these arrays."""
    for leaf in leaves.values():
        where = getattr(leaf, "sharding", None)
        if isinstance(where, jax.sharding.NamedSharding):
            return where.update(spec=jax.sharding.PartitionSpec())
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


# ---------------------------------------------------------------------------------------------
# Checksums of a state. If one process holds all arrays, each has its own: the SHA-256 of its bytes.
# With several processes none has all the bytes, so one checksum covers all arrays: the SHA-256 of
# sums that the devices compute together, which reveal a flipped bit however an array is split.


def _known(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Returns the checksum of each array.

    Training waits for it, since the store needs the metadata of a state before it starts writing.
    """
    if runtime.are_several():
        return _sum_digests(leaves)
    # Hashing releases the interpreter's lock, so each core hashes an array.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        digest = jax_settings.defaults()(lambda name: named_arrays.digest_of({name: leaves[name]}))
        digests = pool.map(digest, leaves)
        return dict(zip(leaves, digests, strict=True))


def _check_known(known: dict[str, str] | str | None, leaves: Mapping[str, Any]) -> None:
    """Compares arrays with the checksums saved with them: one each, or one for all together.

    Raises:
        ValueError: lists those that differ.
    """
    if not isinstance(known, dict):
        if known != named_arrays.digest_of(
            {name: np.asarray(leaf) for name, leaf in leaves.items()}
        ):
            raise ValueError("the SHA-256 of its arrays is not the one it was saved with")
        return
    if _is_of_several(known):
        found = _sum_digests(leaves)
    else:
        whole = runtime.on_host(dict(leaves))
        found = {name: named_arrays.digest_of({name: leaf}) for name, leaf in whole.items()}
    wrong = [name for name in found if known.get(name) != found[name]]
    if wrong:
        named = ", ".join(wrong[: manifest.TENSORS_NAMED])
        raise ValueError(f"the SHA-256 of {named} is not the one it was saved with")


def _is_of_several(known: dict[str, str] | str | None) -> bool:
    """Whether these are checksums of arrays that were spread over several processes."""
    return isinstance(known, dict) and any(value.startswith("sums ") for value in known.values())


def _sum_digests(leaves: Mapping[str, Any]) -> dict[str, str]:
    sums = runtime.on_host(_sums(dict(leaves)))
    described = {
        name: f"{name} {leaves[name].dtype} {leaves[name].shape} {total.tolist()}"
        for name, total in sums.items()
    }
    return {name: f"sums {hashlib.sha256(t.encode()).hexdigest()}" for name, t in described.items()}


@jax.jit
def _sums(leaves: dict[str, Any]) -> dict[str, UInt32[Array, " 2"]]:
    """Returns two sums modulo 2**32 over the bits of each array, with an odd factor per position.

    Odd factors are invertible, so a single flipped bit always changes the sums.
    """

    def one(leaf):
        if leaf.dtype == bool:
            leaf = leaf.astype(jnp.uint8)
        kind = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32)
        place = jnp.zeros(leaf.shape, jnp.uint32)
        for axis, size in enumerate(leaf.shape):
            along = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
            place = place * jnp.uint32(size) + along
        factors = (place * jnp.uint32(first) | jnp.uint32(1) for first in SUM_FACTORS)
        return jnp.stack([jnp.sum(bits * factor, dtype=jnp.uint32) for factor in factors])

    return {name: one(leaf) for name, leaf in leaves.items()}


def _filled(template: T, leaves: Mapping[str, Any]) -> T:
    """Returns the template with its leaves replaced by these."""

    def place(name: str, leaf: Any) -> Any:
        if not np.size(leaf):
            is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
            return jnp.zeros(leaf.shape, leaf.dtype) if is_shape else leaf
        saved = leaves[name]
        if isinstance(leaf, bool | int | float):
            return type(leaf)(np.asarray(saved))
        if isinstance(leaf, np.ndarray):
            return saved
        if isinstance(saved, jax.Array):
            return saved  # the store has already placed it
        return jax.device_put(saved, getattr(leaf, "sharding", None))

    return parameters.mapped(place, template)
