# SPDX-License-Identifier: Apache-2.0
"""Prompts of the base model, word for word: chat template, images, placeholders, boxes.

Spec Sec. 1.4 and 5. Every function below returns the parts of a sequence, which
`sequence.prompt_row` lays out; guidance drops everything up to the end of the user's turn. A text
answer is a `Response` at the end. An image or a dense caption is followed by the end of the turn
and one more assistant header: the released model was trained with them.
"""

import functools
import itertools
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import config
from sparse_lavida_jax.data.tokenizer import TextTokenizer
from sparse_lavida_jax.sequence import Part, Response, Source, Text, VisionTokens

Parts = tuple[Part, ...]

START = "<|startoftext|>"
START_HEADER = "<|start_header_id|>"
END_HEADER = "<|end_header_id|>"
END_OF_TURN = "<|eot_id|>"
END_OF_TEXT = "<|endoftext|>"
MASK = "<|mdm_mask|>"
CELL = "<|reserved_token_5|>"  # stands for a token of the image to be drawn
SOURCE_CELL = "<|reserved_token_6|>"  # stands for a token of the image to be edited
CONTROL = (START, START_HEADER, END_HEADER, END_OF_TURN, END_OF_TEXT, MASK, CELL, SOURCE_CELL)
IMAGE = "<image>"  # stands for vision tokens; not in any vocabulary
LOC_BEGIN, LOC_END = "<LOC_BEGIN>", "<LOC_END>"
PHRASE_BEGIN, PHRASE_END = "<box_p>", "</box_p>"

SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual"
    " content that the user provides, and assist the user with a variety of tasks using natural"
    " language."
)
DRAW = "Generate an image with the caption:\n <prompt>"
BOXES_WANTED = "Give bounding boxes in LOC format."
LAYOUT = "Please first think and plan the layout in LOC format."
FEEDBACK = "Please also consider past generations and their feedbacks. Do not repeat these errors"


class ChatTokenizer(TextTokenizer):
    """The tokenizer of a LaViDa-O or LLaDA folder. Its file defines the id of each token.

    Control tokens and LOC tokens in a text become their ids.
    """

    remedies = "name the tokenizer.json of a LaViDa-O folder", "Copy it again"

    def __init__(self, path: pathlib.Path | str):
        """Loads a `tokenizer.json`.

        Raises:
            FileNotFoundError: there is no tokenizer at `path`.
            ValueError: the file is damaged, or of a tokenizer without the control tokens.
        """
        super().__init__(path)
        for token in CONTROL:
            self.id_of(token)

    def id_of(self, token: str) -> int:
        """Returns the id of a token.

        Raises:
            ValueError: the tokenizer has no such token.
        """
        number = self._inner.token_to_id(token)
        if number is None:
            raise ValueError(
                f"{self.path} has no token {token!r}: use the tokenizer.json of a LaViDa-O folder."
            )
        return number

    @functools.cached_property
    def location_ids(self) -> tuple[int, ...]:
        """The ids of `<LOC_0>`, `<LOC_1>`, ...: 1025 in the release."""
        ids = [self.id_of("<LOC_0>")]
        while (number := self._inner.token_to_id(f"<LOC_{len(ids)}>")) is not None:
            ids.append(number)
        return tuple(ids)

    @property
    def frame(self) -> int:
        """The largest LOC coordinate: 1024 in the release."""
        return len(self.location_ids) - 1

    def box(self, ids: Int[np.ndarray, " 4"]) -> tuple[int, int, int, int] | None:
        """Returns the LOC coordinates x1, y1, x2, y2 of ids; None if one is not a LOC token."""
        if not set(ids.tolist()) <= set(self.location_ids):
            return None
        x1, y1, x2, y2 = (self.location_ids.index(number) for number in ids)
        return x1, y1, x2, y2

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text, without special tokens and unused ids."""
        with self._explained():
            return self._inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def check(self, model: config.Model) -> None:
        """Checks that model and tokenizer belong together.

        Raises:
            ValueError: an id that the model needs differs here, or exceeds its vocabulary.
        """
        for name, token in (("text_mask_id", MASK), ("end_of_text_id", END_OF_TEXT)):
            if self.id_of(token) != getattr(model, name):
                raise ValueError(
                    f"{self.path} has {token} as {self.id_of(token)}, the model has"
                    f" {name}={getattr(model, name)}: use the tokenizer next to the model."
                )
        if self.vocab_size > model.vocab_size:
            raise ValueError(
                f"{self.path} has {self.vocab_size} tokens, the model {model.vocab_size}:"
                " use the tokenizer next to the model."
            )


# ---------------------------------------------------------------------------------------------
# Images.


def micro_condition(
    width: int = 1024,
    height: int = 1024,
    top: int = 0,
    left: int = 0,
    *,
    pixel_diff: float | None = None,
    **measured: float | None,
) -> str:
    """Returns the text that describes an image in addition to its caption (spec Sec. 5.4).

    Args:
        width, height: of the original, in pixels.
        top, left: of the crop, in pixels of the resized image.
        pixel_diff: how much an edit changes.
        measured: in the order of the release: luminance and contrast (see
            `images.luminance_and_contrast`), score of an aesthetics model, about 4 to 8, and hps,
            ten times the score of HPS v2.
    """
    words = f"ORIGINAL WIDTH : {width}; ORIGINAL HEIGHT : {height}; TOP : {top}; LEFT : {left}"
    for name, value in measured.items():
        if value is not None:
            words += f"; {name.upper()} : {value:.3f}"
    return words if pixel_diff is None else f"{words}; PIXEL_DIFF : {pixel_diff:.3f} ;"


# As released for images of 1024 pixels, last semicolon included.
MICRO_CONDITION = micro_condition(score=7.11) + ";"


def draw(
    tokenizer: ChatTokenizer,
    caption: str,
    num_tokens: int,
    *,
    condition: str = MICRO_CONDITION,
    layout: str = "",
    attempts: Sequence[tuple[VisionTokens, str]] = (),
    template: str = DRAW,
) -> Parts:
    """Returns the prompt of an image of `num_tokens` tokens.

    Args:
        condition: from `micro_condition`.
        layout: an answer to `layout_of_image`, cleaned by `clean_layout`.
        attempts: earlier images, each with a description of its faults. The line break after
            the last one is ours.
        template: `<prompt>` in it is replaced by caption, attempts and condition.

    Raises:
        ValueError: a control token in the text.
    """
    words = _plain(caption)
    if attempts:
        words += f" {FEEDBACK} "
    for i, (_, feedback) in enumerate(attempts, 1):
        words += f"Generation {i}: {IMAGE}\n Feedback {i}: {_plain(feedback)}\n"
    user = template.replace("<prompt>", f"{words} {_plain(condition)}")
    text = conversation(user, _plain(layout) + num_tokens * CELL)
    sequence = _encode(tokenizer, text, [image for image, _ in attempts])
    return _parts(tokenizer, sequence, CELL, drop_layout=bool(layout))


def edit(
    tokenizer: ChatTokenizer,
    instruction: str,
    shown: Sequence[VisionTokens],
    sources: Sequence[Int[np.ndarray, "n g"]],
    num_tokens: int,
    *,
    layout: str = "",
) -> Parts:
    """Returns the prompt of an edit; the source images are given as vision tokens and as codes.

    Args:
        shown, sources: of the source images, separated by spaces. The release edits a single
            image; several are our extension.
        layout: an answer to `layout_of_edit`, cleaned by `clean_layout`.

    Raises:
        ValueError: a control token in the text.
    """
    given = " ".join(f"{IMAGE} {len(source) * SOURCE_CELL}" for source in sources)
    text = conversation(f"{given}\n {_plain(instruction)} ", _plain(layout) + num_tokens * CELL)
    sequence = _encode(tokenizer, text, shown, sources)
    return _parts(tokenizer, sequence, CELL, drop_layout=bool(layout))


def layout_of_image(
    tokenizer: ChatTokenizer, caption: str, num_tokens: int, *, condition: str = MICRO_CONDITION
) -> Parts:
    """Returns the prompt of a layout of `num_tokens` tokens: the layout of an image to draw."""
    words = f"{_plain(caption)} {_plain(condition)}"
    user = f"Generate an image with the caption: {words}. {LAYOUT}"
    return answer_to(tokenizer, user, [], num_tokens)


def layout_of_edit(
    tokenizer: ChatTokenizer, instruction: str, image: VisionTokens, num_tokens: int
) -> Parts:
    """Returns the prompt of a layout of `num_tokens` tokens: the layout after an edit."""
    user = f"{IMAGE}\n{_plain(instruction)}. {LAYOUT}"
    return answer_to(tokenizer, user, [image], num_tokens)


def clean_layout(answer: str) -> str:
    """Returns a layout without control tokens, to put before the image."""
    for token in (*CONTROL, IMAGE, "<image_gen_fake>"):
        answer = answer.replace(token, "")
    return answer


# ---------------------------------------------------------------------------------------------
# Text and boxes.


def ask(
    tokenizer: ChatTokenizer,
    question: str,
    images: Sequence[VisionTokens],
    num_tokens: int,
    earlier: Sequence[tuple[str, str]] = (),
) -> Parts:
    """Returns the prompt of an answer of `num_tokens` tokens to a question about images.

    Several images are separated by spaces. This is our own choice, and so is support for several
    turns, the first of which contains the images.

    Args:
        earlier: previous questions with their answers.

    Raises:
        ValueError: a control token in the text.
    """
    shown = " ".join([IMAGE] * len(images)) + "\n" if images else ""
    turns = [(_plain(asked), _plain(answer)) for asked, answer in earlier]
    (first, *answer), *rest = [*turns, (_plain(question),)]
    *turns, (last,) = [(shown + first, *answer), *rest]
    return answer_to(tokenizer, last, images, num_tokens, turns)


def judge(tokenizer: ChatTokenizer, caption: str, image: VisionTokens, num_tokens: int) -> Parts:
    """Returns the prompt of a verdict on an image: a good one "is correct" (spec Sec. 7.7)."""
    return answer_to(tokenizer, verdict_asked(_plain(caption)), [image], num_tokens)


def verdict_asked(caption: str) -> str:
    """Returns the words that ask for a verdict on an image."""
    return (
        f"{IMAGE}\nPlease evaluate this generated image based on the following prompt:"
        f" {caption} Focus on text alignment and compositionality."
    )


def answer_to(
    tokenizer: ChatTokenizer,
    user: str,
    images: Sequence[VisionTokens],
    num_tokens: int,
    earlier: Sequence[tuple[str, str]] = (),
) -> Parts:
    """Returns the prompt of an answer of `num_tokens` tokens to a message of the user.

    Args:
        user: the message, in which `<image>` stands for each of the images.
        earlier: previous turns, each a message of the user and its answer.
    """
    text = conversation(user, earlier=earlier)
    parts = _parts(tokenizer, _encode(tokenizer, text, images))
    return (*parts, Response(num_tokens))


def locate(tokenizer: ChatTokenizer, phrase: str, image: VisionTokens) -> Parts:
    """Returns the prompt of the box of one thing: the response is its four LOC tokens.

    As released, everything starts with an apostrophe, so that nothing after the image is lost (see
    `_encode`), and no header follows the response.

    Raises:
        ValueError: a control token in the text, or a tokenizer without LOC tokens.
    """
    user = f"{IMAGE}\n Please locate {_plain(phrase)} in this image. {BOXES_WANTED}"
    text = "'" + conversation(user, _box(tokenizer)).removesuffix(_header("assistant"))
    return _parts(tokenizer, _encode(tokenizer, text, [image]), MASK)


def locate_all(
    tokenizer: ChatTokenizer, phrases: Sequence[str], image: VisionTokens
) -> tuple[Parts, Int[np.ndarray, " l"]]:
    """Returns the prompt of the boxes of several things, and the known part of the response.

    The response extends from the first LOC token to the last. The ids between them are known; the
    LOC tokens, four per phrase, hold the text mask.

    Raises:
        ValueError: no phrase, a control token in one, or a tokenizer without LOC tokens.
    """
    if not phrases:
        raise ValueError("locate_all was given no phrase: name one thing or more.")
    user = f"{IMAGE}\n Please describe this image with dense localized caption. {BOXES_WANTED}"
    named = (f"{PHRASE_BEGIN} {_plain(phrase)} {PHRASE_END}{_box(tokenizer)}" for phrase in phrases)
    text = conversation(user, "There are following objects in the scene. " + ", ".join(named))
    sequence = _encode(tokenizer, text, [image])
    known = sequence[_span(sequence, tokenizer.id_of(MASK))]
    return _parts(tokenizer, sequence, MASK), np.asarray(known, np.int32)


# ---------------------------------------------------------------------------------------------
# Turning text into parts.


def conversation(user: str, assistant: str = "", earlier: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the chat template filled in (spec Sec. 5.1); it always ends with a header."""
    before = [turn for pair in earlier for turn in zip(("user", "assistant"), pair, strict=True)]
    turns = [("system", SYSTEM), *before, ("user", user)]
    if assistant:
        turns.append(("assistant", assistant))
    said = (message(role, content) for role, content in turns)
    return START + "".join(said) + _header("assistant")


def message(role: str, content: str) -> str:
    """Returns one turn of a conversation, starting with its header."""
    return f"{_header(role)}{content.strip()}{END_OF_TURN}"


def _header(role: str) -> str:
    return f"{START_HEADER}{role}{END_HEADER}\n\n"


def _box(tokenizer: ChatTokenizer) -> str:
    """Returns a box to be found, with masks for x1, y1, x2, y2."""
    for token in (LOC_BEGIN, LOC_END, PHRASE_BEGIN, PHRASE_END):
        tokenizer.id_of(token)  # otherwise the text would be spelled out
    return LOC_BEGIN + 4 * MASK + LOC_END


def _plain(text: str) -> str:
    """Returns a user's text after checking that it has no tokens of the template."""
    for token in (*CONTROL, IMAGE):
        if token in text:
            raise ValueError(f"the text {text!r} holds the control token {token}: leave it out.")
    return text


def _encode(
    tokenizer: ChatTokenizer,
    text: str,
    images: Sequence[VisionTokens],
    sources: Sequence[Int[np.ndarray, "n g"]] = (),
) -> list[int | Part]:
    """Returns ids, with `<image>` replaced by images and source cells by sources.

    As released (spec Sec. 5.2): if the text starts with the start token, the first id of every
    piece after an image is lost.
    """
    first, *rest = (tokenizer.encode(piece) for piece in text.split(IMAGE))
    lost = 1 if first[:1] == [tokenizer.id_of(START)] else 0
    sequence: list[int | Part] = [*first]
    for image, piece in zip(images, rest, strict=True):
        sequence += [image, *piece[lost:]]
    if not sources:
        return sequence
    cell, left = tokenizer.id_of(SOURCE_CELL), iter(sources)
    runs = itertools.groupby(sequence, lambda token: token == cell)
    return [
        token for is_source, run in runs for token in ([Source(next(left))] if is_source else run)
    ]


def _parts(
    tokenizer: ChatTokenizer,
    sequence: Sequence[int | Part],
    placeholder: str | None = None,
    drop_layout: bool = False,
) -> Parts:
    """Returns the parts of a sequence: the text of the turns, and the response within it.

    Args:
        placeholder: the response extends from the first one to the last; None: it comes at the end.
        drop_layout: guidance also drops the assistant's header and its words before the response,
            not only the turns of system and user (spec Sec. 7.1).
    """
    end_of_turn = tokenizer.id_of(END_OF_TURN)
    _, user, *_ = (i for i, token in enumerate(sequence) if token == end_of_turn)
    if placeholder is None:
        return _grouped(sequence[: user + 1]) + _grouped(sequence[user + 1 :], keep=True)
    response = _span(sequence, tokenizer.id_of(placeholder))
    kept = response.start if drop_layout else user + 1
    return (
        *_grouped(sequence[:kept]),
        *_grouped(sequence[kept : response.start], keep=True),
        Response(response.stop - response.start),
        *_grouped(sequence[response.stop :], keep=True),
    )


def _span(sequence: Sequence[int | Part], number: int) -> slice:
    """Returns the slice from the first to the last occurrence of an id in a sequence."""
    found = [i for i, token in enumerate(sequence) if token == number]
    return slice(found[0], found[-1] + 1)


def _grouped(sequence: Sequence[int | Part], keep: bool = False) -> Parts:
    """Returns a sequence with its runs of ids joined to text parts."""
    parts: list[Part] = []
    for is_text, run in itertools.groupby(sequence, lambda token: isinstance(token, int)):
        if is_text:
            parts.append(Text(np.array([*run], np.int32), keep))
        else:
            parts.extend(token for token in run if not isinstance(token, int))
    return tuple(parts)
