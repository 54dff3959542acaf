# SPDX-License-Identifier: Apache-2.0
r"""What models of the art world know: their words, and the tokenizer that was trained on them.

    python -m sparse_lavida_jax.art.vocabulary \
        --out=sparse_lavida_jax/assets/tokenizers/art/tokenizer.json
    python -m sparse_lavida_jax.art.vocabulary --side=128 \
        --out=sparse_lavida_jax/assets/tokenizers/art_128/tokenizer.json

makes the shipped tokenizers: an image of 128 pixels has more places.
"""

import argparse
import functools
import pathlib
from collections.abc import Iterator

from sparse_lavida_jax import config
from sparse_lavida_jax.art import tasks
from sparse_lavida_jax.art.grammar import (
    EDITS,
    HOW_MANY,
    IN_STYLE,
    IS_THERE,
    JOINED,
    MOVES,
    NOTHING,
    NUMBERS,
    SIDES,
    YES_NO,
    Art,
    plural,
)
from sparse_lavida_jax.art.sheet import SIZES, STYLES, Sheet, load
from sparse_lavida_jax.art.tasks import (
    ask,
    caption,
    detect,
    infill,
    locate,
    name,
    reason,
    retell,
)
from sparse_lavida_jax.art.world import BACKGROUNDS, CELL, IMAGE_SIZE, STEP
from sparse_lavida_jax.data.files import write_text
from sparse_lavida_jax.prompting.tokenizer import train_byte_level
from sparse_lavida_jax.prompting.vocabulary import Vocabulary, listed, words_of
from sparse_lavida_jax.scenes.grammar import RELATIONS
from sparse_lavida_jax.scenes.rules import CORRECT
from sparse_lavida_jax.scenes.tokenizer import SPECIAL_TOKENS, Tokenizer, location

_FOLDER = pathlib.Path(__file__).parents[1] / "assets" / "tokenizers"
SHIPPED = _FOLDER / "art" / "tokenizer.json"
TOKENIZERS = {IMAGE_SIZE: SHIPPED, 128: _FOLDER / "art_128" / "tokenizer.json"}  # by side
LARGEST_VOCABULARY = 1792
EXAMPLES = 300  # per task and split


@functools.cache
def of_sheet(sheet: Sheet) -> Vocabulary:
    """Returns the vocabulary of models that are trained on a sheet."""
    names = [one for thing in sheet.things for one in (*thing.names, plural(thing.name))]
    forms = [
        *(words for table in (JOINED, IN_STYLE, HOW_MANY, IS_THERE) for words in table.values()),
        *(words for wordings in EDITS.values() for words in wordings),
        *(word for words in YES_NO.values() for word in words),
        *ask.QUESTIONS.values(),
        *reason.QUESTIONS.values(),
        *(task.PROMPT for task in (caption, detect, infill, locate, name, retell)),
    ]
    said = (
        *names, *forms, *NUMBERS, *SIDES, *RELATIONS, *MOVES, *SIZES, *STYLES, *BACKGROUNDS,
        *map(str, range(6)), NOTHING, "an facing thing on background where is the",
        f"check: fill extend {CORRECT} should be missing too many not",
    )  # fmt: skip
    groups = listed(list(dict.fromkeys(thing.group for thing in sheet.things)), "and")
    # What has no front is drawn best.
    plain = next((thing for thing in sheet.things if not thing.drawn), sheet.things[0])
    knows = (
        f"{len(sheet.things)} things ({groups}), such as {_some(sheet)}, in the styles"
        f" {listed(tuple(STYLES), 'and')}: '{Art(plain.name).times(1)} and a small"
        f" {sheet.things[-1].name} in noto style'"
    )
    words = frozenset(words_of(" ".join(said)))
    return Vocabulary(words, knows, full_stops=False, image_questions=True, layouts_first=True)


def _some(sheet: Sheet) -> str:
    """Names a thing of every group."""
    first = {thing.group: thing.name for thing in reversed(sheet.things)}
    return listed(list(reversed(first.values())), "and")


def corpus(sheet: Sheet, side: int) -> Iterator[str]:
    """Yields every name in every language, and texts of examples of every task.

    Args:
        side: of their images, in pixels.
    """
    for thing in sheet.things:
        for spoken in thing.names:
            yield from (spoken, f" {spoken}")
        yield from (f" {plural(thing.name)}", f"a {thing.name}")
    for task in tasks.TABLE:
        for split in tasks.SPLITS:
            for index in range(EXAMPLES):
                sample = tasks.sample(task, 0, index, split, sheet, side)
                yield from filter(None, (sample.prompt, sample.answer, sample.layout))


def tokenizer_for(model: config.Model) -> pathlib.Path:
    """Returns the shipped tokenizer with the places of a model's images.

    Raises:
        ConfigError: there is none.
    """
    side = CELL * model.grid_size
    if side not in TOKENIZERS:
        known = " or ".join(str(one // CELL) for one in TOKENIZERS)
        raise config.ConfigError(
            f"Model.grid_size={model.grid_size}: data.source='art' has text tokenizers for grids of"
            f" {known} cells a side: set model.grid_size to one of these."
        )
    return TOKENIZERS[side]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the text tokenizer of the art world.")
    parser.add_argument("--out", type=pathlib.Path, help="file to write; by default the shipped")
    parser.add_argument(
        "--side", type=int, default=IMAGE_SIZE, choices=TOKENIZERS, help="pixels per side of images"
    )
    asked = parser.parse_args()
    out = asked.out or TOKENIZERS[asked.side]
    out.parent.mkdir(parents=True, exist_ok=True)
    places = tuple(map(location, range(asked.side // STEP + 1)))
    texts = corpus(load(), asked.side)
    write_text(out, train_byte_level(texts, SPECIAL_TOKENS, places, LARGEST_VOCABULARY))
    print(f"{out}: {Tokenizer(out).vocab_size} tokens")


if __name__ == "__main__":
    main()
