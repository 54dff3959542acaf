# SPDX-License-Identifier: Apache-2.0
"""Every released tensor has one parameter, every parameter one released tensor."""

import dataclasses
import itertools
import math
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch_folder
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import named_arrays
from sparse_lavida_jax.convert import names, settings
from sparse_lavida_jax.convert.settings import ConvertError
from sparse_lavida_jax.models import parameters, vq
from sparse_lavida_jax.models.denoiser import ImageEmbedding, ImageHead
from sparse_lavida_jax.models.denoiser import shapes as denoiser_shapes

# The keys of the release's config.json that describe the model (spec Sec. 10.5).
RELEASE = {
    "activation_type": "silu", "alibi": False, "attention_dropout": 0,
    "attention_layer_norm": False, "bias_for_layer_norm": False, "block_group_size": 1,
    "block_type": "llama", "d_model": 4096, "d_model_gen": 2048, "downsample": True,
    "dual_tower": True, "dual_tower_layers": 16, "effective_n_kv_heads": 32,
    "embedding_dropout": 0, "embedding_size": 127378, "enc_use_image_branch": True,
    "eos_token_id": 126081, "flash_attention": False, "gen_mlp_type": "dit2",
    "image_aspect_ratio": "anyres", "image_enc_drop_rate": 0.5,
    "image_grid_pinpoints": [[384, 768], [768, 384], [768, 768], [1152, 384], [384, 1152]],
    "include_bias": False, "include_qkv_bias": False, "init_fn": "mitchell", "init_std": 0.02,
    "input_emb_norm": False, "layer_norm_type": "rms", "layer_norm_with_affine": True,
    "mask_token_id": 126336, "max_sequence_length": 4096, "mlp_hidden_size": 12288,
    "mlp_hidden_size_gen": 8192, "mm_hidden_size": 1152, "mm_newline_position": "grid",
    "mm_patch_merge_type": "spatial_unpad", "mm_projector_type": "mlp2x_gelu",
    "mm_resampler_type": "spatial_pool", "mm_spatial_pool_mode": "conv",
    "mm_spatial_pool_out_channels": 1152, "mm_spatial_pool_stride": 2,
    "mm_vision_select_layer": -2, "mm_vision_tower": "google/siglip-so400m-patch14-384",
    "mm_vqvae": "jacklishufan/LaViDa-O-v1.0", "model_type": "llada", "n_heads": 32,
    "n_kv_heads": 32, "n_layers": 32, "pad_token_id": 126081, "prompt_drop_rate": 0.1,
    "residual_dropout": 0, "rms_norm_eps": 1e-5, "rope": True, "rope_full_precision": True,
    "rope_theta": 5e5, "scale_logits": False, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_mm_proj": True, "vocab_size": 127378, "weight_tying": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def release():
    """The table of the release, by released name."""
    return {name.official: name for name in names.table(settings.settings_from(RELEASE))}


# ---------------------------------------------------------------------------------------------
# The release at full size (spec Sec. 10); only shapes are made.


def test_the_release_has_as_many_tensors_and_parameters_as_it_should(release):
    required = [name for name in release.values() if not name.optional]
    assert len(required) == 1266
    assert f"{sum(math.prod(name.shape) for name in required) / 1e9:.3f}" == "11.094"


def test_the_config_of_the_release_has_its_sizes():
    """`configs/lavida_o.py`, whose model differs only in its training settings."""
    theirs = settings.settings_from(RELEASE)
    ours = config.read(pathlib.Path(__file__).parents[2] / "configs/lavida_o.py")
    assert dataclasses.replace(ours.model, trained_attention="full") == theirs.model
    assert ours.vq == theirs.vq


def tensors_of_the_specification():
    """Every key of spec Sec. 10 with its shape, spelled out without our code."""
    found = {
        "model.transformer.wte.weight": (127378, 4096),
        "model.transformer.ff_out.weight": (127378, 4096),
        "model.transformer.ln_f.weight": (4096,),
        "model.image_newline": (4096,),
    }

    def weight_and_bias(name, *shape):
        found.update({f"{name}.weight": shape, f"{name}.bias": shape[:1]})

    for i in range(32):
        for suffix, width, hidden in (("", 4096, 12288), ("_vision", 2048, 8192)):
            layer = {
                "attn_norm": (width,), "ff_norm": (width,),
                "q_proj": (4096, width), "k_proj": (4096, width), "v_proj": (4096, width),
                "ff_proj": (hidden, width), "up_proj": (hidden, width), "ff_out": (width, hidden),
            }  # fmt: skip
            for name, shape in layer.items():
                found[f"model.transformer.blocks.{i}.{name}{suffix}.weight"] = shape
        found[f"model.transformer.blocks.{i}.attn_out.weight"] = (4096, 4096)
    images = {
        "gen_embedding.0": (8448, 2048), "gen_embedding.1": (2048,),
        "gen_embedding.2": (2048, 2048), "gen_embedding_2.0": (2048,),
        "gen_embedding_2.1": (2048, 2048), "gen_predictor_2.0": (2048,),
        "gen_predictor_2.1": (2048, 2048), "gen_predictor.0": (2048, 2048),
        "gen_predictor.1": (2048,), "gen_predictor.2": (8192, 2048),
        "downsample_gen.downsample.norm": (2048,),
        "downsample_gen.downsample.conv": (2048, 2048, 2, 2),
        "upsample_gen.upsample.norm": (2048,), "upsample_gen.upsample.conv": (2048, 2048, 2, 2),
    }  # fmt: skip
    found |= {f"model.{name}.weight": shape for name, shape in images.items()}

    tower = "model.vision_tower.vision_tower.vision_model"
    weight_and_bias(f"{tower}.embeddings.patch_embedding", 1152, 3, 14, 14)
    found[f"{tower}.embeddings.position_embedding.weight"] = (729, 1152)
    for i in range(26):
        layer = f"{tower}.encoder.layers.{i}"
        for part in "qkv":
            weight_and_bias(f"{layer}.self_attn.{part}_proj", 1152, 1152)
        weight_and_bias(f"{layer}.self_attn.out_proj", 1152, 1152)
        weight_and_bias(f"{layer}.layer_norm1", 1152)
        weight_and_bias(f"{layer}.layer_norm2", 1152)
        weight_and_bias(f"{layer}.mlp.fc1", 4304, 1152)
        weight_and_bias(f"{layer}.mlp.fc2", 1152, 4304)
    weight_and_bias(f"{tower}.post_layernorm", 1152)
    weight_and_bias("model.vision_resampler.pool", 1152, 1152, 2, 2)
    weight_and_bias("model.mm_projector.0", 4096, 1152)
    weight_and_bias("model.mm_projector.2", 4096, 4096)

    def resnet(name, before, after):
        weight_and_bias(f"{name}.norm1", before)
        weight_and_bias(f"{name}.conv1", after, before, 3, 3)
        weight_and_bias(f"{name}.norm2", after)
        weight_and_bias(f"{name}.conv2", after, after, 3, 3)
        if before != after:
            weight_and_bias(f"{name}.conv_shortcut", after, before, 1, 1)

    def side(name, widths, blocks, sampler, depth, outside):
        first, last = outside
        weight_and_bias(f"{name}.conv_in", widths[0], first, 3, 3)
        for b, (before, after) in enumerate(itertools.pairwise(widths)):
            for r in range(depth):
                resnet(f"{name}.{blocks}.{b}.resnets.{r}", before if r == 0 else after, after)
            if b < 4:
                weight_and_bias(f"{name}.{blocks}.{b}.{sampler}.0.conv", after, after, 3, 3)
        for r in range(2):
            resnet(f"{name}.mid_block.resnets.{r}", 768, 768)
        weight_and_bias(f"{name}.conv_norm_out", widths[-1])
        weight_and_bias(f"{name}.conv_out", last, widths[-1], 3, 3)

    vqvae = "model.vqvae"
    down, up = (128, 128, 256, 256, 512, 768), (768, 768, 512, 256, 256, 128)
    side(f"{vqvae}.encoder", down, "down_blocks", "downsamplers", 2, (3, 64))
    side(f"{vqvae}.decoder", up, "up_blocks", "upsamplers", 3, (64, 3))
    weight_and_bias(f"{vqvae}.quant_conv", 64, 64, 1, 1)
    weight_and_bias(f"{vqvae}.post_quant_conv", 64, 64, 1, 1)
    found[f"{vqvae}.quantize.embedding.weight"] = (8192, 64)
    return found


def test_the_release_has_exactly_the_tensors_of_the_specification(release):
    expected = tensors_of_the_specification()
    assert len(expected) == 1266
    assert {n: name.shape for n, name in release.items() if not name.optional} == expected
    assert {n for n, name in release.items() if name.optional} == set(names.REGISTERS)


@pytest.mark.parametrize(
    ("pattern", "tensors", "parameters"),
    [
        (r"model\.vqvae\..*", 277, "0.146245"),
        (r"model\.transformer\.blocks\.\d+\.\w+_vision\.weight", 256, "2.416"),
        (r"model\.transformer\.blocks\.\d+\.\w+(?<!_vision)\.weight", 288, "6.980"),
        (r"model\.(gen_|downsample|upsample).*", 14, "0.084"),
        (r"model\.vision_tower\..*", 26 * 16 + 5, "0.398"),
        (r"model\.transformer\.(wte|ff_out)\.weight", 2, "1.043"),
    ],
)
def test_every_part_of_the_release_has_its_size(release, pattern, tensors, parameters):
    found = [name for official, name in release.items() if re.fullmatch(pattern, official)]
    assert len(found) == tensors
    digits = len(parameters.partition(".")[2])
    assert f"{sum(math.prod(name.shape) for name in found) / 1e9:.{digits}f}" == parameters


@pytest.mark.parametrize(
    ("official", "shape"),
    [
        ("model.transformer.wte.weight", (127378, 4096)),
        ("model.transformer.ff_out.weight", (127378, 4096)),
        ("model.transformer.blocks.31.ff_out.weight", (4096, 12288)),
        ("model.transformer.blocks.17.ff_proj_vision.weight", (8192, 2048)),
        ("model.transformer.blocks.0.k_proj_vision.weight", (4096, 2048)),
        ("model.gen_embedding.0.weight", (8448, 2048)),
        ("model.gen_predictor.2.weight", (8192, 2048)),
        ("model.downsample_gen.downsample.conv.weight", (2048, 2048, 2, 2)),
        ("model.image_newline", (4096,)),
        (f"{names.TOWER_PREFIX}embeddings.patch_embedding.weight", (1152, 3, 14, 14)),
        (f"{names.TOWER_PREFIX}embeddings.position_embedding.weight", (729, 1152)),
        (f"{names.TOWER_PREFIX}encoder.layers.25.mlp.fc1.weight", (4304, 1152)),
        ("model.vision_resampler.pool.weight", (1152, 1152, 2, 2)),
        ("model.mm_projector.0.weight", (4096, 1152)),
        ("model.vqvae.quantize.embedding.weight", (8192, 64)),
        ("model.vqvae.encoder.down_blocks.4.resnets.0.conv_shortcut.weight", (768, 512, 1, 1)),
        ("model.vqvae.decoder.up_blocks.0.upsamplers.0.conv.bias", (768,)),
    ],
)
def test_shapes_are_those_of_the_specification(release, official, shape):
    assert release[official].shape == shape


def test_the_layer_after_the_last_joint_one_is_the_first_split_one(release):
    prefix = "model.transformer.blocks"
    assert release[f"{prefix}.16.attn_out.weight"].ours == "joint_layers/16/attn_out/kernel"
    assert release[f"{prefix}.17.attn_out.weight"].ours == "split_layers/00/attn_out/kernel"


def variants():
    """Settings with different sets of tensors."""
    model, made = torch_folder.SETTINGS.model, torch_folder.SETTINGS
    yield "release", settings.settings_from(RELEASE)
    yield "tiny", made
    for head in ("embed", "dit"):
        yield head, dataclasses.replace(made, model=dataclasses.replace(model, image_head=head))
    whole = dataclasses.replace(model, codes_per_token=1, grid_size=2 * model.grid_size)
    yield "without 2x2", dataclasses.replace(made, model=whole)
    attentive = dataclasses.replace(made.vq, mid_attention=True)
    yield "attention in the tokenizer", dataclasses.replace(made, vq=attentive)
    text = dataclasses.replace(model, understanding_only=True)
    yield "text alone", dataclasses.replace(made, model=text)


@pytest.mark.parametrize("made", [pytest.param(made, id=kind) for kind, made in variants()])
def test_names_and_parameters_are_one_to_one(made):
    table = names.table(made)
    assert len({name.official for name in table}) == len(table)
    ours = {name.ours: name.our_shape for name in table if name.home == "params"}
    model = named_arrays.by_layer(denoiser_shapes(made.model))
    assert ours == {name: leaf.shape for name, leaf in model.items()}
    image = {name.ours: name.our_shape for name in table if name.home == "vq"}
    if not made.model.understanding_only:
        tokenizer = parameters.by_name(vq.shapes(made.vq))
        assert image == {name: leaf.shape for name, leaf in tokenizer.items()}


# ---------------------------------------------------------------------------------------------
# Layouts.


@pytest.mark.parametrize("made", [torch_folder.SETTINGS], ids=["tiny"])
def test_every_layout_is_undone_exactly(made):
    rng = np.random.default_rng(0)
    for name in names.table(made):
        tensor = rng.normal(size=name.shape).astype(np.float32)
        ours = names.to_ours(name, tensor)
        assert ours.shape == name.our_shape
        back = names.to_official(name, ours)
        assert back.shape == name.shape
        np.testing.assert_array_equal(back, tensor, name.official)


def test_merging_a_cell_is_the_2x2_convolution_of_the_release():
    """y[o] = sum over c, p, q of W[o, c, p, q] x[c, p, q], written out (spec Sec. 2.6)."""
    model = torch_folder.SETTINGS.model
    name = next(n for n in names.table(torch_folder.SETTINGS) if n.transform == "merge")
    rng = np.random.default_rng(0)
    weight = rng.normal(size=name.shape).astype(np.float32)
    cell = rng.normal(size=(model.generation_width, 2, 2)).astype(np.float32)
    expected = np.einsum("ocpq,cpq->o", weight, cell)
    embedding = ImageEmbedding(model, rngs=nnx.Rngs(0))
    embedding.merge.kernel = nnx.Param(names.to_ours(name, weight))
    flat = cell.transpose(1, 2, 0).reshape(1, -1)  # code by code in raster order
    np.testing.assert_allclose(embedding.merge(jnp.asarray(flat))[0], expected, atol=1e-4)


def test_spreading_a_cell_is_the_transposed_2x2_convolution_of_the_release():
    """y[o, p, q] = sum over c of x[c] W[c, o, p, q] (spec Sec. 2.6)."""
    model = torch_folder.SETTINGS.model
    name = next(n for n in names.table(torch_folder.SETTINGS) if n.transform == "spread")
    rng = np.random.default_rng(0)
    weight = rng.normal(size=name.shape).astype(np.float32)
    token = rng.normal(size=model.generation_width).astype(np.float32)
    expected = np.einsum("c,copq->pqo", token, weight).reshape(-1)
    head = ImageHead(model, rngs=nnx.Rngs(0))
    head.spread.kernel = nnx.Param(names.to_ours(name, weight))
    np.testing.assert_allclose(head.spread(jnp.asarray(token[None]))[0], expected, atol=1e-4)


# ---------------------------------------------------------------------------------------------
# Settings.


def test_the_settings_of_the_release():
    made = settings.settings_from(RELEASE)
    model = made.model
    assert (model.num_joint_layers, model.num_split_layers) == (17, 15)
    assert (model.num_heads, model.head_dim, model.width) == (32, 128, 4096)
    assert (model.image_mask_id, model.codes_per_token, model.num_cells) == (8193, 4, 1024)
    assert (model.text_mask_id, model.end_of_text_id) == (126336, 126081)
    assert (model.trained_attention, model.num_registers) == ("full", 64)
    assert model.vision.num_tokens == 169
    assert model.vision.num_layers == 26
    assert (768, 384) in model.vision.grid_sizes
    scales = made.sampling.guidance, made.sampling.guidance_edit, made.sampling.guidance_image
    assert scales == (4.0, 1.2, 1.4)
    assert made.vq.factor == 16


@pytest.mark.parametrize("made", [pytest.param(made, id=kind) for kind, made in variants()])
def test_settings_survive_the_way_to_the_release_and_back(made):
    given = settings.official_config(made, "float32")
    back = settings.settings_from(given, settings.official_vq_config(made.vq)).model
    if made.model.understanding_only:
        same = ("vocab_size", "width", "num_layers", "head_dim", "text_mask_id", "norm_eps")
        assert all(getattr(back, key) == getattr(made.model, key) for key in same)
        assert back.understanding_only
    else:
        assert back == dataclasses.replace(made.model, compute_dtype="float32")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("alibi", True, "alibi is True: only False is supported."),
        ("input_emb_norm", True, "input_emb_norm is True: only False is supported."),
        ("n_kv_heads", 8, "n_kv_heads is 8: keys shared between heads are not supported"),
        ("pad_token_id", 5, "pad_token_id is 5: text is padded with its end"),
        ("mask_token_id", None, "mask_token_id is missing."),
        ("rope_theta", None, "rope_theta is missing."),
        ("dual_tower_layers", None, "dual_tower_layers is missing."),
        ("n_heads", 33, "d_model is 4096: no multiple of n_heads, 33."),
        ("gen_mlp_type", "dit3", "choose one of embed, dit, dit2"),
        ("mm_vision_tower", "openai/clip", "mm_vision_tower is 'openai/clip': only siglip-so400m"),
        ("mm_hidden_size", 1024, "mm_hidden_size is 1024: it must equal the tower's width, 1152."),
        ("unified_gen_enc", True, "unified_gen_enc is True: only False is supported."),
        ("d_model", "wide", "d_model is 'wide': it must be a whole number"),
    ],
)
def test_what_contradicts_our_code_is_refused(key, value, told):
    with pytest.raises(ConvertError) as error:
        settings.settings_from({**RELEASE, key: value})
    assert told in str(error.value)


def test_all_contradictions_are_reported_at_once():
    with pytest.raises(ConvertError) as error:
        settings.settings_from({**RELEASE, "alibi": True, "rope": False, "eos_token_id": None})
    for key in ("alibi", "rope", "eos_token_id"):
        assert f"\n  {key} is " in str(error.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"norm_type": "spatial"}, "vqvae: norm_type is 'spatial'"),
        ({"down_block_types": ["AttnDownEncoderBlock2D"]}, "only DownEncoderBlock2D is known"),
        ({"vq_embed_dim": 32}, "vq_embed_dim is 32: it must equal latent_channels, 64."),
        ({"num_vq_embeddings": None}, "vqvae: num_vq_embeddings is missing."),
    ],
)
def test_image_tokenizers_of_another_kind_are_refused(changes, told):
    with pytest.raises(ConvertError) as error:
        settings.settings_from(RELEASE, settings.RELEASED_VQ | changes)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("part", "changes", "told"),
    [
        ("model", {"cell_positions": True}, "learned positions of cells"),
        ("model", {"sequential_codes": True, "codes_per_token": 4}, "codes drawn in turn"),
        ("model", {"style_parts": 2}, "style codes"),
        ("vq", {"norm": "pixel"}, "norms over single pixels"),
        ("vq", {"upsampling": "shuffle"}, "shuffled pixels"),
    ],
)
def test_parameters_of_ours_alone_have_no_released_form(part, changes, told):
    changed = dataclasses.replace(getattr(torch_folder.SETTINGS, part), **changes)
    plans = config.Diffusion(blocks="plan")  # style codes need them
    made = dataclasses.replace(torch_folder.SETTINGS, diffusion=plans, **{part: changed})
    with pytest.raises(ConvertError, match=told):
        names.table(made)


def test_the_2x2_modules_that_a_model_does_without_keep_their_names():
    whole = dataclasses.replace(torch_folder.SETTINGS.model, codes_per_token=1)
    table = names.table(config.Config(model=whole, vq=torch_folder.VQ))
    unused = {name.official: name.shape for name in table if name.home == "unused"}
    width = whole.generation_width
    assert unused["model.downsample_gen.downsample.conv.weight"] == (width, width, 2, 2)
    assert len(unused) == 4
    assert math.prod(unused["model.upsample_gen.upsample.norm.weight"]) == width
