# SPDX-License-Identifier: Apache-2.0
"""How much of an image of real art can agree under a plan, however good the model is.

    python -m benchmarks.plan_bounds

Cells of one step are drawn independently. Where a prompt leaves open what a thing looks like, all
looks are equally likely until a cell of the thing is decoded: the n cells in which a step first
shows it agree with probability 1 / looks^(n - 1). A look is a style and, of a thing with a front, a
facing; styles of things are taken as independent. The same holds for the background, with a look
for each. Codes of a cell agree if they are drawn one after another (`Model.sequential_codes`), and
are as independent as cells otherwise. A plan can make this share of the things coherent, and of the
images right, on average over scenes and orders. Layouts are given; the order "layout" reads them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import einops
import numpy as np
from jaxtyping import Bool, Int

from benchmarks import command, measurements, table
from sparse_lavida_jax import orders
from sparse_lavida_jax.art.cells import BLOCK
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import ArtLayout
from sparse_lavida_jax.art.sheet import STYLES, Sheet, shipped
from sparse_lavida_jax.art.world import (
    BACKGROUNDS,
    CELL,
    CELL_STEPS,
    IMAGE_SIZE,
    STEP,
    ArtScene,
    sprite_of,
)
from sparse_lavida_jax.scenes.prompts import first_cells

SUITE = "plan_bounds"
THINGS, SCENES, ORDERS = 40, 200, 3  # of the sheet; that are averaged over
SIDE = IMAGE_SIZE // CELL
SHOWS = 0.08  # opacity from which a cell shows a thing
EMPTY = 0.04  # opacity below which a block is coded as background; other codes leave it open
# Steps, shift of the schedule, and the least number of cells of a step.
FIXED = [
    (12, 2.0, 16), (12, 2.0, 0), (12, 4.0, 0), (12, 8.0, 0), (12, 16.0, 0),
    (16, 8.0, 0), (16, 12.0, 0), (16, 16.0, 0), (20, 12.0, 0), (20, 24.0, 0),
    (24, 12.0, 0), (32, 12.0, 0),
]  # fmt: skip
FEW = [(2, 2.0, 0), (3, 2.0, 0), (5, 2.0, 0), (5, 12.0, 0), (10, 12.0, 0)]
PLANS = {"stratified": FIXED + FEW, "random": FIXED, "layout": FEW}  # by their order
APART = {"stratified": [(20, 12.0, 0)], "layout": [(5, 12.0, 0)]}  # with independent codes


class Shown(NamedTuple):
    """What the cells of a scene show: of each, all codes together or each of the four.

    Attributes:
        owner: the number of the thing; -1: none.
        background: whether some block has the code of a background.
        looks: that each thing may have.
        first: what the order "layout" begins with.
    """

    owner: Int[np.ndarray, "l n"]
    background: Bool[np.ndarray, "l n"]
    looks: list[int]
    first: tuple[int, ...] = ()


def main(_: list[str]) -> None:
    """Writes a row for each plan and order, and prints their table."""
    bench = measurements.Bench(SUITE)
    for row in rows():
        name = f"{row['order']}/k{row['steps']}/s{row['shift']:g}/m{row['merge']}"
        bench.write(name if row["codes"] == "in turn" else f"{name}/independent", row)
    print(table.table(SUITE, measurements.read_rows(SUITE)))


def rows() -> Iterator[dict[str, Any]]:
    """Yields the bounds of each plan in each order."""
    sheet = shipped(THINGS)
    drawn_scenes = [ArtDice(0, SUITE, i, sheet=sheet).scene() for i in range(SCENES)]
    for codes, asked in ("in turn", PLANS), ("independent", APART):
        scenes = [shown(scene, sheet, together=codes == "in turn") for scene in drawn_scenes]
        plans = ((order, *plan) for order, some in asked.items() for plan in some)
        for order, steps, shift, merge in plans:
            drawn = []
            for number, scene in enumerate(scenes):
                first = scene.first if order == "layout" else ()
                sizes = orders.counts_after(len(first), "shift", steps, SIDE**2, shift)
                sizes = orders.merged(sizes, merge)
                for seed in range(ORDERS):
                    cells = orders.order(order, SIDE, SIDE, ORDERS * number + seed)
                    drawn.append(agreement(scene, orders.begun(cells, first), sizes))
            things, background, image = np.mean(drawn, axis=0)
            yield {
                "method": order, "order": order, "steps": steps, "shift": shift, "merge": merge,
                "codes": codes, "taken": len(sizes), "coherent": things,
                "background": background, "image": image,
                "note": "bounds by counting, nothing drawn by a model",
            }  # fmt: skip


def shown(scene: ArtScene, sheet: Sheet, *, together: bool = True) -> Shown:
    """Returns what the cells of a scene show.

    Args:
        together: whether the codes of a cell count as one.
    """
    part = CELL if together else BLOCK
    side = IMAGE_SIZE // part
    owner, background = np.full((side, side), -1), np.ones((side, side), bool)
    for number, thing in enumerate(scene.things):
        opacity, sprite = np.zeros((IMAGE_SIZE, IMAGE_SIZE)), sprite_of(thing, sheet)
        rows, columns = (slice(STEP * at, STEP * at + len(sprite)) for at in (thing.y, thing.x))
        opacity[rows, columns] = sprite[..., 3] / 255
        parts = opacity.reshape(side, part, side, part)
        owner[parts.mean(axis=(1, 3)) > SHOWS] = number
        blocks = opacity.reshape(side, part // BLOCK, BLOCK, side, part // BLOCK, BLOCK)
        background &= blocks.mean(axis=(2, 5)).min(axis=(1, 3)) < EMPTY
    looks = [len(STYLES) * (2 if thing.facing else 1) for thing in scene.things]
    first = first_cells(str(ArtLayout.of(scene)), SIDE, CELL_STEPS)
    by_cell = {"i": side // SIDE, "j": side // SIDE}
    owner, background = (
        einops.rearrange(of, "(y i) (x j) -> (y x) (i j)", **by_cell) for of in (owner, background)
    )
    return Shown(owner, background, looks, first)


def agreement(
    scene: Shown, order: Int[np.ndarray, " l"], sizes: Int[np.ndarray, " k"]
) -> tuple[float, float, float]:
    """Returns the expected share of coherent things, and the chances of background and image."""
    chances, background = [0.0] * len(scene.looks), 0.0
    for cells in np.split(order, np.cumsum(sizes)[:-1]):
        if not background and (count := scene.background[cells].sum()):
            background = float(len(BACKGROUNDS)) ** (1 - count)
        for number, looks in enumerate(scene.looks):
            if not chances[number] and (count := (scene.owner[cells] == number).sum()):
                chances[number] = float(looks) ** (1 - count)
    return float(np.mean(chances)), background, background * float(np.prod(chances))


if __name__ == "__main__":
    command.run(main)
