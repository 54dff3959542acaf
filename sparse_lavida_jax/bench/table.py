# SPDX-License-Identifier: Apache-2.0
r"""Tables from the committed rows, held against the bars.

    python -m sparse_lavida_jax.bench.table

Ratios are formed only between rows of one run.
"""

import pathlib
import tomllib
from typing import Any

from sparse_lavida_jax.bench.record import read_rows
from sparse_lavida_jax.evals.scenes import wilson_interval

BARS = pathlib.Path(__file__).with_name("bars.toml")


def sampling_table(rows: list[dict[str, Any]]) -> str:
    """Returns how many times faster each preset is than dense, and the tokens that explain it."""
    lines = [
        "| model, task, batch, steps | preset | tokens | times faster than dense | device |",
        "| --- | --- | --- | --- | --- |",
    ]
    dense = {(row["run"], row["task"]): row for row in rows if row["method"] == "dense"}
    for row in sorted(
        rows, key=lambda r: (r["model"], r["task"], r["batch"], r["steps"], -r["median_s"])
    ):
        if (row["run"], row["task"]) not in dense:
            continue
        ratio = dense[row["run"], row["task"]]["median_s"] / row["median_s"]
        lines.append(
            f"| {row['model']}, {row['task']}, {row['batch']}, {row['steps']} | {row['method']}"
            f" | {row['tokens']['useful']} | {ratio:.2f} | {row['device']['kind']} |"
        )
    return "\n".join(lines)


def attention_table(rows: list[dict[str, Any]]) -> str:
    """Returns how many times faster our kernel is than each other method, and tile TF/s."""
    bars = tomllib.loads(BARS.read_text())["attention"]
    lines = [
        "| shape | rows | method | times the kernel's time | kernel, tile TF/s | bar | device |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    kernels = {(r["run"], r["task"], r["batch"]): r for r in rows if r["method"] == "kernel"}
    for row in sorted(rows, key=lambda r: (r["task"], r["batch"], r["method"])):
        kernel = kernels.get((row["run"], row["task"], row["batch"]))
        if kernel is None or row is kernel:
            continue
        ratio = row["median_s"] / kernel["median_s"]
        rate = kernel["flops"]["tile"] / kernel["median_s"] / 1e12
        bar = bars.get(f"{row['task']}/{row['method']}")
        held = "" if bar is None else f"{bar:.2f} {'met' if ratio >= bar else 'not met'}"
        forward_only = f"{rate:.0f}" if row["task"].endswith("/forward") else ""
        lines.append(
            f"| {row['task']} | {row['batch']} | {row['method']} | {ratio:.2f} | {forward_only}"
            f" | {held} | {row['device']['kind']} |"
        )
    return "\n".join(lines)


def quality_table(rows: list[dict[str, Any]]) -> str:
    """Returns the share right of every task with its interval, beside the bar if there is one."""
    bars = tomllib.loads(BARS.read_text())["quality"]
    lines = [
        "| model | method | task | share | 95 % interval | of | bar |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
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
            lines.append(
                f"| {row['model']} | {row['method']} | {name} | {share:.3f} | {spread} | {total}"
                f" | {held} |"
            )
    return "\n".join(lines)


def twins_table(rows: list[dict[str, Any]]) -> str:
    """Returns the sparse model against its dense twin: same size, data, steps and seed."""
    twins = tomllib.loads(BARS.read_text())["twins"]
    shares = {(row["model"], row["method"], row["task"]): row["share"] for row in rows}
    lines = ["| task | sparse | dense | sparse - dense | bar |", "| --- | --- | --- | --- | --- |"]
    for model, method, task in sorted(shares):
        other = (twins["dense"], "dense", task)
        if (model, method) != (twins["sparse"], "sparse") or other not in shares:
            continue
        difference = shares[model, method, task] - shares[other]
        held = "met" if difference >= -twins["within"] else "not met"
        lines.append(
            f"| {task} | {shares[model, method, task]:.3f} | {shares[other]:.3f}"
            f" | {difference:+.3f} | -{twins['within']:.2f} {held} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Prints every table there are rows for."""
    tables = {
        "Speed": ("sampling", sampling_table),
        "Attention": ("attention", attention_table),
        "Quality": ("quality", quality_table),
        "Sparse against dense, each trained its own way": ("quality", twins_table),
    }
    for title, (suite, table) in tables.items():
        if rows := read_rows(suite):
            print(f"## {title}\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
