# SPDX-License-Identifier: Apache-2.0
"""Corruption, blocks and batches: structure, refusals, and a loss that falls."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import traces

from sparse_lavida_jax import config, diffusion, orders
from sparse_lavida_jax.data import released_objective
from sparse_lavida_jax.data.batch import RowShape
from sparse_lavida_jax.data.corrupted_rows import CorruptedRow
from sparse_lavida_jax.diffusion import ABSENT
from sparse_lavida_jax.sequence import Blank, LearnedText, Response, Source, Text, VisionTokens
from sparse_lavida_jax.tags import GIVEN_BLOCK, NO_CELL, NO_EMBEDDING, NO_FEATURE, PROMPT_BLOCK
from sparse_lavida_jax.training.loss import weighted_cross_entropy
from sparse_lavida_jax.visibility import PAD_BLOCK

LENGTH = 16
GIVEN = np.isin(np.arange(LENGTH), [0, 5, 6, 15])
NONE_GIVEN = np.zeros(LENGTH, bool)
BLOCK_LEN = 4


# ---------------------------------------------------------------------------------------------
# Time and blocks.


def test_an_unknown_time_policy_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'linear' is unknown: use uniform, cosine, logit_normal"):
        diffusion.time_from_uniform("linear", 0.5)


@pytest.mark.parametrize("given", [NONE_GIVEN, GIVEN])
@pytest.mark.parametrize("weighting", ["1/t", "mean"])
def test_uniform_blocks_mask_at_least_one_token_that_is_not_given(given, weighting):
    settings = config.Diffusion(
        blocks="uniform", num_clean_blocks=3, num_masked_blocks=2, weighting=weighting
    )
    seen = set()
    for seed in range(200):
        blocks = diffusion.uniform_blocks(np.random.default_rng(seed), given, settings)
        assert blocks.masked.any()
        assert not (blocks.masked & given).any()
        assert (blocks.block[given] == GIVEN_BLOCK).all()
        clean, masked = blocks.block[~blocks.masked], blocks.block[blocks.masked]
        assert set(clean) <= {1, 2, 3}
        assert set(masked) <= {4, 5}
        assert blocks.masked_blocks == tuple(sorted(set(masked)))
        assert blocks.num_clean == 3
        seen |= set(blocks.block.tolist())
        if weighting == "mean":
            np.testing.assert_array_equal(blocks.weight, blocks.masked)
            assert blocks.total == blocks.masked.sum()
    assert seen == {1, 2, 3, 4, 5}


def plan_blocks(seed, given, *, num_masked_blocks, num_registers, weighting="1/t"):
    """Returns the blocks drawn from a plan, with the order and the sizes of the plan."""
    order = orders.random_order(4, 4, seed)
    order = order[~given[order]]
    sizes = orders.counts("shift", 6, len(order), 3.0)
    settings = config.Diffusion(num_masked_blocks=num_masked_blocks, weighting=weighting)
    rng = np.random.default_rng(seed)
    blocks = diffusion.schedule_blocks(rng, order, sizes, given, settings, num_registers)
    return blocks, order, sizes


@pytest.mark.parametrize("given", [NONE_GIVEN, GIVEN])
@pytest.mark.parametrize("num_masked_blocks", [1, 3, 8])
def test_schedule_blocks_are_what_a_plan_has_decoded_and_whole_steps_after_it(
    given, num_masked_blocks
):
    num_registers, was_merged = 4, set()
    for seed in range(60):
        blocks, order, sizes = plan_blocks(
            seed, given, num_masked_blocks=num_masked_blocks, num_registers=num_registers
        )
        step_of = np.full(LENGTH, -1)
        step_of[order] = np.repeat(np.arange(len(sizes)), sizes)
        held = [np.flatnonzero(blocks.block == number) for number in blocks.masked_blocks]
        steps = [sorted(set(step_of[inside].tolist())) for inside in held]
        step, stop = steps[0][0], steps[-1][-1] + 1
        first = blocks.masked_blocks[0] - step  # block of the plan's first step
        # Whole consecutive steps from the current one on.
        assert [s for some in steps for s in some] == list(range(step, stop))
        assert all(
            len(inside) == sizes[some].sum() for inside, some in zip(held, steps, strict=True)
        )
        assert blocks.masked_blocks == tuple(range(first + step, first + step + len(held)))
        assert blocks.num_clean == first + step - 1
        assert first > GIVEN_BLOCK or not given.any()
        np.testing.assert_array_equal(blocks.masked, (step_of >= step) & (step_of < stop))
        # Earlier tokens are clean since their step, later ones are left out.
        assert (blocks.block[given] == GIVEN_BLOCK).all()
        done = (step_of >= 0) & (step_of < step)
        np.testing.assert_array_equal(blocks.block[done], first + step_of[done])
        assert (blocks.block[step_of >= stop] == ABSENT).all()
        assert len(held) == num_masked_blocks or stop == len(sizes) <= LENGTH
        merged = any(len(some) > 1 for some in steps)
        was_merged.add(merged)
        if merged:
            assert all(len(inside) >= num_registers for inside in held[:-1])
        np.testing.assert_allclose(blocks.weight.sum(), len(order))
        assert blocks.total == len(order)
    assert was_merged == {False, True}


def test_mean_weighting_is_the_mean_over_the_kept_tokens():
    blocks, _, _ = plan_blocks(
        0, NONE_GIVEN, num_masked_blocks=2, num_registers=2, weighting="mean"
    )
    np.testing.assert_array_equal(blocks.weight, blocks.masked)
    assert blocks.total == blocks.masked.sum()


@pytest.mark.parametrize("given", [NONE_GIVEN, GIVEN])
def test_text_blocks_are_clean_before_the_current_one_and_absent_after_it(given):
    currents = set()
    for seed in range(60):
        blocks = diffusion.semi_autoregressive_blocks(
            np.random.default_rng(seed), 12, BLOCK_LEN, 3, given, config.Diffusion()
        )
        (number,) = blocks.masked_blocks
        current = {int(p) // BLOCK_LEN for p in np.flatnonzero(blocks.masked)}
        assert len(current) == 1
        start = current.pop() * BLOCK_LEN
        currents.add(start)
        free = np.flatnonzero(~given)
        before, after = free[free < start], free[free >= start + BLOCK_LEN]
        assert (blocks.block[before] >= 1 + given.any()).all()
        assert (blocks.block[before] < number).all()
        assert (blocks.block[after] == ABSENT).all()
        inside = free[(free >= start) & (free < start + BLOCK_LEN)]
        assert (blocks.block[inside[blocks.masked[inside]]] == number).all()
        # Text blocks before the current one have earlier steps, in order.
        steps = [blocks.block[before[before // BLOCK_LEN == b]] for b in range(start // BLOCK_LEN)]
        assert all(max(a) < min(b) for a, b in itertools.pairwise(steps))
        assert blocks.num_clean == number - 1
        assert blocks.total == (~given[:12]).sum()
        np.testing.assert_allclose(blocks.weight.sum(), blocks.total)
    assert currents == {0, 4, 8}


@pytest.mark.parametrize(
    ("count", "steps", "sizes"), [(8, 3, [3, 3, 2]), (2, 5, [1, 1]), (4, 1, [4])]
)
def test_even_split_gives_the_remainder_to_the_earliest_steps(count, steps, sizes):
    np.testing.assert_array_equal(diffusion.even_split(count, steps), sizes)


# ---------------------------------------------------------------------------------------------
# Rows and batches.


def a_row(modality, *, full_attention=False, codes_per_token=4, num_registers=2):
    """Returns a row whose response has clean, masked and absent tokens."""
    settings = tiny.model_settings(codes_per_token=codes_per_token, num_registers=num_registers)
    asked = tiny.request(modality, settings, 0, words=3, source=True)
    length = len(asked.given)
    block = np.resize([1, 2, 3, 4, ABSENT], length).astype(np.int32)
    masked = block > 2
    blocks = diffusion.Blocks(block, masked, 2, (3, 4), np.where(masked, 0.5, 0.0), 7.0)
    prompt = tiny.sample_input(asked, settings)
    row = CorruptedRow(
        prompt, asked.response, modality, blocks, settings, full_attention=full_attention
    )
    return settings, asked, prompt, blocks, row


@pytest.mark.parametrize("modality", ["image", "text"])
def test_a_row_holds_prompt_clean_masked_tokens_and_registers_of_each_masked_block(modality):
    settings, asked, prompt, blocks, row = a_row(modality)
    text, image = row.understanding, row.generation
    own, other = (text, image) if modality == "text" else (image, text)
    in_prompt = prompt.ids if modality == "text" else prompt.codes
    there = prompt.codes if modality == "text" else prompt.ids
    np.testing.assert_array_equal(other.tokens, there)
    assert not other.block.any()
    here = np.flatnonzero(blocks.block != ABSENT)
    n, m = len(in_prompt), settings.num_registers
    assert len(own.block) == n + len(here) + 2 * m
    np.testing.assert_array_equal(own.block[:n], PROMPT_BLOCK)
    mask_id = settings.text_mask_id if modality == "text" else settings.image_mask_id
    register_id = settings.text_register_id if modality == "text" else settings.image_register_id
    for slot, position in enumerate(here, n):
        token = asked.response[position] if modality == "image" else asked.response[position, 0]
        expected = mask_id if blocks.masked[position] else token
        assert (own.tokens[slot] == expected).all()
        assert (own.target[slot] == token).all()
        assert own.block[slot] == blocks.block[position]
        assert own.position[slot] == prompt.response_position + position
        assert own.weight[slot] == blocks.weight[position]
        assert own.index[slot] == (position if modality == "image" else NO_CELL)
    registers = slice(n + len(here), None)
    assert (own.tokens[registers] == register_id).all()
    np.testing.assert_array_equal(own.block[registers], [3] * m + [4] * m)
    np.testing.assert_array_equal(own.position[registers], [prompt.length, prompt.length + 1] * 2)
    assert not own.weight[registers].any()
    assert (own.index[registers] == NO_CELL).all()


def test_some_codes_of_the_cells_of_a_block_are_known_and_have_no_loss():
    rng = np.random.default_rng(0)
    settings, asked, prompt, blocks, _ = a_row("image")
    half = config.Diffusion(partial_cells=0.5)
    counts = set()
    for _ in range(40):
        some = diffusion.partly_known(rng, blocks, "image", 4, half)
        for number in blocks.masked_blocks:
            known = some.known[blocks.block == number].sum(axis=1)
            assert len(set(known)) == 1
            counts.add(int(known[0]))
        assert not some.known[~blocks.masked].any()
    assert counts == {0, 1, 2, 3}
    row = CorruptedRow(prompt, asked.response, "image", some, settings)
    image = row.generation
    here = np.flatnonzero(blocks.block != ABSENT)
    slots = len(prompt.codes) + np.arange(len(here))
    hidden = (blocks.masked[:, None] & ~some.known)[here]
    np.testing.assert_array_equal(image.tokens[slots] == settings.image_mask_id, hidden)
    np.testing.assert_array_equal(image.weight[slots], hidden * 0.5)
    np.testing.assert_array_equal(image.target[slots], asked.response[here])
    assert image.weight.sum() == hidden.sum() * 0.5
    # A text has no codes, but may share a batch with images.
    _, asked, prompt, blocks, _ = a_row("text")
    whole = diffusion.partly_known(rng, blocks, "text", 4, half)
    answer = CorruptedRow(prompt, asked.response, "text", whole, settings)
    assert answer.generation.weight.shape == answer.generation.tokens.shape
    batch = tiny.stacked([row, answer], settings, RowShape(32, 40))
    assert batch.image_weight.shape == (2, 40, 4)
    assert batch.text_weight.shape == (2, 32)
    mean = config.Diffusion(partial_cells=1.0, weighting="mean")
    some = diffusion.partly_known(rng, blocks, "image", 4, mean)
    assert some.known.any() and some.total == blocks.total - some.known.sum() / 4


@pytest.mark.parametrize("partial_cells", [0.0, 1.0])
def test_codes_of_an_edited_region_weigh_more_and_the_sum_stays(partial_cells):
    rng = np.random.default_rng(0)
    settings, asked, prompt, blocks, _ = a_row("image")
    share = config.Diffusion(partial_cells=partial_cells)
    plain = diffusion.partly_known(rng, blocks, "image", 4, share)
    inside = np.ones((tiny.IMAGE_LEN, 4))
    inside[:, 1] = 5.0
    heavy = plain._replace(code_weight=inside)
    before, after = (
        CorruptedRow(prompt, asked.response, "image", each, settings).generation.weight
        for each in (plain, heavy)
    )
    np.testing.assert_array_equal(after > 0, before > 0)
    assert after.sum() == pytest.approx(before.sum())
    lightest = after[after > 0].min()
    for code, wanted in enumerate((1, 5, 1, 1)):
        own = after[before[:, code] > 0, code]
        np.testing.assert_allclose(own, np.full(len(own), wanted * lightest))


def test_a_cell_of_a_plan_is_whole_where_it_is_clean_whatever_is_known_or_weighs_more():
    settings = tiny.model_settings(codes_per_token=4)
    asked = tiny.request("image", settings, 0, words=3, given=0.3)
    cells = np.flatnonzero(~asked.given)
    sizes = orders.counts("shift", 3, len(cells), 3.0)
    blocks = diffusion.plan_blocks(cells, sizes, asked.given, 1)
    heavy = np.random.default_rng(1).uniform(1, 5, (tiny.IMAGE_LEN, 4))
    some = diffusion.partly_known(
        np.random.default_rng(0), blocks, "image", 4, config.Diffusion(partial_cells=1.0)
    )
    some = some._replace(code_weight=heavy)
    row = CorruptedRow(tiny.sample_input(asked, settings), asked.response, "image", some, settings)
    image, held = row.generation, slice(None, len(blocks.block))
    codes, hidden = asked.response[blocks.token], blocks.masked[:, None] & ~some.known
    assert some.known[blocks.masked].any(axis=1).all() and not some.known[~blocks.masked].any()
    expected = np.where(hidden, settings.image_mask_id, codes)
    np.testing.assert_array_equal(image.tokens[held], expected)
    np.testing.assert_array_equal(image.target[held], codes)
    weight = hidden * heavy[blocks.token]
    np.testing.assert_allclose(image.weight[held], weight * hidden.sum() / weight.sum())


def test_full_attention_has_no_registers_and_one_block():
    settings, _, _, _, row = a_row("image", full_attention=True)
    assert (row.generation.tokens != settings.image_register_id).all()
    batch = tiny.stacked([row], settings, RowShape(16, 24), full_attention=True)
    for stream in (batch.understanding, batch.generation):
        assert set(np.unique(stream.tags.block)) == {0, PAD_BLOCK}


@pytest.mark.parametrize("modality", ["image", "text"])
def test_a_batch_is_its_rows_sorted_by_block_and_padded(modality):
    settings, _, _, _, row = a_row(modality)
    shape = RowShape(len(row.understanding.block) + 2, len(row.generation.block) + 3)
    batch = tiny.stacked([row, row], settings, shape)
    parts = (
        (row.understanding, batch.understanding, batch.text_target, batch.text_weight),
        (row.generation, batch.generation, batch.image_target, batch.image_weight),
    )
    for before, stream, target, weight in parts:
        count = len(before.block)
        assert (np.diff(stream.tags.block[0]) >= 0).all()
        assert (stream.tags.block[:, count:] == PAD_BLOCK).all()
        assert not weight[:, count:].any()
        after = sorted(
            zip(
                stream.tags.block[1, :count].tolist(),
                stream.tags.position[1, :count].tolist(),
                stream.tokens[1, :count].tolist(),
                stream.index[1, :count].tolist(),
                target[1, :count].tolist(),
                weight[1, :count].tolist(),
                strict=True,
            )
        )
        columns = ("block", "position", "tokens", "index", "target", "weight")
        expected = zip(*(getattr(before, name).tolist() for name in columns), strict=True)
        assert after == sorted(expected)
    assert batch.predicts == {"text": "understanding", "image": "generation"}[modality]
    totals = {"text": batch.text_total, "image": batch.image_total}
    np.testing.assert_array_equal(totals.pop(modality), [7.0, 7.0])
    assert not totals.popitem()[1].any()


def test_a_row_that_is_too_long_is_refused():
    settings, _, _, _, row = a_row("text")
    shape = RowShape(len(row.understanding.block) - 1, len(row.generation.block))
    with pytest.raises(ValueError, match=r"the shape of its batch holds .*: give a larger shape"):
        tiny.stacked([row], settings, shape)


def test_a_group_without_images_has_no_generation_stream():
    settings = tiny.model_settings()
    asked = tiny.request("text", settings, 0, words=3)
    blocks = diffusion.uniform_blocks(np.random.default_rng(0), asked.given, config.Diffusion())
    row = CorruptedRow(tiny.sample_input(asked, settings), asked.response, "text", blocks, settings)
    batch = tiny.stacked([row], settings)
    assert batch.generation is None
    assert batch.image_weight is None
    assert batch.pixels is None


# ---------------------------------------------------------------------------------------------
# The released objective.


def released(codes_per_token=4, *, prompt_drop=0.0, source_drop=0.0, **diffusion_settings):
    return config.Config(
        model=tiny.model_settings(codes_per_token=codes_per_token),
        data=config.Data(prompt_drop=prompt_drop, source_drop=source_drop),
        diffusion=config.Diffusion(
            corruption="released", attention="full", weighting="mean", **diffusion_settings
        ),
    )


def a_sequence(settings, seed=0, *, image=True, code_weight=None):
    """Returns a sequence with every kind of part."""
    rng, model = np.random.default_rng(seed), settings.model
    cells = (tiny.IMAGE_LEN, model.codes_per_token)
    seen = rng.integers(0, 256, (1, tiny.VISION.image_size, tiny.VISION.image_size, 3), np.uint8)
    parts = (
        Text(np.array([2])),
        VisionTokens(tiny.VISION.num_tokens),
        Source(rng.integers(0, model.codebook_size, cells)),
        Text(np.array([10, 11])),
        LearnedText(np.array([12, 13, 14])),
        Text(np.array([15]), keep=True),
        Response(tiny.IMAGE_LEN if image else 0),
        LearnedText(np.array([4, 0, 0, 0])),
        Blank(2),
    )
    codes = rng.integers(0, model.codebook_size, cells if image else (0, cells[1]))
    return released_objective.Sequence(parts, codes, code_weight, (seen,))


def by_hand(sequence, drawn, settings, *, inverse=False):
    """Returns {position: (token, index, weight)} of both streams, one by one."""
    model, text, image = settings.model, {}, {}
    drop_prompt = drawn.prompt < settings.data.prompt_drop
    drop_source = drawn.source < settings.data.source_drop
    # The policy of these tests is uniform.
    limits = [
        max(0.001 + 0.999 * t, min(noise.reshape(-1), default=9.0))
        for t, noise in (
            (drawn.text_time, drawn.text_noise), (drawn.image_time, drawn.image_noise),
        )
    ]  # fmt: skip
    mask, at = model.text_mask_id, 0
    for part in sequence.parts:
        if isinstance(part, Source):
            for cell, codes in enumerate(part.codes.tolist()):
                if drop_source:
                    text[at + cell] = (mask, NO_FEATURE, 0)
                else:
                    image[at + cell] = (codes, cell, [0] * len(codes))
            at += len(part.codes)
        elif isinstance(part, Response):
            for cell, codes in enumerate(sequence.codes.tolist()):
                hidden = [(x <= limits[1]) != inverse for x in drawn.image_noise[cell]]
                tokens = [
                    model.image_mask_id if h else c for h, c in zip(hidden, codes, strict=True)
                ]
                image[at + cell] = (tokens, cell, [float(h) for h in hidden])
            at += part.num_tokens
        else:
            for i in range(len(part.ids) if hasattr(part, "ids") else part.num_tokens):
                if isinstance(part, LearnedText):
                    masked = (drawn.text_noise[at] <= limits[0]) != inverse
                    text[at] = (mask if masked else part.ids[i], NO_FEATURE, float(masked))
                elif drop_prompt and not getattr(part, "keep", False):
                    text[at] = (mask, NO_FEATURE, 0)
                elif isinstance(part, Text):
                    text[at] = (part.ids[i], NO_FEATURE, 0)
                else:
                    text[at] = (mask, i if isinstance(part, VisionTokens) else NO_EMBEDDING, 0)
                at += 1
    return text, image


def held(stream, weight, row):
    """Returns {position: (token, index, weight)} of the tokens of a row without padding."""
    real = stream.tags.block[row] != PAD_BLOCK
    assert (stream.tags.block[row][real] == PROMPT_BLOCK).all()
    assert (stream.tags.horizon[row][real] == PROMPT_BLOCK).all()
    columns = (stream.tokens[row], stream.index[row], weight[row])
    return {
        int(position): tuple(column[slot].tolist() for column in columns)
        for slot, position in zip(
            np.flatnonzero(real), stream.tags.position[row][real], strict=True
        )
    }


SHAPE = RowShape(30, 20)


@pytest.mark.parametrize("complementary", [False, True])
@pytest.mark.parametrize("codes_per_token", [1, 4])
def test_whole_sequences_are_masked_as_released(codes_per_token, complementary):
    settings = released(
        codes_per_token, prompt_drop=0.4, source_drop=0.4, complementary=complementary
    )
    rng = np.random.default_rng(0)
    sequences = [a_sequence(settings, seed, image=seed % 4 > 0) for seed in range(16)]
    draws = [released_objective.draw(rng, sequence) for sequence in sequences]
    batch = released_objective.batch_sequences(sequences, draws, SHAPE, settings)
    assert batch.predicts == "both"
    assert len(batch.text_total) == 16 * (1 + complementary)
    for row in range(len(batch.text_total)):
        text, image = by_hand(sequences[row % 16], draws[row % 16], settings, inverse=row >= 16)
        assert held(batch.understanding, batch.text_weight, row) == text
        assert held(batch.generation, batch.image_weight, row) == image
        assert batch.text_total[row] == sum(weight for *_, weight in text.values())
        of_codes = sum(sum(weights) for *_, weights in image.values())
        assert batch.image_total[row] == of_codes / codes_per_token
        np.testing.assert_array_equal(batch.pixels[row], sequences[row % 16].views[0])
    drops = {(d.prompt < 0.4, d.source < 0.4) for d in draws}
    assert len(drops) == 4, "the seed shows every combination of drops"


def test_targets_are_the_clean_text_and_codes():
    settings = released()
    sequence = a_sequence(settings)
    drawn = released_objective.draw(np.random.default_rng(3), sequence)
    batch = released_objective.batch_sequences([sequence], [drawn], SHAPE, settings)
    masked = batch.text_weight[0] > 0
    answers = np.concatenate([p.ids for p in sequence.parts if isinstance(p, LearnedText)])
    shown = batch.understanding.index[0] == NO_FEATURE
    assert masked.any() and set(batch.text_target[0][masked]) <= set(answers)
    clean = np.where(masked, batch.text_target[0], batch.understanding.tokens[0])[shown]
    texts = [p.ids for p in sequence.parts if isinstance(p, Text | LearnedText)]
    np.testing.assert_array_equal(clean[: sum(map(len, texts))], np.concatenate(texts))
    image = slice(tiny.IMAGE_LEN, 2 * tiny.IMAGE_LEN)
    np.testing.assert_array_equal(batch.image_target[0, image], sequence.codes)


def test_the_lowest_number_masks_where_the_time_masks_nothing():
    settings = released()
    sequence = a_sequence(settings)
    drawn = released_objective.draw(np.random.default_rng(0), sequence)
    last_answer = sequence.length - 3  # two blanks follow
    noise = np.full(sequence.length, 0.9)
    noise[last_answer] = 0.5
    codes = np.full(sequence.codes.shape, 0.9)
    codes[4, 2] = 0.5
    drawn = dataclasses.replace(
        drawn, text_time=0.0, image_time=0.0, text_noise=noise, image_noise=codes
    )
    batch = released_objective.batch_sequences([sequence], [drawn], SHAPE, settings)
    assert batch.text_total == 1 and batch.image_total == 0.25
    (slot,) = np.flatnonzero(batch.text_weight[0])
    assert batch.understanding.tags.position[0, slot] == last_answer
    assert np.argwhere(batch.image_weight[0]).tolist() == [[tiny.IMAGE_LEN + 4, 2]]


@pytest.mark.parametrize("policy", ["uniform", "cosine", "logit_normal", "mode"])
def test_the_probability_of_a_mask_is_the_time_squeezed_above_a_thousandth(policy):
    for u in (0.0, 0.2, 0.5, 0.97, 1.0):
        t, _ = diffusion.time_from_uniform(policy, u)
        p = released_objective.mask_probability(policy, u)
        assert 1e-3 <= p <= 1
        np.testing.assert_allclose(p, 1e-3 + 0.999 * t, atol=1e-6 if t > 1e-3 else 1e-3)


def test_weights_of_codes_have_a_mean_of_1_over_the_masked_ones_of_each_image():
    settings = released()
    shape = (tiny.IMAGE_LEN, 4)
    rng = np.random.default_rng(0)
    maps = [np.where(rng.random(shape) < 0.3, 5.0, 1.0), np.ones(shape), None]
    sequences = [a_sequence(settings, i, code_weight=w) for i, w in enumerate(maps)]
    draws = [released_objective.draw(rng, sequence) for sequence in sequences]
    batch = released_objective.batch_sequences(sequences, draws, SHAPE, settings)
    image = slice(tiny.IMAGE_LEN, 2 * tiny.IMAGE_LEN)
    for row, weights in enumerate(maps):
        masked = batch.generation.tokens[row, image] == settings.model.image_mask_id
        weight = batch.image_weight[row, image]
        assert not weight[~masked].any()
        expected = np.ones(shape) if weights is None else weights / weights[masked].mean()
        np.testing.assert_allclose(weight[masked], expected[masked], rtol=1e-6)
        np.testing.assert_allclose(batch.image_total[row], masked.sum() / 4, rtol=1e-6)


def test_weights_do_nothing_where_none_is_above_1():
    settings = released()
    weights = np.linspace(0.1, 1.0, tiny.IMAGE_LEN * 4).reshape(-1, 4)
    sequences = [a_sequence(settings, code_weight=w) for w in (weights, None)]
    drawn = released_objective.draw(np.random.default_rng(0), sequences[0])
    batch = released_objective.batch_sequences(sequences, [drawn] * 2, SHAPE, settings)
    np.testing.assert_array_equal(*batch.image_weight)


def test_a_batch_without_images_or_without_a_loss_on_text_predicts_one_stream():
    settings = released()
    text_alone = a_sequence(settings, image=False)
    whole = a_sequence(settings)
    mute = released(text_loss=False)

    def predicts(sequences, settings):
        draws = [released_objective.draw(np.random.default_rng(0), s) for s in sequences]
        return released_objective.batch_sequences(sequences, draws, SHAPE, settings).predicts

    assert predicts([text_alone, text_alone], settings) == "understanding"
    assert predicts([text_alone, whole], settings) == "both"
    assert predicts([text_alone, whole], mute) == "generation"


def test_draws_of_another_length_are_refused():
    settings = released()
    long, short = a_sequence(settings), a_sequence(settings, image=False)
    drawn = released_objective.draw(np.random.default_rng(0), short)
    with pytest.raises(ValueError, match="draw one number for each token and one for each code"):
        released_objective.batch_sequences([long], [drawn], SHAPE, settings)


# ---------------------------------------------------------------------------------------------
# Loss.


def test_a_few_training_steps_lower_the_loss():
    """The model memorises a batch of two images and two texts."""
    settings = tiny.model_settings(codes_per_token=4)
    batch = tiny.batch(["image", "image", "text", "text"], settings)
    assert batch.predicts == "both"
    optimizer = optax.adam(3e-3)

    def loss(model, batch):
        text, image = traces.training_pass(model, batch)
        codes = jnp.broadcast_to(batch.image_weight[..., None], batch.image_target.shape)
        of_text, _ = weighted_cross_entropy(text[:, :, 0], batch.text_target, batch.text_weight)
        of_image, _ = weighted_cross_entropy(image, batch.image_target, codes)
        num_codes = batch.image_total.sum() * settings.codes_per_token
        return of_text / batch.text_total.sum() + of_image / num_codes

    @tiny.quick_jit
    def train_step(model, optimizer_state, batch):
        value, gradient = jax.value_and_grad(loss)(model, batch)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state)
        return value, optax.apply_updates(model, updates), optimizer_state

    model = tiny.denoiser(settings)
    state, values = optimizer.init(model), []
    for _ in range(30):
        value, model, state = train_step(model, state, batch)
        values.append(float(value))
    assert values[-1] < 0.3 * values[0]
