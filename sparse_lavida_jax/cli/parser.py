# SPDX-License-Identifier: Apache-2.0
"""The commands with their arguments, and the parser of their command lines."""

import argparse
import dataclasses
import difflib
import re
import textwrap
from collections.abc import Sequence

from sparse_lavida_jax import old_names
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.cli.arguments import ARGUMENTS, DEFAULT_MODEL, MODEL_NAMES, Argument, place
from sparse_lavida_jax.cli.usage_errors import LONGEST_MESSAGE, UsageError, need
from sparse_lavida_jax.inference.requests import TASK_SPECS
from sparse_lavida_jax.prompting.protocol import prompt_format

LINE = 96  # characters
TOGETHER = ("--distributed", "--coordinator", "--num-processes", "--process-id")
_SHARDS = (
    "Several of them evaluate with --shard=i/n each, under SLURM"
    " --shard=$SLURM_PROCID/$SLURM_NTASKS"
)
_NO_VALUE = re.compile(r"--[\w-]+=--")
_OVERRIDE = re.compile(r"--(no)?config\.")
_ANY_SETTING = (
    "any setting of the config, such as --config.train.train_steps=200; sparse_lavida_jax/config.py"
    " describes them with their ranges"
)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        does: what it does, for the overview.
        example: a command line, without the program and the name of the command.
        arguments: their keys in `ARGUMENTS`, separated by spaces.
        places: further arguments, which may also be given by position, in this order.
    """

    does: str
    example: str
    arguments: str
    places: tuple[Argument, ...] = ()


_CIRCLE = '"a red circle above a blue square"'
_LOADED = "checkpoint adapters convert mesh compilation_cache"
_MODEL = f"{_LOADED} batch_size json json_full quiet debug"
_CHATTING = "image_steps image_sampler registers image_temperature layout_temperature quantize seed"
_DRAWING = (
    "out scale grid save_steps quality num_images best_of layout no_layout guidance order vq_dtype"
    " margins revisions"
)
_COMPLETING = (
    "out scale grid num_images best_of guidance order vq_dtype layout_temperature steps registers"
    " revisions temperature quantize sampler seed"
)
_HOSTING = (
    f"{_LOADED} host port batch_size longest_wait max_waiting programs"
    " content_cache_gb only grace api_key insecure warmup quiet debug"
)
_MODE = "compilation_cache quiet debug"


def _task(name: str, does: str, example: str, arguments: str) -> Command:
    """Returns the command of a task; `arguments` are those besides what its kind of task takes."""
    draws, takes = TASK_SPECS[name].draws, TASK_SPECS[name].takes
    layout = "layout_temperature" if "layout_temperature" in takes else ""
    sampling = f"steps registers temperature quantize {'image_' * draws}sampler seed"
    return Command(does, example, f"{arguments} {_DRAWING * draws} {layout} {sampling} {_MODEL}")


_TASKS = {
    "generate": (
        "draw images",
        f"{_CIRCLE} --out out.png --save-steps steps.gif",
        "prompt size crop style_seed replay batch",
    ),
    "edit": ("edit an image", 'out.png "make the red circle green" --out edited.png',
             "image prompt batch"),
    "inpaint": (
        "redraw a part of an image",
        'out.png "a cyan cross above a blue square" --box 0,0,96,48 --out inpainted.png',
        "image prompt mask hole batch",
    ),
    "outpaint": (
        "extend an image beyond its edges",
        f"smaller.png {_CIRCLE} --out outpainted.png",
        "image prompt place batch",
    ),
    "reflect": (
        "draw an image, judge it, and correct its faults",
        '"two blue squares" --rounds 3 --out reflected.png',
        "prompt rounds batch",
    ),
    "ask": (
        "answer a question about an image",
        'out.png "how many squares are there?"',
        "image prompt max_new_tokens batch",
    ),
    "reason": (
        "answer a question step by step",
        'out.png "how many red things plus how many squares?"',
        "image prompt max_new_tokens batch",
    ),
    "caption": (
        "describe an image, freely or in given words",
        'out.png --template "a ___ red circle and a ___ ___ square"',
        "needed_image template words",
    ),
    "infill": (
        "fill the gaps in a text",
        '"a ___ red circle and a ___ blue square" --image out.png',
        "prompt shown batch",
    ),
    "ground": (
        "find things in an image",
        'out.png "red circle" "blue square" --out boxes.png',
        "needed_image phrases boxes scale",
    ),
}  # fmt: skip
_KNOWING = (*_TASKS, "complete", "chat")  # whose help says what the bundled model knows
COMMANDS = {name: _task(name, *parts) for name, parts in _TASKS.items()} | {
    "chat": Command(
        "run tasks from the standard input, one per line, such as: generate two red circles",
        "--out turns < lines.txt",
        f"first_image turns scale {_CHATTING} {_MODEL}",
    ),
    "replay": Command(
        "draw the image of a PNG again, bit for bit",
        "out.png --out again.png",
        f"replayed source out scale {_MODEL}",
    ),
    "branch": Command(
        "draw images like that of a PNG: the same up to a step, and different from there on",
        "out.png --at layout:8 --num-images 4 --out branch.png",
        f"branched at source branches branch_seed out scale grid {_MODEL}",
    ),
    "complete": Command(
        "fill what is missing of words, layout and image",
        f'--words {_CIRCLE} --layout " large red circle<LOC_4><LOC_8><LOC_8><LOC_12>___"'
        " --out completed.png",
        f"held_words held_layout held_image mask hole {_COMPLETING} {_MODEL}",
    ),
    "prove": Command(
        "check that layout, codes and pixels of a PNG follow from its words, seed and settings",
        "out.png",
        f"proved source {_LOADED} batch_size json quiet debug",
    ),
    "surprise": Command(
        "measure in bits how well captions fit an image, and which cell fits least",
        f'out.png --caption {_CIRCLE} --caption "a red circle above a blue cross" --out map.png',
        f"needed_image captions map scale {_LOADED} batch_size json quiet debug",
    ),
    "demo": Command("serve a web page on which to try a model", "--port 8000", _HOSTING),
    "serve": Command("serve a model with the endpoints of OpenAI's API", "--port 8000", _HOSTING),
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
_CHECKPOINT = Argument("--checkpoint", f"the model: {MODEL_NAMES}", str, metavar="MODEL")
_FOLDER = Argument("--src", MODEL_NAMES, place, needed=True)
# The modes of `main.py`: commands as well.
MODES = {
    "train": Command(
        "train a model, or resume a run",
        "configs/scenes.py",
        "data init_from workdir profile_steps stopped_exit_code distributed coordinator"
        f" num_processes process_id {_MODE}",
        places=(ARGUMENTS["config"],),
    ),
    "sample": Command(
        "draw, edit or answer once, with any setting of the config",
        'scenes "a red circle" --config.sampling.num_steps=4',
        f"config adapters convert task sampled_image sampled_out seed {_MODE}",
        places=(
            _CHECKPOINT,
            Argument("--prompt", "the prompt, instruction, question, or what to point at", str),
        ),
    ),
    "evaluate": Command(
        "score a model on a benchmark",
        "scenes",
        f"config adapters convert workdir shard {_MODE}",
        places=(_CHECKPOINT,),
    ),
    "convert": Command(
        "convert a released LaViDa-O to a model folder",
        "LaViDa-O-v1.0 models/lavida-o",
        f"converted_dtype format {_MODE}",
        places=(
            Argument(
                "--src", "the released PyTorch folder, or its id on the hub", place, needed=True
            ),
            Argument(
                "--dst", "the folder to write; an older model is replaced", place, needed=True
            ),
        ),
    ),
    "export": Command(
        "write a model for PyTorch, or in another number type",
        "runs/mine new",
        f"exported_format dtype adapters {_MODE}",
        places=(_FOLDER, Argument("--dst", "the folder to write", place, needed=True)),
    ),
    "verify": Command(
        "check that no file of a model has changed", "models/lavida-o", _MODE, places=(_FOLDER,)
    ),
    "fits": Command(
        "print which ways to train a model fit the memory of a device",
        "configs/lavida_o_lora.py --device-gb 80",
        f"device_gb devices text_tokens image_tokens fits_json {_MODE}",
        places=(dataclasses.replace(ARGUMENTS["config"], needed=True),),
    ),
    "prepare": Command(
        "turn images, captions and questions into training data",
        "photos prepared",
        f"config image_tokenizer tokenizer dry_run report_json {_MODE}",
        places=(
            Argument(
                "--src",
                "a mixture file (docs/data.md) or a folder of images (docs/own_images.md)",
                place,
                needed=True,
            ),
            Argument("--dst", "the folder to write the prepared data to", place, needed=True),
        ),
    ),
}


class Parser(argparse.ArgumentParser):
    """The parser of a command; mistakes are raised in one sentence.

    Args:
        name: a key of `COMMANDS` or `MODES`.
        is_mode: whether the command line is one of `main.py`, which has no arguments by position.

    Attributes:
        command: what messages call the command.
    """

    def __init__(self, name: str, *, is_mode: bool = False):
        known = (COMMANDS | MODES)[name]
        self.name, self.is_mode = name, is_mode
        self.command = f"--mode={name}" if is_mode else f"`sparse-lavida {name}`"
        program = f"python -m sparse_lavida_jax.main --mode={name}"
        example = "" if is_mode else f"example: sparse-lavida {name} {known.example}".rstrip()
        super().__init__(
            prog=program if is_mode else f"sparse-lavida {name}",
            description=f"{known.does[0].upper()}{known.does[1:]}.",
            epilog=f"{example}\n\n{knowledge()}" if name in _KNOWING else example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.by_place = () if is_mode else known.places
        for argument in self.by_place:
            self.add_argument(
                argument.key, nargs="?", default=argparse.SUPPRESS, help=argument.help
            )
        self.taken = [*known.places, *map(ARGUMENTS.__getitem__, known.arguments.split())]
        groups: dict[str, argparse._MutuallyExclusiveGroup] = {}
        for argument in self.taken:
            if argument.group and argument.group not in groups:
                groups[argument.group] = self.add_mutually_exclusive_group()
            where = groups.get(argument.group, self)
            argument.add_to(where, is_hidden=argument in self.by_place)
        self.takes_settings = any(argument.key == "config" for argument in self.taken)
        if self.takes_settings:
            self.add_argument("--config.SECTION.NAME", metavar="VALUE", help=_ANY_SETTING)
        for_example = f" For example: `sparse-lavida {name} {known.example}`."
        self.set_defaults(command=self.command, example="" if is_mode else for_example)

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        """Returns the arguments, with the settings of the config as `overrides`."""
        words, overrides = self._parted(list(args or ()))
        parse = self.parse_known_intermixed_args if self.by_place else self.parse_known_args
        asked, left = parse(words, namespace)
        if left:
            self.error(self._unknown(left))
        asked.overrides = overrides
        for argument in self.taken:
            argument.check(getattr(asked, argument.key))
            if argument.needed:
                need(asked, argument.key, argument.help)
        return asked

    def _parted(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Returns the words for `argparse`, and the settings of the config among them."""
        plain, settings = [], []
        while words and words[0] != "--":
            word = words.pop(0)
            if _NO_VALUE.fullmatch(word):  # to some versions of Python, it is an empty list
                self.error(f"argument {word.removesuffix('=--')}: '--' is not a value")
            if self.takes_settings and _OVERRIDE.match(word):
                if "=" not in word and words and not words[0].startswith("-"):
                    word = f"{word}={words.pop(0)}"
                settings.append(word)
            else:
                plain.append(_with_dashes(word) if word.startswith("--") else word)
        return plain + words, settings

    def _unknown(self, left: Sequence[str]) -> str:
        if self.name in MODES and left[0].partition("=")[0] in TOGETHER:
            return f"{self.command} does not connect processes: leave out {left[0]}. {_SHARDS}"
        option = left[0].partition("=")[0]
        if hint := old_names.hint(option.removeprefix("--"), "--"):
            return f"unrecognized argument {option}. {hint}"
        message = f"unrecognized arguments: {' '.join(left)}"
        options = [one for action in self._actions for one in action.option_strings]
        if near := difflib.get_close_matches(option, options, 1, 0.8):
            return f"{message}. Did you mean {near[0]}?"
        if self.name not in MODES:
            return message
        taken = [one.key for one in self.taken if one not in map(ARGUMENTS.get, _MODE.split())]
        return f"{message}. {self.command} takes {', '.join(map(self.spelled, taken))}"

    def error(self, message: str):
        """Raises a mistake that `argparse` finds."""
        said = message.rstrip(".")
        said = said if len(said) <= LONGEST_MESSAGE else f"{said[:LONGEST_MESSAGE]}..."
        raise UsageError(f"{said}{'' if said.endswith('?') else '.'} See `{self.prog} --help`.")

    def spelled(self, setting: str) -> str:
        """Returns what users of this command line call a setting."""
        if setting in (argument.key for argument in self.by_place):
            return f"the argument {setting}"
        known = next((one for one in self.taken if one.key == setting), None)
        return setting if known is None or not known.is_option else f"--{_with_dashes(setting)}"


def _with_dashes(word: str) -> str:
    """Returns an option in the spelling of the parsers: `--init_from=x` as `--init-from=x`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def overview() -> str:
    """Returns a line for each command, and what the default model knows."""
    width = max(map(len, COMMANDS))
    lines = (f"    {name:{width}}  {one.does}" for name, one in (COMMANDS | MODES).items())
    return "\n".join(["Commands:", "", *lines, "", knowledge()])


def knowledge() -> str:
    """Returns what the default model knows, in lines."""
    settings = model_folder.read_config(model_folder.find_model(DEFAULT_MODEL))
    known = prompt_format(settings.prompts).taught(settings.data)
    return textwrap.fill(f"The bundled model, {DEFAULT_MODEL}, knows {known.knows}.", LINE)
