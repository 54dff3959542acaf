# SPDX-License-Identifier: Apache-2.0
r"""The text tokenizer: byte-level BPE that was trained on the language of the small world.

    python -m sparse_lavida_jax.scenes.tokenizer \
        --out=sparse_lavida_jax/assets/tokenizers/scenes/tokenizer.json

makes the shipped tokenizer. Every word of the language, with the space before it, is one token;
any other Unicode text becomes smaller pieces, down to bytes.
"""

import argparse
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator

from sparse_lavida_jax.data.files import write_text
from sparse_lavida_jax.prompting.tokenizer import TextTokenizer, train_byte_level
from sparse_lavida_jax.scenes import tasks
from sparse_lavida_jax.scenes.grammar import LOCATIONS

# In the order of their ids, from 0 on; the LOC tokens follow, then bytes and merges. The last three
# represent parts of other streams, and are in no sequence.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|mdm_mask|>", "<|user|>", "<|assistant|>", "<|eot|>", "<image>", "<source>",
    "<response>",
)  # fmt: skip
# The training tasks, in this order. Tasks that were added later use the same words.
TRAINED_ON = (
    "layout", "answer", "arithmetic", "point", "reflect", "caption", "constrained_caption",
    "infill", "detect", "edit_layout", "draw", "edit", "inpaint", "outpaint",
)  # fmt: skip
_CUT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
EXAMPLES = 500  # per task and split
SHIPPED = pathlib.Path(__file__).parents[1] / "assets" / "tokenizers" / "scenes" / "tokenizer.json"
LARGEST_VOCABULARY = 544
# Byte-level BPE cuts a text before every such word, so that words are encoded one by one and kept.
_WORD = re.compile(r" ?[!-~]+|")
_MOST_KEPT = 4096  # far more than the language has
_MAKE = "make one with `python -m sparse_lavida_jax.scenes.tokenizer --out={path}`"


def location(edge: int) -> str:
    """Returns the LOC token of a place."""
    return f"<LOC_{edge}>"


class Tokenizer(TextTokenizer):
    """Converts text to ids and back.

    Special tokens are not text: `encode` spells them out like any other word and `decode` omits
    them. LOC tokens are text, `<LOC_0>` to `<LOC_24>` or farther.

    Attributes:
        end_of_text_id: ends an answer, and pads.
        mask_id: for masked tokens.
        user_id, assistant_id: start a prompt and a response.
        end_of_turn_id: ends both.
        location_ids: of `<LOC_0>`, `<LOC_1>`, ...
    """

    remedies = f"name a tokenizer.json, or {_MAKE}", f"Copy it again, or {_MAKE}"
    end_of_text_id, mask_id, user_id, assistant_id, end_of_turn_id = range(5)

    def __init__(self, path: pathlib.Path | str = SHIPPED):
        """Loads a `tokenizer.json`.

        Raises:
            FileNotFoundError: there is no tokenizer at `path`.
            ValueError: the file is damaged, or of a tokenizer without our special tokens.
        """
        super().__init__(path)
        first = len(SPECIAL_TOKENS)
        places = itertools.takewhile(
            lambda edge: self._inner.id_to_token(first + edge) == location(edge), itertools.count()
        )
        self.location_ids = range(first, first + max(LOCATIONS, len([*places])))
        expected = SPECIAL_TOKENS + tuple(location(edge) for edge in range(len(self.location_ids)))
        found = tuple(self._inner.id_to_token(number) for number in range(len(expected)))
        if found != expected:
            wrong = next(i for i, token in enumerate(expected) if found[i] != token)
            raise ValueError(
                f"{path} has {found[wrong]!r} as token {wrong}, where {expected[wrong]!r} is"
                " needed. Use a tokenizer that `sparse_lavida_jax.scenes.tokenizer` made."
            )
        self._inner.encode_special_tokens = True
        made = json.loads(self._inner.to_str())
        self._cuts_words = (
            [(token["content"], token["rstrip"]) for token in made["added_tokens"]]
            == [(token, False) for token in expected]
            and made["pre_tokenizer"] == _CUT
            and not made["post_processor"]
        )
        self._known: dict[str, tuple[list[int], list[tuple[int, int]], int]] = {}

    def encode(self, text: str) -> list[int]:
        return [number for ids, _, _ in self._words(text) for number in ids]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, offsets, begin = [], [], 0
        for inside, spans, length in self._words(text):
            ids += inside
            offsets += [(begin + start, begin + stop) for start, stop in spans]
            begin += length
        return ids, offsets

    def _words(self, text: str) -> list[tuple[list[int], list[tuple[int, int]], int]]:
        """Returns ids, offsets and characters of each word; a text of others is a single word."""
        words = [text] if "\n" in text else text.replace(" ", "\n ").split("\n")
        try:
            return [self._known[word] for word in words]
        except KeyError:
            plain = self._cuts_words and all(map(_WORD.fullmatch, words))
            words = words if plain else [text]
            encoded = {word: self._encode(word) for word in words}
            found = {word: (one.ids, one.offsets, len(word)) for word, one in encoded.items()}
            if plain and len(self._known) < _MOST_KEPT:
                self._known |= found
            return [found[word] for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text, without special tokens and ids that are not in the vocabulary."""
        known = range(len(SPECIAL_TOKENS), self.vocab_size)
        with self._explained():
            return self._inner.decode(
                [int(i) for i in ids if i in known], skip_special_tokens=False
            )


def train(texts: Iterable[str]) -> str:
    """Trains a tokenizer and returns the contents of its `tokenizer.json`."""
    places = tuple(map(location, range(LOCATIONS)))
    return train_byte_level(texts, SPECIAL_TOKENS, places, LARGEST_VOCABULARY)


def corpus() -> Iterator[str]:
    """Yields the texts of examples of the tasks it is trained on, in every split."""
    for task in TRAINED_ON:
        for split in tasks.SPLITS:
            for index in range(EXAMPLES):
                sample = tasks.sample(task, 0, index, split)
                yield from filter(None, (sample.prompt, sample.answer, sample.layout))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the text tokenizer.")
    parser.add_argument("--out", type=pathlib.Path, default=SHIPPED, help="file to write")
    out = parser.parse_args().out
    write_text(out, train(corpus()))
    print(f"{out}: {Tokenizer(out).vocab_size} tokens")


if __name__ == "__main__":
    main()
