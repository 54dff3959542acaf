# SPDX-License-Identifier: Apache-2.0
"""Turns a row of a table into a record: the fields of each kind, and images ready for training.

The fields are listed in docs/api/data.md. Images to draw are resized and cropped as in the released
training (spec Sec. 3), those of edits and of layouts padded to a square; all randomness depends on
the seed, the dataset and the number of the row.
"""

import contextlib
import dataclasses
import math
import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from sparse_lavida_jax.data import files, image_files, images
from sparse_lavida_jax.lavida_o import chat
from sparse_lavida_jax.mixture.input_tables import SHOWN, Reader, Row
from sparse_lavida_jax.mixture.recipe import Dataset
from sparse_lavida_jax.mixture.records import Record, RecordError
from sparse_lavida_jax.prompting.request_errors import check_characters

Square = UInt8[np.ndarray, "s s 3"]

# Fields with another name in released tables.
OTHER_NAMES = {"score": "fltLaionAesthScore"}
# Fields that a row may have besides those of its kind, with their other names.
READ = {"score", "fltLaionAesthScore", "hpsv2", "pixel_diff", "edit_boxes", "conversations"}
OPERATIONS = {
    "add": "adding", "remove": "removing", "replace": "replacing", "adjust": "adjusting",
    "edit": "edit",
}  # fmt: skip
MOST_CHARACTERS = 20_000  # of one text
LONGEST_WORD = 1_000  # letters, digits, signs or spaces in a row; longer ones take very long
MOST_IMAGES = 64  # of one row
UNUSABLE = "unusable"  # field with the reason why a row of `folders` is bad
_LOCATION = re.compile(r"<LOC_\d{1,6}>")
_WORD = re.compile(r"[^\W\d_]+|\d+|(?:[^\w\s]|_)+|\s+")  # Chinese has no spaces, but commas
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


class LeftOut(Exception):
    """A valid row that the settings exclude; the message is the rule that excludes it."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that all rows share.

    Attributes:
        side: of the square input of the image tokenizer, in pixels.
        factor: pixels per side of one code.
        crops: number of random crops of an image to draw.
        seed: of the crops.
    """

    side: int
    factor: int
    crops: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Draft:
    """A record whose codes are still to be computed: those of `targets`, then of `sources`."""

    record: Record
    targets: tuple[Square, ...] = ()
    sources: tuple[Square, ...] = ()

    def finished(self, codes: Iterator[Int[np.ndarray, "y x"]]) -> Record:
        """Returns the record with its codes, taken from the iterator."""
        squares = {"target": self.targets, "sources": self.sources}
        made = {name: [next(codes) for _ in of] for name, of in squares.items() if of}
        return dataclasses.replace(self.record, **{name: np.stack(of) for name, of in made.items()})


def draft(
    row: Row, name: str, number: int, copy: int, dataset: Dataset, reader: Reader, to: Settings
) -> Draft:
    """Returns the record of a row, without its codes.

    Args:
        name: of the row, for messages.
        number, copy: which row it is, and how many times it was used before.

    Raises:
        RecordError, ImageError: something is missing or wrong in it.
        LeftOut: the dataset's settings exclude it.
    """
    if isinstance(dataset.columns, dict):
        row = row | _renamed(row, dataset.columns)
    key = (to.seed << 32) ^ zlib.crc32(dataset.name.encode())
    rng = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, number, copy]))
    return _RowReader(row, name, dataset, reader, to, rng).draft()


def _renamed(row: Row, columns: dict[str, str | tuple[str, ...]]) -> Row:
    """Returns the values of our fields: of the first of its columns that has a value."""
    found: Row = {}
    for field, names in columns.items():
        values = [row.get(name) for name in ([names] if isinstance(names, str) else names)]
        if any(_is_given(value) for value in values):
            found[field] = next(filter(_is_given, values))
    return found


def _is_given(value: Any) -> bool:
    return value is not None and value != "" and value != []


@dataclasses.dataclass
class _RowReader:
    """Reads one row."""

    row: Row
    name: str
    dataset: Dataset
    reader: Reader
    to: Settings
    rng: np.random.Generator

    def draft(self) -> Draft:
        if reason := self.row.get(UNUSABLE):
            raise RecordError(str(reason))
        score = self._number("score")
        if score is not None and score < self.dataset.aes_cutoff:
            raise LeftOut("aes_cutoff")
        made = getattr(self, f"_{self.dataset.kind}")()
        return dataclasses.replace(made, record=dataclasses.replace(made.record, score=score))

    def _record(self, asked: tuple[str, ...], **fields) -> Record:
        dataset = self.dataset
        return Record(dataset.kind, dataset.name, self.name, asked, form=dataset.form, **fields)

    # Images to draw.

    def _text_to_image(self) -> Draft:
        """Several captions of an image are kept: training uses one of them at a time."""
        said = self._list("caption")
        if not said or not all(isinstance(one, str) for one in said):
            said = [self._value("caption")]
        captions = tuple(_checked_words("caption", one) for one in said)
        return self._drawn(self._record(captions), "image", crop=True)

    def _layout(self) -> Draft:
        """LOC coordinates refer to the image padded to a square, so it is not cropped."""
        feedback = self._texts("feedback")
        shown = self._encoded("feedback_images")
        if len(feedback) != len(shown):
            raise RecordError(f"it has {len(feedback)} feedback and {len(shown)} feedback_images")
        for contents in shown:
            image_files.read_bytes(contents)
        layout = "" if self.dataset.form == "no_plan" else self._text("loc")
        caption = (self._text("caption"),)
        record = self._record(caption, layout=layout, feedback=feedback, images=shown)
        if self.dataset.form == "plan_only" and not self._has("image"):
            return Draft(record)
        return self._drawn(record, "image", crop=False)

    def _edit(self, layout: str = "", operation: str = "") -> Draft:
        self._needs("source_images")
        encoded = self._encoded("source_images")
        if self.dataset.max_enc_images and len(encoded) > self.dataset.max_enc_images:
            raise LeftOut("max_enc_images")
        shown = [image_files.read_bytes(contents) for contents in encoded]
        record = self._record(
            (self._text("instruction"),),
            layout=layout,
            operation=operation,
            images=encoded,
            size=images.size_of(shown[0]),
            pixel_diff=self._number("pixel_diff"),
            boxes=self._boxes("edit_boxes"),
        )
        made = Draft(record, sources=tuple(self._padded(image) for image in shown))
        if self.dataset.form == "plan_only" and not self._has("target_image"):
            return made
        drawn = self._drawn(record, "target_image", crop=False)
        return dataclasses.replace(drawn, sources=made.sources)

    def _edit_layout(self) -> Draft:
        operation = str(self.row.get("operation", "edit"))
        if operation not in (*OPERATIONS, *OPERATIONS.values()):
            raise RecordError(f"operation is {operation!r}, not one of {', '.join(OPERATIONS)}")
        layout = "" if self.dataset.form == "no_plan" else self._text("loc")
        return self._edit(layout, OPERATIONS.get(operation, operation))

    def _drawn(self, record: Record, field: str, *, crop: bool) -> Draft:
        """Adds the squares of the image to draw, and the values of its micro-condition."""
        image = image_files.read_bytes(self._one(field), self._called(field))
        size = images.size_of(image)
        if min(size) < self.dataset.min_size:
            raise LeftOut("min_size")
        if crop:
            side = self.to.side
            left, top = (n - side for n in images.size_to_crop(size, side))
            places = [
                (int(self.rng.integers(top + 1)), int(self.rng.integers(left + 1)))
                for _ in range(self.to.crops)
            ]
            squares = [
                images.training_crop(image, side, *place, self.to.factor) for place in places
            ]
        else:
            places, squares = [(0, 0)], [self._padded(image)]
        hps = self._number("hpsv2")
        record = dataclasses.replace(
            record,
            crops=np.array(places, np.int32),
            light=np.array([images.luminance_and_contrast(one) for one in squares], np.float32),
            size=size,
            hps=None if hps is None else 10 * hps,
        )
        return Draft(record, tuple(squares))

    def _padded(self, image: image_files.Pixels) -> Square:
        return images.source_view(image, self.to.side, self.to.factor)

    # Text and boxes.

    def _understanding(self) -> Draft:
        shown = self._encoded("image")
        sizes = [images.size_of(image_files.read_bytes(contents)) for contents in shown]
        size = sizes[0] if sizes else (0, 0)
        asked, answered = self._turns()
        # If a conversation does not say where its images are, they come first.
        if shown and not any(chat.IMAGE in said for said in asked):
            asked = (" ".join([chat.IMAGE] * len(shown)) + "\n" + asked[0], *asked[1:])
        marks = sum(said.count(chat.IMAGE) for said in asked)
        if marks != len(shown):
            raise RecordError(f"it speaks of {marks} images ({chat.IMAGE}) and has {len(shown)}")
        return Draft(self._record(asked, answered=answered, images=shown, size=size))

    def _reflection(self) -> Draft:
        return self._seen((self._text("caption"),), answered=(self._text("answer"),))

    def _grounding(self) -> Draft:
        if self._has("loc_string"):
            return self._seen((self._text("label"),), answered=(self._text("loc_string"),))
        self._needs("box")
        boxes = self._boxes("box")
        if len(boxes) != 1:
            raise RecordError(f"it has {len(boxes)} boxes, where its box is needed")
        return self._seen((self._text("label"),), boxes=boxes)

    def _dense_caption(self) -> Draft:
        if self._has("loc_caption"):
            return self._seen((), answered=(self._text("loc_caption"),))
        self._needs("phrases", "boxes")
        phrases, boxes = self._texts("phrases"), self._boxes("boxes")
        if len(phrases) != len(boxes):
            raise RecordError(f"it has {len(phrases)} phrases and {len(boxes)} boxes")
        return self._seen((), phrases=phrases, boxes=boxes)

    def _seen(self, asked: tuple[str, ...], **fields) -> Draft:
        """Returns the draft of a text response about one image."""
        contents = self._one("image")
        size = images.size_of(image_files.read_bytes(contents, self._called("image")))
        boxes = fields.get("boxes", np.zeros((0, 4)))
        if (boxes < 0).any() or (boxes > np.array([*size, *size])).any():
            raise RecordError(f"a box leaves the image of {size[0]}x{size[1]} pixels")
        return Draft(self._record(asked, images=(contents,), size=size, **fields))

    def _turns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns questions and answers, the same number of each."""
        if not self._has("conversations"):
            return (self._text("question", with_images=True),), (self._text("answer"),)
        given, said = listed(self.row["conversations"]), {"user": [], "assistant": []}
        for i, turn in enumerate(given):
            if not isinstance(turn, dict):
                raise RecordError(f"turn {i} of its conversations is {turn!r}")
            speaker = SPEAKERS.get(str(turn.get("from", turn.get("role"))))
            wanted = ("user", "assistant")[i % 2]
            if speaker != wanted:
                raise RecordError(f"turn {i} of its conversations is not of the {wanted}")
            words = turn.get("value", turn.get("content"))
            said[wanted].append(_checked_words(f"turn {i}", words, with_images=wanted == "user"))
        if not given or len(given) % 2:
            raise RecordError("its conversations do not end with an answer")
        return tuple(said["user"]), tuple(said["assistant"])

    # Fields.

    def _has(self, field: str) -> bool:
        return _is_given(self._value(field))

    def _value(self, field: str) -> Any:
        return self.row.get(field, self.row.get(OTHER_NAMES.get(field, field)))

    def _needs(self, *fields: str) -> None:
        for field in fields:
            if not self._has(field):
                columns = ", ".join(map(str, self.row))
                raise RecordError(f"it has no {field}; its columns: {columns:.{SHOWN}}")

    def _text(self, field: str, *, with_images: bool = False) -> str:
        return _checked_words(field, self._value(field), with_images=with_images)

    def _texts(self, field: str) -> tuple[str, ...]:
        return tuple(_checked_words(field, one) for one in self._list(field))

    def _number(self, field: str) -> float | None:
        value = self._value(field)
        if value is None:
            return None
        with contextlib.suppress(TypeError, ValueError):
            if math.isfinite(number := float(value)):
                return number
        raise RecordError(f"{field} is {value!r}, which is no number")

    def _boxes(self, field: str) -> np.ndarray:
        """Returns boxes [b 4], from one box or a list of boxes."""
        try:
            boxes = np.asarray(self._list(field), np.float32).reshape(-1, 4)
        except (TypeError, ValueError):
            boxes = np.full((1, 4), np.nan, np.float32)
        if not (np.isfinite(boxes).all() and (boxes[:, :2] <= boxes[:, 2:]).all()):
            raise RecordError(f"{field} is no box x1, y1, x2, y2, nor a list of them")
        return boxes

    def _called(self, field: str) -> str:
        """Returns the name of an image in messages."""
        value = self._value(field)
        return f"its {field} {value}" if isinstance(value, str) else f"its {field}"

    def _one(self, field: str) -> bytes:
        self._needs(field)
        first, *more = self._encoded(field)
        if more:
            raise RecordError(f"it has {1 + len(more)} images as {field}, where one is needed")
        return first

    def _encoded(self, field: str) -> tuple[bytes, ...]:
        """Returns the encoded image or images of a field."""
        if len(named := self._list(field)) > MOST_IMAGES:
            raise RecordError(f"it has {len(named)} images as {field}, more than {MOST_IMAGES}")
        return tuple(map(self.reader.image, named))

    def _list(self, field: str) -> list[Any]:
        """Returns the values of a field, which may be a single value or empty."""
        return listed(self._value(field)) if self._has(field) else []


def listed(value: Any) -> list[Any]:
    """Returns a list; tables without lists (CSV) may contain it as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = files.parse_json(value)
        except ValueError:
            return [value]
    return value if isinstance(value, list) else [value]


def _checked_words(field: str, value: Any, *, with_images: bool = False) -> str:
    """Returns a text, composed, after checking that a tokenizer and a prompt can have it."""
    if not isinstance(value, str) or not value.strip():
        raise RecordError(f"it has no {field}" if value in (None, "") else f"{field} is {value!r}")
    if len(value) > MOST_CHARACTERS:
        raise RecordError(f"{field} has {len(value)} characters, more than {MOST_CHARACTERS}")
    if max(map(len, _WORD.findall(_LOCATION.sub(" ", value)))) > LONGEST_WORD:
        raise RecordError(f"{field} has a word of more than {LONGEST_WORD} characters")
    if "\0" in value:
        raise RecordError(f"{field} holds the character NUL")
    check_characters(value, field)
    for token in (*chat.CONTROL, *(() if with_images else (chat.IMAGE,))):
        if token in value:
            raise RecordError(f"{field} holds the control token {token}")
    return files.composed(value)
