# SPDX-License-Identifier: Apache-2.0
"""A page to play with: every task that the model knows is a tab. What `sparse-lavida demo` runs.

Needs the extra packages `sparse-lavida-jax[demo]`. The page stands on the same queue as the server
that it is mounted in: one request at a time, the others see how many are before them, and "Stop"
(or closing the page) frees the device at the next segment.
"""

import asyncio
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import fastapi
import gradio as gr
import gradio.themes
import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.apps.serving import MISTAKES, Cancelled, QueueFull, Service, Ticket
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.data.templates import RequestError
from sparse_lavida_jax.inference.requests import LARGEST_SEED
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.sampling import options, presets

POLL_SECONDS = 0.2  # between two looks at the progress
KEEP_SECONDS = 3600  # that uploads and images stay on disk
HEIGHT = 384  # pixels of an image on the page
MOST_GUIDANCE = 8.0
# Small images are shown large, pixel by pixel.
STYLE = ".image img {object-fit: contain; image-rendering: pixelated; width: 100%; height: 100%}"
FONTS = ["system-ui", "sans-serif"]  # gradio's own would be fetched from elsewhere
BRUSH = "#ff40c0"
BUTTONS: list[Any] = ["download", "fullscreen"]  # without the one that shares with a web site

Notes = tuple[Any, ...]  # values of a tab's outputs


def mounted(app: fastapi.FastAPI, service: Service, host: str, port: int) -> fastapi.FastAPI:
    """Returns a server with the page at its root."""
    return gr.mount_gradio_app(
        app,
        make_page(service),
        path="",
        server_name=host,
        server_port=port,
        max_file_size=service.limits.upload,
        show_error=False,  # sentences of ours are shown anyway
        run_history=False,
        footer_links=[],
        ssr_mode=False,
        mcp_server=False,
        theme=gradio.themes.Default(font=FONTS, font_mono=["monospace"]),
        css=STYLE,
    )


def make_page(service: Service) -> gr.Blocks:
    """Returns the page; tasks that the model did not learn have no tab."""
    page = gr.Blocks(
        analytics_enabled=False, title="Sparse-LaViDa", delete_cache=(KEEP_SECONDS, KEEP_SECONDS)
    )
    with page:
        name = pathlib.Path(service.pipe.source.name).name or "a model"
        gr.Markdown(f"## Sparse-LaViDa: {name}\nOne request runs at a time; the others wait.")
        shown: list[gr.Image] = []
        drawn: list[gr.Image] = []
        for task, label, make in TABS:
            if _knows(service, task):
                with gr.Tab(label):
                    make(service, shown, drawn)
        if drawn and shown:
            share = gr.Button("Take the image just drawn over to the other tabs")
            share.click(
                lambda image: [image] * len(shown), drawn[0], shown, api_visibility="private"
            )
    page.queue(max_size=None, default_concurrency_limit=None)  # the queue is the service's
    return page


def _knows(service: Service, task: str) -> bool:
    try:
        service.pipe.prompts.check_task(task)
    except (RequestError, config.ConfigError):
        return False
    return True


# ---------------------------------------------------------------------------------------------
# Tabs.


def _draw(service: Service, shown: list[gr.Image], drawn: list[gr.Image]) -> None:
    with gr.Row():
        with gr.Column():
            words = gr.Textbox(label="Prompt", value="a red circle above a blue square")
            options = _drawing_options(service)
            go, stop = _buttons("Draw")
        image, note, plan = _drawn()

    async def draw(words, *options) -> AsyncIterator[Notes]:
        async for values in _paint(service, "generate", words, None, options):
            yield values

    _wire(go, stop, draw, [words, *options], [image, note, plan], "generate")
    drawn.append(image)


def _edit(service: Service, shown: list[gr.Image], drawn: list[gr.Image]) -> None:
    _change(service, shown, "edit", "Instruction", "make the red circle green")


def _outpaint(service: Service, shown: list[gr.Image], drawn: list[gr.Image]) -> None:
    _change(service, shown, "outpaint", "What the whole new image shows", "")


def _change(service: Service, shown: list[gr.Image], task: str, label: str, value: str) -> None:
    with gr.Row():
        with gr.Column():
            given = _image(service, shown)
            words = gr.Textbox(label=label, value=value)
            options = _drawing_options(service, edits=task == "edit")
            go, stop = _buttons(task.capitalize())
        image, note, plan = _drawn()

    async def change(given, words, *options) -> AsyncIterator[Notes]:
        async for values in _paint(service, task, words, _needed(given), options):
            yield values

    _wire(go, stop, change, [given, words, *options], [image, note, plan], task)


def _inpaint(service: Service, shown: list[gr.Image], drawn: list[gr.Image]) -> None:
    editor = gr.ImageEditor(
        label="Paint over what shall be drawn anew",
        sources=[],  # its own would show nothing, and say nothing, of a broken file
        brush=gr.Brush(colors=[BRUSH], color_mode="fixed", default_size="auto"),
        layers=False,
        transforms=[],
        height=HEIGHT + 80,
        format="png",
        buttons=BUTTONS,
        render=False,
    )
    with gr.Row():
        with gr.Column():
            _image(service, shown, editor)
            editor.render()
            words = gr.Textbox(label="What the whole image shows")
            options = _drawing_options(service)
            go, stop = _buttons("Inpaint")
        image, note, plan = _drawn()

    whole = editor.preprocess

    def read(payload: Any) -> Any:
        files = [payload.background, *payload.layers, payload.composite] if payload else []
        for file in files:
            _read(service, file)
        return whole(payload)

    editor.preprocess = read  # of programs that use the page

    async def inpaint(painted, words, *options) -> AsyncIterator[Notes]:
        given, mask = _painted(painted)
        async for values in _paint(service, "inpaint", words, given, options, mask=mask):
            yield values

    _wire(go, stop, inpaint, [editor, words, *options], [image, note, plan], "inpaint")


def _reflect(service: Service, shown: list[gr.Image], drawn: list[gr.Image]) -> None:
    with gr.Row():
        with gr.Column():
            words = gr.Textbox(label="Prompt", value="two blue squares and a red circle")
            rounds = gr.Slider(1, service.limits.images, 3, step=1, label="Attempts")
            options = _drawing_options(service)
            go, stop = _buttons("Draw and judge")
        image, note, plan = _drawn()

    async def reflect(words, rounds, *options) -> AsyncIterator[Notes]:
        async for values in _paint(service, "reflect", words, None, options, rounds=int(rounds)):
            yield values

    _wire(go, stop, reflect, [words, rounds, *options], [image, note, plan], "reflect")


def _ask(service: Service, shown: list[gr.Image], drawn: list[gr.Image]) -> None:
    words = gr.Textbox(label="Question", value="how many squares are there?", render=False)
    long = gr.Checkbox(label="Answer step by step", render=False)

    async def ask(given, words, long, *options) -> AsyncIterator[Notes]:
        task = "reason" if long else "ask"
        async for values in _write(service, task, words, given, options):
            yield values

    _say(service, shown, [words, long], ask, "Ask", "Answer")


def _caption(service: Service, shown: list[gr.Image], drawn: list[gr.Image]) -> None:
    template = gr.Textbox(
        label="In these words, if any",
        info="___ is a gap of one token, {4} one of four: a ___ red circle",
        render=False,
    )

    async def caption(given, template, *options) -> AsyncIterator[Notes]:
        more = {"template": template} if template.strip() else {}
        task = "constrained_caption" if more else "caption"
        async for values in _write(service, task, None, _needed(given), options, **more):
            yield values

    _say(service, shown, [template], caption, "Describe", "Description")


def _infill(service: Service, shown: list[gr.Image], drawn: list[gr.Image]) -> None:
    words = gr.Textbox(
        label="Text with gaps",
        value="a red circle is ___ a blue square",
        info="___ is a gap of one token, {4} one of four; an image is not needed",
        render=False,
    )

    async def infill(given, words, *options) -> AsyncIterator[Notes]:
        async for values in _write(service, "infill", words, given, options):
            yield values

    _say(service, shown, [words], infill, "Fill", "Filled")


def _say(
    service: Service,
    shown: list[gr.Image],
    inputs: list[Any],
    does: Callable[..., AsyncIterator[Notes]],
    button: str,
    label: str,
) -> None:
    """An image and `inputs`, not yet on the page, beside the text that comes of them."""
    with gr.Row():
        with gr.Column():
            given = _image(service, shown)
            for part in inputs:
                part.render()
            options = _text_options(service)
            go, stop = _buttons(button)
        with gr.Column():
            answer, note = gr.Textbox(label=label, lines=3), gr.Markdown()
    _wire(go, stop, does, [given, *inputs, *options], [answer, note], does.__name__)


def _ground(service: Service, shown: list[gr.Image], drawn: list[gr.Image]) -> None:
    with gr.Row():
        with gr.Column():
            given = _image(service, shown)
            words = gr.Textbox(label="What to find, one a line", lines=3, value="blue square")
            options = _text_options(service)
            go, stop = _buttons("Find")
        with gr.Column():
            boxes = gr.AnnotatedImage(label="Found", height=HEIGHT, elem_classes="picture")
            note = gr.Markdown()

    async def ground(given, words, *options) -> AsyncIterator[Notes]:
        image = _needed(given)
        phrases = [line for line in words.splitlines() if line.strip()] or [""]
        more = _text_settings(service, options)
        async for note, _, result in _follow(service, "ground", phrases, image, **more):
            yield (gr.skip() if result is None else _marked(image, result)), note

    _wire(go, stop, ground, [given, words, *options], [boxes, note], "ground")


TABS: tuple[tuple[str, str, Callable[..., None]], ...] = (
    ("generate", "Draw", _draw),
    ("edit", "Edit", _edit),
    ("inpaint", "Inpaint", _inpaint),
    ("outpaint", "Outpaint", _outpaint),
    ("reflect", "Draw and judge", _reflect),
    ("ask", "Ask", _ask),
    ("caption", "Describe", _caption),
    ("infill", "Fill gaps", _infill),
    ("ground", "Find", _ground),
)


# ---------------------------------------------------------------------------------------------
# Parts of tabs.


def _image(
    service: Service, shown: list[gr.Image], editor: gr.ImageEditor | None = None
) -> gr.Image:
    """A place for an image; what is no image is refused as soon as it is there.

    Args:
        editor: where it is taken to, to be painted on.
    """
    given = gr.Image(
        label="Picture",
        sources=["upload", "clipboard"],
        height=HEIGHT if editor is None else HEIGHT // 2,
        elem_classes="picture",
        buttons=BUTTONS,
    )

    # Not a class of its own: gradio writes a .pyi file beside the source of every class.
    given.preprocess = lambda payload: _read(service, payload)
    if editor is None:
        given.upload(lambda _: None, given, None, api_visibility="private")
    else:
        given.change(lambda image: image, given, editor, api_visibility="private")
    shown.append(given)
    return given


def _read(service: Service, file: Any) -> image_files.Pixels | None:
    """Returns the pixels of a file that the page was given; what is no image is refused."""
    if file is None:
        return None
    try:
        return service.image(pathlib.Path(file.path).read_bytes(), file.orig_name or "the image")
    except image_files.ImageError as error:
        raise gr.Error(str(error), print_exception=False) from error


def _drawing_options(service: Service, *, edits: bool = False) -> list[Any]:
    sampling, model = service.pipe.settings.sampling, service.pipe.settings.model
    cells = model.grid_size**2
    guidance = presets.guidance_of(sampling, has_source=edits)
    with gr.Accordion("Settings", open=False):
        return [
            gr.Slider(1, cells, min(sampling.num_steps, cells), step=1, label="Steps"),
            gr.Slider(0, MOST_GUIDANCE, guidance, step=0.1, label="Guidance"),
            _registers(service),
            _samplers(),
            _seed(),
        ]


def _text_options(service: Service) -> list[Any]:
    sampling, block = service.pipe.settings.sampling, service.pipe.prompts.text_block_len
    steps = min(sampling.text_steps, block)
    with gr.Accordion("Settings", open=False):
        return [
            gr.Slider(1, block, steps, step=1, label="Steps of a text block"),
            _registers(service),
            _samplers(),
            _seed(),
        ]


def _registers(service: Service) -> gr.Slider:
    trained = service.pipe.settings.model.num_registers
    return gr.Slider(0, max(trained, 1), trained, step=1, label="Registers")


def _samplers() -> gr.Dropdown:
    return gr.Dropdown(["as trained", *config.PRESETS], value="as trained", label="Sampler")


def _seed() -> gr.Number:
    return gr.Number(0, label="Seed", precision=0, minimum=0, maximum=LARGEST_SEED)


def _buttons(label: str) -> tuple[gr.Button, gr.Button]:
    with gr.Row():
        return gr.Button(label, variant="primary"), gr.Button("Stop", variant="stop")


def _drawn() -> tuple[gr.Image, gr.Markdown, gr.Textbox]:
    with gr.Column():
        image = gr.Image(
            label="Picture", height=HEIGHT, format="png", interactive=False,
            elem_classes="picture", buttons=BUTTONS,
        )  # fmt: skip
        return image, gr.Markdown(), gr.Textbox(label="Said about it: layout or verdict")


def _wire(go, stop, does: Callable[..., Any], inputs, outputs, name: str) -> None:
    event = go.click(does, inputs, outputs, api_name=name, show_progress="hidden")
    stop.click(None, None, None, cancels=[event], api_visibility="private")


# ---------------------------------------------------------------------------------------------
# Requests.


async def _paint(
    service: Service, task: str, words: str, given: Any, options: tuple[Any, ...], **more: Any
) -> AsyncIterator[Notes]:
    """Yields image, note and what was said of it, as they come."""
    steps, guidance, registers, sampler, seed = options
    settings = _settings(
        service, seed, draws=True, steps=int(steps), guidance=float(guidance),
        registers=(int(registers), -1), sampler=_preset(sampler),
    )  # fmt: skip
    follows = _follow(service, task, words, given, preview=True, **settings, **more)
    async for note, ticket, result in follows:
        if result is None:
            yield gr.skip() if ticket.preview is None else ticket.preview, note, ""
        else:
            yield result.pixels[0], note, "\n".join(result.plans or result.texts)


async def _write(
    service: Service, task: str, words: Any, given: Any, options: tuple[Any, ...], **more: Any
) -> AsyncIterator[Notes]:
    """Yields text and note, as they come."""
    settings = _text_settings(service, options)
    async for note, _, result in _follow(service, task, words, given, **settings, **more):
        yield "" if result is None else result.text, note


def _text_settings(service: Service, options: tuple[Any, ...]) -> dict[str, Any]:
    steps, registers, sampler, seed = options
    return _settings(
        service, seed, draws=False, steps=int(steps), registers=(int(registers), -1),
        sampler=_preset(sampler),
    )  # fmt: skip


def _settings(service: Service, seed: Any, *, draws: bool, **asked: Any) -> dict[str, Any]:
    try:
        sampling = options.changed(service.pipe.settings.sampling, draws=draws, **asked)
    except config.ConfigError as error:
        raise gr.Error(str(error), print_exception=False) from error
    return {"seed": int(seed or 0), "sampling": sampling}


def _preset(sampler: str) -> str | None:
    return sampler if sampler in config.PRESETS else None


async def _follow(
    service: Service, task: str, words: Any, given: Any, **more: Any
) -> AsyncIterator[tuple[str, Ticket, Result | None]]:
    """Yields how a request stands until it is done, then its result; leaves when left."""
    try:
        ticket = service.submit(task, words, given, **more)
    except (*MISTAKES, QueueFull) as error:
        raise gr.Error(str(error), print_exception=False) from error
    waited = asyncio.wrap_future(ticket.future)
    try:
        while not (await asyncio.wait([waited], timeout=POLL_SECONDS))[0]:
            yield _standing(ticket), ticket, None
        result = await waited
        tokens = f"{ticket.tokens} tokens through the network, seed {result.seeds[0]}"
        yield f"{ticket.seconds:.2f} seconds, {tokens}", ticket, result
    except (*MISTAKES, Cancelled) as error:
        raise gr.Error(str(error), print_exception=False) from error
    finally:
        ticket.cancel()


def _standing(ticket: Ticket) -> str:
    if ticket.began is None:
        return f"waiting: {ticket.ahead} before this one"
    if not ticket.total:
        return "starting"
    note = " (compiling, once for each size)" if not ticket.done else ""
    return f"{ticket.making}: step {ticket.done} of {ticket.total}{note}"


def _needed(given: Any) -> Any:
    if given is None:
        raise gr.Error("this task is about an image: give one.", print_exception=False)
    return given


def _painted(editor: dict[str, Any] | None) -> tuple[image_files.Pixels, np.ndarray]:
    """Returns the image and where it was painted over."""
    background = _needed(editor and editor["background"])
    assert editor is not None
    mask = np.zeros(background.shape[:2], bool)
    for layer in editor["layers"]:
        mask |= layer[..., 3] > 0
    return np.ascontiguousarray(background[..., :3]), mask


def _marked(image: image_files.Pixels, result: Result) -> tuple[Any, list[Any]]:
    """Returns an image with the boxes of phrases, for gradio: whole pixels."""
    found = zip(result.prompts, result.boxes, strict=True)
    return image, [(tuple(round(x) for x in box), phrase) for phrase, box in found if box]
