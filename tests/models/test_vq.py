# SPDX-License-Identifier: Apache-2.0
"""The image tokenizer: shapes, gradients, bytes, and damaged files."""

import functools
import json
import pathlib

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import stand_ins
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.models import parameters, vq, vq_files
from sparse_lavida_jax.models.image_codec import ImageCodec
from sparse_lavida_jax.scenes import tasks, world

SETTINGS = config.VQ(
    image_size=16, channels=(8, 16), latent_channels=4, codebook_size=10, norm_groups=4
)


@functools.cache
def tiny(**changes) -> vq.VQModel:
    """A model with arbitrary weights; real initialisation takes seconds to compile."""
    settings = config.VQ(**{**config.to_dict(SETTINGS), **changes})
    shapes = jax.eval_shape(lambda: vq.VQModel(settings, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(
            rng.normal(0, np.prod(leaf.shape[:-1]) ** -0.5, leaf.shape), leaf.dtype
        ),
        shapes,
    )


def full_size() -> config.VQ:
    """The settings of the image tokenizer of LaViDa-O."""
    return config.read(pathlib.Path(__file__).parents[2] / "configs" / "lavida_o.py").vq


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)


@pytest.mark.parametrize("changes", [{}, {"mid_attention": True}, {"upsampling": "shuffle"}])
def test_decoding_codes_gives_the_size_that_was_encoded(changes):
    model, pixels = tiny(**changes), images(3, 8, 16)
    codes = vq.encode_images(model, pixels, batch=2)
    assert codes.shape == (3, 4, 8)
    decoded = vq.to_pixels(model, codes, batch=2)
    assert decoded.shape == pixels.shape and decoded.dtype == np.uint8


def convolutions(function, *arguments):
    """Returns the equations of all convolutions in a program, those of loops too."""
    return list(_convolutions(jax.make_jaxpr(function)(*arguments).jaxpr))


def _convolutions(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "conv_general_dilated":
            yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _convolutions(inner)


def workspace(equation) -> int:
    """Bytes of the patches of a convolution side by side, or of its Fourier transforms.

    cuDNN has Fourier transforms for float32, without strides: of images, filters and results, all
    as large as the image with its border. 1 x 1 kernels see no patches.
    """
    image, kernel, result = (
        [variable.aval.shape[axis] for axis in axes]
        for variable, axes in zip(
            (*equation.invars, *equation.outvars), equation.params["dimension_numbers"], strict=True
        )
    )
    of_input = equation.invars[0].aval.dtype
    patches = result[0] * np.prod(result[2:]) * np.prod(kernel[1:]) * of_input.itemsize
    sides = [
        side + sum(pad) for side, pad in zip(image[2:], equation.params["padding"], strict=True)
    ]
    filters, images = kernel[0] * kernel[1], image[0] * (image[1] + result[1])
    spectra = (filters + images) * np.prod(sides) * np.dtype(np.complex64).itemsize
    has_spectra = of_input == np.float32 and set(equation.params["window_strides"]) == {1}
    return int(max(patches, spectra * has_spectra))


@pytest.mark.parametrize("does", ["encode", "decode", "decode in bfloat16"])
def test_no_convolution_of_the_largest_image_may_ask_for_more_than_4_gib(does, monkeypatch):
    model = vq.shapes(full_size())
    if does == "encode":
        given, function = jax.ShapeDtypeStruct((1, 1024, 1024, 3), "float32"), vq.VQModel.encode
    else:
        dtype = "bfloat16" if "in" in does else "float32"
        model = jax.eval_shape(lambda model: vq.for_decoding(model, dtype), model)
        given, function = jax.ShapeDtypeStruct((1, 64, 64), "int32"), vq.VQModel.decode

    def most():
        found = convolutions(lambda model, given: function(model, given), model, given)
        assert len(found) > 30
        return max(map(workspace, found)) / 2**30

    assert most() <= 4
    monkeypatch.setattr(vq, "MOST_WORKSPACE", 2**60)
    assert most() > (4 if "in" in does else 128)


@pytest.mark.parametrize(
    ("height", "width"), [pytest.param(48, 32, marks=pytest.mark.slow), (36, 52)]
)
@pytest.mark.parametrize("limit", [pytest.param(3 * 10**5, marks=pytest.mark.slow), 10**6])
def test_convolutions_in_tiles_are_those_of_the_whole_image(height, width, limit, monkeypatch):
    """In turns too, and where tiles are larger than what is left of the image."""
    model, pixels = tiny(), vq.to_float(images(2, height, width))

    def both(model, pixels):
        return model.latents(pixels), model.decode_latents(model.latents(pixels))

    def gradient(model, pixels):
        return jax.grad(lambda model: jnp.sum(both(model, pixels)[1] ** 2))(model)

    assert max(map(workspace, convolutions(both, model, pixels))) > limit
    whole, slopes = jax.jit(both)(model, pixels), jax.jit(gradient)(model, pixels)
    monkeypatch.setattr(vq, "MOST_WORKSPACE", limit)
    assert max(map(workspace, convolutions(lambda *_: both(*_), model, pixels))) <= limit
    again, slopes_again = (jax.jit(lambda *_, f=f: f(*_))(model, pixels) for f in (both, gradient))
    for mine, theirs in zip(again, whole, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(*map(jax.tree.leaves, (slopes_again, slopes)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3 * float(abs(theirs).max()))


def test_small_images_are_not_cut():
    """So that their codes stay the same to the bit."""
    assert vq.tiling((1, 256, 256, 64), (3, 3, 64, 64), 4) == (1, 1, 1)
    assert vq.tiling((1, 1024, 1024, 128), (3, 3, 128, 128), 4) == (2, 8, 8)


def test_no_images_are_no_codes():
    assert vq.encode_images(tiny(), images(0, 8, 8)).shape == (0, 4, 4)


def test_batches_do_not_change_codes():
    model, pixels = tiny(), images(5, 8, 8)
    alone = np.concatenate([vq.encode_images(model, image[None]) for image in pixels])
    np.testing.assert_array_equal(vq.encode_images(model, pixels, batch=2), alone)


def test_the_nearest_code_is_the_nearest_by_definition():
    model = tiny()
    latents = jax.random.normal(jax.random.key(1), (2, 3, 4, 4))
    codebook = np.asarray(model.codebook)
    distance = np.linalg.norm(np.asarray(latents)[..., None, :] - codebook, axis=-1)
    np.testing.assert_array_equal(model.nearest(latents), distance.argmin(axis=-1))


def test_of_equal_codes_the_first_is_taken():
    model = jax.tree.map(lambda leaf: leaf, tiny())
    model.codebook = nnx.Param(model.codebook[jnp.array([0, 1] + [0] * 8)])
    codes = model.nearest(jax.random.normal(jax.random.key(1), (2, 3, 4, 4)))
    np.testing.assert_array_equal(np.unique(codes), [0, 1])


def test_the_gradient_reaches_the_encoder_through_the_codes():
    model = tiny(commitment=0.0)  # leaves only the straight-through path
    pixels = vq.to_float(jnp.asarray(images(1, 8, 8)))
    gradient = jax.jit(jax.grad(lambda m, x: m.loss(x)[0]))(model, pixels)
    for name, leaf in parameters.by_name(gradient).items():
        if not name.endswith("bias"):
            assert float(jnp.abs(leaf).max()) > 0, name


def test_pixel_norm_sees_one_position_and_group_norm_the_image():
    x = jax.random.normal(jax.random.key(0), (1, 4, 4, 8))
    changed = x.at[0, 0, 0].add(jnp.arange(8.0))
    for norm, moves in (("pixel", False), ("group", True)):
        layer = vq.Norm(config.VQ(norm=norm, channels=(8,), norm_groups=2), 8)
        moved = np.abs(np.asarray(layer(x) - layer(changed)))[0]
        assert moved[0, 0].max() > 0
        assert (moved[1:].max() > 0) == moves


def test_equal_codes_decode_to_equal_pixels_unless_shuffled():
    """Why one code per cell needs `upsampling="shuffle"`; away from zero padding at the border."""
    for upsampling, varies in (("nearest", False), ("shuffle", True)):
        model = tiny(upsampling=upsampling, norm="pixel")
        pixels = jax.jit(vq.VQModel.decode_latents)(model, jnp.ones((1, 24, 24, 4)))
        middle = np.asarray(pixels)[0, 20:28, 20:28]
        assert (np.ptp(middle, axis=(0, 1)).max() > 1e-3) == varies


def test_bytes_are_truncated_not_rounded():
    given = jnp.array([-1.0, 0.999 / 255, 1.999 / 255, 254.999 / 255, 1.0, 2.0])
    got = vq.to_uint8(jnp.broadcast_to(given[None, None, :, None], (1, 1, 6, 3)))
    np.testing.assert_array_equal(got[0, 0, :, 0], [0, 0, 1, 254, 255, 255])


@pytest.mark.parametrize("changes", [{}, {"mid_attention": True}, {"upsampling": "shuffle"}])
def test_a_decoder_in_bfloat16_moves_few_grey_levels(changes):
    """All except its last norm and convolution, which produce the grey levels."""
    model = tiny(**changes)
    narrow = vq.for_decoding(model, "bfloat16")
    wide = {name for name, leaf in parameters.by_name(narrow).items() if leaf.dtype == jnp.float32}
    assert wide and all(name.startswith("decoder/conv_") for name in wide)
    assert not any("conv_in" in name for name in wide)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model))
    same = zip(*map(jax.tree.leaves, (vq.for_decoding(model, "float32"), model)), strict=True)
    assert all(one is other for one, other in same)
    codes = np.random.default_rng(0).integers(0, 10, (2, 4, 4))
    plain, moved = (vq.to_pixels(one, codes).astype(int) for one in (model, narrow))
    assert 0 < np.abs(moved - plain).mean() < 2  # of 255; weights are arbitrary


def test_what_accelerators_compute_in_bfloat16_is_the_same_formula():
    """In float32: doubled sides by 2 x 2 kernels, and a norm that reads its input once."""
    x = jnp.asarray(np.random.default_rng(1).normal(3, 1, (2, 5, 7, 16)), jnp.float32)
    upsampler, norm = tiny().decoder.up_blocks[0].upsampler, tiny().decoder.up_blocks[0].resnets[0]
    doubled = vq._doubled(upsampler, x)
    assert doubled.shape == (2, 10, 14, 16)
    np.testing.assert_allclose(vq._doubled_at_corners(upsampler, x), doubled, rtol=0, atol=1e-5)
    normed = norm.norm1.in_two_passes(x)
    np.testing.assert_allclose(norm.norm1.in_one_pass(x), normed, rtol=0, atol=1e-5)


def test_accelerators_decode_in_bfloat16_as_well_as_cpus(monkeypatch):
    """Release-like, with arbitrary weights; what follows bfloat16 is chosen, and float32 stays."""
    model, codes = tiny(), np.random.default_rng(0).integers(0, 10, (2, 8, 8))

    def off(dtype):
        """Returns the mean difference from float32 on a CPU."""
        narrow = vq.for_decoding(model, dtype)
        found = jax.jit(lambda model: vq.to_uint8(model.decode(jnp.asarray(codes))))(narrow)
        return np.abs(np.asarray(found, int) - vq.to_pixels(model, codes)).mean()

    before, chosen = off("bfloat16"), []

    def narrow(*args, cpu, default):
        chosen.append(default)
        return default(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", narrow)
    assert off("float32") == 0 and not chosen
    assert 0 < off("bfloat16") <= 1.25 * before
    assert {vq._doubled_at_corners, vq.Norm.in_one_pass} == set(chosen)


def test_a_scene_decoded_in_bfloat16_shows_the_same():
    codec = ImageCodec(stand_ins.FOUR_CODES, config.Model(codes_per_token=4, codebook_size=256))
    scene = tasks.sample("edit", 0, 0).image
    cells = codec.encode(world.render(scene)[None])
    (plain,), (moved,) = (codec.to_pixels(cells, dtype=dtype) for dtype in config.VQ_DTYPES)
    assert world.read(moved) == world.read(plain) == scene
    difference = np.abs(moved.astype(int) - plain)
    assert 0 < difference.max() <= 4 and difference.mean() < 0.5


def test_another_dtype_of_the_decoder_lists_those_there_are():
    with pytest.raises(config.ConfigError, match="float32, bfloat16"):
        config.Sampling(vq_dtype="float16")


def test_a_wrong_image_size_says_which_are_right():
    with pytest.raises(ValueError, match="8x9 pixels; both sides must be multiples of 2"):
        vq.encode_images(tiny(), images(1, 8, 9))


def test_codes_outside_the_codebook_are_refused():
    with pytest.raises(ValueError, match="the codebook has 0 to 9"):
        vq.to_pixels(tiny(), np.array([[[11]]]))


def test_loading_gives_the_bits_that_were_saved(tmp_path):
    model = tiny()
    vq_files.save(tmp_path / "vq", model)
    vq_files.save(tmp_path / "vq", model)  # over the first
    loaded, settings = vq_files.load(tmp_path / "vq")
    assert settings == SETTINGS
    assert jax.tree.structure(loaded) == jax.tree.structure(model)
    for mine, theirs in zip(jax.tree.leaves(model), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert [path.name for path in tmp_path.iterdir()] == ["vq"]


def test_an_interrupted_save_leaves_the_old_files(tmp_path, monkeypatch):
    vq_files.save(tmp_path / "vq", tiny())
    before = (tmp_path / "vq" / "params.safetensors").read_bytes()

    def full_disk(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        vq_files.save(tmp_path / "vq", tiny(commitment=0.0))
    assert (tmp_path / "vq" / "params.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["vq"]


def test_an_unknown_name_lists_the_bundled_ones():
    with pytest.raises(vq_files.VQError, match=r"'nowhere'.*or a bundled model: art, scenes\."):
        vq_files.load("nowhere")


@pytest.mark.parametrize("place", ["", "vq", "model/vq"])
def test_the_tokenizer_of_a_model_or_a_run_is_found(tmp_path, place):
    vq_files.save(tmp_path / place, tiny())
    assert vq_files.find(tmp_path) == tmp_path / place
    (tmp_path / place / "vq").mkdir()
    assert vq_files.find(tmp_path / place) == tmp_path / place


def test_all_misfits_are_reported_at_once(tmp_path):
    vq_files.save(tmp_path / "vq", tiny())
    path = tmp_path / "vq" / "params.safetensors"
    tensors = safetensors.numpy.load_file(path)
    del tensors["codebook"]
    tensors["codebooks"] = np.zeros(3, np.float32)
    tensors["quant_conv/bias"] = np.zeros(5, np.float32)
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(vq_files.VQError) as error:
        vq_files.load(tmp_path / "vq")
    for fault in (
        "codebook: missing, the model has (10, ",
        "codebooks (3,): the model has no such parameter",
        "quant_conv/bias: (5,) on disk, (4",
    ):
        assert fault in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "params.safetensors"])
@pytest.mark.parametrize("broken", ["missing", "cut"])
def test_a_broken_file_is_named(tmp_path, name, broken):
    vq_files.save(tmp_path / "vq", tiny())
    path = tmp_path / "vq" / name
    if broken == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(vq_files.VQError, match=f"{name} cannot be read .*Copy"):
        vq_files.load(tmp_path / "vq")


def test_another_format_is_refused(tmp_path):
    vq_files.save(tmp_path / "vq", tiny())
    path = tmp_path / "vq" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": "VQModel"}))
    with pytest.raises(vq_files.VQError, match="format 'VQModel'; this version reads"):
        vq_files.load(tmp_path / "vq")
