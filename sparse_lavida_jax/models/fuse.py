# SPDX-License-Identifier: Apache-2.0
"""Parameters in the form that is fastest to read while sampling.

Parameters are stored, trained and exported unfused and stacked. A sampling step reads every matrix
once and does little with it, so what matters is how often, and in what pieces, it is read:

* queries, keys and values of a branch are one matrix, as are gate and up of its MLP;
* the output projection is cut to the width of the branch that uses it;
* on GPUs the layers are not stacked: a layer that is taken from a stack by index inside a loop is
  copied first, which doubles the memory traffic. The same holds for a tile of the text head. On
  TPUs the stack is scanned, as in training;
* parameters that the task never reads are left out.

Over a mesh, every device holds its own columns of queries, keys and values (and of gate and up)
side by side, so that taking them apart moves nothing between devices.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from sparse_lavida_jax import config
from sparse_lavida_jax.kernels.common import STEP_LANES
from sparse_lavida_jax.kernels.sharded import HEADS_AXIS
from sparse_lavida_jax.models import sharding, text_head
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.layers import Branch, Layer, Linear, RmsNorm, Rotary, rotate
from sparse_lavida_jax.models.quantize import QuantizedLinear, side_by_side
from sparse_lavida_jax.programs.persistent_jit import persistent_jit
from sparse_lavida_jax.tags import STREAMS, AnyArray

Task = Literal["image", "text", "both"]
# Parts whose sum is a product: float32 ones, or the product itself, before its scales.
Product = tuple[Float[Array, "g b s e"], Any]
# A residual stream, and the product that is still to be added to it, if there is any.
Pending = tuple[Float[Array, "b s e"], Product | None]

# A product of few tokens is computed in parts, each from a share of the inputs, as its output has
# fewer tiles than a GPU has processors. Ours, not tuned on a GPU.
PRODUCT_PARTS, MOST_TOKENS_IN_PARTS = 4, 512

# What a task never reads: parts of a model, and branches of its layers.
UNREAD: dict[Task, tuple[str, ...]] = {
    "image": ("text_head", "split_layers/understanding"),
    "text": (
        *("image_embedding", "image_head", "register_generation", "cell_row", "cell_column"),
        *("joint_layers/generation", "split_layers/generation"),
    ),
    "both": (),
}


class Matrix(Linear):
    """A `Linear` with a given kernel."""

    def __init__(self, kernel: Float[Array, "*n i o"]):
        self.kernel = nnx.Param(kernel)


class TiledHead(nnx.Module):
    """A `Linear` whose columns are stored in tiles, each a separate array (`text_head.draw`)."""

    def __init__(self, kernel: Float[Array, "e v"], tile: int):
        self.tiles = nnx.List([Matrix(columns) for columns in _tiles(kernel, tile=tile)])

    def __call__(self, x: Float[Array, "*b e"]) -> Float[Array, "*b v"]:
        return jnp.concatenate([tile(x) for tile in self.tiles], axis=-1)


class FusedBranch(Branch):
    """A branch as four matrices: into attention, out of it, into the MLP, out of it.

    Args:
        branch: of one layer, or of a stack. Its matrices are removed from it, so that each can be
            freed when it has been copied.
        attn_out: the output projection shared by the layer's branches.
        dtype: of the parameters.
        devices: that its columns are split over.
        by_layer: whether its matrices will be arrays of their own: in 8 bits, [out, in].
    """

    def __init__(
        self,
        branch: Branch,
        attn_out: Linear,
        dtype: jnp.dtype,
        devices: int = 1,
        *,
        by_layer: bool = False,
    ):
        def matrix(*linears: Linear, width: int | None = None) -> Linear:
            def joined(
                arrays: Iterable[Array], dtype: jnp.dtype | None = None, *, transpose: bool = False
            ) -> Array:
                given = [*arrays]
                same_type = dtype in (None, given[0].dtype)
                is_whole = same_type and width in (None, given[0].shape[-1])
                if len(given) == 1 and is_whole and not transpose:
                    return given[0]
                return _joined(
                    given, width=width, dtype=dtype, devices=devices, transpose=transpose
                )

            narrow = [one for one in linears if isinstance(one, QuantizedLinear)]
            if narrow:
                made = side_by_side(narrow, joined, transpose=by_layer)
            else:
                made = Matrix(joined(map(_kernel, linears), dtype))
            # Otherwise all copies may be made before the first original is freed.
            return jax.block_until_ready(made)

        def take(owner: nnx.Module, *names: str) -> Linear:
            linears = [getattr(owner, name) for name in names]
            for name in names:
                delattr(owner, name)
            return matrix(*linears)

        self.devices = devices
        self.num_heads, self.dtype = branch.num_heads, branch.dtype
        self.attn_norm = _cast(branch.attn_norm, dtype)
        self.out = matrix(attn_out, width=branch.q.kernel.shape[-2])
        self.into = take(branch, "q", "k", "v")
        self.mlp_norm = _cast(branch.mlp_norm, dtype)
        self.gate_up = take(branch.mlp, "gate", "up")
        self.down = take(branch.mlp, "down")

    def qkv(
        self, x: Float[Array, "b s e"], turn: Rotary
    ) -> tuple[Float[Array, "b s hd"], Float[Array, "b s hd"], Float[Array, "b s hd"]]:
        x = self.attn_norm(x).astype(self.dtype)
        q, k, v = _parted(self.into(x), 3, self.devices)
        q, k = (rotate(part, turn, self.num_heads) for part in (q, k))
        return q, k, v

    def feed_forward(self, x: Float[Array, "b s e"]) -> Float[Array, "b s e"]:
        return x + self.down(self._gated(self.gate_up(self.mlp_norm(x).astype(self.dtype))))

    def _gated(self, hidden: Float[Array, "b s f2"]) -> Float[Array, "b s f"]:
        gate, up = _parted(hidden, 2, self.devices)
        return jax.nn.silu(gate) * up

    # With the kernels of `step_gpu`, each of which may round what it returns to float8 (`Narrow`).

    @property
    def _is_narrow(self) -> bool:
        """Whether its matrices are in float8, and the MLP is as wide as the kernels ask for."""
        into, down = self.into, getattr(self, "down", None)
        is_fp8 = isinstance(into, QuantizedLinear) and into.method == "fp8"
        return (
            is_fp8
            and isinstance(down, QuantizedLinear)
            and down.kernel_t.shape[1] % STEP_LANES == 0
        )

    def begun(self, pending: Pending, kernels: Any) -> tuple[Float[Array, "b s e"], Array]:
        """Returns the residual stream, and queries, keys and values, not rotated, side by side.

        Args:
            kernels: `stack.StepKernels`, also below.
        """
        x, product = pending
        if product is None:
            return x, self.into(self.attn_norm(x).astype(self.dtype))
        x, normed = self._added(x, product, self.attn_norm, kernels)
        if not self._is_narrow:
            return x, self.into(normed)
        qkv, (of_tokens, of_outputs) = self._multiplied(self.into, normed)
        qkv = qkv.astype(jnp.float32) * of_tokens * of_outputs[None, None]
        return x, qkv.astype(self.dtype)

    def finished(
        self, x: Float[Array, "b s e"], attended: Float[Array, "b s hd"], kernels: Any
    ) -> Pending:
        """Returns the stream after attention and the MLP, of which the last sum is pending."""
        if not self._is_narrow:
            x, normed = self._added(
                x, (_in_parts(self.out, attended), None), self.mlp_norm, kernels
            )
            return x, (_in_parts(self.down, self._gated(self.gate_up(normed))), None)
        product, scales = self._multiplied(self.out, kernels.narrowed(attended, dtype=self.dtype))
        x, normed = self._added(x, (product[None], scales), self.mlp_norm, kernels)
        hidden, scales = self._multiplied(self.gate_up, normed)
        gated = kernels.narrowed(hidden, scales, dtype=self.dtype, gated=True)
        product, scales = self._multiplied(self.down, gated)
        return x, (product[None], scales)

    def _added(self, x: Float[Array, "b s e"], product: Product, norm: RmsNorm, kernels: Any):
        how = {"eps": norm.eps, "dtype": self.dtype, "narrow": self._is_narrow}
        return kernels.added(x, product[0], norm.weight[...], product[1], **how)

    def _multiplied(self, matrix: Any, narrow: Any) -> tuple[Array, Any]:
        """Returns a product with tokens in float8, and its scales."""
        x8, of_tokens = narrow
        product = matrix.unscaled(x8, jnp.dtype(self.dtype))
        return product, (of_tokens, matrix.scale[...].reshape(-1))


def _in_parts(matrix: Linear, x: Float[Array, "b s i"]) -> Float[Array, "g b s o"]:
    """Returns the parts of a product."""
    b, s, width = x.shape
    if not isinstance(matrix, Matrix) or b * s > MOST_TOKENS_IN_PARTS or width % PRODUCT_PARTS:
        return matrix(x)[None]
    kernel = matrix.kernel.astype(x.dtype).reshape(PRODUCT_PARTS, -1, matrix.kernel.shape[-1])
    x = x.reshape(b, s, PRODUCT_PARTS, -1)
    return jnp.einsum("bsgi,gio->gbso", x, kernel, preferred_element_type=jnp.float32)


class FusedLayer(Layer):
    """A layer of fused branches; a branch that is not needed is absent (`FusedBranch`)."""

    def __init__(
        self,
        layer: Layer,
        dtype: jnp.dtype,
        devices: int = 1,
        *,
        without: tuple[str, ...] = (),
        by_layer: bool = False,
    ):
        for name in STREAMS:
            branch = getattr(layer, name, None)
            if branch is not None and name not in without:
                made = FusedBranch(branch, layer.attn_out, dtype, devices, by_layer=by_layer)
                setattr(self, name, made)

    def finish(
        self, branch: Branch, x: Float[Array, "b s e"], attended: Float[Array, "b s hd"]
    ) -> Float[Array, "b s e"]:
        assert isinstance(branch, FusedBranch)
        return branch.feed_forward(x + branch.out(attended))


class FusedDenoiser(Denoiser):
    """A denoiser for sampling only: computes the same as the one it was made from."""

    def __init__(self, model: Denoiser, joint: list[FusedLayer] | FusedLayer, split, task: Task):
        dtype = jnp.dtype(model.settings.compute_dtype)
        own = ("joint_layers", "split_layers", *UNREAD[task])
        for name, value in vars(model).items():
            if not name.startswith("_") and name not in own:
                is_narrow = name in _multiplied(model.settings)
                setattr(self, name, _cast(value, dtype) if is_narrow else value)
        self.joint_layers, self.split_layers = (
            nnx.List(layers) if isinstance(layers, list) else layers for layers in (joint, split)
        )
        self.task = task
        tile = text_head.tile_of(model.settings.vocab_size)
        if isinstance(joint, list) and tile and task != "image":
            self.text_head = TiledHead(model.text_head.kernel[...].astype(dtype), tile)

    @property
    def text_kernel(self) -> Float[Array, "e v"] | tuple[Float[Array, "e _c"], ...]:
        self._check("text")
        if isinstance(self.text_head, TiledHead):
            return tuple(tile.kernel[...] for tile in self.text_head.tiles)
        return self.text_head.kernel[...]

    def text_logits(self, hidden: Float[Array, "b s e"]) -> Float[Array, "b s v"]:
        self._check("text")
        return super().text_logits(hidden)

    def image_logits(
        self, hidden: Float[Array, "b s e"], codes: Int[AnyArray, "b s g"] | None = None
    ) -> Float[Array, "b s g c"]:
        self._check("image")
        return super().image_logits(hidden, codes)

    def _check(self, kind: Task) -> None:
        if self.task not in (kind, "both"):
            raise ValueError(
                f"these parameters were made for the task {self.task!r} and cannot predict {kind}:"
                f" call for_inference with task={kind!r} or 'both'."
            )


def for_inference(
    model: Denoiser,
    *,
    task: Task = "both",
    by_layer: bool | None = None,
    mesh: Mesh | None = None,
    consume: bool = False,
) -> FusedDenoiser:
    """Returns the parameters fused for sampling, in the dtype they are multiplied in.

    Outputs match those of `model` to 2e-5 in float32: the products are the same, at most in another
    order. Only what changes is copied.

    Args:
        model: unfused, with arrays, or with shapes inside `jax.eval_shape`. Adapters must have
            been merged (`lora.merged`).
        task: "image" draws images and leaves out what only text uses; "text" writes text, about
            text and seen images, and leaves out what only generated images use.
        by_layer: whether every layer has its own arrays; by default on GPUs.
        mesh: that the parameters are split over, before and after.
        consume: whether `model` loses its layers, so that they are not held twice. Otherwise it is
            not changed.

    Raises:
        ValueError: the model is already fused, has adapters, or has no images but is to draw.
    """
    if isinstance(model, FusedDenoiser):
        raise ValueError(f"the parameters are fused already, for the task {model.task!r}.")
    if task == "image" and model.settings.understanding_only:
        raise ValueError("a model of text alone draws no images: use task='text'.")
    if by_layer is None:
        by_layer = jax.default_backend() == "gpu"
    dtype = jnp.dtype(model.settings.compute_dtype)
    devices = 1 if mesh is None else mesh.shape.get(HEADS_AXIS, 1)

    def fused(name: str) -> Any:
        stack = jax.tree.map(lambda leaf: leaf, getattr(model, name))  # of modules of its own
        if consume:
            delattr(model, name)
        without = tuple(part for part in STREAMS if f"{name}/{part}" in UNREAD[task])
        whole = FusedLayer(stack, dtype, devices, without=without, by_layer=by_layer)
        if not by_layer:
            return whole
        leaves, structure = jax.tree.flatten(whole)
        del stack, whole  # so that one matrix at a time is held twice
        parts = []
        while leaves:
            parts.append(jax.block_until_ready(_layers(leaves.pop(0))))
        return [jax.tree.unflatten(structure, one) for one in zip(*parts, strict=True)]

    joint, split = fused("joint_layers"), fused("split_layers")
    if by_layer and task == "image":  # the other stream ends with the keys and values of its last
        for name in ("out", "mlp_norm", "gate_up", "down"):
            delattr(joint[-1].understanding, name)
    whole = FusedDenoiser(model, joint, split, task)
    return whole if mesh is None else sharding.placed(whole, mesh)


def reads(task: Task) -> Callable[[str], bool]:
    """Returns a function that tells, by its name, whether a task reads a parameter."""
    return lambda name: not any(f"{name}/".startswith(f"{part}/") for part in UNREAD[task])


def dtypes(settings: config.Model) -> Callable[[str], str]:
    """Returns a function that tells, by its name, in which dtype a parameter is fused.

    Loaded in it, the parameters are fused to the same bits, without being held in float32 before.
    "" stands for the dtype that the parameter has.
    """
    parts = ("joint_layers", "split_layers", *_multiplied(settings))
    return lambda name: settings.compute_dtype if name.split("/")[0] in parts else ""


def _multiplied(settings: config.Model) -> tuple[str, ...]:
    """Returns the parts outside the layers that are held in the dtype they are multiplied in."""
    has_wide_residual = settings.residual_dtype != "compute"
    return (
        "text_embedding",
        "text_head",
        *(() if has_wide_residual else ("image_head", "final_norm")),
    )


def parameter_bytes(model: Denoiser) -> int:
    """Returns the bytes of all parameters."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model))


# With executables kept on disk, so that a model is loaded without compiling anything.


@persistent_jit()
def _layers(stack: Array) -> list[Array]:
    return [*stack]


@persistent_jit(static=("tile",))
def _tiles(kernel: Float[Array, "e v"], *, tile: int) -> list[Float[Array, "e _c"]]:
    return [kernel[:, start : start + tile] for start in range(0, kernel.shape[-1], tile)]


@persistent_jit(static=("width", "dtype", "devices", "transpose"))
def _joined(
    arrays: list[Array],
    *,
    width: int | None = None,
    dtype: jnp.dtype | None = None,
    devices: int = 1,
    transpose: bool = False,
) -> Array:
    """Concatenates columns, of each device separately; all at once if they cannot be split.

    Args:
        transpose: whether the result has them as rows.
    """
    own = [one[..., :width].astype(dtype or one.dtype) for one in arrays]
    if len(own) == 1:
        return own[0].mT if transpose else own[0]
    # As integers: XLA for CPUs converts bfloat16 to float32 first, and holds all of that.
    found, bits = own[0].dtype, f"uint{8 * own[0].dtype.itemsize}"
    shape = *own[0].shape[:-1], sum(one.shape[-1] for one in own)
    devices = _dividing(devices, own[0].shape[-1])
    own = [jax.lax.bitcast_convert_type(one, bits) for one in own]
    if devices > 1:  # a stack may have no layers, so that no axis can be -1
        own = [one.reshape(*one.shape[:-1], devices, one.shape[-1] // devices) for one in own]
    joined = jnp.concatenate(own, axis=-1).reshape(shape)
    joined = jax.lax.bitcast_convert_type(joined, found)
    return joined.mT if transpose else joined


def _parted(x: Float[Array, "b s _w"], number: int, devices: int) -> list[Float[Array, "b s _n"]]:
    """Undoes `_joined` for a product with it, of `number` equal parts."""
    own = x.reshape(*x.shape[:-1], _dividing(devices, x.shape[-1] // number), -1)
    return [part.reshape(*x.shape[:-1], -1) for part in jnp.split(own, number, axis=-1)]


def _dividing(devices: int, width: int) -> int:
    return 1 if width % devices else devices


def _cast(tree, dtype: jnp.dtype):
    def cast(leaf):
        return leaf if leaf.dtype == dtype else _joined([leaf], dtype=dtype)

    return jax.tree.map(cast, tree)


def _kernel(linear: Linear) -> Float[Array, "*n i o"]:
    if linear.lora_scale:
        raise ValueError("a matrix has an adapter: call lora.merged before for_inference.")
    return linear.kernel[...]
