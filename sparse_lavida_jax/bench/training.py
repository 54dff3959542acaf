# SPDX-License-Identifier: Apache-2.0
r"""Training: what a step gives for its time, whether a run fits, and the full run on TPUs.

    python -m sparse_lavida_jax.bench.training                                  # the bundled model
    python -m sparse_lavida_jax.bench.training --config=configs/lavida_o_lora.py --batch=8 --runs=12
    python -m sparse_lavida_jax.bench.training --plan --config=configs/lavida_o_lora.py
    python -m sparse_lavida_jax.bench.training --plan --config=configs/lavida_o.py --device-gb=80
    python -m sparse_lavida_jax.bench.training --plan --config=configs/sft_1024.py --devices=64
    python -m sparse_lavida_jax.bench.training --aot --config=configs/lavida_o.py      # 15 minutes

Without a mode, on this device and on the same examples in turn: step-causal training with tiles
skipped (by the kernel, or in plain lax where there is none), with the mask written out, and masked
diffusion with full attention as LaViDa-O has it. Compared are tokens with a loss a second and a
TFLOP, and how much the loss of a batch varies; then the memory of the loss over a large vocabulary,
in chunks and plain. With `--config` the parameters are random, which changes no time; their loss
says nothing.

`--plan` prints the memory, in 1e9 bytes, of the ways to train a model of this size, and of the
config itself, which is the last row, on one device: of a batch, a microbatch and a mesh as the
config has them (`bench/plan.py` says how it is counted). Ends with status 2 if that does not fit.
Nothing is allocated: any machine will do.

`--aot` compiles the training step of a config for 64 TPU chips, and sampling for 8, on any Linux
machine: none of the chips is there (`bench/described.py`).
"""

import dataclasses
import pathlib
import random
import statistics
import sys

import jax
import rich.console
import rich.table
from absl import app, flags, logging
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.bench import described, objectives, plan, table
from sparse_lavida_jax.bench.record import Bench, read_rows
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.training import optimizer

PLAN = flags.DEFINE_boolean("plan", False, "Print a table of memory.")
AOT = flags.DEFINE_boolean("aot", False, "Compile for TPUs that are not there.")
TARGETS = flags.DEFINE_list(
    "targets", [*described.TRAINING, *described.SAMPLING], "What --aot compiles for."
)
REDUCE = flags.DEFINE_list(
    "reduce", ["float32"], "Of --aot: model.grad_reduce_dtype; 'float32,compute' takes both."
)
EFFORT = flags.DEFINE_float(
    "effort", 0.0, "Of the compiler of --aot; below 0 it is quick, and no time is projected.",
    lower_bound=-1.0, upper_bound=1.0,
)  # fmt: skip
CONFIG = flags.DEFINE_string("config", "", "A config file.")
CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "scenes", "Trained where there is no config: a folder or a bundled name."
)
BATCH = flags.DEFINE_integer("batch", 16, "Examples of a step.", lower_bound=1)
RUNS = flags.DEFINE_integer("runs", 24, "Timed steps of each way, each of a batch of its own.",
    lower_bound=2,
)  # fmt: skip
DEVICE_GB = flags.DEFINE_float(
    "device-gb", 141.0, "Memory of the device as vendors count it, in 2**30 bytes; 141: an H200.",
    lower_bound=0.0,
)  # fmt: skip
DEVICES = flags.DEFINE_integer(
    "devices", 0, "Of --plan: devices that train.mesh is laid over; 0: as many as it names.",
    lower_bound=0,
)  # fmt: skip
ROWS = flags.DEFINE_integer(
    "rows", 0, "Rows that pass a device at a time; 0: as the config says, and 128 of --aot in all.",
    lower_bound=0,
)  # fmt: skip
# Of a text-to-image row at 1024 px: a cell grid of 32 x 32 and four groups of 64 registers.
TEXT_TOKENS = flags.DEFINE_integer(
    "text-tokens", 1024, "Understanding tokens of an example.", lower_bound=1
)
IMAGE_TOKENS = flags.DEFINE_integer(
    "image-tokens", 1280, "Generation tokens of an example.", lower_bound=0
)

AOT_ROWS = 128
HEAD = {"width": 4096, "vocabulary": 127_378, "dtype": "bfloat16"}  # of words, as released
HEAD_TOKENS = (1024, 4096)  # of a row
HEAD_CHUNK = 512


def main(argv: list[str]) -> None:
    """Runs one of the modes."""
    del argv
    logging.set_verbosity(logging.WARNING)
    if (PLAN.value or AOT.value) and not CONFIG.value:
        sys.exit("bench.training: this mode wants --config=FILE, such as configs/lavida_o.py.")
    try:
        if PLAN.value:
            _print_plan(config.read(pathlib.Path(CONFIG.value)))
        elif AOT.value:
            _compile(config.read(pathlib.Path(CONFIG.value)))
        else:
            _compare()
    except config.ConfigError as error:
        print(f"bench.training: {error}", file=sys.stderr)
        sys.exit(2)


# ---------------------------------------------------------------------------------------------
# Ways to train, on this device.


def _compare() -> None:
    bench = Bench("training")
    settings, params, make_example = _subject()
    found, trainers = {}, {}
    sizes = described.matrices(settings.model)
    ways = objectives.methods(settings)
    for name, way in ways.items():
        found[name] = objectives.batches(way, make_example, RUNS.value, BATCH.value)
        trainers[name] = objectives.Trainer(way, found[name])
        print(f"{name}: compiled in {trainers[name].compile_s:.0f} s", flush=True)
    state = objectives.State.of(settings, params)
    del params
    times, losses = ({name: [] for name in trainers} for _ in range(2))
    for name in trainers:
        trainers[name].run(state, 0)  # to warm up
    order, rng = list(trainers), random.Random(0)
    for index in range(RUNS.value):
        rng.shuffle(order)
        for name in order:
            seconds, loss = trainers[name].run(state, index)
            times[name].append(seconds)
            losses[name].append(loss)
    for name, way in ways.items():
        bench.write(
            f"{settings.name}/{name}/b{BATCH.value}",
            {
                "task": "draw",
                "model": settings.name,
                "method": name,
                "attention": way.model.attention_implementation,
                "dtype": settings.model.compute_dtype,
                "batch": BATCH.value,
                "times_s": times[name],
                "median_s": statistics.median(times[name]),
                "min_s": min(times[name]),
                "max_s": max(times[name]),
                "compile_s": trainers[name].compile_s,
                "tokens": objectives.counted(found[name]),
                "flops": {"computed": objectives.flops(way, found[name], sizes)},
                "loss": None
                if CONFIG.value
                else {
                    "mean": statistics.mean(losses[name]),
                    "std": statistics.stdev(losses[name]),
                    "batches": RUNS.value,
                },
                "bytes": {"temporaries": trainers[name].temporaries},
            },
        )
    _measure_head(bench)
    rows = [row for row in read_rows(bench.suite) if row["run"] == bench.run]
    print(f"\n{table.table('training', rows)}\n\n{table.table('head', rows)}")


def _subject() -> tuple[config.Config, Denoiser, objectives.MakeExample]:
    """Returns settings without a moving average, parameters and examples."""
    if CONFIG.value:
        settings = config.read(pathlib.Path(CONFIG.value))
        params = Denoiser(settings.model, rngs=nnx.Rngs(settings.seed))
        frozen = optimizer.frozen_dtype(settings.optimizer)
        params = jax.tree.map(lambda x: x.astype(frozen), params)
        make_example = objectives.random_examples(settings.model, settings.seed)
    else:
        pipe = SparseLaViDa.from_pretrained(CHECKPOINT.value)
        settings, params = pipe.settings, pipe.model
        make_example = objectives.scene_examples(pipe.encoder, settings.seed)
    plain = dataclasses.replace(settings.optimizer, ema=0.0)
    return dataclasses.replace(settings, optimizer=plain), params, make_example


def _measure_head(bench: Bench) -> None:
    """Of the full model's words, compiled from shapes: memory alone."""
    for tokens in HEAD_TOKENS:
        for name, chunk in (("plain", 0), (f"chunk{HEAD_CHUNK}", HEAD_CHUNK)):
            temporaries, results = objectives.head_memory(tokens=tokens, chunk=chunk, **HEAD)
            bench.write(
                f"cross_entropy/{name}/t{tokens}",
                {
                    "task": f"cross_entropy/{tokens}",
                    "method": name,
                    "dtype": HEAD["dtype"],
                    "batch": 1,
                    "bytes": {"temporaries": temporaries, "results": results},
                    "note": "of the compiled program; gradients are of its results",
                },
            )


# ---------------------------------------------------------------------------------------------
# The full model on TPUs that are not there.


def _compile(settings: config.Config) -> None:
    bench, settings = Bench("aot"), described.full_run(settings)
    batch = plan.Batch(ROWS.value or AOT_ROWS, TEXT_TOKENS.value, IMAGE_TOKENS.value)
    for topology in TARGETS.value:
        if topology in described.TRAINING:
            for dtype in REDUCE.value:
                model = dataclasses.replace(settings.model, grad_reduce_dtype=dtype)
                _compile_training(
                    bench, dataclasses.replace(settings, model=model), topology, batch
                )
        elif topology in described.SAMPLING:
            _compile_sampling(bench, settings, topology)
        else:
            known = ", ".join([*described.TRAINING, *described.SAMPLING])
            raise config.ConfigError(f"--targets={topology} is unknown: choose among {known}.")
    rows = [row for row in read_rows(bench.suite) if row["run"] == bench.run]
    print(f"\n{table.table('aot', rows)}\n\n{table.table('projected', rows)}")


def _compile_training(bench: Bench, settings, topology: str, batch: plan.Batch) -> None:
    axes = described.training_axes(settings, topology)
    step = described.training(settings, topology, axes, batch, EFFORT.value)
    useful = described.useful_flops(settings.model, batch)
    expected = described.expected_bytes(settings, axes, batch)
    dtype = settings.model.grad_reduce_dtype
    values = _of_program(step, useful) | {
        "model": settings.name,
        "task": "train_step",
        "method": f"gradients summed in {'bfloat16' if dtype == 'compute' else dtype}",
        "dtype": settings.model.compute_dtype,
        "batch": batch.rows,
        "tokens": {"useful": batch.rows * (batch.understanding + batch.generation)},
        "expected_bytes": expected | {"total": sum(expected.values())},
        "loss_chunk": settings.train.loss_chunk,
        "remat": settings.model.remat,
        "effort": EFFORT.value,
    }
    if EFFORT.value < 0:
        del values["projected"]
    bench.write(f"{settings.name}/train/{topology.replace(':', '-')}/{dtype}", values)
    print(f"{topology}, training: compiled in {step.seconds:.0f} s", flush=True)


def _compile_sampling(bench: Bench, settings: config.Config, topology: str) -> None:
    programs = described.sampling(settings, topology, described.SAMPLING[topology])
    for name, program in zip(("prefill", "segment"), programs, strict=True):
        values = _of_program(program, 0.0) | {
            "model": settings.name,
            "task": name,
            "method": "sparse",
            "dtype": settings.model.compute_dtype,
            "batch": 1,
            "guidance_rows": 2,
        }
        if name == "segment":
            values["steps"] = len(program.inputs[2].block)
        bench.write(f"{settings.name}/{name}/{topology.replace(':', '-')}", values)
        print(f"{topology}, {name}: compiled in {program.seconds:.0f} s", flush=True)


def _of_program(program: described.Compiled, useful_flops: float) -> dict:
    chips = 1
    for size in program.axes.values():
        chips *= size
    cost = program.program.cost_analysis()
    return {
        "status": "compiled",
        "device": {
            "kind": f"TPU {program.topology.partition(':')[0]}",
            "count": chips,
            "memory_bytes": program.chip.memory,
            "topology": program.topology,
            "described": True,
        },
        "mesh": program.axes,
        "compile_s": program.seconds,
        "bytes": program.memory() | {"allowed": described.MARGIN * program.chip.memory},
        "exchanged_bytes": program.exchanged(),
        "flops": {
            "useful": useful_flops,
            "compiler_loops_once": cost.get("flops"),
            "kernels_chip": described.hlo.kernel_flops(program.text),
        },
        "compiler_bytes_accessed_loops_once": cost.get("bytes accessed"),
        "projected": program.projected(useful_flops),
        "note": "compiled, never run: what is projected was not measured",
    }


# ---------------------------------------------------------------------------------------------
# Memory of one device.

COLUMNS = ("parameters", "gradients", "moments", "average", "kept", "layer", "logits", "total")


def _print_plan(settings: config.Config) -> None:
    """Prints the table; refuses what does not fit."""
    plans = _plans(settings)
    device = round(DEVICE_GB.value * 2**30)
    _print(plans, device)
    if not plans[settings.name].fits(device):
        print(f"bench.training: {_refusal(plans, settings.name, device)}", file=sys.stderr)
        sys.exit(2)


def _plans(settings: config.Config) -> dict[str, plan.Plan]:
    axes, packing = plan.axes_of(settings.train.mesh, DEVICES.value), settings.data.packing
    images = 0 if settings.model.understanding_only else IMAGE_TOKENS.value
    rows = ROWS.value or plan.rows_of(settings, axes)
    batch = plan.Batch(rows, TEXT_TOKENS.value * packing, images * packing)
    return {
        name: plan.plan(way, batch, axes)
        for name, way in {**plan.ways(settings), settings.name: settings}.items()
    }


def _print(plans: dict[str, plan.Plan], device: int) -> None:
    table = rich.table.Table("GB (1e9)", "trained", "remat", *COLUMNS, f"of {DEVICE_GB.value:g}")
    for name, one in plans.items():
        numbers = [f"{getattr(one, column) / plan.GB:.1f}" for column in COLUMNS]
        fits = "fits" if one.fits(device) else "too large"
        table.add_row(name, f"{one.trained / 1e9:.2f} B", one.remat, *numbers, fits)
    # In a file as on a wide terminal: a row of numbers that is broken cannot be read.
    rich.console.Console(width=150).print(table)


def _refusal(plans: dict[str, plan.Plan], name: str, device: int) -> str:
    others = [
        f"{other} ({one.total / plan.GB:.1f} GB)"
        for other, one in plans.items()
        if other != name and one.fits(device)
    ]
    return (
        f"{name} needs {plans[name].total / plan.GB:.1f} GB (1e9 bytes), and a device of"
        f" {DEVICE_GB.value:g} GB has {plan.USABLE * device / plan.GB:.1f} for it."
        f" What fits: {', '.join(others) or 'nothing of the above'}."
        " Fewer rows, a smaller train.loss_chunk and model.remat='layer' take less."
    )


if __name__ == "__main__":
    app.run(main)
