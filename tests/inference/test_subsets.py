# SPDX-License-Identifier: Apache-2.0
"""What is held stays and decides which task fills the rest; what no model learned is refused."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import stand_ins

from sparse_lavida_jax.cli import commands, program
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference import subsets
from sparse_lavida_jax.inference.requests import TASK_SPECS
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.scenes import tasks, world
from sparse_lavida_jax.tags import GIVEN_BLOCK

TASKS = (*tasks.TASKS, "fill_layout")
SAMPLING = {"num_steps": 4, "layout_temperature": 1.0, "text": {"steps": 4}}
CIRCLE = " large red circle<LOC_4><LOC_8><LOC_8><LOC_12>"  # in cell 13, seven tokens
SCENE = world.Scene.of({13: world.NAMED["circle", "red", "large"]})
IMAGE = world.render(SCENE)
WORDS, GAPS, BOX = "a red circle above a blue square", "a ___ circle", (48, 0, 96, 96)
AROUND = np.kron(np.pad(np.zeros((2, 2), bool), 2, constant_values=True), np.ones((16, 16), bool))


@pytest.fixture(scope="module")
def pipe():
    with stand_ins.quick_compilation():
        yield stand_ins.pipe_of_tasks(TASKS, 2, **SAMPLING)


def read_again(result, row=0):
    """Returns a record as it is read from a PNG."""
    return json.loads(json.dumps(result.records[row]))


# By what is held: the arguments of `complete`, and the call by name.
NAMED = {
    ("whole", "", ""): ({"words": WORDS}, lambda pipe: pipe.generate(WORDS, seed=3)),
    ("whole", "whole", ""): (
        {"words": WORDS, "layout": CIRCLE},
        lambda pipe: pipe.generate(WORDS, layout=CIRCLE, seed=3),
    ),
    ("whole", "", "part"): (
        {"words": WORDS, "image": IMAGE, "box": BOX},
        lambda pipe: pipe.inpaint(IMAGE, WORDS, box=BOX, seed=3),
    ),
    ("whole", "whole", "part"): (
        {"words": WORDS, "layout": CIRCLE, "image": IMAGE, "box": BOX},
        lambda pipe: pipe.inpaint(IMAGE, WORDS, box=BOX, layout=CIRCLE, seed=3),
    ),
    ("part", "", ""): ({"words": GAPS}, lambda pipe: pipe.infill(GAPS, seed=3)),
    ("part", "", "whole"): (
        {"words": GAPS, "image": IMAGE}, lambda pipe: pipe.infill(GAPS, IMAGE, seed=3)
    ),
    ("", "", "whole"): ({"image": IMAGE}, lambda pipe: pipe.caption(IMAGE, seed=3)),
}  # fmt: skip
NEW = {("whole", "part", ""), ("", "whole", ""), ("whole", "part", "part"), ("", "part", "whole")}


def test_the_table_has_the_rows_that_are_compared_here():
    assert {row[:3] for row in subsets.TABLE} == NAMED.keys() | NEW
    for row in subsets.TABLE:
        assert row.task in TASK_SPECS and {*row.lessons} <= {*TASKS}


@pytest.mark.parametrize("held", NAMED)
def test_a_row_of_the_table_is_the_call_by_name(pipe, held):
    given, call = NAMED[held]
    made, named = pipe.complete(**given, seed=3), call(pipe)
    assert (made.task, made.texts, made.layouts) == (named.task, named.texts, named.layouts)
    assert made.records == named.records and made.prompts == named.prompts
    for one, other in zip(made.tokens, named.tokens, strict=True):
        np.testing.assert_array_equal(one, other)


def test_all_but_a_rectangle_is_outpainted(pipe):
    known = ~AROUND[::16, ::16]
    made = pipe.complete(words=WORDS, image=IMAGE, mask=AROUND, seed=3)
    named = pipe.outpaint(IMAGE, WORDS, known=known, seed=3)
    assert made.records == named.records and made.task == "outpaint"


def test_a_layout_alone_draws_the_image_of_no_words(pipe, tmp_path):
    made = pipe.complete(layout=CIRCLE, seed=3)
    example = pipe.prompts.draw("", np.zeros((36, 1), np.int32), layout=CIRCLE)
    (codes,) = pipe.sample([example], seed=3)
    np.testing.assert_array_equal(made.tokens[0], codes)
    worded = pipe.generate(WORDS, layout=CIRCLE, seed=3)
    assert (made.tokens[0] != worded.tokens[0]).any()  # or this says nothing
    record = read_again(made)
    assert (record["prompt"], record["layout"], made.layouts) == ("", CIRCLE, (CIRCLE,))
    assert made.warnings == ("",)
    np.testing.assert_array_equal(pipe.replay(record).pixels[0], made.pixels[0])
    (proof,) = pipe.prove(made)
    assert proof.follows and proof.layout is None
    several = pipe.complete(layout=[CIRCLE, CIRCLE.replace("red", "blue")], seed=[3, 3])
    assert (several.tokens[0] != several.tokens[1]).any()
    np.testing.assert_array_equal(several.tokens[0], made.tokens[0])
    with pytest.raises(RequestError, match="the prompt is empty"):
        pipe.replay(record | {"layout": None})


@pytest.mark.parametrize(
    ("layout", "held"),
    [
        (f"{CIRCLE}___", range(7)),
        (f"{{3}}{CIRCLE[17:]}___", range(3, 7)),
        (f"{{8}}{CIRCLE}", range(8, 15)),
        ("large ___ circle{4}", (0, 2)),
    ],
)
def test_the_tokens_of_a_part_of_a_layout_stay(pipe, layout, held):
    made = pipe.complete(words=WORDS, layout=layout, seed=3)
    assert made.layouts is not None
    record, (text,) = read_again(made), made.layouts
    own = pipe.tokenizer.encode("".join(CIRCLE)) if layout != "large ___ circle{4}" else None
    at = np.array(record["decoded_at"])
    assert np.flatnonzero(at == GIVEN_BLOCK).tolist() == [*held]
    for i in held if own else ():
        assert record["layout_tokens"][i] == own[i - 8 if held[0] == 8 else i]
    free = pipe.generate(WORDS, seed=3)
    assert text != free.layouts[0] and made.records[0]["layout"] == text
    again = pipe.replay(record)
    np.testing.assert_array_equal(again.pixels[0], made.pixels[0])
    assert read_again(again) == record
    (proof,) = pipe.prove(made)
    assert proof.follows and proof.layout.tokens <= 16 - len(held)
    record["layout_tokens"][held[0]] ^= 1
    (proof,) = pipe.prove(dataclasses.replace(made, records=(record,)))
    assert not proof.follows and not proof.text


def test_things_of_a_part_come_in_the_order_of_the_words(pipe):
    words = "a blue square below a red circle"
    (free,) = pipe.completions(words, None, None, None, None, {})
    (held,) = pipe.completions(words, f"{CIRCLE}___", None, None, None, {})
    assert (free.words, held.words) == ("a red circle above a blue square", words)
    assert (
        "'hexagon' is not among them"
        in pipe.completions("a hexagon", f"{CIRCLE}___", None, None, None, {})[0].warning
    )


def test_branches_of_a_layout_keep_its_part(pipe):
    made = pipe.complete(words=WORDS, layout=f"{CIRCLE}___", seed=3)
    branches = pipe.branch(made, "layout:1", num_images=2)
    assert all(layout.startswith(CIRCLE) for layout in branches.layouts)
    (proof, _) = pipe.prove(branches)
    assert proof.follows


def test_a_gap_alone_leaves_the_layout_free(pipe):
    made = pipe.complete(words=WORDS, layout="___", seed=3)
    free = pipe.generate(WORDS, seed=3)
    np.testing.assert_array_equal(made.tokens[0], free.tokens[0])
    assert made.layouts[0].startswith(free.layouts[0][:20])


@pytest.mark.parametrize(
    ("layout", "question"),
    [
        ("___", "list the objects"),
        (" large red circle{4}", "where are these?"),
        (f"{{3}}{CIRCLE[17:]}", "what is there?"),
        (f"{CIRCLE}___", "list the objects"),
    ],
)
def test_the_layout_of_an_image_is_asked_for_as_it_was_taught(pipe, layout, question):
    made = pipe.complete(image=IMAGE, layout=layout, seed=3)
    assert (made.task, made.prompts) == ("ask", (question,))
    held = [x for x in layout.replace("{4}", "{3}").replace("___", "{3}").split("{3}") if x]
    assert all(part.strip() in made.text for part in held)


def test_held_cells_stay_and_things_that_they_rule_out_are_named(pipe, caplog):
    same, other = CIRCLE, " small blue cross<LOC_0><LOC_0><LOC_4><LOC_4>"
    partly = " large red circle<LOC_8><LOC_4><LOC_16><LOC_8>"  # cells 8 and 9; 9 is drawn
    drawn = " small blue cross<LOC_16><LOC_0><LOC_20><LOC_4>"
    for layout, named in (
        (f"{same},{drawn}", []),
        (f"{same},{other},{drawn},{partly}", [other, partly]),
        (f"{other}___", [other]),
    ):
        made = pipe.complete(words=WORDS, layout=layout, image=IMAGE, box=BOX, seed=3)
        (told,) = made.warnings
        things = [part for part in (same, other, drawn, partly) if part.strip() in told]
        assert things == named and bool(told) == bool(named)
        assert told in caplog.text and told.count("cannot be drawn") == bool(named)
        held = np.arange(36) % 6 < 3
        np.testing.assert_array_equal(made.tokens[0][held, 0], np.array(SCENE.cells)[held])
        (proof,) = pipe.prove(made, shown=IMAGE)
        assert proof.follows
        again = pipe.replay(read_again(made), IMAGE)
        np.testing.assert_array_equal(again.pixels[0], made.pixels[0])


@pytest.mark.parametrize(
    ("held", "told"),
    [
        (("", "", ""), "nothing is held: give words, a layout or an image"),
        (("whole", "whole", "whole"), "nothing is left to fill"),
        (("part", "whole", ""), "taught to fill words from a layout: hold the layout alone"),
        (("", "part", ""), "taught to fill a layout without words: hold words too"),
        (("", "", "part"), "taught to fill an image without all its words: hold words"),
        (("whole", "", "whole"), "a whole image and other texts from each other: hold the image"),
    ],
)
def test_what_no_model_was_taught_is_refused_by_name(held, told):
    with pytest.raises(RequestError, match=told):
        subsets.subset_of(*held)


def test_every_subset_has_a_task_or_a_reason():
    found = 0
    for held in itertools.product(("", "part", "whole"), repeat=3):
        try:
            found += subsets.subset_of(*held) in subsets.TABLE
        except RequestError as error:
            assert held == ("", "", "") or ": " in str(error)
    assert found == len(subsets.TABLE) == 11


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"box": BOX}, "a mask or a box is about an image: give one"),
        ({"words": WORDS, "image": [IMAGE, IMAGE], "box": BOX}, "is about one image, 2 were"),
        (
            {"words": ["a", "a ___"]},
            "some words have gaps, others none: give all with gaps, or all whole",
        ),
        ({"words": WORDS, "layout": f"{CIRCLE * 3}___"}, "the layout with its gaps is 21 tokens"),
        ({"words": WORDS, "layout": f"{CIRCLE * 3}{{4}}"}, "with its gaps is 25 tokens long"),
        ({"layout": CIRCLE, "best_of": 2}, "an image is judged by its words: hold words too"),
        ({"image": IMAGE, "num_images": 2}, "caption takes no num_images"),
        ({"words": " "}, "the prompt is empty"),
        ({"words": 7}, "it must be"),
        ({"words": WORDS, "image": IMAGE, "box": BOX, "mask": AROUND}, "one of the two"),
    ],
)
def test_what_does_not_go_together_is_refused(pipe, given, told):
    with pytest.raises(RequestError.__mro__[1], match=told):
        pipe.complete(**given)


@pytest.mark.parametrize(
    ("trained", "given", "told"),
    [
        (["draw"], {"layout": CIRCLE}, "learned no layouts for generate"),
        (["draw", "layout"], {"image": IMAGE}, "not trained to caption"),
        (["draw", "layout"], {"image": IMAGE, "layout": "___"}, "not trained to detect"),
        (["draw", "layout"], {"words": GAPS}, "not trained to infill"),
        (["draw"], {"words": WORDS, "layout": f"{CIRCLE}___"}, "learned no layouts"),
    ],
)
def test_what_a_model_was_not_taught_is_refused_by_name(trained, given, told):
    with pytest.raises(RequestError, match=told):
        stand_ins.pipe_of_tasks(trained, 2).complete(**given)


def test_a_model_that_never_drew_without_words_refuses(pipe):
    data = dataclasses.replace(pipe.settings.data, prompt_drop=0.0)
    settings = dataclasses.replace(pipe.settings, data=data)
    parts = pipe.model, settings, pipe.prompts, pipe.codec, 2
    with pytest.raises(RequestError, match="never trained without words: hold words too"):
        type(pipe)(*parts).complete(layout=CIRCLE)


def test_the_command_fills_the_rest(pipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "load", lambda *_: pipe)
    image_files.write("shown.png", IMAGE)

    def run(*words):
        code = program.main(["sparse-lavida", "complete", *words])
        return code, *capsys.readouterr()

    told = run("--layout", CIRCLE, "--out=one.png", "--seed=3")
    assert told[:2] == (0, "one.png: the layout\n")
    drawn = pipe.complete(layout=CIRCLE, seed=3)
    np.testing.assert_array_equal(image_files.read("one.png"), drawn.pixels[0])
    assert program.main(["sparse-lavida", "replay", "one.png", "--out=again.png"]) == 0
    np.testing.assert_array_equal(image_files.read("again.png"), drawn.pixels[0])
    capsys.readouterr()
    told = run("--words", WORDS, "--image=shown.png", "--box=48,0,96,96", "--out=in.png")
    assert told[:2] == (0, f"in.png: {WORDS}\n")
    assert run("--image=shown.png", "--seed=3")[:2] == (0, f"{pipe.caption(IMAGE, seed=3).text}\n")
    code, _, told = run("--words", GAPS, "--layout", CIRCLE)
    assert code == 2 and "no model was taught to fill words from a layout" in told
    code, _, told = run("--image=shown.png", "--guidance=2")
    assert code == 2 and "caption takes no --guidance" in told
