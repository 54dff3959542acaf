# SPDX-License-Identifier: Apache-2.0
"""Makes a plain folder of 400 emoji with their names, to train on (docs/own_images.md).

    python docs/emoji.py emoji            # needs npm; takes 73 MB
    python docs/emoji.py emoji FILE.tgz   # with a package that `npm pack` downloaded

Faces, animals, plants and food with 64 pixels per side: the first 400 in the order of Unicode.
They are Noto Emoji, copyright Google, Apache License 2.0, from an npm package that also has their
Unicode names. The README.md of the folder says so.
"""

import hashlib
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile

PACKAGE = "emoji-datasource-google@15.1.2"
SHA256 = "d44462c604b8b8ddeea1bded87031fe73beadd92b9569d977dbd6224e45dc850"
CATEGORIES = ("Smileys & Emotion", "Animals & Nature", "Food & Drink")
COUNT = 400
README = f"""# {COUNT} emoji with their names

Images: Noto Emoji, copyright Google, Apache License 2.0, from the npm package `{PACKAGE}`.
Names: those of Unicode, in lower case. Made by `python docs/emoji.py`.
"""


def fetch(folder: pathlib.Path) -> pathlib.Path:
    """Returns the package, which npm loads into a folder.

    Raises:
        SystemExit: npm is missing or fails.
    """
    try:
        done = subprocess.run(
            ["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, capture_output=True
        )
    except FileNotFoundError:
        raise SystemExit(
            f"there is no npm: install it, or run `npm pack {PACKAGE}` elsewhere and give the file"
            " as the second argument."
        ) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"npm pack {PACKAGE} failed: {error.stderr.decode().strip()}") from error
    return folder / done.stdout.decode().split()[-1]


def write(package: pathlib.Path, folder: pathlib.Path) -> int:
    """Writes the folder and returns how many images it has.

    Raises:
        SystemExit: it is another package.
    """
    found = hashlib.sha256(package.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{package} has SHA-256 {found}: it is not {PACKAGE}, which has {SHA256}.")
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    with tarfile.open(package) as archive:
        for emoji in _chosen(json.loads(_read(archive, "emoji.json"))):
            image = emoji["image"]
            (folder / image).write_bytes(_read(archive, f"img/google/64/{image}"))
            lines.append({"file_name": image, "text": emoji["name"].lower()})
    rows = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metadata.jsonl").write_text(rows)
    (folder / "README.md").write_text(README)
    return len(lines)


def _chosen(listed: list[dict]) -> list[dict]:
    chosen = [one for one in listed if one["category"] in CATEGORIES and one["has_img_google"]]
    return sorted(chosen, key=lambda one: one["sort_order"])[:COUNT]


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(f"package/{name}")
    assert member is not None
    return member.read()


def main() -> None:
    if len(sys.argv) not in (2, 3):
        raise SystemExit("usage: python docs/emoji.py FOLDER [FILE.tgz]")
    folder, *given = map(pathlib.Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as loaded:
        count = write(given[0] if given else fetch(pathlib.Path(loaded)), folder)
    print(f"{folder}: {count} images with captions")


if __name__ == "__main__":
    main()
