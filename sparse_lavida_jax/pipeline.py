# SPDX-License-Identifier: Apache-2.0
"""The Python interface: a checkpoint with its tokenizers, and the tasks that it can do.

    pipe = SparseLaViDa.from_pretrained("scenes")
    image = pipe.generate("a red circle above a blue square", seed=0)
    edited = pipe.edit(image, "make the red circle green")
    print(pipe.ask(edited, "how many squares are there?").text)

Every task takes one input or a list of them, and returns one `Result` with an entry for each.
`conversation.Conversation` chains tasks.
"""

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import jax
import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.checkpoints import adapter_names, model_folder, room
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.inference import checks
from sparse_lavida_jax.inference.batch_shapes import Bucket, Padding
from sparse_lavida_jax.inference.checks import Number, Numbers, Words
from sparse_lavida_jax.inference.engine import Engine
from sparse_lavida_jax.inference.requests import (
    ROUNDS,
    ChangeOptions,
    ImageOptions,
    Options,
    Pixels,
    Request,
    RequestMaker,
    Shown,
)
from sparse_lavida_jax.inference.results import Origin, Result
from sparse_lavida_jax.inference.tasks import TaskRun
from sparse_lavida_jax.kernels import attention
from sparse_lavida_jax.kernels.devices import RELEASE_HEAD_DIM
from sparse_lavida_jax.models import fuse, sharding
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.image_codec import ImageCodec
from sparse_lavida_jax.models.stack import admit_kernel_for
from sparse_lavida_jax.programs import jax_settings
from sparse_lavida_jax.programs.persistent_jit import Programs
from sparse_lavida_jax.prompting.protocol import PromptFormat, prompt_format
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.sampling.content_cache import MOST_GB, ContentCache
from sparse_lavida_jax.sampling.presets import RowRequest
from sparse_lavida_jax.sampling.progress import Callback

if TYPE_CHECKING:
    from sparse_lavida_jax.inference import proofs, surprise

S = TypeVar("S", bound="SparseLaViDa")

log = logging.getLogger(__name__)

MASKED_GREY = 168  # of undecoded cells, in previews


class SparseLaViDa:
    """A model with its tokenizers, settings and tasks; made by `from_pretrained`.

    All tasks are `run(requests(task, words, shown, **options))`.

    Args:
        model: the denoiser.
        settings: the configuration it was trained with.
        prompts: how tasks are put to the model.
        codec: for images; None if the model has none.
        batch_size: the largest number of rows decoded together.
        source: the checkpoint it came from.
        content_cache_gb: memory, in 10**9 bytes, for what later requests find again: codes and
            vision features of images, keys and values of prompts (`sampling/content_cache.py`). 0:
            none; by default a twentieth of the device's memory, at most 4. A model that is split
            over several devices keeps codes only.

    Attributes:
        engine: the model and the sampler.
        warned: whether a warning was given that the model was never trained for what was asked.
        loading: the arguments of `from_pretrained` that load it again, for copies and pickles;
            None: it was made in memory.
    """

    def __init__(
        self,
        model: Denoiser,
        settings: config.Config,
        prompts: PromptFormat,
        codec: ImageCodec | None,
        batch_size: Number = 16,
        source: Origin | None = None,
        content_cache_gb: Number = None,
    ):
        self.settings = settings
        self.prompts = prompts
        self.codec = codec
        self.source = source or Origin()
        rows = checks.number("batch_size", batch_size, whole=True)
        most = None
        if content_cache_gb is not None:
            if not 0 <= checks.number("content_cache_gb", content_cache_gb) <= MOST_GB:
                allowed = f"0 to {MOST_GB} are allowed"
                raise checks.refusal("content_cache_gb", content_cache_gb, allowed)
            most = round(content_cache_gb * 1e9)
        self.engine = Engine(model, rows, prompts.text_block_len, ContentCache(most))
        self.warned = False
        self.loading: dict[str, Any] | None = None

    @classmethod
    @runtime.interrupts_held()
    @jax_settings.defaults()
    def from_pretrained(
        cls: type[S],
        name: str | pathlib.Path,
        batch_size: Number = 16,
        *,
        mesh: jax.sharding.Mesh | Mapping[str, int] | None = None,
        dtype: str | None = None,
        task: fuse.Task = "both",
        revision: str | None = None,
        local_files_only: bool = False,
        convert: bool = False,
        adapters: str | Mapping[str, float] = "",
        merge_adapters: bool = True,
        content_cache_gb: Number = None,
    ) -> S:
        """Loads a model folder, a run directory, or a bundled model or one from the hub by name.

        On GPUs and TPUs, or for one task, the parameters are fused for sampling
        (`fuse.for_inference`).

        Args:
            mesh: splits the parameters over several devices (`sharding.RULES`), to the results of
                one up to rounding; or its sizes, such as {"fsdp": 2, "tensor": 4} for all eight.
            dtype: of the parameters in memory, "float32" or "bfloat16"; by default float32, and
                where they are fused the dtype that they are multiplied in.
            task: "image" for images without a layout in text, "text" for text: parameters that
                only the other task reads are dropped, and requests that need them are refused.
            revision, local_files_only: for a model `org/name` on the hub: see `hub.fetch`.
            convert: whether to convert a released LaViDa-O from the hub, once.
            adapters: folders of adapters with their weights, as a mapping or as
                "mine,runs/other:0.5" (`convert/adapters.py`).
            merge_adapters: whether to add them to their matrices, see `adapters.added`.
            content_cache_gb: see the class.

        Raises:
            model_folder.CheckpointError: there is no such model, or it is damaged.
            room.RoomError: its parameters are larger than the memory of the device.
            ConfigError: a wrong mesh (`sharding.automatic`).
            ValueError: `task` next to unmerged adapters.
        """
        loading = {key: value for key, value in locals().items() if key not in ("cls", "convert")}
        if not merge_adapters and task != "both":
            raise ValueError(f"next to adapters, all parameters are kept: leave task={task!r} out.")
        name = os.path.expanduser(name)
        where: Any = {"revision": revision, "local_files_only": local_files_only}
        if convert:
            from sparse_lavida_jax.convert import from_torch

            # This uses the device, which must be unused when the kernel is checked.
            attention.admit_kernel(RELEASE_HEAD_DIM, "bfloat16", None)
            from_torch.convert_from_hub(name, **where)
        folder = model_folder.find_model(name, **where)
        admit_kernel_for(model_folder.read_config(folder).model)
        weights = adapter_names.parse(adapters)
        split = None if mesh is None else sharding.over(mesh)
        wanted = None if weights else fuse.reads(task)  # adapters are for all layers
        platform = jax.default_backend()
        fused = platform in ("gpu", "tpu") or task != "both"
        kinds: Any = dtype
        if fused and not (dtype or weights):
            kinds = fuse.dtypes(model_folder.read_config(folder).model)
        room.check(folder, task="both" if weights else task, dtype=kinds, mesh=mesh)
        loaded = model_folder.load_model(folder, sharding=split, dtype=kinds, wanted=wanted)
        settings, model = loaded.config, loaded.model
        if weights:
            from sparse_lavida_jax.convert import adapters as lora_folders

            added = lora_folders.added(model, settings, folder, weights, merge=merge_adapters)
            model, settings = added
        textual = settings.model.understanding_only
        place = loaded.vq_folder or folder / "vq"
        codec = None if textual else ImageCodec(place, settings.model)
        kind = prompt_format(settings.prompts)
        try:
            tokenizer = kind.tokenizer_type(loaded.tokenizer_path)
            prompts = kind.of(tokenizer, settings, codec)
        except (ValueError, FileNotFoundError) as error:
            raise model_folder.CheckpointError(str(error)) from error
        named = f"{name}@{revision}" if revision else str(name)
        digest, written = adapter_names.digest(folder, weights), adapter_names.written(weights)
        source = Origin(named, digest, written)
        over = attention.mesh_of(model)
        if merge_adapters and fused:
            model = fuse.for_inference(model, task=task, mesh=over, consume=True)
        made = cls(model, settings, prompts, codec, batch_size, source, content_cache_gb)
        if isinstance(mesh, jax.sharding.Mesh):
            loading["mesh"] = dict(mesh.shape)
        made.loading = loading
        return made

    def __reduce__(self) -> Any:
        """Copies and pickles hold no parameters, and are loaded again.

        Raises:
            CheckpointError: this was made in memory.
        """
        if self.loading is None:
            raise model_folder.CheckpointError(
                "a model made in memory cannot be copied: write it to a folder, and load that."
            )
        return loaded_again, (type(self), self.loading, self.source, self.settings.sampling)

    def __copy__(self: S) -> S:
        return self.with_sampling(self.settings.sampling)

    def save_pretrained(self, folder: pathlib.Path | str) -> None:
        """Writes the model folder that this was loaded from, adapters added, to a new folder.

        Raises:
            CheckpointError: `folder` contains something else, the disk is full, or this was not
                loaded from a folder, or that has changed since.
        """
        from sparse_lavida_jax.convert import adapters as lora_folders

        weights = adapter_names.parse(self.source.adapters)
        lora_folders.copy(self._loaded_from(weights), folder, weights)

    def push_to_hub(self, name: str, *, private: bool = False) -> str:
        """Uploads that folder with a card to the hub as `org/name`; returns its address there.

        Raises:
            CheckpointError: it has adapters, or as `save_pretrained`, or see `cards.push`.
        """
        from sparse_lavida_jax.checkpoints import cards

        return cards.push(self._loaded_from({}), name, private=private)

    def _loaded_from(self, weights: Mapping[str, float]) -> pathlib.Path:
        if self.source.name:
            found = model_folder.find_model(self.source.name, local_files_only=True)
            if adapter_names.digest(found, weights) == self.source.sha256:
                return found
        raise model_folder.CheckpointError(
            "there is no folder of this very model: write the one you trained or load it anew. With"
            " adapters, push the folder that save_pretrained writes."
        )

    @property
    def model(self) -> Denoiser:
        """The denoiser."""
        return self.engine.model

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The mesh that the parameters are split over; None for a single device."""
        return attention.mesh_of(self.model)

    @property
    def batch_size(self) -> int:
        """The largest number of rows decoded together."""
        return self.engine.batch_size

    @property
    def content_cache(self) -> ContentCache:
        """What is kept for later requests, with its counts."""
        return self.engine.content_cache

    @property
    def tokenizer(self) -> Any:
        """The text tokenizer."""
        return self.prompts.tokenizer

    @property
    def encoder(self) -> Any:
        """Makes training examples of the small world (`scenes.prompts.ExampleMaker`).

        Raises:
            ConfigError: it is a converted LaViDa-O, which has none.
        """
        if self.prompts.encoder is None:
            raise config.ConfigError("only models of the small world have its examples.")
        return self.prompts.encoder

    def with_model(self: S, model: Denoiser, source: Origin | None = None) -> S:
        """Returns the same pipeline with other parameters, and their origin."""
        parts = model, self.settings, self.prompts, self.codec, self.batch_size, source
        return type(self)(*parts, self.content_cache.most_bytes / 1e9)

    def with_sampling(self: S, sampling: config.Sampling) -> S:
        """Returns the same pipeline with other default sampling settings; it shares the cache."""
        settings = dataclasses.replace(self.settings, sampling=sampling)
        parts = self.model, settings, self.prompts, self.codec, self.batch_size, self.source
        made = type(self)(*parts)
        made.engine, made.loading = self.engine, self.loading
        return made

    def warmup(self, prompt: Words = "a") -> None:
        """Compiles what one image and one short answer need, so that the first is not slow.

        Args:
            prompt: as long as the ones to come; programs are compiled for lengths that are
                rounded up, with and without a layout after the prompt.
        """
        for words in [prompt] if isinstance(prompt, str) else prompt:
            if not self.prompts.refusal("generate"):
                self.generate(words, as_written=True)
            self.sample([self.prompts.ask(words, (), self.prompts.answer_tokens)])

    # -- tasks ----------------------------------------------------------------------------

    def generate(
        self,
        prompt: Words,
        *,
        size: Numbers = None,
        callback: Callback | None = None,
        **options: Unpack[ImageOptions],
    ) -> Result:
        """Draws an image for each prompt.

        Args:
            size: height and width in pixels, or the side of a square; by default the largest.
            callback: called before the first step and after each phase of each stage
                (`sampling.progress.Progress`).
            options: see `ImageOptions`; likewise for all tasks.

        Raises:
            RequestError: an empty or overlong prompt, a size or task that the model does not
                support, an option that the task cannot honour.
            ConfigError: sampling settings out of range.
        """
        return self.run(self.requests("generate", prompt, size=size, **options), callback)

    def edit(
        self,
        shown: Shown | Sequence[Shown],
        instruction: Words,
        *,
        callback: Callback | None = None,
        **options: Unpack[ChangeOptions],
    ) -> Result:
        """Edits each image as instructed; everything else stays.

        Args:
            shown: of any size; they are edited at the model's own size.
        """
        return self.run(self.requests("edit", instruction, shown, **options), callback)

    def inpaint(
        self,
        shown: Shown | Sequence[Shown],
        prompt: Words,
        *,
        mask: Any = None,
        box: Numbers = None,
        known: Any = None,
        callback: Callback | None = None,
        **options: Unpack[ChangeOptions],
    ) -> Result:
        """Redraws a part of each image; the codes of all other cells stay, bit for bit.

        Args:
            prompt: what the whole image should show.
            mask: where to draw: an array, a Pillow image or a file of the size of the image, white
                or transparent there (`image_files.check_mask`). Every cell it touches is drawn.
            box: where to draw, instead of a mask: x1, y1, x2, y2 in pixels of the image.
            known: instead of both, the grid of cells to keep, or one for each row: the reverse of
                a mask.

        Raises:
            ImageError: a mask of another size, a box outside the image, or both or neither.
        """
        where = {"mask": mask, "box": box, "known": known}
        return self.run(self.requests("inpaint", prompt, shown, **where, **options), callback)

    def outpaint(
        self,
        shown: Shown | Sequence[Shown],
        prompt: Words,
        *,
        box: Numbers = None,
        known: Any = None,
        callback: Callback | None = None,
        **options: Unpack[ChangeOptions],
    ) -> Result:
        """Draws the surroundings of each image; the codes of its own cells stay, bit for bit.

        Args:
            prompt: what the whole new image should show.
            box: where the old image goes in the new one, x1, y1, x2, y2 in pixels of the new one;
                by default in the middle, at its own size, or at half the new image's size if it is
                larger. Expanded to whole cells.
            known: instead of a box, the grid of cells to keep, or one for each row, for images that
                already have the size of the new ones.

        Raises:
            ImageError: a box outside the new image, or one that leaves nothing to draw.
        """
        where = {"box": box, "known": known}
        return self.run(self.requests("outpaint", prompt, shown, **where, **options), callback)

    def reflect(
        self,
        prompt: Words,
        *,
        rounds: Number = ROUNDS,
        callback: Callback | None = None,
        **options: Unpack[ImageOptions],
    ) -> Result:
        """Draws, judges the result, and redraws to correct its faults, until there are none.

        A model of the small world corrects its image by an edit; a LaViDa-O is shown its
        attempts, each with its faults. Prompts are processed one after another.

        Args:
            rounds: the largest number of attempts at an image.
        """
        return self.run(self.requests("reflect", prompt, rounds=rounds, **options), callback)

    def ask(
        self,
        shown: Shown | Sequence[Shown] | None,
        question: Words,
        *,
        max_new_tokens: Number = None,
        callback: Callback | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Answers each question, about its image if there is one.

        Args:
            max_new_tokens: rounded up to whole text blocks; by default a short answer.
        """
        more = {"max_new_tokens": max_new_tokens, **options}
        return self.run(self.requests("ask", question, shown, **more), callback)

    def reason(
        self,
        shown: Shown | Sequence[Shown] | None,
        question: Words,
        *,
        max_new_tokens: Number = None,
        callback: Callback | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Answers each question step by step: like `ask`, with room for a long answer."""
        more = {"max_new_tokens": max_new_tokens, **options}
        return self.run(self.requests("reason", question, shown, **more), callback)

    def caption(
        self,
        shown: Shown | Sequence[Shown],
        *,
        callback: Callback | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Describes each image."""
        return self.run(self.requests("caption", None, shown, **options), callback)

    def constrained_caption(
        self,
        shown: Shown | Sequence[Shown],
        *,
        template: str | None = None,
        words: Words = (),
        callback: Callback | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Describes an image in a text of which some parts are given.

        Args:
            template: the text with gaps (`parse_template`).
            words: required words, in order; if a free caption contains them all, it is the
                answer; otherwise they are put into a template with gaps around each.

        Raises:
            RequestError: neither a template nor words, or both.
        """
        more = {"template": template, "required": None if words == () else words, **options}
        return self.run(self.requests("constrained_caption", None, shown, **more), callback)

    def infill(
        self,
        text: Words,
        shown: Shown | Sequence[Shown] | None = None,
        *,
        callback: Callback | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Fills the gaps in each text, seeing the text on both sides of a gap.

        Args:
            text: `___` is a gap of one token, `{4}` one of four.
            shown: image that the text describes.
        """
        return self.run(self.requests("infill", text, shown, **options), callback)

    def ground(
        self,
        shown: Shown,
        phrases: Words,
        *,
        callback: Callback | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Finds things in an image, all in parallel.

        Returns:
            A box per phrase, in pixels of the image as given.
        """
        return self.run(self.requests("ground", phrases, shown, **options), callback)

    def complete(
        self,
        *,
        words: Words | None = None,
        layout: Words | None = None,
        image: Shown | None = None,
        mask: Any = None,
        box: Numbers = None,
        callback: Callback | None = None,
        **options: Any,
    ) -> Result:
        """Fills what is missing of words, layout and image, by the task that was taught it.

        Args:
            words: whole, or with gaps as in `infill`.
            layout: whole, or with gaps: `{3}` for the name of a thing, `{4}` for a box, and `___`
                at the end for whatever follows. Things come in the order of the words, which are
                then given to the model as they are.
            image: whole, or with a mask or a box.
            mask, box: where the image is new, see `inpaint`. Cells outside stay, bit for bit; a
                warning names the things of a layout that they rule out.
            options: of that task, see `subsets.TABLE`.

        Raises:
            RequestError: no model, or not this one, was taught to fill the rest.
        """
        made = self.completions(words, layout, image, mask, box, options)
        return self.run(made, callback)

    @runtime.interrupts_held()
    @jax_settings.defaults()
    def completions(
        self,
        words: Words | None,
        layout: Words | None,
        image: Shown | None,
        mask: Any,
        box: Numbers,
        options: Mapping[str, Any],
    ) -> list[Request]:
        """Returns the requests of `complete`."""
        from sparse_lavida_jax.inference import subsets

        run = self.task_run(self.settings.sampling)
        return subsets.requests_of(run, self.requests, words, layout, image, mask, box, options)

    def replay(
        self,
        record: dict[str, Any],
        shown: Shown | None = None,
        *,
        callback: Callback | None = None,
    ) -> Result:
        """Draws a recorded image again, bit for bit on the same device and software.

        Elsewhere single codes may differ: a warning names the first ones, with their margins.

        Args:
            record: `Result.records`, or `image_files.read_record` of a PNG.
            shown: the image it was based on; by default the file that it was read from, if that
                lies in the current folder.

        Raises:
            RequestError: the record is damaged or from another version or checkpoint, or the
                image is another one.
        """
        from sparse_lavida_jax.inference import differences

        pipe, request, bucket = self.recorded(record, shown)
        result = pipe.run([request], callback, bucket=bucket)
        if differences.cells(record, result):
            run = pipe.task_run(request.sampling)
            log.warning("%s", differences.told(run, request, record, result))
        return result

    def branch(
        self,
        record: dict[str, Any] | Result | str | pathlib.Path,
        at: Any = None,
        *,
        num_images: Number = None,
        seed: Numbers = None,
        shown: Shown | None = None,
        callback: Callback | None = None,
    ) -> Result:
        """Draws images like a recorded one: with its noise up to a step, and their own after it.

        The steps before are passed once for all images of a batch (`Result.shared`). Each image has
        the codes of the run that takes these turns by itself in the same bucket.

        Args:
            record: of the image, its PNG, or a result of one image.
            at, num_images, seed: see `branches.requests_of`; by default four images, which branch
                at the layout if there is one.
            shown: see `replay`.

        Raises:
            RequestError: see `replay`; or there is no such place to branch at.
        """
        pipe, made, bucket = self.branches(record, at, num_images, seed, shown)
        return pipe.run(made, callback, bucket=bucket)

    def branches(
        self: S,
        record: dict[str, Any] | Result | str | pathlib.Path,
        at: Any = None,
        num_images: Number = None,
        seed: Numbers = None,
        shown: Shown | None = None,
    ) -> tuple[S, list[Request], Bucket | None]:
        """Returns the requests of `branch`, and what they are to be run with."""
        from sparse_lavida_jax.inference import branches, provenance

        pipe, parent, bucket = self.recorded(provenance.record_of(record), shown)

        def step_counts(request: Request, stage: str) -> list[int]:
            return pipe.task_run(request.sampling).step_counts(request, stage)

        made = branches.requests_of(parent, at, num_images, seed, step_counts)
        return pipe, made, branches.bucket_of(made, bucket, self.batch_size)

    @runtime.interrupts_held()
    def prove(
        self,
        image: Result | str | pathlib.Path,
        *,
        shown: Shown | None = None,
        tolerance: float | None = None,
    ) -> "list[proofs.Proof]":
        """Says whether images of ours follow from their words, seeds and settings.

        One pass for each stage: layout, codes and pixels (`inference/proofs.py`).

        Args:
            image: a PNG, or a result.
            shown: the image that it was drawn after, see `replay`; or one for each.
            tolerance: how far below the largest score a draw may be, in logits; by default what
                rounding explains in float32.

        Raises:
            RequestError: see `replay`; or the draws do not follow from one pass, which says why.
        """
        from sparse_lavida_jax.inference import proofs, provenance

        pairs = provenance.recorded_pixels(image)
        seen = shown if isinstance(shown, list | tuple) else [shown] * len(pairs)
        made = [
            (*self.recorded(record, one)[:2], record, pixels)
            for (record, pixels), one in zip(pairs, seen, strict=True)
        ]
        found = []
        for (_, sampling), group in itertools.groupby(made, lambda x: (x[1].task, x[1].sampling)):
            rows = [*group]
            for start in range(0, len(rows), self.batch_size):
                own = rows[start : start + self.batch_size]
                pipes, asked, notes, images = zip(*own, strict=True)
                run = pipes[0].task_run(sampling)
                found += proofs.prove(run, asked, notes, images, tolerance)
        return found

    def with_margins(
        self, result: Result, *, shown: Shown | Sequence[Shown] | None = None
    ) -> Result:
        """Returns a result whose records hold the margin of each draw; it costs a pass a stage.

        A margin is how far a code or token was above the next one (`proofs.Stage.margins`). Where
        all exceed what rounding changes, another device draws the same (docs/method.md).

        Args:
            shown: see `prove`.

        Raises:
            RequestError: see `prove`.
        """
        proofs = self.prove(result, shown=shown, tolerance=0.0)
        margins = ({one.name: list(one.margins) for one in proof.stages} for proof in proofs)
        pairs = zip(result.records, margins, strict=True)
        records = tuple(record | {"margins": own} for record, own in pairs)
        return dataclasses.replace(result, records=records)

    @runtime.interrupts_held()
    def surprise(
        self,
        image: Shown,
        captions: Words,
        *,
        layout: str | None = None,
        num_plans: Number = None,
    ) -> "surprise.Surprise":
        """Returns how many bits an image has to the model, cell by cell, given each caption.

        At temperature 1, without guidance or filters, the mean over some plans in one batch.

        Args:
            image: of any size; it is scored at the model's own size.
            captions: one or more, which are ranked.
            layout: of the image, if it is known.
            num_plans: how many orders of the cells; by default `surprise.PLANS`.

        Raises:
            RequestError: the model draws no images, or in no plan.
        """
        from sparse_lavida_jax.inference import surprise

        sampling = surprise.sampling_of(self.settings.sampling, self.settings.model)
        made = self.requests("generate", captions, layout=layout or False, sampling=sampling)
        count = surprise.PLANS if num_plans is None else num_plans
        return surprise.surprise(self.task_run(sampling), made, image, count)

    def recorded(
        self: S, record: dict[str, Any], shown: Shown | None
    ) -> tuple[S, Request, Bucket | None]:
        """Returns the request of a recorded image, and what it is to be run with; see `replay`."""
        from sparse_lavida_jax.inference import provenance

        made = provenance.recorded(record, shown, self.model, self.source, self.requests)
        pipe = self if made.model is self.model else self.with_model(made.model, self.source)
        return pipe, made.request, made.bucket

    # -- requests in, results out ---------------------------------------------------------

    def requests(
        self,
        task: str,
        words: Words | None = None,
        shown: Shown | Sequence[Shown] | None = None,
        **given: Any,
    ) -> list[Request]:
        """Returns requests for a task: the one place where they are checked.

        Args:
            task: a key of `requests.TASK_SPECS`.
            words: prompt, instruction, question, phrases or text; None if a task has none.
            shown: the images that the task is about.
            given: its options (`TaskSpec.takes`); None: not given.

        Raises:
            RequestError: the model or the task does not support it, or words and images do not
                go together.
            ImageError: `shown` is not an image, or a mask or a box does not fit it.
            ConfigError: sampling settings out of range.

        Logs a warning about words, and once about settings, that the model never saw in training.
        """
        side = 0 if self.codec is None else self.codec.image_size
        made = RequestMaker(self.settings, self.prompts, side).make(task, words, shown, given)
        preset = presets.untrained(made[0].sampling, self.model.settings)
        if preset and not self.warned:
            log.warning(
                "%s was not trained with the attention of the sampler %r, which will draw badly:"
                " leave it out, or fine-tune the model first (`sparse-lavida train`).",
                self.source.name or "this model", preset,
            )  # fmt: skip
            self.warned = True
        return made

    @runtime.interrupts_held()
    @jax_settings.defaults()
    def run(
        self,
        requests: Sequence[Request],
        callback: Callback | None = None,
        *,
        bucket: Bucket | None = None,
        padding: Padding = "fit",
        programs: Programs = contextlib.nullcontext,
    ) -> Result:
        """Executes requests of one task with the same sampling settings.

        Args:
            callback: called before the first step and after each phase
                (`sampling.progress.Progress`).
            bucket: the shapes to pad images to, for `replay`; by default as `padding` says.
            padding: see `batch_shapes.Padding`.
            programs: entered around each batch, with the key of its compiled programs.

        Raises:
            RequestError: several tasks or settings, or no request; an image, text or size that
                the model does not support.
            ConfigError: sampling settings that do not fit the response.
        """
        tasks = {(request.task, request.sampling) for request in requests}
        if len(tasks) != 1:
            raise RequestError("what is run together is of one task, with the same settings.")
        ((_, sampling),) = tasks
        return self.task_run(sampling, callback, bucket, padding, programs).run(requests)

    def task_run(
        self,
        sampling: config.Sampling,
        callback: Callback | None = None,
        bucket: Bucket | None = None,
        padding: Padding = "fit",
        programs: Programs = contextlib.nullcontext,
    ) -> TaskRun:
        """Returns what executes requests with these settings; see `run`."""
        parts = self.engine, self.settings, self.prompts, self.codec, self.source
        return TaskRun(*parts, sampling, callback, bucket, padding, programs)

    @runtime.interrupts_held()
    @jax_settings.defaults()
    def sample(
        self,
        examples: Sequence[Example],
        *,
        seed: Numbers = 0,
        sampling: config.Sampling | None = None,
        shared: bool = False,
        callback: Callback | None = None,
    ) -> list[Int[np.ndarray, "_l g"]]:
        """Samples the responses of examples of one modality, for training and benchmarks.

        Examples may differ in response length; those of equal length are sampled together.

        Args:
            seed: of the first row, from which the others count up; or one for each.
            shared: whether to pad to shapes that many batches share.
            callback: see `run`.

        Raises:
            ConfigError: more steps than there are tokens.
        """
        how = sampling or self.settings.sampling
        scales = presets.scales(how, examples[0].modality)
        seeds = checks.row_seeds(seed, len(examples))
        rows = [RowRequest(seed=one, **scales) for one in seeds]
        padding: Padding = "full" if shared else "fit"
        done = self.engine.sample(examples, rows, how, padding=padding, callback=callback)
        return done.responses

    def texts(self, responses: Sequence[Int[np.ndarray, "_l 1"]]) -> list[str]:
        """Returns the texts of responses, up to the first end-of-text."""
        return [self.prompts.text(ids) for ids in responses]

    def preview(self, cells: Int[np.ndarray, "l g"], rows: int | None = None) -> Pixels:
        """Returns an image whose cells may still be masked: those are grey.

        While some are masked, the decoder for previews is used if there is one.

        Args:
            rows: of cells; by default the image is a square.
        """
        masked = (cells == self.settings.model.image_mask_id).any(axis=-1)
        rows = rows or math.isqrt(len(cells))
        assert self.codec is not None  # tasks that need one were refused (`prompts.refusal`)
        if not masked.any():
            return self.codec.to_pixels(cells[None], rows)[0]
        image = self.codec.to_preview(np.where(masked[:, None], 0, cells), rows)
        step = image.shape[0] // rows
        hidden = masked.reshape(rows, -1).repeat(step, axis=0).repeat(step, axis=1)
        return np.where(hidden[..., None], np.uint8(MASKED_GREY), image)


def loaded_again(kind: type[S], loading: Any, source: Origin, sampling: config.Sampling) -> S:
    """Loads a model as before, with sampling settings.

    Raises:
        CheckpointError: it is another one by now.
    """
    made = kind.from_pretrained(**loading)
    if made.source != source:
        raise model_folder.CheckpointError(f"{source.name} has changed: load it anew.")
    return made.with_sampling(sampling)
