# SPDX-License-Identifier: Apache-2.0
"""The web page in headless Chromium: draw, paint a mask, ask, and upload a broken file."""

import asyncio
import concurrent.futures
import dataclasses
import os
import pathlib
import shutil

import numpy as np
import pytest
import staged
import stand_ins
from PIL import Image

from sparse_lavida_jax import config
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference.results import Origin, Result
from sparse_lavida_jax.pipeline import MASKED_GREY, SparseLaViDa
from sparse_lavida_jax.scenes import tasks, world

gr = pytest.importorskip(
    "gradio", reason="pip install 'sparse-lavida-jax[demo]' playwright to test the page"
)

from serving_on_loopback import served  # noqa: E402

from sparse_lavida_jax.apps import batching, demo, server  # noqa: E402
from sparse_lavida_jax.apps.serving import Service  # noqa: E402

MILLISECONDS = 60_000  # time limit; the first image includes compilation
PASSED = "tokens through the network"
# Allows running as root; the canvas needs WebGL, here without a GPU.
ARGUMENTS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = stand_ins.model_of_every_task(tmp_path_factory.mktemp("demo") / "tiny")
    pipe = SparseLaViDa.from_pretrained(folder)
    return Service(pipe.with_sampling(dataclasses.replace(pipe.settings.sampling, plan=False)))


@pytest.fixture(scope="module")
def address(service):
    def make(host, port):
        return demo.mounted(server.make_app(service, (host,)), service, host, port)

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


def opened(page, name):
    page.get_by_role("tab", name=name, exact=True).click()
    return page.get_by_role("tabpanel").filter(visible=True)


def test_an_image_is_drawn(page, service):
    tab = opened(page, "Draw")
    tab.get_by_role("button", name="Settings").click()
    tab.get_by_label("number input for Steps").fill("3")
    tab.get_by_role("button", name="Draw", exact=True).click()
    tab.get_by_text(PASSED).wait_for()
    drawn = tab.locator(".shown-image img")
    assert drawn.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [96, 96]
    assert service.counts["generate", "done"] >= 1


@pytest.fixture
def masks(service, monkeypatch):
    """The masks that the model is asked to draw in."""
    seen, with_hole = [], service.with_hole

    def spy(image, mask):
        seen.append(mask)
        return with_hole(image, mask)

    monkeypatch.setattr(service, "with_hole", spy)
    return seen


def test_a_mask_is_painted_and_drawn_again(page, shown, masks):
    tab = opened(page, "Inpaint")
    tab.locator("input[type=file]").first.set_input_files(shown)
    tab.get_by_text("select the draw tool to start").wait_for(state="hidden")
    tab.get_by_role("button", name="Brush", exact=True).click()
    canvas = tab.locator("canvas").first
    box = canvas.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 20, y + 20, steps=5)
    page.mouse.up()
    page.wait_for_timeout(1500)  # the layers are sent to the server after the stroke
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
    page.get_by_text("broken.png is no image that can be read").first.wait_for()


def test_the_image_just_drawn_is_taken_over_to_be_painted_on(page):
    tab = opened(page, "Draw")
    tab.get_by_role("button", name="Draw", exact=True).click()
    tab.get_by_text(PASSED).wait_for()
    page.get_by_role("button", name="Take the image just drawn").click()
    tab = opened(page, "Inpaint")
    tab.locator(".shown-image img").first.wait_for()
    tab.get_by_text("select the draw tool to start").wait_for(state="hidden")


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


def test_programs_that_send_a_broken_image_are_told(address, shown, broken):
    client = pytest.importorskip("gradio_client")
    page, words = client.Client(address, verbose=False), ("squares", 2, 0, 3, "as trained", 0)
    good, bad = client.handle_file(str(shown)), client.handle_file(str(broken))
    for background, layers in ((bad, []), (good, [bad])):
        editor = {"background": background, "layers": layers, "composite": None}
        with pytest.raises(Exception, match="is no image that can be read"):
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
    assert demo._standing(first) == "text: step 0 of 3 (compiling, once for each size)"
    assert demo._standing(second) == "waiting: 1 before this one"
    assert demo._standing(third) == "waiting: 2 before this one"
    stages.pipe.go.release()
    assert stages.pipe.at_step.acquire(timeout=staged.PATIENCE)
    assert demo._standing(first) == "text: step 1 of 3"
    assert demo._standing(stages.submit("ask", "hexagon")).endswith("\n\nUnknown: 'hexagon'.")
    second.cancel()
    assert demo._standing(third) == "waiting: 1 before this one"


def test_an_image_is_shown_while_it_is_drawn(stages, monkeypatch):
    monkeypatch.setattr(demo, "POLL_SECONDS", 0.01)
    inputs = {"words": "a", "steps": 2, "registers": 0, "sampler": demo.AS_TRAINED, "seed": 0}

    async def seen():
        values = []
        async for value in demo._run(stages, "generate", inputs):
            values.append(value)
            # A step has started, so an image shown after it is a preview.
            if stages.pipe.at_step.acquire(blocking=False):
                stages.pipe.go.release()
        return values

    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # the browser's loop runs in this one
        *before, (image, note, _) = thread.submit(asyncio.run, seen()).result()
    decoded = [one.max() for one, *_ in before if isinstance(one, np.ndarray)]
    assert decoded and set(decoded) <= {1, 2} and decoded == sorted(decoded)
    assert any("image: step" in said for _, said, _ in before)
    assert PASSED in note and (image == 9).all()


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


def test_what_is_painted_is_the_mask():
    background = np.full((4, 6, 4), 255, np.uint8)
    layer = np.zeros((4, 6, 4), np.uint8)
    layer[1, 2] = (255, 64, 192, 40)
    image, mask = demo._painted({"background": background, "layers": [layer], "composite": None})
    assert image.shape == (4, 6, 3)
    assert np.argwhere(mask).tolist() == [[1, 2]]
    with pytest.raises(gr.Error, match="give one"):
        demo._painted({"background": None, "layers": [], "composite": None})


def test_a_painted_image_is_kept_no_larger_than_the_model_needs_it(service):
    image, mask = np.zeros((1000, 600, 3), np.uint8), np.zeros((1000, 600), bool)
    mask[:200] = True
    small, kept = service.with_hole(image, mask)
    assert max(small.shape) == service.largest_side
    (asked,) = service.pipe.requests("inpaint", "a", image, mask=mask)
    np.testing.assert_array_equal(kept["known"], asked.known)


def test_boxes_are_drawn_where_the_model_named_any():
    boxes = ((1.2, 2, 3.7, 4), None)
    found = Result("ground", ("a", "b"), (0, 0), config.Sampling(), Origin(), {}, boxes=boxes)
    image = np.zeros((6, 6, 3), np.uint8)
    assert demo._marked(image, found)[1] == [((1, 2, 4, 4), "a")]
