# SPDX-License-Identifier: Apache-2.0
"""The text head, and the draw from its logits, in one pass over tiles of the vocabulary.

The logits of all tokens over 127,000 words are the largest array of a text step, written once and
read in turn by guidance, temperature, argmax and softmax. Here a tile of logits is computed, used
for all of these and discarded; only a few numbers per token are kept:

* the largest score (logit / temperature + Gumbel noise), its column and its logit;
* the two largest logits m, m', and, over all but the largest, the sums of exp(x - m) and of
  (x - m) exp(x - m), so that probabilities that round to 1 can still be told apart.

From these follow the draw, its probability, the margin between the two most probable words, and
the entropy.
"""

from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

TILE = 8192  # words
LEAST_VOCABULARY = 16_384  # below it, all logits of a step need less memory than a tile of noise

# (hidden states, columns of the kernel, index of the first of them) -> guided logits.
LogitsOf = Callable[
    [Float[Array, "r b w e"], Float[Array, "e c"], Int[Array, ""] | int], Float[Array, "b w c"]
]
# (logits, index of the tile) -> scores; the largest score is drawn.
ScoreOf = Callable[[Float[Array, "b w c"], Int[Array, ""] | int], Float[Array, "b w c"]]


def tile_of(vocab_size: int) -> int:
    """Returns the words per tile; 0 if a vocabulary is too small to be cut into tiles."""
    return TILE if vocab_size > LEAST_VOCABULARY else 0


@flax.struct.dataclass
class Drawn:
    """What a step needs to know about the logits of each token.

    Attributes:
        token: the one with the largest score; of equal ones, the first.
        logit: of that token.
        first, second: the two largest logits.
        rest: sum of exp(logit - first) over all but the first.
        weighted: sum of (logit - first) exp(logit - first).
        score: of the token.
    """

    token: Int[Array, "b w"]
    logit: Float[Array, "b w"]
    first: Float[Array, "b w"]
    second: Float[Array, "b w"]
    rest: Float[Array, "b w"]
    weighted: Float[Array, "b w"]
    score: Float[Array, "b w"]

    def confidence(self, name: str) -> Float[Array, "b w"]:
        """Returns how sure the model is of each token (`sampling.commit.confidence`)."""
        if name == "margin":
            apart = self.second - self.first
            return jnp.log1p(-jnp.exp(apart)) - jnp.logaddexp(apart, jnp.log(self.rest))
        if name == "entropy":
            return self.weighted / (1 + self.rest) - jnp.log1p(self.rest)
        apart = self.logit - self.first
        others = jnp.where(apart == 0, self.rest, 1 + self.rest - jnp.exp(apart))
        return apart - jnp.log(others)


def draw(
    hidden: Float[Array, "r b w e"],
    kernel: Float[Array, "e v"] | Sequence[Float[Array, "e _c"]],
    *,
    logits_of: LogitsOf,
    score_of: ScoreOf,
    tile: int,
) -> Drawn:
    """Draws a token at every position; [b w v] logits never exist.

    The draw is the same as from all logits at once, with the same scores up to the last bit of a
    product; the sums agree to a relative 1e-5.

    Args:
        kernel: of the head; or its tiles, each a separate array, in order, all but the last with
            `tile` columns: then nothing has to be cut out of a large array.
        tile: columns per tile.
    """
    nothing = jnp.full(hidden.shape[1:3], -jnp.inf)
    zero = jnp.zeros(hidden.shape[1:3])
    drawn = Drawn(zero.astype(jnp.int32), nothing, nothing, nothing, zero, zero, nothing)

    def with_tile(drawn: Drawn, columns: Float[Array, "e c"], number) -> Drawn:
        logits = logits_of(hidden, columns, number * tile)
        return _with_tile(drawn, logits, score_of(logits, number), number * tile)

    if not isinstance(kernel, jax.Array):
        for number, columns in enumerate(kernel):
            # Apart, or XLA for GPUs copies the columns of several tiles together in every step, to
            # multiply them at once.
            hidden = jax.lax.optimization_barrier(hidden)
            drawn = with_tile(drawn, columns, number)
        return drawn
    whole, rest = divmod(kernel.shape[-1], tile)

    def body(drawn, number):
        columns = jax.lax.dynamic_slice_in_dim(kernel, number * tile, tile, axis=1)
        return with_tile(drawn, columns, number), None

    drawn, _ = jax.lax.scan(body, drawn, jnp.arange(whole))
    return with_tile(drawn, kernel[:, -rest:], whole) if rest else drawn


def _with_tile(drawn: Drawn, logits, scores, start) -> Drawn:
    best = jnp.argmax(scores, axis=-1)
    score = jnp.max(scores, axis=-1)
    better = score > drawn.score
    logit = jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0]
    first = jnp.max(logits, axis=-1)
    is_first = jnp.arange(logits.shape[-1])[None, None] == jnp.argmax(logits, axis=-1)[..., None]
    second = jnp.max(jnp.where(is_first, -jnp.inf, logits), axis=-1)
    largest = jnp.maximum(drawn.first, first)

    def moved(top, rest, weighted):
        """Converts sums relative to `top` to `largest`; zero if nothing was allowed."""
        apart = jnp.where(jnp.isinf(top), 0.0, top - largest)
        share = jnp.where(jnp.isinf(top), 0.0, jnp.exp(apart))
        return rest * share, (weighted + apart * rest) * share

    apart = jnp.where(is_first | jnp.isinf(logits), -jnp.inf, logits - first[..., None])
    share = jnp.exp(apart)
    own = jnp.sum(share, axis=-1), jnp.sum(jnp.where(share > 0, apart * share, 0.0), axis=-1)
    # The smaller of the two largest belongs to the rest.
    loser = moved(jnp.minimum(drawn.first, first), jnp.ones_like(first), jnp.zeros_like(first))
    (before, weighted_before), (new, weighted_new) = (
        moved(drawn.first, drawn.rest, drawn.weighted), moved(first, *own)
    )  # fmt: skip
    rest, weighted = before + new + loser[0], weighted_before + weighted_new + loser[1]
    return Drawn(
        token=jnp.where(better, start + best, drawn.token).astype(jnp.int32),
        logit=jnp.where(better, logit, drawn.logit),
        first=largest,
        second=jnp.maximum(jnp.minimum(drawn.first, first), jnp.maximum(drawn.second, second)),
        rest=rest,
        weighted=weighted,
        score=jnp.where(better, score, drawn.score),
    )
