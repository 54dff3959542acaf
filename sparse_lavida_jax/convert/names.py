# SPDX-License-Identifier: Apache-2.0
"""The table of names: each released tensor, our parameter, and how to convert one to the other.

The rules are those of spec Sec. 10. A table is made for one config: the shapes of our parameters
come from the model itself, so a parameter that no rule names is detected, not forgotten.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Literal

import einops
import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import named_arrays
from sparse_lavida_jax.convert.settings import RELEASED, ConvertError
from sparse_lavida_jax.models import denoiser, parameters, vq

REGISTERS = ("model.register_understanding.weight", "model.register_generation.weight")
VQ_PREFIX = "model.vqvae."
TOWER_PREFIX = "model.vision_tower.vision_tower.vision_model."

# How a tensor differs between PyTorch and us. The 2x2 convolution that merges the
# codes of a cell is a matrix here, its inputs code by code in raster order (spec Sec. 2.6); so is
# the transposed one.
Transform = Literal["same", "matrix", "convolution", "merge", "spread"]
TRANSFORMS: dict[Transform, tuple[str, str]] = {
    "same": ("...", "..."),
    "matrix": ("o i", "i o"),
    "convolution": ("o i h w", "h w i o"),
    "merge": ("o i h w", "(h w i) o"),
    "spread": ("i o h w", "i (h w o)"),
}
# Where a tensor is stored in a model folder: with the parameters, in the image tokenizer, or, if
# unused, in a separate file until it is exported again.
Home = Literal["params", "vq", "unused"]

# Our modules (or parameters outside any module) and the released modules:
# "layer": parts of a layer; "tower": parts of a layer of the vision tower; "vqvae": of the image
#   tokenizer, as patterns.
# "merge": the 2x2 convolutions, which models with one code per cell do not have.
# "modules": all others. "alone": the table and the last matrix of the image embedding and head,
#   which are single modules if no layers lie between, and otherwise part of a sequence (spec
#   Sec. 2.5).
_NAMES: dict[str, dict[str, str]] = RELEASED["names"]


@dataclasses.dataclass(frozen=True)
class Name:
    """One tensor under both of its names.

    Attributes:
        official: key of the released state dict.
        ours: leaf on disk, such as `joint_layers/03/understanding/q/kernel`; for an unused
            tensor, the official name again.
        transform: how the released tensor is laid out.
        shape: of the released tensor.
        our_shape: of ours.
        home: where in a model folder ours is.
        optional: whether a released folder may leave it out.
    """

    official: str
    ours: str
    transform: Transform
    shape: tuple[int, ...]
    our_shape: tuple[int, ...]
    home: Home = "params"
    optional: bool = False


def table(settings: config.Config) -> list[Name]:
    """Returns all tensors of a model and its image tokenizer.

    Raises:
        ConvertError: the model has parameters that the release has no name for.
    """
    return list(_table(settings.model, settings.vq))


@functools.cache
def _table(model: config.Model, image: config.VQ) -> list[Name]:
    if model.understanding_only:
        return list(_params(model))
    odd = [
        *(["learned positions of cells (model.cell_positions)"] if model.cell_positions else []),
        *(["codes drawn in turn (model.sequential_codes)"] if model.sequential_codes else []),
        *(["style codes (model.style_parts)"] if model.style_parts else []),
        *(["norms over single pixels (vq.norm)"] if image.norm != "group" else []),
        *(["shuffled pixels (vq.upsampling)"] if image.upsampling != "nearest" else []),
    ]
    if odd:
        raise ConvertError(
            f"the released model has no {' and no '.join(odd)}, so a model with them has no"
            " released form."
        )
    return [*_params(model), *vq_names(image), *_unused(model)]


def of_denoiser(model: config.Model) -> dict[str, Name]:
    """Returns the tensors of a denoiser by our names; those not released keep ours, dotted."""
    plain = dataclasses.replace(model, cell_positions=False, sequential_codes=False, style_parts=0)
    known = {name.ours: name for name in _params(plain)}
    own = named_arrays.by_layer(denoiser.shapes(model)).items()
    return {
        ours: known.get(ours) or Name(ours.replace("/", "."), ours, "same", leaf.shape, leaf.shape)
        for ours, leaf in own
    }


def to_ours(name: Name, tensor: np.ndarray) -> np.ndarray:
    """Returns a released tensor as we hold it; a view where that is possible."""
    theirs, ours = TRANSFORMS[name.transform]
    return einops.rearrange(tensor, f"{theirs} -> {ours}")


def to_official(name: Name, ours: np.ndarray) -> np.ndarray:
    """Returns our parameter as released; a view where that is possible."""
    return _to_official(name.transform, ours, name.shape[-1])


def _to_official(transform: Transform, ours: np.ndarray, side: int) -> np.ndarray:
    theirs, mine = TRANSFORMS[transform]
    window = {"h": side, "w": side} if "(" in mine else {}
    return einops.rearrange(ours, f"{mine} -> {theirs}", **window)


def vq_names(settings: config.VQ) -> list[Name]:
    """Returns the tensors of an image tokenizer."""
    return [
        _name(VQ_PREFIX + _official_vq(ours), ours, leaf.shape, home="vq")
        for ours, leaf in parameters.by_name(vq.shapes(settings)).items()
    ]


def _params(model: config.Model) -> Iterator[Name]:
    for ours, leaf in named_arrays.by_layer(denoiser.shapes(model)).items():
        yield _name(_official(ours, model), ours, leaf.shape, side=model.codes_side)


def _unused(model: config.Model) -> Iterator[Name]:
    """Yields the 2x2 modules in the folder of a model that does not use them (256 px stage)."""
    if model.codes_per_token > 1:
        return
    width = model.generation_width
    for ours, module in _NAMES["merge"].items():
        official = f"{module}.weight"
        shape = (width,) if ours.endswith("norm") else (width, width, 2, 2)
        yield Name(official, official, "same", shape, shape, "unused", optional=True)


def _official(ours: str, model: config.Model) -> str:
    """Returns the released name of a leaf of the denoiser."""
    module, leaf = _split(ours)
    match module.split("/"):
        case ["image_newline"]:
            return "model.image_newline"
        case ["joint_layers" | "split_layers" as stack, layer, branch, *part]:
            number = int(layer) + (model.num_joint_layers if stack == "split_layers" else 0)
            suffix = "_vision" if branch == "generation" else ""
            name = f"{_NAMES['layer']['/'.join(part)]}{suffix}" if part else branch
            return f"model.transformer.blocks.{number}.{name}.{leaf}"
        case ["vision", "tower", "layers", layer, part]:
            return f"{TOWER_PREFIX}encoder.layers.{int(layer)}.{_NAMES['tower'][part]}.{leaf}"
    modules = _NAMES["modules"] | _NAMES["merge"]
    if model.image_head == "embed":
        modules |= _NAMES["alone"]
    return f"{modules[module]}.{leaf}"


def _official_vq(ours: str) -> str:
    module, leaf = _split(ours)
    for path, released in _NAMES["vqvae"].items():
        module = re.sub(rf"\b{path}\b", released, module)
    return f"{module.replace('/', '.')}.{leaf}"


def _split(ours: str) -> tuple[str, str]:
    """Splits a name into the path of its module (or parameter) and PyTorch's name of the leaf."""
    match = re.fullmatch(r"(.*)/(weight|kernel|scale|bias)", ours)
    if match is None:
        return ours, "weight"
    return match[1], "bias" if match[2] == "bias" else "weight"


def _name(
    official: str, ours: str, our_shape: tuple[int, ...], *, side: int = 1, home: Home = "params"
) -> Name:
    transform = _transform(ours, our_shape)
    blank = np.broadcast_to(False, our_shape)
    shape = _to_official(transform, blank, side).shape
    return Name(official, ours, transform, shape, our_shape, home, official in REGISTERS)


def _transform(ours: str, our_shape: tuple[int, ...]) -> Transform:
    if not ours.endswith("/kernel"):
        return "same"
    if ours == "image_embedding/merge/kernel":
        return "merge"
    if ours == "image_head/spread/kernel":
        return "spread"
    return "convolution" if len(our_shape) == 4 else "matrix"
