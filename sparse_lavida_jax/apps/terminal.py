# SPDX-License-Identifier: Apache-2.0
"""What commands say on a terminal: sentences and progress bars."""

import contextlib
import sys
from collections.abc import Callable, Iterator

import rich.console
import rich.progress


def say(sentence: str) -> None:
    """Writes a sentence to the error stream, under the name of the program."""
    print(f"sparse_lavida_jax: {sentence}", file=sys.stderr)


@contextlib.contextmanager
def progress(title: str, *, in_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """Shows a progress bar on a terminal, and nothing elsewhere.

    Yields a function that is called with how much is done, with all there is to do, and with
    another title if there is one.

    Args:
        in_bytes: whether bytes are counted; otherwise pieces of work.
    """
    console = rich.console.Console(stderr=True)
    column = rich.progress.DownloadColumn() if in_bytes else rich.progress.MofNCompleteColumn()
    bar = rich.progress.Progress(
        "{task.description}",
        rich.progress.BarColumn(),
        column,
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(title, total=None)

        def update(done: int, total: int, title: str | None = None) -> None:
            bar.update(task, description=title, completed=done, total=total)

        yield update
