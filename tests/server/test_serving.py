# SPDX-License-Identifier: Apache-2.0
"""A bounded queue, limits, cancelling at the next phase, and stopping."""

import base64
import contextlib
import io
import logging
import os
import re
import socket
import threading
import time

import numpy as np
import pytest
import staged
from PIL import Image

from sparse_lavida_jax.cli import hosting, parser, program, usage_errors
from sparse_lavida_jax.cli.usage_errors import UsageError
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.programs import side_by_side
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.server import log_lines, serving
from sparse_lavida_jax.server.batching import Cancelled, QueueFull, Stopped
from sparse_lavida_jax.server.serving import Limits, Service


@pytest.fixture
def service():
    made = Service(staged.Staged(), Limits(waiting=2, words=20, upload=400, images=2, new_tokens=9))
    yield made
    made.pipe.run_free()
    made.close()


def wait_for_step(service):
    """Waits until the running request is at a step."""
    assert service.pipe.at_step.acquire(timeout=staged.PATIENCE)


def test_requests_run_one_at_a_time_in_their_order(service):
    tickets = [service.submit("ask", name) for name in "abc"]
    wait_for_step(service)
    assert (service.running, service.waiting) == (True, 2)
    assert [ticket.ahead for ticket in tickets] == [0, 1, 2]
    assert [ticket.began is None for ticket in tickets] == [False, True, True]
    service.pipe.run_free()
    assert [ticket.future.result(staged.PATIENCE).text for ticket in tickets] == ["b"] * 3
    assert service.pipe.asked == ["a", "b", "c"]
    assert service.pipe.most_together == 1
    assert (service.running, service.waiting) == (False, 0)
    staged.until(lambda: sum(service.counts.values()) == 3)
    assert dict(service.counts) == {("ask", "done"): 3}
    assert service.tokens == {"ask": 21}


def test_a_full_queue_refuses_and_takes_again(service):
    kept = [service.submit("ask", name) for name in "abc"]
    with pytest.raises(QueueFull, match="2 requests wait already"):
        service.submit("ask", "d")
    kept[2].cancel()
    service.submit("ask", "e")
    service.pipe.run_free()
    assert kept[1].future.result(staged.PATIENCE).text == "b"


def test_cancelling_frees_the_device_at_the_next_phase(service):
    left, after = service.submit("ask", "left"), service.submit("ask", "after")
    wait_for_step(service)
    left.cancel()
    assert not left.future.done()  # a phase is not interrupted
    service.pipe.go.release()
    with pytest.raises(Cancelled, match="cancelled after 1 of 3 steps of the text"):
        left.future.result(staged.PATIENCE)
    wait_for_step(service)
    assert service.pipe.asked == ["left", "after"]
    service.pipe.run_free()
    assert after.future.result(staged.PATIENCE).text == "b"
    staged.until(lambda: sum(service.counts.values()) == 2)
    assert service.counts == {("ask", "cancelled"): 1, ("ask", "done"): 1}


def test_a_request_that_waits_is_cancelled_at_once(service):
    service.submit("ask", "a")
    wait_for_step(service)
    waits = service.submit("ask", "b")
    waits.cancel()
    assert waits.future.cancelled()
    assert repr(waits) == "Ticket(looks=0, began=None, batch=0, seconds=0.0, cancelled=True)"
    assert service.waiting == 0


def test_errors_reach_who_asked_and_no_other(service):
    service.pipe.run_free()
    tickets = [service.submit("ask", words) for words in ("wrong", "broken", "a")]
    assert isinstance(tickets[0].future.exception(staged.PATIENCE), RequestError)
    assert isinstance(tickets[1].future.exception(staged.PATIENCE), ZeroDivisionError)
    assert tickets[2].future.result(staged.PATIENCE).text == "b"
    staged.until(lambda: sum(service.counts.values()) == 3)
    assert {outcome for _, outcome in service.counts} == {"refused", "failed", "done"}


def test_closing_cancels_what_runs_and_what_waits(service):
    tickets = [service.submit("ask", name) for name in "ab"]
    wait_for_step(service)
    closing = threading.Thread(target=service.close)
    closing.start()
    while not tickets[0].cancelled:
        time.sleep(0.01)
    service.pipe.run_free()
    closing.join(staged.PATIENCE)
    assert not closing.is_alive()
    assert isinstance(tickets[0].future.exception(staged.PATIENCE), Cancelled)
    assert tickets[1].future.cancelled()


def test_stopping_turns_away_what_waits_and_lets_what_runs_end(service):
    runs, waits = service.submit("ask", "runs"), service.submit("ask", "waits")
    wait_for_step(service)
    service.stop()
    with pytest.raises(Stopped, match="this server stops"):
        waits.future.result(staged.PATIENCE)
    with pytest.raises(Stopped, match="takes nothing more"):
        service.submit("ask", "late")
    service.pipe.run_free()
    assert runs.future.result(staged.PATIENCE).text == "b"
    staged.until(lambda: sum(service.counts.values()) == 2)
    assert service.counts == {("ask", "refused"): 1, ("ask", "done"): 1}


# ---------------------------------------------------------------------------------------------
# Limits and decoding.


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"words": " "}, "the prompt is empty"),
        ({"words": "a" * 21}, "21 characters: at most 20"),
        ({"words": ["a", "b" * 30]}, "30 characters: at most 20"),
        ({"words": None, "template": "c" * 22}, "22 characters: at most 20"),
        ({"words": "a", "num_images": 3}, "num_images=3 is out of range: 1 to 2"),
        ({"words": "a", "rounds": 0}, "rounds=0 is out of range: 1 to 2"),
        ({"words": "a", "max_new_tokens": 10}, "max_new_tokens=10 is out of range: 1 to 9"),
    ],
)
def test_too_much_is_refused_before_it_waits(service, given, told):
    with pytest.raises(RequestError, match=told):
        service.submit("ask", **given)
    assert service.waiting == 0
    assert not service.running


def png(colour=(9, 8, 7)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), colour).save(file, "PNG")
    return file.getvalue()


def image_of(service, uri):
    return service.image(service.contents_of_uri(uri))


def test_an_image_in_a_data_uri_is_read(service):
    uri = "data:image/png;base64," + base64.b64encode(png()).decode()
    np.testing.assert_array_equal(image_of(service, uri), np.full((3, 4, 3), (9, 8, 7)))


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("https://example.org/a.png", "is not fetched: send the image itself"),
        ("file:///etc/passwd", "is not fetched"),
        ("/etc/passwd", "is not fetched"),
        ("data:text/html;base64,aGk=", "is not fetched"),
        ("data:image/png;base64,@@", "is not base64"),
        ("data:image/png;base64,\u0661", "is not base64"),
        ("data:image/png;base64,aGk=", "the image is not an image that can be read"),
        (f"data:image/png;base64,{'A' * 800}", "has 600 bytes: at most 400"),
    ],
)
def test_other_addresses_and_broken_images_are_refused(service, uri, told):
    with pytest.raises(image_files.ImageError, match=told) as caught:
        image_of(service, uri)
    assert "0x" not in str(caught.value)  # no address of an object


# ---------------------------------------------------------------------------------------------
# The address.


def test_a_port_in_use_is_reported_before_a_model_is_loaded():
    with hosting.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match="another program has it: choose another with --port"):
            hosting.listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port", "told"),
    [
        ("127.0.0.1", 70000, "--port=70000 is out of range: 0 to 65535"),
        ("192.0.2.1", 0, "it is no address of this machine"),
    ],
)
def test_an_address_that_cannot_be_used_is_reported(host, port, told):
    with pytest.raises(UsageError, match=told):
        hosting.listen(host, port)


@pytest.mark.parametrize(
    "option", ["--max-waiting=-1", "--batch-size=0", "--longest-wait=nan", "--programs=0"]
)
def test_options_of_the_queue_have_ranges(option, capsys):
    pytest.importorskip("gradio")
    assert program.main(["sparse-lavida", "demo", option]) == usage_errors.MISTAKE
    assert f"{option} is out of range:" in capsys.readouterr().err


def test_an_unknown_host_is_reported(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UsageError, match="--host=nowhere is not known: Name or service"):
        hosting.listen("nowhere", 0)


def test_a_missing_extra_is_reported_with_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(hosting.importlib.util, "find_spec", lambda name: None)
    assert program.main(["sparse-lavida", "demo"]) == usage_errors.MISTAKE
    said = capsys.readouterr().err
    assert "pip install 'sparse-lavida-jax[demo]'" in said
    assert "(fastapi, uvicorn, python_multipart, prometheus_client, gradio)" in said


def test_only_loopback_is_served_unless_told_otherwise(capsys):
    assert parser.Parser("serve").parse_args([]).host == "127.0.0.1"
    assert hosting._names("127.0.0.1", "localhost") == ("127.0.0.1", "localhost", "localhost")
    assert hosting._names("0.0.0.0", "0.0.0.0") == ()
    hosting._tell("serve", "127.0.0.1", 8)
    printed = capsys.readouterr()
    assert "http://127.0.0.1:8/v1" in printed.out
    assert printed.err == ""
    hosting._tell("demo", "0.0.0.0", 8)
    assert "everybody who reaches this machine can use it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("serve", {}, "needs a key that clients send [(]--api-key, or the variable SPARSE"),
        (
            "demo",
            {"key": "a"},
            "needs a proxy that asks for a password, in front of --host=127.0.0.1, or --insecure",
        ),
    ],
)
def test_other_machines_are_not_let_in_by_accident(name, given, told):
    asked = {"key": "", "insecure": False} | given
    with pytest.raises(UsageError, match=told):
        hosting._check_guarded(name, "0.0.0.0", **asked)
    hosting._check_guarded(name, "0.0.0.0", **asked | {"insecure": True})
    hosting._check_guarded(name, "127.0.0.1", **asked)
    hosting._check_guarded("serve", "0.0.0.0", "a key", insecure=False)


def test_limits_of_the_server_are_those_of_the_service():
    asked = parser.Parser("serve").parse_args([])
    found = asked.max_waiting, asked.longest_wait, asked.programs
    assert (Limits().waiting, Limits().longest_wait, Limits().programs) == found
    assert serving.Limits(waiting=0).waiting == 0


def test_a_warm_up_that_fails_is_logged_and_the_service_becomes_ready(service, monkeypatch, caplog):
    def refused(*_, **__):
        raise RequestError("64 steps are more than there are tokens.")

    monkeypatch.setattr(service.pipe, "requests", refused)
    service.warm_up().join()
    assert service.ready
    assert "warm-up: generate: 64 steps are more" in caplog.messages[0]


# ---------------------------------------------------------------------------------------------
# Strangers.


def test_a_server_warms_up_unless_told_otherwise_and_a_page_on_an_accelerator():
    assert hosting.warms_up("serve", None) and not hosting.warms_up("serve", False)
    assert hosting.warms_up("demo", True) and not hosting.warms_up("demo", None)
    side_by_side.make_ahead(True)
    assert hosting.warms_up("demo", None)


@pytest.mark.parametrize(
    "key", ["\udcff", "sch\xfcssel", "\u0661", " ", " a", "a ", "a\nb", "a\tb", "a\0", "a" * 1001]
)
@pytest.mark.parametrize("given", ["--api-key", hosting.KEY])
def test_a_key_that_cannot_match_is_refused_and_not_repeated(monkeypatch, capsys, key, given):
    monkeypatch.setattr(hosting, "_check_packages", lambda name: None)
    monkeypatch.setattr(hosting, "load", lambda asked: pytest.fail("a model is loaded"))
    if given == hosting.KEY:
        monkeypatch.setattr(os, "environ", {**os.environ, hosting.KEY: key})
    words = [f"--api-key={key}"] if given == "--api-key" else []
    assert program.main(["sparse-lavida", "serve", "--port=0", *words]) == usage_errors.MISTAKE
    told = capsys.readouterr().err
    known = "the key cannot match what clients send: choose one of at most 1000 printable"
    assert known in told or (key == " " and "--api-key: it is empty" in told)
    assert key.strip() not in told or len(key.strip()) < 2


def test_keys_of_printable_characters_are_taken():
    for key in ("", "a", "a key", "~!\"#%&'()*+,-./:;<=>?@[]^_`{|}", "a" * 1000):
        hosting._check_key(key)


@pytest.fixture
def lines():
    """A logger whose lines are kept as a server writes them."""
    logger, handler = logging.Logger("strangers"), logging.StreamHandler(io.StringIO())
    handler.addFilter(log_lines.Brief())
    logger.addHandler(handler)
    yield logger, lambda: handler.stream.getvalue().splitlines()


def test_an_exception_is_a_line_in_the_log(lines):
    logger, written = lines
    try:
        with contextlib.suppress(ImportError):
            hosting.listen("127.0.0.1", -1)
    except UsageError as error:
        error.add_note("POST /a\n\x1b[2J\u202e\udcff" + "b" * 1000)
        logger.exception("it failed\n")
    (line,) = written()
    begins = r"it failed: UsageError at sparse_lavida_jax/cli/hosting.py:\d+, POST /a"
    assert re.match(begins + re.escape(r"\n\x1b[2J\u202e\udcffbbb"), line)
    assert len(line) == log_lines.MOST


def test_repeats_are_counted_and_not_written(lines, monkeypatch):
    logger, written = lines
    now = 0.0
    monkeypatch.setattr(log_lines.time, "monotonic", lambda: now)
    for i in range(10_000):
        logger.warning("from a stranger: %s", i)  # the same place, whatever it says
    logger.warning("another place")
    assert written() == ["from a stranger: 0", "another place"]
    for now in (100.0, 159.0, 161.0):
        logger.warning("at %s", now)
    assert written()[2:] == ["at 100.0", "at 161.0 (1 more like the last)"]
