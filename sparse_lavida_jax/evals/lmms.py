# SPDX-License-Identifier: Apache-2.0
r"""A model for `lmms-eval`, whose tasks then run on a checkpoint of ours.

    python -m lmms_eval --model sparse_lavida --tasks mme,chartqa \
        --model_args pretrained=models/lavida-o,batch_size=8

It is found by the entry point `lmms_eval.models` of this package; docs/evaluation.md says more.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from lmms_eval.api.model import lmms  # pyright: ignore[reportMissingImports]
from PIL import Image

from sparse_lavida_jax.evals.benchmark import written_texts
from sparse_lavida_jax.pipeline import SparseLaViDa

MAX_NEW_TOKENS = 256  # of tasks that do not say, as in the released adapter (spec Sec. 6)
PLACEHOLDER = "<image>"  # our prompts put images in front


def manifest() -> Any:
    """Returns what the entry point gives to lmms-eval: a name and where the class is."""
    from lmms_eval.models.registry_v2 import ModelManifest  # pyright: ignore[reportMissingImports]

    return ModelManifest("sparse_lavida", simple_class_path=f"{__name__}.SparseLaViDaLmms")


class SparseLaViDaLmms(lmms):
    """A checkpoint that answers questions about images.

    Args:
        pretrained: a model folder, a run directory, or the name of a bundled model.
        batch_size: rows decoded together.
        text_steps: steps per text block; 0: one for each of its tokens, as released.
        seed: of the first request of a call.

    Raises:
        CheckpointError: there is no such model.
    """

    is_simple = True

    def __init__(
        self,
        pretrained: str = "scenes",
        batch_size: int | str = 8,
        text_steps: int | str = 0,
        seed: int | str = 0,
        **unknown: Any,
    ):
        super().__init__()
        unknown.pop("device", None)  # lmms-eval always gives it; JAX has its own devices
        unknown.pop("max_batch_size", None)
        if unknown:
            raise ValueError(
                f"sparse_lavida knows no {', '.join(unknown)}: model_args are pretrained,"
                " batch_size, text_steps, seed."
            )
        self.pipe = SparseLaViDa.from_pretrained(pretrained, batch_size=int(batch_size))
        steps = int(text_steps)
        self.sampling = dataclasses.replace(
            self.pipe.settings.sampling,
            text_temperature=0.0,
            text_steps=steps or self.pipe.settings.sampling.text_steps,
            text_step_ratio=0.0 if steps else 1.0,
        )
        self.seed = int(seed)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Returns the answer to each request, in their order.

        A request has `args`: words, settings of generation, a function that gives the images of a
        document, the number of the document, the task, the split. Of the settings `max_new_tokens`
        and `until` are followed; temperature is 0.
        """
        asked = [self._asked(request.args) for request in requests]
        answers: dict[int, str] = {}
        for tokens in sorted({one.tokens for one in asked}):
            places = [i for i, one in enumerate(asked) if one.tokens == tokens]
            for start in range(0, len(places), self.pipe.batch_size):
                batch = places[start : start + self.pipe.batch_size]
                answers |= zip(batch, self._answers([asked[i] for i in batch], batch), strict=True)
        return [answers[i] for i in range(len(asked))]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Refuses: a masked diffusion model gives no likelihood of a text token by token.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "a masked diffusion model has no likelihood to read off one forward pass: choose tasks"
            " whose output_type is generate_until."
        )

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Refuses: the checkpoints were trained to answer one question.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "sparse_lavida answers one question at a time: choose tasks whose output_type is"
            " generate_until."
        )

    def _asked(self, args: tuple) -> "_Asked":
        words, settings, visuals_of, number, task, split = args
        visuals = visuals_of(self.task_dict[task][split][number]) or []
        if wrong := [one for one in visuals if not isinstance(one, Image.Image)]:
            raise TypeError(
                f"{task} shows a {type(wrong[0]).__name__}: sparse_lavida looks at images only."
            )
        until = settings.get("until") or []
        return _Asked(
            words.replace(PLACEHOLDER, "").strip(),
            tuple(np.array(one.convert("RGB")) for one in visuals),
            int(settings.get("max_new_tokens") or MAX_NEW_TOKENS),
            (until,) if isinstance(until, str) else tuple(until),
        )

    def _answers(self, asked: Sequence["_Asked"], places: Sequence[int]) -> list[str]:
        examples = [self.pipe.prompts.ask(one.words, one.images, one.tokens) for one in asked]
        seeds = [self.seed + place for place in places]
        answers = []
        said = written_texts(self.pipe, examples, self.sampling, seeds)
        for one, text in zip(asked, said, strict=True):
            for end in one.until:
                text = text.partition(end)[0] if end else text
            answers.append(text.strip())
        return answers


@dataclasses.dataclass(frozen=True)
class _Asked:
    """One request: words, images, room for the answer, what ends it."""

    words: str
    images: tuple[np.ndarray, ...]
    tokens: int
    until: tuple[str, ...]
