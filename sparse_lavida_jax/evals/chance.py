# SPDX-License-Identifier: Apache-2.0
"""Chance levels of small worlds: the share that is right without looking at the image.

Such a reply is, for text, the right answer that is most frequent among prompts of the same kind;
for an image, the one that was shown, unchanged; for a place, that of any object of the scene. A
score near this level means that a model learned the form of an answer and nothing more.
`tests/evals/test_evals.py` counts most levels again. Two tasks are missing: what is left out of a
sentence (`infill`) can be guessed from the words around it, and `quiz` was not counted.
"""

# By task, and by task/held_out; with where the number comes from.
CHANCE = {
    # A quarter each: five numbers, colours (blue: a fifth), and twice yes or no.
    "answer": 0.35,
    "answer/held_out": 0.38,
    # The most frequent sum for the given signs, such as 1 minus 1 is 0.
    "arithmetic": 0.50,
    # "is correct": half of the images, and those that a change did not spoil.
    "reflect": 0.59,
    # The box of any object of the scene: that alone needs no understanding of the words.
    "point": 0.42,
    "point/held_out": 0.29,
    # A sixth of the scenes holds one object, of 48 kinds.
    "caption": 0.01,
    # Two or more objects, of each of which two in three of size, shape and colour are missing.
    "constrained_caption": 0.0,
    # A quarter of the scenes holds one object, of 48 kinds in 36 cells; one of both is given.
    "detect": 0.0,
    "locate": 0.01,
    "name": 0.01,
    # A sixth of the requests names one object of 24 kinds, another sixth its size too.
    "draw": 0.01,
    "layout": 0.01,
    "draw/held_out": 0.0,
    # One change of one cell.
    "edit_layout": 0.01,
    # The image as it is: every instruction changes it, every hole hides an object.
    "edit": 0.0,
    "edit/held_out": 0.0,
    "inpaint": 0.0,
    "outpaint": 0.0,
}
# Of the art world: the most frequent right answer among 2,000 prompts of the same kind and language
# ("ask") or 1,500 of the same kind ("reason", "reflect"), any box of the scene ("ground", 300
# prompts), the image unchanged (150 prompts). tests/evals/test_art_benchmark.py counts some again.
ART_CHANCE = {
    "ask": 0.54,
    "ask/held_out": 0.58,
    "ground": 0.53,
    "ground/held_out": 0.34,
    "reason": 0.15,
    "reflect": 0.52,
    "caption": 0.0,
    "detect": 0.0,
    "locate": 0.0,
    "name": 0.0,
    "retell": 0.01,
    "draw": 0.0,
    "draw/held_out": 0.0,
    "layout": 0.01,
    "edit_layout": 0.0,
    "edit": 0.0,
    "edit/held_out": 0.01,
    "inpaint": 0.01,
    "outpaint": 0.01,
    "outpaint/held_out": 0.0,
}
