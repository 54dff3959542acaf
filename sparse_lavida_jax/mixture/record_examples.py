# SPDX-License-Identifier: Apache-2.0
"""Training samples of the released mixture: records to sequences and to examples.

`Mixer.sequence` is for LaViDa-O's own objective: word for word the prompts of the released training
(spec Sec. 9.1 and 9.4), which differ from those of its inference. `Mixer.example` is for
step-causal training: it uses the prompts of `lavida_o/chat.py`, so that training matches sampling.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from sparse_lavida_jax import config
from sparse_lavida_jax.data import image_files, images
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.released_objective import Sequence
from sparse_lavida_jax.lavida_o import chat
from sparse_lavida_jax.lavida_o.chat import CELL, IMAGE, SOURCE_CELL, ChatTokenizer
from sparse_lavida_jax.mixture.recipe import WITH_LAYOUT
from sparse_lavida_jax.mixture.records import Record, RecordError
from sparse_lavida_jax.sequence import (
    LearnedText,
    Modality,
    Part,
    Response,
    Source,
    Text,
    Views,
    VisionTokens,
    cells_from_codes,
)

# These enclose an image in the released training text. Neither is a token of the released
# tokenizer, so both are spelled out and learned (spec Sec. 9.1).
IMAGE_BEGIN, IMAGE_END = "<|reserved_token_126095|>", "<|reserved_token_126096|>"
NO_IMAGE = "<|reserved_token_7|>"  # in place of the image if only a layout is trained
CLEAN_TEXT = 0.8  # share of images with a layout whose text is not masked (spec Sec. 9.2)
NO_CONDITION = 0.3  # share of prompts without a micro-condition (spec Sec. 5.4)
MEASURED = 0.5  # share of micro-conditions with a luminance, and with a contrast
LONG_CAPTION, SHORTENED = 150, 0.2  # characters; share of longer captions that are shortened
MOST_CAPTION = 800  # characters of a caption, the rest is cut off
DENSE_CAPTION = "Generate a dense image caption with bounding boxes in LOC format."
FINAL_BLOCKS = 4  # fewer than this many text blocks of padding follow an answer; our choice
_MARK = re.compile("(" + "|".join(map(re.escape, (IMAGE, SOURCE_CELL, CELL))) + ")")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_LOCATION = re.compile(r"<LOC_(\d+)>")


@dataclasses.dataclass(frozen=True)
class Mixer:
    """Converts records to training samples.

    Attributes:
        tokenizer: the one next to the model.
        settings: the whole configuration.
    """

    tokenizer: ChatTokenizer
    settings: config.Config

    # ---------------------------------------------------------------------------------------------
    # The released objective.

    def sequence(self, record: Record, rng: np.random.Generator) -> Sequence:
        """Returns a record as LaViDa-O trains on it, without padding.

        If an image follows a layout, text is kept clean in 4 of 5 draws: neither masked, nor
        dropped, nor learned.

        Raises:
            RecordError: it does not fit the model or the tokenizer.
        """
        crop = int(rng.integers(max(len(record.target), 1)))
        turns = self._turns(record, crop, rng)
        seen, views = self._seen(record)
        sources = [self._cells(codes) for codes in record.sources]
        codes, weight = np.zeros((0, self.settings.model.codes_per_token), np.int32), None
        if record.draws:
            codes, weight = self._cells(record.target[crop]), self._code_weight(record)
        marks: dict[str, Iterator[Part]] = {
            IMAGE: iter([one.part for one in seen]),
            SOURCE_CELL: iter([Source(cells) for cells in sources]),
            CELL: iter([Response(len(codes))]),
        }
        keep = record.draws and bool(record.layout) and rng.random() < CLEAN_TEXT
        parts: list[Part] = []
        for words, answer_from in self._messages(turns):
            at = 0
            for piece in _MARK.split(words):
                if piece in marks:
                    parts.append(next(marks[piece]))
                elif piece:
                    ids, offsets = self.tokenizer.encode_with_offsets(piece)
                    # The header of the assistant is context; the rest of the message is learned.
                    first = sum(at + end <= answer_from for _, end in offsets)
                    context, learned = np.split(np.asarray(ids, np.int32), [first])
                    answer = Text(learned, keep=True) if keep else LearnedText(learned)
                    parts += [Text(context), answer]
                at += len(piece)
        if not record.draws:
            parts.append(Response(0))
        return Sequence(_joined(parts), codes, weight, views)

    def _messages(self, turns: list[tuple[str, str]]) -> list[tuple[str, int]]:
        """Returns messages, each with the index of its first learned character."""
        said = [("system", chat.SYSTEM, False)]
        for user, assistant in turns:
            said += [("user", user, False), ("assistant", assistant, True)]
        messages = [(chat.START, len(chat.START))]
        for role, words, learned in said:
            message = chat.message(role, words)
            start = len(chat.message(role, "")) - len(chat.END_OF_TURN)
            messages.append((message, start if learned else len(message)))
        return messages

    def _turns(self, record: Record, crop: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        """Returns the texts of user and assistant, with marks in place of images and cells."""
        match record.kind:
            case "text_to_image" | "layout":
                user = self._image_wanted(record, crop, rng)
            case "edit" | "edit_layout":
                user = f"{IMAGE} {SOURCE_CELL} " * len(record.sources) + f" {record.asked[0]}"
                if record.pixel_diff is not None and record.draws:
                    user += f" {self._condition(record, crop, rng)}"
            case "understanding":
                turns = zip(record.asked, record.answered, strict=True)
                return [(_image_first(user), answer) for user, answer in turns]
            case _:
                return [(_question(record), self._answered(record))]
        words, drawn = "Sure", f"{IMAGE_BEGIN}{CELL}{IMAGE_END}" if record.draws else NO_IMAGE
        if record.kind in WITH_LAYOUT:
            user += f". {chat.LAYOUT}{_feedback(record)}"
            words = self._layout_words(record)
        answer = drawn if record.form == "no_plan" else f"{words} {drawn}"
        return [(_image_first(user), answer)]

    def _image_wanted(self, record: Record, crop: int, rng: np.random.Generator) -> str:
        caption, condition = caption_of(record, rng), self._condition(record, crop, rng)
        return f"Generate an image with the caption: {caption} {condition}"

    def _condition(self, record: Record, crop: int, rng: np.random.Generator) -> str:
        return condition_of(record, crop, rng) if self.settings.data.micro_condition else ""

    def _layout_words(self, record: Record) -> str:
        """Returns the words with which an answer states its layout."""
        if record.kind == "layout":
            return f"Sure I should place the objects in the following manner {record.layout}"
        return (
            f"Sure I should consider {record.operation} the objects in these locations : "
            f" {record.layout}"
        )

    def _code_weight(self, record: Record) -> Float[np.ndarray, "l g"] | None:
        """Returns the loss weight of each code, higher within the boxes of an edit."""
        if self.settings.data.edit_area_weight == 1 or not len(record.boxes):
            return None
        height, width = record.target.shape[1:]
        inside = np.zeros((height, width), bool)
        for box in record.boxes.tolist():
            x1, y1, x2, y2 = images.box_to_locations(tuple(box), record.size, 4096)
            rows, columns = (
                slice(first * side // 4096, -(-last * side // 4096))
                for first, last, side in ((y1, y2, height), (x1, x2, width))
            )
            inside[rows, columns] = True
        weight = np.where(inside, self.settings.data.edit_area_weight, 1.0)
        return cells_from_codes(weight[None], self.settings.model.codes_side)[0]

    # ---------------------------------------------------------------------------------------------
    # Step-causal training.

    def example(self, record: Record, rng: np.random.Generator) -> Example:
        """Returns a record in the form used for sampling, with one response.

        For an image with a layout, the response is the image, after its layout, in 4 of 5 draws,
        and the layout in the others. For a conversation it is one answer, chosen at random with its
        question, as the release does without SELECT_ALL_INDEX (spec Sec. 0).

        Raises:
            RecordError: it does not fit the model or the tokenizer.
        """
        crop = int(rng.integers(max(len(record.target), 1)))
        seen, views = self._seen(record)
        shown = [one.part for one in seen]
        if not record.draws or (record.layout and rng.random() >= CLEAN_TEXT):
            if record.kind == "dense_caption" and len(record.boxes):
                return self._dense_boxes(record, shown[0], views)
            parts, ids, reach = self._text(record, crop, shown, rng)
            return _example(parts, ids[:, None], "text", views, reach=reach)
        codes, t = self._cells(record.target[crop]), self.tokenizer
        layout = self._layout_words(record) if record.layout else ""
        if record.kind in ("text_to_image", "layout"):
            caption, condition = caption_of(record, rng), self._condition(record, crop, rng)
            attempts = [*zip(shown, record.feedback, strict=True)]
            parts = chat.draw(
                t, caption, len(codes), condition=condition, layout=layout, attempts=attempts
            )
            return _example(parts, codes, "image", views)
        if record.kind not in ("edit", "edit_layout"):
            raise _unknown(record)
        sources = [self._cells(one) for one in record.sources]
        parts = chat.edit(t, record.asked[0], shown, sources, len(codes), layout=layout)
        return _example(parts, codes, "image", views, code_weight=self._code_weight(record))

    def _text(
        self, record: Record, crop: int, shown: list[VisionTokens], rng: np.random.Generator
    ) -> tuple[tuple[Part, ...], Int[np.ndarray, " l"], int]:
        """Returns the prompt of a text response, its ids, and how many a sampler may decode."""
        t, (asked, *_) = self.tokenizer, (*record.asked, "")
        if record.kind == "grounding" and (box := self._box_ids(record)) is not None:
            return chat.locate(t, asked, shown[0]), box, len(box)
        which = int(rng.integers(len(record.asked))) if record.kind == "understanding" else 0
        ids, reach = self._answer(self._answered(record, which), rng)
        match record.kind:
            case "layout":
                wanted = self._image_wanted(record, crop, rng)
                user = f"{wanted}. {chat.LAYOUT}{_feedback(record)}"
            case "edit_layout":
                user = f"{' '.join([IMAGE] * len(shown))}\n{asked}. {chat.LAYOUT}"
            case "understanding":
                question = record.asked[which].replace(IMAGE, "").strip()
                return chat.ask(t, question, shown, len(ids)), ids, reach
            case _:
                user = _question(record)
        return chat.answer_to(t, user, shown, len(ids)), ids, reach

    def _answered(self, record: Record, turn: int = 0) -> str:
        """Returns the answer in words."""
        match record.kind:
            case "layout" | "edit_layout":
                return self._layout_words(record)
            case "grounding":
                return self._boxes_said(record)[0]
            case "dense_caption" if not record.answered:
                named = (
                    f"{chat.PHRASE_BEGIN} {phrase} {chat.PHRASE_END}{box}"
                    for phrase, box in zip(record.phrases, self._boxes_said(record), strict=True)
                )  # in the form of the released prompt for boxes
                return "There are following objects in the scene. " + ", ".join(named)
            case _:
                return (*record.answered, "")[turn]

    def _dense_boxes(
        self, record: Record, shown: VisionTokens, views: tuple[Views, ...]
    ) -> Example:
        """Returns phrases whose boxes are to be found; the rest of the response is given."""
        parts, known = chat.locate_all(self.tokenizer, record.phrases, shown)
        given = known != self.settings.model.text_mask_id
        boxes = _LOCATION.findall("".join(self._boxes_said(record)))
        ids = known.copy()
        ids[~given] = [self.tokenizer.id_of(f"<LOC_{edge}>") for edge in boxes]
        return _example(parts, ids[:, None], "text", views, given=given)

    def _answer(self, words: str, rng: np.random.Generator) -> tuple[Int[np.ndarray, " l"], int]:
        """Returns an answer in whole text blocks, and how many tokens a sampler may decode.

        It is followed by the end of the turn, at least one end-of-text, and a random number of
        further text blocks.
        """
        data, model = self.settings.data, self.settings.model
        end = self.tokenizer.id_of(chat.END_OF_TURN)
        said = [*self.tokenizer.encode(words.strip()), end]
        block = data.text_block_len
        reach = (len(said) // block + 1) * block
        length = reach + int(rng.integers(FINAL_BLOCKS)) * block
        length = min(length, max(reach, data.max_answer_len))
        ids = np.full(length, model.end_of_text_id, np.int32)
        ids[: len(said)] = said
        return ids, reach

    # ---------------------------------------------------------------------------------------------
    # Boxes.

    def _boxes_said(self, record: Record) -> list[str]:
        """Returns an answer in LOC tokens for each box."""
        if not len(record.boxes):
            return [*record.answered]
        frame, said = self.tokenizer.frame, []
        for box in record.boxes.tolist():
            edges = images.box_to_locations(tuple(box), record.size, frame)
            said.append(chat.LOC_BEGIN + "".join(f"<LOC_{edge}>" for edge in edges) + chat.LOC_END)
        return said

    def _box_ids(self, record: Record) -> Int[np.ndarray, " 4"] | None:
        """Returns the LOC tokens of one box; None if the answer is anything else."""
        said = self._boxes_said(record)[0]
        edges = _LOCATION.findall(said)
        bare = _LOCATION.sub("", said.replace(chat.LOC_BEGIN, "").replace(chat.LOC_END, ""))
        if len(edges) != 4 or bare.strip():
            return None
        return np.array([self.tokenizer.id_of(f"<LOC_{edge}>") for edge in edges], np.int32)

    # ---------------------------------------------------------------------------------------------
    # Images.

    def _seen(self, record: Record) -> tuple[list[images.Seen], tuple[Views, ...]]:
        """Returns the images of a record as input to the vision tower.

        Several images are seen whole, and so are earlier attempts (spec Sec. 4).
        """
        whole = len(record.images) > 1 or bool(record.feedback)
        seen = [
            images.see(image_files.read_bytes(one), self.settings.model.vision, whole=whole)
            for one in record.images
        ]
        return seen, tuple(one.pixels for one in seen)

    def _cells(self, codes: Int[np.ndarray, "y x"]) -> Int[np.ndarray, "l g"]:
        model = self.settings.model
        side = model.grid_size * model.codes_side
        if codes.shape != (side, side) or codes.max() >= model.codebook_size:
            raise RecordError(
                f"its image has {codes.shape[0]}x{codes.shape[1]} codes up to {codes.max()}, and"
                f" the model takes {side}x{side} below {model.codebook_size}"
            )
        return cells_from_codes(codes[None], model.codes_side)[0]


def caption_of(record: Record, rng: np.random.Generator) -> str:
    """Returns a caption; a long one is sometimes cut to its first sentences (spec Sec. 9.4).

    If there are several, one is chosen at random. The caption of a layout is never shortened like
    this, only cut to the length limit, because the layout covers all of it.
    """
    caption, *others = record.asked
    if others:
        caption = record.asked[int(rng.integers(len(record.asked)))]
    is_long = record.kind == "text_to_image" and len(caption) > LONG_CAPTION
    if is_long and rng.random() < SHORTENED:
        sentences = _SENTENCE_END.split(caption.strip())
        caption = " ".join(sentences[: int(rng.integers(len(sentences))) + 1])
    return caption[:MOST_CAPTION]


def condition_of(record: Record, crop: int, rng: np.random.Generator) -> str:
    """Returns the micro-condition of an image, or "" (spec Sec. 5.4)."""
    dropped, luminance, contrast = rng.random(3) < (NO_CONDITION, MEASURED, MEASURED)
    if dropped or not len(record.target):
        return ""
    (top, left), light = record.crops[crop].tolist(), record.light[crop].tolist()
    return chat.micro_condition(
        *record.size,
        top,
        left,
        luminance=light[0] if luminance else None,
        contrast=light[1] if contrast else None,
        score=record.score,
        hps=record.hps,
        pixel_diff=record.pixel_diff,
    )


def _question(record: Record) -> str:
    """Returns the question about one image."""
    match record.kind:
        case "reflection":
            return chat.verdict_asked(record.asked[0])
        case "grounding":
            wanted = f"Please locate {record.asked[0]} in this image. {chat.BOXES_WANTED}"
            return f"{IMAGE}\n {wanted}"
        case "dense_caption":
            return f"{IMAGE}\n {DENSE_CAPTION}"
    raise _unknown(record)


def _feedback(record: Record) -> str:
    """Returns the words of a prompt about earlier attempts."""
    told = "\n".join(
        f"Generation {i}: {IMAGE}\n Feedback {i}: {words}"
        for i, words in enumerate(record.feedback, 1)
    )
    return f" {chat.FEEDBACK} {told}" if told else ""


def _image_first(words: str) -> str:
    """Moves the only image of a message to its start, as released (spec Sec. 9.4).

    The line break after it is ours.
    """
    if words.count(IMAGE) != 1 or words.startswith(IMAGE):
        return words
    return f"{IMAGE}\n{words.replace(IMAGE, '').strip()}"


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """Joins consecutive texts of the same kind, and drops empty ones."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if not isinstance(part, Text | LearnedText):
            joined.append(part)
        elif isinstance(last, Text | LearnedText) and _sort(last) == _sort(part):
            joined[-1] = dataclasses.replace(last, ids=np.concatenate([last.ids, part.ids]))
        elif len(part.ids):
            joined.append(part)
    return tuple(joined)


def _sort(text: Text | LearnedText) -> tuple[type, bool]:
    return type(text), isinstance(text, Text) and text.keep


def _unknown(record: Record) -> RecordError:
    return RecordError(f"it is of the kind {record.kind}, which is unknown")


def _example(parts: tuple[Part, ...], response, modality: Modality, views, **more: Any) -> Example:
    given = np.zeros(len(response), bool)
    made = Example(parts, response.astype(np.int32), given, modality, None, len(response), views)
    return dataclasses.replace(made, **more)
