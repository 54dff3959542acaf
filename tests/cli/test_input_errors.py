# SPDX-License-Identifier: Apache-2.0
"""Errors carry the setting, its value and what is allowed; each face words them."""

import pickle

import pytest

from sparse_lavida_jax import config
from sparse_lavida_jax.cli.parser import Parser
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling import options
from sparse_lavida_jax.schema import InputError, about


@pytest.fixture
def error():
    with pytest.raises(config.ConfigError) as caught:
        options.changed(config.Sampling(), draws=True, num_inference_steps=0)
    return caught.value


RULE = "=0 is out of range: it must be greater than 0."


def test_an_error_names_the_option_and_not_the_field_that_it_sets(error):
    assert str(error) == f"steps{RULE}"
    assert (error.setting, error.value) == ("steps", "0")
    assert error.allowed == "it must be greater than 0"
    with pytest.raises(config.ConfigError, match=r"^Sampling.num_steps=0 is out of range: it must"):
        config.Sampling(num_steps=0)


def test_the_command_line_names_the_flag(error):
    assert error.worded(Parser("generate").spelled) == f"--steps{RULE}"
    assert error.worded(Parser("verify").spelled) == f"steps{RULE}"  # has no such flag
    needed = InputError("{setting} is missing.", setting="src")
    assert needed.worded(Parser("verify").spelled) == "the argument src is missing."
    assert needed.worded(Parser("verify", is_mode=True).spelled) == "--src is missing."


def test_the_server_names_the_field_that_was_sent(error):
    pytest.importorskip("fastapi", reason="needs pip install 'sparse-lavida-jax[serve]'")
    from sparse_lavida_jax.server.openai import bodies, http_errors

    sent = bodies.checked({"prompt": "a", "num_inference_steps": 5}, bodies.ImageBody).sent
    with pytest.raises(http_errors.Refused) as caught, http_errors.refusing(sent):
        raise error
    assert caught.value.detail == f"num_inference_steps{RULE}"
    assert caught.value.param == "num_inference_steps"
    with pytest.raises(http_errors.Refused) as caught, http_errors.refusing(sent):
        raise RequestError("{setting}={value} cannot be.", setting="size", value="7x96")
    assert (caught.value.detail, caught.value.param) == ("size=96x7 cannot be.", "size")


def test_the_page_names_the_label(error):
    pytest.importorskip("gradio", reason="needs pip install 'sparse-lavida-jax[demo]'")
    from sparse_lavida_jax.page import demo

    assert error.worded(demo._label) == f"Steps{RULE}"


def test_names_of_settings_that_are_allowed_are_worded_too():
    one = InputError("no {setting}. It takes {allowed}.", setting="mask", allowed=("seed", "known"))
    assert str(one) == "no mask. It takes seed, known."
    assert one.worded({"mask": "--mask", "seed": "--seed", "known": ""}.get) == (
        "no --mask. It takes --seed."
    )


def test_values_with_braces_stay_as_they_are():
    value = "{allowed} {setting}"
    assert str(InputError(setting="order", value=value, allowed="a")).startswith(
        f"order={value} is"
    )
    assert str(InputError("there is no {value}.")) == "there is no {value}."


def test_an_error_without_a_setting_may_get_one():
    with pytest.raises(InputError) as caught, about("mask"):
        raise InputError("it is empty.")
    assert (caught.value.setting, str(caught.value)) == ("mask", "it is empty.")
    with pytest.raises(InputError) as caught, about("mask"):
        raise InputError("{setting} is empty.", setting="image")
    assert caught.value.setting == "image"


def test_an_error_survives_another_process(error):
    again = pickle.loads(pickle.dumps(error))
    assert vars(again) == vars(error) and str(again) == str(error)
