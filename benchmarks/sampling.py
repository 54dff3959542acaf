# SPDX-License-Identifier: Apache-2.0
r"""Speed of sampling: every preset of the ablation, and Fast-dLLM for text, against dense.

    python -m benchmarks.sampling --checkpoint=scenes --batch=16
    python -m benchmarks.sampling --config=configs/lavida_o.py --random-weights

All presets take turns on the same weights, so that a machine whose speed drifts affects all of them
alike. The time covers plan, prefill and decoding of an image, or of a text response of the largest
length, but not the VQ decoder. Quality is not measured: weights do not affect speed, so they may be
random. `table.py` reads the rows and computes ratios; at the end a table of seconds, tokens
and ratios is printed.

    python -m benchmarks.sampling --suite=headline --config=configs/lavida_o.py \
        --random-weights

measures whole requests, from prompt to pixels (`suites.py`): headline, ablation, batch, edit,
reasoning, quant, fastpath, cpu. A row is written as soon as it is measured; `--missing` continues
the newest run of this code, model, software and device, and measures the rows that it lacks.
Measurements under other conditions, such as other `XLA_FLAGS`, get a name: `--variant`.
`--profile` instead runs one request of each row under jax's profiler, and says where the time of
the device goes, by kind of kernel (`benchmarks/device_time.py`).
"""

import dataclasses
import pathlib
import sys

import numpy as np
from absl import flags, logging

from benchmarks import command, device_time, measurements, requests, suites, table
from benchmarks.suites import RequestCase
from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs.folder import keep_programs

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "scenes", "A model folder, a run, or a bundled name."
)
CONFIG = flags.DEFINE_string("config", "", "Config file, instead of a checkpoint.")
RANDOM = flags.DEFINE_boolean(
    "random-weights", False, "Random parameters for the model of --config."
)
RUNS = flags.DEFINE_integer("runs", 7, "Timed runs per row.", lower_bound=5)
MISSING = flags.DEFINE_boolean("missing", False, "Measure only rows that the newest run lacks.")
VARIANT = flags.DEFINE_string(
    "variant", "", "Suffix of the ids of rows that are measured in another way."
)
MINUTES = flags.DEFINE_float(
    "minutes",
    0.0,
    "Start no row that would end after so many minutes; 0: measure all.",
    lower_bound=0.0,
)
ROWS = flags.DEFINE_list("rows", [], "Ids of the rows of a suite to measure; default: all.")
PROFILE = flags.DEFINE_boolean("profile", False, "Profile a request of each row; time nothing.")
VQ_DTYPE = flags.DEFINE_enum(
    "vq-dtype", "bfloat16", config.VQ_DTYPES, "Of the decoder of images, in a suite."
)
SUITE = flags.DEFINE_enum("suite", None, suites.SUITES, "Suite of whole requests to measure.")
# Presets to measure without a suite.
BATCH = flags.DEFINE_integer("batch", 16, "Images per batch.", lower_bound=1)
STEPS = flags.DEFINE_integer(
    "steps", 0, "Steps an image and a text block; by default those of the config."
)
PRESETS = flags.DEFINE_list("presets", [], "Presets to time; default: all.")


def main(_: list[str]) -> None:
    """Measures a suite, or all presets for images and then for text, and prints a table."""
    logging.set_verbosity(logging.WARNING)  # messages of the array store
    keep_programs()
    if bool(CONFIG.value) != RANDOM.value:
        sys.exit(
            "benchmarks.sampling: --config and --random-weights go together: a config file has no"
            " weights."
        )
    suite = SUITE.value or suites.PRESETS_SUITE
    try:
        suites.check_presets(PRESETS.value)
        subject, cases = _random_subject() if RANDOM.value else _trained_subject()
        if PROFILE.value:
            run = device_time.measure(subject, cases)
            rows = [row for row in measurements.read_rows(device_time.SUITE) if row["run"] == run]
            print(f"\n{table.table(device_time.SUITE, rows)}")
            return
        how = {"variant": VARIANT.value, "missing": MISSING.value, "minutes": MINUTES.value}
        run = requests.run_suite(subject, suite, cases, runs=RUNS.value, **how)
    except (model_folder.CheckpointError, config.ConfigError) as error:
        sys.exit(f"benchmarks.sampling: {error}")
    if not SUITE.value:
        rows = [row for row in measurements.read_rows(suite) if row["run"] == run]
        print(f"\n{table.table('sampling_seconds', rows)}")


def _random_subject() -> tuple[requests.Subject, list[RequestCase]]:
    """Returns a model of random weights, fused as a loaded model would be for sampling."""
    settings = config.read(pathlib.Path(CONFIG.value))
    task = suites.TASKS.get(SUITE.value or "", "both")
    draws = bool(SUITE.value)
    subject = requests.random_subject(settings, task, draws=draws, vq_dtype=VQ_DTYPE.value)
    examples = suites.random_examples(settings)
    return subject, _cases(settings, examples, settings.data.text_block_len)


def _trained_subject() -> tuple[requests.Subject, list[RequestCase]]:
    """Returns a trained model; with presets, it writes a text of its largest length."""
    pipe = SparseLaViDa.from_pretrained(CHECKPOINT.value)
    settings, prompts, model = pipe.settings, pipe.prompts, pipe.settings.model
    codec = pipe.codec.vq if SUITE.value and pipe.codec is not None else None
    if codec is not None:
        settings = dataclasses.replace(settings, vq=codec.settings)
    subject = requests.Subject(pipe.model, settings, codec, VQ_DTYPE.value, False)
    words = "a red circle above a blue square"
    examples = {"text": prompts.ask(words, (), prompts.long_answer_tokens)}
    if not model.understanding_only:
        blank = np.zeros((model.num_cells, model.codes_per_token), np.int32)
        examples = {"draw": prompts.draw(words, blank), **examples}
    found = _cases(settings, examples, prompts.text_block_len)
    if SUITE.value == "quant":  # what it predicts from arbitrary words says little
        asked = {example.modality: example for example in examples.values()}
        found = [
            dataclasses.replace(case, example=asked[case.example.modality], varies=False)
            for case in found
        ]
    return subject, found


def _cases(settings: config.Config, examples: dict, text_block_len: int) -> list[RequestCase]:
    """Returns the rows of the suite or of the presets."""
    if SUITE.value:
        return suites.chosen(suites.cases(SUITE.value, settings), ROWS.value)
    asked = {"batch": BATCH.value, "steps": STEPS.value, "names": PRESETS.value}
    return suites.by_preset(settings, examples, text_block_len, **asked)


if __name__ == "__main__":
    command.run(main)
