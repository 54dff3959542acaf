# SPDX-License-Identifier: Apache-2.0
"""The check for copies of the cache finds actual copies, and nothing else."""

import jax
import jax.numpy as jnp
import phase_programs

SHAPE = (3, 2, 8, 4)
SHAPES = frozenset({SHAPE, SHAPE[1:], (1, *SHAPE[1:])})


def optimised(step):
    """A loop over layers that carries a cache and puts 1 into a slot of it."""

    def run(cache):
        def body(i, cache):
            total, cache = step(i, cache)
            new = jnp.full((1, 2, 1, 4), total)
            return jax.lax.dynamic_update_slice(cache, new, (i, 0, i, 0))

        return jax.lax.fori_loop(0, 3, body, cache)

    given = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    return jax.jit(run, donate_argnums=0).lower(given).compile().as_text()


def test_a_cache_that_is_written_in_place_is_not_copied():
    hlo = optimised(lambda i, cache: (1.0 + i, cache))
    assert phase_programs.in_place(hlo, SHAPES)
    assert not phase_programs.copies(hlo, SHAPES)


def test_a_cache_that_is_made_again_every_step_is_found():
    hlo = optimised(lambda i, cache: (1.0, jnp.flip(cache, axis=2)))
    assert phase_programs.copies(hlo, SHAPES)


def test_a_layer_that_is_taken_out_of_the_cache_is_found():
    def read(i, cache):
        layer = jax.lax.dynamic_index_in_dim(cache, i, keepdims=False)
        return jnp.sort(layer, axis=1).max(), cache

    assert phase_programs.copies(optimised(read), SHAPES)


def test_what_happens_outside_loops_does_not_count():
    def once(cache):
        return jnp.flip(cache, axis=2) + 1

    hlo = jax.jit(once).lower(jax.ShapeDtypeStruct(SHAPE, jnp.float32)).compile().as_text()
    assert not phase_programs.copies(hlo, SHAPES)
