# SPDX-License-Identifier: Apache-2.0
"""Training samples as in the specification (Sec. 9.1, 9.4), and in the form for sampling."""

import collections
import dataclasses
import re

import numpy as np
import pytest
import raw_data
import tiny

from sparse_lavida_jax import config
from sparse_lavida_jax.data import batch as making
from sparse_lavida_jax.lavida_o import chat
from sparse_lavida_jax.lavida_o.prompts import ChatPrompts
from sparse_lavida_jax.mixture import record_examples
from sparse_lavida_jax.mixture.records import Record, RecordError
from sparse_lavida_jax.sequence import LearnedText, Response, Source, Text, VisionTokens, num_tokens

CODES = np.arange(16, dtype=np.int32).reshape(1, 4, 4)
SEEN = {"images": (raw_data.png(0, 64, 64),), "size": (64, 64)}
DRAWN = {
    "target": CODES,
    "crops": np.array([[0, 5]], np.int32),
    "light": np.array([[0.5, 0.25]], np.float32),
    "size": (640, 480),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return raw_data.tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def mixer(tokenizer):
    return record_examples.Mixer(tokenizer, raw_data.settings(tokenizer))


def record(kind, *asked, **fields):
    return Record(kind, "set", "set:1", asked, **fields)


def generator(seed=0):
    return np.random.default_rng(seed)


class Never(np.random.Generator):
    """A generator whose chances always fail and whose choices are always the first."""

    def __init__(self):
        super().__init__(np.random.PCG64(0))

    def random(self, shape=None):
        return 1.0 if shape is None else np.ones(shape)

    def integers(self, end):
        return 0


class Always(Never):
    """A generator whose chances always succeed."""

    def random(self, shape=None):
        return 0.0 if shape is None else np.zeros(shape)


class Measured(Never):
    """Keeps the micro-condition, with luminance and contrast."""

    def random(self, shape=None):
        return 1.0 if shape is None else np.array([1.0, 0.0, 0.0])


def spelled(tokenizer, parts):
    """Parts as one string: learned text in {}, kept text in (), images, cells, response."""

    def words(ids):
        return tokenizer._inner.decode(ids.tolist(), skip_special_tokens=False)

    said = []
    for part in parts:
        match part:
            case LearnedText():
                said.append("{" + words(part.ids) + "}")
            case Text():
                said.append(f"({words(part.ids)})" if part.keep else words(part.ids))
            case VisionTokens():
                said.append("[seen]")
            case Source():
                said.append(f"[{len(part.codes)} source]")
            case Response():
                said.append(f"[{part.num_tokens} drawn]")
    return "".join(said)


PREFIX = (
    "<|startoftext|><|start_header_id|>system<|end_header_id|>\n\n"
    "You are a helpful language and vision assistant. You are able to understand the visual content"
    " that the user provides, and assist the user with a variety of tasks using natural language."
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
)
ASSISTANT = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
BEGIN, END = "<|reserved_token_126095|>", "<|reserved_token_126096|>"
IMAGE = f"{BEGIN}}}[4 drawn]{{{END}"  # inside an answer
LAYOUT = "Please first think and plan the layout in LOC format."
FEEDBACK = "Please also consider past generations and their feedbacks. Do not repeat these errors"
TWO = {"images": (raw_data.png(0), raw_data.png(1)), "size": (48, 40)}
SOURCES = {"sources": CODES, **SEEN}

RELEASED = {
    "text to image": (
        record("text_to_image", "a robot", **DRAWN),
        f"Generate an image with the caption: a robot ORIGINAL WIDTH : 640; ORIGINAL HEIGHT : 480;"
        f" TOP : 0; LEFT : 5{ASSISTANT}{{Sure {IMAGE}<|eot_id|>}}",
    ),
    "layout and image": (
        record("layout", "a robot", layout="robot <LOC_1>", **DRAWN),
        "Generate an image with the caption: a robot ORIGINAL WIDTH : 640; ORIGINAL HEIGHT : 480;"
        f" TOP : 0; LEFT : 5. {LAYOUT}{ASSISTANT}{{Sure I should place the objects in the following"
        f" manner robot <LOC_1> {IMAGE}<|eot_id|>}}",
    ),
    "layout alone": (
        record("layout", "a robot", layout="robot <LOC_1>", form="plan_only"),
        f"Generate an image with the caption: a robot . {LAYOUT}{ASSISTANT}{{Sure I should place"
        " the objects in the following manner robot <LOC_1> <|reserved_token_7|><|eot_id|>}",
    ),
    "after feedback, without a layout": (
        record("layout", "a robot", form="no_plan", feedback=("blue", "no arms"), **(DRAWN | TWO)),
        "Generate an image with the caption: a robot ORIGINAL WIDTH : 48; ORIGINAL HEIGHT : 40;"
        f" TOP : 0; LEFT : 5. {LAYOUT} {FEEDBACK} Generation 1: [seen]\n Feedback 1: blue\n"
        f"Generation 2: [seen]\n Feedback 2: no arms{ASSISTANT}{{{IMAGE}<|eot_id|>}}",
    ),
    "after one feedback, whose image moves to the front": (
        record("layout", "a robot", layout="x", feedback=("blue",), form="plan_only", **SEEN),
        f"[seen]\nGenerate an image with the caption: a robot . {LAYOUT} {FEEDBACK} Generation 1:"
        f" \n Feedback 1: blue{ASSISTANT}{{Sure I should place the objects in the following manner"
        " x <|reserved_token_7|><|eot_id|>}",
    ),
    "edit": (
        record("edit", "make it blue", **(DRAWN | SOURCES)),
        f"[seen] [4 source]  make it blue{ASSISTANT}{{Sure {IMAGE}<|eot_id|>}}",
    ),
    "edit of two": (
        record("edit", "join them", **(DRAWN | TWO), sources=np.repeat(CODES, 2, axis=0)),
        f"[seen] [4 source] [seen] [4 source]  join them{ASSISTANT}{{Sure {IMAGE}<|eot_id|>}}",
    ),
    "edit with a difference": (
        record("edit", "blue", pixel_diff=0.5, **(DRAWN | SOURCES)),
        "[seen] [4 source]  blue ORIGINAL WIDTH : 64; ORIGINAL HEIGHT : 64; TOP : 0; LEFT : 5;"
        f" PIXEL_DIFF : 0.500 ;{ASSISTANT}{{Sure {IMAGE}<|eot_id|>}}",
    ),
    "edit with a layout": (
        record("edit_layout", "blue", layout="<LOC_1>", operation="adding", **(DRAWN | SOURCES)),
        f"[seen] [4 source]  blue. {LAYOUT}{ASSISTANT}{{Sure I should consider adding the objects"
        f" in these locations :  <LOC_1> {IMAGE}<|eot_id|>}}",
    ),
    "conversation": (
        record("understanding", "what is <image>?", "sure?", answered=("A dog.", "Yes."), **SEEN),
        f"[seen]\nwhat is ?{ASSISTANT}{{A dog.<|eot_id|>}}<|start_header_id|>user<|end_header_id|>"
        f"\n\nsure?{ASSISTANT}{{Yes.<|eot_id|>}}",
    ),
    "conversation about two": (
        record("understanding", "<image> or <image>?", answered=("Both.",), **TWO),
        f"[seen] or [seen]?{ASSISTANT}{{Both.<|eot_id|>}}",
    ),
    "verdict": (
        record("reflection", "a robot", answered=("It is correct.",), **SEEN),
        "[seen]\nPlease evaluate this generated image based on the following prompt: a robot Focus"
        f" on text alignment and compositionality.{ASSISTANT}{{It is correct.<|eot_id|>}}",
    ),
    "box": (
        record("grounding", "left dog", boxes=np.array([[0, 8, 32, 64]], np.float32), **SEEN),
        "[seen]\n Please locate left dog in this image. Give bounding boxes in LOC format."
        f"{ASSISTANT}{{<LOC_BEGIN><LOC_0><LOC_1><LOC_4><LOC_8><LOC_END><|eot_id|>}}",
    ),
    "box in words": (
        record("grounding", "left dog", answered=("at <LOC_1>",), **SEEN),
        "[seen]\n Please locate left dog in this image. Give bounding boxes in LOC format."
        f"{ASSISTANT}{{at <LOC_1><|eot_id|>}}",
    ),
    "dense caption": (
        record("dense_caption", answered=("dog <LOC_1>",), **SEEN),
        "[seen]\n Generate a dense image caption with bounding boxes in LOC format."
        f"{ASSISTANT}{{dog <LOC_1><|eot_id|>}}",
    ),
    "dense caption of boxes": (
        record(
            "dense_caption",
            phrases=("a dog", "it"),
            boxes=np.array([[0, 0, 8, 8], [8, 8, 64, 64]], np.float32),
            **SEEN,
        ),
        "[seen]\n Generate a dense image caption with bounding boxes in LOC format."
        f"{ASSISTANT}{{There are following objects in the scene. <box_p> a dog </box_p><LOC_BEGIN>"
        "<LOC_0><LOC_0><LOC_1><LOC_1><LOC_END>, <box_p> it </box_p><LOC_BEGIN><LOC_1><LOC_1><LOC_8>"
        "<LOC_8><LOC_END><|eot_id|>}",
    ),
}


@pytest.mark.parametrize(("made", "said"), RELEASED.values(), ids=RELEASED)
def test_sequences_are_spelled_as_released(mixer, tokenizer, made, said):
    sequence = mixer.sequence(made, Never())
    assert spelled(tokenizer, sequence.parts) == (PREFIX + said) + (
        "" if made.draws else "[0 drawn]"
    )
    assert len(sequence.views) == len(made.images)
    expected = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    np.testing.assert_array_equal(sequence.codes, expected if made.draws else np.zeros((0, 4)))


def test_text_of_an_image_with_a_layout_mostly_stays_clean(mixer, tokenizer):
    made = RELEASED["layout and image"][0]
    said = spelled(tokenizer, mixer.sequence(made, Always()).parts)
    assert "{" not in said
    kept = f"(Sure I should place the objects in the following manner robot <LOC_1> {BEGIN})"
    assert said.endswith(f"{ASSISTANT}{kept}[4 drawn]({END}<|eot_id|>)")
    clean = sum(
        not any(isinstance(p, LearnedText) for p in mixer.sequence(made, generator(i)).parts)
        for i in range(300)
    )
    assert abs(clean - 240) < 35  # five standard errors of 7
    alone = RELEASED["layout alone"][0]
    assert "{" in spelled(tokenizer, mixer.sequence(alone, Always()).parts)


def test_earlier_attempts_and_several_images_are_seen_whole(mixer):
    for name in ("after one feedback, whose image moves to the front", "edit of two"):
        sequence = mixer.sequence(RELEASED[name][0], Never())
        assert {len(views) for views in sequence.views} == {1}
        # Four features and a newline.
        seen = [part for part in sequence.parts if isinstance(part, VisionTokens)]
        assert {part.num_tokens for part in seen} == {5}
    assert len(mixer.sequence(RELEASED["edit"][0], Never()).views[0]) == 3


# --- what is random ----------------------------------------------------------------------------


def test_conditions_say_what_was_measured():
    made = record("text_to_image", "x", score=6.5, hps=2.5, **DRAWN)
    said = "ORIGINAL WIDTH : 640; ORIGINAL HEIGHT : 480; TOP : 0; LEFT : 5"
    known = "; SCORE : 6.500; HPS : 2.500"
    light = "; LUMINANCE : 0.500; CONTRAST : 0.250"
    assert record_examples.condition_of(made, 0, Never()) == said + known
    assert record_examples.condition_of(made, 0, Measured()) == said + light + known
    assert record_examples.condition_of(made, 0, Always()) == ""


def test_conditions_are_there_as_often_as_released():
    made = record("text_to_image", "x", **DRAWN)
    said = [record_examples.condition_of(made, 0, generator(i)) for i in range(1000)]
    there = [words for words in said if words]
    assert abs(len(there) - 700) < 75  # five standard errors of 14.5
    for name in ("LUMINANCE", "CONTRAST"):
        assert abs(sum(name in words for words in there) / len(there) - 0.5) < 0.1


def test_long_captions_are_now_and_then_their_first_sentences():
    sentences = [f"{n} " * 30 + "stands there." for n in ("One", "Two", "Three")]
    caption = " ".join(sentences)
    made = record("text_to_image", caption, **DRAWN)
    wanted = {" ".join(sentences[:k]) for k in (1, 2, 3)}
    found = collections.Counter(record_examples.caption_of(made, generator(i)) for i in range(1000))
    assert set(found) == wanted
    # A share of 0.2 is shortened, a third of those to all three sentences.
    assert abs(found[caption] / 1000 - (0.8 + 0.2 / 3)) < 0.06
    short = record("text_to_image", caption[:150], **DRAWN)
    assert record_examples.caption_of(short, Always()) == caption[:150]
    assert record_examples.caption_of(record("layout", caption, **DRAWN), Always()) == caption
    assert len(record_examples.caption_of(record("layout", "x" * 900, **DRAWN), Never())) == 800


def test_one_of_several_crops_is_drawn(mixer):
    crops = {
        "target": np.stack([CODES[0], CODES[0] + 1]),
        "crops": np.array([[0, 5], [0, 7]], np.int32),
        "light": np.zeros((2, 2), np.float32),
        "size": (640, 480),
    }
    made, found = record("text_to_image", "a", **crops), set()
    for seed in range(40):
        sequence = mixer.sequence(made, generator(seed))
        said = spelled(mixer.tokenizer, sequence.parts)
        found.add((int(sequence.codes[0, 0]), *re.findall(r"LEFT : (\d)", said)))
    assert {(0,), (1,), (0, "5"), (1, "7")} == found


def test_codes_in_the_boxes_of_an_edit_may_weigh_more(tokenizer):
    made = record("edit", "x", boxes=np.array([[0, 0, 20, 16]], np.float32), **(DRAWN | SOURCES))
    plain = record_examples.Mixer(tokenizer, raw_data.settings(tokenizer))
    assert plain.sequence(made, Never()).code_weight is None
    heavy = record_examples.Mixer(
        tokenizer, raw_data.settings(tokenizer, data={"edit_area_weight": 5.0})
    )
    # 64 pixels are 4 codes: the box covers one row of codes, and the second column in part.
    np.testing.assert_array_equal(
        heavy.sequence(made, Never()).code_weight,
        [[5, 5, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]],
    )


def test_codes_in_the_boxes_weigh_more_in_step_causal_training_too(tokenizer):
    made = record("edit", "x", boxes=np.array([[0, 0, 20, 16]], np.float32), **(DRAWN | SOURCES))
    weights = []
    for heavier in (1.0, 5.0):
        settings = raw_data.settings(
            tokenizer,
            data={"edit_area_weight": heavier, "given": 0.0, "source_drop": 0.0},
            diffusion={"plan_steps": (1,)},  # all four cells are masked
        )
        example = record_examples.Mixer(tokenizer, settings).example(made, generator())
        row = making.make_row(example, settings, generator())
        image = row.tokens.generation
        weights.append(image.weight[4:8])  # between the source and the registers
    plain, heavy = weights
    np.testing.assert_allclose(plain, np.ones(4))
    np.testing.assert_allclose(heavy[0], heavy[1, 0] * np.array([5, 5, 1, 1]))
    np.testing.assert_allclose(heavy[1:], np.full((3, 4), heavy[1, 0]))
    assert heavy.sum() == pytest.approx(16)


def test_rows_of_a_batch_have_weights_by_code_whether_or_not_an_image_has_boxes(tokenizer):
    """Otherwise they could not be stacked."""
    settings = raw_data.settings(tokenizer, data={"edit_area_weight": 5.0})
    mixer = record_examples.Mixer(tokenizer, settings)
    for name in ("edit", "text to image", "verdict"):
        example = mixer.example(RELEASED[name][0], Never())
        row = making.make_row(example, settings, generator())
        image = row.tokens.generation
        assert image.weight.shape == image.tokens.shape, name


def test_codes_of_another_tokenizer_are_refused(mixer):
    for codes in (CODES[:, :2], CODES + 60):
        made = record("text_to_image", "x", **(DRAWN | {"target": codes}))
        with pytest.raises(RecordError, match=r"and the model takes 4x4 below 64"):
            mixer.sequence(made, Never())


# --- step-causal examples ----------------------------------------------------------------------


def test_an_image_is_trained_as_it_is_sampled(mixer, tokenizer):
    made = mixer.example(record("text_to_image", "a robot", **DRAWN), Never())
    condition = "ORIGINAL WIDTH : 640; ORIGINAL HEIGHT : 480; TOP : 0; LEFT : 5"
    sampled = chat.draw(tokenizer, "a robot", 4, condition=condition)
    assert spelled(tokenizer, made.parts) == spelled(tokenizer, sampled)
    assert (made.modality, made.reach, made.response.shape) == ("image", 4, (4, 4))
    assert not made.given.any()


def test_without_micro_conditions_no_prompt_has_one(tokenizer):
    """Neither in training nor in sampling."""
    settings = raw_data.settings(tokenizer, data={"micro_condition": False})
    mixer, made = (
        record_examples.Mixer(tokenizer, settings),
        record("text_to_image", "a cat", **DRAWN),
    )
    cells, model = mixer._cells(CODES[0]), settings.model
    sampled = ChatPrompts(tokenizer, model, settings.data, 8).draw("a cat", cells)
    trained = mixer.example(made, Never())
    assert spelled(tokenizer, trained.parts) == spelled(tokenizer, sampled.parts)
    assert "ORIGINAL" not in str(spelled(tokenizer, sampled.parts))
    assert "ORIGINAL" not in mixer._turns(made, 0, Never())[0][0]


def test_an_edit_is_trained_as_it_is_sampled(mixer, tokenizer):
    made = mixer.example(record("edit", "blue", **(DRAWN | SOURCES)), Never())
    (source,) = (part for part in made.parts if isinstance(part, Source))
    (vision,) = (part for part in made.parts if isinstance(part, VisionTokens))
    sampled = chat.edit(tokenizer, "blue", [vision], [source.codes], 4)
    assert spelled(tokenizer, made.parts) == spelled(tokenizer, sampled)
    assert len(made.views) == 1
    two = mixer.example(RELEASED["edit of two"][0], Never())
    assert "[seen][4source][seen][4source]" in spelled(tokenizer, two.parts).replace(" ", "")


def test_a_layout_is_trained_before_the_image_or_alone(mixer, tokenizer):
    made = record("layout", "a robot", layout="robot <LOC_1>", **DRAWN)
    words = "Sure I should place the objects in the following manner robot <LOC_1>"
    drawn, planned = mixer.example(made, Always()), mixer.example(made, Never())
    sampled = chat.draw(tokenizer, "a robot", 4, condition="", layout=words)
    assert spelled(tokenizer, drawn.parts) == spelled(tokenizer, sampled)
    condition = "ORIGINAL WIDTH : 640; ORIGINAL HEIGHT : 480; TOP : 0; LEFT : 5"
    asked = chat.layout_of_image(tokenizer, "a robot", len(planned.response), condition=condition)
    assert spelled(tokenizer, planned.parts) == spelled(tokenizer, asked)
    assert answer_of(tokenizer, planned) == f"{words}<|eot_id|>"


def answer_of(tokenizer, example):
    """The response up to its first end-of-text, after which only end-of-text may follow."""
    ids = example.response[:, 0].tolist()
    end = ids.index(tokenizer.id_of(chat.END_OF_TEXT))
    assert set(ids[end:]) == {ids[end]}
    assert example.reach == (end // 8 + 1) * 8 and len(ids) % 8 == 0
    return tokenizer._inner.decode(ids[:end], skip_special_tokens=False)


def test_answers_fill_whole_text_blocks_and_up_to_three_more(mixer, tokenizer):
    made = record("reflection", "x", answered=("It is",), **SEEN)
    lengths = collections.Counter()
    for seed in range(60):
        example = mixer.example(made, generator(seed))
        assert answer_of(tokenizer, example) == "It is<|eot_id|>"
        lengths[len(example.response)] += 1
    assert set(lengths) == {8, 16, 24, 32}
    asked = chat.judge(tokenizer, "x", VisionTokens(1), 8)
    assert spelled(tokenizer, asked)[:-9] in spelled(tokenizer, example.parts)


def test_one_turn_of_a_conversation_is_trained(mixer, tokenizer):
    made, found = RELEASED["conversation"][0], set()
    for seed in range(20):
        example = mixer.example(made, generator(seed))
        said = spelled(tokenizer, example.parts)
        asked = said[len(PREFIX) :].partition("<|eot_id|>")[0]
        found.add((asked, answer_of(tokenizer, example)))
    # After an image the first character is lost, as in sampling.
    assert found == {
        ("[seen]what is ?", "A dog.<|eot_id|>"), ("[seen]sure?", "Yes.<|eot_id|>")
    }  # fmt: skip


def test_boxes_are_trained_as_they_are_found(mixer, tokenizer):
    example = mixer.example(RELEASED["box"][0], Never())
    assert tokenizer.box(example.response[:, 0]) == (0, 1, 4, 8)
    (vision,) = (part for part in example.parts if isinstance(part, VisionTokens))
    found = chat.locate(tokenizer, "left dog", vision)
    assert spelled(tokenizer, example.parts) == spelled(tokenizer, found)
    several = mixer.example(RELEASED["dense caption of boxes"][0], Never())
    parts, known = chat.locate_all(tokenizer, ("a dog", "it"), vision)
    assert spelled(tokenizer, several.parts) == spelled(tokenizer, parts)
    mask = tokenizer.id_of(chat.MASK)
    np.testing.assert_array_equal(several.given, known != mask)
    np.testing.assert_array_equal(several.response[several.given, 0], known[known != mask])
    hidden = several.response[~several.given, 0].reshape(2, 4)
    assert [tokenizer.box(ids) for ids in hidden] == [(0, 0, 1, 1), (1, 1, 8, 8)]


@pytest.mark.parametrize("made", [made for made, _ in RELEASED.values()], ids=[*RELEASED])
def test_every_kind_is_an_example_with_one_response(mixer, made):
    for dice in (Never(), Always(), generator(3)):
        example = mixer.example(made, dice)
        (response,) = (part for part in example.parts if isinstance(part, Response))
        assert num_tokens(response) == len(example.response) == len(example.given)
        assert sum(isinstance(part, VisionTokens) for part in example.parts) == len(made.images)
        assert (example.response != mixer.settings.model.text_mask_id).all() or (
            example.modality == "image"
        )


@pytest.mark.parametrize("made", [made for made, _ in RELEASED.values()], ids=[*RELEASED])
def test_only_an_answer_that_nothing_follows_may_be_sampled_longer(mixer, made):
    """Boxes and images have the same length in sampling and training."""
    settings = config.changed(mixer.settings, {"data": {"sampled_answer_len": 1024}})
    moved = set()
    for seed in range(8):
        example = mixer.example(made, generator(seed))
        lengths = [
            tiny.registers_from(making.make_row(example, one, generator(seed)), one.model)
            for one in (mixer.settings, settings)
        ]
        if not isinstance(example.parts[-1], Response):
            assert lengths[0] == lengths[1]
        else:
            moved.add(lengths[1] - lengths[0])
            assert len(example.response) <= len(example.response) + lengths[1] - lengths[0] <= 1024
    assert len(moved) != 1  # none, or several


def test_an_unknown_kind_is_reported(mixer):
    made = dataclasses.replace(RELEASED["verdict"][0], kind="poem")
    for make in (mixer.sequence, mixer.example):
        with pytest.raises(RecordError, match="of the kind poem"):
            make(made, Never())
