# SPDX-License-Identifier: Apache-2.0
"""One pass over a whole plan: what every step of the sampler predicts for given responses.

A row is laid out as in training with `diffusion.blocks="plan"`: each decoded token once clean, in
the block of its step, and for each step a masked copy of what that step predicts, which sees the
blocks before it (paper Sec. 3.3). Unlike in training, the blocks, the registers and the codes that
each step predicts are those of a sampler's plan, and there is a row for each guidance variant. So
the logits are the sampler's up to rounding, and the noise is the sampler's own. The pass holds as
many tokens as the sampler's steps together; it saves launches and reads of weights, not work.
"""

import bisect
import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from sparse_lavida_jax.data.batch import RowShape, stack
from sparse_lavida_jax.data.corrupted_rows import CorruptedRow, StreamTokens, corrupt_together
from sparse_lavida_jax.diffusion import ABSENT, Blocks
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.programs.persistent_jit import Programs, persistent_jit
from sparse_lavida_jax.sampling import commit, draw, plans, state
from sparse_lavida_jax.sampling.calls import over_mesh, styled
from sparse_lavida_jax.sampling.plans import Steps
from sparse_lavida_jax.sampling.presets import StepSettings
from sparse_lavida_jax.sampling.prompts import SampleInput, batched, drops
from sparse_lavida_jax.sampling.state import UNTOLD
from sparse_lavida_jax.sequence import RESPONSE_STREAM, SeenBatch, prompt_row, stack_images
from sparse_lavida_jax.tags import FIRST_BLOCK, GIVEN_BLOCK, Stream


class Step(NamedTuple):
    """A step of one row of a plan, or a pass over some codes of its cells.

    Attributes:
        block: the sampler's number of the step.
        at: positions of the tokens that it predicts.
        known: their codes that earlier passes of the step decoded.
        decided: their codes that it may commit.
        count: how many it commits.
        temperature, guidance: shares of the scales of the row; no guidance is 0.
        registers: how many it passes.
    """

    block: int
    at: Int[np.ndarray, " n"]
    known: Bool[np.ndarray, "n g"]
    decided: Bool[np.ndarray, "n g"]
    count: int
    temperature: float
    guidance: float
    registers: int


class Scores(NamedTuple):
    """What the steps of a row predict for its response; an entry for each token of each step.

    Attributes:
        step: index of the step.
        at: position of the token.
        decided: the codes that the step may commit.
        margin: how far the score of each code is above the best other one, in logits; below 0:
            another one is drawn.
        lead: that of what is drawn, the least of the codes of a token.
        bits: -log2 of its probability, as filtered and at the temperature; 0 at temperature 0.
        sure, drawn_sure, mode_sure: confidence in the given token, in what is drawn, and in the
            most probable one (`draw.confidences`).
        tokens: how many the row has in all guidance variants, with prompts and registers.
    """

    step: Int[np.ndarray, " n"]
    at: Int[np.ndarray, " n"]
    decided: Bool[np.ndarray, "n g"]
    margin: Float[np.ndarray, "n g"]
    lead: Float[np.ndarray, " n"]
    bits: Float[np.ndarray, "n g"]
    sure: Float[np.ndarray, " n"]
    drawn_sure: Float[np.ndarray, " n"]
    mode_sure: Float[np.ndarray, " n"]
    tokens: int

    @property
    def deficit(self) -> Float[np.ndarray, "n g"]:
        """How far the score of each code is below the largest, in logits; 0: it is drawn."""
        return np.maximum(-self.margin, 0)


def image_order(phases: Sequence[Steps], given: Bool[np.ndarray, " l"]) -> Int[np.ndarray, " l"]:
    """Returns the block in which each cell of an image is decoded, from a plan of one row."""
    decoded_at = np.where(given, GIVEN_BLOCK, UNTOLD)
    for phase in phases:
        for block, decode in zip(phase.block, phase.decode[:, 0], strict=True):
            decoded_at[decode[decode >= 0]] = block
    return decoded_at


def steps_of(
    phases: Sequence[Steps],
    settings: StepSettings,
    decoded_at: Int[np.ndarray, " l"],
    codes: int,
) -> list[Step]:
    """Returns the steps of a plan of one row, up to the last in which anything is decoded.

    Args:
        decoded_at: the block of each token, `UNTOLD` where none decodes it.
        codes: of a token.
    """
    found: list[Step] = []
    order = np.where(decoded_at == UNTOLD, state.NOT_DECODED, decoded_at)
    for phase in phases:
        for i in range(phase.num_steps):
            block, at = int(phase.block[i]), phase.decode[i, 0]
            slots = (at >= 0) & (order[at] >= block)
            at, decided = at[slots], phase.candidates[i, 0][slots]
            if block > decoded_at.max(initial=0) or not len(at):
                continue
            decided = np.broadcast_to(decided, (len(at), codes))
            again = bool(found) and found[-1].block == block  # a later pass of the same step
            known = found[-1].known | found[-1].decided if again else np.zeros_like(decided)
            scales = float(phase.temperature[i]), float(phase.guidance[i] * phase.guided)
            count, at = int(phase.count[i, 0]), np.asarray(at)
            found.append(Step(block, at, known, decided, count, *scales, phase.registers))
    return found


def blocks_of(steps: Sequence[Step], decoded_at: Int[np.ndarray, " l"]) -> Blocks:
    """Returns the training blocks of a whole plan: a masked block for each step and pass."""
    last, sizes = steps[-1].block, [len(step.at) for step in steps]
    is_clean = (decoded_at != UNTOLD) & (decoded_at < last)
    numbers = tuple(range(last, last + len(steps)))
    block = np.concatenate([np.where(is_clean, decoded_at, ABSENT), np.repeat(numbers, sizes)])
    masked = block >= last
    own = np.zeros((len(decoded_at), steps[0].known.shape[1]), bool)
    return Blocks(
        block.astype(np.int32), masked, last - 1, numbers, masked.astype(float), 1.0,
        known=np.concatenate([own, *(step.known for step in steps)]),
        copies=np.concatenate([step.at for step in steps]),
        horizons={number: step.block - 1 for number, step in zip(numbers, steps, strict=True)},
    )  # fmt: skip


def scores(
    model: Denoiser,
    inputs: Sequence[SampleInput],
    steps: Sequence[Sequence[Step]],
    responses: Sequence[Int[np.ndarray, "_l g"]],
    orders: Sequence[Int[np.ndarray, " _l"]],
    *,
    settings: StepSettings,
    stage: str,
    tolerance: float = 0.0,
    programs: Programs = contextlib.nullcontext,
) -> list[Scores]:
    """Passes the whole plans of a batch once, and scores the responses.

    Args:
        inputs: the examples, as for the sampler.
        steps: of each row (`steps_of`), at least one.
        responses: what is scored.
        orders: the block of each token of them.
        settings: as for the sampler.
        stage: a key of `state.NOISE`.
        tolerance: a draw that is no further than this from the largest score may have been made.
        programs: entered around the pass.

    Returns:
        The scores of each row.
    """
    given, blocks, tokens = arrays(
        model, inputs, steps, responses, orders, settings=settings, stage=stage
    )
    how = dataclasses.replace(settings, greedy=False)
    shapes = tuple(np.shape(x) for x in jax.tree.leaves(given))
    with programs((stage, how, shapes)), over_mesh(model):
        found = jax.device_get(scored(model, *given, np.float32(tolerance), settings=how))
    ends = np.cumsum([len(own.copies) for own in blocks])
    values = [np.split(x, ends) for x in found[1:]]
    done = []
    for i, own in enumerate(steps):
        step = np.repeat(np.arange(len(own)), [len(one.at) for one in own])
        decided = np.concatenate([one.decided for one in own])
        where = step, blocks[i].copies, decided
        done.append(Scores(*where, *(x[i] for x in values), tokens=int(tokens[i])))
    return done


def arrays(
    model: Denoiser,
    inputs: Sequence[SampleInput],
    steps: Sequence[Sequence[Step]],
    responses: Sequence[Int[np.ndarray, "_l g"]],
    orders: Sequence[Int[np.ndarray, " _l"]],
    *,
    settings: StepSettings,
    stage: str,
) -> tuple[tuple[Any, ...], list[Blocks], Int[np.ndarray, " b"]]:
    """Returns what `scored` takes after the model, but for the tolerance; see `scores`.

    Then the blocks of each row, and how many tokens it has in all guidance variants.
    """
    blocks = [blocks_of(*pair) for pair in zip(steps, orders, strict=True)]
    streams, pixels, tagged, tokens = _laid_out(model, inputs, steps, responses, blocks, settings)
    tables = [
        _columns(i, own, blocks[i], responses[i], tagged[i :: len(inputs)])
        for i, own in enumerate(steps)
    ]
    columns = [np.concatenate(parts) for parts in zip(*tables, strict=True)]
    size = _rounded(len(columns[0]))
    padded = [np.concatenate([x, np.repeat(x[:1], size - len(x), axis=0)]) for x in columns]
    requests = [one.request for one in inputs]
    turns = sorted({step for one in requests for step, _ in one.seeds(stage)})
    padded[-1] = np.searchsorted(turns, padded[-1] - FIRST_BLOCK, side="right") - 1
    keys = [state.keys_from(requests, stage, step) for step in turns]
    keys += keys[-1:] * ((1 << (len(keys) - 1).bit_length()) - len(keys))  # for few programs
    rows = state.rows_of(inputs, settings, stage)
    if settings.style_parts and (style := styled(inputs, batched(inputs, model.settings))):
        with over_mesh(model):
            rows = dataclasses.replace(rows, style=state.draw_styles(model, *style))
    return (*streams, pixels, rows, jnp.stack(keys), padded), blocks, tokens


def _columns(
    row: int,
    steps: Sequence[Step],
    blocks: Blocks,
    response: Int[np.ndarray, "l g"],
    tagged: Int[np.ndarray, "r s"],
) -> tuple[np.ndarray, ...]:
    """Returns what `scored` needs to know of each token of each step of a row.

    Args:
        tagged: the blocks of the tokens in its stream, sorted, for each guidance row.
    """
    sizes = np.array([len(step.at) for step in steps])
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    starts = [np.searchsorted(line, blocks.masked_blocks) for line in tagged]
    slot = np.stack([np.repeat(own, sizes) + within for own in starts], axis=1)
    at, of_row = blocks.copies.astype(np.int32), np.full(len(within), row, np.int32)
    shares = np.array([(step.temperature, step.guidance) for step in steps], np.float32)
    block = np.repeat(np.array([step.block for step in steps], np.int32), sizes)
    temperature, guidance = np.repeat(shares, sizes, axis=0).T
    target = response[at].astype(np.int32)
    return of_row, slot.astype(np.int32), at, target, block, temperature, guidance, block


def _laid_out(
    model: Denoiser,
    inputs: Sequence[SampleInput],
    steps: Sequence[Sequence[Step]],
    responses: Sequence[Int[np.ndarray, "_l g"]],
    blocks: Sequence[Blocks],
    settings: StepSettings,
) -> tuple[tuple[Stream | None, Stream | None], SeenBatch | None, np.ndarray, np.ndarray]:
    """Returns the streams of all guidance rows, and their images.

    Then the blocks of the stream with the responses, which are sorted, and the tokens of each row.
    """
    how, is_text = model.settings, settings.modality == "text"
    ids = {"text_mask_id": how.text_mask_id, "codes_per_token": how.codes_per_token}
    rows, counts = [], []
    for dropped in drops(settings.guidance_rows, settings.edit_guidance):
        for one, own, response, cut in zip(inputs, steps, responses, blocks, strict=True):
            prompt = prompt_row(one.example.parts, **ids, **dropped)
            rows.append(CorruptedRow(prompt, response, settings.modality, cut, how))
            counts.append(dict(zip(cut.masked_blocks, (s.registers for s in own), strict=True)))
    streams = corrupt_together(rows)
    name = "understanding" if is_text else "generation"
    lengths = [row.prompt.length for row in rows]
    streams = streams._replace(**{name: _fewer_registers(getattr(streams, name), lengths, counts)})
    sizes = [np.bincount(one.example, minlength=len(rows)) for one in streams]
    shape = RowShape(*(_rounded(int(own.max())) for own in sizes))
    images = [one.example.pixels for one in inputs] * settings.guidance_rows
    batch = stack(streams, shape, how, pixels=stack_images(images), predicts=rows[0].predicts)
    own = getattr(batch, name).tags.block
    tokens = np.sum(sizes, axis=0).reshape(settings.guidance_rows, -1).sum(axis=0)
    return (batch.understanding, batch.generation), batch.pixels, own, tokens


def _fewer_registers(
    stream: StreamTokens, lengths: Sequence[int], counts: Sequence[dict[int, int]]
) -> StreamTokens:
    """Returns the tokens without the registers that a step does not pass: the last ones.

    Args:
        lengths: L of each row, where the positions of registers start.
        counts: registers of each masked block of each row.
    """
    tokens = stream.tokens
    pairs = zip(stream.example.tolist(), tokens.block.tolist(), strict=True)
    most = np.array([counts[i].get(block, 0) for i, block in pairs])
    kept = tokens.position - np.array(lengths)[stream.example] < most
    columns = {name: values[kept] for name, values in vars(tokens).items()}
    return StreamTokens(type(tokens)(**columns), stream.example[kept], stream.totals)


def _rounded(length: int) -> int:
    """Returns a length that many rows share, so that they share programs."""
    return plans.BUCKETS[bisect.bisect_left(plans.BUCKETS, length)] if length else 0


@persistent_jit(static=("settings",), depends=state.attention)
def scored(
    model: Denoiser,
    understanding: Stream | None,
    generation: Stream | None,
    pixels: SeenBatch | None,
    rows: state.Rows,
    keys: Key[Array, "t n"],
    columns: list[Array],
    tolerance: Float[Array, ""],
    *,
    settings: StepSettings,
) -> tuple[Array, ...]:
    """Returns what is drawn for tokens [n g], and margins, leads, bits, confidences (`Scores`).

    Args:
        keys: of the noise from each turn on (`presets.Turn`).
        columns: row, place in the stream of each guidance row, position, codes, block, shares of
            the temperature and of guidance, and the turn whose key it is drawn with.
    """
    row, slot, at, target, block, temperature, guidance, turn = map(jnp.asarray, columns)
    features = None if pixels is None else model.see(pixels)
    wanted = RESPONSE_STREAM[settings.modality]
    style = None if rows.style is None else state.repeat(rows.style, settings.guidance_rows)
    hidden, _ = model(understanding, generation, features, wanted=wanted, style=style)
    guides = jnp.arange(settings.guidance_rows) * rows.temperature.shape[0]
    own = hidden[wanted][guides[None] + row[:, None], slot]  # [n r e]
    if settings.modality == "text":
        logits = model.text_logits(own)[:, :, None]
    else:
        logits = model.image_logits(own, einops.repeat(target, "n g -> n r g", r=own.shape[1]))
    judge = functools.partial(_judged, model, settings, tolerance)
    judged = dataclasses.replace(rows, style=None)  # which is in the logits already
    own_rows = [jnp.asarray(x)[row] for x in list(vars(judged).values())[1:-1]]
    values = keys[turn, row], *own_rows
    return jax.vmap(judge)(logits, target, values, (at, block, temperature, guidance))


def _judged(
    model: Denoiser,
    settings: StepSettings,
    tolerance: Float[Array, ""],
    logits: Float[Array, "r g v"],
    target: Int[Array, " g"],
    of_row: tuple[Array, ...],
    of_step: tuple[Array, ...],
) -> tuple[Array, ...]:
    """Returns the draw and the scores of one token, as `sample.step` computes them.

    Args:
        of_row: the fields of `state.Rows`.
        of_step: position, block, and shares of the temperature and of guidance.
    """
    rows, (at, block, temperature, guidance) = state.Rows(*(x[None] for x in of_row)), of_step
    nothing, one, alone = jnp.zeros((1, 0), jnp.int32), jnp.float32(1), jnp.ones((1, 1, 1), bool)
    now = Steps(
        block, nothing, at[None, None], alone, nothing, jnp.ones(1, jnp.int32), one, temperature,
        guidance,
    )  # fmt: skip
    logits = draw.guided(logits[:, None, None], rows, now, settings)
    logits = draw.allowed(logits, rows, now, model.settings, settings)
    noise = _noise(rows, now, logits.shape[2:], settings.head_tile)
    drawn = draw.scores(rows, now, logits, noise)
    scale = jnp.where(rows.temperature > 0, rows.temperature * now.temperature, 1.0)[0]

    def of_target(values):
        return jnp.take_along_axis(values, target[None, None, :, None], axis=-1)[..., 0]

    def above_others(tokens):
        is_own = jax.nn.one_hot(tokens, drawn.shape[-1], dtype=bool)
        own, others = (jnp.where(x, drawn, -jnp.inf).max(axis=-1) for x in (is_own, ~is_own))
        return ((own - others) * scale)[0, 0]

    best = drawn.max(axis=-1)
    margin, lead = above_others(target[None, None]), above_others(drawn.argmax(axis=-1)).min()
    bits = -of_target(jax.nn.log_softmax(logits / scale, axis=-1)) / np.log(2)
    bits = jnp.where(rows.temperature > 0, bits, 0.0)
    near = drawn >= best[..., None] - tolerance / scale
    least = jnp.argmin(jnp.where(near, logits, jnp.inf), axis=-1)  # the least sure possible draw

    def sure(tokens):
        own = draw.Proposal(tokens, lambda name: commit.confidence(name, logits, tokens))
        return draw.confidences(rows.key, now, own, settings.commit, draw.Draws())[0, 0, 0]

    confidences = map(sure, (target[None, None], least, logits.argmax(axis=-1)))
    most = jnp.argmax(drawn, axis=-1)[0, 0].astype(jnp.int32)
    return most, margin, lead, bits[0, 0], *confidences


def _noise(
    rows: state.Rows, now: Steps, shape: tuple[int, ...], tile: int
) -> Float[Array, "1 1 g v"]:
    """Returns the noise of a token, which the sampler may draw tile by tile."""
    if not tile:
        return draw.noise(rows.key, now, shape)
    parts = [draw.noise(rows.key, now, (tile,), n) for n in range(-(-shape[-1] // tile))]
    return jnp.concatenate(parts, axis=-1)[:, :, None, : shape[-1]]
