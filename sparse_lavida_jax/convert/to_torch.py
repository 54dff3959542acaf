# SPDX-License-Identifier: Apache-2.0
"""Exports a model folder to a folder that PyTorch users can load.

It has the released names, sharded safetensors with their index, config.json, and the small files
that came with the release. Tensors are read and written one at a time.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import contents, manifest, model_folder, stores, tensors
from sparse_lavida_jax.checkpoints.tensors import INDEX, SHARD_BYTES
from sparse_lavida_jax.convert import adapters as lora_folders
from sparse_lavida_jax.convert import names
from sparse_lavida_jax.convert.adapters import Merging
from sparse_lavida_jax.convert.from_torch import OFFICIAL, UNUSED, WORDS
from sparse_lavida_jax.convert.settings import (
    OURS,
    ConvertError,
    official_config,
    official_vq_config,
)
from sparse_lavida_jax.data import files
from sparse_lavida_jax.models import parameters, vq_files
from sparse_lavida_jax.models import vq as image_tokenizer

VQ_FOLDER = "vqvae"
VQ_FILE = "diffusion_pytorch_model.safetensors"


@dataclasses.dataclass(frozen=True)
class Exported:
    """The result of an export."""

    num_tensors: int
    num_parameters: int
    num_shards: int


@dataclasses.dataclass(frozen=True)
class _Model:
    """A model folder to export.

    Attributes:
        placed: the file of each released tensor; empty for a model that was not converted.
        merging: adds adapters to the parameters.
    """

    folder: pathlib.Path
    settings: config.Config
    vq: image_tokenizer.VQModel | None
    placed: dict[str, str]
    merging: Merging

    @property
    def has_registers(self) -> bool:
        """Whether registers are worth exporting: trained, or part of the source from the start."""
        was_trained = self.settings.model.trained_attention == "step_causal"
        return was_trained or not set(names.REGISTERS).isdisjoint(self.placed)


def export(
    src: pathlib.Path | str,
    dst: pathlib.Path | str,
    *,
    adapters: Mapping[str, float] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    take: Callable[[pathlib.Path], None] | None = None,
) -> Exported:
    """Writes the PyTorch folder `dst` from a model folder, run directory or bundled name `src`.

    The registers of sparse training are written if the model was trained with them or came with
    them; the released code ignores them.

    Args:
        adapters: names of adapters to add to the parameters, with their weights.
        max_shard_bytes: of one safetensors file; a larger tensor gets a file of its own.
        take: takes each of these files away once it is written, so that the disk needs to hold only
            one of them.

    Raises:
        CheckpointError: there is no model in `src`, or it is damaged, or the adapters do not fit
            it, or `dst` cannot be written.
        ConvertError: the model has no released form, or `dst` is not empty.
    """
    folder, dst = model_folder.find_model(src), model_folder.place_of(dst)
    if dst.exists() and (dst.is_file() or not contents.is_empty(dst)):
        raise ConvertError(f"{dst} exists, and an export replaces nothing. Choose another folder.")
    manifest.verify(folder)
    model = _look_through(folder, lora_folders.merging(folder, adapters or {}))
    denoiser, tokenizer = list(_of_denoiser(model)), list(_of_tokenizer(model))
    together = not model.placed or any(one.startswith(names.VQ_PREFIX) for one in model.placed)
    in_shards = denoiser + tokenizer if together else denoiser
    num_bytes = sum(tensor.nbytes for tensor in [*in_shards, *tokenizer])
    held = min(num_bytes, max_shard_bytes) if take else num_bytes
    model_folder.check_free_space(dst.parent, held)
    with model_folder.replacing(dst) as new:
        how: Any = {"always_indexed": True, "written": take}
        shards = tensors.write_sharded(new, in_shards, max_shard_bytes, **how)
        _write_small_files(new, model, in_shards)
        if tokenizer:
            alone = [
                dataclasses.replace(tensor, name=tensor.name.removeprefix(names.VQ_PREFIX))
                for tensor in tokenizer
            ]
            tensors.write(new / VQ_FOLDER / VQ_FILE, alone)
    exported = denoiser + tokenizer
    return Exported(len(exported), sum(tensor.size for tensor in exported), shards)


def _look_through(folder: pathlib.Path, merging: Merging) -> _Model:
    settings, vq = merging.settings, None
    if (folder / "vq").is_dir():
        vq, vq_settings = vq_files.load(folder / "vq")
        if not isinstance(vq, image_tokenizer.VQModel):
            raise ConvertError(
                f"{folder} has an image tokenizer of the kind {vq_settings.kind!r}; the released"
                " format holds 'convolutions' only."
            )
        settings = dataclasses.replace(settings, vq=vq_settings)
    elif not settings.model.understanding_only:
        raise ConvertError(f"{folder} has no image tokenizer, and a released model needs one.")
    index = folder / OFFICIAL / INDEX
    placed = tensors.read_index(index) if index.is_file() else {}
    return _Model(folder, settings, vq, placed, merging)


def _of_denoiser(model: _Model) -> Iterator[tensors.Tensor]:
    """Yields the tensors of the denoiser, and the released ones that it did not use."""
    table = {name.ours: name for name in names.table(model.settings) if name.home == "params"}
    if stored := stores.narrow_dtype(model.folder):
        raise ConvertError(
            f"the matrices in {model.folder} are in 8 bits ({stored}), which the release has no"
            " form for: export the model that it was made of, or give a --format."
        )
    store = stores.open_params(model.folder)
    store.check({ours: name.our_shape for ours, name in table.items()})

    def read(ours: str) -> np.ndarray:
        return model.merging.change(ours, store.read_one(ours))

    for ours, leaf in store.leaves.items():  # in this order they are read in batches
        if not table[ours].optional or model.has_registers:
            yield _official(table[ours], leaf.dtype, functools.partial(read, ours))
    if (model.folder / UNUSED).is_file():
        yield from tensors.list_tensors(model.folder / UNUSED).values()


def _of_tokenizer(model: _Model) -> Iterator[tensors.Tensor]:
    if model.vq is None:
        return
    found = parameters.by_name(model.vq)
    for name in names.vq_names(model.settings.vq):
        array = np.asarray(found[name.ours])
        yield _official(name, array.dtype, lambda array=array: array)


def _official(name: names.Name, dtype: np.dtype, read: Callable[[], np.ndarray]) -> tensors.Tensor:
    kind, made = tensors.dtype_name(dtype), lambda: names.to_official(name, read())
    return tensors.Tensor(name.official, kind, name.shape, made)


# ---------------------------------------------------------------------------------------------
# Files.


def _write_small_files(new: pathlib.Path, model: _Model, wanted: list[tensors.Tensor]) -> None:
    """Writes config.json, the tokenizer's files, and the small files of the release."""
    official = model.folder / OFFICIAL
    if official.is_dir():
        contents.copy(official, new, (one for one in contents.names(official) if one != INDEX))
    files.copy(model.folder / "tokenizer.json", new / "tokenizer.json")
    (new / VQ_FOLDER).mkdir(exist_ok=True)
    _write_config(new / "config.json", model, wanted)
    described = new / VQ_FOLDER / "config.json"
    if model.vq is None:
        (new / VQ_FOLDER).rmdir()
    elif not described.is_file():
        files.write_json(described, official_vq_config(model.settings.vq), indent=2)


def _write_config(path: pathlib.Path, model: _Model, wanted: list[tensors.Tensor]) -> None:
    """Writes config.json; the released one unchanged, unless the parameters changed."""
    kind = next(tensor.dtype for tensor in wanted if tensor.name == WORDS)
    dtype = str(tensors.DTYPES[kind])
    given: dict[str, Any] = files.read_json(path) if path.is_file() else {}
    wished = dict(given or official_config(model.settings, dtype))
    if given.get("torch_dtype", dtype) != dtype:
        wished["torch_dtype"] = dtype
    if model.has_registers:
        kept = ("num_registers", "trained_attention")
        wished[OURS] = {name: getattr(model.settings.model, name) for name in kept}
    if wished != given:
        files.write_json(path, wished, indent=2)
