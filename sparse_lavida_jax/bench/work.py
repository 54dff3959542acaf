# SPDX-License-Identifier: Apache-2.0
"""What a sampling request has to compute and to read at least, counted from its plan.

Useful is what the method asks for: tokens without padding, keys that are there. Padded is what the
programs compute: tokens of the compiled widths. Of the products only those of matrices and of
attention count; a product is two operations.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.sampling import plans, presets
from sparse_lavida_jax.sampling.prompts import Prompt, parted


@dataclasses.dataclass(frozen=True)
class Pass:
    """One forward pass of all rows.

    Attributes:
        useful, padded: operations.
        weights, keys: bytes to read: every matrix once, keys and values of valid slots.
        tokens, slots: rows x tokens, without and with padding.
    """

    useful: float
    padded: float
    weights: float
    keys: float
    tokens: int
    slots: int


@dataclasses.dataclass(frozen=True)
class Work:
    """A request: its prefill in parts of one shape, none where nothing is cached, and its steps."""

    prefills: list[Pass]
    steps: list[Pass]

    @property
    def passes(self) -> list[Pass]:
        return [*self.prefills, *self.steps]

    def total(self, name: str) -> float:
        return float(sum(getattr(one, name) for one in self.passes))

    def floor_s(self, matmul_tflops: float, copy_gbps: float) -> float:
        """Returns the least seconds of the loop at these rates: each step computes or reads."""
        return sum(
            max(one.useful / matmul_tflops / 1e12, (one.weights + one.keys) / copy_gbps / 1e9)
            for one in self.steps
        )


def of_request(
    model: config.Model,
    settings: presets.StepSettings,
    plan: list[plans.Segment],
    prompt: Prompt,
    *,
    weight_bytes: int = 0,
    kept: bool = False,
) -> Work:
    """Counts a batch.

    Args:
        kept: whether what requests share was computed before (`sampling/prefixes.py`).
        prompt: all guidance rows (`prompts.prepare`).
        weight_bytes: of a number of the layers' matrices; 0: those of the compute dtype.
    """
    counter = _Counter(model, settings, weight_bytes or jnp.dtype(model.compute_dtype).itemsize)
    cached = settings.preset.cache_prompt
    refreshes = settings.preset.refreshes
    prefills = []
    if settings.caches_prompt:
        prefills = [
            counter.one_pass(len(part.prompt.length), *_lengths(part.prompt), 0.0, 0, 0.0, 0.0)
            for part in parted(prompt, settings.guidance_rows, keeping=kept)
            if not (kept and part.keeps)
        ]
    steps, committed = [], 0.0
    for part in plan:
        registers = presets.num_registers(part, settings)
        uses = (part.clean, part.decode, part.rest)
        width = sum(positions.shape[-1] for positions in uses) + registers
        for i in range(part.num_steps):
            used = [float((positions[i] >= 0).sum(axis=-1).mean()) for positions in uses]
            again = not cached or bool(part.refresh[i])
            passes = []
            for rows in _together(prompt, settings, guided=bool(part.guided[i])):
                valid, padded = _lengths(rows)
                passes.append(
                    counter.one_pass(
                        len(rows.length),
                        valid if again else [0.0, 0.0],
                        padded if again else [0.0, 0.0],
                        sum(used) + registers,
                        width,
                        used[1],
                        committed,
                        cached_prompt=[0.0, 0.0] if again else valid,
                        decode_width=float(part.decode.shape[-1]),
                    )
                )
            steps.append(_as_one(passes))
            if part.refresh[i]:
                committed = used[0]
            elif settings.preset.cache_response and not refreshes:
                committed += used[0]
    return Work(prefills, steps)


def _together(prompt: Prompt, settings: presets.StepSettings, *, guided: bool) -> list[Prompt]:
    """Returns the guidance rows of a step, those apart that it passes in shapes of their own."""
    if settings.uses_cache:
        return [prompt]
    parts = [part.prompt for part in parted(prompt, settings.guidance_rows, keeping=False)]
    full_rows = len(prompt.length) // settings.guidance_rows
    return parts if guided else [jax.tree.map(lambda x: x[-full_rows:], parts[-1])]


def _as_one(passes: list[Pass]) -> Pass:
    """Returns passes of one step as one: each matrix has to be read once."""

    def total(name: str) -> Any:
        return sum(getattr(one, name) for one in passes)

    weights = max(one.weights for one in passes)
    return Pass(total("useful"), total("padded"), weights, *map(total, ("keys", "tokens", "slots")))


def _lengths(prompt: Prompt) -> tuple[list[float], list[float]]:
    """Returns the mean tokens of a row, and its slots, in each of the two streams."""
    streams = (prompt.understanding, prompt.generation)
    valid, padded = (
        [0.0 if s is None else float(count(s)) for s in streams]
        for count in (
            lambda s: (s.layout.horizon >= 0).sum() / len(prompt.length),
            lambda s: s.index.shape[1],
        )
    )
    return valid, padded


class _Counter:
    """Parameters of the matrices that a token meets, by stream; of a cell, once for each code."""

    def __init__(self, model: config.Model, settings: presets.StepSettings, weight_bytes: int):
        self.model, self.settings, self.weight_bytes = model, settings, weight_bytes
        heads = model.num_heads * model.head_dim

        def layer(width: int, hidden: int) -> int:
            return 4 * width * heads + 3 * width * hidden

        self.heads = heads
        self.text = layer(model.width, model.mlp_hidden)
        self.image = layer(model.generation_width, model.generation_mlp_hidden)
        e, g = model.generation_width, model.codes_per_token
        spread = g * e * e if g > 1 else 0
        by_code = {"embed": 0, "dit2": 2 * e * e}.get(model.image_head, e * e)
        self.image_head = spread + g * (by_code + e * model.codebook_size)
        self.image_head_size = spread + by_code + e * model.codebook_size  # read once for all codes
        self.text_head = model.width * model.vocab_size

    def one_pass(
        self,
        rows: int,
        prompt: list[float],
        prompt_slots: list[float],
        own: float,
        own_slots: int,
        predicted: float,
        committed: float,
        *,
        cached_prompt: list[float] | None = None,
        decode_width: float = 0.0,
    ) -> Pass:
        """Counts a pass of prompt tokens (text, image) and of the response's own."""
        is_text = self.settings.kind == "text"
        cached = cached_prompt or [0.0, 0.0]

        def tokens_of(prompt, own):
            text, image = prompt
            return (text + own, image) if is_text else (text, image + own)

        numbers = (
            (tokens_of(prompt, own), predicted),
            (tokens_of(prompt_slots, own_slots), decode_width),
        )
        useful, padded = (self._operations(*one, cached, committed) for one in numbers)
        text, image = tokens_of(prompt, own)
        joint, split = self.model.num_joint_layers, self.model.num_split_layers
        weights = self.text * (joint + split * (is_text or self.settings.discards)) if text else 0
        weights += self.image * (joint + split * (not is_text)) if image else 0
        itemsize = jnp.dtype(self.model.compute_dtype).itemsize
        image_head = self.image_head_size + self.text_head * self.settings.discards
        head = (self.text_head if is_text else image_head) if predicted else 0
        keys = joint * (sum(cached) + committed + text + image)
        keys += split * ((cached[0] + text if is_text else cached[1] + image) + committed)
        return Pass(
            useful=rows * useful,
            padded=rows * padded,
            weights=float(weights * self.weight_bytes + head * itemsize),
            keys=float(rows * keys * 2 * self.heads * itemsize),
            tokens=round(rows * (text + image)),
            slots=round(rows * (sum(prompt_slots) + own_slots)),
        )

    def _operations(self, tokens, predicted: float, cached: list[float], committed: float) -> float:
        """Of one row."""
        text, image = tokens
        is_text, whole = self.settings.kind == "text", self.settings.discards
        joint, split = self.model.num_joint_layers, self.model.num_split_layers
        text_layers = joint + split if is_text or whole else joint
        image_layers = joint if is_text and not whole else joint + split
        total = 2.0 * (text * self.text * text_layers + image * self.image * image_layers)
        if is_text:
            total += 2.0 * self.text_head * (text + image if whole else predicted)
        else:
            total += 2.0 * (self.image_head * predicted + self.text_head * (text + image) * whole)
        keys = sum(cached) + committed + text + image
        total += 4.0 * self.heads * joint * (text + image) * keys
        own, stored = (text, cached[0]) if is_text else (image, cached[1])
        return total + 4.0 * self.heads * split * own * (own + stored + committed)


def padding(work: Work) -> float:
    """Returns the share of all slots that hold no token."""
    slots = float(np.sum([one.slots for one in work.passes]))
    return 1 - float(np.sum([one.tokens for one in work.passes])) / slots
