# SPDX-License-Identifier: Apache-2.0
"""What the commands of tasks do: load a model, run a task, and write the results."""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax

from sparse_lavida_jax import schema
from sparse_lavida_jax.cli import doctor, outputs
from sparse_lavida_jax.cli.arguments import DEFAULT_MODEL
from sparse_lavida_jax.cli.terminal import say, say_json, unsaid
from sparse_lavida_jax.cli.usage_errors import UsageError
from sparse_lavida_jax.conversation import Conversation
from sparse_lavida_jax.data import files, image_files
from sparse_lavida_jax.inference import (
    batch_shapes,
    differences,
    provenance,
    requests,
    subsets,
    warmup,
)
from sparse_lavida_jax.inference.checks import fold
from sparse_lavida_jax.inference.requests import TASK_SPECS, Request, ShownImage, shown_images
from sparse_lavida_jax.inference.results import SHOWN_KEY, Result
from sparse_lavida_jax.models import sharding
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs import executables, persistent_jit
from sparse_lavida_jax.programs.folder import keep_programs
from sparse_lavida_jax.prompting.request_errors import RequestError, check_words
from sparse_lavida_jax.sampling import options

LONGEST_LINE = 2**16  # characters of a line of `chat`
NUMBERS = ("temperature", "guidance")  # that each line of a batch may set for itself
DRAWN = ("steps", "sampler", "registers", "guidance")  # that `warmup` sets for images
COMPLETING = (*options.OPTIONS, "num_images", "best_of", "seed")  # that `complete` sets
OTHER_KEYS = {"guidance_scale": "guidance"}  # as diffusers has it


class Line(schema.Section):
    """What a line of a batch file may contain."""

    prompt: str
    image: str = ""
    seed: Annotated[
        object, schema.Allowed(lambda one: type(one) is int, "it must be a whole number")
    ] = 0
    temperature: schema.Scale = 0.0
    guidance: schema.Scale = 0.0


def run(name: str, asked: argparse.Namespace) -> int:
    """Runs a command.

    Raises:
        one of usage_errors.MISTAKES: the command cannot be carried out; the message says why.
        OSError: something could not be written.
    """
    if getattr(asked, "seed", None) is not None:
        asked.seed = fold(asked.seed)
    if name == "doctor":
        found = doctor.kernels() if asked.kernels else doctor.report()
        told = doctor.kernels_text if asked.kernels else doctor.text
        print(json.dumps(found) if asked.json else told(found))
    elif name == "selfcheck":
        from sparse_lavida_jax.cli import selfcheck

        keep_programs(asked.compilation_cache)
        return selfcheck.run(asked.checkpoint or DEFAULT_MODEL)
    elif name == "chat":
        _chat(asked)
    elif name == "warmup":
        _warm_up(asked)
    elif name == "complete":
        _complete(asked)
    elif name == "prove":
        return _prove(asked)
    elif name == "surprise":
        _surprise(asked)
    elif getattr(asked, "replay", None) is not None:
        return (_branch if name == "branch" else _replay)(asked)
    else:
        _task(name, asked)
    return 0


def sample(
    task: str,
    words: str,
    image: str,
    out: pathlib.Path,
    checkpoint: str,
    *,
    adapters: str = "",
    **more: Any,
) -> None:
    """Runs a task for one prompt: `--mode=sample` of `main`."""
    shown = shown_images(image or None)
    if TASK_SPECS[task].draws:
        outputs.check_out(out)
    pipe = SparseLaViDa.from_pretrained(checkpoint, batch_size=1, adapters=adapters)
    result = pipe.run(pipe.requests(task, words, shown or None, **more))
    outputs.print_result(result, [*outputs.save_images(result, out)])


def _task(name: str, asked: argparse.Namespace) -> None:
    """Runs a task of a model."""
    # Check words and files first: loading a model takes seconds.
    words, shown, own = _words(name, asked)
    out, film_path = getattr(asked, "out", None), getattr(asked, "save_steps", None)
    count = 1 if getattr(asked, "grid", True) else len(words or shown) * asked.num_images
    for path in outputs.numbered(out, count) if out is not None else ():
        outputs.check_out(path)
    if film_path is not None:
        outputs.check_out(film_path, {".gif": "GIF"})
    name, given = _options(name, asked, shown)
    pipe = load(asked)
    # Lines of a batch may set their own numbers; the others use those of the command line.
    if common := {key: given[key] for key in NUMBERS if key in own}:
        base, draws = pipe.settings.sampling, TASK_SPECS[name].draws
        given["sampling"] = options.changed(base, draws=draws, **common)
    film = None if film_path is None else outputs.Film(pipe, given.get("size"))
    with outputs.shown_progress(film and film.add) as callback:
        requests = pipe.requests(name, words, shown or None, **given | own)
        if getattr(asked, "crop", None) is not None and pipe.codec is not None:
            height, width = asked.size or (pipe.codec.image_size,) * 2
            image_files.check_box(asked.crop, (width, height))
        result = pipe.run(requests, callback=callback)
    if getattr(asked, "margins", False):
        result = _with_margins(pipe, result, requests)
    written: list[pathlib.Path] = []
    try:
        if result.pixels:
            written.extend(outputs.save_images(result, asked.out, asked))
        elif result.boxes and out is not None:
            marked = image_files.with_boxes(shown[0].pixels, result.boxes)
            image_files.write(out, marked, scale=outputs.scale_of(asked, marked))
            written.append(out)
    finally:  # what cannot be written does not lose the rest
        if written or not result.pixels or outputs.form_of(asked) != "text":
            outputs.print_result(result, written, form=outputs.form_of(asked))
    if film is not None and film_path is not None:
        frames = film.frames
        shown_frames = [image_files.enlarged(x, outputs.scale_of(asked, x)) for x in frames]
        image_files.write_animation(film_path, shown_frames)


def _with_margins(pipe: SparseLaViDa, result: Result, requests: Sequence[Request]) -> Result:
    """Returns the result with margins in its records, or as it is where there are none."""
    try:
        return pipe.with_margins(result, shown=[next(iter(one.images), None) for one in requests])
    except RequestError as error:
        say(f"the records hold no margins: {error}")
        return result


# ---------------------------------------------------------------------------------------------
# What is asked for.


def _options(
    name: str, asked: argparse.Namespace, shown: Sequence[ShownImage]
) -> tuple[str, dict[str, Any]]:
    """Returns the task that is meant, and the options given for it."""
    if TASK_SPECS[name].image == "needed" and not shown:
        raise RequestError(f"`sparse-lavida {name}` is about an image: give one.")
    given: dict[str, Any] = {}
    if getattr(asked, "mask", None) is not None:
        given["mask"] = image_files.read_mask(asked.mask, shown[0].pixels)
    if getattr(asked, "no_layout", False):
        given["layout"] = False
    if name == "caption" and (asked.template is not None or asked.words):
        name, given = "constrained_caption", {"required": asked.words or None}
    # The other options have the same names as in requests.
    return name, {key: getattr(asked, key, None) for key in TASK_SPECS[name].takes} | given


def _words(
    name: str, asked: argparse.Namespace
) -> tuple[Sequence[str] | None, list[ShownImage], dict[str, Any]]:
    """Returns words, images and options per row, from a command line or a batch file."""
    if name in ("caption", "ground"):
        return getattr(asked, "phrases", None), shown_images(asked.image), {}
    image, words = getattr(asked, "image", None), asked.prompt
    if asked.batch is not None:
        if words is not None:
            raise UsageError("--batch holds the prompts: leave those of the command line out.")
        return _batch(name, asked.batch, image, asked.seed or 0)
    if words is None and name in ("ask", "reason"):
        words, image = image, None  # a question without an image
        path = pathlib.Path(words or "")
        if os.path.isfile(path) or path.suffix.lower() in image_files.SUFFIXES:
            raise UsageError(f"`sparse-lavida {name}` needs a question after the image {words}.")
    if words is None:
        what = "an image and a prompt" if TASK_SPECS[name].image == "needed" else "a prompt"
        raise UsageError(f"`sparse-lavida {name}` needs {what}. See `sparse-lavida {name} --help`.")
    return [check_words(words)], shown_images(image), {}


def _batch(
    name: str, path: pathlib.Path, image: str | None, seed: int
) -> tuple[list[str], list[ShownImage], dict[str, Any]]:
    """Returns the same as `_words`, from a batch file."""
    entries = read_batch(path)
    images = [entry.get("image", image) for entry in entries]
    if not TASK_SPECS[name].image and any(images):
        raise UsageError(f"{path}: this command takes no image.")
    if None in images and any(images):
        raise UsageError(f"{path}: give every line an image, or none.")
    if not TASK_SPECS[name].draws and any("guidance" in entry for entry in entries):
        raise UsageError(f"{path}: this command draws no image, so it takes no guidance.")
    seeds = [entry.get("seed", seed + i) for i, entry in enumerate(entries)]
    own: dict[str, Any] = {"seed": seeds}
    for key in NUMBERS:
        if any(key in entry for entry in entries):
            own[key] = [entry.get(key) for entry in entries]
    shown = shown_images(images) if any(images) else []
    return [entry["prompt"] for entry in entries], shown, own


def read_batch(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads a batch file: one prompt (.txt) or object (.jsonl) per line. Skips blank lines.

    Raises:
        UsageError: there is no such file, it has another suffix, is empty, or has an invalid line.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise UsageError(f"--batch={path} must end in .txt or .jsonl.")
    try:
        lines = files.lines(files.read_text(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"--batch={path} cannot be read: {error}.") from error
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UsageError(f"--batch={path} holds no prompt.")
    if path.suffix == ".txt":
        return [{"prompt": line.strip()} for _, line in numbered]
    return [_entry(f"{path}, line {i}", line) for i, line in numbered]


def _entry(where: str, line: str) -> dict[str, Any]:
    try:
        entry = files.parse_json(line)
        # A table's missing cells become null, and then its whole numbers become 7.0.
        entry = entry.items() if isinstance(entry, dict) else ()
        entry = {str(key): value for key, value in entry if value is not None}
        if not str(entry.get("prompt", "")).strip():
            raise ValueError('it must be an object with a prompt: {"prompt": "a red circle"}.')
        named = {OTHER_KEYS.get(key, key): value for key, value in entry.items()}
        if len(named) < len(entry):
            raise ValueError(f"an option is given twice, under two names: {', '.join(entry)}.")
        if isinstance(seed := named.get("seed"), float) and seed.is_integer():
            named["seed"] = int(seed)
        if "seed" in named:
            named["seed"] = fold(named["seed"])
        check_words(schema.build(Line, named).prompt)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is no JSON: {error}.") from error
    except ValueError as error:
        raise UsageError(f"{where}: {_without_section(error)}") from error
    return named


def _without_section(error: ValueError) -> str:
    """Returns a message in which a key of a line is called by its name alone."""
    if not isinstance(error, schema.InputError):
        return str(error)
    return error.worded(lambda setting: setting.rpartition(".")[2])


def load(asked: argparse.Namespace, recorded: Mapping[str, str] | None = None) -> SparseLaViDa:
    """Returns the model that the command line names, or else the one that a record names.

    Raises:
        ConfigError: the mesh is wrong.
        CheckpointError: there is no such model.
    """
    keep_programs(asked.compilation_cache)
    recorded = recorded or {}
    name = asked.checkpoint or recorded.get("name") or DEFAULT_MODEL
    adapters = asked.adapters or recorded.get("adapters") or ""
    how = {"batch_size": asked.batch_size, "convert": asked.convert, "adapters": adapters}
    if "content_cache_gb" in asked:
        how["content_cache_gb"] = asked.content_cache_gb
    mesh = asked.mesh and sharding.automatic(asked.mesh)  # before a model is fetched
    return SparseLaViDa.from_pretrained(name, mesh=mesh, **how)


# ---------------------------------------------------------------------------------------------
# Other commands.


def _chat(asked: argparse.Namespace) -> None:
    if asked.out.exists() and not asked.out.is_dir():
        raise UsageError(f"--out={asked.out} is no folder: name one, for the images of all turns.")
    outputs.check_place(asked.out)
    image = next(iter(shown_images(asked.image)), None)
    pipe = load(asked)
    given = {key: getattr(asked, key, None) for key in options.OPTIONS}
    sampling = options.changed(pipe.settings.sampling, draws=True, **given)
    talk = Conversation(pipe, image, seed=asked.seed or 0, sampling=sampling)
    typed = sys.stdin.isatty()
    if typed:
        say("one task and its words a line, such as: generate two red circles. Ctrl-D ends.")
    for line in _lines(sys.stdin.readline):
        task, _, words = line.removeprefix("\ufeff").strip().partition(" ")
        if not task:
            continue
        try:
            with outputs.shown_progress() as callback:
                result = talk.say(task, words, callback=callback)
        except RequestError as error:
            if not typed:
                raise
            say(f"{error}")
            continue
        asked.out.mkdir(parents=True, exist_ok=True)
        written = [*outputs.save_images(result, asked.out / f"{len(talk.turns)}.png", asked)]
        outputs.print_result(result, written, form=outputs.form_of(asked))


@unsaid(requests.__name__)  # rehearsed words mean nothing
def _warm_up(asked: argparse.Namespace) -> None:
    """Makes the programs of usual requests, and says for each kind of them what it took."""
    if asked.compilation_cache == "":
        raise UsageError(
            "--compilation-cache= keeps nothing for later: leave it out, or name a folder."
        )
    pipe, begin = load(asked), time.monotonic()
    for task in warmup.tasks_of(pipe, asked.tasks):
        draws, options = TASK_SPECS[task].draws, {"quantize": asked.quantize}
        if draws:
            options |= {name: getattr(asked, name) for name in DRAWN}
        rows = batch_shapes.sizes(asked.batch_size)
        for size in asked.size or [None] if task == "generate" else [None]:
            own = options if size is None else options | {"size": size}
            found = warmup.rehearsals(pipe, task, rows, "fit", **own)
            for kind, group in itertools.groupby(found, lambda one: one.kind):
                before, since = persistent_jit.in_memory(), time.monotonic()
                for one in group:
                    with contextlib.suppress(warmup.LayoutWritten):
                        how = {"bucket": one.bucket, "padding": "fit"}
                        pipe.run(one.requests(pipe), one.watch, **how)
                _print_programs(kind, persistent_jit.in_memory() - before, time.monotonic() - since)
    _print_programs("all", persistent_jit.in_memory(), time.monotonic() - begin)
    if not executables.are_kept():
        say("no executable is kept: later processes trace programs again and ask jax's own cache.")


def _print_programs(
    what: str, programs: Collection[persistent_jit.Program], seconds: float
) -> None:
    found = sum(program.was_kept for program in programs)
    made = len(programs) - found
    print(f"{what}: {made} programs made, {found} found, {seconds:.1f} s", flush=True)


def _lines(readline: Callable[[int], str]) -> Iterator[str]:
    """Yields the lines of the standard input.

    Args:
        readline: reads at most so many characters of one.

    Raises:
        UsageError: one is too long, or is not text.
    """
    try:
        while line := readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                raise UsageError(f"a line has more than {LONGEST_LINE} characters: break it up.")
            yield line
    except UnicodeDecodeError as error:
        raise UsageError(f"the standard input is not text in UTF-8: {error}.") from error


def _replay(asked: argparse.Namespace) -> int:
    """Draws an image again; returns 1 if its codes are not the recorded ones."""
    outputs.check_out(asked.out)
    pipe, record, shown = _recorded(asked)
    with outputs.shown_progress() as callback:
        result = pipe.replay(record, shown, callback=callback)
    outputs.write(result, asked)
    return 1 if differences.cells(record, result) else 0


def _branch(asked: argparse.Namespace) -> int:
    for path in outputs.numbered(asked.out, 1 if asked.grid else asked.num_images):
        outputs.check_out(path)
    pipe, record, shown = _recorded(asked)
    with outputs.shown_progress() as callback:
        how = {"num_images": asked.num_images, "seed": asked.seed, "shown": shown}
        result = pipe.branch(record, asked.at, callback=callback, **how)
    outputs.write(result, asked)
    return 0


def _complete(asked: argparse.Namespace) -> None:
    """Fills what is missing of words, layout and image."""
    held = asked.words, asked.layout, asked.image, asked.mask, asked.box
    subsets.subset_held(*held)
    shown = shown_images(asked.image) or None
    for path in outputs.numbered(asked.out, 1 if asked.grid else asked.num_images):
        outputs.check_out(path)
    given = {name: getattr(asked, name, None) for name in COMPLETING}
    if given["num_images"] == 1:  # texts take none
        del given["num_images"]
    with outputs.shown_progress() as callback:
        pipe = load(asked)
        made = pipe.completions(*held[:2], shown, *held[3:], given)
        result = pipe.run(made, callback=callback)
    outputs.write(result, asked)


def _prove(asked: argparse.Namespace) -> int:
    """Says whether an image follows from its record; returns 1 if it does not."""
    pipe, _, shown = _recorded(asked)
    (proof,) = pipe.prove(asked.replay, shown=shown)
    if asked.json:
        say_json(proof.as_json())
    else:
        print("\n".join(proof.lines))
    return 0 if proof.follows else 1


def _surprise(asked: argparse.Namespace) -> None:
    """Prints the captions of an image, those that fit best first."""
    if not asked.caption:
        raise UsageError("`sparse-lavida surprise` needs what the image may show: --caption.")
    shown = shown_images(asked.image)
    if asked.out is not None:
        outputs.check_out(asked.out)
    found = load(asked).surprise(shown, [check_words(one) for one in asked.caption])
    if asked.out is not None:
        drawn = found.map(found.ranked[0])
        image_files.write(asked.out, drawn, scale=outputs.scale_of(asked, drawn))
    if asked.json:
        files = [] if asked.out is None else [str(asked.out)]
        say_json(found.as_json() | {"files": files})
        return
    for one in found.as_json()["captions"]:
        where = "row {}, column {}".format(*one["cell"])
        most = f"{one['cell_bits']:.1f} of them in {where}"
        print(f"{one['caption']}: {one['bits']:.1f} bits, {most}")
    if found.error >= 1:
        say(f"the image tokenizer changes the image, by {found.error:.1f} (mean squared, of 255).")


def _recorded(
    asked: argparse.Namespace,
) -> tuple[SparseLaViDa, dict[str, Any], pathlib.Path | str | None]:
    """Returns the model of a PNG, its record, and the image that it was drawn after."""
    record = image_files.read_record(asked.replay)
    provenance.check(record)
    image = getattr(asked, "image", None)
    given = {"checkpoint": asked.checkpoint, "adapters": asked.adapters, "image": image}
    names = {name for name, value in given.items() if value}
    provenance.check_names(record, names, pathlib.Path(asked.replay).parent)
    pipe = load(asked, record["checkpoint"])
    here = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    here["dtype"] = pipe.model.settings.compute_dtype
    drawn = {"dtype": here["dtype"]} | record["software"]  # older records do not tell
    if drawn != here:
        say(
            f"{asked.replay} was drawn with {schema.shown(drawn)}, this is {here}:"
            " single bits may differ."
        )
    return pipe, record, image or (record.get(SHOWN_KEY) or {}).get("path")
