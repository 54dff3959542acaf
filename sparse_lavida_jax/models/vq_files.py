# SPDX-License-Identifier: Apache-2.0
"""The folder of an image tokenizer: `config.json` and `params.safetensors`.

It may hold a decoder for previews too (`models.preview_decoder`).
"""

import hashlib
import os
import pathlib

import jax
import numpy as np
import safetensors.numpy

from sparse_lavida_jax import config, schema
from sparse_lavida_jax.data import files, tensor_files
from sparse_lavida_jax.models import parameters, vq
from sparse_lavida_jax.programs import jax_settings

BUNDLED = pathlib.Path(__file__).parents[1] / "assets" / "models"
FORMAT = "sparse-lavida-vq/1"
FILES = ("config.json", "params.safetensors")
PREVIEW = "preview.safetensors"  # need not be there
MOST_SETTINGS = 2**20  # bytes of config.json


class VQError(config.ConfigError):
    """A name or folder without a usable image tokenizer."""


def save(folder: pathlib.Path, model: vq.AnyVQ) -> None:
    """Writes `config.json` and `params.safetensors`; an interrupted write leaves the old files."""
    arrays = {name: np.asarray(value) for name, value in parameters.by_name(model).items()}
    save_arrays(folder, arrays, model.settings)


def save_arrays(folder: pathlib.Path, arrays: dict[str, np.ndarray], settings: config.VQ) -> None:
    """Writes the same files as `save`, from parameters named like `decoder/conv_in/kernel`."""
    with files.replacing(folder) as new:
        new.mkdir()
        safetensors.numpy.save_file(arrays, new / "params.safetensors")
        (new / "params.safetensors").chmod(0o644)  # the library makes the file private
        written = {"format": FORMAT, **config.to_dict(settings)}
        files.write_json(new / "config.json", written, indent=2)


def copy(folder: pathlib.Path, new: pathlib.Path) -> None:
    """Copies the files of an image tokenizer, and nothing else, to a new folder.

    Raises:
        OSError: one of them is missing or not a regular file, or the disk is full.
    """
    new.mkdir()
    for name in FILES:
        files.copy(folder / name, new / name)
    if (folder / PREVIEW).exists():
        files.copy(folder / PREVIEW, new / PREVIEW)


def digest(folder: pathlib.Path) -> str:
    """Returns the SHA-256 of the settings and the parameters, without the decoder for previews.

    Raises:
        OSError: one of the files is missing or not a regular file.
    """
    found = hashlib.sha256(files.read_bytes(folder / "config.json"))
    with files.open_regular(folder / "params.safetensors") as file:
        found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def find(folder_or_name: str | os.PathLike) -> pathlib.Path:
    """Returns the folder of an image tokenizer.

    Args:
        folder_or_name: that folder, a folder of a model or a run, or the name of a bundled model.

    Raises:
        VQError: there is none; the message lists the bundled models.
    """
    given = pathlib.Path(folder_or_name)
    places = (BUNDLED / given / "vq", given / "vq", given / "model" / "vq", given)
    if (given / "params.safetensors").is_file():
        return given
    for folder in places:
        if folder.is_dir():
            return folder
    bundled = sorted(path.parent.name for path in BUNDLED.glob("*/vq"))
    raise VQError(
        f"No image tokenizer at {str(folder_or_name)!r}. Give a folder with config.json and"
        f" params.safetensors, the folder of a model, or a bundled model: {', '.join(bundled)}."
    )


@jax_settings.defaults()
def load(folder_or_name: str | os.PathLike) -> tuple[vq.AnyVQ, config.VQ]:
    """Returns a saved image tokenizer; see `find` for where it may lie.

    Raises:
        VQError: it does not exist, or one of its files is missing, unreadable or inconsistent.
    """
    folder = find(folder_or_name)
    settings = read_settings(folder)
    path = folder / "params.safetensors"
    model = vq.shapes(settings)
    expected = parameters.by_name(model)
    try:
        stored = tensor_files.read_header(path)
        faults = parameters.differences(expected, stored)
        given = {} if faults else tensor_files.read_floats(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if faults:
        raise VQError(
            f"{path} does not fit {folder / 'config.json'}; take both files from the same save:\n"
            f"{faults}"
        )
    if wrong := [name for name, array in given.items() if not np.isfinite(array).all()]:
        raise VQError(f"{path} holds NaN or infinite numbers in {wrong[0]}. Get it again.")
    leaves = [jax.device_put(given[name], may_alias=False) for name in expected]
    return jax.tree.unflatten(jax.tree.structure(model), leaves), settings


def read_settings(folder: pathlib.Path) -> config.VQ:
    """Returns the settings of the image tokenizer in a folder.

    Raises:
        VQError: its `config.json` is missing, unreadable or for something else.
    """
    path = folder / "config.json"
    try:
        written = files.read_json(path, MOST_SETTINGS)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    given = written.pop("format", None) if isinstance(written, dict) else None
    if given != FORMAT:
        raise VQError(
            f"{path} has format {schema.shown(given)}; this version reads {FORMAT!r}. Give a folder"
            " that `--config=configs/scenes_vq_g1.py` or `models.vq_files.save` wrote."
        )
    return config.build(config.VQ, written)


def _unreadable(path: pathlib.Path, error: Exception) -> VQError:
    return VQError(f"{path} cannot be read ({error}).{files.remedy(error, 'Copy it again.')}")
