# SPDX-License-Identifier: Apache-2.0
"""Examples in batches through the sampler."""

import collections
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import config, sample, sequence
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.inference.requests import Request
from sparse_lavida_jax.models import quantize
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sample import Callback
from sparse_lavida_jax.sampling import plans, presets
from sparse_lavida_jax.sampling.prefixes import Prefixes
from sparse_lavida_jax.sampling.presets import StepSettings
from sparse_lavida_jax.sampling.prompts import LaidOut, batched, lay_out, lengths_of
from sparse_lavida_jax.sequence import Kind

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
        self._prefixes = collections.defaultdict(Prefixes, {"": Prefixes()})

    def decode(
        self,
        examples: Sequence[Example],
        requests: Sequence[Request],
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
        most, kind = of_all(sampling, requests), examples[0].kind
        scales = sampling.guidance, sampling.guidance_image
        settings = _settings(most, model, kind, _has_source(examples[0]), scales)
        laid = [
            lay_out(dataclasses.replace(example, request=request), model, settings)
            for example, request in zip(examples, requests, strict=True)
        ]
        bucket = bucket or self._bucket(laid, shared=shared)
        responses: dict[int, np.ndarray] = {}
        tokens, shapes = 0, [(len(one.response), one.grid or ()) for one in examples]
        for shape in sorted(set(shapes)):
            members = [i for i, other in enumerate(shapes) if other == shape]
            for start in range(0, len(members), bucket.rows):
                chunk = members[start : start + bucket.rows]
                filled = [laid[i] for i in chunk + [chunk[-1]] * (bucket.rows - len(chunk))]
                rows = [one.example for one in filled]
                plan = _plan_of(rows, most, settings, model, block)
                decoded = sample.sample(
                    self._model(sampling.quantize),
                    rows,
                    plan.segments,
                    settings=settings,
                    prompt=batched(filled, model, bucket.prompt_len),
                    callback=callback,
                    making=making or kind,
                    prefixes=self._prefixes[sampling.quantize],
                )
                responses.update(zip(chunk, decoded[: len(chunk)], strict=True))
                tokens += sum(
                    int(plan.tokens[row]) + _prompt_tokens(laid[i]) * plan.prompt_passes
                    for row, i in enumerate(chunk)
                )
        return Decoded([responses[i] for i in range(len(examples))], bucket, tokens)

    def _bucket(self, laid: Sequence[LaidOut], *, shared: bool) -> Bucket:
        """Returns the shapes that hold all of some examples; rows are a power of two."""
        lengths = lengths_of(laid)
        if shared:
            understanding, generation = (-(-n // SHARED_PROMPT) * SHARED_PROMPT for n in lengths)
            return Bucket(self.batch_size, (understanding, generation))
        return Bucket(min(self.batch_size, 1 << (len(laid) - 1).bit_length()), lengths)

    def _model(self, method: str) -> Denoiser:
        """Returns the model, in 8 bits if asked for; those parameters are kept next to it."""
        if not method:
            return self.model
        if method not in self._quantized:
            self._quantized[method] = quantize.quantized(self.model, method)
        return self._quantized[method]


def check_steps(
    example: Example, sampling: config.Sampling, model: config.Model, text_block_len: int
) -> None:
    """Checks that no step is without a token.

    Raises:
        ConfigError: more steps than there are tokens.
    """
    if example.kind == "image":
        preset = _settings(sampling, model, "image", _has_source(example)).preset
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
    settings = _settings(sampling, model, example.kind, _has_source(example))
    asked = dataclasses.replace(example, request=example.request or Request(task=""))
    plan = _plan_of([asked], sampling, settings, model, text_block_len)
    laid = lay_out(asked, model, settings)
    return int(plan.tokens[0]) + _prompt_tokens(laid) * plan.prompt_passes


def _prompt_tokens(laid: LaidOut) -> int:
    """Returns the tokens of a whole prompt, with what is given."""
    passed = int(laid.example.given.sum()) * (not laid.given_passed)
    return len(laid.text[-1].index) + len(laid.image[-1].index) + passed


def of_all(sampling: config.Sampling, requests: Sequence[Request]) -> config.Sampling:
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
    changed = {name: value for name, value in most.items() if value != getattr(sampling, name)}
    return dataclasses.replace(sampling, **changed) if changed else sampling


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The segments of a batch, and what they pass: tokens of each row, and times of its prompt."""

    segments: list[plans.Segment]
    tokens: Int[np.ndarray, " b"]
    prompt_passes: int


def _plan_of(
    examples: Sequence[Example],
    sampling: config.Sampling,
    settings: StepSettings,
    model: config.Model,
    text_block_len: int,
) -> _Plan:
    """Returns the plan of a batch of one shape."""
    given = np.stack([example.given for example in examples])
    length, grid = given.shape[1], examples[0].grid
    block_len = length if length % text_block_len else text_block_len
    by_seed = settings.kind == "image" and sampling.order_seed < 0
    seeds = tuple(example.request.seed if by_seed else 0 for example in examples)  # type: ignore
    return _plan(sampling, settings, model, given.tobytes(), given.shape, block_len, seeds, grid)


@functools.lru_cache(maxsize=32)
def _plan(sampling, settings, model, given: bytes, shape, block_len, seeds, grid) -> _Plan:
    known = np.frombuffer(given, bool).reshape(shape)
    segments = presets.plan(sampling, settings, model, known, block_len, seeds=seeds, grid=grid)
    tokens = presets.response_tokens(segments, settings)
    return _Plan(segments, tokens, presets.prompt_passes(segments, settings))


@functools.lru_cache(maxsize=32)
def _settings(
    sampling: config.Sampling,
    model: config.Model,
    kind: Kind,
    has_source: bool,
    scales: tuple[float, float] | None = None,
) -> StepSettings:
    """Returns the settings of a batch; `scales`: guidance of rows that do not say otherwise."""
    settings = presets.step_settings(sampling, model, kind, has_source=has_source)
    if scales is None:
        return settings
    return dataclasses.replace(settings, guidance=scales[0], guidance_image=scales[1])


def _has_source(example: Example) -> bool:
    return any(isinstance(part, sequence.Source) for part in example.parts)
