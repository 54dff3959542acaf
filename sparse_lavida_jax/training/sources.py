# SPDX-License-Identifier: Apache-2.0
"""What a run is trained on: its batches, and the tokenizers that they are made with."""

import dataclasses
import pathlib
from collections.abc import Callable

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.lavida_o.chat import ChatTokenizer
from sparse_lavida_jax.mixture.batches import MixtureBatches
from sparse_lavida_jax.models.codec import ImageCodec
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.scenes.batches import GroupedBatches
from sparse_lavida_jax.scenes.tokenizer import SHIPPED, Tokenizer
from sparse_lavida_jax.training import states

SHOWN_PROMPTS = 24  # of the data, drawn while training

MakeCodec = Callable[[str | pathlib.Path | None, config.Model], ImageCodec]


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """What a run is trained on.

    Attributes:
        pipe: the model before training, or its shapes, with its tokenizers.
        batches: the data.
        tokenizer_path: the file of the text tokenizer.
        prompts: what to draw while training; empty where the small world has prompts of its own.
        base_readme: of the model that the run starts from; its licence is in it.
    """

    pipe: SparseLaViDa
    batches: GroupedBatches | MixtureBatches
    tokenizer_path: pathlib.Path
    prompts: tuple[str, ...] = ()
    base_readme: str = ""


def open_source(
    settings: config.Config,
    model: Denoiser,
    make_codec: MakeCodec,
    *,
    index: int = 0,
    count: int = 1,
) -> TrainingData:
    """Opens the data of a configuration.

    Args:
        model: the denoiser, or its shapes.
        index, count: the share of every batch that this process makes.

    Raises:
        ConfigError: data and model do not belong together.
        CheckpointError: there is no model at `train.init_from`.
        RecordError: the prepared folder is missing, or not whole.
    """
    readme = _base_readme(settings)
    if settings.data.source != "prepared":
        codec = make_codec(settings.data.image_codec, settings.model)
        pipe = SparseLaViDa(model, settings, Tokenizer(SHIPPED), codec)
        data = GroupedBatches(settings, pipe.encoder, process_index=index, process_count=count)
        return TrainingData(pipe, data, SHIPPED, base_readme=readme)
    base = model_folder.find_model(settings.train.init_from)
    path = base / "tokenizer.json"
    try:
        tokenizer = ChatTokenizer(path)
        tokenizer.check(settings.model)
    except (ValueError, FileNotFoundError) as error:
        raise config.ConfigError(
            f"data.source='prepared' needs the tokenizer of a LaViDa-O beside the model of"
            f" train.init_from: {error}"
        ) from error
    vq = base / "vq"
    codec = make_codec(vq, settings.model) if vq.is_dir() else None
    pipe = SparseLaViDa(model, settings, tokenizer, codec)
    data = MixtureBatches(
        settings.data.folder, settings, tokenizer, process_index=index, process_count=count
    )
    prompts = () if codec is None else tuple(data.prompts(SHOWN_PROMPTS))
    return TrainingData(pipe, data, path, prompts, readme)


def _base_readme(settings: config.Config) -> str:
    base = settings.train.init_from
    if not base or states.is_unfinished(base):
        return ""
    path = model_folder.find_model(base) / "README.md"
    return path.read_text(encoding="utf-8") if path.is_file() else ""
