# SPDX-License-Identifier: Apache-2.0
"""Draws what surrounds a rectangle of an image."""

import functools

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.task import Task
from sparse_lavida_jax.scenes.tasks.inpaint import make_hole

make = functools.partial(make_hole, word="extend")
TASK = Task(make, judges.drawn, "edit", command="outpaint")
