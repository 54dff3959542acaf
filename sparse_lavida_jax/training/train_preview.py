# SPDX-License-Identifier: Apache-2.0
"""Trains a small decoder for previews (`models.preview_decoder`) on the outputs of the exact one.

The images of a world, or of any folder, are encoded and decoded once by the teacher; its codes are
the inputs and its images the targets.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
import rich.console
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8
from PIL import Image

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.art.cells import CellModel, Painter
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.data.image_files import READ_SUFFIXES
from sparse_lavida_jax.models import preview_decoder, vq, vq_files
from sparse_lavida_jax.programs import jax_settings
from sparse_lavida_jax.training import train_vq
from sparse_lavida_jax.training.short_stages import check_length, descend

MOST_IMAGES = 2048  # to learn from; ours
MOST_BYTES = 2**28  # of their pixels
HELD_OUT = 8  # of so many images of a folder, one is not learned from
REPORT_IMAGES = 64  # new images of a world for the printed numbers
SMALLER = 1.5  # an image gives a square for each time that its side is larger by this factor

Images = UInt8[np.ndarray, "n h w 3"]
NewImages = UInt8[np.ndarray, "m h w 3"]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Codes, and the images that the exact decoder makes of them."""

    codes: Int[np.ndarray, "n y x"]
    images: Images

    @classmethod
    def of(cls, teacher: vq.AnyVQ, images: Images) -> "Pairs":
        """Encodes and decodes images with a teacher."""
        codes = vq.encode_images(teacher, images, batch=8)
        return cls(codes, vq.to_pixels(teacher, codes, batch=8))


def train(
    settings: config.Config,
    workdir: pathlib.Path,
    is_asked_to_stop: Callable[[int], bool] = lambda step: False,
) -> None:
    """Trains a decoder for the teacher `data.image_codec`; writes `workdir/vq`, `previews.png`.

    `workdir/vq` is a copy of the teacher's folder with `preview.safetensors` added.

    Args:
        is_asked_to_stop: called after each step, with its number.

    Raises:
        ConfigError: no such teacher, one that needs no previews, no images, a length in seconds,
            or nothing but warm-up.
        KeyboardInterrupt: it was asked to stop; nothing is saved.
    """
    check_length(settings)
    name, console = settings.data.image_codec, rich.console.Console()
    folder = vq_files.find(name)
    teacher, sizes = vq_files.load(folder)
    width = preview_decoder.width_for(sizes)
    share = preview_decoder.share_of_operations(sizes, width)
    console.print(f"{width} channels: {share:.1%} of the operations of {name}'s decoder")
    known, new = (Pairs.of(teacher, images) for images in _images(settings, sizes))
    model = fit(settings, teacher, width, known, console, is_asked_to_stop)
    decoded = vq.to_pixels(model, new.codes, batch=8)
    console.print(f"{decibels(new.images, decoded):.2f} dB against it on {len(decoded)} new images")
    vq_files.copy(folder, workdir / "vq")
    preview_decoder.save(workdir / "vq", model)
    pairs = [image_files.sheet(pair) for pair in zip(new.images, decoded, strict=True)]
    image_files.write(workdir / "previews.png", image_files.sheet(pairs[:12]))
    console.print(f"wrote {workdir / 'vq'}, and exact images next to previews: previews.png")


def decibels(exact: Images, decoded: Images) -> float:
    """Returns the peak signal-to-noise ratio of decoded images, in dB; infinite if they agree."""
    error = float(np.square((exact.astype(np.float64) - decoded) / 255).mean())
    return float("inf") if error == 0 else -10 * float(np.log10(error))


@runtime.interrupts_held()
@jax_settings.defaults()
def fit(
    settings: config.Config,
    teacher: vq.AnyVQ,
    width: int,
    pairs: Pairs,
    console: rich.console.Console,
    is_asked_to_stop: Callable[[int], bool] = lambda step: False,
) -> preview_decoder.AnyPreview:
    """Returns a decoder of `width` channels trained on pairs of a teacher; see `train`."""
    model = preview_decoder.new(teacher, width, settings.seed)
    if isinstance(teacher, vq.VQModel):
        assert isinstance(model, preview_decoder.PreviewDecoder)
        model.blocks = nnx.Param(jnp.asarray(mean_blocks(teacher, pairs)))

    def batch_of(step: int):
        rng = np.random.default_rng((settings.seed, step))
        chosen = rng.integers(len(pairs.codes), size=settings.train.batch_size)
        return pairs.codes[chosen], pairs.images[chosen]

    def loss(trained: Painter | preview_decoder.PreviewDecoder, codes: Array, images: Array):
        if isinstance(trained, Painter):
            assert isinstance(teacher, CellModel)
            painted = teacher.paint(codes, trained)
        else:
            painted = trained.paint(codes)
        error = jnp.mean((painted - vq.to_float(images)) ** 2)
        return error, {"squared_error": error}

    how = loss, batch_of, "decoder for previews", console, is_asked_to_stop
    if isinstance(model, CellModel):
        model.painter = descend(settings, model.painter, *how)
        return model
    return descend(settings, model, *how)


def mean_blocks(teacher: vq.VQModel, pairs: Pairs) -> Float[np.ndarray, "c d"]:
    """Returns the mean pixels of each code; of one that no image has, those of the nearest one."""
    blocks = train_vq.patches(pairs.images, teacher.settings.factor)
    blocks, codes = blocks.reshape(-1, blocks.shape[-1]), pairs.codes.ravel()
    counts = np.bincount(codes, minlength=teacher.settings.codebook_size)
    sums = np.zeros((len(counts), blocks.shape[1]), np.float32)
    np.add.at(sums, codes, blocks / np.float32(255))
    codebook, seen = np.asarray(teacher.codebook[...], np.float32), np.flatnonzero(counts)
    nearest = seen[train_vq.nearest(codebook, codebook[seen])]
    nearest[seen] = seen
    return (sums / np.maximum(counts, 1)[:, None])[nearest]


# ---------------------------------------------------------------------------------------------
# Images.


def _images(settings: config.Config, sizes: config.VQ) -> tuple[Images, NewImages]:
    """Returns images to learn from, and new ones."""
    source, seed = settings.data.source, settings.seed
    if source == "prepared":
        return _squares(pathlib.Path(settings.data.folder), settings, sizes)
    images_of, *_ = train_vq.SOURCES[source](settings.data)
    reported = images_of((seed, train_vq.REPORT), REPORT_IMAGES)
    if reported.shape[1] % sizes.factor:
        raise config.ConfigError(
            f"Data.image_codec={settings.data.image_codec!r} has {sizes.factor} pixels a code,"
            f" which do not divide the {reported.shape[1]} of an image of {source}. Give a folder"
            " of images: Data.source='prepared' and Data.folder."
        )
    return images_of((seed, train_vq.TRAINING), _most(reported.shape[1])), reported


def _most(side: int) -> int:
    return max(HELD_OUT, min(MOST_IMAGES, MOST_BYTES // (3 * side**2)))


def _squares(
    folder: pathlib.Path, settings: config.Config, sizes: config.VQ
) -> tuple[Images, NewImages]:
    """Returns random squares of the images in a folder; those of every eighth image are new."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in READ_SUFFIXES)
    np.random.default_rng(settings.seed).shuffle(paths)  # pyright: ignore[reportArgumentType]
    parts: tuple[list, list] = [], []
    for i, path in enumerate(paths):
        try:
            pixels = image_files.read(path)
        except (OSError, ValueError):  # it is skipped, as by `prepare`
            continue
        rng = np.random.default_rng((settings.seed, i))
        parts[i % HELD_OUT == HELD_OUT - 1].extend(_crops(pixels, sizes, rng))
        if len(parts[0]) >= _most(sizes.image_size):
            break
    if not all(parts):
        raise config.ConfigError(
            f"Data.folder={str(folder)!r} has too few images ({', '.join(READ_SUFFIXES)}) of at"
            f" least {sizes.factor}x{sizes.factor} pixels that can be read: give at least"
            f" {2 * HELD_OUT}."
        )
    return np.stack(parts[0]), np.stack(parts[1])


def _crops(
    pixels: image_files.Pixels, sizes: config.VQ, rng: np.random.Generator
) -> Iterator[image_files.Pixels]:
    """Yields squares of an image of `sizes.image_size`, at random places and scales."""
    side, short = sizes.image_size, min(pixels.shape[:2])
    if short < sizes.factor:
        return
    for scale in itertools.takewhile(
        lambda scale: scale == 1 or short / scale >= side, (SMALLER**i for i in range(4))
    ):
        cut = max(int(short / scale), 1)
        top, left = (int(rng.integers(length - cut + 1)) for length in pixels.shape[:2])
        square = Image.fromarray(pixels[top : top + cut, left : left + cut])
        yield np.asarray(square.resize((side, side), Image.Resampling.LANCZOS))
