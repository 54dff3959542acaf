# SPDX-License-Identifier: Apache-2.0
"""The model as a diffusers image pipeline; diffusers itself is not needed.

    pipe = SparseLaViDaPipeline.from_pretrained("scenes")
    image = pipe("a red circle above a blue square", num_inference_steps=8, generator=0).images[0]

Names, defaults and the meaning of numbers are those of diffusers; what cannot be honoured is
refused.
"""

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from PIL import Image

from sparse_lavida_jax.data.templates import RequestError
from sparse_lavida_jax.inference.checks import SEEDS, Words
from sparse_lavida_jax.inference.requests import Shown
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.layout import FIRST_BLOCK
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.sample import Callback, Progress

StepCallback = Callable[["SparseLaViDaPipeline", int, int, dict[str, Any]], dict[str, Any] | None]

# By `output_type`.
FORMS: dict[str, Callable[[Result], Any]] = {
    "pil": lambda result: list(result.images),
    "np": lambda result: np.stack(result.pixels).astype(np.float32) / 255,
    "latent": lambda result: np.stack(result.tokens),
}


@dataclasses.dataclass(frozen=True)
class PipelineOutput:
    """Images, and how they were made.

    Attributes:
        images: a list of Pillow images ("pil"), an array [b h w 3] in [0, 1] ("np"), or the codes
            of the cells [b l g] ("latent").
        result: what `SparseLaViDa` returned: seeds, layouts, times, records for `replay`.
    """

    images: list[Image.Image] | np.ndarray
    result: Result


class SparseLaViDaPipeline:
    """Draws, edits and inpaints when called.

    Args:
        model: a `SparseLaViDa`; `from_pretrained` loads one.
    """

    # A callback that sets `_interrupt`, which diffusers honours, gets an error: nothing would stop.
    __slots__ = ("model",)

    def __init__(self, model: SparseLaViDa):
        self.model = model

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *,
        dtype: Any = None,
        torch_dtype: Any = None,
        **options: Any,
    ) -> "SparseLaViDaPipeline":
        """Loads a model folder, a run directory, or a bundled model or one from the hub by name.

        Args:
            dtype: of the parameters, as a name or a torch dtype; also as `torch_dtype`.
            options: see `SparseLaViDa.from_pretrained`, which also lists the exceptions.
        """
        wanted = torch_dtype if dtype is None else dtype
        name = None if wanted is None else str(wanted).removeprefix("torch.")
        return cls(
            SparseLaViDa.from_pretrained(pretrained_model_name_or_path, dtype=name, **options)
        )

    def to(self, device: Any) -> "SparseLaViDaPipeline":
        """Returns itself if its parameters are on that device, where jax placed them on loading.

        Raises:
            ValueError: they are elsewhere.
        """
        kind, _, number = str(device).partition(":")
        here = jax.default_backend()
        if {"cuda": "gpu"}.get(kind, kind) != here or number not in ("", "0"):
            raise ValueError(
                f"the model is on {here} and cannot be moved to {device}: choose the device before"
                " Python starts, such as JAX_PLATFORMS=cpu."
            )
        return self

    def __call__(
        self,
        prompt: Words | None = None,
        image: Shown | Sequence[Shown] | None = None,
        mask_image: Any = None,
        *,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        negative_prompt: Words | None = None,
        num_images_per_prompt: int | None = 1,
        generator: Any = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        **options: Any,
    ) -> PipelineOutput | tuple[Any]:
        """Draws an image for each prompt; edits `image` if given, or inpaints it with `mask_image`.

        Args:
            prompt: what to draw, or the instruction of an edit.
            mask_image: white where to draw.
            height, width: in pixels, both or neither; by default the model's own.
            num_inference_steps, guidance_scale: None: the checkpoint's settings.
            guidance_scale: 1 or less means no guidance; it is `ImageOptions.guidance` plus 1.
            negative_prompt: empty: guidance steers away from the omitted prompt.
            generator: an int or a numpy or torch generator, or a list with one per image or per
                prompt. If one is for several images, the later ones use the next seeds. A numpy
                generator is advanced; of a torch one only the initial seed is read, so another call
                with it draws the same image. None: a different image each time.
            output_type: "pil", "np" or "latent" (`PipelineOutput.images`).
            return_dict: False returns a tuple of the images alone.
            callback_on_step_end: called as `callback(pipe, step, timestep, kwargs)` for each step
                of the image: for all steps of a segment at once when the segment has ended, and for
                each batch (`SparseLaViDa.batch_size`) separately; `timestep` is the number of steps
                left. To stop, raise an exception.
            callback_on_step_end_tensor_inputs: keys of its `kwargs`; only "latents" exists: the
                codes [b l g] after the step, which cannot be changed.
            options: our own, see `requests.ImageOptions`.

        Raises:
            RequestError: the request cannot be honoured.
            ImageError, ConfigError: see `SparseLaViDa.inpaint` and `generate`.
        """
        if output_type not in FORMS:
            raise RequestError(f"output_type={output_type!r} is not known: {', '.join(FORMS)}.")
        if any([negative_prompt] if isinstance(negative_prompt, str) else negative_prompt or ()):
            raise RequestError(
                "a negative_prompt cannot be honoured: guidance leads away from the prompt left"
                " out. Leave it empty, and say in the prompt what to draw."
            )
        if (height is None) != (width is None):
            raise RequestError(f"{height=} and {width=}: give both, or neither.")
        drawn = "generate" if image is None else "edit"
        requests = self.model.requests(
            drawn if mask_image is None else "inpaint",
            prompt,
            image,
            mask=mask_image,
            size=None if height is None else (height, width),
            num_inference_steps=num_inference_steps,
            guidance=None if guidance_scale is None else max(guidance_scale - 1, 0),
            num_images=num_images_per_prompt,
            seed=_seeds(generator),
            **options,
        )
        told = _step_by_step(self, callback_on_step_end, callback_on_step_end_tensor_inputs)
        result = self.model.run(requests, told)
        images = FORMS[output_type](result)
        return PipelineOutput(images, result) if return_dict else (images,)


def _seeds(generators: Any) -> int | list[int]:
    """Returns the seed of a generator, or the seeds of a list of them."""
    several = isinstance(generators, list | tuple)
    return [_seed(one) for one in generators] if several else _seed(generators)


def _seed(generator: Any) -> int:
    """Returns the seed of a generator.

    Raises:
        RequestError: it is not a generator.
    """
    if generator is None:
        return secrets.randbelow(SEEDS // 2 - 1)
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(SEEDS // 2 - 1))
    if hasattr(generator, "initial_seed"):  # torch.Generator
        return generator.initial_seed()
    if not isinstance(generator, int | np.integer):
        raise RequestError(
            f"generator={generator!r} holds no seed: give an int, a numpy.random.Generator or a"
            " torch.Generator."
        )
    return int(generator)


def _step_by_step(
    pipe: SparseLaViDaPipeline, callback: StepCallback | None, keys: Sequence[str]
) -> Callback | None:
    """Returns a callback for `SparseLaViDa.run` that calls `callback` for each step of a segment.

    Raises:
        RequestError: the callback asks for a tensor that does not exist.
    """
    if callback is None:
        return None
    keys = getattr(callback, "tensor_inputs", keys)  # a `diffusers.PipelineCallback` lists its own
    if unknown := set(keys) - {"latents"}:
        raise RequestError(
            f"callback_on_step_end_tensor_inputs={sorted(unknown)}: there is 'latents' alone."
        )

    def tell(progress: Progress) -> None:
        if progress.making != "image":
            return
        for block in progress.blocks:
            latents = progress.after(block)[: len(progress.rows)]
            latents.flags.writeable = False
            step = block - FIRST_BLOCK
            given = {"latents": latents} if keys else {}
            answer = callback(pipe, step, progress.total - 1 - step, given) or {}
            if changed := [key for key in answer if answer[key] is not given.get(key)]:
                raise RequestError(
                    f"callback_on_step_end returns other {changed}: it may look, not change."
                )

    return tell
