# SPDX-License-Identifier: Apache-2.0
"""The sampler: policies, prompts, noise, independence of rows, stopping."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stand_ins
import tiny
import traces
from flax import nnx

from sparse_lavida_jax import config, orders, pipeline, sample, sequence
from sparse_lavida_jax.models import image_codec, vq
from sparse_lavida_jax.sampling import calls, draw, options, plans, presets, prompts
from sparse_lavida_jax.sampling import state as state_of
from sparse_lavida_jax.sampling.commit import CommitRule
from sparse_lavida_jax.tags import GIVEN_BLOCK, NO_FEATURE, PROMPT_BLOCK
from sparse_lavida_jax.visibility import PAD_BLOCK

SETTINGS = tiny.model_settings(num_registers=2)
FOUR_REGISTERS = dataclasses.replace(SETTINGS, num_registers=4)


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
    assert dataclasses.astuple(presets.preset(name)) == expected


@pytest.mark.parametrize(
    ("name", "letters"), [("prefix", "p"), ("fast_dllm_prefix", "pr"), ("fast_dllm_dual", "prt")]
)
def test_presets_of_text_cache_under_full_attention(name, letters):
    asked = config.Sampling(text=config.TextSampling(preset=name))
    text = presets.step_settings(asked, SETTINGS, "text")
    assert dataclasses.astuple(text.preset) == (*(letter in letters for letter in "prt"), True)
    assert text.num_registers == 0
    assert text.preset.given_in_steps
    assert text.preset.refreshes == ("r" in letters)
    assert presets.step_settings(asked, SETTINGS, "image").preset == presets.preset("sparse")


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="preset 'prt' is unknown: use one of dense, none"):
        presets.preset("prt")


@pytest.mark.parametrize(("trained", "name"), [("step_causal", "sparse"), ("full", "dense")])
def test_default_preset_follows_the_checkpoint(trained, name):
    model = tiny.model_settings(trained_attention=trained)
    settings = presets.step_settings(config.Sampling(), model, "image")
    assert settings.preset == presets.preset(name)
    assert settings.num_registers == (0 if name == "dense" else model.num_registers)


@pytest.mark.parametrize(
    ("modality", "has_source", "guidance", "guidance_image", "rows"),
    [
        ("image", False, 0.0, 0.0, 1),
        ("image", False, 2.0, 0.0, 2),
        ("image", True, 2.0, 1.0, 3),
        ("image", True, 0.0, 1.0, 3),
        ("image", False, 0.0, 1.0, 1),
        ("image", True, 0.0, 0.0, 1),
        ("text", True, 2.0, 1.0, 1),
    ],
)
def test_guidance_rows(modality, has_source, guidance, guidance_image, rows):
    asked = config.Sampling(guidance=guidance, guidance_image=guidance_image)
    settings = presets.step_settings(asked, SETTINGS, modality, has_source=has_source)
    assert settings.guidance_rows == rows
    # A batch is guided if any of its rows is, whatever is configured.
    for guided in (True, False):
        asked = config.Sampling(guidance=4.0 - 4.0 * guided)
        most = presets.step_settings(
            asked, SETTINGS, modality, has_source=has_source, guided=guided
        )
        assert most.guidance_rows == (2 + has_source if guided and modality == "image" else 1)


def test_edits_may_have_a_guidance_of_their_own():
    asked = config.Sampling(guidance=4.0, guidance_edit=1.2)
    row = presets.RowRequest(**presets.scales(asked, "image"))
    example = tiny.request("image", SETTINGS, 0, words=3, source=True)
    for has_source, scale in ((False, 4.0), (True, 1.2)):
        settings = presets.step_settings(asked, SETTINGS, "image", has_source=has_source)
        inputs = prompts.sample_input(example, row, SETTINGS, settings)
        np.testing.assert_allclose(
            state_of.rows_of([inputs], settings).guidance, [scale], rtol=1e-6
        )
    none = presets.step_settings(
        dataclasses.replace(asked, guidance_edit=0.0), SETTINGS, "image", has_source=True
    )
    assert none.guidance_rows == 1
    # Options given by name apply to every image task.
    named = options.changed(asked, draws=True, guidance=2.0)
    assert presets.guidance_of(named, has_source=True) == 2.0
    with pytest.raises(config.ConfigError, match=r"guidance_edit=-0\.5 .* or be -1"):
        config.Sampling(guidance_edit=-0.5)


def test_temperature_is_that_of_the_modality():
    asked = config.Sampling(temperature=0.3, text=config.TextSampling(temperature=0.6))
    assert presets.scales(asked, "image")["temperature"] == 0.3
    assert presets.scales(asked, "text")["temperature"] == 0.6


@pytest.mark.parametrize(
    ("asked", "modality", "rule"),
    [
        ({}, "image", CommitRule("all")),
        ({"order": "confidence"}, "image", CommitRule("count", noisy=True)),
        ({"order": "confidence", "confidence_noise": 0.0}, "image", CommitRule("count")),
        ({}, "text", CommitRule("count")),
        (
            {"text": {"commit": "factor", "factor": 2.0, "confidence": "margin"}},
            "text",
            CommitRule("factor", 2.0, "margin"),
        ),
        (
            {"text": {"commit": "factor"}, "released": {"text_behaviour": True}},
            "text",
            CommitRule("factor", 1.0, released=True),
        ),
        ({"text": {"commit": "threshold"}}, "text", CommitRule("threshold", 0.9)),
        (
            {"text": {"commit": "entropy", "entropy": 0.2, "most": 3}},
            "text",
            CommitRule("entropy", 0.2, "entropy", most=3),
        ),
    ],
)
def test_what_is_committed_is_as_configured(asked, modality, rule):
    sampling = config.build(config.Sampling, asked)
    found = presets.step_settings(sampling, SETTINGS, modality).commit
    assert found == rule
    assert found.ends_early == (rule.name in ("threshold", "factor", "entropy"))


def test_text_commits_the_most_probable_masked_candidates():
    rng = np.random.default_rng(0)
    for _ in range(20):
        probability = rng.random((3, 6, 2)).astype(np.float32)
        masked, count = rng.random((3, 6, 2)) < 0.7, rng.integers(0, 13, 3)
        chosen = CommitRule("count")(*map(jnp.asarray, (probability, masked, count)))
        for row in range(3):
            candidates = sorted(
                np.flatnonzero(masked[row]), key=lambda i: -probability[row].ravel()[i]
            )
            assert set(np.flatnonzero(chosen[row])) == set(candidates[: count[row]])


def test_text_commits_the_first_of_equally_probable_candidates():
    masked = jnp.array([False, True, True, True]).reshape(1, 4, 1)
    chosen = CommitRule("count")(jnp.full((1, 4, 1), 0.5), masked, jnp.array([2]))
    np.testing.assert_array_equal(chosen[0, :, 0], [False, True, True, False])


def test_images_commit_what_the_plan_chose():
    masked = jnp.array([True, False, True]).reshape(1, 3, 1)
    np.testing.assert_array_equal(
        CommitRule("all")(jnp.zeros((1, 3, 1)), masked, jnp.array([1])), masked
    )


# ---------------------------------------------------------------------------------------------
# Prompts.


def test_prompts_are_padded_to_a_bucket_with_given_tokens_in_their_block():
    asked = tiny.request("text", SETTINGS, 0, words=4, source=True, given=0.5)
    short = tiny.request("text", SETTINGS, 1, words=1)
    prompt = tiny.prepare([asked, short], SETTINGS)
    row = tiny.sample_input(asked, SETTINGS)
    known = np.flatnonzero(asked.given)
    n, m = len(row.ids), len(known)
    assert prompt.understanding.index.shape == (2, prompts.PROMPT_BUCKET)
    text = prompt.understanding
    np.testing.assert_array_equal(
        text.tags.block[0], [PROMPT_BLOCK] * n + [GIVEN_BLOCK] * m + [PAD_BLOCK] * (16 - n - m)
    )
    np.testing.assert_array_equal(text.tokens[0, :n], row.ids)
    np.testing.assert_array_equal(text.tokens[0, n : n + m], asked.response[known, 0])
    np.testing.assert_array_equal(text.tags.position[0, n : n + m], row.response_position + known)
    assert (text.tags.block[1] == PAD_BLOCK).sum() == 16 - len(
        tiny.sample_input(short, SETTINGS).ids
    )
    np.testing.assert_array_equal(prompt.generation.tokens[0, : tiny.IMAGE_LEN], row.codes)
    assert (prompt.generation.tags.block[1] == PAD_BLOCK).all()
    np.testing.assert_array_equal(
        prompt.length, [row.length, tiny.sample_input(short, SETTINGS).length]
    )


def test_guidance_rows_stand_one_after_the_other_dropped_ones_first():
    requests = [
        tiny.request("image", SETTINGS, i, words=3, vision=True, source=True) for i in range(2)
    ]
    prompt = tiny.prepare(requests, SETTINGS, guidance_rows=3)
    assert prompt.understanding.index.shape[0] == 6
    cells = (prompt.generation.tags.block != PAD_BLOCK).sum(axis=1)
    np.testing.assert_array_equal(cells, [0, 0, *[tiny.IMAGE_LEN] * 4])
    features = (prompt.understanding.index != NO_FEATURE).sum(axis=1)
    np.testing.assert_array_equal(features, [*[0] * 4, *[tiny.VISION.num_tokens] * 2])
    masks = (prompt.understanding.tokens == SETTINGS.text_mask_id).sum(axis=1)
    words, seen = 3, tiny.VISION.num_tokens
    assert masks[0] == words + seen + tiny.IMAGE_LEN
    assert masks[2] == words + seen
    assert masks[4] == seen
    np.testing.assert_array_equal(prompt.pixels, [request.pixels for request in requests])


def test_least_lengths_let_batches_share_their_programs():
    few, many = image_requests(2), image_requests(30)
    least = prompts.padded_lengths(tiny.prepare(many, SETTINGS))
    prompt = tiny.prepare(few, SETTINGS, prompt_len=least)
    assert prompt.understanding.index.shape[1] == least[0] == 3 * prompts.PROMPT_BUCKET
    assert prompt.generation is None
    assert least[1] == 0


# ---------------------------------------------------------------------------------------------
# Capacity.


def test_capacity_is_the_furthest_slot_that_any_step_writes():
    for settings, phases in (
        (image_settings(), image_plan(image_requests(2, 5), 4)),
        (text_settings(), traces.plan(text_requests((3, 0.0)), text_settings(), 3)),
    ):
        requests = image_requests(2, 5) if settings.modality == "image" else text_requests((3, 0.0))
        prompt = tiny.prepare(requests, SETTINGS)
        own = prompt.understanding if settings.modality == "text" else prompt.generation
        offset = furthest = 0 if own is None else own.index.shape[1]
        for phase in phases:
            for _ in range(phase.num_steps):
                width = sum(p.shape[-1] for p in (phase.clean, phase.decode, phase.rest))
                furthest = max(furthest, offset + width + settings.num_registers)
                offset += phase.clean.shape[-1]
        lengths = prompts.padded_lengths(prompt)
        slots, _ = state_of.capacity(lengths, phases, settings)
        assert slots[("text", "image").index(settings.modality)] == furthest
        # For a kernel, padded to whole tiles: otherwise it would copy the cache.
        whole, _ = state_of.capacity(lengths, phases, settings, 128)
        assert whole == tuple(-(-n // 128) * 128 for n in slots)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_slots_that_a_phase_cannot_reach_are_not_read(modality, monkeypatch):
    """Early phases read only what they and their predecessors write; the results are the same."""
    if modality == "image":
        settings, requests = image_settings(), image_requests(3, 6)
        phases = image_plan(requests, max_phases=2)
    else:
        settings, requests = text_settings(), text_requests((3, 0.0), (5, 0.0))
        phases = traces.plan(requests, settings, 2)
    model, own = tiny.denoiser(SETTINGS), ("text", "image").index(modality)

    def run():
        with traces._patched(**traces._quick()):
            inputs = tiny.sample_inputs(requests, model.settings, settings)
            prefilled = sample.prefill_batch(model, inputs, phases, settings=settings)
        reach = [phase.reach for phase in prefilled.phases]
        return reach, traces.finished(model, requests, phases, settings)

    monkeypatch.setattr(calls, "READ_SLOTS", 1000)
    reach, whole = run()
    assert not any(reach)
    monkeypatch.setattr(calls, "READ_SLOTS", 1)
    monkeypatch.setattr(calls, "TEXT_LENGTHS", 1000)
    reach, responses = run()
    np.testing.assert_array_equal(responses, whole)
    prompt = tiny.prepare(requests, SETTINGS)
    lengths = prompts.padded_lengths(prompt)
    rooms = [
        state_of.capacity(lengths, phases[: i + 1], settings)[0][own] for i in range(len(phases))
    ]
    read = [slots or rooms[-1] for slots in reach]
    unit = 4 if modality == "text" else 1
    assert read == [min(-(-n // unit) * unit, rooms[-1]) for n in rooms]
    assert read[0] < read[-1]


# ---------------------------------------------------------------------------------------------
# Whole runs.


def image_plan(requests, num_steps=4, **options):
    return traces.plan(requests, image_settings(), num_steps, **options)


def text_requests(*words_and_given):
    return [
        tiny.request("text", SETTINGS, i, words=n, given=share)
        for i, (n, share) in enumerate(words_and_given)
    ]


def test_compiled_loops_take_the_same_steps_and_callbacks_keep_their_images():
    """Compares unmodified `sample.sample`, with donated state, with its steps one by one."""
    # Only two layers, because this is compiled with full optimisation.
    model = tiny.denoiser(dataclasses.replace(SETTINGS, num_layers=2, dual_tower_layers=0))
    requests = image_requests(3, 6)
    phases = [steps[i : i + 2] for steps in image_plan(requests) for i in (0, 2)]
    shown = []
    responses = sample.sample(
        model,
        tiny.sample_inputs(requests, model.settings, image_settings()),
        phases,
        settings=image_settings(),
        callback=shown.append,
    )
    steps, expected = traces.moments(model, requests, phases, image_settings())
    np.testing.assert_array_equal(responses, expected)
    begin, *shown = shown
    assert (begin.steps, list(begin.blocks), begin.total) == (0, [], 4)
    np.testing.assert_array_equal(begin.responses, steps[0].responses)
    assert [now.steps for now in shown] == [2, 4]
    np.testing.assert_array_equal(shown[0].responses, steps[2].responses)
    np.testing.assert_array_equal(shown[1].responses, responses)
    # The responses after each step of a phase are known when it ends.
    blocks = [(now, block) for now in shown for block in now.blocks]
    assert len(blocks) == 4
    for (now, block), after in zip(blocks, [*steps[1:4], steps[-1]], strict=True):
        wanted = responses if block == blocks[-1][1] else after.responses
        np.testing.assert_array_equal(now.after(block), wanted)
    np.testing.assert_array_equal(shown[0].after(blocks[0][1] - 1), steps[0].responses)
    assert (responses < SETTINGS.codebook_size).all()


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
    others = [tiny.asked_with(request, seed=7 + request.request.seed) for request in requests]
    assert (traces.finished(model, others, plan, settings) != drawn).any()


def alone(model, requests, settings, **options):
    """Samples every row separately; returns them as one batch."""
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


ENDS_EARLY = {"preset": "sparse", "text": {"commit": "threshold", "threshold": 0.08}}


def row_run(modality, requests, **asked):
    """Returns (plan, settings); text has two blocks of two steps."""
    if modality == "text":
        hot = {"steps": 2, "temperature": 0.8} | asked.pop("text", {})
        return text_run(requests, tiny.TEXT_LEN // 2, text=hot, **asked)
    settings = traces.settings_of(asked.pop("preset"), modality, SETTINGS, **asked)
    return traces.plan(requests, settings), settings


@pytest.mark.parametrize(
    ("modality", "asked"),
    [
        ("image", {"preset": "sparse"}),
        ("image", {"preset": "sparse", "guidance": 0.5}),
        ("image", {"preset": "none"}),
        ("image", {"preset": "dense"}),
        ("text", {"preset": "sparse"}),
        ("text", {"preset": "none"}),
        ("text", {"preset": "dense"}),
        ("text", {"text": {"preset": "fast_dllm_dual"}}),
        ("text", ENDS_EARLY),
    ],
)
def test_rows_of_a_batch_do_not_know_of_each_other(modality, asked):
    """Same tokens as alone, logits to 2e-5; bitwise the same if only other rows change."""
    model = tiny.denoiser(SETTINGS)
    requests = [tiny.request(modality, SETTINGS, i, words=n) for i, n in enumerate((3, 12, 5))]
    steps, batch = traces.moments(model, requests, *row_run(modality, requests, **asked))
    for row, request in enumerate(requests):
        own, alone = traces.moments(model, [request], *row_run(modality, [request], **asked))
        np.testing.assert_array_equal(alone[0], batch[row])
        for moment, mine in zip(steps, own, strict=True):
            np.testing.assert_array_equal(moment.masked[row], mine.masked[0])
            np.testing.assert_allclose(moment.logits[row], mine.logits[0], rtol=0, atol=2e-5)
    requests[1] = tiny.asked_with(requests[0], seed=requests[1].request.seed)
    after, other_batch = traces.moments(model, requests, *row_run(modality, requests, **asked))
    np.testing.assert_array_equal(other_batch[[0, 2]], batch[[0, 2]])
    for moment, changed in zip(steps, after, strict=True):
        np.testing.assert_array_equal(changed.logits[[0, 2]], moment.logits[[0, 2]])
    assert (after[0].logits[1] != steps[0].logits[1]).any()


def test_a_text_that_ends_early_does_not_know_of_one_that_does_not():
    """Loops continue for the least sure row; the others wait unchanged."""
    model, requests = tiny.denoiser(SETTINGS), text_requests((3, 0.0), (12, 0.0), (5, 0.0))

    def run(requests):
        passes = []
        responses = traces.finished(
            model, requests, *row_run("text", requests, **ENDS_EARLY), stop_early=False,
            callback=lambda now: passes.append(now.steps),
        )  # fmt: skip
        return responses, passes[-1]

    batch, most = run(requests)
    alone = [run([request]) for request in requests]
    np.testing.assert_array_equal(batch, np.concatenate([responses for responses, _ in alone]))
    assert min(passes for _, passes in alone) < most < tiny.TEXT_LEN


@pytest.mark.parametrize("modality", ["image", "text"])
def test_a_row_does_not_know_what_others_have_given(modality):
    """An image has given cells; a text has a text block completely given, another not at all."""
    model = tiny.denoiser(SETTINGS)
    if modality == "image":
        requests = [*image_requests(3), tiny.request("image", SETTINGS, 1, words=3, given=0.4)]
        settings, options = image_settings(), {"buckets": (4,)}
    else:
        requests, settings = text_requests((3, 0.0), (5, 0.0)), text_settings()
        given = np.arange(tiny.TEXT_LEN) < tiny.TEXT_BLOCK_LEN
        requests[1] = dataclasses.replace(requests[1], given=given)
        options = {"num_steps": 2}
    plan = traces.plan(requests, settings, **options)
    batch = traces.finished(model, requests, plan, settings, stop_early=False)
    np.testing.assert_array_equal(alone(model, requests, settings, **options), batch)


def test_a_model_of_full_attention_is_sampled_sparsely_if_that_is_asked_for_by_name():
    full = dataclasses.replace(SETTINGS, trained_attention="full")
    asked = [tiny.request("image", full, i, words=3) for i in range(2)]
    settings = traces.settings_of("sparse", "image", full)
    assert settings.preset.truncate and not settings.preset.full_attention
    done = traces.finished(tiny.denoiser(full), asked, traces.plan(asked, settings), settings)
    assert (done != full.image_mask_id).all()


def test_given_tokens_come_back_as_they_were():
    model = tiny.denoiser(SETTINGS)
    requests = [
        tiny.request("image", SETTINGS, i, words=3, given=share)
        for i, share in enumerate((0.5, 1.0, 0.0))
    ]
    responses = traces.finished(model, requests, image_plan(requests), image_settings())
    for row, request in zip(responses, requests, strict=True):
        np.testing.assert_array_equal(row[request.given], request.response[request.given])
        assert (row < SETTINGS.codebook_size).all()


def test_everything_given_is_returned_without_a_step():
    requests = image_requests(3, given=1.0)
    responses = traces.finished(
        tiny.denoiser(SETTINGS), requests, image_plan(requests), image_settings()
    )
    np.testing.assert_array_equal(responses[0], requests[0].response)


# ---------------------------------------------------------------------------------------------
# The end of a text.


def ends_at(model, ids, position):
    """Returns the same model with the id at `position` as its end-of-text."""
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
        twin, requests, plan, settings, callback=lambda now: steps.append(now.steps)
    )[0]
    np.testing.assert_array_equal(stopped[: end + 1], whole[: end + 1])
    # Later tokens are never decoded; they are returned as end-of-text.
    assert (stopped[block_end:] == twin.settings.end_of_text_id).all()
    assert steps[-1] < sum(phase.num_steps for phase in plan)


def test_a_batch_goes_on_until_its_last_row_has_ended():
    """A given end-of-text counts once everything before it is decoded, in every row."""
    model, settings = tiny.denoiser(SETTINGS), text_settings()
    shown, requests = [], text_requests((3, 0.0), (3, 0.0))
    for row, end in ((0, 2), (1, 6)):
        tokens, given = requests[row].response.copy(), np.zeros(tiny.TEXT_LEN, bool)
        tokens[end], given[end] = SETTINGS.end_of_text_id, True
        requests[row] = dataclasses.replace(requests[row], response=tokens, given=given)
    plan = traces.plan(requests, settings, 2)
    traces.finished(model, requests, plan, settings, callback=lambda now: shown.append(now.steps))
    steps, _ = traces.moments(model, requests, plan, settings)
    bounds = np.cumsum([phase.num_steps for phase in plan])[:-1].tolist()
    over = [bound for bound in bounds if all(has_ended(steps[bound], row) for row in (0, 1))]
    assert shown == [0, *(bound for bound in bounds if bound <= over[0])]
    assert not all(has_ended(steps[shown[1]], row) for row in (0, 1))


def has_ended(moment: traces.Moment, row: int) -> bool:
    """Returns whether a row is decoded without gaps up to an end-of-text."""
    for token, at in zip(moment.responses[row, :, 0], moment.decoded_at[row], strict=True):
        if at == state_of.NOT_DECODED:
            return False
        if token == SETTINGS.end_of_text_id:
            return True
    return False


# ---------------------------------------------------------------------------------------------
# As released: codes one by one, chosen by order or by confidence.

CODES = tiny.model_settings(codes_per_token=4, trained_attention="full")


def code_run(requests, seed=0, **asked):
    """Returns (plan, settings, recorded codes and noise) of the dense preset on the code grid."""
    sampling = config.Sampling(grid="code", temperature=0.8, num_steps=5, **asked)
    settings = tiny.step_settings(sampling, CODES, "image")
    given = np.stack([request.given for request in requests])
    plan = presets.plan(sampling, settings, CODES, given, 1)
    rng = np.random.default_rng(seed)
    shape = (sum(part.num_steps for part in plan), *given.shape, 4)
    draws = tiny.Recorded(
        tokens=rng.integers(0, CODES.codebook_size, shape).astype(np.int32),
        sure=rng.gumbel(size=shape).astype(np.float32),
    )
    return plan, settings, draws


def code_requests(*shares):
    return [
        tiny.request("image", CODES, i, words=3 + i, given=share) for i, share in enumerate(shares)
    ]


def steps_apart(plan):
    return [part[i : i + 1] for part in plan for i in range(part.num_steps)]


def responses_by_step(model, requests, plan, settings, **options):
    """Returns the responses after every step [k b l g]."""
    shown = []
    traces.finished(
        model, requests, steps_apart(plan), settings,
        callback=lambda now: shown.append(now.responses), **options,
    )  # fmt: skip
    return np.stack(shown[1:])  # without the initial responses


def test_recorded_codes_come_out_at_the_step_of_the_order():
    """Inpainting too: the order skips the given cells, wherever they are in it."""
    requests = code_requests(0.0, 0.5)
    plan, settings, draws = code_run(requests)
    shown = responses_by_step(tiny.denoiser(CODES), requests, plan, settings, draws=draws)
    grid = CODES.grid_size * CODES.codes_side
    order = sequence.cells_from_codes(
        np.argsort(orders.order("stratified", grid, grid, 42)).reshape(1, grid, grid), 2
    )[0]
    for row, request in enumerate(requests):
        rank = np.argsort(np.argsort(np.where(request.given[:, None], 999, order), axis=None))
        rank = rank.reshape(order.shape)
        counts = orders.counts("shift", 5, int((~request.given).sum()) * 4, 3.0)
        for step, done in enumerate(np.cumsum(counts)):
            fresh = (rank < done) & (rank >= done - counts[step]) & ~request.given[:, None]
            np.testing.assert_array_equal(shown[step, row][fresh], draws.tokens[step, row][fresh])
            still = (rank >= done) & ~request.given[:, None]
            np.testing.assert_array_equal(shown[step, row] == CODES.image_mask_id, still)
        given = request.given
        np.testing.assert_array_equal(shown[-1, row][given], request.response[given])
    known = shown[1] != CODES.image_mask_id
    assert (known.any(axis=-1) & ~known.all(axis=-1)).any(), "cells known in part"


def test_a_cell_is_decoded_when_its_last_code_is():
    requests = code_requests(0.0)
    plan, settings, _ = code_run(requests)
    steps, responses = traces.moments(tiny.denoiser(CODES), requests, steps_apart(plan), settings)
    for moment in steps:
        whole = (moment.responses != CODES.image_mask_id).all(axis=-1)
        np.testing.assert_array_equal(moment.decoded_at != state_of.NOT_DECODED, whole)
    assert (responses < CODES.codebook_size).all()


def test_what_is_predicted_does_not_depend_on_what_is_passed_next_to_it():
    """Compares a plan that predicts few cells per step with one that predicts all."""
    requests, model = code_requests(0.0), tiny.denoiser(CODES)
    plan, settings, _ = code_run(requests)
    all_cells = []
    for part in steps_apart(plan):
        cells = np.concatenate([part.decode, part.rest], axis=-1)
        more = np.zeros((*part.rest.shape, 4), bool)
        candidates = np.concatenate([part.candidates, more], axis=-2)
        nothing = part.rest[..., :0]
        all_cells.append(
            dataclasses.replace(part, decode=cells, candidates=candidates, rest=nothing)
        )
    few, every = (responses_by_step(model, requests, p, settings) for p in (plan, all_cells))
    np.testing.assert_array_equal(few, every)


def test_the_surest_codes_are_committed_with_recorded_noise():
    requests, model = code_requests(0.0, 0.4), tiny.denoiser(CODES)
    plan, settings, draws = code_run(requests, order="confidence", confidence_noise=2.0)
    draws = dataclasses.replace(draws, tokens=None)
    settings = dataclasses.replace(settings, temperature=0.0)
    shown = responses_by_step(model, requests, plan, settings, draws=draws)
    before = np.where(
        np.stack([r.given for r in requests])[..., None],
        np.stack([r.response for r in requests]),
        CODES.image_mask_id,
    )
    for step, (after, part) in enumerate(zip(shown, steps_apart(plan), strict=True)):
        logits = logits_at(model, requests, before, settings)
        shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probability = shifted.max(axis=-1) / shifted.sum(axis=-1)
        sure = np.log(probability) + 2.0 * draws.sure[step]
        for row in range(2):
            masked = np.flatnonzero(before[row] == CODES.image_mask_id)
            ranked = sorted(masked, key=lambda i, row=row, sure=sure: -sure[row].ravel()[i])
            expected = before[row].copy().ravel()
            chosen = ranked[: part.count[0, row]]
            expected[chosen] = logits[row].argmax(axis=-1).ravel()[chosen]
            np.testing.assert_array_equal(after[row].ravel(), expected)
        before = after


def logits_at(model, requests, responses, settings):
    """Returns the logits [b l g v] of all cells of responses, from one full pass."""
    prompt = jax.tree.map(jnp.asarray, tiny.prepare(
        requests, model.settings, with_given=False
    ))  # fmt: skip
    batch, length = shape = responses.shape[:2]
    state = state_of.SamplerState(
        jnp.asarray(responses, jnp.int32),
        jnp.full(shape, state_of.NOT_DECODED),
        state_of.rows_of(tiny.sample_inputs(requests, model.settings, settings), settings),
        None,
        None,
        jnp.int32(0),
    )
    every = jnp.broadcast_to(jnp.arange(length)[None], shape)
    none = jnp.zeros((batch, 0), jnp.int32)
    now = plans.Steps(
        jnp.int32(2), none, every, jnp.ones((*shape, 1), bool), none,
        jnp.zeros(batch, jnp.int32), jnp.float32(0), jnp.float32(1), jnp.float32(1),
        registers=settings.num_registers,
    )  # fmt: skip
    return np.asarray(tiny.quick_jit(sample.step_logits, static_argnames=("settings",))(
        model, state, now, (prompt,), settings=settings
    )[0])  # fmt: skip


def test_whole_cells_may_be_chosen_by_confidence():
    model = tiny.denoiser(tiny.model_settings(codes_per_token=4))
    requests = [tiny.request("image", model.settings, 0, words=3)]
    sampling = config.Sampling(preset="p", order="confidence", num_steps=4)
    settings = tiny.step_settings(sampling, model.settings, "image")
    plan = presets.plan(sampling, settings, model.settings, requests[0].given[None], 1)
    shown = responses_by_step(model, requests, plan, settings)[:, 0] < model.settings.codebook_size
    np.testing.assert_array_equal(shown.all(axis=-1), shown.any(axis=-1))
    expected = np.cumsum(orders.counts("shift", 4, 9, 3.0))
    np.testing.assert_array_equal(shown.all(axis=-1).sum(axis=-1), expected)


@pytest.mark.parametrize("name", ["r", "t", "sparse"])
def test_the_confidence_order_is_refused_where_not_all_cells_are_passed(name):
    sampling = config.Sampling(preset=name, order="confidence")
    settings = tiny.step_settings(sampling, SETTINGS, "image")
    with pytest.raises(config.ConfigError, match="dense, none or p"):
        presets.plan(sampling, settings, SETTINGS, np.zeros((1, 9), bool), 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"cell_passes": 3},
        {"order": "confidence", "preset": "p"},
        {"grid": "code", "preset": "dense"},
    ],
)
def test_passes_inside_a_step_are_refused_where_codes_are_chosen_otherwise(changes):
    sampling = config.Sampling(**{"cell_passes": 2} | changes)
    model = tiny.model_settings(codes_per_token=4)
    settings = tiny.step_settings(sampling, model, "image")
    with pytest.raises(config.ConfigError, match="must divide 4, the codes of a cell"):
        presets.plan(sampling, settings, model, np.zeros((1, 9), bool), 1, seeds=[0])


def of_steps(plan, name):
    """Returns a value of each step of a plan."""
    parts = ((part.num_steps, np.asarray(getattr(part, name))) for part in plan)
    return [one for steps, x in parts for one in (x.tolist() if x.ndim else [x.item()] * steps)]


def test_merged_steps_are_numbered_and_cooled_as_the_steps_that_there_are():
    sampling = config.Sampling(
        num_steps=8, merge_cells=3, registers=4, registers_end=1,
        released=config.ReleasedSampling(temperature_schedule="linear", temperature_end=0.5),
    )  # fmt: skip
    settings = tiny.step_settings(sampling, FOUR_REGISTERS, "image")
    plan = presets.plan(sampling, settings, SETTINGS, np.zeros((2, 9), bool), 1)

    assert of_steps(plan, "count") == [[3, 3]] * 3
    assert of_steps(plan, "block") == [2, 3, 4]
    assert of_steps(plan, "temperature") == [1.0, 0.75, 0.5]
    assert of_steps(plan, "registers") == [4, 2, 1]
    everything_known = np.ones((2, 9), bool)
    assert presets.plan(sampling, settings, SETTINGS, everything_known, 1) == []


MERGED = config.Sampling(
    num_steps=8, merge_cells=2, order_seed=-1, registers=3, registers_end=1,
    guidance_interval=(0.0, 0.25),
    released=config.ReleasedSampling(
        temperature_schedule="linear", temperature_end=0.1, guidance_schedule="linear",
        guidance_end=0.2,
    ),
)  # fmt: skip


def merged_run(sampling, shares):
    """Returns requests with a share of given cells, their plan and its settings."""
    requests = [
        tiny.request("image", SETTINGS, i, words=3, given=share) for i, share in enumerate(shares)
    ]
    settings = tiny.step_settings(sampling, FOUR_REGISTERS, "image")
    given = np.stack([request.given for request in requests])
    seeds = [one.request.seed for one in requests]
    return requests, presets.plan(sampling, settings, SETTINGS, given, 1, seeds), settings


@pytest.mark.parametrize("name", ["registers", "temperature", "guidance", "guided"])
def test_where_steps_are_merged_they_change_as_those_of_a_whole_image(name):
    """With schedules of the longest row, a row would depend on what others have given."""
    alone, together = (
        of_steps(merged_run(MERGED, shares)[1], name) for shares in ((0.6,), (0.6, 0.0))
    )
    assert (len(alone), len(together)) == (2, 4)
    assert alone == together[:2]
    assert len(set(together)) > 1


@pytest.mark.slow
def test_where_steps_are_merged_a_row_does_not_know_what_others_have_given():
    model = tiny.denoiser(SETTINGS)
    sampling = dataclasses.replace(MERGED, guidance=1.0)
    (alone, drawn), (together, both) = (
        traces.moments(model, *merged_run(sampling, shares)) for shares in ((0.6,), (0.6, 0.0))
    )
    np.testing.assert_array_equal(both[:1], drawn)
    for moment, other in zip(alone, together, strict=False):
        np.testing.assert_allclose(other.logits[:1], moment.logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "changes", [{"order": "confidence", "preset": "p"}, {"grid": "code", "preset": "dense"}]
)
def test_steps_are_not_merged_where_codes_are_chosen_otherwise(changes):
    sampling = config.Sampling(merge_cells=4, **changes)
    model = tiny.model_settings(codes_per_token=4)
    settings = tiny.step_settings(sampling, model, "image")
    with pytest.raises(config.ConfigError, match="merge_cells=4 merges steps over whole cells"):
        presets.plan(sampling, settings, model, np.zeros((1, 9), bool), 1, seeds=[0])


@pytest.mark.parametrize("name", ["dense", pytest.param("p", marks=pytest.mark.slow)])
def test_outside_its_interval_guidance_does_not_act(name):
    """Without a cache, the dropped rows are not even passed."""
    model, requests = tiny.denoiser(SETTINGS), image_requests(3, 6)
    given = np.stack([request.given for request in requests])
    asked = {"preset": name, "guidance": 3.0, "num_steps": 4}

    def moments(**more):
        sampling = config.Sampling(**asked, **more)
        settings = tiny.step_settings(sampling, SETTINGS, "image")
        plan = presets.plan(sampling, settings, SETTINGS, given, 1)
        return traces.moments(model, requests, plan, settings)[0]

    part, whole, never = (
        moments(guidance_interval=interval) for interval in ((0.5, 0.5), (0.0, 1.0), (0.0, 0.0))
    )
    asked["guidance"] = 0.0
    without = moments()
    np.testing.assert_allclose(part[0].logits, without[0].logits, rtol=0, atol=2e-5)
    for step in range(4):
        np.testing.assert_array_equal(never[step].responses, without[step].responses)
        np.testing.assert_allclose(never[step].logits, without[step].logits, rtol=0, atol=2e-5)
    assert np.abs(part[0].logits - whole[0].logits).max() > 0.1
    # The second step is guided; the first drew the same, because its logits are equal.
    np.testing.assert_array_equal(part[1].responses, without[1].responses)
    assert np.abs(part[1].logits - without[1].logits).max() > 0.1


# ---------------------------------------------------------------------------------------------
# As released: the rows of an edit.


@pytest.mark.parametrize(
    ("edit_guidance", "cells", "features", "words"),
    [
        ("source", 9, 0, [False, True]),
        ("source_only", 9, 0, [False, False]),
        ("no_source", 0, tiny.VISION.num_tokens, [True, True]),
        ("no_image", 0, 0, [True, True]),
        ("no_text", 9, tiny.VISION.num_tokens, [False, False]),
    ],
)
def test_the_second_row_of_an_edit_keeps_what_is_asked_for(edit_guidance, cells, features, words):
    asked = tiny.request("image", SETTINGS, 0, words=3, vision=True, source=True)
    prompt = tiny.prepare([asked], SETTINGS, 3, edit_guidance=edit_guidance)
    text, image = prompt.understanding, prompt.generation
    assert (image.tags.block[1] != PAD_BLOCK).sum() == cells
    assert (text.index[1] != NO_FEATURE).sum() == features
    known = text.tokens[1][text.tags.block[1] != PAD_BLOCK] != SETTINGS.text_mask_id
    kept = [part for part in asked.parts if isinstance(part, sequence.Text) and part.keep]
    said = [part for part in asked.parts if isinstance(part, sequence.Text) and not part.keep]
    assert known.sum() == sum(
        len(part.ids) for parts, stays in zip((said, kept), words, strict=True) if stays
        for part in parts
    )  # fmt: skip


@pytest.mark.parametrize("edit_guidance", prompts.EDIT_DROPS)
def test_the_second_row_pushes_or_is_averaged_with(edit_guidance):
    settings = image_settings(guidance=0.7, guidance_image=0.4, has_source=True)
    settings = dataclasses.replace(settings, edit_guidance=edit_guidance)
    dropped, second, full = logits = np.random.default_rng(0).normal(size=(3, 1, 2, 1, 5))
    pulled = full + 0.4 * (full - second)
    if edit_guidance in ("no_source", "no_image"):
        pulled = (full + 0.4 * second) / 1.4
    expected = pulled + 0.7 * (pulled - dropped)
    inputs = tiny.sample_inputs([tiny.request("image", SETTINGS, 0, words=3)], SETTINGS, settings)
    rows = state_of.rows_of(inputs, settings)
    now = tiny.step_at(jnp.zeros((1, 2), jnp.int32))
    found = draw.guided(jnp.asarray(logits, jnp.float32), rows, now, settings)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    now = dataclasses.replace(now, guidance=jnp.float32(0))
    nothing = draw.guided(jnp.asarray(logits, jnp.float32), rows, now, settings)
    np.testing.assert_allclose(nothing, full, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_images_may_be_given_as_views():
    """A row with two views together with a row with a plain image, and the latter alone."""
    model = tiny.denoiser(SETTINGS)
    plain = tiny.request("image", SETTINGS, 0, words=3, vision=True)
    rng = np.random.default_rng(0)
    views = rng.integers(0, 256, (2, *plain.pixels.shape), dtype=np.uint8)
    index = np.array([0, 5, tiny.VISION.num_tokens + 1])
    parts = (sequence.VisionTokens(3, index, 2 * tiny.VISION.num_tokens), *plain.parts[2:])
    several = dataclasses.replace(plain, parts=parts, pixels=None, views=(views,))
    prompt = tiny.prepare([plain, several], SETTINGS)
    assert prompt.pixels.shape == (2, 2, *plain.pixels.shape)
    alone = tiny.prepare([plain], SETTINGS)
    first = []
    for laid_out in (prompt, alone):
        index = laid_out.understanding.index[0]
        first.append(np.asarray(model.see(laid_out.pixels))[0][index[index != NO_FEATURE]])
    assert len(first[0]) == tiny.VISION.num_tokens
    np.testing.assert_allclose(*first, rtol=0, atol=1e-5)
    seen = np.asarray(model.see(prompt.pixels))[1][prompt.understanding.index[1, :3]]
    expected = np.asarray(model.see(views)).reshape(-1, SETTINGS.width)[parts[0].index]
    np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------
# Programs.


def asked_of(request, seed):
    """A similar request with other words, seed, temperature and guidance scale."""
    words = tiny.request("image", SETTINGS, seed, words=4)
    other = dataclasses.replace(request, parts=words.parts)
    return tiny.asked_with(other, seed=seed, temperature=0.1 * seed, guidance=1.0 + seed)


def test_a_second_request_in_the_same_bucket_compiles_nothing():
    """Other words, another length within the bucket, other seeds, temperatures and scales."""
    model = tiny.denoiser(dataclasses.replace(SETTINGS, num_layers=2, dual_tower_layers=0))
    settings, requests = image_settings(guidance=1.0), image_requests(3, 5)
    plan = traces.plan(requests, settings, max_phases=2)
    assert len(plan) == 2

    def traced(function, most, **options):
        # The function without its compiled program, so that earlier compilations do not count.
        bare = function.__wrapped__

        def once(*args, **named):
            return bare(*args, **named)

        once.__name__ = bare.__name__  # chex counts by name
        return jax.jit(chex.assert_max_traces(once, n=most), **options)

    chex.clear_trace_counter()
    with traces._patched(
        prefill=traced(calls.prefill, 1, static_argnames=("settings", "capacity")),
        run_phase=traced(sample.run_phase, len(plan), static_argnames=("settings",)),
    ):
        first = sample.sample(
            model, tiny.sample_inputs(requests, model.settings, settings), plan, settings=settings
        )
        others = [asked_of(request, i) for i, request in enumerate(requests, start=7)]
        stronger = image_settings(guidance=3.0)
        plan = traces.plan(requests, stronger, max_phases=2)
        second = sample.sample(
            model, tiny.sample_inputs(others, model.settings, stronger), plan, settings=stronger
        )
        assert (first != second).any()
        long = [tiny.request("image", SETTINGS, 1, words=40)] * 2
        with pytest.raises(AssertionError, match="traced"):
            sample.sample(
                model, tiny.sample_inputs(long, model.settings, settings), plan, settings=settings
            )


# Every program of a request, and text that it must contain.
PROGRAMS = {
    calls: {
        "prefill": "dot_general", "pass_prompt": "dot_general", "gather": "dynamic_update_slice",
        "apart": "slice",
    },
    sample: {"run_phase": "dot_general"},
    vq: {"_encode": "conv_general_dilated", "decode": "conv_general_dilated"},
}  # fmt: skip


@pytest.fixture
def ran(monkeypatch):
    """The programs that ran, in order; each is searched for host callbacks."""
    names = []

    def watched(name, function, holds):
        def run(*args, **options):
            names.append(name)
            program = str(function.trace(*args, **options).jaxpr)
            assert holds in program
            assert "callback" not in program
            return function(*args, **options)

        return run

    for module, programs in PROGRAMS.items():
        for name, holds in programs.items():
            monkeypatch.setattr(module, name, watched(name, getattr(module, name), holds))
    return names


@pytest.mark.parametrize("modality", ["image", "text"])
def test_a_request_runs_a_prefill_and_a_program_a_phase_and_asks_the_host_nothing(modality, ran):
    model = tiny.denoiser(SETTINGS)
    requests = [tiny.request(modality, SETTINGS, 0, words=3)]
    settings = traces.settings_of("sparse", modality, SETTINGS)
    plan = traces.plan(requests, settings, max_phases=2) if modality == "image" else traces.plan(
        requests, settings, num_steps=2
    )  # fmt: skip
    inputs = tiny.sample_inputs(requests, model.settings, settings)
    sample.sample(model, inputs, plan, settings=settings, stop_early=False)
    assert ran == ["prefill", *["run_phase"] * len(plan)]


@pytest.mark.parametrize("guidance", [0.0, 1.0])
def test_an_image_of_the_pipeline_runs_these_programs_and_one_that_decodes_it(guidance, ran):
    """With guidance, the dropped and the full row are passed apart; none is passed twice."""
    given = stand_ins.settings(sampling={"num_steps": 8, "guidance": guidance})
    codec = image_codec.ImageCodec("scenes", given.model)
    codec.encode = stand_ins.Codec().encode  # uses an encoder
    model = tiny.denoiser(given.model)
    pipe = pipeline.SparseLaViDa(model, given, stand_ins.prompts(given), codec)
    for first in (True, False):
        phases, before = [], len(ran)
        pipe.generate("a red circle", layout=False, callback=phases.append)
        del phases[0]  # before the first step
        begin = ["pass_prompt"] * 2 if guidance else ["prefill", "apart"]
        own = [*(begin if first else []), "gather", *["run_phase"] * len(phases), "decode"]
        assert ran[before:] == own
        assert len(phases) > 1


# ---------------------------------------------------------------------------------------------
# Settings of single rows or steps.


def test_rows_have_temperature_and_guidance_of_their_own():
    """Same as sampling each alone with these settings; and with one compiled program."""
    model, requests = tiny.denoiser(SETTINGS), image_requests(3, 12, 5)
    own = [(0.0, 0.5), (2.0, 3.0), (0.4, 0.0)]
    asked = [
        tiny.asked_with(request, temperature=t, guidance=g)
        for request, (t, g) in zip(requests, own, strict=True)
    ]
    settings = image_settings(guidance=1.0)
    batch = traces.finished(model, asked, traces.plan(asked, settings), settings)
    for i, (temperature, guidance) in enumerate(own):
        apart = dataclasses.replace(settings, temperature=temperature, guidance=guidance)
        np.testing.assert_array_equal(alone(model, requests[i : i + 1], apart)[0], batch[i])
    plain = traces.finished(model, requests, traces.plan(requests, settings), settings)
    assert (plain != batch).any(axis=(1, 2)).all()


@pytest.mark.slow
def test_registers_that_fall_are_those_that_training_knows():
    """Every step predicts what training with its number of registers predicts."""
    model, requests = tiny.denoiser(SETTINGS), image_requests(3, 12)
    sampling = config.Sampling(num_steps=5, temperature=0.8, registers=4, registers_end=1)
    settings = tiny.step_settings(sampling, FOUR_REGISTERS, "image")
    given = np.stack([request.given for request in requests])
    plan = presets.plan(sampling, settings, SETTINGS, given, 1)
    counts = of_steps(plan, "registers")
    assert counts == [4, 4, 2, 2, 1]
    steps, _ = traces.moments(model, requests, plan, settings)
    for number, moment in zip(counts, steps, strict=True):
        twin = nnx.clone(model)
        twin.settings = dataclasses.replace(SETTINGS, num_registers=number)
        (trained,) = traces.training_logits(twin, requests, [moment], settings)
        np.testing.assert_allclose(moment.logits, trained, rtol=0, atol=2e-5)


def test_every_image_may_have_an_order_of_its_own_seed():
    model, requests = tiny.denoiser(SETTINGS), image_requests(3, 12)
    sampling = config.Sampling(num_steps=9, order_seed=-1)
    settings = tiny.step_settings(sampling, SETTINGS, "image")
    given = np.stack([request.given for request in requests])
    plan = presets.plan(sampling, settings, SETTINGS, given, 1, seeds=[5, 6])
    decoded = np.concatenate([part.decode[..., 0] for part in plan])
    for row, seed in enumerate((5, 6)):
        np.testing.assert_array_equal(decoded[:, row], orders.order("stratified", 3, 3, seed))
    with pytest.raises(ValueError, match="needs the seed of every row"):
        presets.plan(sampling, settings, SETTINGS, given, 1)
    assert (traces.finished(model, requests, plan, settings) < SETTINGS.codebook_size).all()


@pytest.mark.parametrize(
    ("asked", "blocks"),
    [("left_to_right", [0, 1, 2]), ("right_to_left", [2, 1, 0]), ("1, 2, 0", [1, 2, 0])],
)
def test_text_blocks_are_decoded_in_the_order_asked_for(asked, blocks):
    """Sampling also agrees with training, whatever the order."""
    model, requests = tiny.denoiser(SETTINGS), text_requests((3, 0.0), (5, 0.3))
    plan, settings = text_run(requests, text=dict(steps=2, temperature=0.8, block_order=asked))
    steps, responses = traces.moments(model, requests, plan, settings)
    assert (responses != SETTINGS.text_mask_id).all()
    for moment, block in zip(steps[::2], blocks, strict=True):
        assert set(np.flatnonzero(moment.masked[0]) // tiny.TEXT_BLOCK_LEN) == {block}
    trained = traces.training_logits(model, requests, steps, settings)
    for moment, logits in zip(steps, trained, strict=True):
        np.testing.assert_allclose(moment.logits, logits, rtol=0, atol=2e-5)


def test_text_blocks_that_do_not_fit_the_response_are_refused():
    with pytest.raises(config.ConfigError, match="name each of 0 to 2 once"):
        text_run(text_requests((3, 0.0)), text=dict(block_order="0,1"))
    with pytest.raises(config.ConfigError, match="one order, so give a seed of 0 or more"):
        text_run(text_requests((3, 0.0)), order_seed=-1, text=dict(block_order="random"))


def test_of_text_too_only_the_most_probable_may_be_drawn():
    """At high temperature the result is still greedy if only one token may be drawn."""
    model, requests = tiny.denoiser(SETTINGS), text_requests((3, 0.0), (5, 0.3))
    random = dict(steps=2, confidence="random")
    hot = random | dict(temperature=3.0)
    _, cold = text_run(requests, tiny.TEXT_LEN, text=random)
    plan, free = text_run(requests, tiny.TEXT_LEN, text=hot)
    drawn = [
        traces.finished(model, requests, plan, settings)
        for settings in (
            cold,
            text_run(requests, tiny.TEXT_LEN, text=hot | dict(top_k=1))[1],
            text_run(requests, tiny.TEXT_LEN, text=hot | dict(top_p=1e-6))[1],
            free,
        )
    ]
    np.testing.assert_array_equal(drawn[1], drawn[0])
    np.testing.assert_array_equal(drawn[2], drawn[0])
    assert (drawn[3] != drawn[0]).any()


# ---------------------------------------------------------------------------------------------
# As released: text.


def text_run(requests, block_len=tiny.TEXT_BLOCK_LEN, **asked):
    """Returns (plan, settings) of a text."""
    sampling = config.build(config.Sampling, asked)
    settings = tiny.step_settings(sampling, SETTINGS, "text")
    given = np.stack([request.given for request in requests])
    return presets.plan(sampling, settings, SETTINGS, given, block_len), settings


def wanting_masks(plan):
    """Noise with which the mask token wins every draw of the first step."""
    steps = sum(part.num_steps for part in plan)
    noise = np.zeros((steps, 1, tiny.TEXT_LEN, 1, SETTINGS.vocab_size), np.float32)
    noise[0, ..., SETTINGS.text_mask_id] = 1e6
    return tiny.Recorded(gumbel=noise)


def test_text_never_becomes_a_mask_again():
    requests = text_requests((3, 0.0))
    plan, settings = text_run(requests, preset="dense", text=dict(temperature=0.5, steps=2))
    shown = responses_by_step(
        tiny.denoiser(SETTINGS), requests, plan, settings, draws=wanting_masks(plan),
        stop_early=False,
    )  # fmt: skip
    left = (shown[:, 0, :, 0] == SETTINGS.text_mask_id).sum(axis=-1)
    np.testing.assert_array_equal(left, [10, 8, 6, 4, 2, 0])


def test_as_released_a_drawn_mask_waits_for_a_later_step():
    requests = text_requests((3, 0.0))
    asked = {"preset": "dense", "text": {"temperature": 0.5, "steps": 2}}
    plan, settings = text_run(requests, released=dict(text_behaviour=True), **asked)
    shown = responses_by_step(
        tiny.denoiser(SETTINGS), requests, plan, settings, draws=wanting_masks(plan)
    )
    left = (shown[:, 0, :, 0] == SETTINGS.text_mask_id).sum(axis=-1)
    np.testing.assert_array_equal(left, [12, 10, 8, 6, 4, 2])
    assert (shown[3, 0, : 2 * tiny.TEXT_BLOCK_LEN] == SETTINGS.text_mask_id).sum() == 2


def test_as_released_nothing_ends_at_end_of_text():
    model, requests = tiny.denoiser(SETTINGS), text_requests((3, 0.0))
    plan, settings = text_run(
        requests, preset="dense", text=dict(steps=2), released=dict(text_behaviour=True)
    )
    whole = traces.finished(model, requests, plan, settings)
    twin = ends_at(model, whole[0], 0)
    np.testing.assert_array_equal(traces.finished(twin, requests, plan, settings), whole)
    # Without released behaviour it ends there, in a batch that decodes the same tokens.
    ended = dataclasses.replace(settings, released=False)
    assert (traces.finished(twin, requests, plan, ended) == whole[0, 0, 0]).all()


def test_the_steps_of_a_text_block_may_be_a_share_of_its_tokens():
    requests = text_requests((3, 0.0))
    plan, _ = text_run(requests, preset="dense", text=dict(step_ratio=0.5))
    assert [part.num_steps for part in plan] == [tiny.TEXT_BLOCK_LEN // 2] * 3
    plan, _ = text_run(requests, preset="dense", text=dict(step_ratio=0.01))
    assert [part.num_steps for part in plan] == [1] * 3


def seen_texts():
    """Answers about an image in the prompt, as features and cells, with and without gaps."""
    return [
        tiny.request("text", SETTINGS, i, words=n, vision=True, source=True, given=share)
        for i, (n, share) in enumerate(((3, 0.0), (5, 0.3)))
    ]


@pytest.mark.parametrize("name", ["fast_dllm_prefix", "fast_dllm_dual"])
def test_the_first_step_of_a_text_block_is_a_full_pass(name):
    model, requests = tiny.denoiser(SETTINGS), seen_texts()
    plan, settings = text_run(requests, block_len=6, text=dict(preset=name, steps=2))
    steps, _ = traces.moments(model, requests, plan, settings)
    refreshing = of_steps(plan, "refreshes")
    assert refreshing == [True, False] * 2
    checked = 0
    for moment, refresh in zip(steps, refreshing, strict=True):
        if refresh:
            now = full_pass(model, requests, moment)
            np.testing.assert_allclose(moment.logits, now, rtol=0, atol=2e-5)
            checked += moment.masked.sum()
    assert checked > 12


def full_pass(model, requests, moment):
    """Returns the predictions of a full pass for the masked tokens of a moment."""
    asked = [
        dataclasses.replace(
            r, response=moment.responses[i], given=moment.decoded_at[i] != state_of.NOT_DECODED
        )
        for i, r in enumerate(requests)
    ]
    plan, settings = text_run(asked, tiny.TEXT_LEN, preset="dense", text=dict(steps=1))
    steps, _ = traces.moments(model, asked, plan, settings)
    return steps[0].logits * moment.masked[..., None, None]


def test_with_one_text_block_both_caches_hold_the_prompt_and_nothing_else():
    model, requests = tiny.denoiser(SETTINGS), text_requests((3, 0.0), (6, 0.0))
    found = []
    for name in ("fast_dllm_prefix", "fast_dllm_dual"):
        plan, settings = text_run(requests, tiny.TEXT_LEN, text=dict(preset=name, steps=4))
        found.append(traces.moments(model, requests, plan, settings)[0])
    for prefix, dual in zip(*found, strict=True):
        np.testing.assert_array_equal(prefix.responses, dual.responses)
        np.testing.assert_allclose(prefix.logits, dual.logits, rtol=0, atol=2e-5)


def test_the_dual_cache_keeps_later_text_blocks_as_they_were():
    """The prefix cache instead passes them again, so they see newly decoded tokens."""
    model, requests = tiny.denoiser(SETTINGS), text_requests((3, 0.0))
    steps = {}
    for name in ("fast_dllm_prefix", "fast_dllm_dual"):
        plan, settings = text_run(requests, text=dict(preset=name, steps=2))
        steps[name] = traces.moments(model, requests, plan, settings)[0]
    first, second = (list(pair) for pair in zip(*(s[:2] for s in steps.values()), strict=True))
    np.testing.assert_allclose(first[0].logits, first[1].logits, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(second[0].responses, second[1].responses)
    assert np.abs(second[0].logits - second[1].logits).max() > 1e-4


def test_a_prompt_cached_alone_does_not_see_the_response():
    """In the first step this is the only difference from the dense preset."""
    model, requests = tiny.denoiser(SETTINGS), seen_texts()
    first = {}
    for name in ("prefix", "dense"):
        plan, settings = text_run(requests, text=dict(preset=name, steps=2))
        first[name] = traces.moments(model, requests, plan, settings)[0][0]
    np.testing.assert_array_equal(first["prefix"].masked, first["dense"].masked)
    assert np.abs(first["prefix"].logits - first["dense"].logits).max() > 1e-3


def test_sure_text_blocks_end_early():
    """As many passes as the rule needs, in one loop, and no token remains masked."""
    model, requests = tiny.denoiser(SETTINGS), text_requests((3, 0.0), (5, 0.4))
    for asked, passes in (
        ({"text": {"commit": "factor", "factor": 1e6}}, 3),
        ({"text": {"commit": "threshold", "threshold": 0.0}}, 3),
        ({"text": {"commit": "threshold", "threshold": 1.0}}, tiny.TEXT_LEN),
    ):
        plan, settings = text_run(requests, preset="dense", **asked)
        done = []
        responses = traces.finished(
            model, requests, plan, settings, stop_early=False,
            callback=lambda now, seen=done: seen.append(now.steps),
        )  # fmt: skip
        assert done[-1] == passes
        assert (responses != SETTINGS.text_mask_id).all()


def test_random_confidence_is_the_recorded_one():
    model, requests = tiny.denoiser(SETTINGS), text_requests((3, 0.0))
    plan, settings = text_run(
        requests, preset="dense", text=dict(steps=tiny.TEXT_BLOCK_LEN, confidence="random")
    )
    sure = np.random.default_rng(0).random((tiny.TEXT_LEN, 1, tiny.TEXT_LEN, 1))
    sure = np.broadcast_to(sure[:1], sure.shape).astype(np.float32)
    shown = responses_by_step(
        model, requests, plan, settings, draws=tiny.Recorded(sure=sure), stop_early=False
    )
    masked = shown[:, 0, :, 0] == SETTINGS.text_mask_id
    decoded_in = (masked.sum(axis=0)).reshape(-1, tiny.TEXT_BLOCK_LEN)
    expected = np.argsort(np.argsort(-sure[0, 0, :, 0].reshape(-1, tiny.TEXT_BLOCK_LEN)))
    expected = expected + tiny.TEXT_BLOCK_LEN * np.arange(len(expected))[:, None]
    np.testing.assert_array_equal(decoded_in, expected)


# ---------------------------------------------------------------------------------------------
# Refusals.


def test_a_plan_for_another_batch_is_refused():
    with pytest.raises(ValueError, match="the plan is for 2 rows, got 1 requests"):
        sample.sample(
            tiny.denoiser(SETTINGS),
            tiny.sample_inputs(image_requests(3), SETTINGS, image_settings()),
            image_plan(image_requests(3, 4)),
            settings=image_settings(),
        )


def test_responses_of_different_length_are_refused():
    requests = image_requests(3, 4)
    requests[1] = dataclasses.replace(
        requests[1], response=requests[1].response[:4], given=requests[1].given[:4]
    )
    with pytest.raises(ValueError, match="response"):
        sample.sample(
            tiny.denoiser(SETTINGS),
            tiny.sample_inputs(requests, SETTINGS, image_settings()),
            image_plan(image_requests(3, 4)),
            settings=image_settings(),
        )
