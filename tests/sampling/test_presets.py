# SPDX-License-Identifier: Apache-2.0
"""Samplers by name, sizes of text blocks, and refusals of what was never trained."""

import dataclasses

import numpy as np
import pytest
import stand_ins
import tiny

from benchmarks import suites
from sparse_lavida_jax import config, pipeline
from sparse_lavida_jax.evals.benchmarks import scenes
from sparse_lavida_jax.inference import engine
from sparse_lavida_jax.inference.results import SAMPLER_VERSION
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling import options, presets

TASKS = {"draw": 1.0, "layout": 1.0, "answer": 1.0, "check": 1.0}


@pytest.fixture
def ran(monkeypatch):
    """Returns a pipeline, and the calls of its sampler: modality, width of a step, temperature."""
    seen = []

    def sample(model, inputs, phases, *, settings, **_):
        temperature = inputs[0].request.temperature
        seen.append((settings.modality, phases[0].decode.shape[-1], temperature))
        return np.stack([one.example.response for one in inputs])

    monkeypatch.setattr(engine.sample, "sample", sample)
    given = stand_ins.settings(data={"tasks": TASKS, "max_answer_len": 40})
    model = tiny.denoiser(given.model)
    return pipeline.SparseLaViDa(model, given, stand_ins.prompts(given), stand_ins.Codec(), 2), seen


def test_text_is_sampled_in_blocks_as_it_was_trained_in(ran):
    """Earlier, a model trained in blocks of 4 was silently sampled in blocks of 8."""
    pipe, seen = ran
    pipe.ask(None, "why?", max_new_tokens=16)
    given = dataclasses.replace(pipe.settings.data, text_block_len=4)
    settings = dataclasses.replace(pipe.settings, data=given)
    prompts = stand_ins.prompts(settings)
    four = pipeline.SparseLaViDa(pipe.model, settings, prompts, pipe.codec, 2)
    four.ask(None, "why?", max_new_tokens=16)
    assert [width for _, width, _ in seen] == [8, 4]


def test_blocks_and_temperature_of_layouts_may_be_their_own(ran):
    pipe, seen = ran
    text = config.TextSampling(block_len=20, temperature=0.2)
    asked = config.Sampling(num_steps=2, layout_block_len=10, text=text)
    pipe.generate("a circle", sampling=asked)
    pipe.generate("a circle", sampling=dataclasses.replace(asked, layout_temperature=0.7))
    pipe.ask(None, "why?", max_new_tokens=40, sampling=asked)
    texts = [rest for modality, *rest in seen if modality == "text"]
    assert texts == [[10, 0.2], [10, 0.7], [20, 0.2]]


def test_a_text_of_no_whole_number_of_blocks_has_at_most_as_many_steps_as_tokens(ran):
    """It is one block: earlier, more steps were silently cut, or refused although they fit."""
    pipe, _ = ran
    example = pipe.encoder.text_example("a", length=10)  # blocks have 8 tokens
    pipe.sample([example], sampling=config.Sampling(text=config.TextSampling(steps=10)))
    with pytest.raises(config.ConfigError, match="1 to 10 are allowed"):
        pipe.sample([example], sampling=config.Sampling(text=config.TextSampling(steps=11)))


@pytest.mark.parametrize("name", options.PUBLISHED)
def test_published_samplers_have_names(ran, name):
    pipe, _ = ran
    for task, words in (("generate", "a"), ("ask", "why?")):
        (made,) = pipe.requests(task, words, sampler=name)
        assert config.changed(made.sampling, options.PUBLISHED[name]) == made.sampling
        assert config.changed(pipe.settings.sampling, options.PUBLISHED[name]) == made.sampling


def test_as_released_questions_have_blocks_of_128_and_layouts_of_16():
    released = options.changed(config.Sampling(), draws=False, sampler="released")
    assert (released.text.block_len, released.layout_block_len) == (128, 16)
    assert (released.layout_temperature, released.text.temperature) == (0.5, 0.0)
    assert (released.edit_guidance, released.grid) == ("source_only", "code")
    fast = options.changed(config.Sampling(), draws=False, sampler="fast_dllm")
    assert (fast.text.preset, fast.text.commit, fast.text.factor) == ("fast_dllm_dual", "factor", 1)


def test_an_option_given_by_itself_prevails_over_a_samplers_name():
    """In any order: earlier, `--steps` was sometimes ignored."""
    asked = [("steps", 4), ("sampler", "released")]
    for given in (dict(asked), dict(asked[::-1])):
        made = options.changed(config.Sampling(), draws=False, **given)
        assert (made.text.steps, made.text.step_ratio, made.text.block_len) == (4, 0.0, 128)


def test_more_registers_than_were_trained_are_refused(ran):
    pipe, _ = ran
    most = pipe.settings.model.num_registers
    with pytest.raises(config.ConfigError, match=f"more than the {most} that this model was train"):
        pipe.generate("a circle", layout=False, registers=most + 1)
    dense = config.Sampling(preset="dense", registers=most + 1)
    assert presets.step_settings(dense, pipe.settings.model, "image").num_registers == 0


def test_a_record_of_another_sampler_is_not_drawn_again(ran):
    pipe, _ = ran
    (record,) = pipe.generate("a circle", layout=False).records
    assert record["sampler"] == SAMPLER_VERSION
    older = {key: value for key, value in record.items() if key not in ("sampler", "version")}
    with pytest.raises(RequestError, match="it was drawn by version 1 of the sampler, of sparse-l"):
        pipe.replay(older)


def test_a_published_sampler_is_a_row_of_the_benchmark_and_a_setting_of_an_evaluation():
    settings = stand_ins.settings()
    asked = {"draw": "image", "text": "text"}
    examples = {
        task: tiny.request(modality, settings.model, 0, words=2) for task, modality in asked.items()
    }
    rows = suites.by_preset(settings, examples, 8, batch=1, names=("fast_dllm", "dense"))
    assert [(row.task, row.method) for row in rows] == [
        ("draw", "dense"), ("text", "dense"), ("text", "fast_dllm"),
    ]  # fmt: skip
    assert rows[-1].sampling.text.commit == "factor"
    released = dataclasses.replace(settings, evaluate=config.Evaluate(limit=1, sampler="released"))
    assert scenes.SceneTasks(released).sampling.text.block_len == 128
    wrong = dataclasses.replace(settings, evaluate=config.Evaluate(limit=1, sampler="quick"))
    with pytest.raises(RequestError, match="sampler='quick' is not a sampler of text: choose"):
        scenes.SceneTasks(wrong)
    with pytest.raises(RequestError, match="sampler='prefix' is not a sampler of images: choose"):
        options.changed(config.Sampling(), draws=True, sampler="prefix")
