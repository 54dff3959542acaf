# SPDX-License-Identifier: Apache-2.0
"""A record with any value in any place: one sentence or an image, at once and in little memory.

SLOW_TESTS=1 draws the images of records that are taken; else the network does not run.
"""

import copy
import json
import os
import random
import resource
import time

import numpy as np
import pytest
import stand_ins
import tiny

from sparse_lavida_jax import pipeline
from sparse_lavida_jax.checkpoints.model_folder import CheckpointError
from sparse_lavida_jax.cli import program
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference import batch_shapes, engine, whole_plan
from sparse_lavida_jax.inference.results import SHOWN_KEY
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.scenes import tasks, world
from sparse_lavida_jax.schema import InputError

TASKS = dict.fromkeys((*tasks.TASKS, "fill_layout"), 1.0)
NASTY = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 1.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "\0", "\ud800", "a" * 10**6, "<LOC_1>" * 50_000, "../../etc/passwd",
    "/dev/zero", [], {}, [[]], [True], [[True] * 6] * 6, [[False] * 6] * 6, [[True] * 1000] * 1000,
    [2**17, 2**17], [131072, 0], [10**6, 10**6], [-1, 1e9], [1e308] * 4, [-5, -5, 9**9, 9**9],
    {"a": 1}, {"path": "/dev/zero"}, [{"x": [1] * 1000}], [None] * 4, {"": {"": {"": []}}},
]  # fmt: skip
SECONDS = 20  # for one record, on a busy machine
MOST_KB = 700_000  # of memory, for all of them


def leaves(value, path=()):
    """Yields the path of every value in a record, also of those that hold others."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from leaves(value[0], (*path, 0))


def changed(record, path, value):
    record = copy.deepcopy(record)
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return record


@pytest.fixture(scope="module")
def drawn():
    """A pipeline, and a record of every task, each with its image."""
    given = stand_ins.settings(data={"tasks": TASKS, "max_answer_len": 16})
    pipe = pipeline.SparseLaViDa(
        tiny.denoiser(given.model), given, stand_ins.prompts(given), stand_ins.Codec(), 2
    )
    image = world.render(tasks.sample("edit", 0, 0).image)
    small, how = image[:48, :48], {"seed": 3, "steps": 1}
    layout = " large red circle<LOC_4><LOC_8><LOC_8><LOC_12>"
    with stand_ins.quick_compilation():
        made = {
            "generate": (pipe.generate("a red circle", layout=layout, **how), None),
            "edit": (pipe.edit(image, "remove the circle", layout=False, **how), image),
            "inpaint": (
                pipe.inpaint(image, "a red circle", box=(0, 0, 32, 32), layout=False, **how), image
            ),
            "outpaint": (pipe.outpaint(small, "a red circle", layout=False, **how), small),
        }  # fmt: skip
        margins = {"layout": [], "image": [0.5] * 35 + [None]}
        yield (
            pipe,
            {
                task: (
                    json.loads(json.dumps(result.records[0] | {"margins": margins})),
                    image,
                    result.pixels[0],
                )
                for task, (result, image) in made.items()
            },
        )


@pytest.fixture
def still(monkeypatch):
    """The network does not run, unless SLOW_TESTS is set."""

    def sample(model, inputs, phases, *, settings, **_):
        return np.stack([one.example.response for one in inputs])

    def scores(*_, **how):
        raise RequestError("no pass runs.")

    if not os.environ.get("SLOW_TESTS"):
        monkeypatch.setattr(engine.sample, "sample", sample)
        monkeypatch.setattr(whole_plan, "scores", scores)


@pytest.mark.parametrize("task", ["generate", "edit", "inpaint", "outpaint"])
def test_any_value_in_any_place(drawn, still, task):
    pipe, records = drawn
    record, shown, _ = records[task]
    rng, cases = random.Random(task), [(p, v) for p in leaves(record) for v in NASTY]
    cases = rng.sample(cases, min(len(cases), 400))
    before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for path, value in cases:
        begin = time.monotonic()
        try:
            pipe.replay(changed(record, path, value), shown)
        except (InputError, CheckpointError) as error:
            assert len(str(error)) < 1500, (path, len(str(error)))
            refused += 1
        except Exception as error:
            raise AssertionError(f"{path} = {value!r:.80}: {type(error).__name__}") from error
        assert time.monotonic() - begin < SECONDS, (path, f"{value!r:.80}")
    assert refused > len(cases) / 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KB


def test_an_unchanged_record_draws_the_same(drawn):
    pipe, records = drawn
    for record, shown, pixels in records.values():
        np.testing.assert_array_equal(pipe.replay(record, shown).pixels[0], pixels)


@pytest.mark.parametrize(
    ("task", "path", "value", "told"),
    [
        ("inpaint", ("recipe", "known"), [[True] * 6] * 6, "nothing is to be drawn"),
        ("outpaint", ("recipe",), {"known": [[False] * 6] * 6}, "nothing is to be kept"),
        ("inpaint", ("recipe", "known"), [[True] * 7] * 7, r"it must be \[6, 6\]"),
        ("generate", ("bucket", "prompt_len"), [131072, 131072], "pads prompts to 131072 tokens"),
        ("generate", ("bucket", "prompt_len"), [0, 4096], "pads prompts to 4096 tokens"),
        ("generate", ("bucket", "rows"), 1025, r"must lie in 1\.\.1024"),
        ("generate", ("layout",), "<LOC_1>" * 1200, "the layout '<LOC_1><LOC_1>.*at most"),
        ("generate", ("attention",), "\x1b[2J", "a name"),
    ],
)  # fmt: skip
def test_what_a_request_does_not_need_is_refused(drawn, task, path, value, told):
    pipe, records = drawn
    record, shown, _ = records[task]
    with pytest.raises(InputError, match=told):
        pipe.replay(changed(record, path, value), shown)


def test_shapes_of_real_batches_are_taken(drawn, still):
    """Prompts are padded to those of the longest in a batch, and to multiples in evaluations."""
    pipe, records = drawn
    record, *_ = records["generate"]
    long = "a red circle and " * 20
    for lengths in ((16, 0), batch_shapes._few((1, 0)), batch_shapes._few((len(long.split()), 0))):
        for rows in (1, 16, 1024):
            bucket = {"rows": rows, "prompt_len": list(lengths)}
            pipe.replay(changed(record, ("bucket",), bucket))


NAMES = [
    "/etc", "/etc/passwd", "/dev/zero", "../elsewhere", "evil/model", "evil/model@main", "fifo",
    "\0", "a" * 5000, "loop", "link", "~", "hf://evil/model", "--help", "nowhere",
]  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder, with traps; the hub may not be reached."""
    (tmp_path / "elsewhere").mkdir()
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    os.mkfifo("fifo")
    os.symlink("loop", "loop")
    os.symlink(tmp_path / "elsewhere", "link")
    monkeypatch.setattr(
        "sparse_lavida_jax.checkpoints.hub.fetch", lambda *_, **__: pytest.fail("the hub")
    )
    return here


@pytest.mark.parametrize("part", ["checkpoint", "adapters", "image"])
@pytest.mark.parametrize("name", NAMES)
def test_a_record_opens_nothing_that_its_reader_did_not_name(drawn, place, capsys, part, name):
    _, records = drawn
    record, *_ = records["edit"]
    record = copy.deepcopy(record)
    record["checkpoint"] = {"name": "scenes", "sha256": "0" * 64, "adapters": ""}
    if part == "image":
        record[SHOWN_KEY] = {"path": name, "sha256": "0" * 64}
    else:
        record["checkpoint"]["name" if part == "checkpoint" else part] = name
    image_files.write(place / "a.png", np.zeros((8, 8, 3), np.uint8), record)
    assert program.main(["sparse-lavida", "replay", "a.png", "--out=b.png"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "an error of the program" not in told
    assert len(told) < 1000 and not (place / "b.png").exists()


def test_a_recorded_image_is_read_from_the_current_folder_only(drawn, place):
    pipe, records = drawn
    record, shown, pixels = records["edit"]
    image_files.write(place / "here.png", shown)
    image_files.write(place.parent / "there.png", shown)
    for name in ("here.png", str(place / "here.png")):
        found = changed(record, (SHOWN_KEY, "path"), name)
        np.testing.assert_array_equal(pipe.replay(found).pixels[0], pixels)
    with pytest.raises(RequestError, match=r"give it yourself with --image"):
        pipe.replay(changed(record, (SHOWN_KEY, "path"), str(place.parent / "there.png")))
