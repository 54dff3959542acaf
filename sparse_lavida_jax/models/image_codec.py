# SPDX-License-Identifier: Apache-2.0
"""The image tokenizer of a checkpoint, for tasks and for preparing data."""

import functools
import pathlib

import jax
import numpy as np
from jaxtyping import Int, UInt8

from sparse_lavida_jax import config, sequence
from sparse_lavida_jax.models import vq, vq_files
from sparse_lavida_jax.programs import jax_settings
from sparse_lavida_jax.programs.persistent_jit import Program
from sparse_lavida_jax.programs.program_arguments import taken_apart


class ImageCodec:
    """The image tokenizer of a checkpoint: converts pixels to cells of codes and back.

    Args:
        name_or_folder: see `vq_files.find`.
        model: its cells are made of these codes.

    Raises:
        ConfigError: there is no such VQ, its codes do not fit the model, or the file of its
            decoder for previews is damaged or belongs to another VQ.
    """

    def __init__(self, name_or_folder: str | pathlib.Path, model: config.Model):
        self.side = model.codes_side
        self.grid_size = model.grid_size
        self._decoders: dict[str, vq.AnyVQ] = {}  # by dtype
        self.vq, settings = vq_files.load(name_or_folder)
        self.folder, self.image_size = vq_files.find(name_or_folder), settings.image_size
        self.factor = settings.factor  # pixels per side of a code
        if settings.kind == "cells":  # no code depends on another: an image may have any number
            self.image_size = self.grid_size * self.side * self.factor
        self._preview = None
        if (self.folder / vq_files.PREVIEW).exists():
            from sparse_lavida_jax.models import preview_decoder

            self._preview = taken_apart(preview_decoder.load(self.folder, self.vq))
        codes, wanted = self.image_size // self.factor, self.grid_size * self.side
        if (codes, settings.codebook_size) != (wanted, model.codebook_size):
            raise config.ConfigError(
                f"the image tokenizer {name_or_folder} makes {codes}x{codes} codes of"
                f" {settings.codebook_size} kinds, and the model takes {wanted}x{wanted} of"
                f" {model.codebook_size}: choose another Data.image_codec, or change"
                " Model.grid_size, codes_per_token or codebook_size."
            )

    def encode(self, pixels: UInt8[np.ndarray, "b h w 3"]) -> Int[np.ndarray, "b l g"]:
        """Returns the cells of images in raster order, encoding each image separately."""
        codes = vq.encode_images(self._encoder, pixels, batch=1)
        return np.asarray(sequence.cells_from_codes(codes, self.side))

    def to_pixels(
        self, cells: Int[np.ndarray, "b l g"], rows: int | None = None, dtype: str = "float32"
    ) -> UInt8[np.ndarray, "b h w 3"]:
        """Returns the images of cells, decoding each separately: no image affects another.

        Args:
            rows: number of rows of cells; by default as in the largest image.
            dtype: of the decoder (`vq.for_decoding`).
        """
        codes = sequence.codes_from_cells(cells, rows or self.grid_size, self.side)
        return vq.to_pixels(self._decoder(dtype), np.asarray(codes), batch=1)

    def to_preview(
        self, cells: Int[np.ndarray, "l g"], rows: int | None = None
    ) -> UInt8[np.ndarray, "h w 3"]:
        """Returns one image, nearly as `to_pixels`, by the decoder for previews if there is one."""
        if self._preview is None:
            return self.to_pixels(cells[None], rows)[0]
        codes = sequence.codes_from_cells(cells[None], rows or self.grid_size, self.side)
        return vq.to_pixels(self._preview, np.asarray(codes), batch=1)[0]

    def pixel_programs(self, cells: tuple[int, int], dtype: str = "float32") -> list[Program]:
        """Starts to make the program that decodes an image of rows and columns of cells."""
        shape = 1, cells[0] * self.side, cells[1] * self.side
        codes = jax.ShapeDtypeStruct(shape, np.dtype("int32"))
        return [vq.decode.program(self._decoder(dtype), codes)]

    @functools.cached_property
    def _encoder(self) -> vq.AnyVQ:
        with jax_settings.defaults():
            return taken_apart(self.vq)

    def _decoder(self, dtype: str) -> vq.AnyVQ:
        if dtype not in self._decoders:
            with jax_settings.defaults():
                self._decoders[dtype] = taken_apart(vq.for_decoding(self.vq, dtype))
        return self._decoders[dtype]


class ImageTokenizer:
    """The image tokenizer for `prepare`: converts squares of pixels to codes.

    Its parameters are read when the first image is encoded, in the process that encodes it.

    Args:
        name_or_folder: see `vq_files.find`.

    Raises:
        vq_files.VQError: there is no such VQ.
    """

    def __init__(self, name_or_folder: str):
        self.folder = vq_files.find(name_or_folder)
        settings = vq_files.read_settings(self.folder)
        self.side, self.factor = settings.image_size, settings.factor
        self.codebook_size = settings.codebook_size

    @property
    def digest(self) -> str:
        """SHA-256 of the settings and the parameters."""
        return vq_files.digest(self.folder)

    @functools.cached_property
    def _model(self) -> vq.AnyVQ:
        return vq_files.load(self.folder)[0]

    def encode(self, pixels: UInt8[np.ndarray, "n side side 3"]) -> Int[np.ndarray, "n y x"]:
        """Returns the codes of images, encoding them as one batch."""
        return vq.encode_images(self._model, pixels, batch=len(pixels))
