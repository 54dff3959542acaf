# SPDX-License-Identifier: Apache-2.0
"""The page on few steps: its tables and figures, from the committed rows.

Rows of several seeds are called by what the seeds share, such as "style" for "style/s0" and
"style/s1": a mean over them, with its standard deviation.
"""

import collections
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import ablation_report, measurements
from sparse_lavida_jax import config
from sparse_lavida_jax.data import markdown
from sparse_lavida_jax.evals.scorers import mean_and_spread, paired_difference

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGE = DOCS / "few_steps.md"
ALL = "all"  # registers of every step
PLAIN = "plain"  # what the twin without a code is called
STARTS = {"distil": "style"}  # what the training of a model began with
OWN = "own"  # what a model's own plan is called
COLORS = {"linear": "C0", "cosine": "C1", "shift": "C2"}
LINES = {"stratified": "-", "halton": "--", "random": ":", "layout": "-."}
BEGIN, END = "<!-- {} written by benchmarks.few_steps -->", "<!-- up to here -->"

Rows = Sequence[Mapping[str, Any]]


def way_of(row: Mapping[str, Any]) -> str:
    """Returns what a model is called, without its seed."""
    return re.sub(r"/s\d+$", "", row["model"])


def given_of(row: Mapping[str, Any]) -> str:
    """Returns what an image is drawn from, and of which prompts."""
    prompts = row.get("split", "held_out").replace("_", "-")
    return f"{row['given']}, {prompts} prompts"


def _gaps(rows: Rows) -> list[Mapping[str, Any]]:
    """Returns the rows of gaps; those of models of several seeds are in the table of codes."""
    return [row for row in rows if row["id"].startswith("gap/") and way_of(row) == row["model"]]


def gap_table(rows: Rows) -> str:
    """Returns the gap of plans, in bits an image, by their number of steps."""
    found = collections.defaultdict[tuple, dict[int, Mapping[str, Any]]](dict)
    for row in _gaps(rows):
        found[row["model"], row["given"], row["order"], row["schedule"]][row["steps"]] = row
    # That of one cell a step is zero, and stands in a column of its own.
    numbers = sorted({steps for own in found.values() for steps, row in own.items() if row["gap"]})
    lines = []
    for about, own in sorted(found.items()):
        least = next(row["bits"] - row["gap"] for row in own.values())
        gaps = [f"{own[n]['gap']:.2f}" if n in own else None for n in numbers]
        lines.append((*about, f"{least:.1f}", *gaps))
    heads = ("model", "given", "order", "counts", "bits at one cell a step")
    return markdown.table([*heads, *(f"{n} step{'s' * (n > 1)}" for n in numbers)], lines)


def registers_table(rows: Rows) -> str:
    """Returns what fewer registers in later steps cost, in bits an image."""
    lines = [
        (row["model"], row["given"], row["steps"], ALL if (last := row["registers"]) < 0 else last,
         row["images"], f"{row['bits']:.1f}", f"{row['gap']:+.2f} ± {row['gap_error']:.2f}")
        for row in rows
        if row["id"].startswith("registers/")
    ]  # fmt: skip
    heads = ("model", "given", "steps", "registers of the last step", "images", "bits")
    return markdown.table([*heads, f"more than with {ALL}"], sorted(lines, key=str))


def plans_table(rows: Rows) -> str:
    """Returns the best plan that was found for each model and number of steps."""
    lines = [
        (way, given, -steps, _told(row["method"]), row["prompts"], f"{row['share']:.3f}",
         *_coherence([row]))
        for (way, given, steps), row in sorted(_best(rows).items())
    ]  # fmt: skip
    heads = ("model", "given", "steps", "best plan", "prompts", "correct")
    return markdown.table([*heads, "coherent", "entropy of styles, bits"], lines)


def _best(rows: Rows) -> dict[tuple[str, str, int], Mapping[str, Any]]:
    """Returns the best row by model, what is given and the negative number of steps.

    Models of several seeds, whose plans were not searched, are left out.
    """
    best: dict[tuple[str, str, int], Mapping[str, Any]] = {}
    for row in rows:
        key = row["model"], given_of(row), -row["steps"]
        searched = way_of(row) == row["model"] and row["method"] != OWN
        if searched and (key not in best or _merit(row) > _merit(best[key])):
            best[key] = row
    return best


def _merit(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["share"], row.get("coherent", 0.0)


def _told(method: str) -> str:
    return method.removeprefix("merge_cells=0,").replace(",", ", ").replace("=", " ")


def _coherence(rows: Rows) -> list[str | None]:
    return [
        mean_and_spread([row[name] for row in rows if name in row], 3) or None
        for name in ("coherent", "entropy_bits")
    ]


def models_table(rows: Rows) -> str:
    """Returns what models draw with the same plans, over their seeds."""
    lines = [
        (way, given, -steps, _told(method), len(own),
         mean_and_spread([row["share"] for row in own], 3), *_coherence(own))
        for (way, given, steps, method), own in sorted(_of_seeds(rows).items())
    ]  # fmt: skip
    heads = ("model", "given", "steps", "plan", "seeds", "correct", "coherent")
    return markdown.table([*heads, "entropy of styles, bits"], lines)


def _of_seeds(rows: Rows) -> dict[tuple[str, str, int, str], list[Mapping[str, Any]]]:
    """Returns rows by model without its seed, what is given, the negative steps and the plan."""
    found = collections.defaultdict[tuple, list[Mapping[str, Any]]](list)
    for row in rows:
        if way_of(row) != row["model"]:
            found[way_of(row), given_of(row), -row["steps"], row["method"]].append(row)
    return found


def claims_table(rows: Rows) -> str:
    """Returns differences on the same prompts.

    They are those to a model's own plan, to the plain model and to the one that its training began
    with. Rows of fewer prompts explored; they are not compared.
    """
    each, own = {}, {}
    for row in rows:
        if "of_each" in row:
            about = row["model"], given_of(row), row["seed"]
            each[about, row["method"], row["steps"]] = row
            if row["method"] == OWN:
                own[about] = row
    found = collections.defaultdict[tuple, list[tuple[Mapping, Mapping]]](list)
    for (about, method, steps), row in each.items():
        others = {"its own plan": own.get(about)}
        for way in (PLAIN, STARTS.get(way_of(row), PLAIN)):
            twin = re.sub(r"^[^/]+", way, about[0]), *about[1:]
            others[way] = each.get((twin, method, steps))
        for name, other in others.items():
            if other is not None and other is not row and other["prompts"] == row["prompts"]:
                key = way_of(row), about[1], -steps, _told(method), name
                found[key].append((row["of_each"], other["of_each"]))
    lines = []
    for (way, given, steps, told, name), pairs in sorted(found.items()):
        differences = [_difference(kind, pairs) for kind in ("correct", "coherent")]
        prompts = len(pairs[0][0]["correct"])
        lines.append((way, given, -steps, told, name, len(pairs), prompts, *differences))
    heads = ("model", "given", "steps", "plan", "against", "seeds", "prompts")
    return markdown.table([*heads, "correct", "coherent"], lines)


def _difference(
    kind: str, pairs: Sequence[tuple[Mapping[str, str], Mapping[str, str]]]
) -> str | None:
    """Returns the difference of a share, with its 95 % interval over prompts of all seeds."""
    if any(kind not in one for pair in pairs for one in pair):
        return None
    ours, theirs = ([float(n) for pair in pairs for n in pair[side][kind]] for side in (0, 1))
    asked = [int(n) for one, _ in pairs for n in one.get("things", "1" * len(one[kind]))]
    scale = len(asked) / sum(asked) if kind == "coherent" else 1.0
    mean, low, high = (scale * one for one in paired_difference(ours, theirs))
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def codes_table(rows: Rows) -> str:
    """Returns what a code costs, what it wins, and what images are with codes of each kind.

    A model without a code has the bits of its plans only.
    """
    found = collections.defaultdict[tuple, dict[str, list[Mapping[str, Any]]]](dict)
    for row in rows:
        kind = row["id"].partition("/")[0]
        of_twin = kind == "gap" and way_of(row) != row["model"] and row["gap"]
        if kind in ("code", "holes") or of_twin:
            key = way_of(row), row["given"], row["order"], row["schedule"], -row["steps"]
            found[key].setdefault(row.get("codes", kind), []).append(row)
    lines = []
    for (*about, steps), own in sorted(found.items()):
        coded = own.get("code", [])
        least = [row["bits"] - row["gap"] for row in coded or own.get("gap", [])]
        without = [row["bits_without"] for row in coded] or [row["bits"] for row in own["gap"]]
        closed = [1 - row["gap"] / row["gap_without"] for row in coded if row["gap_without"]]
        bits, code, spread = (
            mean_and_spread([row[name] for row in coded], digits)
            for name, digits in (("bits", 0), ("bits_of_code", 1), ("perplexity", 2))
        )
        drawn = [
            mean_and_spread([row["coherent"] for row in own.get(kind, []) if "coherent" in row], 2)
            for kind in ("prior", "posterior")
        ]
        base, bare = mean_and_spread(least, 0), mean_and_spread(without, 0)
        closed = mean_and_spread(closed, 2)
        lines.append((*about, -steps, base, bare, bits, code, spread, closed, *drawn))
    heads = ("model", "given", "order", "counts", "steps", "bits at one cell a step", "in K steps")
    more = "with the code", "of them the code", "perplexity of a group", "share of the gap closed"
    return markdown.table([*heads, *more, "coherent, prior's codes", "posterior's"], lines)


def draw_gaps(rows: Rows, path: pathlib.Path) -> None:
    """Draws the gap against the steps, a panel for each model and what is given.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    rows = _gaps(rows)
    kinds = sorted({(row["model"], row["given"]) for row in rows}, reverse=True)
    lines = -(-len(kinds) // 2)
    size = {"nrows": lines, "figsize": (9.2, 3.6 * lines), "layout": "constrained"}
    size |= {"squeeze": False, "sharey": True}
    with ablation_report.figure(path, ncols=2, **size) as panels:
        for panel in panels.flat[len(kinds) :]:
            panel.set_visible(False)
        for panel, (model, given) in zip(panels.flat, kinds, strict=False):
            own = [row for row in rows if (row["model"], row["given"]) == (model, given)]
            for order, schedule in sorted({(row["order"], row["schedule"]) for row in own}):
                points = sorted(
                    (row["steps"], row["gap"], row["gap_error"])
                    for row in own
                    # Counts differ neither in one step nor with one cell a step.
                    if row["order"] == order
                    and (row["schedule"] == schedule or row["steps"] == 1 or not row["gap"])
                )
                steps, gaps, errors = zip(*points, strict=True)
                look = {"color": COLORS[schedule], "ls": LINES[order], "lw": 1, "capsize": 2}
                panel.errorbar(steps, gaps, errors, label=f"{order}, {schedule}", **look)
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:.0f}")
            panel.axhline(0, color="0.8", lw=0.8)
            panel.set_yscale("symlog", linthresh=1)  # linear below one bit
            panel.set(xlabel="steps", ylabel="bits an image above one cell a step; log from 1")
            panel.set_title(f"{model}, given: words{' and layout' * (given == 'layout')}")
            panel.legend(fontsize=7, frameon=False)


def draw_plans(rows: Rows, path: pathlib.Path) -> None:
    """Draws correct prompts and coherent things of all plans against their steps.

    A line of panels for each kind of prompts. Lines go through the best plans of at most as many
    steps; stars are the models' own plans.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    found = collections.defaultdict[str, dict[str, list[Rows]]](
        lambda: collections.defaultdict(list)
    )
    plans = collections.defaultdict[tuple, list[Mapping[str, Any]]](list)
    for row in rows:
        plans[given_of(row), way_of(row), row["steps"], row["method"]].append(row)
    for (given, way, *_), seeds in sorted(plans.items()):
        found[given][way].append(seeds)
    kinds = {"share": "correct prompts", "coherent": "coherent things"}
    size = {"figsize": (9.2, 3.2 * len(found)), "layout": "constrained", "squeeze": False}
    size |= {"nrows": len(found), "sharex": True, "sharey": True}
    with ablation_report.figure(path, ncols=len(kinds), **size) as panels:
        for line, (given, models) in zip(panels, sorted(found.items()), strict=True):
            for panel, (name, title) in zip(line, kinds.items(), strict=True):
                for number, (way, own) in enumerate(models.items()):
                    _draw_model(panel, name, way, own, f"C{number}")
                panel.set_xscale("log", base=2)
                panel.xaxis.set_major_formatter("{x:.0f}")
                panel.set(ylim=(0, 1), title=f"{title}, given {given}")
                panel.set_xlabel("steps and revisions")
                panel.xaxis.set_tick_params(labelbottom=True)
                panel.legend(fontsize=7, frameon=False)


def _draw_model(panel: Any, name: str, way: str, plans: Sequence[Rows], color: str) -> None:
    best = list[tuple[int, float, float]]()
    for own in plans:
        steps, values = own[0]["steps"], [row[name] for row in own if name in row]
        if not values:
            continue
        star = own[0]["method"] == OWN
        mean, spread = float(np.mean(values)), float(np.std(values))
        panel.plot(steps, mean, "*" if star else ".", color=color, ms=11 if star else 4)
        if not star and (not best or mean > best[-1][1]):
            if best and best[-1][0] == steps:
                best.pop()
            best.append((steps, mean, spread))
    if best:
        steps, means, spreads = zip(*best, strict=True)
        panel.errorbar(steps, means, spreads, color=color, lw=1, capsize=2, label=way)


TABLES: dict[str, tuple[str, Callable[[Rows], str]]] = {
    "gap": ("few_steps", gap_table),
    "registers": ("few_steps", registers_table),
    "plans": ("plan_search", plans_table),
    "models": ("plan_search", models_table),
    "claims": ("plan_search", claims_table),
    "codes": ("few_steps", codes_table),
}


def renewed(page: str) -> str:
    """Returns a page with its tables rewritten from the rows; a page may lack some of them.

    Raises:
        ConfigError: it has a table without an end.
    """
    for name, (suite, made) in TABLES.items():
        begin = BEGIN.format(name)
        if begin in page:
            try:
                part = made(measurements.read_rows(suite))
                page = markdown.with_part(page, begin, END, part)
            except ValueError as error:
                raise config.ConfigError(f"{PAGE}: {error}") from error
    return page


def write() -> None:
    """Writes the tables of the page, and its figures.

    Raises:
        ConfigError: the page lacks a marker, or matplotlib is not installed.
    """
    PAGE.write_text(renewed(PAGE.read_text()))
    draw_gaps(measurements.read_rows("few_steps"), DOCS / "few_steps_gap.png")
    draw_plans(measurements.read_rows("plan_search"), DOCS / "few_steps_models.png")
    print(PAGE)
