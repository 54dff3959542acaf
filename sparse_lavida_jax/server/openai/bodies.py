# SPDX-License-Identifier: Apache-2.0
"""What request bodies may contain: fields and their ranges; what would be ignored is refused.

What is null counts as left out, at any depth, and so does an empty text. An unsupported field that
could change the result is accepted only if it is empty or has the value that changes nothing;
fields that cannot change a result here (`PASSED_OVER`) are ignored.
"""

import dataclasses
import itertools
import json
import logging
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import fastapi
import fastapi.exceptions
import pydantic
from fastapi import HTTPException
from python_multipart import multipart

from sparse_lavida_jax.data.files import parse_json
from sparse_lavida_jax.schema import LARGEST_SCALE, InputError

MOST_STEPS = 2**20  # the model's own limit is checked later, when the request is laid out
MOST_REGISTERS = 1024
MOST_JSON = 2**20  # bytes of JSON besides images
MOST_VALUES = 2**14  # in the lists and objects of JSON
MOST_FIELDS = 64  # of a form, besides files
NAMED = 10  # unknown fields in a message
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it logs what strangers send
DATA_URI = re.compile(rb'"data:[^"]*"', re.IGNORECASE)
NEEDED = ("prompt", "messages")
OUTPUT = ("response_format", "output_format", "output_compression")  # of the files of images
# Values that count as left out: the first one for a supported field, the first two for an
# unsupported one, all for an unknown one.
EMPTY = ("", [], {})
B = TypeVar("B", bound="Body")

Count = Annotated[int, pydantic.Field(ge=1, le=10)]
Steps = Annotated[int, pydantic.Field(ge=1, le=MOST_STEPS)]
Scale = Annotated[float, pydantic.Field(ge=0, le=LARGEST_SCALE, allow_inf_nan=False)]

# About the user, storage, turns and caching: no result depends on these.
PASSED_OVER = {
    "user", "safety_identifier", "metadata", "store", "service_tier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "moderation", "parallel_tool_calls",
    "request_id", "priority", "cache_salt", "cache_prompt", "keep_alive",
}  # fmt: skip
# Options of the pipeline, by the fields that set them.
SET_BY = {
    "num_inference_steps": "steps", "guidance_scale": "guidance", "n": "num_images",
    "max_completion_tokens": "max_new_tokens", "max_tokens": "max_new_tokens",
}  # fmt: skip


class Body(pydantic.BaseModel):
    """The fields that all requests share.

    Attributes:
        neutral: unsupported fields, with the values that change nothing.
        images: the most images in the JSON of a request, as data URIs.
    """

    model_config = pydantic.ConfigDict(extra="forbid")
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    images: ClassVar[int] = 0

    model: str | None = None
    n: Count = 1
    seed: Annotated[int, pydantic.Field(ge=0, lt=2**64)] | None = None
    steps: Steps | None = None
    num_inference_steps: Steps | None = None
    registers: Annotated[int, pydantic.Field(ge=0, le=MOST_REGISTERS)] | None = None
    sampler: str | None = None
    temperature: Scale | None = None
    stream: bool = False

    @pydantic.model_validator(mode="before")
    @classmethod
    def _of_what_counts(cls, given: Any) -> Any:
        """Drops fields that change nothing, and refuses unsupported ones that would."""
        if not isinstance(given, dict):
            raise ValueError("Input should be a valid dictionary of fields")
        found = {
            name: value
            for name, value in _without_nulls(given).items()
            if name in NEEDED
            or value not in EMPTY[: 3 - (name in cls.neutral) - 2 * (name in cls.model_fields)]
        }
        for name, values in cls.neutral.items():
            if name in found and found.pop(name) not in values:
                allowed = "".join(f", or say {json.dumps(value)}" for value in values)
                raise InputError(f"{name} is not supported: leave it out{allowed}", setting=name)
        found = {name: value for name, value in found.items() if name not in PASSED_OVER}
        if unknown := [name for name in found if name not in cls.model_fields]:
            more = f" and {len(unknown) - NAMED} more" if len(unknown) > NAMED else ""
            names = (str(name)[:40].encode("utf-8", "replace").decode() for name in unknown[:NAMED])
            raise InputError(
                f"{', '.join(names)}{more}: there is no such field here, and it might"
                " change the result: leave it out",
                setting=str(unknown[0]),
            )
        for name, value in found.items():
            if isinstance(value, bool) and cls.model_fields[name].annotation is not bool:
                allowed = "Input should be a number or a text, not true or false"
                raise InputError(f"{name}: {allowed}", setting=name)
        return found

    def sent(self, option: str) -> str:
        """Returns the field that the client sent for an option of the pipeline."""
        names = (option, *(name for name in SET_BY if SET_BY[name] == option))
        return next((name for name in names if name in self.model_fields_set), option)


class ImageBody(Body):
    """A request for images."""

    neutral = {
        "background": ("auto", "opaque"),
        # Guidance here steers away from a masked prompt; it cannot steer away from another prompt.
        "negative_prompt": ("",),
        "input_fidelity": ("low",),
        "frame_count": (1, "1"),
        **dict.fromkeys(("style", "complexity", "markup", "svg", "frame_duration_ms"), ()),
    }

    prompt: str
    size: str = "auto"  # width x height, as with OpenAI
    quality: Literal["auto", "low", "medium", "high"] = "auto"
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[int, pydantic.Field(ge=0, le=100)] = 100
    partial_images: Annotated[int, pydantic.Field(ge=0, le=3)] = 0
    best_of: Count | None = None
    style_seed: Annotated[int, pydantic.Field(ge=0, lt=2**64)] | None = None
    layout_temperature: Scale | None = None
    guidance: Scale | None = None
    guidance_scale: Scale | None = None

    @pydantic.model_validator(mode="after")
    def _of_one_mind(self) -> "ImageBody":
        if self.response_format == "url":
            raise InputError(
                "response_format=url: images come as b64_json: nothing is kept here for a URL to"
                " name. Leave response_format out",
                setting="response_format",
            )
        if self.output_compression != 100 and self.output_format == "png":
            raise InputError(
                "{setting} requires output_format=jpeg or webp", setting="output_compression"
            )
        if self.partial_images and not self.stream:
            raise InputError("{setting} requires stream=true", setting="partial_images")
        if self.stream and self.n > 1:
            raise InputError(
                f"n={self.n}: a stream is of one image, since its events do not number images",
                setting="n",
            )
        return self


class ChatBody(Body):
    """A request for an answer.

    Attributes:
        task: "ground" finds things, one per line of the last message, and answers with JSON.
    """

    neutral = {
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs", "min_p"), (0,)),
        **dict.fromkeys(("repetition_penalty", "length_penalty", "typical_p", "best_of"), (1,)),
        **dict.fromkeys(("logprobs", "echo", "ignore_eos", "enable_thinking"), (False,)),
        **dict.fromkeys(("skip_special_tokens", "add_generation_prompt"), (True,)),
        **dict.fromkeys(("tools", "functions", "stop"), ([],)),
        **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
        **dict.fromkeys(("audio", "prediction", "web_search_options"), ()),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "top_k": (-1, 0),
        "thinking": ({"type": "disabled"},),
        "chat_template_kwargs": ({}, {"enable_thinking": False}),
    }

    images = 16  # the model may take fewer
    messages: Annotated[list[dict[str, Any]], pydantic.Field(min_length=1, max_length=256)]
    task: Literal["ask", "ground"] = "ask"
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = {}

    @pydantic.model_validator(mode="after")
    def _of_one_mind(self) -> "ChatBody":
        if self.task == "ground" and (self.stream or self.n > 1):
            field = "stream" if self.stream else "n"
            allowed = "boxes come whole, and once: leave n and stream out"
            raise InputError(f"{field}: {allowed}", setting=field)
        if any(self.stream_options.values()) and not self.stream:
            raise InputError("{setting} requires stream=true", setting="stream_options")
        return self

    def sent(self, option: str) -> str:
        """Returns the field that the client sent for an option of the pipeline."""
        return "messages" if option in ("prompt", "image") else super().sent(option)


class BranchBody(ImageBody):
    """A request for branches of an image, which keep its words and settings.

    Attributes:
        at: see `branches.requests_of`.
    """

    prompt: str = ""
    at: str | None = None

    @pydantic.model_validator(mode="after")
    def _of_its_image(self) -> "BranchBody":
        taken = {"model", "n", "seed", "at", "stream", "partial_images", *OUTPUT}
        if others := sorted(self.model_fields_set - taken):
            raise InputError(
                f"{others[0]}: branches are drawn as their image was: leave it out",
                setting=others[0],
            )
        return self


class ProofBody(Body):
    """A request for what follows from the record of an image: a form of files, and no settings."""

    @pydantic.model_validator(mode="after")
    def _of_one_pass(self) -> "ProofBody":
        if others := sorted(self.model_fields_set - {"model", "captions"}):
            raise InputError(
                f"{others[0]}: nothing is drawn, so there is nothing to set: leave it out",
                setting=others[0],
            )
        return self


class SurpriseBody(ProofBody):
    """A request for the bits of an image given captions, one a line."""

    captions: str

    def sent(self, option: str) -> str:
        """Returns the field that the client sent for an option of the pipeline."""
        return "captions" if option == "prompt" else super().sent(option)


FIELDS = {
    "image",
    "mask",
    "source",
    "at",
    "captions",
    *ImageBody.model_fields,
    *ChatBody.model_fields,
}
FIELDS |= {*ImageBody.neutral, *ChatBody.neutral}


def of_json(contents: bytes, kind: type[B]) -> B:
    """Returns the checked fields of a request in JSON.

    Raises:
        HTTPException: 400: it is not JSON, is nested too deeply, or has too many values; 413: it is
            too large besides the images in it.
        RequestValidationError: a field is not allowed.
    """
    uris = itertools.islice(DATA_URI.finditer(contents), kind.images)
    if len(contents) - sum(uri.end() - uri.start() for uri in uris) > MOST_JSON:
        raise HTTPException(
            413, f"the body has more than {MOST_JSON} bytes besides images, the most that is taken."
        )
    try:
        given = parse_json(contents, most_values=MOST_VALUES)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body cannot be read as JSON: {error}.") from error
    return checked(given, kind)


def _without_nulls(value: Any) -> Any:
    """Returns the values of JSON without those that are null, at any depth."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value if one is not None]
    return value


@dataclasses.dataclass(frozen=True)
class Form:
    """A form's fields by name, and the contents of its files by the name of their field."""

    fields: dict[str, str]
    files: dict[str, list[bytes]]


def of_form(contents: bytes, content_type: str, most_files: int) -> Form:
    """Returns the contents of a form.

    Raises:
        HTTPException: 400: it is not a whole form of `multipart/form-data` in UTF-8, a field is
            there twice, or there are too many fields or files.
    """
    kind, options = multipart.parse_options_header(content_type)
    charset = options.get(b"charset", b"utf-8").decode("latin-1").lower()
    if kind != b"multipart/form-data" or charset not in ("utf-8", "utf8"):
        raise HTTPException(
            400, f"the form is {content_type[:60]!r}: send multipart/form-data, in UTF-8."
        )
    form, ends = Form({}, {}), []

    def on_field(field: Any) -> None:
        name, value = field.field_name.decode(), (field.value or b"").decode()
        if name in form.fields:
            raise ValueError(f"the field {name[:40]!r} is there twice")
        form.fields[name] = value
        if len(form.fields) > MOST_FIELDS or sum(map(len, form.fields.values())) > MOST_JSON:
            raise ValueError(
                f"its fields are more than {MOST_FIELDS}, or hold over {MOST_JSON} characters"
            )

    def on_file(file: Any) -> None:
        if sum(map(len, form.files.values())) == most_files:
            raise ValueError(f"it has more than {most_files} files")
        file.file_object.seek(0)
        form.files.setdefault(file.field_name.decode(), []).append(file.file_object.read())

    try:
        parser = multipart.FormParser(
            "multipart/form-data",
            on_field,
            on_file,
            lambda: ends.append(True),
            options.get(b"boundary"),
            config={"MAX_MEMORY_FILE_SIZE": len(contents) + 1},  # never a file on the disk
        )
        parser.write(contents)
        parser.finalize()
        if not ends:
            raise ValueError("it has no end")
    except UnicodeDecodeError as error:
        raise HTTPException(400, "a field of the form is not in UTF-8.") from error
    except ValueError as error:
        raise HTTPException(400, f"the form cannot be read: {str(error)[:200]}.") from error
    return form


def checked(given: Any, kind: type[B]) -> B:
    """Returns the checked fields of a request.

    Raises:
        RequestValidationError: a field is not allowed.
    """
    try:
        return kind.model_validate(given)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise fastapi.exceptions.RequestValidationError(found[:1]) from error
