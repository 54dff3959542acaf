# SPDX-License-Identifier: Apache-2.0
"""A code that all cells of an image share: its registers carry it (docs/method.md).

Cells of one step are drawn independently of each other, so they cannot agree on what the prompt
leaves open. A style code is a few discrete values, drawn once for an image before its first step;
what it adds to the embedding of every register is seen by all cells of all steps. Clean cells never
see registers, so neither the cache nor its exactness depends on the code.

Two distributions of the code come from one pass of the denoiser, in which registers are queries:
the prior of those that see the prompt, the posterior of those that see the image too.
"""

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
PRIOR_BLOCK, POSTERIOR_BLOCK = GIVEN_BLOCK, GIVEN_BLOCK + 1  # neither sees the other


class StyleCode(nnx.Module):
    """The parameters of a code: what values add to registers, the queries, and the heads."""

    def __init__(self, settings: config.Model, *, rngs: nnx.Rngs):
        groups, values = settings.style_groups, settings.style_values
        width = settings.generation_width

        def table(*shape):
            return nnx.Param(jax.random.normal(rngs.params(), (*shape, width)))

        # Together as large as the register that they are added to.
        self.register_values = nnx.Param(table(groups, values)[...] * groups**-0.5)
        self.register_queries = table(groups)
        self.posterior_heads = nnx.Param(table(groups, values)[...] * width**-0.5)
        # The prior is drawn group by group: a group sees the values of the groups before it.
        self.earlier_values = table(groups, values)
        self.prior_hidden = Linear(width, width, rngs=rngs)
        self.prior_heads = nnx.Param(table(groups, values)[...] * width**-0.5)

    def in_registers(self, code: Float[Array, "b n c"]) -> Float[Array, "b e"]:
        """Returns what a code, one-hot in each group, adds to registers; zeros add nothing."""
        return jnp.einsum("bnc,nce->be", code, self.register_values[...])

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
        groups, values = self.register_values.shape[:2]

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
    the cells that it sees.

    Args:
        start: the position of the first register of each row.
        cells: the clean cells of the image, with `PAD_BLOCK` where there are none.
    """
    groups, b = settings.style_groups, start.shape[0]
    blocks = [PRIOR_BLOCK, POSTERIOR_BLOCK][: 1 if cells is None else 2]
    block = jnp.repeat(jnp.array(blocks), groups)[None].repeat(b, axis=0)
    position = jnp.tile(jnp.asarray(start)[:, None] + jnp.arange(groups)[None], (1, len(blocks)))
    ids = jnp.full((*block.shape, settings.codes_per_token), settings.image_register_id)
    index = jnp.full(block.shape, NO_CELL)
    if cells is not None:
        seen = jnp.where(cells.tags.block == PAD_BLOCK, PAD_BLOCK, POSTERIOR_BLOCK)
        ids = jnp.concatenate([ids, cells.tokens], axis=1)
        index = jnp.concatenate([index, cells.index], axis=1)
        position = jnp.concatenate([position, cells.tags.position], axis=1)
        block = jnp.concatenate([block, seen], axis=1)
    return Stream(ids, index, make_tags(position, block, PROMPT_BLOCK))
