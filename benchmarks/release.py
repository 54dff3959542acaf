# SPDX-License-Identifier: Apache-2.0
"""A model of the release's size, and how it is loaded: for benchmarks of its folders."""

import dataclasses
import multiprocessing
import pathlib

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.convert import stand_in
from sparse_lavida_jax.convert.settings import settings_from
from sparse_lavida_jax.models import fuse
from sparse_lavida_jax.models.denoiser import Denoiser

SPAWN = multiprocessing.get_context("spawn")
ALL_LAYERS = 32
MOST_BYTES = 4 * 2**30  # of memory for work that takes one tensor at a time
# The widths of the release (spec Sec. 10.5).
RELEASE = {
    "d_model": 4096,
    "d_model_gen": 2048,
    "downsample": True,
    "dual_tower": True,
    "embedding_size": 127378,
    "eos_token_id": 126081,
    "gen_mlp_type": "dit2",
    "mask_token_id": 126336,
    "mlp_hidden_size": 12288,
    "mlp_hidden_size_gen": 8192,
    "n_heads": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}


def settings(layers: int, *, tiny: bool = False) -> config.Config:
    """Returns the release's settings with few layers, half of them with a generation branch."""
    if not tiny:
        given = RELEASE | {"n_layers": layers, "dual_tower_layers": layers // 2}
        return settings_from(given)
    narrow = stand_in.tiny_settings()
    model = dataclasses.replace(narrow.model, num_layers=layers, dual_tower_layers=layers // 2)
    return dataclasses.replace(narrow, model=model)


def load_for(folder: pathlib.Path, task: fuse.Task) -> Denoiser:
    """Returns the parameters as `from_pretrained` does, in bfloat16 and with all checks."""
    model = model_folder.load_model(folder, dtype="bfloat16", wanted=fuse.reads(task)).model
    return model if task == "both" else fuse.for_inference(model, task=task, consume=True)
