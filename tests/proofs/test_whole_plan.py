# SPDX-License-Identifier: Apache-2.0
"""One pass over a whole plan has the sampler's draws, and the probabilities of the paper.

The probabilities and the draws of every step are compared with `dense_pass`, in float64, with noise
keyed here. Planted faults show that the comparison detects them.
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

from sparse_lavida_jax import config
from sparse_lavida_jax.inference import engine, proofs, whole_plan
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling import commit, presets, state
from sparse_lavida_jax.sampling.presets import RowRequest

TOLERANCE = 1e-4  # in bits and in logits, at most 3 x guided; measured: 2e-5
FAULT = 0.02  # the least change of a planted fault, in bits or logits; measured: 0.05
NUMBERS = {"text": 0, "image": 2}  # of the noise of each modality


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch that was decoded by the sampler.

    Attributes:
        examples, requests, sampling: as for `Engine.sample`.
        decoded: what it returned.
    """

    engine: engine.Engine
    examples: list
    requests: list[RowRequest]
    sampling: config.Sampling
    decoded: engine.SampleOutput

    def scored(self):
        """Returns the steps and scores of each row, of one pass."""
        modality = self.examples[0].modality
        orders = self.decoded.decoded_at if modality == "text" else None
        how = self.examples, self.requests, self.sampling, self.decoded.drawn, orders
        return self.engine.scores(*how, stage=modality)


@functools.cache
def case(name: str) -> Case:
    modality = "text" if name == "answer" else "image"
    rows = [{"words": 3}, {"words": 9}]
    if name == "edit":
        rows = [{"words": 2, "vision": True, "source": True, "given": 0.4}, {"words": 6}]
    if name == "inpaint":
        rows = [{"words": 3, "given": 0.4}, {"words": 7, "given": 0.7}]
    changes = {
        "draw": {
            "guidance": 0.7,
            "released": {"temperature_schedule": "linear", "temperature_end": 0.5},
        },
        "guided in some steps": {"guidance": 0.7, "guidance_interval": (0.3, 0.7)},
        "registers": {"registers": 3, "registers_end": 1},
        "passes": {"cell_passes": 2},
        "filtered": {"top_k": 6, "top_p": 0.8, "merge_cells": 2},
        "edit": {"guidance": 0.7, "guidance_image": 0.4},
        "inpaint": {},
        "answer": {"text": {"steps": 2, "temperature": 0.8}},
    }[name]
    codes = {"passes": 4, "edit": 4}.get(name, 1)
    model = tiny.model_settings(codes_per_token=codes)
    shared = {"num_steps": 5, "schedule": "linear", "order_seed": -1, "temperature": 0.8}
    sampling = config.build(config.Sampling, shared | changes)
    scales = presets.scales(sampling, modality)
    examples = [tiny.request(modality, model, i, **row) for i, row in enumerate(rows)]
    requests = [RowRequest(seed=5 + i, attempt=i, **scales) for i in range(len(rows))]
    made = engine.Engine(tiny.denoiser(model), 2, tiny.TEXT_BLOCK_LEN)
    return Case(made, examples, requests, sampling, made.sample(examples, requests, sampling))


CASES = (
    "draw",
    "guided in some steps",
    "registers",
    "passes",
    "filtered",
    "edit",
    "inpaint",
    "answer",
)


def gumbel(request: RowRequest, modality: str, block: int, position: int, shape) -> np.ndarray:
    """Returns the noise of a token: keyed by seed, modality, attempt, step and position."""
    key = jax.random.key(request.seed)
    for number in (NUMBERS[modality], request.attempt, block, position):
        key = jax.random.fold_in(key, number)
    return np.asarray(jax.random.gumbel(key, shape, mode="low"), np.float64)


def difference(one: Case, scored) -> float:
    """Returns the largest difference of bits and margins from those of the independent pass."""
    found = []
    for row, (steps, scores) in enumerate(scored):
        for number, step in enumerate(steps):
            logits = independent_logits(one, row, step)
            own = np.flatnonzero(scores.step == number)
            np.testing.assert_array_equal(scores.at[own], step.at)
            temperature = 0.8 * step.temperature
            for i, position in zip(own, step.at, strict=True):
                scaled = logits[position] / temperature
                chosen = one.decoded.drawn[row][position][:, None]
                bits = np.log2(np.exp(scaled).sum(axis=-1, keepdims=True))
                bits = bits - np.take_along_axis(scaled, chosen, -1) / np.log(2)
                noise = gumbel(
                    one.requests[row], one.examples[0].modality, step.block, position, scaled.shape
                )
                score = scaled + noise
                own = np.take_along_axis(score, chosen, -1)
                others = np.where(np.arange(score.shape[-1]) == chosen, -np.inf, score).max(-1)
                margin = (own[:, 0] - others) * temperature
                # A token that this step does not commit may be one that it may not draw.
                drawn = step.decided[step.at == position][0]
                apart = bits[:, 0] - scores.bits[i], margin - scores.margin[i]
                found += [np.abs(x[drawn]).max(initial=0) for x in apart]
    return float(np.max(found))


def independent_logits(one: Case, row: int, step: whole_plan.Step) -> np.ndarray:
    """Returns the logits [l g v] of a step that may be drawn, NaN outside its tokens."""
    asked, response = one.examples[row], one.decoded.drawn[row]
    model = dense_pass.in_float64(one.engine.model)
    model.settings = dataclasses.replace(model.settings, num_registers=step.registers)
    is_text = asked.modality == "text"
    mask_id = model.settings.text_mask_id if is_text else model.settings.image_mask_id
    order = order_of(one, row)
    clean = order < step.block
    masked = np.where(clean[:, None], response, mask_id)
    masked[step.at] = np.where(step.known, response[step.at], mask_id)
    blocks = np.where(clean, order, step.block + 1)
    blocks[step.at] = step.block
    request = one.requests[row]
    image = request.guidance_image * step.guidance if one.sampling.guidance_image else None
    guidance = request.guidance * step.guidance
    logits = dense_pass.step_logits(model, asked, masked, blocks, step.block, guidance, image)
    if is_text:
        logits[..., mask_id] = -np.inf
    filters = one.sampling.top_k, one.sampling.top_p
    kept = commit.filtered(
        jnp.asarray(logits, jnp.float32), *(filters if not is_text else (0, 1.0))
    )
    return np.where(np.isneginf(kept), -np.inf, logits)


def order_of(one: Case, row: int) -> np.ndarray:
    order = np.array(one.decoded.decoded_at[row])
    return np.where(order == whole_plan.UNTOLD, 2**20, order)


@pytest.mark.parametrize("name", CASES)
def test_a_whole_plan_has_the_sampler_s_draws_and_the_papers_probabilities(name):
    one = case(name)
    scored = one.scored()
    assert difference(one, scored) < TOLERANCE
    for row, (steps, scores) in enumerate(scored):
        number = np.array([step.block for step in steps])[scores.step]
        order = one.decoded.decoded_at[row]
        committed = scores.decided & (order[scores.at] == number)[:, None]
        assert scores.deficit[committed].max() < TOLERANCE
        given = one.examples[row].given
        decided = np.zeros(one.decoded.drawn[row].shape, int)
        np.add.at(decided, scores.at, committed)
        expected = np.repeat(
            (~given)[:, None] & (order != whole_plan.UNTOLD)[:, None], decided.shape[1], 1
        )
        np.testing.assert_array_equal(decided, expected)


def test_a_text_step_commits_its_surest_draws():
    one = case("answer")
    for row, (steps, scores) in enumerate(one.scored()):
        order = one.decoded.decoded_at[row]
        for number, step in enumerate(steps):
            own = scores.step == number
            taken = own & (order[scores.at] == step.block)
            assert taken.sum() == step.count
            left = scores.drawn_sure[own & ~taken]
            assert scores.sure[taken].min() > left.max(initial=-np.inf)


def changes(one: Case, row: int, steps, scores) -> np.ndarray:
    """Returns by how much logits must change for each token to be another, or committed later.

    Every code that could be drawn is tried, in float64: what is committed, and when, changes if the
    difference of two scores or twice that of two log-odds does.
    """
    order, drawn = one.decoded.decoded_at[row], one.decoded.drawn[row]
    modality, found = one.examples[0].modality, np.full(len(drawn), np.inf)
    for number, step in enumerate(steps):
        logits, temperature = independent_logits(one, row, step), 0.8 * step.temperature
        gaps, sure = {}, {}
        for position in step.at:
            own = logits[position]
            noise = gumbel(one.requests[row], modality, step.block, position, own.shape)
            score = own + noise * temperature
            gaps[position] = score.max(-1, keepdims=True) - score
            weight = np.exp(own - own.max(-1, keepdims=True))
            with np.errstate(divide="ignore"):
                sure[position] = np.log(weight) - np.log(weight.sum(-1, keepdims=True) - weight)
        committed = scores.decided & (order[scores.at] == step.block)[:, None]
        now = [
            (i, scores.at[i]) for i in np.flatnonzero(committed.any(1) & (scores.step == number))
        ]
        left = {*step.at} - {position for _, position in now}
        for i, position in now:
            for code, gap in zip(drawn[position], gaps[position][committed[i]], strict=True):
                found[position] = min(found[position], np.delete(gap, code).min())
            for other in left if modality == "text" else ():
                own = sure[position][0, drawn[position, 0]]
                least = np.maximum(gaps[other][0], (own - sure[other][0]) / 2).min()
                found[position] = min(found[position], least)
    return found


@pytest.mark.parametrize("name", ["draw", "answer"])
def test_margins_are_what_logits_must_change_by(name):
    one, row = case(name), 0
    steps, scores = one.scored()[row]
    order = one.decoded.decoded_at[row] if name == "answer" else None
    stage = proofs._stage("any", steps, scores, one.decoded.drawn[row], order, TOLERANCE)
    expected = changes(one, row, steps, scores)
    margins = np.array([np.inf if x is None else x for x in stage.margins])
    np.testing.assert_array_equal(np.isinf(margins), np.isinf(expected))
    assert 0 < stage.smallest[0] == margins.min() < 1
    # Of an order, a bound that is reached where the draws are the most probable tokens.
    assert (margins <= expected + TOLERANCE).all()
    reached = np.isclose(margins, expected, atol=TOLERANCE) | np.isinf(margins)
    assert reached.all() if name == "draw" else reached.mean() > 0.5


def test_the_pass_has_as_many_tokens_as_the_steps():
    """Each cell is passed once masked, and all but those of the last step once clean."""
    steps, _ = case("draw").scored()[0]
    blocks = whole_plan.blocks_of(steps, case("draw").decoded.decoded_at[0])
    present = (blocks.block != whole_plan.ABSENT).sum()
    assert present == 2 * tiny.IMAGE_LEN - len(steps[-1].at)


def test_what_no_pass_holds_is_refused():
    one = case("draw")
    how = one.requests[:1], one.sampling, one.decoded.drawn[:1]
    views = (np.zeros((2, 8, 8, 3), np.uint8),)
    with pytest.raises(RequestError, match="several views"):
        one.engine.scores([dataclasses.replace(one.examples[0], views=views)], *how, stage="image")
    with pytest.raises(RequestError, match="9 tokens: one pass takes 1 to 8"):
        one.engine.scores(one.examples[:1], *how, stage="image", most_logits=12 * 8)
    given = dataclasses.replace(one.examples[0], given=np.ones(tiny.IMAGE_LEN, bool))
    with pytest.raises(RequestError, match="0 tokens"):
        one.engine.scores([given], *how, stage="image")


def other_noise():
    return mock.patch.dict(state.NOISE, image=7, text=8)


def horizon(by: int):
    blocks_of = whole_plan.blocks_of

    def changed(*args):
        blocks = blocks_of(*args)
        return blocks._replace(horizons={number: m + by for number, m in blocks.horizons.items()})

    return mock.patch.object(whole_plan, "blocks_of", changed)


def missing_register():
    steps_of = whole_plan.steps_of

    def changed(*args, **how):
        return [one._replace(registers=one.registers - 1) for one in steps_of(*args, **how)]

    return mock.patch.object(whole_plan, "steps_of", changed)


def swapped_guidance_rows():
    drops = whole_plan.drops
    return mock.patch.object(whole_plan, "drops", lambda *args: drops(*args)[::-1])


def guided_in_every_step():
    steps_of = whole_plan.steps_of

    def changed(*args, **how):
        return [one._replace(guidance=1.0) for one in steps_of(*args, **how)]

    return mock.patch.object(whole_plan, "steps_of", changed)


def later_codes_known():
    """Passes over codes of a cell see what later ones decode."""
    steps_of = whole_plan.steps_of

    def changed(*args, **how):
        return [one._replace(known=~one.decided) for one in steps_of(*args, **how)]

    return mock.patch.object(whole_plan, "steps_of", changed)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("draw", other_noise),
        ("draw", functools.partial(horizon, -1)),
        ("draw", functools.partial(horizon, 1)),
        ("draw", missing_register),
        ("draw", swapped_guidance_rows),
        ("edit", swapped_guidance_rows),
        ("guided in some steps", guided_in_every_step),
        ("passes", later_codes_known),
        ("answer", functools.partial(horizon, -1)),
        ("answer", other_noise),
    ],
)
def test_a_planted_fault_shows(name, fault):
    one = case(name)
    with fault():
        scored = one.scored()
    # The steps themselves are those of the sampler: only what was scored is at fault.
    right = [(steps, scores) for (steps, _), (_, scores) in zip(one.scored(), scored, strict=True)]
    assert difference(one, right) > FAULT
