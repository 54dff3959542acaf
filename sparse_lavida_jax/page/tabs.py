# SPDX-License-Identifier: Apache-2.0
"""The tasks of a model as they are shown on the page."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TabText:
    """What the tab of a task shows.

    Attributes:
        label: of its tab.
        words: label of the text box.
        info: what users should know about the words, without characters that Markdown eats.
        button: label of the button that starts it; by default `label`.
        result: label of the output.
    """

    label: str
    words: str = ""
    info: str = ""
    button: str = ""
    result: str = "Image"


TABS = {
    "generate": TabText(
        label="Draw",
        words="Prompt",
    ),
    "edit": TabText(
        label="Edit",
        words="Instruction",
    ),
    "inpaint": TabText(
        label="Inpaint",
        words="What the whole image shows",
        info="paint over what should be drawn again",
    ),
    "outpaint": TabText(
        label="Outpaint",
        words="What the whole new image shows",
        info="the image becomes the middle of the new one; if it is not smaller, it is halved",
    ),
    "reflect": TabText(
        label="Draw and judge",
        words="Prompt",
    ),
    "ask": TabText(
        label="Ask",
        words="Question",
        result="Answer",
    ),
    "caption": TabText(
        label="Describe",
        words="In these words, if any",
        info="three underscores are a gap of one token, {4} one of four",
        result="Description",
    ),
    "infill": TabText(
        label="Fill gaps",
        words="Text with gaps",
        info="three underscores are a gap of one token, {4} one of four; no image is needed",
        button="Fill",
        result="Filled",
    ),
    "ground": TabText(
        label="Find",
        words="What to find, one per line",
        result="Found",
    ),
    "surprise": TabText(
        label="Surprise",
        words="Captions, one per line",
        info="at most eight; the fewer bits an image has given a caption, the better it fits",
        button="Measure",
        result="Bright where the best caption explains least",
    ),
}
