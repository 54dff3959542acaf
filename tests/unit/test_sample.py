# SPDX-License-Identifier: Apache-2.0
"""The sampler: policies, prompts, noise, rows that do not know of each other, when it stops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces

from sparse_lavida_jax import config, orders, sample
from sparse_lavida_jax.layout import GIVEN_BLOCK, NO_FEATURE, PROMPT_BLOCK
from sparse_lavida_jax.visibility import PAD_BLOCK

SETTINGS = tiny.model_settings(num_registers=2)


def image_requests(*words, given=0.0):
    return [tiny.request("image", SETTINGS, i, words=n, given=given) for i, n in enumerate(words)]


def image_settings(**changes):
    return traces.settings_of("sparse", "image", SETTINGS, **changes)


def text_settings():
    return traces.settings_of("sparse", "text", SETTINGS)


# ---------------------------------------------------------------------------------------------
# Settings and policies.


@pytest.mark.parametrize("name", config.PRESETS)
def test_presets_are_the_letters_of_their_names(name):
    letters = {"sparse": "prt", "dense": "", "none": ""}.get(name, name)
    expected = (*(letter in letters for letter in "prt"), name == "dense")
    assert dataclasses.astuple(sample.preset(name)) == expected


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="preset 'prt' is unknown: use one of dense, none"):
        sample.preset("prt")


@pytest.mark.parametrize(("trained", "name"), [("step_causal", "sparse"), ("full", "dense")])
def test_default_preset_follows_the_checkpoint(trained, name):
    model = tiny.model_settings(trained_attention=trained)
    settings = sample.step_settings(config.Sampling(), model, "image")
    assert settings.preset == sample.preset(name)
    assert settings.num_registers == (0 if name == "dense" else model.num_registers)


@pytest.mark.parametrize(
    ("kind", "has_source", "guidance", "guidance_image", "rows"),
    [
        ("image", False, 0.0, 0.0, 1),
        ("image", False, 2.0, 0.0, 2),
        ("image", True, 2.0, 1.0, 3),
        ("image", True, 0.0, 1.0, 3),
        ("image", True, 0.0, 0.0, 1),
        ("text", True, 2.0, 1.0, 1),
    ],
)
def test_guidance_rows(kind, has_source, guidance, guidance_image, rows):
    asked = config.Sampling(guidance=guidance, guidance_image=guidance_image)
    settings = sample.step_settings(asked, SETTINGS, kind, has_source=has_source)
    assert settings.guidance_rows == rows
    guided = rows > 1
    assert (settings.guidance, settings.guidance_image) == (
        (guidance, guidance_image) if guided else (0.0, 0.0)
    )


def test_temperature_is_that_of_the_kind():
    asked = config.Sampling(temperature=0.3, text_temperature=0.6)
    assert sample.step_settings(asked, SETTINGS, "image").temperature == 0.3
    assert sample.step_settings(asked, SETTINGS, "text").temperature == 0.6


def test_text_commits_the_most_probable_masked_candidates():
    rng = np.random.default_rng(0)
    for _ in range(20):
        probability = rng.random((3, 6, 2)).astype(np.float32)
        masked, count = rng.random((3, 6)) < 0.7, rng.integers(0, 7, 3)
        chosen = sample.commit_most_confident(*map(jnp.asarray, (probability, masked, count)))
        for row in range(3):
            candidates = sorted(
                np.flatnonzero(masked[row]), key=lambda i: -min(probability[row, i])
            )
            assert set(np.flatnonzero(chosen[row])) == set(candidates[: count[row]])


def test_text_commits_the_first_of_equally_probable_candidates():
    probability, masked = jnp.full((1, 4, 1), 0.5), jnp.array([[False, True, True, True]])
    chosen = sample.commit_most_confident(probability, masked, jnp.array([2]))
    np.testing.assert_array_equal(chosen, [[False, True, True, False]])


def test_images_commit_what_the_plan_chose():
    masked = jnp.array([[True, False, True]])
    np.testing.assert_array_equal(
        sample.commit_all(jnp.zeros((1, 3, 1)), masked, jnp.array([1])), masked
    )


# ---------------------------------------------------------------------------------------------
# Prompts.


def test_prompts_are_padded_to_a_bucket_with_given_tokens_in_their_block():
    asked = tiny.request("text", SETTINGS, 0, words=4, source=True, given=0.5)
    short = tiny.request("text", SETTINGS, 1, words=1)
    prompt = sample.prepare([asked, short], "text", SETTINGS)
    row = tiny.lay_out(asked, SETTINGS)
    known = np.flatnonzero(asked.given)
    n, m = len(row.ids), len(known)
    assert prompt.understanding.index.shape == (2, sample.PROMPT_BUCKET)
    text = prompt.understanding
    np.testing.assert_array_equal(
        text.layout.block[0], [PROMPT_BLOCK] * n + [GIVEN_BLOCK] * m + [PAD_BLOCK] * (16 - n - m)
    )
    np.testing.assert_array_equal(text.tokens[0, :n], row.ids)
    np.testing.assert_array_equal(text.tokens[0, n : n + m], asked.tokens[known, 0])
    np.testing.assert_array_equal(text.layout.position[0, n : n + m], row.response_position + known)
    assert (text.layout.block[1] == PAD_BLOCK).sum() == 16 - len(tiny.lay_out(short, SETTINGS).ids)
    np.testing.assert_array_equal(prompt.generation.tokens[0, : tiny.IMAGE_LEN], row.codes)
    assert (prompt.generation.layout.block[1] == PAD_BLOCK).all()
    np.testing.assert_array_equal(prompt.length, [row.length, tiny.lay_out(short, SETTINGS).length])


def test_guidance_rows_stand_one_behind_the_other_dropped_ones_first():
    requests = [
        tiny.request("image", SETTINGS, i, words=3, vision=True, source=True) for i in range(2)
    ]
    prompt = sample.prepare(requests, "image", SETTINGS, guidance_rows=3)
    assert prompt.understanding.index.shape[0] == 6
    cells = (prompt.generation.layout.block != PAD_BLOCK).sum(axis=1)
    np.testing.assert_array_equal(cells, [0, 0, *[tiny.IMAGE_LEN] * 4])
    features = (prompt.understanding.index != NO_FEATURE).sum(axis=1)
    np.testing.assert_array_equal(features, [*[0] * 4, *[tiny.VISION.num_tokens] * 2])
    masks = (prompt.understanding.tokens == SETTINGS.text_mask_id).sum(axis=1)
    words, seen = 3, tiny.VISION.num_tokens
    assert masks[0] == words + seen + tiny.IMAGE_LEN
    assert masks[2] == words + seen
    assert masks[4] == seen
    for r in range(6):
        np.testing.assert_array_equal(prompt.pixels[r], requests[r % 2].pixels)


def test_least_lengths_let_batches_share_their_programs():
    few, many = image_requests(2), image_requests(30)
    least = sample.prompt_lengths(many, "image", SETTINGS)
    prompt = sample.prepare(few, "image", SETTINGS, prompt_len=least)
    assert prompt.understanding.index.shape[1] == least[0] == 3 * sample.PROMPT_BUCKET
    assert prompt.generation is None
    assert least[1] == 0


# ---------------------------------------------------------------------------------------------
# Capacity.


def test_capacity_is_the_furthest_slot_that_any_step_writes():
    for settings, segments in (
        (image_settings(), image_plan(image_requests(2, 5), 4)),
        (text_settings(), orders.text_plan(tiny.TEXT_LEN, tiny.TEXT_BLOCK_LEN, 3)),
    ):
        requests = image_requests(2, 5) if settings.kind == "image" else text_requests((3, 0.0))
        prompt = sample.prepare(requests, settings.kind, SETTINGS)
        own = prompt.understanding if settings.kind == "text" else prompt.generation
        offset = furthest = 0 if own is None else own.index.shape[1]
        for segment in segments:
            for _ in range(segment.num_steps):
                width = sum(p.shape[-1] for p in (segment.clean, segment.decode, segment.rest))
                furthest = max(furthest, offset + width + settings.num_registers)
                offset += segment.clean.shape[-1]
        slots = sample.capacity(prompt, segments, settings)
        assert slots[("text", "image").index(settings.kind)] == furthest


# ---------------------------------------------------------------------------------------------
# Whole runs.


def image_plan(requests, num_steps=4, **options):
    return traces.plan(requests, image_settings(), num_steps, **options)


def text_requests(*words_and_given):
    return [
        tiny.request("text", SETTINGS, i, words=n, given=share)
        for i, (n, share) in enumerate(words_and_given)
    ]


def test_compiled_loops_take_the_same_steps_and_callbacks_keep_their_pictures():
    """`sample.sample` as it is, donated state and all, against its steps one by one."""
    # Two layers: this one is compiled as for use.
    model = tiny.denoiser(dataclasses.replace(SETTINGS, num_layers=2, dual_tower_layers=0))
    requests = image_requests(3, 6)
    segments = [
        orders.Segment(*(getattr(s, f.name)[i : i + 2] for f in dataclasses.fields(s)))
        for s in image_plan(requests)
        for i in (0, 2)
    ]
    shown = []
    canvas = sample.sample(
        model,
        requests,
        segments,
        settings=image_settings(),
        on_segment=lambda canvas, done: shown.append((canvas, done)),
    )
    steps, expected = traces.moments(model, requests, segments, image_settings())
    np.testing.assert_array_equal(canvas, expected)
    assert [done for _, done in shown] == [2, 4]
    np.testing.assert_array_equal(shown[0][0], steps[2].canvas)
    np.testing.assert_array_equal(shown[1][0], canvas)
    assert (canvas < SETTINGS.codebook_size).all()


def test_noise_depends_on_neither_bucket_nor_slot():
    model, requests = tiny.denoiser(SETTINGS), image_requests(3, 6)
    settings = image_settings()
    narrow = traces.finished(model, requests, image_plan(requests), settings)
    wide = image_plan(requests, buckets=(16,))
    np.testing.assert_array_equal(traces.finished(model, requests, wide, settings), narrow)
    turned = [
        dataclasses.replace(s, clean=s.clean[..., ::-1], decode=s.decode[..., ::-1]) for s in wide
    ]
    np.testing.assert_array_equal(traces.finished(model, requests, turned, settings), narrow)


def test_seeds_and_temperature_decide_what_is_drawn():
    model, requests = tiny.denoiser(SETTINGS), image_requests(3, 6)
    plan, settings = image_plan(requests), image_settings()
    drawn = traces.finished(model, requests, plan, settings)
    np.testing.assert_array_equal(traces.finished(model, requests, plan, settings), drawn)
    others = [dataclasses.replace(request, seed=7 + request.seed) for request in requests]
    assert (traces.finished(model, others, plan, settings) != drawn).any()


def alone(model, requests, settings, **options):
    """Returns every row sampled by itself, as one batch."""
    rows = [
        traces.finished(
            model,
            [request],
            traces.plan([request], settings, **options),
            settings,
            stop_early=False,
        )
        for request in requests
    ]
    return np.concatenate(rows)


@pytest.mark.parametrize("guidance", [0.0, 0.5])
def test_pictures_of_a_batch_do_not_know_of_each_other(guidance):
    model, requests = tiny.denoiser(SETTINGS), image_requests(3, 12, 5)
    settings = image_settings(guidance=guidance)
    plan = traces.plan(requests, settings)
    steps, batch = traces.moments(model, requests, plan, settings)
    np.testing.assert_array_equal(alone(model, requests, settings), batch)
    requests[1] = dataclasses.replace(requests[0], seed=requests[1].seed)
    after, _ = traces.moments(model, requests, plan, settings)
    for moment, changed in zip(steps, after, strict=True):
        same = np.abs(changed.logits - moment.logits).max(axis=(1, 2, 3)) <= 2e-5
        np.testing.assert_array_equal(same, [True, False, True])


def test_a_picture_does_not_know_that_another_has_given_cells():
    model = tiny.denoiser(SETTINGS)
    requests = [*image_requests(3), tiny.request("image", SETTINGS, 1, words=3, given=0.4)]
    settings, options = image_settings(), {"buckets": (4,)}
    batch = traces.finished(model, requests, traces.plan(requests, settings, **options), settings)
    np.testing.assert_array_equal(alone(model, requests, settings, **options), batch)


def test_a_text_does_not_know_that_another_has_given_words():
    """A text block that one row has given in full, and another not at all."""
    model = tiny.denoiser(SETTINGS)
    requests = text_requests((3, 0.0), (5, 0.0))
    given = np.arange(tiny.TEXT_LEN) < tiny.TEXT_BLOCK_LEN
    requests[1] = dataclasses.replace(requests[1], given=given)
    settings = text_settings()
    plan = traces.plan(requests, settings, 2)
    batch = traces.finished(model, requests, plan, settings, stop_early=False)
    np.testing.assert_array_equal(alone(model, requests, settings, num_steps=2), batch)


def test_given_tokens_come_back_as_they_were():
    model = tiny.denoiser(SETTINGS)
    requests = [
        tiny.request("image", SETTINGS, i, words=3, given=share)
        for i, share in enumerate((0.5, 1.0, 0.0))
    ]
    canvas = traces.finished(model, requests, image_plan(requests), image_settings())
    for row, request in zip(canvas, requests, strict=True):
        np.testing.assert_array_equal(row[request.given], request.tokens[request.given])
        assert (row < SETTINGS.codebook_size).all()


def test_everything_given_is_returned_without_a_step():
    requests = image_requests(3, given=1.0)
    canvas = traces.finished(
        tiny.denoiser(SETTINGS), requests, image_plan(requests), image_settings()
    )
    np.testing.assert_array_equal(canvas[0], requests[0].tokens)


# ---------------------------------------------------------------------------------------------
# The end of a text.


def ends_at(model, ids, position):
    """Returns the same model with the id that stands at `position` for its end-of-text."""
    changed = dataclasses.replace(SETTINGS, end_of_text_id=int(ids[position, 0]))
    twin = jax.tree.map(lambda p: p, model)
    twin.settings = changed
    return twin


def test_text_stops_at_its_first_end_with_everything_before_it_decoded():
    model, settings = tiny.denoiser(SETTINGS), text_settings()
    requests = text_requests((3, 0.0))
    plan = traces.plan(requests, settings, 2)
    whole = traces.finished(model, requests, plan, settings, stop_early=False)[0]
    end = 5  # in the second of three text blocks
    end = int(np.flatnonzero(whole[:, 0] == whole[end, 0])[0])
    block_end = (end // tiny.TEXT_BLOCK_LEN + 1) * tiny.TEXT_BLOCK_LEN
    twin, steps = ends_at(model, whole, end), []
    stopped = traces.finished(
        twin, requests, plan, settings, on_segment=lambda _, done: steps.append(done)
    )[0]
    np.testing.assert_array_equal(stopped[: end + 1], whole[: end + 1])
    # What would stand behind it is never decoded; it comes out as end-of-text.
    assert (stopped[block_end:] == tiny.denoiser(SETTINGS).settings.end_of_text_id).all()
    assert steps[-1] < sum(segment.num_steps for segment in plan)


def test_a_batch_goes_on_until_its_last_row_has_ended():
    """A given end-of-text counts once everything before it is decoded, in every row."""
    model, settings = tiny.denoiser(SETTINGS), text_settings()
    shown, requests = [], text_requests((3, 0.0), (3, 0.0))
    for row, end in ((0, 2), (1, 6)):
        tokens, given = requests[row].tokens.copy(), np.zeros(tiny.TEXT_LEN, bool)
        tokens[end], given[end] = SETTINGS.end_of_text_id, True
        requests[row] = dataclasses.replace(requests[row], tokens=tokens, given=given)
    plan = traces.plan(requests, settings, 2)
    traces.finished(model, requests, plan, settings, on_segment=lambda _, done: shown.append(done))
    steps, _ = traces.moments(model, requests, plan, settings)
    bounds = np.cumsum([segment.num_steps for segment in plan])[:-1].tolist()
    over = [bound for bound in bounds if all(has_ended(steps[bound], row) for row in (0, 1))]
    assert shown == [bound for bound in bounds if bound <= over[0]]
    assert not all(has_ended(steps[shown[0]], row) for row in (0, 1))


def has_ended(moment: traces.Moment, row: int) -> bool:
    """Returns whether a row reads up to an end-of-text without a gap."""
    for token, at in zip(moment.canvas[row, :, 0], moment.decoded_at[row], strict=True):
        if at == sample.NOT_DECODED:
            return False
        if token == SETTINGS.end_of_text_id:
            return True
    return False


# ---------------------------------------------------------------------------------------------
# Refusals.


def test_a_plan_for_another_batch_is_refused():
    with pytest.raises(ValueError, match="the plan is for 2 rows, got 1 requests"):
        sample.sample(
            tiny.denoiser(SETTINGS),
            image_requests(3),
            image_plan(image_requests(3, 4)),
            settings=image_settings(),
        )


def test_responses_of_different_length_are_refused():
    requests = image_requests(3, 4)
    requests[1] = dataclasses.replace(
        requests[1], tokens=requests[1].tokens[:4], given=requests[1].given[:4]
    )
    with pytest.raises(ValueError, match="response"):
        sample.sample(
            tiny.denoiser(SETTINGS),
            requests,
            image_plan(image_requests(3, 4)),
            settings=image_settings(),
        )
