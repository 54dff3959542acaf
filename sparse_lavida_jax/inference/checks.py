# SPDX-License-Identifier: Apache-2.0
"""Checks of what a caller hands over: numbers, seeds and texts, as Python's own or of any library.

A number may be a scalar of numpy, or an array of any library without axes; several may be an array.
Whole numbers may be floats such as 7.0. Bools and strings are not numbers.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.data.templates import RequestError
from sparse_lavida_jax.sampling.options import ALIASES, OPTIONS
from sparse_lavida_jax.schema import LARGEST_SCALE, shown

# What is meant; at run time anything may come, and the checks here say what is wrong with it.
if TYPE_CHECKING:
    Words = str | Sequence[str]
    Whole = int | np.integer
    Number = float | np.number
    Numbers = Number | Sequence[Number | None] | np.ndarray | None  # for all rows, or one per row
    Sizes = Whole | Sequence[Whole] | np.ndarray
    Edges = Sequence[Number] | np.ndarray
    Seeds = Whole | Sequence[Whole] | np.ndarray
else:
    Words = Whole = Number = Numbers = Sizes = Edges = Seeds = Any

SEEDS = 2**31  # that differ: a larger one is folded to its remainder
LARGEST_SEED = 2**64 - 1  # that is taken
MOST_IMAGES = 1024  # for one prompt, or attempts at one image


def refusal(name: str, value: Any, allowed: str) -> RequestError:
    """Returns the error for a value that is not allowed."""
    written = " ".join(shown(value).split())  # arrays are written in lines
    return RequestError(f"{name}={written} is out of range: {allowed}.")


def plain(value: Any) -> Any:
    """Returns a scalar or an array of any library as a value of Python, or a list; others as is."""
    foreign = hasattr(value, "__array__") or hasattr(value, "__dlpack__")
    if not foreign:
        return value
    try:
        array = np.asarray(value) if hasattr(value, "__array__") else np.from_dlpack(value)
        return (array.astype(np.float32) if array.dtype.kind == "V" else array).tolist()
    except Exception:  # whatever another library raises: what cannot be read is not a number
        return value


def listed(values: Any) -> list[Any] | None:
    """Returns several values as a list; None: it is a single one."""
    found = plain(values)
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
        return None
    return [plain(one) for one in found]


def number(name: str, value: Any, *, whole: bool = False) -> Any:
    """Returns a number of any library as one of Python.

    Raises:
        RequestError: it is not a number, or not a whole one.
    """
    found = plain(value)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    if not is_number or (whole and isinstance(found, float) and not found.is_integer()):
        raise refusal(name, value, f"it must be a {'whole ' * whole}number")
    return int(found) if whole else found


def numbers(name: str, values: Any, count: int, what: str, *, whole: bool = False) -> list[Any]:
    """Returns so many numbers.

    Raises:
        RequestError: there are others.
    """
    found = listed(values)
    if found is None or len(found) != count:
        raise refusal(name, values, f"it must be {what}")
    return [number(name, one, whole=whole) for one in found]


def texts(name: str, values: Any) -> list[str]:
    """Returns one text, or several, as a list.

    Raises:
        RequestError: there is none, or something else.
    """
    found = listed(values)
    found = [plain(values)] if found is None else found
    if not found:
        raise RequestError(f"give at least one {name.removesuffix('s')}: the list is empty.")
    if wrong := [one for one in found if not isinstance(one, str)]:
        raise refusal(name, wrong[0], "it must be a text, or a list of texts")
    return [str(one) for one in found]


# ---------------------------------------------------------------------------------------------
# Options: readers of their values, by name. Ranges are checked where the values are used.


def _scales(name: str, value: Any) -> Any:
    several = listed(value)
    if several is None:
        return number(name, value)
    return [None if one is None else number(name, one) for one in several]


def _pair(name: str, value: Any, what: str) -> tuple[int, int]:
    first, last = numbers(name, value, 2, f"a whole number, or the {what}", whole=True)
    return first, last


def _registers(name: str, value: Any) -> int | tuple[int, int]:
    if listed(value) is None:
        return number(name, value, whole=True)
    return _pair(name, value, "first and the last")


def size(name: str, value: Any) -> tuple[int, int]:
    """Returns height and width; one number is the side of a square."""
    if listed(value) is None:
        return (number(name, value, whole=True),) * 2
    return _pair(name, value, "height and the width")


def _box(name: str, value: Any) -> tuple[Any, ...]:
    return tuple(numbers(name, value, 4, "four numbers: x1, y1, x2, y2 in pixels"))


def _bool(name: str, value: Any) -> bool:
    if not isinstance(plain(value), bool):
        raise refusal(name, value, "it must be True or False")
    return plain(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(plain(value), str):
        raise refusal(name, value, "it must be a text")
    return str(plain(value))


def _layouts(name: str, value: Any) -> Any:
    several = listed(value)
    found = [plain(value)] if several is None else several
    if wrong := [one for one in found if not isinstance(one, bool | str | None)]:
        raise refusal(name, wrong[0], "it must be True, False or a layout in words")
    return found[0] if several is None else found


def _turns(name: str, value: Any) -> tuple[tuple[str, ...], ...]:
    turns = [listed(turn) or () for turn in listed(value) or [None]]
    if any(len(turn) != 2 for turn in turns):
        raise refusal(name, value, "it must be pairs of a question and its answer")
    return tuple(tuple(_text(name, one) for one in turn) for turn in turns)


def _sampling(name: str, value: Any) -> config.Sampling:
    if not isinstance(value, config.Sampling):
        raise refusal(name, value, "it must be a config.Sampling")
    return value


_whole = functools.partial(number, whole=True)
READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("steps", "num_images", "rounds", "max_new_tokens"), _whole),
    **dict.fromkeys(("temperature", "guidance", "guidance_image"), _scales),
    **dict.fromkeys(("sampler", "order", "quantize", "vq_dtype", "template"), _text),
    **dict.fromkeys(("as_written", "together"), _bool),
    "layout_temperature": number,
    "registers": _registers,
    "size": size,
    "box": _box,
    "plan": _layouts,
    "required": lambda _, value: texts("words", value),
    "earlier": _turns,
    "sampling": _sampling,
}


def named(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options under their own names, in types of Python; None means not given.

    Raises:
        RequestError: an option is given under two names, or is of another kind.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if value is None:
            continue
        if own in found:
            raise RequestError(
                f"{own} is given twice, also as {' and '.join(OPTIONS[own].aliases)}."
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
    found = number(name, seed, whole=True)
    if not 0 <= found <= LARGEST_SEED:
        raise refusal(name, seed, f"0 to {LARGEST_SEED}")
    return found % SEEDS


def row_seeds(seed: Seeds, rows: int, copies: int = 1) -> list[int]:
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
