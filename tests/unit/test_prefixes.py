# SPDX-License-Identifier: Apache-2.0
"""Guidance rows with their own shapes, and prefixes that requests share."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces

from sparse_lavida_jax import sample, sequence
from sparse_lavida_jax.sampling import prompts
from sparse_lavida_jax.sampling.prefixes import Prefixes
from sparse_lavida_jax.visibility import PAD_BLOCK

TOLERANCE = 2e-5
SETTINGS = tiny.model_settings()
EDIT = {"vision": True, "source": True}


def edit(words, **how):
    """Returns a request with so many source cells that padding cannot hide their positions."""
    one = tiny.request("image", SETTINGS, words, words=words, **EDIT, **how)
    source = sequence.Source(np.tile(one.parts[2].codes, (2, 1)))
    return dataclasses.replace(one, parts=(*one.parts[:2], source, *one.parts[3:]))


def laid_out(requests, guidance_rows):
    return tiny.prepare(requests, SETTINGS, guidance_rows)


def tokens_of(prompt):
    """Returns the tokens of each row of both streams with their tags, without padding."""
    found = []
    for row in range(len(prompt.length)):
        for stream in (prompt.understanding, prompt.generation):
            if stream is not None and (there := stream.layout.block[row] != PAD_BLOCK).any():
                found.append([x[row][there].tolist() for x in jax.tree.leaves(stream)])
    return found


@pytest.mark.parametrize("keeping", [False, True])
@pytest.mark.parametrize("given", [0.0, 0.4])
def test_parts_hold_every_token_once_and_in_order(keeping, given):
    requests = [edit(words, given=given) for words in (3, 20)]
    prompt = laid_out(requests, 3)
    parts = prompts.parted(prompt, 3, keeping=keeping)
    assert tokens_of(prompt) == [row for part in parts for row in tokens_of(part.prompt)]
    rows = [part.first + i for part in parts for i in range(len(part.prompt.length))]
    assert rows == list(range(6))
    # Given cells belong to a request, so its dropped rows differ from those of others.
    alone = keeping and not given
    assert [part.keeps for part in parts] == [True] * 2 * alone + [False] * (2 - alone)
    *others, last = (part.prompt.pixels is not None for part in parts)
    assert last
    assert not any(others)


def test_rows_of_an_edit_are_not_padded_to_each_other():
    """The dropped row has the source's cells in the understanding stream, the others do not."""
    prompt = laid_out([edit(30), edit(41)], 3)
    first, others = prompts.parted(prompt, 3, keeping=False)
    longest = 3 + tiny.VISION.num_tokens + 2 * tiny.IMAGE_LEN + 41
    assert prompt.understanding.index.shape == (6, prompts._padded(longest))
    assert first.prompt.understanding.index.shape == (2, prompts._padded(longest))
    assert others.prompt.understanding.index.shape[1] < first.prompt.understanding.index.shape[1]
    assert others.prompt.generation.index.shape == (4, 32)
    assert first.prompt.generation.index.shape == (2, 16)  # 18 cells fill 32 slots


def test_shapes_follow_the_bucket_and_not_who_shares_it():
    """So a row that is replayed alone in its original bucket runs the same programs."""
    short, long = edit(3), edit(40)
    both = laid_out([short, long], 3)
    bucket = (both.understanding.index.shape[1], both.generation.index.shape[1])
    alone = tiny.prepare([short], SETTINGS, 3, bucket)
    for keeping in (False, True):
        shapes = [
            {
                (part.prompt.understanding.index.shape[1], part.prompt.generation is None)
                for part in prompts.parted(prompt, 3, keeping=keeping)
            }
            for prompt in (both, alone)
        ]
        assert shapes[0] == shapes[1]


def test_images_without_guidance_and_pairs_of_one_shape_are_one_part():
    requests = [tiny.request("image", SETTINGS, 0, words=3)]
    for rows in (1, 2):
        (part,) = prompts.parted(laid_out(requests, rows), rows, keeping=False)
        assert not part.keeps
    assert len(prompts.parted(laid_out(requests, 1), 1, keeping=True)) == 1


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("sparse", None),
        ("sparse", {}),
        ("sparse", {"given": 0.4}),
        ("p", {}),
        ("dense", {}),
    ],
)
def test_parts_and_kept_prefixes_change_no_logit_and_no_token(name, asked):
    """For two requests of different length; the second time all prefixes are cached."""
    model, source = tiny.denoiser(SETTINGS), asked is not None
    requests = [
        edit(w, **asked) if source else tiny.request("image", SETTINGS, w, words=w) for w in (3, 20)
    ]
    settings = traces.settings_of(
        name, "image", SETTINGS, guidance=1.5, guidance_image=0.5, has_source=source
    )
    plan = traces.plan(requests, settings)
    in_one = {"parted": lambda *_, **__: [], "guidance_shapes": lambda *_: ()}
    with traces._patched(**in_one):
        wanted, canvas = traces.moments(model, requests, plan, settings)
    kept = Prefixes()
    for options in ({}, {"prefixes": kept}, {"prefixes": kept}):
        found, ours = traces.moments(model, requests, plan, settings, **options)
        np.testing.assert_array_equal(ours, canvas)
        for moment, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(moment.logits, expected.logits, rtol=0, atol=TOLERANCE)
    assert len(kept) == (0 if name == "dense" or (asked and asked.get("given")) else 2)


def test_steps_that_pass_the_prompt_again_pass_guidance_rows_in_shapes_of_their_own():
    """So the baseline has as little padding as the method; only without a cache."""
    requests = [edit(30), edit(41)]
    for name, alone in (("dense", True), ("none", True), ("r", False), ("sparse", False)):
        settings = traces.settings_of(
            name, "image", SETTINGS, guidance=1.5, guidance_image=0.5, has_source=True
        )
        plan = traces.plan(requests, settings)
        with traces._patched(
            **dict.fromkeys(("prefill", "gather", "pass_prompt"), mock.Mock(return_value=None))
        ):
            begun = sample.begin(tiny.denoiser(SETTINGS), requests, plan, settings=settings)
        first, second, third = begun.program.shapes or (None,) * 3
        assert (first is not None) == alone
        assert second == third
        assert not alone or (first[0] > second[0] and first[1] < second[1])


def passed_of(requests, prefixes):
    """Returns how many rows were computed for the requests."""
    settings = traces.settings_of("sparse", "image", SETTINGS, guidance=1.5)
    plan, rows = traces.plan(requests, settings), []

    def counting(model, prompt, *, kind):
        rows.append(len(prompt.length))
        return traces._pass_prompt(model, prompt, kind=kind)

    with traces._patched(pass_prompt=counting, gather=traces._gather):
        sample.begin(tiny.denoiser(SETTINGS), requests, plan, settings=settings, prefixes=prefixes)
    return rows


def test_a_prefix_is_computed_once_for_each_length_and_what_comes_after():
    def asked(words, seed=0, after=None):
        one = tiny.request("image", SETTINGS, seed, words=words)
        return one if after is None else dataclasses.replace(one, parts=(*one.parts[:-1], after))

    kept = Prefixes()
    assert passed_of([asked(3)], kept) == [1, 1]
    assert passed_of([asked(3, seed=1)], kept) == [1]  # as many other words
    assert passed_of([asked(4)], kept) == [1, 1]
    assert passed_of([asked(3), asked(3), asked(4)], kept) == [3]
    assert passed_of([asked(5), asked(5)], kept) == [1, 2]  # one for both
    tail = asked(3).parts[-1]
    longer = dataclasses.replace(tail, ids=np.tile(tail.ids, 2))
    # Text after the response is part of the prompt's pass.
    assert passed_of([asked(3, after=longer)], kept) == [1, 1]
    assert passed_of([asked(3)], Prefixes()) == [1, 1]  # with an empty cache


def test_one_prompt_is_kept_apart_for_images_and_for_text():
    """The split layers write keys only for the decoded stream."""
    model, kept = tiny.denoiser(SETTINGS), Prefixes()
    prompt = laid_out([tiny.request("image", SETTINGS, 0, words=3)], 1)
    on_device = jax.tree.map(jnp.asarray, prompt)
    for kind, decodes in (("image", "generation"), ("text", "understanding")):
        make = functools.partial(sample.pass_prompt, model, on_device, kind=kind)
        assert kept.get(prompt, kind, make).decodes == decodes
    assert len(kept) == 2


def test_what_was_used_longest_ago_is_let_go():
    def asked(words):
        return [tiny.request("image", SETTINGS, 0, words=words)]

    kept = Prefixes()
    passed_of(asked(3), kept)
    size = kept.num_bytes
    assert size > 0
    kept = Prefixes(most_bytes=2 * size)
    for words, rows in ((3, 2), (4, 2), (3, 1), (5, 2), (3, 1), (4, 2)):
        assert sum(passed_of(asked(words), kept)) == rows, words
        assert kept.num_bytes <= 2 * size
    nothing = Prefixes(most_bytes=0)
    assert [sum(passed_of(asked(3), nothing)) for _ in range(2)] == [2, 2]
