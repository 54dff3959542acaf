# SPDX-License-Identifier: Apache-2.0
"""The least that a sampling request has to compute and to read, counted from its plan.

Only products of matrices and of attention count, with two operations per product. Tokens are those
that the method needs, slots those of the compiled widths, padding included.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suites import RequestCase
from sparse_lavida_jax import config
from sparse_lavida_jax.models import vq
from sparse_lavida_jax.programs.operations import operations
from sparse_lavida_jax.sampling import calls
from sparse_lavida_jax.sampling.prompts import Prompt, batched, parted
from sparse_lavida_jax.training import flops


@dataclasses.dataclass(frozen=True)
class Pass:
    """One forward pass of all rows.

    Attributes:
        operations: without padding.
        weights, keys: bytes to read: every matrix once, keys and values of valid slots.
        tokens, slots: rows x tokens, without and with padding.
    """

    operations: float
    weights: float
    keys: float
    tokens: int
    slots: int


@dataclasses.dataclass(frozen=True)
class RequestWork:
    """A request: its prefill in parts of one shape each (none without a cache), and its steps."""

    prefills: list[Pass]
    steps: list[Pass]

    def total(self, name: str) -> float:
        """Returns the sum of a number over all passes."""
        return float(sum(getattr(one, name) for one in (*self.prefills, *self.steps)))

    @property
    def padding(self) -> float:
        """The share of slots that hold no token."""
        return 1 - self.total("tokens") / self.total("slots")

    def floor_s(self, matmul_tflops: float, copy_gbps: float) -> float:
        """Returns the least seconds of the loop at these rates: per step, to compute or to read."""
        return sum(
            max(one.operations / matmul_tflops / 1e12, (one.weights + one.keys) / copy_gbps / 1e9)
            for one in self.steps
        )


def of_case(case: RequestCase, model: config.Model) -> RequestWork:
    """Counts a batch of requests."""
    settings, plan, kept, prefills = case.settings(model), case.plan(model), case.keeps_prefix, []
    laid = case.sample_inputs(model, range(case.batch))
    if settings.caches_prompt:
        parts = parted(laid, model, keeping=kept)
        prefills = [_pass(case, model, p.prompt) for p in parts if not (kept and p.keeps)]
    if style := calls.styled(laid, batched(laid, model)):
        asked = model.style_parts, model.style_parts
        prefills.append(_pass(case, model, style[0], own=asked))
    together = [batched(laid, model)]
    if not settings.uses_cache:  # guidance rows are passed in shapes of their own
        together = [part.prompt for part in parted(laid, model)]
    full_rows = [jax.tree.map(lambda x: x[-case.batch :], together[-1])]
    steps, committed = [], 0.0
    for part in plan:
        for i in range(part.num_steps):
            used = part.tokens()[i].mean(axis=0).tolist()
            own = {
                "own": (sum(used) + part.registers, part.width),
                "predicted": used[1],
                "committed": committed,
                "passes_prompt": settings.passes_prompt(part),
            }
            passed = together if settings.passes_all_rows(part) else full_rows
            steps.append(_as_one([_pass(case, model, rows, **own) for rows in passed]))
            if part.refreshes:
                committed = used[0]
            elif settings.preset.cache_response and not settings.preset.refreshes:
                committed += used[0]
    return RequestWork(prefills, steps)


def of_image_tokenizer(settings: config.VQ) -> dict[str, float]:
    """Counts the operations to encode and to decode one image, in tiles that overlap if large."""
    model, side = vq.shapes(settings), settings.image_size
    codes = jax.ShapeDtypeStruct((1, *(side // settings.factor,) * 2), jnp.int32)
    pixels = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
    calls = {"vq_encode": (vq.VQModel.encode, pixels), "vq_decode": (vq.VQModel.decode, codes)}
    return {name: operations(call, model, given) for name, (call, given) in calls.items()}


def _as_one(passes: list[Pass]) -> Pass:
    """Combines the passes of one step: each matrix has to be read only once."""
    operations, weights, keys, tokens, slots = zip(*map(dataclasses.astuple, passes), strict=True)
    return Pass(sum(operations), max(weights), sum(keys), sum(tokens), sum(slots))


def _pass(
    case: RequestCase,
    model: config.Model,
    prompt: Prompt,
    *,
    own: tuple[float, int] = (0.0, 0),
    predicted: float = 0.0,
    committed: float = 0.0,
    passes_prompt: bool = True,
) -> Pass:
    """Counts a pass of some rows. Numbers per row come in pairs: text tokens, image tokens.

    Args:
        own: tokens and slots of the response, of which some are `predicted`.
        committed: tokens of the response whose keys are cached.
        passes_prompt: whether the prompt is passed too; otherwise its keys are cached.
    """
    rows, streams = len(prompt.length), (prompt.understanding, prompt.generation)
    held = np.array([0 if s is None else (s.tags.horizon >= 0).sum() / rows for s in streams])
    padded = np.array([0 if s is None else s.index.shape[1] for s in streams])
    is_text, whole = case.example.modality == "text", case.discards
    responds = np.array([is_text, not is_text])
    tokens = held * passes_prompt + own[0] * responds
    slots = padded * passes_prompt + own[1] * responds
    cached = held * (not passes_prompt)
    # In joint layers all tokens see each other; in split layers those of the response.
    joint, split = model.num_joint_layers, model.num_split_layers
    seen = (cached + tokens).sum() + committed
    seen_split = responds @ (cached + tokens) + committed
    depth = joint + split * (responds | whole)
    layer = np.array([flops.layer_size(name, model) for name in flops.STREAMS])
    words, codes = (flops.head_size(name, model) for name in flops.STREAMS)
    heads = model.num_heads * model.head_dim
    operations = 2 * (tokens * layer * depth).sum()
    operations += 2 * words * (tokens.sum() if whole else predicted * is_text)
    operations += 2 * codes * predicted * (not is_text)
    operations += 4 * heads * joint * tokens.sum() * seen
    operations += 4 * heads * split * (responds @ tokens) * seen_split
    read = np.where([False, is_text], joint, depth)  # the rest is only to be discarded
    head = words * (is_text or whole)
    if not is_text:
        # The matrices around the codes of a cell are shared by all codes, and read once.
        number = model.codes_per_token
        head += codes // number + (number - 1) * model.generation_width**2
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    weights = (read * layer * (tokens > 0)).sum() * (1 if case.sampling.quantize else itemsize)
    return Pass(
        operations=float(rows * operations),
        weights=float(weights + head * itemsize * (predicted > 0)),
        keys=float(rows * (joint * seen + split * seen_split) * 2 * heads * itemsize),
        tokens=round(rows * tokens.sum()),
        slots=round(rows * slots.sum()),
    )
