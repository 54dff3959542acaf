# SPDX-License-Identifier: Apache-2.0
"""From a folder of 30 small images with captions to a first sample, in three commands."""

import itertools
import json
import shutil

import numpy as np
import pytest
import raw_data
from PIL import Image, ImageDraw

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.cli import program
from sparse_lavida_jax.convert import from_torch, stand_in
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.lavida_o.chat import ChatTokenizer
from sparse_lavida_jax.models import image_codec, parameters, vq_files
from sparse_lavida_jax.scenes.tokenizer import Tokenizer
from sparse_lavida_jax.training import own_images, start

COLOURS = ("red", "green", "blue", "yellow", "black")
SIZES = {"small": 6, "middling": 10, "large": 14}
TOKENIZER = (
    "--config.vq.channels=(8,8,8)", "--config.vq.latent_channels=4", "--config.vq.codebook_size=16",
    "--config.train.train_steps=6", "--config.train.batch_size=2",
    "--config.optimizer.warmup_steps=1",
)  # fmt: skip
SHORT = (
    "--config.train.train_steps=2", "--config.train.batch_size=2", "--config.train.image_seconds=0",
    "--config.train.log_every=1", "--config.train.eval_prompts=2",
)  # fmt: skip
TINY = (
    "--config.model.width=32", "--config.model.mlp_hidden=48", "--config.model.num_layers=2",
    "--config.model.dual_tower_layers=0", "--config.model.num_heads=2",
    "--config.model.head_dim=16", "--config.model.generation_width=16",
    "--config.model.generation_mlp_hidden=32", "--config.model.vision.num_layers=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of 30 transparent images of shapes, one of them broken, and their captions."""
    folder = tmp_path_factory.mktemp("own") / "images"
    folder.mkdir()
    rows = []
    kinds = itertools.product(COLOURS, ("circle", "square"), SIZES)
    for number, (colour, shape, size) in enumerate(kinds):
        image, edge = Image.new("RGBA", (32, 32)), SIZES[size]
        pen = ImageDraw.Draw(image)
        draw = pen.ellipse if shape == "circle" else pen.rectangle
        draw((16 - edge, 16 - edge, 16 + edge, 16 + edge), fill=colour)
        image.save(folder / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "text": f"a {size} {colour} {shape}"})
    (folder / "29.png").write_bytes(b"broken")
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def front(*words):
    return program.main(["sparse-lavida", *map(str, words)])


def test_too_many_broken_images_are_reported_before_a_tokenizer_is_trained(
    images, tmp_path, capsys
):
    strict = "--config.prepare.max_bad_fraction=0.01"
    assert front("prepare", images, tmp_path / "prepared", strict) == 2
    said = capsys.readouterr().err
    assert "1 of 30 records of text_to_image-1 are bad, and prepare.max_bad_fraction allows" in said
    assert (
        "metadata.jsonl:30: its image 29.png is not an image" in said
        and "is trained on" not in said
    )
    assert "damaged. Repair them" in said
    assert not (tmp_path / "prepared").exists()


@pytest.mark.parametrize("captions", ["table", "text files"])
def test_an_interrupt_of_the_image_tokenizer_leaves_nothing(
    images, tmp_path, capsys, monkeypatch, captions
):
    if captions == "text files":
        shutil.copytree(images, tmp_path / "images", ignore=lambda *_: ["metadata.jsonl"])
        images = tmp_path / "images"
        (images / "0.txt").write_text("a square")

    def interrupted(settings, pixels):
        assert (tmp_path / "new/prepared").is_dir()  # so it can be written to
        raise KeyboardInterrupt

    monkeypatch.setattr(own_images, "_trained", interrupted)
    assert front("prepare", images, tmp_path / "new/prepared") == 130
    assert "is discarded; the same command starts over" in capsys.readouterr().err
    assert not (tmp_path / "new/prepared").exists()
    (tmp_path / "new/prepared/tables").mkdir(parents=True)
    (tmp_path / "new/prepared/tables/mine.txt").touch()
    assert front("prepare", images, tmp_path / "new/prepared") == 130
    assert (tmp_path / "new/prepared/tables/mine.txt").exists()


def test_a_small_image_is_drawn_in_as_many_steps_as_it_has_cells(tmp_path, monkeypatch):
    raw_data.tokenizer(tmp_path)
    monkeypatch.setattr(own_images, "_kinds", lambda _: ())
    monkeypatch.setattr(own_images, "_count", lambda _: 40)
    for size, steps in ((32, 4), (64, 12)):
        images = config.VQ(image_size=size, channels=(8,) * 5)
        monkeypatch.setattr(vq_files, "read_settings", lambda _, images=images: images)
        assert own_images.from_scratch(tmp_path).sampling.num_steps == steps


def test_the_time_for_an_image_tokenizer_is_said_before(monkeypatch):
    train = config.Train(stage="vq", train_steps=600, batch_size=8)
    for side, length in ((64, "5 minutes"), (32, "112 seconds")):
        settings = config.Config(vq=config.VQ(image_size=side, channels=(8,) * 4), train=train)
        said = own_images._length(settings)
        assert said == f"in 600 steps of 8: about {length} of CPU time"
    monkeypatch.setattr(own_images.jax, "default_backend", lambda: "gpu")
    assert own_images._length(settings) == "in 600 steps of 8"


def test_the_image_tokenizer_learns_from_plain_images_too(monkeypatch):
    seen = []

    def fit(settings, survey, images_of, console):
        seen.extend(images_of(0))
        raise KeyboardInterrupt

    monkeypatch.setattr(own_images.train_vq, "fit", fit)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    before, settings = pixels.copy(), config.Config(train=config.Train(batch_size=3))
    with pytest.raises(KeyboardInterrupt):
        own_images._trained(settings, pixels)
    plain, *others = seen
    assert (plain == plain[0, 0]).all() and plain[0, 0] in before[:, 0, 0]
    assert all((one == before).all(axis=(1, 2, 3)).any() for one in others)
    np.testing.assert_array_equal(pixels, before)


@pytest.mark.slow
def test_three_commands_lead_to_a_sample(images, tmp_path, capsys):
    prepared, run, out = tmp_path / "prepared", tmp_path / "run", tmp_path / "out.png"
    assert front("prepare", images, prepared, *TOKENIZER) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{prepared}: 29 records, 1 of 1 shard(s) made now")
    assert "29.png is not an image" in (prepared / "report.md").read_text()
    assert "an image tokenizer of 32x32 pixels, 64 codes an image" in printed.err
    assert "in 6 steps of 2: about 40 seconds of CPU time" in printed.err
    assert "step 6/6" in printed.err
    assert image_files.read(prepared / "reconstructions.png").shape[1] > 4 * 64

    # A second run does no work again.
    digest = image_codec.ImageTokenizer(str(prepared)).digest
    assert front("prepare", images, prepared, *TOKENIZER) == 0
    printed = capsys.readouterr()
    assert "0 of 1 shard(s) made now" in printed.out and "is kept; delete it" in printed.err
    assert image_codec.ImageTokenizer(str(prepared)).digest == digest

    assert front("train", f"--data={prepared}", f"--workdir={run}", *SHORT, *TINY) == 0
    printed = capsys.readouterr()
    assert "2 layers of width 32 is trained from scratch" in printed.err
    assert "\n2 of 2 planned steps, too few; the loss of an image code is " in f"\n{printed.out}"
    assert "the model so far" in printed.out and "the trained model" not in printed.out
    report = (run / "report.md").read_text()
    assert "2 of 2 planned steps, too few" in report and "of their codes" not in report
    assert "each next to the nearest of 29 training images" in report
    assert "No record was held out: that needs at least 100 records in a group." in report
    assert image_files.read(run / "images/nearest.png").shape[1] > 4 * 32
    assert "on the images and texts of `prepared`" in (run / "model/README.md").read_text()
    asked = ("generate", "a purple square", "--checkpoint", run, "--steps", 2, "--out", out)
    assert front(*asked) == 0, capsys.readouterr().err
    assert ": 'purple' is not among them." in capsys.readouterr().err
    assert image_files.read(out).shape == (32, 32, 3)
    assert front("ask", out, "what is it?", "--checkpoint", run) == 2
    assert "was not trained to ask: it learned from text_to_image alone" in capsys.readouterr().err

    # The bundled model has other tokenizers. Its layers and the words that both have are kept.
    more = tmp_path / "more"
    settings = own_images.continued(prepared, "scenes")
    old, new = (
        parameters.by_name(model)
        for model in (
            model_folder.load_model("scenes").model,
            start.init_state(settings, model_folder.make_denoiser(settings)).params,
        )
    )
    spoken = ChatTokenizer(prepared / "tokenizer.json").ids()
    for token, kept in {"Ġred": True, "Ġlayout": False, "<LOC_8>": False}.items():
        rows = (Tokenizer().ids().get(token, 0), spoken[token])
        pair = [tree["text_embedding"][row] for tree, row in zip((old, new), rows, strict=True)]
        assert np.array_equal(*pair) == kept, token
    for name in ("joint_layers/attn_out/kernel", "image_head/code/kernel", "seen_row"):
        np.testing.assert_array_equal(old[name], new[name], err_msg=name)
    assert old["cell_row"].shape != new["cell_row"].shape
    words = ("train", f"--data={prepared}", "--init-from=scenes", f"--workdir={more}")
    assert front(*words, *SHORT) == 0
    assert "whole, with new words and image codes" in capsys.readouterr().err
    assert "`prepared` (seed 0, 2 steps" in (more / "model/README.md").read_text()
    asked = ("generate", "a red square", "--checkpoint", more, "--steps", 2, "--out", out)
    assert front(*asked) == 0, capsys.readouterr().err
    words = (*words[:-1], f"--workdir={tmp_path / 'narrow'}", *SHORT)
    said = told(capsys, *words, "--config.model.width=64")
    assert "has width 96, model.width=64: nothing of it could be taken over" in said
    assert not (tmp_path / "narrow").exists()


@pytest.mark.slow
def test_three_commands_go_on_from_a_converted_model(images, tmp_path, capsys):
    released, base = tmp_path / "released", tmp_path / "base"
    stand_in.write(released, stand_in.tiny_settings())
    from_torch.convert(released, base, dtype="float32")
    prepared, run, out = tmp_path / "prepared", tmp_path / "run", tmp_path / "out.png"
    named = (f"--image-tokenizer={base}", f"--tokenizer={base}")
    assert front("prepare", images, prepared, *named) == 0
    assert (prepared / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    words = ("train", f"--data={prepared}", f"--init-from={base}", f"--workdir={run}", *SHORT)
    assert front(*words) == 0
    assert "trained on" in capsys.readouterr().err
    assert model_folder.read_config(run / "model").data.source == "prepared"
    asked = ("generate", "a red square", "--checkpoint", run, "--steps", 2, "--no-layout")
    assert front(*asked, "--out", out) == 0
    assert "attention of the sampler" not in capsys.readouterr().err  # that it was trained with
    assert image_files.read(out).shape == (32, 32, 3)

    # Continue from that run, with adapters.
    more = tmp_path / "more"
    words = ("train", f"--data={prepared}", f"--init-from={run}", f"--workdir={more}", *SHORT)
    assert front(*words, "--config.lora.rank=2") == 0
    assert "adapters of rank 2" in capsys.readouterr().err
    assert (more / "adapters").is_dir() and (more / "model").is_dir()


def told(capsys, *words):
    assert front(*words) == 2
    return capsys.readouterr().err


def test_what_cannot_be_done_is_reported(images, tmp_path, capsys):
    out = tmp_path / "out"
    assert "No image tokenizer at 'x'" in told(
        capsys, "prepare", images, out, "--image-tokenizer=x"
    )
    said = told(capsys, "prepare", images, out, f"--tokenizer={tmp_path}")
    assert "cannot be used: there is no tokenizer at" in said
    nowhere = tmp_path / "nowhere"
    assert "there is no prepared folder" in told(capsys, "train", f"--data={nowhere}")
    said = told(capsys, "train", f"--data={tmp_path}")
    assert "has no tokenizers for a model from scratch" in said and "--init-from" in said
    assert "--init-from goes with --data" in told(capsys, "train", "--init-from=scenes")
    assert "--data goes without --config" in told(capsys, "train", "x.py", f"--data={out}")
    assert not out.exists()
    (tmp_path / "empty").mkdir()
    assert "add metadata.jsonl with file_name" in told(capsys, "prepare", tmp_path / "empty", out)
