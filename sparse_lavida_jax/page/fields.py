# SPDX-License-Identifier: Apache-2.0
"""Fields of the page that take what visitors send: numbers, images, and images to paint on."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr
import numpy as np

from sparse_lavida_jax.data import files, image_files
from sparse_lavida_jax.page import page_guard
from sparse_lavida_jax.server.serving import Service, one_large_image

HEIGHT = 384  # pixels of an image on the page
MOST_PAINTED = 2**25  # pixels of a painted image and its layers
BRUSH = "#ff40c0"
# Runs in the browser, so that gradio does not rewrite the file while it is fetched.
TO_EDITOR = "image => image && {background: image, layers: [], composite: image}"
BUTTONS: list[Any] = ["download", "fullscreen"]  # all but the one that uploads to a web site


def check_number(component: gr.Number | gr.Slider) -> None:
    """Has a number field refuse what is not a number in a sentence; what is empty is None."""
    component.preprocess = functools.partial(_number, component, component.preprocess)


def _number(component: Any, read: Callable[[float], Any], payload: Any) -> Any:
    number = math.nan
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = 0.0 if payload is None else float(payload)
    if not math.isfinite(number):
        told = f"{component.label}: {str(payload)[:40]!r} is not a number: give a finite one."
        raise gr.Error(told, print_exception=False)
    return None if payload is None else read(number)


def image_input(
    service: Service, first: image_files.Pixels | None, *, small: bool = False
) -> gr.Image:
    """Returns an image input; a file that is not an image is refused on upload.

    Args:
        first: what it shows at first.
        small: whether it is shown above an editor.
    """
    given = gr.Image(
        first,
        label="Your image",
        format="png",
        sources=["upload", "clipboard"],
        height=HEIGHT // 2 if small else HEIGHT,
        elem_classes="shown-image",
        buttons=BUTTONS,
    )

    # Not a subclass: gradio writes a .pyi file next to the source of every component class.
    given.preprocess = lambda payload: _read(service, payload)
    given.upload(lambda _: None, given, None, api_visibility="private")
    return given


def image_editor(
    service: Service, shown: gr.Image, first: image_files.Pixels | None
) -> gr.ImageEditor:
    """Returns an editor in which the image of an input, at first `first`, is painted on."""
    editor = gr.ImageEditor(
        label="Paint over what shall be drawn again",
        sources=[],  # its own upload would show nothing, without an error, for a broken file
        brush=gr.Brush(colors=[BRUSH], color_mode="fixed", default_size="auto"),
        layers=False,
        transforms=[],
        height=HEIGHT + 80,
        format="png",
        buttons=BUTTONS,
        value=first,
    )
    shown.change(None, shown, editor, js=TO_EDITOR, api_visibility="private")
    whole: Any = editor.preprocess

    def read(payload: Any) -> Any:
        """Returns the image and its mask (`Service.with_mask`)."""
        painted = payload
        if payload is not None and payload.id is not None:  # its parts were sent by themselves
            painted = editor.blob_storage.get(payload.id)
        parts = [painted.background, *painted.layers] if painted is not None else []
        if len(parts) > 1 + (most := page_guard.MOST_LAYERS):
            raise gr.Error(f"an image has at most {most} layers.", print_exception=False)
        if painted is not None:
            painted.composite = None  # would be decoded in vain
        with _reading():
            given = [_file(service, part) for part in parts if part is not None]
            if (cost := service.cost_of([contents for contents, _ in given])) > MOST_PAINTED:
                raise image_files.ImageError(
                    f"a painted image has at most {MOST_PAINTED} pixels, its layers included; this"
                    f" has {cost}. Make it smaller."
                )
            for one in given:
                service.image(*one)
            return service.with_mask(*image_and_mask(whole(payload)))

    editor.preprocess = read
    return editor


def _read(service: Service, given: Any) -> image_files.Pixels | None:
    """Returns the pixels of an uploaded file, no more than the model can see."""
    with _reading():
        return None if given is None else service.small(service.image(*_file(service, given)))


def _file(service: Service, given: Any) -> tuple[bytes, str]:
    """Returns the contents and the name of an uploaded file, or of what a painter sent."""
    if isinstance(given, bytes):
        return given, "the image"
    return files.read_bytes(given.path, service.limits.upload), given.orig_name or "the image"


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Waits until an image may be decoded; what is not an image is refused in a sentence."""
    try:
        with one_large_image():
            yield
    except image_files.ImageError as error:
        raise gr.Error(str(error), print_exception=False) from error
    except OSError as error:
        gone = "the image is not kept here any more: upload it again."
        raise gr.Error(gone, print_exception=False) from error


def needed(given: Any) -> Any:
    """Returns an image that was given; a task about one is refused without it."""
    if given is None:
        raise gr.Error("this task is about an image: give one.", print_exception=False)
    return given


def image_and_mask(editor: dict[str, Any] | None) -> tuple[image_files.Pixels, np.ndarray]:
    """Returns the image, and where it was painted over."""
    editor = editor or {"background": None, "layers": []}
    background = needed(editor["background"])
    layers = [layer[..., 3] > 0 for layer in editor["layers"]]
    if len({layer.shape for layer in layers}) > 1:
        raise gr.Error("the layers differ in size: paint on one.", print_exception=False)
    if not np.any(layers):
        raise gr.Error("nothing is painted: paint over the image first.", print_exception=False)
    return np.ascontiguousarray(background[..., :3]), np.any(layers, axis=0)
