# SPDX-License-Identifier: Apache-2.0
"""Lays out in text what is missing of an image."""

from sparse_lavida_jax.scenes.task import Task, layout_sample

TASK = Task(layout_sample, None, "tell", made_of=("inpaint", "outpaint"))
