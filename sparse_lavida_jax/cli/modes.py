# SPDX-License-Identifier: Apache-2.0
"""What the modes of `main.py` do, which are commands of `sparse-lavida` as well."""

import argparse
import contextlib
import dataclasses
import functools
import json
import pathlib
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from sparse_lavida_jax import config, old_names, runtime, schema
from sparse_lavida_jax.checkpoints import adapter_names, model_folder, room
from sparse_lavida_jax.cli.arguments import MODEL_NAMES, SAMPLE_TASKS
from sparse_lavida_jax.cli.terminal import progress, say
from sparse_lavida_jax.cli.usage_errors import LONGEST_MESSAGE, STOPPED, UsageError, need
from sparse_lavida_jax.inference.checks import fold
from sparse_lavida_jax.programs.folder import keep_programs
from sparse_lavida_jax.training import runs

FOLDERS = ("convert", "export", "verify", "prepare")  # modes from a folder to a folder
PATHS = ("data", "init_from", "workdir", "checkpoint", "src", "dst", "out")  # arguments
QUICK_LIMIT = 32  # items of each task that are evaluated without a config, in one batch
GO_ON = ("train", "evaluate", "prepare")  # modes that keep what was finished before Ctrl-C


def run(name: str, asked: argparse.Namespace) -> int:
    """Runs a mode and returns the exit code of what was done, or stopped and saved.

    Raises:
        one of usage_errors.MISTAKES: the mode cannot be carried out; the message says why.
        OSError: something could not be read or written.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain reads flags of its own
    settings = settings_of(name, asked)
    keep_programs(asked.compilation_cache)
    try:
        # Training saves its state before it stops.
        with contextlib.nullcontext() if name == "train" else _cleared_up_when_stopped():
            if done := RUN[name](asked, settings):
                print(done)
    except runs.Interrupted as stop:
        say(str(stop))
        return stop.exit_code or asked.stopped_exit_code or 0
    except KeyboardInterrupt:
        kept = "What is finished is kept, and the same command goes on."
        say(f"stopped. {kept if name in GO_ON else 'Nothing was written.'}")
        return STOPPED
    return 0


# ---------------------------------------------------------------------------------------------
# The modes. Each returns its final message, if any.


def _train(asked: argparse.Namespace, settings: config.Config) -> None:
    together, steps = _together(asked), _steps(asked.profile_steps or "")
    if settings.data.source == "none":
        raise UsageError(
            f"the config {settings.name} has no data to train on (data.source='none'):"
            " choose scenes, art or prepared."
        )
    stage = settings.train.stage
    if together is not None and stage != "denoiser":
        raise UsageError(
            f"train.stage={stage!r} is trained by one process: leave out --distributed."
        )
    with contextlib.ExitStack() as stack:
        if together is not None:
            at = together[0] and f" at {together[0]}"
            say(f"waiting for {together[1] or 'all'} processes to connect{at}")
            runtime.connect(*together)
            stack.callback(runtime.disconnect)
        if stage == "denoiser":
            from sparse_lavida_jax.models.stack import admit_kernel_for
            from sparse_lavida_jax.training import start

            start.check(settings)
            admit_kernel_for(settings.model, gradients=True)
        runtime.keep_freed_memory()
        run = stack.enter_context(runs.Run(_workdir(asked, settings), settings))
        if stage == "denoiser":
            from sparse_lavida_jax import train

            if asked.data:
                from sparse_lavida_jax.training import own_images

                say(own_images.size_in_words(settings))

            train.train(settings, run, steps)
        elif stage == "preview":
            from sparse_lavida_jax.training import train_preview

            train_preview.train(settings, run.folder, run.is_asked_to_stop)
        else:
            from sparse_lavida_jax.training import train_vq

            train_vq.train(settings, run.folder, run.is_asked_to_stop)


def _sample(asked: argparse.Namespace, settings: config.Config) -> None:
    from sparse_lavida_jax.cli import commands

    task = "edit" if asked.task == "draw" and asked.image else SAMPLE_TASKS[asked.task]
    adapters = asked.adapters or ""
    more = {"adapters": adapters, "seed": asked.seed, "sampling": settings.sampling}
    out = pathlib.Path(asked.out or "image.png")
    commands.sample(task, asked.prompt, asked.image or "", out, asked.checkpoint, **more)


def _evaluate(asked: argparse.Namespace, settings: config.Config) -> str:
    from sparse_lavida_jax.evals import run

    checkpoint = asked.checkpoint or settings.evaluate.checkpoint
    folder = _workdir(asked, settings)
    with progress(f"{checkpoint} on {settings.evaluate.benchmark}") as on_progress:
        how: dict[str, Any] = {"adapters": asked.adapters or "", "shard": asked.shard or ""}
        if not asked.config and settings.evaluate.limit == QUICK_LIMIT:
            say(
                f"{QUICK_LIMIT} items per task, of {settings.train.eval_prompts}:"
                " --config.evaluate.limit=0 evaluates all."
            )
        told = {"on_progress": on_progress, "on_note": say}
        return run.evaluate(settings, checkpoint, folder, **how, **told)


def _convert(asked: argparse.Namespace, settings: config.Config) -> str:
    from sparse_lavida_jax.convert import from_torch

    src, dst, dtype = asked.src, asked.dst, asked.dtype or None
    with progress(f"{src} -> {dst}", in_bytes=True) as on_progress:
        how: dict[str, Any] = {"dtype": dtype, "kind": asked.format or "safetensors"}
        done = from_torch.convert(src, dst, **how, on_progress=on_progress)
    return f"{_written(dst, done)}, {', '.join(done.dtypes)}"


def _export(asked: argparse.Namespace, settings: config.Config) -> str:
    from sparse_lavida_jax.convert import adapters, to_torch

    weights = adapter_names.parse(asked.adapters or "")
    if asked.format or asked.dtype:
        kind = asked.format or "safetensors"
        count = adapters.copy(asked.src, asked.dst, weights, kind, dtype=asked.dtype or "")
        return f"{asked.dst}: {count} tensors"
    done = to_torch.export(asked.src, asked.dst, adapters=weights)
    return f"{_written(asked.dst, done)}, safetensors files: {done.num_shards}"


def _written(dst: str, done: Any) -> str:
    return f"{dst}: {done.num_tensors:,} tensors, {done.num_parameters:,} parameters"


def _verify(asked: argparse.Namespace, settings: config.Config) -> str:
    from sparse_lavida_jax.models import vq_files
    from sparse_lavida_jax.prompting.protocol import prompt_format
    from sparse_lavida_jax.prompting.vocabulary import Vocabulary

    folder = model_folder.find_model(asked.src)
    count = model_folder.verify(folder)
    if (folder / "vq").is_dir():
        vq_files.load(folder / "vq")
    try:
        prompt_format(model_folder.read_config(folder).prompts).tokenizer_type(
            folder / "tokenizer.json"
        )
        Vocabulary.read(folder)
    except (ValueError, FileNotFoundError) as error:
        raise model_folder.CheckpointError(str(error)) from error
    return f"{folder}: {count} files, all as they were written"


def _prepare(asked: argparse.Namespace, settings: config.Config) -> str:
    from sparse_lavida_jax.mixture import prepare
    from sparse_lavida_jax.models import image_codec
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
    text = own_images.text_tokenizer(asked.tokenizer or "") if with_tokenizers else ""
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
            load_encoder = functools.partial(image_codec.ImageTokenizer, codec)
            how = {"found": given.found, "sentences": sentences}
            done = prepare.fill(given.recipe, dst, settings, load_encoder, on_progress, **how)
        if with_tokenizers:
            own_images.place_text_tokenizer(dst, text, say)
    following = f"Next: sparse-lavida train --data={asked.dst}" * bool(with_tokenizers)
    return _preparation(asked, done, following)


def _preparation(asked: argparse.Namespace, done: Any, following: str) -> str:
    """Returns what a preparation used and left out, as text or JSON."""
    from sparse_lavida_jax.mixture import preparation_report

    if asked.json:
        values = dataclasses.asdict(done) | {"table": preparation_report.as_json(done.table)}
        return json.dumps({"folder": asked.dst, "dry_run": asked.dry_run} | values)
    made = "" if asked.dry_run else f", {done.made} of {done.shards} shard(s) made now"
    head = (
        f"{asked.dst}: {done.records} records{made}; {done.left_out} rows left out, {done.bad} bad,"
        f" as {'follows' if asked.dry_run else preparation_report.READABLE + ' says'}"
    )
    return "\n".join(filter(None, [head, preparation_report.as_text(done.table), following]))


def _fits(asked: argparse.Namespace, settings: config.Config) -> str:
    from sparse_lavida_jax.cli import fits

    found = fits.report(asked, settings)
    told = json.dumps(found) if asked.json else fits.text(found)
    if found["fits"]:
        return told
    print(told)
    raise room.RoomError(found["why"])


def _workdir(asked: argparse.Namespace, settings: config.Config) -> pathlib.Path:
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


RUN: dict[str, Callable[[argparse.Namespace, config.Config], str | None]] = {
    "train": _train,
    "sample": _sample,
    "evaluate": _evaluate,
    "convert": _convert,
    "export": _export,
    "verify": _verify,
    "prepare": _prepare,
    "fits": _fits,
}

# ---------------------------------------------------------------------------------------------
# The command line.


def settings_of(name: str, asked: argparse.Namespace) -> config.Config:
    """Checks the arguments of a mode, and returns its settings with all changes.

    Raises:
        ConfigError, CheckpointError, UsageError: they cannot be followed; the message says why.
    """
    given = vars(asked)
    _refuse_addresses({name: given[name] or "" for name in PATHS if name in given})
    settings = _override(_base_config(name, asked), asked.overrides)
    _refuse_addresses(
        {"train.init_from": settings.train.init_from, "data.folder": settings.data.folder}
    )
    return settings


def _refuse_addresses(given: Mapping[str, str]) -> None:
    """Refuses addresses, which would silently become a local folder named `gs:`."""
    for name, path in given.items():
        if "://" in path:
            raise UsageError(
                "{setting}={value} is an address, and {allowed}.",
                setting=name,
                value=path,
                allowed="only folders are read and written: mount a file system that every machine"
                " of the run reaches, and give the folder on it",
            )


def _together(asked: argparse.Namespace) -> tuple[str, int, int] | None:
    """Returns the arguments of `runtime.connect` if several processes train; None for one."""
    number = -1 if asked.process_id is None else asked.process_id
    given = (asked.coordinator or "", asked.num_processes or 0, number)
    is_whole = given[0] and given[1] > 0 and number >= 0
    if given != ("", 0, -1) and not is_whole:
        raise UsageError(
            "--coordinator=ADDRESS:PORT, --num-processes=N and --process-id=0..N-1 go together;"
            " with --distributed alone the environment tells all three."
        )
    return given if is_whole or asked.distributed else None


def _steps(words: str) -> range:
    """Returns the steps of `--profile-steps=10:13`: 10, 11 and 12."""
    first, _, last = words.partition(":")
    if not words:
        return range(0)
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise UsageError(
            "{setting}={value} is not a range of steps: {allowed}.",
            setting="profile_steps",
            value=words,
            allowed="write 10:13 for 10 to 12",
        )
    return range(int(first), int(last))


def _base_config(name: str, asked: argparse.Namespace) -> config.Config:
    """Returns the settings of a command line before `--config.x.y` changes."""
    path = pathlib.Path(asked.config) if getattr(asked, "config", "") else None
    if name == "prepare" and path is None and pathlib.Path(asked.src).is_dir():
        from sparse_lavida_jax.training import own_images

        return own_images.preparing(pathlib.Path(asked.src), pathlib.Path(asked.dst))
    if name in (*FOLDERS, "fits"):
        return config.read(path) if path is not None else config.Config()
    if name == "train":
        return _training_config(asked, path)
    if name == "evaluate" and path is not None and not asked.checkpoint:
        asked.checkpoint = config.read(path).evaluate.checkpoint
    bundled = ", ".join(model_folder.bundled_models()) or "none"
    need(asked, "checkpoint", f"{MODEL_NAMES}. Bundled are: {bundled}")
    if name == "sample":
        _check_sample(asked)
    if asked.convert:
        from sparse_lavida_jax.convert import from_torch

        from_torch.convert_from_hub(asked.checkpoint)
    if name == "sample" and path is not None:
        return config.read(path)
    from sparse_lavida_jax.convert import adapters

    settings = model_folder.read_config(model_folder.find_model(asked.checkpoint))
    settings = adapters.settings_with(settings, adapter_names.parse(asked.adapters or ""))
    if path is not None:  # these replace the checkpoint's evaluation settings
        return config.read(path, settings)
    return _quick_evaluation(settings) if name == "evaluate" else settings


def _check_sample(asked: argparse.Namespace) -> None:
    need(asked, "prompt", "what to draw, change or answer")
    asked.seed = fold(asked.seed or 0)
    if asked.task in ("ask", "point") and asked.out:
        raise UsageError(f"--task={asked.task} prints its answer: leave --out out.")
    if asked.task != "draw" and not asked.image:
        raise UsageError(f"--task={asked.task} needs --image=FILE, the image it is about.")


def _quick_evaluation(settings: config.Config) -> config.Config:
    """Returns settings of an evaluation that ends in minutes, in a folder of its own."""
    from sparse_lavida_jax.evals import benchmarks

    evaluate = settings.evaluate
    is_usual = evaluate.benchmark == config.Evaluate().benchmark
    if is_usual and settings.data.source in benchmarks.names():  # a world has one of its own
        evaluate = dataclasses.replace(evaluate, benchmark=settings.data.source)
    if not evaluate.limit and settings.train.eval_prompts > QUICK_LIMIT:
        evaluate = dataclasses.replace(evaluate, limit=QUICK_LIMIT, batch_size=QUICK_LIMIT)
    return dataclasses.replace(settings, name=f"eval_{settings.name}", evaluate=evaluate)


def _training_config(asked: argparse.Namespace, path: pathlib.Path | None) -> config.Config:
    if not asked.data:
        if asked.init_from:
            raise UsageError(
                "--init-from goes with --data=FOLDER; a config names it as train.init_from."
            )
        if path is None:
            known = schema.listed(pathlib.Path("configs"))
            message = f"{asked.command} needs {{setting}} or --data=FOLDER. {known}{asked.example}"
            raise UsageError(message, setting="config")
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
    for word in words:
        _check_name(word, settings)
    values, argv = flags.FlagValues(), ["main", *words]
    config_flags.DEFINE_config_dict(
        "config", ConfigDict(settings), flag_values=values, sys_argv=argv
    )
    try:
        values(argv)
    except flags.Error as error:
        said = str(error).removeprefix("flag ").strip().rstrip(".")
        said = said if len(said) <= LONGEST_MESSAGE else f"{said[:LONGEST_MESSAGE]}..."
        raise UsageError(f"{said}.") from error
    return config.build(config.Config, values.config)


def _check_name(word: str, settings: dict) -> None:
    name = word.lstrip("-").partition("=")[0].partition(".")[2]
    section, path = settings, "config"
    for part in name.split("."):
        if not isinstance(section, dict) or part not in section:
            known = ", ".join(section) if isinstance(section, dict) else "no parts: it is a value"
            hint = f" {old_names.hint(part, section=path.rpartition('.')[2])}".rstrip()
            raise UsageError(f"{path} has no {part!r}.{hint} It has: {known}.")
        section, path = section[part], f"{path}.{part}"
