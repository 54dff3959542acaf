# SPDX-License-Identifier: Apache-2.0
"""What the text tokenizers have in common: a `tokenizer.json`, and text to ids."""

import abc
import pathlib
from collections.abc import Iterable
from typing import ClassVar

import tokenizers


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

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns text; what is special in it is left out."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns ids, and for each the characters (start, end) of `text` that it stands for."""
        encoding = self._inner.encode(text)
        return encoding.ids, encoding.offsets
