# SPDX-License-Identifier: Apache-2.0
r"""The paper's claims in miniature: small models, trained in several ways, scored exactly.

    python -m benchmarks.ablation --config=configs/ablation_registers.py
    python -m benchmarks.ablation --config=configs/ablation_registers.py --seeds=1
    python -m benchmarks.ablation --report=docs

Besides `get_config`, the settings shared by all ways to train, the file has `get_ablation`: see
`comparison.Ablation`. Each way and seed is a run in `--runs`, resumed if it exists; ways of
several files that train alike share it. A row is written as soon as a task is scored, and tasks
that have a row are not scored again. So several processes may share the work, each with its own
seeds. `--ways=1,8` selects some of the ways. `--report` writes the tables of
`log/2026-11-ablations.md` in that folder, and its plots, from the committed rows (needs matplotlib:
pip install 'sparse-lavida-jax[plots]').
"""

import pathlib
import sys

from absl import flags, logging

from benchmarks import ablation_report, command
from benchmarks.comparison import SUITE, Study
from benchmarks.measurements import Bench, read_rows
from sparse_lavida_jax import config
from sparse_lavida_jax.programs.folder import keep_programs
from sparse_lavida_jax.training import runs

CONFIG = flags.DEFINE_string("config", "", "Config file, such as configs/ablation_registers.py.")
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of parameters and batches.")
WAYS = flags.DEFINE_list(
    "ways", [], "Ways of the file to train, or the beginnings of their names; default: all."
)
FOLDER = flags.DEFINE_string("runs", "runs", "Folder of the runs.")
REPORT = flags.DEFINE_string("report", "", "Folder to write the report to.")


def main(_: list[str]) -> None:
    """Trains and scores, or writes the report."""
    logging.set_verbosity(logging.WARNING)  # messages of the array store
    keep_programs()
    try:
        if REPORT.value:
            print(f"{ablation_report.write_report(pathlib.Path(REPORT.value))}: every ablation")
            return
        _run()
    except runs.Interrupted as stop:
        print(f"benchmarks.ablation: {stop}", file=sys.stderr)
        sys.exit(stop.exit_code)


def _run() -> None:
    study = Study.read(pathlib.Path(CONFIG.value), pathlib.Path(FOLDER.value))
    ways = study.ablation.ways
    if unknown := set(WAYS.value) - set(ways):
        raise config.ConfigError(
            f"--ways={','.join(sorted(unknown))} is unknown: {CONFIG.value} has {', '.join(ways)}."
        )
    if not all(seed.isdigit() for seed in SEEDS.value):
        raise config.ConfigError(f"--seeds={','.join(SEEDS.value)}: give numbers, such as 0,1,2.")
    bench = Bench(SUITE)
    for seed in map(int, SEEDS.value):
        for way in WAYS.value or ways:
            for row in study.measure(bench, way, seed):
                told = f"{way} {row['sampled']} seed {seed}: {row['task']} {row['share']:.3f}"
                print(told, flush=True)
    rows = ablation_report.newest(read_rows(SUITE))
    found = [row for row in rows if row["ablation"] == study.shared.name]
    print(f"\n{ablation_report.summary(found)}")


if __name__ == "__main__":
    command.run(main)
