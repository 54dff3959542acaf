# SPDX-License-Identifier: Apache-2.0
"""Model folders on the Hugging Face hub: fetched by their ids, and pushed with a card."""

import contextlib
import pathlib
import re
import tempfile
import types
from collections.abc import Iterator
from typing import Any

from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.checkpoints.arrays import CheckpointError

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n+", re.DOTALL)
_FILES = ["config.json"]  # what says whose a repository is


def is_id(name: pathlib.Path | str) -> bool:
    """Whether a name may be that of a hub's model: `org/name`, where no folder `org` is here."""
    return bool(_ID.fullmatch(str(name))) and not pathlib.Path(name).parent.is_dir()


def fetch(
    name: str, *, revision: str | None = None, local_files_only: bool = False
) -> pathlib.Path:
    """Returns the folder of a model of the hub, in the cache of its library.

    Args:
        revision: a branch, a tag or a commit; by default the main branch.
        local_files_only: takes what is in the cache and asks nobody, as `HF_HUB_OFFLINE=1` does.

    Raises:
        CheckpointError: the library is not installed, the hub cannot be reached or refuses, or the
            model is another one's; the message says what to do.
    """
    library = _library(name)
    how: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
    with _explained(library, name):
        described = pathlib.Path(library.snapshot_download(name, allow_patterns=_FILES, **how))
        if (described / "config.json").is_file() and model_folder.is_ours(described):
            return pathlib.Path(library.snapshot_download(name, **how))
    raise CheckpointError(
        f"the hub's model {name} is none of this project. If it is a released LaViDa-O, download it"
        f" and convert it: `hf download {name} --local-dir LaViDa-O`, then `sparse-lavida convert"
        " LaViDa-O MODEL`, and give the MODEL folder."
    )


def push(folder: pathlib.Path | str, name: str, *, private: bool = False) -> str:
    """Copies a model folder, with a card as its README, to the hub; returns its address there.

    Raises:
        CheckpointError: the folder is damaged, the library is not installed, or the hub refuses.
    """
    library, folder = _library(name), model_folder.find_model(folder)
    with tempfile.TemporaryDirectory() as scratch, _explained(library, name):
        new = pathlib.Path(scratch) / "model"
        model_folder.copy(folder, new, readme=card(folder, name))
        hub = library.HfApi(library_name="sparse-lavida-jax")
        hub.create_repo(name, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=name, folder_path=new))


def card(folder: pathlib.Path, name: str) -> str:
    """Returns the README of a model folder with what the hub reads of it, and how to use it."""
    path, base = folder / "README.md", model_folder.read_config(folder).train.init_from
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    said = _FRONT_MATTER.sub("", text).partition("\n## Use\n")[0]  # without an older card
    is_free = "non-commercial" not in said and not (folder / "official").is_dir()
    lines = [
        "library_name: sparse-lavida-jax",
        "pipeline_tag: any-to-any",
        f"license: {'apache-2.0' if is_free else 'other'}",
        *([f"base_model: {base}"] if _ID.fullmatch(base) else []),
        "tags: [jax, masked-diffusion, sparse-lavida, text-to-image, image-editing]",
    ]
    front = "\n".join(lines)
    return f"""---
{front}
---

{said.strip() or f"# {name}"}

## Use

```python
from sparse_lavida_jax import SparseLaViDa

pipe = SparseLaViDa.from_pretrained("{name}")
pipe.generate("a red circle above a blue square", seed=0).image.save("image.png")
```
"""


def _library(name: str) -> types.ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(
            f"there is no folder {name} here, and models of the hub need a package that is not"
            " installed: pip install 'sparse-lavida-jax[hub]'."
        ) from None
    return huggingface_hub


@contextlib.contextmanager
def _explained(library: Any, name: str) -> Iterator[None]:
    """Says in a sentence what went wrong with the hub.

    Raises:
        CheckpointError: whatever its library raises.
    """
    known = library.errors
    said = {  # the first kind that fits
        known.GatedRepoError: f"the hub's model {name} is given to those who accept its licence:"
        f" open https://huggingface.co/{name}, accept it, and log in with `hf auth login`.",
        known.RepositoryNotFoundError: f"there is neither a folder {name} here nor a model of that"
        " name on the hub. If it is a private one, log in with `hf auth login`.",
        known.RevisionNotFoundError: f"the hub's model {name} has no such revision.",
        (known.LocalEntryNotFoundError, known.OfflineModeIsEnabled): f"there is no folder {name}"
        " here, it is not in the cache of the hub's models, and the hub was not reached: connect,"
        " and leave out local_files_only and HF_HUB_OFFLINE, or give a folder.",
        known.EntryNotFoundError: f"the hub's model {name} lacks a file that it lists: try again.",
    }
    try:
        yield
    except CheckpointError:
        raise
    except (known.HfHubHTTPError, known.EntryNotFoundError, OSError, ValueError) as error:
        told = (sentence for kinds, sentence in said.items() if isinstance(error, kinds))
        first_line = str(error).strip().partition("\n")[0]
        usual = f"the hub's model {name} could not be fetched or written ({first_line}): run it"
        raise CheckpointError(next(told, f"{usual} again, it goes on where it stopped.")) from error
