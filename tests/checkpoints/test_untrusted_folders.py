# SPDX-License-Identifier: Apache-2.0
"""Folders of models, image tokenizers and adapters that strangers made: one sentence, at once."""

import json
import math
import os
import pathlib
import shutil
import time

import numpy as np
import pytest
import safetensors.numpy
import tiny

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import contents, manifest, model_folder, stores
from sparse_lavida_jax.checkpoints.model_folder import CheckpointError
from sparse_lavida_jax.convert import adapters, to_torch
from sparse_lavida_jax.data import files, tensor_files
from sparse_lavida_jax.models import vq_files
from sparse_lavida_jax.prompting import tokenizer_files
from sparse_lavida_jax.prompting.tokenizer import TokenizerError
from sparse_lavida_jax.prompting.vocabulary import WORDS, Vocabulary
from sparse_lavida_jax.scenes.tokenizer import SHIPPED, Tokenizer

MODEL = tiny.model_settings()
SECRET = "a key of somebody else"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model folder that tests must not change."""
    folder, made = tmp_path_factory.mktemp("whole") / "model", config.Config(model=MODEL)
    model_folder.save_model(
        folder, tiny.denoiser(MODEL), made,
        tokenizer_path=SHIPPED, vq_folder=vq_files.find("scenes"), readme="# test\n",
        words=frozenset({"red"}),
    )  # fmt: skip
    model_folder.copy_with_readme(folder, folder, "# test\n")  # with made_of.json
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return pathlib.Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def secret(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "key.txt").write_text(SECRET)
    return tmp_path / "elsewhere" / "key.txt"


def list_anew(folder):
    """Lists the files in the manifest as somebody does who changed them on purpose."""
    names = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != manifest.MANIFEST]
    lines = [f"{files.sha256(p)}  {p.relative_to(folder).as_posix()}\n" for p in names]
    (folder / manifest.MANIFEST).write_text("".join(lines))


def refused(folder, told="."):
    """Whether each way to read a model folder refuses it in one sentence, quickly."""
    for read in (model_folder.verify, model_folder.load_model):
        start = time.monotonic()
        with pytest.raises(CheckpointError, match=told) as caught:
            read(folder)
        assert time.monotonic() - start < 10  # seconds; one on an idle machine
        assert len(str(caught.value)) < 3000
    return True


FILES = [
    "MANIFEST.sha256", "README.md", "TENSORS.sha256", "config.json", "made_of.json",
    "model.safetensors", "tokenizer.json", "vq/config.json", "vq/params.safetensors", "words.txt",
]  # fmt: skip


def test_every_file_of_a_model_folder_is_tried(whole):
    assert contents.names(whole) == FILES


@pytest.mark.parametrize("name", FILES)
def test_devices_pipes_and_endless_files_are_refused(folder, name):
    path = folder / name
    path.unlink()
    for target in ("/dev/zero", "/proc/self/environ", path.name, "nowhere"):
        path.symlink_to(target)
        assert refused(folder)
        path.unlink()
    os.mkfifo(path)
    assert refused(folder, "not a regular file")
    path.unlink()
    path.mkdir()
    assert refused(folder, "not a regular file")


@pytest.mark.parametrize("name", FILES)
def test_huge_files_are_refused_before_they_are_read(folder, name):
    os.truncate(folder / name, 10**12)
    assert refused(folder)


@pytest.mark.parametrize("name", ["notes.txt", "vq/notes.txt", "official/LICENSE"])
def test_a_link_to_a_file_elsewhere_is_refused_and_never_copied(folder, secret, tmp_path, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(secret)
    list_anew(folder)
    assert refused(folder, "is a link to .*elsewhere/key.txt: a link in .* only to a file in that")
    for write in (
        lambda: model_folder.copy(folder, tmp_path / "new"),
        lambda: model_folder.copy(folder, tmp_path / "new", "orbax"),
        lambda: model_folder.copy_with_readme(folder, tmp_path / "new", ""),
        lambda: to_torch.export(folder, tmp_path / "new"),
    ):
        with pytest.raises(CheckpointError, match="is a link to"):
            write()
        assert not (tmp_path / "new").exists()


def test_a_link_to_a_folder_is_refused_and_never_followed(folder, secret, tmp_path):
    for target in (secret.parent, folder, folder / "vq", ".", ".."):
        (folder / "notes").symlink_to(target)
        assert refused(folder, "notes is (a link to|not a regular file)")
        with pytest.raises(CheckpointError):
            model_folder.copy(folder, tmp_path / "new", "orbax")
        (folder / "notes").unlink()
    shutil.move(folder / "vq", tmp_path / "vq")
    (folder / "vq").symlink_to(tmp_path / "vq")
    assert refused(folder, "vq is a link to")
    assert not (tmp_path / "new").exists()


def test_a_loop_of_links_is_no_model_and_no_place_to_write_to(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match="there is no model in"):
        model_folder.find_model(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="not a place to write to"):
        model_folder.copy("scenes", tmp_path / "loop")
    with pytest.raises(CheckpointError, match="not a place to write to"):
        to_torch.export("scenes", tmp_path / "loop")


def test_links_inside_a_folder_and_to_blobs_of_the_hub_are_read(folder, tmp_path):
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(WORDS)
    list_anew(folder)
    assert model_folder.verify(folder) == len(FILES) - 1
    cache = tmp_path / "cache"
    snapshot = cache / "models--me--mine" / "snapshots" / ("1" * 40)
    shutil.copytree(folder, snapshot)
    (cache / "blobs").mkdir()
    (cache / "models--me--mine" / "blobs").mkdir()
    shutil.move(snapshot / "config.json", cache / "models--me--mine" / "blobs" / "a")
    (snapshot / "config.json").symlink_to("../../blobs/a")
    shutil.move(snapshot / "tokenizer.json", cache / "blobs" / "b")  # shared by several models
    (cache / "models--me--mine" / "blobs" / "b").symlink_to("../../blobs/b")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/b")
    assert model_folder.verify(snapshot) == len(FILES) - 1
    model_folder.copy_with_readme(snapshot, tmp_path / "new", "")
    assert not any(path.is_symlink() for path in (tmp_path / "new").rglob("*"))
    (cache / "models--other--theirs").mkdir()
    shutil.move(cache / "blobs" / "b", cache / "models--other--theirs" / "b")
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to(cache / "models--other--theirs" / "b")
    assert refused(snapshot, "tokenizer.json is a link to")


NAMES = [
    "/etc/passwd", "../../x", "..", ".", "vq/../../x", "./config.json", "vq//config.json", "vq/",
    "vq\\config.json", "C:/x", "C:x", "//server/x", "\0", "config.json\0", "a" * 5000, "~/.ssh/id",
    "elsewhere/key.txt", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_in_lists_stay_inside(folder, name):
    path = folder / manifest.MANIFEST
    path.write_text(path.read_text() + f"{'0' * 64}  {name}\n", errors="surrogatepass")
    assert refused(folder)
    with pytest.raises(CheckpointError):
        contents.inside(folder, name)
    params = folder.with_name("params")
    params.mkdir()
    (params / stores.tensors.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError):
        stores.open_params(params)


def test_a_name_in_a_list_twice_is_refused(folder):
    path = folder / manifest.MANIFEST
    path.write_text(path.read_text() + f"{'0' * 64}  config.json\n")
    assert refused(folder, "MANIFEST.sha256 is damaged")


def test_hidden_files_are_neither_followed_nor_copied(folder, secret, tmp_path):
    (folder / ".git").mkdir()
    (folder / ".git" / "again").symlink_to("..")
    (folder / ".key").symlink_to(secret)
    model_folder.copy(folder, tmp_path / "new")
    assert contents.names(tmp_path / "new") == FILES
    assert not (tmp_path / "new" / ".key").exists()


def test_a_folder_of_too_many_or_too_deep_files_ends(folder, monkeypatch):
    monkeypatch.setattr(contents, "MOST_FILES", 20)
    for i in range(30):
        (folder / "vq" / f"{i}.txt").touch()
    assert refused(folder, "more than 20 files")
    monkeypatch.setattr(contents, "MOST_FILES", 1000)
    folder.joinpath(*"d" * 30).mkdir(parents=True)
    assert refused(folder, "20 folders")


def test_pipes_in_an_array_store_are_not_waited_for(whole, tmp_path):
    model_folder.copy(whole, tmp_path / "model", "orbax")
    [described] = (tmp_path / "model" / "params").rglob("_METADATA")
    described.unlink()
    os.mkfifo(described)
    with pytest.raises(CheckpointError, match="not a regular file"):
        stores.open_params(tmp_path / "model")
    assert refused(tmp_path / "model", "not a regular file")


# ---------------------------------------------------------------------------------------------
# Texts.


def test_texts_that_are_no_text_are_refused(folder):
    for name in (WORDS, "README.md"):
        (folder / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"words.txt cannot be read: .*UTF-8"):
        Vocabulary.read(folder)
    with pytest.raises(CheckpointError, match=r"README.md cannot be read: it is not text in UTF-8"):
        model_folder.read_text(folder, "README.md")


def with_settings(folder, changes):
    settings = json.loads((folder / "config.json").read_text())
    for path, value in changes.items():
        *sections, name = path.split(".")
        place = settings
        for section in sections:
            place = place[section]
        place[name] = value
    (folder / "config.json").write_text(json.dumps(settings))
    list_anew(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.neighbour_heads": [2**40]},
        {"model.neighbour_heads": [-(2**31) - 1]},
        {"model.neighbour_heads": [10**400]},
        {"model.vision.grid_sizes": [[2**63, 2**63]]},
        {"seed": 2**31},
        {"sampling.order_seed": 10**400},
        {"model.rope_theta": 10**400},
        {"model.rope_theta": math.inf},
        {"model.norm_eps": math.nan},
        {"name": "a" * 100_000},
        {"model.vision.pool": 2**20},
        {"model.vision.patch_size": 2**20},
        {"lora.targets": "(" * 5000},
        {"lora.targets": "a{99999999999999999999}"},
        {"optimizer.groups": [["a", math.inf]]},
        {"x" * 100_000: 1},
        {"format": "y" * 100_000},
    ],
)
def test_settings_out_of_range_are_refused(folder, changes):
    with_settings(folder, changes)
    assert refused(folder, "config.json (was written by another version|has the format)")


@pytest.mark.parametrize(
    "changes",
    [
        {"model.width": 2**20, "model.mlp_hidden": 2**20, "model.num_layers": 1024},
        {"model.vocab_size": 2**20, "model.width": 2**20},
        {"model.image_table_rows": 2**31 - 1},
    ],
)
def test_sizes_are_compared_with_what_is_stored_before_anything_is_allocated(folder, changes):
    with_settings(folder, changes)
    assert refused(folder, "do not fit the model")


def test_an_image_tokenizer_of_very_many_layers_is_refused(folder):
    settings = json.loads((folder / "vq" / "config.json").read_text())
    settings |= {"channels": [16] * 16, "layers_per_block": 16, "image_size": 2**15}
    (folder / "vq" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(config.ConfigError, match="at most 24 residual layers"):
        vq_files.load(folder / "vq")


# ---------------------------------------------------------------------------------------------
# Safetensors files.


def stored(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def one(**changes):
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


TWICE = (
    b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
)
DAMAGED = {
    "twice": stored(TWICE, bytes(8)),
    "empty file": b"",
    "no header": bytes(8),
    "header longer than the file": (10**6).to_bytes(8, "little"),
    "header of 100 MB": (10**8).to_bytes(8, "little") + bytes(100),
    "header of 2**64": b"\xff" * 8,
    "not JSON": stored(b"{", b""),
    "a list": stored([]),
    "deep": stored(b"[" * 10**5),
    "offsets outside": stored(one(data_offsets=[0, 800]), bytes(8)),
    "offsets reversed": stored(one(data_offsets=[8, 0]), bytes(8)),
    "overlap": stored(one() | {"b": one()["a"]}, bytes(8)),
    "a hole": stored(one(data_offsets=[8, 16]), bytes(16)),
    "more data": stored(one(), bytes(9)),
    "wrong shape": stored(one(shape=[3]), bytes(8)),
    "negative": stored(one(shape=[-2]), bytes(8)),
    "huge": stored(one(shape=[2**62, 8]), bytes(8)),
    "huge and empty": stored(one(shape=[2**40, 0], data_offsets=[0, 0])),
    "unknown dtype": stored(one(dtype="F7"), bytes(8)),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_every_safetensors_file_is_checked_alike(folder, whole, kind):
    for name in ("model.safetensors", "vq/params.safetensors", "unused.safetensors"):
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).write_bytes(DAMAGED[kind])
        list_anew(folder)
        assert refused(folder, f"{pathlib.Path(name).name} is damaged")
        if name.startswith("vq"):
            with pytest.raises(vq_files.VQError, match=r"cannot be read"):
                vq_files.load(folder / "vq")
        (folder / name).unlink() if before is None else (folder / name).write_bytes(before)
    alone = folder.with_name("adapters")
    alone.mkdir()
    (alone / adapters.WEIGHTS).write_bytes(DAMAGED[kind])
    with pytest.raises(CheckpointError, match="cannot be read"):
        adapters.read(str(alone), MODEL, whole)


def test_an_image_tokenizer_is_compared_before_it_is_read(folder):
    path = folder / "vq" / "params.safetensors"
    header = {"a": {"dtype": "F32", "shape": [2**37], "data_offsets": [0, 2**39]}}
    path.write_bytes(stored(header))
    os.truncate(path, len(stored(header)) + 2**39)  # half a terabyte that takes no room
    with pytest.raises(vq_files.VQError, match="does not fit"):
        vq_files.load(folder / "vq")


def test_a_file_in_order_is_read(tmp_path):
    safetensors.numpy.save_file({"a": np.ones(2, "float32")}, tmp_path / "a")
    assert tensor_files.read_header(tmp_path / "a") == {"a": ("F32", (2,))}
    assert tensor_files.read_floats(tmp_path / "a")["a"].tolist() == [1, 1]


# ---------------------------------------------------------------------------------------------
# Adapters.

PLACE = "base_model.model."
PEFT = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


@pytest.fixture
def peft(whole, tmp_path):
    """Writes adapters as PEFT does; returns their factors as read."""
    known = adapters.names.of_denoiser(MODEL)
    name = next(n for ours, n in known.items() if ours.endswith("understanding/q/kernel"))
    o, i = name.shape
    module = PLACE + name.official.removesuffix(".weight")

    def write(changes, rank=2, module=module, **settings):
        folder = tmp_path / "peft"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        leaves = {
            f"{module}.lora_A.weight": np.ones((rank, i), "float32"),
            f"{module}.lora_B.weight": np.ones((o, rank), "float32"),
        }
        leaves = {k: v for k, v in (leaves | changes).items() if v is not None}
        safetensors.numpy.save_file(leaves, folder / adapters.WEIGHTS)
        files.write_json(folder / adapters.SETTINGS, PEFT | settings)
        return folder

    def read(*changes, **settings):
        return adapters.read(str(write(*changes or ({},), **settings)), MODEL, whole)

    read.write, read.module = write, module
    return read


def test_adapters_that_fit_are_read(peft):
    [(_, b)] = peft(alpha_pattern={}).factors.values()
    assert b.max() == 2
    name = peft.module.removeprefix(PLACE)
    for pattern in (name, rf"^{name}", name.split(".")[-1], rf".*{name[-6:]}".replace(".", r".")):
        [(_, b)] = peft(alpha_pattern={pattern: 8}).factors.values()
        assert b.max() == 4, pattern


@pytest.mark.parametrize("alpha", [math.nan, math.inf, 10**400, -1, 0, True, "4", None, [], 10**9])
def test_a_scale_of_adapters_is_a_number_within_limits(peft, alpha):
    for settings in ({"lora_alpha": alpha}, {"alpha_pattern": {"x": alpha}}):
        with pytest.raises(CheckpointError, match="does not describe adapters that can be read"):
            peft(**settings)


@pytest.mark.parametrize("pattern", ["(a+)+$", ".*.*.*x", "(", "a|b", "[a]", "a{1000}", "\\1"])
def test_patterns_of_adapters_cannot_take_for_ever(peft, pattern):
    with pytest.raises(CheckpointError, match="alpha_pattern has"):
        peft(alpha_pattern={pattern: 1})


def test_adapters_that_adapt_nothing_or_something_else_are_refused(peft, whole, secret):
    keys = {f"{peft.module}.lora_{side}.weight": None for side in "AB"}
    first = next(iter(keys))
    for told, changes, more in (
        ("adapts nothing", keys, {}),
        ("not two factors that fit", {}, {"rank": 0}),
        ("not two factors that fit", {}, {"rank": 100_000}),
        ("not two factors that fit", {[*keys][1]: None}, {}),
        ("no matrix for", {}, {"module": f"{PLACE}nothing.here"}),
        ("no matrix for", {first: np.ones((1, 2, 3), "float32")}, {}),
        ("is I64", {first: np.ones((2, 2), "int64")}, {}),
        ("NaN or infinite", {first: np.full((2, 32), np.nan, "float32")}, {}),
    ):
        with pytest.raises(CheckpointError, match=told):
            peft(changes, **more)
    for name in (adapters.WEIGHTS, adapters.SETTINGS):
        folder = peft.write({})
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
        with pytest.raises(CheckpointError, match="is a link to"):
            adapters.read(str(folder), MODEL, whole)


@pytest.mark.parametrize("sha", [5, None, ["x"], {"a": 1}, "y" * 10**5])
def test_a_base_of_adapters_may_say_anything(peft, whole, sha):
    folder = peft.write({})
    files.write_json(folder / adapters.BASE, {"model": ["z" * 10**5], "manifest_sha256": sha})
    manifest.write(folder)
    with pytest.raises(CheckpointError, match="were trained next to the model") as caught:
        adapters.read(str(folder), MODEL, whole)
    assert len(str(caught.value)) < 2000


# ---------------------------------------------------------------------------------------------
# Text tokenizers.

BYTE_LEVEL = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False
}  # fmt: skip
GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"
PAIR = [{"Sequence": {"id": side, "type_id": 0}} for side in "AB"]
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": END, "type_id": 0}}, PAIR[0]],
    "pair": PAIR,
    "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
}
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
PADDING = {
    "strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
    "pad_type_id": 0, "pad_token": "x",
}  # fmt: skip
TRUNCATION = {"max_length": 1, "stride": 9, "strategy": "LongestFirst", "direction": "Right"}


def split(pattern, kind="Regex"):
    how = {"behavior": "Isolated", "invert": False}
    parts = [{"type": "Split", "pattern": {kind: pattern}, **how}, BYTE_LEVEL]
    return {"type": "Sequence", "pretokenizers": parts}


@pytest.fixture
def tokenizer(tmp_path):
    def make(**changes):
        made = json.loads(SHIPPED.read_text(encoding="utf-8"))
        for name, value in changes.items():
            place = made["model"] if name in made["model"] else made
            place[name] = value(place[name]) if callable(value) else value
        (tmp_path / "tokenizer.json").write_text(json.dumps(made))
        return Tokenizer(tmp_path / "tokenizer.json")

    return make


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "Sequence", "normalizers": []}},
        {"pre_tokenizer": split(GPT_4)},
        {"pre_tokenizer": split(LING)},
        {"pre_tokenizer": split("x", "String")},
        {"post_processor": BYTE_LEVEL},
        {"post_processor": TEMPLATE},
        {"post_processor": {"type": "Sequence", "processors": [BYTE_LEVEL, TEMPLATE]}},
        {"continuing_subword_prefix": "", "end_of_word_suffix": ""},
        {"padding": PADDING, "truncation": TRUNCATION},
    ],
)
def test_a_byte_level_tokenizer_is_read_and_text_comes_back(tokenizer, changes):
    made, text = tokenizer(**changes), " a small red circle, 12 of them"
    ids = made.encode(text)
    assert made.decode([i for i in ids if i]) == text
    assert len(ids) < 60


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 9}},
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "a"}},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "NFC", "more": 1}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100}},
        {"normalizer": {"type": "Sequence", "normalizers": "NFC"}},
        {"normalizer": []},
        {"normalizer": "NFC"},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_"}},
        {"pre_tokenizer": BYTE_LEVEL | {"use_regex": 1}},
        {"pre_tokenizer": split("", "String")},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 16}},
        {"decoder": REPLACE},
        {"post_processor": {"type": "BertProcessing", "sep": ["x", 1], "cls": ["y", 0]}},
        {"post_processor": {"type": "Sequence", "processors": [TEMPLATE] * 2}},
        {"post_processor": TEMPLATE | {"special_tokens": {}}},
        {"post_processor": TEMPLATE | {"single": PAIR}},
        {"post_processor": TEMPLATE | {"single": [PAIR[1]]}},
        {"post_processor": TEMPLATE | {"single": [PAIR[0]] * 9}},
        {
            "post_processor": TEMPLATE
            | {"special_tokens": {END: {"id": END, "ids": [10**5], "tokens": [END]}}}
        },
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
        {"model": None},
        {"dropout": 0.5},
        {"unk_token": "nothing"},
        {"continuing_subword_prefix": "##"},
        {"vocab": lambda vocab: vocab | {"zz": 2**31}},
        {"vocab": lambda vocab: vocab | {"zz": -1}},
        {"vocab": lambda vocab: vocab | {"zz": True}},
        {"vocab": []},
        {"merges": [["a", "b", "c"]]},
        {"merges": [["nothing", "like"]]},
        {"added_tokens": lambda added: [*added, {"id": 2, "content": ""}]},
        {"added_tokens": lambda added: [*added, {"id": 2, "content": "a" * 10**6}]},
        {"added_tokens": lambda added: [*added, 7]},
        {"version": "9.0"},
        {"padding": 5},
        {"more": 1},
    ],
)
def test_a_tokenizer_with_anything_else_is_refused_without_a_panic(tokenizer, changes, capfd):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is damaged") as caught:
        tokenizer(**changes)
    assert len(str(caught.value)) < 1000
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$", "(a|a)*$", r"\s*\s*\s*x", ".*.*y", "a?" * 20 + "a" * 20, "a{0,9}" * 9 + "y",
        "a**", "(?:a|aa)" * 9 + "y", "a{1000}{1000}", "(?=a)", r"(a)\1", r"(?<n>a)\g<n>", "[", "(",
        "a|", r"\X*", "(?#x)", "a" * 1000, "(?:a*)*", "\\",
    ],
)  # fmt: skip
def test_patterns_that_may_take_for_ever_are_refused(tokenizer, pattern):
    with pytest.raises(TokenizerError, match="pre_tokenizer"):
        tokenizer(pre_tokenizer=split(pattern))


@pytest.mark.parametrize("pattern", [GPT_4, LING])
def test_patterns_that_are_read_take_no_time(tokenizer, pattern):
    made = tokenizer(pre_tokenizer=split(pattern))
    start = time.monotonic()
    for text in (" ", "a", "!", " \n", "'", "1"):
        made.encode(text * 20_000)
    assert time.monotonic() - start < 10


def test_a_tokenizer_of_many_bytes_or_a_pipe_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(" " * (tokenizer_files.MOST_BYTES + 1))
    with pytest.raises(TokenizerError, match="has more than"):
        Tokenizer(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(TokenizerError, match="not a regular file"):
        Tokenizer(path)


def test_a_panic_of_the_library_is_one_sentence_and_ctrl_c_stays_itself(tokenizer):
    made = tokenizer()
    PanicException = type("PanicException", (BaseException,), {})

    class Panics:
        error: type[BaseException] = PanicException

        def encode(self, text):
            raise self.error("index out of bounds")

    made._inner = Panics()
    with pytest.raises(TokenizerError, match="damaged: index out of bounds"):
        made.encode("a")
    Panics.error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        made.encode("a")


def test_the_size_of_a_vocabulary_counts_ids_that_are_left_out(tokenizer):
    made = tokenizer(vocab=lambda vocab: vocab | {"zz": 9999})
    assert made.vocab_size == 10_000
