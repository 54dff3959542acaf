# SPDX-License-Identifier: Apache-2.0
"""A tokenizer such as LaViDa-O has, whose text tokens are bytes."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from sparse_lavida_jax.data import chat

LOCATIONS = tuple(f"<LOC_{i}>" for i in range(9))
BOXES = ("<box_p>", "</box_p>", "<LOC_BEGIN>", "<LOC_END>")


def made_tokenizer(folder, *, control=chat.CONTROL, locations=LOCATIONS + BOXES, **settings):
    """Writes a tokenizer.json with `control` first, in that order, and one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*control, *alphabet))}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([*control])
    inner.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in locations])
    for name, arguments in settings.items():
        getattr(inner, name)(**arguments)
    path = folder / "tokenizer.json"
    inner.save(str(path))
    return path
