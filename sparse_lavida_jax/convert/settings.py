# SPDX-License-Identifier: Apache-2.0
"""The released `config.json` as our settings, and back (spec Sec. 10.5).

Nothing is guessed: a key that the file leaves out gets the release's value if the release has only
one, and a value that contradicts our code is refused.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints.named_arrays import CheckpointError

# Facts about the release:
# "allowed", by section: values that our code implements, null where a key may be null; an absent
#   key has one of them. The release uses no dropout (all zero), and our code has none.
# "siglip_config": google/siglip-so400m-patch14-384, which it names but does not describe (spec
#   Sec. 4).
# "vqvae": its image tokenizer (spec Sec. 3), if no file describes it.
# "sampling": its settings for drawing, editing and text (spec Sec. 6 and 7.5; those of 1024 px).
# "keys": our settings that its files have under another name.
# "names": the modules of its state dict by our names; see `names.py`.
RELEASED = json.loads((pathlib.Path(__file__).parent / "released.json").read_text())
_ALLOWED: dict[str, dict[str, list]] = RELEASED["allowed"]
_KEYS: dict[str, dict[str, str]] = RELEASED["keys"]
_SIGLIP_NAME = "siglip-so400m-patch14-384"
_SIGLIP: dict[str, Any] = RELEASED["siglip_config"]
RELEASED_VQ: dict[str, Any] = RELEASED["vqvae"]
_IMAGE_SIZE = 1024  # pixels per side of the images that the release draws
_SPARE_ROWS = 256  # in the table of codes, after the codebook (spec Sec. 2.5)
# Texts are sampled in blocks of 32 tokens, as in the paper.
_DATA = config.Data(source="none", text_block_len=32, max_answer_len=256)
_SAMPLING = config.build(config.Sampling, RELEASED["sampling"])
# The same for a model that was trained with sparse attention after its release.
SPARSE = dict(grid="cell", edit_guidance="source", text=dict(preset="", step_ratio=0.0))
_SPARSE_SAMPLING = config.changed(_SAMPLING, SPARSE)
OURS = "sparse_lavida"  # section of an exported config.json: settings unknown to the release


class ConvertError(CheckpointError):
    """A released folder that cannot be converted, or a model that cannot be exported."""


def settings_from(given: Mapping[str, Any], vq: Mapping[str, Any] | None = None) -> config.Config:
    """Returns the settings that a released `config.json` describes.

    Args:
        given: the contents of the file. Recorded cases also describe the vision tower there
            (`siglip_config`), the image head (`gen_head_config`) and the tokenizer (`vq_config`).
        vq: the contents of `config.json` in the `vqvae` subfolder; None if there is none.

    Raises:
        ConvertError: lists every key that is missing or asks for something unsupported.
    """
    described = vq or given.get("vq_config") or RELEASED_VQ
    problems = _problems(given, described)
    if problems:
        raise ConvertError("its config.json does not fit this project:\n  " + "\n  ".join(problems))
    try:
        tokenizer = vq_settings(described, given.get("gen_shape"))
        model = config.build(config.Model, _model(given, tokenizer))
        return config.Config(
            name="lavida-o",
            model=model,
            vq=tokenizer,
            data=_DATA,
            sampling=_SAMPLING if model.trained_attention == "full" else _SPARSE_SAMPLING,
        )
    except (config.ConfigError, TypeError, ValueError) as error:
        raise ConvertError(f"its config.json does not fit this project: {error}") from error


def has_generation_branch(given: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` is LaViDa-O's; LLaDA's has no generation branch."""
    return bool(given.get("dual_tower"))


def vq_settings(vq: Mapping[str, Any], gen_shape: list[int] | None = None) -> config.VQ:
    """Returns the settings of the image tokenizer that a `vqvae/config.json` describes.

    Args:
        gen_shape: height and width of the largest image in codes; None: the release's 64.
    """
    channels = tuple(vq["block_out_channels"])
    factor = 2 ** (len(channels) - 1)
    return config.VQ(
        image_size=max(gen_shape) * factor if gen_shape else _IMAGE_SIZE,
        channels=channels,
        mid_attention=bool(vq.get("mid_block_add_attention", True)),
        **_ours(vq, _KEYS["vqvae"]),
    )


def vision_settings(given: Mapping[str, Any]) -> config.Vision:
    """Returns the settings of the vision tower; `given` as in `settings_from`."""
    siglip = _siglip(given)
    # The release runs all layers but the last (spec Sec. 4).
    used = siglip.get("num_hidden_layers_used", siglip["num_hidden_layers"] - 1)
    cut = given.get("image_aspect_ratio") == "anyres"
    return config.Vision(
        num_layers=used,
        pool=given.get("mm_spatial_pool_stride", 2),
        newline=True,
        grid_sizes=tuple(map(tuple, given["image_grid_pinpoints"])) if cut else (),
        unused_post_norm=True,
        **_ours(siglip, _KEYS["siglip"]),
    )


def _model(given: Mapping[str, Any], vq: config.VQ) -> dict[str, Any]:
    ours = given.get(OURS, {})
    values = _ours(given, _KEYS["model"]) | {
        "vocab_size": given.get("embedding_size") or given["vocab_size"],
        "head_dim": given["d_model"] // given["n_heads"],
        "num_registers": ours.get("num_registers", config.Model.num_registers),
        "trained_attention": ours.get("trained_attention", "full"),
        "compute_dtype": "bfloat16" if given.get("torch_dtype") == "bfloat16" else "float32",
    }
    if not has_generation_branch(given):
        return values | {
            "understanding_only": True,
            "dual_tower_layers": given["n_layers"] - 1,
            "generation_width": given["d_model"],
        }
    head = given.get("gen_head_config", {})
    merges = given.get("downsample", False) and head.get("downsample_active", True)
    return values | {
        **_ours(given, _KEYS["generation"]),
        "codebook_size": vq.codebook_size,
        "codes_per_token": 4 if merges else 1,
        "grid_size": vq.image_size // vq.factor // (2 if merges else 1),
        "image_table_rows": head.get("embedding_rows", vq.codebook_size + _SPARE_ROWS),
        "vision": vision_settings(given),
    }


def _ours(given: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    return {ours: given[theirs] for ours, theirs in keys.items()}


def _official(settings: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    return {theirs: getattr(settings, ours) for ours, theirs in keys.items()}


def _siglip(given: Mapping[str, Any]) -> Mapping[str, Any]:
    return given.get("siglip_config") or _SIGLIP


# ---------------------------------------------------------------------------------------------
# What cannot be converted.


def _problems(given: Mapping[str, Any], vq: Mapping[str, Any]) -> list[str]:
    """Returns a line for every key that is missing or that our code contradicts."""
    sections = ("gen_head_config", "siglip_config", OURS)
    if odd := [key for key in sections if not isinstance(given.get(key, {}), Mapping)]:
        return [f"{key} is {given[key]!r}: it must hold settings by name." for key in odd]
    named = "vocab_size" if not given.get("embedding_size") else "embedding_size"
    needed, whole = [*_KEYS["model"].values(), named], ("d_model", "n_heads", "n_layers")
    found = _of_section("config", given, needed, whole)
    if has_generation_branch(given):
        needed = [*_KEYS["generation"].values()]
        if given.get("image_aspect_ratio") == "anyres":
            needed.append("image_grid_pinpoints")
        found += _of_section("generation", given, needed, ("mm_spatial_pool_stride",))
        head = given.get("gen_head_config", {})
        found += _of_section("gen_head_config", head, where="gen_head_config.")
        siglip, name = _siglip(given), str(given.get("mm_vision_tower", _SIGLIP_NAME))
        if siglip is _SIGLIP and not name.endswith(_SIGLIP_NAME):
            found.append(f"mm_vision_tower is {name!r}: only {_SIGLIP_NAME} is known.")
        found += _of_section("siglip_config", siglip, _SIGLIP, _SIGLIP, "siglip_config.")
        why = "it must equal the tower's width"
        for key in ("mm_hidden_size", "mm_spatial_pool_out_channels"):
            found += _unequal(key, given, siglip.get("hidden_size"), why)
    needed = [key for key in RELEASED_VQ if key != "mid_block_add_attention"]
    whole = ("latent_channels", "layers_per_block", "norm_num_groups", "num_vq_embeddings")
    found += _of_section("vqvae", vq, needed, whole, "vqvae: ")
    kinds = {"down_block_types": "DownEncoderBlock2D", "up_block_types": "UpDecoderBlock2D"}
    for key, kind in kinds.items():
        blocks = vq.get(key, [])
        if not isinstance(blocks, list) or any(block != kind for block in blocks):
            found.append(f"vqvae: {key} is {vq[key]!r}: only {kind} is known.")
    latent = vq.get("latent_channels")
    found += _unequal("vq_embed_dim", vq, latent, "it must equal latent_channels", "vqvae: ")
    heads = given.get("n_heads")
    shared = "keys shared between heads are not supported, it must equal n_heads"
    for key in ("n_kv_heads", "effective_n_kv_heads"):
        found += _unequal(key, given, heads, shared)
    padded = "text is padded with its end, so it must equal eos_token_id"
    found += _unequal("pad_token_id", given, given.get("eos_token_id"), padded)
    width = given.get("d_model")
    if isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads:
        found.append(f"d_model is {width}: no multiple of n_heads, {heads}.")
    return found


def _of_section(
    section: str,
    given: Mapping[str, Any],
    needed: Iterable[str] = (),
    whole: Iterable[str] = (),
    where: str = "",
) -> list[str]:
    """Returns a line for every key that is missing, not a size, or unsupported by our code.

    Args:
        needed: keys that must be there.
        whole: keys of sizes, which are whole numbers.
        where: prefix of the key in its line.
    """
    allowed = {key: values for key, values in _ALLOWED[section].items() if key in given}
    return [
        *(f"{where}{key} is missing." for key in sorted(needed) if given.get(key) is None),
        *(
            f"{where}{key} is {given[key]!r}: it must be a whole number greater than 0."
            for key in whole
            if given.get(key) is not None and (not isinstance(given[key], int) or given[key] <= 0)
        ),
        *(
            f"{where}{key} is {given[key]!r}: only {values[0]!r} is supported."
            for key, values in allowed.items()
            if given[key] not in values
        ),
    ]


def _unequal(
    key: str, given: Mapping[str, Any], wanted: Any, why: str, where: str = ""
) -> list[str]:
    """Returns a line if a key is present and its value is not the wanted one."""
    if given.get(key) in (None, wanted) or wanted is None:
        return []
    return [f"{where}{key} is {given[key]!r}: {why}, {wanted}."]


# ---------------------------------------------------------------------------------------------
# From our settings to the release's.


def official_config(settings: config.Config, dtype: str) -> dict[str, Any]:
    """Returns the released `config.json` of a model that was not converted from one.

    Args:
        dtype: of the exported parameters, as PyTorch calls it.
    """
    model, vision = settings.model, settings.model.vision
    given = {
        **_implemented("config"),
        **_official(model, _KEYS["model"]),
        "architectures": ["LlavaLladaForMaskedDiffusion"],
        "dual_tower": not model.understanding_only,
        "embedding_size": model.vocab_size,
        "max_sequence_length": 4096,
        "model_type": "llava_llada",
        "n_kv_heads": model.num_heads,
        "pad_token_id": model.end_of_text_id,
        "torch_dtype": dtype,
        "vocab_size": model.vocab_size,
    }
    if model.understanding_only:
        return given
    return given | {
        **_implemented("generation"),
        **_official(model, _KEYS["generation"]),
        "downsample": model.codes_per_token == 4,
        "gen_head_config": {"embedding_rows": model.image_table_rows or model.image_mask_id + 1},
        "gen_shape": [settings.vq.image_size // settings.vq.factor] * 2,
        "image_aspect_ratio": "anyres" if vision.grid_sizes else "pad",
        "image_grid_pinpoints": [list(size) for size in vision.grid_sizes],
        "mm_hidden_size": vision.width,
        "mm_spatial_pool_out_channels": vision.width,
        "mm_spatial_pool_stride": vision.pool,
        "mm_vision_tower": f"google/{_SIGLIP_NAME}",
        "mm_vqvae": ".",
        "siglip_config": {
            **_official(vision, _KEYS["siglip"]),
            "num_hidden_layers": vision.num_layers + 1,
        },
    }


def _implemented(section: str) -> dict[str, Any]:
    allowed = _ALLOWED[section]
    return {key: values[0] for key, values in allowed.items() if None not in values}


def official_vq_config(vq: config.VQ) -> dict[str, Any]:
    """Returns the `config.json` of the `vqvae` subfolder."""
    blocks = len(vq.channels)
    return {
        "_class_name": "VQModel",
        "act_fn": "silu",
        "block_out_channels": list(vq.channels),
        "down_block_types": ["DownEncoderBlock2D"] * blocks,
        "in_channels": 3,
        "lookup_from_codebook": True,
        "mid_block_add_attention": vq.mid_attention,
        "norm_type": "group",
        "out_channels": 3,
        "up_block_types": ["UpDecoderBlock2D"] * blocks,
        "vq_embed_dim": vq.latent_channels,
        **_official(vq, _KEYS["vqvae"]),
    }
