# SPDX-License-Identifier: Apache-2.0
"""The forward pass equals the released code's, layer by layer: cases A, B1-B4, C."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import merged
import numpy as np
import pytest

from sparse_lavida_jax.data import images
from sparse_lavida_jax.tags import NO_FEATURE
from sparse_lavida_jax.visibility import PAD_BLOCK

LAYERS = 1e-4  # logits, hidden states, features (case/README.md)
COMBINED = 3e-4  # logits of two rows, combined
IMAGE_CASES = ("B1_t2i", "B2_t2i_embed", "B3_t2i_nodown")


def assert_close(got, wanted, tolerance=LAYERS):
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=0, atol=tolerance)


@functools.partial(jax.jit, static_argnames=("wanted", "attend_cache"))
def run(model, understanding, generation, features=None, **options):
    return model(understanding, generation, features, **options)


def text_logits(model, ids):
    hidden, _ = run(model, merged.text_stream(ids), None, wanted="understanding")
    return model.text_logits(hidden["understanding"])


def assert_layers(model, x, found, length, recorded, prefix=""):
    """Compares the streams after every layer and after the final norm."""
    after = merged.after_layers(model, x, merged.layouts(found))
    for i, hidden in enumerate(after):
        expected = recorded[f"{prefix}hidden_after_layer.{i}"]
        assert_close(merged.merge(hidden, found, length, model.settings.width), expected)
    assert f"{prefix}hidden_after_layer.{len(after)}" not in recorded


# ---------------------------------------------------------------------------------------------
# A: only text.


def test_text_layers_and_logits(case):
    given = case("A_text")
    model, ids = given.model(), given.inputs["input_ids"]
    x = {"understanding": model.embed_text(merged.text_stream(ids))}
    found = merged.places(np.zeros(ids.shape, bool))
    assert_layers(model, x, found, ids.shape[1], given.outputs)
    assert_close(x["understanding"], given.outputs["hidden_states.0"])
    assert_close(text_logits(model, ids), given.outputs["logits"])


def test_sequences_may_be_longer_than_the_stated_maximum(case):
    given = case("A_text")
    expected = given.outputs["longer_than_max_len_logits"]
    assert given.inputs["longer_ids"].shape[1] > given.config["max_sequence_length"]
    logits = text_logits(given.model(), given.inputs["longer_ids"])
    assert_close(logits[:, -expected.shape[1] :], expected)


def test_a_cached_prefix_that_does_not_see_the_rest(case):
    given = case("A_text")
    model, ids = given.model(), given.inputs["input_ids"]
    n = int(given.inputs["prefix_len"])
    assert_close(text_logits(model, ids[:, :n]), given.outputs["prefix_logits"])
    assert_close(with_cached_prefix(model, ids, n), given.outputs["cached_logits"])


def with_cached_prefix(model, ids, n):
    """Logits of the tokens after the first n; these are cached and see only each other."""
    batch, length = ids.shape
    cache = model.empty_cache(batch, length, 0, "understanding")
    _, cache = run(
        model, merged.text_stream(ids[:, :n]), None, wanted="understanding", cache=cache,
        attend_cache=False,
    )  # fmt: skip
    at = np.broadcast_to(np.arange(n, length), (batch, length - n))
    hidden, _ = run(
        model,
        merged.text_stream(ids[:, n:], at=at),
        None,
        wanted="understanding",
        cache=cache.advance(n),
    )
    return model.text_logits(hidden["understanding"])


def test_a_block_of_a_cached_sequence_is_replaced(case):
    """Fast-dLLM's dual cache: the block's old slots are hidden, its new tokens are appended."""
    given = case("A_text")
    model = given.model()
    setting = given.config["variants"]["dual_cache"]
    row = given.inputs["input_ids"][setting["row"]][None]
    start, stop = (int(edge) for edge in given.inputs["dual_block_range"])
    length = row.shape[1]
    cache = model.empty_cache(1, length + stop - start, 0, "understanding")
    _, cache = run(
        model,
        merged.text_stream(row),
        None,
        wanted="understanding",
        cache=cache,
        attend_cache=False,
    )
    slots = np.arange(cache.block.shape[1])
    inside = (slots >= start) & (slots < stop)
    cache = dataclasses.replace(
        cache.advance(length), block=jnp.where(inside[None], jnp.int32(PAD_BLOCK), cache.block)
    )
    new = merged.text_stream(given.inputs["dual_block_ids"], at=np.arange(start, stop)[None])
    hidden, _ = run(model, new, None, wanted="understanding", cache=cache)
    assert_close(
        model.text_logits(hidden["understanding"]), given.outputs["dual_cache_block_logits"]
    )


# ---------------------------------------------------------------------------------------------
# B: both branches.


@pytest.mark.parametrize("name", IMAGE_CASES)
def test_codes_become_tokens_and_tokens_logits(case, name):
    given = case(name)
    model, recorded = given.model(), given.outputs
    grid, side = given.config["gen_shape"], model.settings.codes_side
    modality = given.inputs["modality_indices"]
    found = merged.places(modality)
    length, width = modality.shape[1], model.settings.width
    image = merged.image_stream(given.inputs["image_codes"], grid, side, found["generation"])
    ids = np.take_along_axis(given.inputs["input_ids"], found["understanding"], axis=1)
    text = merged.text_stream(ids, at=found["understanding"])
    x = {"understanding": model.embed_text(text), "generation": model.embed_image(image)}
    assert_close(x["generation"], recorded["gen_tokens_embeds"])
    assert_close(merged.merge(x, found, length, width), recorded["cond.inputs_embeds"])
    assert_layers(model, x, found, length, recorded, "cond.")
    hidden, _ = run(model, text, image, wanted="both")
    assert_close(merged.merge(hidden, found, length, width), recorded["cond.final_hidden_ln_f"])
    logits = merged.codes_of(model.image_logits(hidden["generation"]), grid, side)
    assert_close(logits, recorded["cond.image_logits"])
    text_places = modality[0] == 0
    assert_close(
        model.text_logits(hidden["understanding"])[0], recorded["cond.text_logits"][0, text_places]
    )


@pytest.mark.parametrize("name", IMAGE_CASES)
def test_an_image_alone_needs_no_text_after_the_joint_layers(case, name):
    """`wanted="generation"` stops the text at the last joint layer, exactly."""
    given = case(name)
    model = given.model()
    grid, side = given.config["gen_shape"], model.settings.codes_side
    found = merged.places(given.inputs["modality_indices"])
    image = merged.image_stream(given.inputs["image_codes"], grid, side, found["generation"])
    ids = np.take_along_axis(given.inputs["input_ids"], found["understanding"], axis=1)
    text = merged.text_stream(ids, at=found["understanding"])
    hidden, _ = run(model, text, image, wanted="generation")
    assert set(hidden) == {"generation"}
    logits = merged.codes_of(model.image_logits(hidden["generation"]), grid, side)
    assert_close(logits, given.outputs["cond.image_logits"])


@pytest.mark.parametrize("name", IMAGE_CASES)
def test_guidance_combines_a_row_without_prompt(case, name):
    given = case(name)
    model = given.model()
    grid, side = given.config["gen_shape"], model.settings.codes_side
    setting = given.config["variants"]["cfg"]
    found = merged.places(given.inputs["modality_indices"])
    at = np.repeat(found["understanding"], 2, axis=0)
    ids = np.take_along_axis(given.inputs["input_ids"], found["understanding"], axis=1)
    dropped = np.where(
        found["understanding"] < setting["prompt_cutoff_len"], model.settings.text_mask_id, ids
    )
    text = merged.text_stream(np.concatenate([dropped, ids]), at=at)
    codes = np.repeat(given.inputs["image_codes"], 2, axis=0)
    image = merged.image_stream(codes, grid, side, np.repeat(found["generation"], 2, axis=0))
    hidden, _ = run(model, text, image, wanted="generation")
    without, full = merged.codes_of(model.image_logits(hidden["generation"]), grid, side)
    assert_close(without, given.outputs["cfg.uncond_logits"][0])
    assert_close(full, given.outputs["cfg.cond_logits"][0])
    g = float(given.inputs["guidance_scale"])
    assert_close((1 + g) * full - g * without, given.outputs["cfg.combined_logits"][0], COMBINED)


def test_rows_with_different_numbers_of_image_tokens(case):
    given = case("B4_ragged")
    model, recorded = given.model(), given.outputs
    modality = given.inputs["modality_indices"]
    assert len({*modality.sum(axis=1).tolist()}) > 1, "the rows are to be ragged"
    found = merged.places(modality)
    length, width = modality.shape[1], model.settings.width
    x = merged.take(given.inputs["inputs_embeds"], found, merged.widths(model.settings))
    assert_layers(model, x, found, length, recorded)
    hidden = merged.final(model, x, merged.layouts(found))
    whole = merged.merge(hidden, found, length, width)
    assert_close(whole, recorded["final_hidden_ln_f"])
    assert_close(model.text_logits(jnp.asarray(whole)), recorded["logits"])


def test_text_alone_in_a_model_of_both_branches(case):
    given = case("B4_ragged")
    model, ids = given.model(), given.inputs["textonly_ids"]
    for name in ("textonly_logits_modality_false", "textonly_logits_modality_none"):
        assert_close(text_logits(model, ids), given.outputs[name])
    n = int(given.inputs["textonly_prefix_len"])
    assert_close(with_cached_prefix(model, ids, n), given.outputs["textonly_cached_logits"])


# ---------------------------------------------------------------------------------------------
# C: images understood.


def views_of(pixel_values):
    """Converts the release's [n 3 s s] to bytes for our tower, [n s s 3]."""
    pixels = np.asarray(pixel_values).transpose(0, 2, 3, 1) * 0.5 + 0.5
    bytes_ = np.rint(pixels * 255)
    np.testing.assert_allclose(bytes_ / 255, pixels, atol=1e-5)
    return bytes_.astype(np.uint8)


def test_images_become_features(case):
    given = case("C_und")
    model = given.model()
    views = views_of(given.outputs["pixel_values"][0])
    patches = model.vision.tower((jnp.asarray(views, jnp.float32) / 255 - 0.5) / 0.5)
    assert_close(patches, given.outputs["vision_features"])
    assert_close(model.vision(views), given.outputs["projected_features"])


def understanding_of(given, expanded, pictures):
    """Returns the spliced stream and its features; images are (views, index of each feature)."""
    model = given.model()
    views = np.concatenate([views for views, _ in pictures])
    features = model.see(views[None])
    per_view = (features.shape[1] - 1) // len(views)
    index, start = [], 0
    for shown, tokens in pictures:
        newline = tokens == len(shown) * per_view
        index.append(np.where(newline, len(views) * per_view, start * per_view + tokens))
        start += len(shown)
    feature = np.full(expanded.shape, NO_FEATURE)
    feature[expanded < 0] = np.concatenate(index)
    return merged.text_stream(expanded, feature), features


def shown(given, variant):
    """The images of a variant: (views, feature index of each token)."""
    setting = given.config["variants"][variant]
    views = {
        name: given.outputs[name.partition("[")[0]] for name in setting["images"]
    }  # "pixel_values[0]" has a batch axis in front
    for name, size in zip(setting["images"], setting["image_sizes_wh"], strict=True):
        seen = views_of(views[name].reshape(-1, *views[name].shape[-3:]))
        whole = len(seen) == 1
        yield seen, images.token_index(tuple(size), given.settings.model.vision, whole=whole)


def test_an_image_in_a_sequence(case):
    given = case("C_und")
    model, recorded = given.model(), given.outputs
    expanded = recorded["new_input_ids"]
    stream, features = understanding_of(given, expanded, list(shown(given, "single")))
    x = {"understanding": model.embed_text(stream, features)}
    assert_close(x["understanding"], recorded["inputs_embeds"])
    found = merged.places(np.zeros(expanded.shape, bool))
    assert_layers(model, x, found, expanded.shape[1], recorded)
    hidden, _ = run(model, stream, None, features, wanted="understanding")
    assert_close(model.text_logits(hidden["understanding"]), recorded["logits"])


def test_two_images_in_a_sequence(case):
    given = case("C_und")
    model, recorded = given.model(), given.outputs
    expanded = recorded["two.new_input_ids"]
    stream, features = understanding_of(given, expanded, list(shown(given, "two")))
    assert_close(model.embed_text(stream, features), recorded["two.inputs_embeds"])
    hidden, _ = run(model, stream, None, features, wanted="understanding")
    assert_close(model.text_logits(hidden["understanding"]), recorded["two.logits"])


def test_boxes_are_read_off_the_masks_in_one_pass(case):
    given = case("C_und")
    model, recorded, variant = given.model(), given.outputs, "grounding_steps1"
    ids = given.inputs["grounding.input_ids"]
    expanded = spliced(ids, given, [tokens for _, tokens in shown(given, variant)])
    stream, features = understanding_of(given, expanded, list(shown(given, variant)))
    embedded = model.embed_text(stream, features)
    assert_close(embedded, recorded["grounding.steps1.inputs_embeds"])
    hidden, _ = run(model, stream, None, features, wanted="understanding")
    logits = model.text_logits(hidden["understanding"])
    last = given.config["variants"][variant]["mask_logits_last_positions"]
    assert_close(logits[0, -last:], recorded["grounding.steps1.mask_logits.0"])
    masks = expanded == model.settings.text_mask_id
    found = np.asarray(logits).argmax(axis=-1)[masks]
    np.testing.assert_array_equal(found[None], recorded["grounding.steps1.box_ids"])


def spliced(ids, given, tokens):
    """Ids with every image placeholder (-200) expanded to its tokens."""
    place, widths = given.config["golden_ids"]["IMAGE_INDEX"], iter(map(len, tokens))
    return np.array([[i for j in ids[0] for i in [j] * (next(widths) if j == place else 1)]])
