# SPDX-License-Identifier: Apache-2.0
"""Old names in files are read, and old names that are typed are refused with the new ones."""

import json

import numpy as np
import pytest

from sparse_lavida_jax import config, old_names
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.cli.parser import Parser
from sparse_lavida_jax.cli.usage_errors import UsageError
from sparse_lavida_jax.scenes import tasks

OLD = {
    "data": {"tasks": {"plan": 1.0, "edit_plan": 2.0}, "plan_drop": 0.5},
    "diffusion": {"blocks": "plan", "plan_steps": [4]},
    "train": {"eval_tasks": ["plan", "draw"]},
    "sampling": {"plan": False, "text_steps": 4, "text_most": 1, "temperature_end": 0.5},
    "task": "fill_plan",
}
NEW = {
    "data": {"tasks": {"layout": 1.0, "edit_layout": 2.0}, "layout_drop": 0.5},
    "diffusion": {"blocks": "plan", "plan_steps": [4]},
    "train": {"eval_tasks": ["layout", "draw"]},
    "sampling": {
        "layout": False,
        "text": {"steps": 4, "most": 1},
        "released": {"temperature_end": 0.5},
    },
    "task": "fill_layout",
}


def test_settings_records_and_rows_get_new_names_and_a_plan_of_the_sampler_keeps_its_own():
    assert old_names.current(OLD) == NEW == old_names.current(NEW)
    assert old_names.before({k: NEW[k] for k in ("data", "diffusion", "train")}) == {
        k: OLD[k] for k in ("data", "diffusion", "train")
    }


def test_every_setting_of_sampling_that_moved_is_where_the_table_says():
    """If a file has both names, the old one counts. What should be a section is refused later."""
    for old, (section, name) in old_names.SECTIONS.items():
        assert hasattr(getattr(config.Sampling(), section), name)
        assert not hasattr(config.Sampling(), old)
    both = {"sampling": {"text_steps": 4, "text": {"steps": 2, "most": 1}}}
    assert old_names.current(both)["sampling"] == {"text": {"steps": 4, "most": 1}}
    hostile = old_names.current({"sampling": {"text_steps": 4, "text": 5}})
    with pytest.raises(config.ConfigError, match=r"Sampling\.text is 5"):
        config.build(config.Sampling, hostile["sampling"])


def test_the_bundled_model_has_old_names_on_disk_and_new_ones_when_read():
    folder = model_folder.find_model("scenes")
    written = json.loads((folder / "config.json").read_text())
    read = model_folder.read_config(folder)
    assert "plan" in written["sampling"] and "fill_plan" in written["data"]["tasks"]
    assert read.sampling.layout == written["sampling"]["plan"]
    assert read.sampling.text.steps == written["sampling"]["text_steps"]
    assert read.data.tasks["fill_layout"] == written["data"]["tasks"]["fill_plan"]


def test_a_renamed_task_draws_what_it_always_drew():
    assert old_names.stream_of("layout") == "plan" and old_names.stream_of("draw") == "draw"
    first = tasks.Dice(3, "train/plan", 5)
    sample = tasks.TABLE["layout"].make(first)
    assert sample is not None
    again = tasks.sample("layout", 3, 5)
    assert (again.prompt, again.answer) == (sample.prompt, sample.answer)
    assert np.isscalar(len(again.answer))


@pytest.mark.parametrize(
    ("words", "new"),
    [
        (["a", "--plan", "x<LOC_1>"], "`--plan` is now `--layout`"),
        (["a", "--no-plan"], "`--no-plan` is now `--no-layout`"),
    ],
)
def test_an_old_option_is_refused_with_the_new_one(words, new):
    with pytest.raises(UsageError, match=new):
        Parser("generate").parse_args(words)


def test_an_old_setting_is_refused_with_the_new_one():
    with pytest.raises(config.ConfigError, match="`plan` is now `layout`"):
        config.build(config.Sampling, {"plan": False})
    with pytest.raises(config.ConfigError, match=r"`text_steps` is now `text\.steps`"):
        config.build(config.Sampling, {"text_steps": 4})
    # Other sections, and options of requests, never had such names.
    assert old_names.hint("text_steps", "--") == "" == old_names.hint("text_steps", section="Data")
