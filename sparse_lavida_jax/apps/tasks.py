# SPDX-License-Identifier: Apache-2.0
"""The tasks of a model as people see them: one table for the command line and the page."""

import dataclasses

_CIRCLE = '"a red circle above a blue square"'


@dataclasses.dataclass(frozen=True)
class TaskForm:
    """How a task is asked for.

    Attributes:
        does: what it does, for the overview of the commands.
        example: a command line, after the name of the task.
        options: what its command takes besides the options of all tasks (`cli.OPTIONS`).
        draws: whether it makes an image.
        batch: whether many prompts can come from a file.
        label: of its tab on the page; empty where it has none of its own.
        words: label of the box for the words, and what stands there at first; empty: no box.
        button: what starts it.
    """

    does: str
    example: str
    options: tuple[str, ...]
    draws: bool = False
    batch: bool = True
    label: str = ""
    words: tuple[str, str] = ("", "")
    button: str = ""

    @property
    def takes_image(self) -> bool:
        """Whether the task can be about an image; see `needs_image`."""
        return bool({"image", "needed_image", "shown"} & {*self.options})


FORMS = {
    "generate": TaskForm(
        "draw images",
        f"{_CIRCLE} --out out.png --save-steps steps.gif",
        ("prompt", "size", "replay"),
        draws=True,
        label="Draw",
        words=("Prompt", "a red circle above a blue square"),
        button="Draw",
    ),
    "edit": TaskForm(
        "change an image as told",
        'out.png "make the red circle green" --out edited.png',
        ("image", "prompt"),
        draws=True,
        label="Edit",
        words=("Instruction", "make the red circle green"),
        button="Edit",
    ),
    "inpaint": TaskForm(
        "draw a part of an image again",
        f"out.png {_CIRCLE} --box 0,0,48,48 --out inpainted.png",
        ("image", "prompt", "mask", "hole"),
        draws=True,
        label="Inpaint",
        words=("What the whole image shows", ""),
        button="Inpaint",
    ),
    "outpaint": TaskForm(
        "draw what surrounds an image",
        f"out.png {_CIRCLE} --box 16,16,80,80 --out outpainted.png",
        ("image", "prompt", "place"),
        draws=True,
        label="Outpaint",
        words=("What the whole new image shows", ""),
        button="Outpaint",
    ),
    "reflect": TaskForm(
        "draw, judge what was drawn, and draw again",
        f"{_CIRCLE} --rounds 3 --out out.png",
        ("prompt", "rounds"),
        draws=True,
        label="Draw and judge",
        words=("Prompt", "two blue squares and a red circle"),
        button="Draw and judge",
    ),
    "ask": TaskForm(
        "answer a question about an image",
        'out.png "how many squares are there?"',
        ("image", "prompt", "max_new_tokens"),
        label="Ask",
        words=("Question", "how many squares are there?"),
        button="Ask",
    ),
    "reason": TaskForm(
        "answer a question step by step",
        'out.png "how many red things plus how many squares?"',
        ("image", "prompt", "max_new_tokens"),
    ),
    "caption": TaskForm(
        "describe an image, freely or in given words",
        'out.png --template "a ___ red circle and a ___ ___ square"',
        ("needed_image", "template", "words"),
        batch=False,
        label="Describe",
        words=("In these words, if any", ""),
        button="Describe",
    ),
    "infill": TaskForm(
        "fill the gaps of a text",
        '"a red circle is ___ {2} blue square" --image out.png',
        ("prompt", "shown"),
        label="Fill gaps",
        words=("Text with gaps", "a red circle is ___ a blue square"),
        button="Fill",
    ),
    "ground": TaskForm(
        "find things in an image",
        'out.png "red circle" "blue square" --out boxes.png',
        ("needed_image", "phrases", "boxes"),
        batch=False,
        label="Find",
        words=("What to find, one a line", "blue square"),
        button="Find",
    ),
}
