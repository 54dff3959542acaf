# SPDX-License-Identifier: Apache-2.0
"""The loss is the right mean, a step learns, and the loop loses nothing.

The loop runs with a stand-in for the step, which needs no compilation; `tests/e2e` runs the real
one.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import phase_programs
import pytest
import stand_ins
import tiny

from sparse_lavida_jax import config, diffusion, train
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.checkpoints.tensors import list_tensors
from sparse_lavida_jax.convert import adapters
from sparse_lavida_jax.data.batch import RowShape
from sparse_lavida_jax.data.corrupted_rows import Corrupted, CorruptedRow
from sparse_lavida_jax.evals import training_report
from sparse_lavida_jax.models import lora, parameters, quantize, sharding
from sparse_lavida_jax.models.denoiser import shapes as denoiser_shapes
from sparse_lavida_jax.programs import side_by_side
from sparse_lavida_jax.scenes.tokenizer import SHIPPED
from sparse_lavida_jax.training import metrics, optimizer, runs, start, states, style
from sparse_lavida_jax.training import step as training_step


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    stand_ins.without_waiting(monkeypatch)
    with stand_ins.quick_compilation():
        yield


# ---------------------------------------------------------------------------------------------
# The loss.


def a_text_and_an_image_row(model) -> Corrupted:
    """Two rows that share a batch, of different lengths and weights."""
    rng, rows = np.random.default_rng(0), []
    settings = config.Diffusion(num_masked_blocks=2)
    for seed, modality in enumerate(("text", "image")):
        one = tiny.request(modality, model, seed, words=4)
        blocks = diffusion.uniform_blocks(rng, one.given, settings)
        prompt = tiny.sample_input(one, model)
        rows.append(CorruptedRow(prompt, one.response, modality, blocks, model))
    return tiny.stacked(rows, model, RowShape(32, 24))


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    largest = logits.max(axis=-1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))


def test_the_loss_averages_text_and_codes_apart_and_adds_them():
    """Compared with loops over rows, tokens and codes."""
    model = tiny.model_settings(codes_per_token=4)
    params, batch = tiny.denoiser(model), a_text_and_an_image_row(model)

    def everything(params, batch):
        hidden, _ = params(batch.understanding, batch.generation, wanted="both")
        text, image = (
            params.text_logits(hidden["understanding"]),
            params.image_logits(hidden["generation"]),
        )
        return training_step.loss(params, batch), text, image

    (value, logged), text, image = tiny.quick_jit(everything)(params, batch)
    text, image = log_softmax(text), log_softmax(image)
    text_sum = image_sum = text_plain = image_plain = 0.0
    text_count = image_count = 0
    for b in range(2):
        for s in range(32):
            nll = -text[b, s, batch.text_target[b, s]]
            text_sum += batch.text_weight[b, s] * nll
            text_plain += nll * (batch.text_weight[b, s] > 0)
            text_count += int(batch.text_weight[b, s] > 0)
        for s, g in itertools.product(range(24), range(4)):
            nll = -image[b, s, g, batch.image_target[b, s, g]]
            image_sum += batch.image_weight[b, s] * nll
            image_plain += nll * (batch.image_weight[b, s] > 0)
            image_count += int(batch.image_weight[b, s] > 0)
    assert batch.text_total.tolist() == [tiny.TEXT_LEN, 0]
    assert batch.image_total.tolist() == [0, tiny.IMAGE_LEN]
    expected = text_sum / tiny.TEXT_LEN + image_sum / (4 * tiny.IMAGE_LEN)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(logged["text_nll"], text_plain / text_count, rtol=1e-5)
    np.testing.assert_allclose(logged["image_nll"], image_plain / image_count, rtol=1e-5)


def test_codes_may_have_weights_of_their_own():
    """Equal weights act like a weight of the token; others are compared with loops."""
    model = tiny.model_settings(codes_per_token=4)
    params, batch = tiny.denoiser(model), a_text_and_an_image_row(model)
    batch = dataclasses.replace(batch, text_weight=np.zeros_like(batch.text_weight))
    shape = batch.image_target.shape
    equal = np.broadcast_to(batch.image_weight[..., None], shape)
    rng = np.random.default_rng(0)
    other = equal * rng.uniform(0.5, 2.0, shape).astype(np.float32)

    @tiny.quick_jit
    def losses(params, batches):
        plain = batches[0]
        hidden, _ = params(plain.understanding, plain.generation, wanted="both")
        logits = params.image_logits(hidden["generation"])
        return [training_step.loss(params, weighted)[0] for weighted in batches], logits

    batches = [dataclasses.replace(batch, image_weight=w) for w in (equal, other)]
    (plain, same, weighted), logits = losses(params, [batch, *batches])
    np.testing.assert_allclose(same, plain, rtol=1e-6)
    nll = -log_softmax(logits)
    total = sum(
        other[place] * nll[(*place, batch.image_target[place])] for place in np.ndindex(shape)
    )
    np.testing.assert_allclose(weighted, total / (4 * tiny.IMAGE_LEN), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [2, 4])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(microbatches):
    """Texts and images of different lengths, so that the sums of all parts differ."""
    model = tiny.model_settings(codes_per_token=4)
    params = tiny.denoiser(model)
    batch = tiny.batch(["text", "image", "image", "text"], model)
    whole = tiny.quick_jit(training_step.gradient)(params, batch)
    parts = tiny.quick_jit(
        lambda *given: training_step.gradient(*given, microbatches=microbatches, chunk=3)
    )(params, batch)
    for one, other in zip(*map(jax.tree.leaves, (parts, whole)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("backend", "rows_at_a_time", "parts"),
    [("cpu", 4, 1), ("cpu", 3, 2), ("cpu", 2, 2), ("cpu", 0, 4), ("gpu", 1, 1)],
)
def test_a_cpu_passes_as_many_rows_at_a_time_as_its_caches_hold(
    backend, rows_at_a_time, parts, monkeypatch
):
    batch = tiny.batch(["image"] * 4, tiny.model_settings())
    row = batch.understanding.tags.block.shape[1] + batch.generation.tags.block.shape[1]
    monkeypatch.setattr(training_step, "CPU_TOKENS", rows_at_a_time * row + 1)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert training_step.default_microbatches(batch) == parts


# ---------------------------------------------------------------------------------------------
# One step.


@pytest.fixture(scope="module")
def steps():
    """Twelve steps on one batch: logs, and copies of the states, since steps donate theirs."""
    settings = stand_ins.settings(optimizer={"weight_decay": 0.0, "clip_norm": 1.0})
    with pytest.MonkeyPatch.context() as patch, stand_ins.quick_compilation():
        stand_ins.without_waiting(patch)
        batch = stand_ins.batches(settings).batch("draw", 0)
        state = train.init_state(settings, tiny.denoiser(settings.model))
        states, logs = [jax.tree.map(jnp.copy, state)], []
        for _ in range(12):
            state, logged = train.train_step(
                state, batch, np.float32(3e-3), settings=settings.optimizer
            )
            states.append(jax.tree.map(jnp.copy, state))
            logs.append({name: float(value) for name, value in logged.items()})
    return settings, states, logs


def test_steps_on_one_batch_lower_its_loss(steps):
    losses = [logged["loss"] for logged in steps[2]]
    assert losses[-1] < 0.7 * losses[0]
    assert all("image_nll" in logged and "text_nll" not in logged for logged in steps[2])


def test_a_state_held_as_a_list_takes_the_same_steps(steps):
    """Bit for bit, with one program."""
    settings, states, logs = steps
    batch = stand_ins.batches(settings).batch("draw", 0)
    held = train.HeldState.of(jax.tree.map(jnp.copy, states[0]))
    number = train.train_step._cache_size()
    for expected, values in zip(states[1:4], logs[:3], strict=True):
        held, logged = train.train_step(held, batch, np.float32(3e-3), settings=settings.optimizer)
        assert isinstance(held, train.HeldState)
        assert {name: float(value) for name, value in logged.items()} == values
        assert jax.tree.structure(held.state) == jax.tree.structure(expected)
        stand_ins.assert_equal(held.state, expected)
    assert train.train_step._cache_size() == number + 1
    again = train.HeldState.of(jax.tree.map(jnp.copy, states[0]))
    assert jax.tree.structure(again) == jax.tree.structure(held)


def test_a_step_without_a_finite_gradient_changes_nothing():
    settings = stand_ins.settings()
    batch = stand_ins.batches(settings).batch("draw", 0)
    state = train.init_state(settings, tiny.denoiser(settings.model))
    before = jax.tree.map(jnp.copy, state)
    broken = dataclasses.replace(batch, image_weight=batch.image_weight * np.nan)
    for expected in (1, 2):
        state, logged = train.train_step(
            state, broken, np.float32(1e-2), settings=settings.optimizer
        )
        assert int(logged["skipped"]) == int(state.skipped) == expected
    for name in ("params", "ema", "opt_state"):
        stand_ins.assert_equal(getattr(state, name), getattr(before, name))
    state, logged = train.train_step(state, batch, np.float32(1e-2), settings=settings.optimizer)
    assert (int(state.step), int(state.skipped), int(logged["skipped"])) == (3, 0, 0)
    assert not np.array_equal(
        state.params.image_embedding.table[...], before.params.image_embedding.table[...]
    )


@pytest.mark.slow
def test_a_step_over_a_mesh_is_that_of_one_device():
    """Rows over `fsdp`, parameters over `fsdp` and `tensor`; all keep their placement."""
    settings = stand_ins.settings()
    batch = stand_ins.batches(settings).batch("draw", 0)
    alone = train.init_state(settings, tiny.denoiser(settings.model))
    mesh = sharding.automatic({"fsdp": 2, "tensor": -1})
    spread = sharding.place_state(jax.tree.map(jnp.copy, alone), mesh)
    split = [not x.sharding.is_fully_replicated for x in jax.tree.leaves(spread.opt_state)]
    assert sum(split) > len(split) / 3
    where = [x.sharding for x in jax.tree.leaves(spread)]
    alone, logged = train.train_step(alone, batch, np.float32(1e-2), settings=settings.optimizer)
    with jax.set_mesh(mesh):
        spread, same = train.train_step(
            spread, sharding.place_batch(batch, mesh), np.float32(1e-2), settings=settings.optimizer
        )
    np.testing.assert_allclose(same["loss"], logged["loss"], rtol=1e-6)
    np.testing.assert_allclose(same["gradient_norm"], logged["gradient_norm"], rtol=1e-5)
    # Compares moments, since a first step is as large even if the gradient is only rounding.
    for one, other in zip(*(jax.tree.leaves(s.opt_state) for s in (spread, alone)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * max(np.abs(other).max(initial=0), 1e-6))
    for leaf, place in zip(jax.tree.leaves(spread), where, strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    # NaN on a single device: the step is skipped on all of them.
    before = jax.tree.map(np.array, spread.params)
    weight = batch.image_weight.copy()
    weight[0] *= np.nan
    broken = sharding.place_batch(dataclasses.replace(batch, image_weight=weight), mesh)
    with jax.set_mesh(mesh):
        spread, logged = train.train_step(
            spread, broken, np.float32(1e-2), settings=settings.optimizer
        )
    for number in (spread.skipped, logged["skipped"]):
        assert {int(shard.data) for shard in number.addressable_shards} == {1}
    stand_ins.assert_equal(jax.tree.map(np.asarray, spread.params), before)


@pytest.mark.slow
def test_the_released_objective_is_learned_text_and_images_together():
    released = {"corruption": "released", "attention": "full", "weighting": "mean"}
    settings = stand_ins.settings(diffusion=released, data={"tasks": {"draw": 1.0}})
    batch = stand_ins.batches(settings).batch("draw", 0)
    state, logs = train.init_state(settings, tiny.denoiser(settings.model)), []
    for _ in range(12):
        state, logged = train.train_step(
            state, batch, np.float32(3e-3), settings=settings.optimizer
        )
        logs.append({name: float(value) for name, value in logged.items()})
    for name in ("text_nll", "image_nll"):
        assert logs[-1][name] < 0.7 * logs[0][name]
    np.testing.assert_allclose(logs[0]["loss"], logs[0]["text_nll"] + logs[0]["image_nll"])


def test_a_step_counts_and_changes_every_parameter_that_was_used(steps):
    _, states, _ = steps
    assert [int(state.step) for state in states] == list(range(13))
    unused = {"text_head", "vision", "seen"}  # drawing predicts no text and has no input image
    for (path, before), after in zip(
        jax.tree.leaves_with_path(states[0].params), jax.tree.leaves(states[1].params), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if np.array_equal(before, after):
            assert any(word in name for word in unused) or "understanding" in name, name


def test_the_average_forgets_its_start_and_follows_the_parameters(steps):
    settings, states, _ = steps
    assert settings.optimizer.ema == 0.9
    average = states[0].params.image_embedding.table[...]
    for k, state in enumerate(states[1:]):
        decay = min(0.9, (1 + k) / (10 + k))
        average = decay * average + (1 - decay) * state.params.image_embedding.table[...]
        np.testing.assert_allclose(
            state.ema.image_embedding.table[...], average, rtol=1e-5, atol=1e-6
        )
    assert train.averaged(states[-1]) is states[-1].ema


def test_without_an_average_the_parameters_are_sampled():
    settings = stand_ins.settings(optimizer={"ema": 0.0})
    state = train.init_state(settings, tiny.denoiser(settings.model))
    assert state.ema is None
    assert train.averaged(state) is state.params


def test_training_starts_from_a_checkpoint_of_the_same_shapes_only(tmp_path):
    settings = stand_ins.settings()
    trained = tiny.denoiser(settings.model)
    model_folder.save_model(
        tmp_path / "dense",
        trained,
        dataclasses.replace(
            settings, model=dataclasses.replace(settings.model, trained_attention="full")
        ),
        tokenizer_path=SHIPPED,
        vq_folder=None,
        readme="",
    )
    fine_tuned = stand_ins.settings(train={"init_from": str(tmp_path / "dense")})
    fresh = jax.tree.map(jnp.zeros_like, trained)
    state = train.init_state(fine_tuned, fresh)
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(trained), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert state.params.settings == settings.model
    wider = dataclasses.replace(
        fine_tuned, model=dataclasses.replace(settings.model, generation_width=28)
    )
    with pytest.raises(model_folder.CheckpointError, match=r"cell_column: \(6, 24\) on disk"):
        train.init_state(wider, fresh)
    deeper = dataclasses.replace(
        fine_tuned,
        model=dataclasses.replace(settings.model, num_layers=settings.model.num_layers + 1),
    )
    start.check(fine_tuned)
    with pytest.raises(
        config.ConfigError, match=r"has another model than the config: num_layers \d"
    ):
        start.check(deeper)
    hasty = stand_ins.settings(sampling={"num_steps": settings.model.num_cells + 1})
    with pytest.raises(config.ConfigError, match=r"Add --config.sampling.num_steps=\d+, or less"):
        start.check(hasty)


# ---------------------------------------------------------------------------------------------
# A part of the model.


@pytest.fixture(scope="module")
def base_model(tmp_path_factory):
    """A model folder that adapters are trained for."""
    settings, folder = stand_ins.settings(), tmp_path_factory.mktemp("base") / "model"
    model_folder.save_model(
        folder,
        tiny.denoiser(settings.model),
        settings,
        tokenizer_path=SHIPPED,
        vq_folder=None,
        readme="",
    )
    return folder


def with_adapters(base_model, frozen_dtype="bfloat16", **sections):
    return stand_ins.settings(
        lora={"rank": 2},
        optimizer={"frozen_dtype": frozen_dtype},
        train={"init_from": str(base_model), "train_steps": 4},
        **sections,
    )


@pytest.mark.parametrize("frozen_dtype", ["bfloat16", pytest.param("int8", marks=pytest.mark.slow)])
def test_adapters_are_trained_and_their_base_is_frozen(base_model, frozen_dtype):
    settings = with_adapters(base_model, frozen_dtype)
    batch = stand_ins.batches(settings).batch("draw", 0)
    state = train.init_state(settings, jax.eval_shape(lambda: tiny.denoiser(settings.model)))
    whole = jax.tree.map(jnp.copy, parameters.joined(state.params, state.frozen))
    expected = tiny.quick_jit(training_step.loss)(whole, batch)[0]
    frozen, logs = jax.tree.map(np.asarray, state.frozen), []
    names = set(parameters.by_name(state.params))
    assert names == set(parameters.by_name(state.ema))
    assert all("lora" in name or name.startswith("register") for name in names)
    for _ in range(12):
        state, logged = train.train_step(
            state, batch, np.float32(1e-2), settings=settings.optimizer
        )
        logs.append(float(logged["loss"]))
    np.testing.assert_allclose(logs[0], expected, rtol=1e-5)
    assert logs[-1] < 0.9 * logs[0]
    stand_ins.assert_equal(jax.tree.map(np.asarray, state.frozen), frozen)
    saved = parameters.by_name(state.saved)
    assert sum(x.nbytes for x in saved.values()) < sum(x.nbytes for x in jax.tree.leaves(frozen))


@pytest.mark.slow
def test_a_base_in_8_bits_is_near_the_base_and_comes_out_wide_with_its_adapters(base_model):
    settings = with_adapters(base_model, "int8")
    state = train.init_state(settings, jax.eval_shape(lambda: tiny.denoiser(settings.model)))
    frozen, base = (parameters.by_name(x) for x in (state.frozen, tiny.denoiser(settings.model)))
    dtypes = {str(leaf.dtype) for name, leaf in frozen.items() if "_layers/" in name}
    assert dtypes == {"int8", "float32", "bfloat16"}  # matrices, their scales, norms
    adapted = parameters.by_name(state.params)
    change = jax.random.normal(
        jax.random.key(1), adapted[(b := "joint_layers/generation/q/lora_b")].shape
    )
    trained = parameters.replaced(state.params, {b: change})
    whole = parameters.joined(trained, state.frozen)
    wide = parameters.by_name(lora.merged(quantize.widened(whole, "float32")))
    assert wide.keys() == base.keys()
    for name, leaf in wide.items():
        moved = name == "joint_layers/generation/q/kernel"
        expected = np.asarray(base[name], np.float32)
        if moved:
            a = np.asarray(adapted["joint_layers/generation/q/lora_a"])
            expected = expected + settings.lora.alpha / settings.lora.rank * a @ np.asarray(change)
        largest = np.abs(np.asarray(base[name], np.float32)).max()
        np.testing.assert_allclose(
            leaf.astype(np.float32), expected, rtol=0.01, atol=0.01 * largest
        )


def test_a_matrix_in_8_bits_is_not_trained(base_model):
    settings = with_adapters(base_model, "int8")
    groups = (("generation/q/kernel$", 1e-4),)
    settings = dataclasses.replace(
        settings, optimizer=dataclasses.replace(settings.optimizer, groups=groups)
    )
    model = tiny.denoiser(settings.model)
    adapted = jax.eval_shape(lambda: lora.begin(settings, model, jax.random.key(0)))
    with pytest.raises(config.ConfigError, match=r"train joint_layers/generation/q/kernel: freeze"):
        optimizer.parted(settings, adapted)
    with pytest.raises(config.ConfigError, match=r"'int8' holds the base of adapters"):
        stand_ins.settings(optimizer={"frozen_dtype": "int8"})


def test_adapters_need_a_base():
    settings = stand_ins.settings(lora={"rank": 2})
    with pytest.raises(config.ConfigError, match=r"rank=2 needs a base model.*init_from"):
        train.init_state(settings, tiny.denoiser(settings.model))


@pytest.mark.parametrize("modalities", [["image", "image"], ["text", "image"]])
@pytest.mark.parametrize("remat", [pytest.param("attention", marks=pytest.mark.slow), "layer"])
def test_what_is_kept_of_a_layer_changes_no_gradient(remat, modalities):
    model = tiny.model_settings()
    params, batch = tiny.denoiser(model), tiny.batch(modalities, model)
    less = params_with(params, dataclasses.replace(model, remat=remat))
    plain, same = (tiny.quick_jit(training_step.gradient)(each, batch) for each in (params, less))
    for one, other in zip(*map(jax.tree.leaves, (plain, same)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=2e-6)


def params_with(params, settings):
    """The same parameters in a model with other settings."""
    like = jax.tree.structure(denoiser_shapes(settings))
    return jax.tree.unflatten(like, jax.tree.leaves(params))


# ---------------------------------------------------------------------------------------------
# The loop.


@pytest.fixture
def loop(monkeypatch, tmp_path):
    """Runs the loop in `tmp_path / "run"` with a step that only counts.

    `loop.losses` are by step, 1.0 by default; `loop.before_step` is called with the number of each
    step; `loop.batches` and `loop.rates` are the inputs of the steps. Writing the model folder
    takes half the time of a run, and is done only with `loop.leaves_model`.
    """
    ours = types.SimpleNamespace(losses={}, batches=[], rates=[], images=[], written=[])
    ours.before_step, ours.leaves_model = lambda step: None, False
    save_model = model_folder.save_model

    def save(*args, **more):
        if ours.leaves_model:
            save_model(*args, **more)

    def step(state, batch, learning_rate, *, settings, microbatches, loss_chunk):
        state = state.state
        done = int(state.step) + 1
        ours.before_step(done)
        ours.batches.append(batch)
        ours.rates.append(float(learning_rate))
        value = jnp.float32(ours.losses.get(done, 1.0))
        skipped = jnp.where(jnp.isfinite(value), 0, state.skipped + 1)
        logged = {"loss": value, "gradient_norm": 2 * value, "skipped": skipped}
        return train.HeldState.of(state.replace(step=jnp.int32(done), skipped=skipped)), logged

    def check(pipe, path, prompts):
        ours.images.append(path.name)
        return {"draw": 0.25}

    def write(pipe, folder, *, step, seconds, data):
        assert data is None  # scenes are generated, so nothing can be memorised
        ours.written.append(step)
        return folder / "report.md"

    monkeypatch.setattr(train, "train_step", step)
    monkeypatch.setattr(train, "Denoiser", lambda settings, rngs: tiny.denoiser(settings))
    monkeypatch.setattr(model_folder, "save_model", save)
    monkeypatch.setattr(training_report, "check", check)
    monkeypatch.setattr(training_report, "write", write)

    def run(profile=range(0), **changes):
        given = stand_ins.settings(train=changes)
        with runs.Run(tmp_path / "run", given) as opened:
            train.train(given, opened, profile)

    ours.run, ours.folder = run, tmp_path / "run"
    return ours


def logged_steps(loop):
    return [line["step"] for line in metrics.read_metrics(loop.folder / "metrics.jsonl")]


def test_every_so_many_steps_and_the_last_one_are_logged(loop, capsys):
    loop.run(train_steps=5, log_every=2)
    lines = metrics.read_metrics(loop.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 5]
    fraction = lines[0].pop("loss_fraction")
    assert 0 < fraction < 1
    assert lines[0] == {
        "step": 2, "loss": 1.0, "gradient_norm": 2.0, "learning_rate": pytest.approx(loop.rates[1]),
    }  # fmt: skip
    for line in lines[1:]:  # the first step compiles, and the peak of this device is unknown
        assert line["tokens_per_second"] > 0 and 0 <= line["data_wait"] <= 1
        assert "mfu" not in line
    assert loop.written == [5]
    assert f"{loop.folder / 'model'}: the trained model" in capsys.readouterr().out


@pytest.mark.slow
def test_the_steps_to_trace_are_traced(loop):
    """The trace is written after the last of them, or at the end of a shorter run."""
    traces, seen = loop.folder / "profile", []
    loop.before_step = lambda step: seen.append(len([*traces.rglob("*.xplane.pb")]))
    loop.run(range(1, 3), train_steps=5)
    assert seen == [0, 0, 0, 1, 1]
    (written,) = traces.rglob("*.xplane.pb")
    assert written.stat().st_size > 0
    for folder in traces.iterdir():
        shutil.rmtree(folder)
    loop.run(range(5, 99), train_steps=6)
    assert [*traces.rglob("*.xplane.pb")]


def test_a_finished_run_holds_a_model_that_can_be_loaded(loop):
    loop.leaves_model = True
    loop.run(train_steps=2)
    loaded = model_folder.load_model(loop.folder)
    assert loaded.config.name == "tiny"
    assert loaded.config.model.trained_attention == "step_causal"
    assert loaded.tokenizer_path.read_bytes() == SHIPPED.read_bytes()
    loop.run(train_steps=2)  # again: only the report is left to do
    assert len(loop.batches) == 2
    assert loop.written == [2, 2]


def test_a_model_is_written_in_the_dtype_and_the_files_that_are_asked_for(loop):
    loop.leaves_model = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "BYTES_PER_MB", 10_000)
        loop.run(train_steps=1, model_dtype="bfloat16", model_file_mb=2)
    files = sorted((loop.folder / "model").glob("model-*.safetensors"))
    tensors = [one for path in files for one in list_tensors(path).values()]
    assert len(files) > 2 and {one.dtype for one in tensors} == {"BF16"}
    held = [sum(one.nbytes for one in list_tensors(path).values()) for path in files]
    assert max(held) <= max(20_000, max(one.nbytes for one in tensors))
    loaded = model_folder.load_model(loop.folder).model
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.denoiser(loaded.settings))
    for one, other in zip(*map(jax.tree.leaves, (loaded, expected)), strict=True):
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize(("frozen_dtype", "error"), [("bfloat16", 0), ("int8", 0.01)])
def test_a_run_with_adapters_resumes_and_leaves_them_and_a_merged_model(
    loop, base_model, frozen_dtype, error
):
    given, loop.leaves_model = with_adapters(base_model, frozen_dtype), True
    loop.before_step = lambda step: step == 3 and os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(runs.Interrupted), runs.Run(loop.folder, given) as opened:
        train.train(given, opened)
    state = sum(path.stat().st_size for path in loop.folder.glob("state/**/*") if path.is_file())
    model = sum(path.stat().st_size for path in base_model.glob("model.safetensors"))
    assert state < model  # frozen parameters are not saved again
    with runs.Run(loop.folder, given) as opened:
        train.train(given, opened)
    assert len(loop.batches) == 4
    folder, base = loop.folder / "adapters", model_folder.load_model(base_model).model
    merged, _ = adapters.added(base, given, base_model, {str(folder): 1.0})
    written = model_folder.load_model(loop.folder).model
    for ours, theirs, before in zip(*map(jax.tree.leaves, (written, merged, base)), strict=True):
        near = {"rtol": 2**-8, "atol": error * np.abs(before).max()}  # in bfloat16 on disk
        np.testing.assert_allclose(ours, theirs, **near)
        np.testing.assert_allclose(ours, before, **near)  # this step trains nothing


def test_the_run_that_adds_a_style_code_measures_what_it_sees(loop, tmp_path, monkeypatch):
    monkeypatch.setattr(style, "MEASURED", 16)
    loop.leaves_model, measured, measure = True, [], style.measured
    new = {"style_code/seen_mean": np.zeros(stand_ins.settings().model.generation_width)}
    made = lambda settings, rngs: parameters.replaced(tiny.denoiser(settings), new)  # noqa: E731
    monkeypatch.setattr(train, "Denoiser", made)
    monkeypatch.setattr(style, "measured", lambda *a: measured.append(measure(*a)) or measured[-1])
    model = dataclasses.replace(stand_ins.settings().model, style_parts=2, style_groups=2)
    given = {
        "model": model,
        "data": {"tasks": {"draw": 1.0}, "given": 0.0},
        "diffusion": {"blocks": "plan", "plan_steps": (2,)},
        "optimizer": {"ema": 0.9},
    }
    for folder, base in (loop.folder, ""), (tmp_path / "next", str(loop.folder)):
        train_settings = {"init_from": base, "train_steps": 1}
        settings = stand_ins.settings(**given, train=train_settings)
        with runs.Run(folder, settings) as opened:
            train.train(settings, opened)
        code = model_folder.load_model(folder).model.style_code
        assert len(measured) == 1
        for name, leaf in measured[0].items():
            np.testing.assert_allclose(getattr(code, name.rpartition("/")[2])[...], leaf, rtol=1e-6)
    assert np.abs(measured[0]["style_code/seen_mean"]).max() > 0.1
    given["optimizer"]["groups"] = (("^style_code/", 0.0),)
    settings = stand_ins.settings(**given)
    with pytest.raises(config.ConfigError, match="adds a style code, some of which is frozen"):
        with runs.Run(tmp_path / "frozen", settings) as opened:
            train.train(settings, opened)
    monkeypatch.setattr(train, "MOST_MEASURED", 1)
    given |= {"data": {"tasks": {"answer": 1.0}}, "optimizer": {}}
    settings = stand_ins.settings(**given)
    with pytest.raises(config.ConfigError, match="draw no image that it could be measured on"):
        with runs.Run(tmp_path / "unseen", settings) as opened:
            train.train(settings, opened)


def test_a_model_of_full_attention_is_known_as_such(loop):
    given = stand_ins.settings(diffusion={"attention": "full"}, train={"train_steps": 1})
    loop.leaves_model = True
    with runs.Run(loop.folder, given) as opened:
        train.train(given, opened)
    assert loop.written == [1]
    left = model_folder.load_model(loop.folder)
    assert left.config.model.trained_attention == "full"
    # Its registers were not trained: they still equal the masks that they replace.
    words = left.model.text_embedding[...][given.model.text_mask_id]
    np.testing.assert_array_equal(left.model.register_understanding[...], words)
    cell = left.model.masked_cell()
    np.testing.assert_allclose(left.model.register_generation[...], cell, rtol=1e-6)


def test_a_run_that_has_not_ended_can_be_started_from(loop, tmp_path):
    loop.before_step = lambda step: step == 1 and os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(runs.Interrupted, match="after step 1"):
        loop.run(train_steps=2)
    loop.before_step = lambda step: None
    changes, loop.leaves_model = {"init_from": str(loop.folder), "train_steps": 1}, True
    given = stand_ins.settings(train=changes)
    with runs.Run(tmp_path / "next", given) as opened:
        train.train(given, opened)
    assert (tmp_path / "next/model/model.safetensors").is_file()
    adapted = stand_ins.settings(train=changes, lora={"rank": 2})
    with pytest.raises(config.ConfigError, match="is a run that has not ended, and what is frozen"):
        train.init_state(adapted, tiny.denoiser(adapted.model))
    with pytest.raises(config.ConfigError, match="'int8' rounds matrices that have adapters"):
        stand_ins.settings(lora={"rank": 2}, sampling={"quantize": "int8"})


def test_a_stopped_run_goes_on_with_the_next_batch_and_logs_every_step_once(loop):
    loop.before_step = lambda step: step == 3 and os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(runs.Interrupted, match="after step 3"):
        loop.run(train_steps=5)
    assert logged_steps(loop) == [1, 2, 3]
    assert loop.written == []
    loop.before_step = lambda step: None
    loop.run(train_steps=5)
    assert logged_steps(loop) == [1, 2, 3, 4, 5]
    dataset = stand_ins.batches(stand_ins.settings()).dataset()
    for i, batch in enumerate(loop.batches):
        stand_ins.assert_equal(batch, dataset[i])


def test_a_run_that_dies_goes_on_from_the_last_saved_state(loop):
    """It saves after every step here, and dies before anything of the next one is saved."""

    def die(step):
        if step == 4:
            raise RuntimeError("the power is out")

    loop.before_step = die
    with pytest.raises(RuntimeError, match="power"):
        loop.run(train_steps=5, checkpoint_seconds=1e-9)
    assert logged_steps(loop) == [1, 2, 3]
    loop.before_step = lambda step: None
    loop.run(train_steps=5)
    assert logged_steps(loop) == [1, 2, 3, 4, 5]
    assert len(loop.batches) == 5


def test_a_diverged_run_says_so_and_keeps_the_last_good_state(loop):
    loop.losses = {3: np.nan}
    told = r"loss is nan .* at step 3.*--workdir.*optimizer\.learning_rate"
    with pytest.raises(train.DivergedError, match=told):
        loop.run(train_steps=9, checkpoint_seconds=1e-9, log_every=5)
    with runs.Run(loop.folder, stand_ins.settings()) as opened:
        assert opened.states.steps == [1, 2]
    loop.losses = {}
    loop.run(train_steps=4)
    assert len(loop.batches) == 3 + 2


def test_steps_that_diverge_may_be_left_out_a_few_in_a_row(loop, capsys):
    loop.losses = {2: np.nan, 3: np.inf, 6: np.nan}
    loop.run(train_steps=7, skip_steps=2, log_every=1)
    assert logged_steps(loop) == [1, 4, 5, 7]
    assert capsys.readouterr().err.count("so the step was left out") == 3
    loop.losses = dict.fromkeys((8, 9, 10), np.nan)
    with pytest.raises(train.DivergedError, match="steps 8 to 10 were left out"):
        loop.run(train_steps=12, skip_steps=2)


def test_a_diverged_run_that_is_stopped_saves_no_diverged_state(loop):
    loop.losses = {2: np.nan}
    loop.before_step = lambda step: step == 2 and os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(train.DivergedError):
        loop.run(train_steps=9)
    with runs.Run(loop.folder, stand_ins.settings()) as opened:
        assert opened.states.steps == []


@pytest.fixture
def on_an_accelerator():
    """Numbers are fetched when a line is written."""
    side_by_side.make_ahead(True)
    yield
    side_by_side.make_ahead(None)


@pytest.mark.usefixtures("on_an_accelerator")
def test_numbers_are_fetched_every_so_many_steps_on_an_accelerator(loop, monkeypatch, capsys):
    fetched = []
    monkeypatch.setattr(train.jax, "device_get", lambda x: fetched.append(len(x)) or x)
    loop.losses = {2: np.nan, 3: np.inf, 6: np.nan}
    loop.run(train_steps=9, log_every=4, skip_steps=2)
    assert fetched == [0, 4, 4, 1, 0]
    assert logged_steps(loop) == [4, 8, 9]
    assert capsys.readouterr().err.count("so the step was left out") == 3


@pytest.mark.usefixtures("on_an_accelerator")
@pytest.mark.parametrize(("seconds", "taken", "kept"), [(1e6, 5, []), (1e-9, 3, [1, 2])])
def test_a_diverged_step_is_found_before_its_state_is_saved(loop, seconds, taken, kept):
    """Also if its numbers are not fetched yet; a few more steps may be taken."""
    loop.losses = {3: np.nan}
    with pytest.raises(train.DivergedError, match="steps 3 to 3 were left out"):
        loop.run(train_steps=9, log_every=4, checkpoint_seconds=seconds)
    assert len(loop.batches) == taken
    with runs.Run(loop.folder, stand_ins.settings()) as opened:
        assert opened.states.steps == kept


@pytest.mark.usefixtures("on_an_accelerator")
def test_all_programs_of_a_run_are_compiled_before_its_first_step(tmp_path, monkeypatch):
    """One per kind of row, whatever the lesson; the state is as with programs made on demand."""
    lessons = {"one": {"until": 2, "tasks": {"draw": 1.0, "answer": 1.0}}}
    data = {"tasks": {"draw": 1.0, "answer": 1.0, "locate": 1.0}, "lessons": lessons}
    monkeypatch.setattr(train, "Denoiser", lambda settings, rngs: tiny.denoiser(settings))
    given = stand_ins.settings(data=data | {"shapes": "run"}, train={"train_steps": 5})
    ended, made = [], []
    for ahead in (True, False):
        side_by_side.make_ahead(ahead)
        with phase_programs.unchecked(), runs.Run(tmp_path / str(ahead), given) as opened:
            one = train._Loop(given, opened, None)
            with contextlib.closing(one.feed):
                one._get_ready()
                made.append(len(one._programs))
                for _ in range(5):
                    one._take_step()
        ended.append(one)
    assert made == [2, 0] and [len(one._programs) for one in ended] == [2, 2]
    assert [one._steps_compiled for one in ended] == [0, 2]
    stand_ins.assert_equal(*(one.state for one in ended))


@pytest.fixture
def clock(monkeypatch):
    """Each look at the clock advances it by one second."""
    ticks = itertools.count(1000)
    monkeypatch.setattr(train, "time", types.SimpleNamespace(monotonic=lambda: float(next(ticks))))


def test_a_run_by_seconds_ends_in_time_with_a_decayed_learning_rate(loop, clock):
    loop.run(train_steps=10**6, seconds=40.0, checkpoint_seconds=1e6)
    assert 10 < len(loop.rates) <= 41
    assert loop.rates[2] > 0.9 * 1e-2
    assert loop.rates[-1] < 0.1 * 1e-2
    falling = loop.rates[2:]
    assert falling == sorted(falling, reverse=True)
    saved = states.States(loop.folder / "state")
    assert saved.steps == [len(loop.rates)]
    saved.close()


def test_seconds_that_have_passed_are_remembered(loop, clock):
    loop.before_step = lambda step: step == 12 and os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(runs.Interrupted):
        loop.run(train_steps=10**6, seconds=40.0, checkpoint_seconds=1e6)
    loop.before_step = lambda step: None
    loop.run(train_steps=10**6, seconds=40.0, checkpoint_seconds=1e6)
    assert len(loop.rates) <= 41
    assert loop.rates[12] == pytest.approx(loop.rates[11], rel=0.2)


def test_the_seconds_of_compiling_do_not_count(loop, monkeypatch):
    """A step with new shapes takes 1000 seconds here, any other step one."""
    now, seen = [0.0], set()

    def wait(step):
        batch = stand_ins.batches(stand_ins.settings()).dataset()[step - 1]
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        now[0] += 1.0 if shapes in seen else 1000.0
        seen.add(shapes)

    monkeypatch.setattr(train, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    loop.before_step = wait
    loop.run(train_steps=10**6, seconds=5.0, checkpoint_seconds=1e6)
    assert len(loop.rates) == len(seen) + 5 and now[0] == 1000 * len(seen) + 5


def test_a_run_on_own_images_says_once_that_it_will_be_too_short(loop, monkeypatch, capsys):
    """A step takes one second here, and compiling none of it."""
    now = [0.0]
    own = types.SimpleNamespace(words=lambda: None)
    monkeypatch.setattr(train.sources.TrainingData, "prepared", own)
    monkeypatch.setattr(training_report, "write", lambda *_, **__: loop.folder / "report.md")
    monkeypatch.setattr(train, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def wait(step):
        now[0] += 1.0

    loop.before_step = wait
    loop.run(train_steps=30, seconds=12.0, checkpoint_seconds=1e6)
    done, said = len(loop.rates), capsys.readouterr()
    assert said.err.count("of 30 planned steps fit into 12 seconds at this speed") == 1
    assert f"\n{done} of 30 planned steps, too few; " in f"\n{said.out}"
    assert "the model so far" in said.out and "report.md: its samples so far" in said.out
    assert "the trained model" not in said.out
    loop.run(train_steps=30, seconds=50.0, checkpoint_seconds=1e6)
    said = capsys.readouterr()
    assert "planned steps fit" not in said.err and "30 of 30 planned steps\n" in said.out
    assert "the trained model" in said.out and "report.md: what it can do" in said.out


def test_what_a_run_shows_comes_after_the_model_and_cannot_lose_it(loop, monkeypatch, capsys):
    loop.leaves_model, found = True, []

    def fail(*_, **__):
        found.append((loop.folder / "model" / "config.json").is_file())
        raise MemoryError("a caption of 9101 tokens.")

    monkeypatch.setattr(training_report, "check", fail)
    monkeypatch.setattr(training_report, "write", fail)
    loop.run(train_steps=4, eval_every=2)
    assert found == [False, True, True]
    printed = capsys.readouterr()
    assert (
        printed.err.count("(MemoryError: a caption of 9101 tokens); what was trained is kept") == 3
    )
    assert f"{loop.folder / 'model'}: the trained model" in printed.out


@pytest.mark.parametrize("seconds", [0.0, 1500.0])
def test_a_run_of_as_many_steps_as_asked_for_is_not_too_short(loop, capsys, seconds):
    loop.run(train_steps=1, seconds=seconds)
    assert "fitted into" not in capsys.readouterr().out


def test_a_disk_without_room_for_states_and_model_is_reported_before_the_first_step(
    loop, monkeypatch
):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3 * 10**6))
    with pytest.raises(model_folder.WriteError, match=r"3 MB free and .* MB are needed"):
        loop.run()
    assert loop.batches == []


def test_images_are_drawn_in_between_and_at_the_end(loop, clock, capsys):
    loop.run(train_steps=10, image_seconds=3.5)
    assert loop.images[-1] == "000010.png"
    assert 2 <= len(loop.images) < 6
    lines = [json.loads(line) for line in (loop.folder / "metrics.jsonl").read_text().splitlines()]
    checks = [line for line in lines if "draw" in line]
    assert [f"{line['step']:06d}.png" for line in checks] == loop.images
    assert all(line["draw"] == 0.25 and line["seconds"] > 0 for line in checks)
    assert "step 10: draw 0.25" in capsys.readouterr().err


def test_images_are_drawn_every_so_many_steps_and_at_the_end(loop):
    loop.run(train_steps=5, eval_every=2)
    assert loop.images == ["000002.png", "000004.png", "000005.png"]
    loop.run(train_steps=6, eval_every=3)  # the last step only once
    assert loop.images[3:] == ["000006.png"]


def test_without_image_seconds_none_are_drawn(loop):
    loop.run(train_steps=3)
    assert loop.images == []
