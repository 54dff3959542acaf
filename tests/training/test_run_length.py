# SPDX-License-Identifier: Apache-2.0
"""A run on own images says in time, and at its end, whether it is long enough."""

import json

import pytest

from sparse_lavida_jax import config
from sparse_lavida_jax.training import lengths

TRAIN = config.Train(train_steps=1000, seconds=420.0)


def test_a_run_that_will_be_too_short_says_which_time_would_do():
    """60 steps in 60 seconds: 1000 take 1000 seconds, and 420 fit."""
    warning = lengths.forecast(TRAIN, 60, 60.0, (60, 60.0))
    assert warning.startswith("about 420 of 1000 planned steps fit into 7 minutes at this speed.")
    assert "All of them take about 17 minutes: --config.train.seconds=1020 " in warning
    assert lengths.forecast(TRAIN, 60, 24.0, (60, 24.0)) is None
    assert lengths.forecast(TRAIN, 100, 42.0, (100, 42.0)) == ""  # exactly in time
    # A run that goes on at half the speed: 600 s for 500 steps, and 500 more take 1000 s.
    on = config.Train(train_steps=1000, seconds=1500.0)
    assert "--config.train.seconds=1620 " in lengths.forecast(on, 510, 620.0, (70, 140.0))


@pytest.mark.parametrize(
    ("seconds", "measured", "known"),
    [
        (420.0, (9, 41.9), False), (420.0, (9, 42.0), True), (420.0, (4, 100.0), False),
        (9000.0, (9, 119.0), False), (9000.0, (9, 120.0), True),
    ],
)  # fmt: skip
def test_the_speed_is_known_after_two_minutes_or_a_tenth_of_the_time(seconds, measured, known):
    train = config.Train(seconds=seconds)
    assert (lengths.forecast(train, *measured, measured) is not None) == known


def outcome(tmp_path, step, losses=(), **train):
    lines = [json.dumps({"step": i, "loss": 9.0, "image_nll": x}) for i, x in enumerate(losses)]
    log = tmp_path / "metrics.jsonl"
    log.write_text("\n".join([*lines, json.dumps({"step": step, "seconds": 420.0})]))
    settings = config.Config(train=config.Train(**{"train_steps": 1000, "seconds": 420.0} | train))
    return lengths.outcome(settings, log, step, 420.0)


def test_too_few_steps_are_named_with_the_loss_and_the_way_on(tmp_path):
    enough, sentence = outcome(tmp_path, 76, (6.0, 5.0, 4.3, 4.2, 4.1))
    assert not enough
    assert "76 of 1000 planned steps, too few" in sentence
    assert f"is 4.20, and our runs with good samples ended at {lengths.SAMPLES_SHOW:g}" in sentence
    assert sentence.endswith("the same command with --config.train.seconds=5580 goes on")


def test_a_run_is_long_enough_by_its_steps_or_by_its_loss(tmp_path):
    low = lengths.SAMPLES_SHOW
    done, early = outcome(tmp_path, 1000, (4.2,)), outcome(tmp_path, 500, (low, low, low))
    assert done[0] and "1000 of 1000 planned steps" in done[1]
    assert early[0] and "500 of 1000 planned steps" in early[1]
    assert "too few" not in done[1] + early[1]
    assert "goes on" in early[1] and "goes on" not in done[1]


def test_a_plan_of_too_few_steps_is_not_enough(tmp_path):
    enough, sentence = outcome(tmp_path, 6, (5.9,), train_steps=6)
    assert not enough and sentence.startswith("6 of 6 planned steps, too few;")
    fewest = min(lengths.PLANNED.values())
    assert sentence.endswith(f"with --config.train.train_steps={fewest} goes on")


def test_the_loss_is_not_compared_where_ours_says_nothing(tmp_path):
    for enough, sentence in (
        outcome(tmp_path, 500, (0.1,), init_from="scenes"),  # starts elsewhere
        outcome(tmp_path, 500),  # no images
    ):
        assert not enough and "good samples" not in sentence


def test_few_images_need_fewer_steps():
    planned = [lengths.planned_steps(count) for count in (1, 40, 150, 400, 4000)]
    assert planned == sorted(planned) and planned[3] == 2200
