# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with its tokenizers, and examples through the sampler: what every task stands on."""

import collections
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Bool, Int, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import manifest, model_folder
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.inference.batching import (
    NOTHING,
    Bucket,
    Own,
    bucket_of,
    check_steps,
    decode,
    row_seeds,
    together,
)
from sparse_lavida_jax.inference.requests import Drawing
from sparse_lavida_jax.inference.results import Source
from sparse_lavida_jax.lavida_o.chat import ChatTokenizer
from sparse_lavida_jax.lavida_o.prompts import ChatPrompts
from sparse_lavida_jax.models import fuse, quantize, sharding
from sparse_lavida_jax.models.codec import ImageCodec
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sample import OnSegment
from sparse_lavida_jax.sampling.prefixes import Prefixes
from sparse_lavida_jax.scenes.encoder import Encoder
from sparse_lavida_jax.scenes.prompts import ANSWER_TOKENS, ScenePrompts
from sparse_lavida_jax.scenes.tokenizer import Tokenizer

Pixels = UInt8[np.ndarray, "_h _w 3"]  # each of its own size
Grid = Bool[np.ndarray, "y x"]

E = TypeVar("E", bound="Engine")

SHARED_PROMPT = 128  # tokens
MASKED_GREY = 168  # of cells that are not decoded yet, in previews


class Engine:
    """A model with its tokenizers and settings, and batches through the sampler.

    Args:
        model: the denoiser.
        settings: the configuration it was trained with.
        tokenizer: of the text.
        codec: of images; None for a model that knows none.
        batch_size: most rows that are decoded together.
        source: the checkpoint it came from.

    Attributes:
        on_step: called between segments with what is being made ("layout", "image", "text"), the
            steps done and all its steps; 0 steps are done before the programs are compiled.
    """

    def __init__(
        self,
        model: Denoiser,
        settings: config.Config,
        tokenizer: Tokenizer | ChatTokenizer,
        codec: ImageCodec | None,
        batch_size: int = 16,
        source: Source | None = None,
    ):
        self.model = model
        self.settings = settings
        self.tokenizer = tokenizer
        self.codec = codec
        self.batch_size = batch_size
        self.source = source or Source()
        self.prompts = _prompts(settings, tokenizer, codec)
        self.on_step: Callable[[str, int, int], None] | None = None
        self._quantized: dict[str, Denoiser] = {}
        self._prefixes: dict[str, Prefixes] = collections.defaultdict(Prefixes)

    @classmethod
    def from_pretrained(
        cls: type[E],
        folder_or_name: str | pathlib.Path,
        batch_size: int = 16,
        *,
        mesh: jax.sharding.Mesh | None = None,
        dtype: str | None = None,
        task: fuse.Task = "both",
    ) -> E:
        """Loads a checkpoint folder, a run directory or a bundled model by name.

        On one GPU, or for one task, the parameters are fused for sampling (`fuse.for_inference`).

        Args:
            mesh: splits the parameters over several devices (`sharding.RULES`), each of which
                reads its own part only; results are those of one device.
            dtype: of the parameters, "float32" or "bfloat16"; by default as stored.
            task: "image" for images that are not laid out in text first, "text" for text: what
                only the other reads is not kept, and what needs it is refused.

        Raises:
            model_folder.CheckpointError: there is none, or it is damaged.
            ValueError: the mesh has axes that are not ours, or there is one beside a task.
        """
        if mesh is not None and task != "both":
            raise ValueError(f"over a mesh all parameters are kept: leave task={task!r} out.")
        _check_is_ours(pathlib.Path(folder_or_name))
        folder = model_folder.find_model(folder_or_name)
        split = None if mesh is None else sharding.over(mesh)
        loaded = model_folder.load_model(folder, sharding=split, dtype=dtype)
        settings = loaded.config
        try:
            tokenizer = _tokenizer_of(settings.model)(loaded.tokenizer_path)
            if isinstance(tokenizer, ChatTokenizer):
                tokenizer.check(settings.model)
        except (ValueError, FileNotFoundError) as error:
            raise model_folder.CheckpointError(str(error)) from error
        textual = settings.model.understanding_only
        codec = None if textual else ImageCodec(loaded.vq_folder, settings.model)
        source = Source(str(folder_or_name), manifest.digest(folder))
        fused = mesh is None and (jax.default_backend() == "gpu" or task != "both")
        model = fuse.for_inference(loaded.model, task=task) if fused else loaded.model
        return cls(model, settings, tokenizer, codec, batch_size, source)

    def with_model(self: E, model: Denoiser) -> E:
        """Returns the same pipeline around other parameters."""
        return type(self)(model, self.settings, self.tokenizer, self.codec, self.batch_size)

    def with_sampling(self: E, sampling: config.Sampling) -> E:
        """Returns the same pipeline with other default sampling settings."""
        settings = dataclasses.replace(self.settings, sampling=sampling)
        return type(self)(
            self.model, settings, self.tokenizer, self.codec, self.batch_size, self.source
        )

    @property
    def encoder(self) -> Encoder:
        """What makes training examples of the small world; a converted LaViDa-O has none."""
        if not isinstance(self.prompts, ScenePrompts):
            raise config.ConfigError("only models of the small world have its examples.")
        return self.prompts.encoder

    # -- batches, for training and benchmarks -----------------------------------------------

    def write(
        self,
        prompts: Sequence[str],
        images: Sequence[Pixels] | None = None,
        *,
        max_new_tokens: int = ANSWER_TOKENS,
        sampling: config.Sampling | None = None,
        seed: int | Sequence[int] = 0,
    ) -> list[str]:
        """Returns a text response to each prompt, with the image it is shown, if any.

        Args:
            max_new_tokens: rounded up to whole text blocks.
        """
        examples = [
            self.prompts.ask(prompt, () if images is None else (images[i],), max_new_tokens)
            for i, prompt in enumerate(prompts)
        ]
        return self.texts(self.run(examples, sampling=sampling, seed=seed))

    def plan(
        self,
        prompts: Sequence[str],
        images: Sequence[Pixels | None] | None = None,
        *,
        sampling: config.Sampling | None = None,
        seed: int | Sequence[int] = 0,
    ) -> list[str]:
        """Returns a layout for each drawing or editing prompt: objects and their boxes."""
        shown = images or [None] * len(prompts)
        examples = [self.prompts.plan(*one) for one in zip(prompts, shown, strict=True)]
        return self.texts(self.run(examples, sampling=sampling, seed=seed, making="layout"))

    def draw(
        self,
        prompts: Sequence[str],
        *,
        plans: Sequence[str] | None = None,
        sampling: config.Sampling | None = None,
        seed: int | Sequence[int] = 0,
        on_segment: OnSegment | None = None,
    ) -> list[Pixels]:
        """Returns an image for each prompt, laid out first unless `sampling.plan` is off.

        Args:
            plans: layouts to follow, in place of the model's own.
        """
        sampling, seeds = sampling or self.settings.sampling, row_seeds(seed, len(prompts))
        if plans is None and sampling.plan and self.prompts.lays_out("generate"):
            plans = self.plan(prompts, sampling=sampling, seed=seeds)
        drawings = [
            Drawing(prompt, seeds[i], self._grid, plan=None if plans is None else plans[i])
            for i, prompt in enumerate(prompts)
        ]
        return self._drawn(drawings, sampling, on_segment)

    def redraw(
        self,
        images: Sequence[Pixels],
        instructions: Sequence[str],
        *,
        plans: Sequence[str] | None = None,
        known: Sequence[Grid] | None = None,
        sampling: config.Sampling | None = None,
        seed: int | Sequence[int] = 0,
    ) -> list[Pixels]:
        """Returns each image changed as told; everything else stays.

        Args:
            images: of any size; what is changed is the image at the size of the model's own.
            plans: layouts of the change, in place of the model's own.
            known: for in- and outpainting, the grid of cells of each image to keep; their codes
                come out as they went in.
        """
        sampling, seeds = sampling or self.settings.sampling, row_seeds(seed, len(instructions))
        task = "edit" if known is None else "inpaint"
        if plans is None and sampling.plan and self.prompts.lays_out(task):
            plans = self.plan(instructions, images, sampling=sampling, seed=seeds)
        drawings = [
            Drawing(
                instruction,
                seeds[i],
                self._grid,
                image=images[i],
                canvas=self.prompts.canvas(images[i], self._codec.image_size),
                known=None if known is None else known[i],
                plan=None if plans is None else plans[i],
            )
            for i, instruction in enumerate(instructions)
        ]
        return self._drawn(drawings, sampling, None)

    # -- decoding ---------------------------------------------------------------------------

    def run(
        self,
        examples: Sequence[Example],
        *,
        sampling: config.Sampling | None = None,
        seed: int | Sequence[int] = 0,
        on_segment: OnSegment | None = None,
        bucket: Bucket | None = None,
        making: str = "",
        own: Sequence[Own] | None = None,
    ) -> list[Int[np.ndarray, "_l g"]]:
        """Decodes the responses of examples of one kind.

        Examples may differ in response length; those of one length are decoded together. A batch
        that is not full is filled up, so that all batches run the same compiled programs.

        Args:
            seed: one for each row, or that of the first, from which the others count on.
            bucket: the shapes to pad to; by default those that fit.
            making: what `on_step` is told; by default the kind.
            own: what each row has in place of `sampling`'s.

        Raises:
            ConfigError: more steps than there are tokens.
        """
        sampling, own = together(
            sampling or self.settings.sampling, own or [NOTHING] * len(examples)
        )
        block, kind = self.prompts.text_block_len, examples[0].kind
        for example in examples:
            check_steps(example, sampling, self.model.settings, block)
        making = making or {"image": "image", "text": "text"}[kind]
        on_step = None if self.on_step is None else functools.partial(self.on_step, making)
        return decode(
            self._sampled_with(sampling.quantize),
            examples,
            row_seeds(seed, len(examples)),
            own,
            sampling,
            bucket or self._bucket(examples, sampling),
            text_block_len=block,
            on_segment=on_segment,
            on_step=on_step,
            prefixes=self._prefixes[sampling.quantize],
        )

    def shared_bucket(self, examples: Sequence[Example], sampling: config.Sampling) -> Bucket:
        """Returns shapes that many batches share, so that few programs are compiled for them.

        All rows that are decoded together, and prompts padded to a multiple of `SHARED_PROMPT`.
        """
        fitting = self._bucket(examples, sampling).prompt_len
        understanding, generation = (-(-n // SHARED_PROMPT) * SHARED_PROMPT for n in fitting)
        return Bucket(self.batch_size, (understanding, generation))

    def _sampled_with(self, method: str) -> Denoiser:
        """Returns the model, in 8 bits if asked for; those are kept beside it."""
        if not method:
            return self.model
        if method not in self._quantized:
            self._quantized[method] = quantize.quantized(self.model, method)
        return self._quantized[method]

    def texts(self, responses: Sequence[Int[np.ndarray, "_l 1"]]) -> list[str]:
        """Returns the text of responses, up to the first end-of-text."""
        return [self.prompts.text(ids) for ids in responses]

    def preview(self, cells: Int[np.ndarray, "l g"], rows: int | None = None) -> Pixels:
        """Returns an image of which cells are still masked: those are grey.

        Args:
            rows: of cells; by default the image is a square.
        """
        masked = (cells == self.settings.model.image_mask_id).any(axis=-1)
        rows = rows or math.isqrt(len(cells))
        (image,) = self._codec.decode(np.where(masked[:, None], 0, cells)[None], rows)
        step = image.shape[0] // rows
        hidden = masked.reshape(rows, -1).repeat(step, axis=0).repeat(step, axis=1)
        return np.where(hidden[..., None], np.uint8(MASKED_GREY), image)

    def _decoded(
        self,
        drawings: Sequence[Drawing],
        sampling: config.Sampling,
        on_segment: OnSegment | None = None,
        bucket: Bucket | None = None,
    ) -> tuple[list[Int[np.ndarray, "_l g"]], Bucket]:
        """Returns the codes of images, and the bucket that they were decoded in."""
        examples = [self._image_example(drawing) for drawing in drawings]
        sampling, own = together(sampling, [drawing.own for drawing in drawings])
        bucket = bucket or self._bucket(examples, sampling)
        cells = self.run(
            examples,
            sampling=sampling,
            seed=[drawing.seed for drawing in drawings],
            on_segment=on_segment,
            bucket=bucket,
            own=own,
        )
        return cells, bucket

    def _drawn(self, drawings, sampling, on_segment: OnSegment | None) -> list[Pixels]:
        cells, _ = self._decoded(drawings, sampling, on_segment)
        return list(self._codec.decode(np.stack(cells), dtype=sampling.vq_dtype))

    def _image_example(self, drawing: Drawing) -> Example:
        return dataclasses.replace(self._worded(drawing), grid=drawing.cells)

    def _worded(self, drawing: Drawing) -> Example:
        if drawing.canvas is None:
            blank = np.zeros(
                (math.prod(drawing.cells), self.settings.model.codes_per_token), np.int32
            )
            return self.prompts.draw(
                drawing.words, blank, plan=drawing.plan, attempts=drawing.attempts
            )
        assert drawing.image is not None
        (codes,) = self._codec.encode(drawing.canvas[None])
        if drawing.known is None:
            return self.prompts.edit(drawing.words, codes, drawing.image, plan=drawing.plan)
        return self.prompts.fill(
            drawing.words, codes, drawing.image, drawing.known, plan=drawing.plan
        )

    def _bucket(self, examples: Sequence[Example], sampling: config.Sampling) -> Bucket:
        return bucket_of(examples, sampling, self.model.settings, self.batch_size)

    @property
    def _codec(self) -> ImageCodec:
        assert self.codec is not None  # `check_task` refused
        return self.codec

    @property
    def _grid(self) -> tuple[int, int]:
        return self.settings.model.grid_size, self.settings.model.grid_size


# ---------------------------------------------------------------------------------------------
# Helpers.


def _prompts(
    settings: config.Config, tokenizer: Tokenizer | ChatTokenizer, codec: ImageCodec | None
) -> ScenePrompts | ChatPrompts:
    if isinstance(tokenizer, ChatTokenizer):
        return ChatPrompts(tokenizer, settings.model, codec.factor if codec else 1)
    assert codec is not None
    encoder = Encoder(tokenizer, settings.data, settings.model, codec.appearance_codes())
    return ScenePrompts(encoder)


def _tokenizer_of(model: config.Model) -> type[Tokenizer] | type[ChatTokenizer]:
    """Returns the tokenizer that goes with a model: a released one has newlines, or no images."""
    return ChatTokenizer if model.vision.newline or model.understanding_only else Tokenizer


def _check_is_ours(folder: pathlib.Path) -> None:
    """Refuses a released PyTorch folder, and says what to do with it."""
    if any(folder.glob("*.safetensors*")) and not (folder / "params").is_dir():
        raise model_folder.CheckpointError(
            f"{folder} is a PyTorch folder: convert it first, with"
            f" `sparse-lavida convert {folder} MODEL`, and give the MODEL folder."
        )
