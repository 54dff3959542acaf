# SPDX-License-Identifier: Apache-2.0
"""The denoiser: embeddings, two streams of layers, two heads.

The model takes tokens with a `TokenTags`, never a mask. Paper Sec. 3; base model spec Sec. 2.
"""

import functools
from collections.abc import Callable

import einops
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sparse_lavida_jax import config
from sparse_lavida_jax.models.cache import KVCache
from sparse_lavida_jax.models.layers import Layer, Linear, RmsNorm, init_stack
from sparse_lavida_jax.models.stack import StepTables, run_layers, step_tables
from sparse_lavida_jax.models.style_code import StyleCode
from sparse_lavida_jax.models.vision import VisionEncoder
from sparse_lavida_jax.programs import persistent_jit
from sparse_lavida_jax.sequence import SeenBatch
from sparse_lavida_jax.tags import (
    NO_CELL,
    NO_EMBEDDING,
    AnyArray,
    Stream,
    StreamName,
    StreamNames,
    TokenTags,
)

HEAD_EPS = 1e-6  # of the norms in the image embedding and head (spec 2.5), not in the layers


class ImageEmbedding(nnx.Module):
    """Converts the codes of a cell to one backbone token (spec 2.5 and 2.6)."""

    def __init__(self, settings: config.Model, *, rngs: nnx.Rngs):
        width = settings.generation_width
        rows = settings.image_table_rows or settings.image_mask_id + 1
        self.table = nnx.Param(jax.random.normal(rngs.params(), (rows, width)) * 0.02)
        self.has_layers = settings.image_head != "embed"
        if self.has_layers:
            self.code_norm = RmsNorm(width, HEAD_EPS)
            self.code = Linear(width, width, rngs=rngs)
        if settings.codes_per_token > 1:  # the 2x2 convolution, stride 2
            self.merge_norm = RmsNorm(width, HEAD_EPS)
            self.merge = Linear(settings.codes_per_token * width, width, rngs=rngs)
        if self.has_layers:
            self.cell_norm = RmsNorm(width, HEAD_EPS)
            self.cell = Linear(width, width, rngs=rngs)
        self.codes_per_token = settings.codes_per_token

    def __call__(self, codes: Int[Array, "b s g"], dtype: jnp.dtype) -> Float[Array, "b s e"]:
        b, s, g = codes.shape
        x = self.table[codes.reshape(b, s * g)].astype(dtype)
        if self.has_layers:
            x = self.code(self.code_norm(x))
        if self.codes_per_token > 1:
            x = einops.rearrange(self.merge_norm(x), "b (s g) e -> b s (g e)", g=g)
            x = self.merge(x)
        return self.cell(self.cell_norm(x)) if self.has_layers else x


class ImageHead(nnx.Module):
    """Converts one backbone token to logits for the codes of its cell (spec 2.5 and 2.6)."""

    def __init__(self, settings: config.Model, *, rngs: nnx.Rngs):
        width = settings.generation_width
        if settings.codes_per_token > 1:  # the transposed 2x2 convolution, stride 2
            self.spread_norm = RmsNorm(width, HEAD_EPS)
            self.spread = Linear(width, settings.codes_per_token * width, rngs=rngs)
        self.kind = settings.image_head
        if self.kind == "dit2":
            self.cell_norm = RmsNorm(width, HEAD_EPS)
            self.cell = Linear(width, width, rngs=rngs)
        if self.kind != "embed":
            self.code = Linear(width, width, rngs=rngs)
            self.code_norm = RmsNorm(width, HEAD_EPS)
        self.logits = Linear(width, settings.codebook_size, rngs=rngs)
        self.codes_per_token = settings.codes_per_token
        if settings.sequential_codes:
            self.earlier_codes = EarlierCodes(settings, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b s e"], codes: Int[AnyArray, "b s g"] | None = None
    ) -> Float[Array, "b s g c"]:
        logits = self.logits(self.codes(x, codes)).astype(jnp.float32)
        return einops.rearrange(logits, "b (s g) c -> b s g c", g=self.codes_per_token)

    def codes(
        self, x: Float[Array, "b s e"], codes: Int[AnyArray, "b s g"] | None = None
    ) -> Float[Array, "b sg e"]:
        """Returns the inputs of the final linear layer, one for each code.

        Args:
            codes: of the cells, with `Model.sequential_codes`: each is seen by those after it.
        """
        x = self._spread(x)
        if self.is_sequential:
            assert codes is not None, "codes that are drawn one after another see those before"
            each = [self.earlier_codes(one, codes[..., :i]) for i, one in enumerate(self._each(x))]
            x = einops.rearrange(each, "g b s e -> b (s g) e")
        return self._before_logits(x)

    def draw(
        self,
        x: Float[Array, "b s e"],
        choose: Callable[[Float[Array, "b s c"], int], Int[Array, "b s"]],
    ) -> Int[Array, "b s g"]:
        """Returns the codes of cells, drawn one after another.

        Args:
            choose: returns the codes of a number, 0 to g - 1, from their logits, float32.
        """
        codes = jnp.zeros((*x.shape[:2], 0), jnp.int32)
        for i, one in enumerate(self._each(self._spread(x))):
            own = self.earlier_codes(one, codes) if self.is_sequential else one
            logits = self.logits(self._before_logits(own))
            chosen = choose(logits.astype(jnp.float32), i)
            codes = jnp.concatenate([codes, chosen[..., None]], axis=-1)
        return codes

    @property
    def is_sequential(self) -> bool:
        """Whether each code of a cell depends on those before it."""
        return hasattr(self, "earlier_codes")

    def _spread(self, x: Float[Array, "b s e"]) -> Float[Array, "b sg e"]:
        if self.codes_per_token == 1:
            return x
        x = self.spread(self.spread_norm(x))
        return einops.rearrange(x, "b s (g e) -> b (s g) e", g=self.codes_per_token)

    def _each(self, x: Float[Array, "b sg e"]) -> Float[Array, "g b s e"]:
        return einops.rearrange(x, "b (s g) e -> g b s e", g=self.codes_per_token)

    def _before_logits(self, x: Float[Array, "b s e"]) -> Float[Array, "b s e"]:
        if self.kind == "dit2":
            x = self.cell(self.cell_norm(x))
        if self.kind != "embed":
            x = self.code_norm(self.code(x))
        return x


class EarlierCodes(nnx.Module):
    """Adds the codes of a cell that were drawn before to the input of the next one.

    At first it adds nothing, so that a model without it can be trained on.
    """

    def __init__(self, settings: config.Model, *, rngs: nnx.Rngs):
        width, later = settings.generation_width, range(1, settings.codes_per_token)
        self.table = nnx.Param(jax.random.normal(rngs.params(), (settings.codebook_size, width)))
        self.norm = RmsNorm(width, HEAD_EPS)
        self.see = nnx.List(Linear((i + 1) * width, width, rngs=rngs) for i in later)
        self.add = Linear(width, width, rngs=rngs)
        self.add.kernel[...] = jnp.zeros_like(self.add.kernel[...])

    def __call__(
        self, x: Float[Array, "b s e"], codes: Int[AnyArray, "b s i"]
    ) -> Float[Array, "b s e"]:
        if not codes.shape[-1]:
            return x
        seen = self.table[jnp.asarray(codes)].astype(x.dtype)
        seen = einops.rearrange(seen, "b s i e -> b s (i e)")
        seen = jnp.concatenate([self.norm(x), seen], axis=-1)
        return x + self.add(jax.nn.silu(self.see[codes.shape[-1] - 1](seen)))


@functools.cache
def shapes(settings: config.Model) -> "Denoiser":
    """Returns the model with shapes instead of arrays; it must not be modified."""
    return persistent_jit.shapes_of(lambda: Denoiser(settings, rngs=nnx.Rngs(0)), settings)


class Denoiser(nnx.Module):
    """Predicts the masked tokens of text and images from the tokens it is given."""

    def __init__(self, settings: config.Model, *, rngs: nnx.Rngs):
        # As large as what the layers add to the residual stream: the first layer would drown out a
        # smaller embedding, and a small model would take long to recover it.
        def table(rows, width):
            return nnx.Param(jax.random.normal(rngs.params(), (rows, width)))

        self.settings = settings
        self.text_embedding = table(settings.vocab_size, settings.width)
        # A register starts as what it stands in for: a masked token of its stream.
        self.register_understanding = nnx.Param(self.text_embedding[settings.text_mask_id])
        if not settings.understanding_only:
            self.image_embedding = ImageEmbedding(settings, rngs=rngs)
            self.register_generation = nnx.Param(self.masked_cell())
            if settings.cell_positions:
                self.cell_row = table(settings.grid_size, settings.generation_width)
                self.cell_column = table(settings.grid_size, settings.generation_width)
            self.vision = VisionEncoder(settings.vision, settings.width, rngs=rngs)
            if settings.cell_positions:
                self.seen_row = table(settings.vision.grid_side, settings.width)
                self.seen_column = table(settings.vision.grid_side, settings.width)
            if settings.vision.newline:
                self.image_newline = nnx.Param(
                    jax.random.normal(rngs.params(), (settings.width,)) * settings.width**-0.5
                )

        def stack(depth: int) -> Layer:
            return init_stack(lambda r: Layer(settings, rngs=r), depth, rngs.params())

        self.joint_layers = stack(settings.num_joint_layers)
        self.split_layers = stack(settings.num_split_layers)
        self.final_norm = RmsNorm(settings.width, settings.norm_eps)
        self.text_head = Linear(settings.width, settings.vocab_size, rngs=rngs)
        if not settings.understanding_only:
            self.image_head = ImageHead(settings, rngs=rngs)
        if settings.style_parts:
            self.style_code = StyleCode(settings, rngs=rngs)
        if settings.grad_reduce_dtype != "compute" and settings.compute_dtype != "float32":
            for _, module in nnx.iter_modules(self):
                if isinstance(module, Linear):
                    module.wide_gradient = True
        if settings.neighbour_heads:
            self._look_at_neighbours(rngs)

    def _look_at_neighbours(self, rngs: nnx.Rngs) -> None:
        """Makes the first heads of the first layer attend to the neighbours of each word."""
        from sparse_lavida_jax.models import neighbours  # a model that is loaded does without

        direction = neighbours.shared_direction(self.settings.width, rngs.params())
        self.text_embedding[...] = neighbours.with_direction(self.text_embedding[...], direction)
        register = self.register_understanding[...][None]
        self.register_understanding[...] = neighbours.with_direction(register, direction)[0]
        branch = self.joint_layers.understanding
        kernels = neighbours.neighbour_kernels(direction, self.settings)
        for linear, start in zip((branch.q, branch.k), kernels, strict=True):
            heads = jnp.s_[0, :, : start.shape[1]]
            random = neighbours.NOISE * linear.kernel[heads]
            linear.kernel[...] = linear.kernel[...].at[heads].set(random + start)

    def set_registers(self) -> None:
        """Sets registers to what they stand in for: full attention trains masks, not registers."""
        words = self.text_embedding[...][self.settings.text_mask_id]
        self.register_understanding[...] = words.astype(self.register_understanding.dtype)
        if not self.settings.understanding_only:
            cell = self.masked_cell()
            self.register_generation[...] = cell.astype(self.register_generation.dtype)

    def masked_cell(self) -> Float[Array, " e"]:
        """Returns the embedding of a cell with no known codes."""
        codes = jnp.full((1, 1, self.settings.codes_per_token), self.settings.image_mask_id)
        return self.image_embedding(codes, jnp.dtype("float32"))[0, 0]

    def see(self, pixels: SeenBatch) -> Float[Array, "b v e"]:
        """Returns the vision features of each row: of one image, or of n views of its images.

        The features of the views follow each other, with a newline feature, if the model has one,
        at the end. Pixels are bytes, or numbers in [-1, 1].
        """
        b = pixels.shape[0]
        if pixels.ndim == 5:
            pixels = einops.rearrange(pixels, "b n h w c -> (b n) h w c")
        features = self.vision(pixels)
        if self.settings.cell_positions:
            # In training, features grow to a hundred times the size of what encodes position.
            square = jnp.mean(jnp.square(features.astype(jnp.float32)), axis=-1, keepdims=True)
            places = self.seen_row[:, None] + self.seen_column[None]
            places = einops.rearrange(places, "y x e -> 1 (y x) e")
            features = (features * jax.lax.rsqrt(square + HEAD_EPS) + places).astype(features.dtype)
        features = einops.rearrange(features, "(b n) v e -> b (n v) e", b=b)
        if not self.settings.vision.newline:
            return features
        newline = jnp.broadcast_to(self.image_newline[...], (b, 1, features.shape[-1]))
        return jnp.concatenate([features, newline.astype(features.dtype)], axis=1)

    def embed_text(
        self, stream: Stream, features: Float[Array, "b v e"] | None = None
    ) -> Float[Array, "b s e"]:
        """Embeds text, vision features, blanks and understanding registers."""
        ids = stream.tokens
        x = self.text_embedding[jnp.minimum(ids, self.settings.vocab_size - 1)]
        is_register = (ids == self.settings.text_register_id)[..., None]
        x = jnp.where(is_register, self.register_understanding[...][None, None], x)
        if features is not None:
            index = jnp.maximum(stream.index, 0)[..., None]
            seen = jnp.take_along_axis(features, index, axis=1)
            x = jnp.where((stream.index >= 0)[..., None], seen, x)
        x = jnp.where((stream.index == NO_EMBEDDING)[..., None], 0.0, x)
        return x.astype(self.settings.compute_dtype)

    def embed_image(self, stream: Stream) -> Float[Array, "b s e"]:
        """Embeds cells and generation registers."""
        codes, dtype = stream.tokens, jnp.dtype(self.settings.compute_dtype)
        x = self.image_embedding(jnp.minimum(codes, self.settings.image_mask_id), dtype)
        is_register = codes[..., :1] == self.settings.image_register_id
        x = jnp.where(is_register, self.register_generation.astype(dtype)[None, None], x)
        if self.settings.cell_positions:
            row, column = jnp.divmod(jnp.maximum(stream.index, 0), self.settings.grid_size)
            place = (self.cell_row[row] + self.cell_column[column]).astype(dtype)
            x = x + jnp.where((stream.index != NO_CELL)[..., None], place, 0)
        return x

    def __call__(
        self,
        understanding: Stream | None,
        generation: Stream | None,
        features: Float[Array, "b v e"] | None = None,
        *,
        wanted: StreamNames,
        cache: KVCache | None = None,
        attend_cache: bool = True,
        tables: StepTables | None = None,
        style: Float[Array, "b n c"] | None = None,
        added: Float[Array, "t e"] | None = None,
    ) -> tuple[dict[StreamName, Float[Array, "b _s _e"]], KVCache | None]:
        """Returns the final hidden states (normed) of the wanted streams, and the cache.

        See `stack.run_layers` for `wanted`, `cache`, `attend_cache` and `tables`.

        Args:
            style: the code that registers and masked cells of a row carry, one-hot in each group,
                or zeros for none.
            added: is added to the embeddings of the generation stream.
        """
        x, tags = {}, {}
        wide = self.settings.residual_dtype == "float32"
        residual = jnp.dtype("float32" if wide else self.settings.compute_dtype)
        if understanding is not None:
            x["understanding"] = self.embed_text(understanding, features).astype(residual)
            tags["understanding"] = understanding.tags
        if generation is not None:
            x["generation"] = self.embed_image(generation).astype(residual)
            if style is not None:
                carried = self.style_code.carried(self.settings, style, generation)
                x["generation"] += carried.astype(residual)
            if added is not None:
                x["generation"] += added.astype(residual)[None]
            tags["generation"] = generation.tags
        x, cache = run_layers(
            self.settings,
            self.joint_layers,
            self.split_layers,
            x,
            tags,
            wanted=wanted,
            cache=cache,
            attend_cache=attend_cache,
            tables=tables,
        )
        return {name: self.final_norm(h, self.settings.width) for name, h in x.items()}, cache

    def style_states(
        self,
        understanding: Stream | None,
        queries: Stream,
        features: Float[Array, "b v e"] | None = None,
    ) -> tuple[Float[Array, "b p e"], Float[Array, "b _p e"]]:
        """Returns the states of the queries of the style code's prior, and of its posterior.

        Args:
            understanding: the prompt.
            queries: the generation stream (`style_code.queries`); without cells, the second states
                are empty.
        """
        added = self.style_code.of_queries(queries.index.shape[1])
        hidden, _ = self(understanding, queries, features, wanted="generation", added=added)
        states, parts = hidden["generation"], self.settings.style_parts
        return states[:, :parts], states[:, parts : 2 * parts]

    def step_tables(self, tags: TokenTags, cache: KVCache) -> StepTables:
        """Returns the tables for a pass of the stream that the cache decodes (`stack`)."""
        return step_tables(self.settings, cache.decodes, tags, cache)

    @property
    def text_kernel(self) -> Float[Array, "e v"] | tuple[Float[Array, "e _c"], ...]:
        """The matrix of the text head, or its tiles in order (`text_head.draw`)."""
        return self.text_head.kernel[...]

    def text_logits(self, hidden: Float[Array, "b s e"]) -> Float[Array, "b s v"]:
        """Returns logits over the text vocabulary, float32."""
        return self.text_head(hidden.astype(self.settings.compute_dtype)).astype(jnp.float32)

    def image_logits(
        self, hidden: Float[Array, "b s e"], codes: Int[AnyArray, "b s g"] | None = None
    ) -> Float[Array, "b s g c"]:
        """Returns logits over the codebook for every code of a cell, float32.

        Args:
            codes: of the cells, with `Model.sequential_codes`: each is seen by those after it.
        """
        return self.image_head(hidden, codes)

    def empty_cache(
        self, batch: int, understanding_len: int, generation_len: int, decodes: StreamName
    ) -> KVCache:
        """Returns a cache of this model's shape; lengths are capacities in slots."""
        return KVCache.empty(self.settings, batch, understanding_len, generation_len, decodes)
