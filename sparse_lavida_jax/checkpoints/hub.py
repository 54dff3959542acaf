# SPDX-License-Identifier: Apache-2.0
"""Downloads folders from the Hugging Face hub by their ids, and uploads them."""

import contextlib
import pathlib
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any

from sparse_lavida_jax.checkpoints.named_arrays import CheckpointError

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
SETTINGS = ("config.json",)  # files that tell what kind of model a repository holds


def is_id(name: pathlib.Path | str) -> bool:
    """Whether a name may be a model id on the hub: `org/name`, with no local folder `org`.

    `org/name@v1` means its branch, tag or commit `v1`.
    """
    name = str(name).partition("@")[0]
    return bool(_ID.fullmatch(name)) and not pathlib.Path(name).parent.is_dir()


def fetch(
    name: str,
    *,
    only: Sequence[str] | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
) -> pathlib.Path:
    """Returns the local folder of a model on the hub, in the cache of the hub's library.

    Args:
        only: names of the files to fetch; by default all.
        revision: a branch, a tag or a commit; by default the one in the name, or the main branch.
        local_files_only: uses only the cache and no network, as `HF_HUB_OFFLINE=1` does.

    Raises:
        CheckpointError: the library is not installed, the hub cannot be reached, or it refuses;
            the message says what to do.
    """
    name, _, tag = name.partition("@")
    library, asked = _library(name), revision or tag or None
    how: dict[str, Any] = {"revision": asked, "local_files_only": local_files_only}
    with _explained(library, name):
        return pathlib.Path(library.snapshot_download(name, allow_patterns=only, **how))


def push(folder: pathlib.Path, name: str, *, private: bool = False) -> str:
    """Uploads a folder to the hub; returns its address there.

    Raises:
        CheckpointError: the library is not installed, or the hub refuses.
    """
    library = _library(name)
    with _explained(library, name):
        hub = library.HfApi(library_name="sparse-lavida-jax")
        hub.create_repo(name, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=name, folder_path=folder))


def _library(name: str) -> types.ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors  # the package does not import it by itself
    except ImportError:
        raise CheckpointError(
            f"there is no folder {name} here, and models of the hub need a package that is not"
            " installed: pip install 'sparse-lavida-jax[hub]'."
        ) from None
    return huggingface_hub


@contextlib.contextmanager
def _explained(library: Any, name: str) -> Iterator[None]:
    """Turns errors of the hub's library into one sentence.

    Raises:
        CheckpointError: in place of whatever the library raises.
    """
    known = library.errors
    said = {  # the first matching kind counts
        known.GatedRepoError: f"the hub's model {name} is given to those who accept its licence:"
        f" open https://huggingface.co/{name}, accept it, and log in with `hf auth login`.",
        known.RepositoryNotFoundError: f"there is neither a folder {name} here nor a model of that"
        " name on the hub. If it is a private one, log in with `hf auth login`.",
        known.RevisionNotFoundError: f"the hub's model {name} has no such revision.",
        (known.LocalEntryNotFoundError, known.OfflineModeIsEnabled): f"there is no folder {name}"
        " here, it is not in the cache of the hub's models, and the hub was not reached: give"
        " a folder, or connect to the internet (without local_files_only and HF_HUB_OFFLINE).",
        known.EntryNotFoundError: f"the hub's model {name} lacks a file that it lists: try again.",
    }
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # the library raises whatever its HTTP client raises
        told = (sentence for kinds, sentence in said.items() if isinstance(error, kinds))
        first_line = str(error).strip().partition("\n")[0]
        usual = f"the hub's model {name} could not be fetched or written ({first_line}): try"
        raise CheckpointError(next(told, f"{usual} again; it goes on where it stopped.")) from error
