# SPDX-License-Identifier: Apache-2.0
"""Model folders of a few layers are loaded, and what all layers take follows from them."""

import jax
import pytest

from sparse_lavida_jax.bench import loading
from sparse_lavida_jax.models import denoiser


def test_all_layers_follow_from_two_numbers_of_layers(tmp_path):
    found = {way: [] for way in loading.WAYS}
    for layers in loading.LAYERS:
        scratch = tmp_path / str(layers)
        scratch.mkdir()
        loading.make_folders(scratch, loading.settings(layers, tiny=True))
        for way, (name, task) in loading.WAYS.items():
            found[way].append(loading.load(scratch / name, task))
    every = {way: loading.scaled(measured) for way, measured in found.items()}
    shapes = denoiser.shapes(loading.settings(loading.ALL_LAYERS, tiny=True).model)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert every["whole"]["parameters"] == 2 * numbers
    assert every["whole"]["disk"] == pytest.approx(2 * numbers, rel=0.2)  # with the headers
    assert every["image"]["disk"] == every["whole"]["disk"]
    assert every["image"]["parameters"] < every["whole"]["parameters"]
    assert every["int8"]["parameters"] < every["whole"]["parameters"]
    row = loading.row("int8", loading.ALL_LAYERS, every["int8"])
    assert row["scaled"] and "computed from 2 and 8 layers" in row["note"]


def test_the_release_has_its_widths():
    model = loading.settings(4, tiny=False).model
    assert (model.width, model.num_layers, model.dual_tower_layers) == (4096, 4, 2)
