# SPDX-License-Identifier: Apache-2.0
"""Contents and number of the programs of steps. Programs are read or run."""

import dataclasses
import re

import jax
import numpy as np
import pytest
import tiny
import traces

from benchmarks import requests
from sparse_lavida_jax import sample
from sparse_lavida_jax.programs import side_by_side
from sparse_lavida_jax.sampling import calls, prompts
from sparse_lavida_jax.sampling.content_cache import ContentCache

VOCABULARY, CODES = 53, 29  # sizes that nothing else has
SETTINGS = tiny.model_settings(vocab_size=VOCABULARY, codebook_size=CODES)


def program(modality, name="sparse", form=lambda model: model):
    """Returns the first phase's program as text, with its plan and its settings.

    Args:
        form: transforms the model.
    """
    settings = traces.settings_of(name, modality, SETTINGS, guidance=2.0)
    asked = [tiny.request(modality, SETTINGS, 0, words=3)]
    plan = traces.plan(asked, settings, num_steps=2)
    seen, run_phase = [], sample.run_phase

    def read(*arrays, settings):
        seen.append(str(run_phase.trace(*arrays, settings=settings).jaxpr))
        return arrays[1]

    with traces._patched(run_phase=read, prefill=traces._prefill):
        inputs = tiny.sample_inputs(asked, SETTINGS, settings)
        sample.sample(form(tiny.denoiser(SETTINGS)), inputs, plan[:1], settings=settings)
    return seen[0], plan[0], settings


def made(text, size, *, but=()):
    """Returns the shapes of arrays whose last axis has this size, without the model's matrices."""
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"\[([\d,]+)\]", text)}
    return {shape for shape in shapes if shape[-1] == size and len(shape) > 1} - set(but)


def test_an_image_makes_no_text_logits_and_a_text_no_codes():
    head = (SETTINGS.width, VOCABULARY)
    assert not made(program("image")[0], VOCABULARY, but=[head])
    assert made(program("text")[0], VOCABULARY, but=[head])
    assert not made(program("text")[0], CODES, but=[(SETTINGS.generation_width, CODES)])


def test_the_image_head_sees_the_cells_to_decode_and_no_others():
    text, phase, settings = program("image")
    rows = made(text, CODES, but=[(SETTINGS.generation_width, CODES)])
    decoded = phase.decode.shape[-1]
    assert settings.guidance_rows == 2
    assert {np.prod(shape[:-1]) for shape in rows} <= {2 * decoded, decoded, 1}
    assert phase.clean.shape[-1] + settings.num_registers > 0  # these are passed as well


def test_an_image_step_has_no_understanding_tokens():
    """No array has its width; the shared projection is sliced before it is read."""
    text, *_ = program("image")
    weights = {(32, 32), (3, 32, 32), (32, VOCABULARY), (VOCABULARY, 32)}
    tokens = {s for s in made(text, SETTINGS.width, but=weights) if len(s) == 3 and s[0] in (1, 2)}
    heads = SETTINGS.num_heads * SETTINGS.head_dim
    assert heads == SETTINGS.width  # so queries have it, and keys in the cache
    passed = program("image")[1]
    width = sum(p.shape[-1] for p in (passed.clean, passed.decode, passed.rest))
    slots = {shape[1] for shape in tokens}
    assert width + SETTINGS.num_registers in slots
    assert 16 not in slots - {width + SETTINGS.num_registers}  # the bucket of the prompt


@pytest.mark.parametrize("modality", ["image", "text"])
def test_what_is_thrown_away_changes_nothing(modality):
    """Like the released code, this computes the whole text tower and its head for every token."""
    plain, wasteful = program(modality, "dense"), program(modality, "dense", requests.discarding)
    head = (SETTINGS.width, VOCABULARY)
    before, after = (made(text, VOCABULARY, but=[head]) for text, *_ in (plain, wasteful))
    assert after - before
    if modality == "image":  # the prompt's slots and every cell of both rows
        cells = sum(part.shape[-1] for part in (plain[1].clean, plain[1].decode, plain[1].rest))
        assert {shape[:2] for shape in after - before} == {(2, prompts.PROMPT_BUCKET + cells)}
    asked = [tiny.request(modality, SETTINGS, 0, words=3)]
    plan = [plain[1]]
    same = [
        traces.finished(model, asked, plan, plain[2], stop_early=False)
        for model in (tiny.denoiser(SETTINGS), requests.discarding(tiny.denoiser(SETTINGS)))
    ]
    np.testing.assert_array_equal(*same)


def test_a_program_holds_a_fixed_number_of_steps_and_is_told_how_many_to_run():
    _, part, settings = program("image")

    def numbers(steps, *, split_phases=True):
        numbered = dataclasses.replace(part[np.zeros(steps, int)], block=np.arange(steps))
        prefilled = calls.PrefilledBatch(
            np.zeros((1, 1, 1), np.int32), (), settings, None, (), split_phases
        )
        found, own = [], []
        for call in prefilled.phase_calls(numbered):
            length = len(call.steps.block)
            found.append((length, int(call.options.get("number", length))))
            own += [*call.steps.block[: found[-1][1]]]
            assert (call.steps.block[found[-1][1] :] == own[-1]).all()
        np.testing.assert_array_equal(own, np.arange(steps))
        return found

    assert numbers(1) == [(16, 1)] and numbers(16) == [(16, 16)]
    assert numbers(40) == [(16, 16), (16, 16), (16, 8)]
    assert numbers(40, split_phases=False) == [(40, 40)]


@pytest.fixture
def compiled(monkeypatch):
    """The functions whose programs are traced or compiled, made ahead as on an accelerator."""
    seen = []

    def note(name, _, **of):
        if name.startswith("/jax/core/compile/"):
            seen.append((name.rpartition("/")[2], str(of.get("fun_name"))))

    side_by_side.make_ahead(True)
    jax.monitoring.register_event_duration_secs_listener(note)
    yield seen
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize(("modality", "guidance"), [("image", 0.0), ("image", 2.0), ("text", 0.0)])
def test_programs_made_ahead_are_those_that_run(modality, guidance, compiled, monkeypatch):
    """Nothing is traced after them, and what comes out has the same bits."""
    model_settings = tiny.model_settings(vocab_size=67, codebook_size=31)  # no test has compiled it
    settings = traces.settings_of("sparse", modality, model_settings, guidance=guidance)
    asked = [tiny.request(modality, model_settings, 0, words=3)]
    plan = traces.plan(
        asked, settings, num_steps=3, **({"max_phases": 2} if modality == "image" else {})
    )
    model, make, numbers = tiny.denoiser(model_settings), calls.make, []

    def counted(made_ahead, number):
        numbers.append(number)
        make(made_ahead, number)
        made.append([name for event, name in compiled if "backend" in event])
        del compiled[:]

    made = []
    monkeypatch.setattr(calls, "make", counted)
    inputs = tiny.sample_inputs(asked, model_settings, settings)
    first = sample.sample(model, inputs, plan, settings=settings, stop_early=False)
    assert {name for _, name in compiled} <= {"_copy", "jit(_copy)"}
    names = ("prefill", "pass_prompt", "gather", "run_phase")
    own = [name for name in made[0] if name in {f"jit({name})" for name in names}]
    assert len(own) <= numbers[0] and "jit(run_phase)" in own
    del compiled[:]
    second = sample.sample(model, inputs, plan, settings=settings, stop_early=False)
    assert not compiled
    whole = sample.sample(
        model, inputs, plan, settings=settings, stop_early=False, split_phases=False
    )
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, whole)


def test_programs_for_what_is_kept_are_made_ahead_too(compiled):
    """Also those that put kept rows together: what is found compiles nothing."""
    model_settings = tiny.model_settings(vocab_size=71)  # no test has compiled it
    settings = traces.settings_of("sparse", "text", model_settings)
    asked = [tiny.request("text", model_settings, i, words=3, vision=True) for i in range(2)]
    plan, cache, drawn = traces.plan(asked, settings, num_steps=2), ContentCache(), []
    for _ in range(2):
        del compiled[:]
        how = {"settings": settings, "content_cache": cache}
        inputs = tiny.sample_inputs(asked, model_settings, settings)
        drawn.append(sample.sample(tiny.denoiser(model_settings), inputs, plan, **how))
    assert not compiled
    assert (cache.hits, cache.misses) == ({"prefill": 2}, {"prefill": 2, "vision": 2})
    np.testing.assert_array_equal(*drawn)


def test_a_response_does_not_depend_on_how_it_is_cut():
    settings = traces.settings_of("sparse", "image", SETTINGS)
    asked = [tiny.request("image", SETTINGS, 0, words=3)]
    plan = traces.plan(asked, settings, num_steps=3)
    assert [phase.num_steps for phase in plan] == [3]
    model = tiny.denoiser(SETTINGS)
    whole, cut = (
        traces.finished(model, asked, plan, settings, split_phases=split) for split in (False, True)
    )
    np.testing.assert_array_equal(whole, cut)
