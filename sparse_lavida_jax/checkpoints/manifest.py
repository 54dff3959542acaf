# SPDX-License-Identifier: Apache-2.0
"""`MANIFEST.sha256`: the SHA-256 of every file of a model folder, and which tensors are damaged."""

import contextlib
import pathlib

import safetensors

from sparse_lavida_jax.checkpoints import contents, named_arrays, stores
from sparse_lavida_jax.checkpoints.named_arrays import CheckpointError
from sparse_lavida_jax.data import files, tensor_files

MANIFEST = "MANIFEST.sha256"
TENSORS_NAMED = 5  # in the message about a damaged file


def write(folder: pathlib.Path) -> None:
    """Writes the digests of all files, and of the tensors in safetensors files."""
    # Those of the parameters, if there are any, were computed while they were written.
    digests = named_arrays.read_digests(folder) if (folder / named_arrays.TENSORS).exists() else {}
    for path in _others(folder):
        digests |= _digests_in(folder, path)
    named_arrays.write_digests(folder, digests)
    (folder / MANIFEST).unlink(missing_ok=True)  # the manifest lists every file except itself
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{files.sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in paths]
    files.write_text(folder / MANIFEST, "".join(lines))


def digest(folder: pathlib.Path) -> str:
    """Returns the SHA-256 of the manifest, which identifies the model folder.

    Raises:
        CheckpointError: there is none.
    """
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it was not written to its end.")
    return files.sha256(folder / MANIFEST)


def verify(folder: pathlib.Path) -> int:
    """Compares the files of a model folder with the manifest; returns the number of files.

    Hidden files (`.git*`, `.cache`) that are not listed are ignored.

    Raises:
        CheckpointError: names the first file that is missing, not listed or changed, and the
            tensors that changed; or the manifest is empty or damaged.
    """
    known = read(folder)
    there = {*contents.names(folder)} - {MANIFEST}
    paths = {name: contents.inside(folder, name) for name in sorted(known)}
    if unknown := sorted(there - known.keys()):
        raise CheckpointError(
            f"{folder / unknown[0]} is not in {MANIFEST}, which lists every file of a model folder:"
            f" the list is cut short, or the file was put there later. Copy the folder {folder}"
            " again, or take the file away."
        )
    for path in paths.values():
        if path.suffix == ".safetensors":
            _check_header(path)  # before gigabytes are read
    for name, path in paths.items():
        try:
            digest = files.sha256(path)
        except files.FileRefused as error:
            raise CheckpointError(f"{error}.") from error
        if digest != known[name]:
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}."
                f"{_damaged_tensors(folder, path)} Copy the folder {folder} again."
            )
    return len(known)


def verify_tensors(folder: pathlib.Path) -> None:
    """Compares the arrays besides the parameters with their own digests.

    These do not change if the manifest is rewritten. Parameters are compared when they are read.

    Raises:
        CheckpointError: names the arrays that differ from what was written.
    """
    known, found = named_arrays.read_digests(folder), {}
    for path in _others(folder):
        found |= _digests_in(folder, path)
    if complaint := _complaint({name: known[name] for name in known if ":" in name}, found):
        raise CheckpointError(f"{folder} is damaged.{complaint} Copy it again.")


def read(folder: pathlib.Path) -> dict[str, str]:
    """Returns the digests in the manifest by file name.

    Raises:
        CheckpointError: there is no manifest, or it is damaged.
    """
    try:
        return named_arrays.read_list(folder / MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was not written to its end. Copy it again."
        ) from None


def _check_header(path: pathlib.Path) -> None:
    """Refuses a safetensors file whose header is wrong.

    Raises:
        CheckpointError: it is.
    """
    try:
        tensor_files.read_header(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.{files.remedy(error)}") from error


def _damaged_tensors(folder: pathlib.Path, path: pathlib.Path) -> str:
    """Returns a sentence that names the damaged arrays of a file; empty if there are none."""
    name, inside, found = path.relative_to(folder).as_posix(), "", {}
    if path in _others(folder):
        inside, found = name, _digests_in(folder, path)
    elif path.suffix == ".safetensors" or name.startswith(f"{stores.PARAMS}/"):
        with stores.silence(), contextlib.suppress(CheckpointError):
            found = stores.open_params(folder).digests()
    else:
        return ""
    known = named_arrays.read_digests(folder)
    return _complaint({key: known[key] for key in known if key.rpartition(":")[0] == inside}, found)


def _complaint(known: dict[str, str], found: dict[str, str]) -> str:
    """Returns a sentence that names the arrays whose digests differ; empty if there are none."""
    damaged = [name for name in known if found.get(name) != known[name]]
    if not damaged:
        return ""
    more = f" and {len(damaged) - TENSORS_NAMED} more" if len(damaged) > TENSORS_NAMED else ""
    named, several = f"{', '.join(damaged[:TENSORS_NAMED])}{more}", len(damaged) > 1
    return f" The tensor{'s' * several} {named} {'are' if several else 'is'} not what was written."


def _others(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the safetensors files that do not hold the parameters of the model."""
    found = {folder / name for name in contents.names(folder) if name.endswith(".safetensors")}
    return sorted(found - {*folder.glob(stores.FILES)})


def _digests_in(folder: pathlib.Path, path: pathlib.Path) -> dict[str, str]:
    """Returns the digests of the arrays of a safetensors file, by file and name."""
    try:
        with safetensors.safe_open(path, "numpy") as file:
            names = {key: f"{path.relative_to(folder).as_posix()}:{key}" for key in file.keys()}
            return {
                name: named_arrays.digest_of({name: file.get_tensor(key)})
                for key, name in names.items()
            }
    except (OSError, safetensors.SafetensorError):
        return {}
