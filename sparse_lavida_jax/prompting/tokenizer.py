# SPDX-License-Identifier: Apache-2.0
"""Common parts of the text tokenizers: a `tokenizer.json`, text to ids, and training."""

import abc
import contextlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from sparse_lavida_jax.data import files
from sparse_lavida_jax.prompting import tokenizer_files
from sparse_lavida_jax.schema import ConfigError


class TokenizerError(ConfigError):
    """A `tokenizer.json` that is damaged, or has something that is not run here."""


class TextTokenizer(abc.ABC):
    """Converts text to ids; a subclass defines the special ids, and converts ids to text.

    Raises:
        FileNotFoundError: there is no tokenizer at `path`.
        TokenizerError: the file is damaged; also raised by its methods.
    """

    remedies: ClassVar[tuple[str, str]]  # what to do if the file is missing, and if it is damaged

    def __init__(self, path: pathlib.Path | str):
        self.path, (missing, damaged) = pathlib.Path(path), self.remedies
        if not self.path.exists():
            raise FileNotFoundError(
                f"there is no tokenizer at {path}: {missing.format(path=path)}."
            )
        self._damaged = f"{damaged.format(path=path)}."
        with self._explained(OSError, ValueError):
            contents = files.read_text(self.path, tokenizer_files.MOST_BYTES)
            tokenizer_files.check(contents)
            self._inner = tokenizers.Tokenizer.from_str(contents)
        self._inner.no_truncation()
        self._inner.no_padding()
        self.vocab_size = 1 + max(self.ids().values(), default=-1)  # an id may be left out

    @contextlib.contextmanager
    def _explained(self, *kinds: type[Exception]) -> Iterator[None]:
        """Turns errors of the library, and those of some kinds, into one sentence.

        Raises:
            TokenizerError: in place of them.
        """
        try:
            yield
        except BaseException as error:  # a panic of the library is not an `Exception`
            is_panic = type(error).__name__ == "PanicException"
            if not (is_panic or type(error) is Exception or isinstance(error, kinds)):
                raise
            told = f"{self.path} is damaged: {error}.{files.remedy(error, self._damaged)}"
            raise TokenizerError(told) from error

    def ids(self) -> dict[str, int]:
        """Returns the id of every token."""
        return self._inner.get_vocab()

    def encode(self, text: str) -> list[int]:
        """Returns ids; the subclass decides how special tokens in the text are treated."""
        return self._encode(text).ids

    def _encode(self, text: str) -> tokenizers.Encoding:
        with self._explained():
            return self._inner.encode(text)

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns text without special tokens."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns ids, and the characters (start, end) of `text` that each represents."""
        encoding = self._encode(text)
        return encoding.ids, encoding.offsets


def train_byte_level(
    texts: Iterable[str], special: Sequence[str], textual: Sequence[str], vocabulary: int
) -> str:
    """Trains byte-level BPE and returns the contents of its `tokenizer.json`.

    Any Unicode text can be encoded: unknown words become smaller pieces, down to bytes.

    Args:
        special: tokens that are not text, in the order of their ids from 0 on.
        textual: whole tokens of text, whose ids follow; then come bytes and merges.
        vocabulary: largest number of tokens in total.
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
    # The trainer makes every added token special; `encode` must find those that are text.
    for token in contents["added_tokens"]:
        token["special"] = token["content"] in special
    return json.dumps(contents, ensure_ascii=False, indent=1) + "\n"
