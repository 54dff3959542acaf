# SPDX-License-Identifier: Apache-2.0
"""Writes a folder like the LaViDa-O release with arbitrary numbers, in place of the real weights.

It converts, loads and exports as the release does. The images that it draws are noise.
"""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import tensors
from sparse_lavida_jax.convert import names
from sparse_lavida_jax.convert.settings import official_config, official_vq_config
from sparse_lavida_jax.data import files
from sparse_lavida_jax.lavida_o import chat

# Corners of boxes, in eighths of an image, and the tokens that enclose them.
LOCATIONS = (*(f"<LOC_{i}>" for i in range(9)), "<box_p>", "</box_p>", "<LOC_BEGIN>", "<LOC_END>")


def tiny_settings() -> config.Config:
    """Returns LaViDa-O with 3 layers in place of 32, narrow, for images of 32 pixels per side."""
    vq = config.VQ(
        image_size=32, channels=(8, 8, 8), layers_per_block=1, latent_channels=4, codebook_size=16,
        norm_groups=4,
    )  # fmt: skip
    vision = config.Vision(
        image_size=8, patch_size=2, width=16, num_layers=1, num_heads=2, mlp_hidden=24, pool=2,
        newline=True, grid_sizes=((8, 16), (16, 8)), unused_post_norm=True,
    )  # fmt: skip
    model = config.Model(
        vocab_size=byte_tokenizer().get_vocab_size(),
        end_of_text_id=chat.CONTROL.index(chat.END_OF_TEXT),
        text_mask_id=chat.CONTROL.index(chat.MASK),
        width=32, mlp_hidden=48, num_layers=3, dual_tower_layers=1, num_heads=2, head_dim=16,
        generation_width=24, generation_mlp_hidden=40, codebook_size=vq.codebook_size,
        codes_per_token=4, grid_size=vq.image_size // vq.factor // 2, image_table_rows=24,
        trained_attention="full", vision=vision,
    )  # fmt: skip
    return config.Config(name="lavida-o", model=model, vq=vq)


def byte_tokenizer(
    control: Sequence[str] = chat.CONTROL,
    more: Sequence[str] = LOCATIONS,
    ids: Mapping[str, int] | None = None,
) -> tokenizers.Tokenizer:
    """Returns a tokenizer with `control` first, in that order, one token per byte, then `more`.

    Args:
        ids: of tokens that stand elsewhere, as in the release; ids without a token get one that no
            text contains.
    """
    ids = ids or {}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = [token for token in (*control, *alphabet) if token not in ids]
    size = max(len(others) + len(ids), max(ids.values(), default=0) + 1)
    taken = {*ids.values()}
    free = [i for i in range(size) if i not in taken]
    others += [f"<unused_{i}>" for i in free[len(others) :]]
    vocabulary = {**ids, **dict(zip(others, free, strict=True))}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*control])
    made.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in more])
    return made


def write(folder: pathlib.Path, settings: config.Config) -> int:
    """Writes a model in the form of a released folder; returns the bytes of its tensors."""
    (folder / "vqvae").mkdir(parents=True)
    files.write_json(folder / "config.json", official_config(settings, "bfloat16"))
    files.write_json(folder / "vqvae" / "config.json", official_vq_config(settings.vq))
    model = settings.model
    ids = {chat.END_OF_TEXT: model.end_of_text_id, chat.MASK: model.text_mask_id}
    byte_tokenizer(ids=ids).save(str(folder / "tokenizer.json"))
    wanted = [_arbitrary(name) for name in names.table(settings) if not name.optional]
    tensors.write_sharded(folder, wanted, always_indexed=True)
    return sum(tensor.nbytes for tensor in wanted)


def _arbitrary(name: names.Name) -> tensors.Tensor:
    is_norm = len(name.shape) == 1 and name.official.endswith("weight")

    def read() -> np.ndarray:
        # Every tensor has its own numbers, so that none can be mistaken for another, with random
        # mantissas, so that nothing can be compressed. Scales of norms are between 1 and 1.5, other
        # numbers have magnitudes around 0.01.
        random = np.random.default_rng([*name.official.encode()])
        bits = random.integers(0, 2**16, name.shape, np.uint16)
        bits = (bits & 0x003F) | 0x3F80 if is_norm else (bits & 0x80FF) | 0x3C00
        return bits.view(tensors.DTYPES["BF16"])

    return tensors.Tensor(name.official, "BF16", name.shape, read)
