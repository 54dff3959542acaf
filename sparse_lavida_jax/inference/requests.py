# SPDX-License-Identifier: Apache-2.0
"""What a model is asked to do: a `Request` is made once, at the interface, and then passed along.

`SparseLaViDa.requests` makes them, using the checks and the pairing in this file.
"""

import dataclasses
import hashlib
import logging
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np

from sparse_lavida_jax import config, old_names
from sparse_lavida_jax.data import arrays, files, image_files
from sparse_lavida_jax.data.image_files import Pixels
from sparse_lavida_jax.inference import checks
from sparse_lavida_jax.inference.checks import MOST_IMAGES, Number, Numbers, Words, each, texts
from sparse_lavida_jax.inference.results import SHOWN_KEY, Result
from sparse_lavida_jax.prompting.gaps import Template, parse_template, words_template
from sparse_lavida_jax.prompting.protocol import Grid, PromptFormat
from sparse_lavida_jax.prompting.request_errors import RequestError, check_characters, check_words
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.sampling.options import OPTIONS, changed, quality_options
from sparse_lavida_jax.sampling.presets import RowRequest

log = logging.getLogger(__name__)

LARGEST_SEED, SEEDS, fold = checks.LARGEST_SEED, checks.SEEDS, checks.fold
PROMPTING = {"template", "required"}  # options that hold words for the model
NO_WORDS = "a"  # for checks of a request to draw after a layout alone
ROUNDS = 3  # the default limit on attempts of "reflect"
BRANCHES = 4  # of an image, by default

# Ids of the tokens of a layout, and where each was decoded (`SampleOutput.decoded_at`).
DrawnLayout = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class ShownImage:
    """An image that was given, and the file it was read from."""

    pixels: Pixels
    path: pathlib.Path | None = None

    def as_json(self) -> dict[str, Any]:
        path = None if self.path is None else str(self.path.resolve())
        return {"path": path, "sha256": hashlib.sha256(self.pixels.tobytes()).hexdigest()}


# An image or what contains one: an array of any library, a Pillow image, a file (its name, its
# bytes, or open), an earlier result. `shown_images` explains what is wrong with anything else.
Shown = Any


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request(RowRequest):
    """One thing that a model is asked to do.

    Attributes:
        task: one of `TASK_SPECS`.
        words: prompt, instruction, question, phrase, or text with gaps, as the model is given it.
        asked: the user's own words, if they are others.
        images: what the task is about; one image, except for questions about several.
        earlier: earlier questions of the conversation, with their answers.
        sampling: how it is sampled, except for its own scales: what requests run together share.
        layout: whether to lay an image out in text first, or the layout to follow; None: as in
            `sampling`, if the model learned it.
        drawn_layout: how the layout was drawn, if a record says so.
        size: height and width of the image to draw, in pixels; None: the largest.
        mask: cells of an image to redraw; the others stay as they are.
        box: the place of the given image in an outpainted one: x1, y1, x2, y2 in pixels.
        rounds: the largest number of attempts at an image that the model judges itself.
        best_of: the largest number of times that the image is drawn, until the model accepts it.
        max_new_tokens: of an answer; None: the usual number.
        template: the text with gaps that is filled: a caption, or the layout of an image.
        required: words that a constrained caption must contain, in order.
        warning: a sentence about words that the model does not know; "" if it knows all, or if
            nobody knows which it knows.
    """

    task: str
    words: str = ""
    asked: str = ""
    images: tuple[ShownImage, ...] = ()
    earlier: tuple[tuple[str, str], ...] = ()
    sampling: config.Sampling = dataclasses.field(default_factory=config.Sampling)
    layout: bool | str | None = None
    drawn_layout: DrawnLayout | None = None
    size: tuple[int, int] | None = None
    mask: Grid | None = None
    box: tuple[int, int, int, int] | None = None
    rounds: int = ROUNDS
    best_of: int = 1
    max_new_tokens: int | None = None
    template: Template | None = None
    required: tuple[str, ...] = ()
    warning: str = ""

    @property
    def pixels(self) -> Pixels:
        """The image, for a task that needs one."""
        return self.images[0].pixels

    @property
    def seen(self) -> tuple[Pixels, ...]:
        """The pixels of all images."""
        return tuple(image.pixels for image in self.images)

    @property
    def own_sampling(self) -> config.Sampling:
        """The settings for drawing its image by itself."""
        shared = presets.scales(self.sampling, "image")
        own = {name: getattr(self, name) for name in shared}
        return self.sampling if own == shared else dataclasses.replace(self.sampling, **own)


def are_branches(requests: Sequence[Request]) -> bool:
    """Whether requests are the same but for their turns, as `branches.requests_of` makes them."""
    names = [field.name for field in dataclasses.fields(Request) if field.name != "turns"]
    first = requests[0]
    return all(getattr(one, name) is getattr(first, name) for one in requests for name in names)


class Options(TypedDict, total=False):
    """Options of all tasks; None: not given.

    Attributes:
        seed: 0 to 2**64 - 1, of which the remainder of 2**31 counts: of the first row, from which
            the others count up; or one per row.
        sampling: the settings to start from; by default those of the checkpoint.
        steps: for the image, or for each text block; also as `num_inference_steps`.
        temperature: for all rows, or one per row; 0 takes the most probable token.
        sampler: one of `options.SAMPLERS`.
        registers: how many, or the first and the last number of them.
        quantize: matrices of the layers in 8 bits (`config.QUANTIZED`).
        as_written: gives the model the words as they are, even if it was taught no such sentence.
    """

    seed: Numbers
    sampling: config.Sampling | None
    steps: Number
    num_inference_steps: Number
    temperature: Numbers
    sampler: str | None
    registers: Numbers
    quantize: str | None
    as_written: bool | None


class ImageOptions(Options, total=False):
    """Options of all tasks that make an image.

    Attributes:
        num_images: images per prompt.
        quality: "low", "medium" or "high", instead of `steps` (`options.quality_options`).
        best_of: draws each image anew until the model, asked whether it shows the prompt, accepts
            it, at most so many times; the last one is the result if it accepts none.
        layout: whether to lay the image out in text first, or the layout to follow, or one per
            row; by default as in the sampling settings, if the model learned it.
        layout_temperature: how random layouts are, for all tasks but "edit"; by default as in the
            sampling settings.
        guidance: scale for all rows, or one per row; also as `guidance_scale`.
        order: of the cells (`config.Sampling.order`).
        revisions: how many times cells of a finished image are drawn again, with the others known
            (`config.Sampling.revisions`).
        style_seed: for "generate": of the style code alone, the same for all rows; 0 to 2**64 - 1.
            By default the seed of each row. Refused by a model without such a code.
        vq_dtype: dtype of the decoder of images.
    """

    num_images: Number
    quality: str | None
    best_of: Number
    layout: bool | Words | None
    layout_temperature: Number
    guidance: Numbers
    guidance_scale: Numbers
    order: str | None
    revisions: Number
    style_seed: Number
    vq_dtype: str | None


class ChangeOptions(ImageOptions, total=False):
    """Options of all tasks that change an image.

    Attributes:
        guidance_image: scale of the image, for all rows or one per row.
    """

    guidance_image: Numbers


# ---------------------------------------------------------------------------------------------
# Tasks.


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """What a task makes and takes.

    Attributes:
        words: what its words are called; "": it takes none.
        image: whether it is about an image.
        takes: names of its options, from `Request` and `sampling/options.py`.
    """

    makes: Literal["image", "text", "boxes"]
    words: str
    image: Literal["", "optional", "needed"]
    takes: frozenset[str]

    @property
    def draws(self) -> bool:
        return self.makes == "image"


_ALL = frozenset(
    {"seed", "sampling", "steps", "temperature", "sampler", "registers", "quantize", "as_written"}
)
_DRAWS = _ALL | {
    "quality", "num_images", "best_of", "layout", "guidance", "order", "revisions", "vq_dtype",
}  # fmt: skip
_CHANGES = _DRAWS | {"guidance_image"}
_LAYS_OUT = frozenset({"layout_temperature"})  # edits use the temperature of other texts
_ANSWERS = _ALL | {"max_new_tokens", "earlier", "together"}

# Why tasks that make an image do not take the best of several.
UNJUDGED = {
    "edit": "the model judges what an image shows, which an instruction does not say",
    "reflect": "it judges its attempts already, and corrects them: set rounds",
}

TASK_SPECS: dict[str, TaskSpec] = {
    "generate": TaskSpec("image", "prompt", "", _DRAWS | _LAYS_OUT | {"size", "style_seed"}),
    "edit": TaskSpec("image", "instruction", "needed", _CHANGES),
    "inpaint": TaskSpec(
        "image", "prompt", "needed", _CHANGES | _LAYS_OUT | {"mask", "box", "known"}
    ),
    "outpaint": TaskSpec("image", "prompt", "needed", _CHANGES | _LAYS_OUT | {"box", "known"}),
    "ask": TaskSpec("text", "question", "optional", _ANSWERS),
    "reason": TaskSpec("text", "question", "optional", _ANSWERS),
    "caption": TaskSpec("text", "", "needed", _ALL),
    "constrained_caption": TaskSpec("text", "", "needed", _ALL | {"template", "required"}),
    "infill": TaskSpec("text", "text", "optional", _ALL),
    "ground": TaskSpec("boxes", "phrases", "needed", _ALL),
    "reflect": TaskSpec("image", "prompt", "", _DRAWS | _LAYS_OUT | {"rounds"}),
}


def spec_of(task: str) -> TaskSpec:
    """Returns what a task takes and makes.

    Raises:
        RequestError: there is no such task.
    """
    if task not in TASK_SPECS:
        raise RequestError(f"there is no task {task!r}. Choose one of {', '.join(TASK_SPECS)}.")
    return TASK_SPECS[task]


# ---------------------------------------------------------------------------------------------
# From what a person asks for to requests.


@dataclasses.dataclass(frozen=True)
class RequestMaker:
    """Makes requests for a model, and refuses what it cannot do.

    Attributes:
        side: of the largest image, in pixels; 0 for a model without images.
    """

    settings: config.Config
    prompts: PromptFormat
    side: int

    def make(
        self,
        task: str,
        words: Words | None,
        shown: Shown | Sequence[Shown] | None,
        asked: Mapping[str, Any],
    ) -> list[Request]:
        """Returns a request for each row; see `SparseLaViDa.requests`.

        Logs a warning if the words are not those of the training texts.
        """
        spec, given = spec_of(task), checks.named(asked)
        as_written = given.pop("as_written", False)
        for name in PROMPTING & given.keys():
            given[name] = self._spelled(given[name])
        if wrong := sorted(set(given) - spec.takes):
            hint = f" {old_names.hint(wrong[0])}".rstrip()
            raise RequestError(
                f"{task} takes no {{setting}}.{hint} It takes {{allowed}}.",
                setting=wrong[0],
                allowed=tuple(sorted(spec.takes)),
            )
        self._check(task, spec, words, shown, given)
        if "quality" in given:
            given = self._quality(given) | given
        sampling, columns = sampling_of(spec.draws, given, self.settings.sampling)
        if "style_seed" in given:
            self._check_style(sampling, given.get("size"))
        copies = given.get("num_images", 1)
        words = "caption" if words is None else words
        pairs = paired(words, shown, copies, given.get("together"), spec.words)
        if spec.image == "needed" and not pairs[0][1]:
            raise RequestError("this task is about an image: give one.")
        count = len(pairs)
        seeds = checks.row_seeds(given.get("seed", 0), count, copies)
        layouts = each("layouts", given.get("layout"), count)
        if "known" in given:
            side = self.settings.model.grid_size
            given["known"] = _masks(given["known"], count, copies, side)
        for layout in layouts:
            check_characters(layout if isinstance(layout, str) else "", "layout")
        scales = _scales(sampling, columns, count, copies, draws=spec.draws)
        readings = [
            self.prompts.as_written(one) if as_written else self.prompts.read(task, one, seed)
            for (one, _), seed in zip(pairs, seeds, strict=True)
        ]
        made = [
            Request(
                task=task,
                words=readings[i].sentence,
                asked=one if one != readings[i].sentence else "",
                warning=readings[i].warning if spec.words not in ("", "text") else "",
                images=images,
                seed=seeds[i],
                sampling=sampling,
                layout=layouts[i],
                **scales[i],
                **self._fields(task, readings[i].sentence, images, i, given),
            )
            for i, (one, images) in enumerate(pairs)
        ]
        return self._warned(made, spec, as_written)

    def _quality(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the options that a quality stands for."""
        if "steps" in given:
            remedy = "{setting} is a number of steps, and steps says another: give one of them."
            raise RequestError(remedy, setting="quality")
        sampling = given.get("sampling") or self.settings.sampling
        grid = grid_of(given.get("size"), self.side, self.settings.model)
        return quality_options(given["quality"], sampling, math.prod(grid))

    def _check_style(self, sampling: config.Sampling, size: tuple[int, int] | None) -> None:
        """Refuses to choose the style code of images that have none."""
        model, remedy = self.settings.model, ""
        if not model.style_parts:
            remedy = "this model has no style code: leave out {setting}."
        elif math.prod(grid_of(size, self.side, model)) < model.num_cells:
            remedy = (
                f"only images of {self.side}x{self.side} pixels have a style code: leave out"
                " {setting}, or the size."
            )
        elif not presets.step_settings(sampling, model, "image").style_parts:
            remedy = (
                "without registers, with a dense sampler or with sampling.style_code=False, images"
                " have no style code: leave out {setting}, or change that."
            )
        if remedy:
            raise RequestError(remedy, setting="style_seed")

    def _spelled(self, words: Words) -> Words:
        """Returns words in the case that they have in the training texts."""
        if (known := self.prompts.vocabulary) is None:
            return words
        return known.spelled(words) if isinstance(words, str) else [*map(known.spelled, words)]

    def _warned(self, made: list[Request], spec: TaskSpec, as_written: bool) -> list[Request]:
        """Returns requests with their warnings; each is logged once."""
        if (known := self.prompts.vocabulary) is None:
            return made
        warned = []
        for one in made:
            said = [one.warning or known.warning(_other_texts(one))]
            if known.image_questions and spec.words == "question" and not one.images:
                said.append("this model was trained on questions about an image only: give it one.")
            if known.layouts_first and one.layout is False and not as_written:
                said.append(
                    "without a layout, images are hardly ever right here: let the model write one."
                )
            warned.append(dataclasses.replace(one, warning=" ".join(filter(None, said))))
        for warning in dict.fromkeys(one.warning for one in warned if one.warning):
            log.warning("%s", warning)
        return warned

    def _check(self, task: str, spec: TaskSpec, words, shown, given: Mapping[str, Any]) -> None:
        for needed in (task, "generate") if task == "reflect" else (task,):
            if refusal := self.prompts.refusal(needed):
                raise RequestError(refusal)
        if words is None and spec.words:
            raise RequestError("the prompt is empty: say in words what you want.", setting="prompt")
        if shown is not None and not spec.image:
            raise RequestError(f"{task} takes no image: leave it out.")
        if task == "ground" and self.prompts.locates_in_one_step and "steps" in given:
            raise RequestError(
                "ground takes no {setting} here: this model finds all boxes in one step.",
                setting="steps",
            )
        ceilings: dict[str, int] = dict.fromkeys(("num_images", "rounds", "best_of"), MOST_IMAGES)
        ceilings["max_new_tokens"] = self.settings.data.max_sequence_len
        checks.check_ceilings(given, ceilings)
        if given.get("best_of", 1) > 1:
            why = UNJUDGED.get(task) or self.prompts.refusal("reflect")
            if why:
                raise RequestError(f"{task} takes no {{setting}} here: {why}.", setting="best_of")
        if task == "constrained_caption" and ("template" in given) == ("required" in given):
            raise RequestError("a constrained caption needs a template or words, one of the two.")

    def _fields(
        self,
        task: str,
        words: str,
        images: tuple[ShownImage, ...],
        row: int,
        given: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Returns the fields of `Request` for one row, from the options of a task."""
        model = self.settings.model
        found: dict[str, Any] = {
            name: given[name] for name in ("rounds", "best_of", "max_new_tokens") if name in given
        }
        if "style_seed" in given:
            found["style_seed"] = checks.fold(given["style_seed"], "style_seed")
        found["earlier"] = given.get("earlier", ())
        for question, answer in found["earlier"]:
            check_words(question)
            check_characters(answer, "earlier answer")
        if task == "generate":
            size = given.get("size")
            grid_of(size, self.side, model)  # refuses impossible sizes
            found["size"] = size
        elif task in ("inpaint", "outpaint"):
            found |= self._place(task, images[0].pixels, row, given)
        elif task == "infill":
            found["template"] = parse_template(words)
        elif "template" in given:
            found["template"] = parse_template(given["template"])
        elif "required" in given:
            found["required"] = tuple(given["required"])
            found["template"] = words_template(found["required"])
        return found

    def _place(
        self, task: str, image: Pixels, row: int, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns which cells of an image are drawn, or where it goes in an outpainted one."""
        from sparse_lavida_jax.inference import regions  # other tasks do without

        mask, box, grid = given.get("mask"), given.get("box"), self.settings.model.grid_size
        if "known" in given:
            cells = given["known"][row]
        elif task == "inpaint":
            mask = regions.pixel_mask(image, mask, box)
            cells = regions.cell_mask(self.prompts.codec_mask(mask), grid)
        else:
            return {"box": regions.inner_box(image, box, self.side, self.side // grid)}
        _check_mask(task, cells)
        return {"mask": cells}


def _other_texts(request: Request) -> list[str]:
    """Returns what a request says besides its words."""
    texts = [piece for piece in request.template or () if isinstance(piece, str)]
    texts += [request.layout] if isinstance(request.layout, str) else []
    return texts + [question for question, _ in request.earlier]


def _masks(known: Any, rows: int, copies: int, side: int) -> list[Grid]:
    """Returns the mask of each row from grids of the cells to keep; a single one is for all rows.

    Raises:
        ImageError: they are not grids of `side` by `side` cells, or another number of them.
    """
    found = arrays.array_of(known, "the grid of known cells")
    if found.ndim not in (2, 3) or found.shape[-2:] != (side, side):
        raise image_files.ImageError(
            f"the grid of known cells is {list(found.shape)}: it must be [{side}, {side}]."
        )
    masks = ~found.astype(bool)
    if masks.ndim == 2:
        return [masks] * rows
    return [np.array(mask) for mask in each("grids of known cells", masks, rows, copies)]


def _check_mask(task: str, mask: Grid) -> None:
    """Refuses a mask that leaves nothing to draw, or nothing of an image to be extended."""
    if not mask.any():
        raise image_files.ImageError(
            f"nothing is to be drawn: {task} got no cell that is new. Mark at least one."
        )
    if task == "outpaint" and mask.all():
        raise image_files.ImageError(
            "outpaint got no cell of the image: nothing is to be kept. Keep at least one."
        )


def sampling_of(
    draws: bool, given: dict[str, Any], default: config.Sampling
) -> tuple[config.Sampling, dict[str, Sequence[float | None]]]:
    """Returns the settings that all rows share, and the numbers given per row."""
    shared, columns = {}, {}
    for name in [name for name in OPTIONS if name in given]:
        by_row = OPTIONS[name].by_row
        if by_row and isinstance(given[name], list):
            columns[name] = given[name]
        else:
            shared[name] = checks.row_numbers(name, given[name], 1)[0] if by_row else given[name]
    sampling = given.get("sampling") or default
    if shared:
        sampling = changed(sampling, draws=draws, **shared)
    return sampling, columns


def _scales(
    sampling: config.Sampling,
    columns: Mapping[str, Sequence[float | None]],
    rows: int,
    copies: int,
    *,
    draws: bool,
) -> list[dict[str, Any]]:
    """Returns the scales of each row (`presets.scales`): its own, or those of the settings.

    Args:
        columns: what was given per row.
    """
    numbers = {name: checks.row_numbers(name, columns[name], rows, copies) for name in columns}
    own = [{name: column[row] for name, column in numbers.items()} for row in range(rows)]
    modality = "image" if draws else "text"
    return [presets.scales(changed(sampling, draws=draws, **one), modality) for one in own]


def shown_images(shown: Shown | Sequence[Shown] | None) -> list[ShownImage]:
    """Returns given images as `ShownImage`, reading files.

    Raises:
        ImageError: one is not an image.
    """
    if shown is None:
        return []
    if isinstance(shown, ShownImage):
        return [shown]
    if isinstance(shown, Result):
        if not shown.pixels:
            raise image_files.ImageError(f"the result of {shown.task!r} holds no image.")
        return [ShownImage(pixels) for pixels in shown.pixels]
    if isinstance(shown, str | os.PathLike):
        path = files.expanded(shown)
        return [ShownImage(image_files.read(path), path)]
    several = isinstance(shown, Sequence) and not isinstance(shown, bytes | bytearray | memoryview)
    if several or getattr(shown, "ndim", 0) == 4:  # or an array [n h w c]
        return [one for part in shown for one in shown_images(part)]
    return [ShownImage(image_files.check(shown))]


def paired(
    words: Words,
    shown: Shown | Sequence[Shown] | None,
    copies: int = 1,
    together: bool | None = None,
    name: str = "prompt",
) -> list[tuple[str, tuple[ShownImage, ...]]]:
    """Returns words and images per row: one image goes with all words, one text with all images.

    Args:
        copies: of each pair.
        together: whether all words are about all images.
        name: what the words are called.

    Raises:
        RequestError: nothing is asked for, or words and images do not match in number.
    """
    asked = [check_words(files.composed(one)) for one in texts(name, words)]
    images = shown_images(shown)
    if shown is not None and not images:
        raise RequestError("give at least one image: the list is empty.")
    seen = [tuple(images)] if together else [(image,) for image in images] or [()]
    count = max(len(asked), len(seen))
    if {len(asked), len(seen)} - {1, count}:
        raise RequestError(
            f"{len(asked)} prompts and {len(seen)} images do not go together: give as many, or"
            " one of either."
        )
    pairs = zip(asked * (count // len(asked)), seen * (count // len(seen)), strict=True)
    return [pair for pair in pairs for _ in range(copies)]


def grid_of(size: tuple[int, int] | None, side: int, model: config.Model) -> tuple[int, int]:
    """Returns rows and columns of cells in an image of height and width `size`.

    Args:
        size: in pixels; None: the largest.
        side: of the largest image, in pixels.

    Raises:
        RequestError: the model cannot draw an image of that size.
    """
    if size is None:
        return model.grid_size, model.grid_size
    step, (height, width) = side // model.grid_size, size
    allowed = ""
    if model.cell_positions and (height, width) != (side, side):
        allowed = f"this model only draws {side}x{side}"
    elif height % step or width % step or not step <= min(size) <= max(size) <= side:
        allowed = f"both must be {step} to {side} pixels, multiples of {step}"
    if allowed:
        about = {"setting": "size", "value": f"{height}x{width}", "allowed": allowed}
        raise RequestError("{setting}={value} cannot be drawn: {allowed}.", **about)
    return height // step, width // step


def recorded_image(record: dict[str, Any], shown: Shown | None) -> ShownImage | None:
    """Returns the image that a recorded image was drawn from; None if there was none.

    Raises:
        RequestError: it cannot be found, or `shown` is a different one.
    """
    wanted = record.get(SHOWN_KEY)
    if wanted is None:
        return None
    if shown is None and wanted.get("path") is None:
        raise RequestError("it was drawn after an image of no file: give the same image again.")
    (given,) = shown_images(wanted["path"] if shown is None else shown)
    if given.as_json()["sha256"] != wanted.get("sha256"):
        raise RequestError(
            f"{given.path or 'the image'} is not the image that it was drawn after: their"
            " pixels differ."
        )
    return given
