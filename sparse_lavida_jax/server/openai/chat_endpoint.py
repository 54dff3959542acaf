# SPDX-License-Identifier: Apache-2.0
"""Answers: `POST /v1/chat/completions`, whole or as a stream of the text committed so far.

System and developer messages are put before the first question, separated by a newline.
Consecutive messages of one role are joined by newlines; empty texts count as left out. Earlier
turns are passed to the model as such, and the images of all turns are shown before the first
question.
"""

import dataclasses
import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import fastapi

from sparse_lavida_jax import config
from sparse_lavida_jax.data import files, image_files
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.schema import InputError
from sparse_lavida_jax.server.openai import asking, bodies, http_errors
from sparse_lavida_jax.server.openai.bodies import ChatBody
from sparse_lavida_jax.server.serving import Service

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# What messages and their parts may hold. No answer depends on names, on what may be cached, and on
# the detail of an image: the model looks at all of it.
MESSAGE = {"role", "content", "name", "id", "tool_calls"}
PART = {"type", "text", "image_url", "url", "detail", "format", "cache_control"}

router = fastapi.APIRouter()


@dataclasses.dataclass(frozen=True)
class Talk:
    """The contents of a conversation.

    Attributes:
        question: the last message.
        earlier: earlier questions with their answers.
        images: the image files of all turns.
        system: what system messages say, which is also part of the first question.
    """

    question: str
    earlier: tuple[tuple[str, str], ...]
    images: tuple[bytes, ...]
    system: str = ""


@router.post("/v1/chat/completions")
async def chat(request: fastapi.Request):
    """Answers the last message of a conversation."""
    client = asking.Client(request)
    service = client.service
    with http_errors.refusing():
        asked, talk = await client.body(functools.partial(_read, service=service))
    more: dict[str, Any] = {}
    if asked.top_p < 1:
        sampling = service.pipe.settings.sampling
        more["sampling"] = config.changed(sampling, {"text": {"top_p": asked.top_p}})
    if asked.task == "ground":
        return await _boxes(client, asked, talk, more)

    def decode() -> tuple[Any, dict[str, Any]]:
        shown = [
            service.small(image_files.read_bytes(image, check=client.check))
            for image in talk.images
        ]
        return shown, {"together": len(shown) > 1 or None}

    more["max_new_tokens"] = most = asked.max_tokens
    if talk.earlier:
        more["earlier"] = talk.earlier
    words = [talk.question] * asked.n
    waiting = await asking.queued(client, "ask", asked, words, talk.images, decode, **more)
    if asked.stream:
        return await asking.streamed(waiting, _chunks(waiting, asked))
    result = await waiting.ended()
    choices = []
    for row, ids in enumerate(result.tokens):
        content = asking.remark(waiting.ticket) + _text(service, ids, most)
        message = {"role": "assistant", "content": content}
        choices.append(_choice(row, "message", message, _length(service, ids, most)[1]))
    return _whole(waiting, result, choices, most)


async def _chunks(
    waiting: asking.Asked, asked: ChatBody
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yields the text added to each answer, and finally why it ended."""
    service, most = asking.service_of(waiting.request), asked.max_tokens
    said, name = [""] * asked.n, _name()

    def chunk(row: int, delta: dict[str, Any], reason: str | None = None) -> tuple[str, dict]:
        choice = _choice(row, "delta", delta, reason)
        return "", _reply(waiting, name, "chat.completion.chunk", [choice])

    for row in range(asked.n):
        yield chunk(row, {"role": "assistant", "content": asking.remark(waiting.ticket)})
    with http_errors.refusing(asked.sent):
        while await waiting.goes_on():
            for row in range(asked.n):
                text = committed(service, waiting.ticket.state, waiting.ticket.start + row, most)
                if text.startswith(said[row]) and len(text) > len(said[row]):
                    yield chunk(row, {"content": text[len(said[row]) :]})
                    said[row] = text
        result = waiting.result()
    for row, ids in enumerate(result.tokens):
        text = _text(service, ids, most)
        if rest := text[len(said[row]) :]:
            yield chunk(row, {"content": rest})
        _, last = chunk(row, {}, _length(service, ids, most)[1])
        yield "", last | {"sparse_lavida": asking.notes(waiting.ticket, result)}
    if asked.stream_options.get("include_usage"):
        counted = {"usage": _usage(service, result, most)}
        yield "", _reply(waiting, name, "chat.completion.chunk", []) | counted


async def _boxes(
    client: asking.Client, asked: ChatBody, talk: Talk, more: dict[str, Any]
) -> dict[str, Any]:
    """Answers with the list of things to find: a label and a box in pixels, or null, for each."""
    refusal = "messages: things are found in one image, asked in one message of the user."
    service, scale = client.service, [1.0, 1.0]
    phrases = [line.strip() for line in files.lines(talk.question) if line.strip()]
    if not phrases:
        refusal = "messages: nothing is to be found: give at least one phrase, each on a line."
    if not phrases or talk.earlier or talk.system or len(talk.images) != 1:
        raise http_errors.Refused(refusal, "messages")

    def decode() -> tuple[Any, dict[str, Any]]:
        image = image_files.read_bytes(talk.images[0], check=client.check)
        small = service.small(image)
        scale[:] = image.shape[1] / small.shape[1], image.shape[0] / small.shape[0]
        return small, {}

    waiting = await asking.queued(client, "ground", asked, phrases, talk.images, decode, **more)
    result, most = await waiting.ended(), asked.max_tokens
    if most is not None and (tokens := _usage(service, result, None)["completion_tokens"]) > most:
        name = asked.sent("max_new_tokens")
        sentence = f"{name}={most}: the boxes are {tokens} tokens and come whole: leave it out."
        raise http_errors.Refused(sentence, name)
    boxes = [
        {"label": label, "bbox_2d": box and [round(x * scale[i % 2], 1) for i, x in enumerate(box)]}
        for label, box in zip(phrases, result.boxes, strict=True)
    ]
    message = {"role": "assistant", "content": json.dumps(boxes, ensure_ascii=False)}
    choice = _choice(0, "message", message, "stop")
    return _whole(waiting, result, [choice], None)


# ---------------------------------------------------------------------------------------------
# Messages.


def _read(contents: bytes, service: Service) -> tuple[ChatBody, Talk]:
    """Returns the fields of a request, `max_tokens` cut to the most there are, and its talk."""
    asked = bodies.of_json(contents, ChatBody)
    most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    if most is not None:
        room = service.pipe.settings.data.max_sequence_len
        asked.max_tokens = min(most, service.limits.new_tokens, room)
    try:
        talk = talk_of(asked.messages, service.contents_of_uri)
    except InputError as error:
        raise RequestError(f"messages: {error}", setting="messages") from error
    asked.messages.clear()  # they need not be kept while the request waits
    return asked, talk


def talk_of(messages: list[dict[str, Any]], open_uri: Callable[[str], bytes]) -> Talk:
    """Returns the contents of messages, by the rules at the top of this file.

    Args:
        open_uri: returns the image file in a data URI.

    Raises:
        ImageError: as `open_uri`.
        RequestError: roles out of order, an unknown role, or contents of another kind.
    """
    system, turns, images = [], list[tuple[str, list[str]]](), []
    for message in messages:
        name = str(message.get("role", ""))
        role = ROLES.get(name)
        if role is None or message.get("tool_calls"):
            raise RequestError(
                f"a message of {name[:40]!r} is not known, or calls tools, of which"
                f" there are none: choose one of {', '.join(ROLES)}."
            )
        _check_fields("message", message, MESSAGE)
        words, shown = _parts(message.get("content", ""))
        if shown and role != "user":
            raise RequestError(f"a message of {role!r} shows an image: only users may.")
        images += shown
        if role == "system":
            system += words
        elif turns and turns[-1][0] == role:
            turns[-1][1].extend(words)
        else:
            turns.append((role, words))
    roles = [role for role, _ in turns]
    if not turns or roles[0] != "user" or roles[-1] != "user":
        raise RequestError("a conversation begins and ends with a message of the user: add one.")
    if len(images) > ChatBody.images:
        raise RequestError(f"{len(images)} images were sent: at most {ChatBody.images} are taken.")
    said = ["\n".join(words) for _, words in turns]
    said[0] = "\n".join([*system, said[0]])
    earlier = tuple(zip(said[0:-1:2], said[1:-1:2], strict=True))
    return Talk(said[-1], earlier, tuple(map(open_uri, images)), "\n".join(system))


def _parts(content: Any) -> tuple[list[str], list[str]]:
    """Returns the texts and data URIs in a message."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise RequestError("the content of a message must be a text, or a list of parts.")
    words, uris = [], []
    for part in parts:
        kind, text, uri = part.get("type"), part.get("text"), part.get("image_url")
        if isinstance(uri, dict):
            part, uri = part | uri, uri.get("url")
        _check_fields("part", part, PART)
        if kind in ("text", "input_text") and isinstance(text, str):
            words += [text] if text else []
        elif kind in ("image_url", "input_image") and isinstance(uri, str):
            uris.append(uri)
        else:
            raise RequestError(
                f"a part of type {str(kind)[:40]!r} is not known, or empty: send text or image_url."
            )
    return words, uris


def _check_fields(what: str, given: dict[str, Any], known: set[str]) -> None:
    """Refuses fields that would be ignored; those that say nothing count as left out."""
    if unknown := [name for name, value in given.items() if value and name not in known]:
        raise RequestError(
            f"a {what} has no field {unknown[0][:40]!r}: remove it, as it might change the answer."
            f" The fields are {', '.join(sorted(known))}."
        )


# ---------------------------------------------------------------------------------------------
# Answers.


def committed(service: Service, state: Any, row: int, most: int | None) -> str:
    """Returns the text of an answer up to its first undecoded token; "" if there is none yet."""
    if state is None or state.stage != "text" or row not in state.rows:
        return ""
    ids = state.responses[state.rows.index(row)][:most]
    masked = (ids[:, 0] == state.mask_id).nonzero()[0]
    # An incomplete character decodes to a replacement character until its other tokens are there.
    return _text(service, ids[: masked[0]] if len(masked) else ids, most).rstrip("\ufffd").rstrip()


def _text(service: Service, ids: Any, most: int | None) -> str:
    return service.pipe.prompts.answer(ids[:most])


def _length(service: Service, ids: Any, most: int | None) -> tuple[int, str]:
    """Returns the number of tokens in an answer, and why it ends: by itself, or at its limit."""
    ends = service.pipe.prompts.ends()
    said = ids[:most, 0].tolist()
    end = next((i for i, x in enumerate(said) if x in ends), None)
    return (len(said), "length") if end is None else (end, "stop")


def _usage(service: Service, result: Result, most: int | None) -> dict[str, Any]:
    asked = sum(result.prompted[0])
    said = sum(_length(service, ids, most)[0] for ids in result.tokens)
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def _choice(index: int, kind: str, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": index, kind: said, "finish_reason": reason, "logprobs": None}


def _name() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


def _whole(
    waiting: asking.Asked, result: Result, choices: list[dict[str, Any]], most: int | None
) -> dict[str, Any]:
    return _reply(waiting, _name(), "chat.completion", choices) | {
        "usage": _usage(asking.service_of(waiting.request), result, most),
        "sparse_lavida": asking.notes(waiting.ticket, result),
    }


def _reply(
    waiting: asking.Asked, name: str, kind: str, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    model = waiting.request.app.state.model
    about = {"id": name, "object": kind, "created": int(time.time()), "model": model}
    return about | {"choices": choices}
