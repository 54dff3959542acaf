# SPDX-License-Identifier: Apache-2.0
"""What users write becomes words that models of the art world were taught, or they are told."""

import pytest

from sparse_lavida_jax.art import sentences
from sparse_lavida_jax.art.grammar import ArtEdit, ArtRequest
from sparse_lavida_jax.scenes.dice import Dice

SAME = [
    ("generate", "a bear and a cat", "a bear and a cat"),
    ("generate", "A picture of a small noto bear, a camera.", "a small noto bear and a camera"),
    ("generate", "the bear is to the left of the cat on a blue background",
     "a bear left of a cat on a blue background"),
    ("generate", "five cats in fluent style", "five cats in fluent style"),
    ("generate", "a jack-o-lantern in twemoji style", "a jack-o-lantern in twemoji style"),
    ("generate", "a cat looking left", "a cat facing left"),
    ("generate", "Bär und Katze", "Bär und Katze"),
    ("generate", "ein Bär und eine Katze im Stil noto", "a bear and a cat in noto style"),
    ("generate", "バナナ", "バナナ"),
    ("edit", "delete the tiny bear", "remove the small bear"),
    ("edit", "turn the bear into a cat", "replace the bear with a cat"),
    ("edit", "make the bear twemoji", "draw the bear in twemoji style"),
    ("edit", "draw an owl", "add an owl"),
    ("edit", "turn the cat around", "mirror the cat"),
    ("edit", "put an owl over the bear", "add an owl above the bear"),
    ("edit", "shift the bear to the left", "move the bear left"),
    ("ask", "how big is the bear?", "how large is the bear?"),
    ("ask", "which style is the bear?", "what style is the bear?"),
    ("ask", "do you see an owl?", "is there an owl?"),
    ("ask", "count the bears", "how many bears are there?"),
    ("ask", "wie oft ist Bär zu sehen?", "wie oft ist Bär zu sehen?"),
    ("ask", "which is further left, the bear or the cat?",
     "which is further left, the bear or the cat?"),
    ("ask", "gibt es einen Hund?", "is there a dog?"),
    ("ask", "wie viele Hund sind da?", "how many dogs are there?"),
    ("ask", "describe the picture", "describe the picture"),
    ("ground", "the small bear", "small bear"),
]  # fmt: skip
OTHER = [
    ("generate", "two bears and a cat", "a bear and a cat", "several of one kind"),
    ("generate", "a cat above a dog and a bear", "a cat and a dog and a bear", "'above' of 3"),
    ("generate", "a large dog wearing a saddle", "a large dog", "'wearing' and 'saddle'"),
    ("generate", "seven owls", None, "'seven'"),
    ("generate", "9 owls", "five owls", "'9' (one to five of a kind)"),
    ("generate", "a pizza facing left", "a pizza", "looks alike from both sides"),
    ("generate", "", None, "what to draw"),
    ("edit", "make it nicer", None, "'nicer'"),
    ("edit", "replace the cat with two dogs", "replace the cat with a dog", "more than one thing"),
    ("edit", "add an owl in noto style", "add an owl", "'noto' here"),
    ("ask", "what is the meaning of life?", "how many things are there?", "meaning of life"),
    ("ask", "wie viele Hunde?", "how many dogs are there?", "'hunde'"),
    ("ask", "wie viele Dinge?", "how many things are there?", "dinge"),
    ("ask", "how many zebras are there?", "how many things are there?", "zebras"),
    ("ask", "what does the lion eat?", "is there a lion?", "what does the lion eat"),
    ("ground", "noto bear", "bear", "'noto' here"),
    ("generate", "ein Hund über einer Katze", "a dog and a cat", "'über'"),
    ("generate", "a dog from a cat", "a dog and a cat", "'from'"),
    ("generate", "a dog near a pengiun", "a dog and a penguin", "'near' and 'pengiun'"),
]


@pytest.mark.parametrize("task, words, sentence", SAME)
def test_other_words_for_the_same_become_taught_ones(task, words, sentence):
    reading = sentences.read(task, words, 1)
    assert (reading.sentence, reading.warning) == (sentence, "")


@pytest.mark.parametrize("task, words, sentence, fault", OTHER)
def test_what_was_not_understood_is_named_with_the_nearest_sentence(task, words, sentence, fault):
    reading = sentences.read(task, words, 1)
    assert fault in reading.warning and f"'{reading.sentence}'" in reading.warning
    assert sentence in (None, reading.sentence)


def test_any_words_become_a_taught_sentence():
    words = (
        "a two bears cat noto in style facing left of above small large owl and on blue background"
        " zebra 7 the dragon Bär style <LOC_1> facing"
    ).split()
    for number in range(60):
        dice = Dice(number, "words", 0)
        text = " ".join(dice.pick(words) for _ in range(dice.between(0, 9)))
        drawn = sentences.read("generate", text, number)
        assert str(ArtRequest.parse(drawn.sentence)) == drawn.sentence
        changed = sentences.read("edit", text, number)
        assert str(ArtEdit.parse(changed.sentence)) == changed.sentence
        assert drawn == sentences.read("generate", text, number)
    assert sentences.read("infill", "a ___ bear", 0) is None
