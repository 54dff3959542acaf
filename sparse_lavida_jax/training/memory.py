# SPDX-License-Identifier: Apache-2.0
"""Memory that training needs on one device, from shapes alone: nothing is computed.

    total = parameters + gradients + moments + average + kept + layer + logits

* Parameters, gradients (of trained parameters, in their dtype; with microbatches also their sum),
  moments of the optimizer and the moving average are counted in the initial state of a run.
* Kept: what the loss keeps for its gradient. The loss is traced with the TPU kernel of attention,
  which keeps the same as the one for GPUs: q, k, v, the output, and one number per query and head.
  Inputs of the step are not counted again, nor are the gradients of the heads, which a chunked
  loss computes in its forward pass. With `remat="layer"` it is layers x rows x tokens x width x
  bytes for each stream, and the image head.
* Layer: what one joint layer keeps without `remat`, twice, as values and as their gradients, and
  its trained matrices in the dtype they are multiplied in.
* Logits of a chunk: rows x chunk x vocabulary, twice in float32 and once in the compute dtype.

On a mesh, a device holds its share of the state, split as in `models/sharding.py`, and its rows;
the splitting of these along tensor and sequence is not subtracted. Matrices gathered along
`fsdp` are counted where they are used: those of a layer, and the head of a chunk, each with its
gradient.

The parts do not all exist at the same time, so the total is an upper bound for the arrays;
`USABLE` leaves room for programs, and for memory that the allocator cannot use.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Literal
from jax.sharding import AbstractMesh

from sparse_lavida_jax import config, orders
from sparse_lavida_jax.data.corrupted_rows import Corrupted
from sparse_lavida_jax.kernels.sharded import BATCH_AXES
from sparse_lavida_jax.models import lora, parameters, sharding
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.tags import Stream, TokenTags
from sparse_lavida_jax.training import distil, loss, optimizer, start, step, style

GB = 1e9
HEADS = ("text_head/kernel", "image_head/logits/kernel")
USABLE = 0.95  # share of a device's memory (ours)
# The generation branch, as trained in stages s2-256 and s2-1024 of the release (spec Sec. 9.5),
# and its registers.
BRANCH = r"generation|^image_(embedding|head)/|^cell_(row|column)$"


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """Rows in a batch, and tokens per row of each stream; 0: the stream is absent."""

    rows: int
    understanding: int
    generation: int


def image_tokens(settings: config.Config) -> int:
    """Returns the generation tokens of the longest row that draws an image: cells and registers."""
    model, diffusion, sampling = settings.model, settings.diffusion, settings.sampling
    if diffusion.attention == "full":
        return model.num_cells
    if diffusion.blocks != "plan":
        return model.num_cells + diffusion.num_masked_blocks * model.num_registers
    merge = model.num_registers if diffusion.merge_cells < 0 else diffusion.merge_cells
    plans = (
        orders.merged(
            orders.counts(sampling.schedule, steps, model.num_cells, sampling.shift), merge
        )
        for steps in diffusion.plan_steps
    )
    return max(
        2 * model.num_cells - int(sizes[-1]) + len(sizes) * model.num_registers for sizes in plans
    )


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The memory for one way to train.

    Attributes:
        trained: number of parameters trained.
        remat: what is kept of a layer.
        parameters, gradients, moments, average, kept, layer, logits: bytes, as described above.
    """

    trained: int
    remat: str
    parameters: int
    gradients: int
    moments: int
    average: int
    kept: int
    layer: int
    logits: int

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in PARTS)

    def fits(self, device_bytes: int) -> bool:
        """Whether a device has this much memory, with some to spare."""
        return fits(self.total, device_bytes)


def fits(total: int, device_bytes: int) -> bool:
    """Whether a device has room for so many bytes, with some to spare."""
    return total <= USABLE * device_bytes


PARTS = tuple(field.name for field in dataclasses.fields(MemoryPlan))[2:]


def ways(settings: config.Config) -> dict[str, config.Config]:
    """Returns the ways to train a model of this size that the table compares, by name."""
    plain = dataclasses.replace(
        settings.optimizer, kind="adamw", groups=(), ema=0.0, distil=0.0, moments_dtype="float32"
    )
    model, whole = dataclasses.replace(settings.model, remat="layer"), config.Lora()

    def way(lora: config.Lora = whole, **changes: Any) -> config.Config:
        rule = dataclasses.replace(plain, **changes)
        return dataclasses.replace(settings, model=model, optimizer=rule, lora=lora)

    rank = settings.lora if settings.lora.rank else config.Lora(rank=16)
    found = {"full": way(), "full, bfloat16 moments": way(moments_dtype="bfloat16")}
    if not settings.model.understanding_only:
        groups = ((BRANCH, plain.learning_rate), ("", 0.0))
        found["generation branch"] = way(groups=groups, frozen_dtype="bfloat16")
    name = f"LoRA of rank {rank.rank}"
    found[name] = way(lora=rank, frozen_dtype="bfloat16")
    found[f"{name}, int8 base"] = way(lora=rank, frozen_dtype="int8")
    return found


def plan(
    settings: config.Config, batch: BatchSize, axes: Mapping[str, int] | None = None
) -> MemoryPlan:
    """Returns the memory that training with these settings needs on one device.

    Args:
        batch: the rows of a microbatch on a device.
        axes: sizes of the mesh; None: a single device.

    Raises:
        ConfigError: the settings train nothing, or name parameters that do not exist.
    """
    axes = axes or {}
    trained, frozen = jax.eval_shape(lambda: parts(settings))
    moments = jax.eval_shape(lambda p: optimizer.init(settings.optimizer, p), trained)
    own = _share({"params": trained}, axes)
    is_gathered = axes.get("fsdp", 1) > 1
    return MemoryPlan(
        trained=sum(leaf.size for leaf in jax.tree.leaves(trained)),
        remat=settings.model.remat,
        parameters=own + _share({"frozen": frozen}, axes),
        gradients=own * (2 if settings.train.microbatches > 1 else 1),
        moments=_share({"opt_state": moments}, axes),
        average=own if settings.optimizer.ema else 0,
        kept=kept(settings, batch),
        layer=_of_a_layer(settings, batch, trained, frozen, is_gathered=is_gathered),
        logits=_of_logits(settings, batch)
        + is_gathered * _gathered_head(settings, trained, frozen),
    )


def axes_of(mesh: Mapping[str, int], devices: int = 0) -> dict[str, int]:
    """Returns the sizes of `train.mesh`; empty if a config has no mesh.

    Args:
        devices: the number of devices for it; 0: as many as it names.

    Raises:
        ConfigError: its product is not that number, or there is no number.
    """
    if not mesh:
        if devices > 1:
            raise config.ConfigError(
                f"--devices={devices}: the config has no train.mesh, so its run takes one device."
                " Set one, such as {'fsdp': -1}."
            )
        return {}
    if -1 in mesh.values() and not devices:
        raise config.ConfigError(
            f"Train.mesh={dict(mesh)!r} is laid over all devices there are: say how many, such as"
            " --devices=64."
        )
    try:
        return sharding.whole_sizes(mesh, devices or math.prod(mesh.values()))
    except ValueError as error:
        raise config.ConfigError(f"Train.{error}") from error


def rows_of(settings: config.Config, axes: Mapping[str, int]) -> int:
    """Returns the rows of a microbatch on one device of a mesh."""
    parts = settings.data.packing * (settings.train.microbatches or 1)
    rows = settings.train.batch_size // parts
    return math.ceil(rows / math.prod(axes.get(axis, 1) for axis in BATCH_AXES))


def _share(state: dict[str, Any], axes: Mapping[str, int]) -> int:
    """Returns the bytes of a part of a training state on one device of a mesh."""
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    return sum(
        _bytes(leaf) // sharding.shared_by(name, leaf.shape, mesh)
        for name, leaf in parameters.by_name(state).items()
    )


def parts(
    settings: config.Config, model: Denoiser | None = None
) -> tuple[Denoiser, Denoiser | None]:
    """Returns the trained and the frozen part; without a model, to be called while tracing."""
    model = model or Denoiser(settings.model, rngs=nnx.Rngs(0))
    return optimizer.parted(settings, lora.begin(settings, model, jax.random.key(settings.seed)))


def first_state(settings: config.Config, model: Denoiser | None = None) -> step.TrainState:
    """Returns the state of a run at step 0, whatever it starts from.

    Without a model the parameters are random: to be called while tracing.
    """
    params, frozen = parts(settings, model)
    return dataclasses.replace(start.begun(settings.optimizer, params), frozen=frozen)


def lowered_step(settings: config.Config, state, batch, learning_rate_scale) -> jax.stages.Lowered:
    """Returns a training step to be compiled, called as in `train.py`."""
    return step.train_step.lower(
        state,
        batch,
        learning_rate_scale,
        settings=settings.optimizer,
        microbatches=settings.train.microbatches or 1,
        loss_chunk=settings.train.loss_chunk,
    )


def kept(settings: config.Config, batch: BatchSize) -> int:
    """Returns the bytes that the loss keeps for its gradient, besides the parameters."""
    # Of a layer of which only the input is kept, no kind of attention keeps anything.
    implementation = "reference" if settings.model.remat == "layer" else "pallas_tpu"
    settings = config.changed(settings, {"model": {"attention_implementation": implementation}})
    trained, frozen = jax.eval_shape(lambda: parts(settings))

    def way_back(trained, frozen):
        whole = parameters.joined(trained, frozen)

        def loss_of(part):
            model, given = parameters.joined(part, frozen), rows(settings.model, batch)
            how: dict[str, Any] = {"chunk": settings.train.loss_chunk}
            how["draws"] = style.draws(settings.model, jnp.int32(0), batch.rows)
            if settings.optimizer.distil:
                how |= {"taught": distil.teaching(jnp.int32(0), batch.rows), "teacher": whole}
                how["distil_weight"] = settings.optimizer.distil
            return step.loss(model, given, **how)[0]

        return jax.vjp(loss_of, trained)[1]

    jaxpr = jax.make_jaxpr(way_back)(trained, frozen).jaxpr
    given = set(jaxpr.invars)
    outputs = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    size = _bytes([v.aval for v in outputs - given])
    names = parameters.by_name(trained)
    tiled = (head for head, tile in tiles(settings, batch).items() if tile)
    return size - _bytes([names[head] for head in tiled if head in names])


def tiles(settings: config.Config, batch: BatchSize) -> dict[str, int]:
    """Returns the tokens per row that the loss of each head takes at a time; 0: all, or none."""
    kernels = parameters.by_name(jax.eval_shape(lambda: parameters.joined(*parts(settings))))
    chunk, dtype = settings.train.loss_chunk, jnp.dtype(settings.model.compute_dtype)
    lengths = batch.understanding, batch.generation * settings.model.codes_per_token
    return {
        head: tokens and (chunk or loss.tile_of(batch.rows, tokens, kernels[head], dtype))
        for head, tokens in zip(HEADS, lengths, strict=True)
    }


def rows(model: config.Model, batch: BatchSize) -> Corrupted:
    """Returns rows in which every token has a loss and sees all; needs no memory while tracing."""
    u, g = (batch.rows, batch.understanding), (batch.rows, batch.generation)
    codes = (*g, model.codes_per_token)

    def of(shape: tuple[int, ...], fill=jnp.zeros, dtype=jnp.int32):
        return fill(shape, dtype) if shape[1] else None

    def stream(length: tuple[int, int], tokens: tuple[int, ...]):
        tags = [jnp.zeros(length, jnp.int32)] * 3
        ids, index = (jnp.zeros(shape, jnp.int32) for shape in (tokens, length))
        return Stream(ids, index, TokenTags(*tags)) if length[1] else None

    return Corrupted(
        understanding=stream(u, u),
        generation=stream(g, codes),
        pixels=None,
        text_target=of(u),
        text_weight=of(u, jnp.ones, jnp.float32),
        image_target=of(codes),
        image_weight=of(codes, jnp.ones, jnp.float32),
        text_total=jnp.ones(batch.rows),
        image_total=jnp.ones(batch.rows),
        predicts="both" if u[1] and g[1] else "understanding" if u[1] else "generation",
    )


def _of_a_layer(
    settings: config.Config,
    batch: BatchSize,
    trained: Denoiser,
    frozen: Denoiser | None,
    *,
    is_gathered: bool,
) -> int:
    """Returns the bytes of one joint layer in the backward pass."""
    one = {"num_layers": 1, "dual_tower_layers": 0, "unroll_layers": False}

    def of_one(remat: str) -> int:
        return kept(config.changed(settings, {"model": one | {"remat": remat}}), batch)

    def elements(part: Denoiser | None) -> int:
        return sum(
            leaf.size // leaf.shape[0]
            for name, leaf in parameters.by_name(part).items()
            if name.startswith("joint_layers/") and name.endswith("/kernel")
        )

    dtype = jnp.dtype(settings.model.compute_dtype)
    is_copied = is_gathered or dtype != jnp.float32
    copied = elements(trained) * dtype.itemsize if is_copied else 0
    if is_gathered:
        summed = dtype.itemsize if settings.model.grad_reduce_dtype == "compute" else 4
        copied += elements(trained) * summed + elements(frozen) * dtype.itemsize
    return 2 * (of_one("none") - of_one("layer")) + copied


def _gathered_head(settings: config.Config, trained: Denoiser, frozen: Denoiser | None) -> int:
    """Returns the bytes of the larger head, and of its gradient in float32 if it is trained."""
    each = jnp.dtype(settings.model.compute_dtype).itemsize
    return max(
        leaf.size * (each + 4 * (part is trained))
        for part in (trained, frozen)
        for name, leaf in parameters.by_name(part).items()
        if name in HEADS
    )


def _of_logits(settings: config.Config, batch: BatchSize) -> int:
    model = settings.model
    text, codes = batch.understanding, batch.generation * model.codes_per_token
    heads = (text, model.vocab_size), (codes, model.codebook_size)
    most = max(
        min(tile or tokens, tokens) * classes
        for (tokens, classes), tile in zip(heads, tiles(settings, batch).values(), strict=True)
    )
    return batch.rows * most * (2 * 4 + jnp.dtype(model.compute_dtype).itemsize)


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def plans(
    settings: config.Config, batch: BatchSize, axes: Mapping[str, int]
) -> dict[str, MemoryPlan]:
    """Returns the memory for the ways to train, and last for the settings themselves, by name."""
    all_ways = {**ways(settings), settings.name: settings}
    return {name: plan(way, batch, axes) for name, way in all_ways.items()}


def refusal(found: dict[str, MemoryPlan], name: str, device_bytes: int) -> str:
    """Returns why a way does not fit a device, and which ones do."""
    others = [
        f"{other} ({one.total / GB:.1f} GB)"
        for other, one in found.items()
        if other != name and one.fits(device_bytes)
    ]
    return (
        f"{name} needs {found[name].total / GB:.1f} GB (1e9 bytes). A device of"
        f" {device_bytes / 2**30:g} GiB has {device_bytes / GB:.1f} GB, and we count on"
        f" {USABLE:.0%} of that, {USABLE * device_bytes / GB:.1f} GB."
        f" What fits: {', '.join(others) or 'nothing of the above'}."
        " Fewer rows, a smaller train.loss_chunk and model.remat='layer' take less."
    )
