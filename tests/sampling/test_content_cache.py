# SPDX-License-Identifier: Apache-2.0
"""Guidance rows with their own shapes, and what is kept of requests by its content."""

import concurrent.futures
import dataclasses
import gc
import os
import re
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces

from sparse_lavida_jax import sample, sequence
from sparse_lavida_jax.models import sharding
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling import calls, prompts, state
from sparse_lavida_jax.sampling.content_cache import ContentCache, default_bytes, digest
from sparse_lavida_jax.sampling.prompts import PromptPart
from sparse_lavida_jax.scenes import tasks, world
from sparse_lavida_jax.server.openai.metrics_endpoint import Metrics
from sparse_lavida_jax.server.serving import Service
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
    return tiny.rows_laid(requests, SETTINGS, guidance_rows)


def tokens_of(prompt):
    """Returns the tokens of each row of both streams with their tags, without padding."""
    found = []
    for row in range(len(prompt.length)):
        for stream in (prompt.understanding, prompt.generation):
            if stream is not None and (there := stream.tags.block[row] != PAD_BLOCK).any():
                found.append([x[row][there].tolist() for x in jax.tree.leaves(stream)])
    return found


@pytest.mark.parametrize("given", [0.0, 0.4])
@pytest.mark.parametrize(("keeping", "apart"), [(False, False), (True, False), (True, True)])
def test_parts_hold_every_token_once_and_in_order(keeping, apart, given):
    requests = [edit(words, given=given) for words in (3, 20)]
    inputs = laid_out(requests, 3)
    parts = prompts.parted(inputs, SETTINGS, keeping=keeping, apart=apart)
    assert tokens_of(prompts.batched(inputs, SETTINGS)) == [
        row for part in parts for row in tokens_of(part.prompt)
    ]
    rows = [part.first + i for part in parts for i in range(len(part.prompt.length))]
    assert rows == list(range(6))
    # Given cells belong to a request, so its dropped rows differ from those of others.
    alone = keeping and not given
    others = 2 - alone + apart
    assert [part.keeps for part in parts] == [True] * 2 * alone + [False] * others
    *others, last = (part.prompt.pixels is not None for part in parts)
    assert last
    assert not any(others)


def test_rows_of_an_edit_are_not_padded_to_each_other():
    """The dropped row has the source's cells in the understanding stream, the others do not."""
    inputs = laid_out([edit(30), edit(41)], 3)
    prompt, (first, others) = prompts.batched(inputs, SETTINGS), prompts.parted(inputs, SETTINGS)
    longest = 3 + tiny.VISION.num_tokens + 2 * tiny.IMAGE_LEN + 41
    assert prompt.understanding.index.shape == (6, prompts.rounded_up(longest))
    assert first.prompt.understanding.index.shape == (2, prompts.rounded_up(longest))
    assert others.prompt.understanding.index.shape[1] < first.prompt.understanding.index.shape[1]
    assert others.prompt.generation.index.shape == (4, 32)
    assert first.prompt.generation.index.shape == (2, 16)  # 18 cells fill 32 slots


def test_shapes_follow_the_bucket_and_not_who_shares_it():
    """So a row that is replayed alone in its original bucket runs the same programs."""
    short, long = edit(3), edit(40)
    both = laid_out([short, long], 3)
    bucket = prompts.lengths_of(both)
    for keeping in (False, True):
        shapes = [
            {
                (part.prompt.understanding.index.shape[1], part.prompt.generation is None)
                for part in prompts.parted(inputs, SETTINGS, bucket, keeping=keeping)
            }
            for inputs in (both, laid_out([short], 3))
        ]
        assert shapes[0] == shapes[1]


def test_images_without_guidance_and_pairs_of_one_shape_are_one_part():
    requests = [tiny.request("image", SETTINGS, 0, words=3)]
    for rows in (1, 2):
        (part,) = prompts.parted(laid_out(requests, rows), SETTINGS)
        assert not part.keeps
    assert len(prompts.parted(laid_out(requests, 1), SETTINGS, keeping=True)) == 1


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
def test_parts_and_kept_rows_change_no_logit_and_no_token(name, asked):
    """For two requests of different length; the second time all rows are found."""
    model, source = tiny.denoiser(SETTINGS), asked is not None
    requests = [
        edit(w, **asked) if source else tiny.request("image", SETTINGS, w, words=w) for w in (3, 20)
    ]
    settings = traces.settings_of(
        name, "image", SETTINGS, guidance=1.5, guidance_image=0.5, has_source=source
    )
    plan = traces.plan(requests, settings)
    with traces._patched(parted=lambda *inputs, **_: [PromptPart(0, prompts.batched(*inputs))]):
        wanted, responses = traces.moments(model, requests, plan, settings)
    kept = ContentCache()
    for options in ({}, {"content_cache": kept}, {"content_cache": kept}):
        found, ours = traces.moments(model, requests, plan, settings, **options)
        np.testing.assert_array_equal(ours, responses)
        for moment, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(moment.logits, expected.logits, rtol=0, atol=TOLERANCE)
    rows = 0 if name == "dense" else 2 * settings.guidance_rows
    assert kept.hits["prefill"] == rows
    assert kept.misses["prefill"] == rows
    images = 2 * source  # those of rows that are found need not be seen
    assert (kept.misses["vision"], kept.hits["vision"]) == (images, images * (name == "dense"))
    assert len(kept) == rows + images


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
            inputs = tiny.sample_inputs(requests, SETTINGS, settings)
            prefilled = sample.prefill_batch(
                tiny.denoiser(SETTINGS), inputs, plan, settings=settings
            )
        rows = [len(prompt.length) for prompt in prefilled.prompts]
        assert rows == ([2, 4] if alone else [6])
        if alone:
            first, others = map(prompts.padded_lengths, prefilled.prompts)
            assert first[0] > others[0] and first[1] < others[1]


def passed_of(requests, kept):
    """Returns how many rows were passed for the requests, part by part."""
    settings = traces.settings_of("sparse", "image", SETTINGS, guidance=1.5)
    plan, rows = traces.plan(requests, settings), []

    def counting(model, prompt, *, modality):
        rows.append(len(prompt.length))
        return traces._pass_prompt(model, prompt, modality=modality)

    with traces._patched(**traces._quick() | {"pass_prompt": counting}):
        how = {"settings": settings, "content_cache": kept}
        inputs = tiny.sample_inputs(requests, SETTINGS, settings)
        sample.prefill_batch(tiny.denoiser(SETTINGS), inputs, plan, **how)
    return rows


def test_a_row_is_passed_once_for_its_tokens_and_what_comes_after():
    def asked(words, seed=0, after=None):
        one = tiny.request("image", SETTINGS, seed, words=words)
        return one if after is None else dataclasses.replace(one, parts=(*one.parts[:-1], after))

    kept = ContentCache()
    assert passed_of([asked(3)], kept) == [1, 1]
    assert passed_of([tiny.asked_with(asked(3), seed=7)], kept) == []  # another seed
    assert kept.tokens == 12  # both rows
    assert passed_of([asked(3, seed=1)], kept) == [1]  # as many other words
    assert passed_of([asked(4)], kept) == [1, 1]
    assert passed_of([asked(3), asked(3), asked(4)], kept) == [3]  # in a larger batch
    assert passed_of([asked(4), asked(3), asked(4)], kept) == []  # whatever their order
    assert passed_of([asked(4), asked(3), asked(3, seed=1)], kept) == [3]  # all or none
    assert passed_of([asked(5), asked(5)], kept) == [1, 2]  # one for both
    tail = asked(3).parts[-1]
    longer = dataclasses.replace(tail, ids=np.tile(tail.ids, 2))
    # Text after the response is part of the prompt's pass.
    assert passed_of([asked(3, after=longer)], kept) == [1, 1]
    assert passed_of([asked(3)], ContentCache()) == [1, 1]  # with an empty cache


def test_off_the_cpu_a_row_of_an_image_without_words_is_found_by_itself(monkeypatch):
    """Another edit of the same image, in as many words: only the row with words is passed."""
    first, model = edit(12), tiny.denoiser(SETTINGS)
    words = tiny.request("image", SETTINGS, 5, words=12).parts[1]
    second = dataclasses.replace(first, parts=(*first.parts[:3], words, *first.parts[4:]))
    settings = traces.settings_of(
        "sparse", "image", SETTINGS, guidance=6.0, guidance_image=0.5, has_source=True
    )
    plan = traces.plan([first], settings)

    def logits(one, **options):
        return traces.moments(model, [one], plan, settings, **options)[0][0].logits

    wanted = [logits(one) for one in (first, second)]
    assert np.abs(wanted[0] - wanted[1]).max() > 1e-3
    found = {}
    for apart in (False, True):
        monkeypatch.setattr(calls, "keeps_rows_apart", lambda apart=apart: apart)
        kept = ContentCache()
        for one, expected in zip((first, second), wanted, strict=True):
            ours = logits(one, content_cache=kept)
            np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)
        found[apart] = kept.hits["prefill"]
    assert found == {False: 1, True: 2}  # of three rows


def test_what_was_used_longest_ago_is_let_go():
    def asked(words):
        return [tiny.request("image", SETTINGS, 0, words=words)]

    kept = ContentCache()
    passed_of(asked(3), kept)
    size = kept.num_bytes
    assert size > 0
    kept = ContentCache(most_bytes=2 * size)
    for words, rows in ((3, 2), (4, 2), (3, 0), (5, 2), (3, 0), (4, 2)):
        assert sum(passed_of(asked(words), kept)) == rows, words
        assert kept.num_bytes <= 2 * size
    assert kept.evicted == {"prefill": 4}
    for most in (0, size // 3):  # nothing, and less than one row
        nothing = ContentCache(most_bytes=most)
        assert [sum(passed_of(asked(3), nothing)) for _ in range(2)] == [2, 2]
        assert (len(nothing), nothing.num_bytes) == (0, 0)
        assert not nothing.hits | nothing.misses | nothing.evicted


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_bytes_of_a_prompt_are_those_of_its_keys_and_values(modality):
    prompt = tiny.prepare([edit(3), edit(20)], SETTINGS, 3)
    cache = traces._pass_prompt(tiny.denoiser(SETTINGS), prompt, modality=modality)
    held = sum(x.nbytes for x in (*cache.joint, *cache.split))
    assert state.prompt_bytes(SETTINGS, prompt, modality) == held


def state_of(requests, settings, kept):
    """Returns the state after the prefill, compiled as it is outside of tests."""
    plan = traces.plan(requests, settings)
    inputs = tiny.sample_inputs(requests, SETTINGS, settings)
    prefilled = sample.prefill_batch(
        tiny.denoiser(SETTINGS), inputs, plan, settings=settings, content_cache=kept
    )
    found = prefilled.state
    whole = found.responses, found.decoded_at, found.features, found.cache, found.passes
    return [np.asarray(leaf) for leaf in jax.tree.leaves(whole)]


def assert_same(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("name", "modality", "guided"),
    [("sparse", "text", 0), ("sparse", "image", 1), ("dense", "image", 0)],
)
def test_the_state_has_the_same_bits_with_and_without_a_cache(name, modality, guided, number):
    """A question and an edit, alone and with another one, found in another order."""
    how = {"vision": True, "source": modality == "image"}
    requests = [tiny.request(modality, SETTINGS, i, words=9 + i, **how) for i in range(number)]
    settings = traces.settings_of(
        name, modality, SETTINGS, guidance=1.5 * guided, guidance_image=0.5 * guided,
        has_source=modality == "image",
    )  # fmt: skip
    kept = ContentCache()
    for asked in (requests, requests, requests[::-1]):
        wanted = state_of(asked, settings, ContentCache(0))
        assert_same(state_of(asked, settings, kept), wanted)
    if not guided:  # with guidance, rows without words are passed by themselves
        assert_same(state_of(requests[::-1], settings, None), wanted)
    found = "vision" if name == "dense" else "prefill"
    assert kept.hits == {found: 2 * number * settings.guidance_rows}
    # Another image is seen, and another batch size is passed anew: its bits may differ.
    other = [dataclasses.replace(one, pixels=one.pixels ^ 1) for one in requests]
    for asked in (other, [*requests, *requests]):
        assert_same(state_of(asked, settings, kept), state_of(asked, settings, ContentCache(0)))
    assert kept.misses["vision"] == 4 * number


def test_what_is_kept_is_not_overwritten_by_the_steps():
    """Steps overwrite their state in place: keys and values, or features if none are cached."""
    for name in ("sparse", "dense"):
        settings, kept = traces.settings_of(name, "text", SETTINGS), ContentCache()
        requests = [tiny.request("text", SETTINGS, 0, words=3, vision=True)]
        plan = traces.plan(requests, settings, num_steps=2)
        drawn = [
            traces.finished(tiny.denoiser(SETTINGS), requests, plan, settings, content_cache=kept)
            for _ in range(3)
        ]
        assert kept.hits.total() == 2
        assert not any(x.is_deleted() for x in jax.tree.leaves([*kept._entries.values()]))
        np.testing.assert_array_equal(drawn[1], drawn[0])
        np.testing.assert_array_equal(drawn[2], drawn[0])


def test_entries_are_found_only_for_their_model_and_the_kind_of_response():
    """The split layers write keys only for the decoded stream."""
    kept = ContentCache()
    for modality in ("image", "text"):
        settings = traces.settings_of("sparse", modality, SETTINGS, guidance=0.0)
        requests = [tiny.request(modality, SETTINGS, 0, words=3)]
        plan = traces.plan(requests, settings, num_steps=2)
        for model in (tiny.denoiser(SETTINGS), jax.tree.map(jnp.copy, tiny.denoiser(SETTINGS))):
            with traces._patched(**traces._quick()):
                how = {"settings": settings, "content_cache": kept}
                sample.prefill_batch(
                    model, tiny.sample_inputs(requests, SETTINGS, settings), plan, **how
                )
    assert (kept.hits, kept.misses) == ({}, {"prefill": 4})


@pytest.fixture(scope="module")
def folder(every_task):
    return every_task


@pytest.fixture(scope="module")
def pipes(folder):
    """A pipeline, and one that keeps nothing."""
    kept = SparseLaViDa.from_pretrained(folder, batch_size=4)
    return kept, SparseLaViDa.from_pretrained(folder, batch_size=4, content_cache_gb=0)


GUIDED = {"steps": 2, "layout": False, "guidance": 2.0, "guidance_image": 0.5}


def test_results_are_those_of_a_pipeline_that_keeps_nothing(pipes, monkeypatch):
    """An edit, another seed, another one of the image, two of them, and answers."""
    images = [world.render(tasks.sample("edit", 0, index).image) for index in range(2)]
    kept, anew = pipes
    encoded = mock.Mock(wraps=kept.codec.encode)
    monkeypatch.setattr(kept.codec, "encode", encoded)

    def run(task, words, shown, **options):
        before = [kept.content_cache.hits[one] for one in ("codes", "vision", "prefill")]
        made = kept.requests(task, words, shown, as_written=True, **options)
        found, wanted = (pipe.run(made, padding="served") for pipe in pipes)
        for ours, theirs in zip(found.tokens, wanted.tokens, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert (found.texts, found.passed) == (wanted.texts, wanted.passed)
        assert all(map(np.array_equal, found.pixels, wanted.pixels))
        now = [kept.content_cache.hits[one] for one in ("codes", "vision", "prefill")]
        return [later - earlier for later, earlier in zip(now, before, strict=True)]

    assert run("edit", "a", images[0], seed=1, **GUIDED) == [0, 0, 0]
    assert run("edit", "a", images[0], seed=2, **GUIDED) == [1, 0, 3]
    assert run("edit", "b", images[0], seed=1, **GUIDED) == [1, 1, 1]  # the row without words
    assert run("edit", "a b", images[0], seed=1, **GUIDED) == [1, 1, 0]
    assert run("edit", "a", images, seed=1, **GUIDED) == [1, 0, 2]  # the second is new
    assert run("edit", "a", images[::-1], seed=5, **GUIDED) == [2, 0, 6]
    assert encoded.call_count == 2
    assert run("ask", "a", images[0], seed=1) == [0, 1, 0]  # another response: other keys
    assert run("ask", "a", images[0], seed=2, temperature=1.0) == [0, 1, 0]  # another program
    assert run("ask", "a", images[0], seed=3, temperature=1.0) == [0, 0, 1]
    nothing = anew.content_cache
    assert (len(nothing), nothing.hits, nothing.misses, nothing.tokens) == (0, {}, {}, 0)


def test_metrics_tell_what_was_found(pipes):
    kept, _ = pipes
    service, cache = Service(kept), kept.content_cache
    service.submit("ask", "a b", seed=1).future.result()
    service.submit("ask", "a b", seed=2).future.result()
    cache.evicted["codes"] = 7
    text = Metrics(service).text().decode()
    service.close()
    own = {
        'hits_total{content="prefill"}': cache.hits["prefill"],
        'misses_total{content="prefill"}': cache.misses["prefill"],
        'evicted_total{content="codes"}': 7,
        "tokens_total": cache.tokens,
        "bytes": cache.num_bytes,
    }
    for name, count in own.items():
        (value,) = re.findall(rf"^sparse_lavida_content_cache_{re.escape(name)} (.*)$", text, re.M)
        assert float(value) == count > 0, name


def test_the_cache_is_shared_by_copies_and_freed_with_the_pipeline(folder):
    pipe = SparseLaViDa.from_pretrained(folder, content_cache_gb=0.5)
    assert pipe.content_cache.most_bytes == 5e8
    copy = pipe.with_sampling(dataclasses.replace(pipe.settings.sampling, num_steps=3))
    assert copy.content_cache is pipe.content_cache
    other = pipe.with_model(pipe.model)
    assert other.content_cache is not pipe.content_cache
    assert other.content_cache.most_bytes == 5e8
    pipe.generate("a", steps=1, layout=False, guidance=1.0, as_written=True)
    pipe.content_cache.add("codes", ["an image"], [array := np.zeros(3)])
    assert len(pipe.content_cache) == 3 and len(other.content_cache) == 0
    freed = weakref.ref(array)
    del array, pipe, copy
    gc.collect()
    assert freed() is None


def test_it_can_be_emptied(pipes):
    cache = ContentCache()
    cache.add("codes", [1], [np.zeros(3)])
    cache.clear()
    assert (len(cache), cache.num_bytes, cache.get("codes", [1])) == (0, 0, None)


@pytest.mark.parametrize("wrong", [-1, 1e5, float("nan")])
def test_a_wrong_bound_is_refused(pipes, wrong):
    kept, _ = pipes
    parts = kept.model, kept.settings, kept.prompts, kept.codec
    with pytest.raises(RequestError, match=r"content_cache_gb=.* 0 to 10000"):
        SparseLaViDa(*parts, content_cache_gb=wrong)


def test_over_a_mesh_no_array_of_the_devices_is_kept():
    mesh = sharding.automatic({"data": 2, "fsdp": 2, "tensor": 2})
    model, kept = sharding.placed(tiny.denoiser(SETTINGS), mesh), ContentCache()
    requests = [tiny.request("text", SETTINGS, i, words=3, vision=True) for i in range(2)]
    settings = traces.settings_of("sparse", "text", SETTINGS)
    plan = traces.plan(requests, settings, num_steps=2)
    with traces._patched(**traces._quick()):
        inputs = tiny.sample_inputs(requests, SETTINGS, settings)
        sample.prefill_batch(model, inputs, plan, settings=settings, content_cache=kept)
    assert len(kept) == 0 and not kept.hits | kept.misses


def test_many_threads_share_a_cache():
    kept, values = ContentCache(most_bytes=10 * 80), [np.full(10, i, float) for i in range(32)]

    def use(thread):
        rng = np.random.default_rng(thread)
        for number in rng.integers(0, len(values), 500).tolist():
            found = kept.get("codes", [number])
            if found is None:
                kept.add("codes", [number], [values[number]])
            else:
                np.testing.assert_array_equal(found[0], values[number])
            assert kept.num_bytes <= kept.most_bytes + 80

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert [*threads.map(use, range(8))] == [None] * 8
    assert kept.hits["codes"] + kept.misses["codes"] == 8 * 500
    assert kept.num_bytes == sum(x.nbytes for x in kept._entries.values()) == 800
    assert len(kept) == 10 and kept.evicted["codes"] > 0


def test_contents_are_told_apart_by_shape_type_and_value():
    one = np.arange(12, dtype=np.int32)
    others = [one.reshape(3, 4), one.astype(np.int64), one + 1, one.view(np.uint32)]
    assert len({digest(one), *map(digest, others)}) == 5
    assert digest(one.reshape(3, 4).T) == digest(one.reshape(3, 4).T.copy())


def test_the_usual_bound_is_a_share_of_the_device(monkeypatch):
    device = mock.Mock()
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4000, "SC_PHYS_PAGES": 2_000_000}.get)
    for stats, most in (
        (None, 0.4e9),
        ({"bytes_limit": 16 * 10**9}, 0.8e9),
        ({"bytes_limit": 10**12}, 4e9),
    ):
        device.memory_stats.return_value = stats
        assert default_bytes() == ContentCache().most_bytes == most
