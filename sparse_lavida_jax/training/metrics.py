# SPDX-License-Identifier: Apache-2.0
"""What a run reports: a line of JSON every few steps, progress on the terminal, and traces."""

import contextlib
import datetime
import importlib.util
import json
import math
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import rich.console
import rich.progress

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.data import files
from sparse_lavida_jax.training.flops import Work

PLAIN_SECONDS = 10.0  # between lines of progress without a terminal
SPEED_SECONDS = 3600.0  # over which speed is averaged to estimate the time left
MOST_BYTES = 2**31  # of a metrics file
# Values that depend on the clock: they differ between otherwise identical runs.
TIMED = ("tokens_per_second", "mfu", "data_wait")


def read_metrics(path: pathlib.Path | str) -> list[dict[str, Any]]:
    """Returns the lines of a metrics file, skipping any that are not JSON objects."""
    lines = []
    for text in files.lines(files.read_text(path, MOST_BYTES)):
        with contextlib.suppress(ValueError):
            lines.append(files.parse_json(text))
    return [line for line in lines if isinstance(line, dict) and "step" in line]


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"


def _plain(value: Any) -> float | int | str | None:
    if isinstance(value, int | str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


class Meter:
    """Measures the speed of a run between two lines of its metrics.

    Args:
        peak: floating-point operations per second that all devices together can do at most;
            None if unknown.
    """

    def __init__(self, peak: float | None = None):
        self.peak = peak
        self._began: float | None = None  # after the first step, which is compiled
        self._work, self._waited = Work(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside the block as waiting for data."""
        begin = time.monotonic()
        yield
        self._waited += time.monotonic() - begin

    def count(self, work: Work, times: int = 1) -> None:
        """Adds the work of `times` equal steps."""
        self._work = self._work.plus(work, times)

    def values(self) -> dict[str, float]:
        """Returns the values since the last call, and starts again.

        tokens_per_second (without padding) and data_wait (a share of the time) are present from the
        second call on, mfu only if a peak is known; loss_fraction is the share of tokens, padding
        included, that have a loss.
        """
        now, values, work = time.monotonic(), {}, self._work
        if work.slots:
            values["loss_fraction"] = work.with_loss / work.slots
        if self._began is not None and now > self._began:
            seconds = now - self._began
            values["tokens_per_second"] = work.tokens / seconds
            values["data_wait"] = min(self._waited / seconds, 1.0)
            if self.peak:
                values["mfu"] = work.flops / seconds / self.peak
        self._began, self._work, self._waited = now, Work(), 0.0
        return values


class ProgressBar(rich.progress.Progress):
    """A bar with the loss and the time left; without a terminal, a line every ten seconds.

    Args:
        title: what is being done, in a word or two.
        steps: how many there are.
        console: to write to; stderr by default.
    """

    def __init__(self, title: str, steps: int, *, console: rich.console.Console | None = None):
        console = console or rich.console.Console(stderr=True)
        super().__init__(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[text]}"),
            console=console,
            disable=not console.is_terminal,
            get_time=time.monotonic,
            speed_estimate_period=SPEED_SECONDS,
        )
        self.steps = steps
        self.add_task(title, total=1.0, text="the first step compiles")
        self._last_line = -math.inf

    def __enter__(self) -> "ProgressBar":
        if self.disable:
            (task,) = self.tasks
            self.say(f"{task.description}: {task.fields['text']}")
        return super().__enter__()

    def reach(self, step: int, share: float, **values: float) -> None:
        """Shows the step, the time left and the given numbers.

        Args:
            share: the share of the run that is done.
        """
        (task,) = self.tasks
        self.update(task.id, completed=share)
        shown = [f"step {step}/{self.steps}"]
        shown += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in values.items()]
        if task.time_remaining is not None:
            shown.append(f"{datetime.timedelta(seconds=round(task.time_remaining))} left")
        self.update(task.id, text=", ".join(shown))
        now = time.monotonic()
        if self.disable and (share >= 1 or now - self._last_line >= PLAIN_SECONDS):
            self._last_line = now
            self.say(f"{task.description}: {', '.join(shown)}")

    def say(self, message: str) -> None:
        """Prints a line, above the bar where there is one."""
        self.console.print(message, highlight=False, soft_wrap=True, markup=False)


class Reporter(contextlib.ExitStack):
    """Reports on a run, in `metrics.jsonl` and on the terminal, only in the first process.

    TensorBoard gets the numbers too, if tensorboardX is installed.

    Args:
        folder: the run directory.
        start: the step from which the run continues. Lines of later steps, which will be written
            again, and an incomplete last line are dropped.
        peak: as in `Meter`.
    """

    def __init__(
        self, settings: config.Config, folder: pathlib.Path, start: int, peak: float | None = None
    ):
        super().__init__()
        self.meter = Meter(peak)
        self._file: Any = None
        self._board: Any = None
        console = None if runtime.is_first() else rich.console.Console(quiet=True)
        self.bar = ProgressBar(settings.name, settings.train.train_steps, console=console)
        if runtime.is_first():
            path = folder / "metrics.jsonl"
            if path.exists():
                kept = [line for line in read_metrics(path) if line["step"] <= start]
                files.write_text(path, "".join(map(_line, kept)))
            self._file = self.enter_context(path.open("a"))
            if importlib.util.find_spec("tensorboardX"):
                import tensorboardX  # type: ignore

                # Its files are named after the second they are opened in, which may be the same.
                self._board = tensorboardX.SummaryWriter(
                    str(folder / "tensorboard"), purge_step=start + 1, filename_suffix=f".{start}"
                )
                self.callback(self._board.close)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes a line of numbers (anything `float` takes; null if not finite) and strings."""
        if self._file is None:
            return
        plain = {name: _plain(value) for name, value in values.items()}
        self._file.write(_line({"step": step, **plain}))
        self._file.flush()
        for name, value in plain.items():
            if self._board is not None and isinstance(value, int | float):
                self._board.add_scalar(name, value, step)

    def say(self, message: str) -> None:
        """Prints a line."""
        self.bar.say(message)

    def log_step(self, step: int, share: float, values: dict[str, float]) -> None:
        """Writes and shows the numbers of a step, and the speed since the last logged step.

        Args:
            share: the share of the run that is done.
        """
        speed = self.meter.values()
        self.write(step, values | speed)
        shown = {name: value for name, value in speed.items() if name in TIMED}
        self.bar.reach(step, share, loss=values["loss"], **shown)


class Profile(contextlib.AbstractContextManager):
    """Writes a trace of some steps, for xprof or TensorBoard."""

    def __init__(self, folder: pathlib.Path, steps: range):
        self._folder, self._steps, self._is_on = folder, steps, False

    def reach(self, step: int) -> None:
        """Starts before the first of the steps, and ends after the last."""
        if step in self._steps and not self._is_on:
            jax.profiler.start_trace(str(self._folder))
            self._is_on = True
        elif step not in self._steps:
            self.__exit__()

    def __exit__(self, *_) -> None:
        if self._is_on:
            jax.profiler.stop_trace()
            self._is_on = False
