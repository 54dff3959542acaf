# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy in chunks of tokens has the same value and gradient as all at once."""

import math

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from sparse_lavida_jax.training import loss
from sparse_lavida_jax.training import step as training_step

B, S, E, V = 2, 11, 8, 301


def test_cross_entropy_is_minus_log_softmax_in_loops():
    rng = np.random.default_rng(0)
    logits, target = rng.normal(size=(2, 3, 5)), rng.integers(0, 5, (2, 3))
    weight = np.array([[0.5, 0.0, 2.0], [0.0, 0.0, 1.0]])
    weighted = plain = 0.0
    for b, s in np.ndindex(2, 3):
        nll = np.log(np.exp(logits[b, s]).sum()) - logits[b, s, target[b, s]]
        weighted += weight[b, s] * nll
        plain += nll * (weight[b, s] > 0)
    ours = loss.weighted_cross_entropy(
        jnp.asarray(logits, jnp.bfloat16), jnp.asarray(target), jnp.asarray(weight, jnp.float32)
    )
    assert ours[0].dtype == jnp.float32
    np.testing.assert_allclose(ours, [weighted, plain], rtol=1e-2)
    exact = loss.weighted_cross_entropy(
        jnp.asarray(logits, jnp.float32), jnp.asarray(target), jnp.asarray(weight, jnp.float32)
    )
    np.testing.assert_allclose(exact, [weighted, plain], rtol=1e-5)


def given(dtype=jnp.float32, seed=0, share=0.5):
    """Hidden states, kernel, targets and weights; a share of the weights is not 0."""
    rng = np.random.default_rng(seed)
    weight = rng.uniform(0.2, 3.0, (B, S)) * (rng.random((B, S)) < share)
    return (
        jnp.asarray(rng.normal(size=(B, S, E)), dtype),
        jnp.asarray(rng.normal(size=(E, V)), jnp.float32),
        jnp.asarray(rng.integers(0, V, (B, S)), jnp.int32),
        jnp.asarray(weight, jnp.float32),
    )


def whole(hidden, kernel, target, weight):
    return loss.weighted_cross_entropy(hidden @ kernel.astype(hidden.dtype), target, weight)


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_chunks_give_the_value_and_the_gradient_of_the_whole(chunk, share):
    hidden, kernel, target, weight = given(share=share)

    def value(of):
        def weighted(hidden, kernel):
            weighted, plain = of(hidden, kernel)
            return 3 * weighted, plain

        return jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True)(hidden, kernel)

    (ours, plain), gradients = value(
        lambda h, k: loss.linear_cross_entropy(h, k, target, weight, chunk)
    )
    (expected, expected_plain), wanted = value(lambda h, k: whole(h, k, target, weight))
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    np.testing.assert_allclose(plain, expected_plain, rtol=1e-6)
    for mine, theirs in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-6 * max(1, np.abs(theirs).max()))
    alone = loss.linear_cross_entropy(hidden, kernel, target, weight, chunk)
    np.testing.assert_allclose(alone, (expected / 3, expected_plain), rtol=1e-6)


def test_bfloat16_gradients_are_summed_in_float32():
    hidden, kernel, target, weight = given(jnp.bfloat16)

    def ours(kernel, chunk):
        return loss.linear_cross_entropy(hidden, kernel, target, weight, chunk)[0]

    fine, coarse = (jax.grad(ours)(kernel, chunk) for chunk in (1, 11))
    assert fine.dtype == jnp.float32
    np.testing.assert_allclose(fine, coarse, atol=2e-2 * float(jnp.abs(coarse).max()))


def shapes(jaxpr):
    """Shapes of all results, including inner programs."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from shapes(inner)


def test_the_logits_never_exist_as_a_whole():
    hidden, kernel, target, weight = given()

    def step(hidden, kernel):
        return loss.linear_cross_entropy(hidden, kernel, target, weight, 2)[0]

    program = jax.make_jaxpr(jax.grad(step, argnums=(0, 1)))(hidden, kernel)
    assert max(map(math.prod, shapes(program.jaxpr))) <= E * V  # the gradient of the kernel
    assert E * V < B * S * V


def test_a_frozen_kernel_has_no_gradient():
    hidden, kernel, target, weight = given()

    def of(hidden, kernel):
        return loss.linear_cross_entropy(hidden, kernel, target, weight, 2)[0]

    alone, both = (jax.make_jaxpr(jax.grad(of, n))(hidden, kernel) for n in (0, (0, 1)))
    assert (E, V) in shapes(both.jaxpr)
    assert (E, V) not in shapes(alone.jaxpr)
    np.testing.assert_array_equal(
        jax.grad(of)(hidden, kernel), jax.grad(of, argnums=(0, 1))(hidden, kernel)[0]
    )


def test_the_kernel_is_narrowed_once_and_not_in_every_turn():
    hidden, kernel, target, weight = given(jnp.bfloat16)

    def of(hidden, kernel):
        return loss.linear_cross_entropy(hidden, kernel, target, weight, 2)[0]

    program = jax.make_jaxpr(jax.grad(of, argnums=(0, 1)))(hidden, kernel)

    def narrowed(jaxpr, turns):
        for equation in jaxpr.eqns:
            made = equation.outvars[0].aval
            if equation.primitive.name == "convert_element_type" and made.shape == (E, V):
                yield turns, made.dtype
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from narrowed(inner, turns or equation.primitive.name == "while")

    assert [*narrowed(program.jaxpr, False)] == [(False, jnp.bfloat16)]


# Rows, tokens, width, words, dtype of the kernel; products are in bfloat16.
@pytest.mark.parametrize(
    ("size", "tile"),
    [
        ((16, 200, 96, 518, "bfloat16"), 0),  # configs/scenes.py
        ((1, 1024, 4096, 127_378, "float32"), 0),
        ((1, 2048, 4096, 127_378, "float32"), 1024),
        ((1, 3378, 4096, 127_378, "float32"), 1126),
        ((4, 1024, 4096, 127_378, "float32"), 256),
        ((1, 1024, 4096, 127_378, "bfloat16"), 1024),
        ((1, 4096, 2048, 8192, "float32"), 1024),
        ((128, 600, 512, 518, "float32"), 150),  # a small vocabulary: few turns of many tokens
    ],
)
def test_the_cheaper_loss_is_taken(size, tile):
    rows, tokens, width, words, dtype = size
    kernel = jax.ShapeDtypeStruct((width, words), jnp.dtype(dtype))
    assert loss.tile_of(rows, tokens, kernel, jnp.dtype(jnp.bfloat16)) == tile


def test_rows_are_those_of_a_device():
    kernel, dtype = jax.ShapeDtypeStruct((4096, 127_378), jnp.float32), jnp.dtype(jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2, 32), ("data", "fsdp"))):
        tile = loss.tile_of(128, 1024, kernel, dtype)
    assert tile == loss.tile_of(2, 1024, kernel, dtype) == 512


def test_a_step_takes_the_cheaper_loss(monkeypatch):
    """Both heads in tiles if a few logits are many; the loss is the same."""
    settings = tiny.model_settings(codes_per_token=4)
    model, batch = tiny.denoiser(settings), tiny.batch(["image", "text"], settings)
    value, _ = training_step.loss(model, batch)
    taken = []

    def tiles(hidden, kernel, target, weight, chunk):
        taken.append(chunk)
        return whole(hidden, kernel, target, weight)

    monkeypatch.setattr(training_step, "linear_cross_entropy", tiles)
    monkeypatch.setattr(loss, "FEW_LOGITS", 0)
    monkeypatch.setattr(loss, "TILE_TOKENS", 4)
    monkeypatch.setattr(loss, "TILE_LOGITS", 1)
    np.testing.assert_allclose(training_step.loss(model, batch)[0], value, rtol=1e-6)
    assert len(taken) == 2 and all(0 < chunk <= 4 for chunk in taken)


def test_the_sum_that_is_read_has_no_gradient():
    hidden, kernel, target, weight = given()

    def read(hidden):
        return loss.linear_cross_entropy(hidden, kernel, target, weight, 2)[1]

    np.testing.assert_array_equal(jax.grad(read)(hidden), jnp.zeros_like(hidden))


def test_a_chunk_of_nothing_is_refused():
    with pytest.raises(ValueError, match="chunk=0 is out of range"):
        loss.linear_cross_entropy(*given(), 0)


def test_the_training_loss_is_the_same_in_chunks():
    settings = tiny.model_settings(codes_per_token=4)
    model, batch = tiny.denoiser(settings), tiny.batch(["image", "text"], settings)
    of = jax.value_and_grad(training_step.loss, has_aux=True)
    (value, logged), gradient = tiny.quick_jit(of)(model, batch)
    (chunked, same), pulled = tiny.quick_jit(lambda *given: of(*given, chunk=3))(model, batch)
    np.testing.assert_allclose(chunked, value, rtol=1e-6)
    for name, number in logged.items():
        np.testing.assert_allclose(same[name], number, rtol=1e-6)
    for mine, theirs in zip(*map(jax.tree.leaves, (pulled, gradient)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)
