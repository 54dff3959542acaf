# SPDX-License-Identifier: Apache-2.0
"""What a run is trained on: its batches, and the tokenizers for them."""

import dataclasses
import pathlib

from sparse_lavida_jax import config
from sparse_lavida_jax.art import prompts as art_prompts
from sparse_lavida_jax.art import vocabulary as art_vocabulary
from sparse_lavida_jax.art.art_batches import ArtBatches
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.data.batches import Batches
from sparse_lavida_jax.lavida_o.chat import ChatTokenizer
from sparse_lavida_jax.mixture.record_batches import MixtureBatches
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.image_codec import ImageCodec, ImageTokenizer
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.prompting.protocol import prompt_format
from sparse_lavida_jax.prompting.vocabulary import Vocabulary
from sparse_lavida_jax.scenes.prompts import encoder_of
from sparse_lavida_jax.scenes.scene_batches import SceneBatches
from sparse_lavida_jax.scenes.tokenizer import SHIPPED, Tokenizer
from sparse_lavida_jax.training import start, states

SHOWN_PROMPTS = 24  # from the data, drawn during training


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """What a run is trained on.

    Attributes:
        settings: the whole configuration.
        model: the denoiser before training, or its shapes.
        batches: the data.
        tokenizer, tokenizer_path: for text, and its file.
        codec: for images; None if prepared data has no image tokenizer.
        prompts: what to draw during training; empty if the small world has its own prompts.
        base_readme: of the model that the run starts from; it contains the licence.
    """

    settings: config.Config
    model: Denoiser
    batches: Batches
    tokenizer: Tokenizer | ChatTokenizer
    tokenizer_path: pathlib.Path
    codec: ImageCodec | None
    prompts: tuple[str, ...]
    base_readme: str

    @property
    def prepared(self) -> MixtureBatches | None:
        """The batches of a prepared folder; None for the small world."""
        return self.batches if isinstance(self.batches, MixtureBatches) else None

    def words(self) -> frozenset[str] | None:
        """Returns the words that a model from scratch learns from; None if they are unknown.

        If it starts from another model, that model's words are included, if they are known.
        """
        known = frozenset()
        if self.settings.train.init_from and not start.has_own_tokenizers(self.settings):
            base = Vocabulary.read(self.tokenizer.path.parent)
            known = base and base.words
        if self.prepared is None or known is None or (more := self.prepared.words()) is None:
            return None
        return known | more

    def pipe(self, model: Denoiser) -> SparseLaViDa:
        """Returns the pipeline to sample from a model."""
        prompts = prompt_format(self.settings.prompts).of(self.tokenizer, self.settings, self.codec)
        return SparseLaViDa(model, self.settings, prompts, self.codec)


def open_source(
    settings: config.Config, model: Denoiser, *, index: int = 0, count: int = 1
) -> TrainingData:
    """Opens the data of a configuration.

    Args:
        model: the denoiser, or its shapes.
        index, count: which share of every batch this process makes.

    Raises:
        ConfigError: data and model do not fit together.
        CheckpointError: there is no model at `train.init_from`.
        RecordError: the prepared folder is missing or incomplete.
    """
    readme, share = _base_readme(settings), {"process_index": index, "process_count": count}
    if settings.data.source != "prepared":
        path, kind, make_encoder = SHIPPED, SceneBatches, encoder_of
        if settings.data.source == "art":
            path = art_vocabulary.tokenizer_for(settings.model)
            kind, make_encoder = ArtBatches, art_prompts.encoder_of
        codec = ImageCodec(settings.data.image_codec, settings.model)
        tokenizer = Tokenizer(path)
        batches = kind(settings, make_encoder(tokenizer, settings, codec), **share)
        return TrainingData(settings, model, batches, tokenizer, path, codec, (), readme)
    base = folder = pathlib.Path(settings.data.folder)
    if settings.train.init_from and not start.has_own_tokenizers(settings):
        base = model_folder.find_model(settings.train.init_from)
    path, vq = base / "tokenizer.json", base / "vq"
    try:
        tokenizer = ChatTokenizer(path)
        tokenizer.check(settings.model)
    except (ValueError, FileNotFoundError) as error:
        raise config.ConfigError(
            "data.source='prepared' needs the tokenizer of a LaViDa-O next to the model of"
            f" train.init_from, or one that `prepare` made in data.folder: {error}"
        ) from error
    batches = MixtureBatches(folder, settings, tokenizer, **share)
    codec = ImageCodec(vq, settings.model) if vq.is_dir() else None
    _check_codes(folder, base)
    prompts = () if codec is None else tuple(batches.prompts(SHOWN_PROMPTS))
    return TrainingData(settings, model, batches, tokenizer, path, codec, prompts, readme)


def _check_codes(folder: pathlib.Path, base: pathlib.Path) -> None:
    """Refuses records whose codes are not from the model's image tokenizer."""
    if (folder / "vq").is_dir() and (base / "vq").is_dir():
        if ImageTokenizer(str(folder)).digest != ImageTokenizer(str(base)).digest:
            raise config.ConfigError(
                f"{folder} was prepared with another image tokenizer than that of {base}: prepare"
                f" the images again, into another folder, with --image-tokenizer={base}."
            )


def _base_readme(settings: config.Config) -> str:
    base = settings.train.init_from
    if not base or states.is_unfinished(base):
        return ""
    return model_folder.read_text(model_folder.find_model(base), "README.md")
