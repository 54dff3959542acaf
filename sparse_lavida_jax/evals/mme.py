# SPDX-License-Identifier: Apache-2.0
"""MME (arXiv:2306.13394): two questions an image, one to be answered yes and one no.

Files and layout: MME_Benchmark_release_version.zip and eval_tool.zip of
github.com/BradyFU/Awesome-Multimodal-Large-Language-Models/tree/Evaluation. The wording of the
question is that of lmms-eval, with which the base model was evaluated.
"""

import collections
import functools
import pathlib

from sparse_lavida_jax.evals.benchmark import Item, QuestionBenchmark, Score
from sparse_lavida_jax.evals.files import EvaluationError, read_images, read_text

PERCEPTION = (
    "existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark",
    "artwork", "OCR",
)  # fmt: skip
COGNITION = (
    "commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning",
)  # fmt: skip
OFFICIAL_ENDING = " Please answer yes or no."
ENDING = "\nAnswer the question using a single word or phrase."
SUFFIXES = (".jpg", ".png", ".jpeg")


class Bench(QuestionBenchmark):
    """2374 questions in 14 categories."""

    title = "MME"
    source = (
        "Take MME_Benchmark_release_version.zip (github.com/BradyFU/"
        "Awesome-Multimodal-Large-Language-Models, branch Evaluation) and unpack it; the folder is"
        " MME_Benchmark_release_version, which holds existence, count and so on."
    )

    def read(self, settings):
        """Returns an item a question."""
        items: list[Item] = []
        for category in (*PERCEPTION, *COGNITION):
            folder = self.folder / category
            nested = folder / "questions_answers_YN"
            for path in sorted((nested if nested.is_dir() else folder).glob("*.txt")):
                image = _image(folder / "images" if nested.is_dir() else folder, path.stem)
                items += self._questions(len(items), category, path, image)
        return items

    def _questions(
        self, first: int, category: str, path: pathlib.Path, image: pathlib.Path
    ) -> list[Item]:
        lines = [line for line in read_text(path).splitlines() if line.strip()]
        items = []
        for number, line in enumerate(lines):
            question, _, answer = line.rpartition("\t")
            if answer.strip() not in ("Yes", "No") or len(lines) != 2:
                raise EvaluationError(
                    f"{path} must hold two lines, each a question, a tab, and Yes or No; it has"
                    f" {line!r}. {self.source}"
                )
            record = {
                "category": category, "picture": image.name, "question": question.strip(),
                "answer": answer.strip(),
            }  # fmt: skip
            words = question.strip().removesuffix(OFFICIAL_ENDING) + ENDING
            key = f"{category}/{path.stem}/{number}"
            load = functools.partial(read_images, image)
            items.append(Item(first + number, key, words, record, load))
        return items

    def export(self, rows, folder):
        """Writes a file a category, as `eval_tool/calculation.py` reads them."""
        lines = collections.defaultdict(list)
        for item, row in zip(self.items, rows, strict=True):
            said = " ".join(row.output["text"].split())
            record = item.record
            fields = record["picture"], record["question"], record["answer"], said
            lines[record["category"]].append("\t".join(fields))
        for category, category_lines in lines.items():
            (folder / f"{category}.txt").write_text("\n".join(category_lines) + "\n")

    def scores(self, rows, folder):
        """Returns the points: of a category at most 200, its accuracy and its accuracy+."""
        hits: dict[str, dict[str, list[bool]]] = {}
        for item, row in zip(self.items, rows, strict=True):
            pairs = hits.setdefault(item.record["category"], {})
            right = yes_or_no(row.output["text"]) == item.record["answer"].lower()
            pairs.setdefault(item.record["picture"], []).append(right)
        found = []
        for name, categories in (("perception", PERCEPTION), ("cognition", COGNITION)):
            present = [category for category in categories if category in hits]
            parts = [_points(category, hits[category]) for category in present]
            whole = sum(part.value for part in parts)
            count = sum(part.count for part in parts)
            title = f"{name}, {len(present)} of {len(categories)} categories"
            found += [Score(title, whole, count), *parts] if present else []
        return found


def yes_or_no(answer: str) -> str:
    """Returns what an answer begins with: yes, no, or other."""
    said = answer.lower().strip().replace(".", "")
    if said in ("y", "n"):
        return {"y": "yes", "n": "no"}[said]
    return next((word for word in ("yes", "no") if word in said[:4]), "other")


def _points(category: str, pairs: dict[str, list[bool]]) -> Score:
    every = [hit for pair in pairs.values() for hit in pair]
    both = [all(pair) for pair in pairs.values()]
    points = 100 * sum(every) / len(every) + 100 * sum(both) / len(both)
    return Score(f"- {category}", points, len(every))


def _image(folder: pathlib.Path, stem: str) -> pathlib.Path:
    for suffix in SUFFIXES:
        if (folder / f"{stem}{suffix}").is_file():
            return folder / f"{stem}{suffix}"
    raise EvaluationError(f"there is no image {stem} in {folder}: {', '.join(SUFFIXES)}.")
