# SPDX-License-Identifier: Apache-2.0
"""Training of the denoiser: the loop, from top to bottom."""

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.checkpoints.tensors import SHARD_BYTES
from sparse_lavida_jax.convert import adapters
from sparse_lavida_jax.data.corrupted_rows import Corrupted
from sparse_lavida_jax.data.feed import Feed
from sparse_lavida_jax.evals import training_report
from sparse_lavida_jax.models import parameters, quantize, sharding
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.programs import jax_settings, side_by_side
from sparse_lavida_jax.training import flops, lengths, metrics, optimizer, runs, sources, style
from sparse_lavida_jax.training.start import added_modules, init_state
from sparse_lavida_jax.training.step import HeldState, TrainState, train_step

BYTES_PER_MB = 10**6
MOST_MEASURED = 1000  # batches, of which few may predict images


class DivergedError(runs.RunError):
    """The loss, or its gradient, is not a number any more."""


@jax_settings.defaults()
def train(settings: config.Config, run: runs.Run, profile: range = range(0)) -> None:
    """Trains until the configured steps or seconds have passed, resuming any state in `run`.

    Leaves in the run directory: the states, `metrics.jsonl`, sheets of images, and at the end a
    model folder and `report.md`.

    Args:
        profile: steps whose trace is written to `profile/` in the run directory.

    Raises:
        DivergedError: the loss or its gradient is not finite.
        runs.Interrupted: a signal arrived; the state is saved.
    """
    trained = "step_causal" if settings.diffusion.attention == "step_causal" else "full"
    model = dataclasses.replace(settings.model, trained_attention=trained)
    settings = dataclasses.replace(settings, model=model)
    loop = _Loop(settings, run, _mesh(settings))
    with loop.reporter:
        loop.train(profile)
        loop.write_results()


def averaged(state: TrainState) -> Denoiser:
    """Returns the parameters to sample with: the average, if one is kept."""
    return parameters.joined(_averaged_part(state), state.frozen)


class _Loop:
    """A run in progress: its state, how far it is, and its reporter.

    Attributes:
        step: optimizer steps done.
        seconds: of training, including earlier processes; compiling its steps does not count.
        reporter: writes the metrics and shows progress.
        feed: provides the batches from this step on.
    """

    def __init__(self, settings: config.Config, run: runs.Run, mesh: Mesh | None):
        self._settings, self._run, self._mesh = settings, run, mesh
        self._process = (0, 1) if mesh is None else sharding.share_of_rows(mesh)
        index, count = self._process
        self._source = sources.open_source(
            settings, _first_model(settings), index=index, count=count
        )
        _check_rows(self._source.batches.sizes, settings.data.packing, mesh)

        self.state, self.seconds, note = init_state(settings, self._source.model, mesh), 0.0, {}
        trained, frozen = (
            sum(x.size for x in jax.tree.leaves(part))
            for part in (self.state.params, self.state.frozen)
        )
        if (kept := run.states.restore(self._saved())) is not None:
            self.state = kept[1]["state"].replace(frozen=self.state.frozen)
            self.seconds, note = float(kept[1]["seconds"]), run.states.note(kept[0])
        self.step = int(self.state.step)
        if settings.model.style_parts and not self.step:
            self._measure_style_code()
        runtime.first_does(self._check_room)

        self._start, self._is_forecast = (self.step, self.seconds), False
        self._programs = dict[Any, Callable[..., Any]]()  # by the structure and shapes of batches
        self._steps_compiled = 0  # steps that were compiled when they were taken
        # Numbers that are not fetched yet, of the last steps: to fetch them waits for the steps.
        self._unrecorded = collections.deque[tuple[int, dict[str, Any], float]]()
        self._is_ahead = side_by_side.are_made_ahead()  # on accelerators
        self._fetches_each = not self._is_ahead
        self.reporter = metrics.Reporter(settings, run.folder, self.step, _peak())
        # The work in a batch is counted where it is made, which may be another process.
        count_work = functools.partial(
            flops.with_work, settings.model, trained / (trained + frozen)
        )
        dataset = self._source.batches.dataset().map(count_work)
        self.feed = Feed(dataset, self.step, settings.data.workers, note.get("data"))
        self._first: list[Any] = []  # the first batch, if it was waited for
        self._clock = time.monotonic() - self.seconds
        self._last_saved = self._last_drawn = time.monotonic()

    @property
    def state(self) -> TrainState:
        """What is trained."""
        return self._held.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._held = HeldState.of(state)

    def _measure_style_code(self) -> None:
        """Measures what a style code sees, if none of the runs before this one has.

        Raises:
            ConfigError: the code is new, and some of it is frozen or no batch draws an image.
        """
        state, mesh = self.state, self._mesh
        whole = parameters.joined(state.params, state.frozen)
        if jax.device_get(whole.style_code.seen_mean[...]).any():
            return
        of_code = {name for name in parameters.by_name(whole) if name.startswith("style_code/")}
        if of_code - parameters.by_name(state.params).keys():
            raise config.ConfigError(
                f"Model.style_parts={self._settings.model.style_parts} adds a style code, some of"
                " which is frozen: train all of it, with Lora.also='^style_code/' or"
                " Optimizer.groups."
            )
        if runtime.is_first():
            print(f"the style code is new: measures what it sees of up to {style.MEASURED} images")
        dataset = self._source.batches.dataset()
        batches = (cast(Corrupted, dataset[i]) for i in range(MOST_MEASURED))
        with _inside(mesh):
            found = style.measured(whole, map(self._placed, batches))
        params, ema = (
            None if part is None else parameters.replaced(part, jax.tree.map(np.copy, found))
            for part in (state.params, state.ema)
        )
        state = dataclasses.replace(state, params=params, ema=ema)
        self.state = state if mesh is None else sharding.place_state(state, mesh)

    def _check_room(self) -> None:
        """Refuses a disk that cannot hold the states to come and the model."""
        model_folder.check_replaceable(self._run.model_folder)
        states, trained = self._run.states, _averaged_part(self.state)
        to_come = max(1, self._settings.train.keep_states + 1 - len(states.steps))
        to_come = to_come if self.progress() < 1 else 0
        parts = [self._saved()] * to_come + [trained, self.state.frozen]
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(parts))
        model_folder.check_free_space(states.folder, size)

    def _saved(self) -> dict[str, Any]:
        return {"state": self.state.saved, "seconds": np.float64(self.seconds)}

    def progress(self) -> float:
        """Returns the finished share of the run, in steps or in seconds, whichever is larger."""
        settings = self._settings.train
        by_time = self.seconds / settings.seconds if settings.seconds else 0.0
        return max(self.step / settings.train_steps, by_time)

    def train(self, profile: range) -> None:
        """Takes the remaining steps, saving and drawing in between and at the end."""
        start, trace = self.step, metrics.Profile(self._run.folder / "profile", profile)
        self._fetches_each |= bool(profile)  # a trace ends when its last step does
        with self.reporter.bar, trace, contextlib.closing(self.feed):
            if start and self.progress() < 1:
                self.reporter.say(f"resumed after step {start}")
            if self.progress() < 1:
                self._get_ready()
            while self.progress() < 1:
                trace.reach(self.step)
                try:
                    self._take_step()
                except runtime.ProcessError:  # one that makes batches has died
                    if self.step > start and not runtime.are_several():
                        self._save()
                    raise
                now = time.monotonic()
                is_late, is_to_draw = self._what_is_due(now)
                self._forecast()
                if self._run.is_asked_to_stop(self.step):
                    self._record()
                    self._run.save_and_stop(self.step, self._saved(), {"data": self.feed.position})
                score = self._draw() if is_to_draw else None
                if is_to_draw:
                    self._last_drawn = time.monotonic()
                if is_late or is_to_draw:
                    self._save(score)
                    self._last_saved = now
            self._record()
            if self.step > start:
                self._save()

    def _get_ready(self) -> None:
        """Compiles known programs side by side, and waits for the first batch, off the clock."""
        begin, lowered = time.monotonic(), {}
        samples = self._source.batches.samples() if self._is_ahead else []
        self.feed.start()  # now that shapes are known
        for batch in samples if self._mesh is None else ():
            with side_by_side.uncollected():
                given = self._held, batch, np.float32(0)
                lowered[_key(batch)] = train_step.lower(*given, **self._statics).compile
        if lowered:
            with side_by_side.ProgressLine(len(lowered)) as progress:
                made = [side_by_side.start(compile_one) for compile_one in lowered.values()]
                side_by_side.wait(made, progress)
            self._programs = {key: one.result() for key, one in zip(lowered, made, strict=True)}
        self._first = [next(self.feed)]
        self._clock += time.monotonic() - begin

    @property
    def _statics(self) -> dict[str, Any]:
        """The static arguments of a step."""
        train = self._settings.train
        how = {"microbatches": train.microbatches, "loss_chunk": train.loss_chunk}
        return how | {"settings": self._settings.optimizer}

    def _take_step(self) -> None:
        settings = self._settings
        rate = optimizer.learning_rate(settings.optimizer, self.step, self.progress())
        with self.reporter.meter.waiting():
            batch, work = self._first.pop() if self._first else next(self.feed)
        mesh, key = self._mesh, _key(batch)
        begin = None if key in self._programs else time.monotonic()
        if begin is not None:
            self._programs[key] = functools.partial(train_step, **self._statics)
        with _inside(mesh):
            given = self._held, self._placed(batch), np.float32(rate)
            self._held, logged = self._programs[key](*given)
        self.step += 1
        if begin is not None:
            self._clock += time.monotonic() - begin
            self._steps_compiled += 1
        # Log the numbers of earlier steps: fetching this step's would wait for it.
        if self._fetches_each or (self.step - 1) % settings.train.log_every == 0:
            self._record()
        self.reporter.meter.count(work, self._process[1])  # each process has made only its rows
        self._unrecorded.append((self.step, logged, rate))

    def _placed(self, batch: Corrupted) -> Corrupted:
        mesh = self._mesh
        return batch if mesh is None else sharding.place_batch(batch, mesh, self._process)

    def _what_is_due(self, now: float) -> tuple[bool, bool]:
        """Returns whether it is time to save and to draw, the same in all processes."""
        settings = self._settings.train
        is_late = now - self._last_saved > settings.checkpoint_seconds
        is_to_draw = 0 < settings.image_seconds < now - self._last_drawn
        if not runtime.are_several():
            self.seconds = now - self._clock
        elif self.step % settings.log_every == 0:  # clocks differ
            self.seconds, is_late, is_to_draw = runtime.agreed_on_first(
                now - self._clock, is_late, is_to_draw
            )
        else:
            is_late = is_to_draw = False
        every = settings.eval_every
        if every and self.step % every == 0 and self.progress() < 1:  # the last is drawn anyway
            is_to_draw = True
        return bool(is_late), bool(is_to_draw)

    def _forecast(self) -> None:
        """Warns once, when the speed is known, that a run on prepared data will be too short."""
        train = self._settings.train
        if self._is_forecast or not train.seconds or self._source.prepared is None:
            return
        steps = self.step - self._start[0] - self._steps_compiled  # whose seconds do not count
        measured = steps, self.seconds - self._start[1]
        warning = lengths.forecast(train, self.step, self.seconds, measured)
        self._is_forecast = warning is not None
        if warning:
            self.reporter.say(warning)

    def _save(self, score: float | None = None) -> None:
        self._record()  # raises before a diverged state could replace a good one
        note = {"data": self.feed.position}
        self._run.states.save(self.step, self._saved(), note=note, score=score)

    def _draw(self) -> float | None:
        """Draws in the first process; returns the score in all of them, or None if there is none.

        Raises:
            DivergedError: the last step diverged.
        """
        self._record()
        model, mesh, scores = averaged(self.state), self._mesh, {}
        if runtime.are_several():
            model, mesh = runtime.on_host(model), None
        if runtime.is_first():
            path = self._run.folder / f"images/{self.step:06d}.png"
            with _inside(mesh), self._guard("the images of this step"):
                scores = training_report.check(self._source.pipe(model), path, self._source.prompts)
            self.reporter.write(self.step, scores | {"seconds": self.seconds})
            shown = ", ".join(f"{name.replace('_', ' ')} {x:.2f}" for name, x in scores.items())
            if scores or path.is_file():
                self.reporter.say(f"step {self.step}: {shown or 'drawn'} ({path})")
        (score,) = runtime.agreed_on_first(scores.get("draw", -1.0))
        return None if score < 0 else score

    def _record(self) -> None:
        """Logs steps whose number is a multiple of `log_every`, and the last of the run.

        Raises:
            DivergedError: more consecutive steps were skipped than the settings allow.
        """
        train, fetched = self._settings.train, jax.device_get([x[1] for x in self._unrecorded])
        for (step, _, rate), numbers in zip(self._unrecorded, fetched, strict=True):
            values = {name: float(value) for name, value in numbers.items()}
            skipped = int(values.pop("skipped"))
            if skipped > train.skip_steps:
                raise DivergedError(
                    f"the loss is {values['loss']} and its gradient norm {values['gradient_norm']}"
                    f" at step {step}; steps {step - skipped + 1} to {step} were left out and"
                    " nothing of them is saved. Start again in another --workdir, with a lower"
                    " optimizer.learning_rate or optimizer.clip_norm."
                )
            is_last = step == self.step and self.progress() >= 1
            if skipped:
                left_out = "the gradient is not finite, so the step was left out"
                self.reporter.say(f"step {step}: {left_out}")
            elif step % train.log_every == 0 or is_last:
                self.reporter.log_step(step, self.progress(), values | {"learning_rate": rate})
        self._unrecorded.clear()

    @contextlib.contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Reports an error in what a run shows: it does not lose what was trained."""
        try:
            yield
        except Exception as error:  # whatever the sampler and the disk raise
            told = f"{type(error).__name__}: {error}".rstrip(".")
            self.reporter.say(f"{what} could not be made ({told}); what was trained is kept")

    def write_results(self) -> None:
        """Writes the model folder, the adapters, images and the report, in the first process."""
        model, trained = averaged(self.state), _averaged_part(self.state)
        if runtime.are_several():
            model, trained = runtime.on_host((model, trained))
        with _inside(None if runtime.are_several() else self._mesh):
            if self._settings.diffusion.attention == "full" and self.state.frozen is None:
                model.set_registers()  # so that sparse fine-tuning can start from this model
            is_enough = runtime.is_first() and self._write_folders(model, trained)
        train = self._settings.train
        if self.step > self._start[0] and (train.image_seconds or train.eval_every):
            self._draw()
        with _inside(None if runtime.are_several() else self._mesh), self._guard("the report"):
            if runtime.is_first() and train.eval_prompts:
                self._write_report(model, is_enough)
        runtime.wait_for_all("the end")

    def _write_folders(self, model: Denoiser, trained: Denoiser) -> bool:
        """Writes the model and the adapters; returns whether the run was long enough."""
        settings, run, source = self._settings, self._run, self._source
        frozen = self.state.frozen is not None
        dtype = optimizer.frozen_dtype(settings.optimizer) if frozen else "float32"
        dtype = settings.train.model_dtype or dtype
        model_folder.save_model(
            run.model_folder,
            quantize.widened(model, dtype),
            settings,
            tokenizer_path=source.tokenizer_path,
            vq_folder=None if source.codec is None else source.codec.folder,
            words=source.words(),
            readme=training_report.model_card(
                settings, self.step, self.seconds, source.base_readme
            ),
            dtype=dtype,
            most_bytes=settings.train.model_file_mb * BYTES_PER_MB or SHARD_BYTES,
        )
        is_enough = True
        if source.prepared is not None:
            log = run.metrics_path
            is_enough, sentence = lengths.outcome(settings, log, self.step, self.seconds)
            print(sentence)
        elif self.step < min(settings.optimizer.warmup_steps, settings.train.train_steps):
            few = f"only {self.step} steps fitted into {settings.train.seconds:g} seconds"
            print(f"{few}: to go on, type the command again with a larger --config.train.seconds")
        print(f"{run.model_folder}: the {'trained model' if is_enough else 'model so far'}")
        if settings.lora.rank and (names := added_modules(settings)):
            what = " and ".join(f"Model.{name}" for name in names)
            print(f"no adapters by themselves: {what} added a module that the base lacks")
        elif settings.lora.rank:
            folder = run.folder / "adapters"
            adapters.save(folder, trained, settings, base=settings.train.init_from)
            print(f"{folder}: what was trained of it")
        return is_enough

    def _write_report(self, model: Denoiser, is_enough: bool) -> None:
        pipe, how = self._source.pipe(model), {"step": self.step, "seconds": self.seconds}
        path = training_report.write(pipe, self._run.folder, **how, data=self._source.prepared)
        print(f"{path}: {'what it can do' if is_enough else 'its samples so far'}")


def _key(batch: Corrupted) -> Any:
    """Returns what batches of one program have in common: their structure and their shapes."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple(leaf.shape for leaf in leaves)


def _mesh(settings: config.Config) -> Mesh | None:
    sizes = settings.train.mesh or ({"data": -1} if runtime.are_several() else {})
    try:
        return sharding.automatic(sizes) if sizes else None
    except ValueError as error:
        raise config.ConfigError(f"Train.mesh: {error}") from error


def _inside(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def _check_rows(sizes: dict[str, int], per_row: int, mesh: Mesh | None) -> None:
    """Refuses batches that the processes cannot share, given the examples of each group."""
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


def _first_model(settings: config.Config) -> Denoiser:
    """Returns random parameters, or just their shapes if they come from a checkpoint."""

    def make():
        return Denoiser(settings.model, rngs=nnx.Rngs(settings.seed))

    return jax.eval_shape(make) if settings.train.init_from else make()


def _averaged_part(state: TrainState) -> Denoiser:
    return state.params if state.ema is None else state.ema
