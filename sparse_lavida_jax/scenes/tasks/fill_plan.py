# SPDX-License-Identifier: Apache-2.0
"""Lays what is missing of an image out in text: the plans of `inpaint` and `outpaint`."""

import dataclasses

from sparse_lavida_jax.scenes.task import Sample, Task


def make(whole: Sample) -> Sample:
    """Returns the plan of an example of `inpaint` or `outpaint` as an answer."""
    return dataclasses.replace(whole, answer=whole.plan, target=None, plan=None)


TASK = Task(make, None, "tell", made_of=("inpaint", "outpaint"))
