# SPDX-License-Identifier: Apache-2.0
"""An evaluation resumes, with or without shards, and does not mix with another."""

import contextlib
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from sparse_lavida_jax import config, pipeline
from sparse_lavida_jax.evals import run
from sparse_lavida_jax.evals.official_files import EvaluationError
from sparse_lavida_jax.training import runs

SAMPLE = pathlib.Path(__file__).parents[1] / "data" / "evals" / "chartqa"
ITEMS = 30


class Pipe(pipeline.SparseLaViDa):
    """Answers every question with its own words, and records the questions."""

    log: pathlib.Path
    seconds = 0.0

    def __init__(self):
        self.prompts = self

    @classmethod
    def from_pretrained(cls, name, batch_size, **_):
        return cls()

    def check_task(self, task):
        assert task == "ask"

    def ask(self, words, images, tokens):
        assert len(images) == 1
        return words

    def sample(self, examples, *, sampling, seed, shared):
        assert shared
        for words in examples:
            with self.log.open("a") as file:
                file.write(words.splitlines()[0] + "\n")
        time.sleep(self.seconds)
        return [
            f"{words.splitlines()[0]}, seed {one}"
            for words, one in zip(examples, seed, strict=True)
        ]

    def texts(self, said):
        return list(said)


def made(folder: pathlib.Path) -> pathlib.Path:
    """Writes a ChartQA with `ITEMS` questions."""
    shutil.copytree(SAMPLE / "test" / "png", folder / "test" / "png")
    for part, count in (("human", 10), ("augmented", ITEMS - 10)):
        entries = [{"imgname": "0.png", "query": f"{part} {i}", "label": "1"} for i in range(count)]
        (folder / "test" / f"test_{part}.json").write_text(json.dumps(entries))
    return folder


def settings(folder, **changes):
    evaluate = {"benchmark": "chartqa", "data": str(folder), "split": "test", "batch_size": 2}
    return config.build(config.Config, {"seed": 7, "evaluate": evaluate | changes})


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The questions to the model so far."""
    monkeypatch.setattr(run, "SparseLaViDa", Pipe)
    monkeypatch.setattr(Pipe, "log", tmp_path / "log", raising=False)
    Pipe.log.touch()
    return lambda: Pipe.log.read_text().splitlines()


@pytest.fixture
def data(tmp_path):
    return made(tmp_path / "data")


def kept(folder):
    """The lines of all shards."""
    lines = [line for path in folder.glob("shards/*/items.jsonl")
             for line in path.read_text().splitlines()]  # fmt: skip
    return sorted((json.loads(line) for line in lines), key=lambda row: row["index"])


def test_every_item_has_a_row_and_the_folder_its_results(data, asked, tmp_path):
    told = []
    table = run.evaluate(
        settings(data), "scenes", tmp_path / "run", on_progress=lambda *both: told.append(both)
    )
    rows = kept(tmp_path / "run")
    assert [row["index"] for row in rows] == list(range(ITEMS))
    assert [row["seed"] for row in rows] == [7 + i for i in range(ITEMS)]
    assert rows[3]["key"] == "human/3" and rows[3]["output"] == {"text": "human 3, seed 10"}
    assert told == [(i, ITEMS) for i in range(0, ITEMS + 1, 2)]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["schema"] == "sparse-lavida-eval/1"
    assert results["checkpoint"]["name"] == "scenes" and len(results["checkpoint"]["sha256"]) == 64
    assert results["seed"] == 7 and results["items"] == ITEMS
    (made_with,) = results["made_with"]
    assert made_with.keys() >= {"device", "software", "commit", "created"}
    assert table == (tmp_path / "run" / "table.md").read_text().rstrip("\n")
    assert f"| relaxed accuracy | 0 | 0 | {ITEMS} | 0.000 to " in table
    assert made_with["device"]["kind"] in table
    assert "seed 7" in table and "split test, batch_size 2." in table


def test_a_finished_evaluation_asks_nothing_again(data, asked, tmp_path):
    first = run.evaluate(settings(data), "scenes", tmp_path / "run")
    before = asked()
    assert run.evaluate(settings(data), "scenes", tmp_path / "run") == first
    assert asked() == before


def test_shards_share_the_items(data, asked, tmp_path):
    folder = tmp_path / "run"
    said = run.evaluate(settings(data), "scenes", folder, shard="1/3")
    assert f"10 of {ITEMS} items are there, 20 are missing" in said
    assert [row["index"] for row in kept(folder)] == list(range(1, ITEMS, 3))
    # The rest in two shards: existing results are skipped, whichever shard computed them.
    run.evaluate(settings(data), "scenes", folder, shard="0/2")
    assert "relaxed accuracy" in run.evaluate(settings(data), "scenes", folder, shard="1/2")
    assert sorted(asked()) == sorted({*asked()}) and len(asked()) == ITEMS
    assert [row["output"]["text"].split()[-1] for row in kept(folder)] == [
        str(7 + i) for i in range(ITEMS)
    ]


@pytest.mark.parametrize("shard", ["3/3", "1", "a/b", "1/0", "-1/2"])
def test_a_shard_that_is_none_is_reported(data, asked, tmp_path, shard):
    with pytest.raises(EvaluationError, match="is no shard: write i/n"):
        run.evaluate(settings(data), "scenes", tmp_path / "run", shard=shard)


def test_another_evaluation_is_refused_and_says_what_differs(data, asked, tmp_path):
    folder = tmp_path / "run"
    run.evaluate(settings(data), "scenes", folder, shard="0/2")
    with pytest.raises(runs.RunError, match=r"evaluate.max_new_tokens was 32 and is 64.*workdir"):
        run.evaluate(settings(data, max_new_tokens=64), "scenes", folder)
    moved = shutil.move(data, tmp_path / "moved")
    run.evaluate(settings(moved, batch_size=5), "scenes", folder, shard="0/2")


def test_other_questions_under_the_same_names_are_another_evaluation(data, asked, tmp_path):
    run.evaluate(settings(data), "scenes", tmp_path / "run", shard="0/2")
    path = data / "test" / "test_human.json"
    path.write_text(path.read_text().replace("human 3", "human three"))
    with pytest.raises(runs.RunError, match="keys was"):
        run.evaluate(settings(data), "scenes", tmp_path / "run", shard="1/2")


def test_a_start_that_was_killed_or_raced_does_no_harm(data, asked, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".settings.json-0a1b2c3d.tmp").touch()  # left by a process that was killed
    run.evaluate(settings(data), "scenes", folder, shard="0/2")
    path = folder / "settings.json"
    path.write_text("{")
    with pytest.raises(runs.RunError, match=r"settings\.json is damaged.*another --workdir"):
        run.evaluate(settings(data), "scenes", folder, shard="1/2")


def test_every_machine_that_took_part_is_reported(data, asked, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    commits = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr(run, "commit", lambda: {"commit": next(commits), "dirty": False})
    for shard in ("0/3", "1/3", "2/3"):
        told = run.evaluate(settings(data), "scenes", folder, shard=shard)
    assert "; commit aaaa, " in told and "; commit bbbb, " in told
    results = json.loads((folder / "results.json").read_text())
    assert [made["commit"] for made in results["made_with"]] == ["aaaa", "aaaa", "bbbb"]
    # A shard resumed with another commit has two entries, with the same commit one.
    path = folder / "shards" / "0-of-3" / "items.jsonl"
    for commit in ("aaaa", "cccc"):
        monkeypatch.setattr(run, "commit", lambda c=commit: {"commit": c, "dirty": False})
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
        run.evaluate(settings(data), "scenes", folder, shard="0/3")
    entries = json.loads(path.with_name("made_with.json").read_text())
    assert [made["commit"] for made in entries] == ["aaaa", "cccc"]


def test_a_folder_of_something_else_is_left_alone(data, asked, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("x")
    with pytest.raises(runs.RunError, match=r"holds files but no settings\.json"):
        run.evaluate(settings(data), "scenes", tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_two_processes_do_not_compute_the_same_shard(data, asked, tmp_path):
    folder = tmp_path / "run"
    run.evaluate(settings(data), "scenes", folder, shard="0/2")
    with contextlib.closing(_held(folder / "shards" / "1-of-2")):
        with pytest.raises(runs.RunError, match="is being written by process"):
            run.evaluate(settings(data), "scenes", folder, shard="1/2")


class _held:
    def __init__(self, folder):
        folder.mkdir(parents=True)
        self.close = runs.lock(folder)


def test_half_written_images_are_removed_before_they_are_judged(data, asked, tmp_path):
    folder = tmp_path / "run"
    run.evaluate(settings(data), "scenes", folder, shard="0/2")
    deep = folder / "export" / "a" / "b"
    deep.mkdir(parents=True)
    for name in (".0.png-0a1b2c3d.tmp", "0.png"):
        (deep / name).touch()
    run.evaluate(settings(data), "scenes", folder, shard="1/2")
    assert [path.name for path in deep.iterdir()] == ["0.png"]


def test_a_damaged_line_is_named(data, asked, tmp_path):
    folder = tmp_path / "run"
    run.evaluate(settings(data), "scenes", folder)
    path = folder / "shards" / "0-of-1" / "items.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], "{}\n", *lines[4:]]))
    with pytest.raises(EvaluationError, match=r"items.jsonl, line 5, is damaged.*Delete that"):
        run.evaluate(settings(data), "scenes", folder)


KILLED = f"""
import pathlib, sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import test_evals_run as here
from sparse_lavida_jax.evals import run
folder = pathlib.Path(sys.argv[1])
here.Pipe.log, here.Pipe.seconds = folder / "log", 0.1
run.SparseLaViDa = here.Pipe
run.evaluate(here.settings(folder / "data"), "scenes", folder / "run")
"""


def test_after_a_kill_only_what_was_under_way_is_computed_again(data, asked, tmp_path):
    first = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    deadline = time.monotonic() + 120
    while len(asked()) < 9 and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    path = tmp_path / "run" / "shards" / "0-of-1" / "items.jsonl"
    done = path.read_text().count("\n")
    assert 0 < done < ITEMS
    with path.open("a") as file:  # as if it had died in the middle of a line
        file.write('{"index": 29, "key": "augm')
    before = asked()
    run.evaluate(settings(data), "scenes", tmp_path / "run")
    assert [row["index"] for row in kept(tmp_path / "run")] == list(range(ITEMS))
    again = asked()[len(before) :]
    assert len(again) == ITEMS - done
    assert len({*before} & {*again}) == len(before) - done <= 2  # one batch
    assert json.loads((tmp_path / "run" / "results.json").read_text())["items"] == ITEMS
