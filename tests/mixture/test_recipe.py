# SPDX-License-Identifier: Apache-2.0
"""Mixture files: the released fields, and one-sentence errors for anything else."""

import json

import numpy as np
import pytest

from sparse_lavida_jax.mixture import recipe
from sparse_lavida_jax.mixture.recipe import RecipeError

DATASET = {"name": "a", "json_path": "a.parquet", "preprocess_fn": "piat_hash"}
YAML = """
datasets:
  - name: a
    json_path: tables/a.parquet
    preprocess_fn: preproces_text_to_image_generation_s3
    image_root: images
    sampling_strategy: first:5%
    length_group: t2i
    min_size: 512
    columns: [image, caption]
  - name: b
    json_path: /data/b-*.tar
    preprocess_fn: process_gpt_edit_loc_gnd
    process_fn_kwargs: {plan_only: true}
    columns: {loc: layout}
weights: {t2i: 250, edit_layout: 30}
batch_sizes: {edit_layout: 0.5}
"""


def read(tmp_path, contents, name="mixture.json"):
    path = tmp_path / name
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return recipe.read(path)


def test_a_released_file_is_understood(tmp_path):
    pytest.importorskip("yaml", reason="YAML needs pip install '.[data]'")
    made = read(tmp_path, YAML, "mixture.yaml")
    first, second = made.datasets
    assert (first.kind, first.group, first.form) == ("text_to_image", "t2i", "")
    assert first.patterns == (str(tmp_path / "tables/a.parquet"),)
    assert first.image_root == str(tmp_path / "images")
    assert (first.min_size, first.aes_cutoff) == (512, 5.0)
    assert first.columns == ("image", "caption")
    assert (second.kind, second.group, second.form) == ("edit_layout", "edit_layout", "plan_only")
    assert second.patterns == ("/data/b-*.tar",)
    assert second.columns == {"loc": "layout"}
    assert made.weights == {"t2i": 250.0, "edit_layout": 30.0}
    assert made.batch_sizes == {"t2i": 1.0, "edit_layout": 0.5}


def test_yaml_makes_no_objects(tmp_path):
    pytest.importorskip("yaml", reason="YAML needs pip install '.[data]'")
    with pytest.raises(RecipeError, match="is no YAML: could not determine a constructor"):
        read(tmp_path, "datasets: !!python/object/apply:os.getcwd []", "mixture.yaml")


@pytest.mark.parametrize(
    ("strategy", "rows"),
    [
        ("all", range(10)),
        ("first:3", range(3)),
        ("first:25%", range(3)),
        ("end:2", (8, 9)),
        ("dup:2", (*range(10), *range(10))),
        ("first:99", range(10)),
    ],
)
def test_a_strategy_takes_rows(strategy, rows):
    made = recipe.Dataset(**DATASET, sampling_strategy=strategy)
    assert made.chosen(10).tolist() == [*rows]


def test_a_random_strategy_takes_the_same_rows_each_time():
    made = recipe.Dataset(**DATASET, sampling_strategy="random:200")
    chosen = made.chosen(1000)
    assert len(set(chosen.tolist())) == 200
    np.testing.assert_array_equal(chosen, np.sort(chosen))
    np.testing.assert_array_equal(chosen, made.chosen(1000))
    assert 400 < chosen.mean() < 600  # 500, give or take five standard errors of 20
    share = recipe.Dataset(**DATASET, sampling_strategy="20%").chosen(1000)
    np.testing.assert_array_equal(share, chosen)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nmae": "b"}, "Dataset has no nmae. It has: name, json_path"),
        ({"json_path": None}, "has no json_path"),
        ({"name": "a/b"}, "its name becomes a folder"),
        (
            {"preprocess_fn": "own"},
            "preprocess_fn='own' is out of range: there are: preproces_text_to_image",
        ),
        ({"sampling_strategy": "5"}, "use all, first:N, end:N, random:N"),
        ({"sampling_strategy": "dup:0"}, "use all, first:N, end:N, random:N"),
        ({"process_fn_kwargs": {"plan_only": True}}, "this function takes none"),
        ({"min_size": "large"}, "min_size='large' is a str; it must be a int"),
        ({"columns": 3}, "columns=3 is out of range: a list of names"),
        ({"length_group": ["x"]}, "length_group=['x'] is a list; it must be a str"),
    ],
)
def test_a_wrong_field_is_reported(tmp_path, changes, said):
    with pytest.raises(RecipeError, match=r"dataset 1 of .*mixture.json") as caught:
        read(tmp_path, {"datasets": [DATASET | changes]})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ("{", "is no JSON"),
        ([], "is not a mixture: it must hold `datasets`"),
        ({"datasets": []}, "has no datasets"),
        (
            {"datasets": [DATASET], "wieghts": {}},
            "Recipe has no wieghts. It has: datasets, weights",
        ),
        ({"datasets": [DATASET, DATASET]}, "two datasets named a"),
        (
            {"datasets": [DATASET], "weights": {"t2i": 1}},
            "by group, of text_to_image, a number greater",
        ),
        ({"datasets": [DATASET], "weights": {"text_to_image": 0}}, "a number greater than 0"),
        (
            {"datasets": [DATASET], "weights": {"text_to_image": "2"}},
            "Recipe.weights.text_to_image='2' is a str; it must be a float",
        ),
        (
            {"datasets": [DATASET], "batch_sizes": {"text_to_image": True}},
            "Recipe.batch_sizes.text_to_image=True is a bool; it must be a float",
        ),
        (
            {"datasets": [DATASET], "weights": {"text_to_image": float("nan")}},
            "it must be finite",
        ),
        (
            {"datasets": [DATASET], "weights": {"text_to_image": float("inf")}},
            "it must be finite",
        ),
        (
            {"datasets": [DATASET], "weights": [1]},
            "has weights that are no numbers by group: [1]. Write a number after the name of a"
            " group, such as text_to_image: 1.",
        ),
        ({"datasets": ["a"]}, "fields by name are needed"),
    ],
)
def test_a_wrong_file_is_reported(tmp_path, contents, said):
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, contents)
    assert said in str(caught.value)


@pytest.mark.parametrize("order", [1, -1])
def test_a_weight_that_is_no_number_is_seen_wherever_it_stands(tmp_path, order):
    groups = [DATASET | {"name": name, "length_group": name} for name in "ab"]
    weights = dict(zip("ab"[::order], (1.0, float("nan")), strict=True))
    with pytest.raises(RecipeError, match="it must be finite"):
        read(tmp_path, {"datasets": groups, "weights": weights})


def test_an_image_with_a_layout_is_learned_in_one_form(tmp_path):
    both = {"plan_only": True, "no_plan": True}
    with pytest.raises(RecipeError, match="both plan_only and no_plan"):
        read(
            tmp_path,
            {"datasets": [DATASET | {"preprocess_fn": "layout", "process_fn_kwargs": both}]},
        )


def test_a_file_that_is_not_there_or_of_another_kind_is_reported(tmp_path):
    with pytest.raises(RecipeError, match=r"^there is no mixture file .*m.json\.$"):
        recipe.read(tmp_path / "m.json")
    with pytest.raises(RecipeError, match=r"cannot be read: .* is not a regular file"):
        recipe.read(tmp_path)
    with pytest.raises(RecipeError, match=r"its name must end in .json, .yaml or .yml"):
        read(tmp_path, "x", "mixture.txt")
