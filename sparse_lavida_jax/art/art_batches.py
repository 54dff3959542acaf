# SPDX-License-Identifier: Apache-2.0
"""Batches of the art world: endless examples of all its tasks."""

from typing import Any, ClassVar

from sparse_lavida_jax.art import tasks
from sparse_lavida_jax.art.sheet import taught
from sparse_lavida_jax.art.world import CELL
from sparse_lavida_jax.scenes.scene_batches import SceneBatches
from sparse_lavida_jax.scenes.task import IMAGE_GROUPS, TEXT_GROUPS, Sample


class ArtBatches(SceneBatches):
    """The batches of a configuration on scenes of real art."""

    world: ClassVar[Any] = tasks
    tasks_of: ClassVar[dict[str, list[str]]] = {
        group: [name for name, task in tasks.TABLE.items() if task.group == group]
        for group in (*TEXT_GROUPS, *IMAGE_GROUPS)
    }

    def sample(self, task: str, index: int) -> Sample:
        side = CELL * self.settings.model.grid_size
        things = taught(self.settings.data)
        return tasks.sample(task, self.settings.seed, index, sheet=things, side=side)
