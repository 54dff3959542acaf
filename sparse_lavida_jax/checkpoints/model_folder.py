# SPDX-License-Identifier: Apache-2.0
"""Model folders, each complete in itself.

config.json       settings, with a format tag
model.safetensors the parameters, one array per layer (joint_layers/00/...), or several such files
                  with their index; or params/, an orbax array store
tokenizer.json
words.txt         for a model trained from scratch: the words of its training texts
vq/               the image tokenizer, if the model has one
official/         for a converted model: the small files of the released folder
unused.safetensors  for a converted model: released tensors that this model does not use
README.md         source, licence, commit
made_of.json      for a folder that `copy` wrote: the digests of the folders it was derived from
TENSORS.sha256    digests of every parameter, and of every array in the other safetensors files
MANIFEST.sha256   digests of all files above
"""

import contextlib
import fnmatch
import functools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_lavida_jax import config, old_names, runtime
from sparse_lavida_jax.checkpoints import contents, manifest, named_arrays, stores
from sparse_lavida_jax.checkpoints.named_arrays import (
    CheckpointError,
    ChooseDtype,
    ChooseParameters,
)
from sparse_lavida_jax.checkpoints.tensors import INDEX, NARROW, SHARD_BYTES, Tensor, dtype_name
from sparse_lavida_jax.data import files
from sparse_lavida_jax.data.leftovers import is_leftover
from sparse_lavida_jax.models import denoiser, parameters, quantize, vq_files
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.parameters import ChooseSharding
from sparse_lavida_jax.prompting.vocabulary import WORDS
from sparse_lavida_jax.schema import shown

FORMAT = "sparse-lavida-jax/1"
BUNDLED = pathlib.Path(__file__).parents[1] / "assets" / "models"
MADE_OF = "made_of.json"  # written by `copy`
MOST_SETTINGS = 2**20  # bytes of config.json and the like
COMMITTED = "commit_success.txt"  # written by the array store
FREE_SPACE_FACTOR = 1.2  # times the bytes to write must be free before writing starts


class WriteError(CheckpointError):
    """A checkpoint could not be written, or the disk is too full for it."""


class ReleasedError(CheckpointError):
    """A released PyTorch model, which must be converted before it can be used."""


class LoadedModel(NamedTuple):
    """A model with everything needed to use it."""

    model: Any
    config: config.Config
    tokenizer_path: pathlib.Path
    vq_folder: pathlib.Path | None


# ---------------------------------------------------------------------------------------------
# Reading.


@runtime.interrupts_held()
def load_model(
    name: pathlib.Path | str,
    *,
    make_model: Callable[[config.Config], nnx.Module] | None = None,
    sharding: ChooseSharding | None = None,
    dtype: str | ChooseDtype | None = None,
    check_finite: bool = True,
    wanted: ChooseParameters | None = None,
) -> LoadedModel:
    """Reads the model that a name refers to (`find_model`).

    Args:
        make_model: makes the model whose parameters to fill in; the denoiser by default. Only its
            shapes are used.
        sharding, dtype, check_finite, wanted: see `stores.load_params`.

    Raises:
        CheckpointError: there is no model, a file is damaged, or the parameters are not the
            model's.
    """
    folder = find_model(name)
    manifest.verify(folder)
    settings, stored = read_config(folder), stores.narrow_dtype(folder)
    if stored and make_model is not None:
        raise CheckpointError(
            f"the matrices in {folder} are in 8 bits ({stored}), which is for sampling: train from"
            " the model that it was made of."
        )
    module = shapes(settings, stored, make_model)
    model = stores.load_params(
        folder,
        module,
        sharding=sharding,
        dtype=wide_dtypes(module, dtype) if stored else dtype,
        digests=named_arrays.read_digests(folder),
        check_finite=check_finite,
        wanted=wanted,
    )
    images = folder / "vq"
    manifest.verify_tensors(folder)
    found = images if images.is_dir() else None
    return LoadedModel(model, settings, folder / "tokenizer.json", found)


def verify(folder: pathlib.Path) -> int:
    """Checks a model folder as `load_model` does, an array at a time; returns the number of files.

    Raises:
        CheckpointError: as `load_model`.
    """
    count = manifest.verify(folder)
    store, digests = stores.open_params(folder), named_arrays.read_digests(folder)
    module = shapes(read_config(folder), stores.narrow_dtype(folder))
    store.check({name: leaf.shape for name, leaf in named_arrays.by_layer(module).items()})
    for name in store.leaves:
        store.check_array(name, store.read_one(name), digests)
    manifest.verify_tensors(folder)
    return count


def shapes(
    settings: config.Config,
    stored: str,
    make_model: Callable[[config.Config], nnx.Module] | None = None,
) -> Any:
    """Returns the shapes of a model, with matrices in 8 bits if `stored` names their dtype."""
    if make_model is not None:
        return jax.eval_shape(lambda: make_model(settings))
    module = denoiser.shapes(settings.model)
    if not stored:
        return module
    method = quantize.DTYPES[stored]
    return jax.eval_shape(lambda whole: quantize.quantized(whole, method), module)


def wide_dtypes(module: Any, dtype: str | ChooseDtype | None) -> ChooseDtype:
    """Returns a function that chooses the dtype of each parameter; 8-bit ones keep theirs.

    Args:
        module: holds shapes.
        dtype: see `stores.load_params`.
    """
    leaves = {name: leaf.dtype for name, leaf in parameters.by_name(module).items()}
    narrow = {name.rpartition("/")[0] for name, kind in leaves.items() if kind.itemsize == 1}

    def choose(name: str) -> str:
        wished = dtype(name) if callable(dtype) else dtype
        stays = wished is None or name.rpartition("/")[0] in narrow
        return leaves[name].name if stays else str(wished)

    return choose


def make_denoiser(settings: config.Config) -> Denoiser:
    """Returns a denoiser with random parameters."""
    return Denoiser(settings.model, rngs=nnx.Rngs(0))


def find_model(
    name: pathlib.Path | str, *, revision: str | None = None, local_files_only: bool = False
) -> pathlib.Path:
    """Returns the model folder that a name refers to. Only this function decides that.

    A name is that of a model folder, of a run directory with a finished model, of a bundled model,
    or of a model on the hub (`hub.is_id`), which is downloaded unless its conversion is here.

    Args:
        revision, local_files_only: for a model on the hub: see `hub.fetch`.

    Raises:
        ReleasedError: it is a released PyTorch model.
        CheckpointError: there is no such model, or the hub does not provide it.
    """
    folder = files.expanded(name)
    is_released = _is_released(folder)
    for candidate in () if is_released else (folder, folder / "model", BUNDLED / folder):
        if stores.holds_params(candidate):
            return candidate
    above = folder.absolute().parents[:3] if folder.exists() else ()
    for place in (folder, *filter(is_ours, above)):
        if place != folder and any(map(stores.holds_params, (place, place / "model"))):
            raise CheckpointError(f"{folder} is a part of {place}, which holds a model: give that.")
        if (place / "state").is_dir() and place.absolute().parent.name != "state":
            raise CheckpointError(
                f"the run in {place} has not written its model yet: that happens at its end. Run"
                " the command that started it again; it resumes."
            )
    if is_released:
        raise ReleasedError(
            f"{folder} is a PyTorch folder: convert it first, with"
            f" `sparse-lavida convert {folder} MODEL`, and give the MODEL folder."
        )
    if (folder / "mixture.json").is_file():  # written by `mixture/prepare.py`
        raise CheckpointError(
            f"{folder} is data, not a model: `sparse-lavida train --data={folder}` trains one."
        )
    from sparse_lavida_jax.checkpoints import hub

    if hub.is_id(name):
        return _fetched(str(name), {"revision": revision, "local_files_only": local_files_only})
    names = ", ".join(bundled_models()) or "none"
    raise CheckpointError(
        f"there is no model in {folder}. Give a model folder, a run directory, the name of a"
        f" bundled model ({names}), or the id of a model on the hub, org/name."
    )


def _is_released(folder: pathlib.Path) -> bool:
    """Whether a folder holds a PyTorch model rather than a damaged model folder of ours."""
    has_tensors = any(not is_leftover(path.name) for path in folder.glob("*.safetensors*"))
    return has_tensors and not is_ours(folder) and not (folder / manifest.MANIFEST).exists()


def _fetched(name: str, how: dict[str, Any]) -> pathlib.Path:
    from sparse_lavida_jax.checkpoints import hub

    described = hub.fetch(name, only=hub.SETTINGS, **how)
    if is_ours(described):
        return hub.fetch(name, **how)
    converted = converted_place(described)
    if stores.holds_params(converted):
        return converted
    raise ReleasedError(
        f"the hub's model {name} is none of this project. If it is a released LaViDa-O, it has to"
        " be converted, which takes twice its size on the disk: once with --convert (in Python"
        f" convert=True), after which this name will do, or with `sparse-lavida convert {name}"
        " MODEL` into a MODEL folder."
    )


def converted_place(fetched: pathlib.Path) -> pathlib.Path:
    """Returns where a released model is converted to, given its folder in the hub's cache."""
    commit, repository = fetched.name, fetched.parents[1].name
    return runtime.models_folder() / f"{repository.removeprefix('models--')}-{commit[:12]}"


def bundled_models() -> list[str]:
    """Returns the names of the models that come with the package."""
    return sorted(folder.name for folder in BUNDLED.glob("*") if stores.holds_params(folder))


def read_config(folder: pathlib.Path) -> config.Config:
    """Reads `config.json` back.

    Raises:
        CheckpointError: it is missing, is not JSON, or has settings unknown to this version.
    """
    path = folder / "config.json"
    try:
        given = files.read_json(path, MOST_SETTINGS)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no config.json, so its model is unknown. Copy the folder again."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    tag = given.pop("format", None) if isinstance(given, dict) else None
    if tag != FORMAT:
        raise CheckpointError(f"{path} has the format {shown(tag)}; this version reads {FORMAT!r}.")
    try:
        return config.build(config.Config, old_names.current(given))
    except config.ConfigError as error:
        raise CheckpointError(f"{path} was written by another version: {error}") from error


def read_text(folder: pathlib.Path, name: str) -> str:
    """Returns the contents of a text file of a model folder; "" if there is none.

    Raises:
        CheckpointError: it is not text, or see `contents.inside`.
    """
    if not os.path.lexists(folder / name):
        return ""
    try:
        return files.read_text(contents.inside(folder, name))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error}.") from error


# ---------------------------------------------------------------------------------------------
# Writing.


def save_model(
    folder: pathlib.Path | str,
    model: nnx.Module,
    settings: config.Config,
    *,
    tokenizer_path: pathlib.Path,
    vq_folder: pathlib.Path | None,
    readme: str,
    words: frozenset[str] | None = None,
    dtype: str = "float32",
    kind: stores.Format = "safetensors",
    most_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a model folder, replacing an older one. It is written completely or not at all.

    Adapters are merged into their matrices; `adapters.save` keeps them separate.

    Args:
        vq_folder: the image tokenizer to copy; None for a model without one.
        readme: source, licence and commit, in Markdown.
        words: the words of its training texts; None if they are not known.
        dtype: of the parameters on disk: float16, bfloat16 or float32.
        kind: how they are stored.
        most_bytes: of the tensors in one safetensors file.

    Raises:
        CheckpointError: the folder holds something else, or the disk is full.
    """
    from sparse_lavida_jax.models import lora  # reading a model does without

    stored = jnp.dtype(dtype)
    wanted = [
        Tensor(
            name, dtype_name(stored), leaf.shape, functools.partial(np.asarray, leaf, dtype=stored)
        )
        for name, leaf in named_arrays.by_layer(lora.merged(model)).items()
    ]
    with new_model_folder(folder, settings, sum(one.nbytes for one in wanted)) as new:
        stores.write_params(new, wanted, kind, most_bytes)
        files.copy(tokenizer_path, new / "tokenizer.json")
        if vq_folder is not None:
            vq_files.copy(vq_folder, new / "vq")
        if words is not None:
            files.write_text(new / WORDS, "\n".join(sorted(words)) + "\n")
        files.write_text(new / "README.md", readme)


def copy(
    source: pathlib.Path | str,
    folder: pathlib.Path | str,
    kind: stores.Format = "safetensors",
    *,
    dtype: str = "",
    readme: str | None = None,
    settings: config.Config | None = None,
    change: Callable[[str, np.ndarray], np.ndarray] | None = None,
) -> int:
    """Copies a model folder, storing its parameters as `kind`; returns the number of tensors.

    Unless its parameters change, the copy records the folder it was derived from, so that adapters
    for that one still fit.

    Args:
        dtype: float32 or bfloat16; or int8 or float8, for the matrices of the layers only, with
            a scale per column; by default unchanged.
        readme, settings: replace those of `source`.
        change: returns a parameter of the copy, given its name on disk and its value.

    Raises:
        CheckpointError: `source` is damaged or in 8 bits already, `folder` holds something else, or
            the disk is full.
    """
    source = find_model(source)
    manifest.verify(source)
    store = stores.open_params(source)
    if dtype and stores.narrow_dtype(source):
        raise CheckpointError(
            f"the matrices in {source} are in 8 bits already: start from the model that it was made"
            " of."
        )

    def read(name: str) -> np.ndarray:
        array = store.read_one(name)
        return array if change is None else change(name, array)

    wanted = [
        one
        for name, leaf in store.leaves.items()
        for one in _as_dtype(name, leaf, dtype, functools.partial(read, name))
    ]
    size = sum(one.nbytes for one in wanted)
    with new_model_folder(folder, settings or read_config(source), size) as new:
        written = (f"{stores.PARAMS}/*", stores.FILES, INDEX, named_arrays.TENSORS)
        _copy_listed(source, new, written)
        stores.write_params(new, wanted, kind)
        files.write_json(new / MADE_OF, lineage(source) if change is None else [], indent=2)
        if settings is not None:
            write_config(new, settings)
        if readme is not None:
            files.write_text(new / "README.md", readme)
    return len(wanted)


def copy_with_readme(source: pathlib.Path | str, folder: pathlib.Path | str, readme: str) -> None:
    """Copies a model folder file by file, with another README. `folder` may be `source` itself.

    Raises:
        CheckpointError: as `copy`.
    """
    source = find_model(source)
    manifest.verify(source)
    size = sum((source / name).stat().st_size for name in manifest.read(source))
    with new_model_folder(folder, read_config(source), size) as new:
        _copy_listed(source, new)
        files.write_json(new / MADE_OF, lineage(source), indent=2)
        files.write_text(new / "README.md", readme)


def _copy_listed(source: pathlib.Path, new: pathlib.Path, but: Sequence[str] = ()) -> None:
    """Copies the files that the manifest lists, except hidden ones and some patterns of names."""
    listed = [name for name in manifest.read(source) if "/." not in f"/{name}"]
    matches = fnmatch.fnmatchcase
    contents.copy(source, new, (n for n in listed if not any(matches(n, one) for one in but)))


def _as_dtype(name: str, leaf: Any, dtype: str, read: Callable[[], np.ndarray]) -> list[Tensor]:
    """Returns a parameter in another dtype: in 8 bits, a matrix and its scales.

    Args:
        leaf: has its shape and dtype.
        read: returns it.
    """
    module, _, last = name.rpartition("/")
    if dtype in quantize.DTYPES:
        if last != "kernel" or not module.startswith(quantize.STACKS):
            return [Tensor(name, dtype_name(leaf.dtype), leaf.shape, read)]
        narrow = next(kind for kind in NARROW.values() if kind.name.startswith(dtype))

        def part(i: int) -> np.ndarray:
            return np.asarray(quantize.rounded(jnp.asarray(read()), narrow, axis=-2)[i])

        scales = Tensor(f"{module}/scale", "F32", (1, leaf.shape[-1]), lambda: part(1))
        return [Tensor(name, dtype_name(narrow), leaf.shape, lambda: part(0)), scales]
    wide = jnp.dtype(dtype or leaf.dtype)
    return [Tensor(name, dtype_name(wide), leaf.shape, lambda: read().astype(wide, copy=False))]


def lineage(folder: pathlib.Path) -> list[str]:
    """Returns the SHA-256 of the manifests of a folder and of the folders it was derived from."""
    try:
        before = files.read_json(folder / MADE_OF, MOST_SETTINGS)
    except (OSError, ValueError):
        before = []
    return [manifest.digest(folder), *(before if isinstance(before, list) else [])]


@contextlib.contextmanager
def new_model_folder(
    folder: pathlib.Path | str, settings: config.Config, num_bytes: int
) -> Iterator[pathlib.Path]:
    """Yields a folder, its `config.json` written, that becomes `folder` if everything goes well.

    Its manifest is written at the end.

    Args:
        num_bytes: about how many bytes will be written into it.

    Raises:
        CheckpointError: `folder` holds something else, or the disk is full.
    """
    folder = place_of(folder)
    check_replaceable(folder)
    check_free_space(folder.parent, num_bytes)
    with replacing(folder) as new:
        write_config(new, settings)
        yield new
        for mark in new.rglob(COMMITTED):  # it holds the path on this machine
            mark.write_text("Checkpoint commit was successful.\n")
        manifest.write(new)


def place_of(folder: pathlib.Path | str) -> pathlib.Path:
    """Returns the absolute path of a folder to write, which the array store needs.

    Raises:
        WriteError: its name leads nowhere, such as a link to itself, or nothing can be written
            there.
    """
    try:
        place = files.resolve(files.expanded(folder))
        files.check_place(place.parent)
        return place
    except (ValueError, OSError) as error:
        raise WriteError(f"{folder} is not a place to write to: {error}.") from error


def write_config(folder: pathlib.Path, settings: config.Config) -> None:
    """Writes `config.json`, tagged with the format of the folder."""
    tagged = {"format": FORMAT, **config.to_dict(settings)}
    files.write_json(folder / "config.json", tagged, indent=2)


def is_ours(folder: pathlib.Path) -> bool:
    """Whether a folder is marked as a model folder, of any version."""
    try:
        tag = files.read_json(folder / "config.json", MOST_SETTINGS)["format"]
        return str(tag).startswith(FORMAT[:-1])
    except (OSError, ValueError, LookupError, TypeError):
        return False


def check_replaceable(folder: pathlib.Path) -> None:
    """Refuses to replace anything but a model folder.

    Raises:
        CheckpointError: the folder holds something else.
    """
    try:
        if folder.is_file() or (folder.exists() and not contents.is_empty(folder)):
            read_config(folder)
    except (CheckpointError, OSError):
        raise CheckpointError(
            f"{folder} exists and is no model folder, so it is not overwritten. Choose another."
        ) from None


@contextlib.contextmanager
def replacing(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields an empty folder that becomes `folder` if everything goes well.

    Raises:
        WriteError: the disk is full, or the place cannot be written to.
    """
    try:
        with files.replacing(folder) as new:
            new.mkdir()
            yield new
    except OSError as error:
        raise WriteError(
            f"{folder} could not be written ({error}); what was there before is unchanged."
        ) from error


def check_free_space(folder: pathlib.Path, num_bytes: int) -> None:
    """Refuses to start writing more than the disk can hold.

    Raises:
        WriteError: less than 1.2 times `num_bytes` are free.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < FREE_SPACE_FACTOR * num_bytes:
        raise WriteError(
            f"the disk of {folder.absolute()} has {free / 1e6:.0f} MB free and"
            f" {FREE_SPACE_FACTOR * num_bytes / 1e6:.0f} MB are needed. What was saved before is"
            " intact: free some space and run the same command again."
        )
