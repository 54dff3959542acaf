# SPDX-License-Identifier: Apache-2.0
"""A server under attack answers others in time, in bounded memory, without losing a request.

SLOW_TESTS=1 runs it, on loopback; SOAK_SECONDS=600 makes the soak last ten minutes. The figures
are printed, a JSON object for each kind of hostile client (`pytest -s` shows them).
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import threading
import time

import hostile_inputs as hostile
import pytest

WHY = "pip install 'sparse-lavida-jax[serve]' to test the server"
pytest.importorskip("fastapi", reason=WHY)
pytest.importorskip("prometheus_client", reason=WHY)
if "PYTEST_XDIST_WORKER" in os.environ:
    pytest.skip("needs the machine for itself: run it without -n", allow_module_level=True)

SECONDS = 10.0  # of each kind
SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
START_SECONDS = 300.0
MOST_MEMORY = 1.5 * 2**30  # bytes above those at the start
MOST_GROWTH = 200 * 2**20  # from the second quarter of the soak to the last
HONEST = 8
PLAIN = b'{"prompt":"a red circle","seed":3}'
FOLDER = pathlib.Path(hostile.__file__).parent


@dataclasses.dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen
    port: int

    def memory(self) -> int:
        """Returns the bytes of memory that it uses."""
        return int(pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096

    def codes(self, path: str) -> list[int]:
        """Returns the status code of a page; none while the server starts."""
        with contextlib.suppress(OSError):
            return hostile.answers("127.0.0.1", self.port, hostile.request(path))
        return []

    def draw(self) -> float:
        """Draws an image, with two tries more after 429, as OpenAI's client does.

        Returns:
            the seconds of the last try.
        """
        for tries in range(3):
            began = time.monotonic()
            sent = hostile.request(hostile.GENERATIONS, PLAIN)
            reply = hostile.reply("127.0.0.1", self.port, sent, 120)
            if tries == 2 or not reply.startswith(b"HTTP/1.1 429"):
                break
            time.sleep(float(re.search(rb"(?i)retry-after: (\d+)", reply)[1]))  # pyright: ignore
        assert reply.startswith(b"HTTP/1.1 200"), reply[:500]
        return time.monotonic() - began

    @contextlib.contextmanager
    def attacked(self, number: int, seconds: float, *kinds: str):
        """Yields a dictionary of what hostile clients got, which is filled at the end."""
        words = [sys.executable, hostile.__file__, "127.0.0.1", str(self.port), str(seconds)]
        clients = [subprocess.Popen([*words, *kinds], stdout=-1, text=True) for _ in range(number)]
        counts: dict[str, int] = {}
        try:
            yield counts
            for client in clients:
                got = json.loads(client.communicate(timeout=seconds + 2 * hostile.PATIENCE)[0])
                for name, count in got.items():
                    counts[name] = counts.get(name, 0) + count
        finally:
            for client in clients:
                client.kill()
                client.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    words = [sys.executable, "-m", "sparse_lavida_jax", "serve", "--port=0", "--no-warmup"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    with (
        log.open("w") as file,
        subprocess.Popen(
            words, stdout=-1, stderr=file, text=True, env=environment, cwd=FOLDER.parent
        ) as process,
    ):
        assert process.stdout
        try:
            told = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
            assert told, log.read_text()
            found = Server(process, int(told[1]))
            end = time.monotonic() + START_SECONDS
            while found.codes("/ready") != [200]:
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.2)
            yield found
        finally:
            process.terminate()
    assert len(log.read_text().splitlines()) < 10, log.read_text()


def failures(counts: dict[str, int]) -> list[str]:
    """Returns which answers to hostile clients are errors of the server."""
    return [name for name in counts if re.search(r": 5(?!03)\d\d$", name)]


@pytest.fixture(scope="module")
def quiet(server):
    return statistics.median(server.draw() for _ in range(5))


@pytest.mark.slow
@pytest.mark.parametrize("kind", hostile.KINDS)
def test_others_are_answered_while_hostile_clients_are_at_work(server, quiet, kind):
    start, most, seconds = server.memory(), 0, []
    with server.attacked(2, SECONDS, kind) as counts:
        end = time.monotonic() + SECONDS
        watching = threading.Event()

        def watch():
            nonlocal most
            while not watching.wait(0.05):
                most = max(most, server.memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            while time.monotonic() < end:
                seconds.append(server.draw())
        finally:
            watching.set()
            watcher.join()
    row = {"kind": kind, "quiet": round(quiet, 2), "longest": round(max(seconds), 2)}
    row |= {"requests": len(seconds), "MiB more": (most - start) >> 20, "answers": counts}
    print(json.dumps(row))
    assert max(seconds) < 2 * quiet + 1
    assert most - start < MOST_MEMORY
    assert failures(counts) == []


@pytest.mark.slow
def test_no_request_is_lost_in_a_soak_and_memory_does_not_grow(server):
    end, seconds, lost, memory = time.monotonic() + SOAK_SECONDS, [], [], []

    def draw():
        while time.monotonic() < end:
            try:
                seconds.append(server.draw())
            except (AssertionError, OSError) as error:
                lost.append(repr(error))

    with server.attacked(2, SOAK_SECONDS) as counts:
        threads = [threading.Thread(target=draw) for _ in range(HONEST)]
        for thread in threads:
            thread.start()
        while time.monotonic() < end:
            memory.append(server.memory())
            time.sleep(0.25)
        for thread in threads:
            thread.join()
    quarter = len(memory) // 4
    early, late = (
        statistics.median(memory[quarter : 2 * quarter]),
        statistics.median(memory[-quarter:]),
    )
    row = {"soak": SOAK_SECONDS, "answered": len(seconds), "lost": len(lost)}
    row |= {"median": round(statistics.median(seconds), 2), "longest": round(max(seconds), 2)}
    row |= {"MiB early": int(early) >> 20, "MiB late": int(late) >> 20}
    row |= {"MiB most": max(memory) >> 20, "answers": counts}
    print(json.dumps(row))
    assert lost == []
    assert failures(counts) == []
    assert late - early < MOST_GROWTH
