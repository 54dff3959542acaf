# SPDX-License-Identifier: Apache-2.0
"""The attention benchmark chains calls, builds masks from the rule, and counts shapes."""

import importlib.util
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, methods
from benchmarks.methods import Case
from sparse_lavida_jax.kernels import shapes
from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON

BLOCK = np.repeat([0, 1, 2, 3, PAD_BLOCK], [40, 30, 20, 30, 8]).astype(np.int32)
HORIZON = np.where(BLOCK == PAD_BLOCK, PAD_HORIZON, np.minimum(BLOCK, 2)).astype(np.int32)
SEGMENT = np.repeat([0, 1], 64).astype(np.int32)
TAGS = shapes.RowTags(BLOCK, HORIZON, BLOCK, SEGMENT, SEGMENT)


def in_loops(tags):
    """Applies the rule to every pair in loops."""
    return np.array([
        [
            block != PAD_BLOCK and segment == other and (key <= horizon or key == block)
            for key, other in zip(tags.key_block, tags.key_segment, strict=True)
        ]
        for block, horizon, segment in zip(
            tags.query_block, tags.query_horizon, tags.query_segment, strict=True
        )
    ])  # fmt: skip


def test_the_mask_of_the_others_is_the_rule():
    np.testing.assert_array_equal(Case("row", 1, TAGS).mask, in_loops(TAGS))


def test_flex_attention_gets_the_same_rule_of_indices():
    sees = methods.rule((BLOCK, HORIZON, BLOCK, SEGMENT, SEGMENT))
    at = np.arange(len(BLOCK))
    np.testing.assert_array_equal(sees(0, 0, at[:, None], at[None]), in_loops(TAGS))


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None, reason="only where PyTorch is absent"
)
def test_without_pytorch_flex_attention_says_so():
    case = Case("row", 1, TAGS, heads=1)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        methods.methods(case)["flex"](case.numbers())


def test_flex_attention_does_without_a_cuda_graph_and_keeps_what_it_compiled(monkeypatch):
    torch = mock.MagicMock()
    torch.cuda.graph.side_effect = RuntimeError("capture failed")
    for name in ("torch", "torch.nn.attention.flex_attention"):
        monkeypatch.setitem(sys.modules, name, torch)
    case = Case("row", 1, TAGS, heads=1)
    found = methods.methods(case)
    program = found["flex"](case.numbers())
    program.run()
    assert program.calls == methods.CALLS
    assert program.note.startswith("no CUDA graph (capture failed)")
    found["flex_with_mask"](case.numbers())
    torch._dynamo.reset.assert_called_once_with()


def test_work_is_counted_in_pairs_and_in_tiles():
    forward, backward = (Case("row", 2, TAGS, heads=3, backward=b) for b in (False, True))
    a_pair = 4 * 128 * 3 * 2
    assert forward.flops == {
        "useful": a_pair * in_loops(TAGS).sum(), "tile": a_pair * 128**2, "dense": a_pair * 128**2
    }  # fmt: skip
    assert backward.flops == {name: 3.5 * n for name, n in forward.flops.items()}
    assert forward.least_bytes * 2 == backward.least_bytes == 2 * 8 * 2 * 3 * 128 * 128


@pytest.mark.parametrize("backward", [False, True])
def test_calls_of_a_short_shape_follow_on_each_other_and_the_first_is_compared(backward):
    case = Case("row", 1, TAGS, heads=2, backward=backward)
    numbers = case.numbers()
    program = methods.by_library(case, "xla", numbers, masked=True)
    assert program.calls == methods.CALLS
    wanted = methods.reference(case, numbers)
    assert methods.difference(program.outputs(), wanted, case) < attention.AGREES
    mask = jnp.asarray(case.mask)[None, None]
    q, k, v, pulled = (jnp.asarray(x, jnp.bfloat16) for x in numbers)

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")

    for _ in range(methods.CALLS):
        if backward:
            out, pull_back = jax.vjp(attend, q, k, v)
            q, k, v = pull_back(pulled)
        else:
            out = q = attend(q, k, v)
    np.testing.assert_allclose(
        np.asarray(program.run()[1][0], np.float32), np.asarray(out, np.float32), atol=2e-2
    )


def test_something_that_is_off_is_seen():
    case = Case("row", 1, TAGS, heads=2)
    numbers = case.numbers()
    unmasked = methods.by_library(case, "xla", numbers, masked=False).outputs()
    assert methods.difference(unmasked, methods.reference(case, numbers), case) > attention.AGREES


@pytest.mark.parametrize("implementation", ["pallas_tpu", "blockwise"])
def test_ours_decodes_from_a_layer_of_the_stacked_cache(implementation):
    tags = shapes.RowTags(BLOCK[40:], HORIZON[40:], BLOCK)
    case = Case("decode_row", 1, tags, heads=1)
    numbers = case.numbers()
    program = methods.ours(case, numbers, implementation=implementation)
    assert program.run.args[1].shape == (methods.LAYERS, 1, 128, 128)
    wanted = methods.reference(case, numbers)
    assert methods.difference(program.outputs(), wanted, case) < attention.AGREES
