# SPDX-License-Identifier: Apache-2.0
r"""The dense twin of the art model: trained and sampled with full attention.

    python -m sparse_lavida_jax.main --config=configs/art_dense.py

Size, data, lessons and seed are those of `configs/art.py`, without blocks, registers or cache:
LaViDa-O's own method at this scale. Each lesson takes as long as that of the sparse model. A dense
step on texts or whole images is faster, since its rows hold no masked blocks; one on a part of an
image is slower, since the model sees all cells of the image. `late` goes on from the dense twin.
"""

import art
import ml_collections

# CPU seconds of a step of the sparse model, relative to a dense one: medians of four steps of each
# kind of example on one busy core, weighted by the shares of the tasks.
STEPS = dict(name=1.3, look=1.3, parts=0.49)
MIXTURE_STEPS = 1.34


def get_config(variant: str = "whole") -> ml_collections.ConfigDict:
    c = art.get_config(variant)
    c.name = f"{c.name}_dense"
    c.diffusion.attention = "full"
    c.diffusion.layout_first = 0.0  # masks are random
    c.model.trained_attention = "full"
    if variant == "late":
        c.train.init_from = "benchmarks/art_dense"
    begin = until = 0
    for name, lesson in sorted(c.data.lessons.items(), key=lambda item: item[1].until):
        begin, until = lesson.until, until + round(STEPS[name] * (lesson.until - begin))
        lesson.until = until
    c.train.train_steps = until + round(MIXTURE_STEPS * (c.train.train_steps - begin))
    return c
