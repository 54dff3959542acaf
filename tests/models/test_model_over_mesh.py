# SPDX-License-Identifier: Apache-2.0
"""One model over eight devices gives what it gives on one, also fused and in 8 bits."""

import re

import jax
import numpy as np
import pytest
import tiny

from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.cli import commands, parser
from sparse_lavida_jax.kernels.attention import mesh_in_use
from sparse_lavida_jax.models import fuse, parameters, quantize, sharding
from sparse_lavida_jax.models.layers import linears
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.schema import InputError

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
SETTINGS = tiny.model_settings()
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def folder(every_task):
    return every_task


def largest_share(model) -> float:
    """Of a matrix of the layers, the largest part that one device holds."""
    found = parameters.by_name(model)
    kernels = [leaf for name, leaf in found.items() if re.search(r"_layers/.*kernel(_t)?$", name)]
    assert kernels
    return max(leaf.addressable_shards[0].data.size / leaf.size for leaf in kernels)


@pytest.mark.parametrize(
    ("by_layer", "method"), [(True, ""), (False, ""), (True, "int8"), (True, "w8a8")]
)
def test_fused_parameters_over_a_mesh_give_the_same_logits(by_layer, method):
    mesh, whole = sharding.automatic(SIZES), tiny.denoiser(SETTINGS)
    if method:
        whole = quantize.quantized(whole, method)
    asked = tiny.batch(["image", "image"], SETTINGS)
    fused = fuse.for_inference(
        sharding.placed(whole, mesh), task="image", by_layer=by_layer, mesh=mesh
    )
    assert largest_share(fused) == 1 / 4

    @tiny.quick_jit
    def logits(model):
        hidden, _ = model(asked.understanding, asked.generation, wanted="generation")
        return model.image_logits(hidden["generation"])

    with mesh_in_use(fused):
        ours = logits(fused)
        text = logits.lower(fused).compile().as_text()
    # Taking queries, keys and values apart moves nothing between devices.
    assert not re.search(r' (all-to-all|collective-permute)\(.*op_name="[^"]*/split"', text)
    expected = logits(whole)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(ours, expected, rtol=0, atol=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["", "int8"])
def test_images_over_a_mesh_are_those_of_one_device(folder, method):
    how = {"steps": 2, "seed": 3, "layout": False, "quantize": method or None}
    alone = SparseLaViDa.from_pretrained(folder)
    spread = SparseLaViDa.from_pretrained(folder, mesh=SIZES, task="image")
    assert alone.mesh is None and spread.mesh is not None
    for prompt in ("a red circle", ["a red circle", "two squares"]):
        ours, expected = (one.generate(prompt, **how) for one in (spread, alone))
        np.testing.assert_array_equal(ours.tokens, expected.tokens)
        np.testing.assert_array_equal(ours.pixels, expected.pixels)
    assert largest_share(quantize.as_asked(spread.model, method)) == 1 / 4
    again = spread.replay(ours.records[1])
    np.testing.assert_array_equal(again.pixels[0], ours.pixels[1])


def test_a_folder_in_8_bits_is_split_too(folder, tmp_path):
    model_folder.copy(folder, tmp_path / "int8", dtype="int8")
    spread = SparseLaViDa.from_pretrained(tmp_path / "int8", mesh=SIZES, task="image")
    kernels = [one.kernel[...] for one in linears(spread.model).values()]
    assert any(kernel.dtype == np.int8 for kernel in kernels)
    assert largest_share(spread.model) == 1 / 4


def test_a_command_names_the_mesh(monkeypatch):
    given = []

    def from_pretrained(name, *, mesh, **_):
        given.append(mesh)
        return object.__new__(SparseLaViDa)

    def mesh(*words):
        commands.load(parser.Parser("generate").parse_args(["a", *words]))
        return given.pop()

    monkeypatch.setattr(SparseLaViDa, "from_pretrained", from_pretrained)

    assert not mesh()
    assert dict(mesh("--mesh=fsdp=2,tensor=-1").shape) == {"fsdp": 2, "tensor": 4}
    for words, told in (
        ("rows=2", "mesh has no axis 'rows': its axes are among"),
        ("tensor=3", "mesh=tensor=3 does not fit the 8 devices"),
        ("tensor", "'tensor' is not a mesh such as tensor=4 or fsdp=2,tensor=4"),
    ):
        with pytest.raises(InputError, match=told):
            mesh(f"--mesh={words}")
    assert {"mesh"} < vars(parser.Parser("serve").parse_args([])).keys()


def test_arrays_that_are_not_split_are_left_alone():
    """A width that the devices do not divide, and a model on one device."""
    arrays = [jax.numpy.arange(6.0).reshape(2, 3) + i for i in range(3)]
    joined = fuse._joined(arrays, devices=2)
    np.testing.assert_array_equal(joined, np.concatenate(arrays, axis=-1))
    for array, part in zip(arrays, fuse._parted(joined[None], 3, 2), strict=True):
        np.testing.assert_array_equal(part[0], array)
