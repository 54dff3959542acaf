# SPDX-License-Identifier: Apache-2.0
"""Device time by kind of kernel, and the table that a device day ends with."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import device_day, device_time, measurements

KIND = "NVIDIA H200"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("step_causal_attention_mosaic_gpu", "attention"),
        ("nvjet_tst_192x128_64x4_2x1_v_bz_coopB_TNN", "products"),
        ("gemm_fusion_dot_12", "products"),
        ("loop_convert_fusion_3", "element-wise"),
        ("input_reduce_fusion", "element-wise"),
        ("wrapped_concatenate", "copies"),
        ("MemcpyD2D", "copies"),
        ("nccl", "other"),
    ],
)
def test_kernels_have_kinds(name, kind):
    assert device_time.kind_of(name) == kind


# As an error it would end the process, inside the profiler of jax 0.12.
@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
def test_the_profiler_reports_what_a_program_runs():
    """On a CPU the operations of XLA stand in for kernels."""
    run = jax.jit(lambda x: jnp.tanh(x @ x).T @ x)
    x = jnp.ones((256, 256))
    jax.block_until_ready(run(x))
    found = device_time.kernels(lambda: jax.block_until_ready(run(x)))
    row = device_time.values_of(found)
    assert row["kernels"]["total"] == len(found) >= 2
    assert row["kernels"]["products"] >= 1
    assert 0 < row["device_s"]["products"] <= row["device_s"]["total"] < 10
    assert row["longest"][0]["seconds"] >= row["longest"][-1]["seconds"] > 0
    kinds = [name for name in row["device_s"] if name != "total"]
    assert sum(row["device_s"][name] for name in kinds) == pytest.approx(row["device_s"]["total"])


def test_the_table_of_a_day_has_every_bar_and_what_was_measured_before(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "RESULTS", tmp_path)

    def write(suite, row_id, **values):
        path = measurements.path_of(suite, row_id, values.pop("kind", KIND))
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {
            "suite": suite, "id": row_id, "created": "2026-12-01", "model": "lavida_o", "run": "a",
            "batch": 1, "method": row_id.split("/")[1], "status": "ok", "device": {"kind": KIND},
        }  # fmt: skip
        path.write_text(json.dumps(row | values))

    loop = {"split_s": {"loop": 0.2}, "floor_s": 0.1}
    write("headline", "t2i1024/sparse/b1", median_s=0.25, task="t2i1024", **loop)
    write("headline", "t2i1024/dense_lean/b1", median_s=1.5, task="t2i1024", **loop)
    write("first_image", "first image/cold", total_s=25.0)
    write("first_image", "generate/warm", after_imports_s=2.0)
    write("steps", "scenes/x", steps_a_second=1.0)
    (tmp_path / "parts.tsv").write_text("admission\tdone\t31 s\n")
    found = {line["what"]: line for line in device_day.lines(tmp_path, KIND)}

    def told(what):
        return tuple(found[what][name] for name in ("measured", "wanted", "held", "before"))

    assert told("admission, s") == ("31", "<= 40", "met", "115")
    assert told("image, s") == ("0.25", "<= 0.29", "met", "0.281")
    assert told("first image, cold, s") == ("25", "<= 20", "not met", "about 660")
    assert told("first image, warm, s") == ("not measured", "<= 5", "", "")
    assert told("generate, warm, s") == ("2", "<= 5", "met", "")
    faster = "times faster: t2i1024/sparse/b1 over t2i1024/dense_lean/b1"
    assert told(faster)[0] == "6" and told(faster)[3] == "5.6"
    assert told("configs/scenes.py, steps/s")[::3] == ("not measured", "13.8")
