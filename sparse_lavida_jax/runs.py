# SPDX-License-Identifier: Apache-2.0
"""A run directory: one experiment, one writer, resumable at any step.

It holds `config.json` (a directory of another config is refused), `lock` (held by the process that
writes), `state/<step>/`, `metrics.jsonl`, and at the end `model/`, a model folder (described in
`checkpoint.py`).
"""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import signal
import subprocess
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

import sparse_lavida_jax
from sparse_lavida_jax import checkpoint, config

# What may differ from the config a run was started with: its length, what it reports, and how
# pictures are sampled. Anything else would make the resumed run another experiment.
MAY_CHANGE = frozenset(
    {
        "train.train_steps", "train.seconds", "train.checkpoint_seconds", "train.picture_seconds",
        "train.log_every", "train.eval_prompts", "sampling.preset", "sampling.order_seed",
        "sampling.temperature", "sampling.guidance", "sampling.guidance_image",
        "sampling.text_temperature", "sampling.plan",
    }
)  # fmt: skip


class RunError(Exception):
    """A run directory that is in use, of another experiment, or something else altogether."""


@dataclasses.dataclass
class Interruption:
    """Whether a signal asked a run to stop; true once one did."""

    signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """130 after an interrupt (Ctrl-C), 143 after a termination, 0 after neither."""
        return 0 if self.signal_number is None else 128 + self.signal_number


class Run:
    """An open run directory: `with Run(folder, settings) as run: ...`.

    Attributes:
        interruption: what `catch_signals` caught.
    """

    def __init__(self, folder: pathlib.Path | str, settings: config.Config, *, keep: int = 2):
        self.folder = pathlib.Path(folder)
        self.config = settings
        self.keep = keep
        self.interruption = Interruption()
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> "Run":
        with contextlib.ExitStack() as undo:
            self._claim_folder()
            undo.callback(_lock(self.folder))
            self._check_config()
            self.states = checkpoint.States(self.folder / "state", keep=self.keep)
            undo.callback(self.states.close)
            self._closing = undo.pop_all()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._closing.close()

    def restore(self, template: Any) -> checkpoint.SavedState | None:
        """Returns the newest readable state; None at the start of a run."""
        return self.states.restore(template)

    def save(self, step: int, state: Any, seconds: float = 0.0) -> None:
        """Saves a state in the background, unless that of this step is saved already.

        Args:
            step: steps behind the state.
            seconds: of training behind it.

        Raises:
            CheckpointError: the disk is too full, or saving the state before this one failed.
        """
        if step not in self.states.steps:
            self.states.save(step, state, seconds)

    def finish_saving(self) -> None:
        """Waits until the last state is on disk."""
        self.states.wait()

    def export(self, model: nnx.Module, *, dtype: str = "float32") -> None:
        """Writes the finished model to `model/`, with its tokenizers."""
        checkpoint.save_model(
            self.folder / "model",
            model,
            self.config,
            tokenizer_path=checkpoint.tokenizer_path(self.config),
            vq_folder=checkpoint.vq_folder(self.config),
            readme=_model_card(self.config, model),
            dtype=dtype,
        )

    @contextlib.contextmanager
    def catch_signals(self) -> Iterator[Interruption]:
        """Yields what turns true at the first Ctrl-C or SIGTERM; the second ends the process.

        For the loop, which looks at the end of every step and then saves.
        """
        before = {}

        def restore_handlers():
            for number, handler in before.items():
                signal.signal(number, handler)

        def ask_to_stop(number: int, frame: types.FrameType | None):
            self.interruption.signal_number = number
            restore_handlers()

        # Python allows handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, ask_to_stop)
        try:
            yield self.interruption
        finally:
            restore_handlers()

    def _claim_folder(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise RunError(f"{self.folder} is a file. Choose another --workdir.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.folder} cannot be made: {error.strerror}.") from error
        names = {path.name for path in self.folder.iterdir()} - {"lock"}
        if names and "config.json" not in names:
            raise RunError(
                f"{self.folder} holds files but no config.json, so it is no run directory. Choose"
                " another --workdir."
            )

    def _check_config(self) -> None:
        if (self.folder / "config.json").exists():
            before = _settings(checkpoint.read_config(self.folder))
            now = _settings(self.config)
            changed = [
                f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
                for name in sorted(before.keys() | now.keys())
                if before.get(name) != now.get(name) and name not in MAY_CHANGE
            ]
            if changed:
                raise RunError(
                    f"{self.folder} is a run of another config: {'; '.join(changed)}. Choose"
                    " another --workdir, or delete that one to start anew."
                )
        checkpoint.write_config(self.folder, self.config)


def _model_card(settings: config.Config, model: nnx.Module) -> str:
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model))
    return f"""# {settings.name}

{parameters / 1e6:.2f} M parameters of Sparse-LaViDa, trained from scratch on data that the project
generates ({settings.data.source}), seed {settings.seed}.

* Made by: sparse-lavida-jax {sparse_lavida_jax.__version__}, commit {_commit()}, from the settings
  in `config.json`
* Licence: Apache-2.0
"""


def _commit() -> str:
    """Returns the commit of the checkout the package is run from, if it is one."""
    command = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _settings(settings: config.Config) -> dict[str, Any]:
    """Returns every setting under its dotted name."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, section: dict[str, Any]):
        for name, value in section.items():
            if isinstance(value, dict):
                walk(f"{prefix}{name}.", value)
            else:
                flat[prefix + name] = value

    walk("", config.to_dict(settings))
    return flat


def _lock(folder: pathlib.Path) -> Callable[[], None]:
    """Makes this process the only writer of the folder; returns what gives that up.

    The operating system drops the lock of a process that dies, however it dies; the number in the
    file is for the message.
    """
    path = folder / "lock"
    try:
        file = path.open("a+")
    except OSError as error:
        raise RunError(f"{folder} cannot be written to: {error.strerror}.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise RunError(
            f"{folder} is being written by process {owner}. Wait for it, stop it, or choose"
            " another --workdir."
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file.close
