# SPDX-License-Identifier: Apache-2.0
r"""A second judge of drawings: a small network, trained without the sheet, names things in boxes.

    python -m benchmarks.second_judge --train    # writes benchmarks/second_judge.safetensors
    python -m benchmarks.second_judge --check    # how often it is right, and agrees with the first
    python -m benchmarks.second_judge --check --disagreements=disagreements.png
    python -m benchmarks.second_judge --drawings=images  # both judges, on a folder of drawings

The first judge (`sparse_lavida_jax/art/judge.py`) compares pixels with the drawings of the sheet.
This one (`look_network`) learned from crops of true scenes, on several backgrounds, with small
rotations, shifts, changes of scale and blur. A name that both give does not depend on one method.
"""

import dataclasses
import itertools
import pathlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import app, flags
from jaxtyping import UInt8

from benchmarks import command, look_network, measurements
from benchmarks.judged_crops import FAULTS, SEED, Box, examples, faulty
from benchmarks.look_network import NOTHING, UNSURE, Judged, Look, judge, judge_crops, look_of
from sparse_lavida_jax.art import judge as first_judge
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.sheet import SIZES
from sparse_lavida_jax.art.world import STEP, ArtScene, Placed, render
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.evals.scorers import wilson_interval
from sparse_lavida_jax.models import vq, vq_files

__all__ = ["Compared", "Judged", "compared", "judge"]

TRAIN = flags.DEFINE_bool("train", False, "Train the network and write its weights.")
CHECK = flags.DEFINE_bool("check", False, "Measure it, and write rows.")
CROPS = flags.DEFINE_integer("crops", 4000, "Crops that its accuracy is of.", lower_bound=10)
THINGS = flags.DEFINE_integer("things", 500, "Things in the other measurements.", lower_bound=10)
DRAWINGS = flags.DEFINE_string("drawings", "", "Folder of PNG images that both judges look at.")
SHEET = flags.DEFINE_string("disagreements", "", "Image to write: what the judges differ on.")

SHOWN, ZOOM = 20, 3  # disagreements in the image, and how much they are enlarged


@dataclasses.dataclass(frozen=True)
class Compared:
    """What both judges name in a box of an image.

    Attributes:
        image: its number.
        box: in steps.
        first, second: what they name; `NOTHING` where they find no thing.
        margin: of the second one.
        background: as the first one reads it.
    """

    image: int
    box: Box
    first: Look
    second: Look
    margin: float
    background: str


def main(_: list[str]) -> None:
    """Trains the network, measures it, or compares the judges on drawings."""
    if not (TRAIN.value or CHECK.value or DRAWINGS.value):
        raise app.UsageError("nothing is asked for: give --train, --check or --drawings=folder.")
    if TRAIN.value:
        look_network.train(look_network.ROUNDS, look_network.POOL)
        print(f"{look_network.WEIGHTS}: {look_network.WEIGHTS.stat().st_size} bytes")
    bench = measurements.Bench("second_judge")
    found = [rows()] * CHECK.value + [drawings_row()] * bool(DRAWINGS.value)
    for name, row in itertools.chain(*found):
        bench.write(name, row)
        print(name, said(row), flush=True)


def said(row: dict[str, Any]) -> str:
    """Returns the shares of a row in words."""
    low, high = row["interval_95"]
    groups = [f"{name} {share:.4f}" for name, share in row.get("groups", {}).items()]
    return "; ".join([f"{row['share']:.4f} ({low:.4f} to {high:.4f}) of {row['total']}", *groups])


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields names and values of rows."""
    for name, is_changed in (("changed", True), ("plain", False)):
        crops, things = examples(f"test/{name}", CROPS.value, is_changed)
        yield f"accuracy/{name}", accuracy(judge_crops(crops), things)
    scenes = drawn_scenes(THINGS.value)
    for fault in FAULTS:
        yield f"faults/{fault}", unsure_of_faults(scenes, fault)
    images = np.stack([render(scene) for scene in scenes])
    model = vq_files.load("art")[0]
    copies = vq.to_pixels(model, vq.encode_images(model, images, batch=16), batch=16)
    boxes = [[thing.box for thing in scene.things] for scene in scenes]
    for name, pixels in (("true", list(images)), ("tokenizer", list(copies))):
        found = compared(pixels, boxes)
        yield f"agreement/{name}", agreement(found, scenes)
        _write_sheet(name, pixels, found)


def drawings_row() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the agreement on a folder of drawings, where the first judge finds a thing."""
    folder = pathlib.Path(DRAWINGS.value)
    if not (paths := sorted(folder.glob("*.png"))):
        raise app.UsageError(f"{folder} has no PNG images: give --drawings a folder that has some.")
    images = [image_files.read(path) for path in paths]
    found = compared(images)
    yield f"agreement/{folder.name}", agreement(found)
    _write_sheet(folder.name, images, found)


def counted(right: Sequence[bool]) -> dict[str, Any]:
    """Returns a share with its interval."""
    correct, total = sum(map(bool, right)), len(right)
    interval = list(wilson_interval(correct, total))
    share = correct / max(total, 1)
    return {"correct": correct, "total": total, "share": share, "interval_95": interval}


def accuracy(judged: Judged, things: Sequence[Placed | None]) -> dict[str, Any]:
    """Returns how often crops of true scenes are named as they are, and that by size and style."""
    right = [one == look_of(thing) for one, thing in zip(judged.looks, things, strict=True)]
    parts = defaultdict[str, list[bool]](list)
    for is_right, look, thing in zip(right, judged.looks, things, strict=True):
        names = (thing.size, thing.style, f"{thing.size} {thing.style}") if thing else ("nothing",)
        for name in names:
            parts[name].append(is_right)
        parts["name alone"].append(look[0] == look_of(thing)[0])
        parts["name and style"].append(look[:2] == look_of(thing)[:2])
    sure = [one for one, margin in zip(right, judged.margins, strict=True) if margin >= UNSURE]
    groups = {name: float(np.mean(parts[name])) for name in sorted(parts)}
    intervals = {name: counted(parts[name])["interval_95"] for name in sorted(parts)}
    return counted(right) | {
        "groups": groups | {"sure": len(sure) / len(right), "of the sure": counted(sure)["share"]},
        "intervals_95": intervals,
    }


def unsure_of_faults(scenes: Sequence[ArtScene], fault: str) -> dict[str, Any]:
    """Returns how often it is unsure of things with a fault, or names nothing.

    Groups: it does not name the thing as it was; that or unsure; the first judge notices it.
    """
    unsure, otherwise, first = list[bool](), list[bool](), list[bool]()
    for scene in scenes:
        for thing in scene.things:
            if (pixels := faulty(scene, thing, fault)) is not None:
                found = judge(pixels, [thing.box])
                unsure.append(found.looks[0] == NOTHING or bool(found.margins[0] < UNSURE))
                otherwise.append(found.looks[0] != look_of(thing))
                reading = first_judge.read(pixels)
                first.append(bool(reading.fault) or reading.scene != scene)
    either = [one or other for one, other in zip(unsure, otherwise, strict=True)]
    groups = {"named otherwise": otherwise, "either": either, "first judge": first}
    return counted(unsure) | {"groups": {name: float(np.mean(groups[name])) for name in groups}}


def drawn_scenes(things: int) -> list[ArtScene]:
    """Returns random scenes of the world, with so many things together, or a few more."""
    scenes = list[ArtScene]()
    while sum(map(len, scenes)) < things:
        scenes.append(ArtDice(SEED, "second judge/drawn", len(scenes)).scene())
    return scenes


def compared(
    images: Sequence[UInt8[np.ndarray, "h w 3"]], boxes: Sequence[Sequence[Box]] | None = None
) -> list[Compared]:
    """Returns what both judges name in boxes of drawings.

    Args:
        boxes: of each image; by default those in which the first judge finds a thing.
    """
    found = []
    for number, pixels in enumerate(images):
        reading = first_judge.read(pixels)
        by_box = {one.thing.box: look_of(one.thing) for one in reading.found}
        asked = list(by_box if boxes is None else boxes[number])
        seconds = judge(pixels, asked)
        for box, look, margin in zip(asked, seconds.looks, seconds.margins, strict=True):
            first = by_box.get(box, NOTHING)
            found.append(Compared(number, box, first, look, float(margin), reading.background))
    return found


def agreement(
    found: Sequence[Compared], scenes: Sequence[ArtScene] | None = None
) -> dict[str, Any]:
    """Returns how often both judges name the same look.

    Args:
        scenes: what the images should show: how often each judge names that is returned, too.
    """
    same = [one.first == one.second for one in found]
    groups = {"of the sure": [one.first == one.second for one in found if one.margin >= UNSURE]}
    groups["name alone"] = [one.first[0] == one.second[0] for one in found]
    if scenes is not None:
        drawn = ((i, thing) for i, scene in enumerate(scenes) for thing in scene.things)
        true = {(i, thing.box): look_of(thing) for i, thing in drawn}
        groups["first is right"] = [one.first == true[one.image, one.box] for one in found]
        groups["second is right"] = [one.second == true[one.image, one.box] for one in found]
    return counted(same) | {
        "groups": {name: counted(right)["share"] for name, right in groups.items()},
        "disagreements": [dataclasses.asdict(one) for one in found if one.first != one.second],
    }


def _write_sheet(
    name: str, images: Sequence[UInt8[np.ndarray, "h w 3"]], found: Sequence[Compared]
) -> None:
    if SHEET.value and any(one.first != one.second for one in found):
        path = pathlib.Path(SHEET.value)
        image_files.write(path.with_stem(f"{path.stem}-{name}"), sheet_of(images, found))


def sheet_of(
    images: Sequence[UInt8[np.ndarray, "h w 3"]], found: Sequence[Compared]
) -> UInt8[np.ndarray, "y x 3"]:
    """Draws disagreements, a row for each: the drawing, and what the first and the second name.

    Raises:
        ValueError: there are none.
    """
    side = max(SIZES.values())
    tiles = []
    for one in [one for one in found if one.first != one.second][:SHOWN]:
        left, top, right, bottom = (STEP * at for at in one.box)
        size = next(name for name, wide in SIZES.items() if wide == right - left)
        parts = [images[one.image][top:bottom, left:right]]
        for look, style, facing in (one.first, one.second):
            thing = () if look == NOTHING[0] else (Placed(0, 0, look, style, size, facing),)
            parts.append(render(ArtScene(one.background, thing), side=right - left))
        wide = (side - (right - left)) // 2
        border = ((wide, wide), (wide, wide), (0, 0))
        tiles.append(np.concatenate([np.pad(part, border) for part in parts], axis=1))
    if not tiles:
        raise ValueError("the judges agree on everything: there is nothing to draw.")
    return image_files.enlarged(np.concatenate(tiles), ZOOM)


if __name__ == "__main__":
    command.run(main)
