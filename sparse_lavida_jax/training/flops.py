# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a training step that every way of training needs.

A matrix of m x n takes 2 m n per token in the forward pass, as much again for the gradient of its
input, and as much for its own if it is trained. Attention takes 4 (h d) per visible pair of query
and key in the forward pass, and twice that in the backward pass. Padding, recomputation by `remat`,
norms and look-ups are not counted, nor is the understanding stream after the last joint layer if
only an image is predicted. Model FLOPs utilisation (MFU, arXiv:2204.02311) is this number relative
to what the devices could do.
"""

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import config
from sparse_lavida_jax.data.corrupted_rows import Corrupted
from sparse_lavida_jax.kernels import devices
from sparse_lavida_jax.tags import STREAMS, Stream, TokenTags
from sparse_lavida_jax.training import style
from sparse_lavida_jax.visibility import PAD_BLOCK, AnyArray


@dataclasses.dataclass(frozen=True)
class Work:
    """The work in a batch.

    Attributes:
        tokens: in both streams, without padding.
        slots: tokens with padding.
        with_loss: tokens that have a loss.
        flops: for one step.
    """

    tokens: int = 0
    slots: int = 0
    with_loss: int = 0
    flops: float = 0.0

    def plus(self, more: "Work", times: int = 1) -> "Work":
        """Returns the sum of this work and `times` times `more`."""
        mine, others = dataclasses.astuple(self), dataclasses.astuple(more)
        return Work(*(a + times * b for a, b in zip(mine, others, strict=True)))


def peak(device_kind: str) -> float | None:
    """Returns a device's peak operations per second; None if it is not in the table."""
    device = devices.device(device_kind)
    return None if device is None else device.flops


def work_of(batch: Corrupted, model: config.Model, trained: float = 1.0) -> Work:
    """Counts the work in a batch on the host, without that of distillation (`training/distil.py`).

    Args:
        trained: share of the numbers in matrices that are trained, from 0 to 1.
    """
    streams = {"understanding": batch.understanding, "generation": batch.generation}
    held = {name: stream for name, stream in streams.items() if stream is not None}
    tokens = sum(count_tokens(stream.tags.block != PAD_BLOCK) for stream in held.values())
    slots = sum(np.size(stream.tags.block) for stream in held.values())
    weights = zip(STREAMS, (batch.text_weight, batch.image_weight), strict=True)
    with_loss = {name: count_tokens(weight) for name, weight in weights}
    last = {"understanding", "generation"} if batch.predicts == "both" else {batch.predicts}
    products, pairs = _of_a_pass(held, last, model)
    products += sum(with_loss[name] * head_size(name, model) for name in held)
    if model.style_parts and batch.predicts == "generation":
        asked = held | {"generation": style.asked(batch, model)}
        of_code = _of_a_pass(asked, last, model)
        products, pairs = products + of_code[0], pairs + of_code[1]
    if batch.pixels is not None:
        views = int(np.prod(batch.pixels.shape[:-3]))
        patches = (model.vision.image_size // model.vision.patch_size) ** 2
        products += views * patches * _vision_size(model.vision)
        pairs += views * patches**2 * model.vision.num_layers * model.vision.width / _heads(model)
    flops = products * (4 + 2 * trained) + 12 * _heads(model) * pairs
    return Work(tokens, slots, sum(with_loss.values()), float(flops))


def _of_a_pass(
    held: Mapping[str, Stream], last: Collection[str], model: config.Model
) -> tuple[float, float]:
    """Returns the products of layers and embeddings per operation, and the pairs of attention.

    Args:
        held: the streams that are passed.
        last: those that pass the split layers.
    """
    # In joint layers all tokens see each other; in split layers each stream sees itself.
    products, pairs = 0.0, float(model.num_joint_layers * _visible_pairs(list(held.values())))
    for name, stream in held.items():
        tokens = count_tokens(stream.tags.block != PAD_BLOCK)
        layers = model.num_joint_layers + (model.num_split_layers if name in last else 0)
        products += layers * tokens * layer_size(name, model)
        products += tokens * _embedding_size(model) * (name == "generation")
        pairs += model.num_split_layers * _visible_pairs([stream]) * (name in last)
    return products, pairs


def with_work(model: config.Model, trained: float, batch: Corrupted) -> tuple[Corrupted, Work]:
    """Returns a batch and the work in it."""
    return batch, work_of(batch, model, trained)


def count_tokens(weights: AnyArray | None) -> int:
    """Returns how many tokens have a weight; a cell counts once, however many codes it has."""
    if weights is None:
        return 0
    held = np.asarray(weights) > 0
    return int((held if held.ndim == 2 else held.any(axis=2)).sum())


def _visible_pairs(streams: list[Stream]) -> int:
    """Returns the number of (query, key) pairs that are visible by the rule of `visibility.py`."""
    block, horizon, segment = (
        np.concatenate([np.asarray(of(stream.tags)) for stream in streams], axis=1)
        for of in (lambda x: x.block, lambda x: x.horizon, _segments)
    )
    return sum(
        _pairs_of_a_row(row[own == one], reach[own == one])
        for row, reach, own in zip(block, horizon, segment, strict=True)
        for one in np.unique(own)
    )


def _segments(tags: TokenTags) -> Int[AnyArray, "b s"]:
    return np.zeros_like(tags.block) if tags.segment is None else tags.segment


def _pairs_of_a_row(block: Int[np.ndarray, " s"], horizon: Int[np.ndarray, " s"]) -> int:
    real = block != PAD_BLOCK
    keys, own, reach = np.sort(block[real]), block[real], horizon[real]
    before = np.searchsorted(keys, reach, side="right")
    of_own = np.searchsorted(keys, own, side="right") - np.searchsorted(keys, own, side="left")
    return int((before + np.where(own > reach, of_own, 0)).sum())


def _heads(model: config.Model) -> int:
    return model.num_heads * model.head_dim


def layer_size(stream: str, model: config.Model) -> int:
    """Returns the numbers in the matrices that a token of a stream passes in one layer."""
    if stream == "understanding":
        width, hidden = model.width, model.mlp_hidden
    else:
        width, hidden = model.generation_width, model.generation_mlp_hidden
    return 4 * width * _heads(model) + 3 * width * hidden


def head_size(stream: str, model: config.Model) -> int:
    """Returns the numbers in the matrices that a token with a loss passes after the layers."""
    if stream == "understanding":
        return model.width * model.vocab_size
    width = model.generation_width
    squares = (model.codes_per_token > 1) + (model.image_head == "dit2")
    squares += model.image_head != "embed"
    squares *= model.codes_per_token
    if model.sequential_codes:  # the first code sees no other; each later one, one more
        squares += sum(earlier + 2 for earlier in range(1, model.codes_per_token))
    return width * (width * squares + model.codes_per_token * model.codebook_size)


def _embedding_size(model: config.Model) -> int:
    """Returns the numbers in the matrices that a cell passes before the layers."""
    squares = model.codes_per_token if model.codes_per_token > 1 else 0
    squares += model.codes_per_token + 1 if model.image_head != "embed" else 0
    return squares * model.generation_width**2


def _vision_size(vision: config.Vision) -> int:
    return vision.num_layers * (4 * vision.width**2 + 2 * vision.width * vision.mlp_hidden)
