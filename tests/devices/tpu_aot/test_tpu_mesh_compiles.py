# SPDX-License-Identifier: Apache-2.0
"""Attention and a model over 64 described chips: memory per chip, and communication."""

import importlib.util
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparse_lavida_jax import config
from sparse_lavida_jax.kernels.attention import make_tables, step_causal_attention
from sparse_lavida_jax.models import sharding
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.tags import Stream, TokenTags

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for TPUs needs libtpu: pip install -e '.[aot]'",
)
ROWS, LENGTH, HEADS, HEAD_DIM = 4, 8192, 32, 128
OWN_WIDTH = HEADS * HEAD_DIM // 4  # of the heads of a chip
OWN = f"bf16[1,{LENGTH // 4},{OWN_WIDTH}]"  # queries of a chip
GATHERED = f"bf16[1,{LENGTH},{OWN_WIDTH}]"  # keys of its rows and heads


def chips(*axes):
    """A mesh of 4 x 4 x 4 described chips."""
    from jax.experimental import topologies

    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # else a second one is locked out
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # skips a network query that would fail
    described = topologies.get_topology_desc("v5p:4x4x4", "tpu").devices
    return Mesh(np.array(described).reshape(4, 4, 4), axes)


def compiled(mesh, run, *given, **options):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(run, **options).lower(*given).compile()


def sent(hlo: str, *kinds: str) -> str:
    """Returns the results of the collectives of these kinds, one per line."""
    names = "|".join(kinds)
    return "\n".join(re.findall(rf"= (.+?) (?:{names})(?:-start)?\(", hlo))


def test_chips_gather_keys_and_values_and_add_up_their_gradients():
    mesh = chips("data", "sequence", "tensor")

    def attend(q, k, v, tags, pulled):
        tables = make_tables(*tags, implementation="pallas_tpu")

        def kernel(q, k, v):
            return step_causal_attention(
                q, k, v, *tags, num_heads=HEADS, tables=tables, implementation="pallas_tpu"
            )

        out, pull_back = jax.vjp(kernel, q, k, v)
        return out, pull_back(pulled)

    def given(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes))
        )

    wide = given((ROWS, LENGTH, HEADS * HEAD_DIM), jnp.bfloat16, "data", "sequence", "tensor")
    tag = given((ROWS, LENGTH), jnp.int32, "data", "sequence")
    program = compiled(mesh, attend, wide, wide, wide, (tag,) * 3, wide)
    hlo = program.as_text()
    for kernel in ("", "_dq"):  # 8 heads and 2,048 queries each
        calls = re.findall(rf"%step_causal_attention{kernel}[.\d]* = \(?(\S+\])", hlo)
        assert calls == [OWN]  # once: the backward pass does not run the forward kernel again
    # Keys and values: once for the output, once more for the gradients.
    assert sent(hlo, "all-gather").count(GATHERED) == 4
    assert f"s32[1,{LENGTH}]" in sent(hlo, "all-gather")
    assert GATHERED in sent(hlo, "all-reduce") or OWN in sent(hlo, "reduce-scatter")
    assert not sent(hlo, "all-to-all", "collective-permute")
    # Keys, values and their gradients of all tokens; logits would be 32 times as large.
    assert program.memory_analysis().temp_size_in_bytes < 5 * LENGTH * OWN_WIDTH * 2


def test_a_decode_step_moves_no_cache_between_chips():
    mesh, layers, slots, width = chips("data", "sequence", "tensor"), 4, 1536, HEADS * HEAD_DIM

    def attend(q, k, v, tags, layer):
        tables = make_tables(*tags, implementation="pallas_tpu")
        return step_causal_attention(
            q, k, v, *tags, num_heads=HEADS, layer=layer, tables=tables,
            implementation="pallas_tpu",
        )  # fmt: skip

    def given(shape, dtype=jnp.bfloat16, *axes):
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes))
        )

    cache = given((layers, ROWS, slots, width), jnp.bfloat16, None, "data", None, "tensor")
    tags = tuple(given((ROWS, n), jnp.int32, "data") for n in (256, 256, slots))
    queries = given((ROWS, 256, width), jnp.bfloat16, "data", None, "tensor")
    program = compiled(mesh, attend, queries, cache, cache, tags, given((), jnp.int32))
    assert str(slots) not in sent(program.as_text(), "all-gather", "all-reduce", "all-to-all")
    assert program.memory_analysis().temp_size_in_bytes < slots * OWN_WIDTH * 2


def test_a_forward_and_backward_pass_of_the_full_widths_fits():
    """A joint and a split layer of the release: 1,024 words and 3,072 cells per row."""
    mesh = chips("fsdp", "sequence", "tensor")
    settings = config.Model(
        vocab_size=4096, width=4096, mlp_hidden=12288, num_heads=HEADS, head_dim=HEAD_DIM,
        num_layers=2, dual_tower_layers=0, generation_width=2048, generation_mlp_hidden=8192,
        codebook_size=8192, codes_per_token=4, grid_size=32, compute_dtype="bfloat16",
        attention_implementation="pallas_tpu",
    )  # fmt: skip
    choose = sharding.over(mesh)
    model = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=choose("/".join(part.name for part in path[:-1]), x.shape)
        ),
        jax.eval_shape(lambda: Denoiser(settings, rngs=nnx.Rngs(0))),
    )

    def given(*shape):
        over = NamedSharding(mesh, PartitionSpec("fsdp", "sequence"))
        return jax.ShapeDtypeStruct((ROWS, *shape), jnp.int32, sharding=over)

    def stream(tokens, index, position, block, horizon):
        return Stream(tokens, index, TokenTags(position, block, horizon))

    def loss(model, text, image):
        hidden, _ = model(stream(*text), stream(*image), wanted="generation")
        return jnp.square(model.image_logits(hidden["generation"])).mean()

    program = compiled(
        mesh, jax.grad(loss), model, (given(1024),) * 5, (given(3072, 4), *(given(3072),) * 4),
        out_shardings=jax.tree.map(lambda x: x.sharding, model),
    )  # fmt: skip
    hlo, tokens = program.as_text(), 1024 + 3072
    gathered = sent(hlo, "all-gather")
    assert f",{tokens},{OWN_WIDTH}]" in gathered  # keys of both streams, in the joint layer
    assert f"bf16[1,3072,{OWN_WIDTH}]" in gathered  # those of a split layer
    for kernel in ("step_causal_attention", "step_causal_attention_dkv"):
        assert kernel in hlo
    # On each chip, in addition to its parameters: some activations of its own tokens and the
    # weights of one layer; a row of logits alone would be 3,072 x 3,072 x 8 x 4 bytes.
    assert program.memory_analysis().temp_size_in_bytes < 2**28
