# SPDX-License-Identifier: Apache-2.0
"""What strangers write is read as a sentence that the models of the small world were taught."""

import re

import pytest
import strangers_words

from sparse_lavida_jax.scenes import sentences, tasks
from sparse_lavida_jax.scenes.grammar import Edit, Phrase, SceneRequest
from sparse_lavida_jax.scenes.tokenizer import Tokenizer

PROMPTS, TOKENIZER = strangers_words.prompts(), Tokenizer()
OFFERED = re.compile(r"taught is used: '(.+)'\.$")
# Commands by the task whose sentences they take.
COMMANDS = {
    "draw": "generate", "edit": "edit", "answer": "ask", "arithmetic": "reason", "point": "ask",
    "reflect": "ask", "caption": "ask", "detect": "ask", "name": "ask", "locate": "ask",
}  # fmt: skip


def things_of(request: SceneRequest):
    """Yields row, column, size, colour, shape of what is asked for; an open size is "any"."""
    sides = {"left of": (0, -1), "above": (-1, 0), None: (0, 0)}[request.relation]
    for number, phrase in enumerate(request.phrases):
        row, column = sides if number == 0 else (0, 0)
        yield row, column, phrase.size or "any", phrase.colour, phrase.shape


def is_taught(request: SceneRequest) -> bool:
    counts = [count for count, _ in request.items]
    whole = all(phrase.shape and phrase.colour for phrase in request.phrases)
    return whole and (counts == [1, 1] or (len(counts) == 1 and counts[0] <= 4))


@pytest.mark.parametrize("seed", [0, 1, 2**31])
def test_what_strangers_write_is_understood_or_the_trouble_named(seed):
    assert len(PROMPTS) == 300 and len({one.prompt for one in PROMPTS}) > 280
    for one in PROMPTS:
        read = sentences.read("generate", one.prompt, seed)
        request = SceneRequest.parse(read.sentence)
        assert is_taught(request), one
        if one.kinds:
            assert not read.warning, one
            assert one.is_shown([*things_of(request)]), (one, read)
        else:
            said = read.warning.partition(". Instead")[0]
            assert re.search(rf"\b{re.escape(one.named)}\b", said), (one, read)
            assert OFFERED.search(read.warning)[1] == read.sentence


def test_the_seed_chooses_what_is_left_open_and_a_warning_has_no_seed():
    drawn = {sentences.read("generate", "circles", seed).sentence for seed in range(20)}
    assert len(drawn) > 5
    warned = {sentences.read("generate", "a cat", seed) for seed in range(20)}
    assert len(warned) == 1


@pytest.mark.parametrize("task", COMMANDS)
def test_taught_sentences_stay_as_they_are(task):
    """Except "right of" and "below": their converse, drawn correctly more often, is taken."""
    for index in range(200):
        sample = tasks.sample(task, 5, index, ("test", "held_out")[index % 2])
        read = sentences.read(COMMANDS[task], sample.prompt, index)
        assert not read.warning, sample
        assert len(TOKENIZER.encode(read.sentence)) <= sentences.MOST_TOKENS
        if re.search("right of|below", sample.prompt) and task != "edit":
            first, relation, second = re.split(" (right of|below) ", sample.prompt.split(": ")[-1])
            other = {"right of": "left of", "below": "above"}[relation]
            assert read.sentence.endswith(f"{second} {other} {first}")
        else:
            assert read.sentence == sample.prompt


@pytest.mark.parametrize(
    ("words", "sentence", "named"),
    [
        ("Turn the circle into a red cross!", "replace the circle with a red cross", ""),
        ("change red circle to blue", "make the red circle blue", ""),
        ("paint the circle red", "make the circle red", ""),
        ("please delete the small blue square", "remove the small blue square", ""),
        ("put a red circle under the cross", "add a red circle below the cross", ""),
        ("insert a red circle into the upper left corner",
         "add a red circle in the top left corner", ""),
        ("move the red circle to the left", "move the red circle left", ""),
        ("shift the red circle upwards", "move the red circle up", ""),
        ("make the red circle bigger", None, "bigger"),
        ("remove the red circle and add a cross", "remove the red circle", "add"),
        ("remove all circles", None, "all"),
        ("move the circle up", None, "without a shape and a colour"),
        ("turn the red ball into a red cross", "replace the red circle with a red cross", "ball"),
        ("rotate it", None, "rotate"),
        ("hello", None, "hello"),
    ],
)  # fmt: skip
def test_instructions_are_read(words, sentence, named):
    read = sentences.read("edit", words, 0)
    assert sentence is None or read.sentence == sentence
    assert str(Edit.parse(read.sentence)) == read.sentence
    assert named in read.warning.partition(". Instead")[0] and bool(named) == bool(read.warning)


@pytest.mark.parametrize(
    ("words", "sentence", "named"),
    [
        ("How many red circles do you see?", "how many red circles are there?", ""),
        ("count the squares", "how many squares are there?", ""),
        ("how many circles + how many squares", "how many circles plus how many squares?", ""),
        ("are there any crosses in the picture?", "is there a cross?", ""),
        ("are there fewer circles than squares?", "are there more squares than circles?", ""),
        ("What color is the big circle?", "what colour is the circle?", "large"),
        ("which colour has the circle?", "what colour is the circle?", ""),
        ("Where is the red circle", "where is the red circle?", ""),
        ("what colour is the cat?", None, "cat"),
        ("how many small circles are there?", "how many circles are there?", "small"),
        ("how many things are there?", None, "without a shape or a colour"),
        ("how many circles and squares are there?", "how many circles are there?", "one kind"),
        ("Hello, who are you?", None, "hello"),
        ("?", None, "?"),
    ],
)
def test_questions_are_read(words, sentence, named):
    read = sentences.read("ask", words, 0)
    assert sentence is None or read.sentence == sentence
    assert named in read.warning.partition(". Instead")[0] and bool(named) == bool(read.warning)


@pytest.mark.parametrize(
    ("words", "phrase", "named"),
    [
        ("the red circle", "red circle", ""),
        ("Circle", "circle", ""),
        ("a small red thing", "small red thing", ""),
        ("red circles", "red circle", "more than one"),
        ("a cat", None, "cat"),
        ("things", None, "without"),
    ],
)
def test_what_to_point_at_is_read(words, phrase, named):
    read = sentences.read("ground", words, 0)
    assert phrase is None or read.sentence == phrase
    assert str(Phrase.parse(read.sentence)) == read.sentence
    assert named in read.warning and bool(named) == bool(read.warning)


def test_any_text_is_read_in_time():
    """Also one that is all unknown words, marks, numbers or half a character."""
    for text in (
        "qwertz " * 140,
        "a" * 999,
        "1" * 999,
        "a " * 499,
        "?!" * 400,
        "\ud800",
        "\0",
        "and",
        "of a circle " * 80,
        "above " * 160,
        "make " * 200,
        "how many " * 110,
    ):
        for task in ("generate", "edit", "ask", "ground"):
            assert sentences.read(task, text, 0).sentence
    many = sentences.read("generate", " ".join(f"x{i}" for i in range(100)), 0).warning
    assert "and 94 more" in many and len(many) < 300
