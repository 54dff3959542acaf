# SPDX-License-Identifier: Apache-2.0
"""One step of sampling as the paper writes it: the whole sequence at once, no cache, float64.

Written from Sec. 3.2, Sec. 7.2 and Algorithm 1, with the layers of the base model from
`oracles.py`. From our code it uses only the parameters of a model and the parts of a request.
Nothing is left out of the sequence: prompt, the whole response with its masks, what follows it,
and registers for every masked block. Who sees whom is decided by Algorithm 1 alone.
"""

import dataclasses
import math

import jax
import numpy as np
import oracles

from sparse_lavida_jax import sequence

PROMPT = 0  # C_0
GIVEN = 1  # known before the first step, so clean; the first step decodes block 2
FIRST = 2
REGISTER = -1  # in place of an id or a code (`oracles.plain_hidden`)
TINY = 1e-6  # epsilon of the norms of the vision tower, and of the normalisation of features


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of the sequence.

    Attributes:
        position: its place in the sequence, for the rotary embedding.
        block: A[i] of Algorithm 1.
        text: its id, if the understanding branch computes it.
        codes: of its cell, if the generation branch computes it.
        cell: raster index of the cell.
        vector: a vision feature in place of the embedding of `text`.
    """

    position: int
    block: int
    text: int | None = None
    codes: np.ndarray | None = None
    cell: int = -1
    vector: np.ndarray | None = None


def in_float64(model):
    """Returns the model with its parameters in float64, on the host."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), model)


def step_logits(model, example, response, block, now, scale, scale_image=None):
    """Returns the guided logits [l g v] of tokens that step `now` may decode, NaN elsewhere.

    Args:
        model: in float64.
        example: the request, with the parts of its prompt.
        response: the response before the step [l g], the mask id where it is masked.
        block: A[i] of the response [l]: `GIVEN`, the step that decoded a clean token, `now` for
            what this step may decode, later numbers for other masks.
        scale: of guidance; 0: none.
        scale_image: of guidance away from the source alone; for edits, which have three rows.
    """

    def row(**dropped):
        return row_logits(model, example, response, block, now, **dropped)

    guided = row()  # spec Sec. 7.2, 5
    if scale_image is not None:
        guided = (1 + scale_image) * guided - scale_image * row(drop_prompt=True)
    if scale:
        guided = (1 + scale) * guided - scale * row(drop_prompt=True, drop_source=True)
    return guided


def row_logits(model, example, response, block, now, *, drop_prompt=False, drop_source=False):
    """Returns the logits [l g v] of one guidance row, NaN outside block `now`."""
    is_image = example.modality == "image"
    tokens, start, length = prompt_tokens(model, example, drop_prompt, drop_source)
    first = len(tokens)
    for i, codes in enumerate(response):
        own = {"codes": codes, "cell": i} if is_image else {"text": codes[0]}
        tokens.append(Token(start + i, block[i], **own))
    # Registers for every masked block, all at positions L .. L+m-1, after the whole sequence.
    for masked in range(now, max(block) + 1):
        for i in range(model.settings.num_registers):
            own = {"codes": np.full_like(response[0], REGISTER)} if is_image else {"text": REGISTER}
            tokens.append(Token(length + i, masked, **own))
    final = hidden(model, tokens, num_clean=now - 1)[first : first + len(response)]
    if is_image:
        logits = np.stack([oracles.cell_logits(model, x) for x in final])
    else:
        logits = oracles.text_logits(model, final)[:, None]
    logits[np.asarray(block) != now] = np.nan
    return logits


def prompt_tokens(model, example, drop_prompt, drop_source):
    """Returns the tokens of C_0, where the response begins, and L, the length of everything.

    Guidance replaces what it drops by text masks. So a dropped source cell becomes text, which the
    other branch computes (spec Sec. 2.2 and 7.6).
    """
    tokens, position, start = [], 0, 0
    for part in example.parts:
        n = sequence.num_tokens(part)
        if isinstance(part, sequence.Response):
            start, position = position, position + n
            continue
        for i in range(n):
            own = {"text": model.settings.text_mask_id}
            if isinstance(part, sequence.Text) and (part.keep or not drop_prompt):
                own = {"text": part.ids[i]}
            elif isinstance(part, sequence.VisionTokens) and not drop_prompt:
                own = {"text": 0, "vector": features(model, example.pixels)[i]}
            elif isinstance(part, sequence.Source) and not drop_source:
                own = {"codes": part.codes[i], "cell": i}
            tokens.append(Token(position + i, PROMPT, **own))
        position += n
    return tokens, start, position


def hidden(model, tokens, num_clean):
    """Returns the final hidden states [s e] of a sequence with `num_clean` (M) clean blocks."""
    no_codes = np.zeros(model.settings.codes_per_token, int)
    return oracles.plain_hidden(
        model,
        [0 if token.text is None else token.text for token in tokens],
        np.stack([no_codes if token.codes is None else token.codes for token in tokens]),
        [token.cell for token in tokens],
        np.array([token.codes is not None for token in tokens]),
        np.array([token.position for token in tokens]),
        oracles.algorithm_1([token.block for token in tokens], num_clean),
        seen={i: token.vector for i, token in enumerate(tokens) if token.vector is not None},
    )


def features(model, pixels):
    """Returns the features of the vision tower for an image, row by row (spec Sec. 4)."""
    vision, settings = model.vision, model.settings.vision
    x = _windows((pixels / 255 - 0.5) / 0.5, settings.patch_size)
    x = _convolved(x, vision.tower.patch_embedding) + _array(vision.tower.position_embedding)
    for n in range(settings.num_layers):
        x = _tower_layer(vision.tower.layers, n, x, settings.num_heads)
    side = settings.image_size // settings.patch_size
    x = _convolved(_windows(x.reshape(side, side, -1), settings.pool), vision.pool)
    x = _linear(vision.projector.fc1, x)
    exact_gelu = x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    x = _linear(vision.projector.fc2, exact_gelu)
    if model.settings.cell_positions:  # ours: normalised, plus position embeddings
        x /= np.sqrt((x**2).mean(axis=-1, keepdims=True) + TINY)
        row, column = np.divmod(np.arange(len(x)), side // settings.pool)
        x += _array(model.seen_row)[row] + _array(model.seen_column)[column]
    return x


def _tower_layer(layers, n, x, num_heads):
    normed = _layer_norm(layers.layer_norm1, x, n)
    q, k, v = (_linear(part, normed, n) for part in (layers.q, layers.k, layers.v))
    heads = []
    for own in np.split(np.arange(x.shape[1]), num_heads):
        weights = np.exp(q[:, own] @ k[:, own].T / math.sqrt(len(own)))
        heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, own])
    x = x + _linear(layers.out, np.concatenate(heads, axis=1), n)
    y = _linear(layers.fc1, _layer_norm(layers.layer_norm2, x, n), n)
    tanh_gelu = y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))) / 2
    return x + _linear(layers.fc2, tanh_gelu, n)


def _windows(grid, side):
    """Returns the values [windows, side * side * channels] of adjacent windows."""
    height, width = (n // side for n in grid.shape[:2])
    return np.stack(
        [
            grid[y * side : (y + 1) * side, x * side : (x + 1) * side].reshape(-1)
            for y in range(height)
            for x in range(width)
        ]
    )


def _convolved(windows, conv):
    kernel = _array(conv.kernel)
    return windows @ kernel.reshape(-1, kernel.shape[-1]) + _array(conv.bias)


def _linear(linear, x, n=...):
    return x @ _array(linear.kernel)[n] + _array(linear.bias)[n]


def _layer_norm(norm, x, n):
    x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + TINY)
    return x * _array(norm.scale)[n] + _array(norm.bias)[n]


def _array(parameter):
    return np.asarray(parameter, np.float64)
