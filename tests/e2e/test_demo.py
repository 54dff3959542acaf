# SPDX-License-Identifier: Apache-2.0
"""The web page in headless Chromium: draw, paint a mask, ask, and upload a broken file."""

import asyncio
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import time

import numpy as np
import pytest
import staged
from PIL import Image

from sparse_lavida_jax import config
from sparse_lavida_jax.art import tasks as art_tasks
from sparse_lavida_jax.art.world import STEP
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference import surprise
from sparse_lavida_jax.inference.results import Origin, Result
from sparse_lavida_jax.pipeline import MASKED_GREY, SparseLaViDa
from sparse_lavida_jax.sampling.prompts import PromptTokens
from sparse_lavida_jax.scenes import grammar, rules, tasks, world
from sparse_lavida_jax.scenes.task import Sample

gr = pytest.importorskip(
    "gradio", reason="pip install 'sparse-lavida-jax[demo]' playwright to test the page"
)

from serving_on_loopback import served  # noqa: E402

from sparse_lavida_jax.page import (  # noqa: E402
    demo,
    example_prompts,
    fields,
    figures,
    passes,
    standing,
    surprises,
)
from sparse_lavida_jax.server import batching, endpoints  # noqa: E402
from sparse_lavida_jax.server.serving import Service  # noqa: E402

MILLISECONDS = 120_000  # time limit; the first image includes compilation
EXAMPLE = "three green triangles"
PASSED = "tokens through the network"
# Allows running as root; the canvas needs WebGL, here without a GPU.
ARGUMENTS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]


@pytest.fixture(scope="module")
def service(every_task):
    pipe = SparseLaViDa.from_pretrained(every_task)
    return Service(pipe.with_sampling(dataclasses.replace(pipe.settings.sampling, layout=False)))


@pytest.fixture(scope="module")
def address(service):
    def make(host, port):
        return demo.mounted(endpoints.make_app(service, (host,)), service, host, port)

    with served(make) as found:
        yield found


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    path = tmp_path_factory.mktemp("shown") / "shown.png"
    image_files.write(path, world.render(tasks.sample("edit", 0, 0).image))
    return path


@pytest.fixture(scope="module")
def browser():
    """Chromium: $CHROMIUM, one on the path, or playwright's own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    named = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        if named is None and not pathlib.Path(own).is_file():
            pytest.skip("no Chromium: `playwright install chromium`, or set CHROMIUM to one")
        started = playwright.chromium.launch(executable_path=named or own, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def page(browser, address):
    found = browser.new_page(viewport={"width": 1200, "height": 1400})
    found.set_default_timeout(MILLISECONDS)
    # All other addresses are blocked.
    found.route("**/*", lambda route: route.continue_() if "127.0.0.1" in route.request.url
                or route.request.url.startswith(("data:", "blob:")) else route.abort())  # fmt: skip
    found.goto(address)
    found.get_by_role("tab", name="Draw", exact=True).wait_for()
    yield found
    if folder := os.environ.get("DEMO_PICTURES"):
        name = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0]
        found.screenshot(path=pathlib.Path(folder) / f"{name}.png", full_page=True)
    found.close()


def settle(page, milliseconds=1500):
    """Waits until the page has asked the server for nothing for a while."""
    last = [time.monotonic()]
    for event in ("request", "requestfinished"):
        page.on(event, lambda _: last.append(time.monotonic()))
    while time.monotonic() - last[-1] < milliseconds / 1000:
        page.wait_for_timeout(100)


def opened(page, name):
    page.get_by_role("tab", name=name, exact=True).click()
    return page.get_by_role("tabpanel").filter(visible=True)


def set_steps(tab, steps):
    tab.get_by_role("button", name="Settings").click()
    field = tab.get_by_label("number input for Steps")
    field.fill(str(steps))
    field.press("Tab")
    tab.page.wait_for_timeout(500)  # the page takes over what was typed a little later


def test_an_image_is_drawn(page, service):
    tab = opened(page, "Draw")
    set_steps(tab, 3)
    tab.get_by_role("button", name="Draw", exact=True).click()
    tab.get_by_text(PASSED).wait_for()
    drawn = tab.locator(".shown-image img")
    assert drawn.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [96, 96]
    assert service.counts["generate", "done"] >= 1


@pytest.fixture
def masks(service, monkeypatch):
    """The masks that the model is asked to draw in."""
    seen, with_mask = [], service.with_mask

    def spy(image, mask):
        seen.append(mask)
        return with_mask(image, mask)

    monkeypatch.setattr(service, "with_mask", spy)
    return seen


def test_a_mask_is_painted_and_drawn_again(page, shown, masks):
    tab = opened(page, "Inpaint")
    tab.locator("input[type=file]").first.set_input_files(shown)
    settle(page)  # or the image replaces what was painted
    tab.get_by_role("button", name="Inpaint", exact=True).click()
    page.get_by_text("nothing is painted: paint over the image first").wait_for()
    tab.get_by_role("button", name="Brush", exact=True).click()
    canvas = tab.locator("canvas").first
    box = canvas.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 20, y + 20, steps=5)
    page.mouse.up()
    settle(page)  # the layers are sent to the server after the stroke
    tab.get_by_label("What the whole image shows").fill("two blue squares")
    tab.get_by_role("button", name="Inpaint", exact=True).click()
    tab.get_by_text(PASSED).wait_for()
    (mask,) = masks
    assert mask.shape == (96, 96)
    assert 0 < mask.mean() < 0.9


def test_a_question_is_answered(page, shown):
    tab = opened(page, "Ask")
    tab.locator("input[type=file]").first.set_input_files(shown)
    tab.locator(".shown-image img").wait_for()
    tab.get_by_role("button", name="Ask", exact=True).click()
    tab.get_by_text(PASSED).wait_for()


def test_things_are_looked_for(page, shown):
    tab = opened(page, "Find")
    tab.locator("input[type=file]").first.set_input_files(shown)
    tab.locator(".shown-image img").first.wait_for()
    tab.get_by_role("button", name="Find", exact=True).click()
    tab.get_by_text(PASSED).wait_for()


@pytest.fixture
def broken(tmp_path):
    path = tmp_path / "broken.png"
    path.write_bytes(b"not an image")
    return path


@pytest.mark.parametrize("name", ["Edit", "Inpaint"])
def test_a_broken_upload_is_refused_with_a_sentence(page, broken, name):
    tab = opened(page, name)
    tab.locator("input[type=file]").first.set_input_files(broken)
    page.get_by_text("broken.png is not an image that can be read").first.wait_for()


def source(tab):
    """Where the first image of a tab comes from."""
    image = tab.locator(".shown-image img").first
    image.wait_for()
    return image.get_attribute("src")


def test_the_image_just_drawn_goes_to_every_tab_and_to_the_gallery(page):
    names = ("Edit", "Inpaint", "Ask")
    before = {name: source(opened(page, name)) for name in names}
    tab = opened(page, "Draw")
    tab.get_by_role("button", name="Draw", exact=True).click()
    tab.get_by_text(PASSED).wait_for()
    settle(page)
    tab.get_by_role("button", name="Settings").click()
    tab.get_by_label("Seed").fill("1")
    tab.get_by_text(EXAMPLE).click()
    page.wait_for_function(f"() => document.querySelector('textarea').value == '{EXAMPLE}'")
    tab.get_by_role("button", name="Draw", exact=True).click()
    page.get_by_text("Images of this session").wait_for()
    page.locator(".gallery img").nth(1).wait_for()
    settle(page)
    after = {name: source(opened(page, name)) for name in names}
    assert all(after[name] != before[name] for name in names)
    tab = opened(page, "Inpaint")
    tab.get_by_text("select the draw tool to start").wait_for(state="hidden")
    sent = []
    page.on("request", lambda request: "queue/join" in request.url and sent.append(request))
    page.locator(".gallery img").nth(1).click()
    settle(page)
    assert source(tab) != after["Inpaint"]
    assert len(sent) == 1  # the click: the editor's copy is made in the browser


def test_every_step_shows_what_it_passes(page):
    tab = opened(page, "Draw")
    set_steps(tab, 3)
    tab.get_by_role("button", name="Draw", exact=True).click()
    tab.get_by_text(PASSED).wait_for()
    assert tab.locator(".passes figure").count() == 4  # the prompt, and every step
    this, dense = (
        int(said.replace(",", "")) for said in tab.locator(".counts b").all_inner_texts()
    )
    assert this < dense


def test_stop_is_quiet(page, service, caplog, monkeypatch):
    follow = batching.Ticket.follow

    def slowly(ticket, state):
        follow(ticket, state)
        time.sleep(2)  # so that the page sees the step, even if nothing has to be compiled

    monkeypatch.setattr(batching.Ticket, "follow", slowly)
    tab = opened(page, "Draw")
    set_steps(tab, 5)
    tab.get_by_role("button", name="Draw", exact=True).click()
    tab.get_by_text(re.compile(r"step \d+ of")).first.wait_for()
    tab.get_by_role("button", name="Stop").click()
    tab.get_by_text("Stopped.").wait_for()
    deadline = time.monotonic() + MILLISECONDS / 1000
    while service.running and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    page.wait_for_timeout(500)
    assert tab.get_by_text("Stopped.").is_visible()
    assert not page.get_by_text("Error").is_visible()
    assert not [record for record in caplog.records if record.exc_info]


def test_a_mistake_in_the_settings_is_a_sentence(page):
    tab = opened(page, "Draw")
    tab.get_by_label("Prompt").fill(" ")
    tab.get_by_role("button", name="Draw", exact=True).click()
    page.get_by_text("the prompt is empty: say in words what you want").first.wait_for()


# ---------------------------------------------------------------------------------------------
# Without a browser.


def test_programs_use_the_page_too(address, shown):
    gradio_client = pytest.importorskip("gradio_client")
    client = gradio_client.Client(address, verbose=False)
    image, settings = gradio_client.handle_file(str(shown)), (1, 3, "as trained", 0)
    *_, note = client.predict(
        None, "a red circle is ___ a blue square", *settings, api_name="/infill"
    )
    assert PASSED in note
    said, note = client.predict(image, "a ___ circle", *settings, api_name="/caption")
    assert PASSED in note
    assert said.startswith("a") and said.endswith(" circle")
    _, note = client.predict(
        given=image, words="how many squares are there?", long=True, api_name="/ask"
    )
    assert PASSED in note


def test_programs_send_a_painted_layer_as_the_mask(address, shown, service, tmp_path, masks):
    client = pytest.importorskip("gradio_client")
    layer = np.zeros((96, 96, 4), np.uint8)
    layer[20:30, 40:50] = 255
    Image.fromarray(layer).save(tmp_path / "layer.png")
    editor = {
        "background": client.handle_file(str(shown)),
        "layers": [client.handle_file(str(tmp_path / "layer.png"))],
        "composite": None,
    }
    *_, note, _ = client.Client(address, verbose=False).predict(
        editor, "two blue squares", 2, 0, 3, "as trained", 0, api_name="/inpaint"
    )
    assert PASSED in note
    np.testing.assert_array_equal(masks[0], layer[..., 3] > 0)


def test_programs_that_send_a_broken_image_are_reported(address, shown, broken):
    client = pytest.importorskip("gradio_client")
    page, words = client.Client(address, verbose=False), ("squares", 2, 0, 3, "as trained", 0)
    good, bad = client.handle_file(str(shown)), client.handle_file(str(broken))
    for background, layers in ((bad, []), (good, [bad])):
        editor = {"background": background, "layers": layers, "composite": None}
        with pytest.raises(Exception, match="is not an image that can be read"):
            page.predict(editor, *words, api_name="/inpaint")


@pytest.fixture
def stages():
    """A service whose model takes a step only when the test allows it."""
    made = Service(staged.Staged())
    yield made
    made.pipe.run_free()
    made.close()


def test_a_request_says_how_many_are_before_it_and_then_its_step(stages):
    first, second, third = [stages.submit("ask", words) for words in "abc"]
    assert stages.pipe.at_step.acquire(timeout=staged.PATIENCE)
    pace = standing.Pace()
    assert "Writing: step 0 of 3" in standing.standing(first, pace)
    assert "Waiting: 1 before this one" in standing.standing(second, pace)
    assert "Waiting: 2 before this one" in standing.standing(third, pace)
    stages.pipe.go.release()
    assert stages.pipe.at_step.acquire(timeout=staged.PATIENCE)
    assert "Writing: step 1 of 3" in standing.standing(first, pace)
    unknown = standing.standing(stages.submit("ask", "hexagon"), pace)
    assert "Unknown: &#x27;hexagon&#x27;." in unknown
    second.cancel()
    assert "Waiting: 1 before this one" in standing.standing(third, pace)


def test_the_time_left_is_estimated_from_earlier_requests(stages):
    ticket, pace = stages.submit("ask", "a"), standing.Pace()
    assert stages.pipe.at_step.acquire(timeout=staged.PATIENCE)
    assert "left" not in standing.standing(ticket, pace)
    pace.watch(dataclasses.replace(ticket, seconds=60.0), "done")
    assert "s left" in standing.standing(ticket, pace)
    ticket.compiles = True  # which takes longer; no such request is done yet
    assert "s left" not in (said := standing.standing(ticket, pace)) and "compiling" in said
    pace.watch(dataclasses.replace(ticket, seconds=90.0), "done")
    other = dataclasses.replace(ticket, requests=stages.pipe.requests("caption", "b"))
    for one in (ticket, other):
        assert "s left" in standing.standing(one, pace)


def in_a_thread(coroutine):
    """Runs a coroutine where no loop runs: that of the browser runs in this thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def test_an_image_is_shown_while_it_is_drawn(stages, monkeypatch):
    monkeypatch.setattr(demo, "POLL_SECONDS", 0.01)
    inputs = {"words": "a", "steps": 2, "registers": 0, "sampler": demo.AS_TRAINED, "seed": 0}

    async def seen():
        values = []
        async for value in demo._run(stages, "generate", inputs, standing.Pace()):
            values.append(value)
            # One step per three values: a preview is looked at thrice, and must be shown once.
            if len(values) % 3 == 0 and stages.pipe.at_step.acquire(blocking=False):
                stages.pipe.go.release()
        return values

    *before, (image, note, *_) = in_a_thread(seen())
    decoded = [one.max() for one, *_ in before if isinstance(one, np.ndarray)]
    assert decoded and set(decoded) <= {1, 2} and decoded == sorted({*decoded})  # each once
    assert any("Drawing: step" in said for _, said, *_ in before)
    assert PASSED in note and (image == 9).all()


def test_more_like_an_image_are_its_branches(service):
    inputs = {"words": "a red circle", "sampler": demo.AS_TRAINED, "seed": 3, "steps": 4}

    async def all_of(values):
        return [one async for one in values]

    *_, kept = in_a_thread(all_of(demo._run(service, "generate", inputs, standing.Pace())))[-1]
    images, note = in_a_thread(all_of(demo._branched(service, kept, 0.5, standing.Pace())))[-1]
    wanted = service.pipe.branch(kept[0], "image:0.5")
    for image, pixels in zip(images, wanted.pixels, strict=True):
        np.testing.assert_array_equal(np.array(image), pixels)
    assert f"{wanted.tokens_passed:,} tokens through the network" in note
    with pytest.raises(gr.Error, match="draw an image first"):
        in_a_thread(all_of(demo._branched(service, None, 0.5, standing.Pace())))


def test_captions_are_ranked_beside_their_cells(service, shown):
    image = image_files.read(shown)
    words = "two blue squares\n\na red circle\na green cross\n"

    async def all_of(*given):
        values = demo._surprised(service, *given, standing.Pace())
        return [one async for one in values]

    *_, (lit, note, ranking) = in_a_thread(all_of(image, words))
    captions = ["two blue squares", "a red circle", "a green cross"]
    wanted = service.pipe.surprise(image, captions)
    np.testing.assert_array_equal(lit, surprises.lit(image, wanted, wanted.ranked[0]))
    assert f"{wanted.tokens_passed:,} {PASSED}, nothing drawn" in note
    places = [ranking.index(f"{place}. ") for place in (1, 2, 3)]
    assert places == sorted(places) and ranking.count("<img") == 3
    assert f"<b>{wanted.bits.sum(axis=1).min():.1f} bits</b>" in ranking
    with pytest.raises(gr.Error, match="this task is about an image"):
        in_a_thread(all_of(None, words))
    for wrong, told in ((None, "0 captions"), ("a\n" * 9, "9 captions were sent: 1 to 8")):
        with pytest.raises(gr.Error, match=told):
            in_a_thread(all_of(image, wrong))


def test_cells_are_lit_by_their_bits_and_the_worst_is_framed():
    bits = np.zeros((1, 36))
    bits[0, 7], bits[0, 9] = 8.0, 4.0
    found = surprise.Surprise(("<b>a</b>",), bits, (6, 6), 0.0, 10)
    canvas = np.full((96, 96, 3), 200, np.uint8)
    lit = surprises.lit(canvas, found, 0)
    assert lit.shape == (384, 384, 3)
    shades = [lit[at].tolist() for at in ((0, 0), (96, 96), (96, 224))]
    assert shades == [[40] * 3, [200] * 3, [120] * 3]
    assert (lit[64, 64:128] == figures.MASKED).all() and (lit[64, 63] == 40).all()
    said = surprises.ranking(canvas, found)
    assert "&lt;b&gt;a&lt;/b&gt;<br><b>12.0 bits</b>, 8.0 of them in row 1, column 1" in said


def test_surprise_has_no_tab_where_the_order_follows_from_confidence(service):
    own = dataclasses.replace(service.pipe.settings.sampling, order="confidence", preset="none")
    assert demo._knows(service.pipe, "surprise")
    assert not demo._knows(service.pipe.with_sampling(own), "surprise")


def test_a_preview_hides_what_is_not_drawn_yet(service, monkeypatch):
    previews, preview = [], service.pipe.preview

    def spy(*given):
        previews.append(preview(*given))
        return previews[-1]

    monkeypatch.setattr(service.pipe, "preview", spy, raising=False)
    ticket = service.submit("generate", "a red circle", previews=batching.EVERY, seed=3)
    drawn = ticket.future.result(60).pixels[0]
    hidden = [(one == MASKED_GREY).all(axis=-1).mean() for one in previews]
    assert len(hidden) > 1 and hidden == sorted(hidden, reverse=True) and hidden[0] > hidden[-1]
    np.testing.assert_array_equal(ticket.previews[-1], drawn)


def test_a_task_that_was_not_learned_has_no_tab(service, monkeypatch):
    whole = demo.make_page(service)
    prompts = type(service.pipe.prompts)
    monkeypatch.setattr(prompts, "refusal", lambda _, task: "not learned" * (task == "edit"))
    labels = [
        [block.label for block in page.blocks.values() if isinstance(block, gr.Tab)]
        for page in (whole, demo.make_page(service))
    ]
    assert set(labels[0]) - set(labels[1]) == {"Edit"}
    assert len(labels[0]) == len(demo.TABS)


def test_what_is_counted_is_what_passes(service):
    ticket = service.submit("generate", "a red circle", seed=3, steps=4)
    result = ticket.future.result(60)
    passed, dense = passes.counted(ticket)
    cells = service.pipe.settings.model.grid_size**2
    (state,) = ticket.stages
    assert passed == result.tokens_passed
    assert dense == 4 * (sum(state.prompted[0].rows) + cells)
    full = service.submit("generate", "a red circle", seed=3, steps=4, sampler="dense")
    whole = full.future.result(60).tokens_passed
    assert passes.counted(full) == (whole, whole) == (dense, dense)


def test_frames_outline_what_a_step_passes(service):
    ticket = service.submit("generate", "a red circle", seed=3, steps=4)
    image = ticket.future.result(60).pixels[0]
    (state,) = ticket.stages
    rows = service.pipe.settings.model.grid_size
    number, costs = 0, passes.costs.costs(state.plan, state.settings, PromptTokens((0,)))[1:]
    for part in state.plan:
        for step in range(part.num_steps):
            drawn = passes.frame(state, 0, number, rows, image)
            side = len(drawn) // rows
            corners = drawn[::side, ::side].reshape(-1, 3)
            outlined = [(corners == rgb).all(axis=1) for rgb in (passes.figures.MASKED,
                                                                 passes.figures.CLEAN)]  # fmt: skip
            now = part.decode[step, 0]
            assert sorted(now[now >= 0]) == np.flatnonzero(outlined[0]).tolist()
            assert outlined[1].sum() == costs[number].newest
            number += 1
    shown = passes.drawn(ticket, image, [("a <b>", (0.0, 0.0, 0.5, 0.5))])
    assert shown.count("<figure>") == 5 and "1 a &lt;b&gt;" in shown


def test_a_layout_is_boxes_with_names():
    layout = " large red circle<LOC_0><LOC_0><LOC_4><LOC_4>, nothing<LOC_4><LOC_20><LOC_8><LOC_24>"
    assert passes.layout_boxes(layout, 24) == [
        ("large red circle", (0, 0, 4 / 24, 4 / 24)),
        ("nothing", (4 / 24, 20 / 24, 8 / 24, 1)),
    ]


def test_help_texts_hold_nothing_that_markdown_eats(service):
    blocks = demo.make_page(service).blocks.values()
    infos = [block.info for block in blocks if getattr(block, "info", None)]
    assert infos and not any("_" in info or "*" in info for info in infos)


def test_examples_are_right():
    """Every example that the page offers is done right by the bundled model."""
    pipe = SparseLaViDa.from_pretrained("scenes", batch_size=8)
    examples, scene = example_prompts.of_world("scenes"), world.Scene.of(example_prompts.SCENE)
    start, offered = examples.start(), dict(examples.prompts)

    def is_right(request, seen):
        said = request.replace(" is ", " ")
        return rules.verdict(grammar.SceneRequest.parse(said), seen) == rules.CORRECT

    prompts = offered.pop("generate")
    drawn = pipe.generate(prompts, seed=[0] * len(prompts)).pixels
    for prompt, image in zip(prompts, drawn, strict=True):
        assert is_right(prompt, world.read(image)), prompt
    cells = {cell: str(thing) for cell, thing in scene.objects()}
    edited = {  # what a cell contains afterwards; None: an object anywhere else
        "make the red circle green": (8, "large green circle"),
        "replace the blue square with a yellow cross": (20, "yellow cross"),
        "remove the red circle": (8, ""),
        "add a purple triangle": (None, "purple triangle"),
    }
    for instruction in offered.pop("edit"):
        seen = world.read(pipe.edit(start, instruction).pixels[0])
        after = {cell: str(thing) for cell, thing in seen.objects()}
        changed, thing = edited[instruction]
        if changed is None:
            changed = (after.keys() - cells.keys()).pop()
        assert after.get(changed, "").endswith(thing), instruction
        assert thing or changed not in after, instruction
        kept = cells.keys() | after.keys()
        assert all(after.get(cell) == cells.get(cell) for cell in kept - {changed}), instruction
    for prompt in offered.pop("outpaint"):
        assert is_right(
            prompt, world.read(pipe.outpaint(examples.start("outpaint"), prompt).pixels[0])
        )
    for prompt in offered.pop("reflect"):
        assert is_right(prompt, world.read(pipe.reflect(prompt, rounds=3).pixels[0])), prompt
    answers = {
        "how many squares are there?": "1",
        "what colour is the circle?": "red",
        "is there a green triangle?": "no",
    }
    for question in offered.pop("ask"):
        assert pipe.ask(start, question).text == answers[question]
    for template in offered.pop("caption"):
        assert is_right(pipe.constrained_caption(start, template=template).text, scene)
    for text in offered.pop("infill"):
        assert is_right(pipe.infill(text, start).text, scene)
    for phrase in offered.pop("ground"):
        cell, _ = rules.find(scene, grammar.Phrase.parse(phrase))
        x1, y1, x2, y2 = (edge * 4 for edge in grammar.cell_box(cell))  # 4 pixels a step
        assert pipe.ground(start, phrase).box == (x1, y1, x2, y2)
    assert not offered, f"nothing checks {', '.join(offered)}"


@pytest.mark.slow
def test_examples_of_art_are_right():
    """The same for real art, by its exact judges."""
    pipe = SparseLaViDa.from_pretrained("art")
    examples, scene = example_prompts.of_world("art"), example_prompts.ART_SCENE
    start, offered = examples.start(), dict(examples.prompts)
    assert all(examples.words[task] in prompts for task, prompts in offered.items())

    def is_right(task, prompt, output, answer=None):
        sample = Sample(prompt, scene, answer, task=task)
        assert art_tasks.score(sample, output).reason == "", prompt

    for prompt in offered.pop("generate"):
        is_right("draw", prompt, pipe.generate(prompt).pixels[0])
    for instruction in offered.pop("edit"):
        is_right("edit", instruction, pipe.edit(start, instruction).pixels[0])
    for prompt in offered.pop("outpaint"):
        is_right("draw", prompt, pipe.outpaint(examples.start("outpaint"), prompt).pixels[0])
    for prompt in offered.pop("reflect"):
        is_right("draw", prompt, pipe.reflect(prompt, rounds=3).pixels[0])
    answers = {
        "how many suns are there?": "1",
        "what style is the sun?": "twemoji",
        "is there a crown?": "no",
    }
    for question in offered.pop("ask"):
        is_right("ask", question, pipe.ask(start, question).text, answers[question])
    for name in offered.pop("ground"):
        (thing,) = (one for one in scene.things if one.name == name)
        assert pipe.ground(start, name).box == tuple(edge * STEP for edge in thing.box)
    assert not offered, f"nothing checks {', '.join(offered)}"


def test_a_large_image_is_painted_on_at_its_own_size():
    background = np.zeros((900, 1400, 4), np.uint8)
    layer = background.copy()
    layer[800, 1300] = 255
    image, mask = fields.image_and_mask(
        {"background": background, "layers": [layer], "composite": None}
    )
    assert image.shape == (900, 1400, 3) and np.argwhere(mask).tolist() == [[800, 1300]]


def test_what_is_painted_is_the_mask():
    background = np.full((4, 6, 4), 255, np.uint8)
    layer = np.zeros((4, 6, 4), np.uint8)
    layer[1, 2] = (255, 64, 192, 40)
    image, mask = fields.image_and_mask(
        {"background": background, "layers": [layer], "composite": None}
    )
    assert image.shape == (4, 6, 3)
    assert np.argwhere(mask).tolist() == [[1, 2]]
    with pytest.raises(gr.Error, match="give one"):
        fields.image_and_mask({"background": None, "layers": [], "composite": None})


def test_a_painted_image_is_kept_no_larger_than_the_model_needs_it(service):
    image, mask = np.zeros((1000, 600, 3), np.uint8), np.zeros((1000, 600), bool)
    mask[:200] = True
    small, kept = service.with_mask(image, mask)
    assert max(small.shape) == service.largest_side
    (asked,) = service.pipe.requests("inpaint", "a", image, mask=mask)
    np.testing.assert_array_equal(kept["known"], ~asked.mask)


def test_boxes_are_drawn_where_the_model_named_any():
    boxes = ((1.2, 2, 3.7, 4), None)
    found = Result("ground", ("a", "b"), (0, 0), config.Sampling(), Origin(), {}, boxes=boxes)
    image, times = np.zeros((6, 6, 3), np.uint8), demo.LEAST_MARKED // 6
    marked = demo._marked(image, found)
    assert marked.shape == (6 * times, 6 * times, 3)
    x, y = round(1.2 * times), 2 * times
    assert (marked[y, x : round(3.7 * times)] == passes.BOXES[0]).all()
    assert (marked[:y] == 0).all() and (marked[3 * times, 2 * times] == 0).all()
    said = passes.found(found)
    assert "a: left 1.2, top 2, right 3.7, bottom 4 px" in said and "b: not found" in said
