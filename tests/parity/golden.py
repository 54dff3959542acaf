# SPDX-License-Identifier: Apache-2.0
"""The recorded cases of the released model, read through the converter.

Every number of a case comes from its `config.json`; other cases of the same kinds, of other
sizes, pass the same tests. Cases lie in $GOLDEN_DIR, by default in `shared/golden` next to the
checkout.
"""

import functools
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import chat_tokenizer
import jax
import numpy as np
import safetensors.numpy
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder, named_arrays
from sparse_lavida_jax.convert import from_torch, names, settings
from sparse_lavida_jax.models import vq as image_tokenizer
from sparse_lavida_jax.models import vq_files
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.vision import Tower

CHECKOUT = pathlib.Path(__file__).parents[2]


def folder() -> pathlib.Path:
    """The folder of the cases, whether or not it exists."""
    return pathlib.Path(os.environ.get("GOLDEN_DIR", CHECKOUT.parent / "shared" / "golden"))


def why_absent(name: str = "") -> str:
    """Why a case cannot be read; empty if it can."""
    if not (folder() / name).is_dir():
        return f"no recorded case {name} in {folder()}: set GOLDEN_DIR to the folder that holds it"
    return ""


class Case:
    """One recorded case.

    Attributes:
        name: of its folder.
        config: the contents of its `config.json`.
    """

    def __init__(self, name: str):
        self.name = name
        self.folder = folder() / name
        self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())

    @functools.cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        return safetensors.numpy.load_file(self.folder / "inputs.safetensors")

    @functools.cached_property
    def outputs(self) -> dict[str, np.ndarray]:
        return safetensors.numpy.load_file(self.folder / "outputs.safetensors")

    @functools.cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The released tensors under their released names."""
        return safetensors.numpy.load_file(self.folder / "weights.safetensors")

    @functools.cached_property
    def settings(self) -> config.Config:
        """Our settings; if a case has only a tokenizer, just those of the tokenizer."""
        if "d_model" in self.config:
            return settings.settings_from(self.config)
        return config.Config(vq=settings.vq_settings(self.config["vq_config"]))

    @functools.cached_property
    def converted(self) -> pathlib.Path:
        """The case as a model folder, from the public converter."""
        scratch = pathlib.Path(_scratch().name) / self.name
        from_torch.convert(
            self.as_released(scratch / "released"), scratch / "model", understanding_only=True
        )
        return scratch / "model"

    def as_released(self, target: pathlib.Path) -> pathlib.Path:
        """Arranges the case in `target` like a released folder."""
        target.mkdir(parents=True)
        shutil.copyfile(self.folder / "config.json", target / "config.json")
        shutil.copyfile(self.folder / "weights.safetensors", target / "model.safetensors")
        chat_tokenizer.made_tokenizer(target)  # not the released one: cases have ids, not words
        return target

    @functools.cached_property
    def _model(self) -> Denoiser:
        return model_folder.load_model(self.converted, dtype="float32").model

    def model(self) -> Denoiser:
        """The denoiser in float32."""
        return self._model

    @functools.cached_property
    def _vq(self) -> image_tokenizer.VQModel:
        if "d_model" in self.config:
            return vq_files.load(self.converted / "vq")[0]
        made = self.settings.vq
        prefix = self.config["vq_config"]["weights_prefix"]
        found = self._ours(names.vq_names(made), names.VQ_PREFIX, prefix)
        return named_arrays.module_of(image_tokenizer.shapes(made), found)

    def vq(self) -> image_tokenizer.VQModel:
        """The image tokenizer in float32."""
        return self._vq

    def tower(self) -> Tower:
        """The vision tower in float32, from a case with nothing else."""
        made = settings.vision_settings(self.config)
        prefix = self.config["siglip_config"]["weights_prefix"]
        table = names.table(config.Config(model=config.Model(vision=made)))
        tower = [name for name in table if name.official.startswith(names.TOWER_PREFIX)]
        leaves = self._ours(tower, names.TOWER_PREFIX, prefix)
        found = {ours.removeprefix("vision/tower/"): leaf for ours, leaf in leaves.items()}
        side = made.image_size // made.patch_size
        return named_arrays.module_of(
            jax.eval_shape(lambda: Tower(made, side, rngs=nnx.Rngs(0))), found
        )

    def _ours(self, wanted: list[names.Name], known: str, given: str) -> dict[str, np.ndarray]:
        """Returns recorded weights by our names; theirs start with `given`, not `known`."""
        return {
            name.ours: names.to_ours(name, self.weights[given + name.official.removeprefix(known)])
            for name in wanted
        }


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="golden-")


def cases_with_a_model() -> list[str]:
    """Names of all cases with a whole model; none if the folder is absent."""
    configs = sorted(folder().glob("*/config.json"))
    return [path.parent.name for path in configs if "d_model" in json.loads(path.read_text())]


@functools.cache
def case(name: str) -> Case:
    """Reads a case; the result is cached."""
    return Case(name)
