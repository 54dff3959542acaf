# SPDX-License-Identifier: Apache-2.0
"""Which files and folders systems and editors leave behind."""

NAMES = ("__MACOSX", "Thumbs.db", "desktop.ini", "@eaDir", "#recycle", "$RECYCLE.BIN")


def is_leftover(name: str) -> bool:
    """Whether a part of a path names what a system or an editor leaves behind."""
    return name.startswith(".") or name.endswith("~") or name in NAMES
