# SPDX-License-Identifier: Apache-2.0
"""What the page offers to click: prompts that the bundled model does right with its own settings.

Only models of the small world have these examples; `tests/e2e/test_demo.py` draws the images.
"""

from sparse_lavida_jax.prompting.protocol import Pixels
from sparse_lavida_jax.scenes import world

# By task; tasks that are not named have none.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "generate": (
        "a red circle above a blue square",
        "three green triangles",
        "four cyan crosses",
        "a purple cross below a cyan triangle",
        "a small yellow square",
    ),
    "edit": (
        "make the red circle green",
        "replace the blue square with a yellow cross",
        "remove the red circle",
        "add a purple triangle",
    ),
    "outpaint": ("a red circle above a blue square",),
    "reflect": ("two blue squares", "a red circle above a blue square"),
    "ask": (
        "how many squares are there?",
        "what colour is the circle?",
        "is there a green triangle?",
    ),
    "caption": ("a ___ red circle and a ___ blue square",),
    "infill": ("a ___ red circle and a ___ blue square",),
    "ground": ("red circle", "blue square"),
}

# What tasks about an image start from, until an image is drawn: a cell and what it contains.
SCENE = {8: world.Object("circle", "red", "large"), 20: world.Object("square", "blue", "large")}


def start(task: str = "") -> Pixels:
    """Returns the image that the examples are about; to outpaint, the middle of it."""
    image = world.render(world.Scene.of(SCENE))
    return image[16:80, 16:80] if task == "outpaint" else image
