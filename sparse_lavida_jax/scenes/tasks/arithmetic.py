# SPDX-License-Identifier: Apache-2.0
"""Adds and subtracts what is counted in a scene."""

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.rules import count
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks import answer

MOST_COUNTED = 9  # no sum is larger


def make(dice: Dice) -> Sample | None:
    """Adds and subtracts what is counted in a scene, step by step."""
    scene = dice.scene(low=2)
    kinds = [dice.pick(answer.kinds(thing)) for _, thing in dice.several(list(scene.objects()), 2)]
    kinds += [answer.kind(dice)] if dice.chance(33) else []
    if len({*kinds}) < len(kinds):
        return None
    total = count(scene, kinds[0])
    asked, said = f"how many {kinds[0].plural}", f" {total}"
    steps = [(dice.pick(("plus", "minus")), kind) for kind in kinds[1:]]
    for number, (sign, kind) in enumerate(steps):
        term = count(scene, kind)
        total += term if sign == "plus" else -term
        if not 0 <= total <= MOST_COUNTED:
            return None
        asked += f" {sign} how many {kind.plural}"
        said += f"{',' if number else ''} {sign} {term} is {total}"
    return Sample(f"{asked}?", scene, said)


def judge(sample: Sample, output: str) -> str:
    right = (sample.answer or "").strip()
    if output != right and output.split(" ")[-1] == right.split(" ")[-1]:
        return f"the number is right, the steps are '{right}', not '{output}'"
    return judges.exact(sample, output)


TASK = Task(make, judge, "answer", command="reason")
