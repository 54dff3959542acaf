# SPDX-License-Identifier: Apache-2.0
"""Mistakes in a request, each reported in one sentence, and the default model."""

import re

from sparse_lavida_jax import config
from sparse_lavida_jax.data.image_files import ImageError
from sparse_lavida_jax.data.templates import RequestError

DEFAULT_MODEL = "scenes"  # bundled
SECTION = re.compile(r"^Sampling\.(?:num_|text_)?(?=\w+=)")  # before an option in a message


class UsageError(Exception):
    """A command line that asks for something impossible."""


# What can be wrong with a request to a loaded model.
REFUSED = (RequestError, ImageError, config.ConfigError)
