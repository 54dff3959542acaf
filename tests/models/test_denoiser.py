# SPDX-License-Identifier: Apache-2.0
"""The two streams against one sequence with a modality mask, in float64 and in loops."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx

from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.stack import run_layers
from sparse_lavida_jax.tags import NO_CELL, NO_EMBEDDING, NO_FEATURE, Stream, make_tags
from sparse_lavida_jax.visibility import PAD_BLOCK

TOLERANCE = 2e-5
NUM_CLEAN = 2
TEXT_BLOCK = np.array([0, 1, 0, 3, 4, 2, 3, PAD_BLOCK])
IMAGE_BLOCK = np.array([0, 3, 1, 4, 4, 2, PAD_BLOCK, 3, 0])


def streams(settings):
    """Both streams with prompt, clean and masked tokens, registers and padding, shuffled."""
    rng = np.random.default_rng(5)
    ids = rng.integers(tiny.FIRST_WORD, settings.vocab_size, (1, len(TEXT_BLOCK)))
    ids[0, 3], ids[0, 4] = settings.text_register_id, settings.text_mask_id
    codes = rng.integers(0, settings.codebook_size, (1, len(IMAGE_BLOCK), settings.codes_per_token))
    codes[0, 1], codes[0, 3] = settings.image_mask_id, settings.image_register_id
    cells = rng.permutation(len(IMAGE_BLOCK))[None]
    cells[codes[..., 0] == settings.image_register_id] = NO_CELL
    place = rng.permutation(40)
    text = Stream(
        jnp.asarray(ids),
        jnp.full(ids.shape, NO_FEATURE),
        make_tags(place[None, : len(TEXT_BLOCK)], TEXT_BLOCK[None], NUM_CLEAN),
    )
    image = Stream(
        jnp.asarray(codes),
        jnp.asarray(cells),
        make_tags(place[None, -len(IMAGE_BLOCK) :], IMAGE_BLOCK[None], NUM_CLEAN),
    )
    return jax.tree.map(jnp.asarray, (text, image))


embed_text = tiny.quick_jit(Denoiser.embed_text)
embed_image = tiny.quick_jit(Denoiser.embed_image)


@tiny.quick_jit
def logits_of(model, text, image):
    hidden, _ = model(text, image, wanted="both")
    return (
        model.text_logits(hidden["understanding"]),
        model.image_logits(hidden["generation"]),
    )


def as_one_sequence(settings, text, image):
    """Returns the arguments of `oracles.plain_forward`, and which tokens are not padding."""
    n, g = len(TEXT_BLOCK), settings.codes_per_token
    ids, codes = np.asarray(text.tokens[0]), np.asarray(image.tokens[0])
    block = np.concatenate([TEXT_BLOCK, IMAGE_BLOCK])
    mask = oracles.algorithm_1(block, NUM_CLEAN) & (block != PAD_BLOCK)[None, :]
    arguments = (
        np.concatenate([np.where(ids == settings.text_register_id, -1, ids), [0] * len(codes)]),
        np.concatenate(
            [np.zeros((n, g), int), np.where(codes > settings.image_mask_id, -1, codes)]
        ),
        np.concatenate([np.full(n, -1), image.index[0]]),
        np.arange(len(block)) >= n,
        np.concatenate([text.tags.position[0], image.tags.position[0]]),
        mask,
    )
    return arguments, block != PAD_BLOCK


@pytest.mark.parametrize("codes_per_token", [1, 4])
def test_two_streams_are_one_sequence_with_a_modality_mask(codes_per_token):
    model = tiny.denoiser(
        tiny.model_settings(codes_per_token=codes_per_token, cell_positions=codes_per_token == 1)
    )
    text, image = streams(model.settings)
    ours = logits_of(model, text, image)
    arguments, held = as_one_sequence(model.settings, text, image)
    n = len(TEXT_BLOCK)
    plain_text, plain_image = oracles.plain_forward(model, *arguments)
    np.testing.assert_allclose(
        ours[0][0][held[:n]], plain_text[:n][held[:n]], rtol=0, atol=TOLERANCE
    )
    np.testing.assert_allclose(
        ours[1][0][held[n:]], plain_image[n:][held[n:]], rtol=0, atol=TOLERANCE
    )
    assert min(np.abs(x).max() for x in ours) > 0.1


def test_an_unwanted_stream_stops_without_changing_the_wanted_one():
    model = tiny.denoiser(tiny.model_settings())
    text, image = streams(model.settings)
    both = logits_of(model, text, image)
    forward = tiny.quick_jit(
        lambda model, text, image, wanted: model(text, image, wanted=wanted)[0],
        static_argnames="wanted",
    )
    for wanted, head, expected in (
        ("understanding", model.text_logits, both[0]),
        ("generation", model.image_logits, both[1]),
    ):
        hidden = forward(model, text, image, wanted=wanted)
        assert list(hidden) == [wanted]
        np.testing.assert_allclose(head(hidden[wanted]), expected, rtol=0, atol=TOLERANCE)


def test_written_out_layers_are_the_scanned_ones():
    model = tiny.denoiser(tiny.model_settings())
    unrolled = tiny.denoiser(tiny.model_settings(unroll_layers=True))
    ours, expected = (logits_of(m, *streams(m.settings)) for m in (unrolled, model))
    for x, y in zip(ours, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("sees", [False, True])
def test_a_blank_is_zeros_whatever_its_id(sees):
    model = tiny.denoiser(tiny.model_settings())
    text, _ = streams(model.settings)
    features = jnp.ones((1, 3, model.settings.width)) if sees else None
    index = text.index.at[0, 1].set(2)
    before = embed_text(model, text.replace(index=index), features)
    after = embed_text(model, text.replace(index=index.at[0, 5].set(NO_EMBEDDING)), features)
    assert np.abs(before[0, 5]).max() > 0.1
    np.testing.assert_array_equal(after, np.asarray(before.at[0, 5].set(0)))


@pytest.mark.parametrize("codes_per_token", [1, 4])
def test_embedding_and_predicting_some_cells_is_slicing_the_whole(codes_per_token):
    model = tiny.denoiser(tiny.model_settings(codes_per_token=codes_per_token))
    _, image = streams(model.settings)
    predict = tiny.quick_jit(Denoiser.image_logits)
    embedded = embed_image(model, image)
    logits = predict(model, embedded)
    assert logits.shape == (1, len(IMAGE_BLOCK), codes_per_token, model.settings.codebook_size)
    some = np.array([7, 1, 4])
    part = embed_image(model, jax.tree.map(lambda x: x[:, some], image))
    np.testing.assert_allclose(part, embedded[:, some], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(
        predict(model, embedded[:, some]), logits[:, some], rtol=0, atol=TOLERANCE
    )


def test_a_cell_is_embedded_by_its_codes_and_its_place():
    model = tiny.denoiser(tiny.model_settings(codes_per_token=4))
    _, image = streams(model.settings)
    before = embed_image(model, image)
    swapped = image.tokens.at[0, 0].set(image.tokens[0, 0, ::-1])
    assert not np.allclose(embed_image(model, image.replace(tokens=swapped))[0, 0], before[0, 0])
    moved = embed_image(model, image.replace(index=image.index.at[0, 0].add(1)))
    was = int(image.index[0, 0])
    row, column = (
        [divmod(cell, model.settings.grid_size)[i] for cell in (was, was + 1)] for i in (0, 1)
    )
    step = model.cell_row[row[1]] - model.cell_row[row[0]]
    step += model.cell_column[column[1]] - model.cell_column[column[0]]
    np.testing.assert_allclose(moved[0, 0] - before[0, 0], step, atol=1e-5)


def test_registers_are_their_parameter_wherever_they_stand():
    model = tiny.denoiser(tiny.model_settings())
    text, image = streams(model.settings)
    np.testing.assert_array_equal(embed_text(model, text)[0, 3], model.register_understanding[...])
    np.testing.assert_array_equal(embed_image(model, image)[0, 3], model.register_generation[...])


def test_vision_features_replace_the_tokens_that_point_at_them():
    model = tiny.denoiser(tiny.model_settings())
    text, _ = streams(model.settings)
    features = jax.random.normal(jax.random.key(0), (1, 3, model.settings.width))
    pointing = text.replace(index=text.index.at[0, 2].set(1).at[0, 5].set(0))
    seen, unseen = embed_text(model, pointing, features), embed_text(model, text, features)
    np.testing.assert_array_equal(seen[0, 2], features[0, 1])
    np.testing.assert_array_equal(seen[0, 5], features[0, 0])
    others = np.array([0, 1, 3, 4, 6, 7])
    np.testing.assert_array_equal(seen[:, others], unseen[:, others])
    np.testing.assert_array_equal(unseen, embed_text(model, text))


def test_registers_start_as_the_masks_they_stand_in_for():
    settings = tiny.model_settings(
        codes_per_token=4, cell_positions=False, num_layers=1, dual_tower_layers=0
    )
    model = tiny.quick_jit(lambda: Denoiser(settings, rngs=nnx.Rngs(0)))()
    text, image = streams(settings)
    registers = embed_text(model, text)[0, 3], embed_image(model, image)[0, 3]
    masks = embed_text(model, text)[0, 4], embed_image(model, image)[0, 1]
    for register, mask in zip(registers, masks, strict=True):
        np.testing.assert_allclose(register, mask, rtol=0, atol=1e-6)


def test_the_order_of_tokens_means_nothing():
    model = tiny.denoiser(tiny.model_settings())
    text, image = streams(model.settings)
    shuffle = np.random.default_rng(0).permutation(len(IMAGE_BLOCK))
    _, expected = logits_of(model, text, image)
    _, shuffled = logits_of(model, text, jax.tree.map(lambda x: x[:, shuffle], image))
    np.testing.assert_allclose(shuffled, expected[:, shuffle], rtol=0, atol=TOLERANCE)


def test_logits_are_float32_whatever_the_activations_are():
    settings = tiny.model_settings(compute_dtype="bfloat16")
    text, image = streams(settings)
    model = jax.eval_shape(lambda: Denoiser(settings, rngs=nnx.Rngs(0)))
    embedded = jax.eval_shape(lambda m: (m.embed_text(text), m.embed_image(image)), model)
    assert {x.dtype.name for x in embedded} == {"bfloat16"}
    logits = jax.eval_shape(logits_of.__wrapped__, model, text, image)
    assert {x.dtype.name for x in logits} == {"float32"}
    cache = model.empty_cache(1, 2, 3, "generation")
    assert cache.joint[0].dtype == jnp.bfloat16


def test_the_model_accepts_no_mask():
    for function in (Denoiser.__call__, run_layers):
        assert not [name for name in inspect.signature(function).parameters if "mask" in name]


def test_features_of_the_vision_tower_say_where_however_large_they_are():
    """Features of equal patches differ only by their positions, if there are positions."""
    settings = tiny.model_settings(cell_positions=True)
    model = tiny.denoiser(settings)
    model.vision.tower.position_embedding[...] *= 0
    side = settings.vision.grid_side
    pixels = jnp.full(
        (1, settings.vision.image_size, settings.vision.image_size, 3), 200, jnp.uint8
    )
    features = model.see(pixels)[0].reshape(side, side, -1)
    rows, columns = model.seen_row[...], model.seen_column[...]
    np.testing.assert_allclose(
        features[1, 0] - features[0, 0], rows[1] - rows[0], rtol=0, atol=1e-5
    )
    np.testing.assert_allclose(
        features[0, 1] - features[0, 0], columns[1] - columns[0], rtol=0, atol=1e-5
    )
    model.vision.projector.fc2.kernel[...] *= 1000
    model.vision.projector.fc2.bias[...] *= 1000
    np.testing.assert_allclose(model.see(pixels)[0].reshape(features.shape), features, atol=1e-4)
