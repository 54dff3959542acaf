# SPDX-License-Identifier: Apache-2.0
"""Released folders are converted to model folders and back; problems are reported."""

import collections
import dataclasses
import gc
import json
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch_folder
from orbax.checkpoint import v1 as ocp

from benchmarks import measurements
from sparse_lavida_jax.checkpoints import manifest, model_folder, named_arrays, stores, tensors
from sparse_lavida_jax.convert import from_torch, names, to_torch
from sparse_lavida_jax.convert.settings import ConvertError
from sparse_lavida_jax.lavida_o.chat import ChatTokenizer
from sparse_lavida_jax.models import parameters, vq_files

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path):
    """A released folder in bfloat16, three shards."""
    return torch_folder.write(tmp_path / "released")


@pytest.fixture
def complaint(tmp_path):
    """Converts a folder that must fail; returns the error. No files may be left behind."""

    def run(folder, **more):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(model_folder.CheckpointError) as error:
            from_torch.convert(folder, tmp_path / "model", **more)
        assert sorted(tmp_path.iterdir()) == before
        return str(error.value)

    return run


def bits(state):
    """The dtype, shape and bytes of every tensor."""
    return {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in state.items()}


# ---------------------------------------------------------------------------------------------
# Round trip.


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_an_untrained_model_comes_back_bit_for_bit(tmp_path, dtype):
    state = torch_folder.arbitrary(dtype=dtype)
    folder = torch_folder.write(tmp_path / "released", state)
    from_torch.convert(folder, tmp_path / "model")
    to_torch.export(tmp_path / "model", tmp_path / "back", max_shard_bytes=20_000)
    assert bits(torch_folder.read(tmp_path / "back")) == bits(state)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()


def test_tensors_of_different_dtypes_keep_them(tmp_path):
    state = torch_folder.arbitrary()
    for name in ("model.image_newline", "model.transformer.blocks.1.attn_norm.weight"):
        state[name] = state[name].astype(np.float32)
    from_torch.convert(torch_folder.write(tmp_path / "released", state), tmp_path / "model")
    to_torch.export(tmp_path / "model", tmp_path / "back")
    assert bits(torch_folder.read(tmp_path / "back")) == bits(state)


@pytest.mark.parametrize("changes", [{"codes_per_token": 1, "grid_size": 6}, {"image_head": "dit"}])
def test_tensors_that_the_model_does_without_are_carried_along(tmp_path, changes):
    model = dataclasses.replace(torch_folder.SETTINGS.model, **changes)
    made = dataclasses.replace(torch_folder.SETTINGS, model=model)
    state = torch_folder.arbitrary(made)
    state |= {
        name.official: np.ones(name.shape, state["model.image_newline"].dtype)
        for name in names.table(made)
        if name.home == "unused"
    }
    from_torch.convert(torch_folder.write(tmp_path / "released", state, made), tmp_path / "model")
    to_torch.export(tmp_path / "model", tmp_path / "back")
    assert bits(torch_folder.read(tmp_path / "back")) == bits(state)


def test_registers_come_back_if_they_were_there(tmp_path):
    state = torch_folder.arbitrary()
    table = {name.official: name for name in names.table(torch_folder.SETTINGS)}
    registers = {
        name: np.full(table[name].shape, i, state["model.image_newline"].dtype)
        for i, name in enumerate(names.REGISTERS)
    }
    folder = torch_folder.write(
        tmp_path / "released",
        state | registers,
        sparse_lavida={"num_registers": 5, "trained_attention": "step_causal"},
    )
    from_torch.convert(folder, tmp_path / "model")
    model = model_folder.read_config(tmp_path / "model").model
    assert (model.num_registers, model.trained_attention) == (5, "step_causal")
    to_torch.export(tmp_path / "model", tmp_path / "back")
    assert bits(torch_folder.read(tmp_path / "back")) == bits(state | registers)
    given = json.loads((tmp_path / "back" / "config.json").read_text())
    assert given["sparse_lavida"] == {"num_registers": 5, "trained_attention": "step_causal"}


def test_one_file_without_an_index_is_enough(tmp_path):
    folder = torch_folder.write(tmp_path / "released", shards=1)
    (folder / torch_folder.INDEX).unlink()
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    from_torch.convert(folder, tmp_path / "model")
    to_torch.export(tmp_path / "model", tmp_path / "back")
    assert bits(torch_folder.read(tmp_path / "back")) == bits(torch_folder.arbitrary())


def test_an_image_tokenizer_in_its_own_folder_stays_there(tmp_path):
    state = torch_folder.arbitrary()
    images = {n: x for n, x in state.items() if n.startswith(names.VQ_PREFIX)}
    words = {n: x for n, x in state.items() if n not in images}
    folder = torch_folder.write(tmp_path / "released", words)
    alone = {n.removeprefix(names.VQ_PREFIX): x for n, x in images.items()}
    safetensors.numpy.save_file(alone, folder / "vqvae" / to_torch.VQ_FILE)
    from_torch.convert(folder, tmp_path / "model")
    to_torch.export(tmp_path / "model", tmp_path / "back")
    assert bits(torch_folder.read(tmp_path / "back")) == bits(words)
    back = safetensors.numpy.load_file(tmp_path / "back" / "vqvae" / to_torch.VQ_FILE)
    assert bits(back) == bits(alone)


@pytest.mark.slow
def test_a_model_trained_sparsely_is_exported_with_its_registers(tmp_path):
    """A folder from training has none of the small files of the release."""
    made = dataclasses.replace(
        torch_folder.SETTINGS,
        model=dataclasses.replace(torch_folder.SETTINGS.model, trained_attention="step_causal"),
    )
    from_torch.convert(torch_folder.write(tmp_path / "released"), tmp_path / "model")
    loaded = model_folder.load_model(tmp_path / "model")
    model_folder.save_model(
        tmp_path / "trained", loaded.model, made,
        tokenizer_path=loaded.tokenizer_path, vq_folder=loaded.vq_folder, readme="",
    )  # fmt: skip
    to_torch.export(tmp_path / "trained", tmp_path / "back")
    state = torch_folder.read(tmp_path / "back")
    assert set(state) - set(torch_folder.arbitrary()) == set(names.REGISTERS)
    from_torch.convert(tmp_path / "back", tmp_path / "again")
    again = model_folder.load_model(tmp_path / "again")
    assert again.config.model == dataclasses.replace(made.model, compute_dtype="float32")
    for ours, theirs in zip(*map(jax.tree.leaves, (again.model, loaded.model)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_shards_are_no_larger_than_asked_for(tmp_path, converted):
    done = to_torch.export(converted, tmp_path / "back", max_shard_bytes=20_000)
    files = sorted((tmp_path / "back").glob("model-*.safetensors"))
    assert len(files) == done.num_shards > 2
    for file in files:
        stored = tensors.list_tensors(file)
        size = sum(tensor.nbytes for tensor in stored.values())
        assert size <= 20_000 or len(stored) == 1
    placed = json.loads((tmp_path / "back" / torch_folder.INDEX).read_text())
    assert placed["metadata"]["total_size"] == sum(
        x.nbytes for x in torch_folder.arbitrary().values()
    )


def test_an_export_replaces_nothing(tmp_path, converted):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConvertError, match="an export replaces nothing"):
        to_torch.export(converted, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


# ---------------------------------------------------------------------------------------------
# What a conversion writes.


def test_a_converted_folder_is_a_whole_model_folder(converted):
    loaded = model_folder.load_model(converted)
    assert loaded.config.model.trained_attention == "full"
    assert loaded.config.model.compute_dtype == "bfloat16"
    assert loaded.config.vq == torch_folder.VQ
    assert ChatTokenizer(loaded.tokenizer_path).vocab_size > 256
    assert vq_files.load(loaded.vq_folder)[1] == torch_folder.VQ
    readme = (converted / "README.md").read_text()
    assert "non-commercial" in readme
    assert (converted / "official" / "LICENSE").read_text() in "For research only."
    store = stores.open_params(converted)
    assert {str(leaf.dtype) for leaf in store.leaves.values()} == {"bfloat16"}


def test_registers_start_as_what_they_stand_in_for(converted):
    model = model_folder.load_model(converted).model
    mask = model.text_embedding[torch_folder.SETTINGS.model.text_mask_id]
    np.testing.assert_array_equal(model.register_understanding, mask)
    cell = model.masked_cell().astype("bfloat16")
    np.testing.assert_allclose(model.register_generation, cell, rtol=1e-2, atol=1e-3)


def test_parameters_are_widened_where_that_is_asked_for(tmp_path, folder):
    from_torch.convert(folder, tmp_path / "model", dtype="float32")
    store = stores.open_params(tmp_path / "model")
    assert {str(leaf.dtype) for leaf in store.leaves.values()} == {"float32"}
    assert model_folder.read_config(tmp_path / "model").model.compute_dtype == "float32"
    expected = torch_folder.arbitrary()["model.transformer.wte.weight"].astype(np.float32)
    np.testing.assert_array_equal(store.read_one("text_embedding"), expected)


def test_a_second_conversion_replaces_the_first(tmp_path, folder):
    for _ in range(2):
        from_torch.convert(folder, tmp_path / "model")
    manifest.verify(tmp_path / "model")


def test_progress_reaches_its_end(tmp_path, folder):
    seen = []
    from_torch.convert(folder, tmp_path / "model", on_progress=lambda *now: seen.append(now))
    done, total = zip(*seen, strict=True)
    assert sorted(done) == list(done)
    assert done[-1] == total[-1] == sum(x.nbytes for x in torch_folder.arbitrary().values())


# ---------------------------------------------------------------------------------------------
# What cannot be converted.


def test_a_folder_that_is_not_there(tmp_path, complaint):
    assert f"there is no folder {tmp_path / 'nowhere'}." in complaint(tmp_path / "nowhere")


def test_a_folder_without_config(folder, complaint):
    (folder / "config.json").unlink()
    assert f"{folder} has no config.json, so it is no released model." in complaint(folder)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config(folder, complaint, content):
    (folder / "config.json").write_text(content)
    assert f"{folder / 'config.json'}" in complaint(folder)


def test_a_model_folder_of_ours_needs_no_conversion(tmp_path, folder, converted, complaint):
    assert "is a model folder of this project already: use it as it is." in complaint(converted)


def test_llada_is_told_from_lavida_o(tmp_path, complaint):
    made = dataclasses.replace(
        torch_folder.SETTINGS,
        model=dataclasses.replace(torch_folder.SETTINGS.model, understanding_only=True),
    )
    folder = torch_folder.write(
        tmp_path / "llada", torch_folder.arbitrary(made), made, model_type="llada"
    )
    assert "that is LLaDA, which draws nothing. Give the folder of LaViDa-O." in complaint(folder)
    from_torch.convert(folder, tmp_path / "model", understanding_only=True)
    assert model_folder.load_model(tmp_path / "model").config.model.understanding_only


def test_a_config_that_our_code_contradicts(tmp_path, complaint):
    folder = torch_folder.write(tmp_path / "released", alibi=True)
    assert "alibi is True: only False is supported." in complaint(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gen_head_config", "x"),
        ("siglip_config", []),
        ("sparse_lavida", 3),
        ("mm_spatial_pool_stride", 2.5),
        ("siglip_config", {"patch_size": -1}),
    ],
)
def test_settings_that_are_no_settings(tmp_path, complaint, key, value):
    sentence = complaint(torch_folder.write(tmp_path / "released", **{key: value}))
    assert f"{key}" in sentence
    assert "it must" in sentence


@pytest.mark.parametrize("suffix", [".bin", ".pt"])
def test_pickled_weights_are_refused_with_the_way_to_safetensors(folder, complaint, suffix):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / f"pytorch_model{suffix}").write_bytes(b"\x80")
    sentence = complaint(folder)
    assert f"its weights are pickled (pytorch_model{suffix})" in sentence
    assert "save_pretrained(..., safe_serialization=True)" in sentence


def test_pickled_weights_are_refused_wherever_they_are(tmp_path, folder, complaint):
    told = "safe_serialization=True"
    (tmp_path / "weights.pt").write_bytes(b"\x80")
    assert told in complaint(tmp_path / "weights.pt")

    state = torch_folder.arbitrary()
    words = {n: x for n, x in state.items() if not n.startswith(names.VQ_PREFIX)}
    alone = torch_folder.write(tmp_path / "words", words)
    (alone / "vqvae" / "diffusion_pytorch_model.bin").write_bytes(b"\x80")
    sentence = complaint(alone)
    assert "vqvae: its weights are pickled (diffusion_pytorch_model.bin)" in sentence
    assert len(sentence.splitlines()) == 1

    index = json.loads((folder / torch_folder.INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "pytorch_model.bin")
    (folder / torch_folder.INDEX).write_text(json.dumps(index))
    (folder / "pytorch_model.bin").write_bytes(b"\x80")
    assert told in complaint(folder)


def test_a_missing_folder_of_the_image_tokenizer_is_named(tmp_path, folder, complaint):
    (folder / "vqvae" / "config.json").unlink()
    assert "vqvae/config.json is not there. Download the folder vqvae/" in complaint(folder)

    state = torch_folder.arbitrary()
    words = {n: x for n, x in state.items() if not n.startswith(names.VQ_PREFIX)}
    sentence = complaint(torch_folder.write(tmp_path / "words", words))
    told = (
        "vqvae: the image tokenizer, a safetensors file, is not there. Download the folder vqvae/."
    )
    assert sentence.endswith(f"cannot be converted: {told}")


def test_shards_without_their_index(folder, complaint):
    (folder / torch_folder.INDEX).unlink()
    assert f"{torch_folder.INDEX} is missing, which says what is in model-00001" in complaint(
        folder
    )


def test_a_folder_without_weights(folder, complaint):
    for path in folder.glob("model*"):
        path.unlink()
    assert f"it holds neither model.safetensors nor {torch_folder.INDEX}. Download" in complaint(
        folder
    )


def test_a_missing_shard(folder, complaint):
    (folder / SHARD).unlink()
    assert f"names {SHARD}, which is not there. Download it again." in complaint(folder)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}', '{"weight_map": {"a": ["b"]}}'],
)
def test_a_damaged_index(folder, complaint, content):
    (folder / torch_folder.INDEX).write_text(content)
    sentence = complaint(folder)
    assert torch_folder.INDEX in sentence
    assert sentence.endswith("Download it again.")


def test_an_index_that_leads_out_of_the_folder(folder, complaint):
    index = json.loads((folder / torch_folder.INDEX).read_text())
    index["weight_map"]["model.image_newline"] = "../model.safetensors"
    (folder / torch_folder.INDEX).write_text(json.dumps(index))
    shutil.copyfile(folder / SHARD, folder.parent / "model.safetensors")
    assert "names the file '../model.safetensors', which may lie elsewhere" in complaint(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_shard_that_is_cut_short(folder, complaint, kept):
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(content[:kept])
    sentence = complaint(folder)
    assert f"{SHARD} is cut short or damaged" in sentence
    assert sentence.endswith("Download it again.")


def test_a_header_that_claims_to_be_huge(folder, complaint):
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes((2**60).to_bytes(8, "little") + content[8:])
    assert f"{SHARD} is cut short or damaged" in complaint(folder)


def test_a_tensor_may_lie_in_another_file_than_the_index_says(tmp_path, folder):
    index = json.loads((folder / torch_folder.INDEX).read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = SHARD
    (folder / torch_folder.INDEX).write_text(json.dumps(index))
    assert from_torch.convert(folder, tmp_path / "model").num_tensors == len(index["weight_map"])


def test_a_tensor_in_two_files_is_no_choice(folder, complaint):
    twice = "model.transformer.ln_f.weight"
    files = sorted(folder.glob("model-*.safetensors"))
    held = [safetensors.numpy.load_file(file) for file in files]
    (first,) = (i for i, tensors_of in enumerate(held) if twice in tensors_of)
    second = (first + 1) % len(files)
    safetensors.numpy.save_file(held[second] | {twice: 2 * held[first][twice]}, files[second])
    before, after = sorted((files[first].name, files[second].name))
    told = f"{twice} is in {before} and in {after}: leave it in one of them."
    assert complaint(folder) == f"{folder} cannot be converted: {told}"


def test_every_damaged_file_of_an_image_tokenizer_is_listed(tmp_path, complaint):
    state = torch_folder.arbitrary()
    words = {n: x for n, x in state.items() if not n.startswith(names.VQ_PREFIX)}
    folder = torch_folder.write(tmp_path / "released", words)
    for name in ("a", "b"):
        (folder / "vqvae" / f"{name}.safetensors").write_bytes(b"")
    sentence = complaint(folder)
    assert "vqvae: a.safetensors is cut short" in sentence
    assert "vqvae: b.safetensors is cut short" in sentence
    assert len(sentence.splitlines()) == 3


def test_every_tensor_that_does_not_fit_is_listed_at_once(tmp_path, complaint):
    state = torch_folder.arbitrary()
    del state["model.image_newline"]
    state["model.colour"] = np.zeros(3, np.float32)
    state["model.transformer.ln_f.weight"] = np.zeros(5, np.float32)
    state["model.transformer.blocks.0.q_proj.weight"] = np.zeros((32, 32), np.int8)
    sentence = complaint(torch_folder.write(tmp_path / "released", state))
    for told in (
        "model.image_newline is missing; it should be [32].",
        "model.colour [3] in model-0000",
        "is unknown.",
        "is [5]; by config.json it should be [32].",
        "is I8; only F32, BF16, F16 are supported.",
    ):
        assert told in sentence
    assert len(sentence.splitlines()) == 5


def test_files_and_tensors_that_do_not_fit_are_listed_at_once(tmp_path, complaint):
    """Tensors of an unreadable file are not reported as missing."""
    state = torch_folder.arbitrary()
    state["model.colour"] = np.zeros(3, np.float32)
    state["model.image_newline"] = np.zeros(5, np.float32)
    folder = torch_folder.write(tmp_path / "released", state, shards=5)
    index = json.loads((folder / torch_folder.INDEX).read_text())
    places = (index["weight_map"]["model.colour"], index["weight_map"]["model.image_newline"])
    files = sorted(set(index["weight_map"].values()))
    absent, short, *_ = [file for file in files if file not in places]
    (folder / absent).unlink()
    (folder / short).write_bytes((folder / short).read_bytes()[:-1])
    (folder / "tokenizer.json").write_text('{"version": ')
    sentence = complaint(folder)
    for told in (
        f"names {absent}, which is not there.",
        f"{short} is cut short or damaged",
        f"{folder / 'tokenizer.json'} is damaged",
        f"model.colour [3] in {places[0]} is unknown.",
        f"model.image_newline in {places[1]} is [5]; by config.json it should be [32].",
    ):
        assert told in sentence
    assert len(sentence.splitlines()) == 1 + 5


def test_settings_and_files_that_do_not_fit_are_listed_at_once(tmp_path, complaint):
    folder = torch_folder.write(tmp_path / "released", alibi=True)
    (folder / SHARD).unlink()
    sentence = complaint(folder)
    assert "alibi is True" in sentence
    assert f"names {SHARD}, which is not there." in sentence


def test_what_is_wrong_in_many_layers_is_one_line_that_lists_them(tmp_path, complaint):
    state = {n: x for n, x in torch_folder.arbitrary().items() if ".blocks." not in n}
    sentence = complaint(torch_folder.write(tmp_path / "released", state))
    name = "model.transformer.blocks.*.attn_out.weight"
    assert f"{name} is missing; it should be [32, 32]. (* is 0, 1, 2.)" in sentence
    assert len(sentence.splitlines()) == 1 + 17


@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
def test_weights_that_are_no_numbers_are_refused(tmp_path, complaint, wrong):
    state, name = torch_folder.arbitrary(), "model.transformer.blocks.1.attn_norm.weight"
    state[name] = np.full_like(state[name], wrong)
    told = complaint(torch_folder.write(tmp_path / "released", state))
    assert f"{name} in model-" in told
    assert "holds NaN or infinite numbers" in told


def test_weights_that_are_no_numbers_are_converted_if_that_is_asked_for(tmp_path):
    state, name = torch_folder.arbitrary(), "model.image_newline"
    state[name] = np.full_like(state[name], np.nan)
    folder = torch_folder.write(tmp_path / "released", state)
    from_torch.convert(folder, tmp_path / "model", check_finite=False)
    to_torch.export(tmp_path / "model", tmp_path / "back")
    assert bits(torch_folder.read(tmp_path / "back")) == bits(state)


def test_a_key_that_is_there_twice_is_refused(folder, complaint):
    given = (folder / "config.json").read_text()
    (folder / "config.json").write_text(given.replace("{", '{"d_model": 8, ', 1))
    assert "the key 'd_model' is there twice" in complaint(folder)


def test_a_tensor_that_a_file_names_twice_is_refused(folder, complaint):
    path = folder / SHARD
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].decode().rstrip()
    name = next(name for name in json.loads(header) if name != "__metadata__")
    again = header[:-1] + f',"{name}":' + json.dumps(json.loads(header)[name]) + "}"
    path.write_bytes(len(again).to_bytes(8, "little") + again.encode() + content[8 + length :])
    assert f"{SHARD} is cut short or damaged (the key '{name}' is there twice)" in complaint(folder)


@pytest.mark.parametrize("text", ["{}", "[" * 100_000, '{"version": "1.0"}'])
def test_a_tokenizer_that_is_none_is_refused_before_it_is_used(folder, complaint, text):
    (folder / "tokenizer.json").write_text(text)
    assert f"{folder / 'tokenizer.json'} is damaged" in complaint(folder)


def test_a_folder_in_place_of_a_file(folder, complaint):
    for name in ("tokenizer.json", SHARD):
        (folder / name).unlink()
        (folder / name).mkdir()
    sentence = complaint(folder)
    assert "tokenizer.json is missing" in sentence
    assert f"names {SHARD}, which is not there" in sentence


def test_a_folder_without_tokenizer(folder, complaint):
    (folder / "tokenizer.json").unlink()
    assert f"{folder} cannot be converted: tokenizer.json is missing." in complaint(folder)


def test_what_is_no_model_folder_is_not_replaced(tmp_path, folder):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("mine")
    with pytest.raises(model_folder.CheckpointError, match="exists and is no model folder"):
        from_torch.convert(folder, tmp_path / "model")
    assert (tmp_path / "model" / "mine.txt").read_text() == "mine"


def test_a_full_disk_is_noticed_before_anything_is_written(folder, complaint, monkeypatch):
    Usage = collections.namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 1000))
    assert "has 0 MB free and" in complaint(folder)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), ValueError("RESOURCE_EXHAUSTED")])
def test_a_disk_that_fills_up_on_the_way_leaves_nothing(folder, complaint, monkeypatch, error):
    save, calls = ocp.partial.save, []
    monkeypatch.setattr(stores, "BATCH_BYTES", 10_000)

    def run_out_of_space(*args):
        calls.append(args)
        if len(calls) > 2:
            raise error
        save(*args)

    monkeypatch.setattr(ocp.partial, "save", run_out_of_space)
    assert "could not be written" in complaint(folder, kind="orbax")
    assert len(calls) == 3


@pytest.fixture
def small_disk():
    """Limits the size of a file: writing more fails in the system, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "kind", "batch_bytes"),
    [
        (100, "safetensors", 0),
        (30_000, "safetensors", 0),
        (30_000, "orbax", 2**28),
        (70_000, "orbax", 10_000),
    ],
    ids=["settings", "parameters", "parameters in the store", "image tokenizer"],
)
def test_a_disk_that_is_really_full_is_one_sentence(
    folder, complaint, small_disk, monkeypatch, caplog, size, kind, batch_bytes
):
    monkeypatch.setattr(stores, "BATCH_BYTES", batch_bytes)
    small_disk(size)
    sentence = complaint(folder, kind=kind)
    expected = "is not a place to write to" if size == 100 else "could not be written"
    assert expected in sentence
    assert "File too large" in sentence
    assert len(sentence) < 300
    assert caplog.records == []


@pytest.mark.parametrize("size", [100, 30_000])
def test_an_export_to_a_full_disk_leaves_nothing(tmp_path, converted, small_disk, size):
    small_disk(size)
    with pytest.raises(model_folder.CheckpointError, match=r"could not be written|place to write"):
        to_torch.export(converted, tmp_path / "back")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path, folder):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        from_torch.convert(folder, tmp_path / "model", on_progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["released"]


# ---------------------------------------------------------------------------------------------
# Damage afterwards.


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_a_flipped_bit_names_the_tensor(tmp_path, kind):
    state = torch_folder.arbitrary()
    name = "model.transformer.blocks.1.q_proj_vision.weight"
    # Noise cannot be compressed, so it can be found in the file.
    noise = np.random.default_rng(0).integers(0, 2**16, state[name].shape, np.uint16) & 0xBFFF
    state[name] = noise.view(jnp.bfloat16)
    written = noise.T.tobytes()
    folder = tmp_path / "model"
    from_torch.convert(torch_folder.write(tmp_path / "released", state), folder, kind=kind)
    assert manifest.verify(folder) > 7
    files = [path for path in folder.rglob("*") if path.is_file()]
    (path,) = (path for path in files if written in path.read_bytes())
    changed = bytearray(path.read_bytes())
    changed[changed.find(written) + len(written) // 2] ^= 1
    path.write_bytes(changed)
    damaged = stores.open_params(folder)
    damaged.read(damaged.leaves)  # the store notices nothing
    with pytest.raises(model_folder.CheckpointError) as error:
        manifest.verify(folder)
    assert f"{path} is damaged" in str(error.value)
    told = "The tensor joint_layers/01/generation/q/kernel is not what was written."
    assert told in str(error.value)


def test_every_tensor_has_a_digest(converted):
    store = stores.open_params(converted)
    image = parameters.by_name(vq_files.load(converted / "vq")[0])
    assert set(named_arrays.read_digests(converted)) == {
        *store.leaves,
        *(f"vq/params.safetensors:{name}" for name in image),
    }


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0x80
    path.write_bytes(content)


def test_a_flipped_bit_of_the_image_tokenizer_names_the_tensor(tmp_path, folder):
    from_torch.convert(folder, tmp_path / "model")
    path = tmp_path / "model" / "vq" / "params.safetensors"
    stored = tensors.list_tensors(path)
    written = stored["decoder/conv_in/kernel"].read().tobytes()
    flip(path, path.read_bytes().find(written) + 5)
    with pytest.raises(model_folder.CheckpointError) as error:
        manifest.verify(tmp_path / "model")
    told = "The tensor vq/params.safetensors:decoder/conv_in/kernel is not what was written."
    assert told in str(error.value)


@pytest.mark.parametrize("name", [manifest.MANIFEST, named_arrays.TENSORS])
def test_a_flipped_bit_in_a_list_of_digests(tmp_path, folder, name):
    from_torch.convert(folder, tmp_path / "model")
    flip(tmp_path / "model" / name, 5)
    with pytest.raises(model_folder.CheckpointError, match=f"{name} is damaged"):
        manifest.verify(tmp_path / "model")


@pytest.mark.parametrize(
    ("kind", "place", "told"),
    [
        ("orbax", "params/state/manifest.ocdbt", r"and \d+ more are not what was written"),
        ("safetensors", "model.safetensors", r"model\.safetensors is damaged: \w+"),
    ],
)
def test_damage_that_the_store_chokes_on_is_one_sentence(
    tmp_path, folder, caplog, kind, place, told
):
    from_torch.convert(folder, tmp_path / "model", kind=kind)
    flip(tmp_path / "model" / place, 0)
    with pytest.raises(model_folder.CheckpointError, match=told):
        manifest.verify(tmp_path / "model")
    gc.collect()
    assert caplog.records == []


# ---------------------------------------------------------------------------------------------
# Memory.


def test_memory_was_measured_and_does_not_grow_with_the_layers():
    rows = [row for row in measurements.read_rows("rehearsal") if row["part"] == "convert"]
    peaks = {row["layers"]: row["peak_host_memory_bytes"] for row in rows}
    assert len(peaks) >= 2
    assert max(peaks.values()) <= 1.05 * min(peaks.values())
    assert all(row["checks"]["memory"] for row in rows)


# ---------------------------------------------------------------------------------------------
# The files themselves.


def test_files_are_those_that_the_library_reads(tmp_path):
    rng = np.random.default_rng(0)
    state = {
        "scalar": np.array(3.0, np.float32),
        "half": rng.normal(size=(3, 5)).astype(np.float16),
        "brain": rng.normal(size=(2, 1, 3)).astype(jnp.bfloat16),
        "none": np.zeros((0, 4), np.float32),
    }
    path = tmp_path / "x.safetensors"
    tensors.write(
        path,
        [
            tensors.Tensor(name, tensors.dtype_name(x.dtype), x.shape, lambda x=x: x)
            for name, x in state.items()
        ],
    )
    assert bits(safetensors.numpy.load_file(path)) == bits(state)
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    stored = tensors.list_tensors(path)
    assert bits({name: place.read() for name, place in stored.items()}) == bits(state)
