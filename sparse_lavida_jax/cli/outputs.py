# SPDX-License-Identifier: Apache-2.0
"""What commands write: files of images and animations, lines or JSON, and the progress."""

import argparse
import contextlib
import itertools
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Literal

from sparse_lavida_jax.cli.terminal import progress, say, say_json
from sparse_lavida_jax.cli.usage_errors import UsageError
from sparse_lavida_jax.data import files, image_files
from sparse_lavida_jax.inference.regions import cell_rows
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs import compiling, side_by_side
from sparse_lavida_jax.sampling.progress import Callback, Progress

Form = Literal["text", "JSON", "full JSON"]
SMALL, SMALL_SCALE = 128, 4  # images with sides below 128 pixels are saved 4 times as large


def check_out(path: pathlib.Path, suffixes: dict[str, str] | None = None) -> None:
    """Refuses a file that cannot be written, or that needs a new folder elsewhere."""
    image_files.check_writable(path, suffixes)
    check_place(path.parent)


def check_place(folder: pathlib.Path) -> None:
    """Refuses a folder that would be created outside the current one, or cannot be written to."""
    if not folder.exists() and not files.resolve(folder).is_relative_to(pathlib.Path.cwd()):
        raise UsageError(
            f"there is no folder {folder}, and none is created outside the current one: create it"
            f" first (mkdir -p {folder}), or choose another place."
        )
    files.check_place(folder)


class Film:
    """Frames of the first image, at each of its tries: before the first step and after each."""

    def __init__(self, pipe: SparseLaViDa, size: tuple[int, int] | None):
        self.pipe = pipe
        self.size = size
        self.frames: list[image_files.Pixels] = []

    def add(self, state: Progress) -> None:
        """Adds a frame for each step of a phase, or the empty image before the first step."""
        begun = {"image": [state.responses], "revision": []}  # the latter with the last frame
        if state.stage not in begun or 0 not in state.rows:
            return
        first = state.rows.index(0)
        for responses in map(state.after, state.blocks) if state.steps else begun[state.stage]:
            rows = cell_rows(len(responses[first]), self.size)
            self.frames.append(self.pipe.preview(responses[first], rows))


def save_images(
    result: Result, out: pathlib.Path, asked: argparse.Namespace | None = None
) -> Iterator[pathlib.Path]:
    """Writes the images of a result: one to `out`, several to numbered files or on one sheet.

    Yields the files that were written.

    Args:
        asked: may say how; by default images are written as they were drawn.
    """
    images, records = result.pixels, result.records
    if (crop := getattr(asked, "crop", None)) is not None:
        x1, y1, x2, y2 = crop
        images, records = [image[y1:y2, x1:x2] for image in images], [None] * len(images)
    scales = [1 if asked is None else scale_of(asked, image) for image in images]
    if getattr(asked, "grid", False):
        shown = map(image_files.enlarged, images, scales)
        image_files.write(out, image_files.sheet([*shown]))
        yield out
        return
    names = numbered(out, len(images))
    for path, image, record, scale in zip(names, images, records, scales, strict=True):
        image_files.write(path, image, record, scale=scale)
        yield path


def write(result: Result, asked: argparse.Namespace) -> None:
    """Writes the images of a result to `asked.out`, if it has any, and prints it."""
    written = [*save_images(result, asked.out, asked)] if result.pixels else []
    print_result(result, written, form=form_of(asked))


def numbered(out: pathlib.Path, count: int) -> list[pathlib.Path]:
    """Returns the names of the files for several images, or the only one."""
    return [out.with_stem(f"{out.stem}-{i}") if count > 1 else out for i in range(count)]


def _answers(result: Result) -> list[str]:
    """Returns the texts of a result; those to other questions than the user's say to which."""
    rows = itertools.zip_longest(result.texts, result.replaced, result.warnings, fillvalue="")
    return [
        f"{text} (to '{sentence}')" if warning and sentence else text
        for text, sentence, warning in rows
    ]


def scale_of(asked: argparse.Namespace, image: image_files.Pixels) -> int:
    """Returns how many times an image is enlarged when it is saved."""
    return asked.scale or (SMALL_SCALE if max(image.shape[:2]) < SMALL else 1)


def form_of(asked: argparse.Namespace) -> Form:
    """Returns how a result is printed."""
    return "full JSON" if asked.json_full else "JSON" if asked.json else "text"


def print_result(result: Result, files: Sequence[pathlib.Path], *, form: Form = "text") -> None:
    """Prints a result: its files, texts or boxes, a line each, or JSON."""
    if form != "text":
        said = result.as_json(full=form == "full JSON")
        say_json(said | {"files": [str(path) for path in files]})
        return
    lines = [str(path) for path in files] or _answers(result)
    if result.boxes:
        found = (b and ",".join(f"{edge:g}" for edge in b) for b in result.boxes)
        pairs = zip(result.prompts, found, strict=True)
        lines = [f"{phrase}: {box or 'not found'}" for phrase, box in pairs]
    elif len(files) == len(result.prompts):
        verdicts = [f" ({text})" for text in result.texts] or [""] * len(files)
        drawn = [f" (drawn as '{sentence}')" if sentence else "" for sentence in result.replaced]
        asked = [words or "the layout" for words in result.prompts]
        rows = zip(files, asked, drawn, verdicts, strict=True)
        lines = [f"{path}: {prompt}{sentence}{verdict}" for path, prompt, sentence, verdict in rows]
    for line in lines:
        print(line)
    if lines and not any(lines):
        say("the answer is empty.")
    if files and result.boxes and not any(result.boxes):
        say(f"nothing was found: {files[0]} shows the image without boxes.")


@contextlib.contextmanager
def shown_progress(also: Callback | None = None) -> Iterator[Callback]:
    """Shows the steps on a terminal, and nothing elsewhere; `also` is called too.

    At the end it says how long programs were compiled, if that took a second or more.
    """
    done, total, begin = 0, 1, time.monotonic()
    with progress("starting") as update:

        def callback(state: Progress) -> None:
            nonlocal done, total
            done, total = state.steps, state.total
            note = "" if done else " (compiling, once for each size and option)"
            update(done, total, state.stage + note)
            if also is not None:
                also(state)

        with side_by_side.progress_shown(lambda line: update(done, total, line)):
            yield callback
    took, compiled = time.monotonic() - begin, compiling.seconds(begin)
    if compiled >= 1:
        say(
            f"{compiled:.0f} s to compile, once for each size and option, and"
            f" {took - compiled:.1f} s to run. `sparse-lavida demo` opens a page that stays ready."
        )
