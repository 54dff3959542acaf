# SPDX-License-Identifier: Apache-2.0
"""The interpreted TPU kernel and blockwise attention over CPU meshes match one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, PartitionSpec
from kernel_cases import as_arrays, horizons

from sparse_lavida_jax.kernels import attention, shapes, sharded, tile_lists
from sparse_lavida_jax.kernels.attention import make_tables, query_tile, step_causal_attention
from sparse_lavida_jax.kernels.sharded import Deal, in_order, joined, parted
from sparse_lavida_jax.models import sharding, stack
from sparse_lavida_jax.tags import NO_CELL, NO_FEATURE, Stream, TokenTags
from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON

HEAD_DIM = 8
TOLERANCE = 2e-6


def mesh_of(**axes):
    return Mesh(
        np.array(jax.devices()[: np.prod(list(axes.values()))]).reshape(*axes.values()),
        tuple(axes),
    )


@dataclasses.dataclass
class Call:
    """A mesh and the shapes of a call, heads as (queries, keys)."""

    axes: dict[str, int]
    rows: int
    lengths: tuple[int, int]
    heads: tuple[int, int] = (2, 2)
    segments: bool = False

    def tags(self, rng):
        s, t = self.lengths
        block = np.sort(rng.integers(0, 6, (self.rows, max(s, t))), axis=1)
        block[:, -7:] = PAD_BLOCK
        segment = None
        if self.segments:
            segment = np.sort(rng.integers(0, 3, block.shape), axis=1)
        query, key = block[:, -s:], block[:, :t]
        own = (None, None) if segment is None else (segment[:, -s:], segment[:, :t])
        return as_arrays((query, horizons(query, 3), key, *own))

    def arrays(self, rng):
        (s, t), (heads, kv_heads) = self.lengths, self.heads
        return [
            jnp.asarray(rng.normal(size=(self.rows, n, h * HEAD_DIM)), jnp.float32)
            for n, h in [(s, heads), (t, kv_heads), (t, kv_heads), (s, heads)]
        ]


CALLS = {
    "data_tensor": Call({"data": 2, "tensor": 2}, 2, (130, 200), (4, 2)),
    "fsdp": Call({"data": 2, "fsdp": 2}, 4, (130, 130)),
    "sequence": Call({"sequence": 4}, 1, (520, 520)),
    "data_sequence_segments": Call({"data": 2, "sequence": 2}, 2, (264, 264), segments=True),
    "sequence_tensor": Call({"sequence": 2, "tensor": 2}, 1, (130, 260)),
    "nothing_divides": Call({"data": 2, "sequence": 2, "tensor": 2}, 3, (131, 133), (3, 3)),
    "keys_do_not_divide": Call({"sequence": 2}, 1, (130, 131)),
    "queries_do_not_divide": Call({"sequence": 2}, 1, (131, 130)),
    "key_heads_do_not_divide": Call({"data": 2, "tensor": 2}, 2, (130, 130), (4, 1)),
    "another_axis": Call({"rows": 2}, 2, (130, 130)),
}


@pytest.mark.parametrize(
    ("name", "over"),
    [(name, "pallas_tpu") for name in CALLS]
    + [(name, "blockwise") for name in ("data_sequence_segments", "sequence_tensor")],
)
def test_output_and_gradients_over_a_mesh_are_those_of_one_device(name, over):
    call, rng = CALLS[name], np.random.default_rng(0)
    tags, (*qkv, pulled) = call.tags(rng), call.arrays(rng)
    heads, kv_heads = call.heads

    @functools.partial(tiny.quick_jit, static_argnames="implementation")
    def run(q, k, v, pulled, tags, implementation):
        *own, query_segment, key_segment = tags
        made = make_tables(*tags, implementation=implementation)

        def attend(q, k, v):
            return step_causal_attention(
                q, k, v, *own, query_segment=query_segment, key_segment=key_segment,
                num_heads=heads, num_kv_heads=kv_heads, tables=made,
                implementation=implementation, return_lse=True,
            )  # fmt: skip

        (out, lse), pull_back = jax.vjp(attend, q, k, v)
        # Only for queries that see something, whose log-sum-exp is an ordinary number.
        return (out, lse), pull_back((pulled, jnp.where(lse < 1e29, jnp.cos(lse), 0.0)))

    with jax.set_mesh(mesh_of(**call.axes)):
        found = run(*qkv, pulled, tags, over)
    wanted = run(*qkv, pulled, tags, "reference")
    for ours, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=3 * TOLERANCE)
    np.testing.assert_allclose(found[0][0], wanted[0][0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("axes", "over"),
    [
        ({"data": 2, "tensor": 2}, "pallas_tpu"),
        ({"sequence": 2, "tensor": 2}, "pallas_tpu"),
        ({"data": 2, "sequence": 2, "tensor": 2}, "blockwise"),
    ],
)
def test_a_layer_of_a_stacked_cache_over_a_mesh(axes, over):
    call, rng = Call(axes, 2, (96, 256)), np.random.default_rng(0)
    tags, (q, *_) = call.tags(rng)[:3], call.arrays(rng)
    k, v = (jnp.asarray(rng.normal(size=(3, 2, 256, 2 * HEAD_DIM)), jnp.float32) for _ in range(2))

    @functools.partial(tiny.quick_jit, static_argnames="implementation")
    def attend(q, k, v, layer, implementation):
        k, v = (sharded.place_cache(x, 2) for x in (k, v))
        return step_causal_attention(
            q, k, v, *tags, num_heads=2, layer=layer, implementation=implementation, return_lse=True
        )

    with jax.set_mesh(mesh_of(**axes)):
        found = attend(q, k, v, 1, over)
    for ours, expected in zip(found, attend(q, k, v, 1, "reference"), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=TOLERANCE)


def test_inside_a_shard_map_the_kernel_is_left_alone():
    call, rng = Call({"data": 2}, 2, (130, 130)), np.random.default_rng(0)
    tags, (q, k, v, _) = call.tags(rng)[:3], call.arrays(rng)

    def attend(q, k, v, tags):
        made = make_tables(*tags, implementation="pallas_tpu")
        assert made.by_query.count.ndim == 0
        return step_causal_attention(
            q, k, v, *tags, num_heads=2, tables=made, implementation="pallas_tpu"
        )

    rows = PartitionSpec("data")
    with jax.set_mesh(mesh_of(data=2)):
        found = tiny.quick_jit(
            jax.shard_map(attend, in_specs=(rows,) * 4, out_specs=rows, check_vma=False)
        )(q, k, v, tags)
    wanted = tiny.quick_jit(attend)(q, k, v, tags)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


def test_a_mesh_of_explicit_axes_is_refused():
    call, rng = Call({}, 2, (130, 130)), np.random.default_rng(0)
    tags, (q, k, v, _) = call.tags(rng)[:3], call.arrays(rng)
    with (
        jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))),
        pytest.raises(ValueError, match=r"explicit axes \['data'\]"),
    ):
        step_causal_attention(q, k, v, *tags, num_heads=2, implementation="pallas_tpu")


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    ("implementation", "call"),
    [("pallas_gpu", "mosaic_gpu"), ("pallas_triton", "__gpu$xla.gpu.triton")],
)
def test_a_gpu_kernel_lowers_for_four_chips(implementation, call):
    if implementation == "pallas_gpu" and jax.__version_info__ < (0, 11):
        pytest.skip("this kernel needs jax 0.11: Python 3.12")
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh(
        (2, 2), ("sequence", "tensor"), (AxisType.Auto,) * 2, abstract_device=device
    )
    wide = jax.ShapeDtypeStruct((1, 1024, 4 * 128), jnp.bfloat16)
    tag = jax.ShapeDtypeStruct((1, 1024), jnp.int32)

    def attend(q, k, v, tags, pulled):
        made = make_tables(*tags, implementation=implementation)

        def kernel(q, k, v):
            return step_causal_attention(
                q, k, v, *tags, num_heads=4, tables=made, implementation=implementation
            )

        out, pull_back = jax.vjp(kernel, q, k, v)
        return out, pull_back(pulled)

    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.jit(attend).trace(wide, wide, wide, (tag,) * 3, wide)
        lowered = program.lower(lowering_platforms=("cuda",)).as_text()
    # The forward kernel runs once; keys and values are gathered for each direction, and the tables
    # of every device have the tags of all.
    assert lowered.count(f"stablehlo.custom_call @{call}") == 3
    assert lowered.count("stablehlo.all_gather") == 4
    assert lowered.count("stablehlo.reduce_scatter") == 2


# ---------------------------------------------------------------------------------------------
# Order of the tokens.


def test_tokens_are_dealt_out_in_turn():
    dealt = Deal(2, 12, 3).out(np.arange(12)[None])
    np.testing.assert_array_equal(dealt[0], [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11])


@pytest.mark.parametrize(("length", "stripe"), [(8, 2), (24, 12), (2 * 1031, 1031), (4096, 512)])
def test_dealing_out_and_joining_are_undone(length, stripe):
    deals = [Deal(2, length, stripe), Deal(2, 10, 5)]
    streams = [np.arange(2 * deal.length * 3).reshape(2, -1, 3) for deal in deals]
    dealt = [deal.out(x) for deal, x in zip(deals, streams, strict=True)]
    both = joined(dealt, deals)
    np.testing.assert_array_equal(in_order(both, deals), np.concatenate(streams, axis=1))
    for part, deal, given in zip(parted(both, deals), deals, streams, strict=True):
        np.testing.assert_array_equal(deal.back(part), given)
        own = np.asarray(part[0]).reshape(2, -1, 3)[:, :, 0]
        assert (np.diff(own) > 0).all()  # sorted tokens stay sorted on a device
    # The first device has the first tokens of both streams.
    np.testing.assert_array_equal(both[:, length // 2], streams[1][:, 0])


def test_lengths_that_do_not_divide_are_not_dealt_out():
    def devices(*lengths):
        deals = sharded.deals_of(dict(enumerate(lengths)), lambda own: own)
        return [deal.devices for deal in deals.values()]

    with jax.set_mesh(mesh_of(sequence=4)):
        assert devices(8, 12) == [4, 4]
        assert devices(8, 10) == []
    assert devices(8, 12) == []


def test_stripes_are_the_longest_that_make_up_the_tokens_of_a_device():
    with jax.set_mesh(mesh_of(sequence=2)):
        deals = sharded.deals_of({"text": 2 * 96, "image": 2 * 1536}, lambda own: 512)
        assert [deal.stripe for deal in deals.values()] == [96, 512]
        assert sharded.deals_of({"text": 2 * 600}, lambda own: 256)["text"].stripe == 200


@pytest.mark.parametrize("number", [2, 4, 8])
def test_tokens_that_only_short_stripes_make_up_are_not_dealt_out(number):
    """Stripes would have 4, 2 and 1 tokens; and no stream is dealt out without the other."""
    with jax.set_mesh(mesh_of(sequence=number)):
        for lengths in ({"text": 8152}, {"text": 8192, "image": 8152}):
            assert sharded.deals_of(lengths, lambda own: query_tile(own, "pallas_tpu")) == {}
        filled = sharded.deals_of({"text": 8192}, lambda own: query_tile(own, "pallas_tpu"))
        assert filled["text"].stripe == 512


def shares_of_devices(tags, devices: int, *, in_turn: bool) -> np.ndarray:
    """The share of all logits that each device computes for its queries, in whole tiles."""
    length = tags[0].shape[1]
    deals = [Deal(devices, length, query_tile(length // devices, "pallas_tpu"))] * in_turn
    with jax.set_mesh(mesh_of(sequence=devices)):

        @jax.jit
        def shares(tags):
            for deal in deals:
                tags = [None if tag is None else deal.out(tag) for tag in tags]
            made = make_tables(*tags, implementation="pallas_tpu", key_deals=deals)
            return jax.vmap(tile_lists.active_share)(made)

        return np.asarray(shares(tags))


def test_dealing_out_gives_every_device_as_much_to_compute():
    """A row with one example, padded to 8,192; packed rows are balanced (docs/kernels.md)."""
    frozen = shapes.tags("single_8152")
    fills = (PAD_BLOCK, PAD_HORIZON, PAD_BLOCK, 0, 0)
    tags = as_arrays(
        None if tag is None else np.pad(tag, (0, 8192 - len(tag)), constant_values=fill)[None]
        for tag, fill in zip(
            (getattr(frozen, field.name) for field in dataclasses.fields(frozen)),
            fills,
            strict=True,
        )
    )
    dealt, as_is = (shares_of_devices(tags, 8, in_turn=choice) for choice in (True, False))
    assert as_is.max() / as_is.mean() > 1.3
    assert dealt.max() / dealt.mean() < 1.25
    assert dealt.max() < 0.9 * as_is.max()
    np.testing.assert_allclose(dealt.sum(), as_is.sum(), rtol=1e-6)  # tiles stay as compact


# ---------------------------------------------------------------------------------------------
# Whole models.


def streams_of(settings, rows, text_len, image_len):
    rng = np.random.default_rng(0)

    def stream(length, tokens):
        block = np.sort(rng.integers(0, 5, (rows, length)), axis=1)
        block[:, -2:] = PAD_BLOCK
        position = np.tile(np.arange(length), (rows, 1))
        tags = as_arrays((position, block, horizons(block, 2)))
        index = np.full((rows, length), NO_CELL if tokens.ndim == 3 else NO_FEATURE)
        return Stream(*as_arrays((tokens, index)), TokenTags(*tags))

    text = rng.integers(tiny.FIRST_WORD, settings.vocab_size, (rows, text_len))
    codes = rng.integers(0, settings.codebook_size, (rows, image_len, settings.codes_per_token))
    return stream(text_len, text), stream(image_len, codes)


def spread_over(mesh, model):
    choose = sharding.over(mesh)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(
            x, choose("/".join(part.name for part in path[:-1]), x.shape)
        ),
        model,
    )


def settings_of(implementation):
    return tiny.model_settings(attention_implementation=implementation)


@pytest.mark.parametrize("over", [pytest.param("pallas_tpu", marks=pytest.mark.slow), "blockwise"])
def test_a_model_over_a_mesh_learns_what_it_learns_on_one_device(monkeypatch, over):
    """Tokens of both streams are dealt out in stripes of 2, joined, split and put back."""
    monkeypatch.setattr(stack, "query_tile", lambda length, implementation: 2)
    model, alone = (tiny.denoiser(settings_of(name)) for name in (over, "reference"))
    streams = streams_of(model.settings, 2, 8, 12)
    mesh = mesh_of(fsdp=2, sequence=2, tensor=2)

    @tiny.quick_jit
    @functools.partial(jax.grad, has_aux=True)
    def run(model, streams):
        hidden, _ = model(*streams, wanted="generation")
        # A different number per token, so that a wrong order is detected.
        weight = jnp.arange(1, 13)[None, :, None] / 12
        return (jnp.sin(hidden["generation"]) * weight).mean(), hidden

    with jax.set_mesh(mesh):
        gradient, hidden = run(spread_over(mesh, model), streams)
    wanted, wanted_hidden = run(alone, streams)
    np.testing.assert_allclose(
        hidden["generation"], wanted_hidden["generation"], rtol=0, atol=10 * TOLERANCE
    )
    for ours, expected in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=10 * TOLERANCE)


@pytest.mark.slow
def test_a_model_over_a_mesh_samples_what_it_samples_on_one_device(monkeypatch):
    """The sampler gets the mesh from the parameters; prefill, steps and cache are split over it."""
    found, placed, prefill = {}, [], traces._prefill

    def watched(*given, **settings):
        state = prefill(*given, **settings)
        placed.append(state.cache.joint[0].sharding)
        return state

    monkeypatch.setattr(traces, "_prefill", watched)
    for name in ("pallas_tpu", "reference"):
        model = tiny.denoiser(settings_of(name))
        if name == "pallas_tpu":
            model = spread_over(mesh_of(data=2, tensor=2), model)
        requests = [tiny.request("image", model.settings, seed, words=3) for seed in range(2)]
        asked = traces.settings_of("sparse", "image", model.settings)
        plan = traces.plan(requests, asked, num_steps=2)
        found[name] = traces.finished(model, requests, plan, asked)
    np.testing.assert_array_equal(found["pallas_tpu"], found["reference"])
    assert placed[0].spec == PartitionSpec(None, "data", None, "tensor")


def test_parameters_on_one_device_are_on_no_mesh():
    with attention.mesh_in_use({"kernel": jnp.zeros(2)}):
        assert jax.sharding.get_abstract_mesh().empty
    mesh = mesh_of(fsdp=2)
    whole = jax.device_put(jnp.zeros(2), jax.sharding.NamedSharding(mesh, PartitionSpec()))
    with attention.mesh_in_use({"kernel": whole}):
        assert jax.sharding.get_abstract_mesh().shape == {"fsdp": 2}
