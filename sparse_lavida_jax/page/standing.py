# SPDX-License-Identifier: Apache-2.0
"""How far a request is and how long it still takes, as HTML for the page."""

import html
import time

from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.inference.surprise import Surprise
from sparse_lavida_jax.page import passes
from sparse_lavida_jax.server.batching import Ticket

STAGE_LABELS = {
    "layout": "Laying out",
    "image": "Drawing",
    "revision": "Drawing again",
    "text": "Writing",
    "surprise": "Measuring",
}
MOST_SHARE = 0.97  # of the bar, before it is done
STYLE = """
.standing div {height: 8px; margin-top: 6px; border-radius: 2px;
  background: var(--border-color-primary)}
.standing div div {margin: 0; background: var(--primary-500)}
.standing.warned {padding: 4px 8px; font-weight: 600; border-left: 4px solid;
  color: var(--error-text-color); background: var(--error-background-fill)}
"""


class Pace:
    """How long requests take, learned from those that are done."""

    def __init__(self):
        self._seconds: dict[tuple[str, bool], float] = {}

    def watch(self, ticket: Ticket, outcome: str) -> None:
        """Notes how long a request took (`Service.watchers`)."""
        if outcome == "done":
            self._seconds[ticket.task, ticket.compiles] = ticket.seconds

    def expected(self, ticket: Ticket) -> float | None:
        """Returns how many seconds a request takes in all; None: nobody knows yet.

        One that compiles takes as long as another one that did, of its own task if possible.
        """
        if (known := self._seconds.get((ticket.task, ticket.compiles))) is not None:
            return known
        compiled = (seconds for (_, first), seconds in [*self._seconds.items()] if first)
        return max(compiled, default=None) if ticket.compiles else None


def standing(ticket: Ticket, pace: Pace) -> str:
    """Returns where a request stands: how many are before it, or its step and the time."""
    if ticket.began is None:
        return note(f"Waiting: {ticket.ahead} before this one") + _warning(ticket)
    state, elapsed = ticket.state, time.monotonic() - ticket.began
    expected, share = pace.expected(ticket), 0.0
    said = ["Starting"]
    if state is not None:
        stage = STAGE_LABELS.get(state.stage, state.stage)
        said = [f"{stage}: step {state.steps} of {state.total}"]
        share = state.steps / max(state.total, 1)
    if ticket.compiles:
        said.append("compiling, once for each size and option")
    said.append(f"{elapsed:.0f} s")
    if expected is not None:
        left = expected - elapsed
        said.append(f"about {left:.0f} s left" if left >= 1 else "longer than last time")
        share = elapsed / expected
    elif ticket.compiles:
        said.append("the first time often takes a minute")
    return bar(" · ".join(said), share) + _warning(ticket) + passes.counters(ticket)


def bar(text: str, share: float) -> str:
    """Returns a line of text above a bar.

    Args:
        share: of the bar that is full.
    """
    full = f'<div style="width: {100 * min(share, MOST_SHARE):.0f}%"></div>'
    return f'<div class="standing">{text}<div role="progressbar">{full}</div></div>'


def done(ticket: Ticket, result: Result) -> str:
    """Returns what a finished request took, in time and in tokens."""
    passed, dense = passes.counted(ticket)
    more = f" (a dense model: {dense / passed:.1f} times as many)" if dense > passed else ""
    layout = f", {sum(result.layout_passed):,} for the layout" if any(result.layout_passed) else ""
    said = f"{passed:,} tokens through the network{more}{layout}, seed {result.seeds[0]}"
    return _took(ticket, said) + passes.counters(ticket)


def scored(ticket: Ticket, found: Surprise) -> str:
    """Returns what captions of an image took, and what the image tokenizer changed in it."""
    said = f"{found.tokens_passed:,} tokens through the network, nothing drawn"
    if found.error >= 1:
        said += f"; the image tokenizer changes the image, by {found.error:.1f} (mean squared)"
    return _took(ticket, said)


def _took(ticket: Ticket, said: str) -> str:
    compiled = f" (+ {ticket.compiled:.1f} to compile, once)" if ticket.compiled >= 0.1 else ""
    took = f"{ticket.seconds - ticket.compiled:.2f} seconds{compiled}, {said}"
    return note(took) + _warning(ticket)


def _warning(ticket: Ticket) -> str:
    """Returns lines on what the model does not know of the words; "" if it knows all."""
    found = dict.fromkeys(one.warning for one in ticket.requests if one.warning)
    return "".join(note(f"{one[:1].upper()}{one[1:]}", "warned") for one in found)


def note(text: str, kind: str = "") -> str:
    """Returns a plain line, or a remarkable one if `kind` is "warned"."""
    return f'<div class="standing {kind}">{html.escape(text)}</div>'
