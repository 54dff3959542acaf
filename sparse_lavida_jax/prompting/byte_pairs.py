# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level tokenizer in a process of its own, which Ctrl-C ends at once.

The library's training of a large collection takes minutes, in which Python hears no signal.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sparse_lavida_jax.prompting.tokenizer import train_byte_level

END = b"end\n"  # no JSON


def train(
    texts: Iterable[str], special: Sequence[str], textual: Sequence[str], vocabulary: int
) -> str:
    """Does what `train_byte_level` does; any exception, such as Ctrl-C, ends the other process.

    Raises:
        OSError: the other process cannot start, or was ended, perhaps for want of memory.
    """
    command = [sys.executable, "-m", "sparse_lavida_jax.prompting.byte_pairs"]
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,  # a terminal sends Ctrl-C to this process only
    )
    with child:
        assert child.stdin is not None and child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                for line in itertools.chain([(special, textual, vocabulary)], texts):
                    child.stdin.write(json.dumps(line).encode() + b"\n")
                child.stdin.write(END)
                child.stdin.close()
            contents = child.stdout.read().decode()
        finally:
            child.kill()  # no effect once it has ended
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
    if not contents:
        raise OSError(
            "the process that trains the text tokenizer was ended, perhaps for want of memory: run"
            " the same command again, which goes on there"
        )
    return contents


def _lines() -> Iterator[Any]:
    """Yields what `train` sent; ends this process if that was interrupted."""
    for line in sys.stdin.buffer:
        if line == END:
            return
        if line.endswith(b"\n"):
            yield json.loads(line)
    os._exit(1)


def _main() -> None:
    """Reads the settings and the texts, each a line of JSON, and writes the contents."""
    lines = _lines()
    special, textual, vocabulary = next(lines)
    sys.stdout.buffer.write(train_byte_level(lines, special, textual, vocabulary).encode())


if __name__ == "__main__":
    _main()
