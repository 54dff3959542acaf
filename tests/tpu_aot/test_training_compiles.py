# SPDX-License-Identifier: Apache-2.0
"""The training step of 10.4 B parameters, compiled for 64 absent chips.

For the real functions this checks the memory of each chip, that nothing large is replicated on all,
and that communication matches a formula. `lavida_o.py` runs over our meshes, and `sft_1024.py`, the
paper's run, over its own. One training target takes minutes; `-k` chooses: `v5p`, or `v6e and sft`.
"""

import importlib.util
import math
import pathlib

import jax
import pytest
import segment_programs

from benchmarks import aot
from sparse_lavida_jax import config

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for TPUs needs libtpu: pip install -e '.[aot]'",
)
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
LARGE = 2**22  # elements; 16 MB in float32


@pytest.fixture(autouse=True)
def _quick_compiler():
    """Halves compile time; the compiler's estimates are then useless."""
    jax.config.update("jax_exec_time_optimization_effort", -1.0)
    yield
    jax.config.update("jax_exec_time_optimization_effort", 0.0)


@pytest.mark.parametrize(
    ("name", "topology"),
    [*(("lavida_o", topology) for topology in aot.TRAINING), ("sft_1024", "v6e:8x8")],
)
def test_a_training_step_of_the_full_model_fits_64_chips(name, topology):
    """128 rows of 1,024 understanding and 1,280 generation tokens: see `aot.expected_bytes`.

    The optimizer's state alone would need 125 GB if it was not split.
    """
    settings = aot.full_run(config.read(CONFIGS / f"{name}.py"))
    axes = aot.training_axes(settings, topology)
    batch = memory.BatchSize(rows=128, understanding=1024, generation=1280)
    with segment_programs.unchecked():
        step = aot.training(settings, topology, axes, batch)
    assert math.prod(axes.values()) == 64
    assert sum(x.size for x in jax.tree.leaves(step.inputs[0].params)) > 10.4e9
    assert step.memory()["total"] <= aot.MARGIN * step.chip.memory, step.memory()
    assert step.whole(LARGE) == []
    # The new state replaces the given one in place.
    assert step.memory()["results"] < 2**20
    sent = sum(step.exchanged().values())
    expected = sum(aot.expected_bytes(settings, axes, batch).values())
    assert expected / 1.5 < sent < 1.5 * expected
    for kernel in ("step_causal_attention", "step_causal_attention_dq"):
        assert kernel in step.text
