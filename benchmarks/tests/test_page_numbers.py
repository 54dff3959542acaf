# SPDX-License-Identifier: Apache-2.0
"""Numbers and tables of the pages are those of the committed rows, texts those of the scripts."""

import ast
import pathlib
import re

import pytest

from benchmarks import (
    ablation_report,
    learning,
    measurements,
    table,
)

CHECKOUT = pathlib.Path(__file__).parents[2]
COMPILED = "docs/log/2026-11-training-compiled.md"


def page(name):
    return (CHECKOUT / name).read_text()


def on_one_line(text):
    return " ".join(text.split())


def test_ways_to_train_are_compared_as_measured():
    rows = measurements.read_rows("learning")
    assert learning.summary(rows) in page("docs/log/2026-11-ways-to-train.md")
    assert learning.curves(rows) in page("docs/log/2026-11-art-model.md")


@pytest.mark.parametrize("name", sorted(path.stem for path in CHECKOUT.glob("configs/ablation_*")))
def test_the_tables_of_the_ablations_are_those_of_the_rows(name):
    newest = ablation_report.newest(measurements.read_rows(ablation_report.SUITE))
    rows = [row for row in newest if row["ablation"] == name]
    assert ablation_report.summary(rows) in page("docs/log/2026-11-ablations.md")


def test_the_speed_of_the_bundled_model_is_that_of_the_rows():
    rows = ablation_report.of_bundled_model(measurements.read_rows("sampling"))
    shown = table.table("sampling", rows)
    assert shown in page("docs/log/2026-11-ablations.md")
    (faster,) = re.findall(r"draw, 4, 8 \| sparse \| \d+ \| ([\d.]+)", shown)
    told = f"the bundled model draws {float(faster):.1f} times as fast as sampled densely"
    assert told in on_one_line(page("docs/evaluation.md"))


@pytest.mark.parametrize("name", ["content_cache", "content_cache_counted"])
def test_what_is_kept_between_requests_saves_what_the_rows_say(name):
    shown = table.table(name, measurements.read_rows("content_cache")).strip()
    assert shown in page("docs/log/2026-11-content-cache.md")


def test_training_steps_of_the_full_model_are_those_that_were_compiled():
    rows = [row for row in measurements.read_rows("aot") if row["task"] == "train_step"]
    assert rows
    for row in map(table.View, rows):
        exchanged, formula = row["exchanged"] / 1e9, row["expected_bytes"]["total"] / 1e9
        assert f" | {exchanged:.1f} | {formula:.1f} | " in page(COMPILED), row["id"]


def of_release(part, layers):
    """Returns the row of a part of the suite `rehearsal`, a model at full size."""
    (found,) = (
        row
        for row in measurements.read_rows("rehearsal")
        if (row["part"], row["layers"], row["size"]) == (part, layers, "release")
    )
    return found


def test_load_times_are_those_of_the_rows():
    small = [(part, 2) for part in ("load_whole", "load_image", "load_int8")]
    for part, layers in [*small, ("load_image", 32), ("load_int8", 32)]:
        row = of_release(part, layers)
        disk, memory = (row["bytes"][name] / 1e9 for name in ("disk", "parameters"))
        told = f"| {disk:.2f} GB | {memory:.2f} GB | {row['cpu_s']:.1f} s |"
        assert told in page("docs/log/2026-11-full-size.md"), part


def test_full_size_is_as_it_was_measured():
    rows = [
        row
        for row in measurements.read_rows("rehearsal")
        if (row["size"], row["layers"]) == ("release", 32)
    ]
    assert table.table("full_size", table.full_size(rows)) in page("docs/speed.md")
    for name in ("rehearsal", "rehearsal_presets"):
        assert table.table(name, rows) in page("docs/log/2026-11-full-size.md")


def test_what_was_measured_by_hand_is_reported_with_its_bars():
    assert table.by_hand_table() in page("docs/log/2026-11-one-h200.md")
    by_hand = {tuple(line["bar"]): line.get("value") for line in table.bars()["by_hand"]}
    for name in ("README.md", "docs/speed.md"):
        told = on_one_line(page(name))
        for case in ("t2i1024/sparse/b1", "edit1024/sparse/b1", "reasoning/sparse/b1/k8"):
            value = by_hand["speed", "at_most_s", case]
            assert f" {value:g} s".replace(" 0.", " .") in told, (name, case)
    for sentence in re.findall(r"[^.|]*\bH200\b(?:[^.]|\.\d)*", on_one_line(page("README.md"))):
        assert "random weights" in sentence


def test_the_memory_of_a_conversion_is_that_of_the_rows():
    for layers in (2, 6, 32):
        row = of_release("convert", layers)
        peak = row["peak_host_memory_bytes"] / 2**30
        told = f"| {layers} | {row['bytes']['disk'] / 1e9:.2f} GB | {peak:.2f} GiB |"
        assert told in page("docs/convert.md"), layers


def test_the_cheaper_loss_is_taken_as_it_was_compiled():
    rows = measurements.read_rows("aot_loss")
    assert table.table("aot_loss", rows) in page(COMPILED)
    pairs = {}
    for row in rows:
        pairs.setdefault((row["task"], row["head_tokens"]), {})[row["method"]] = row
    for (task, tokens), pair in pairs.items():
        plain, tiled = pair["plain"], pair["tiled"]
        taken, other = sorted(pair.values(), key=lambda row: not row["is_taken"])
        assert taken["is_taken"] > other["is_taken"]
        assert taken["predicted_s"] <= 1.03 * other["predicted_s"], (task, tokens)
        assert taken["operations"] <= 1.03 * other["operations"]
        if tokens >= 2048:
            fewer = tiled["bytes"]["temporaries"] < plain["bytes"]["temporaries"]
            assert fewer, (task, tokens)


def test_what_a_step_costs_is_as_it_was_compiled():
    rows = measurements.read_rows("aot_training")
    assert table.table("aot_training", rows) in page(COMPILED)


def test_shares_that_are_drawn_correctly_are_those_of_the_rows():
    share = {
        row["model"]: f"{row['share']:.2f}".lstrip("0")
        for row in measurements.read_rows("quality")
        if row["task"] == "draw" and row["method"] == "sparse"
    }
    told = f"It draws {share['scenes_long']} of its prompts correctly"
    assert told in on_one_line(page("docs/training.md"))
    told = on_one_line(page("docs/log/2026-11-bundled-model.md"))
    four, one = share["scenes_g4"], share["scenes"]
    assert f"{four} of the prompts are drawn correctly with four codes and {one} with one" in told


def test_layouts_of_four_images_are_those_of_the_row():
    drawn = (row for row in measurements.read_rows("quality") if row["task"] == "draw/4 images")
    rows = {row["method"]: row for row in drawn}
    row, told = rows["sparse"], on_one_line(page("docs/log/2026-11-bundled-model.md"))
    right = f"{row['share']:.3f}".lstrip("0")
    assert f"have {row['layouts']:.2f} different layouts on average (bar 3.5; 500 prompts)" in told
    assert f"and {right} of these images are right" in told
    assert f"have {rows['dense']['layouts']:.2f} different layouts with the dense twin" in told
    assert row["layouts"] >= 3.5 and row["total"] == 2000


def test_the_whole_request_on_a_cpu_is_that_of_the_rows():
    rows = measurements.read_rows("cpu")
    sparse = next(table.View(row) for row in rows if row["method"] == "sparse")
    sparse["other"] = table.row_of(rows, sparse, "dense_lean")
    ratio = sparse["other"]["tokens"]["useful"] / sparse["tokens"]["useful"]
    share = 100 * sparse["share_of_token_ratio"]
    assert f"sparse was {sparse['times_faster']:.1f} times" in on_one_line(page("docs/speed.md"))
    told = on_one_line(page("docs/log/2026-11-speed-on-a-cpu.md"))
    assert f"{sparse['times_faster']:.1f} times (bar 4, met)" in told
    assert f"and {share:.0f} % of the ratio of tokens, which is {ratio:.1f} (bar" in told


def test_the_time_of_a_conversion_is_that_of_the_rows():
    taken = [of_release(part, 32)["cpu_s"] for part in ("convert", "verify", "export")]
    told = on_one_line(page("docs/log/2026-11-full-size.md"))
    assert "| {:.0f}, {:.0f} and {:.0f} s of a CPU core".format(*taken) in told
    assert f"took {taken[0]:.0f} s of CPU time" in on_one_line(page("docs/convert.md"))


def test_pages_tell_the_same_time_for_the_tests():
    for name in ("README.md", "CONTRIBUTING.md"):
        found = re.search(r"two cores,?(?: the suite takes)? about ([\w ]+ hour)", page(name))
        assert found is not None and found[1] == "a quarter of an hour", name


def texts_of(script):
    """Returns the texts of a script's constants in capitals, with those in braces filled in."""
    texts = {}
    for node in ast.parse(page(f"docs/{script}.py")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.JoinedStr):
            name, code = ast.unparse(node.targets[0]), ast.unparse(node.value)
            texts[name] = eval(code, dict(texts))
    return texts


@pytest.mark.parametrize(
    ("script", "names"),
    [("tour", ["PAGE"]), ("package", ["PAGE", "ACCELERATORS"])],
)
def test_a_page_has_the_text_of_the_script_that_writes_it(script, names):
    for name in names:
        assert texts_of(script)[name] in page(f"docs/{script}.md")
