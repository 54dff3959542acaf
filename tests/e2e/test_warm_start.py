# SPDX-License-Identifier: Apache-2.0
"""A second process, and a server after its warm-up, trace, lower and compile nothing."""

import base64
import collections
import contextlib
import io
import itertools
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import jax
import pytest
import stand_ins
from PIL import Image

from sparse_lavida_jax.inference import batch_shapes
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs import executables
from sparse_lavida_jax.server.serving import Service

CHECKOUT = pathlib.Path(__file__).parents[2]
PATIENCE = 1800
MOST_LOADING = 5  # programs that loading a model may need, all of them kept by jax's cache
COMPILING = "/jax/core/compile/"  # events of tracing, lowering and compiling
PROGRAM = """
import collections, hashlib, json, sys, time
import jax
import numpy as np
from sparse_lavida_jax import SparseLaViDa
from sparse_lavida_jax.programs import side_by_side
from sparse_lavida_jax.programs.folder import keep_programs

keep_programs(sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
side_by_side.make_ahead(True)
seen = collections.Counter()

def of_durations(name, _, **how):
    if name.startswith("/jax/core/compile/"):
        seen[f"{name.rsplit('/')[-1]} of {how.get('fun_name')}"] += 1

jax.monitoring.register_event_duration_secs_listener(of_durations)
jax.monitoring.register_event_listener(
    lambda name, **_: seen.update([name] if name.startswith("/jax/compilation_cache/") else [])
)
began = time.monotonic()
pipe = SparseLaViDa.from_pretrained("scenes")
told = {"loading": dict(seen), "seconds": {"loading": time.monotonic() - began}}
image = np.full((64, 64, 3), 250, np.uint8)
requests = {
    "draw": lambda: pipe.generate("a red circle above a blue square", seed=3).pixels[0],
    "edit": lambda: pipe.edit(image, "add a red circle", seed=3).pixels[0],
    "ask": lambda: pipe.ask(image, "how many squares are there?", seed=3).tokens[0],
}
for name, run in requests.items():
    seen.clear()
    began = time.monotonic()
    bits = np.ascontiguousarray(run())
    told[name] = dict(seen)
    told["seconds"][name] = time.monotonic() - began
    told["digests"] = {**told.get("digests", {}), name: hashlib.sha256(bits.tobytes()).hexdigest()}
print(json.dumps(told))
"""


def in_a_new_process(folder):
    """Draws, edits and asks on a CPU that stands in for an accelerator; returns what it took."""
    environment = {name: value for name, value in os.environ.items() if "JAX_" not in name}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env={**environment, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE, check=True, timeout=PATIENCE,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_the_second_process_compiles_nothing_and_draws_the_same(tmp_path, record_property):
    tmp_path.chmod(0o700)
    first, second = in_a_new_process(tmp_path), in_a_new_process(tmp_path)
    record_property("seconds", second["seconds"])
    assert any("backend_compile" in name for name in first["draw"])
    assert [second[task] for task in ("draw", "edit", "ask")] == [{}, {}, {}]
    loading = collections.Counter(second["loading"])
    compiled = sum(loading[name] for name in loading if "backend_compile" in name)
    assert compiled <= MOST_LOADING
    assert loading["/jax/compilation_cache/cache_misses"] == 0
    assert second["digests"] == first["digests"]


# ---------------------------------------------------------------------------------------------
# A server.


@contextlib.contextmanager
def events():
    """Yields the names of the compiling that happens meanwhile."""
    found, open_ = [], [True]

    def listen(name, _, **how):
        if open_ and name.startswith(COMPILING):
            found.append((name.removeprefix(COMPILING), how.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        open_.clear()


def png(pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


PNG = png(stand_ins.EMPTY)
LENGTHS = ("a red circle", "a red circle above " * 15)  # 3 and 60 words


def draw(httpx, address, words, *, stream):
    body = {"prompt": words, "stream": stream, "partial_images": 2 * stream}
    return httpx.post(f"{address}/v1/images/generations", json=body, timeout=PATIENCE)


def edit(httpx, address, words, *, stream):
    fields = {"prompt": words, "stream": str(stream).lower()}
    if stream:
        fields["partial_images"] = "2"
    files = {"image": ("a.png", PNG)}
    path = f"{address}/v1/images/edits"
    return httpx.post(path, data=fields, files=files, timeout=PATIENCE)


def ask(httpx, address, words, *, stream, seen=True):
    content = [{"type": "text", "text": words}]
    if seen:
        uri = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
        content.append({"type": "image_url", "image_url": {"url": uri}})
    body = {"messages": [{"role": "user", "content": content}], "stream": stream}
    return httpx.post(f"{address}/v1/chat/completions", json=body, timeout=PATIENCE)


def ask_without_image(*given, stream):
    return ask(*given, stream=stream, seen=False)


def used_by(address, clients):
    """Has so many clients at once draw, edit and ask, with both lengths of words, streamed or not.

    Returns:
        the status codes that they got.
    """
    httpx, codes = pytest.importorskip("httpx2"), []
    kinds = [*itertools.product((draw, edit, ask, ask_without_image), LENGTHS, (False, True))]

    def client(number):
        for i in range(len(kinds)):
            # All do the same first, so that they share a batch, and then different things.
            kind, words, stream = kinds[(i + number * (i % 2)) % len(kinds)]
            reply = kind(httpx, address, words, stream=stream)
            codes.append(reply.status_code)
            assert '"error"' not in reply.text[:200], reply.text[:200]

    threads = [threading.Thread(target=client, args=[i]) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(codes) == clients * len(kinds)
    return set(codes)


def compiles_after_warming_up(pipe, numbers, folder):
    """Returns what clients have compiled after the warm-up, for some numbers of clients at once."""
    pytest.importorskip("fastapi")
    from serving_on_loopback import served

    from sparse_lavida_jax.server import endpoints

    executables.keep_in(folder)
    service = Service(pipe)
    try:
        with (
            served(lambda host, _: endpoints.make_app(service, (host,))) as address,
            events() as seen,
        ):
            began = time.monotonic()
            service.warm_up().join(PATIENCE)
            print(f"warm-up: {time.monotonic() - began:.1f} s")
            assert service.ready and seen
            seen.clear()
            for number in numbers:
                assert used_by(address, number) == {200}
            assert not any(outcome == "failed" for _, outcome in service.counts)
            assert service._batcher.known == service._batcher.warm
            return seen
    finally:
        service.close()


def test_a_server_that_is_ready_compiles_nothing(tmp_path, monkeypatch):
    """One length of prompts, to compile little here; the next test has all."""
    monkeypatch.setattr(batch_shapes, "LENGTHS", (128,))
    folder = stand_ins.model_of_every_task(tmp_path / "tiny")
    pipe = SparseLaViDa.from_pretrained(folder, batch_size=2)
    assert compiles_after_warming_up(pipe, (1, 3), tmp_path / "programs") == []


@pytest.mark.slow
def test_the_bundled_model_compiles_nothing_for_up_to_sixteen_clients(tmp_path):
    pipe = SparseLaViDa.from_pretrained("scenes")
    assert compiles_after_warming_up(pipe, (1, 3, 8, 16), tmp_path / "programs") == []
