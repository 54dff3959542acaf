# SPDX-License-Identifier: Apache-2.0
"""Makes a plain folder of drawings with their titles, to train on (docs/own_images.md).

    python docs/clipart.py clipart              # on Debian or Ubuntu; takes 25 MB
    python docs/clipart.py clipart PACKAGE.deb  # Debian's package openclipart-svg, from elsewhere

Open Clip Art: public-domain drawings of animals, food, plants, tools and vehicles, 64 pixels per
side. Many titles are names of authors or not English, and many drawings are fine lines, which small
image tokenizers lose: taken are the first of each title whose words are all among the keywords of
the drawings, if enough of it is ink. `rsvg-convert` (package librsvg2-bin) renders them.
"""

import io
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
from typing import NamedTuple

from PIL import Image

PACKAGE = "openclipart-svg"
DRAWINGS = "usr/share/openclipart/svg"  # in the package
SUBJECTS = (
    "animals", "buildings", "education", "electronics", "food", "office", "plants",
    "recreation/music", "recreation/toys", "tools", "transportation",
)  # fmt: skip
NOT_OF_THEM = ("tools/weapons", "transportation/aiga", "transportation/roadsigns")
SIZE, MARGIN = 64, 2  # pixels
LONGEST = 3  # words of a title
INK, BOLD = 224, 0.2  # grey level below which a pixel is ink, and the least share of such pixels
AGENT = r"<(?:cc:)?Agent.*?</(?:cc:)?Agent>"  # authors and publishers
README = """# {count} drawings with their titles

Images: Open Clip Art, in the public domain, from Debian's package `openclipart-svg`.
Captions: their titles, in lower case. Made by `python docs/clipart.py`.
"""


class Drawing(NamedTuple):
    """A drawing of the package: its path below `DRAWINGS`, its SVG, its title and its keywords."""

    path: str
    svg: str
    title: str
    keywords: frozenset[str]


def fetch(folder: pathlib.Path) -> pathlib.Path:
    """Returns the package, which apt downloads into a folder.

    Raises:
        SystemExit: there is no apt, or it fails.
    """
    try:
        run("apt-get", "download", "-q", PACKAGE, folder=folder)
    except FileNotFoundError:
        raise SystemExit(
            f"there is no apt-get: download Debian's package {PACKAGE} from"
            f" https://packages.debian.org/{PACKAGE}, and give the file as the second argument."
        ) from None
    return next(folder.glob("*.deb"))


def write(package: pathlib.Path, folder: pathlib.Path) -> int:
    """Writes the folder and returns how many images it has.

    Raises:
        SystemExit: it is another package, or a program is missing.
    """
    try:
        run("rsvg-convert", "--version")
        held = run("dpkg-deb", "--fsys-tarfile", str(package))
    except FileNotFoundError as error:
        raise SystemExit(
            f"there is no {error.filename}: install Debian's packages librsvg2-bin and dpkg."
        ) from None
    with tarfile.open(fileobj=io.BytesIO(held)) as archive:
        drawings = read(archive)
    if not drawings:
        raise SystemExit(f"{package} has no drawings in {DRAWINGS}: it is not {PACKAGE}.")
    folder.mkdir(parents=True, exist_ok=True)
    images: dict[str, str] = {}  # file names by title: the first drawing of each
    for drawing in chosen(drawings):
        image = rendered(drawing.svg) if drawing.title not in images else None
        if image is not None and is_bold(image):
            images[drawing.title] = f"{len(images):03}.png"
            image.save(folder / images[drawing.title])
    lines = [{"file_name": name, "text": title} for title, name in images.items()]
    rows = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metadata.jsonl").write_text(rows)
    (folder / "README.md").write_text(README.format(count=len(images)))
    return len(images)


def read(archive: tarfile.TarFile) -> list[Drawing]:
    """Returns the drawings that are in the public domain."""
    found = []
    for member in sorted(archive.getmembers(), key=lambda one: one.name):
        path = member.name.removeprefix("./")
        if not member.isfile() or not path.startswith(DRAWINGS) or not path.endswith(".svg"):
            continue
        file = archive.extractfile(member)
        assert file is not None
        svg = file.read().decode(errors="replace")
        licences = re.findall(r'<(?:cc:)?license[^>]*rdf:resource="([^"]*)"', svg)
        if any("publicdomain" in one.lower() for one in licences):
            said = re.sub(AGENT, "", svg, flags=re.DOTALL)
            title = "".join(re.findall(r"<dc:title>(.*?)</dc:title>", said, re.DOTALL)[:1])
            keywords = re.findall(r"<rdf:li[^>]*>(.*?)</rdf:li>", said, re.DOTALL)
            by = words(" ".join(re.findall(AGENT, svg, re.DOTALL)))
            title = " ".join(words(title)) if not {*words(title)} <= {*by} else ""
            path = path.removeprefix(DRAWINGS + "/")
            found.append(Drawing(path, svg, title, frozenset(words(" ".join(keywords)))))
    return found


def chosen(drawings: list[Drawing]) -> list[Drawing]:
    """Returns those of `SUBJECTS` whose title is made of keywords, one of them their own."""
    known = frozenset[str]().union(*(one.keywords for one in drawings))

    def is_one(drawing):
        title = drawing.title.split()
        fits = known.issuperset(title) and not drawing.keywords.isdisjoint(title)
        wanted = drawing.path.startswith(SUBJECTS) and not drawing.path.startswith(NOT_OF_THEM)
        return wanted and fits and 0 < len(title) <= LONGEST

    return [drawing for drawing in drawings if is_one(drawing)]


def rendered(svg: str) -> Image.Image | None:
    """Returns a drawing on white, as large as its square allows; None if it cannot be rendered."""
    how = ("--width", str(4 * SIZE), "--height", str(4 * SIZE), "--keep-aspect-ratio")
    done = subprocess.run(["rsvg-convert", *how], input=svg.encode(), capture_output=True)
    if done.returncode:
        return None
    image = Image.open(io.BytesIO(done.stdout)).convert("RGBA")
    box = image.getchannel("A").getbbox()
    if box is None:
        return None
    image = image.crop(box)
    scale = (SIZE - 2 * MARGIN) / max(image.size)
    image = image.resize([max(round(side * scale), 1) for side in image.size], Image.LANCZOS)
    square = Image.new("RGBA", (SIZE, SIZE), "white")
    square.alpha_composite(image, ((SIZE - image.width) // 2, (SIZE - image.height) // 2))
    return square.convert("RGB")


def is_bold(image: Image.Image) -> bool:
    """Returns whether enough of a drawing is not white: small tokenizers lose fine lines."""
    dark = image.convert("L").point(lambda value: 255 * (value < INK))
    return sum(dark.histogram()[1:]) >= BOLD * SIZE**2


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case, without numbers."""
    return re.findall("[a-z]+", text.lower())


def run(*command: str, folder: pathlib.Path | None = None) -> bytes:
    """Returns what a command prints.

    Raises:
        FileNotFoundError: there is no such command.
        SystemExit: it fails.
    """
    done = subprocess.run(command, cwd=folder, capture_output=True)
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip()
        raise SystemExit(f"{' '.join(command)} failed: {told}")
    return done.stdout


def main() -> None:
    if len(sys.argv) not in (2, 3):
        raise SystemExit("usage: python docs/clipart.py FOLDER [PACKAGE.deb]")
    folder, *given = map(pathlib.Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as loaded:
        count = write(given[0] if given else fetch(pathlib.Path(loaded)), folder)
    print(f"{folder}: {count} images with captions")


if __name__ == "__main__":
    main()
