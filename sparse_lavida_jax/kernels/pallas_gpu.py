# SPDX-License-Identifier: Apache-2.0
"""Step-causal attention for Hopper GPUs (Mosaic GPU): forward, and gradients of queries and keys.

A program holds a tile of rows: queries in the forward pass and for their gradient, keys for that of
keys and values. Two warpgroups compute half of it each; a third one copies the tiles in the row's
list into shared memory. The list has the tiles without a mask first, then those masked by
`visibility.visible`, which is traced unchanged: there are two loops, and only the second has mask
code. Tags are read from global memory; the list is a few integers per row.

Needs jax 0.11; supports bfloat16 and float16, with heads of width 64 or 128.
"""

# Types are those of jax 0.11, which a type checker with jax 0.10 does not know.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportPrivateImportUsage=false

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from sparse_lavida_jax.kernels import common
from sparse_lavida_jax.kernels.common import LOG2_E, LOWEST, NOTHING_SEEN_LSE, Shape
from sparse_lavida_jax.kernels.tile_lists import (
    GPU_ROWS,
    GpuSizes,
    GpuTables,
    RowLists,
    padded_tags,
)
from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON, visible

START = -5e29  # of the running maximum: exp2(LOWEST - START) is 0, so no row is a special case
TILING = 8, 64  # tokens and lanes that lie together in shared memory, as wgmma reads them
HALVES = 2  # warpgroups that compute
HALF = 64  # rows of each: those of one wgmma
COMPUTE_REGISTERS, COPY_REGISTERS = 240, 24
DOWN, ACROSS = (plgpu.Layout.WGMMA.reduce(axis) for axis in (1, 0))  # one number a row, a column
SEGMENT_SHIFT = 16  # in a word that holds segment and block
PACKED_PADDING = 2**SEGMENT_SHIFT - 1  # the block of padding in such a word
UNSEEN = -1  # the word of a query that is padding: no key has such a block, or such a segment


@flax.struct.dataclass
class GpuTags:
    """Tags of queries and keys [b s], padded to whole tiles.

    Attributes:
        query_block, key_block: words whose upper half holds the segment if rows are packed: the
            kernel for the gradient of keys has no registers left for a third number per query.
        query_horizon: of queries. Those of padding, and their words, are tags that see no key.
        packed: static: whether there are segments.
    """

    query_block: Any
    query_horizon: Any
    key_block: Any
    packed: bool = flax.struct.field(pytree_node=False)

    def of_queries(self, batch, queries, layout):
        """Returns the words and horizons of some queries, which go DOWN or ACROSS a tile."""
        tags = self.query_block, self.query_horizon
        return tuple(_numbers(x, batch, queries, layout) for x in tags)

    def of_keys(self, batch, keys, layout):
        """Returns the words of some keys."""
        return _numbers(self.key_block, batch, keys, layout)

    def mask(self, of_queries, key_words, *, keys_down: bool = False):
        """Returns who sees whom in a tile: [queries, keys], or transposed if keys go down it."""
        words, horizon = of_queries
        down, across = (key_words, words) if keys_down else (words, key_words)
        shape = (down.size, across.size)

        def spread(values, axis):
            return lax.broadcast_in_dim(values, shape, [axis])

        def apart(words, axis):
            """Returns the blocks in words and, if rows are packed, the segments."""
            parts = [words & PACKED_PADDING, words >> SEGMENT_SHIFT] if self.packed else [words]
            return [spread(part, axis) for part in parts]

        query_axis, key_axis = (1, 0) if keys_down else (0, 1)
        block, *segment = apart(words, query_axis)
        key_block, *key_segment = apart(key_words, key_axis)
        seen = visible(block, spread(horizon, query_axis), key_block, *segment, *key_segment)
        # Padding sees nothing anyway; without the comparison, ptxas spills registers of a gradient.
        return seen & (block != UNSEEN) if keys_down else seen


def _numbers(tags, batch, at, layout):
    """Reads tags from global memory."""
    return plgpu.load(tags.at[batch, at], layout=layout, optimized=False)


def _scatter(values, ref) -> None:
    """Writes numbers to places in global memory that do not lie side by side."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:  # before jax 0.12 no store was optimized
        ref[...] = values


def interpreted(*, detect_races: bool = False) -> Any:
    """Returns the value of `Shape.interpret` that runs the kernels in Python, on any machine."""
    parameters: Any = plgpu
    return parameters.InterpretGPUParams(detect_races=detect_races)


def _lanes(shape: Shape, head):
    return pl.ds(head * shape.head_dim, shape.head_dim)


def _key_lanes(shape: Shape, head):
    """Lanes of the key head that a query head reads."""
    return _lanes(shape, lax.div(head, jnp.array(shape.group, head.dtype)))


def _zeros(rows: int, cols: int):
    zeros = jnp.full((rows, cols), 0, dtype=jnp.float32)
    return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def _product(a, b, shape: Shape, size: tuple[int, int], meanwhile=lambda: None):
    """Returns a @ b of two tiles in shared memory, float32 [rows cols].

    Args:
        meanwhile: called while the product is computed; its result is returned too.
    """
    if shape.interpret:
        return _read(jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)), meanwhile()

    def compute(accumulator):
        plgpu.wgmma(accumulator, a, b)
        found = meanwhile()
        return accumulator[...], found

    return pl.run_scoped(compute, plgpu.ACC(size, jnp.float32))


def _added(accumulator, a, b, shape: Shape) -> Any:
    """Returns accumulator + a @ b, with `a` in registers or shared memory and `b` in the latter."""
    if shape.interpret:
        return accumulator + _read(jnp.dot(a[...], b[...], preferred_element_type=jnp.float32))
    return pl.run_state(functools.partial(plgpu.wgmma, a=a, b=b))(plgpu.ACC.init(accumulator))


def _read(product):
    """The interpreter has no wgmma: loads read shared memory, which a copy overwrites later."""
    plgpu.commit_smem()
    return product


def _transposed(ref, shape: Shape):
    return ref[...].T if shape.interpret else ref.transpose((1, 0))


def _slot(step, stages: int):
    """The slot of a tile: of `stages` slots, one is in use while the others are filled."""
    return lax.rem(step, jnp.array(stages, step.dtype))


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row of a list, inside a kernel: its tiles, how many have no mask, and its warpgroup.

    Attributes:
        half: index of the warpgroup; the last one copies tiles.
        split, splits: which of the programs that share the row this is, and their number. Each
            takes every `splits`-th tile of the list.
    """

    cols: Any
    num_full: Any
    num_active: Any
    batch: Any
    row: Any
    head: Any
    half: Any
    split: Any
    splits: int

    @classmethod
    def mine(cls, splits, cols, num_full, num_active, order=None) -> "_Row":
        """Returns the row of this program; with `order`, the first programs take the longest."""
        batch, row, head, half = map(lax.axis_index, ("batch", "row", "heads", "wg"))
        split = 0
        if splits > 1:
            number = jnp.array(splits, row.dtype)
            row, split = lax.div(row, number), lax.rem(row, number)
        row = row if order is None else order[batch, row]
        return cls(cols, num_full, num_active, batch, row, head, half, split, splits)

    @property
    def tokens(self):
        """The tokens of this warpgroup's half of the row."""
        return pl.ds(self.row * (HALVES * HALF) + self.half * HALF, HALF)

    @property
    def full(self):
        return self._share(self.num_full[self.batch, self.row])

    @property
    def active(self):
        return self._share(self.num_active[self.batch, self.row])

    def _share(self, number):
        """How many of the first `number` tiles of the list this program takes."""
        if self.splits == 1:
            return number
        return lax.div(
            number + (self.splits - 1 - self.split), jnp.array(self.splits, number.dtype)
        )

    def tile(self, step, size: int):
        """The tokens of the tile that this program takes in a step."""
        at = step if self.splits == 1 else step * self.splits + self.split
        return pl.ds(self.cols[self.batch, self.row, at] * size, size)


def _each_tile(row: _Row, compute, carry):
    """Runs `compute(step, carry, masked)` over the tiles of a row."""
    whole = functools.partial(compute, masked=False)
    part = functools.partial(compute, masked=True)
    carry = lax.fori_loop(0, row.full, whole, carry)
    return lax.fori_loop(row.full, row.active, part, carry)


def _load_own(row: _Row, ready, *pairs) -> None:
    """Copies the data of this half of the row (from global, to shared memory), and waits."""
    for i, (source, target) in enumerate(pairs):
        plgpu.copy_gmem_to_smem(source, target, ready.at[row.half * len(pairs) + i])
    for i in range(len(pairs)):
        plgpu.barrier_wait(ready.at[row.half * len(pairs) + i])


def _write_own(*pairs) -> None:
    """Copies results (from shared memory, to global memory); waits until they have been read."""
    plgpu.commit_smem()
    for source, target in pairs:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class _Tiles(NamedTuple):
    """Slots for tiles of an array in shared memory, and the barriers of each slot.

    Attributes:
        ready, consumed: passed when a tile has arrived, and when both halves have used it.
    """

    smem: Any
    ready: Any
    consumed: Any


def _copy_tiles(row: _Row, size: int, stages: int, *arrays: tuple[Any, _Tiles]) -> None:
    """The third warpgroup: copies every tile of the row when its slot is free.

    Args:
        size: tokens per tile.
        stages: number of slots.
        arrays: for each, the tokens to read and the slots of their tiles.
    """
    plgpu.set_max_registers(COPY_REGISTERS, action="decrease")

    @pl.loop(0, row.active)
    def _(step):
        slot, tile = _slot(step, stages), row.tile(step, size)
        for source, places in arrays:
            used = places.consumed.at[slot]
            pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, used))
            plgpu.copy_gmem_to_smem(source.at[tile], places.smem.at[slot], places.ready.at[slot])

    # Every phase of a barrier must be waited for, including the last ones.
    @pl.loop(lax.max(row.active - stages, jnp.int32(0)), row.active)
    def _(step):
        for _, places in arrays:
            plgpu.barrier_wait(places.consumed.at[_slot(step, stages)])


# ---------------------------------------------------------------------------------------------
# Kernels.


def _softmax_step(logits, carry, dtype, scale: float):
    """Returns the accumulator, total and maximum of a running softmax, and a tile's weights.

    Args:
        logits: not yet scaled, and neither is the maximum: a product and the subtraction before
            the exponential are one instruction.
        scale: of the logits, for powers of two.
    """
    accumulator, maximum, total = carry
    after = jnp.maximum(maximum, logits.max(axis=1))
    decay = jnp.exp2((maximum - after) * scale)
    weights = jnp.exp2(logits * scale - lax.broadcast_in_dim(after * scale, logits.shape, [0]))
    accumulator *= lax.broadcast_in_dim(decay, accumulator.shape, [0])
    total = total * decay + weights.sum(axis=1)
    return lax.optimization_barrier((accumulator, total, after, weights.astype(dtype)))


def _take_row(tiles: _Tiles, slot):
    """Returns a number for each query of a tile, and frees its slot."""
    plgpu.barrier_wait(tiles.ready.at[slot])
    values = plgpu.load(tiles.smem.at[slot], layout=ACROSS)
    plgpu.commit_smem()  # read by loads, overwritten by a copy
    plgpu.barrier_arrive(tiles.consumed.at[slot])
    return values


def _forward_kernel(
    q, k, v, layer, tags, lists, out, lse,
    q_smem, lse_smem, k_tiles, v_tiles, ready, turn, *, shape: Shape,
):  # fmt: skip
    work = _Row.mine(shape.splits, *lists)
    batch, head, half, dtype = work.batch, work.head, work.half, q.dtype
    keys, stages = shape.sizes.forward_keys, shape.sizes.forward_stages
    if shape.splits > 1:
        out, lse = (x.at[work.split] for x in (out, lse))

    def take_turns():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    @pl.when(half < HALVES)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        queries, own = work.tokens, q_smem.at[half]
        _load_own(work, ready, (q.at[batch, queries, _lanes(shape, head)], own))
        maximum = plgpu.layout_cast(jnp.full((HALF,), START, jnp.float32), DOWN)
        total = plgpu.layout_cast(jnp.full((HALF,), 0, jnp.float32), DOWN)
        accumulator = _zeros(HALF, shape.head_dim)
        own_tags = tags.of_queries(batch, queries, DOWN)
        pl.when(half == 1)(take_turns)

        def compute(step, carry, masked):
            slot = _slot(step, stages)

            def meanwhile():
                read = tags.of_keys(batch, work.tile(step, keys), ACROSS) if masked else None
                take_turns()
                return read

            plgpu.barrier_wait(k_tiles.ready.at[slot])
            k_tile = _transposed(k_tiles.smem.at[slot], shape)
            logits, key_tags = _product(own, k_tile, shape, (HALF, keys), meanwhile)
            plgpu.barrier_arrive(k_tiles.consumed.at[slot])
            if masked:
                logits = jnp.where(tags.mask(own_tags, key_tags), logits, LOWEST)
            how = logits, carry, dtype, shape.scale * LOG2_E
            accumulator, total, after, weights = _softmax_step(*how)
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_tiles.ready.at[slot])
            plgpu.barrier_wait(turn)
            accumulator = _added(accumulator, weights, v_tiles.smem.at[slot], shape)
            plgpu.barrier_arrive(v_tiles.consumed.at[slot])
            return accumulator, after, total

        accumulator, maximum, total = _each_tile(work, compute, (accumulator, maximum, total))
        pl.when(half == 0)(take_turns)
        # Padding sees nothing, though tiles without a mask were computed for it too.
        seen = (total > 0) & (own_tags[0] != UNSEEN)
        safe = jnp.where(seen, total, 1.0)
        # One division per row: each is several instructions.
        factor = jnp.where(seen, 1 / safe, 0.0)
        accumulator *= lax.broadcast_in_dim(factor, accumulator.shape, [0])
        own[...] = accumulator.astype(dtype)
        sums = jnp.where(seen, maximum * shape.scale + jnp.log(safe), NOTHING_SEEN_LSE)
        own_out = own, out.at[batch, queries, _lanes(shape, head)]
        if shape.splits > 1:
            _scatter(sums, lse.at[batch, queries, head])
            _write_own(own_out)
        else:
            lse_smem.at[half][...] = sums
            _write_own(own_out, (lse_smem.at[half], lse.at[batch, head, queries]))

    @pl.when(half == HALVES)
    def _():
        lanes = _key_lanes(shape, head)
        own_k, own_v = (x.at[layer[0], batch, :, lanes] for x in (k, v))
        _copy_tiles(work, keys, stages, (own_k, k_tiles), (own_v, v_tiles))


def _query_gradient_kernel(
    q, k, v, dout, lse, delta, tags, lists, dq,
    q_smem, dout_smem, lse_smem, delta_smem, k_tiles, v_tiles, ready, *, shape: Shape,
):  # fmt: skip
    work = _Row.mine(1, *lists)
    batch, head, half, dtype = work.batch, work.head, work.half, q.dtype
    keys, stages = shape.sizes.dq_keys, shape.sizes.dq_stages

    @pl.when(half < HALVES)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        queries, own, own_dout = work.tokens, q_smem.at[half], dout_smem.at[half]
        _load_own(
            work,
            ready,
            (q.at[batch, queries, _lanes(shape, head)], own),
            (dout.at[batch, queries, _lanes(shape, head)], own_dout),
            (lse.at[batch, head, queries], lse_smem.at[half]),
            (delta.at[batch, head, queries], delta_smem.at[half]),
        )
        size = (HALF, keys)
        own_lse = plgpu.load(lse_smem.at[half], layout=DOWN) * LOG2_E
        own_delta = plgpu.load(delta_smem.at[half], layout=DOWN)

        def compute(step, accumulator, masked):
            slot = _slot(step, stages)
            plgpu.barrier_wait(k_tiles.ready.at[slot])
            logits, _ = _product(own, _transposed(k_tiles.smem.at[slot], shape), shape, size)
            logits = logits * (shape.scale * LOG2_E) - lax.broadcast_in_dim(own_lse, size, [0])
            weights = jnp.exp2(logits)
            if masked:
                own_tags = tags.of_queries(batch, queries, DOWN)
                mask = tags.mask(own_tags, tags.of_keys(batch, work.tile(step, keys), ACROSS))
                weights = jnp.where(mask, weights, 0.0)
            plgpu.barrier_wait(v_tiles.ready.at[slot])
            dp, _ = _product(own_dout, _transposed(v_tiles.smem.at[slot], shape), shape, size)
            plgpu.barrier_arrive(v_tiles.consumed.at[slot])
            ds = weights * (dp - lax.broadcast_in_dim(own_delta, size, [0])) * shape.scale
            accumulator = _added(accumulator, ds.astype(dtype), k_tiles.smem.at[slot], shape)
            plgpu.barrier_arrive(k_tiles.consumed.at[slot])
            return accumulator

        accumulator = _each_tile(work, compute, _zeros(HALF, shape.head_dim))
        own[...] = accumulator.astype(dtype)
        _write_own((own, dq.at[batch, queries, _lanes(shape, head)]))

    @pl.when(half == HALVES)
    def _():
        lanes = _key_lanes(shape, head)
        own_k, own_v = (x.at[batch, :, lanes] for x in (k, v))
        _copy_tiles(work, keys, stages, (own_k, k_tiles), (own_v, v_tiles))


def _key_gradient_kernel(
    q, k, v, dout, lse, delta, tags, lists, dk, dv,
    k_smem, v_smem, q_tiles, dout_tiles, lse_tiles, delta_tiles, ready, *, shape: Shape,
):  # fmt: skip
    """Computes one query head; the heads of a group are added up outside."""
    work = _Row.mine(1, *lists)
    batch, head, half, dtype = work.batch, work.head, work.half, q.dtype
    queries, stages = shape.sizes.dkv_queries, shape.sizes.dkv_stages

    @pl.when(half < HALVES)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        own_k, own_v = k_smem.at[half], v_smem.at[half]
        theirs = (batch, work.tokens, _key_lanes(shape, head))
        _load_own(work, ready, (k.at[theirs], own_k), (v.at[theirs], own_v))
        size = (HALF, queries)

        def compute(step, carry, masked):
            dk_sum, dv_sum = carry
            slot = _slot(step, stages)
            if masked:  # before the copies arrive, and while few registers are in use
                of_queries = tags.of_queries(batch, work.tile(step, queries), ACROSS)
                of_keys = tags.of_keys(batch, work.tokens, DOWN)
                mask = tags.mask(of_queries, of_keys, keys_down=True)
            plgpu.barrier_wait(q_tiles.ready.at[slot])
            logits, _ = _product(own_k, _transposed(q_tiles.smem.at[slot], shape), shape, size)
            row_lse = _take_row(lse_tiles, slot) * LOG2_E
            logits = logits * (shape.scale * LOG2_E) - lax.broadcast_in_dim(row_lse, size, [1])
            weights = jnp.exp2(logits)
            if masked:
                weights = jnp.where(mask, weights, 0.0)
            plgpu.barrier_wait(dout_tiles.ready.at[slot])
            dv_sum = _added(dv_sum, weights.astype(dtype), dout_tiles.smem.at[slot], shape)
            # Starting from -delta needs fewer registers than subtracting it afterwards.
            dp = lax.broadcast_in_dim(-_take_row(delta_tiles, slot), size, [1])
            dp = _added(dp, own_v, _transposed(dout_tiles.smem.at[slot], shape), shape)
            plgpu.barrier_arrive(dout_tiles.consumed.at[slot])
            ds = weights * dp * shape.scale
            dk_sum = _added(dk_sum, ds.astype(dtype), q_tiles.smem.at[slot], shape)
            plgpu.barrier_arrive(q_tiles.consumed.at[slot])
            return dk_sum, dv_sum

        start = (_zeros(HALF, shape.head_dim), _zeros(HALF, shape.head_dim))
        dk_sum, dv_sum = _each_tile(work, compute, start)
        own_k[...] = dk_sum.astype(dtype)
        own_v[...] = dv_sum.astype(dtype)
        mine = (batch, work.tokens, _lanes(shape, head))
        _write_own((own_k, dk.at[mine]), (own_v, dv.at[mine]))

    @pl.when(half == HALVES)
    def _():
        lanes = _lanes(shape, head)
        _copy_tiles(
            work,
            queries,
            stages,
            (q.at[batch, :, lanes], q_tiles),
            (lse.at[batch, head], lse_tiles),
            (dout.at[batch, :, lanes], dout_tiles),
            (delta.at[batch, head], delta_tiles),
        )


# ---------------------------------------------------------------------------------------------
# Calls.


def _call(kernel, name: str, shape: Shape, lists: RowLists, inputs, outputs, scratch, splits=1):
    batch, rows, _ = lists.cols.shape
    order = () if lists.order is None else (lists.order,)
    return plgpu.kernel(
        functools.partial(kernel, shape=shape),
        out_type=outputs,
        scratch_types=scratch,
        grid=(shape.num_heads, rows * splits, batch),
        grid_names=("heads", "row", "batch"),
        num_threads=HALVES + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=shape.interpret or None,
        kernel_name=name,
    )(*inputs, (lists.cols, lists.num_full, lists.num_active, *order))


def _barriers(number: int, arrivals: int = 1):
    return plgpu.Barrier(num_barriers=number, num_arrivals=arrivals)


def _places(dtype, shape: Shape, size: int, stages: int):
    """Returns shared memory for one array of each kind that a program reads.

    The kinds are its own rows of features and of scalars, and tiles of features and of scalars.
    """

    def features(*lead: int):  # in the layout that wgmma reads
        transforms = (plgpu.TilingTransform(TILING), plgpu.SwizzleTransform(128))
        return plgpu.SMEM((*lead, shape.head_dim), dtype, transforms=transforms)

    def numbers(*lead: int):
        return plgpu.SMEM(lead, jnp.float32)

    def arriving(smem):
        return _Tiles(smem, _barriers(stages), _barriers(stages, HALVES))

    own = features(HALVES, HALF), numbers(HALVES, HALF)
    return *own, arriving(features(stages, size)), arriving(numbers(stages, size))


def forward(q, k, v, layer, tables: GpuTables, shape: Shape):
    """Returns the output [b s (h d)] and its log-sum-exp [b h s]; see `prepare` for lengths."""
    sizes, (batch, length, _) = shape.sizes, q.shape
    own, numbers, tiles, _ = _places(q.dtype, shape, sizes.forward_keys, sizes.forward_stages)
    out_shape, lse_shape = q.shape, (batch, shape.num_heads, length)
    if shape.splits > 1:  # of the parts; log-sum-exps up to whole tiles, which no copy cuts to size
        rows = GPU_ROWS * tables.forward.cols.shape[1]
        out_shape = shape.splits, *q.shape
        lse_shape = shape.splits, batch, rows, shape.num_heads
    out, lse = _call(
        _forward_kernel,
        "step_causal_attention",
        shape,
        tables.forward,
        (q, k, v, jnp.asarray(layer, jnp.int32).reshape(1), tables.tags),
        [
            jax.ShapeDtypeStruct(out_shape, q.dtype),
            jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        ],
        [own, numbers, tiles, tiles, _barriers(HALVES), plgpu.Barrier(num_arrivals=HALVES)],
        shape.splits,
    )
    return _combined(out, lse, shape) if shape.splits > 1 else (out, lse)


def _combine_kernel(parts, lse, out):
    """Adds the parts of 64 heads up, in order."""
    batch, chunk = map(lax.axis_index, ("batch", "chunk"))
    rows = pl.ds(chunk * HALF, HALF)
    sums = [_numbers(lse.at[i], batch, rows, DOWN) for i in range(len(lse))]
    sums = [jnp.where(x < NOTHING_SEEN_LSE, x, LOWEST) for x in sums]
    whole = _zeros(HALF, parts.shape[-1])
    for i, own in enumerate(sums):
        total = functools.reduce(jnp.add, [jnp.exp(other - own) for other in sums])
        part = plgpu.load(parts.at[i, batch, rows], layout=plgpu.Layout.WGMMA, optimized=False)
        whole += part.astype(jnp.float32) * lax.broadcast_in_dim(1 / total, part.shape, [0])
    _scatter(whole.astype(out.dtype), out.at[batch, rows])


def _combined(out: Float[Array, "n b s hd"], lse: Float[Array, "n b s2 h"], shape: Shape):
    """Returns the output and log-sum-exp of rows whose keys were split, from those of the parts."""
    splits, batch, length, width = out.shape
    heads = length * shape.num_heads
    whole = plgpu.kernel(
        _combine_kernel,
        out_type=jax.ShapeDtypeStruct((batch, heads, shape.head_dim), out.dtype),
        grid=(heads // HALF, batch),
        grid_names=("chunk", "batch"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=shape.interpret or None,
        kernel_name="step_causal_attention_combined",
    )(out.reshape(splits, batch, heads, shape.head_dim), lse.reshape(splits, batch, -1))
    sums = jnp.where(lse < NOTHING_SEEN_LSE, lse, -jnp.inf)[:, :, :length]
    lse = jax.nn.logsumexp(sums, axis=0).swapaxes(1, 2)
    lse = jnp.where(jnp.isinf(lse), NOTHING_SEEN_LSE, lse)
    return whole.reshape(batch, length, width), lse


def backward(q, k, v, tables: GpuTables, out, lse, cotangents, shape: Shape):
    """Returns the gradients of q [b s (h d)], k and v [b t (hk d)]."""
    sizes, (dout, _) = shape.sizes, cotangents
    assert tables.for_dq and tables.for_dkv, "the tables were made with gradients=False"
    delta = common.row_sums(out, cotangents, shape.num_heads)  # [b h s]
    inputs = (q, k, v, dout, lse, delta, tables.tags)
    own, numbers, tiles, _ = _places(q.dtype, shape, sizes.dq_keys, sizes.dq_stages)
    (dq,) = _call(
        _query_gradient_kernel,
        "step_causal_attention_dq",
        shape,
        tables.for_dq,
        inputs,
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        [own, own, numbers, numbers, tiles, tiles, _barriers(4 * HALVES)],
    )
    own, _, tiles, rows = _places(q.dtype, shape, sizes.dkv_queries, sizes.dkv_stages)
    every_head = (*k.shape[:2], shape.num_heads * shape.head_dim)
    gradients = _call(
        _key_gradient_kernel,
        "step_causal_attention_dkv",
        shape,
        tables.for_dkv,
        inputs,
        [jax.ShapeDtypeStruct(every_head, q.dtype)] * 2,
        [own, own, tiles, tiles, rows, rows, _barriers(2 * HALVES)],
    )
    return dq, *(_sum_of_groups(x, shape) for x in gradients)


def _sum_of_groups(x: Float[Array, "b t hd"], shape: Shape) -> Float[Array, "b t hkd"]:
    if shape.group == 1:
        return x
    apart = x.reshape(*x.shape[:2], shape.num_kv_heads, shape.group, shape.head_dim)
    return apart.astype(jnp.float32).sum(axis=3).astype(x.dtype).reshape(*x.shape[:2], -1)


def prepare(q, k, v, sizes: GpuSizes):
    """Pads to whole groups of `TILING`; a copy skips what a tile has beyond its array."""
    del sizes
    return tuple(common.whole_tiles(x, TILING[0]) for x in (q, k, v))


def laid_out(tags: common.Tags, sizes: GpuSizes) -> GpuTags:
    """Pads the tags to whole tiles, and packs them.

    Block numbers of packed rows must be below `PACKED_PADDING`.
    """
    del sizes
    query_block, query_horizon, key_block, query_segment, key_segment = tags
    rows = HALVES * HALF
    words = [padded_tags(block, rows, PAD_BLOCK) for block in (query_block, key_block)]
    if packed := query_segment is not None:
        segments = [padded_tags(segment, rows, 0) for segment in (query_segment, key_segment)]
        words = [
            segment << SEGMENT_SHIFT | jnp.minimum(block, PACKED_PADDING)
            for segment, block in zip(segments, words, strict=True)
        ]
    is_padding = padded_tags(query_block, rows, PAD_BLOCK) == PAD_BLOCK
    words[0] = jnp.where(is_padding, UNSEEN, words[0])
    horizon = jnp.where(is_padding, PAD_HORIZON, padded_tags(query_horizon, rows, PAD_HORIZON))
    return GpuTags(words[0], horizon, words[1], packed)
