# SPDX-License-Identifier: Apache-2.0
"""What systems, editors and this program leave behind in folders, and a walk past it."""

import os
import pathlib
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sparse_lavida_jax.data import files

# In small letters: of macOS, Windows, NAS boxes, Linux and Python. All hidden names count as well.
NAMES = {
    "__macosx", "icon\r", "network trash folder", "temporary items", "thumbs.db", "ehthumbs.db",
    "ehthumbs_vista.db", "desktop.ini", "$recycle.bin", "system volume information", "recycler",
    "@eadir", "@tmp", "@recycle", "@recently-snapshot", "#recycle", "#snapshot", "lost+found",
    "__pycache__",
}  # fmt: skip
STARTS = (".", "~$")  # hidden; an open document of an office program
ENDS = ("~", ":zone.identifier", ".swp", ".swo", ".crdownload", ".part", files.UNFINISHED)
# Files that are in every folder of one kind that this program writes, and in no other.
OURS = (
    ("mixture.json", "report.md"), ("tables/captions.jsonl",), ("MANIFEST.sha256", "config.json"),
    ("config.json", "metrics.jsonl"), ("config.json", "state"),
)  # fmt: skip

BEHIND = "left behind by a system or an editor"
WRITTEN = "written by sparse-lavida"
NOWHERE = "a link that leads nowhere, in a circle, or to a folder that is read already"
OUTSIDE = "a link to a file outside of the folder: copy it, or link its whole folder"
SPECIAL = "a pipe, a socket or a device"
UNREADABLE = "a folder that cannot be read"


def is_leftover(name: str) -> bool:
    """Returns whether a file or folder of this name is left behind by a system or an editor."""
    small = name.casefold()
    unsaved = len(small) > 2 and small[0] == small[-1] == "#"  # by Emacs
    return unsaved or small in NAMES or small.startswith(STARTS) or small.endswith(ENDS)


def has_leftover(path: pathlib.PurePath | str) -> bool:
    """Returns whether a path, in a folder or an archive, leads to or through a leftover."""
    return any(is_leftover(part) for part in pathlib.PurePosixPath(path).parts if part != "..")


def is_ours(folder: pathlib.Path) -> bool:
    """Returns whether a folder is a prepared one, a run or a model."""
    return any(all(os.path.exists(folder / name) for name in names) for names in OURS)


class Contents(NamedTuple):
    """The contents of a folder.

    Attributes:
        files: regular files in it, also through links to folders.
        roots: the folder, and the folders that links in it lead to, resolved.
        left_out: by reason, the names of what is not in `files`, relative to the folder.
    """

    files: list[pathlib.Path]
    roots: list[pathlib.Path]
    left_out: dict[str, list[str]]


def walk(folder: pathlib.Path, output: pathlib.Path | None = None) -> Contents:
    """Returns the contents of a folder.

    Links to folders are followed once, wherever they lead; links to files only within the folders
    that are read.

    Args:
        output: a folder that is not read.

    Raises:
        OSError: links to the folder lead around in a circle.
    """
    found: list[pathlib.Path] = []
    left_out: dict[str, list[str]] = {}
    roots, seen, linked = [files.resolve(folder)], set[pathlib.Path](), list[pathlib.Path]()
    written = None if output is None else files.resolve(output)
    folders, links = [(folder, roots[0])], list[tuple[pathlib.Path, pathlib.Path]]()

    def leave(reason: str, path: pathlib.Path) -> None:
        left_out.setdefault(reason, []).append(path.relative_to(folder).as_posix())

    def look(path: pathlib.Path, real: pathlib.Path) -> None:
        """Sorts one thing by what it is."""
        try:
            target = files.resolve(path) if path.is_symlink() else real
            kind = stat.S_IFMT(target.stat().st_mode)
        except OSError:
            leave(NOWHERE, path)
            return
        if kind == stat.S_IFDIR:
            if target == written or is_ours(path):
                leave(WRITTEN, path)
            else:
                (folders if target == real else links).append((path, target))
        elif kind != stat.S_IFREG:
            leave(SPECIAL, path)
        else:
            (found if target == real else linked).append(path)

    while folders or links:
        path, real = folders.pop() if folders else links.pop(0)  # what is linked comes last
        if real in seen or (path != folder and roots[0].is_relative_to(real)):
            leave(NOWHERE, path)
            continue
        seen.add(real)
        if not any(real.is_relative_to(root) for root in roots):
            roots.append(real)
        try:
            names = sorted(entry.name for entry in os.scandir(path))
        except OSError:
            leave(UNREADABLE, path)
            continue
        for name in names:
            if is_leftover(name):
                leave(BEHIND, path / name)
            else:
                look(path / name, real / name)
    for path in linked:
        inside = any(files.resolve(path).is_relative_to(root) for root in roots)
        found.append(path) if inside else leave(OUTSIDE, path)
    return Contents(sorted(found), roots, {why: sorted(of) for why, of in left_out.items()})


def without(paths: Iterable[pathlib.Path], folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields those of the paths in a folder that are not leftovers."""
    return (path for path in paths if not has_leftover(path.relative_to(folder)))
