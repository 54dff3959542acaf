# SPDX-License-Identifier: Apache-2.0
"""The requests in each sampling suite."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.data import images
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.kernels import attention
from sparse_lavida_jax.models import fuse, text_head
from sparse_lavida_jax.sampling import plans, presets, prompts
from sparse_lavida_jax.sampling.options import PUBLISHED, SAMPLERS
from sparse_lavida_jax.sequence import Modality, Response, Source, Text

PRESETS_SUITE = "sampling"  # every preset of one model: `by_preset`
# Suites that need only the parameters for one task; the others write text, or compute its logits.
TASKS: dict[str, fuse.Task] = dict.fromkeys(("ablation", "batch", "cpu"), "image")
BATCHES = (1, 2, 4, 8)
STEPS_A_BLOCK = (4, 8, 32)  # for reasoning
FULL_CELLS = 1024  # in an image of 1024 pixels per side
STEPS_TIMED = 8  # in rows whose steps all cost the same
# Words in the prompt of an image and of a question, tokens of the answer; below, for small models.
WORDS, QUESTION, ANSWER = 128, 1500, 1024
FEW_WORDS, SHORT_QUESTION, SHORT_ANSWER = 32, 48, 16
# Changes of the fast path that step settings can undo (`_changes`).
TAKEN_BACK = {"tables_ahead": {"tables_ahead": False}, "tiled_head": {"head_tile": 0}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestCase:
    """One row: a request by one method.

    Attributes:
        id: task/method/batch, and whatever else distinguishes rows.
        discards: whether a step computes, as the released code does, the whole understanding tower
            and its head for all tokens of the pass, and discards what is not needed.
        steps_timed: steps from the middle of the plan's longest phase; 0: all steps.
        image: encoded before, in an edit.
        split_phases: see `sample.sample`.
        without: in the suite `fastpath`, which of its changes is undone (`_changes`).
        keeps_prefix: whether prefixes are kept between requests; prompts then have one length.
        varies: whether prompts have several lengths, so that no prefix is ever kept.
        of_one: whether tokens are reported for one response instead of the whole batch.
    """

    id: str
    task: str
    method: str
    example: Example
    sampling: config.Sampling
    text_block_len: int
    batch: int = 1
    discards: bool = False
    steps_timed: int = 0
    image: UInt8[np.ndarray, "h w 3"] | None = None
    split_phases: bool | None = None
    without: str = ""
    keeps_prefix: bool = False
    varies: bool = True
    of_one: bool = False

    def settings(self, model: config.Model) -> presets.StepSettings:
        """Returns the compiled-in settings of its steps."""
        has_source = self.image is not None
        made = presets.step_settings(
            self.sampling, model, self.example.modality, has_source=has_source
        )
        return dataclasses.replace(made, **TAKEN_BACK.get(self.without, {}))

    def sample_inputs(
        self, model: config.Model, seeds: Sequence[int], turn: int = 0
    ) -> list[prompts.SampleInput]:
        """Returns the inputs of a batch; other turns may have fewer words, or others.

        If prefixes are kept, they have as many, but others: only rows without words then recur.
        """
        fewer, moved = turn % 8 if self.varies else 0, turn if self.keeps_prefix else 0
        parts = tuple(
            dataclasses.replace(part, ids=np.roll(part.ids[: len(part.ids) - fewer], moved))
            if isinstance(part, Text)
            else part
            for part in self.example.parts
        )
        example = dataclasses.replace(self.example, parts=parts)
        settings, scales = self.settings(model), presets.scales(self.sampling, example.modality)
        rows = [presets.RowRequest(seed=seed, **scales) for seed in seeds]
        return [prompts.sample_input(example, row, model, settings) for row in rows]

    def plan(self, model: config.Model, seeds: Sequence[int] | None = None) -> list[plans.Steps]:
        """Returns the steps of a batch with these seeds, by default those of the first turn."""
        seeds = list(range(self.batch)) if seeds is None else seeds
        given, settings = np.stack([self.example.given] * len(seeds)), self.settings(model)
        return presets.plan(self.sampling, settings, model, given, self.text_block_len, seeds)

    def timed_plan(
        self, model: config.Model, seeds: Sequence[int] | None = None
    ) -> list[plans.Steps]:
        """Returns the steps that are timed."""
        plan = self.plan(model, seeds)
        if not self.steps_timed:
            return plan
        timed = self.timed_steps(model)
        longest = max(range(len(plan)), key=lambda number: plan[number].num_steps)
        before = sum(part.num_steps for part in plan[:longest])
        return [plan[longest][timed.start - before : timed.stop - before]]

    def timed_steps(self, model: config.Model) -> range:
        """Returns the numbers of the steps that are timed."""
        lengths = [part.num_steps for part in self.plan(model)]
        if not self.steps_timed:
            return range(sum(lengths))
        longest = lengths.index(max(lengths))
        start = sum(lengths[:longest]) + max(lengths[longest] - self.steps_timed, 0) // 2
        return range(start, start + min(self.steps_timed, lengths[longest]))

    def prompt(self, model: config.Model) -> prompts.Prompt:
        """Returns the prompts of a batch, with all guidance rows."""
        return prompts.batched(self.sample_inputs(model, range(self.batch)), model)


def cases(suite: str, settings: config.Config) -> list[RequestCase]:
    """Returns the rows of a suite for a model of this size."""
    return SUITES[suite](settings)


def chosen(found: Sequence[RequestCase], ids: Collection[str]) -> list[RequestCase]:
    """Returns the rows with these ids; none: all.

    Raises:
        ConfigError: there is no such row.
    """
    known = [case.id for case in found]
    if unknown := [row_id for row_id in ids if row_id not in known]:
        raise config.ConfigError(
            f"there is no row {unknown[0]!r}: choose one of {', '.join(known)}."
        )
    return [case for case in found if not ids or case.id in ids]


def in_turn(suite: str) -> bool:
    """Whether rows of a suite take turns: for small models, on machines under other load."""
    on_cpu = jax.default_backend() == "cpu"
    return suite in ("cpu", PRESETS_SUITE) or (suite == "fastpath" and on_cpu)


# ---------------------------------------------------------------------------------------------
# Every preset of one model.


def check_presets(names: Collection[str]) -> None:
    """Refuses names that are neither a preset nor a published sampler.

    Raises:
        ConfigError: there is no such preset.
    """
    known = SAMPLERS["text"]  # those of images too
    if unknown := [name for name in names if name not in known]:
        raise config.ConfigError(
            f"there is no preset {unknown[0]!r}: choose one of {', '.join(known)}."
        )


def by_preset(
    settings: config.Config,
    examples: Mapping[str, Example],
    text_block_len: int,
    *,
    batch: int,
    steps: int = 0,
    names: Collection[str] = (),
) -> list[RequestCase]:
    """Returns a row for each example, "draw" or "text", and each preset that applies to it.

    Args:
        steps: for an image and for a text block; 0: as in the config.
        names: presets, or for texts published samplers (`sampling/options.py`); by default all
            presets.

    Raises:
        ConfigError: there is no such preset.
    """
    check_presets(names)
    of_text = [name for name in SAMPLERS["text"] if name not in PUBLISHED or name in names]
    found = []
    for task, example in examples.items():
        draws = task == "draw"
        how = settings.sampling
        count = steps or (how.num_steps if draws else how.text.steps)
        for name in config.PRESETS if draws else of_text:
            asked = {"preset": name, "num_steps": count}
            asked = asked if draws else {"text": {"preset": name, "steps": count}}
            sampling = config.changed(how, PUBLISHED.get(name, asked))
            rows = presets.step_settings(sampling, settings.model, example.modality).guidance_rows
            case = RequestCase(
                id=f"{task}/{name}/b{batch}/k{count}/g{rows}",
                task=task,
                method=name,
                example=example,
                sampling=sampling,
                text_block_len=text_block_len,
                batch=batch,
                varies=False,
                of_one=True,
            )
            found.append(case)
    return [case for case in found if not names or case.method in names]


def random_examples(settings: config.Config) -> dict[str, Example]:
    """Returns the requests to a model of random weights, for every preset."""
    model, words = settings.model, Text(_ids(settings.model, WORDS))
    return {
        "draw": _example((words,), "image", model.num_cells, model.codes_per_token),
        "text": _example((words,), "text", settings.data.max_answer_len, 1),
    }


def _example(
    parts: tuple, modality: Modality, length: int, width: int, views: tuple = ()
) -> Example:
    """Returns a request for a response that is still empty."""
    tokens, given = np.zeros((length, width), np.int32), np.zeros(length, bool)
    return Example((*parts, Response(length)), tokens, given, modality, None, length, views)


def _ids(model: config.Model, number: int) -> np.ndarray:
    return np.arange(number, dtype=np.int32) % (min(model.text_mask_id, model.end_of_text_id) or 1)


# ---------------------------------------------------------------------------------------------
# Suites of whole requests.


def sizes(model: config.Model) -> tuple[int, int, int]:
    """Returns words in the prompts of an image and of a question, and tokens in the answer."""
    full = model.num_cells >= FULL_CELLS
    return (WORDS, QUESTION, ANSWER) if full else (FEW_WORDS, SHORT_QUESTION, SHORT_ANSWER)


def _image(
    settings: config.Config, method: str, *, batch: int = 1, edits: bool = False, **options
) -> RequestCase:
    """Returns a request for an image."""
    model, dense = settings.model, method.startswith("dense")
    words = Text(_ids(model, sizes(model)[0]))
    length, width = model.num_cells, model.codes_per_token
    pixels = model.grid_size * model.codes_side * settings.vq.factor
    parts, views, image = (words,), (), None
    if edits:
        rng = np.random.default_rng(0)
        image = rng.integers(0, 256, (pixels, pixels, 3), dtype=np.uint8)
        seen = images.see(image, model.vision)
        codes = rng.integers(0, model.codebook_size, (length, width)).astype(np.int32)
        parts, views = (seen.part, Source(codes), words), (seen.pixels,)
    task = f"{'edit' if edits else 't2i'}{pixels}"
    # Dense is LaViDa-O itself, on the grid of codes: every step passes the cells, without padding.
    how = {"preset": "dense", "grid": "code"} if dense else {"preset": method, "grid": "cell"}
    constant = (dense or method == "none") and settings.sampling.num_steps > STEPS_TIMED
    return RequestCase(
        id=f"{task}/{method}/b{batch}",
        task=task,
        method=method,
        example=_example(parts, "image", length, width, views),
        sampling=dataclasses.replace(settings.sampling, **how),
        text_block_len=settings.data.text_block_len,
        batch=batch,
        discards=method.endswith("_released"),
        steps_timed=STEPS_TIMED if constant else 0,
        image=image,
        **options,
    )


def _text(settings: config.Config, method: str, steps: int) -> RequestCase:
    """Returns a request for an answer with this number of steps per block."""
    _, question, answer = sizes(settings.model)
    name = method.removesuffix("_lean").removesuffix("_released")
    preset = "prefix" if name == "dense_cached" else name
    how = {"preset": preset, "steps": steps, "step_ratio": 0.0, "commit": "count"}
    total = steps * answer // settings.data.text_block_len
    constant = name == "dense_cached" and total > STEPS_TIMED
    return RequestCase(
        id=f"reasoning/{method}/b1/k{steps}",
        task="reasoning",
        method=method,
        example=_example((Text(_ids(settings.model, question)),), "text", answer, 1),
        sampling=config.changed(settings.sampling, {"text": how}),
        text_block_len=settings.data.text_block_len,
        discards=method.endswith("_released"),
        steps_timed=min(STEPS_TIMED, steps) if constant else 0,
    )


def _images(
    settings: config.Config,
    methods: Sequence[str] = ("sparse", "dense_lean", "dense_released"),
    batches: Sequence[int] = (1,),
    **options,
) -> list[RequestCase]:
    return [_image(settings, method, batch=b, **options) for b in batches for method in methods]


def _reasoning(settings: config.Config) -> list[RequestCase]:
    # Sparse; only the prompt cached; both forms of Fast-dLLM.
    methods = ("sparse", "dense_cached", "fast_dllm_dual_released", "fast_dllm_dual_lean")
    steps = [k for k in STEPS_A_BLOCK if k <= settings.data.text_block_len]
    return [_text(settings, method, k) for k in steps for method in methods]


def _both(settings: config.Config) -> list[RequestCase]:
    """Returns a sparse image and a sparse answer."""
    steps = min(8, settings.data.text_block_len)
    return [_image(settings, "sparse"), _text(settings, "sparse", steps)]


def _named(case: RequestCase, method: str, **changes) -> RequestCase:
    """Returns a modified sparse request under another name."""
    name = case.id.replace("/sparse/", f"/{method}/")
    return dataclasses.replace(case, id=name, method=method, **changes)


def quantized(case: RequestCase, method: str) -> RequestCase:
    """Returns a sparse request with matrices in 8 bits, or as they are if `method` is empty."""
    sampling = dataclasses.replace(case.sampling, quantize=method)
    return _named(case, method or "sparse", sampling=sampling)


def _quantized(settings: config.Config) -> list[RequestCase]:
    methods = ("", *config.QUANTIZED)
    return [quantized(case, method) for case in _both(settings) for method in methods]


def _fast_path(settings: config.Config) -> list[RequestCase]:
    """Returns the whole fast path, and a row for each of its changes when undone."""
    return [
        _named(
            case,
            f"without_{name}" if name else "full",
            without=name,
            split_phases=False if name == "trips" else None,
            keeps_prefix=name != "prefix",
            varies=False,
        )
        for case in _both(settings)
        for name in ("", *_changes(settings.model, case.example.modality))
    ]


def _changes(model: config.Model, modality: str) -> list[str]:
    """Returns the changes that make a request fast on this device, each to be undone in a row.

    fused: one matrix for queries, keys and values; by_layer: separate arrays for every layer;
    trips: phases in programs of `calls.STEPS` steps; tables_ahead: tables of attention made
    before the loop; prefix: kept between requests; vq_dtype: used by the decoder, otherwise
    float32; tiled_head: no logits over the vocabulary.
    """
    if modality == "text":
        return ["fused"] + ["tiled_head"] * bool(text_head.tile_of(model.vocab_size))
    backend, implementation = jax.default_backend(), model.attention_implementation or None
    absent = {
        "by_layer": backend != "gpu",
        "trips": backend == "cpu",
        "tables_ahead": not attention.takes_tables(implementation),
    }
    names = ("fused", "by_layer", "trips", "tables_ahead", "prefix", "vq_dtype")
    return [name for name in names if not absent.get(name)]


_TWO = ("sparse", "dense_lean")
_NOT_DENSE = [name for name in config.PRESETS if name != "dense"]
SUITES: dict[str, Callable[[config.Config], list[RequestCase]]] = {
    "headline": _images,
    # Phases run whole: half as many programs as in trips, and eight rows compile their own.
    "ablation": functools.partial(_images, methods=_NOT_DENSE, split_phases=False),
    "batch": functools.partial(_images, methods=_TWO, batches=BATCHES),
    "edit": functools.partial(_images, edits=True),
    "reasoning": _reasoning,
    "quant": _quantized,
    "fastpath": _fast_path,
    "cpu": functools.partial(_images, methods=_TWO),
}
