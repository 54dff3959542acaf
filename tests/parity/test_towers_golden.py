# SPDX-License-Identifier: Apache-2.0
"""The image tokenizer and the vision tower equal the recorded ones: cases G1, G1b, G2."""

import einops
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lavida_jax.models import vq

LAYERS = 1e-4  # (golden/README.md)
TOKENIZERS = ("G1_vq", "G1b_vq_attn")


def assert_close(got, wanted):
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=0, atol=LAYERS)


def channels_last(values):
    return jnp.asarray(np.moveaxis(values, 1, -1))


def channels_first(values):
    return np.moveaxis(np.asarray(values), -1, 1)


def grid_shape(images, model):
    """Returns rows, height and width of the codes of images [b c h w]."""
    rows, _, *sides = images.shape
    return rows, *(side // model.settings.factor for side in sides)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_images_become_the_recorded_codes(case, name):
    given = case(name)
    model, recorded = given.vq(), given.outputs
    pixels = channels_last(given.inputs["pixels"])
    assert_close(channels_first(model.encoder(pixels)), recorded["encoder_out"])
    latents = model.latents(pixels)
    assert_close(channels_first(latents), recorded["latents"])
    codes = np.asarray(model.nearest(latents))
    np.testing.assert_array_equal(codes.reshape(recorded["codes"].shape), recorded["codes"])
    assert_close(channels_first(model.codebook[codes]), recorded["quantized"])


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    ("codes", "decoded"), [("codes", "decoded"), ("random_codes", "decoded_random")]
)
def test_codes_become_the_recorded_images(case, name, codes, decoded):
    given = case(name)
    model, recorded = given.vq(), given.outputs
    ids = given.inputs[codes] if codes in given.inputs else recorded[codes]
    grid = ids.reshape(grid_shape(recorded[decoded], model))
    pixels = model.decode_latents(model.codebook[grid])
    assert_close(channels_first(pixels), recorded[decoded])
    if f"{decoded}_uint8" in recorded:
        shown = np.asarray(vq.to_uint8(jnp.clip(pixels, 0, 1))).astype(int)
        wanted = recorded[f"{decoded}_uint8"].astype(int)
        assert np.abs(shown.reshape(wanted.shape) - wanted).max() <= 1


@pytest.mark.parametrize("is_on_cpu", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_recorded_codes_decoded_in_bfloat16_are_hardly_other_images(
    case, name, is_on_cpu, monkeypatch
):
    given = case(name)
    model, codes = given.vq(), given.outputs["codes"]
    grid = codes.reshape(grid_shape(given.outputs["decoded"], model))
    if not is_on_cpu:

        def chosen(*args, cpu, default):
            return default(*args)

        monkeypatch.setattr(jax.lax, "platform_dependent", chosen)
    plain, moved = (
        np.asarray(
            jax.jit(lambda model: vq.to_uint8(model.decode(jnp.asarray(grid))))(
                vq.for_decoding(model, dtype)
            ),
            int,
        )
        for dtype in ("float32", "bfloat16")
    )
    difference = np.abs(moved - plain)
    print(f"{name}: largest {difference.max()}, mean {difference.mean():.3f} of 255")
    # Weights are arbitrary: measured 23 and 1.26, 22 and 1.10.
    assert difference.max() <= 32 and difference.mean() < 2


def test_the_vision_tower_ends_before_its_norm(case):
    given = case("G2_siglip")
    tower, recorded = given.tower(), given.outputs
    pixels = channels_last(given.inputs["pixels"])
    x = einops.rearrange(tower.patch_embedding(pixels), "b y x e -> b (y x) e")
    x = x + tower.position_embedding[None]
    assert_close(x, recorded["hidden_states.0"])
    depth = given.config["siglip_config"]["num_hidden_layers_used"]
    for i in range(depth):
        x = jax.tree.map(lambda leaf, i=i: leaf[i], tower.layers)(x)
        assert_close(x, recorded[f"hidden_states.{i + 1}"])
    assert_close(tower(pixels), recorded["features"])
