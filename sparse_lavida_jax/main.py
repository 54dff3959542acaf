# SPDX-License-Identifier: Apache-2.0
r"""Trains, samples and evaluates: the modes are commands of `sparse-lavida` too.

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
stopped by SIGTERM with everything saved (then --stopped-exit-code, if it is given); 130 training
stopped by Ctrl-C, likewise; 2 a mistake that the message explains; 1 what the machine could not do.
"""

import argparse
import sys
from collections.abc import Sequence

from sparse_lavida_jax import config
from sparse_lavida_jax.cli import modes, program
from sparse_lavida_jax.cli.parser import MODES, Parser
from sparse_lavida_jax.cli.terminal import say
from sparse_lavida_jax.cli.usage_errors import MISTAKE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` by default, and returns the exit code."""
    mode, words = _mode(argv)
    if mode not in MODES:
        say(f"--mode={mode} is not a mode: choose one of {', '.join(MODES)}.")
        return MISTAKE
    if {"-h", "--help"} & {*words}:
        return program.printed(f"{__doc__}\n{Parser(mode, is_mode=True).format_help()}")
    return program.run(Parser(mode, is_mode=True), words)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, config.Config]:
    """Returns the arguments of a command line and its settings.

    Raises:
        InputError, CheckpointError: it cannot be followed; the message says why.
    """
    mode, words = _mode(argv)
    asked = Parser(mode, is_mode=True).parse_args(words)
    return asked, modes.settings_of(mode, asked)


def _mode(argv: Sequence[str] | None) -> tuple[str, list[str]]:
    """Returns the mode of a command line, by default `train`, and the other words."""
    _, *words = sys.argv if argv is None else argv
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--mode", nargs="?", const="", default="train")
    asked, rest = parser.parse_known_args(words)
    return asked.mode, rest


if __name__ == "__main__":
    sys.exit(main())
