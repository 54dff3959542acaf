# SPDX-License-Identifier: Apache-2.0
"""Draws what surrounds a rectangle of an image, and finishes the things that its edge cuts."""

import functools

from sparse_lavida_jax.art import rules
from sparse_lavida_jax.art.tasks.inpaint import make_hole
from sparse_lavida_jax.scenes.task import Task

make = functools.partial(make_hole, word="extend")
TASK = Task(make, rules.drawn, "edit", command="outpaint")
