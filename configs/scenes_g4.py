# SPDX-License-Identifier: Apache-2.0
r"""`configs/scenes.py` with 2x2 token compression: four codes a cell, drawn layout-first.

    python -m sparse_lavida_jax.main --config=configs/scenes_g4.py

The four codes of a cell are drawn independently given the same state, so what stands in a cell has
to be decided before: the plan does that.
"""

import importlib.util
import pathlib

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = _beside("scenes").get_config()
    c.name = "scenes_g4"
    c.model.codes_per_token = 4
    c.model.codebook_size = 256
    c.data.picture_codec = "scenes_g4"
    return c


def _beside(name: str):
    """Runs a config file of this folder; configs are no package."""
    path = pathlib.Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
