# SPDX-License-Identifier: Apache-2.0
"""Portable implementations against softmax in loops, the choice by device, and all refusals."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny

from sparse_lavida_jax.kernels import admission, attention
from sparse_lavida_jax.kernels.attention import make_tables, step_causal_attention
from sparse_lavida_jax.kernels.common import NOTHING_SEEN_LSE
from sparse_lavida_jax.kernels.tile_lists import GpuTables, Tables
from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON

TOLERANCE = 2e-6
HEADS, HEAD_DIM = 4, 8

# Two rows: clean and masked blocks; padding in the middle and at the end; in the second row a
# query that sees nothing although it is not padding (block 5 has no key here, horizon -1).
QUERY_BLOCK = np.array([[0, 1, PAD_BLOCK, 3, 4], [1, 5, 3, 3, PAD_BLOCK]])
QUERY_HORIZON = np.array([[0, 1, PAD_HORIZON, 2, 2], [1, -1, 2, 2, PAD_HORIZON]])
KEY_BLOCK = np.array([[0, 1, 2, 3, 4, PAD_BLOCK, 0], [PAD_BLOCK, 0, 1, 1, 2, 3, PAD_BLOCK]])
QUERY_SEGMENT = np.array([[0, 0, 0, 1, 1], [0, 0, 1, 0, 1]])
KEY_SEGMENT = np.array([[0, 0, 1, 1, 1, 0, 1], [0, 0, 1, 0, 1, 1, 0]])
TAGS = tuple(jnp.asarray(tags) for tags in (QUERY_BLOCK, QUERY_HORIZON, KEY_BLOCK))
NOTHING_SEEN = (QUERY_BLOCK == PAD_BLOCK) | (QUERY_BLOCK == 5)


@pytest.fixture(params=["reference", "blockwise"])
def attend(request):
    """The entry point with each of the portable implementations."""
    entry = functools.partial(step_causal_attention, num_heads=HEADS, implementation=request.param)
    static = ("num_kv_heads", "scale", "return_lse")
    return tiny.quick_jit(entry, static_argnames=static)


def draw(kv_heads=HEADS, layers=None, seed=0):
    rng = np.random.default_rng(seed)
    lead = () if layers is None else (layers,)
    q = rng.normal(size=(2, 5, HEADS * HEAD_DIM))
    k, v = rng.normal(size=(2, *lead, 2, 7, kv_heads * HEAD_DIM))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v))


def in_loops(q, k, v, *, segments=None, scale=HEAD_DIM**-0.5):
    """Returns output and log-sum-exp, and the matrix of who sees whom."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    kv_heads = k.shape[-1] // HEAD_DIM
    out, lse = np.zeros(q.shape), np.full((2, HEADS, 5), NOTHING_SEEN_LSE)
    for b in range(2):
        for i in range(5):
            sees = [
                QUERY_BLOCK[b, i] != PAD_BLOCK
                and (key <= QUERY_HORIZON[b, i] or key == QUERY_BLOCK[b, i])
                and (segments is None or segments[0][b, i] == segments[1][b, j])
                for j, key in enumerate(KEY_BLOCK[b])
            ]
            for h in range(HEADS):
                own = slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)
                shared = h * kv_heads // HEADS
                theirs = slice(shared * HEAD_DIM, (shared + 1) * HEAD_DIM)
                out[b, i, own], total = oracles.attention_row(
                    q[b, i, own], k[b, :, theirs], v[b, :, theirs], sees, scale
                )
                lse[b, h, i] = NOTHING_SEEN_LSE if total is None else total
    return out, lse


@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_attention_is_softmax_in_loops(attend, kv_heads):
    q, k, v = draw(kv_heads)
    out, lse = attend(q, k, v, *TAGS, num_kv_heads=kv_heads, return_lse=True)
    expected, expected_lse = in_loops(q, k, v)
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


def test_tokens_of_other_segments_are_not_seen(attend):
    q, k, v = draw()
    segments = jnp.asarray(QUERY_SEGMENT), jnp.asarray(KEY_SEGMENT)
    out = attend(q, k, v, *TAGS, query_segment=segments[0], key_segment=segments[1])
    expected, _ = in_loops(q, k, v, segments=(QUERY_SEGMENT, KEY_SEGMENT))
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE)


def test_scale_replaces_the_root_of_the_head_width(attend):
    q, k, v = draw()
    out = attend(q, k, v, *TAGS, scale=0.7)
    expected, _ = in_loops(q, k, v, scale=0.7)
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_of_the_stacked_cache_is_that_layer(attend, layer):
    q, k, v = draw(layers=3)
    stacked = attend(q, k, v, *TAGS, layer=jnp.int32(layer))
    alone = attend(q, k[layer], v[layer], *TAGS)
    np.testing.assert_array_equal(stacked, alone)


def test_rows_that_see_nothing_are_exactly_zero(attend):
    out, lse = attend(*draw(), *TAGS, return_lse=True)
    assert not np.asarray(out)[NOTHING_SEEN].any()
    assert (np.moveaxis(lse, 1, 2)[NOTHING_SEEN] == NOTHING_SEEN_LSE).all()


def test_what_lies_in_empty_cache_slots_reaches_nobody(attend):
    q, k, v = draw()
    expected = attend(q, k, v, *TAGS)
    empty = jnp.asarray(KEY_BLOCK == PAD_BLOCK)[..., None]
    k, v = (jnp.where(empty, 1e30, x) for x in (k, v))
    out = attend(q, k, v, *TAGS)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_gradient_is_that_of_softmax_in_loops(attend, kv_heads):
    q, k, v = draw(kv_heads)
    out_gradient = np.random.default_rng(1).normal(size=q.shape)

    @tiny.quick_jit
    def pulled_back(pulled, *qkv):
        entry = functools.partial(attend.__wrapped__, num_kv_heads=kv_heads)
        return jax.vjp(lambda *qkv: entry(*qkv, *TAGS), *qkv)[1](pulled)

    gradients = pulled_back(jnp.asarray(out_gradient, jnp.float32), q, k, v)
    for ours, expected in zip(gradients, backward_in_loops(q, k, v, out_gradient), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
    assert not np.asarray(gradients[0])[NOTHING_SEEN].any()
    assert not np.asarray(gradients[1])[KEY_BLOCK == PAD_BLOCK].any()


def backward_in_loops(q, k, v, out_gradient):
    """The chain rule through softmax: d score = p (d p - sum of p d p)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    _, lse = in_loops(q, k, v)
    grad_q, grad_k, grad_v = (np.zeros_like(x) for x in (q, k, v))
    share = HEADS // (k.shape[-1] // HEAD_DIM)
    for b in range(2):
        for i, h in np.ndindex(5, HEADS):
            if NOTHING_SEEN[b, i]:
                continue
            own = slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)
            theirs = slice(h // share * HEAD_DIM, (h // share + 1) * HEAD_DIM)
            sees = (KEY_BLOCK[b] <= QUERY_HORIZON[b, i]) | (KEY_BLOCK[b] == QUERY_BLOCK[b, i])
            scores = k[b, :, theirs] @ q[b, i, own] * HEAD_DIM**-0.5
            p = np.where(sees, np.exp(np.where(sees, scores - lse[b, h, i], 0)), 0)
            grad_p = v[b, :, theirs] @ out_gradient[b, i, own]
            grad_score = p * (grad_p - (p * grad_p).sum()) * HEAD_DIM**-0.5
            grad_q[b, i, own] += grad_score @ k[b, :, theirs]
            grad_k[b, :, theirs] += np.outer(grad_score, q[b, i, own])
            grad_v[b, :, theirs] += np.outer(p, out_gradient[b, i, own])
    return grad_q, grad_k, grad_v


def test_gradients_of_a_batch_of_padding_are_zero_and_not_nan(attend):
    q, k, v = draw()
    nobody = jnp.full((2, 5), PAD_BLOCK), jnp.full((2, 5), PAD_HORIZON), jnp.full((2, 7), PAD_BLOCK)

    @tiny.quick_jit
    @jax.value_and_grad
    def summed(qkv):
        return attend.__wrapped__(*qkv, *nobody).sum()

    value, gradients = summed((q, k, v))
    assert value == 0
    assert all(not np.asarray(gradient).any() for gradient in gradients)


def test_huge_logits_do_not_overflow(attend):
    q, k, v = draw()
    out, lse = attend(q * 1e4, k, v, *TAGS, return_lse=True)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


def test_bfloat16_stays_bfloat16_with_a_float32_softmax(attend):
    q, k, v = (x.astype(jnp.bfloat16) for x in draw())
    out, lse = attend(q, k, v, *TAGS, return_lse=True)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    expected, expected_lse = in_loops(q, k, v)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=0, atol=2e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


# ---------------------------------------------------------------------------------------------
# What runs where.


@dataclasses.dataclass
class Device:
    compute_capability: str
    device_kind: str = "a GPU"


@pytest.fixture
def gpu(monkeypatch):
    """Returns a function that makes jax report a GPU and a jax version.

    Its kernel is already admitted.
    """

    def pretend(capability: str, version=(0, 11, 2)):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda: [Device(capability)])
        monkeypatch.setattr(jax, "__version_info__", version)
        admitted = admission.Verdict(Device.device_kind, attention.device_kernel())
        monkeypatch.setattr(admission, "admitted", lambda _: admitted)

    for cached in (attention._default, attention._announce):
        cached.cache_clear()
    yield pretend
    monkeypatch.undo()
    attention._default.cache_clear()


GPUS = {
    "hopper": (("9.0",), "pallas_gpu", ""),
    "ampere": (("8.0",), "pallas_triton", ""),
    "ada": (("8.9",), "pallas_triton", ""),
    "blackwell": (("10.0",), "pallas_triton", ""),
    "old_jax": (("9.0", (0, 10, 2)), "pallas_triton", ""),
    "turing": (("7.5",), "blockwise", "has none for compute capability 7.5"),
    "another vendor": (("gfx942",), "blockwise", "has none for compute capability gfx942"),
    "jax without Triton": (("8.0",), "blockwise", "has none for compute capability 8.0"),
}


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_its_kernel_or_runs_in_blocks_and_says_so_once(
    gpu, monkeypatch, caplog, name
):
    given, expected, why = GPUS[name]
    if name == "jax without Triton":
        monkeypatch.setattr(attention, "_has_triton", lambda: False)
    gpu(*given)
    assert attention._chosen(None, 64, 64, 128, jnp.bfloat16) in (expected, "reference")
    assert not caplog.messages  # such a call does not run in blocks
    for _ in range(2):
        attention._default.cache_clear()
        assert attention._chosen(None, LONG, LONG, 128, jnp.bfloat16) == expected
    assert len(caplog.messages) == bool(why)
    assert why in caplog.text


def test_layers_of_one_form_share_a_kernel():
    """A program has one forward and one backward function for all layers of a form."""
    attend = functools.partial(step_causal_attention, num_heads=HEADS, implementation="blockwise")

    def loss(x, block, horizon):
        for length in (5, 5, 5, 3):
            tags = block[:, :length], horizon[:, :length], block[:, : x.shape[1]]
            x = x[:, :length] + attend(x[:, :length], x, x, *tags)
        return x.sum()

    wide = jax.ShapeDtypeStruct((2, 5, HEADS * HEAD_DIM), jnp.float32)
    tag = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    lowered = jax.jit(jax.grad(loss)).lower(wide, tag, tag).as_text()
    for function in ("_forward", "_backward"):
        defined = re.findall(rf"func private @({function}\w*)\(", lowered)
        assert len(defined) == 2
        assert len(re.findall(rf"call @{function}\w*\(", lowered)) == 4


def test_on_the_cpu_it_is_the_reference():
    assert attention.default_implementation() == "reference"


LONG = 2304  # squared, too many pairs for the reference, also on a GPU


@pytest.mark.parametrize(
    ("length", "head_dim", "dtype", "expected"),
    [
        (LONG, 128, jnp.bfloat16, "kernel"),
        (LONG, 64, jnp.float16, "kernel"),
        (LONG, 128, jnp.float32, "blockwise"),
        (LONG, 96, jnp.bfloat16, "blockwise"),
        (64, 128, jnp.float32, "reference"),
        (64, 128, jnp.bfloat16, "kernel"),
    ],
)
@pytest.mark.parametrize(
    ("capability", "kernel"), [("9.0", "pallas_gpu"), ("8.0", "pallas_triton")]
)
def test_what_a_gpu_kernel_does_not_take_runs_in_blocks(
    gpu, length, head_dim, dtype, expected, capability, kernel
):
    """Tables match the implementation that the call then chooses."""
    gpu(capability)
    expected = kernel if expected == "kernel" else expected
    tag = jax.ShapeDtypeStruct((1, length), jnp.int32)
    wide = jax.ShapeDtypeStruct((1, length, 2 * head_dim), dtype)
    ran, made = [], []

    def run(q, block):
        tables = make_tables(block, block, block, head_dim=head_dim, dtype=dtype)
        made.append(tables)
        return step_causal_attention(q, q, q, block, block, block, num_heads=2, tables=tables)

    def watched(chosen, head_dim, scale, q, *rest):
        ran.append(chosen)
        return q, jnp.zeros(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_run", watched)
        jax.eval_shape(run, wide, tag)
    assert ran == [expected]
    kinds = {kernel: GpuTables, "blockwise": Tables, "reference": type(None)}
    assert isinstance(made[0], kinds[expected])


def test_few_pairs_get_the_reference_where_there_is_no_kernel(gpu):
    gpu("7.5")

    def makes(length, implementation=None):
        made = []

        def make(tag):
            made.append(make_tables(tag, tag, tag, implementation=implementation))

        jax.eval_shape(make, jax.ShapeDtypeStruct((1, length), jnp.int32))
        return made != [None]

    assert [makes(2048), makes(LONG), makes(512, "blockwise")] == [False, True, True]


def test_a_model_whose_heads_no_kernel_takes_asks_for_no_kernel(gpu, monkeypatch, caplog):
    """It was not admitted, so that asking would warn of a kernel that was never checked."""
    gpu("9.0")
    monkeypatch.setattr(admission, "admitted", lambda _: pytest.fail("asked for"))
    for length, expected in ((2048, "reference"), (LONG, "blockwise")):
        assert attention._chosen(None, length, length, 48, jnp.bfloat16) == expected
    assert attention.runs_here("reference")
    assert "runs without a kernel" in caplog.text and "head_dim=48" in caplog.text


def test_no_kernel_asks_for_the_size_of_its_grid():
    """A kernel that is called with several grids may see that of the first (jax issue 40847).

    So it is from jax 0.11.0 to 0.12.0; kernels here are called with several grids in one program.
    """
    folder = pathlib.Path(attention.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in folder.glob("*.py")]
    assert any("pallas_call" in source for source in sources)
    assert not [source for source in sources if "num_programs" in source]


REFUSALS = {
    "choose one of reference": {"implementation": "flash"},
    "do not split into num_heads=3": {"num_heads": 3},
    "num_kv_heads=3": {"num_kv_heads": 3},
    r"k has shape \(2, 7, 32\) and layer=1": {"layer": 1},
    "give both or neither": {"query_segment": jnp.asarray(QUERY_SEGMENT)},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals_say_what_was_given_and_what_is_allowed(message):
    with pytest.raises(ValueError, match=message):
        step_causal_attention(*draw(), *TAGS, **({"num_heads": HEADS} | REFUSALS[message]))


def test_a_stacked_cache_without_its_layer_is_refused():
    with pytest.raises(ValueError, match="needs `layer`"):
        step_causal_attention(*draw(layers=3), *TAGS, num_heads=HEADS)
