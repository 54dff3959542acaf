# SPDX-License-Identifier: Apache-2.0
"""Every parameter matches one rule, and is split as the rule says."""

import pathlib

import jax
import numpy as np
import pytest
import tiny
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.models import lora, parameters, sharding
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.denoiser import shapes as denoiser_shapes

RELEASE = config.read(pathlib.Path(__file__).parents[2] / "configs/lavida_o.py").model


def mesh_of(**axes):
    devices = np.array(jax.devices()[: np.prod(list(axes.values()))])
    return Mesh(devices.reshape(*axes.values()), tuple(axes))


def stacked_shapes(settings):
    """Names and shapes as passed to `model_folder.ChooseSharding`: all layers in one array."""
    model = denoiser_shapes(settings)
    return {
        "/".join(str(part) for part in path): value.shape
        for path, value in nnx.to_flat_state(nnx.state(model))
    }


@pytest.mark.parametrize(
    "settings",
    [
        tiny.model_settings(codes_per_token=4),
        tiny.model_settings(codes_per_token=1, image_head="embed"),
        tiny.model_settings(understanding_only=True),
        tiny.model_settings(codes_per_token=4, sequential_codes=True, style_parts=2),
        config.Model(),
        RELEASE,
    ],
    ids=["small", "embed", "text", "ours", "default", "release"],
)
def test_every_parameter_matches_exactly_one_rule(settings):
    shapes = stacked_shapes(settings)
    split = 0
    for name, shape in shapes.items():
        split += np.prod(shape) * any(sharding.spec_of(name, shape, mesh_of(fsdp=2, tensor=4)))
    if settings == RELEASE:
        assert {"image_newline", "vision/tower/post_norm/scale"} < set(shapes)
    if settings in (config.Model(), RELEASE):
        assert split > 0.99 * sum(np.prod(shape) for shape in shapes.values())


def test_adapters_match_one_rule_and_are_split_like_their_matrix():
    settings = config.Model(codes_per_token=4, sequential_codes=True)
    low_rank = config.Lora(rank=8, targets="")
    model = jax.eval_shape(
        lambda: lora.attach(Denoiser(settings, rngs=nnx.Rngs(0)), low_rank, jax.random.key(0))
    )
    shapes = {name: leaf.shape for name, leaf in parameters.by_name(model).items()}
    mesh, ours = mesh_of(fsdp=2, tensor=4), [name for name in shapes if lora.NAME.search(name)]
    assert len(ours) > 40
    for name in ours:
        module, side = name.rsplit("/", 1)
        spec = sharding.spec_of(name, shapes[name], mesh)
        rows, columns = sharding.rule_of(f"{module}/kernel") or (None, None)
        wanted = (rows, None) if side == "lora_a" else (None, columns)
        assert tuple(spec)[-2:] == wanted, name


def test_an_axis_that_does_not_divide_a_side_splits_the_other():
    mesh = mesh_of(fsdp=2, tensor=4)
    found = sharding.spec_of("text_head/kernel", (32, 42), mesh)
    assert found == PartitionSpec(("fsdp", "tensor"), None)
    found = sharding.spec_of("text_embedding", (42, 32), mesh_of(tensor=4))
    assert found == PartitionSpec(None, "tensor")
    found = sharding.spec_of("text_head/kernel", (6, 42), mesh)
    assert found == PartitionSpec("fsdp", None)
    found = sharding.spec_of("joint_layers/attn_out/kernel", (3, 8, 32), mesh)
    assert found == PartitionSpec(None, "tensor", "fsdp")
    assert sharding.spec_of("text_head/kernel", (32, 40), mesh_of(data=8)) == PartitionSpec(
        None, None
    )


def test_a_parameter_without_a_rule_is_named():
    told = r"0 rules .* for the parameter novel/thing"
    with pytest.raises(ValueError, match=told):
        sharding.rule_of("novel/thing")
    for part in ("params", "ema", "frozen"):
        with pytest.raises(ValueError, match=told):
            sharding.spec_of_state(f"{part}/novel/thing", (8, 8), mesh_of(fsdp=8))


def test_what_an_optimizer_keeps_next_to_its_moments_is_whole():
    assert sharding.spec_of_state("opt_state/1/0/count", (), mesh_of(fsdp=8)) == PartitionSpec()
    moments = sharding.spec_of_state("opt_state/1/0/mu/text_head/kernel", (8, 3), mesh_of(fsdp=8))
    assert moments == PartitionSpec("fsdp", None)


def test_a_mesh_of_other_axes_is_refused():
    with pytest.raises(ValueError, match="axis 'rows': its axes are among data, fsdp, tensor"):
        sharding.over(mesh_of(rows=2))


def test_a_mesh_of_explicit_axes_is_left_to_the_compiler():
    """The model does not declare how its arrays are split, as such a mesh would require."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"))
    found = sharding.over(mesh)("text_head/kernel", (32, 40))
    assert found == NamedSharding(mesh_of(fsdp=2, tensor=2), PartitionSpec("fsdp", "tensor"))


def test_a_model_folder_is_read_into_a_mesh(tmp_path):
    settings = config.Config(model=tiny.model_settings(codes_per_token=4))
    model = tiny.denoiser(settings.model)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    model_folder.save_model(
        tmp_path / "model", model, settings, tokenizer_path=tokenizer, vq_folder=None, readme=""
    )
    mesh = mesh_of(fsdp=2, tensor=4)
    read = model_folder.load_model(tmp_path / "model", sharding=sharding.over(mesh)).model
    kernel = read.split_layers.generation.mlp.up.kernel[...]
    assert kernel.sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    assert len(kernel.addressable_shards) == 8
    jax.tree.map(np.testing.assert_array_equal, nnx.state(read), nnx.state(model))


@pytest.mark.parametrize(
    ("sizes", "own", "expected"),
    [
        ({"data": 8}, [0, 1, 2, 3], (0, 2)),
        ({"data": 8}, [6, 7], (3, 4)),
        ({"data": 2, "fsdp": 4}, [4, 5], (2, 4)),
        ({"fsdp": 4, "tensor": 2}, [2, 3], (1, 4)),
        ({"fsdp": 2, "tensor": 4}, [6, 7], (1, 2)),  # shared with the process of 4 and 5
        ({"data": 8}, [0, 7], (0, 1)),  # far apart: it makes all rows
        ({"tensor": 8}, [2, 3], (0, 1)),
    ],
)
def test_a_process_makes_the_rows_of_its_devices(monkeypatch, sizes, own, expected):
    mesh = sharding.automatic(sizes)
    kept = {d for d in mesh.devices.flat if d.id in own}
    real = NamedSharding.devices_indices_map

    def addressable(self, shape):
        return {d: index for d, index in real(self, shape).items() if d in kept}

    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", addressable)
    assert sharding.share_of_rows(mesh) == expected
