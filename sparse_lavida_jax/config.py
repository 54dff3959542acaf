# SPDX-License-Identifier: Apache-2.0
"""The schema of every experiment: names, defaults, units and ranges live here and only here.

`configs/*.py` return an `ml_collections.ConfigDict` that may set what is named here and nothing
else; `build(Config, given)` turns it into these frozen dataclasses.
"""

import dataclasses
import re
import types
import typing
from typing import Any, TypeVar

import ml_collections

T = TypeVar("T")

# LaViDa-O itself and the rows of the paper's ablation, for images and for text.
PRESETS = ("dense", "none", "p", "r", "t", "pr", "pt", "rt", "sparse")
# Full attention with a cache that it makes inexact, for text only: LaViDa-O's own (the prompt),
# and the two of Fast-dLLM.
TEXT_PRESETS = ("prefix", "fast_dllm_prefix", "fast_dllm_dual")
VQ_DTYPES = ("float32", "bfloat16")
QUANTIZED = ("int8", "w8a8", "fp8")  # matrices of the layers while sampling (`models/quantize.py`)
TEXT_BLOCK_ORDERS = ("left_to_right", "right_to_left", "random")


class ConfigError(ValueError):
    """A setting that does not exist, has the wrong type or is out of range."""


def _check(owner: Any, name: str, holds: bool, allowed: str) -> None:
    if not holds:
        value = getattr(owner, name)
        raise ConfigError(f"{type(owner).__name__}.{name}={value!r} is out of range: {allowed}.")


def _check_choice(owner: Any, name: str, choices: tuple) -> None:
    _check(owner, name, getattr(owner, name) in choices, f"choose one of {', '.join(choices)}")


def _check_positive(owner: Any, *names: str) -> None:
    for name in names:
        _check(owner, name, getattr(owner, name) > 0, "it must be greater than 0")


def _check_fraction(owner: Any, *names: str) -> None:
    for name in names:
        _check(owner, name, 0 <= getattr(owner, name) <= 1, "it must lie in [0, 1]")


def _is_pattern(text: Any) -> bool:
    try:
        re.compile(text)
    except (re.error, TypeError):
        return False
    return True


def _is_group(group: Any) -> bool:
    if not (isinstance(group, tuple) and len(group) == 2 and _is_pattern(group[0])):
        return False
    return isinstance(group[1], int | float) and group[1] >= 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vision:
    """The vision tower of the understanding branch: patches, transformer, pool, projector."""

    image_size: int = 96  # pixels a side
    patch_size: int = 8  # pixels a side
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    mlp_hidden: int = 128
    pool: int = 2  # patches a side that one convolution merges into one token
    # A learned vector behind every row of tiles, and behind an image seen whole (spec Sec. 4).
    newline: bool = False
    # Sizes (width, height) in pixels of the grids of tiles that an image is cut into (spec Sec.
    # 4, "anyres"); none: images are seen whole, resized to a square.
    grid_sizes: tuple[tuple[int, int], ...] = ()
    # Released files hold a norm behind the tower that nothing uses: kept, so that an export is
    # whole.
    unused_post_norm: bool = False

    def __post_init__(self):
        _check_positive(self, "image_size", "patch_size", "width", "num_heads", "pool")
        _check(
            self,
            "grid_sizes",
            all(side > 0 and side % self.image_size == 0 for s in self.grid_sizes for side in s),
            f"sides are multiples of {self.image_size=}",
        )
        _check(self, "num_layers", self.num_layers >= 0, "it must be 0 or more")
        _check(self, "width", self.width % self.num_heads == 0, f"a multiple of {self.num_heads=}")

    @property
    def num_tokens(self) -> int:
        """Vision tokens an image becomes."""
        return self.grid_side**2

    @property
    def grid_side(self) -> int:
        """Vision tokens along one side of an image."""
        return self.image_size // self.patch_size // self.pool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The two-branch denoiser (paper Sec. 3; the base model's "Elastic-MoT")."""

    # Text. Ids are those of the tokenizer that lies beside the parameters.
    vocab_size: int = 512
    end_of_text_id: int = 0  # also pads text
    text_mask_id: int = 1
    # Understanding branch, and the attention both branches share.
    width: int = 128
    mlp_hidden: int = 384
    num_layers: int = 5
    dual_tower_layers: int = 3  # index of the last joint layer, as the release counts
    num_heads: int = 4
    head_dim: int = 32
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    # Generation branch.
    generation_width: int = 96
    generation_mlp_hidden: int = 256
    codebook_size: int = 64
    codes_per_token: int = 1  # g: 4 compresses 2x2 codes into one backbone token
    grid_size: int = 6  # cells a side of the largest image
    # Layers between codes and backbone tokens (the release: "dit2"; spec Sec. 2.5): "embed", a
    # table and a matrix; "dit", norms and matrices between; "dit2", one more before the logits.
    image_head: str = "dit2"
    # Rows of the table of codes; 0: up to the mask id. The release has spare ones: 8448.
    image_table_rows: int = 0
    # LLaDA: no generation branch, no vision tower.
    understanding_only: bool = False
    # Ours, off in the release: learned embeddings of the row and the column of a cell, and of
    # what the vision tower sees there. Small models have no time to learn places otherwise.
    cell_positions: bool = False
    # Registers (Sec. 3.1).
    num_registers: int = 64
    vision: Vision = dataclasses.field(default_factory=Vision)
    # "full" for a model that was trained without the step-causal mask.
    trained_attention: str = "step_causal"
    compute_dtype: str = "float32"
    # Of the residual stream, the last norm and the image head: "float32" where the products are in
    # bfloat16 halves how far the logits of images are from float32 (docs/speed.md). For sampling,
    # where it costs 2 % more bytes a step; training would keep twice as many of a layer's input.
    # "compute": as `compute_dtype`.
    residual_dtype: str = "compute"
    # Writes the layers out instead of scanning over them: for a few small layers on a CPU about
    # half the time a step, for many layers much longer to compile.
    unroll_layers: bool = False
    # What training keeps of a layer for the way back, the rest being computed again: "none", every
    # layer keeps all; "attention", its input and the output of a kernel of attention; "layer", its
    # input.
    remat: str = "none"
    # In which matrices of the layers, of adapters and around the codes sum their gradients, over
    # tokens and over devices. What is computed in bfloat16 would otherwise be summed in it: half
    # the bytes between devices, and an error that grows with their number. "compute": as
    # `compute_dtype`. Weights of norms are always summed in that; tables, the loss's part of the
    # heads, and the vision tower, which computes in float32, in float32.
    grad_reduce_dtype: str = "float32"
    # "": the fastest for the platform; reference | blockwise | pallas_tpu | pallas_gpu (the last
    # two are interpreted elsewhere).
    attention_implementation: str = ""

    def __post_init__(self):
        _check_positive(
            self, "vocab_size", "width", "mlp_hidden", "num_layers", "num_heads", "head_dim",
            "generation_width", "generation_mlp_hidden", "codebook_size", "grid_size", "rope_theta",
        )  # fmt: skip
        _check(
            self,
            "dual_tower_layers",
            0 <= self.dual_tower_layers < self.num_layers,
            f"the last joint layer is one of 0..{self.num_layers - 1}",
        )
        _check(self, "head_dim", self.head_dim % 2 == 0, "rotary embeddings need an even number")
        _check(self, "codes_per_token", self.codes_per_token in (1, 4), "1 or 4")
        _check_choice(self, "image_head", ("embed", "dit", "dit2"))
        _check(
            self,
            "image_table_rows",
            self.image_table_rows == 0 or self.image_table_rows > self.image_mask_id,
            f"0, or more than {self.image_mask_id=}",
        )
        _check(self, "num_registers", self.num_registers >= 0, "it must be 0 or more")
        _check(
            self,
            "generation_width",
            self.generation_width <= self.width,
            f"it may not exceed {self.width=}, whose attn_out it shares",
        )
        for name in ("end_of_text_id", "text_mask_id"):
            _check(
                self, name, 0 <= getattr(self, name) < self.vocab_size, f"below {self.vocab_size=}"
            )
        _check_choice(self, "trained_attention", ("full", "step_causal"))
        _check_choice(
            self,
            "attention_implementation",
            ("", "reference", "blockwise", "pallas_tpu", "pallas_gpu"),
        )
        _check_choice(self, "compute_dtype", ("float32", "bfloat16"))
        _check_choice(self, "residual_dtype", ("compute", "float32"))
        _check_choice(self, "remat", ("none", "attention", "layer"))
        _check_choice(self, "grad_reduce_dtype", ("float32", "compute"))

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class VQ:
    """The image tokenizer: convolutional encoder, codebook, decoder (spec Sec. 3)."""

    image_size: int = 96  # pixels a side
    channels: tuple[int, ...] = (16, 16, 32, 48, 64)  # one entry a resolution
    layers_per_block: int = 1  # residual layers of the encoder; the decoder has one more
    mid_attention: bool = False
    latent_channels: int = 16
    codebook_size: int = 64
    norm_groups: int = 8
    # Positions that share the statistics of a norm: "group", as released, the whole image;
    # "pixel", ours, each alone, so that what stands in one cell cannot move the code of another.
    norm: str = "group"
    # How the decoder doubles its sides. "nearest", as released, then a 3x3 convolution: it turns a
    # field of equal codes into a field of equal pixels. "shuffle", ours: four outputs of a 1x1
    # convolution side by side, which lets one code stand for a whole object.
    upsampling: str = "nearest"
    commitment: float = 0.25  # weight of the commitment loss

    def __post_init__(self):
        _check_positive(
            self, "image_size", "layers_per_block", "latent_channels", "codebook_size",
            "norm_groups",
        )  # fmt: skip
        _check_choice(self, "norm", ("group", "pixel"))
        _check_choice(self, "upsampling", ("nearest", "shuffle"))
        _check(self, "commitment", self.commitment >= 0, "it must be 0 or more")
        _check(
            self,
            "channels",
            len(self.channels) > 0 and all(c % self.norm_groups == 0 for c in self.channels),
            f"multiples of {self.norm_groups=}",
        )
        _check(
            self,
            "image_size",
            self.image_size % self.factor == 0,
            f"a multiple of the downsampling factor {self.factor}",
        )

    @property
    def factor(self) -> int:
        """Pixels a side that one code stands for."""
        return 2 ** (len(self.channels) - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lesson:
    """The tasks of a part of a run, which begins where the lesson before it ends."""

    until: int  # the batch behind its last one
    tasks: dict[str, float]  # weights

    def __post_init__(self):
        _check_positive(self, "until")
        _check(
            self,
            "tasks",
            len(self.tasks) > 0 and all(weight > 0 for weight in self.tasks.values()),
            "at least one task, every weight greater than 0",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Where examples come from and in which proportions."""

    # scenes | digits | prepared: the records in `folder` (docs/data.md) | none: a model that is not
    # trained here. "prepared" takes the tokenizers that lie beside the model of `train.init_from`.
    source: str = "scenes"
    folder: str = "prepared"  # what `--mode=prepare` wrote, of source "prepared"
    # Weight of each task; a batch holds tasks of one shape group.
    tasks: dict[str, float] = dataclasses.field(default_factory=lambda: {"draw": 1.0})
    # The first batches of a run are of other tasks, one lesson after another. A small model learns
    # to look things up in an image from nothing else or not at all.
    lessons: dict[str, Lesson] = dataclasses.field(default_factory=dict)
    picture_codec: str = "scenes_g1"  # a folder of `assets/vq`, a path, or "grey" (digits)
    text_block_len: int = 8  # S: tokens decoded together in a text answer
    max_prompt_len: int = 96  # understanding tokens of the longest prompt, vision included
    max_answer_len: int = 40  # text response tokens, a multiple of text_block_len
    plan_drop: float = 0.1  # share of image rows without their layout plan
    prompt_drop: float = 0.1  # share of rows whose prompt is masked, for guidance
    source_drop: float = 0.1  # share of edit rows whose source cells are masked
    given: float = 0.2  # share of rows that show a random part of the response as given
    workers: int = 0  # processes that make batches, for accelerators; 0: one thread
    packing: int = 1  # examples that share a row, each a segment that sees itself alone
    # Static lengths that the batches of a group may have: each is a program of its own to compile.
    length_buckets: int = 1
    # Of prepared records (`mixture/batches.py`): tokens of the longest sequence, images included,
    # as released, and the loss weight of the codes in the boxes of an edit, of which the mean over
    # the masked codes of an image is 1: 1 as in the released mixture, 5 where the release switches
    # it on (spec Sec. 9.3).
    max_sequence_len: int = 8192
    edit_area_weight: float = 1.0

    def __post_init__(self):
        _check_choice(self, "source", ("scenes", "digits", "prepared", "none"))
        _check_positive(
            self, "text_block_len", "max_prompt_len", "max_answer_len", "max_sequence_len",
            "packing", "length_buckets",
        )  # fmt: skip
        _check(self, "edit_area_weight", self.edit_area_weight >= 1, "it must be 1 or more")
        _check(
            self,
            "max_answer_len",
            self.max_answer_len % self.text_block_len == 0,
            f"a multiple of {self.text_block_len=}",
        )
        _check_fraction(self, "plan_drop", "prompt_drop", "source_drop", "given")
        _check(self, "workers", self.workers >= 0, "it must be 0 or more")
        _check(
            self,
            "tasks",
            len(self.tasks) > 0 and all(weight > 0 for weight in self.tasks.values()),
            "at least one task, every weight greater than 0",
        )
        ends = [lesson.until for lesson in self.lessons.values()]
        _check(
            self, "lessons", len(set(ends)) == len(ends), "lessons that end at different batches"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepare:
    """From tables and images to shards of records (`--mode=prepare`; docs/data.md)."""

    shard_rows: int = 512  # rows of a table that become one shard
    max_bad_fraction: float = 0.001  # of the rows of a dataset; more bad ones end the preparation
    crops: int = 1  # random crops of an image to draw, of which training takes one at a time
    encode_batch: int = 8  # images that the image tokenizer encodes together
    engine: str = "processes"  # processes, on this machine | ray, on a cluster
    workers: int = 0  # processes or Ray actors, each with an image tokenizer; 0: this process

    def __post_init__(self):
        _check_positive(self, "shard_rows", "crops", "encode_batch")
        _check_fraction(self, "max_bad_fraction")
        _check_choice(self, "engine", ("processes", "ray"))
        _check(self, "workers", self.workers >= 0, "it must be 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diffusion:
    """Time, corruption and blocks (paper Sec. 3.3; design of the loss in `diffusion.py`)."""

    # "full": every token in block 0, no registers (LaViDa-O). "truncated": the tokens and registers
    # of one step-causal masked block, but every one sees all (a row of the paper's ablation).
    attention: str = "step_causal"
    blocks: str = "schedule"  # schedule | uniform (the paper's words)
    num_clean_blocks: int = 3  # M of `uniform`
    num_masked_blocks: int = 4  # N, of an image and of `uniform`
    # N of a text in `schedule`: steps that are drawn for a row, each with a masked block of its own
    # that sees what is clean before it. Equal ones count once.
    text_masked_blocks: int = 1
    # Numbers of steps that `schedule` draws a sampler's plan from: of an image, of a text block.
    plan_steps: tuple[int, ...] = (8, 12, 18)
    plan_text_steps: tuple[int, ...] = (2, 4, 8)
    # In half of the rows of `schedule`, steps of an image are merged into masked blocks of at
    # least so many cells; -1: of as many as there are registers.
    merge_cells: int = -1
    # Share of an image's masked blocks of whose cells some codes, 1 to g - 1, are known: what a
    # model has to know for `Sampling.cell_passes` above 1, and then a half.
    partial_cells: float = 0.0
    weighting: str = "1/t"  # 1/t | mean (what the released code does)
    time_policy: str = "uniform"  # uniform | cosine | logit_normal | mode
    # "blocks": a response is masked token by token and cut into blocks, as all of the above says.
    # "released": LaViDa-O's own objective (spec Sec. 9.2, 9.3): text answer and image of a
    # sequence are masked together, images code by code, each loss the mean over what is masked;
    # needs attention "full" and weighting "mean"; `blocks` and `Data.given` mean nothing.
    corruption: str = "blocks"
    # Of "released": every row a second time with the inverse masks; off in the released scripts.
    complementary: bool = False
    # Of "released": False trains images alone, as the release does at 256 px.
    text_loss: bool = True

    def __post_init__(self):
        _check_choice(self, "corruption", ("blocks", "released"))
        if self.corruption == "released":
            allowed = 'corruption "released" needs '
            _check(self, "attention", self.attention == "full", f'{allowed}"full"')
            _check(self, "weighting", self.weighting == "mean", f'{allowed}"mean"')
            by_code = 'corruption "released" masks code by code anyway: it must be 0'
            _check(self, "partial_cells", self.partial_cells == 0, by_code)
        else:
            only = 'it is of corruption "released" alone'
            _check(self, "complementary", not self.complementary, only)
            _check(self, "text_loss", self.text_loss, only)
        _check_fraction(self, "partial_cells")
        _check_choice(self, "attention", ("step_causal", "full", "truncated"))
        numbers = self.num_masked_blocks, self.text_masked_blocks
        _check(
            self,
            "attention",
            self.attention != "truncated" or (numbers, self.blocks) == ((1, 1), "schedule"),
            'with "truncated", masked blocks would see each other: it needs num_masked_blocks=1,'
            ' text_masked_blocks=1 and blocks="schedule"',
        )
        _check_choice(self, "blocks", ("schedule", "uniform"))
        _check_choice(self, "weighting", ("1/t", "mean"))
        _check_choice(self, "time_policy", ("uniform", "cosine", "logit_normal", "mode"))
        _check(self, "num_clean_blocks", self.num_clean_blocks >= 1, "it must be 1 or more")
        _check(self, "merge_cells", self.merge_cells >= -1, "it must be -1 or more")
        for name in ("plan_steps", "plan_text_steps"):
            steps = getattr(self, name)
            _check(
                self, name, bool(steps) and min(steps) >= 1, "at least one number, all 1 or more"
            )
        for name in ("num_masked_blocks", "text_masked_blocks"):
            _check(self, name, 1 <= getattr(self, name) <= 16, "it must lie in 1..16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW with warm-up and cosine decay (paper Table 9 for the release's values)."""

    # "muon" (ours, for small models from scratch): Muon for matrices, Adam for everything else.
    kind: str = "adamw"
    learning_rate: float = 2e-5
    final_fraction: float = 0.05  # of learning_rate, reached at the last step
    warmup_steps: int = 100
    b1: float = 0.99  # the released scripts: 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # global norm of the gradient
    ema: float = 0.0  # decay of the parameter average a step; 0 keeps none
    # Of both moments of Adam; "bfloat16" halves them: they are rounded up or down at random.
    moments_dtype: str = "float32"
    # Parameters with a learning rate of their own: (regular expression, rate). The first that is
    # found in the path of a parameter, such as `vision/tower/layers/q/kernel`, is for it. A rate of
    # 0 freezes: no gradient and no moments are kept. The release: ((r"^vision/tower/", 2e-6),).
    groups: tuple[Any, ...] = ()
    # Of what is not trained; "bfloat16" halves it, "int8" halves the matrices of the layers once
    # more (`models/quantize.py`; beside adapters alone), and the rest is bfloat16.
    frozen_dtype: str = "float32"

    def __post_init__(self):
        _check_choice(self, "kind", ("adamw", "muon"))
        _check_choice(self, "moments_dtype", ("float32", "bfloat16"))
        _check_choice(self, "frozen_dtype", ("float32", "bfloat16", "int8"))
        _check(
            self,
            "moments_dtype",
            self.kind == "adamw" or self.moments_dtype == "float32",
            'kind "muon" keeps float32',
        )
        _check(
            self,
            "groups",
            all(_is_group(group) for group in self.groups),
            'pairs of a regular expression and a rate of 0 or more, such as (("^vision/", 2e-6),)',
        )
        _check_positive(self, "learning_rate", "clip_norm", "eps")
        _check_fraction(self, "final_fraction", "b1", "b2")
        _check(self, "ema", 0 <= self.ema < 1, "it must lie in [0, 1)")
        _check(self, "warmup_steps", self.warmup_steps >= 0, "it must be 0 or more")
        _check(self, "weight_decay", self.weight_decay >= 0, "it must be 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (arXiv:2106.09685): all else is frozen, but for `also` and the groups."""

    rank: int = 0  # 0: no adapters
    alpha: float = 32.0  # an adapter adds (alpha / rank) (x A) B
    # Regular expression that is found in the paths of the matrices that get an adapter, such as
    # `joint_layers/generation/q`: all matrices inside the layers of both branches.
    targets: str = "^(joint|split)_layers/"
    # Likewise, of parameters that are trained whole: the base model has no registers of use.
    also: str = "^register_"

    def __post_init__(self):
        _check(self, "rank", self.rank >= 0, "it must be 0 or more")
        _check_positive(self, "alpha")
        for name in ("targets", "also"):
            _check(self, name, _is_pattern(getattr(self, name)), "a regular expression")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Length of a run and what it leaves behind."""

    stage: str = "denoiser"  # denoiser | vq
    train_steps: int = 1000
    batch_size: int = 16  # examples; as many rows, but for `data.packing`
    microbatches: int = 1  # parts of a batch, one after another; the gradient is that of the whole
    # Tokens of a row whose logits exist at a time, for large vocabularies; 0: all of them.
    loss_chunk: int = 0
    # Steps in a row whose gradient is not finite that are left out; one more ends the run.
    skip_steps: int = 0
    # Sizes of the mesh's axes, of data, fsdp, tensor and sequence; -1: all devices that are left.
    # Without any the run is one device's.
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    # The run ends, and the learning rate reaches its end, after this many seconds of training
    # if that comes first; 0: steps alone decide.
    seconds: float = 0.0
    checkpoint_seconds: float = 120.0  # time between saved states
    # States that stay: the newest, the one with the best score of images (where some are drawn),
    # and those of every so many steps; 0: no others.
    keep_states: int = 2
    keep_every: int = 0
    picture_seconds: float = 180.0  # time between grids of sampled images; 0: none by the clock
    eval_every: int = 0  # steps between them, which a clock does not move; 0: none by steps
    # Steps. Several processes also agree then on whether it is time to save or to draw.
    log_every: int = 20
    init_from: str = ""  # a checkpoint folder or bundled name whose parameters to start from
    eval_prompts: int = 64  # prompts a task in the report; 0: no report

    def __post_init__(self):
        _check_choice(self, "stage", ("denoiser", "vq"))
        _check_positive(
            self, "train_steps", "batch_size", "checkpoint_seconds", "log_every", "microbatches",
            "keep_states",
        )  # fmt: skip
        _check(
            self,
            "microbatches",
            self.batch_size % self.microbatches == 0,
            f"it must divide {self.batch_size=}",
        )
        _check(
            self,
            "mesh",
            all(size > 0 or size == -1 for size in self.mesh.values())
            and list(self.mesh.values()).count(-1) <= 1,
            "sizes above 0, at most one of them -1",
        )
        for name in (
            "seconds", "picture_seconds", "eval_every", "eval_prompts", "loss_chunk", "skip_steps",
            "keep_every",
        ):  # fmt: skip
            _check(self, name, getattr(self, name) >= 0, "it must be 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """One way of unmasking a response (paper Sec. 3.2; the released ones, spec Sec. 6 and 7)."""

    preset: str = ""  # "": sparse for a step-causal model, dense for a "full" one
    text_preset: str = ""  # of text; also prefix, fast_dllm_prefix, fast_dllm_dual. "": as preset
    num_steps: int = 12  # image steps
    # What "dense" decodes one at a time: "cell", as all other presets do, for models that were
    # trained on whole cells; "code", as LaViDa-O does (a cell may be known in part). Conversion of
    # a released checkpoint writes "code".
    grid: str = "cell"
    # Passes inside a step, each of which decodes as many codes of every cell; of whole cells only.
    cell_passes: int = 1
    # Steps of an image that would decode fewer cells are merged with those behind them; of whole
    # cells in a fixed order only. 0: none are. What changes from step to step then changes over the
    # merged steps of an image without given cells.
    merge_cells: int = 0
    # "confidence" (the released "mmada") chooses after each pass among all cells, which only
    # dense, none and p pass; every other order is fixed beforehand.
    order: str = "stratified"  # stratified | halton | random | raster | confidence
    order_seed: int = 42  # -1: every image has the order of its own seed
    schedule: str = "shift"  # shift | cosine | cosine2 | exp | logit_normal | linear
    shift: float = 3.0
    # Gumbel noise on the log probability that "confidence" ranks by; it falls from this to the
    # share `confidence_noise_end` of it.
    confidence_noise: float = 1.0
    confidence_noise_schedule: str = "constant"  # constant | linear | cosine2 | shift | exp
    confidence_noise_end: float = 0.01
    confidence_noise_shift: float = 0.0  # of its schedule "shift"; 0: `shift`
    temperature: float = 1.0  # of image codes; falls to the share `temperature_end`
    temperature_schedule: str = "constant"  # constant | linear | cosine2 | shift | exp
    temperature_end: float = 1.0
    top_k: int = 0  # image codes that may be drawn, the most probable ones; 0: all
    top_p: float = 1.0  # the fewest image codes that hold this probability may be drawn; 1: all
    guidance: float = 0.0  # 0: one row; g: (1+g) cond - g uncond
    guidance_edit: float = -1.0  # of edits, in place of `guidance`; -1: the same
    guidance_image: float = 0.0  # edits: weight of the second row
    guidance_schedule: str = "constant"  # constant | linear | cosine2 | shift | exp
    guidance_end: float = 1.0  # both guidance scales fall to this share
    # First and last guided step as shares of num_steps; step i of 1, 2, ... is guided where
    # int(first * num_steps) <= i <= int(last * num_steps).
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    # What the second of the three rows of an edit keeps: "source", ours, the source cells and the
    # headers; or the released edit modes 0 to 3: "source_only"; everything but the source cells,
    # "no_source"; the text, "no_image"; the image seen and the source cells, "no_text".
    edit_guidance: str = "source"
    # Registers passed; -1: as many as trained. In images they may fall by halves, step by step, to
    # `registers_end`: many stand in for much, few for little. -1: they do not fall.
    registers: int = -1
    registers_end: int = -1
    text_temperature: float = 0.0
    text_top_k: int = 0  # as `top_k`, of text; read where its temperature is above 0
    text_top_p: float = 1.0
    text_steps: int = 8  # steps a text block
    text_step_ratio: float = 0.0  # steps a text block as a share of its tokens; 0: text_steps
    text_schedule: str = "even"  # inside a text block: even, or one of `schedule`
    text_shift: float = 3.0  # of the text schedule "shift"
    # What ranks the tokens of a text block: probability of the drawn one, margin between the two
    # most probable, entropy (least first), random.
    text_confidence: str = "probability"  # probability | margin | entropy | random
    # How many of them a step commits: as many as the schedule says, all that are at least as
    # confident as `text_threshold`, by Fast-dLLM's factor rule, or those of least entropy while
    # the entropies of all but the last sum up to at most `text_entropy`. The last three commit at
    # least one, at most `text_most` if that is not 0, and end a text block early.
    text_commit: str = "count"  # count | threshold | factor | entropy
    text_threshold: float = 0.9
    text_factor: float = 1.0  # n tokens together need a confidence of 1 - factor / (n + 1)
    text_entropy: float = 0.1  # nats; ranks by entropy, whatever `text_confidence` says
    text_most: int = 0
    # Text blocks from first to last: left_to_right, right_to_left, random (by `order_seed`), or
    # their numbers, such as "2,0,1".
    text_block_order: str = "left_to_right"
    # Text as the released code writes it: the mask token may be drawn (and then stays to be
    # decoded), nothing ends at end-of-text, and the factor rule never leaves one token to itself.
    released_behaviour: bool = False
    plan: bool = True  # lay the image out in text first, where the task allows
    # Matrices of the layers in 8 bits: "" not; "int8" the weights alone; "w8a8" activations too;
    # "fp8" both in float8. Other numbers come out, and on few tokens sooner.
    quantize: str = ""
    # Of the decoder of images. In bfloat16 grey levels of bundled ones move by at most 4 of 255
    # (docs/speed.md). Codes of images given are always found in float32.
    vq_dtype: str = "float32"  # float32 | bfloat16

    def __post_init__(self):
        for name, choices in (("preset", PRESETS), ("text_preset", (*PRESETS, *TEXT_PRESETS))):
            _check(
                self,
                name,
                getattr(self, name) in ("", *choices),
                f"choose one of {', '.join(choices)}, or leave it empty",
            )
        schedules = ("shift", "cosine", "cosine2", "exp", "logit_normal", "linear")
        for name, choices in (
            ("grid", ("cell", "code")),
            ("order", ("stratified", "halton", "random", "raster", "confidence")),
            ("schedule", schedules),
            ("confidence_noise_schedule", ("constant", "linear", "cosine2", "shift", "exp")),
            ("temperature_schedule", ("constant", "linear", "cosine2", "shift", "exp")),
            ("guidance_schedule", ("constant", "linear", "cosine2", "shift", "exp")),
            ("edit_guidance", ("source", "source_only", "no_source", "no_picture", "no_text")),
            ("text_schedule", ("even", *schedules)),
            ("text_confidence", ("probability", "margin", "entropy", "random")),
            ("text_commit", ("count", "threshold", "factor", "entropy")),
            ("quantize", ("", *QUANTIZED)),
            ("vq_dtype", VQ_DTYPES),
        ):
            _check_choice(self, name, choices)
        _check_positive(
            self, "num_steps", "cell_passes", "text_steps", "shift", "text_shift", "text_factor"
        )
        for name in (
            "temperature", "text_temperature", "guidance", "guidance_image", "confidence_noise",
            "confidence_noise_shift", "top_k", "text_top_k", "text_entropy", "text_most",
        ):  # fmt: skip
            _check(self, name, getattr(self, name) >= 0, "it must be 0 or more")
        _check(
            self,
            "guidance_edit",
            self.guidance_edit >= 0 or self.guidance_edit == -1,
            "it must be 0 or more, or -1",
        )
        _check_fraction(
            self,
            "confidence_noise_end",
            "temperature_end",
            "guidance_end",
            "text_step_ratio",
            "text_threshold",
        )
        _check_positive(self, "temperature_end")
        for name in ("order_seed", "registers", "registers_end"):
            _check(self, name, getattr(self, name) >= -1, "it must be -1 or more")
        _check(self, "merge_cells", self.merge_cells >= 0, "it must be 0 or more")
        _check(
            self,
            "text_block_order",
            self.text_block_order in TEXT_BLOCK_ORDERS or self.block_numbers is not None,
            f"choose one of {', '.join(TEXT_BLOCK_ORDERS)}, or numbers such as '2,0,1'",
        )
        for name in ("top_p", "text_top_p"):
            _check(self, name, 0 < getattr(self, name) <= 1, "it must lie in (0, 1]")
        _check(
            self,
            "text_most",
            self.text_most == 0 or self.text_commit != "count",
            'it must be 0 with text_commit="count", whose schedule says how many',
        )
        _check(
            self,
            "guidance_interval",
            len(self.guidance_interval) == 2
            and 0 <= self.guidance_interval[0] <= self.guidance_interval[1] <= 1,
            "two shares of the steps, 0 <= first <= last <= 1",
        )

    @property
    def block_numbers(self) -> tuple[int, ...] | None:
        """The numbers that `text_block_order` spells out; None if it spells none."""
        words = self.text_block_order.split(",")
        return tuple(map(int, words)) if all(word.strip().isdecimal() for word in words) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """One benchmark (`--mode=evaluate`; docs/evaluation.md)."""

    benchmark: str = "scenes"  # a file of `evals/`
    checkpoint: str = ""  # what is evaluated unless --checkpoint names another
    data: str = ""  # folder of the official files; docs/evaluation.md says how they lie there
    split: str = ""  # of the benchmark, where it has several
    limit: int = 0  # how many items, the first ones (scenes: of each task); 0: all
    batch_size: int = 8  # rows decoded together
    num_images: int = 1  # images drawn of each prompt
    prefix: str = ""  # in front of every prompt of an image
    max_new_tokens: int = 32  # room for an answer, rounded up to whole text blocks

    def __post_init__(self):
        _check_positive(self, "batch_size", "num_images", "max_new_tokens")
        _check(self, "limit", self.limit >= 0, "it must be 0 or more")
        _check(
            self,
            "benchmark",
            self.benchmark.isidentifier(),
            "the name of a file of sparse_lavida_jax/evals, such as geneval",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment."""

    name: str = "unnamed"  # the run directory is runs/<name> unless --workdir says otherwise
    seed: int = 0
    # The language of prompts (`data/templates.py: PromptLanguage`): scenes | chat, that of a
    # LaViDa-O. "": found from the rest, as for model folders that were written without it.
    prompts: str = ""
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
        _check_choice(self, "prompts", ("scenes", "chat"))
        if self.train.stage == "vq" and (self.lora.rank or self.optimizer.groups):
            raise ConfigError(
                "Train.stage='vq' trains the whole image tokenizer: it takes neither Lora.rank nor"
                " Optimizer.groups."
            )
        if self.data.source == "prepared" and not self.train.init_from:
            raise ConfigError(
                "Data.source='prepared' takes the tokenizers that lie beside a model: name its"
                " folder in train.init_from (a released one is converted with --mode=convert)."
            )
        if self.optimizer.frozen_dtype == "int8" and not self.lora.rank:
            raise ConfigError(
                "Optimizer.frozen_dtype='int8' holds the base of adapters in 8 bits: give a"
                " Lora.rank of 1 or more, or another dtype."
            )
        if self.lora.rank and self.sampling.quantize:
            raise ConfigError(
                f"Sampling.quantize={self.sampling.quantize!r} rounds matrices that adapters stand"
                " beside while they are trained: leave it empty, and sample in 8 bits from the"
                " model that the run leaves."
            )
        packing, parts = self.data.packing, self.train.microbatches
        if self.train.batch_size % (packing * parts):
            raise ConfigError(
                f"Train.batch_size={self.train.batch_size} examples do not make whole rows of"
                f" Data.packing={packing} in each of Train.microbatches={parts}."
            )
        if self.diffusion.corruption == "released" and (
            packing > 1 or self.data.length_buckets > 1
        ):
            raise ConfigError(
                "Diffusion.corruption='released' fills rows up with end-of-text that is learned:"
                " it takes neither Data.packing nor Data.length_buckets."
            )


def build(schema: type[T], given: ml_collections.ConfigDict | dict[str, Any]) -> T:
    """Turns a config section, and the sections in it, into its frozen dataclass.

    Raises:
        ConfigError: an unknown name (lists the known ones), a wrong type, or a value out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(schema)}  # type: ignore[arg-type]
    if unknown := sorted(set(given) - set(fields)):
        raise ConfigError(
            f"{schema.__name__} has no {', '.join(unknown)}. It has: {', '.join(fields)}."
        )
    hints = typing.get_type_hints(schema)
    values = {name: _convert(schema, name, hints[name], given[name]) for name in given}
    return schema(**values)


def to_dict(config: Any) -> dict[str, Any]:
    """Returns plain dicts, lists and scalars that `json` can write and `build` can read."""
    return dataclasses.asdict(config)


def changes(settings: Any) -> dict[str, Any]:
    """Returns what is not the default, section by section, as `to_dict` has it."""
    plain, defaults, found = to_dict(settings), type(settings)(), {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        inside = changes(value) if dataclasses.is_dataclass(value) else plain[field.name]
        if value != getattr(defaults, field.name):
            found[field.name] = inside
    return found


def _convert(schema: type, name: str, kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else build(kind, value)  # type: ignore[arg-type]
    origin = typing.get_origin(kind) or kind
    if isinstance(origin, types.UnionType):
        return value
    if origin is dict:
        of = typing.get_args(kind)[1]
        if dataclasses.is_dataclass(of):
            return {str(key): _convert(schema, name, of, one) for key, one in dict(value).items()}
        return {str(key): of(weight) for key, weight in dict(value).items()}
    if origin is tuple:
        return tuple(tuple(item) if isinstance(item, list | tuple) else item for item in value)
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, origin) or (origin is int and isinstance(value, bool)):
        raise ConfigError(
            f"{schema.__name__}.{name}={value!r} is a {type(value).__name__}; "
            f"it must be a {origin.__name__}."
        )
    return value
