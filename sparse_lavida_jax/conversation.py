# SPDX-License-Identifier: Apache-2.0
"""A conversation: a sequence of tasks, each about the current image."""

from typing import Any

from sparse_lavida_jax import config
from sparse_lavida_jax.inference.checks import fold
from sparse_lavida_jax.inference.requests import Shown, spec_of
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling.progress import Callback


class Conversation:
    """A sequence of any tasks; each turn is about the image that was drawn last.

        talk = Conversation(pipe)
        talk.say("generate", "a red circle above a blue square")
        talk.say("edit", "make the red circle green")
        print(talk.say("ask", "is there a red circle?").text)

    Args:
        pipe: what does the tasks.
        image: the first one, if any.
        seed: for the first turn; each further turn adds 1.
        sampling: settings of all turns.

    Attributes:
        image: the current one.
        turns: the results so far.
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

    def say(
        self, task: str, words: str = "", *, callback: Callback | None = None, **more: Any
    ) -> Result:
        """Runs a task about the current image.

        Args:
            task: one of `inference.requests.TASK_SPECS`.
            words: prompt, instruction, question or phrases (with semicolons between them).
            callback: see `SparseLaViDa.run`.
            more: other options of the task, such as `mask`, `box` or `template`.

        Raises:
            RequestError: an unknown task, words for a task that takes none, or a task that needs an
                image before there is one.
        """
        spec, about = spec_of(task), [part.strip() for part in words.split(";")]
        if words and not spec.words:
            raise RequestError(f"{task!r} takes no words: leave {words!r} out.")
        if spec.image == "needed" and self.image is None:
            raise RequestError(f"{task!r} is about an image, and none was drawn or given yet.")
        requests = self.pipe.requests(
            task,
            (about if spec.makes == "boxes" else words) if spec.words else None,
            self.image if spec.image else None,
            **{"seed": fold(self.seed) + len(self.turns), "sampling": self.sampling, **more},
        )
        result = self.pipe.run(requests, callback=callback)
        if spec.draws:
            self.image = result
        self.turns.append(result)
        return result
