# SPDX-License-Identifier: Apache-2.0
"""The one table of names: every released tensor, our parameter, and how one becomes the other.

The rules are those of spec Sec. 10. A table is made for one config: the shapes of our parameters
come from the model itself, so a parameter that no rule names is found, not forgotten.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Literal

import jax
import numpy as np
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import arrays
from sparse_lavida_jax.convert.settings import ConvertError
from sparse_lavida_jax.models import vq
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.vision import Tower

REGISTERS = ("model.register_understanding.weight", "model.register_generation.weight")
VQ_PREFIX = "model.vqvae."
TOWER_PREFIX = "model.vision_tower.vision_tower.vision_model."

# How PyTorch lays out a tensor that we hold otherwise. Matrices are [out, in] there and [in, out]
# here; convolutions OIHW and HWIO. The 2x2 convolution that merges the codes of a cell is a matrix
# here, its inputs code by code in raster order (spec Sec. 2.6); so is the transposed one, IOHW.
Layout = Literal["same", "matrix", "convolution", "merge", "spread"]
# Where a tensor lives in a model folder: among the parameters, in the image tokenizer, or, unused,
# beside them until it is exported again.
Home = Literal["params", "vq", "unused"]

_BRANCH: dict[str, tuple[str, Layout]] = {
    "attn_norm/weight": ("attn_norm{}.weight", "same"),
    "q/kernel": ("q_proj{}.weight", "matrix"),
    "k/kernel": ("k_proj{}.weight", "matrix"),
    "v/kernel": ("v_proj{}.weight", "matrix"),
    "mlp_norm/weight": ("ff_norm{}.weight", "same"),
    "mlp/gate/kernel": ("ff_proj{}.weight", "matrix"),
    "mlp/up/kernel": ("up_proj{}.weight", "matrix"),
    "mlp/down/kernel": ("ff_out{}.weight", "matrix"),
}
_LAYER: dict[str, tuple[str, Layout]] = {
    "attn_out/kernel": ("attn_out.weight", "matrix"),
    **{
        f"{branch}/{ours}": (name.format(suffix), layout)
        for branch, suffix in (("understanding", ""), ("generation", "_vision"))
        for ours, (name, layout) in _BRANCH.items()
    },
}
_MERGE: dict[str, tuple[str, Layout]] = {
    "image_embedding/merge_norm/weight": ("model.downsample_gen.downsample.norm.weight", "same"),
    "image_embedding/merge/kernel": ("model.downsample_gen.downsample.conv.weight", "merge"),
    "image_head/spread_norm/weight": ("model.upsample_gen.upsample.norm.weight", "same"),
    "image_head/spread/kernel": ("model.upsample_gen.upsample.conv.weight", "spread"),
}
_SINGLE: dict[str, tuple[str, Layout]] = {
    "text_embedding": ("model.transformer.wte.weight", "same"),
    "final_norm/weight": ("model.transformer.ln_f.weight", "same"),
    "text_head/kernel": ("model.transformer.ff_out.weight", "matrix"),
    "register_understanding": (REGISTERS[0], "same"),
    "register_generation": (REGISTERS[1], "same"),
    "image_newline": ("model.image_newline", "same"),
    "image_embedding/code_norm/weight": ("model.gen_embedding.1.weight", "same"),
    "image_embedding/code/kernel": ("model.gen_embedding.2.weight", "matrix"),
    "image_embedding/cell_norm/weight": ("model.gen_embedding_2.0.weight", "same"),
    "image_embedding/cell/kernel": ("model.gen_embedding_2.1.weight", "matrix"),
    "image_head/cell_norm/weight": ("model.gen_predictor_2.0.weight", "same"),
    "image_head/cell/kernel": ("model.gen_predictor_2.1.weight", "matrix"),
    "image_head/code/kernel": ("model.gen_predictor.0.weight", "matrix"),
    "image_head/code_norm/weight": ("model.gen_predictor.1.weight", "same"),
    "vision/tower/patch_embedding/kernel": (
        f"{TOWER_PREFIX}embeddings.patch_embedding.weight", "convolution",
    ),
    "vision/tower/patch_embedding/bias": (f"{TOWER_PREFIX}embeddings.patch_embedding.bias", "same"),
    "vision/tower/position_embedding": (
        f"{TOWER_PREFIX}embeddings.position_embedding.weight", "same",
    ),
    "vision/tower/post_norm/scale": (f"{TOWER_PREFIX}post_layernorm.weight", "same"),
    "vision/tower/post_norm/bias": (f"{TOWER_PREFIX}post_layernorm.bias", "same"),
    "vision/pool/kernel": ("model.vision_resampler.pool.weight", "convolution"),
    "vision/pool/bias": ("model.vision_resampler.pool.bias", "same"),
    "vision/projector/fc1/kernel": ("model.mm_projector.0.weight", "matrix"),
    "vision/projector/fc1/bias": ("model.mm_projector.0.bias", "same"),
    "vision/projector/fc2/kernel": ("model.mm_projector.2.weight", "matrix"),
    "vision/projector/fc2/bias": ("model.mm_projector.2.bias", "same"),
    **_MERGE,
}  # fmt: skip
# The table and the last matrix of the image embedding and head stand alone without layers
# between, and in a sequence otherwise (spec Sec. 2.5).
_IMAGE_ENDS: dict[bool, dict[str, tuple[str, Layout]]] = {
    False: {
        "image_embedding/table": ("model.gen_embedding.weight", "same"),
        "image_head/logits/kernel": ("model.gen_predictor.weight", "matrix"),
    },
    True: {
        "image_embedding/table": ("model.gen_embedding.0.weight", "same"),
        "image_head/logits/kernel": ("model.gen_predictor.2.weight", "matrix"),
    },
}
_TOWER_PARTS = {
    "layer_norm1": "layer_norm1",
    "layer_norm2": "layer_norm2",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.out_proj",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}
_VQ_PARTS = {
    "codebook": "quantize.embedding.weight",
    "downsampler": "downsamplers.0.conv",
    "upsampler": "upsamplers.0.conv",
}
_VQ_ATTENTION_PARTS = {
    "norm": "group_norm",
    "q": "to_q",
    "k": "to_k",
    "v": "to_v",
    "out": "to_out.0",
}
_JOINT_OR_SPLIT = re.compile(r"(joint|split)_layers/(\d+)/(.+)")
_TOWER_LAYER = re.compile(r"vision/tower/layers/(\d+)/(\w+)/(\w+)")


@dataclasses.dataclass(frozen=True)
class Name:
    """One tensor under both of its names.

    Attributes:
        official: key of the released state dict.
        ours: leaf on disk, such as `joint_layers/03/understanding/q/kernel`; of an unused tensor,
            the official name again.
        layout: how the released tensor is laid out.
        shape: of the released tensor.
        our_shape: of ours.
        home: where in a model folder ours is.
        optional: whether a released folder may leave it out.
    """

    official: str
    ours: str
    layout: Layout
    shape: tuple[int, ...]
    our_shape: tuple[int, ...]
    home: Home = "params"
    optional: bool = False

    @property
    def size(self) -> int:
        """Numbers in the tensor."""
        return int(np.prod(self.shape))


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
        *(["norms over single pixels (vq.norm)"] if image.norm != "group" else []),
        *(["shuffled pixels (vq.upsampling)"] if image.upsampling != "nearest" else []),
    ]
    if odd:
        raise ConvertError(
            f"the released model has no {' and no '.join(odd)}, so a model with them has no"
            " released form."
        )
    return [*_params(model), *_vq(image), *_unused(model)]


def to_ours(name: Name, tensor: np.ndarray) -> np.ndarray:
    """Returns a released tensor in our layout; a view where that is possible."""
    match name.layout:
        case "matrix":
            return tensor.T
        case "convolution" | "merge":
            return tensor.transpose(2, 3, 1, 0).reshape(name.our_shape)
        case "spread":
            return tensor.transpose(0, 2, 3, 1).reshape(name.our_shape)
    return tensor


def to_official(name: Name, ours: np.ndarray) -> np.ndarray:
    """Returns our parameter in the released layout; a view where that is possible."""
    match name.layout:
        case "matrix":
            return ours.T
        case "convolution" | "merge":
            out_width, in_width, *window = name.shape
            return ours.reshape(*window, in_width, out_width).transpose(3, 2, 0, 1)
        case "spread":
            in_width, out_width, *window = name.shape
            return ours.reshape(in_width, *window, out_width).transpose(0, 3, 1, 2)
    return ours


def vq_names(settings: config.VQ, prefix: str = VQ_PREFIX) -> list[Name]:
    """Returns the tensors of an image tokenizer whose released names begin with `prefix`."""
    return [
        dataclasses.replace(name, official=prefix + name.official.removeprefix(VQ_PREFIX))
        for name in _vq(settings)
    ]


def tower_names(settings: config.Vision, prefix: str = TOWER_PREFIX) -> list[Name]:
    """Returns the tensors of a vision tower alone, its leaves named without `vision/tower/`."""
    side = settings.image_size // settings.patch_size
    shapes = arrays.by_layer(jax.eval_shape(lambda: Tower(settings, side, rngs=nnx.Rngs(0))))
    found = []
    for ours, leaf in shapes.items():
        official, layout = _official(f"vision/tower/{ours}", config.Model())
        found.append(_name(prefix + official.removeprefix(TOWER_PREFIX), ours, layout, leaf.shape))
    return found


def _params(model: config.Model) -> Iterator[Name]:
    shapes = arrays.by_layer(jax.eval_shape(lambda: Denoiser(model, rngs=nnx.Rngs(0))))
    for ours, leaf in shapes.items():
        official, layout = _official(ours, model)
        optional = official in REGISTERS
        yield _name(official, ours, layout, leaf.shape, model.codes_side, optional=optional)


def _official(ours: str, model: config.Model) -> tuple[str, Layout]:
    """Returns the released name and layout of a leaf of the denoiser."""
    if match := _JOINT_OR_SPLIT.fullmatch(ours):
        stack, layer, part = match.groups()
        number = int(layer) + (model.num_joint_layers if stack == "split" else 0)
        official, layout = _LAYER[part]
        return f"model.transformer.blocks.{number}.{official}", layout
    if match := _TOWER_LAYER.fullmatch(ours):
        layer, part, leaf = match.groups()
        prefix = f"{TOWER_PREFIX}encoder.layers.{int(layer)}.{_TOWER_PARTS[part]}"
        return f"{prefix}.{_torch_leaf(leaf)}", "matrix" if leaf == "kernel" else "same"
    return (_SINGLE | _IMAGE_ENDS[model.image_head != "embed"])[ours]


@functools.cache
def _vq(settings: config.VQ) -> list[Name]:
    found = []
    model = jax.eval_shape(lambda: vq.VQModel(settings, rngs=nnx.Rngs(0)))
    for ours, leaf in vq.named_parameters(model).items():
        dimensions = len(leaf.shape)
        layout: Layout = "same"
        if ours.endswith("kernel"):
            layout = "convolution" if dimensions == 4 else "matrix"
        official = VQ_PREFIX + _official_vq(ours)
        found.append(_name(official, ours, layout, leaf.shape, home="vq"))
    return found


def _official_vq(ours: str) -> str:
    *path, leaf = ours.split("/")
    if leaf in _VQ_PARTS:
        return _VQ_PARTS[leaf]
    parts = []
    for part in path:
        known = _VQ_ATTENTION_PARTS if parts[-1:] == ["attentions.0"] else _VQ_PARTS
        parts.append("attentions.0" if part == "attention" else known.get(part, part))
    return ".".join([*parts, _torch_leaf(leaf)])


def _unused(model: config.Model) -> Iterator[Name]:
    """Yields the 2x2 modules of a folder whose model does without them (the 256 px stage)."""
    if model.codes_per_token > 1:
        return
    width = model.generation_width
    for official, layout in _MERGE.values():
        shape = (width,) if layout == "same" else (width, width, 2, 2)
        yield Name(official, official, "same", shape, shape, "unused", optional=True)


def _torch_leaf(leaf: str) -> str:
    return "bias" if leaf == "bias" else "weight"


def _name(
    official: str,
    ours: str,
    layout: Layout,
    our_shape: tuple[int, ...],
    side: int = 1,
    *,
    home: Home = "params",
    optional: bool = False,
) -> Name:
    match layout:
        case "same":
            shape = our_shape
        case "matrix":
            shape = our_shape[::-1]
        case "convolution":
            shape = tuple(our_shape[i] for i in (3, 2, 0, 1))
        case "merge":
            shape = (our_shape[1], our_shape[0] // side**2, side, side)
        case "spread":
            shape = (our_shape[0], our_shape[1] // side**2, side, side)
    return Name(official, ours, layout, shape, our_shape, home, optional)
