# SPDX-License-Identifier: Apache-2.0
"""The text tokenizer is trained in another process, which a signal ends at any moment."""

import os
import pathlib
import random
import signal
import string
import subprocess
import sys
import time

import pytest

from sparse_lavida_jax.prompting import byte_pairs
from sparse_lavida_jax.prompting.tokenizer import train_byte_level

CHECKOUT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import random, signal, sys
from sparse_lavida_jax.prompting import byte_pairs
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
rng = random.Random(0)
texts = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=1000)) for _ in range(20000)]
try:
    print("ready", flush=True)  # from here on a signal may come
    byte_pairs.train(texts, ["<end>"], [], 8192)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_the_contents_are_those_of_the_library():
    rng = random.Random(0)
    texts = ["".join(rng.choices(string.ascii_letters + " ä", k=99)) for _ in range(99)]
    how = (["<end>", "<mask>"], ["<LOC_1>"], 512)
    assert byte_pairs.train(iter(texts), *how) == train_byte_level(texts, *how)


def test_a_training_that_dies_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OSError, match="perhaps for want of memory"):
        byte_pairs.train(["a"] * 10**6, [], [], 300)


@pytest.mark.parametrize(
    ("number", "after"),
    [(signal.SIGINT, 0.0), (signal.SIGINT, 0.3), (signal.SIGINT, 3.0), (signal.SIGTERM, 3.0)],
)
def test_a_signal_ends_both_processes(number, after):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(after)
        process.send_signal(number)
        begin = time.monotonic()
        # The end of its errors is the end of the other process too, which inherits them.
        said = process.stderr.read()
        assert time.monotonic() - begin < 5 and said == b""
    assert process.returncode == 128 + number
