# SPDX-License-Identifier: Apache-2.0
"""Mistakes that a person can correct: every face tells them in a sentence, without a traceback."""

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.data.image_files import ImageError
from sparse_lavida_jax.data.templates import RequestError
from sparse_lavida_jax.evals.files import EvaluationError
from sparse_lavida_jax.mixture.recipe import PrepareError
from sparse_lavida_jax.mixture.records import RecordError
from sparse_lavida_jax.training import runs

DEFAULT_MODEL = "scenes"  # bundled


class UsageError(Exception):
    """A command line that asks for something impossible."""


# What can be wrong with a request to a model that is loaded.
REFUSED = (RequestError, ImageError, config.ConfigError)
# What can be wrong with a command.
MISTAKES = (
    *REFUSED, UsageError, model_folder.CheckpointError, runs.RunError, PrepareError, RecordError,
    EvaluationError, runtime.ProcessError,
)  # fmt: skip
