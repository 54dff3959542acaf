# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel, installs it in a new environment, uses it elsewhere: `docs/package.md`.

    python docs/package.py

Takes the committed files alone, so that what was forgotten is missed. Kept is what is printed.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PAGE = """# The package, outside the checkout

What a wheel of the committed files prints in a new environment, in an empty folder; kept by
`python docs/package.py`.
"""
BUILD = (
    "git clone --quiet {checkout} sparse-lavida-jax",
    "python3 -m venv build && build/bin/pip install --quiet hatchling",
    "cd sparse-lavida-jax && ../build/bin/python -m hatchling build -t wheel",
    "python3 -m venv env && env/bin/pip install --quiet sparse-lavida-jax/dist/*.whl",
)
USE = (
    'sparse-lavida generate "two blue squares" --out out.png',
    'sparse-lavida ask out.png "how many squares are there?"',
    "sparse-lavida doctor",
    'python -W error -c "import sparse_lavida_jax"',
    'sparse-lavida generate "a red circle" --checkpoint=nowhere',
)
# What differs from machine to machine.
MACHINE = re.compile(r"(/[\w.+-]+)*/(env|elsewhere)\b|(?<=Linux)-\S+")


def printed(command: str, folder: pathlib.Path, path: str) -> str:
    """Returns a command with all that it prints, and its status where that is not 0."""
    surroundings = os.environ | {"JAX_PLATFORMS": "cpu", "PATH": path}
    surroundings.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, shell=True, cwd=folder, env=surroundings, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said = MACHINE.sub(lambda found: found[2] or "", done.stdout)
    status = f"[status {done.returncode}]\n" if done.returncode else ""
    return f"$ {command}\n{said}{status}"


def main() -> None:
    """Writes the page.

    Raises:
        SystemExit: the wheel cannot be built or installed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for command in BUILD:
            done = subprocess.run(
                command.format(checkout=HERE.parent), shell=True, cwd=folder, check=False
            )
            if done.returncode:
                sys.exit(f"docs/package.py: `{command}` ended with {done.returncode}.")
        (wheel,) = (folder / "sparse-lavida-jax" / "dist").glob("*.whl")
        built = f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB\n"
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        path = f"{folder / 'env' / 'bin'}:{os.environ['PATH']}"
        said = "".join(printed(command, elsewhere, path) for command in USE)
    steps = "".join(f"$ {command.format(checkout='...')}\n" for command in BUILD)
    (HERE / "package.md").write_text(f"{PAGE}\n```console\n{steps}{built}{said}```\n")


if __name__ == "__main__":
    main()
