# SPDX-License-Identifier: Apache-2.0
"""Adapters start at zero, are added without merging, and merge to the same model."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import adapter_names, model_folder
from sparse_lavida_jax.convert import adapters
from sparse_lavida_jax.data import files
from sparse_lavida_jax.models import lora, parameters, quantize
from sparse_lavida_jax.models.layers import Linear
from sparse_lavida_jax.scenes.tokenizer import SHIPPED
from sparse_lavida_jax.training import step as training_step

MODEL = tiny.model_settings(codes_per_token=4)
LORA = config.Lora(rank=3, alpha=6.0)


@pytest.fixture(scope="module")
def attached():
    """A model with adapters of arbitrary numbers, B included."""
    model = lora.attach(tiny.denoiser(MODEL), LORA, jax.random.key(0))
    rng = np.random.default_rng(0)
    named = parameters.by_name(model)
    return parameters.replaced(
        model,
        {n: 0.1 * rng.normal(size=x.shape) for n, x in named.items() if n.endswith("lora_b")},
    )


def logits(model):
    """Logits of a text and an image row."""
    batch = tiny.batch(["text", "image"], MODEL)

    @tiny.quick_jit
    def run(model, batch):
        hidden, _ = model(batch.understanding, batch.generation, wanted="both")
        return model.text_logits(hidden["understanding"]), model.image_logits(hidden["generation"])

    return run(model, batch)


def test_an_adapter_adds_a_product_of_two_small_matrices():
    rng = np.random.default_rng(0)
    x, w, a, b = (rng.normal(size=s) for s in ((5, 4), (4, 6), (4, 3), (3, 6)))
    linear = lora.attach(
        Linear(4, 6, rngs=nnx.Rngs(0)), config.Lora(rank=3, targets=""), jax.random.key(0)
    )
    linear = parameters.replaced(linear, {"kernel": w, "lora_a": a, "lora_b": b})
    given = jnp.asarray(x, jnp.float32)
    expected = x @ w + 32 / 3 * (x @ a @ b)
    np.testing.assert_allclose(linear(given), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(linear(given, 2), expected[:, :2], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def base_logits():
    return logits(tiny.denoiser(MODEL))


def test_a_fresh_adapter_changes_no_bit(base_logits):
    base = tiny.denoiser(MODEL)
    fresh = lora.attach(base, LORA, jax.random.key(0))
    assert not any("lora" in name for name in parameters.by_name(base))
    for ours, theirs in zip(logits(fresh), base_logits, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_merged_is_the_same_model_without_adapters(attached, base_logits):
    merged = lora.merged(attached)
    assert jax.tree.structure(merged) == jax.tree.structure(tiny.denoiser(MODEL))
    assert any("lora" in name for name in parameters.by_name(attached))
    for ours, theirs, before in zip(logits(merged), logits(attached), base_logits, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        assert np.abs(ours - before).max() > 0.1


def test_no_merged_matrix_exists_while_training(attached):
    """Neither for all layers nor for one: no product or sum has the shape of a kernel."""
    mine, frozen = parameters.parted(attached, lambda name: bool(lora.NAME.search(name)))
    shapes = {tuple(x.shape) for name, x in parameters.by_name(frozen).items() if "kernel" in name}
    shapes |= {shape[1:] for shape in shapes if len(shape) == 3}
    batch = tiny.batch(["text", "image"], MODEL)

    def gradient(part):
        return jax.grad(lambda p: training_step.loss(parameters.joined(p, frozen), batch)[0])(part)

    products = []

    def look(jaxpr):
        for equation in jaxpr.eqns:
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                look(inner)
            if equation.primitive.name in ("dot_general", "add", "mul", "add_any"):
                products.extend(tuple(v.aval.shape) for v in equation.outvars)

    look(jax.make_jaxpr(gradient)(mine).jaxpr)
    assert len(products) > 100
    assert not shapes & set(products)


def test_targets_are_found_by_name():
    def names(**changes):
        model = lora.attach(
            tiny.denoiser(MODEL), dataclasses.replace(LORA, **changes), jax.random.key(0)
        )
        return {n.removesuffix("/lora_a") for n in parameters.by_name(model) if "lora_a" in n}

    assert names(targets="generation/[qv]$") == {
        f"{layers}/generation/{name}"
        for layers in ("joint_layers", "split_layers")
        for name in "qv"
    }
    assert names(targets="").isdisjoint(lora.HEADS)
    with pytest.raises(config.ConfigError, match=r"'tower' is found in the path of no .*attn_out"):
        names(targets="tower")
    with pytest.raises(config.ConfigError, match="rank=0"):
        names(rank=0)


# ---------------------------------------------------------------------------------------------
# On disk.


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "base"
    save(folder, tiny.denoiser(MODEL))
    return folder


def save(folder, model):
    model_folder.save_model(
        folder,
        model,
        config.Config(model=MODEL, lora=LORA),
        tokenizer_path=SHIPPED,
        vq_folder=None,
        readme="",
    )


def trained_of(model):
    mine, _ = parameters.parted(model, lambda n: "lora" in n or n.startswith("register"))
    return mine


def test_a_saved_model_is_merged(attached, tmp_path):
    save(tmp_path / "model", attached)
    loaded = model_folder.load_model(tmp_path / "model").model
    for ours, theirs in zip(
        jax.tree.leaves(loaded), jax.tree.leaves(lora.merged(attached)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def saved(folder, model, base, **changes):
    """Saves the adapters of a model; returns their name."""
    settings = config.Config(model=MODEL, lora=dataclasses.replace(LORA, **changes))
    adapters.save(folder, trained_of(model), settings, base=base)
    return str(folder)


def loaded_with(base, weights, **how):
    loaded = model_folder.load_model(base)
    model, _ = adapters.added(loaded.model, loaded.config, base, weights, **how)
    return model


def equal(one, other):
    expected, found = parameters.by_name(one), parameters.by_name(other)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name], leaf)


@pytest.fixture(scope="module")
def moved(attached):
    """A model with adapters and trained registers."""
    return parameters.replaced(attached, {"register_generation": np.full(24, 0.5)})


def test_adapters_go_to_disk_alone_and_come_back_to_their_base(moved, base, tmp_path):
    mine = saved(tmp_path / "run" / "adapters", moved, base)
    equal(lora.merged(moved), loaded_with(base, {mine: 1.0}))
    equal(lora.merged(moved), loaded_with(base, {str(tmp_path / "run"): 1.0}))  # from a run
    there = {path.name for path in pathlib.Path(mine).iterdir()}
    assert "params" not in there and "model.safetensors" not in there
    assert (pathlib.Path(mine) / "adapter_model.safetensors").stat().st_size < 200_000


def test_adapters_have_the_names_of_peft_and_of_the_release(moved, base, tmp_path):
    mine = saved(tmp_path / "mine", moved, base)
    stored = safetensors.numpy.load_file(f"{mine}/adapter_model.safetensors")
    module = "model.transformer.blocks.0.q_proj_vision"
    a, b = (stored[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
    linear = moved.joint_layers.generation.q
    np.testing.assert_array_equal(a, linear.lora_a[0].T)
    np.testing.assert_array_equal(b, linear.lora_b[0].T)
    told = json.loads((tmp_path / "mine" / "adapter_config.json").read_text())
    assert (told["peft_type"], told["r"], told["lora_alpha"]) == ("LORA", 3, 6.0)
    assert module in told["target_modules"]
    assert "model.register_generation" in told["modules_to_save"]


def test_adapters_of_peft_itself_are_read(attached, base, tmp_path):
    """Without our files, only some layers, and with the scale of PEFT's settings."""
    rng, module = np.random.default_rng(0), "model.transformer.blocks.1.attn_out"
    a, b = (rng.normal(size=s).astype(np.float32) for s in ((2, 32), (32, 2)))
    key = f"base_model.model.{module}.lora"
    (tmp_path / "peft").mkdir()
    file = tmp_path / "peft" / "adapter_model.safetensors"
    safetensors.numpy.save_file({f"{key}_A.weight": a, f"{key}_B.weight": b}, file)
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "use_rslora": True}
    files.write_json(tmp_path / "peft" / "adapter_config.json", told)
    before = parameters.by_name(model_folder.load_model(base).model)
    after = parameters.by_name(loaded_with(base, {str(tmp_path / "peft"): 1.0}))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    (name,) = changed
    product = 8 / 2**0.5 * (b @ a).T
    number = 1 - MODEL.num_joint_layers if "split" in name else 1
    difference = np.asarray(after[name] - before[name])
    np.testing.assert_allclose(difference[number], product, atol=1e-5)
    assert not np.delete(difference, number, 0).any()
    files.write_json(tmp_path / "peft" / "adapter_config.json", told | {"use_dora": True})
    with pytest.raises(model_folder.CheckpointError, match="no plain adapters of low rank"):
        loaded_with(base, {str(tmp_path / "peft"): 1.0})
    safetensors.numpy.save_file({f"{key}_X.weight": a}, file)
    with pytest.raises(model_folder.CheckpointError, match=r"which has no matrix for .*lora_X"):
        loaded_with(base, {str(tmp_path / "peft"): 1.0})


def test_several_merged_and_kept_apart_predict_the_same(moved, base, tmp_path):
    other = parameters.replaced(
        moved, {n: -2 * x[..., ::-1] for n, x in parameters.by_name(moved).items() if "lora_b" in n}
    )
    weights = {
        saved(tmp_path / "one", moved, base): 1.0,
        saved(tmp_path / "other", other, base, targets="q$"): 0.25,
    }
    apart = loaded_with(base, weights, merge=False)
    assert apart.joint_layers.generation.q.lora_a.shape[-1] == 2 * LORA.rank
    merged = loaded_with(base, weights)
    assert not any("lora" in name for name in parameters.by_name(merged))
    first = loaded_with(base, {next(iter(weights)): 1.0})
    for one, two, alone in zip(logits(merged), logits(apart), logits(first), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)
        assert np.abs(one - alone).max() > 0.05
    # Parameters that were trained whole move by the same amount: 1 + 0.25 of the way.
    start = model_folder.load_model(base).model.register_generation[...]
    expected = start + 1.25 * (0.5 - start)
    np.testing.assert_allclose(merged.register_generation[...], expected, rtol=1e-6)


def test_adapters_stay_next_to_a_base_in_8_bits(moved, base, tmp_path):
    weights = {saved(tmp_path / "mine", moved, base): 1.0}
    model = quantize.quantized(model_folder.load_model(base).model, "int8")
    ours, _ = adapters.added(model, config.Config(model=MODEL), base, weights)
    assert ours.joint_layers.generation.q.kernel.dtype == jnp.int8
    for near, exact in zip(logits(ours), logits(moved), strict=True):
        assert np.abs(near - exact).max() < 0.1 * np.abs(exact).max()


@pytest.mark.parametrize("stored", ["safetensors", "orbax"])
def test_a_copy_with_adapters_holds_what_loading_with_them_gives(moved, base, tmp_path, stored):
    weights = {
        saved(tmp_path / "one", moved, base): 0.5,
        saved(tmp_path / "other", moved, base, targets="q$"): -1.0,
    }
    model_folder.copy(base, tmp_path / "base", stored)
    adapters.copy(tmp_path / "base", tmp_path / "new", weights)
    copied = model_folder.load_model(tmp_path / "new")
    for name, leaf in parameters.by_name(loaded_with(base, weights)).items():
        np.testing.assert_allclose(parameters.by_name(copied.model)[name], leaf, atol=1e-6)
    readme = (tmp_path / "new" / "README.md").read_text()
    assert readme == f"\n\nThe adapters `{adapter_names.written(weights)}` were added to it.\n"
    # Adding the same adapters again would be a mistake: it is another model.
    with pytest.raises(model_folder.CheckpointError, match="were trained next to the model"):
        adapters.copy(tmp_path / "new", tmp_path / "again", weights)
    model_folder.copy(base, tmp_path / "narrow", dtype="int8")
    with pytest.raises(model_folder.CheckpointError, match="add them to the model that it was"):
        adapters.copy(tmp_path / "narrow", tmp_path / "again", weights)


def test_adapters_trained_sparsely_make_their_base_sample_sparsely(moved, base, tmp_path):
    mine = saved(tmp_path / "mine", moved, base)
    full = config.Config(model=dataclasses.replace(MODEL, trained_attention="full"))
    model = model_folder.load_model(base).model
    sparse, settings = adapters.added(model, full, base, {mine: 1.0})
    assert settings.model == sparse.settings == MODEL
    assert settings.lora == LORA
    assert adapters.settings_with(full, {}) == full


def test_the_words_of_a_command_line_are_weights_by_name():
    given = "mine,runs/other:0.5,org/name@v1:-1"
    weights = {"mine": 1.0, "runs/other": 0.5, "org/name@v1": -1.0}
    assert adapter_names.parse(given) == weights
    assert adapter_names.written(weights) == given
    assert adapter_names.parse("") == {}
    for wrong in ("mine,", "mine:x", "mine,mine:2", "mine:nan", ":2"):
        with pytest.raises(model_folder.CheckpointError, match="write FOLDER or FOLDER:WEIGHT"):
            adapter_names.parse(wrong)


def test_adapters_of_another_base_are_refused(attached, base, tmp_path):
    mine = saved(tmp_path / "mine", attached, base)
    save(tmp_path / "other", jax.tree.map(lambda x: x + 1, tiny.denoiser(MODEL)))
    with pytest.raises(model_folder.CheckpointError, match=r"next to the model that lay .*base,"):
        loaded_with(tmp_path / "other", {mine: 1.0})
    with pytest.raises(model_folder.CheckpointError, match="no adapters"):
        loaded_with(base, {str(base): 1.0})
    file = tmp_path / "mine" / "adapter_model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(model_folder.CheckpointError, match=r"damaged: .*The tensor .*lora"):
        loaded_with(base, {mine: 1.0})
