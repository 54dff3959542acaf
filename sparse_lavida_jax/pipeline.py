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
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.templates import RequestError, Template, parse_template, words_template
from sparse_lavida_jax.inference.batching import LARGEST_SEED, Bucket, Numbers
from sparse_lavida_jax.inference.engine import Engine, Grid, Pixels
from sparse_lavida_jax.inference.requests import (
    Drawing,
    Row,
    Shown,
    grid_of,
    hole,
    inner_box,
    placed,
    recorded_image,
    rows_of,
    squared,
    untouched,
)
from sparse_lavida_jax.inference.results import FORMAT, Result
from sparse_lavida_jax.lavida_o.prompts import ChatPrompts
from sparse_lavida_jax.sample import OnSegment
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.scenes.prompts import ANSWER_TOKENS

__all__ = ["ANSWER_TOKENS", "SparseLaViDa"]

Words = str | Sequence[str]

log = logging.getLogger(__name__)

SEED_STRIDE = 1_000_003  # between the rounds of "reflect", so that rows do not share noise
ROUNDS = 3


class SparseLaViDa(Engine):
    """A model with its tokenizers, settings and tasks; made by `from_pretrained`.

    Attributes:
        warned: whether it was said that the model was never trained for what was asked.
    """

    warned = False

    def warmup(self, prompt: Words = "a") -> None:
        """Compiles what one image and one short answer need, so that the first is not slow.

        Args:
            prompt: of the lengths that will come; programs are compiled for lengths that are
                rounded up, those of a prompt and of one with a layout behind it.
        """
        for words in [prompt] if isinstance(prompt, str) else prompt:
            if self.codec is not None:
                self.draw([words])
            self.write([words])

    # -- tasks: images --------------------------------------------------------------------

    def generate(
        self,
        prompt: Words,
        *,
        num_images: int = 1,
        size: tuple[int, int] | None = None,
        plan: bool | Words | None = None,
        seed: int | Sequence[int] = 0,
        temperature: Numbers = None,
        guidance: Numbers = None,
        sampling: config.Sampling | None = None,
        on_segment: OnSegment | None = None,
    ) -> Result:
        """Draws an image of each prompt.

        Args:
            num_images: of each prompt.
            size: height and width in pixels; by default those of the largest image.
            plan: whether to lay the image out in text first, or the layout to follow; None: as
                the sampling settings say, where the model learned it.
            seed: of the first row, the others count on; or one for each row.
            temperature, guidance: of all rows, or one for each; None: as the sampling settings say.
            on_segment: called between segments with what is there (`sample.Progress`).

        Raises:
            RequestError: an empty or too long prompt, a size or task that the model does not know.
            ConfigError: sampling settings out of range.
        """
        own = {"temperature": temperature, "guidance": guidance}
        rows = self._rows("generate", prompt, None, num_images, seed, **own)
        recipes = [{"size": None if size is None else list(size)} for _ in rows]
        return self._paint("generate", rows, recipes, plan, sampling, on_segment)

    def edit(
        self,
        shown: Shown | Sequence[Shown],
        instruction: Words,
        *,
        num_images: int = 1,
        plan: bool | Words | None = None,
        seed: int | Sequence[int] = 0,
        temperature: Numbers = None,
        guidance: Numbers = None,
        guidance_image: Numbers = None,
        sampling: config.Sampling | None = None,
        on_segment: OnSegment | None = None,
    ) -> Result:
        """Changes each image as told; everything else stays. See `generate`.

        Args:
            shown: of any size; what is changed is the image at the size of the model's own.
        """
        own = {"temperature": temperature, "guidance": guidance, "guidance_image": guidance_image}
        rows = self._rows("edit", instruction, shown, num_images, seed, **own)
        return self._paint("edit", rows, [{} for _ in rows], plan, sampling, on_segment)

    def inpaint(
        self,
        shown: Shown | Sequence[Shown],
        prompt: Words,
        *,
        mask: Any = None,
        box: Sequence[int | float] | None = None,
        num_images: int = 1,
        plan: bool | Words | None = None,
        seed: int | Sequence[int] = 0,
        temperature: Numbers = None,
        guidance: Numbers = None,
        guidance_image: Numbers = None,
        sampling: config.Sampling | None = None,
        on_segment: OnSegment | None = None,
    ) -> Result:
        """Draws a part of each image anew; the codes of all other cells stay, bit for bit.

        Args:
            prompt: what the whole image shall show.
            mask: where to draw: an array [h w] or a Pillow image of the size of the image, True
                or white there. A cell that it touches is drawn.
            box: where to draw, in place of a mask: x1, y1, x2, y2 in pixels of the image.

        Raises:
            ImageError: a mask of another size, a box outside, or both or neither.
        """
        own = {"temperature": temperature, "guidance": guidance, "guidance_image": guidance_image}
        rows = self._rows("inpaint", prompt, shown, num_images, seed, **own)
        recipes = [{"known": self._kept(row.pixels, mask, box).tolist()} for row in rows]
        return self._paint("inpaint", rows, recipes, plan, sampling, on_segment)

    def outpaint(
        self,
        shown: Shown | Sequence[Shown],
        prompt: Words,
        *,
        box: Sequence[int | float] | None = None,
        num_images: int = 1,
        plan: bool | Words | None = None,
        seed: int | Sequence[int] = 0,
        temperature: Numbers = None,
        guidance: Numbers = None,
        guidance_image: Numbers = None,
        sampling: config.Sampling | None = None,
        on_segment: OnSegment | None = None,
    ) -> Result:
        """Draws what surrounds each image; the codes of its own cells stay, bit for bit.

        Args:
            prompt: what the whole new image shall show.
            box: where the old image stands in the new one, x1, y1, x2, y2 in pixels of the new
                one; by default in its middle, at its own size, or at half the new one's if it is
                larger. Moved outwards to whole cells.

        Raises:
            ImageError: a box outside, or one that leaves nothing to draw.
        """
        own = {"temperature": temperature, "guidance": guidance, "guidance_image": guidance_image}
        rows = self._rows("outpaint", prompt, shown, num_images, seed, **own)
        recipes = [{"box": self._inner_box(row.pixels, box)} for row in rows]
        return self._paint("outpaint", rows, recipes, plan, sampling, on_segment)

    def reflect(
        self,
        prompt: Words,
        *,
        rounds: int = ROUNDS,
        num_images: int = 1,
        plan: bool | str | None = None,
        seed: int | Sequence[int] = 0,
        temperature: Numbers = None,
        guidance: Numbers = None,
        sampling: config.Sampling | None = None,
        on_segment: OnSegment | None = None,
    ) -> Result:
        """Draws, judges what it drew, and draws again with what was wrong, until nothing is.

        A model of the small world mends its own image by an edit; a LaViDa-O is shown its
        attempts with what is wrong with each. Prompts are taken one after another.

        Args:
            rounds: most attempts at an image.
            num_images: of each prompt.
        """
        if rounds < 1:
            raise RequestError(f"{rounds=} is out of range: 1 or more.")
        own = {"temperature": temperature, "guidance": guidance}
        rows = self._rows("reflect", prompt, None, num_images, seed, **own)
        self.prompts.check_task("generate")
        sampling, seconds = self._asked(sampling), {}
        done = [
            self._reflect(row, rounds, plan, row.own.of_image(sampling), seconds, on_segment)
            for row in rows
        ]
        records = tuple(
            self._record("reflect", row, {"rounds": rounds, "plan": plan}, sampling, None, None)
            for row in rows
        )
        return self._result(
            "reflect", rows, sampling, seconds,
            tokens=tuple(cells for cells, _ in done),
            pixels=tuple(attempts[-1][0] for _, attempts in done),
            texts=tuple(attempts[-1][1] for _, attempts in done),
            attempts=tuple(attempts for _, attempts in done),
            records=records,
        )  # fmt: skip

    def replay(self, record: dict[str, Any], shown: Shown | None = None) -> Result:
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
        task, sampling = record["task"], config.build(config.Sampling, record["sampling"])
        if task == "reflect":
            return self.reflect(
                record["prompt"], **record["recipe"], seed=record["seed"], sampling=sampling
            )
        rows = self._rows(task, record["prompt"], recorded_image(record, shown), 1, record["seed"])
        bucket = Bucket(record["bucket"]["rows"], tuple(record["bucket"]["prompt_len"]))
        plan = False if record["plan"] is None else record["plan"]
        return self._paint(task, rows, [record["recipe"]], plan, sampling, None, bucket)

    # -- tasks: text and boxes --------------------------------------------------------------

    def ask(
        self,
        shown: Shown | Sequence[Shown] | None,
        question: Words,
        *,
        max_new_tokens: int | None = None,
        seed: int | Sequence[int] = 0,
        temperature: Numbers = None,
        sampling: config.Sampling | None = None,
    ) -> Result:
        """Answers each question, about the image that goes with it if there is one.

        Args:
            max_new_tokens: rounded up to whole text blocks; by default a short answer.
            temperature: of all rows, or one for each; None: as the sampling settings say.
        """
        tokens = self.prompts.answer_tokens if max_new_tokens is None else max_new_tokens
        return self._answer("ask", shown, question, tokens, seed, temperature, sampling)

    def reason(
        self,
        shown: Shown | Sequence[Shown] | None,
        question: Words,
        *,
        max_new_tokens: int | None = None,
        seed: int | Sequence[int] = 0,
        temperature: Numbers = None,
        sampling: config.Sampling | None = None,
    ) -> Result:
        """Answers each question step by step: as `ask`, with room for a long answer."""
        tokens = self.prompts.long_answer_tokens if max_new_tokens is None else max_new_tokens
        return self._answer("reason", shown, question, tokens, seed, temperature, sampling)

    def caption(
        self,
        shown: Shown | Sequence[Shown],
        *,
        seed: int | Sequence[int] = 0,
        temperature: Numbers = None,
        sampling: config.Sampling | None = None,
    ) -> Result:
        """Describes each image."""
        rows = self._rows("caption", "caption", shown, 1, seed, temperature=temperature)
        examples = [self.prompts.caption(row.pixels) for row in rows]
        return self._say("caption", rows, examples, sampling)

    def constrained_caption(
        self,
        shown: Shown,
        *,
        template: str | None = None,
        words: Sequence[str] = (),
        seed: int = 0,
        sampling: config.Sampling | None = None,
    ) -> Result:
        """Describes an image in a text that is given in part.

        Args:
            template: the text with gaps (`parse_template`).
            words: required words, in their order; with none missing from a free caption that is
                the answer, otherwise they are put into one with room around each.

        Raises:
            RequestError: neither template nor words, or both.
        """
        if (template is None) == (not words):
            raise RequestError("a constrained caption needs a template or words, one of the two.")
        rows = self._rows("constrained_caption", "caption", shown, 1, seed)
        if template is not None:
            templates = [parse_template(template)] * len(rows)
            return self._complete("constrained_caption", rows, templates, sampling)
        wanted = words_template(words)
        if "caption" in self.settings.data.tasks or isinstance(self.prompts, ChatPrompts):
            free = self.caption(shown, seed=seed, sampling=sampling)
            if all(f" {word.strip()} " in f" {free.text.strip()} " for word in words):
                return dataclasses.replace(free, task="constrained_caption")
        return self._complete("constrained_caption", rows, [wanted] * len(rows), sampling)

    def infill(
        self,
        text: Words,
        shown: Shown | Sequence[Shown] | None = None,
        *,
        seed: int | Sequence[int] = 0,
        temperature: Numbers = None,
        sampling: config.Sampling | None = None,
    ) -> Result:
        """Fills the gaps of each text; what stands around a gap, on both sides, is seen.

        Args:
            text: `___` is a gap of one token, `{4}` one of four.
            shown: an image that the text is about.
        """
        rows = self._rows("infill", text, shown, 1, seed, temperature=temperature)
        templates = [parse_template(row.words) for row in rows]
        return self._complete("infill", rows, templates, sampling)

    def ground(
        self,
        shown: Shown,
        phrases: Words,
        *,
        seed: int = 0,
        sampling: config.Sampling | None = None,
    ) -> Result:
        """Finds things in an image, all of them in parallel.

        Returns:
            A box a phrase, in pixels of the image as it was given.
        """
        rows = self._rows("ground", phrases, shown, 1, seed)
        image = rows[0].pixels
        named = [row.words for row in rows]
        sampling, seconds = self._asked(sampling), {}
        examples = self.prompts.locate(named, image)
        how = sampling
        if self.prompts.locates_in_one_step:
            how = dataclasses.replace(
                sampling, text_steps=1, text_step_ratio=0.0, text_commit="count"
            )
        with _timed(seconds, "text"):
            found = self.run(
                examples, sampling=how, seed=[row.seed for row in rows][: len(examples)]
            )
        size = image.shape[1], image.shape[0]
        return self._result(
            "ground", rows, sampling, seconds,
            tokens=tuple(found), boxes=tuple(self.prompts.boxes(named, found, size)),
        )  # fmt: skip

    # -- batches, for training and benchmarks -----------------------------------------------

    # -- the machinery: rows ----------------------------------------------------------------

    def _rows(
        self,
        task: str,
        words: Words,
        shown: Shown | Sequence[Shown] | None,
        copies: int,
        seed: int | Sequence[int],
        **numbers: Numbers,
    ) -> list[Row]:
        """Returns what is asked of a task as rows; see `drawings.rows_of`."""
        self.prompts.check_task(task)
        needs_image = task not in ("generate", "reflect", "ask", "reason", "infill")
        return rows_of(words, shown, copies, seed, needs_image=needs_image, **numbers)

    def _asked(self, sampling: config.Sampling | None) -> config.Sampling:
        """Returns the settings to sample by; says once if the model was never trained for them."""
        sampling = sampling or self.settings.sampling
        preset = presets.untrained(sampling, self.settings.model)
        if preset and not self.warned:
            log.warning("%s", untrained_warning(self.source.name or "this model", preset))
            self.warned = True
        return sampling

    def _result(self, task: str, rows, sampling, seconds, **found) -> Result:
        return Result(
            task, tuple(r.words for r in rows), tuple(r.seed for r in rows), sampling, self.source,
            seconds, **found,
        )  # fmt: skip

    def _record(self, task: str, row: Row, recipe, sampling, plan, bucket) -> dict[str, Any]:
        """Returns what `replay` needs, for `json`."""
        device = jax.devices()[0]
        return {
            "format": FORMAT,
            "task": task,
            "prompt": row.words,
            "seed": row.seed,
            "recipe": recipe,
            "plan": plan,
            "picture": None if row.shown is None else row.shown.as_json(),
            "bucket": None if bucket is None else dataclasses.asdict(bucket),
            "sampling": config.to_dict(row.own.of_image(sampling)),
            "checkpoint": dataclasses.asdict(self.source),
            "software": {"jax": jax.__version__, "device": device.device_kind},
        }

    # -- the machinery: images ------------------------------------------------------------

    def _paint(
        self,
        task: str,
        rows: Sequence[Row],
        recipes: Sequence[dict[str, Any]],
        plan: bool | Words | None,
        sampling: config.Sampling | None,
        on_segment: OnSegment | None,
        bucket: Bucket | None = None,
    ) -> Result:
        """Draws the images of a task.

        Args:
            recipes: what a row holds besides words, image and seed, for `json`.
            bucket: the one to use in place of the rows' own, for `replay`.
        """
        sampling, seconds = self._asked(sampling), {}
        drawings = [
            dataclasses.replace(self._drawing(task, row, recipe), own=row.own)
            for row, recipe in zip(rows, recipes, strict=True)
        ]
        plans = self._layouts(task, drawings, plan, sampling, seconds)
        if plans is not None:
            drawings = [
                dataclasses.replace(drawing, plan=one)
                for drawing, one in zip(drawings, plans, strict=True)
            ]
        with _timed(seconds, "image"):
            cells, bucket = self._decoded(drawings, sampling, on_segment, bucket)
        with _timed(seconds, "pixels"):
            pixels = [
                self._codec.decode(one[None], drawing.cells[0], sampling.vq_dtype)[0]
                for one, drawing in zip(cells, drawings, strict=True)
            ]
        records = tuple(
            self._record(task, row, recipe, sampling, drawing.plan, bucket)
            for row, recipe, drawing in zip(rows, recipes, drawings, strict=True)
        )
        return self._result(
            task, rows, sampling, seconds,
            tokens=tuple(cells), pixels=tuple(pixels), plans=tuple(plans or ()), records=records,
        )  # fmt: skip

    def _drawing(self, task: str, row: Row, recipe: dict[str, Any]) -> Drawing:
        side = self._codec.image_size
        if task == "generate":
            grid = grid_of(recipe["size"], side, self.settings.model)
            return Drawing(row.words, row.seed, grid)
        if task == "edit":
            canvas = self.prompts.canvas(row.pixels, side)
            return Drawing(row.words, row.seed, self._grid, row.pixels, canvas)
        if task == "inpaint":
            canvas, known = self.prompts.canvas(row.pixels, side), np.array(recipe["known"], bool)
        else:
            canvas, known = placed(row.pixels, recipe["box"], side, self._cell_side)
        canvas = self.prompts.erased(canvas, known)
        words = self.prompts.fill_words(task, row.words, known)
        return Drawing(words, row.seed, self._grid, canvas, canvas, known)

    def _layouts(
        self, task: str, drawings: Sequence[Drawing], plan, sampling: config.Sampling, seconds
    ) -> list[str] | None:
        """Returns the layout of each image, as given or of the model's own; None: without."""
        if isinstance(plan, str):
            return [plan] * len(drawings)
        if plan is not None and not isinstance(plan, bool):
            if len(plan) != len(drawings):
                raise RequestError(f"{len(plan)} layouts were given for {len(drawings)} images.")
            return list(plan)
        learned = self.prompts.lays_out(task)
        if plan and not learned:
            raise RequestError(f"this checkpoint was not trained to lay out images of {task!r}.")
        if not (sampling.plan if plan is None else plan) or not learned:
            return None
        with _timed(seconds, "layout"):
            return self.plan(
                [d.words for d in drawings],
                [d.image for d in drawings],
                sampling=sampling,
                seed=[d.seed for d in drawings],
            )

    def _reflect(
        self, row: Row, rounds: int, plan, sampling: config.Sampling, seconds, on_segment
    ) -> tuple[np.ndarray, tuple[tuple[Pixels, str], ...]]:
        """Returns the codes of the last image, and all images with their verdicts."""
        attempts: list[tuple[Pixels, str]] = []
        drawing, task = Drawing(row.words, row.seed, self._grid), "generate"
        while True:
            plans = self._layouts(task, [drawing], plan, sampling, seconds)
            drawing = dataclasses.replace(drawing, plan=plans[0] if plans else None)
            with _timed(seconds, "image"):
                (cells,), _ = self._decoded([drawing], sampling, on_segment)
            (image,) = self._codec.decode(cells[None], dtype=sampling.vq_dtype)
            with _timed(seconds, "text"):
                said = self.run(
                    [self.prompts.judge(row.words, image)], sampling=sampling, seed=[drawing.seed]
                )
            verdict = self.texts(said)[0].strip()
            attempts.append((image, verdict))
            if self.prompts.accepts(verdict) or len(attempts) == rounds:
                return cells, tuple(attempts)
            drawing, task = self._next(row.words, row.seed, attempts)

    def _next(
        self, words: str, seed: int, attempts: list[tuple[Pixels, str]]
    ) -> tuple[Drawing, str]:
        """Returns what to draw after attempts that were not right: an edit, or a new image."""
        seed = (seed + len(attempts) * SEED_STRIDE) % LARGEST_SEED
        image, verdict = attempts[-1]
        correction = self.prompts.correction(verdict)
        if correction is not None and "edit" in self.settings.data.tasks:
            return Drawing(correction, seed, self._grid, image, image), "edit"
        return Drawing(words, seed, self._grid, attempts=tuple(attempts)), "generate"

    @property
    def _cell_side(self) -> int:
        """Pixels a side of a cell."""
        return self._codec.image_size // self.settings.model.grid_size

    def _kept(self, image: Pixels, mask: Any, box: Sequence[int | float] | None) -> Grid:
        """Returns which cells of an image on its canvas neither a mask nor a box touches."""
        wanted = hole(image, mask, box)
        if isinstance(self.prompts, ChatPrompts):  # its canvas is the image in a square
            wanted = squared(wanted)
        return untouched(wanted, self.settings.model.grid_size)

    def _inner_box(self, image: Pixels, box: Sequence[int | float] | None) -> list[int]:
        return [*inner_box(image, box, self._codec.image_size, self._cell_side)]

    # -- the machinery: text ----------------------------------------------------------------

    def _answer(
        self, task: str, shown, question: Words, tokens: int, seed, temperature, sampling
    ) -> Result:
        if tokens < 1:
            raise RequestError(f"max_new_tokens={tokens} is out of range: 1 or more.")
        rows = self._rows(task, question, shown, 1, seed, temperature=temperature)
        examples = [self.prompts.ask(row.words, row.images, tokens) for row in rows]
        return self._say(task, rows, examples, sampling)

    def _complete(
        self, task: str, rows: Sequence[Row], templates: Sequence[Template], sampling
    ) -> Result:
        examples = [
            self.prompts.infill(template, row.images[0] if row.images else None)
            if task == "infill"
            else self.prompts.constrained_caption(template, row.pixels)
            for template, row in zip(templates, rows, strict=True)
        ]
        result = self._say(task, rows, examples, sampling)
        filled = [
            self.prompts.completed(template, ids)
            for template, ids in zip(templates, result.tokens, strict=True)
        ]
        return dataclasses.replace(result, texts=tuple(text.strip() for text in filled))

    def _say(self, task: str, rows, examples: Sequence[Example], sampling) -> Result:
        sampling, seconds = self._asked(sampling), {}
        with _timed(seconds, "text"):
            said = self.run(
                examples,
                sampling=sampling,
                seed=[row.seed for row in rows],
                own=[row.own for row in rows],
            )
        texts = tuple(text.strip() for text in self.texts(said))
        return self._result(task, rows, sampling, seconds, tokens=tuple(said), texts=texts)

    # -- the machinery: decoding ------------------------------------------------------------


# ---------------------------------------------------------------------------------------------
# Helpers.


def untrained_warning(name: str, preset: str) -> str:
    """Returns what to say where a model that knows full attention alone is sampled sparsely."""
    return (
        f"{name} was never trained sparsely, so the sampler {preset!r} will draw badly: fine-tune"
        " it first (`sparse-lavida train`)."
    )


@contextlib.contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Adds what a stage takes to `seconds`."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - begin
