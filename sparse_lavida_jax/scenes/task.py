# SPDX-License-Identifier: Apache-2.0
"""The definition of a task of the small world: examples, judge, and where it appears."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

# Tasks with sequences of about the same length share a group; a batch holds a single group.
TEXT_GROUPS = ("write", "answer", "tell")
IMAGE_GROUPS = ("draw", "part", "edit")


class Sample(NamedTuple):
    """One example: the input of the model and one correct response."""

    prompt: str
    image: Any = None  # input of the model: a scene of its world, or None
    answer: str | None = None  # a correct response of a text task
    target: Any = None  # a correct response of an image task: a scene, or None
    layout: str | None = None  # of `target`, or of what an edit changes and a hole lacks
    known: tuple[bool, ...] | None = None  # cells of `target` that are given, in raster order
    given: tuple[tuple[int, int], ...] = ()  # character spans of `answer` that are given
    window: tuple[slice, slice] | None = None  # rows and columns of `target` that are learned
    column: str | None = None  # the kind of request or question: `draw.COLUMNS`, `answer.COLUMNS`
    held_out: bool = False
    task: str = ""
    sheet: Any = None  # what judges of the art world know: an `art.sheet.Sheet`; None: the bundled

    @property
    def known_grid(self) -> Bool[np.ndarray, "y x"] | None:
        if self.known is None:
            return None
        side = math.isqrt(len(self.known))
        return np.array(self.known).reshape(side, side)


def layout_sample(sample: Sample) -> Sample:
    """Returns an example of an image task with its layout as the response."""
    return sample._replace(answer=sample.layout, target=None, layout=None)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The judgement of one response.

    Attributes:
        ok: all is right.
        reason: "" or what is wrong.
        attributes: drawn objects with a requested shape and colour, and all drawn objects. Their
            quotient over many images is the attribute precision. (0, 0) if nothing is drawn for
            a request.
        parts: separate scores of an edit, each (right, all).
    """

    ok: bool
    reason: str
    attributes: tuple[int, int] = (0, 0)
    parts: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Task:
    """A task: how its examples are made, judged, grouped in batches and shown.

    Attributes:
        make: makes an example from `Dice`, or returns None if the draw is unusable: it is then
            called again. If the task is `made_of` others, makes it from an example of those.
        judge: returns what is wrong with a response, "" if nothing is: `(sample, text)`, or
            `(sample, scene)` for an image task. None: the task is only for training.
        group: one of `TEXT_GROUPS` or, where the response is an image, of `IMAGE_GROUPS`.
        command: the command for this task; None: users cannot request it.
        label: the heading of its examples in the report of a run; None: none are shown.
        made_of: tasks from whose examples it is derived, in turn by number.
    """

    make: Callable[[Any], Sample | None]
    judge: Callable[[Sample, Any], str] | None
    group: str
    command: str | None = None
    label: str | None = None
    made_of: tuple[str, ...] = ()

    def __post_init__(self):
        if self.group not in (groups := TEXT_GROUPS + IMAGE_GROUPS):
            raise ValueError(
                f"there is no group {self.group!r}. Choose one of {', '.join(groups)}."
            )

    @property
    def is_image(self) -> bool:
        """Whether the response is an image."""
        return self.group in IMAGE_GROUPS


def judged_task(table: Mapping[str, Task], name: str, output: Any) -> Task:
    """Returns the task of a response, which is pixels or text as the task asks for.

    Raises:
        ValueError: the task has no judge, or the response is of the other type.
    """
    task = table.get(name)
    if task is None or task.judge is None:
        judged = ", ".join(one for one, known in table.items() if known.judge)
        raise ValueError(f"no judge for the task '{name}'. Tasks with a judge: {judged}.")
    if task.is_image == isinstance(output, str):
        wanted = "pixels" if task.is_image else "a string"
        raise ValueError(f"a response to '{name}' is {wanted}, got a {type(output).__name__}.")
    return task
