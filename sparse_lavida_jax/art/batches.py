# SPDX-License-Identifier: Apache-2.0
"""Batches of the art world: endless examples of all its tasks."""

from typing import Any, ClassVar

from sparse_lavida_jax.art import tasks
from sparse_lavida_jax.scenes.batches import SceneBatches, groups_of


class ArtBatches(SceneBatches):
    """The batches of a configuration on scenes of real art."""

    world: ClassVar[Any] = tasks
    known_groups = groups_of(tasks.TABLE)
