# SPDX-License-Identifier: Apache-2.0
"""A tiny run from the command line to the report, which most tests here look at."""

import dataclasses
import pathlib

import pytest
import stand_ins

from sparse_lavida_jax import main, pipeline
from sparse_lavida_jax.evals import report
from sparse_lavida_jax.scenes import batches


@pytest.fixture(scope="package", autouse=True)
def _quick():
    with pytest.MonkeyPatch.context() as patch, stand_ins.quick_compilation():
        patch.setattr(batches, "LENGTH_PROBE", 16)
        patch.setattr(report, "SPEED_RUNS", 1)
        yield


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run of six steps, the words that started it, and the model it ended with."""

    folder: pathlib.Path
    words: list[str]
    pipe: pipeline.SparseLaViDa


@pytest.fixture(scope="package")
def finished(_quick, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    words = stand_ins.command_line(folder, stand_ins.settings(train={"train_steps": 6}))
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        write = report.write
        patch.setattr(
            report,
            "write",
            lambda pipe, *args, **more: kept.append(pipe) or write(pipe, *args, **more),
        )
        assert main.main(["main", *words, f"--workdir={folder / 'run'}"]) == 0
    return Finished(folder / "run", words, *kept)
