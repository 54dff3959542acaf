# SPDX-License-Identifier: Apache-2.0
r"""What an image tokenizer keeps of images, exactly and in previews (`models.preview_decoder`).

    python -m benchmarks.preview_decoder --image_tokenizer=art --images=1000
    python -m benchmarks.preview_decoder --image_tokenizer=art --images=1000 --things=40
    python -m benchmarks.preview_decoder --source=scenes --image_tokenizer=runs/preview
    python -m benchmarks.preview_decoder --figure=docs/art_tokenizer.png

Held-out scenes are encoded; their codes are decoded by both decoders. The judge of their world says
which share of the things in the scenes each shows, and of real art how well. The last command
writes no row: it draws scenes and crowds of real art above what is kept of them.
"""

import pathlib
from typing import Any

import einops
import numpy as np
from absl import flags
from jaxtyping import UInt8

from benchmarks import command, measurements
from sparse_lavida_jax.art import dice as art
from sparse_lavida_jax.art import judge
from sparse_lavida_jax.art import world as art_world
from sparse_lavida_jax.art.sheet import shipped
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.evals.scorers import wilson_interval
from sparse_lavida_jax.models import preview_decoder, vq, vq_files
from sparse_lavida_jax.scenes import dice, world
from sparse_lavida_jax.training.train_preview import Images, decibels

SOURCE = flags.DEFINE_enum("source", "art", ["art", "scenes"], "The world of the images.")
TOKENIZER = flags.DEFINE_string("image_tokenizer", "art", "A folder, or a bundled model.")
IMAGES = flags.DEFINE_integer("images", 128, "Held-out scenes.", lower_bound=1)
THINGS = flags.DEFINE_integer("things", 0, "Things of the sheet of art; 0: all.", lower_bound=0)
FIGURE = flags.DEFINE_string("figure", "", "File for a figure of what is kept of some scenes.")

STREAM = "preview"  # of random scenes
SHOWN = 8  # scenes in a figure, and crowds


def main(_: list[str]) -> None:
    """Measures the decoder for previews of an image tokenizer, and writes a row."""
    source, folder, things = SOURCE.value, TOKENIZER.value, THINGS.value
    bench = measurements.Bench("preview")
    try:
        if FIGURE.value:
            image_files.write(pathlib.Path(FIGURE.value), figure(folder), scale=2)
            return
        values = measured(folder, source, IMAGES.value, things)
    except vq_files.VQError as error:
        raise SystemExit(str(error)) from None
    name = f"{source}/{things}_things" if things else source
    path = bench.write(name, {"source": source, **values})
    print(path.name, values, flush=True)


def measured(folder: str, source: str, count: int, things: int = 0) -> dict[str, Any]:
    """Returns the values of a row, from `count` held-out images.

    Args:
        things: of the sheet of art; 0: all.

    Raises:
        VQError: no image tokenizer is there, or it has no decoder for previews.
    """
    teacher, settings = vq_files.load(folder)
    preview = preview_decoder.load(vq_files.find(folder), teacher)
    scenes = [_scene(source, index, things) for index in range(count)]
    draw = art_world.render if source == "art" else world.render
    images = np.stack([draw(scene) for scene in scenes])
    codes = vq.encode_images(teacher, images, batch=8)
    exact, fast = (vq.to_pixels(model, codes, batch=8) for model in (teacher, preview))
    width = preview_decoder.width_of(preview)
    each = [decibels(*pair) for pair in zip(exact, fast, strict=True)]
    kept, things = read_shares(source, images, exact), sum(map(len, scenes))
    totals = {name: len(images) if name in ("ghosts", "right") else things for name in kept}
    counts = {name: (round(share * totals[name]), totals[name]) for name, share in kept.items()}
    return {
        "images": count,
        "things": things,
        "teacher": vq_files.digest(vq_files.find(folder)),
        "width": width,
        "share_of_operations": preview_decoder.share_of_operations(settings, width),
        "db": decibels(exact, fast),
        "worst_db": min(each),
        "named_exact": kept["named"],
        "named_preview": read_shares(source, images, fast)["named"],
        "kept": kept | {"db": decibels(images, exact)},  # by the exact decoder, of the images
        "kept_intervals_95": {name: wilson_interval(*pair) for name, pair in counts.items()},
    }


def read_shares(source: str, images: Images, decoded: Images) -> dict[str, float]:
    """Returns the share of the things in images that the judge names in decoded ones, and others.

    The others are those of `art.judge.naming`, of real art alone.
    """
    if source == "art":
        return judge.naming(images, decoded)
    pairs = zip(images, decoded, strict=True)
    cells = np.array([[world.read(one).cells for one in pair] for pair in pairs])
    shown, read = cells[:, 0], cells[:, 1]
    return {"named": float((shown == read)[shown != world.EMPTY].mean())}


def figure(folder: str) -> UInt8[np.ndarray, "h w 3"]:
    """Draws scenes of art above what an image tokenizer keeps of them, then crowds.

    Raises:
        VQError: no image tokenizer is there.
    """
    scenes = [art_world.render(_scene("art", index, 0)) for index in range(SHOWN)]
    shown = np.stack([*scenes, *art.crowds((2, 2), SHOWN)])
    model = vq_files.load(folder)[0]
    decoded = vq.to_pixels(model, vq.encode_images(model, shown, batch=8), batch=8)
    rows = [part[i : i + SHOWN] for i in (0, SHOWN) for part in (shown, decoded)]
    return einops.rearrange(np.stack(rows), "r n h w c -> (r h) (n w) c")


def _scene(source: str, index: int, things: int) -> Any:
    if source == "art":
        how = {"held_out": True, "sheet": shipped(things)}
        return art.ArtDice(0, STREAM, index, **how).scene()
    return dice.Dice(0, STREAM, index, held_out=True).scene()


if __name__ == "__main__":
    command.run(main)
