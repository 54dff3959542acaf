# SPDX-License-Identifier: Apache-2.0
"""The bundled model of real art draws what README names, and says what it does not know."""

import numpy as np
import pytest

from sparse_lavida_jax import SparseLaViDa
from sparse_lavida_jax.art import judge


@pytest.fixture(scope="module")
def pipe():
    return SparseLaViDa.from_pretrained("art")


def test_the_prompt_of_readme_is_drawn_with_every_cell_in_its_style(pipe):
    drawn = pipe.generate("a lion and a camera in twemoji style", seed=0)
    (image,), (warning,) = drawn.pixels, drawn.warnings
    found = judge.read(np.asarray(image)).found
    assert not warning
    assert {(one.thing.name, one.thing.style) for one in found} == {
        ("lion", "twemoji"), ("camera", "twemoji"),
    }  # fmt: skip
    assert all(one.is_coherent for one in found)


def test_a_thing_that_it_was_not_taught_is_named(pipe):
    (request,) = pipe.requests("generate", "a unicorn and a camera")
    assert "unicorn" in request.warning and "camera" in request.words


def test_a_drawing_without_a_layout_is_warned_of(pipe):
    asked = "a lion and a camera in twemoji style"
    (request,) = pipe.requests("generate", asked, layout=False)
    assert (
        request.warning
        == "without a layout, images are hardly ever right here: let the model write one."
    )
    (request,) = pipe.requests("generate", asked, layout=False, as_written=True)
    assert not request.warning
