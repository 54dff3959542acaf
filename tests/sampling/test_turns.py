# SPDX-License-Identifier: Apache-2.0
"""A branch equals the run whose noise changes at its turns, bit for bit.

The reference knows nothing of turns: it passes every row alone in whole phases, and reads its noise
from a record in which each step has that of its own seed.
"""

import dataclasses
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces

from sparse_lavida_jax.models.cache import KVCache
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sampling import costs, draw, loop, plans, state
from sparse_lavida_jax.sampling.presets import RowRequest, Turn
from sparse_lavida_jax.sampling.prompts import PromptTokens
from sparse_lavida_jax.tags import FIRST_BLOCK

SETTINGS = tiny.model_settings()
FOUR_CODES = tiny.model_settings(codes_per_token=4)
SEEDS = (5, 6, 7)  # of three branches
# By name: modality, model, preset, settings of steps, and how the request is made.
CASES = {
    "image": ("image", SETTINGS, "sparse", {}, {}),
    "guidance": ("image", SETTINGS, "sparse", {"guidance": 1.5}, {}),
    "edit": (
        "image", SETTINGS, "sparse", {"guidance": 1.5, "guidance_image": 0.5},
        {"vision": True, "source": True, "given": 0.3},
    ),
    "nothing cached": ("image", SETTINGS, "none", {"guidance": 1.5}, {"vision": True}),
    "prompt cached": ("image", SETTINGS, "pt", {"guidance": 1.5}, {}),
    "dense": ("image", SETTINGS, "dense", {"guidance": 1.5}, {}),
    "two passes a step": ("image", FOUR_CODES, "sparse", {"cell_passes": 2}, {}),
    "text": ("text", SETTINGS, "sparse", {}, {"vision": True}),
    "given text": ("text", SETTINGS, "sparse", {}, {"given": 0.2}),
}  # fmt: skip


def setup(name):
    """Returns model, request, plan of one row, settings and stage of a case."""
    modality, model, preset, changes, how = CASES[name]
    passes = changes.get("cell_passes", 1)
    options = {key: value for key, value in changes.items() if key != "cell_passes"}
    settings = traces.settings_of(
        preset, modality, model, has_source=how.get("source", False), cell_passes=passes, **options
    )
    settings = dataclasses.replace(settings, head_tile=0)
    request = tiny.request(modality, model, 3, words=3, **how)
    plan = traces.plan([request], settings, cell_passes=passes)
    stage = "image" if modality == "image" else "layout"
    return tiny.denoiser(model), request, plan, settings, stage


def copied(plan, rows):
    """Returns a plan with copies of its only row."""
    names = ("clean", "decode", "candidates", "rest", "count")
    return [
        dataclasses.replace(part, **{n: np.repeat(getattr(part, n), rows, axis=1) for n in names})
        for part in plan
    ]


def branches(name, turns, *, seeds=SEEDS, shared=None):
    """Returns the codes of branches that share all `turns` but the seed of the last one.

    Args:
        turns: (step, seed); the seed of the last one is replaced.
        shared: as `sample.sample`; by default up to the last turn.
    """
    model, request, plan, settings, stage = setup(name)
    *before, (last, _) = turns
    rows = []
    for seed in seeds:
        own = tuple(Turn(stage, *turn) for turn in (*before, (last, seed)))
        rows.append(tiny.asked_with(request, turns=own))
    how = {"stage": stage, "shared": last if shared is None else shared, "stop_early": False}
    return traces.finished(model, rows, copied(plan, len(seeds)), settings, **how)


def reference(name, turns, seed):
    """Returns the codes of one row whose noise is recorded."""
    model, request, plan, settings, stage = setup(name)
    width = model.settings.codebook_size if stage == "image" else model.settings.vocab_size
    shape = (request.response.shape[1], width)
    seeds = [(0, 3), *turns[:-1], (turns[-1][0], seed)]
    noise = []
    for block in np.concatenate([part.block for part in plan]):
        own = [one for first, one in seeds if first <= block - FIRST_BLOCK][-1]
        key = state._keys(np.array([own]), np.array([0]), stage=state.NOISE[stage])
        now = tiny.step_at(jnp.arange(len(request.response))[None])
        noise.append(draw.noise(key, dataclasses.replace(now, block=jnp.int32(block)), shape))
    draws = tiny.Recorded(gumbel=np.stack(noise))
    how = {"draws": draws, "stage": stage, "stop_early": False}
    (codes,) = traces.finished(model, [request], plan, settings, **how)
    return codes


def last_step(name):
    _, _, plan, _, _ = setup(name)
    return int(plan[-1].block[-1]) - FIRST_BLOCK


@pytest.mark.parametrize("name", CASES)
def test_a_branch_is_the_run_with_its_turns(name):
    middle = max(1, last_step(name) // 2)
    made = branches(name, [(middle, None)])
    for codes, seed in zip(made, SEEDS, strict=True):
        np.testing.assert_array_equal(codes, reference(name, [(middle, None)], seed))
    assert len(np.unique(made, axis=0)) > 1  # or equality says nothing


@pytest.mark.parametrize("name", ["guidance", "text"])
@pytest.mark.parametrize("turns", [[(0, 0)], [(1, 9), (2, 0)], [(1, 9), (2, 8), (3, 0)]])
def test_branches_of_branches_have_all_turns(name, turns):
    made = branches(name, turns)
    for codes, seed in zip(made, SEEDS, strict=True):
        np.testing.assert_array_equal(codes, reference(name, turns, seed))


@pytest.mark.parametrize("name", ["edit", "text"])
def test_a_prefix_for_all_rows_is_the_prefix_of_each(name):
    """Passed once or by every row, and in a batch of one."""
    turns = [(max(1, last_step(name) // 2), None)]
    made = branches(name, turns)
    np.testing.assert_array_equal(made, branches(name, turns, shared=0))
    np.testing.assert_array_equal(made[:1], branches(name, turns, seeds=SEEDS[:1]))


def test_a_turn_to_the_same_seed_changes_nothing():
    same = branches("guidance", [(2, None)], seeds=(3, 5))
    model, request, plan, settings, _ = setup("guidance")
    (plain,) = traces.finished(model, [request], plan, settings, stage="image")
    np.testing.assert_array_equal(same[0], plain)
    assert (same[1] != plain).any()


# Faults that have to be found: the change of noise one step off, other noise, guidance rows of the
# cache in another order, clean tokens of the cache that no later step sees.
FAULTS = {
    "a step late": (
        loop, "keys_from", lambda of: lambda row, made, at: of(row, made, max(0, at - 1)),
    ),
    "other noise": (
        loop, "keys_from", lambda of: lambda rows, made, at: of(rows, made, at)[::-1],
    ),
    "swapped guidance rows": (
        KVCache, "copied",
        lambda of: lambda cache, n: jax.tree.map(
            lambda x: x[:, ::-1] if x.ndim == 4 else x, of(cache, n)
        ),
    ),
    "a horizon off by one": (
        KVCache, "copied",
        lambda of: lambda cache, n: of(
            dataclasses.replace(cache, block=jnp.where(cache.block > 1, cache.block + 9, 0)), n
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name):
    owner, function, fault = FAULTS[name]
    jax.clear_caches()
    with unittest.mock.patch.object(owner, function, fault(getattr(owner, function))):
        made = branches("guidance", [(1, 9), (2, None)])
    jax.clear_caches()
    wanted = [reference("guidance", [(1, 9), (2, None)], seed) for seed in SEEDS]
    assert (made != np.stack(wanted)).any()


@pytest.mark.parametrize("after", [0, 1, 2])
def test_branches_of_a_text_that_had_ended_are_the_text(after):
    """Whatever the batch passes after its end."""
    plain, end = Denoiser.text_logits, SETTINGS.end_of_text_id

    def ends_at_once(self, hidden):
        return plain(self, hidden).at[..., end].add(100.0)

    with unittest.mock.patch.object(Denoiser, "text_logits", ends_at_once):
        jax.clear_caches()
        model, request, plan, settings, stage = setup("text")
        asked = [tiny.asked_with(request, turns=(Turn(stage, 4 * after, s),)) for s in SEEDS]
        how = {"stage": stage, "shared": 4 * after}
        made = traces.finished(model, asked, copied(plan, len(SEEDS)), settings, **how)
    jax.clear_caches()
    assert (made == end).all()


def test_the_seeds_of_a_stage():
    one = RowRequest(seed=1, turns=(Turn("layout", 4, 2), Turn("layout", 6, 3)))
    assert one.seeds("layout") == [(0, 1), (4, 2), (6, 3)]
    assert one.seeds("image") == [(0, 3)]
    assert one.seeds("text") == [(0, 1)]
    two = dataclasses.replace(one, turns=(*one.turns, Turn("image", 0, 4), Turn("image", 5, 6)))
    assert two.seeds("image") == [(0, 4), (5, 6)]


def test_tokens_before_a_turn_are_counted_once():
    _, request, plan, settings, _ = setup("guidance")
    steps = costs.costs(plan, settings, PromptTokens((4, 7)))
    assert [costs.before(plan, settings, step) for step in range(3)] == [1, 2, 3]
    parts = [*plans.cut(plan, [FIRST_BLOCK + 2])]
    passes = sum(part.num_steps for _, part in parts)
    assert len(parts) > len(plan) and passes == len(steps) - 1
    assert len(request.given) == sum(step.decode for step in steps) // 2
