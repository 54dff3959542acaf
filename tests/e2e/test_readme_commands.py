# SPDX-License-Identifier: Apache-2.0
"""The commands of README.md and docs/commands.md run from top to bottom in one folder, as typed."""

import io
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import stand_ins
from PIL import Image

from sparse_lavida_jax.cli import program
from sparse_lavida_jax.data import image_files

CHECKOUT = pathlib.Path(__file__).parents[2]
README = (CHECKOUT / "README.md").read_text()
PAGE = README[: README.index("## Train and test")] + (CHECKOUT / "docs/commands.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines() if "sparse-lavida " in line]
# Why the others do not run here, and which test runs each of them.
ELSEWHERE = {
    "demo": ("serves until it is stopped, and needs another extra", "test_demo"),
    "serve": ("serves until it is stopped, and needs another extra", "test_serve"),
    "prepare": ("needs images, and takes minutes", "test_prepare_command"),
    "train": ("takes minutes", "test_own_images"),
    "convert": ("needs weights", "test_convert_commands"),
    "verify": ("needs weights", "test_convert_commands"),
    "selfcheck": ("needs weights", ""),
    "export": ("needs weights", "test_convert_commands"),
    "evaluate": ("takes minutes", "test_evaluate"),
    "replay": ("runs at the end of the tests below", "test_readme_commands"),
}
FILES = (
    "out edited inpainted four laid_out cut around reflected boxes turns/1 sampled".split()
)  # PNGs that the lines leave


def split(line):
    """Returns the words of a command and what is typed into it."""
    typed, _, command = line.rpartition(" | ")
    printed = shlex.split(typed)[1].encode().decode("unicode_escape") if typed else ""
    return shlex.split(command, comments=True), printed


def test_each_line_is_one_command_and_all_others_are_named_here():
    for line in LINES:
        assert line.count("sparse-lavida ") == 1
        assert not re.search(r"&&|;", line)
    run = {split(line)[0][1] for line in LINES}
    named = set(re.findall(r"`sparse-lavida ([a-z]+)", PAGE))
    assert named <= run | ELSEWHERE.keys()
    assert run | ELSEWHERE.keys() <= named | run
    here = pathlib.Path(__file__).parent
    assert all(not test or (here / f"{test}.py").is_file() for _, test in ELSEWHERE.values())


def test_the_lines_run_in_order_in_one_process(tmp_path, monkeypatch, capsys):
    """With a small model of arbitrary weights: each line finds what the lines before it made."""
    model = stand_ins.model_of_every_task(tmp_path / "model")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for line in LINES:
        words, typed = split(line)
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        if words[1] != "doctor":
            words = [*words, f"--checkpoint={model}"]
        assert program.main(words) == 0, (line, capsys.readouterr().err)
    for name in FILES:
        with Image.open(f"{name}.png") as image:
            assert min(image.size) > 128, f"{name}.png is not enlarged"
    assert image_files.read("cut.png").shape == (64, 64, 3)
    assert image_files.read_record("around.png")["recipe"] == {"box": [16, 16, 80, 80]}
    assert (
        program.main(["x", "replay", "out.png", "--out", "again.png", f"--checkpoint={model}"]) == 0
    )
    assert pathlib.Path("again.png").read_bytes() == pathlib.Path("out.png").read_bytes()


@pytest.mark.slow
def test_the_lines_run_as_typed_in_a_shell_and_git_stays_clean(tmp_path):
    checkout = tmp_path / "clone"
    checkout.mkdir()
    subprocess.run(["git", "init", "-q", checkout], check=True)
    ignored = pathlib.Path(__file__).parents[2] / ".gitignore"
    (checkout / ".gitignore").write_text(ignored.read_text())
    script = tmp_path / "bin" / "sparse-lavida"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\nexec "$PYTHON" -m sparse_lavida_jax "$@"\n')
    script.chmod(0o755)

    root = str(pathlib.Path(__file__).parents[2])
    path = f"{script.parent}:{os.environ['PATH']}"
    surroundings = os.environ | {"PYTHON": sys.executable, "PATH": path, "PYTHONPATH": root}
    told = ""
    for line in LINES:
        done = subprocess.run(
            line, shell=True, cwd=checkout, env=surroundings, capture_output=True, text=True
        )
        assert done.returncode == 0, (line, done.stderr)
        told += done.stdout
    assert "reflected.png: two blue squares (is correct)" in told
    assert "1 plus 1 is 2" in told
    assert "red circle: " in told
    status = ["git", "status", "--porcelain"]
    assert subprocess.run(status, cwd=checkout, capture_output=True, text=True).stdout == (
        "?? .gitignore\n"
    )
