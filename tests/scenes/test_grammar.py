# SPDX-License-Identifier: Apache-2.0
"""Words and meanings convert to each other in both directions; other words are refused."""

import itertools

import pytest

from sparse_lavida_jax.scenes import grammar
from sparse_lavida_jax.scenes.grammar import Edit, GrammarError, Layout, Phrase, SceneRequest
from sparse_lavida_jax.scenes.world import COLOURS, OBJECTS, SHAPES, SIZES

PHRASES = [
    Phrase(*words) for words in itertools.product((None, *SHAPES), (None, *COLOURS), (None, *SIZES))
]


def test_a_request_is_read_as_it_was_meant():
    for number, phrase in enumerate(PHRASES):
        other, third = PHRASES[number * 37 % 105], PHRASES[number * 59 % 105]
        for count in (1, 2, 6):
            items = ((count, phrase), (1, other), (7 - count, third))
            for length in (1, 2, 3):
                request = SceneRequest(items[:length])
                assert SceneRequest.parse(str(request)) == request
        for relation in grammar.RELATIONS:
            request = SceneRequest(((1, phrase), (1, other)), relation)
            assert SceneRequest.parse(str(request)) == request


def test_an_edit_is_read_as_it_was_meant():
    for number, phrase in enumerate(PHRASES):
        other = PHRASES[number * 37 % 105]
        edits = [
            Edit("add", thing=other),
            Edit("remove", phrase),
            Edit("replace", phrase, other),
            *(Edit("add", thing=other, corner=corner) for corner in grammar.CORNERS),
            *(Edit("add", phrase, other, relation=relation) for relation in grammar.RELATIONS),
            *(Edit("recolour", phrase, colour=colour) for colour in COLOURS),
            *(Edit("move", phrase, corner=corner) for corner in grammar.CORNERS),
            *(Edit("move", phrase, direction=direction) for direction in grammar.DIRECTIONS),
        ]
        for edit in edits:
            assert Edit.parse(str(edit)) == edit


def test_a_layout_is_read_as_it_was_meant():
    for cell in range(36):
        for thing, other in itertools.pairwise([None, *OBJECTS, None]):
            layout = Layout(((cell, thing), ((cell + 17) % 36, other), ((cell + 5) % 36, None)))
            assert Layout.parse(str(layout)) == layout


def test_the_words_are_these():
    red, cross = Phrase("circle", "red"), Phrase("cross", "blue", "small")
    assert str(SceneRequest(((1, red), (3, cross)))) == "a red circle and three small blue crosses"
    assert (
        str(SceneRequest(((1, red), (1, cross)), "above"))
        == "a red circle above a small blue cross"
    )
    assert str(Edit("add", red, cross, relation="left of")) == (
        "add a small blue cross left of the red circle"
    )
    assert str(Layout(((1, OBJECTS[0]), (35, None)))) == (
        " small red circle<LOC_4><LOC_0><LOC_8><LOC_4>, nothing<LOC_20><LOC_20><LOC_24><LOC_24>"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "does not start with one of a, two"),
        ("a red dog", "does not describe an object"),
        ("two red circle", "needs a plural"),
        ("a red circles", "does not describe an object"),
        ("seven red circles", "does not start with"),
        ("a circle red", "does not describe an object"),
        ("two circles above a square", "more than two objects"),
    ],
)
def test_a_bad_request_is_refused_with_a_reason(text, reason):
    with pytest.raises(GrammarError, match=reason):
        SceneRequest.parse(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a box"),
        (" small red circle", "not a box"),
        (" red circle<LOC_0><LOC_0><LOC_4><LOC_4>", "lacks a size"),
        (" small red circle<LOC_1><LOC_0><LOC_5><LOC_4>", "not one cell"),
        (" small red circle<LOC_4><LOC_0><LOC_0><LOC_4>", "without an area"),
        (" small red circle<LOC_24><LOC_0><LOC_28><LOC_4>", "without an area inside the image"),
        (" nothing<LOC_0><LOC_0><LOC_4><LOC_4>, nothing<LOC_0><LOC_0><LOC_4><LOC_4>", "twice"),
    ],
)
def test_a_bad_layout_is_refused_with_a_reason(text, reason):
    with pytest.raises(GrammarError, match=reason):
        Layout.parse(text)


def test_boxes_of_objects_are_rounded_to_location_steps():
    small, large = OBJECTS[0], OBJECTS[1]
    assert grammar.cell_box(7) == (4, 4, 8, 8)
    assert grammar.object_box(7, small) == (5, 5, 7, 7)
    assert grammar.object_box(7, large) == (4, 4, 8, 8)


def test_words_cover_a_text_and_touching_spans_are_joined():
    text = " 2 plus 1 is 3, minus 1 is 2"
    spans = grammar.words(text)
    assert "".join(text[start:end] for start, end in spans) == text
    assert grammar.join_spans(spans) == ((0, len(text)),)
    assert grammar.join_spans([(4, 6), (0, 2), (2, 3)]) == ((0, 3), (4, 6))
