# SPDX-License-Identifier: Apache-2.0
r"""Trains, samples and evaluates from the command line.

    python -m sparse_lavida_jax.main --config=configs/scenes.py
    python -m sparse_lavida_jax.main --config=configs/scenes.py --config.train.train_steps=200
    python -m sparse_lavida_jax.main --mode=sample --checkpoint=scenes --prompt="a red circle"
    python -m sparse_lavida_jax.main --mode=sample --checkpoint=scenes --task=ask \
        --image=image.png --prompt="how many red circles are there?"
    python -m sparse_lavida_jax.main --mode=evaluate --checkpoint=runs/scenes
    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/eval_geneval.py \
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
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

import rich.console
import rich.progress
from absl import flags
from ml_collections import ConfigDict, config_flags

from sparse_lavida_jax import config, runtime, schema
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.data.templates import RequestError
from sparse_lavida_jax.evals.files import EvaluationError
from sparse_lavida_jax.mixture.recipe import PrepareError
from sparse_lavida_jax.mixture.records import RecordError
from sparse_lavida_jax.training import runs

MODES = ("train", "sample", "evaluate", "convert", "export", "verify", "prepare")
FOLDERS = {  # flags that these modes need, and what they name
    "convert": {"src": "the released PyTorch folder", "dst": "the model folder to write"},
    "export": {"src": "a model folder or run directory", "dst": "the PyTorch folder to write"},
    "verify": {"src": "a model folder or run directory"},
    "prepare": {"src": "a mixture file (docs/data.md)", "dst": "the folder of shards to write"},
}
SAMPLE_TASKS = ("draw", "edit", "ask", "point")
PATHS = ("workdir", "checkpoint", "src", "dst", "out")  # flags
DEFAULT_MODEL = "scenes"
MISTAKE = 2


class UsageError(Exception):
    """A command line that asks for nothing we can do."""


MISTAKES = (
    config.ConfigError, model_folder.CheckpointError, runs.RunError, image_files.ImageError,
    RequestError, UsageError, PrepareError, RecordError, EvaluationError,
    runtime.ProcessError,
)  # fmt: skip
# OSError: a full disk, a file that is not there, a folder that may not be written.
OURS = (*MISTAKES, OSError)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line, read and checked."""

    mode: str
    config: config.Config
    workdir: pathlib.Path
    checkpoint: str
    task: str
    prompt: str
    image: pathlib.Path | None
    out: pathlib.Path
    seed: int
    src: str
    dst: str
    dtype: str | None
    together: runtime.Together | None
    profile_steps: range
    compilation_cache: str
    shard: str
    stopped_exit_code: int


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` by default, and returns the exit code."""
    try:
        return run(list(sys.argv if argv is None else argv))
    except OURS as error:
        print(f"sparse_lavida_jax: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("sparse_lavida_jax: stopped.", file=sys.stderr)
        return 130


def run(argv: list[str]) -> int:
    """Runs a command line and returns the exit code of what was done, or stopped and saved.

    Raises:
        any of OURS: what could not be done; the message says why.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain asks for flags of its own
    command = parse(argv)
    if command is None:
        return 0
    if command.compilation_cache:
        runtime.keep_programs(command.compilation_cache)
    try:
        return RUN[command.mode](command)
    except runs.Interrupted as stop:
        print(f"sparse_lavida_jax: {stop}", file=sys.stderr)
        return stop.exit_code or command.stopped_exit_code


def _train(command: Command) -> int:
    if command.config.data.source == "none":
        raise UsageError(
            f"the config {command.config.name} has no data to train on (data.source='none'):"
            " choose scenes, digits or prepared."
        )
    if command.together is not None:
        if command.config.train.stage == "vq":
            raise UsageError("train.stage='vq' is trained by one process: leave out --distributed.")
    with _together_with(command.together), runs.Run(command.workdir, command.config) as run:
        if command.config.train.stage == "denoiser":
            from sparse_lavida_jax import train

            train.train(command.config, run, command.profile_steps)
        else:
            from sparse_lavida_jax.training import train_vq

            train_vq.train(command.config, run.folder)
    return 0


@contextlib.contextmanager
def _together_with(others: runtime.Together | None) -> Iterator[None]:
    """Connects this process with the others, if there are any, for as long as it trains."""
    if others is None:
        yield
        return
    others.start()
    try:
        yield
    finally:
        others.end()


def _sample(command: Command) -> int:
    from sparse_lavida_jax.pipeline import SparseLaViDa

    shown = None if command.image is None else [image_files.read(command.image)]
    model = SparseLaViDa.from_pretrained(command.checkpoint, batch_size=1)
    asked, settings = [command.prompt], {"seed": command.seed, "sampling": command.config.sampling}
    if command.task in ("ask", "point"):
        print(model.write(asked, shown, **settings)[0].strip())
        return 0
    if shown is not None:
        (pixels,) = model.redraw(shown, asked, **settings)
    else:
        (pixels,) = model.draw(asked, **settings)
    image_files.write(command.out, pixels)
    print(f"{command.out}: {command.prompt}")
    return 0


def _evaluate(command: Command) -> int:
    from sparse_lavida_jax.evals import run

    title = f"{command.config.evaluate.benchmark}: {command.checkpoint}"
    with _progress(title, rich.progress.MofNCompleteColumn) as on_progress:
        said = run.evaluate(
            command.config, command.checkpoint, command.workdir,
            shard=command.shard, on_progress=on_progress,
        )  # fmt: skip
    print(said)
    return 0


def _convert(command: Command) -> int:
    from sparse_lavida_jax.convert import from_torch

    with _progress(f"{command.src} -> {command.dst}") as on_progress:
        done = from_torch.convert(
            command.src, command.dst, dtype=command.dtype, on_progress=on_progress
        )
    print(
        f"{command.dst}: {done.num_tensors} tensors, {done.num_parameters / 1e9:.3f} B parameters,"
        f" {', '.join(done.dtypes)}"
    )
    return 0


def _export(command: Command) -> int:
    from sparse_lavida_jax.convert import to_torch

    with _cleared_up_when_stopped():
        done = to_torch.export(command.src, command.dst)
    print(
        f"{command.dst}: {done.num_tensors} tensors, {done.num_parameters / 1e9:.3f} B parameters,"
        f" safetensors files: {done.num_shards}"
    )
    return 0


def _verify(command: Command) -> int:
    folder = model_folder.find_model(command.src)
    print(f"{folder}: {model_folder.verify(folder)} files, all as they were written")
    return 0


def _prepare(command: Command) -> int:
    from sparse_lavida_jax.mixture import prepare
    from sparse_lavida_jax.models import codec

    load_encoder = functools.partial(codec.ImageEncoder, command.config.data.image_codec)
    title = f"{command.src} -> {command.dst}"
    with _progress(title, rich.progress.MofNCompleteColumn) as on_progress:
        done = prepare.prepare(command.src, command.dst, command.config, load_encoder, on_progress)
    print(
        f"{command.dst}: {done.records} records in {done.shards} shards, of which {done.made} were"
        f" made now; {done.left_out} rows left out, {done.bad} bad, as {prepare.READABLE} says"
    )
    return 0


@contextlib.contextmanager
def _progress(
    title: str, column: type[rich.progress.ProgressColumn] = rich.progress.DownloadColumn
) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar on a terminal, and nothing elsewhere."""
    console = rich.console.Console(stderr=True)
    bar = rich.progress.Progress(
        "{task.description}", rich.progress.BarColumn(), column(),
        rich.progress.TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with _cleared_up_when_stopped(), bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def _cleared_up_when_stopped() -> Iterator[None]:
    """Lets SIGTERM end the command like Ctrl-C does: what is half-written is removed."""

    def stop(number, frame):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


RUN = {
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


def parse(argv: list[str]) -> Command | None:
    """Reads a command line; None where it only asked for help, which is then printed.

    Raises:
        ConfigError, CheckpointError, UsageError: it cannot be followed; the message says why.
    """
    # Values of our own, so that a second call in one process starts from nothing.
    values = flags.FlagValues()
    _define(values)
    overrides = [word for word in argv if word.lstrip("-").startswith(("config.", "noconfig."))]
    try:
        _, *left = values([word for word in argv if word not in overrides])
        if values.help:
            print(__doc__, values.get_help(), sep="\n")
            return None
        if left:
            raise UsageError(f"{left[0]!r} is no setting. Write settings as --name=value.")
        if values.mode in FOLDERS and values.mode != "prepare" and overrides:
            raise UsageError(f"--mode={values.mode} takes no settings of a config: {overrides[0]}.")
        _refuse_addresses({f"--{name}": getattr(values, name) for name in PATHS})
        together = _together(values)
        if together is not None and values.mode != "train":
            raise UsageError(
                f"--mode={values.mode} does not connect processes: leave out --distributed and"
                " --coordinator. Several of them evaluate with --shard=i/n each, under SLURM"
                " --shard=$SLURM_PROCID/$SLURM_NTASKS."
            )
        settings = _override(_base_config(values), overrides)
    except flags.Error as error:
        raise UsageError(f"{str(error).strip().rstrip('.')}. See --help.") from error
    _refuse_addresses(
        {"train.init_from": settings.train.init_from, "data.folder": settings.data.folder}
    )
    return Command(
        mode=values.mode,
        config=settings,
        workdir=pathlib.Path(values.workdir or pathlib.Path("runs") / settings.name),
        checkpoint=values.checkpoint or settings.evaluate.checkpoint,
        task=values.task,
        prompt=values.prompt,
        image=pathlib.Path(values.image) if values.image else None,
        out=pathlib.Path(values.out),
        seed=values.seed,
        src=values.src,
        dst=values.dst,
        dtype=values.dtype or None,
        together=together,
        profile_steps=_steps(values.profile_steps),
        compilation_cache=values.compilation_cache,
        shard=values.shard,
        stopped_exit_code=values.stopped_exit_code,
    )


def _refuse_addresses(given: dict[str, str]) -> None:
    """Refuses what would silently be a folder called `gs:` of this machine."""
    for name, path in given.items():
        if "://" in path:
            raise UsageError(
                f"{name}={path} is an address, and only folders are read and written: mount a file"
                " system that every machine of the run reaches, and give the folder on it."
            )


def _together(values: flags.FlagValues) -> runtime.Together | None:
    """Returns where the processes of a run meet; None where there is one."""
    explicit = (values.coordinator, values.num_processes, values.process_id)
    if explicit != ("", 0, -1):
        if values.coordinator and values.num_processes > 0 and values.process_id >= 0:
            return runtime.Together(*explicit)
        raise UsageError(
            "--coordinator=ADDRESS:PORT, --num_processes=N and --process_id=0..N-1 go together;"
            " with --distributed alone the environment tells all three."
        )
    return runtime.Together() if values.distributed else None


def _steps(words: str) -> range:
    """Returns the steps of `--profile_steps=10:13`: 10, 11 and 12."""
    first, _, last = words.partition(":")
    if not words:
        return range(0)
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise UsageError(f"--profile_steps={words} is no range of steps: write 10:13 for 10 to 12.")
    return range(int(first), int(last))


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("config", "", "A file of configs/.", flag_values=values)
    flags.DEFINE_enum("mode", "train", MODES, "What to do.", flag_values=values)
    flags.DEFINE_string("workdir", "", "Run directory; by default runs/<name>.", flag_values=values)
    flags.DEFINE_string(
        "checkpoint", "", "A model folder, a run directory, or a bundled model.", flag_values=values
    )
    flags.DEFINE_enum("task", "draw", SAMPLE_TASKS, "What to sample.", flag_values=values)
    flags.DEFINE_string("prompt", "", "What to draw, change, or answer.", flag_values=values)
    flags.DEFINE_string("image", "", "An image to change or to look at.", flag_values=values)
    flags.DEFINE_alias("picture", "image", flag_values=values)  # its older name
    flags.DEFINE_string("out", "image.png", "Where the drawn image goes.", flag_values=values)
    flags.DEFINE_integer("seed", 0, "Of sampling.", flag_values=values)
    flags.DEFINE_string("src", "", "What to convert, export, verify, prepare.", flag_values=values)
    flags.DEFINE_string("dst", "", "The folder that they write.", flag_values=values)
    flags.DEFINE_enum(
        "dtype", "", ("", "float32", "bfloat16"),
        "Of converted parameters; by default as released.", flag_values=values,
    )  # fmt: skip
    flags.DEFINE_boolean(
        "distributed", False, "Several processes train together; the environment says which.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string("coordinator", "", "ADDRESS:PORT of process 0.", flag_values=values)
    flags.DEFINE_integer("num_processes", 0, "That train together.", flag_values=values)
    flags.DEFINE_integer("process_id", -1, "Of this process, from 0.", flag_values=values)
    flags.DEFINE_string(
        "profile_steps", "", "Steps to trace, such as 10:13, into profile/ in the run directory.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string(
        "compilation_cache", str(runtime.programs_folder()),
        "Keeps compiled programs; empty: nothing is kept.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string(
        "shard", "", "Which items to evaluate, as i/n: every n-th from the i-th (0 the first) on."
        " By default each process of a cluster takes its share.", flag_values=values,
    )  # fmt: skip
    flags.DEFINE_integer(
        "stopped_exit_code", 0, "Of training that SIGTERM stopped with everything saved: a launcher"
        " that starts it again has to tell it from the end.", lower_bound=0, upper_bound=255,
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_boolean("help", False, "Prints this.", flag_values=values)


def _base_config(values: flags.FlagValues) -> config.Config:
    if values.mode in FOLDERS:
        for name, meaning in FOLDERS[values.mode].items():
            if not values[name].value:
                given = "FILE" if meaning.startswith("a mixture") else "FOLDER"
                raise UsageError(f"--mode={values.mode} needs --{name}={given}, {meaning}.")
        if values.mode == "prepare" and values.config:
            return config.read(pathlib.Path(values.config))
        return config.Config()
    if values.mode == "train":
        if not values.config:
            known = schema.listed(pathlib.Path("configs"))
            raise UsageError(f"training needs --config=FILE. {known}")
        return config.read(pathlib.Path(values.config))
    if values.mode == "evaluate" and values.config:
        return _evaluate_config(values.checkpoint, pathlib.Path(values.config))
    if not values.checkpoint:
        raise UsageError(
            f"--mode={values.mode} needs --checkpoint: a model folder, a run directory, or the"
            f" name of a bundled model ({', '.join(model_folder.bundled_models()) or 'none'})."
        )
    if values.mode == "sample" and not values.prompt:
        raise UsageError('--mode=sample needs --prompt="what to draw".')
    if values.mode == "sample" and values.task != "draw" and not values.image:
        raise UsageError(f"--task={values.task} needs --image=FILE, the image it is about.")
    if values.config:
        return config.read(pathlib.Path(values.config))
    settings = model_folder.read_config(model_folder.find_model(values.checkpoint))
    if values.mode == "evaluate":  # its results have a folder of their own
        return dataclasses.replace(settings, name=f"eval_{settings.name}")
    return settings


def _evaluate_config(name: str, path: pathlib.Path) -> config.Config:
    """Returns the settings of a checkpoint with those of a config file in their place."""
    name = name or config.read(path).evaluate.checkpoint
    if not name:
        raise UsageError(
            f"--config={path} needs --checkpoint: a model folder, a run directory, or the name of a"
            f" bundled model ({', '.join(model_folder.bundled_models()) or 'none'})."
        )
    return config.read(path, model_folder.read_config(model_folder.find_model(name)))


def _override(base: config.Config, words: list[str]) -> config.Config:
    """Returns the config with settings like `--config.train.train_steps=200` put in."""
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
