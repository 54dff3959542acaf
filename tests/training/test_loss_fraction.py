# SPDX-License-Identifier: Apache-2.0
"""Enough of the tokens that a training config passes have a loss, in text and in images."""

import collections
import dataclasses
import pathlib

import numpy as np
import pytest
import raw_data
import stand_ins
import tokenizers
from tokenizers import models, pre_tokenizers

from benchmarks import objectives
from sparse_lavida_jax import config, diffusion, orders
from sparse_lavida_jax.data.batch import TrainingRow, longest_of, make_row
from sparse_lavida_jax.lavida_o import chat
from sparse_lavida_jax.mixture.record_batches import MixtureBatches
from sparse_lavida_jax.mixture.record_examples import Mixer
from sparse_lavida_jax.mixture.records import Record
from sparse_lavida_jax.scenes import scene_batches, world
from sparse_lavida_jax.scenes.task import TEXT_GROUPS
from sparse_lavida_jax.training import flops

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
ANSWERS = (4, 20, 60, 120, 240, 240)  # words
ROWS = 144
PHOTO = raw_data.png(0, 800, 800)  # with five views for the vision tower

# The least share of the slots of a row, including padding, whose token has a loss: for text, for
# images. Text with one step per row had 1.3 % in the configs of LaViDa-O.
LEAST = {
    "sft_1024": (0.06, 0.36),
    "lavida_o_lora": (0.06, 0.36),
    "lavida_o_branch": (0.06, 0.36),
    "sft_1024:schedule": (0.06, 0.22),
    "sft_1024:paper": (0.06, 0.35),
    "scenes": (0.06, 0.1),
    "scenes_g4": (0.06, 0.1),
    "scenes_long": (0.065, 0.1),
    "scenes_dense": (0.14, 0.12),
}


def read(name: str) -> config.Config:
    file, colon, assignment = name.partition(":")
    return config.read(CONFIGS / f"{file}.py{colon}{assignment}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> chat.ChatTokenizer:
    """One token per word, so that prompts are about as long as with the released tokenizer."""
    made = tokenizers.Tokenizer(models.BPE({"x": 0}, [], unk_token="x", fuse_unk=True))
    apart = [(r"\s+", "removed"), (r"\w+", "isolated")]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(one), how) for one, how in apart]
    )
    made.add_special_tokens([*chat.CONTROL])
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    made.save(str(path))
    return chat.ChatTokenizer(path)


def record(modality: str, number: int, side: int) -> Record:
    """Returns a question about a photo of 768 x 768 pixels, or an image with a caption."""
    if modality == "text":
        said = "word " * ANSWERS[number % len(ANSWERS)]
        asked = ("word " * 12,)
        return Record("understanding", "set", "1", asked, (said,), images=(PHOTO,), size=(800, 800))
    target, places = np.full((1, side, side), number), np.zeros((1, 2))
    return Record(
        "text_to_image", "set", "1", ("word " * 60,), target=target, crops=places.astype(int),
        light=places, size=(side, side),
    )  # fmt: skip


def prepared_rows(settings: config.Config, tokenizer, modality: str) -> list[TrainingRow]:
    """Returns rows of realistic length; making them needs no model."""
    side = settings.model.grid_size * settings.model.codes_side
    mixer, examples = Mixer(tokenizer, settings), []
    for number in range(2 * len(ANSWERS) if modality == "text" else 1):
        rng = np.random.default_rng(number)
        examples.append(mixer.example(record(modality, number, side), rng))
    return [
        make_row(examples[i % len(examples)], settings, np.random.default_rng(i))
        for i in range(ROWS)
    ]


def with_loss(rows: list[TrainingRow]) -> int:
    return sum(int((row.blocks.weight > 0).sum()) for row in rows)


def groups_of(settings: config.Config, tokenizer):
    """Yields for each group of a config what it predicts, some rows, and their common shape."""
    if settings.data.source == "prepared":
        for modality in ("text", "image"):
            rows = prepared_rows(settings, tokenizer, modality)
            yield modality, rows, longest_of([row.length for row in rows], MixtureBatches.multiple)
        return
    table = np.zeros((world.NUM_APPEARANCES + 1, settings.model.codes_per_token), int)
    encoder = dataclasses.replace(stand_ins.encoder(settings), appearance_codes=table)
    made = scene_batches.SceneBatches(settings, encoder)
    made.probe = 64
    for group in made.groups:
        modality = "text" if group in TEXT_GROUPS else "image"
        rows = [made.row(group, number) for number in range(64)]
        yield modality, rows, made.shape_of(group).rows[-1]


def loss_fractions(settings: config.Config, tokenizer) -> dict[str, float]:
    """Returns `loss_fraction` as logged by a run, for text and for images."""
    losses, slots = collections.Counter(), collections.Counter()
    for modality, rows, shape in groups_of(settings, tokenizer):
        losses[modality] += with_loss(rows)
        slots[modality] += len(rows) * (shape.understanding + shape.generation)
    return {modality: losses[modality] / slots[modality] for modality in slots}


@pytest.mark.parametrize("name", LEAST)
def test_neither_text_nor_images_are_starved_of_a_loss(name, tokenizer):
    found = loss_fractions(read(name), tokenizer)
    text, image = LEAST[name]
    assert found.get("text", 1) >= text
    assert found["image"] >= image


@pytest.mark.parametrize(
    ("merge", "registers", "share"),
    [(1, 64, 0.162), (64, 64, 0.335), (128, 64, 0.393), (64, 16, 0.421)],
)
def test_a_row_of_a_whole_plan_predicts_every_cell_and_has_one_length(merge, registers, share):
    """1,024 cells after a prompt of 250 tokens, in the 64 steps of the release."""
    prompt, cells, found = 250, 1024, set()
    sizes = orders.counts("shift", 64, cells, 5.0)
    for seed in range(3):
        order, given = orders.order("stratified", 32, 32, seed), np.zeros(cells, bool)
        blocks = diffusion.plan_blocks(order, sizes, given, merge)
        slots = prompt + len(blocks.block) + registers * len(blocks.masked_blocks)
        found.add((int((blocks.weight > 0).sum()), slots))
    ((with_loss_, slots),) = found
    assert with_loss_ == cells
    assert with_loss_ / slots == pytest.approx(share, abs=5e-4)


def test_a_whole_plan_has_more_tokens_with_a_loss_an_operation_than_dense_training():
    """1,024 cells after 250 tokens, at the release's size. With eight steps a row it is 0.60."""
    prompt, each = {"given": 0.0, "prompt_drop": 0.0}, {}
    for name, changes in {"plan": {}, "dense": {"attention": "full", "blocks": "uniform"}}.items():
        settings = config.changed(read("sft_1024"), {"data": prompt, "diffusion": changes})
        examples = objectives.random_examples(settings.model, 0)
        rows = 48 if name == "dense" else 3
        found = objectives.batches(settings, examples, rows, 1)
        works = [flops.work_of(batch, settings.model) for batch in found]
        each[name] = sum(w.with_loss for w in works) / sum(w.flops for w in works)
    assert 1.0 < each["plan"] / each["dense"] < 1.1


def test_a_row_of_text_of_the_papers_run_has_a_hundred_tokens_with_a_loss(tokenizer):
    """With one step per row it had 16 of 1,070."""
    now, once = (
        with_loss(prepared_rows(read(name), tokenizer, "text")) / ROWS
        for name in ("sft_1024", "sft_1024:one_step")
    )
    assert once < 20 < 120 < now
