# SPDX-License-Identifier: Apache-2.0
"""Positions of tokens and what they may see: positions, blocks and horizons.

Only `make_tags` makes horizons. Every token has three integers: `position` (for the rotary
embedding), `block` (the paper's A[i]) and `horizon` (the last block that it may look back to).
The order inside a sequence has no meaning, so tokens may be sorted, dropped or appended freely.
Two lemmas make the method exact; both follow from `visibility.visible` and are tested for every
assignment of up to six tokens:

* **Truncation.** For a masked block k and M clean blocks, the set {blocks <= M} + {block k} is
  closed: no member sees outside it. Deleting all other masked blocks changes nothing for block
  k, at any depth. So the sampler may leave tokens out. Training may put several masked blocks into
  one row, which do not see each other, and may leave other masked tokens out.
* **Caching.** A prompt or clean token of block j sees only blocks <= j, so its keys and values
  are final once computed. So tokens decoded in one step may be stored in the next, and the cache
  is exact.

Examples that share a row (`segment`) never see each other: the tokens of each are closed too, so
the results are the same as in a row of its own.

The functions on NumPy arrays run on the host (worker processes); the model takes a `TokenTags`,
never a mask.
"""

from typing import Literal, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON, AnyArray

T = TypeVar("T")  # a stream, or tags
# The two streams of tokens (paper: branches): text and input images, and the cells of an image.
StreamName = Literal["understanding", "generation"]
STREAMS: tuple[StreamName, ...] = ("understanding", "generation")
StreamNames = Literal["understanding", "generation", "both"]

PROMPT_BLOCK = 0
GIVEN_BLOCK = 1  # known cells, a prefix, words of a template: clean before the first step
# Of decoding, even if nothing is given. The paper counts steps from 1, the code from 0: C_k is what
# step k - 1 decodes, in block k + 1.
FIRST_BLOCK = GIVEN_BLOCK + 1
NO_FEATURE = -1  # an understanding token that is text
NO_EMBEDDING = -2  # an understanding token whose embedding is zeros (`Blank`)
NO_CELL = -1  # a generation token that is not a cell of an image (registers, padding)


@flax.struct.dataclass
class TokenTags:
    """Tags of the tokens of one stream.

    Attributes:
        position: absolute index in the whole untruncated sequence of the row.
        block: 0 for the prompt, `GIVEN_BLOCK` for given tokens, that of its step (from
            `FIRST_BLOCK` on) for a clean, masked or register token; in training, masked blocks have
            any number after the clean ones. `PAD_BLOCK` for padding.
        horizon: last block that the token may look back to, `PAD_HORIZON` for padding.
        segment: the example that each token belongs to, if several share a row; else None.
    """

    position: Int[AnyArray, "b s"]
    block: Int[AnyArray, "b s"]
    horizon: Int[AnyArray, "b s"]
    segment: Int[AnyArray, "b s"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.block.shape


def make_tags(
    position: Int[AnyArray, "b s"],
    block: Int[AnyArray, "b s"],
    last_clean: Int[AnyArray, "..."] | int,
    segment: Int[AnyArray, "b s"] | None = None,
) -> TokenTags:
    """Returns the tags of tokens whose last visible clean block is `last_clean` (M).

    `last_clean` is a number, or anything that broadcasts to [b s] (each response of a sequence
    may have its own). NumPy arrays give tags of NumPy arrays, so the host can lay rows out
    without touching a device.

    Args:
        segment: the example of each token, if several share a row.
    """
    xp = np if isinstance(block, np.ndarray) else jnp
    padding = block == PAD_BLOCK
    horizon = xp.where(padding, PAD_HORIZON, xp.minimum(block, last_clean))
    position = xp.where(padding, 0, position)
    position, block, horizon = (
        xp.asarray(tag, dtype=np.int32) for tag in (position, block, horizon)
    )
    segment = None if segment is None else xp.asarray(segment, dtype=np.int32)
    return TokenTags(position, block, horizon, segment)


def without_blocks(tags: TokenTags) -> TokenTags:
    """Returns the same tokens all in block 0: full bidirectional attention, as in LaViDa-O."""
    xp = np if isinstance(tags.block, np.ndarray) else jnp
    block = xp.where(tags.block == PAD_BLOCK, PAD_BLOCK, PROMPT_BLOCK)
    return make_tags(tags.position, block, PROMPT_BLOCK, tags.segment)


@flax.struct.dataclass
class Stream:
    """Tokens of one branch in one forward pass.

    Attributes:
        tokens: text ids [b s] of the understanding stream, codes [b s g] of the generation stream.
        index: for understanding tokens, the vision feature that replaces the text embedding, or
            `NO_FEATURE` or `NO_EMBEDDING`; for others, the raster index of a cell, or `NO_CELL`.
        tags: of its tokens.
    """

    tokens: Int[AnyArray, "b s *g"]
    index: Int[AnyArray, "b s"]
    tags: TokenTags


def concatenate(*streams: T) -> T:
    """Concatenates streams, or tags, along the token axis."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *streams)
