# SPDX-License-Identifier: Apache-2.0
"""Frozen tags that attention is measured on: shapes of the paper's training and of its sampler.

Tags are data and decide how much there is to compute, so a benchmark that draws its own can win by
luck. These are drawn from a seed, sorted by (segment, block) as the model sorts its tokens, and
pinned by their SHA-256. Those of the packed row are what training made (`tests/unit/test_shapes.py`
makes them again), and lie in a file.
"""

import dataclasses
import hashlib
import json
import pathlib

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax.orders import counts
from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON

REGISTERS = 64
CELLS = 1024
PROMPT = 256  # of text to image
PACKED = pathlib.Path(__file__).with_name("packed_8192.json")
# Tokens of the prompt (of an edit 871 vision tokens, 1024 source cells, the words), those of the
# response, clean blocks.
ROWS = {
    "t2i_1536": (PROMPT, CELLS, 4),
    "edit_3456": (2176, CELLS, 4),
    "single_8152": (3800, 4096, 8),
}
STEPS = {"decode_early": 8, "decode_mid": 32, "decode_late": 56}
SHA256 = {
    "t2i_1536": "bf9eab299ddc9b1f86da9f2080581ae5ef35930c190c4ea3119ec852343bbe56",
    "edit_3456": "defc1146389322b052cc3aaaff292b5db7c85d5dca1a51a4b3b738b21a44793e",
    "single_8152": "404fcad166a48a270c758b8d177ca542c451f56117e04fa3366ef8bf7bc78561",
    "packed_8192": "e0341b68838b6c88f640757244a6f6365b5bbb5d356a023e7778ef6f19090bd4",
    "decode_early": "59a726ceb1051435eb9bf2600e6d43933f08025cad8c38f21e70546e7a589b94",
    "decode_mid": "d9f4c72b40995ea93d12bc2e4b3f550cfb677af2e9bc27f6ed7d7b5ada95d0ca",
    "decode_late": "a0d9182d8bb4b9621cdbc1239ffae50d5d8d51245060c642fe60284807d935d8",
    "full_8192": "3a3ed164e42500a1c5b2d0093f0a813d27dc50d038f330cc100a7e70ece2e6e4",
}


@dataclasses.dataclass(frozen=True)
class RowTags:
    """Tags of one row: queries [s], keys [t]; the same ones except in decoding."""

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


def names() -> tuple[str, ...]:
    return tuple(SHA256)


def tags(name: str) -> RowTags:
    """Returns the tags of a shape.

    Raises:
        ValueError: there is no such shape.
    """
    if name in ROWS:
        return _row(*ROWS[name])
    if name in STEPS:
        return _decode(STEPS[name])
    if name == "packed_8192":
        return _packed()
    if name == "full_8192":  # one block: what the generality costs where nothing is skipped
        nothing = np.zeros(8192, np.int32)
        return RowTags(nothing, nothing, nothing)
    raise ValueError(f"there is no shape {name!r}; choose one of {', '.join(names())}.")


def _row(prompt: int, response: int, clean: int, masked: int = 4) -> RowTags:
    """A training row: half of the response masked, blocks drawn uniformly (design: uniform)."""
    rng, hidden = np.random.default_rng(0), response // 2
    block = np.concatenate([
        np.zeros(prompt, int),
        rng.integers(1, clean + 1, response - hidden),
        rng.integers(clean + 1, clean + masked + 1, hidden),
        np.repeat(np.arange(clean + 1, clean + masked + 1), REGISTERS),
    ])  # fmt: skip
    block = np.sort(block).astype(np.int32)
    horizon = np.minimum(block, clean).astype(np.int32)
    return RowTags(block, horizon, block)


def _packed() -> RowTags:
    """A row of `configs/sft_1024.py` with `data.packing=6`, its streams sorted as one.

    Six text-to-image examples, each a segment: prompt, image, registers of up to 8 masked blocks;
    the padding of both streams comes last.
    """
    runs = np.array(json.loads(PACKED.read_text()), np.int32)
    block, horizon, segment = np.repeat(runs[:, :3], runs[:, 3], axis=0).T
    return RowTags(block, horizon, block, segment, segment)


def _decode(step: int) -> RowTags:
    """One image step of 64: [newest | decode | registers] over a cache of 1,536 slots.

    Padding fills the step up to the next width that the sampler compiles.
    """
    per_step = counts("shift", 64, CELLS, 5.0)
    newest, decode = int(per_step[step - 1]), int(per_step[step])
    own = [step] * newest + [step + 1] * (decode + REGISTERS)
    width = -(-len(own) // 64) * 64
    query = np.array(own + [PAD_BLOCK] * (width - len(own)), np.int32)
    horizon = np.where(query == PAD_BLOCK, PAD_HORIZON, np.minimum(query, step)).astype(np.int32)
    before = np.repeat(np.arange(1, step), per_step[: step - 1])
    key = np.full(1536, PAD_BLOCK, np.int32)
    key[:PROMPT] = 0
    key[PROMPT : PROMPT + len(before)] = before
    key[PROMPT + len(before) : PROMPT + len(before) + width] = query
    return RowTags(query, horizon, key)
