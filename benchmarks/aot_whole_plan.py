# SPDX-License-Identifier: Apache-2.0
r"""One pass over a whole plan of LaViDa-O on an H200, against the sampler's loop: predicted.

    python -m benchmarks.aot_whole_plan

An image of 1024 x 1024 with guidance. Twice by arithmetic (`benchmarks/work.py`), for 1 and 16
images; and kernel by kernel, as `aot_requests.py` predicts the loop and with what it needs. Nothing
is run.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from benchmarks import command, hlo, measurements, suites, work
from benchmarks.described import DEVICES
from benchmarks.measurements import ROOT
from sparse_lavida_jax import config
from sparse_lavida_jax.inference import whole_plan

SUITE = "speculation"
PASSES = (1, 2, 3, 4, 5, 8)  # of which seconds are predicted


def main(_: list[str]) -> None:
    """Writes the rows."""
    jax.config.update("jax_platforms", "cpu")  # a GPU that is here is left alone
    bench = measurements.Bench(SUITE)
    for rows in (predicted, compiled):
        for name, row in rows():
            path = bench.write(name, {"model": "lavida_o", **row}, name=f"lavida_o/{name}")
            print(path.name, row, flush=True)


def predicted() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields rows: the least seconds of the sampler's loop, and of passes over the whole plan.

    A pass multiplies as much as prefill and loop together, since it has their tokens, and reads
    each matrix, and the keys and values of its tokens, once.
    """
    device, settings = DEVICES["h200"], config.read(ROOT / "configs/lavida_o.py")
    rates, model = device.rates["measured"], settings.model
    (case,) = suites.chosen(suites.cases("headline", settings), ["t2i1024/sparse/b1"])
    layers = model.num_joint_layers + model.num_split_layers
    for batch in (1, 16):
        need = work.of_case(dataclasses.replace(case, batch=batch), model)
        keys = need.total("tokens") * layers * 2 * model.num_heads * model.head_dim * 2
        weights = sum(max(x.weights for x in part) for part in (need.prefills, need.steps))
        tokens = round(need.total("tokens")), round(need.total("slots"))
        whole = work.Pass(need.total("operations"), weights, keys, *tokens)
        loop = work.RequestWork([], [*need.prefills, *need.steps]).floor_s(*rates.values())
        one = work.RequestWork([], [whole]).floor_s(*rates.values())
        yield f"image_1024/b{batch}", {
            "method": "arithmetic", "steps": len(need.steps), "batch": batch, "rates": rates,
            "tokens": tokens[0], "loop_s": loop, "pass_s": one, "break_even": loop / one,
            "operations": whole.operations, "bytes_pass": weights + keys,
            "bytes_loop": need.total("weights") + need.total("keys"),
            "of_passes_s": {str(n): n * one for n in PASSES},
            "device": {"kind": device.kind, "count": 1, "described": True},
            "note": "floors, not measured: operations or bytes at the measured rates of one H200",
        }  # fmt: skip


def compiled(layers: int = 6) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a row: one pass over the whole plan of an image, predicted kernel by kernel.

    Attention is left out: its kernel skips what no token sees, and the compiler cannot tell.

    Args:
        layers: that are compiled, as well as two fewer (`aot_requests.py`).
    """
    from benchmarks import aot_requests  # it defines flags

    device = DEVICES["h200"]
    place, rates = device.place(), device.rates["measured"]
    settings = aot_requests.with_kernels(config.read(ROOT / "configs/lavida_o.py"))
    found = []
    for depth in (layers, layers - 2):
        program = pass_program(aot_requests.with_layers(settings, depth), place)
        kernels = hlo.kernels(program.lowered.compile().as_text() or "")
        found.append(aot_requests.costs(program, kernels, rates))
    more, fewer = found
    cost = aot_requests.extrapolated(more, fewer, (settings.model.num_layers - layers) // 2)
    kinds = {kind: cost[f"{kind}_s"] for kind in ("products", "copies", "others")}
    (loop,) = [x for x in measurements.read_rows(aot_requests.SUITE) if x["request"] == "image"]
    of_loop = {kind: loop["predicted_by_kind"][kind] for kind in kinds}
    yield "image_1024/compiled", {
        "method": "compiled", "layers_compiled": f"{layers} and {layers - 2}", "rates": rates,
        "pass_s": sum(kinds.values()), "pass_by_kind": kinds, "bytes_pass": cost["bytes"],
        "loop_s": sum(of_loop.values()), "loop_by_kind": of_loop, "bytes_loop": loop["bytes"],
        "break_even": sum(of_loop.values()) / sum(kinds.values()),
        "device": {"kind": device.kind, "count": 1, "described": True},
        "note": "predicted, not measured; without attention and the image tokenizer",
    }  # fmt: skip


def pass_program(settings: config.Config, place: NamedSharding) -> Any:
    """Returns one pass over the whole plan of an image, lowered for a described GPU."""
    from benchmarks import aot_requests

    case, model = aot_requests.case_of("image", settings), settings.model
    types, how = aot_requests.model_types(model, "image", place), case.settings(model)
    order = whole_plan.image_order(case.plan(model), case.example.given)
    response = case.example.response
    steps = whole_plan.steps_of(case.plan(model), how, order, response.shape[1])
    inputs, named = case.sample_inputs(model, [0]), {"settings": how, "stage": "image"}
    given, *_ = whole_plan.arrays(types, inputs, [steps], [response], [order], **named)

    def typed(x: Any) -> jax.ShapeDtypeStruct:
        dtype = jnp.int32 if x.dtype == np.int64 else x.dtype
        return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=place)

    begin, how = time.perf_counter(), dataclasses.replace(how, greedy=False)
    with jax.sharding.use_abstract_mesh(place.mesh.abstract_mesh), aot_requests.unchecked():
        args = *jax.tree.map(typed, given), typed(np.float32(0))
        lowered = whole_plan.scored.trace(types, *args, settings=how).lower(
            lowering_platforms=("cuda",)
        )
    return aot_requests.LoweredProgram(
        "scored", 0, lowered, time.perf_counter() - begin, runs=1, steps=0
    )


if __name__ == "__main__":
    command.run(main)
