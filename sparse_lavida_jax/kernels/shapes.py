# SPDX-License-Identifier: Apache-2.0
"""Frozen tags that attention is measured on: shapes of the paper's training and of its sampler.

Tags are data and decide how much there is to compute, so a benchmark that draws its own can win by
luck. These are drawn from a seed, sorted by (segment, block) as the model sorts its tokens, and
pinned by their SHA-256 in a test.
"""

import dataclasses
import hashlib

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax.orders import counts
from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON

REGISTERS = 64
CELLS = 1024
PROMPT = 256  # of text to image


@dataclasses.dataclass(frozen=True)
class Tags:
    """Tags of one row: queries [s], keys [t]; the same ones but in decoding."""

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
    return (
        "t2i_1536", "edit_3456", "single_8152", "packed_8192",
        "decode_early", "decode_mid", "decode_late", "full_8192",
    )  # fmt: skip


def tags(name: str) -> Tags:
    """Returns the tags of a shape.

    Raises:
        ValueError: there is no such shape.
    """
    if name == "t2i_1536":
        return _row(prompt=PROMPT, response=CELLS, clean=4, masked=4, share=0.5)
    if name == "edit_3456":  # 871 vision tokens, 1024 source cells, the words
        return _row(prompt=2176, response=CELLS, clean=4, masked=4, share=0.5)
    if name == "single_8152":
        return _row(prompt=3800, response=4096, clean=8, masked=4, share=0.5)
    if name == "packed_8192":
        return _packed(8192)
    if name in ("decode_early", "decode_mid", "decode_late"):
        return _decode({"early": 8, "mid": 32, "late": 56}[name.removeprefix("decode_")])
    if name == "full_8192":  # one block: what the generality costs where nothing is skipped
        nothing = np.zeros(8192, np.int32)
        return Tags(nothing, nothing, nothing)
    raise ValueError(f"there is no shape {name!r}; choose one of {', '.join(names())}.")


def _row(*, prompt: int, response: int, clean: int, masked: int, share: float, seed: int = 0):
    """A training row: `share` of the response masked, blocks drawn uniformly (design: uniform)."""
    rng = np.random.default_rng(seed)
    hidden = round(response * share)
    block = np.concatenate([
        np.zeros(prompt, int),
        rng.integers(1, clean + 1, response - hidden),
        rng.integers(clean + 1, clean + masked + 1, hidden),
        np.repeat(np.arange(clean + 1, clean + masked + 1), REGISTERS),
    ])  # fmt: skip
    block = np.sort(block).astype(np.int32)
    horizon = np.minimum(block, clean).astype(np.int32)
    return Tags(block, horizon, block)


def _packed(length: int, seed: int = 0) -> Tags:
    """Rows of one text-to-image example after another, each a segment, filled up with padding.

    What training passes of an example: the masked tokens of its masked blocks, no others.
    """
    rng = np.random.default_rng(seed)
    blocks, horizons, segments, used = [], [], [], 0
    while True:
        clean, masked = int(rng.integers(1, 9)), int(rng.integers(1, 5))
        hidden = float(rng.uniform(0.05, 0.95))
        kept = int(rng.integers(64, 257))  # masked cells that are in a block at all
        row = _row(
            prompt=int(rng.integers(32, 257)),
            response=round(CELLS * (1 - hidden)) + kept,
            clean=clean,
            masked=masked,
            share=kept / (round(CELLS * (1 - hidden)) + kept),
            seed=int(rng.integers(2**31)),
        )
        if used + len(row.key_block) > length:
            break
        blocks.append(row.query_block)
        horizons.append(row.query_horizon)
        segments.append(np.full(len(row.key_block), len(segments)))
        used += len(row.key_block)
    rest = length - used
    block = np.concatenate([*blocks, np.full(rest, PAD_BLOCK)]).astype(np.int32)
    horizon = np.concatenate([*horizons, np.full(rest, PAD_HORIZON)]).astype(np.int32)
    segment = np.concatenate([*segments, np.full(rest, len(segments))]).astype(np.int32)
    return Tags(block, horizon, block, segment, segment)


def _decode(step: int) -> Tags:
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
    return Tags(query, horizon, key)
