# SPDX-License-Identifier: Apache-2.0
r"""How near previews of a small decoder come to the exact one's images (`models.preview_decoder`).

    python -m benchmarks.preview_decoder --source=art --image_tokenizer=art
    python -m benchmarks.preview_decoder --source=scenes --image_tokenizer=runs/preview

Held-out scenes are encoded; their codes are decoded by both. The judge of their world says which
share of the things in the scenes each shows.
"""

import numpy as np
from absl import flags
from jaxtyping import UInt8

from benchmarks import command, measurements
from sparse_lavida_jax.art import dice as art
from sparse_lavida_jax.art import judge
from sparse_lavida_jax.art import world as art_world
from sparse_lavida_jax.models import preview_decoder, vq, vq_files
from sparse_lavida_jax.scenes import dice, world
from sparse_lavida_jax.training.train_preview import Images, decibels

SOURCE = flags.DEFINE_enum("source", "art", ["art", "scenes"], "The world of the images.")
TOKENIZER = flags.DEFINE_string("image_tokenizer", "art", "A folder, or a bundled model.")
IMAGES = flags.DEFINE_integer("images", 128, "Held-out scenes.", lower_bound=1)

STREAM = "preview"  # of random scenes


def main(_: list[str]) -> None:
    """Measures the decoder for previews of an image tokenizer, and writes a row."""
    bench, source, folder = measurements.Bench("preview"), SOURCE.value, TOKENIZER.value
    try:
        values = measured(folder, source, IMAGES.value)
    except vq_files.VQError as error:
        raise SystemExit(str(error)) from None
    path = bench.write(source, {"source": source, **values})
    print(path.name, values, flush=True)


def measured(folder: str, source: str, count: int) -> dict[str, float | int | str]:
    """Returns the values of a row, from `count` held-out images.

    Raises:
        VQError: no image tokenizer is there, or it has no decoder for previews.
    """
    teacher, settings = vq_files.load(folder)
    preview = preview_decoder.load(vq_files.find(folder), teacher)
    images = np.stack([_image(source, index) for index in range(count)])
    codes = vq.encode_images(teacher, images, batch=8)
    exact, fast = (vq.to_pixels(model, codes, batch=8) for model in (teacher, preview))
    width = preview_decoder.width_of(preview)
    each = [decibels(*pair) for pair in zip(exact, fast, strict=True)]
    return {
        "images": count,
        "teacher": vq_files.digest(vq_files.find(folder)),
        "width": width,
        "share_of_operations": preview_decoder.share_of_operations(settings, width),
        "db": decibels(exact, fast),
        "worst_db": min(each),
        "named_exact": named(source, images, exact),
        "named_preview": named(source, images, fast),
    }


def named(source: str, images: Images, decoded: Images) -> float:
    """Returns the share of the things in images that the judge names in decoded ones."""
    if source == "art":
        return judge.naming(images, decoded)["named"]
    pairs = zip(images, decoded, strict=True)
    cells = np.array([[world.read(one).cells for one in pair] for pair in pairs])
    shown, read = cells[:, 0], cells[:, 1]
    return float((shown == read)[shown != world.EMPTY].mean())


def _image(source: str, index: int) -> UInt8[np.ndarray, "h w 3"]:
    if source == "art":
        return art_world.render(art.ArtDice(0, STREAM, index, held_out=True).scene())
    scene = dice.Dice(0, STREAM, index, held_out=True).scene()
    return world.render(scene)


if __name__ == "__main__":
    command.run(main)
