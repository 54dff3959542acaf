# SPDX-License-Identifier: Apache-2.0
"""The state at the start of a run: random parameters, or those of `train.init_from`."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax.sharding import Mesh

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.lavida_o.chat import ChatTokenizer
from sparse_lavida_jax.mixture import prepare
from sparse_lavida_jax.models import lora, parameters, sharding
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.scenes.tokenizer import Tokenizer
from sparse_lavida_jax.training import optimizer, states
from sparse_lavida_jax.training.step import TrainState

# Settings of modules that a run may add to a model, with their values in models without them.
ADDED = {"style_parts": 0, "sequential_codes": False}
# Settings of a model that its parameters are made for.
OF_BASE = ("vocab_size", "text_mask_id", "width", "mlp_hidden", "num_layers", "num_heads", "vision")


def init_state(settings: config.Config, params: Denoiser, mesh: Mesh | None = None) -> TrainState:
    """Returns the state of a run at step 0, from these parameters or those of `init_from`.

    Matrices to be held in 8 bits by a single device are read into host memory and rounded there.

    Args:
        params: ignored if `init_from` is set.
        mesh: to spread the state over; every device reads or makes only its own part.

    Raises:
        CheckpointError: `init_from` is not a checkpoint, or its model has other shapes; likewise
            `vision_from`.
        ConfigError: adapters without a base, or settings that train nothing.
    """
    in_host_memory = mesh is None and settings.optimizer.frozen_dtype == "int8"
    with jax.default_device(jax.devices("cpu")[0] if in_host_memory else None):
        params = _with_vision(settings.train.vision_from, _base(settings, params, mesh))
        params = lora.begin(settings, params, jax.random.key(settings.seed))
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


def check(settings: config.Config) -> None:
    """Checks what would fail later in a run: drawing, and taking parameters from another model.

    Raises:
        ConfigError: more steps than an image has tokens, or the parameters of the model that it
            starts from would not fit, or would mean something else.
        CheckpointError: there is no such model.
    """
    sampling, most = settings.sampling, settings.model.num_cells
    if sampling.grid == "code" and settings.diffusion.attention == "full":
        most *= settings.model.codes_per_token
    if sampling.num_steps > most:
        raise config.ConfigError(
            f"Sampling.num_steps={sampling.num_steps} is more than there are tokens of the image:"
            f" {most}. Add --config.sampling.num_steps={most}, or less."
        )
    base = settings.train.init_from
    if not base or states.is_unfinished(base) or has_own_tokenizers(settings):
        return
    other = model_folder.read_config(model_folder.find_model(base)).model
    found = [(name, getattr(other, name), getattr(settings.model, name)) for name in OF_BASE]
    if named := "; ".join(f"{name} {old}, not {new}" for name, old, new in found if old != new):
        raise config.ConfigError(
            f"Train.init_from={base!r} has another model than the config: {named}. `sparse-lavida"
            f" train --data=FOLDER --init-from={base}` takes all of it from there."
        )


def has_own_tokenizers(settings: config.Config) -> bool:
    """Whether a run that starts from a model has the tokenizers of its data, not of that model.

    So it is if the data are your own and the model is of the small world, whose tokenizer has few
    words and no control tokens of a chat.
    """
    base = settings.train.init_from
    if not base or settings.data.source != "prepared" or states.is_unfinished(base):
        return False
    return model_folder.read_config(model_folder.find_model(base)).prompts != settings.prompts


def added_modules(settings: config.Config) -> list[str]:
    """Returns the settings of modules that a run adds to the model that it starts from."""
    base = model_folder.read_config(model_folder.find_model(settings.train.init_from)).model
    return [n for n in ADDED if getattr(settings.model, n) and not getattr(base, n)]


def _base(settings: config.Config, params: Denoiser, mesh: Mesh | None) -> Denoiser:
    """Returns the parameters to train, or to attach adapters to."""
    base = settings.train.init_from

    def make(_: config.Config) -> Denoiser:
        return model_folder.make_denoiser(settings)

    if base and states.is_unfinished(base):
        return states.load_unfinished(base, make_model=make)
    if has_own_tokenizers(settings):
        return _taken_over(settings, model_folder.find_model(base))
    if base:
        lacking = {name: ADDED[name] for name in added_modules(settings)}
        bare = config.changed(settings, {"model": lacking})
        found = model_folder.load_model(
            base,
            make_model=lambda _: model_folder.make_denoiser(bare),
            sharding=None if mesh is None else sharding.over(mesh),
            dtype=optimizer.dtypes(settings),
        ).model
        if not lacking:
            return found
        taken = parameters.by_name(found)
        return parameters.mapped(lambda name, leaf: taken.get(name, leaf), make(settings))
    if settings.lora.rank:
        raise config.ConfigError(
            f"Lora.rank={settings.lora.rank} needs a base model: name its folder in"
            " train.init_from."
        )
    return jax.tree.map(jnp.copy, params)  # the first step donates its state


def _with_vision(file: str, params: Denoiser) -> Denoiser:
    """Returns parameters with the vision tower of a file, if one is named."""
    if not file:
        return params
    try:
        return parameters.replaced(params, safetensors.numpy.load_file(file))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise model_folder.CheckpointError(
            f"Train.vision_from={file!r} holds no vision tower for this model ({error}). `python -m"
            " sparse_lavida_jax.training.vision_tower --config=... --out=...` makes one."
        ) from error


def _taken_over(settings: config.Config, base: pathlib.Path) -> Denoiser:
    """Returns random parameters with those of a model with other tokenizers, where they fit.

    Text embeddings are taken for the tokens that both have, all else where the shapes are equal,
    but not what a style code measured of other images.
    """
    widths = model_folder.read_config(base).model.width, settings.model.width
    if widths[0] != widths[1]:
        raise config.ConfigError(
            f"{base} has width {widths[0]}, model.width={widths[1]}: nothing of it could be taken"
            " over. Leave out --config.model.width or --init-from."
        )
    old = Tokenizer(base / "tokenizer.json").ids()
    new = ChatTokenizer(pathlib.Path(settings.data.folder) / prepare.TOKENIZER).ids()
    # Locations have another unit.
    both = sorted(token for token in old.keys() & new.keys() if not token.startswith("<LOC_"))
    here, there = (np.array([ids[token] for token in both]) for ids in (new, old))
    found = parameters.by_name(model_folder.load_model(base).model)

    def choose(name, leaf):
        taken = found.get(name)
        if name == "text_embedding":
            return leaf.at[here].set(found[name][there])
        if name == "text_head/kernel":
            return leaf.at[:, here].set(found[name][:, there])
        is_measured = name.startswith("style_code/seen_")
        return leaf if taken is None or taken.shape != leaf.shape or is_measured else taken

    return parameters.mapped(choose, model_folder.make_denoiser(settings))


def begun(settings: config.Optimizer, params: Denoiser) -> TrainState:
    """Returns the state at step 0 of a run that trains these parameters."""
    ema = jax.tree.map(jnp.copy, params) if settings.ema else None
    opt_state = optimizer.init(settings, params)
    return sharding.constrained(TrainState(jnp.int32(0), params, ema, opt_state, jnp.int32(0)))
