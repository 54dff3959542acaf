# SPDX-License-Identifier: Apache-2.0
"""Measured tiles come from the table, all others from the rule."""

import itertools
import json

import jax
import jax.numpy as jnp
import pytest

from sparse_lavida_jax.kernels import attention, devices
from sparse_lavida_jax.kernels.tile_lists import GpuSizes, TileSizes

MEASURED = {"queries": 256, "keys": 512, "part": 128}


@pytest.fixture
def table(monkeypatch):
    """A table with invented entries for one TPU and one GPU."""
    held = {
        "TPU of a test": {"128": {"1024x2048": {"sizes": MEASURED}}},
        "GPU of a test": {"64": {"1024x1024": {"sizes": {"dq_keys": 128, "dq_stages": 3}}}},
    }
    monkeypatch.setattr(devices, "_table", lambda: held)
    return held


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((1024, 2048), (512, 1024, 256)), ((96, 1792), (128, 256, 256)),
     ((200, 1536), (256, 512, 256)), ((384, 640), (128, 128, 128)),
     ((3456, 3456), (512, 512, 256)), ((1664, 1664), (256, 256, 256))],
)  # fmt: skip
def test_the_rule_takes_the_largest_tiles_that_fill_up_little(lengths, expected):
    assert devices.rule(*lengths) == TileSizes(*expected)
    assert devices.tile_sizes(*lengths, device="never measured") == TileSizes(*expected)


def test_a_cache_is_never_padded_to_whole_tiles():
    multiple = attention.slot_multiple("pallas_tpu")
    for slots in range(multiple, 9000, multiple):
        assert devices.rule(192, slots).keys >= 256
        assert all(slots % tiles.keys == 0 for tiles in devices.tpu_candidates(192, slots))
        for kernel in devices.OF_GPUS:
            tiles = devices.sizes_of(kernel, 192, slots)
            assert tiles.forward.keys <= attention.slot_multiple(kernel)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((1, 128), "128x128"), ((129, 1536), "256x2048"), ((8152, 8192), "8192x8192")],
)
def test_lengths_share_an_entry_up_to_the_next_power_of_two(lengths, expected):
    assert devices.bucket(*lengths) == expected


def test_what_was_measured_comes_before_the_rule(table):
    found = devices.tile_sizes(1024, 1536, device="TPU of a test")
    assert found == TileSizes(**MEASURED) != devices.rule(1024, 1536)


@pytest.mark.parametrize(
    "asked",
    [
        {"head_dim": 64},
        {"device": "another"},
        {"query_len": 512},
        {"key_len": 1152},  # not a multiple of 512
    ],
)
def test_other_calls_follow_the_rule(table, asked):
    given = {"query_len": 1024, "key_len": 1536, "head_dim": 128, "device": "TPU of a test"} | asked
    assert devices.tile_sizes(**given) == devices.rule(given["query_len"], given["key_len"])


def test_a_gpu_has_the_measured_tiles_and_the_defaults_of_the_others(table):
    found = devices.gpu_sizes(1000, 1000, 64, device="GPU of a test")
    assert found == GpuSizes(dq_keys=128, dq_stages=3)
    assert devices.gpu_sizes(1000, 1000, 128, device="GPU of a test") == GpuSizes()


def test_attention_asks_for_the_device_that_it_is_compiled_for(table):
    own = table["TPU of a test"]["128"]["1024x2048"]
    table[jax.devices()[0].device_kind] = {"128": {"1024x2048": own}}
    tags = (jnp.zeros((1, 1024), jnp.int32),) * 2 + (jnp.zeros((1, 2048), jnp.int32),)
    sizes = []

    def make(*tags):
        sizes.append(attention.make_tables(*tags, implementation="pallas_tpu").sizes)

    jax.eval_shape(make, *tags)
    assert sizes == [TileSizes(**MEASURED)]


def test_the_shipped_table_holds_only_what_was_measured():
    table = json.loads(devices.TABLE.read_text())
    for by_head_dim in table.values():
        for entries in by_head_dim.values():
            for name, entry in entries.items():
                lengths = [int(length) for length in name.split("x")]
                assert devices.bucket(*lengths) == name
                assert {*entry} >= {"sizes", "median_us", "rule_us", "commit", "jax"}
                assert {*entry["median_us"]} == {*entry["rule_us"]} != set()


def test_candidates_hold_the_tiles_of_the_rule_and_none_twice():
    for lengths in ((1536, 1536), (8152, 8152), (3456, 3456), (192, 1536)):
        found = devices.tpu_candidates(*lengths)
        assert devices.rule(*lengths) in found and len(found) == len(set(found)) > 5
    for head_dim, kernel in itertools.product((64, 128), devices.OF_GPUS):
        for candidates in devices.gpu_candidates(head_dim, kernel).values():
            assert devices.gpu_rule(kernel) in candidates
            assert len(candidates) == len(set(candidates)) > 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"forward_keys": 96}, "forward_keys=96: a tile has 64 or 128"),
        ({"dkv_stages": 1}, "dkv_stages=1: one tile is read"),
    ],
)
def test_tiles_that_no_gpu_kernel_has_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        GpuSizes(**wrong)
