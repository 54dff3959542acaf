# SPDX-License-Identifier: Apache-2.0
"""Fused parameters give the same results as the original ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces

from sparse_lavida_jax.models import fuse

SETTINGS = tiny.model_settings()
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def model():
    return tiny.denoiser(SETTINGS)


def request_and_plan(modality, settings):
    asked = [tiny.request(modality, SETTINGS, 0, words=3)]
    return asked, traces.plan(asked, settings, num_steps=2, block_len=tiny.TEXT_LEN)


def sampled(model, modality):
    settings = traces.settings_of("sparse", modality, SETTINGS, guidance=2.0)
    asked, plan = request_and_plan(modality, settings)
    return traces.finished(model, asked, plan, settings, stop_early=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modality", "by_layer"), [("image", True), ("image", False), ("text", True)]
)
def test_a_response_is_that_of_the_unfused_model(model, modality, by_layer):
    """The fused model lacks the parameters that the task never reads."""
    fused = fuse.for_inference(model, task=modality, by_layer=by_layer)
    np.testing.assert_array_equal(sampled(fused, modality), sampled(model, modality))
    fewer = sum(x.size for x in jax.tree.leaves(fused))
    assert fewer < 0.95 * sum(x.size for x in jax.tree.leaves(model))


def test_hidden_states_and_logits_are_those_of_the_unfused_model(model):
    asked = tiny.batch(["image", "text"], SETTINGS)
    pixels = np.zeros((2, SETTINGS.vision.image_size, SETTINGS.vision.image_size, 3), np.uint8)

    @tiny.quick_jit
    def logits(model):
        hidden, _ = model(asked.understanding, asked.generation, model.see(pixels), wanted="both")
        text = model.text_logits(hidden["understanding"])
        return text, model.image_logits(hidden["generation"])

    for ours, expected in zip(
        logits(fuse.for_inference(model, by_layer=True)), logits(model), strict=True
    ):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)


def test_what_was_left_out_is_reported(model):
    image, text = (fuse.for_inference(model, task=task) for task in ("image", "text"))
    assert not hasattr(image, "text_head") and not hasattr(text, "image_head")
    hidden = jnp.zeros((1, 1, SETTINGS.width))
    with pytest.raises(ValueError, match="made for the task 'image' and cannot predict text"):
        image.text_logits(hidden)
    asked = tiny.batch(["image"], SETTINGS)
    embedded = fuse.for_inference(model, by_layer=True)
    embedded.joint_layers = text.joint_layers
    with pytest.raises(ValueError, match="no generation branch: call for_inference"):
        embedded(asked.understanding, asked.generation, wanted="both")
    with pytest.raises(ValueError, match="fused already, for the task 'image'"):
        fuse.for_inference(image)
