# SPDX-License-Identifier: Apache-2.0
"""A run directory: one experiment, one writer, resumable at any step.

It contains `config.json` (once something is saved, another config is refused), `lock` (held by the
process that writes), `state/<step>/`, `metrics.jsonl`, and at the end `model/`, a model folder
(described in `checkpoints/model_folder.py`). If several processes train together, the first one
writes, and all must have access to the folder.
"""

import contextlib
import pathlib
import shutil
import signal
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

from flax import traverse_util

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.data import files
from sparse_lavida_jax.data.leftovers import is_leftover

# Settings that may differ from those a run was started with: its length, what it reports, and how
# images are sampled. Any other change would make the resumed run another experiment.
MAY_CHANGE = frozenset(
    {
        "train.train_steps", "train.seconds", "train.checkpoint_seconds", "train.image_seconds",
        "train.eval_every", "train.log_every", "train.eval_prompts", "train.keep_states",
        "train.keep_every", "train.model_dtype", "train.model_file_mb", "data.folder",
        "data.workers", "sampling.preset", "sampling.order_seed", "sampling.temperature",
        "sampling.guidance", "sampling.guidance_edit", "sampling.layout", "sampling.guidance_image",
        "sampling.text.temperature",
    }
)  # fmt: skip

MESH = "train.mesh."  # the mesh may change too


class RunError(Exception):
    """A run directory that is in use, belongs to another experiment, or is something else."""


class Interrupted(Exception):
    """A run was stopped by a signal; its state is saved.

    Attributes:
        exit_code: 130 after an interrupt (Ctrl-C); 0 after SIGTERM, which a machine sends when it
            is needed for something else: nothing went wrong.
    """

    def __init__(self, signal_number: int, step: int):
        super().__init__(
            f"stopped by {signal.Signals(signal_number).name} after step {step}, everything is"
            " saved: the same command goes on from there."
        )
        self.exit_code = 0 if signal_number == signal.SIGTERM else 128 + signal_number


class Run:
    """An open run directory: `with Run(folder, settings) as run: ...`.

    While it is open, the first Ctrl-C or SIGTERM only asks the loop to stop at the end of its
    step; a second one ends the process.

    Attributes:
        stop_signal: the number of the signal received; None before that.
    """

    def __init__(self, folder: pathlib.Path | str, settings: config.Config):
        self.folder = pathlib.Path(folder)
        self.config = settings
        self.stop_signal: int | None = None
        self._closing = contextlib.ExitStack()

    @property
    def model_folder(self) -> pathlib.Path:
        """The folder of the finished model."""
        return self.folder / "model"

    @property
    def metrics_path(self) -> pathlib.Path:
        return self.folder / "metrics.jsonl"

    def __enter__(self) -> "Run":
        from sparse_lavida_jax.training import states  # takes a quarter of a second, for orbax

        with contextlib.ExitStack() as undo:
            runtime.check_same(config.to_dict(self.config))
            if (claimed := runtime.first_does(self._claim)) is not None:
                undo.push(claimed)
            self.states = states.States(
                self.folder / "state",
                keep=self.config.train.keep_states,
                keep_every=self.config.train.keep_every,
            )
            undo.callback(self.states.close)
            undo.callback(self._catch_signals())
            self._closing = undo.pop_all()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._closing.__exit__(kind, error, traceback)

    def is_asked_to_stop(self, step: int) -> bool:
        """Whether a signal was received; asked after every step, and the same in all processes."""
        if runtime.is_asked_to_stop(step):
            self.stop_signal = signal.SIGTERM
        return self.stop_signal is not None

    def save_and_stop(self, step: int, state: Any, note: dict[str, Any] | None = None) -> NoReturn:
        """Saves the state and ends the run, after a signal (`is_asked_to_stop`).

        Raises:
            Interrupted: always.
        """
        assert self.stop_signal is not None
        self.states.save(step, state, note=note)
        self.states.wait()
        raise Interrupted(self.stop_signal, step)

    def _claim(self) -> contextlib.ExitStack:
        """Makes this process the folder's owner, until the returned stack is closed."""
        if self.folder.exists() and not self.folder.is_dir():
            raise RunError(f"{self.folder} is a file. Choose another --workdir.")
        if not files.has_text_name(self.folder):
            raise RunError(f"{self.folder} is not text in UTF-8: choose another --workdir.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.folder} cannot be made: {error.strerror}.") from error
        names = {path.name for path in self.folder.iterdir() if not is_leftover(path.name)}
        names -= {"lock"}
        if names and "config.json" not in names:
            raise RunError(
                f"{self.folder} holds files but no config.json, so it is no run directory. Choose"
                " another --workdir."
            )
        with contextlib.ExitStack() as undo:
            undo.callback(lock(self.folder))
            if not names:
                undo.push(self._leave_nothing)
            self._check_config()
            return undo.pop_all()

    def _leave_nothing(self, kind, error, traceback) -> None:
        """After an error, removes a folder that was new or empty and in which nothing was saved."""
        left = {self.folder / name for name in ("config.json", "lock", "state")}
        if error is not None and left.issuperset(self.folder.rglob("*")):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _check_config(self) -> None:
        if (self.folder / "config.json").exists() and self._holds_work():
            before, now = (
                traverse_util.flatten_dict(config.to_dict(settings), sep=".")  # dotted names
                for settings in (model_folder.read_config(self.folder), self.config)
            )
            changed = [
                f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
                for name in sorted(before.keys() | now.keys())
                if before.get(name) != now.get(name)
                and name not in MAY_CHANGE
                and not name.startswith(MESH)
            ]
            if changed:
                raise RunError(
                    f"{self.folder} is a run of another config: choose another --workdir, or"
                    f" delete that one to start again. {'; '.join(changed)}."
                )
        model_folder.write_config(self.folder, self.config)

    def _holds_work(self) -> bool:
        """Whether anything has been saved: a config that was refused later does not count."""
        kept = (self.model_folder, self.metrics_path, self.folder / "vq")
        saved = (path.name.isdigit() for path in self.folder.glob("state/*"))
        return any(path.exists() for path in kept) or any(saved)

    def _catch_signals(self) -> Callable[[], None]:
        """Starts listening; returns a function that stops it."""
        before = {}

        def restore_handlers():
            for number, handler in before.items():
                signal.signal(number, handler)

        def ask_to_stop(number: int, frame: types.FrameType | None):
            restore_handlers()
            if runtime.are_several():
                runtime.pass_signal_on(number)
            else:
                self.stop_signal = number

        # With several processes jax itself listens for SIGTERM, and tells all of them.
        ours = (signal.SIGINT,) if runtime.are_several() else (signal.SIGINT, signal.SIGTERM)
        # Python allows handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in ours:
                before[number] = signal.signal(number, ask_to_stop)
        return restore_handlers


def lock(folder: pathlib.Path) -> Callable[[], None]:
    """Makes this process the only writer of the folder; returns a function that releases it."""
    try:
        return files.lock(folder / "lock").release
    except OSError as error:
        raise RunError(f"{folder} cannot be written to: {error.strerror}.") from error
    except files.LockedError as owner:
        raise RunError(
            f"{folder} is being written by process {owner}. Wait for it, stop it, or choose"
            " another --workdir."
        ) from None
