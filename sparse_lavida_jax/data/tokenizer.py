# SPDX-License-Identifier: Apache-2.0
"""What the text tokenizers have in common: a `tokenizer.json`, text to ids, and how one is made."""

import abc
import functools
import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

# Next to the tokenizer of a model from scratch: the words of the texts it learned from.
WORDS = "words.txt"
# Scripts without spaces between words: Thai to Tibetan, Burmese, Khmer, kana, Han. A letter is a
# word there.
_UNSPACED = r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}_])\w)+")


def words_of(text: str) -> list[str]:
    """Returns the words of a text, in their order; upper and lower case are different words."""
    return _WORD.findall(text)


class TextTokenizer(abc.ABC):
    """Text to ids; a subclass says which ids are special, and makes text of ids.

    Raises:
        FileNotFoundError: there is none at `path`.
        ValueError: the file is damaged.
    """

    remedies: ClassVar[tuple[str, str]]  # what to do without a file, and with a damaged one

    def __init__(self, path: pathlib.Path | str):
        self.path, (missing, damaged) = pathlib.Path(path), self.remedies
        if not self.path.is_file():
            raise FileNotFoundError(
                f"there is no tokenizer at {path}: {missing.format(path=path)}."
            )
        try:
            self._inner = tokenizers.Tokenizer.from_str(self.path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises plain `Exception`
            raise ValueError(f"{path} is damaged: {error}. {damaged.format(path=path)}.") from error

    @property
    def vocab_size(self) -> int:
        return self._inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Returns ids; what is special in the text is as the class says."""
        return self._inner.encode(text).ids

    @functools.cached_property
    def words(self) -> frozenset[str] | None:
        """The words that its model learned from; None where the folder does not say."""
        path = self.path.with_name(WORDS)
        return frozenset(path.read_text(encoding="utf-8").split()) if path.is_file() else None

    def unheld(self, text: str) -> list[str]:
        """Returns the words of a text that training never held, where that is known."""
        known = self.words
        return [] if known is None else [w for w in dict.fromkeys(words_of(text)) if w not in known]

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns text; what is special in it is left out."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns ids, and for each the characters (start, end) of `text` that it stands for."""
        encoding = self._inner.encode(text)
        return encoding.ids, encoding.offsets


def train_byte_level(
    texts: Iterable[str], special: Sequence[str], textual: Sequence[str], vocabulary: int
) -> str:
    """Trains byte-level BPE and returns the contents of its `tokenizer.json`.

    Any Unicode text has ids: a word that was never seen becomes smaller pieces, down to bytes.

    Args:
        special: tokens that are no text, in the order of their ids from 0 on.
        textual: whole tokens of text, whose ids follow; then come bytes and merges.
        vocabulary: most tokens of all sorts.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=1,
        special_tokens=[
            tokenizers.AddedToken(token, normalized=False) for token in (*special, *textual)
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    contents = json.loads(inner.to_str())
    # The trainer makes every added token special; one of text is looked for by `encode`.
    for token in contents["added_tokens"]:
        token["special"] = token["content"] in special
    return json.dumps(contents, ensure_ascii=False, indent=1) + "\n"
