# SPDX-License-Identifier: Apache-2.0
"""The settings of every experiment: names, defaults, units and ranges live here and only here.

`configs/*.py` return an `ml_collections.ConfigDict` that may set what is named here and nothing
else; `read` turns it into these frozen dataclasses. What a setting may be stands in its annotation:
choices as a `Literal`, ranges as an `Allowed`. What ties several of them together stands in
`_rules` of their section. Both are checked whenever a section is made (`schema.py`).
"""

import dataclasses
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
    Pattern,
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

# LaViDa-O itself and the rows of the paper's ablation, for images and for text.
Preset = Literal["dense", "none", "p", "r", "t", "pr", "pt", "rt", "sparse"]
# Full attention with a cache that it makes inexact, for text only: LaViDa-O's own (the prompt),
# and the two of Fast-dLLM.
TextPreset = Literal["prefix", "fast_dllm_prefix", "fast_dllm_dual"]
Dtype = Literal["float32", "bfloat16"]
Quantized = Literal["int8", "w8a8", "fp8"]  # matrices of the layers while sampling
Schedule = Literal["shift", "cosine", "cosine2", "exp", "logit_normal", "linear"]
Decay = Literal["constant", "linear", "cosine2", "shift", "exp"]  # of a scale over the steps

PRESETS, TEXT_PRESETS = typing.get_args(Preset), typing.get_args(TextPreset)
VQ_DTYPES, QUANTIZED = typing.get_args(Dtype), typing.get_args(Quantized)


class Vision(Section):
    """The vision tower of the understanding branch: patches, transformer, pool, projector."""

    image_size: Size = 96  # pixels a side
    patch_size: Size = 8  # pixels a side
    width: Size = 64
    num_layers: UpTo1024 = 2
    num_heads: Size = 4
    mlp_hidden: Size = 128
    pool: Size = 2  # patches a side that one convolution merges into one token
    # A learned vector after every row of tiles, and after an image seen whole (spec Sec. 4).
    newline: bool = False
    # Sizes (width, height) in pixels of the grids of tiles that an image is cut into (spec Sec.
    # 4, "anyres"); none: images are seen whole, resized to a square.
    grid_sizes: tuple[tuple[int, int], ...] = ()
    # Released files hold an unused norm after the tower: kept, so that an export is complete.
    unused_post_norm: bool = False

    def _rules(self):
        sides = [side for size in self.grid_sizes for side in size]
        whole = all(side > 0 and side % self.image_size == 0 for side in sides)
        yield "grid_sizes", whole, f"sides are multiples of {self.image_size=}"
        yield "width", self.width % self.num_heads == 0, f"a multiple of {self.num_heads=}"

    @property
    def num_tokens(self) -> int:
        """Vision tokens an image becomes."""
        return self.grid_side**2

    @property
    def grid_side(self) -> int:
        """Vision tokens along one side of an image."""
        return self.image_size // self.patch_size // self.pool


class Model(Section):
    """The two-branch denoiser (paper Sec. 3; the base model's "Elastic-MoT")."""

    # Text. Ids are those of the tokenizer that lies next to the parameters.
    vocab_size: Size = 512
    end_of_text_id: int = 0  # also pads text
    text_mask_id: int = 1
    # Understanding branch, and the attention that both branches share.
    width: Size = 128
    mlp_hidden: Size = 384
    num_layers: UpTo1024 = 5
    dual_tower_layers: int = 3  # index of the last joint layer, as the release counts
    num_heads: Size = 4
    head_dim: Size = 32
    rope_theta: PositiveFloat = 500_000.0
    norm_eps: NonNegative = 1e-5
    # Generation branch.
    generation_width: Size = 96
    generation_mlp_hidden: Size = 256
    codebook_size: Size = 64
    codes_per_token: Literal[1, 4] = 1  # g: 4 compresses 2x2 codes into one backbone token
    grid_size: Size = 6  # cells a side of the largest image
    # Layers between codes and backbone tokens (the release: "dit2"; spec Sec. 2.5): "embed", a
    # table and a matrix; "dit", norms and matrices between; "dit2", one more before the logits.
    image_head: Literal["embed", "dit", "dit2"] = "dit2"
    image_table_rows: Count = 0  # of the table of codes; 0: up to the mask id (the release: 8448)
    understanding_only: bool = False  # LLaDA: no generation branch, no vision tower
    # Ours, off in the release, for small models, which have no time to learn it otherwise: learned
    # embeddings of the row and the column of a cell, and of what the vision tower sees there.
    cell_positions: bool = False
    # Likewise: heads of the first layer that start out looking at the word so many positions after
    # (below 0: before) each word, a head a number (`models/neighbours.py`).
    neighbour_heads: tuple[int, ...] = ()
    num_registers: UpTo1024 = 64  # Sec. 3.1
    vision: Vision = dataclasses.field(default_factory=Vision)
    # "full" for a model that was trained without the step-causal mask.
    trained_attention: Literal["full", "step_causal"] = "step_causal"
    compute_dtype: Dtype = "float32"
    # Of the residual stream, the last norm and the image head; "compute": `compute_dtype`. With
    # products in bfloat16 "float32" halves the error of the logits of images (docs/speed.md): for
    # sampling, since training would keep twice as many bytes of a layer's input.
    residual_dtype: Literal["compute", "float32"] = "compute"
    # Writes the layers out: a few small ones on a CPU take half the time, many compile for long.
    unroll_layers: bool = False
    # What training computes again of a layer in the backward pass: nothing; all but its input and
    # the output of the attention kernel; all but its input.
    remat: Literal["none", "attention", "layer"] = "none"
    # In which matrices of the layers, of adapters and around the codes sum their gradients, over
    # tokens and over devices; "compute": as `compute_dtype`, with half the bytes between devices,
    # and an error that grows with their number. Weights of norms are always summed in that; tables,
    # the loss's part of the heads and the vision tower in float32.
    grad_reduce_dtype: Literal["float32", "compute"] = "float32"
    # "": the fastest for the platform. The last two are interpreted elsewhere.
    attention_implementation: Literal["", "reference", "blockwise", "pallas_tpu", "pallas_gpu"] = ""

    def _rules(self):
        last, most = self.num_layers - 1, self.width
        is_joint = 0 <= self.dual_tower_layers <= last
        yield "dual_tower_layers", is_joint, f"the last joint layer is one of 0..{last}"
        yield "head_dim", self.head_dim % 2 == 0, "rotary embeddings need an even number"
        few = len(self.neighbour_heads) <= self.num_heads
        yield "neighbour_heads", few, f"no more numbers than {self.num_heads=}"
        enough = self.image_table_rows == 0 or self.image_table_rows > self.image_mask_id
        yield "image_table_rows", enough, f"0, or more than {self.image_mask_id=}"
        shared = f"it may not exceed {self.width=}, whose attn_out it shares"
        yield "generation_width", self.generation_width <= most, shared
        for name in ("end_of_text_id", "text_mask_id"):
            yield name, 0 <= getattr(self, name) < self.vocab_size, f"below {self.vocab_size=}"

    @property
    def num_joint_layers(self) -> int:
        return self.dual_tower_layers + 1

    @property
    def num_split_layers(self) -> int:
        return self.num_layers - self.num_joint_layers

    @property
    def text_register_id(self) -> int:
        """Stands for a register in the understanding stream; not in the vocabulary."""
        return self.vocab_size

    @property
    def image_mask_id(self) -> int:
        """Codebook size + 1, as released (8193; 8192 is never used)."""
        return self.codebook_size + 1

    @property
    def image_register_id(self) -> int:
        """Stands for a register in the generation stream; it has no row in the table."""
        return self.codebook_size + 2

    @property
    def num_cells(self) -> int:
        """Backbone tokens of the largest image."""
        return self.grid_size**2

    @property
    def codes_side(self) -> int:
        """Codes along one side of a cell."""
        return 2 if self.codes_per_token == 4 else 1


class VQ(Section):
    """The image tokenizer: convolutional encoder, codebook, decoder (spec Sec. 3)."""

    image_size: Size = 96  # pixels a side
    channels: Sizes = (16, 16, 32, 48, 64)  # one entry a resolution
    layers_per_block: Blocks = 1  # residual layers of the encoder; the decoder has one more
    mid_attention: bool = False
    latent_channels: Size = 16
    codebook_size: Size = 64
    norm_groups: Size = 8
    # Positions that share the statistics of a norm: "group", as released, the whole image;
    # "pixel", ours, each alone, so that what stands in one cell cannot move the code of another.
    norm: Literal["group", "pixel"] = "group"
    # How the decoder doubles its sides. "nearest", as released, then a 3x3 convolution: it turns a
    # field of equal codes into a field of equal pixels. "shuffle", ours: four outputs of a 1x1
    # convolution side by side, which lets one code stand for a whole object.
    upsampling: Literal["nearest", "shuffle"] = "nearest"
    commitment: NonNegative = 0.25  # weight of the commitment loss

    def _rules(self):
        fit = len(self.channels) > 0 and all(c % self.norm_groups == 0 for c in self.channels)
        yield "channels", fit, f"multiples of {self.norm_groups=}"
        fits = self.image_size % self.factor == 0
        yield "image_size", fits, f"a multiple of the downsampling factor {self.factor}"

    @property
    def factor(self) -> int:
        """Pixels a side that one code stands for."""
        return 2 ** (len(self.channels) - 1)


class Lesson(Section):
    """The tasks of a part of a run, which begins where the lesson before it ends."""

    until: Positive  # the batch after its last one
    tasks: Weights


class Data(Section):
    """Where examples come from and in which proportions."""

    # "prepared": the records in `folder` (docs/data.md), with the tokenizers of `train.init_from`
    # or of `folder` (docs/own_images.md). "none": a model that is not trained here.
    source: Literal["scenes", "digits", "prepared", "none"] = "scenes"
    folder: str = "prepared"  # what `--mode=prepare` wrote, of source "prepared"
    # Weight of each task; a batch holds tasks of one shape group.
    tasks: Weights = dataclasses.field(default_factory=lambda: {"draw": 1.0})
    lessons: dict[str, Lesson] = dataclasses.field(default_factory=dict)  # taught before `tasks`
    image_codec: str = "scenes_g1"  # a folder of `assets/vq`, a path, or "grey" (digits)
    text_block_len: Size = 8  # S: tokens decoded together in a text answer
    max_prompt_len: Size = 96  # understanding tokens of the longest prompt, vision included
    max_answer_len: Size = 40  # text response tokens, a multiple of text_block_len
    # Registers of a text row stand after a random length up to this; 0: right after its response.
    sampled_answer_len: Count = 0
    plan_drop: Share = 0.1  # share of image rows without their layout plan
    prompt_drop: Share = 0.1  # share of rows whose prompt is masked, for guidance
    source_drop: Share = 0.1  # share of edit rows whose source cells are masked
    given: Share = 0.2  # share of rows that show a random part of the response as given
    edit_keeps: Share = 0.0  # of laid out edits, with all else given; above 0 such edits keep it
    blind: bool = False  # shows empty scenes for images: what can be had without looking
    workers: Count = 0  # processes that make batches, for accelerators; 0: one thread
    packing: Positive = 1  # examples that share a row, each a segment that sees itself alone
    length_buckets: Positive = 1  # static lengths of the batches of a group, a program each
    max_sequence_len: Size = 8192  # of prepared records, as all that follows: tokens, with images
    micro_condition: bool = True  # prompts tell sizes and measures of images (spec Sec. 5.4)
    # Loss weight of the codes in the boxes of an edit (the mean over the masked codes of an image
    # is 1): 1 as released, 5 where the release switches it on (spec Sec. 9.3).
    edit_area_weight: Annotated[float, at_least(1)] = 1.0
    held_out: Share = 0.0  # of a group of 100 or more, kept from training for the report's loss
    kinds: tuple[str, ...] = ()  # all that a model from scratch learned from; (): a LaViDa-O

    def _rules(self):
        whole = self.max_answer_len % self.text_block_len == 0
        yield "max_answer_len", whole, f"a multiple of {self.text_block_len=}"
        ends = [lesson.until for lesson in self.lessons.values()]
        yield "lessons", len({*ends}) == len(ends), "lessons that end at different batches"


class Prepare(Section):
    """From tables and images to shards of records (`--mode=prepare`; docs/data.md)."""

    shard_rows: Positive = 512  # rows of a table that become one shard
    max_bad_fraction: Share = 0.001  # of the rows of a dataset; more bad ones end the preparation
    crops: Positive = 1  # random crops of an image to draw, of which training takes one at a time
    encode_batch: Positive = 8  # images that the image tokenizer encodes together
    engine: Literal["processes", "ray"] = "processes"  # on this machine, or on a cluster
    workers: Count = 0  # processes or Ray actors, each with an image tokenizer; 0: this process


class Diffusion(Section):
    """Time, corruption and blocks (paper Sec. 3.3; design of the loss in `diffusion.py`)."""

    # "full": every token in block 0, no registers (LaViDa-O). "truncated": the tokens and registers
    # of one step-causal masked block, but every one sees all (a row of the paper's ablation).
    attention: Literal["step_causal", "full", "truncated"] = "step_causal"
    # "uniform": the paper's words. "plan": every step of a sampler's plan in one row.
    blocks: Literal["schedule", "uniform", "plan"] = "schedule"
    num_clean_blocks: Positive = 3  # M of `uniform`
    num_masked_blocks: Blocks = 4  # N, of an image in `schedule` and of `uniform`
    # N of a text in `schedule`: steps that are drawn for a row, each with a masked block of its own
    # that sees what is clean before it; equal ones count once. `plan` has all, if no more than N.
    text_masked_blocks: Blocks = 1
    # Numbers of steps that a sampler's plan is drawn from: of an image, of a text block.
    plan_steps: Sizes = (8, 12, 18)
    plan_text_steps: Sizes = (2, 4, 8)
    # In half of the rows of `schedule`, and in all of `plan`, steps of an image are merged into
    # masked blocks of at least so many cells; -1: of as many as there are registers.
    merge_cells: CountOrAuto = -1
    # Share of an image's masked blocks of whose cells some codes, 1 to g - 1, are known: what a
    # model has to know for `Sampling.cell_passes` above 1, and then a half.
    partial_cells: Share = 0.0
    weighting: Literal["1/t", "mean"] = "1/t"  # "mean": what the released code does
    time_policy: Literal["uniform", "cosine", "logit_normal", "mode"] = "uniform"
    # "blocks": a response is masked token by token and cut into blocks, as all of the above says.
    # "released": LaViDa-O's own objective (spec Sec. 9.2, 9.3): text answer and image of a
    # sequence are masked together, images code by code, each loss the mean over what is masked;
    # needs attention "full" and weighting "mean"; `blocks` and `Data.given` mean nothing.
    corruption: Literal["blocks", "released"] = "blocks"
    complementary: bool = False  # of "released": every row again with inverse masks; theirs: off
    text_loss: bool = True  # of "released": False trains images alone, as it does at 256 px

    def _rules(self):
        if self.corruption == "released":
            needs = 'corruption "released" needs '
            yield "attention", self.attention == "full", f'{needs}"full"'
            yield "weighting", self.weighting == "mean", f'{needs}"mean"'
            by_code = 'corruption "released" masks code by code anyway: it must be 0'
            yield "partial_cells", self.partial_cells == 0, by_code
        else:
            only = 'it is of corruption "released" alone'
            yield "complementary", not self.complementary, only
            yield "text_loss", self.text_loss, only
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
    ema: BelowOne = 0.0  # decay of the parameter average a step; 0 keeps none
    # Of both moments of Adam; "bfloat16" halves them: they are rounded up or down at random.
    moments_dtype: Dtype = "float32"
    # Parameters with a learning rate of their own: (regular expression, rate). The first that is
    # found in the path of a parameter, such as `vision/tower/layers/q/kernel`, is for it. A rate of
    # 0 freezes: no gradient and no moments are kept. The release: ((r"^vision/tower/", 2e-6),).
    groups: Groups = ()
    # Of what is not trained; "bfloat16" halves it, "int8" halves the matrices of the layers once
    # more (`models/quantize.py`; with adapters alone), and the rest is bfloat16.
    frozen_dtype: Literal["float32", "bfloat16", "int8"] = "float32"

    def _rules(self):
        is_kept = self.kind == "adamw" or self.moments_dtype == "float32"
        yield "moments_dtype", is_kept, 'kind "muon" keeps float32'


class Lora(Section):
    """Low-rank adapters (arXiv:2106.09685): all else is frozen, except for `also` and groups."""

    rank: Count = 0  # 0: no adapters
    alpha: PositiveFloat = 32.0  # an adapter adds (alpha / rank) (x A) B
    # Regular expression that is found in the paths of the matrices that get an adapter, such as
    # `joint_layers/generation/q`: all matrices inside the layers of both branches.
    targets: Pattern = "^(joint|split)_layers/"
    # Likewise, of parameters that are trained whole: the base model has no registers of use.
    also: Pattern = "^register_"


class Train(Section):
    """Length of a run and what it leaves on disk."""

    stage: Literal["denoiser", "vq"] = "denoiser"
    train_steps: Positive = 1000
    batch_size: Positive = 16  # examples; as many rows, except for `data.packing`
    microbatches: Positive = 1  # parts of a batch, one after another; same gradient as the whole
    loss_chunk: Count = 0  # tokens of a row whose logits exist at a time (memory); 0: all
    # Steps in a row whose gradient is not finite that are left out; one more ends the run.
    skip_steps: Count = 0
    # Mesh sizes of data, fsdp, tensor, sequence; -1: all devices left; none given: one device.
    mesh: Mesh = dataclasses.field(default_factory=dict)
    # The run ends, and the learning rate reaches its end, after this many seconds of training
    # if that comes first; 0: steps alone decide.
    seconds: NonNegative = 0.0
    checkpoint_seconds: PositiveFloat = 120.0  # time between saved states
    # States that stay: the newest, the one with the best score of images (where some are drawn),
    # and those of every so many steps; 0: no others.
    keep_states: Positive = 2
    keep_every: Count = 0
    image_seconds: NonNegative = 180.0  # time between grids of sampled images; 0: not by the clock
    eval_every: Count = 0  # steps between them, which a clock does not move; 0: not by steps
    # Steps. Several processes also agree then on whether it is time to save or to draw.
    log_every: Positive = 20
    init_from: str = ""  # a checkpoint folder or bundled name whose parameters to start from
    eval_tasks: tuple[str, ...] = ()  # scored with each sheet of scenes, next to "draw"
    eval_prompts: Count = 64  # prompts a task in the report; 0: no report

    def _rules(self):
        divides = self.batch_size % self.microbatches == 0
        yield "microbatches", divides, f"it must divide {self.batch_size=}"


class Sampling(Section):
    """One way of unmasking a response (paper Sec. 3.2; the released ones, spec Sec. 6 and 7)."""

    preset: Literal["", Preset] = ""  # "": sparse for a step-causal model, dense for a "full" one
    text_preset: Literal["", Preset, TextPreset] = ""  # "": as preset
    num_steps: Positive = 12  # image steps
    # What "dense" decodes one at a time: "cell", as all other presets do, for models that were
    # trained on whole cells; "code", as LaViDa-O does (a cell may be known in part). Conversion of
    # a released checkpoint writes "code".
    grid: Literal["cell", "code"] = "cell"
    # Passes inside a step, each of which decodes as many codes of every cell; of whole cells only.
    cell_passes: Positive = 1
    # Steps of an image that would decode fewer cells are merged with those after them; of whole
    # cells in a fixed order only. 0: none are. What changes from step to step then changes over the
    # merged steps of an image without given cells.
    merge_cells: Count = 0
    # "confidence" (the released "mmada") chooses after each pass among all cells, which only
    # dense, none and p pass; every other order is fixed beforehand.
    order: Literal["stratified", "halton", "random", "raster", "confidence"] = "stratified"
    order_seed: CountOrAuto = 42  # -1: every image has the order of its own seed
    schedule: Schedule = "shift"
    shift: PositiveFloat = 3.0
    # Gumbel noise on the log probability that "confidence" ranks by; it falls from this to the
    # share `confidence_noise_end` of it.
    confidence_noise: NonNegative = 1.0
    confidence_noise_schedule: Decay = "constant"
    confidence_noise_end: Share = 0.01
    confidence_noise_shift: NonNegative = 0.0  # of its schedule "shift"; 0: `shift`
    temperature: Scale = 1.0  # of image codes; falls to the share `temperature_end`
    temperature_schedule: Decay = "constant"
    temperature_end: PositiveShare = 1.0
    top_k: Count = 0  # image codes that may be drawn, the most probable ones; 0: all
    top_p: PositiveShare = 1.0  # the fewest image codes that hold this probability; 1: all
    guidance: Scale = 0.0  # 0: one row; g: (1+g) cond - g uncond
    guidance_edit: schema.ScaleOrAuto = -1.0  # of edits, in place of `guidance`; -1: the same
    guidance_image: Scale = 0.0  # edits: weight of the second row
    guidance_schedule: Decay = "constant"
    guidance_end: Share = 1.0  # both guidance scales fall to this share
    # First and last guided step as shares of num_steps; step i of 1, 2, ... is guided where
    # int(first * num_steps) <= i <= int(last * num_steps).
    guidance_interval: Interval = (0.0, 1.0)
    # What the second of the three rows of an edit keeps: "source", ours, the source cells and the
    # headers; or the released edit modes 0 to 3: "source_only"; everything but the source cells,
    # "no_source"; the text, "no_image"; the image seen and the source cells, "no_text".
    edit_guidance: Literal["source", "source_only", "no_source", "no_image", "no_text"] = "source"
    # Registers passed; -1: as many as trained. In images they may fall by halves, step by step, to
    # `registers_end`: many stand in for much, few for little. -1: they do not fall.
    registers: schema.UpTo1024OrAuto = -1
    registers_end: schema.UpTo1024OrAuto = -1
    text_temperature: Scale = 0.0
    layout_temperature: schema.ScaleOrAuto = -1.0  # of layouts, not of edits'; -1: text_temperature
    # Tokens of a text block; a shorter text is one block. 0: as trained, `data.text_block_len`.
    text_block_len: Count = 0
    layout_block_len: Count = 0  # of layouts and verdicts; 0: as of other texts
    text_top_k: Count = 0  # as `top_k`, of text; read where its temperature is above 0
    text_top_p: PositiveShare = 1.0
    text_steps: Positive = 8  # steps a text block
    text_step_ratio: Share = 0.0  # steps a text block as a share of its tokens; 0: text_steps
    text_schedule: Literal["even", Schedule] = "even"  # inside a text block
    text_shift: PositiveFloat = 3.0  # of the text schedule "shift"
    # What ranks the tokens of a text block: probability of the drawn one, margin between the two
    # most probable, entropy (least first), random.
    text_confidence: Literal["probability", "margin", "entropy", "random"] = "probability"
    # How many of them a step commits: as many as the schedule says, all that are at least as
    # confident as `text_threshold`, by Fast-dLLM's factor rule, or those of least entropy while
    # the entropies of all but the last sum up to at most `text_entropy`. The last three commit at
    # least one, at most `text_most` if that is not 0, and end a text block early.
    text_commit: Literal["count", "threshold", "factor", "entropy"] = "count"
    text_threshold: Share = 0.9
    text_factor: PositiveFloat = 1.0  # n tokens need a confidence of 1 - factor / (n + 1)
    text_entropy: NonNegative = 0.1  # nats; ranks by entropy, whatever `text_confidence` says
    text_most: Count = 0
    # Of text blocks: left_to_right, right_to_left, random (by `order_seed`), or "2,0,1" by number.
    text_block_order: str = "left_to_right"
    # Text as the released code writes it: the mask token may be drawn (and then stays to be
    # decoded), nothing ends at end-of-text, and the factor rule never leaves one token to itself.
    released_behaviour: bool = False
    plan: bool = True  # lay the image out in text first, where the task allows
    # Matrices of the layers in 8 bits: "" not; "int8" the weights alone; "w8a8" activations too;
    # "fp8" both in float8. Other numbers come out, and on few tokens sooner.
    quantize: Literal["", Quantized] = ""
    # Of the decoder of images. In bfloat16 grey levels of bundled ones move by at most 4 of 255
    # (docs/speed.md). Codes of given images are always found in float32.
    vq_dtype: Dtype = "float32"

    def _rules(self):
        named = ("left_to_right", "right_to_left", "random")
        is_order = self.text_block_order in named or self.block_numbers is not None
        choices = f"choose one of {', '.join(named)}, or numbers such as '2,0,1'"
        yield "text_block_order", is_order, choices
        by_count = 'it must be 0 with text_commit="count", whose schedule says how many'
        yield "text_most", self.text_most == 0 or self.text_commit != "count", by_count

    @property
    def block_numbers(self) -> tuple[int, ...] | None:
        """The numbers that `text_block_order` spells out; None if it spells none."""
        words = self.text_block_order.split(",")
        return tuple(map(int, words)) if all(word.strip().isdecimal() for word in words) else None


class Evaluate(Section):
    """One benchmark (`--mode=evaluate`; docs/evaluation.md)."""

    benchmark: Identifier = "scenes"  # a file of `evals/`
    checkpoint: str = ""  # what is evaluated unless --checkpoint names another
    data: str = ""  # folder of the official files; docs/evaluation.md says how they lie there
    split: str = ""  # of the benchmark, where it has several
    limit: Count = 0  # how many items, the first ones (scenes: of each task); 0: all
    batch_size: Positive = 8  # rows decoded together
    num_images: Positive = 1  # images drawn of each prompt
    prefix: str = ""  # in front of every prompt of an image
    sampler: str = ""  # a published one or a preset (`sampling/options.py`); "": of the checkpoint
    max_new_tokens: Positive = 32  # room for an answer, rounded up to whole text blocks


class Config(Section):
    """One experiment."""

    name: str = "unnamed"  # the run directory is runs/<name> unless --workdir says otherwise
    seed: Count = 0
    # Of prompts (`data/templates.py`): of the small world, of LaViDa-O; "": found from the rest.
    prompts: Literal["", "scenes", "chat"] = ""
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
            object.__setattr__(self, "prompts", "chat" if chat else "scenes")
        if found := [sentence for is_wrong, sentence in self._contradictions() if is_wrong]:
            raise ConfigError(found[0])

    def _contradictions(self) -> Iterator[tuple[Any, str]]:
        """Yields whether settings of several sections exclude each other, and what to do then."""
        data, lora, optimizer, train = self.data, self.lora, self.optimizer, self.train
        yield (
            train.stage == "vq" and (lora.rank or optimizer.groups),
            "Train.stage='vq' trains the whole image tokenizer: it takes neither Lora.rank nor"
            " Optimizer.groups.",
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
            train.batch_size % (data.packing * train.microbatches),
            f"Train.batch_size={train.batch_size} examples do not make whole rows of"
            f" Data.packing={data.packing} in each of Train.microbatches={train.microbatches}.",
        )
        yield (
            self.diffusion.corruption == "released"
            and (data.packing > 1 or data.length_buckets > 1),
            "Diffusion.corruption='released' fills rows up with end-of-text that is learned:"
            " it takes neither Data.packing nor Data.length_buckets.",
        )


def read(path: pathlib.Path, base: Config | None = None) -> Config:
    """Runs a config file and returns what its `get_config` gave, checked.

    It may import the config files next to it: `import scenes`. `configs/evaluate.py:mme` gives its
    `get_config` an argument.

    Args:
        base: where everything comes from that the file does not set; None: the defaults.

    Raises:
        ConfigError: there is no such file, it cannot be run, or a setting is wrong.
    """
    return changed(base or Config(), schema.run(path, "get_config"))
