# SPDX-License-Identifier: Apache-2.0
"""The Python interface: a checkpoint with its tokenizers, and what it can be asked to do."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int, UInt8
from PIL import Image

from sparse_lavida_jax import checkpoint, config, layout, presets, sample
from sparse_lavida_jax.data import digits, scenes
from sparse_lavida_jax.data.examples import Encoder, Example
from sparse_lavida_jax.data.text import Tokenizer
from sparse_lavida_jax.models import vq
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.prompts import Request, prompt_lengths

Picture = UInt8[np.ndarray, "_h _w 3"]  # each of its own size

ANSWER_TOKENS = 16  # response length of a short answer, tokens


class PictureCodec:
    """The image tokenizer of a checkpoint: pixels to cells of codes and back.

    Args:
        name_or_folder: a bundled VQ, a folder with one, or "grey" (or None) for handwritten
            digits, whose grey levels are their codes.
        model: whose cells the codes fill.

    Raises:
        ConfigError: there is no such VQ, or its codes do not fit the model.
    """

    def __init__(self, name_or_folder: str | pathlib.Path | None, model: config.Model):
        self.side = model.codes_side
        self.grid_size = model.grid_size
        is_grey = name_or_folder in (None, "grey")
        self.vq, self.folder, self.picture_size = None, None, digits.PICTURE_SIZE
        codes, levels = digits.SIDE, digits.LEVELS
        if not is_grey:
            self.vq, settings = vq.load(name_or_folder)
            self.folder, self.picture_size = vq.find(name_or_folder), settings.image_size
            codes, levels = settings.image_size // settings.factor, settings.codebook_size
        wanted = self.grid_size * self.side
        if (codes, levels) != (wanted, model.codebook_size):
            raise config.ConfigError(
                f"the image tokenizer {name_or_folder or 'grey'} makes {codes}x{codes} codes of"
                f" {levels} kinds, and the model takes {wanted}x{wanted} of {model.codebook_size}:"
                " choose another Data.picture_codec, or change Model.grid_size, codes_per_token or"
                " codebook_size."
            )

    def encode(self, pixels: UInt8[np.ndarray, "b h w 3"]) -> Int[np.ndarray, "b l g"]:
        """Returns the cells of pictures, raster order."""
        if self.vq is None:
            return np.stack([digits.read(picture) for picture in pixels])
        codes = vq.encode_pictures(self.vq, pixels)
        return np.asarray(layout.cells_from_codes(codes, self.side))

    def decode(self, cells: Int[np.ndarray, "b l g"]) -> UInt8[np.ndarray, "b h w 3"]:
        """Returns the pictures of cells."""
        if self.vq is None:
            return np.stack([digits.render(codes) for codes in cells])
        return vq.decode_codes(
            self.vq, np.asarray(layout.codes_from_cells(cells, self.grid_size, self.side))
        )

    def appearance_codes(self) -> Int[np.ndarray, "a g"] | None:
        """Returns the codes of every cell appearance of the scenes; None for digits."""
        if self.vq is None:
            return None
        # Where a thing stands does not matter to its codes; this is one place.
        grids = np.zeros((scenes.NUM_APPEARANCES + 1, scenes.GRID, scenes.GRID), int)
        grids[:, 2, 3] = np.arange(scenes.NUM_APPEARANCES + 1)
        cells = self.encode(np.stack([scenes.render(grid) for grid in grids]))
        return cells[:, 2 * scenes.GRID + 3]


class SparseLaViDa:
    """A model with its tokenizers, settings and tasks.

    Args:
        model: the denoiser.
        settings: the configuration it was trained with.
        tokenizer: of the text.
        codec: of pictures.
        batch_size: rows that are decoded together; a smaller last batch is filled up, so that
            every batch runs the same compiled programs.
    """

    def __init__(
        self,
        model: Denoiser,
        settings: config.Config,
        tokenizer: Tokenizer,
        codec: PictureCodec,
        batch_size: int = 16,
    ):
        self.model = model
        self.settings = settings
        self.tokenizer = tokenizer
        self.codec = codec
        self.batch_size = batch_size
        self.encoder = Encoder(tokenizer, settings.data, settings.model, codec.appearance_codes())

    @classmethod
    def from_pretrained(
        cls, folder_or_name: str | pathlib.Path, batch_size: int = 16
    ) -> "SparseLaViDa":
        """Loads a checkpoint folder, a run directory or a bundled model by name.

        Raises:
            checkpoint.CheckpointError: there is none, or it is damaged.
        """
        loaded = checkpoint.load_model(folder_or_name)
        return cls(
            loaded.model,
            loaded.config,
            Tokenizer(loaded.tokenizer_path),
            PictureCodec(loaded.vq_folder, loaded.config.model),
            batch_size,
        )

    def with_model(self, model: Denoiser) -> "SparseLaViDa":
        """Returns the same pipeline around other parameters."""
        return SparseLaViDa(model, self.settings, self.tokenizer, self.codec, self.batch_size)

    def with_sampling(self, sampling: config.Sampling) -> "SparseLaViDa":
        """Returns the same pipeline with other default sampling settings."""
        settings = dataclasses.replace(self.settings, sampling=sampling)
        return SparseLaViDa(self.model, settings, self.tokenizer, self.codec, self.batch_size)

    # -- tasks ------------------------------------------------------------------------------

    def write(
        self,
        prompts: Sequence[str],
        pictures: Sequence[Picture] | None = None,
        *,
        max_new_tokens: int = ANSWER_TOKENS,
        sampling: config.Sampling | None = None,
        seed: int = 0,
    ) -> list[str]:
        """Returns a text response to each prompt, with the picture it is shown, if any.

        Args:
            max_new_tokens: rounded up to whole text blocks.
        """
        block = self.settings.data.text_block_len
        examples = [
            self.encoder.text_example(
                prompt,
                picture=None if pictures is None else self._seen(pictures[i]),
                length=-(-max_new_tokens // block) * block,
            )
            for i, prompt in enumerate(prompts)
        ]
        return self.texts(self.run(examples, sampling=sampling, seed=seed))

    def plan(
        self,
        prompts: Sequence[str],
        pictures: Sequence[Picture] | None = None,
        *,
        sampling: config.Sampling | None = None,
        seed: int = 0,
    ) -> list[str]:
        """Returns a layout for each drawing or editing prompt: objects and their boxes."""
        length = self.settings.data.max_answer_len
        return self.write(prompts, pictures, max_new_tokens=length, sampling=sampling, seed=seed)

    def draw(
        self,
        prompts: Sequence[str],
        *,
        plans: Sequence[str] | None = None,
        sampling: config.Sampling | None = None,
        seed: int = 0,
        on_segment: Callable[[Int[np.ndarray, "b l g"], int], None] | None = None,
    ) -> list[Picture]:
        """Returns a picture for each prompt, laid out first unless `sampling.plan` is off.

        Args:
            plans: layouts to follow, in place of the model's own.
        """
        sampling = sampling or self.settings.sampling
        if plans is None and sampling.plan and self._plans("plan"):
            plans = self.plan(prompts, sampling=sampling, seed=seed)
        settings = self.settings.model
        blank = np.zeros((settings.num_cells, settings.codes_per_token), np.int32)
        examples = [
            self.encoder.image_example(prompt, blank, plan=None if plans is None else plans[i])
            for i, prompt in enumerate(prompts)
        ]
        cells = self.run(examples, sampling=sampling, seed=seed, on_segment=on_segment)
        return list(self.codec.decode(np.stack(cells)))

    def edit(
        self,
        pictures: Sequence[Picture],
        instructions: Sequence[str],
        *,
        plans: Sequence[str] | None = None,
        known: Sequence[Bool[np.ndarray, "y x"]] | None = None,
        sampling: config.Sampling | None = None,
        seed: int = 0,
    ) -> list[Picture]:
        """Returns each picture changed as told; everything else stays.

        Args:
            pictures: of any size; what is changed is the picture at the size of the model's own.
            plans: layouts of the change, in place of the model's own.
            known: for in- and outpainting, the grid of cells of each picture to keep; their codes
                come out as they went in.
        """
        sampling = sampling or self.settings.sampling
        task = "edit_plan" if known is None else "fill_plan"
        if plans is None and sampling.plan and self._plans(task):
            plans = self.plan(instructions, pictures, sampling=sampling, seed=seed)
        sources = self.codec.encode(
            np.stack([resized(picture, self.codec.picture_size) for picture in pictures])
        )
        examples = [
            self.encoder.image_example(
                instruction,
                sources[i],
                plan=None if plans is None else plans[i],
                picture=self._seen(pictures[i]),
                source=sources[i],
                given=None if known is None else known[i],
            )
            for i, instruction in enumerate(instructions)
        ]
        cells = self.run(examples, sampling=sampling, seed=seed)
        return list(self.codec.decode(np.stack(cells)))

    # -- the machinery ----------------------------------------------------------------------

    def run(
        self,
        examples: Sequence[Example],
        *,
        sampling: config.Sampling | None = None,
        seed: int = 0,
        on_segment: Callable[[Int[np.ndarray, "b l g"], int], None] | None = None,
    ) -> list[Int[np.ndarray, "_l g"]]:
        """Decodes the responses of examples of one kind; row i has the seed `seed + i`.

        Examples may differ in response length; those of one length are decoded together.
        """
        sampling = sampling or self.settings.sampling
        results: dict[int, np.ndarray] = {}
        floor = prompt_lengths(
            [_request(e, seed) for e in examples], examples[0].kind, self.settings.model
        )
        lengths = sorted({len(e.response) for e in examples})
        for length in lengths:
            members = [i for i, e in enumerate(examples) if len(e.response) == length]
            for start in range(0, len(members), self.batch_size):
                chunk = members[start : start + self.batch_size]
                filled = chunk + [chunk[-1]] * (self.batch_size - len(chunk))
                requests = [_request(examples[i], seed + i) for i in filled]
                decoded = self._decode(requests, examples[chunk[0]], sampling, floor, on_segment)
                results.update(zip(chunk, decoded[: len(chunk)], strict=True))
        return [results[i] for i in range(len(examples))]

    def texts(self, responses: Sequence[Int[np.ndarray, "_l 1"]]) -> list[str]:
        """Returns the text of responses, up to the first end-of-text."""
        end = self.tokenizer.end_of_text_id
        cut = [ids[:, 0].tolist() for ids in responses]
        return [self.tokenizer.decode(i[: i.index(end)] if end in i else i) for i in cut]

    def _decode(self, requests, example: Example, sampling, floor, on_segment):
        settings = presets.step_settings(
            sampling,
            self.settings.model,
            example.kind,
            has_source=any(isinstance(part, layout.Source) for part in example.parts),
        )
        plan = presets.plan(
            sampling,
            settings,
            self.settings.model,
            np.stack([request.given for request in requests]),
            self.settings.data.text_block_len,
        )
        return sample.sample(
            self.model,
            requests,
            plan,
            settings=settings,
            prompt_len=floor,
            on_segment=on_segment,
        )

    def _plans(self, task: str) -> bool:
        """Whether the model was trained to lay pictures out first."""
        return task in self.settings.data.tasks

    def _seen(self, picture: Picture) -> UInt8[np.ndarray, "side side 3"]:
        """The picture at the size of the vision tower."""
        return resized(picture, self.settings.model.vision.image_size)


def resized(picture: Picture, side: int) -> UInt8[np.ndarray, "side side 3"]:
    """Returns the whole of a picture, `side` pixels high and wide."""
    if picture.shape[:2] == (side, side):
        return picture
    return np.asarray(Image.fromarray(picture).resize((side, side), Image.Resampling.BICUBIC))


def _request(example: Example, seed: int) -> Request:
    return Request(example.parts, example.response, example.given, example.pixels, seed)
