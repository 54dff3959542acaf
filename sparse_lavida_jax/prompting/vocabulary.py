# SPDX-License-Identifier: Apache-2.0
"""The words that a model saw in training: which words of a prompt are unknown to it."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

from sparse_lavida_jax.data import files

# Next to the tokenizer of a model trained from scratch: the words of its training texts.
WORDS = "words.txt"
# Scripts without spaces between words: Thai to Tibetan, Burmese, Khmer, kana, Han. There each
# letter counts as a word.
_UNSPACED = r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}_])\w)+")
_TOKEN_OR_WORD = re.compile(rf"<[^<>\s]+>|{_WORD.pattern}")  # such as <LOC_3>
MOST_BYTES = 2**24  # of the file
LEAST_STEM = 3  # letters of a word whose plural is recognized
MOST_NAMED = 8  # unknown words in a warning
LONGEST_NAMED = 40  # letters of a word in a message


def words_of(text: str) -> list[str]:
    """Returns the words of a text, in order; case is significant."""
    return _WORD.findall(text)


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a model makes of a user's words.

    Attributes:
        sentence: what it is given.
        warning: a sentence about what it does not know of the words; "" if it knows all.
    """

    sentence: str
    warning: str = ""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The words of a model's training texts.

    Attributes:
        words: as they were spelled there.
        knows: what they are about, as the end of "This model knows ...".
        full_stops: whether the texts had any; if not, one at the end of a text is left out.
        image_questions: whether all questions were about an image.
        layouts_first: whether images without a layout are hardly ever right, as measured.
    """

    words: frozenset[str]
    knows: str
    full_stops: bool = True
    image_questions: bool = False
    layouts_first: bool = False

    @classmethod
    def read(cls, folder: pathlib.Path) -> "Vocabulary | None":
        """Returns the vocabulary that a model folder records; None if it records none.

        Raises:
            ValueError: the file cannot be read.
        """
        path = folder / WORDS
        try:
            words = frozenset(files.read_text(path, MOST_BYTES).split())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read: {error}.{files.remedy(error, 'Copy it again.')}"
            ) from error
        return cls(words, f"the {len(words)} words of its training texts, listed in its {WORDS}")

    @functools.cached_property
    def _spellings(self) -> dict[str, str]:
        """A known spelling of each word, by its form without case."""
        return {word.casefold(): word for word in sorted(self.words)}

    def spelled(self, text: str) -> str:
        """Returns a text with the case of unknown words changed where training had another case.

        Tokens such as `<LOC_3>` stay as they are.
        """
        if not self.full_stops:
            text = text.rstrip(" .!")

        def known(match: re.Match[str]) -> str:
            word = match[0]
            return word if word in self.words else self._spellings.get(word.casefold(), word)

        return _TOKEN_OR_WORD.sub(known, text)

    def unknown(self, text: str) -> list[str]:
        """Returns the words of a text that training never held; case and plural do not matter."""
        found = [word for word in _TOKEN_OR_WORD.findall(text) if not word.startswith("<")]
        forms = {word: {word.casefold(), *_other_numbers(word.casefold())} for word in found}
        return [word for word, of in forms.items() if self._spellings.keys().isdisjoint(of)]

    def reading(self, text: str) -> Reading:
        """Returns a text as training spelled it."""
        return Reading(self.spelled(text), self.warning([text]))

    def warning(self, texts: Iterable[str]) -> str:
        """Returns a sentence about the unknown words of texts; "" if there are none."""
        unknown = dict.fromkeys(word for text in texts for word in self.unknown(text))
        if not unknown:
            return ""
        named = [f"'{word[:LONGEST_NAMED]}'" for word in unknown][:MOST_NAMED]
        if len(unknown) > MOST_NAMED:
            named.append(f"{len(unknown) - MOST_NAMED} more")
        verb = "is" if len(unknown) == 1 else "are"
        return f"this model knows {self.knows}: {listed(named, 'and')} {verb} not among them."


def listed(names: Sequence[str], last: str) -> str:
    """Returns "a, b and c", where `last` is "and"."""
    return f" {last} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _other_numbers(word: str) -> Iterator[str]:
    """Yields what may be the singular or the plural of an English word."""
    pairs = (("", "s"), ("", "es"), ("y", "ies"))
    for one, many in pairs:
        for old, new in ((one, many), (many, one)):
            stem = word.removesuffix(old)
            if word.endswith(old) and len(stem) >= LEAST_STEM:
                yield stem + new
