# SPDX-License-Identifier: Apache-2.0
"""Which requests the suites of whole requests are made of."""

import dataclasses
import functools

import jax
import numpy as np
from jaxtyping import UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.data import images
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.kernels import attention
from sparse_lavida_jax.models import fuse, text_head
from sparse_lavida_jax.sequence import Response, Source, Text

# Suites whose parameters are those of one task; the others write text, or make its logits.
TASKS: dict[str, fuse.Task] = dict.fromkeys(("ablation", "batch", "cpu"), "image")
SUITES = ("headline", "ablation", "batch", "edit", "reasoning", "quant", "fastpath", "cpu")
BATCHES = (1, 2, 4, 8)
STEPS_A_BLOCK = (4, 8, 32)  # of reasoning
FULL_CELLS = 1024  # of an image of 1024 pixels a side
STEPS_TIMED = 8  # of rows whose steps all cost the same
# Words of the prompt of an image and of a question, tokens of the answer; of a smaller model.
WORDS, QUESTION, ANSWER = 128, 1500, 1024
FEW_WORDS, SHORT_QUESTION, SHORT_ANSWER = 32, 48, 16


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: a request by one method.

    Attributes:
        id: task/method/batch, and what else tells rows apart.
        discards: see `presets.StepSettings`.
        steps_timed: of the plan, from the middle of its longest segment; 0: all.
        image: that is encoded before, in an edit.
        in_trips: see `sample.sample`.
        without: of the suite `fastpath`, which of its changes is taken back (`changes`), "" none;
            None in other suites, whose prompts differ in length, so that no prefix is ever kept.
    """

    id: str
    task: str
    method: str
    batch: int
    example: Example
    sampling: config.Sampling
    text_block_len: int
    discards: bool = False
    steps_timed: int = 0
    image: UInt8[np.ndarray, "h w 3"] | None = None
    in_trips: bool | None = None
    without: str | None = None

    @property
    def keeps_prefix(self) -> bool:
        return self.without is not None and self.without != "prefix"


def cases(suite: str, settings: config.Config) -> list[Case]:
    """Returns the rows of a suite for a model of this size."""
    return {
        "headline": _headline,
        "ablation": _ablation,
        "batch": _batches,
        "edit": _edits,
        "reasoning": _reasoning,
        "quant": _quantized,
        "fastpath": _fast_path,
        "cpu": functools.partial(_headline, released=False),
    }[suite](settings)


def _headline(settings: config.Config, *, released: bool = True) -> list[Case]:
    names = ("sparse", "dense_lean", "dense_released") if released else ("sparse", "dense_lean")
    return [_drawing(settings, name) for name in names]


def _ablation(settings: config.Config) -> list[Case]:
    names = [name for name in config.PRESETS if name != "dense"]
    # Segments run whole: half as many programs as in trips, and eight rows compile their own.
    return [dataclasses.replace(_drawing(settings, name), in_trips=False) for name in names]


def _batches(settings: config.Config) -> list[Case]:
    return [_drawing(settings, name, b) for b in BATCHES for name in ("sparse", "dense_lean")]


def _edits(settings: config.Config) -> list[Case]:
    names = ("sparse", "dense_lean", "dense_released")
    return [_drawing(settings, name, edits=True) for name in names]


def _reasoning(settings: config.Config) -> list[Case]:
    # Sparse; the prompt cached and everything else passed in every step; both forms of Fast-dLLM.
    methods = ("sparse", "dense_cached", "fast_dllm_dual_released", "fast_dllm_dual_lean")
    steps = [k for k in STEPS_A_BLOCK if k <= settings.data.text_block_len]
    return [_writing(settings, name, k) for k in steps for name in methods]


def _quantized(settings: config.Config) -> list[Case]:
    steps = min(8, settings.data.text_block_len)
    methods = ("", *config.QUANTIZED)
    return [
        *(_drawing(settings, "sparse", quantized=method) for method in methods),
        *(_writing(settings, "sparse", steps, quantized=method) for method in methods),
    ]


def in_turn(suite: str) -> bool:
    """Returns whether the rows of a suite are timed in turn: of small models, where others work."""
    return suite == "cpu" or (suite == "fastpath" and jax.default_backend() == "cpu")


def changes(model: config.Model, kind: str) -> list[str]:
    """Returns what makes a request fast on this device and is taken back, each in a row.

    fused: matrices of queries, keys and values as one; by_layer: arrays of every layer apart;
    trips: segments in programs of `sample.TRIPS` steps; tables_ahead: tables of attention before
    the loop; prefix: kept between requests; vq_dtype: the decoder in it, otherwise in float32;
    tiled_head: no logits over the vocabulary.
    """
    backend, implementation = jax.default_backend(), model.attention_implementation or None
    if kind == "text":
        return ["fused"] + ["tiled_head"] * bool(text_head.tile_of(model.vocab_size))
    there = {
        "fused": True,
        "by_layer": backend == "gpu",
        "trips": backend != "cpu",
        "tables_ahead": attention.takes_tables(implementation),
        "prefix": True,
        "vq_dtype": True,
    }
    return [name for name, is_there in there.items() if is_there]


def _fast_path(settings: config.Config) -> list[Case]:
    steps = min(8, settings.data.text_block_len)
    return [
        dataclasses.replace(
            case,
            id=case.id.replace("/sparse/", f"/without_{name}/" if name else "/full/"),
            method=f"without_{name}" if name else "full",
            without=name,
            in_trips=False if name == "trips" else None,
        )
        for case in (_drawing(settings, "sparse"), _writing(settings, "sparse", steps))
        for name in ("", *changes(settings.model, case.example.kind))
    ]


def _drawing(
    settings: config.Config, method: str, batch: int = 1, *, edits=False, quantized: str = ""
) -> Case:
    model, words = settings.model, _ids(settings.model, sizes(settings.model)[0])
    pixels = model.grid_size * model.codes_side * settings.vq.factor
    cells = np.zeros((model.num_cells, model.codes_per_token), np.int32)
    parts, views, image = (Text(words), Response(model.num_cells)), (), None
    if edits:
        rng = np.random.default_rng(0)
        image = rng.integers(0, 256, (pixels, pixels, 3), dtype=np.uint8)
        seen = images.see(image, model.vision)
        codes = rng.integers(0, model.codebook_size, cells.shape).astype(np.int32)
        parts = (seen.part, Source(codes), Text(words), Response(model.num_cells))
        views = (seen.pixels,)
    known = np.zeros(len(cells), bool)
    example = Example(parts, cells, known, "image", None, len(cells), views)
    task = f"{'edit' if edits else 't2i'}{pixels}"
    preset = "dense" if method.startswith("dense") else method
    # Dense is LaViDa-O itself, over the grid of codes: every step passes the cells and no padding.
    grid = "code" if preset == "dense" else "cell"
    sampling = dataclasses.replace(settings.sampling, preset=preset, quantize=quantized, grid=grid)
    # All of these pass as many tokens in every step.
    constant = preset in ("dense", "none") and sampling.num_steps > STEPS_TIMED
    name = quantized or method
    return Case(
        f"{task}/{name}/b{batch}", task, name, batch, example, sampling,
        settings.data.text_block_len, method == "dense_released",
        STEPS_TIMED if constant else 0, image,
    )  # fmt: skip


def _writing(settings: config.Config, method: str, steps: int, *, quantized: str = "") -> Case:
    _, question, answer = sizes(settings.model)
    preset = {"dense_cached": "prefix"}.get(method, method.removesuffix("_lean"))
    preset = preset.removesuffix("_released")
    sampling = dataclasses.replace(
        settings.sampling, text_preset=preset, text_steps=steps, text_step_ratio=0.0,
        text_commit="count", quantize=quantized,
    )  # fmt: skip
    parts = (Text(_ids(settings.model, question)), Response(answer))
    empty, known = np.zeros((answer, 1), np.int32), np.zeros(answer, bool)
    example = Example(parts, empty, known, "text", None, answer)
    name = quantized or method
    block_len = settings.data.text_block_len
    constant = preset == "prefix" and steps * answer // block_len > STEPS_TIMED
    timed = min(STEPS_TIMED, steps) if constant else 0
    return Case(
        f"reasoning/{name}/b1/k{steps}", "reasoning", name, 1, example, sampling, block_len,
        method.endswith("_released"), timed,
    )  # fmt: skip


def sizes(model: config.Model) -> tuple[int, int, int]:
    """Returns words of the prompt of an image and of a question, and tokens of the answer."""
    full = model.num_cells >= FULL_CELLS
    return (WORDS, QUESTION, ANSWER) if full else (FEW_WORDS, SHORT_QUESTION, SHORT_ANSWER)


def _ids(model: config.Model, number: int) -> np.ndarray:
    return np.arange(number, dtype=np.int32) % min(model.text_mask_id, model.end_of_text_id)
