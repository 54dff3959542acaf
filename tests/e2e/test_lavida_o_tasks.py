# SPDX-License-Identifier: Apache-2.0
"""Every task on a converted LaViDa-O, tiny and with arbitrary weights."""

import dataclasses

import chat_tokenizer
import jax
import numpy as np
import pytest
import stand_ins
import torch_folder

from sparse_lavida_jax import config
from sparse_lavida_jax.conversation import Conversation
from sparse_lavida_jax.convert import from_torch, stand_in
from sparse_lavida_jax.lavida_o import chat
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sequence import Source, Text, VisionTokens

VOCABULARY = stand_in.byte_tokenizer().get_vocab_size()


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lavida-o")
    model = dataclasses.replace(
        torch_folder.SETTINGS.model,
        vocab_size=VOCABULARY,
        end_of_text_id=chat.CONTROL.index(chat.END_OF_TEXT),
        text_mask_id=chat.CONTROL.index(chat.MASK),
    )
    made = dataclasses.replace(torch_folder.SETTINGS, model=model)
    state = torch_folder.arbitrary(made, "float32")
    torch_folder.write(folder / "released", state, made)
    chat_tokenizer.made_tokenizer(folder / "released")
    from_torch.convert(folder / "released", folder / "model")
    loaded = SparseLaViDa.from_pretrained(folder / "model", batch_size=2)
    # As many steps as a tiny image has codes.
    return loaded.with_sampling(dataclasses.replace(loaded.settings.sampling, num_steps=4))


@pytest.fixture
def shown():
    return np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


@pytest.mark.slow
def test_images_of_every_size_are_drawn(pipe):
    drawn = pipe.generate(["a robot", "a cat"], seed=5)
    assert [image.shape for image in drawn.pixels] == [(24, 24, 3)] * 2
    small = pipe.generate("a robot", size=(16, 16))
    assert small.pixels[0].shape == (16, 16, 3)
    wide = pipe.generate("a robot", size=(8, 24))
    assert wide.pixels[0].shape == (8, 24, 3)
    np.testing.assert_array_equal(pipe.replay(wide.records[0]).pixels[0], wide.pixels[0])
    for size in ((20, 20), (32, 32), (24, 32), (0, 0), (-8, 8)):
        with pytest.raises(RequestError, match="both must be 8 to 24 pixels, multiples of 8"):
            pipe.generate("a robot", size=size)


@pytest.mark.slow
def test_a_model_over_four_devices_answers_and_draws_what_one_device_does(pipe, shown):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))
    spread = SparseLaViDa.from_pretrained(pipe.source.name, mesh=mesh)
    spread = spread.with_sampling(pipe.settings.sampling)
    kernel = spread.model.joint_layers.understanding.mlp.up.kernel[...]
    assert len({str(shard.index) for shard in kernel.addressable_shards}) > 1
    drawn, alone = (one.generate("a robot", seed=5) for one in (spread, pipe))
    np.testing.assert_array_equal(drawn.tokens[0], alone.tokens[0])
    said, expected = (one.ask(shown, "what is it?") for one in (spread, pipe))
    assert said.texts == expected.texts


@pytest.mark.slow
def test_a_drawn_image_is_replayed(pipe):
    drawn = pipe.generate(["a robot", "a cat that is longer"], seed=5)
    again = pipe.replay(drawn.records[1])
    np.testing.assert_array_equal(again.pixels[0], drawn.pixels[1])


@pytest.mark.slow
def test_an_edit_sees_the_image_and_its_codes(pipe, shown, monkeypatch):
    kept, sample = [], pipe.engine.sample

    def watched(examples, *asked, **more):
        kept.extend(examples)
        return sample(examples, *asked, **more)

    monkeypatch.setattr(pipe.engine, "sample", watched)
    edited = pipe.edit(shown, "make it blue")
    assert edited.pixels[0].shape == (24, 24, 3)
    (example,) = kept
    kinds = [type(part) for part in example.parts]
    assert kinds.count(Source) == kinds.count(VisionTokens) == 1
    assert example.views[0].shape[1:] == (8, 8, 3)


@pytest.mark.slow
def test_known_cells_stay(pipe, shown):
    square = np.ascontiguousarray(shown[:, :20])
    image = pipe.prompts.codec_image(square, 24)
    (before,) = pipe.codec.encode(image[None])
    filled = pipe.inpaint(square, "a robot", box=(0, 0, 6, 6))
    np.testing.assert_array_equal(filled.tokens[0][1:], before[1:])
    around = pipe.outpaint(square, "a robot", box=(8, 8, 16, 16))
    assert around.pixels[0].shape == (24, 24, 3)


@pytest.mark.slow
def test_text_is_written_in_blocks_of_32(pipe, shown):
    answer = pipe.ask(shown, "what is it?", max_new_tokens=33)
    assert len(answer.tokens[0]) == 64
    assert len(pipe.ask(None, "why?", max_new_tokens=1).tokens[0]) == 32
    assert isinstance(pipe.caption(shown).text, str)


@pytest.mark.slow
def test_given_words_stay(pipe, shown):
    said = pipe.infill("it is ___ and {3} cold").text
    assert said.startswith("it is")
    assert said.endswith(" cold")
    said = pipe.constrained_caption(shown, template="a {4} robot").text
    assert said.endswith(" robot")


def test_boxes_of_several_phrases_come_from_one_step(pipe, shown, monkeypatch):
    asked = []

    def found(examples, requests, sampling, **_):
        (example,) = examples
        asked.append((sampling.text.steps, [request.seed for request in requests]))
        response = example.response.copy()
        response[~example.given, 0] = said
        return stand_ins.sample_output([response])

    said = [pipe.tokenizer.location_ids[i] for i in (0, 2, 4, 6, 2, 2, 8, 6)]
    result = pipe.ground(shown, ["a robot", "a cat"])
    assert len(result.boxes) == 2
    monkeypatch.setattr(pipe.engine, "sample", found)
    result = pipe.ground(shown, ["a robot", "a cat"])
    # A frame of 8 over a square of 30 with 5 rows of padding.
    assert result.boxes == ((0.0, 2.5, 15.0, 17.5), (7.5, 2.5, 30.0, 17.5))
    assert asked == [(1, [0])]
    for place in (0, 3):  # no coordinate: the first box is not found, and the second is
        said[place] = pipe.tokenizer.id_of("<LOC_BEGIN>")
        result = pipe.ground(shown, ["a robot", "a cat"])
        assert result.boxes == (None, (7.5, 2.5, 30.0, 17.5))


@pytest.mark.slow
def test_reflection_shows_earlier_attempts(pipe, monkeypatch):
    kept, sample = [], pipe.engine.sample

    def watched(examples, *asked, **more):
        kept.extend(example for example in examples if example.modality == "image")
        return sample(examples, *asked, **more)

    monkeypatch.setattr(pipe.engine, "sample", watched)
    result = pipe.reflect("a robot", rounds=2)
    assert len(result.attempts[0]) == len(kept)
    if len(kept) == 2:
        assert sum(isinstance(part, VisionTokens) for part in kept[1].parts) == 1
        ids = np.concatenate([part.ids for part in kept[1].parts if isinstance(part, Text)])
        assert "past generations" in pipe.tokenizer.decode(ids.tolist())


@pytest.mark.slow
def test_tasks_take_turns(pipe):
    talk = Conversation(pipe, seed=4)
    with pytest.raises(RequestError, match="about an image"):
        talk.say("edit", "make it blue")
    talk.say("generate", "a robot")
    first = talk.image
    talk.say("ask", "what is it?")
    assert talk.image is first
    talk.say("edit", "make it blue")
    assert [turn.seeds for turn in talk.turns] == [(4,), (5,), (6,)]
    with pytest.raises(RequestError, match="there is no task 'paint'"):
        talk.say("paint", "x")


def test_control_tokens_in_a_prompt_are_reported(pipe):
    with pytest.raises(RequestError, match="control token"):
        pipe.generate(f"a robot {chat.END_OF_TURN}")


@pytest.mark.slow
def test_a_layout_is_written_only_if_asked_for_and_a_given_one_is_used(pipe, monkeypatch):
    assert pipe.generate("a robot").layouts == ()
    drawn = pipe.generate("a robot", layout="robot<LOC_0><LOC_0><LOC_8><LOC_8>")
    assert drawn.layouts == ("robot<LOC_0><LOC_0><LOC_8><LOC_8>",)
    assert len(pipe.generate("a robot", layout=True).layouts) == 1


def test_more_steps_than_codes_are_reported(pipe):
    sampling = dataclasses.replace(pipe.settings.sampling, num_steps=37)
    with pytest.raises(config.ConfigError, match="1 to 36 are allowed"):
        pipe.generate("a robot", sampling=sampling)
