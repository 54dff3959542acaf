# SPDX-License-Identifier: Apache-2.0
"""Gradients are exactly zero between rival masked blocks, and from cached to later tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces

from sparse_lavida_jax import config, diffusion
from sparse_lavida_jax.data.corrupted_rows import CorruptedRow
from sparse_lavida_jax.models.stack import run_layers
from sparse_lavida_jax.visibility import PAD_BLOCK

TOLERANCE = 2e-5
NUM_CLEAN = 2
NUM_MASKED = 3
DIFFUSION = config.Diffusion(
    blocks="uniform", num_clean_blocks=NUM_CLEAN, num_masked_blocks=NUM_MASKED
)
MODALITIES = ("image", "text")


def corrupted_rows(modality):
    """Two rows of different length with all clean and masked blocks, and a source image."""
    model = tiny.denoiser(tiny.model_settings())
    requests = [
        tiny.request(modality, model.settings, i, words=n, source=True)
        for i, n in enumerate((3, 6))
    ]
    rng = np.random.default_rng(3)
    blocks = []
    for asked in requests:
        while True:
            drawn = diffusion.uniform_blocks(rng, asked.given, DIFFUSION)
            if len(np.unique(drawn.block)) == NUM_CLEAN + NUM_MASKED:
                break
        blocks.append(drawn)
    return model, requests, blocks


def batch_of(model, requests, blocks, modality, shape=None):
    """Returns a training batch, its shape, and the start of each response."""
    prompts = [tiny.sample_input(asked, model.settings) for asked in requests]
    rows = [
        CorruptedRow(prompt, asked.response, modality, cut, model.settings)
        for prompt, asked, cut in zip(prompts, requests, blocks, strict=True)
    ]
    shape = shape or tiny.shape_of(rows)
    batch = tiny.stacked(rows, model.settings, shape)
    return batch, shape, [prompt.response_position for prompt in prompts]


@pytest.mark.parametrize("modality", MODALITIES)
def test_rival_masked_blocks_predict_what_each_predicts_alone(modality):
    model, requests, blocks = corrupted_rows(modality)
    batch, shape, starts = batch_of(model, requests, blocks, modality)
    length = len(requests[0].given)
    together = traces.spread_logits(model, batch, modality, starts, length)
    seen = np.zeros((len(requests), length), bool)
    for number in range(NUM_CLEAN + 1, NUM_CLEAN + NUM_MASKED + 1):
        alone = [keep_block(cut, number) for cut in blocks]
        batch, _, _ = batch_of(model, requests, alone, modality, shape)
        logits = traces.spread_logits(model, batch, modality, starts, length)
        held = np.stack([cut.masked for cut in alone])
        np.testing.assert_allclose(together[held], logits[held], rtol=0, atol=TOLERANCE)
        seen |= held
    np.testing.assert_array_equal(seen, np.stack([cut.masked for cut in blocks]))


def keep_block(cut: diffusion.Blocks, number: int) -> diffusion.Blocks:
    """Returns the same blocks without the rivals of one masked block."""
    masked = cut.block == number
    return cut._replace(
        block=np.where(cut.masked & ~masked, diffusion.ABSENT, cut.block),
        masked=masked,
        masked_blocks=(number,),
        weight=np.where(masked, cut.weight, 0.0),
    )


@pytest.mark.parametrize("modality", MODALITIES)
def test_gradients_flow_where_the_rule_lets_them_and_nowhere_else(modality):
    """D (logits of block i) / d (embedding of block j), for all i and j of a training pass."""
    model, requests, blocks = corrupted_rows(modality)
    batch, _, _ = batch_of(model, requests, blocks, modality)
    name = "understanding" if modality == "text" else "generation"
    numbers = jnp.arange(NUM_CLEAN + NUM_MASKED + 1)
    norms = block_gradients(model, jax.tree.map(jnp.asarray, batch), name, numbers)
    own = getattr(batch, name).tags.block
    for i in np.asarray(numbers):
        if not (own == i).any():
            continue  # no prompt token in the response's stream
        for stream, gradient in norms.items():
            block = getattr(batch, stream).tags.block
            flows = (block <= min(i, NUM_CLEAN)) | (block == i)
            flows &= (own == i).any(axis=1)[:, None]
            # The last layer is a split one; prompt embeddings of both streams interact before it.
            np.testing.assert_array_equal(np.asarray(gradient[i]) > 0, flows, err_msg=stream)
            assert not gradient[i][block == PAD_BLOCK].any()


@functools.partial(tiny.quick_jit, static_argnames=("name",))
def block_gradients(model, batch, name, numbers):
    """Returns, for each block number, the gradient norm of its logits at every embedding [b s]."""
    text, image = batch.understanding, batch.generation
    layouts = {"understanding": text.tags, "generation": image.tags}
    embeddings = {"understanding": model.embed_text(text), "generation": model.embed_image(image)}
    probe = jax.random.normal(jax.random.key(0), (1, 1, 1, 64))

    def logits(embeddings):
        x, _ = run_layers(
            model.settings,
            model.joint_layers,
            model.split_layers,
            embeddings,
            layouts,
            wanted="both",
        )
        hidden = model.final_norm(x[name], model.settings.width)
        if name == "understanding":
            return model.text_logits(hidden)[:, :, None]
        return model.image_logits(hidden)

    out, pull_back = jax.vjp(logits, embeddings)

    def of_block(number):
        chosen = (layouts[name].block == number)[..., None, None]
        cotangent = jnp.where(chosen, probe[..., : out.shape[-1]], 0.0)
        (gradient,) = pull_back(jnp.broadcast_to(cotangent, out.shape))
        return jax.tree.map(lambda g: jnp.abs(g).sum(axis=-1), gradient)

    return jax.lax.map(of_block, numbers)
