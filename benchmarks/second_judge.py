# SPDX-License-Identifier: Apache-2.0
r"""A second judge of drawings: a small network that never saw the sheet names what is in a box.

    python -m benchmarks.second_judge --train    # writes benchmarks/second_judge.safetensors
    python -m benchmarks.second_judge --check    # how often it is right, and agrees with the first
    python -m benchmarks.second_judge --check --disagreements=disagreements.png

The first judge (`sparse_lavida_jax/art/judge.py`) compares pixels with the drawings of the sheet.
This one (`look_network`) learned looks from true scenes, on their backgrounds and on others,
turned, shifted, scaled and blurred a little. Where both agree, a name is no artefact of comparing
pixels.
"""

import dataclasses
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
    """Trains the network, measures it, or both."""
    if not (TRAIN.value or CHECK.value):
        raise app.UsageError("Nothing is asked for: give --train, --check, or both.")
    if TRAIN.value:
        look_network.train(look_network.ROUNDS, look_network.POOL)
        print(f"{look_network.WEIGHTS}: {look_network.WEIGHTS.stat().st_size} bytes")
    if CHECK.value:
        look_network.load.cache_clear()
        bench = measurements.Bench("second_judge")
        for name, row in rows():
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
    for name, pixels in (("true", images), ("tokenizer", copies)):
        found = compared(pixels, boxes)
        yield f"agreement/{name}", agreement(found, scenes)
        if SHEET.value:
            path = pathlib.Path(SHEET.value)
            _write_sheet(path.with_stem(f"{path.stem}-{name}"), pixels, found)


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
        "groups": groups | {"sure": len(sure) / len(right), "of the sure": float(np.mean(sure))},
        "intervals_95": intervals,
    }


def unsure_of_faults(scenes: Sequence[ArtScene], fault: str) -> dict[str, Any]:
    """Returns how often it is unsure of things with a fault, or names nothing."""
    unsure, others = list[bool](), list[bool]()
    for scene in scenes:
        for thing in scene.things:
            if (pixels := faulty(scene, thing, fault)) is not None:
                found = judge(pixels, [thing.box])
                unsure.append(found.looks[0] == NOTHING or found.margins[0] < UNSURE)
                others.append(found.looks[0] != look_of(thing))
    return counted(unsure) | {"groups": {"not named as the thing was": float(np.mean(others))}}


def drawn_scenes(things: int) -> list[ArtScene]:
    """Returns random scenes of the world, with so many things together, or a few more."""
    scenes = list[ArtScene]()
    while sum(map(len, scenes)) < things:
        scenes.append(ArtDice(SEED, "second judge/drawn", len(scenes)).scene())
    return scenes


def compared(
    images: UInt8[np.ndarray, "n h w 3"], boxes: Sequence[Sequence[Box]] | None = None
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


def agreement(found: Sequence[Compared], scenes: Sequence[ArtScene]) -> dict[str, Any]:
    """Returns how often both judges name the same look, and how often each names the true one."""
    true = {(i, thing.box): look_of(thing) for i, one in enumerate(scenes) for thing in one.things}
    first, second = (
        [look == true[one.image, one.box] for one, look in zip(found, looks, strict=True)]
        for looks in ([one.first for one in found], [one.second for one in found])
    )
    sure = [one.first == one.second for one in found if one.margin >= UNSURE]
    groups = {"first": first, "second": second, "of the sure": sure}
    differing = [
        {"first": " ".join(one.first), "second": " ".join(one.second), "margin": one.margin}
        | {"true": " ".join(true[one.image, one.box])}
        for one in found
        if one.first != one.second
    ]
    return counted([one.first == one.second for one in found]) | {
        "groups": {name: float(np.mean(right)) for name, right in groups.items()},
        "disagreements": differing,
    }


def _write_sheet(
    path: pathlib.Path, images: UInt8[np.ndarray, "n h w 3"], found: Sequence[Compared]
) -> None:
    """Draws disagreements, a row for each: the drawing, and what the first and the second name."""
    side = max(SIZES.values())
    tiles = []
    for one in [one for one in found if one.first != one.second][:SHOWN]:
        left, top, right, bottom = (STEP * at for at in one.box)
        size = next(name for name, wide in SIZES.items() if wide == right - left)
        parts = [images[one.image, top:bottom, left:right]]
        for name, style, facing in (one.first, one.second):
            thing = () if name == NOTHING[0] else (Placed(0, 0, name, style, size, facing),)
            parts.append(render(ArtScene(one.background, thing), side=right - left))
        wide = (side - (right - left)) // 2
        border = ((wide, wide), (wide, wide), (0, 0))
        tiles.append(np.concatenate([np.pad(part, border) for part in parts], axis=1))
    if tiles:
        image_files.write(path, image_files.enlarged(np.concatenate(tiles), ZOOM))


if __name__ == "__main__":
    command.run(main)
