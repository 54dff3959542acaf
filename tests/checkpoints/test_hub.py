# SPDX-License-Identifier: Apache-2.0
"""Models are fetched from a small server with the hub's endpoints, and pushed to a stand-in."""

import functools
import hashlib
import http.server
import json
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
from typing import ClassVar

import numpy as np
import pytest
import torch_folder

from sparse_lavida_jax import main
from sparse_lavida_jax.checkpoints import cards, hub, model_folder
from sparse_lavida_jax.convert import from_torch, stand_in
from sparse_lavida_jax.inference.results import Origin
from sparse_lavida_jax.pipeline import SparseLaViDa

library = pytest.importorskip("huggingface_hub", reason="the hub needs pip install '.[hub]'")
COMMIT = "1" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves the folders of `repositories` by their ids; a string is an error to return."""

    repositories: ClassVar[dict[str, pathlib.Path | str]] = {}
    breaks: ClassVar[bool] = False  # whether the connection breaks in the middle of large files
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD" and self.breaks and len(body) > 10_000:
            self.wfile.write(body[: len(body) // 2])
            self.connection.shutdown(socket.SHUT_RDWR)
        elif self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        parts = self.path.partition("?")[0].removeprefix("/api/models").strip("/").split("/")
        folder = self.repositories.get("/".join(parts[:2]), "RepoNotFound")
        if isinstance(folder, str):
            return self._answer(403 if folder == "GatedRepo" else 404, X_Error_Code=folder)
        paths = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
        if parts[2] == "resolve":
            path = paths.get("/".join(parts[4:]))
            if path is None:
                return self._answer(404, X_Error_Code="EntryNotFound")
            content = path.read_bytes()
            digest = hashlib.sha1(content).hexdigest()
            return self._answer(200, content, ETag=f'"{digest}"', X_Repo_Commit=COMMIT)
        if parts[2] == "revision" and parts[3] not in ("main", COMMIT):
            return self._answer(404, X_Error_Code="RevisionNotFound")
        files = [
            {"type": "file", "path": name, "size": path.stat().st_size, "oid": "0" * 40}
            for name, path in paths.items()
        ]
        about = {
            "id": "/".join(parts[:2]),
            "sha": COMMIT,
            "siblings": [{"rfilename": name} for name in paths],
        }
        told = files if parts[2] == "tree" else about
        self._answer(200, json.dumps(told).encode(), Content_Type="application/json")

    do_HEAD = do_GET


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """Starts the server; returns a function that sets the folder, or the error, of an id."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = {"endpoint": f"http://127.0.0.1:{server.server_port}", "cache_dir": tmp_path / "cache"}
    fetch = functools.partial(library.snapshot_download, **where)
    monkeypatch.setattr(library, "snapshot_download", fetch)
    monkeypatch.setattr(Hub, "repositories", {})
    monkeypatch.chdir(tmp_path)
    yield Hub.repositories.__setitem__
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder that tests must not change."""
    scratch = tmp_path_factory.mktemp("hub")
    stand_in.write(scratch / "released", stand_in.tiny_settings())
    from_torch.convert(scratch / "released", scratch / "model")
    return scratch / "model"


def test_a_model_is_fetched_by_its_id_and_then_found_without_the_hub(serve, folder):
    serve("me/model", folder)
    fetched = hub.fetch("me/model")
    for path in filter(pathlib.Path.is_file, folder.rglob("*")):
        assert (fetched / path.relative_to(folder)).read_bytes() == path.read_bytes()
    pipe = SparseLaViDa.from_pretrained("me/model", revision=COMMIT)
    assert pipe.source.name == f"me/model@{COMMIT}"
    serve("me/model", "RepoNotFound")
    again = SparseLaViDa.from_pretrained("me/model", local_files_only=True)
    ours, theirs = again.model.final_norm.weight[...], pipe.model.final_norm.weight[...]
    np.testing.assert_array_equal(ours, theirs)


def test_a_process_that_never_used_the_library_finds_its_errors():
    fetch = "from sparse_lavida_jax.checkpoints.hub import *; fetch('me/m', local_files_only=True)"
    done = subprocess.run([sys.executable, "-c", fetch], capture_output=True, text=True)
    assert "CheckpointError: there is no folder me/m here, it is not in the cache" in done.stderr


def test_half_a_download_is_refused(serve, folder, tmp_path):
    half = pathlib.Path(shutil.copytree(folder, tmp_path / "half"))
    (half / "model.safetensors").unlink()
    serve("me/half", half)
    with pytest.raises(model_folder.CheckpointError, match=r"model in|is missing"):
        SparseLaViDa.from_pretrained("me/half")


def test_a_download_that_breaks_off_is_a_sentence_and_goes_on_later(serve, folder, monkeypatch):
    serve("me/model", folder)
    get = library.file_download.http_get
    with monkeypatch.context() as patch:
        patch.setattr(Hub, "breaks", True)
        patch.setattr(library.file_download, "http_get", functools.partial(get, _nb_retries=0))
        with pytest.raises(model_folder.CheckpointError, match="try again; it goes on where"):
            SparseLaViDa.from_pretrained("me/model")
    assert model_folder.load_model("me/model").model.final_norm is not None


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("RepoNotFound", "neither a folder me/model here nor a model of that name on the hub"),
        ("GatedRepo", "accept its licence: open https://huggingface.co/me/model"),
    ],
)
def test_what_the_hub_refuses_is_a_sentence(serve, answer, told):
    serve("me/model", answer)
    with pytest.raises(model_folder.CheckpointError, match=told):
        SparseLaViDa.from_pretrained("me/model")


def test_a_revision_that_is_not_there(serve, folder):
    serve("me/model", folder)
    with pytest.raises(model_folder.CheckpointError, match="has no such revision"):
        hub.fetch("me/model@other")


def test_what_is_not_in_the_cache_is_not_asked_for(serve, folder):
    serve("me/model", folder)
    with pytest.raises(model_folder.CheckpointError, match=r"not in the cache .* local_files_only"):
        hub.fetch("me/model", local_files_only=True)


def test_a_released_model_says_that_it_must_be_converted(serve, tmp_path):
    serve("them/LaViDa-O", torch_folder.write(tmp_path / "released"))
    told = r"once with --convert .* `sparse-lavida convert them/LaViDa-O MODEL`"
    with pytest.raises(model_folder.ReleasedError, match=told):
        SparseLaViDa.from_pretrained("them/LaViDa-O")


def test_a_released_model_is_converted_once_and_then_found_by_its_id(
    serve, folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stand_in.write(tmp_path / "released", stand_in.tiny_settings())
    serve("them/LaViDa-O", tmp_path / "released")
    pipe = SparseLaViDa.from_pretrained("them/LaViDa-O", convert=True)
    ours = model_folder.load_model(folder).model.final_norm.weight[...]
    np.testing.assert_array_equal(pipe.model.final_norm.weight[...], ours)
    place = model_folder.find_model("them/LaViDa-O")
    assert place == tmp_path / f"cache/sparse-lavida-jax-models/them--LaViDa-O-{COMMIT[:12]}"
    assert "# Converted from them/LaViDa-O\n" in (place / "README.md").read_text()
    assert "\nbase_model: them/LaViDa-O\n" in cards.card(place, "me/mine")
    (tmp_path / "released" / "model-00001-of-00001.safetensors").unlink()
    from_torch.convert_from_hub("them/LaViDa-O")  # nothing is left to do
    assert main.main(["main", "--mode=verify", "--src=them/LaViDa-O"]) == 0


def test_a_released_model_is_converted_into_a_folder_by_its_id(serve, folder, tmp_path):
    stand_in.write(tmp_path / "released", stand_in.tiny_settings())
    serve("them/LaViDa-O", tmp_path / "released")
    words = ["--mode=convert", "--src=them/LaViDa-O@main", "--dst=model"]
    assert main.main(["main", *words]) == 0
    digests = (each / "TENSORS.sha256" for each in (tmp_path / "model", folder))
    assert len({each.read_text() for each in digests}) == 1
    # A model that needs no conversion stays unchanged; local folders are converted by name.
    from_torch.convert_from_hub(folder)
    with pytest.raises(model_folder.ReleasedError, match="is a PyTorch folder"):
        from_torch.convert_from_hub(tmp_path / "released")


def test_an_id_stands_for_a_model_in_every_mode(serve, folder, capsys):
    serve("me/model", folder)
    words = ["--mode=export", "--src=me/model", "--dst=copy", "--format=orbax"]
    assert main.main(["main", *words]) == 0
    assert model_folder.find_model("copy").name == "copy"
    _, settings = main.parse(["main", "--mode=evaluate", "--checkpoint=me/model@main"])
    assert settings.name == "eval_lavida-o"
    assert main.main(["main", "--mode=verify", "--src=me/nothing"]) == 2
    assert "neither a folder me/nothing here nor a model" in capsys.readouterr().err


def test_a_path_of_a_folder_that_is_here_is_no_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert not hub.is_id("runs/mine")
    assert not hub.is_id("scenes")
    assert not hub.is_id("/runs/mine")
    assert hub.is_id("me/model")
    assert hub.is_id("me/model@v1.0")


def test_a_card_calls_free_only_what_says_so(folder, tmp_path):
    copied = tmp_path / "own"
    said = "# own\n\nWhat may be done with it is for those to say whom they belong to."
    model_folder.copy("scenes", copied, readme=said)
    (copied / "words.txt").write_text("dragon\n")
    card = cards.card(copied, "me/own")
    assert "\nlicense: other\n" in card
    assert 'generate "what to draw"' in card
    assert "base_model" not in card
    scored = cards.card(copied, "me/own", "| table |")
    assert "\n## Scores\n\n| table |\n" in scored


def test_a_card_says_what_a_model_of_a_small_world_knows(tmp_path):
    copied = tmp_path / "art"
    model_folder.copy("scenes", copied)
    settings = json.loads((copied / "config.json").read_text())
    settings["prompts"] = settings["data"]["source"] = "art"
    (copied / "config.json").write_text(json.dumps(settings))
    assert "small and large circles" in cards.card(model_folder.find_model("scenes"), "scenes")
    card = cards.card(copied, "me/art")
    assert "It knows 120 things" in card
    assert 'generate "a lion and a camera in twemoji style" --checkpoint=me/art\n' in card
    assert "\n$ sparse-lavida evaluate me/art\n" in card


def test_a_loaded_model_is_saved_and_pushed_with_a_card(folder, tmp_path, monkeypatch):
    pipe, pushed = SparseLaViDa.from_pretrained(folder), {}
    pipe.save_pretrained(tmp_path / "saved")
    model_folder.load_model(tmp_path / "saved")

    class Api:
        def __init__(self, **_):
            pass

        def create_repo(self, name, **how):
            pushed[name] = how

        def upload_folder(self, *, repo_id, folder_path):
            shutil.copytree(folder_path, tmp_path / "pushed")
            return f"https://hub/{repo_id}"

    monkeypatch.setattr(library, "HfApi", Api)
    assert pipe.push_to_hub("me/mine", private=True) == "https://hub/me/mine"
    assert pushed == {"me/mine": {"private": True, "exist_ok": True}}
    model_folder.load_model(tmp_path / "pushed")
    card = (tmp_path / "pushed" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: sparse-lavida-jax\npipeline_tag: any-to-any\n")
    assert "license: other\n" in card
    assert 'from_pretrained("me/mine")' in card
    assert "$ sparse-lavida evaluate" not in card  # its benchmarks need files
    assert '"a cat on a red sofa" --checkpoint=me/mine\n' in card
    assert "It knows" not in card  # the words of a LaViDa-O are not recorded
    (tmp_path / "pushed" / "words.txt").write_text("a\nred\n")
    known = cards.card(tmp_path / "pushed", "me/mine")
    assert "## Use\n\nIt knows the 2 words of its training texts, listed in its words.txt." in known
    (tmp_path / "pushed" / "words.txt").unlink()
    assert cards.card(tmp_path / "pushed", "me/mine") == card
    pipe.source = Origin()
    with pytest.raises(model_folder.CheckpointError, match="no folder of this very model"):
        pipe.save_pretrained(tmp_path / "other")
