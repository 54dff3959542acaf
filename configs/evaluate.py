# SPDX-License-Identifier: Apache-2.0
r"""The benchmarks of the paper, and exact scores of a small model on its world.

    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/evaluate.py:scenes
    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/evaluate.py:geneval \
        --checkpoint=models/lavida-o --config.evaluate.data=benchmarks/geneval

After the colon: art, chartqa, docvqa, dpg, geneval, imgedit, mathverse, mathvista, mjhq, mmbench,
mme, mmmu, refcoco, refcoco_plus, refcocog, scenes. `sparse_lavida_jax/evals/benchmarks` states the
settings of each; docs/api/benchmarks.md lists the official files and the judges.
"""

import ml_collections

from sparse_lavida_jax.evals import benchmarks


def get_config(name: str = "scenes") -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(benchmarks.preset(name))
