# SPDX-License-Identifier: Apache-2.0
"""The model as a diffusers image pipeline; diffusers itself is not needed.

    pipe = SparseLaViDaPipeline.from_pretrained("scenes")
    image = pipe("a red circle above a blue square", num_inference_steps=8, generator=0).images[0]

Names, defaults and the meaning of numbers are those of diffusers; what cannot be honoured is
refused.
"""

import dataclasses
import inspect
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from PIL import Image

from sparse_lavida_jax.checkpoints import hub
from sparse_lavida_jax.inference import checks
from sparse_lavida_jax.inference.checks import SEEDS, Number, Words
from sparse_lavida_jax.inference.requests import Shown
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling.progress import Callback, Progress
from sparse_lavida_jax.tags import FIRST_BLOCK

StepCallback = Callable[["SparseLaViDaPipeline", int, int, dict[str, Any]], dict[str, Any] | None]

# What diffusers' scripts write and what changes nothing here: arguments of `from_pretrained` and of
# calls, each with the one value that is neutral (None is too), or any value (`...`); and methods,
# some of them after "enable_" or "disable_".
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys("use_safetensors variant low_cpu_mem_usage trust_remote_code".split(), ...),
    **dict.fromkeys("max_memory offload_folder offload_state_dict".split(), ...),
    **dict.fromkeys("max_sequence_length callback_steps silence_dtype_warnings".split(), ...),
    **dict.fromkeys("safety_checker feature_extractor image_encoder".split()),
    **dict.fromkeys("requires_safety_checker add_watermarker force_download".split(), False),
    **dict.fromkeys("eta clip_skip guidance_rescale".split(), 0),
    **dict.fromkeys("strength true_cfg_scale".split(), 1),
    **dict.fromkeys("negative_prompt_2 negative_prompt_3".split(), ""),
    **{name: {} for name in ("cross_attention_kwargs", "joint_attention_kwargs")},
}
METHODS = set(
    "set_progress_bar_config maybe_free_model_hooks attention_slicing vae_slicing vae_tiling"
    " xformers_memory_efficient_attention model_cpu_offload sequential_cpu_offload".split()
)
HUB = {"cache_dir": "HF_HUB_CACHE", "token": "HF_TOKEN"}  # and the variables that say it
OURS = inspect.signature(SparseLaViDa.from_pretrained).parameters.keys()
SPREAD = ("auto", "balanced", "sequential")  # of `device_map`
# By name; 16 bits are bfloat16 here.
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}

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
        device_map: Any = None,
        **options: Any,
    ) -> "SparseLaViDaPipeline":
        """Loads a model folder, a run directory, or a bundled model or one from the hub by name.

        Args:
            dtype: of the parameters, as a name or a dtype of any library; also as `torch_dtype`.
                float16 means bfloat16; "auto" is the default.
            device_map: where `to` finds the model, or one of `SPREAD`.
            options: see `SparseLaViDa.from_pretrained`, which also lists the exceptions; `NEUTRAL`.

        Raises:
            RequestError: an argument cannot be honoured.
        """
        name = pretrained_model_name_or_path
        for key, variable in HUB.items():
            value = options.pop(key, None)
            if value is not None and hub.is_id(name):
                raise checks.refusal(key, value, f"leave it out, and set {variable}")
        kept, wanted = _honoured(options), torch_dtype if dtype is None else dtype
        wanted = None if isinstance(wanted, str) and wanted == "auto" else wanted
        for key in kept.keys() - OURS:
            raise checks.refusal(key, kept[key], "it cannot be honoured, leave it out")
        if wanted is not None and _dtype(wanted) is None:
            key = "torch_dtype" if dtype is None else "dtype"
            raise checks.refusal(key, wanted, f"auto, {', '.join(DTYPES)}")
        made = cls(SparseLaViDa.from_pretrained(name, dtype=_dtype(wanted), **kept))
        return made if device_map is None or device_map in SPREAD else made.to(device_map)

    def to(self, *places: Any, **named: Any) -> "SparseLaViDaPipeline":
        """Returns itself if its parameters are on that device, where jax placed them on loading.

        With another dtype, the parameters are loaded again in it.

        Args:
            places: devices and dtypes.
            named: the same as `device`, `dtype` and `torch_dtype`.

        Raises:
            ValueError: they are elsewhere.
        """
        given, here = _honoured(named), jax.default_backend()
        for key in given.keys() - {"device", "dtype", "torch_dtype"}:
            raise checks.refusal(key, given[key], "give a device or a dtype")
        for place in filter(None, (*places, *given.values())):
            dtype, (kind, _, number) = _dtype(place), str(place).partition(":")
            if dtype is not None and dtype != self.dtype.name:
                again, (kind_of, loading, *others) = self.model.__reduce__()
                self.model = again(kind_of, loading | {"dtype": dtype}, *others)
            elif not dtype and ({"cuda": "gpu"}.get(kind, kind) != here or number not in ("", "0")):
                raise ValueError(
                    f"the model is on {here} and cannot be moved to {place}: choose the device"
                    " before Python starts, such as JAX_PLATFORMS=cpu."
                )
        return self

    @property
    def device(self) -> str:
        """The device as PyTorch names it."""
        return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the parameters; of the widest, if there are several."""
        leaves = jax.tree.leaves(self.model.model)
        return max((np.dtype(leaf.dtype) for leaf in leaves), key=lambda dtype: dtype.itemsize)

    def __getattr__(self, name: str) -> Any:
        if name.removeprefix("enable_").removeprefix("disable_") in METHODS:
            return lambda *_, **__: None
        if name in ("save_pretrained", "push_to_hub"):
            return getattr(self.model, name)
        raise AttributeError(
            f"SparseLaViDaPipeline has no {name}: its sampler, adapters and memory are arguments of"
            " from_pretrained and of the call."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not None or name not in NEUTRAL:  # such as safety_checker
            super().__setattr__(name, value)

    def __call__(
        self,
        prompt: Words = None,
        image: Shown | Sequence[Shown] | None = None,
        mask_image: Any = None,
        *,
        height: Number = None,
        width: Number = None,
        num_inference_steps: Number = None,
        guidance_scale: Number = None,
        negative_prompt: Words = None,
        num_images_per_prompt: Number = 1,
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
            mask_image: white, or transparent, where to draw.
            height, width: in pixels, both or neither; by default the model's own, which alone an
                edit has.
            num_inference_steps, guidance_scale: None: the checkpoint's settings.
            guidance_scale: 1 or less means no guidance; it is `ImageOptions.guidance` plus 1.
            negative_prompt: empty: guidance steers away from the omitted prompt.
            generator: a seed or a numpy or torch generator, or a list with one per image or per
                prompt. If one is for several images, the later ones use the next seeds. A numpy
                generator is advanced; of a torch one only the initial seed is read, so another call
                with it draws the same image. None: a different image each time.
            output_type: "pil", "np" or "latent" (`PipelineOutput.images`).
            return_dict: False returns a tuple of the images alone.
            callback_on_step_end: called as `callback(pipe, step, timestep, kwargs)` for each step
                of the image: for all steps of a phase at once when the phase has ended, and for
                each batch (`SparseLaViDa.batch_size`) separately; `timestep` is the number of steps
                left. To stop, raise an exception.
            callback_on_step_end_tensor_inputs: keys of its `kwargs`; only "latents" exists: the
                codes [b l g] after the step, which cannot be changed.
            options: our own, see `requests.ImageOptions`; `NEUTRAL`.

        Raises:
            RequestError: the request cannot be honoured.
            ImageError, ConfigError: see `SparseLaViDa.inpaint` and `generate`.
        """
        if output_type not in FORMS:
            raise RequestError(f"output_type={output_type!r} is not known: {', '.join(FORMS)}.")
        if negative_prompt is not None and any(checks.texts("negative_prompt", negative_prompt)):
            raise RequestError(
                "a negative_prompt cannot be honoured: guidance leads away from the prompt left"
                " out. Leave it empty, and say in the prompt what to draw."
            )
        if (height is None) != (width is None):
            raise RequestError(f"{height=} and {width=}: give both, or neither.")
        numbers = {"height": height, "width": width, "num_images_per_prompt": num_images_per_prompt}
        for name, value in numbers.items():
            numbers[name] = None if value is None else checks.number(name, value, whole=True)
        size, codec = (numbers["height"], numbers["width"]), self.model.codec
        if height is None or (image is not None and codec and {*size} == {codec.image_size}):
            size = None
        if guidance_scale is not None:
            guidance_scale = max(checks.number("guidance_scale", guidance_scale) - 1, 0)
        drawn = "generate" if image is None else "edit"
        requests = self.model.requests(
            drawn if mask_image is None else "inpaint",
            prompt,
            image,
            mask=mask_image,
            size=size,
            num_inference_steps=num_inference_steps,
            guidance=guidance_scale,
            num_images=numbers["num_images_per_prompt"],
            seed=_seeds(generator),
            **_honoured(options),
        )
        told = _step_by_step(self, callback_on_step_end, callback_on_step_end_tensor_inputs)
        result = self.model.run(requests, told)
        images = FORMS[output_type](result)
        return PipelineOutput(images, result) if return_dict else (images,)


def _honoured(options: dict[str, Any]) -> dict[str, Any]:
    """Returns options without those that are None or neutral.

    Raises:
        RequestError: one of `NEUTRAL` has another value.
    """
    for name, value in options.items():
        neutral = NEUTRAL.get(name, ...)
        if value is not None and neutral is not ... and value != neutral:
            raise checks.refusal(name, value, f"{neutral!r}, or leave it out")
    return {k: value for k, value in options.items() if value is not None and k not in NEUTRAL}


def _dtype(value: Any) -> str | None:
    """Returns our name of a dtype of any library; None: it is not one of `DTYPES`."""
    name = str(value).removeprefix("torch.")
    if isinstance(value, type | np.dtype):  # also of jax
        name = np.dtype(value).name
    return DTYPES.get(name)


def _seeds(generators: Any) -> int | list[int]:
    """Returns the seed of a generator, or the seeds of a list of them."""
    several = checks.listed(generators)
    return _seed(generators) if several is None else [_seed(one) for one in several]


def _seed(generator: Any) -> int:
    """Returns the seed of a generator.

    Raises:
        RequestError: it is not a generator.
    """
    if generator is None:
        return secrets.randbelow(SEEDS // 2 - 1)
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(SEEDS // 2 - 1))
    if isinstance(generator, np.random.RandomState):
        return int(generator.randint(SEEDS // 2 - 1))
    if hasattr(generator, "initial_seed"):  # torch.Generator
        generator = generator.initial_seed()
    if isinstance(checks.plain(generator), bool | int | float):
        return checks.fold(generator, "generator")
    raise RequestError(
        f"generator={generator!r} holds no seed: give an int, a numpy.random.Generator or a"
        " torch.Generator."
    )


def _step_by_step(
    pipe: SparseLaViDaPipeline, callback: StepCallback | None, keys: Sequence[str]
) -> Callback | None:
    """Returns a callback for `SparseLaViDa.run` that calls `callback` for each step of a phase.

    Raises:
        RequestError: the callback asks for a tensor that does not exist.
    """
    if callback is None:
        return None
    keys = getattr(callback, "tensor_inputs", keys)  # a `diffusers.PipelineCallback` lists its own
    if unknown := set(keys) - {"latents"}:
        raise RequestError(
            f"callback_on_step_end_tensor_inputs={sorted(unknown)}: there is only 'latents'."
        )

    def tell(progress: Progress) -> None:
        if progress.stage != "image":
            return
        for block in progress.blocks:
            latents = progress.after(block)[: len(progress.rows)]
            latents.flags.writeable = False
            step = block - FIRST_BLOCK
            given = {"latents": latents} if keys else {}
            answer = callback(pipe, step, progress.total - 1 - step, given) or {}
            if changed := [key for key in answer if answer[key] is not given.get(key)]:
                raise RequestError(
                    f"callback_on_step_end returned other {changed}: it may read, not change."
                )

    return tell
