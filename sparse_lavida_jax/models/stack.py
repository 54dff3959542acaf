# SPDX-License-Identifier: Apache-2.0
"""The layers of both branches: stacked by `vmap`, run by `scan`, joint ones first.

In a joint layer the queries, keys and values of both streams meet in one attention call; in a
split layer each stream attends to itself (spec Sec. 2.4). Tokens carry explicit positions and
tags, so concatenating streams is all that "mixture of transformers" takes: no scatter, no mask.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from sparse_lavida_jax.kernels import sharded
from sparse_lavida_jax.kernels.attention import (
    make_tables,
    query_tile,
    step_causal_attention,
    takes_tables,
)
from sparse_lavida_jax.kernels.deal import Deal, joined, parted
from sparse_lavida_jax.kernels.tables import GpuTables, Tables
from sparse_lavida_jax.layout import TokenLayout
from sparse_lavida_jax.models.cache import KVCache, StreamName
from sparse_lavida_jax.models.layers import Branch, Layer
from sparse_lavida_jax.visibility import AnyArray

# Which streams' final hidden states are wanted. After the last joint layer the other stream can
# no longer matter, so it stops at that layer's keys and values (exact, and half of a prefill).
Wanted = Literal["understanding", "generation", "both"]
Residuals = dict[StreamName, Float[Array, "b _s _e"]]  # each of its own length and width
Layouts = dict[StreamName, TokenLayout]
Deals = dict[StreamName, Deal]
AnyTables = Tables | GpuTables

STREAMS: tuple[StreamName, ...] = ("understanding", "generation")


M = TypeVar("M", bound=nnx.Module)


def init_stack(make_layer: Callable[[nnx.Rngs], M], depth: int, key: PRNGKeyArray) -> M:
    """Makes `depth` layers as one module whose arrays have a leading layer axis."""
    return jax.vmap(lambda k: make_layer(nnx.Rngs(params=k)))(jax.random.split(key, depth))


@flax.struct.dataclass
class StepTables:
    """Tables of one pass of one stream over a cache; None where they are made in the pass."""

    joint: AnyTables | None = None
    split: AnyTables | None = None


def step_tables(
    joint: Layer | Sequence[Layer],
    name: StreamName,
    layout: TokenLayout,
    cache: KVCache,
    *,
    dtype: DTypeLike,
    implementation: str | None = None,
) -> StepTables:
    """Returns the tables of a pass that holds one stream, the one that the cache decodes.

    Args:
        layout: tags of the stream.
        cache: as it is before the pass; only its tags are read.
        dtype: of the queries.
    """
    first = (joint if isinstance(joint, Layer) else joint[0]).understanding
    chosen_by = _ChosenBy(implementation, first.head_dim, dtype)
    cache = cache.begin(name, layout.block)
    deals: Deals = sharded.deals_of({name: layout.block.shape[1]}, None)
    layouts: Layouts = {name: layout}
    return StepTables(
        _Attention.joint(layouts, [name], [name], cache, chosen_by, deals).tables,
        _Attention.split(layouts, name, cache, chosen_by, deals).tables,
    )


def run_layers(
    joint: Layer | Sequence[Layer],
    split: Layer | Sequence[Layer],
    num_joint: int,
    num_split: int,
    x: Residuals,
    layouts: Layouts,
    *,
    wanted: Wanted,
    cache: KVCache | None = None,
    attend_cache: bool = True,
    unroll: bool = False,
    remat: str = "none",
    implementation: str | None = None,
    tables: StepTables | None = None,
) -> tuple[Residuals, KVCache | None]:
    """Feeds the streams through all layers.

    Args:
        joint, split: layers, `num_joint` and `num_split` of them: stacked, or one by one
            (`fuse.for_inference`), which are then written out.
        x: residual streams; a stream without tokens is absent.
        layouts: tags of the same streams.
        wanted: the streams to return.
        cache: keys and values of earlier passes; this pass writes its own behind them.
        attend_cache: False where the cache holds nothing else (prefill): tokens then attend to
            this pass only, which is the same thing and cheaper.
        unroll: write the layers out instead of looping over them.
        remat: what a pass without a cache keeps for its gradient (`config.Model.remat`).
        implementation: of attention; by default the best for the platform.
        tables: of `step_tables`, where the tags of this pass were known before it.

    Returns:
        The residual streams that are wanted and present, and the cache as written.
    """
    present: list[StreamName] = [name for name in STREAMS if name in x]
    first = (joint if isinstance(joint, Layer) else joint[0]).understanding
    if cache is not None:
        for name in present:
            cache = cache.begin(name, layouts[name].block)
        if takes_tables(implementation):
            cache = cache.placed(first.num_heads)
    # The slots of a cache are in the order of its steps, and the reference needs no balance.
    in_turn = cache is None and takes_tables(implementation)
    deals: Deals = sharded.deals_of(
        {name: x[name].shape[1] for name in present},
        functools.partial(query_tile, implementation=implementation) if in_turn else None,
    )
    chosen_by = _ChosenBy(implementation, first.head_dim, jnp.dtype(first.dtype))
    ahead = tables or StepTables()
    x = sharded.dealt_out(x, deals)
    if cache is None:
        x = {name: sharded.over_rows(x[name]) for name in x}
    layouts = {name: jax.tree.map(deals[name].out, layouts[name]) for name in present}

    seen = cache if attend_cache else None  # whose tags the keys have
    joint_attention = _Attention.joint(
        layouts, present, present, seen, chosen_by, deals, ahead.joint
    )

    def joint_layer(carry, layer_and_index):
        x, cache = carry
        layer, index = layer_and_index
        return _joint_layer(layer, index, x, layouts, deals, present, cache, joint_attention), None

    # The last joint layer is where an unwanted stream stops. Taking that layer out of the stack
    # copies the others; where memory is short this layer is computed whole instead.
    unwanted = [name for name in present if wanted not in ("both", name)]
    saving = remat != "none" and cache is None
    stops = [] if saving else unwanted
    whole = num_joint - 1 if stops else num_joint
    body = _rematerialized(joint_layer, remat, unroll) if saving else joint_layer
    x, cache = _run(body, joint, whole, x, cache, unroll)
    if saving:
        x = {name: x[name] for name in x if name not in unwanted}
    if stops:
        last = jax.tree.map(lambda p: p[-1], joint) if isinstance(joint, Layer) else joint[-1]
        keep: list[StreamName] = [name for name in present if name not in stops]
        last_attention = (
            _Attention.joint(layouts, keep, present, seen, chosen_by, deals) if keep else None
        )
        x, cache = _joint_layer(
            last, jnp.int32(num_joint - 1), x, layouts, deals, keep, cache, last_attention
        )

    split_attention = {
        name: _Attention.split(layouts, name, seen, chosen_by, deals, ahead.split) for name in x
    }

    def split_layer(carry, layer_and_index):
        x, cache = carry
        layer, index = layer_and_index
        return _split_layer(layer, index, x, layouts, cache, split_attention), None

    if x:
        body = _rematerialized(split_layer, remat, unroll) if saving else split_layer
        x, cache = _run(body, split, num_split, x, cache, unroll)
    return sharded.taken_back(x, deals), cache


def _run(body, layers: Layer | Sequence[Layer], number: int, x, cache, unroll: bool):
    """Feeds the streams through the first `number` layers, in a loop if they are stacked."""
    if not isinstance(layers, Layer):
        for index in range(number):
            (x, cache), _ = body((x, cache), (layers[index], jnp.int32(index)))
        return x, cache
    if not number:
        return x, cache
    if number < len(jax.tree.leaves(layers)[0]):
        layers = jax.tree.map(lambda p: p[:number], layers)
    (x, cache), _ = jax.lax.scan(body, (x, cache), (layers, jnp.arange(number)), unroll=unroll)
    return x, cache


def _rematerialized(layer, remat: str, unroll: bool):
    """Returns a layer that keeps little for its gradient and computes the rest again."""
    policy = None
    if remat == "attention":
        policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
    # A loop is a barrier already: the compiler finds nothing in it that it computed before.
    return jax.checkpoint(layer, policy=policy, prevent_cse=unroll)


@dataclasses.dataclass(frozen=True)
class _ChosenBy:
    """What decides how attention is computed, beside its lengths (`kernels.attention`)."""

    implementation: str | None
    head_dim: int
    dtype: DTypeLike


@dataclasses.dataclass(frozen=True)
class _Attention:
    """Who attends to whom in layers of one kind: the same for all of them, so made once.

    Attributes:
        queries: tags of the queries.
        key_block: tags of the keys.
        key_segment: likewise, where several examples share a row; a cache holds no such rows.
        tables: of these tags, or None where the implementation needs none.
        cached: whether the keys are those of the cache.
        implementation: of attention; by default the best for the platform.
        key_deals: how the streams of the keys are dealt out over a mesh.
    """

    queries: TokenLayout
    key_block: Int[AnyArray, "b t"]
    key_segment: Int[AnyArray, "b t"] | None
    tables: AnyTables | None
    cached: bool
    implementation: str | None
    key_deals: list[Deal]

    @classmethod
    def joint(
        cls,
        layouts: Layouts,
        asking: Sequence[StreamName],
        present: Sequence[StreamName],
        cache: KVCache | None,
        chosen_by: _ChosenBy,
        deals: Deals,
        tables: AnyTables | None = None,
    ) -> "_Attention":
        """All tokens attend to all, or to the whole cache."""

        def joint(names):
            streams = (layouts[name] for name in names)
            own = [deals[name] for name in names]
            return jax.tree.map(lambda *tags: joined(tags, own), *streams), own

        queries, _ = joint(asking)
        keys, key_deals = joint(present)
        return cls._of(queries, keys, cache and cache.block, chosen_by, key_deals, tables)

    @classmethod
    def split(
        cls,
        layouts: Layouts,
        name: StreamName,
        cache: KVCache | None,
        chosen_by: _ChosenBy,
        deals: Deals,
        tables: AnyTables | None = None,
    ) -> "_Attention":
        """A stream attends to itself, or to its region of the cache."""
        own = cache is not None and cache.decodes == name
        stored = cache.split_block if cache is not None and own else None
        queries = layouts[name]
        return cls._of(queries, queries, stored, chosen_by, [deals[name]], tables)

    @classmethod
    def _of(
        cls,
        queries: TokenLayout,
        keys: TokenLayout,
        stored,
        chosen_by: _ChosenBy,
        key_deals,
        tables,
    ) -> "_Attention":
        key_block = keys.block if stored is None else stored
        tables = tables or make_tables(
            queries.block,
            queries.horizon,
            key_block,
            queries.segment,
            keys.segment,
            key_deals=key_deals,
            **dataclasses.asdict(chosen_by),
        )
        cached = stored is not None
        implementation = chosen_by.implementation
        return cls(queries, key_block, keys.segment, tables, cached, implementation, key_deals)

    def __call__(self, q, keys, values, num_heads: int, layer: Int[Array, ""] | None):
        attended = step_causal_attention(
            q,
            keys,
            values,
            self.queries.block,
            self.queries.horizon,
            self.key_block,
            num_heads=num_heads,
            layer=layer,
            query_segment=self.queries.segment,
            key_segment=self.key_segment,
            tables=self.tables,
            implementation=self.implementation,
            key_deals=self.key_deals,
        )
        assert isinstance(attended, jax.Array)
        return attended


def _branch(layer: Layer, name: StreamName) -> Branch:
    if not hasattr(layer, name):
        raise ValueError(
            f"the {name} stream has tokens, and these parameters no {name} branch: call"
            " for_inference with task='both'."
        )
    return layer.understanding if name == "understanding" else layer.generation


def _joint_layer(layer, index, x, layouts, deals, keep, cache, attention):
    """One attention over both streams; only the streams in `keep` go on behind it."""
    # In the order of the tags: a dict comes out of a scan with its keys sorted.
    names: list[StreamName] = [name for name in STREAMS if name in x]
    qkv = {name: _branch(layer, name).qkv(x[name], layouts[name].position) for name in names}
    if cache is not None:
        for name in names:
            cache = cache.write_joint(index, name, *qkv[name][1:])
    if not keep:
        return {}, cache
    if cache is not None and attention.cached:
        keys, values = cache.joint_keys, cache.joint_values
    else:
        keys, values = (
            joined([qkv[name][i] for name in names], attention.key_deals) for i in (1, 2)
        )
        index = None
    own = [deals[name] for name in keep]
    queries = joined([qkv[name][0] for name in keep], own)
    attended = attention(queries, keys, values, layer.understanding.num_heads, index)
    result = {
        name: layer.finish(_branch(layer, name), x[name], part)
        for name, part in zip(keep, parted(attended, own), strict=True)
    }
    if cache is None:
        result = {name: sharded.over_rows(result[name]) for name in result}
    return result, cache


def _split_layer(layer, index, x, layouts, cache, attention):
    """Each stream attends to itself; the cache holds the stream that is decoded."""
    result = {}
    for name in x:
        branch, at = _branch(layer, name), None
        q, keys, values = branch.qkv(x[name], layouts[name].position)
        if cache is not None and name == cache.decodes:
            cache = cache.write_split(index, keys, values)
        if cache is not None and attention[name].cached:
            keys, values, at = cache.split_keys, cache.split_values, index
        attended = attention[name](q, keys, values, branch.num_heads, at)
        finished = layer.finish(branch, x[name], attended)
        result[name] = sharded.over_rows(finished) if cache is None else finished
    return result, cache
