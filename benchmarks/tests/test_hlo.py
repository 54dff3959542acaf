# SPDX-License-Identifier: Apache-2.0
"""Operations in loops count for every iteration, and collectives are those a mesh needs."""

import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import phase_programs
import pytest
import stand_ins
import tiny
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from benchmarks import aot, hlo
from sparse_lavida_jax import config, train
from sparse_lavida_jax.models import parameters, sharding
from sparse_lavida_jax.training import memory

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
PROGRAM = """\
HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}

%multiplied (a: f32[8,4]) -> f32[8,4] {
  ROOT %product = f32[8,4] convolution(f32[8,4] %a, f32[4,4] %b), dim_labels=bf_io->bf
}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %gathered = bf16[8,16]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={1}
  %work = f32[8,4]{1,0} fusion(%gathered), kind=kLoop, backend_config={"estimated_cycles":"100"}
  %more = f32[8,4] fusion(%work), calls=%multiplied, backend_config={"estimated_cycles":"40"}
  ROOT %carry = (s32[], f32[8,4]) tuple(%next, %more)
}

%condition (p: (s32[], f32[8,4])) -> pred[] {
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %most = s32[]{:T(128)} constant(9)
  ROOT %less = pred[] compare(%i, %most), direction=LT
}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %loop = (s32[], f32[8,4]) while(%start), condition=%condition, body=%body
  %started = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%a), replica_groups=[2,4]<=[8]
  %parts = f32[2,4]{1,0} reduce-scatter(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %both = (f32[3]{0}, bf16[4]{0}) all-reduce(%b, %c), replica_groups={{0,1}}, to_apply=%add
  %kernel = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call", backend_config=KERNEL
}
""".replace("KERNEL", '{"cost_estimate":{"flops":"7"},"estimated_cycles":"9223372036854775807"}')


def test_loops_count_as_often_as_they_run():
    found = {row.result: (row.kind, row.bytes, row.runs) for row in hlo.collectives(PROGRAM)}
    assert found == {
        "bf16[8,16]": ("all-gather", 5 * 8 * 16 * 2, 5),
        "f32[8,4]": ("all-gather", 8 * 4 * 4, 1),
        "4 x f32[2,4]": ("reduce-scatter", 8 * 4 * 4, 1),
        "f32[3]+bf16[4]": ("all-reduce", 3 * 4 + 4 * 2, 1),
    }
    assert hlo.cycles(PROGRAM) == 700  # a kernel unknown to the compiler has none
    assert hlo.product_cycles(PROGRAM) == hlo.product_cycles(PROGRAM, 5) == 200
    assert hlo.cycles(PROGRAM, 6) == 0
    assert hlo.kernel_flops(PROGRAM) == 7


def test_seconds_are_projected_from_estimates_and_numbers_of_vendors():
    compiled = types.SimpleNamespace(as_text=lambda: PROGRAM)
    told = aot.AotProgram("v5p:4x4x4", {"fsdp": 64}, compiled, (), 0.0).projected()
    compute, attention, exchange = 700 / 1.75e9, 7 / (0.5 * 459e12), 1556 / 600e9
    assert told == pytest.approx({
        "compute_s": compute,
        "attention_s": attention,
        "exchange_s": exchange,
        "overlapped_s": compute + attention,
        "apart_s": compute + attention + exchange,
    })  # fmt: skip


def test_a_program_of_ours_sends_what_its_loop_sends():
    """Eight devices gather a matrix in each of five rounds."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (None, "fsdp")))

    def run(x, layers):
        def layer(x, matrix):
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(matrix, whole)), None

        return jax.lax.scan(layer, x, layers)[0]

    given = (
        jax.ShapeDtypeStruct((4, 16), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((5, 16, 16), jnp.float32, sharding=NamedSharding(
            mesh, PartitionSpec(None, None, "fsdp"))),
    )  # fmt: skip
    text = tiny.quick_jit(run).lower(*given).compile().as_text()
    (row,) = hlo.collectives(text)
    assert (row.kind, row.bytes) == ("all-gather", 5 * 16 * 16 * 4)
    assert split.spec == PartitionSpec(None, "fsdp")


@pytest.mark.slow
def test_a_step_gathers_weights_and_no_rows_and_sums_gradients():
    """Checks the kinds of collectives in the partitioned module, and their size by a formula.

    Rows and matrices are split over the same devices: either could be gathered for a product, and
    in this small batch the rows are smaller.
    """
    model = tiny.model_settings(codes_per_token=4, remat="layer", num_layers=4, num_heads=4)
    settings = config.Config(model=model, train=config.Train(loss_chunk=8))
    mesh, batch = Mesh(np.array(jax.devices()[:8]), ("fsdp",)), memory.BatchSize(8, 16, 24)
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    with phase_programs.unchecked():
        step = aot.step_on(settings, mesh, batch, options=options)
    found = hlo.collectives(step.text)
    gathered = {row.result for row in found if row.kind == "all-gather"}
    heads = model.num_heads * model.head_dim
    assert {f"f32[{model.width},{heads}]", f"f32[{model.width},{model.mlp_hidden}]"} <= gathered
    for tokens in (batch.understanding, batch.generation):
        assert not any(
            f"[8,{tokens},{width}]" in row for width in (heads, 32, 48) for row in gathered
        )
    assert any(f"f32[{model.width},{heads}]" in row.result for row in found
               if row.kind in ("all-reduce", "reduce-scatter"))  # fmt: skip
    sent = step.exchanged()
    assert sum(sent.values()) - sent["all-gather"] - sent["all-reduce"] < 0.05 * sum(sent.values())
    expected = sum(aot.expected_bytes(settings, {"fsdp": 8}, batch).values())
    assert expected / 1.5 < sum(sent.values()) < 1.5 * expected
    assert step.whole(2**9) == []


def test_the_papers_run_over_its_own_mesh_holds_nothing_large_whole():
    """From the config alone: there is no model at its `init_from`."""
    settings = config.read(CONFIGS / "sft_1024.py")
    axes = aot.training_axes(settings, "v6e:8x8")
    assert axes == {"data": 1, "fsdp": 64}
    with phase_programs.unchecked():
        state = jax.eval_shape(lambda: memory.first_state(settings))
    assert sum(x.size for x in jax.tree.leaves(state.params)) > 10.4e9
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    for name, x in parameters.by_name(state).items():
        assert x.size < 2**22 or sharding.shared_by(name, x.shape, mesh) == 64, name


def test_a_mesh_that_does_not_make_up_the_chips_is_refused():
    settings = stand_ins.settings(train={"mesh": {"fsdp": 3}})
    with pytest.raises(config.ConfigError, match=r"Train.mesh=fsdp=3 .* the 64 devices"):
        aot.training_axes(settings, "v6e:8x8")


def test_the_state_that_is_compiled_is_the_one_that_a_run_starts_with():
    settings = stand_ins.settings(optimizer={"ema": 0.9, "groups": (("generation", 1e-3),)})
    with phase_programs.unchecked():
        begun = jax.eval_shape(lambda: train.init_state(settings, tiny.denoiser(settings.model)))
        compiled = jax.eval_shape(lambda: memory.first_state(settings))
    assert parameters.by_name(compiled) == parameters.by_name(begun)


GPU_PROGRAM = """\
HloModule jit_run

%product (a: bf16[8,16], b: bf16[16,4]) -> bf16[8,4] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[16,4]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%written (c: f32[4,100], n: f32[1,100], i: s32[]) -> f32[4,100] {
  %c = f32[4,100]{1,0} parameter(0)
  %n = f32[1,100]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %update = f32[4,100]{1,0} dynamic-update-slice(%c, %n, %i, %i)
}

%sliced (c: f32[4,100], i: s32[]) -> f32[1,100] {
  %c = f32[4,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %slice = f32[1,100]{1,0} dynamic-slice(%c, %i, %i), dynamic_slice_sizes={1,100}
}

%inner (p: (s32[], f32[4,100])) -> (s32[], f32[4,100]) {
  %p = (s32[], f32[4,100]) parameter(0)
  %held = f32[4,100]{1,0} get-tuple-element(%p), index=1
  %i = s32[] get-tuple-element(%p), index=0
  %read = f32[1,100]{1,0} fusion(%held, %i), kind=kLoop, calls=%sliced
  ROOT %out = (s32[], f32[4,100]) tuple(%i, %held)
}

%commands (p: (s32[], f32[4,100], bf16[8,16], bf16[16,4])) -> f32[4,100] {
  %p = (s32[], f32[4,100], bf16[8,16], bf16[16,4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %held = f32[4,100]{1,0} get-tuple-element(%p), index=1
  %x = bf16[8,16]{1,0} get-tuple-element(%p), index=2
  %w = bf16[16,4]{1,0} get-tuple-element(%p), index=3
  %made = bf16[8,4]{1,0} fusion(%x, %w), kind=kCustom, calls=%product
  %gemm = (bf16[8,4]{1,0}, s8[64]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", GEMM
  %new = f32[1,100]{1,0} broadcast(%i), dimensions={}
  %changed = f32[4,100]{1,0} fusion(%held, %new, %i), kind=kLoop, calls=%written
  %looped = (s32[], f32[4,100]) while(%p), condition=%never, body=%inner, FIVE
  ROOT %copied = f32[4,100]{1,0} copy(%changed)
}

%steps (p: (s32[], f32[4,100], bf16[8,16], bf16[16,4])) -> f32[4,100] {
  %p = (s32[], f32[4,100], bf16[8,16], bf16[16,4]) parameter(0)
  ROOT %all = f32[4,100]{1,0} call(%p), to_apply=%commands
}

ENTRY %main (p: (s32[], f32[4,100], bf16[8,16], bf16[16,4])) -> f32[4,100] {
  %p = (s32[], f32[4,100], bf16[8,16], bf16[16,4]) parameter(0)
  %before = bf16[16,4]{1,0} get-tuple-element(%p), index=3
  %moved = bf16[16,4]{1,0} copy(%before)
  ROOT %loop = f32[4,100]{1,0} while(%p), condition=%goes_on, body=%steps
}
"""
GPU_PROGRAM = GPU_PROGRAM.replace("FIVE", 'backend_config={"known_trip_count":{"n":"5"}}').replace(
    "GEMM", 'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
)


def test_kernels_of_a_gpu_are_counted_by_their_work():
    """Inside the loop of steps; what is sliced, or written in place, counts as the slice."""
    found = {one.name: one for one in hlo.kernels(GPU_PROGRAM)}
    assert {name: (one.kind, one.in_step, one.runs) for name, one in found.items()} == {
        "moved": ("copies", False, 1),
        "made": ("products", True, 1),
        "__cublas$gemm": ("products", True, 1),
        "new": ("others", True, 1),
        "changed": ("others", True, 1),
        "read": ("others", True, 5),
        "copied": ("copies", True, 1),
    }
    operands = 2 * (8 * 16 + 16 * 4)
    assert found["made"].operations == found["__cublas$gemm"].operations == 2 * 8 * 16 * 4
    assert found["made"].bytes == operands + 2 * 8 * 4
    assert found["changed"].bytes == 2 * 400 + 4 and found["changed"].made == ()
    assert found["read"].bytes == 2 * 400 + 4
    assert found["copied"].bytes == 2 * 1600 and found["copied"].made == ((4, 100),)
    assert found["read"].seconds(1.0, 804.0) == 5.0


def test_a_kernel_that_changes_an_array_in_place_does_not_read_all_of_it():
    program = """\
ENTRY %main (x: bf16[8,4], cache: bf16[3,99,4]) -> (bf16[8,4], bf16[3,99,4]) {
  %x = bf16[8,4]{1,0} parameter(0)
  %cache = bf16[3,99,4]{2,1,0} parameter(1)
  ROOT %out = (bf16[8,4]{1,0}, bf16[3,99,4]{2,1,0}) custom-call(%x, %cache), KERNEL
}
""".replace(
        "KERNEL",
        'custom_call_target="mosaic_gpu_v2", output_to_operand_aliasing={{1}: (1, {})}, a="b"',
    )
    (kernel,) = hlo.kernels(program)
    assert (kernel.made, kernel.read) == (((8, 4),), ((8, 4), (3, 99, 4)))
    assert kernel.bytes == 2 * 2 * 8 * 4


def test_attention_of_a_described_gpu_reads_one_layer_of_the_cache():
    program = """\
ENTRY %main (q: bf16[2,64,256], k: bf16[3,2,128,256], v: bf16[3,2,128,256]) -> bf16[2,64,256] {
  %q = bf16[2,64,256]{2,1,0} parameter(0)
  %k = bf16[3,2,128,256]{3,2,1,0} parameter(1)
  %v = bf16[3,2,128,256]{3,2,1,0} parameter(2)
  ROOT %out = (bf16[2,64,256]{2,1,0}) custom-call(%q, %k, %v), KERNEL
}
""".replace("KERNEL", 'custom_call_target="mosaic_gpu_v2", op_name="step_causal_attention"')
    (kernel,) = hlo.kernels(program)
    assert kernel.kind == "attention"
    assert kernel.operations == 4 * 2 * 64 * 128 * 256
    assert kernel.bytes == 2 * (2 * 2 * 64 * 256 + 2 * 2 * 128 * 256)


def test_a_convolution_of_cudnn_is_a_product():
    program = """\
ENTRY %main (x: bf16[1,8,6,4], k: bf16[16,3,3,4]) -> bf16[1,8,6,16] {
  %x = bf16[1,8,6,4]{3,2,1,0} parameter(0)
  %k = bf16[16,3,3,4]{3,2,1,0} parameter(1)
  ROOT %out = (bf16[1,8,6,16]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), LABELS
}
""".replace("LABELS", 'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"')
    (kernel,) = hlo.kernels(program)
    assert (kernel.kind, kernel.runs) == ("products", 1)
    assert kernel.operations == 2 * (8 * 6 * 16) * (3 * 3 * 4)
    assert kernel.bytes == 2 * (8 * 6 * 4 + 16 * 3 * 3 * 4 + 8 * 6 * 16)
