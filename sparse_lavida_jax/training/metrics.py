# SPDX-License-Identifier: Apache-2.0
"""What a run reports: a line of JSON every few steps, progress for people, and traces."""

import contextlib
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

PLAIN_SECONDS = 10.0  # between lines of progress where there is no terminal
# What a clock has measured: it differs between two runs that are otherwise the same.
TIMED = ("tokens_per_second", "mfu", "data_wait")


class MetricsFile:
    """JSON lines, one a call, in the order of the steps.

    Args:
        path: appended to; made where there is none.
        resume_at: the step that the run goes on from. Lines of later steps, which will be written
            again, and a last line that was cut off are dropped.
        tensorboard: a folder that gets the numbers too, where tensorboardX is installed.
    """

    def __init__(
        self, path: pathlib.Path, *, resume_at: int = 0, tensorboard: pathlib.Path | None = None
    ):
        self._board: Any = None
        if tensorboard is not None and importlib.util.find_spec("tensorboardX"):
            import tensorboardX  # type: ignore

            # Its files are called after the second they are opened in, which may be the same.
            self._board = tensorboardX.SummaryWriter(
                str(tensorboard), purge_step=resume_at + 1, filename_suffix=f".{resume_at}"
            )
        if path.exists():
            kept = [line for line in read_metrics(path) if line["step"] <= resume_at]
            files.write_text(path, "".join(_line(line) for line in kept))
        self._file = path.open("a")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes numbers (anything `float` takes) and strings; a number without value is null."""
        plain = {k: v if isinstance(v, str) else _number(v) for k, v in values.items()}
        self._file.write(_line({"step": step, **plain}))
        self._file.flush()
        if self._board is not None:
            for name, value in plain.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_metrics(path: pathlib.Path | str) -> list[dict[str, Any]]:
    """Returns the lines of a metrics file; lines that are no JSON object are left out."""
    lines = []
    for text in pathlib.Path(path).read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "step" in line:
            lines.append(line)
    return lines


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"


def _number(value: Any) -> float | int | None:
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


class Meter:
    """How fast a run is, between one line of its metrics and the next.

    Args:
        peak: floating-point operations a second that all devices together could do at most; None
            where that is not known.
    """

    def __init__(self, peak: float | None = None):
        self.peak = peak
        self._began: float | None = None  # after the first step, which is compiled
        self._work, self._waited = Work(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as spent on waiting for data."""
        begin = time.monotonic()
        yield
        self._waited += time.monotonic() - begin

    def count(self, work: Work, times: int = 1) -> None:
        """Counts the work of one step, so many times."""
        self._work = self._work.plus(work, times)

    def values(self) -> dict[str, float]:
        """Returns the numbers since the last call, and begins again.

        tokens_per_second (without padding) and data_wait (a share of the time) are there from the
        second call on, mfu where there is a peak too; loss_fraction is the share of all tokens,
        padding included, that have a loss.
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


class ProgressBar:
    """A bar with the loss and the time left; without a terminal, a line every ten seconds.

    Args:
        title: what is going on, in a word or two.
        total: steps.
        done: steps done before, of a run that resumes.
        seconds: from now, after which the work ends in any case; 0: it does not.
        console: where to; standard error by default.
    """

    def __init__(
        self,
        title: str,
        total: int,
        *,
        done: int = 0,
        seconds: float = 0.0,
        console: rich.console.Console | None = None,
    ):
        self.title, self.total, self.seconds = title, total, seconds
        self._done = done / total  # share of the run
        self._console = console or rich.console.Console(stderr=True)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[text]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=1.0, text="the first step compiles")
        self._began = time.monotonic()
        self._first: tuple[float, int] | None = None  # time and step of the first update
        self._last_line = -math.inf

    def update(self, step: int, **values: float) -> None:
        """Shows the step, the time left and the given numbers."""
        now = time.monotonic()
        self._first = self._first or (now, step)
        shown = [f"step {step}/{self.total}"]
        shown += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in values.items()]
        left = self._seconds_left(now, step)
        if left is not None:
            shown.append(f"{_clock(left)} left")
            elapsed = now - self._began
            share = self._done + (1 - self._done) * elapsed / max(elapsed + left, 1e-9)
            self._bar.update(self._task, completed=share)
        text = ", ".join(shown)
        self._bar.update(self._task, text=text)
        over = now - self._last_line >= PLAIN_SECONDS or step >= self.total
        if self._bar.disable and over:
            self._last_line = now
            self.say(f"{self.title}: {text}")

    def say(self, message: str) -> None:
        """Prints a line, above the bar where there is one."""
        self._bar.console.print(message, highlight=False, soft_wrap=True, markup=False)

    def _seconds_left(self, now: float, step: int) -> float | None:
        """Returns an estimate from the speed since the first update, after the compilation."""
        estimates = []
        if self.seconds:
            estimates.append(max(self.seconds - (now - self._began), 0.0))
        began, before = self._first or (now, step)
        if step > before:
            estimates.append((now - began) * (self.total - step) / (step - before))
        return min(estimates, default=None)

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Reporter:
    """Tells how a run goes, on disk and on the terminal: in the first process alone.

    Args:
        folder: the run directory.
        start: the step that the run goes on from.
        seconds: of training until then.
        peak: as of `Meter`.
    """

    def __init__(
        self,
        settings: config.Config,
        folder: pathlib.Path,
        start: int,
        seconds: float,
        peak: float | None,
    ):
        self.meter = Meter(peak)
        self._file, console = None, None
        if runtime.is_first():
            path, board = folder / "metrics.jsonl", folder / "tensorboard"
            self._file = MetricsFile(path, resume_at=start, tensorboard=board)
        else:
            console = rich.console.Console(quiet=True)
        left = max(settings.train.seconds - seconds, 0.0)
        self._bar = ProgressBar(
            settings.name, settings.train.train_steps, done=start, seconds=left, console=console
        )

    def __enter__(self) -> "Reporter":
        self._bar.__enter__()
        return self

    def __exit__(self, *_) -> None:
        self._bar.__exit__()
        if self._file is not None:
            self._file.close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes a line of metrics."""
        if self._file is not None:
            self._file.write(step, values)

    def say(self, message: str) -> None:
        """Prints a line."""
        self._bar.say(message)

    def log_step(self, step: int, values: dict[str, float]) -> None:
        """Writes and shows the numbers of a step, and the speed since the last one logged."""
        speed = self.meter.values()
        self.write(step, values | speed)
        shown = {name: value for name, value in speed.items() if name in TIMED}
        self._bar.update(step, loss=values["loss"], **shown)


class Profile:
    """Writes a trace of some steps, for xprof or TensorBoard."""

    def __init__(self, folder: pathlib.Path, steps: range):
        self._folder, self._steps, self._is_on = folder, steps, False

    def __enter__(self) -> "Profile":
        return self

    def reach(self, step: int) -> None:
        """Begins before the first of the steps, and ends before the one after the last."""
        if step in self._steps and not self._is_on:
            jax.profiler.start_trace(str(self._folder))
            self._is_on = True
        elif step not in self._steps:
            self.__exit__()

    def __exit__(self, *_) -> None:
        if self._is_on:
            jax.profiler.stop_trace()
            self._is_on = False
