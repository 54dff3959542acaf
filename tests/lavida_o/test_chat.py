# SPDX-License-Identifier: Apache-2.0
"""Prompts as the specification spells them, on a tokenizer whose text tokens are bytes."""

import re

import numpy as np
import pytest
from chat_tokenizer import made_tokenizer

from sparse_lavida_jax import config, sequence
from sparse_lavida_jax.lavida_o import chat
from sparse_lavida_jax.scenes import tokenizer as scene_tokenizer
from sparse_lavida_jax.sequence import Response, Source, Text, VisionTokens
from sparse_lavida_jax.tags import NO_FEATURE

IMAGE = VisionTokens(2, np.array([0, 3]), 4)
SECOND = VisionTokens(3)
SOURCE = np.arange(8).reshape(2, 4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat.ChatTokenizer(made_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def spelled(tokenizer, expected):
    """Ids of a text by hand: control and LOC tokens, images `[0]`, `[1]`, and single bytes."""
    ids = []
    for piece in re.findall(r"<\|\w+\|>|</?\w+>|\[\d\]|.", expected, re.DOTALL):
        if re.fullmatch(r"\[\d\]", piece):
            ids.append(piece)
        else:
            ids.append(tokenizer.id_of("Ġ" if piece == " " else "Ċ" if piece == "\n" else piece))
    return ids


def flat(parts, images=(), placeholders=()):
    """The parts as one list: ids, images as `[0]`, `[1]`, cells and responses as their names."""
    sequence = []
    for part in parts:
        if isinstance(part, Text):
            sequence += part.ids.tolist()
        elif isinstance(part, VisionTokens):
            sequence.append(f"[{next(i for i, p in enumerate(images) if p is part)}]")
        elif isinstance(part, Source):
            np.testing.assert_array_equal(part.codes, SOURCE)
            sequence += [placeholders[0]] * len(part.codes)
        else:
            sequence += [placeholders[-1]] * part.num_tokens
    return sequence


SYSTEM = (
    "<|startoftext|><|start_header_id|>system<|end_header_id|>\n\n"
    "You are a helpful language and vision assistant. You are able to understand the visual content"
    " that the user provides, and assist the user with a variety of tasks using natural language."
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
)
USER = "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
ASSISTANT = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
SIZE = "ORIGINAL WIDTH : 1024; ORIGINAL HEIGHT : 1024; TOP : 0; LEFT : 0"
CELLS = 3 * "<|reserved_token_5|>"
SOURCE_CELLS = 2 * "<|reserved_token_6|>"
MASKS = 4 * "<|mdm_mask|>"

# Calls of builders, and the prompts that they must spell. If the character that follows an image
# `[0]` in the template is missing, it is lost as in the release.
IMAGES = {
    "draw": (
        lambda t: chat.draw(t, "a red robot", 3),
        f"Generate an image with the caption:\n a red robot {SIZE}; SCORE : 7.110;"
        f"{ASSISTANT}{CELLS}{ASSISTANT}",
    ),
    "draw with another condition, after a layout": (
        lambda t: chat.draw(t, "a red robot", 3, condition="TOP : 1", layout="robot <LOC_2>"),
        "Generate an image with the caption:\n a red robot TOP : 1"
        f"{ASSISTANT}robot <LOC_2>{CELLS}{ASSISTANT}",
    ),
    "draw without a condition": (
        lambda t: chat.draw(t, " a robot ", 3, condition=""),
        f"Generate an image with the caption:\n  a robot{ASSISTANT}{CELLS}{ASSISTANT}",
    ),
    "draw with another template": (
        lambda t: chat.draw(t, "a robot", 3, condition="", template="Draw: <prompt> please"),
        f"Draw: a robot  please{ASSISTANT}{CELLS}{ASSISTANT}",
    ),
    "draw again": (
        lambda t: chat.draw(
            t,
            "a robot",
            3,
            condition="TOP : 1",
            attempts=[(IMAGE, "It is blue."), (SECOND, "no")],
        ),
        "Generate an image with the caption:\n a robot Please also consider past generations and"
        " their feedbacks. Do not repeat these errors Generation 1: [0] Feedback 1: It is blue.\n"
        f"Generation 2: [1] Feedback 2: no\n TOP : 1{ASSISTANT}{CELLS}{ASSISTANT}",
    ),
    "edit": (
        lambda t: chat.edit(t, "make it blue", [IMAGE], [SOURCE], 3),
        f"[0]{SOURCE_CELLS}\n make it blue{ASSISTANT}{CELLS}{ASSISTANT}",
    ),
    "edit after a layout": (
        lambda t: chat.edit(t, "make it blue", [IMAGE], [SOURCE], 3, layout="Sure <LOC_0>"),
        f"[0]{SOURCE_CELLS}\n make it blue{ASSISTANT}Sure <LOC_0>{CELLS}{ASSISTANT}",
    ),
}
ANSWERS = {
    "layout an image": (
        lambda t: chat.layout_of_image(t, "a robot", 5),
        f"Generate an image with the caption: a robot {SIZE}; SCORE : 7.110;."
        " Please first think and plan the layout in LOC format.",
    ),
    "layout an edit": (
        lambda t: chat.layout_of_edit(t, "make it blue", IMAGE, 5),
        "[0]make it blue. Please first think and plan the layout in LOC format.",
    ),
    "ask": (lambda t: chat.ask(t, "What is it?", [IMAGE], 5), "[0]What is it?"),
    "ask without an image": (lambda t: chat.ask(t, "Why?", [], 5), "Why?"),
    "ask about two images": (
        lambda t: chat.ask(t, "Which?", [IMAGE, SECOND], 5),
        "[0][1]Which?",
    ),
    "ask after other turns": (
        lambda t: chat.ask(t, "And?", [IMAGE], 5, [("What is it?", " a cat "), ("Why?", "so")]),
        f"[0]What is it?{ASSISTANT}a cat{USER}Why?{ASSISTANT}so{USER}And?",
    ),
    "judge": (
        lambda t: chat.judge(t, "a robot", IMAGE, 5),
        "[0]Please evaluate this generated image based on the following prompt: a robot Focus on"
        " text alignment and compositionality.",
    ),
}


@pytest.mark.parametrize("build, said", IMAGES.values(), ids=IMAGES)
def test_prompts_of_images_are_spelled_as_released(tokenizer, build, said):
    placeholders = [tokenizer.id_of(token) for token in (chat.SOURCE_CELL, chat.CELL)]
    sequence = flat(build(tokenizer), (IMAGE, SECOND), placeholders)
    assert sequence == spelled(tokenizer, SYSTEM + said)


@pytest.mark.parametrize("build, said", ANSWERS.values(), ids=ANSWERS)
def test_prompts_of_answers_end_with_the_header_and_the_answer(tokenizer, build, said):
    *asked, answer = build(tokenizer)
    assert answer == Response(5)
    assert flat(asked, (IMAGE, SECOND)) == spelled(tokenizer, SYSTEM + said + ASSISTANT)


def test_a_box_is_asked_for_after_an_apostrophe_and_nothing_is_lost(tokenizer):
    parts = chat.locate(tokenizer, "left dog", IMAGE)
    (response,) = (part for part in parts if isinstance(part, Response))
    assert response.num_tokens == 4
    assert flat(parts, (IMAGE,), [tokenizer.id_of(chat.MASK)]) == spelled(
        tokenizer,
        f"'{SYSTEM}[0]\n Please locate left dog in this image. Give bounding boxes in LOC format."
        f"{ASSISTANT}<LOC_BEGIN>{MASKS}<LOC_END><|eot_id|>",
    )


def test_boxes_of_several_things_are_one_response_whose_words_are_known(tokenizer):
    parts, known = chat.locate_all(tokenizer, ["a dog", "the cat"], IMAGE)
    (place,) = (i for i, part in enumerate(parts) if isinstance(part, Response))
    before, after = flat(parts[:place], (IMAGE,)), flat(parts[place + 1 :])
    assert before == spelled(
        tokenizer,
        f"{SYSTEM}[0] Please describe this image with dense localized caption. Give bounding boxes"
        f" in LOC format.{ASSISTANT}There are following objects in the scene. "
        "<box_p> a dog </box_p><LOC_BEGIN>",
    )
    middle = f"{MASKS}<LOC_END>, <box_p> the cat </box_p><LOC_BEGIN>{MASKS}"
    assert known.tolist() == spelled(tokenizer, middle)
    assert parts[place] == Response(len(known))
    assert after == spelled(tokenizer, f"<LOC_END>{ASSISTANT}")


@pytest.mark.parametrize("build, said", [*IMAGES.values(), *ANSWERS.values()])
def test_guidance_drops_what_stands_up_to_the_end_of_the_user(tokenizer, build, said):
    """With a layout, everything up to the image."""
    parts = build(tokenizer)
    mask, end_of_turn = tokenizer.id_of(chat.MASK), tokenizer.id_of(chat.END_OF_TURN)
    settings = {"text_mask_id": mask, "codes_per_token": 4}
    whole = sequence.prompt_row(parts, **settings)
    dropped = sequence.prompt_row(parts, drop_prompt=True, **settings)
    _, user = np.flatnonzero(whole.ids == end_of_turn)[:2]
    last = whole.position[user]
    if "<LOC_" in said:  # a layout
        last = whole.response_position - 1
    assert (dropped.ids[dropped.position <= last] == mask).all()
    after = whole.position > last
    assert after.any()
    np.testing.assert_array_equal(dropped.ids[after], whole.ids[after])
    assert (dropped.feature == NO_FEATURE).all()


def test_features_of_a_second_image_stand_after_those_of_the_first(tokenizer):
    parts = chat.ask(tokenizer, "Which?", [IMAGE, SECOND], 5)
    made = sequence.prompt_row(parts, text_mask_id=tokenizer.id_of(chat.MASK), codes_per_token=4)
    np.testing.assert_array_equal(made.feature[made.feature != NO_FEATURE], [0, 3, 4, 5, 6])


@pytest.mark.parametrize("token", [*chat.CONTROL, chat.IMAGE])
@pytest.mark.parametrize(
    "build",
    [
        lambda t, words: chat.draw(t, words, 3),
        lambda t, words: chat.draw(t, "", 3, condition=words),
        lambda t, words: chat.draw(t, "", 3, layout=words),
        lambda t, words: chat.draw(t, "", 3, attempts=[(IMAGE, words)]),
        lambda t, words: chat.edit(t, words, [IMAGE], [SOURCE], 3),
        lambda t, words: chat.edit(t, "", [IMAGE], [SOURCE], 3, layout=words),
        lambda t, words: chat.layout_of_image(t, words, 5),
        lambda t, words: chat.layout_of_edit(t, words, IMAGE, 5),
        lambda t, words: chat.ask(t, words, [IMAGE], 5),
        lambda t, words: chat.judge(t, words, IMAGE, 5),
        lambda t, words: chat.locate(t, words, IMAGE),
        lambda t, words: chat.locate_all(t, ["a dog", words], IMAGE),
    ],
)
def test_words_with_control_tokens_are_refused(tokenizer, build, token):
    with pytest.raises(ValueError, match=f"holds the control token {re.escape(token)}: leave it"):
        build(tokenizer, f"well {token}, then")


def test_an_empty_list_of_phrases_is_refused(tokenizer):
    with pytest.raises(ValueError, match="no phrase: name one thing or more"):
        chat.locate_all(tokenizer, [], IMAGE)


def test_a_cleaned_layout_can_be_drawn_from(tokenizer):
    answer = "robot <LOC_1><|eot_id|><|endoftext|><|endoftext|><image_gen_fake><|mdm_mask|>."
    assert chat.clean_layout(answer) == "robot <LOC_1>."
    assert chat.draw(tokenizer, "a robot", 3, layout=chat.clean_layout(answer))


def test_conditions_are_spelled_as_released():
    assert chat.MICRO_CONDITION == f"{SIZE}; SCORE : 7.110;"
    assert chat.micro_condition() == SIZE
    assert chat.micro_condition(
        640, 480, 3, 4, luminance=0.5, contrast=0.25, score=6.0, hps=2.5
    ) == (
        "ORIGINAL WIDTH : 640; ORIGINAL HEIGHT : 480; TOP : 3; LEFT : 4; LUMINANCE : 0.500;"
        " CONTRAST : 0.250; SCORE : 6.000; HPS : 2.500"
    )
    assert chat.micro_condition(pixel_diff=0.125) == f"{SIZE}; PIXEL_DIFF : 0.125 ;"


# --- the tokenizer ---------------------------------------------------------------------------


def test_ids_are_those_of_the_file(tmp_path, tokenizer):
    other = chat.ChatTokenizer(made_tokenizer(tmp_path, control=chat.CONTROL[::-1]))
    for i, token in enumerate(chat.CONTROL):
        assert (tokenizer.id_of(token), other.id_of(token)) == (i, len(chat.CONTROL) - 1 - i)
    first = chat.draw(other, "a robot", 3)[0].ids
    assert first[0] == other.id_of(chat.START)


def test_location_tokens_are_counted_in_the_file(tokenizer):
    assert tokenizer.frame == 8
    assert tokenizer.encode("<LOC_0><LOC_8>") == [tokenizer.location_ids[i] for i in (0, 8)]
    assert tokenizer.box(np.array(tokenizer.encode("<LOC_8><LOC_0><LOC_3><LOC_4>"))) == (8, 0, 3, 4)
    assert tokenizer.box(np.array(tokenizer.encode("<LOC_8><LOC_0><LOC_3>x"))) is None


def test_text_comes_back_without_control_tokens_and_foreign_ids(tokenizer):
    ids = tokenizer.encode("héllo <LOC_3><|eot_id|>")
    assert tokenizer.decode([*ids, 0, tokenizer.vocab_size]) == "héllo <LOC_3>"


def test_text_is_neither_cut_nor_padded(tmp_path):
    path = made_tokenizer(
        tmp_path, enable_truncation={"max_length": 4}, enable_padding={"length": 64}
    )
    assert len(chat.ChatTokenizer(path).encode("abcdefgh")) == 8


def test_boxes_need_location_tokens(tmp_path):
    without = chat.ChatTokenizer(made_tokenizer(tmp_path, locations=()))
    assert chat.ask(without, "Why?", [], 5)
    for locate in (
        lambda: chat.locate(without, "dog", IMAGE),
        lambda: chat.locate_all(without, ["dog"], IMAGE),
        lambda: without.frame,
    ):
        with pytest.raises(ValueError, match=r"has no token '<LOC_\w+>': use .* LaViDa-O folder"):
            locate()


def test_a_missing_file_is_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*: name the tokenizer.json"):
        chat.ChatTokenizer(tmp_path / "tokenizer.json")


def test_a_damaged_file_is_explained(tmp_path):
    path = made_tokenizer(tmp_path)
    path.write_text(path.read_text(encoding="utf-8")[:1000])
    with pytest.raises(ValueError, match=r"is damaged: .* Copy it again"):
        chat.ChatTokenizer(path)


def test_a_foreign_tokenizer_is_explained():
    with pytest.raises(ValueError, match=r"has no token '<\|startoftext\|>': use the tokenizer"):
        chat.ChatTokenizer(scene_tokenizer.SHIPPED)


def test_a_tokenizer_of_another_model_is_explained(tokenizer):
    fits = {
        "vocab_size": tokenizer.vocab_size,
        "text_mask_id": tokenizer.id_of(chat.MASK),
        "end_of_text_id": tokenizer.id_of(chat.END_OF_TEXT),
    }
    tokenizer.check(config.Model(**fits))
    for wrong, said in (
        ({"text_mask_id": 99}, r"<\|mdm_mask\|> as 5, the model has text_mask_id=99"),
        ({"end_of_text_id": 99}, r"<\|endoftext\|> as 4, the model has end_of_text_id=99"),
        ({"vocab_size": fits["vocab_size"] - 1}, rf"has {fits['vocab_size']} tokens, the model"),
    ):
        with pytest.raises(ValueError, match=f"{said}.* use the tokenizer next to"):
            tokenizer.check(config.Model(**{**fits, **wrong}))
