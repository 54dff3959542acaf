# SPDX-License-Identifier: Apache-2.0
"""The settings of every experiment: names, defaults, units and ranges are defined only here.

`configs/*.py` return an `ml_collections.ConfigDict` that may set only the names defined here;
`read` turns it into these frozen dataclasses. The annotation of a setting says what it may be:
choices as a `Literal`, ranges as an `Allowed`. Constraints between several settings are in
`_rules` of their section. Both are checked whenever a section is made (`schema.py`).
"""

import dataclasses
import math
import pathlib
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from sparse_lavida_jax import schema
from sparse_lavida_jax.schema import (
    BelowOne,
    Blocks,
    Count,
    CountOrAuto,
    Groups,
    Identifier,
    Interval,
    Mesh,
    NonNegative,
    Patch,
    Pattern,
    Place,
    Positive,
    PositiveFloat,
    PositiveShare,
    Scale,
    Section,
    Share,
    Size,
    Sizes,
    UpTo1024,
    Weights,
    at_least,
)
from sparse_lavida_jax.schema import ConfigError as ConfigError
from sparse_lavida_jax.schema import build as build
from sparse_lavida_jax.schema import changed as changed
from sparse_lavida_jax.schema import changes as changes
from sparse_lavida_jax.schema import to_dict as to_dict

# LaViDa-O's own sampler and the rows of the paper's ablation, for images and for text.
Preset = Literal["dense", "none", "p", "r", "t", "pr", "pt", "rt", "sparse"]
# Full attention with an inexact cache, for text only: LaViDa-O's own (it caches the prompt) and
# the two of Fast-dLLM.
TextPreset = Literal["prefix", "fast_dllm_prefix", "fast_dllm_dual"]
Dtype = Literal["float32", "bfloat16"]
Quantized = Literal["int8", "w8a8", "fp8"]  # matrices of the layers, while sampling
Schedule = Literal["shift", "cosine", "cosine2", "exp", "logit_normal", "linear"]
Decay = Literal["constant", "linear", "cosine2", "shift", "exp"]  # of a scale over the steps

PRESETS, TEXT_PRESETS = typing.get_args(Preset), typing.get_args(TextPreset)
VQ_DTYPES, QUANTIZED = typing.get_args(Dtype), typing.get_args(Quantized)


class Vision(Section):
    """The vision tower of the understanding branch: patches, transformer, pool, projector."""

    image_size: Size = 96  # pixels per side
    patch_size: Patch = 8  # pixels per side
    width: Size = 64
    num_layers: UpTo1024 = 2
    num_heads: Size = 4
    mlp_hidden: Size = 128
    pool: Patch = 2  # patches per side that one convolution merges into one token
    # A learned vector after every row of tiles, and after an image seen as a whole (spec Sec. 4).
    newline: bool = False
    # Sizes (width, height) in pixels of the grids of tiles into which an image may be cut (spec
    # Sec. 4, "anyres"); none: images are seen as a whole, resized to a square.
    grid_sizes: tuple[tuple[int, int], ...] = ()
    # Released files contain an unused norm after the tower: kept, so that an export is complete.
    unused_post_norm: bool = False

    def _rules(self):
        sides = [side for size in self.grid_sizes for side in size]
        whole = all(side > 0 and side % self.image_size == 0 for side in sides)
        yield "grid_sizes", whole, f"sides are multiples of {self.image_size=}"
        yield "width", self.width % self.num_heads == 0, f"a multiple of {self.num_heads=}"

    @property
    def num_tokens(self) -> int:
        """The number of vision tokens for an image."""
        return self.grid_side**2

    @property
    def grid_side(self) -> int:
        """Vision tokens along one side of an image."""
        return self.image_size // self.patch_size // self.pool


class Model(Section):
    """The two-branch denoiser (paper Sec. 3; the base model's "Elastic-MoT")."""

    # Text. The ids are those of the tokenizer stored with the parameters.
    vocab_size: Size = 512
    end_of_text_id: int = 0  # also pads text
    text_mask_id: int = 1
    # Understanding branch, and the attention that both branches share.
    width: Size = 128
    mlp_hidden: Size = 384
    num_layers: UpTo1024 = 5
    dual_tower_layers: int = 3  # index of the last joint layer, counted as in the release
    num_heads: Size = 4
    head_dim: Size = 32
    rope_theta: PositiveFloat = 500_000.0
    norm_eps: NonNegative = 1e-5
    # Generation branch.
    generation_width: Size = 96
    generation_mlp_hidden: Size = 256
    codebook_size: Size = 64
    codes_per_token: Literal[1, 4] = 1  # g: 4 compresses 2x2 codes into one backbone token
    grid_size: Size = 6  # cells per side of the largest image
    # Layers between codes and backbone tokens (the release: "dit2"; spec Sec. 2.5): "embed", a
    # table and a matrix; "dit", norms and matrices between; "dit2", one more before the logits.
    image_head: Literal["embed", "dit", "dit2"] = "dit2"
    image_table_rows: Count = 0  # of the table of codes; 0: up to the mask id (the release: 8448)
    # The codes of a cell are drawn one after another, each given those before it. Ours: the release
    # draws them independently, so that they cannot agree on what the prompt leaves open.
    sequential_codes: bool = False
    understanding_only: bool = False  # LLaDA: no generation branch, no vision tower
    # Ours, off in the release; small models take too long to learn it otherwise: learned
    # embeddings of the row and column of a cell, and of what the vision tower sees there.
    cell_positions: bool = False
    # Likewise: heads of the first layer that start by attending to the word at this offset after
    # (negative: before) each word, one head per number (`models/neighbours.py`).
    neighbour_heads: tuple[int, ...] = ()
    num_registers: UpTo1024 = 64  # Sec. 3.1
    # A code that all cells of an image share: for each of so many parts of the image so many groups
    # with one of so many values; registers carry it (`models/style_code.py`). Ours; 0 parts: none.
    style_parts: UpTo1024 = 0
    style_groups: UpTo1024 = 8
    style_values: UpTo1024 = 2
    vision: Vision = dataclasses.field(default_factory=Vision)
    trained_attention: Literal["full", "step_causal"] = "step_causal"  # "full": without the mask
    compute_dtype: Dtype = "float32"
    # Dtype of the residual stream, the last norm and the image head; "compute": `compute_dtype`.
    # With products in bfloat16, "float32" lowers the error of image logits (docs/speed.md). It is
    # for sampling: in training it would double the memory for the inputs of the layers.
    residual_dtype: Literal["compute", "float32"] = "compute"
    unroll_layers: bool = False  # a few small ones run twice as fast on a CPU; many compile long
    # What training recomputes of a layer in the backward pass: nothing; all but its input and the
    # output of the attention kernel; all but its input.
    remat: Literal["none", "attention", "layer"] = "none"
    # Dtype in which gradients of matrices in the layers, in adapters and around the codes are
    # summed over tokens and devices; "compute": `compute_dtype`, which halves the bytes exchanged,
    # with an error that grows with the devices. Weights of norms are always summed in
    # `compute_dtype`; tables, the loss's share of the heads and the vision tower in float32.
    grad_reduce_dtype: Literal["float32", "compute"] = "float32"
    # "": the fastest on the platform. The last three are interpreted on other platforms.
    attention_implementation: Literal[
        "", "reference", "blockwise", "pallas_tpu", "pallas_gpu", "pallas_triton"
    ] = ""
    # What a decoding step computes between its products: by the compiler, or by `kernels.step_gpu`.
    # "": the fastest on the platform.
    step_implementation: Literal["", "plain", "pallas_gpu"] = ""

    def _rules(self):
        last, most = self.num_layers - 1, self.width
        is_joint = 0 <= self.dual_tower_layers <= last
        yield "dual_tower_layers", is_joint, f"the last joint layer is one of 0..{last}"
        yield "head_dim", self.head_dim % 2 == 0, "rotary embeddings need an even number"
        filled = self.num_registers > 0 and self.style_groups > 0 and self.style_values > 1
        carried = self.style_parts == 0 or filled
        yield "style_parts", carried, "0, or with registers, groups, and values above 1"
        held = not self.style_parts or max(self.parts_down_and_across) <= self.grid_size
        yield "style_parts", held, f"rows and columns of them fit into {self.grid_size=}"
        several = not self.sequential_codes or self.codes_per_token > 1
        yield "sequential_codes", several, f"False where {self.codes_per_token=}"
        few = len(self.neighbour_heads) <= self.num_heads
        yield "neighbour_heads", few, f"no more numbers than {self.num_heads=}"
        enough = self.image_table_rows == 0 or self.image_table_rows > self.image_mask_id
        yield "image_table_rows", enough, f"0, or more than {self.image_mask_id=}"
        shared = f"it may not exceed {self.width=}, whose attn_out it shares"
        yield "generation_width", self.generation_width <= most, shared
        for name in ("end_of_text_id", "text_mask_id"):
            yield name, 0 <= getattr(self, name) < self.vocab_size, f"below {self.vocab_size=}"

    @property
    def parts_down_and_across(self) -> tuple[int, int]:
        """How many parts of a style code an image has, as square as their number allows."""
        parts = self.style_parts
        down = max(n for n in range(1, math.isqrt(parts) + 1) if parts % n == 0)
        return down, parts // down

    @property
    def num_joint_layers(self) -> int:
        return self.dual_tower_layers + 1

    @property
    def num_split_layers(self) -> int:
        return self.num_layers - self.num_joint_layers

    @property
    def text_register_id(self) -> int:
        """Represents a register in the understanding stream; not in the vocabulary."""
        return self.vocab_size

    @property
    def image_mask_id(self) -> int:
        """Codebook size + 1, as released (8193; 8192 is never used)."""
        return self.codebook_size + 1

    @property
    def image_register_id(self) -> int:
        """Represents a register in the generation stream; it has no row in the table."""
        return self.codebook_size + 2

    @property
    def num_cells(self) -> int:
        """The number of backbone tokens of the largest image."""
        return self.grid_size**2

    @property
    def codes_side(self) -> int:
        """Codes along one side of a cell."""
        return 2 if self.codes_per_token == 4 else 1


class VQ(Section):
    """The image tokenizer: convolutional encoder, codebook, decoder (spec Sec. 3)."""

    # "cells", ours: four codes for a cell of art, and a painter of `layers_per_block` layers of
    # `latent_channels` (`art.cells`); of all below, only those and the sizes of images and codebook
    # are used.
    kind: Literal["convolutions", "cells"] = "convolutions"
    image_size: Size = 96  # pixels per side
    channels: Sizes = (16, 16, 32, 48, 64)  # one entry per resolution
    layers_per_block: Blocks = 1  # residual layers of the encoder; the decoder has one more
    mid_attention: bool = False
    latent_channels: Size = 16
    codebook_size: Size = 64
    norm_groups: Size = 8
    # Positions that share the statistics of a norm. "group", as released: the whole image. "pixel",
    # ours: each position alone, so that the contents of one cell cannot change the code of another.
    norm: Literal["group", "pixel"] = "group"
    # Ours: the encoder sees each cell alone, so that its code does not depend on its surroundings.
    cells_alone: bool = False
    # How the decoder doubles its sides. "nearest", as released, then a 3x3 convolution: it turns a
    # field of equal codes into a field of equal pixels. "shuffle", ours: the four outputs of a 1x1
    # convolution side by side, so that one code can represent a whole object.
    upsampling: Literal["nearest", "shuffle"] = "nearest"
    # Where the codebook starts (ours). "farthest": at targets far from each other, which covers
    # rare contents exactly; "means": at their means, if there are far more contents than codes.
    codebook_start: Literal["farthest", "means"] = "farthest"
    commitment: NonNegative = 0.25  # weight of the commitment loss

    def _rules(self):
        fit = len(self.channels) > 0 and all(c % self.norm_groups == 0 for c in self.channels)
        yield "channels", fit, f"multiples of {self.norm_groups=}"
        layers = len(self.channels) * self.layers_per_block
        yield "layers_per_block", layers <= 24, "at most 24 residual layers in the encoder"
        fits = self.image_size % self.factor == 0
        yield "image_size", fits, f"a multiple of the downsampling factor {self.factor}"

    @property
    def factor(self) -> int:
        """Pixels per side for one code."""
        if self.kind == "cells":
            return 4  # 2x2 codes for 8x8 pixels
        return 2 ** (len(self.channels) - 1)


class Lesson(Section):
    """The tasks of one part of a run, which begins where the lesson before it ends."""

    until: Positive  # the batch after its last one
    tasks: Weights


class Data(Section):
    """Where examples come from, and in which proportions."""

    # "prepared": the records in `folder` (docs/data.md), with the tokenizers of `train.init_from`
    # or of `folder` (docs/own_images.md). "none": a model that is not trained here.
    source: Literal["scenes", "art", "prepared", "none"] = "scenes"
    # Of source "prepared": written by `--mode=prepare`; for `train.stage="preview"`, of images.
    folder: Place = "prepared"
    # Of source "art": the folder of a sheet that `art.sheet` wrote, "" for the bundled one; and how
    # many of its things, spread over it, are taught; 0: all.
    sheet: Place = ""
    things: Count = 0
    # Weight of each task; a batch holds tasks of one shape group.
    tasks: Weights = dataclasses.field(default_factory=lambda: {"draw": 1.0})
    lessons: dict[str, Lesson] = dataclasses.field(default_factory=dict)  # taught before `tasks`
    # The image tokenizer: its folder, that of a model, or the name of a bundled model.
    image_codec: Place = "scenes"
    text_block_len: Size = 8  # S: tokens decoded together in a text answer
    max_prompt_len: Size = 96  # understanding tokens of the longest prompt, vision included
    max_answer_len: Size = 40  # text response tokens, a multiple of text_block_len
    # Registers of a text row are placed after a random length up to this; 0: after its response.
    sampled_answer_len: Count = 0
    layout_drop: Share = 0.1  # fraction of image rows without their layout
    prompt_drop: Share = 0.1  # share of rows whose prompt is masked, for guidance
    source_drop: Share = 0.1  # share of edit rows whose source cells are masked
    given: Share = 0.2  # share of rows that show a random part of the response as given
    # Share of edits with a layout in which all cells that it does not name are given; above 0,
    # sampling gives them too.
    edit_keeps: Share = 0.0
    blind: bool = False  # replaces seen images by empty scenes: what can be learned without looking
    # Processes that make batches; 0: one thread; -1: one thread on a CPU, else most of the cores.
    workers: CountOrAuto = -1
    packing: Positive = 1  # examples that share a row; each is a segment that sees only itself
    # Batches of scenes that are padded to one shape, each a program. "lesson": those of a group
    # in a lesson; "run": all whose rows have the same streams; "": "lesson" on a CPU, else "run".
    shapes: Literal["", "lesson", "run"] = ""
    length_buckets: Positive = 1  # static lengths of the batches of a group, a program each
    max_sequence_len: Size = 8192  # tokens of an example, with images
    # From here on, of prepared records.
    micro_condition: bool = True  # prompts state sizes and measures of images (spec Sec. 5.4)
    # Loss weight of the codes inside the boxes of an edit (the mean over the masked codes of an
    # image is 1): 1 as released, 5 where the release turns it on (spec Sec. 9.3).
    edit_area_weight: Annotated[float, at_least(1)] = 1.0
    held_out: Share = 0.0  # of a group of 100 or more, kept out of training for the report's loss
    kinds: tuple[str, ...] = ()  # of records that a model from scratch learned; (): a LaViDa-O

    def _rules(self):
        whole = self.max_answer_len % self.text_block_len == 0
        yield "max_answer_len", whole, f"a multiple of {self.text_block_len=}"
        some = "0 for all things of the sheet, or at least 8 of them (the bundled one has 120)"
        most = self.things if self.sheet else 120
        yield "things", self.things in (0, *range(8, most + 1)), some
        yield "things", not self.things or self.source == "art", 'source="art"'
        yield "sheet", not self.sheet or self.source == "art", 'source="art"'
        ends = [lesson.until for lesson in self.lessons.values()]
        yield "lessons", len({*ends}) == len(ends), "lessons that end at different batches"


class Prepare(Section):
    """From tables and images to shards of records (`--mode=prepare`; docs/data.md)."""

    shard_rows: Positive = 512  # rows of a table per shard
    max_bad_fraction: Share = 0.001  # bad rows per dataset; with more, preparation stops
    crops: Positive = 1  # random crops of an image to draw; training uses one at a time
    encode_batch: Positive = 8  # images that the image tokenizer encodes at once
    engine: Literal["processes", "ray"] = "processes"  # on this machine, or on a cluster
    workers: Count = 0  # processes or Ray actors, each with an image tokenizer; 0: this process


class Diffusion(Section):
    """Time, corruption and blocks (paper Sec. 3.3; design of the loss in `diffusion.py`)."""

    # "full": every token in block 0, no registers (LaViDa-O). "truncated": the tokens and registers
    # of one step-causal masked block, but all see each other (a row of the paper's ablation).
    attention: Literal["step_causal", "full", "truncated"] = "step_causal"
    # "uniform": as the paper says. "plan": every step of a sampler's plan in one row.
    blocks: Literal["schedule", "uniform", "plan"] = "schedule"
    num_clean_blocks: Positive = 3  # M for `uniform`
    num_masked_blocks: Blocks = 4  # N for `uniform`, and for an image in `schedule`
    # N for a text in `schedule`: steps drawn per row, each with its own masked block, which sees
    # the tokens decoded before it; equal steps count once. `plan` uses all if there are at most N.
    text_masked_blocks: Blocks = 1
    # Numbers of steps to draw a sampler's plan from: for an image, for a text block.
    plan_steps: Sizes = (8, 12, 18)
    plan_text_steps: Sizes = (2, 4, 8)
    # In half of the rows with `schedule`, and in all with `plan`, steps of an image are merged into
    # masked blocks of at least this many cells; -1: as many as there are registers.
    merge_cells: CountOrAuto = -1
    # Share of the images with a layout whose plan is that of `Sampling.order="layout"`.
    layout_first: Share = 0.0
    # Share of an image's masked blocks in whose cells some codes, 1 to g - 1, are known. A model
    # needs this for `Sampling.cell_passes` above 1, and then 0.5.
    partial_cells: Share = 0.0
    weighting: Literal["1/t", "mean"] = "1/t"  # "mean": as in the released code
    time_policy: Literal["uniform", "cosine", "logit_normal", "mode"] = "uniform"
    # "blocks": a response is masked token by token and cut into blocks, as described above.
    # "released": LaViDa-O's own objective (spec Sec. 9.2, 9.3): text answer and image of a
    # sequence are masked together, images code by code, each loss the mean over the masked tokens;
    # needs attention "full" and weighting "mean"; `blocks` and `Data.given` have no effect.
    corruption: Literal["blocks", "released"] = "blocks"
    complementary: bool = False  # with "released": repeats each row with inverse masks; theirs: off
    text_loss: bool = True  # with "released": False: images alone, as it does at 256 px

    def _rules(self):
        if self.corruption == "released":
            needs = 'corruption "released" needs '
            yield "attention", self.attention == "full", f'{needs}"full"'
            yield "weighting", self.weighting == "mean", f'{needs}"mean"'
            by_code = 'corruption "released" masks code by code anyway: it must be 0'
            yield "partial_cells", self.partial_cells == 0, by_code
        else:
            only = 'it needs corruption "released"'
            yield "complementary", not self.complementary, only
            yield "text_loss", self.text_loss, only
        whole_plan = self.attention, self.blocks, self.merge_cells
        yield (
            "layout_first",
            not self.layout_first or whole_plan == ("step_causal", "plan", 0),
            '0, or attention="step_causal", blocks="plan" and merge_cells=0: rows that take every'
            " step of a plan",
        )
        is_one = (self.num_masked_blocks, self.text_masked_blocks, self.blocks)
        yield (
            "attention",
            self.attention != "truncated" or is_one == (1, 1, "schedule"),
            'with "truncated", masked blocks would see each other: it needs num_masked_blocks=1,'
            ' text_masked_blocks=1 and blocks="schedule"',
        )


class Optimizer(Section):
    """AdamW with warm-up and cosine decay (paper Table 9 for the release's values)."""

    # "muon" (ours, for small models from scratch): Muon for matrices, Adam for everything else.
    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: PositiveFloat = 2e-5
    final_fraction: Share = 0.05  # of learning_rate, reached at the last step
    warmup_steps: Count = 100
    b1: Share = 0.99  # the released scripts: 0.9
    b2: Share = 0.999
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegative = 0.0
    clip_norm: PositiveFloat = 1.0  # global norm of the gradient
    # Steps after which the draws of a style code are hard, and count (`training/style.py`).
    style_warmup_steps: Count = 0
    # Weight of what the average of the parameters teaches: to decode in one step of an image's plan
    # what it decodes in two (`training/distil.py`); 0: nothing.
    distil: NonNegative = 0.0
    ema: BelowOne = 0.0  # decay of the parameter average per step; 0: no average is kept
    # Dtype of both moments of Adam; "bfloat16" halves them, with stochastic rounding.
    moments_dtype: Dtype = "float32"
    # Parameters with their own learning rate: (regular expression, rate). The first expression
    # found in the path of a parameter, such as `vision/tower/layers/q/kernel`, applies. A rate of 0
    # freezes: no gradient or moments are kept. The release: ((r"^vision/tower/", 2e-6),).
    groups: Groups = ()
    # Dtype of what is not trained; "bfloat16" halves it, "int8" halves the matrices of the layers
    # again (`models/quantize.py`; only with adapters), and keeps the rest in bfloat16.
    frozen_dtype: Literal["float32", "bfloat16", "int8"] = "float32"

    def _rules(self):
        is_kept = self.kind == "adamw" or self.moments_dtype == "float32"
        yield "moments_dtype", is_kept, 'kind "muon" keeps float32'


class Lora(Section):
    """Low-rank adapters (arXiv:2106.09685): all else is frozen, except for `also` and groups."""

    rank: Count = 0  # 0: no adapters
    alpha: PositiveFloat = 32.0  # an adapter adds (alpha / rank) (x A) B
    # Regular expression for the paths of the matrices that get an adapter, such as
    # `joint_layers/generation/q`; the default: all matrices inside the layers of both branches.
    targets: Pattern = "^(joint|split)_layers/"
    # Likewise, for parameters that are trained in full: the base model has no usable registers.
    also: Pattern = "^register_"


class Train(Section):
    """Length of a run and what it leaves on disk."""

    # What is trained; "preview": a small decoder for previews of `data.image_codec`.
    stage: Literal["denoiser", "vq", "preview"] = "denoiser"
    train_steps: Positive = 1000
    batch_size: Positive = 16  # examples; as many rows, unless `data.packing` is above 1
    # Parts of a batch, processed in turn; same gradient as the whole. 0: one, on a CPU several.
    microbatches: Count = 0
    loss_chunk: Count = 0  # tokens per row whose logits exist at a time; 0: by size (loss.py)
    # Consecutive steps with a non-finite gradient that may be skipped; one more ends the run.
    skip_steps: Count = 0
    # Mesh sizes of data, fsdp, tensor, sequence; -1: all remaining devices; none given: one device.
    mesh: Mesh = dataclasses.field(default_factory=dict)
    # The run ends, and the learning rate reaches its end, after this many seconds of training
    # if that comes first; 0: only steps count.
    seconds: NonNegative = 0.0
    checkpoint_seconds: PositiveFloat = 120.0  # time between saved states
    # Which states are kept: the newest, the one with the best image score (if images are drawn),
    # and one every so many steps; 0: no others.
    keep_states: Positive = 2
    keep_every: Count = 0
    image_seconds: NonNegative = 180.0  # time between grids of sampled images; 0: not by time
    eval_every: Count = 0  # steps between the same, independent of speed; 0: not by steps
    # In steps. Several processes also agree at these steps whether to save or to draw.
    log_every: Positive = 20
    init_from: Place = ""  # a checkpoint folder or bundled name: the parameters to start from
    vision_from: Place = ""  # a file of a vision tower to start from (training/vision_tower.py)
    eval_tasks: tuple[str, ...] = ()  # scored with each sheet of scenes, in addition to "draw"
    eval_prompts: Count = 64  # prompts per task in the report; 0: no report
    # Of the model that is written at the end; "": that of the frozen part, else float32.
    model_dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    model_file_mb: Count = 0  # of each of its files at most; 0: one file, or several of 5 GB

    def _rules(self):
        divides = self.batch_size % (self.microbatches or 1) == 0
        yield "microbatches", divides, f"it must divide {self.batch_size=}"


class TextSampling(Section):
    """How text is unmasked: answers, captions and layouts (spec Sec. 6)."""

    preset: Literal["", Preset, TextPreset] = ""  # "": that of images
    temperature: Scale = 0.0
    # Tokens per text block; a shorter text is one block. 0: as trained, `data.text_block_len`.
    block_len: Count = 0
    top_k: Count = 0  # the number of most probable tokens; used at a temperature above 0; 0: all
    top_p: PositiveShare = 1.0  # the fewest tokens with this total probability; 1: all
    steps: Positive = 8  # per text block
    step_ratio: Share = 0.0  # steps per text block as a share of its tokens; 0: `steps`
    schedule: Literal["even", Schedule] = "even"  # within a text block
    shift: PositiveFloat = 3.0  # for the schedule "shift"
    # What ranks the tokens of a text block: the probability of the drawn token, the margin between
    # the two most probable, entropy (lowest first), or chance.
    confidence: Literal["probability", "margin", "entropy", "random"] = "probability"
    # How many of them a step commits: the number given by the schedule; all that are at least as
    # confident as `threshold`; by Fast-dLLM's factor rule; or those of lowest entropy while the
    # entropies of all but the last sum up to at most `entropy`. The last three commit at least one,
    # at most `most` unless that is 0, and may end a text block early.
    commit: Literal["count", "threshold", "factor", "entropy"] = "count"
    threshold: Share = 0.9
    factor: PositiveFloat = 1.0  # n tokens need a confidence of 1 - factor / (n + 1)
    entropy: NonNegative = 0.1  # nats; ranks by entropy, whatever `confidence` says
    most: Count = 0
    # Order of text blocks: left_to_right, right_to_left, random (by `Sampling.order_seed`), or e.g.
    # "2,0,1".
    block_order: str = "left_to_right"

    def _rules(self):
        named = ("left_to_right", "right_to_left", "random")
        is_order = self.block_order in named or self.block_numbers is not None
        choices = f"choose one of {', '.join(named)}, or numbers such as '2,0,1'"
        yield "block_order", is_order, choices
        by_count = 'it must be 0 with commit="count", whose schedule says how many'
        yield "most", self.most == 0 or self.commit != "count", by_count

    @property
    def block_numbers(self) -> tuple[int, ...] | None:
        """The numbers in `block_order`; None if it is not a list of numbers."""
        words = self.block_order.split(",")
        return tuple(map(int, words)) if all(word.strip().isdecimal() for word in words) else None


class ReleasedSampling(Section):
    """What LaViDa-O's released samplers also do; nothing of it by default (spec Sec. 6, 7)."""

    # `Sampling.confidence_noise` decreases to the share `confidence_noise_end` of it.
    confidence_noise_schedule: Decay = "constant"
    confidence_noise_end: Share = 0.01
    confidence_noise_shift: NonNegative = 0.0  # for the schedule "shift"; 0: `Sampling.shift`
    # The temperature of images, and both scales of guidance, decrease to a share of themselves.
    temperature_schedule: Decay = "constant"
    temperature_end: PositiveShare = 1.0
    guidance_schedule: Decay = "constant"
    guidance_end: Share = 1.0
    # Text: the mask token may be drawn (and remains to be decoded), nothing stops at end-of-text,
    # and the factor rule never leaves a single token over.
    text_behaviour: bool = False


class Sampling(Section):
    """One way of unmasking a response (paper Sec. 3.2); what is not in `text` is of images."""

    preset: Literal["", Preset] = ""  # "": sparse for a step-causal model, dense for a "full" one
    num_steps: Positive = 12  # image steps
    low_steps: Count = 0  # of images of quality "low"; 0: half of `num_steps`
    # The units that "dense" decodes: "cell", as all other presets do, for models that were trained
    # on whole cells; "code", as LaViDa-O does (a cell may be partly known). Conversion of a
    # released checkpoint sets "code".
    grid: Literal["cell", "code"] = "cell"
    # Passes per step, each decoding equally many codes of every cell; for whole cells only.
    cell_passes: Positive = 1
    # Steps of an image that would decode fewer cells are merged with the next ones; only for whole
    # cells in a fixed order. 0: no merging. For an image without given cells, values that change
    # from step to step then change over the merged steps.
    merge_cells: Count = 0
    # "confidence" (the released "mmada") chooses among all cells after each pass, and only dense,
    # none and p pass all cells; every other order is fixed in advance. "layout": the first step
    # decodes a cell of each thing of the layout and one of the background, so that later steps can
    # agree on what the words leave open; then, and without a layout, as "stratified".
    order: Literal["stratified", "halton", "random", "raster", "layout", "confidence"] = (
        "stratified"
    )
    order_seed: CountOrAuto = 42  # -1: each image has an order from its own seed
    schedule: Schedule = "shift"
    shift: PositiveFloat = 3.0
    # Gumbel noise on the log probability that "confidence" ranks by.
    confidence_noise: NonNegative = 1.0
    temperature: Scale = 1.0  # of image codes
    top_k: Count = 0  # the number of most probable image codes to draw from; 0: all
    top_p: PositiveShare = 1.0  # the fewest image codes with this total probability; 1: all
    guidance: Scale = 0.0  # 0: one row; g: (1+g) cond - g uncond
    guidance_edit: schema.ScaleOrAuto = -1.0  # replaces `guidance` in edits; -1: the same
    guidance_image: Scale = 0.0  # edits: weight of the second row
    # First and last guided step as shares of num_steps; step i of 1, 2, ... is guided if
    # int(first * num_steps) <= i <= int(last * num_steps).
    guidance_interval: Interval = (0.0, 1.0)
    # What the second of the three rows of an edit keeps. Ours: "source", the source cells and the
    # headers. The released edit modes 0 to 3: "source_only"; "no_source", all but the source cells;
    # "no_image", the text; "no_text", the seen image and the source cells.
    edit_guidance: Literal["source", "source_only", "no_source", "no_image", "no_text"] = "source"
    # Registers per pass; -1: as many as in training. In images they may be halved step by step down
    # to `registers_end`, as fewer tokens are left to stand in for. -1: they stay the same.
    registers: schema.UpTo1024OrAuto = -1
    registers_end: schema.UpTo1024OrAuto = -1
    # Steps after the last one, each of which draws cells of an image again, at temperature 0, with
    # all others known: every other cell, or a quarter of them if there are four or more.
    revisions: schema.Revisions = 0
    style_code: bool = True  # images of a model with `Model.style_parts` have a style code
    layout_temperature: schema.ScaleOrAuto = -1.0  # except in edits; -1: `text.temperature`
    layout_block_len: Count = 0  # for layouts and verdicts; 0: as for other texts
    layout: bool = True  # lay the image out in text first, if the task allows it
    # Matrices of the layers in 8 bits: "": no; "int8": only the weights; "w8a8": activations too;
    # "fp8": both in float8. Results differ, and passes of few tokens are faster.
    quantize: Literal["", Quantized] = ""
    # Dtype of the decoder of images. In bfloat16, grey levels of the bundled one change by at most
    # 4 of 255 (docs/speed.md). Given images are always encoded in float32.
    vq_dtype: Dtype = "float32"
    text: TextSampling = dataclasses.field(default_factory=TextSampling)
    released: ReleasedSampling = dataclasses.field(default_factory=ReleasedSampling)


class Evaluate(Section):
    """One benchmark (`--mode=evaluate`; docs/evaluation.md)."""

    benchmark: Identifier = "scenes"  # a file in `evals/benchmarks/`
    checkpoint: Place = ""  # the model to evaluate, unless --checkpoint names another
    data: Place = ""  # folder of the official files; docs/api/benchmarks.md: its structure
    split: str = ""  # of the benchmark, if it has several
    limit: Count = 0  # the number of items, from the first (small worlds: per task); 0: all
    tasks: tuple[str, ...] = ()  # of a small world that are scored; (): all that the model learned
    batch_size: Positive = 8  # rows sampled together
    num_images: Positive = 1  # images drawn per prompt
    prefix: str = ""  # put before every prompt for an image
    sampler: str = ""  # one of `sampling.options.SAMPLERS`; "": the checkpoint's
    max_new_tokens: Positive = 32  # room for an answer, rounded up to whole text blocks


class Config(Section):
    """One experiment."""

    name: str = "unnamed"  # the run directory is runs/<name> unless --workdir says otherwise
    seed: Count = 0
    # Format of prompts (`prompting/protocol.py`): a small world or LaViDa-O; "": from the rest.
    prompts: Literal["", "scenes", "art", "chat"] = ""
    model: Model = dataclasses.field(default_factory=Model)
    vq: VQ = dataclasses.field(default_factory=VQ)
    data: Data = dataclasses.field(default_factory=Data)
    prepare: Prepare = dataclasses.field(default_factory=Prepare)
    diffusion: Diffusion = dataclasses.field(default_factory=Diffusion)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    lora: Lora = dataclasses.field(default_factory=Lora)
    train: Train = dataclasses.field(default_factory=Train)
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    evaluate: Evaluate = dataclasses.field(default_factory=Evaluate)

    def __post_init__(self):
        if not self.prompts:
            released = self.model.vision.newline or self.model.understanding_only
            chat = released or self.data.source == "prepared"
            world = "art" if self.data.source == "art" else "scenes"
            object.__setattr__(self, "prompts", "chat" if chat else world)
        if found := [sentence for is_wrong, sentence in self._contradictions() if is_wrong]:
            raise ConfigError(found[0])

    def _contradictions(self) -> Iterator[tuple[Any, str]]:
        """Yields whether settings of several sections contradict each other, and the remedy."""
        data, lora, optimizer, train = self.data, self.lora, self.optimizer, self.train
        carries = self.diffusion.attention, self.diffusion.blocks, self.diffusion.corruption
        yield (
            train.stage != "denoiser" and (lora.rank or optimizer.groups),
            f"Train.stage={train.stage!r} trains a whole image tokenizer or decoder: it takes"
            " neither Lora.rank nor Optimizer.groups.",
        )
        yield (
            optimizer.frozen_dtype == "int8" and not lora.rank,
            "Optimizer.frozen_dtype='int8' holds the base of adapters in 8 bits: give a Lora.rank"
            " of 1 or more, or another dtype.",
        )
        yield (
            lora.rank and self.sampling.quantize,
            f"Sampling.quantize={self.sampling.quantize!r} rounds matrices that have adapters while"
            " they are trained: leave it empty, and sample in 8 bits from the model that the run"
            " leaves.",
        )
        yield (
            train.batch_size % (data.packing * (train.microbatches or 1)),
            f"Train.batch_size={train.batch_size} must be a multiple of Data.packing={data.packing}"
            f" times {train.microbatches or 1} microbatches, so that each has whole rows.",
        )
        yield (
            self.diffusion.corruption == "released"
            and (data.packing > 1 or data.length_buckets > 1),
            "Diffusion.corruption='released' fills rows up with end-of-text that is learned:"
            " it takes neither Data.packing nor Data.length_buckets.",
        )
        yield (
            optimizer.distil
            and not (
                optimizer.ema
                and carries[:2] == ("step_causal", "plan")
                and data.packing == 1
                and self.diffusion.partial_cells == 0
            ),
            f"Optimizer.distil={optimizer.distil} teaches with the average of the parameters, by"
            " steps over whole cells of one plan: it needs Optimizer.ema above 0, Diffusion."
            'attention="step_causal", blocks="plan" and partial_cells=0, and Data.packing=1.',
        )
        yield (
            self.model.sequential_codes
            and (self.diffusion.partial_cells or carries[2] != "blocks"),
            "Model.sequential_codes draws the codes of a cell in their order: it needs"
            " Diffusion.partial_cells=0 and corruption='blocks'.",
        )
        yield (
            self.model.style_parts
            and (carries != ("step_causal", "plan", "blocks") or data.packing > 1),
            f"Model.style_parts={self.model.style_parts} needs registers, and rows that predict"
            ' every cell of one image: Diffusion.attention="step_causal", blocks="plan" and'
            ' corruption="blocks", and Data.packing=1; or 0 parts.',
        )


def read(path: pathlib.Path, base: Config | None = None) -> Config:
    """Runs a config file and returns the checked result of its `get_config`.

    It may import the config files in its folder: `import scenes`. `configs/evaluate.py:mme` passes
    an argument to its `get_config`.

    Args:
        base: the values of everything that the file does not set; None: the defaults.

    Raises:
        ConfigError: there is no such file, it cannot be run, or a setting is wrong.
    """
    given = schema.run(path, "get_config")
    return build(Config, given) if base is None else changed(base, given)
