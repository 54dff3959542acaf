# SPDX-License-Identifier: Apache-2.0
"""A code that all cells of an image share: its registers carry it (docs/method.md).

Cells of one step are drawn independently of each other, so they cannot agree on what the prompt
leaves open. A style code is a few discrete values, one for each part of the image, drawn once for
an image before its first step. What they add to the embedding of every register is seen by all
cells of all steps; masked cells carry the value of their own part too. Clean cells never see
either, so neither the cache nor its exactness depends on the code.

Two distributions of the code come from one pass of the denoiser, in which registers are queries:
the prior of those that see the prompt, the posterior of those that see a part of the image too.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from sparse_lavida_jax import config
from sparse_lavida_jax.models.layers import Linear
from sparse_lavida_jax.tags import GIVEN_BLOCK, NO_CELL, PROMPT_BLOCK, Stream, make_tags
from sparse_lavida_jax.visibility import PAD_BLOCK, AnyArray

SHARPNESS = 3.0  # standard deviation of a posterior's first logits
EPSILON = 1e-6


class StyleCode(nnx.Module):
    """The parameters of a code: what values add to registers, the queries, and the heads."""

    def __init__(self, settings: config.Model, *, rngs: nnx.Rngs):
        groups, values = settings.style_groups, settings.style_values
        width = settings.generation_width

        def table(*shape):
            return nnx.Param(jax.random.normal(rngs.params(), (*shape, width)))

        # Together as large as the register that they are added to.
        self.values = nnx.Param(table(groups, values)[...] * groups**-0.5)
        self.register_queries = table(groups)
        self.posterior_heads = nnx.Param(table(groups, values)[...] * width**-0.5)
        # The prior is drawn group by group: a group sees the values of the groups before it.
        self.earlier_values = table(groups, values)
        self.prior_hidden = Linear(width, width, rngs=rngs)
        self.prior_heads = nnx.Param(table(groups, values)[...] * width**-0.5)

    def carried(
        self, settings: config.Model, code: Float[Array, "b n c"], stream: Stream
    ) -> Float[Array, "b s e"]:
        """Returns what a code adds to registers and masked cells, and zeros for clean cells.

        Args:
            code: one-hot in each group; zeros add nothing.
        """
        values = jnp.einsum("bnc,nce->bne", code, self.values[...])
        of_cells = jnp.take_along_axis(values, part_of(settings, stream.index)[..., None], axis=1)
        is_register = stream.tokens[..., :1] == settings.image_register_id
        is_masked = (stream.tokens == settings.image_mask_id).any(axis=-1, keepdims=True)
        of_registers = values.sum(axis=1, keepdims=True)
        return jnp.where(is_register, of_registers, jnp.where(is_masked, of_cells, 0))

    def of_queries(self, tokens: int) -> Float[Array, "s e"]:
        """Returns what is added to the embeddings of the stream of `queries`; cells get zeros."""
        own = jnp.concatenate([self.register_queries[...]] * 2)[:tokens]  # of prior and posterior
        return jnp.pad(own, ((0, tokens - len(own)), (0, 0)))

    def posterior_logits(
        self, of_prior: Float[Array, "b n e"], of_posterior: Float[Array, "b n e"]
    ) -> Float[Array, "b n c"]:
        """Returns the logits of each group, from what its query learns by seeing the image.

        States of different images are nearly the same; what sets a query that sees an image apart
        from the same query without it is not. So a posterior knows much from its first step on, and
        denoisers learn to use its codes rather than to ignore them.

        Args:
            of_prior: states of the queries that see the prompt.
            of_posterior: of those that see the image too.
        """
        seen = (of_posterior - of_prior).astype(jnp.float32)
        seen *= SHARPNESS * jax.lax.rsqrt(jnp.square(seen).mean(axis=-1, keepdims=True) + EPSILON)
        return jnp.einsum("bne,nce->bnc", seen, self.posterior_heads[...])

    def prior_logits(
        self, hidden: Float[Array, "b n e"], code: Float[Array, "b n c"]
    ) -> Float[Array, "b n c"]:
        """Returns the logits of each group given the values of the groups before it.

        Args:
            hidden: states of the prior's queries.
            code: one-hot; a group's own value and later ones are not looked at.
        """
        each = jnp.einsum("bnc,nce->bne", code, self.earlier_values[...]).astype(hidden.dtype)
        before = jnp.cumsum(each, axis=1) - each
        states = nnx.gelu(self.prior_hidden(hidden + before)).astype(jnp.float32)
        return jnp.einsum("bne,nce->bnc", states, self.prior_heads[...])

    def drawn(
        self, hidden: Float[Array, "b n e"], key: Key[Array, " b"], fixed: Int[AnyArray, "b n"]
    ) -> Float[Array, "b n c"]:
        """Returns a code for each row, one-hot, drawn from the prior group by group.

        Args:
            hidden: states of the prior's queries.
            key: of the noise of each row.
            fixed: values that are not drawn; -1: to be drawn.
        """
        groups, values = self.values.shape[:2]

        def draw(key, shape=(groups, values)):
            return jax.random.gumbel(key, shape)

        noise, code = jax.vmap(draw)(key), jnp.zeros((hidden.shape[0], groups, values))
        for group in range(groups):
            scores = self.prior_logits(hidden, code)[:, group] + noise[:, group]
            value = jnp.where(fixed[:, group] < 0, scores.argmax(axis=-1), fixed[:, group])
            code = code.at[:, group].set(jax.nn.one_hot(value, values))
        return code


def queries(
    settings: config.Model, start: Int[AnyArray, " b"], cells: Stream | None = None
) -> Stream:
    """Returns the generation stream of a pass that asks for codes.

    First come the queries of the prior; if there are cells, those of the posterior follow, and then
    the cells: a group's query sees those of its own part, and these see each other.

    Args:
        start: the position of the first register of each row.
        cells: the clean cells of the image, with `PAD_BLOCK` where there are none.
    """
    groups, b = settings.style_groups, start.shape[0]
    count = groups if cells is None else 2 * groups
    block = jnp.broadcast_to(GIVEN_BLOCK + jnp.arange(count), (b, count))  # none sees another
    position = jnp.asarray(start)[:, None] + (jnp.arange(count) % groups)[None]
    ids = jnp.full((b, count, settings.codes_per_token), settings.image_register_id)
    index = jnp.full((b, count), NO_CELL)
    if cells is not None:
        part = GIVEN_BLOCK + groups + part_of(settings, cells.index)
        part = jnp.where(cells.tags.block == PAD_BLOCK, PAD_BLOCK, part)
        ids = jnp.concatenate([ids, cells.tokens], axis=1)
        index = jnp.concatenate([index, cells.index], axis=1)
        position = jnp.concatenate([position, cells.tags.position], axis=1)
        block = jnp.concatenate([block, part], axis=1)
    return Stream(ids, index, make_tags(position, block, PROMPT_BLOCK))


def part_of(settings: config.Model, cell: Int[AnyArray, "..."]) -> Int[Array, "..."]:
    """Returns the part of the image that a cell lies in: there are as many parts as groups.

    The parts are in raster order, and as square as their number allows: six are two rows of three.

    Args:
        cell: its index in raster order; `NO_CELL` lies in the first part.
    """
    groups, side = settings.style_groups, settings.grid_size
    down = max(one for one in range(1, math.isqrt(groups) + 1) if groups % one == 0)
    row, column = jnp.divmod(jnp.maximum(cell, 0), side)
    across = groups // down
    return row * down // side * across + column * across // side
