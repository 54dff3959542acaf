# SPDX-License-Identifier: Apache-2.0
"""The page on few steps says what its rows say."""

import pytest

from benchmarks import few_steps_page, measurements
from sparse_lavida_jax import config


def plan(model, steps, share, method="own", **more):
    row = {"model": model, "given": "words", "steps": steps, "method": method, "prompts": 300}
    return row | {"share": share} | more


def cells(text):
    return [[one.strip() for one in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_seeds_are_averaged_and_the_best_plan_is_kept():
    rows = [
        plan("style/s0", 3, 0.5, coherent=0.8, entropy_bits=1.5),
        plan("style/s1", 3, 0.7, coherent=0.9, entropy_bits=1.5),
        plan("style/s1", 3, 0.9, "order=layout"),
        plan("plain/s0", 3, 0.4, coherent=0.7, entropy_bits=1.4),
        plan("art", 6, 0.6, "merge_cells=0,schedule=cosine", coherent=0.5, entropy_bits=1.0),
        plan("art", 6, 0.6, "merge_cells=0,schedule=linear", coherent=0.6, entropy_bits=1.0),
        plan("art", 6, 0.9),
    ]
    assert cells(few_steps_page.models_table(rows)) == [
        ["plain", "words, held-out prompts", "3", "own", "1", "0.400", "0.700", "1.400"],
        ["style", "words, held-out prompts", "3", "order layout", "1", "0.900", "", ""],
        [
            "style",
            "words, held-out prompts",
            "3",
            "own",
            "2",
            "0.600 ± 0.141",
            "0.850 ± 0.071",
            "1.500 ± 0.000",
        ],
    ]
    (best,) = cells(few_steps_page.plans_table(rows))
    assert best[3:] == ["schedule linear", "300", "0.600", "0.600", "1.000"]


def test_plans_are_compared_on_the_same_prompts():
    def row(model, steps, method, correct, coherent):
        each = {"correct": correct, "coherent": coherent, "things": "22"}
        return plan(model, steps, 0.5, method, seed=0, of_each=each)

    rows = [
        row("style/s0", 3, "schedule=linear", "10", "21"),
        row("plain/s0", 3, "schedule=linear", "00", "10"),
        row("art", 12, "own", "11", "22"),
        row("art", 3, "schedule=linear", "10", "21"),
        row("art", 4, "schedule=linear", "10", "21") | {"prompts": 30},
    ]
    lines = cells(few_steps_page.claims_table(rows))
    assert [line[:7] for line in lines] == [
        ["art", "words, held-out prompts", "3", "schedule linear", "its own plan", "1", "2"],
        ["style", "words, held-out prompts", "3", "schedule linear", "plain", "1", "2"],
    ]
    # Of four things one fewer is coherent; of two prompts one fewer is right.
    assert lines[0][7:] == ["-0.500 (-1.193 to +0.193)", "-0.250 (-0.596 to +0.096)"]
    assert lines[1][7:] == ["+0.500 (-0.193 to +1.193)", "+0.500 (+0.500 to +0.500)"]


def test_a_code_is_compared_with_the_gap_that_it_could_close():
    about = {"given": "words", "order": "layout", "schedule": "linear", "steps": 2}
    rows = [
        {"model": f"style/s{seed}", "id": "code/x", "gap": 10.0, "gap_without": 40.0} | about
        | {"bits": 60.0, "bits_without": 90.0, "bits_of_code": 2.0, "perplexity": 1.5}
        for seed in range(2)
    ]  # fmt: skip
    rows += [
        {"model": "style/s0", "id": "holes/x", "codes": kind, "coherent": share} | about
        for kind, share in (("prior", 0.5), ("posterior", 0.6))
    ]
    twin = {"model": "plain/s0", "id": "gap/x"} | about
    rows += [twin | {"bits": 90.0, "gap": 30.0}, twin | {"steps": 4, "bits": 60.0, "gap": 0.0}]
    plain, style = cells(few_steps_page.codes_table(rows))
    assert plain[4:] == ["2", "60", "90", "", "", "", "", "", ""]
    code = ["60 ± 0", "2.0 ± 0.0", "1.50 ± 0.00", "0.75 ± 0.00", "0.50", "0.60"]
    assert style[4:] == ["2", "50 ± 0", "90 ± 0", *code]
    assert few_steps_page.gap_table(rows) == few_steps_page.gap_table([])


def test_the_page_is_that_of_the_committed_rows(tmp_path):
    page = few_steps_page.PAGE.read_text()
    assert few_steps_page.renewed(page) == page
    with pytest.raises(config.ConfigError, match="no lines"):
        few_steps_page.renewed(page.replace(few_steps_page.END, ""))
    few_steps_page.draw_gaps(measurements.read_rows("few_steps"), tmp_path / "gap.png")
    rows = [plan(f"a/s{seed}", steps, 0.5, coherent=0.6) for seed in (0, 1) for steps in (2, 4)]
    rows += [plan("a/s0", 2, 0.4, "order=layout", coherent=0.5)]
    few_steps_page.draw_plans(rows, tmp_path / "plans.png")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("gap.png", "plans.png"))
