# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends a long command soon, with exit code 130, and leaves nothing half-written.

KILLS sets how often each is interrupted, at random times: 3 times, or 20 times in
`.ci/run --full`.
"""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from sparse_lavida_jax.cli import program
from sparse_lavida_jax.convert import stand_in
from sparse_lavida_jax.data import image_files

KILLS = int(os.environ.get("KILLS", "3"))
CHECKOUT = pathlib.Path(__file__).parents[2]
SECONDS = 20  # until the interrupt at most; `interrupted` waits six times as long for the end
LAST_WORDS = (
    "sparse_lavida_jax: stopped.",
    "sparse_lavida_jax: stopped. Nothing was written.",
    "sparse_lavida_jax: stopped. What is finished is kept, and the same command goes on.",
    "everything is saved: the same command goes on from there.",
)
PROGRAM = (
    "import signal, sys\n"
    "from sparse_lavida_jax.cli import commands, program\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "print('ready', flush=True)\n"
    "sys.exit(program.main())\n"
)


def interrupted(words, after: float) -> tuple[int, str]:
    """Interrupts a command after `after` seconds; returns its exit code and errors."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=6 * SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, said


def check(words, rng, folder):
    code, said = interrupted(words, rng.uniform(0, SECONDS))
    if code == -signal.SIGINT:  # Python was shutting down: the command had ended
        assert "Traceback" not in said
        code = 0
    assert code in (0, 130), said
    if code:
        assert said.splitlines()[-1].endswith(LAST_WORDS), said
        assert "Traceback" not in said
    assert not [*folder.rglob(".*.tmp"), *folder.rglob("state/*tmp*")]


@pytest.mark.slow
def test_drawing(tmp_path):
    words = ["generate", "a red circle", "--num-images=400", f"--out={tmp_path / 'drawn.png'}"]
    for attempt in range(KILLS):
        check(words, random.Random(attempt), tmp_path)
    for path in tmp_path.glob("*.png"):
        image_files.read_record(path)


@pytest.mark.slow
def test_evaluation(tmp_path):
    words = ["evaluate", "scenes", f"--workdir={tmp_path / 'run'}"]
    for attempt in range(KILLS):
        check(words, random.Random(attempt), tmp_path)


@pytest.mark.slow
def test_conversion_verification_and_export(tmp_path):
    stand_in.write(tmp_path / "released", stand_in.tiny_settings())
    source, model = tmp_path / "released", tmp_path / "model"
    for attempt in range(KILLS):
        rng = random.Random(attempt)
        check(["convert", source, model], rng, tmp_path)
        if model.is_dir():
            check(["verify", model], rng, tmp_path)
            check(["export", model, tmp_path / f"back{attempt}"], rng, tmp_path)


@pytest.mark.slow
def test_preparing_and_training(tmp_path):
    images, prepared, run = (tmp_path / name for name in ("images", "prepared", "run"))
    images.mkdir()
    for number in range(12):
        pixels = np.full((32, 32, 3), 20 * number, np.uint8)
        image_files.write(images / f"{number}.png", pixels)
        (images / f"{number}.txt").write_text(f"number {number}")
    words = ["prepare", images, prepared, "--config.vq.channels=(8,8,8)",
             "--config.vq.codebook_size=16", "--config.optimizer.warmup_steps=1"]  # fmt: skip
    for attempt in range(KILLS):
        check([*words, "--config.train.train_steps=3000"], random.Random(attempt), tmp_path)
    few = "--config.train.train_steps=6"
    assert program.main(["sparse-lavida", *map(str, words), few]) == 0
    words = ["train", f"--data={prepared}", f"--workdir={run}", "--config.model.width=32",
             "--config.model.num_heads=2", "--config.model.num_layers=2",
             "--config.model.dual_tower_layers=0", "--config.model.generation_width=16",
             "--config.train.batch_size=2", "--config.train.checkpoint_seconds=1"]  # fmt: skip
    for attempt in range(KILLS):
        check(words, random.Random(attempt), tmp_path)


def test_an_interrupt_while_the_package_is_imported_is_a_sentence():
    program = (
        "import gc, os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # shells may ignore it
        "from sparse_lavida_jax.__main__ import main\n"
        "class Interrupted:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'sparse_lavida_jax.cli.program': gc.collect()\n"
        "def interrupt(*_):  # Python drops exceptions of a callback\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    for _ in range(99): pass\n"
        "gc.callbacks.append(interrupt)\n"
        "sys.meta_path.insert(0, Interrupted)\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "sparse_lavida_jax: stopped.\n")


def test_sigterm_leaves_out_the_end_of_the_interpreter_where_xla_may_crash():
    program = (
        "import atexit, sys, types\n"
        "from sparse_lavida_jax.__main__ import main\n"
        "def stop(): print('cleared up'); sys.exit(143)\n"
        "import sparse_lavida_jax\n"
        "import sparse_lavida_jax.cli as cli\n"
        "cli.program = types.SimpleNamespace(main=stop)\n"
        "sys.modules['sparse_lavida_jax.cli.program'] = cli.program\n"
        "atexit.register(print, 'the usual end')\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (143, "cleared up\n", "")


@pytest.mark.slow
def test_preparing_and_the_training_of_both_tokenizers(tmp_path):
    """Captions of different words, so that the text tokenizer takes a while too."""
    images, rng = tmp_path / "images", random.Random(0)
    images.mkdir()
    for i in range(40):
        noise = np.random.default_rng(i).integers(0, 256, (32, 32, 3), np.uint8)
        image_files.write(images / f"{i}.png", noise)
        lines = ("".join(rng.choices("abcdefgh ", k=900)) for _ in range(400))
        (images / f"{i}.txt").write_text("\n".join(lines))
    words = ["prepare", images, tmp_path / "out", "--config.train.train_steps=60"]
    for attempt in range(2 * KILLS):
        begin = time.monotonic()
        after = random.Random(attempt).uniform(0, 2 * SECONDS)
        code, said = interrupted(words, after)
        assert code in (0, 130), said
        assert "Traceback" not in said and time.monotonic() - begin - after < SECONDS
        assert not [*tmp_path.rglob(".*.tmp")]
