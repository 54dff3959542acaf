# SPDX-License-Identifier: Apache-2.0
"""The mixture file, which names the datasets, with the fields of the released one.

Spec Sec. 9.4. The top level has `datasets`, a list, and by group `weights` (how often) and
`batch_sizes` (a factor on the rows of a batch). docs/api/data.md lists the
fields of a dataset, docs/data.md has an example.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import schema
from sparse_lavida_jax.data import files
from sparse_lavida_jax.schema import Allowed

# Kinds of records.
KINDS = (
    "text_to_image", "layout", "edit", "edit_layout", "understanding", "reflection", "grounding",
    "dense_caption",
)  # fmt: skip
# Which of an image and its layout is learned: both, the layout, the image.
FORMS = ("", "plan_only", "no_plan")
# Released preprocess functions, as the specification spells them, and the kinds of their records.
FUNCTIONS = {
    "preproces_text_to_image_generation_s3": "text_to_image",
    "piat_hash": "text_to_image",
    "preproces_text_to_image_generation_s3_loc": "layout",
    "process_gpt_edit": "edit",
    "sharegpt_4o_edit": "edit",
    "pica_banana": "edit",
    "process_gpt_edit_loc_gnd": "edit_layout",
    "preproces_und_mammoth_si_10M": "understanding",
    "vw_instruct": "understanding",
    "preprocess_reflection_und": "reflection",
    "refcoco_rec": "grounding",
    "grandf": "dense_caption",
} | {kind: kind for kind in KINDS}
WITH_LAYOUT = ("layout", "edit_layout")  # kinds that may be trained in one of `FORMS`
BY_GROUP = ("weights", "batch_sizes")  # fields of a mixture with a number for each group
RANDOM_SEED = 42  # of the strategy `random:N`, as released
# The release has no strategy that is a bare number.
_STRATEGY = re.compile(r"all|(?:(first|end|random):|(?=\d+%))(\d+)(%?)|dup:(0*[1-9]\d*)")


def _is_columns(given: Any) -> bool:
    words = given.values() if isinstance(given, dict) else given
    return isinstance(given, dict | tuple) and all(_is_names(word) for word in words)


def _is_names(given: Any) -> bool:
    """Returns whether something is a string, or several."""
    several = isinstance(given, list | tuple) and given
    return isinstance(given, str) or bool(several and all(isinstance(one, str) for one in given))


Folder = Annotated[
    str,
    Allowed(
        lambda name: bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)),
        "its name becomes a folder: a letter or digit first, then letters, digits, . _ or -",
    ),
]
Function = Annotated[str, Allowed(FUNCTIONS.__contains__, f"there are: {', '.join(FUNCTIONS)}")]
Columns = Annotated[object, Allowed(_is_columns, "a list of names, or {ours: theirs}")]
Paths = Annotated[object, Allowed(_is_names, "a path or pattern, or a list of them")]
Strategy = Annotated[
    str,
    Allowed(
        lambda words: _STRATEGY.fullmatch(words) is not None,
        "use all, first:N, end:N, random:N, N% or dup:K",
    ),
]


class PrepareError(Exception):
    """A preparation cannot start or continue; the message says why."""


class RecipeError(schema.ConfigError):
    """A mixture file is invalid; the message says what is wrong with it."""


class Dataset(schema.Section):
    """One dataset of a mixture, with the released fields.

    Attributes:
        name: of its subfolder in the prepared folder.
        json_path: a .parquet, .jsonl, .json, .csv or .tar file, a pattern such as `a/*.tar`, or a
            tuple of these.
        preprocess_fn: one of `FUNCTIONS`.
        process_fn_kwargs: `plan_only` or `no_plan`, for kinds with a layout.
        columns: names of columns to read; or, our extension, {our field: name of their column}, or
            names of which the first counts that has a value in a row.
        sampling_strategy: all | first:N | end:N | random:N | dup:K; N may be a percentage,
            and N% alone means random:N%.
        length_group: datasets whose sequences have about the same length share one.
        aes_cutoff: rows whose `fltLaionAesthScore` is lower are left out.
        min_size: pixels; images to draw with a shorter side are left out.
        image_root: folder, or tar file, of the images that a table names; "": the table's folder.
        within: set when a folder is read: the folders that no name of an image leads out of.
        max_enc_images: rows with more images to edit are left out; 0: no limit.
    """

    name: Folder
    json_path: Paths
    preprocess_fn: Function
    process_fn_kwargs: dict[str, bool] = dataclasses.field(default_factory=dict)
    columns: Columns = ()
    sampling_strategy: Strategy = "all"
    length_group: str = ""
    aes_cutoff: float = 5.0
    min_size: int = 0
    image_root: schema.Place = ""
    within: tuple[str, ...] = ()
    max_enc_images: int = 0

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        known = [form for form in FORMS if form] if self.kind in WITH_LAYOUT else []
        allowed = f"it may have {' or '.join(known)}" if known else "this function takes none"
        yield "process_fn_kwargs", set(self.process_fn_kwargs) <= set(known), allowed
        chosen = sum(self.process_fn_kwargs.values())
        yield "process_fn_kwargs", chosen <= 1, "choose one, not both plan_only and no_plan"

    @property
    def patterns(self) -> tuple[str, ...]:
        """`json_path`, as a tuple."""
        paths: Any = self.json_path
        return (paths,) if isinstance(paths, str) else tuple(paths)

    @property
    def kind(self) -> str:
        return FUNCTIONS[self.preprocess_fn]

    @property
    def form(self) -> str:
        """Which part of an image with a layout is learned, one of `FORMS`."""
        return next((name for name, wanted in self.process_fn_kwargs.items() if wanted), "")

    @property
    def group(self) -> str:
        return self.length_group or self.kind

    def chosen(self, count: int) -> Int[np.ndarray, " n"]:
        """Returns which of `count` rows the strategy takes, in order."""
        found = _STRATEGY.fullmatch(self.sampling_strategy)
        assert found is not None
        how, number, percent, copies = found.groups()
        if copies is not None:
            return np.tile(np.arange(count), int(copies))
        if number is None:
            return np.arange(count)
        wanted = min(count, math.ceil(int(number) * count / 100) if percent else int(number))
        if how == "first":
            return np.arange(wanted)
        if how == "end":
            return np.arange(count - wanted, count)
        rng = np.random.Generator(np.random.Philox(RANDOM_SEED))
        return np.sort(rng.permutation(count)[:wanted])


class Recipe(schema.Section):
    """A mixture.

    Attributes:
        datasets: its datasets.
        weights: by group; batches are drawn in proportion.
        batch_sizes: by group, a factor on the rows of a batch.
    """

    datasets: tuple[Dataset, ...]
    weights: dict[str, float]
    batch_sizes: dict[str, float]

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        groups = {one.group for one in self.datasets}
        allowed = f"by group, of {', '.join(sorted(groups))}, a number greater than 0, not infinite"
        for name in BY_GROUP:
            numbers = getattr(self, name)
            holds = set(numbers) <= groups and all(0 < one < math.inf for one in numbers.values())
            yield name, holds, allowed


def read(path: pathlib.Path) -> Recipe:
    """Reads a mixture file, JSON or YAML. Paths in it are relative to its folder.

    Raises:
        RecipeError: there is no such file, or it is invalid.
    """
    given = _contents(path)
    if not isinstance(given, dict):
        raise RecipeError(
            f"{path} is not a mixture: it must hold `datasets`, and may hold `weights` and"
            " `batch_sizes`."
        )
    listed = given.get("datasets")
    if not isinstance(listed, list) or not listed:
        raise RecipeError(f"{path} has no datasets: list one or more.")
    datasets = tuple(_dataset(path, number, one) for number, one in enumerate(listed, 1))
    names = [one.name for one in datasets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError(f"{path} has two datasets named {', '.join(twice)}: give each its own.")
    numbers = {name: given.get(name) or {} for name in BY_GROUP}
    for name, by_group in numbers.items():
        if not isinstance(by_group, dict):
            raise RecipeError(
                f"{path} has {name} that are no numbers by group: {by_group!r}. Write a number"
                f" after the name of a group, such as {datasets[0].group}: 1."
            )
    even = dict.fromkeys([one.group for one in datasets], 1.0)
    filled = {name: even | by_group for name, by_group in numbers.items()}
    try:
        return schema.build(Recipe, given | {"datasets": datasets} | filled)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{path}: {error}") from error


def _contents(path: pathlib.Path) -> Any:
    try:
        text = files.read_text(path)
    except FileNotFoundError:
        raise RecipeError(f"there is no mixture file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the mixture file {path} cannot be read: {error}.") from error
    if path.suffix == ".json":
        kind, load, mistake = "JSON", files.parse_json, ValueError
    elif path.suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError as error:
            raise RecipeError(
                f"{path} is YAML: `pip install 'sparse-lavida-jax[data]'`, or write it in JSON."
            ) from error
        kind, load, mistake = "YAML", yaml.safe_load, (yaml.YAMLError, ValueError, RecursionError)
    else:
        raise RecipeError(
            f"{path} is not a mixture file: its name must end in .json, .yaml or .yml."
        )
    try:
        return load(text)
    except mistake as error:
        raise RecipeError(f"{path} is no {kind}: {' '.join(str(error).split())}.") from error


def _dataset(path: pathlib.Path, number: int, given: Any) -> Dataset:
    where = f"dataset {number} of {path}"
    if not isinstance(given, dict):
        raise RecipeError(f"{where} is {given!r}: fields by name are needed.")
    where = f"{where} ({given['name']})" if "name" in given else where
    values = {name: value for name, value in given.items() if value is not None}
    for needed in ("name", "json_path", "preprocess_fn"):
        if not values.get(needed):
            raise RecipeError(f"{where} has no {needed}.")
    for name in ("sampling_strategy", "length_group", "image_root"):
        if isinstance(values.get(name), int):
            values[name] = str(values[name])
    if isinstance(values.get("columns"), list):
        values["columns"] = tuple(values["columns"])
    try:
        made = schema.build(Dataset, values)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{where}: {error}") from error
    root = made.image_root and str(path.parent / made.image_root)
    paths = tuple(str(path.parent / files.expanded(name)) for name in made.patterns)
    return dataclasses.replace(made, json_path=paths, image_root=root)
