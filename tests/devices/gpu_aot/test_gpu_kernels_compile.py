# SPDX-License-Identifier: Apache-2.0
"""Attention compiled to machine code for GPUs that are not present: few registers spill, or none.

This runs in a separate process, because the CUDA plugin is loaded when jax starts.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap

import jax
import pytest

from benchmarks.described import H200

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 11)
    or importlib.util.find_spec("jax_cuda13_plugin") is None
    or shutil.which("ptxas") is None,
    reason="compiling for GPUs without one needs jax 0.11 (Python 3.12), ptxas of CUDA 13, and"
    " the CUDA plugin of jax's version: pip install -e '.[aot-cuda]'",
)

MOST_SPILLED = 64  # bytes per thread, of a gradient compiled by Triton, which uses all registers

DEVICE = textwrap.dedent(f"""
    import jax

    from benchmarks.described import DescribedGpu

    sharding = DescribedGpu({H200!r}, "NVIDIA H200", {{}}).place()
    mesh = sharding.mesh
""")
OTHERS = {
    "NVIDIA H200": {},
    "NVIDIA A100": {
        "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES": "major: 8 minor: 0",
        "core_count: 132": "core_count: 108",
        "fpus_per_core: 128": "fpus_per_core: 64",
        "232448": "166912",  # shared memory of a block, and of a core
        "233472": "167936",
    },
    "NVIDIA L4": {
        "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES": "major: 8 minor: 9",
        "core_count: 132": "core_count: 58",
        "threads_per_core_limit: 2048": "threads_per_core_limit: 1536",
        "232448": "101376",
        "233472": "102400",
    },
    "NVIDIA B200": {
        "major: 9 minor: 0": "major: 10 minor: 0",
        "core_count: 132": "core_count: 148",
    },
}
BLOCKS = textwrap.dedent("""
    import jax.numpy as jnp

    from sparse_lavida_jax.kernels.attention import make_tables, step_causal_attention

    heads, head_dim = 32, 128

    def attend(q, k, v, tags, pulled):
        made = make_tables(*tags, implementation="blockwise")

        def call(q, k, v):
            return step_causal_attention(
                q, k, v, *tags, num_heads=heads, tables=made, implementation="blockwise"
            )

        out, pull_back = jax.vjp(call, q, k, v)
        return out, pull_back(pulled)

    for length in (4096, 8192):
        wide = jax.ShapeDtypeStruct((1, length, heads * head_dim), jnp.bfloat16, sharding=sharding)
        tag = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=sharding)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            traced = jax.jit(attend).trace(wide, wide, wide, (tag,) * 3, wide)
            program = traced.lower(lowering_platforms=("cuda",)).compile()
        print("bytes:", program.memory_analysis().temp_size_in_bytes)
    print("compiled")
""")
WEIGHTS = DEVICE + textwrap.dedent("""
    import sys

    import phase_programs

    model = phase_programs.settings(attention_implementation="pallas_gpu", num_registers=64)
    by_layer = {"stored": None, "by_layer": True}[sys.argv[2]]
    program = phase_programs.compiled(sys.argv[1], model, sharding, "cuda", by_layer=by_layer)
    for made in phase_programs.weights_made(program.hlo, program.weight_shapes):
        print("made:", made)
    for copy in phase_programs.copies(program.hlo, program.cache_shapes):
        print("copied:", copy)
    print("compiled")
""")
KERNEL = textwrap.dedent("""
    import sys

    import kernel_programs

    from sparse_lavida_jax.kernels import devices
    from sparse_lavida_jax.kernels.common import Shape

    heads, length = 32, 4096
    head_dim, kv_heads, num_tags = map(int, sys.argv[1:])

    def compile_kernel(module, sizes):
        shape = Shape(heads, kv_heads, head_dim, head_dim**-0.5, sizes)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            traced = kernel_programs.traced(module, shape, sharding, length, num_tags)
            traced.lower(lowering_platforms=("cuda",)).compile()
        print("compiled")
""")
MOSAIC = textwrap.dedent("""
    import dataclasses
    import itertools

    from sparse_lavida_jax.kernels import pallas_gpu
    from sparse_lavida_jax.kernels.tile_lists import GpuSizes

    def choices(direction, kernel):
        # Of one kernel, as fields of `GpuSizes`.
        found = [
            {name: n for name, n in dataclasses.asdict(c).items() if name.startswith(kernel)}
            for c in devices.gpu_candidates(head_dim)[direction]
        ]
        return [choice for i, choice in enumerate(found) if choice not in found[:i]]

    kernels = choices("forward", "forward"), choices("backward", "dq"), choices("backward", "dkv")
    if kv_heads < heads:  # `--tune` measures none of these
        kernels = [{}], [{}], [{}]
    for forward, dq, dkv in itertools.zip_longest(*kernels, fillvalue={}):
        compile_kernel(pallas_gpu, GpuSizes(**forward, **dq, **dkv))
""")
TRITON = textwrap.dedent("""
    from sparse_lavida_jax.kernels import pallas_triton

    compile_kernel(pallas_triton, devices.gpu_rule("pallas_triton"))
""")
LAYERS = DEVICE + textwrap.dedent("""
    import sys

    import kernel_programs

    widths = {
        "num_heads": 32, "width": 4096, "mlp_hidden": 12_288, "generation_width": 2048,
        "generation_mlp_hidden": 8192, "codebook_size": 8192,
    }
    module, implementation = sys.argv[1:]
    for layers in (4, 8):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = kernel_programs.step(implementation, layers, "cuda", sharding, **widths)
        print("modules:", layers, lowered.as_text().count(f"custom_call @{module}"))
    assert "step_causal_attention" in lowered.compile().as_text()
    print("compiled")
""")
SEGMENT = DEVICE + textwrap.dedent("""
    import sys

    import phase_programs

    model = phase_programs.settings(attention_implementation=sys.argv[2])
    program = phase_programs.compiled(sys.argv[1], model, sharding, "cuda")
    assert phase_programs.in_place(program.hlo, program.cache_shapes)
    for copy in phase_programs.copies(program.hlo, program.cache_shapes):
        print("copied:", copy)
    print("compiled")
""")


def described(device):
    """Returns `DEVICE` for another GPU."""
    source = DEVICE.replace("NVIDIA H200", device)
    for word, other in OTHERS[device].items():
        assert word in source
        source = source.replace(word, other)
    return source


def run(source, *words, **more):
    """Runs a program in a process with the plugin and more variables; returns its output."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "PYTHONPATH": os.pathsep.join([*sys.path[1:], os.environ.get("PYTHONPATH", "")]),
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-c", source, *words],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "compiled" in done.stdout, (done.stdout + done.stderr)[-3000:]
    return done.stdout, done.stderr


HEAD = DEVICE + textwrap.dedent("""
    from benchmarks import objectives

    for chunk in (0, 1024):
        program = objectives.head_program(
            4096, 127_378, 2048, chunk, "bfloat16", "float32", sharding
        )
        print("bytes:", program.memory_analysis().temp_size_in_bytes)
    print("compiled")
""")


def test_the_loss_in_tiles_takes_less_memory_and_holds_the_head_once():
    told, _ = run(HEAD)
    plain, tiled = map(int, re.findall(r"bytes: (\d+)", told))
    assert tiled < plain
    head, logits = 2 * 4096 * 127_378, 2 * 1024 * 127_378
    assert tiled < head + 1.5 * logits < 2 * head


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "num_tags", "compiled"),
    [(64, 32, 3, 17), (128, 32, 3, 11), (64, 32, 5, 17), (128, 32, 5, 11), (128, 8, 5, 3)],
    ids=["64", "128", "64 packed", "128 packed", "128 packed, fewer heads of keys"],
)
def test_forward_and_backward_compile_for_hopper_and_spill_nothing(
    head_dim, kv_heads, num_tags, compiled
):
    """With the tiles of the rule, and with all candidates for tuning.

    Five tags include segments, as in packed rows.

    Args:
        compiled: at least so many kernels: one for each choice of tiles of all three.
    """
    told = "".join(run(DEVICE + KERNEL + MOSAIC, *map(str, (head_dim, kv_heads, num_tags))))
    spills = [line for line in told.splitlines() if "bytes spill stores" in line]
    assert len(spills) >= compiled
    for line in spills:
        assert " 0 bytes spill stores, 0 bytes spill loads" in line, line


@pytest.mark.parametrize(
    ("device", "head_dim", "kv_heads", "num_tags"),
    [
        ("NVIDIA A100", 128, 32, 3),
        ("NVIDIA A100", 128, 32, 5),
        ("NVIDIA L4", 128, 32, 3),
        ("NVIDIA L4", 128, 8, 5),
        ("NVIDIA L4", 64, 32, 5),
        ("NVIDIA H200", 128, 32, 5),
        ("NVIDIA B200", 128, 32, 5),
    ],
)
def test_triton_compiles_for_other_gpus_and_spills_next_to_nothing(
    tmp_path, device, head_dim, kv_heads, num_tags
):
    """The compiler also refuses what does not fit the shared memory of the device.

    ptxas is asked how many registers it spills by a command of its name that comes first.
    """
    asked, log = tmp_path / "ptxas", tmp_path / "log"
    asked.write_text(
        f'#!/bin/sh\n{shutil.which("ptxas")} -v "$@" 2>{log}.$$\nstatus=$?\n'
        f"cat {log}.$$ >>{log}\ncat {log}.$$ >&2\nexit $status\n"
    )
    asked.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    sizes = map(str, (head_dim, kv_heads, num_tags))
    run(described(device) + KERNEL + TRITON, *sizes, PATH=path)
    entry = r"entry function 'step_causal_attention(\w*)'.*?(\d+) bytes spill stores"
    found = re.findall(entry, log.read_text(), re.DOTALL)
    spilled = {name: int(number) for name, number in found}
    assert set(spilled) == {"", "_dq", "_dkv"}
    assert spilled[""] == 0 and max(spilled.values()) <= MOST_SPILLED, spilled


@pytest.mark.parametrize("device", OTHERS)
def test_blockwise_attention_compiles_for_every_gpu_and_memory_is_linear(device):
    told, _ = run(described(device) + BLOCKS)
    short, long = (int(line.split()[1]) for line in told.splitlines() if line[:6] == "bytes:")
    assert long < 2.1 * short
    assert long < 32 * 8192**2  # a byte per pair; the reference needs at least four


@pytest.mark.parametrize(
    ("modality", "implementation"),
    [
        ("image", "pallas_gpu"),
        ("text", "pallas_gpu"),
        ("image", "pallas_triton"),
        ("image", "blockwise"),
    ],
)
def test_no_loop_of_the_sampler_copies_the_cache_or_a_layer_of_it(modality, implementation):
    """The program of a phase in `sample.py` at the release's widths, including kernels."""
    told, _ = run(SEGMENT, modality, implementation)
    assert "copied:" not in told, told


@pytest.mark.parametrize(
    ("module", "implementation", "number"),
    [("mosaic_gpu", "pallas_gpu", "3"), ("__gpu$xla.gpu.triton", "pallas_triton", "2")],
)
def test_the_number_of_kernel_modules_of_a_program_does_not_grow_with_its_layers(
    module, implementation, number
):
    """One of the joint layers, one of the split layers, whose widths are those of the release.

    In the joint layers, whose cache is longer, two programs share the keys of a row: the third
    module adds their parts up.
    """
    told, _ = run(LAYERS, module, implementation)
    found = [line.split()[1:3] for line in told.splitlines() if line.startswith("modules:")]
    assert found == [["4", number], ["8", number]], told


@pytest.mark.parametrize("modality", ["image", "text"])
def test_layers_of_their_own_are_read_where_they_lie(modality):
    """Inside loops only products make arrays with the shape of a matrix."""
    told, _ = run(WEIGHTS, modality, "by_layer")
    assert "made:" not in told and "copied:" not in told, told


def test_layers_of_a_stack_are_copied_out_of_it():
    """This is why there are fused parameters, and it shows that the check detects copies."""
    told, _ = run(WEIGHTS, "image", "stored")
    assert "made:" in told, told
