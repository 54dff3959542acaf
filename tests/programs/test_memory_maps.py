# SPDX-License-Identifier: Apache-2.0
"""Programs are forgotten before a process has too many memory maps."""

import jax
import jax.numpy as jnp
import pytest

from sparse_lavida_jax.programs import memory_maps

pytestmark = pytest.mark.skipif(
    not memory_maps.MAPS.exists(), reason="counts what Linux tells in /proc"
)


@pytest.fixture
def limit(monkeypatch, tmp_path):
    """Returns a function that sets the limit of the kernel, and forgets the last count."""

    def set_to(number):
        told = tmp_path / "max_map_count"
        told.write_text(f"{number}\n")
        monkeypatch.setattr(memory_maps, "MOST", told)
        monkeypatch.setattr(memory_maps, "_counted", -memory_maps.EVERY)

    return set_to


def maps():
    return len(memory_maps.MAPS.read_bytes().splitlines())


def test_programs_are_forgotten_near_the_limit_alone(limit):
    double = jax.jit(lambda x: 2 * x)
    for length in range(1, 9):
        double(jnp.zeros(length))
    limit(100 * maps())
    assert not memory_maps.make_room()
    before = maps()
    limit(before)
    assert memory_maps.make_room()
    assert maps() < before
    assert double(jnp.ones(3)).tolist() == [2, 2, 2]


def test_maps_are_not_counted_at_every_request(limit):
    limit(1)
    assert memory_maps.make_room()
    assert not memory_maps.make_room()


def test_other_systems_have_no_such_limit(limit, monkeypatch, tmp_path):
    limit("no number")
    assert not memory_maps.make_room()
    monkeypatch.setattr(memory_maps, "MOST", tmp_path / "absent")
    monkeypatch.setattr(memory_maps, "_counted", -memory_maps.EVERY)
    assert not memory_maps.make_room()
