# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs (`mkdocs.yml`): pages from outside `docs/`, and links to what is outside.

On a code host, the pages are read where they are. On the site, README.md, CONTRIBUTING.md and
CHANGELOG.md become pages too, and a link to another file of the repository leads to the code host
or, if its address is unknown (`repo_url`), loses its target and keeps its words.
"""

import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
PLACES = {page: source for source, page in OUTSIDE.items()}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
# Code in a numbered list: three spaces and four on a code host, four and four here.
CODE_IN_LIST = re.compile(r"^ {7}(?=\S)", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from outside `docs/`."""
    for source, page in OUTSIDE.items():
        text = CODE_IN_LIST.sub(" " * 8, (ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Returns a page whose links lead to pages of the site or to the code host."""
    name = page.file.src_uri
    folder = posixpath.dirname(PLACES.get(name, f"docs/{name}"))

    def redirected(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        path, hash_, anchor = target.partition("#")
        if not path or "://" in path:
            return link[0]
        found = posixpath.normpath(posixpath.join(folder, path))  # from the root of the repository
        if found in OUTSIDE or (found.startswith("docs/") and not (ROOT / found).is_dir()):
            there = OUTSIDE.get(found, found.removeprefix("docs/"))
            there = posixpath.relpath(there, posixpath.dirname(name) or ".")
        elif config.repo_url:
            there = f"{config.repo_url.rstrip('/')}/blob/main/{found}"
        else:
            return words
        return f"{mark}[{words}]({there}{hash_}{anchor})"

    return LINK.sub(redirected, markdown)
