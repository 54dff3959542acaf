# SPDX-License-Identifier: Apache-2.0
"""Which ways to train a model fit the memory of a device: `sparse-lavida fits CONFIG`."""

import argparse
import dataclasses
import io
import pathlib
from typing import Any

import rich.console
import rich.table

from sparse_lavida_jax import config
from sparse_lavida_jax.training import memory

CARDS = (24, 48)  # GiB of other devices in the table


def report(asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the memory in bytes that ways to train need on one device, for `json`.

    The last way is the config itself, with its batch, microbatches and mesh; the others are
    compared at the same batch. Nothing is allocated: any machine will do.

    Raises:
        ConfigError: the config is not valid, or cannot be laid over the devices.
    """
    settings = config.read(pathlib.Path(asked.config))
    axes, packing = memory.axes_of(settings.train.mesh, asked.devices or 0), settings.data.packing
    images = asked.image_tokens
    if settings.model.understanding_only:
        images = 0
    elif images is None:
        images = memory.image_tokens(settings)
    batch = memory.BatchSize(
        memory.rows_of(settings, axes), asked.text_tokens * packing, images * packing
    )
    plans, device = memory.plans(settings, batch, axes), round(asked.device_gb * 2**30)
    fits = plans[settings.name].fits(device)
    return {
        "config": settings.name,
        "batch": dataclasses.asdict(batch),
        "mesh": axes,
        "device_gib": asked.device_gb,
        "ways": {
            name: dataclasses.asdict(plan) | {"total": plan.total, "fits": plan.fits(device)}
            for name, plan in plans.items()
        },
        "fits": fits,
        "why": "" if fits else memory.refusal(plans, settings.name, device),
    }


def text(found: dict[str, Any]) -> str:
    """Returns the report as a table, in GB (1e9 bytes)."""
    cards = sorted({*CARDS, found["device_gib"]})
    titles = (*memory.PARTS, "total", *(f"{card:g} GiB" for card in cards))
    shown = rich.table.Table("GB (1e9)", "trained", "remat", *titles)
    for name, plan in found["ways"].items():
        numbers = [f"{plan[part] / memory.GB:.1f}" for part in (*memory.PARTS, "total")]
        fit = [memory.fits(plan["total"], round(card * 2**30)) for card in cards]
        verdicts = ["fits" if one else "too large" for one in fit]
        shown.add_row(name, f"{plan['trained'] / 1e9:.2f} B", plan["remat"], *numbers, *verdicts)
    # As on a wide terminal, also in a file: wrapped rows of numbers are unreadable.
    page = io.StringIO()
    rich.console.Console(width=170, file=page).print(shown)
    rows = (
        "rows on a device: {rows}; tokens of each: {understanding} of text, {generation} of images"
    )
    return f"{rows.format(**found['batch'])}\n{page.getvalue()}".rstrip()
