# SPDX-License-Identifier: Apache-2.0
r"""The best of several images, judged by the model itself (`--best-of`): how often it is right.

    python -m benchmarks.best_of --items=1000
    python -m benchmarks.best_of --items=1000 --ranked --tasks=inpaint

Every item is drawn until the model accepts its image, at most eight times, each with noise of its
own. What `best_of=1, 2, 4, 8` returns for it follows: the first accepted image of so many, or the
last. Items that are finished are kept in `--progress`, and the same command goes on.

With `--ranked` all eight images of each item are drawn, and the one is taken that surprises the
model least given the words (`inference/surprise.py`), by its most surprising cell or by all.
"""

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

from benchmarks import command, measurements
from sparse_lavida_jax.data.image_files import Pixels
from sparse_lavida_jax.evals.scorers import wilson_interval
from sparse_lavida_jax.inference.requests import Request
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs.folder import keep_programs
from sparse_lavida_jax.scenes import tasks, world

ITEMS = flags.DEFINE_integer("items", 1000, "Items of each task.", lower_bound=1)
TASKS = flags.DEFINE_list("tasks", ["outpaint", "inpaint"], "What is drawn.")
RANKED = flags.DEFINE_boolean("ranked", False, "Rank eight images by how surprising they are.")
PROGRESS = flags.DEFINE_string("progress", "runs/best_of.jsonl", "File for finished items.")

BEST_OF = (1, 2, 4, 8)
SEED = 57  # of the items, which no training has
Try = dict[str, Any]  # whether it is right and accepted, and its tokens, those of judging apart


def main(_: list[str]) -> None:
    """Measures the bundled model, and writes a row for each task and number of tries."""
    bench, path = measurements.Bench("best_of"), pathlib.Path(PROGRESS.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    keep_programs()
    pipe = SparseLaViDa.from_pretrained("scenes")
    draw, rows = (all_drawn, ranked_rows) if RANKED.value else (drawn, rows_of)
    for task in TASKS.value:
        kind = f"{task}, ranked" if RANKED.value else task
        finished = _read(path, kind)
        todo = [i for i in range(ITEMS.value) if i not in finished]
        for index, tries in draw(pipe, task, todo):
            finished[index] = tries
            with path.open("a") as file:
                file.write(json.dumps({"task": kind, "item": index, "tries": tries}) + "\n")
            print(f"{kind}: {len(finished)} of {ITEMS.value}", flush=True)
        for method, row in rows([finished[i] for i in range(ITEMS.value)]):
            name = f"{task}/{method.replace(',', '').replace(' ', '_')}"
            how = {"model": "scenes", "task": task, "method": method}
            path_of_row = bench.write(name, how | row)
            print(path_of_row.name, row, flush=True)


def _read(path: pathlib.Path, task: str) -> dict[int, list[Try]]:
    """Returns the tries of the items of a task that are finished."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return {one["item"]: one["tries"] for one in found if one["task"] == task}


def drawn(pipe: SparseLaViDa, task: str, items: Sequence[int]) -> Iterator[tuple[int, list[Try]]]:
    """Yields the tries of each item, once one is accepted or there are enough of them."""
    waiting, tries = [*items], {index: [] for index in items}
    while waiting:
        now, waiting = waiting[: pipe.batch_size], waiting[pipe.batch_size :]
        rows = [_request(pipe, task, index, len(tries[index])) for index in now]
        for index, one in zip(now, _tried(pipe, task, now, rows), strict=True):
            tries[index].append(one)
            if one["accepted"] or len(tries[index]) == BEST_OF[-1]:
                yield index, tries[index]
            else:
                waiting.insert(0, index)


def _request(pipe: SparseLaViDa, task: str, index: int, attempt: int) -> Request:
    sample = tasks.sample(task, SEED, index)
    assert sample.image is not None
    words, shown = sample.prompt.rpartition(",")[0], world.render(sample.image)
    options = {"known": sample.known_grid, "seed": index, "as_written": True}
    (made,) = pipe.requests(task, words, shown, **options)
    return Request(**{**vars(made), "attempt": attempt})


def _tried(
    pipe: SparseLaViDa, task: str, items: Sequence[int], rows: Sequence[Request]
) -> list[Try]:
    """Draws one image for each request; returns how good it is, and what it cost.

    With `--ranked` also the bits of its most surprising cell, and of all, given the words.
    """
    run = pipe.task_run(rows[0].sampling, padding="full")
    images = run.try_images(rows, judges=False)
    costs = [run.tokens[i] + run.layout_tokens[i] for i in range(len(rows))]
    verdicts = run.verdicts(rows, [one.pixels for one in images])
    judged = [run.tokens[i] + run.layout_tokens[i] for i in range(len(rows))]
    bits = _bits(pipe, rows, [one.pixels for one in images]) if RANKED.value else [{}] * len(rows)
    return [
        {
            "right": tasks.score(tasks.sample(task, SEED, index), one.pixels).ok,
            "accepted": pipe.prompts.accepts(verdict),
            "tokens": cost,
            "judging_tokens": whole - cost,
            **own,
        }
        for index, one, verdict, cost, whole, own in zip(
            items, images, verdicts, costs, judged, bits, strict=True
        )
    ]


def _bits(pipe: SparseLaViDa, rows: Sequence[Request], images: Sequence[Pixels]) -> list[Try]:
    """Returns how surprising images of one item are given its words; equal ones are scored once."""
    found: dict[bytes, Try] = {}
    for image in images:
        if image.tobytes() not in found:
            own = pipe.surprise(image, rows[0].words)
            values = float(own.bits.max()), float(own.bits.sum()), own.tokens
            names = "largest cell", "sum", "ranking_tokens"
            found[image.tobytes()] = dict(zip(names, values, strict=True))
    return [found[image.tobytes()] for image in images]


def all_drawn(
    pipe: SparseLaViDa, task: str, items: Sequence[int]
) -> Iterator[tuple[int, list[Try]]]:
    """Yields all tries of each item."""
    for index in items:
        rows = [_request(pipe, task, index, attempt) for attempt in range(BEST_OF[-1])]
        yield index, _tried(pipe, task, [index] * len(rows), rows)


def rows_of(items: Sequence[Sequence[Try]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a method and a row for each number of tries."""
    for best_of in BEST_OF:
        yield f"best of {best_of}", summary(items, best_of)


def ranked_rows(items: Sequence[Sequence[Try]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a method and a row for each way to choose among all tries of an item.

    By chance: one of them at random. Any: whether one is right, the most that a choice can reach.
    First accepted: what `best_of=8` returns of the same tries.
    """
    tokens = {"draw": _mean(items, "tokens"), "judge": _mean(items, "judging_tokens"),
              "rank": _mean(items, "ranking_tokens")}  # fmt: skip
    chance = np.mean([[one["right"] for one in tries] for tries in items])
    most = sum(any(one["right"] for one in tries) for tries in items)
    takes = [next((one for one in tries if one["accepted"]), tries[-1]) for tries in items]
    first = sum(one["right"] for one in takes)
    for name in ("largest cell", "sum"):
        for judges in (False, True):
            right = sum(ranked(tries, name, judges)["right"] for tries in items)
            cost = BEST_OF[-1] * (tokens["draw"] + tokens["rank"] + judges * tokens["judge"])
            yield "judged, " * judges + f"ranked by {name}", {
                "best_of": BEST_OF[-1], "items": len(items), "right": right,
                "share": right / len(items),
                "interval_95": list(wilson_interval(right, len(items))),
                "by_chance": float(chance), "any": most / len(items),
                "first_accepted": first / len(items), "tokens": cost,
                "of_an_unjudged_draw": cost / tokens["draw"],
            }  # fmt: skip


def ranked(tries: Sequence[Try], name: str, judges: bool) -> Try:
    """Returns the least surprising try, of those that are accepted if the model judges too."""
    accepted = [one for one in tries if one["accepted"]] if judges else []
    return min(accepted or tries, key=lambda one: one[name])


def _mean(items: Sequence[Sequence[Try]], name: str) -> float:
    return float(np.mean([[one[name] for one in tries] for tries in items]))


def summary(items: Sequence[Sequence[Try]], best_of: int) -> dict[str, Any]:
    """Returns how many items are right with at most `best_of` tries, and the tokens of an item.

    A single try is not judged, and its tokens are the unit of the multiples.
    """
    chosen = [tries[: 1 if best_of == 1 else best_of] for tries in items]
    right = sum(tries[-1]["right"] for tries in chosen)
    plain = np.mean([tries[0]["tokens"] for tries in items])
    judged = np.mean([tries[0]["tokens"] + tries[0]["judging_tokens"] for tries in items])
    per_item = [
        sum(one["tokens"] + one["judging_tokens"] * (best_of > 1) for one in tries)
        for tries in chosen
    ]
    firsts = [tries[0] for tries in items]
    wrong = [one for one in firsts if not one["right"]]
    good = [one for one in firsts if one["right"]]
    return {
        "best_of": best_of,
        "items": len(items),
        "right": right,
        "share": right / len(items),
        "interval_95": list(wilson_interval(right, len(items))),
        "tries": float(np.mean([len(tries) for tries in chosen])),
        "tokens": float(np.mean(per_item)),
        "of_an_unjudged_draw": float(np.mean(per_item) / plain),
        "of_a_judged_draw": float(np.mean(per_item) / judged),
        "accepted_if_right": _share(good),
        "accepted_if_wrong": _share(wrong),
        "wrong_at_first": len(wrong),
    }


def _share(tries: Sequence[Try]) -> float | None:
    return float(np.mean([one["accepted"] for one in tries])) if tries else None


if __name__ == "__main__":
    command.run(main)
