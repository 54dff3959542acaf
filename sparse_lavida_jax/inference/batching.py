# SPDX-License-Identifier: Apache-2.0
"""Examples in batches through the sampler."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import config, sample, sequence
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.templates import RequestError
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sample import OnSegment, Progress
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.sampling.prefixes import Prefixes
from sparse_lavida_jax.sampling.prompts import Request, prepare

OnStep = Callable[[int, int], None]
Number = int | float
Numbers = Number | Sequence[Number | None] | None  # of all rows, or one for each

LARGEST_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shapes that a batch is padded to: what else, besides a request, its bits depend on."""

    rows: int
    prompt_len: tuple[int, int]


def row_seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """Returns a seed for each row: `seed` and the next ones, unless it holds one for each.

    Raises:
        RequestError: one is out of range, or there are not as many as rows.
    """
    seeds = list(seed) if isinstance(seed, Sequence) else [int(seed) + i for i in range(rows)]
    if len(seeds) != rows:
        raise RequestError(f"{len(seeds)} seeds were given for {rows} rows: give as many, or one.")
    if wrong := [one for one in seeds if not 0 <= one <= LARGEST_SEED]:
        raise RequestError(f"the seed {wrong[0]} is out of range: 0 to {LARGEST_SEED}.")
    return seeds


@dataclasses.dataclass(frozen=True)
class Own:
    """What a row has of its own; None: as the sampling settings say.

    Attributes:
        temperature: of the image, or of the text.
        guidance, guidance_image: scales; text has none.
    """

    temperature: float | None = None
    guidance: float | None = None
    guidance_image: float | None = None

    def of_image(self, sampling: config.Sampling) -> config.Sampling:
        """Returns the settings by which this row alone is drawn."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return dataclasses.replace(sampling, **given)


NOTHING = Own()


def row_numbers(rows: int, **given: Numbers) -> list[Own]:
    """Returns what each row has of its own.

    Args:
        given: attributes of `Own`.

    Raises:
        RequestError: one is out of range, or there are not as many as rows.
    """
    columns: dict[str, list[float | None]] = {}
    for name, numbers in given.items():
        column = [*numbers] if isinstance(numbers, Sequence) else [numbers] * rows
        if len(column) != rows:
            raise RequestError(
                f"{len(column)} numbers were given as {name} of {rows} rows: give as many, or one."
            )
        if wrong := [one for one in column if one is not None and not one >= 0]:
            raise RequestError(f"{name}={wrong[0]} is out of range: it must be 0 or more.")
        columns[name] = [None if one is None else float(one) for one in column]
    return [Own(**{name: columns[name][i] for name in columns}) for i in range(rows)]


def together(sampling: config.Sampling, own: Sequence[Own]) -> tuple[config.Sampling, list[Own]]:
    """Returns what decodes rows as one batch: they are guided if any is, each by its own scales."""
    names = ("guidance", "guidance_image")
    filled = [
        dataclasses.replace(
            row, **{n: getattr(sampling, n) for n in names if getattr(row, n) is None}
        )
        for row in own
    ]
    most = {name: max(getattr(row, name) for row in filled) for name in names}
    return dataclasses.replace(sampling, **most), filled


def bucket_of(
    examples: Sequence[Example], sampling: config.Sampling, model: config.Model, most_rows: int
) -> Bucket:
    """Returns the shapes that hold all of `examples`; rows are a power of two."""
    settings = _step_settings(examples[0], sampling, model)
    prompt = prepare(
        [_request(example, 0) for example in examples],
        settings.kind,
        model,
        settings.guidance_rows,
        edit_guidance=settings.edit_guidance,
        with_given=not settings.preset.passes_given,
    )
    generation = 0 if prompt.generation is None else prompt.generation.index.shape[1]
    rows = min(most_rows, 1 << (len(examples) - 1).bit_length())
    return Bucket(rows, (prompt.understanding.index.shape[1], generation))


def check_steps(
    example: Example, sampling: config.Sampling, model: config.Model, text_block_len: int
) -> None:
    """Checks that no step is without a token.

    Raises:
        ConfigError: more steps than there are tokens.
    """
    if example.kind == "image":
        preset = _step_settings(example, sampling, model).preset
        by_code = preset.full_attention and sampling.grid == "code"
        most = example.response.size if by_code else len(example.response)
        name, steps, what = "num_steps", sampling.num_steps, "tokens of the image"
    else:
        by_count = sampling.text_commit == "count" and not sampling.text_step_ratio
        most = text_block_len
        name, steps, what = "text_steps", sampling.text_steps, "tokens of a text block"
        steps = steps if by_count else 1
    if steps > most:
        raise config.ConfigError(
            f"Sampling.{name}={steps} is more than there are {what}: 1 to {most} are allowed."
        )


def tokens_passed(
    model: config.Model, sampling: config.Sampling, example: Example, text_block_len: int
) -> int:
    """Returns how many tokens all steps of one example pass, prompt included, padding not."""
    settings, request = _step_settings(example, sampling, model), _request(example, 0)
    segments = _segments([request], settings, sampling, model, text_block_len, example.grid)
    prompt = prepare([request], example.kind, model)
    streams = [stream for stream in (prompt.understanding, prompt.generation) if stream is not None]
    prompt_tokens = sum(int((stream.layout.horizon >= 0).sum()) for stream in streams)
    return presets.tokens_passed(segments, settings, prompt_tokens)


def decode(
    model: Denoiser,
    examples: Sequence[Example],
    seeds: Sequence[int],
    own: Sequence[Own],
    sampling: config.Sampling,
    bucket: Bucket,
    *,
    text_block_len: int,
    on_segment: OnSegment | None = None,
    on_step: OnStep | None = None,
    prefixes: Prefixes | None = None,
) -> list[Int[np.ndarray, "_l g"]]:
    """Decodes the responses of examples of one kind; those of one shape together.

    A batch that is not full is filled up, so that all batches run the same compiled programs.

    Args:
        own: of each row; where a scale of one is not 0, that of `sampling` is not (`together`).
        text_block_len: tokens of a text block; a text that is no whole blocks is one.
        on_segment: called with what is there after each segment.
        on_step: called with the steps done and all steps, before the first and after each segment.
        prefixes: of this very model, what its requests share.
    """
    results: dict[int, np.ndarray] = {}
    shapes = [(len(example.response), example.grid or ()) for example in examples]
    for shape in sorted(set(shapes)):
        members = [i for i, other in enumerate(shapes) if other == shape]
        for start in range(0, len(members), bucket.rows):
            chunk = members[start : start + bucket.rows]
            filled = chunk + [chunk[-1]] * (bucket.rows - len(chunk))
            requests = [_request(examples[i], seeds[i], own[i]) for i in filled]
            settings = _step_settings(examples[chunk[0]], sampling, model.settings)
            segments = _segments(
                requests, settings, sampling, model.settings, text_block_len, shape[1] or None
            )
            decoded = sample.sample(
                model,
                requests,
                segments,
                settings=settings,
                prompt_len=bucket.prompt_len,
                on_segment=_between(segments, on_segment, on_step),
                prefixes=prefixes,
            )
            results.update(zip(chunk, decoded[: len(chunk)], strict=True))
    return [results[i] for i in range(len(examples))]


def _segments(requests, settings, sampling, model: config.Model, text_block_len: int, grid):
    length = len(requests[0].given)
    return presets.plan(
        sampling,
        settings,
        model,
        np.stack([request.given for request in requests]),
        length if length % text_block_len else text_block_len,
        seeds=[request.seed for request in requests],
        grid=grid,
    )


def _between(segments, on_segment: OnSegment | None, on_step: OnStep | None) -> OnSegment | None:
    if on_step is None:
        return on_segment
    total = sum(segment.num_steps for segment in segments)
    on_step(0, total)

    def between(progress: Progress) -> None:
        on_step(progress.steps, total)
        if on_segment is not None:
            on_segment(progress)

    return between


def _step_settings(
    example: Example, sampling: config.Sampling, model: config.Model
) -> presets.StepSettings:
    has_source = any(isinstance(part, sequence.Source) for part in example.parts)
    return presets.step_settings(sampling, model, example.kind, has_source=has_source)


def _request(example: Example, seed: int, own: Own = NOTHING) -> Request:
    shown = example.views or example.pixels
    return Request(example.parts, example.response, example.given, shown, seed, **vars(own))
