# SPDX-License-Identifier: Apache-2.0
"""Converts a released PyTorch folder to a model folder.

Tensors are read, brought into our layout and written one at a time, so host memory does not grow
with the depth of the model. Everything is checked before anything is written, and all problems
are listed at once; if there is any, nothing is written.
"""

import contextlib
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.checkpoints import contents, hub, model_folder, named_arrays, stores, tensors
from sparse_lavida_jax.checkpoints.tensors import INDEX, SINGLE
from sparse_lavida_jax.convert import names
from sparse_lavida_jax.convert.settings import ConvertError, has_generation_branch, settings_from
from sparse_lavida_jax.data import files
from sparse_lavida_jax.data.files import remedy
from sparse_lavida_jax.data.leftovers import is_leftover
from sparse_lavida_jax.lavida_o.chat import ChatTokenizer
from sparse_lavida_jax.models import vq_files
from sparse_lavida_jax.models.denoiser import ImageEmbedding
from sparse_lavida_jax.programs import jax_settings

OFFICIAL = "official"  # folder with the small files of the release
UNUSED = "unused.safetensors"
WORDS = "model.transformer.wte.weight"
_NO_TOKENIZER = "the image tokenizer, a safetensors file, is not there. Download the folder vqvae/."
_NO_TOKENIZER_CONFIG = "vqvae/config.json is not there. Download the folder vqvae/ as well."
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Small files that PyTorch users need next to an export. Licences stay with their weights.
_SMALL = (".json", ".txt", ".model", ".jinja", ".md")
_LICENCES = ("LICENSE", "LICENCE", "NOTICE")
_SMALL_BYTES = 50 * 2**20
_LAYER_NUMBER = re.compile(r"(?<=blocks\.|layers\.)\d+")

Progress = Callable[[int, int], None]  # bytes done, bytes in total


@dataclasses.dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    num_tensors: int
    num_parameters: int
    dtypes: tuple[str, ...]


@dataclasses.dataclass
class _Released:
    """What is known of a released folder before its tensors are read.

    Attributes:
        stored: its tensors, in the order of the files.
        problems: what is wrong with its files.
        unread: name prefixes of tensors in files that cannot be read.
    """

    folder: pathlib.Path
    config: Mapping[str, Any]
    vq_config: Mapping[str, Any] | None
    stored: dict[str, tensors.Tensor] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    unread: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def noting(self, unread: Iterable[str] = (), where: str = "") -> Iterator[None]:
        """Records a problem, and which tensors cannot be read because of it."""
        try:
            yield
        except named_arrays.CheckpointError as error:
            self.problems.append(f"{where}{error}")
            self.unread += unread

    def add(self, found: Mapping[str, tensors.Tensor]) -> None:
        """Adds the tensors of a file, and records those that another file holds as well."""
        self.problems += [
            f"{name} is in {self.stored[name].file} and in {tensor.file}: leave it in one of them."
            for name, tensor in found.items()
            if name in self.stored
        ]
        self.stored |= found

    def complain(self, problems: Iterable[str] = ()) -> None:
        """Raises ConvertError if there is any problem."""
        problems = _by_layer([*self.problems, *problems])
        if problems and self.vq_config is None and has_generation_branch(self.config):
            problems.append(_NO_TOKENIZER_CONFIG)
        if len(problems) == 1:
            raise ConvertError(f"{self.folder} cannot be converted: {problems[0]}")
        if problems:
            lines = "".join(f"\n  {problem}" for problem in problems)
            raise ConvertError(f"{self.folder} cannot be converted:{lines}")


@jax_settings.defaults()
def convert(
    src: pathlib.Path | str,
    dst: pathlib.Path | str,
    *,
    dtype: str | None = None,
    understanding_only: bool = False,
    check_finite: bool = True,
    kind: stores.Format = "safetensors",
    name: str = "",
    on_progress: Progress | None = None,
) -> Converted:
    """Writes the model folder `dst` from the released folder `src`.

    Args:
        src: holds config.json, tokenizer.json and safetensors files, sharded or not; or the id of
            such a model on the hub, which is downloaded.
        dtype: of the parameters on disk, float32 or bfloat16; by default unchanged.
        understanding_only: also accepts LLaDA, a model without images.
        check_finite: whether to refuse tensors that hold a NaN or an infinite number.
        kind: how the parameters are stored.
        name: of the source, for the README; by default the folder or the id.

    Raises:
        ConvertError: lists everything that is wrong with `src`.
        CheckpointError: a tensor holds a NaN or an infinite number.
        CheckpointError: `dst` holds something else, or the disk is full.
    """
    dst = model_folder.place_of(dst)
    model_folder.check_replaceable(dst)
    if hub.is_id(src):
        name, src = str(src), hub.fetch(str(src))
    src = files.expanded(src)
    released = _look_through(src, understanding_only)
    settings, wanted = _match(released, dtype)
    laid_out = {home: [] for home in ("params", "vq", "unused")}
    for one in wanted:
        stored = released.stored[one.official]
        laid_out[one.home].append(_laid_out(one, stored, dtype, check_finite))
    converted = [tensor for found in laid_out.values() for tensor in found]
    total, done = sum(tensor.nbytes for tensor in converted), 0
    dtypes = sorted({str(tensors.DTYPES[tensor.dtype]) for tensor in converted})
    num_parameters = sum(tensor.size for tensor in converted)

    def counted(tensor: tensors.Tensor) -> tensors.Tensor:
        def read() -> np.ndarray:
            nonlocal done
            array, done = tensor.read(), done + tensor.nbytes
            if on_progress is not None:
                on_progress(done, total)
            return array

        return dataclasses.replace(tensor, read=read)

    with model_folder.new_model_folder(dst, settings, total) as new:
        registers = _first_registers(released, settings.model, laid_out["params"])
        laid_out = {home: [*map(counted, found)] for home, found in laid_out.items()}
        stores.write_params(new, laid_out["params"] + registers, kind)
        if image := {tensor.name: tensor.read() for tensor in laid_out["vq"]}:
            try:
                vq_files.save_arrays(new / "vq", image, settings.vq)
            except safetensors.SafetensorError as error:
                raise OSError(str(error)) from error
        if laid_out["unused"]:
            tensors.write(new / UNUSED, laid_out["unused"])
        _copy_small_files(released, new)
        files.write_text(
            new / "README.md",
            f"# Converted from {name or src.resolve().name}\n\n{len(converted):,} tensors,"
            f" {num_parameters:,} parameters, {', '.join(dtypes)}.\n{_README}",
        )
    return Converted(len(converted), num_parameters, tuple(dtypes))


def convert_from_hub(
    name: pathlib.Path | str, *, revision: str | None = None, local_files_only: bool = False
) -> None:
    """Converts a released model on the hub so that `model_folder.find_model` finds it by its id.

    Does nothing if it was converted before or needs no conversion.

    Raises:
        ConvertError: lists everything that is wrong with it.
        CheckpointError: there is no such model, the name is a local folder, or the disk is full.
    """
    how: Any = {"revision": revision, "local_files_only": local_files_only}
    try:
        model_folder.find_model(name, **how)
    except model_folder.ReleasedError:
        if not hub.is_id(name):
            raise
        fetched = hub.fetch(str(name), **how)
        convert(fetched, model_folder.converted_place(fetched), name=str(name))


def _laid_out(
    name: names.Name, stored: tensors.Tensor, dtype: str | None, check_finite: bool
) -> tensors.Tensor:
    """Returns a released tensor in our layout, read on demand; unused ones are not checked."""
    kind = tensors.DTYPES[stored.dtype] if dtype is None else jnp.dtype(dtype)

    def read() -> np.ndarray:
        array = stored.read()
        if check_finite and name.home != "unused":
            named_arrays.refuse_nonfinite(f"{name.official} in {stored.file}", array)
        ours = names.to_ours(name, array.astype(kind, copy=False))
        return np.ascontiguousarray(ours)  # so that the released one can be freed

    return tensors.Tensor(name.ours, tensors.dtype_name(kind), name.our_shape, read)


@runtime.interrupts_held()
def _first_registers(
    released: _Released, model: config.Model, params: list[tensors.Tensor]
) -> list[tensors.Tensor]:
    """Returns registers for those that the release lacks.

    Each equals the embedding of a masked token of its stream, in whose place it stands.
    """
    kinds = {tensor.name: tensor.dtype for tensor in params}
    file = released.folder / released.stored[WORDS].file
    registers = {"register_understanding": tensors.read(file, WORDS, model.text_mask_id)}
    if not model.understanding_only:
        place = "image_embedding/"
        leaves = {one.name: one.read() for one in params if one.name.startswith(place)}
        embed = named_arrays.module_of(
            jax.eval_shape(lambda: ImageEmbedding(model, rngs=nnx.Rngs(0))),
            {name.removeprefix(place): leaf for name, leaf in leaves.items()},
        )
        masked = jnp.full((1, 1, model.codes_per_token), model.image_mask_id)
        with jax.default_matmul_precision("highest"):
            cell = embed(masked, jnp.dtype("float32"))[0, 0]
        registers["register_generation"] = np.asarray(cell)
    kind = kinds["text_embedding"]
    return [
        tensors.Tensor(
            name, kind, register.shape, functools.partial(register.astype, tensors.DTYPES[kind])
        )
        for name, register in registers.items()
        if name not in kinds
    ]


# ---------------------------------------------------------------------------------------------
# Checks before writing.


def _look_through(folder: pathlib.Path, understanding_only: bool) -> _Released:
    """Reads the description of the tensors of a released folder, but no tensor.

    Raises:
        ConvertError: it is not a released folder, or holds no readable weights.
    """
    if not folder.is_dir():
        if folder.is_file() and folder.suffix in _PICKLED:
            raise ConvertError(f"{folder} cannot be converted: {_pickled([folder.name])}")
        raise ConvertError(f"there is no folder {folder}. Give the folder of the released model.")
    if not (folder / "config.json").is_file():
        raise ConvertError(
            f"{folder} has no config.json, so it is no released model. Give the folder that holds"
            " config.json, tokenizer.json and the safetensors files."
        )
    contents.names(folder)  # small files are copied: none of them may be a link to elsewhere
    given = _read_json(folder / "config.json")
    if given.get("format") == model_folder.FORMAT:
        raise ConvertError(f"{folder} is a model folder of this project already: use it as it is.")
    if not has_generation_branch(given) and not understanding_only:
        kind = str(given.get("model_type", "of an unknown type"))
        named = "that is LLaDA, which draws nothing" if "llada" in kind else f"that is {kind}"
        raise ConvertError(
            f"{folder} holds a model without a generation branch (dual_tower is not true in its"
            f" config.json): {named}. Give the folder of LaViDa-O."
        )
    vq_config = folder / "vqvae" / "config.json"
    released = _Released(folder, given, _read_json(vq_config) if vq_config.is_file() else None)
    _list_weights(released)
    with released.noting():
        if not (folder / "tokenizer.json").is_file():
            raise ConvertError("tokenizer.json is missing. Download it again.")
        try:
            ChatTokenizer(folder / "tokenizer.json")
        except ValueError as error:
            raise ConvertError(str(error)) from error
    if not released.stored:
        released.complain()
    return released


def _list_weights(released: _Released) -> None:
    """Records the file of every tensor, what is wrong with the files, and what is unreadable."""
    folder = released.folder
    placed = tensors.read_index(folder / INDEX) if (folder / INDEX).is_file() else {}
    if not placed and not (folder / SINGLE).is_file():
        released.problems.append(_no_weights(folder))
        return
    for file in sorted(set(placed.values())) or [SINGLE]:
        with released.noting([name for name, place in placed.items() if place == file]):
            released.add(_list_file(folder, file))
    _check_prefix(released)
    if any(name.startswith(names.VQ_PREFIX) for name in [*released.stored, *released.unread]):
        return
    # The main files do not contain the image tokenizer.
    alone = folder / "vqvae"
    paths = [path for path in _files(alone) if path.suffix == ".safetensors"]
    if not paths and has_generation_branch(released.config):
        released.problems.append(f"vqvae: {_pickled_in(alone) or _NO_TOKENIZER}")
        released.unread.append(names.VQ_PREFIX)
    for path in paths:
        with released.noting([names.VQ_PREFIX], "vqvae: "):
            found = tensors.list_tensors(path)
            released.add({names.VQ_PREFIX + name: one for name, one in found.items()})


def _check_prefix(released: _Released) -> None:
    """Refuses names that differ from those of a released model in their beginning alone."""
    usual, _, words = WORDS.partition(".")
    for name in released.stored if WORDS not in released.stored else ():
        if name.endswith(words):
            raise ConvertError(
                f"{released.folder} cannot be converted: the names of its tensors begin with"
                f" {name.removesuffix(words)!r} instead of '{usual}.', as when a wrapper of the"
                " model is saved: save the model inside it."
            )


def _list_file(folder: pathlib.Path, file: str) -> dict[str, tensors.Tensor]:
    """Returns the tensors of a file that the index names.

    Raises:
        ConvertError: the file is missing, damaged or pickled.
    """
    if file.endswith(_PICKLED):
        raise ConvertError(_pickled([file]))
    if not (folder / file).is_file():
        raise ConvertError(f"{INDEX} names {file}, which is not there. Download it again.")
    return tensors.list_tensors(contents.inside(folder, file))


def _no_weights(folder: pathlib.Path) -> str:
    if pickled := _pickled_in(folder):
        return pickled
    if shards := [path.name for path in _files(folder) if path.suffix == ".safetensors"]:
        return f"{INDEX} is missing, which says what is in {', '.join(shards[:3])}. Download it."
    return f"it holds neither {SINGLE} nor {INDEX}. Download its safetensors files."


def _pickled_in(folder: pathlib.Path) -> str:
    found = [path.name for path in _files(folder) if path.suffix in _PICKLED]
    return _pickled(found) if found else ""


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    found = (path for path in folder.glob("*") if path.is_file() and not is_leftover(path.name))
    return sorted(found)


def _pickled(found: list[str]) -> str:
    return (
        f"its weights are pickled ({', '.join(found[:3])}), and unpickling runs whatever a file"
        " says, so that is not done. Get the safetensors files, or load the model in PyTorch if"
        " you trust it and save it by save_pretrained(..., safe_serialization=True)."
    )


def _settings(released: _Released, dtype: str | None) -> config.Config:
    settings = settings_from(released.config, released.vq_config)
    words = released.stored.get(WORDS)
    if dtype is None and words is not None:
        dtype = {"BF16": "bfloat16"}.get(words.dtype)
    model = dataclasses.replace(settings.model, compute_dtype=dtype or "float32")
    return dataclasses.replace(settings, model=model)


def _match(released: _Released, dtype: str | None) -> tuple[config.Config, list[names.Name]]:
    """Returns the settings of a released folder, and the tensors to convert.

    Raises:
        ConvertError: lists what is wrong with the files and with config.json, and the tensors that
            are missing, unknown, or have a wrong shape or dtype.
    """
    try:
        settings = _settings(released, dtype)
        table = names.table(settings)
    except ConvertError as error:
        released.complain([str(error)])
        raise
    stored, known = released.stored, {name.official: name for name in table}
    problems = [
        f"{name.official} is missing; it should be {list(name.shape)}."
        for name in table
        if name.official not in stored
        and not name.optional
        and not name.official.startswith(tuple(released.unread))
    ]
    for name, tensor in stored.items():
        if name not in known:
            problems.append(f"{name} {list(tensor.shape)} in {tensor.file} is unknown.")
            continue
        if tensor.shape != known[name].shape:
            problems.append(
                f"{name} in {tensor.file} is {list(tensor.shape)}; by config.json it should be"
                f" {list(known[name].shape)}."
            )
        if tensor.dtype not in tensors.DTYPES:
            problems.append(
                f"{name} in {tensor.file} is {tensor.dtype}; only {', '.join(tensors.DTYPES)} are"
                " supported."
            )
    released.complain(problems)
    return settings, [known[name] for name in stored]


def _by_layer(problems: list[str]) -> list[str]:
    """Returns the problems; those that differ only in the layer number are merged into one."""
    joined, kinds = [], dict[str, list[str]]()
    for problem in dict.fromkeys(problems):
        kinds.setdefault(_LAYER_NUMBER.sub("*", problem), []).append(problem)

    for kind, same in kinds.items():
        numbers = ", ".join("".join(_LAYER_NUMBER.findall(problem)[:1]) for problem in same)
        joined.append(same[0] if len(same) == 1 else f"{kind} (* is {numbers}.)")
    return joined


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        given = files.read_json(path, model_folder.MOST_SETTINGS)
    except (OSError, ValueError) as error:
        raise ConvertError(f"{path} cannot be read: {error}.{remedy(error)}") from error
    if not isinstance(given, dict):
        raise ConvertError(f"{path} is damaged: it holds no settings. Download it again.")
    return given


# ---------------------------------------------------------------------------------------------
# Files other than the parameters.


def _copy_small_files(released: _Released, new: pathlib.Path) -> None:
    """Copies the tokenizer, and to `official/` the files that an export returns unchanged."""
    official = new / OFFICIAL
    (official / "vqvae").mkdir(parents=True)
    files.copy(released.folder / "tokenizer.json", new / "tokenizer.json")
    small = [
        path
        for path in _files(released.folder)
        if (path.suffix in _SMALL or path.name.startswith(_LICENCES))
        and path.name.isprintable()  # as a list of files can name it
    ]
    for path in [*small, released.folder / "vqvae" / "config.json"]:
        if path.name == "tokenizer.json" or not path.is_file():
            continue
        if path.stat().st_size <= _SMALL_BYTES:
            files.copy(path, official / path.relative_to(released.folder))
    # The file of each tensor; a folder with a single file has no index of its own.
    if not (official / INDEX).is_file():
        placed = {name: tensor.file for name, tensor in released.stored.items()}
        files.write_json(official / INDEX, {"weight_map": placed}, indent=2)


_README = f"""
The parameters are those of the released PyTorch model, laid out for `sparse_lavida_jax`; nothing
was trained. Its licence, in `{OFFICIAL}/` where it came with the weights, applies to this folder
too: LaViDa-O is released for non-commercial research.

The model was trained with full attention (`trained_attention` in `config.json`): sampled sparsely
it draws poorly until it is fine-tuned.
"""
