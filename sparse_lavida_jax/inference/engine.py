# SPDX-License-Identifier: Apache-2.0
"""Batches of examples for the sampler, and their plans."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import config, sample, sequence
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.inference import batch_shapes
from sparse_lavida_jax.inference.batch_shapes import Bucket, Padding
from sparse_lavida_jax.models import quantize
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.programs import memory_maps
from sparse_lavida_jax.programs.persistent_jit import Programs
from sparse_lavida_jax.programs.program_arguments import taken_apart
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling import costs, plans, presets
from sparse_lavida_jax.sampling.calls import ModelConstants
from sparse_lavida_jax.sampling.content_cache import ContentCache
from sparse_lavida_jax.sampling.presets import RowRequest, StepSettings
from sparse_lavida_jax.sampling.progress import Callback
from sparse_lavida_jax.sampling.prompts import SampleInput, sample_input
from sparse_lavida_jax.sampling.state import NOT_DECODED, UNTOLD, ends_from
from sparse_lavida_jax.sequence import Modality
from sparse_lavida_jax.tags import FIRST_BLOCK

if TYPE_CHECKING:
    from sparse_lavida_jax.inference import whole_plan

MOST_LOGITS = 2**28  # of a pass over whole plans


@dataclasses.dataclass(frozen=True)
class SampleOutput:
    """What the sampler returned.

    Attributes:
        responses: one per example, in order.
        buckets: the shapes that each was padded to.
        tokens: the number of tokens each passed through the network (`costs.costs`).
        shared: how many of these stand for later rows of its batch too, which do not count them.
        drawn: the tokens of each as its steps drew them, also after an end-of-text.
        decoded_at: the block in which each token was decoded; `state.UNTOLD` for those that
            depend on when a batch stopped: after the step in which a text ended.
    """

    responses: list[Int[np.ndarray, "_l g"]]
    buckets: list[Bucket]
    tokens: list[int]
    shared: list[int]
    drawn: list[Int[np.ndarray, "_l g"]] = dataclasses.field(default_factory=list)
    decoded_at: list[Int[np.ndarray, " _l"]] = dataclasses.field(default_factory=list)


class Engine:
    """A model and what it keeps between batches: its arrays, also in 8 bits, and a `ContentCache`.

    Args:
        model: the denoiser.
        batch_size: the largest number of rows sampled together.
        text_block_len: tokens per text block if the settings do not say; a text that is
            not a whole number of blocks is one block.
        content_cache: for what batches share; by default nothing is kept.

    Attributes:
        constants: what no request changes of the model.
    """

    def __init__(
        self,
        model: Denoiser,
        batch_size: int,
        text_block_len: int,
        content_cache: ContentCache | None = None,
    ):
        self.model = model
        self.batch_size = batch_size
        self.text_block_len = text_block_len
        self._models: dict[str, Denoiser] = {}  # by method of `quantize`
        self._making = threading.Lock()  # several threads may sample
        self.content_cache = ContentCache(0) if content_cache is None else content_cache
        self.constants = ModelConstants.of(model)

    def sample(
        self,
        examples: Sequence[Example],
        requests: Sequence[RowRequest],
        sampling: config.Sampling,
        *,
        stage: str = "",
        bucket: Bucket | None = None,
        padding: Padding = "fit",
        callback: Callback | None = None,
        programs: Programs = contextlib.nullcontext,
    ) -> SampleOutput:
        """Samples the responses of examples of one modality; those of the same shape together.

        A batch that is not full is filled up, so that all batches use the same compiled programs.
        If all examples are the same object, and the noise is too until a last turn, the steps
        before that are passed once for all rows of a batch.

        Args:
            requests: of the examples: seeds and scales.
            stage: what is made, a key of `state.NOISE`: it has its own noise, and `callback` is
                told of it; by default the modality.
            bucket: the shapes to pad to; by default as `padding` says.
            padding: see `batch_shapes.Padding`.
            callback: called before the first step and after each phase.
            programs: entered while a batch is sampled.

        Raises:
            ConfigError: more steps than there are tokens.
        """
        model, block = self.model.settings, sampling.text.block_len or self.text_block_len
        for example in examples:
            check_steps(example, sampling, model, block)
        modality, edits = examples[0].modality, _has_source(examples[0])
        guided = any(presets.is_guided(one, has_source=edits) for one in requests)
        settings = _settings(sampling, model, modality, edits, guided)
        inputs = [
            sample_input(example, request, model, settings)
            for example, request in zip(examples, requests, strict=True)
        ]
        stage, sampled = stage or modality, {}
        shared = _shared_steps(examples, requests, stage)
        memory_maps.make_room()
        for chunk in batch_shapes.chunks(inputs, self.batch_size, padding, bucket):
            filled = [inputs[i] for i in chunk.filled]
            phases = _plan_of(filled, sampling, settings, model, block)
            greedy = not any(requests[i].temperature for i in chunk.members)
            key = stage, sampling, settings.guidance_rows, greedy, chunk.shape, chunk.bucket
            turns = {one.seeds(stage)[-1][0] for one in requests} - {0}
            key = (*key, shared, *sorted(turns)) if turns else key
            prompted = [inputs[i].prompt_tokens for i in chunk.members]
            seen: list[Any] = []  # the last responses, and when each token was decoded
            with programs(key):
                responses = sample.sample(
                    self._model(sampling.quantize),
                    filled,
                    phases,
                    settings=settings,
                    prompt_len=chunk.bucket.prompt_len,
                    callback=_told(callback, rows=chunk.members, prompted=prompted),
                    stage=stage,
                    shared=shared,
                    last=lambda *arrays, seen=seen: seen.extend(arrays),
                    content_cache=self.content_cache,
                    constants=self.constants,
                )
            for row, i in enumerate(chunk.members):
                end = None
                if modality == "text" and not settings.released:  # nothing but end-of-text follows
                    words = np.flatnonzero(responses[row] != model.end_of_text_id)
                    end = int(words.max(initial=-1)) + 1
                steps = costs.costs(phases, settings, prompted[row], row, end)
                once = costs.before(phases, settings, shared) if shared else 0
                first, rest = costs.total(steps[:once]), costs.total(steps[once:])
                first = 0 if row else first
                own = [x[row] for x in seen] or [responses[row], inputs[i].example.given * 1]
                drawn, order = own
                if modality == "text":
                    order = _until_end(drawn, order, model.end_of_text_id, inputs[i].example)
                sampled[i] = responses[row], chunk.bucket, first + rest, first, drawn, order
        columns = zip(*(sampled[i] for i in range(len(examples))), strict=True)
        return SampleOutput(*map(list, columns))

    def scores(
        self,
        examples: Sequence[Example],
        requests: Sequence[RowRequest],
        sampling: config.Sampling,
        responses: Sequence[Int[np.ndarray, "_l g"]],
        orders: Sequence[Int[np.ndarray, " _l"]] | None = None,
        *,
        stage: str,
        tolerance: float = 0.0,
        most_logits: int = MOST_LOGITS,
        programs: Programs = contextlib.nullcontext,
    ) -> "list[tuple[list[whole_plan.Step], whole_plan.Scores]]":
        """Returns the steps that would decode responses, and how they score them, in one pass.

        Args:
            requests, sampling, stage, programs: as for `sample`.
            responses: whole ones, each with a token that is not given.
            orders: `SampleOutput.decoded_at`; None: as planned, for images.
            tolerance: see `whole_plan.scores`.
            most_logits: of the steps of a batch.

        Raises:
            RequestError: they are more, or an example has an image in several views.
            ConfigError: more steps than there are tokens.
        """
        from sparse_lavida_jax.inference import whole_plan  # sampling does not need it

        if any(one.views for one in examples):
            raise RequestError("an image seen in several views does not fit one pass over a plan.")
        model, block = self.model.settings, sampling.text.block_len or self.text_block_len
        for one in examples:
            check_steps(one, sampling, model, block)
        modality, edits = examples[0].modality, _has_source(examples[0])
        guided = any(presets.is_guided(one, has_source=edits) for one in requests)
        settings = _settings(sampling, model, modality, edits, guided)
        inputs = [
            sample_input(*pair, model, settings) for pair in zip(examples, requests, strict=True)
        ]
        plan = [_plan_of([one], sampling, settings, model, block) for one in inputs]
        if orders is None:
            pairs = zip(plan, examples, strict=True)
            orders = [whole_plan.image_order(phases, one.given) for phases, one in pairs]
        steps = [
            whole_plan.steps_of(phases, settings, order, one.shape[1])
            for phases, order, one in zip(plan, orders, responses, strict=True)
        ]
        number = sum(len(step.at) for own in steps for step in own)
        classes = model.vocab_size if modality == "text" else model.codebook_size
        most = min(plans.BUCKETS[-1], most_logits // (classes * responses[0].shape[1]))
        if number > most or not all(steps):
            raise RequestError(f"the steps predict {number} tokens: one pass takes 1 to {most}.")
        network = self._model(sampling.quantize)
        how = {"settings": settings, "stage": stage, "tolerance": tolerance}
        given = network, inputs, steps, responses, orders
        scored = whole_plan.scores(*given, programs=programs, **how)
        return list(zip(steps, scored, strict=True))

    def _model(self, method: str) -> Denoiser:
        """Returns the model prepared for programs, in 8 bits if asked for, and caches it."""
        with self._making:
            if method not in self._models:
                model = quantize.as_asked(self.model, method)
                self._models[method] = taken_apart(model)
            return self._models[method]


def _shared_steps(examples: Sequence[Example], requests: Sequence[RowRequest], stage: str) -> int:
    """Returns the step of the last turn if rows differ in nothing before it, or else 0."""
    seeds = [one.seeds(stage) for one in requests]
    before = {(*one[:-1], one[-1][0]) for one in seeds}
    alike = all(example is examples[0] for example in examples)
    return seeds[0][-1][0] if alike and len(before) == 1 else 0


def _until_end(
    drawn: Int[np.ndarray, "l 1"], decoded_at: Int[np.ndarray, " l"], end: int, example: Example
) -> Int[np.ndarray, " l"]:
    """Returns when each token of a text was decoded, up to the step in which the text ended.

    It ends when it has an end-of-text that counts, and everything before that is decoded.
    """
    at = np.where(decoded_at == NOT_DECODED, UNTOLD, decoded_at)
    may_end = (drawn[:, 0] == end) & (at != UNTOLD)
    may_end &= np.arange(len(at)) >= ends_from(example)
    for last in np.unique(at[at != UNTOLD]):
        now = (at != UNTOLD) & (at <= last)
        ends = np.flatnonzero(may_end & now)
        if len(ends) and now[: ends[0]].all():
            return np.where(at <= last, at, UNTOLD)
    return at


def _told(callback: Callback | None, **of_rows: Sequence[Any]) -> Callback | None:
    """Returns a callback that is also told about the rows of a batch (`Progress`)."""
    if callback is None:
        return None
    told = {name: tuple(values) for name, values in of_rows.items()}
    return lambda state: callback(dataclasses.replace(state, **told))


def check_steps(
    example: Example, sampling: config.Sampling, model: config.Model, text_block_len: int
) -> None:
    """Checks that every step has a token to decode.

    Raises:
        ConfigError: more steps than there are tokens.
    """
    if example.modality == "image":
        preset = _settings(sampling, model, "image", False).preset
        by_code = preset.full_attention and sampling.grid == "code"
        most = example.response.size if by_code else len(example.response)
        steps, what = sampling.num_steps, "tokens of the image"
    else:
        by_count = sampling.text.commit == "count" and not sampling.text.step_ratio
        most = block_len(len(example.response), text_block_len)
        steps, what = sampling.text.steps if by_count else 1, "tokens of a text block"
    if steps > most:
        raise config.ConfigError(
            f"{{setting}}={{value}} is more than there are {what}: {{allowed}}.",
            setting="steps",
            value=str(steps),
            allowed=f"1 to {most} are allowed",
        )


def block_len(length: int, text_block_len: int) -> int:
    """Returns the tokens per text block: a text that is not a whole number of blocks is one."""
    return length if length % text_block_len else text_block_len


def planned_counts(
    model: config.Model,
    sampling: config.Sampling,
    example: Example,
    request: RowRequest,
    text_block_len: int,
) -> list[int]:
    """Returns how many codes or tokens each step of one example decodes, as planned.

    Steps count through all text blocks, as those of a `presets.Turn` do.

    Raises:
        ConfigError: more steps than there are tokens.
    """
    check_steps(example, sampling, model, text_block_len)
    edits = _has_source(example)
    guided = presets.is_guided(request, has_source=edits)
    settings = _settings(sampling, model, example.modality, edits, guided)
    rows = sample_input(example, request, model, settings)
    phases = _plan_of([rows], sampling, settings, model, text_block_len)
    steps = np.concatenate([phase.block for phase in phases] or [[]]).astype(int) - FIRST_BLOCK
    counts = np.concatenate([phase.count[:, 0] for phase in phases] or [[]])
    return np.bincount(steps, weights=counts).astype(int).tolist()


def planned_costs(
    model: config.Model, sampling: config.Sampling, example: Example, text_block_len: int
) -> list[costs.StepCost]:
    """Returns the cost of each step of one example, as planned (`costs.costs`)."""
    settings = _settings(sampling, model, example.modality, _has_source(example))
    rows = sample_input(example, RowRequest(), model, settings)
    phases = _plan_of([rows], sampling, settings, model, text_block_len)
    return costs.costs(phases, settings, rows.prompt_tokens)


def _plan_of(
    inputs: Sequence[SampleInput],
    sampling: config.Sampling,
    settings: StepSettings,
    model: config.Model,
    text_block_len: int,
) -> list[plans.Steps]:
    """Returns the plan of a batch of one shape."""
    given = np.stack([one.example.given for one in inputs])
    length, grid = given.shape[1], inputs[0].example.grid
    block = block_len(length, text_block_len)
    by_seed = settings.modality == "image" and sampling.order_seed < 0
    seeds = tuple(one.request.seed if by_seed else 0 for one in inputs)
    first = tuple(one.example.first for one in inputs) if sampling.order == "layout" else None
    rows = seeds, grid, first
    return _plan(sampling, settings, model, given.tobytes(), given.shape, block, *rows)


@functools.lru_cache(maxsize=32)
def _plan(sampling, settings, model, given: bytes, shape, block_len, seeds, grid, first):
    known = np.frombuffer(given, bool).reshape(shape)
    return presets.plan(sampling, settings, model, known, block_len, seeds, grid, first)


@functools.lru_cache(maxsize=32)
def _settings(
    sampling: config.Sampling,
    model: config.Model,
    modality: Modality,
    has_source: bool,
    guided: bool | None = None,
) -> StepSettings:
    return presets.step_settings(sampling, model, modality, has_source=has_source, guided=guided)


def _has_source(example: Example) -> bool:
    return any(isinstance(part, sequence.Source) for part in example.parts)
