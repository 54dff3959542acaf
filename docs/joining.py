# SPDX-License-Identifier: Apache-2.0
"""What joining a running batch would gain: a simulation with measured times, for `docs/serving.md`.

python docs/joining.py

Measures how long each segment of an image, without a layout, takes with 1 to 16 rows, and simulates
requests that arrive at random under three rules. As now, a batch is formed when it starts, and runs
to its end. With joining, rows that are at the same segment may go on together at the end of any
segment; new rows first catch up with those under way if all of them fit into one batch, and
otherwise those that are furthest go on. The third rule is a bound: a program that runs rows at
different segments together, at the cost of the slowest. Compilation, other kinds of requests and
HTTP are left out.
"""

import pathlib
import random
import statistics
import time

import numpy as np

from sparse_lavida_jax.bench.serving import WORDS, percentile
from sparse_lavida_jax.data import markdown
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs.folder import keep_programs

PAGE = pathlib.Path(__file__).resolve().parent / "serving.md"
BEGIN, END = "<!-- written by docs/joining.py -->", "<!-- end of docs/joining.py -->"
ROWS = (1, 2, 4, 8, 16)
TIMES = 5  # measured, after one that compiles
LOADS = (0.3, 0.6, 0.9)  # shares of the most images that full batches draw
REQUESTS = 20_000
RULES = {
    "batches": "batches, as now",
    "same segment": "joining rows at the same segment",
    "any segment": "rows at any segments together",
}

# By number of rows: the seconds of each segment, and, at the end, those of decoding all pixels.
Times = dict[int, list[float]]


def joining(pipe: SparseLaViDa) -> str:
    """Returns a table of simulated latencies under all rules."""
    times = measured(pipe)
    print({rows: [round(second, 4) for second in own] for rows, own in times.items()})
    most = max(times) / sum(times[max(times)])
    cells = []
    for share in LOADS:
        for rule, meaning in RULES.items():
            took, rows = simulated(times, share * most, rule)
            cells.append((f"{share:.0%}", meaning, *spread(took), f"{rows:.1f}"))
    columns = ("arriving, of the most that full batches draw", "rule", "p50 (s)", "p99 (s)",
               "rows that run together, mean")  # fmt: skip
    return markdown.table(columns, cells)


def measured(pipe: SparseLaViDa) -> Times:
    """Returns the CPU seconds of images; what comes before the first segment counts as its part."""
    found = {}
    for rows in ROWS:
        tries = []
        for _ in range(1 + TIMES):
            made = pipe.requests("generate", WORDS[:rows], seed=[*range(rows)], plan=False)
            at = [time.process_time()]
            pipe.run(made, lambda _, at=at: at.append(time.process_time()), padding="served")
            tries.append(np.diff([at[0], *at[2:], time.process_time()]))
        found[rows] = np.median(tries[1:], axis=0).tolist()
    return found


def simulated(times: Times, rate: float, rule: str) -> tuple[list[float], float]:
    """Returns the latency of each request, and the mean number of rows of all programs that run.

    Args:
        rate: requests per second.
        rule: a key of `RULES`.
    """
    dice, most = random.Random(0), max(times)
    segments = len(times[most]) - 1
    arrivals = np.cumsum([dice.expovariate(rate) for _ in range(REQUESTS)]).tolist()[::-1]
    now, took, rows = 0.0, [], []
    # The next segment of each request, and when it arrived; in order of arrival.
    waiting: list[tuple[int, float]] = []
    running: list[tuple[int, float]] = []
    while arrivals or waiting or running:
        while arrivals and (arrivals[-1] <= now or not (waiting or running)):
            now = max(now, arrivals[-1])
            waiting.append((0, arrivals.pop()))
        if rule != "batches":
            waiting, running = sorted([*running, *waiting], key=lambda one: one[1]), []
        if not running:
            at = (min if len(waiting) <= most else max)(at for at, _ in waiting)
            fit = [one for one in waiting if one[0] == at or rule == "any segment"]
            running = fit[:most]
            waiting = [one for one in waiting if one not in running]
        padded = next(n for n in sorted(times) if n >= len(running))
        ended = [came for at, came in running if at + 1 == segments]
        now += max(times[padded][at] for at, _ in running)
        now += times[padded][-1] * len(ended) / padded
        rows.append(len(running))
        took += [now - came for came in ended]
        running = [(at + 1, came) for at, came in running if at + 1 < segments]
    return took, statistics.fmean(rows)


def spread(values: list[float]) -> tuple[str, ...]:
    """Returns the median and the 99th percentile."""
    return tuple(f"{percentile(values, share):.3f}" for share in (50, 99))


def main() -> None:
    """Measures, simulates, and writes the table."""
    keep_programs()
    table = joining(SparseLaViDa.from_pretrained("scenes", batch_size=max(ROWS)))
    PAGE.write_text(markdown.with_part(PAGE.read_text(), BEGIN, END, table))


if __name__ == "__main__":
    main()
