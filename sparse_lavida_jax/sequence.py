# SPDX-License-Identifier: Apache-2.0
"""The parts of a sequence, and the layout of a prompt: positions, and what the model is shown.

Everything here runs on the host, on NumPy arrays. `prompt_row` is the only function that lays
prompts out, for training and for sampling.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Literal, NamedTuple

import einops
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from sparse_lavida_jax.tags import NO_EMBEDDING, NO_FEATURE, StreamName
from sparse_lavida_jax.visibility import AnyArray

Modality = Literal["text", "image"]  # of a response
# Where responses are; images of a prompt may be in either stream.
RESPONSE_STREAM: dict[Modality, StreamName] = {"text": "understanding", "image": "generation"}
# Input of the vision tower: bytes, or numbers in [-1, 1], which it takes as they are.
# For a batch, one image per row or the views of its images.
Views = UInt8[np.ndarray, "_n h w 3"] | Float[np.ndarray, "_n h w 3"]
SeenBatch = UInt8[AnyArray, "b *n h w 3"] | Float[AnyArray, "b *n h w 3"]


@dataclasses.dataclass(frozen=True)
class Text:
    """Text of the prompt. `keep`: guidance and prompt drop do not change it (headers)."""

    ids: Int[np.ndarray, " n"]
    keep: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclasses.dataclass(frozen=True)
class VisionTokens:
    """An image seen through the vision tower, as `num_tokens` of its features.

    Attributes:
        index: the feature of this image that each token stands for; by default in order.
        num_features: the number of features of this image, after which those of the row's next
            image are numbered; by default the number of tokens.

    Raises:
        ValueError: `index` does not give one feature of the image per token.
    """

    num_tokens: int
    index: Int[np.ndarray, " n"] | None = None
    num_features: int | None = None

    def __post_init__(self):
        index, features = self.features, self.feature_count
        outside = index[(index < 0) | (index >= features)]
        if len(index) != self.num_tokens or len(outside):
            raise ValueError(
                f"an image of {self.num_tokens} tokens was given {len(index)} features,"
                f" {len(outside)} of them outside 0..{features - 1}: name one for each token, all"
                " of the image."
            )

    @functools.cached_property
    def features(self) -> Int[np.ndarray, " n"]:
        return np.arange(self.num_tokens) if self.index is None else self.index

    @property
    def feature_count(self) -> int:
        return self.num_tokens if self.num_features is None else self.num_features


@dataclasses.dataclass(frozen=True)
class Source:
    """The cells of a source image, in the generation stream."""

    codes: Int[np.ndarray, "n g"]

    @property
    def num_tokens(self) -> int:
        return len(self.codes)


@dataclasses.dataclass(frozen=True)
class LearnedText:
    """Text that training on whole sequences predicts (`data.released_objective`); never dropped."""

    ids: Int[np.ndarray, " n"]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclasses.dataclass(frozen=True)
class Blank:
    """Tokens with a zero embedding: how the released code pads rows on the right.

    They are attended to like any text, and the prompt drop turns them into text masks.
    """

    num_tokens: int


@dataclasses.dataclass(frozen=True)
class Response:
    """Where the response goes; training or the sampler lays out its tokens."""

    num_tokens: int


Part = Text | VisionTokens | Source | LearnedText | Blank | Response


def num_tokens(part: Part) -> int:
    """Returns the number of positions that a part takes in the sequence."""
    return part.num_tokens


def prompt_tokens(parts: Iterable[Part]) -> tuple[int, int]:
    """Returns how many tokens of a prompt are text, and how many represent images."""
    asked = [part for part in parts if not isinstance(part, Response)]
    tokens = [(num_tokens(part), isinstance(part, VisionTokens | Source)) for part in asked]
    image = sum(count for count, is_image in tokens if is_image)
    return sum(count for count, _ in tokens) - image, image


class PromptRow(NamedTuple):
    """One row of prompt, laid out: the contents of block 0, and where the response goes.

    Attributes:
        ids: text ids of the understanding tokens (vision tokens have the text mask id).
        feature: index of the vision feature that replaces the embedding, or `NO_FEATURE`, or
            `NO_EMBEDDING`.
        position: positions of the understanding tokens.
        is_answer: which understanding tokens belong to a `LearnedText`.
        codes: codes of the source cells.
        cell: raster index of the source cells.
        source_position: positions of the source cells.
        response_position: position of the first response token.
        length: tokens in the whole sequence: prompt, response and what follows it; registers
            have the positions after that (Sec. 7.2).
    """

    ids: Int[np.ndarray, " u"]
    feature: Int[np.ndarray, " u"]
    position: Int[np.ndarray, " u"]
    is_answer: Bool[np.ndarray, " u"]
    codes: Int[np.ndarray, "c g"]
    cell: Int[np.ndarray, " c"]
    source_position: Int[np.ndarray, " c"]
    response_position: int
    length: int


def prompt_row(
    parts: tuple[Part, ...],
    *,
    text_mask_id: int,
    codes_per_token: int,
    drop_prompt: bool = False,
    drop_source: bool = False,
    drop_kept: bool = False,
    drop_vision: bool | None = None,
    room_after: int = 0,
) -> PromptRow:
    """Lays a prompt out, replacing the parts that guidance or training drops by text masks.

    Positions are those of the full sequence, whatever is dropped. A dropped text or vision token
    becomes a text mask at its position; a dropped source cell becomes a text mask at its position
    *in the understanding stream* (spec Sec. 7.6). Used for training and for sampling.

    Args:
        parts: the sequence in order; exactly one `Response`.
        drop_prompt: drop text (without `keep`), vision and blanks.
        drop_source: drop the source cells.
        drop_kept: drop the text with `keep` too.
        drop_vision: whether to drop vision; overrides `drop_prompt`.
        room_after: tokens that may follow the parts.

    Raises:
        ValueError: there is not exactly one `Response`.
    """
    drop_vision = drop_prompt if drop_vision is None else drop_vision
    counts = [part.num_tokens for part in parts]
    length = sum(counts)
    # Of the tokens in the understanding stream, `end` so far; there are at most as many as in all.
    ids, feature = np.empty(length, np.int32), np.empty(length, np.int32)
    ids[:], feature[:] = text_mask_id, NO_FEATURE
    position, is_answer = np.arange(length, dtype=np.int32), np.zeros(length, bool)
    responses: list[int] = []
    sources: list[tuple[np.ndarray, ...]] = []
    start = end = features = 0
    for part, count in zip(parts, counts, strict=True):
        at = slice(end, end + count)
        start += count
        match part:
            case Text():
                if not (drop_kept if part.keep else drop_prompt):
                    ids[at] = part.ids
            case Response():
                responses.append(start - count)
                position[end:] += count
                continue
            case VisionTokens():
                if not drop_vision:
                    feature[at] = features + part.features if features else part.features
                features += part.feature_count
            case Source() if not drop_source:
                position[end:] += count
                sources.append((part.codes, (cell := np.arange(count)), start - count + cell))
                continue
            case LearnedText():
                ids[at], is_answer[at] = part.ids, True
            case Blank() if not drop_prompt:
                feature[at] = NO_EMBEDDING
        end += count
    if len(responses) != 1:
        got = "a second one" if responses else "none"
        raise ValueError(f"a prompt holds exactly one Response, got {got}.")
    no_cells = np.zeros(0, np.int32)
    codes, cell, source_position = np.zeros((0, codes_per_token), np.int32), no_cells, no_cells
    if sources:
        codes, cell, source_position = (
            np.concatenate(each, dtype=np.int32, casting="same_kind")
            for each in zip(*sources, strict=True)
        )
    return PromptRow(
        ids[:end], feature[:end], position[:end], is_answer[:end], codes, cell, source_position,
        responses[0], length + room_after,
    )  # fmt: skip


def cells_from_codes(codes, codes_side: int):
    """Groups a raster grid of codes [b y x] into cells [b l g], in raster order at both levels."""
    return einops.rearrange(codes, "b (y p) (x q) -> b (y x) (p q)", p=codes_side, q=codes_side)


def codes_from_cells(cells, height: int, codes_side: int):
    """Spreads cells [b l g] of an image `height` cells high over a grid of codes [b y x]."""
    return einops.rearrange(
        cells, "b (y x) (p q) -> b (y p) (x q)", y=height, p=codes_side, q=codes_side
    )


def stack_images(
    images: list[UInt8[np.ndarray, "h w 3"] | None],
) -> UInt8[np.ndarray, "b h w 3"] | None:
    """Stacks the images of a batch; a row without one gets a blank that no token looks at."""
    blank = next((np.zeros_like(image) for image in images if image is not None), None)
    if blank is None:
        return None
    return np.stack([blank if image is None else image for image in images])


def stack_views(rows: list[tuple[Views, ...]]) -> SeenBatch | None:
    """Stacks the views of each row's images, padded with blanks that no token looks at."""
    shown = [view for views in rows for view in views]
    if not shown:
        return None
    most = max(sum(map(len, views)) for views in rows)
    blank = np.zeros_like(shown[0][:1])
    return np.stack(
        [np.concatenate([*views, *[blank] * (most - sum(map(len, views)))]) for views in rows]
    )


def stacked_features(
    feature: Int[np.ndarray, " u"],
    views: tuple[int, ...],
    most: int,
    per_view: int,
    *,
    newline: bool,
    before: int = 0,
) -> Int[np.ndarray, " u"]:
    """Returns the features of a row in the numbering of `Denoiser.see` for stacked views.

    A `PromptRow` numbers features image by image, with a newline after each; `see` returns the
    features of all views, followed by a single newline.

    Args:
        feature: of each token, `PromptRow.feature`.
        views: the number of views of each image in the row.
        most: views per row of the batch, blanks included.
        per_view: features per view.
        newline: whether there are newlines.
        before: views in the row of the batch that belong to earlier examples.
    """
    if not views:
        return feature
    first = np.cumsum([0, *views[:-1]])
    start = first * per_view + newline * np.arange(len(views))
    image = np.maximum(np.searchsorted(start, feature, side="right") - 1, 0)
    inside = feature - start[image]
    is_newline = inside == np.asarray(views)[image] * per_view
    moved = np.where(is_newline, most * per_view, (before + first[image]) * per_view + inside)
    return np.where(feature < 0, feature, moved)
