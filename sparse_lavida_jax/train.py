# SPDX-License-Identifier: Apache-2.0
"""Training of the denoiser: the state, one step, and the loop that reads top to bottom."""

import contextlib
import dataclasses
import functools
import time

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from sparse_lavida_jax import (
    checkpoint,
    config,
    lora,
    metrics,
    optimizer,
    parameters,
    report,
    runs,
    sharding,
)
from sparse_lavida_jax.data import pipeline as batches
from sparse_lavida_jax.data.text import SHIPPED, Tokenizer
from sparse_lavida_jax.diffusion import Corrupted
from sparse_lavida_jax.losses import linear_cross_entropy, weighted_cross_entropy
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.pipeline import PictureCodec, SparseLaViDa


class DivergedError(runs.RunError):
    """The loss, or its gradient, is no longer a number."""


@flax.struct.dataclass
class TrainState:
    """Everything a run needs to go on to the bit.

    Attributes:
        step: optimizer steps done; also the next batch.
        params: the model, or the trained part of it.
        ema: moving average of `params`, or None.
        opt_state: of the optimizer.
        skipped: steps that were left out in a row until now, their gradient not being finite.
        frozen: the part that is not trained, or None. Not saved: `init_state` makes it again.
    """

    step: Int[Array, ""]
    params: Denoiser
    ema: Denoiser | None
    opt_state: PyTree
    skipped: Int[Array, ""]
    frozen: Denoiser | None = None

    @property
    def saved(self) -> "TrainState":
        """What is written to disk."""
        return dataclasses.replace(self, frozen=None)


@flax.struct.dataclass
class Denominators:
    """What the sums of a loss are divided by: of a whole batch, however it is cut.

    Attributes:
        text, image: of the weighted sums; in tokens and in codes.
        text_count, image_count: targets with a loss.
    """

    text: Float[Array, ""]
    image: Float[Array, ""]
    text_count: Float[Array, ""]
    image_count: Float[Array, ""]

    @classmethod
    def of(cls, batch: Corrupted) -> "Denominators":
        codes = 1 if batch.image_target is None else batch.image_target.shape[2]

        def count(weight, each: int):
            if weight is None:
                return jnp.float32(1)
            each = each if weight.ndim == 2 else 1
            return jnp.maximum((weight > 0).sum() * each, 1).astype(jnp.float32)

        return cls(
            jnp.maximum(batch.text_total.sum(), 1),
            jnp.maximum(batch.image_total.sum() * codes, 1),
            count(batch.text_weight, 1),
            count(batch.image_weight, codes),
        )


def loss(
    params: Denoiser, batch: Corrupted, over: Denominators | None = None, chunk: int = 0
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns the training loss and what is logged (diffusion.py says what the weights mean).

    Text and image are averaged apart and added, each over the whole batch.

    Args:
        over: of the batch that this one is a part of; by default this one is whole.
        chunk: tokens of a row whose logits exist at a time; 0: all of them.
    """
    over = over or Denominators.of(batch)
    features = None if batch.pixels is None else params.see(batch.pixels)
    hidden, _ = params(batch.understanding, batch.generation, features, wanted=batch.predicts)
    total, logged = jnp.float32(0), {}
    if "understanding" in hidden and batch.text_weight is not None:
        assert batch.text_target is not None
        target, weight = batch.text_target, batch.text_weight
        if chunk:
            kernel = params.text_head.kernel[...]
            weighted, plain = linear_cross_entropy(
                hidden["understanding"], kernel, target, weight, chunk
            )
        else:
            logits = params.text_logits(hidden["understanding"])
            weighted, plain = weighted_cross_entropy(logits, target, weight)
        total += weighted / over.text
        logged["text_nll"] = plain / over.text_count
    if "generation" in hidden and batch.image_weight is not None:
        assert batch.image_target is not None
        target, weight = batch.image_target, batch.image_weight
        if weight.ndim == 2:
            weight = jnp.broadcast_to(weight[..., None], target.shape)
        if chunk:
            head = params.image_head
            codes, kernel = head.codes(hidden["generation"]), head.logits.kernel[...]
            target_of, weight_of = (x.reshape(x.shape[0], -1) for x in (target, weight))
            weighted, plain = linear_cross_entropy(codes, kernel, target_of, weight_of, chunk)
        else:
            logits = params.image_logits(hidden["generation"])
            weighted, plain = weighted_cross_entropy(logits, target, weight)
        total += weighted / over.image
        logged["image_nll"] = plain / over.image_count
    return total, logged


def gradient(
    params: Denoiser,
    batch: Corrupted,
    *,
    frozen: Denoiser | None = None,
    microbatches: int = 1,
    chunk: int = 0,
) -> tuple[Float[Array, ""], dict[str, Array], Denoiser]:
    """Returns loss, what is logged, and the gradient, of a few rows at a time.

    However a batch is cut, every part is divided by what the whole would be (design of the loss in
    `diffusion.py`), so the parts add up to the same. Rows are dealt to the microbatches in turn,
    so that each has rows of every device.

    Args:
        frozen: the part of the model that gets no gradient, if `params` are not all of it.
        microbatches: parts that the batch is cut into, one after another; they divide its rows.
    """
    over = Denominators.of(batch)

    def loss_of(params: Denoiser, batch: Corrupted, over: Denominators):
        return loss(parameters.joined(params, frozen), batch, over, chunk)

    part_of = jax.value_and_grad(loss_of, has_aux=True)
    if microbatches == 1:
        (value, logged), found = part_of(params, batch, over)
        return value, logged, found

    leaves, tree = jax.tree.flatten(batch)
    parts = [jnp.asarray(x).reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1) for x in leaves]

    def part(leaves):
        return part_of(params, tree.unflatten(leaves), over)

    def add(sums, leaves):
        return jax.tree.map(jnp.add, sums, part(leaves)), None

    like = jax.eval_shape(part, [x[0] for x in parts])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    ((value, logged), found), _ = jax.lax.scan(add, zeros, parts)
    return value, logged, found


@functools.partial(
    jax.jit,
    static_argnames=("settings", "microbatches", "loss_chunk"),
    donate_argnames=("state",),
)
def train_step(
    state: TrainState,
    batch: Corrupted,
    learning_rate: Float[Array, ""],
    *,
    settings: config.Optimizer,
    microbatches: int = 1,
    loss_chunk: int = 0,
) -> tuple[TrainState, dict[str, Array]]:
    """Returns the state after one optimizer step, and scalars to log.

    A step whose gradient is not finite leaves parameters and optimizer as they were.
    """
    value, logged, found = gradient(
        state.params, batch, frozen=state.frozen, microbatches=microbatches, chunk=loss_chunk
    )
    norm = optax.tree.norm(found)
    update, opt_state = optimizer.update(settings, found, state.opt_state, state.params)
    params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, update)
    ema = state.ema
    if ema is not None:
        # An average that starts from scratch forgets its start as fast as it has seen steps.
        decay = jnp.minimum(settings.ema, (1 + state.step) / (10 + state.step))
        ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, params)
    finite = jnp.isfinite(value) & jnp.isfinite(norm)
    before = (state.params, state.ema, state.opt_state)
    params, ema, opt_state = jax.tree.map(
        functools.partial(jnp.where, finite), (params, ema, opt_state), before
    )
    skipped = jnp.where(finite, 0, state.skipped + 1)
    logged |= {"loss": value, "gradient_norm": norm, "skipped": skipped}
    after = TrainState(state.step + 1, params, ema, opt_state, skipped, state.frozen)
    return sharding.constrained(after), logged


def init_state(settings: config.Config, params: Denoiser) -> TrainState:
    """Returns the state of a run at step 0, from these parameters or those of `init_from`.

    Args:
        params: not looked at where there is an `init_from`.

    Raises:
        CheckpointError: `init_from` is no checkpoint, or of a model of other shapes.
        ConfigError: adapters without a base, or groups that train nothing.
    """
    if settings.train.init_from:
        params = checkpoint.load_model(
            settings.train.init_from,
            make_model=lambda _: Denoiser(settings.model, rngs=nnx.Rngs(0)),
            dtype=optimizer.dtypes(settings),
        ).model
    elif settings.lora.rank:
        raise config.ConfigError(
            f"Lora.rank={settings.lora.rank} needs a base model: name its folder in"
            " train.init_from."
        )
    else:
        params = jax.tree.map(jnp.copy, params)  # the first step donates its state
    if settings.lora.rank:
        params = lora.attach(params, settings.lora, jax.random.key(settings.seed))
    params, frozen = optimizer.parted(settings, params)
    ema = jax.tree.map(jnp.copy, params) if settings.optimizer.ema else None
    opt_state = optimizer.init(settings.optimizer, params)
    return TrainState(jnp.int32(0), params, ema, opt_state, jnp.int32(0), frozen)


def train(settings: config.Config, run: runs.Run) -> None:
    """Trains until the configured steps or seconds have passed, resuming what `run` holds.

    Leaves in the run directory: the states, `metrics.jsonl`, sheets of pictures, and at the end a
    model folder and `report.md`.

    Raises:
        DivergedError: the loss or its gradient is not finite.
        runs.Interrupted: a signal came; the state is saved.
    """
    settings = dataclasses.replace(settings, model=trained_settings(settings))
    pipe = SparseLaViDa(
        _first_model(settings),
        settings,
        Tokenizer(SHIPPED),
        PictureCodec(settings.data.picture_codec, settings.model),
    )
    data = batches.GroupedBatches(settings, pipe.encoder)
    mesh = _mesh(settings)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        _train(settings, run, pipe, data, mesh)


def _train(settings, run: runs.Run, pipe: SparseLaViDa, data, mesh: Mesh | None) -> None:
    state, seconds = init_state(settings, pipe.model), 0.0
    if mesh is not None:
        state = sharding.place_state(state, mesh)
    kept = run.restore({"state": state.saved, "seconds": np.float64(0)})
    if kept is not None:
        state = kept[1]["state"].replace(frozen=state.frozen)
        seconds = float(kept[1]["seconds"])
    start = step = int(state.step)

    def progress() -> float:
        by_time = seconds / settings.train.seconds if settings.train.seconds else 0.0
        return max(step / settings.train.train_steps, by_time)

    def record(every: int = settings.train.log_every) -> None:
        nonlocal pending
        if pending is not None:
            _record(log, bar, *pending, every=every, allowed=settings.train.skip_steps)
        pending = None

    def save() -> None:
        record()  # raises before a diverged state could replace a good one
        run.save(step, {"state": state.saved, "seconds": np.float64(seconds)})

    clock = time.monotonic() - seconds
    last_saved = last_drawn = time.monotonic()
    pending = None
    log = metrics.MetricsFile(run.metrics_path, resume_at=start)
    bar = metrics.Progress(
        settings.name,
        settings.train.train_steps,
        done=start,
        seconds=max(settings.train.seconds - seconds, 0.0),
    )
    with log, bar:
        batch_iterator = batches.iterate(data.dataset(), start, settings.data.workers)
        while progress() < 1:
            rate = optimizer.learning_rate(settings.optimizer, step, progress())
            batch = next(batch_iterator)
            state, logged = train_step(
                state,
                batch if mesh is None else sharding.place_batch(batch, mesh),
                np.float32(rate),
                settings=settings.optimizer,
                microbatches=settings.train.microbatches,
                loss_chunk=settings.train.loss_chunk,
            )
            step += 1
            # The numbers of the step before: fetching this step's would wait for it.
            record()
            pending = (step, logged, rate)
            now = time.monotonic()
            seconds = now - clock
            if run.stop_signal is not None:
                record()
                run.stop_if_asked(step, {"state": state.saved, "seconds": np.float64(seconds)})
            if now - last_saved > settings.train.checkpoint_seconds:
                save()
                last_saved = now
            if settings.train.picture_seconds and (
                now - last_drawn > settings.train.picture_seconds
            ):
                _check(pipe, state, run, log, bar, step, seconds)
                last_drawn = time.monotonic()
        record(every=1)
        if step > start:
            save()
            if settings.train.picture_seconds:
                _check(pipe, state, run, log, bar, step, seconds)
    pipe = pipe.with_model(averaged(state))
    checkpoint.save_model(
        run.model_folder,
        pipe.model,
        settings,
        tokenizer_path=SHIPPED,
        vq_folder=None if pipe.codec is None else pipe.codec.folder,
        readme=report.model_card(settings, step, seconds),
        dtype="float32" if state.frozen is None else settings.optimizer.frozen_dtype,
    )
    print(f"{run.model_folder}: the trained model")
    if settings.lora.rank:
        adapters, trained = run.folder / "adapters", _averaged_part(state)
        checkpoint.save_adapters(adapters, trained, settings, base=settings.train.init_from)
        print(f"{adapters}: what was trained of it")
    print(f"{report.write(pipe, run.folder, step=step, seconds=seconds)}: what it can do")


def _mesh(settings: config.Config) -> Mesh | None:
    try:
        return sharding.make_mesh(settings.train.mesh)
    except ValueError as error:
        raise config.ConfigError(f"Train.mesh: {error}") from error


def trained_settings(settings: config.Config) -> config.Model:
    """Returns the model's settings with the attention it was trained with written in."""
    return dataclasses.replace(settings.model, trained_attention=settings.diffusion.attention)


def averaged(state: TrainState) -> Denoiser:
    """Returns the parameters to sample with: the average, if one is kept."""
    return parameters.joined(_averaged_part(state), state.frozen)


def _averaged_part(state: TrainState) -> Denoiser:
    return state.params if state.ema is None else state.ema


def _first_model(settings: config.Config) -> Denoiser:
    """Returns random parameters, or their shapes alone where they come from a checkpoint."""

    def make():
        return Denoiser(settings.model, rngs=nnx.Rngs(settings.seed))

    return jax.eval_shape(make) if settings.train.init_from else make()


def _check(pipe, state, run, log, bar, step: int, seconds: float) -> None:
    path = run.folder / f"pictures/{step:06d}.png"
    scores = report.check(pipe.with_model(averaged(state)), path)
    log.write(step, scores | {"seconds": seconds})
    told = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in scores.items())
    bar.say(f"step {step}: {told} ({path})")


def _record(
    log, bar, step: int, logged: dict[str, Array], rate: float, *, every: int, allowed: int
) -> None:
    values = {name: float(value) for name, value in logged.items()}
    skipped = int(values.pop("skipped"))
    if skipped > allowed:
        raise DivergedError(
            f"the loss is {values['loss']} and its gradient {values['gradient_norm']} long at step"
            f" {step}; steps {step - skipped + 1} to {step} were left out and nothing of them is"
            " saved. Start anew in another --workdir, with a lower optimizer.learning_rate or"
            " optimizer.clip_norm."
        )
    if skipped:
        bar.say(f"step {step}: the gradient is not finite, so the step was left out")
        return
    if step % every:
        return
    log.write(step, values | {"learning_rate": rate})
    bar.update(step, loss=values["loss"])
