# SPDX-License-Identifier: Apache-2.0
r"""The `sparse-lavida` command: draw, edit, ask, train, convert and serve.

    sparse-lavida generate "a red circle above a blue square" --out out.png
    sparse-lavida ask out.png "how many squares are there?"
    sparse-lavida convert LaViDa-O-v1.0 models/lavida-o
    sparse-lavida verify models/lavida-o
    sparse-lavida export runs/mine for-pytorch

`sparse-lavida COMMAND --help` shows an example and all options. Exit codes: 0 done, 2 a mistake in
what was asked, 1 what the machine could not do, such as a full disk, 130 stopped by Ctrl-C.
"""

import argparse
import dataclasses
import difflib
import re
import sys
import textwrap
import traceback
from collections.abc import Sequence
from typing import Any

from sparse_lavida_jax import main as full
from sparse_lavida_jax import runtime
from sparse_lavida_jax.apps import completion
from sparse_lavida_jax.apps.arguments import ARGUMENTS
from sparse_lavida_jax.apps.errors import DEFAULT_MODEL, SECTION, UsageError, about_path
from sparse_lavida_jax.apps.tasks import FORMS
from sparse_lavida_jax.apps.terminal import FAILURE, output_escaped, quiet, say, warnings_said
from sparse_lavida_jax.checkpoints import model_folder, room
from sparse_lavida_jax.inference.requests import TASKS
from sparse_lavida_jax.main import LONGEST_MESSAGE, MISTAKE, MISTAKES, STOPPED
from sparse_lavida_jax.programs import jax_settings
from sparse_lavida_jax.sampling import options
from sparse_lavida_jax.scenes import vocabulary
from sparse_lavida_jax.version import __version__


@dataclasses.dataclass(frozen=True)
class Mode:
    """A mode of `main`: what it does, an example, and the flags that may be given by position."""

    does: str
    example: str
    places: tuple[str, ...]


MODES = {
    "train": Mode("train a model, or resume a run", "configs/scenes.py", ("config",)),
    "sample": Mode(
        "draw, edit or answer once, with any setting of the config",
        'scenes "a red circle" --config.sampling.num_steps=4',
        ("checkpoint", "prompt"),
    ),
    "evaluate": Mode("score a model on a benchmark", "scenes", ("checkpoint",)),
    "convert": Mode(
        "convert a released LaViDa-O to a model folder",
        "LaViDa-O-v1.0 models/lavida-o",
        ("src", "dst"),
    ),
    "export": Mode(
        "write a model for PyTorch, or in another number type", "runs/mine new", ("src", "dst")
    ),
    "verify": Mode("check that no file of a model has changed", "models/lavida-o", ("src",)),
    "prepare": Mode(
        "turn images, captions and questions into training data", "photos prepared", ("src", "dst")
    ),
}
LINE = 96  # characters
# A setting at the start of a message; the group is the option that sets it.
_SETTING = re.compile(rf"^({'|'.join(('seed', 'num_images', *options.OPTIONS))})=")
_NO_VALUE = re.compile(r"--[\w-]+=--")
NO_DEVICE = ("Unable to initialize backend", "Unknown backend")  # jax's messages in that case


class Parser(argparse.ArgumentParser):
    """Reports mistakes in one sentence."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        words = [*(sys.argv[1:] if args is None else args)]
        options = words[: words.index("--")] if "--" in words else words
        # Python 3.11 to 3.13 differ: to some, `--steps=--` is an empty list.
        if wrong := next((word for word in options if _NO_VALUE.fullmatch(word)), None):
            self.error(f"argument {wrong.removesuffix('=--')}: '--' is not a value")
        return super().parse_known_args(words, namespace)

    def error(self, message: str):
        said = re.sub(r"invalid (.+) value: (.+)", r"\2 is no \1", message.rstrip("."))
        said = said if len(said) <= LONGEST_MESSAGE else f"{said[:LONGEST_MESSAGE]}..."
        raise UsageError(f"{said}. See `{self.prog} --help`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` by default, and returns the exit code."""
    program, name, *rest = [*(sys.argv if argv is None else argv), "help"]
    rest = rest[:-1]  # "help" if there is nothing else
    if "--debug" in rest:
        with output_escaped():
            return _run(program, name, rest)
    try:
        with quiet("--quiet" in rest), output_escaped(), warnings_said():
            with runtime.interrupts_heard():
                return _run(program, name, rest)
    except Exception as error:
        sentence, code = _explained(error, name)
        # A mistake in the arguments of a mode may be reported as a list, one per line.
        say(sentence if name in MODES and code == MISTAKE else " ".join(sentence.split()))
        return code
    except KeyboardInterrupt:
        say("stopped.")
        return STOPPED


@jax_settings.defaults()
def _run(program: str, name: str, words: Sequence[str]) -> int:
    if name in ("help", "-h", "--help", "--version"):
        print(__version__ if name == "--version" else _overview())
        return 0
    if name not in COMMANDS and name not in MODES:
        near = difflib.get_close_matches(name, (*COMMANDS, *MODES), 1)
        meant = f"Did you mean {near[0]!r}? " if near else ""
        say(f"there is no command {name!r}. {meant}`sparse-lavida --help` lists all commands.")
        return MISTAKE
    if name in MODES:
        if {"-h", "--help"} & {*words}:
            _any_parser(name).print_help()
            return 0
        own = [word for word in words if word not in ("--debug", "--quiet")]
        return full.run([program, *_mode_words(name, own)])
    parser = parser_of(name)
    try:
        asked = parser.parse_args(words)
    except SystemExit:  # --help
        return 0
    if name == "generate" and asked.replay is not None:
        _check_replay(parser, asked)
    if name == "completion":
        parsers = {one: _any_parser(one) for one in (*COMMANDS, *MODES)}
        print(completion.script(asked.shell, parsers))
        return 0
    if name in ("demo", "serve"):
        from sparse_lavida_jax.apps import hosting

        return hosting.run(name, asked)
    from sparse_lavida_jax.apps import commands  # takes seconds

    return commands.run(name, asked)


def _explained(error: Exception, name: str) -> tuple[str, int]:
    """Returns the sentence that reports an error of a command, and the exit code."""
    said = str(error).replace(f"--mode={name} ", f"`sparse-lavida {name}` ")
    if name in COMMANDS:
        said = SECTION.sub("", said)
        said = _SETTING.sub(lambda found: f"--{found[1].replace('_', '-')}=", said)
    if isinstance(error, (model_folder.WriteError, room.RoomError)):
        return said, FAILURE
    if not isinstance(error, MISTAKES) and (sentence := about_path(error)):
        return sentence, FAILURE if isinstance(error, OSError) else MISTAKE
    if isinstance(error, OSError):
        return said, FAILURE
    if isinstance(error, MISTAKES):
        if name in MODES:  # as the help names them
            places = rf"needs --({'|'.join(MODES[name].places)})(=[A-Z]+)?"
            said, missing = re.subn(places, r"needs the argument \1", said)
            if missing:
                said += f" For example: `sparse-lavida {name} {MODES[name].example}`."
        return said, MISTAKE
    less = {
        "train": "lower train.batch_size or raise train.microbatches (docs/training.md)",
        "evaluate": "lower evaluate.batch_size",
    }.get(name, "use a machine that has more" if name in MODES else "lower --batch-size")
    if runtime.out_of_memory(error):
        where = "there is" if isinstance(error, MemoryError) else "the device has"
        return f"{where} not enough memory: {less}.", FAILURE
    at = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if any(part in said for part in NO_DEVICE) or (at and at[-1].endswith("xla_bridge.py")):
        said = said.rstrip(".") or "no package for its platform is installed"
        return (
            f"jax cannot use the device that was asked for: {said}. JAX_PLATFORMS=cpu takes the"
            " CPU; without that variable, `sparse-lavida doctor` says which devices there are."
        ), FAILURE
    return (
        f"an error of the program: {type(error).__name__}: {said} Run it with --debug to see where."
    ), FAILURE


def _overview() -> str:
    width = max(map(len, COMMANDS))
    tasks = (f"    {name:{width}}  {command.does}" for name, command in COMMANDS.items())
    modes = (f"    {name:{width}}  {mode.does}" for name, mode in MODES.items())
    return "\n".join([__doc__ or "", "Commands:", "", *tasks, *modes, "", _known()])


def _mode_words(mode: str, words: Sequence[str]) -> list[str]:
    """Returns a command line of `main`, with names added to positional arguments."""
    switches = {f"--{flag}" for flag, default, _ in full.FLAGS if default is False}
    plain, settings, is_open = [], [], False
    for word in words:
        if word.startswith("-"):
            settings.append(_underscored(word))
            is_open = "=" not in word and settings[-1] not in switches
        elif is_open:  # `--data prepared`, which says the same as `--data=prepared`
            settings[-1], is_open = f"{settings[-1]}={word}", False
        else:
            plain.append(word)
    names = MODES[mode].places
    named = [f"--{name}={value}" for name, value in zip(names, plain, strict=False)]
    return [f"--mode={mode}", *named, *settings, *plain[len(names) :]]


def _underscored(word: str) -> str:
    """Returns an option in the spelling of `main`: `--init-from=x` as `--init_from=x`."""
    name, equals, value = word.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value


def _check_replay(parser: Parser, asked: argparse.Namespace) -> None:
    """Refuses options of `generate --replay` that `replay` does not take."""
    taken = vars(parser_of("replay").parse_args(["PNG"]))
    for key, value in vars(asked).items():
        if key not in taken and value != parser.get_default(key):
            named = "the prompt" if key == "prompt" else f"--{key.replace('_', '-')}"
            raise UsageError(f"--replay draws an image as it was drawn: leave {named} out.")


# ---------------------------------------------------------------------------------------------
# Commands.


_LOADED = "checkpoint adapters convert mesh compilation_cache"
_MODEL = f"{_LOADED} batch_size json json_full quiet debug"
_SAMPLING = "steps registers temperature quantize"
_CHATTING = "image_steps image_sampler registers image_temperature layout_temperature quantize seed"
_DRAWING = "out scale grid save_steps num_images plan no_plan guidance order vq_dtype"
_HOSTING = (
    f"{_LOADED} host port batch_size longest_wait max_waiting programs"
    " content_cache_gb only grace api_key insecure warmup quiet debug"
)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: what it does, an example without its name, and the keys of its arguments."""

    does: str
    example: str
    arguments: str


_SERVED = "serve a model with the endpoints of OpenAI's API"
_CHAT = "run tasks from the standard input, one per line, such as: generate two red circles"
COMMANDS = {
    name: Command(
        form.does,
        form.example,
        f"{form.options} {_DRAWING * TASKS[name].draws}"
        f" {'layout_temperature' * ('layout_temperature' in TASKS[name].takes)} {_SAMPLING}"
        f" {'image_' * TASKS[name].draws}sampler seed {_MODEL}",
    )
    for name, form in FORMS.items()
} | {
    "chat": Command(
        _CHAT, "--out turns < lines.txt", f"first_image turns scale {_CHATTING} {_MODEL}"
    ),
    "replay": Command(
        "draw the image of a PNG again, bit for bit",
        "out.png --out again.png",
        f"replayed source out scale {_MODEL}",
    ),
    "demo": Command("serve a web page on which to try a model", "--port 8000", _HOSTING),
    "serve": Command(_SERVED, "--port 8000", _HOSTING),
    "warmup": Command(
        "compile what later requests need, so that they need not wait for it",
        "--tasks generate ask",
        "rehearsed sizes image_steps image_sampler registers guidance quantize rows"
        f" {_LOADED} quiet debug",
    ),
    "selfcheck": Command(
        "check a model on this device with a few requests, and print a report for an issue",
        "models/lavida-o",
        "checked compilation_cache quiet debug",
    ),
    "completion": Command(
        "print a script with which a shell completes commands",
        "bash > ~/.local/share/bash-completion/completions/sparse-lavida",
        "shell debug",
    ),
    "doctor": Command(
        "print what is installed, and which models fit on this machine",
        "",
        "kernels json quiet debug",
    ),
}


_ANY_SETTING = (
    "any setting of the config, such as --config.train.train_steps=200; sparse_lavida_jax/config.py"
    " describes them with their ranges"
)


def _known() -> str:
    """Returns what the default model knows, in lines."""
    known = vocabulary.of_source("scenes")
    assert known is not None
    return textwrap.fill(f"The bundled model, {DEFAULT_MODEL}, knows {known.knows}.", LINE)


def _parser(name: str, does: str, example: str) -> Parser:
    return Parser(
        prog=f"sparse-lavida {name}",
        description=f"{does[0].upper()}{does[1:]}.",
        epilog=f"example: sparse-lavida {name} {example}".rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parser_of(name: str) -> Parser:
    """Returns the parser of a command."""
    command = COMMANDS[name]
    parser = _parser(name, command.does, command.example)
    if name in FORMS or name == "chat":
        parser.epilog = f"{parser.epilog}\n\n{_known()}"
    groups: dict[str, Any] = {"": parser}
    for group, names, how in (ARGUMENTS[key] for key in command.arguments.split()):
        if group not in groups:
            groups[group] = parser.add_mutually_exclusive_group()
        groups[group].add_argument(*names, **how)
    return parser


def _any_parser(name: str) -> argparse.ArgumentParser:
    """Returns the parser of a command, or one with the flags of a mode of `main`."""
    if name in COMMANDS:
        return parser_of(name)
    mode, parser = MODES[name], _parser(name, MODES[name].does, MODES[name].example)
    flags = {flag: (default, meaning) for flag, default, meaning in full.FLAGS}
    for flag in mode.places:
        meaning = full.FOLDERS.get(name, {}).get(flag) or _lower(flags[flag][1])
        parser.add_argument(flag, nargs="?", help=meaning)
    for flag in f"{full.TAKES.get(name, '')} compilation_cache".split():
        if flag not in mode.places and flag in flags:
            default, meaning = flags[flag]
            if name == "convert":  # what is said of export, in the second sentence, does not apply
                meaning = meaning.partition(". ")[0]
                default = ("float32", "bfloat16") if flag == "dtype" else default
            how = _mode_argument(default)
            parser.add_argument(f"--{flag.replace('_', '-')}", help=_lower(meaning), **how)
    if "config" in full.TAKES.get(name, ""):
        parser.add_argument("--config.SECTION.NAME", metavar="VALUE", help=_ANY_SETTING)
    for key in ("quiet", "debug"):
        _, names, how = ARGUMENTS[key]
        parser.add_argument(*names, **how)
    return parser


def _mode_argument(default: str | int | bool | tuple[str, ...]) -> dict[str, Any]:
    """Returns settings for `argparse` of a flag of `main` with this default."""
    if isinstance(default, bool):
        return {"action": "store_true"}
    return {"choices": [one for one in default if one]} if isinstance(default, tuple) else {}


def _lower(meaning: str) -> str:
    """Returns a description of `main` as one of a command: without capital and full stop."""
    return f"{meaning[:1].lower()}{meaning[1:].removesuffix('.')}"


if __name__ == "__main__":
    sys.exit(main())
