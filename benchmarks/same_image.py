# SPDX-License-Identifier: Apache-2.0
r"""Whether other machines draw the codes of this one, and the margins of those that they do not.

    python -m benchmarks.same_image --variant=reference  # draws the codes, and keeps them
    XLA_FLAGS=--xla_cpu_max_isa=AVX2 python -m benchmarks.same_image --variant=avx2
    XLA_FLAGS=--xla_cpu_max_isa=AVX python -m benchmarks.same_image --variant=avx  # no FMA
    taskset --cpu-list 0 python -m benchmarks.same_image --variant=one_thread
    python -m benchmarks.same_image --variant=batch_1
    python -m benchmarks.same_image --variant=interpreted --drawn=64
    python -m benchmarks.same_image --variant=bfloat16
    python -m benchmarks.same_image --variant=device  # anywhere, such as on a GPU

Images with a layout, and without one at temperature 1, where margins are small. Each part draws
them again, and compares their codes with the kept ones. Of the first `PASSED` of each kind, it also
passes the plans of the kept codes, which gives the margins that these have here
(`inference/proofs.py`). Finished batches are saved line by line in `--resume`, and are skipped when
the command is repeated.
"""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
from absl import flags

from benchmarks import command, measurements
from sparse_lavida_jax import orders
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.scenes import tasks

PARTS = ("reference", "avx2", "avx", "one_thread", "batch_1", "interpreted", "bfloat16", "device")
PART = flags.DEFINE_enum("variant", "device", PARTS, "What differs from the reference.")
COUNT = flags.DEFINE_integer("drawn", 500, "Images of each kind.", lower_bound=16)
KIND = flags.DEFINE_enum("kind", None, ["layout", "free"], "Only images of this kind.")
DONE = flags.DEFINE_string("resume", "runs/same_image.jsonl", "File for finished batches.")

MODEL, BATCH, SEED = "scenes", 16, 57
PASSED = 128
KINDS: dict[str, dict[str, Any]] = {"layout": {}, "free": {"layout": False, "temperature": 1.0}}
KEPT = measurements.RESULTS / "cpu" / "firsts" / "same_image.npz"
DRAWN = ("codes", "layout_tokens", "decoded_at")  # of a record
MARGINS = ("image_margins", "layout_margins")
Rows = dict[str, np.ndarray]


def main(_: list[str]) -> None:
    """Draws the images of a part, and writes a row for each kind of image."""
    part, pipe = PART.value, pipe_of(PART.value)
    kept = {} if part == "reference" else dict(np.load(KEPT))
    kinds = [KIND.value] if KIND.value else [*KINDS]
    made = {kind: drawn(pipe, kind, part, kept) for kind in kinds}
    if part == "reference":
        kept = {f"{kind} {key}": x for kind, rows in made.items() for key, x in rows.items()}
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(KEPT, allow_pickle=False, **kept)
        return
    bench = measurements.Bench("firsts")
    for kind, rows in made.items():
        number = len(rows["codes"])
        before = {key: kept[f"{kind} {key}"][:number] for key in rows}
        values = {
            "model": MODEL,
            "method": part,
            "kind": kind,
            "images": number,
            **compared(before, rows),
        }
        values |= {"attention": pipe.engine.constants.attention}
        path = bench.write(f"same/{kind}/{part}", values, name=f"{MODEL}/same/{kind}/{part}")
        print(path.name, values, flush=True)


def pipe_of(part: str) -> SparseLaViDa:
    """Returns the bundled model as a part runs it."""
    pipe = SparseLaViDa.from_pretrained(MODEL, batch_size=1 if part == "batch_1" else BATCH)
    assert pipe.codec is not None
    side = pipe.codec.image_size

    def blank(cells, *_):
        return np.zeros((len(cells), side, side, 3), np.uint8)

    vars(pipe.codec)["to_pixels"] = blank  # codes are compared: nothing is decoded
    changes = {
        "interpreted": {"attention_implementation": "pallas_tpu"},
        "bfloat16": {"compute_dtype": "bfloat16"},
    }.get(part)
    if changes is None:
        return pipe
    model = jax.tree.map(lambda leaf: leaf, pipe.model)  # a separate module that shares the arrays
    model.settings = dataclasses.replace(model.settings, **changes)
    if part == "bfloat16":
        for layers in (model.joint_layers, model.split_layers):
            layers.understanding.dtype = layers.generation.dtype = "bfloat16"
    return pipe.with_model(model, pipe.source)


def drawn(pipe: SparseLaViDa, kind: str, part: str, kept: Rows) -> Rows:
    """Returns codes, layouts and the margins of the kept codes, or of its own without any.

    The last batch is drawn whole, and cut to `--drawn`.
    """
    path, parts = pathlib.Path(DONE.value), []
    lines = path.read_text().splitlines() if path.exists() else []
    found = {one["key"]: one for one in map(json.loads, lines)}
    for start in range(0, COUNT.value, BATCH):
        key = f"{part} {kind} {start}"
        if key not in found:
            found[key] = {"key": key} | batch(pipe, kind, start, kept)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(found[key]) + "\n")
        parts.append(found[key])
    types: dict[str, Any] = {key: np.int16 for key in DRAWN} | {"step": np.uint8}
    types |= {key: np.float32 for key in MARGINS}
    joined = {
        key: np.concatenate([np.array(one[key], dtype) for one in parts])[: COUNT.value]
        for key, dtype in types.items()
    }
    return joined | {"codes": joined["codes"][..., 0]}


def batch(pipe: SparseLaViDa, kind: str, start: int, kept: Rows) -> dict[str, Any]:
    """Returns the rows of a batch (`drawn`)."""
    words = [tasks.sample("draw", SEED, start + i, "test").prompt for i in range(BATCH)]
    result = pipe.generate(words, seed=start, **KINDS[kind])
    rows = {key: [one[key] for one in result.records] for key in DRAWN}
    if kept:
        kept = {key: kept[f"{kind} {key}"][start : start + BATCH] for key in DRAWN}
        result = with_codes(pipe, result, kept)
    proofs = [] if kept and start >= PASSED else pipe.prove(result, tolerance=0.0)
    for stage, drawn in (("image", "codes"), ("layout", "decoded_at")):
        found = np.full((BATCH, len(rows[drawn][0])), np.inf)  # not passed, or not drawn
        for i, proof in enumerate(proofs):
            if (own := getattr(proof, stage)) is not None:
                found[i] = [np.inf if x is None else x for x in own.margins]
        rows[f"{stage}_margins"] = found.tolist()
    request = pipe.requests("generate", words, layout=False, seed=start)[0]
    run = pipe.task_run(request.sampling)
    side = int(pipe.settings.model.grid_size)
    how, step = request.sampling, np.zeros((BATCH, side * side), int)
    counts = run.step_counts(request, "image")
    steps = np.repeat(np.arange(len(counts)), counts)
    for i, own in enumerate(step):
        seed = start + i if how.order_seed < 0 else how.order_seed
        own[orders.order(how.order, side, side, seed)] = steps
    return rows | {"step": step.tolist()}


def with_codes(pipe: SparseLaViDa, result: Result, kept: Rows) -> Result:
    """Returns a result with the kept codes and layouts; the last batch may hold fewer."""
    records = []
    for i, one in enumerate(result.records[: len(kept["codes"])]):
        own = {key: kept[key][i].tolist() for key in DRAWN}
        own["codes"] = [[code] for code in own["codes"]]
        if own["layout_tokens"]:
            ids, order = np.array(own["layout_tokens"]), np.array(own["decoded_at"])
            end = pipe.settings.model.end_of_text_id
            ended = np.cumsum((ids == end) & (order > 0)) > 0
            own["layout"] = pipe.prompts.text(np.where(ended, end, ids)[:, None])
        records.append(one | own)
    return dataclasses.replace(result.part(0, len(records)), records=tuple(records))


def compared(kept: Rows, here: Rows) -> dict[str, Any]:
    """Returns how many layouts and images are the same, and the first differences of the others.

    An image is compared if its layout is the same: else it follows another one.
    """
    told = (kept["decoded_at"] > 0) | (here["decoded_at"] > 0)
    other = (kept["decoded_at"] != here["decoded_at"]) | (
        kept["layout_tokens"] != here["layout_tokens"]
    )
    firsts_of_layouts, same = [], np.ones(len(told), bool)
    for i in np.flatnonzero((other & told).any(axis=1)):
        same[i] = False
        order = np.where(kept["decoded_at"][i] > 0, kept["decoded_at"][i], 2**15 - 1)
        at = np.flatnonzero(other[i] & told[i])
        at = at[order[at] == order[at].min()]
        firsts_of_layouts.append(float(kept["layout_margins"][i][at].min()))
    firsts = []
    for i in np.flatnonzero(same & (kept["codes"] != here["codes"]).any(axis=1)):
        cells = np.flatnonzero(kept["codes"][i] != here["codes"][i])
        step = kept["step"][i][cells]
        for cell in cells[step == step.min()]:
            margin = float(kept["image_margins"][i][cell])
            firsts.append({"image": int(i), "cell": int(cell), "margin": margin})
    different = {one["image"] for one in firsts}
    return {
        "layouts": int(told.any(axis=1).sum()),
        "layouts_same": int((told.any(axis=1) & same).sum()),
        "layout_first_margins": sorted(firsts_of_layouts),
        "compared": int(same.sum()),
        "same": int(same.sum()) - len(different),
        "first_cells": sorted(firsts, key=lambda one: -one["margin"]),
        "image": moved(kept["image_margins"], here["image_margins"]),
        "layout": moved(kept["layout_margins"], here["layout_margins"]),
    }


def moved(kept: np.ndarray, here: np.ndarray) -> dict[str, Any] | None:
    """Returns how margins of the kept codes move; None: there are none."""
    chosen = np.isfinite(kept) & np.isfinite(here)
    if not chosen.any():
        return None
    before, now = kept[chosen].astype(float), here[chosen].astype(float)
    quantiles = np.quantile(np.abs(now - before), (0.5, 0.99, 1)).tolist()
    lost = before[now < 0]
    return {
        "draws": int(chosen.sum()),
        "smallest_margin": float(before.min()),
        "moved_median_99_most": quantiles,
        "lost": len(lost),  # draws that the pass here would make otherwise
        "largest_lost_margin": float(lost.max(initial=0)),
        "images_with_all_above": [
            [bound, float((kept.min(axis=1) > bound).mean())]
            for bound in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0)
        ],
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """Returns the table of the page: a row for each stage that was drawn again."""
    lines = [
        "| what differs | what is drawn | the same | first differences, largest margin |"
        " draws passed, smallest margin | margins move by: median, 99 %, most |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    of_device = sorted(rows, key=lambda row: (PARTS.index(row["method"]), row["kind"]))
    for row in of_device:
        images = [one["margin"] for one in row["first_cells"]]
        stages = {
            "images without a layout" if row["kind"] == "free" else "images of the same layout": (
                row["same"], row["compared"], images, row["image"],
            )
        }  # fmt: skip
        if row["layouts"]:
            counts = row["layouts_same"], row["layouts"], row["layout_first_margins"]
            stages = {"layouts": (*counts, row["layout"])} | stages
        for name, (same, number, margins, passed) in stages.items():
            first = f"{len(margins)}, {max(margins):.2g}" if margins else "none"
            moved = ", ".join(f"{one:.2g}" for one in passed["moved_median_99_most"])
            lines.append(
                f"| {row['method']} | {name} | {same} of {number} | {first} |"
                f" {passed['draws']}, {passed['smallest_margin']:.2g} | {moved} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    command.run(main)
