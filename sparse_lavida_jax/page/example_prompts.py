# SPDX-License-Identifier: Apache-2.0
"""What the page offers: prompts that a model of a small world does right by itself.

`tests/e2e/test_demo.py` draws the images of the bundled models, with the seed of the page.
"""

import dataclasses
import functools
from collections.abc import Mapping

from sparse_lavida_jax.art import world as art
from sparse_lavida_jax.prompting.protocol import Pixels
from sparse_lavida_jax.scenes import world

EDGE = 16  # pixels of an image around its middle, which is outpainted


@dataclasses.dataclass(frozen=True)
class Examples:
    """Prompts, and the image that they are about.

    Attributes:
        words: what the text box of a task contains at first.
        prompts: what is offered to click, by task; tasks that are not named have none.
        image: what tasks about an image start from, until an image is drawn; None: nothing.
    """

    words: Mapping[str, str]
    prompts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    image: Pixels | None = None

    def start(self, task: str = "") -> Pixels | None:
        """Returns the image that the examples are about; to outpaint, the middle of it."""
        if self.image is None:
            return None
        inner = slice(EDGE, -EDGE)
        return self.image[inner, inner] if task == "outpaint" else self.image


# A cell and what it contains.
SCENE = {8: world.Object("circle", "red", "large"), 20: world.Object("square", "blue", "large")}
SCENE_WORDS = {
    "generate": "a red circle above a blue square",
    "edit": "make the red circle green",
    "inpaint": "a cyan cross above a blue square",
    "outpaint": "a red circle above a blue square",
    "reflect": "two blue squares",
    "ask": "how many squares are there?",
    "infill": "a red circle is ___ a blue square",
    "ground": "blue square",
    "surprise": (
        "a red circle above a blue square\na red circle below a blue square\ntwo red circles"
    ),
}
SCENE_PROMPTS = {
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
ART_SCENE = art.ArtScene.of(
    "pink",
    [
        art.Placed(2, 3, "sun", "twemoji", "large"),
        art.Placed(14, 14, "carrot", "noto", "small"),
    ],
)
ART_WORDS = {
    "generate": "a lion and a camera in twemoji style",
    "edit": "draw the sun in noto style",
    "inpaint": "a sun and a key",
    "outpaint": "a sun and a carrot",
    "reflect": "two red apples",
    "ask": "what style is the sun?",
    "ground": "sun",
    "surprise": "a sun and a carrot\na sun and a key\ntwo carrots",
}
ART_PROMPTS = {
    "generate": (
        "a lion and a camera in twemoji style",
        "two red apples",
        "a crown above a teddy bear",
        "a large noto crown on a blue background",
        "Löwe und Fotoapparat im Stil noto",
    ),
    "edit": (
        "draw the sun in noto style",
        "remove the carrot",
        "replace the sun with a crown",
        "add a drum",
    ),
    "outpaint": ("a sun and a carrot",),
    "reflect": ("two red apples",),
    "ask": ("how many suns are there?", "what style is the sun?", "is there a crown?"),
    "ground": ("sun",),
}


OTHER_WORDS = {
    "generate": "a cat on a red sofa",
    "edit": "make the sofa blue",
    "reflect": "a cat on a red sofa",
    "ask": "what is in the picture?",
    "ground": "cat",
}


@functools.cache
def of_world(name: str) -> Examples:
    """Returns the examples of a small world, a `config.Data.source`, or of any other model: ""."""
    match name:
        case "scenes":
            return Examples(SCENE_WORDS, SCENE_PROMPTS, world.render(world.Scene.of(SCENE)))
        case "art":
            return Examples(ART_WORDS, ART_PROMPTS, art.render(ART_SCENE))
    return Examples(OTHER_WORDS)
