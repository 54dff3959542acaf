# SPDX-License-Identifier: Apache-2.0
"""The bundled model passes its own check; the same model with other numbers does not."""

import jax
import numpy as np
import pytest

from sparse_lavida_jax.cli import program, selfcheck
from sparse_lavida_jax.pipeline import SparseLaViDa

pytestmark = pytest.mark.slow


def test_the_bundled_model_passes(capsys):
    assert program.main(["sparse-lavida", "selfcheck"]) == 0
    printed = capsys.readouterr().out
    assert "9 of 9 checks passed" in printed and "/" not in printed.split("| check |")[0]


def test_a_model_whose_numbers_are_shuffled_fails():
    pipe = SparseLaViDa.from_pretrained("scenes", batch_size=1)
    rng = np.random.default_rng(0)
    shuffled = jax.tree.map(
        lambda x: rng.permutation(np.asarray(x).ravel()).reshape(x.shape), pipe.model
    )
    verdicts = {one.check: one.passed for one in selfcheck.checks(pipe.with_model(shuffled))}
    wrong = {"draw: red above blue", "edit: green above blue", "ask: answer", "infill: perplexity"}
    assert {check for check in wrong if verdicts[check]} == set()
    assert verdicts["draw: codes"] and verdicts["ask: ids"]
    assert verdicts["t and sparse: same"]  # caches are exact for any numbers
