# SPDX-License-Identifier: Apache-2.0
"""The operations of a step follow from the rule and the shapes of the matrices."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from sparse_lavida_jax.models import parameters
from sparse_lavida_jax.training import flops
from sparse_lavida_jax.visibility import PAD_BLOCK, visible


def oracle(params, batch, model, trained):
    """Counts in loops over the matrices by name, and over all pairs of tokens."""
    streams = {"understanding": batch.understanding, "generation": batch.generation}
    real = {name: np.asarray(s.tags.block) != PAD_BLOCK for name, s in streams.items()}
    count = {name: int(r.sum()) for name, r in real.items()}
    loss = {
        "understanding": int((batch.text_weight > 0).sum()),
        "generation": int((batch.image_weight > 0).sum()),
    }
    last = streams.keys() if batch.predicts == "both" else {batch.predicts}
    products = 0
    for name, leaf in parameters.by_name(params).items():
        parts = name.split("/")
        if parts[-1] == "kernel" and parts[0] in ("joint_layers", "split_layers"):
            # `attn_out` is shared: a generation token uses only its first columns.
            for stream in streams:
                if "attn_out" in parts:
                    width = model.width if stream == "understanding" else model.generation_width
                    size = leaf.shape[0] * leaf.shape[1] * width
                elif stream in parts:
                    size = leaf.size
                else:
                    continue
                if parts[0] == "joint_layers" or stream in last:
                    products += size * count[stream]
    products += params.text_head.kernel.size * loss["understanding"]
    g, head, embedding = model.codes_per_token, params.image_head, params.image_embedding
    a_code = sum(x.kernel.size for x in (head.cell, head.code, head.logits))
    products += (head.spread.kernel.size + g * a_code) * loss["generation"]
    a_cell = embedding.merge.kernel.size + embedding.cell.kernel.size
    products += (g * embedding.code.kernel.size + a_cell) * count["generation"]

    def pairs(names):
        tags = [
            np.concatenate([np.asarray(getattr(streams[n].tags, tag)) for n in names], axis=1)
            for tag in ("block", "horizon", "segment")
        ]
        there = np.concatenate([real[n] for n in names], axis=1)
        block, horizon, own = tags
        queries, keys = (block[:, :, None], horizon[:, :, None]), block[:, None, :]
        seen = np.asarray(visible(*queries, keys, own[:, :, None], own[:, None, :]))
        return int((seen & there[:, :, None] & there[:, None, :]).sum())

    seen = model.num_joint_layers * pairs(list(streams))
    seen += sum(model.num_split_layers * pairs([name]) for name in last)
    return products * (4 + 2 * trained) + 12 * model.num_heads * model.head_dim * seen


@pytest.mark.parametrize("predicts", ["both", "generation"])
def test_the_formula_is_a_walk_over_matrices_and_pairs(predicts):
    model = tiny.model_settings(codes_per_token=4)
    batch = dataclasses.replace(
        tiny.batch(["text", "image", "image"], model), predicts=predicts, pixels=None
    )
    work = flops.work_of(batch, model, trained=0.25)
    assert work.flops == pytest.approx(oracle(tiny.denoiser(model), shared(batch, 1), model, 0.25))
    assert (
        work.tokens
        < work.slots
        == sum(stream.tags.block.size for stream in (batch.understanding, batch.generation))
    )
    assert work.with_loss == (batch.text_weight > 0).sum() + (batch.image_weight > 0).sum()


def shared(batch, examples):
    """The batch, as if its tokens belonged to `examples` examples in turn."""

    def of(stream):
        batch_size, length = stream.tags.block.shape
        segment = np.broadcast_to(
            np.arange(length, dtype=np.int32) % examples, (batch_size, length)
        )
        layout = dataclasses.replace(stream.tags, segment=segment)
        return dataclasses.replace(stream, tags=layout)

    return dataclasses.replace(
        batch, understanding=of(batch.understanding), generation=of(batch.generation)
    )


def test_examples_that_share_a_row_do_not_see_each_other():
    model = tiny.model_settings(codes_per_token=4)
    batch = dataclasses.replace(tiny.batch(["text", "image"], model), pixels=None)
    found = [flops.work_of(shared(batch, n), model).flops for n in (1, 3)]
    assert found[1] == pytest.approx(oracle(tiny.denoiser(model), shared(batch, 3), model, 1.0))
    assert found[1] < found[0] == flops.work_of(batch, model).flops


def test_weights_by_code_count_a_cell_once():
    model = tiny.model_settings(codes_per_token=4)
    batch = tiny.batch(["image", "image"], model)
    shape = (*batch.image_weight.shape, 4)
    by_code = dataclasses.replace(
        batch, image_weight=np.broadcast_to(batch.image_weight[..., None], shape)
    )
    assert flops.work_of(by_code, model) == flops.work_of(batch, model)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("TPU v5 lite", 197e12), ("TPU v5p", 459e12), ("TPU v5", 459e12), ("TPU v6 lite", 918e12),
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H200", 989e12), ("cpu", None),
    ],
)  # fmt: skip
def test_the_peak_of_a_device_goes_by_its_kind(kind, expected):
    assert flops.peak(kind) == expected
    assert flops.peak(jax.devices()[0].device_kind) is None
