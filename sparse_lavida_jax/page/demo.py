# SPDX-License-Identifier: Apache-2.0
"""A web page with a tab for each task that the model knows, which `sparse-lavida demo` serves.

Needs the extra packages `sparse-lavida-jax[demo]`. The page shares the queue of the server that it
is mounted in: requests are batched where possible, users see how many are ahead of them, and "Stop"
(or closing the page) frees the device at the end of the phase. Images show which tokens each step
passed through the network (`page/passes.py`).
"""

import asyncio
import contextlib
import functools
import inspect
import os
import pathlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any

import fastapi
import gradio as gr
import gradio.themes
import numpy as np
from PIL import Image, ImageDraw
from starlette.routing import Mount

from sparse_lavida_jax import config
from sparse_lavida_jax.data import files, image_files
from sparse_lavida_jax.inference import surprise
from sparse_lavida_jax.inference.branches import SHARES
from sparse_lavida_jax.inference.checks import SEEDS
from sparse_lavida_jax.inference.requests import BRANCHES, TASK_SPECS
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.page import (
    example_prompts,
    fields,
    page_guard,
    passes,
    standing,
    surprises,
)
from sparse_lavida_jax.page.tabs import TABS
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.schema import InputError
from sparse_lavida_jax.server.batching import EVERY, Cancelled, QueueFull, Stopped, Ticket
from sparse_lavida_jax.server.serving import BRANCH, SURPRISE, Service

POLL_SECONDS = 0.2  # between two looks at the progress
KEEP_SECONDS = 3600  # for which uploads and images stay on disk
MOST_GUIDANCE = 8.0
MOST_PLACE = 0.95  # of a layout or an image that branches have in common
LEAST_MARKED = 768  # pixels of the longer side of an image with boxes
MOST_KEPT = 24  # images in the gallery
# Small images are shown large, pixel by pixel.
STYLE = """
.shown-image img, .gallery img {image-rendering: pixelated}
.shown-image img {object-fit: contain; width: 100%; height: 100%; box-sizing: border-box;
  padding-top: 30px}
"""
QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
HOW_TO = "A masked diffusion model at work. Click an example or write your own, and watch."
FONTS = ["system-ui", "sans-serif"]  # gradio's default fonts would be fetched from the internet
AS_TRAINED = "as trained"
EXPLAINED = {  # by setting
    "steps": "More take longer, fewer give worse results.",
    "guidance": "How closely the words are followed; 0 is off.",
    "registers": "Tokens that stand in for masks. Fewer are faster but give worse results.",
    "sampler": "The others, such as none and dense, are for comparison.",
    "seed": "A different number gives a different result.",
}
LABELS = {name: name.capitalize() for name in EXPLAINED}
_BASE = os.environ.get("GRADIO_TEMP_DIR")  # where the operator wants gradio's files


def mounted(app: fastapi.FastAPI, service: Service, host: str, port: int) -> fastapi.FastAPI:
    """Returns the server with the page at its root, protected by `page_guard.PageGuard`."""
    folder = page_guard.Folder(_BASE)
    os.environ["GRADIO_TEMP_DIR"] = folder.path  # where gradio writes, and all that it reads
    page = make_page(service)
    page.has_launched = True  # or gradio checks no path
    page.state_session_capacity = page_guard.SESSIONS
    gr.mount_gradio_app(
        app,
        page,
        path="",
        server_name=host,
        server_port=port,
        max_file_size=service.limits.upload,
        show_error=False,  # our own messages are shown anyway
        run_history=False,
        footer_links=[],
        ssr_mode=False,
        mcp_server=False,
        theme=gradio.themes.Default(font=FONTS, font_mono=["monospace"]),
        css=STYLE + passes.STYLE + standing.STYLE,
    )
    folder.keep()
    (mount,) = [one for one in app.routes if isinstance(one, Mount)]
    mount.app = page_guard.PageGuard(mount.app, page, folder, service.limits.upload)
    return app


def make_page(service: Service) -> gr.Blocks:
    """Returns the page; tasks that the model did not learn get no tab."""
    page = gr.Blocks(
        analytics_enabled=False, title="Sparse-LaViDa", delete_cache=(KEEP_SECONDS, KEEP_SECONDS)
    )
    with page:
        name = pathlib.Path(service.pipe.source.name).name or "a model"
        known = service.pipe.prompts.vocabulary
        knows = f"\n\nThis model knows {known.knows}." if known else ""
        gr.Markdown(f"## Sparse-LaViDa: {name}\n{HOW_TO}{knows}")
        pace = standing.Pace()
        service.watchers.append(pace.watch)
        tabs, scored = [], []
        for task in filter(functools.partial(_knows, service.pipe), TABS):
            with gr.Tab(TABS[task].label):
                if task == SURPRISE:
                    scored.append(_surprise(service, pace))
                else:
                    tabs.append(_Tab(service, task, pace))
        _gallery(tabs, scored)
    page.queue(max_size=None, default_concurrency_limit=None)  # the service has its own queue
    page._queue.max_thread_count = page_guard.EVENTS
    page._queue.ANALYTICS_MAX_EVENTS = 1  # gradio recomputes statistics over all of them per event
    return page


def _knows(pipe: Any, task: str) -> bool:
    """Whether a model can do what a tab is for."""
    if task != SURPRISE:
        return not pipe.prompts.refusal(task)
    with contextlib.suppress(InputError):
        surprise.sampling_of(pipe.settings.sampling, pipe.settings.model)
        return not pipe.prompts.refusal("generate")
    return False


# ---------------------------------------------------------------------------------------------
# A tab: inputs of a task on the left, its output on the right.


class _Tab:
    """A tab, made where it stands in the page.

    Args:
        pace: how long requests take.

    Attributes:
        shown: the input for an image; None if the task has none.
        words: the text box.
        output: what the task makes.
        drawing: the event that runs the task.
    """

    def __init__(self, service: Service, task: str, pace: standing.Pace):
        form, spec = TABS[task], TASK_SPECS[task]
        self.task, self.shown = task, None
        examples = example_prompts.of_world(service.pipe.prompts.world)
        inputs: dict[str, Any] = {}
        with gr.Row():
            with gr.Column():
                if spec.image:
                    first = None if task == "infill" else examples.start(task)
                    self.shown = fields.image_input(service, first, small=task == "inpaint")
                    inputs["given"] = self.shown
                    if task == "inpaint":
                        inputs["given"] = fields.image_editor(service, self.shown, first)
                lines = 3 if spec.makes == "boxes" else 1
                self.words = gr.Textbox(
                    label=form.words,
                    value=examples.words.get(task, ""),
                    info=form.info or None,
                    lines=lines,
                )
                inputs["words"] = self.words
                _offer(examples, task, self.shown, self.words)
                if task == "reflect":
                    most = service.limits.images
                    inputs["rounds"] = gr.Slider(1, most, 3, step=1, label="Attempts")
                if task == "ask":
                    inputs["long"] = gr.Checkbox(label="Answer step by step")
                with gr.Row():
                    go = gr.Button(form.button or form.label, variant="primary", scale=3)
                    stop = gr.Button("Stop", scale=1, min_width=80)
                with gr.Accordion("Settings", open=False):
                    inputs |= _settings(service, task)
            with gr.Column():
                outputs = _outputs(task)
        for component in inputs.values():
            if isinstance(component, gr.Number | gr.Slider):
                fields.check_number(component)
        if spec.draws:
            outputs.append(gr.HTML(passes.legend()))
        self.output, note = outputs[:2]
        if spec.draws:
            drawn = gr.State()  # the record of the image, and what it was drawn after
            outputs.append(drawn)
            if task != "reflect":
                _more(service, drawn, note, pace)

        async def run(*values: Any) -> AsyncIterator[tuple[Any, ...]]:
            async for made in _run(service, task, dict(zip(inputs, values, strict=True)), pace):
                yield made

        starts = [go.click] if lines > 1 else [go.click, self.words.submit]
        self.drawing = _on(starts, stop, run, inputs, outputs, task)


def _on(
    starts: Sequence[Any],
    stop: gr.Button,
    run: Any,
    inputs: dict[str, Any],
    outputs: Sequence[Any],
    name: str,
) -> Any:
    """Returns the event that runs a tab until it is done or stopped.

    Args:
        inputs: by the names that programs that call the page use.
        outputs: the second one is the note on where the request stands.
        name: by which programs call it.
    """
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    run.__signature__ = inspect.Signature([inspect.Parameter(one, named) for one in inputs])
    how: dict[str, Any] = {"api_name": name, "show_progress": "hidden"}
    running = gr.on(starts, run, [*inputs.values()], [*outputs], **how)
    stopped = standing.note("Stopped.")
    ended = stop.click(None, None, None, cancels=[running], **QUIET)
    ended.then(lambda: stopped, None, outputs[1], **QUIET)
    return running


def _surprise(service: Service, pace: standing.Pace) -> gr.Image:
    """Adds what tells how well captions fit an image; returns the input for the image."""
    form, examples = TABS[SURPRISE], example_prompts.of_world(service.pipe.prompts.world)
    with gr.Row():
        with gr.Column():
            shown = fields.image_input(service, examples.start())
            words = gr.Textbox(
                label=form.words, value=examples.words.get(SURPRISE), info=form.info, lines=3
            )
            with gr.Row():
                go = gr.Button(form.button, variant="primary", scale=3)
                stop = gr.Button("Stop", scale=1, min_width=80)
        with gr.Column():
            outputs = [_shown_image(form.result), gr.HTML(), gr.HTML()]

    async def run(given: Any, words: str | None) -> AsyncIterator[tuple[Any, ...]]:
        async for made in _surprised(service, given, words, pace):
            yield made

    _on([go.click], stop, run, {"given": shown, "words": words}, outputs, SURPRISE)
    return shown


def _more(service: Service, drawn: gr.State, note: gr.HTML, pace: standing.Pace) -> None:
    """Adds images like the one that was drawn, which branch off at a place of choice."""
    with gr.Accordion("More like this", open=False):
        place = gr.Slider(0, MOST_PLACE, SHARES["layout"], step=0.05, label="Same up to")
        place.info = (
            "a share of the layout, or of the image if it has no layout; from there on, other noise"
        )
        go = gr.Button("More like this")
        images = gr.Gallery(show_label=False, columns=4, format="png", elem_classes="gallery")
    fields.check_number(place)

    async def run(drawn: Any, place: float) -> AsyncIterator[tuple[Any, ...]]:
        async for made in _branched(service, drawn, place, pace):
            yield made

    go.click(run, [drawn, place], [images, note], **QUIET)


def _offer(
    examples: example_prompts.Examples, task: str, shown: gr.Image | None, words: gr.Textbox
) -> None:
    """Adds prompts to click; those about an image also bring the image that they are about."""
    prompts = examples.prompts.get(task, ())
    if not prompts:
        return
    chips = gr.Dataset(
        components=[words],
        samples=[[prompt] for prompt in prompts],
        label="Examples" if shown is None else "Examples, with their own image",
    )
    if shown is None:
        chips.click(lambda sample: sample[0], chips, words, **QUIET)
    else:
        image = examples.start(task)
        chips.click(lambda sample: (image, sample[0]), chips, [shown, words], **QUIET)


def _gallery(tabs: Sequence[_Tab], more: Sequence[gr.Image]) -> None:
    """Adds the images of the session; the last one, or one that is clicked, goes to every tab.

    Args:
        more: inputs for images besides those of tabs.
    """
    with gr.Column(visible=False) as box:
        gr.Markdown("**Images of this session.** Click one to take it to every tab.")
        kept = gr.Gallery(
            show_label=False,
            columns=8,
            fit_columns=False,
            height=170,
            object_fit="contain",
            format="png",
            allow_preview=False,
            interactive=False,
            elem_classes="gallery",
        )
    takers = [*(tab.shown for tab in tabs if tab.shown is not None), *more]

    def pick(images: list[tuple[str, None]], event: gr.SelectData) -> list[str]:
        return [images[event.index][0]] * len(takers)

    if takers:
        kept.select(pick, kept, takers, **QUIET)
    for tab in tabs:
        if not TASK_SPECS[tab.task].draws:
            continue
        others = [one for one in takers if one is not tab.shown]

        def keep(image: Any, images: Any, count: int = len(others)) -> list[Any]:
            images = [image, *(images or [])][:MOST_KEPT]
            return [gr.Column(visible=True), images, *[image] * count]

        tab.drawing.success(keep, [tab.output, kept], [box, kept, *others], **QUIET)


def _settings(service: Service, task: str) -> dict[str, Any]:
    """Returns the input fields for sampling, by option name."""
    sampling, model = service.pipe.settings.sampling, service.pipe.settings.model
    inputs: dict[str, Any] = {}
    if TASK_SPECS[task].draws:
        cells = model.grid_size**2
        steps = min(sampling.num_steps, cells)
        inputs["steps"] = gr.Slider(1, cells, steps, step=1, label=LABELS["steps"])
        guidance = presets.guidance_of(sampling, has_source=task == "edit")
        label = LABELS["guidance"]
        inputs["guidance"] = gr.Slider(0, MOST_GUIDANCE, guidance, step=0.1, label=label)
    elif TASK_SPECS[task].makes == "text" or not service.pipe.prompts.locates_in_one_step:
        block = service.pipe.prompts.text_block_len
        steps = min(sampling.text.steps, block)
        inputs["steps"] = gr.Slider(1, block, steps, step=1, label="Steps of a text block")
    trained, samplers = model.num_registers, [AS_TRAINED, *config.PRESETS]
    inputs["registers"] = gr.Slider(0, max(trained, 1), trained, step=1, label=LABELS["registers"])
    inputs["sampler"] = gr.Dropdown(samplers, value=AS_TRAINED, label=LABELS["sampler"])
    inputs["seed"] = gr.Number(0, label=LABELS["seed"], precision=0, minimum=0, maximum=SEEDS - 1)
    for name, component in inputs.items():
        component.info = EXPLAINED[name]
    return inputs


def _outputs(task: str) -> list[Any]:
    makes, label = TASK_SPECS[task].makes, TABS[task].result
    if makes == "text":
        return [gr.Textbox(label=label, lines=3), gr.HTML()]
    return [_shown_image(label), gr.HTML()]


def _shown_image(label: str) -> gr.Image:
    """Returns an output for an image."""
    looks: dict[str, Any] = {"height": fields.HEIGHT, "buttons": fields.BUTTONS}
    # Passed on as a file, so that gradio does not rewrite it while a browser fetches it.
    looks |= {"format": "png", "type": "filepath", "elem_classes": "shown-image"}
    return gr.Image(label=label, interactive=False, **looks)


# ---------------------------------------------------------------------------------------------
# Requests.


async def _run(
    service: Service, task: str, inputs: dict[str, Any], pace: standing.Pace
) -> AsyncIterator[tuple[Any, ...]]:
    """Yields the values of a tab's outputs while its request waits and runs, then its result."""
    image, words, options = inputs.pop("given", None), inputs.pop("words") or "", inputs
    makes, shown = TASK_SPECS[task].makes, None
    if task == "inpaint":
        image, known = fields.needed(image)
        options |= known
    elif TASK_SPECS[task].image == "needed":
        image = fields.needed(image)
    if makes == "boxes":
        words = [line for line in files.lines(words) if line.strip()] or [""]
    elif task == "caption":
        task = "constrained_caption" if words.strip() else "caption"
        options["template"], words = words if words.strip() else None, None
    elif options.pop("long", False):
        task = "reason"
    if options["sampler"] == AS_TRAINED:
        options["sampler"] = None
    whole = {"steps", "registers", "seed", "rounds"} & options.keys()
    options |= {name: int(options[name]) for name in whole if options[name] is not None}
    with _refusing():
        looks = EVERY if makes == "image" else 0
        ticket = service.submit(task, words, image, previews=looks, **options)
        async with contextlib.aclosing(_waiting(ticket)) as waiting:
            async for _ in waiting:
                seen, *notes = _meanwhile(service, ticket, pace)
                # gradio writes each image to a file named by its content, and may be sending it.
                yield (gr.skip() if seen is shown else seen, *notes)
                shown = seen
        result = ticket.future.result()
    note = standing.done(ticket, result)
    if makes == "image":
        seen = passes.drawn(ticket, result.pixels[0], _layout(service, ticket))
        kept = (result.records[0], image) if result.records else None
        yield result.pixels[0], note, seen + passes.verdicts(result), kept
    elif makes == "text":
        yield result.text, note
    else:
        assert image is not None  # `fields.needed` has seen to it
        yield _marked(image, result), note + passes.found(result)


async def _branched(
    service: Service, drawn: Any, place: float | None, pace: standing.Pace
) -> AsyncIterator[tuple[Any, ...]]:
    """Yields the branches of the image that was drawn, and where they stand.

    Args:
        drawn: its record, and the image that it was drawn after; None: there is none yet.
        place: the share that it has in common with them.
    """
    if drawn is None:
        raise gr.Error("draw an image first.", print_exception=False)
    record, image = drawn
    stage = "image" if record["layout"] is None else "layout"
    options = {"record": record, "at": f"{stage}:{place or 0.0:.2f}"}
    options["num_images"] = min(BRANCHES, service.limits.images)
    with _refusing():
        ticket = service.submit(BRANCH, None, image, **options)
        async with contextlib.aclosing(_waiting(ticket)) as waiting:
            async for _ in waiting:
                yield gr.skip(), standing.standing(ticket, pace)
        result = ticket.future.result()
    yield list(result.images), standing.done(ticket, result)


async def _surprised(
    service: Service, image: Any, words: str | None, pace: standing.Pace
) -> AsyncIterator[tuple[Any, ...]]:
    """Yields an image with the bits of its best caption, where it stands, and all captions."""
    image = fields.needed(image)
    captions = [line.strip() for line in files.lines(words or "") if line.strip()]
    with _refusing():
        ticket = service.submit(SURPRISE, captions, image)
        async with contextlib.aclosing(_waiting(ticket)) as waiting:
            async for _ in waiting:
                yield gr.skip(), standing.standing(ticket, pace), gr.skip()
        found = ticket.future.result()
    pixels = service.pipe.prompts.codec_image(image, service.pipe.codec.image_size)
    lit = surprises.lit(pixels, found, found.ranked[0])
    yield lit, standing.scored(ticket, found), surprises.ranking(pixels, found)


async def _waiting(ticket: Ticket) -> AsyncGenerator[None]:
    """Yields now and then until a request is done; cancels it if nobody waits any more."""
    waited = asyncio.wrap_future(ticket.future)
    # If nobody waits for it any more, asyncio should not log the error as never retrieved.
    waited.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        while not (await asyncio.wait([waited], timeout=POLL_SECONDS))[0]:
            yield
        await waited
    finally:
        ticket.cancel()


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Shows what is refused in a sentence."""
    try:
        yield
    except (InputError, QueueFull, Stopped, Cancelled) as error:
        said = error.worded(_label) if isinstance(error, InputError) else str(error)
        raise gr.Error(said, print_exception=False) from error


def _meanwhile(service: Service, ticket: Ticket, pace: standing.Pace) -> tuple[Any, ...]:
    """Returns the values of a tab's outputs before the result is there; None for no image yet."""
    makes, note = TASK_SPECS[ticket.task].makes, standing.standing(ticket, pace)
    if makes != "image":
        return "" if makes == "text" else gr.skip(), note
    preview = ticket.previews[-1] if ticket.previews else None
    return preview, note, passes.drawn(ticket, preview, _layout(service, ticket)), gr.skip()


def _layout(service: Service, ticket: Ticket) -> list[tuple[str, passes.Box]]:
    """Returns the boxes that an image is drawn from, if the model laid it out first."""
    stage = next((one for one in ticket.stages[::-1] if one.stage == "layout"), None)
    if stage is None:
        return []
    prompts = service.pipe.prompts
    text = prompts.text(stage.responses[stage.rows.index(ticket.start)])
    return passes.layout_boxes(text, prompts.frame)


def _label(setting: str) -> str:
    """Returns the label of the field that sets an option."""
    return LABELS.get(setting, setting)


def _marked(image: image_files.Pixels, result: Result) -> image_files.Pixels:
    """Returns an image with the boxes of phrases, each in its colour (`passes.BOXES`).

    Small images are enlarged, so that the lines are thin.
    """
    times = max(1, LEAST_MARKED // max(image.shape[:2]))
    drawn = Image.fromarray(image.repeat(times, axis=0).repeat(times, axis=1))
    pen, width = ImageDraw.Draw(drawn), max(3, max(drawn.size) // 256)
    for i, box in enumerate(result.boxes):
        if box is not None:
            colour = passes.BOXES[i % len(passes.BOXES)]
            pen.rectangle([round(x * times) for x in box], outline=colour, width=width)
    return np.array(drawn)
