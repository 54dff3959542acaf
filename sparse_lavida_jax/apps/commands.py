# SPDX-License-Identifier: Apache-2.0
"""What the commands of `cli.py` do: a model is loaded, asked, and its results written."""

import argparse
import contextlib
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import rich.console
import rich.progress

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.apps import doctor
from sparse_lavida_jax.apps.conversation import DRAWING, Conversation
from sparse_lavida_jax.apps.errors import DEFAULT_MODEL, UsageError
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.data.templates import RequestError, check_words
from sparse_lavida_jax.inference.requests import Number
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.pipeline import SparseLaViDa, untrained_warning
from sparse_lavida_jax.sample import Callback, Progress
from sparse_lavida_jax.sampling import options, presets

BATCH_KEYS = {
    "prompt": str, "image": str, "seed": int, "temperature": float, "guidance": float,
}  # fmt: skip


def run(name: str, asked: argparse.Namespace) -> int:
    """Does a command.

    Raises:
        UsageError, RequestError, ImageError, ConfigError, CheckpointError: it cannot be
            followed; the message says why.
        OSError: something could not be written.
    """
    if name == "doctor":
        found = doctor.report()
        print(json.dumps(found) if asked.json else doctor.text(found))
        return 0
    if getattr(asked, "replay", None) is not None:
        return _replay(asked)
    _check_files(name, asked)
    does = DOES[name]
    rows = _rows(name, asked) if does in (_draw, _answer, _infill) else None
    pipe = _load(asked, asked.checkpoint or DEFAULT_MODEL)
    sampling = _sampling(name, asked, pipe)
    with _progress() as callback:
        result = does(name, pipe, asked, sampling, callback) if rows is None else does(
            name, pipe, asked, sampling, callback, rows
        )  # fmt: skip
    if result is not None:
        _show(name, asked, result)
    return 0


# ---------------------------------------------------------------------------------------------
# What is asked.


@dataclasses.dataclass(frozen=True)
class Rows:
    """The prompts, images and seeds of a command; of a batch, what lines have of their own."""

    prompts: list[str]
    shown: list[str] | None
    seed: int | list[int]
    temperature: list[Number | None] | None = None
    guidance: list[Number | None] | None = None


def _rows(name: str, asked: argparse.Namespace) -> Rows:
    """Reads what is asked from the words of the command line, or from its batch file."""
    seed = 0 if asked.seed is None else asked.seed
    takes_image = hasattr(asked, "image")
    if getattr(asked, "batch", None) is not None:
        if asked.prompt is not None:
            raise UsageError("--batch holds the prompts: leave those of the command line out.")
        return _batch_rows(
            asked.batch, getattr(asked, "image", None), seed,
            takes_image=takes_image, draws=name in DRAWING,
        )  # fmt: skip
    words, image = asked.prompt, getattr(asked, "image", None)
    if words is None and takes_image and name in ("ask", "reason"):
        words, image = image, None  # a question without an image
        if words is not None and pathlib.Path(words).is_file():
            raise UsageError(f"`sparse-lavida {name}` needs a question behind the image {words}.")
    if words is None:
        what = "an image and a prompt" if takes_image else "a prompt"
        raise UsageError(f"`sparse-lavida {name}` needs {what}. See `sparse-lavida {name} --help`.")
    return Rows([check_words(words)], None if image is None else [image], seed)


def _batch_rows(
    path: pathlib.Path, image: str | None, seed: int, *, takes_image: bool, draws: bool
) -> Rows:
    entries = read_batch(path)
    shown = [entry.get("image", image) for entry in entries]
    if not takes_image and any(one is not None for one in shown):
        raise UsageError(f"{path}: this command takes no image.")
    if any(one is None for one in shown) and any(one is not None for one in shown):
        raise UsageError(f"{path}: give every line an image, or none.")
    if not draws and any("guidance" in entry for entry in entries):
        raise UsageError(f"{path}: this command draws no image, so it takes no guidance.")
    seeds = [entry.get("seed", seed + i) for i, entry in enumerate(entries)]
    return Rows(
        [entry["prompt"] for entry in entries],
        None if shown[0] is None else [str(one) for one in shown],
        seeds,
        *([entry.get(key) for entry in entries] for key in ("temperature", "guidance")),
    )


def read_batch(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads a batch: a prompt a line (.txt), or an object a line (.jsonl). Blank lines are none.

    Raises:
        UsageError: no such file, another suffix, nothing in it, or a line that is wrong.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise UsageError(f"--batch={path} must end in .txt or .jsonl.")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--batch={path} cannot be read: {error}.") from error
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UsageError(f"--batch={path} holds no prompt.")
    if path.suffix == ".txt":
        return [{"prompt": line.strip()} for _, line in numbered]
    return [_entry(f"{path}, line {i}", line) for i, line in numbered]


def _entry(where: str, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is no JSON: {error}.") from error
    if isinstance(entry, dict) and "picture" in entry:  # its name in older files
        entry["image"] = entry.pop("picture")
    if not isinstance(entry, dict) or not str(entry.get("prompt", "")).strip():
        raise UsageError(f'{where} must be an object with a prompt: {{"prompt": "a red circle"}}.')
    for key, value in entry.items():
        kind = Number if BATCH_KEYS.get(key) is float else BATCH_KEYS.get(key, ())
        if not isinstance(value, kind) or isinstance(value, bool):
            allowed = ", ".join(f"{name} ({kind.__name__})" for name, kind in BATCH_KEYS.items())
            raise UsageError(f"{where}: {key}={value!r} is not one of {allowed}.")
        if kind is Number and not value >= 0:
            raise UsageError(f"{where}: {key}={value} is out of range: it must be 0 or more.")
    return entry


def _check_files(name: str, asked: argparse.Namespace) -> None:
    """Looks at files before a model is loaded for them."""
    out = getattr(asked, "out", None)
    if out is not None and name != "chat":
        image_files.check_writable(out)
    if getattr(asked, "save_steps", None) is not None:
        image_files.check_writable(asked.save_steps, {".gif": "GIF"})


def _load(asked: argparse.Namespace, name: str) -> SparseLaViDa:
    if asked.batch_size < 1:
        raise UsageError(f"--batch-size={asked.batch_size} is out of range: 1 or more.")
    runtime.keep_programs()
    return SparseLaViDa.from_pretrained(name, batch_size=asked.batch_size)


def _sampling(name: str, asked: argparse.Namespace, pipe: SparseLaViDa) -> config.Sampling:
    """Returns the checkpoint's sampling settings with those of the command line put in."""
    draws = name in (*DRAWING, "chat")
    names = (
        "steps", "temperature", "sampler", "registers", "guidance", "order", "quantize", "vq_dtype",
    )  # fmt: skip
    given = {option: getattr(asked, option, None) for option in names}
    sampling = options.changed(pipe.settings.sampling, draws=draws, **given)
    if preset := presets.untrained(sampling, pipe.settings.model):
        said = untrained_warning(asked.checkpoint or DEFAULT_MODEL, preset)
        print(f"sparse_lavida_jax: {said}", file=sys.stderr)
        pipe.warned = True
    return sampling


# ---------------------------------------------------------------------------------------------
# What is done.


def _draw(name: str, pipe: SparseLaViDa, asked, sampling, callback, rows: Rows) -> Result:
    copies = asked.num_images
    seed, numbers = rows.seed, {"temperature": rows.temperature, "guidance": rows.guidance}
    if isinstance(seed, list) and copies > 1:
        seed = [one + i for one in seed for i in range(copies)]
        numbers = {
            name: values and [one for one in values for _ in range(copies)]
            for name, values in numbers.items()
        }
    more: dict[str, Any] = {
        "num_images": copies, "seed": seed, "sampling": sampling, **numbers,
        "plan": False if asked.no_plan else asked.plan, "callback": callback,
    }  # fmt: skip
    film = _Film(pipe, getattr(asked, "size", None))
    if asked.save_steps is not None:

        def told(now: Progress) -> None:
            callback(now)
            film.add(now)

        more["callback"] = told
    if name == "generate":
        result = pipe.generate(rows.prompts, size=asked.size, **more)
    elif name == "reflect":
        result = pipe.reflect(rows.prompts, rounds=asked.rounds, **more)
    elif rows.shown is None:
        raise RequestError(f"`sparse-lavida {name}` is about an image: give one.")
    elif name == "edit":
        result = pipe.edit(rows.shown, rows.prompts, **more)
    elif name == "inpaint":
        mask = None
        if asked.mask is not None:
            mask = image_files.read_mask(asked.mask, image_files.read(rows.shown[0]))
        result = pipe.inpaint(rows.shown, rows.prompts, mask=mask, box=asked.box, **more)
    else:
        result = pipe.outpaint(rows.shown, rows.prompts, box=asked.box, **more)
    if asked.save_steps is not None:
        drawn = len(result.attempts[0]) if result.attempts else 1
        image_files.write_animation(asked.save_steps, film.first(drawn))
    return result


class _Film:
    """What the first image of each batch looks like before its first step and after each."""

    def __init__(self, pipe: SparseLaViDa, size: tuple[int, int] | None):
        self.pipe = pipe
        self.height, self.width = size or (1, 1)
        self.takes: list[list[image_files.Pixels]] = []

    def add(self, progress: Progress) -> None:
        """Adds a frame before the first step of an image, and for each step of a segment."""
        if progress.making != "image":
            return
        if not progress.steps:  # another batch begins
            self.takes.append([self._frame(progress.canvas)])
        self.takes[-1] += [self._frame(progress.after(block)) for block in progress.blocks]

    def first(self, count: int) -> list[image_files.Pixels]:
        """Returns the frames of the first `count` batches: of the attempts at one image."""
        return [frame for take in self.takes[:count] for frame in take]

    def _frame(self, canvases) -> image_files.Pixels:
        canvas = canvases[0]
        return self.pipe.preview(canvas, math.isqrt(len(canvas) * self.height // self.width))


def _answer(name: str, pipe: SparseLaViDa, asked, sampling, callback, rows: Rows) -> Result:
    does = pipe.ask if name == "ask" else pipe.reason
    return does(
        rows.shown, rows.prompts,
        max_new_tokens=asked.max_new_tokens, seed=rows.seed, temperature=rows.temperature,
        sampling=sampling, callback=callback,
    )  # fmt: skip


def _caption(name: str, pipe: SparseLaViDa, asked, sampling, callback) -> Result:
    more = {"seed": asked.seed or 0, "sampling": sampling, "callback": callback}
    if asked.template is None and not asked.words:
        return pipe.caption(asked.image, **more)
    return pipe.constrained_caption(asked.image, template=asked.template, words=asked.words, **more)


def _infill(name: str, pipe: SparseLaViDa, asked, sampling, callback, rows: Rows) -> Result:
    more = {"seed": rows.seed, "temperature": rows.temperature, "sampling": sampling,
            "callback": callback}  # fmt: skip
    return pipe.infill(rows.prompts, rows.shown, **more)


def _ground(name: str, pipe: SparseLaViDa, asked, sampling, callback) -> Result:
    more = {"seed": asked.seed or 0, "sampling": sampling, "callback": callback}
    result = pipe.ground(asked.image, asked.phrases, **more)
    if asked.out is not None:
        image_files.write(
            asked.out, image_files.with_boxes(image_files.read(asked.image), result.boxes)
        )
    return result


def _chat(name: str, pipe: SparseLaViDa, asked, sampling, callback) -> None:
    talk = Conversation(pipe, asked.image, seed=asked.seed or 0, sampling=sampling)
    for line in sys.stdin:
        task, _, words = line.strip().partition(" ")
        if not task:
            continue
        result = talk.say(task, words)
        asked.out.mkdir(parents=True, exist_ok=True)
        files = _save(result, asked.out / f"{len(talk.turns)}.png")
        _print(result, files, asked.json)


def _replay(asked: argparse.Namespace) -> int:
    record = image_files.read_record(asked.replay)
    image_files.check_writable(asked.out)
    pipe = _load(
        asked, asked.checkpoint or record.get("checkpoint", {}).get("name") or DEFAULT_MODEL
    )
    here = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    if record.get("software") != here:
        print(
            f"sparse_lavida_jax: {asked.replay} was drawn with {record.get('software')}, this is"
            f" {here}: single bits may differ.",
            file=sys.stderr,
        )
    shown = getattr(asked, "image", None)
    with _progress() as callback:
        result = pipe.replay(record, shown, callback=callback)
    _print(result, _save(result, asked.out), asked.json)
    return 0


DOES: dict[str, Callable[..., Result | None]] = {
    "generate": _draw, "edit": _draw, "inpaint": _draw, "outpaint": _draw, "reflect": _draw,
    "ask": _answer, "reason": _answer, "caption": _caption, "infill": _infill, "ground": _ground,
    "chat": _chat,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------
# What is shown.


def _show(name: str, asked: argparse.Namespace, result: Result) -> None:
    files: list[pathlib.Path] = []
    if result.pixels and getattr(asked, "grid", False):
        image_files.write(asked.out, image_files.sheet(result.pixels))
        files = [asked.out]
    elif result.pixels:
        files = _save(result, asked.out)
    elif name == "ground" and asked.out is not None:
        files = [asked.out]
    _print(result, files, asked.json)


def _save(result: Result, out: pathlib.Path) -> list[pathlib.Path]:
    """Writes the images of a result: one to `out`, several to numbered names."""
    count = len(result.pixels)
    names = [out.with_stem(f"{out.stem}-{i}") if count > 1 else out for i in range(count)]
    for row, path in enumerate(names):
        result.save(path, row)
    return names


def _print(result: Result, files: Sequence[pathlib.Path], as_json: bool) -> None:
    if as_json:
        written = {**result.as_json(), "files": [str(path) for path in files]}
        print(json.dumps(written, ensure_ascii=False))
        return
    if result.boxes:
        for phrase, box in zip(result.prompts, result.boxes, strict=True):
            found = "not found" if box is None else ",".join(f"{edge:g}" for edge in box)
            print(f"{phrase}: {found}")
        return
    if len(files) == len(result.prompts):
        verdicts = result.texts or [""] * len(files)
        for path, prompt, verdict in zip(files, result.prompts, verdicts, strict=True):
            print(f"{path}: {prompt}" + (f" ({verdict})" if verdict else ""))
        return
    for line in [str(path) for path in files] or result.texts:
        print(line)


@contextlib.contextmanager
def _progress() -> Iterator[Callback]:
    """Shows the steps on a terminal, and nothing elsewhere."""
    console = rich.console.Console(stderr=True)
    if not console.is_terminal:
        yield lambda now: None
        return
    bar = rich.progress.Progress(
        "{task.description}", rich.progress.BarColumn(), rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(), console=console, transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("starting", total=None)

        def step(now: Progress) -> None:
            note = " (compiling, once for each size)" if now.steps == 0 else ""
            bar.update(task, description=now.making + note, completed=now.steps, total=now.total)

        yield step
