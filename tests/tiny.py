# SPDX-License-Identifier: Apache-2.0
"""A tiny model with arbitrary weights, and requests to it for the tests."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from sparse_lavida_jax import config, diffusion, sequence
from sparse_lavida_jax.data.batch import RowShape, TrainingRow, stack
from sparse_lavida_jax.data.corrupted_rows import Corrupted, CorruptedRow
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.denoiser import shapes as denoiser_shapes
from sparse_lavida_jax.sampling import commit, draw, presets, prompts
from sparse_lavida_jax.sampling.plans import Steps
from sparse_lavida_jax.sampling.state import take

# A tiny program runs only a few times: compilation dominates its cost.
_QUICK_TO_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
if jax.__version_info__ < (0, 11):  # saves a third of the remaining time; removed in jax 0.12
    _QUICK_TO_COMPILE["xla_cpu_use_fusion_emitters"] = False
quick_jit = functools.partial(jax.jit, compiler_options=_QUICK_TO_COMPILE)

FIRST_WORD = 8  # ids below it are special tokens
VISION = config.Vision(
    image_size=8, patch_size=2, width=16, num_layers=1, num_heads=2, mlp_hidden=24, pool=2
)
IMAGE_LEN = 9  # cells: a grid of 3 x 3
TEXT_LEN = 12
TEXT_BLOCK_LEN = 4


def model_settings(**changes) -> config.Model:
    """Returns settings with two joint layers and a split one, 2 heads of 16."""
    values = {
        "vocab_size": 40,
        "width": 32,
        "mlp_hidden": 48,
        "num_layers": 3,
        "dual_tower_layers": 1,
        "num_heads": 2,
        "head_dim": 16,
        "generation_width": 24,
        "generation_mlp_hidden": 40,
        "codebook_size": 12,
        "grid_size": 3,
        "cell_positions": True,
        "num_registers": 3,
        "vision": VISION,
    }
    return config.Model(**(values | changes))


@functools.cache
def denoiser(settings: config.Model) -> Denoiser:
    """Returns a model whose parameters all differ from their initial values for training.

    So no norm weight is 1, no register equals the mask that it replaces, and every branch affects
    the logits.
    """
    shapes = denoiser_shapes(settings)
    rng = np.random.default_rng(0)

    def arbitrary(path, leaf):
        noise = rng.normal(size=leaf.shape)
        name = jax.tree_util.keystr(path)
        if "norm" in name and "bias" not in name:
            value = 1 + 0.2 * noise
        elif "kernel" in name:
            value = noise * np.prod(leaf.shape[-2:-1]) ** -0.5
        else:
            value = 0.5 * noise
        return jnp.asarray(value, leaf.dtype)

    with jax.ensure_compile_time_eval():  # cached values must not be tracers of the first caller
        return jax.tree_util.tree_map_with_path(arbitrary, shapes)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowRequest(presets.RowRequest):
    """A request whose scales may be left to the settings of the batch: None."""

    temperature: Any = None
    guidance: Any = None
    guidance_image: Any = None


@dataclasses.dataclass(frozen=True)
class Asked(Example):
    """An example with its request."""

    request: RowRequest = RowRequest()


@dataclasses.dataclass(frozen=True)
class StepSettings(presets.StepSettings):
    """Settings of steps, with the scales of requests without their own; no program reads these."""

    temperature: float = dataclasses.field(default=0.0, compare=False, repr=False)
    guidance: float = dataclasses.field(default=0.0, compare=False, repr=False)
    guidance_image: float = dataclasses.field(default=0.0, compare=False, repr=False)


def step_settings(
    sampling: config.Sampling,
    model: config.Model,
    modality: sequence.Modality,
    *,
    has_source: bool = False,
) -> StepSettings:
    """Returns what `presets.step_settings` does, with the scales of the configuration."""
    made = presets.step_settings(sampling, model, modality, has_source=has_source)
    guidance = presets.guidance_of(sampling, has_source=has_source)
    scales = presets.scales(sampling, modality) | {"guidance": guidance}
    del scales["guidance_edit"]
    return StepSettings(**vars(made), **scales)


def sample_inputs(
    examples: Sequence[Asked], model: config.Model, settings: StepSettings
) -> list[prompts.SampleInput]:
    """Returns examples as the sampler takes them, with all scales."""
    found = []
    for one in examples:
        own = {
            name: getattr(settings, name)
            for name in ("temperature", "guidance", "guidance_image")
            if getattr(one.request, name) is None
        }
        found.append(
            prompts.sample_input(one, dataclasses.replace(one.request, **own), model, settings)
        )
    return found


def request(
    modality: sequence.Modality,
    settings: config.Model,
    seed: int,
    *,
    words: int,
    vision: bool = False,
    source: bool = False,
    given: float = 0.0,
) -> Asked:
    """Returns a request whose prompt has `words` words, with a share `given` of known tokens."""
    rng = np.random.default_rng(seed)
    length = TEXT_LEN if modality == "text" else IMAGE_LEN
    parts: list[sequence.Part] = [sequence.Text(np.array([2]), keep=True)]
    if vision:
        parts.append(sequence.VisionTokens(VISION.num_tokens))
    if source:
        codes = rng.integers(0, settings.codebook_size, (IMAGE_LEN, settings.codes_per_token))
        parts.append(sequence.Source(codes))
    parts += [
        sequence.Text(rng.integers(FIRST_WORD, settings.vocab_size, words)),
        sequence.Text(np.array([3]), keep=True),
        sequence.Response(length),
        sequence.Text(np.array([4]), keep=True),
    ]
    known = np.zeros(length, bool)
    known[rng.permutation(length)[: round(given * length)]] = True
    pixels = rng.integers(0, 256, (VISION.image_size, VISION.image_size, 3), dtype=np.uint8)
    return example(
        tuple(parts),
        response(modality, settings, rng),
        known,
        modality,
        pixels if vision else None,
        seed,
    )


def example(parts, tokens, given, modality, pixels=None, seed=0) -> Asked:
    """Returns an example with a seeded request; `pixels` may be views of several images."""
    views = pixels if isinstance(pixels, tuple) else ()
    image = None if views else pixels
    request = RowRequest(seed=seed)
    return Asked(parts, tokens, given, modality, image, len(tokens), views, request=request)


def asked_with(one: Asked, **changes) -> Asked:
    """Returns an example with changes to its request, such as seed or temperature."""
    return dataclasses.replace(one, request=dataclasses.replace(one.request, **changes))


def prepare(
    examples,
    model: config.Model,
    guidance_rows: int = 1,
    prompt_len: tuple[int, int] = (0, 0),
    *,
    edit_guidance: str = "source",
    with_given: bool = True,
) -> prompts.Prompt:
    """Returns the prompts of a batch, in one shape."""
    how = {"edit_guidance": edit_guidance, "with_given": with_given}
    return prompts.batched(rows_laid(examples, model, guidance_rows, **how), model, prompt_len)


def rows_laid(
    examples,
    model: config.Model,
    guidance_rows: int = 1,
    *,
    edit_guidance: str = "source",
    with_given: bool = True,
) -> list[prompts.SampleInput]:
    """Returns examples laid out with so many guidance rows."""
    settings = presets.step_settings(config.Sampling(), model, examples[0].modality)
    preset = presets.preset("sparse" if with_given else "prefix")
    settings = dataclasses.replace(
        settings, preset=preset, guidance_rows=guidance_rows, edit_guidance=edit_guidance
    )
    return [prompts.sample_input(one, RowRequest(), model, settings) for one in examples]


@flax.struct.dataclass
class Recorded(draw.Draws):
    """Recorded random numbers, with an entry for each step; None: our own.

    Attributes:
        tokens: the draw for each masked code in each step.
        gumbel: Gumbel noise for the draws; the temperature is that of the settings.
        sure: Gumbel noise on the confidence, or the confidence itself if it is random. One entry
            per candidate.
    """

    tokens: np.ndarray | jax.Array | None = None
    gumbel: np.ndarray | jax.Array | None = None
    sure: np.ndarray | jax.Array | None = None

    def codes(self, rows, now, logits, settings):
        if self.tokens is None:
            return super().codes(rows, now, logits, settings)
        return take(self.tokens, jnp.maximum(now.decode, 0))

    def noise(self, row_key, now, shape):
        if self.gumbel is None:
            return super().noise(row_key, now, shape)
        return take(self.gumbel, jnp.maximum(now.decode, 0))

    def ranking(self, row_key, now):
        if self.sure is None:
            return super().ranking(row_key, now)
        return take(self.sure, jnp.maximum(now.decode, 0))

    def random(self, row_key, now):
        return super().random(row_key, now) if self.sure is None else self.ranking(row_key, now)


def gumbel(uniform: np.ndarray) -> np.ndarray:
    """Returns Gumbel noise -log(-log u) of uniform numbers, float64, on the host.

    The released text sampler takes the argmax of exp(logit) / (-log u)^T: the same choice as the
    argmax of logit / T + this noise.
    """
    return -np.log(-np.log(np.maximum(uniform.astype(np.float64), commit.LEAST_PROBABILITY)))


def without_tiles(settings, draws):
    """Returns settings that compute all logits at once if draws are recorded."""
    recorded = draws is not None and (draws.tokens is not None or draws.gumbel is not None)
    return dataclasses.replace(settings, head_tile=0) if recorded else settings


def step_at(decode: jax.Array) -> Steps:
    """Returns a step that decodes these tokens and passes no others."""
    batch = decode.shape[0]
    nothing, one = jnp.zeros((batch, 0), jnp.int32), jnp.float32(1)
    return Steps(
        jnp.int32(5), nothing, decode, jnp.ones((*decode.shape, 1), bool), nothing,
        jnp.ones(batch, jnp.int32), one, one, one,
    )  # fmt: skip


def response(
    modality: sequence.Modality, settings: config.Model, rng: np.random.Generator
) -> np.ndarray:
    """Returns an arbitrary clean response [l g]."""
    if modality == "text":
        return rng.integers(FIRST_WORD, settings.vocab_size, (TEXT_LEN, 1)).astype(np.int32)
    shape = (IMAGE_LEN, settings.codes_per_token)
    return rng.integers(0, settings.codebook_size, shape).astype(np.int32)


def sample_input(
    asked: Example, settings: config.Model, *, drop_prompt=False, drop_source=False
) -> sequence.PromptRow:
    """Returns the prompt in the layout of training."""
    return sequence.prompt_row(
        asked.parts,
        text_mask_id=settings.text_mask_id,
        codes_per_token=settings.codes_per_token,
        drop_prompt=drop_prompt,
        drop_source=drop_source,
    )


def batch(modalities: list[sequence.Modality], settings: config.Model) -> Corrupted:
    """Returns a training batch of arbitrary responses of these modalities, with uniform blocks."""
    asked = [request(modality, settings, i, words=3) for i, modality in enumerate(modalities)]
    mean = config.Diffusion(blocks="uniform", weighting="mean")
    rng = np.random.default_rng(0)
    blocks = [diffusion.uniform_blocks(rng, one.given, mean) for one in asked]
    rows = [
        CorruptedRow(sample_input(one, settings), one.response, modality, cut, settings)
        for one, modality, cut in zip(asked, modalities, blocks, strict=True)
    ]
    return stacked(rows, settings)


def shape_of(rows: list[CorruptedRow]) -> RowShape:
    """Returns the shape of the longest row."""
    sides = ("understanding", "generation")
    return RowShape(*(max(len(getattr(row, side).block) for row in rows) for side in sides))


def registers_from(row: TrainingRow, settings: config.Model) -> int:
    """Returns the position of the first register of a training row."""
    streams = row.tokens.understanding, row.tokens.generation
    registers = settings.text_register_id, settings.image_register_id
    for tokens, register in zip(streams, registers, strict=True):
        if (is_register := tokens.tokens == register).any():
            return int(tokens.position[np.nonzero(is_register)[0]].min())
    raise AssertionError("a row without a register")


def stacked(rows: list[CorruptedRow], settings: config.Model, shape=None, **more):
    """Returns rows as a batch, by default of the length of the longest."""
    return stack(rows, shape or shape_of(rows), settings, **more)
