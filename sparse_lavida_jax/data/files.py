# SPDX-License-Identifier: Apache-2.0
"""Reads regular files of a bounded size; writes files and folders completely or not at all."""

import collections
import contextlib
import errno
import hashlib
import io
import json
import os
import pathlib
import secrets
import shutil
import stat
import tempfile
import unicodedata
from collections.abc import Iterator
from typing import Any

import filelock

UNFINISHED = ".tmp"  # ends the names of unfinished files and folders
DEEPEST = 100  # nesting of lists and objects in JSON
MOST_BYTES = 2**26  # of a file that is read into memory, unless its reader says otherwise
POINTER = b"version https://git-lfs.github.com/spec/"  # starts a file that Git LFS has not fetched
LONGEST_NAME = 50  # characters of a name that those of unfinished files and folders repeat


class LockedError(Exception):
    """Another process holds a lock; the message is its process id, or "unknown"."""


def resolve(path: pathlib.Path | str) -> pathlib.Path:
    """Returns the absolute path that a path leads to, which need not exist.

    Raises:
        OSError: links lead around in a circle, on every version of Python.
        ValueError: no file can have that name.
    """
    with contextlib.suppress(RuntimeError):  # Python 3.11 and 3.12 notice a circle
        resolved = pathlib.Path(path).resolve()
        try:
            is_circle = stat.S_ISLNK(os.lstat(resolved).st_mode)
        except OSError as error:
            is_circle = error.errno == errno.ELOOP
        if not is_circle:
            return resolved
    raise OSError(errno.ELOOP, "links lead around in a circle", str(path))


class FileRefused(OSError):
    """A file that is not read, such as a folder or a file that is too large; it says which."""


class EncodingError(UnicodeDecodeError):
    """A file that is not text in UTF-8."""

    def __str__(self) -> str:
        return "it is not text in UTF-8: save it in that encoding"


def remedy(error: BaseException, usual: str = "Download it again.") -> str:
    """Returns what to do about a file that cannot be read; "" if the error says it already."""
    return "" if isinstance(error, FileRefused | EncodingError) else f" {usual}"


def open_regular(path: pathlib.Path | str) -> io.BufferedReader:
    """Opens a file for reading; never waits for a pipe or touches a device.

    Raises:
        FileRefused: it is not a regular file: a folder, a device, a pipe or a socket; or Git LFS
            has left a pointer in its place.
        OSError: there is no such file, or it cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a device may already have an effect
        raise FileRefused(f"{path} is not a regular file")
    # What is there may change between the two looks: O_NONBLOCK returns from a pipe at once.
    file = open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    if is_regular and not file.peek(len(POINTER)).startswith(POINTER):
        return file
    file.close()
    if is_regular:
        raise FileRefused(
            f"{path} is a Git LFS pointer, not the file itself: `git lfs pull` in its folder gets"
            " that"
        )
    raise FileRefused(f"{path} is not a regular file")


def read_bytes(path: pathlib.Path | str, most: int = MOST_BYTES) -> bytes:
    """Reads a regular file of at most `most` bytes.

    Raises:
        FileRefused: as `open_regular`, or the file has more bytes.
        OSError: there is no such file, or it cannot be read.
    """
    with open_regular(path) as file:
        contents = file.read(most + 1)  # the size that /proc states is 0
    if len(contents) > most:
        raise FileRefused(f"{path} has more than {most} bytes, the most that is read")
    return contents


def read_text(path: pathlib.Path | str, most: int = MOST_BYTES) -> str:
    """Reads a regular file of text in UTF-8, with or without a byte order mark.

    Line ends become newlines.

    Raises:
        OSError: as `read_bytes`.
        EncodingError: it is not text in UTF-8.
    """
    try:
        text = read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EncodingError(*error.args) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def lines(text: str) -> list[str]:
    r"""Returns the lines of a text, which end at \n, \r\n and \r alone.

    `str.splitlines` also ends them at U+2028, form feeds and others, which stand inside of lines.
    """
    found = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return found if found[-1] else found[:-1]  # a line end ends a line, and starts none


def composed(text: str) -> str:
    """Returns a text or name in Unicode's composed form (NFC); macOS decomposes names (NFD)."""
    return unicodedata.normalize("NFC", text)


def expanded(name: os.PathLike | str) -> pathlib.Path:
    """Returns a path with `~` or `~user` at its start expanded, as a shell would; not in `./~`."""
    path = pathlib.Path(os.path.expanduser(name))
    return path.absolute() if str(path).startswith("~") else path  # paths forget their `./`


def title(path: pathlib.Path | str) -> str:
    """Returns the last part of the absolute path, to name something after it."""
    return resolve(path).name or "root"


def has_text_name(path: pathlib.Path | str) -> bool:
    """Whether an absolute path is text in UTF-8, as the stores of states and records need."""
    name = str(resolve(path))
    return name.encode(errors="ignore").decode() == name


def check_place(folder: pathlib.Path) -> None:
    """Writes a little in a folder, or in the one above that exists; nothing of it is left.

    Raises:
        OSError: files cannot be written there, or the disk is full.
    """
    while not os.path.lexists(folder):
        folder = folder.absolute().parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**12))
    except OSError as error:  # which may name the temporary file
        raise OSError(error.errno, error.strerror, str(folder)) from error


def copy(path: pathlib.Path, new: pathlib.Path) -> None:
    """Copies a regular file of any size.

    Raises:
        OSError: as `open_regular`, or the disk is full.
    """
    with open_regular(path) as file, new.open("wb") as copied:
        shutil.copyfileobj(file, copied)


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a free path next to `path`; the file or folder made there becomes `path` at the end.

    If anything goes wrong, `path` is unchanged and nothing new is left. A
    process that is killed leaves `.<name>-<random>.tmp`; see `remove_unfinished`.

    Raises:
        OSError: the disk is full, or the place cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name[:LONGEST_NAME]}-{secrets.token_hex(4)}{UNFINISHED}")
    old = new.with_suffix(f".old{UNFINISHED}")
    try:
        yield new
        if new.is_file():
            with new.open("rb") as file:
                os.fsync(file.fileno())
        elif path.exists():  # a rename replaces only an empty folder
            path.rename(old)
        try:
            os.replace(new, path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
    finally:
        for left in (new, old):
            _remove(left)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file as `replacing` does; half characters, of odd file names, as in JSON."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: pathlib.Path, values: Any, indent: int = 1) -> None:
    """Writes a JSON file as `replacing` does."""
    write_text(path, json.dumps(values, indent=indent) + "\n")


def parse_json(text: str | bytes, *, unique: bool = False, most_values: int | None = None) -> Any:
    """Parses JSON.

    Args:
        unique: refuses an object with a duplicate key, of which the last would count.
        most_values: the most values in all lists and objects; None: any number.

    Raises:
        ValueError: it is not JSON, has more values, or is nested deeper than anything that is read
            here.
    """
    too_deep = f"lists and objects are nested more than {DEEPEST} deep"
    try:
        value = json.loads(text, object_pairs_hook=_of_unique_keys if unique else None)
    except RecursionError:
        raise ValueError(too_deep) from None
    level, count = [value] if isinstance(value, dict | list) else [], 0
    for _ in range(DEEPEST):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        count += sum(map(len, parts))
        if most_values is not None and count > most_values:
            raise ValueError(f"it has more than {most_values} values")
        level = [one for part in parts for one in part if isinstance(one, dict | list)]
        if not level:
            return value
    raise ValueError(too_deep)


def _of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        raise ValueError(f"the key {counts.most_common(1)[0][0]!r} is there twice")
    return values


def read_json(path: pathlib.Path, most: int = MOST_BYTES) -> Any:
    """Reads a JSON file of at most `most` bytes whose objects must have no duplicate keys.

    Raises:
        OSError: as `read_bytes`.
        ValueError: as `parse_json`, or the file is not text.
    """
    return parse_json(read_text(path, most), unique=True)


def sha256(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a regular file of any size.

    Raises:
        OSError: as `open_regular`.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_unfinished(folder: pathlib.Path) -> None:
    """Removes unfinished files of killed processes anywhere in a folder."""
    for path in [*folder.rglob(f".*{UNFINISHED}")]:
        _remove(path)


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def lock(path: pathlib.Path) -> filelock.BaseFileLock:
    """Returns a lock that only this process holds, until `release()`.

    The operating system releases the lock when a process dies, however it dies. The file holds
    the process id, for error messages of other processes.

    Raises:
        LockedError: another process holds it.
        OSError: the file cannot be written to.
    """
    held = filelock.FileLock(path, blocking=False, thread_local=False)
    # Read first: older versions of the library empty the file even if it is locked.
    owner = path.read_text().strip() if path.is_file() else ""
    try:
        held.acquire()
    except filelock.Timeout:
        raise LockedError(owner or "unknown") from None
    path.write_text(str(os.getpid()))
    return held
