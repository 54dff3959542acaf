# SPDX-License-Identifier: Apache-2.0
r"""The text tokenizer: byte-level BPE that was trained on the language of the small world.

    python -m sparse_lavida_jax.scenes.tokenizer \
        --out=sparse_lavida_jax/assets/tokenizers/scenes/tokenizer.json

makes the one that is shipped. Every word of the language, with the space before it, is one token;
any other Unicode text becomes smaller pieces, down to bytes.
"""

import argparse
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from sparse_lavida_jax.scenes import tasks
from sparse_lavida_jax.scenes.grammar import LOCATIONS

# In the order of their ids, from 0 on; the LOC tokens follow, then bytes and merges.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|mdm_mask|>", "<|user|>", "<|assistant|>", "<|eot|>", "<image>", "<source>",
    "<response>",
)  # fmt: skip
LOCATION_TOKENS = tuple(f"<LOC_{edge}>" for edge in range(LOCATIONS))
# Tasks that the shipped tokenizer was trained on; the words of the others are no others.
OLDEST = (
    "draw", "edit", "inpaint", "outpaint", "plan", "edit_plan", "answer", "arithmetic", "point",
    "detect", "caption", "constrained_caption", "infill", "reflect",
)  # fmt: skip
SHIPPED = pathlib.Path(__file__).parents[1] / "assets" / "tokenizers" / "scenes" / "tokenizer.json"
LARGEST_VOCABULARY = 544


class Tokenizer:
    """Text to ids and back.

    Special tokens are no text: `encode` spells them out like any other word and `decode` leaves
    them out. LOC tokens are text, `<LOC_0>` to `<LOC_24>`.
    """

    def __init__(self, path: pathlib.Path | str = SHIPPED):
        """Loads a `tokenizer.json`.

        Raises:
            FileNotFoundError: there is none at `path`.
            ValueError: the file is damaged, or of a tokenizer without our special tokens.
        """
        path = pathlib.Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no tokenizer at {path}. Name a tokenizer.json, or make one with"
                f" `python -m sparse_lavida_jax.scenes.tokenizer --out={path}`."
            )
        try:
            self._inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises plain `Exception`
            raise ValueError(
                f"{path} is damaged: {error}. Copy it again, or make it anew with"
                f" `python -m sparse_lavida_jax.scenes.tokenizer --out={path}`."
            ) from error
        expected = SPECIAL_TOKENS + LOCATION_TOKENS
        found = tuple(self._inner.id_to_token(number) for number in range(len(expected)))
        if found != expected:
            wrong = next(i for i, token in enumerate(expected) if found[i] != token)
            raise ValueError(
                f"{path} has {found[wrong]!r} as token {wrong}, where {expected[wrong]!r} is"
                " needed. Use a tokenizer that `sparse_lavida_jax.scenes.tokenizer` made."
            )
        self._inner.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        return self._inner.get_vocab_size()

    @property
    def end_of_text_id(self) -> int:
        """Ends an answer, and pads."""
        return SPECIAL_TOKENS.index("<|endoftext|>")

    @property
    def mask_id(self) -> int:
        return SPECIAL_TOKENS.index("<|mdm_mask|>")

    @property
    def user_id(self) -> int:
        """Starts a prompt."""
        return SPECIAL_TOKENS.index("<|user|>")

    @property
    def assistant_id(self) -> int:
        """Starts a response."""
        return SPECIAL_TOKENS.index("<|assistant|>")

    @property
    def end_of_turn_id(self) -> int:
        return SPECIAL_TOKENS.index("<|eot|>")

    @property
    def image_id(self) -> int:
        """Stands for the vision tokens of an image."""
        return SPECIAL_TOKENS.index("<image>")

    @property
    def source_id(self) -> int:
        """Stands for the source cells of an edit."""
        return SPECIAL_TOKENS.index("<source>")

    @property
    def response_id(self) -> int:
        """Stands for the cells of an image response."""
        return SPECIAL_TOKENS.index("<response>")

    @property
    def location_ids(self) -> range:
        """The ids of `<LOC_0>`, `<LOC_1>`, ..."""
        return range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + LOCATIONS)

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns ids, and for each the characters (start, end) of `text` that it stands for."""
        encoding = self._inner.encode(text)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text, without special tokens and ids that are not in the vocabulary."""
        known = range(len(SPECIAL_TOKENS), self.vocab_size)
        return self._inner.decode([int(i) for i in ids if i in known], skip_special_tokens=False)


def train(texts: Iterable[str]) -> str:
    """Trains a tokenizer and returns the contents of its `tokenizer.json`."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LARGEST_VOCABULARY,
        min_frequency=1,
        special_tokens=[
            tokenizers.AddedToken(token, normalized=False)
            for token in SPECIAL_TOKENS + LOCATION_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    contents = json.loads(inner.to_str())
    # The trainer makes every added token special; a LOC token is text that `encode` looks for.
    for token in contents["added_tokens"]:
        token["special"] = token["content"] in SPECIAL_TOKENS
    return json.dumps(contents, ensure_ascii=False, indent=1) + "\n"


def corpus(examples: int) -> Iterator[str]:
    """Yields the texts of so many examples of every task and split, but for `YOUNGER` tasks."""
    for task in OLDEST:
        for split in tasks.SPLITS:
            for index in range(examples):
                sample = tasks.sample(task, 0, index, split)
                yield from filter(None, (sample.prompt, sample.answer, sample.plan))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the text tokenizer.")
    parser.add_argument("--out", type=pathlib.Path, default=SHIPPED, help="file to write")
    parser.add_argument("--examples", type=int, default=500, help="of every task and split")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(train(corpus(options.examples)), encoding="utf-8")
    print(f"{options.out}: {Tokenizer(options.out).vocab_size} tokens")


if __name__ == "__main__":
    main()
