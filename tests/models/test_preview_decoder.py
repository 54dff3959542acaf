# SPDX-License-Identifier: Apache-2.0
"""The decoder for previews: its size, its file, what it learns, and where it is used."""

import io
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
import safetensors.numpy
from flax import nnx
from PIL import Image

from sparse_lavida_jax import config
from sparse_lavida_jax.models import preview_decoder, vq, vq_files
from sparse_lavida_jax.models.image_codec import ImageCodec
from sparse_lavida_jax.training import train_preview

SETTINGS = config.VQ(
    image_size=16, channels=(16, 32), latent_channels=4, codebook_size=10, norm_groups=4
)
CELLS = config.VQ(
    kind="cells", image_size=16, codebook_size=12, latent_channels=64, layers_per_block=4
)
MODEL = config.Model(grid_size=8, codes_per_token=1, codebook_size=10)


def tiny(settings: config.VQ = SETTINGS) -> vq.AnyVQ:
    """A model with arbitrary weights; real initialisation takes seconds to compile."""
    rng = np.random.default_rng(0)

    def drawn(leaf):
        return jnp.asarray(rng.normal(0, np.prod(leaf.shape[:-1]) ** -0.5, leaf.shape), leaf.dtype)

    return jax.tree.map(drawn, vq.shapes(settings))


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    vq_files.save(tmp_path / "vq", tiny())
    return tmp_path / "vq"


@pytest.mark.parametrize("settings", [SETTINGS, CELLS])
def test_it_has_at_most_a_tenth_of_the_operations(settings):
    width = preview_decoder.width_for(settings)
    assert preview_decoder.share_of_operations(settings, width) <= 0.1
    assert width % preview_decoder.WIDTHS == 0


def test_a_teacher_that_is_small_itself_is_refused():
    with pytest.raises(config.ConfigError, match="so small"):
        preview_decoder.width_for(config.VQ(channels=(4, 4), latent_channels=4, norm_groups=1))


@pytest.mark.parametrize("settings", [SETTINGS, CELLS])
def test_it_comes_back_from_the_folder_of_its_teacher_and_is_copied_with_it(tmp_path, settings):
    teacher = tiny(settings)
    vq_files.save(tmp_path / "vq", teacher)
    before = vq_files.digest(tmp_path / "vq")
    made = preview_decoder.new(teacher, 8, 0)
    preview_decoder.save(tmp_path / "vq", made)
    assert vq_files.digest(tmp_path / "vq") == before
    vq_files.copy(tmp_path / "vq", tmp_path / "copied")
    back = preview_decoder.load(tmp_path / "copied", teacher)
    assert preview_decoder.width_of(back) == 8
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_file_of_another_teacher_and_a_damaged_one_are_refused(folder, tmp_path):
    preview_decoder.save(folder, preview_decoder.new(tiny(), 8, 0))
    path = folder / vq_files.PREVIEW
    arrays = safetensors.numpy.load_file(path)
    for contents, said in (
        (safetensors.numpy.save(arrays, {"teacher": "0" * 64}), "another image tokenizer"),
        (safetensors.numpy.save(arrays), "another image tokenizer"),
        (safetensors.numpy.save({"codes": arrays["codebook"]}), "another image tokenizer"),
        (safetensors.numpy.save({"codebook": np.zeros(0, np.float32)}), "another image"),
        (safetensors.numpy.save({"other": arrays["codebook"]}), "cannot be read"),
        (path.read_bytes()[:-5], "cannot be read"),
        (b"", "cannot be read"),
    ):
        path.write_bytes(contents)
        with pytest.raises(vq_files.VQError, match=said):
            preview_decoder.load(folder, tiny())


def test_only_previews_are_decoded_by_it(folder):
    cells = np.arange(64)[:, None] % 10
    exact = ImageCodec(folder, MODEL).to_pixels(cells[None])[0]
    np.testing.assert_array_equal(ImageCodec(folder, MODEL).to_preview(cells), exact)
    made = preview_decoder.new(tiny(), 8, 0)
    assert isinstance(made, preview_decoder.PreviewDecoder)
    made.blocks = nnx.Param(jnp.full_like(made.blocks[...], 3.0))
    preview_decoder.save(folder, made)
    codec = ImageCodec(folder, MODEL)
    np.testing.assert_array_equal(codec.to_pixels(cells[None])[0], exact)
    assert (codec.to_preview(cells) == 255).all()


def test_the_first_blocks_are_the_means_of_the_teachers():
    teacher = tiny()
    assert isinstance(teacher, vq.VQModel)
    codes = np.random.default_rng(0).integers(0, 8, (4, 8, 8))  # two are never seen
    pairs = train_preview.Pairs(codes, vq.to_pixels(teacher, codes))
    found = train_preview.mean_blocks(teacher, pairs)
    blocks = pairs.images.reshape(4, 8, 2, 8, 2, 3).transpose(0, 1, 3, 2, 4, 5)
    np.testing.assert_allclose(found[3], blocks[codes == 3].mean(axis=0).ravel() / 255, atol=1e-5)
    assert all((found[:8] == found[code]).all(axis=1).any() for code in (8, 9))


def test_training_comes_nearer_to_the_teacher():
    teacher = tiny()
    codes = np.random.default_rng(0).integers(0, 10, (32, 8, 8))
    pairs = train_preview.Pairs(codes, vq.to_pixels(teacher, codes))
    found = []
    for steps in (2, 60):
        settings = config.Config(
            optimizer=config.Optimizer(learning_rate=1e-2, warmup_steps=1, b1=0.9, b2=0.99),
            train=config.Train(stage="preview", train_steps=steps, batch_size=4),
        )
        console = rich.console.Console(file=io.StringIO())
        model = train_preview.fit(settings, teacher, 8, pairs, console)
        found.append(train_preview.decibels(pairs.images, vq.to_pixels(model, codes)))
    assert found[1] > found[0] + 0.5


def test_a_folder_of_images_gives_squares_and_too_few_are_refused(tmp_path):
    settings = config.Config(data=config.Data(source="prepared", folder=str(tmp_path)))
    with pytest.raises(config.ConfigError, match="too few images"):
        train_preview._images(settings, SETTINGS)
    rng = np.random.default_rng(0)
    for i in range(16):
        Image.fromarray(rng.integers(0, 256, (20, 40, 3), np.uint8)).save(tmp_path / f"{i}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    known, new = train_preview._images(settings, SETTINGS)
    assert known.shape[1:] == new.shape[1:] == (16, 16, 3)
    assert len(known) + len(new) == 16


def test_a_world_whose_images_do_not_fit_is_refused():
    sizes = config.VQ(channels=(8,) * 7, image_size=64)
    with pytest.raises(config.ConfigError, match="64 pixels a code"):
        train_preview._images(config.Config(), sizes)
