# SPDX-License-Identifier: Apache-2.0
"""`MANIFEST.sha256`: the SHA-256 of every file of a model folder, and which tensors are damaged."""

import contextlib
import pathlib

import safetensors

from sparse_lavida_jax.checkpoints import arrays
from sparse_lavida_jax.checkpoints.arrays import CheckpointError
from sparse_lavida_jax.data import files

MANIFEST = "MANIFEST.sha256"
TENSORS_NAMED = 5  # in a complaint about a damaged file


def write(folder: pathlib.Path) -> None:
    """Writes the digests of all files, and of the tensors in safetensors files."""
    digests = arrays.read_digests(folder)
    for path in sorted(folder.rglob("*.safetensors")):
        digests |= _digests_in(folder, path)
    arrays.write_digests(folder, digests)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{files.sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in paths]
    (folder / MANIFEST).write_text("".join(lines))


def digest(folder: pathlib.Path) -> str:
    """Returns the SHA-256 of the manifest, which tells one model folder from another.

    Raises:
        CheckpointError: there is none.
    """
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it was not written to its end.")
    return files.sha256(folder / MANIFEST)


def verify(folder: pathlib.Path) -> int:
    """Compares every file of a model folder with the manifest; returns how many there are.

    Raises:
        CheckpointError: names the first file that is missing or changed, and the tensors that
            this changed.
    """
    try:
        lines = (folder / MANIFEST).read_text().splitlines()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was not written to its end. Copy it again."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged. Copy {folder} again.") from error
    for line in lines:
        known, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. Copy the folder {folder} again.")
        if files.sha256(path) != known:
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}."
                f"{_damaged_tensors(folder, path)} Copy the folder {folder} again."
            )
    return len(lines)


def _damaged_tensors(folder: pathlib.Path, path: pathlib.Path) -> str:
    """Returns a sentence with the arrays that a damaged file changed; there may be none."""
    name, digests = path.relative_to(folder).as_posix(), arrays.read_digests(folder)
    found: dict[str, str] = {}
    if path.suffix == ".safetensors":
        found = _digests_in(folder, path)
        digests = {key: known for key, known in digests.items() if key.startswith(f"{name}:")}
    elif name.startswith(f"{arrays.PARAMS}/"):
        with arrays.silence(), contextlib.suppress(CheckpointError):
            found = arrays.ParamsReader(folder / arrays.PARAMS).digests()
        digests = {key: known for key, known in digests.items() if ":" not in key}
    else:
        return ""
    damaged = [key for key, known in digests.items() if found.get(key) != known]
    if not damaged:
        return ""
    more = f" and {len(damaged) - TENSORS_NAMED} more" if len(damaged) > TENSORS_NAMED else ""
    named, several = f"{', '.join(damaged[:TENSORS_NAMED])}{more}", len(damaged) > 1
    return f" The tensor{'s' * several} {named} {'are' if several else 'is'} not what was written."


def _digests_in(folder: pathlib.Path, path: pathlib.Path) -> dict[str, str]:
    """Returns the digests of the arrays of a safetensors file, by file and name."""
    try:
        with safetensors.safe_open(path, "numpy") as file:
            names = {key: f"{path.relative_to(folder).as_posix()}:{key}" for key in file.keys()}
            return {
                name: arrays.digest_of({name: file.get_tensor(key)}) for key, name in names.items()
            }
    except (OSError, safetensors.SafetensorError):
        return {}
