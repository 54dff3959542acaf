# SPDX-License-Identifier: Apache-2.0
"""The vision tower of the understanding branch: a SigLIP encoder, a pool, a projector.

Spec Sec. 4. The tower ends with its last layer: the norm after it in SigLIP is not part of it.
"""

import einops
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.models.layers import init_stack
from sparse_lavida_jax.tags import AnyArray

LAYER_NORM_EPS = 1e-6


class VisionEncoder(nnx.Module):
    """Converts an image to vision tokens of width `out_width`, row by row."""

    def __init__(self, settings: config.Vision, out_width: int, *, rngs: nnx.Rngs):
        side = settings.image_size // settings.patch_size
        self.tower = Tower(settings, side, rngs=rngs)
        self.pool = _average_pool(settings.width, settings.pool, rngs=rngs)
        self.projector = Projector(settings.width, out_width, rngs=rngs)
        self.image_size = settings.image_size
        self.side = side

    def __call__(
        self, pixels: UInt8[AnyArray, "b h w 3"] | Float[AnyArray, "b h w 3"]
    ) -> Float[Array, "b v e"]:
        """Returns the features of images given as bytes, or as numbers in [-1, 1].

        Raises:
            ValueError: the images do not have the size that the tower has positions for.
        """
        height, width = pixels.shape[1:3]
        if (height, width) != (self.image_size, self.image_size):
            raise ValueError(
                f"The vision tower was given images of {height}x{width} pixels;"
                f" it takes {self.image_size}x{self.image_size}. Resize or pad them first."
            )
        if pixels.dtype == jnp.uint8:
            pixels = (jnp.asarray(pixels, jnp.float32) / 255 - 0.5) / 0.5
        patches = self.tower(jnp.asarray(pixels))
        grid = einops.rearrange(patches, "b (y x) e -> b y x e", y=self.side)
        return self.projector(einops.rearrange(self.pool(grid), "b y x e -> b (y x) e"))


class Tower(nnx.Module):
    """Patches, learned positions, pre-norm transformer layers."""

    def __init__(self, settings: config.Vision, side: int, *, rngs: nnx.Rngs):
        patch = (settings.patch_size, settings.patch_size)
        self.patch_embedding = nnx.Conv(3, settings.width, patch, patch, padding="VALID", rngs=rngs)
        self.position_embedding = nnx.Param(
            # As large as a patch: with a smaller one, a small model would take long to recover it.
            jax.random.normal(rngs.params(), (side**2, settings.width))
        )
        self.layers = init_stack(
            lambda layer_rngs: TowerLayer(settings, rngs=layer_rngs),
            settings.num_layers,
            rngs.params(),
        )
        if settings.unused_post_norm:
            self.post_norm = nnx.LayerNorm(settings.width, epsilon=LAYER_NORM_EPS, rngs=rngs)

    def __call__(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b s e"]:
        """Returns the features of the patches of images in [-1, 1]."""
        patches = self.patch_embedding(pixels)
        x = einops.rearrange(patches, "b y x e -> b (y x) e") + self.position_embedding[None]
        return jax.lax.scan(lambda x, layer: (layer(x), None), x, self.layers)[0]


class TowerLayer(nnx.Module):
    """Attention over all patches and a two-layer MLP, each after a layer norm."""

    def __init__(self, settings: config.Vision, *, rngs: nnx.Rngs):
        width = settings.width
        self.layer_norm1 = nnx.LayerNorm(width, epsilon=LAYER_NORM_EPS, rngs=rngs)
        self.q = nnx.Linear(width, width, rngs=rngs)
        self.k = nnx.Linear(width, width, rngs=rngs)
        self.v = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.layer_norm2 = nnx.LayerNorm(width, epsilon=LAYER_NORM_EPS, rngs=rngs)
        self.fc1 = nnx.Linear(width, settings.mlp_hidden, rngs=rngs)
        self.fc2 = nnx.Linear(settings.mlp_hidden, width, rngs=rngs)
        self.num_heads = settings.num_heads

    def __call__(self, x: Float[Array, "b s e"]) -> Float[Array, "b s e"]:
        normed = self.layer_norm1(x)
        q, k, v = (
            einops.rearrange(project(normed), "b s (h d) -> b s h d", h=self.num_heads)
            for project in (self.q, self.k, self.v)
        )
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(logits * q.shape[-1] ** -0.5, axis=-1).astype(v.dtype)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + self.out(einops.rearrange(attended, "b s h d -> b s (h d)"))
        hidden = jax.nn.gelu(self.fc1(self.layer_norm2(x)), approximate=True)
        return x + self.fc2(hidden)


class Projector(nnx.Module):
    """Linear, exact GELU, linear: from the tower's width to the backbone's."""

    def __init__(self, width: int, out_width: int, *, rngs: nnx.Rngs):
        self.fc1 = nnx.Linear(width, out_width, rngs=rngs)
        self.fc2 = nnx.Linear(out_width, out_width, rngs=rngs)

    def __call__(self, x: Float[Array, "b s e"]) -> Float[Array, "b s f"]:
        return self.fc2(jax.nn.gelu(self.fc1(x), approximate=False))


def _average_pool(width: int, pool: int, *, rngs: nnx.Rngs) -> nnx.Conv:
    """A learned pool that starts as an average; patches that fill no window are dropped."""

    def average(key, shape, dtype, **_):
        return jnp.broadcast_to(jnp.eye(width, dtype=dtype)[None, None] / pool**2, shape)

    return nnx.Conv(
        width, width, (pool, pool), pool, padding="VALID", kernel_init=average, rngs=rngs
    )
