# SPDX-License-Identifier: Apache-2.0
r"""Training: the throughput of a step, and the full run on TPUs.

    python -m benchmarks.training                                  # the bundled model
    python -m benchmarks.training --config=configs/lavida_o_lora.py --batch=8 --runs=12
    python -m benchmarks.training --aot --config=configs/lavida_o.py      # 15 minutes

Without a mode, three ways to train take turns on this device and on the same examples: step-causal
training with tiles skipped (by the kernel, or in plain lax if there is none), the same with an
explicit mask, and masked diffusion with full attention as in LaViDa-O. It compares tokens with a
loss per second and per TFLOP, and how much the loss of a batch varies. With `--config` the
parameters are random, which does not affect speed; their loss is meaningless.

`--aot` compiles the training step of a config for 64 TPU chips, and sampling for 8, on any Linux
machine, without any of the chips (`benchmarks/aot.py`).
"""

import dataclasses
import pathlib
import sys

from absl import flags, logging
from flax import nnx

from benchmarks import aot, command, objectives
from benchmarks.measurements import Bench
from benchmarks.table import table
from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.models import parameters
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.stack import admit_kernel_for
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.training import memory, optimizer

AOT = flags.DEFINE_boolean("aot", False, "Compile for TPUs that this machine does not have.")
TARGETS = flags.DEFINE_list("targets", [*aot.TRAINING, *aot.SAMPLING], "Targets of --aot.")
CONFIG = flags.DEFINE_string("config", "", "A config file.")
CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "scenes", "Trained where there is no config: a folder or a bundled name."
)
BATCH = flags.DEFINE_integer("batch", 16, "Examples per step.", lower_bound=1)
RUNS = flags.DEFINE_integer("runs", 24, "Timed steps of each way, each with its own batch.",
    lower_bound=2,
)  # fmt: skip
TEXT_TOKENS = flags.DEFINE_integer(
    "text-tokens", 1024, "Understanding tokens of an example.", lower_bound=1
)
IMAGE_TOKENS = flags.DEFINE_integer(
    "image-tokens", -1, "Generation tokens of an example; -1: of the longest row of the config.",
    lower_bound=-1,
)  # fmt: skip

AOT_ROWS = 128


def main(_: list[str]) -> None:
    """Runs one of the modes."""
    logging.set_verbosity(logging.WARNING)
    if AOT.value and not CONFIG.value:
        sys.exit("benchmarks.training: --aot needs --config=FILE, such as configs/lavida_o.py.")
    try:
        if AOT.value:
            _compile(config.read(pathlib.Path(CONFIG.value)))
        else:
            _compare()
    except config.ConfigError as error:
        print(f"benchmarks.training: {error}", file=sys.stderr)
        sys.exit(2)


def _compare() -> None:
    """Times the ways to train on this device."""
    bench, subject = Bench("training"), _subject()
    rows = objectives.measure(*subject, runs=RUNS.value, batch=BATCH.value)
    for name, row in rows.items():
        loss = None if CONFIG.value else row["loss"]  # the loss of random parameters is meaningless
        bench.write(f"{row['model']}/{name}/b{BATCH.value}", row | {"loss": loss})
    print(f"\n{table('training', bench.rows())}")


def _subject() -> tuple[config.Config, Denoiser, objectives.MakeExample]:
    """Returns settings without a moving average, parameters and examples."""
    if CONFIG.value:
        settings = config.read(pathlib.Path(CONFIG.value))
        admit_kernel_for(settings.model, gradients=True)
        params = Denoiser(settings.model, rngs=nnx.Rngs(settings.seed))
        dtype_of = optimizer.dtypes(settings)  # with adapters, some other parameters train too
        params = parameters.mapped(lambda name, x: x.astype(dtype_of(name)), params)
        make_example = objectives.random_examples(settings.model, settings.seed)
    else:
        folder = model_folder.find_model(CHECKPOINT.value)
        admit_kernel_for(model_folder.read_config(folder).model, gradients=True)
        pipe = SparseLaViDa.from_pretrained(folder)
        settings, params = pipe.settings, pipe.model
        make_example = objectives.scene_examples(pipe.encoder, settings.seed)
    plain = dataclasses.replace(settings.optimizer, ema=0.0)
    return dataclasses.replace(settings, optimizer=plain), params, make_example


def _compile(settings: config.Config) -> None:
    """Compiles for TPUs that are not present."""
    bench = Bench("aot")
    batch = memory.BatchSize(AOT_ROWS, TEXT_TOKENS.value, _image_tokens(settings))
    for row_id, row in aot.rows(settings, TARGETS.value, batch):
        bench.write(row_id, row)
        print(f"{row_id}: compiled in {row['compile_s']:.0f} s", flush=True)
    print(f"\n{table('aot', bench.rows())}")


def _image_tokens(settings: config.Config) -> int:
    if settings.model.understanding_only:
        return 0
    asked = IMAGE_TOKENS.value
    return memory.image_tokens(settings) if asked < 0 else asked


if __name__ == "__main__":
    command.run(main)
