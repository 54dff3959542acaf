# SPDX-License-Identifier: Apache-2.0
"""A code that all cells of an image share: its registers carry it (docs/method.md).

Cells of one step are drawn independently of each other, so they cannot agree on what the prompt
leaves open. A style code is a few discrete values, a group of them for each part of the image,
drawn once for an image before its first step. What they add to the embedding of every register is
seen by all cells of all steps; masked cells carry the values of their own part too. Clean cells
never see either, so neither the cache nor its exactness depends on the code.

Two distributions of the code come from one pass of the denoiser, in which registers are queries:
the prior of those that see the prompt, the posterior of those that see a part of the image too.
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
NOISE = 0.3  # of the mean variance: added to the variances that whitening divides by
EPSILON = 1e-6


class StyleCode(nnx.Module):
    """The parameters of a code: what values add to registers, the queries, and the heads."""

    def __init__(self, settings: config.Model, *, rngs: nnx.Rngs):
        parts, each, values = settings.style_parts, settings.style_groups, settings.style_values
        groups, width = parts * each, settings.generation_width

        def table(*shape):
            return nnx.Param(jax.random.normal(rngs.params(), (*shape, width)))

        # Those of a part are together as large as the masked cell that they are added to.
        self.values = nnx.Param(table(groups, values)[...] * each**-0.5)
        self.register_queries = table(parts)
        # Of what queries see: measured when a run adds the code (`training/style.py`), not trained.
        self.seen_mean = nnx.Param(jnp.zeros(width))
        self.seen_whitening = nnx.Param(jnp.eye(width))
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
        count = settings.style_parts
        each = jnp.einsum("bnc,nce->bne", code, self.values[...])
        values = each.reshape(len(each), count, -1, each.shape[-1]).sum(axis=2)  # of parts
        of_cells = jnp.take_along_axis(values, part_of(settings, stream.index)[..., None], axis=1)
        is_register = stream.tokens[..., :1] == settings.image_register_id
        is_masked = (stream.tokens == settings.image_mask_id).any(axis=-1, keepdims=True)
        of_registers = values.sum(axis=1, keepdims=True) * count**-0.5
        return jnp.where(is_register, of_registers, jnp.where(is_masked, of_cells, 0))

    def of_queries(self, tokens: int) -> Float[Array, "s e"]:
        """Returns what is added to the embeddings of the stream of `queries`; cells get zeros."""
        own = jnp.concatenate([self.register_queries[...]] * 2)[:tokens]  # of prior and posterior
        return jnp.pad(own, ((0, tokens - len(own)), (0, 0)))

    def posterior_logits(
        self, of_prior: Float[Array, "b p e"], of_posterior: Float[Array, "b p e"]
    ) -> Float[Array, "b n c"]:
        """Returns the logits of each group, from what the query of its part sees of the image.

        Whitened, all that images differ in weighs alike: otherwise nine tenths of a code would say
        the background. So a posterior knows much from its first step on, and denoisers learn to
        use its codes rather than to ignore them.

        Args:
            of_prior: states of the queries that see the prompt.
            of_posterior: of those that see the image too.
        """
        mean, whitening = jax.lax.stop_gradient((self.seen_mean[...], self.seen_whitening[...]))
        white = (seen(of_prior, of_posterior) - mean[None, None]) @ whitening
        states = self._for_groups(SHARPNESS * white)
        return jnp.einsum("bne,nce->bnc", states, self.posterior_heads[...])

    def prior_logits(
        self, hidden: Float[Array, "b p e"], code: Float[Array, "b n c"]
    ) -> Float[Array, "b n c"]:
        """Returns the logits of each group given the values of the groups before it.

        Args:
            hidden: states of the prior's queries.
            code: one-hot; a group's own value and later ones are not looked at.
        """
        each = jnp.einsum("bnc,nce->bne", code, self.earlier_values[...]).astype(hidden.dtype)
        before = jnp.cumsum(each, axis=1) - each
        states = self._prior_states(self._for_groups(hidden) + before)
        return jnp.einsum("bne,nce->bnc", states, self.prior_heads[...])

    def drawn(
        self, hidden: Float[Array, "b p e"], key: Key[Array, " b"], fixed: Int[AnyArray, "b _n"]
    ) -> Float[Array, "b n c"]:
        """Returns a code for each row, one-hot, drawn from the prior group by group.

        Args:
            hidden: states of the prior's queries.
            key: of the noise of each row.
            fixed: values that are not drawn, or one for all groups; -1: to be drawn.
        """
        groups, values = self.values.shape[:2]
        noise = jax.vmap(lambda one: jax.random.gumbel(one, (groups, values)))(key)

        def draw(before, group):
            state, noise, fixed, heads, added = group
            scores = self._prior_states(state + before) @ heads.T + noise
            value = jnp.where(fixed < 0, scores.argmax(axis=-1), fixed)
            return before + added[value].astype(before.dtype), jax.nn.one_hot(value, values)

        fixed = jnp.broadcast_to(jnp.asarray(fixed), noise.shape[:2])
        of_rows = self._for_groups(hidden), noise, fixed
        groups_first = [jnp.swapaxes(x, 0, 1) for x in of_rows]
        tables = self.prior_heads[...], self.earlier_values[...]
        _, code = jax.lax.scan(draw, jnp.zeros_like(hidden[:, 0]), (*groups_first, *tables))
        return jnp.swapaxes(code, 0, 1)

    def _prior_states(self, hidden: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        return nnx.gelu(self.prior_hidden(hidden)).astype(jnp.float32)

    def _for_groups(self, states: Float[Array, "b p e"]) -> Float[Array, "b n e"]:
        """Returns the state of its part for each group."""
        return jnp.repeat(states, self.values.shape[0] // states.shape[1], axis=1)


def seen(
    of_prior: Float[Array, "b p e"], of_posterior: Float[Array, "b p e"]
) -> Float[Array, "b p e"]:
    """Returns what queries gain by seeing their parts of the image, with a mean square of 1.

    States of different images are nearly the same; what sets a query that sees an image apart from
    the same query without it is not.
    """
    gain = (of_posterior - of_prior).astype(jnp.float32)
    return gain * jax.lax.rsqrt(jnp.square(gain).mean(axis=-1, keepdims=True) + EPSILON)


def whitening_of(covariance: Float[Array, "e e"]) -> Float[Array, "e e"]:
    """Returns the symmetric matrix that gives what queries see about the same variance everywhere.

    It is 1 on average. Directions of small variance get less, as much of it is noise.
    """
    sizes, directions = jnp.linalg.eigh(covariance)
    scales = jax.lax.rsqrt(sizes + NOISE * sizes.mean())
    scales *= jax.lax.rsqrt((sizes * scales**2).mean())
    return jnp.einsum("ij,j,kj->ik", directions, scales, directions, precision="highest")


def queries(
    settings: config.Model, start: Int[AnyArray, " b"], cells: Stream | None = None
) -> Stream:
    """Returns the generation stream of a pass that asks for codes.

    First come the queries of the prior; if there are cells, those of the posterior follow, and then
    the cells: a part's query sees its own, and these see each other.

    Args:
        start: the position of the first register of each row.
        cells: the clean cells of the image, with `PAD_BLOCK` where there are none.
    """
    parts, b = settings.style_parts, start.shape[0]
    count = parts if cells is None else 2 * parts
    block = jnp.broadcast_to(GIVEN_BLOCK + jnp.arange(count), (b, count))  # none sees another
    position = jnp.asarray(start)[:, None] + (jnp.arange(count) % parts)[None]
    ids = jnp.full((b, count, settings.codes_per_token), settings.image_register_id)
    index = jnp.full((b, count), NO_CELL)
    if cells is not None:
        part = GIVEN_BLOCK + parts + part_of(settings, cells.index)
        part = jnp.where(cells.tags.block == PAD_BLOCK, PAD_BLOCK, part)
        ids = jnp.concatenate([ids, cells.tokens], axis=1)
        index = jnp.concatenate([index, cells.index], axis=1)
        position = jnp.concatenate([position, cells.tags.position], axis=1)
        block = jnp.concatenate([block, part], axis=1)
    return Stream(ids, index, make_tags(position, block, PROMPT_BLOCK))


def part_of(settings: config.Model, cell: Int[AnyArray, "..."]) -> Int[Array, "..."]:
    """Returns the part of the image that a cell lies in.

    The parts are in raster order, and as square as their number allows: six are two rows of three.

    Args:
        cell: its index in raster order, in an image of the largest size; `NO_CELL` lies in the
            first part.
    """
    (down, across), side = settings.parts_down_and_across, settings.grid_size
    row, column = jnp.divmod(jnp.maximum(cell, 0), side)
    return row * down // side * across + column * across // side
