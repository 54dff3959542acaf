# SPDX-License-Identifier: Apache-2.0
"""What the bundled model draws for prompts of strangers, and for the forms that README promises."""

import collections

import numpy as np
import pytest
import strangers_words

from sparse_lavida_jax import SparseLaViDa
from sparse_lavida_jax.scenes import rules, sentences, world
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import RELATIONS, Phrase, SceneRequest

MOST_SILENT, MOST_TOO_CAREFUL = (
    0.02,
    0.05,
)  # shares of the prompts: wrong unwarned, right but warned
LEAST_NAMED = 0.95  # of the warnings
LEAST_RIGHT = 0.95  # of a promised form
DRAWN = 200  # of each form
SEEDS = (0, 1000)


@pytest.fixture(scope="module")
def pipe():
    return SparseLaViDa.from_pretrained("scenes")


def things_in(pixels) -> list[tuple[int, int, str, str, str]]:
    scene = world.read(np.asarray(pixels))
    if isinstance(scene, world.Unreadable):
        return []
    return [
        (*divmod(cell, world.GRID), thing.size, thing.colour, thing.shape)
        for cell, thing in scene.objects()
    ]


def drawn(pipe, prompts, seed):
    """Yields a prompt's pixels and its warning."""
    for start in range(0, len(prompts), 25):
        requests = pipe.requests("generate", prompts[start : start + 25], seed=seed + start)
        for request, pixels in zip(requests, pipe.run(requests).pixels, strict=True):
            yield pixels, request.warning


@pytest.mark.slow
def test_strangers_get_what_they_write_or_a_true_warning(pipe, record_property):
    meant = strangers_words.prompts()
    told = collections.Counter()
    for seed in SEEDS:
        images = drawn(pipe, [one.prompt for one in meant], seed)
        for one, (pixels, warning) in zip(meant, images, strict=True):
            right, said = one.is_shown(things_in(pixels)), warning.partition(". Instead")[0]
            told["right" if right else "wrong", "warned" if warning else "silent"] += 1
            told["named"] += bool(warning) and bool(one.named) and one.named in said
    number, warned = len(meant) * len(SEEDS), told["right", "warned"] + told["wrong", "warned"]
    record_property("told", {str(key): value for key, value in told.items()})
    print(dict(told), number)
    assert told["wrong", "silent"] <= MOST_SILENT * number
    assert told["right", "warned"] <= MOST_TOO_CAREFUL * number
    assert told["named"] >= LEAST_NAMED * warned


def a_request(form: str, dice: Dice) -> SceneRequest:
    """Returns a sentence of a form, of any shapes, colours and sizes."""
    one, other = (
        Phrase(*pair, dice.pick((None, *world.SIZES)))
        for pair in dice.several([(s, c) for s in world.SHAPES for c in world.COLOURS], 2)
    )
    if form == "one to four of a kind":
        return SceneRequest(((dice.between(1, 4), one),))
    related = form.endswith("another")
    return SceneRequest(((1, one), (1, other)), dice.pick(RELATIONS) if related else None)


@pytest.mark.slow
@pytest.mark.parametrize("form", sentences.FORMS)
def test_a_promised_form_is_drawn_right(pipe, form, record_property):
    dice = Dice(1, form, 0)
    asked = [a_request(form, dice) for _ in range(DRAWN)]
    right = 0
    images = drawn(pipe, [str(one) for one in asked], 7)
    for request, (pixels, warning) in zip(asked, images, strict=True):
        assert not warning
        scene = world.read(np.asarray(pixels))
        found = not isinstance(scene, world.Unreadable)
        right += found and rules.verdict(request, scene) == rules.CORRECT
    record_property("right", right)
    print(form, right)
    assert right >= LEAST_RIGHT * DRAWN
