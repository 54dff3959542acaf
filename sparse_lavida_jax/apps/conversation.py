# SPDX-License-Identifier: Apache-2.0
"""A conversation: tasks that take turns, all about the image that is on the table."""

from typing import Any

from sparse_lavida_jax import config
from sparse_lavida_jax.data.templates import TASKS, RequestError
from sparse_lavida_jax.inference.requests import Shown
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.pipeline import SparseLaViDa

DRAWING = ("generate", "edit", "inpaint", "outpaint", "reflect")


class Conversation:
    """Turns of any tasks; what is drawn is what the next turn is about.

        talk = Conversation(pipe)
        talk.say("generate", "a red circle above a blue square")
        talk.say("edit", "make the red circle green")
        print(talk.say("ask", "is there a red circle?").text)

    Args:
        pipe: what does the tasks.
        image: on the table at first, if any.
        seed: of the first turn; every turn has the next one.
        sampling: of all turns.

    Attributes:
        image: on the table now.
        turns: what was returned so far.
    """

    def __init__(
        self,
        pipe: SparseLaViDa,
        image: Shown | None = None,
        *,
        seed: int = 0,
        sampling: config.Sampling | None = None,
    ):
        self.pipe = pipe
        self.image = image
        self.seed = seed
        self.sampling = sampling
        self.turns: list[Result] = []

    def say(self, task: str, words: str = "", **more: Any) -> Result:
        """Does a task about the image on the table.

        Args:
            task: one of `task_prompts.TASKS`.
            words: prompt, instruction, question or phrases (with semicolons between them).
            more: what the task takes besides: a `mask`, a `box`, a `template`.

        Raises:
            RequestError: an unknown task, or one about an image where none is on the table.
        """
        if task not in TASKS:
            raise RequestError(f"there is no task {task!r}. Choose one of {', '.join(TASKS)}.")
        given = {"seed": self.seed + len(self.turns), "sampling": self.sampling, **more}
        result = self._call(task, words, given)
        if task in DRAWING:
            self.image = result
        self.turns.append(result)
        return result

    def _call(self, task: str, words: str, given: dict[str, Any]) -> Result:
        does = getattr(self.pipe, task)
        if task in ("generate", "reflect"):
            return does(words, **given)
        if task == "infill":
            return does(words, self.image, **given)
        if self.image is None and task not in ("ask", "reason"):
            raise RequestError(f"{task!r} is about an image, and none was drawn or given yet.")
        if task in ("caption", "constrained_caption"):
            return does(self.image, **given)
        if task == "ground":
            return does(self.image, [part.strip() for part in words.split(";")], **given)
        return does(self.image, words, **given)
