# SPDX-License-Identifier: Apache-2.0
"""The model card (README) of a model folder: metadata for the hub, and how to use the model."""

import pathlib
import re
import tempfile

from sparse_lavida_jax.checkpoints import hub, model_folder
from sparse_lavida_jax.prompting.protocol import prompt_format
from sparse_lavida_jax.prompting.vocabulary import Vocabulary

_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n+", re.DOTALL)
_CONVERTED = re.compile(r"^# Converted from (\S+)$", re.MULTILINE)  # as `convert` writes it
SCORES, USE = "\n## Scores\n", "\n## Use\n"
OWN_PROMPT = "what to draw"


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


def card(folder: pathlib.Path, name: str, scores: str = "") -> str:
    """Returns the README of a model folder with metadata for the hub and a section on its use.

    Args:
        scores: a Markdown table; by default the scores in the README, if it has any.
    """
    settings, text = model_folder.read_config(folder), model_folder.read_text(folder, "README.md")
    said = _FRONT_MATTER.sub("", text).partition(USE)[0].strip() or f"# {name}"  # no older card
    converted = _CONVERTED.search(said)
    base = settings.train.init_from or (converted[1] if converted else "")
    is_free = "Apache-2.0" in said and "non-commercial" not in said
    lines = [
        "library_name: sparse-lavida-jax",
        "pipeline_tag: any-to-any",
        f"license: {'apache-2.0' if is_free and not (folder / 'official').is_dir() else 'other'}",
        *([f"base_model: {base.partition('@')[0]}"] if hub.is_id(base) else []),
        "tags: [jax, masked-diffusion, sparse-lavida, text-to-image, image-editing]",
    ]
    front = "\n".join(lines)
    own = Vocabulary.read(folder)  # of a model trained from scratch
    prompts = prompt_format(settings.prompts)
    known = own or prompts.taught(settings.data)
    knows = f"\nIt knows {known.knows}.\n" if known else ""
    prompt = OWN_PROMPT if own else prompts.example
    is_judged = settings.data.source == prompts.world  # by programs of this package
    evaluate = f"$ sparse-lavida evaluate {name}\n" if is_judged else ""
    return f"""---
{front}
---

{with_scores(said, scores) if scores else said}
{USE}{knows}
```python
from sparse_lavida_jax import SparseLaViDa

pipe = SparseLaViDa.from_pretrained("{name}")
pipe.generate("{prompt}", seed=0).image.save("image.png")
```

```console
$ sparse-lavida generate "{prompt}" --checkpoint={name}
{evaluate}```
"""


def with_scores(readme: str, table: str) -> str:
    """Returns a README that ends in a table of scores, which replaces an older one."""
    said = readme.partition(SCORES)[0].strip()
    about = "The column `chance` is the share that is right without looking at the image."
    return f"{said}\n{SCORES}\n{table}\n\n{about}"
