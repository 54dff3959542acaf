# SPDX-License-Identifier: Apache-2.0
"""Saved data is read back; damaged, foreign or incomplete data gives a one-sentence error."""

import errno
import json
import logging
import os
import pathlib
import resource
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from orbax.checkpoint import v1 as ocp

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import manifest, model_folder, named_arrays, stores, tensors
from sparse_lavida_jax.data import files
from sparse_lavida_jax.models import layers, parameters
from sparse_lavida_jax.training.states import (
    MODELS,
    States,
    _sum_digests,
    is_unfinished,
    load_unfinished,
)


class Layer(nnx.Module):
    def __init__(self, width, *, rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (width, width)))


class Model(nnx.Module):
    """A model with stacks of three and of zero layers, and a plain list of layers."""

    def __init__(self, width=3, *, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (5, width)))
        self.joint_layers = layers.init_stack(lambda r: Layer(width, rngs=r), 3, rngs.params())
        self.split_layers = layers.init_stack(lambda r: Layer(width, rngs=r), 0, rngs.params())
        self.blocks = nnx.List([Layer(width, rngs=rngs), Layer(2, rngs=rngs)])
        self.width = width


class WiderModel(Model):
    """Differs in every possible way: a shape, an extra parameter, a missing one."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.blocks[0] = Layer(4, rngs=rngs)
        self.head = nnx.Param(jnp.zeros(7))
        del self.table


def make_model(_=None):
    return Model(rngs=nnx.Rngs(0))


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


@pytest.fixture
def save(tmp_path):
    """Saves a model to `tmp_path / "model"` and returns that folder."""
    tokenizer = tmp_path / "text.json"
    tokenizer.write_text("{}")
    vq = tmp_path / "codec"
    vq.mkdir()
    (vq / "config.json").write_text("{}")
    safetensors.numpy.save_file({"x": np.zeros(2)}, vq / "params.safetensors")

    def save(model=None, **changes):
        arguments = {"tokenizer_path": tokenizer, "vq_folder": vq, "readme": "# test\n", **changes}
        folder = tmp_path / "model"
        model_folder.save_model(folder, model or make_model(), config.Config(seed=3), **arguments)
        return folder

    return save


def load(folder):
    return model_folder.load_model(folder, make_model=make_model)


def flip_a_byte(folder):
    """Changes one byte in the middle of the largest file, which holds the arrays."""
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)
    return path


def test_a_model_folder_holds_everything(save):
    loaded = load(save())
    same(loaded.model, make_model())
    assert loaded.model.width == 3
    assert loaded.config == config.Config(seed=3)
    assert loaded.tokenizer_path.read_text() == "{}"
    assert (loaded.vq_folder / "config.json").is_file()
    assert (loaded.tokenizer_path.parent / "README.md").read_text() == "# test\n"


def test_a_model_folder_does_not_say_where_it_was_written(save):
    folder = save()
    for path in filter(pathlib.Path.is_file, folder.rglob("*")):
        assert str(folder.parent).encode() not in path.read_bytes(), path


def test_a_model_without_images_has_no_image_tokenizer(save):
    assert load(save(vq_folder=None)).vq_folder is None


def test_layers_lie_one_by_one_on_disk(save):
    tree = ocp.load(str(save(kind="orbax") / "params"))
    assert sorted(tree) == ["blocks", "joint_layers", "table"]
    assert sorted(tree["joint_layers"]) == ["00", "01", "02"]
    assert tree["joint_layers"]["01"]["weight"].shape == (3, 3)
    assert sorted(tree["blocks"]) == ["0", "1"]
    with safetensors.safe_open(save() / "model.safetensors", "numpy") as file:
        assert file.metadata() == stores.METADATA
        assert sorted(file.keys()) == sorted(parameters.by_name(tree))
        for name, leaf in parameters.by_name(tree).items():
            np.testing.assert_array_equal(file.get_tensor(name), leaf)


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_a_folder_is_written_anew_in_the_other_store(save, tmp_path, kind):
    folder = save(kind="orbax" if kind == "safetensors" else "safetensors")
    (folder / "vq" / "notes.txt").write_text("kept")
    manifest.write(folder)
    copied = tmp_path / "copied"
    assert model_folder.copy(folder, copied, kind) == 6
    assert (copied / "params").is_dir() == (kind == "orbax")
    assert (copied / "model.safetensors").is_file() == (kind == "safetensors")
    same(load(copied).model, make_model())
    assert (copied / "vq" / "notes.txt").read_text() == "kept"
    assert (copied / named_arrays.TENSORS).read_text() == (
        folder / named_arrays.TENSORS
    ).read_text()


def test_large_parameters_lie_in_several_files(save):
    folder = save(most_bytes=60)
    placed = tensors.read_index(folder / tensors.INDEX)
    assert len(set(placed.values())) == len(sorted(folder.glob(stores.FILES))) > 2
    assert not (folder / tensors.SINGLE).exists()
    same(load(folder).model, make_model())


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_either_store_is_read_into_a_mesh(save, kind):
    folder = save(kind=kind)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def choose(name, shape):
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * len(shape)))

    loaded = model_folder.load_model(
        folder, make_model=make_model, sharding=choose, dtype="bfloat16"
    )
    for leaf, whole in zip(*map(jax.tree.leaves, (loaded.model, make_model())), strict=True):
        assert leaf.sharding.mesh == mesh
        np.testing.assert_array_equal(leaf, whole.astype("bfloat16"))


def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path):
    index = {"weight_map": {"table": "../model.safetensors"}}
    (tmp_path / tensors.INDEX).write_text(json.dumps(index))
    with pytest.raises(model_folder.CheckpointError, match="which may lie elsewhere"):
        stores.open_params(tmp_path)


def test_half_precision_on_disk_is_whole_precision_in_memory(save):
    loaded = load(save(dtype="float16"))
    for before, after in zip(
        jax.tree.leaves(make_model()), jax.tree.leaves(loaded.model), strict=True
    ):
        assert after.dtype == jnp.float32
        np.testing.assert_allclose(after, before, rtol=1e-3)


def test_the_real_model_survives(tmp_path):
    settings = config.Model(
        width=16, mlp_hidden=16, num_layers=2, dual_tower_layers=0, num_heads=2, head_dim=8,
        generation_width=8, generation_mlp_hidden=8, vocab_size=40, codebook_size=8,
        vision=config.Vision(width=8, num_layers=1, num_heads=2, mlp_hidden=8),
    )  # fmt: skip
    settings = config.Config(model=settings)
    rng = np.random.default_rng(0)
    model = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype),
        jax.eval_shape(lambda: model_folder.make_denoiser(settings)),
    )
    (tmp_path / "text.json").write_text("{}")
    model_folder.save_model(
        tmp_path / "m", model, settings,
        tokenizer_path=tmp_path / "text.json", vq_folder=None, readme="",
    )  # fmt: skip
    same(model_folder.load_model(tmp_path / "m").model, model)


def test_every_parameter_that_does_not_fit_is_listed_at_once(save):
    with pytest.raises(model_folder.CheckpointError) as error:
        stores.load_params(save(), jax.eval_shape(lambda: WiderModel(rngs=nnx.Rngs(0))))
    lines = str(error.value).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "head: missing, the model has (7,)",
        "table (5, 3): the model has no such parameter",
        "blocks/0/weight: (3, 3) on disk, (4, 4) in the model",
    ]


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_a_damaged_file_is_named(save, kind):
    folder = save(kind=kind)
    path = flip_a_byte(folder / "params" if kind == "orbax" else folder)
    with pytest.raises(model_folder.CheckpointError, match=f"{path.name} is damaged"):
        load(folder)


def test_a_missing_file_is_named(save):
    folder = save()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(model_folder.CheckpointError, match=r"tokenizer\.json is missing"):
        load(folder)


def test_a_folder_without_the_digests_of_its_arrays_is_refused(save):
    folder = save()
    (folder / named_arrays.TENSORS).unlink()
    list_files_anew(folder)
    with pytest.raises(model_folder.CheckpointError, match=r"has no TENSORS\.sha256, the digests"):
        load(folder)


def test_a_copy_that_was_cut_short_is_refused(save):
    folder = save()
    (folder / manifest.MANIFEST).unlink()
    with pytest.raises(model_folder.CheckpointError, match="not written to its end"):
        load(folder)


def wrong_manifest(folder, kind):
    """Changes the list of files, as damage or manual edits may."""
    path = folder / manifest.MANIFEST
    lines = path.read_text().splitlines(keepends=True)
    changed = {
        "empty": [],
        "cut at a line": lines[:3],
        "cut inside a line": [*lines[:-1], lines[-1][:40]],
        "without the parameters": [line for line in lines if "model.safet" not in line],
        "a page of something else": ["<html>\n"],
    }
    path.write_text("".join(changed[kind]))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("empty", r"MANIFEST\.sha256 is empty"),
        ("cut at a line", r"is not in MANIFEST\.sha256"),
        ("cut inside a line", r"MANIFEST\.sha256 is damaged"),
        ("without the parameters", r"model\.safetensors is not in MANIFEST\.sha256"),
        ("a page of something else", r"MANIFEST\.sha256 is damaged"),
    ],
)
def test_a_list_of_files_that_leaves_some_out_is_refused(save, kind, told):
    folder = save()
    wrong_manifest(folder, kind)
    with pytest.raises(model_folder.CheckpointError, match=told):
        load(folder)


def test_a_file_too_many_is_refused_and_a_hidden_one_is_not(save):
    folder = save()
    (folder / ".cache").mkdir()
    (folder / ".cache" / "notes").write_text("of a hub")
    load(folder)
    (folder / "vq" / "more.txt").write_text("")
    with pytest.raises(model_folder.CheckpointError, match=r"more\.txt is not in MANIFEST"):
        load(folder)


def test_a_folder_in_place_of_a_file_is_refused(save):
    folder = save()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    with pytest.raises(model_folder.CheckpointError, match=r"tokenizer\.json is not a regular"):
        load(folder)


def list_files_anew(folder):
    (folder / manifest.MANIFEST).unlink()
    paths = [path for path in folder.rglob("*") if path.is_file()]
    lines = [f"{files.sha256(p)}  {p.relative_to(folder).as_posix()}\n" for p in paths]
    (folder / manifest.MANIFEST).write_text("".join(lines))


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff", b"<html>"])
def test_an_empty_list_of_tensors_does_not_switch_their_check_off(save, content):
    folder = save()
    (folder / named_arrays.TENSORS).write_bytes(content)
    list_files_anew(folder)
    with pytest.raises(model_folder.CheckpointError, match=r"TENSORS\.sha256 is (empty|damaged)"):
        load(folder)


@pytest.mark.parametrize("inside", ["", "vq"])
def test_a_list_of_files_made_anew_does_not_hide_other_tensors(save, inside):
    """Changed parameters are detected when read, and so are those of the image tokenizer."""
    folder = save()
    digests = named_arrays.read_digests(folder)
    name = "vq/params.safetensors:x" if inside else "joint_layers/01/weight"
    assert name in digests
    named_arrays.write_digests(folder, digests | {name: "0" * 64})
    list_files_anew(folder)
    with pytest.raises(model_folder.CheckpointError, match=f"{name} .*is not what was written"):
        load(folder)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused_unless_it_is_asked_for(save, wrong):
    model = make_model()
    model.joint_layers.weight = nnx.Param(model.joint_layers.weight[...].at[1, 2, 0].set(wrong))
    folder = save(model)
    with pytest.raises(model_folder.CheckpointError, match=r"layers/01/weight .* NaN or inf"):
        load(folder)
    same(model_folder.load_model(folder, make_model=make_model, check_finite=False).model, model)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"model": null}', "Config.model is None: it must hold settings by name"),
        ('{"model": {"vision": null}}', "Model.vision is None: it must hold settings by name"),
        ('{"model": {"num_layers": 1000000}}', r"num_layers=1000000 .* must lie in 0\.\.1024"),
        ('{"seed": 1, "seed": 2}', "the key 'seed' is there twice"),
        ('{"model": ' * 100_000, "nested more than 100 deep"),
        ('{"data": {"tasks": [[1]]}}', "Data.tasks=.* is a list; it must be a dict"),
        ('{"model": {"rope_theta": Infinity}}', "it must be finite"),
        ('{"model": {"vision": {"grid_sizes": [[1]]}}}', r"must hold 2 values"),
        ("[]", "has the format None"),
    ],
)
def test_settings_that_no_model_has_are_refused_in_a_sentence(save, text, told):
    folder, tag = save(), f'{{"format": "{model_folder.FORMAT}", '
    (folder / "config.json").write_text(text.replace("{", tag, 1))
    with pytest.raises(model_folder.CheckpointError, match=told):
        model_folder.read_config(folder)


def test_settings_of_another_version_are_reported(save):
    folder = save()
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, "colour": 1}))
    with pytest.raises(model_folder.CheckpointError, match="Config has no colour"):
        model_folder.read_config(folder)
    (folder / "config.json").write_text(json.dumps({**given, "format": "other/9"}))
    with pytest.raises(model_folder.CheckpointError, match="'other/9'"):
        model_folder.read_config(folder)


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_a_write_that_fails_leaves_the_old_model(save, monkeypatch, kind):
    folder = save()

    def run_out_of_space(path, *_):
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(ocp.partial, "save", run_out_of_space)
    monkeypatch.setattr(tensors, "write", run_out_of_space)
    before = sorted(folder.parent.iterdir())
    with pytest.raises(model_folder.CheckpointError, match=r"No space left.*is unchanged"):
        save(Model(2, rngs=nnx.Rngs(1)), kind=kind)
    same(load(folder).model, make_model())
    assert sorted(folder.parent.iterdir()) == before


def test_a_newer_model_replaces_the_older(save):
    save()
    newer = Model(rngs=nnx.Rngs(9))
    same(load(save(newer)).model, newer)


def full_disk(monkeypatch):
    usage = types.SimpleNamespace(free=10)
    monkeypatch.setattr(model_folder.shutil, "disk_usage", lambda _: usage)


def test_a_full_disk_is_reported_before_writing(save, monkeypatch):
    full_disk(monkeypatch)
    with pytest.raises(model_folder.CheckpointError, match="0 MB free"):
        save()


def test_a_folder_of_something_else_is_not_overwritten(save, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("years of work")
    with pytest.raises(model_folder.CheckpointError, match="no model folder"):
        save()
    assert (tmp_path / "model" / "thesis.txt").read_text() == "years of work"


def test_a_bundled_model_goes_by_its_name(save, monkeypatch):
    folder = save()
    monkeypatch.setattr(model_folder, "BUNDLED", folder.parent)
    same(load("model").model, make_model())
    with pytest.raises(model_folder.CheckpointError, match=r"bundled model \(model\)"):
        load("nowhere")


def test_a_run_without_a_model_says_when_there_will_be_one(tmp_path):
    (tmp_path / "state").mkdir()
    with pytest.raises(model_folder.CheckpointError, match="at its end"):
        load(tmp_path)


# ---------------------------------------------------------------------------------------------
# Training states.


def make_state(seed=0):
    """Returns a training state with everything it may contain."""
    model = Model(rngs=nnx.Rngs(seed))
    return {
        "params": model,
        "ema": None,
        "opt_state": optax.adamw(1e-3).init(model),
        "step": jnp.int32(seed),
        "epoch": seed,
        "half": jnp.full(3, seed, jnp.bfloat16),
    }


@pytest.fixture
def states(tmp_path):
    states = States(tmp_path / "state")
    yield states
    states.close()


def test_a_state_is_restored_bit_for_bit(states):
    states.save(7, make_state(5))
    step, state = states.restore(make_state(0))
    assert step == 7
    same(state, make_state(5))
    assert isinstance(state["epoch"], int)


def test_nothing_saved_is_nothing_restored(states):
    assert states.restore(make_state()) is None


def test_the_newest_states_are_kept(states):
    for step in (1, 2, 3):
        states.save(step, make_state(step))
    states.wait()
    assert states.steps == [2, 3]
    same(states.restore(make_state())[1], make_state(3))


def test_a_state_is_saved_as_it_was_even_if_its_buffers_are_donated(states):
    state = {"x": jnp.arange(1000.0)}
    step = jax.jit(lambda s: {"x": s["x"] + 1}, donate_argnums=0)
    states.save(0, state)
    for _ in range(10):
        state = step(state)
    _, saved = states.restore(state)
    np.testing.assert_array_equal(saved["x"], np.arange(1000.0))


def test_a_flipped_bit_falls_back_to_the_state_before(states, caplog):
    big = {"x": np.random.default_rng(0).normal(size=20_000)}
    for step in (1, 2):
        states.save(step, {"x": big["x"] + step})
    states.wait()
    flip_a_byte(states.folder / "2")
    step, saved = states.restore(big)
    assert step == 1
    np.testing.assert_array_equal(saved["x"], big["x"] + 1)
    assert "step 2" in caplog.text
    # The step can be saved again, and the damaged state is kept aside.
    states.save(2, big)
    states.wait()
    assert states.steps == [1, 2]
    assert (states.folder.parent / "damaged" / "2").is_dir()


@pytest.mark.parametrize("left", [0, 0.5, None])
def test_a_state_cut_short_falls_back_to_the_state_before(states, left, caplog):
    """Its largest file is truncated, empty or missing."""
    big = {"x": np.random.default_rng(0).normal(size=20_000)}
    for step in (1, 2):
        states.save(step, {"x": big["x"] + step})
    states.wait()
    files = (path for path in (states.folder / "2").rglob("*") if path.is_file())
    largest = max(files, key=lambda path: path.stat().st_size)
    if left is None:
        largest.unlink()
    else:
        os.truncate(largest, int(left * largest.stat().st_size))
    step, saved = states.restore(big)
    assert step == 1
    np.testing.assert_array_equal(saved["x"], big["x"] + 1)
    assert "step 2" in caplog.text


def test_a_wrong_checksum_is_damage(states, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(named_arrays, "digest_of", lambda leaves: "0" * 64)
        states.save(2, make_state(2))
    states.wait()
    for _ in range(2):  # a second start gives the same message, and does not start over
        with pytest.raises(
            model_folder.CheckpointError, match=r"none of the states of steps \[2\]"
        ):
            states.restore(make_state())


@pytest.mark.parametrize(
    "trouble",
    [
        MemoryError(),
        OSError(errno.ESTALE, "Stale file handle"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        ValueError("Failed to open: Input/output error [os_error_code='5']"),
    ],
)
def test_a_state_that_this_machine_cannot_read_stays_where_it_is(states, trouble, monkeypatch):
    for step in (1, 2):
        states.save(step, make_state(step))
    states.wait()

    def fail(*_):
        raise KeyError("incompatible handler") from trouble  # like the store

    with monkeypatch.context() as patch:
        patch.setattr(states._checkpointer, "load_checkpointables", fail)
        with pytest.raises(model_folder.CheckpointError, match=r"2 .* cannot be read just now"):
            states.restore(make_state())
    assert not (states.folder.parent / "damaged").exists()
    assert states.restore(make_state())[0] == 2


def test_a_run_of_which_only_damage_is_left_does_not_begin_again(states):
    (states.folder.parent / "damaged" / "2").mkdir(parents=True)
    with pytest.raises(
        model_folder.CheckpointError, match=r"damaged ones: starting at step 0 would"
    ):
        states.restore(make_state())


def test_a_state_of_another_model_is_refused(states):
    states.save(1, make_state())
    other = {**make_state(), "half": jnp.zeros(4), "extra": jnp.zeros(1)}
    with pytest.raises(model_folder.CheckpointError) as error:
        states.restore(other)
    assert "extra: missing" in str(error.value)
    assert "half: (3,) on disk, (4,) in the model" in str(error.value)
    assert states.steps == [1]


def test_a_half_written_state_is_swept_away(states):
    states.save(1, make_state(1))
    states.wait()
    leftover = states.folder / "2.orbax-checkpoint-tmp"
    leftover.mkdir()
    again = States(states.folder)
    assert again.restore(make_state())[0] == 1
    assert not leftover.exists()
    again.close()


def test_a_full_disk_leaves_the_states_before(states, monkeypatch):
    states.save(1, make_state(1))
    states.wait()
    full_disk(monkeypatch)
    with pytest.raises(model_folder.CheckpointError, match="run the same command again"):
        states.save(2, make_state(2))
    assert states.restore(make_state())[0] == 1


def test_a_write_that_fails_in_the_background_is_reported_at_the_next_one(states, monkeypatch):
    states.save(1, make_state(1))
    states.wait()

    def fail():
        raise ValueError("RESOURCE_EXHAUSTED: no space left")

    monkeypatch.setattr(states._checkpointer, "wait", fail, raising=True)
    with pytest.raises(model_folder.CheckpointError, match=r"no space left.*steps \[1\]"):
        states.save(2, make_state(2))
    states.save(2, make_state(2))
    assert states.restore(make_state())[0] == 2


def test_a_disk_that_fills_up_in_the_background_is_one_sentence(states, capfd, caplog):
    """The system refuses any file larger than a few kilobytes."""
    states.save(1, make_state(1))
    states.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        states.save(2, {"x": np.random.default_rng(0).normal(size=200_000)})
        with pytest.raises(model_folder.CheckpointError, match=r"\(File too large\)\. Intact"):
            states.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert states.restore(make_state())[0] == 1
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_only_the_store_is_silenced(caplog):
    def log(name, path):
        record = logging.LogRecord(name, logging.ERROR, path, 1, "said", (), None)
        logging.getLogger(name).handle(record)

    with stores.silence():
        with stores.silence():
            pass
        log("absl", "site-packages/orbax/checkpoint/futures.py")
        assert caplog.records == []
        log("absl", "site-packages/mine.py")
        log("mine", "mine.py")
    log("absl", "site-packages/orbax/checkpoint/futures.py")
    assert [record.name for record in caplog.records] == ["absl", "mine", "absl"]


def test_the_best_state_and_one_every_so_often_are_kept(tmp_path):
    states = States(tmp_path / "state", keep=1, keep_every=10)
    scores = {3: 0.1, 4: 0.9, 9: None, 11: 0.2, 12: None, 17: None, 18: 0.3, 19: None, 23: None}
    for step, score in scores.items():
        states.save(step, {"x": np.full(3, step)}, score=score, note={"at": step})
    states.wait()
    # 4 is the best; 3, 11 and 19 are nearest to 0, 10 and 20; 23 is the newest.
    assert states.steps == [3, 4, 11, 19, 23]
    assert states.note(4) == {"at": 4}
    states.close()


def test_a_state_goes_onto_another_mesh(tmp_path):
    """Saved over 8 devices, then read over another split of them and on one device."""
    states, x = States(tmp_path / "state"), np.arange(64.0).reshape(8, 8)
    automatic = (jax.sharding.AxisType.Auto,) * 2

    def over(shape):
        mesh = jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=automatic)
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", "tensor"))
        return {"x": jax.device_put(x, where)}

    states.save(1, over((4, 2)))
    for template in (over((2, 4)), over((1, 8)), {"x": jnp.zeros((8, 8))}):
        _, state = states.restore(template)
        np.testing.assert_array_equal(state["x"], x)
        assert state["x"].sharding.is_equivalent_to(template["x"].sharding, 2)
    states.close()


def test_parameters_are_read_without_the_rest(states):
    """The average is read if there is one; damage elsewhere does not matter."""
    model, average = make_model(), Model(rngs=nnx.Rngs(5))
    moments = jax.tree.map(jnp.zeros_like, model)
    for step, ema in ((1, None), (2, average)):
        state = {"params": model, "ema": ema, "opt_state": moments}
        states.save(step, {"state": state, "seconds": 1.0})
        found, params = states.restore(jax.eval_shape(make_model), only=MODELS)
        assert found == step
        same(params, model if ema is None else average)
    with pytest.raises(model_folder.CheckpointError, match=r"head: missing"):
        states.restore(WiderModel(rngs=nnx.Rngs(0)), only=MODELS)
    assert states.steps == [1, 2]


def test_a_run_without_a_model_can_be_started_from(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    model_folder.write_config(run, config.Config())
    assert not is_unfinished(run)
    states = States(run / "state")
    states.save(4, {"state": {"params": make_model()}})
    states.close()
    assert is_unfinished(run)
    same(load_unfinished(run, make_model=make_model), make_model())


def test_a_run_that_is_started_from_while_it_goes_on_is_left_as_it_is(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    model_folder.write_config(run, config.Config())
    states = States(run / "state")
    for step in (4, 5):
        states.save(step, {"state": {"params": make_model()}})
    states.close()
    in_flight = states.folder / "6.orbax-checkpoint-tmp"
    in_flight.mkdir()
    shutil.rmtree(states.folder / "5" / "state")
    before = sorted(run.rglob("*"))
    same(load_unfinished(run, make_model=make_model), make_model())
    assert sorted(run.rglob("*")) == before


def test_a_flipped_bit_shows_in_the_sums_of_several_processes():
    """For every dtype and every position; another split gives the same sums."""
    rng = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16", "int32", "uint32", "int8", "bool"):
        leaf = jnp.asarray(rng.integers(0, 2, (8, 5)), dtype)
        (before,) = _sum_digests({"x": leaf}).values()
        for place in ((0, 0), (3, 2), (7, 4)):
            held = np.array(leaf)
            bits = held.view(f"uint{8 * held.dtype.itemsize}")
            bits[place] ^= 1
            (after,) = _sum_digests({"x": jnp.asarray(held)}).values()
            assert after != before
        mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
        assert _sum_digests({"x": jax.device_put(leaf, where)}) == {"x": before}


def test_folders_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("text.json").write_text("{}")
    model_folder.save_model(
        "here/model",
        make_model(),
        config.Config(),
        tokenizer_path=pathlib.Path("text.json"),
        vq_folder=None,
        readme="# test\n",
    )
    same(load("here").model, make_model())
