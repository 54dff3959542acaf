# SPDX-License-Identifier: Apache-2.0
r"""What one pass over a whole plan tells (`inference/surprise.py`, `inference/proofs.py`).

    python -m benchmarks.firsts --measure=surprise --count=1000   # of the bundled model
    python -m benchmarks.firsts --measure=prove --count=96
    python -m benchmarks.firsts --measure=costs

Surprise: a scene and its caption, compared with the scene after one thing was changed so that the
caption is false, and with seven captions that have one attribute wrong. The model's own answers to
`check:` are scored on the same pairs. Proof: images of several settings, unchanged and with planted
faults. Finished items are saved line by line in `--done`, and are skipped when the command is
repeated. Costs: passes, tokens and seconds of everything, against `generate` in the same turns.
"""

import copy
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from absl import flags

from benchmarks import command, measurements
from benchmarks.timing import in_turn
from sparse_lavida_jax import config, orders
from sparse_lavida_jax.evals.scorers import wilson_interval
from sparse_lavida_jax.inference.engine import Engine
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs.folder import keep_programs
from sparse_lavida_jax.scenes import judges, tasks, world
from sparse_lavida_jax.scenes.grammar import GrammarError, SceneRequest

MEASURE = flags.DEFINE_enum(
    "measure", "surprise", ["surprise", "prove", "costs"], "What is measured."
)
COUNT = flags.DEFINE_integer("count", 200, "Scenes, or images of each setting.", lower_bound=16)
SIZES = flags.DEFINE_list("sizes", ["1", "16"], "Images together of which costs are measured.")
TIMED = flags.DEFINE_integer("timed", 9, "Turns that are timed; 0: none.", lower_bound=0)
DONE = flags.DEFINE_string("done", "runs/firsts.jsonl", "File for finished items.")

MODEL, BATCH, CAPTIONS, SEED = "scenes", 16, 8, 20
CHANGED = 80  # images of each setting that are changed, and proved with other words and seeds
PLURALS = tuple(shape + ("es" if shape == "cross" else "s") for shape in world.SHAPES)
PLANTED = ("code", "last code", "layout token", "pixel", "given cell")
FREE = {"layout": False, "temperature": 1.0}
# By name: the task, and its options; settings beyond those are changes of `config.Sampling`.
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "layout": ("generate", {}, {}),
    "no layout": ("generate", FREE, {}),
    "guided": ("generate", FREE | {"guidance": 1.5},
               {"order_seed": -1, "guidance_interval": (0.2, 0.8),
                "released": {"temperature_schedule": "linear", "temperature_end": 0.5}}),
    "filtered": ("generate", FREE | {"steps": 12}, {"top_k": 8, "top_p": 0.9, "merge_cells": 4}),
    "registers": ("generate", FREE | {"registers": (4, 1)}, {}),
    "36 steps": ("generate", FREE | {"steps": 36}, {}),
    "inpaint": ("inpaint", {"box": (0, 0, 48, 96)}, {}),
    "outpaint": ("outpaint", FREE | {"box": (32, 32, 64, 64)}, {}),
    "edit": ("edit", FREE | {"guidance": 1.0, "guidance_image": 0.5}, {}),
}  # fmt: skip


def main(_: list[str]) -> None:
    """Measures a part, and writes its rows."""
    keep_programs()
    pipe = SparseLaViDa.from_pretrained(MODEL, batch_size=BATCH)
    bench = measurements.Bench("firsts")
    parts = {"surprise": surprise_rows, "prove": prove_rows, "costs": cost_rows}
    for row in parts[MEASURE.value](pipe, COUNT.value):
        name = f"{MEASURE.value}/{row['method']}"
        path = bench.write(name, {"model": MODEL, **row}, name=f"{MODEL}/{name}")
        print(path.name, row, flush=True)


def once(key: str, make: Any) -> dict[str, Any]:
    """Returns what `make` returns, or what it returned before."""
    path = pathlib.Path(DONE.value)
    lines = path.read_text().splitlines() if path.exists() else []
    found = {one["key"]: one for one in map(json.loads, lines)}
    if key not in found:
        found[key] = make() | {"key": key}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(found[key]) + "\n")
    return found[key]


# ---------------------------------------------------------------------------------------------
# Surprise.


def scene_of(index: int) -> tuple[str, world.Scene, world.Scene, int, list[str]]:
    """Returns a caption, its scene, the scene with one thing changed, where, and wrong captions."""
    made = tasks.sample("draw", SEED, index, "test")
    scene, request = made.target, SceneRequest.parse(made.prompt)
    rng = np.random.default_rng(index)
    while True:
        cell, thing = [*scene.objects()][rng.integers(len(scene))]
        which = ["colour", "shape"][rng.integers(2)]
        values = {"colour": world.COLOURS, "shape": world.SHAPES}[which]
        other = dataclasses.replace(thing, **{which: values[rng.integers(len(values))]})
        spoiled = scene.changed({cell: other.index})
        if judges.request_fault(request, spoiled):
            break
    wrong: list[str] = []
    while len(wrong) < CAPTIONS - 1:
        words = made.prompt.split(" ")
        at = int(rng.integers(len(words)))
        kinds = [one for one in (world.COLOURS, world.SHAPES, PLURALS) if words[at] in one]
        if not kinds:
            continue
        words[at] = kinds[0][rng.integers(len(kinds[0]))]
        caption = " ".join(words)
        try:
            false = bool(judges.request_fault(SceneRequest.parse(caption), scene))
        except GrammarError:
            continue
        if false and caption not in wrong:
            wrong.append(caption)
    return made.prompt, scene, spoiled, cell, wrong


def surprise_of(pipe: SparseLaViDa, index: int) -> dict[str, Any]:
    """Returns what both ways say about one scene."""
    caption, scene, spoiled, cell, wrong = scene_of(index)
    images = [world.render(one) for one in (scene, spoiled)]
    ranked = pipe.surprise(images[0], [caption, *wrong])
    bad = pipe.surprise(images[1], caption)
    asked = [f"check: {one}" for one in (caption, *wrong)]
    said = [pipe.ask(images[0], asked), pipe.ask(images[1], asked[0])]
    verdicts = [[pipe.prompts.accepts(text) for text in one.texts] for one in said]
    yes, count = verdicts[0], sum(verdicts[0])
    return {
        "good": float(ranked.bits[0].max()), "bad": float(bad.bits[0].max()),
        "good_sum": float(ranked.bits[0].sum()), "bad_sum": float(bad.bits[0].sum()),
        "cell": int(bad.bits[0].argmax()) == cell, "first": ranked.ranked[0] == 0,
        "tokens": ranked.tokens, "check_good": yes[0], "check_bad": verdicts[1][0],
        "check_first": 1 / count if yes[0] else (1 / CAPTIONS if not count else 0.0),
        "check_tokens": sum(said[0].passed) / CAPTIONS,
    }  # fmt: skip


def auc(good: np.ndarray, bad: np.ndarray) -> float:
    """Returns the probability that a spoiled scene scores above a good one; ties count half."""
    apart = bad[:, None] - good[None]
    return float(((apart > 0) + 0.5 * (apart == 0)).mean())


def surprise_rows(pipe: SparseLaViDa, count: int) -> Iterator[dict[str, Any]]:
    """Yields a row for the surprise, and one for `check:`."""
    found = [once(f"surprise {i}", lambda i=i: surprise_of(pipe, i)) for i in range(count)]
    columns = {
        name: np.array([one[name] for one in found], float) for name in found[0] if name != "key"
    }
    rng = np.random.default_rng(0)
    drawn = rng.integers(count, size=(1000, count))
    for method, good, bad, first, tokens in (
        ("largest cell", "good", "bad", "first", "tokens"),
        ("sum", "good_sum", "bad_sum", "first", "tokens"),
        ("check", "check_good", "check_bad", "check_first", "check_tokens"),
    ):
        sign = -1 if method == "check" else 1
        a, b = sign * columns[good], sign * columns[bad]
        bounds = np.quantile([auc(a[i], b[i]) for i in drawn], (0.025, 0.975))
        row = {
            "method": method.replace(" ", "_"), "scenes": count,
            "auc": auc(a, b), "auc_interval": bounds.tolist(),
            "captions_first": columns[first].mean(), "captions": CAPTIONS,
            "captions_interval": wilson_interval(round(columns[first].sum()), count),
            "tokens": columns[tokens].mean(),
            "note": "tokens a caption; check: the share of an even choice among accepted captions",
        }  # fmt: skip
        if method == "largest cell":
            right = int(columns["cell"].sum())
            row |= {"cell": right / count, "cell_interval": wilson_interval(right, count)}
        yield row


# ---------------------------------------------------------------------------------------------
# Proof.


def drawn_images(pipe: SparseLaViDa, name: str, start: int) -> tuple[Result, Any]:
    """Returns a batch of images of a setting, and the images that they were drawn from."""
    task, options, changes = SETTINGS[name]
    own = pipe.with_sampling(config.changed(pipe.settings.sampling, changes))
    kind = "edit" if task == "edit" else "draw"
    made = [tasks.sample(kind, SEED, start + i, "test") for i in range(BATCH)]
    words, shown = [one.prompt for one in made], None
    if task != "generate":
        shown = [world.render(one.image if kind == "edit" else one.target) for one in made]
        shown = [one[32:64, 32:64] for one in shown] if task == "outpaint" else shown
    given = (words,) if shown is None else (shown, words)
    return getattr(own, task)(*given, seed=start, **options), shown


def planted(
    result: Result, what: str, given: np.ndarray, rng: np.random.Generator, pipe: SparseLaViDa
) -> Result | None:
    """Returns a copy of a result whose images have a fault each; None if one has no place for it.

    Args:
        given: cells of each image that were not drawn.
    """
    records, pixels = copy.deepcopy([*result.records]), [one.copy() for one in result.pixels]
    for one, own, image in zip(records, given, pixels, strict=True):
        if what == "layout token":
            if not one["decoded_at"]:
                return None
            at = rng.choice(np.flatnonzero(one["decoded_at"]))
            one["layout_tokens"][at] = (one["layout_tokens"][at] + int(rng.integers(1, 100))) % 400
        elif what == "pixel":
            y, x = rng.integers(image.shape[0], size=2)
            image[y, x] = 255 - image[y, x]
        else:
            places = np.flatnonzero(own == (what == "given cell"))
            if what == "last code":
                how = config.build(config.Sampling, one["sampling"])
                size = pipe.settings.model.grid_size
                seed = one["seed"] if how.order_seed < 0 else how.order_seed
                order = orders.order(how.order, size, size, seed)
                places = order[~own[order]][-1:]
            if not len(places):
                return None
            at = rng.choice(places)
            one["codes"][at][0] = (one["codes"][at][0] + int(rng.integers(1, 64))) % 64
    return dataclasses.replace(result, records=tuple(records), pixels=tuple(pixels))


def given_cells(pipe: SparseLaViDa, result: Result, shown: Any) -> np.ndarray:
    """Returns which cells of each image were not drawn."""
    run = pipe.task_run(pipe.settings.sampling)
    images = [None] * len(result.records) if shown is None else shown
    made = [pipe.recorded(*one)[1] for one in zip(result.records, images, strict=True)]
    return np.stack([run.image_example(request).given for request in made])


def proved(pipe: SparseLaViDa, name: str, start: int) -> dict[str, Any]:
    """Returns what the proofs of one batch of images say, unchanged and changed."""
    result, shown = drawn_images(pipe, name, start)
    rng, given = np.random.default_rng(start), given_cells(pipe, result, shown)
    begin = time.perf_counter()
    whole = pipe.prove(result, shown=shown)
    seconds = time.perf_counter() - begin
    row: dict[str, Any] = {
        "images": len(whole), "seconds": seconds,
        "codes": sum(one.image.tokens for one in whole),
        "codes_wrong": sum(one.image.wrong for one in whole),
        "layout_tokens": sum(one.layout.tokens for one in whole if one.layout),
        "layout_wrong": sum(one.layout.wrong for one in whole if one.layout),
        "follow": sum(one.follows for one in whole), "bits": [one.bits for one in whole],
        "shortfall": max(stage.shortfall for one in whole for stage in one.stages),
    }  # fmt: skip
    if start >= CHANGED:
        return row
    for what in PLANTED:
        spoiled = planted(result, what, given, rng, pipe)
        if spoiled is not None:
            found = pipe.prove(spoiled, shown=shown)
            row[what] = sum(not one.follows for one in found)
    for what in ("seed", "prompt"):
        records = copy.deepcopy([*result.records])
        for i, one in enumerate(records):
            if what == "seed":
                one["seed"] += 1000
            else:
                one["prompt"] = result.records[i - 1]["prompt"]
        found = pipe.prove(dataclasses.replace(result, records=tuple(records)), shown=shown)
        row[f"other_{what}"] = [one.follows for one in found]
    return row


def prove_rows(pipe: SparseLaViDa, count: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each setting."""
    for name in SETTINGS:
        parts = [
            once(f"prove {name} {start}", lambda n=name, s=start: proved(pipe, n, s))
            for start in range(0, count, BATCH)
        ]
        images = sum(one["images"] for one in parts)
        row: dict[str, Any] = {"method": name, "images": images}
        for key in ("codes", "codes_wrong", "layout_tokens", "layout_wrong", "follow"):
            row[key] = sum(one[key] for one in parts)
        for key in PLANTED:
            tried = [one for one in parts if key in one]
            if tried:
                row[f"planted {key}"] = [sum(one[key] for one in tried), BATCH * len(tried)]
        bits = np.concatenate([one["bits"] for one in parts])
        row |= {"bits_median": float(np.median(bits)), "above_20_bits": int((bits > 20).sum())}
        for key in ("other_seed", "other_prompt"):
            passes = np.concatenate([one[key] for one in parts if key in one])
            above = bits[: len(passes)] > 20
            row[key] = [int(passes.sum()), len(passes)]
            row[f"{key}_above_20_bits"] = [int(passes[above].sum()), int(above.sum())]
        row["shortfall"] = max(one["shortfall"] for one in parts)
        row["method"] = name.replace(" ", "_")
        yield row | {"seconds": float(np.median([one["seconds"] for one in parts[1:] or parts]))}


# ---------------------------------------------------------------------------------------------
# Costs.


def uses(pipe: SparseLaViDa, images: int) -> dict[str, Callable[[int], Any]]:
    """Returns what is done with so many images, by name; each takes the number of a turn.

    All but `generate` and the best of several start from images that are drawn here.
    """
    words = [tasks.sample("draw", SEED, i, "test").prompt for i in range(images)]
    drawn = pipe.generate(words, seed=0)
    first = drawn.part(0, 1)

    def seed(turn: int) -> int:
        return (turn + 1) * images

    def branch(at: str, turn: int) -> Result:
        return pipe.branch(first, at, num_images=images, seed=seed(turn))

    return {
        "generate": lambda turn: pipe.generate(words, seed=seed(turn)),
        "surprise": lambda turn: [pipe.surprise(*x) for x in zip(drawn.pixels, words, strict=True)],
        "prove": lambda turn: pipe.prove(drawn),
        "best of 8": lambda turn: pipe.generate(words, best_of=8, seed=seed(turn)),
        "branch of the layout": functools.partial(branch, "layout"),
        "branch of the image": functools.partial(branch, "image"),
    }


def counted(engine: Engine, run: Callable[[], Any]) -> dict[str, int]:
    """Returns the passes of an engine through its model in a call, and their tokens.

    The prompt of a batch is a pass of its own. The image tokenizer and the vision encoder do not
    count.
    """
    found = {"passes": 0, "tokens": 0}

    def sample(*given: Any, callback: Any = None, **how: Any) -> Any:
        reports: list[int] = []
        made = type(engine).sample(
            engine, *given, callback=lambda state: reports.append(state.steps), **how
        )
        ends = [a for a, b in zip(reports, [*reports[1:], 0], strict=True) if not b]
        found["passes"] += sum(ends) + len(ends)
        found["tokens"] += sum(made.tokens)
        return made

    def scores(*given: Any, **how: Any) -> Any:
        made = type(engine).scores(engine, *given, **how)
        found["passes"] += 1
        found["tokens"] += sum(one.tokens for _, one in made)
        return made

    with mock.patch.multiple(engine, sample=sample, scores=scores):
        run()
    return found


def cost_rows(pipe: SparseLaViDa, _: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each use and number of images."""
    for images in map(int, SIZES.value):
        own = uses(pipe, images)
        counts = {
            name: counted(pipe.engine, functools.partial(use, 0)) for name, use in own.items()
        }

        def timed(use: Callable[[int], Any], turn: int) -> float:
            begin = time.perf_counter()
            use(turn)
            return time.perf_counter() - begin

        runs = {name: functools.partial(timed, use) for name, use in own.items()}
        if TIMED.value:
            in_turn(runs, 1)  # compiles
        taken = in_turn(runs, TIMED.value)
        for name, found in counts.items():
            row = {"method": f"{name} {images}".replace(" ", "_"), "use": name, "images": images}
            row |= {f"{key}_x": found[key] / counts["generate"][key] for key in found} | found
            if TIMED.value:
                unit = float(np.median(taken["generate"]))
                row |= {"seconds_x": float(np.median(taken[name])) / unit, "times_s": taken[name]}
            yield row | {
                "turns": TIMED.value,
                "note": "times `generate` of as many images; medians of turns of one run",
            }


if __name__ == "__main__":
    command.run(main)
