# SPDX-License-Identifier: Apache-2.0
"""Prompts have the recorded tokens (cases C, D, F3), as far as words can be distinguished.

The recorded tokens are from a stand-in tokenizer that hashes words. Ours here gives every word its
own id: two prompts agree if each word has the same recorded id everywhere.
"""

import re

import numpy as np

from sparse_lavida_jax.lavida_o import chat
from sparse_lavida_jax.sequence import Response, Source, Text, VisionTokens

IMAGE = VisionTokens(1)
CONTROL = {
    chat.START: "BOS", chat.START_HEADER: "START_HEADER", chat.END_HEADER: "END_HEADER",
    chat.END_OF_TURN: "EOT", chat.END_OF_TEXT: "EOS", chat.MASK: "MASK", chat.CELL: "RES5",
    chat.SOURCE_CELL: "RES6", chat.LOC_BEGIN: "LOC_BEGIN", chat.LOC_END: "LOC_END",
}  # fmt: skip


class Words(chat.ChatTokenizer):
    """Control tokens with their recorded ids; words, marks and line breaks with new ones.

    A space is not a token, unless only a control token follows it.
    """

    def __init__(self, case):
        recorded = case.config["golden_ids"]
        self.ids = {token: recorded[name] for token, name in CONTROL.items()}
        self.control = frozenset(self.ids.values())

    def id_of(self, token):
        return self.ids.setdefault(token, 10**6 + len(self.ids))

    def encode(self, text):
        pieces = re.findall(r"<\|\w+\|>|</?\w+>|\n+|\w+|[^\w\s]|^ (?=<)", text)
        return [self.id_of(piece) for piece in pieces]


def check(case, tokenizer, parts, ids, response):
    """Compares parts with recorded ids; `response` is the placeholder token of the response."""
    spelled = []
    for part in parts:
        if isinstance(part, Text):
            spelled += part.ids.tolist()
        elif isinstance(part, VisionTokens):
            spelled.append(case.config["golden_ids"]["IMAGE_INDEX"])
        elif isinstance(part, Source):
            spelled += [tokenizer.id_of(chat.SOURCE_CELL)] * len(part.codes)
        else:
            assert isinstance(part, Response)
            spelled += [tokenizer.id_of(response)] * part.num_tokens
    (recorded,) = ids.tolist()
    assert len(spelled) == len(recorded)
    meaning = {}
    for ours, theirs in zip(spelled, recorded, strict=True):
        if ours < 0 or ours in tokenizer.control:
            assert ours == theirs
        else:
            assert meaning.setdefault(ours, theirs) == theirs


def test_prompts_of_images_have_the_recorded_tokens(case):
    case = case("F3_t2i_trace")
    tokenizer = Words(case)
    for run in case.config["variants"].values():
        parts = chat.draw(
            tokenizer,
            run["prompt"],
            run["n_image_tokens"],
            condition=run["micro_cond"],
            template=run["template"],
        )
        check(case, tokenizer, parts, case.inputs["input_ids"], chat.CELL)


def test_prompts_of_edits_have_the_recorded_tokens(case):
    case = case("D_edit")
    tokenizer = Words(case)
    source = np.zeros((case.config["n_source_tokens"], 1), np.int32)
    runs = [run for run in case.config["variants"].values() if "prompt" in run]
    assert runs
    for run in runs:
        cells = run["n_image_tokens"]
        parts = chat.edit(tokenizer, run["prompt"], [IMAGE], [source], cells)
        check(case, tokenizer, parts, case.inputs["input_ids"], chat.CELL)


def test_prompts_of_boxes_have_the_recorded_tokens(case):
    case = case("C_und")
    tokenizer = Words(case)
    runs = [run for run in case.config["variants"].values() if run.get("mode") == "refcoco"]
    assert runs
    for run in runs:
        parts = chat.locate(tokenizer, run["expression"], IMAGE)
        check(case, tokenizer, parts, case.inputs[run["input_ids"]], chat.MASK)
