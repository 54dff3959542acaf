# SPDX-License-Identifier: Apache-2.0
"""A made-up released folder is read like a real one."""

import dataclasses
import json

import numpy as np
import pytest

from sparse_lavida_jax.checkpoints import tensors
from sparse_lavida_jax.convert import names, settings, stand_in
from sparse_lavida_jax.lavida_o import chat

MADE = stand_in.tiny_settings()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("stand-in") / "released"
    size = stand_in.write(path, MADE)
    assert 0 < size < sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return path


def test_its_settings_are_those_it_was_made_of(folder):
    given, vq = (
        json.loads((folder / name).read_text()) for name in ("config.json", "vqvae/config.json")
    )
    read = settings.settings_from(given, vq)
    assert read.model == dataclasses.replace(MADE.model, compute_dtype="bfloat16")
    assert read.vq == MADE.vq


def test_it_has_every_tensor_with_numbers_of_its_own(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= tensors.list_tensors(path)
    wanted = {name.official: name.shape for name in names.table(MADE) if not name.optional}
    assert {name: tensor.shape for name, tensor in found.items()} == wanted
    read = {name: tensor.read().astype(np.float32) for name, tensor in found.items()}
    for name, values in read.items():
        is_norm = values.ndim == 1 and name.endswith("weight")
        least, most = (1.0, 1.5) if is_norm else (2**-7, 2**-5)
        assert least <= np.abs(values).min() and np.abs(values).max() < most, name
    # Of some 20 numbers in a row, no two tensors have the same.
    starts = [tuple(values.ravel()[:20]) for values in read.values() if values.size >= 20]
    assert len({*starts}) == len(starts)


def test_its_tokenizer_knows_the_words_of_the_chat(folder):
    tokenizer = chat.ChatTokenizer(folder / "tokenizer.json")
    assert tokenizer.id_of(chat.MASK) == MADE.model.text_mask_id
    assert tokenizer.id_of(chat.END_OF_TEXT) == MADE.model.end_of_text_id
    assert tokenizer.id_of("<LOC_8>") < MADE.model.vocab_size
