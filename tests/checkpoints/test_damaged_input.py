# SPDX-License-Identifier: Apache-2.0
"""Arbitrarily damaged files: what cannot be read is reported in one sentence.

SLOW_TESTS=1, as set by `.ci/run --full`, tries 40 times as many.
"""

import copy
import functools
import io
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
import tiny
import torch_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import manifest, model_folder
from sparse_lavida_jax.convert import settings as released
from sparse_lavida_jax.convert.settings import ConvertError
from sparse_lavida_jax.data import files, image_files
from sparse_lavida_jax.inference import provenance
from sparse_lavida_jax.inference.results import FORMAT, SAMPLER_VERSION, SHOWN_KEY
from sparse_lavida_jax.prompting.request_errors import RequestError

fuzzed = settings(
    max_examples=2000 if os.environ.get("SLOW_TESTS") else 50,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from([0, -1, 2**31, 10**400, 1e308, float("nan"), "", "/dev/null", "\0", "int8"]),
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=5), one)
)


@st.composite
def changed(draw, value):
    """Returns a JSON value with other contents in one or two places."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 2))):
        place = value
        while True:
            keys = [*place] if isinstance(place, dict) else range(len(place))
            key = draw(st.sampled_from([*keys]))
            inside = place[key]
            if not (isinstance(inside, dict | list) and inside) or draw(st.integers(0, 3)) == 0:
                break
            place = inside
        if isinstance(place, dict) and draw(st.integers(0, 4)) == 0:
            del place[key]
        else:
            place[key] = draw(ANYTHING)
        if not value:
            break
    return value


@st.composite
def spoilt(draw, content):
    """Returns bytes with some changed, added or removed."""
    at = draw(st.integers(0, len(content) - 1))
    match draw(st.sampled_from(["flip", "cut", "insert", "fill"])):
        case "flip":
            return (
                content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
            )
        case "cut":
            return content[:at]
        case "insert":
            return content[:at] + draw(st.binary(min_size=1, max_size=9)) + content[at:]
        case _:
            return content[:at] + bytes(len(content) - at)


# ---------------------------------------------------------------------------------------------
# Settings.


@fuzzed
@given(changed(config.to_dict(config.Config())) | ANYTHING)
def test_settings(values):
    try:
        assert isinstance(config.build(config.Config, values), config.Config)
    except config.ConfigError as error:
        assert len(str(error)) < 2000


RELEASED = released.official_config(torch_folder.SETTINGS, "bfloat16")
VQ = released.official_vq_config(torch_folder.VQ)


@fuzzed
@given(changed(RELEASED), changed(VQ) | st.just(VQ))
def test_settings_of_a_released_folder(values, vq):
    try:
        assert isinstance(released.settings_from(values, vq), config.Config)
    except ConvertError as error:
        assert "does not fit this project" in str(error)


@fuzzed
@given(
    st.text()
    | spoilt(json.dumps(RELEASED).encode()).map(lambda content: content.decode("latin-1"))
    | st.integers(50, 100_000).map(lambda depth: "[" * depth + "]" * depth)
    | st.integers(50, 100_000).map(lambda depth: '{"a":' * depth + "1" + "}" * depth)
)
def test_json(text):
    try:
        json.dumps(files.parse_json(text, unique=True))
    except ValueError as error:
        assert str(error)


# ---------------------------------------------------------------------------------------------
# Images, and their records of how they were drawn.


@functools.cache
def encoded(form: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, exif=b"Exif\0\0MM\0*\0\0\0\x08" + bytes(8))
    return buffer.getvalue()


@fuzzed
@given(st.sampled_from(image_files.FORMATS).flatmap(lambda form: spoilt(encoded(form))))
def test_images(content):
    try:
        assert image_files.read_bytes(content).ndim == 3
    except image_files.ImageError as error:
        assert str(error)


RECORD = {
    "format": FORMAT,
    "sampler": SAMPLER_VERSION,
    "task": "inpaint",
    "prompt": "a red circle",
    "seed": 3,
    "recipe": {"known": [[True, False], [False, True]]},
    "plan": None,
    SHOWN_KEY: {"path": "a.png", "sha256": "0" * 64},
    "bucket": {"rows": 1, "prompt_len": [8, 0]},
    "sampling": config.to_dict(config.Sampling()),
    "checkpoint": {"name": "scenes", "sha256": "0" * 64},
    "version": "0.1.0",
    "software": {"jax": "0.10.2", "device": "cpu"},
    "codes": [[1], [2]],
    "margins": {"layout": [], "image": [0.5, None]},
}


def test_a_record_that_nothing_happened_to():
    provenance.check(json.loads(json.dumps(RECORD)))


@pytest.mark.parametrize("part", ["bucket", "sampling", "checkpoint"])
def test_a_record_with_nothing_where_something_is_needed_is_refused(part):
    provenance.check(RECORD | {"bucket": None, SHOWN_KEY: {"path": None, "sha256": ""}})
    for name in RECORD[part]:
        with pytest.raises(RequestError, match=name):
            provenance.check(RECORD | {part: RECORD[part] | {name: None}})


def test_what_a_record_lacks_is_named():
    for name in RECORD["bucket"]:
        with pytest.raises(RequestError, match=f"needs a value for {name}"):
            provenance.check(
                RECORD | {"bucket": {k: v for k, v in RECORD["bucket"].items() if k != name}}
            )
    for name in ("task", "prompt", "seed", "recipe", "sampling", "checkpoint", "software"):
        with pytest.raises(RequestError, match=f"needs a value for {name}"):
            provenance.check(RECORD | {name: None})


@fuzzed
@given(changed(RECORD))
def test_records(record):
    try:
        provenance.check(record)
    except RequestError as error:
        assert len(str(error)) < 2000


# ---------------------------------------------------------------------------------------------
# Model folders.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model folder that tests must not change."""
    scratch = tmp_path_factory.mktemp("whole")
    (scratch / "text.json").write_text("{}")
    made = config.Config(model=tiny.model_settings())
    model_folder.save_model(
        scratch / "model", model_folder.make_denoiser(made), made,
        tokenizer_path=scratch / "text.json", vq_folder=None, readme="# test\n",
    )  # fmt: skip
    return scratch / "model"


@fuzzed
@given(data=st.data())
def test_model_folders(whole, tmp_path, data):
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    folder = pathlib.Path(shutil.copytree(whole, tmp_path / "model"))
    path = data.draw(st.sampled_from(sorted(p for p in folder.rglob("*") if p.is_file())))
    content = path.read_bytes()
    match data.draw(
        st.sampled_from(["spoil", "spoil", "remove", "folder", "more", "link", "pipe", "huge"])
    ):
        case "remove":
            path.unlink()
        case "folder":
            path.unlink()
            path.mkdir()
        case "link":
            path.unlink()
            path.symlink_to(data.draw(st.sampled_from(["/dev/zero", "/etc", "..", path.name, "x"])))
        case "pipe":
            path.unlink()
            os.mkfifo(path)
        case "huge":
            os.truncate(path, data.draw(st.sampled_from([2**27, 2**40])))
        case "more":
            path.with_name(f"{path.name}.more").write_bytes(content)
        case _:
            changed = data.draw(spoilt(content or b"?"))
            same_list = path.name == manifest.MANIFEST and changed.split() == content.split()
            if changed == content or same_list:  # without the last line break
                return
            path.write_bytes(changed)
    with pytest.raises(model_folder.CheckpointError):
        model_folder.load_model(folder)
