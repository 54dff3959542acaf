# SPDX-License-Identifier: Apache-2.0
r"""Tables from the committed rows, compared with the bars.

    python -m benchmarks.table
    python -m benchmarks.table README.md    # rewrites the tables in that file

`tables.toml` defines the tables. Ratios are formed only between rows of one run.
"""

import fnmatch
import functools
import itertools
import math
import pathlib
import signal
import string
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.measurements import read_rows
from sparse_lavida_jax.data import markdown
from sparse_lavida_jax.evals.chance import CHANCE
from sparse_lavida_jax.evals.scorers import wilson_interval

BARS = pathlib.Path(__file__).with_name("bars.toml")
TABLES = tomllib.loads(BARS.with_name("tables.toml").read_text())
BEGIN, END = "<!-- {} written by benchmarks.table -->", "<!-- up to here -->"

Rows = Sequence[Mapping[str, Any]]


class View(dict[str, Any]):
    """A row, with values derived from it (`VALUES`)."""

    def __missing__(self, name: str) -> Any:
        if name not in VALUES:
            raise KeyError(name)
        return VALUES[name](self)

    def find(self, name: str) -> Any:
        """Returns a value, or None if the row lacks what it is derived from."""
        try:
            return self[name]
        except (KeyError, TypeError):
            return None


def _matmul_rate(row: View) -> float:
    """Returns operations per second of the fastest matrix product in the same run."""
    return max(row["calibration"]["matmul_tflops"].values()) * 1e12


def _per_loss_token(row: View, of: Callable[[View], float]) -> float:
    """Returns tokens with a loss per second or per operation, relative to the other row."""
    ours, other = (one["tokens"]["loss"] / of(one) for one in (row, row["other"]))
    return ours / other


VALUES: dict[str, Callable[[View], Any]] = {
    # From a row and the other row, with which ratios are formed.
    "times_faster": lambda row: row["other"]["median_s"] / row["median_s"],
    "times_faster_than": lambda row: row["times_faster"],
    "times_slower": lambda row: row["median_s"] / row["other"]["median_s"],
    "times_operations": lambda row: row["operations"] / row["other"]["operations"],
    "times_fewer_operations": lambda row: row["other"]["operations"] / row["operations"],
    "times_faster_an_image": lambda row: row["times_faster"] * row["batch"] / row["other"]["batch"],
    "share_of_token_ratio": lambda row: (
        row["times_faster"] * row["tokens"]["useful"] / row["other"]["tokens"]["useful"]
    ),
    "loss_tokens_a_second": lambda row: _per_loss_token(row, lambda one: one["median_s"]),
    "loss_tokens_a_tflop": lambda row: _per_loss_token(
        row, lambda one: one["flops"].get("computed") or one["flops"]["useful"]
    ),
    # From whole requests.
    "at_most_s": lambda row: row["median_s"],
    "loop_over_floor": lambda row: row["split_s"]["loop"] / row["floor_s"],
    "loop_share_of_matmul": lambda row: (
        row["loop_flops"] / row["split_s"]["loop"] / _matmul_rate(row)
    ),
    "images_a_minute": lambda row: 60 * row["batch"] / row["median_s"],
    "padding": lambda row: 1 - row["tokens"]["useful"] / row["tokens"]["padded"],
    "compilations": lambda row: row["compilations_timed"],
    # Rows of the suite `sampling` hold those of one guidance row.
    "tokens_of_one": lambda row: row["tokens"]["useful"] * row.get("guidance_rows", 1),
    "operations": lambda row: row["flops"]["useful"] + row["flops"]["vq"],
    "vq_s": lambda row: row["split_s"]["vq_encode"] + row["split_s"]["vq_decode"],
    "vq_share_of_s": lambda row: row["vq_s"] / row["median_s"],
    "vq_share_of_operations": lambda row: row["flops"]["vq"] / row["operations"],
    "timed_in_part": lambda row: (
        f" ({row['steps_timed']} of {row['steps']} steps timed)"
        * (row["steps_timed"] < row["steps"])
    ),
    "day": lambda row: row["created"][:10],
    "and_changes": lambda row: " and changes" if row["dirty"] else "",
    "change": lambda row: row["method"].partition("without_")[2],
    "largest_difference": lambda row: (
        row["logits"]["largest_difference"] / row["logits"]["largest"]
    ),
    "mean_difference": lambda row: row["logits"]["mean_difference"] / row["logits"]["largest"],
    # From quality: a row, or a task with a row of the sparse model and one of its dense twin.
    "interval": lambda row: wilson_interval(row["correct"], row["total"]),
    "bar": lambda row: bars()["quality"][row["task"]],
    "chance": lambda row: CHANCE[row["task"]],
    "held": lambda row: _verdict(row["share"] >= row["bar"]),
    "sparse_held": lambda row: row["sparse"]["held"] if "sparse" in row else _verdict(False),
    "difference": lambda row: row["sparse"]["share"] - row["dense"]["share"],
    "within": lambda row: bars()["twins"]["within"],
    "as_good": lambda row: _verdict(row["difference"] >= -row["within"]),
    # From the suite `rehearsal`: a model at full size, part by part.
    "paper": lambda row: bars()["paper"][row["task"]],
    "layers_used": lambda row: row.get("layers_trained", row["layers"]),
    "checked": lambda row: ", ".join(
        f"{name} {'yes' if is_so else 'no'}" for name, is_so in row["checks"].items()
    ),
    # From attention.
    "at_most_us": lambda row: row["median_s"] * 1e6,
    "at_most_growth": lambda row: row["growth"],
    "useful_rate": lambda row: row["flops"]["useful"] / row["median_s"] / 1e12,
    "tile_rate_of_ours": lambda row: (
        row["flops"]["tile"] / row["median_s"] / 1e12 if row["method"] == "kernel" else None
    ),
    "tile_rate": lambda row: row["times_faster"] * row["flops"]["tile"] / row["flops"]["dense"],
    # From training.
    "loss_share": lambda row: row["tokens"]["loss"] / row["tokens"]["padded"],
    "loss_spread": lambda row: row["loss"]["std"] / row["loss"]["mean"],
    "tile_told": lambda row: f", {row['tile']} at a time" if row["tile"] else "",
    "others_s": lambda row: sum(row["predicted_by_kind"][of] for of in ("copies", "others")),
    "taken_told": lambda row: "yes" if row["is_taken"] else "",
    "device_told": lambda row: " ".join(
        str(row["device"][name]) for name in ("count", "kind") if name in row["device"]
    ),
    "topology": lambda row: row["device"]["topology"],
    "mesh_sizes": lambda row: " ".join(f"{axis}={size}" for axis, size in row["mesh"].items()),
    "exchanged": lambda row: sum(row["exchanged_bytes"].values()),
}


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "not met"


class _Cells(string.Formatter):
    """Format strings in which a number may have a factor: "{median_s:1e6|.1f}"."""

    def format_field(self, value: Any, format_spec: str) -> str:
        factor, _, spec = format_spec.rpartition("|")
        if value is None:
            raise TypeError("an empty cell")
        return format(value * float(factor) if factor else value, spec)

    def cell(self, text: str, row: View) -> str | None:
        """Returns a cell; None if one of its values is missing."""
        try:
            return self.vformat(text, (), row)
        except (KeyError, TypeError):
            return None


def row_of(rows: Rows, row: Mapping[str, Any], method: str) -> View | None:
    """Returns the row of a method for the same case in the same run."""
    same = ("run", "task", "batch")
    for other in rows:
        if other.get("method") == method and all(other[name] == row[name] for name in same):
            return View(other)
    return None


def table(name: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns the table of this name in `tables.toml`, in Markdown."""
    asked, rows, found = TABLES[name], [*rows], []
    for row in map(View, rows):
        if "against" in asked:
            row["other"] = row_of(rows, row, asked["against"])
        if all(row.find(value) for value in asked.get("needs", ())):
            found.append(row)
    for value in reversed(asked.get("order", ())):  # sorting is stable
        key = value.removeprefix("-")
        found.sort(key=lambda row, key=key: row[key], reverse=key != value)
    cells = {
        heading: [_Cells().cell(text, row) for row in found]
        for heading, text in asked["columns"].items()
    }
    for headings in asked.get("optional", ()):
        if not any(cell for heading in headings for cell in cells[heading]):
            for heading in headings:
                del cells[heading]
    return markdown.table([*cells], zip(*cells.values(), strict=True))


@functools.cache
def bars() -> dict[str, Any]:
    """Returns the bars that rows are compared with."""
    return tomllib.loads(BARS.read_text())


# ---------------------------------------------------------------------------------------------
# Whole requests and quality.


def _compared(rows: Rows, *methods: str) -> Iterator[dict[str, Any]]:
    """Yields sparse rows, each with that of the first of these methods that was measured."""
    for row in rows:
        other = next(filter(None, (row_of(rows, row, method) for method in methods)), None)
        if row["method"] == "sparse" and not row.get("variant") and other is not None:
            yield {**row, "other": other, "released": row_of(rows, row, "dense_released")}


def requests_table(rows: Rows) -> str:
    """Returns whole requests for images on accelerators, sparse compared with dense; "": none."""
    models, suites = bars()["speed"]["models"], ("headline", "edit")
    own = [row for row in rows if row["model"] in models and row["suite"] in suites]
    found = [*_compared(own, "dense_lean")]
    return table("requests", found) if found else ""


def full_size(rows: Rows) -> Rows:
    """Returns whole requests to a model of the release's size, sparse compared with dense."""
    full = [row for row in rows if (row["size"], row["layers"]) == ("release", 32)]
    return [*_compared(full, "dense_lean", "dense_cached")]


def _scored(rows: Rows) -> Iterator[View]:
    """Yields a row for every task, and for every part of a task."""
    for row in rows:
        parts = {f"{row['task']}: {name}": pair for name, pair in row["columns"].items()}
        for task, (right, total) in ({row["task"]: (row["correct"], row["total"])} | parts).items():
            told = {"task": task, "correct": right, "total": total, "share": right / total}
            yield View({**row, **told, "order": (row["task"], task != row["task"])})


def _twins(rows: Rows) -> dict[str, dict[str, Any]]:
    """Returns the scores per task of the sparse model, its dense twin and its blind one."""
    twins = bars()["twins"]
    trained = {twins[name]: name for name in ("sparse", "dense", "blind")}
    found: dict[str, dict[str, Any]] = {}
    for row in _scored(rows):
        name = trained.get(row["model"])
        # Each is scored as it was trained.
        if name and (row["method"] == "dense") == (name == "dense"):
            found.setdefault(row["task"], {"task": row["task"]})[name] = row
    return found


def twins_table(rows: Rows) -> str:
    """Returns the sparse model against its dense twin: same size, lessons, CPU time and seed."""
    return table("twins", [row for row in _twins(rows).values() if ": " not in row["task"]])


def bundled_table(rows: Rows, *, parts: bool = True, name: str = "bundled") -> str:
    """Returns the scores of the bundled model and its twins for all tasks with a bar.

    Args:
        parts: includes the parts of tasks, such as "draw: position".
        name: of the table.
    """
    twins = _twins(rows)
    asked = [task for task in bars()["quality"] if parts or ": " not in task]
    return table(name, [twins.get(task, {"task": task}) for task in asked])


def art_table(rows: Rows, *, parts: bool = True, name: str = "art") -> str:
    """Returns the scores of the art model and its twins, with their bars.

    Args:
        parts: includes the parts of scores that have a bar, such as coherence.
        name: of the table.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        total = {"share": row["share"], "total": row["total"]}
        scores = {row["task"]: {**row, **total}}
        differences = row.get("parts_against_dense", {})
        for part, (share, count) in row["parts"].items() if parts else ():
            whole = {"share": share, "total": count, "against_dense": differences.get(part)}
            scores[f"{row['task']}: {part}"] = whole
        for task, score in scores.items():
            told = View({**score, "correct": round(score["share"] * score["total"])})
            found.setdefault(task, {"task": task})[row["method"]] = told
    return table(name, filter(None, (_with_bar(row) for _, row in sorted(found.items()))))


def _with_bar(row: dict[str, Any]) -> dict[str, Any] | None:
    """Adds whether the sparse model reaches its bar; None for a part that has no bar."""
    task, share = row["task"], row["sparse"]["share"] if "sparse" in row else math.nan
    if task in bars()["art"]:
        bar = bars()["art"][task]
        return {**row, "told": f"{bar:.2f} {_verdict(share >= bar)}"}
    if task in bars()["art_at_most"]:
        bar = bars()["art_at_most"][task]
        return {**row, "told": f"at most {bar:.2f} {_verdict(share <= bar)}"}
    return None if ": " in task else row


def coherence_table(rows: Rows) -> str:
    """Returns the coherence of what models of art draw, next to how much of it is found at all."""
    found = []
    for row in sorted(rows, key=lambda row: (row["task"], row["method"] != "sparse")):
        if "things coherent" not in (parts := row["parts"]):
            continue
        coherent, things = parts["things coherent"]
        told = {
            "task": row["task"], "method": row["method"], "things": things, "coherent": coherent,
            "correct": round(coherent * things), "total": things,
            "found": parts["things found"][0], "of_found": parts["coherent of those found"][0],
        }  # fmt: skip
        entropy, chosen = parts["entropy of open styles, bits"]
        found.append(told | ({"entropy": entropy} if chosen else {}))
    return table("art_coherence", found)


# ---------------------------------------------------------------------------------------------
# Bars.

# Kinds of bars that are upper limits, and those between two rows.
AT_MOST = {"at_most_s", "at_most_us", "at_most_growth", "loop_over_floor", "padding"}
AT_MOST |= {"compilations", "longest_compile_s"}
RATIOS = {"times_faster", "times_faster_than", "times_faster_an_image", "share_of_token_ratio"}
RATIOS |= {"tile_rate"}


def speed_bars(rows: Rows) -> str:
    """Returns every bar of whole requests with the values measured, one per run.

    Below them it explains where the time goes in rows that miss one.
    """
    lines: list[dict[str, Any]] = []
    for asked in (bars()["speed"], bars()["speed_cpu"]):
        own = [View(row) for row in rows if row["model"] in asked["models"]]
        kinds = {kind: of for kind, of in asked.items() if isinstance(of, dict)}
        lines += _held(kinds, own, _spent, asked["dense_side"])
    return _page("speed_bars", lines)


def attention_bars(rows: Rows) -> str:
    """Returns every bar with the value measured; if missed, with a lower bound for its work."""
    ordered = sorted(map(View, rows), key=lambda row: (row["run"], row["id"]))
    return _page("attention_bars", _held(bars()["attention"], ordered, _roofline))


def _page(name: str, lines: Iterable[dict[str, Any]]) -> str:
    """Returns a table of bars, followed by the explanations for those that are missed."""
    lines = [*lines]
    told = [*dict.fromkeys(sentence for line in lines for sentence in line["told"])]
    return "\n".join([table(name, lines), *([""] if told else []), *told])


def _held(
    asked: Mapping[str, Any], rows: list[View], tell: Callable[[View], str], dense_side: float = 0.0
) -> Iterator[dict[str, Any]]:
    """Yields a line for every bar and each measurement that it applies to.

    Args:
        tell: explains a row of a missed bar.
        dense_side: share of the matmul rate that a dense row has to reach; otherwise ratios to
            it do not count.
    """
    for kind, patterns in asked.items():
        name = kind.replace("_", " ")
        for pattern, wanted in patterns.items():
            asked_for = required(kind, wanted)
            found = [*_measured(rows, kind, pattern)]
            if not found:
                bar = f"{name}: {pattern.replace(' ', ' over ')}"
                yield {"bar": bar, "wanted": asked_for, "held": "not measured", "told": ()}
            for of, value, both in found:
                line = {"bar": f"{name}: {of}", "rows": both[-1]["batch"], "value": value}
                line |= {"wanted": asked_for, "told": ()}
                held = result(kind, value, wanted)
                slow = dense_side and kind == "times_faster"
                slow = slow and both[-1]["loop_share_of_matmul"] < dense_side
                if slow or not held.startswith("met"):
                    line["told"] = [*filter(None, map(tell, both))]
                told = "does not count: the dense side is slow" if slow else held
                yield line | {"held": told}


def _bounds(wanted: Any) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted]


def required(kind: str, wanted: Any) -> str:
    """Returns a bar in words."""
    sign = "<= " if kind in AT_MOST else ">= "
    return sign + ", stretch ".join(f"{x:g}" for x in _bounds(wanted))


def result(kind: str, value: float, wanted: Any) -> str:
    """Returns whether a value meets a bar, and its stretch goal."""
    reached = [value <= x if kind in AT_MOST else value >= x for x in _bounds(wanted)]
    return _verdict(reached[0]) + ", stretch met" * (len(reached) > 1 and all(reached))


def by_hand_table() -> str:
    """Returns what was measured by hand on a GPU, `by_hand` of `bars.toml`, with its bars."""
    lines = []
    for line in bars()["by_hand"]:
        section, kind, name = line["bar"]
        wanted, value = bars()[section][kind][name], line.get("value")
        held = _verdict(False) if value is None else result(kind, float(value), wanted)
        told = {"wanted": required(kind, wanted), "held": held}
        lines.append({"told": "" if value is None else f"{value:g}", **line, **told})
    return table("by_hand", lines)


def measured(rows: Rows, kind: str, pattern: str) -> list[float]:
    """Returns each value that a bar applies to, the newest last."""
    ordered = sorted(map(View, rows), key=lambda row: row["created"])
    return [value for _, value, _ in _measured(ordered, kind, pattern)]


def _measured(rows: list[View], kind: str, pattern: str) -> Iterator[tuple[str, float, list[View]]]:
    """Yields the name, the value and the rows of each measurement that a bar applies to.

    A ratio is between two rows of one run: the pattern names both, or, for attention, only the
    other one, and ours is the kernel in the same case.
    """
    if kind not in RATIOS:
        for row in rows:
            # A program loaded from the cache says nothing about compilation time.
            counts = kind != "longest_compile_s" or row.get("compilations_kept") == 0
            if counts and fnmatch.fnmatchcase(_name(row), pattern):
                suite = f"{row['suite']} " if "split_s" in row else ""
                yield suite + _name(row), float(row[kind]), [row]
        return
    first, _, second = pattern.rpartition(" ")
    for theirs, ours in itertools.product(rows, rows):
        case = ("run",) if first else ("run", "task", "batch")
        is_ours = _name(ours) == first if first else ours["method"] == "kernel"
        same = is_ours and all(ours[part] == theirs[part] for part in case)
        if same and fnmatch.fnmatchcase(_name(theirs), second):
            name = f"{first} over {second}" if first else _name(theirs)
            yield name, View(ours | {"other": theirs})[kind], [ours, theirs]


def _name(row: View) -> str:
    """Returns the name of a row in bars: a request's id, or task and method of attention."""
    if "split_s" in row:
        return row["id"]
    return f"{row['task']}/{row['method']}" if "flops" in row else row["task"]


def _spent(row: View) -> str:
    """Explains where the time of a request goes, and the least time that its loop needs."""
    split = row["split_s"]
    times = ", ".join(f"{name.replace('_', ' ')} {1e3 * split[name]:.1f}" for name in split)
    return (
        f"* {row['model']}, {row['suite']} {row['id']}: {1e3 * row['median_s']:.1f} ms ({times})."
        f" At the rates of this run the loop takes at least {1e3 * row['floor_s']:.1f} ms; it works"
        f" at {100 * row['loop_share_of_matmul']:.0f} % of the rate of a matrix product, and"
        f" {100 * row['padding']:.0f} % of its slots are padding."
    )


def _roofline(row: View) -> str:
    """Explains how long the work of our kernel takes at the best rates measured in this run."""
    if row["method"] != "kernel" or "flops" not in row:
        return ""
    useful, tile = (row["flops"][of] / _matmul_rate(row) * 1e6 for of in ("useful", "tile"))
    moved = row["bytes"]["least"] / row["calibration"]["copy_gbps"] / 1e3
    return (
        f"* {row['task']}, {row['batch']} rows: ours {row['median_s'] * 1e6:.1f} us. At the rate of"
        f" a matrix product {useful:.1f} us for the pairs that see each other, {tile:.1f} us for"
        f" their tiles; {moved:.1f} us to move q, k, v and the results once."
    )


# ---------------------------------------------------------------------------------------------
# Pages.

# Functions for all that is more than one line per row; other tables are `table(name, rows)`.
MADE: dict[str, Callable[[Rows], str]] = {
    "attention_bars": attention_bars,
    "quality": lambda rows: table("quality", _scored(rows)),
    "twins": twins_table,
    "speed_bars": speed_bars,
}


def rows_of(name: str) -> list[dict[str, Any]]:
    """Returns the committed rows for a table."""
    return [row for suite in TABLES[name]["suites"] for row in read_rows(suite)]


def speed_tables(full_size_rows: Rows, rows: Rows) -> str:
    """Returns sparse requests against dense ones: at full size on a CPU, and on accelerators."""
    tables = table("speed", full_size(full_size_rows)), requests_table(rows)
    return "\n\n".join(filter(None, tables))


# Parts of pages, by the name in the line before them.
PARTS: dict[str, Callable[[], str]] = {
    "speed": lambda: speed_tables(read_rows("rehearsal"), rows_of("whole_requests")),
    "scores": lambda: bundled_table(read_rows("quality"), parts=False, name="scores"),
    "bundled": lambda: bundled_table(read_rows("quality"), parts=False),
    "art": lambda: art_table(read_rows("art")),
    "art_coherence": lambda: coherence_table(read_rows("art")),
    "art_scores": lambda: art_table(read_rows("art"), parts=False, name="art_scores"),
}


def renewed(page: str) -> str:
    """Returns a page with its parts written again.

    Raises:
        ValueError: it has none, or one has no end.
    """
    found = [name for name in PARTS if BEGIN.format(name) in page]
    if not found:
        raise ValueError(f"it has no line such as {BEGIN.format('scores')}.")
    for name in found:
        page = markdown.with_part(page, BEGIN.format(name), END, PARTS[name]())
    return page


def main() -> None:
    """Prints every table that has rows, or rewrites those in the given pages."""
    for name in sys.argv[1:]:
        page = pathlib.Path(name)
        try:
            page.write_text(renewed(page.read_text()))
        except (OSError, ValueError) as error:
            sys.exit(f"benchmarks.table: {name}: {error}")
    if not sys.argv[1:]:
        for name, asked in TABLES.items():
            if "title" in asked and (rows := rows_of(name)):
                made = MADE[name](rows) if name in MADE else table(name, rows)
                print(f"## {asked['title']}\n\n{made}\n")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback when `head` closes the pipe
    main()
