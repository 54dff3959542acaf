# SPDX-License-Identifier: Apache-2.0
"""The tasks of a model as they are shown on the page."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TabText:
    """What the tab of a task shows.

    Attributes:
        label: of its tab.
        words: label of the text box, and its initial contents.
        info: what users should know about the words, without characters that Markdown eats.
        button: label of the button that starts it; by default `label`.
        result: label of the output.
    """

    label: str
    words: tuple[str, str] = ("", "")
    info: str = ""
    button: str = ""
    result: str = "Image"


TABS = {
    "generate": TabText(
        label="Draw",
        words=("Prompt", "a red circle above a blue square"),
    ),
    "edit": TabText(
        label="Edit",
        words=("Instruction", "make the red circle green"),
    ),
    "inpaint": TabText(
        label="Inpaint",
        words=("What the whole image shows", "a cyan cross above a blue square"),
        info="paint over what should be drawn again",
    ),
    "outpaint": TabText(
        label="Outpaint",
        words=("What the whole new image shows", "a red circle above a blue square"),
        info="the image becomes the middle of the new one; if it is not smaller, it is halved",
    ),
    "reflect": TabText(
        label="Draw and judge",
        words=("Prompt", "two blue squares"),
    ),
    "ask": TabText(
        label="Ask",
        words=("Question", "how many squares are there?"),
        result="Answer",
    ),
    "caption": TabText(
        label="Describe",
        words=("In these words, if any", ""),
        info="three underscores are a gap of one token, {4} one of four",
        result="Description",
    ),
    "infill": TabText(
        label="Fill gaps",
        words=("Text with gaps", "a red circle is ___ a blue square"),
        info="three underscores are a gap of one token, {4} one of four; no image is needed",
        button="Fill",
        result="Filled",
    ),
    "ground": TabText(
        label="Find",
        words=("What to find, one per line", "blue square"),
        result="Found",
    ),
    "surprise": TabText(
        label="Surprise",
        words=(
            "Captions, one per line",
            "a red circle above a blue square\na red circle below a blue square\ntwo red circles",
        ),
        info="at most eight; the fewer bits an image has given a caption, the better it fits",
        button="Measure",
        result="Bright where the best caption explains least",
    ),
}
