# SPDX-License-Identifier: Apache-2.0
"""Names of adapters with their weights, and what identifies a model with adapters.

`convert.adapters` reads their contents, which needs much that a model without adapters does not.
"""

import hashlib
import math
import os
import pathlib
from collections.abc import Mapping

from sparse_lavida_jax.checkpoints import manifest
from sparse_lavida_jax.checkpoints.named_arrays import CheckpointError
from sparse_lavida_jax.data import files

WEIGHTS = "adapter_model.safetensors"


def parse(given: str | Mapping[str, float]) -> dict[str, float]:
    """Parses `mine,runs/other:0.5,org/name` to the weights of adapters by name.

    Raises:
        CheckpointError: a name or weight is missing, a name is given twice, or a weight is no
            number.
    """
    if not isinstance(given, str):
        return {os.path.expanduser(name): weight for name, weight in given.items()}
    found: dict[str, float] = {}
    for part in given.split(",") if given else ():
        name, _, weight = os.path.expanduser(part.strip()).partition(":")
        try:
            number = float(weight or 1)
        except ValueError:
            number = math.nan
        if not name or name in found or not math.isfinite(number):
            raise CheckpointError(
                f"the adapters {given!r} are not understood at {part!r}: write FOLDER or"
                " FOLDER:WEIGHT, each folder once, with commas between them."
            )
        found[name] = number
    return found


def written(weights: Mapping[str, float]) -> str:
    """Returns weights as text that `parse` reads."""
    return ",".join(
        name if weight == 1 else f"{name}:{weight:g}" for name, weight in weights.items()
    )


def find(name: str) -> pathlib.Path:
    """Returns the adapter folder that a name refers to: a folder, a run, or an id on the hub.

    Raises:
        CheckpointError: there are none.
    """
    folder = pathlib.Path(name)
    for candidate in (folder, folder / "adapters"):
        if (candidate / WEIGHTS).is_file():
            return candidate
    from sparse_lavida_jax.checkpoints import hub

    if hub.is_id(name) and (fetched := hub.fetch(name) / WEIGHTS).is_file():
        return fetched.parent
    raise CheckpointError(
        f"there are no adapters in {folder}: it has no {WEIGHTS}. Give the adapters/ of a run with"
        " lora.rank, a folder of PEFT, or the id of one on the hub."
    )


def digest(base: pathlib.Path, weights: Mapping[str, float]) -> str:
    """Returns the SHA-256 that identifies a model with adapters; without any, that of its base."""
    parts = [manifest.digest(base)]
    for name, weight in weights.items():
        parts.append(f"{files.sha256(find(name) / WEIGHTS)}:{weight:g}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if weights else parts[0]
