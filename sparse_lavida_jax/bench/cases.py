# SPDX-License-Identifier: Apache-2.0
"""What attention is measured on: a shape at a batch size, its numbers, what it costs at least."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lavida_jax.kernels import shapes, tables
from sparse_lavida_jax.visibility import PAD_BLOCK, visible

HEADS, HEAD_DIM = 32, 128
TILE = tables.TileSizes(128, 128, 128)  # what "tile FLOPs" are counted in
BACKWARD_WORK = 2.5  # products of the backward pass (5) over those of the forward pass (2)
SHORT = 2048  # queries below which a call is too short to be timed alone
CALLS = 8  # of a short shape, in one program, each on what the one before returned
CHECKED_HEADS = (0, -1)  # heads do not know of each other, and a float32 reference is large


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape at one batch size, all rows with the same tags.

    Attributes:
        backward: with the gradients.
        timed: whether calls of a short shape are chained to be timed; otherwise there is one.
    """

    name: str
    batch: int
    tags: shapes.RowTags
    heads: int = HEADS
    backward: bool = False
    timed: bool = True

    @property
    def task(self) -> str:
        return f"{self.name}/{'forward_backward' if self.backward else 'forward'}"

    @property
    def decodes(self) -> bool:
        """Whether keys and values are a layer of the stacked cache."""
        return self.name.startswith("decode")

    @property
    def calls(self) -> int:
        return CALLS if self.timed and len(self.tags.query_block) < SHORT else 1

    @functools.cached_property
    def mask(self) -> np.ndarray:
        """Who sees whom [s t]; padding sees nobody."""
        t = self.tags
        sees = visible(t.query_block[:, None], t.query_horizon[:, None], t.key_block[None])
        if t.query_segment is not None and t.key_segment is not None:
            sees &= t.query_segment[:, None] == t.key_segment[None]
        return np.asarray(sees) & (t.query_block != PAD_BLOCK)[:, None]

    @functools.cached_property
    def flops(self) -> dict[str, float]:
        """Of pairs that see each other, of the tiles that hold any, and of all pairs."""
        queries, keys = len(self.tags.query_block), len(self.tags.key_block)
        made = tables.make_tables(*self.arrays(1), sizes=TILE)
        tiles = float(tables.active_share(made)) * made.by_query.flags.size
        pairs = {
            "useful": float(self.mask.sum()),
            "tile": tiles * TILE.queries * TILE.keys,
            "dense": float(queries * keys),
        }
        work = 4.0 * HEAD_DIM * self.heads * self.batch * (1 + BACKWARD_WORK * self.backward)
        return {name: work * number for name, number in pairs.items()}

    @property
    def least_bytes(self) -> int:
        """q, k, v and the output once, and with gradients theirs and the output's."""
        queries, keys = len(self.tags.query_block), len(self.tags.key_block)
        once = 2 * self.batch * self.heads * HEAD_DIM * (2 * queries + 2 * keys)
        return once * (2 if self.backward else 1)

    @property
    def programs(self) -> int:
        """Of our forward kernel on a GPU: one a head, row and tile of queries."""
        return self.batch * self.heads * -(-len(self.tags.query_block) // TILE.queries)

    def arrays(self, batch: int | None = None) -> tuple:
        """Tags as the kernels take them [b s]."""
        t = self.tags
        fields = (t.query_block, t.query_horizon, t.key_block, t.query_segment, t.key_segment)
        return tuple(
            None if field is None else jnp.asarray(np.repeat(field[None], batch or self.batch, 0))
            for field in fields
        )

    def numbers(self) -> tuple[np.ndarray, ...]:
        """q, k, v and the gradient of the output, [b s h d], float32 values of bfloat16."""
        rng = np.random.default_rng(0)
        s, t = len(self.tags.query_block), len(self.tags.key_block)

        def draw(length: int) -> np.ndarray:
            shape = (self.batch, length, self.heads, HEAD_DIM)
            rounded = jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
            return np.asarray(rounded, np.float32)

        return draw(s), draw(t), draw(t), draw(s)


def reference(case: Case, numbers: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Returns output and gradients of `CHECKED_HEADS`, float32, mask written out."""
    q, k, v, cotangent = (jnp.asarray(x[:, :, CHECKED_HEADS]) for x in numbers)
    mask = jnp.asarray(case.mask)[None, None]

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")

    def run(q, k, v, cotangent):
        if not case.backward:
            return (attend(q, k, v),)
        out, pull_back = jax.vjp(attend, q, k, v)
        return (out, *pull_back(cotangent))

    with jax.default_matmul_precision("highest"):
        return tuple(np.asarray(x) for x in jax.jit(run)(q, k, v, cotangent))


def difference(found: tuple[np.ndarray, ...], wanted: tuple[np.ndarray, ...], case: Case) -> float:
    """The largest difference, of the output where a query sees anything and of all gradients.

    Gradients that are larger than 1 count in proportion.
    """
    seen = case.mask.any(axis=1).reshape(1, -1, 1, 1)
    (out, *gradients), (wanted_out, *wanted_gradients) = found, wanted
    pairs = [
        (np.where(seen, out, 0), np.where(seen, wanted_out, 0)),
        *zip(gradients, wanted_gradients, strict=True),
    ]
    return max(float(np.abs(x - y).max() / max(np.abs(y).max(), 1)) for x, y in pairs)
