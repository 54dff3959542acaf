# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel, installs it in a new environment and uses it there; writes `docs/package.md`.

    python docs/package.py [PYTHON...]    # for instance python3.12

Only committed files are used, so a forgotten one is noticed. The page shows what is printed, and
what pip would install for accelerators with `python3` and every other Python that is named.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PAGE = """# The package, outside the checkout

A wheel is built from the committed files, installed in a new environment and used in an empty
folder; written by `python docs/package.py`.
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
EXTRAS = ("gpu", "tpu")
ACCELERATORS = """## On accelerators

The packages that pip would install for the extras on Linux (`--dry-run`). They were not installed,
because there was no GPU or TPU to run them on.

| Python | extra | jax and its packages for the device | packages in total |
| --- | --- | --- | --- |
"""
# In addition, a GPU's extra brings NVIDIA's libraries.
OF_JAX = re.compile(r"jax|jaxlib|jax-cuda.*|libtpu")
# Differs between machines.
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


def resolved(python: str, wheel: pathlib.Path, extra: str) -> str:
    """Returns a line of the table: what a Python's pip would install of an extra.

    Raises:
        SystemExit: there is no such set of packages.
    """
    report = wheel.with_suffix(".json")
    words = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    done = subprocess.run([*words, f"--report={report}", f"{wheel}[{extra}]"], check=False)
    if done.returncode:
        sys.exit(f"docs/package.py: the extra {extra} does not resolve with {python}.")
    told = json.loads(report.read_text())
    found = {one["metadata"]["name"]: one["metadata"]["version"] for one in told["install"]}
    names = sorted(name for name in found if OF_JAX.fullmatch(name))
    versions = ", ".join(f"{name} {found[name]}" for name in names)
    version = told["environment"]["python_full_version"]
    return f"| {version} | `{extra}` | {versions} | {len(found)} |\n"


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
        pythons = ("python3", *sys.argv[1:])
        lines = [resolved(python, wheel, extra) for python in pythons for extra in EXTRAS]
    steps = "".join(f"$ {command.format(checkout='...')}\n" for command in BUILD)
    console = f"```console\n{steps}{built}{said}```\n"
    (HERE / "package.md").write_text(f"{PAGE}\n{console}\n{ACCELERATORS}{''.join(lines)}")


if __name__ == "__main__":
    main()
