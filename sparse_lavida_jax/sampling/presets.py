# SPDX-License-Identifier: Apache-2.0
"""Turns a sampling configuration into the compiled settings of a step, and a plan of steps.

Presets are data. Each says what the step of `sample.py` passes in addition to the tokens to decode
and the registers, and what the cache holds:

| preset | also passes | cache |
| --- | --- | --- |
| sparse (prt) | the tokens decoded in the previous step | prompt, response |
| without p; without r | the prompt again; all clean tokens again | without these |
| without t | all other masked tokens | |
| dense | everything, in block 0, without registers: LaViDa-O itself | none |
| prefix | the whole response, in block 0: LaViDa-O's text | prompt |
| fast_dllm_prefix | later text blocks | all before, refreshed by the first step of a text block |
| fast_dllm_dual | nothing | all but the text block, refreshed by its first step |
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from sparse_lavida_jax import config, orders
from sparse_lavida_jax.models import text_head
from sparse_lavida_jax.sampling import plans
from sparse_lavida_jax.sampling.commit import CommitRule
from sparse_lavida_jax.sequence import Modality, codes_from_cells

# Widths if a step passes most of the response: there padding costs more than another program.
WIDE_BUCKETS = tuple(width for width in plans.BUCKETS if width <= 96) + tuple(
    range(128, 2**16 + 1, 32)
)
WIDE_PADDING = 0.03


@dataclasses.dataclass(frozen=True)
class Preset:
    """What is cached and what is left out: a row of the paper's ablation (Table 6).

    With `full_attention` every response token sees every other, so a cache is not exact: for the
    prompt it keeps what was computed without the response, and for the response it is refreshed by
    the first step of every text block (Fast-dLLM).
    """

    cache_prompt: bool
    cache_response: bool
    truncate: bool
    full_attention: bool = False

    @functools.cached_property
    def refreshes(self) -> bool:
        return self.full_attention and self.cache_response

    @functools.cached_property
    def given_in_steps(self) -> bool:
        """Whether given tokens are passed like the rest of the response rather than cached."""
        return self.full_attention and self.cache_prompt


def preset(name: str) -> Preset:
    """Returns the preset of that name (`config.PRESETS`, `config.TEXT_PRESETS`).

    Raises:
        ValueError: an unknown name.
    """
    known = (*config.PRESETS, *config.TEXT_PRESETS)
    if name not in known:
        raise ValueError(f"preset {name!r} is unknown: use one of {', '.join(known)}.")
    full_attention = {"dense": "", "prefix": "p", "fast_dllm_prefix": "pr", "fast_dllm_dual": "prt"}
    letters = {"sparse": "prt", "none": "", **full_attention}.get(name, name)
    return Preset("p" in letters, "r" in letters, "t" in letters, name in full_attention)


def default_preset(model: config.Model) -> str:
    """Returns the preset a checkpoint was trained for: sparse, or dense for full attention."""
    return "sparse" if model.trained_attention == "step_causal" else "dense"


def one_pass(sampling: config.Sampling, model: config.Model, length: int) -> config.Sampling:
    """Returns the settings for boxes, `length` tokens: each text block takes one step.

    With full attention there is one text block, and prompt and response are passed together, as
    released (spec Sec. 8): a prompt cached earlier would not have seen the phrases.
    """
    how = config.changed(sampling, {"text": {"steps": 1, "step_ratio": 0.0, "commit": "count"}})
    if not preset(how.text.preset or how.preset or default_preset(model)).full_attention:
        return how
    return config.changed(how, {"text": {"preset": "dense", "block_len": length}})


@functools.lru_cache(maxsize=32)
def untrained(sampling: config.Sampling, model: config.Model) -> str:
    """Returns a preset requested by name whose attention the model was not trained with, or ""."""
    named = [name for name in (sampling.preset, sampling.text.preset) if name]
    is_full = model.trained_attention == "full"
    return next((name for name in named if preset(name).full_attention != is_full), "")


STAGES = ("layout", "image")  # of an image, in the order in which they are drawn


class Turn(NamedTuple):
    """Where noise changes: from a step of a stage on, and in later stages, it is of another seed.

    Attributes:
        stage: one of `STAGES`.
        step: the first step with the new noise, from 0; those of a text count through all its text
            blocks (`plans.Steps.block` less `FIRST_BLOCK`).
    """

    stage: str
    step: int
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowRequest:
    """How one row is sampled: what rows of a batch may differ in, none of which is compiled in.

    Attributes:
        seed: determines all random numbers of the row, up to its first turn.
        style_seed: determines its style code; None: `seed` does.
        style_code: its style code itself, a value of each group; (): it is drawn.
        turns: where its noise is of other seeds, in the order of stages and steps. The order of
            cells and the reading of words stay those of `seed`.
        attempt: the number of this attempt; each has its own noise.
        temperature: of the image, or of the text; 0 takes the most probable token or code.
        guidance, guidance_edit, guidance_image: scales of an image (`config.Sampling`).
    """

    seed: int = 0
    style_seed: int | None = None
    style_code: tuple[int, ...] = ()
    turns: tuple[Turn, ...] = ()
    attempt: int = 0
    temperature: float = 0.0
    guidance: float = 0.0
    guidance_edit: float = -1.0
    guidance_image: float = 0.0

    def seeds(self, stage: str) -> list[tuple[int, int]]:
        """Returns the seeds of a stage's noise, each with the first step that it is used in."""
        if stage == "style" and self.style_seed is not None:
            return [(0, self.style_seed)]
        found = [(0, self.seed)]
        for turn in self.turns if stage in STAGES else ():
            if turn.stage == stage:
                found = [one for one in found if one[0] < turn.step] + [(turn.step, turn.seed)]
            elif STAGES.index(turn.stage) < STAGES.index(stage):
                found = [(0, turn.seed)]
        return found


def scales(sampling: config.Sampling, modality: Modality) -> dict[str, Any]:
    """Returns the scales of rows with responses of a modality, by their names in `RowRequest`."""
    return {
        "temperature": sampling.text.temperature if modality == "text" else sampling.temperature,
        "guidance": sampling.guidance,
        "guidance_edit": sampling.guidance_edit,
        "guidance_image": sampling.guidance_image,
    }


def guidance_of(scaled: RowRequest | config.Sampling, *, has_source: bool) -> float:
    """Returns the guidance scale of an image, or with `has_source` of an edit."""
    of_edits = has_source and scaled.guidance_edit >= 0
    return scaled.guidance_edit if of_edits else scaled.guidance


def is_guided(scaled: RowRequest | config.Sampling, *, has_source: bool) -> bool:
    """Whether guidance acts on an image, or with `has_source` on an edit."""
    by_image = has_source and scaled.guidance_image > 0
    return by_image or guidance_of(scaled, has_source=has_source) > 0


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """Everything that is compiled into a step.

    Attributes:
        guidance_rows: 1: none; 2: [dropped, full]; 3: [dropped, second, full].
        commit: which of the candidates a step commits.
        edit_guidance: what the second row of three keeps (`config.Sampling`).
        released: samples text as the released code does (`config.ReleasedSampling.text_behaviour`).
        greedy: whether every row has temperature 0, so that no noise is drawn.
        head_tile: tokens in a tile of the vocabulary, if text is drawn tile by tile
            (`models/text_head.py`); 0: all logits are computed at once.
        tables_ahead: whether attention tables are made before the loop if possible.
        style_parts: of the style code that images have; 0: they have none.
    """

    modality: Modality
    preset: Preset
    num_registers: int
    guidance_rows: int
    commit: CommitRule
    edit_guidance: str = "source"
    top_k: int = 0
    top_p: float = 1.0
    released: bool = False
    greedy: bool = False
    head_tile: int = 0
    tables_ahead: bool = True
    style_parts: int = 0

    @functools.cached_property
    def uses_cache(self) -> bool:
        return self.preset.cache_prompt or self.preset.cache_response

    @functools.cached_property
    def caches_prompt(self) -> bool:
        """Whether the prompt is passed once, before the first step."""
        return self.preset.cache_prompt and not self.preset.refreshes

    def passes_prompt(self, steps: plans.Steps) -> bool:
        """Whether these steps pass the prompt again."""
        return steps.refreshes or not self.preset.cache_prompt

    def passes_all_rows(self, steps: plans.Steps) -> bool:
        """Whether these steps pass all guidance rows, not only the full ones."""
        return self.uses_cache or steps.guided


def step_settings(
    sampling: config.Sampling,
    model: config.Model,
    modality: Modality,
    *,
    has_source: bool = False,
    guided: bool | None = None,
) -> StepSettings:
    """Returns the settings that a sampling configuration compiles into a step.

    Args:
        has_source: whether an image is edited.
        guided: whether guidance acts on any row (`is_guided`); None: as configured.

    Raises:
        ConfigError: more registers than the model has.
    """
    is_text = modality == "text"
    name = (sampling.text.preset if is_text else "") or sampling.preset
    chosen = preset(name or default_preset(model))
    if guided is None:
        guided = is_guided(sampling, has_source=has_source)
    registers = model.num_registers if sampling.registers < 0 else sampling.registers
    if registers > model.num_registers and not chosen.full_attention:
        raise config.ConfigError(
            f"{{setting}}={{value}} is more than the {model.num_registers} that this model was"
            " trained with: {allowed}.",
            setting="registers",
            value=str(registers),
            allowed=f"0 to {model.num_registers} are allowed",
        )
    registers = 0 if chosen.full_attention else registers
    styled = sampling.style_code and registers > 0 and not is_text
    filtered = sampling.text.top_k > 0 or sampling.text.top_p < 1  # needs all logits at once
    return StepSettings(
        modality=modality,
        preset=chosen,
        num_registers=registers,
        guidance_rows=(3 if has_source else 2) if guided and not is_text else 1,
        commit=_commit_rule(sampling, modality),
        edit_guidance=sampling.edit_guidance,
        top_k=sampling.text.top_k if is_text else sampling.top_k,
        top_p=sampling.text.top_p if is_text else sampling.top_p,
        released=is_text and sampling.released.text_behaviour,
        head_tile=text_head.tile_of(model.vocab_size) if is_text and not filtered else 0,
        style_parts=model.style_parts if styled else 0,
    )


def _commit_rule(sampling: config.Sampling, modality: Modality) -> CommitRule:
    if modality == "image":
        if sampling.order != "confidence":
            return CommitRule()
        return CommitRule("count", noisy=sampling.confidence_noise > 0)
    name = sampling.text.commit
    level = {
        "threshold": sampling.text.threshold,
        "factor": sampling.text.factor,
        "entropy": sampling.text.entropy,
    }
    return CommitRule(
        name,
        level.get(name, 0.0),
        confidence="entropy" if name == "entropy" else sampling.text.confidence,
        most=sampling.text.most,
        released=name == "factor" and sampling.released.text_behaviour,  # only it has two variants
    )


def plan(
    sampling: config.Sampling,
    settings: StepSettings,
    model: config.Model,
    given: Bool[np.ndarray, "b l"],
    text_block_len: int,
    seeds: Sequence[int] | None = None,
    grid: tuple[int, int] | None = None,
    first: Sequence[Sequence[int]] | None = None,
) -> list[plans.Steps]:
    """Returns the phases that a sampling configuration asks for.

    Args:
        settings: what `step_settings` returned for the same configuration.
        given: known tokens of each response.
        text_block_len: tokens of a text block; for text only.
        seeds: of the rows, for `sampling.order_seed` -1.
        grid: rows and columns of cells of an image; by default the model's largest.
        first: `Example.first` of the rows, for `sampling.order` "layout".

    Raises:
        ConfigError: an order that the preset or the response cannot follow.
    """
    if settings.modality == "text":
        return _text_plan(sampling, settings, given, text_block_len)
    if sampling.order_seed >= 0:
        seeds = [sampling.order_seed] * len(given)
    elif seeds is None:
        raise ValueError("Sampling.order_seed=-1 needs the seed of every row.")
    grid = grid or (model.grid_size, model.grid_size)
    phases = _image_phases(sampling, settings.preset, model, given, seeds, grid, first)
    # Schedules run over the steps that remain after merging. They are counted for an image without
    # given cells; otherwise a row would depend on what is given in other rows.
    steps = sampling.num_steps
    if sampling.merge_cells:
        whole = orders.counts(sampling.schedule, steps, given.shape[1], sampling.shift)
        steps = len(orders.merged(whole, sampling.merge_cells))
    fewest = sampling.registers_end
    registers = settings.num_registers
    how, shift = sampling.released, sampling.shift
    noise = orders.cooling(
        how.confidence_noise_schedule,
        steps,
        how.confidence_noise_end,
        how.confidence_noise_shift or shift,
    )
    stepped = plans.with_steps(
        phases,
        guided=orders.guided_steps(sampling.guidance_interval, steps),
        noise=(noise * sampling.confidence_noise).astype(np.float32),
        temperature=orders.cooling(how.temperature_schedule, steps, how.temperature_end, shift),
        guidance=orders.cooling(how.guidance_schedule, steps, how.guidance_end, shift),
        registers=orders.register_counts(
            registers, registers if fewest < 0 else min(fewest, registers), steps
        ),
    )
    return plans.in_passes(
        stepped, sampling.cell_passes, model.codes_side, clean_once=settings.preset.cache_response
    )


def _image_phases(
    sampling: config.Sampling,
    chosen: Preset,
    model: config.Model,
    given: Bool[np.ndarray, "b l"],
    seeds: Sequence[int],
    grid: tuple[int, int],
    first: Sequence[Sequence[int]] | None,
) -> list[plans.Steps]:
    by_confidence = sampling.order == "confidence"
    by_code = chosen.full_attention and sampling.grid == "code"
    if by_confidence and (chosen.truncate or chosen.cache_response):
        raise config.ConfigError(
            "Sampling.order='confidence' chooses after each pass among all cells that are masked:"
            " it needs a preset that passes them all, dense, none or p."
        )
    passes = sampling.cell_passes
    if passes > 1 and (by_code or by_confidence or model.codes_per_token % passes):
        raise config.ConfigError(
            f"Sampling.cell_passes={passes} cuts steps over whole cells of a fixed order: it must"
            f" divide {model.codes_per_token}, the codes of a cell, with an order other than"
            " 'confidence' and grid='cell'."
        )
    if model.sequential_codes and (passes > 1 or by_code):
        raise config.ConfigError(
            "This model draws the codes of a cell one after another (Model.sequential_codes): it"
            " needs Sampling.cell_passes=1 and grid='cell'."
        )
    if sampling.merge_cells and (by_code or by_confidence):
        raise config.ConfigError(
            f"Sampling.merge_cells={sampling.merge_cells} merges steps over whole cells of a fixed"
            " order: it needs an order other than 'confidence' and grid='cell'."
        )
    by_layout = sampling.order == "layout"
    if by_layout and (by_code or sampling.merge_cells):
        raise config.ConfigError(
            "Sampling.order='layout' decodes a few whole cells first: it needs grid='cell', and"
            f" merge_cells=0, not {sampling.merge_cells}."
        )
    (rows, columns), side = grid, model.codes_side if by_code else 1
    known = np.repeat(given[..., None], side**2, axis=-1)
    name = "raster" if by_confidence else sampling.order
    whole = plans.image_plan(
        np.stack([orders.order(name, rows * side, columns * side, seed) for seed in seeds]),
        schedule=sampling.schedule,
        num_steps=sampling.num_steps,
        shift=sampling.shift,
        given=codes_from_cells(known, rows, side).reshape(len(given), -1),
        merge=sampling.merge_cells,
        first=first if by_layout else None,
    )
    if by_code or by_confidence:
        return plans.code_phases(whole, rows, columns, side, by_confidence=by_confidence)
    wide = not (chosen.truncate and chosen.cache_response)
    return plans.phases(
        whole,
        passes_clean="newest" if chosen.cache_response else "all",
        passes_rest=not chosen.truncate,
        **({"buckets": WIDE_BUCKETS, "padding": WIDE_PADDING} if wide else {}),
    )


def _text_plan(
    sampling: config.Sampling,
    settings: StepSettings,
    given: Bool[np.ndarray, "b l"],
    block_len: int,
) -> list[plans.Steps]:
    chosen = settings.preset
    steps = sampling.text.steps
    if sampling.text.step_ratio > 0:
        steps = max(int(block_len * sampling.text.step_ratio), 1)
    refreshes = chosen.refreshes
    phases = plans.text_plan(
        given.shape[1],
        block_len,
        block_len if settings.commit.ends_early else steps,
        given,
        schedule=sampling.text.schedule,
        shift=sampling.text.shift,
        passes_clean="newest" if chosen.cache_response and not refreshes else "all",
        passes_rest=not chosen.truncate,
        given_in_steps=chosen.given_in_steps,
        refreshes=refreshes,
        leftovers=settings.released and chosen.full_attention and not refreshes,
        block_order=_block_order(sampling, given.shape[1] // block_len),
    )
    return [dataclasses.replace(phase, registers=settings.num_registers) for phase in phases]


def _block_order(sampling: config.Sampling, num_blocks: int) -> Sequence[int]:
    """The order in which text blocks are decoded, one for all rows of a batch."""
    numbers = sampling.text.block_numbers
    if numbers is not None:
        if sorted(numbers) != list(range(num_blocks)):
            raise config.ConfigError(
                f"Sampling.text.block_order={sampling.text.block_order!r} does not fit a response"
                f" of {num_blocks} text blocks: name each of 0 to {num_blocks - 1} once."
            )
        return numbers
    if sampling.text.block_order == "random":
        if sampling.order_seed < 0:
            raise config.ConfigError(
                f"Sampling.text.block_order='random' with order_seed={sampling.order_seed}: a batch"
                " decodes its text blocks in one order, so give a seed of 0 or more."
            )
        return orders.random_order(1, num_blocks, sampling.order_seed).tolist()
    left_to_right = range(num_blocks)
    return left_to_right if sampling.text.block_order == "left_to_right" else left_to_right[::-1]
