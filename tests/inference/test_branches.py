# SPDX-License-Identifier: Apache-2.0
"""Branches of images: their records, their tokens, and what is refused.

`tests/sampling/test_turns.py` proves their codes.
"""

import dataclasses
import json

import numpy as np
import pytest
import stand_ins

from sparse_lavida_jax.inference import branches, provenance
from sparse_lavida_jax.inference.results import OLDER_FORMATS
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling.presets import Turn
from sparse_lavida_jax.scenes import tasks, world

TASKS = (*tasks.TASKS, "fill_layout")
SAMPLING = {"num_steps": 4, "layout_temperature": 1.0, "text": {"steps": 2}}
LAYOUT = " large red circle<LOC_4><LOC_8><LOC_8><LOC_12>"


@pytest.fixture(scope="module")
def pipe():
    with stand_ins.quick_compilation():
        yield stand_ins.pipe_of_tasks(TASKS, 4, **SAMPLING)


@pytest.fixture(scope="module")
def drawn(pipe):
    """An image of every task, with the image that it was drawn after."""
    image = world.render(tasks.sample("edit", 0, 0).image)
    small = image[:48, :48]
    return {
        "generate": (pipe.generate("a red circle", seed=3, layout=LAYOUT), None),
        "edit": (pipe.edit(image, "remove the circle", seed=3, layout=False, guidance=1.5), image),
        "inpaint": (
            pipe.inpaint(image, "a cross", box=(0, 0, 64, 96), seed=3, layout=False),
            image,
        ),
        "outpaint": (pipe.outpaint(small, "a red circle", seed=3, layout=False), small),
    }


def stored(result, row=0):
    """Returns a record as it is read from a PNG."""
    return json.loads(json.dumps(result.records[row]))


@pytest.mark.parametrize("task", ["generate", "edit", "inpaint", "outpaint"])
def test_a_branch_is_drawn_again_from_its_record(pipe, drawn, task):
    result, shown = drawn[task]
    made = pipe.branch(stored(result), "image:2", num_images=3, seed=[7, 8, 9], shown=shown)
    assert [record["turns"] for record in made.records] == [[["image", 2, s]] for s in (7, 8, 9)]
    assert made.seeds == (3, 3, 3) and made.records[0]["bucket"]["rows"] == 4
    for row in range(3):
        again = pipe.replay(stored(made, row), shown)
        np.testing.assert_array_equal(again.pixels[0], made.pixels[row])
        assert stored(again) == stored(made, row)
    assert len({pixels.tobytes() for pixels in made.pixels}) > 1


def test_a_branch_of_a_branch_and_its_tokens(pipe, drawn):
    result, _ = drawn["generate"]
    first = pipe.branch(result, "image:1", num_images=2, seed=11)
    second = pipe.branch(stored(first, 1), "image:3", num_images=2)
    turns = [["image", 1, 12], ["image", 3, 13]]
    assert stored(second)["turns"] == turns
    np.testing.assert_array_equal(pipe.replay(stored(second)).pixels[0], second.pixels[0])
    # Shared tokens and those of every branch are what one run passes.
    (whole,) = result.passed
    for made in (first, second):
        shared, none = made.shared
        assert (made.passed, none) == ((whole, whole - shared), 0)
        assert made.tokens_passed == shared + 2 * (whole - shared)
    assert 0 < first.shared[0] < second.shared[0]


def test_a_branch_of_the_layout(pipe):
    result = pipe.generate("a red circle", seed=3)
    made = pipe.branch(result, "layout:3", num_images=3)
    assert len(set(made.layouts)) > 1
    assert [record["layout"] for record in made.records] == list(made.layouts)
    assert (
        made.layout_passed[0] == made.layout_passed[1] + made.shared[0] == result.layout_passed[0]
    )
    for row in range(3):
        again = pipe.replay(stored(made, row))  # the image alone, whose noise is of the new seed
        np.testing.assert_array_equal(again.pixels[0], made.pixels[row])
    further = pipe.branch(stored(made, 2), "image:2", num_images=1, seed=50)
    assert stored(further)["turns"] == [["layout", 3, 6], ["image", 2, 50]]
    earlier = pipe.branch(stored(further), "layout:1", num_images=1)
    assert stored(earlier)["turns"] == [["layout", 1, 51]]


def test_a_turn_to_the_first_seed_draws_the_image(pipe):
    result = pipe.generate("a red circle", seed=3)
    for at in ("layout:2", "image:2"):
        made = pipe.branch(result, at, num_images=1, seed=3)
        np.testing.assert_array_equal(made.pixels[0], result.pixels[0])
        assert made.layouts == result.layouts


def test_more_branches_than_a_batch_holds(pipe, drawn):
    result, _ = drawn["generate"]
    made = pipe.branch(result, "image:2", num_images=6, seed=1)
    assert [shared > 0 for shared in made.shared] == [True, False, False, False, True, False]
    alone = pipe.branch(result, "image:2", num_images=1, seed=6)
    np.testing.assert_array_equal(made.pixels[5], alone.pixels[0])


@pytest.mark.parametrize(
    ("at", "counts", "step"),
    [
        ("image:0.5", [1, 1, 2, 4, 8], 4),
        ("image:0.0", [4, 4], 0),
        ("image:0.99", [4, 4], 1),
        ("image:.26", [4, 4, 4, 4], 1),
        ("image:3", [4, 4, 4, 4], 3),
        ("image", [4, 4, 4, 4], 2),
        (None, [1] * 10, 2),
    ],
)
def test_places_to_branch_at(pipe, at, counts, step):
    (parent,) = pipe.requests("generate", "a", layout=LAYOUT)
    (one,) = branches.requests_of(parent, at, 1, None, lambda *_: counts)
    assert one.turns == (Turn("layout" if at is None else "image", step, 1),)


@pytest.mark.parametrize(
    ("at", "options", "told"),
    [
        ("image:4", {}, "at='?image:4'? is out of range: image:0 to image:3"),
        ("image:1.0", {}, "a stage and a step or a share below 1"),
        ("image:nan", {}, "a stage and a step or a share below 1"),
        ("image:-1", {}, "a stage and a step or a share below 1"),
        ("image:", {}, "a stage and a step or a share below 1"),
        ("text:1", {}, "a stage and a step or a share below 1"),
        ("layout:1", {}, "drawn without a layout: branch it at the image"),
        ("image:1", {"num_images": 0}, "num_images=0 is out of range"),
        ("image:1", {"num_images": 10**9}, "num_images=1000000000 is out of range"),
        ("image:1", {"num_images": 2, "seed": [1]}, "1 seeds were given for 2 rows"),
        ("image:1", {"seed": -1}, "seed=-1 is out of range"),
        (7, {}, "a stage and a step or a share below 1"),
    ],
)
def test_what_cannot_be_branched_is_refused(pipe, drawn, at, options, told):
    result, shown = drawn["outpaint"]
    with pytest.raises(RequestError, match=told):
        pipe.branch(result, at, shown=shown, **options)


def test_images_of_reflect_and_several_images_are_refused(pipe):
    result = pipe.reflect("a red circle", rounds=1)
    with pytest.raises(RequestError, match="follows from verdicts"):
        pipe.branch(result)
    several = dataclasses.replace(result, records=result.records * 2)
    with pytest.raises(RequestError, match="one image is meant, and the result has 2"):
        pipe.branch(several)


@pytest.mark.parametrize(
    "turns",
    [
        [["layout", 1]],
        [["text", 1, 1]],
        [["image", -1, 1]],
        [["image", 1.0, 1]],
        [["image", True, 1]],
        [["image", 1, 2**31]],
        [["image", 2**17, 1]],
        [["image", 2, 1], ["image", 2, 3]],
        [["image", 2, 1], ["layout", 1, 3]],
        [["image", i, 1] for i in range(provenance.MOST_TURNS + 1)],
        "image",
        {"image": 1},
        [{}],
        [[["image"], 1, 1]],
    ],
)
def test_damaged_turns_are_refused(pipe, drawn, turns):
    record = stored(drawn["generate"][0]) | {"turns": turns}
    with pytest.raises(RequestError, match=r"damaged.*at most 64 of \[stage, step, seed\]"):
        pipe.replay(record)


def test_a_record_of_the_older_format_is_read(pipe, drawn):
    result, _ = drawn["generate"]
    record = stored(result) | {"format": OLDER_FORMATS[0]}
    del record["turns"]
    np.testing.assert_array_equal(pipe.replay(record).pixels[0], result.pixels[0])
