# SPDX-License-Identifier: Apache-2.0
"""Executables on disk, each in a file of its own, named by a digest of what it was made from.

Their contents are pickles, which can run any code when they are read. So they are read only from a
folder that belongs to this user and that nobody else may write to.
"""

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import stat
import threading
from collections.abc import Iterator

MOST_BYTES = 2 * 2**30  # beyond that, those longest unused are deleted
DIGEST_BYTES = hashlib.sha256().digest_size

log = logging.getLogger(__name__)

_folder: pathlib.Path | None = None


def keep_in(folder: pathlib.Path | None) -> None:
    """Sets the folder of this process; None: executables are neither read nor written."""
    global _folder
    _folder = folder


def are_kept() -> bool:
    """Whether this process reads and writes executables."""
    return _folder is not None and _is_private(_folder)


def read(name: str) -> bytes | None:
    """Returns the contents of a file; None if there is none, or if it is damaged."""
    with contextlib.suppress(OSError), _opened() as folder:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with open(file, "rb") as opened:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                return None
            whole = opened.read()
            os.utime(file)
        digest, contents = whole[:DIGEST_BYTES], whole[DIGEST_BYTES:]
        if hashlib.sha256(contents).digest() == digest:
            return contents
        os.unlink(name, dir_fd=folder)
    return None


def write(name: str, contents: bytes) -> None:
    """Writes a file as a whole or not at all; a full or missing disk is no error."""
    unfinished = f"{name}.{os.getpid()}.{threading.get_ident()}"
    with contextlib.suppress(OSError), _opened() as folder:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            with open(os.open(unfinished, flags, 0o600, dir_fd=folder), "wb") as opened:
                opened.write(hashlib.sha256(contents).digest() + contents)
            os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished, dir_fd=folder)
        _delete_unused(folder)


def delete(name: str) -> None:
    """Deletes a file whose contents are of no use."""
    with contextlib.suppress(OSError), _opened() as folder:
        os.unlink(name, dir_fd=folder)


def _delete_unused(folder: int) -> None:
    """Deletes the files that were not used for longest, beyond `MOST_BYTES`."""
    found, total = [], 0
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # another process may have deleted it
            found.append((os.stat(name, dir_fd=folder, follow_symlinks=False), name))
    for status, name in sorted(found, key=lambda one: one[0].st_mtime, reverse=True):
        total += status.st_size
        if total > MOST_BYTES:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def _opened() -> Iterator[int]:
    """Opens the folder, so that files in it are found even if somebody renames it.

    Raises:
        OSError: it is not there, or not private.
    """
    if _folder is None:
        raise FileNotFoundError
    folder = os.open(_folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _belongs_to_us(os.fstat(folder)):
            raise PermissionError
        yield folder
    finally:
        os.close(folder)


@functools.cache
def _is_private(folder: pathlib.Path) -> bool:
    """Whether a folder, which is made if it is not there, belongs to this user alone."""
    if os.name != "posix":
        return False  # its owner cannot be told
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        log.warning("compiled programs are not kept in %s: %s.", folder, error.strerror)
        return False
    if _belongs_to_us(found):
        return True
    log.warning(
        "executables in %s are not used, because others may write there: make the folder yours"
        " alone (chown, chmod 700). jax's own cache is used as before.",
        folder,
    )
    return False


def _belongs_to_us(found: os.stat_result) -> bool:
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.geteuid() and not others_write
