# SPDX-License-Identifier: Apache-2.0
"""What a sampling request has to compute and to read at least, counted from its plan.

Useful is what the method asks for: tokens without padding, keys that are there. Padded is what the
programs compute: tokens of the compiled widths. Of the products only those of matrices and of
attention count; a product is two operations.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from sparse_lavida_jax import config
from sparse_lavida_jax.sampling import plans, presets
from sparse_lavida_jax.sampling.prompts import Prompt, parted
from sparse_lavida_jax.sampling.state import num_registers
from sparse_lavida_jax.training import flops

NOTHING = (0.0, 0.0)  # text, image tokens


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
class RequestWork:
    """A request: its prefill in parts of one shape, none where nothing is cached, and its steps."""

    prefills: list[Pass]
    steps: list[Pass]

    def total(self, name: str) -> float:
        """Returns the sum of a number over all passes."""
        return float(sum(getattr(one, name) for one in (*self.prefills, *self.steps)))

    @property
    def padding(self) -> float:
        """The share of all slots that hold no token."""
        return 1 - self.total("tokens") / self.total("slots")

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
    discards: bool = False,
) -> RequestWork:
    """Counts a batch.

    Args:
        kept: whether what requests share was computed before (`sampling/prefixes.py`).
        prompt: all guidance rows (`prompts.prepare`).
        weight_bytes: of a number of the layers' matrices; 0: those of the compute dtype.
        discards: see `suites.RequestCase`.
    """
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    counter = _Counter(model, settings.kind == "text", discards, weight_bytes or itemsize)
    prefills = []
    if settings.caches_prompt:
        prefills = [
            counter.one_pass(part.prompt, passes_prompt=True)
            for part in parted(prompt, settings.guidance_rows, keeping=kept)
            if not (kept and part.keeps)
        ]
    steps, committed = [], 0.0
    for part in plan:
        registers = num_registers(part, settings)
        uses = (part.clean, part.decode, part.rest)
        width = sum(positions.shape[-1] for positions in uses) + registers
        for i in range(part.num_steps):
            used = [float((positions[i] >= 0).sum(axis=-1).mean()) for positions in uses]
            passes = [
                counter.one_pass(
                    rows,
                    passes_prompt=not settings.preset.cache_prompt or bool(part.refresh[i]),
                    own=(sum(used) + registers, float(width)),
                    predicted=(used[1], float(part.decode.shape[-1])),
                    committed=committed,
                )
                for rows in _together(prompt, settings, guided=bool(part.guided[i]))
            ]
            steps.append(_as_one(passes))
            if part.refresh[i]:
                committed = used[0]
            elif settings.preset.cache_response and not settings.preset.refreshes:
                committed += used[0]
    return RequestWork(prefills, steps)


def _together(prompt: Prompt, settings: presets.StepSettings, *, guided: bool) -> list[Prompt]:
    """Returns the guidance rows of a step, those apart that it passes in shapes of their own."""
    if settings.uses_cache:
        return [prompt]
    parts = [part.prompt for part in parted(prompt, settings.guidance_rows, keeping=False)]
    full_rows = len(prompt.length) // settings.guidance_rows
    return parts if guided else [jax.tree.map(lambda x: x[-full_rows:], parts[-1])]


def _as_one(passes: list[Pass]) -> Pass:
    """Returns passes of one step as one: each matrix has to be read once."""
    names = [field.name for field in dataclasses.fields(Pass)]
    total: dict[str, Any] = {name: sum(getattr(one, name) for one in passes) for name in names}
    return dataclasses.replace(Pass(**total), weights=max(one.weights for one in passes))


def _lengths(prompt: Prompt) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns the mean tokens of a row in each of the two streams, and its slots."""
    streams, rows = (prompt.understanding, prompt.generation), len(prompt.length)

    def of_each(count) -> tuple[float, float]:
        text, image = (0.0 if stream is None else float(count(stream)) for stream in streams)
        return text, image

    valid = of_each(lambda stream: (stream.layout.horizon >= 0).sum() / rows)
    return valid, of_each(lambda stream: stream.index.shape[1])


@dataclasses.dataclass(frozen=True)
class _Counter:
    """Counts passes by the parameters of the matrices that a token meets (`training/flops.py`).

    Attributes:
        is_text: whether words are predicted, and not an image.
        whole: whether both towers are passed whole, and the text head by all tokens.
        weight_bytes: of a number of the layers' matrices.
    """

    model: config.Model
    is_text: bool
    whole: bool
    weight_bytes: int

    def one_pass(
        self,
        prompt: Prompt,
        *,
        passes_prompt: bool,
        own: tuple[float, float] = NOTHING,
        predicted: tuple[float, float] = NOTHING,
        committed: float = 0.0,
    ) -> Pass:
        """Counts a pass of some rows.

        Args:
            passes_prompt: and not only the response; otherwise the prompt's keys are cached.
            own: tokens and slots of the response, `predicted` those of them that are predicted.
            committed: tokens of the response whose keys are cached.
        """
        rows, lengths = len(prompt.length), _lengths(prompt)
        cached = NOTHING if passes_prompt else lengths[0]
        if not passes_prompt:
            lengths = (NOTHING, NOTHING)
        tokens, slots = (
            (text + mine * self.is_text, image + mine * (not self.is_text))
            for (text, image), mine in zip(lengths, own, strict=True)
        )
        own_stream = 0 if self.is_text else 1
        keys = self.model.num_joint_layers * (sum(cached) + committed + sum(tokens))
        own_keys = cached[own_stream] + tokens[own_stream] + committed
        keys += self.model.num_split_layers * own_keys
        heads = self.model.num_heads * self.model.head_dim
        return Pass(
            useful=rows * self._operations(tokens, predicted[0], cached, committed),
            padded=rows * self._operations(slots, predicted[1], cached, committed),
            weights=self._weights(tokens, is_last=predicted[0] > 0),
            keys=float(rows * keys * 2 * heads * jnp.dtype(self.model.compute_dtype).itemsize),
            tokens=round(rows * sum(tokens)),
            slots=round(rows * sum(slots)),
        )

    def _depths(self) -> tuple[int, int]:
        """Layers that text and image tokens pass."""
        joint, split = self.model.num_joint_layers, self.model.num_split_layers
        text = joint + split * (self.is_text or self.whole)
        return text, joint + split * (not self.is_text or self.whole)

    def _weights(self, tokens: Iterable[float], *, is_last: bool) -> float:
        """Bytes of matrices to read: layers that a token passes, and the heads."""
        model, (text, image) = self.model, tokens
        of_text, of_image = self._depths()
        if self.is_text:
            of_image = model.num_joint_layers  # the rest is computed only to be thrown away
        read = flops.layer_size("understanding", model) * of_text * (text > 0)
        read += flops.layer_size("generation", model) * of_image * (image > 0)
        head = flops.head_size("understanding", model) * (self.is_text or self.whole)
        if not self.is_text:
            # The matrices around the codes of a cell are the same for all codes, and read once.
            codes = model.codes_per_token
            head += flops.head_size("generation", model) // codes
            head += (codes - 1) * model.generation_width**2
        itemsize = jnp.dtype(model.compute_dtype).itemsize
        return float(read * self.weight_bytes + head * itemsize * is_last)

    def _operations(
        self,
        tokens: tuple[float, float],
        predicted: float,
        cached: tuple[float, float],
        committed: float,
    ) -> float:
        """Of one row."""
        model, (text, image), heads = self.model, tokens, self.model.num_heads * self.model.head_dim
        of_text, of_image = self._depths()
        total = 2.0 * text * flops.layer_size("understanding", model) * of_text
        total += 2.0 * image * flops.layer_size("generation", model) * of_image
        words = flops.head_size("understanding", model)
        if self.is_text:
            total += 2.0 * words * (text + image if self.whole else predicted)
        else:
            total += 2.0 * flops.head_size("generation", model) * predicted
            total += 2.0 * words * (text + image) * self.whole
        text_cached, image_cached = cached
        keys = text_cached + image_cached + committed + text + image
        total += 4.0 * heads * model.num_joint_layers * (text + image) * keys
        own, stored = (text, text_cached) if self.is_text else (image, image_cached)
        return total + 4.0 * heads * model.num_split_layers * own * (own + stored + committed)
