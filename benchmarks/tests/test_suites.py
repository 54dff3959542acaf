# SPDX-License-Identifier: Apache-2.0
"""The requests of the suites, and the operation counts for comparison. Nothing is run."""

import dataclasses
import fnmatch
import functools
import pathlib
import types
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks import requests, suites, table, work
from sparse_lavida_jax import config
from sparse_lavida_jax.models import fuse, vq
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sampling import calls

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
FULL = config.read(CONFIGS / "lavida_o.py")
SMALL = config.read(CONFIGS / "speed_cpu.py")


def case_of(suite, row_id, settings=FULL):
    return next(case for case in suites.cases(suite, settings) if case.id == row_id)


def work_of(case, settings=FULL, **changes):
    return work.of_case(dataclasses.replace(case, **changes), settings.model)


def test_every_bar_is_of_a_row_that_some_suite_has():
    for section, settings in (("speed", FULL), ("speed_cpu", SMALL)):
        ids = {case.id for suite in suites.SUITES for case in suites.cases(suite, settings)}
        patterns = [p for of in table.bars()[section].values() if isinstance(of, dict) for p in of]
        for pattern in " ".join(patterns).split():
            assert any(fnmatch.fnmatchcase(row_id, pattern) for row_id in ids), pattern


def test_the_suites_have_the_rows_that_are_asked_for():
    def methods(suite):
        return [case.method for case in suites.cases(suite, FULL)]

    assert methods("headline") == ["sparse", "dense_lean", "dense_released"]
    assert methods("ablation") == ["none", "p", "r", "t", "pr", "pt", "rt", "sparse"]
    assert methods("edit") == methods("headline")
    assert [case.batch for case in suites.cases("batch", FULL)] == [1, 1, 2, 2, 4, 4, 8, 8]
    steps = [case.sampling.text.steps for case in suites.cases("reasoning", FULL)]
    assert steps == [4] * 4 + [8] * 4 + [32] * 4
    assert set(methods("quant")) == {"sparse", "int8", "w8a8", "fp8"}
    for suite in suites.SUITES:
        for case in suites.cases(suite, FULL):
            # Only rows whose steps all cost the same are timed partially.
            dense = case.method.startswith("dense") or case.method == "none"
            assert bool(case.steps_timed) == dense, case.id
    edit = suites.cases("edit", FULL)[0]
    vision, source, *_ = edit.example.parts
    assert (vision.num_tokens, len(source.codes)) == (871, 1024)


def test_rows_are_chosen_by_their_ids():
    found = suites.cases("headline", FULL)
    assert suites.chosen(found, []) == found
    assert suites.chosen(found, ["t2i1024/dense_lean/b1"]) == found[1:2]
    told = "no row 't2i/sparse': choose one of t2i1024/sparse/b1, "
    with pytest.raises(config.ConfigError, match=told):
        suites.chosen(found, ["t2i/sparse"])


def test_each_change_of_the_fast_path_that_a_device_has_is_taken_back_in_a_row(monkeypatch):
    def methods(**changes):
        settings = dataclasses.replace(FULL, model=dataclasses.replace(FULL.model, **changes))
        cases = suites.cases("fastpath", settings)
        assert len({case.id for case in cases}) == len(cases)
        return [case.method.removeprefix("without_") for case in cases]

    text = ["full", "fused", "tiled_head"]
    assert methods() == ["full", "fused", "prefix", "vq_dtype", *text]
    blockwise = {"attention_implementation": "blockwise"}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert methods(**blockwise) == [
        "full", "fused", "by_layer", "trips", "tables_ahead", "prefix", "vq_dtype", *text,
    ]  # fmt: skip
    case = next(c for c in suites.cases("fastpath", FULL) if c.without == "prefix")
    assert not case.keeps_prefix and suites.cases("fastpath", FULL)[0].keeps_prefix
    assert not any(c.keeps_prefix for c in suites.cases("headline", FULL))


def test_what_a_change_is_worth_is_told_against_the_full_path():
    def row(method, seconds, run="a"):
        return {
            "run": run, "model": "tiny", "task": "t2i64", "method": method, "median_s": seconds,
            "batch": 1, "device": {"kind": "cpu"},
        }  # fmt: skip

    rows = [row("full", 2.0), row("without_fused", 3.0), row("without_trips", 9.0, run="b")]
    *_, line = table.table("fastpath", rows).split("\n")
    assert line == "| tiny, t2i64 | fused | 3.0000 | 2.0000 | 1.50 | cpu |"


def test_work_of_the_release_is_what_its_sizes_make():
    """A step reads 2.684 B parameters and the image head; operations from the paper's sizes."""
    sparse, dense = (
        work_of(case_of("headline", f"t2i1024/{name}/b1")) for name in ("sparse", "dense_lean")
    )
    layers = 2 * 32 * (4 * 2048 * 4096 + 3 * 2048 * 8192)
    assert layers == pytest.approx(5.37e9, rel=1e-3)
    assert {one.weights - layers for one in sparse.steps} == {
        2 * (4 * 2048**2 + 2 * 2048**2 + 2048 * 8192)  # 84 MB
    }
    assert sum(one.operations for one in sparse.steps) == pytest.approx(68.6e12, rel=0.01)
    assert sum(one.operations for one in dense.steps) == pytest.approx(907e12, rel=0.01)
    assert sparse.floor_s(790.0, 4300.0) == pytest.approx(0.098, rel=0.02)
    assert work_of(case_of("edit", "edit1024/sparse/b1")).floor_s(790.0, 4300.0) == pytest.approx(
        0.152, rel=0.02
    )
    assert sparse.prefills and not dense.prefills


def test_little_is_padding():
    """At most 15 % for images; dense and text steps have none."""
    assert work_of(case_of("headline", "t2i1024/sparse/b1")).padding < 0.15
    assert work_of(case_of("headline", "t2i1024/dense_lean/b1")).padding == 0
    assert work_of(case_of("reasoning", "reasoning/sparse/b1/k8")).padding < 0.01
    case = case_of("reasoning", "reasoning/sparse/b1/k8")
    plan = case.plan(FULL.model)
    # 32 tokens of the block and 64 registers; a block's first step also passes the previous block.
    assert {part.decode.shape[-1] + part.rest.shape[-1] for part in plan} == {32}
    assert {part.clean.shape[-1] for part in plan if part.num_steps > 1} == {0}
    assert case.settings(FULL.model).num_registers == 64


def test_rows_of_an_edit_have_little_padding_and_a_kept_prefix_is_not_passed_again():
    """With one shape its three rows had 19 % padding: the dropped one is 1,024 tokens longer."""
    case = case_of("edit", "edit1024/sparse/b1")
    whole, kept = work_of(case), work_of(case, keeps_prefix=True)
    assert whole.padding < 0.10
    assert [one.slots for one in whole.prefills] == [2032, 2 * (1008 + 1024)]
    assert [one.slots for one in kept.prefills] == [2 * (1008 + 1024)]
    image = case_of("headline", "t2i1024/sparse/b1")
    assert [one.slots for one in work_of(image).prefills] == [2 * 128]
    assert [one.slots for one in work_of(image, keeps_prefix=True).prefills] == [128]


def test_the_dense_edit_has_little_padding_and_costs_what_its_sizes_make():
    """999 tokens of text and input images, 1,024 given cells and as many to decode, 3 rows.

    The dropped row has its given cells in the text stream. The calculation behind the bars has
    4,416 TF.
    """
    lean, released = (
        work_of(case_of("edit", f"edit1024/dense_{name}/b1")) for name in ("lean", "released")
    )
    assert lean.padding == released.padding < 0.01
    text, cells = 2 * (4 * 4096**2 + 3 * 4096 * 12288), 2 * (4 * 2048 * 4096 + 3 * 2048 * 8192)

    def row(words, image):
        attention = 4 * 4096 * (17 * (words + image) ** 2 + 15 * image**2)
        return 17 * words * text + 32 * image * cells + attention

    operations = 64 * (row(999 + 1024, 1024) + 2 * row(999, 2048))
    assert lean.total("operations") == pytest.approx(operations, rel=2e-3)
    assert lean.total("operations") == pytest.approx(4.416e15, rel=0.03)
    head = 64 * 3 * 2 * 4096 * 127_378 * (999 + 2048)
    assert released.total("operations") > lean.total("operations") + head


@pytest.mark.parametrize(
    "costs",
    [
        lambda self: None,
        lambda self: {"bytes accessed": 1.0},
        mock.Mock(side_effect=RuntimeError("this device has no cost analysis")),
    ],
)
def test_a_row_counts_operations_where_the_compiler_does_not(monkeypatch, costs):
    monkeypatch.setattr(jax.stages.Lowered, "cost_analysis", costs)
    monkeypatch.setattr(jax.stages.Compiled, "cost_analysis", costs)
    case = suites.cases("edit", SMALL)[0]
    subject = types.SimpleNamespace(codec=True, settings=SMALL)
    row = types.SimpleNamespace(case=case, subject=subject)
    of_codec = work.of_image_tokenizer(SMALL.vq)
    assert requests.Timed.vq_operations(row) == sum(of_codec.values()) > 5e8


@pytest.mark.parametrize("name", ["encode", "decode"])
def test_operations_of_the_image_tokenizer_are_those_of_the_compiler(name):
    """To 2 %: the compiler also counts element-wise operations, but no borders of convolutions."""
    model, side = vq.shapes(SMALL.vq), SMALL.vq.image_size
    shape = (1, side, side, 3) if name == "encode" else (1, *(side // SMALL.vq.factor,) * 2)
    given = jax.ShapeDtypeStruct(shape, jnp.float32 if name == "encode" else jnp.int32)
    run = getattr(vq.VQModel, name)
    counted = jax.jit(run).lower(model, given).cost_analysis()["flops"]
    assert work.of_image_tokenizer(SMALL.vq)[f"vq_{name}"] == pytest.approx(counted, rel=0.02)


def test_operations_are_counted_in_loops_and_branches():
    def layers(x, w):
        def layer(x, _):
            return jax.nn.relu(x @ w), None

        x = jax.lax.scan(layer, x, length=3)[0]
        both = jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x)
        return jnp.einsum("bqd,bkd->bqk", both[None], x[None])

    x, w = jnp.zeros((4, 8)), jnp.zeros((8, 8))
    assert work.operations(layers, x, w) == (3 + 1) * 2 * 4 * 8 * 8 + 2 * 4 * 4 * 8


@pytest.mark.slow
def test_rows_that_are_measured_together_are_timed_in_turn(monkeypatch):
    """Each turn has one request per row; the loop of partially timed rows is scaled."""
    cases, asked = suites.cases("cpu", SMALL), []
    model = jax.eval_shape(lambda: Denoiser(SMALL.model, rngs=nnx.Rngs(0)))
    codec = jax.eval_shape(lambda: vq.VQModel(SMALL.vq, rngs=nnx.Rngs(0)))
    decoders = []
    subject = requests.Subject(model, SMALL, codec, "bfloat16", random_weights=True)
    monkeypatch.setattr(requests.vq, "for_decoding", lambda _, dtype: decoders.append(dtype))

    def request(self, turn):
        asked.append((self.case.method, turn))
        seconds = {"sparse": 1.0, "dense_lean": 2.0}[self.case.method]
        return dict.fromkeys(requests.SPLIT, 0.0) | {"loop": seconds, "host": 0.5}

    monkeypatch.setattr(requests.Timed, "request", request)
    calibration = {"matmul_tflops": {"any": 1.0}, "copy_gbps": 1.0}
    rows = requests.measure(subject, cases, runs=5, calibration=calibration)
    assert asked[:2] == [("sparse", 0), ("dense_lean", 0)]  # these compile
    assert decoders == ["bfloat16"]  # for all rows
    for turn in range(1, 6):
        own = asked[2 * turn : 2 * turn + 2]
        assert sorted(own) == [("dense_lean", turn), ("sparse", turn)]
    assert len({tuple(name for name, _ in asked[2 * t : 2 * t + 2]) for t in range(1, 6)}) == 2
    sparse, dense = rows
    assert (sparse["method"], dense["method"]) == ("sparse", "dense_lean")
    assert sparse["times_s"] == [1.5] * 5
    whole = 2.0 * SMALL.sampling.num_steps / suites.STEPS_TIMED + 0.5  # by operations
    assert dense["times_s"] == pytest.approx([whole] * 5, rel=1e-3)


def test_how_far_8_bits_move_logits_is_told_by_row():
    moved = {
        "largest": 4.0, "largest_difference": 0.4, "mean_difference": 0.01,
        "argmax_agreement": 0.98, "equal_tokens": 0.7,
    }  # fmt: skip
    row = {"model": "tiny", "id": "t2i64/int8/b1", "logits": moved}
    *_, line = table.table("quantized", [row, {"model": "tiny", "id": "t2i64/sparse/b1"}]).split(
        "\n"
    )
    assert line == "| tiny | t2i64/int8/b1 | 10.0 % | 0.25 % | 98.0 % | 70.0 % |"


def test_throwing_work_away_costs_the_text_tower_and_its_head_over_all_tokens():
    """64 steps of two rows: 15 more layers of 128 words, and a word out of 127,378 for 1,152.

    The calculation behind the bars has 1,141 TF, for about 100 words.
    """
    lean, released = (
        work_of(case_of("headline", f"t2i1024/dense_{name}/b1")) for name in ("lean", "released")
    )
    tower = 15 * 128 * (2 * (4 * 4096**2 + 3 * 4096 * 12288) + 4 * 4096 * 128)
    head = 2 * 4096 * 127_378 * (1024 + 128)
    operations = lean.total("operations") + 64 * 2 * (tower + head)
    assert released.total("operations") == pytest.approx(operations, rel=1e-3)
    assert released.total("operations") == pytest.approx(1.141e15, rel=0.03)
    assert released.total("tokens") == lean.total("tokens")


DOCS = CONFIGS.parent / "docs"
PAGE = (DOCS / "log" / "2026-11-counted.md").read_text()


def told(*cells):
    return f"| {' | '.join(cells)} |\n"


def counted(need):
    """Returns operations and floor of a loop in the format of the page."""
    tera, floor = sum(one.operations for one in need.steps) / 1e12, need.floor_s(790.0, 4300.0)
    return (
        f"{tera:.1f} TF" if tera < 400 else f"{tera:,.0f} TF",
        f"{floor:.3f} s" if floor < 1 else f"{floor:.2f} s",
    )


@pytest.mark.parametrize(
    ("name", "suite", "parts"),
    [
        ("decode, of an image", "headline", ("vq_decode",)),
        ("encode and decode, of an edit", "edit", ("vq_encode", "vq_decode")),
    ],
)
def test_the_page_counts_the_image_tokenizer(name, suite, parts):
    own, shares = sum(work.of_image_tokenizer(FULL.vq)[part] for part in parts), []
    for case in suites.cases(suite, FULL)[:2]:
        whole = own + work_of(case).total("operations")
        shares.append(f"{100 * own / whole:.1f} %")
        subject = types.SimpleNamespace(codec=True, settings=FULL)
        row = types.SimpleNamespace(case=case, subject=subject)
        assert requests.Timed.vq_operations(row) == own
    assert told(name, f"{own / 1e12:.1f} TF", *shares) in PAGE


@pytest.mark.parametrize(
    ("name", "suite", "row_id"),
    [
        ("sparse, 1024 x 1024", "headline", "t2i1024/sparse/b1"),
        ("dense_lean", "headline", "t2i1024/dense_lean/b1"),
        ("dense_released", "headline", "t2i1024/dense_released/b1"),
        ("sparse edit", "edit", "edit1024/sparse/b1"),
        ("dense_lean edit", "edit", "edit1024/dense_lean/b1"),
        ("dense_released edit", "edit", "edit1024/dense_released/b1"),
        ("sparse reasoning, 8 steps a block", "reasoning", "reasoning/sparse/b1/k8"),
    ],
)
def test_the_page_counts_what_the_plan_makes(name, suite, row_id):
    assert told(name, *counted(work_of(case_of(suite, row_id)))) in PAGE


@pytest.mark.parametrize(
    ("name", "row_id", "kept"),
    [
        ("sparse image", "t2i1024/sparse/b1", False),
        ("the same, prefix kept", "t2i1024/sparse/b1", True),
        ("sparse edit", "edit1024/sparse/b1", False),
        ("the same, prefix kept", "edit1024/sparse/b1", True),
        ("dense edit", "edit1024/dense_lean/b1", False),
    ],
)
def test_the_page_counts_slots_and_padding(name, row_id, kept):
    need = work_of(case_of("edit" if "edit" in row_id else "headline", row_id), keeps_prefix=kept)
    prefill = f"{sum(one.slots for one in need.prefills):,} slots"
    operations = f", {sum(one.operations for one in need.prefills) / 1e12:.1f} TF"
    cells = [f"{need.total(what):,.0f}" for what in ("tokens", "slots")]
    cells += [f"{100 * need.padding:.0f} %", *([prefill + operations] * bool(need.prefills))]
    assert told(name, *cells).rstrip("\n") in PAGE


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("as it is", 64),
        ("registers_end=8", 64),
        ("merge_cells=8", 49),
        ("merge_cells=16", 35),
        ("merge_cells=32", 23),
        ("merge_cells=16, registers_end=8", 35),
    ],
)
def test_the_page_counts_options_that_change_what_comes_out(name, steps):
    asked = {key: int(value) for key, _, value in (one.partition("=") for one in name.split(", "))
             if value}  # fmt: skip
    case = case_of("headline", "t2i1024/sparse/b1")
    case = dataclasses.replace(case, sampling=config.changed(case.sampling, asked))
    need = work_of(case)
    assert len(need.steps) == steps
    share = f"{100 * need.padding:.0f} %"
    assert told(name, str(steps), f"{need.total('tokens'):,.0f}", share, *counted(need)) in PAGE


def test_the_page_counts_programs():
    """For the steps of a suite: one per method, batch, shape and number of steps."""

    def number(suite, *, trips):
        found = set()
        for case in suites.cases(suite, FULL):
            plan = case.timed_plan(FULL.model)
            own = trips and case.split_phases is not False
            for part in plan:
                steps = calls.STEPS if own else part.num_steps
                shapes = [x.shape[1:] for x in (part.clean, part.decode, part.rest)]
                found.add((case.method, case.batch, steps, *shapes, part.refreshes))
        return len(found)

    for suite in ("headline", "edit", "reasoning", "batch"):
        assert f"{number(suite, trips=True)} of `{suite}`" in PAGE
    assert f"{number('ablation', trips=True)} of\n`ablation`" in PAGE


def test_the_page_counts_what_images_read_alone():
    sizes = []
    for task in ("image", "both"):
        make = functools.partial(suite_model, task)
        sizes.append(sum(2 * leaf.size for leaf in jax.tree.leaves(jax.eval_shape(make))))
    told = f"({sizes[0] / 1e9:.1f} of {sizes[1] / 1e9:.1f} GB at full size)"
    assert told in (DOCS / "speed.md").read_text()


def suite_model(task):
    model = Denoiser(FULL.model, rngs=nnx.Rngs(0))
    return fuse.for_inference(model, task=task, by_layer=True)


@pytest.mark.slow
def test_padding_above_the_bar_is_reported():
    padding = {
        case.id: work_of(case).padding
        for suite in ("headline", "ablation", "edit", "reasoning")
        for case in suites.cases(suite, FULL)
    }
    above = {row_id: share for row_id, share in padding.items() if share > 0.15}
    assert list(above) == ["t2i1024/pt/b1"]
    assert f"has {100 * above['t2i1024/pt/b1']:.1f} %" in PAGE
