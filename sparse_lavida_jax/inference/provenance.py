# SPDX-License-Identifier: Apache-2.0
"""Checks the record in a PNG of ours of how it was drawn, before anything is drawn from it.

`inference/tasks.py` writes the record. Whoever passed the file on may have changed it.
"""

import dataclasses
import itertools
import logging
import math
import pathlib
from collections.abc import Callable, Container, Mapping
from typing import Annotated, Any, Literal

import jax

from sparse_lavida_jax import config, old_names, schema
from sparse_lavida_jax.checkpoints import adapter_names, model_folder
from sparse_lavida_jax.data import files, image_files
from sparse_lavida_jax.data.image_files import Pixels
from sparse_lavida_jax.inference.batch_shapes import Bucket
from sparse_lavida_jax.inference.checks import SEEDS
from sparse_lavida_jax.inference.requests import NO_WORDS, Request, Shown, recorded_image
from sparse_lavida_jax.inference.results import (
    FORMAT,
    OLDER_FORMATS,
    SAMPLER_VERSION,
    SHOWN_KEY,
    Origin,
    Result,
)  # fmt: skip
from sparse_lavida_jax.kernels import attention
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.stack import implementation_of, step_implementation_of
from sparse_lavida_jax.prompting.gaps import parse_template
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling.presets import STAGES, Turn

log = logging.getLogger(__name__)

_LONGEST = 2**17  # tokens in a prompt, and steps
MOST_TURNS = 64
_TURNS = (
    f"at most {MOST_TURNS} of [stage, step, seed], in the order of stages ({', '.join(STAGES)}) and"
    " steps"
)
_Lengths = Annotated[
    tuple[int, int],
    schema.Allowed(
        lambda lengths: 0 <= min(lengths) <= max(lengths) <= _LONGEST, f"0 to {_LONGEST} tokens"
    ),
]


def _is_grid(known: Any) -> bool:
    return isinstance(known, list | tuple) and all(
        isinstance(row, list | tuple) and all(isinstance(cell, bool) for cell in row)
        for row in known
    )


def _are_numbers(values: Any) -> bool:
    """Whether these are not too many whole numbers of 31 bits."""
    return isinstance(values, list | tuple) and len(values) <= _LONGEST and all(
        type(number) is int and 0 <= number < 2**31 for number in values
    )  # fmt: skip


_MOST_CODES = 64  # of a cell
_Numbers = Annotated[object, schema.Allowed(_are_numbers, "a list of whole numbers")]
_Name = Annotated[str, schema.Allowed(lambda name: name.isidentifier() or not name, "a name")]


class _Recipe(schema.Section):
    size: tuple[int, int] = (0, 0)
    known: Annotated[object, schema.Allowed(_is_grid, "rows of true and false")] = ()
    box: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    rounds: schema.UpTo1024 = 0
    attempt: schema.UpTo1024 = 0
    style_seed: schema.Count = 0
    gaps: str = ""
    layout: bool | str = False


def _are_turns(turns: Any) -> bool:
    """Whether turns are of known stages, in the order of stages and steps, and not too many."""
    shaped = isinstance(turns, list | tuple) and len(turns) <= MOST_TURNS and all(
        isinstance(one, list | tuple) and len(one) == 3 and one[0] in STAGES
        and all(type(number) is int for number in one[1:])
        and 0 <= one[1] < _LONGEST and 0 <= one[2] < SEEDS
        for one in turns
    )  # fmt: skip
    places = [(STAGES.index(one[0]), one[1]) for one in turns] if shaped else []
    return shaped and all(a < b for a, b in itertools.pairwise(places))


def _are_codes(rows: Any) -> bool:
    """Whether these are the codes of cells, all of as many."""
    shaped = isinstance(rows, list | tuple) and len(rows) <= _LONGEST
    return shaped and all(
        _are_numbers(row) and 0 < len(row) == len(rows[0]) <= _MOST_CODES for row in rows
    )


def _are_margins(values: Any) -> bool:
    """Whether these are not too many numbers, or none where nothing else was possible."""
    return isinstance(values, list | tuple) and len(values) <= _LONGEST and all(
        one is None or (type(one) is float and math.isfinite(one)) for one in values
    )  # fmt: skip


_Values = Annotated[object, schema.Allowed(_are_margins, "a list of numbers")]


class _Margins(schema.Section):
    layout: _Values = ()
    image: _Values = ()


class _Shown(schema.Section):
    path: str = ""
    sha256: str = ""


class _Bucket(schema.Section):
    rows: Annotated[int, schema.between(1, 1024)]
    prompt_len: _Lengths


class _Origin(schema.Section):
    name: str = ""
    sha256: str = ""
    adapters: str = ""


class _Record(schema.Section):
    format: str = FORMAT
    sampler: int = SAMPLER_VERSION
    task: Literal["generate", "edit", "inpaint", "outpaint", "reflect"]
    prompt: str
    asked: str = ""
    seed: schema.Count
    turns: Annotated[object, schema.Allowed(_are_turns, _TURNS)] = ()
    recipe: _Recipe
    layout: str = ""
    codes: Annotated[object, schema.Allowed(_are_codes, "a list of codes for each cell")] = ()
    layout_tokens: _Numbers = ()
    decoded_at: _Numbers = ()
    margins: _Margins = _Margins()
    picture: _Shown = _Shown()
    bucket: _Bucket = _Bucket(rows=1, prompt_len=(0, 0))
    sampling: config.Sampling
    checkpoint: _Origin
    attention: _Name = ""
    step: _Name = ""
    version: str = ""
    software: dict[str, Any]


def check(record: dict[str, Any]) -> None:
    """Refuses a record from another version, or one that cannot belong to an image of ours.

    Raises:
        RequestError: the record is refused; the message says which part is wrong.
    """
    if (kind := record.get("format")) not in (FORMAT, *OLDER_FORMATS):
        raise RequestError(
            f"the record has format {schema.shown(kind)}, not {FORMAT!r}: give an image that"
            " sparse-lavida drew."
        )
    if (version := record.get("sampler", 1)) != SAMPLER_VERSION:
        release = schema.shown(record.get("version", "0.1.0"))
        raise RequestError(
            f"it was drawn by version {schema.shown(version)} of the sampler, of sparse-lavida-jax"
            f" {release}, and this is version {SAMPLER_VERSION}, which draws something else:"
            " install what drew it."
        )
    try:
        schema.build(_Record, _given(record))
    except schema.ConfigError as error:
        raise RequestError(f"the record of how it was drawn is damaged: {error}") from error
    lengths = [len(record.get(name) or ()) for name in ("layout_tokens", "decoded_at")]
    if lengths[0] != lengths[1]:
        raise RequestError(
            f"the record of how it was drawn is damaged: its layout has {lengths[0]} tokens, and"
            f" decoded_at has {lengths[1]} numbers."
        )


def check_names(
    record: dict[str, Any], given: Container[str], beside: pathlib.Path = pathlib.Path()
) -> None:
    """Refuses a record whose model or image lies elsewhere than the reader of the record works.

    That is the current folder; bundled models are allowed too, and nothing on the hub.

    Args:
        given: of "checkpoint", "adapters" and "image", what the reader gave and the record need
            not name.
        beside: another folder that is allowed, such as that of the PNG.

    Raises:
        RequestError: something is to be given; the message says which option does.
    """
    origin, shown = record["checkpoint"], record.get(SHOWN_KEY) or {}
    named = {
        "checkpoint": [origin.get("name")],
        "adapters": [*adapter_names.parse(origin.get("adapters") or "")],
        "image": [shown.get("path")],
    }
    for option, names in named.items():
        for name in names if option not in given else ():
            bundled = option == "checkpoint" and name in model_folder.bundled_models()
            if name and not bundled and not _lies_in(name, (pathlib.Path(), beside)):
                raise RequestError(
                    f"the record names {schema.shown(name)}, which does not lie in the current"
                    f" folder: if you trust it, give it yourself with --{option} (in Python,"
                    " load the model, or pass the image)."
                )


def _lies_in(name: str, folders: tuple[pathlib.Path, ...]) -> bool:
    try:
        path = files.resolve(name)
        return path.exists() and any(path.is_relative_to(files.resolve(one)) for one in folders)
    except (OSError, ValueError):  # no file can have that name
        return False


def attending(record: dict[str, Any], model: Denoiser) -> Denoiser:
    """Returns the model with the kernels that a record names, without those that cannot run.

    It warns of these. Older records name no attention, or no kernels between products: they were
    drawn without.
    """
    own = implementation_of(model.settings), step_implementation_of(model)
    asked = record.get("attention") or own[0], record.get("step") or "plain"
    told = ("attention", "the computation between the products of a step")
    runs = attention.runs_here(asked[0]), asked[1] in ("plain", own[1])
    for name, one, here in zip(told, asked, runs, strict=True):
        if not here:
            log.warning(
                "it was drawn with %s by %s, which does not run here: single bits may differ.",
                name,
                one,
            )
    asked = tuple(one if here else mine for one, here, mine in zip(asked, runs, own, strict=True))
    if asked == own:
        return model
    model = jax.tree.map(lambda leaf: leaf, model)  # a separate module that shares the arrays
    names = ("attention_implementation", "step_implementation")
    changes = {n: one for n, one, mine in zip(names, asked, own, strict=True) if one != mine}
    model.settings = dataclasses.replace(model.settings, **changes)
    return model


def _given(values: dict[str, Any], kind: type[schema.Section] = _Record) -> Any:
    """Drops None values where they mean that there is no such value: not in sizes and origins."""
    kinds = schema.annotations(kind)
    found = {name: value for name, value in values.items() if value is not None}
    for name, value in found.items():
        if kinds.get(name) in (_Recipe, _Shown, _Margins) and isinstance(value, dict):
            found[name] = _given(value, kinds[name])
    return found


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What draws a recorded image again.

    Attributes:
        bucket: the shapes that it was padded to; None: they are not recorded.
        model: with the kernels that drew it, as far as they run here.
    """

    request: Request
    bucket: Bucket | None
    model: Denoiser


def recorded(
    record: dict[str, Any],
    shown: Shown | None,
    model: Denoiser,
    source: Origin,
    requests: Callable[..., list[Request]],
) -> Recorded:
    """Returns what draws a recorded image again, after all checks of the record.

    Args:
        shown: the image it was drawn after, see `SparseLaViDa.replay`.
        source: where the model comes from.
        requests: makes requests (`SparseLaViDa.requests`).

    Raises:
        RequestError: the record is damaged or from another version or checkpoint, or the image is
            another one.
    """
    record = old_names.current(record)
    check(record)
    check_names(record, {"checkpoint", "adapters", "" if shown is None else "image"})
    name, theirs = (record["checkpoint"].get(key, "") for key in ("name", "sha256"))
    if theirs != source.sha256:
        raise RequestError(
            f"it was drawn by another checkpoint: {name:.200} with SHA-256 {theirs[:12]},"
            f" this is {source.name} with {source.sha256[:12]}."
        )
    task, recipe = record["task"], dict(record["recipe"])
    attempt, gaps = recipe.pop("attempt", 0), recipe.pop("gaps", "")
    if task != "reflect":
        recipe["layout"] = False if record.get("layout") is None else record["layout"]
    sampling = config.build(config.Sampling, record["sampling"])
    seen = recorded_image(record, shown)
    given = {"seed": record["seed"], "sampling": sampling, "as_written": True, **recipe}
    prompt = record["prompt"] or (NO_WORDS if task == "generate" and record.get("layout") else "")
    (made,) = requests(task, prompt, seen, **given)
    words = {"words": record["prompt"], "asked": record.get("asked") or ""}  # case included
    turns = tuple(Turn(*turn) for turn in record.get("turns") or ())
    drawn = tuple(tuple(record.get(name) or ()) for name in ("layout_tokens", "decoded_at"))
    template = parse_template(gaps) if gaps else None
    more = {"turns": turns, "attempt": attempt, "drawn_layout": drawn, "template": template}
    made = dataclasses.replace(made, **words, **more)
    shapes = record.get("bucket")
    bucket = Bucket(shapes["rows"], tuple(shapes["prompt_len"])) if shapes else None
    return Recorded(made, bucket, attending(record, model))


def record_of(image: Mapping[str, Any] | Result | str | pathlib.Path) -> dict[str, Any]:
    """Returns the record of one image: itself, of a PNG, or of a result.

    Raises:
        RequestError: the result has no image or several.
        ImageError: the PNG has no record.
    """
    if isinstance(image, Mapping):
        return dict(image)
    if not isinstance(image, Result):
        return image_files.read_record(image)
    if len(image.records) != 1:
        raise RequestError(
            f"one image is meant, and the result has {len(image.records)}:"
            " give one of them, such as result.part(0, 1)."
        )
    return image.records[0]


def recorded_pixels(image: Result | str | pathlib.Path) -> list[tuple[dict[str, Any], Pixels]]:
    """Returns the records of a PNG or of a result, each with its image."""
    if isinstance(image, Result):
        return [*zip(image.records, image.pixels, strict=True)]
    return [(image_files.read_record(image), image_files.read(image))]
