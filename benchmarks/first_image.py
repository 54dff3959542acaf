# SPDX-License-Identifier: Apache-2.0
r"""Seconds from the start of a process to its first image: nothing compiled before, then all.

    python -m benchmarks.first_image --config=configs/lavida_o.py   # random weights
    python -m benchmarks.first_image                                # the bundled model

Two processes keep their programs in one new folder: "cold" finds nothing there, "warm" finds what
the first has kept. With `--config` the image is that of the suite headline; otherwise `generate`
of a loaded pipeline draws it. Each process writes its own row.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np
from absl import flags, logging

from benchmarks import command, measurements, requests, suites
from sparse_lavida_jax import config
from sparse_lavida_jax.models import vq
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs.folder import keep_programs

CONFIG = flags.DEFINE_string("config", "", "A config, whose model gets random weights.")
STATE = flags.DEFINE_enum("state", None, ("cold", "warm"), "Set for the processes that it starts.")
BEGUN = flags.DEFINE_float("begun", 0.0, "When that process was started, as time.time().")

WORDS = "a red circle above a blue square"


def main(_: list[str]) -> None:
    """Measures both processes, or is one of them."""
    logging.set_verbosity(logging.WARNING)
    if STATE.value:
        try:
            _measure(STATE.value, BEGUN.value)
        except config.ConfigError as error:
            sys.exit(f"benchmarks.first_image: {error}")
        return
    with tempfile.TemporaryDirectory() as folder:
        kept = os.environ | {"JAX_COMPILATION_CACHE_DIR": folder}
        for state in ("cold", "warm"):
            words = [sys.executable, "-m", "benchmarks.first_image"]
            words += [f"--state={state}", f"--config={CONFIG.value}", f"--begun={time.time()}"]
            status = subprocess.run(words, env=kept).returncode
            if status:
                sys.exit(status)


def _measure(state: str, begun: float) -> None:
    """Draws one image and writes a row."""
    split = {"imports": time.time() - begun}
    compiled = measurements.compiled()
    if CONFIG.value:
        task, settings = "first image", config.read(pathlib.Path(CONFIG.value))
        model = settings.name
        split |= _drawn(settings)
    else:
        task, model = "generate", "scenes"
        split |= _generated(model)
    row = {
        "task": task,
        "method": state,
        "model": model,
        "batch": 1,
        "split_s": split,
        "total_s": sum(split.values()),
        "after_imports_s": split["weights"] + split["image"],
        "compilations": len(compiled.seconds),
        "compilations_kept": compiled.kept,
        "note": "from the start of the process to the last pixel",
    }
    path = measurements.Bench("first_image").write(f"{task}/{state}", row, name=f"{model}/{state}")
    told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in split.items())
    print(f"{path.name}: {row['total_s']:.1f} s ({told})", flush=True)


def _generated(model: str) -> dict[str, float]:
    """Returns the seconds to load a bundled model, and to draw one image with it."""
    keep_programs()
    begin = time.time()
    pipe = SparseLaViDa.from_pretrained(model)
    loaded = time.time()
    with tempfile.TemporaryDirectory() as folder:
        pipe.generate(WORDS, seed=0).save(pathlib.Path(folder, "out.png"))
    return {"weights": loaded - begin, "image": time.time() - loaded}


def _drawn(settings: config.Config) -> dict[str, float]:
    """Returns the seconds to make random weights, and to draw one image with them."""
    keep_programs()
    begin = time.time()
    subject = requests.random_subject(settings, "image", draws=True, vq_dtype="bfloat16")
    case: Any = suites.cases("headline", settings)[0]
    weights, begin = time.time() - begin, time.time()
    # As an engine does, the decoder is made while the other programs are.
    side = settings.model.grid_size * settings.model.codes_side
    codes = np.zeros((1, side, side), np.int32)
    if subject.decoder is not None:
        threading.Thread(target=vq.to_pixels, args=(subject.decoder, codes, 1)).start()
    requests.Timed(subject, case)
    return {"weights": weights, "image": time.time() - begin}


if __name__ == "__main__":
    command.run(main)
