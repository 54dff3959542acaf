# SPDX-License-Identifier: Apache-2.0
"""The choice of tiles from made-up times: nothing is measured or written."""

import dataclasses

import numpy as np
import pytest

from benchmarks import tune
from benchmarks.methods import Case
from sparse_lavida_jax.kernels import devices, shapes
from sparse_lavida_jax.kernels.tile_lists import GpuSizes, TileSizes

BEST = TileSizes(256, 512, 256)


def case(name="row", length=1024):
    block = np.zeros(length, np.int32)
    return Case(name, 1, shapes.RowTags(block, block, block))


def times_of(seconds):
    """Every candidate takes a second, except for the named ones; None means that it fails."""

    def times(case, candidates):
        found = {candidate: seconds.get(candidate, 1.0) for candidate in candidates}
        return {candidate: taken for candidate, taken in found.items() if taken is not None}

    return times


def test_the_fastest_tiles_are_chosen_with_what_they_were_measured_to_take():
    choice = tune.choose("1024x1024", [case()], "pallas_tpu", times_of({BEST: 0.5}))
    assert choice.sizes == BEST
    assert choice.median_us == {"row/forward_backward": 0.5e6}
    assert choice.rule_us == {"row/forward_backward": 1e6}


@pytest.mark.parametrize("seconds", [{}, {BEST: 0.99}, {BEST: None}])
def test_the_rule_stays_where_nothing_beats_it_by_more_than_noise(seconds):
    assert tune.choose("1024x1024", [case()], "pallas_tpu", times_of(seconds)).sizes is None


def test_tiles_have_to_run_on_all_lengths_of_their_entry():
    """256 queries do not divide 1,152, and what is fast for one shape may be slow for others."""
    members = [case("even"), case("odd", 1152)]
    assert tune.choose("2048x2048", members, "pallas_tpu", times_of({BEST: 0.1})).sizes is None

    def slow_on_one(case, candidates):
        taken = {"first": 0.8, "second": 1.5}[case.name]
        return dict.fromkeys(candidates, 1.0) | {BEST: taken}

    members = [case("first"), case("second")]
    assert tune.choose("1024x1024", members, "pallas_tpu", slow_on_one).sizes is None


def test_a_gpu_has_forward_and_backward_tiles_chosen_apart():
    forward = GpuSizes(forward_keys=64, forward_stages=4)
    backward = GpuSizes(dq_stages=3, dkv_stages=3)
    both = tune.choose("k", [case()], "pallas_gpu", times_of({forward: 0.5, backward: 0.6}))
    assert both.sizes == GpuSizes(64, 4, 64, 3, 64, 3)
    assert both.median_us == {"row/forward": 0.5e6, "row/forward_backward": 0.6e6}
    decoding = tune.choose(
        "k", [case("decode_x")], "pallas_gpu", times_of({forward: 0.5, backward: 0.1})
    )
    assert decoding.sizes == forward
    rule = devices.gpu_rule("pallas_triton")
    wide = dataclasses.replace(rule, forward_keys=128)
    found = tune.choose("k", [case("decode_x")], "pallas_triton", times_of({wide: 0.5}))
    assert found.sizes == wide  # backward as in the rule of this kernel


def test_only_this_device_is_rewritten_and_an_entry_that_lost_is_dropped():
    kept = {"64": {"128x128": {"sizes": {"dq_keys": 128}}}}
    before = {
        "other": {"128": {"1024x1024": {"sizes": {"queries": 1}}}},
        "this": kept | {"128": {"256x256": {"sizes": {"queries": 2}}, "512x512": {"sizes": {}}}},
    }
    choices = [
        tune.TileChoice("256x256", None, {"a/forward": 1.0}, {"a/forward": 1.0}),
        tune.TileChoice("128x128", BEST, {"b/forward": 1.0}, {"b/forward": 2.0}),
    ]
    after = tune.rewritten(before, "this", 128, choices)
    assert after["other"] == before["other"] and after["this"]["64"] == kept["64"]
    assert list(after["this"]["128"]) == ["128x128", "512x512"]
    entry = after["this"]["128"]["128x128"]
    assert TileSizes(**entry["sizes"]) == BEST and entry["rule_us"] == {"b/forward": 2.0}
    told = tune.changes(before, after).splitlines()
    assert len(told) == 2
    assert "128x128: the rule -> {'queries': 256" in told[0]
    assert "256x256: {'queries': 2} -> the rule" in told[1]


def test_the_shapes_that_are_tuned_are_the_frozen_ones_by_their_lengths():
    entries = tune.entries(shapes.names(), dry=False)
    names = {case.name for members in entries.values() for case in members}
    assert names == set(shapes.names()) - {"full_8192"}
    assert {case.name for case in entries["8192x8192"]} == {"single_8152", "packed_8192"}
    assert set(entries) == {devices.bucket(*c.lengths) for m in entries.values() for c in m}
