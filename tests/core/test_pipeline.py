# SPDX-License-Identifier: Apache-2.0
"""Calls of the interface become the right examples, and responses the right results."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import stand_ins
import tiny

from sparse_lavida_jax import config, pipeline, sequence
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.convert import adapters
from sparse_lavida_jax.inference import engine
from sparse_lavida_jax.models import fuse, image_codec, lora, parameters
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.scenes import prompts, tasks, world
from sparse_lavida_jax.scenes.tokenizer import SHIPPED

LAID_OUT = {"draw": 1.0, "layout": 1.0, "edit": 1.0, "edit_layout": 1.0, "fill_layout": 1.0}


@pytest.fixture(autouse=True)
def _quick():
    with stand_ins.quick_compilation():
        yield


# ---------------------------------------------------------------------------------------------
# Images as cells of codes.


def test_the_cells_of_a_scene_are_in_the_table_of_appearances():
    """Four codes per cell, in the order of the shipped tokenizer's grid."""
    model = config.Model(codes_per_token=4, codebook_size=256)
    codec = image_codec.ImageCodec(stand_ins.FOUR_CODES, model)
    scene = next(s for i in range(99) if len(s := tasks.sample("edit", 0, i).image) == 6)
    (cells,) = codec.encode(world.render(scene)[None])
    np.testing.assert_array_equal(cells, prompts.appearance_codes(codec)[np.array(scene.cells)])
    (decoded,) = codec.to_pixels(cells[None])
    assert world.read(decoded) == scene
    assert codec.image_size == decoded.shape[0] == 96


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        (stand_ins.FOUR_CODES, {}, "makes 12x12 codes of 256 kinds, and the model takes 6x6 of 64"),
        (
            "scenes",
            {"codebook_size": 49},
            "6x6 codes of 64 kinds, and the model takes 6x6 of 49",
        ),
        ("scenes_g9", {}, "No image tokenizer at 'scenes_g9'"),
    ],
)
def test_a_codec_that_does_not_fit_the_model_is_reported(name, changes, told):
    with pytest.raises(config.ConfigError, match=told):
        image_codec.ImageCodec(name, config.Model(**changes))


def test_a_model_without_its_image_tokenizer_is_refused(tmp_path):
    given = stand_ins.settings()
    model_folder.save_model(
        tmp_path / "model", tiny.denoiser(given.model), given, tokenizer_path=SHIPPED,
        vq_folder=None, readme="",
    )  # fmt: skip
    with pytest.raises(config.ConfigError, match=r"No image tokenizer at '.*/model/vq'"):
        pipeline.SparseLaViDa.from_pretrained(tmp_path / "model")


# ---------------------------------------------------------------------------------------------
# Requests.


@pytest.fixture
def pipe(monkeypatch):
    """Returns a function that makes a pipeline, which records its examples in `asked`.

    Texts are those of `texts_told`, or empty; images are the responses of their examples.
    """

    def make(trained, **sections):
        given = stand_ins.settings(data={"tasks": trained, "max_answer_len": 40}, **sections)
        made = pipeline.SparseLaViDa(
            tiny.denoiser(given.model),
            given,
            stand_ins.prompts(given),
            stand_ins.Codec(),
            batch_size=2,
        )
        made.asked, made.texts_told = [], []

        def sample(examples, *_, **__):
            made.asked.append(examples)
            if examples[0].modality == "image":
                return stand_ins.sample_output(example.response for example in examples)
            told = made.texts_told or [""] * len(examples)
            return stand_ins.sample_output(
                made.encoder.text_example("", text, length=len(example.response)).response
                for text, example in zip(told, examples, strict=True)
            )

        monkeypatch.setattr(made.engine, "sample", sample)
        return made

    return make


def texts_in(made, example):
    """The text parts of an example, without headers."""
    return [
        made.tokenizer.decode(part.ids.tolist())
        for part in example.parts
        if isinstance(part, sequence.Text) and not part.keep
    ]


def test_an_image_is_laid_out_before_it_is_drawn(pipe):
    made = pipe(LAID_OUT)
    made.texts_told = [" a layout", " another"]
    images = made.generate(["a red cross", "two blue crosses"]).pixels
    planned, drawn = made.asked
    assert [texts_in(made, example) for example in planned] == [
        ["a red cross"],
        ["two blue crosses"],
    ]
    assert [texts_in(made, example) for example in drawn] == [
        ["a red cross", " a layout"],
        ["two blue crosses", " another"],
    ]
    assert [len(example.response) for example in planned] == [40, 40]
    assert [image.shape for image in images] == [(96, 96, 3)] * 2


def test_an_image_is_not_laid_out_where_that_was_not_learned_or_not_wanted(pipe):
    untrained = pipe({"draw": 1.0})
    untrained.generate(["a red cross"])
    unwanted = pipe(LAID_OUT)
    unwanted.generate(["a red cross"], sampling=config.Sampling(layout=False))
    told = pipe(LAID_OUT)
    told.generate(["a red cross"], layout=[" mine"])
    assert [texts_in(untrained, e) for (e,) in untrained.asked] == [["a red cross"]]
    assert [texts_in(unwanted, e) for (e,) in unwanted.asked] == [["a red cross"]]
    assert [texts_in(told, e) for (e,) in told.asked] == [["a red cross", " mine"]]


@pytest.mark.parametrize("known", [False, True])
def test_an_edit_shows_image_and_source_and_keeps_what_is_known(pipe, known):
    made = pipe(LAID_OUT | {"inpaint": 1.0})
    made.texts_told = [" a layout"]
    sample = tasks.sample("inpaint" if known else "edit", 0, 0)
    shown = world.render(sample.image)
    if known:
        edited = made.inpaint(shown, sample.prompt, known=sample.known_grid).pixels[0]
    else:
        edited = made.edit(shown, sample.prompt).pixels[0]
    (planned,), (changed,) = made.asked
    for example in (planned, changed):
        assert example.pixels.shape == (48, 48, 3)
        assert sum(isinstance(part, sequence.VisionTokens) for part in example.parts) == 1
    (source,) = [part for part in changed.parts if isinstance(part, sequence.Source)]
    np.testing.assert_array_equal(source.codes[:, 0], sample.image.cells)
    assert texts_in(made, changed)[1] == " a layout"
    np.testing.assert_array_equal(changed.given, sample.known if known else [False] * 36)
    np.testing.assert_array_equal(edited, shown)


def test_which_layout_an_edit_needs_depends_on_what_is_known(pipe):
    shown, known = [stand_ins.EMPTY], [np.zeros((6, 6), bool)]
    made = pipe({"edit": 1.0, "edit_layout": 1.0, "inpaint": 1.0})
    made.edit(shown, ["x"])
    assert len(made.asked) == 2
    made.inpaint(shown, ["x"], known=known)
    assert len(made.asked) == 3


def test_an_image_of_another_size_is_brought_to_ours(pipe):
    made = pipe({"edit": 1.0, "answer": 1.0})
    scene = tasks.sample("edit", 0, 3).image
    large = world.render(scene, 240)
    (edited,) = made.edit([large], ["x"]).pixels
    assert world.read(edited) == scene
    made.ask(np.zeros((31, 77, 3), np.uint8), "what?")
    assert made.asked[-1][0].pixels.shape == (48, 48, 3)


def test_text_ends_at_its_first_end(pipe):
    made = pipe({"answer": 1.0})
    made.texts_told = [" yes", ""]
    assert made.ask(None, ["one?", "two?"]).texts == ("yes", "")
    ids = made.encoder.text_example("", " yes", length=8).response
    assert made.texts([np.concatenate([ids, ids]), ids[:1]]) == [" yes", " yes"]


@pytest.mark.parametrize(("asked", "given"), [(1, 8), (8, 8), (9, 16), (16, 16)])
def test_the_space_for_an_answer_is_whole_text_blocks(pipe, asked, given):
    made = pipe({"answer": 1.0})
    made.ask(None, "how many?", max_new_tokens=asked)
    assert len(made.asked[0][0].response) == given


@pytest.mark.parametrize(
    ("task", "given", "told"),
    [
        ("generate", {"num_images": 10**10}, "num_images=10000000000 is out of range: 1 to 1024"),
        ("generate", {"num_images": 0}, "num_images=0 is out of range: 1 to 1024"),
        ("reflect", {"rounds": 10**9}, "rounds=1000000000 is out of range: 1 to 1024"),
        ("ask", {"max_new_tokens": 10**9}, "max_new_tokens=1000000000 is out of range: 1 to 8192"),
        ("generate", {"guidance": 1e308}, "guidance=1e[+]308 is out of range"),
        ("generate", {"guidance": float("inf")}, "guidance=inf is out of range"),
        ("ask", {"temperature": 1e308}, "temperature=1e[+]308 is out of range"),
        ("generate", {"registers": 10**9}, "registers=1000000000 is out of range"),
        ("generate", {"registers": (4, 10**9)}, "registers=1000000000 is out of range"),
        ("generate", {"steps": 10**10}, "^steps=10000000000 is out of range"),
        ("generate", {"layout": "\ud800"}, "of the layout is half a character"),
    ],
)
def test_numbers_without_bounds_end_before_anything_is_made(pipe, task, given, told):
    made = pipe({"draw": 1.0, "answer": 1.0, "reflect": 1.0, "layout": 1.0})
    with pytest.raises((RequestError, config.ConfigError), match=told):
        made.requests(task, "a", **given)


# ---------------------------------------------------------------------------------------------
# Batches.


@pytest.fixture
def batches(monkeypatch):
    """The batches that reach the sampler, as lists of (words of the prompt, seed)."""
    seen = []

    def sample(model, inputs, phases, *, settings, prompt_len, **_):
        seen.append([(len(one.example.parts[1].ids), one.request.seed) for one in inputs])
        sample.prompt_lens.add(prompt_len)
        return np.stack([np.full_like(one.example.response, one.request.seed) for one in inputs])

    sample.prompt_lens = set()
    monkeypatch.setattr(engine.sample, "sample", sample)
    return seen, sample.prompt_lens


def test_examples_of_one_length_are_sampled_together_and_come_back_in_order(batches):
    given = stand_ins.settings()
    made = pipeline.SparseLaViDa(
        tiny.denoiser(given.model), given, stand_ins.prompts(given), stand_ins.Codec(), 2
    )
    lengths = (8, 16, 8, 16, 16)
    examples = [
        made.encoder.text_example(" red" * (i + 1), length=length)
        for i, length in enumerate(lengths)
    ]
    responses = made.sample(examples, seed=70)
    seen, prompt_lens = batches
    # The last batch is padded with its last row; row i has seed 70 + i in any batch.
    assert seen == [[(1, 70), (3, 72)], [(2, 71), (4, 73)], [(5, 74), (5, 74)]]
    assert [response[0, 0] for response in responses] == [70, 71, 72, 73, 74]
    assert tuple(len(response) for response in responses) == lengths
    assert len(prompt_lens) == 1  # so that all batches run the same programs


@pytest.mark.slow
def test_a_row_with_settings_of_its_own_is_what_it_is_alone():
    """For images with and without temperature and guidance, and answers; also their records."""
    given = stand_ins.settings(sampling={"temperature": 0.7, "text": {"temperature": 0.3}})
    made = pipeline.SparseLaViDa(
        tiny.denoiser(given.model), given, stand_ins.prompts(given), stand_ins.Codec(), 2
    )
    prompts, own = ["red", "two blue ones"], [(0.0, 0.0), (2.0, 3.0)]
    temperature, guidance = zip(*own, strict=True)
    drawn = made.generate(prompts, seed=[4, 4], temperature=temperature, guidance=guidance)
    turned = made.generate(
        prompts, seed=[4, 4], temperature=temperature[::-1], guidance=guidance[::-1]
    )
    for i, (hot, scale) in enumerate(own):
        alone = dataclasses.replace(given.sampling, temperature=hot, guidance=scale)
        (cells,) = made.generate(prompts[i], seed=4, sampling=alone).tokens
        np.testing.assert_array_equal(drawn.tokens[i], cells)
        assert (turned.tokens[i] != cells).any()
        assert config.build(config.Sampling, drawn.records[i]["sampling"]) == alone
    said = made.ask(None, prompts, seed=[4, 4], temperature=[3.0, None])
    hot = config.changed(given.sampling, {"text": {"temperature": 3.0}})
    for i, sampling in enumerate((hot, given.sampling)):
        # Two rows, so that nothing more is compiled.
        ids, _ = made.ask(None, [prompts[i]] * 2, seed=[4, 4], sampling=sampling).tokens
        np.testing.assert_array_equal(said.tokens[i], ids)


def test_a_sampler_with_another_attention_than_in_training_is_warned_of_once(pipe, caplog):
    full = dataclasses.replace(stand_ins.settings().model, trained_attention="full")
    made = pipe(LAID_OUT | {"answer": 1.0}, model=full)
    text = config.changed(made.settings.sampling, {"text": {"preset": "fast_dllm_dual"}})
    made.generate("a circle", sampling=text)
    shown = np.zeros((96, 96, 3), np.uint8)
    made.ask(shown, "is there a circle?")
    assert caplog.messages == []
    for _ in range(2):
        made.generate("a circle", sampling=config.Sampling(preset="pr", num_steps=2))
        made.ask(
            shown,
            "is there a circle?",
            sampling=config.Sampling(text=config.TextSampling(preset="t")),
        )
    told = "this model was not trained with the attention of the sampler 'pr', which will draw"
    (message,) = caplog.messages
    assert told in message
    trained = pipe(LAID_OUT)
    trained.generate("a circle", sampling=config.Sampling(preset="pr", num_steps=2))
    assert caplog.messages == [message]
    trained.generate("a circle", sampling=config.Sampling(preset="dense", num_steps=2))
    assert caplog.messages == [message, message.replace("'pr'", "'dense'")]


def test_another_model_is_put_into_the_same_pipeline():
    given = stand_ins.settings()
    first = tiny.denoiser(given.model)
    made = pipeline.SparseLaViDa(first, given, stand_ins.prompts(given), stand_ins.Codec(), 3)
    other = tiny.denoiser(dataclasses.replace(given.model, num_registers=1))
    assert made.with_model(other).model is other
    assert made.with_model(other).batch_size == 3
    sparser = made.with_sampling(config.Sampling(num_steps=1))
    assert sparser.settings.sampling.num_steps == 1
    assert made.settings.sampling.num_steps == 2
    assert sparser.model is first


def test_an_image_is_drawn_again_with_the_attention_that_drew_it(caplog):
    """If that is available here; otherwise one line says so. Older records do not name it."""
    given = stand_ins.settings()
    model = tiny.denoiser(given.model)
    made = pipeline.SparseLaViDa(model, given, stand_ins.prompts(given), stand_ins.Codec(), 2)
    drawn = made.generate("a red cross", seed=4)
    (record,) = drawn.records
    assert record["attention"] == "reference"
    (again,) = made.replay(record | {"attention": "blockwise"}).records
    assert again == record | {"attention": "blockwise"}
    assert made.model is model and model.settings.attention_implementation == ""
    assert caplog.messages == []
    for asked in ({"attention": "pallas_gpu"}, {"attention": None}):
        np.testing.assert_array_equal(made.replay(record | asked).pixels[0], drawn.pixels[0])
    (message,) = caplog.messages
    assert "by pallas_gpu, which does not run here" in message


def test_a_record_keeps_the_words_of_user_and_model():
    """Images of earlier versions were drawn from words in any case."""
    given = stand_ins.settings()
    made = pipeline.SparseLaViDa(
        tiny.denoiser(given.model), given, stand_ins.prompts(given), stand_ins.Codec(), 2
    )
    drawn = made.generate("Red Circle", seed=4, steps=1)
    assert drawn.prompts == ("Red Circle",)
    (record,) = drawn.records
    assert (record["prompt"], record["asked"]) == ("a red circle", "Red Circle")
    assert made.replay(record).records == drawn.records
    older = {name: value for name, value in record.items() if name != "asked"}
    assert made.replay(older | {"prompt": "A Red circle"}).prompts == ("A Red circle",)


# ---------------------------------------------------------------------------------------------
# Parameters of one task.


def test_a_model_that_is_loaded_for_images_keeps_what_they_read_and_writes_no_text():
    whole, drawing = (
        pipeline.SparseLaViDa.from_pretrained("scenes", task=task) for task in ("both", "image")
    )
    sizes = [fuse.parameter_bytes(pipe.model) for pipe in (whole, drawing)]
    assert sizes[1] < 0.9 * sizes[0]
    sampling = dataclasses.replace(whole.settings.sampling, num_steps=1, layout=False)
    (image,) = drawing.generate("a red circle", sampling=sampling).pixels
    assert image.shape[-1] == 3
    with pytest.raises(ValueError, match="these parameters no understanding branch"):
        drawing.ask(None, "what is it?")


def test_a_model_is_loaded_with_adapters_and_says_so(tmp_path):
    base = model_folder.load_model("scenes")
    given = dataclasses.replace(base.config, lora=config.Lora(rank=1, targets="attn_out$"))
    model = lora.attach(base.model, given.lora, jax.random.key(0))
    shape = model.joint_layers.attn_out.lora_b.shape
    model = parameters.replaced(model, {"joint_layers/attn_out/lora_b": np.full(shape, 0.1)})
    mine, _ = parameters.parted(model, lambda name: "lora" in name)
    adapters.save(tmp_path / "mine", mine, given, base="scenes")
    load = functools.partial(pipeline.SparseLaViDa.from_pretrained, "scenes")
    plain, half = load(), load(adapters=f"{tmp_path / 'mine'}:0.5")
    assert half.source.adapters == f"{tmp_path / 'mine'}:0.5"
    assert half.source.sha256 != plain.source.sha256
    whole = load(adapters={str(tmp_path / "mine"): 1.0}).model.joint_layers.attn_out.kernel[...]
    before = plain.model.joint_layers.attn_out.kernel[...]
    after = half.model.joint_layers.attn_out.kernel[...]
    np.testing.assert_allclose(after - before, (whole - before) / 2, atol=1e-6)
    assert np.abs(after - before).max() > 0.01
    half.save_pretrained(tmp_path / "copy")
    copied = model_folder.load_model(tmp_path / "copy").model.joint_layers.attn_out.kernel[...]
    np.testing.assert_allclose(copied, after, atol=1e-6)
    with pytest.raises(model_folder.CheckpointError, match="push the folder that save_pretrained"):
        half.push_to_hub("me/mine")
    apart = load(adapters=half.source.adapters, merge_adapters=False)
    np.testing.assert_array_equal(apart.model.joint_layers.attn_out.kernel[...], before)
    with pytest.raises(ValueError, match="next to adapters, all parameters are kept"):
        load(adapters=half.source.adapters, merge_adapters=False, task="text")


def test_parameters_for_images_alone_draw_without_a_layout_and_refuse_to_write_one():
    given = stand_ins.settings(data={"tasks": LAID_OUT})
    narrow = fuse.for_inference(tiny.denoiser(given.model), task="image")
    pipe = pipeline.SparseLaViDa(narrow, given, stand_ins.prompts(given), stand_ins.Codec())
    assert not pipe.generate("a red circle").layouts
    with pytest.raises(RequestError, match="use task='both'"):
        pipe.generate("a red circle", layout=True)
