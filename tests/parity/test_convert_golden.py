# SPDX-License-Identifier: Apache-2.0
"""Recorded weights are converted to a model folder and back without changing a bit.

That they become the right parameters is shown by the outputs in the other tests of this folder.
"""

import golden
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from sparse_lavida_jax.checkpoints import stores, tensors
from sparse_lavida_jax.convert import from_torch, names, to_torch


def kinds():
    """One case for every set of tensors, or the reason why there is none."""
    if reason := golden.why_absent():
        return [pytest.param("", marks=pytest.mark.skip(reason=reason))]
    seen = {}
    for name in golden.cases_with_a_model():
        stored = tensors.list_tensors(golden.folder() / name / "weights.safetensors")
        merges = golden.case(name).settings.model.codes_per_token
        shapes = (merges, *sorted((tensor, place.shape) for tensor, place in stored.items()))
        seen.setdefault(shapes, name)
    return list(seen.values())


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", kinds())
def test_every_bit_comes_back(name, dtype, tmp_path):
    recorded = golden.case(name)
    weights = {tensor: x.astype(dtype) for tensor, x in recorded.weights.items()}
    if all(x.dtype == dtype for x in recorded.weights.values()):
        model = recorded.converted
    else:
        folder, model = recorded.as_released(tmp_path / "released"), tmp_path / "model"
        (folder / "model.safetensors").unlink()
        safetensors.numpy.save_file(weights, folder / "model.safetensors")
        from_torch.convert(folder, model, understanding_only=True)
    half = sum(x.nbytes for x in weights.values()) // 2
    to_torch.export(model, tmp_path / "back", max_shard_bytes=half)
    back = {}
    for path in (tmp_path / "back").glob("model-*.safetensors"):
        back |= safetensors.numpy.load_file(path)
    assert set(back) == set(weights)
    for tensor, x in weights.items():
        assert (back[tensor].dtype, back[tensor].shape) == (x.dtype, x.shape)
        assert back[tensor].tobytes() == x.tobytes(), tensor
    config = (recorded.folder / "config.json").read_bytes()
    assert (tmp_path / "back" / "config.json").read_bytes() == config


@pytest.mark.parametrize("name", golden.cases_with_a_model() or kinds())
def test_every_recorded_tensor_has_a_name(name):
    """Strictly: none is left over, and only our own registers are missing."""
    recorded = golden.case(name)
    table = {entry.official: entry for entry in names.table(recorded.settings)}
    stored = tensors.list_tensors(recorded.folder / "weights.safetensors")
    assert set(stored) <= set(table)
    assert set(table) - set(stored) <= set(names.REGISTERS)
    assert {n: place.shape for n, place in stored.items()} == {n: table[n].shape for n in stored}


@pytest.mark.parametrize("name", kinds())
def test_registers_start_as_what_they_stand_in_for(name):
    recorded = golden.case(name)
    store = stores.open_params(recorded.converted)
    model = recorded.model()
    mask = recorded.weights["model.transformer.wte.weight"][recorded.settings.model.text_mask_id]
    np.testing.assert_array_equal(store.read_one("register_understanding"), mask)
    if not recorded.settings.model.understanding_only:
        np.testing.assert_allclose(
            store.read_one("register_generation"), model.masked_cell(), atol=1e-6
        )
