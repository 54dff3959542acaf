# SPDX-License-Identifier: Apache-2.0
"""Programs of a kernel, to be lowered or compiled for absent devices.

Its forward and backward pass; and a step of a model with many layers.
"""

import jax
import jax.numpy as jnp
import phase_programs
from flax import nnx

from sparse_lavida_jax.kernels.attention import run_kernel
from sparse_lavida_jax.models import fuse
from sparse_lavida_jax.models.cache import KVCache
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.tags import Stream, TokenTags


def traced(kernel, shape, sharding, length: int, num_tags: int):
    """Traces the kernel of a module over a row of tokens; of five tags, two are segments."""

    def attend(q, k, v, tags, pulled):
        def forward(q, k, v):
            return run_kernel(kernel, q, k, v, (*tags, *[None] * (5 - num_tags)), shape)

        (out, lse), pull_back = jax.vjp(forward, q, k, v)
        return out, pull_back((pulled, jnp.zeros_like(lse)))

    def given(heads):
        width = heads * shape.head_dim
        return jax.ShapeDtypeStruct((1, length, width), jnp.bfloat16, sharding=sharding)

    wide, keys = given(shape.num_heads), given(shape.num_kv_heads)
    tag = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=sharding)
    return jax.jit(attend).trace(wide, keys, keys, (tag,) * num_tags, wide)


@phase_programs.unchecked()
def step(
    implementation: str, layers: int, platform: str, sharding=None, **changes
) -> jax.stages.Lowered:
    """Lowers a pass of 88 cells over a cache; layers have arrays of their own, half are split.

    Args:
        sharding: of all arrays.
        changes: of the model, whose widths are small.
    """
    small = {
        "vocab_size": 512, "width": 256, "mlp_hidden": 256, "num_heads": 2, "codebook_size": 256,
        "generation_width": 256, "generation_mlp_hidden": 256, "end_of_text_id": 1,
        "text_mask_id": 2,
    }  # fmt: skip
    settings = phase_programs.settings(
        **small | changes, attention_implementation=implementation, num_layers=layers,
        dual_tower_layers=layers // 2,
    )  # fmt: skip

    def on_device(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    def made():
        whole = Denoiser(settings, rngs=nnx.Rngs(0))
        slots = 1024  # whole tiles of every kernel
        cache = KVCache.empty(settings, 2, slots, slots, "generation")
        tags = [jnp.zeros((2, 88), jnp.int32)] * 4
        tokens = jnp.zeros((2, 88, settings.codes_per_token), jnp.int32)
        cells = Stream(tokens, tags[0], TokenTags(*tags[1:]))
        return fuse.for_inference(whole, task="image", by_layer=True), cells, cache

    def run(model, cells, cache):
        return model(None, cells, wanted="generation", cache=cache)

    traced = jax.jit(run, donate_argnames="cache").trace(*on_device(jax.eval_shape(made)))
    return traced.lower(lowering_platforms=(platform,))
