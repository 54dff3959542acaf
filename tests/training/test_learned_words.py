# SPDX-License-Identifier: Apache-2.0
"""Words and kinds of records that a model was trained on, and warnings about all others."""

import shutil

import pytest
import raw_data

from sparse_lavida_jax.inference.requests import TASK_SPECS, RequestMaker
from sparse_lavida_jax.lavida_o.chat import ChatTokenizer
from sparse_lavida_jax.lavida_o.prompts import LEARNED_FROM, ChatPrompts
from sparse_lavida_jax.mixture import recipe
from sparse_lavida_jax.mixture import record_batches as mixture_batches
from sparse_lavida_jax.mixture.record_batches import MixtureBatches
from sparse_lavida_jax.prompting import vocabulary as text
from sparse_lavida_jax.training import own_images


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return raw_data.tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("a Red, red  circle_2!", ["a", "Red", "red", "circle", "2"]),
        ("ein gruener Käse", ["ein", "gruener", "Käse"]),
        ("красный круг", ["красный", "круг"]),
        ("赤い円 red円", ["赤", "い", "円", "red", "円"]),
        (" ?! ", []),
    ],
)
def test_words_of_any_script(words, expected):
    assert text.words_of(words) == expected


def with_words(tokenizer, folder, *words):
    """The tokenizer of a model that was trained on these words."""
    shutil.copy(tokenizer.path, folder / "tokenizer.json")
    (folder / text.WORDS).write_text("\n".join(words) + "\n", encoding="utf-8")
    return ChatTokenizer(folder / "tokenizer.json")


def test_words_that_training_never_held_are_warned_about(tokenizer, tmp_path, caplog):
    settings = raw_data.settings(tokenizer)

    def asked(tokenizer, *words):
        prompts = ChatPrompts.of(tokenizer, settings, None)
        return RequestMaker(settings, prompts, 0).make("ask", words, None, {})

    known = with_words(tokenizer, tmp_path, "a", "red", "circle", "Paris")
    made = asked(known, "a red dragon", "A Red circle in paris, two circles")
    knows = "this model knows the 4 words of its training texts, listed in its words.txt"
    assert (
        [one.warning for one in made]
        == caplog.messages
        == [
            f"{knows}: 'dragon' is not among them.",
            f"{knows}: 'in' and 'two' are not among them.",
        ]
    )
    assert made[1].words == "a red circle in Paris, two circles"
    asked(known, "a Red circle <LOC_3>")
    (plain,) = asked(tokenizer, "a Red dragon")  # its folder does not record the words
    assert plain.words == "a Red dragon"
    assert len(caplog.messages) == 2


def test_the_words_of_records_are_found(tokenizer, tmp_path, monkeypatch):
    raw_data.prepared(raw_data.captioned(tmp_path), tmp_path / "prepared")
    data = MixtureBatches(tmp_path / "prepared", raw_data.settings(tokenizer), tokenizer)
    assert data.words() == {"image", "png", *map(str, range(raw_data.ROWS))}
    monkeypatch.setattr(mixture_batches, "MOST_READ", raw_data.ROWS - 1)
    assert data.words() is None
    assert own_images._kinds(tmp_path / "prepared") == ("text_to_image",)


def test_tasks_that_no_record_taught_are_refused(tokenizer):
    assert set(LEARNED_FROM) == set(TASK_SPECS)
    assert {kind for kinds in LEARNED_FROM.values() for kind in kinds} <= {*recipe.KINDS}
    prompts = ChatPrompts.of(tokenizer, raw_data.settings(tokenizer), None)
    assert not any(map(prompts.refusal, TASK_SPECS))
    assert prompts.lays_out("generate") and prompts.lays_out("edit")
    settings = raw_data.settings(tokenizer, data={"kinds": ("text_to_image",)})
    prompts = ChatPrompts.of(tokenizer, settings, None)
    taught = {task for task in TASK_SPECS if not prompts.refusal(task)}
    assert taught == {"generate", "inpaint", "outpaint"}
    assert "was not trained to ask: it learned from text_to_image alone, and ask needs" in (
        prompts.refusal("ask")
    )
    assert not prompts.lays_out("generate")
