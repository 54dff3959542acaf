# SPDX-License-Identifier: Apache-2.0
"""What lies on disk: model folders, and the saved states of a training run.

A model folder is complete in itself:

    config.json       settings, with a format tag
    params/           nested dict of arrays, one leaf a layer (joint_layers/00/...)
    tokenizer.json
    vq/               the image tokenizer, where the model has one
    README.md         source, licence, commit
    MANIFEST.sha256   of all of the above

The array store does not notice a flipped bit, so both kinds carry a SHA-256 of their own. The only
file that knows the array store, and the only one that takes modules apart.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.models.denoiser import Denoiser

T = TypeVar("T")

FORMAT = "sparse-lavida-jax/1"
BUNDLED = pathlib.Path(__file__).parent / "assets" / "models"
MANIFEST = "MANIFEST.sha256"
STACKED = ("joint_layers", "split_layers", "layers")  # what `models.stack.init_stack` made
FREE_SPACE_FACTOR = 1.2  # of the bytes to write: what must be free before writing starts

log = logging.getLogger(__name__)


class CheckpointError(Exception):
    """A checkpoint that is missing, damaged, of another model, or cannot be written."""


# ---------------------------------------------------------------------------------------------
# Model folders.


class LoadedModel(NamedTuple):
    """A model with everything it takes to use it."""

    model: Any
    config: config.Config
    tokenizer_path: pathlib.Path
    vq_folder: pathlib.Path | None


def save_model(
    folder: pathlib.Path | str,
    model: nnx.Module,
    settings: config.Config,
    *,
    tokenizer_path: pathlib.Path,
    vq_folder: pathlib.Path | None,
    readme: str,
    dtype: str = "float32",
) -> None:
    """Writes a model folder, replacing an older one. It is whole or not there at all.

    Args:
        vq_folder: the image tokenizer to copy; None for a model without one.
        readme: source, licence and commit, in Markdown.
        dtype: float16 or float32, of the parameters on disk.

    Raises:
        CheckpointError: the folder holds something else, or the disk is full.
    """
    folder = pathlib.Path(folder).resolve()  # the array store takes absolute paths only
    if folder.exists() and any(folder.iterdir()) and not _has_format(folder):
        raise CheckpointError(
            f"{folder} exists and is no model folder, so it is not overwritten. Choose another."
        )
    leaves = {name: np.asarray(leaf, dtype) for name, leaf in _layer_leaves(model).items()}
    check_free_space(folder.parent, sum(leaf.nbytes for leaf in leaves.values()))
    with _replacing(folder) as new:
        write_config(new, settings)
        ocp.save(str(new / "params"), _nest(leaves))
        shutil.copyfile(tokenizer_path, new / "tokenizer.json")
        if vq_folder is not None:
            shutil.copytree(vq_folder, new / "vq")
        (new / "README.md").write_text(readme)
        _write_manifest(new)


def load_model(
    folder_or_name: pathlib.Path | str,
    *,
    make_model: Callable[[config.Config], nnx.Module] | None = None,
) -> LoadedModel:
    """Reads a model folder, a run directory with a finished model, or a bundled model by name.

    Args:
        make_model: makes the model whose parameters to fill in; the denoiser by default. Only its
            shapes are used.

    Raises:
        CheckpointError: nothing there, a damaged file, or other parameters than the model's.
    """
    folder = find_model(folder_or_name)
    verify(folder)
    settings = read_config(folder)
    make_model = make_model or _make_denoiser
    model = load_params(folder / "params", lambda: make_model(settings))
    vq = folder / "vq"
    return LoadedModel(model, settings, folder / "tokenizer.json", vq if vq.is_dir() else None)


def find_model(folder_or_name: pathlib.Path | str) -> pathlib.Path:
    """Returns the model folder that a path or the name of a bundled model stands for."""
    folder = pathlib.Path(folder_or_name)
    for candidate in (folder, folder / "model", BUNDLED / folder):
        if (candidate / "params").is_dir():
            return candidate
    if (folder / "state").is_dir():
        raise CheckpointError(
            f"the run in {folder} has not written its model yet: that happens at its end. Run the"
            " command that started it again; it resumes."
        )
    names = ", ".join(bundled_models()) or "none"
    raise CheckpointError(
        f"there is no model in {folder}. Give a model folder, a run directory, or the name of a"
        f" bundled model ({names})."
    )


def bundled_models() -> list[str]:
    """Returns the names of the models that come with the package."""
    return sorted(folder.parent.name for folder in BUNDLED.glob("*/params"))


def load_params(folder: pathlib.Path, make_module: Callable[[], nnx.Module]) -> Any:
    """Fills the parameters in `folder` into the module that `make_module` would make.

    Raises:
        CheckpointError: lists every missing, unknown or misshapen parameter.
    """
    try:
        tree = ocp.load(str(folder.resolve()))
    except Exception as error:  # the store raises whatever its layers raise
        raise CheckpointError(f"the parameters in {folder} cannot be read: {error}") from error
    found = _flatten(tree)
    graph, state = nnx.split(jax.eval_shape(make_module))
    abstract = nnx.to_pure_dict(state)
    wanted = {
        name: struct
        for path, leaf in _flatten(abstract).items()
        for name, struct in _per_layer(path, leaf)
    }
    if problems := _differences(wanted, found):
        raise CheckpointError(f"the parameters in {folder} do not fit the model:\n{problems}")

    def fill(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        parts = [found[name] for name, _ in _per_layer(_leaf_name(path), leaf)]
        if _stack_depth(_leaf_name(path)) is None:
            return jnp.asarray(parts[0], leaf.dtype)
        return jnp.asarray(np.stack(parts) if parts else np.zeros(leaf.shape), leaf.dtype)

    nnx.replace_by_pure_dict(state, jax.tree_util.tree_map_with_path(fill, abstract))
    return nnx.merge(graph, state)


def _make_denoiser(settings: config.Config) -> nnx.Module:
    return Denoiser(settings.model, rngs=nnx.Rngs(0))


def _layer_leaves(module: nnx.Module) -> dict[str, np.ndarray]:
    """Returns the parameters on the host, stacked ones layer by layer."""
    leaves = _flatten(nnx.to_pure_dict(nnx.state(module)))
    return {
        name: np.asarray(part)
        for path, leaf in leaves.items()
        for name, part in _per_layer(path, leaf)
    }


def _per_layer(name: str, leaf: Any) -> list[tuple[str, Any]]:
    """Returns the names and values of a leaf on disk: one for each layer if it is stacked."""
    depth = _stack_depth(name)
    if depth is None:
        return [(name, leaf)]
    parts = name.split("/")
    names = ["/".join([*parts[:depth], f"{i:02d}", *parts[depth:]]) for i in range(leaf.shape[0])]
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return [(name, jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)) for name in names]
    return list(zip(names, leaf, strict=True))


def _stack_depth(name: str) -> int | None:
    """Returns where the number of the layer goes into a name; None without layers.

    A plain list of modules already has numbers in its names.
    """
    parts = name.split("/")
    for depth, part in enumerate(parts[:-1], start=1):
        if part in STACKED and not parts[depth].isdigit():
            return depth
    return None


def _differences(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    lines = [
        f"  {name}: missing, the model has {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() - found.keys())
    ]
    lines += [
        f"  {name} {tuple(np.shape(found[name]))}: the model has no such parameter"
        for name in sorted(found.keys() - wanted.keys())
    ]
    lines += [
        f"  {name}: {np.shape(found[name])} on disk, {tuple(wanted[name].shape)} in the model"
        for name in sorted(wanted.keys() & found.keys())
        if np.shape(found[name]) != tuple(wanted[name].shape)
    ]
    return "\n".join(lines)


def _flatten(tree: Any) -> dict[str, Any]:
    return {_leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _leaf_name(path: tuple) -> str:
    # The last step into an nnx.Param is not part of a name anybody wants to read.
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def _nest(leaves: dict[str, T]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *groups, last = name.split("/")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[last] = leaf
    return tree


# ---------------------------------------------------------------------------------------------
# Files of a folder.


def write_config(folder: pathlib.Path, settings: config.Config) -> None:
    """Writes `config.json`, tagged with the format of the folder."""
    tagged = {"format": FORMAT, **config.to_dict(settings)}
    (folder / "config.json").write_text(json.dumps(tagged, indent=2) + "\n")


def read_config(folder: pathlib.Path) -> config.Config:
    """Reads `config.json` back.

    Raises:
        CheckpointError: it is missing, is not JSON, or has settings this version does not know.
    """
    path = folder / "config.json"
    try:
        given = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json, so its model is unknown.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    tag = given.pop("format", None) if isinstance(given, dict) else None
    if tag != FORMAT:
        raise CheckpointError(f"{path} has the format {tag!r}; this version reads {FORMAT!r}.")
    try:
        return config.build(config.Config, given)
    except config.ConfigError as error:
        raise CheckpointError(f"{path} was written by another version: {error}") from error


def _has_format(folder: pathlib.Path) -> bool:
    try:
        read_config(folder)
    except CheckpointError:
        return False
    return True


def verify(folder: pathlib.Path) -> None:
    """Compares every file of a model folder with `MANIFEST.sha256`.

    Raises:
        CheckpointError: names the first file that is missing or changed.
    """
    try:
        lines = (folder / MANIFEST).read_text().splitlines()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was not written to its end. Copy it again."
        ) from None
    for line in lines:
        digest, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. Copy the folder {folder} again.")
        if _sha256(path) != digest:
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}. Copy the folder"
                f" {folder} again."
            )


def _write_manifest(folder: pathlib.Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{_sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / MANIFEST).write_text("".join(lines))


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _replacing(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields an empty sibling that becomes `folder` if everything goes well."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    new, old = scratch / "new", scratch / "old"
    try:
        new.mkdir()
        yield new
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    except OSError as error:
        raise CheckpointError(
            f"{folder} could not be written ({error}); what was there before is unchanged."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_free_space(folder: pathlib.Path, num_bytes: int) -> None:
    """Refuses to start writing what the disk cannot hold.

    Raises:
        CheckpointError: less than 1.2 times `num_bytes` are free.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < FREE_SPACE_FACTOR * num_bytes:
        raise CheckpointError(
            f"the disk of {folder.resolve()} has {free / 1e6:.0f} MB free and"
            f" {FREE_SPACE_FACTOR * num_bytes / 1e6:.0f} MB are needed. What was saved before is"
            " intact: free some space and run the same command again."
        )


# ---------------------------------------------------------------------------------------------
# States of a run.


@dataclasses.dataclass
class States:
    """The saved training states of a run: any pytree of arrays, numbers and random keys.

    Attributes:
        folder: holds one folder a step.
        keep: how many of the newest to keep.
    """

    folder: pathlib.Path
    keep: int = 2

    def __post_init__(self):
        self.folder = pathlib.Path(self.folder).resolve()
        self._checkpointer = self._open()

    def _open(self) -> ocp.training.Checkpointer:
        for half_written in self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(half_written)
        newest: Any = ocp.training.preservation_policies.LatestN(self.keep)
        return ocp.training.Checkpointer(str(self.folder), preservation_policy=newest)

    @property
    def steps(self) -> list[int]:
        """Saved steps, ascending."""
        return sorted(saved.step for saved in self._checkpointer.checkpoints)

    def save(self, step: int, state: Any) -> None:
        """Copies the state to the host and writes it in the background.

        Raises:
            CheckpointError: the disk is too full, or writing the state before this one failed.
        """
        self.wait()
        # Copies: on CPU the store would read the very buffers that the next step donates.
        # The store refuses arrays without elements, such as a stack of no layers.
        leaves = {name: _to_host(leaf) for name, leaf in _flatten(state).items() if np.size(leaf)}
        check_free_space(self.folder, sum(leaf.nbytes for leaf in leaves.values()))
        with self._writing():
            self._checkpointer.save_checkpointables_async(
                step,
                {"state": _nest(leaves)},
                force=True,
                custom_metadata={"sha256": _digest(leaves)},
            )

    def restore(self, template: T) -> tuple[int, T] | None:
        """Returns the newest readable state, behind its step; None where nothing was saved.

        A state that cannot be read, or whose checksum is wrong, is put aside with a warning and
        the one before it is taken.

        Args:
            template: a state of the same shapes; it says where the arrays go.

        Raises:
            CheckpointError: none of the states is readable, or they are of another model.
        """
        self.wait()
        steps = self.steps
        for step in reversed(steps):
            try:
                leaves = self._read(step)
            except Exception as error:  # the store raises whatever its layers raise
                log.warning(
                    "The state of step %d in %s is damaged (%s); trying the one before it.",
                    step, self.folder, error,
                )  # fmt: skip
                self._put_aside(step)
                continue
            return step, _fill(template, leaves, self.folder)
        if steps:
            raise CheckpointError(
                f"none of the states of steps {steps} in {self.folder} can be read. Delete"
                f" {self.folder.parent} to start anew."
            )
        return None

    def wait(self) -> None:
        """Waits until the last state is written.

        Raises:
            CheckpointError: it could not be written.
        """
        with self._writing():
            self._checkpointer.wait()

    def close(self) -> None:
        """Waits, and lets go of the folder."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the store raises whatever its layers raise
            # It would count a step whose writing failed as saved, so begin afresh.
            self._checkpointer = self._open()
            raise CheckpointError(
                f"a state could not be written to {self.folder} ({error}). Intact are those of"
                f" steps {self.steps}: run the same command again to go on from there."
            ) from error

    def _read(self, step: int) -> dict[str, np.ndarray]:
        tree = self._checkpointer.load_checkpointables(step, {"state": None})["state"]
        leaves = {name: np.asarray(leaf) for name, leaf in _flatten(tree).items()}
        saved_with: Any = self._checkpointer.checkpointables_metadata(step).custom_metadata or {}
        if saved_with.get("sha256") != _digest(leaves):
            raise ValueError("the SHA-256 of its arrays is not the one it was saved with")
        return leaves

    def _put_aside(self, step: int) -> None:
        damaged = self.folder.parent / "damaged"
        damaged.mkdir(exist_ok=True)
        target = damaged / str(step)
        shutil.rmtree(target, ignore_errors=True)
        (self.folder / str(step)).rename(target)
        self._checkpointer.reload()


def _to_host(leaf: Any) -> np.ndarray:
    return np.array(_key_data(leaf))


def _key_data(leaf: Any) -> Any:
    """Returns the numbers of a random key, and anything else as it is."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _digest(leaves: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(leaves):
        leaf = np.ascontiguousarray(leaves[name])
        digest.update(f"{name} {leaf.dtype} {leaves[name].shape} ".encode())
        digest.update(leaf.tobytes())
    return digest.hexdigest()


def _fill(template: T, leaves: dict[str, np.ndarray], folder: pathlib.Path) -> T:
    wanted = {
        name: jax.eval_shape(_key_data, leaf)
        for name, leaf in _flatten(template).items()
        if np.size(leaf)
    }
    if problems := _differences(wanted, leaves):
        raise CheckpointError(f"the states in {folder} are of another model:\n{problems}")

    def place(path: tuple, leaf: Any) -> Any:
        if not np.size(leaf):
            return leaf
        saved = leaves[_leaf_name(path)]
        if isinstance(leaf, bool | int | float):
            return type(leaf)(saved)
        if _is_key(leaf):
            return jax.random.wrap_key_data(jnp.asarray(saved), impl=jax.random.key_impl(leaf))
        if isinstance(leaf, np.ndarray):
            return saved
        return jax.device_put(saved, getattr(leaf, "sharding", None))

    return jax.tree_util.tree_map_with_path(place, template)
