# SPDX-License-Identifier: Apache-2.0
r"""The dense baseline of the bundled model: trained and sampled with full attention.

    python -m sparse_lavida_jax.main --config=configs/scenes_dense.py

Size, data, steps and seed of `configs/scenes_long.py`; no blocks, registers or cache: LaViDa-O's
own way, at this scale.
"""

import importlib.util
import pathlib

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = _beside("scenes_long").get_config()
    c.name = "scenes_dense"
    c.diffusion.attention = "full"
    c.model.trained_attention = "full"
    return c


def _beside(name: str):
    """Runs a config file of this folder; configs are no package."""
    path = pathlib.Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
