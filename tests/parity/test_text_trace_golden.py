# SPDX-License-Identifier: Apache-2.0
"""Text runs of the released sampler, step by step (cases F2 and C)."""

import numpy as np
import pytest
import replay
import tiny
import traces

from sparse_lavida_jax import config, sample, sequence
from sparse_lavida_jax.data import images
from sparse_lavida_jax.sampling import presets

NAME = "F2_text_trace"
LOGITS = 1e-4


def run_of(given, name):
    """Returns (request, plan, settings, draws) of a recorded run."""
    variant, model = given.config["variants"][name], given.settings.model
    sampling = replay.text_sampling(variant)
    settings = tiny.step_settings(sampling, model, "text")
    draft = given.inputs[variant["draft_tokens"]][0] if variant["draft_tokens"] else ()
    request = replay.text_request(
        given.inputs["input_ids"][0], variant["max_new_tokens"], model.text_mask_id, draft
    )
    plan = presets.plan(sampling, settings, model, request.given[None], variant["block_length"])
    return request, plan, settings, replay.text_draws(variant, given.inputs)


@pytest.mark.parametrize("name", replay.variants(NAME))
def test_text_is_decoded_as_recorded(case, name):
    given = case(NAME)
    length = given.config["variants"][name]["max_new_tokens"]
    request, plan, settings, draws = run_of(given, name)
    shown, last, passes = replay.history(given.model(), request, plan, settings, draws)
    if f"{name}.history" in given.outputs:
        expected = given.outputs[f"{name}.history"][:, -length:]
        np.testing.assert_array_equal(shown[..., 0], expected)
        np.testing.assert_array_equal(last[:, 0], expected[-1])
    else:
        np.testing.assert_array_equal(last[:, 0], given.outputs[f"{name}.final"][0, -length:])
        assert passes == given.outputs[f"{name}.nfe"]


def test_whole_phases_take_the_same_steps(case):
    """Loops end early if the factor rule commits more than one token per pass."""
    given = case(NAME)
    for name, variant in given.config["variants"].items():
        if variant["use_fast_dlm"]:
            request, plan, settings, _ = run_of(given, name)
            passes = []
            last = sample.sample(
                given.model(), tiny.sample_inputs([request], given.settings.model, settings), plan,
                settings=settings,
                callback=lambda progress, seen=passes: seen.append(progress.steps),
            )  # fmt: skip
            expected = given.outputs[f"{name}.final"][0, -variant["max_new_tokens"] :]
            np.testing.assert_array_equal(last[0, :, 0], expected)
            assert passes[-1] == given.outputs[f"{name}.nfe"]


def test_the_logits_of_the_first_step_are_the_recorded_ones(case):
    given = case(NAME)
    names = [key.removesuffix(".logits_step0") for key in given.outputs if "logits_step0" in key]
    assert names
    for name in names:
        request, plan, settings, _ = run_of(given, name)
        steps, _ = traces.moments(given.model(), [request], plan, settings)
        expected = given.outputs[f"{name}.logits_step0"]
        assert steps[0].masked.all()
        np.testing.assert_allclose(steps[0].logits[:, :, 0], expected, rtol=0, atol=LOGITS)


# ---------------------------------------------------------------------------------------------
# Text about an image (case C).

IMAGES = "C_und"


def seen_request(given, variant, ids, response):
    """Returns a request with one image.

    Args:
        ids: the prompt, one id for the image.
        response: positions that are decoded: the last ones of `ids`, or further ones after it.
    """
    made, place = given.settings.model, given.config["golden_ids"]["IMAGE_INDEX"]
    (name,), (size,) = variant["images"], variant["image_sizes_wh"]
    views = given.outputs[name.partition("[")[0]][0].transpose(0, 2, 3, 1)
    index = images.token_index(tuple(size), made.vision, whole=len(views) == 1)
    features = len(views) * made.vision.num_tokens + made.vision.newline
    at = int(np.flatnonzero(ids == place)[0])
    parts = (
        sequence.Text(ids[:at]),
        sequence.VisionTokens(len(index), index, features),
        sequence.Text(ids[at + 1 : response.start]),
        sequence.Response(len(response)),
        sequence.Text(ids[response.stop :]),
    )
    tokens = np.full((len(response), 1), made.text_mask_id, np.int32)
    return tiny.example(parts, tokens, np.zeros(len(response), bool), "text", (views,))


def test_an_answer_about_an_image_is_decoded_as_recorded(case):
    given = case(IMAGES)
    for name, variant in given.config["variants"].items():
        if "max_new_tokens" not in variant:
            continue
        ids, length = given.inputs[variant["input_ids"]][0], variant["max_new_tokens"]
        request = seen_request(given, variant, ids, range(len(ids), len(ids) + length))
        sampling = replay.text_sampling(variant)
        settings = tiny.step_settings(sampling, given.settings.model, "text")
        plan = presets.plan(
            sampling, settings, given.settings.model, request.given[None], variant["block_length"]
        )
        shown, _, _ = replay.history(given.model(), request, plan, settings)
        np.testing.assert_array_equal(shown[..., 0], given.outputs[f"{name}.history"])


def boxes(case, steps):
    """Returns the ids of a box after each of `steps` steps, at the end, and as recorded."""
    given = case(IMAGES)
    name = "grounding_steps1"
    variant = given.config["variants"][name]
    ids = given.inputs[variant["input_ids"]][0]
    (masks,) = np.nonzero(ids == given.settings.model.text_mask_id)
    assert (np.diff(masks) == 1).all()
    request = seen_request(given, variant, ids, range(masks[0], masks[-1] + 1))
    sampling = config.Sampling(
        text=config.TextSampling(preset="dense", steps=steps),
        released=config.ReleasedSampling(text_behaviour=True),
    )
    settings = tiny.step_settings(sampling, given.settings.model, "text")
    plan = presets.plan(sampling, settings, given.settings.model, request.given[None], len(masks))
    shown, last, _ = replay.history(given.model(), request, plan, settings)
    return shown[..., 0], last[:, 0], given.outputs["grounding.steps1.box_ids"][0]


def test_a_box_is_decoded_in_one_step_as_recorded(case):
    _, last, expected = boxes(case, 1)
    np.testing.assert_array_equal(last, expected)


def test_a_box_decoded_in_two_steps_keeps_what_the_first_committed(case):
    """The release instead returns what the last step would have drawn everywhere."""
    shown, last, expected = boxes(case, 2)
    mask_id = case(IMAGES).settings.model.text_mask_id
    first = shown[0] != mask_id
    assert first.sum() == -(-len(expected) // 2)
    np.testing.assert_array_equal(shown[0][first], expected[first])
    np.testing.assert_array_equal(last[first], expected[first])
    assert (last != mask_id).all()
