# SPDX-License-Identifier: Apache-2.0
"""The result of a row of a served batch does not depend on the other rows."""

import random
import re

import numpy as np
import pytest

from sparse_lavida_jax.inference import batch_shapes
from sparse_lavida_jax.inference.batch_shapes import batching_key
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling.progress import Progress
from sparse_lavida_jax.scenes import tasks, world
from sparse_lavida_jax.server import serving
from sparse_lavida_jax.server.batching import Cancelled, DeviceTurns, Ticket
from sparse_lavida_jax.server.serving import PROOF, SURPRISE, Limits, Service

LONG = " and ".join(["a red circle above a blue square"] * 5)
PROMPTS = ("a red circle", "two squares", "a red circle above a blue square", LONG)


@pytest.fixture(scope="module")
def pipe(every_task):
    return SparseLaViDa.from_pretrained(every_task, batch_size=4)


def served(pipe, made, **how):
    return pipe.run(made, padding="served", **how)


@pytest.mark.parametrize("seed", range(3))
def test_images_are_those_of_a_batch_of_their_own(pipe, seed):
    dice = random.Random(seed)
    made = [
        pipe.requests(
            "generate", dice.choice(PROMPTS), seed=dice.randrange(100), steps=2,
            guidance=[dice.choice((1.0, 3.0))], temperature=[dice.choice((0.5, 1.0))],
            as_written=True,
        )[0]
        for _ in range(dice.randint(3, 6))
    ]  # fmt: skip
    assert len({batching_key(one) for one in made}) == len({one.words == LONG for one in made})
    result = served(pipe, made)
    for row, record in enumerate(result.records):
        alone = pipe.replay(record)
        np.testing.assert_array_equal(alone.tokens[0], result.tokens[row])
        np.testing.assert_array_equal(alone.pixels[0], result.pixels[row])
        assert record["bucket"]["rows"] in (1, 2, 4)
        part = result.part(row, row + 1)
        assert part.prompts == part.sentences == (made[row].words,)
        assert (part.passed, part.records) == ((result.passed[row],), (record,))


def test_answers_are_those_of_a_batch_of_copies(pipe):
    image = world.render(tasks.sample("edit", 0, 0).image)
    asked = ("how many squares are there?", "what is red?", f"is there {LONG}?")
    made = [pipe.requests("ask", words, image, seed=3, as_written=True)[0] for words in asked]
    result = served(pipe, made)
    shapes = [[0, 1], [2]]  # the long one is padded to more
    for rows in shapes:
        for row in rows:
            copies = served(pipe, [made[row]] * len(rows))
            np.testing.assert_array_equal(copies.tokens[0], result.tokens[row])
            assert copies.texts[0] == result.texts[row]
            assert copies.passed[0] == result.passed[row]


def test_rows_of_other_shapes_are_decoded_apart_and_told_by_number(pipe):
    image = world.render(tasks.sample("edit", 0, 0).image)
    boxes = ([0, 0, 16, 16], [0, 0, 48, 48], [0, 0, 16, 16])
    made = [
        pipe.requests("inpaint", "a red circle", image, box=box, seed=i, steps=2, layout=False)[0]
        for i, box in enumerate(boxes)
    ]
    assert batching_key(made[0]) == batching_key(made[2]) != batching_key(made[1])
    told: list[Progress] = []
    result = served(pipe, made, callback=told.append)
    assert {state.rows for state in told} == {(0, 2), (1,)}
    assert {len(state.responses) for state in told} == {2, 1}
    for row, record in enumerate(result.records):
        np.testing.assert_array_equal(pipe.replay(record, image).pixels[0], result.pixels[row])


def test_the_key_of_programs_is_what_chooses_them(pipe):
    entered = []

    class Entered:
        def __init__(self, key):
            entered.append(key)

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    for number in (1, 2, 2):
        made = pipe.requests("generate", ["a red circle"] * number, steps=2, layout=False)
        served(pipe, made, programs=Entered)
    assert len(entered) == 3
    assert entered[1] == entered[2] != entered[0]


def test_settings_that_nobody_compiled_are_refused_with_the_list(pipe):
    service = Service(pipe, Limits(only=((1, None), (2, 0))))
    own = {"seed": 3, "temperature": 0.5, "guidance": 2.0}
    allowed = ({}, {"steps": 1}, {"num_inference_steps": 2, "registers": 0}, own)
    for given in allowed:
        service._check_settings(pipe.requests("generate", "a", **serving._by_row(given)))
    told = "'generate'. Leave the settings out, or ask for 1 step or 2 steps and 0 registers."
    for given in ({"steps": 4}, {"sampler": "dense"}, {"steps": 1, "registers": 1}):
        with pytest.raises(RequestError, match=re.escape(told)):
            service.submit("generate", "a", **given)
    with pytest.raises(RequestError, match=r"nothing more for 'ask'\. Leave the settings out\.$"):
        service.submit("ask", "a", steps=2)
    assert service.counts == {("generate", "refused"): 3, ("ask", "refused"): 1}


IMAGE = world.render(tasks.sample("edit", 0, 0).image)


@pytest.fixture
def service(pipe):
    made = Service(pipe, Limits(only=()))
    yield made
    made.close()


def test_an_image_of_settings_that_nobody_compiled_is_not_proved(pipe, service):
    drawn = pipe.generate("a red circle", seed=3, steps=4, layout=False)
    told = "nothing more for 'generate'. Send an image drawn with the model's own settings."
    with pytest.raises(RequestError, match=re.escape(told)):
        service.submit(PROOF, record=drawn.records[0], pixels=drawn.pixels[0])
    assert service.counts == {("proof", "refused"): 1}
    drawn = pipe.generate("a red circle", seed=3)
    proof = service.submit(PROOF, record=drawn.records[0], pixels=drawn.pixels[0])
    assert proof.future.result(60).follows
    assert {key[0] for key in service._batcher.known} >= {"image", "pixels"}


def test_passes_of_other_images_and_captions_compile_nothing_more(service):
    first = service.submit(SURPRISE, ["a red circle", "two squares"], IMAGE)
    first.future.result(60)
    known = {*service._batcher.known}
    assert first.compiles and known
    second = service.submit(SURPRISE, ["a blue cross", "a square"], 255 - IMAGE)
    second.future.result(60)
    assert not second.compiles and service._batcher.known == known


def test_turns_of_a_record_make_few_programs(pipe, service):
    drawn = pipe.generate("a red circle", seed=3, layout=False)
    sizes = set()
    for number in (1, 5, 6, 8):
        turns = [["image", step, step] for step in range(number)]
        record = drawn.records[0] | {"turns": turns}
        service.submit(PROOF, record=record, pixels=drawn.pixels[0]).future.result(60)
        sizes.add(len(service._batcher.known))
    assert len(sizes) <= 2


def test_between_passes_others_get_the_device_and_clients_may_leave(service, monkeypatch):
    """Eight captions in four plans are eight passes of four rows."""
    steps, offered = [], []
    offer, follow = DeviceTurns.offer, Ticket.follow

    def told(ticket, state):
        follow(ticket, state)
        steps.append((state.stage, state.steps, state.total))

    monkeypatch.setattr(Ticket, "follow", told)
    monkeypatch.setattr(
        DeviceTurns, "offer", lambda turns, batch: (offered.append(batch), offer(turns, batch))
    )
    captions = ["a red circle"] * 8
    found = service.submit(SURPRISE, captions, IMAGE).future.result(60)
    assert found.tokens_passed == 8 * found.tokens
    assert steps == [("surprise", i, 8) for i in range(8)] and len(offered) == 8
    monkeypatch.setattr(Ticket, "follow", lambda ticket, _: (steps.clear(), ticket.cancel()))
    with pytest.raises(Cancelled, match="nobody waits for it any more"):
        service.submit(SURPRISE, captions, IMAGE).future.result(60)
    assert not steps and len(offered) == 8


def test_captions_and_records_are_bounded(service):
    for captions, told in (([], "0 captions"), (["a"] * 9, "9 captions were sent: 1 to 8")):
        with pytest.raises(RequestError, match=told):
            service.submit(SURPRISE, captions, IMAGE)


@pytest.mark.parametrize(
    ("length", "padded"), [(0, 0), (16, 32), (32, 32), (48, 64), (128, 128), (144, 256)]
)
def test_lengths_are_padded_to_a_few(length, padded):
    assert batch_shapes._few((length, 0)) == (padded, 0)
