# SPDX-License-Identifier: Apache-2.0
"""A tiny experiment on scenes, with stand-ins for everything slow or trained."""

import contextlib
import functools
import pathlib
from collections.abc import Iterable, Iterator

import jax
import numpy as np
import tiny

from sparse_lavida_jax import config, sequence
from sparse_lavida_jax import pipeline as pipelines
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.inference.batch_shapes import Bucket
from sparse_lavida_jax.inference.engine import Engine, SampleOutput
from sparse_lavida_jax.inference.results import Origin, Result
from sparse_lavida_jax.models import vq_files
from sparse_lavida_jax.models.image_codec import ImageCodec
from sparse_lavida_jax.scenes import scene_batches as data_batches
from sparse_lavida_jax.scenes import tasks, world
from sparse_lavida_jax.scenes.prompts import ExampleMaker, ScenePrompts, encoder_of
from sparse_lavida_jax.scenes.scene_batches import SceneBatches
from sparse_lavida_jax.scenes.tokenizer import SHIPPED, Tokenizer
from sparse_lavida_jax.training import sources

VISION = config.Vision(
    image_size=48, patch_size=16, width=16, num_layers=1, num_heads=2, mlp_hidden=24, pool=1
)
TASKS = {"draw": 1.0, "answer": 1.0}
FOUR_CODES = pathlib.Path(__file__).parent / "data/vq/scenes_g4"  # an image tokenizer
EMPTY = world.render(world.EMPTY_SCENE)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer()


class Codec(ImageCodec):
    """Reads and draws scenes exactly: the appearance of a cell is its code."""

    folder = None
    image_size = world.IMAGE_SIZE

    def __init__(self, *_):
        pass

    def encode(self, pixels):
        return np.array([world.read(image).cells for image in pixels])[..., None]

    def to_pixels(self, cells, rows=None, dtype="float32"):
        appearances = np.minimum(cells[..., 0], world.NUM_APPEARANCES)
        return np.stack([world.render(grid.reshape(6, 6)) for grid in appearances])


def settings(**sections) -> config.Config:
    """Returns a whole configuration of two tiny layers; a section is a dict of its changes."""
    values = {
        "name": "tiny",
        "model": tiny.model_settings(
            vocab_size=tokenizer().vocab_size, grid_size=6, codebook_size=64, vision=VISION,
            num_layers=2, dual_tower_layers=0, unroll_layers=True,
        ),
        "data": {"tasks": TASKS, "max_answer_len": 16},
        "diffusion": {"num_masked_blocks": 2, "plan_steps": (4,), "plan_text_steps": (2,)},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2, "ema": 0.9},
        "train": {
            "train_steps": 4, "batch_size": 2, "image_seconds": 0.0, "log_every": 1,
            "eval_prompts": 2,
        },
        "sampling": {"num_steps": 2, "schedule": "linear", "text": {"steps": 1}},
    }  # fmt: skip
    for name, changes in sections.items():
        changed = isinstance(values.get(name), dict) and isinstance(changes, dict)
        values[name] = values[name] | changes if changed else changes
    return config.build(config.Config, values)


def model_of_every_task(folder: pathlib.Path) -> pathlib.Path:
    """Writes a model folder with arbitrary weights, marked as trained on every task."""
    every_task = dict.fromkeys((*tasks.TASKS, "fill_layout"), 1.0)
    given = settings(data={"tasks": every_task, "max_answer_len": 16})
    model_folder.save_model(
        folder,
        tiny.denoiser(given.model),
        given,
        tokenizer_path=SHIPPED,
        vq_folder=vq_files.find("scenes"),
        readme="",
    )
    return folder


def command_line(folder: pathlib.Path, given: config.Config) -> list[str]:
    """Writes a config file with the tasks, and returns flags for everything else."""
    path = folder / f"{given.name}.py"
    sections = {"name": given.name, "data": {"tasks": given.data.tasks}}
    path.write_text(
        "import ml_collections\n\n"
        f"def get_config():\n    return ml_collections.ConfigDict({sections})\n"
    )
    words = [f"--config={path}"]

    def add(prefix, section):
        for name, value in section.items():
            if isinstance(value, dict):
                add(f"{prefix}.{name}", value)
            else:
                words.append(f"{prefix}.{name}={value}")

    everything = config.to_dict(given)
    del everything["data"]["tasks"]
    add("--config", everything)
    return words


def encoder(given: config.Config) -> ExampleMaker:
    return encoder_of(tokenizer(), given, Codec())


def prompts(given: config.Config) -> ScenePrompts:
    return ScenePrompts(encoder(given))


def batches(given: config.Config) -> SceneBatches:
    return SceneBatches(given, encoder(given))


def pipe_of_tasks(trained, batch_size: int, **sampling) -> pipelines.SparseLaViDa:
    """Returns a pipeline with arbitrary weights that learned some tasks of the small world."""
    given = settings(
        data={"tasks": dict.fromkeys(trained, 1.0), "max_answer_len": 16},
        sampling={"schedule": "linear", "temperature": 1.0, **sampling},
    )
    parts = tiny.denoiser(given.model), given, prompts(given), Codec()
    return pipelines.SparseLaViDa(*parts, batch_size)


def without_waiting(monkeypatch) -> None:
    """Replaces the trained codec by the exact one; uses few examples to determine shapes."""
    monkeypatch.setattr(sources, "ImageCodec", Codec)
    monkeypatch.setattr(data_batches, "LENGTH_PROBE", 16)


class Knowing(pipelines.SparseLaViDa):
    """Returns correct responses from memory, or empty texts and images.

    Args:
        samples: the expected requests; those with the same prompt and image share a response.
        ignorant: ignore the samples.
    """

    def __init__(self, given: config.Config, samples: Iterable[tasks.Sample], *, ignorant=False):
        self.settings, self.prompts = given, prompts(given)
        self.engine = Engine(tiny.denoiser(given.model), 2, given.data.text_block_len)
        self.ignorant, self.codec = ignorant, Codec()
        self.images, self.answers, self.calls = {}, {}, []
        for sample in samples:
            shown = None if sample.image is None else world.render(sample.image)
            known = self.answers if sample.target is None else self.images
            known[_key(sample.prompt, shown)] = sample if sample.target is None else sample.target

    def generate(self, prompt, *, seed=0, **_):
        self.calls.append(("draw", seed))
        return self._drawn(prompt, [None] * len(prompt))

    def edit(self, shown, instruction, *, seed=0, **_):
        self.calls.append(("edit", seed))
        return self._drawn(instruction, shown)

    def inpaint(self, shown, prompt, *, seed=0, **_):
        self.calls.append(("fill", seed))
        return self._drawn(prompt, shown)

    def outpaint(self, shown, prompt, *, seed=0, **_):
        self.calls.append(("extend", seed))
        return self._drawn(prompt, shown)

    def sample(self, examples, *, seed=0, **_):
        self.calls.append(("sample", seed))
        if self.ignorant:
            nothing = {"text": self.settings.model.text_mask_id, "image": world.EMPTY}
            return [e.response * 0 + nothing[e.modality] for e in examples]
        return [self._answer(example) for example in examples]

    def _answer(self, example):
        """Given tokens and images are correct already; other answers come from memory."""
        if example.given.any() or example.modality == "image":
            return example.response
        words = [p.ids for p in example.parts if isinstance(p, sequence.Text) and not p.keep]
        said = self.tokenizer.decode(words[0].tolist())
        sample = next(s for s in self.answers.values() if self._is_of(s, said, example.pixels))
        length = max(len(example.response), 40)
        return self.encoder.text_example("", sample.answer, length=length).response

    def _is_of(self, sample, words, pixels):
        if sample.prompt != words or (sample.image is None) != (pixels is None):
            return False
        if pixels is None:
            return True
        shown = world.render(sample.image, self.settings.vq.image_size)
        return np.array_equal(self.prompts._seen(shown), pixels)

    def _drawn(self, prompts, shown):
        asked = zip(prompts, shown, strict=True)
        pixels = tuple(
            EMPTY if self.ignorant else world.render(self.images[_key(*one)]) for one in asked
        )
        return Result("", (), (), self.settings.sampling, Origin(), {}, pixels=pixels)


def sample_output(responses) -> SampleOutput:
    """Returns responses as `Engine.sample` does."""
    made = list(responses)
    return SampleOutput(made, [Bucket(1, (16, 0))] * len(made), [0] * len(made), [0] * len(made))


def _key(prompt, image):
    return prompt, None if image is None else image.tobytes()


@contextlib.contextmanager
def quick_compilation() -> Iterator[None]:
    """Compiles fast rather than well, for programs that run only a few times."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def assert_equal(tree, other) -> None:
    """Asserts that two trees of arrays have the same leaves to the bit."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, two)
