# SPDX-License-Identifier: Apache-2.0
"""What lies on disk: model folders, and the saved states of a training run.

A model folder is complete in itself:

    config.json       settings, with a format tag
    params/           nested dict of arrays, one leaf a layer (joint_layers/00/...)
    tokenizer.json
    vq/               the image tokenizer, where the model has one
    official/         of a converted model: the small files of the released folder
    unused.safetensors  of a converted model: released tensors that this model does without
    README.md         source, licence, commit
    TENSORS.sha256    of every array in params/, and in the safetensors files
    MANIFEST.sha256   of all of the above

So is a folder of adapters, but for the base model that it names:

    config.json       settings of the run that trained them
    adapters.safetensors  what was trained: adapters, all layers in one array, and what else was
    base.json         where the base lay, and the SHA-256 of its manifest
    TENSORS.sha256, MANIFEST.sha256

The array store does not notice a flipped bit, so both kinds carry a SHA-256 of their own. The only
file that knows the array store, and the only one that takes modules apart.
"""

import contextlib
import ctypes
import dataclasses
import gc
import hashlib
import json
import logging
import math
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import safetensors
import safetensors.numpy
from flax import nnx
from jaxtyping import Array, UInt32

from sparse_lavida_jax import config, lora, parameters, processes
from sparse_lavida_jax.models.denoiser import Denoiser

T = TypeVar("T")

# Where a parameter goes, by its path in the model (`joint_layers/attn_out/kernel`, all layers in
# one array) and its shape.
ChooseSharding = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]

ChooseDtype = Callable[[str], str]  # of a parameter, by its path in the model

FORMAT = "sparse-lavida-jax/1"
BUNDLED = pathlib.Path(__file__).parent / "assets" / "models"
ADAPTERS = "adapters.safetensors"
BASE = "base.json"
MANIFEST = "MANIFEST.sha256"
TENSORS = "TENSORS.sha256"
COMMITTED = "commit_success.txt"
STACKED = ("joint_layers", "split_layers", "layers")  # what `models.stack.init_stack` made
FREE_SPACE_FACTOR = 1.2  # of the bytes to write: what must be free before writing starts
# Parameters are read and written this many bytes at a time, or one tensor if that is larger: on
# the host never more than a few times this is held, however deep the model.
BATCH_BYTES = 256 * 2**20
TENSORS_NAMED = 5  # in a complaint about a damaged file
SUM_FACTORS = (0x9E3779B1, 0x85EBCA77)  # primes near 2**32 over the golden ratio, and another

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

    Adapters are added to their matrices; `save_adapters` keeps them.

    Args:
        vq_folder: the image tokenizer to copy; None for a model without one.
        readme: source, licence and commit, in Markdown.
        dtype: float16, bfloat16 or float32, of the parameters on disk.

    Raises:
        CheckpointError: the folder holds something else, or the disk is full.
    """
    model, stored = lora.merged(model), jnp.dtype(dtype)
    leaves = {name: np.asarray(leaf, stored) for name, leaf in _layer_leaves(model).items()}
    with new_model_folder(folder, settings, sum(leaf.nbytes for leaf in leaves.values())) as new:
        ocp.save(str(new / "params"), _nest(leaves))
        _write_digests(new, {name: _tensor_digest(name, leaf) for name, leaf in leaves.items()})
        shutil.copyfile(tokenizer_path, new / "tokenizer.json")
        if vq_folder is not None:
            shutil.copytree(vq_folder, new / "vq")
        (new / "README.md").write_text(readme)


@contextlib.contextmanager
def new_model_folder(
    folder: pathlib.Path | str, settings: config.Config, num_bytes: int
) -> Iterator[pathlib.Path]:
    """Yields a folder, its `config.json` written, that becomes `folder` if everything goes well.

    Its manifest is written at the end.

    Args:
        num_bytes: that will be written into it, about.

    Raises:
        CheckpointError: `folder` holds something else, or the disk is full.
    """
    folder = pathlib.Path(folder).resolve()  # the array store takes absolute paths only
    check_replaceable(folder)
    check_free_space(folder.parent, num_bytes)
    with replacing(folder) as new:
        write_config(new, settings)
        yield new
        files = sorted(new.rglob("*.safetensors"))
        _write_digests(
            new,
            _read_digests(new) | {k: v for f in files for k, v in _file_digests(new, f).items()},
        )
        for mark in new.rglob(COMMITTED):  # of the array store, with the path of this machine in it
            mark.write_text("Checkpoint commit was successful.\n")
        _write_manifest(new)


def check_replaceable(folder: pathlib.Path) -> None:
    """Refuses to replace what is no model folder.

    Raises:
        CheckpointError: the folder holds something else.
    """
    if folder.is_file() or (folder.exists() and any(folder.iterdir()) and not _has_format(folder)):
        raise CheckpointError(
            f"{folder} exists and is no model folder, so it is not overwritten. Choose another."
        )


def load_model(
    folder_or_name: pathlib.Path | str,
    *,
    make_model: Callable[[config.Config], nnx.Module] | None = None,
    sharding: ChooseSharding | None = None,
    dtype: str | ChooseDtype | None = None,
    adapters: pathlib.Path | str | None = None,
) -> LoadedModel:
    """Reads a model folder, a run directory with a finished model, or a bundled model by name.

    Args:
        adapters: a folder of `save_adapters`, trained beside this model: they are added to it, and
            what was trained whole is replaced. Its matrices then lie on the host.
        make_model: makes the model whose parameters to fill in; the denoiser by default. Only its
            shapes are used.
        sharding, dtype: see `load_params`.

    Raises:
        CheckpointError: nothing there, a damaged file, or other parameters than the model's.
    """
    folder = find_model(folder_or_name)
    verify(folder)
    settings = read_config(folder)
    make_model = make_model or _make_denoiser
    model = load_params(
        folder / "params", lambda: make_model(settings), sharding=sharding, dtype=dtype
    )
    if adapters is not None:
        model, settings = _with_adapters(model, settings, *load_adapters(adapters, folder))
    vq = folder / "vq"
    return LoadedModel(model, settings, folder / "tokenizer.json", vq if vq.is_dir() else None)


def save_adapters(
    folder: pathlib.Path | str,
    trained: Any,
    settings: config.Config,
    *,
    base: pathlib.Path | str,
) -> None:
    """Writes what was trained beside a frozen base, replacing an older folder of the same kind.

    Args:
        trained: the trained part of a model, as `parameters.parted` returns it.
        base: the model folder that the rest is of; a run directory or a bundled name will do.

    Raises:
        CheckpointError: the folder holds something else, there is no base, or the disk is full.
    """
    leaves = {name: np.asarray(leaf) for name, leaf in _flatten(trained).items() if np.size(leaf)}
    model = find_model(base)
    known = {"model": str(model.resolve()), "manifest_sha256": _manifest_sha256(model)}
    with new_model_folder(folder, settings, sum(leaf.nbytes for leaf in leaves.values())) as new:
        safetensors.numpy.save_file(leaves, new / ADAPTERS)
        _write_digests(new, {})  # those of the file are added to them
        (new / BASE).write_text(json.dumps(known, indent=2) + "\n")


def load_adapters(
    folder: pathlib.Path | str, base: pathlib.Path | str
) -> tuple[dict[str, np.ndarray], config.Lora]:
    """Returns what was trained, by name, and the settings of the adapters.

    Raises:
        CheckpointError: no adapters there, a damaged file, or they were trained beside another
            base.
    """
    folder, model = pathlib.Path(folder), find_model(base)
    if not (folder / ADAPTERS).is_file():
        raise CheckpointError(f"there are no adapters in {folder}: it has no {ADAPTERS}.")
    verify(folder)
    try:
        known = json.loads((folder / BASE).read_text())
        digest, where = known["manifest_sha256"], known["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / BASE} is missing or damaged: {error}") from error
    if digest != _manifest_sha256(model):
        raise CheckpointError(
            f"the adapters in {folder} were trained beside the model that lay in {where}, and"
            f" {model} is another one: its {MANIFEST} has another SHA-256 than {digest[:12]}... ."
        )
    return safetensors.numpy.load_file(folder / ADAPTERS), read_config(folder).lora


def _with_adapters(
    model: Any, settings: config.Config, leaves: dict[str, np.ndarray], low_rank: config.Lora
) -> tuple[Any, config.Config]:
    """Returns a base model with the adapters added, and settings that tell of them."""
    try:
        if low_rank.rank:
            model = lora.attach(model, low_rank, jax.random.key(0))
        model = lora.merged(parameters.replaced(model, leaves))
    except ValueError as error:
        raise CheckpointError(f"the adapters do not fit the model: {error}") from error
    return model, dataclasses.replace(settings, lora=low_rank)


def _manifest_sha256(model: pathlib.Path) -> str:
    if not (model / MANIFEST).is_file():
        raise CheckpointError(f"{model} has no {MANIFEST}: it was not written to its end.")
    return _sha256(model / MANIFEST)


def load_unfinished(
    run_folder: pathlib.Path | str, *, make_model: Callable[[config.Config], T]
) -> T:
    """Reads the parameters of the newest state of a run that has not written its model yet.

    Raises:
        CheckpointError: nothing is saved there, or what is cannot be read.
    """
    run_folder = pathlib.Path(run_folder)
    settings = read_config(run_folder)
    states = States(run_folder / "state")
    try:
        found = states.restore_model(jax.eval_shape(lambda: make_model(settings)))
    finally:
        states.close()
    if found is None:
        raise CheckpointError(f"the run in {run_folder} has saved nothing yet.")
    return found[1]


def is_unfinished(folder: pathlib.Path | str) -> bool:
    """Whether a folder is a run that has saved states and no model."""
    folder = pathlib.Path(folder)
    return any(folder.glob("state/*")) and not (folder / "model" / "params").is_dir()


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


def load_params(
    folder: pathlib.Path,
    make_module: Callable[[], nnx.Module],
    *,
    sharding: ChooseSharding | None = None,
    dtype: str | ChooseDtype | None = None,
) -> Any:
    """Fills the parameters in `folder` into the module that `make_module` would make.

    Args:
        sharding: where each parameter goes; every device reads only its part. Without it, to the
            default device.
        dtype: of the parameters in memory, or what chooses it by name (stacked, as for `sharding`);
            that of the module by default.

    Raises:
        CheckpointError: lists every missing, unknown or misshapen parameter.
    """
    store, module = ParamsReader(folder), jax.eval_shape(make_module)
    store.check({name: leaf.shape for name, leaf in leaf_shapes(module).items()})

    def read(stacks: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        targets = None if sharding is None else {n: sharding(n, s.shape) for n, s in stacks.items()}
        return _read_stacks(store, stacks, targets)

    return _fill_module(module, read, dtype)


def module_of(make_module: Callable[[], nnx.Module], leaves: Mapping[str, np.ndarray]) -> Any:
    """Returns the module that `make_module` would make, with arrays named as they are on disk.

    Raises:
        CheckpointError: lists every missing, unknown or misshapen parameter.
    """
    module = jax.eval_shape(make_module)
    if problems := _differences(leaf_shapes(module), dict(leaves)):
        raise CheckpointError(f"the parameters do not fit the model:\n{problems}")
    return _fill_module(module, lambda stacks: _stacked(stacks, leaves), None)


def leaf_shapes(module: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns names and shapes on disk of the parameters of a module: one of each layer.

    Args:
        module: of arrays, or of shapes as `jax.eval_shape` makes it.
    """
    abstract = nnx.to_pure_dict(nnx.state(module))
    return {
        name: struct
        for path, leaf in _flatten(abstract).items()
        for name, struct in _per_layer(path, leaf)
    }


def _fill_module(
    module: Any,
    read: Callable[[dict[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]],
    dtype: str | ChooseDtype | None,
) -> Any:
    graph, state = nnx.split(module)
    abstract = nnx.to_pure_dict(state)
    wanted = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, (dtype(name) if callable(dtype) else dtype) or leaf.dtype
        )
        for name, leaf in _flatten(abstract).items()
    }
    filled: dict[str, jax.Array] = {}
    for names in _batches({name: leaf.size * leaf.dtype.itemsize for name, leaf in wanted.items()}):
        filled |= read({name: wanted[name] for name in names})
    nnx.replace_by_pure_dict(
        state,
        jax.tree_util.tree_map_with_path(
            lambda path, _: filled[parameters.leaf_name(path)], abstract
        ),
    )
    return nnx.merge(graph, state)


def _read_stacks(
    store: "ParamsReader",
    stacks: dict[str, jax.ShapeDtypeStruct],
    targets: dict[str, jax.sharding.Sharding] | None,
) -> dict[str, jax.Array]:
    """Returns parameters, those of a stack of layers in one array."""
    if targets is None:
        parts = [part for name, leaf in stacks.items() for part, _ in _per_layer(name, leaf)]
        return _stacked(stacks, store.read(parts))
    read = store.read_into(
        {
            part: jax.ShapeDtypeStruct(
                struct.shape, leaf.dtype, sharding=_of_a_layer(name, targets[name])
            )
            for name, leaf in stacks.items()
            for part, struct in _per_layer(name, leaf)
        }
    )
    return {
        name: _stack_sharded(
            [read[part] for part, _ in _per_layer(name, leaf)], leaf, targets[name]
        )
        if _stack_depth(name) is not None
        else read[name]
        for name, leaf in stacks.items()
    }


def _stacked(
    stacks: dict[str, jax.ShapeDtypeStruct], found: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
    def stack(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        parts = [found[part] for part, _ in _per_layer(name, leaf)]
        if _stack_depth(name) is None:
            return jnp.asarray(parts[0], leaf.dtype)
        return jnp.asarray(np.stack(parts) if parts else np.zeros(leaf.shape), leaf.dtype)

    return {name: stack(name, leaf) for name, leaf in stacks.items()}


def _of_a_layer(name: str, target: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Returns where one layer of a stack is read to before the layers are stacked."""
    if _stack_depth(name) is None or not isinstance(target, jax.sharding.NamedSharding):
        return target
    return target.update(spec=jax.sharding.PartitionSpec(*target.spec[1:]))


def _stack_sharded(
    parts: list[jax.Array], leaf: jax.ShapeDtypeStruct, target: jax.sharding.Sharding
) -> jax.Array:
    if not parts:
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), target)
    return jax.jit(lambda *layers: jnp.stack(layers), out_shardings=target)(*parts)


def _batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yields names whose sizes in bytes together reach `BATCH_BYTES`."""
    batch, held = [], 0
    for name, size in sizes.items():
        batch.append(name)
        held += size
        if held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


# ---------------------------------------------------------------------------------------------
# The array store.


class ParamsReader:
    """The arrays of a `params/` folder, of which only those asked for are read.

    Attributes:
        leaves: names, such as `joint_layers/03/attn_out/kernel`, with shapes and dtypes.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder.resolve()
        try:
            self._metadata = ocp.metadata(str(self.folder)).metadata
        except Exception as error:  # the store raises whatever its layers raise
            raise self._unreadable(error) from error
        self.leaves: dict[str, Any] = _flatten(self._metadata)
        self._together: dict[str, np.ndarray] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the arrays."""
        return {
            name: math.prod(leaf.shape) * leaf.dtype.itemsize for name, leaf in self.leaves.items()
        }

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compares the arrays with those that a model has.

        Raises:
            CheckpointError: lists every missing, unknown or misshapen parameter.
        """
        wanted = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
        if problems := _differences(wanted, self.leaves):
            raise CheckpointError(
                f"the parameters in {self.folder} do not fit the model:\n{problems}"
            )

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns arrays on the host as they are on disk.

        Raises:
            CheckpointError: one of them cannot be read.
        """
        return self.read_into({name: self.leaves[name] for name in names})

    def read_one(self, name: str) -> np.ndarray:
        """Returns one array; in the order of `leaves`, many are read at a time and kept."""
        if name not in self._together:
            self._together = {}
            _give_back_memory()
            batch = next(batch for batch in _batches(self.sizes) if name in batch)
            self._together = self.read(batch)
        return self._together[name]

    def read_into(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arrays by name, of the dtype and in the sharding of their `ShapeDtypeStruct`."""

        def target(path: tuple, _: Any) -> Any:
            return targets.get(parameters.leaf_name(path), ocp.PLACEHOLDER)

        if not targets:
            return {}
        try:
            tree = ocp.load(
                str(self.folder), jax.tree_util.tree_map_with_path(target, self._metadata)
            )
        except Exception as error:
            raise self._unreadable(error) from error
        return {name: leaf for name, leaf in _flatten(tree).items() if name in targets}

    def _unreadable(self, error: Exception) -> CheckpointError:
        told = str(error).partition(" [tensorstore_spec=")[0]
        return CheckpointError(f"the parameters in {self.folder} cannot be read: {told}")


class ParamsWriter:
    """Writes the `params/` of a new model folder, a few tensors at a time.

    with ParamsWriter(folder) as writer:
        writer.add("final_norm/weight", array)
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._held: dict[str, np.ndarray] = {}
        self._digests: dict[str, str] = {}

    def __enter__(self) -> "ParamsWriter":
        return self

    def add(self, name: str, array: np.ndarray) -> None:
        """Writes an array, now or with the next ones.

        Raises:
            CheckpointError: the disk is full.
        """
        array = np.ascontiguousarray(array)
        if self._held_bytes + array.nbytes > BATCH_BYTES:
            self._write()
        self._held[name] = array
        self._digests[name] = _tensor_digest(name, array)
        if self._held_bytes >= BATCH_BYTES:
            self._write()

    @property
    def _held_bytes(self) -> int:
        return sum(array.nbytes for array in self._held.values())

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            self._write()
            with self._writing():
                ocp.partial.finalize(str(self.folder / "params"))
            _write_digests(self.folder, self._digests)

    def _write(self) -> None:
        if self._held:
            with self._writing():
                ocp.partial.save(str(self.folder / "params"), _nest(self._held))
        self._held = {}
        _give_back_memory()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with _silence():
                yield
        except OSError:
            raise
        except Exception as error:  # the store raises whatever its layers raise
            raise _system_error(error) from error


def _system_error(error: Exception) -> OSError:
    """Returns what the system refused, which the store wraps in a paragraph of its own."""
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return OSError(int(code[1]), os.strerror(int(code[1])))
    return OSError(str(error))


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


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str:
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
    return parameters.by_name(tree)


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


def verify(folder: pathlib.Path) -> int:
    """Compares every file of a model folder with `MANIFEST.sha256`; returns how many there are.

    Raises:
        CheckpointError: names the first file that is missing or changed, and the tensors that
            this changed.
    """
    try:
        lines = (folder / MANIFEST).read_text().splitlines()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was not written to its end. Copy it again."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged. Copy {folder} again.") from error
    for line in lines:
        digest, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. Copy the folder {folder} again.")
        if _sha256(path) != digest:
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}."
                f"{_damaged_tensors(folder, path)} Copy the folder {folder} again."
            )
    return len(lines)


def _damaged_tensors(folder: pathlib.Path, path: pathlib.Path) -> str:
    """Returns a sentence with the arrays that a damaged file changed; there may be none."""
    try:
        digests = _read_digests(folder)
    except (OSError, ValueError):
        return ""
    name = path.relative_to(folder).as_posix()
    if path.suffix == ".safetensors":
        digests = {key: digest for key, digest in digests.items() if key.startswith(f"{name}:")}
        found = _file_digests(folder, path)
    elif name.startswith("params/"):
        digests = {key: digest for key, digest in digests.items() if ":" not in key}
        with _silence():
            found = _store_digests(folder / "params")
    else:
        return ""
    damaged = [key for key, digest in digests.items() if found.get(key) != digest]
    if not damaged:
        return ""
    more = f" and {len(damaged) - TENSORS_NAMED} more" if len(damaged) > TENSORS_NAMED else ""
    named = f"{', '.join(damaged[:TENSORS_NAMED])}{more}"
    if len(damaged) == 1:
        return f" The tensor {named} is not what was written."
    return f" The tensors {named} are not what was written."


def _store_digests(folder: pathlib.Path) -> dict[str, str]:
    """Returns the digests of those arrays of a `params/` folder that can be read."""
    try:
        store = ParamsReader(folder)
    except CheckpointError:
        return {}

    def read(names: list[str]) -> dict[str, np.ndarray]:
        try:
            return store.read(names)
        except CheckpointError:
            if len(names) == 1:
                return {}
            return {name: array for one in names for name, array in read([one]).items()}

    return {
        name: _tensor_digest(name, array)
        for names in _batches(store.sizes)
        for name, array in read(names).items()
    }


def _file_digests(folder: pathlib.Path, path: pathlib.Path) -> dict[str, str]:
    """Returns the digests of the arrays of a safetensors file, by file and name."""
    try:
        with safetensors.safe_open(path, "numpy") as file:
            keys = {key: f"{path.relative_to(folder).as_posix()}:{key}" for key in file.keys()}
            return {name: _tensor_digest(name, file.get_tensor(key)) for key, name in keys.items()}
    except (OSError, safetensors.SafetensorError):
        return {}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps the store from logging a page for each thing that fails; it raises that too."""
    # A task of the store may die after this, in a thread of its own.
    logging.getLogger("asyncio").addFilter(_is_news)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        gc.collect()
        logging.disable(before)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record says more than that the store could not read, which was told."""
    error = record.exc_info[1] if record.exc_info else None
    return "never retrieved" not in record.getMessage() or "ocdbt" not in str(error).lower()


def _write_digests(folder: pathlib.Path, digests: dict[str, str]) -> None:
    lines = [f"{digests[name]}  {name}\n" for name in sorted(digests)]
    (folder / TENSORS).write_text("".join(lines))


def _read_digests(folder: pathlib.Path) -> dict[str, str]:
    lines = (folder / TENSORS).read_text().splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _give_back_memory() -> None:
    """Returns to the system what was freed.

    The allocator of Linux keeps the store's buffers, and the more the more is written: half a
    gigabyte in every two written, measured.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _tensor_digest(name: str, array: np.ndarray) -> str:
    return _digest({name: array})


def _write_manifest(folder: pathlib.Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{_sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / MANIFEST).write_text("".join(lines))


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replacing(folder: pathlib.Path) -> Iterator[pathlib.Path]:
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

    Where several processes train together all of them call the same methods with the same
    arguments, and the folder is one that all of them see.

    Attributes:
        folder: holds one folder a step.
        keep: how many of the newest to keep.
        keep_every: steps; the state nearest to each multiple is kept too; 0: no more than `keep`.
            So is the one with the best score.
    """

    folder: pathlib.Path
    keep: int = 2
    keep_every: int = 0

    def __post_init__(self):
        self.folder = pathlib.Path(self.folder).resolve()
        self._checkpointer = self._open()

    def _open(self) -> ocp.training.Checkpointer:
        if processes.is_first():
            for half_written in self.folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(half_written)
        processes.wait_for_all("states swept")
        policies = ocp.training.preservation_policies
        kept: list[Any] = [
            policies.LatestN(self.keep),
            policies.BestN(get_metric_fn=_score_of, n=1, keep_checkpoints_without_metrics=False),
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
        """Copies the state and writes it in the background.

        Args:
            note: what JSON can hold, to be saved with it.
            score: how good it is; larger is better.

        Raises:
            CheckpointError: the disk is too full, or writing the state before this one failed.
        """
        self.wait()
        # The store refuses arrays without elements, such as a stack of no layers.
        leaves: Any = {name: leaf for name, leaf in _flatten(state).items() if np.size(leaf)}
        if processes.are_several():
            leaves = _shared_arrays(leaves)
        else:  # copies, for the next step donates its buffers
            leaves = {name: _to_host(leaf) for name, leaf in leaves.items()}
        size = sum(leaf.nbytes for leaf in leaves.values())
        processes.first_does(lambda: check_free_space(self.folder, size))
        metadata: Any = {"sha256": _known(leaves), "note": note}
        with self._writing():
            self._checkpointer.save_checkpointables_async(
                step,
                {"state": _nest(leaves)},
                force=True,
                metrics=None if score is None else {"score": score},
                custom_metadata=metadata,
            )

    def restore(self, template: T) -> tuple[int, T] | None:
        """Returns the newest readable state, behind its step; None where nothing was saved.

        A state that cannot be read, or whose checksums are wrong, is put aside with a warning and
        the one before it is taken.

        Args:
            template: a state of the same shapes; it says where the arrays go, which need not be
                where they were when they were saved.

        Raises:
            CheckpointError: none of the states is readable, or they are of another model.
        """
        found = self._newest(template)
        return None if found is None else (found[0], _fill(template, found[1], self.folder))

    def restore_model(self, template: T) -> tuple[int, T] | None:
        """Returns the parameters of the newest readable state, the average where one was kept.

        Only they are read. See `restore`; the state must be a `train.TrainState` under "state".
        """
        found = self._newest(template, only=("state/ema/", "state/params/"))
        return None if found is None else (found[0], _fill(template, found[1], self.folder))

    def note(self, step: int) -> dict[str, Any]:
        """Returns the note that was saved with a state; an empty one where there was none."""
        return self._metadata(step).get("note") or {}

    def _newest(
        self, template: Any, only: tuple[str, ...] = ()
    ) -> tuple[int, dict[str, Any]] | None:
        self.wait()
        steps = self.steps
        for step in reversed(steps):
            trouble: Any = None
            try:
                leaves = self._read(step, template, only)
            except _MisfitError as error:
                raise CheckpointError(str(error)) from error
            except Exception as error:  # the store raises whatever its layers raise
                leaves, trouble = {}, error
            if processes.all_of_them(trouble is None):
                return step, leaves
            if processes.is_first():
                log.warning(
                    "The state of step %d in %s is damaged (%s); trying the one before it.",
                    step, self.folder, trouble or "another process says",
                )  # fmt: skip
            self._put_aside(step)
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
            # It would count a step whose writing failed as saved, so begin afresh. Of several
            # processes the others know nothing of it yet: they cannot do this together.
            if not processes.are_several():
                self._checkpointer = self._open()
            raise CheckpointError(
                f"a state could not be written to {self.folder} ({error}). Intact are those of"
                f" steps {self.steps}: run the same command again to go on from there."
            ) from error

    def _metadata(self, step: int) -> dict[str, Any]:
        found: Any = self._checkpointer.checkpointables_metadata(step).custom_metadata
        return found or {}

    def _read(self, step: int, template: Any, only: tuple[str, ...]) -> dict[str, Any]:
        """Returns leaves by name, of one of the groups that `only` names if it names any."""
        metadata: Any = self._checkpointer.checkpointables_metadata(step)
        known = (metadata.custom_metadata or {}).get("sha256")
        whole = not only and not processes.are_several()
        if whole and not _is_of_several(known):
            tree = self._checkpointer.load_checkpointables(step, {"state": None})["state"]
            leaves = {name: np.asarray(leaf) for name, leaf in _flatten(tree).items()}
            _check_known(known, leaves)
            return leaves
        saved = metadata.metadata["state"]
        names = list(_flatten(saved))
        prefix = next((p for p in only if any(name.startswith(p) for name in names)), "")
        given = {name: leaf for name, leaf in _flatten(template).items() if _size_of(leaf)}
        wanted = {prefix + n: jax.eval_shape(_key_data, leaf) for n, leaf in given.items()}
        there = {n: leaf for n, leaf in _flatten(saved).items() if n.startswith(prefix)}
        if problems := _differences(wanted, there):
            raise _MisfitError(f"the states in {self.folder} are of another model:\n{problems}")
        anywhere = _anywhere(given)

        def target(path: tuple, found: Any) -> Any:
            name = parameters.leaf_name(path)
            if name not in wanted:
                return ocp.PLACEHOLDER
            where = getattr(given[name.removeprefix(prefix)], "sharding", None) or anywhere
            return jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=where)

        abstract = jax.tree_util.tree_map_with_path(target, saved)
        tree = self._checkpointer.load_checkpointables(step, {"state": abstract})["state"]
        leaves = {name: leaf for name, leaf in _flatten(tree).items() if name in wanted}
        if isinstance(known, dict):
            _check_known(known, leaves)
        return {name.removeprefix(prefix): leaf for name, leaf in leaves.items()}

    def _put_aside(self, step: int) -> None:
        damaged = self.folder.parent / "damaged"
        target = damaged / str(step)
        if processes.is_first():
            damaged.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            (self.folder / str(step)).rename(target)
        processes.wait_for_all("put aside")
        self._checkpointer.reload()


class _MisfitError(Exception):
    """A state that is whole and of another model."""


def _score_of(metrics: dict[str, float]) -> float:
    return metrics["score"]


def _to_host(leaf: Any) -> np.ndarray:
    return np.array(_key_data(leaf))


def _size_of(leaf: Any) -> int:
    """Returns how many numbers an array, a number, or the shape of an array holds."""
    return math.prod(leaf.shape) if isinstance(leaf, jax.ShapeDtypeStruct) else np.size(leaf)


def _shared_arrays(leaves: dict[str, Any]) -> dict[str, jax.Array]:
    """Returns arrays that lie over several processes, where they lie.

    Numbers, the same in all processes, become such arrays. What is on an accelerator the store
    copies to the host before it returns; on CPU it would read the very buffers that the next step
    donates, so it gets copies.
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
    """Returns a copy on every device that holds a part of these arrays."""
    for leaf in leaves.values():
        where = getattr(leaf, "sharding", None)
        if isinstance(where, jax.sharding.NamedSharding):
            return where.update(spec=jax.sharding.PartitionSpec())
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _key_data(leaf: Any) -> Any:
    """Returns the numbers of a random key, and anything else as it is."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# ---------------------------------------------------------------------------------------------
# Checksums of a state. Of arrays that one process holds, each by itself: the SHA-256 of its bytes.
# Over several processes none has these: SHA-256 of sums that the devices make together, in which a
# flipped bit shows, and which are the same however the array is split.


def _known(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Returns the checksum of each array."""
    if processes.are_several():
        return {name: f"sums {digest}" for name, digest in _sum_digests(leaves).items()}
    return {name: _digest({name: leaf}) for name, leaf in leaves.items()}


def _check_known(known: dict[str, str] | str | None, leaves: Mapping[str, Any]) -> None:
    """Compares arrays with the checksums they were saved with: one each, or one of all together.

    Raises:
        ValueError: names those that differ.
    """
    if not isinstance(known, dict):
        if known != _digest({name: np.asarray(leaf) for name, leaf in leaves.items()}):
            raise ValueError("the SHA-256 of its arrays is not the one it was saved with")
        return
    if _is_of_several(known):
        found = {name: f"sums {digest}" for name, digest in _sum_digests(leaves).items()}
    else:
        found = {
            name: _digest({name: whole}) for name, whole in processes.on_host(dict(leaves)).items()
        }
    wrong = [name for name in found if known.get(name) != found[name]]
    if wrong:
        raise ValueError(
            f"the SHA-256 of {', '.join(wrong[:TENSORS_NAMED])} is not the one it was saved with"
        )


def _is_of_several(known: dict[str, str] | str | None) -> bool:
    """Whether these are checksums of arrays that lay over several processes."""
    return isinstance(known, dict) and any(value.startswith("sums ") for value in known.values())


def _sum_digests(leaves: Mapping[str, Any]) -> dict[str, str]:
    sums = processes.on_host(_sums(dict(leaves)))
    return {
        name: hashlib.sha256(
            f"{name} {leaves[name].dtype} {leaves[name].shape} {total.tolist()}".encode()
        ).hexdigest()
        for name, total in sums.items()
    }


@jax.jit
def _sums(leaves: dict[str, Any]) -> dict[str, UInt32[Array, " 2"]]:
    """Returns two sums modulo 2**32 of the bits of each array, every place with an odd factor.

    An odd factor takes no bit away, so that a single flipped one always shows.
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


def _digest(leaves: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(leaves):
        leaf = np.ascontiguousarray(leaves[name])
        digest.update(f"{name} {leaf.dtype} {leaves[name].shape} ".encode())
        digest.update(leaf.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _fill(template: T, leaves: Mapping[str, Any], folder: pathlib.Path) -> T:
    wanted = {
        name: jax.eval_shape(_key_data, leaf)
        for name, leaf in _flatten(template).items()
        if _size_of(leaf)
    }
    if problems := _differences(wanted, leaves):
        raise CheckpointError(f"the states in {folder} are of another model:\n{problems}")

    def place(path: tuple, leaf: Any) -> Any:
        if not _size_of(leaf):
            is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
            return jnp.zeros(leaf.shape, leaf.dtype) if is_shape else leaf
        saved = leaves[parameters.leaf_name(path)]
        if isinstance(leaf, bool | int | float):
            return type(leaf)(np.asarray(saved))
        if _is_key(leaf):
            return jax.random.wrap_key_data(jnp.asarray(saved), impl=jax.random.key_impl(leaf))
        if isinstance(leaf, np.ndarray):
            return saved
        if isinstance(saved, jax.Array):
            return saved  # the store put it where it goes
        return jax.device_put(saved, getattr(leaf, "sharding", None))

    return jax.tree_util.tree_map_with_path(place, template)
