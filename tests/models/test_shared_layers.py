# SPDX-License-Identifier: Apache-2.0
"""Layers with arrays of their own are traced, lowered and compiled once for all of one form."""

import jax
import jax.numpy as jnp
import kernel_programs
import numpy as np
import pytest
import tiny

from sparse_lavida_jax.kernels import attention
from sparse_lavida_jax.models import fuse, stack
from sparse_lavida_jax.tags import NO_FEATURE, Stream, TokenTags

# Of a kernel: the platform, a device, and how its module appears in a lowered program.
KERNELS = {
    "pallas_tpu": ("tpu", "TPU v5", "tpu_custom_call"),
    "pallas_triton": ("cuda", "NVIDIA A100", "__gpu$xla.gpu.triton"),
    "pallas_gpu": ("cuda", "NVIDIA H200", "mosaic_gpu"),
}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("name", KERNELS)
def test_a_step_holds_two_modules_of_its_kernel_whatever_the_number_of_layers(name):
    """One for joint layers, one for split ones. No accelerator is needed."""
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    platform, kind, module = KERNELS[name]
    if name == "pallas_gpu" and not attention._has_mosaic_gpu():
        pytest.skip("this kernel needs jax 0.11: run on Python 3.12")
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    sizes = []
    for layers in (4, 8):
        with jax.sharding.use_abstract_mesh(mesh):
            text = kernel_programs.step(name, layers, platform).as_text()
        assert text.count(f"stablehlo.custom_call @{module}") == 2
        sizes.append(len(text))
    assert sizes[1] < 1.2 * sizes[0]  # the parameters of a layer and its call, and not the layer


def test_shared_layers_compute_the_same(monkeypatch):
    """The same bits as layers that are traced one by one, also in their gradients, with remat."""
    settings = tiny.model_settings(num_layers=6, dual_tower_layers=3, remat="layer")
    model = fuse.for_inference(tiny.denoiser(settings), by_layer=True)
    order = jnp.broadcast_to(jnp.arange(9), (2, 9))
    tags = TokenTags(order, order // 4, order // 4)
    words = Stream(order, jnp.full((2, 9), NO_FEATURE), tags)
    codes = jnp.broadcast_to(order[..., None], (2, 9, settings.codes_per_token))
    asked = words, Stream(codes, order, tags)

    def loss(model, *streams):
        hidden, _ = model(*streams, wanted="both")
        return sum(jnp.square(x).sum() for x in hidden.values())

    def run(model):
        made = tiny.quick_jit(jax.value_and_grad(loss))(model, *asked)
        return [np.asarray(x) for x in jax.tree.leaves(made)]

    found = run(model)
    monkeypatch.setattr(stack.jax, "jit", lambda body, **_: body)
    for ours, expected in zip(found, run(model), strict=True):
        np.testing.assert_array_equal(ours, expected)
