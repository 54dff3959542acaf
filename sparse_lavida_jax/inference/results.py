# SPDX-License-Identifier: Apache-2.0
"""What a task returns."""

import dataclasses
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from sparse_lavida_jax import config
from sparse_lavida_jax.data import image_files

Box = image_files.Box
FORMAT = "sparse-lavida-picture/2"
OLDER_FORMATS = ("sparse-lavida-picture/1",)  # that are read: without turns
SHOWN_KEY = "picture"  # key of the input image in a record; must match older PNGs
# Incremented whenever the same request may draw something else; `replay` refuses other versions.
# 2: each stage with the same seed has its own, finely drawn noise; counts rounded as in PyTorch;
# confidences as log-odds; no end-of-text before anything given.
# 3: revisions choose cells by their place, not by the step that decoded them.
SAMPLER_VERSION = 3


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a model came from.

    Attributes:
        name: the folder or bundled name it was loaded from; "" for a model made in memory.
        sha256: of the manifest of its folder, which contains the digests of all its files; if it
            has adapters, of their manifests too.
        adapters: the adapters that were added and their weights, in the syntax of `--adapters`.
    """

    name: str = ""
    sha256: str = ""
    adapters: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a task returned; tuples have one entry per row, or none if they do not apply.

    Attributes:
        task: its name.
        prompts: what was asked, in the user's words.
        seeds: one per row.
        sampling: how it was sampled, except for settings of single rows.
        source: the checkpoint.
        seconds: the time of each stage, for all rows together.
        tokens: the decoded responses: text ids [l 1] or codes of cells [l g].
        pixels: images.
        texts: answers, captions, filled texts; verdicts of "reflect" and of the best of several.
        tries: how many times each image was drawn, if it is the best of several.
        boxes: for "ground", one per phrase: x1, y1, x2, y2 in pixels of the image that was shown;
            None if the model named none.
        layouts: the layouts that images were drawn from.
        attempts: for "reflect": every image with its verdict, one entry per row.
        records: how to draw each image again (`SparseLaViDa.replay`).
        prompted: text tokens and image tokens of each row's prompt, headers included; those of the
            first stage, if an image is laid out first.
        passed: tokens of each row (`costs.DEFINITION`). A text counts up to the text block in
            which it ends.
        layout_passed: those of its layouts.
        shared: of both, what branches of one image have in common: the first row of their batch
            counts it, and the others do not.
        sentences: what the model was given in place of each prompt.
        warnings: what each prompt holds that the model does not know; "" if it knows all.
    """

    task: str
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    sampling: config.Sampling
    source: Origin
    seconds: dict[str, float]
    tokens: tuple[Int[np.ndarray, "_l _g"], ...] = dataclasses.field(default=(), repr=False)
    pixels: tuple[UInt8[np.ndarray, "_h _w 3"], ...] = dataclasses.field(default=(), repr=False)
    texts: tuple[str, ...] = ()
    tries: tuple[int, ...] = ()
    boxes: tuple[Box | None, ...] = ()
    layouts: tuple[str, ...] = ()
    attempts: tuple[tuple[tuple[UInt8[np.ndarray, "_h _w 3"], str], ...], ...] = ()
    records: tuple[dict[str, Any], ...] = dataclasses.field(default=(), repr=False)
    prompted: tuple[tuple[int, int], ...] = ()
    passed: tuple[int, ...] = ()
    layout_passed: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    sentences: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def tokens_passed(self) -> int:
        """Tokens that all rows passed through the network, those of layouts included."""
        return sum(self.passed) + sum(self.layout_passed)

    @property
    def replaced(self) -> list[str]:
        """The sentences that the model was given in place of other words; "" where it was not."""
        pairs = zip(self.sentences or self.prompts, self.prompts, strict=True)
        return ["" if sentence == prompt else sentence for sentence, prompt in pairs]

    @property
    def images(self) -> tuple[Image.Image, ...]:
        """The images, for Pillow."""
        return tuple(map(Image.fromarray, self.pixels))

    @property
    def image(self) -> Image.Image:
        """The first image."""
        return self.images[0]

    @property
    def text(self) -> str:
        """The first text."""
        return self.texts[0]

    @property
    def box(self) -> Box | None:
        """The first box."""
        return self.boxes[0]

    def part(self, start: int, stop: int) -> "Result":
        """Returns the result of some rows; `seconds` are still those of all rows."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        own = {name: x[start:stop] for name, x in fields.items() if isinstance(x, tuple)}
        return dataclasses.replace(self, **own)

    def save(self, path: pathlib.Path | str, row: int = 0) -> None:
        """Writes an image; a PNG includes the record of how it was drawn.

        Raises:
            ImageError, ImageWriteError: see `image_files.write`.
        """
        image_files.write(path, self.pixels[row], self.records[row])

    def as_json(self, *, full: bool = True) -> dict[str, Any]:
        """Returns what `--json-full` prints, or without `full` what `--json` prints."""
        lean = {
            "task": self.task,
            "prompts": list(self.prompts),
            "sentences": list(self.sentences),
            "warnings": list(self.warnings),
            "seeds": list(self.seeds),
            "texts": list(self.texts),
            "tries": list(self.tries),
            "boxes": [None if box is None else list(box) for box in self.boxes],
            "layouts": list(self.layouts),
        }
        if not full:
            return lean
        return lean | {
            "seconds": self.seconds,
            "tokens": {
                "passed": list(self.passed),
                "layout": list(self.layout_passed),
                "shared": list(self.shared),
            },
            "checkpoint": dataclasses.asdict(self.source),
            "sampling": config.to_dict(self.sampling),
        }
