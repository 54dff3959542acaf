# SPDX-License-Identifier: Apache-2.0
"""Settings are checked on creation; every error is a sentence with a remedy."""

import dataclasses
import json
import pathlib

import ml_collections
import pytest

from sparse_lavida_jax import config

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.py"))


def test_unknown_setting_lists_the_known_ones():
    with pytest.raises(config.ConfigError, match=r"Train has no train_step\. It has: stage, tra"):
        config.build(config.Config, {"train": {"train_step": 5}})


@pytest.mark.parametrize("name", ["sft_1024", "lavida_o_lora", "lavida_o_branch"])
def test_what_the_release_drops_is_dropped(name):
    """Spec Sec. 9.2."""
    (path,) = (path for path in CONFIGS if path.stem == name)
    data = config.read(path).data
    assert (data.prompt_drop, data.source_drop) == (0.1, 0.5)


@pytest.mark.parametrize("name", ["sft_1024", "lavida_o_lora", "lavida_o_branch"])
def test_a_run_from_the_release_keeps_its_form_of_prompts(name):
    (path,) = (path for path in CONFIGS if path.stem == name)
    assert config.read(path).prompts == "chat"


def test_unknown_section_lists_the_known_ones():
    with pytest.raises(config.ConfigError, match="It has: name, seed, prompts, model, vq"):
        config.build(config.Config, {"modle": {}})


@pytest.mark.parametrize(
    ("section", "name", "value", "message"),
    [
        ("diffusion", "partial_cells", 2.0, r"partial_cells=2.0 is out of range"),
        ("diffusion", "text_masked_blocks", 0, r"it must lie in 1\.\.16"),
        ("diffusion", "text_masked_blocks", 17, r"it must lie in 1\.\.16"),
        ("optimizer", "b2", 7.0, r"b2=7.0 is out of range: it must lie in \[0, 1\]"),
        ("train", "batch_size", 0, "greater than 0"),
        ("sampling", "order", "spiral", "stratified, halton, random, raster"),
        ("sampling", "schedule", "quadratic", "shift, cosine, cosine2"),
        ("sampling", "preset", "prefix", "choose one of dense, none"),
        ("sampling", "text", {"preset": "fast_dllm"}, "fast_dllm_prefix, fast_dllm_dual"),
        ("sampling", "guidance_interval", (0.7, 0.3), "0 <= first <= last <= 1"),
        ("sampling", "top_p", 0.0, r"must lie in \(0, 1\]"),
        ("sampling", "text", {"top_p": 1.5}, r"must lie in \(0, 1\]"),
        ("sampling", "text", {"most": 2}, 'it must be 0 with commit="count"'),
        ("sampling", "edit_guidance", "mode0", "source, source_only, no_source"),
        ("model", "head_dim", 31, "even"),
        ("model", "codes_per_token", 2, "choose one of 1, 4"),
        ("model", "dual_tower_layers", 9, r"one of 0\.\.4"),
        ("data", "max_answer_len", 41, "a multiple of text_block_len=8"),
        ("data", "sheet", "sheets/mine", 'source="art"'),
        ("diffusion", "corruption", "swapped", "choose one of blocks, released"),
        ("diffusion", "complementary", True, 'it needs corruption "released"'),
        ("diffusion", "text_loss", False, 'it needs corruption "released"'),
    ],
)
def test_value_out_of_range_says_the_range(section, name, value, message):
    with pytest.raises(config.ConfigError, match=message):
        config.build(config.Config, {section: {name: value}})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "attention='step_causal' .* needs \"full\""),
        ({"attention": "full"}, "weighting='1/t' .* needs \"mean\""),
    ],
)
def test_the_released_objective_has_full_attention_and_plain_means(given, message):
    with pytest.raises(config.ConfigError, match=message):
        config.Diffusion(corruption="released", **given)


def test_wrong_type_says_the_right_one():
    with pytest.raises(config.ConfigError, match="train_steps='9' is a str; it must be a int"):
        config.build(config.Config, {"train": {"train_steps": "9"}})


def test_a_whole_number_is_fine_where_a_fraction_is_meant():
    built = config.build(config.Config, {"train": {"seconds": 60}})
    assert isinstance(built.train.seconds, float)


def test_settings_survive_json():
    before = config.build(
        config.Config,
        ml_collections.ConfigDict(
            {"name": "x", "vq": {"channels": (8, 16)}, "data": {"tasks": {"draw": 2, "edit": 1}}}
        ),
    )
    after = config.build(config.Config, json.loads(json.dumps(config.to_dict(before))))
    assert after == before


def test_changes_are_what_is_not_the_default():
    assert config.changes(config.Config()) == {}
    lesson = {"first": {"until": 3, "tasks": {"draw": 1.0}}}
    given = {
        "seed": 4,
        "model": {"width": 96, "vision": {"pool": 1}},
        "data": {"tasks": {"draw": 2.0}, "lessons": lesson},
        "diffusion": {"plan_steps": (8, 12, 18)},  # as the default
    }
    settings = config.build(config.Config, given)
    del given["diffusion"]
    assert config.changes(settings) == given
    assert config.build(config.Config, config.changes(settings)) == settings


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.Config().seed = 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_builds(path):
    settings = config.read(path)
    assert settings.name != "unnamed"
