# SPDX-License-Identifier: Apache-2.0
"""Adapters start as nothing, are added without merging, and are merged to the same model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import adapters, model_folder
from sparse_lavida_jax.models import lora, parameters
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
    """Of a text and an image row."""
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
    """Neither of all layers nor of one: no product or sum has the shape of a kernel."""
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


def test_adapters_go_to_disk_alone_and_come_back_to_their_base(attached, base, tmp_path):
    moved = parameters.replaced(attached, {"register_generation": np.full(24, 0.5)})
    settings = config.Config(model=MODEL, lora=LORA)
    adapters.save(tmp_path / "mine", trained_of(moved), settings, base=base)
    loaded = adapters.load_model(tmp_path / "mine", base)
    assert loaded.config.lora == LORA
    expected = parameters.by_name(lora.merged(moved))
    found = parameters.by_name(loaded.model)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name], leaf)
    files = {path.name for path in (tmp_path / "mine").iterdir()}
    assert "params" not in files and "model.safetensors" not in files
    assert (tmp_path / "mine" / "adapters.safetensors").stat().st_size < 200_000


def test_adapters_of_another_base_are_refused(attached, base, tmp_path):
    settings = config.Config(model=MODEL, lora=LORA)
    adapters.save(tmp_path / "mine", trained_of(attached), settings, base=base)
    other = jax.tree.map(lambda x: x + 1, tiny.denoiser(MODEL))
    save(tmp_path / "other", other)
    with pytest.raises(model_folder.CheckpointError, match=r"next to the model that lay .*base,"):
        adapters.load_model(tmp_path / "mine", tmp_path / "other")
    with pytest.raises(model_folder.CheckpointError, match="no adapters"):
        adapters.load_model(base, base)
    file = tmp_path / "mine" / "adapters.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(model_folder.CheckpointError, match=r"damaged: .*The tensor .*lora"):
        adapters.load_model(tmp_path / "mine", base)
