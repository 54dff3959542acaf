# SPDX-License-Identifier: Apache-2.0
"""The first, short stage: trains the image tokenizer, on images of scenes or on others (`fit`).

Learning encoder, codebook and decoder from scratch at the same time is slow. So in most of the
steps encoder and decoder are trained separately, with a target between them: the principal
components of the pixels for each code. That target ignores the surroundings, so the codes of a cell
depend only on its contents. Then the codebook is placed on the clusters of the targets, and the
remaining steps train the VQ-VAE in its final form.
"""

import functools
import pathlib
from collections.abc import Callable

import einops
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8
from PIL import Image

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.art import codebook, dice, sheet
from sparse_lavida_jax.models import vq, vq_files
from sparse_lavida_jax.programs import jax_settings
from sparse_lavida_jax.scenes import world
from sparse_lavida_jax.training import metrics, train_painter
from sparse_lavida_jax.training.short_stages import check_length, optimizer_of
from sparse_lavida_jax.visibility import AnyArray

# All ours.
WARM_UP = 0.7  # share of the steps before there is a codebook
TARGET_NOISE = 0.05  # deviation of the noise added to the targets from which the decoder learns
SAME = 0.2  # closer targets share a code; targets have unit variance in each channel
TARGET_WEIGHT = 0.3  # of the encoder's error relative to the decoder's
SURVEY_IMAGES = 96  # images for computing the components and the codebook
REPORT_IMAGES = 512  # new images for computing the printed numbers
SURVEY, TRAINING, REPORT = range(3)  # streams of random images


def train(
    settings: config.Config,
    workdir: pathlib.Path,
    is_asked_to_stop: Callable[[int], bool] = lambda step: False,
) -> None:
    """Trains `settings.vq`; writes `workdir/vq` and `workdir/reconstructions.png`.

    Args:
        is_asked_to_stop: called after each step, with its number.

    Raises:
        ConfigError: images of neither scenes nor art, a length in seconds, nothing but warm-up, or
            an `init_from` that cannot be gone on from.
        KeyboardInterrupt: it was asked to stop; nothing is saved.
    """
    if settings.data.source not in SOURCES:
        raise config.ConfigError(
            f"Data.source={settings.data.source!r}: the image tokenizer is trained on images of"
            " scenes or art; `prepare` of a plain folder trains one on other images. Set"
            " Data.source='scenes' or 'art'."
        )
    if settings.train.init_from and settings.vq.kind != "cells":
        raise config.ConfigError(
            f"Train.init_from={settings.train.init_from!r}: only an image tokenizer of"
            " Vq.kind='cells' goes on from another one. Leave it empty."
        )
    console, seed = rich.console.Console(), settings.seed
    images_of, surveyed, reported, report = SOURCES[settings.data.source](settings.data)
    if settings.vq.kind == "cells":
        things = sheet.taught(settings.data).whole
        model = train_painter.fit(settings, things, console, is_asked_to_stop)
    else:
        model = fit(
            settings,
            images_of((seed, SURVEY), surveyed),
            lambda step: images_of((seed, TRAINING, step), settings.train.batch_size),
            console,
            is_asked_to_stop,
        )
    vq_files.save(workdir / "vq", model)
    _report(model, images_of((seed, REPORT), reported), report, workdir, console)


@runtime.interrupts_held()
@jax_settings.defaults()
def fit(
    settings: config.Config,
    survey: UInt8[np.ndarray, "n h w 3"],
    images_of: Callable[[int], UInt8[np.ndarray, "b h w 3"]],
    console: rich.console.Console,
    is_asked_to_stop: Callable[[int], bool] = lambda step: False,
) -> vq.VQModel:
    """Returns an image tokenizer with the settings `settings.vq`.

    Args:
        survey: images for computing the components and the codebook.
        images_of: returns the images of a step, given its number.
        console: where progress is shown.
        is_asked_to_stop: called after each step, with its number.

    Raises:
        ConfigError: a length in seconds, or nothing but warm-up.
        KeyboardInterrupt: it was asked to stop, or Ctrl-C was pressed.
    """
    check_length(settings)
    seed, steps = settings.seed, settings.train.train_steps
    components = _components(survey, settings.vq)
    model = vq.VQModel(settings.vq, rngs=nnx.Rngs(seed))
    # Most of an image is background, which the decoder need not learn.
    model.decoder.conv_out.bias = nnx.Param(jnp.median(vq.to_float(survey), axis=(0, 1, 2)))
    optimizer = optimizer_of(settings)
    opt_state = optimizer.init(model)  # pyright: ignore[reportArgumentType]  it is a pytree
    warm_up = _make_step(functools.partial(_warm_up_loss, components=components), optimizer)
    owner, placed_at = jnp.arange(settings.vq.codebook_size), int(steps * WARM_UP)
    with_codes = _make_step(_coded_loss, optimizer)

    with metrics.ProgressBar("image tokenizer", steps, console=console) as bar:
        for step in range(steps):
            if step == placed_at:
                model.codebook, owner = _place_codebook(
                    components(vq.to_float(survey)), settings.vq
                )
                used = len(np.unique(owner))
                bar.say(f"step {step}: the codebook is placed, {used} codes in use")
            images = images_of(step)
            key = jax.random.fold_in(jax.random.key(seed), step)
            run = warm_up if step < placed_at else with_codes
            model, opt_state, terms = run(model, opt_state, owner, images, key)
            if is_asked_to_stop(step):
                jax.block_until_ready(model)
                raise KeyboardInterrupt
            runtime.check_interrupt()
            if step % settings.train.log_every == 0 or step == steps - 1:
                bar.reach(step + 1, (step + 1) / steps, pixel_error=float(terms["pixels"]))
    return model


def _make_step(loss: Callable, optimizer: optax.GradientTransformation) -> Callable:
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(model, opt_state, owner, images, key):
        gradient_of = jax.value_and_grad(loss, has_aux=True)
        (_, terms), gradient = gradient_of(model, vq.to_float(images), key)
        updates, opt_state = optimizer.update(gradient, opt_state, model)
        model = jax.tree.map(jnp.add, model, updates)
        # An unused code remains a copy of another: of equal codes, the first is the nearest.
        model.codebook = nnx.Param(model.codebook[owner])
        return model, opt_state, terms

    return step


def _warm_up_loss(model, images, key, *, components):
    target = components(images)
    noise = TARGET_NOISE * jax.random.normal(key, target.shape)
    terms = {
        "pixels": jnp.mean(jnp.abs(model.decode_latents(target + noise) - images)),
        "target": jnp.mean((model.latents(images) - target) ** 2),
    }
    return terms["pixels"] + TARGET_WEIGHT * terms["target"], terms


def _coded_loss(model, images, key):
    del key
    return model.loss(images)


def _components(
    survey: UInt8[np.ndarray, "n h w 3"], settings: config.VQ
) -> Callable[[Float[AnyArray, "b h w 3"]], Float[Array, "b y x d"]]:
    """Returns a function for the principal components of each code's pixels, with unit variance.

    For a codebook of means, only the first one has unit variance.
    """
    cut = patches(survey.astype(np.float32) / 255, settings.factor)
    cut = cut.reshape(-1, cut.shape[-1])
    mean = cut.mean(axis=0)
    covariance = (cut - mean).T @ (cut - mean) / len(cut)
    variance, directions = np.linalg.eigh(covariance)
    strongest = np.argsort(-variance)[: settings.latent_channels]
    scale = np.sqrt(np.maximum(variance[strongest], 1e-6))
    if settings.codebook_start == "means":  # distances are those of pixels
        scale = scale[0]
    projection = directions[:, strongest] / scale
    return lambda images: (patches(images, settings.factor) - mean[None, None, None]) @ projection


def patches(images, factor):
    """Returns the pixels of each code, [b y x d], of images [b h w 3]."""
    return einops.rearrange(images, "b (y i) (x j) c -> b y x (i j c)", i=factor, j=factor)


def _place_codebook(
    targets: Float[Array, "b y x d"], settings: config.VQ
) -> tuple[nnx.Param, Int[Array, "c"]]:
    """Puts one code on every cluster of targets, the most common first.

    Returns:
        The codebook, and the owner of each code: itself, or the first code for unused ones.
    """
    points = np.asarray(targets).reshape(-1, targets.shape[-1])
    start = codebook.means if settings.codebook_start == "means" else _farthest
    codes = start(points, settings.codebook_size)
    common_first = np.argsort(-np.bincount(nearest(points, codes)))
    number = np.arange(settings.codebook_size)
    owner = np.where(number < len(codes), number, 0)
    padded = np.resize(codes[common_first], (settings.codebook_size, codes.shape[1]))
    return nnx.Param(jnp.asarray(padded[owner])), jnp.asarray(owner)


def _farthest(points: np.ndarray, most: int) -> np.ndarray:
    codes, distance = [points[0]], np.linalg.norm(points - points[0], axis=1)
    while len(codes) < most and distance.max() > SAME:
        codes.append(points[distance.argmax()])
        distance = np.minimum(distance, np.linalg.norm(points - codes[-1], axis=1))
    codes = np.stack(codes)
    for _ in range(3):  # Lloyd's iterations
        owner = nearest(points, codes)
        codes = np.stack([points[owner == i].mean(axis=0) for i in np.unique(owner)])
    return codes


def nearest(points: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Returns the number of the nearest code [c d] of each point [n d]."""
    return np.argmin((codes**2).sum(axis=1) - 2 * points @ codes.T, axis=1)


def _images(seed: tuple[int, ...], count: int) -> UInt8[np.ndarray, "n h w 3"]:
    """Returns images from empty to full, the same for the same seed."""
    rng = np.random.default_rng(seed)
    shape = (count, world.GRID, world.GRID)
    filled = rng.random(shape) < rng.random((count, 1, 1)) ** 0.5
    grids = np.where(filled, rng.integers(1, world.NUM_APPEARANCES + 1, shape), world.EMPTY)
    return np.stack([world.render(grid) for grid in grids])


def _read_back(images: np.ndarray, decoded: np.ndarray) -> str:
    read = np.mean([world.read(a) == world.read(b) for a, b in zip(images, decoded, strict=True)])
    return f"images read back {read:.1%}"


def _of_art(data: config.Data) -> tuple[Callable, int, int, Callable]:
    things = sheet.taught(data).whole
    images, read = (functools.partial(one, sheet=things) for one in (dice.crowds, codebook.report))
    return images, 512, 96, read


# By `data.source`: images; how many to survey and to report on; the report on decoded ones.
SOURCES: dict[str, Callable[[config.Data], tuple[Callable, int, int, Callable]]] = {
    "scenes": lambda data: (_images, SURVEY_IMAGES, REPORT_IMAGES, _read_back),
    "art": _of_art,
}


def _report(
    model: vq.AnyVQ,
    images: np.ndarray,
    report: Callable,
    workdir: pathlib.Path,
    console,
) -> None:
    """Prints how good the tokenizer is on new images, and draws some of them."""
    codes = vq.encode_images(model, images)
    decoded = vq.to_pixels(model, codes)
    error = np.abs(images.astype(int) - decoded).mean() / 255
    same = (vq.encode_images(model, decoded) == codes).mean()
    psnr = -10 * np.log10(np.square((images.astype(int) - decoded) / 255).mean())
    console.print(
        f"codes used {len(np.unique(codes))} of {model.settings.codebook_size};"
        f" mean absolute pixel error {error:.4f}, PSNR {psnr:.2f} dB; {report(images, decoded)};"
        f" codes that survive decoding and encoding {same:.2%}"
    )
    rows = [np.concatenate([*row], axis=1) for row in (images[:6], decoded[:6])]
    Image.fromarray(np.concatenate(rows)).save(workdir / "reconstructions.png")
    console.print(f"wrote {workdir / 'vq'} and {workdir / 'reconstructions.png'}")
