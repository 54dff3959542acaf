# SPDX-License-Identifier: Apache-2.0
"""The version of the package, from the metadata of its installation."""

import importlib.metadata

try:
    __version__ = importlib.metadata.version("sparse-lavida-jax")
except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
    __version__ = "0+unknown"
