# SPDX-License-Identifier: Apache-2.0
"""What models of the small world know: their words, and a sentence about them."""

import functools

from sparse_lavida_jax.prompting.vocabulary import Vocabulary, listed, words_of
from sparse_lavida_jax.scenes import sentences
from sparse_lavida_jax.scenes.grammar import CORNERS, DIRECTIONS, EDITS, NUMBERS, RELATIONS, Phrase
from sparse_lavida_jax.scenes.world import COLOURS, GRID, SHAPES, SIZES

MOST_COUNTED = 4  # the largest number of equal objects that training asks for
LARGEST_NUMBER = GRID**2  # in digits
# The other words of requests, questions, descriptions and verdicts, which are in no table.
_OTHERS = """
    and thing things nothing
    how many are there, is there, are there more than, what colour is, what is there, plus minus
    where is, where are these, list the objects, describe the picture in these words
    fill in the text, so, fill, extend
    check: should be, is missing, is too many, is not, correct, yes, no
"""


def _scenes() -> Vocabulary:
    shapes = tuple(Phrase(shape).plural for shape in SHAPES)
    # Without the blanks, whose contents are in the other tables.
    edits = {word for wordings in EDITS.values() for one in wordings for word in one.split()}
    said = (
        *SHAPES, *shapes, *SIZES, *COLOURS, *NUMBERS[:MOST_COUNTED], *RELATIONS, *CORNERS,
        *DIRECTIONS, *(word for word in edits if not word.startswith("{")), _OTHERS,
        *map(str, range(LARGEST_NUMBER + 1)),
    )  # fmt: skip
    forms = [f"{form} ('{example}')" for form, example in sentences.FORMS.items()]
    others = [f"'{sentence}'" for sentence in sentences.NO_FORMS]
    knows = (
        f"{listed(SIZES, 'and')} {listed(shapes, 'and')} in {listed(COLOURS, 'and')}:"
        f" {listed(forms, 'or')}; not {listed(others, 'or')}"
    )
    words = frozenset(words_of(" ".join(said)))
    return Vocabulary(words, knows, full_stops=False, image_questions=True)


@functools.cache
def of_source(source: str) -> Vocabulary | None:
    """Returns the vocabulary of models that are trained on a source; None if it has no fixed one.

    Args:
        source: see `config.Data.source`.
    """
    return _scenes() if source == "scenes" else None
