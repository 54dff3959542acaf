# SPDX-License-Identifier: Apache-2.0
"""The page's own interface, driven by strangers: no file but the page's is read, nothing grows."""

import base64
import concurrent.futures
import dataclasses
import http.client
import io
import json
import os
import pathlib
import threading
import time
import urllib.parse

import numpy as np
import pytest
from PIL import Image

from sparse_lavida_jax.pipeline import SparseLaViDa

gr = pytest.importorskip("gradio", reason="pip install 'sparse-lavida-jax[demo]' to test the page")
httpx = pytest.importorskip("httpx")

from serving_on_loopback import served  # noqa: E402
from starlette.exceptions import HTTPException  # noqa: E402

from sparse_lavida_jax.page import demo, page_guard  # noqa: E402
from sparse_lavida_jax.server import endpoints  # noqa: E402
from sparse_lavida_jax.server.serving import Service  # noqa: E402

SECRET = b"nobody uploaded this secret"
SECONDS = 60  # time limit of an answer; the first image includes compilation
META = {"_type": "gradio.FileData"}
SETTINGS = {"edit": [2, 0, 3, "as trained", 0], "ask": [False, 1, 3, "as trained", 0]}


def png(side=96, colour=(200, 30, 30)):
    made = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(made, "PNG")
    return made.getvalue()


class Page:
    """A client of the page that speaks as gradio's own do."""

    def __init__(self, address, guard):
        self.guard, self.page = guard, guard.page
        self.http = httpx.Client(base_url=address, timeout=SECONDS)
        self.config = self.http.get("/config").json()

    def number(self, kind, name="", input_type=None):
        """The number of an event by its api name, or by what triggers it."""
        for one in self.config["dependencies"]:
            kinds = {event for _, event in one["targets"]}
            if (name and one["api_name"] == name) or (not name and kind in kinds):
                return one["id"]
        raise LookupError((kind, name))

    def join(self, number, data, **more):
        body = {"data": data, "fn_index": number, "session_hash": "abc", "trigger_id": None}
        return self.http.post("/gradio_api/queue/join", json=body | more)

    def outcome(self, session="abc"):
        """The last event of a session's stream: whether it succeeded, and its output."""
        found = None
        url = f"/gradio_api/queue/data?session_hash={session}"
        with self.http.stream("GET", url) as stream:
            for line in stream.iter_lines():
                message = json.loads(line[6:]) if line.startswith("data: ") else {}
                if message.get("msg") == "process_completed":
                    found = message["success"], message["output"]
                if message.get("msg") == "unexpected_error":
                    found = False, message
        assert found is not None
        return found

    def done(self, number, data, **more):
        """What an event gives, refused at the door or later: (succeeded, output)."""
        answer = self.join(number, data, **more)
        assert answer.status_code < 500, answer.text
        if answer.status_code != 200:
            assert answer.json()["detail"].endswith(".")
            return False, answer.json()
        return self.outcome(more.get("session_hash", "abc"))

    def upload(self, contents, name="a.png", field="files"):
        return self.http.post("/gradio_api/upload", files={field: (name, contents)})

    def files(self):
        folder = pathlib.Path(self.guard.folder.path)
        found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        return {path: path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def page(every_task):
    pipe = SparseLaViDa.from_pretrained(every_task)
    sampling = dataclasses.replace(pipe.settings.sampling, layout=False)
    service, guards = Service(pipe.with_sampling(sampling)), []

    def make(host, port):
        app = demo.mounted(endpoints.make_app(service, (host,)), service, host, port)
        guards.extend(one.app for one in app.routes if hasattr(one, "app"))
        return app

    with served(make) as address:
        (guard,) = [one for one in guards if isinstance(one, page_guard.PageGuard)]
        yield Page(address, guard)


@pytest.fixture(autouse=True)
def quiet(page, capfd, caplog):
    """No case of this module may print anything or log a traceback but in one line of ours."""
    yield
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out
    assert {record.name for record in caplog.records if record.exc_info} <= {page_guard.__name__}
    assert page.http.get("/").status_code == 200


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret.png"
    path.write_bytes(png() + SECRET)
    return path


def foreign(page, secret):
    """Paths of files that are not the page's, of every kind."""
    folder, parent = page.guard.folder.path, secret.parent
    fifo, link = parent / "fifo", pathlib.Path(folder, "link")
    if not fifo.exists():
        os.mkfifo(fifo)
    if not link.is_symlink():
        link.symlink_to(parent)
    within = pathlib.Path(folder, "within")
    if not within.exists():
        within.mkdir()
        (within / "linked.png").symlink_to(secret)
        os.mkfifo(within / "fifo.png")
    relative = os.path.relpath(secret)
    deep = os.path.relpath(secret, f"{folder}/x")
    return [
        str(secret), relative, f"{folder}/x/{deep}", f"{folder}/../{secret.parent.name}/secret.png",
        f"{folder}/link/secret.png", f"{within}/linked.png", f"{within}/fifo.png", str(fifo),
        f"file://{secret}", f"file:{secret}", "/proc/self/environ", "/proc/self/fd/0",
        "/dev/zero", "/dev/urandom", "/dev/stdin", "/dev/full", "/etc/passwd", "~/.ssh/id_rsa",
        "~", ".", "..", "/", "", folder, f"{folder}/", f"{folder}/.", f"{folder}/x/..", "\0",
        f"{secret}\0.png", f"{folder}/x/\0", urllib.parse.quote(str(secret), safe=""),
        urllib.parse.quote(urllib.parse.quote(str(secret), safe=""), safe=""),
        f"{folder}/x/..%2f..%2f{secret.name}", f"{folder}/x/" + "a" * 10_000, "a" * 9000,
        f"{page.http.base_url}/health", "http://127.0.0.1:1/x.png", "http://169.254.169.254/x.svg",
        "https://localhost/x.svg", "//127.0.0.1/x", "\\\\host\\x", "data:image/png;base64,AAAA",
        f"{folder}//x/a.png", f"/{folder}/x/a.png", f"{folder}/x/./a.png",
    ]  # fmt: skip


def shapes(path):
    """A file as gradio may be sent one, in the ways in which it is nested."""
    plain = {"path": path, "meta": META}
    return [
        plain, {"path": path}, {**plain, "url": path}, {**plain, "is_stream": True},
        {**plain, "orig_name": "a.png", "mime_type": "image/png"}, {"x": [{"y": plain}]},
    ]  # fmt: skip


def test_no_event_takes_a_path_that_is_not_of_the_page(page, secret):
    before, numbers = page.files(), [one["id"] for one in page.config["dependencies"]]
    inputs = {one["id"]: len(one["inputs"]) for one in page.config["dependencies"]}
    for i, path in enumerate(foreign(page, secret)):
        for k, file in enumerate(shapes(path)):
            number = numbers[(i + 7 * k) % len(numbers)]
            for data in ([file] * max(inputs[number], 1), [[{"image": file, "caption": None}]]):
                answer = page.join(number, data)
                assert answer.status_code == 403, (path, answer.text)
                assert answer.json()["detail"].count(".") == 1
        editor = {"background": file, "layers": [file], "composite": file}
        asked = {name: [file, "a"] for name in ("ask", "edit", "surprise")}
        for name, data in (asked | {"inpaint": [editor, "a"]}).items():
            body = {"data": [*data, *SETTINGS.get(name, [])]}
            assert page.http.post(f"/gradio_api/call/{name}", json=body).status_code == 403
        event = {"index": 0, "value": {"path": path, "meta": META}, "selected": True}
        assert page.join(page.number("select"), [[]], event_data=event).status_code == 403
    after = page.files()
    assert not [path for path in after if SECRET in after[path]]
    assert {*before} == {*after}
    assert page.page.has_launched and not page.page._queue.event_ids_to_events


def test_no_address_serves_a_file_that_is_not_of_the_page(page, secret):
    for path in foreign(page, secret):
        for raw in {path, urllib.parse.quote(path), urllib.parse.quote(path, safe="")}:
            for form in ("/gradio_api/file={}", "/gradio_api/file/{}", "/gradio_api/proxy={}",
                         "/file={}", "/proxy={}", "/static/{}", "/assets/{}", "/svelte/{}", "/{}",
                         "/gradio_api/custom_component/gallery/client/{}", "/?deep_link={}",
                         "/config?deep_link={}", "/gradio_api/theme.css?x={}"):  # fmt: skip
                target = form.format(raw).replace("\0", "%00").replace(" ", "%20")
                if len(target) > 20_000 or not target.isascii():
                    continue
                status, body = raw_get(page, target)
                assert SECRET not in body and b"root:x:" not in body and b"PATH=/" not in body
                assert status in (400, 403, 404) or (status == 200 and "/?" in target) or (
                    status == 200 and target.split("?")[0].rstrip("/.") in ("", "/config")
                ), (target, status)  # fmt: skip


def raw_get(page, target, method="GET", headers=None):
    """Sends an address as it stands; httpx would tidy it up."""
    link = http.client.HTTPConnection(page.http.base_url.host, page.http.base_url.port, timeout=20)
    link.putrequest(method, target, skip_accept_encoding=True)
    for name, value in (headers or {}).items():
        link.putheader(name, value)
    link.endheaders()
    answer = link.getresponse()
    body = answer.read()
    link.close()
    return answer.status, body


@pytest.mark.parametrize(
    "address",
    [
        "GET /gradio_api/runs", "POST /gradio_api/run-history/connect", "GET /gradio_api/token",
        "GET /gradio_api/user", "GET /gradio_api/dev/reload", "POST /login", "GET /logout",
        "GET /gradio_api/deep_link?session_hash=abc", "GET /gradio_api/openapi.json",
        "GET /monitoring", "GET /monitoring/summary", "GET /monitoring/x", "GET /pwa_icon/99999",
        "POST /gradio_api/vibe-edit", "POST /gradio_api/undo-vibe-edit", "GET /gradio_api/vibe-x",
        "POST /gradio_api/process_recording", "POST /gradio_api/stream/x",
        "POST /gradio_api/stream/x/close", "GET /gradio_api/stream/a/b/1/playlist-file",
        "GET /gradio_api/mcp", "POST /gradio_api/mcp/", "POST /gradio_api/run/ask",
        "POST /gradio_api/api/ask", "POST /gradio_api/call/v2/ask",
        "GET /gradio_api/startup-events",
        "GET /gradio_api/custom_component/gallery/client/component/style.css",
        "GET /gradio_api/queue/status", "DELETE /", "PUT /gradio_api/upload", "TRACE /config",
        "GET /static", "GET /assets/", "GET /assets/..", "GET /assets/%00", "GET /static/%2e%2e/a",
        "GET /assets/" + "a" * 600,
    ],
)  # fmt: skip
def test_what_the_page_does_not_need_is_refused(page, address):
    method, target = address.split()
    status, body = raw_get(page, target, method)
    assert status == 404 and json.loads(body)["detail"].endswith(".")


def test_what_is_uploaded_is_used_and_served(page):
    contents = png()
    (path,) = page.upload(contents, "mine.png").json()
    served = page.http.get(f"/gradio_api/file={path}", headers={"Range": "bytes=1-2-3"})
    assert served.content == contents and served.headers["content-type"] == "image/png"
    ok, output = page.done(
        page.number("", "edit"), [{"path": path, "meta": META}, "a red circle", *SETTINGS["edit"]]
    )
    assert ok, output
    image = output["data"][0]
    assert page.http.get(urllib.parse.urlsplit(image["url"]).path).content[:4] == b"\x89PNG"
    # As the browser does: into the gallery, and from there to every tab.
    event = {"index": 0, "value": None, "selected": True}
    ok, output = page.done(
        page.number("select"), [[{"image": image, "caption": None}]], event_data=event
    )
    assert ok and all(one["path"] == image["path"] for one in output["data"])
    answer = page.http.post(
        "/gradio_api/call/ask", json={"data": [image, "what is it?", *SETTINGS["ask"]]}
    )
    found = page.http.get(f"/gradio_api/call/ask/{answer.json()['event_id']}").text
    assert "event: complete" in found


@pytest.mark.parametrize(
    "name",
    ["../../x", "..", ".", "", "a\0b.png", "a" * 7000 + ".png", "a" * 10_000 + ".png", "CON",
     "a/b\\c.png", "\u202ea.png", "x.html", "x.svg", ".env"],
)  # fmt: skip
def test_names_of_uploads_lead_nowhere(page, name):
    part = f'Content-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
    body = b"--x\r\n" + part + b"<script>\r\n--x--\r\n"
    answer = page.http.post(
        "/gradio_api/upload", content=body,
        headers={"Content-Type": "multipart/form-data; boundary=x"},
    )  # fmt: skip
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 200:
        (path,) = answer.json()
        assert page.guard.folder.has(path) and len(os.path.basename(path)) < 120
        shown = page.http.get(f"/gradio_api/file={path}")
        assert shown.status_code == 200 and shown.content == b"<script>"
        kind = shown.headers["content-type"]
        assert kind in ("image/png", "application/octet-stream")
        assert "nosniff" in shown.headers["x-content-type-options"]


def test_uploads_that_are_none_are_refused(page):
    before = set(page.files())
    post = page.http.post
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    cases = [
        post("/gradio_api/upload"),
        post("/gradio_api/upload", files={"other": b"x"}),
        post("/gradio_api/upload", data={"files": "x"}),
        post("/gradio_api/upload", files=[("files", b"x")] * 5),
        post("/gradio_api/upload", files=[("files", b"x")], data={"a": "b"}),
        post("/gradio_api/upload", content=b"x", headers=form),
        post("/gradio_api/upload", content=b"--x\r\n\r\n\r\n--x--", headers=form),
        post("/gradio_api/upload", content=b"x", headers={"Content-Type": "multipart/form-data"}),
        post("/gradio_api/upload", json={"files": []}),
        post("/gradio_api/upload", content=iter([b"x"]), headers=form),
    ]
    for charset in ("punycode", "undefined", "utf-16", "idna"):
        wrong = {"Content-Type": f"multipart/form-data; boundary=x; charset={charset}"}
        cases.append(post("/gradio_api/upload", content=b"--x--", headers=wrong))
    cases.append(page.upload(b"x" * (page.guard.upload + 1)))
    assert {one.status_code for one in cases} <= {400, 411, 413}
    assert all(one.json()["detail"].endswith(".") for one in cases)
    assert set(page.files()) == before


def test_the_oldest_uploads_of_a_client_go_first_and_others_keep_theirs(monkeypatch):
    monkeypatch.setattr(page_guard, "LEAST_UPLOAD", 1)
    gone, shares = [], page_guard.Shares(most=100, share=40)
    for i, client in enumerate("aab"):
        with shares.room(client, 20):
            shares.keep(str(i), client, 20, lambda: True, lambda i=i: gone.append(i))
    with shares.room("a", 10):
        assert gone == [0]
        with pytest.raises(HTTPException) as refused, shares.room("a", 35):
            pass
        assert refused.value.status_code == 429
    with pytest.raises(HTTPException) as refused, shares.room("a", 41):
        pass
    assert refused.value.status_code == 413
    with shares.room("c", 40), pytest.raises(HTTPException) as refused, shares.room("d", 40):
        pass
    assert refused.value.status_code == 503
    with shares.room("d", 40):
        pass


def test_uploads_without_end_keep_a_bounded_number_of_bytes(page, monkeypatch):
    monkeypatch.setattr(page.guard.shares, "share", 2**20)
    for _ in range(12):
        assert page.upload(np.random.default_rng(0).bytes(2**18)).status_code == 200
    assert sum(map(len, page.files().values())) < 2**20 + 2**19
    monkeypatch.setattr(page.guard.shares, "most", 0)
    assert page.upload(b"x").status_code == 503


def test_of_the_images_that_the_page_made_the_oldest_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(page_guard, "MOST_MADE", 3)
    folder = page_guard.Folder(str(tmp_path / "base"))
    first = folder.write("first.png", b"0")
    folder.keep()
    uploaded = folder.write("up.png", b"0")
    made = [folder.write(f"{i}.png", b"0") for i in range(5)]
    for i, path in enumerate([first, uploaded, *made]):
        os.utime(path, (i, i))
    folder.sweep(frozenset([uploaded]))
    left = [path for path in [first, uploaded, *made] if os.path.exists(path)]
    assert left == [first, uploaded, *made[2:]]
    assert all(folder.has(path) for path in made)  # one that is gone is no other file


DEEP = "[" * 90_000 + "]" * 90_000


@pytest.mark.parametrize(
    "body",
    [
        "", "x", "[]", "null", DEEP, '{"data": ' + DEEP + "}", "{" * 9000, '"\\ud800"',
        '{"data": ["\\ud800"], "fn_index": 0, "session_hash": "s"}',
        '{"data": {}, "fn_index": 0, "session_hash": "s"}',
        '{"data": [], "fn_index": 99999, "session_hash": "s"}',
        '{"data": [], "fn_index": ' + "9" * 5000 + ', "session_hash": "s"}',
        '{"data": [], "fn_index": "0", "session_hash": "s"}',
        '{"data": [], "fn_index": true, "session_hash": "s"}',
        '{"data": [], "fn_index": null, "session_hash": "s"}',
        '{"data": [], "fn_index": 0, "session_hash": null}',
        '{"data": [], "fn_index": 0, "session_hash": "../x"}',
        '{"data": [], "fn_index": 0, "session_hash": "' + "a" * 500 + '"}',
        '{"data": [], "fn_index": 0, "session_hash": ["s"]}',
        '{"data": [], "fn_index": 0, "session_hash": "s", "trigger_id": {}}',
        '{"data": [], "fn_index": 0, "session_hash": "s", "event_data": [1]}',
        '{"data": [], "fn_index": 0, "session_hash": "s", "event_id": 7}',
    ],
)  # fmt: skip
def test_an_event_that_is_none_is_refused_in_a_sentence(page, body):
    headers = {"Content-Type": "application/json"}
    for address in ("queue/join", "cancel", "call/ask", "call/nothing"):
        answer = page.http.post(f"/gradio_api/{address}", content=body, headers=headers)
        assert 200 <= answer.status_code < 500
        assert len(answer.text) < 300
    for kind in ("text/plain", "application/json; charset=utf-16", ""):
        headers = {"Content-Type": kind}
        answer = page.http.post("/gradio_api/queue/join", content=body, headers=headers)
        assert answer.status_code == 415


def test_an_event_has_a_bounded_number_of_bytes(page):
    answer = page.join(0, ["a" * 500_000])
    assert answer.status_code == 413 and "use fewer words" in answer.json()["detail"]


VALUES = [None, "x", "\0", -1, 10**30, [[]], {"a": 1}, True]
MORE = ["", "a" * 9000, 1e308, [], {}, [None, None], "hexagon"]


@pytest.mark.parametrize("values", [VALUES, pytest.param(MORE, marks=pytest.mark.slow)])
def test_values_of_every_kind_end_in_a_sentence(page, values):
    (path,) = page.upload(png()).json()
    image = {"path": path, "meta": META}
    data = [image, "a", *SETTINGS["ask"]]
    for value in [*values, image]:
        for i in range(len(data)):
            ok, output = page.done(page.number("", "ask"), [*data[:i], value, *data[i + 1 :]])
            assert ok or len(str(output)) < 20_000
    number = page.number("", "surprise")
    for given in [*([value, "a"] for value in values), *([image, value] for value in values)]:
        ok, output = page.done(number, given)
        assert ok or len(str(output)) < 20_000
    for one in page.config["dependencies"]:
        if one["api_name"] not in demo.TABS:
            for value in values[:3]:
                page.done(one["id"], [value] * len(one["inputs"]), event_data={"index": value})
            page.done(one["id"], [])


def test_captions_are_measured_and_nine_are_refused(page):
    (path,) = page.upload(png()).json()
    number, image = page.number("", "surprise"), {"path": path, "meta": META}
    ok, output = page.done(number, [image, "a red circle\ntwo blue squares"])
    lit, note, ranking = output["data"]
    assert ok and page.guard.folder.has(lit["path"])
    assert "nothing drawn" in note and ranking.count("<figure>") == 2
    for words, told in (
        ("a\n" * 9, "9 captions were sent"),
        ("", "0 captions"),
        ("a" * 5000, "5000"),
    ):
        ok, output = page.done(number, [image, words])
        assert not ok and told in output["error"]


def test_not_a_number_is_refused(page):
    (path,) = page.upload(png()).json()
    nan, huge = float("nan"), float("inf")
    data = [{"path": path, "meta": META}, "a", nan, huge, -huge, "as trained", nan]
    number = page.number("", "edit")
    body = json.dumps({"data": data, "fn_index": number, "session_hash": "nan"})
    headers = {"Content-Type": "application/json"}
    answer = page.http.post("/gradio_api/queue/join", content=body, headers=headers)
    assert answer.status_code in (200, 400)
    if answer.status_code == 200:
        assert not page.outcome("nan")[0]


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        (["2", 0.0, None, "as trained", None], ""),
        ([2.0, None, 3, None, "7"], ""),
        (["x", 0, 3, "as trained", 0], "Steps: 'x' is not a number"),
        ([2, 0, 3, "as trained", [7]], "Seed: '[7]' is not a number"),
        ([2, float("nan"), 3, "as trained", 0], "Guidance: 'nan' is not a number"),
        ([2, 0, 3, "as trained", 2**64], "greater than maximum value"),
    ],
)
def test_an_empty_field_is_left_out_and_no_number_is_refused_in_a_sentence(page, numbers, told):
    (path,) = page.upload(png()).json()
    file, number = {"path": path, "meta": META}, page.number("", "edit")
    body = json.dumps({"data": [file, "a", *numbers], "fn_index": number, "session_hash": "none"})
    headers = {"Content-Type": "application/json"}
    answer = page.http.post("/gradio_api/queue/join", content=body, headers=headers)
    ok, output = page.outcome("none") if answer.status_code == 200 else (False, answer.json())
    assert (ok, told in str(output)) == (not told, True), output


def test_words_may_be_null_and_layers_of_two_sizes_are_reported(page):
    (path,) = page.upload(png()).json()
    file = {"path": path, "meta": META}
    ok, output = page.done(page.number("", "ask"), [file, None, *SETTINGS["ask"]])
    assert not ok and "the prompt is empty" in str(output)
    layers = []
    for side in (96, 48):
        layer = io.BytesIO()
        Image.new("RGBA", (side, side), (255, 0, 0, 255)).save(layer, "PNG")
        layers.append({"path": page.upload(layer.getvalue()).json()[0], "meta": META})
    editor = {"background": file, "layers": layers, "composite": None}
    ok, output = page.done(page.number("", "inpaint"), [editor, "a", *SETTINGS["edit"]])
    assert not ok and "the layers differ in size" in str(output)


def test_a_painted_image_is_held_to_the_same_limits(page, monkeypatch):
    (editor,) = [one["id"] for one in page.config["components"] if one["type"] == "imageeditor"]
    store = page.page.blocks[editor].blob_storage

    def send(contents=b"x", **fields):
        given = {"component_id": str(editor), "session_hash": "abc", "fn_name": "accept_blobs",
                 "type": "layer", "index": "0", "id": "k"} | fields  # fmt: skip
        return page.http.post(
            "/gradio_api/component_server", data=given, files={"file": ("blob", contents)}
        )

    for wrong in ({"index": "9" * 9}, {"index": "-1"}, {"index": "x"}, {"type": "x"},
                  {"id": "a" * 99}, {"component_id": "999"}, {"component_id": "x"},
                  {"component_id": "9" * 5000}, {"component_id": "0"}):  # fmt: skip
        assert send(**wrong).status_code == 400, wrong
    assert not store
    monkeypatch.setattr(page.guard.shares, "share", 2**20)
    for i in range(20):
        assert send(bytes(2**18), id=f"i{i}").status_code == 200
    assert 0 < len(store) <= 4
    inpaint = page.number("", "inpaint")
    rest = ["two circles", *SETTINGS["edit"]]
    payload = {"background": None, "layers": [], "composite": None}
    ok, output = page.done(inpaint, [payload | {"id": "i19"}, *rest])
    assert not ok and "give one" not in str(output)
    layer = io.BytesIO()
    painted = np.zeros((96, 96, 4), np.uint8)
    painted[20:40, 20:40] = 255
    Image.fromarray(painted).save(layer, "PNG")
    assert send(layer.getvalue(), id="good").status_code == 200
    assert send(png(), id="good", type="background", index="null").status_code == 200
    ok, output = page.done(inpaint, [payload | {"id": "good"}, *rest])
    assert ok, output
    (path,) = page.upload(png()).json()
    many = payload | {"background": {"path": path}, "layers": [{"path": path}] * 1000}
    ok, output = page.done(inpaint, [many, *rest])
    assert not ok and "layers" in str(output)


def test_a_client_has_a_bounded_number_of_events_and_sessions(page, monkeypatch):
    monkeypatch.setattr(page_guard, "SESSIONS_OF_ONE", 8)
    monkeypatch.setattr(page_guard, "UNREAD_SECONDS", 0.2)
    time.sleep(0.3)
    number = page.number("select")
    codes = [page.join(number, [[]], session_hash=f"many{i}").status_code for i in range(40)]
    assert 429 in codes or len(page.guard._sessions) <= 8
    time.sleep(0.5)
    assert page.done(number, [[]])[0] is False
    assert len(page.guard._sessions) <= 2
    assert len(page.page._queue.pending_messages_per_session) <= 2


def test_a_stream_of_nothing_is_quiet(page):
    for target in ("queue/data", "queue/data?session_hash=unknown", "call/ask/unknown",
                   "queue/data?session_hash=" + "a" * 9000, "queue/data?session_hash=%00",
                   "upload_progress?upload_id=x", "upload_progress"):  # fmt: skip
        status, body = raw_get(page, f"/gradio_api/{target}")
        assert status in (200, 404, 422) and len(body) < 500


@pytest.mark.parametrize("name", ["Host", "X-Forwarded-Host"])
def test_a_host_that_is_none_is_refused(page, name):
    link = http.client.HTTPConnection(page.http.base_url.host, page.http.base_url.port)
    for value in ("[", "a b", "a/b?c", "a:b", "\xff", "a" * 5000):
        link.putrequest("GET", "/config", skip_host=name == "Host")
        link.putheader(name, value)
        link.endheaders()
        answer = link.getresponse()
        answer.read()
        assert answer.status in (400, 404), value
    link.close()


def test_few_images_are_decoded_at_a_time_and_none_on_the_loop(page, monkeypatch):
    running, most, threads, lock = [0], [0], set(), threading.Lock()
    service_image = demo.Service.image

    def slowly(self, *given):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            threads.add(threading.current_thread().name)
        time.sleep(0.2)
        with lock:
            running[0] -= 1
        return service_image(self, *given)

    monkeypatch.setattr(demo.Service, "image", slowly)
    (path,) = page.upload(png()).json()
    data = [{"path": path}, "a", *SETTINGS["ask"]]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        done = [pool.submit(page.done, page.number("", "ask"), data, session_hash=f"t{i}")
                for i in range(6)]  # fmt: skip
        assert all(one.result()[0] for one in done)
    assert most[0] == 1
    assert all("AnyIO worker" in name for name in threads)


def test_svg_and_links_in_events_are_not_fetched(page):
    data = f"data:image/svg+xml;base64,{base64.b64encode(b'<svg/>').decode()}"
    for url in ("http://127.0.0.1:1/x.svg", data, "file:///etc/passwd"):
        for file in ({"url": url, "meta": META}, {"url": url}, {"path": None, "url": url}):
            ok, _ = page.done(
                page.number("select"), [[{"image": file, "caption": None}]],
                event_data={"index": 0, "value": None, "selected": True},
            )  # fmt: skip
            assert not ok
