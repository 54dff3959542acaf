# SPDX-License-Identifier: Apache-2.0
r"""How well what is missing of words, layout and image is filled (`inference/subsets.py`).

    python -m benchmarks.complete --per-row=200   # of the bundled model; writes rows and the page

Measures what no other row holds, and writes the table of all subsets to the page. Scores that the
rows of `quality` hold are read from them. Finished batches are kept in `--resume-from`, and the
same command goes on.
"""

import functools
import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from benchmarks import command, measurements
from sparse_lavida_jax.data import markdown
from sparse_lavida_jax.evals.chance import CHANCE
from sparse_lavida_jax.evals.scorers import wilson_interval
from sparse_lavida_jax.inference import subsets
from sparse_lavida_jax.inference.requests import Request
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.inference.subsets import TABLE
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs.folder import keep_programs
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.scenes import judges, tasks, world
from sparse_lavida_jax.scenes.grammar import Layout, SceneRequest
from sparse_lavida_jax.scenes.task import Sample

COUNT = flags.DEFINE_integer("per-row", 200, "Items of each new row.", lower_bound=16)
DONE = flags.DEFINE_string("resume-from", "runs/complete.jsonl", "File for finished items.")
PAGE = flags.DEFINE_string("page", "docs/log/2026-11-complete.md", "The page with the table.")

MODEL, TWIN, BLIND, BATCH, SEED = "scenes", "scenes_long", "scenes_blind", 8, 57
CELL, THING = 16, 8  # pixels per side of a cell; tokens of a thing in a layout, with its comma
BEGIN, END = "<!-- written by benchmarks.complete -->", "<!-- up to here -->"
Item = dict[str, Any]  # whether it is right, whether a guess is, whether the given parts are kept


class Case(NamedTuple):
    """A new row of the table.

    Attributes:
        held: how much of words, layout and image (`Subset`).
        what: what is held in part, and what is right.
        chance: what is right without looking at the words, or, if there are none, at the layout;
            None: the items' own guesses are counted.
        items: makes the sample of an index; None: it is not of this kind.
        run: completes a batch of samples, and returns an item each.
    """

    held: tuple[str, str, str]
    what: str
    chance: float | None
    items: Callable[[int], Sample | None]
    run: Callable[[SparseLaViDa, list[Sample], int], list[Item]]


def main(_: list[str]) -> None:
    """Measures the new rows, and writes them and the table of all."""
    keep_programs()
    pipe = SparseLaViDa.from_pretrained(MODEL, batch_size=BATCH)
    bench = measurements.Bench("firsts")
    for name, case in CASES.items():
        found = measured(pipe, name, case)
        path = bench.write(
            f"complete/{name}", row_of(name, case, found), name=f"{MODEL}/complete/{name}"
        )
        print(path.name, sum(one["right"] for one in found), len(found), flush=True)
    page = pathlib.Path(PAGE.value)
    page.write_text(markdown.with_part(page.read_text(), BEGIN, END, table()))


def measured(pipe: SparseLaViDa, name: str, case: Case) -> list[Item]:
    """Returns the items of a row: those that were done before, and the others."""
    path = pathlib.Path(DONE.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    found = {(one["case"], one["start"]): one["items"] for one in map(json.loads, lines)}
    samples = (one for one in map(case.items, range(10**6)) if one is not None)
    done: list[Item] = []
    for start in range(0, COUNT.value, BATCH):
        batch = [next(samples) for _ in range(min(BATCH, COUNT.value - start))]
        if (name, start) not in found:
            found[name, start] = case.run(pipe, batch, start)
            with path.open("a") as file:
                line = {"case": name, "start": start, "items": found[name, start]}
                file.write(json.dumps(line) + "\n")
        done += found[name, start]
    return done


def row_of(name: str, case: Case, items: list[Item]) -> dict[str, Any]:
    right = sum(one["right"] for one in items)
    row = {
        "model": MODEL, "method": f"complete_{name}", "held": list(case.held),
        "what": case.what, "correct": right, "total": len(items), "share": right / len(items),
        "interval_95": list(wilson_interval(right, len(items))),
    }  # fmt: skip
    for key in ("guess", "kept", "named"):
        if key in items[0]:
            row[key] = sum(one[key] for one in items)
    row["chance"] = row["guess"] / len(items) if case.chance is None else case.chance
    return row


# ---------------------------------------------------------------------------------------------
# New rows. Their scenes have numbers that no training uses.


def _things(sample: Sample) -> tuple[Any, ...]:
    assert sample.layout is not None
    return Layout.parse(sample.layout.strip()).entries


def _drawn(index: int) -> Sample | None:
    return tasks.sample("draw", SEED, index, "test")


def _holed(index: int) -> Sample | None:
    return tasks.sample(("inpaint", "outpaint")[index // BATCH % 2], SEED, index, "test")


def _several(make: Callable[[int], Sample | None]) -> Callable[[int], Sample | None]:
    """Returns what makes only samples whose layouts have several things."""

    def made(index: int) -> Sample | None:
        sample = make(index)
        return sample if sample is not None and len(_things(sample)) > 1 else None

    return made


def _listed(index: int) -> Sample | None:
    sample = tasks.sample("detect", SEED, index, "test")
    return sample if len(sample.image) > 1 else None


def _words(sample: Sample) -> str:
    return sample.prompt.partition(",")[0]


def _completed(
    pipe: SparseLaViDa, made: list[Sample], layouts: list[str], seed: int
) -> list[Result]:
    """Returns the images of samples with a hole, in their order."""
    found: list[Request] = []
    for i, (one, layout) in enumerate(zip(made, layouts, strict=True)):
        assert one.known_grid is not None
        hole = np.kron(~one.known_grid, np.ones((CELL, CELL), bool))
        given = _words(one), layout, world.render(one.image), hole, None
        found += pipe.completions(*given, {"seed": seed + i})
    drawn: dict[int, Any] = {}
    for task in ("inpaint", "outpaint"):
        rows = [i for i, one in enumerate(found) if one.task == task]
        if rows:
            result = pipe.run([found[i] for i in rows], padding="full")
            drawn |= {i: result.part(n, n + 1) for n, i in enumerate(rows)}
    return [drawn[i] for i in range(len(made))]


def _guess(sample: Sample, cell: int, thing: Any) -> bool:
    """Whether it is right to repeat the thing that is held once, as if without words."""
    assert sample.target is not None
    held = (sample.image or world.EMPTY_SCENE).changed({cell: thing.index})
    known = sample.known or (False,) * world.NUM_CELLS
    free = next(i for i in range(cell + 1, 10**6) if not held[i % 36] and not known[i % 36]) % 36
    scene = held.changed({free: thing.index})
    return not judges.request_fault(SceneRequest.parse(_words(sample)), scene)


def layout_followed(
    pipe: SparseLaViDa, made: list[Sample], seed: int, *, with_words: bool = False
) -> list[Item]:
    words = [one.prompt for one in made] if with_words else None
    result = pipe.complete(words=words, layout=[one.layout for one in made], seed=seed)
    pairs = zip(made, result.pixels, strict=True)
    return [{"right": world.read(pixels) == one.target} for one, pixels in pairs]


def thing_held(
    pipe: SparseLaViDa, made: list[Sample], seed: int, *, last: bool = False
) -> list[Item]:
    """Holds the first thing of each layout and leaves the rest open, or the last after gaps."""
    layouts, held = [], []
    for one in made:
        *before, _ = things = [*_things(one)]
        own = str(Layout((things[-1 if last else 0],)))
        layouts.append(f"{{{THING}}}" * len(before) + own if last else f"{own}___")
        held.append(own)
    result = pipe.complete(words=[one.prompt for one in made], layout=layouts, seed=seed)
    items = []
    for one, own, said, pixels in zip(made, held, result.layouts, result.pixels, strict=True):
        cell, thing = _things(one)[-1 if last else 0]
        kept = said.endswith(own) if last else said.startswith(own)
        scene = world.read(pixels)
        shown = isinstance(scene, world.Scene) and scene[cell] == thing
        right = shown and tasks.score(one, pixels).ok
        items.append({"right": right, "kept": kept, "guess": _guess(one, cell, thing)})
    return items


def hole_and_layout(pipe: SparseLaViDa, made: list[Sample], seed: int) -> list[Item]:
    results = _completed(pipe, made, [one.layout or "" for one in made], seed)
    return [{"right": world.read(x.pixels[0]) == one.target, "kept": _kept(pipe, one, x)}
            for one, x in zip(made, results, strict=True)]  # fmt: skip


def hole_and_thing(pipe: SparseLaViDa, made: list[Sample], seed: int) -> list[Item]:
    held = [str(Layout(_things(one)[:1])) for one in made]
    results, items = _completed(pipe, made, [f"{one}___" for one in held], seed), []
    for one, own, result in zip(made, held, results, strict=True):
        (cell, thing), *_ = _things(one)
        scene = world.read(result.pixels[0])
        shown = isinstance(scene, world.Scene) and scene[cell] == thing
        right = shown and tasks.score(one, result.pixels[0]).ok
        kept = result.layouts[0].startswith(own) and _kept(pipe, one, result)
        items.append({"right": right, "kept": kept, "guess": _guess(one, cell, thing)})
    return items


def contradiction(pipe: SparseLaViDa, made: list[Sample], seed: int) -> list[Item]:
    """Adds a thing to each layout, in a held cell that shows something else."""
    rng, layouts, added = np.random.default_rng(seed), [], []
    for one in made:
        cell = int(rng.choice(np.flatnonzero(np.array(one.known))))
        things = [x for x in world.OBJECTS if x != one.image[cell]]
        added.append(str(Layout(((cell, things[rng.integers(len(things))]),))))
        layouts.append(f"{one.layout},{added[-1]}")
    results, items = _completed(pipe, made, layouts, seed), []
    for one, own, result in zip(made, added, results, strict=True):
        right, named = world.read(result.pixels[0]) == one.target, own.strip() in result.warnings[0]
        items.append({"right": right, "named": named, "kept": _kept(pipe, one, result)})
    return items


def _kept(pipe: SparseLaViDa, sample: Sample, result: Result) -> bool:
    """Whether the held cells have their codes."""
    assert pipe.codec is not None
    codes, known = pipe.codec.encode(world.render(sample.image)[None])[0], np.array(sample.known)
    return bool((result.tokens[0] == codes)[known].all())


def list_held(pipe: SparseLaViDa, made: list[Sample], seed: int) -> list[Item]:
    """Holds the first thing of the list of each image."""
    held = [str(Layout(tuple(one.image.objects())[:1])) for one in made]
    shown = [world.render(one.image) for one in made]
    result = pipe.complete(image=shown, layout=[f"{one}___" for one in held], seed=seed)
    return [{"right": tasks.score(one, f" {text}").ok, "kept": f" {text}".startswith(own)}
            for one, own, text in zip(made, held, result.texts, strict=True)]  # fmt: skip


CASES = {
    "layout": Case(
        ("", "whole", ""), "all cells are as the layout says", 0.0, _drawn, layout_followed
    ),
    "words_layout": Case(
        ("whole", "whole", ""), "all cells are as the layout says", 0.01, _drawn,
        functools.partial(layout_followed, with_words=True),
    ),
    "words_first_thing": Case(
        ("whole", "part", ""), "the first of several things held", None, _several(_drawn),
        thing_held,
    ),
    "words_last_thing": Case(
        ("whole", "part", ""), "the last of several things held, gaps before it", None,
        _several(_drawn), functools.partial(thing_held, last=True),
    ),
    "hole_layout": Case(
        ("whole", "whole", "part"), "all cells are as image and layout say", 0.0, _holed,
        hole_and_layout,
    ),
    "hole_first_thing": Case(
        ("whole", "part", "part"), "the first of several missing things held", None,
        _several(_holed), hole_and_thing,
    ),
    "contradiction": Case(
        ("whole", "whole", "part"), "the same, and one thing of the layout in a held cell", 0.0,
        _holed, contradiction,
    ),
    "image_first_thing": Case(
        ("", "part", "whole"), "the first of several things held", 0.0, _listed, list_held
    ),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------
# The table.

# Rows of `quality` by subset: what is measured, and the task.
SCORED = {
    ("whole", "", ""): (("the image", "draw"), ("its layout", "layout")),
    ("whole", "", "part"): (("a rectangle is missing", "inpaint"), ("all but one is", "outpaint")),
    ("part", "", ""): (("half with an image, as the next row", "infill"),),
    ("part", "", "whole"): (("half without an image, the same row", "infill"),),
    ("", "", "whole"): (("", "caption"),),
    ("", "part", "whole"): (
        ("a gap alone", "detect"), ("all names held", "locate"), ("all boxes held", "name"),
    ),
}  # fmt: skip


def table() -> str:
    """Returns the table of all subsets, from the committed rows."""
    quality = {(one["model"], one["task"]): one for one in measurements.read_rows("quality")}
    own = {one["method"]: one for one in measurements.read_rows("firsts")}
    lines = []
    for row in TABLE:
        scored = [(*one, quality[TWIN, one[1]]) for one in SCORED.get(row[:3], ())]
        for what, task, score in scored:
            level = CHANCE.get(task)
            if level is None:
                level = quality[BLIND, task]["share"]
            lines.append(_line(row, what, score | {"chance": level}))
        found = [own[f"complete_{name}"] for name, one in CASES.items() if one.held == row[:3]]
        lines += [_line(row, one["what"], one) for one in found]
    states: tuple[subsets.State, ...] = "", "part", "whole"
    for held in itertools.product(states, states, states):
        try:
            subsets.subset_of(*held)
        except RequestError as error:
            lines.append([*map(_said, held), None, "refused", None, None, None, str(error)])
    names = ("words", "layout", "image", "filled", "task", "n", "right [95 %]", "chance")
    return markdown.table([*names, "taught by; what is held in part"], lines)


def _said(held: str) -> str | None:
    return held or None


def _line(row: subsets.Subset, what: str, score: dict[str, Any]) -> list[str | None]:
    """Returns a line of the table."""
    low, high = wilson_interval(score["correct"], score["total"])
    right = f"{score['correct'] / score['total']:.3f} [{low:.3f}, {high:.3f}]"
    more = [f"{score[name]} {told}" for name, told in TOLD.items() if name in score]
    taught = f"{', '.join(row.lessons)}; {', '.join(filter(None, (what, *more)))}".rstrip("; ")
    numbers = str(score["total"]), right, f"{score['chance']:.2f}"
    return [*map(_said, row[:3]), row.fills, row.task, *numbers, taught]


TOLD = {"kept": "keep what is held", "named": "name the thing that cannot be drawn"}


if __name__ == "__main__":
    command.run(main)
