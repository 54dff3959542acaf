# SPDX-License-Identifier: Apache-2.0
"""The layers of both branches: stacked by `vmap`, run by `scan`, joint ones first.

In a joint layer the queries, keys and values of both streams meet in one attention call; in a
split layer each stream attends to itself (spec Sec. 2.4). Tokens carry explicit positions and
tags, so a "mixture of transformers" only has to concatenate streams: no scatter, no mask.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sparse_lavida_jax import config
from sparse_lavida_jax.kernels import sharded
from sparse_lavida_jax.kernels.attention import (
    admit_kernel,
    default_step_implementation,
    implementation_for,
    interpreted_elsewhere,
    make_tables,
    mesh_of,
    query_tile,
    step_causal_attention,
    step_kernels,
    takes_tables,
)
from sparse_lavida_jax.kernels.sharded import Deal
from sparse_lavida_jax.kernels.tile_lists import GpuTables, Tables
from sparse_lavida_jax.models.cache import KVCache
from sparse_lavida_jax.models.layers import Branch, Layer, Rotary, rotary
from sparse_lavida_jax.tags import STREAMS, StreamName, StreamNames, TokenTags

Residuals = dict[StreamName, Float[Array, "b _s _e"]]  # each with its own length and width
Carried = dict[StreamName, Any]  # the same; between layers that use `StepKernels`, `fuse.Pending`s
Layouts = dict[StreamName, TokenTags]
Deals = dict[StreamName, Deal]
AnyTables = Tables | GpuTables


class StepKernels(NamedTuple):
    """The kernels of `step_gpu`, for a model."""

    rotated: Any
    added: Any
    narrowed: Any


@flax.struct.dataclass
class StepTables:
    """Tables for one pass of one stream over a cache; None if they are made in the pass."""

    joint: AnyTables | None = None
    split: AnyTables | None = None


def implementation_of(settings: config.Model) -> str:
    """Returns the implementation that computes a model's attention here, in long calls."""
    return implementation_for(*_of_attention(settings))


def step_implementation_of(model: Any) -> str:
    """Returns what computes the decoding steps of a model between their products.

    Args:
        model: a `Denoiser`; kernels need layers with arrays of their own, on one device.
    """
    found = {
        _step_implementation(model.settings, layers)
        for layers in (model.joint_layers, model.split_layers)
    }
    return "plain" if "plain" in found or mesh_of(model) is not None else found.pop()


def _step_implementation(settings: config.Model, layers: Layer | Sequence[Layer]) -> str:
    asked = settings.step_implementation
    if asked == "plain" or isinstance(layers, Layer):
        return "plain"
    if not asked and (
        implementation_of(settings) != "pallas_gpu" or default_step_implementation() == "plain"
    ):
        return "plain"
    widths = {settings.width}
    if not settings.understanding_only:
        widths.add(settings.generation_width)
    of_heads = settings.num_heads, settings.head_dim
    takes = step_kernels().takes
    fits = all(takes(*of_heads, width, settings.compute_dtype) for width in widths)
    return "pallas_gpu" if fits else "plain"


def admit_kernel_for(settings: config.Model, *, gradients: bool = False) -> None:
    """Checks the kernel that a model would use here, before the device is used.

    Args:
        gradients: whether they are checked too, for training.
    """
    admit_kernel(*_of_attention(settings), gradients=gradients)


def _of_attention(settings: config.Model) -> tuple[int, str, str | None]:
    asked = settings.attention_implementation or None
    return settings.head_dim, settings.compute_dtype, asked


def step_tables(
    settings: config.Model, name: StreamName, tags: TokenTags, cache: KVCache
) -> StepTables:
    """Returns the tables for a pass with a single stream, the one that the cache decodes.

    Args:
        tags: tags of the stream.
        cache: its state before the pass; only its tags are read.
    """
    cache = cache.begin(name, tags.block)
    one = _Pass(settings, {name: tags}, {}, {}, cache, gradients=False)
    attentions = one.joint([name]), one.split(name)
    return StepTables(*(attention.keywords["tables"] for attention in attentions))


def run_layers(
    settings: config.Model,
    joint: Layer | Sequence[Layer],
    split: Layer | Sequence[Layer],
    x: Residuals,
    tags: Layouts,
    *,
    wanted: StreamNames,
    cache: KVCache | None = None,
    attend_cache: bool = True,
    tables: StepTables | None = None,
) -> tuple[Residuals, KVCache | None]:
    """Feeds the streams through all layers.

    Args:
        joint, split: the layers, stacked, or one by one (`fuse.for_inference`) and then
            unrolled.
        x: residual streams; a stream without tokens is absent.
        tags: tags of the same streams.
        wanted: the streams to return. After the last joint layer the other has no further effect,
            so it stops at that layer's keys and values (exact, and half of a prefill).
        cache: keys and values of earlier passes; this pass writes its own after them.
        attend_cache: False if the cache holds nothing else (prefill): tokens then attend only to
            this pass, with the same result at less cost.
        tables: from `step_tables`, if the tags of this pass were known before it.

    Returns:
        The residual streams that are wanted and present, and the updated cache.
    """
    present: list[StreamName] = [name for name in STREAMS if name in x]
    implementation = implementation_of(settings)
    if cache is not None:
        for name in present:
            cache = cache.begin(name, tags[name].block)
        if takes_tables(implementation):
            cache = cache.placed(settings.num_heads)
    deals: Deals = {}
    if cache is None:
        # Slots of a cache are ordered by step, and the reference needs no load balancing.
        if takes_tables(implementation):
            tile_of = functools.partial(query_tile, implementation=implementation)
            deals = sharded.deals_of({name: x[name].shape[1] for name in present}, tile_of)
        if deals:
            x = {name: deals[name].out(x[name]) for name in present}
            tags = {name: jax.tree.map(deals[name].out, tags[name]) for name in present}
        x = {name: sharded.over_rows(x[name]) for name in present}
    # One by one, because `jax.tree.map` would sort the keys of a dict.
    tags = {name: jax.tree.map(jnp.asarray, tags[name]) for name in present}
    turns: dict[StreamName, Rotary] = {
        name: rotary(tags[name].position, settings.head_dim, settings.rope_theta)
        for name in present
    }
    stored = cache if attend_cache else None
    kernels = None
    if stored is not None and present == [stored.decodes] and wanted in (stored.decodes, "both"):
        kernels = _step_kernels(settings, joint, split)
    one = _Pass(settings, tags, turns, deals, stored, cache is None, kernels)
    carried: Carried = x if kernels is None else {name: (x[name], None) for name in x}
    ahead = tables or StepTables()
    carried, cache = _run_joint(one, joint, carried, cache, wanted, ahead.joint)
    if carried:
        attentions = {name: one.split(name, ahead.split) for name in carried}
        body = functools.partial(_split_layer, one=one, attentions=attentions)
        carried, cache = _run(settings, body, split, settings.num_split_layers, carried, cache)
    if kernels is not None:
        carried = {name: _settled(carried[name], settings.compute_dtype) for name in carried}
    x = carried
    if deals:
        x = {name: sharded.over_rows(deals[name].back(x[name])) for name in x}
    return x, cache


def _step_kernels(settings: config.Model, *stacks: Layer | Sequence[Layer]) -> StepKernels | None:
    """Returns functions of `step_gpu` for a step of one stream; None if it runs without."""
    mesh = jax.sharding.get_abstract_mesh()
    alone = mesh.empty or mesh.size == 1
    if not alone or any(_step_implementation(settings, each) == "plain" for each in stacks):
        return None
    step_gpu, interpret = step_kernels(), interpreted_elsewhere()
    return StepKernels(
        functools.partial(step_gpu.rotated, head_dim=settings.head_dim, interpret=interpret),
        functools.partial(step_gpu.added, interpret=interpret),
        functools.partial(step_gpu.narrowed, interpret=interpret),
    )


def _settled(pending: Any, dtype: str) -> Array:
    """Returns a residual stream with the product that was still to be added (`fuse.Pending`)."""
    x, product = pending
    if product is None:
        return x
    whole, scales = product[0].sum(axis=0), product[1]
    if scales is not None:
        whole = whole.astype(jnp.float32) * scales[0] * scales[1][None, None]
    return x + whole.astype(dtype)


def _run_joint(
    one: "_Pass", joint: Layer | Sequence[Layer], x, cache, wanted: StreamNames, tables
) -> tuple[Carried, KVCache | None]:
    """Feeds the streams through the joint layers, and returns those that are wanted.

    An unwanted stream stops at the last layer. Taking that layer out of the stack copies the
    others; if memory is short (`config.Model.remat`) it is computed in full instead.
    """
    present: list[StreamName] = [*one.tags]
    keep: list[StreamName] = [name for name in present if wanted in ("both", name)]
    saving = one.settings.remat != "none" and cache is None
    stops = keep != present and not saving
    number, attend = one.settings.num_joint_layers, one.joint(present, tables)
    body = functools.partial(_joint_layer, one=one, keep=present, attend=attend)
    x, cache = _run(one.settings, body, joint, number - stops, x, cache)
    if stops:
        last = jax.tree.map(lambda p: p[-1], joint) if isinstance(joint, Layer) else joint[-1]
        attend = one.joint(keep) if keep else None
        carry, last = (x, cache), (last, jnp.int32(number - 1))
        (x, cache), _ = _joint_layer(carry, last, one=one, keep=keep, attend=attend)
    return {name: x[name] for name in x if name in keep}, cache


def _run(settings: config.Model, body, layers: Layer | Sequence[Layer], number: int, x, cache):
    """Feeds the streams through the first `number` layers, in a loop if they are stacked.

    A pass without a cache keeps for its gradient whatever `config.Model.remat` says.
    """
    unroll = settings.unroll_layers
    if settings.remat != "none" and cache is None:
        policy = None
        if settings.remat == "attention":
            policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
        # A loop is already a barrier: inside it the compiler cannot reuse earlier results.
        body = jax.checkpoint(body, policy=policy, prevent_cse=unroll)
    if not isinstance(layers, Layer):
        # Traced and lowered once for all layers of one form, also over a mesh.
        body = jax.jit(body)
        for index in range(number):
            (x, cache), _ = body((x, cache), (layers[index], jnp.int32(index)))
        return x, cache
    if not number:
        return x, cache
    indices, is_part = jnp.arange(number), number < len(jax.tree.leaves(layers)[0])
    if is_part and cache is not None:
        # Cut out before the loop, the layers would be copied. (A gradient needs them cut out.)
        def of_stack(carry, index):
            layer = jax.tree.map(lambda p: jax.lax.dynamic_index_in_dim(p, index, 0, False), layers)
            return body(carry, (layer, index))

        (x, cache), _ = jax.lax.scan(of_stack, (x, cache), indices, unroll=unroll)
        return x, cache
    if is_part:
        layers = jax.tree.map(lambda p: p[:number], layers)
    (x, cache), _ = jax.lax.scan(body, (x, cache), (layers, indices), unroll=unroll)
    return x, cache


@dataclasses.dataclass(frozen=True)
class _Pass:
    """The streams of one pass, and what determines how their attention is computed.

    Visibility and its tables are the same for all layers of one kind: `joint` and `split` make
    them once, and return functions of queries, keys and values.

    Attributes:
        settings: of the model.
        tags: tags of the streams that are present.
        turns: rotations of their tokens, by position; empty if nothing is rotated.
        deals: how their tokens are distributed over a mesh; empty if they are not.
        cache: provides the tags of the keys; None if tokens attend only to this pass.
        gradients: whether there may be any: not in a pass that writes a cache.
        kernels: that compute the layers between their products (`_fused_layer`); None: without.
    """

    settings: config.Model
    tags: Layouts
    turns: dict[StreamName, Rotary]
    deals: Deals
    cache: KVCache | None
    gradients: bool
    kernels: "StepKernels | None" = None

    def joint(
        self, asking: Sequence[StreamName], tables: AnyTables | None = None
    ) -> functools.partial:
        """Returns attention of the streams in `asking` to all tokens, or to the whole cache."""
        stored = None if self.cache is None else self.cache.joint_block
        return self._attention(self._joined(asking), [*self.tags], stored, tables)

    def split(self, name: StreamName, tables: AnyTables | None = None) -> functools.partial:
        """Returns attention of a stream to itself, or to its region of the cache."""
        cache = self.cache
        stored = None if cache is None or cache.decodes != name else cache.split_block
        return self._attention(self.tags[name], [name], stored, tables)

    def join(self, streams: Sequence[Array], names: Sequence[StreamName]) -> Array:
        """Concatenates streams along their tokens, on every device separately."""
        if self.deals:
            return sharded.joined(streams, [self.deals[name] for name in names])
        return jnp.concatenate(streams, axis=1)

    def part(self, x: Array, names: Sequence[StreamName]) -> dict[StreamName, Array]:
        """Undoes `join`."""
        if self.deals:
            parts = sharded.parted(x, [self.deals[name] for name in names])
        else:
            ends = np.cumsum([self.tags[name].block.shape[1] for name in names])
            parts = jnp.split(x, ends[:-1], axis=1)
        return dict(zip(names, parts, strict=True))

    def _joined(self, names: Sequence[StreamName]) -> TokenTags:
        tags = [self.tags[name] for name in names]
        return jax.tree.map(lambda *tags: self.join(tags, names), *tags)

    def _attention(
        self, queries: TokenTags, names: Sequence[StreamName], stored, tables
    ) -> functools.partial:
        """Returns attention to the tokens of these streams, or to those in the cache."""
        keys = queries if len(names) == 1 else self._joined(names)
        tags = {
            "query_block": queries.block,
            "query_horizon": queries.horizon,
            "key_block": keys.block if stored is None else stored,
            "query_segment": queries.segment,
            "key_segment": keys.segment,
        }
        how = {
            "implementation": self.settings.attention_implementation or None,
            "key_deals": [self.deals[name] for name in names if self.deals],
        }
        head_dim, dtype = self.settings.head_dim, jnp.dtype(self.settings.compute_dtype)
        if tables is None:
            of_type = {"head_dim": head_dim, "dtype": dtype, "gradients": self.gradients}
            tables = make_tables(**tags, **how, **of_type)
        heads = self.settings.num_heads
        return functools.partial(
            step_causal_attention, **tags, **how, num_heads=heads, tables=tables
        )


def _branch(layer: Layer, name: StreamName) -> Branch:
    if not hasattr(layer, name):
        raise ValueError(
            f"the {name} stream has tokens, and these parameters no {name} branch: call"
            " for_inference with task='both'."
        )
    return layer.understanding if name == "understanding" else layer.generation


def _joint_layer(carry, layer_and_index, *, one, keep, attend):
    """Applies one attention over both streams; only the streams in `keep` continue after it."""
    if one.kernels is not None:
        return _fused_layer(carry, layer_and_index, one, attend, "joint")
    (x, cache), (layer, index) = carry, layer_and_index
    # In the order of the tags: a scan returns a dict with its keys sorted.
    names: list[StreamName] = [name for name in STREAMS if name in x]
    qkv = {name: _branch(layer, name).qkv(x[name], one.turns[name]) for name in names}
    if cache is not None:
        for name in names:
            cache = cache.write_joint(index, name, *qkv[name][1:])
    if attend is None:
        return ({}, cache), None
    if cache is not None and one.cache is not None:
        (keys, values), index = cache.joint_layer(index)
    else:
        keys, values = (one.join([qkv[name][i] for name in names], names) for i in (1, 2))
        index = None
    queries = one.join([qkv[name][0] for name in keep], keep)
    attended = one.part(attend(queries, keys, values, layer=index), keep)
    result = {name: layer.finish(_branch(layer, name), x[name], attended[name]) for name in keep}
    if cache is None:
        result = {name: sharded.over_rows(result[name]) for name in result}
    return (result, cache), None


def _split_layer(carry, layer_and_index, *, one, attentions):
    """Lets each stream attend to itself; the cache contains the stream that is decoded."""
    if one.kernels is not None:
        (attend,) = attentions.values()
        return _fused_layer(carry, layer_and_index, one, attend, "split")
    (x, cache), (layer, index), result = carry, layer_and_index, {}
    for name in x:
        branch, at = _branch(layer, name), None
        q, keys, values = branch.qkv(x[name], one.turns[name])
        if cache is not None and name == cache.decodes:
            cache = cache.write_split(index, keys, values)
            if one.cache is not None:
                (keys, values), at = cache.split_layer(index)
        attended = attentions[name](q, keys, values, layer=at)
        finished = layer.finish(branch, x[name], attended)
        result[name] = sharded.over_rows(finished) if cache is None else finished
    return (result, cache), None


def _fused_layer(carry, layer_and_index, one, attend, kind: Literal["joint", "split"]):
    """Computes the same for a single stream over the cache, with the kernels of `step_gpu`."""
    (x, cache), (layer, index) = carry, layer_and_index
    ((name, pending),) = x.items()
    branch: Any = _branch(layer, name)  # a `fuse.FusedBranch`
    stream, qkv = branch.begun(pending, one.kernels)

    def write(pair, first: int):
        return one.kernels.rotated(qkv, one.turns[name], pair, index, cache.offset, first=first)

    queries, cache = cache.write_decoded(kind, write)
    (keys, values), at = (cache.joint_layer if kind == "joint" else cache.split_layer)(index)
    attended = attend(queries, keys, values, layer=at)
    return ({name: branch.finished(stream, attended, one.kernels)}, cache), None
