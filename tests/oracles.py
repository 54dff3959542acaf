# SPDX-License-Identifier: Apache-2.0
"""The paper's mask and the released model's forward pass, in plain NumPy, slow on purpose.

Written from the paper and from the description of the base model, not from our code: one
sequence with a boolean modality mask that gathers and scatters in every layer, an explicit mask
matrix, float64.
"""

import math

import numpy as np


def algorithm_1(block, num_clean: int) -> np.ndarray:
    """Returns Sec. 7.3's mask, line by line."""
    mask = np.zeros((len(block), len(block)), bool)
    for i, q_block in enumerate(block):
        for j, k_block in enumerate(block):
            if q_block == 0:
                if k_block <= 0:
                    mask[i, j] = True
            elif 1 <= q_block <= num_clean:
                if k_block <= q_block:
                    mask[i, j] = True
            elif k_block <= num_clean or k_block == q_block:
                mask[i, j] = True
    return mask


def attention_row(q, keys, values, sees, scale: float):
    """Returns one query's output and log-sum-exp, or zeros and None if it sees nothing."""
    scores = {j: float(np.dot(q, key)) * scale for j, key in enumerate(keys) if sees[j]}
    if not scores:
        return np.zeros(values.shape[-1]), None
    peak = max(scores.values())
    total = sum(math.exp(score - peak) for score in scores.values())
    out = np.zeros(values.shape[-1])
    for j, score in scores.items():
        out += math.exp(score - peak) / total * values[j]
    return out, peak + math.log(total)


def plain_forward(model, ids, codes, cells, is_image, position, mask):
    """Returns text logits [s v] and image logits [s g c] of one sequence (`plain_hidden`)."""
    hidden = plain_hidden(model, ids, codes, cells, is_image, position, mask)
    return text_logits(model, hidden), np.stack([cell_logits(model, x) for x in hidden])


def plain_hidden(model, ids, codes, cells, is_image, position, mask, seen=None):
    """Returns the final hidden states [s e] of one sequence, zero-padded as released.

    Args:
        ids: text ids [s]; -1 stands for an understanding register.
        codes: codes [s g]; -1 stands for a generation register.
        cells: raster index of each image token, -1 for none.
        is_image: the modality mask [s].
        mask: who sees whom [s s].
        seen: vision features that stand in for text ids, by index of their token.
    """
    settings = model.settings
    wide, narrow = settings.width, settings.generation_width
    x = np.zeros((len(ids), wide))
    for i in range(len(ids)):
        if is_image[i] and codes[i, 0] < 0:
            x[i, :narrow] = _array(model.register_generation)
        elif is_image[i]:
            x[i, :narrow] = _embed_cell(model, codes[i])
            if settings.cell_positions and cells[i] >= 0:
                row, column = divmod(int(cells[i]), settings.grid_size)
                x[i, :narrow] += _array(model.cell_row)[row] + _array(model.cell_column)[column]
        elif seen and i in seen:
            x[i] = seen[i]
        elif ids[i] < 0:
            x[i] = _array(model.register_understanding)
        else:
            x[i] = _array(model.text_embedding)[ids[i]]
    for n in range(settings.num_layers):
        is_joint = n <= settings.dual_tower_layers
        stack = model.joint_layers if is_joint else model.split_layers
        layer = n if is_joint else n - settings.dual_tower_layers - 1
        sees = mask if is_joint else mask & (is_image[:, None] == is_image[None, :])
        x = _plain_layer(settings, stack, layer, x, is_image, position, sees)
    # The released model norms the zero-padded vector of an image token at full width.
    return _rms(x, _array(model.final_norm.weight), settings.norm_eps)


def text_logits(model, hidden):
    """Returns logits [s v] of final hidden states [s e]."""
    return hidden @ _array(model.text_head.kernel)


def _plain_layer(settings, stack, layer, x, is_image, position, sees):
    heads, wide = settings.num_heads, settings.head_dim
    q, k, v = (np.zeros((len(x), heads * wide)) for _ in range(3))
    branches = [(~is_image, stack.understanding, settings.width)]
    branches += [(is_image, stack.generation, settings.generation_width)]
    for chosen, branch, width in branches:
        own = x[chosen][:, :width]
        normed = _rms(own, _array(branch.attn_norm.weight)[layer], settings.norm_eps)
        for target, projection in ((q, branch.q), (k, branch.k), (v, branch.v)):
            target[chosen] = normed @ _array(projection.kernel)[layer]
    attended = np.zeros_like(q)
    for h in range(heads):
        part = slice(h * wide, (h + 1) * wide)
        queries, keys = (_rotate(t[:, part], position, settings.rope_theta) for t in (q, k))
        scores = np.where(sees, queries @ keys.T * wide**-0.5, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        attended[:, part] = weights / weights.sum(axis=1, keepdims=True) @ v[:, part]
    out = attended @ _array(stack.attn_out.kernel)[layer]
    result = np.zeros_like(x)
    for chosen, branch, width in branches:
        own = x[chosen][:, :width] + out[chosen][:, :width]
        normed = _rms(own, _array(branch.mlp_norm.weight)[layer], settings.norm_eps)
        gate, up, down = (
            _array(getattr(branch.mlp, name).kernel)[layer] for name in ("gate", "up", "down")
        )
        opened = normed @ gate
        rows = np.flatnonzero(chosen)
        result[rows, :width] = own + (opened / (1 + np.exp(-opened)) * (normed @ up)) @ down
    return result


def _rotate(x, position, theta):
    """Rotary embedding as complex multiplication of (first half, second half)."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.outer(position, theta ** (-np.arange(half) / half)))
    turned = (x[:, :half] + 1j * x[:, half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def _embed_cell(model, codes):
    embedding, eps = model.image_embedding, 1e-6
    vectors = []
    for code in codes:
        x = _rms(_array(embedding.table)[code], _array(embedding.code_norm.weight), eps)
        x = x @ _array(embedding.code.kernel)
        if len(codes) > 1:
            x = _rms(x, _array(embedding.merge_norm.weight), eps)
        vectors.append(x)
    x = np.concatenate(vectors)
    if len(codes) > 1:
        x = x @ _array(embedding.merge.kernel)
    x = _rms(x, _array(embedding.cell_norm.weight), eps)
    return x @ _array(embedding.cell.kernel)


def cell_logits(model, hidden):
    """Returns logits [g c] of the codes of one cell from its final hidden state [e]."""
    head, eps, g = model.image_head, 1e-6, model.settings.codes_per_token
    x = hidden[: model.settings.generation_width]
    if g > 1:
        x = _rms(x, _array(head.spread_norm.weight), eps) @ _array(head.spread.kernel)
    logits = []
    for code in np.split(x, g):
        y = _rms(code, _array(head.cell_norm.weight), eps) @ _array(head.cell.kernel)
        y = _rms(y @ _array(head.code.kernel), _array(head.code_norm.weight), eps)
        logits.append(y @ _array(head.logits.kernel))
    return np.stack(logits)


def _array(parameter):
    return np.asarray(parameter, np.float64)
