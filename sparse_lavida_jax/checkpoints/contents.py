# SPDX-License-Identifier: Apache-2.0
"""Which files a folder from elsewhere may hold, and which names and links may lead to them.

Model folders, adapters and released folders may come from strangers. Only this file decides what
of them is opened or copied: regular files inside the folder, text of a bounded size.
"""

import os
import pathlib
import stat
from collections.abc import Iterable

from sparse_lavida_jax import schema
from sparse_lavida_jax.checkpoints.named_arrays import CheckpointError
from sparse_lavida_jax.data import files
from sparse_lavida_jax.data.leftovers import is_leftover

MOST_FILES = 100_000
DEEPEST = 20  # folders in folders


def inside(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a file in a folder, given a name that a stranger may have written.

    Raises:
        CheckpointError: the name or a link leads out of the folder, or what is there is not a
            regular file, or larger than a file may be that holds no arrays.
    """
    path, parts = folder / name, name.split("/")
    drive = pathlib.PureWindowsPath(name).drive
    if {"", ".", ".."} & {*parts} or "\\" in name or "\0" in name or drive:
        raise CheckpointError(
            f"{folder} names the file {schema.shown(name)}, which may lie elsewhere: names in it"
            " are relative, with / between folders and without `..`. Get the folder again from"
            " those who made it."
        )
    try:
        found = path.stat()  # before `resolve`, which raises another error for a loop of links
        home, holder, place = folder.resolve(), path.parent.resolve(), path.resolve()
    except FileNotFoundError:
        what = "is a link that leads nowhere" if path.is_symlink() else "is missing"
        raise CheckpointError(f"{path} {what}. Copy the folder {folder} again.") from None
    except (OSError, ValueError) as error:  # the system refuses it, or it holds half a character
        why = getattr(error, "strerror", None) or "it is no name of a file"
        raise CheckpointError(f"{schema.shown(str(path))} cannot be read: {why}.") from error
    is_inside = any(place.is_relative_to(root) for root in _roots(home))
    if holder != home.joinpath(*parts[:-1]) or not is_inside:
        raise CheckpointError(
            f"{path} is a link to {place}: a link in {folder} may lead only to a file in that"
            " folder. Put the file itself there, or take the link away."
        )
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(
            f"{path} is not a regular file, the only kind that {folder} may hold, or it is a link"
            " to a folder. Take it away."
        )
    holds_arrays = name.endswith(".safetensors") or "/d/" in f"/{name}"  # d: of the array store
    if found.st_size > files.MOST_BYTES and not holds_arrays:
        raise CheckpointError(
            f"{path} has {found.st_size} bytes; a file that holds no arrays may have"
            f" {files.MOST_BYTES}. Take it away, or get it again."
        )
    return path


def _roots(home: pathlib.Path) -> list[pathlib.Path]:
    """Returns where links in a folder may lead: in the hub's cache, files are links to blobs."""
    for parent in home.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return [parent.parent, parent.parents[1] / "blobs"]
    return [home]


def names(folder: pathlib.Path) -> list[str]:
    """Returns the sorted names of all files in a folder, except leftovers. Follows no links.

    Raises:
        CheckpointError: see `inside`; or it holds too many files, or cannot be read.
    """
    found, within = [], [""]
    while within:
        start = within.pop()
        try:
            with os.scandir(folder / start) as entries:
                for entry in entries:
                    name = start + entry.name
                    if is_leftover(entry.name):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        within.append(f"{name}/")
                    else:
                        found.append(inside(folder, name).relative_to(folder).as_posix())
                    if len(found) + len(within) > MOST_FILES or name.count("/") > DEEPEST:
                        raise CheckpointError(
                            f"{folder} holds more than {MOST_FILES} files, or more than {DEEPEST}"
                            " folders in each other: it is not a model folder."
                        )
        except OSError as error:
            raise CheckpointError(f"{folder / start} cannot be read: {error.strerror}.") from error
    return sorted(found)


def is_empty(folder: pathlib.Path) -> bool:
    """Whether a folder holds nothing but files that systems leave behind."""
    return all(is_leftover(path.name) and path.is_file() for path in folder.iterdir())


def copy(folder: pathlib.Path, new: pathlib.Path, wanted: Iterable[str]) -> None:
    """Copies files by their names; a link becomes the file that it leads to.

    Raises:
        CheckpointError: see `inside`.
        OSError: the disk is full.
    """
    for name in wanted:
        place = new / name
        place.parent.mkdir(parents=True, exist_ok=True)
        files.copy(inside(folder, name), place)
