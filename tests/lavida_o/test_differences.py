# SPDX-License-Identifier: Apache-2.0
"""Our behaviour where the released code fails or is wrong, if no other test covers it.

The tables are in docs/api/differences.md.
"""

import dataclasses
import functools
import io
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import raw_data
import stand_ins
import tiny
from flax import nnx
from PIL import Image

from sparse_lavida_jax import config, pipeline
from sparse_lavida_jax.data import released_objective
from sparse_lavida_jax.data.batch import RowShape
from sparse_lavida_jax.evals import benchmark, benchmarks
from sparse_lavida_jax.evals.benchmarks import refcoco
from sparse_lavida_jax.inference import engine
from sparse_lavida_jax.lavida_o import chat
from sparse_lavida_jax.lavida_o.prompts import ChatPrompts
from sparse_lavida_jax.mixture import record_examples
from sparse_lavida_jax.models import vq
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling import options, presets
from sparse_lavida_jax.sequence import LearnedText, Response, Source, Text
from sparse_lavida_jax.training import step as training_step
from sparse_lavida_jax.visibility import PAD_BLOCK

TESTS = pathlib.Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "api" / "differences.md"
SHAPE = RowShape(24, 20)


def released(**diffusion_settings):
    return config.Config(
        model=tiny.model_settings(codes_per_token=4),
        data=config.Data(prompt_drop=0.0, source_drop=0.5),
        diffusion=config.Diffusion(
            corruption="released", attention="full", weighting="mean", **diffusion_settings
        ),
    )


def batch_of(sequences, draws, settings):
    return released_objective.batch_sequences(list(sequences), list(draws), SHAPE, settings)


def an_edit(settings, seed, *, drop_source):
    """Returns an edit sequence (source image, words, image to draw) and its random numbers."""
    rng, model = np.random.default_rng(seed), settings.model
    cells = (tiny.IMAGE_LEN, model.codes_per_token)
    source, codes = rng.integers(0, model.codebook_size, (2, *cells))
    parts = (
        Text(np.array([2, 10])),
        Source(source),
        LearnedText(np.array([12])),
        Response(cells[0]),
    )
    sequence = released_objective.Sequence(parts, codes, None, ())
    drawn = released_objective.draw(rng, sequence)
    return sequence, dataclasses.replace(drawn, source=0.0 if drop_source else 1.0)


@pytest.mark.parametrize("shorter_first", [True, False])
def test_without_a_loss_on_text_rows_of_unequal_images_are_what_each_is_alone(shorter_first):
    """The release mixes up the rows after one with fewer image tokens (behaviour 12)."""
    settings = released(text_loss=False)
    rows = [an_edit(settings, seed, drop_source=seed == 0) for seed in range(2)]
    if not shorter_first:
        rows.reverse()
    model = tiny.denoiser(settings.model)
    forward = tiny.quick_jit(
        lambda model, batch: model(
            batch.understanding, batch.generation, None, wanted="generation"
        )[0]["generation"]
    )

    def tokens_and_hidden(chosen):
        batch = batch_of(*zip(*chosen, strict=True), settings)
        assert batch.predicts == "generation"
        return batch.generation.tags.block != PAD_BLOCK, forward(model, batch)

    held, together = tokens_and_hidden(rows)
    assert len(set(held.sum(axis=1).tolist())) == 2
    for row, one in enumerate(rows):
        (held_alone,), (alone,) = tokens_and_hidden([one])
        np.testing.assert_array_equal(held[row], held_alone)
        np.testing.assert_allclose(together[row][held_alone], alone[held_alone], rtol=0, atol=1e-5)


def test_text_alone_is_learned_without_an_image():
    """The release fails without images, and gives rows without one an empty image."""
    settings = released()
    sequence = released_objective.Sequence(
        (Text(np.array([2, 10, 11])), LearnedText(np.array([12, 13, 14, 15])), Response(0)),
        np.zeros((0, 4), int), None, (),
    )  # fmt: skip
    drawn = released_objective.draw(np.random.default_rng(0), sequence)
    batch = batch_of([sequence] * 2, [drawn] * 2, settings)
    assert batch.pixels is None and batch.predicts == "understanding"
    value, logged = tiny.quick_jit(training_step.loss)(tiny.denoiser(settings.model), batch)
    assert value > 1.0
    assert set(logged) == {"text_nll"}


def test_text_of_which_nothing_is_masked_has_no_loss():
    """The release computes 0 / 0 there, and repairs it only if there are images (behaviour 24)."""
    settings = released()
    sequence = released_objective.Sequence(
        (Text(np.array([2, 10, 11, 12])), Response(0)), np.zeros((0, 4), int), None, ()
    )
    drawn = released_objective.draw(np.random.default_rng(0), sequence)
    batch = batch_of([sequence], [drawn], settings)
    grad = tiny.quick_jit(jax.value_and_grad(training_step.loss, has_aux=True))
    (value, _), gradient = grad(tiny.denoiser(settings.model), batch)
    assert value == 0.0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


def test_the_tests_that_the_table_names_exist():
    named = set(re.findall(r"`(test_\w+)", DOCUMENT.read_text()))
    defined = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 10
    assert named <= defined


@pytest.mark.parametrize(
    ("preset", "grid", "whole"),
    [("dense", "code", False), ("sparse", "code", True), ("dense", "cell", True)],
)
def test_sparse_steps_decode_whole_cells_where_the_release_decodes_codes(preset, grid, whole):
    model = tiny.model_settings(codes_per_token=4)
    sampling = config.Sampling(preset=preset, grid=grid, num_steps=5)
    settings = tiny.step_settings(sampling, model, "image")
    plan = presets.plan(sampling, settings, model, np.zeros((1, 9), bool), 1)
    assert all((part.candidates.shape[-1] == 1) == whole for part in plan)
    if not whole:  # some cell is partly known after a step
        assert any(part.candidates.any(-1).sum() > part.candidates.all(-1).sum() for part in plan)


def test_text_and_image_have_a_register_each():
    model = tiny.denoiser(tiny.model_settings())
    assert model.register_understanding.shape == (model.settings.width,)
    assert model.register_generation.shape == (model.settings.generation_width,)


def test_blocks_of_training_are_steps_of_a_plan_unless_told():
    assert config.Diffusion().blocks == "schedule"
    assert config.Diffusion(blocks="uniform").blocks == "uniform"


# --- a converted model -------------------------------------------------------------------------

IMAGE = np.zeros((8, 8, 3), np.uint8)


def png() -> bytes:
    Image.fromarray(IMAGE).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


class Blank(stand_ins.Codec):
    """Reads and draws images of one code."""

    image_size, factor = 32, 8

    def encode(self, pixels):
        return np.zeros((len(pixels), 4, 4), np.int32)

    def to_pixels(self, cells, rows=None, dtype="float32"):
        return np.zeros((len(cells), 32, 32, 3), np.uint8)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return raw_data.tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def converted(tokenizer):
    """Returns a pipeline set up like that of a converted folder, except for text blocks."""
    given = raw_data.settings(
        tokenizer,
        sampling={"num_steps": 2, "text": {"preset": "prefix", "step_ratio": 1.0}},
        data={"text_block_len": 1},
    )
    model = dataclasses.replace(given.model, trained_attention="full")
    given = dataclasses.replace(given, model=model)
    prompts = ChatPrompts(tokenizer, model, given.data, 8)
    return pipeline.SparseLaViDa(tiny.denoiser(model), given, prompts, Blank(), 2)


@pytest.fixture
def asked(monkeypatch):
    """Returns the calls of a fake sampler, which returns every response unchanged."""
    seen = []

    def sample(model, inputs, phases, *, settings, **_):
        seen.append((settings, phases, inputs[0].request.temperature))
        return np.stack([one.example.response for one in inputs])

    monkeypatch.setattr(engine.sample, "sample", sample)
    return seen


def test_boxes_take_one_pass_of_the_whole_sequence_as_released(converted, asked):
    """Earlier, a cached prompt had not seen the phrases, and text blocks were decoded in turn."""
    converted.ground(IMAGE, ["a cat", "a dog"])
    bench = object.__new__(refcoco.RefCoco)
    bench.config, bench.settings = converted.settings, config.Evaluate()
    bench.sampling = config.changed(converted.settings.sampling, bench.sampled_with)
    bench.answer(converted, [benchmark.Item("0", "a cat", {}, (png(),))], None)
    for settings, phases, _ in asked:
        assert settings.preset == presets.preset("dense")
        assert [part.num_steps for part in phases] == [1]
    assert [phases[0].count[0, 0] for _, phases, _ in asked] == [8, 4]
    sparse = dataclasses.replace(converted.settings.model, trained_attention="step_causal")
    assert presets.one_pass(config.Sampling(), sparse, 8) == config.Sampling(
        text=config.TextSampling(steps=1)
    )


def test_only_layouts_of_images_have_a_temperature_of_their_own(converted, asked):
    """The release lays out edits at temperature 0."""
    sampling = options.changed(converted.settings.sampling, draws=True, sampler="released")
    converted.generate("a cat", sampling=sampling, layout=True)
    converted.edit(IMAGE, "a dog", sampling=sampling, layout=True)
    texts = [temperature for settings, _, temperature in asked if settings.modality == "text"]
    assert texts == [0.5, 0.0]


def test_a_text_is_what_stands_before_its_end_without_special_tokens(converted, tokenizer):
    """The release returns everything, and leaves its image placeholder in a layout."""
    said = f"a cat{record_examples.NO_IMAGE} sits{chat.END_OF_TURN} and on"
    assert converted.prompts.text(np.array(tokenizer.encode(said))[:, None]) == "a cat sits"


def test_a_request_that_is_too_long_is_reported_and_not_cut(converted):
    with pytest.raises(RequestError, match="at most 8192 fit"):
        converted.prompts.ask("a" * 8192, [], 8)


def test_words_of_tasks_that_the_release_does_not_have(converted):
    prompts, known = converted.prompts, np.ones((2, 2), bool)
    assert prompts.describe == prompts.describe_in == "Describe the image in detail."
    assert prompts.fill_in == "Complete the text."
    assert prompts.fill_words("inpaint", "a cat", known) == "a cat"
    assert len(prompts.ask("which?", [IMAGE, IMAGE], 8).views) == 2
    assert (prompts.answer_tokens, prompts.long_answer_tokens) == (64, 256)


def test_more_steps_than_tokens_are_refused():
    """The release takes as many steps as there are tokens."""
    model = tiny.model_settings()
    image, text = (tiny.request(modality, model, 0, words=3) for modality in ("image", "text"))
    engine.check_steps(image, config.Sampling(num_steps=9), model, 4)
    with pytest.raises(config.ConfigError, match=r"^steps=10 is more than there are tokens"):
        engine.check_steps(image, config.Sampling(num_steps=10), model, 4)
    with pytest.raises(config.ConfigError, match=r"^steps=5 is more than there are tokens"):
        engine.check_steps(text, config.Sampling(text=config.TextSampling(steps=5)), model, 4)


def test_images_are_seen_and_read_in_float32_whatever_the_parameters_are():
    narrow = functools.partial(jax.tree.map, lambda leaf: leaf.astype("bfloat16"))
    pixels = np.zeros((1, 8, 8, 3), np.uint8)

    def seen():
        model = Denoiser(tiny.model_settings(compute_dtype="bfloat16"), rngs=nnx.Rngs(0))
        return narrow(model).vision(pixels)

    small = config.VQ(image_size=8, channels=(8, 8, 8), latent_channels=4, codebook_size=6)

    def read():
        model = narrow(vq.VQModel(small, rngs=nnx.Rngs(0)))
        codes = jnp.zeros((1, 2, 2), int)
        decoded = [vq.for_decoding(model, dtype).decode(codes) for dtype in config.VQ_DTYPES]
        inner = vq.for_decoding(model, "float32").decode_latents(jnp.zeros((1, 2, 2, 4)))
        return model.latents(vq.to_float(pixels)), inner, *decoded

    found = jax.eval_shape(seen), *jax.eval_shape(read)
    assert {x.dtype.name for x in found} == {"float32"}


def test_benchmarks_of_images_are_drawn_as_the_released_demo_draws():
    """The settings file that the released scripts name is not in their repository."""
    for name in ("geneval", "dpg"):
        assert benchmarks.preset(name)["sampling"] == {}
    assert benchmarks.preset("geneval")["evaluate"]["prefix"] == "a realistic image, 4k. "
    assert "SCORE : 7.110" in chat.MICRO_CONDITION


def test_the_scripts_are_not_followed_where_the_paper_says_otherwise():
    assert (config.Optimizer().b1, config.Optimizer().b2) == (0.99, 0.999)
    assert config.Diffusion().time_policy == "uniform"


def test_training_in_blocks_masks_whole_cells():
    model = tiny.model_settings(codes_per_token=4)
    hidden = tiny.batch(["image"] * 4, model).generation.tokens == model.image_mask_id
    assert hidden.any() and not hidden.all()
    np.testing.assert_array_equal(hidden.any(axis=-1), hidden.all(axis=-1))
