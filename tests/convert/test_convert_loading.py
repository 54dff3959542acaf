# SPDX-License-Identifier: Apache-2.0
"""Parameters are read directly to their devices: any mesh, any dtype."""

import shutil

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sparse_lavida_jax.checkpoints import model_folder, named_arrays, stores, tensors
from sparse_lavida_jax.models import denoiser, fuse


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)


def over(mesh):
    """Splits the last two axes of matrices over the mesh where they divide."""

    def choose(name, shape):
        spec = [None] * len(shape)
        if name.endswith("kernel"):
            spec[-2] = "rows" if shape[-2] % 4 == 0 else None
            spec[-1] = "columns" if shape[-1] % 2 == 0 else None
        return NamedSharding(mesh, PartitionSpec(*spec))

    return choose


def named(model):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
    }


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch_bytes", [0, pytest.param(1, marks=pytest.mark.slow), 2**28])
def test_eight_devices_hold_what_one_would(
    converted, mesh, dtype, batch_bytes, monkeypatch, tmp_path
):
    """From safetensors files, and from the array store in batches of several sizes."""
    if batch_bytes:
        monkeypatch.setattr(stores, "BATCH_BYTES", batch_bytes)
        model_folder.copy(converted, tmp_path / "model", "orbax")
        converted = tmp_path / "model"
    choose = over(mesh)
    whole = named(model_folder.load_model(converted, dtype=dtype).model)
    spread = named(model_folder.load_model(converted, sharding=choose, dtype=dtype).model)
    assert set(spread) == set(whole)
    for name, leaf in spread.items():
        assert leaf.dtype == whole[name].dtype == dtype
        np.testing.assert_array_equal(leaf, whole[name], name)
        assert leaf.sharding.is_equivalent_to(choose(name, leaf.shape), leaf.ndim), name


def test_every_device_holds_only_its_part(converted, mesh):
    model = model_folder.load_model(converted, sharding=over(mesh)).model
    kernel = model.joint_layers.attn_out.kernel[...]
    layers, rows, columns = kernel.shape
    parts = {shard.data.shape for shard in kernel.addressable_shards}
    assert parts == {(layers, rows // 4, columns // 2)}
    assert len(kernel.addressable_shards) == 8


def test_a_stack_may_be_split_between_its_layers(converted, mesh):
    def choose(name, shape):
        split = "columns" if name.startswith("joint_layers") else None
        return NamedSharding(mesh, PartitionSpec(split))

    kernel = model_folder.load_model(converted, sharding=choose).model.joint_layers.attn_out.kernel
    whole = model_folder.load_model(converted).model.joint_layers.attn_out.kernel
    assert kernel[...].sharding.spec == PartitionSpec("columns")
    np.testing.assert_array_equal(kernel[...], whole[...])


def test_a_run_gives_its_parameters_without_its_training_state(converted, tmp_path):
    shutil.copytree(converted, tmp_path / "run" / "model")
    (tmp_path / "run" / "state" / "7").mkdir(parents=True)
    (tmp_path / "run" / "state" / "7" / "moments").write_bytes(b"never read")
    loaded = model_folder.load_model(tmp_path / "run")
    whole = model_folder.load_model(converted)
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded.model, whole.model))


def test_a_module_is_filled_by_names_on_disk(converted):
    loaded = model_folder.load_model(converted)
    store = stores.open_params(converted)
    module = denoiser.shapes(loaded.config.model)
    filled = named_arrays.module_of(module, store.read(store.leaves))
    assert jax.tree.all(jax.tree.map(np.array_equal, filled, loaded.model))
    leaves = store.read(store.leaves)
    del leaves["final_norm/weight"]
    with pytest.raises(model_folder.CheckpointError, match=r"final_norm/weight: missing"):
        named_arrays.module_of(module, leaves)


@pytest.mark.parametrize(
    ("task", "unread"),
    [
        ("image", "split_layers/00/understanding/mlp/up/kernel"),
        ("text", "image_head/logits/kernel"),
    ],
)
def test_only_what_a_task_reads_is_loaded_and_nothing_is_held_twice(
    converted, task, unread, monkeypatch
):
    whole = model_folder.load_model(converted).model
    expected = named(fuse.for_inference(whole, task=task))
    found = set()

    def read(path, name, *index, original=tensors.read):
        found.add(name)
        return original(path, name, *index)

    monkeypatch.setattr(tensors, "read", read)
    part = model_folder.load_model(converted, wanted=fuse.reads(task)).model
    assert unread in {*named_arrays.by_layer(whole)} - found
    fused = named(fuse.for_inference(part, task=task, consume=True))
    assert not {"joint_layers", "split_layers"} & {*vars(part)}
    assert fused.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(fused[name], leaf)
