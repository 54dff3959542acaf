# SPDX-License-Identifier: Apache-2.0
"""Adds and subtracts what is counted in a scene, step by step."""

import itertools

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.rules import count
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks import answer

MOST_COUNTED = 9  # no sum is larger


def make(dice: Dice) -> Sample | None:
    scene = dice.scene(low=2)
    kinds = [dice.pick(answer.kinds(thing)) for _, thing in dice.several(list(scene.objects()), 2)]
    kinds += [answer.kind(dice)] if dice.chance(33) else []
    if len({*kinds}) < len(kinds):
        return None
    signs = [dice.pick(("plus", "minus")) for _ in kinds[1:]]
    totals = list(
        itertools.accumulate(
            zip(signs, (count(scene, kind) for kind in kinds[1:]), strict=True),
            lambda total, term: total + term[1] * (1 if term[0] == "plus" else -1),
            initial=count(scene, kinds[0]),
        )
    )
    if min(totals) < 0 or max(totals) > MOST_COUNTED:
        return None
    asked = [f"how many {kind.plural}" for kind in kinds]
    prompt = asked[0] + "".join(f" {s} {a}" for s, a in zip(signs, asked[1:], strict=True)) + "?"
    steps = [
        f" {sign} {count(scene, kind)} is {total}"
        for sign, kind, total in zip(signs, kinds[1:], totals[1:], strict=True)
    ]
    return Sample(prompt, scene, f" {totals[0]}" + ",".join(steps))


def judge(sample: Sample, output: str) -> str:
    right = (sample.answer or "").strip()
    if output == right:
        return ""
    if output.split(" ")[-1] == right.split(" ")[-1]:
        return f"the number is right, the steps are '{right}', not '{output}'"
    return judges.exact(sample, output)


TASK = Task(make, judge, "answer", command="reason")
