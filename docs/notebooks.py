# SPDX-License-Identifier: Apache-2.0
"""Runs the notebooks and writes what they show to `docs/notebooks.md`, with images next to it.

    python docs/notebooks.py                # needs pip install 'sparse-lavida-jax[colabs]'
    python docs/notebooks.py train_small    # only its part of the page

The notebooks themselves are committed without outputs; they run whole.
"""

import base64
import os
import pathlib
import re
import sys

import nbclient
import nbformat

HERE = pathlib.Path(__file__).resolve().parent
COLABS = HERE.parent / "colabs"
IMAGES = HERE / "notebooks"
SECONDS = 900  # limit for a cell
MOST_LINES = 12  # of one output
HEAD = """# What the notebooks show

What the notebooks of [`colabs/`](../colabs) print and draw with the bundled model on two CPU cores;
written by `python docs/notebooks.py`. Times include compilation, on a machine that was also doing
other work. Measurements are in [speed.md](speed.md)."""
# Differs between machines.
PATHS = re.compile(r"(/[\w.+-]+)*/tmp\w+")


def outputs_of(name: str) -> list[dict]:
    """Runs a notebook from its first cell to its last, as Jupyter does; returns what it shows."""
    os.environ["SPARSE_LAVIDA_SMALL"] = "0"
    book = nbformat.read(COLABS / f"{name}.ipynb", as_version=4)
    client = nbclient.NotebookClient(book, resources={"metadata": {"path": str(COLABS)}})
    client.timeout, client.coalesce_streams = SECONDS, True  # lines of progress are one output
    client.execute()
    return [output for cell in book.cells for output in cell.get("outputs", [])]


def text_of(output: dict) -> str:
    """Returns what an output says in words; progress, on the error stream, is left out."""
    if output.output_type == "stream":
        return output.text if output.name == "stdout" else ""
    return output.data.get("text/markdown") or output.data.get("text/plain", "")


def told(name: str) -> list[str]:
    """Returns the paragraphs of a notebook's section, and writes its images."""
    parts = [f"## [{name}](../colabs/{name}.ipynb)"]
    for output in outputs_of(name):
        if image := output.get("data", {}).get("image/png"):
            path = IMAGES / f"{name}_{len(parts)}.png"
            path.write_bytes(base64.b64decode(image))
            parts.append(f"![{name}]({IMAGES.name}/{path.name})")
        elif words := PATHS.sub("...", text_of(output)).strip():
            lines = words.splitlines()
            more = ["..."] if len(lines) > MOST_LINES else []
            parts.append("\n".join(["```text", *lines[:MOST_LINES], *more, "```"]))
    return parts


def main() -> None:
    """Writes the page, or the parts of it that are named."""
    IMAGES.mkdir(exist_ok=True)
    page, named = HERE / "notebooks.md", sys.argv[1:]
    parts: dict[str, str] = {}
    if named:
        _, *kept = re.split(r"\n\n(?=## \[)", page.read_text().strip())
        parts = {part[len("## [") : part.index("]")]: part for part in kept}
    for name in named or sorted(path.stem for path in COLABS.glob("*.ipynb")):
        for old in IMAGES.glob(f"{name}_*.png"):
            old.unlink()
        parts[name] = "\n\n".join(told(name))
        print(name, flush=True)
    page.write_text("\n\n".join([HEAD, *(parts[name] for name in sorted(parts))]) + "\n")


if __name__ == "__main__":
    main()
