# SPDX-License-Identifier: Apache-2.0
"""A small decoder for previews: at most a tenth of the operations of the exact one, its teacher.

Each code has a block of pixels of its own, which costs no operations; a narrow network that sees
the neighbours of a code adds what its block leaves out. For a tokenizer of `kind="cells"` the
blocks are those of the codebook, and the network is a narrower painter.
"""

import bisect
import dataclasses
import functools
import pathlib

import einops
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from jaxtyping import Array, Float, Int

from sparse_lavida_jax import config
from sparse_lavida_jax.art.cells import LEVELS, OUT_START, CellModel, PainterLayer, normed
from sparse_lavida_jax.data import files, tensor_files
from sparse_lavida_jax.models import parameters, vq, vq_files
from sparse_lavida_jax.programs import jax_settings
from sparse_lavida_jax.programs.operations import operations

MOST_SHARE = 0.1  # of the teacher's operations
MOST_WIDTH = 128  # ours; channels
WIDTHS = 8  # widths are multiples of it
LAYERS = 2  # each sees one code farther
MOST_METADATA = 64  # hexadecimal digits of a digest


class PreviewDecoder(nnx.Module):
    """Decodes codes of a tokenizer of `kind="convolutions"`."""

    def __init__(self, settings: config.VQ, width: int, *, rngs: nnx.Rngs):
        pixels, normal = 3 * settings.factor**2, jax.nn.initializers.normal(1.0)
        self.codebook = nnx.Param(normal(rngs.params(), (settings.codebook_size, width)))
        self.blocks = nnx.Param(jnp.zeros((settings.codebook_size, pixels)))
        self.layers = nnx.List(PainterLayer(width, rngs=rngs) for _ in range(LAYERS))
        small = jax.nn.initializers.variance_scaling(OUT_START**2, "fan_in", "truncated_normal")
        self.out = nnx.Conv(width, pixels, (1, 1), kernel_init=small, rngs=rngs)
        self.factor = settings.factor

    def decode(self, codes: Int[Array, "b y x"]) -> Float[Array, "b h w 3"]:
        """Returns the images of codes, in [0, 1]: in the middle of a grey level, never between."""
        levels = jnp.clip(jnp.round(LEVELS * self.paint(codes)), 0, LEVELS)
        return jnp.clip((levels + 0.5) / LEVELS, 0, 1)  # bytes are cut off, not rounded

    def paint(self, codes: Int[Array, "b y x"]) -> Float[Array, "b h w 3"]:
        """Returns images, neither rounded nor clipped."""
        x = self.codebook[codes]
        for layer in self.layers:
            x = x + layer(x)
        blocks = self.blocks[codes] + self.out(jax.nn.silu(normed(x)))
        cut = "b y x (i j c) -> b (y i) (x j) c"
        return einops.rearrange(blocks, cut, i=self.factor, j=self.factor)


AnyPreview = PreviewDecoder | CellModel


def new(teacher: vq.AnyVQ, width: int, seed: int) -> AnyPreview:
    """Returns a decoder to train; the blocks of a `PreviewDecoder` are zero."""
    if not isinstance(teacher, CellModel):
        return PreviewDecoder(teacher.settings, width, rngs=nnx.Rngs(seed))
    made = CellModel(_narrow(teacher.settings, width), rngs=nnx.Rngs(seed))
    made.codebook = nnx.Param(teacher.codebook[...])
    return made


def width_for(settings: config.VQ) -> int:
    """Returns the largest width with at most `MOST_SHARE` of the operations of the teacher.

    Raises:
        ConfigError: the smallest one has more.
    """
    widths, share_of = range(0, MOST_WIDTH + 1, WIDTHS), functools.cache(share_of_operations)
    fit = bisect.bisect_right(widths[1:], MOST_SHARE, key=lambda width: share_of(settings, width))
    if not fit:
        raise config.ConfigError(
            f"The exact decoder is so small that one of {WIDTHS} channels for previews would have"
            f" {share_of(settings, WIDTHS):.0%} of its operations; the most is {MOST_SHARE:.0%}."
            " Use the exact one for previews too."
        )
    return widths[fit]


def share_of_operations(settings: config.VQ, width: int) -> float:
    """Returns the operations to decode a largest image, relative to the exact decoder."""
    if settings.kind == "cells":
        made = jax.eval_shape(lambda: CellModel(_narrow(settings, width), rngs=nnx.Rngs(0)))
    else:
        made = jax.eval_shape(lambda: PreviewDecoder(settings, width, rngs=nnx.Rngs(0)))
    return _decoding(made, settings) / _teacher_decoding(settings)


@functools.cache
def _teacher_decoding(settings: config.VQ) -> float:
    return _decoding(vq.shapes(settings), settings)


def _decoding(model: vq.AnyVQ | AnyPreview, settings: config.VQ) -> float:
    """Returns the operations to decode a largest image."""
    codes = jax.ShapeDtypeStruct((1, *(settings.image_size // settings.factor,) * 2), jnp.int32)
    return operations(lambda model, x: model.decode(x), model, codes)


def width_of(model: AnyPreview) -> int:
    """Returns the channels of a decoder."""
    table = model.painter.codes if isinstance(model, CellModel) else model.codebook
    return table.shape[1]


def save(folder: pathlib.Path, model: AnyPreview) -> None:
    """Writes `preview.safetensors` into the folder of the teacher."""
    arrays = {name: np.asarray(value) for name, value in _stored(model).items()}
    with files.replacing(folder / vq_files.PREVIEW) as path:
        noted = {"teacher": vq_files.digest(folder)}
        safetensors.numpy.save_file(arrays, path, metadata=noted)
        path.chmod(0o644)  # the library makes the file private


@jax_settings.defaults()
def load(folder: pathlib.Path, teacher: vq.AnyVQ) -> AnyPreview:
    """Returns the decoder for previews in the folder of its teacher.

    Raises:
        VQError: its file is missing, unreadable, inconsistent or was trained for another teacher.
    """
    path = folder / vq_files.PREVIEW
    remedy = "Delete it or train it again (`--config=configs/preview.py`)."
    try:
        header = tensor_files.read_header(path)
        shape = header["codebook" if "codebook" in header else "codes"].shape
        width = min(shape[-1], MOST_WIDTH) if shape else 0
        model = new(teacher, max(width, 1), 0)
        faults = parameters.differences(_stored(model), header)
        given = {} if faults else tensor_files.read_floats(path)
        with safetensors.safe_open(path, "numpy") as file:
            digest = (file.metadata() or {}).get("teacher", "")[:MOST_METADATA]
    except (OSError, ValueError, KeyError) as error:
        raise vq_files.VQError(f"{path} cannot be read ({error}). {remedy}") from error
    if faults or digest != vq_files.digest(folder):
        raise vq_files.VQError(
            f"{path} was made for another image tokenizer than {folder / 'config.json'} and"
            f" params.safetensors. {remedy}"
        )
    if wrong := [name for name, array in given.items() if not np.isfinite(array).all()]:
        raise vq_files.VQError(f"{path} holds NaN or infinite numbers in {wrong[0]}. {remedy}")
    if not isinstance(model, CellModel):
        return parameters.replaced(model, _placed(given))
    model.painter = parameters.replaced(model.painter, _placed(given))
    return model


def _placed(arrays: dict[str, np.ndarray]) -> dict[str, Array]:
    return {name: jax.device_put(x, may_alias=False) for name, x in arrays.items()}


def _stored(model: AnyPreview) -> dict[str, Array]:
    """Returns the parameters that are not the teacher's, by name."""
    return parameters.by_name(model.painter if isinstance(model, CellModel) else model)


def _narrow(settings: config.VQ, width: int) -> config.VQ:
    return dataclasses.replace(settings, latent_channels=width, layers_per_block=LAYERS)
