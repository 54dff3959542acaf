# SPDX-License-Identifier: Apache-2.0
"""Models on disk: whole model folders, and adapters to one.

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
file that takes modules apart, and with `training/states.py` the only one that knows the array
store.
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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import safetensors
import safetensors.numpy
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.models import lora, parameters
from sparse_lavida_jax.models.denoiser import Denoiser

# Where a parameter goes, by its path in the model (`joint_layers/attn_out/kernel`, all layers in
# one array) and its shape.
ChooseSharding = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]

ChooseDtype = Callable[[str], str]  # of a parameter, by its path in the model

FORMAT = "sparse-lavida-jax/1"
BUNDLED = pathlib.Path(__file__).parents[1] / "assets" / "models"
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

log = logging.getLogger(__name__)


class CheckpointError(Exception):
    """A checkpoint that is missing, damaged, of another model, or cannot be written."""


class WriteError(CheckpointError):
    """A checkpoint that could not be written, or that the disk is too full for."""


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
        ocp.save(str(new / "params"), parameters.nest(leaves))
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
    leaves = {
        name: np.asarray(leaf)
        for name, leaf in parameters.by_name(trained).items()
        if np.size(leaf)
    }
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
    if problems := parameters.differences(leaf_shapes(module), dict(leaves)):
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
        for path, leaf in parameters.by_name(abstract).items()
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
        for name, leaf in parameters.by_name(abstract).items()
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
        self.leaves: dict[str, Any] = parameters.by_name(self._metadata)
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
        if problems := parameters.differences(wanted, self.leaves):
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
        return {name: leaf for name, leaf in parameters.by_name(tree).items() if name in targets}

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
                ocp.partial.save(str(self.folder / "params"), parameters.nest(self._held))
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
    leaves = parameters.by_name(nnx.to_pure_dict(nnx.state(module)))
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
    return digest_of({name: array})


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
        raise WriteError(
            f"{folder} could not be written ({error}); what was there before is unchanged."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_free_space(folder: pathlib.Path, num_bytes: int) -> None:
    """Refuses to start writing what the disk cannot hold.

    Raises:
        WriteError: less than 1.2 times `num_bytes` are free.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < FREE_SPACE_FACTOR * num_bytes:
        raise WriteError(
            f"the disk of {folder.resolve()} has {free / 1e6:.0f} MB free and"
            f" {FREE_SPACE_FACTOR * num_bytes / 1e6:.0f} MB are needed. What was saved before is"
            " intact: free some space and run the same command again."
        )


def digest_of(leaves: dict[str, np.ndarray]) -> str:
    """Returns the SHA-256 of arrays and their names."""
    digest = hashlib.sha256()
    for name in sorted(leaves):
        leaf = np.ascontiguousarray(leaves[name])
        digest.update(f"{name} {leaf.dtype} {leaves[name].shape} ".encode())
        digest.update(leaf.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
