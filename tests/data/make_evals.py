# SPDX-License-Identifier: Apache-2.0
"""Writes `tests/data/evals`: five records per benchmark in its official format, made up by us.

    python tests/data/make_evals.py

No record comes from the benchmark itself. Needs pyarrow.
"""

import base64
import csv
import io
import json
import pathlib
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

FOLDER = pathlib.Path(__file__).parent / "evals"
COLOURS = ("red", "green", "blue", "orange", "purple")


def picture(number: int) -> Image.Image:
    """A row of number + 1 squares, in a colour that depends on `number`."""
    image = Image.new("RGB", (40, 24), "white")
    pen = ImageDraw.Draw(image)
    for i in range(number + 1):
        pen.rectangle((1 + 8 * i, 8, 6 + 8 * i, 14), fill=COLOURS[number])
    return image


def encoded(number: int) -> bytes:
    file = io.BytesIO()
    picture(number).save(file, "PNG", optimize=True)
    return file.getvalue()


def save(path: pathlib.Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(number).save(path)


def write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_json(path: pathlib.Path, value) -> None:
    write(path, json.dumps(value, indent=1) + "\n")


def geneval() -> None:
    records = [
        {"tag": "single_object", "include": [{"class": "square", "count": 1}],
         "prompt": "a photo of a square"},
        {"tag": "counting", "include": [{"class": "square", "count": 2}],
         "exclude": [{"class": "square", "count": 3}], "prompt": "a photo of two squares"},
        {"tag": "colors", "include": [{"class": "square", "count": 1, "color": "blue"}],
         "prompt": "a photo of a blue square"},
        {"tag": "two_object", "include": [{"class": "square", "count": 1},
                                          {"class": "circle", "count": 1}],
         "prompt": "a photo of a square and a circle"},
        {"tag": "counting", "include": [{"class": "circle", "count": 3}],
         "exclude": [{"class": "circle", "count": 4}], "prompt": "a photo of three circles"},
    ]  # fmt: skip
    lines = "".join(json.dumps(record) + "\n" for record in records)
    write(FOLDER / "geneval/evaluation_metadata.jsonl", lines)


def dpg() -> None:
    for number, colour in enumerate(COLOURS):
        write(FOLDER / f"dpg/prompts/{number}.txt", f"A {colour} square, flat, on white paper.\n")


def mjhq() -> None:
    names = ("1f", "2e", "3d", "4c", "5b")
    categories = ("animals", "art", "animals", "food", "art")
    records = {
        name: {"category": category, "prompt": f"a {colour} square on paper"}
        for name, category, colour in zip(names, categories, COLOURS, strict=True)
    }
    write_json(FOLDER / "mjhq/meta_data.json", records)


def imgedit() -> None:
    kinds = ("adjust", "add", "style", "remove", "adjust")
    records = {}
    for number, kind in enumerate(kinds):
        name = f"plain/00000{number}.png"
        save(FOLDER / "imgedit/singleturn" / name, number)
        prompt = f"Make the picture more {COLOURS[number]}."
        records[str(70 + number)] = {"id": name, "prompt": prompt, "edit_type": kind}
    write_json(FOLDER / "imgedit/basic_edit.json", records)


def mme() -> None:
    for number, colour in enumerate(COLOURS):
        nested = number >= 3
        category = ("color", "color", "count", "landmark", "artwork")[number]
        other = COLOURS[(number + 1) % 5]
        lines = [
            f"Is the square {word}? Please answer yes or no.\t{answer}\n"
            for word, answer in ((colour, "Yes"), (other, "No"))
        ]
        folder = FOLDER / "mme" / category
        save((folder / "images" if nested else folder) / f"{number:04}.png", number)
        questions = folder / "questions_answers_YN" if nested else folder
        write(questions / f"{number:04}.txt", "".join(lines))


def hugging_face_picture(number: int | None) -> dict | None:
    return None if number is None else {"bytes": encoded(number), "path": f"{number}.png"}


def parquet(path: pathlib.Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def mmmu() -> None:
    def row(number, question, options, answer, kind, subject, shown):
        return {
            "id": f"validation_{subject}_{number}", "question": question, "options": options,
            "explanation": "", "answer": answer, "question_type": kind, "subfield": "Squares",
            "topic_difficulty": "Easy",
            **{f"image_{i}": hugging_face_picture(shown.get(i)) for i in range(1, 8)},
        }  # fmt: skip

    choice, words = "multiple-choice", "open"
    parquet(
        FOLDER / "mmmu/Math/validation-00000-of-00001.parquet",
        [
            row(1, "How many squares are in <image 1>?", "['1', '2', '3']", "A", choice, "Math",
                {1: 0}),
            row(2, "Which has more squares?", "['<image 1>', '<image 2>']", "B", choice, "Math",
                {1: 0, 2: 3}),
            row(3, "How many squares are in <image 1>?", "[]", "3", words, "Math", {1: 2}),
        ],
    )  # fmt: skip
    parquet(
        FOLDER / "mmmu/Art_Theory/validation-00000-of-00001.parquet",
        [
            row(1, "Which colour is in <image 1>?", "['red', 'orange', 'blue', 'grey']", "B",
                choice, "Art_Theory", {1: 3}),
            row(2, "Name the colour in <image 1>.", "[]", "purple", words, "Art_Theory", {1: 4}),
        ],
    )  # fmt: skip


def mmbench() -> None:
    names = [
        "index", "question", "hint", "A", "B", "C", "D", "answer", "category", "image", "source",
        "l2-category", "comment", "split",
    ]  # fmt: skip
    image = [base64.b64encode(encoded(number)).decode() for number in range(2)]
    shared = ["colour", "squares", "nan", "attribute", "nan", "dev"]
    asked, hint = "Which colour has the square?", "Look at the middle."

    def row(index, hint, options, answer, shown):
        category, source, comment, level, _, split = shared
        return [
            index,
            asked,
            hint,
            *options,
            answer,
            category,
            shown,
            source,
            level,
            comment,
            split,
        ]

    rows = [
        row(241, "nan", ["red", "green", "nan", "nan"], "A", image[0]),
        row(252, hint, ["red", "green", "blue", "grey"], "B", image[1]),
        row(1_000_241, "nan", ["green", "red", "nan", "nan"], "B", "241"),
        row(1_000_252, hint, ["green", "blue", "grey", "red"], "A", "252"),
        row(2_000_252, hint, ["blue", "grey", "red", "green"], "D", "252"),
    ]
    path = FOLDER / "mmbench/MMBench_DEV_EN.tsv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows([names, *rows])


def mathvista() -> None:
    def row(number, kind, answer_type, answer, hint, choices=None, precision=None):
        listed = "".join(f"\n({chr(65 + i)}) {one}" for i, one in enumerate(choices or []))
        question = f"How much is it in picture {number}?"
        query = f"Hint: {hint}\nQuestion: {question}" + (f"\nChoices:{listed}" if listed else "")
        return {
            "pid": str(number), "question": question, "image": f"images/{number}.png",
            "decoded_image": hugging_face_picture(number - 1), "choices": choices, "unit": None,
            "precision": precision, "answer": answer, "question_type": kind,
            "answer_type": answer_type,
            "metadata": {"task": ("counting", "measuring")[number % 2], "split": "testmini"},
            "query": query,
        }  # fmt: skip

    letter = (
        "Please answer the question and provide the correct option letter, e.g., A, B, C, D, at"
        " the end."
    )
    whole = (
        "Please answer the question requiring an integer answer and provide the final value,"
        " e.g., 1, 2, 3, at the end."
    )
    parquet(
        FOLDER / "mathvista/data/testmini-00000-of-00001-0123456789abcdef.parquet",
        [
            row(1, "free_form", "integer", "1", whole),
            row(2, "multi_choice", "text", "two", letter, ["one", "two", "three"]),
            row(3, "free_form", "float", "1.5", "A number with one decimal place.", None, 1.0),
            row(4, "multi_choice", "text", "8", letter, ["4", "8"]),
            row(5, "free_form", "list", "[1, 2]", "A Python list."),
        ],
    )


def mathverse() -> None:
    versions = ("Text Dominant", "Text Lite", "Vision Intensive", "Vision Dominant", "Vision Only")
    records = []
    for number, version in enumerate(versions):
        folder = {3: "images_version_5", 4: "images_version_6"}.get(number, "images_version_1-4")
        save(FOLDER / "mathverse/images" / folder / "image_1.png", 2)
        question = "" if number == 4 else "How many squares are there?"
        ask = "Please first conduct reasoning, and then answer the question."
        records.append(
            {
                "sample_index": str(number + 1), "problem_index": "1", "problem_version": version,
                "question": question, "image": f"{folder}/image_1.png", "answer": "3",
                "question_type": "free-form",
                "metadata": {"split": "testmini", "source": "ours", "subject": "Plane Geometry",
                             "subfield": "Length"},
                "query_wo": question, "query_cot": f"{ask}\nQuestion: {question}",
                "question_for_eval": "How many squares are there?",
            }
        )  # fmt: skip
    write_json(FOLDER / "mathverse/testmini.json", records)


def chartqa() -> None:
    for number in range(5):
        save(FOLDER / f"chartqa/test/png/{number}.png", number)
    entries = [
        {
            "imgname": f"{number}.png",
            "query": "How many squares are there?",
            "label": f"{number + 1}",
        }
        for number in range(5)
    ]
    entries[1] |= {"query": "Which colour is it?", "label": "Green"}
    entries[4] |= {"query": "Which share is purple?", "label": "100%"}
    write_json(FOLDER / "chartqa/test/test_human.json", entries[:2])
    write_json(FOLDER / "chartqa/test/test_augmented.json", entries[2:])


def docvqa() -> None:
    entries = []
    for number, colour in enumerate(COLOURS):
        save(FOLDER / f"docvqa/documents/{number}.png", number)
        entries.append(
            {
                "questionId": 49_100 + number, "question": "Which colour is printed?",
                "image": f"documents/{number}.png", "docId": number,
                "ucsf_document_id": f"ours{number}", "ucsf_document_page_no": "1",
                "answers": [colour, f"{colour} squares"], "data_split": "val",
            }
        )  # fmt: skip
    document = {"dataset_name": "docvqa", "dataset_version": "1.0", "dataset_split": "val"}
    write_json(FOLDER / "docvqa/val_v1.0.json", document | {"data": entries})


def refcoco() -> None:
    """Three sets with the same pictures; expressions of RefCOCO+ name no places."""
    unc, umd = ("val", "val", "testA", "testB", "train"), ("val", "val", "test", "test", "train")
    refer("refcoco", "refs(unc).p", unc, "the one at the left")
    refer("refcoco+", "refs(unc).p", unc, "the one that is flat")
    refer("refcocog", "refs(umd).p", umd, "a square of one colour on a sheet of white paper")


def refer(name: str, file: str, splits: tuple[str, ...], second: str) -> None:
    refs, boxes, images = [], [], []
    for number, split in enumerate(splits):
        shown = f"COCO_train2014_{number:012}.png"
        save(FOLDER / "refcoco/train2014" / shown, number)
        images.append({"id": number, "file_name": shown, "width": 40, "height": 24})
        boxes.append({"id": 10 + number, "image_id": number, "bbox": [1, 8, 6.0, 7.0]})
        said = (f"{COLOURS[number]} square", second)[: 2 if number == 0 else 1]
        refs.append(
            {
                "ref_id": number, "ann_id": 10 + number, "image_id": number, "split": split,
                "category_id": 1, "file_name": shown,
                "sentences": [
                    {"sent": words, "sent_id": 100 + 10 * number + i, "raw": words,
                     "tokens": words.split()}
                    for i, words in enumerate(said)
                ],
                "sent_ids": [100 + 10 * number + i for i in range(len(said))],
            }
        )  # fmt: skip
    folder = FOLDER / "refcoco" / name
    write_json(folder / "instances.json", {"images": images, "annotations": boxes})
    (folder / file).write_bytes(pickle.dumps(refs, protocol=0))  # as in the release


for make in (
    geneval, dpg, mjhq, imgedit, mme, mmmu, mmbench, mathvista, mathverse, chartqa, docvqa, refcoco,
):  # fmt: skip
    make()
