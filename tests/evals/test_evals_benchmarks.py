# SPDX-License-Identifier: Apache-2.0
"""Official files are read, exports have official layouts, and known answers score as expected."""

import csv
import io
import json
import pathlib
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image

from sparse_lavida_jax import config
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.evals import benchmark, benchmarks, official_files, scorers
from sparse_lavida_jax.evals.benchmark import JUDGED, Answer
from sparse_lavida_jax.evals.benchmarks import imgedit, mathvista, mmbench, mme, mmmu, refcoco
from sparse_lavida_jax.evals.official_files import EvaluationError

SAMPLES = pathlib.Path(__file__).parents[1] / "data" / "evals"
SPLITS = {
    "chartqa": "test", "docvqa": "val", "mathvista": "testmini", "mmbench": "MMBench_DEV_EN",
    "mmmu": "validation", "refcoco": "refcoco/val",
}  # fmt: skip
PARQUET = {"mathvista", "mmmu"}
SHARES = (0.0, 1e-05, 0.5, 1.0, 1 / 3)  # of correct answers, for DPG-Bench
NAMES = sorted({*benchmarks.names()} - {"scenes", "art"})


def load(name, data=None, **changes):
    if name in PARQUET:
        pytest.importorskip("pyarrow", reason="Parquet: pip install '.[data]'")
    evaluate = {"benchmark": name, "data": str(data or SAMPLES / name)}
    evaluate["split"] = SPLITS.get(name, "")
    settings = config.build(config.Config, {"evaluate": evaluate | changes})
    return benchmarks.find(settings.evaluate.benchmark)(settings)


def answers(bench, outputs):
    """Answers with these outputs; a text stands for itself."""
    made = [{"text": one} if isinstance(one, str) else one for one in outputs]
    return [Answer(item, 0, output, 0.0) for item, output in zip(bench.items, made, strict=True)]


def scored(bench, outputs, folder):
    """The value and the count of each score by its name."""
    found = bench.metrics(answers(bench, outputs), folder)
    assert len({score.name for score in found}) == len(found)
    return {score.name: (score.value, score.count) for score in found}


def exported(bench, outputs, name):
    """A file of the export, parsed if it is JSON."""
    return bench.export(answers(bench, outputs))[name]


def judged(folder, name, contents):
    (folder / JUDGED).mkdir(exist_ok=True)
    path = folder / JUDGED / name
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))


# ---------------------------------------------------------------------------------------------
# Every benchmark.


@pytest.mark.parametrize("name", NAMES)
def test_items_are_numbered_and_show_their_images(name):
    bench = load(name)
    assert [item.index for item in bench.items] == list(range(len(bench.items)))
    assert len({item.key for item in bench.items}) == len(bench.items)
    for item in bench.items:
        assert item.words.strip()
        for image in item.load():
            assert image.shape == (24, 40, 3)
    shows = isinstance(bench, benchmark.QuestionBenchmark) or name in ("imgedit", "refcoco")
    assert all(bool(item.load()) == shows for item in bench.items)
    few = load(name, limit=1)
    count = 2 if name == "mmbench" else 1  # all orders of a question
    assert few.items[0].key == bench.items[0].key and len(few.items) == count


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_named_with_where_to_get_it(name, tmp_path):
    bench = benchmarks.find(name)
    source = bench.source
    for data, told in (("", "needs --config.evaluate.data"), ("nowhere", "there is no folder")):
        with pytest.raises(EvaluationError) as error:
            bench(config.Config(evaluate=config.Evaluate(data=data, split=SPLITS.get(name, ""))))
        assert told in str(error.value) and source in str(error.value)
    with pytest.raises(EvaluationError) as error:
        load(name, tmp_path)
    assert source in str(error.value)


def test_a_benchmark_that_does_not_exist_lists_those_that_do():
    with pytest.raises(
        EvaluationError, match=r"no benchmark 'genevil'\. There are: art, chartqa, docvqa"
    ):
        load("genevil", SAMPLES)


def test_seeds_of_items_do_not_overlap():
    bench = load("geneval", num_images=4)
    assert [bench.seed_of(item) for item in bench.items] == [0, 4, 8, 12, 16]
    assert [len(batch) for batch in bench.batches(bench.items)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("name", "file", "change", "told"),
    [
        ("geneval", "evaluation_metadata.jsonl", ('"tag"', '"group"'), "has no tag; it has group"),
        ("geneval", "evaluation_metadata.jsonl", ("{", "["), "is no JSONL"),
        ("geneval", "evaluation_metadata.jsonl", ("prompt", "\udcff"), "is no text in UTF-8"),
        ("dpg", "prompts/0.txt", ("a", "\udcff"), "0.txt is no text in UTF-8"),
        ("mme", "color/0000.txt", ("Yes", "\udcff"), "0000.txt is no text in UTF-8"),
        ("mjhq", "meta_data.json", ('"art"', '"../../art"'), "which is no file inside it"),
        ("imgedit", "basic_edit.json", ('"72"', '"../72"'), "which is no file inside it"),
        (
            "chartqa",
            "test/test_human.json",
            ('"imgname": "', '"imgname": 7, "n": "'),
            "names the image 7",
        ),
        ("mmbench", "MMBench_DEV_EN.tsv", ("\n252\t", "\ntwo\t"), "has no number: 'two'"),
        ("mjhq", "meta_data.json", ('"prompt"', '"text"'), "has no prompt"),
        ("imgedit", "basic_edit.json", ("plain/", "../"), "is no file inside it"),
        ("imgedit", "basic_edit.json", ("000000", "999999"), "999999.png. Take Benchmark/Basic"),
        ("mme", "color/0000.txt", ("Yes", "Maybe"), "a question, a tab, and Yes or No"),
        ("mmbench", "MMBench_DEV_EN.tsv", ("category", "kind"), "has no category"),
        ("mathverse", "testmini.json", ("query_cot", "query"), "has no query_cot"),
        ("chartqa", "test/test_human.json", ("label", "answer"), "has no label"),
        ("docvqa", "val_v1.0.json", ('"data"', '"entries"'), "has no data"),
        ("docvqa", "val_v1.0.json", ("}", ""), "is no JSON"),
        ("refcoco", "refcoco/instances.json", ('"id": 10', '"id": 99'), "has no box"),
    ],
)
def test_wrong_files_are_named(tmp_path, name, file, change, told):
    data = shutil.copytree(SAMPLES / name, tmp_path / name)
    path = data / file
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change), errors="surrogateescape")
    with pytest.raises(EvaluationError) as error:
        load(name, data)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("name", "file"), [("mjhq", "meta_data.json"), ("mathverse", "testmini.json")]
)
def test_json_of_another_kind_is_named(tmp_path, name, file):
    data = shutil.copytree(SAMPLES / name, tmp_path / name)
    (data / file).write_text("7")
    with pytest.raises(EvaluationError, match=rf"{file} holds 7, where records belong"):
        load(name, data)


def test_a_mistake_in_json_lines_is_reported_with_its_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "one\u2028line"}\n\n{"a": 2\n', encoding="utf-8")
    with pytest.raises(EvaluationError, match=r"Expecting ',' delimiter in line 3, column 8\. Get"):
        official_files.read(path)
    path.write_text('{"a": "one\u2028line"}\n', encoding="utf-8")
    assert official_files.read(path) == [{"a": "one\u2028line"}]


def test_large_cells_are_allowed_while_a_table_is_read_alone(tmp_path):
    path, limit = tmp_path / "a.tsv", csv.field_size_limit()
    path.write_text(f"a\tb\n1\t{(limit + 1) * 'x'}\n")
    assert len(official_files.read(path)[0]["b"]) == limit + 1
    assert csv.field_size_limit() == limit


def test_an_image_that_is_not_there_is_missed_when_it_is_asked_for(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="Parquet: pip install '.[data]'")
    import pyarrow.parquet

    data = shutil.copytree(SAMPLES / "mmmu", tmp_path / "mmmu")
    path = data / "Math/validation-00000-of-00001.parquet"
    rows = pyarrow.parquet.read_table(path).to_pylist()
    for row in rows[:2]:  # the question of the first shows only image 1
        row["image_2"] = {"bytes": None, "path": "gone.png"}
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    *_, first, second, _ = load("mmmu", data).items
    assert len(first.load()) == 1
    with pytest.raises(EvaluationError) as error:
        second.load()
    assert str(error.value) == (
        f"{path}, row 1, image_2 holds no image: the image gone.png is only named, and no folder of"
        " images is given. Get the file again."
    )


def test_a_mark_of_byte_order_is_no_word(tmp_path):
    data = shutil.copytree(SAMPLES / "dpg", tmp_path / "dpg")
    path = data / "prompts" / "0.txt"
    words = path.read_text()
    path.write_bytes(b"\xef\xbb\xbf" + words.encode())
    assert load("dpg", data).items[0].words == words.strip()


def test_hidden_colours_are_shown_as_lmms_eval_shows_them(tmp_path):
    path = tmp_path / "0.png"
    Image.new("RGBA", (2, 1), (9, 8, 7, 0)).save(path)
    (shown,) = benchmark.Item("0", "", {}, (path,)).load()
    assert shown[0, 0].tolist() == [9, 8, 7]
    assert image_files.read(path)[0, 0].tolist() == [255, 255, 255]


# ---------------------------------------------------------------------------------------------
# Images and their judges.


def test_geneval_is_the_mean_of_its_groups(tmp_path):
    bench = load("geneval", num_images=2)
    assert bench.items[1].words == "a photo of two squares"
    drawn = [np.zeros((2, 2, 3), np.uint8)] * 2
    outputs = [{"files": [*bench.keep(item, drawn)]} for item in bench.items]
    assert outputs[3] == {"files": ["00003/samples/00000.png", "00003/samples/00001.png"]}
    assert scored(bench, outputs, tmp_path) == {}
    metadata = json.loads(exported(bench, outputs, "00001/metadata.jsonl"))
    assert metadata["exclude"] == [{"class": "square", "count": 3}]
    right = {"00000": 2, "00001": 1, "00002": 0, "00003": 0, "00004": 2}
    lines = [
        json.dumps({"filename": f"/far/away/{file}", "tag": item.record["tag"], "prompt": "",
                    "correct": i < right[item.key]})
        for item, output in zip(bench.items, outputs, strict=True)
        for i, file in enumerate(output["files"])
    ]  # fmt: skip
    judged(tmp_path, "results.jsonl", "\n".join(lines))
    assert scored(bench, outputs, tmp_path) == {
        "overall, mean of the groups": ((1 + 0.75 + 0 + 0) / 4, 4),
        "- single_object": (1.0, 2), "- counting": (0.75, 4), "- colors": (0.0, 2),
        "- two_object": (0.0, 2), "right images": (0.5, 10),
    }  # fmt: skip
    judged(tmp_path, "results.jsonl", "\n".join(lines[1:]))
    with pytest.raises(EvaluationError, match="judges 9 images, and 10 were drawn"):
        scored(bench, outputs, tmp_path)


def test_dpg_draws_four_images_on_a_sheet(tmp_path):
    bench = load("dpg", num_images=4)
    drawn = [np.full((3, 5, 3), i, np.uint8) for i in range(1, 5)]
    ((name, page),) = bench.keep(bench.items[2], drawn).items()
    assert name == "2.png" and page.shape == (6, 10, 3)
    corners = [page[y, x, 0] for y, x in ((0, 0), (0, 9), (5, 0), (5, 9))]
    assert corners == [1, 2, 3, 4]  # the order in which the official script crops them
    ((_, alone),) = bench.keep(bench.items[2], drawn[:1]).items()
    assert alone is drawn[0]
    with pytest.raises(EvaluationError, match="num_images=5"):
        load("dpg", num_images=5)


def test_dpg_reads_what_the_official_script_wrote(tmp_path):
    bench = load("dpg", num_images=2)
    outputs = [{"files": [f"{item.key}.png"]} for item in bench.items]
    lines = [f"/x, y/{i}.png, 1.0, {share}, {(1 + share) / 2}" for i, share in enumerate(SHARES)]
    end = ["L1 category scores:", "\tother: 50.8", "Image path: /x, y", "DPG-Bench score: 7.5"]
    judged(tmp_path, "dpg.txt", "\n".join([*lines, *end]))
    value = 100 * (5 + sum(SHARES)) / 10
    assert scored(bench, outputs, tmp_path) == {"DPG-Bench score": (pytest.approx(value), 5)}
    # The script fails on the prompt whose first question is missing.
    judged(tmp_path, "dpg.txt", "\n".join([*lines[1:], *end]))
    value = 100 * (4 + sum(SHARES[1:])) / 8
    assert scored(bench, outputs, tmp_path) == {"DPG-Bench score": (pytest.approx(value), 4)}
    for left, told in (
        (lines[2:], r"says nothing of 2 images, 0\.png"),
        ([*lines[:4], "/x, y/4.png, 1.0, 1.0"], r"judges 1 images of 4\.png, and 2 were drawn"),
    ):
        judged(tmp_path, "dpg.txt", "\n".join(left))
        with pytest.raises(EvaluationError, match=told):
            scored(bench, outputs, tmp_path)


def test_mjhq_scores_features(tmp_path):
    bench = load("mjhq")
    outputs = [
        {"files": [*bench.keep(item, [np.zeros((1, 1, 3), np.uint8)])]} for item in bench.items
    ]
    assert scored(bench, outputs, tmp_path) == {}
    lines = exported(bench, outputs, "prompts.jsonl").splitlines()
    assert json.loads(lines[1]) == {
        "name": "2e", "file": "art/2e.png", "category": "art",
        "prompt": "a green square on paper",
    }  # fmt: skip
    rng, folder = np.random.default_rng(0), tmp_path / JUDGED
    folder.mkdir()
    drawn, real = rng.normal(size=(5, 3)), rng.normal(size=(7, 3))
    np.savez(folder / "fid.npz", drawn=drawn, real=real)
    names = ["5b", "1f", "2e", "4c", "3d"]
    np.savez(folder / "pickscore.npz", names=names, scores=np.arange(5.0) / 8)
    np.savez(folder / "hps_v3.npz", names=names, scores=np.arange(5.0))
    found = scored(bench, outputs, tmp_path)
    assert found["FID"] == (pytest.approx(scorers.frechet_distance(drawn, real)), 5)
    assert found["pickscore"] == (0.25, 5)
    assert found["hps_v3"] == (2.0, 5)
    last = bench.metrics(answers(bench, outputs), tmp_path)[1:5]  # of hps_v3, after FID
    assert [(one.name, one.value) for one in last] == [
        ("hps_v3", 2.0), ("- animals, hps_v3", 2.5), ("- art, hps_v3", 1.0),
        ("- food, hps_v3", 3.0),
    ]  # fmt: skip
    np.savez(folder / "hps_v3.npz", names=names[:4], scores=np.arange(4.0))
    with pytest.raises(EvaluationError, match="names 4 images, and not the 5"):
        scored(bench, outputs, tmp_path)
    for wrong in (np.zeros((5, 2)), np.zeros(4), np.full(5, np.nan)):
        np.savez(folder / "hps_v3.npz", names=names, scores=wrong)
        with pytest.raises(EvaluationError, match="must give each of its 5 names one finite"):
            scored(bench, outputs, tmp_path)
    np.savez(folder / "hps_v3.npz", names=names)
    with pytest.raises(EvaluationError, match=r"hps_v3\.npz has no scores; it has names"):
        scored(bench, outputs, tmp_path)
    np.savez(folder / "fid.npz", drawn=drawn[:4], real=real)
    with pytest.raises(EvaluationError, match="features of the 5 drawn images; it has 4 rows"):
        scored(bench, outputs, tmp_path)
    (folder / "fid.npz").unlink()
    np.savez(folder / "hps_v3.npz", names=np.array([{}], object))
    with pytest.raises(EvaluationError, match=r"no \.npz of plain arrays"):
        scored(bench, outputs, tmp_path)


def test_imgedit_is_the_mean_of_its_types(tmp_path):
    bench = load("imgedit")
    outputs = [{"files": [f"{item.key}.png"]} for item in bench.items]
    assert scored(bench, outputs, tmp_path) == {}
    points = {"70": (1, 4, 4), "71": (5, 5, 5), "72": (1, 5, 5), "73": (2, 2, 2), "74": (3, 3, 3)}
    said = {
        key: f"Brief reasoning: good: 3\nPrompt Compliance: {a}\nSeamlessness: {b}\nDetail: {c}"
        for key, (a, b, c) in points.items()
    }
    judged(tmp_path, "result.json", said)
    found = scored(bench, outputs, tmp_path)
    assert found["- adjust"] == (3.0, 2)
    assert found["overall, mean of the types"] == (pytest.approx((3 + 5 + 3.67 + 2) / 4), 4)
    assert found["mean of the edits"] == (pytest.approx((3 + 5 + 3.67 + 2 + 3) / 5), 5)
    judged(tmp_path, "result.json", said | {"72": "I'm sorry, I can't assist with that."})
    refused = scored(bench, outputs, tmp_path)
    (left_out,) = (name for name in refused if name.startswith("answers without points"))
    assert found[left_out] == (0.0, 5) and refused[left_out] == (0.2, 5)
    assert refused["mean of the edits"] == (pytest.approx(sum(
        np.mean(points[key]).round(2) for key in points if key != "72") / 4), 4)  # fmt: skip
    judged(tmp_path, "result.json", said | {"72": {"error": "no connection"}})
    with pytest.raises(EvaluationError, match="holds no answer for 72"):
        scored(bench, outputs, tmp_path)
    assert imgedit.judged_points("I cannot judge this.") is None


# ---------------------------------------------------------------------------------------------
# Questions.


def test_mme_adds_accuracy_and_accuracy_plus(tmp_path):
    bench = load("mme")
    assert bench.items[0].words == (
        "Is the square blue?\nAnswer the question using a single word or phrase."
    )
    right = [item.record["answer"] for item in bench.items]
    found = scored(bench, right, tmp_path)
    assert found["perception, 4 of 10 categories"] == (800.0, 10)
    assert "cognition" not in "".join(found)
    always = scored(bench, ["Yes, it is."] * 10, tmp_path)
    assert always["- color"] == (50.0, 4)  # half of them correct, but not both of any image
    lines = exported(bench, ["Yes, it is."] * 10, "color.txt").splitlines()
    assert lines[1] == "0000.png\tIs the square green? Please answer yes or no.\tNo\tYes, it is."
    mixed = [*right[:2], "Yes", "yes", "Yes", "No", *right[6:]]
    assert scored(bench, mixed, tmp_path)["- color"] == (75.0 + 50.0, 4)


@pytest.mark.parametrize(
    ("said", "read"),
    [("Yes.", "yes"), ("no, there is", "no"), ("n", "no"), ("Y", "yes"), ("It is no cat", "other"),
     ("", "other"), ("I think yes", "other"), ("a no", "no")],
)  # fmt: skip
def test_mme_reads_the_beginning_of_an_answer(said, read):
    assert mme.yes_or_no(said) == read


def test_mmmu_asks_and_scores(tmp_path):
    bench = load("mmmu")
    assert [item.key for item in bench.items][:2] == [
        "validation_Art_Theory_1", "validation_Art_Theory_2",
    ]  # fmt: skip
    choice, words = bench.items[0].words, bench.items[1].words
    assert choice == (
        "Which colour is in <image 1>?\nA. red\nB. orange\nC. blue\nD. grey\n\nAnswer with the"
        " option's letter from the given choices directly."
    )
    assert words.endswith("\n\nAnswer the question using a single word or phrase.")
    assert [len(item.load()) for item in bench.items] == [1, 1, 1, 2, 1]
    right = ["B", "It is purple.", "(A)", "B.", "There are 3 squares, so 3"]
    found = scored(bench, right, tmp_path)
    assert found == {"accuracy": (1.0, 5), "- Art_Theory": (1.0, 2), "- Math": (1.0, 3)}
    said = exported(bench, right, "total_val_output.json")
    assert said["validation_Math_1"] == "A" and said["validation_Math_3"] == right[4]
    wrong = ["A", "red", "B", "A", "4"]
    assert scored(bench, wrong, tmp_path)["accuracy"] == (0.0, 5)
    for item in bench.items:  # as the test split has them
        item.record["answer"] = "?"
    assert scored(bench, right, tmp_path) == {}
    interval = {"question_type": "open", "answer": "[4, 5)"}
    assert mmmu.is_right(interval, "[4, 5)", "key") and not mmmu.is_right(interval, "6", "key")


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        ("B", "B"), ("(C) blue", "C"), ("A.", "A"), ("The answer is (B), not (A)", "A"),
        ("Answer: D", "D"), ("first A then C here", "C"),
        ("it must be the dark grey one", "D"), ("red and then the blue in the end", "C"),
    ],
)  # fmt: skip
def test_mmmu_reads_letters_and_the_words_of_options(said, letter):
    options = {"A": "red", "B": "orange", "C": "blue", "D": "grey"}
    assert mmmu.letter_of(said, options, "key") == letter


def test_mmmu_guesses_the_same_every_time():
    options = {"A": "red", "B": "orange", "C": "blue", "D": "grey"}
    guesses = {key: mmmu.letter_of("?", options, key) for key in map(str, range(40))}
    assert {*guesses.values()} == {*options}
    assert guesses == {key: mmmu.letter_of("?", options, key) for key in guesses}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("1,234.567", {1234.57, 1234.0, 234.57}),  # the official patterns find all three
        ("so the result is 12 cm", {"12 cm", 12.0}),
        ("x = 5", {5.0}),
        ("c", {" c", "c "}),
        ("It grows.\ntherefore final answer is 2e3", {2000.0, 3.0}),
        ("So the value is \n12", {"so the value is \n12", 12.0}),  # nothing comes after "is"
    ],
)
def test_mmmu_reads_what_comes_after_is(said, meant):
    assert mmmu.open_answers(said) == meant


def test_mmbench_wants_every_order_right(tmp_path):
    bench = load("mmbench")
    assert bench.items[0].words == (
        "Which colour has the square? There are several options:\nA. red\nB. green\n\nAnswer with"
        " the option's letter from the given choices directly."
    )
    assert bench.items[1].words.startswith("Look at the middle. Which colour")
    np.testing.assert_array_equal(bench.items[2].load()[0], bench.items[0].load()[0])
    right = ["A", "B. green", "(B)", "A", "It is green"]
    found = scored(bench, right, tmp_path)
    assert found["accuracy, right in every order"] == (1.0, 2)
    assert found["- colour"] == (1.0, 2)
    said = [*right[:4], "no idea"]
    found = scored(bench, said, tmp_path)
    assert found["accuracy, right in every order"] == (0.5, 2)
    assert found["accuracy, first order"] == (1.0, 2)
    assert found["answers without a letter, counted wrong"] == (0.2, 5)
    table = io.StringIO(exported(bench, said, "MMBench_DEV_EN.tsv"), newline="")
    lines = list(csv.DictReader(table, delimiter="\t"))
    assert [line["prediction"] for line in lines] == said
    assert lines[4]["index"] == "2000252" and "image" not in lines[0]


def test_mmbench_without_answers_is_handed_in(tmp_path):
    data = shutil.copytree(SAMPLES / "mmbench", tmp_path / "data")
    path = data / "MMBench_DEV_EN.tsv"
    path.write_text(path.read_text().replace("\tanswer\t", "\tkept\t"))
    bench = load("mmbench", data)
    assert scored(bench, ["A"] * 5, tmp_path) == {}
    assert exported(bench, ["A"] * 5, "MMBench_DEV_EN.tsv")


@pytest.mark.parametrize(
    ("said", "letter"),
    [("B", "B"), ("The answer is B.", "B"), ("(C)", "C"), ("A: red", "A"), ("A or B", None),
     ("A square is shown here", None), ("A tree", "A"), ("it is orange", "B"),
     ("red or orange", None)],
)  # fmt: skip
def test_mmbench_reads_one_letter_or_the_words_of_one_option(said, letter):
    assert mmbench.letter_of(said, {"A": "red", "B": "orange", "C": "blue"}) == letter


def test_mathvista_uses_rules_and_what_the_judge_found(tmp_path):
    bench = load("mathvista")
    assert bench.items[1].words.startswith("Hint: Please answer the question and provide the")
    said = ["1", "B", "1.5", 'The answer is "8".', "It is [1, 2] in the end"]
    found = scored(bench, said, tmp_path)
    assert found["accuracy, answers found by rules"] == (0.8, 5)
    assert found["answers that no rule finds, counted wrong"] == (0.2, 5)
    entries = exported(bench, said, "output.json")
    assert entries["5"]["response"] == said[4] and entries["5"]["choices"] is None
    assert entries["3"]["precision"] == 1.0 and "decoded_image" not in entries["3"]
    extracted = ("1.0", "(B) two", "1.52", "8", "[1, 2]")
    for entry, answer in zip(entries.values(), extracted, strict=True):
        entry["extraction"] = answer
    judged(tmp_path, "output.json", entries)
    found = scored(bench, said, tmp_path)
    assert found["accuracy"] == found[next(iter(found))] == (1.0, 5)
    assert (found["- measuring"], found["- measuring, by rules"]) == ((1.0, 3), (2 / 3, 3))
    del entries["2"]["extraction"]
    judged(tmp_path, "output.json", entries)
    with pytest.raises(EvaluationError, match="2, has no extraction"):
        scored(bench, said, tmp_path)
    for item in bench.items:  # as the test split has them
        item.record["answer"] = ""
    assert scored(bench, said, tmp_path) == {}


@pytest.mark.parametrize(
    ("said", "kind", "answer_type", "found", "right"),
    [
        ("two", "multi_choice", "text", "two", True),
        ("(b) two", "multi_choice", "text", "(b) two", True),
        ("I say two", "multi_choice", "text", None, False),
        ('The answer is "tw".', "multi_choice", "text", "tw", True),  # the nearest option
        ("7", "free_form", "integer", "7", False),
        ("7 apples", "free_form", "integer", None, False),
    ],
)
def test_mathvista_has_these_rules(said, kind, answer_type, found, right):
    record = {"question_type": kind, "answer_type": answer_type, "answer": "two",
              "choices": ["one", "two", "three"]}  # fmt: skip
    assert mathvista.extract(said, record) == found
    assert mathvista.is_right(found, record) == right


def test_mathverse_takes_the_judgement(tmp_path):
    bench = load("mathverse")
    said = ["3", "The answer is 3.", "4", "3", "three"]
    assert scored(bench, said, tmp_path) == {"equal text, a lower bound": (0.4, 5)}
    entries = exported(bench, said, "output_testmini.json")
    assert entries[1]["model_answer"] == said[1] and entries[1]["sample_index"] == "2"
    for entry, right in zip(entries, (1, 1, 0, 1, 1), strict=True):
        entry["judgement"] = right
    judged(tmp_path, "scores_testmini.json", entries)
    found = scored(bench, said, tmp_path)
    assert found["accuracy"] == (0.8, 5) and found["- Vision Intensive"] == (0.0, 1)
    assert next(iter(found)) == "accuracy" and next(reversed(found)) == "equal text, a lower bound"
    judged(tmp_path, "scores_testmini.json", entries[:4])
    with pytest.raises(EvaluationError, match="no judgement of 1 answers, 5 among them"):
        scored(bench, said, tmp_path)


def test_images_of_mathverse_may_lie_next_to_its_questions(tmp_path):
    data = shutil.copytree(SAMPLES / "mathverse", tmp_path / "data")
    for folder in (data / "images").iterdir():
        folder.rename(data / folder.name)
    assert load("mathverse", data).items[4].load()[0].shape == (24, 40, 3)
    shutil.rmtree(data / "images_version_6")
    with pytest.raises(EvaluationError, match=r"images/images_version_6/image_1\.png\. Take"):
        load("mathverse", data)


def test_chartqa_is_relaxed(tmp_path):
    bench = load("chartqa")
    said = ["1.04", "green", "3", "4.3", "97%"]
    found = scored(bench, said, tmp_path)
    assert found == {"relaxed accuracy": (0.8, 5), "- human": (1.0, 2), "- augmented": (2 / 3, 3)}
    assert exported(bench, said, "test_human.json")[1] == {
        "imgname": "1.png", "query": "Which colour is it?", "label": "Green",
        "prediction": "green",
    }  # fmt: skip


def test_docvqa_is_anls_and_a_submission(tmp_path):
    bench = load("docvqa")
    said = ["red", "Green Squares", "blau", "?", "purple"]
    found = scored(bench, said, tmp_path)
    assert found == {"ANLS": (pytest.approx((1 + 1 + 0.5 + 0 + 1) / 5), 5)}
    assert exported(bench, said, "val_submission.json")[2] == {
        "questionId": 49102,
        "answer": "blau",
    }


@pytest.mark.parametrize(
    ("name", "second", "other", "others"),
    [
        ("refcoco", "the one at the left", "testA", ["blue square"]),
        ("refcoco+", "the one that is flat", "testB", ["orange square"]),
        ("refcocog", "a square of one colour on a sheet of white paper", "test",
         ["blue square", "orange square"]),
    ],
)  # fmt: skip
def test_refcoco_counts_boxes_that_overlap_by_half(tmp_path, name, second, other, others):
    bench = load("refcoco", split=f"{name}/val")
    assert [item.words for item in bench.items] == ["red square", second, "green square"]
    assert bench.items[0].record["box"] == [1, 8, 7.0, 15.0]
    boxes = [[1.0, 8.0, 7.0, 15.0], [1.0, 8.0, 4.0, 15.0], None]
    outputs = [{"box": box} for box in boxes]
    found = scored(bench, outputs, tmp_path)
    assert found["P@0.5"] == (pytest.approx(2 / 3), 3)
    assert found["mean overlap"] == (pytest.approx(0.5), 3)
    assert found["phrases without a box"] == (pytest.approx(1 / 3), 3)
    entries = exported(bench, outputs, f"{name}_val.json")
    assert [entry["predicted"] for entry in entries] == boxes
    items = load("refcoco", split=f"{name}/{other}").items
    assert [item.words for item in items] == others
    with pytest.raises(EvaluationError, match="has no item"):
        load("refcoco", split=f"{name}/testC")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_of_data_is_read_as_it_is(tmp_path, protocol):
    same = {"a": 1, "long": 2**40, "negative": -5, "float": 1.5, "text": "é", "none": None}
    refs = [same, {"again": same, "pair": (1, [True, False]), "many": list(range(300))}, {}, []]
    path = tmp_path / "refs.p"
    path.write_bytes(pickle.dumps(refs, protocol=protocol))
    assert refcoco.read_plain_pickle(path) == refs


def test_a_pickle_with_a_program_is_refused_and_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return pathlib.Path.touch, (tmp_path / "ran",)

    path = tmp_path / "refs.p"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps([Evil()], protocol=protocol))
        with pytest.raises(EvaluationError, match="as they were released"):
            refcoco.read_plain_pickle(path)
    assert not (tmp_path / "ran").exists()
    path.write_bytes(b"no pickle")
    with pytest.raises(EvaluationError, match="Download it again"):
        refcoco.read_plain_pickle(path)
