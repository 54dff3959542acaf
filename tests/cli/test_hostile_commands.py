# SPDX-License-Identifier: Apache-2.0
"""Values and paths that no command can use: one sentence, no traceback, nothing written."""

import io
import os
import sys

import jax
import pytest
import raw_data

from sparse_lavida_jax import main, runtime
from sparse_lavida_jax.cli import commands, parser, program
from sparse_lavida_jax.cli.usage_errors import about_path
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.prompting.gaps import MOST_GAPS, parse_template
from sparse_lavida_jax.prompting.request_errors import RequestError

OPTIONS = [
    (name, option)
    for name in parser.COMMANDS
    for action in parser.Parser(name)._actions
    for option in action.option_strings
    if option.startswith("--") and action.nargs != 0
]


@pytest.fixture(autouse=True)
def _no_model(monkeypatch):
    """What is refused is refused before a model is loaded."""
    monkeypatch.setattr(
        SparseLaViDa, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded")
    )


def complaint(capsys, *words, code=(1, 2)):
    assert program.main(["sparse-lavida", *map(str, words)]) in code
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1, printed.err
    assert "an error of the program" not in printed.err and len(printed.err) < 2000, printed.err
    return printed.err


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_two_dashes_are_no_value(capsys, name, option):
    words = ["x", f"{option}=--"]
    assert f"argument {option}: '--' is not a value" in complaint(capsys, name, *words, code=(2,))


NUMBERS = [
    "9" * 5000,
    "-" + "9" * 4300,
    "9" * 4300,
    "1e400",
    "nan",
    "\u0661" * 4301,
    "",
    " ",
    "--",
]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("option", ["--steps", "--seed", "--size", "--registers", "--num-images",
                                    "--batch-size"])  # fmt: skip
def test_numbers_that_are_none(capsys, option, number):
    complaint(capsys, "generate", "x", f"{option}={number}", code=(2,))
    if option in ("--steps", "--seed", "--batch-size"):
        complaint(capsys, "ask", "why?", f"{option}={number}", code=(2,))


@pytest.mark.parametrize("mode", ["train", "sample", "evaluate"])
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_of_modes(capsys, mode, number):
    flag = {"train": "--num-processes", "sample": "--seed", "evaluate": "--config.seed"}[mode]
    given = {"train": "configs/scenes.py", "sample": "scenes x", "evaluate": "scenes"}[mode].split()
    complaint(capsys, mode, *given, f"{flag}={number}", code=(2,))


@pytest.mark.parametrize(
    "text",
    ["a {" + "9" * 5000 + "} circle", "a {1000000000} circle", "a {" + "1" * 4300 + "}", "{0}",
     "a {512} " * 1000, "{513}"],
)  # fmt: skip
def test_gaps_that_are_too_long(text):
    with pytest.raises(RequestError) as refused:
        parse_template(text)
    assert len(str(refused.value)) < 200
    assert sum(n for n in parse_template("a {512} " * 16) if isinstance(n, int)) == MOST_GAPS


# ---------------------------------------------------------------------------------------------
# Paths.


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    for suffix in ("png", "gif", "txt", "jsonl", "json", "py"):
        os.symlink(f"loop.{suffix}", f"loop.{suffix}")
        os.symlink("/dev/zero", f"zero.{suffix}")
        os.symlink("/dev/full", f"full.{suffix}")
        os.mkfifo(f"fifo.{suffix}")
    (tmp_path / "good.png").write_bytes(raw_data.png(0))
    return tmp_path


def paths(suffix: str) -> list[str]:
    """Returns names of what is not a file, where one with a suffix is wanted."""
    long = ("a" * 300, "a/" * 3000)
    return [f"{name}.{suffix}" for name in ("loop", "zero", "full", "fifo", "loop/x", *long)]


WHERE = [
    *(("generate", ["x", f"--out={path}"]) for path in paths("png")),
    *(("generate", ["x", f"--save-steps={path}"]) for path in paths("gif")),
    *(("generate", [f"--batch={path}"]) for path in (*paths("txt"), *paths("jsonl"))),
    *(("ask", [path, "why?"]) for path in paths("png")),
    *(("edit", [path, "x"]) for path in paths("png")),
    *(("inpaint", ["good.png", "x", f"--mask={path}"]) for path in paths("png")),
    *(("replay", [path]) for path in paths("png")),
    *(("chat", [f"--image={path}"]) for path in paths("png")),
    *(("chat", [f"--out={path}"]) for path in ("loop", "loop/x", "zero.png", "a" * 300)),
    *(("prepare", [path, "out"]) for path in (*paths("json"), "loop", "a" * 300)),
    *(("prepare", ["good.png", path]) for path in ("loop", "fifo.png", "zero.png", "a" * 300)),
    *(("verify", [path]) for path in ("loop", "fifo.png", "zero.png", "a" * 300, "\udcff")),
    *(("train", [path]) for path in (*paths("py"), "loop")),
    *(("train", [f"--data={path}"]) for path in ("loop", "fifo.png", "a" * 300)),
    *(("evaluate", [path]) for path in ("loop", "fifo.png", "a" * 300)),
    *(("export", [path, "out"]) for path in ("loop", "fifo.png", "a" * 300)),
    *(("export", ["scenes", path]) for path in ("loop", "fifo.png", "zero.png", "a" * 300)),
    *(("convert", [path, "out"]) for path in ("loop", "fifo.png", "a" * 300)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words"), WHERE, ids=lambda part: f"{part!s:.40}")
def test_paths_that_are_none(place, capsys, monkeypatch, name, words):
    def listed():
        return {path.relative_to(place) for path in place.rglob("*")}

    before = listed()
    monkeypatch.setattr(sys, "stdin", io.StringIO("generate x\n"))
    complaint(capsys, name, *words)
    assert listed() == before


def test_a_path_with_nul_and_a_loop_are_told_by_both_command_lines(place, capsys):
    assert "embedded null" not in complaint(capsys, "generate", "x", "--out=a\0.png")
    assert main.main(["main", "--mode=sample", "--checkpoint=scenes", "--prompt=x",
                      "--out=loop/a.png"]) == 2  # fmt: skip
    assert "symbolic links" in capsys.readouterr().err
    assert about_path(ValueError("embedded null byte")) == "a path holds the character NUL."
    assert not about_path(ValueError("five")) and not about_path(RuntimeError("six"))
    assert "links lead around in a circle" in complaint(capsys, "chat", "--out=loop")


def test_a_long_question_is_no_path(monkeypatch):
    monkeypatch.setattr(commands, "load", lambda *_: (_ for _ in ()).throw(RequestError("asked")))
    assert program.main(["sparse-lavida", "ask", "why? " * 200]) == 2


def test_a_line_without_an_end_is_refused(capsys):
    with pytest.raises(commands.UsageError, match="a line has more than"):
        list(commands._lines(io.StringIO("a" * 10**7).readline))
    assert list(commands._lines(io.StringIO("a\n\nb").readline)) == ["a\n", "\n", "b"]


def test_an_image_is_not_written_to_a_device(place):
    for name in ("full.png", "fifo.png"):
        with pytest.raises(image_files.ImageError, match="a device or a pipe"):
            image_files.write(name, image_files.read("good.png"))
        assert not (place / name).is_file()


# ---------------------------------------------------------------------------------------------
# Memory.


@pytest.mark.parametrize(
    ("error", "holds"),
    [
        (MemoryError(), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 9 bytes"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: something else"), False),
        (ValueError("Out of memory allocating 9 bytes"), False),
    ],
)
def test_a_want_of_memory_is_reported(monkeypatch, capsys, error, holds):
    assert runtime.out_of_memory(error) == holds
    monkeypatch.setattr(commands, "run", lambda *_: (_ for _ in ()).throw(error))
    assert program.main(["sparse-lavida", "generate", "x"]) == 1
    told = capsys.readouterr().err
    assert ("not enough memory: lower --batch-size" in told) == holds
    assert ("an error of the program" in told) != holds
