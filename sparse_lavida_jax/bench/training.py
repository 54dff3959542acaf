# SPDX-License-Identifier: Apache-2.0
r"""Whether a training fits a device, before it is started.

    python -m sparse_lavida_jax.bench.training --plan --config=configs/lavida_o_lora.py
    python -m sparse_lavida_jax.bench.training --plan --config=configs/lavida_o.py --device-gb=80

Prints the memory, in 1e9 bytes, of the ways to train a model of this size, and of the config
itself, which is the last row: how it is counted stands in `bench/plan.py`. Ends with status 2 if
that does not fit. Nothing is allocated: any machine will do.
"""

import pathlib
import sys

import rich.console
import rich.table
from absl import app, flags

from sparse_lavida_jax import config, config_files
from sparse_lavida_jax.bench import plan

PLAN = flags.DEFINE_boolean("plan", False, "Print a table of memory.")
CONFIG = flags.DEFINE_string("config", "", "A config file.")
DEVICE_GB = flags.DEFINE_float(
    "device-gb", 141.0, "Memory of the device as vendors count it, in 2**30 bytes; 141: an H200.",
    lower_bound=0.0,
)  # fmt: skip
ROWS = flags.DEFINE_integer("rows", 1, "Rows that pass the model at a time.", lower_bound=1)
# Of a text-to-image row at 1024 px: a cell grid of 32 x 32 and four groups of 64 registers.
TEXT_TOKENS = flags.DEFINE_integer(
    "text-tokens", 1024, "Understanding tokens of a row.", lower_bound=1
)
IMAGE_TOKENS = flags.DEFINE_integer(
    "image-tokens", 1280, "Generation tokens of a row.", lower_bound=0
)

COLUMNS = ("parameters", "gradients", "moments", "average", "kept", "layer", "logits", "total")


def main(argv: list[str]) -> None:
    """Prints the table; refuses what does not fit."""
    del argv
    if not (PLAN.value and CONFIG.value):
        sys.exit("bench.training: give --plan and --config=FILE, such as configs/lavida_o.py.")
    try:
        settings = config_files.read(pathlib.Path(CONFIG.value))
        plans = _plans(settings)
    except config.ConfigError as error:
        print(f"bench.training: {error}", file=sys.stderr)
        sys.exit(2)
    device = round(DEVICE_GB.value * 2**30)
    _print(plans, device)
    if not plans[settings.name].fits(device):
        print(f"bench.training: {_refusal(plans, settings.name, device)}", file=sys.stderr)
        sys.exit(2)


def _plans(settings: config.Config) -> dict[str, plan.Plan]:
    images = 0 if settings.model.understanding_only else IMAGE_TOKENS.value
    batch = plan.Batch(ROWS.value, TEXT_TOKENS.value, images)
    return {
        name: plan.plan(way, batch)
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
