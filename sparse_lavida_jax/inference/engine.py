# SPDX-License-Identifier: Apache-2.0
"""Examples in batches through the sampler."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import config, sample, sequence
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.inference.requests import Request as Asked
from sparse_lavida_jax.models import quantize
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sample import Callback
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.sampling.prefixes import Prefixes
from sparse_lavida_jax.sampling.prompts import Request, prepare

SHARED_PROMPT = 128  # tokens


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shapes that a batch is padded to: what else, besides a request, its bits depend on."""

    rows: int
    prompt_len: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What the sampler returned.

    Attributes:
        responses: of the examples, in their order.
        bucket: the shapes that they were padded to.
        tokens: how many passed through the network (`tokens_passed`), all rows together.
    """

    responses: list[Int[np.ndarray, "_l g"]]
    bucket: Bucket
    tokens: int


class Engine:
    """A model, and what is kept between its batches: parameters in 8 bits, shared prefixes.

    Args:
        model: the denoiser.
        batch_size: most rows that are decoded together.
        text_block_len: tokens of a text block; a text that is no whole blocks is one.
    """

    def __init__(self, model: Denoiser, batch_size: int, text_block_len: int):
        self.model = model
        self.batch_size = batch_size
        self.text_block_len = text_block_len
        self._quantized: dict[str, Denoiser] = {}
        self._prefixes: dict[str, Prefixes] = collections.defaultdict(Prefixes)

    def decode(
        self,
        examples: Sequence[Example],
        requests: Sequence[Asked],
        sampling: config.Sampling,
        *,
        making: str = "",
        bucket: Bucket | None = None,
        shared: bool = False,
        callback: Callback | None = None,
    ) -> Decoded:
        """Decodes the responses of examples of one kind; those of one shape together.

        A batch that is not full is filled up, so that all batches run the same compiled programs.

        Args:
            requests: of the examples: seeds and scales.
            making: what `callback` is told; by default the kind.
            bucket: the shapes to pad to; by default those that fit.
            shared: whether to pad to shapes that many batches share, so that few programs are
                compiled for them.
            callback: called before the first step and after each segment.

        Raises:
            ConfigError: more steps than there are tokens.
        """
        model, block = self.model.settings, self.text_block_len
        for example in examples:
            check_steps(example, sampling, model, block)
        most = of_all(sampling, requests)
        if bucket is None:
            bucket = bucket_of(examples, most, model, self.batch_size)
        if shared:
            lengths = (-(-n // SHARED_PROMPT) * SHARED_PROMPT for n in bucket.prompt_len)
            bucket = Bucket(self.batch_size, (next(lengths), next(lengths)))
        results: dict[int, np.ndarray] = {}
        shapes = [(len(example.response), example.grid or ()) for example in examples]
        for shape in sorted(set(shapes)):
            members = [i for i, other in enumerate(shapes) if other == shape]
            for start in range(0, len(members), bucket.rows):
                chunk = members[start : start + bucket.rows]
                filled = chunk + [chunk[-1]] * (bucket.rows - len(chunk))
                rows = [_request(examples[i], requests[i], sampling) for i in filled]
                settings = _step_settings(examples[chunk[0]], most, model)
                decoded = sample.sample(
                    self._model(sampling.quantize),
                    rows,
                    _segments(rows, settings, most, model, block, shape[1] or None),
                    settings=settings,
                    prompt_len=bucket.prompt_len,
                    callback=callback,
                    making=making or examples[0].kind,
                    prefixes=self._prefixes[sampling.quantize],
                )
                results.update(zip(chunk, decoded[: len(chunk)], strict=True))
        tokens = sum(tokens_passed(model, most, example, block) for example in examples)
        return Decoded([results[i] for i in range(len(examples))], bucket, tokens)

    def _model(self, method: str) -> Denoiser:
        """Returns the model, in 8 bits if asked for; those parameters are kept next to it."""
        if not method:
            return self.model
        if method not in self._quantized:
            self._quantized[method] = quantize.quantized(self.model, method)
        return self._quantized[method]


def bucket_of(
    examples: Sequence[Example], sampling: config.Sampling, model: config.Model, most_rows: int
) -> Bucket:
    """Returns the shapes that hold all of `examples`; rows are a power of two."""
    settings = _step_settings(examples[0], sampling, model)
    prompt = prepare(
        [_request(example, Asked(task="")) for example in examples],
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
    settings, request = _step_settings(example, sampling, model), _request(example, Asked(task=""))
    segments = _segments([request], settings, sampling, model, text_block_len, example.grid)
    prompt = prepare([request], example.kind, model)
    streams = [stream for stream in (prompt.understanding, prompt.generation) if stream is not None]
    prompt_tokens = sum(int((stream.layout.horizon >= 0).sum()) for stream in streams)
    return presets.tokens_passed(segments, settings, prompt_tokens)


def of_all(sampling: config.Sampling, requests: Sequence[Asked]) -> config.Sampling:
    """Returns the settings of a batch: it is guided if one of its rows is."""
    most = {
        name: max(
            getattr(sampling, name) if own is None else own
            for own in (getattr(request, name) for request in requests)
        )
        for name in ("guidance", "guidance_image")
    }
    if any(request.guidance is not None for request in requests):
        most["guidance_edit"] = -1.0
    return dataclasses.replace(sampling, **most)


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


def _step_settings(
    example: Example, sampling: config.Sampling, model: config.Model
) -> presets.StepSettings:
    has_source = any(isinstance(part, sequence.Source) for part in example.parts)
    return presets.step_settings(sampling, model, example.kind, has_source=has_source)


def _request(example: Example, asked: Asked, sampling: config.Sampling | None = None) -> Request:
    shown = example.views or example.pixels
    scales = (
        getattr(sampling, name, None) if (own := getattr(asked, name)) is None else own
        for name in ("guidance", "guidance_image")
    )
    rows = example.parts, example.response, example.given, shown
    return Request(*rows, asked.seed, asked.temperature, *scales)
