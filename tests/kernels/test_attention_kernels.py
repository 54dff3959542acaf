# SPDX-License-Identifier: Apache-2.0
"""Every implementation in tiles against the dense reference: forward, gradients, any tags.

Kernels for accelerators are interpreted. What only one of them has is in a file of its own.
"""

import dataclasses
import functools
import importlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces
from jax.sharding import AbstractDevice, AbstractMesh
from kernel_cases import (
    TAGS,
    TOLERANCE,
    S,
    T,
    any_blocks,
    as_arrays,
    draw,
    horizons,
    reference,
    reference_and_gradients,
)  # fmt: skip

from sparse_lavida_jax.kernels import attention, devices, tile_lists
from sparse_lavida_jax.kernels.attention import run_kernel, step_causal_attention
from sparse_lavida_jax.kernels.common import NOTHING_SEEN_LSE, Shape

HARD_TAGS = ("padded_tags", "packed_tags", "nothing_seen")
MASKED_AND_NONE_CLEAN = np.repeat(np.arange(5), T // 5)[None].repeat(2, axis=0)


@dataclasses.dataclass(frozen=True)
class Backend:
    """An implementation, with sizes of tiles that divide none of the lengths.

    Attributes:
        heads: of queries, of keys, and their width.
        times: repetitions of every token, so that rows have tiles of every class.
        rows: of a call, fewer where interpreting is slow.
    """

    name: str
    sizes: tile_lists.TileSizes | tile_lists.GpuSizes
    other_sizes: tile_lists.TileSizes | tile_lists.GpuSizes
    heads: tuple[int, int, int] = (4, 2, 8)
    dtype: str = "float32"
    times: int = 1
    rows: int = 2

    @property
    def module(self):
        return importlib.import_module(f"sparse_lavida_jax.kernels.{self.name}")

    def shape(self, heads, sizes) -> Shape:
        interpret = self.module.interpreted() if self.name == "pallas_gpu" else True
        num_heads, num_kv_heads, head_dim = heads
        return Shape(num_heads, num_kv_heads, head_dim, head_dim**-0.5, sizes, interpret)

    def tags(self, name: str, rows: int | None = None) -> tuple:
        return self.as_tags(TAGS[name](np.random.default_rng(0)), rows)

    def as_tags(self, tags, rows: int | None = None) -> tuple:
        rows = rows or self.rows
        return as_arrays(
            None if tag is None else np.repeat(tag[:rows], self.times, axis=1) for tag in tags
        )


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("blockwise", tile_lists.TileSizes(16, 32, 32), tile_lists.TileSizes(16, 16, 16)),
        Backend("pallas_tpu", tile_lists.TileSizes(16, 32, 16), tile_lists.TileSizes(16, 32, 32)),
        Backend(
            "pallas_triton", devices.gpu_rule("pallas_triton"),
            tile_lists.GpuSizes(128, 2, 128, 2, 128, 2), times=4,
        ),
        Backend(
            "pallas_gpu", tile_lists.GpuSizes(), tile_lists.GpuSizes(64, 3, 128, 2, 128, 2),
            (1, 1, 64), "bfloat16", times=4, rows=1,
        ),
    )
}  # fmt: skip
ABSENT = {
    "pallas_triton": pytest.mark.skipif(
        not attention._has_triton(), reason="this jax has no Triton any more"
    ),
    "pallas_gpu": pytest.mark.skipif(
        jax.__version_info__ < (0, 11),
        reason="the GPU kernel needs jax 0.11: run the tests with Python 3.12 or later",
    ),
}
ALL = [
    pytest.param(backend, id=name, marks=[ABSENT[name]] if name in ABSENT else [])
    for name, backend in BACKENDS.items()
]
OF_GPUS = [param for param in ALL if param.id in ABSENT]
each_backend = pytest.mark.parametrize("backend", ALL)


def kernel_and_gradients(q, k, v, pulled, pulled_lse, tags, *, module, shape):
    found, pull_back = jax.vjp(lambda *qkv: run_kernel(module, *qkv, tags, shape), q, k, v)
    return found, pull_back((pulled, pulled_lse))


compiled = functools.partial(tiny.quick_jit, static_argnames=("module", "shape"))(
    kernel_and_gradients
)


def check(backend, tags, heads=None, *, dtype=None, sizes=None, times=1):
    """Checks output, log-sum-exp and gradients, and that every further run gives the same bits."""
    heads, dtype = heads or backend.heads, dtype or backend.dtype
    lengths, rows = (tags[0].shape[1], tags[2].shape[1]), len(tags[0])
    *qkv, pulled = draw(np.random.default_rng(0), *heads, dtype, lengths, rows)
    wide = [x.astype(jnp.float32) for x in (*qkv, pulled)]
    seen = np.asarray(reference(*wide[:3], tags, heads[-1])[1]) < NOTHING_SEEN_LSE
    pulled_lse = jnp.asarray(np.random.default_rng(1).normal(size=seen.shape) * seen, jnp.float32)
    run = functools.partial(
        compiled, *qkv, pulled, pulled_lse, tags, module=backend.module,
        shape=backend.shape(heads, sizes or backend.sizes),
    )  # fmt: skip
    found = run()
    for _ in range(times - 1):
        jax.tree.map(np.testing.assert_array_equal, found, run())
    (out, lse), gradients = found
    (wanted, wanted_lse), wanted_gradients = reference_and_gradients(
        *wide, pulled_lse, tags, heads[-1]
    )
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-5)
    assert not np.asarray(out)[~seen.any(axis=1)].any()
    assert (np.asarray(lse)[~seen] == np.float32(NOTHING_SEEN_LSE)).all()
    tolerance = TOLERANCE if dtype == "float32" else 2e-2
    for ours, expected in zip((out, *gradients), (wanted, *wanted_gradients), strict=True):
        ours = np.asarray(ours, np.float32)
        np.testing.assert_allclose(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name", [n if n in HARD_TAGS else pytest.param(n, marks=pytest.mark.slow) for n in TAGS]
)
@each_backend
def test_output_and_gradients_are_those_of_the_reference(backend, name):
    check(backend, backend.tags(name, rows=2 if name == "padded_tags" else None))


@each_backend
def test_heads_of_the_release_in_other_tiles(backend):
    check(backend, backend.tags("sorted_tags"), (1, 1, 128), sizes=backend.other_sizes)


@each_backend
def test_bfloat16_is_close_and_gives_the_same_bits_twice(backend):
    """Two heads share their keys."""
    heads = (2, 1, max(backend.heads[-1], 8))
    check(backend, backend.tags("packed_tags"), heads, dtype="bfloat16", times=2)


@pytest.mark.slow
@hypothesis.settings(max_examples=20)
@hypothesis.given(any_blocks(S, T))
@hypothesis.example((MASKED_AND_NONE_CLEAN[:, -S:], MASKED_AND_NONE_CLEAN, 0))
@each_backend
def test_whatever_the_tags(backend, drawn):
    """Includes runs of equal tags, so that whole tiles are skipped or full."""
    query_block, key_block, num_clean = drawn
    tags = (query_block, horizons(query_block, num_clean), key_block, None, None)
    check(backend, backend.as_tags(tags), (1, 1, backend.heads[-1]))


@pytest.mark.parametrize(
    "name", ["cache_tags", pytest.param("sorted_tags", marks=pytest.mark.slow)]
)
@each_backend
def test_the_entry_runs_the_kernel_on_a_layer_of_a_stacked_cache(backend, name):
    """Several tiles of queries and of slots."""
    tags, rng = backend.tags(name, rows=2)[:3], np.random.default_rng(1)
    dtype, width = ("bfloat16", 64) if backend.times > 1 else ("float32", 8)  # on tensor cores
    lengths = tags[0].shape[1], tags[2].shape[1]
    q, *_ = draw(rng, 2, 1, width, dtype, lengths)
    k, v = (jnp.asarray(rng.normal(size=(3, 2, lengths[1], width)), dtype) for _ in range(2))

    @functools.partial(tiny.quick_jit, static_argnames="implementation")
    def attend(layer, implementation):
        return step_causal_attention(
            q, k, v, *tags, num_heads=2, num_kv_heads=1, layer=layer, return_lse=True,
            implementation=implementation,
        )  # fmt: skip

    tolerance = TOLERANCE if dtype == "float32" else 2e-2
    for layer in (0, 2):
        found, lse = attend(layer, backend.name)
        wanted, wanted_lse = attend(layer, "reference")
        np.testing.assert_allclose(
            found.astype("float32"), wanted.astype("float32"), rtol=tolerance, atol=tolerance
        )
        np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("backend", OF_GPUS)
@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 64), ("bfloat16", 32)])
def test_what_tensor_cores_do_not_take_is_refused(backend, dtype, head_dim):
    tags = backend.tags("sorted_tags")[:3]
    lengths = tags[0].shape[1], tags[2].shape[1]
    *qkv, _ = draw(np.random.default_rng(0), 1, 1, head_dim, dtype, lengths, backend.rows)
    with pytest.raises(ValueError, match="takes bfloat16 or float16 and heads of 64 or 128"):
        step_causal_attention(*qkv, *tags, num_heads=1, implementation=backend.name)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("backend", OF_GPUS)
def test_it_lowers_for_an_absent_gpu_through_a_loop_over_layers(backend, segments):
    """Forward and both gradients; shared memory, layouts and barriers are checked by lowering.

    jax traces the body of a loop on its own, and then compares the kernel with its rule.
    """
    kind, cores, call = {
        "pallas_gpu": ("NVIDIA H200", 132, "mosaic_gpu"),
        "pallas_triton": ("NVIDIA A100", 108, "__gpu$xla.gpu.triton"),
    }[backend.name]
    wide = jax.ShapeDtypeStruct((1, 1024, 4 * 128), jnp.bfloat16)
    tag = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    shape = Shape(4, 4, 128, 128**-0.5, backend.sizes)

    def loss(x, tags):
        def layer(x, _):
            return run_kernel(backend.module, x, x, x, tags, shape)[0], None

        return jax.lax.scan(layer, x, None, length=3)[0].astype(jnp.float32).sum()

    tags = (tag,) * 5 if segments else (tag,) * 3 + (None,) * 2
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        program = jax.jit(jax.grad(loss)).trace(wide, tags)
        lowered = program.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count(f"stablehlo.custom_call @{call}") == 3


@pytest.mark.parametrize("modality", ["image", pytest.param("text", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["blockwise", pytest.param("pallas_tpu", marks=pytest.mark.slow)])
def test_a_model_samples_what_it_samples_on_the_reference(name, modality):
    """Cache, split layers and an edit's source cells; logits of every step."""
    found = {}
    for implementation in ("reference", name):
        settings = tiny.model_settings(attention_implementation=implementation)
        requests = [tiny.request(modality, settings, 0, words=3, vision=True, source=True)]
        asked = traces.settings_of("sparse", modality, settings)
        plan = traces.plan(requests, asked, num_steps=2)
        found[implementation], _ = traces.moments(tiny.denoiser(settings), requests, plan, asked)
    for ours, expected in zip(found[name], found["reference"], strict=True):
        np.testing.assert_allclose(ours.logits, expected.logits, rtol=0, atol=2e-5)
