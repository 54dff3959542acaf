# SPDX-License-Identifier: Apache-2.0
"""Which task fills the rest: a table from what is held of words, layout and image.

A text is held in part if it has gaps, in the syntax of `prompting.gaps`: `___` is one token, `{4}`
four. At the end of a layout, `___` is whatever follows. An image is held in part if a mask or a box
says where it is new.
"""

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax.inference import regions
from sparse_lavida_jax.inference.checks import Words, each, texts
from sparse_lavida_jax.inference.requests import NO_WORDS, Request, Shown, ShownImage, shown_images
from sparse_lavida_jax.inference.tasks import TaskRun
from sparse_lavida_jax.prompting.gaps import Template, has_gaps, parse_template
from sparse_lavida_jax.prompting.protocol import Grid, PromptFormat
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.prompting.vocabulary import listed

log = logging.getLogger(__name__)

State = Literal["", "part", "whole"]

_REST = re.compile(r"_{2,}\s*$")
_THING = re.compile(r"([^<>,]*)((?:<LOC_\d{1,9}>){4})")


class Subset(NamedTuple):
    """A row of the table.

    Attributes:
        words, layout, image: how much of each is held.
        fills: what the task makes.
        task: a key of `requests.TASK_SPECS`; "inpaint" also stands for "outpaint".
        lessons: what teaches it in the small world, tasks of `scenes.tasks`.
    """

    words: State
    layout: State
    image: State
    fills: str
    task: str
    lessons: tuple[str, ...]


_HOLES = ("inpaint", "outpaint")
TABLE = (
    Subset("whole", "", "", "layout, image", "generate", ("layout", "draw")),
    Subset("whole", "part", "", "layout, image", "generate", ("layout", "draw")),
    Subset("whole", "whole", "", "image", "generate", ("draw",)),
    Subset("", "whole", "", "image", "generate", ("draw",)),
    Subset("whole", "", "part", "layout, image", "inpaint", ("fill_layout", *_HOLES)),
    Subset("whole", "part", "part", "layout, image", "inpaint", ("fill_layout", *_HOLES)),
    Subset("whole", "whole", "part", "image", "inpaint", _HOLES),
    Subset("part", "", "", "words", "infill", ("infill",)),
    Subset("part", "", "whole", "words", "infill", ("infill",)),
    Subset("", "", "whole", "words", "caption", ("caption",)),
    Subset("", "part", "whole", "layout", "ask", ("detect", "locate", "name")),
)


def subset_of(words: State, layout: State, image: State) -> Subset:
    """Returns the row of the table for what is held.

    Raises:
        RequestError: no model was taught to fill the rest; the message names it, and says what to
            hold instead.
    """
    held = words, layout, image
    for row in TABLE:
        if row[:3] == held:
            return row
    if not any(held):
        raise RequestError("nothing is held: give words, a layout or an image.")
    if held == ("whole", "whole", "whole"):
        raise RequestError("nothing is left to fill: put gaps into a text, or mask the image.")
    if image == "part":
        untaught, instead = "an image without all its words", "hold words without gaps"
    elif image == "whole":
        untaught = "a whole image and other texts from each other"
        instead = "hold the image with words that have gaps, with a layout that has gaps ('___'"
        instead += " stands for all of it), or by itself, to have its words written"
    elif words:
        untaught = "words from a layout"
        instead = "hold the layout alone, and then the image that it draws"
    else:
        untaught, instead = "a layout without words", "hold words too, or a layout without gaps"
    raise RequestError(f"no model was taught to fill {untaught}: {instead}.")


def requests_of(
    run: TaskRun,
    make: Callable[..., list[Request]],
    words: Words | None,
    layout: Words | None,
    image: Shown | None,
    mask: Any,
    box: Any,
    options: Mapping[str, Any],
) -> list[Request]:
    """Returns the requests that fill what is missing; see `SparseLaViDa.complete`.

    Args:
        run: of the model.
        make: makes requests (`SparseLaViDa.requests`).
    """
    row = subset_held(words, layout, image, mask, box)
    layouts = texts("layouts", layout) if row.layout else []
    templates = [layout_template(one, run.prompts) for one in layouts if row.layout == "part"]
    task, given, wordless = row.task, dict(options), row.layout == "whole" and not row.words
    if row.image == "part":
        (image,) = _single(image)
        task, given["known"] = _hole(run, image, mask, box)
    if task == "ask":
        words = [run.prompts.layout_question(one) for one in templates]
        given["as_written"] = True
    elif layouts:
        _check(run, task, wordless, templates, given)
        held = ["".join(p for p in one if isinstance(p, str)) for one in templates] or layouts
        given["layout"] = held[0] if len(held) == 1 else held
        if templates:  # things of a layout come in the order of the words: these stay as they are
            given = {"as_written": True, **given}
    if wordless:
        words, given["as_written"] = [NO_WORDS] * len(layouts), True
    made = make(task, words, image, **given)
    if wordless:
        made = [dataclasses.replace(one, words="", asked="") for one in made]
    if row.layout and row.image == "part":
        made = _warned(run, made)
    if not templates:
        return made
    own = templates * len(made) if len(templates) == 1 else each("layouts", templates, len(made))
    lays_out = {} if task == "ask" else {"layout": True}
    pairs = zip(made, own, strict=True)
    return [dataclasses.replace(one, template=of, **lays_out) for one, of in pairs]


def layout_template(text: str, prompts: PromptFormat) -> Template:
    """Returns a layout with gaps; one at its end is as long as a layout may be.

    Raises:
        RequestError: a gap is too long, or nothing is left for the last one.
    """
    template = parse_template(text)
    if not _REST.search(text):
        return template
    held = template[:-1]
    used = len(prompts.template_ids(held)[0]) if held else 0
    if used + 1 >= (most := prompts.long_answer_tokens):
        raise RequestError(f"the layout with its gaps is {used} tokens long: at most {most - 2}.")
    return (*held, most - used - 1)


def subset_held(
    words: Words | None, layout: Words | None, image: Shown | None, mask: Any, box: Any
) -> Subset:
    """Returns the row of the table for what is given.

    Raises:
        RequestError: see `subset_of`; or a mask without an image.
    """
    is_masked = mask is not None or box is not None
    if image is None and is_masked:
        raise RequestError("a mask or a box is about an image: give one.")
    shown = "part" if is_masked else "whole" if image is not None else ""
    return subset_of(_state("words", words), _state("layouts", layout), shown)


def _state(name: str, values: Words | None) -> State:
    """Returns how much of a text is held, or of several: equally much of each."""
    if values is None:
        return ""
    gaps = {has_gaps(one) for one in texts(name, values)}
    if len(gaps) > 1:
        raise RequestError(f"some {name} have gaps, others none: give all with gaps, or all whole.")
    return "part" if gaps.pop() else "whole"


def _single(image: Shown) -> list[ShownImage]:
    """Returns the image that a mask is about."""
    if len(found := shown_images(image)) != 1:
        raise RequestError(f"a mask or a box is about one image, {len(found)} were given.")
    return found


def _hole(run: TaskRun, image: ShownImage, mask: Any, box: Any) -> tuple[str, Grid]:
    """Returns the task that draws what is masked, and the cells that are held.

    A rectangle of held cells is extended, if the mask is not a rectangle itself.
    """
    pixels = run.prompts.codec_mask(regions.pixel_mask(image.pixels, mask, box))
    cells = regions.cell_mask(pixels, run.settings.model.grid_size)
    extends = _is_rectangle(~cells) and not _is_rectangle(cells)
    return "outpaint" if extends else "inpaint", ~cells


def _is_rectangle(cells: Grid) -> bool:
    rows, columns = np.nonzero(cells)
    return bool(rows.size and rows.size == (np.ptp(rows) + 1) * (np.ptp(columns) + 1))


def _check(
    run: TaskRun,
    task: str,
    wordless: bool,
    templates: Sequence[Template],
    given: Mapping[str, Any],
) -> None:
    """Refuses layouts that the model was not taught to follow or to fill.

    Raises:
        RequestError: says what can be held instead.
    """
    if not run.prompts.lays_out(task):
        raise RequestError(f"this checkpoint learned no layouts for {task}: give none.")
    for template in templates:
        run.prompts.layout(NO_WORDS, None, template)
    if wordless and not run.settings.data.prompt_drop:
        raise RequestError("this checkpoint was never trained without words: hold words too.")
    if wordless and (given.get("best_of") or 1) > 1:
        raise RequestError("an image is judged by its words: hold words too, or leave best_of out.")


def _warned(run: TaskRun, requests: Sequence[Request]) -> list[Request]:
    """Returns requests with a warning about things of a layout that held cells rule out."""
    image = run.prompts.codec_image(requests[0].pixels, run.codec.image_size)
    codes, warned = run.codec.encode(image[None])[0], []
    for one in requests:
        assert isinstance(one.layout, str) and one.mask is not None
        if found := ruled_out(one.layout, codes, ~one.mask, run.prompts):
            verb = "it" if len(found) == 1 else "they"
            said = (
                f"{listed(found, 'and')} cannot be drawn: cells that are held, where {verb} would"
            )
            said += " be, show something else."
            log.warning("%s", said)
            one = dataclasses.replace(one, warning=" ".join(filter(None, (one.warning, said))))
        warned.append(one)
    return warned


def ruled_out(
    layout: str, codes: Int[np.ndarray, "l g"], held: Grid, prompts: PromptFormat
) -> list[str]:
    """Returns the things of a layout that cannot be drawn, as they are written there.

    Their boxes lie wholly or partly in held cells that show something else, as far as is known.
    """
    found = []
    for thing in _THING.finditer(layout):
        name, edges = thing[1].strip(), [int(edge) for edge in re.findall(r"\d+", thing[2])]
        sides = np.array([*held.shape[::-1]] * 2)
        x1, y1, x2, y2 = np.array(edges) * sides / prompts.frame
        cells = np.zeros_like(held)
        cells[math.floor(y1) : math.ceil(y2), math.floor(x1) : math.ceil(x2)] = True
        shown = codes[(cells & held).reshape(-1)]
        own = prompts.cell_codes(name)
        if len(shown) and (own is None or (shown != own).any()):
            found.append(thing[0].strip())
    return found
