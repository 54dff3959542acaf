# SPDX-License-Identifier: Apache-2.0
"""How long requests wait for segments of others, and what joining a running batch would gain.

    python docs/segments.py        # writes two parts of docs/serving.md

Turns: images of `LIGHT` steps are requested at random times while one of `HEAVY` steps is drawn,
in turns with others requested while nothing else is.

Joining: measures how long each segment of an image, without a layout, takes with 1 to 16 rows, and
simulates requests that arrive at random under three rules. As now, a batch is formed when it starts,
and runs to its end. With joining, rows that are at the same segment may go on together at the end
of any segment; new rows first catch up with those under way if all of them fit into one batch, and
otherwise those that are furthest go on. The third rule is a bound: a program that runs rows at
different segments together, at the cost of the slowest. Compilation, other kinds of requests and
HTTP are left out.
"""

import pathlib
import random
import statistics
import time

import numpy as np

from sparse_lavida_jax import runtime
from sparse_lavida_jax.apps.batching import Batch
from sparse_lavida_jax.apps.serving import Limits, Service
from sparse_lavida_jax.bench.serving import WORDS, percentile
from sparse_lavida_jax.data import markdown
from sparse_lavida_jax.pipeline import SparseLaViDa

PAGE = pathlib.Path(__file__).resolve().parent / "serving.md"
LIGHT, HEAVY, PAIRS = 8, 32, 200
ROWS = (1, 2, 4, 8, 16)
TIMES = 5  # measured, after one that compiles
LOADS = (0.3, 0.6, 0.9)  # shares of the most images that full batches draw
REQUESTS = 20_000
RULES = {
    "batches": "batches, as now",
    "same segment": "joining rows at the same segment",
    "any segment": "rows at any segments together",
}

Times = dict[int, list[float]]  # by number of rows: the seconds of each segment


# ---------------------------------------------------------------------------------------------
# Turns.


def turns(pipe: SparseLaViDa) -> str:
    """Returns a table of the latencies of light requests, and of the segments of heavy ones."""
    service, dice, ends = Service(pipe, Limits()), random.Random(0), dict[int, list[float]]()
    look = Batch._look

    def timed_look(batch, state):
        ends.setdefault(id(batch.tickets[0]), []).append(time.monotonic())
        look(batch, state)

    def ask(steps):
        ticket = service.submit("generate", WORDS[0], steps=steps)
        return ticket, lambda: (ticket.future.result(), time.monotonic() - ticket.came)[1]

    for steps in (LIGHT, HEAVY):
        ask(steps)[1]()
    took = statistics.median(ask(HEAVY)[1]() for _ in range(10))
    alone, beside, longest = [], [], []
    Batch._look = timed_look
    for _ in range(PAIRS):
        alone.append(ask(LIGHT)[1]())
        heavy, wait = ask(HEAVY)
        time.sleep(dice.uniform(0.1, 0.8) * took)
        if not heavy.future.done():
            beside.append(ask(LIGHT)[1]())
            wait()
        ask(HEAVY)[1]()  # undisturbed, for its segments
        longest.append(float(np.diff([*ends.values()][-1]).max()))
    Batch._look = look
    service.close()
    bar = 2 * (statistics.median(alone) + statistics.median(longest))
    cells = [
        (f"{LIGHT} steps, alone", len(alone), *spread(alone)),
        (f"{LIGHT} steps, while {HEAVY} steps are drawn", len(beside), *spread(beside)),
        (f"longest segment of {HEAVY} steps", len(longest), *spread(longest)),
        ("bar: 2 x (alone + that segment), of the medians", None, None, f"{bar:.3f}"),
    ]
    return markdown.table(("", "number", "p50 (s)", "p99 (s)"), cells)


def spread(values: list[float]) -> tuple[str, ...]:
    """Returns the median and the 99th percentile."""
    return tuple(f"{percentile(values, share):.3f}" for share in (50, 99))


# ---------------------------------------------------------------------------------------------
# Joining.


def joining(pipe: SparseLaViDa) -> str:
    """Returns a table of simulated latencies under both rules."""
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
    """Returns the CPU seconds of the segments of images; the rest of them in the last one."""
    found = {}
    for rows in ROWS:
        tries = []
        for _ in range(1 + TIMES):
            made = pipe.requests("generate", WORDS[:rows], seed=[*range(rows)], plan=False)
            at = [time.process_time()]
            pipe.run(made, lambda _, at=at: at.append(time.process_time()), padding="served")
            tries.append(np.diff([at[0], *at[2:-1], time.process_time()]))
        found[rows] = np.median(tries[1:], axis=0).tolist()
    return found


def simulated(times: Times, rate: float, rule: str) -> tuple[list[float], float]:
    """Returns the latency of each request, and the mean number of rows of all programs that run.

    Args:
        rate: requests per second.
        rule: a key of `RULES`.
    """
    dice, most = random.Random(0), max(times)
    segments = len(times[most])
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
        now += max(times[padded][at] for at, _ in running)
        rows.append(len(running))
        took += [now - came for at, came in running if at + 1 == segments]
        running = [(at + 1, came) for at, came in running if at + 1 < segments]
    return took, statistics.fmean(rows)


def main() -> None:
    """Measures, and writes both tables."""
    runtime.keep_programs()
    pipe = SparseLaViDa.from_pretrained("scenes", batch_size=max(ROWS))
    for part in (turns, joining):
        begin, end = f"<!-- written by docs/segments.py: {part.__name__} -->", "<!-- up to here -->"
        table = part(pipe)
        print(table, flush=True)
        head, found, rest = PAGE.read_text().partition(begin)
        PAGE.write_text(head + markdown.with_part(found + rest, begin, end, table))


if __name__ == "__main__":
    main()
