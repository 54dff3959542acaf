# SPDX-License-Identifier: Apache-2.0
"""Bars of whole requests, from invented rows; no files are written."""

from benchmarks import table


def row(row_id, seconds, model="lavida_o", run="a", loop_flops=1e14, **others):
    task, method, *_ = row_id.split("/")
    split = dict.fromkeys(("host", "prefill", "vq_encode", "vq_decode"), 0.01)
    return {
        "suite": "headline", "id": row_id, "task": task, "method": method, "model": model,
        "run": run, "median_s": seconds, "min_s": seconds, "max_s": seconds, "batch": 1,
        "split_s": split | {"loop": seconds - 0.04}, "steps": 64, "steps_timed": 64,
        "tokens": {"useful": 90, "padded": 100}, "floor_s": 0.1, "loop_flops": loop_flops,
        "calibration": {"matmul_tflops": {"a": 800.0}}, "compilations_timed": 0,
        "device": {"kind": "H200"},
    } | others  # fmt: skip


def held(rows):
    lines = [line for line in table.speed_bars(rows).splitlines()[2:] if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {name: (value, told) for name, _, value, told in cells if value}


def test_every_bar_is_listed_even_if_nothing_was_measured():
    bars = table.bars()
    number = sum(
        len(of) for s in ("speed", "speed_cpu") for of in bars[s].values() if isinstance(of, dict)
    )
    lines = table.speed_bars([]).splitlines()[2:]
    assert len(lines) == number > 15
    assert all(line.endswith("| not measured |") for line in lines)


def test_times_and_ratios_are_held_against_their_bars():
    found = held(
        [
            row("t2i1024/sparse/b1", 0.3),
            row("t2i1024/dense_lean/b1", 1.5, loop_flops=9e14),
            row("t2i1024/dense_released/b1", 3.0, loop_flops=9e14),
            row("t2i1024/dense_lean/b1", 9.0, run="another"),
            row("t2i1024/sparse/b1", 1e-3, model="lavida_o_tiny"),
        ]
    )
    assert found["at most s: headline t2i1024/sparse/b1"] == ("0.3", "met")
    assert held([row("t2i1024/sparse/b1", 0.2)])["at most s: headline t2i1024/sparse/b1"] == (
        "0.2", "met, stretch met",
    )  # fmt: skip
    over = "times faster: t2i1024/sparse/b1 over t2i1024"
    assert found[f"{over}/dense_lean/b1"] == ("5", "met")
    # 9e14 operations in three seconds are 38 % of 800 TFLOP/s.
    assert found[f"{over}/dense_released/b1"] == ("10", "does not count: the dense side is slow")
    assert found["loop over floor: headline t2i1024/sparse/b1"] == ("2.6", "not met")
    assert found["padding: headline t2i1024/sparse/b1"] == ("0.1", "met")
    assert found["compilations: headline t2i1024/sparse/b1"] == ("0", "met")


def test_a_missed_bar_comes_with_what_the_time_goes_to():
    page = table.speed_bars([row("t2i1024/sparse/b1", 1.04), row("t2i1024/dense_lean/b1", 9.0)])
    told = [line for line in page.splitlines() if line.startswith("* ")]
    assert told[0] == (
        "* lavida_o, headline t2i1024/sparse/b1: 1040.0 ms (host 10.0, prefill 10.0, vq encode"
        " 10.0, vq decode 10.0, loop 1000.0). At the rates of this run the loop takes at least"
        " 100.0 ms; it works at 12 % of the rate of a matrix product, and 10 % of its slots are"
        " padding."
    )
    assert len(told) == 2  # the dense side is too slow for the ratio to count
    assert not any(line.startswith("* ") for line in table.speed_bars([]).splitlines())


def test_an_image_of_a_batch_takes_no_longer_than_one_alone():
    rows = [
        row("t2i1024/sparse/b1", 0.3), row("t2i1024/sparse/b2", 0.5, batch=2),
        row("t2i1024/sparse/b8", 3.0, batch=8),
    ]  # fmt: skip
    found, name = held(rows), "times faster an image: t2i1024/sparse"
    assert found[f"{name}/b2 over t2i1024/sparse/b1"] == ("1.2", "met")
    assert found[f"{name}/b8 over t2i1024/sparse/b1"] == ("0.8", "not met")


def test_programs_that_were_found_compiled_say_nothing_of_compilation():
    name = "longest compile s: headline t2i1024/sparse/b1"
    new = row("t2i1024/sparse/b1", 0.3, longest_compile_s=61.0, compilations_kept=0)
    assert held([new])[name] == ("61", "not met")
    assert name not in held([new | {"compilations_kept": 1}])
    assert name not in held([row("t2i1024/sparse/b1", 0.3)])  # an older row


def test_the_table_tells_what_was_timed_in_part():
    told = table.table("whole_requests", [row("t2i1024/dense_lean/b1", 1.5, steps_timed=8)])
    assert "1.5000 (8 of 64 steps timed)" in told and "10.0 / 10.0 / 1460.0 / 20.0" in told


def test_whole_requests_of_the_readme_say_where_and_when_they_were_measured():
    where = {
        "created": "2001-02-03T04:05:06+00:00", "commit": "abc1234", "dirty": False,
        "device": {"kind": "H200", "host_cores": 16},
    }  # fmt: skip
    methods = {"sparse": 0.3, "dense_lean": 1.5, "dense_released": 2.1}
    rows = [row(f"t2i1024/{name}/b1", s, **where) for name, s in methods.items()]
    small = [row(f"t2i256/{name}/b1", 1.0, model="speed_cpu", **where) for name in methods]
    slow = [r | {"variant": "cb_off", "run": "b", "id": f"{r['id']}/cb_off"} for r in rows]
    _, _, *lines = table.requests_table([*rows, *small, *slow]).split("\n")
    told = "| 0.30 | 1.50 | 2.10 | 5.0 | H200, 16 cores | 2001-02-03, abc1234 |"
    assert lines == [f"| lavida_o, t2i1024 {told}"]
    _, _, line = table.requests_table([r | {"dirty": True} for r in rows]).split("\n")
    assert "2001-02-03, abc1234 and changes |" in line
    assert table.requests_table(small) == ""


def test_on_a_processor_the_ratio_is_held_against_that_of_the_tokens():
    tokens = {"sparse": 10, "dense_lean": 80}
    rows = [
        row(
            f"t2i256/{name}/b1", seconds, model="speed_cpu",
            tokens={"useful": tokens[name], "padded": tokens[name]},
        )
        for name, seconds in (("sparse", 1.0), ("dense_lean", 4.4))
    ]  # fmt: skip
    name = "t2i256/sparse/b1 over t2i256/dense_lean/b1"
    found = held(rows)
    assert found[f"times faster: {name}"] == ("4.4", "met")
    assert found[f"share of token ratio: {name}"] == ("0.55", "not met")
