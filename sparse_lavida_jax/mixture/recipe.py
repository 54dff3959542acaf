# SPDX-License-Identifier: Apache-2.0
"""What a mixture is made of: the file that names its datasets, in the released yaml's fields.

Spec Sec. 9.4. At the top `datasets`, a list, and by group `weights` (how often) and `batch_sizes`
(a factor on the rows of a batch). docs/data.md lists the fields of a dataset, with an example.
"""

import dataclasses
import json
import math
import pathlib
import re
from typing import Any

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import config

# What a record is for.
KINDS = (
    "text_to_image", "plan", "edit", "edit_plan", "understanding", "reflection", "grounding",
    "dense_caption",
)  # fmt: skip
# What of an image and its plan is learned: both, the plan, the image.
FORMS = ("", "plan_only", "no_plan")
# Released preprocess functions, as the specification spells them, and what their records are.
FUNCTIONS = {
    "preproces_text_to_image_generation_s3": "text_to_image",
    "piat_hash": "text_to_image",
    "preproces_text_to_image_generation_s3_loc": "plan",
    "process_gpt_edit": "edit",
    "sharegpt_4o_edit": "edit",
    "pica_banana": "edit",
    "process_gpt_edit_loc_gnd": "edit_plan",
    "preproces_und_mammoth_si_10M": "understanding",
    "vw_instruct": "understanding",
    "preprocess_reflection_und": "reflection",
    "refcoco_rec": "grounding",
    "grandf": "dense_caption",
} | {kind: kind for kind in KINDS}
PLANNED = ("plan", "edit_plan")  # kinds that may be trained in one of `FORMS`
RANDOM_SEED = 42  # of the strategy `random:N`, as released
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STRATEGY = re.compile(r"all|(?:(first|end|random):)?(\d+)(%?)|dup:(\d+)")


class PrepareError(Exception):
    """A preparation that cannot begin or go on; the message says why."""


class RecipeError(config.ConfigError):
    """A mixture file that cannot be followed; the message says what is wrong with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """One dataset of a mixture, in the released fields.

    Attributes:
        name: its folder among the prepared ones.
        json_path: a .parquet, .jsonl, .json, .csv or .tar file, or a pattern such as `a/*.tar`.
        preprocess_fn: one of `FUNCTIONS`.
        process_fn_kwargs: `plan_only` or `no_plan`, of kinds with a plan.
        columns: names of columns to read; or, ours, {our field: name of their column}.
        sampling_strategy: all | first:N | end:N | random:N | dup:K; N may be a percentage.
        length_group: datasets whose sequences have about the same length share one.
        aes_cutoff: rows whose `fltLaionAesthScore` is lower are left out.
        min_size: pixels; images to draw with a shorter side are left out.
        image_root: folder, or tar file, in which the images are that a table names.
        max_enc_images: rows with more images to edit are left out; 0: any number.
    """

    name: str
    json_path: str
    preprocess_fn: str
    process_fn_kwargs: dict[str, bool] = dataclasses.field(default_factory=dict)
    columns: dict[str, str] | tuple[str, ...] = ()
    sampling_strategy: str = "all"
    length_group: str = ""
    aes_cutoff: float = 5.0
    min_size: int = 0
    image_root: str = ""
    max_enc_images: int = 0

    @property
    def kind(self) -> str:
        return FUNCTIONS[self.preprocess_fn]

    @property
    def form(self) -> str:
        """Which part of a planned image is learned, one of `FORMS`."""
        return next((name for name, wanted in self.process_fn_kwargs.items() if wanted), "")

    @property
    def group(self) -> str:
        return self.length_group or self.kind

    def chosen(self, count: int) -> Int[np.ndarray, " n"]:
        """Returns which of `count` rows the strategy takes, in their order."""
        found = _STRATEGY.fullmatch(self.sampling_strategy)
        assert found is not None  # `read` looked at it
        how, number, percent, copies = found.groups()
        if copies is not None:
            return np.tile(np.arange(count), int(copies))
        if number is None:
            return np.arange(count)
        wanted = math.ceil(int(number) * count / 100) if percent else int(number)
        wanted = min(wanted, count)
        if how == "first":
            return np.arange(wanted)
        if how == "end":
            return np.arange(count - wanted, count)
        return np.sort(
            np.random.Generator(np.random.Philox(RANDOM_SEED)).permutation(count)[:wanted]
        )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A mixture.

    Attributes:
        datasets: what it is made of.
        weights: of each group, in proportion to which batches are drawn from it.
        batch_sizes: of each group, what the rows of a batch are multiplied with.
    """

    datasets: tuple[Dataset, ...]
    weights: dict[str, float]
    batch_sizes: dict[str, float]


def read(path: pathlib.Path) -> Recipe:
    """Reads a mixture file, JSON or YAML. Paths in it are relative to its folder.

    Raises:
        RecipeError: there is none, or it says what is not understood.
    """
    contents = _contents(path)
    if not isinstance(contents, dict):
        raise RecipeError(f"{path} is no mixture: at its top stand datasets, weights, batch_sizes.")
    if unknown := sorted(set(contents) - {"datasets", "weights", "batch_sizes"}):
        raise RecipeError(
            f"{path} has {', '.join(map(str, unknown))}, which is not known. At the top stand"
            " datasets, weights, batch_sizes."
        )
    listed = contents.get("datasets") or []
    if not isinstance(listed, list) or not listed:
        raise RecipeError(f"{path} has no datasets: list one or more.")
    datasets = tuple(_dataset(path, number, given) for number, given in enumerate(listed, 1))
    names = [one.name for one in datasets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError(f"{path} has two datasets named {', '.join(twice)}: give each its own.")
    groups = list(dict.fromkeys(one.group for one in datasets))
    numbers = {}
    for section in ("weights", "batch_sizes"):
        given = contents.get(section) or {}
        if not isinstance(given, dict):
            raise RecipeError(f"{path} has {section} that are no numbers by group.")
        if unknown := sorted(set(given) - set(groups)):
            raise RecipeError(
                f"{path} has {section} of {', '.join(map(str, unknown))}, a length_group of no"
                f" dataset. There are: {', '.join(groups)}."
            )
        for group, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise RecipeError(
                    f"{path} has {value!r} in {section} of {group}: a number greater than 0 is"
                    " needed. Leave a dataset out by leaving it out of datasets."
                )
        numbers[section] = {group: float(given.get(group, 1)) for group in groups}
    return Recipe(datasets, **numbers)


def _contents(path: pathlib.Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"there is no mixture file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the mixture file {path} cannot be read: {error}.") from error
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise RecipeError(f"{path} is no JSON: {error}.") from error
    if path.suffix not in (".yaml", ".yml"):
        raise RecipeError(f"{path} is no mixture file: its name ends with .yaml or .json.")
    try:
        import yaml
    except ImportError as error:
        raise RecipeError(
            f"{path} is YAML: `pip install 'sparse-lavida-jax[data]'`, or write it in JSON."
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is no YAML: {' '.join(str(error).split())}.") from error


def _dataset(path: pathlib.Path, number: int, given: Any) -> Dataset:
    where = f"dataset {number} of {path}"
    if not isinstance(given, dict):
        raise RecipeError(f"{where} is {given!r}: fields by name are needed.")
    where = f"{where} ({given['name']})" if "name" in given else where
    fields = {field.name: field for field in dataclasses.fields(Dataset)}
    if unknown := sorted(map(str, set(given) - set(fields))):
        raise RecipeError(f"{where} has {', '.join(unknown)}. It may have: {', '.join(fields)}.")
    for needed in ("name", "json_path", "preprocess_fn"):
        if not isinstance(given.get(needed), str) or not given[needed]:
            raise RecipeError(f"{where} has no {needed}.")
    values = {name: value for name, value in given.items() if value is not None}
    for name in ("sampling_strategy", "length_group", "image_root"):
        if not isinstance(values.get(name, ""), str | int):
            raise RecipeError(f"{where} has {name}={values[name]!r}: words are needed.")
        if name in values:
            values[name] = str(values[name])
    for name, kind in (("aes_cutoff", float), ("min_size", int), ("max_enc_images", int)):
        value = values.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != kind(value):
            raise RecipeError(f"{where} has {name}={value!r}: a number is needed.")
        if name in values:
            values[name] = kind(value)
    values["columns"] = _columns(where, values.get("columns", ()))
    _check_words(where, values)
    _check_form(where, values)
    for name in ("json_path", "image_root"):
        if values.get(name):
            values[name] = str(path.parent / values[name])
    return Dataset(**values)


def _columns(where: str, given: Any) -> dict[str, str] | tuple[str, ...]:
    if isinstance(given, dict) and all(isinstance(word, str) for word in given.values()):
        return given
    if isinstance(given, list | tuple) and all(isinstance(word, str) for word in given):
        return tuple(given)
    raise RecipeError(f"{where} has columns={given!r}: a list of names, or {{ours: theirs}}.")


def _check_words(where: str, values: dict[str, Any]) -> None:
    name, function = values["name"], values["preprocess_fn"]
    if not _NAME.fullmatch(name):
        raise RecipeError(f"{where}: its name becomes a folder, use letters, digits and . _ -")
    if function not in FUNCTIONS:
        raise RecipeError(
            f"{where} has preprocess_fn={function}. There are: {', '.join(FUNCTIONS)}."
        )
    strategy = values.get("sampling_strategy", "all")
    found = _STRATEGY.fullmatch(strategy)
    # A bare number is none of the released strategies, a bare percentage is.
    if found is None or (found[2] and not found[1] and not found[3]) or found[4] == "0":
        raise RecipeError(
            f"{where} has sampling_strategy={strategy!r}: use all, first:N, end:N, random:N, N% or"
            " dup:K."
        )


def _check_form(where: str, values: dict[str, Any]) -> None:
    given, kind = values.get("process_fn_kwargs", {}), FUNCTIONS[values["preprocess_fn"]]
    known = [form for form in FORMS if form] if kind in PLANNED else []
    if not isinstance(given, dict) or (set(given) - set(known)):
        allowed = f"it may have {' or '.join(known)}" if known else "this function takes none"
        raise RecipeError(f"{where} has process_fn_kwargs={given!r}: {allowed}.")
    if sum(map(bool, given.values())) > 1:
        raise RecipeError(f"{where} is both plan_only and no_plan: choose one.")
