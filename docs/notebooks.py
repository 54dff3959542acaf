# SPDX-License-Identifier: Apache-2.0
"""Runs the notebooks of `colabs/` whole and writes them back with what they print and draw.

    python docs/notebooks.py                # needs pip install 'sparse-lavida-jax[colabs]'
    python docs/notebooks.py train_small    # only this one

Images are kept as PNG; progress, folders of this machine and long outputs are cut.
"""

import os
import pathlib
import re
import sys

import nbclient
import nbformat

COLABS = pathlib.Path(__file__).resolve().parents[1] / "colabs"
SECONDS = 3600  # limit for a cell
MOST_LINES = 16  # of one output: the first and the last half
TEMPORARY = re.compile(r"(/[\w.+-]+)*/tmp\w+")


def main() -> None:
    """Runs the notebooks that are named, or all."""
    os.environ["SPARSE_LAVIDA_SMALL"] = "0"
    for name in sys.argv[1:] or sorted(path.stem for path in COLABS.glob("*.ipynb")):
        path = COLABS / f"{name}.ipynb"
        book = nbformat.read(path, as_version=4)
        metadata = dict(book.metadata)
        client = nbclient.NotebookClient(book, resources={"metadata": {"path": str(COLABS)}})
        client.timeout, client.record_timing = SECONDS, False
        client.execute()
        book.metadata = nbformat.from_dict(metadata)  # without this machine's version of Python
        for cell in book.cells:
            if cell.cell_type == "code":
                cell.outputs = kept(cell.outputs)
        nbformat.write(book, path)
        print(name, flush=True)


def kept(outputs: list) -> list:
    """Returns what a reader needs of a cell's outputs: one text, then images and values."""
    told, shown = "", []
    for one in outputs:
        if one.output_type == "stream":
            told += one.text if one.name == "stdout" else ""
        elif "text/html" in one.data:  # a line of a run's progress
            told += one.data["text/plain"]
        else:
            shown.append(trimmed(one))
    text = [nbformat.v4.new_output("stream", name="stdout", text=cut(told))] if told else []
    return text + shown


def trimmed(output: dict) -> dict:
    """Returns an output with only one form: a PNG, else Markdown, else text, which is cut."""
    said = output.data
    kind = next(kind for kind in ("image/png", "text/markdown", "text/plain") if kind in said)
    shown = cut(said[kind]) if kind == "text/plain" else TEMPORARY.sub("...", said[kind])
    output.data = nbformat.from_dict({kind: shown})
    return output


def cut(text: str) -> str:
    """Returns a text without temporary folders and without its middle if it is long."""
    lines = TEMPORARY.sub("...", text).splitlines(keepends=True)
    half = MOST_LINES // 2
    return "".join(lines if len(lines) <= MOST_LINES else [*lines[:half], "...\n", *lines[-half:]])


if __name__ == "__main__":
    main()
