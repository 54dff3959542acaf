# SPDX-License-Identifier: Apache-2.0
"""RefCOCO, RefCOCO+ and RefCOCOg (arXiv:1608.00272, 1511.02283): where is what a phrase describes?

Files: `refs(unc).p` or `refs(umd).p` and `instances.json` of github.com/lichengunc/refer, images
of COCO train2014. The prompt and the one step are those of the released evaluation (spec Sec. 8).
"""

import functools
import pathlib
import pickletools
from typing import Any

from sparse_lavida_jax.data.files import write_json
from sparse_lavida_jax.evals.benchmark import Benchmark, Item, mean, share
from sparse_lavida_jax.evals.files import (
    EvaluationError,
    check_fields,
    existing,
    image_name,
    matching,
    read_images,
    read_json,
)
from sparse_lavida_jax.evals.metrics import overlap

LEAST_OVERLAP = 0.5
FIELDS = ("ref_id", "ann_id", "image_id", "split", "sentences")


class Bench(Benchmark):
    """A phrase an item; evaluate.split is "refcoco/val", "refcoco+/testA", "refcocog/test"."""

    title = "RefCOCO"
    source = (
        "Take refcoco, refcoco+ and refcocog of github.com/lichengunc/refer and train2014 of COCO,"
        " and put them into the folder as refcoco/refs(unc).p, refcoco/instances.json,"
        " train2014/COCO_train2014_*.jpg and so on. evaluate.split names set and split:"
        " refcoco/val, refcoco+/testA, refcocog/test."
    )

    def read(self, settings):
        """Returns an item a phrase: one thing has several."""
        name, _, split = self.settings.split.partition("/")
        folder = existing(self.folder / name, self.source) if name else self.folder
        path = matching(folder, "refs(u*).p", self.source)[0]
        instances = check_fields(
            read_json(existing(folder / "instances.json", self.source)),
            ("annotations", "images"),
            "instances.json",
        )
        boxes = {one["id"]: one["bbox"] for one in instances["annotations"]}
        files = {one["id"]: one["file_name"] for one in instances["images"]}
        items: list[Item] = []
        for number, ref in enumerate(read_plain_pickle(path)):
            where = f"{path}, entry {number},"
            ref = check_fields(ref, FIELDS, where)
            if ref["split"] != split:
                continue
            if ref["ann_id"] not in boxes or ref["image_id"] not in files:
                raise EvaluationError(f"{where} has no box in instances.json. {self.source}")
            items += self._phrases(
                len(items), ref, boxes[ref["ann_id"]], files[ref["image_id"]], where
            )
        return items

    def _phrases(self, first: int, ref, box, name: str, where: str) -> list[Item]:
        x, y, width, height = box
        file = existing(self.folder / "train2014" / image_name(name, where), self.source)
        items = []
        for number, sentence in enumerate(ref["sentences"]):
            record = {
                "ref_id": ref["ref_id"], "sent_id": sentence["sent_id"], "sent": sentence["sent"],
                "image": name, "box": [x, y, x + width, y + height],
            }  # fmt: skip
            load = functools.partial(read_images, file)
            key = str(sentence["sent_id"])
            items.append(Item(first + number, key, sentence["sent"], record, load))
        return items

    def answer(self, pipe, items, folder):
        """Returns the box of each phrase in pixels of its image, None where there is none."""
        pipe.prompts.check_task("ground")
        shown = [item.load()[0] for item in items]
        examples = [
            pipe.prompts.locate_one(item.words, image)
            for item, image in zip(items, shown, strict=True)
        ]
        seeds = [self.seed_of(item) for item in items]
        bucket = pipe.shared_bucket(examples, self.sampling)
        said = pipe.run(examples, sampling=self.sampling, seed=seeds, bucket=bucket)
        outputs = []
        for item, image, ids in zip(items, shown, said, strict=True):
            height, width = image.shape[:2]
            (box,) = pipe.prompts.boxes([item.words], [ids], (width, height))
            outputs.append({"box": None if box is None else [float(edge) for edge in box]})
        return outputs

    def export(self, rows, folder):
        """Writes each phrase with the right box and the one that was found."""
        write_json(
            folder / f"{self.settings.split.replace('/', '_')}.json",
            [
                {**item.record, "predicted": row.output["box"]}
                for item, row in zip(self.items, rows, strict=True)
            ],
        )

    def scores(self, rows, folder):
        """Returns P@0.5, the share of boxes that overlap the right one by half or more."""
        found = [
            overlap(row.output["box"], item.record["box"]) if row.output["box"] else 0.0
            for item, row in zip(self.items, rows, strict=True)
        ]
        none = [row.output["box"] is None for row in rows]
        return [
            share("P@0.5", [value >= LEAST_OVERLAP for value in found]),
            mean("mean overlap", found),
            share("phrases without a box", none),
        ]


# ---------------------------------------------------------------------------------------------
# The official files are pickles. A pickle is a program; this reads those that only build lists,
# dicts, text and numbers, and runs nothing.

_PUT = ("PUT", "BINPUT", "LONG_BINPUT")
_GET = ("GET", "BINGET", "LONG_BINGET")
_VALUES = (
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT", "STRING",
    "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
)  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_MARK = object()


def read_plain_pickle(path: pathlib.Path) -> list[Any]:
    """Returns the list in a pickle that holds data and no program.

    Raises:
        EvaluationError: it is damaged, or holds anything else.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for code, value, _ in pickletools.genops(path.read_bytes()):
            _step(code.name, value, stack, memo)
        (found,) = stack
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise EvaluationError(
            f"{path} is no list of references as they were released: {error}. Download it again."
        ) from error
    if not isinstance(found, list):
        raise EvaluationError(f"{path} holds a {type(found).__name__}, and not a list.")
    return found


def _step(name: str, value: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """Does what one instruction says."""
    if name in _VALUES:
        stack.append(value)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name == "MARK":
        stack.append(_MARK)
    elif name in _PUT:
        memo[int(value)] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in _GET:
        stack.append(memo[int(value)])
    elif name == "APPEND":
        last = stack.pop()
        stack[-1].append(last)
    elif name == "SETITEM":
        last, key = stack.pop(), stack.pop()
        stack[-1][key] = last
    elif name in ("APPENDS", "SETITEMS", "LIST", "DICT", "TUPLE"):
        members = _above_mark(stack)
        if name == "APPENDS":
            stack[-1].extend(members)
        elif name == "SETITEMS":
            stack[-1].update(zip(members[::2], members[1::2], strict=True))
        elif name == "DICT":
            stack.append(dict(zip(members[::2], members[1::2], strict=True)))
        else:
            stack.append(members if name == "LIST" else tuple(members))
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        count = int(name[-1])
        members = tuple(stack[-count:])
        del stack[-count:]
        stack.append(members)
    elif name not in ("PROTO", "FRAME", "STOP"):
        raise ValueError(f"the instruction {name} is not one of plain data")


def _above_mark(stack: list[Any]) -> list[Any]:
    place = len(stack) - 1
    while stack[place] is not _MARK:
        place -= 1
    members = stack[place + 1 :]
    del stack[place:]
    return members
