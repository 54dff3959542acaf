# SPDX-License-Identifier: Apache-2.0
r"""Rows of the scores of models of real art: the sparse model, its dense twin and its blind one.

    sparse-lavida evaluate runs/art --config=configs/evaluate.py:art --workdir=runs/art_sparse \
        --config.evaluate.limit=2000
    python -m benchmarks.art_scores --sparse=runs/art_sparse --dense=runs/art_dense_scores

Reads finished evaluations of the same prompts, judges their answers, and writes a row for each
score and model to `results/<device>/art`. Several evaluations of a model, of different tasks
(`evaluate.tasks`), are separated by commas. The row of the sparse model holds its mean difference
to the dense one, over pairs of answers to the same prompt, with a 95 % interval.

    python -m benchmarks.art_scores --memory=art

draws combinations that training showed, next to the nearest training images: docs/art_memory.png.
"""

import collections
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

from absl import flags

from benchmarks import command, measurements
from sparse_lavida_jax import config
from sparse_lavida_jax.art import judge, rules
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.data import files
from sparse_lavida_jax.evals import nearest, run, training_report
from sparse_lavida_jax.evals.benchmarks import art, scenes
from sparse_lavida_jax.evals.scorers import paired_difference, wilson_interval
from sparse_lavida_jax.pipeline import SparseLaViDa

FOLDERS = {
    "sparse": flags.DEFINE_list("sparse", [], "Evaluations of the sparse model."),
    "dense": flags.DEFINE_list("dense", [], "Evaluations of its dense twin."),
    "blind": flags.DEFINE_list("blind", [], "Evaluations of the model of empty images."),
}
MEMORY = flags.DEFINE_string("memory", "", "A model, to draw what it was trained on.")
SUITE = "art"
MEMORY_PROMPTS, TRAINING_IMAGES, SHOWN = 256, 4096, 12
DOCS = pathlib.Path(__file__).parents[1] / "docs"
Shares = dict[str, float]  # of what is right of an item, by its key


def main(_: list[str]) -> None:
    """Writes the rows of the evaluations that are named, or those of memory."""
    if MEMORY.value:
        write_memory(SparseLaViDa.from_pretrained(MEMORY.value, batch_size=16), MEMORY.value)
        return
    asked = {name: [*map(pathlib.Path, flag.value)] for name, flag in FOLDERS.items() if flag.value}
    if not asked:
        raise config.ConfigError("no evaluation is named: give --sparse, --dense or --blind.")
    judged = {
        name: dict(collections.ChainMap(*map(shares_of, folders)))
        for name, folders in asked.items()
    }
    bench = measurements.Bench(SUITE)
    for name, folders in asked.items():
        for folder in folders:
            for row in rows_of(files.read_json(folder / "results.json"), name, judged):
                called = row["task"].replace(", ", "/").replace(" ", "_")
                bench.write(f"{called}/{name}", row)
                print(f"{name} {row['task']}: {row['share']:.3f} of {row['total']}", flush=True)


def write_memory(pipe: SparseLaViDa, model: str) -> None:
    """Writes the row and the figure of what a model draws of what it was trained on."""
    said, tiles, shares = nearest.remembered(pipe, MEMORY_PROMPTS, TRAINING_IMAGES)
    pairs = zip(tiles[::2], tiles[1::2], strict=True)  # the font has Latin letters only
    shown = [one for pair in pairs if all(words.isascii() for _, words, _ in pair) for one in pair]
    sheet = training_report.sheet([training_report.Tile(*one) for one in shown[: 2 * SHOWN]])
    sheet.save(DOCS / "art_memory.png")
    copies = sum(share >= nearest.REMEMBERED for share in shares)
    row = {
        "task": "memory", "method": "sparse", "model": model, "training_images": TRAINING_IMAGES,
        "correct": copies, "total": len(shares), "share": copies / len(shares),
        "median_equal_cells": statistics.median(shares),
        "right": sum(bool(ok) for _, _, ok in tiles[::2]),
        "note": f"near copies: at least {nearest.REMEMBERED} of the cells, without background",
    }  # fmt: skip
    measurements.Bench("art_memory").write(model, row)
    print(said)


def shares_of(folder: pathlib.Path) -> dict[str, Shares]:
    """Returns what is right of the items of a finished evaluation, by the name of their score.

    A name with a colon is that of a part: coherent things of a drawing, kept cells of an edit.

    Raises:
        ConfigError: it is not finished, or not one of the art world.
    """
    results = folder / "results.json"
    if not results.exists() or files.read_json(results)["benchmark"] != "art":
        raise config.ConfigError(
            f"{folder} holds no finished evaluation of the art benchmark: repeat the command that"
            " began it, and it goes on."
        )
    told = files.read_json(results)
    settings = model_folder.read_config(model_folder.find_model(told["checkpoint"]["name"]))
    bench = art.BENCHMARK(config.changed(settings, {"evaluate": told["evaluate"]}))
    found: dict[str, Shares] = collections.defaultdict(dict)
    for one in run.answers_of(bench, folder):
        sample, name, key = bench.sample(one.record), bench.name(one.record), one.item.key
        output = one.text if "text" in one.output else scenes.image(one, folder)
        found[name][key] = float(bench.here.score(sample, output).ok)
        if "kept" in one.output:
            kept, asked = one.output["kept"]
            found[f"{name}: {art.KEPT}"][key] = kept / max(asked, 1)
        if not isinstance(output, str) and one.record["task"] == "draw":
            coherent, _, asked = rules.coherence(sample, judge.read(output))
            found[f"{name}: {art.COHERENT}"][key] = coherent / max(asked, 1)
    return dict(found)


def rows_of(
    results: Mapping[str, Any], name: str, judged: Mapping[str, Mapping[str, Shares]]
) -> list[dict[str, Any]]:
    """Returns a row for each score of a model.

    Args:
        results: what the evaluation wrote; the parts of a score follow it and begin with "- ".
        name: of the model, a key of `judged`.
    """
    parts, found, task = dict[str, dict[str, Any]](), [], ""
    for score in results["scores"]:
        if not score["name"].startswith("- "):
            task = score["name"]
            parts[task] = {}
            continue
        parts[task][score["name"].removeprefix("- ")] = [score["value"], score["count"]]
    chance = {score["name"]: score.get("chance") for score in results["scores"]}
    for task, own in parts.items():
        right = judged[name][task]
        correct, total = int(sum(right.values())), len(right)
        row = {
            "task": task, "method": name, "correct": correct, "total": total,
            "share": correct / total, "interval_95": list(wilson_interval(correct, total)),
            "chance": chance.get(task), "parts": own,
            "checkpoint": results["checkpoint"]["sha256"], "sampling": results["sampling"],
            "note": "exact judges on pixels and text; says nothing about speed",
        }  # fmt: skip
        if name == "sparse" and task in judged.get("dense", {}):
            row["against_dense"] = list(difference(right, judged["dense"][task]))
            row["parts_against_dense"] = {
                part: list(difference(judged[name][whole], judged["dense"][whole]))
                for part in own
                if (whole := f"{task}: {part}") in judged[name]
            }
        found.append(row)
    return found


def difference(ours: Shares, theirs: Shares) -> tuple[float, float, float]:
    """Returns the mean difference of paired items, and the ends of its 95 % interval.

    Raises:
        ConfigError: they are not the same items.
    """
    if ours.keys() != theirs.keys():
        raise config.ConfigError(
            "the evaluations asked different prompts: evaluate both models with the same limit."
        )
    return paired_difference(*zip(*[(ours[key], theirs[key]) for key in ours], strict=True))


if __name__ == "__main__":
    command.run(main)
