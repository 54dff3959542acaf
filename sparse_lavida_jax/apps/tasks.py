# SPDX-License-Identifier: Apache-2.0
"""The tasks of a model as users see them: one table for the command line and the page."""

import dataclasses
import math

_CIRCLE = '"a red circle above a blue square"'


@dataclasses.dataclass(frozen=True)
class TaskForm:
    """How users run a task.

    Attributes:
        does: what it does, for the overview of the commands.
        example: a command line, without the program and the task name.
        options: keys of the arguments of its command besides those of all tasks (`arguments.py`).
        label: of its tab on the page; empty if it has no tab of its own.
        words: label of the text box, and its initial contents.
        info: what users should know about the words, without characters that Markdown eats.
        button: label of the button that starts it; by default `label`.
        result: label of the output.
    """

    does: str
    example: str
    options: str
    label: str = ""
    words: tuple[str, str] = ("", "")
    info: str = ""
    button: str = ""
    result: str = "Image"


FORMS = {
    "generate": TaskForm(
        "draw images",
        f"{_CIRCLE} --out out.png --save-steps steps.gif",
        "prompt size crop replay batch",
        label="Draw",
        words=("Prompt", "a red circle above a blue square"),
    ),
    "edit": TaskForm(
        "edit an image",
        'out.png "make the red circle green" --out edited.png',
        "image prompt batch",
        label="Edit",
        words=("Instruction", "make the red circle green"),
    ),
    "inpaint": TaskForm(
        "redraw a part of an image",
        'out.png "a cyan cross above a blue square" --box 0,0,96,48 --out inpainted.png',
        "image prompt mask hole batch",
        label="Inpaint",
        words=("What the whole image shows", "a cyan cross above a blue square"),
        info="paint over what should be drawn again",
    ),
    "outpaint": TaskForm(
        "extend an image beyond its edges",
        f"smaller.png {_CIRCLE} --out outpainted.png",
        "image prompt place batch",
        label="Outpaint",
        words=("What the whole new image shows", "a red circle above a blue square"),
        info="the image becomes the middle of the new one; if it is not smaller, it is halved",
    ),
    "reflect": TaskForm(
        "draw an image, judge it, and correct its faults",
        '"two blue squares" --rounds 3 --out reflected.png',
        "prompt rounds batch",
        label="Draw and judge",
        words=("Prompt", "two blue squares"),
    ),
    "ask": TaskForm(
        "answer a question about an image",
        'out.png "how many squares are there?"',
        "image prompt max_new_tokens batch",
        label="Ask",
        words=("Question", "how many squares are there?"),
        result="Answer",
    ),
    "reason": TaskForm(
        "answer a question step by step",
        'out.png "how many red things plus how many squares?"',
        "image prompt max_new_tokens batch",
    ),
    "caption": TaskForm(
        "describe an image, freely or in given words",
        'out.png --template "a ___ red circle and a ___ ___ square"',
        "needed_image template words",
        label="Describe",
        words=("In these words, if any", ""),
        info="three underscores are a gap of one token, {4} one of four",
        result="Description",
    ),
    "infill": TaskForm(
        "fill the gaps in a text",
        '"a ___ red circle and a ___ blue square" --image out.png',
        "prompt shown batch",
        label="Fill gaps",
        words=("Text with gaps", "a red circle is ___ a blue square"),
        info="three underscores are a gap of one token, {4} one of four; no image is needed",
        button="Fill",
        result="Filled",
    ),
    "ground": TaskForm(
        "find things in an image",
        'out.png "red circle" "blue square" --out boxes.png',
        "needed_image phrases boxes scale",
        label="Find",
        words=("What to find, one per line", "blue square"),
        result="Found",
    ),
}


def cell_rows(cells: int, size: tuple[int, int] | None) -> int:
    """Returns the number of rows of cells in an image of this height and width; None: square."""
    height, width = size or (1, 1)
    return math.isqrt(cells * height // width)
