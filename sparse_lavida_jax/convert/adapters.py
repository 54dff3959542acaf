# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (`models/lora.py`) in folders of their own, with the files and names of PEFT.

adapter_config.json        rank, alpha and the adapted matrices
adapter_model.safetensors  base_model.model.<released module>.lora_A.weight [rank, in] and
                           .lora_B.weight [out, rank], and tensors that were trained whole
config.json                settings of the training run
base.json                  path of the base model, and the SHA-256 of its manifest
TENSORS.sha256, MANIFEST.sha256

The first two are what PEFT writes and reads (github.com/huggingface/peft, `LoraConfig`): adapters
that it trained for the released model are read as well.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import contents, manifest, model_folder, named_arrays, stores
from sparse_lavida_jax.checkpoints.adapter_names import WEIGHTS, find, written
from sparse_lavida_jax.checkpoints.named_arrays import CheckpointError
from sparse_lavida_jax.convert import names
from sparse_lavida_jax.data import files, tensor_files
from sparse_lavida_jax.models import lora, parameters
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.layers import Linear, with_linears
from sparse_lavida_jax.programs import jax_settings

M = TypeVar("M", bound=Denoiser)

SETTINGS, BASE = "adapter_config.json", "base.json"
_PREFIX = "base_model.model."
LARGEST_ALPHA = 1_000_000
_PATTERN = re.compile(r"\^?(\w|-|\\?\.)*(\.\*)?(\w|-|\\?\.)*")  # of names, in PEFT's alpha_pattern
_FACTOR = re.compile(r"(.+)\.lora_([AB])(\.default)?\.weight")


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The contents of an adapter folder, under our names of single layers.

    Attributes:
        factors: A [in, rank] and B [rank, out] by the path of the matrix, such as
            `joint_layers/00/understanding/q`; B is scaled by alpha / rank.
        whole: parameters that were trained whole.
    """

    folder: pathlib.Path
    factors: dict[str, tuple[np.ndarray, np.ndarray]]
    whole: dict[str, np.ndarray]


def settings_with(settings: config.Config, weights: Mapping[str, float]) -> config.Config:
    """Returns the settings of a model with adapters: those of the last run that trained any.

    The model stays that of the base, except for the attention that it was trained for: adapters
    that were trained sparsely make it sample sparsely. Folders of PEFT change nothing.

    Raises:
        CheckpointError: there are no adapters, or their settings are damaged.
    """
    for folder in map(find, weights):
        if (folder / "config.json").is_file():
            theirs = model_folder.read_config(folder)
            attention = theirs.model.trained_attention
            model = dataclasses.replace(settings.model, trained_attention=attention)
            settings = dataclasses.replace(theirs, model=model)
    return settings


# ---------------------------------------------------------------------------------------------
# Adding adapters to a model.


def added(
    model: M, settings: config.Config, base: pathlib.Path, weights: Mapping[str, float], *,
    merge: bool = True,
) -> tuple[M, config.Config]:  # fmt: skip
    """Returns a model with adapters added, each times its weight, and its settings.

    Likewise, parameters that were trained whole move from the base's values towards the trained
    ones by the weight.

    Args:
        model, settings: of `base`, not fused.
        base: the folder they were read from.
        weights: by adapter name.
        merge: adds them to their matrices, except for 8-bit ones; otherwise they are kept separate
            as one adapter, which takes a little longer and rounds nothing. Logits are the same to
            1e-5 in float32.

    Raises:
        CheckpointError: there are no adapters, a file is damaged, or the adapters belong to
            another base or to other matrices.
    """
    shapes = named_arrays.by_layer(jax.eval_shape(lambda: model))
    found = [read(name, settings.model, base) for name in weights]
    for one in found:
        _check(one, shapes)
    model = _with_whole(model, found, [*weights.values()])

    def with_adapter(path: str, linear: Linear) -> Linear:
        on_disk = _layer_names(f"{path}/kernel", linear.kernel)
        layers = [name.removesuffix("/kernel") for name in on_disk]
        if not any(layer in one.factors for one in found for layer in layers):
            return linear
        pairs = [_stacked(one.factors, layers, linear.kernel.shape) for one in found]
        linear.lora_a = nnx.Param(jnp.concatenate([a for a, _ in pairs], axis=-1))
        scaled = [weight * b for weight, (_, b) in zip(weights.values(), pairs, strict=True)]
        linear.lora_b = nnx.Param(jnp.concatenate(scaled, axis=-2))
        linear.lora_scale = 1.0
        if merge and linear.kernel.dtype.itemsize > 1:
            where = linear.kernel[...].sharding
            linear.kernel = nnx.Param(jax.device_put(lora.merged_kernel(linear), where))
            del linear.lora_a, linear.lora_b, linear.lora_scale
        elif path in lora.HEADS:
            raise CheckpointError(f"an adapter of {path} cannot be kept apart: merge it.")
        return linear

    settings, model = settings_with(settings, weights), with_linears(model, with_adapter)
    model.settings = settings.model
    return model, settings


def _check(one: Adapters, shapes: Mapping[str, Any]) -> None:
    """Refuses adapters that do not fit the matrices of the model.

    Raises:
        CheckpointError: lists misfits.
    """
    products = {f"{path}/kernel": (a.shape[0], b.shape[1]) for path, (a, b) in one.factors.items()}
    made = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in products.items()}
    wanted = {name: shapes[name] for name in {*one.whole, *made} if name in shapes}
    problems = parameters.differences(wanted, one.whole | made).splitlines()
    if problems:
        lines = "\n".join(problems)
        raise CheckpointError(f"the adapters in {one.folder} do not fit the model:\n{lines}")


def _stacked(
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]],
    layers: Sequence[str],
    shape: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the factors of a matrix or of a stack of matrices; zeros for layers without any."""
    *stack, i, o = shape
    rank = max((factors[layer][0].shape[1] for layer in layers if layer in factors), default=0)
    a = np.zeros((len(layers), i, rank), np.float32)
    b = np.zeros((len(layers), rank, o), np.float32)
    for number, layer in enumerate(layers):
        if layer in factors:
            own_a, own_b = factors[layer]
            a[number, :, : own_a.shape[1]], b[number, : own_b.shape[0]] = own_a, own_b
    return (a, b) if stack else (a[0], b[0])


def _layer_names(path: str, leaf: Any) -> list[str]:
    """Returns the names of a parameter on disk, one per layer."""
    return [*named_arrays.layers_of({path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)})]


def _with_whole(model: M, found: Sequence[Adapters], weights: Sequence[float]) -> M:
    leaves = {}
    for path, leaf in parameters.by_name(model).items():
        if not any(name in one.whole for one in found for name in _layer_names(path, leaf)):
            continue
        parts = named_arrays.layers_of({path: leaf})
        moved = [_moved(name, part, found, weights) for name, part in parts.items()]
        leaves[path] = moved[0] if path in parts else np.stack(moved)
    return parameters.replaced(model, leaves)


def _moved(name: str, base: Any, found: Sequence[Adapters], weights: Sequence[float]) -> np.ndarray:
    pairs = zip(found, weights, strict=True)
    steps = [(weight, one.whole[name]) for one, weight in pairs if name in one.whole]
    if not steps:
        return base
    if [weight for weight, _ in steps] == [1]:
        return steps[0][1]
    wide = np.asarray(base, np.float32)
    return wide + sum(weight * (whole.astype(np.float32) - wide) for weight, whole in steps)


# ---------------------------------------------------------------------------------------------
# Adding adapters to a model on disk.


class Merging(NamedTuple):
    """How a model folder changes when adapters are added to it.

    Attributes:
        settings: of the resulting model.
        change: returns a parameter of the resulting model, given its name on disk and its value.
    """

    settings: config.Config
    change: Callable[[str, np.ndarray], np.ndarray]


def merging(base: pathlib.Path, weights: Mapping[str, float]) -> Merging:
    """Returns how adapters, each times its weight, change a model folder.

    Sums are computed in float32, and rounded to the dtype of the base.

    Raises:
        CheckpointError: as `added`, or the matrices of the base are in 8 bits.
    """
    settings, stored = model_folder.read_config(base), stores.open_params(base)
    if weights and (narrow := stores.narrow_dtype(base)):
        raise CheckpointError(
            f"the matrices in {base} are in 8 bits ({narrow}), and adapters are not rounded to"
            " that: add them to the model that it was made of."
        )
    found = [read(name, settings.model, base) for name in weights]
    for one in found:
        _check(one, stored.leaves)

    def change(name: str, array: np.ndarray) -> np.ndarray:
        path = name.removesuffix("/kernel")
        wide = _moved(name, array, found, [*weights.values()])
        for one, weight in zip(found, weights.values(), strict=True):
            if path in one.factors and path != name:
                a, b = one.factors[path]
                wide = np.asarray(wide, np.float32) + np.float32(weight) * (a @ b)
        return wide.astype(array.dtype, copy=False)

    return Merging(settings_with(settings, weights), change)


@jax_settings.defaults()
def copy(
    source: pathlib.Path | str,
    folder: pathlib.Path | str,
    weights: Mapping[str, float],
    kind: stores.Format = "safetensors",
    *,
    dtype: str = "",
) -> int:
    """Copies a model folder with adapters added to it; see `model_folder.copy`.

    Raises:
        CheckpointError: as `merging`, or as `model_folder.copy`.
    """
    source = model_folder.find_model(source)
    if not weights:
        return model_folder.copy(source, folder, kind, dtype=dtype)
    said = model_folder.read_text(source, "README.md")
    said = f"{said.rstrip()}\n\nThe adapters `{written(weights)}` were added to it.\n"
    how = merging(source, weights)._asdict()
    return model_folder.copy(source, folder, kind, dtype=dtype, readme=said, **how)


# ---------------------------------------------------------------------------------------------
# Writing.


def save(
    folder: pathlib.Path | str, trained: Any, settings: config.Config, *, base: pathlib.Path | str
) -> None:
    """Writes what was trained on a frozen base, replacing an older folder of the same kind.

    Args:
        trained: the trained part of a model, as `parameters.parted` returns it.
        base: the name of the model that the frozen part belongs to.

    Raises:
        CheckpointError: the folder holds something else, there is no base, or the disk is full.
    """
    known, leaves, adapted, whole = names.of_denoiser(settings.model), {}, set(), []
    stacks = {name: leaf for name, leaf in parameters.by_name(trained).items() if np.size(leaf)}
    for ours, leaf in named_arrays.layers_of(stacks).items():
        path, _, last = ours.rpartition("/")
        if lora.NAME.search(ours):
            module = known[f"{path}/kernel"].official.removesuffix(".weight")
            adapted.add(module)
            key, array = f"{module}.lora_{last[-1].upper()}.weight", np.asarray(leaf).T
        else:
            key, array = known[ours].official, names.to_official(known[ours], np.asarray(leaf))
            whole.append(key.removesuffix(".weight"))
        leaves[_PREFIX + key] = np.ascontiguousarray(array)
    model = model_folder.find_model(base)
    about = {"model": str(model.resolve()), "manifest_sha256": manifest.digest(model)}
    size = sum(leaf.nbytes for leaf in leaves.values())
    with model_folder.new_model_folder(folder, settings, size) as new:
        safetensors.numpy.save_file(leaves, new / WEIGHTS, {"format": "pt"})
        given = _settings(settings.lora, str(base), sorted(adapted), sorted(whole))
        files.write_json(new / SETTINGS, given, indent=2)
        files.write_json(new / BASE, about, indent=2)


def _settings(
    settings: config.Lora, base: str, adapted: Sequence[str], whole: Sequence[str]
) -> dict[str, Any]:
    """Returns the settings that PEFT needs."""
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": list(adapted),
        "modules_to_save": list(whole) or None,
    }


# ---------------------------------------------------------------------------------------------
# Reading.


def read(name: str, model: config.Model, base: pathlib.Path) -> Adapters:
    """Reads adapters for a model.

    Args:
        name: see `find`.
        base: the model folder that they are added to.

    Raises:
        CheckpointError: there are no adapters, a file is damaged, or they were trained for another
            base or are of an unsupported kind.
    """
    folder = find(name)
    if (folder / manifest.MANIFEST).exists() or (folder / BASE).exists():  # not PEFT's own
        manifest.verify(folder)
        manifest.verify_tensors(folder)
        _check_base(folder, base)
    path = contents.inside(folder, WEIGHTS)
    try:
        leaves = tensor_files.read_floats(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.{files.remedy(error)}") from error
    if not leaves:
        raise CheckpointError(f"{path} adapts nothing: it holds no tensor. Copy it again.")
    for key, leaf in leaves.items():
        named_arrays.refuse_nonfinite(f"{key} in {path}", leaf)
    return _released(folder, leaves, model)


def _check_base(folder: pathlib.Path, base: pathlib.Path) -> None:
    try:
        known = files.read_json(folder / BASE, model_folder.MOST_SETTINGS)
        digest, where = known["manifest_sha256"], known["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / BASE} is missing or damaged: {error}") from error
    if digest not in model_folder.lineage(base):
        raise CheckpointError(
            f"the adapters in {folder} were trained next to the model that lay in {where!s:.200},"
            f" and {base} is another one: its {manifest.MANIFEST} has another SHA-256 than"
            f" {digest!s:.12}. Name theirs with --checkpoint."
        )


def _released(
    folder: pathlib.Path, leaves: Mapping[str, np.ndarray], model: config.Model
) -> Adapters:
    known = {name.official: name for name in names.of_denoiser(model).values()}
    factors, whole, unknown = {}, {}, []
    for key, leaf in leaves.items():
        key = key.removeprefix(_PREFIX)
        match = _FACTOR.fullmatch(key)
        name = known.get(f"{match[1]}.weight" if match else key)
        if name is None or (match and leaf.ndim != 2):
            unknown.append(key)
        elif match:
            factors.setdefault(name.ours.removesuffix("/kernel"), {})[match[2]] = leaf.T
        elif leaf.shape == name.shape:
            whole[name.ours] = names.to_ours(name, leaf)
        else:
            unknown.append(f"{key} {leaf.shape}")
    if unknown:
        raise CheckpointError(
            f"the adapters in {folder} do not fit the model, which has no matrix for"
            f" {', '.join(unknown[:3])}{f' and {len(unknown) - 3} more' * (len(unknown) > 3)}."
        )
    scale = _scale(folder / SETTINGS, {name.ours: name.official for name in known.values()})
    return _paired(folder, factors, whole, scale)


def _scale(path: pathlib.Path, official: Mapping[str, str]) -> Callable[[str, int], float]:
    """Returns the scale of the product of two factors, according to PEFT's settings."""
    try:
        given = files.read_json(contents.inside(path.parent, path.name), model_folder.MOST_SETTINGS)
        if given["peft_type"] != "LORA" or given.get("use_dora"):
            raise ValueError("they are no plain adapters of low rank (LORA)")
        alpha, by_pattern = given["lora_alpha"], dict(given.get("alpha_pattern") or {})
        for value in (alpha, *by_pattern.values()):
            if type(value) not in (int, float) or not 0 < value < LARGEST_ALPHA:
                raise ValueError(f"an alpha must lie between 0 and {LARGEST_ALPHA:,}")
        if odd := [key for key in by_pattern if not _PATTERN.fullmatch(key)]:
            raise ValueError(f"alpha_pattern has {odd[0]!r:.200}, which is not a name with one .*")
        is_by_root = bool(given.get("use_rslora"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} does not describe adapters that can be read: {error}."
        ) from error
    patterns = {re.compile(rf"(.*\.)?({key})$"): value for key, value in by_pattern.items()}

    def scale(ours: str, rank: int) -> float:
        module = official[f"{ours}/kernel"].removesuffix(".weight")
        own = (value for pattern, value in patterns.items() if pattern.match(module))
        return float(next(own, alpha)) / (math.sqrt(rank) if is_by_root else rank)

    return scale


def _paired(
    folder: pathlib.Path,
    factors: Mapping[str, Mapping[str, np.ndarray]],
    whole: dict[str, np.ndarray],
    scale: Callable[[str, int], float],
) -> Adapters:
    found = {}
    for path, sides in factors.items():
        a, b = sides.get("A"), sides.get("B")
        if a is None or b is None or not _fit(a, b):
            raise CheckpointError(f"the adapter of {path} in {folder} is not two factors that fit.")
        found[path] = a.astype(np.float32), scale(path, a.shape[1]) * b.astype(np.float32)
    return Adapters(folder, found, whole)


def _fit(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are factors of a matrix, of a rank that is at most its longer side."""
    return a.ndim == b.ndim == 2 and 0 < a.shape[1] == b.shape[0] <= max(a.shape[0], b.shape[1])
