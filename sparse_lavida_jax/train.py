# SPDX-License-Identifier: Apache-2.0
"""Training of the denoiser: the state at the start, and the loop that reads top to bottom."""

import contextlib
import dataclasses
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.checkpoints import adapters, model_folder
from sparse_lavida_jax.data.feed import Feed
from sparse_lavida_jax.diffusion import Corrupted
from sparse_lavida_jax.evals import report
from sparse_lavida_jax.models import lora, parameters, quantize, sharding
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.vq import ImageCodec
from sparse_lavida_jax.training import flops, metrics, optimizer, runs, sources, states
from sparse_lavida_jax.training.step import Denominators, TrainState, gradient, loss, train_step

__all__ = [
    "Denominators", "DivergedError", "TrainState", "averaged", "gradient", "init_state", "loss",
    "train", "train_step", "trained_settings",
]  # fmt: skip


class DivergedError(runs.RunError):
    """The loss, or its gradient, is no longer a number."""


def init_state(settings: config.Config, params: Denoiser, mesh: Mesh | None = None) -> TrainState:
    """Returns the state of a run at step 0, from these parameters or those of `init_from`.

    Matrices that one device will hold in 8 bits are read into the host's memory and rounded there.

    Args:
        params: not looked at where there is an `init_from`.
        mesh: over which the state is laid out; every device reads or makes its own part.

    Raises:
        CheckpointError: `init_from` is no checkpoint, or of a model of other shapes.
        ConfigError: adapters without a base, or groups that train nothing.
    """
    in_host_memory = mesh is None and settings.optimizer.frozen_dtype == "int8"
    with jax.default_device(jax.devices("cpu")[0] if in_host_memory else None):
        params = lora.begin(settings, _base(settings, params, mesh), jax.random.key(settings.seed))
        params, frozen = optimizer.parted(settings, params)
    base = settings.train.init_from
    if frozen is not None and base and states.is_unfinished(base):
        raise config.ConfigError(
            f"Train.init_from={base!r} is a run that has not ended, and what is"
            " frozen is read anew whenever this run goes on: wait until that run has its model."
        )
    if in_host_memory:
        params, frozen = jax.device_put((params, frozen), jax.devices()[0])

    begun = functools.partial(_begun, settings.optimizer)
    if mesh is None:
        return dataclasses.replace(begun(params), frozen=frozen)
    params, frozen = sharding.place_state((params, frozen), mesh)
    with jax.set_mesh(mesh):
        return dataclasses.replace(jax.jit(begun, donate_argnums=0)(params), frozen=frozen)


def _base(settings: config.Config, params: Denoiser, mesh: Mesh | None) -> Denoiser:
    """Returns what is trained, or what adapters will be attached to."""
    base = settings.train.init_from
    if base and states.is_unfinished(base):
        return states.load_unfinished(base, make_model=lambda _: _made(settings))
    if base:
        return model_folder.load_model(
            base,
            make_model=lambda _: _made(settings),
            sharding=None if mesh is None else sharding.over(mesh),
            dtype=optimizer.dtypes(settings),
        ).model
    if settings.lora.rank:
        raise config.ConfigError(
            f"Lora.rank={settings.lora.rank} needs a base model: name its folder in"
            " train.init_from."
        )
    return jax.tree.map(jnp.copy, params)  # the first step donates its state


def _begun(settings: config.Optimizer, params: Denoiser) -> TrainState:
    ema = jax.tree.map(jnp.copy, params) if settings.ema else None
    opt_state = optimizer.init(settings, params)
    return sharding.constrained(TrainState(jnp.int32(0), params, ema, opt_state, jnp.int32(0)))


def _made(settings: config.Config) -> Denoiser:
    return Denoiser(settings.model, rngs=nnx.Rngs(0))


def train(settings: config.Config, run: runs.Run, profile: range = range(0)) -> None:
    """Trains until the configured steps or seconds have passed, resuming what `run` holds.

    Leaves in the run directory: the states, `metrics.jsonl`, sheets of images, and at the end a
    model folder and `report.md`.

    Args:
        profile: steps of which a trace is written to `profile/` in the run directory.

    Raises:
        DivergedError: the loss or its gradient is not finite.
        runs.Interrupted: a signal came; the state is saved.
    """
    settings = dataclasses.replace(settings, model=trained_settings(settings))
    mesh = _mesh(settings)
    share = (0, 1) if mesh is None else sharding.share_of_rows(mesh)
    index, count = share
    source = sources.open_source(
        settings, _first_model(settings), ImageCodec, index=index, count=count
    )
    _check_rows(source.batches.sizes, settings.data.packing, mesh)
    state, step, seconds = _train(settings, run, source, mesh, share, profile)
    _finish(settings, run, source, state, step, seconds, mesh)


def _train(
    settings: config.Config,
    run: runs.Run,
    source: sources.TrainingData,
    mesh: Mesh | None,
    share: tuple[int, int],
    profile: range,
) -> tuple[TrainState, int, float]:
    """Returns the state at the end, its step, and the seconds that the run took."""
    state, seconds, note = init_state(settings, source.model, mesh), 0.0, {}
    kept = run.restore({"state": state.saved, "seconds": np.float64(0)})
    if kept is not None:
        state = kept[1]["state"].replace(frozen=state.frozen)
        seconds, note = float(kept[1]["seconds"]), run.states.note(kept[0])
    start = step = int(state.step)

    def progress() -> float:
        by_time = seconds / settings.train.seconds if settings.train.seconds else 0.0
        return max(step / settings.train.train_steps, by_time)

    def record(every: int = settings.train.log_every) -> None:
        nonlocal pending
        if pending is not None:
            _record(log, bar, meter, *pending, every=every, allowed=settings.train.skip_steps)
        pending = None

    def save(score: float | None = None) -> None:
        record()  # raises before a diverged state could replace a good one
        run.save(step, saved(), {"data": feed.position}, score)

    def saved() -> dict:
        return {"state": state.saved, "seconds": np.float64(seconds)}

    clock = time.monotonic() - seconds
    last_saved = last_drawn = time.monotonic()
    pending = None
    meter = metrics.Meter(_peak())
    log, bar = _reporters(settings, run, start, seconds)
    feed = Feed(source.batches.dataset(), start, settings.data.workers, note.get("data"))
    trace = _Profile(run.folder / "profile", profile)
    with log, bar, trace, contextlib.closing(feed):
        while progress() < 1:
            trace.reach(step)
            rate = optimizer.learning_rate(settings.optimizer, step, progress())
            with meter.waiting():
                batch = next(feed)
            with _inside(mesh):
                state, logged = train_step(
                    state,
                    batch if mesh is None else sharding.place_batch(batch, mesh, share),
                    np.float32(rate),
                    settings=settings.optimizer,
                    microbatches=settings.train.microbatches,
                    loss_chunk=settings.train.loss_chunk,
                )
            step += 1
            # The numbers of the step before: fetching this step's would wait for it.
            record()
            _count(meter, batch, settings, state, share[1])
            pending = (step, logged, rate)
            now = time.monotonic()
            is_late = now - last_saved > settings.train.checkpoint_seconds
            is_to_draw = 0 < settings.train.image_seconds < now - last_drawn
            if not runtime.are_several():
                seconds = now - clock
            elif step % settings.train.log_every == 0:
                # Clocks differ; what follows is done in all processes or in none.
                seconds, is_late, is_to_draw = runtime.agreed_on_first(
                    now - clock, is_late, is_to_draw
                )
            else:
                is_late = is_to_draw = False
            every = settings.train.eval_every
            if every and step % every == 0 and progress() < 1:  # the last step is drawn anyway
                is_to_draw = True
            if run.is_asked_to_stop(step):
                record()
                run.stop_if_asked(step, saved(), {"data": feed.position})
            score = None
            if is_to_draw:
                record()
                score = _check(source, state, run, log, bar, step, seconds, mesh)
                last_drawn = time.monotonic()
            if is_late or is_to_draw:
                save(score)
                last_saved = now
        record(every=1)
        if step > start:
            save()
            if settings.train.image_seconds or settings.train.eval_every:
                _check(source, state, run, log, bar, step, seconds, mesh)
    return state, step, seconds


def _finish(
    settings: config.Config,
    run: runs.Run,
    source: sources.TrainingData,
    state: TrainState,
    step: int,
    seconds: float,
    mesh: Mesh | None,
) -> None:
    """Writes the model folder, the adapters and the report."""
    pipe, trained = source.pipe(averaged(state)), _averaged_part(state)
    if runtime.are_several():
        pipe = pipe.with_model(runtime.on_host(pipe.model))
        trained = runtime.on_host(trained)
        mesh = None
    if settings.diffusion.attention == "full" and state.frozen is None:
        with _inside(mesh):
            pipe.model.set_registers()  # for who goes on sparsely
    if runtime.is_first():
        with _inside(mesh):
            dtype = "float32"
            if state.frozen is not None:
                dtype = optimizer.frozen_dtype(settings.optimizer)
            _write_results(settings, run, source, pipe, trained, step, seconds, dtype)
    runtime.wait_for_all("the end")


def _write_results(settings, run, source, pipe, trained, step: int, seconds, dtype: str) -> None:
    model_folder.save_model(
        run.model_folder,
        quantize.widened(pipe.model, dtype),
        settings,
        tokenizer_path=source.tokenizer_path,
        vq_folder=None if pipe.codec is None else pipe.codec.folder,
        readme=report.model_card(settings, step, seconds, source.base_readme),
        dtype=dtype,
    )
    print(f"{run.model_folder}: the trained model")
    if settings.lora.rank:
        folder = run.folder / "adapters"
        adapters.save(folder, trained, settings, base=settings.train.init_from)
        print(f"{folder}: what was trained of it")
    if settings.train.eval_prompts:
        print(f"{report.write(pipe, run.folder, step=step, seconds=seconds)}: what it can do")


# ---------------------------------------------------------------------------------------------
# Devices.


def _mesh(settings: config.Config) -> Mesh | None:
    sizes = settings.train.mesh or ({"data": -1} if runtime.are_several() else {})
    try:
        return sharding.make_mesh(sizes)
    except ValueError as error:
        raise config.ConfigError(f"Train.mesh: {error}") from error


def _inside(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def _check_rows(sizes: dict[str, int], per_row: int, mesh: Mesh | None) -> None:
    """Refuses batches that processes cannot share: so many examples of each group."""
    parts = 1 if mesh is None else sharding.row_parts(mesh)
    for group, examples in sizes.items():
        rows = examples // per_row
        if runtime.are_several() and rows % parts:
            raise config.ConfigError(
                f"a batch of group {group} has {rows} rows, which do not divide over the {parts}"
                " parts of data and fsdp of train.mesh: change train.batch_size or the mesh."
            )


def _peak() -> float | None:
    each = flops.peak(jax.devices()[0].device_kind)
    return None if each is None else each * jax.device_count()


# ---------------------------------------------------------------------------------------------
# Models.


def trained_settings(settings: config.Config) -> config.Model:
    """Returns the model's settings with the attention it was trained with written in."""
    is_causal = settings.diffusion.attention == "step_causal"
    trained = "step_causal" if is_causal else "full"
    return dataclasses.replace(settings.model, trained_attention=trained)


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


# ---------------------------------------------------------------------------------------------
# What a run tells.


def _reporters(
    settings: config.Config, run: runs.Run, start: int, seconds: float
) -> tuple[metrics.MetricsFile | metrics.NoMetrics, metrics.Progress]:
    """Returns what writes metrics and what shows progress: in the first process alone."""
    log = metrics.NoMetrics()
    if runtime.is_first():
        board = run.folder / "tensorboard"
        log = metrics.MetricsFile(run.metrics_path, resume_at=start, tensorboard=board)
    bar = metrics.Progress(
        settings.name,
        settings.train.train_steps,
        done=start,
        seconds=max(settings.train.seconds - seconds, 0.0),
        console=None if runtime.is_first() else rich.console.Console(quiet=True),
    )
    return log, bar


def _count(
    meter: metrics.Meter, batch: Corrupted, settings: config.Config, state: TrainState, shares: int
) -> None:
    """Counts the work of a batch, of which this process has made one of `shares`."""
    sizes = [sum(x.size for x in jax.tree.leaves(m)) for m in (state.params, state.frozen)]
    work = flops.work_of(batch, settings.model, sizes[0] / sum(sizes))
    meter.count(**{name: value * shares for name, value in dataclasses.asdict(work).items()})


def _check(source, state, run, log, bar, step: int, seconds: float, mesh) -> float | None:
    """Draws in the first process; returns the score in all of them, None where there is none."""
    model, scores = averaged(state), {}
    if runtime.are_several():
        model, mesh = runtime.on_host(model), None
    if runtime.is_first():
        path = run.folder / f"images/{step:06d}.png"
        with _inside(mesh):
            scores = report.check(source.pipe(model), path, source.prompts)
        log.write(step, scores | {"seconds": seconds})
        told = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in scores.items())
        if scores or path.is_file():
            bar.say(f"step {step}: {told or 'drawn'} ({path})")
    (score,) = runtime.agreed_on_first(scores.get("draw", -1.0))
    return None if score < 0 else score


class _Profile:
    """Writes a trace of some steps, for xprof or TensorBoard."""

    def __init__(self, folder: pathlib.Path, steps: range):
        self._folder, self._steps, self._is_on = folder, steps, False

    def __enter__(self) -> "_Profile":
        return self

    def reach(self, step: int) -> None:
        """Begins before the first of the steps, and ends before the one behind the last."""
        if step in self._steps and not self._is_on:
            jax.profiler.start_trace(str(self._folder))
            self._is_on = True
        elif step not in self._steps:
            self.__exit__()

    def __exit__(self, *_) -> None:
        if self._is_on:
            jax.profiler.stop_trace()
            self._is_on = False


def _record(
    log,
    bar,
    meter: metrics.Meter,
    step: int,
    logged: dict[str, Array],
    rate: float,
    *,
    every: int,
    allowed: int,
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
    speed = meter.values()
    log.write(step, values | {"learning_rate": rate} | speed)
    bar.update(step, loss=values["loss"], **{n: v for n, v in speed.items() if n in metrics.TIMED})
