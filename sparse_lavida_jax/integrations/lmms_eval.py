# SPDX-License-Identifier: Apache-2.0
r"""A model for `lmms-eval`, to run its tasks on our checkpoints.

    python -m lmms_eval --model sparse_lavida --tasks mme,chartqa \
        --model_args pretrained=models/lavida-o,batch_size=8

lmms-eval finds it by the entry point `lmms_eval.models` of this package: docs/api/benchmarks.md.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from lmms_eval.api.model import lmms  # pyright: ignore[reportMissingImports]
from PIL import Image

from sparse_lavida_jax import config
from sparse_lavida_jax.evals.benchmark import written_texts
from sparse_lavida_jax.evals.scorers import grouped
from sparse_lavida_jax.pipeline import SparseLaViDa

MAX_NEW_TOKENS = 256  # for tasks without a limit, as in the released adapter (spec Sec. 6)
REFUSED = (
    "sparse_lavida answers one question at a time and has no likelihood to read off one forward"
    " pass: choose tasks whose output_type is generate_until."
)
PLACEHOLDER = "<image>"  # our prompts put images first


def manifest() -> Any:
    """Returns what the entry point gives to lmms-eval: a name and the path of the class."""
    from lmms_eval.models.registry_v2 import ModelManifest  # pyright: ignore[reportMissingImports]

    return ModelManifest("sparse_lavida", simple_class_path=f"{__name__}.SparseLaViDaLmms")


class SparseLaViDaLmms(lmms):
    """A checkpoint that answers questions about images.

    Args:
        pretrained: a model folder, a run directory, or the name of a bundled model.
        batch_size: rows decoded together.
        text_steps: steps per text block; 0: one for each of its tokens, as released.
        seed: of the first request in a call.

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
        unknown.pop("device", None)  # lmms-eval always sets it; JAX has its own devices
        unknown.pop("max_batch_size", None)
        if unknown:
            raise ValueError(
                f"sparse_lavida knows no {', '.join(unknown)}: model_args are pretrained,"
                " batch_size, text_steps, seed."
            )
        self.pipe = SparseLaViDa.from_pretrained(pretrained, batch_size=int(batch_size))
        steps = int(text_steps)
        text = {"steps": steps, "step_ratio": 0.0} if steps else {"step_ratio": 1.0}
        sampling = self.pipe.settings.sampling
        self.sampling = config.changed(sampling, {"text": {"temperature": 0.0} | text})
        self.seed = int(seed)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Returns the answer to each request, in order.

        A request has `args`: words, generation settings, a function that returns the images of a
        document, the number of the document, the task, the split. Only the settings
        `max_new_tokens` and `until` are used; temperature is 0.
        """
        asked = [request.args for request in requests]
        rooms = grouped(
            (int(settings.get("max_new_tokens") or MAX_NEW_TOKENS), place)
            for place, (_, settings, *_) in enumerate(asked)
        )
        answers: dict[int, str] = {}
        for tokens, places in rooms.items():
            for start in range(0, len(places), self.pipe.batch_size):
                batch = places[start : start + self.pipe.batch_size]
                examples = [self._example(asked[place], tokens) for place in batch]
                seeds = [self.seed + place for place in batch]
                said = written_texts(self.pipe, examples, self.sampling, seeds)
                for place, text in zip(batch, said, strict=True):
                    answers[place] = _ended(text, asked[place][1].get("until") or [])
        return [answers[place] for place in range(len(asked))]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Refuses: a masked diffusion model gives no likelihood of text token by token.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(REFUSED)

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Refuses: the checkpoints were trained to answer single questions.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(REFUSED)

    def _example(self, args: tuple, tokens: int) -> Any:
        words, _, visuals_of, number, task, split = args
        visuals = visuals_of(self.task_dict[task][split][number]) or []
        if wrong := [one for one in visuals if not isinstance(one, Image.Image)]:
            raise TypeError(
                f"{task} shows a {type(wrong[0]).__name__}: sparse_lavida looks at images only."
            )
        images = [np.array(one.convert("RGB")) for one in visuals]
        return self.pipe.prompts.ask(words.replace(PLACEHOLDER, "").strip(), images, tokens)


def _ended(text: str, until: str | Sequence[str]) -> str:
    """Returns an answer up to the first stop string."""
    for end in (until,) if isinstance(until, str) else until:
        text = text.partition(end)[0] if end else text
    return text.strip()
