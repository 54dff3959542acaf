# SPDX-License-Identifier: Apache-2.0
"""The state at the start of a run: random parameters, or those of `train.init_from`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.models import lora, sharding
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.training import optimizer, states
from sparse_lavida_jax.training.step import TrainState


def init_state(settings: config.Config, params: Denoiser, mesh: Mesh | None = None) -> TrainState:
    """Returns the state of a run at step 0, from these parameters or those of `init_from`.

    Matrices to be held in 8 bits by a single device are read into host memory and rounded there.

    Args:
        params: ignored if `init_from` is set.
        mesh: to spread the state over; every device reads or makes only its own part.

    Raises:
        CheckpointError: `init_from` is not a checkpoint, or its model has other shapes.
        ConfigError: adapters without a base, or settings that train nothing.
    """
    in_host_memory = mesh is None and settings.optimizer.frozen_dtype == "int8"
    with jax.default_device(jax.devices("cpu")[0] if in_host_memory else None):
        params = lora.begin(settings, _base(settings, params, mesh), jax.random.key(settings.seed))
        params, frozen = optimizer.parted(settings, params)
    base = settings.train.init_from
    if frozen is not None and base and states.is_unfinished(base):
        raise config.ConfigError(
            f"Train.init_from={base!r} is a run that has not ended, and what is frozen is read"
            " again whenever this run goes on: wait until that run has its model."
        )
    if in_host_memory:
        params, frozen = jax.device_put((params, frozen), jax.devices()[0])
    start = functools.partial(begun, settings.optimizer)
    if mesh is None:
        return dataclasses.replace(start(params), frozen=frozen)
    params, frozen = sharding.place_state((params, frozen), mesh)
    with jax.set_mesh(mesh):
        return dataclasses.replace(jax.jit(start, donate_argnums=0)(params), frozen=frozen)


def _base(settings: config.Config, params: Denoiser, mesh: Mesh | None) -> Denoiser:
    """Returns the parameters to train, or to attach adapters to."""
    base = settings.train.init_from

    def make(_: config.Config) -> Denoiser:
        return model_folder.make_denoiser(settings)

    if base and states.is_unfinished(base):
        return states.load_unfinished(base, make_model=make)
    if base:
        return model_folder.load_model(
            base,
            make_model=make,
            sharding=None if mesh is None else sharding.over(mesh),
            dtype=optimizer.dtypes(settings),
        ).model
    if settings.lora.rank:
        raise config.ConfigError(
            f"Lora.rank={settings.lora.rank} needs a base model: name its folder in"
            " train.init_from."
        )
    return jax.tree.map(jnp.copy, params)  # the first step donates its state


def begun(settings: config.Optimizer, params: Denoiser) -> TrainState:
    """Returns the state at step 0 of a run that trains these parameters."""
    ema = jax.tree.map(jnp.copy, params) if settings.ema else None
    opt_state = optimizer.init(settings, params)
    return sharding.constrained(TrainState(jnp.int32(0), params, ema, opt_state, jnp.int32(0)))
