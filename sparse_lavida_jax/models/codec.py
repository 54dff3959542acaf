# SPDX-License-Identifier: Apache-2.0
"""The image tokenizer as tasks use it: pixels to cells of codes and back."""

import functools
import hashlib
import pathlib

import numpy as np
from jaxtyping import Int, UInt8

from sparse_lavida_jax import config, sequence
from sparse_lavida_jax.data import grey
from sparse_lavida_jax.models import vq


class ImageCodec:
    """The image tokenizer of a checkpoint: pixels to cells of codes and back.

    Args:
        name_or_folder: a bundled VQ, a folder with one, or "grey" (or None) for images whose grey
            levels are their codes.
        model: whose cells the codes fill.

    Raises:
        ConfigError: there is no such VQ, or its codes do not fit the model.
    """

    is_grey = False

    def __init__(self, name_or_folder: str | pathlib.Path | None, model: config.Model):
        self.side = model.codes_side
        self.grid_size = model.grid_size
        self.is_grey = name_or_folder in (None, "grey")
        self.vq, self.folder, self.image_size = None, None, grey.IMAGE_SIZE
        self.factor = grey.IMAGE_SIZE // grey.SIDE  # pixels a side of a code
        self._decoders: dict[str, vq.VQModel] = {}  # by dtype
        codes, levels = grey.SIDE, grey.LEVELS
        if not self.is_grey:
            self.vq, settings = vq.load(name_or_folder)
            self.folder, self.image_size = vq.find(name_or_folder), settings.image_size
            self.factor = settings.factor
            codes, levels = settings.image_size // settings.factor, settings.codebook_size
        wanted = self.grid_size * self.side
        if (codes, levels) != (wanted, model.codebook_size):
            raise config.ConfigError(
                f"the image tokenizer {name_or_folder or 'grey'} makes {codes}x{codes} codes of"
                f" {levels} kinds, and the model takes {wanted}x{wanted} of {model.codebook_size}:"
                " choose another Data.image_codec, or change Model.grid_size, codes_per_token or"
                " codebook_size."
            )

    def encode(self, pixels: UInt8[np.ndarray, "b h w 3"]) -> Int[np.ndarray, "b l g"]:
        """Returns the cells of images, raster order, each encoded alone."""
        if self.vq is None:
            return np.stack([grey.read(image) for image in pixels])
        codes = vq.encode_images(self.vq, pixels, batch=1)
        return np.asarray(sequence.cells_from_codes(codes, self.side))

    def decode(
        self, cells: Int[np.ndarray, "b l g"], rows: int | None = None, dtype: str = "float32"
    ) -> UInt8[np.ndarray, "b h w 3"]:
        """Returns the images of cells, each decoded alone: its pixels depend on nothing else.

        Args:
            rows: cells from top to bottom; by default those of the largest image.
            dtype: of the decoder (`vq.for_decoding`).
        """
        if self.vq is None:
            return np.stack([grey.render(codes) for codes in cells])
        codes = sequence.codes_from_cells(cells, rows or self.grid_size, self.side)
        if dtype not in self._decoders:
            self._decoders[dtype] = vq.for_decoding(self.vq, dtype)
        return vq.decode_codes(self._decoders[dtype], np.asarray(codes), batch=1)


class ImageEncoder:
    """The image tokenizer as `prepare` uses it: squares of pixels to codes.

    Its parameters are read when the first image is encoded, in the process that does it.

    Args:
        name_or_folder: a bundled VQ, a folder with one, or a model folder or run directory with
            one.

    Raises:
        VQError: there is no such VQ.
    """

    def __init__(self, name_or_folder: str):
        folder = pathlib.Path(name_or_folder)
        inside = (folder / "vq", folder / "model" / "vq")
        found = next((path for path in inside if path.is_dir()), None)
        self.folder = found or vq.find(name_or_folder)
        settings = vq.read_settings(self.folder)
        self.side, self.factor = settings.image_size, settings.factor
        self.codebook_size = settings.codebook_size

    @property
    def digest(self) -> str:
        """SHA-256 of the settings and the parameters."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        with (self.folder / "params.safetensors").open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    @functools.cached_property
    def _model(self) -> vq.VQModel:
        return vq.load(self.folder)[0]

    def encode(self, pixels: UInt8[np.ndarray, "n side side 3"]) -> Int[np.ndarray, "n y x"]:
        """Returns the codes of images, encoded together."""
        return vq.encode_images(self._model, pixels, batch=len(pixels))
