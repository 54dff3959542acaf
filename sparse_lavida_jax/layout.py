# SPDX-License-Identifier: Apache-2.0
"""Where tokens stand and what they may see: positions, blocks and horizons.

Only this file makes blocks and horizons. Every token carries three integers: `position` (for the
rotary embedding), `block` (the paper's A[i]) and `horizon` (the last block it may look back to).
Order inside a sequence carries no meaning, so tokens may be sorted, dropped or appended freely.
Two lemmas make the method exact; both follow from `visibility.visible` and are tested for every
assignment of up to six tokens:

* **Truncation.** For a masked block k and M clean blocks, the set {blocks <= M} + {block k} is
  closed: no member sees outside it. Deleting every other masked block changes nothing for block
  k, at any depth. So the sampler may leave tokens out, and training may hold several rival masked
  blocks at once and need not hold all masked tokens.
* **Caching.** A prompt or clean token of block j sees only blocks <= j, so its keys and values
  are final once computed. So tokens decoded in one step may be stored in the next, and the cache
  is exact.

Examples that share a row (`segment`) never see each other: the tokens of one of them are closed
too, so what it computes is what it would compute in a row of its own.

The functions on NumPy arrays run on the host (grain workers); `TokenLayout` is what the model
takes, and it takes no mask.
"""

import dataclasses
from typing import Literal

import einops
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON, AnyArray

PROMPT_BLOCK = 0
GIVEN_BLOCK = 1  # known cells, a prefix, template words: clean before the first step
NO_FEATURE = -1  # an understanding token that is text
NO_EMBEDDING = -2  # an understanding token whose embedding is zeros (`Blank`)
NO_CELL = -1  # a generation token that is no cell of an image (registers, padding)

# What the vision tower sees of an image: bytes, or numbers in [-1, 1] that it takes as they are.
# Of a batch, one image a row or the views of its images.
Kind = Literal["text", "image"]
Views = UInt8[np.ndarray, "_n h w 3"] | Float[np.ndarray, "_n h w 3"]
SeenBatch = UInt8[AnyArray, "b *n h w 3"] | Float[AnyArray, "b *n h w 3"]


@flax.struct.dataclass
class TokenLayout:
    """Tags of the tokens of one stream.

    Attributes:
        position: absolute index in the whole un-truncated sequence of the row.
        block: 0 for the prompt, the step that decoded it for a clean token, the step that will
            decode it for a masked token or register (in training any number behind the clean ones
            may stand for it), `PAD_BLOCK` for padding.
        horizon: last block the token may look back to, `PAD_HORIZON` for padding.
        segment: which example of the row a token is of, where several share a row; else None.
    """

    position: Int[AnyArray, "b s"]
    block: Int[AnyArray, "b s"]
    horizon: Int[AnyArray, "b s"]
    segment: Int[AnyArray, "b s"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.block.shape


def make_layout(
    position: Int[AnyArray, "b s"],
    block: Int[AnyArray, "b s"],
    last_clean: Int[AnyArray, "..."] | int,
    segment: Int[AnyArray, "b s"] | None = None,
) -> TokenLayout:
    """Returns the layout of tokens whose last visible clean block is `last_clean` (M).

    `last_clean` is a number, or anything that broadcasts to [b s] (each response of a sequence
    may have its own). NumPy arrays give a layout of NumPy arrays: the host lays rows out without
    touching a device.

    Args:
        segment: the example of each token, where several share a row.
    """
    xp = np if isinstance(block, np.ndarray) else jnp
    padding = block == PAD_BLOCK
    horizon = xp.where(padding, PAD_HORIZON, xp.minimum(block, last_clean))
    position = xp.where(padding, 0, position)
    position, block, horizon = (
        xp.asarray(tag, dtype=np.int32) for tag in (position, block, horizon)
    )
    segment = None if segment is None else xp.asarray(segment, dtype=np.int32)
    return TokenLayout(position, block, horizon, segment)


def without_blocks(layout: TokenLayout) -> TokenLayout:
    """Returns the same tokens all in block 0: full bidirectional attention, as LaViDa-O has it."""
    xp = np if isinstance(layout.block, np.ndarray) else jnp
    block = xp.where(layout.block == PAD_BLOCK, PAD_BLOCK, PROMPT_BLOCK)
    return make_layout(layout.position, block, PROMPT_BLOCK, layout.segment)


@flax.struct.dataclass
class Stream:
    """Tokens of one branch in one forward pass.

    Attributes:
        tokens: text ids [b s] of the understanding stream, codes [b s g] of the generation stream.
        index: the vision feature that replaces a text embedding, or `NO_FEATURE`, or
            `NO_EMBEDDING`; the raster index of a cell, or `NO_CELL`.
        layout: tags.
    """

    tokens: Int[AnyArray, "b s *g"]
    index: Int[AnyArray, "b s"]
    layout: TokenLayout


def concatenate(*layouts: TokenLayout) -> TokenLayout:
    """Returns the layouts one behind the other along the token axis."""
    return jax.tree.map(lambda *tags: jnp.concatenate(tags, axis=1), *layouts)


def stack_images(
    images: list[UInt8[np.ndarray, "h w 3"] | None],
) -> UInt8[np.ndarray, "b h w 3"] | None:
    """Stacks the images of a batch; a row without one gets a blank that no token looks at."""
    shown = [image for image in images if image is not None]
    if not shown:
        return None
    return np.stack([np.zeros_like(shown[0]) if p is None else p for p in images])


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
) -> Int[np.ndarray, " u"]:
    """Returns the features of a row as `Denoiser.see` numbers them for stacked views.

    A `PromptRow` counts on from image to image, a newline behind each; `see` has the features
    of all views and one newline behind them.

    Args:
        feature: of each token, `PromptRow.feature`.
        views: how many views each image of the row has.
        most: views of a row of the batch, blanks included.
        per_view: features of a view.
        newline: whether there are newlines.
    """
    if not views:
        return feature
    first = np.cumsum([0, *views[:-1]])
    start = first * per_view + newline * np.arange(len(views))
    image = np.maximum(np.searchsorted(start, feature, side="right") - 1, 0)
    inside = feature - start[image]
    is_newline = inside == np.asarray(views)[image] * per_view
    moved = np.where(is_newline, most * per_view, first[image] * per_view + inside)
    return np.where(feature < 0, feature, moved)


# ---------------------------------------------------------------------------------------------
# Rows: a sequence laid out on the host.


@dataclasses.dataclass(frozen=True)
class Text:
    """Text of the prompt. `keep`: guidance and prompt drop leave it as it is (headers)."""

    ids: Int[np.ndarray, " n"]
    keep: bool = False


@dataclasses.dataclass(frozen=True)
class Vision:
    """An image seen through the vision tower, as `num_tokens` of its features.

    Attributes:
        index: which feature of this image each token is; by default one after another.
        num_features: features of this image, behind which those of the row's next image
            stand; by default as many as tokens.

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
class Answer:
    """Text that training on whole sequences predicts (`diffusion.Sequence`); nothing drops it."""

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


Part = Text | Vision | Source | Answer | Blank | Response


def num_tokens(part: Part) -> int:
    """Returns how many positions of the sequence a part takes."""
    match part:
        case Text() | Answer():
            return len(part.ids)
        case Source():
            return len(part.codes)
    return part.num_tokens


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """One row of prompt, laid out: what is in block 0, and where the response goes.

    Attributes:
        ids: text ids of the understanding tokens (vision tokens hold the text mask id).
        feature: index of the vision feature that replaces the embedding, or `NO_FEATURE`, or
            `NO_EMBEDDING`.
        position: positions of the understanding tokens.
        is_answer: which understanding tokens are of an `Answer`.
        codes: codes of the source cells.
        cell: raster index of the source cells.
        source_position: positions of the source cells.
        response_position: position of the first response token.
        length: tokens of the whole sequence with prompt, response and what follows it; registers
            have the positions behind it (Sec. 7.2).
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
    ids, feature, position, is_answer = [], [], [], []
    codes, cells, source_position = [], [], []
    response_position, start, features = None, 0, 0

    def understand(
        part_ids: AnyArray | int, part_feature: AnyArray | int = NO_FEATURE, *, answer: bool = False
    ):
        ids.append(np.broadcast_to(part_ids, n))
        feature.append(np.broadcast_to(part_feature, n))
        position.append(start + np.arange(n))
        is_answer.append(np.full(n, answer))

    for part in parts:
        n = num_tokens(part)
        match part:
            case Text():
                dropped = drop_kept if part.keep else drop_prompt
                understand(text_mask_id if dropped else part.ids)
            case Vision():
                index = features + part.features
                understand(text_mask_id, NO_FEATURE if drop_vision else index)
                features += part.feature_count
            case Answer():
                understand(part.ids, answer=True)
            case Blank():
                understand(text_mask_id, NO_FEATURE if drop_prompt else NO_EMBEDDING)
            case Source() if drop_source:
                understand(text_mask_id)
            case Source():
                codes.append(np.asarray(part.codes))
                cells.append(np.arange(n))
                source_position.append(start + np.arange(n))
            case Response():
                if response_position is not None:
                    raise ValueError("a prompt holds exactly one Response, got a second one.")
                response_position = start
        start += n
    if response_position is None:
        raise ValueError("a prompt holds exactly one Response, got none.")

    def join(arrays, shape=(0,)):
        return np.concatenate([np.zeros(shape, np.int32), *arrays]).astype(np.int32)

    return PromptRow(
        join(ids),
        join(feature),
        join(position),
        join(is_answer).astype(bool),
        join(codes, (0, codes_per_token)),
        join(cells),
        join(source_position),
        response_position,
        start,
    )


def cells_from_codes(codes, codes_side: int):
    """Groups a raster grid of codes [b y x] into cells [b l g], raster order inside and out."""
    return einops.rearrange(codes, "b (y p) (x q) -> b (y x) (p q)", p=codes_side, q=codes_side)


def codes_from_cells(cells, height: int, codes_side: int):
    """Spreads cells [b l g] of an image `height` cells high back over a grid of codes [b y x]."""
    return einops.rearrange(
        cells, "b (y x) (p q) -> b (y p) (x q)", y=height, p=codes_side, q=codes_side
    )


def register_positions(length: int, num_registers: int) -> Int[np.ndarray, " m"]:
    """Returns L..L+m-1: the m positions behind the whole sequence (Sec. 3.1 and 7.2)."""
    return length + np.arange(num_registers, dtype=np.int32)


def sort_by_block(
    block: Int[np.ndarray, " s"], segment: Int[np.ndarray, " s"] | None = None
) -> Int[np.ndarray, " s"]:
    """Returns the stable permutation that sorts by (segment, block), so that kernels skip tiles."""
    return np.lexsort((block,) if segment is None else (block, segment))
