# SPDX-License-Identifier: Apache-2.0
"""Requests in, results out: how each task is done."""

import collections
import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import __version__, config, sequence
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.inference import batch_shapes
from sparse_lavida_jax.inference.batch_shapes import Bucket, Padding
from sparse_lavida_jax.inference.engine import Engine, SampleOutput, planned_counts
from sparse_lavida_jax.inference.requests import (
    TASK_SPECS,
    DrawnLayout,
    Grid,
    Pixels,
    Request,
    ShownImage,
    are_branches,
    grid_of,
)
from sparse_lavida_jax.inference.results import FORMAT, SAMPLER_VERSION, SHOWN_KEY, Origin, Result
from sparse_lavida_jax.inference.revision import revised
from sparse_lavida_jax.programs import side_by_side
from sparse_lavida_jax.programs.persistent_jit import Programs
from sparse_lavida_jax.prompting.gaps import template_text
from sparse_lavida_jax.prompting.protocol import PromptFormat
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.sampling.content_cache import digest
from sparse_lavida_jax.sampling.presets import RowRequest
from sparse_lavida_jax.sampling.progress import Callback, Progress

_Attempt = tuple[Pixels, str]  # an image, and what is wrong with it


@dataclasses.dataclass(frozen=True)
class _ImagePrompt:
    """What an image is drawn from.

    Attributes:
        words: with the box of the mask, for example.
        cells: rows and columns of its grid.
        image: what the vision tower sees; None: nothing.
        pixels: what is given as codes, at the size of the image to be drawn.
        mask: cells to redraw; None: all.
    """

    words: str
    cells: tuple[int, int]
    image: Pixels | None = None
    pixels: Pixels | None = None
    mask: Grid | None = None


@dataclasses.dataclass(frozen=True)
class DrawnImage:
    """An image, the request that drew it, and what the model said about it, if it was asked."""

    request: Request
    cells: Int[np.ndarray, "_l g"]
    pixels: Pixels
    layout: str | None
    bucket: Bucket
    verdict: str = ""


def _made(make: Callable[..., Example], given: Iterable[tuple[Any, ...]]) -> list[Example]:
    """Returns the example of each tuple of arguments; tuples of the same objects share one."""
    rows = [*given]
    made = {tuple(map(id, row)): row for row in rows}
    examples = {key: make(*row) for key, row in made.items()}
    return [examples[tuple(map(id, row))] for row in rows]


def _of_rows(callback: Callback | None, rows: Sequence[int]) -> Callback | None:
    """Returns a callback that gets the numbers of requests in place of those of examples."""
    if callback is None:
        return None

    def told(state: Progress) -> None:
        callback(dataclasses.replace(state, rows=tuple(rows[i] for i in state.rows)))

    return told


@dataclasses.dataclass
class TaskRun:
    """Requests of one task while they are being done: settings, and measurements so far.

    Attributes:
        engine, settings, prompts, codec, source: of the pipeline.
        sampling: for all requests, except for settings of single requests.
        callback, bucket, padding, programs: see `SparseLaViDa.run`.
        seconds: the time of each stage.
        rows: the request of each example, if not all requests are done together.
        buckets: of the images sampled last.
        tokens, layout_tokens: the number passed through the network for each request.
        shared: how many of both stand for later requests too, which do not count them.
        prompted: tokens in each request's first prompt (`Result.prompted`).
        layouts: how those that this run wrote were drawn.
    """

    engine: Engine
    settings: config.Config
    prompts: PromptFormat
    codec: Any
    source: Origin
    sampling: config.Sampling
    callback: Callback | None
    bucket: Bucket | None
    padding: Padding
    programs: Programs
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    rows: Sequence[int] = ()
    buckets: list[Bucket] = dataclasses.field(default_factory=list)
    tokens: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    layout_tokens: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    shared: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    prompted: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    layouts: dict[int, DrawnLayout] = dataclasses.field(default_factory=dict)

    def run(self, requests: Sequence[Request]) -> Result:
        """Does the requests, which are all of one task."""
        does = {"reflect": self.reflect, "ground": self.find_boxes}
        by_kind = self.draw_images if TASK_SPECS[requests[0].task].draws else self.write_texts
        return does.get(requests[0].task, by_kind)(requests)

    def sample(
        self,
        stage: str,
        examples: Sequence[Example],
        requests: Sequence[RowRequest],
        sampling: config.Sampling | None = None,
    ) -> list[Int[np.ndarray, "_l g"]]:
        """Samples examples, and records the buckets in which images were sampled."""
        if stage == "image" and self.bucket is not None:
            for one in examples:
                own = sum(sequence.prompt_tokens(one.parts)) + one.given.size
                batch_shapes.check(self.bucket, own + self.prompts.longest)
        rows = self.rows or range(len(examples))
        sampling = sampling or self.sampling

        def sample(numbers: Sequence[int], *given: Any, **options: Any) -> SampleOutput:
            told = _of_rows(self.callback, [rows[i] for i in numbers])
            options |= {"padding": self.padding, "callback": told, "programs": self.programs}
            return self.engine.sample(*given, **options)

        with self.timed(stage):
            bucket, everyone = self.bucket if stage == "image" else None, range(len(examples))
            how = {"stage": stage, "bucket": bucket}
            sampled = sample(everyone, examples, requests, sampling, **how)
            if stage == "image" and sampling.revisions:
                sampled = revised(sample, examples, requests, sampling, sampled)
        if stage == "image":
            self.buckets = sampled.buckets
        if stage == "layout":
            pairs = zip(sampled.drawn, sampled.decoded_at, strict=True)
            drawn = [(tuple(ids[:, 0].tolist()), tuple(at.tolist())) for ids, at in pairs]
            self.layouts |= zip(rows, drawn, strict=False)  # nothing, if nothing was drawn
        tokens = self.layout_tokens if stage == "layout" else self.tokens
        for i, (row, one) in enumerate(zip(rows, examples, strict=True)):
            tokens[row] += sampled.tokens[i]
            self.shared[row] += sampled.shared[i]
            self.prompted.setdefault(row, sequence.prompt_tokens(one.parts))
        return sampled.responses

    def tell(self, stage: str, passes: int, total: int) -> None:
        """Tells the callback how many passes over whole plans are done; they draw nothing."""
        if self.callback is not None:
            responses, decoded_at = np.zeros((0, 0, 1), np.int32), np.zeros((0, 0), np.int32)
            self.callback(Progress(stage, passes, total, responses, decoded_at, range(0), -1))

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the time of a stage to `seconds`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begin

    def result(self, requests: Sequence[Request], **found: Any) -> Result:
        """Returns the result, with the records of images."""
        records = ()
        if "pixels" in found:
            none = [None] * len(requests)
            layouts = found.get("layouts") or none
            buckets = none if requests[0].task == "reflect" else self.buckets
            records = tuple(map(self._record, requests, layouts, buckets))
            parts = zip(records, requests, found["tokens"], strict=True)
            for row, (record, request, codes) in enumerate(parts):
                own = self.layouts if request.task != "reflect" else {}
                drawn = own.get(row) or request.drawn_layout or ((), ())
                record |= {"codes": codes.tolist()}
                record |= dict(zip(("layout_tokens", "decoded_at"), map(list, drawn), strict=True))
        asked, seeds, sentences, warnings = zip(
            *[(one.asked or one.words, one.seed, one.words, one.warning) for one in requests],
            strict=True,
        )
        counts = self.tokens, self.layout_tokens, self.shared
        passed, layout_passed, shared = (
            tuple(one[row] for row in range(len(requests))) for one in counts
        )
        prompted = tuple(self.prompted.get(row, (0, 0)) for row in range(len(requests)))
        return Result(
            requests[0].task,
            asked,
            seeds,
            self.sampling,
            self.source,
            self.seconds,
            records=records,
            sentences=sentences,
            warnings=warnings,
            prompted=prompted,
            passed=passed,
            layout_passed=layout_passed,
            shared=shared,
            **found,
        )

    def _record(
        self, request: Request, layout: str | None, bucket: Bucket | None
    ) -> dict[str, Any]:
        """Returns what `replay` needs, for `json`."""
        known = None if request.mask is None else (~request.mask).tolist()
        recipe: dict[str, Any] = {
            "generate": lambda: {"size": None if request.size is None else list(request.size)},
            "edit": dict,
            "inpaint": lambda: {"known": known},
            "outpaint": lambda: {"box": list(request.box)} if request.box else {"known": known},
            "reflect": lambda: {"rounds": request.rounds, "layout": request.layout},
        }[request.task]()
        if request.attempt and request.task != "reflect":
            recipe["attempt"] = request.attempt
        if request.style_seed is not None:
            recipe["style_seed"] = request.style_seed
        if request.template is not None:
            recipe["gaps"] = template_text(request.template)
        return {
            "format": FORMAT,
            "sampler": SAMPLER_VERSION,
            "task": request.task,
            "prompt": request.words,
            "asked": request.asked,
            "seed": request.seed,
            "turns": [list(turn) for turn in request.turns],
            "recipe": recipe,
            "layout": layout,
            SHOWN_KEY: request.images[0].as_json() if request.images else None,
            "bucket": None if bucket is None else dataclasses.asdict(bucket),
            "sampling": dataclasses.asdict(request.own_sampling),
            "checkpoint": dataclasses.asdict(self.source),
            "attention": self.engine.constants.attention,
            "step": self.engine.constants.step,
            "version": __version__,
            "software": {
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
                "dtype": self.engine.model.settings.compute_dtype,
            },
        }

    # -- images -----------------------------------------------------------------------------

    def draw_images(self, requests: Sequence[Request]) -> Result:
        """Draws the images of requests; those with `best_of` until the model accepts them.

        If it accepts none, the last one is returned: another ranking of the tries belongs here.
        """
        drawn: dict[int, DrawnImage] = {}
        rows, judges = [*range(len(requests))], any(one.best_of > 1 for one in requests)
        while rows:
            self.rows, tries = rows, [requests[i] for i in rows]
            if drawn:
                tries = [dataclasses.replace(one.request, attempt=one.request.attempt + 1)
                         for one in map(drawn.__getitem__, rows)]  # fmt: skip
            drawn |= zip(rows, self.try_images(tries, judges=judges), strict=True)
            rows = [i for i in rows if self._is_open(requests[i], drawn[i])]
        images = [drawn[i] for i in range(len(requests))]
        self.rows, self.buckets = (), [one.bucket for one in images]
        layouts = [one.layout for one in images if one.layout is not None]
        found: dict[str, Any] = {"layouts": tuple(layouts)}
        if judges:
            found["texts"] = tuple(one.verdict for one in images)
            first = [one.attempt for one in requests]
            tries = zip(images, first, strict=True)
            found["tries"] = tuple(one.request.attempt - attempt + 1 for one, attempt in tries)
        return self.result(
            [one.request for one in images],
            tokens=tuple(one.cells for one in images),
            pixels=tuple(one.pixels for one in images),
            **found,
        )

    def _is_open(self, request: Request, drawn: DrawnImage) -> bool:
        """Whether an image is drawn once more."""
        tries = drawn.request.attempt - request.attempt + 1
        return tries < request.best_of and not self.prompts.accepts(drawn.verdict)

    def try_images(self, requests: Sequence[Request], *, judges: bool) -> list[DrawnImage]:
        """Draws an image for each request; `judges` says whether the model judges them."""
        prompts = self._image_prompts(requests)
        if side_by_side.are_made_ahead():
            for cells in {prompt.cells for prompt in prompts}:  # while the model's are made
                self.codec.pixel_programs(cells, self.sampling.vq_dtype)
        layouts = self._layouts(requests, prompts) or [None] * len(requests)
        pairs = zip(prompts, layouts, strict=True)
        cells = self.sample("image", _made(self._image_example, pairs), requests)
        pixels: list[Pixels] = []
        with self.timed("pixels"):
            pairs = zip(prompts, cells, strict=True)
            for (rows, _), group in itertools.groupby(pairs, lambda pair: pair[0].cells):
                own = np.stack([one for _, one in group])
                pixels.extend(self.codec.to_pixels(own, rows, self.sampling.vq_dtype))
        buckets, verdicts = self.buckets, [""] * len(requests)
        if judges:
            verdicts = self.verdicts(requests, pixels)
        rows = zip(requests, cells, pixels, layouts, buckets, verdicts, strict=True)
        return [DrawnImage(*row) for row in rows]

    def verdicts(self, requests: Sequence[Request], images: Sequence[Pixels]) -> list[str]:
        """Returns what the model says is wrong with images, if anything."""
        pairs = zip(requests, images, strict=True)
        judged = [self.prompts.judge(request.words, image) for request, image in pairs]
        said = self._about_images("text", judged, requests, as_layout=False)
        return [self.prompts.text(ids).strip() for ids in said]

    def _image_prompts(self, requests: Sequence[Request]) -> list[_ImagePrompt]:
        """Returns the prompt of each image; branches of one image share theirs."""
        if requests[0].turns and are_branches(requests):
            return [self._image_prompt(requests[0])] * len(requests)
        return [self._image_prompt(request) for request in requests]

    def step_counts(self, request: Request, stage: str) -> list[int]:
        """Returns how many tokens each step of a stage of an image decodes, as planned.

        Args:
            request: for the stage "image", with the layout to follow, or without any.
        """
        if stage == "layout":
            example, _, how = self.layout_example(request)
        else:
            example, how = self.image_example(request, blank=True), self.sampling
        block = how.text.block_len or self.prompts.text_block_len
        return planned_counts(self.settings.model, how, example, request, block)

    def image_example(self, request: Request, *, blank: bool = False) -> Example:
        """Returns what draws the image of a request, after its layout if that is in words."""
        layout = request.layout if isinstance(request.layout, str) else None
        return self._image_example(self._image_prompt(request), layout, blank=blank)

    def layout_example(self, request: Request) -> tuple[Example, RowRequest, config.Sampling]:
        """Returns what writes the layout of a request, and how it is sampled."""
        prompt = self._image_prompt(request)
        how = self._text_sampling(as_layout=request.task != "edit")
        row = dataclasses.replace(request, **presets.scales(how, "text"))
        example = self.prompts.layout(prompt.words, prompt.image, request.template)
        return example, row, how

    def layout_text(self, request: Request, ids: Int[np.ndarray, "_l 1"]) -> str:
        """Returns a layout that was written; one with gaps ends where the text with them ends."""
        if request.template is not None:
            ids = ids[: len(self.prompts.template_ids(request.template)[0])]
        return self.prompts.text(ids)

    def _image_prompt(self, request: Request) -> _ImagePrompt:
        side, grid = self.codec.image_size, self.settings.model.grid_size
        if request.task == "generate":
            cells = grid_of(request.size, side, self.settings.model)
            return _ImagePrompt(request.words, cells)
        image, mask = request.pixels, request.mask
        source = self.prompts.codec_image(image, side)
        if request.task == "edit":
            return _ImagePrompt(request.words, (grid, grid), image, source)
        if request.box is not None:
            from sparse_lavida_jax.inference import regions  # other tasks do without

            source, mask = regions.placed(image, request.box, side, side // grid)
        assert mask is not None
        source = self.prompts.erased(source, mask)
        words = self.prompts.fill_words(request.task, request.words, mask)
        return _ImagePrompt(words, (grid, grid), source, source, mask)

    def _layouts(
        self, requests: Sequence[Request], prompts: Sequence[_ImagePrompt]
    ) -> list[str] | None:
        """Returns the layout of each image, given or by the model; None: without layouts."""
        task, asked = requests[0].task, [request.layout for request in requests]
        told = [layout for layout in asked if isinstance(layout, str)]
        if told:
            return told
        learned = self.prompts.lays_out(task)
        if asked[0] and not learned:
            raise RequestError(f"this checkpoint was not trained to lay out images of {task!r}.")
        if getattr(self.engine.model, "task", "both") == "image":  # `fuse.for_inference`
            if asked[0]:
                raise RequestError("parameters for images alone write no layout: use task='both'.")
            return None
        wanted = self.sampling.layout if asked[0] is None else asked[0]
        if not wanted or not learned:
            return None
        shown = (
            (prompt.words, prompt.image, request.template)
            for prompt, request in zip(prompts, requests, strict=True)
        )
        examples = _made(self.prompts.layout, shown)
        as_layout = task != "edit"  # edits use the temperature of other texts
        said = self._about_images("layout", examples, requests, as_layout=as_layout)
        return [*map(self.layout_text, requests, said)]

    def _about_images(
        self,
        stage: str,
        examples: Sequence[Example],
        requests: Sequence[Request],
        *,
        as_layout: bool,
    ) -> list[Int[np.ndarray, "_l 1"]]:
        """Returns the ids of texts about images to be drawn: layouts or verdicts.

        Args:
            as_layout: whether to use the temperature of layouts.
        """
        how = self._text_sampling(as_layout=as_layout)
        rows = [dataclasses.replace(one, **presets.scales(how, "text")) for one in requests]
        return self.sample(stage, examples, rows, how)

    def _text_sampling(self, *, as_layout: bool) -> config.Sampling:
        """Returns the settings of texts about images to be drawn; see `_about_images`."""
        how, changes = self.sampling, {}
        if how.layout_block_len:
            changes["block_len"] = how.layout_block_len
        if as_layout and how.layout_temperature >= 0:
            changes["temperature"] = how.layout_temperature
        return config.changed(how, {"text": changes})

    def _image_example(
        self,
        prompt: _ImagePrompt,
        layout: str | None,
        attempts: Sequence[_Attempt] = (),
        *,
        blank: bool = False,
    ) -> Example:
        """Returns the example that draws an image; `blank` leaves out the codes of its source."""
        codes = np.zeros((math.prod(prompt.cells), self.settings.model.codes_per_token), np.int32)
        if prompt.pixels is None:
            more = {"layout": layout, "attempts": attempts, "grid": prompt.cells}
            example = self.prompts.draw(prompt.words, codes, **more)
        else:
            codes = codes if blank else self._codes(prompt.pixels)
            assert prompt.image is not None
            example = self.prompts.change(prompt.words, codes, prompt.image, prompt.mask, layout)
        return dataclasses.replace(example, grid=prompt.cells)

    def _codes(self, pixels: Pixels) -> Int[np.ndarray, "l g"]:
        """Returns the codes of the cells of an image, read-only."""
        cache = self.engine.content_cache
        names = [(self.codec, digest(pixels) if cache.most_bytes else "")]
        found = cache.get("codes", names)
        if found is None:
            found = tuple(self.codec.encode(pixels[None]))
            found[0].setflags(write=False)
            cache.add("codes", names, found)
        return found[0]

    def reflect(self, requests: Sequence[Request]) -> Result:
        """Draws and judges images; returns the last ones, with all attempts and their verdicts."""
        done = []
        for row, request in enumerate(requests):
            self.rows = [row]
            done.append(self._reflect(request))
        return self.result(
            requests,
            tokens=tuple(cells for cells, _ in done),
            pixels=tuple(attempts[-1][0] for _, attempts in done),
            texts=tuple(attempts[-1][1] for _, attempts in done),
            attempts=tuple(tuple(attempts) for _, attempts in done),
        )

    def _reflect(self, request: Request) -> tuple[Int[np.ndarray, "_l g"], list[_Attempt]]:
        """Returns the codes of the last image, and all images with their verdicts."""
        attempts: list[_Attempt] = []
        now = dataclasses.replace(request, task="generate")
        while True:
            prompt = self._image_prompt(now)
            layouts = self._layouts([now], [prompt])
            earlier = attempts if now.task == "generate" else ()
            example = self._image_example(prompt, layouts[0] if layouts else None, earlier)
            (cells,) = self.sample("image", [example], [now])
            (image,) = self.codec.to_pixels(cells[None], dtype=self.sampling.vq_dtype)
            (verdict,) = self.verdicts([dataclasses.replace(now, words=request.words)], [image])
            attempts.append((image, verdict))
            if self.prompts.accepts(verdict) or len(attempts) == request.rounds:
                return cells, attempts
            correction = self.prompts.correction(verdict)
            now = dataclasses.replace(request, task="generate", attempt=len(attempts))
            if correction is not None:
                shown = (ShownImage(image),)
                now = dataclasses.replace(now, task="edit", words=correction, images=shown)

    # -- text and boxes ---------------------------------------------------------------------

    def write_texts(self, requests: Sequence[Request]) -> Result:
        """Writes the texts of requests."""
        required = requests[0].required
        if required and not self.prompts.refusal("caption"):
            plain = [
                dataclasses.replace(one, task="caption", template=None, required=())
                for one in requests
            ]
            free = self.write_texts(plain)
            if all(f" {word.strip()} " in f" {free.text.strip()} " for word in required):
                return dataclasses.replace(free, task=requests[0].task)
        said = self.sample("text", [self._text_example(one) for one in requests], requests)
        texts = (
            self.prompts.answer(ids)
            if request.template is None
            else self.prompts.completed(request.template, ids)
            for request, ids in zip(requests, said, strict=True)
        )
        return self.result(
            requests, tokens=tuple(said), texts=tuple(text.strip() for text in texts)
        )

    def _text_example(self, request: Request) -> Example:
        prompts, words, seen = self.prompts, request.words, request.seen
        if request.template is not None:
            asked = {"infill": prompts.fill_in, "constrained_caption": prompts.describe_in}
            return prompts.complete(asked.get(request.task, words), request.template, seen)
        tokens = prompts.answer_tokens if request.task == "ask" else prompts.long_answer_tokens
        if request.task == "caption":
            words = prompts.describe
        return prompts.ask(words, seen, request.max_new_tokens or tokens, request.earlier)

    def find_boxes(self, requests: Sequence[Request]) -> Result:
        """Finds the boxes of phrases, all in one image."""
        image, named = requests[0].pixels, [request.words for request in requests]
        examples, how = self.prompts.locate(named, image), self.sampling
        if self.prompts.locates_in_one_step:
            how = presets.one_pass(how, self.settings.model, len(examples[0].response))
        found = self.sample("text", examples, requests[: len(examples)], how)
        size = image.shape[1], image.shape[0]
        boxes = tuple(self.prompts.boxes(named, found, size))
        return self.result(requests, tokens=tuple(found), boxes=boxes)
