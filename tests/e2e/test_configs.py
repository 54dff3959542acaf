# SPDX-License-Identifier: Apache-2.0
"""Every shipped configuration builds, and its parts fit together."""

import ast
import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
import stand_ins
from flax import nnx

from sparse_lavida_jax import config, orders
from sparse_lavida_jax.data.corrupted_rows import Corrupted
from sparse_lavida_jax.evals import benchmarks, exact
from sparse_lavida_jax.models import image_codec, vq_files
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sampling import plans, presets
from sparse_lavida_jax.scenes import scene_batches, tasks, world
from sparse_lavida_jax.scenes.prompts import ANSWER_TOKENS
from sparse_lavida_jax.training import optimizer, runs

CONFIGS = {  # the one of benchmarks is in test_evaluate.py
    path.stem: path
    for path in sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.py"))
    if path.stem != "evaluate"
}
BUNDLED_BYTES = 16_000_000  # of a model that may come with the package
NOT_SHIPPED = ("scenes_gpu", "art_gpu")  # models that are too large for that


def read(name) -> config.Config:
    return config.read(CONFIGS[name])


DENOISERS = [
    name
    for name in CONFIGS
    if read(name).train.stage == "denoiser" and read(name).data.source == "scenes"
]
PREPARED = [name for name in CONFIGS if read(name).data.source == "prepared"]
ASSIGNED = [name for name in PREPARED if name != "lavida_o_few"]  # whose blocks are chosen by name
each = pytest.mark.parametrize("name", CONFIGS)
each_prepared = pytest.mark.parametrize("name", PREPARED)
each_denoiser = pytest.mark.parametrize("name", DENOISERS)


@each
def test_a_config_is_called_like_its_file_and_says_how_to_run_it(name):
    assert read(name).name == name
    docstring = ast.get_docstring(ast.parse(CONFIGS[name].read_text()))
    if read(name).data.source == "none":
        programs = ("python -m benchmarks.sampling --config=", "sparse-lavida fits ")
    elif name.startswith("ablation_"):
        programs = ("python -m benchmarks.ablation --config=",)
    else:
        programs = ("python -m sparse_lavida_jax.main --config=",)
    known = [f"{program}configs/{name}.py" for program in programs]
    assert any(command in docstring for command in known)


@each
def test_a_config_survives_being_written(name):
    written = json.dumps(config.to_dict(read(name)))
    assert config.build(config.Config, json.loads(written)) == read(name)


@each_denoiser
def test_the_model_knows_the_tokenizer(name):
    model, tokenizer = read(name).model, stand_ins.tokenizer()
    assert model.vocab_size == tokenizer.vocab_size
    assert model.end_of_text_id == tokenizer.end_of_text_id
    assert model.text_mask_id == tokenizer.mask_id


@each_denoiser
def test_the_codes_of_the_images_fit_the_model(name):
    given = read(name)
    place = {"runs/scenes_vq_g4": stand_ins.FOUR_CODES}.get(given.data.image_codec, "scenes")
    codec = image_codec.ImageCodec(place, given.model)  # raises if they do not
    assert given.model.grid_size == world.GRID
    assert codec.image_size == given.vq.image_size


@each_denoiser
def test_tasks_are_known_and_of_the_source(name):
    data = read(name).data
    known = {task for group in scene_batches.GROUPS.values() for task in group}
    assert data.tasks.keys() <= known


@each_denoiser
def test_what_is_laid_out_first_is_learned(name):
    given = read(name)
    if given.sampling.layout:
        needed = {"draw": "layout", "edit": "edit_layout", "inpaint": "fill_layout"}
        assert all(
            layout in given.data.tasks
            for task, layout in needed.items()
            if task in given.data.tasks
        )


@each_denoiser
def test_answers_fit_their_blocks_and_their_space(name):
    data = read(name).data
    assert ANSWER_TOKENS % data.text_block_len == 0
    long = [name for name, task in tasks.TABLE.items() if task.group in ("write", "tell")]
    for task in {*long} & data.tasks.keys():
        for index in range(50):
            answer = tasks.sample(task, exact.EVAL_SEED, index, "test").answer
            assert len(stand_ins.tokenizer().encode(answer)) < data.max_answer_len


@each_denoiser
def test_a_model_samples_as_it_was_trained(name):
    given = read(name)
    model = dataclasses.replace(given.model, trained_attention=given.diffusion.attention)
    chosen = presets.step_settings(given.sampling, model, "image").preset
    assert chosen.full_attention == (given.diffusion.attention == "full")
    side = given.model.grid_size
    plan = plans.image_plan(
        orders.order(given.sampling.order, side, side, given.sampling.order_seed),
        schedule=given.sampling.schedule,
        num_steps=given.sampling.num_steps,
        shift=given.sampling.shift,
    )
    assert plan.num_steps == given.sampling.num_steps
    assert max(given.diffusion.plan_steps) <= side**2


@each_denoiser
def test_the_parameters_have_shapes_and_an_optimizer(name):
    given = read(name)
    params = jax.eval_shape(lambda: Denoiser(given.model, rngs=nnx.Rngs(0)))
    state = jax.eval_shape(optimizer.make_optimizer(given.optimizer).init, params)
    sizes = [np.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
    assert (100_000 < sum(sizes) < BUNDLED_BYTES / 2) == (name not in NOT_SHIPPED)  # 16 bits each
    assert len(jax.tree.leaves(state)) > len(sizes)


@each_denoiser
def test_batches_come_out(name, monkeypatch):
    """One batch of each group, with a stand-in for the image codec."""
    given = read(name)
    few = dataclasses.replace(given.train, batch_size=min(given.train.batch_size, 32))
    given = dataclasses.replace(given, train=few)
    table = np.zeros((world.NUM_APPEARANCES + 1, given.model.codes_per_token), int)
    made = scene_batches.SceneBatches(
        given,
        dataclasses.replace(stand_ins.encoder(given), appearance_codes=table),
    )
    for group in made.groups:
        batch = made.batch(group, 0)
        assert isinstance(batch, Corrupted)
        assert batch.understanding.tokens.shape[0] * given.data.packing == given.train.batch_size


@pytest.mark.parametrize("names", [("scenes_long", "scenes_dense"), ("art", "art_dense")])
def test_the_dense_baseline_differs_in_its_attention_only(names):
    sparse, dense = map(read, names)
    assert (sparse.diffusion.attention, dense.diffusion.attention) == ("step_causal", "full")
    alike = dataclasses.replace(
        dense,
        name=sparse.name,
        data=dataclasses.replace(dense.data, lessons=sparse.data.lessons),
        train=dataclasses.replace(dense.train, train_steps=sparse.train.train_steps),
        diffusion=dataclasses.replace(
            dense.diffusion,
            attention="step_causal",
            layout_first=sparse.diffusion.layout_first,  # plans mean nothing to random masks
        ),
        model=dataclasses.replace(dense.model, trained_attention="step_causal"),
    )
    assert alike == sparse
    pairs = [(one.data.lessons.items(), one.train.train_steps) for one in (sparse, dense)]
    lessons = [sorted((lesson.until, name) for name, lesson in items) for items, _ in pairs]
    assert [name for _, name in lessons[0]] == [name for _, name in lessons[1]]
    tasks = [{name: lesson.tasks for name, lesson in items} for items, _ in pairs]
    assert tasks[0] == tasks[1]
    assert all(lessons[place][-1][0] < pairs[place][1] for place in (0, 1))


def test_the_lessons_of_the_dense_baseline_end_at_the_same_shares_of_its_steps():
    sparse, dense = read("scenes_long"), read("scenes_dense")
    for name, lesson in sparse.data.lessons.items():
        share = lesson.until / sparse.train.train_steps
        assert dense.data.lessons[name].until == pytest.approx(
            share * dense.train.train_steps, abs=1
        )


@each_prepared
def test_registers_are_trained_as_far_as_evaluations_write(name):
    presets = [preset for one in benchmarks.names() for preset in benchmarks.find(one).configs]
    asked = {one: benchmarks.preset(one)["evaluate"].get("max_new_tokens", 0) for one in presets}
    assert max(asked.values()) == 1024
    assert read(name).data.sampled_answer_len >= max(asked.values())


@pytest.mark.parametrize("name", ASSIGNED)
def test_the_assignment_of_the_paper_is_named(name):
    paper = config.read(CONFIGS[name].with_name(f"{name}.py:paper"))
    steps = {"plan_steps": (16, 32, 64), "plan_text_steps": (8, 16, 32)}
    named = {"blocks": "uniform", "num_clean_blocks": 3, "num_masked_blocks": 2}
    assert paper.diffusion == config.Diffusion(**named, **steps, weighting="1/t")
    assert paper.name == f"{name}_paper"
    assert dataclasses.replace(paper, name=name, diffusion=read(name).diffusion) == read(name)
    with pytest.raises(config.ConfigError, match=r"no 'papr'\. There are: plan, "):
        config.read(CONFIGS[name].with_name(f"{name}.py:papr"))


@pytest.mark.parametrize("name", ASSIGNED)
def test_a_run_that_was_begun_with_one_step_of_text_can_go_on(name, tmp_path):
    """Its settings were saved before newer ones existed."""
    once = config.read(CONFIGS[name].with_name(f"{name}.py:one_step"))
    with runs.Run(tmp_path, once) as run:
        run.metrics_path.write_text("")
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    assert written["diffusion"].pop("text_masked_blocks") == 1
    assert written["data"].pop("sampled_answer_len") == 0
    path.write_text(json.dumps(written))
    with runs.Run(tmp_path, once):
        pass
    with pytest.raises(runs.RunError, match="sampled_answer_len was 0 and is 1024"):
        runs.Run(tmp_path, read(name)).__enter__()


def test_the_large_model_of_a_gpu_is_as_it_says():
    """28.9 M parameters, written in 16 bits in files of at most 15 MB, heads for the kernel."""
    large = read("scenes_gpu")
    params = jax.eval_shape(lambda: Denoiser(large.model, rngs=nnx.Rngs(0)))
    assert round(sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6, 1) == 28.9
    assert (large.model.head_dim, large.model.compute_dtype) == (64, "bfloat16")
    assert large.train.model_dtype == "bfloat16" and 0 < large.train.model_file_mb < 15
    tiny = config.read(CONFIGS["scenes_gpu"].with_name("scenes_gpu.py:tiny"))
    short, ends = read("scenes"), [one.until for one in large.data.lessons.values()]
    fraction = large.train.train_steps / 5_845
    assert ends == [round(one.until * fraction) for one in short.data.lessons.values()]
    assert (tiny.data.packing, tiny.data.shapes) == (large.data.packing, large.data.shapes)


def test_the_large_model_of_art_is_as_it_says():
    """33 M parameters, 128x128 pixels; the image tokenizer of 96x96 pixels serves it too."""
    large = read("art_gpu")
    params = jax.eval_shape(lambda: Denoiser(large.model, rngs=nnx.Rngs(0)))
    assert round(sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6) == 33
    codec = image_codec.ImageCodec(large.data.image_codec, large.model)
    assert (codec.image_size, large.model.vision.image_size) == (128, 128)
    pixels = codec.to_pixels(np.zeros((1, 256, 4), np.int32))
    assert pixels.shape == (1, 128, 128, 3)
    assert codec.encode(pixels).shape == (1, 256, 4)
    ends = {name: one.until for name, one in large.data.lessons.items()}
    assert ends == {"name": 240, "look": 600, "parts": 4000}


def test_the_image_tokenizers_are_those_of_their_configs():
    for name, place in (("g1", "scenes"), ("g4", stand_ins.FOUR_CODES)):
        assert vq_files.read_settings(vq_files.find(place)) == read(f"scenes_vq_{name}").vq
