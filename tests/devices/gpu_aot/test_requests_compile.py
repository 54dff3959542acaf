# SPDX-License-Identifier: Apache-2.0
"""The programs of whole requests at full size, as the sampler calls them, for an absent H200.

This runs in a separate process, because the CUDA plugin is loaded when jax starts.
"""

import json
import pathlib

import pytest
from test_gpu_kernels_compile import pytestmark as needs_plugin
from test_gpu_kernels_compile import run

pytestmark = needs_plugin

CONFIG = str(pathlib.Path(__file__).parents[3] / "configs" / "lavida_o.py")
MOST_MB, MOST_MODULES = 1.5, 2
# Kernels that a layer adds to a step. Where it is 11, XLA splits a product and adds up its parts.
MOST_KERNELS = {"image": 10, "edit": 11, "reasoning": 11}
LOWERED = """
import json
import pathlib
import sys

from sparse_lavida_jax import config
from benchmarks import aot_requests

place = aot_requests.DEVICES["h200"].place()
settings = config.read(pathlib.Path(sys.argv[2]))
settings = aot_requests.with_kernels(settings)
case = aot_requests.case_of(sys.argv[1], settings)
task = "image" if case.example.modality == "image" else "both"
model = aot_requests.model_types(settings.model, task, place)
for program, _ in aot_requests.programs(case, model, place):
    text = program.lowered.as_text()
    told = {"name": program.name, "width": program.width, "steps": program.steps}
    told |= {"mb": len(text.encode()) / 1e6, "modules": program.modules()}
    told |= {"modules_in_text": text.count("custom_call @mosaic_gpu")}
    print("program:", json.dumps(told))
print("compiled")
"""
COMPILED = """
import sys

from absl import flags

from benchmarks import aot_requests

flags.FLAGS(["aot", f"--config={sys.argv[1]}", f"--requests={sys.argv[2]}", "--layers=6"])
aot_requests.Bench = lambda suite: aot_requests  # rows are not written
aot_requests.write = lambda name, row: None
aot_requests.main([])
print("compiled")
"""
NARROW = """
import json
import pathlib
import sys

from sparse_lavida_jax import config
from benchmarks import aot_requests, hlo

place = aot_requests.DEVICES["h200"].place()
settings = config.read(pathlib.Path(sys.argv[2]))
settings = aot_requests.with_layers(aot_requests.with_kernels(settings), 4)
case = aot_requests.case_of(sys.argv[1], settings)
task = "image" if case.example.modality == "image" else "both"
model = aot_requests.model_types(settings.model, task, place, case.sampling.quantize)
program, arguments = max(
    aot_requests.programs(case, model, place), key=lambda pair: pair[0].width
)
found = hlo.kernels(program.lowered.compile().as_text())
# Without the compiler's own products: on a device it would choose between them and the library's.
library = program.lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()
shapes = aot_requests.large_shapes(arguments)
told = {
    "library": library.count('custom_call_target="__cublas$lt$matmul$f8"'),
    "narrow": sum(one.runs for one in found if one.in_step and one.is_narrow),
    "transposes": sum(bool(shapes & {*one.made}) for one in found if not one.in_step),
    "copies": aot_requests.copies(found, arguments),
}
print("program:", json.dumps(told))
print("compiled")
"""
TOKENIZER = """
import json
import pathlib
import sys

from sparse_lavida_jax import config
from benchmarks import aot_requests

device = aot_requests.DEVICES["h200"]
settings = config.read(pathlib.Path(sys.argv[1]))
for name, row in aot_requests.tokenizer_rows(settings, device, device.place()):
    print("row:", json.dumps({"name": name, **row}))
print("compiled")
"""


@pytest.mark.parametrize(
    ("request_name", "steps"),
    [("image", 64), ("edit", 64), ("reasoning", 256), ("batch_of_8", 64)],
)
def test_a_request_has_few_small_programs(request_name, steps):
    """One per width of a step, all 32 layers: at most two modules of a kernel, 1.5 MB of StableHLO.

    A pass of both streams of a prompt has a third: its last joint layer has queries of one stream.
    """
    told, _ = run(LOWERED, request_name, CONFIG)
    found = [json.loads(line.partition(" ")[2]) for line in told.splitlines()
             if line.startswith("program:")]  # fmt: skip
    loops = [one for one in found if one["name"] == "run_phase"]
    assert sum(one["steps"] for one in loops) == steps
    widths = [one["width"] for one in loops]
    assert len(widths) == len(set(widths))
    for one in found:
        assert one["mb"] <= MOST_MB, one
        assert sum(one["modules"].values()) == one["modules_in_text"], one
        most = MOST_MODULES + (one["name"] == "pass_prompt")
        assert all(number <= most for number in one["modules"].values()), one
    assert all(one["modules"].get("step_causal_attention", 0) >= 1 for one in loops)


@pytest.mark.parametrize("request_name", ["image", "edit", "reasoning"])
def test_the_command_predicts_a_request_whose_steps_copy_nothing(request_name):
    """Compiled with four layers and with six, of 32.

    Nothing but a product reads a matrix in a step, and nothing makes an array of its shape: none is
    copied, transposed, or concatenated with others.
    """
    told, _ = run(COMPILED, CONFIG, request_name)
    line = json.loads(told.splitlines()[-2])
    assert [*line] == ["request", "programs", "kernels_per_layer", "floor_s", "predicted_s"]
    for one in line["programs"]:
        assert [*one] == [
            "name", "width", "trace_and_lower_s", "stablehlo_mb", "modules", "layer_kernels",
            "copies",
        ]  # fmt: skip
        assert one["copies"] == [], one
    for one in line["programs"]:
        if one["name"] == "run_phase":
            assert one["layer_kernels"] <= MOST_KERNELS[request_name], one
    assert 0 < line["floor_s"] < line["predicted_s"] < 4 * line["floor_s"]


@pytest.mark.parametrize(
    "request_name", ["image_fp8", "edit_fp8", "reasoning_fp8", "image_int8", "edit_int8"]
)
def test_products_in_8_bits_take_their_matrices_as_they_are(request_name):
    """In float8 four a layer, by the library; no matrix is transposed or copied."""
    told, _ = run(NARROW, request_name, CONFIG)
    line = next(line for line in told.splitlines() if line.startswith("program:"))
    products = 16 if request_name.endswith("fp8") else 0
    assert json.loads(line.partition(" ")[2]) == {
        "library": products, "narrow": products, "transposes": 0, "copies": [],
    }  # fmt: skip


def test_an_image_is_decoded_in_15_ms_by_prediction():
    """In bfloat16: norms read their input once; convolutions of doubled images cost 4/9."""
    told, _ = run(TOKENIZER, CONFIG)
    rows = [json.loads(line.partition(" ")[2]) for line in told.splitlines()
            if line.startswith("row:")]  # fmt: skip
    of = {row["name"]: row for row in rows}
    assert 0.010 < of["decode"]["predicted_s"] <= 0.015
    assert of["decode"]["operations"] < 6.6e12
    assert of["encode"]["dtype"] == "float32"
