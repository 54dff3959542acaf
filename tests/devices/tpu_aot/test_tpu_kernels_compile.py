# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels compiled for absent TPUs: no hardware, only `libtpu`."""

import importlib.util
import os

import jax
import jax.numpy as jnp
import kernel_programs
import numpy as np
import phase_programs
import pytest

from benchmarks import hlo
from sparse_lavida_jax.kernels import attention, pallas_tpu, shapes
from sparse_lavida_jax.kernels.attention import run_kernel
from sparse_lavida_jax.kernels.common import Shape

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for TPUs needs libtpu: pip install -e '.[aot]'",
)
HEADS, HEAD_DIM = 32, 128


def described(topology: str):
    """A sharding on one chip of a described TPU."""
    from jax.experimental import topologies

    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # else a second one is locked out
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # skips a network query that would fail
    chips = topologies.get_topology_desc(topology, "tpu").devices
    mesh = jax.sharding.Mesh(np.array(chips[:1]), ("one",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def compiled(sharding, length: int, num_tags: int):
    """Forward and backward of a row at the shipped tiles; five tags have segments."""
    sizes = attention.devices.tile_sizes(length, length)
    shape = Shape(HEADS, HEADS, HEAD_DIM, HEAD_DIM**-0.5, sizes)
    return kernel_programs.traced(pallas_tpu, shape, sharding, length, num_tags).lower().compile()


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_forward_and_backward_fit_at_the_shipped_tiles(topology):
    """A row of 4,096 tokens of the full model; running out of vector memory fails to compile."""
    length = 4096
    program = compiled(described(topology), length, num_tags=3)
    text = program.as_text()
    for name in ("step_causal_attention", "step_causal_attention_dq", "step_causal_attention_dkv"):
        assert name in text
    one = length * HEADS * HEAD_DIM * 2
    # Memory is linear in the length: a dense mask or logits would be 16 times as large.
    assert program.memory_analysis().temp_size_in_bytes < 5 * one


@pytest.mark.parametrize("name", ["t2i_1536", "edit_3456", "packed_8192"])
def test_frozen_rows_fit_a_v5e_at_the_shipped_tiles(name):
    """No tile has less than 512 tokens, also for rows that no tile divides."""
    tags = shapes.tags(name)
    length, segments = len(tags.key_block), tags.key_segment is not None
    sizes = attention.devices.tile_sizes(length, length)
    assert min(sizes.queries, sizes.keys) >= 512
    compiled(described("v5e:2x2"), length, num_tags=5 if segments else 3)


def test_a_decode_step_reads_its_layer_of_the_cache_in_place():
    """The keys of a layer are neither copied nor sliced: the kernel gets the stacked cache."""
    layers, slots, queries, sharding = 4, 1536, 256, described("v5p:2x2x1")
    shape = Shape(
        HEADS, HEADS, HEAD_DIM, HEAD_DIM**-0.5, attention.devices.tile_sizes(queries, slots)
    )

    def attend(q, k, v, tags, layer):
        return run_kernel(pallas_tpu, q, k, v, (*tags, None, None), shape, layer)[0]

    def given(size, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(size, dtype, sharding=sharding)

    wide = HEADS * HEAD_DIM
    cache = given((layers, 1, slots, wide))
    tags = tuple(given((1, n), jnp.int32) for n in (queries, queries, slots))
    program = jax.jit(attend).lower(
        given((1, queries, wide)), cache, cache, tags, given((), jnp.int32)
    ).compile()  # fmt: skip
    assert program.memory_analysis().temp_size_in_bytes < slots * wide * 2


@pytest.mark.parametrize("modality", ["image", "text"])
def test_no_loop_of_the_sampler_copies_the_cache_or_a_layer_of_it(modality):
    """The program of a phase in `sample.py` at the release's widths, including kernels."""
    sharding = described("v5p:2x2x1")
    model = phase_programs.settings(attention_implementation="pallas_tpu")
    program = phase_programs.compiled(modality, model, sharding, "tpu")
    assert phase_programs.in_place(program.hlo, program.cache_shapes)
    assert not phase_programs.copies(program.hlo, program.cache_shapes)


def test_layers_of_their_own_share_two_kernels():
    """One for joint layers and one for split ones, of 4 layers as of 8."""
    sharding, found = described("v5e:2x2"), []
    for layers in (4, 8):
        with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
            lowered = kernel_programs.step("pallas_tpu", layers, "tpu", sharding)
        found.append(lowered.as_text().count("custom_call @tpu_custom_call"))
    assert found == [2, 2]
    assert "step_causal_attention" in lowered.compile().as_text()


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
def test_fused_layers_are_read_where_they_lie_and_cycles_go_into_products(topology):
    """The bar is .75 of the layers' cycles; the compiler has no estimate for our kernel."""
    model = phase_programs.settings(attention_implementation="pallas_tpu", num_registers=64)
    program = phase_programs.compiled("image", model, described(topology), "tpu", by_layer=False)
    assert not phase_programs.weights_copied(program.hlo, program.weight_shapes)
    often = 24 * model.num_split_layers  # steps of the longest phase; the head runs less often
    assert hlo.product_cycles(program.hlo, often) >= 0.75 * hlo.cycles(program.hlo, often) > 0
