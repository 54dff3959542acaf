# SPDX-License-Identifier: Apache-2.0
"""Mistakes in a request, each reported in one sentence, and the default model."""

import re
from typing import Any

from sparse_lavida_jax import config
from sparse_lavida_jax.data.image_files import ImageError
from sparse_lavida_jax.data.templates import RequestError

DEFAULT_MODEL = "scenes"  # bundled
SECTION = re.compile(r"^Sampling\.(?:num_|text_)?(?=\w+=)")  # before an option in a message
LONGEST_NAME = 200  # characters of a path in a message


class UsageError(Exception):
    """A command line that asks for something impossible."""


def about_path(error: BaseException) -> str:
    """Returns the sentence for a path that Python or the system refuses; "" for other errors.

    Paths come from many options, and only using one shows that it leads around in a circle, is too
    long, or names a device.
    """
    told, name = "", ""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        told, name = error.strerror, str(_text(error.filename))
    elif isinstance(error, ValueError) and "embedded null" in str(error):
        told = "a path holds the character NUL"
    shown = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
    return f"{shown}: {told}." if name else told and f"{told}."


def _text(name: Any) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


# What can be wrong with a request to a loaded model.
REFUSED = (RequestError, ImageError, config.ConfigError)
