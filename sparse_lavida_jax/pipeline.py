# SPDX-License-Identifier: Apache-2.0
"""The Python interface: a checkpoint with its tokenizers, and what it can be asked to do.

    pipe = SparseLaViDa.from_pretrained("scenes")
    image = pipe.generate("a red circle above a blue square", seed=0)
    edited = pipe.edit(image, "make the red circle green")
    print(pipe.ask(edited, "how many squares are there?").text)

Every task takes one thing or a list of them, and returns one `Result` with an entry for each.
`conversation.Conversation` lets tasks take turns.
"""

import contextlib
import dataclasses
import logging
import math
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

import jax
import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import manifest, model_folder
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.templates import (
    RequestError,
    parse_template,
    words_template,
)
from sparse_lavida_jax.inference import regions
from sparse_lavida_jax.inference.engine import Bucket, Engine
from sparse_lavida_jax.inference.requests import (
    LARGEST_SEED,
    ROUNDS,
    Grid,
    Numbers,
    Pixels,
    Request,
    Shown,
    ShownImage,
    grid_of,
    named,
    of_row,
    paired,
    recorded_image,
    row_numbers,
    row_plans,
    row_seeds,
    spec_of,
)
from sparse_lavida_jax.inference.results import FORMAT, Origin, Result
from sparse_lavida_jax.lavida_o.chat import ChatTokenizer
from sparse_lavida_jax.lavida_o.prompts import ChatPrompts
from sparse_lavida_jax.models import fuse, sharding
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.vq import ImageCodec
from sparse_lavida_jax.sample import Callback
from sparse_lavida_jax.sampling import options, presets
from sparse_lavida_jax.scenes.encoder import Encoder, encoder_of
from sparse_lavida_jax.scenes.prompts import ANSWER_TOKENS, ScenePrompts
from sparse_lavida_jax.scenes.tokenizer import Tokenizer

__all__ = ["ANSWER_TOKENS", "SparseLaViDa"]

Words = str | Sequence[str]
S = TypeVar("S", bound="SparseLaViDa")

log = logging.getLogger(__name__)

SEED_STRIDE = 1_000_003  # between the rounds of "reflect", so that rows do not share noise
MASKED_GREY = 168  # of cells that are not decoded yet, in previews


class Options(TypedDict, total=False):
    """What every task takes; None: not given.

    Attributes:
        seed: of the first row, the others count on; or one for each row.
        sampling: the settings to start from; by default those of the checkpoint.
        steps: of the image, or of a text block; also as `num_inference_steps`.
        temperature: of all rows, or one for each; 0 takes the most probable.
        sampler: a preset (`sampling/presets.py`).
        registers: how many, or the first and the last number of them.
        quantize: matrices of the layers in 8 bits (`config.QUANTIZED`).
    """

    seed: int | Sequence[int] | None
    sampling: config.Sampling | None
    steps: int | None
    num_inference_steps: int | None
    temperature: Numbers
    sampler: str | None
    registers: int | tuple[int, int] | None
    quantize: str | None


class ImageOptions(Options, total=False):
    """What every task takes that makes an image.

    Attributes:
        num_images: of each prompt.
        plan: whether to lay the image out in text first, or the layout to follow, or one for
            each row; by default as the sampling settings say, where the model learned it.
        guidance: scale of all rows, or one for each; also as `guidance_scale`.
        order: of the cells (`config.Sampling.order`).
        vq_dtype: of the decoder of images.
    """

    num_images: int | None
    plan: bool | Words | None
    guidance: Numbers
    guidance_scale: Numbers
    order: str | None
    vq_dtype: str | None


class ChangeOptions(ImageOptions, total=False):
    """What every task takes that changes an image.

    Attributes:
        guidance_image: scale of the image, of all rows or one for each.
    """

    guidance_image: Numbers


class SparseLaViDa:
    """A model with its tokenizers, settings and tasks; made by `from_pretrained`.

    All tasks are `run(requests(task, words, shown, **options))`.

    Args:
        model: the denoiser.
        settings: the configuration it was trained with.
        tokenizer: of the text.
        codec: of images; None for a model that knows none.
        batch_size: most rows that are decoded together.
        source: the checkpoint it came from.

    Attributes:
        engine: the model and the sampler.
        prompts: how tasks are put to the model.
        warned: whether it was said that the model was never trained for what was asked.
    """

    def __init__(
        self,
        model: Denoiser,
        settings: config.Config,
        tokenizer: Tokenizer | ChatTokenizer,
        codec: ImageCodec | None,
        batch_size: int = 16,
        source: Origin | None = None,
    ):
        self.settings = settings
        self.tokenizer = tokenizer
        self.codec = codec
        self.source = source or Origin()
        self.prompts = _prompts(settings, tokenizer, codec)
        self.engine = Engine(model, batch_size, self.prompts.text_block_len)
        self.warned = False

    @classmethod
    def from_pretrained(
        cls: type[S],
        folder_or_name: str | pathlib.Path,
        batch_size: int = 16,
        *,
        mesh: jax.sharding.Mesh | None = None,
        dtype: str | None = None,
        task: fuse.Task = "both",
    ) -> S:
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
            ValueError: the mesh has axes that are not ours, or there is one together with a task.
        """
        if mesh is not None and task != "both":
            raise ValueError(f"over a mesh all parameters are kept: leave task={task!r} out.")
        _check_is_ours(pathlib.Path(folder_or_name))
        folder = model_folder.find_model(folder_or_name)
        split = None if mesh is None else sharding.over(mesh)
        loaded = model_folder.load_model(folder, sharding=split, dtype=dtype)
        settings = loaded.config
        try:
            tokenizer = _TOKENIZERS[settings.prompts](loaded.tokenizer_path)
            if isinstance(tokenizer, ChatTokenizer):
                tokenizer.check(settings.model)
        except (ValueError, FileNotFoundError) as error:
            raise model_folder.CheckpointError(str(error)) from error
        textual = settings.model.understanding_only
        codec = None if textual else ImageCodec(loaded.vq_folder, settings.model)
        source = Origin(str(folder_or_name), manifest.digest(folder))
        fused = mesh is None and (jax.default_backend() == "gpu" or task != "both")
        model = fuse.for_inference(loaded.model, task=task) if fused else loaded.model
        return cls(model, settings, tokenizer, codec, batch_size, source)

    @property
    def model(self) -> Denoiser:
        """The denoiser."""
        return self.engine.model

    @property
    def batch_size(self) -> int:
        """Most rows that are decoded together."""
        return self.engine.batch_size

    @property
    def encoder(self) -> Encoder:
        """What makes training examples of the small world; a converted LaViDa-O has none."""
        if self.prompts.encoder is None:
            raise config.ConfigError("only models of the small world have its examples.")
        return self.prompts.encoder

    def with_model(self: S, model: Denoiser) -> S:
        """Returns the same pipeline around other parameters."""
        return type(self)(model, self.settings, self.tokenizer, self.codec, self.batch_size)

    def with_sampling(self: S, sampling: config.Sampling) -> S:
        """Returns the same pipeline with other default sampling settings."""
        settings = dataclasses.replace(self.settings, sampling=sampling)
        return type(self)(
            self.model, settings, self.tokenizer, self.codec, self.batch_size, self.source
        )

    def warmup(self, prompt: Words = "a") -> None:
        """Compiles what one image and one short answer need, so that the first is not slow.

        Args:
            prompt: of the lengths that will come; programs are compiled for lengths that are
                rounded up, those of a prompt and of one that is followed by a layout.
        """
        for words in [prompt] if isinstance(prompt, str) else prompt:
            if not self.prompts.refusal("generate"):
                self.generate(words)
            self.decode([self.prompts.ask(words, (), ANSWER_TOKENS)])

    # -- tasks ----------------------------------------------------------------------------

    def generate(
        self,
        prompt: Words,
        *,
        size: tuple[int, int] | None = None,
        callback: Callback | None = None,
        **options: Unpack[ImageOptions],
    ) -> Result:
        """Draws an image of each prompt.

        Args:
            size: height and width in pixels; by default those of the largest image.
            callback: called before the first step and after each segment of what is made
                (`sample.Progress`).
            options: see `ImageOptions`; likewise for all tasks.

        Raises:
            RequestError: an empty or too long prompt, a size or task that the model does not
                know, an option that the task cannot honour.
            ConfigError: sampling settings out of range.
        """
        return self.run(self.requests("generate", prompt, size=size, **options), callback)

    def edit(
        self,
        shown: Shown | Sequence[Shown],
        instruction: Words,
        *,
        callback: Callback | None = None,
        **options: Unpack[ChangeOptions],
    ) -> Result:
        """Changes each image as told; everything else stays.

        Args:
            shown: of any size; what is changed is the image at the size of the model's own.
        """
        return self.run(self.requests("edit", instruction, shown, **options), callback)

    def inpaint(
        self,
        shown: Shown | Sequence[Shown],
        prompt: Words,
        *,
        mask: Any = None,
        box: Sequence[int | float] | None = None,
        known: Grid | Sequence[Grid] | None = None,
        callback: Callback | None = None,
        **options: Unpack[ChangeOptions],
    ) -> Result:
        """Draws a part of each image again; the codes of all other cells stay, bit for bit.

        Args:
            prompt: what the whole image shall show.
            mask: where to draw: an array [h w] or a Pillow image of the size of the image, True
                or white there. A cell that it touches is drawn.
            box: where to draw, in place of a mask: x1, y1, x2, y2 in pixels of the image.
            known: in place of both, the grid of cells to keep, or one for each row.

        Raises:
            ImageError: a mask of another size, a box outside, or both or neither.
        """
        where = {"mask": mask, "box": box, "known": known}
        return self.run(self.requests("inpaint", prompt, shown, **where, **options), callback)

    def outpaint(
        self,
        shown: Shown | Sequence[Shown],
        prompt: Words,
        *,
        box: Sequence[int | float] | None = None,
        known: Grid | Sequence[Grid] | None = None,
        callback: Callback | None = None,
        **options: Unpack[ChangeOptions],
    ) -> Result:
        """Draws what surrounds each image; the codes of its own cells stay, bit for bit.

        Args:
            prompt: what the whole new image shall show.
            box: where the old image stands in the new one, x1, y1, x2, y2 in pixels of the new
                one; by default in its middle, at its own size, or at half the new one's if it is
                larger. Moved outwards to whole cells.
            known: in place of a box, the grid of cells to keep, or one for each row, of images
                that have the size of the new ones.

        Raises:
            ImageError: a box outside, or one that leaves nothing to draw.
        """
        where = {"box": box, "known": known}
        return self.run(self.requests("outpaint", prompt, shown, **where, **options), callback)

    def reflect(
        self,
        prompt: Words,
        *,
        rounds: int = ROUNDS,
        callback: Callback | None = None,
        **options: Unpack[ImageOptions],
    ) -> Result:
        """Draws, judges what it drew, and draws again with what was wrong, until nothing is.

        A model of the small world mends its own image by an edit; a LaViDa-O is shown its
        attempts with what is wrong with each. Prompts are taken one after another.

        Args:
            rounds: most attempts at an image.
        """
        return self.run(self.requests("reflect", prompt, rounds=rounds, **options), callback)

    def ask(
        self,
        shown: Shown | Sequence[Shown] | None,
        question: Words,
        *,
        max_new_tokens: int | None = None,
        callback: Callback | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Answers each question, about the image that goes with it if there is one.

        Args:
            max_new_tokens: rounded up to whole text blocks; by default a short answer.
        """
        more = {"max_new_tokens": max_new_tokens, **options}
        return self.run(self.requests("ask", question, shown, **more), callback)

    def reason(
        self,
        shown: Shown | Sequence[Shown] | None,
        question: Words,
        *,
        max_new_tokens: int | None = None,
        callback: Callback | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Answers each question step by step: as `ask`, with room for a long answer."""
        more = {"max_new_tokens": max_new_tokens, **options}
        return self.run(self.requests("reason", question, shown, **more), callback)

    def caption(
        self,
        shown: Shown | Sequence[Shown],
        *,
        callback: Callback | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Describes each image."""
        return self.run(self.requests("caption", None, shown, **options), callback)

    def constrained_caption(
        self,
        shown: Shown | Sequence[Shown],
        *,
        template: str | None = None,
        words: Sequence[str] = (),
        callback: Callback | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Describes an image in a text that is given in part.

        Args:
            template: the text with gaps (`parse_template`).
            words: required words, in their order; with none missing from a free caption that is
                the answer, otherwise they are put into one with room around each.

        Raises:
            RequestError: neither template nor words, or both.
        """
        more = {"template": template, "required": words or None, **options}
        return self.run(self.requests("constrained_caption", None, shown, **more), callback)

    def infill(
        self,
        text: Words,
        shown: Shown | Sequence[Shown] | None = None,
        *,
        callback: Callback | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Fills the gaps of each text; what stands around a gap, on both sides, is seen.

        Args:
            text: `___` is a gap of one token, `{4}` one of four.
            shown: an image that the text is about.
        """
        return self.run(self.requests("infill", text, shown, **options), callback)

    def ground(
        self,
        shown: Shown,
        phrases: Words,
        *,
        callback: Callback | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Finds things in an image, all of them in parallel.

        Returns:
            A box a phrase, in pixels of the image as it was given.
        """
        return self.run(self.requests("ground", phrases, shown, **options), callback)

    def replay(
        self,
        record: dict[str, Any],
        shown: Shown | None = None,
        *,
        callback: Callback | None = None,
    ) -> Result:
        """Draws an image again, bit for bit on the same device and software.

        Args:
            record: `Result.records`, or `images.read_record` of a PNG.
            shown: the image that it was drawn after; by default the file that it was read from.

        Raises:
            RequestError: a record of another version or checkpoint, or another image.
        """
        if record.get("format") != FORMAT:
            raise RequestError(f"the record has format {record.get('format')!r}, not {FORMAT!r}.")
        theirs = record["checkpoint"]["sha256"]
        if theirs != self.source.sha256:
            raise RequestError(
                f"it was drawn by another checkpoint: {record['checkpoint']['name']} with SHA-256"
                f" {theirs[:12]}, this is {self.source.name} with {self.source.sha256[:12]}."
            )
        task, recipe = record["task"], dict(record["recipe"])
        if task != "reflect":
            recipe["plan"] = False if record["plan"] is None else record["plan"]
        if "known" in recipe:
            recipe["known"] = np.array(recipe["known"], bool)
        sampling = config.build(config.Sampling, record["sampling"])
        seen = recorded_image(record, shown)
        made = self.requests(
            task, record["prompt"], seen, seed=record["seed"], sampling=sampling, **recipe
        )
        bucket = record["bucket"] and Bucket(
            record["bucket"]["rows"], tuple(record["bucket"]["prompt_len"])
        )
        return self.run(made, callback, bucket=bucket)

    # -- requests in, results out ---------------------------------------------------------

    def requests(
        self,
        task: str,
        words: Words | None = None,
        shown: Shown | Sequence[Shown] | None = None,
        **given: Any,
    ) -> list[Request]:
        """Returns what is asked of a task as requests: the one place where they are checked.

        Args:
            task: a key of `requests.TASKS`.
            words: prompt, instruction, question, phrases or text; None where a task has none.
            shown: what the task is about.
            given: its options (`TaskSpec.takes`); None: not given.

        Raises:
            RequestError: the model or the task cannot do it, or words and images do not go
                together.
            ImageError: what is shown is no image, or a mask or a box does not fit it.
            ConfigError: sampling settings out of range.
        """
        given = named(given)
        spec = spec_of(task, given)
        if refusal := self.prompts.refusal(task):
            raise RequestError(refusal)
        if task == "ground" and self.prompts.locates_in_one_step and "steps" in given:
            raise RequestError("ground takes no steps here: this model finds all boxes in one.")
        sampling, columns = self._sampling(spec.draws, given)
        if words is None and spec.words:
            raise RequestError("the prompt is empty: say in words what you want.")
        if shown is not None and not spec.image:
            raise RequestError(f"{task} takes no image.")
        copies = given.get("num_images", 1)
        pairs = paired("caption" if words is None else words, shown, copies)
        if spec.image == "needed" and not pairs[0][1]:
            raise RequestError("this task is about an image: give one.")
        count = len(pairs)
        seeds = row_seeds(given.get("seed", 0), count, copies)
        plans = row_plans(given.get("plan"), count)
        numbers = {name: row_numbers(name, columns[name], count, copies) for name in columns}
        self._check(task, given)
        return [
            Request(
                task=task,
                words=one,
                images=images,
                seed=seeds[i],
                sampling=sampling,
                plan=plans[i],
                **{name: column[i] for name, column in numbers.items()},
                **self._of_task(task, one, images, i, given),
            )
            for i, (one, images) in enumerate(pairs)
        ]

    def run(
        self,
        requests: Sequence[Request],
        callback: Callback | None = None,
        *,
        bucket: Bucket | None = None,
        shared: bool = False,
    ) -> Result:
        """Does what is asked: requests of one task with the same sampling settings.

        Args:
            callback: called before the first step and after each segment (`sample.Progress`).
            bucket: the shapes to pad images to, for `replay`; by default those that fit.
            shared: whether to pad to shapes that many batches share.

        Raises:
            RequestError: several tasks or settings, or none; an image, text or size that the
                model cannot do.
            ConfigError: sampling settings that do not fit the response.
        """
        tasks = {(request.task, request.sampling) for request in requests}
        if len(tasks) != 1:
            raise RequestError("what is run together is of one task, with the same settings.")
        ((task, sampling),) = tasks
        work = _Work(self, sampling or self.settings.sampling, callback, bucket, shared)
        if task == "reflect":
            return self._reflected(work, requests)
        if task == "ground":
            return self._found(work, requests)
        draws = task in ("generate", "edit", "inpaint", "outpaint")
        return self._drawn(work, requests) if draws else self._written(work, requests)

    def decode(
        self,
        examples: Sequence[Example],
        *,
        seed: int | Sequence[int] = 0,
        sampling: config.Sampling | None = None,
        shared: bool = False,
        callback: Callback | None = None,
    ) -> list[Int[np.ndarray, "_l g"]]:
        """Decodes the responses of examples of one kind, for training and benchmarks.

        Examples may differ in response length; those of one length are decoded together.

        Args:
            seed: of the first row, from which the others count on; or one for each.
            shared: whether to pad to shapes that many batches share.
            callback: see `run`.

        Raises:
            ConfigError: more steps than there are tokens.
        """
        rows = [Request(task="", seed=one) for one in row_seeds(seed, len(examples))]
        how = sampling or self.settings.sampling
        done = self.engine.decode(examples, rows, how, shared=shared, callback=callback)
        return done.responses

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

    # -- what a request says, checked -------------------------------------------------------

    def _sampling(
        self, draws: bool, given: dict[str, Any]
    ) -> tuple[config.Sampling, dict[str, Sequence[float | None]]]:
        """Returns the settings that all rows share, and the numbers that are given row by row.

        Says once if the model was never trained for these settings.
        """
        shared, columns = {}, {}
        for name in options.OPTIONS.keys() & given.keys():
            by_row = options.OPTIONS[name].by_row
            if by_row and isinstance(given[name], Sequence):
                columns[name] = given[name]
            else:
                shared[name] = row_numbers(name, given[name], 1)[0] if by_row else given[name]
        sampling = given.get("sampling") or self.settings.sampling
        if shared:
            sampling = options.changed(sampling, draws=draws, **shared)
        preset = presets.untrained(sampling, self.settings.model)
        if preset and not self.warned:
            log.warning("%s", untrained_warning(self.source.name or "this model", preset))
            self.warned = True
        return sampling, columns

    def _check(self, task: str, given: dict[str, Any]) -> None:
        """Checks the numbers and texts of a task's own options."""
        for name in ("rounds", "max_new_tokens"):
            if given.get(name, 1) < 1:
                raise RequestError(f"{name}={given[name]} is out of range: 1 or more.")
        if task == "reflect":
            self.prompts.check_task("generate")
        if task == "constrained_caption" and ("template" in given) == ("required" in given):
            raise RequestError("a constrained caption needs a template or words, one of the two.")

    def _of_task(
        self, task: str, words: str, images: tuple[ShownImage, ...], row: int, given: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the fields of `Request` that a task's own options become for one row."""
        found = {name: given[name] for name in ("rounds", "max_new_tokens") if name in given}
        if task == "generate":
            size = given.get("size")
            grid_of(size, self._codec.image_size, self.settings.model)  # refuses some
            found["size"] = size and tuple(size)
        elif task in ("inpaint", "outpaint") and "known" in given:
            known = np.asarray(given["known"], bool)
            found["known"] = known if known.ndim == 2 else known[row]
        elif task == "inpaint":
            hole = regions.hole(images[0].pixels, given.get("mask"), given.get("box"))
            grid = self.settings.model.grid_size
            found["known"] = regions.untouched(self.prompts.on_canvas(hole), grid)
        elif task == "outpaint":
            found["box"] = regions.inner_box(
                images[0].pixels, given.get("box"), self._codec.image_size, self._cell_side
            )
        elif task == "infill":
            found["template"] = parse_template(words)
        elif task == "constrained_caption" and "template" in given:
            found["template"] = parse_template(given["template"])
        elif task == "constrained_caption":
            found["required"] = tuple(given["required"])
            found["template"] = words_template(found["required"])
        return found

    @property
    def _codec(self) -> ImageCodec:
        assert self.codec is not None  # `check_task` refused
        return self.codec

    @property
    def _cell_side(self) -> int:
        """Pixels a side of a cell."""
        return self._codec.image_size // self.settings.model.grid_size

    # -- images -----------------------------------------------------------------------------

    def _drawn(self, work: "_Work", requests: Sequence[Request]) -> Result:
        """Returns the images of requests."""
        canvases = [self._canvas(request) for request in requests]
        plans = self._layouts(work, requests, canvases)
        examples = [
            self._image_example(canvas, plan)
            for canvas, plan in zip(canvases, plans or [None] * len(requests), strict=True)
        ]
        cells = work.decode("image", examples, requests)
        with work.timed("pixels"):
            pixels = tuple(
                self._codec.decode(one[None], canvas.cells[0], work.sampling.vq_dtype)[0]
                for one, canvas in zip(cells, canvases, strict=True)
            )
        return work.result(requests, tokens=tuple(cells), pixels=pixels, plans=tuple(plans or ()))

    def _canvas(self, request: Request) -> "_Canvas":
        side, grid = self._codec.image_size, self.settings.model.grid_size
        if request.task == "generate":
            cells = grid_of(request.size, side, self.settings.model)
            return _Canvas(request.words, cells)
        image, known = request.pixels, request.known
        canvas = self.prompts.canvas(image, side)
        if request.task == "edit":
            return _Canvas(request.words, (grid, grid), image, canvas)
        if request.box is not None:
            canvas, known = regions.placed(image, request.box, side, self._cell_side)
        assert known is not None
        canvas = self.prompts.erased(canvas, known)
        words = self.prompts.fill_words(request.task, request.words, known)
        return _Canvas(words, (grid, grid), canvas, canvas, known)

    def _layouts(
        self, work: "_Work", requests: Sequence[Request], canvases: Sequence["_Canvas"]
    ) -> list[str] | None:
        """Returns the layout of each image, as given or of the model's own; None: without."""
        task, plans = requests[0].task, [request.plan for request in requests]
        told = [plan for plan in plans if isinstance(plan, str)]
        if told:
            return told
        learned = self.prompts.lays_out(task)
        if plans[0] and not learned:
            raise RequestError(f"this checkpoint was not trained to lay out images of {task!r}.")
        wanted = work.sampling.plan if plans[0] is None else plans[0]
        if not wanted or not learned:
            return None
        examples = [self.prompts.plan(canvas.words, canvas.image) for canvas in canvases]
        return self.texts(work.decode("layout", examples, _seeds(requests)))

    def _image_example(
        self, canvas: "_Canvas", plan: str | None, attempts: Sequence["_Attempt"] = ()
    ) -> Example:
        if canvas.pixels is None:
            shape = math.prod(canvas.cells), self.settings.model.codes_per_token
            blank = np.zeros(shape, np.int32)
            example = self.prompts.draw(canvas.words, blank, plan=plan, attempts=attempts)
        else:
            (codes,) = self._codec.encode(canvas.pixels[None])
            assert canvas.image is not None
            example = self.prompts.change(canvas.words, codes, canvas.image, canvas.known, plan)
        return dataclasses.replace(example, grid=canvas.cells)

    def _reflected(self, work: "_Work", requests: Sequence[Request]) -> Result:
        """Returns the last images of requests, with all attempts and their verdicts."""
        done = [self._reflect(work, request) for request in requests]
        return work.result(
            requests,
            tokens=tuple(cells for cells, _ in done),
            pixels=tuple(attempts[-1][0] for _, attempts in done),
            texts=tuple(attempts[-1][1] for _, attempts in done),
            attempts=tuple(tuple(attempts) for _, attempts in done),
        )

    def _reflect(
        self, work: "_Work", request: Request
    ) -> tuple[Int[np.ndarray, "_l g"], list["_Attempt"]]:
        """Returns the codes of the last image, and all images with their verdicts."""
        attempts: list[_Attempt] = []
        now = dataclasses.replace(request, task="generate")
        while True:
            canvas = self._canvas(now)
            plans = self._layouts(work, [now], [canvas])
            earlier = attempts if now.task == "generate" else ()
            example = self._image_example(canvas, plans[0] if plans else None, earlier)
            (cells,) = work.decode("image", [example], [now])
            (image,) = self._codec.decode(cells[None], dtype=work.sampling.vq_dtype)
            judged = [self.prompts.judge(request.words, image)]
            (verdict,) = self.texts(work.decode("text", judged, _seeds([now])))
            attempts.append((image, verdict.strip()))
            if self.prompts.accepts(verdict.strip()) or len(attempts) == request.rounds:
                return cells, attempts
            seed = (request.seed + len(attempts) * SEED_STRIDE) % LARGEST_SEED
            correction = self.prompts.correction(verdict.strip())
            now = dataclasses.replace(request, task="generate", seed=seed)
            if correction is not None:
                shown = (ShownImage(image),)
                now = dataclasses.replace(now, task="edit", words=correction, images=shown)

    # -- text and boxes ---------------------------------------------------------------------

    def _written(self, work: "_Work", requests: Sequence[Request]) -> Result:
        """Returns the texts of requests."""
        required = requests[0].required
        if required and not self.prompts.refusal("caption"):
            plain = [
                dataclasses.replace(one, task="caption", template=None, required=())
                for one in requests
            ]
            free = self._written(work, plain)
            if all(f" {word.strip()} " in f" {free.text.strip()} " for word in required):
                return dataclasses.replace(free, task=requests[0].task)
        said = work.decode("text", [self._text_example(one) for one in requests], requests)
        texts = (
            self.prompts.text(ids)
            if request.template is None
            else self.prompts.completed(request.template, ids)
            for request, ids in zip(requests, said, strict=True)
        )
        return work.result(
            requests, tokens=tuple(said), texts=tuple(text.strip() for text in texts)
        )

    def _text_example(self, request: Request) -> Example:
        prompts, words, seen = self.prompts, request.words, request.seen
        if request.template is not None:
            words = prompts.fill_in if request.task == "infill" else prompts.describe_in
            return prompts.complete(words, request.template, seen)
        tokens = prompts.answer_tokens if request.task == "ask" else prompts.long_answer_tokens
        if request.task == "caption":
            words = prompts.describe
        return prompts.ask(words, seen, request.max_new_tokens or tokens)

    def _found(self, work: "_Work", requests: Sequence[Request]) -> Result:
        """Returns the boxes of phrases, all of one image."""
        image, named = requests[0].pixels, [request.words for request in requests]
        examples, how = self.prompts.locate(named, image), work.sampling
        if self.prompts.locates_in_one_step:
            how = dataclasses.replace(how, text_steps=1, text_step_ratio=0.0, text_commit="count")
        found = work.decode("text", examples, requests[: len(examples)], how)
        size = image.shape[1], image.shape[0]
        boxes = tuple(self.prompts.boxes(named, found, size))
        return work.result(requests, tokens=tuple(found), boxes=boxes)


# ---------------------------------------------------------------------------------------------
# Helpers.

_Attempt = tuple[Pixels, str]  # an image, and what is wrong with it


@dataclasses.dataclass(frozen=True)
class _Canvas:
    """An image to be drawn, as the model is told of it.

    Attributes:
        words: for example with the box of a hole.
        cells: rows and columns of its grid.
        image: what is shown to the vision tower; None where nothing is shown.
        pixels: what is given as codes, at the size of the image to be drawn.
        known: cells that stay as they are.
    """

    words: str
    cells: tuple[int, int]
    image: Pixels | None = None
    pixels: Pixels | None = None
    known: Grid | None = None


class _Work:
    """Requests while they are done: how, and what it took so far."""

    def __init__(
        self,
        pipe: SparseLaViDa,
        sampling: config.Sampling,
        callback: Callback | None,
        bucket: Bucket | None,
        shared: bool,
    ):
        self.pipe = pipe
        self.sampling = sampling
        self.callback = callback
        self.bucket = bucket
        self.shared = shared
        self.seconds: dict[str, float] = {}
        self.tokens = 0

    def decode(
        self,
        making: str,
        examples: Sequence[Example],
        requests: Sequence[Request],
        sampling: config.Sampling | None = None,
    ) -> list[Int[np.ndarray, "_l g"]]:
        """Decodes examples, and keeps the bucket that images were decoded in."""
        with self.timed(making):
            decoded = self.pipe.engine.decode(
                examples,
                requests,
                sampling or self.sampling,
                making=making,
                bucket=self.bucket if making == "image" else None,
                shared=self.shared,
                callback=self.callback,
            )
        if making == "image":
            self.bucket = decoded.bucket
        self.tokens += decoded.tokens
        return decoded.responses

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds what a stage takes to `seconds`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begin

    def result(self, requests: Sequence[Request], **found: Any) -> Result:
        """Returns what was found, with the records of images."""
        records = ()
        if "pixels" in found:
            plans = found.get("plans") or [None] * len(requests)
            records = tuple(map(self._record, requests, plans))
        return Result(
            requests[0].task,
            tuple(request.words for request in requests),
            tuple(request.seed for request in requests),
            self.sampling,
            self.pipe.source,
            self.seconds,
            records=records,
            tokens_passed=self.tokens,
            **found,
        )

    def _record(self, request: Request, plan: str | None) -> dict[str, Any]:
        """Returns what `replay` needs, for `json`."""
        reflects = request.task == "reflect"
        known = None if request.known is None else np.asarray(request.known).tolist()
        recipe: dict[str, Any] = {
            "generate": lambda: {"size": None if request.size is None else list(request.size)},
            "edit": dict,
            "inpaint": lambda: {"known": known},
            "outpaint": lambda: {"box": list(request.box)} if request.box else {"known": known},
            "reflect": lambda: {"rounds": request.rounds, "plan": request.plan},
        }[request.task]()
        bucket = None if reflects or self.bucket is None else dataclasses.asdict(self.bucket)
        return {
            "format": FORMAT,
            "task": request.task,
            "prompt": request.words,
            "seed": request.seed,
            "recipe": recipe,
            "plan": plan,
            "picture": request.images[0].as_json() if request.images else None,
            "bucket": bucket,
            "sampling": dataclasses.asdict(of_row(self.sampling, request)),
            "checkpoint": dataclasses.asdict(self.pipe.source),
            "software": {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
        }


def _seeds(requests: Sequence[Request]) -> list[Request]:
    """Returns requests of which only the seeds are left: for text about an image to be drawn."""
    return [Request(task="", seed=request.seed) for request in requests]


def untrained_warning(name: str, preset: str) -> str:
    """Returns what to say where a model that knows full attention alone is sampled sparsely."""
    return (
        f"{name} was never trained sparsely, so the sampler {preset!r} will draw badly: fine-tune"
        " it first (`sparse-lavida train`)."
    )


_TOKENIZERS = {"scenes": Tokenizer, "chat": ChatTokenizer}


def _prompts(
    settings: config.Config, tokenizer: Tokenizer | ChatTokenizer, codec: ImageCodec | None
) -> ScenePrompts | ChatPrompts:
    """Returns the language of prompts that a configuration names."""
    if isinstance(tokenizer, ChatTokenizer):
        return ChatPrompts(tokenizer, settings.model, codec.factor if codec else 1)
    assert codec is not None
    return ScenePrompts(encoder_of(tokenizer, settings, codec))


def _check_is_ours(folder: pathlib.Path) -> None:
    """Refuses a released PyTorch folder, and says what to do with it."""
    if any(folder.glob("*.safetensors*")) and not (folder / "params").is_dir():
        raise model_folder.CheckpointError(
            f"{folder} is a PyTorch folder: convert it first, with"
            f" `sparse-lavida convert {folder} MODEL`, and give the MODEL folder."
        )
