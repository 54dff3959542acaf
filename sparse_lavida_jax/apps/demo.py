# SPDX-License-Identifier: Apache-2.0
"""A web page with a tab for each task that the model knows, which `sparse-lavida demo` serves.

Needs the extra packages `sparse-lavida-jax[demo]`. The page shares the queue of the server that it
is mounted in: requests are batched where possible, users see how many are ahead of them, and "Stop"
(or closing the page) frees the device at the end of the segment.
"""

import asyncio
import inspect
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import fastapi
import gradio as gr
import gradio.themes
import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.apps.batching import EVERY, Cancelled, QueueFull, Stopped, Ticket
from sparse_lavida_jax.apps.errors import REFUSED
from sparse_lavida_jax.apps.serving import Service
from sparse_lavida_jax.apps.tasks import FORMS
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference.requests import LARGEST_SEED, TASKS
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.sampling import presets

POLL_SECONDS = 0.2  # between two looks at the progress
KEEP_SECONDS = 3600  # for which uploads and images stay on disk
HEIGHT = 384  # pixels of an image on the page
MOST_GUIDANCE = 8.0
# Small images are shown large, pixel by pixel.
STYLE = (
    ".shown-image img {object-fit: contain; image-rendering: pixelated; width: 100%; height: 100%}"
)
FONTS = ["system-ui", "sans-serif"]  # gradio's default fonts would be fetched from the internet
BRUSH = "#ff40c0"
AS_TRAINED = "as trained"
TABS = {task: form for task, form in FORMS.items() if form.label}
BUTTONS: list[Any] = ["download", "fullscreen"]  # all but the one that uploads to a web site


def mounted(app: fastapi.FastAPI, service: Service, host: str, port: int) -> fastapi.FastAPI:
    """Returns the server with the page at its root."""
    return gr.mount_gradio_app(
        app,
        make_page(service),
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
        css=STYLE,
    )


def make_page(service: Service) -> gr.Blocks:
    """Returns the page; tasks that the model did not learn get no tab."""
    page = gr.Blocks(
        analytics_enabled=False, title="Sparse-LaViDa", delete_cache=(KEEP_SECONDS, KEEP_SECONDS)
    )
    with page:
        name = pathlib.Path(service.pipe.source.name).name or "a model"
        known = service.pipe.prompts.vocabulary
        knows = f"This model knows {known.knows}.\n\n" if known else ""
        how = "Requests of one kind run together; others wait."
        gr.Markdown(f"## Sparse-LaViDa: {name}\n{knows}{how}")
        shown: list[gr.Image] = []  # inputs of tasks
        drawn: list[gr.Image] = []  # outputs of "generate"
        for task, form in TABS.items():
            if not service.pipe.prompts.refusal(task):
                with gr.Tab(form.label):
                    _tab(service, task, shown, drawn)
        if drawn and shown:
            share = gr.Button("Take the image just drawn over to the other tabs")
            share.click(
                lambda image: [image] * len(shown), drawn[0], shown, api_visibility="private"
            )
    page.queue(max_size=None, default_concurrency_limit=None)  # the service has its own queue
    return page


# ---------------------------------------------------------------------------------------------
# A tab: inputs of a task on the left, its output on the right.


def _tab(service: Service, task: str, shown: list[gr.Image], drawn: list[gr.Image]) -> None:
    form, spec = TABS[task], TASKS[task]
    inputs: dict[str, Any] = {}
    with gr.Row():
        with gr.Column():
            if task == "inpaint":
                inputs["given"] = _editor(service, shown)
            elif spec.image:
                inputs["given"] = _image(service, shown)
            label, value = form.words
            lines = 3 if spec.makes == "boxes" else 1
            inputs["words"] = gr.Textbox(
                label=label, value=value, info=form.info or None, lines=lines
            )
            if task == "reflect":
                most = service.limits.images
                inputs["rounds"] = gr.Slider(1, most, 3, step=1, label="Attempts")
            if task == "ask":
                inputs["long"] = gr.Checkbox(label="Answer step by step")
            with gr.Accordion("Settings", open=False):
                inputs |= _settings(service, task)
            with gr.Row():
                go = gr.Button(form.button or form.label, variant="primary")
                stop = gr.Button("Stop", variant="stop")
        with gr.Column():
            outputs = _outputs(task)
    if task == "generate":
        drawn.append(outputs[0])

    async def run(*values: Any) -> AsyncIterator[tuple[Any, ...]]:
        async for shown in _run(service, task, dict(zip(inputs, values, strict=True))):
            yield shown

    # The input names for programs that call the page.
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, named) for name in inputs])
    run.__signature__ = signature
    event = go.click(run, [*inputs.values()], outputs, api_name=task, show_progress="hidden")
    stop.click(None, None, None, cancels=[event], api_visibility="private")


def _settings(service: Service, task: str) -> dict[str, Any]:
    """Returns the input fields for sampling, by option name."""
    sampling, model = service.pipe.settings.sampling, service.pipe.settings.model
    inputs: dict[str, Any] = {}
    if TASKS[task].draws:
        cells = model.grid_size**2
        inputs["steps"] = gr.Slider(1, cells, min(sampling.num_steps, cells), step=1, label="Steps")
        guidance = presets.guidance_of(sampling, has_source=task == "edit")
        inputs["guidance"] = gr.Slider(0, MOST_GUIDANCE, guidance, step=0.1, label="Guidance")
    elif TASKS[task].makes == "text" or not service.pipe.prompts.locates_in_one_step:
        block = service.pipe.prompts.text_block_len
        steps = min(sampling.text_steps, block)
        inputs["steps"] = gr.Slider(1, block, steps, step=1, label="Steps of a text block")
    trained, samplers = model.num_registers, [AS_TRAINED, *config.PRESETS]
    inputs["registers"] = gr.Slider(0, max(trained, 1), trained, step=1, label="Registers")
    inputs["sampler"] = gr.Dropdown(samplers, value=AS_TRAINED, label="Sampler")
    inputs["seed"] = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=LARGEST_SEED)
    return inputs


def _outputs(task: str) -> list[Any]:
    makes, label = TASKS[task].makes, TABS[task].result
    if makes == "text":
        return [gr.Textbox(label=label, lines=3), gr.Markdown()]
    if makes == "boxes":
        boxes = gr.AnnotatedImage(label=label, height=HEIGHT, elem_classes="shown-image")
        return [boxes, gr.Markdown()]
    looks = {"label": label, "height": HEIGHT, "elem_classes": "shown-image", "buttons": BUTTONS}
    image = gr.Image(format="png", interactive=False, **looks)
    return [image, gr.Markdown(), gr.Textbox(label="Said about it: layout or verdict")]


def _image(
    service: Service, shown: list[gr.Image], editor: gr.ImageEditor | None = None
) -> gr.Image:
    """Returns an image input; a file that is not an image is refused on upload.

    Args:
        editor: where the image can be sent to be painted on.
    """
    given = gr.Image(
        label="Image",
        sources=["upload", "clipboard"],
        height=HEIGHT if editor is None else HEIGHT // 2,
        elem_classes="shown-image",
        buttons=BUTTONS,
    )

    # Not a subclass: gradio writes a .pyi file next to the source of every component class.
    given.preprocess = lambda payload: _read(service, payload)
    if editor is None:
        given.upload(lambda _: None, given, None, api_visibility="private")
    else:
        given.change(lambda image: image, given, editor, api_visibility="private")
    shown.append(given)
    return given


def _editor(service: Service, shown: list[gr.Image]) -> gr.ImageEditor:
    """Returns an image input with an editor below it, in which the image is painted on."""
    editor = gr.ImageEditor(
        label="Paint over what shall be drawn again",
        sources=[],  # its own upload would show nothing, without an error, for a broken file
        brush=gr.Brush(colors=[BRUSH], color_mode="fixed", default_size="auto"),
        layers=False,
        transforms=[],
        height=HEIGHT + 80,
        format="png",
        buttons=BUTTONS,
        render=False,
    )
    _image(service, shown, editor)
    editor.render()
    whole = editor.preprocess

    def read(payload: Any) -> Any:
        files = [payload.background, *payload.layers, payload.composite] if payload else []
        for file in files:
            _read(service, file)
        return whole(payload)

    editor.preprocess = read  # for programs that call the page
    return editor


def _read(service: Service, file: Any) -> image_files.Pixels | None:
    """Returns the pixels of an uploaded file; a file that is not an image is refused."""
    if file is None:
        return None
    try:
        return service.image(pathlib.Path(file.path).read_bytes(), file.orig_name or "the image")
    except image_files.ImageError as error:
        raise gr.Error(str(error), print_exception=False) from error


# ---------------------------------------------------------------------------------------------
# Requests.


async def _run(
    service: Service, task: str, inputs: dict[str, Any]
) -> AsyncIterator[tuple[Any, ...]]:
    """Yields the values of a tab's outputs while its request waits and runs, then its result."""
    image, words, options = inputs.pop("given", None), inputs.pop("words"), inputs
    makes = TASKS[task].makes
    painted = None
    if task == "inpaint":
        painted = _painted(image)
    elif TASKS[task].image == "needed":
        image = _needed(image)
    if makes == "boxes":
        words = [line for line in words.splitlines() if line.strip()] or [""]
    elif task == "caption":
        task = "constrained_caption" if words.strip() else "caption"
        options["template"], words = words if words.strip() else None, None
    elif options.pop("long", False):
        task = "reason"
    if options["sampler"] == AS_TRAINED:
        options["sampler"] = None
    options["seed"] = options["seed"] or 0
    whole = {"steps", "registers", "seed", "rounds"} & options.keys()
    options |= {name: int(options[name]) for name in whole}  # sliders return 3.0 for 3
    try:
        # What waits is kept no larger than the model needs it.
        if painted is not None:
            image, known = await asyncio.to_thread(service.with_hole, *painted)
            options |= known
        elif image is not None:
            image = await asyncio.to_thread(service.small, image)
        looks = EVERY if makes == "image" else 0
        ticket = service.submit(task, words, image, previews=looks, **options)
        waited = asyncio.wrap_future(ticket.future)
        try:
            while not (await asyncio.wait([waited], timeout=POLL_SECONDS))[0]:
                preview = ticket.previews[-1] if ticket.previews else gr.skip()
                first, *rest = {"image": (preview, ""), "text": ("",)}.get(makes, (gr.skip(),))
                yield first, _standing(ticket), *rest
            result = await waited
        finally:
            ticket.cancel()
    except (*REFUSED, QueueFull, Stopped, Cancelled) as error:
        raise gr.Error(str(error), print_exception=False) from error
    passed = f"{result.tokens_passed} tokens through the network, seed {result.seeds[0]}"
    note = f"{ticket.seconds:.2f} seconds, {passed}{_warning(ticket)}"
    if makes == "image":
        yield result.pixels[0], note, "\n".join(result.plans or result.texts)
    else:
        yield (result.text if makes == "text" else _marked(image, result)), note


def _standing(ticket: Ticket) -> str:
    if ticket.began is None:
        return f"waiting: {ticket.ahead} before this one{_warning(ticket)}"
    state = ticket.state
    if state is None:
        return f"starting{_warning(ticket)}"
    note = "" if state.steps else " (compiling, once for each size)"
    return f"{state.making}: step {state.steps} of {state.total}{note}{_warning(ticket)}"


def _warning(ticket: Ticket) -> str:
    """Returns a paragraph on words that the model does not know; "" if it knows them all."""
    warning = ticket.requests[0].warning
    return f"\n\n{warning[:1].upper()}{warning[1:]}" if warning else ""


def _needed(given: Any) -> Any:
    if given is None:
        raise gr.Error("this task is about an image: give one.", print_exception=False)
    return given


def _painted(editor: dict[str, Any] | None) -> tuple[image_files.Pixels, np.ndarray]:
    """Returns the image, and where it was painted over."""
    editor = editor or {"background": None, "layers": []}
    background = _needed(editor["background"])
    mask = np.zeros(background.shape[:2], bool)
    for layer in editor["layers"]:
        mask |= layer[..., 3] > 0
    return np.ascontiguousarray(background[..., :3]), mask


def _marked(image: image_files.Pixels, result: Result) -> tuple[Any, list[Any]]:
    """Returns an image with the boxes of phrases in whole pixels, for gradio."""
    found = zip(result.prompts, result.boxes, strict=True)
    return image, [(tuple(round(x) for x in box), phrase) for phrase, box in found if box]
