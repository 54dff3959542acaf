# SPDX-License-Identifier: Apache-2.0
"""The jitted sampler against the paper: the logits and the choice of every step.

`dense_pass` recomputes each step in float64, over the un-truncated sequence, from what the
previous steps committed. It shares no cache, truncation, layout, plan or kernel with the sampler.
Draws use recorded Gumbel noise, so that what a step commits can be computed too. Faults planted in
the sampler show that the comparison detects them.
"""

import dataclasses
import functools
from unittest import mock

import dense_pass
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from dense_pass import FIRST, GIVEN

from sparse_lavida_jax import config, sample, sequence
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.sampling import calls, forward, presets, prompts
from sparse_lavida_jax.tags import make_tags
from sparse_lavida_jax.visibility import PAD_BLOCK

TOLERANCE = 2e-5  # float32 against float64; measured: 7e-6 at most
FAULT = 0.1  # the least change of logits by a planted fault; measured: 0.3
TEMPERATURE = 0.8
SURELY = 1e4  # noise that decides a draw regardless of the logits


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch to sample.

    Attributes:
        requests: of one modality; their own guidance scales override that of `sampling`.
        ends: position of the end-of-text that each text is forced to draw; by default none is.
    """

    requests: tuple[Example, ...]
    model: config.Model
    sampling: config.Sampling
    ends: tuple[int, ...] = ()

    @property
    def modality(self) -> sequence.Modality:
        return self.requests[0].modality

    @property
    def has_source(self) -> bool:
        return self.sampling.guidance_image > 0

    @property
    def given(self) -> np.ndarray:
        return np.stack([request.given for request in self.requests])


def images(settings: config.Model, *rows: dict, **sampling) -> Case:
    """Returns requests for images; five steps decode 2, 2, 2, 2 and 1 of 9 cells."""
    asked = [tiny.request("image", settings, i, **row) for i, row in enumerate(rows)]
    defaults = {
        "num_steps": 5, "schedule": "linear", "order_seed": -1, "temperature": TEMPERATURE,
        "guidance": 0.7,
    }  # fmt: skip
    return Case(tuple(asked), settings, config.Sampling(**(defaults | sampling)))


def draw(model: dict | None = None, **sampling) -> Case:
    """Images from prompts of different length, one with its own guidance scale."""
    rows = {"words": 3}, {"words": 12}, {"words": 5}
    case = images(tiny.model_settings(**(model or {})), *rows, **sampling)
    first, *others = case.requests
    return dataclasses.replace(case, requests=(tiny.asked_with(first, guidance=1.5), *others))


def edit(**changes) -> Case:
    """Edits, one of them with known cells, in a batch with a row without input image."""
    rows = (
        {"words": 2, "vision": True, "source": True, "given": 0.4},
        {"words": 6},
        {"words": 4, "vision": True, "source": True},
    )
    settings = tiny.model_settings(codes_per_token=4, num_registers=2, **changes)
    return images(settings, *rows, guidance_image=0.4)


def inpaint() -> Case:
    rows = {"words": 3, "given": 0.4}, {"words": 7, "given": 0.7}, {"words": 5}
    return images(tiny.model_settings(), *rows)


def answer(order: str = "left_to_right", ends: tuple[int, ...] = (), **changes) -> Case:
    """Two texts of three text blocks: about an image, and infilled; with `ends` nothing is given.

    Each text block is decoded in two steps.
    """
    settings = tiny.model_settings(**changes)
    about = tiny.request("text", settings, 0, words=1, vision=True, source=True)
    infilled = tiny.request("text", settings, 1, words=15, given=0.5)
    given = infilled.given & (not ends)
    given[: tiny.TEXT_BLOCK_LEN] = not ends
    requests = about, dataclasses.replace(infilled, given=given)
    sampling = config.Sampling(
        text=config.TextSampling(steps=2, temperature=TEMPERATURE, block_order=order)
    )
    return Case(requests, settings, sampling, ends)


CASES = {
    "draw": draw,
    "draw_in_uneven_steps": functools.partial(
        draw, {"codes_per_token": 4, "num_registers": 2}, num_steps=4, schedule="shift"
    ),
    "draw_without_registers": functools.partial(draw, {"num_registers": 0}),
    "edit": edit,
    "inpaint": inpaint,
    "answer": answer,
    "answer_right_to_left": functools.partial(answer, "right_to_left"),
    "answer_in_any_order": functools.partial(answer, "1,2,0"),
    "answer_without_registers": functools.partial(answer, num_registers=0),
    "answer_that_ends": functools.partial(answer, ends=(2, 6)),
}
SLOW_CASES = {
    "edit_by_blockwise_attention": functools.partial(edit, attention_implementation="blockwise"),
    "draw_without_caches": functools.partial(draw, preset="t"),
    "draw_without_the_cache_of_the_response": functools.partial(draw, preset="pt"),
    "draw_without_the_cache_of_the_prompt": functools.partial(draw, preset="rt"),
}


# ---------------------------------------------------------------------------------------------
# The sampler, watched.


@dataclasses.dataclass(frozen=True)
class Step:
    """Inputs, predictions and result of a step.

    Attributes:
        before, after: the responses [b l g].
        logits: guided [b l g v], NaN where it predicted nothing.
        noise: used for its draws [b l g v].
    """

    before: np.ndarray
    after: np.ndarray
    logits: np.ndarray
    noise: np.ndarray

    @property
    def decoded(self) -> np.ndarray:
        """The tokens that it decoded [b l]."""
        return (self.before != self.after).any(axis=-1)


TOLD = []  # filled by the steps of the current run
_step_logits = sample.step_logits


def _telling(model, state, now, *rest):
    logits, cache = _step_logits(model, state, now, *rest)
    told = state.passes, state.responses, now.decode, logits
    jax.debug.callback(lambda *values: TOLD.append([*map(np.asarray, values)]), *told)
    return logits, cache


def watched_phase():
    """Returns a separately compiled `sample.run_phase` whose steps are recorded."""
    plain = functools.partial(sample.run_phase.__wrapped__)
    return tiny.quick_jit(plain, static_argnames=("settings",))


WATCHED_PHASE = watched_phase()


def run(case: Case, phase=WATCHED_PHASE) -> tuple[list[Step], np.ndarray]:
    """Returns the steps of `sample.sample`, and its responses."""
    model = tiny.denoiser(case.model)
    settings = tiny.step_settings(
        case.sampling, case.model, case.modality, has_source=case.has_source
    )
    assert settings.preset.truncate and not settings.preset.full_attention
    seeds = [request.request.seed for request in case.requests]
    parts = presets.plan(
        case.sampling, settings, case.model, case.given, tiny.TEXT_BLOCK_LEN, seeds
    )
    noise = noise_of(case, sum(part.num_steps for part in parts))
    TOLD.clear()
    progress = []
    with mock.patch.multiple(sample, run_phase=phase, step_logits=_telling):
        response = sample.sample(
            model,
            tiny.sample_inputs(case.requests, case.model, settings),
            parts,
            settings=settings,
            draws=tiny.Recorded(gumbel=noise),
            callback=progress.append,
        )
    jax.effects_barrier()
    told = sorted(TOLD, key=lambda values: int(values[0]))
    states = [responses for _, responses, *_ in told] + [progress[-1].responses]
    steps = []
    for i, (_, before, decode, logits) in enumerate(told):
        spread = np.full((*before.shape, logits.shape[-1]), np.nan)
        for row, positions in enumerate(decode):
            spread[row, positions[positions >= 0]] = logits[row, positions >= 0]
        steps.append(Step(before, states[i + 1], spread, noise[i]))
    return steps, response


def noise_of(case: Case, num_steps: int) -> np.ndarray:
    """Returns Gumbel noise [k b l g v] that makes texts end where they should."""
    classes = case.model.vocab_size if case.modality == "text" else case.model.codebook_size
    shape = (num_steps, *case.given.shape, case.requests[0].response.shape[1], classes)
    noise = np.random.default_rng(0).gumbel(size=shape).astype(np.float32)
    if case.modality == "text":
        end = case.model.end_of_text_id
        noise[..., end] = -SURELY
        for row, position in enumerate(case.ends):
            noise[:, row, position, :, end] = SURELY
    return noise


# ---------------------------------------------------------------------------------------------
# The same steps from the paper.


def compare(case: Case, steps: list[Step]) -> tuple[float, int]:
    """Returns the largest difference of logits, and in how many rows the choices differ."""
    model = dense_pass.in_float64(tiny.denoiser(case.model))
    differences, other_choices = [], 0
    for number, step in enumerate(steps):
        blocks = blocks_at(case, steps, number)
        for row, asked in enumerate(case.requests):
            scale = asked.request.guidance
            logits = dense_pass.step_logits(
                model,
                asked,
                step.before[row],
                blocks[row],
                FIRST + number,
                case.sampling.guidance if scale is None else scale,
                case.sampling.guidance_image if case.has_source else None,
            )
            now = blocks[row] == FIRST + number
            differences.append(np.abs(step.logits[row, now] - logits[now]).max(initial=0))
            chosen = choice(case, step, row, logits, now)
            other_choices += not np.array_equal(step.after[row], chosen)
    largest = float(np.max(differences))
    return (np.inf if np.isnan(largest) else largest), other_choices


def blocks_at(case: Case, steps: list[Step], number: int) -> np.ndarray:
    """Returns A[i] of every response token [b l] at the start of a step.

    A clean token has the number of the step that decoded it. Masked tokens of an image have that of
    the step that will decode them; in a text, those of the current text block share one block, and
    so do those of each later one.
    """
    by_step = np.stack([step.decoded for step in steps]).argmax(axis=0) + FIRST
    if case.modality == "image":
        return np.where(case.given, GIVEN, by_step)
    block_of = np.arange(tiny.TEXT_LEN) // tiny.TEXT_BLOCK_LEN
    turn = np.array(text_blocks(case)).argsort()[block_of]
    masked = (steps[number].before == case.model.text_mask_id).all(axis=-1)
    current = np.broadcast_to(turn, masked.shape)[masked].min()
    blocks = np.where(masked, FIRST + number + turn[None] - current, by_step)
    return np.where(case.given, GIVEN, blocks)


def text_blocks(case: Case) -> list[int]:
    """Returns the text blocks in the requested order."""
    order, number = case.sampling.text.block_order, tiny.TEXT_LEN // tiny.TEXT_BLOCK_LEN
    named = {"left_to_right": range(number), "right_to_left": reversed(range(number))}
    return list(named[order] if order in named else map(int, order.split(",")))


def choice(case: Case, step: Step, row: int, logits, now) -> np.ndarray:
    """Returns the response [l g] of a row after a step, from the logits of the step.

    An image step keeps everything that it draws; a text step keeps its most confident draws, as
    many as the sampler decoded (Sec. 3.2).
    """
    if case.modality == "text":
        logits[..., case.model.text_mask_id] = -np.inf  # never drawn
    drawn = (logits / TEMPERATURE + step.noise[row]).argmax(axis=-1)
    keep = np.flatnonzero(now)
    if case.modality == "text":
        probability = np.exp(logits[keep, 0]) / np.exp(logits[keep, 0]).sum(axis=-1, keepdims=True)
        sure = np.take_along_axis(probability, drawn[keep], axis=-1)[:, 0]
        keep = keep[np.argsort(-sure)[: step.decoded[row].sum()]]
    after = step.before[row].copy()
    after[keep] = drawn[keep]
    return after


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CASES)]
)
def test_every_step_is_the_papers(name):
    case = (CASES | SLOW_CASES)[name]()
    steps, response = run(case)
    difference, other_choices = compare(case, steps)
    assert difference < TOLERANCE
    assert other_choices == 0
    left = steps[-1].after
    mask_id = case.model.text_mask_id if case.modality == "text" else case.model.image_mask_id
    if not case.ends:
        assert (left != mask_id).all()
        np.testing.assert_array_equal(response, left)
        return
    # The second text ends in the second text block, so nothing decodes the third.
    last = max(case.ends) // tiny.TEXT_BLOCK_LEN
    assert len(steps) == (last + 1) * case.sampling.text.steps
    assert ((left == mask_id).all(axis=-1).sum(axis=1) == tiny.TEXT_BLOCK_LEN).all()
    for row, end in enumerate(case.ends):
        np.testing.assert_array_equal(response[row, :end], left[row, :end])
        assert (response[row, end:] == case.model.end_of_text_id).all()


# ---------------------------------------------------------------------------------------------
# Planted faults: each patches one thing. Faults in compiled code need a program of their own.


def tags_of_steps(change):
    """Patches the tags that `make_tags` gives a step: `change(layout, block, last_clean)`."""

    def changed(position, block, last_clean):
        return change(functools.partial(make_tags, position), block, last_clean)

    return mock.patch.object(forward, "make_tags", changed)


def horizon_one_short():
    """Masked tokens do not see the newest ones."""
    return tags_of_steps(lambda layout, block, last: layout(block, last - 1))


def horizon_one_far():
    """The newest tokens see the masked ones."""

    def far(layout, block, last):
        tags = layout(block, last)
        return tags.replace(horizon=tags.horizon + 1)

    return tags_of_steps(far)


def block_one_early():
    """Masked tokens and registers are in the block of the newest ones."""

    def early(layout, block, last):
        return layout(jnp.where(block == last + 1, last, block), last)

    return tags_of_steps(early)


def visible_padding_of_steps():
    def seen(layout, block, last):
        return layout(jnp.where(block == PAD_BLOCK, 0, block), last)

    return tags_of_steps(seen)


def newest_not_cached():
    step_hidden = forward.step_hidden

    def changed(model, state, *rest):
        hidden, cache = step_hidden(model, state, *rest)
        return hidden, dataclasses.replace(cache, offset=state.cache.offset)

    return mock.patch.object(forward, "step_hidden", changed)


def newest_cached_in_the_wrong_block():
    """In that of the step that stores them, not of the step that decoded them."""
    step_hidden = forward.step_hidden

    def changed(model, state, now, *rest):
        at = jnp.where(state.decoded_at == now.block - 1, now.block, state.decoded_at)
        return step_hidden(model, dataclasses.replace(state, decoded_at=at), now, *rest)

    return mock.patch.object(forward, "step_hidden", changed)


def registers_one_position_off():
    for_steps = calls._for_steps

    def changed(*args):
        return tuple(prompt.replace(length=prompt.length + 1) for prompt in for_steps(*args))

    return mock.patch.object(calls, "_for_steps", changed)


def visible_padding_of_prompts():
    def changed(position, block, last_clean):
        return make_tags(position, np.where(block == PAD_BLOCK, 0, block), last_clean)

    return mock.patch.object(prompts, "make_tags", changed)


def second_row_without_its_source():
    everything = {"drop_prompt": True, "drop_source": True}
    return mock.patch.dict(prompts.EDIT_DROPS, source=everything)


def given_cells_in_block_0():
    return mock.patch.object(prompts, "GIVEN_BLOCK", 0)


COMPILED_FAULTS = (
    horizon_one_short,
    horizon_one_far,
    block_one_early,
    visible_padding_of_steps,
    newest_not_cached,
    newest_cached_in_the_wrong_block,
)
FAULTS = [
    *(("draw", fault) for fault in COMPILED_FAULTS),
    ("draw", registers_one_position_off),
    ("draw", visible_padding_of_prompts),
    ("edit", second_row_without_its_source),
    ("inpaint", given_cells_in_block_0),
    ("answer", newest_not_cached),
    ("answer", registers_one_position_off),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_planted_fault_shows(name, fault):
    case = CASES[name]()
    with fault():
        steps, _ = run(case, watched_phase() if fault in COMPILED_FAULTS else WATCHED_PHASE)
    difference, _ = compare(case, steps)
    assert difference > FAULT


@pytest.mark.parametrize("name", ["draw", "answer"])
def test_other_choices_show(name):
    case = CASES[name]()
    steps, _ = run(case)
    turned = [dataclasses.replace(step, noise=-step.noise) for step in steps]
    difference, other_choices = compare(case, turned)
    assert difference < TOLERANCE
    assert other_choices > 3
