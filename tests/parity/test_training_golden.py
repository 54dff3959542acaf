# SPDX-License-Identifier: Apache-2.0
"""One training pass of the released code, from its recorded random numbers: cases E1-E5, F1.

Masks, targets, embeddings, hidden states, losses and gradients.
"""

import dataclasses
import functools
import itertools
import math

import golden
import jax
import jax.numpy as jnp
import merged
import numpy as np
import pytest
import tiny

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import named_arrays
from sparse_lavida_jax.convert import names
from sparse_lavida_jax.data import images, released_objective
from sparse_lavida_jax.data.batch import RowShape
from sparse_lavida_jax.data.corrupted_rows import Corrupted
from sparse_lavida_jax.sequence import (
    Blank,
    LearnedText,
    Response,
    Source,
    Text,
    VisionTokens,
    cells_from_codes,
    codes_from_cells,
    num_tokens,
)
from sparse_lavida_jax.tags import NO_FEATURE
from sparse_lavida_jax.training import step as training_step
from sparse_lavida_jax.visibility import PAD_BLOCK

VALUES = 1e-4  # embeddings, hidden states, logits, losses (golden README)
PROBABILITIES = 1e-5
GRADIENT = (1e-3, 1e-5)  # relative to the norm, absolute
IGNORED = -100
FROZEN = "model.vision_tower."  # frozen there, not here (behaviour 28)
TRAINING_CASES = (
    "E1_train_mixed",
    "E2_train_complementary",
    "E3_train_edit_weighted",
    "E4_train_und_text",
    "E5_train_t2i_lowres_ignore_text",
)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A recorded training pass, run by our code.

    Attributes:
        batch: our corruption of the recorded sequences, with the recorded random numbers.
        places: positions in the merged sequence of the tokens of both streams, -1 for padding.
        length: of the merged sequence.
        codes: of the images to draw, [n h w].
        imaged: rows of the batch with an image to draw.
    """

    given: golden.Case
    variant: dict
    batch: Corrupted
    places: dict[str, np.ndarray]
    length: int
    codes: np.ndarray
    imaged: list[int]

    def merge(self, values: dict, fill) -> np.ndarray:
        """Puts values [b s] of streams at the merged positions of their tokens, [b length]."""
        rows = len(next(iter(self.places.values())))
        whole = np.full((rows, self.length), fill)
        for stream, value in values.items():
            for row, at in enumerate(self.places[stream]):
                whole[row, at[at >= 0]] = np.asarray(value)[row, at >= 0]
        return whole

    def of_images(self, values) -> np.ndarray:
        """Returns values [b s g] of the cells to draw as [n c], the codes in raster order."""
        # A row's image is the last thing in its generation stream.
        ends = (self.places["generation"] >= 0).sum(axis=1)
        tokens = self.variant["n_image_tokens"]
        cells = np.stack([np.asarray(values)[r, ends[r] - tokens : ends[r]] for r in self.imaged])
        side = self.given.settings.model.codes_side
        codes = codes_from_cells(cells, self.variant["gen_shape"][0] // side, side)
        return codes.reshape(len(cells), -1)


@pytest.fixture(params=TRAINING_CASES)
def run(request, case) -> Pass:
    case(request.param)
    return run_of(request.param)


@functools.cache
def run_of(name: str) -> Pass:
    given = golden.case(name)
    variant = given.config["variants"]["train"]
    settings, rand = settings_of(given, variant), recorded_draws(given, variant)
    codes = encoded(given, "images_gen")
    sources = iter(encoded(given, "images_gen_enc"))
    length = rand["mask_noise_text"].shape[1]
    sequences, draws, imaged = [], [], []
    for row in range(len(given.inputs["input_ids"])):
        parts, views = parts_of(given, variant, row, sources)
        parts.append(Blank(length - sum(map(num_tokens, parts))))
        if any(isinstance(part, Response) for part in parts):
            number = len(imaged)
            imaged.append(row)
            image = cells_of(given, codes[number])
        else:
            number = None
            parts.append(Response(0))
            image = np.zeros((0, settings.model.codes_per_token), int)
        weight = code_weight(given, variant, number)
        sequences.append(released_objective.Sequence(tuple(parts), image, weight, views))
        draws.append(draws_of(given, variant, rand, row, number, image))
    assert next(sources, None) is None and len(imaged) == len(codes), "not every image is used"
    shape = RowShape(length, max(sequence.num_cells for sequence in sequences))
    batch = released_objective.batch_sequences(sequences, draws, shape, settings)
    places = {
        stream: np.where(of.tags.block == PAD_BLOCK, -1, of.tags.position)
        for stream, of in (
            (merged.UNDERSTANDING, batch.understanding),
            (merged.GENERATION, batch.generation),
        )
        if of is not None
    }
    if variant["complementary_masking"]:
        imaged += [row + len(sequences) for row in imaged]
    return Pass(given, variant, batch, places, length, codes, imaged)


def recorded_draws(given: golden.Case, variant: dict) -> dict[str, np.ndarray]:
    """Returns the recorded random numbers by their role."""
    return {one["role"]: given.inputs[one["tensor"]] for one in variant["random"]}


def draws_of(
    given, variant, rand, row: int, number: int | None, image
) -> released_objective.MaskDraws:
    """Returns the random numbers of a row; `number` is that of its image."""
    policy = variant["policy"]
    time, noise = 0.5, np.full(image.shape, 0.5)
    if number is not None:
        time = as_uniform(policy, rand["t_image"][number])
        noise = cells_of(given, rand["mask_noise_image"][number].reshape(variant["gen_shape"]))
    return released_objective.MaskDraws(
        text_time=as_uniform(policy, rand["t_text"][row]),
        text_noise=rand["mask_noise_text"][row],
        prompt=float(rand["prompt_drop"][row]),
        source=float(rand["enc_drop"][row]) if variant["image_enc_drop_active"] else 1.0,
        image_time=time,
        image_noise=noise,
    )


def code_weight(given: golden.Case, variant: dict, number: int | None) -> np.ndarray | None:
    """Returns the recorded loss weights of an image's codes."""
    if number is None or not variant["image_gen_weight"]:
        return None
    return cells_of(given, given.inputs["image_gen_weight"][number, 0])


def settings_of(given: golden.Case, variant: dict) -> config.Config:
    """The configuration that a recorded pass was trained with."""
    settings = given.settings
    released = config.Diffusion(
        corruption="released",
        attention="full",
        weighting="mean",
        time_policy=variant["policy"],
        complementary=variant["complementary_masking"],
        text_loss=not variant["ignore_text_loss"],
    )
    data = dataclasses.replace(
        settings.data,
        prompt_drop=variant["prompt_drop_rate"],
        source_drop=variant["image_enc_drop_rate"] or 0.0,
    )
    return dataclasses.replace(settings, diffusion=released, data=data)


def as_uniform(policy: str, drawn: float) -> float:
    """Returns the uniform number from which our policies compute the t of a recorded draw."""
    if policy == "logit_normal":  # recorded before the sigmoid, with any mean and deviation
        return 0.5 * (1 + math.erf(float(drawn) / math.sqrt(2)))
    return float(drawn)


def encoded(given: golden.Case, tensor: str) -> np.ndarray:
    """Returns the codes [n h w] of recorded images."""
    if tensor not in given.inputs:
        return np.zeros((0, 1, 1), int)
    pixels = given.inputs[tensor].transpose(0, 2, 3, 1)
    encode = tiny.quick_jit(lambda tokenizer, pixels: tokenizer.encode(pixels))
    return np.asarray(encode(given.vq(), jnp.asarray(pixels)))


def cells_of(given: golden.Case, grid: np.ndarray) -> np.ndarray:
    """Groups values [h w] of codes into cells [l g]."""
    return cells_from_codes(grid[None], given.settings.model.codes_side)[0]


def parts_of(given: golden.Case, variant: dict, row: int, sources):
    """Reads the recorded ids of a row as parts of ours; returns them and the views of images."""
    special = given.config["golden_ids"]
    drawn, source, shown = (special[key] for key in ("IMAGE_GEN_INDEX", "RES6", "IMAGE_INDEX"))
    ids, labels = (given.inputs[key][row] for key in ("input_ids", "labels"))
    # As in the released collator, end-of-text is predicted everywhere.
    labels = np.where(ids == special["EOS"], ids, labels)

    def kind(slot):
        if ids[slot] in (drawn, source, shown):
            return int(ids[slot])
        return {IGNORED: "context", special["FIM"]: "kept"}.get(int(labels[slot]), "answer")

    parts, views = [], []
    for what, slots in itertools.groupby(range(len(ids)), kind):
        slots = list(slots)
        if what == drawn:
            assert len(slots) == variant["n_image_tokens"]
            parts.append(Response(len(slots)))
        elif what == source:
            pictures = len(slots) // variant["n_image_tokens"]
            parts += [Source(cells_of(given, next(sources))) for _ in range(pictures)]
        elif what == shown:
            assert len(slots) == 1
            views.append(given.inputs[variant["images"][row]].transpose(0, 2, 3, 1))
            parts.append(seen(given, row, len(views[-1])))
        elif what == "answer":
            np.testing.assert_array_equal(ids[slots], labels[slots])
            parts.append(LearnedText(ids[slots]))
        else:
            parts.append(Text(ids[slots], keep=what == "kept"))
    return parts, tuple(views)


def seen(given: golden.Case, row: int, num_views: int) -> VisionTokens:
    """Returns the part that represents the recorded image of a row."""
    vision = given.settings.model.vision
    size = tuple(given.inputs["image_sizes_wh"][row].tolist())
    index = images.token_index(size, vision, whole=num_views == 1)
    return VisionTokens(len(index), index, num_views * vision.num_tokens + vision.newline)


# ---------------------------------------------------------------------------------------------
# Inputs of the model.


def test_the_masked_positions_are_the_recorded_ones(run):
    text = run.batch.understanding
    mask_id = run.given.settings.model.text_mask_id
    masked = (text.tokens == mask_id) & (text.index == NO_FEATURE)
    whole = run.merge({merged.UNDERSTANDING: masked}, False)
    np.testing.assert_array_equal(whole, run.given.outputs["final_masked_indices"])


def test_the_predicted_text_is_the_recorded_one(run):
    target = np.where(run.batch.text_weight > 0, run.batch.text_target, IGNORED)
    whole = run.merge({merged.UNDERSTANDING: target}, IGNORED)
    np.testing.assert_array_equal(whole, run.given.outputs["labels_after"])


def test_the_masked_codes_are_the_recorded_ones(run):
    recorded = run.given.outputs
    if not run.imaged:
        assert "gen_x_mask" not in recorded
        assert run.batch.predicts == "understanding"
        return
    mask_id = run.given.settings.model.image_mask_id
    masked = run.of_images(run.batch.generation.tokens == mask_id)
    np.testing.assert_array_equal(masked, recorded["gen_x_mask"])
    np.testing.assert_array_equal(run.of_images(run.batch.image_weight > 0), masked)
    assert (run.batch.image_weight > 0).sum() == masked.sum()


def test_the_codes_of_images_are_the_recorded_ones(run):
    if run.imaged:
        expected = run.given.outputs["gen_x0_gt"]
        np.testing.assert_array_equal(run.of_images(run.batch.image_target), expected)
        codes = run.codes.reshape(len(run.codes), -1)
        np.testing.assert_array_equal(codes, expected[: len(codes)])


def test_the_probability_of_a_mask_is_the_recorded_one(run):
    policy, rand = run.variant["policy"], recorded_draws(run.given, run.variant)
    times = rand["t_image" if run.imaged else "t_text"]
    ours = [released_objective.mask_probability(policy, as_uniform(policy, time)) for time in times]
    recorded = run.given.outputs["p_mask"][:, 0]
    np.testing.assert_allclose(ours, recorded, rtol=0, atol=PROBABILITIES)


def test_every_time_policy_masks_what_is_recorded(case):
    """Case F1, for each policy."""
    given = case("F1_sampler_parts")
    wanted = [one for one in given.config["settings"] if one["function"] == "forward_process"]
    assert wanted
    for one in wanted:
        times, noise = (
            next(given.inputs[r["tensor"]] for r in one["rand"] if r["role"] == role)
            for role in ("t", "mask_noise")
        )
        policy = one["policy"]
        for row, (time, line) in enumerate(zip(times, noise, strict=True)):
            u = as_uniform(policy, time)
            np.testing.assert_allclose(
                released_objective.mask_probability(policy, u),
                given.outputs[one["p_mask_tensor"]][row].flat[0],
                rtol=0,
                atol=PROBABILITIES,
            )
            masked = released_objective.mask_below(policy, u, line)
            np.testing.assert_array_equal(masked, given.outputs[one["tensor"]][row])


# ---------------------------------------------------------------------------------------------
# Outputs of the model.


@dataclasses.dataclass(frozen=True)
class Computed:
    """Embeddings and final hidden states by stream, most probable codes, losses, gradients."""

    x: dict
    hidden: dict
    codes: np.ndarray | None
    loss: float
    logged: dict
    gradient: dict[str, np.ndarray]


@functools.cache
def computed(name: str) -> Computed:
    def everything(params, batch):
        features = None if batch.pixels is None else params.see(batch.pixels)
        x = {merged.UNDERSTANDING: params.embed_text(batch.understanding, features)}
        if batch.generation is not None:
            x[merged.GENERATION] = params.embed_image(batch.generation)
        hidden, _ = params(batch.understanding, batch.generation, features, wanted=batch.predicts)
        codes = None
        if merged.GENERATION in hidden:
            codes = params.image_logits(hidden[merged.GENERATION]).argmax(axis=-1)
        return x, hidden, codes, jax.value_and_grad(training_step.loss, has_aux=True)(params, batch)

    batch = jax.tree.map(jnp.asarray, run_of(name).batch)
    x, hidden, codes, ((loss, logged), gradient) = tiny.quick_jit(everything)(
        golden.case(name).model(), batch
    )
    return Computed(x, hidden, codes, float(loss), logged, named_arrays.by_layer(gradient))


def merged_streams(run: Pass, streams: dict) -> tuple[np.ndarray, np.ndarray]:
    """Returns the streams as one sequence [b length e], and which positions are filled."""
    places = {stream: run.places[stream] for stream in streams}
    whole = merged.merge(streams, places, run.length, run.given.settings.model.width)
    return whole, run.merge({stream: at >= 0 for stream, at in places.items()}, False)


def test_the_embeddings_are_the_recorded_ones(run):
    whole, held = merged_streams(run, computed(run.given.name).x)
    assert held.all()
    np.testing.assert_allclose(whole, run.given.outputs["inputs_embeds"], rtol=0, atol=VALUES)


def test_the_hidden_states_and_text_logits_are_the_recorded_ones(run):
    """Without a loss on text, only those of images (behaviour 12)."""
    recorded = run.given.outputs
    whole, held = merged_streams(run, computed(run.given.name).hidden)
    expected = recorded["final_hidden_ln_f"]
    np.testing.assert_allclose(whole[held], expected[held], rtol=0, atol=VALUES)
    if run.variant["ignore_text_loss"]:
        assert held[recorded["new_token_mask_dup"]].all()
    else:
        assert held.all()
        logits = run.given.model().text_logits(jnp.asarray(whole))
        np.testing.assert_allclose(logits, recorded["text_logits"], rtol=0, atol=VALUES)


def test_the_likeliest_codes_are_the_recorded_ones(run):
    codes = computed(run.given.name).codes
    assert (codes is None) == ("gen_x_0_pred" not in run.given.outputs)
    if codes is not None:
        np.testing.assert_array_equal(run.of_images(codes), run.given.outputs["gen_x_0_pred"])


def test_the_losses_are_the_recorded_ones(run):
    recorded, ours = run.given.outputs, computed(run.given.name)
    np.testing.assert_allclose(ours.loss, recorded["loss"], rtol=0, atol=VALUES)
    # All weights of text are 1, so its share of the loss is the logged value.
    of_text = float(ours.logged.get("text_nll", 0.0))
    for key, value in (("und_loss", of_text), ("gen_loss", ours.loss - of_text)):
        if key in recorded:
            np.testing.assert_allclose(value, recorded[key], rtol=0, atol=VALUES)


def test_the_gradients_are_the_recorded_ones(run):
    """A parameter without a recorded gradient has none here, unless it was frozen there."""
    recorded, ours = run.given.outputs, computed(run.given.name).gradient
    table = [
        entry
        for entry in names.table(run.given.settings)
        if entry.home == "params" and not entry.official.startswith(FROZEN)
    ]
    relative, absolute = GRADIENT
    for entry in table:
        gradient = names.to_official(entry, np.asarray(ours[entry.ours])).astype(np.float64)
        expected = float(recorded.get(f"grad_norm.{entry.official}", 0.0))
        tolerance = absolute + relative * expected
        assert abs(np.linalg.norm(gradient) - expected) <= tolerance, entry.official
        whole = recorded.get(f"grad.{entry.official}")
        if whole is not None:
            assert np.linalg.norm(gradient - whole) <= tolerance, entry.official
    keys = {key.partition(".")[2] for key in recorded if key.startswith(("grad.", "grad_norm."))}
    assert keys and keys <= {entry.official for entry in table}
