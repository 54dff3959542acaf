# SPDX-License-Identifier: Apache-2.0
r"""Trains, samples and evaluates from the command line.

    python -m sparse_lavida_jax.main --config=configs/scenes.py
    python -m sparse_lavida_jax.main --config=configs/scenes.py --config.train.train_steps=200
    python -m sparse_lavida_jax.main --mode=sample --checkpoint=scenes --prompt="a red circle"
    python -m sparse_lavida_jax.main --mode=sample --checkpoint=scenes --task=ask \
        --image=image.png --prompt="how many red circles are there?"
    python -m sparse_lavida_jax.main --mode=evaluate --checkpoint=runs/scenes
    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/evaluate.py:geneval \
        --checkpoint=models/lavida-o --config.evaluate.data=benchmarks/geneval --shard=0/4
    python -m sparse_lavida_jax.main --mode=convert --src=LaViDa-O-v1.0 --dst=models/lavida-o
    python -m sparse_lavida_jax.main --mode=verify --src=models/lavida-o
    python -m sparse_lavida_jax.main --mode=export --src=runs/mine --dst=for-pytorch
    python -m sparse_lavida_jax.main --mode=prepare --src=mixture.yaml --dst=prepared \
        --config.data.image_codec=models/lavida-o --config.prepare.workers=4
    srun python -m sparse_lavida_jax.main --config=configs/sft_1024.py --distributed

A config file is a Python program that is run: use only your own. Exit codes: 0 done, or training
stopped by SIGTERM with everything saved (then --stopped_exit_code, if it is given); 130 training
stopped by Ctrl-C, likewise; 2 a mistake that the message explains.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from sparse_lavida_jax import config, runtime, schema
from sparse_lavida_jax.apps.arguments import ADAPTERS
from sparse_lavida_jax.apps.errors import REFUSED, UsageError, about_path
from sparse_lavida_jax.apps.terminal import output_escaped, progress, say
from sparse_lavida_jax.checkpoints import adapter_names, model_folder
from sparse_lavida_jax.data import files
from sparse_lavida_jax.evals.files import EvaluationError
from sparse_lavida_jax.inference.checks import LARGEST_SEED
from sparse_lavida_jax.mixture.recipe import PrepareError
from sparse_lavida_jax.mixture.records import RecordError
from sparse_lavida_jax.models import quantize
from sparse_lavida_jax.programs import jax_settings
from sparse_lavida_jax.programs.folder import keep_programs, silence_alarm
from sparse_lavida_jax.training import runs

MODEL_NAMES = "a model folder, a run directory, a bundled model, or one on the hub (org/name)"
FOLDERS = {  # flags that these modes need, and what they name
    "convert": {
        "src": "the released PyTorch folder, or its id on the hub",
        "dst": "the folder to write; an older model is replaced",
    },
    "export": {"src": MODEL_NAMES, "dst": "the folder to write"},
    "verify": {"src": MODEL_NAMES},
    "prepare": {
        "src": "a mixture file (docs/data.md) or a folder of images (docs/own_images.md)",
        "dst": "the folder to write the prepared data to",
    },
}
# Tasks of --mode=sample, with their names in the commands.
SAMPLE_TASKS = {"draw": "generate", "edit": "edit", "ask": "ask", "point": "ground"}
# Flags of each mode, besides its folders and the flags of all modes.
TAKES = {
    "train": "config data init_from workdir profile_steps stopped_exit_code"
    " distributed coordinator num_processes process_id",
    "sample": "config checkpoint adapters convert task prompt image picture out seed",
    "evaluate": "config checkpoint adapters convert workdir shard",
    "convert": "dtype format",
    "export": "format dtype adapters",
    "prepare": "config image_tokenizer tokenizer dry_run json",
}
TAKEN_BY_ALL = ("mode", "help", "compilation_cache")
PATHS = ("data", "init_from", "workdir", "checkpoint", "src", "dst", "out")  # flags
FILES = (*PATHS, "config", "image", "image_tokenizer", "tokenizer")
QUICK_LIMIT = 32  # items of each task that are evaluated without a config, in one batch
GO_ON = ("train", "evaluate", "prepare")  # modes that keep what was finished before Ctrl-C
LONGEST_MESSAGE = 500  # of the messages of parsers, which repeat the arguments
MISTAKE, STOPPED = 2, 130
# What can be wrong with a command.
MISTAKES = (
    *REFUSED, UsageError, model_folder.CheckpointError, runs.RunError, PrepareError, RecordError,
    EvaluationError, runtime.ProcessError,
)  # fmt: skip
# OSError: a full disk, a file that is not there, a folder that may not be written.
OURS = (*MISTAKES, OSError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` by default, and returns the exit code."""
    try:
        with output_escaped(), runtime.interrupts_heard():
            return run(list(sys.argv if argv is None else argv))
    except OURS as error:
        say(str(error))
        return MISTAKE
    except ValueError as error:
        if not (sentence := about_path(error)):
            raise
        say(sentence)
        return MISTAKE
    except KeyboardInterrupt:
        say("stopped.")
        return STOPPED


@jax_settings.defaults()
def run(argv: list[str]) -> int:
    """Runs a command line and returns the exit code of what was done, or stopped and saved.

    Raises:
        one of OURS: something failed; the message says why.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain reads flags of its own
    parsed = parse(argv)
    if parsed is None:
        return 0
    asked, settings = parsed
    silence_alarm()
    if asked.compilation_cache:
        keep_programs(asked.compilation_cache)
    try:
        # Training saves its state before it stops.
        with contextlib.nullcontext() if asked.mode == "train" else _cleared_up_when_stopped():
            if done := MODES[asked.mode](asked, settings):
                print(done)
    except runs.Interrupted as stop:
        say(str(stop))
        return stop.exit_code or asked.stopped_exit_code
    except KeyboardInterrupt:
        kept = "What is finished is kept, and the same command goes on."
        say(f"stopped. {kept if asked.mode in GO_ON else 'Nothing was written.'}")
        return STOPPED
    return 0


# ---------------------------------------------------------------------------------------------
# The modes. Each returns its final message, if any.


def _train(asked: flags.FlagValues, settings: config.Config) -> None:
    together, steps = _together(asked), _steps(asked.profile_steps)
    if settings.data.source == "none":
        raise UsageError(
            f"the config {settings.name} has no data to train on (data.source='none'):"
            " choose scenes, digits or prepared."
        )
    if together is not None and settings.train.stage == "vq":
        raise UsageError("train.stage='vq' is trained by one process: leave out --distributed.")
    with contextlib.ExitStack() as stack:
        if together is not None:
            at = together[0] and f" at {together[0]}"
            say(f"waiting for {together[1] or 'all'} processes to connect{at}")
            runtime.connect(*together)
            stack.callback(runtime.disconnect)
        if settings.train.stage == "denoiser":
            from sparse_lavida_jax.models.stack import admit_kernel_for
            from sparse_lavida_jax.training import start

            start.check(settings)
            admit_kernel_for(settings.model, gradients=True)
        runtime.keep_freed_memory()
        run = stack.enter_context(runs.Run(_workdir(asked, settings), settings))
        if settings.train.stage == "denoiser":
            from sparse_lavida_jax import train

            if asked.data:
                from sparse_lavida_jax.training import own_images

                say(own_images.size_in_words(settings))

            train.train(settings, run, steps)
        else:
            from sparse_lavida_jax.training import train_vq

            train_vq.train(settings, run.folder, run.is_asked_to_stop)


def _sample(asked: flags.FlagValues, settings: config.Config) -> None:
    from sparse_lavida_jax.apps import commands

    task = "edit" if asked.task == "draw" and asked.image else SAMPLE_TASKS[asked.task]
    more = {"adapters": asked.adapters, "seed": asked.seed, "sampling": settings.sampling}
    out = pathlib.Path(asked.out)
    commands.sample(task, asked.prompt, asked.image, out, asked.checkpoint, **more)


def _evaluate(asked: flags.FlagValues, settings: config.Config) -> str:
    from sparse_lavida_jax.evals import run

    checkpoint = asked.checkpoint or settings.evaluate.checkpoint
    folder = _workdir(asked, settings)
    with progress(f"{checkpoint} on {settings.evaluate.benchmark}") as on_progress:
        how: dict[str, Any] = {"adapters": asked.adapters, "shard": asked.shard}
        if not asked.config and settings.evaluate.limit == QUICK_LIMIT:
            say(
                f"{QUICK_LIMIT} items per task, of {settings.train.eval_prompts}:"
                " --config.evaluate.limit=0 evaluates all."
            )
        told = {"on_progress": on_progress, "on_note": say}
        return run.evaluate(settings, checkpoint, folder, **how, **told)


def _convert(asked: flags.FlagValues, settings: config.Config) -> str:
    from sparse_lavida_jax.convert import from_torch

    src, dst, dtype = asked.src, asked.dst, asked.dtype or None
    if dtype in quantize.DTYPES:
        raise UsageError(
            f"--mode=convert takes no --dtype={dtype}: convert as released, and then `sparse-lavida"
            f" export {dst} NEW --dtype={dtype}`."
        )
    with progress(f"{src} -> {dst}", in_bytes=True) as on_progress:
        how: dict[str, Any] = {"dtype": dtype, "kind": asked.format or "safetensors"}
        done = from_torch.convert(src, dst, **how, on_progress=on_progress)
    return f"{_written(dst, done)}, {', '.join(done.dtypes)}"


def _export(asked: flags.FlagValues, settings: config.Config) -> str:
    from sparse_lavida_jax.convert import adapters, to_torch

    weights = adapter_names.parse(asked.adapters)
    if asked.format or asked.dtype:
        kind = asked.format or "safetensors"
        count = adapters.copy(asked.src, asked.dst, weights, kind, dtype=asked.dtype)
        return f"{asked.dst}: {count} tensors"
    done = to_torch.export(asked.src, asked.dst, adapters=weights)
    return f"{_written(asked.dst, done)}, safetensors files: {done.num_shards}"


def _written(dst: str, done: Any) -> str:
    return f"{dst}: {done.num_tensors:,} tensors, {done.num_parameters:,} parameters"


def _verify(asked: flags.FlagValues, settings: config.Config) -> str:
    from sparse_lavida_jax.data.templates import language
    from sparse_lavida_jax.data.vocabulary import Vocabulary
    from sparse_lavida_jax.models import vq

    folder = model_folder.find_model(asked.src)
    count = model_folder.verify(folder)
    if (folder / "vq").is_dir():
        vq.load(folder / "vq")
    try:
        language(model_folder.read_config(folder).prompts).tokenizer_type(folder / "tokenizer.json")
        Vocabulary.read(folder)
    except (ValueError, FileNotFoundError) as error:
        raise model_folder.CheckpointError(str(error)) from error
    return f"{folder}: {count} files, all as they were written"


def _prepare(asked: flags.FlagValues, settings: config.Config) -> str:
    from sparse_lavida_jax.mixture import prepare
    from sparse_lavida_jax.models import vq
    from sparse_lavida_jax.training import own_images

    src, dst = pathlib.Path(asked.src), pathlib.Path(asked.dst)
    if asked.dry_run:
        with tempfile.TemporaryDirectory() as place:
            given = own_images.mixture_of(src, dst, pathlib.Path(place) / "captions.jsonl")
            with progress(f"reading {src}") as on_progress:
                done = prepare.trial(given.recipe, settings, given.found, on_progress)
        return _preparation(asked, done, f"nothing was written to {dst}")
    # With a mixture alone, the tokenizers stay where they are, with the model to be trained.
    with_tokenizers = src.is_dir() or asked.image_tokenizer or asked.tokenizer
    text = own_images.text_tokenizer(asked.tokenizer) if with_tokenizers else ""
    codec, sentences = asked.image_tokenizer or settings.data.image_codec, list[str]()
    if asked.config and not asked.image_tokenizer and src.is_dir():
        codec = "" if codec == config.Data().image_codec else codec  # no file need name one
    with prepare.reserved(dst):
        given = own_images.mixture_of(src, dst)
        if with_tokenizers:
            sentences = [] if codec else own_images.estimates(settings)
            own_images.place_image_tokenizer(given.recipe, dst, settings, codec, say)
            codec = asked.dst
        with progress(f"{src} -> {dst}") as on_progress:
            load_encoder = functools.partial(vq.ImageTokenizer, codec)
            how = {"found": given.found, "sentences": sentences}
            done = prepare.fill(given.recipe, dst, settings, load_encoder, on_progress, **how)
        if with_tokenizers:
            own_images.place_text_tokenizer(dst, text, say)
    following = f"Next: sparse-lavida train --data={asked.dst}" * bool(with_tokenizers)
    return _preparation(asked, done, following)


def _preparation(asked: flags.FlagValues, done: Any, following: str) -> str:
    """Returns what a preparation used and left out, as text or JSON."""
    from sparse_lavida_jax.mixture import report

    if asked.json:
        values = dataclasses.asdict(done) | {"table": report.as_json(done.table)}
        return json.dumps({"folder": asked.dst, "dry_run": asked.dry_run} | values)
    made = "" if asked.dry_run else f", {done.made} of {done.shards} shard(s) made now"
    head = (
        f"{asked.dst}: {done.records} records{made}; {done.left_out} rows left out, {done.bad} bad,"
        f" as {'follows' if asked.dry_run else report.READABLE + ' says'}"
    )
    return "\n".join(filter(None, [head, report.as_text(done.table), following]))


def _workdir(asked: flags.FlagValues, settings: config.Config) -> pathlib.Path:
    return pathlib.Path(asked.workdir or pathlib.Path("runs") / settings.name)


@contextlib.contextmanager
def _cleared_up_when_stopped() -> Iterator[None]:
    """Makes SIGTERM end the command like Ctrl-C does, so that incomplete files are removed."""

    def stop(number, frame):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


MODES: dict[str, Callable[[flags.FlagValues, config.Config], str | None]] = {
    "train": _train,
    "sample": _sample,
    "evaluate": _evaluate,
    "convert": _convert,
    "export": _export,
    "verify": _verify,
    "prepare": _prepare,
}

# ---------------------------------------------------------------------------------------------
# The command line.


def parse(argv: list[str]) -> tuple[flags.FlagValues, config.Config] | None:
    """Parses a command line; returns None if it only asked for help, which is then printed.

    Raises:
        ConfigError, CheckpointError, UsageError: it cannot be followed; the message says why.
    """
    # A FlagValues of our own, so that a second call in the same process starts afresh.
    asked = flags.FlagValues()
    _define(asked)
    overrides = [word for word in argv if word.lstrip("-").startswith(("config.", "noconfig."))]
    try:
        _, *left = asked([word for word in argv if word not in overrides])
        if asked.help:
            print(__doc__, asked.get_help(), sep="\n")
            return None
        if left:
            raise UsageError(f"{left[0]!r} is no setting. Write settings as --name=value.")
        if asked.mode in FOLDERS and asked.mode != "prepare" and overrides:
            raise UsageError(f"--mode={asked.mode} takes no settings of a config: {overrides[0]}.")
        _refuse_addresses({f"--{name}": getattr(asked, name) for name in PATHS})
        for name in FILES:  # shells leave `~` after `=` as it is
            if "~" in (given := str(asked[name].value)):
                asked[name].value = str(files.expanded(given))
        if asked.mode != "train" and _together(asked) is not None:
            raise UsageError(
                f"--mode={asked.mode} does not connect processes: leave out --distributed and"
                " --coordinator. Several of them evaluate with --shard=i/n each, under SLURM"
                " --shard=$SLURM_PROCID/$SLURM_NTASKS."
            )
        _check_taken(asked)
        settings = _override(_base_config(asked), overrides)
    except flags.Error as error:
        said = str(error).strip().rstrip(".")
        said = said if len(said) <= LONGEST_MESSAGE else f"{said[:LONGEST_MESSAGE]}..."
        raise UsageError(f"{said}. See --help.") from error
    _refuse_addresses(
        {"train.init_from": settings.train.init_from, "data.folder": settings.data.folder}
    )
    return asked, settings


def _check_taken(asked: flags.FlagValues) -> None:
    """Refuses a flag that the mode would ignore."""
    taken = [*FOLDERS.get(asked.mode, ()), *TAKES.get(asked.mode, "").split()]
    given = [name for name in asked if not asked[name].using_default_value]
    if wrong := [name for name in given if name not in (*taken, *TAKEN_BY_ALL)]:
        known = ", ".join(f"--{name}" for name in taken)
        raise UsageError(f"--mode={asked.mode} takes no --{wrong[0]}. It takes {known}.")
    if asked.task in ("ask", "point") and "out" in given:
        raise UsageError(f"--task={asked.task} prints its answer: leave --out out.")


def _refuse_addresses(given: dict[str, str]) -> None:
    """Refuses addresses, which would silently become a local folder named `gs:`."""
    for name, path in given.items():
        if "://" in path:
            raise UsageError(
                f"{name}={path} is an address, and only folders are read and written: mount a file"
                " system that every machine of the run reaches, and give the folder on it."
            )


def _together(asked: flags.FlagValues) -> tuple[str, int, int] | None:
    """Returns the arguments of `runtime.connect` if several processes train; None for one."""
    given = (asked.coordinator, asked.num_processes, asked.process_id)
    is_whole = asked.coordinator and asked.num_processes > 0 and asked.process_id >= 0
    if given != ("", 0, -1) and not is_whole:
        raise UsageError(
            "--coordinator=ADDRESS:PORT, --num_processes=N and --process_id=0..N-1 go together;"
            " with --distributed alone the environment tells all three."
        )
    return given if is_whole or asked.distributed else None


def _steps(words: str) -> range:
    """Returns the steps of `--profile_steps=10:13`: 10, 11 and 12."""
    first, _, last = words.partition(":")
    if not words:
        return range(0)
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise UsageError(f"--profile_steps={words} is no range of steps: write 10:13 for 10 to 12.")
    return range(int(first), int(last))


# Name, default, description. The default sets the type; a tuple lists the allowed values.
FLAGS: tuple[tuple[str, str | int | bool | tuple[str, ...], str], ...] = (
    ("mode", tuple(MODES), "What to do."),
    ("task", tuple(SAMPLE_TASKS), "What to do, by default draw, which edits if there is an image."),
    (
        "dtype",
        ("", "float32", "bfloat16", *quantize.DTYPES),
        "Number type of the parameters that are written; by default as they are. With it, export"
        " writes a model folder; int8 and float8 are only of the matrices in the layers.",
    ),
    (
        "format",
        ("", "safetensors", "orbax"),
        "File format of the parameters, by default safetensors. With it, export writes a model"
        " folder instead of one for PyTorch.",
    ),
    ("config", "", "Config file, as configs/scenes.py or, with a name, configs/evaluate.py:dpg."),
    ("workdir", "", "Folder of the run, for its states and results; by default runs/<name>."),
    ("checkpoint", "", f"Model: {MODEL_NAMES}."),
    ("adapters", "", f"{ADAPTERS[0].upper()}{ADAPTERS[1:]}, as in mine,other:0.5."),
    ("convert", False, "Convert a released LaViDa-O from the hub first; this is done only once."),
    ("prompt", "", "The prompt, instruction, question, or what to point at."),
    ("image", "", "The image to edit or to look at: PNG, JPEG or WebP."),
    ("out", "image.png", "File for the image that is drawn, by default image.png."),
    ("seed", 0, f"Seed of the random numbers, 0 to {LARGEST_SEED}; by default 0."),
    ("data", "", "Prepared folder to train on, without a config."),
    ("init_from", "", "With --data: the model to start from; by default, none."),
    ("image_tokenizer", "", "Image tokenizer to use, by default one trained on the images."),
    ("tokenizer", "", "Text tokenizer to use, by default one that is trained on the texts."),
    ("src", "", "What to convert, export, verify or prepare."),
    ("dst", "", "The folder to write."),
    ("dry_run", False, "Read all that would be prepared, say what would be used, write nothing."),
    ("json", False, "Print what was used and left out as JSON."),
    ("distributed", False, "Train in several processes, which the environment describes."),
    ("coordinator", "", "Address of process 0, as ADDRESS:PORT."),
    ("num_processes", 0, "Number of processes that train together, 1 or more."),
    ("process_id", -1, "Number of this process, from 0."),
    ("profile_steps", "", "Steps to trace, as 10:13 for 10 to 12, into profile/ of the run."),
    ("shard", "", "Items to evaluate: i/n takes every n-th, from i (0 to n-1); by default all."),
    ("stopped_exit_code", 0, "Exit code of training that SIGTERM stopped, 0 to 255; by default 0."),
    ("compilation_cache", "", "Folder for compiled programs, by default in ~/.cache; empty: none."),
    ("help", False, "Prints this."),
)


def _define(asked: flags.FlagValues) -> None:
    """Defines the flags."""
    kinds: dict[type, Callable[..., Any]] = {
        str: flags.DEFINE_string,
        bool: flags.DEFINE_boolean,
    }
    for name, default, meaning in FLAGS:
        if isinstance(default, tuple):
            flags.DEFINE_enum(name, default[0], default, meaning, flag_values=asked)
        elif name == "stopped_exit_code":
            flags.DEFINE_integer(name, 0, meaning, 0, 255, flag_values=asked)
        elif name == "compilation_cache":  # depends on the environment of the moment
            usual = str(runtime.programs_folder())
            flags.DEFINE_string(name, usual, meaning, flag_values=asked)
        elif type(default) is int:
            largest = LARGEST_SEED if name == "seed" else 2**31 - 1
            most = {"lower_bound": -(2**31), "upper_bound": largest}
            flags.DEFINE_integer(name, default, meaning, **most, flag_values=asked)
        else:
            kinds[type(default)](name, default, meaning, flag_values=asked)
    flags.DEFINE_alias("picture", "image", flag_values=asked)  # an older name


def _base_config(asked: flags.FlagValues) -> config.Config:
    """Returns the settings of a command line before `--config.x.y` changes."""
    mode, checkpoint = asked.mode, asked.checkpoint
    path = pathlib.Path(asked.config) if asked.config else None
    for name, meaning in FOLDERS.get(mode, {}).items():
        if not asked[name].value:
            given = "FILE" if meaning.startswith("a mixture") else "FOLDER"
            raise UsageError(f"--mode={mode} needs --{name}={given}, {meaning}.")
    if mode == "prepare" and path is None and pathlib.Path(asked.src).is_dir():
        from sparse_lavida_jax.training import own_images

        return own_images.preparing(pathlib.Path(asked.src), pathlib.Path(asked.dst))
    if mode in FOLDERS:
        return config.read(path) if mode == "prepare" and path else config.Config()
    if mode == "train":
        return _training_config(asked, path)
    given = f"--mode={mode}"
    if mode == "evaluate" and path is not None:
        checkpoint = checkpoint or config.read(path).evaluate.checkpoint
        given = f"--config={path}"
    if not checkpoint:
        names = ", ".join(model_folder.bundled_models()) or "none"
        raise UsageError(f"{given} needs --checkpoint: {MODEL_NAMES}. Bundled are: {names}.")
    if asked.convert:
        from sparse_lavida_jax.convert import from_torch

        from_torch.convert_from_hub(checkpoint)
    if mode == "sample" and not asked.prompt:
        raise UsageError("--mode=sample needs --prompt=WORDS, what to draw, change or answer.")
    if mode == "sample" and asked.task != "draw" and not asked.image:
        raise UsageError(f"--task={asked.task} needs --image=FILE, the image it is about.")
    if mode == "sample" and path is not None:
        return config.read(path)
    from sparse_lavida_jax.convert import adapters

    settings = model_folder.read_config(model_folder.find_model(checkpoint))
    settings = adapters.settings_with(settings, adapter_names.parse(asked.adapters))
    if path is not None:  # these replace the checkpoint's evaluation settings
        return config.read(path, settings)
    return _quick_evaluation(settings) if mode == "evaluate" else settings


def _quick_evaluation(settings: config.Config) -> config.Config:
    """Returns settings of an evaluation that ends in minutes, in a folder of its own."""
    evaluate = settings.evaluate
    if not evaluate.limit and settings.train.eval_prompts > QUICK_LIMIT:
        evaluate = dataclasses.replace(evaluate, limit=QUICK_LIMIT, batch_size=QUICK_LIMIT)
    return dataclasses.replace(settings, name=f"eval_{settings.name}", evaluate=evaluate)


def _training_config(asked: flags.FlagValues, path: pathlib.Path | None) -> config.Config:
    if not asked.data:
        if asked.init_from:
            raise UsageError(
                "--init-from goes with --data=FOLDER; a config names it as train.init_from."
            )
        if path is None:
            known = schema.listed(pathlib.Path("configs"))
            raise UsageError(f"training needs --config=FILE or --data=FOLDER. {known}")
        return config.read(path)
    if path is not None:
        raise UsageError(
            "--data goes without --config: a config names the folder as data.folder, with"
            " data.source='prepared'."
        )
    from sparse_lavida_jax.training import own_images

    folder = pathlib.Path(asked.data)
    if asked.init_from:
        return own_images.continued(folder, asked.init_from)
    return own_images.from_scratch(folder)


def _override(base: config.Config, words: list[str]) -> config.Config:
    """Returns the config with overrides such as `--config.train.train_steps=200` applied."""
    settings = config.to_dict(base)
    words = [schema.renamed(word) for word in words]
    for word in words:
        _check_name(word, settings)
    values, argv = flags.FlagValues(), ["main", *words]
    config_flags.DEFINE_config_dict(
        "config", ConfigDict(settings), flag_values=values, sys_argv=argv
    )
    values(argv)
    return config.build(config.Config, values.config)


def _check_name(word: str, settings: dict) -> None:
    name = word.lstrip("-").partition("=")[0].partition(".")[2]
    section, path = settings, "config"
    for part in name.split("."):
        if not isinstance(section, dict) or part not in section:
            known = ", ".join(section) if isinstance(section, dict) else "no parts: it is a value"
            raise UsageError(f"{path} has no {part!r}. It has: {known}.")
        section, path = section[part], f"{path}.{part}"


if __name__ == "__main__":
    sys.exit(main())
