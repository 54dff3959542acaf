# SPDX-License-Identifier: Apache-2.0
"""PyTorch's FlexAttention on the same numbers and tags, where PyTorch and CUDA are present."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from sparse_lavida_jax.bench.cases import CHECKED_HEADS, Case
from sparse_lavida_jax.visibility import PAD_BLOCK, visible


def rule(tags: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns the visibility rule as FlexAttention takes it: of indices, on tensors of tags [s]."""
    query_block, query_horizon, key_block, query_segment, key_segment = tags

    def sees(batch, head, query, key):
        del batch, head
        segments = () if query_segment is None else (query_segment[query], key_segment[key])
        return visible(
            query_block[query], query_horizon[query], key_block[key], *segments
        ) & (query_block[query] != PAD_BLOCK)  # fmt: skip

    return sees


Made = tuple[Callable[[], Any], Callable[[Any], None], Callable[[], tuple[np.ndarray, ...]], str]


def prepare(case: Case, numbers: tuple[np.ndarray, ...]) -> Callable[[bool], Made]:
    """Returns what makes run, wait, outputs and a note, as `methods.Program` has them.

    It takes whether the BlockMask is made (compiled too) in every call, as tags that are new data
    need. Heads come before tokens, as FlexAttention likes them; all rows have the same tags, so
    that one BlockMask serves them all. The calls of a short shape are one CUDA graph.

    Raises:
        ModuleNotFoundError: there is no PyTorch.
        RuntimeError: it has no CUDA.
    """
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("this PyTorch has no CUDA")
    package: Any = importlib.import_module("torch.nn.attention.flex_attention")
    torch._dynamo.reset()  # guards of the cases before would be tried first
    attention = torch.compile(package.flex_attention, dynamic=False)
    make = torch.compile(package.create_block_mask, dynamic=False)
    q, k, v, cotangent = (
        torch.tensor(x, device="cuda", dtype=torch.bfloat16).transpose(1, 2).contiguous()
        for x in numbers
    )
    t = case.tags
    fields = (t.query_block, t.query_horizon, t.key_block, t.query_segment, t.key_segment)
    tags = tuple(None if tag is None else torch.tensor(tag, device="cuda") for tag in fields)
    lengths = len(t.query_block), len(t.key_block)
    block_mask = functools.partial(make, rule(tags), None, None, *lengths, device="cuda")
    made = block_mask()

    def once(q, k, v, builds):
        mask = block_mask() if builds else made
        if not case.backward:
            with torch.no_grad():
                return (attention(q, k, v, block_mask=mask),)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = attention(q, k, v, block_mask=mask)
        return (out, *torch.autograd.grad(out, (q, k, v), cotangent))

    def all_calls():
        found = once(q, k, v, builds=False)
        for _ in range(case.calls - 1):
            found = once(*(found[1:] if case.backward else (found[0], k, v)), builds=False)
        return found

    def outputs():
        found = once(q, k, v, builds=False)
        heads = (x.transpose(1, 2)[:, :, list(CHECKED_HEADS)] for x in found)
        return tuple(x.detach().float().cpu().numpy() for x in heads)

    def wait(found):
        del found
        torch.cuda.synchronize()

    def program(builds: bool) -> Made:
        if builds:
            return functools.partial(once, q, k, v, builds=True), wait, outputs, ""
        run, note = _graph(torch, all_calls) if case.calls > 1 else (all_calls, "")
        return run, wait, outputs, note

    return program


def _graph(torch: Any, run: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """Returns the calls as one CUDA graph, which the host starts at once; or as they are."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        return run, f"no CUDA graph ({str(error)[:80]}): short calls may wait for the host"
    return graph.replay, ""
