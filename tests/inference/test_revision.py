# SPDX-License-Identifier: Apache-2.0
"""Cells of finished images, drawn again with the others known."""

import dense_pass
import numpy as np
import pytest
import stand_ins
import tiny
from dense_pass import FIRST, GIVEN

from sparse_lavida_jax.inference import revision
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.scenes import world
from sparse_lavida_jax.tags import FIRST_BLOCK

HOW = {"steps": 3, "temperature": 1.0, "layout": False}


@pytest.fixture(scope="module")
def pipe():
    given = stand_ins.settings(data={"tasks": {**stand_ins.TASKS, "inpaint": 1.0}})
    with stand_ins.quick_compilation():
        parts = tiny.denoiser(given.model), given, stand_ins.prompts(given), stand_ins.Codec()
        yield SparseLaViDa(*parts, 4)


@pytest.mark.parametrize(
    ("revisions", "reach"), [(1, [(0, 1)]), (3, [(0, 1)]), (4, [(0, 1), (1, 1)])]
)
def test_no_cell_is_drawn_again_together_with_a_neighbour(revisions, reach):
    """Of fewer than four revisions two draw every cell; of four, each draws a quarter."""
    grid, turn = (4, 5), 4 if revisions >= 4 else 2
    found = [revision.chosen(grid, i, revisions).reshape(grid) for i in range(2 * turn)]
    np.testing.assert_array_equal(np.sum(found[:turn], axis=0), np.ones(grid))
    np.testing.assert_array_equal(found[:turn], found[turn:])
    for cells in found:
        for down, right in reach:
            assert not (cells[down:, right:] & cells[: 4 - down, : 5 - right]).any()
        assert not (cells[1:] & cells[:-1]).any()


@pytest.mark.parametrize("guidance", [0.0, 1.5])
def test_a_revision_takes_the_most_probable_codes_given_all_other_cells(pipe, guidance):
    """The logits are those of a pass over the whole sequence in float64, without a cache."""
    asked = pipe.requests("generate", "a red circle", seed=3, guidance=guidance, **HOW)
    run = pipe.task_run(asked[0].sampling)
    example = run.image_example(asked[0])
    drawn = run.engine.sample([example], asked, run.sampling, stage="image")
    (before,), (decoded_at,) = drawn.responses, drawn.decoded_at
    (after,) = pipe.generate("a red circle", seed=3, guidance=guidance, revisions=1, **HOW).tokens
    again = revision.chosen((6, 6), 0, 1)
    assert (decoded_at >= FIRST_BLOCK).all() and len(again) == 36
    np.testing.assert_array_equal(after[~again], before[~again])

    masked = np.where(again[:, None], pipe.settings.model.image_mask_id, before)
    block = np.where(again, FIRST, GIVEN)
    model = dense_pass.in_float64(pipe.model)
    logits = dense_pass.step_logits(model, example, masked, block, FIRST, guidance)
    np.testing.assert_array_equal(after[again], logits[again].argmax(-1))
    assert (after[again] != before[again]).any()  # or the test shows nothing


def test_a_revised_image_is_replayed_to_the_bit_and_never_proved(pipe):
    words = ["a red circle", "two blue squares", "a green cross"]
    drawn = pipe.generate(words, seed=[3, 4, 5], revisions=2, **HOW)
    plain = pipe.generate(words, seed=[3, 4, 5], **HOW)
    assert all(more > less for more, less in zip(drawn.passed, plain.passed, strict=True))
    for record, codes in zip(drawn.records, drawn.tokens, strict=True):
        np.testing.assert_array_equal(pipe.replay(record).tokens[0], codes)
    with pytest.raises(RequestError, match="drawn again afterwards"):
        pipe.prove(drawn)


def test_cells_that_are_kept_are_never_drawn_again(pipe):
    image = world.render(world.EMPTY_SCENE)
    known = np.zeros((6, 6), bool)
    known[:3] = True
    told = []
    changed = pipe.inpaint(
        image, "a red circle", known=known, revisions=4, callback=told.append, **HOW
    )
    codes = pipe.codec.encode(image[None])[0]
    np.testing.assert_array_equal(changed.tokens[0][known.ravel()], codes[known.ravel()])
    assert [one.steps for one in told if one.stage == "revision"] == [0, 1] * 4


@pytest.mark.parametrize("number", [-1, 17, 1.5])
def test_other_numbers_are_refused(pipe, number):
    with pytest.raises(ValueError, match="revisions"):
        pipe.generate("a red circle", revisions=number)
    with pytest.raises(RequestError, match="revisions"):
        pipe.ask(world.render(world.EMPTY_SCENE), "how many?", revisions=1)
