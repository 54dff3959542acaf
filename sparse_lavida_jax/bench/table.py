# SPDX-License-Identifier: Apache-2.0
r"""Tables from the committed rows, held against the bars.

    python -m sparse_lavida_jax.bench.table
    python -m sparse_lavida_jax.bench.table README.md    # writes those that stand there

Ratios are formed only between rows of one run.
"""

import fnmatch
import pathlib
import sys
import tomllib
from typing import Any

from sparse_lavida_jax.bench.record import read_rows
from sparse_lavida_jax.data import markdown
from sparse_lavida_jax.evals.scorers import wilson_interval

BARS = pathlib.Path(__file__).with_name("bars.toml")
BEGIN, END = "<!-- written by bench.table README.md -->", "<!-- up to here -->"


def sampling_table(rows: list[dict[str, Any]], *, seconds: bool = False) -> str:
    """Returns how many times faster each preset is than dense, and the tokens that explain it.

    Args:
        seconds: shows times too, and rows without a dense one beside them. For a terminal: a time
            on no GPU means something only where it was taken.
    """
    columns = ("model, task, batch, steps", "preset", "tokens", "times faster than dense", "device")
    lines = []
    dense = {(row["run"], row["task"]): row for row in rows if row["method"] == "dense"}
    for row in sorted(
        rows, key=lambda r: (r["model"], r["task"], r["batch"], r["steps"], -r["median_s"])
    ):
        beside = dense.get((row["run"], row["task"]))
        if beside is None and not seconds:
            continue
        ratio = None if beside is None else f"{beside['median_s'] / row['median_s']:.2f}"
        case = f"{row['model']}, {row['task']}, {row['batch']}, {row['steps']}"
        tokens, device = row["tokens"]["useful"], row["device"]["kind"]
        timed = (f"{row['median_s']:.4f}",) if seconds else ()
        lines.append((case, row["method"], *timed, tokens, ratio, device))
    return markdown.table((*columns[:2], *["seconds"] * seconds, *columns[2:]), lines)


SPEED_SUITES = ("headline", "ablation", "batch", "edit", "reasoning", "quant", "fastpath", "cpu")
# Bars that are not to be exceeded.
AT_MOST = ("at_most_s", "loop_over_floor", "padding", "compilations", "longest_compile_s")


def speed_table(rows: list[dict[str, Any]]) -> str:
    """Returns times of whole requests, what they are spent on and what the loop takes at least."""
    columns = (
        "model", "row", "s", "spread", "host / prefill / loop / VQ, ms", "floor of the loop, ms",
        "tokens", "padding", "device",
    )  # fmt: skip
    lines = []
    for row in sorted(rows, key=lambda r: (r["model"], r["suite"], r["task"], r["median_s"])):
        split, tokens = row["split_s"], row["tokens"]
        parts = (split["host"], split["prefill"], split["loop"])
        parts = (*parts, split["vq_encode"] + split["vq_decode"])
        times = " / ".join(f"{1e3 * part:.1f}" for part in parts)
        equal = f" ({row['steps_timed']} steps timed)" if row["steps_timed"] < row["steps"] else ""
        lines.append((
            row["model"], f"{row['suite']}: {row['id']}", f"{row['median_s']:.4f}{equal}",
            f"{row['min_s']:.4f} to {row['max_s']:.4f}", times, f"{1e3 * row['floor_s']:.1f}",
            f"{tokens['useful']:.0f}", f"{1 - tokens['useful'] / tokens['padded']:.2f}",
            row["device"]["kind"],
        ))  # fmt: skip
    return markdown.table(columns, lines)


def requests_table(rows: list[dict[str, Any]]) -> str:
    """Returns whole requests of images, sparse beside dense, of the models that have bars.

    A processor is told by its ratios alone; the model for processors, only while the other was
    measured nowhere. Without a row of another device there are no columns of seconds.
    """
    bars = tomllib.loads(BARS.read_text())
    seconds = ("sparse, s", "dense, s", "as released, s")
    lines = []
    for models in (bars["speed"]["models"], bars["speed_cpu"]["models"]):
        own = [
            r for r in rows if r["model"] in models and r["suite"] in ("headline", "edit", "cpu")
        ]
        for row in sorted(own, key=lambda r: (r["model"], r["id"], r["run"])):
            lean = _beside(own, row, "dense_lean")
            if row["method"] != "sparse" or row.get("variant") or lean is None:
                continue
            released = _beside(own, row, "dense_released")
            times = [_seconds(one) for one in (row, lean, released)]
            ratio = f"{lean['median_s'] / row['median_s']:.1f}"
            request = f"{row['model']}, {row['task']}"
            lines.append((request, times, (ratio, _device(row), _measured(row))))
        if lines:
            break
    if not any(any(times) for _, times, _ in lines):
        seconds, lines = (), [(request, (), rest) for request, _, rest in lines]
    columns = ("model, request", *seconds, "dense / sparse", "device", "measured")
    return markdown.table(columns, [(request, *times, *rest) for request, times, rest in lines])


def _seconds(row: dict[str, Any] | None) -> str | None:
    return None if row is None or row["device"]["kind"] == "cpu" else f"{row['median_s']:.2f}"


def _device(row: dict[str, Any]) -> str:
    return f"{row['device']['kind']}, {row['device']['host_cores']} cores"


def _measured(row: dict[str, Any]) -> str:
    """When a row was measured and of which commit; not of the commit alone if that was changed."""
    return f"{row['created'][:10]}, {row['commit']}{' and changes' if row['dirty'] else ''}"


def fastpath_table(rows: list[dict[str, Any]]) -> str:
    """Returns what each change of the fast path is worth: the request without it, and with all."""
    columns = ("model, request", "change", "s without", "s with", "times", "device")
    full = {(row["run"], row["model"], row["task"]): row for row in rows if row["method"] == "full"}
    lines = []
    for row in sorted(rows, key=lambda r: (r["model"], r["task"], r["method"])):
        other = full.get((row["run"], row["model"], row["task"]))
        if other is None or row is other:
            continue
        before, after = row["median_s"], other["median_s"]
        lines.append((
            f"{row['model']}, {row['task']}", row["method"].removeprefix("without_"),
            f"{before:.4f}", f"{after:.4f}", f"{before / after:.2f}", row["device"]["kind"],
        ))  # fmt: skip
    return markdown.table(columns, lines)


def quantized_table(rows: list[dict[str, Any]]) -> str:
    """Returns how far 8 bits move logits, and how many modes stay, in the worst step and over all.

    Ratios are to the largest logit.
    """
    columns = ["model", "row", "steps", "largest difference", "mean difference", "modes that stay",
               "in the worst step"]  # fmt: skip
    lines = []
    for row in sorted((r for r in rows if "logits" in r), key=lambda r: (r["model"], r["id"])):
        moved = row["logits"]
        largest, mean = (
            100 * moved[f"{which}_difference"] / moved["largest"] for which in ("largest", "mean")
        )
        by_step = moved["by_step"]["argmax_agreement"]
        lines.append((
            row["model"], row["id"], len(by_step), f"{largest:.1f} %", f"{mean:.2f} %",
            f"{100 * moved['argmax_agreement']:.1f} %", f"{100 * min(by_step):.1f} %",
        ))  # fmt: skip
    return markdown.table(columns, lines)


def speed_bars(rows: list[dict[str, Any]]) -> str:
    """Returns every bar of whole requests beside what was measured, in each run that did.

    Below them, of rows that miss one, what their time goes to.
    """
    lines, missed = [], []
    bars = tomllib.loads(BARS.read_text())
    for section in ("speed", "speed_cpu"):
        own = [row for row in rows if row["model"] in bars[section]["models"]]
        for kind, wanted in bars[section].items():
            if not isinstance(wanted, dict):
                continue
            at_most = kind in AT_MOST
            for pattern, asked in wanted.items():
                bar, *stretch = asked if isinstance(asked, list) else [asked]
                bound = f"{'<=' if at_most else '>='} {bar:g}"
                bound += "".join(f", stretch {value:g}" for value in stretch)
                found = _speeds(kind, own, pattern, bars[section]["dense_side"])
                name = f"{kind.replace('_', ' ')}: {pattern.replace(' ', ' over ')}"
                if not found:
                    lines.append((name, bound, None, "not measured"))
                for row_id, value, counts, of in found:
                    reached = [value <= x if at_most else value >= x for x in (bar, *stretch)]
                    told = "met" if reached[0] else "not met"
                    told += ", stretch met" * (stretch != [] and all(reached))
                    told = told if counts else "does not count: the dense side is slow"
                    name = f"{kind.replace('_', ' ')}: {row_id}"
                    lines.append((name, bound, f"{value:.3g}", told))
                    if not (reached[0] and counts):
                        missed += map(_spent, of)
    bars = markdown.table(("bar", "wanted", "measured", "held"), lines)
    return "\n".join([bars, *([""] if missed else []), *dict.fromkeys(missed)])


def _spent(row: dict[str, Any]) -> str:
    """Returns what the time of a request goes to, and what its loop takes at least."""
    split, tokens = row["split_s"], row["tokens"]
    times = ", ".join(f"{name.replace('_', ' ')} {1e3 * split[name]:.1f}" for name in split)
    padding = 1 - tokens["useful"] / tokens["padded"]
    return (
        f"* {row['model']}, {row['suite']} {row['id']}: {1e3 * row['median_s']:.1f} ms ({times})."
        f" At the rates of this run the loop takes at least {1e3 * row['floor_s']:.1f} ms; it works"
        f" at {100 * _share_of_matmul(row):.0f} % of the rate of a matrix product, and"
        f" {100 * padding:.0f} % of its slots are padding."
    )


def _speeds(
    kind: str, rows: list[dict[str, Any]], pattern: str, dense_side: float
) -> list[tuple[str, float, bool, tuple[dict[str, Any], ...]]]:
    """Returns (id, value, whether it counts, rows) of what a bar of this kind finds."""
    if " " in pattern:
        first, second = pattern.split()
        pairs = [
            (ours, theirs)
            for ours in rows if ours["id"] == first
            for theirs in rows if theirs["id"] == second and theirs["run"] == ours["run"]
        ]  # fmt: skip
        return [
            (
                f"{first} over {second}",
                _ratio(kind, ours, theirs),
                kind != "times_faster" or _share_of_matmul(theirs) >= dense_side,
                (ours, theirs),
            )
            for ours, theirs in pairs
        ]
    value = {
        "at_most_s": lambda row: row["median_s"],
        "loop_over_floor": lambda row: row["split_s"]["loop"] / row["floor_s"],
        "loop_share_of_matmul": _share_of_matmul,
        "images_a_minute": lambda row: 60 * row["batch"] / row["median_s"],
        "padding": lambda row: 1 - row["tokens"]["useful"] / row["tokens"]["padded"],
        "compilations": lambda row: row["compilations_timed"],
        "longest_compile_s": lambda row: row["longest_compile_s"],
    }[kind]
    found = [row for row in rows if fnmatch.fnmatchcase(row["id"], pattern)]
    if kind == "longest_compile_s":
        found = [row for row in found if row.get("compilations_kept") == 0]
    return [(f"{row['suite']} {row['id']}", float(value(row)), True, (row,)) for row in found]


def _ratio(kind: str, ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    faster = theirs["median_s"] / ours["median_s"]
    if kind == "times_faster_an_image":
        return faster * ours["batch"] / theirs["batch"]
    if kind == "share_of_token_ratio":
        return faster / (theirs["tokens"]["useful"] / ours["tokens"]["useful"])
    return faster


def _share_of_matmul(row: dict[str, Any]) -> float:
    """The rate of the loop over that of a matrix product of the same run."""
    fastest = max(row["calibration"]["matmul_tflops"].values()) * 1e12
    return row["loop_flops"] / row["split_s"]["loop"] / fastest


def attention_table(rows: list[dict[str, Any]]) -> str:
    """Returns times, rates on useful pairs and on tiles, and how many times as slow others are."""
    columns = (
        "shape", "rows", "method", "us", "times ours", "useful TF/s", "tile TF/s", "device",
    )  # fmt: skip
    lines = []
    timed = [row for row in rows if "flops" in row]
    for row in sorted(timed, key=lambda r: (r["run"], r["task"], r["batch"], r["median_s"])):
        kernel = _beside(rows, row, "kernel")
        ratio = f"{row['median_s'] / kernel['median_s']:.2f}" if kernel else ""
        useful, tile = (f"{_rate(row, of):.0f}" for of in ("useful", "tile"))
        tile = tile if row is kernel else ""  # the others compute all of them
        lines.append((
            row["task"], row["batch"], row["method"], f"{row['median_s'] * 1e6:.1f}", ratio, useful,
            tile, row["device"]["kind"],
        ))  # fmt: skip
    return markdown.table(columns, lines)


def attention_bars(rows: list[dict[str, Any]]) -> str:
    """Returns every bar beside what was measured; a missed one with the floor of its work."""
    lines, missed = [], []
    for kind, bars in tomllib.loads(BARS.read_text())["attention"].items():
        for pattern, bar in bars.items():
            found = [(row, _value(kind, rows, row)) for row in rows if _is_of(row, pattern)]
            found = [(row, value) for row, value in found if value is not None]
            wanted = f"{'<=' if kind.startswith('at_most') else '>='} {bar:g}"
            name = f"{kind.replace('_', ' ')}: {pattern}"
            if not found:
                lines.append((name, None, wanted, None, "not measured"))
            for row, value in sorted(found, key=lambda pair: (pair[0]["run"], pair[0]["id"])):
                held = value <= bar if kind.startswith("at_most") else value >= bar
                name = f"{kind.replace('_', ' ')}: {_full_name(row)}"
                told = "met" if held else "not met"
                lines.append((name, row["batch"], wanted, f"{value:.3g}", told))
                kernel = _beside(rows, row, "kernel")
                if not held and kernel is not None and "flops" in kernel:
                    missed.append(_roofline(kernel))
    bars = markdown.table(("bar", "rows", "wanted", "measured", "held"), lines)
    return "\n".join([bars, *([""] if missed else []), *dict.fromkeys(missed)])


def _full_name(row: dict[str, Any]) -> str:
    return f"{row['task']}/{row['method']}" if "flops" in row else row["task"]


def _is_of(row: dict[str, Any], pattern: str) -> bool:
    return fnmatch.fnmatchcase(_full_name(row), pattern)


def _value(kind: str, rows: list[dict[str, Any]], row: dict[str, Any]) -> float | None:
    """Returns what a bar of this kind asks of a row; None where ours was not measured beside it."""
    if kind == "at_most_us":
        return row["median_s"] * 1e6
    if kind == "at_most_growth":
        return row["growth"]
    kernel = _beside(rows, row, "kernel")
    if kernel is None:
        return None
    if kind == "tile_rate":
        return _rate(kernel, "tile") / _rate(row, "dense")
    return row["median_s"] / kernel["median_s"]


def _beside(rows: list[dict[str, Any]], row: dict[str, Any], method: str) -> dict[str, Any] | None:
    """Returns the row of a method on the same case in the same run."""
    same = ("run", "task", "batch")
    return next(
        (
            other
            for other in rows
            if other["method"] == method and all(other[name] == row[name] for name in same)
        ),
        None,
    )


def _rate(row: dict[str, Any], of: str) -> float:
    return row["flops"][of] / row["median_s"] / 1e12


def _roofline(row: dict[str, Any]) -> str:
    """Returns how long the work takes at the rates that this run reached at best.

    And how many programs of the forward kernel there are for a core of the device, one of which a
    core runs at a time: what a last, partly filled turn leaves idle no tile can use.
    """
    reached = row["calibration"]
    fastest = max(reached["matmul_tflops"].values()) * 1e12
    useful, tile = (row["flops"][of] / fastest * 1e6 for of in ("useful", "tile"))
    moved = row["bytes"]["least"] / reached["copy_gbps"] / 1e3
    return (
        f"* {row['task']}, {row['batch']} rows: ours {row['median_s'] * 1e6:.1f} us. At the rate of"
        f" a matrix product {useful:.1f} us for the pairs that see each other, {tile:.1f} us for"
        f" their tiles; {moved:.1f} us to move q, k, v and the results once.{_occupancy(row)}"
    )


def _occupancy(row: dict[str, Any]) -> str:
    programs, cores = row["programs"], row["device"].get("cores")
    if not cores:
        return ""
    turns = -(-programs // cores)
    return (
        f" {programs} programs forward on {cores} cores:"
        f" {100 * programs / (turns * cores):.0f} % of {turns} turns, were they all alike."
    )


def training_table(rows: list[dict[str, Any]]) -> str:
    """Returns what each way to train gives for its time and work, as ratios to masked diffusion."""
    columns = (
        "model, rows", "way to train", "attention", "loss tokens of a step", "of its tokens",
        "loss tokens a second", "a TFLOP", "std / mean of the loss", "device",
    )  # fmt: skip
    lines = []
    timed = [row for row in rows if "times_s" in row]
    for row in sorted(timed, key=lambda r: (r["model"], r["batch"], r["run"], r["method"])):
        other = _beside(timed, row, "vanilla")
        if other is None:
            continue
        tokens = row["tokens"]
        second, work = (
            _loss_tokens(row, per) / _loss_tokens(other, per) for per in ("median_s", "computed")
        )
        loss = row["loss"]
        spread = "" if loss is None else f"{loss['std'] / loss['mean']:.3f}"
        lines.append((
            f"{row['model']}, {row['batch']}", row["method"], row["attention"],
            f"{tokens['loss']:.0f}", f"{100 * tokens['loss'] / tokens['padded']:.0f} %",
            f"{second:.2f} x", f"{work:.2f} x", spread, row["device"]["kind"],
        ))  # fmt: skip
    return markdown.table(columns, lines)


def _loss_tokens(row: dict[str, Any], per: str) -> float:
    return row["tokens"]["loss"] / (row["flops"][per] if per == "computed" else row[per])


def head_table(rows: list[dict[str, Any]]) -> str:
    """Returns the memory of the loss over a vocabulary, in chunks and plain."""
    columns = (
        "tokens", "loss", "temporaries, MB", "gradients, MB", "plain / this", "compiled for",
    )  # fmt: skip
    lines = []
    found = [row for row in rows if row["task"].startswith("cross_entropy/")]
    order = ("device", "task", "method")
    for row in sorted(found, key=lambda r: [(len(str(r[n])), str(r[n])) for n in order]):
        plain = _beside(found, row, "plain")
        if plain is None:
            continue
        own, theirs = row["bytes"], plain["bytes"]
        lines.append((
            row["task"].split("/")[1], row["method"], f"{own['temporaries'] / 1e6:.0f}",
            f"{own['results'] / 1e6:.0f}", f"{theirs['temporaries'] / own['temporaries']:.2f}",
            row["device"]["kind"],
        ))  # fmt: skip
    return markdown.table(columns, lines)


def aot_table(rows: list[dict[str, Any]]) -> str:
    """Returns what a chip holds and is sent, of programs compiled for chips that are not there."""
    columns = (
        "program", "chips, mesh", "rows", "GB a chip", "of", "exchanged, GB a chip", "formula",
        "compiled in",
    )  # fmt: skip
    lines = []
    for row in _in_order(rows):
        mesh = " ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
        sent = sum(row["exchanged_bytes"].values()) / 1e9
        formula = row.get("expected_bytes")
        told = f"{formula['total'] / 1e9:.1f}" if formula else ""
        lines.append((
            f"{row['task']}, {row['method']}", f"{row['device']['topology']}, {mesh}",
            row["batch"], f"{row['bytes']['total'] / 1e9:.1f}",
            f"{row['device']['memory_bytes'] / 1e9:.0f}", f"{sent:.1f}", told,
            f"{row['compile_s']:.0f} s",
        ))  # fmt: skip
    return markdown.table(columns, lines)


def aot_times_table(rows: list[dict[str, Any]]) -> str:
    """Returns projected seconds of a call; nothing in it was measured."""
    columns = (
        "program", "chips", "compute, s", "attention, s", "exchange, s", "projected step, s",
        "projected MFU",
    )  # fmt: skip
    lines = []
    for row in _in_order([row for row in rows if "projected" in row]):
        told = row["projected"]
        mfu = ""
        if row["flops"]["useful"]:
            mfu = f"{100 * told['mfu_apart']:.0f} to {100 * told['mfu_overlapped']:.0f} %"
        lines.append((
            f"{row['task']}, {row['method']}", row["device"]["topology"],
            f"{told['compute_s']:.3f}", f"{told['attention_s']:.3f}", f"{told['exchange_s']:.3f}",
            f"{told['overlapped_s']:.3f} to {told['apart_s']:.3f}", mfu,
        ))  # fmt: skip
    return markdown.table(columns, lines)


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda r: (r["task"], r["device"]["topology"], r["method"]))


def quality_table(rows: list[dict[str, Any]]) -> str:
    """Returns the share right of every task with its interval, beside the bar if there is one."""
    bars = tomllib.loads(BARS.read_text())["quality"]
    lines = []
    for row in sorted(rows, key=lambda r: (r["model"], r["method"], r["task"])):
        shares = [(row["task"], row["share"], row["interval_95"], row["total"])]
        shares += [
            (f"{row['task']}: {column}", right / total, wilson_interval(right, total), total)
            for column, (right, total) in sorted(row["columns"].items())
        ]
        for name, share, interval, total in shares:
            bar = bars.get(name)
            held = "" if bar is None else f"{bar:.2f} {'met' if share >= bar else 'not met'}"
            spread = f"{interval[0]:.3f} to {interval[1]:.3f}"
            lines.append((row["model"], row["method"], name, f"{share:.3f}", spread, total, held))
    return markdown.table(("model", "method", "task", "share", "95 % interval", "of", "bar"), lines)


def twins_table(rows: list[dict[str, Any]]) -> str:
    """Returns the sparse model against its dense twin: same size, data, steps and seed."""
    twins = tomllib.loads(BARS.read_text())["twins"]
    rows = _trained_alike(rows)
    shares = {(row["model"], row["method"], row["task"]): row["share"] for row in rows}
    lines = []
    for model, method, task in sorted(shares):
        other = (twins["dense"], "dense", task)
        if (model, method) != (twins["sparse"], "sparse") or other not in shares:
            continue
        difference = shares[model, method, task] - shares[other]
        held = "met" if difference >= -twins["within"] else "not met"
        both = (f"{shares[model, method, task]:.3f}", f"{shares[other]:.3f}")
        lines.append((task, *both, f"{difference:+.3f}", f"-{twins['within']:.2f} {held}"))
    return markdown.table(("task", "sparse", "dense", "sparse - dense", "bar"), lines)


def bundled_table(rows: list[dict[str, Any]]) -> str:
    """Returns what the bundled model gets right beside its dense twin, of all that has a bar."""
    bars = tomllib.loads(BARS.read_text())
    twins, shares = bars["twins"], {}
    for row in _trained_alike(rows):
        of = (row["model"], row["method"], row["task"])
        shares[of] = (row["correct"], row["total"])
        shares |= {(*of[:2], f"{of[2]}: {name}"): pair for name, pair in row["columns"].items()}
    lines = []
    for task, bar in bars["quality"].items():
        both = ((twins["sparse"], "sparse", task), (twins["dense"], "dense", task))
        told = [None if of not in shares else _with_interval(*shares[of]) for of in both]
        correct, total = shares.get(both[0], (0, 1))
        held = "met" if correct / total >= bar else "not met"
        lines.append((task, *told, f"{bar:.2f} {held}"))
    return markdown.table(("task", "sparse", "dense", "bar"), lines)


def _trained_alike(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows without those of a dense twin of other steps of training."""
    twins = tomllib.loads(BARS.read_text())["twins"]
    steps = {row["train_steps"] for row in rows if row["model"] == twins["sparse"]}
    return [row for row in rows if row["model"] != twins["dense"] or row["train_steps"] in steps]


def _with_interval(correct: int, total: int) -> str:
    low, high = wilson_interval(correct, total)
    return f"{correct / total:.3f} ({low:.3f} to {high:.3f})"


def readme_tables() -> str:
    """Returns the tables of README.md: quality and speed of the bundled model, whole requests.

    Speed of the bundled model when it draws, at the largest batch that was measured.
    """
    whole = requests_table([row for suite in SPEED_SUITES for row in read_rows(suite)])
    speed = read_rows("sampling")
    most = max((row["batch"] for row in speed), default=0)
    speed = [row for row in speed if row["batch"] == most and row["task"] == "draw"]
    return f"{bundled_table(read_rows('quality'))}\n\n{sampling_table(speed)}\n\n{whole}"


def main() -> None:
    """Prints every table there are rows for, or writes those of the page that is named."""
    for name in sys.argv[1:]:
        page = pathlib.Path(name)
        try:
            page.write_text(markdown.with_part(page.read_text(), BEGIN, END, readme_tables()))
        except (OSError, ValueError) as error:
            sys.exit(f"bench.table: {name}: {error}")
    if not sys.argv[1:]:
        _print_all()


def _print_all() -> None:
    tables = {
        "Speed": ("sampling", sampling_table),
        "Attention": ("attention", attention_table),
        "Attention, held against its bars": ("attention", attention_bars),
        "Ways to train": ("training", training_table),
        "Memory of the loss over 127,378 words": ("training", head_table),
        "Compiled for TPUs that are not there": ("aot", aot_table),
        "Projected, not measured": ("aot", aot_times_table),
        "The fast path, each change taken back": ("fastpath", fastpath_table),
        "Quality": ("quality", quality_table),
        "Sparse against dense, each trained its own way": ("quality", twins_table),
    }
    for title, (suite, table) in tables.items():
        if rows := read_rows(suite):
            print(f"## {title}\n\n{table(rows)}\n")
    if rows := [row for suite in SPEED_SUITES for row in read_rows(suite)]:
        print(f"## Whole requests\n\n{speed_table(rows)}\n")
        print(f"## Logits in 8 bits\n\n{quantized_table(rows)}\n")
        print(f"## Whole requests, held against their bars\n\n{speed_bars(rows)}\n")


if __name__ == "__main__":
    main()
