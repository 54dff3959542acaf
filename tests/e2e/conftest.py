# SPDX-License-Identifier: Apache-2.0
"""A tiny run from the command line to the report, shared by most tests here."""

import dataclasses
import functools
import pathlib

import pytest
import stand_ins

from sparse_lavida_jax import config, main, pipeline, train
from sparse_lavida_jax.evals import training_report
from sparse_lavida_jax.scenes import scene_batches


@pytest.fixture(scope="package", autouse=True)
def _quick():
    with pytest.MonkeyPatch.context() as patch, stand_ins.quick_compilation():
        patch.setattr(scene_batches, "LENGTH_PROBE", 16)
        patch.setattr(training_report, "SPEED_RUNS", 1)
        first_model = train._first_model
        made = functools.cache(
            lambda model, seed: first_model(config.Config(model=model, seed=seed))
        )

        def made_once(settings):
            if settings.train.init_from:
                return first_model(settings)
            return made(settings.model, settings.seed)

        patch.setattr(train, "_first_model", made_once)
        yield


@pytest.fixture(scope="package")
def free():
    """A server whose model steps without waiting, for all tests without rules of their own."""
    import staged_server  # skips where the server's packages are absent

    with staged_server.serving() as (service, address):
        service.pipe.run_free()
        yield service, address


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run of six steps, its command line, and the resulting model."""

    folder: pathlib.Path
    words: list[str]
    pipe: pipeline.SparseLaViDa


@pytest.fixture(scope="package")
def finished(_quick, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    words = stand_ins.command_line(folder, stand_ins.settings(train={"train_steps": 6}))
    kept, write = [], training_report.write

    def write_and_keep(pipe, *args, **more):
        """Times two rows, as many as were drawn, so that nothing more has to be compiled."""
        kept.append(pipe)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipe.engine, "batch_size", 2)
            return write(pipe, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_report, "write", write_and_keep)
        assert main.main(["main", *words, f"--workdir={folder / 'run'}"]) == 0
    return Finished(folder / "run", words, *kept)
