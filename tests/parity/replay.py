# SPDX-License-Identifier: Apache-2.0
"""Replays runs of the released samplers: settings, requests, draws, steps one by one."""

import dataclasses
import functools
import itertools
import unittest.mock

import golden
import jax
import jax.numpy as jnp
import merged
import numpy as np
import pytest
import tiny
import traces

from sparse_lavida_jax import config, orders, sample, sequence
from sparse_lavida_jax.models import vq
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sampling import draw, plans, presets, prompts
from sparse_lavida_jax.sampling import state as state_of
from sparse_lavida_jax.tags import GIVEN_BLOCK
from sparse_lavida_jax.visibility import PAD_BLOCK

REMASKING = {"low_confidence": "probability", "entrophy": "entropy"}  # released name -> ours
# The second rows of the released edit modes 0 to 3.
EDIT_MODES = ("source_only", "no_source", "no_image", "no_text")


def variants(name, key=""):
    """Returns the recorded runs of a case that have a setting `key`, as parameters of a test."""
    if reason := golden.why_absent(name):
        return [pytest.param("", marks=pytest.mark.skip(reason=reason))]
    runs = golden.case(name).config["variants"]
    return [run for run, variant in runs.items() if not key or key in variant]


def parts_of(ids, cutoff, names, *, vision=None, source=None):
    """Returns a recorded sequence as parts.

    Args:
        ids: of the spliced sequence [L].
        cutoff: guidance drops everything before it.
        names: the case's special ids.
        vision: the features of its images, one after another.
        source: the cells of its source image.
    """

    def kind_of(place):
        if ids[place] == names["IMAGE_INDEX"]:
            return "vision"
        if ids[place] == names["RES6"] and source is not None:
            return "source"
        if ids[place] == names["RES5"]:
            return "response"
        return "prompt" if place < cutoff else "kept"

    parts, places = [], range(len(ids))
    for kind, run in itertools.groupby(places, kind_of):
        run = list(run)
        if kind == "vision":
            parts.append(vision)
            assert vision.num_tokens == len(run)
        elif kind == "source":
            parts.append(sequence.Source(source))
            assert len(source) == len(run)
        elif kind == "response":
            parts.append(sequence.Response(len(run)))
        else:
            parts.append(sequence.Text(np.asarray(ids)[run], keep=kind == "kept"))
    return tuple(parts)


# ---------------------------------------------------------------------------------------------
# Text.


def text_sampling(variant):
    """Returns the settings of a recorded text run."""
    if variant["use_fast_dlm"]:
        preset = "fast_dllm_dual"
    else:
        preset = "prefix" if variant["prefix_lm"] else "dense"
    factor, threshold = variant.get("factor"), variant.get("threshold")
    assert variant["cfg_scale"] == 0, "text guidance raises in the release"
    return config.Sampling(
        text=config.TextSampling(
            preset=preset,
            temperature=float(variant["temperature"]),
            steps=variant["steps_per_block"],
            schedule=variant["schedule"] or "even",
            shift=float((variant["schedule_kwargs"] or {}).get("shift", 1.0)),
            confidence=REMASKING.get(variant["remasking"], variant["remasking"]),
            commit="factor" if factor else "threshold" if threshold else "count",
            factor=float(factor or 1.0),
            threshold=float(threshold or 0.9),
        ),
        released=config.ReleasedSampling(text_behaviour=True),
    )


def text_draws(variant, inputs):
    """Returns the recorded noise of a text run, None if it has none."""
    if not variant.get("rand"):
        return None
    length = variant["max_new_tokens"]
    uniform = np.stack([inputs[name][:, -length:] for name in variant["rand"]])  # [k b l v]
    return tiny.Recorded(gumbel=tiny.gumbel(uniform)[..., None, :].astype(np.float32))


def text_request(ids, length, mask_id, draft=()):
    """Returns a request whose first tokens are given by a draft, except for its masks."""
    tokens = np.full((length, 1), mask_id, np.int32)
    tokens[: len(draft), 0] = draft
    parts = (sequence.Text(np.asarray(ids)), sequence.Response(length))
    return tiny.example(parts, tokens, tokens[:, 0] != mask_id, "text")


# ---------------------------------------------------------------------------------------------
# Images.


def image_sampling(variant):
    """Returns the settings of a recorded image or edit."""
    policy = variant["confidence_policy"]
    assert policy in ("stratified", "mmada")
    schedule, guidance = variant["schedule"], float(variant["guidance_scale"])
    falls, cools = variant["dynamic_temperature"], variant["dynamic_temperature_samp"]
    return config.Sampling(
        preset="dense",
        grid="code",
        num_steps=variant["n_steps"],
        order="confidence" if policy == "mmada" else "stratified",
        order_seed=variant["stratified_seed"] or 0,
        schedule=schedule if schedule in orders.SCHEDULES else "linear",
        shift=float(variant["shift"]),
        confidence_noise=float(variant["alg_temp"]),
        temperature=0.0 if variant["sample_policy"] == "argmax" else float(variant["temperature"]),
        top_k=variant["top_k"] or 0,
        top_p=float(variant["top_p"] or 1.0),
        guidance=guidance,
        guidance_image=float(variant["guidance_scale_image"]) if guidance else 0.0,
        guidance_interval=tuple(float(share) for share in variant["cfg_interval"]),
        edit_guidance=EDIT_MODES[variant["edit_mode"]],
        released=config.ReleasedSampling(
            confidence_noise_schedule=variant["schedule_temp"] if falls else "constant",
            confidence_noise_end=float(variant["min_temperature"]),
            confidence_noise_shift=float(variant["shift_alg_effective"]),
            temperature_schedule=variant["schedule_temp_samp"] if cools else "constant",
            temperature_end=float(variant["min_temperature_samp"]),
        ),
    )


def cells_of(codes, grid, side):
    """Returns codes [k n], raster order, as cells [k l g]."""
    return np.asarray(sequence.cells_from_codes(np.asarray(codes).reshape(-1, *grid), side))


def image_draws(variant, recorded, grid, side):
    """Returns the recorded draws of an image's run, None if there are none."""
    given = {}
    for ours, theirs in (("tokens", "sampled_codes"), ("sure", "confidence_gumbel")):
        if variant.get(theirs):
            given[ours] = cells_of(recorded[variant[theirs]], grid, side)[:, None]
    if "tokens" in given:
        given["tokens"] = given["tokens"].astype(np.int32)
    return tiny.Recorded(**given) if given else None


# ---------------------------------------------------------------------------------------------
# Runs.


def one_by_one(phases: list[plans.Steps]) -> list[plans.Steps]:
    """Returns the same steps, each a phase of its own."""
    return [part[i : i + 1] for part in phases for i in range(part.num_steps)]


def history(model, request, phases, settings, draws=None):
    """Returns the responses after each step [k l g], the final ones, and the number of passes."""
    shown, passes = [], 0

    def show(now):
        nonlocal passes
        if now.steps > passes:  # a step with nothing left to decode makes no pass
            shown.append(now.responses[0])
        passes = now.steps

    last = traces.finished(
        model, [request], one_by_one(phases), settings, draws=draws, callback=show
    )
    return np.stack(shown), last[0], passes


def image_request(parts, model, shape, pixels=None):
    """Returns a request for an image of a grid of codes, `shape`: height and width."""
    height, width = (length // model.codes_side for length in shape)
    blank = np.zeros((height * width, model.codes_per_token), np.int32)
    asked = tiny.example(parts, blank, np.zeros(len(blank), bool), "image", pixels)
    return dataclasses.replace(asked, grid=(height, width))


def image_plan(sampling, settings, model, request):
    """Returns the phases of a request for an image."""
    return presets.plan(sampling, settings, model, request.given[None], 1, grid=request.grid)


@dataclasses.dataclass(frozen=True)
class Pass:
    """Inputs and outputs of one forward pass, one entry per guidance row.

    Attributes:
        logits: of every code in raster order, not guided [r n v].
        embeds: the rows merged as in the released code [r L e].
        modality: which of their tokens are in the generation branch [r L].
    """

    logits: np.ndarray
    embeds: np.ndarray
    modality: np.ndarray


def one_pass(given, request, phase, settings, codes) -> Pass:
    """Returns one pass of the sampler over codes [n], as `phase` guides it."""
    model, made = given.model(), given.settings.model
    side = made.codes_side
    grid = tuple(length * side for length in request.grid)
    (cells,) = cells_of(codes, grid, side)
    inputs = tiny.sample_inputs([request], made, settings)
    prompt, rows = prompts.batched(inputs, made), state_of.rows_of(inputs, settings)
    on_device = jax.tree.map(jnp.asarray, (cells[None].astype(np.int32), rows, prompt))
    block, how = jnp.int32(phase.block[0]), {"guided": phase.guided, "settings": settings}
    logits, *streams = _pass_all(model, block, *on_device, **how)
    embeds, modality = merged_rows(streams, int(prompt.length[0]), made.width)
    return Pass(merged.codes_of(logits, grid, side), embeds, modality)


@functools.partial(tiny.quick_jit, static_argnames=("guided", "settings"))
def _pass_all(model, block, cells, rows, prompt, *, guided, settings):
    """Passes all cells [1 l g]; returns unguided logits of every row, and both embedded streams."""
    call, seen = Denoiser.__call__, []
    masked = (cells == model.settings.image_mask_id).any(axis=-1)
    state = state_of.SamplerState(
        cells,
        jnp.where(masked, state_of.NOT_DECODED, GIVEN_BLOCK),
        rows,
        state_of._seen(model, prompt, None),
        None,
        jnp.int32(0),
    )
    everything = jnp.arange(cells.shape[1], dtype=jnp.int32)[None]
    now = plans.Steps(
        block=block,
        clean=everything[:, :0],
        decode=everything,
        candidates=jnp.ones((*everything.shape, 1), bool),
        rest=everything[:, :0],
        count=jnp.zeros(1, jnp.int32),
        noise=jnp.float32(0),
        temperature=jnp.float32(1),
        guidance=jnp.float32(1),
        guided=guided,
        registers=settings.num_registers,
    )

    def observed(self, *streams, **options):
        seen.extend(streams)
        return call(self, *streams, **options)

    def rows_apart(logits, *_):
        return logits.reshape(-1, *logits.shape[2:])

    with (
        unittest.mock.patch.object(Denoiser, "__call__", observed),
        unittest.mock.patch.object(draw, "guided", rows_apart),
    ):
        logits, _ = sample.step_logits(model, state, now, (prompt,), settings)
    understanding, generation, features = seen
    text = understanding, model.embed_text(understanding, features)
    return logits, text, (generation, model.embed_image(generation))


def merged_rows(streams, length, width):
    """Merges both streams of a pass into the released code's one sequence."""
    rows = streams[0][0].index.shape[0]
    embeds = np.zeros((rows, length, width), np.float32)
    modality = np.zeros((rows, length), bool)
    seen = np.zeros((rows, length), int)
    for (stream, values), is_generation in zip(streams, (False, True), strict=True):
        values, block, position = map(np.asarray, (values, stream.tags.block, stream.tags.position))
        for row in range(rows):
            inside = block[row] != PAD_BLOCK
            at = position[row][inside]
            embeds[row, at, : values.shape[-1]] = values[row, inside]
            modality[row, at] = is_generation
            np.add.at(seen[row], at, 1)
    assert (seen == 1).all(), "every position stands in one stream, once"
    return embeds, modality


def assert_image(given, request, cells, expected):
    """Compares the decoded image of cells [l g], up to one grey level."""
    side = given.settings.model.codes_side
    codes = np.asarray(sequence.codes_from_cells(cells[None], request.grid[0], side))
    image = vq.to_pixels(given.vq(), codes)[0].astype(int)
    assert np.abs(image - expected).max() <= 1
