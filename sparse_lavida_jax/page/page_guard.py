# SPDX-License-Identifier: Apache-2.0
"""What visitors of the page may send, and how much of it: addresses, events, files and streams.

gradio has more addresses than the page needs, keeps what it is sent for as long as it runs, and
opens files by the paths that events name. `PageGuard` stands before it: it lets in the addresses of
a short list, takes uploads itself, and rebuilds every event from checked parts, so that no path but
that of a file in the page's own folder arrives.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import json
import logging
import mimetypes
import os
import pathlib
import re
import secrets
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import Annotated, Any

import gradio as gr
import pydantic
from gradio.components.image_editor import EditorDataBlobs
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparse_lavida_jax.data.files import parse_json
from sparse_lavida_jax.server.openai.guards import client_of

log = logging.getLogger(__name__)

UPLOADED, UPLOADED_BY_ONE = 2**28, 2**26  # bytes kept or under way: of all clients, of one
LEAST_UPLOAD = 2**16  # bytes that a file is counted as, at least
MADE = 2**28  # bytes of images that the page has made, and
MOST_MADE = 2048  # their number
SWEEP_SECONDS = 5.0  # between looks at what the page has made
MOST_FILES = 4  # in one upload
MOST_LAYERS = 4  # of a painted image
MOST_JSON = 2**18  # bytes in the body of an event
EVENTS, EVENTS_OF_ONE = 128, 8  # that wait or run: of all clients, of one
SESSIONS, SESSIONS_OF_ONE = 512, 64  # open pages
UNREAD_SECONDS = 60.0  # for which a session without a stream is kept
LONGEST_ADDRESS = 512
IMAGES = ("image/png", "image/jpeg", "image/webp", "image/gif")  # that browsers may show in place

_API = "/gradio_api/"
_READS = re.compile(
    r"/|/config/?|/theme\.css|/favicon\.ico|/manifest\.json|/robots\.txt|/gradio_api/info/?"
    r"|/(static|assets)/[\w@+-]+([./][\w@+-]+)*",
    re.ASCII,
)
_STREAMS = re.compile(
    r"/gradio_api/(?:queue/data|heartbeat/[\w-]{1,64}|call/\w{1,64}/([\w-]{1,64}))", re.ASCII
)
_EVENTS = re.compile(r"/gradio_api/(queue/join|call/(\w{1,64})/?|cancel|reset)", re.ASCII)
_INSIDE = re.compile(r"[\w-]+/[\w-][\w.-]{0,200}", re.ASCII)
_WORD = re.compile(r"[\w-]{1,64}", re.ASCII)
_HOST = re.compile(r"[\w.-]{1,255}(:\d{1,5})?|\[[0-9a-fA-F:.]{2,45}\](:\d{1,5})?", re.ASCII)
_DROPPED = (b"range", b"x-forwarded-proto")  # uvicorn has read the second, if a proxy may send it
_NOT_OURS = "there is no such address on this page."


class Folder:
    """The folder of the page: what visitors upload, and the images that gradio writes.

    Attributes:
        path: absolute, without links; files are at `path`/FOLDER/NAME. It is deleted at exit.
    """

    def __init__(self, base: str | None = None):
        if base is not None:
            os.makedirs(base, exist_ok=True)
        self._held = tempfile.TemporaryDirectory("", "sparse-lavida-", base, True)
        self.path = os.path.realpath(self._held.name)
        self._kept: set[str] = set()

    def keep(self) -> None:
        """Never deletes what is there now, the images that the page starts with."""
        self._kept = {path for _, _, path in self._files()}

    def has(self, path: Any) -> bool:
        """Returns whether a path is that of a file in the folder, or of one that is deleted.

        Nothing outside of the folder is looked at.
        """
        if not isinstance(path, str) or not path.startswith(self.path + os.sep):
            return False
        if not _INSIDE.fullmatch(path[len(self.path) + 1 :]):
            return False
        try:
            folder, file = os.lstat(os.path.dirname(path)), os.lstat(path)
            return stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(file.st_mode)
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def write(self, name: str, contents: bytes) -> str:
        """Writes a file at a path that nobody can guess, and returns the path."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", name.replace("\\", "/").rpartition("/")[2])[-100:]
        name = name.lstrip(".") or "file"
        if mimetypes.guess_type(name)[0] not in IMAGES:
            name += ".bin"
        folder = pathlib.Path(self.path, secrets.token_hex(16))
        folder.mkdir(parents=True)
        (folder / name).write_bytes(contents)
        return str(folder / name)

    def delete(self, path: str) -> None:
        """Deletes a file, if it is still there."""
        with contextlib.suppress(OSError):
            os.unlink(path)
            os.rmdir(os.path.dirname(path))

    def sweep(self, uploads: Collection[str]) -> None:
        """Deletes the oldest of the images that the page has made, beyond `MADE` and `MOST_MADE`.

        Args:
            uploads: paths of what visitors uploaded, which are counted elsewhere.
        """
        number = size = 0
        for _, more, path in sorted(self._files(), reverse=True):
            if path in self._kept or path in uploads:
                continue
            number, size = number + 1, size + more
            if number > MOST_MADE or size > MADE:
                self.delete(path)

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yields the time, size and path of each file."""
        for folder in pathlib.Path(self.path).iterdir():
            with contextlib.suppress(OSError):
                for path in folder.iterdir():
                    found = path.lstat()
                    yield found.st_mtime, found.st_size, str(path)


@dataclasses.dataclass
class _Upload:
    """Something that a client has sent: its bytes, and how to look for it and to delete it."""

    client: str
    size: int
    exists: Callable[[], bool]
    delete: Callable[[], Any]


class Shares:
    """What is kept for clients; each has at most a share of all bytes, and its oldest go first."""

    def __init__(self, most: int = UPLOADED, share: int = UPLOADED_BY_ONE):
        self.most, self.share = most, share
        self.kept: dict[str, _Upload] = {}
        self._coming: collections.Counter[str] = collections.Counter()

    def keep(
        self, key: str, client: str, size: int, exists: Callable[[], bool], delete: Callable
    ) -> None:
        """Counts what has arrived, anything small as `LEAST_UPLOAD`: their number is bounded."""
        self.kept[key] = _Upload(client, max(size, LEAST_UPLOAD), exists, delete)

    @contextlib.contextmanager
    def room(self, client: str, size: int) -> Iterator[None]:
        """Holds room for what is on its way, and deletes the client's oldest if it needs to.

        Raises:
            HTTPException: 413: it is more than a share; 429, 503: too much is on its way.
        """
        self.kept = {key: one for key, one in self.kept.items() if one.exists()}
        if size > self.share:
            most = f"at most {self.share} are taken. Make it smaller."
            raise HTTPException(413, f"the upload has {size} bytes: {most}")
        if self._coming[client] + size > self.share:
            raise HTTPException(429, "you upload too much at once: wait until the rest has come.")
        own = [key for key, one in self.kept.items() if one.client == client]
        while own and sum(self.kept[key].size for key in own) + self._coming[client] + size > (
            self.share
        ):
            self.kept.pop(own.pop(0)).delete()
        if self._coming.total() + sum(one.size for one in self.kept.values()) + size > self.most:
            raise HTTPException(503, "the page keeps no more uploads for now: try again later.")
        self._coming[client] += size
        try:
            yield
        finally:
            self._coming[client] -= size
            self._coming += collections.Counter()  # drops clients that send nothing


_Name = Annotated[str, pydantic.Field(pattern="^[A-Za-z0-9_-]{1,64}$")]


class _Event(pydantic.BaseModel):
    """What gradio reads of an event; all else is dropped."""

    model_config = pydantic.ConfigDict(strict=True)
    fn_index: int | None = None
    trigger_id: int | None = None
    session_hash: _Name | None = None
    event_id: _Name = "none"
    data: list[Any] = []
    event_data: dict[str, Any] | None = None


@dataclasses.dataclass
class _Session:
    """An open page: the address of its client, its open streams, and when it was last heard of."""

    client: str
    streams: int = 0
    seen: float = dataclasses.field(default_factory=time.monotonic)


class PageGuard:
    """Stands before gradio's app, and lets in what the page needs.

    Args:
        app: gradio's.
        page: its events are made to fail in one sentence, too.
        upload: bytes in a file.
    """

    def __init__(self, app: ASGIApp, page: gr.Blocks, folder: Folder, upload: int):
        self.app, self.page, self.folder, self.upload = app, page, folder, upload
        self.shares = Shares()
        self._swept = 0.0
        self._sessions: dict[str, _Session] = {}
        self._process = page.process_api
        page.process_api = self._processed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            return await self._let_in(scope, receive, watched)
        except HTTPException as error:
            refusal = error
        except (ClientDisconnect, TimeoutError):
            return  # nobody waits for an answer
        except Exception as error:
            if not isinstance(error.__cause__, HTTPException):  # as for a session that has ended
                log.error("the page failed: %s", type(error).__name__, exc_info=error)
            refusal = HTTPException(500, f"an error of the program: {type(error).__name__}.")
            if isinstance(error, OSError):
                refusal = HTTPException(503, "the page cannot write files now: try again later.")
        if began:  # a stream ends here
            return await send({"type": "http.response.body"})
        await JSONResponse({"detail": refusal.detail}, refusal.status_code)(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path, headers = scope["method"], scope["path"], Headers(scope=scope)
        client = client_of(scope.get("client"))
        hosts = (headers.get(name, "a") for name in ("host", "x-forwarded-host"))
        if not all(map(_HOST.fullmatch, hosts)):
            raise HTTPException(400, "the host in the header is not the name of one.")
        sent = Request(scope, receive)
        # What is asked for after a "?" is gradio's business only in streams; parts of files, never.
        own = [(name, value) for name, value in scope["headers"] if name not in _DROPPED]
        scope = {**scope, "headers": own, "query_string": b""}
        if method in ("GET", "HEAD"):
            if path.startswith(f"{_API}file="):
                return await self._file(path.removeprefix(f"{_API}file="))(scope, receive, send)
            if path == f"{_API}upload_progress":
                return await Response(media_type="text/event-stream")(scope, receive, send)
            if found := _STREAMS.fullmatch(path):
                session = self._session_of(found[1], sent.query_params.get("session_hash"))
                scope["query_string"] = f"session_hash={session}".encode()
                async with self._stream(session):
                    return await self.app(scope, receive, send)
            if len(path) <= LONGEST_ADDRESS and _READS.fullmatch(path):
                return await self.app(scope, receive, send)
        elif method == "POST":
            if path in (f"{_API}upload", f"{_API}upload/"):
                return await JSONResponse(await self._uploaded(sent, client))(scope, receive, send)
            if path in (f"{_API}component_server", f"{_API}component_server/"):
                await self._painted(sent, client)
                return await JSONResponse(None)(scope, receive, send)
            if found := _EVENTS.fullmatch(path):
                body = await _json_of(sent)
                event = await asyncio.to_thread(self._event, body, found[1], found[2])
                if found[1].startswith(("queue", "call")):
                    await self._join(client, event["session_hash"])
                return await self.app(*_replayed(scope, receive, event), send)
        raise HTTPException(404, _NOT_OURS)

    # Files.

    def _file(self, path: str) -> Response:
        if not (self.folder.has(path) and os.path.isfile(path)):
            raise HTTPException(404, "there is no such file on this page.")
        kind = mimetypes.guess_type(path)[0]
        shown = kind if kind in IMAGES else None
        return FileResponse(
            path,
            media_type=shown or "application/octet-stream",
            filename=os.path.basename(path),
            content_disposition_type="inline" if shown else "attachment",
            headers={"X-Content-Type-Options": "nosniff"},
        )

    async def _uploaded(self, request: Request, client: str) -> list[str]:
        """Keeps the files of an upload, and returns their paths."""
        async with self._form(request, client, MOST_FILES) as form:
            found = form.getlist("files")
            files = [one for one in found if isinstance(one, UploadFile)]
            if not files or len(files) != len(form.multi_items()):
                raise HTTPException(400, "an upload is of one or more files in the field 'files'.")
            paths = []
            for file in files:
                contents = await self._contents(file)
                path = await asyncio.to_thread(self.folder.write, file.filename or "", contents)
                exists = functools.partial(os.path.exists, path)
                delete = functools.partial(self.folder.delete, path)
                self.shares.keep(path, client, len(contents), exists, delete)
                paths.append(path)
        self.page.upload_file_set.update(paths)  # from which gradio deletes what is old
        return paths

    async def _painted(self, request: Request, client: str) -> None:
        """Keeps a part of a painted image until its event reads it (`ImageEditor.accept_blobs`)."""
        async with self._form(request, client, 1) as form:
            fields = {name: one for name, one in form.multi_items() if isinstance(one, str)}
            files = [one for one in form.values() if isinstance(one, UploadFile)]
            component, index = (fields.get(name, "") for name in ("component_id", "index"))
            block = self.page.blocks.get(int(component)) if _is_number(component) else None
            kind, key = fields.get("type"), fields.get("id", "")
            layer = int(index) if kind == "layer" and _is_number(index) else MOST_LAYERS
            is_part = kind in ("background", "composite") or layer < MOST_LAYERS
            if not (isinstance(block, gr.ImageEditor) and files and is_part and len(key) < 64):
                raise HTTPException(400, "this is not a part of a painted image.")
            contents = await self._contents(files[0])
        held = block.blob_storage
        whole = held.setdefault(key, EditorDataBlobs(background=None, layers=[], composite=None))
        if layer < MOST_LAYERS:
            whole.layers.extend([None] * (layer + 1 - len(whole.layers)))
            whole.layers[layer] = contents
        elif kind == "background":
            whole.background = contents
        size = len(whole.background or b"") + sum(len(layer or b"") for layer in whole.layers)
        exists, delete = (lambda: key in held), (lambda: held.pop(key, None))
        self.shares.keep(f"painted {key}", client, size, exists, delete)

    @contextlib.asynccontextmanager
    async def _form(self, request: Request, client: str, files: int) -> AsyncIterator[Any]:
        """Yields a form, as long as there is room for all of it."""
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data" or options.get(b"charset", b"utf-8").lower() != b"utf-8":
            raise HTTPException(400, "an upload is multipart/form-data, in UTF-8.")
        length = request.headers.get("content-length", "")
        if not _is_number(length):
            raise HTTPException(411, "an upload says how long it is: send Content-Length.")
        with self.shares.room(client, int(length)):
            try:
                async with request.form(max_files=files, max_fields=8, max_part_size=256) as form:
                    yield form
            except (MultiPartException, ValueError) as error:
                raise HTTPException(400, "this is not a form that can be read.") from error

    async def _contents(self, file: UploadFile) -> bytes:
        if (file.size or 0) > self.upload:
            most = f"at most {self.upload} are taken. Make it smaller."
            raise HTTPException(413, f"the file has {file.size} bytes: {most}")
        return await file.read()

    # Events.

    def _event(self, body: bytes, kind: str, name: str | None) -> dict[str, Any]:
        """Returns an event rebuilt from checked parts.

        Args:
            kind: where it is sent.
            name: that it is called by; None: it has a number.

        Raises:
            HTTPException: 400: it is not an event of the page; 403: a file is not the page's.
        """
        try:
            given = _Event.model_validate(parse_json(body))
            given.model_dump_json()  # lone surrogates cannot be sent back
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, "this is not an event as the page sends it.") from error
        if name is not None:
            numbers = [number for number, fn in self.page.fns.items() if fn.api_name == name]
            given.fn_index, given.event_data = (numbers or [None])[0], None
            given.session_hash = given.session_hash or secrets.token_hex(8)
        if kind == "reset":
            return {"event_id": given.event_id}
        if given.fn_index not in self.page.fns or given.session_hash is None:
            raise HTTPException(400, "there is no such event on this page, or it has no session.")
        return self._with_files(given.model_dump())

    def _with_files(self, value: Any) -> Any:
        """Returns a value in which every file is one of this page, and nothing but that."""
        if isinstance(value, list):
            return [self._with_files(one) for one in value]
        if not isinstance(value, dict):
            return value
        if "path" not in value:
            return {name: self._with_files(one) for name, one in value.items()}
        if not self.folder.has(value["path"]):
            raise HTTPException(403, "a file is not one of this page: upload it first.")
        name = value.get("orig_name")
        return {
            "path": value["path"],
            "orig_name": name[:100] if isinstance(name, str) else None,
            "meta": {"_type": "gradio.FileData"},
        }

    async def _processed(self, *args: Any, **named: Any) -> Any:
        """Does what `Blocks.process_api` does; what goes wrong is told in a sentence."""
        try:
            if time.monotonic() > self._swept + SWEEP_SECONDS:
                self._swept = time.monotonic()
                await asyncio.to_thread(self.folder.sweep, {*self.shares.kept})
            return await self._process(*args, **named)
        except gr.Error as error:
            error.print_exception = False
            raise
        except Exception as error:
            log.warning("an event of the page failed: %s", type(error).__name__, exc_info=error)
            sentence = "the page cannot work with what it was sent: check the values, or reload it."
            raise gr.Error(sentence, print_exception=False) from error

    # Sessions and streams.

    def _session_of(self, event: str | None, named: str | None) -> str:
        """Returns the session that a stream is of; "": one that is not known."""
        if event is None:
            return named if named is not None and _WORD.fullmatch(named) else ""
        pending = self.page._queue.pending_event_ids_session
        return next((one for one, events in pending.items() if event in events), "")

    async def _join(self, client: str, name: str) -> None:
        """Counts an event that is to be queued.

        Raises:
            HTTPException: 429, 503: there are too many.
        """
        queue, now = self.page._queue, time.monotonic()
        for one, session in [*self._sessions.items()]:
            if not session.streams and now > session.seen + UNREAD_SECONDS:
                await self._forget(one)
        owners = collections.Counter(one.client for one in self._sessions.values())
        of_one = [
            one for one in queue.event_ids_to_events.values()
            if (session := self._sessions.get(one.session_hash)) and session.client == client
        ]  # fmt: skip
        if len(of_one) >= EVENTS_OF_ONE or owners[client] >= SESSIONS_OF_ONE:
            raise HTTPException(429, "too much of yours waits already: wait until it is done.")
        if len(queue.event_ids_to_events) >= EVENTS or len(self._sessions) >= SESSIONS:
            raise HTTPException(503, "too many visitors wait already: try again later.")
        session = self._sessions.setdefault(name, _Session(client))
        session.client, session.seen = client, now

    @contextlib.asynccontextmanager
    async def _stream(self, name: str) -> AsyncIterator[None]:
        """Marks a session as read; one that nobody reads is not kept for long."""
        session = self._sessions.get(name, _Session(""))
        session.streams += 1
        try:
            yield
        finally:
            session.streams -= 1
            session.seen = time.monotonic()
            if not session.streams and not self.page._queue.pending_event_ids_session.get(name):
                await self._forget(name)

    async def _forget(self, name: str) -> None:
        """Drops a session with its messages and whatever still waits or runs for it."""
        if self._sessions.pop(name, None):
            queue = self.page._queue
            await queue.clean_events(session_hash=name)
            queue.pending_messages_per_session.pop(name, None)
            queue.pending_event_ids_session.pop(name, None)


def _is_number(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}", value) is not None


async def _json_of(request: Request) -> bytes:
    """Returns the body of an event.

    Raises:
        HTTPException: 413: it is too large; 415: it is not JSON.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"application/json" or options.get(b"charset", b"utf-8").lower() != b"utf-8":
        raise HTTPException(415, "an event is application/json, in UTF-8.")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_JSON:
            raise HTTPException(413, f"an event has at most {MOST_JSON} bytes: use fewer words.")
    return bytes(body)


def _replayed(scope: Scope, receive: Receive, event: dict[str, Any]) -> tuple[Scope, Receive]:
    """Returns a request whose body is an event."""
    body, sent = json.dumps(event).encode(), False
    gone = (b"content-length", b"content-type", b"transfer-encoding")
    headers = [(name, value) for name, value in scope["headers"] if name not in gone]
    headers += [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body}

    return {**scope, "headers": headers}, replay
