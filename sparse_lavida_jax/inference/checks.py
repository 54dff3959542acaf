# SPDX-License-Identifier: Apache-2.0
"""Checks of what a caller hands over: numbers, seeds and texts, as Python's own or of any library.

A number may be an array of any library without axes; several may be an array. Whole numbers may be
floats such as 7.0. Bools and strings are not numbers.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sparse_lavida_jax import config
from sparse_lavida_jax.data import arrays
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling.options import ALIASES, OPTIONS
from sparse_lavida_jax.schema import LARGEST_SCALE, shown

# Anything may come, and is checked here.
Words = Any  # a text or several
Number = Any
Numbers = Any  # one for all rows, or one per row

SEEDS = 2**31  # that differ: a larger one stands for its remainder
LARGEST_SEED = 2**64 - 1  # that is taken
MOST_IMAGES = 1024  # for one prompt, or attempts at one image

Reader = Callable[[str, Any], Any]  # of a value, with its name for the error message


def refusal(name: str, value: Any, allowed: str) -> RequestError:
    """Returns the error for a value that is not allowed."""
    written = " ".join(shown(value).split())  # arrays are written in lines
    return RequestError(setting=name, value=written, allowed=allowed)


def plain(value: Any) -> Any:
    """Returns an array of any library as numbers of Python, in lists; anything else as it is."""
    if not hasattr(value, "__array__") and not hasattr(value, "__dlpack__"):
        return value
    try:
        return arrays.array_of(value, "").tolist()
    except arrays.ImageError:  # then it is not a number
        return value


def listed(values: Any) -> list[Any] | None:
    """Returns several values as a list; None: it is a single one."""
    found = plain(values)
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
        return None
    try:
        return [plain(one) for one in found]
    except TypeError:  # without axes, and not a number, such as a key of jax
        return None


def number(name: str, value: Any, *, whole: bool = False) -> Any:
    """Returns a number.

    Raises:
        RequestError: it is not a number, or not a whole one.
    """
    found = plain(value)
    fits = isinstance(found, int | float) and not isinstance(found, bool)
    if not fits or (whole and isinstance(found, float) and not found.is_integer()):
        raise refusal(name, value, f"it must be a {'whole ' * whole}number")
    return int(found) if whole else found


def texts(name: str, values: Any) -> list[str]:
    """Returns a text, or several, as a list.

    Raises:
        RequestError: there is none, or something else.
    """
    found = [plain(values)] if (several := listed(values)) is None else several
    if not found:
        raise RequestError(f"give at least one {name.removesuffix('s')}: the list is empty.")
    return [_text(name, one) for one in found]


# ---------------------------------------------------------------------------------------------
# Options. The ranges of values are checked where they are used.


def _of(kind: Any, allowed: str) -> Reader:
    """Returns a reader of values of a type."""

    def read(name: str, value: Any) -> Any:
        if not isinstance(found := plain(value), kind):
            raise refusal(name, value, f"it must be {allowed}")
        return str(found) if isinstance(found, str) else found

    return read


def _fixed(count: int, allowed: str, one: Reader, single: Reader | None = None) -> Reader:
    """Returns a reader of so many values; `single` reads a value that stands for them."""

    def read(name: str, value: Any) -> Any:
        several = listed(value)
        if several is None and single:
            return single(name, value)
        if several is None or len(several) != count:
            raise refusal(name, value, f"it must be {allowed}")
        return tuple(one(name, part) for part in several)

    return read


def _by_row(one: Reader) -> Reader:
    """Returns a reader of a value, or of one per row."""

    def read(name: str, value: Any) -> Any:
        several = listed(value)
        return one(name, value) if several is None else [one(name, part) for part in several]

    return read


_whole = functools.partial(number, whole=True)
_text = _of(str, "a text")
_turn = _fixed(2, "pairs of a question and its answer", _text)
READERS: dict[str, Reader] = {
    **dict.fromkeys(
        ("steps", "num_images", "rounds", "best_of", "style_seed", "max_new_tokens", "revisions"),
        _whole,
    ),
    **dict.fromkeys(("sampler", "order", "quality", "quantize", "vq_dtype", "template"), _text),
    **dict.fromkeys(("as_written", "together"), _of(bool, "True or False")),
    **dict.fromkeys(
        ("temperature", "guidance", "guidance_image"),
        _by_row(lambda name, value: None if value is None else number(name, value)),
    ),
    "layout_temperature": number,
    "registers": _fixed(2, "a whole number, or the first and the last", _whole, _whole),
    "size": _fixed(
        2, "height and width, or one side", _whole, lambda name, value: (_whole(name, value),) * 2
    ),
    "box": _fixed(4, "four numbers: x1, y1, x2, y2 in pixels", number),
    "layout": _by_row(_of(bool | str | None, "True, False or a layout in words")),
    "required": lambda _, value: texts("words", value),
    "earlier": lambda name, value: tuple(_turn(name, one) for one in listed(value) or [value]),
    "sampling": _of(config.Sampling, "a config.Sampling"),
}


def named(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options under their own names, in types of Python; None means not given.

    Raises:
        RequestError: an option is given under two names, or is of another type.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if value is None:
            continue
        if own in found:
            raise RequestError(
                "{setting} is given twice, also as {allowed}.",
                setting=own,
                allowed=" and ".join(OPTIONS[own].aliases),
            )
        found[own] = READERS[own](name, value) if own in READERS else value
    return found


def check_ceilings(given: Mapping[str, Any], ceilings: Mapping[str, int]) -> None:
    """Checks that options lie between 1 and their ceilings; None counts as not given.

    Raises:
        RequestError: names the first one.
    """
    for name, most in ceilings.items():
        if (asked := given.get(name)) is not None and not 1 <= asked <= most:
            raise refusal(name, asked, f"1 to {most}")


# ---------------------------------------------------------------------------------------------
# Values by row.


def each(name: str, values: Any, rows: int, copies: int = 1) -> list[Any]:
    """Returns a value per row, from one for all rows, one per row, or one per copied item.

    Raises:
        RequestError: the number of values does not match the rows.
    """
    if (several := listed(values)) is None:
        return [values] * rows
    column = [one for one in several for _ in range(copies if len(several) < rows else 1)]
    if len(column) != rows:
        raise RequestError(
            f"{len(several)} {name} were given for {rows} rows: give as many, or one."
        )
    return column


def fold(seed: Any, name: str = "seed") -> int:
    """Returns the one of `SEEDS` that a seed of up to 64 bits stands for, its remainder.

    Raises:
        RequestError: it is not a whole number, is negative or has more bits.
    """
    if not 0 <= (found := _whole(name, seed)) <= LARGEST_SEED:
        raise refusal(name, seed, f"0 to {LARGEST_SEED}")
    return found % SEEDS


def row_seeds(seed: Numbers, rows: int, copies: int = 1) -> list[int]:
    """Returns a seed per row, folded.

    Args:
        seed: of the first row, from which the others count up, 0 after the last one; or one per
            row, or per item that is copied.

    Raises:
        RequestError: as `fold`, or their number does not match the rows.
    """
    if (several := listed(seed)) is None:
        return [(fold(seed) + i) % SEEDS for i in range(rows)]
    copied = copies if len(several) < rows else 1
    seeds = map(fold, each("seeds", several, rows, copies))
    return [(one + i % copied) % SEEDS for i, one in enumerate(seeds)]


def row_numbers(name: str, values: Numbers, rows: int, copies: int = 1) -> list[float | None]:
    """Returns a number per row; None: as in the sampling settings.

    Raises:
        RequestError: a number is out of range, or their count does not match the rows.
    """
    column = each(f"values of {name}", values, rows, copies)
    if wrong := [one for one in column if one is not None and not 0 <= one <= LARGEST_SCALE]:
        raise refusal(name, wrong[0], f"it must be 0 to {LARGEST_SCALE}, both allowed")
    return [None if one is None else float(one) for one in column]
