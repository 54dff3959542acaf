# SPDX-License-Identifier: Apache-2.0
r"""A server under load: images per minute, latencies, refusals, batch sizes and memory.

    python -m benchmarks.serving --clients 1 4 16 64
    python -m benchmarks.serving --rate 20 --mix generate:8=9 generate:32=1
    python -m benchmarks.serving --address http://127.0.0.1:8000 --clients 16
    python -m benchmarks.serving --name soak --clients 8 --seconds 1200 \
        --mix generate:any=4 ask=3 broken=2 leave=1

Starts a server, unless it is given the address of one, and puts load on it. With `--rate` requests
are due at the times of a Poisson process that does not wait for answers. Latency is measured from
the time a request was due, so a slow server does not reduce the load. Without `--rate`
each client sends its next request as soon as the last one is answered, or after the `Retry-After`
seconds of a refusal. "broken" requests are damaged bodies and uploads, which must be refused; with
"leave" the client disconnects at a random time. Writes one row per number of clients to
`benchmarks/results/<device>/serving`.
"""

import argparse
import base64
import collections
import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

# Statuses of HTTP that are no failure; 0: no answer.
EXPECTED = {"broken": (400, 413, 429), "leave": (0, 200, 429)}
START_SECONDS, STOP_SECONDS, ANSWER_SECONDS = 1800.0, 60.0, 600.0
WORDS = [
    f"a {first} {shape} {place} a {second} {other}"
    for first, second in itertools.permutations(("red", "blue", "green"), 2)
    for shape, other in itertools.permutations(("circle", "square", "triangle"), 2)
    for place in ("above", "left of")
]

# Of "generate:any": each needs programs that the others do not.
SETTINGS = [
    {"num_inference_steps": steps, "registers": registers, "sampler": sampler}
    for steps in (1, 2, 4, 8, 12)
    for registers in (2, 4)
    for sampler in ("sparse", "pt")
]


@dataclasses.dataclass(frozen=True)
class Load:
    """The load on a server.

    Attributes:
        clients: the largest number of simultaneous requests.
        seconds: duration of the measurement.
        before: seconds of the same load before that, not measured.
        rate: requests per second, as a Poisson process; 0: each client asks again when answered.
        mix: shares of the tasks, "generate", "ask", "broken" and "leave"; "generate:8" is
            "generate" in 8 steps instead of the model's default, "generate:any" has one of
            `SETTINGS`.
        seed: of the arrivals and of the requests' contents.
    """

    clients: int
    seconds: float
    before: float = 0.0
    rate: float = 0.0
    mix: tuple[tuple[str, float], ...] = (("generate", 1.0),)
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Answered:
    """The outcome of a request.

    Attributes:
        due, latency: when it was due, and how much later it was answered, in seconds.
        code: of HTTP; 0: the connection broke.
        batch: rows in its batch, if the server reports it.
    """

    task: str
    due: float
    latency: float
    code: int
    batch: int


# ---------------------------------------------------------------------------------------------
# Load.


def drive(address: str, load: Load) -> list[Answered]:
    """Puts load on a server, and returns the outcomes of the measured requests."""
    lock, arrivals, answers = threading.Lock(), _arrivals(load), list[Answered]()
    begin = time.monotonic()

    def client() -> None:
        while True:
            with lock:
                due, task, body = next(arrivals)
            now = time.monotonic() - begin
            due = due if load.rate else now
            if due >= load.before + load.seconds:
                return
            time.sleep(max(0.0, due - now))
            code, batch, again = _ask(address, task, body)
            late = time.monotonic() - begin - due
            with lock:
                answers.append(Answered(task, due, late, code, batch))
            if not load.rate:
                time.sleep(again)

    threads = [threading.Thread(target=client) for _ in range(load.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answer for answer in answers if answer.due >= load.before]


def _arrivals(load: Load) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """Yields the due time of each request, its task and its body."""
    dice, due = random.Random(load.seed), 0.0
    tasks, shares = zip(*load.mix, strict=True)
    for number in itertools.count():
        due += dice.expovariate(load.rate) if load.rate else 0.0
        (task,), words = dice.choices(tasks, shares), dice.choice(WORDS)
        body: dict[str, Any] = {"seed": number % 2**31}
        name, _, steps = task.partition(":")
        if steps == "any":
            body |= dice.choice(SETTINGS)
        elif steps:
            body["num_inference_steps"] = int(steps)
        if name == "ask":
            body |= {"model": "", "messages": [{"role": "user", "content": f"is there {words}?"}]}
        else:
            body |= {"prompt": words, "response_format": "b64_json"}
        if name == "broken":
            body = _broken(dice, body)
        yield due, task, body


def _broken(dice: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """Returns a body that is to be refused: wrong types, huge numbers, damaged images."""
    image = base64.b64encode(b"\x89PNG\r\n\x1a\n" + dice.randbytes(dice.randint(0, 4096))).decode()
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    return dice.choice(
        (
            {"messages": [{"role": "user", "content": [shown]}]},
            {"messages": dice.choice((None, [], "x", [[]]))},
            body | {dice.choice(("n", "seed", "registers", "guidance_scale")): 1e30},
            body | {"prompt": dice.choice((None, [], 7, "x" * 100_000, "\ud800"))},
            body | {"size": dice.choice(("9" * 5000, "0x0", "-1x4", {}))},
        )
    )


def _ask(address: str, task: str, body: dict[str, Any]) -> tuple[int, int, float]:
    """Returns the HTTP status, the rows of the batch, and the seconds to wait before a retry."""
    path = "chat/completions" if "messages" in body else "images/generations"
    leaves = task == "leave"
    request = urllib.request.Request(
        f"{address}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        patience = random.uniform(0.001, 1.0) if leaves else ANSWER_SECONDS
        with urllib.request.urlopen(request, timeout=patience) as reply:
            return reply.status, json.load(reply).get("sparse_lavida", {}).get("batch", 1), 0.0
    except urllib.error.HTTPError as error:
        return error.code, 0, float(error.headers.get("Retry-After", 0))
    except OSError:
        return 0, 0, 0.0


def summary(answers: list[Answered], load: Load) -> dict[str, Any]:
    """Returns the numbers of a row; latencies are those of answered requests."""
    done = [answer for answer in answers if answer.code == 200]
    until = max((answer.due + answer.latency for answer in done), default=math.inf)
    minutes = (until - load.before) / 60
    images = sum(answer.task != "ask" for answer in done)
    found: dict[str, Any] = {
        "requests": len(answers),
        "answered": len(done),
        "rejected": sum(answer.code == 429 for answer in answers),
        "failed": sum(
            answer.code not in EXPECTED.get(answer.task, (200, 429)) for answer in answers
        ),
        "images_a_minute": images / minutes,
        "texts_a_minute": (len(done) - images) / minutes,
        "batches": dict(sorted(collections.Counter(answer.batch for answer in done).items())),
    }
    for task in sorted({answer.task for answer in done}):
        own = [answer.latency for answer in done if answer.task == task]
        found[f"{task}_s"] = {f"p{share}": percentile(own, share) for share in (50, 95, 99)} | {
            "mean": statistics.fmean(own)
        }
    return found


def percentile(values: list[float], share: int) -> float:
    """Returns the least value that `share` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


# ---------------------------------------------------------------------------------------------
# Servers.


@contextlib.contextmanager
def started(words: list[str]) -> Iterator[tuple[str, int]]:
    """Yields address and process of a server with these options, once it is ready."""
    command = [sys.executable, "-m", "sparse_lavida_jax", "serve", "--port=0", "--warmup", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if (told := re.search(r"http://[^/\s]+", process.stdout.readline())) is None:
            raise RuntimeError("the server did not start: see what it printed above.")
        _wait_until_ready(told.group())
        yield told.group(), process.pid
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_ready(address: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{address}/ready", timeout=ANSWER_SECONDS):
                return
        except OSError:  # refused, or not ready yet
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the server at {address} was not ready after {START_SECONDS:g} seconds.")


def memory(process: int) -> dict[str, float]:
    """Returns the current and peak memory of a process in GB, on Linux; elsewhere nothing."""
    path = pathlib.Path(f"/proc/{process}/status")
    lines = path.read_text().splitlines() if path.is_file() else []
    sizes = dict(line.split(":") for line in lines if line.endswith("kB"))
    names = {"rss_gb": "VmRSS", "peak_rss_gb": "VmHWM"}
    kib = {name: int(sizes[key].split()[0]) for name, key in names.items() if key in sizes}
    return {name: size * 1024 / 1e9 for name, size in kib.items()}


def main() -> None:
    """Measures a server with every number of clients, and writes and prints the rows."""
    asked = _parser().parse_args()
    mix = tuple((task, float(share)) for task, share in (one.split("=") for one in asked.mix))
    how = {"before": asked.before, "rate": asked.rate, "mix": mix}
    kind = asked.name or ("open" if asked.rate else "closed")
    rows: list[tuple[str, dict[str, Any]]] = []

    def measure(name: str, address: str, process: int | None) -> None:
        def size() -> dict[str, float]:
            return {} if process is None else memory(process)

        for clients in asked.clients:
            load, half = Load(clients, asked.seconds, **how), dict[str, float]()
            before, middle = size().get("rss_gb"), load.before + load.seconds / 2
            threading.Timer(middle, lambda half=half: half.update(size())).start()
            found = summary(drive(address, load), load) | size()
            found |= {"rss_before_gb": before, "rss_half_way_gb": half.get("rss_gb")}
            values = {"load": kind, "server": name, **dataclasses.asdict(load), **found}
            rows.append((f"{kind}/{name}/{clients}", values))
            print(kind, name, clients, json.dumps(found), flush=True)

    if asked.address:
        measure("running", asked.address, None)
    else:
        with started([f"--checkpoint={asked.checkpoint}", *asked.option]) as server:
            measure("this", *server)
    # Last, because it occupies the device.
    from benchmarks.measurements import Bench

    bench = Bench("serving")
    for row_id, values in rows:
        bench.write(row_id, values)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.serving", description="Measures servers.")
    add = parser.add_argument
    add("--address", default="", help="of a running server; by default one is started")
    add("--checkpoint", default="scenes", help="model of the server that is started")
    add("--option", action="append", default=[], help="option of that server: --option=--x=1")
    add("--clients", nargs="+", type=int, default=[1, 4, 16, 64], help="numbers of clients")
    add("--seconds", type=float, default=30.0, help="seconds to measure")
    add("--before", type=float, default=5.0, help="seconds of load before measuring")
    add("--rate", type=float, default=0.0, help="requests per second; 0: after each answer")
    add("--name", default="", help="of the rows; by default open, with --rate, or closed")
    add("--mix", nargs="+", default=["generate=1"], help="shares of tasks")
    return parser


if __name__ == "__main__":
    main()
