# SPDX-License-Identifier: Apache-2.0
"""Our training sequences consist of the same parts in the same order as recorded rows (E1-E4).

The recorded words are from a stand-in tokenizer; images, given, drawn and learned parts are not.
"""

import itertools

import golden
import numpy as np
import pytest
import raw_data
import test_training_golden

from sparse_lavida_jax.mixture import record_examples
from sparse_lavida_jax.mixture.records import Record
from sparse_lavida_jax.sequence import Blank, Response, Text, num_tokens

CODES = np.zeros((1, 4, 4), np.int32)
SEEN = {"images": (raw_data.png(0),), "size": (48, 40)}
DRAWN = {
    "target": CODES,
    "crops": np.zeros((1, 2), np.int32),
    "light": np.zeros((1, 2), np.float32),
    "size": (48, 40),
}
ROWS = {
    "t2i": Record("text_to_image", "a", "a:1", ("a robot",), **DRAWN),
    "edit": Record("edit", "a", "a:1", ("blue",), sources=CODES, **(DRAWN | SEEN)),
    "und": Record("understanding", "a", "a:1", ("<image> what?",), answered=("A dog.",), **SEEN),
}


@pytest.fixture(scope="module")
def mixer(tmp_path_factory):
    tokenizer = raw_data.tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return record_examples.Mixer(tokenizer, raw_data.settings(tokenizer))


def outline(parts, blank=()):
    """The kinds of the parts, with runs merged, without empty parts, padding and `blank`."""
    kinds = (
        type(part).__name__
        for part in parts
        if not isinstance(part, Blank) and num_tokens(part)
        if not (isinstance(part, Text) and set(part.ids.tolist()) <= set(blank))
    )
    return [kind for kind, _ in itertools.groupby(kinds)]


def recorded(name, row):
    given = golden.case(name)
    variant = given.config["variants"]["train"]
    sources = iter(test_training_golden.encoded(given, "images_gen_enc"))
    for number in range(row + 1):
        parts, _ = test_training_golden.parts_of(given, variant, number, sources)
    # Infill tokens, which are kept unchanged, occur in no released mixture.
    return outline(part for part in parts if not getattr(part, "keep", False))


@pytest.mark.parametrize(
    ("name", "row", "kind"),
    [
        ("E1_train_mixed", 0, "t2i"),
        ("E1_train_mixed", 1, "und"),
        ("E3_train_edit_weighted", 0, "edit"),
        ("E3_train_edit_weighted", 2, "t2i"),
        ("E4_train_und_text", 0, "und"),
    ],
)
def test_a_row_has_the_recorded_parts(case, mixer, name, row, kind):
    case(name)
    made = mixer.sequence(ROWS[kind], np.random.default_rng(0))
    assert any(isinstance(part, Response) for part in made.parts)
    # A single space is not a token of the stand-in tokenizer.
    assert outline(made.parts, mixer.tokenizer.encode(" ")) == recorded(name, row)
