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
    implementation: str | None = None,
) -> StepTables:
    """Returns the tables of a pass that holds one stream, the one that the cache decodes.

    Args:
        layout: tags of the stream.
        cache: as it is before the pass; only its tags are read.
    """
    cache = cache.begin(name, layout.block)
    deals: Deals = sharded.deals_of({name: layout.block.shape[1]}, None)
    one = _Pass({name: layout}, deals, cache, implementation, _first(joint))
    return StepTables(one.joint([name]).tables, one.split(name).tables)


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
        cache: keys and values of earlier passes; this pass writes its own after them.
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
    if cache is not None:
        for name in present:
            cache = cache.begin(name, layouts[name].block)
        if takes_tables(implementation):
            cache = cache.placed(_first(joint).num_heads)
    # The slots of a cache are in the order of its steps, and the reference needs no balance.
    in_turn = cache is None and takes_tables(implementation)
    deals: Deals = sharded.deals_of(
        {name: x[name].shape[1] for name in present},
        functools.partial(query_tile, implementation=implementation) if in_turn else None,
    )
    x = sharded.dealt_out(x, deals)
    if cache is None:
        x = {name: sharded.over_rows(x[name]) for name in x}
    layouts = {name: jax.tree.map(deals[name].out, layouts[name]) for name in present}
    one = _Pass(layouts, deals, cache if attend_cache else None, implementation, _first(joint))
    ahead, saving = tables or StepTables(), remat != "none" and cache is None
    run = functools.partial(_run, remat=remat if saving else "none", unroll=unroll)
    x, cache = _run_joint(run, joint, num_joint, x, cache, one, wanted, saving, ahead.joint)
    if x:
        attentions = {name: one.split(name, ahead.split) for name in x}
        body = functools.partial(_split_layer, one=one, attentions=attentions)
        x, cache = run(body, split, num_split, x, cache)
    return sharded.taken_back(x, deals), cache


def _first(layers: Layer | Sequence[Layer]) -> Branch:
    """Returns a branch whose heads and dtype are those of all."""
    return (layers if isinstance(layers, Layer) else layers[0]).understanding


def _run_joint(
    run, joint, number: int, x, cache, one: "_Pass", wanted: Wanted, saving: bool, tables
) -> tuple[Residuals, KVCache | None]:
    """Feeds the streams through the joint layers, and returns those that are wanted.

    The last layer is where an unwanted stream stops. Taking that layer out of the stack copies the
    others; where memory is short (`saving`) it is computed whole instead.
    """
    present: list[StreamName] = [*one.layouts]
    keep: list[StreamName] = [name for name in present if wanted in ("both", name)]
    stops = keep != present and not saving
    body = functools.partial(
        _joint_layer, one=one, keep=present, attention=one.joint(present, tables)
    )
    x, cache = run(body, joint, number - stops, x, cache)
    if stops:
        last = jax.tree.map(lambda p: p[-1], joint) if isinstance(joint, Layer) else joint[-1]
        attention = one.joint(keep) if keep else None
        carry, last = (x, cache), (last, jnp.int32(number - 1))
        (x, cache), _ = _joint_layer(carry, last, one=one, keep=keep, attention=attention)
    return {name: x[name] for name in x if name in keep}, cache


def _run(body, layers: Layer | Sequence[Layer], number: int, x, cache, *, remat: str, unroll: bool):
    """Feeds the streams through the first `number` layers, in a loop if they are stacked.

    Args:
        remat: what a layer keeps for its gradient, to compute the rest again; "none": everything.
    """
    if remat != "none":
        policy = None
        if remat == "attention":
            policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
        # A loop is a barrier already: the compiler finds nothing in it that it computed before.
        body = jax.checkpoint(body, policy=policy, prevent_cse=unroll)
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


@dataclasses.dataclass(frozen=True)
class _Pass:
    """The streams of one pass, and what decides how their attention is computed.

    Attributes:
        layouts: tags of the streams that are present.
        deals: how their tokens are dealt out over a mesh.
        cache: whose tags the keys have; None where tokens attend to this pass only.
        implementation: of attention; by default the best for the platform.
        branch: of any layer, for its heads and dtype.
    """

    layouts: Layouts
    deals: Deals
    cache: KVCache | None
    implementation: str | None
    branch: Branch

    def joint(self, asking: Sequence[StreamName], tables: AnyTables | None = None) -> _Attention:
        """The streams that ask attend to all tokens, or to the whole cache."""
        queries, _ = self._joined(asking)
        keys, key_deals = self._joined([*self.layouts])
        return self._attention(queries, keys, self.cache and self.cache.block, key_deals, tables)

    def split(self, name: StreamName, tables: AnyTables | None = None) -> _Attention:
        """A stream attends to itself, or to its region of the cache."""
        cache, queries = self.cache, self.layouts[name]
        stored = cache.split_block if cache is not None and cache.decodes == name else None
        return self._attention(queries, queries, stored, [self.deals[name]], tables)

    def _joined(self, names: Sequence[StreamName]) -> tuple[TokenLayout, list[Deal]]:
        streams, own = (self.layouts[name] for name in names), [self.deals[name] for name in names]
        return jax.tree.map(lambda *tags: joined(tags, own), *streams), own

    def _attention(
        self, queries: TokenLayout, keys: TokenLayout, stored, key_deals, tables
    ) -> _Attention:
        key_block, how = keys.block if stored is None else stored, self.implementation
        tables = tables or make_tables(
            queries.block,
            queries.horizon,
            key_block,
            queries.segment,
            keys.segment,
            key_deals=key_deals,
            implementation=how,
            head_dim=self.branch.head_dim,
            dtype=jnp.dtype(self.branch.dtype),
        )
        cached = stored is not None
        return _Attention(queries, key_block, keys.segment, tables, cached, how, key_deals)


def _branch(layer: Layer, name: StreamName) -> Branch:
    if not hasattr(layer, name):
        raise ValueError(
            f"the {name} stream has tokens, and these parameters no {name} branch: call"
            " for_inference with task='both'."
        )
    return layer.understanding if name == "understanding" else layer.generation


def _joint_layer(carry, layer_and_index, *, one, keep, attention: _Attention | None):
    """One attention over both streams; only the streams in `keep` go on after it."""
    (x, cache), (layer, index) = carry, layer_and_index
    # In the order of the tags: a dict comes out of a scan with its keys sorted.
    names: list[StreamName] = [name for name in STREAMS if name in x]
    position = {name: one.layouts[name].position for name in names}
    qkv = {name: _branch(layer, name).qkv(x[name], position[name]) for name in names}
    if cache is not None:
        for name in names:
            cache = cache.write_joint(index, name, *qkv[name][1:])
    if attention is None:
        return ({}, cache), None
    if cache is not None and attention.cached:
        keys, values = cache.joint_keys, cache.joint_values
    else:
        keys, values = (
            joined([qkv[name][i] for name in names], attention.key_deals) for i in (1, 2)
        )
        index = None
    own = [one.deals[name] for name in keep]
    queries = joined([qkv[name][0] for name in keep], own)
    attended = attention(queries, keys, values, layer.understanding.num_heads, index)
    result = {
        name: layer.finish(_branch(layer, name), x[name], part)
        for name, part in zip(keep, parted(attended, own), strict=True)
    }
    if cache is None:
        result = {name: sharded.over_rows(result[name]) for name in result}
    return (result, cache), None


def _split_layer(carry, layer_and_index, *, one, attentions):
    """Each stream attends to itself; the cache holds the stream that is decoded."""
    (x, cache), (layer, index), result = carry, layer_and_index, {}
    for name in x:
        branch, at = _branch(layer, name), None
        q, keys, values = branch.qkv(x[name], one.layouts[name].position)
        if cache is not None and name == cache.decodes:
            cache = cache.write_split(index, keys, values)
        if cache is not None and attentions[name].cached:
            keys, values, at = cache.split_keys, cache.split_values, index
        attended = attentions[name](q, keys, values, branch.num_heads, at)
        finished = layer.finish(branch, x[name], attended)
        result[name] = sharded.over_rows(finished) if cache is None else finished
    return (result, cache), None
