# SPDX-License-Identifier: Apache-2.0
r"""Writes the tables of `docs/log/2026-11-load.md`, and `docs/serving.png`.

python -m benchmarks.serving --clients 1 4 16 64
python -m benchmarks.serving --rate 20 --clients 1 4 16 64 --mix generate:8=9 generate:32=1
python -m benchmarks.serving --name light --clients 1 --mix generate:8=1
python -m benchmarks.serving --name heavy --clients 1 --mix generate:32=1
python -m benchmarks.serving --name turns --clients 16 --seconds 60 \
    --before 20 --rate 4 --mix generate:8=3 generate:32=1
python docs/serving.py        # needs pip install 'sparse-lavida-jax[plots]'
"""

import pathlib

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks import measurements
from sparse_lavida_jax.data import markdown

HERE = pathlib.Path(__file__).resolve().parent
BEGIN, END = "<!-- written by docs/serving.py -->", "<!-- up to here -->"
LOADS = {"closed": "asks again when answered", "open": "20 requests a second, mixed"}
TURNS_BEGIN, TURNS_END = "<!-- turns, written by docs/serving.py -->", "<!-- end of turns -->"
TURNS = {
    ("light", "generate:8_s"): "8 steps, alone",
    ("heavy", "generate:32_s"): "32 steps, alone",
    ("turns", "generate:8_s"): "8 steps, mixed with 32 steps",
    ("turns", "generate:32_s"): "32 steps, mixed with 8 steps",
}
COLUMNS = ("load", "clients", "images a minute", "p50 / p95 / p99 of an image (s)",
           "refused", "largest batch", "memory (GB)")  # fmt: skip


def table(rows: list[dict]) -> str:
    """Returns the rows of all loads as a table."""
    cells = []
    for row in ordered(rows):
        seconds = row["generate_s"]
        cells.append(
            (
                LOADS[row["load"]],
                row["clients"],
                f"{row['images_a_minute']:.0f}",
                " / ".join(f"{seconds[share]:.2f}" for share in ("p50", "p95", "p99")),
                f"{row['rejected']} of {row['requests']}",
                max(map(int, row["batches"])),
                f"{row['rss_gb']:.1f}",
            )
        )
    return markdown.table(COLUMNS, cells)


def turns(rows: list[dict]) -> str:
    """Returns the latencies of light and heavy requests as a table."""
    by_load = {row["load"]: row for row in rows}
    shares = ("p50", "p95", "p99")
    cells = [
        (meaning, *(f"{by_load[load][name][share]:.3f}" for share in shares))
        for (load, name), meaning in TURNS.items()
    ]
    return markdown.table(("image of", *(f"{share} (s)" for share in shares)), cells)


def ordered(rows: list[dict]) -> list[dict]:
    """Returns the rows that are shown, in the order of the table."""
    shown = [row for row in rows if row["load"] in LOADS and row["server"] == "this"]
    return sorted(shown, key=lambda row: (row["load"], row["clients"]))


def plot(rows: list[dict], path: pathlib.Path) -> None:
    """Draws images per minute and the 95th percentile of latency over the number of clients."""
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    closed = [row for row in ordered(rows) if row["load"] == "closed"]
    clients = [row["clients"] for row in closed]
    axes[0].plot(clients, [row["images_a_minute"] for row in closed], "o-")
    axes[1].plot(clients, [row["generate_s"]["p95"] for row in closed], "o-")
    for axis, title in zip(axes, ("images a minute", "seconds for an image, p95"), strict=True):
        axis.set(xscale="log", ylim=0, xlabel="clients", title=title)
        axis.set_xticks(ticks := sorted({row["clients"] for row in closed}), map(str, ticks))
        axis.minorticks_off()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Writes the tables and the plot."""
    rows, page = measurements.read_rows("serving"), HERE / "log" / "2026-11-load.md"
    text = markdown.with_part(page.read_text(), BEGIN, END, table(rows))
    page.write_text(markdown.with_part(text, TURNS_BEGIN, TURNS_END, turns(rows)))
    plot(rows, HERE / "serving.png")


if __name__ == "__main__":
    main()
