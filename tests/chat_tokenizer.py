# SPDX-License-Identifier: Apache-2.0
"""A tokenizer like LaViDa-O's whose text tokens are bytes."""

from sparse_lavida_jax.convert import stand_in
from sparse_lavida_jax.lavida_o import chat


def made_tokenizer(folder, *, control=chat.CONTROL, locations=stand_in.LOCATIONS, **settings):
    """Writes a tokenizer.json with `control` first, in that order, and one token per byte."""
    made = stand_in.byte_tokenizer(control, locations)
    for name, arguments in settings.items():
        getattr(made, name)(**arguments)
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path
