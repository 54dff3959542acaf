# SPDX-License-Identifier: Apache-2.0
"""LaViDa-O's own training objective: whole sequences, masked code by code (spec Sec. 9.2, 9.3).

`config.Diffusion.corruption = "released"`. There are no blocks: text and image of a sequence are
masked together, and every token sees every other token.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from sparse_lavida_jax import config
from sparse_lavida_jax.data.batch import GroupShape, Row, RowShape, alone, see_together, stack
from sparse_lavida_jax.data.corrupted_rows import Corrupted, Streams, StreamTokens, Tokens
from sparse_lavida_jax.orders import MIN_TIME, time_and_slope
from sparse_lavida_jax.sequence import (
    LearnedText,
    Part,
    Source,
    Text,
    Views,
    num_tokens,
    prompt_row,
)
from sparse_lavida_jax.tags import StreamNames


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A whole sequence to train LaViDa-O on: answers in text, an image, or both.

    Attributes:
        parts: the sequence. In text, the `LearnedText` parts are predicted; the release pads with
            end-of-text, which is predicted too, and then with `Blank`s. `Text` with `keep` is
            neither predicted nor dropped. The image takes the place of `Response`, which has 0
            tokens if there is none.
        codes: clean codes of the image, cell by cell.
        code_weight: loss weight of each code; None: all equal.
        views: the views of each image for the vision tower, in the order of the parts.
    """

    parts: tuple[Part, ...]
    codes: Int[np.ndarray, "l g"]
    code_weight: Float[np.ndarray, "l g"] | None = None
    views: tuple[Views, ...] = ()

    @property
    def length(self) -> int:
        """The number of tokens."""
        return sum(map(num_tokens, self.parts))

    @property
    def num_cells(self) -> int:
        """The number of tokens of the generation stream: image and source images."""
        return len(self.codes) + sum(len(p.codes) for p in self.parts if isinstance(p, Source))


@dataclasses.dataclass(frozen=True)
class SequenceRow(Row):
    """A sequence, and the random generator for masking it after padding."""

    sequence: Sequence
    rng: np.random.Generator

    @staticmethod
    def of(sequence: Sequence, rng: np.random.Generator) -> "SequenceRow":
        """Returns a row of the largest length: a dropped source cell becomes a text token."""
        cells = len(sequence.codes)
        length = RowShape(sequence.length - cells, sequence.num_cells)
        predicts: StreamNames = "both" if cells else "understanding"
        return SequenceRow(length, sequence.views, predicts, sequence, rng)

    @staticmethod
    def batch(rows: "list[SequenceRow]", shape: GroupShape, settings: config.Config) -> Corrupted:
        """Returns rows as one batch, each padded with end-of-text to the length of the group."""
        end_of_text_id = settings.model.end_of_text_id
        padded = [
            dataclasses.replace(
                row.sequence, parts=(*row.sequence.parts, _padding(row, shape, end_of_text_id))
            )
            for row in rows
        ]
        draws = [draw(row.rng, sequence) for row, sequence in zip(rows, padded, strict=True)]
        batch = batch_sequences(padded, draws, shape.example, settings, shape.views)
        return dataclasses.replace(batch, predicts=shape.predicts)


def _padding(row: SequenceRow, shape: GroupShape, end_of_text_id: int) -> Part:
    """Returns the padding of a row; it is learned if the row's text is (spec Sec. 9.1)."""
    ids = np.full(shape.example.understanding - row.length.understanding, end_of_text_id)
    learned = any(isinstance(part, LearnedText) for part in row.sequence.parts)
    return LearnedText(ids) if learned else Text(ids, keep=True)


@dataclasses.dataclass(frozen=True)
class MaskDraws:
    """The random numbers that mask one sequence, each uniform in [0, 1).

    Attributes:
        text_time, image_time: the time policy computes t from them.
        text_noise: for each position of the sequence, which is masked if it is low.
        image_noise: for each code of the image.
        prompt: the prompt is dropped if this is below `Data.prompt_drop`.
        source: the source cells are dropped if this is below `Data.source_drop`.
    """

    text_time: float
    text_noise: Float[np.ndarray, " s"]
    prompt: float
    source: float
    image_time: float
    image_noise: Float[np.ndarray, "l g"]


def draw(rng: np.random.Generator, sequence: Sequence) -> MaskDraws:
    """Draws the random numbers for masking a sequence."""
    text_time, prompt, source, image_time = rng.random(4).tolist()
    text_noise = rng.random(sequence.length)
    image_noise = rng.random(sequence.codes.shape)
    return MaskDraws(text_time, text_noise, prompt, source, image_time, image_noise)


def batch_sequences(
    sequences: list[Sequence],
    draws: list[MaskDraws],
    shape: RowShape,
    settings: config.Config,
    most_views: int = 0,
) -> Corrupted:
    """Masks, pads to `shape` and stacks sequences as LaViDa-O trains on them (spec Sec. 9.2, 9.3).

    Every token is in block 0. Text and image draw their t independently, and the loss of each
    is the mean over its masked tokens in the whole batch, without 1/t. With `complementary` the
    rows are repeated with the inverse masks. The weights of codes are scaled for each image to a
    mean of 1 over its masked codes; as released, they are ignored if none in the batch is above 1.

    Args:
        draws: for each sequence, from `draw` or recorded.
        most_views: pad each row to at least this many views.

    Raises:
        ValueError: a row is longer than `shape`, or its draws have another length.
    """
    diffusion, model = settings.diffusion, settings.model
    weights = [s.code_weight for s in sequences if s.code_weight is not None]
    weighted = any(weight.max(initial=0) > 1 for weight in weights)
    inverses = (False, True) if diffusion.complementary else (False,)
    rows = [
        _corrupt(sequence, drawn, settings, weighted=weighted, inverse=inverse)
        for inverse in inverses
        for sequence, drawn in zip(sequences, draws, strict=True)
    ]
    views = [sequence.views for sequence in sequences] * len(inverses)
    texts, images, text_totals, image_totals = map(list, zip(*rows, strict=True))
    features = [text.index for text in texts]
    features, pixels = see_together(features, views, alone(rows), most_views, model.vision)
    texts = [
        dataclasses.replace(text, index=index) for text, index in zip(texts, features, strict=True)
    ]
    streams = Streams(StreamTokens.of(texts, text_totals), StreamTokens.of(images, image_totals))
    predicts: StreamNames = "both" if diffusion.text_loss else "generation"
    if not any(len(sequence.codes) for sequence in sequences):
        predicts = "understanding"
    return stack(streams, shape, model, full_attention=True, pixels=pixels, predicts=predicts)


def _corrupt(
    sequence: Sequence, drawn: MaskDraws, settings: config.Config, *, weighted: bool, inverse: bool
) -> tuple[Tokens, Tokens, float, float]:
    """Masks one sequence; returns text, cells, and what the losses of both are divided by."""
    model, policy = settings.model, settings.diffusion.time_policy
    if drawn.text_noise.shape != (sequence.length,) or (
        drawn.image_noise.shape != sequence.codes.shape
    ):
        raise ValueError(
            f"a sequence of {sequence.length} tokens with codes {sequence.codes.shape} was given"
            f" noise of shapes {drawn.text_noise.shape} and {drawn.image_noise.shape}: draw one"
            " number for each token and one for each code."
        )
    prompt = prompt_row(
        sequence.parts,
        text_mask_id=model.text_mask_id,
        codes_per_token=model.codes_per_token,
        drop_prompt=drawn.prompt < settings.data.prompt_drop,
        drop_source=drawn.source < settings.data.source_drop,
    )
    masked = (mask_below(policy, drawn.text_time, drawn.text_noise) != inverse)[prompt.position]
    masked &= prompt.is_answer
    text = dataclasses.replace(
        Tokens.of_prompt(prompt.ids, prompt.feature, prompt.position),
        tokens=np.where(masked, model.text_mask_id, prompt.ids),
        target=prompt.ids,
        weight=masked.astype(float),
    )
    hidden = mask_below(policy, drawn.image_time, drawn.image_noise) != inverse
    weight = hidden.astype(float)
    if weighted and sequence.code_weight is not None:
        weight = hidden * sequence.code_weight
        weight *= hidden.sum() / max(weight.sum(), 1e-9)
    cell = np.arange(len(sequence.codes))
    image = dataclasses.replace(
        Tokens.of_prompt(sequence.codes, cell, prompt.response_position + cell),
        tokens=np.where(hidden, model.image_mask_id, sequence.codes),
        target=sequence.codes,
        weight=weight,
    )
    source = Tokens.of_prompt(
        prompt.codes, prompt.cell, prompt.source_position, weight_by_code=True
    )
    totals = float(masked.sum()), float(weight.sum() / model.codes_per_token)
    return text, Tokens.joined([source, image]), *totals


def mask_below(policy: str, time: float, noise: Float[np.ndarray, "*s"]) -> Bool[np.ndarray, "*s"]:
    """Returns where the release masks: noise up to p, else just the lowest (spec Sec. 9.2).

    Args:
        time: uniform; the policy computes t from it.
        noise: uniform in [0, 1).
    """
    return noise <= max(mask_probability(policy, time), noise.min(initial=np.inf))


def mask_probability(policy: str, uniform: float) -> float:
    """Returns the masking probability of the release for a uniform u: 1e-3 + (1 - 1e-3) t."""
    return MIN_TIME + (1 - MIN_TIME) * time_and_slope(policy, uniform)[0]
