# SPDX-License-Identifier: Apache-2.0
"""A sequence as its parts, and a prompt laid out: what stands where, and what the model is shown.

Everything here runs on the host, on NumPy arrays. `prompt_row` is the one function that lays a
prompt out, for training and for sampling.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Literal

import einops
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from sparse_lavida_jax.layout import NO_CELL, NO_EMBEDDING, NO_FEATURE
from sparse_lavida_jax.visibility import AnyArray

Kind = Literal["text", "image"]
# What the vision tower sees of an image: bytes, or numbers in [-1, 1] that it takes as they are.
# Of a batch, one image a row or the views of its images.
Views = UInt8[np.ndarray, "_n h w 3"] | Float[np.ndarray, "_n h w 3"]
SeenBatch = UInt8[AnyArray, "b *n h w 3"] | Float[AnyArray, "b *n h w 3"]


@dataclasses.dataclass(frozen=True)
class Text:
    """Text of the prompt. `keep`: guidance and prompt drop leave it as it is (headers)."""

    ids: Int[np.ndarray, " n"]
    keep: bool = False


@dataclasses.dataclass(frozen=True)
class VisionTokens:
    """An image seen through the vision tower, as `num_tokens` of its features.

    Attributes:
        index: which feature of this image each token is; by default one after another.
        num_features: features of this image, after which come those of the row's next image;
            by default as many as tokens.

    Raises:
        ValueError: `index` has not one feature of the image for each token.
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

    @property
    def features(self) -> Int[np.ndarray, " n"]:
        return np.arange(self.num_tokens) if self.index is None else self.index

    @property
    def feature_count(self) -> int:
        return self.num_tokens if self.num_features is None else self.num_features


@dataclasses.dataclass(frozen=True)
class Source:
    """The cells of a source image, in the generation stream."""

    codes: Int[np.ndarray, "n g"]


@dataclasses.dataclass(frozen=True)
class LearnedText:
    """Text that training on whole sequences predicts (`lavida_o.objective`); nothing drops it."""

    ids: Int[np.ndarray, " n"]


@dataclasses.dataclass(frozen=True)
class Blank:
    """Tokens whose embedding is zeros: how the released code pads rows on the right.

    They are attended to like any text, and the prompt drop makes text masks of them.
    """

    num_tokens: int


@dataclasses.dataclass(frozen=True)
class Response:
    """Where the response stands; its tokens are laid out by training or by the sampler."""

    num_tokens: int


Part = Text | VisionTokens | Source | LearnedText | Blank | Response


def num_tokens(part: Part) -> int:
    """Returns how many positions of the sequence a part takes."""
    match part:
        case Text() | LearnedText():
            return len(part.ids)
        case Source():
            return len(part.codes)
    return part.num_tokens


def prompt_tokens(parts: Iterable[Part]) -> tuple[int, int]:
    """Returns how many tokens of a prompt are text, and how many stand for images."""
    asked = [part for part in parts if not isinstance(part, Response)]
    tokens = [(num_tokens(part), isinstance(part, VisionTokens | Source)) for part in asked]
    image = sum(count for count, is_image in tokens if is_image)
    return sum(count for count, _ in tokens) - image, image


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """One row of prompt, laid out: what is in block 0, and where the response goes.

    Attributes:
        ids: text ids of the understanding tokens (vision tokens hold the text mask id).
        feature: index of the vision feature that replaces the embedding, or `NO_FEATURE`, or
            `NO_EMBEDDING`.
        position: positions of the understanding tokens.
        is_answer: which understanding tokens are of a `LearnedText`.
        codes: codes of the source cells.
        cell: raster index of the source cells.
        source_position: positions of the source cells.
        response_position: position of the first response token.
        length: tokens of the whole sequence with prompt, response and what follows it; registers
            have the positions after it (Sec. 7.2).
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
) -> PromptRow:
    """Lays a prompt out, with the parts that guidance or training drops replaced by text masks.

    Positions are those of the full sequence whatever is dropped. A dropped text or vision token
    becomes a text mask at its position; a dropped source cell becomes a text mask at its position
    *in the understanding stream* (spec Sec. 7.6). The one function for training and sampling.

    Args:
        parts: the sequence in order; exactly one `Response`.
        drop_prompt: drop text (without `keep`), vision and blanks.
        drop_source: drop the source cells.
        drop_kept: drop the text with `keep` too.
        drop_vision: drop vision or not, whatever `drop_prompt` says.

    Raises:
        ValueError: there is not exactly one `Response`.
    """
    drop_vision = drop_prompt if drop_vision is None else drop_vision
    starts = [0, *itertools.accumulate(map(num_tokens, parts))]
    length, spans = starts[-1], [slice(*ends) for ends in itertools.pairwise(starts)]
    responses = [starts[i] for i, part in enumerate(parts) if isinstance(part, Response)]
    if len(responses) != 1:
        got = "a second one" if responses else "none"
        raise ValueError(f"a prompt holds exactly one Response, got {got}.")
    ids = np.full(length, text_mask_id, np.int32)
    feature, cell = np.full(length, NO_FEATURE, np.int32), np.full(length, NO_CELL, np.int32)
    understands, is_answer = np.ones(length, bool), np.zeros(length, bool)
    codes, features = [np.zeros((0, codes_per_token), np.int32)], 0
    for part, at in zip(parts, spans, strict=True):
        match part:
            case Response():
                understands[at] = False
            case Source() if not drop_source:
                understands[at], cell[at] = False, np.arange(len(part.codes))
                codes.append(part.codes)
            case Text() if not (drop_kept if part.keep else drop_prompt):
                ids[at] = part.ids
            case LearnedText():
                ids[at], is_answer[at] = part.ids, True
            case VisionTokens():
                if not drop_vision:
                    feature[at] = features + part.features
                features += part.feature_count
            case Blank() if not drop_prompt:
                feature[at] = NO_EMBEDDING
    position, source_position = np.flatnonzero(understands), np.flatnonzero(cell != NO_CELL)
    return PromptRow(
        ids[position],
        feature[position],
        position.astype(np.int32),
        is_answer[position],
        np.concatenate(codes, dtype=np.int32, casting="same_kind"),
        cell[source_position],
        source_position.astype(np.int32),
        responses[0],
        length,
    )


def cells_from_codes(codes, codes_side: int):
    """Groups a raster grid of codes [b y x] into cells [b l g], raster order inside and out."""
    return einops.rearrange(codes, "b (y p) (x q) -> b (y x) (p q)", p=codes_side, q=codes_side)


def codes_from_cells(cells, height: int, codes_side: int):
    """Spreads cells [b l g] of an image `height` cells high back over a grid of codes [b y x]."""
    return einops.rearrange(
        cells, "b (y x) (p q) -> b (y p) (x q)", y=height, p=codes_side, q=codes_side
    )


def stack_images(
    images: list[UInt8[np.ndarray, "h w 3"] | None],
) -> UInt8[np.ndarray, "b h w 3"] | None:
    """Stacks the images of a batch; a row without one gets a blank that no token looks at."""
    stacked = stack_views([() if image is None else (image[None],) for image in images])
    return None if stacked is None else np.asarray(stacked[:, 0])


def stack_views(rows: list[tuple[Views, ...]]) -> SeenBatch | None:
    """Stacks the views of each row's images, filled up with blanks that no token looks at."""
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
    """Returns the features of a row as `Denoiser.see` numbers them for stacked views.

    A `PromptRow` counts on from image to image, a newline after each; `see` has the features
    of all views and one newline after them.

    Args:
        feature: of each token, `PromptRow.feature`.
        views: how many views each image of the row has.
        most: views of a row of the batch, blanks included.
        per_view: features of a view.
        newline: whether there are newlines.
        before: views of the row of the batch that are of other examples and come first.
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
