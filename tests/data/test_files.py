# SPDX-License-Identifier: Apache-2.0
"""Only regular files of a bounded size are read: no device, pipe, folder or endless file."""

import os
import pathlib
import socket

import pytest

from sparse_lavida_jax.data import files


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "socket", "link to a device"])
def test_what_is_not_a_regular_file_is_refused_at_once(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    path = pathlib.Path("x")
    match kind:
        case "device":
            path = pathlib.Path("/dev/zero")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            socket.socket(socket.AF_UNIX).bind(str(path))
        case _:
            path.symlink_to("/dev/zero")
    for read in (files.read_bytes, files.read_text, files.read_json, files.sha256):
        with pytest.raises(files.FileRefused, match="is not a regular file"):
            read(path)


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert files.read_bytes(path, most=5) == b"12345"
    with pytest.raises(files.FileRefused, match="more than 4 bytes"):
        files.read_bytes(path, most=4)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc: run on Linux")
def test_the_limit_counts_what_is_read_and_not_what_the_system_states():
    assert pathlib.Path("/proc/self/status").stat().st_size == 0
    with pytest.raises(files.FileRefused):
        files.read_bytes("/proc/self/status", most=10)
    assert files.read_text("/proc/self/status").startswith("Name:")


def test_line_ends_become_newlines(tmp_path):
    (tmp_path / "x").write_bytes(b"a\r\nb\rc\n")
    assert files.read_text(tmp_path / "x") == "a\nb\nc\n"
