# SPDX-License-Identifier: Apache-2.0
"""Self-distillation through time: one step learns what two steps of the averaged model decode.

For each row that predicts an image, two consecutive steps of its plan are taken. The teacher, the
average of the model so far, decodes the first of them and then, seeing its own draws, the second,
as the sampler does. The student predicts the cells of both in one step, of a plan with half of the
steps, and learns the teacher's distributions (arXiv:2410.21035, here with a step-causal mask).
Without a style code it can learn no more than their marginals; with one, teacher and student have
the same.

All three passes are made of the tokens of the row itself: what a pass does not see is padding.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from sparse_lavida_jax.data.corrupted_rows import Corrupted
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.tags import FIRST_BLOCK, Stream, make_tags
from sparse_lavida_jax.visibility import PAD_BLOCK


@flax.struct.dataclass
class Teaching:
    """What a batch is taught with.

    Attributes:
        seed: of the pair of steps and the teacher's draws of each row.
        share: of each row in the loss of the whole batch.
    """

    seed: Int[Array, " b"]
    share: Float[Array, " b"]


@flax.struct.dataclass
class StepPairs:
    """The tokens of each row's pair of steps.

    Attributes:
        first: the block that the first step of the pair decodes.
        step: the block that each mask or register is to decode; 0 for all other tokens.
        is_mask: which tokens are predicted.
        is_earlier: prompt, given cells, and what earlier steps decoded.
        taught: whether the plan of a row has two steps.
    """

    first: Int[Array, "b 1"]
    step: Int[Array, "b s"]
    is_mask: Bool[Array, "b s"]
    is_earlier: Bool[Array, "b s"]
    taught: Bool[Array, " b"]


def teaching(step: Int[Array, ""], rows: int) -> Teaching:
    """Returns what a training step is taught with, by its number."""
    seed = jax.random.randint(jax.random.fold_in(jax.random.key(1), step), (rows,), 0, 2**31 - 1)
    return Teaching(seed, jnp.full(rows, 1 / rows))


def loss(
    params: Denoiser,
    teacher: Denoiser,
    batch: Corrupted,
    features: Float[Array, "b v e"] | None,
    code: Float[Array, "b n c"] | None,
    given: Teaching,
) -> Float[Array, " b"]:
    """Returns the cross-entropy of teacher and student, in nats a code, of each row."""
    assert batch.generation is not None
    stream, keys = batch.generation, jax.vmap(_keys, out_axes=1)(given.seed)
    pairs = pairs_of(batch, params, keys[0])

    def states(model: Denoiser, own: Stream) -> Float[Array, "b s e"]:
        hidden, _ = model(batch.understanding, own, features, wanted="generation", style=code)
        return hidden["generation"]

    of_first = states(teacher, first_step(stream, pairs))
    drawn = drawn_from(teacher, of_first, keys[1])
    of_second = states(teacher, second_step(stream, pairs, drawn))
    in_first = (pairs.step == pairs.first)[..., None]
    of_teacher = jnp.where(in_first, of_first, of_second)
    drawn = jnp.where(in_first, drawn, drawn_from(teacher, of_second, keys[2]))
    wanted = jax.lax.stop_gradient(jax.nn.softmax(teacher.image_logits(of_teacher, drawn)))
    of_both = states(params, both_steps(stream, pairs))
    found = jax.nn.log_softmax(params.image_logits(of_both, drawn))
    is_own = pairs.is_mask & _in_pair(pairs) & pairs.taught[:, None]
    each = -(wanted * found).sum(axis=-1).mean(axis=-1) * is_own
    return each.sum(axis=1) / jnp.maximum(is_own.sum(axis=1), 1)


def drawn_from(
    model: Denoiser, hidden: Float[Array, "b s e"], keys: Key[Array, " b"]
) -> Int[Array, "b s g"]:
    """Returns codes for all cells, drawn as the sampler draws them."""

    def choose(logits: Float[Array, "b s c"], number: int) -> Int[Array, "b s"]:
        own = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, number)
        return jax.vmap(jax.random.categorical)(own, logits)

    return model.image_head.draw(hidden, choose)


def pairs_of(batch: Corrupted, model: Denoiser, key: Array) -> StepPairs:
    """Returns a pair of steps of each row, drawn from the pairs that its plan consists of."""
    stream, weight = batch.generation, batch.image_weight
    assert stream is not None and weight is not None
    tags, is_real = stream.tags, jnp.asarray(stream.tags.block) != PAD_BLOCK
    is_mask = weight > 0 if weight.ndim == 2 else (weight > 0).any(axis=-1)
    is_register = (stream.tokens[..., 0] == model.settings.image_register_id) & is_real
    step = jnp.where(is_mask | is_register, tags.horizon + 1, 0)
    number = (step.max(axis=1) - FIRST_BLOCK + 1) // 2
    place = jax.vmap(jax.random.uniform)(key) * number
    first = (FIRST_BLOCK + 2 * jnp.minimum(place.astype(int), number - 1))[:, None]
    is_earlier = is_real & (step == 0) & (tags.block < first)
    return StepPairs(first, step, jnp.asarray(is_mask), is_earlier, number > 0)


def first_step(stream: Stream, pairs: StepPairs) -> Stream:
    """Returns the tokens that the teacher's first step sees."""
    now = pairs.step == pairs.first
    block = jnp.where(pairs.is_earlier, stream.tags.block, jnp.where(now, pairs.first, PAD_BLOCK))
    return _with_tags(stream, block, jnp.where(now, pairs.first - 1, block))


def second_step(stream: Stream, pairs: StepPairs, drawn: Int[Array, "b s g"]) -> Stream:
    """Returns the tokens that its second step sees, after it drew the cells of the first."""
    done, now = pairs.is_mask & (pairs.step == pairs.first), pairs.step == pairs.first + 1
    block = jnp.where(now, pairs.first + 1, jnp.where(done, pairs.first, PAD_BLOCK))
    block = jnp.where(pairs.is_earlier, stream.tags.block, block)
    seen = _with_tags(stream, block, jnp.where(now, pairs.first, block))
    tokens = jnp.where(done[..., None], drawn, stream.tokens)
    return Stream(tokens, seen.index, seen.tags)


def both_steps(stream: Stream, pairs: StepPairs) -> Stream:
    """Returns the tokens that the student's step sees: in its plan, earlier pairs are one step."""
    now = (pairs.step == pairs.first) | pairs.is_mask & (pairs.step == pairs.first + 1)
    block = jnp.asarray(stream.tags.block)
    is_first = (block >= FIRST_BLOCK) & ((block - FIRST_BLOCK) % 2 == 0)
    block = jnp.where(pairs.is_earlier, block + is_first, jnp.where(now, pairs.first, PAD_BLOCK))
    return _with_tags(stream, block, jnp.where(now, pairs.first - 1, block))


def _in_pair(pairs: StepPairs) -> Bool[Array, "b s"]:
    return (pairs.step == pairs.first) | (pairs.step == pairs.first + 1)


def _with_tags(stream: Stream, block: Array, last_clean: Array) -> Stream:
    return Stream(stream.tokens, stream.index, make_tags(stream.tags.position, block, last_clean))


def _keys(seed: Int[Array, ""]) -> Key[Array, " n"]:
    """Returns the keys of a row: of its pair of steps, and of the draws of each."""
    return jax.random.split(jax.random.key(seed), 3)
