# SPDX-License-Identifier: Apache-2.0
"""The model card (README) of a model folder: metadata for the hub, and how to use the model."""

import pathlib
import re
import tempfile

from sparse_lavida_jax.checkpoints import hub, model_folder
from sparse_lavida_jax.data.vocabulary import Vocabulary
from sparse_lavida_jax.scenes import vocabulary

_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n+", re.DOTALL)


def push(folder: pathlib.Path | str, name: str, *, private: bool = False) -> str:
    """Uploads a model folder, with a card as its README, to the hub; returns its address there.

    Raises:
        CheckpointError: the folder is damaged, the library is not installed, or the hub refuses.
    """
    folder = model_folder.find_model(folder)
    with tempfile.TemporaryDirectory() as scratch:
        new = pathlib.Path(scratch) / "model"
        model_folder.copy(folder, new, readme=card(folder, name))
        return hub.push(new, name, private=private)


def card(folder: pathlib.Path, name: str) -> str:
    """Returns the README of a model folder with metadata for the hub and a section on its use."""
    path, settings = folder / "README.md", model_folder.read_config(folder)
    base = settings.train.init_from
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    said = _FRONT_MATTER.sub("", text).partition("\n## Use\n")[0]  # without an older card
    is_free = "non-commercial" not in said and not (folder / "official").is_dir()
    lines = [
        "library_name: sparse-lavida-jax",
        "pipeline_tag: any-to-any",
        f"license: {'apache-2.0' if is_free else 'other'}",
        *([f"base_model: {base.partition('@')[0]}"] if hub.is_id(base) else []),
        "tags: [jax, masked-diffusion, sparse-lavida, text-to-image, image-editing]",
    ]
    front = "\n".join(lines)
    is_ours = settings.prompts == "scenes"
    known = vocabulary.of_source(settings.data.source) if is_ours else Vocabulary.read(folder)
    knows = f"\nIt knows {known.knows}.\n" if known else ""
    return f"""---
{front}
---

{said.strip() or f"# {name}"}

## Use
{knows}
```python
from sparse_lavida_jax import SparseLaViDa

pipe = SparseLaViDa.from_pretrained("{name}")
pipe.generate("a red circle above a blue square", seed=0).image.save("image.png")
```

```console
$ sparse-lavida generate "a red circle above a blue square" --checkpoint={name}
$ sparse-lavida evaluate {name}
```
"""
