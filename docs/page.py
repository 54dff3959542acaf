# SPDX-License-Identifier: Apache-2.0
"""Takes `docs/page.png`: the page of the model of real art after it drew and pointed.

    python docs/page.py    # needs pip install 'sparse-lavida-jax[demo]' playwright, and a Chromium

Starts the command as a person would and clicks in a headless Chromium: $CHROMIUM, one on the path,
or playwright's own.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import numpy as np
from PIL import Image
from playwright.sync_api import Page, sync_playwright

HERE = pathlib.Path(__file__).resolve().parent
PORT = 7861
WIDTH = 1100  # pixels
ADDRESS = f"http://127.0.0.1:{PORT}"
SECONDS = 180  # limit until the page answers
FOUND = "sun"  # an example of the page
PASSED = "tokens through the network"
ARGUMENTS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]


def wait_for_page() -> None:
    """Waits until the page answers."""
    until = time.monotonic() + SECONDS
    while True:
        try:
            urllib.request.urlopen(ADDRESS).close()
            return
        except urllib.error.URLError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def opened(page: Page, name: str):
    """Opens a tab."""
    page.get_by_role("tab", name=name, exact=True).click()
    return page.get_by_role("tabpanel").filter(visible=True)


def shown(page: Page, folder: pathlib.Path) -> list[np.ndarray]:
    """Draws and finds things; returns an image of the page after each."""
    taken: list[np.ndarray] = []

    def take(name: str) -> None:
        tab = page.get_by_role("tabpanel").filter(visible=True)
        tab.get_by_role("button", name=name, exact=True).click()
        tab.get_by_text(PASSED).wait_for()
        path = folder / f"page{len(taken)}.png"
        page.wait_for_timeout(2000)  # milliseconds: images come after the words
        page.screenshot(path=path, full_page=True)
        taken.append(np.asarray(Image.open(path).convert("RGB")))

    opened(page, "Draw")
    take("Draw")
    opened(page, "Find").get_by_text(FOUND, exact=True).first.click()
    page.wait_for_timeout(3000)
    take("Find")
    return taken


def main() -> None:
    """Starts the page, takes the images, stops it."""
    words = [
        sys.executable,
        "-m",
        "sparse_lavida_jax",
        "demo",
        "--checkpoint=art",
        f"--port={PORT}",
    ]
    server = subprocess.Popen(words)
    named = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    try:
        wait_for_page()
        with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
            browser = playwright.chromium.launch(executable_path=named, args=ARGUMENTS)
            page = browser.new_page(viewport={"width": WIDTH, "height": 700})
            page.set_default_timeout(SECONDS * 1000)
            page.goto(ADDRESS)
            taken = shown(page, pathlib.Path(folder))
            browser.close()
        Image.fromarray(np.concatenate(taken)).save(HERE / "page.png")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
