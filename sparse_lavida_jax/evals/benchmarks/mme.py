# SPDX-License-Identifier: Apache-2.0
"""MME (arXiv:2306.13394): two questions per image; the answer to one is yes, to the other no.

Files and layout: MME_Benchmark_release_version.zip and eval_tool.zip of
github.com/BradyFU/Awesome-Multimodal-Large-Language-Models/tree/Evaluation. The wording of the
question is that of lmms-eval, with which the base model was evaluated.
"""

import pathlib
from typing import ClassVar

from sparse_lavida_jax.data import files, leftovers
from sparse_lavida_jax.evals.benchmark import Item, QuestionBenchmark
from sparse_lavida_jax.evals.official_files import EvaluationError, read_text
from sparse_lavida_jax.evals.scorers import Metric, grouped

CATEGORIES = {
    "perception": (
        "existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark",
        "artwork", "OCR",
    ),
    "cognition": (
        "commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning",
    ),
}  # fmt: skip
OFFICIAL_ENDING = " Please answer yes or no."
ENDING = "\nAnswer the question using a single word or phrase."
SUFFIXES = (".jpg", ".png", ".jpeg")


class Mme(QuestionBenchmark):
    """2374 questions in 14 categories (table 5 of the paper has cognition).

    Room for an answer as in lmms-eval.
    """

    title = "MME"
    source = (
        "Take MME_Benchmark_release_version.zip (github.com/BradyFU/"
        "Awesome-Multimodal-Large-Language-Models, branch Evaluation) and unpack it; the folder is"
        " MME_Benchmark_release_version, which holds existence, count and so on."
    )
    configs: ClassVar = {"mme": {"max_new_tokens": 16}}

    def read(self):
        """Yields an item for each question."""
        for category in (*CATEGORIES["perception"], *CATEGORIES["cognition"]):
            folder = self.folder / category
            nested = folder / "questions_answers_YN"
            folder_of_texts = nested if nested.is_dir() else folder
            for path in sorted(leftovers.without(folder_of_texts.glob("*.txt"), folder_of_texts)):
                image = _image(folder / "images" if nested.is_dir() else folder, path.stem)
                yield from self._questions(category, path, image)

    def _questions(self, category: str, path: pathlib.Path, image: pathlib.Path):
        lines = [line for line in files.lines(read_text(path)) if line.strip()]
        for number, line in enumerate(lines):
            question, _, answer = (part.strip() for part in line.rpartition("\t"))
            if answer not in ("Yes", "No") or len(lines) != 2:
                raise EvaluationError(
                    f"{path} must hold two lines, each a question, a tab, and Yes or No; it has"
                    f" {line!r}. {self.source}"
                )
            record = {
                "category": category, "image": image.name, "question": question,
                "answer": answer,
            }  # fmt: skip
            words = question.removesuffix(OFFICIAL_ENDING) + ENDING
            yield Item(f"{category}/{path.stem}/{number}", words, record, (image,))

    def export(self, answers):
        """Returns a file for each category, as `eval_tool/calculation.py` reads them."""
        lines = []
        for one in answers:
            official = [one.record[name] for name in ("image", "question", "answer")]
            line = "\t".join([*official, " ".join(one.text.split())])
            lines.append((f"{one.record['category']}.txt", f"{line}\n"))
        return {file: "".join(part) for file, part in grouped(lines).items()}

    def scores(self, answers, folder):
        """Returns the points: per category up to 200, the sum of its accuracy and accuracy+."""
        hits: dict[str, dict[str, list[bool]]] = {}
        for one in answers:
            pairs = hits.setdefault(one.record["category"], {})
            right = yes_or_no(one.text) == one.record["answer"].lower()
            pairs.setdefault(one.record["image"], []).append(right)
        found = []
        for name, categories in CATEGORIES.items():
            parts = [_points(one, hits[one]) for one in categories if one in hits]
            title = f"{name}, {len(parts)} of {len(categories)} categories"
            if parts:
                whole, count = sum(part.value for part in parts), sum(part.count for part in parts)
                found += [Metric(title, whole, count), *parts]
        return found


def yes_or_no(answer: str) -> str:
    """Returns how an answer begins: yes, no, or other."""
    said = answer.lower().strip().replace(".", "")
    if said in ("y", "n"):
        return {"y": "yes", "n": "no"}[said]
    return next((word for word in ("yes", "no") if word in said[:4]), "other")


def _points(category: str, pairs: dict[str, list[bool]]) -> Metric:
    every = [hit for pair in pairs.values() for hit in pair]
    both = [all(pair) for pair in pairs.values()]
    points = 100 * sum(every) / len(every) + 100 * sum(both) / len(both)
    return Metric(f"- {category}", points, len(every))


def _image(folder: pathlib.Path, stem: str) -> pathlib.Path:
    paths = (folder / f"{stem}{suffix}" for suffix in SUFFIXES)
    if path := next(filter(pathlib.Path.is_file, paths), None):
        return path
    raise EvaluationError(f"there is no image {stem} in {folder}: {', '.join(SUFFIXES)}.")


BENCHMARK = Mme
