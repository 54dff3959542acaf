# SPDX-License-Identifier: Apache-2.0
"""Your own images: tokenizers for a plain folder of them, and a model of a suitable size.

`prepare` converts a plain folder (`mixture/folders.py`) to a prepared one, and puts both tokenizers
into it, `vq/` and `tokenizer.json`: given ones, those already there, or newly trained ones. The
image tokenizer comes first, since records contain its codes, and the text tokenizer last, since it
is trained on their texts. `from_scratch` and `continued` return the settings for training a model
on such a folder, so that nobody has to write a config. All numbers here are ours.
"""

import dataclasses
import itertools
import pathlib
import statistics
import tempfile
from collections.abc import Callable

import jax
import numpy as np
import rich.console
from jaxtyping import UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.convert import settings as released
from sparse_lavida_jax.data import files, image_files
from sparse_lavida_jax.lavida_o import chat
from sparse_lavida_jax.lavida_o.chat import ChatTokenizer
from sparse_lavida_jax.mixture import folders, ingest, prepare, recipe, record_batches, words
from sparse_lavida_jax.mixture.recipe import PrepareError, Recipe
from sparse_lavida_jax.models import image_codec, vq, vq_files
from sparse_lavida_jax.training import lengths, start, train_vq

PEEKED = 64  # images whose sizes determine that of the image tokenizer
MOST_BYTES = 2**28  # of pixels used to train an image tokenizer
SURVEYED = 512  # images used to place its codebook
SHOWN = 12  # images on the sheet of originals and reconstructions
# Side of images in pixels, and how many pixels per side a code represents.
FACTORS = {32: 4, 64: 8, 128: 8, 256: 16}
ON_CPU = 64  # the largest side in pixels
HELD_OUT = 0.05  # share of the records: if there are many, the report includes the loss on these
CHANNELS = (16, 32, 48, 64, 96)  # of the image tokenizer, one entry per resolution

# CPU time of training an image tokenizer: of compilation, and of a 64x64 image in a step,
# in seconds. Few images take as long: of 40 emoji, reconstructions were 0.022 off, but 0.041
# after 240 steps and 0.036 with batches of 4.
COMPILING, PER_IMAGE = 40.0, 0.06

CPU_SECONDS = 1500.0
ADAPTED_WIDTH = 1024  # models at least this wide are trained with adapters
PLANNED = config.Diffusion(blocks="plan", text_masked_blocks=8)
# What the tokenizers determine of a model.
OF_TOKENIZERS = ("vocab_size", "end_of_text_id", "text_mask_id", "codebook_size", "grid_size")
# Models from scratch, apart from what the tokenizers determine: for a few CPU cores, and for one
# accelerator.
SMALL = config.Model(
    width=128, mlp_hidden=320, num_layers=4, dual_tower_layers=2, num_heads=4, head_dim=32,
    rope_theta=10_000.0, generation_width=96, generation_mlp_hidden=256, cell_positions=True,
    num_registers=8, unroll_layers=True,
    vision=config.Vision(
        image_size=64, patch_size=16, width=96, num_layers=1, num_heads=3, mlp_hidden=192, pool=1
    ),
)  # fmt: skip
LARGE = config.Model(
    width=768, mlp_hidden=2048, num_layers=12, dual_tower_layers=7, num_heads=12, head_dim=64,
    rope_theta=10_000.0, generation_width=512, generation_mlp_hidden=1536, cell_positions=True,
    num_registers=32, compute_dtype="bfloat16",
    vision=config.Vision(
        image_size=192, patch_size=16, width=384, num_layers=6, num_heads=6, mlp_hidden=1024
    ),
)  # fmt: skip

Say = Callable[[str], None]


# ---------------------------------------------------------------------------------------------
# Preparing.


def preparing(folder: pathlib.Path, prepared: pathlib.Path) -> config.Config:
    """Returns the settings for preparing a plain folder: an image tokenizer that fits its images.

    Raises:
        PrepareError: see `prepare.check_folder` and `folders.read`.
    """
    prepare.check_folder(prepared)
    with tempfile.TemporaryDirectory() as place:
        mixture = folders.read(folder, prepared, pathlib.Path(place) / "captions.jsonl").recipe
        peeked = itertools.islice(prepare.drafts(mixture, ingest.Settings(8, 8, 1, 0)), PEEKED)
        sides = [min(one.record.size) for one in peeked if one.targets]
    most = ON_CPU if jax.default_backend() == "cpu" else max(FACTORS)
    fitting = [side for side in FACTORS if side <= min(most, statistics.median(sides or [most]))]
    side = max(fitting, default=min(FACTORS))
    resolutions = FACTORS[side].bit_length()
    return config.Config(
        name=files.title(prepared),
        data=config.Data(image_codec=""),  # none is named
        vq=config.VQ(image_size=side, channels=CHANNELS[:resolutions], codebook_size=512),
        prepare=config.Prepare(max_bad_fraction=0.1, encode_batch=16),
        optimizer=config.Optimizer(
            learning_rate=1e-2, final_fraction=0.02, warmup_steps=30, b1=0.9, b2=0.99
        ),
        train=config.Train(stage="vq", train_steps=600, batch_size=8),
    )


def mixture_of(
    source: pathlib.Path, prepared: pathlib.Path, written: pathlib.Path | None = None
) -> folders.PlainFolder:
    """Returns the contents of a plain folder, or of a mixture file, which names all that it uses.

    Raises:
        RecipeError, PrepareError: see `recipe.read` and `folders.read`.
    """
    if not source.exists():
        raise recipe.RecipeError(f"there is no folder of images and no mixture file {source}.")
    if not source.is_dir():
        return folders.PlainFolder(recipe.read(source), prepare.NOTHING)
    return folders.read(source, prepared, written)


def place_image_tokenizer(
    mixture: Recipe, prepared: pathlib.Path, settings: config.Config, named: str, say: Say
) -> None:
    """Puts an image tokenizer, `vq/`, and a sheet of images reconstructed by it into a folder.

    Data without an image to draw have no sheet, and need a named tokenizer.

    Args:
        settings: for a new one, and for training it.
        named: see `vq_files.find`; "": the one that is there, or a new one.
        say: is told what was decided.

    Raises:
        PrepareError: no image can be read to train it on, or too many are bad.
        VQError: the named one does not exist.
        ConfigError: it cannot be trained with these settings.
        OSError: the folder cannot be written to.
    """
    place = prepared / "vq"
    if not named and place.is_dir():
        say(f"{place}: the image tokenizer that is there is kept; delete it to train another")
        return
    source = image_codec.ImageTokenizer(named).folder if named else place
    sized = vq_files.read_settings(source) if named else settings.vq
    most = SHOWN if named else MOST_BYTES // (3 * sized.image_size**2)
    to = ingest.Settings(sized.image_size, sized.factor, 1, settings.seed)
    pixels = _squares(mixture, to, most, settings.prepare.max_bad_fraction)
    if not named:
        if pixels is None:
            raise PrepareError(
                "no image to draw can be read, so no image tokenizer can be trained: add images"
                " with captions, or name one with --image-tokenizer."
            )
        say(
            f"an image tokenizer of {sized.image_size}x{sized.image_size} pixels,"
            f" {(sized.image_size // sized.factor) ** 2} codes an image, is trained on"
            f" {len(pixels)} images, {_length(settings)}"
        )
        try:
            vq_files.save(place, _trained(settings, pixels))
        except KeyboardInterrupt:
            say("the unfinished image tokenizer is discarded; the same command starts over")
            raise
    elif source.resolve() != place.resolve():
        with files.replacing(place) as new:
            vq_files.copy(source, new)
    if pixels is None:
        return
    model, _ = vq_files.load(place)
    shown = pixels[np.linspace(0, len(pixels) - 1, min(SHOWN, len(pixels))).astype(int)]
    again = vq.to_pixels(model, vq.encode_images(model, shown))
    pairs = [np.concatenate(pair, axis=1) for pair in zip(shown, again, strict=True)]
    sheet = prepared / prepare.SHEET
    image_files.write(sheet, image_files.sheet(pairs))
    error = np.abs(shown.astype(int) - again).mean() / 255
    say(f"{sheet}: images next to their reconstructions from codes; pixels are {error:.3f} off")


def estimates(settings: config.Config) -> list[str]:
    """Returns sentences on what was decided from some of the images of a folder."""
    side = settings.vq.image_size
    most = MOST_BYTES // (3 * side**2)
    return [
        f"Unless a setting says otherwise, a new image tokenizer has the side that fits the first"
        f" {PEEKED} images, here {side} pixels, and is trained on the first {most} of them."
    ]


def text_tokenizer(named: str) -> str:
    """Returns the contents of a `tokenizer.json`, or of the one in a folder; "" if none is named.

    Raises:
        PrepareError: it does not exist, or does not fit the prompts of LaViDa-O.
    """
    if not named:
        return ""
    path = pathlib.Path(named)
    places = (path / "tokenizer.json", path / "model" / "tokenizer.json", path)
    found = next((place for place in places if place.is_file()), places[0])
    try:
        return files.read_text(ChatTokenizer(found).path)
    except (ValueError, FileNotFoundError) as error:
        raise PrepareError(
            f"--tokenizer={named} cannot be used: {error} Without it one is trained on the texts."
        ) from error


def place_text_tokenizer(prepared: pathlib.Path, given: str, say: Say) -> None:
    """Puts a text tokenizer, `tokenizer.json`, into a folder whose records are already written.

    Args:
        given: the contents of one; "": the one that is there, or one trained on the records.
        say: is told what was decided.

    Raises:
        RecordError: the folder is incomplete.
        OSError: it cannot be written to.
    """
    place = prepared / prepare.TOKENIZER
    if given:
        files.write_text(place, given)
    elif place.is_file():
        say(f"{place}: the text tokenizer that is there is kept; delete it to train another")
    else:
        groups = record_batches.records_of(prepared, record_batches.read_index(prepared)).values()
        words.train(place, (group[i] for group in groups for i in range(len(group))))
        say(f"{place}: {ChatTokenizer(place).vocab_size} tokens, trained on the texts")


def _squares(
    mixture: Recipe, to: ingest.Settings, most: int, max_bad_fraction: float
) -> UInt8[np.ndarray, "n side side 3"] | None:
    """Returns the first images to draw of a mixture, `most` at most; None if it has none.

    Raises:
        PrepareError: too many are bad.
    """
    drafts = prepare.drafts(mixture, to, max_bad_fraction)
    drawn = (square for one in drafts for square in (*one.targets, *one.sources))
    found = [*itertools.islice(drawn, most)]
    return np.stack(found) if found else None


def _length(settings: config.Config) -> str:
    """Returns how many steps an image tokenizer is trained for, and on a CPU how long they take."""
    train, side = settings.train, settings.vq.image_size
    steps = f"in {train.train_steps} steps of {train.batch_size}"
    if jax.default_backend() != "cpu":
        return steps
    per_step = train.batch_size * PER_IMAGE * (side / ON_CPU) ** 2
    return (
        f"{steps}: about {lengths.in_words(COMPILING + train.train_steps * per_step)} of CPU time"
    )


def _trained(settings: config.Config, pixels: UInt8[np.ndarray, "n h w 3"]) -> vq.VQModel:
    def images_of(step: int) -> UInt8[np.ndarray, "b h w 3"]:
        rng = np.random.default_rng((settings.seed, step))
        chosen = pixels[rng.integers(len(pixels), size=settings.train.batch_size)]
        # One plain image, because without any the tokenizer decodes plain background to noise.
        chosen[0] = chosen[0, :1, :1]
        return chosen

    survey = pixels[:: -(-len(pixels) // SURVEYED)]
    return train_vq.fit(settings, survey, images_of, rich.console.Console(stderr=True))


# ---------------------------------------------------------------------------------------------
# Training.


def from_scratch(prepared: pathlib.Path) -> config.Config:
    """Returns the settings of a model trained from scratch on a prepared folder, for this machine.

    Raises:
        ConfigError: the folder has no tokenizers of its own.
        RecordError: it is incomplete.
        VQError: its image tokenizer cannot be read.
    """
    if not prepared.is_dir():
        raise config.ConfigError(
            f"there is no prepared folder {prepared}. `sparse-lavida prepare` makes one."
        )
    try:
        tokenizer = ChatTokenizer(prepared / prepare.TOKENIZER)
    except (ValueError, FileNotFoundError) as error:
        raise config.ConfigError(
            f"{prepared} has no tokenizers for a model from scratch: {error} For a folder of"
            " images, type `sparse-lavida prepare IMAGES prepared`, then `sparse-lavida train"
            " --data=prepared`; or name the model to start from with --init-from."
        ) from error
    images, on_cpu = vq_files.read_settings(prepared / "vq"), jax.default_backend() == "cpu"
    ids = [tokenizer.id_of(token) for token in (chat.END_OF_TEXT, chat.MASK)]
    sized = (tokenizer.vocab_size, *ids, images.codebook_size, images.image_size // images.factor)
    return config.Config(
        name=files.title(prepared),
        prompts="chat",
        model=dataclasses.replace(
            SMALL if on_cpu else LARGE, **dict(zip(OF_TOKENIZERS, sized, strict=True))
        ),
        vq=images,
        data=config.Data(
            source="prepared", folder=str(prepared), image_codec=str(prepared / "vq"),
            micro_condition=False, text_block_len=8, max_answer_len=64, max_sequence_len=2048,
            held_out=HELD_OUT, kinds=_kinds(prepared),
        ),
        diffusion=PLANNED,
        sampling=config.Sampling(
            num_steps=min(12, sized[-1] ** 2), shift=2.0, temperature=0.5, layout=False
        ),
        optimizer=config.Optimizer(
            kind="muon", learning_rate=2e-3 if on_cpu else 1e-3, warmup_steps=50, b1=0.9, b2=0.99,
            weight_decay=0.01, ema=0.998,
        ),
        train=config.Train(
            train_steps=lengths.planned_steps(_count(prepared)) if on_cpu else 100_000,
            seconds=CPU_SECONDS if on_cpu else 0.0,
            batch_size=16 if on_cpu else 64, eval_prompts=24,
        ),
    )  # fmt: skip


def continued(prepared: pathlib.Path, init_from: str) -> config.Config:
    """Returns the settings for training another model further: with adapters, if it is large.

    Raises:
        CheckpointError: there is no such model.
        RecordError: the folder is incomplete.
        ConfigError, VQError: see `from_scratch`, for a model of the small world, whose tokenizers
            are of no use here.
    """
    base = model_folder.read_config(model_folder.find_model(init_from))
    if base.prompts != "chat":
        own = from_scratch(prepared)
        sized = {name: getattr(own.model, name) for name in OF_TOKENIZERS}
        return dataclasses.replace(
            own,
            model=dataclasses.replace(base.model, **sized),
            train=dataclasses.replace(own.train, init_from=init_from),
        )
    large = base.model.width >= ADAPTED_WIDTH
    # Records of a plain folder have no layouts, so none is used; a small image has few cells.
    steps = min(base.sampling.num_steps, base.model.num_cells)
    kinds = base.data.kinds  # none: a LaViDa-O, which knows all kinds
    return dataclasses.replace(
        base,
        name=files.title(prepared),
        data=dataclasses.replace(
            base.data,
            source="prepared",
            folder=str(prepared),
            held_out=HELD_OUT,
            kinds=kinds and tuple(sorted({*kinds, *_kinds(prepared)})),
        ),
        diffusion=PLANNED,
        lora=config.Lora(rank=16 if large else 0),
        optimizer=config.Optimizer(
            learning_rate=1e-4, frozen_dtype="bfloat16" if large else "float32"
        ),
        sampling=config.changed(
            base.sampling, dict(num_steps=steps, layout=False, **released.SPARSE)
        ),
        train=config.Train(init_from=init_from, batch_size=1 if large else 8, eval_prompts=24),
    )


def _kinds(prepared: pathlib.Path) -> tuple[str, ...]:
    return tuple(sorted({one["kind"] for one in record_batches.read_index(prepared)["datasets"]}))


def _count(prepared: pathlib.Path) -> int:
    """Returns the number of records in a prepared folder."""
    found = record_batches.read_index(prepared)["datasets"]
    return sum(shard["records"] for one in found for shard in one["shards"])


def size_in_words(settings: config.Config) -> str:
    """Returns a sentence on which size was chosen for a run, and why."""
    model, train = settings.model, settings.train
    length = f"{train.train_steps} steps"
    if train.seconds:
        length += f" or {lengths.in_words(train.seconds)}, whichever ends first"
    if train.init_from:
        how = f"adapters of rank {settings.lora.rank}" if settings.lora.rank else "whole"
        new = ", with new words and image codes" if start.has_own_tokenizers(settings) else ""
        return f"{train.init_from} is trained on {settings.data.folder}, {how}{new}, for {length}"
    device = jax.devices()[0].device_kind
    return (
        f"a model of {model.num_layers} layers of width {model.width} is trained from scratch on"
        f" {settings.data.folder} for {length}: the size for this machine ({device});"
        " --config.model.num_layers and other settings change it"
    )
