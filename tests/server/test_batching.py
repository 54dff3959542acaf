# SPDX-License-Identifier: Apache-2.0
"""Requests share a batch, take turns on the device, or compile in the background."""

import itertools
import threading
import time

import pytest
import staged

from sparse_lavida_jax.inference import warmup
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.server import batching
from sparse_lavida_jax.server.batching import Cancelled
from sparse_lavida_jax.server.serving import Limits, Service


@pytest.fixture
def service():
    made = Service(staged.Staged(batch_size=4), Limits(longest_wait=0.0))
    yield made
    made.pipe.run_free()
    made.close()


def running(service, words="first"):
    """A request at its first step, so that others queue behind it."""
    ticket = service.submit("ask", words)
    assert service.pipe.at_step.acquire(timeout=staged.PATIENCE)
    return ticket


def texts(tickets):
    return [ticket.future.result(staged.PATIENCE).text for ticket in tickets]


def test_requests_of_one_kind_that_wait_are_done_together_up_to_the_largest_batch(service):
    first = running(service)
    tickets = [service.submit("ask", words) for words in "abcdef"]
    assert [ticket.ahead for ticket in tickets] == [1, 2, 3, 4, 5, 6]
    service.pipe.run_free()
    assert texts([first, *tickets]) == ["b"] * 7
    assert service.pipe.asked == ["first", "a b c d", "e f"]
    assert [ticket.batch for ticket in tickets] == [4, 4, 4, 4, 2, 2]
    assert service.counts == {("ask", "done"): 7}
    assert service.tokens == {"ask": 49}


def test_requests_of_other_kinds_are_no_company(service):
    first = running(service)
    asked = [("ask", "a", None), ("caption", "b", None), ("ask", "c", 8), ("ask", "d", None)]
    tickets = [service.submit(task, words, max_new_tokens=n) for task, words, n in asked]
    service.pipe.run_free()
    assert texts([first, *tickets]) == ["b"] * 5
    assert sorted(service.pipe.asked) == ["a d", "b", "c", "first"]


def test_tasks_whose_rows_depend_on_each_other_are_done_one_by_one(service):
    first = running(service)
    tickets = [service.submit("reflect", words) for words in "ab"]
    service.pipe.run_free()
    for ticket in tickets:
        assert ticket.future.result(staged.PATIENCE).pixels
    texts([first])
    assert service.pipe.asked == ["first", "a", "b"]


def test_an_error_reaches_who_asked_and_no_other(service):
    first = running(service)
    tickets = [service.submit("ask", words) for words in ("a", "wrong", "c")]
    service.pipe.run_free()
    assert isinstance(tickets[1].future.exception(staged.PATIENCE), RequestError)
    assert texts([first, tickets[0], tickets[2]]) == ["b"] * 3
    assert service.pipe.asked == ["first", "a wrong c", "a", "wrong", "c"]


def test_a_batch_goes_on_while_somebody_waits_for_it(service):
    first = running(service)
    left, stays = service.submit("ask", "left"), service.submit("ask", "stays")
    service.pipe.go.release(3)
    texts([first])
    for _ in range(3):
        assert service.pipe.at_step.acquire(timeout=staged.PATIENCE)  # the last two of "first"
    left.cancel()
    service.pipe.go.release()
    with pytest.raises(Cancelled, match="cancelled after 1 of 3 steps of the text"):
        left.future.result(staged.PATIENCE)
    assert not stays.future.done()
    service.pipe.run_free()
    assert texts([stays]) == ["b"]
    assert service.counts == {("ask", "done"): 2, ("ask", "cancelled"): 1}


def test_a_batch_that_nobody_waits_for_ends_at_the_next_phase(service):
    first = running(service)
    left = [service.submit("ask", words) for words in "ab"]
    service.pipe.go.release(3)
    texts([first])
    for _ in range(3):
        assert service.pipe.at_step.acquire(timeout=staged.PATIENCE)
    for ticket in left:
        ticket.cancel()
    service.pipe.go.release()
    for ticket in left:
        assert isinstance(ticket.future.exception(staged.PATIENCE), Cancelled)
    staged.until(lambda: not service.running)
    assert service.pipe.together == 0


def test_who_asks_again_at_once_is_waited_for():
    service = Service(staged.Staged(batch_size=4), Limits())
    service.pipe.run_free()
    for words in "ab":  # one after another: no other is expected
        ticket = service.submit("ask", words)
        texts([ticket])
    staged.until(lambda: not service._batcher._busy)
    service._batcher._expected[ticket.kind] = 2, float(staged.PATIENCE)
    second = service.submit("ask", "c")
    time.sleep(0.05)
    assert second.began is None  # the device is free, and another one is expected
    third = service.submit("ask", "d")
    assert texts([second, third]) == ["b", "b"]
    assert service.pipe.asked == ["a", "b", "c d"]
    service.close()


# ---------------------------------------------------------------------------------------------
# Turns.


class Stepping(staged.Staged):
    """Takes as many steps as its words say, as in "heavy 6", and records them; others may join."""

    def __init__(self):
        super().__init__(batch_size=4)
        self.steps, self.at = [], {}

    def run(self, requests, callback, *, programs, **_):
        name, total = requests[0].words.split()
        with programs(name.startswith("new") and name):
            for step in range(int(total)):
                callback(staged.after("text", step, len(requests), int(total)))
                self.steps.append(name)
                self.at.get((name, step), lambda: None)()
        number = len(requests)
        settings = self.settings.sampling, self.source
        said = {"texts": ("b",) * number, "passed": (1,) * number}
        return Result("ask", ("",) * number, (0,) * number, *settings, {}, **said)


def test_who_has_compiled_programs_does_not_wait_for_those_of_its_kind_that_have_none(stepping):
    def compiles():
        stepping.pipe.at.clear()
        others = [stepping.submit("ask", f"new_{i} 1") for i in range(8)]  # of the same kind
        warm = stepping.submit("ask", "warm 1")
        assert warm.future.result(staged.PATIENCE).text == "b"
        assert [other.future.result(staged.PATIENCE).text for other in others] == ["b"] * 8

    stepping.pipe.at["new", 0] = compiles
    stepping.submit("ask", "new 1").future.result(staged.PATIENCE)


@pytest.fixture
def stepping():
    made = Service(Stepping(), Limits(longest_wait=0.0))
    made._batcher.known.add(False)
    yield made
    made.close()


def arrives(service, words, kind):
    """Submits a request, and waits until it wants the device."""
    device, before = service._batcher.device, len(service._batcher.device._waiting)
    ticket = service.submit("ask", words, max_new_tokens=kind)
    staged.until(lambda: len(device._waiting) > before)
    return ticket


def test_a_light_request_waits_for_one_phase_of_a_heavy_one(stepping):
    light = []
    stepping.pipe.at["heavy", 1] = lambda: light.append(arrives(stepping, "light 2", 1))
    heavy = stepping.submit("ask", "heavy 5")
    heavy.future.result(staged.PATIENCE)
    light[0].future.result(staged.PATIENCE)
    assert stepping.pipe.steps == ["heavy"] * 2 + ["light"] * 2 + ["heavy"] * 3


def test_a_heavy_request_waits_for_a_light_one_and_gets_a_turn_between_two(stepping):
    later = []
    at = stepping.pipe.at
    at["light", 0] = lambda: later.append(arrives(stepping, "heavy 5", 1))
    at["light", 2] = lambda: later.append(arrives(stepping, "second 2", 2))
    first = stepping.submit("ask", "light 4")
    for ticket in (first, *later):
        ticket.future.result(staged.PATIENCE)
    staged.until(lambda: len(stepping.pipe.steps) == 11)
    assert stepping.pipe.steps == ["light"] * 4 + ["heavy"] + ["second"] * 2 + ["heavy"] * 4


def test_programs_that_never_ran_do_not_keep_others_from_the_device(stepping):
    done = threading.Event()

    def compiles():
        other = stepping.submit("ask", "other 2", max_new_tokens=1)
        other.future.result(staged.PATIENCE)  # it finishes before this one continues
        done.set()

    stepping.pipe.at["new", 0] = compiles
    stepping.submit("ask", "new 2").future.result(staged.PATIENCE)
    assert done.is_set()
    assert stepping.pipe.steps == ["new", "other", "other", "new"]
    assert stepping._batcher.known == {False, "new"}


def test_several_devices_are_kept_by_programs_that_never_ran(stepping):
    held, stepping.pipe.mesh = [], object()
    stepping.pipe.at["new", 0] = lambda: held.append(stepping._batcher.device._user)
    ticket = stepping.submit("ask", "new 2")
    ticket.future.result(staged.PATIENCE)
    assert held[0].tickets == [ticket] and ticket.first > 0


def test_programs_are_dropped_before_there_are_too_many(monkeypatch):
    done, stepping = [], Service(Stepping(), Limits(programs=3))
    monkeypatch.setattr(batching.persistent_jit, "forget", lambda _: done.append("drop"))
    monkeypatch.setattr(batching.runtime, "return_freed_memory", lambda: done.append("return"))
    for name in ("new_a", "new_b", "new_c", "new_d"):
        stepping.submit("ask", f"{name} 1").future.result(staged.PATIENCE)
    # What compiling leaves is returned as well.
    assert done == ["return"] * 3 + ["drop", "return"] + ["return"]
    assert stepping._batcher.known == {"new_d"}
    stepping.close()


def test_programs_of_the_warm_up_leave_room_for_others(monkeypatch):
    dropped, stepping = [], Service(Stepping(), Limits(programs=2))
    monkeypatch.setattr(batching.persistent_jit, "in_memory", lambda: {"rehearsed"})
    monkeypatch.setattr(batching.persistent_jit, "forget", dropped.append)
    for name in ("new_w", "new_x", "new_y"):
        stepping._batcher.rehearse(stepping.pipe.requests("ask", f"{name} 1"))
    stepping.submit("ask", "new_a 1").future.result(staged.PATIENCE)
    assert dropped == [] and len(stepping._batcher.known) == 4
    for name in ("new_b", "new_c"):
        stepping.submit("ask", f"{name} 1").future.result(staged.PATIENCE)
    assert dropped == [{"rehearsed"}]
    assert stepping._batcher.known == {"new_w", "new_x", "new_y", "new_c"}
    stepping.close()


def test_programs_are_dropped_and_loaded_again_while_others_compile(monkeypatch):
    monkeypatch.setattr(batching.persistent_jit, "forget", lambda _: None)
    stepping = Service(Stepping(), Limits(programs=2, longest_wait=0.0))
    batcher, kinds = stepping._batcher, itertools.count(1)

    def compiles():
        batcher.known |= {1, 2}  # too many
        for name in ("other", "new_a"):
            other = stepping.submit("ask", f"{name} 1", max_new_tokens=next(kinds))
            other.future.result(staged.PATIENCE)  # it finishes before this one continues
        batcher._compiling.acquire()  # nothing else may compile
        assert "new_a" in batcher.kept and not batcher.known.clear()
        other = stepping.submit("ask", "new_a 1", max_new_tokens=next(kinds))
        other.future.result(staged.PATIENCE)
        batcher._compiling.release()

    stepping.pipe.at["new", 0] = compiles
    stepping.submit("ask", "new 1").future.result(2 * staged.PATIENCE)
    assert stepping.pipe.steps == ["new", "other", "new_a", "new_a"]
    stepping.close()


@pytest.fixture
def rehearsed(monkeypatch):
    """Rehearsals without a model."""

    def rehearsals(pipe, task, rows, padding):
        return [warmup.Rehearsal(task, task, "a circle", number, 32) for number in rows]

    monkeypatch.setattr(warmup, "tasks_of", lambda pipe: ["generate", "ask"])
    monkeypatch.setattr(warmup, "rehearsals", lambda *given, steps, registers: rehearsals(*given))


def test_a_service_is_ready_when_every_size_of_batch_has_run(rehearsed):
    service = Service(staged.Staged(batch_size=6))
    warming = service.warm_up()
    assert service.pipe.at_step.acquire(timeout=staged.PATIENCE)
    assert not service.ready
    service.pipe.run_free()
    warming.join(staged.PATIENCE)
    assert service.ready
    assert [asked.count("circle") for asked in service.pipe.asked] == [1, 1, 2, 2, 4, 4, 6, 6]
    assert service.counts == {}
    service.stop()
    assert not service.ready


def test_stopping_ends_the_warm_up_after_a_phase(rehearsed):
    service = Service(staged.Staged(batch_size=6))
    warming = service.warm_up()
    assert service.pipe.at_step.acquire(timeout=staged.PATIENCE)
    service.stop()
    service.pipe.go.release()
    warming.join(staged.PATIENCE)
    assert not warming.is_alive() and not service.ready
    assert service.pipe.asked == ["a circle"]  # of the first rehearsal, which did not go on
    service.close()


def test_closing_ends_the_warm_up(rehearsed):
    service = Service(staged.Staged(batch_size=6))
    warming = service.warm_up()
    assert service.pipe.at_step.acquire(timeout=staged.PATIENCE)
    closing = threading.Thread(target=service.close)
    closing.start()
    staged.until(lambda: service._batcher.stops)
    service.pipe.run_free()
    closing.join(staged.PATIENCE)
    warming.join(staged.PATIENCE)
    assert not warming.is_alive() and not service.ready
    assert service.pipe.together == 0
