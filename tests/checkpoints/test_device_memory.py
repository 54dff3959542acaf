# SPDX-License-Identifier: Apache-2.0
"""A model that is larger than a device is refused before it is read, with what would fit."""

import dataclasses
import logging
import pathlib
import re

import jax
import pytest
import stand_ins

from benchmarks import measurements
from sparse_lavida_jax.checkpoints import model_folder, room, stores
from sparse_lavida_jax.cli import doctor
from sparse_lavida_jax.convert.settings import settings_from
from sparse_lavida_jax.models import fuse
from sparse_lavida_jax.pipeline import SparseLaViDa

FOLDER = pathlib.Path("models/lavida-o")
PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "gpus.md").read_text()
RELEASED = settings_from({
    "d_model": 4096, "d_model_gen": 2048, "downsample": True, "dual_tower": True,
    "dual_tower_layers": 16, "embedding_size": 127378, "eos_token_id": 126081,
    "gen_mlp_type": "dit2", "mask_token_id": 126336, "mlp_hidden_size": 12288,
    "mlp_hidden_size_gen": 8192, "n_heads": 32, "n_layers": 32, "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
})  # fmt: skip
BFLOAT16 = dataclasses.replace(
    RELEASED, model=dataclasses.replace(RELEASED.model, compute_dtype="bfloat16")
)


class Card:
    """A GPU of which jax may use some GB."""

    platform, device_kind = "gpu", "NVIDIA Test"

    def __init__(self, gb, platform="gpu"):
        self.platform = platform
        self.known = {"bytes_limit": round(gb * 1e9)}

    def memory_stats(self):
        return self.known


@pytest.fixture
def card(monkeypatch):
    """Returns a function that pretends a device and the settings of the model in a folder."""

    def pretend(gb, platform="gpu"):
        found = Card(gb, platform)
        monkeypatch.setattr(room, "_devices", lambda _: [found])
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        monkeypatch.setattr(model_folder, "read_config", lambda _: BFLOAT16)
        monkeypatch.setattr(stores, "narrow_dtype", lambda _: "")
        monkeypatch.delenv(room.FRACTION, raising=False)
        return found

    return pretend


def refusal(**how):
    with pytest.raises(room.RoomError) as caught:
        room.check(FOLDER, **how)
    return str(caught.value)


SAMPLED = fuse.dtypes(BFLOAT16.model)


def test_bytes_are_those_of_the_release():
    bytes_of = {
        (stored, task, kind): room.ModelLoad(BFLOAT16, stored, task, kind).bytes()
        for stored, task, kind in (
            ("", "both", None), ("", "both", "bfloat16"), ("", "image", "bfloat16"),
            ("int8", "both", "bfloat16"),
        )
    }  # fmt: skip
    number = 10_948_113_056  # parameters of the release without its image tokenizer
    assert [*bytes_of.values()][:2] == [4 * number, 2 * number]
    # Measured: the rows of `load_image` and `load_int8` of the rehearsal.
    assert [f"{size / 1e9:.1f}" for size in [*bytes_of.values()][2:]] == ["14.8", "12.5"]


def test_a_card_that_is_too_small_is_reported_with_what_fits(card, monkeypatch):
    card(18)
    said = refusal(dtype=SAMPLED)
    assert said.startswith("the parameters of models/lavida-o need ")
    assert "jax may use 18.0 GB of NVIDIA Test" in said
    assert "task='image' in Python" not in said  # fits, but without memory to spare
    assert "`sparse-lavida export models/lavida-o COPY --dtype=int8` (" in said
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95, with which jax may use 22.8 GB" not in said
    card(22)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in refusal(dtype=SAMPLED)
    monkeypatch.setattr(jax, "local_device_count", lambda: 8)
    card(4)
    assert refusal(dtype=SAMPLED).endswith("What fits: --mesh=fsdp=8, over all devices (2.9 GB).")
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    assert refusal(dtype=SAMPLED).endswith("What fits: none of its forms.")


def test_parameters_that_fit_are_never_refused(card, caplog):
    load = room.ModelLoad(BFLOAT16, dtype=SAMPLED)
    card(load.bytes() / 1e9)
    with caplog.at_level(logging.WARNING):
        room.check(FOLDER, dtype=SAMPLED)
    assert "leave little memory for caches and images" in caplog.text
    caplog.clear()
    card(room.SPARE * load.bytes() / 1e9)
    room.check(FOLDER, dtype=SAMPLED)
    assert not caplog.text
    with pytest.raises(room.RoomError):
        card((load.bytes() - 1) / 1e9)
        room.check(FOLDER, dtype=SAMPLED)


def test_on_a_mesh_every_device_holds_its_part():
    whole = room.ModelLoad(BFLOAT16, dtype="bfloat16")
    parted = dataclasses.replace(whole, mesh={"data": jax.device_count()})
    assert parted.bytes() == whole.bytes()
    parted = dataclasses.replace(whole, mesh={"fsdp": jax.device_count()})
    share = whole.bytes() / jax.device_count()
    assert share <= parted.bytes() <= 1.01 * share


@pytest.mark.parametrize("known", [None, {}, {"bytes_in_use": 3}])
def test_a_device_that_says_nothing_is_not_checked(card, known):
    card(1).known = known
    room.check(FOLDER)


def test_a_cpu_is_not_checked(card):
    card(1e-3, platform="cpu")
    room.check(FOLDER)


def test_nothing_is_read_for_a_card_that_is_too_small(tmp_path, monkeypatch):
    folder = stand_ins.model_of_every_task(tmp_path / "tiny")
    monkeypatch.setattr(room, "_devices", lambda _: [Card(1e-6)])
    monkeypatch.setattr(stores, "load_params", lambda *_, **__: pytest.fail("parameters are read"))
    with pytest.raises(room.RoomError, match=r"jax may use .* of NVIDIA Test"):
        SparseLaViDa.from_pretrained(folder)


def test_parameters_loaded_as_they_are_fused_are_fused_to_the_same_bits(tmp_path):
    folder = stand_ins.model_of_every_task(tmp_path / "tiny")
    settings = model_folder.read_config(folder)
    model = dataclasses.replace(settings.model, compute_dtype="bfloat16")

    def fused(dtype):
        loaded = model_folder.load_model(folder, dtype=dtype).model
        loaded.settings = model
        leaves = jax.tree.leaves_with_path(fuse.for_inference(loaded, by_layer=True))
        return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}

    wide, narrow = fused(None), fused(fuse.dtypes(model))
    assert {str(leaf.dtype) for leaf in wide.values()} == {"float32", "bfloat16"}
    assert {name: leaf.dtype for name, leaf in wide.items()} == {
        name: leaf.dtype for name, leaf in narrow.items()
    }
    for name, leaf in wide.items():
        assert leaf.tobytes() == narrow[name].tobytes(), name


# Lines of the table of docs/gpus.md, and what is loaded.
LOADED = {
    "everything, bfloat16": ("", "both"),
    "images alone, bfloat16": ("", "image"),
    "texts alone, bfloat16": ("", "text"),
    "everything, 8 bits": ("int8", "both"),
    "images alone, 8 bits": ("int8", "image"),
}


def held():
    """Returns the bytes that a request holds besides the parameters, by column of the table."""
    of = {row["request"]: row["bytes"] for row in measurements.read_rows("aot_memory")}
    tokenizer = of.pop("tokenizer")
    whole = {name: sum(one.values()) for name, one in of.items()}
    decoding, coding = tokenizer["decode"], max(tokenizer["encode"], tokenizer["decode"])
    most = {
        "image": max(whole["image"], whole["image_dense"], decoding),
        "edit": max(whole["edit_dense"], coding),
        "sparse edit": max(whole["edit"], coding),
        "answer": whole["reasoning"],
    }
    return {name: tokenizer["parameters"] + size for name, size in most.items()}


@pytest.mark.parametrize("name", LOADED)
def test_the_table_of_requests_is_computed(name):
    stored, task = LOADED[name]
    size = room.ModelLoad(BFLOAT16, stored, task, SAMPLED).bytes()
    unread = {"image": ("answer",), "text": ("image", "edit", "sparse edit")}.get(task, ())
    totals = [
        "" if column in unread else f"{(size + more) / 1e9:.1f}" for column, more in held().items()
    ]
    (line,) = re.findall(rf"^\| {name}(?::[^|]*)? \|(.+)\|$", PAGE, re.MULTILINE)
    assert [cell.strip() for cell in line.split("|")] == [f"{size / 1e9:.1f}", *totals]


# What is recommended in the table of cards: the line and column above, and the part that jax takes.
RECOMMENDED = {
    16: ("images alone, 8 bits", ("image", "edit"), room.MOST_FRACTION),
    24: ("everything, 8 bits", ("image", "edit", "sparse edit", "answer"), room.MOST_FRACTION),
    48: ("everything, bfloat16", ("image", "edit", "sparse edit", "answer"), room.DEFAULT_FRACTION),
    80: ("everything, bfloat16", ("image", "edit", "sparse edit", "answer"), room.DEFAULT_FRACTION),
}


def test_what_is_recommended_for_a_card_fits_it():
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| (.+) \|$", PAGE, re.MULTILINE)
    parts = room.DEFAULT_FRACTION, room.MOST_FRACTION
    for card, *numbers, advice in rows:
        assert numbers == [f"{part * int(card) * 2**30 / 1e9:.1f}" for part in parts]
        assert advice.endswith(", .95") == (int(card) < 48)
        if int(card) in RECOMMENDED:
            name, columns, part = RECOMMENDED[int(card)]
            stored, task = LOADED[name]
            size = room.ModelLoad(BFLOAT16, stored, task, SAMPLED).bytes()
            assert max(size + held()[one] for one in columns) <= part * int(card) * 2**30
    assert [int(card) for card, *_ in rows] == [12, *RECOMMENDED]


def test_the_doctor_has_the_same_sizes():
    sizes = (
        room.ModelLoad(BFLOAT16, stored, task, SAMPLED).bytes()
        for stored, task in (("", "both"), ("", "image"), ("int8", "both"), ("int8", "image"))
    )
    assert [round(size, -7) for size in sizes] == [*doctor.OTHER_MODELS.values()]
