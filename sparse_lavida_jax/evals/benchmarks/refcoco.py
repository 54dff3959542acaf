# SPDX-License-Identifier: Apache-2.0
"""RefCOCO, RefCOCO+ and RefCOCOg (arXiv:1608.00272, 1511.02283): where is what a phrase describes?

Files: `refs(unc).p` or `refs(umd).p` and `instances.json` of github.com/lichengunc/refer, images
of COCO train2014. The prompt and the single step are as in the released evaluation (spec Sec. 8).
"""

import pathlib
import pickle
from typing import Any, ClassVar

from sparse_lavida_jax.data import files
from sparse_lavida_jax.data.images import overlap
from sparse_lavida_jax.evals.benchmark import Benchmark, Item
from sparse_lavida_jax.evals.official_files import EvaluationError, check_fields, read, records
from sparse_lavida_jax.evals.scorers import mean
from sparse_lavida_jax.sampling import presets

LEAST_OVERLAP = 0.5
FIELDS = ("ref_id", "ann_id", "image_id", "split", "sentences")


class RefCoco(Benchmark):
    """Boxes found in one step (table in the paper's supplement).

    Every phrase is an item; evaluate.split is "refcoco/val", "refcoco+/testA", "refcocog/test" ...
    """

    title = "RefCOCO"
    source = (
        "Take refcoco, refcoco+ and refcocog of github.com/lichengunc/refer and train2014 of COCO,"
        " and put them into the folder as refcoco/refs(unc).p, refcoco/instances.json,"
        " train2014/COCO_train2014_*.jpg and so on. evaluate.split names set and split:"
        " refcoco/val, refcoco+/testA, refcocog/test."
    )
    configs: ClassVar = {
        "refcoco": {"split": "refcoco/val", "batch_size": 16},
        "refcoco_plus": {"split": "refcoco+/val", "batch_size": 16},
        "refcocog": {"split": "refcocog/val", "batch_size": 16},
    }
    sampled_with: ClassVar = {"text": {"steps": 1, "step_ratio": 0.0, "commit": "count"}}

    def read(self):
        """Yields an item for each phrase; an object has several."""
        name, _, split = self.settings.split.partition("/")
        path = self.files(f"{name}/refs(u*).p".lstrip("/"))[0]
        listed = self.file(name, "instances.json")
        instances = check_fields(read(listed), ("annotations", "images"), str(listed))
        boxes = {one["id"]: one["bbox"] for one in instances["annotations"]}
        files = {one["id"]: one["file_name"] for one in instances["images"]}
        for _, ref, where in records(path, FIELDS, load=read_plain_pickle):
            if ref["split"] != split:
                continue
            if ref["ann_id"] not in boxes or ref["image_id"] not in files:
                raise EvaluationError(f"{where} has no box in instances.json. {self.source}")
            x, y, width, height = boxes[ref["ann_id"]]
            image = files[ref["image_id"]]
            shown = self.image(image, where, "train2014")
            for sentence in ref["sentences"]:
                record = {
                    "ref_id": ref["ref_id"], "sent_id": sentence["sent_id"],
                    "sent": sentence["sent"], "image": image,
                    "box": [x, y, x + width, y + height],
                }  # fmt: skip
                yield Item(str(sentence["sent_id"]), sentence["sent"], record, shown)

    def answer(self, pipe, items, folder):
        """Returns the box of each phrase in pixels of its image, or None if there is none."""
        pipe.prompts.check_task("ground")
        shown = [item.load()[0] for item in items]
        pairs = zip(items, shown, strict=True)
        examples = [pipe.prompts.locate_one(item.words, image) for item, image in pairs]
        seeds = [self.seed_of(item) for item in items]
        sampling = self.sampling
        if pipe.prompts.locates_in_one_step:
            length = len(examples[0].response)
            sampling = presets.one_pass(sampling, pipe.settings.model, length)
        said = pipe.sample(examples, sampling=sampling, seed=seeds, shared=True)
        outputs = []
        for item, image, ids in zip(items, shown, said, strict=True):
            height, width = image.shape[:2]
            (box,) = pipe.prompts.boxes([item.words], [ids], (width, height))
            outputs.append({"box": box and [float(edge) for edge in box]})
        return outputs

    def export(self, answers):
        """Returns each phrase with the correct box and the box found."""
        entries = [{**one.record, "predicted": one.output["box"]} for one in answers]
        return {f"{self.settings.split.replace('/', '_')}.json": entries}

    def scores(self, answers, folder):
        """Returns P@0.5, the share of boxes that overlap the correct one by at least one half."""
        boxes = [(one.output["box"], one.record["box"]) for one in answers]
        found = [overlap(box, right) if box else 0.0 for box, right in boxes]
        none = [box is None for box, _ in boxes]
        return [
            mean("P@0.5", [value >= LEAST_OVERLAP for value in found]),
            mean("mean overlap", found),
            mean("phrases without a box", none),
        ]


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles lists, dicts, text and numbers, without running anything.

    A pickle is a program; it can call only what `find_class` returns.
    """

    def find_class(self, module_name: str, global_name: str):
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which is no data")


def read_plain_pickle(path: pathlib.Path) -> Any:
    """Returns the contents of a pickle that contains only data.

    Raises:
        EvaluationError: it is damaged, or contains anything else.
    """
    try:
        with files.open_regular(path) as file:
            return _PlainUnpickler(file, encoding="latin-1").load()
    except (pickle.UnpicklingError, ArithmeticError, LookupError, MemoryError, TypeError,
            ValueError, AttributeError, EOFError) as error:  # fmt: skip
        raise EvaluationError(
            f"{path} is no list of references as they were released: {error}. Download it again."
        ) from error


BENCHMARK = RefCoco
