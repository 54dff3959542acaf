# SPDX-License-Identifier: Apache-2.0
"""Frozen tags for attention benchmarks: shapes of the paper's training and of its sampler.

Tags are data and decide how much there is to compute, so a benchmark that draws its own can win by
luck. These are stored in `shapes.json`, in runs of equal tags, and never change. All are sorted by
(segment, block), as the model sorts its tokens.

| shape | tokens |
| --- | --- |
| t2i_1536 | a training row of text to image: a prompt of 256, 1,024 cells in 4 clean blocks and 4 masked ones, half of the cells each, blocks drawn uniformly, 64 registers for every masked block |
| edit_3456 | the same after 871 vision tokens, 1,024 source cells and the words of an edit |
| single_8152 | the same after 3,800 tokens, with 4,096 cells in 8 clean blocks |
| packed_8192 | a row of `configs/sft_1024.py` with `data.packing=6`: six examples of text to image, each a segment (`tests/kernels/test_shapes.py` recreates it) |
| decode_early, _mid, _late | step 8, 32 or 56 of 64 of an image: newest, decoded and register tokens, padded to a multiple of 64, over a cache of 1,536 slots |
| full_8192 | one block: the cost of generality if nothing is skipped |
"""  # noqa: E501

import dataclasses
import functools
import hashlib
import json
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Int

FROZEN = pathlib.Path(__file__).with_name("shapes.json")


@dataclasses.dataclass(frozen=True)
class RowTags:
    """Tags of one row: queries [s], keys [t]; both are the same except in decoding."""

    query_block: Int[np.ndarray, " s"]
    query_horizon: Int[np.ndarray, " s"]
    key_block: Int[np.ndarray, " t"]
    query_segment: Int[np.ndarray, " s"] | None = None
    key_segment: Int[np.ndarray, " t"] | None = None

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            if values is not None:
                digest.update(np.ascontiguousarray(values, "<i4").tobytes())
        return digest.hexdigest()


@functools.cache
def _frozen() -> dict[str, Any]:
    return json.loads(FROZEN.read_text())


def names() -> tuple[str, ...]:
    return tuple(_frozen())


def tags(name: str) -> RowTags:
    """Returns the tags of a shape.

    Raises:
        ValueError: there is no such shape.
    """
    if name not in _frozen():
        raise ValueError(f"there is no shape {name!r}; choose one of {', '.join(names())}.")
    query, key = (_of_tokens(_frozen()[name][kind]) for kind in ("queries", "keys"))
    segments = query.get("segment"), key.get("segment")
    return RowTags(query["block"], query["horizon"], key["block"], *segments)


def _of_tokens(runs: dict[str, list[int]]) -> dict[str, Int[np.ndarray, " s"]]:
    return {
        tag: np.repeat(np.array(values, np.int32), runs["count"])
        for tag, values in runs.items()
        if tag != "count"
    }
