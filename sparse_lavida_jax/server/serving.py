# SPDX-License-Identifier: Apache-2.0
"""One model for many clients: a queue processed in batches, limits on requests, and counts.

    service = Service(SparseLaViDa.from_pretrained("scenes"))
    ticket = service.submit("generate", "a red circle above a blue square", seed=3)
    print(ticket.ahead, ticket.future.result().image)

The page (`page/demo.py`) and the endpoints (`server/endpoints.py`) are built on this; it needs no
extra packages.
"""

import base64
import collections
import concurrent.futures
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sparse_lavida_jax import runtime
from sparse_lavida_jax.data import image_files, images
from sparse_lavida_jax.inference import (
    batch_shapes,
    proofs,
    provenance,
    regions,
    surprise,
    warmup,
)
from sparse_lavida_jax.inference.checks import check_ceilings
from sparse_lavida_jax.inference.requests import TASK_SPECS, Request, Shown
from sparse_lavida_jax.inference.results import SHOWN_KEY
from sparse_lavida_jax.prompting.request_errors import RequestError, check_words
from sparse_lavida_jax.sampling.options import ALIASES, OPTIONS, changed
from sparse_lavida_jax.schema import InputError, about
from sparse_lavida_jax.server.batching import Batcher, Cancelled, Limits, Stopped, Ticket, Work

log = logging.getLogger(__name__)

# What is submitted as a task: an image of ours, from a step on; how surprising an image is given
# captions; whether an image of ours follows from its record.
BRANCH, SURPRISE, PROOF = "branch", "surprise", "proof"
LANES = {"text": 2, "small": 2, "large": 1}  # threads; only one large image is in memory at once
HEADER_SECONDS = 2.0  # of processor time for the headers of all images of a request
SMALL = 2**22  # pixels, or bytes, up to which reading is a matter of a moment
_LARGE = threading.Lock()


@contextlib.contextmanager
def one_large_image() -> Iterator[None]:
    """Lets one thread of this process decode a large image, which takes up to a gigabyte."""
    with _LARGE:
        try:
            yield
        finally:
            runtime.return_freed_memory()


class Service:
    """A model, its queue, and counts of finished requests.

    Args:
        pipe: a `SparseLaViDa`, which does the tasks; its `batch_size` is the largest batch.
        limits: on requests.

    Attributes:
        counts: finished requests by (task, outcome): done, refused, cancelled or failed.
        tokens, seconds: totals of successful requests, by task.
        watchers: called with every finished request and its outcome.
    """

    def __init__(self, pipe: Any, limits: Limits | None = None):
        self.pipe = pipe
        self.limits = limits or Limits()
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.tokens: collections.Counter[str] = collections.Counter()
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.watchers: list[Callable[[Ticket, str], None]] = []
        self._warm = True
        self._lanes = {
            name: concurrent.futures.ThreadPoolExecutor(threads, name)
            for name, threads in LANES.items()
        }
        self._lock = threading.Lock()
        self._batcher = Batcher(pipe, self.limits, self._count)

    def submit(
        self,
        task: str,
        words: str | Sequence[str] | None = None,
        shown: Shown | None = None,
        *,
        previews: int = 0,
        **options: Any,
    ) -> Ticket:
        """Adds a request to the end of the queue.

        Args:
            task, words, shown, options: see `SparseLaViDa.requests`. The task `BRANCH` takes what
                `SparseLaViDa.branch` does, `record` among its options; `SURPRISE` captions and an
                image; `PROOF` `record` and `pixels`, and what the image was drawn after.
            previews: the largest number of previews, or `batching.EVERY`; each costs one decoding.

        Raises:
            InputError: it cannot be done, or asks for more than the limits allow.
            QueueFull: too many requests wait already.
            Stopped: the service takes no more requests.
        """
        with self.place():
            return self.add(task, words, shown, previews=previews, **options)

    @contextlib.contextmanager
    def place(self, client: str = "") -> Iterator[None]:
        """Keeps a place in the queue for a request while it is read, and until it is added.

        Args:
            client: its address; "": one that may take all places.

        Raises:
            QueueFull, Stopped: see `submit`; or half of all places are this client's.
        """
        self._batcher.take_place(client)
        try:
            yield
        finally:
            self._batcher.leave_place(client)

    def lane(self, cost: int | None = None) -> concurrent.futures.Executor:
        """Returns the threads in which a request is read; those of other lanes never wait for it.

        Args:
            cost: of its images (`cost_of`), or its bytes; None: it has no images.
        """
        return self._lanes["text" if cost is None else "small" if cost <= SMALL else "large"]

    def add(
        self,
        task: str,
        words: str | Sequence[str] | None = None,
        shown: Shown | Sequence[Shown] | None = None,
        *,
        previews: int = 0,
        client: str = "",
        **options: Any,
    ) -> Ticket:
        """Adds a request that has a `place` to the end of the queue; see `submit`."""
        with self.counting_refusals(task):
            work = None
            if task == SURPRISE:
                requests, work = self._surprise(words or (), shown, **options)
            elif task == PROOF:
                requests, work = self._proof(shown, **options)
            elif task == BRANCH:
                requests = self._branches(shown, **options)
            else:
                self._check(words, options)
                rows = 1 if words is None or isinstance(words, str) else len(words)
                requests = self.pipe.requests(task, words, shown, **_by_row(options, rows))
            if task != SURPRISE:  # its settings are the server's own
                self._check_settings(requests, recorded=task in (BRANCH, PROOF))
        named = {"task": task, "work": work} if work else {}
        ticket = Ticket(requests, self._batcher.open, looks=previews, client=client, **named)
        self._batcher.add(ticket)
        return ticket

    def _branches(
        self,
        shown: Shown | None,
        record: dict[str, Any],
        at: str | None = None,
        num_images: int | None = None,
        seed: int | None = None,
    ) -> list[Request]:
        """Returns the requests of branches; see `_check_record`."""
        self._check_record(record, shown, num_images=num_images)
        return self.pipe.branches(record, at, num_images, seed, shown)[1]

    def _proof(
        self, shown: Shown | None, record: dict[str, Any], pixels: image_files.Pixels
    ) -> tuple[list[Request], Work]:
        """Returns the request of a recorded image and what proves it; see `_check_record`.

        The model of the server proves it, with its own kernels.
        """
        self._check_record(record, shown)
        if max(pixels.shape[:2]) > self.largest_side:
            height, width = pixels.shape[:2]
            raise RequestError(
                f"the image has {width}x{height} pixels, and this model draws at most"
                f" {self.largest_side} a side: send the PNG as it was written.",
                setting="image",
            )
        request = self.pipe.recorded(record, shown)[1]
        return [request], lambda run, made: proofs.prove(run, made, [record], [pixels])[0]

    def _check_record(
        self, record: dict[str, Any], shown: Shown | None, **options: int | None
    ) -> None:
        """Checks a record before it is used, so that no name in it is followed.

        Raises:
            RequestError: the record is damaged, or of an image that was drawn after one that is not
                given; or it asks for more than the limits allow.
        """
        provenance.check(record)
        own = [record["prompt"], record.get("asked") or "", record.get("layout") or ""]
        self._check([text for text in own if text.strip()], options)
        if record.get(SHOWN_KEY) is not None and shown is None:
            raise RequestError("it was drawn after another image: give that one as well.")

    def _surprise(self, captions: Sequence[str], shown: Shown) -> tuple[list[Request], Work]:
        """Returns a request for each caption of an image, and what measures their bits.

        Raises:
            RequestError: there are no captions, or more than the limits allow.
        """
        if not 1 <= len(captions) <= self.limits.captions:
            raise RequestError(
                f"{len(captions)} captions were sent: 1 to {self.limits.captions} can be compared."
                " Send them one a line.",
                setting="captions",
            )
        self._check(captions, {})
        sampling = surprise.sampling_of(self.pipe.settings.sampling, self.pipe.settings.model)
        made = self.pipe.requests("generate", captions, layout=False, sampling=sampling)
        return made, lambda run, rows: surprise.surprise(run, rows, shown, surprise.PLANS)

    @contextlib.contextmanager
    def counting_refusals(self, task: str) -> Iterator[None]:
        """Counts a refusal that is raised inside."""
        try:
            yield
        except InputError:
            with self._lock:
                self.counts[task, "refused"] += 1
            raise

    @property
    def waiting(self) -> int:
        """How many requests are waiting."""
        return len(self._batcher.waiting)

    @property
    def running(self) -> bool:
        """Whether any request is running."""
        return self._batcher.running

    @property
    def ready(self) -> bool:
        """Whether requests are taken and nothing is still being compiled in advance."""
        return self._warm and not self._batcher.stops

    def warm_up(self) -> threading.Thread:
        """Starts to make the programs that drawing, editing and asking need.

        That is for every batch size, every length of the prompt, the model's own settings, and
        those of `limits.only`: one row and short prompts first. Requests are taken in the meantime
        and do not wait for it. Afterwards the service is `ready`.
        """
        self._warm = False
        thread = threading.Thread(target=self._rehearse, name="warm-up")
        thread.start()
        return thread

    def _rehearse(self) -> None:
        found = [
            one
            for task in warmup.tasks_of(self.pipe)
            for steps, registers in self._settings(task)
            for one in self._rehearsals(task, steps=steps, registers=registers)
        ]
        for one in sorted(found, key=lambda one: (one.rows, one.length)):
            if self._batcher.stops:
                return
            with self._logging(f"{one.kind} of {one.rows} row(s)"):
                self._batcher.rehearse(one.requests(self.pipe), one.bucket, one.watch)
        self._warm = True

    def _rehearsals(self, task: str, **options: Any) -> list[warmup.Rehearsal]:
        sizes = batch_shapes.sizes(self.pipe.batch_size)
        with self._logging(task):
            return warmup.rehearsals(self.pipe, task, sizes, "served", **options)
        return []

    @contextlib.contextmanager
    def _logging(self, what: str) -> Iterator[None]:
        """Logs errors of the warm-up: a client who asks for the same is told, too."""
        try:
            with contextlib.suppress(Cancelled, warmup.LayoutWritten):
                yield
        except Exception as error:
            log.error("warm-up: %s: %s", what, error)

    def stop(self) -> None:
        """Takes no more requests and turns away those that wait; running ones continue."""
        self._batcher.stop()

    def close(self) -> None:
        """Cancels all requests and stops all work."""
        self._batcher.close()
        for lane in self._lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)

    @property
    def drawn_side(self) -> int:
        """The side, in pixels, of the largest image that the model draws; 0: it draws none."""
        return 0 if self.pipe.codec is None else self.pipe.codec.image_size

    @property
    def largest_side(self) -> int:
        """The longer side, in pixels, of the largest image that the model can see."""
        vision = self.pipe.settings.model.vision
        sides = [side for size in vision.grid_sizes for side in size]
        return max(vision.image_size, self.drawn_side, *sides)

    def small(self, image: image_files.Pixels) -> image_files.Pixels:
        """Returns an image no larger than the model can see, to save memory while it waits."""
        return images.shrunk(image, self.largest_side)

    def with_mask(
        self, image: image_files.Pixels, mask: Any
    ) -> tuple[image_files.Pixels, dict[str, Any]]:
        """Returns what `small` does, and the option that has the masked part drawn again.

        Args:
            mask: see `SparseLaViDa.inpaint`.

        Raises:
            ImageError: a mask of another size, or an empty one.
        """
        mask = self.pipe.prompts.codec_mask(regions.pixel_mask(image, mask, None))
        cells = self.pipe.settings.model.grid_size
        return self.small(image), {"known": ~regions.cell_mask(mask, cells)}

    def cost_of(self, images: Sequence[bytes], *names: str) -> int:
        """Returns what it costs to decode the image files of a request, from their headers.

        Messages call them by their names, others "the image".

        Raises:
            ImageError: one is too large or not an image, or all of them cost too much.
        """
        named: Any = [*itertools.zip_longest(images, names, fillvalue="the image")]
        for contents, name in named:
            if len(contents) > self.limits.upload:
                raise image_files.ImageError(
                    f"{name} has {len(contents)} bytes: at most {self.limits.upload} are taken."
                    " Make it smaller.",
                    setting=name.removeprefix("the "),
                )
        end = time.thread_time() + HEADER_SECONDS

        def check() -> None:
            if time.thread_time() > end:
                raise image_files.ImageError(
                    f"the headers of the image take more than {HEADER_SECONDS:g} s to read: save it"
                    " anew as PNG."
                )

        cost = 0
        for contents, name in named:
            with about(name.removeprefix("the ")):
                cost += image_files.cost(contents, name, check=check)
        if cost > self.limits.pixels:
            raise image_files.ImageError(
                f"the images have {cost} pixels in all, where each further scan of a JPEG counts an"
                f" eighth: at most {self.limits.pixels} are taken. Make them smaller."
            )
        return cost

    def image(self, contents: bytes, name: str = "the image") -> image_files.Pixels:
        """Returns the pixels of an uploaded file.

        Raises:
            ImageError: it is too large, or not an image.
        """
        self.cost_of([contents], name)
        return image_files.read_bytes(contents, name)

    def contents_of_uri(self, uri: str) -> bytes:
        """Returns the image file in a data URI; nothing is ever fetched.

        Its base64 may be broken into lines or end without padding, as browsers take it.

        Raises:
            ImageError: a remote address, or another URI.
        """
        kind, comma, payload = uri.partition(",")
        kind, encoded = kind.lower(), payload.encode(errors="replace").translate(None, b"\t\n\r ")
        if not (kind.startswith("data:image/") and kind.endswith(";base64") and comma):
            raise image_files.ImageError(
                f"an image at {uri[:60]!r} is not fetched: send the image itself, as"
                " data:image/png;base64,..."
            )
        try:
            return base64.b64decode(encoded + b"=" * (-len(encoded) % 4), validate=True)
        except ValueError as error:
            raise image_files.ImageError(f"the data URI is not base64: {error}.") from error

    def _check(self, words: str | Sequence[str] | None, options: dict[str, Any]) -> None:
        texts = [] if words is None else [words] if isinstance(words, str) else list(words)
        if len(texts) > self.limits.rows:
            raise RequestError(f"{len(texts)} phrases were sent: at most {self.limits.rows}.")
        if options.get("template") is not None:
            texts.append(options["template"])
        texts += itertools.chain.from_iterable(options.get("earlier", ()))
        for text in texts:
            if len(check_words(text)) > self.limits.words:
                raise RequestError(
                    f"the prompt has {len(text)} characters: at most {self.limits.words} are"
                    " taken.",
                    setting="prompt",
                )
        ceilings = dict.fromkeys(("num_images", "rounds", "best_of"), self.limits.images)
        check_ceilings(options, ceilings | {"max_new_tokens": self.limits.new_tokens})
        copies, best_of = (options.get(name) or 1 for name in ("num_images", "best_of"))
        if copies * best_of > self.limits.images:
            raise RequestError(
                f"{copies} images, each the best of {best_of}, are up to {copies * best_of}: at"
                f" most {self.limits.images} are drawn.",
                setting="best_of",
            )

    def _settings(self, task: str) -> list[tuple[int | None, int | None]]:
        """Returns the (steps, registers) that may be asked for and are compiled in advance."""
        return [(None, None), *(self.limits.only or () if TASK_SPECS[task].draws else ())]

    def _check_settings(self, requests: Sequence[Request], *, recorded: bool = False) -> None:
        """Refuses settings that would need compiling, if `limits.only` is set.

        Args:
            recorded: whether they are those of an image.
        """
        if self.limits.only is None:
            return
        base, task = self.pipe.settings.sampling, requests[0].task
        draws, known = TASK_SPECS[task].draws, self._settings(task)
        settings = [changed(base, draws=draws, steps=n, registers=m) for n, m in known]
        if all(request.sampling in settings for request in requests):
            return
        named = [
            f"{steps} step{'s' * (steps != 1)}"
            + ("" if registers is None else f" and {registers} register{'s' * (registers != 1)}")
            for steps, registers in known[1:]
        ]
        advice = "Leave the settings out"
        if recorded:
            advice = "Send an image drawn with the model's own settings"
        other = " or ".join(named)
        raise RequestError(
            f"this server compiles nothing more for {task!r}. {advice}"
            f"{', or ' + ('with ' if recorded else 'ask for ') + other if other else ''}."
        )

    def _count(self, ticket: Ticket) -> None:
        outcome = _outcome(ticket.future)
        for watcher in self.watchers:
            watcher(ticket, outcome)
        with self._lock:
            self.counts[ticket.task, outcome] += 1
            if outcome == "done":
                share = len(ticket.requests) / ticket.batch
                self.tokens[ticket.task] += ticket.future.result().tokens_passed
                self.seconds[ticket.task] += ticket.seconds * share


def _by_row(options: dict[str, Any], rows: int = 1) -> dict[str, Any]:
    """Returns the options of a request; numbers that may differ within a batch become lists.

    Such numbers are then not part of the settings, which all rows of a batch share.
    """
    own = {
        name for name in options if (known := OPTIONS.get(ALIASES.get(name, name))) and known.by_row
    }
    return {
        name: [float(value)] * rows if name in own and isinstance(value, int | float) else value
        for name, value in options.items()
    }


def _outcome(future: concurrent.futures.Future[Any]) -> str:
    error = None if future.cancelled() else future.exception()
    if future.cancelled() or isinstance(error, Cancelled):
        return "cancelled"
    if error is None:
        return "done"
    return "refused" if isinstance(error, (InputError, Stopped)) else "failed"
