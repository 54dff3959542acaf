# SPDX-License-Identifier: Apache-2.0
"""Preparing data from the command line: from images to batches, stopped and resumed."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import raw_data

from sparse_lavida_jax import main
from sparse_lavida_jax.cli import program
from sparse_lavida_jax.data import image_files, images
from sparse_lavida_jax.mixture.records import ShardedRecords
from sparse_lavida_jax.models import image_codec

CHECKOUT = pathlib.Path(__file__).parents[2]
CODEC = "--config.data.image_codec=scenes"


def front(*words):
    return program.main(["sparse-lavida", *map(str, words)])


def test_tables_become_shards_with_the_codes_of_the_tokenizer(tmp_path, capsys):
    source = raw_data.captioned(tmp_path)
    words = ("prepare", source, tmp_path / "out", CODEC, "--config.prepare.shard_rows=4",
             "--config.prepare.encode_batch=4")  # fmt: skip
    assert front(*words) == 0
    told = f"{tmp_path / 'out'}: 10 records, %d of 3 shard(s) made now; 0 rows left out"
    assert capsys.readouterr().out.startswith(told % 3)
    assert front(*words) == 0
    assert capsys.readouterr().out.startswith(told % 0)

    index = json.loads((tmp_path / "out/mixture.json").read_text())
    (dataset,) = index["datasets"]
    encoder = image_codec.ImageTokenizer("scenes")
    assert index["tokenizer"]["digest"] == encoder.digest
    records = ShardedRecords(
        [(tmp_path / "out" / s["file"], s["records"], s["bytes"]) for s in dataset["shards"]]
    )
    for i in (0, 7):
        image = image_files.read(tmp_path / f"pictures/{i}.png")
        ((top, left),) = records[i].crops.tolist()
        square = images.training_crop(image, encoder.side, top, left, encoder.factor)
        (codes,) = encoder.encode(np.stack([square] * 4))[:1]
        np.testing.assert_array_equal(records[i].target, [codes])
        assert codes.shape == (6, 6) and len(set(codes.ravel().tolist())) > 1


def test_a_preparation_that_is_stopped_leaves_whole_shards_and_goes_on(tmp_path):
    rows = [{"image": f"{i % 10}.png", "caption": f"image {i}"} for i in range(60)]
    source = raw_data.captioned(tmp_path, rows)
    settings = [CODEC, "--config.prepare.shard_rows=1", "--config.prepare.encode_batch=1"]
    command = [sys.executable, "-m", "sparse_lavida_jax.main", "--mode=prepare", f"--src={source}",
               f"--dst={tmp_path / 'out'}", *settings]  # fmt: skip
    path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
    )  # fmt: skip
    first = tmp_path / "out/captions/00000-of-00060.json"
    deadline = time.monotonic() + 120
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "Traceback" not in said
    left = raw_data.contents(tmp_path / "out")
    assert not [name for name in left if name.endswith(".tmp")]
    finished = [name for name in left if name.endswith(".arrayrecord")]
    assert 1 <= len(finished) < 60 and "mixture.json" not in left
    assert front("prepare", source, tmp_path / "out", *settings) == 0
    assert front("prepare", source, tmp_path / "whole", *settings) == 0
    assert raw_data.contents(tmp_path / "out") == raw_data.contents(tmp_path / "whole")


@pytest.fixture
def complaint(capsys):
    """Runs a command that must fail; returns its message."""

    def told(*words):
        assert main.main(["main", "--mode=prepare", *map(str, words)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("sparse_lavida_jax: ")
        assert len(printed.err.splitlines()) == 1
        return printed.err

    return told


def test_a_mistake_is_a_sentence(tmp_path, complaint):
    source, out = raw_data.captioned(tmp_path), tmp_path / "out"
    to = (f"--src={source}", f"--dst={out}")
    assert "needs --src: a mixture file" in complaint()
    assert "needs --dst: " in complaint(to[0])
    assert "No image tokenizer at 'x'" in complaint(*to, "--config.data.image_codec=x")
    assert "config.prepare has no 'shards'" in complaint(*to, "--config.prepare.shards=2")
    told = "Prepare.max_bad_fraction=2.0 is out of range: it must lie in [0, 1]."
    assert told in complaint(*to, "--config.prepare.max_bad_fraction=2.0")
    assert "no mixture file" in complaint(f"--src={tmp_path / 'x.yaml'}", to[1])
    assert not out.exists()
    (tmp_path / "captions.jsonl").write_text("{broken\n" * 5)
    small = "--config.prepare.shard_rows=4"
    assert "4 of 5 records of captions are bad" in complaint(*to, CODEC, small)
    assert "captions.jsonl:4: it is no JSON" in (out / "report.md").read_text()
