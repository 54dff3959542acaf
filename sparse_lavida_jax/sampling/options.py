# SPDX-License-Identifier: Apache-2.0
"""The sampling settings that a person changes by name: one list for command, page and server."""

import dataclasses
from typing import Any

from sparse_lavida_jax import config


def changed(
    sampling: config.Sampling,
    *,
    draws: bool,
    steps: int | None = None,
    temperature: float | None = None,
    sampler: str | None = None,
    registers: tuple[int, int] | None = None,
    guidance: float | None = None,
    order: str | None = None,
    quantize: str | None = None,
    vq_dtype: str | None = None,
) -> config.Sampling:
    """Returns settings with what is given put in; None leaves a checkpoint's own.

    Args:
        draws: whether the task makes an image; steps, temperature and sampler are then those of
            the image, otherwise those of the text.
        steps: of an image, or of a text block.
        sampler: a preset.
        registers: the first and the last number of them; the last -1: they do not fall.
        quantize: matrices in 8 bits.
        vq_dtype: of the decoder of images.

    Raises:
        ConfigError: one is out of range.
    """
    changes: dict[str, Any] = {}
    if steps is not None:
        changes |= {"num_steps": steps} if draws else {"text_steps": steps, "text_step_ratio": 0.0}
    if temperature is not None:
        changes["temperature" if draws else "text_temperature"] = temperature
    if sampler is not None:
        by_all = draws or sampler in config.PRESETS
        changes["preset" if by_all else "text_preset"] = sampler
        if by_all and not draws:
            changes["text_preset"] = ""
    if registers is not None:
        changes |= dict(zip(("registers", "registers_end"), registers, strict=True))
    if guidance is not None:
        changes |= {"guidance": guidance, "guidance_edit": -1.0}  # of what is asked, an edit too
    if order is not None:
        changes["order"] = order
    if quantize is not None:
        changes["quantize"] = quantize
    if vq_dtype is not None:
        changes["vq_dtype"] = vq_dtype
    return dataclasses.replace(sampling, **changes)
