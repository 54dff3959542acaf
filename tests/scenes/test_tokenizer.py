# SPDX-License-Identifier: Apache-2.0
"""Text round trips; words of the small world are one token; bad files are explained."""

import json
import re
import sys

import hypothesis
import hypothesis.strategies as st
import pytest

from sparse_lavida_jax.scenes import tasks, tokenizer

TOKENIZER = tokenizer.Tokenizer()


@hypothesis.given(st.text())
def test_any_text_comes_back(words):
    assert TOKENIZER.decode(TOKENIZER.encode(words)) == words


@hypothesis.given(st.text())
def test_text_never_becomes_a_special_token(words):
    for special in tokenizer.SPECIAL_TOKENS:
        ids = TOKENIZER.encode(words + special)
        assert not {*ids} & {*range(len(tokenizer.SPECIAL_TOKENS))}


def test_every_word_of_the_language_is_one_token():
    vocabulary = set()
    for task in tasks.TASKS:
        for split in tasks.SPLITS:
            for index in range(25):
                sample = tasks.sample(task, 7, index, split)
                for words in filter(None, (sample.prompt, sample.answer, sample.layout)):
                    assert TOKENIZER.decode(TOKENIZER.encode(words)) == words
                    vocabulary |= {*re.findall(r"^\w+| \w+|[,?:]|<LOC_\d+>", words)}
    assert len(vocabulary) > 90
    for word in vocabulary:
        assert len(TOKENIZER.encode(word)) == 1, word


def test_ids_are_in_the_agreed_order():
    ids = (
        TOKENIZER.end_of_text_id, TOKENIZER.mask_id, TOKENIZER.user_id, TOKENIZER.assistant_id,
        TOKENIZER.end_of_turn_id,
    )  # fmt: skip
    assert ids == tuple(range(5))
    assert TOKENIZER.location_ids == range(8, 33)
    assert TOKENIZER.encode("<LOC_0><LOC_24>") == [8, 32]
    assert TOKENIZER.vocab_size <= tokenizer.LARGEST_VOCABULARY


def test_special_tokens_and_foreign_ids_are_left_out_of_text():
    ids = TOKENIZER.encode(" red<LOC_3>")
    assert TOKENIZER.decode([2, *ids, 1, 0, 0, TOKENIZER.vocab_size]) == " red<LOC_3>"


def test_offsets_are_the_characters_of_each_token():
    answer = " small red circle<LOC_0><LOC_4>, nothing"
    ids, offsets = TOKENIZER.encode_with_offsets(answer)
    assert [answer[slice(*span)] for span in offsets] == [TOKENIZER.decode([i]) for i in ids]


@pytest.mark.slow
def test_the_command_makes_the_shipped_file(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    monkeypatch.setattr(sys, "argv", ["tokenizer", f"--out={path}"])
    tokenizer.main()
    made, shipped = (
        json.loads(file.read_text(encoding="utf-8")) for file in (path, tokenizer.SHIPPED)
    )
    assert made["model"] == shipped["model"]
    assert made["added_tokens"] == shipped["added_tokens"]


def test_a_missing_file_is_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*make one with"):
        tokenizer.Tokenizer(tmp_path / "tokenizer.json")


def test_a_damaged_file_is_explained(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.SHIPPED.read_text(encoding="utf-8")[:1000])
    with pytest.raises(ValueError, match=r"is damaged: .*make one with"):
        tokenizer.Tokenizer(path)


def test_a_foreign_tokenizer_is_explained(tmp_path):
    contents = json.loads(tokenizer.SHIPPED.read_text(encoding="utf-8"))
    contents["added_tokens"] = contents["added_tokens"][:20]
    path = tmp_path / "tokenizer.json"
    del contents["model"]["vocab"]["<LOC_24>"]
    path.write_text(json.dumps(contents))
    with pytest.raises(ValueError, match=r"'<LOC_24>' is needed"):
        tokenizer.Tokenizer(path)
