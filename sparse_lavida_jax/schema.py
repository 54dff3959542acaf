# SPDX-License-Identifier: Apache-2.0
"""How settings are checked, read and written, whatever their names (`config.py` has those).

Config files are Python programs that return settings. Run only your own.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import pathlib
import re
import runpy
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypeVar, cast

from ml_collections import ConfigDict

from sparse_lavida_jax import old_names

T = TypeVar("T")
E = TypeVar("E", bound="InputError")

SHOWN = 200  # characters of an invalid value in messages
LONGEST = 10_000  # characters of a setting


class InputError(ValueError):
    """What a person gave cannot be used; the message says what can.

    Python, the command line, the server and the page call one setting by different names: each
    words the message with its own.

    Args:
        message: a sentence, with `{setting}`, `{value}` and `{allowed}` in the places of the others
            if there is a setting.
        setting: the name of the setting that is wrong; "": the message is about no single one.
        value: what was given, as text.
        allowed: a clause that says what is allowed, or the names of the settings that are.
    """

    def __init__(
        self,
        message: str = "{setting}={value} is out of range: {allowed}.",
        *,
        setting: str = "",
        value: str = "",
        allowed: str | tuple[str, ...] = "",
    ):
        self.message, self.setting, self.value, self.allowed = message, setting, value, allowed
        super().__init__(self.worded(str))

    def worded(self, spelled: Callable[[str], str]) -> str:
        """Returns the message with other names of settings.

        Args:
            spelled: returns the name of a setting; "" if there is no such setting.
        """
        if not self.setting:
            return self.message
        names = (self.allowed,) if isinstance(self.allowed, str) else map(spelled, self.allowed)
        parts = {
            "{setting}": spelled(self.setting),
            "{value}": self.value,
            "{allowed}": ", ".join(filter(None, names)),
        }
        return re.sub("|".join(parts), lambda found: parts[found[0]], self.message)

    def about(self: E, setting: str) -> E:
        """Returns the same error about a setting of another name."""
        parts = {"value": self.value, "allowed": self.allowed}
        return type(self)(self.message, setting=setting, **parts)


@contextlib.contextmanager
def about(setting: str) -> Iterator[None]:
    """Names the setting of an `InputError` that is raised inside and names none."""
    try:
        yield
    except InputError as error:
        error.setting = error.setting or setting
        raise


class ConfigError(InputError):
    """A setting that does not exist, has the wrong type or is out of range."""


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The values that a setting may have; part of its annotation.

    Attributes:
        holds: whether a value is one of them.
        sentence: describes them, in the message about an invalid value.
    """

    holds: Callable[[Any], bool]
    sentence: str


def at_least(least: int) -> Allowed:
    """Returns a lower bound, inclusive."""
    return Allowed(lambda value: value >= least, f"it must be {least} or more")


def between(least: int, most: int) -> Allowed:
    """Returns bounds, inclusive."""
    return Allowed(lambda value: least <= value <= most, f"it must lie in {least}..{most}")


def _is_pattern(text: Any) -> bool:
    try:
        re.compile(text)
    except (re.error, TypeError, OverflowError, RecursionError):
        return False
    return True


def _is_group(group: Any) -> bool:
    if not (isinstance(group, tuple) and len(group) == 2 and _is_pattern(group[0])):
        return False
    return isinstance(group[1], int | float) and 0 <= group[1] < math.inf


def _is_mesh(sizes: dict[str, int]) -> bool:
    return all(n > 0 or n == -1 for n in sizes.values()) and [*sizes.values()].count(-1) <= 1


# Kinds of settings. Whole numbers are bounded: loops over them might otherwise never end.
_ABOVE_0 = Allowed(lambda value: value > 0, "it must be greater than 0")
_COUNTABLE = Allowed(lambda value: value < 2**31, "it must be less than 2**31")
Positive = Annotated[int, _ABOVE_0, _COUNTABLE]
PositiveFloat = Annotated[float, _ABOVE_0]
Count = Annotated[int, at_least(0), _COUNTABLE]
Size = Annotated[int, between(1, 2**20)]  # of an axis of an array
MOST_REVISIONS = 16
Revisions = Annotated[int, between(0, MOST_REVISIONS)]
UpTo1024 = Annotated[int, between(0, 1024)]  # layers, registers
UpTo1024OrAuto = Annotated[int, between(-1, 1024)]
NonNegative = Annotated[
    float, Allowed(lambda x: 0 <= x < math.inf, "it must be 0 or more, and finite")
]
# For guidance and temperatures: our limit, far above useful values and far below overflow.
LARGEST_SCALE = 100
Scale = Annotated[float, between(0, LARGEST_SCALE)]
ScaleOrAuto = Annotated[
    float,
    Allowed(
        lambda x: 0 <= x <= LARGEST_SCALE or x == -1, f"it must lie in 0..{LARGEST_SCALE}, or be -1"
    ),
]
CountOrAuto = Annotated[int, at_least(-1), _COUNTABLE]
Share = Annotated[float, Allowed(lambda x: 0 <= x <= 1, "it must lie in [0, 1]")]
BelowOne = Annotated[float, Allowed(lambda x: 0 <= x < 1, "it must lie in [0, 1)")]
PositiveShare = Annotated[float, Allowed(lambda x: 0 < x <= 1, "it must lie in (0, 1]")]
Blocks = Annotated[int, between(1, 16)]
Patch = Annotated[int, between(1, 1024)]  # pixels or patches per side of what is merged
Sizes = Annotated[
    tuple[int, ...],
    Allowed(
        lambda sizes: 1 <= len(sizes) <= 16 and 1 <= min(sizes) <= max(sizes) <= 2**20,
        "1 to 16 numbers, all 1 or more and none above 2**20",
    ),
]
Pattern = Annotated[str, Allowed(_is_pattern, "a regular expression")]
Weights = Annotated[
    dict[str, float],
    Allowed(
        lambda weights: weights and all(weight > 0 for weight in weights.values()),
        "at least one task, every weight greater than 0",
    ),
]
Groups = Annotated[
    tuple[Any, ...],
    Allowed(
        lambda groups: all(map(_is_group, groups)),
        'pairs of a regular expression and a rate of 0 or more, such as (("^vision/", 2e-6),)',
    ),
]
Interval = Annotated[
    tuple[float, float],
    Allowed(
        lambda ends: len(ends) == 2 and 0 <= ends[0] <= ends[1] <= 1,
        "two shares of the steps, 0 <= first <= last <= 1",
    ),
]
Place = Annotated[str, "a path"]  # `~` at its start is expanded
Identifier = Annotated[str, Allowed(str.isidentifier, "a name of letters, digits and _")]
Mesh = Annotated[dict[str, int], Allowed(_is_mesh, "sizes above 0, at most one of them -1")]


@functools.cache
def _allowed(schema: type) -> list[tuple[str, Allowed]]:
    """Returns the constraints in the annotations of a section, by field."""
    found = []
    for name, kind in annotations(schema).items():
        if typing.get_origin(kind) is Literal:
            choices = typing.get_args(kind)
            named = ", ".join(str(choice) for choice in choices if choice != "")
            sentence = f"choose one of {named}" + ", or leave it empty" * ("" in choices)
            found.append((name, Allowed(choices.__contains__, sentence)))
        marks = getattr(kind, "__metadata__", ())
        found += [(name, mark) for mark in marks if isinstance(mark, Allowed)]
    return found


@functools.cache
def _places(schema: type) -> list[str]:
    return [name for name, kind in annotations(schema).items() if kind is Place]


@typing.dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,)
)
class Section:
    """Settings that are checked when they are made; every subclass is a frozen dataclass.

    Raises:
        ConfigError: a value is not allowed; the message says which ones are.
    """

    __no_type_check__ = True  # the tests' type checker skips it: our own check explains more

    def __init_subclass__(cls):
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self):
        for name in _places(type(self)):
            object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))
        for name, allowed in _allowed(type(self)):
            self._check(name, bool(allowed.holds(getattr(self, name))), allowed.sentence)
        for rule in self._rules():
            self._check(*rule)

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yields constraints between settings: a field, whether it holds, and what is allowed."""
        return iter(())

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ConfigError(
                setting=f"{type(self).__name__}.{name}",
                value=shown(getattr(self, name)),
                allowed=allowed.replace("self.", ""),  # in rules: f"a multiple of {self.width=}"
            )


def build(schema: type[T], given: Any) -> T:
    """Turns a config section, and the sections in it, into its frozen dataclass.

    Args:
        given: a `ConfigDict`, or a dict as in JSON.

    Raises:
        ConfigError: not a mapping of settings, an unknown name (the message lists the known
            ones), no value for a name without a default, a wrong type, or a value out of range.
    """
    if not isinstance(given, dict | ConfigDict):
        raise ConfigError(f"{schema.__name__} is {shown(given)}: it must hold settings by name.")
    kinds = annotations(schema)
    if unknown := sorted(set(given) - set(kinds)):
        named = ", ".join(map(str, unknown))
        hints = "".join(
            f" {old_names.hint(str(name), section=schema.__name__)}" for name in unknown
        ).rstrip()
        raise ConfigError(
            f"{schema.__name__} has no {named:.{SHOWN}}.{hints} It has: {', '.join(kinds)}."
        )
    for field in dataclasses.fields(schema):  # type: ignore[arg-type]
        if field.name not in given and field.default is field.default_factory:
            raise ConfigError(f"{schema.__name__} needs a value for {field.name}.")
    return schema(**{k: _convert(schema, k, kinds[k], value) for k, value in given.items()})


def to_dict(config: Any) -> dict[str, Any]:
    """Returns plain dicts, lists and scalars that `json` can write and `build` can read."""
    return dataclasses.asdict(config)


def changes(settings: Any) -> dict[str, Any]:
    """Returns all settings that differ from their defaults, by section, as `to_dict` does."""
    plain, defaults, found = to_dict(settings), type(settings)(), {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        inside = changes(value) if dataclasses.is_dataclass(value) else plain[field.name]
        if value != getattr(defaults, field.name):
            found[field.name] = inside
    return found


def annotations(schema: Any) -> dict[str, Any]:
    """Returns the annotations of a dataclass, by field."""
    return {field.name: field.type for field in dataclasses.fields(schema)}


def _convert(schema: type, name: str, kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    origin = typing.get_origin(kind) or kind
    if dataclasses.is_dataclass(kind):
        if isinstance(value, kind):  # type: ignore[arg-type]
            return value
        if not isinstance(value, dict | ConfigDict):
            place = f"{schema.__name__}.{name}"
            raise ConfigError(f"{place} is {shown(value)}: it must hold settings by name.")
        return build(kind, value)  # type: ignore[arg-type]
    if isinstance(kind, types.UnionType) and isinstance(value, kind):
        return value
    if origin is Any:
        return tuple(value) if isinstance(value, list) else value
    if origin is Literal:
        choices = typing.get_args(kind)
        origin = type(choices[0])
    if origin is float and type(value) is int:  # not a bool
        value = float(value) if abs(value) < 2**63 else math.inf
    taken: Any = {dict: dict | ConfigDict, tuple: tuple | list}.get(origin, origin)
    if not isinstance(value, taken) or (origin is int and isinstance(value, bool)):
        raise ConfigError(
            f"{{setting}}={{value}} is a {type(value).__name__}; {{allowed}}.",
            setting=f"{schema.__name__}.{name}",
            value=shown(value),
            allowed=f"it must be a {kind if origin is types.UnionType else origin.__name__}",
        )
    if origin is int and not -(2**31) <= value < 2**31:
        about = {"setting": f"{schema.__name__}.{name}", "value": shown(value)}
        raise ConfigError(**about, allowed="it must fit into 32 bits")
    if origin is str and len(value) > LONGEST:
        raise ConfigError(
            f"{schema.__name__}.{name} has {len(value)} characters; at most {LONGEST} are allowed."
        )
    if origin is float and not abs(value) < 2**127:  # as 32 bits hold it
        about = {"setting": f"{schema.__name__}.{name}", "value": str(value)}
        raise ConfigError(**about, allowed="it must be finite")
    if origin is dict and typing.get_args(kind):
        _, of = typing.get_args(kind)
        return {str(key): _convert(schema, f"{name}.{key}", of, value[key]) for key in value}
    if origin is tuple:
        of, *more = typing.get_args(kind)
        if more != [...] and len(value) != 1 + len(more):
            count = 1 + len(more)
            raise ConfigError(f"{schema.__name__}.{name}={shown(value)} must hold {count} values.")
        return tuple(_convert(schema, name, of, item) for item in value)
    return value


def shown(value: Any) -> str:
    """Returns a value as text, cut off if it is long."""
    try:
        written = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of very many digits"
    return written if len(written) <= SHOWN else f"{written[:SHOWN]}..."


# ---------------------------------------------------------------------------------------------
# Config files.


def changed(base: T, given: ConfigDict | dict[str, Any]) -> T:
    """Returns `base` with the settings in `given` replaced, section by section, checked.

    What is not a section, such as the weights of tasks, is replaced as a whole.

    Raises:
        ConfigError: `given` sets what does not exist or is out of range.
    """
    settings: Any = base
    merged = {field.name: getattr(base, field.name) for field in dataclasses.fields(settings)}
    for name in given:
        section, value = merged.get(name), cast(Any, given[name])
        inside = dataclasses.is_dataclass(section) and isinstance(value, dict | ConfigDict)
        merged[name] = changed(section, value) if inside else value
    return build(type(base), merged)


def run(path: pathlib.Path, function: str) -> Any:
    """Runs a config file and returns the result of one of its functions.

    Args:
        path: the file, followed by a colon and an argument of the function if it takes one.

    Raises:
        ConfigError: there is no such file, it has no such function, or it cannot be run.
    """
    path, arguments = _split(path)
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"there is no config file {path}. {listed(path.parent)}")
    try:
        with _importable(path.parent):
            made = runpy.run_path(str(path)).get(function)
            if made is None:
                raise ConfigError(f"{path} has no function {function}.")
            if arguments and not inspect.signature(made).parameters:
                raise ConfigError(f"{path} takes nothing after a colon: leave :{arguments[0]} out.")
            return made(*arguments)
    except ConfigError:
        raise
    except Exception as error:  # the file may raise anything
        raise ConfigError(f"{path} failed: {type(error).__name__}: {error}") from error


def _split(path: pathlib.Path) -> tuple[pathlib.Path, list[str]]:
    """Returns the file, and the argument of its function if there is one."""
    if match := re.fullmatch(r"(.*\.py):(\w+)", str(path)):
        return pathlib.Path(match[1]), [match[2]]
    return path, []


@contextlib.contextmanager
def _importable(folder: pathlib.Path) -> Iterator[None]:
    """Makes the files in a folder importable by name, and forgets them afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if (folder / f"{name}.py").is_file():
                del sys.modules[name]


def listed(folder: pathlib.Path) -> str:
    """Returns a sentence that lists the Python files in a folder."""
    names = ", ".join(sorted(str(path) for path in folder.glob("*.py")))
    if names:
        return f"There are: {names}."
    return (
        f"There is none in {folder.absolute()}: those of this project lie in the folder configs/ of"
        " its repository, not in the package that pip installs."
    )
