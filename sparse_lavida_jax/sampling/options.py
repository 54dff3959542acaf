# SPDX-License-Identifier: Apache-2.0
"""The sampling options of users: one table for Python, command line, web page and server."""

import dataclasses
from collections.abc import Callable
from typing import Any

from sparse_lavida_jax import config, schema
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sequence import Modality


@dataclasses.dataclass(frozen=True)
class Option:
    """A sampling option.

    Attributes:
        changes: the fields of `config.Sampling` that a value sets; the second argument says
            whether the task makes an image.
        aliases: other names of it.
        needs_image: why a task that makes no image cannot have it; "": it can.
        by_row: whether each row may have a value of its own.
    """

    changes: Callable[[Any, bool], dict[str, Any]]
    aliases: tuple[str, ...] = ()
    needs_image: str = ""
    by_row: bool = False


def _steps(value: int, draws: bool) -> dict[str, Any]:
    return {"num_steps": value} if draws else {"text": {"steps": value, "step_ratio": 0.0}}


# Samplers as published.
PUBLISHED: dict[str, dict[str, Any]] = {
    # LaViDa-O as released (spec Sec. 6 and 7.7): one token per step, questions in blocks of up to
    # 128 tokens, layouts and verdicts in blocks of 16.
    "released": {
        "preset": "dense",
        "text": {"preset": "prefix", "commit": "count", "step_ratio": 1.0, "block_len": 128},
        "layout_block_len": 16,
        "layout_temperature": 0.5,
        "released": {"text_behaviour": True},
        "grid": "code",
        "edit_guidance": "source_only",
    },
    # Fast-dLLM as in the paper's Table 4: the dual cache and the factor rule.
    "fast_dllm": {
        "preset": "dense",
        "text": {"preset": "fast_dllm_dual", "commit": "factor", "factor": 1.0},
    },
}
# What `sampler` may be, by the modality of the response, with the settings that each sets: presets
# (`sampling/presets.py`), which say what a step passes and caches, and published samplers.
SAMPLERS: dict[Modality, dict[str, dict[str, Any]]] = {
    "image": {name: {"preset": name} for name in config.PRESETS} | PUBLISHED,
    "text": {name: {"preset": name, "text": {"preset": ""}} for name in config.PRESETS}
    | {name: {"text": {"preset": name}} for name in config.TEXT_PRESETS}
    | PUBLISHED,
}


def _sampler(value: str, draws: bool) -> dict[str, Any]:
    samplers = SAMPLERS["image" if draws else "text"]
    if value not in samplers:
        raise RequestError(
            f"{{setting}}={{value}} is not a sampler of {'images' if draws else 'text'}:"
            " {allowed}.",
            setting="sampler",
            value=repr(value),
            allowed=f"choose one of {', '.join(samplers)}",
        )
    return samplers[value]


def _registers(value: int | tuple[int, int], draws: bool) -> dict[str, Any]:
    first, last = (value, -1) if isinstance(value, int) else value
    if last != -1 and not draws:
        raise RequestError(
            "{setting} fall from step to step in images only: {allowed}.",
            setting="registers",
            allowed="give one number",
        )
    return {"registers": first, "registers_end": last}


# Later entries override earlier ones: a single option overrides what `sampler` sets.
OPTIONS: dict[str, Option] = {
    "sampler": Option(_sampler),
    # Steps of an image, or of a text block.
    "steps": Option(_steps, ("num_inference_steps",)),
    "temperature": Option(
        lambda value, draws: {"temperature": value} if draws else {"text": {"temperature": value}},
        by_row=True,
    ),
    # Of the layout that is written before an image; 0 takes the most probable tokens.
    "layout_temperature": Option(
        lambda value, draws: {"layout_temperature": value}, (), "it lays no image out"
    ),
    # How many, or the first and the last number; a last number of -1: the number stays constant.
    "registers": Option(_registers),
    # The guidance scale of the prompt, for edits too.
    "guidance": Option(
        lambda value, draws: {"guidance": value, "guidance_edit": -1.0},
        ("guidance_scale",),
        "text is not guided",
        by_row=True,
    ),
    "guidance_image": Option(
        lambda value, draws: {"guidance_image": value}, (), "text is not guided", by_row=True
    ),
    "revisions": Option(
        lambda value, draws: {"revisions": value}, (), "only cells of images are drawn again"
    ),
    "order": Option(lambda value, draws: {"order": value}, (), "text has no grid of cells"),
    # Matrices in 8 bits.
    "quantize": Option(lambda value, draws: {"quantize": value}),
    "vq_dtype": Option(lambda value, draws: {"vq_dtype": value}, (), "no image is decoded"),
}
ALIASES = {alias: name for name, option in OPTIONS.items() for alias in option.aliases}


QUALITIES = ("low", "medium", "high")


def quality_options(quality: str, sampling: config.Sampling, cells: int) -> dict[str, int]:
    """Returns the steps and revisions of an image for a quality (docs/serving.md: what they cost).

    "medium" are the model's own numbers, "low" is half of both, with `Sampling.low_steps` instead
    if the model has it, and "high" twice as many. All use as many registers as in training.

    Args:
        cells: of an image.

    Raises:
        RequestError: `quality` is not one of `QUALITIES`.
    """
    if quality not in QUALITIES:
        allowed = f"choose one of {', '.join(QUALITIES)}"
        raise RequestError(setting="quality", value=repr(quality), allowed=allowed)
    steps, revisions = sampling.num_steps, sampling.revisions
    if quality == "low":
        steps, revisions = sampling.low_steps or max(1, steps // 2), -(-revisions // 2)
    elif quality == "high":
        steps = max(steps, min(2 * steps, cells))
        revisions = min(2 * revisions, schema.MOST_REVISIONS)
    return {"steps": steps} | ({"revisions": revisions} if revisions else {})


def changed(sampling: config.Sampling, *, draws: bool, **given: Any) -> config.Sampling:
    """Returns settings with the given options applied; None keeps the checkpoint's own.

    Args:
        draws: whether the task makes an image: then steps, temperature and sampler apply to the
            image, otherwise to the text.

    Raises:
        ConfigError: a value is out of range.
        RequestError: an option does not apply to text.
    """
    changes: dict[str, Any] = {}
    set_by: dict[str, str] = {}  # the option that set a field
    asked = {ALIASES.get(alias, alias): v for alias, v in given.items() if v is not None}
    for name in sorted(asked, key=list(OPTIONS).index):
        value = asked[name]
        if OPTIONS[name].needs_image and not draws:
            raise RequestError(
                "this task takes no {setting}: {allowed}.",
                setting=name,
                allowed=OPTIONS[name].needs_image,
            )
        for field, change in OPTIONS[name].changes(value, draws).items():
            is_section = isinstance(change, dict)
            changes[field] = changes.get(field, {}) | change if is_section else change
            set_by |= dict.fromkeys(change if is_section else (field,), name)
    try:
        return config.changed(sampling, changes) if changes else sampling
    except config.ConfigError as error:
        field = error.setting.rpartition(".")[2]
        raise error.about(set_by.get(field, error.setting)) from None
