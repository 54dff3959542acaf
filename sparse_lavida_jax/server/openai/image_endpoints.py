# SPDX-License-Identifier: Apache-2.0
"""Images: `POST /v1/images/generations`, `edits` and `branches`, streamed or not."""

import asyncio
import base64
import functools
import itertools
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import fastapi

from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.schema import about
from sparse_lavida_jax.server.openai import asking, bodies, http_errors
from sparse_lavida_jax.server.openai.bodies import BranchBody, ImageBody
from sparse_lavida_jax.server.serving import BRANCH

router = fastapi.APIRouter()


@router.post("/v1/images/generations")
async def generate(request: fastapi.Request):
    """Draws images from a prompt."""
    client = asking.Client(request)
    with http_errors.refusing():
        asked = await client.body(functools.partial(bodies.of_json, kind=ImageBody))
    return await _images(client, "generate", asked, size=_size(asked.size))


@router.post("/v1/images/edits")
async def edit(request: fastapi.Request):
    """Edits an image as instructed; with a mask, redraws its transparent part."""
    client = asking.Client(request)
    fields, files = await client.form()
    images, masks = files.pop("image", []) + files.pop("image[]", []), files.pop("mask", [])
    if len(images) != 1 or len(masks) > 1 or fields.get("mask") or any(files.values()):
        wrong = "mask" if len(images) == 1 else "image"
        sentence = f"{wrong}: send one file named image, and at most one file named mask."
        raise http_errors.Refused(sentence, wrong)
    asked = bodies.checked(fields, ImageBody)
    service, side = client.service, client.service.drawn_side
    if _size(asked.size) not in (None, (side, side)):
        sentence = f"size={asked.size}: an edited image has {side}x{side} pixels: leave size out."
        raise http_errors.Refused(sentence, "size")

    def decode() -> tuple[Any, dict[str, Any]]:
        image = image_files.read_bytes(images[0], check=client.check)
        if not masks:
            return service.small(image), {}
        with about("mask"):
            mask = image_files.read_transparent(masks[0], "the mask", check=client.check)
            return service.with_mask(image, mask)

    task = "inpaint" if masks else "edit"
    return await _images(client, task, asked, images + masks, decode)


@router.post("/v1/images/branches")
async def branch(request: fastapi.Request):
    """Draws images like one of ours, from a step on; not of OpenAI's API."""
    client = asking.Client(request)
    fields, images = await client.recorded_image()
    asked = bodies.checked(fields, BranchBody)

    def decode() -> tuple[Any, dict[str, Any]]:
        source, record = client.record_of(*images)
        return source, {"record": record, "at": asked.at}

    return await _images(client, BRANCH, asked, images, decode)


async def _images(
    client: asking.Client,
    task: str,
    asked: ImageBody,
    images: Sequence[bytes] = (),
    decode: Callable[[], tuple[Any, dict[str, Any]]] = lambda: (None, {}),
    **more: Any,
):
    if task != BRANCH and asked.quality in ("low", "high"):
        more["quality"] = asked.quality
    waiting = await asking.queued(
        client,
        task,
        asked,
        asked.prompt,
        images,
        decode,
        previews=asked.partial_images,
        num_images=asked.n,
        **more,
    )
    if asked.stream:
        return await asking.streamed(waiting, _events(waiting, asked))
    result = await waiting.ended()
    contents = await asyncio.to_thread(_encoded, result, asked, client.request.app.state.model)
    return {
        "created": int(time.time()),
        "background": "opaque",
        "output_format": asked.output_format,
        "quality": "medium" if asked.quality == "auto" else asked.quality,
        "size": _named(result.pixels[0]),
        "data": [{"b64_json": one} for one in contents],
        "usage": _usage(waiting, result),
        "sparse_lavida": asking.notes(waiting.ticket, result),
    }


async def _events(
    waiting: asking.Asked, asked: ImageBody
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yields previews of an image while it is drawn, and then the image."""
    ticket, sent = waiting.ticket, 0
    name = "image_generation" if ticket.task == "generate" else "image_edit"

    def event(kind: str, pixels: image_files.Pixels, content: str) -> tuple[str, dict[str, Any]]:
        return f"{name}.{kind}", {
            "type": f"{name}.{kind}",
            "b64_json": content,
            "background": "opaque",
            "created_at": int(time.time()),
            "output_format": asked.output_format,
            "quality": asked.quality,
            "size": _named(pixels),
        }

    with http_errors.refusing(asked.sent):
        goes_on = True
        while goes_on:
            goes_on = await waiting.goes_on()
            for pixels in ticket.previews[sent:]:
                content = await asyncio.to_thread(_file, pixels, None, asked)
                kind, said = event("partial_image", pixels, content)
                yield kind, said | {"partial_image_index": sent}
                sent += 1
        result, model = waiting.result(), waiting.request.app.state.model
    (content,) = await asyncio.to_thread(_encoded, result, asked, model)
    kind, said = event("completed", result.pixels[0], content)
    notes = asking.notes(ticket, result)
    yield kind, said | {"usage": _usage(waiting, result), "sparse_lavida": notes}


# ---------------------------------------------------------------------------------------------
# Sizes, files, counts.


def _size(text: str) -> tuple[int, int] | None:
    """Returns the height and width for a size such as 512x512, width first; None for "auto"."""
    if text == "auto":
        return None
    if not (found := re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text)):
        sentence = f"size={text[:20]!r} must be such as 512x512, width first."
        raise http_errors.Refused(sentence, "size")
    return int(found[2]), int(found[1])


def _named(pixels: image_files.Pixels) -> str:
    return f"{pixels.shape[1]}x{pixels.shape[0]}"


def _file(pixels: image_files.Pixels, record: dict[str, Any] | None, asked: ImageBody) -> str:
    format = asked.output_format.upper()
    contents = image_files.encoded(pixels, format, record, asked.output_compression)
    return base64.b64encode(contents).decode()


def _encoded(result: Result, asked: ImageBody, model: str) -> list[str]:
    """Returns images with a record of how they were drawn; the model's name replaces its folder."""
    found = []
    for pixels, record in itertools.zip_longest(result.pixels, result.records):
        if record is not None:
            own = record["checkpoint"] | {"name": model, "adapters": ""}
            record = record | {"checkpoint": own}
        found.append(_file(pixels, record, asked))
    return found


def _usage(waiting: asking.Asked, result: Result) -> dict[str, Any]:
    """Returns the numbers of prompt tokens and of decoded tokens: cells, and layouts in text."""
    tokenizer = asking.service_of(waiting.request).pipe.prompts.tokenizer
    text, image = result.prompted[0]
    cells = sum(map(len, result.tokens))
    laid_out = sum(len(tokenizer.encode(layout)) for layout in result.layouts)
    return {
        "input_tokens": text + image,
        "input_tokens_details": {"text_tokens": text, "image_tokens": image},
        "output_tokens": cells + laid_out,
        "output_tokens_details": {"text_tokens": laid_out, "image_tokens": cells},
        "total_tokens": text + image + cells + laid_out,
    }
