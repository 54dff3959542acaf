# SPDX-License-Identifier: Apache-2.0
r"""Peak host memory for converting layers of the release's size, depending on their number.

    python -m sparse_lavida_jax.bench.convert --scratch=/tmp

Folders of 3 and of 6 layers are filled with arbitrary numbers, with everything else at full size
too (14 GB with the converted ones), and each is converted in its own process. Memory is the
largest resident set of that process, as counted by the operating system. It must not grow with the
number of layers: within 5 %, and below 4 GiB; otherwise the exit status is 1.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from sparse_lavida_jax.bench import timing
from sparse_lavida_jax.bench.record import Bench
from sparse_lavida_jax.bench.release import MOST_BYTES, SPAWN, settings
from sparse_lavida_jax.convert import stand_in

SCRATCH = flags.DEFINE_string("scratch", "", "Folder for temporary files; default: in /tmp.")
LAYERS = flags.DEFINE_multi_integer("layers", [3, 6], "Numbers of layers to measure.")
MOST_GROWTH = 1.05


def main(argv: list[str]) -> None:
    """Converts each folder and writes a row for it."""
    del argv
    bench, peaks = Bench("convert"), []
    for layers in LAYERS.value:
        with tempfile.TemporaryDirectory(dir=SCRATCH.value or None) as scratch:
            source, target = pathlib.Path(scratch) / "released", pathlib.Path(scratch) / "model"
            # In a separate process: this one's memory would be counted for its children.
            with SPAWN.Pool(1) as pool:
                size = pool.apply(stand_in.write, (source, settings(layers)))
            begin = time.perf_counter()
            peak = _peak_memory(["--mode=convert", f"--src={source}", f"--dst={target}"])
            seconds = time.perf_counter() - begin
        row = {
            "task": "convert",
            "dtype": "bfloat16",
            "layers": layers,
            "bytes": {"weights": size},
            "peak_host_memory_bytes": peak,
            **timing.times([seconds]),
            "note": "layers of the release's size, arbitrary numbers; one process each",
        }
        path = bench.write(f"layers{layers}", row)
        print(f"{path.name}: {size / 1e9:.2f} GB, peak {peak / 2**30:.3f} GiB, {seconds:.0f} s")
        peaks.append(peak)
    if not is_bounded(peaks):
        sys.exit("bench.convert: the peak is above 4 GiB, or grows by more than 5 %.")


def is_bounded(peaks: list[int]) -> bool:
    """Whether peaks of memory, in bytes, are low and do not depend on the number of layers."""
    return max(peaks) < MOST_BYTES and max(peaks) <= MOST_GROWTH * min(peaks)


def _peak_memory(words: list[str]) -> int:
    """Runs the command line in its own process; returns its largest resident set in bytes."""
    process = subprocess.Popen([sys.executable, "-m", "sparse_lavida_jax.main", *words])
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"bench.convert: the conversion failed with status {status}.")
    return usage.ru_maxrss * 1024


if __name__ == "__main__":
    app.run(main)
