# SPDX-License-Identifier: Apache-2.0
"""Rehearsals use the programs of all requests like them, as their keys show without compiling."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import staged

from sparse_lavida_jax import sample
from sparse_lavida_jax.cli import commands, parser, program, usage_errors
from sparse_lavida_jax.inference import batch_shapes, warmup
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs import executables, persistent_jit
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.scenes.grammar import box_text, cell_box

IMAGE = np.full((96, 96, 3), 250, np.uint8)
WORDS = ("a red circle", "a red circle above " * 5, "a red circle above " * 15)  # 3, 20, 60
NAMED = (("nothing", 1), ("large red circle", 2), ("red circle", 4), ("nothing", 6))
LAYOUTS = ["", "a a a"] + [
    ",".join(f" {thing}{box_text(cell_box(cell))}" for cell in range(number))
    for thing, number in NAMED
]
MOST_ROWS = 4


@pytest.fixture(scope="module")
def pipe():
    return SparseLaViDa.from_pretrained("scenes", batch_size=MOST_ROWS)


@pytest.fixture
def writes(monkeypatch, pipe):
    """A sampler that decodes nothing; returns a list whose only entry is the layout it writes."""
    layouts = [""]

    def decoded(model, laid, phases, *, stage, callback=None, **_):
        if callback is not None:
            callback(staged.after(stage, 0, len(laid)))
        response = np.stack([one.example.response for one in laid]) * 0
        if stage == "layout":
            ids = pipe.tokenizer.encode(layouts[0])
            response[:, : len(ids), 0] = ids
        return response

    monkeypatch.setattr(sample, "sample", decoded)
    monkeypatch.setattr(pipe.codec, "encode", lambda pixels: np.zeros((len(pixels), 36, 1), int))
    monkeypatch.setattr(
        pipe.codec, "to_pixels", lambda cells, *_: np.zeros((len(cells), 8, 8, 3), "B")
    )
    return layouts


class Keys(set):
    """The keys of batches that ran to their end."""

    @contextlib.contextmanager
    def __call__(self, key):
        yield
        self.add(key)


def run(pipe, requests, watch=None, **how):
    keys = Keys()
    with contextlib.suppress(warmup.LayoutWritten):
        pipe.run(requests, watch, programs=keys, **how)
    return keys


@pytest.fixture
def rehearsed(pipe, writes):
    found = set()
    for task in warmup.tasks_of(pipe):
        for one in warmup.rehearsals(pipe, task, batch_shapes.sizes(MOST_ROWS), "served"):
            how = {"bucket": one.bucket, "padding": "served"}
            found |= run(pipe, one.requests(pipe), one.watch, **how)
    return found


def test_served_requests_need_only_what_was_rehearsed(pipe, writes, rehearsed):
    used = set()
    for words, rows, writes[0] in itertools.product(WORDS, (1, 2, 3, 4), LAYOUTS):
        for task, image in (("generate", None), ("edit", IMAGE), ("ask", None), ("ask", IMAGE)):
            requests = pipe.requests(task, [words] * rows, image, seed=7)
            used |= run(pipe, requests, padding="served")
    assert used <= rehearsed
    # Only what neither words nor the layouts above lead to is left.
    assert len(rehearsed) < 2 * len(used)
    assert not run(pipe, pipe.requests("generate", "a", steps=3), padding="served") <= rehearsed


def test_requests_of_commands_need_only_what_was_rehearsed_for_them(pipe, writes):
    found, used = set(), set()
    for task in ("generate", "edit"):
        for one in warmup.rehearsals(pipe, task, [1], "fit"):
            found |= run(pipe, one.requests(pipe), one.watch, bucket=one.bucket)
        for words, writes[0] in itertools.product(WORDS, LAYOUTS):
            image = None if task == "generate" else IMAGE
            used |= run(pipe, pipe.requests(task, words, image))
    assert used <= found


def test_short_prompts_of_one_row_are_rehearsed_first(pipe):
    found = warmup.rehearsals(pipe, "generate", [1, 2], "served")
    assert [one.rows for one in found] == sorted(one.rows for one in found)
    lengths = [one.length for one in found if one.rows == 1]
    assert lengths == sorted(lengths) and lengths[0] == batch_shapes.LENGTHS[0]
    with pytest.raises(RequestError, match="size=7x96 cannot be drawn"):
        warmup.rehearsals(pipe, "generate", [1], "served", size=(7, 96))


def test_numbers_of_rows_are_powers_of_two_and_the_largest():
    assert [batch_shapes.sizes(most) for most in (1, 6, 16)] == [
        [1],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16],
    ]


# ---------------------------------------------------------------------------------------------
# The command.


def test_the_command_says_what_each_kind_of_request_took(pipe, writes, monkeypatch, capsys):
    monkeypatch.setattr(commands, "load", lambda asked: pipe)
    assert program.main(["sparse-lavida", "warmup", "--tasks", "generate", "ask"]) == 0
    printed = capsys.readouterr()
    kinds = [line.partition(": ")[0] for line in printed.out.splitlines()]
    assert kinds == ["generate", "ask", "ask about an image", "all"]
    assert all("programs made, " in line for line in printed.out.splitlines())
    assert "no executable is kept" in printed.err  # this process keeps none


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tasks", "sing"], "there is no warm-up for 'sing': choose from generate, edit, ask."),
        (["--compilation-cache="], "--compilation-cache= keeps nothing for later"),
        (["--size=7x7"], "--size=7x7 cannot be drawn"),
    ],
)
def test_what_cannot_be_warmed_up_is_refused(pipe, monkeypatch, capsys, words, told):
    monkeypatch.setattr(commands, "load", lambda asked: pipe)
    assert program.main(["sparse-lavida", "warmup", *words]) == usage_errors.MISTAKE
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_task_that_the_model_cannot_do_is_refused(pipe, monkeypatch):
    refused = {"edit": "this checkpoint was not trained to edit."}
    monkeypatch.setattr(type(pipe.prompts), "refusal", lambda _, task: refused.get(task, ""))
    assert warmup.tasks_of(pipe) == ["generate", "ask"]
    with pytest.raises(RequestError, match="was not trained to edit"):
        warmup.tasks_of(pipe, ["edit"])


@pytest.mark.parametrize(
    ("words", "folder"),
    [([], None), (["--compilation-cache", "here"], "here"), (["--compilation-cache="], "")],
)
def test_commands_keep_programs_where_they_are_asked_to(monkeypatch, words, folder):
    kept_in = []
    monkeypatch.setattr(commands, "keep_programs", kept_in.append)
    empty = SparseLaViDa.__new__(SparseLaViDa)
    monkeypatch.setattr(SparseLaViDa, "from_pretrained", lambda *_, **__: empty)
    for name in ("generate", "replay", "chat", "serve", "demo", "warmup"):
        needed = {"replay": ["a.png"]}.get(name, [])
        commands.load(parser.Parser(name).parse_args([*needed, *words]))
    assert kept_in == [folder] * 6


# ---------------------------------------------------------------------------------------------
# Memory.


@persistent_jit.persistent_jit()
def _doubled(x):
    return x * 2


def test_programs_that_are_spared_stay_in_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    executables.keep_in(tmp_path)
    _doubled(jnp.ones(2))
    (spared,) = _doubled.in_memory()
    assert spared in persistent_jit.in_memory() and not spared.was_kept
    _doubled(jnp.ones(3))
    persistent_jit.forget({spared})
    assert _doubled.in_memory() == [spared]
    persistent_jit.forget()
    assert _doubled.in_memory() == []
