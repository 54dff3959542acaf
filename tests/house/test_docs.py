# SPDX-License-Identifier: Apache-2.0
"""Things that the pages in docs/ name exist, and messages are quoted correctly."""

import pathlib
import re
import runpy
import shlex

import pytest

from sparse_lavida_jax import config, main
from sparse_lavida_jax.cli import modes, parser
from sparse_lavida_jax.convert import adapters
from sparse_lavida_jax.training import own_images

CHECKOUT = pathlib.Path(__file__).parents[2]
PACKAGE = CHECKOUT / "sparse_lavida_jax"
TOUR = runpy.run_path(str(CHECKOUT / "docs" / "tour.py"))["TOUR"]
TESTS = {path.name for path in (CHECKOUT / "tests").rglob("test_*.py")}
MARKDOWN = sorted(
    path.relative_to(CHECKOUT / "docs").with_suffix("").as_posix()
    for folder in ("docs", "docs/api", "docs/log")
    for path in (CHECKOUT / folder).glob("*.md")
)
PAGES = ("gpus", "lavida_o", "method", "extending", "serving", "troubleshooting")
# A command is in backticks, or on a line of its own after a prompt sign.
COMMANDS = re.compile(
    r"`((?:sparse-lavida|python -m sparse_lavida_jax\.main) [^`]+)`"
    r"|^ *(?:\$ )?(?:srun )?((?:sparse-lavida|python -m sparse_lavida_jax\.main) .+)$",
    re.MULTILINE,
)
# Models that a reader would have made by then.
MADE = re.compile(r"(runs/scenes|models/lavida-o|MODEL)\b")
# Fixed parts of messages that troubleshooting.md quotes.
QUOTED = (
    "needs packages that are not installed",
    "jax cannot use the device that was asked for:",
    "attention runs without a kernel, in blocks of tokens, and slower:",
    "has none for compute capability",
    "and jax may use ",
    "the device has not enough memory: ",
    "lower --batch-size",
    "the device has not enough memory: ask for less.",
    "(compiling, once for each size and option)",
    "which will draw badly:",
    "has not written its model yet: that happens at its end.",
    "Give a model folder, a run directory, the name of a",
    "is not an image that can be read: neither",
    "it was drawn by another checkpoint:",
    "another program has it: choose another with --port, or 0 for any",
    "requests wait already and the queue is full",
)


def text_of(page):
    return (CHECKOUT / "docs" / f"{page}.md").read_text()


def headings(path):
    """Returns the addresses of a page's headings, as code hosts and the site make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one).strip().lower().replace(" ", "-") for one in found}


@pytest.mark.parametrize("page", MARKDOWN)
def test_links_lead_somewhere(page):
    here = CHECKOUT / "docs" / f"{page}.md"
    for target in re.findall(r"\]\(([^)\s]+)\)", here.read_text()):
        name, _, anchor = target.partition("#")
        there = (here.parent / name).resolve() if name else here
        assert "://" in target or there.exists(), target
        if anchor and there.suffix == ".md" and "://" not in target:
            assert anchor in headings(there), target


def test_every_page_is_on_the_site():
    listed = set(re.findall(r": (\S+\.md)$", (CHECKOUT / "mkdocs.yml").read_text(), re.MULTILINE))
    docs = CHECKOUT / "docs"
    assert {str(path.relative_to(docs)) for path in docs.rglob("*.md")} <= listed


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    text = re.sub(r"there is no config file \S+", "", text_of(page))  # a quoted error
    named = {name.lstrip("/") for name in re.findall(r"[\w/]+\.py\b", text)}
    assert named
    for name in named:
        places = (
            CHECKOUT,
            PACKAGE,
            PACKAGE / "kernels",
            CHECKOUT / "docs",
        )
        assert any((place / name).is_file() for place in places) or name in TESTS, name


def test_troubleshooting_quotes_what_is_printed():
    page = " ".join(text_of("troubleshooting").split())
    # Messages are split over lines in the source.
    sources = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    code = re.sub(r'"\s*f?"', "", sources)
    for part in QUOTED:
        assert part in page, part
        assert part in code, part


def test_the_readme_is_short():
    assert len((CHECKOUT / "README.md").read_text().split()) <= 900


def commands():
    pages = [CHECKOUT / "README.md", *(CHECKOUT / f"docs/{page}.md" for page in MARKDOWN)]
    for page in pages:
        for found in COMMANDS.findall(page.read_text().replace("\\\n", " ")):
            words = shlex.split(MADE.sub("scenes", "".join(found)), comments=True)
            whole = not any("..." in word or word == "COMMAND" for word in words)
            if whole and words != ["sparse-lavida", "prepare"]:  # only mentioned
                yield pytest.param(words, id=f"{page.stem}: {' '.join(words)}")


@pytest.mark.parametrize("words", list(commands()))
def test_a_command_of_the_documents_is_understood(words, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    # Settings for folders that a reader would have made.
    monkeypatch.setattr(own_images, "from_scratch", lambda _: config.Config())
    monkeypatch.setattr(own_images, "continued", lambda *_: config.Config())
    monkeypatch.setattr(adapters, "settings_with", lambda settings, _: settings)
    if words[0] == "python":
        assert main.parse(words[2:]) is not None
        return
    name, *rest = words[1:]
    if name in parser.MODES:
        asked = parser.Parser(name).parse_args(rest)
        assert modes.settings_of(name, asked) is not None
    else:
        parser.Parser(name).parse_args(rest)


def test_there_are_many_commands_in_the_documents():
    assert len(list(commands())) > 30


@pytest.mark.parametrize("command", TOUR)
def test_a_command_of_the_tour_is_understood(command):
    name, *rest = shlex.split(command)
    parser.Parser(name).parse_args(rest)


def test_the_page_of_the_tour_shows_all_its_commands():
    shown = re.findall(r"^\$ sparse-lavida (.+)$", text_of("tour"), re.MULTILINE)
    assert shown == list(TOUR), (
        "docs/tour.md shows other commands than TOUR: run python docs/tour.py"
    )
