# SPDX-License-Identifier: Apache-2.0
"""Checks a model on this device with a few requests, and writes a report for an issue.

Nobody of this project has run the released weights of LaViDa-O. So what is expected holds for every
model that is converted and computed correctly (ids in range, the same bits from two samplers), or
is easy for a trained one (colours, a number). The bars are ours, and wide.
"""

import dataclasses
import pathlib
import platform
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from sparse_lavida_jax import __version__, pipeline
from sparse_lavida_jax.checkpoints import manifest, model_folder, named_arrays
from sparse_lavida_jax.cli.terminal import progress, say, unsaid
from sparse_lavida_jax.convert import from_torch
from sparse_lavida_jax.convert.settings import settings_from
from sparse_lavida_jax.data import files, markdown
from sparse_lavida_jax.data.image_files import Pixels
from sparse_lavida_jax.models import parameters
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.sequence import prompt_row
from sparse_lavida_jax.tags import GIVEN_BLOCK, PROMPT_BLOCK, Stream, make_tags

PROMPT, CHANGE = "a red circle above a blue square", "make the red circle green"
QUESTION, ANSWERS = "how many squares are there?", {"1", "one"}
SENTENCE = " a red circle is above a blue square so a blue square is below a red circle"
HIDDEN = 4  # every fourth token of the sentence, in four turns
STEPS = 8  # of the images of two samplers
# A pixel has a colour if its channel is so many levels above the others; how far one colour is
# above another on average, of the height of the image (noise: 0); and how far an image may change,
# on average of 255 levels, when it is encoded and decoded.
LEAD, LEAST_ABOVE, MOST_CHANGE = 64, 0.1, 16.0


class Check(NamedTuple):
    """What was checked, what is expected and what came; `passed` is None if there is no bar."""

    check: str
    expected: str
    found: str
    passed: bool | None


def run(name: str) -> int:
    """Prints the report; returns 0 if all checks passed, otherwise 1."""
    text, passed = report(name)
    say("to report it, paste this into an issue of the repository of this project:")
    print(text)
    return 0 if passed else 1


@unsaid(pipeline.__name__)  # two samplers, whatever it learned
def report(name: str) -> tuple[str, bool]:
    """Returns a text for an issue, without names of folders, and whether all checks passed.

    Raises:
        CheckpointError: there is no such model, or a file or tensor is not as it was written.
        RoomError: the model is larger than the device.
        RequestError: the model does not draw, edit, answer or fill in.
    """
    folder = model_folder.find_model(name)
    found = [_settings(folder)]
    with progress("loading the model, with all digests") as update:
        pipe = SparseLaViDa.from_pretrained(folder, batch_size=1)
        for check in checks(pipe):
            found.append(check)
            update(len(found), len(found) + 1, f"checked: {check.check}")
    judged = [check.passed for check in found if check.passed is not None]
    shapes = parameters.by_name(model_folder.shapes(pipe.settings, ""))
    verdicts = {True: "yes", False: "NO", None: "no bar"}
    lines = [
        f"sparse-lavida selfcheck: {sum(judged)} of {len(judged)} checks passed",
        f"sparse-lavida-jax {__version__}, jax {jax.__version__}, Python"
        f" {platform.python_version()}, {platform.system()}, {jax.devices()[0].device_kind}",
        f"{sum(leaf.size for leaf in shapes.values()):,} parameters, computed in"
        f" {pipe.settings.model.compute_dtype}; {len(manifest.read(folder))} files as written",
        *(
            f"{file} {files.sha256(folder / file)}"
            for file in (manifest.MANIFEST, named_arrays.TENSORS)
        ),
        "",
        markdown.table(
            (*Check._fields[:3], "passed"),
            ((*check[:3], verdicts[check.passed]) for check in found),
        ),
    ]
    return "\n".join(lines), all(judged)


def checks(pipe: SparseLaViDa) -> Iterator[Check]:
    """Yields what came of each request: an image, its edit, a question, a sentence, samplers."""
    model, drawn = pipe.settings.model, pipe.generate(PROMPT, seed=0)
    edited = pipe.edit(drawn, CHANGE, seed=0)
    for check, result, upper in (("draw", drawn, "red"), ("edit", edited, "green")):
        codes, most = result.tokens[0], model.codebook_size - 1
        within = bool(0 <= codes.min() <= codes.max() <= most)  # a mask is above them
        yield Check(f"{check}: codes", f"0 to {most}", f"{codes.min()} to {codes.max()}", within)
        above = _height(result.pixels[0], "blue") - _height(result.pixels[0], upper)
        expected = f"{LEAST_ABOVE:.0%} of the height, or more"
        yield Check(f"{check}: {upper} above blue", expected, f"{above:.0%}", above >= LEAST_ABOVE)
    answer = pipe.ask(edited, QUESTION, seed=0)
    ids = answer.tokens[0]
    known = bool(ids.min() >= 0 and ids.max() < model.vocab_size and model.text_mask_id not in ids)
    yield Check("ask: ids", f"below {model.vocab_size}, no mask", f"up to {ids.max()}", known)
    said = answer.text.lower().replace(".", " ").split()
    right = bool(ANSWERS & {*said})
    yield Check(
        "ask: answer",
        " or ".join(sorted(ANSWERS)),
        answer.text[:80].replace("|", "/") or "nothing",
        right,
    )
    found, most = perplexity(pipe), model.vocab_size**0.5
    yield Check("infill: perplexity", f"{most:.0f} or less", f"{found:.2f}", found <= most)
    if pipe.codec is not None:
        again = pipe.codec.to_pixels(pipe.codec.encode(drawn.pixels[0][None]))[0]
        off = float(np.abs(again.astype(int) - drawn.pixels[0]).mean())
        expected = f"{MOST_CHANGE:g} of 255 or less"
        yield Check("image tokenizer: change", expected, f"{off:.2f}", off <= MOST_CHANGE)
    # With caches and without; "none" would also see other masks, which is another distribution.
    first, second = (
        pipe.generate(PROMPT, seed=0, steps=STEPS, sampler=name, layout=False).tokens[0]
        for name in ("t", "sparse")
    )
    same = float((first == second).mean())
    # Elsewhere sums are rounded in another order, and one other code changes all later ones.
    is_exact = jax.default_backend() == "cpu" and model.compute_dtype == "float32"
    expected = "100% of the codes" if is_exact else "most codes, in exact arithmetic all"
    yield Check("t and sparse: same", expected, f"{same:.1%}", same == 1 if is_exact else None)


def perplexity(pipe: SparseLaViDa) -> float:
    """Returns the perplexity of the hidden tokens of `SENTENCE`, in the prompt of `infill`."""
    model, prompts = pipe.settings.model, pipe.prompts
    example = prompts.complete(prompts.fill_in, (SENTENCE, 1), ())
    how: Any = {"text_mask_id": model.text_mask_id, "codes_per_token": model.codes_per_token}
    row, ids, given = prompt_row(example.parts, **how), example.response[:, 0], example.given
    turns, place = np.arange(HIDDEN)[:, None], np.arange(len(ids))
    hidden = given & (place % HIDDEN == turns)
    masked = hidden | ~given

    def joined(before: np.ndarray, after: np.ndarray) -> np.ndarray:
        rows = np.broadcast_to(after, (HIDDEN, len(ids)))
        return np.concatenate([np.tile(before, (HIDDEN, 1)), rows], 1).astype(np.int32)

    blocks = np.where(masked, GIVEN_BLOCK + 1, GIVEN_BLOCK) * (model.trained_attention != "full")
    tags = make_tags(
        joined(row.position, row.response_position + place),
        joined(np.full_like(row.ids, PROMPT_BLOCK), blocks),
        GIVEN_BLOCK,
    )
    tokens = joined(row.ids, np.where(masked, model.text_mask_id, ids))
    stream = Stream(tokens, joined(row.feature, np.full_like(ids, -1)), tags)

    @jax.jit
    def logs(model, stream):
        states, _ = model(stream, None, wanted="understanding")
        logits = model.text_logits(states["understanding"][:, len(row.ids) :])
        return jax.nn.log_softmax(logits)

    found = np.asarray(logs(pipe.model, stream))
    return float(np.exp(-found[turns, place, ids][hidden].mean()))


def _settings(folder: pathlib.Path) -> Check:
    """Compares the settings of a converted model with those of the release that it came from."""
    ours, official = model_folder.read_config(folder).model, folder / from_torch.OFFICIAL
    if not (official / "config.json").is_file():
        return Check("settings", "none: not converted", f"{ours.num_layers} layers", None)
    paths = official / "config.json", official / "vqvae" / "config.json"
    theirs = settings_from(*map(files.read_json, paths)).model
    # What fine-tuning may change.
    learned = {name: getattr(ours, name) for name in ("trained_attention", "num_registers")}
    is_same = dataclasses.replace(theirs, **learned) == ours
    found = "the same" if is_same else "others"
    return Check("settings", "those of official/config.json", found, is_same)


def _height(image: Pixels, name: str) -> float:
    """Returns where the pixels of a colour are on average, from 0, the top, to 1; NaN: nowhere."""
    channel = ("red", "green", "blue").index(name)
    others = np.delete(image, channel, axis=-1).max(-1).astype(int)
    rows = np.nonzero(image[..., channel] >= others + LEAD)[0]
    return float(rows.mean() / len(image)) if len(rows) else float("nan")
