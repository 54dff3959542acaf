# SPDX-License-Identifier: Apache-2.0
"""What passes through the network in each step, as HTML for the page: the method made visible."""

import base64
import dataclasses
import html
import itertools
import re
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image, ImageDraw

from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference.regions import cell_rows
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.page import figures
from sparse_lavida_jax.sampling import costs, plans, presets
from sparse_lavida_jax.sampling.progress import Progress
from sparse_lavida_jax.server.batching import Ticket
from sparse_lavida_jax.tags import FIRST_BLOCK

SIDE = 144  # pixels of a frame, at least
LEAST_CELL = 4  # pixels of a cell in a frame
MOST_FRAMES = 12
FAINT = (205, 205, 205)  # of masks
# Of the boxes of things that were found, in Okabe and Ito's palette, as in `figures`.
BOXES = ((213, 94, 0), (0, 114, 178), (0, 158, 115), (204, 121, 167), (230, 159, 0), (0, 0, 0))
FADED = 0.6  # how far cached tiles are blended with white

Box = tuple[float, float, float, float]  # x1, y1, x2, y2 as shares of width and height

_ENTRY = re.compile(r"([^<>]*)((?:<LOC_\d+>){4})")
_NUMBER = re.compile(r"<LOC_(\d+)>")

STYLE = """
.passes {display: flex; flex-wrap: wrap; gap: 10px; margin: 6px 0}
.passes figure {margin: 0; width: 92px; font-size: 12px; line-height: 1.35}
.passes img, .passes svg {width: 92px; height: auto; image-rendering: pixelated; display: block;
  border: 1px solid var(--border-color-primary)}
.passes figcaption {margin-top: 2px}
.legend {font-size: 13px; line-height: 1.7}
.legend b {font-weight: 600}
.legend i {display: inline-block; width: 11px; height: 11px; margin: 0 4px 0 0; border: 3px solid}
.legend span {white-space: nowrap; margin-right: 14px}
.counts {display: grid; grid-template-columns: max-content 1fr; gap: 3px 10px; align-items: center;
  font-size: 13px; margin: 6px 0}
.counts div {height: 14px; border-radius: 2px; min-width: 2px}
"""


def colour(rgb: Sequence[int]) -> str:
    """Returns a colour for CSS."""
    return f"rgb({', '.join(map(str, rgb))})"


# ---------------------------------------------------------------------------------------------
# Counters.


def counted(ticket: Ticket, *, layout: bool = False) -> tuple[int, int]:
    """Returns how many tokens a request has passed so far, and would have with full attention.

    With full attention, every step passes the whole prompt and the whole response.

    Args:
        layout: whether to count the layout, or everything else.
    """
    sparse = dense = 0
    for state in ticket.stages:
        for row in {*ticket.rows} & {*state.rows} if (state.stage == "layout") == layout else ():
            i = state.rows.index(row)
            turn = ticket.requests[row - ticket.start].seeds(state.stage)[-1][0]
            # What branches have in common passes in the first row alone.
            settings = state.settings if i and turn else None
            once = costs.before(state.plan, settings, turn) if settings else 0
            sparse += costs.total(_costs(state, i)[once:])
            dense += costs.total(_costs(state, i, dense=True))
    return sparse, dense


def counters(ticket: Ticket) -> str:
    """Returns both counts as bars; "" before the first step."""
    laid_out, _ = counted(ticket, layout=True)
    sparse, dense = counted(ticket)
    rows = [("layout", laid_out, figures.PROMPT)] if laid_out else []
    if dense:
        rows.append(("this run", sparse, figures.MASKED))
    if dense not in (0, sparse):
        rows.append(("a dense model", dense, figures.PARTS["rest"][0]))
    if not rows:
        return ""
    most = max(tokens for _, tokens, _ in rows)
    bars = "".join(
        f"<span>{name}: <b>{tokens:,}</b> tokens</span>"
        f'<div style="width: {100 * tokens / most:.1f}%; background: {colour(rgb)}"></div>'
        for name, tokens, rgb in rows
    )
    return f'<div class="counts">{bars}</div><div class="legend">{costs.DEFINITION}</div>'


def _costs(state: Progress, row: int, *, dense: bool = False) -> list[costs.StepCost]:
    """Returns the costs of the steps so far, with that of a cached prompt first.

    Args:
        dense: as if every step passed the prompt and all tokens of the response.
    """
    assert state.settings is not None
    plan, settings, prompt = state.plan, state.settings, state.prompted[row]
    if dense:
        is_open = settings.preset.given_in_steps | (state.decoded_at >= FIRST_BLOCK)
        whole = np.where(is_open, np.arange(is_open.shape[1]), plans.PAD_POSITION)
        settings = dataclasses.replace(settings, preset=presets.preset("dense"))
        plan = [part.dense(whole) for part in plan]
        prompt = prompt._replace(style=0)
    found = costs.costs(plan, settings, prompt, row)
    return found[: len(found) - state.total + state.steps]


# ---------------------------------------------------------------------------------------------
# Frames.


def legend(settings: presets.StepSettings | None = None) -> str:
    """Returns what the frames show, and what a dense model does instead.

    Args:
        settings: of the image; by default those of any sparse sampler.
    """
    count = f"{settings.num_registers} " if settings else ""
    keys = {
        figures.MASKED: "decoded in this step",
        figures.CLEAN: "decoded in the step before",
        figures.PARTS["rest"][0]: "other tiles that pass",
        FAINT: "not passed: cached, or still masked",
    }
    if settings is None or (settings.preset.truncate and settings.preset.cache_response):
        del keys[figures.PARTS["rest"][0]]
    return (
        '<div class="legend"><b>What you are watching.</b> Every tile starts masked (grey). In each'
        " step, a dense model passes the prompt and all tiles through the network; a sparse one"
        f" passes only the outlined tiles and {count}registers, which stand in for all other"
        f" masks. The prompt passes once.</div>{_keys(keys.items())}"
    )


def drawn(
    ticket: Ticket, pixels: image_files.Pixels | None, layout: Sequence[tuple[str, Box]]
) -> str:
    """Returns the steps of the image drawn last: its layout, then a frame for each step so far.

    At most `MOST_FRAMES` steps are shown, evenly chosen. Without an image yet, only the legend.

    Args:
        pixels: the image, final or not; None: not decoded yet.
        layout: the boxes that it was drawn from (`layout_boxes`).
    """
    state = next((one for one in ticket.stages[::-1] if one.stage == "image"), None)
    if state is None:
        return legend()
    row, done = state.rows.index(ticket.start), state.steps
    rows = cell_rows(state.decoded_at.shape[1], ticket.requests[0].size)
    passed = _costs(state, row)
    cut = len(passed) - done
    before = f"prompt, once<br>{passed[0].total} tokens" if cut else "before step 1"
    shown = [_figure(_boxes(layout), before)]
    pixels = np.full((1, 1, 3), 255, np.uint8) if pixels is None else pixels
    for step in np.linspace(0, done - 1, min(done, MOST_FRAMES)).round().astype(int).tolist():
        png = image_files.encoded(frame(state, row, step, rows, pixels))
        image = f'<img src="data:image/png;base64,{base64.b64encode(png).decode()}" alt="">'
        shown.append(_figure(image, f"step {step + 1}<br>{passed[cut + step].total} tokens"))
    names = ", ".join(f"{i} {html.escape(name)}" for i, (name, _) in enumerate(layout, 1))
    note = "(blue boxes; written first, step by step; its tokens are in the counter above)"
    laid_out = f'<div class="legend"><b>Layout</b> {note}: {names}</div>' if layout else ""
    return f'{legend(state.settings)}<div class="passes">{"".join(shown)}</div>{laid_out}'


def frame(
    state: Progress, row: int, step: int, rows: int, pixels: image_files.Pixels
) -> image_files.Pixels:
    """Draws a step: the image so far, with outlines around the tiles that the step passes.

    Args:
        row: index in the batch.
        step: from 0.
        rows: of tiles.
        pixels: the image after this step or a later one.
    """
    part, step = _at(state.plan, step)
    block, decoded_at = int(part.block[step]), state.decoded_at[row]
    decoded, masked = part.decode[step, row], decoded_at > block
    commits = part.candidates[step, row].any(axis=-1)
    outlines = {}
    for positions in (part.clean[step, row], part.rest[step, row], decoded[~commits]):
        for cell in positions[positions != plans.PAD_POSITION].tolist():
            newest = decoded_at[cell] == block - 1
            outlines[cell] = figures.CLEAN if newest else figures.PARTS["rest"][0]
    now = decoded[commits & (decoded != plans.PAD_POSITION)].tolist()
    outlines |= dict.fromkeys(now, figures.MASKED)

    columns = len(masked) // rows
    side = max(LEAST_CELL, SIDE // max(rows, columns))
    size = columns * side, rows * side
    image = np.array(Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST))
    cached = ~masked
    cached[[*outlines]] = False

    def spread(of_cells: np.ndarray) -> np.ndarray:
        grid = of_cells.reshape(rows, columns)
        return grid.repeat(side, axis=0).repeat(side, axis=1)[..., None]

    faded = (image * (1 - FADED) + 255 * FADED).astype(np.uint8)
    image = np.where(spread(cached), faded, image)
    marked = Image.fromarray(np.where(spread(masked), np.uint8(FAINT[0]), image))
    pen = ImageDraw.Draw(marked)
    for cell, rgb in outlines.items():
        x, y = cell % columns * side, cell // columns * side
        box = (x, y, x + side - 1, y + side - 1)
        pen.rectangle(box, outline=rgb, width=max(1, side // 8))
    return np.array(marked)


def _at(phases: Sequence[plans.Steps], step: int) -> tuple[plans.Steps, int]:
    """Returns the phase of a step, and the number of the step in it."""
    for part in phases:
        if step < part.num_steps:
            return part, step
        step -= part.num_steps
    raise IndexError(step)


def _keys(meanings: Iterable[tuple[tuple[int, int, int], str]]) -> str:
    """Returns a line of coloured squares with their meanings."""
    keys = (
        f'<span><i style="border-color: {colour(rgb)}"></i>{html.escape(meaning)}</span>'
        for rgb, meaning in meanings
    )
    return f'<div class="legend">{"".join(keys)}</div>'


def _figure(image: str, caption: str) -> str:
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


# ---------------------------------------------------------------------------------------------
# What is said about images.


def found(result: Result) -> str:
    """Returns the box of each phrase in pixels, beside the colour that it is drawn in."""
    pairs = zip(result.prompts, result.boxes, strict=True)
    form = "left {:g}, top {:g}, right {:g}, bottom {:g} px"
    edges = (f"{phrase}: {form.format(*box) if box else 'not found'}" for phrase, box in pairs)
    return _keys(zip(itertools.cycle(BOXES), edges, strict=False))


def verdicts(result: Result) -> str:
    """Returns what the model said about each of its attempts, if it judged them."""
    said = [html.escape(verdict) for attempt in result.attempts for _, verdict in attempt]
    lines = [f"<b>Attempt {i}</b> {verdict}" for i, verdict in enumerate(said, 1)]
    return f'<div class="legend">{"<br>".join(lines)}</div>' if lines else ""


def layout_boxes(layout: str, most: int) -> list[tuple[str, Box]]:
    """Returns what a layout names, with its boxes.

    Args:
        layout: in words and location tokens: " large red circle<LOC_0><LOC_0><LOC_4><LOC_4>, ...".
        most: the largest coordinate (`PromptFormat.frame`).
    """
    found = []
    for name, tokens in _ENTRY.findall(layout):
        x1, y1, x2, y2 = (int(number) / most for number in _NUMBER.findall(tokens))
        found.append((name.strip(" ,.;:\n"), (x1, y1, x2, y2)))
    return found


def _boxes(layout: Sequence[tuple[str, Box]]) -> str:
    """Draws the boxes of a layout with their numbers, in a square."""
    parts = [f'<rect width="100" height="100" fill="{colour(FAINT)}"/>']
    for i, (name, (x1, y1, x2, y2)) in enumerate(layout, 1):
        x, y, width, height = (f"{100 * edge:.1f}" for edge in (x1, y1, x2 - x1, y2 - y1))
        middle = f'x="{50 * (x1 + x2):.1f}" y="{50 * (y1 + y2) + 4:.1f}"'
        parts.append(
            f'<g><title>{html.escape(name)}</title><rect x="{x}" y="{y}" width="{width}"'
            f' height="{height}" fill="white" stroke="{colour(figures.PROMPT)}" stroke-width="2"/>'
            f'<text {middle} font-size="12" text-anchor="middle" fill="{colour(figures.INK)}">{i}'
            "</text></g>"
        )
    return f'<svg viewBox="0 0 100 100">{"".join(parts)}</svg>'
