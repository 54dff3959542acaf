# SPDX-License-Identifier: Apache-2.0
"""Sampling a picture at full size, all 32 layers, on chips that are only described."""

import importlib.util
import os

import numpy as np
import pytest
import segment_programs
from jax.sharding import Mesh, NamedSharding, PartitionSpec

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="compiling for TPUs needs libtpu: pip install -e '.[aot]'",
    ),
    pytest.mark.skipif(
        not os.environ.get("FULL_TPU_SAMPLING"),
        reason="the full size takes minutes to compile: set FULL_TPU_SAMPLING=1",
    ),
]
GB = 1e9


@pytest.mark.parametrize(
    ("topology", "chips", "memory"), [("v5e:2x4", 8, 16 * GB), ("v5p:2x2x1", 4, 95 * GB)]
)
def test_the_sampling_program_fits_and_copies_no_cache(topology, chips, memory):
    """Two guidance rows, heads and hidden widths split over all chips."""
    from jax.experimental import topologies

    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # its lock file stops a second one
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # asks the network for what is not there
    described = topologies.get_topology_desc(topology, "tpu").devices
    assert len(described) == chips
    mesh = Mesh(np.array(described), ("tensor",))
    model = segment_programs.settings(
        attention_implementation="pallas_tpu", num_layers=32, dual_tower_layers=16
    )
    sharding = NamedSharding(mesh, PartitionSpec())
    program = segment_programs.compiled("image", model, sharding, "tpu")
    whole = program.cache_shapes
    split = frozenset((*shape[:-1], shape[-1] // chips) for shape in whole)
    assert segment_programs.in_place(program.hlo, split)
    assert not segment_programs.copies(program.hlo, split | whole)
    used = program.memory.argument_size_in_bytes + program.memory.temp_size_in_bytes
    print(
        f"{topology}: {used / GB:.2f} GB a chip, {program.memory.temp_size_in_bytes / GB:.2f} temp"
    )
    # Parameters in bfloat16 and the cache, divided over the chips, and little more.
    assert 20 * GB / chips < used < 26 * GB / chips < memory
