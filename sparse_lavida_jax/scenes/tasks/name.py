# SPDX-License-Identifier: Apache-2.0
"""Names what stands in several cells: `locate` the other way round."""

import functools

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.task import Task
from sparse_lavida_jax.scenes.tasks.locate import make_listing

PROMPT = "what is there?"
make = functools.partial(make_listing, prompt=PROMPT, known=r"(<LOC_\d+>)+,?")
TASK = Task(make, judges.cells, "tell")
