# SPDX-License-Identifier: Apache-2.0
"""Sampling an image of 1024 pixels at full size, all 32 layers, compiled for absent chips.

The real functions at the size of `configs/lavida_o.py`, with fused parameters, and heads split over
the chips. Each target takes a minute; batches of eight images run only with SLOW_TESTS=1, as in
`.ci/run --full`.
"""

import importlib.util
import pathlib

import phase_programs
import pytest

from benchmarks import aot, hlo
from sparse_lavida_jax import config

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for TPUs needs libtpu: pip install -e '.[aot]'",
)
CONFIG = pathlib.Path(__file__).parents[3] / "configs/lavida_o.py"
LARGE = 2**22  # elements; 8 MB in bfloat16
CASES = [
    *(pytest.param((topology, 1), id=topology) for topology in aot.SAMPLING),
    pytest.param(("v5e:2x4", 8), id="v5e:2x4-b8", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=CASES)
def programs(request):
    """Prefill and the longest phase of images with guidance: two rows each."""
    settings = aot.full_run(config.read(CONFIG))
    topology, images = request.param
    axes = aot.SAMPLING[topology]
    with phase_programs.unchecked():
        return aot.sampling(settings, topology, axes, images)


def test_they_fit_with_room_to_spare_and_nothing_large_is_held_by_every_chip(programs):
    for program in programs:
        assert program.memory()["total"] <= aot.MARGIN * program.chip.memory, program.memory()
        assert program.whole(LARGE) == []
    # The caches of all layers are one input and one output.
    _, phase = programs
    assert phase.memory()["results"] < 2**20


def test_no_loop_copies_the_cache_or_a_layer_of_it(programs):
    """Writes into the cache are found too, which shows that the check works."""
    _, phase = programs
    shapes = phase_programs.shapes_of(phase.inputs[1].cache)
    assert phase_programs.in_place(phase.text, shapes)
    assert phase_programs.copies(phase.text, shapes) == []


def test_no_layers_of_a_prompt_are_cut_out_of_the_stack(programs):
    """The last joint layer is not in the loop; a copy of the others was 0.8 GB on a v5e."""
    prefill, _ = programs
    assert prefill.memory()["temporaries"] < prefill.memory()["arguments"] / 10


def test_a_step_sends_what_its_tokens_are_and_no_keys_of_the_prompt(programs):
    _, phase = programs
    sent = phase.exchanged()
    assert "all-to-all" not in sent
    cache = phase.inputs[1].cache
    kept = cache.joint[0].size + cache.split[0].size
    steps = len(phase.inputs[2].block)
    # Keys and values of the cache in bfloat16 have four times as many bytes.
    assert sum(sent.values()) / steps < kept


def test_products_take_60_percent_of_the_cycles_of_an_image(programs):
    """With the head and the draws. As loops over exchanges they took 27 % on a v5e."""
    _, phase = programs
    bar = 0.6 if len(phase.inputs[1].responses) == 1 else 0.59  # of eight images
    assert hlo.product_cycles(phase.text) >= bar * hlo.cycles(phase.text) > 0
    sent = phase.exchanged()
    assert sent.get("collective-permute", 0) < sum(sent.values()) / 1000


def test_a_time_is_projected_and_none_is_measured(programs):
    """The projection uses the compiler's cycle estimates, and does not exist without them."""
    for program in programs:
        told = program.projected()
        assert 0 < told["compute_s"] < told["overlapped_s"] <= told["apart_s"]
