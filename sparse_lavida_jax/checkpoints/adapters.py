# SPDX-License-Identifier: Apache-2.0
"""What was trained next to a frozen base, as a folder of its own.

config.json       settings of the run that trained them
adapters.safetensors  what was trained: adapters, all layers in one array, and what else was
base.json         where the base lay, and the SHA-256 of its manifest
TENSORS.sha256, MANIFEST.sha256
"""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import arrays, manifest, model_folder
from sparse_lavida_jax.checkpoints.arrays import CheckpointError
from sparse_lavida_jax.data import files
from sparse_lavida_jax.models import lora, parameters

ADAPTERS = "adapters.safetensors"
BASE = "base.json"


def save(
    folder: pathlib.Path | str,
    trained: Any,
    settings: config.Config,
    *,
    base: pathlib.Path | str,
) -> None:
    """Writes what was trained next to a frozen base, replacing an older folder of the same kind.

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
    model = model_folder.find_model(base)
    known = {"model": str(model.resolve()), "manifest_sha256": manifest.digest(model)}
    size = sum(leaf.nbytes for leaf in leaves.values())
    with model_folder.new_model_folder(folder, settings, size) as new:
        safetensors.numpy.save_file(leaves, new / ADAPTERS)
        files.write_json(new / BASE, known, indent=2)


def load_model(folder: pathlib.Path | str, base: pathlib.Path | str) -> model_folder.LoadedModel:
    """Reads a base model with adapters: they are added to its matrices, which then lie on the host.

    What was trained whole replaces what the base has.

    Raises:
        CheckpointError: no adapters there, a damaged file, they were trained next to another base,
            do not fit it, or the base cannot be read.
    """
    folder, base = pathlib.Path(folder), model_folder.find_model(base)
    if not (folder / ADAPTERS).is_file():
        raise CheckpointError(f"there are no adapters in {folder}: it has no {ADAPTERS}.")
    manifest.verify(folder)
    try:
        known = files.read_json(folder / BASE)
        digest, where = known["manifest_sha256"], known["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / BASE} is missing or damaged: {error}") from error
    if digest != manifest.digest(base):
        raise CheckpointError(
            f"the adapters in {folder} were trained next to the model that lay in {where}, and"
            f" {base} is another one: its {manifest.MANIFEST} has another SHA-256 than"
            f" {digest[:12]}... ."
        )
    manifest.verify_tensors(folder)
    leaves = safetensors.numpy.load_file(folder / ADAPTERS)
    for name, leaf in leaves.items():
        arrays.refuse_nonfinite(f"{name} in {folder / ADAPTERS}", leaf)
    low_rank, loaded = model_folder.read_config(folder).lora, model_folder.load_model(base)
    try:
        model = loaded.model
        if low_rank.rank:
            model = lora.attach(model, low_rank, jax.random.key(0))
        model = lora.merged(parameters.replaced(model, leaves))
    except ValueError as error:
        raise CheckpointError(f"the adapters do not fit the model: {error}") from error
    return loaded._replace(model=model, config=dataclasses.replace(loaded.config, lora=low_rank))
