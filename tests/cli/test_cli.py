# SPDX-License-Identifier: Apache-2.0
"""Command lines are parsed, and errors are reported in one sentence. No model is loaded."""

import importlib.metadata
import io
import json
import logging
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import rich.console
import staged

import sparse_lavida_jax
from sparse_lavida_jax import config, main
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.cli import commands, doctor, modes, outputs, parser, program, terminal
from sparse_lavida_jax.cli.usage_errors import UsageError
from sparse_lavida_jax.data import files, image_files
from sparse_lavida_jax.inference.requests import TASK_SPECS, Request
from sparse_lavida_jax.inference.results import Origin, Result
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.scenes import vocabulary

IMAGE = np.full((4, 6, 3), 9, np.uint8)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Calls of a fake pipeline: task, words, images, options."""
    monkeypatch.chdir(tmp_path)
    image_files.write(tmp_path / "a.png", IMAGE)
    calls = []

    class Pipeline(SparseLaViDa):
        settings = config.Config()

        def __init__(self, name, batch_size, **_):
            calls.append(("load", name, batch_size))

        def requests(self, task, words=None, shown=None, **options):
            assert set(options) <= TASK_SPECS[task].takes
            given = {key: value for key, value in options.items() if value is not None}
            calls.append((task, words, shown, given))
            return [Request(task=task, words="a")]

        def run(self, requests, callback=None):
            task = requests[0].task
            drawn = {"pixels": (IMAGE,), "records": ({},)} if TASK_SPECS[task].draws else {}
            settings = config.Sampling()
            return Result(task, ("a",), (0,), settings, Origin(), {}, texts=("b",), **drawn)

    monkeypatch.setattr(SparseLaViDa, "from_pretrained", Pipeline)
    return calls


def run(*words):
    return program.main(["sparse-lavida", *map(str, words)])


def complaint(capsys, *words, code=2):
    assert run(*words) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("sparse_lavida_jax: ")
    assert len(printed.err.splitlines()) == 1
    return printed.err


@pytest.mark.parametrize("name", parser.COMMANDS)
def test_every_command_has_help_with_an_example_that_can_be_read(name, capsys):
    assert run(name, "--help") == 0
    printed = capsys.readouterr().out
    assert f"example: sparse-lavida {name}" in printed
    assert "--debug" in printed
    words = shlex.split(re.split(" [<>]", parser.COMMANDS[name].example)[0])
    parser.Parser(name).parse_args(words)


@pytest.mark.parametrize("name", parser.MODES)
def test_every_mode_has_help_of_its_own(name, capsys):
    assert run(name, "--help") == 0
    printed = capsys.readouterr().out
    assert f"example: sparse-lavida {name} {parser.MODES[name].example}" in printed
    made = parser.Parser(name)
    for argument in made.taken:
        assert argument in made.by_place or f"--{argument.key.replace('_', '-')}" in printed
    assert ("--config.SECTION.NAME" in printed) == made.takes_settings
    assert ("int8" in printed) == (name == "export")
    asked = made.parse_args(shlex.split(parser.MODES[name].example))
    assert getattr(asked, made.by_place[0].key)


@pytest.mark.parametrize("name", ["generate", "ask", "chat"])
def test_the_help_of_a_task_says_what_the_bundled_model_knows(name, capsys):
    assert run(name, "--help") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"The bundled model, scenes, knows {vocabulary.of_source('scenes').knows}." in printed


def test_the_overview_lists_all_commands(capsys):
    assert run() == run("--help") == 0
    printed = capsys.readouterr().out
    for name in (*parser.COMMANDS, *parser.MODES):
        assert name in printed


def test_every_mode_of_main_is_a_command(capsys):
    assert sorted(parser.MODES) == sorted(modes.RUN)
    asked = parser.Parser("sample").parse_args(["scenes", "a red circle", "--seed=3"])
    words = ["--mode=sample", "--checkpoint=scenes", "--prompt=a red circle", "--seed=3"]
    same, _ = main.parse(["main", *words])
    assert (asked.checkpoint, asked.prompt) == (same.checkpoint, same.prompt)
    assert (asked.seed, same.command) == (same.seed, "--mode=sample")
    assert "`sparse-lavida sample` needs the argument checkpoint:" in complaint(capsys, "sample")
    for name, needs in (("verify", "src: a model folder"), ("train", "config or --data=FOLDER")):
        assert f" needs the argument {needs}" in complaint(capsys, name)
    for name in ("verify", "evaluate", "prepare"):
        example = f"For example: `sparse-lavida {name} {parser.MODES[name].example}`."
        assert complaint(capsys, name).endswith(f"{example}\n")


def test_a_mode_takes_settings_with_a_space_or_with_an_equals_sign():
    """The help writes `--data DATA`."""
    for line in (
        "--data prepared --config.train.seconds 9 --distributed configs/scenes.py --init-from=a",
        "configs/scenes.py --data=prepared --config.train.seconds=9 --distributed --init-from a",
    ):
        asked = parser.Parser("train").parse_args(line.split())
        assert (asked.config, asked.data, asked.init_from) == ("configs/scenes.py", "prepared", "a")
        assert asked.distributed and asked.overrides == ["--config.train.seconds=9"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["generate"], "`sparse-lavida generate` needs a prompt"),
        (["generate", " "], "the prompt is empty"),
        (["generate", "a", "--size=wide"], "--size: 'wide' is not a size such as 512x512."),
        (["generate", "a", "--out=a.bmp"], "its name must end in .png"),
        (["verify", "data"], "`sparse-lavida train --data=data` trains one"),
        (["generate", "a", "--save-steps=a.png"], "its name must end in .gif"),
        (
            ["generate", "a", f"--layout={'<LOC_1>' * 4}", "--no-layout"],
            "not allowed with argument --layout",
        ),
        (["generate", "a", "--batch=x.txt"], "leave those of the command line out"),
        (["generate", "--batch=x.csv"], "must end in .txt or .jsonl"),
        (["generate", "--batch=missing.txt"], "--batch=missing.txt cannot be read"),
        (["generate", "a", "--batch-size=0"], "--batch-size=0 is out of range: 1 to 1024"),
        (["generate", "a", f"--size={'1' * 5000}"], f"{'1' * 400}"),
        (["generate", "a \udc80"], "character 3 of the prompt is half a character"),
        (["generate", "--replay=missing.png"], "there is no image missing.png."),
        (["generate", "a", "--replay=a.png"], "leave the prompt out"),
        (["generate", "--replay=a.png", "--num-images=2"], "leave --num-images out"),
        (["replay", "a.png", "--seed=1"], "unrecognized arguments: --seed=1"),
        (["generate", "a", "--checkpoint="], "argument --checkpoint: it is empty: give a value"),
        (["generate", "a", "--layout", " "], "argument --layout: it is empty"),
        (["generate", "a", "--layout=a red circle 16 16"], "it has no box. It is a layout to"),
        (["ask", "missing.png"], "`sparse-lavida ask` needs a question after the image missing"),
        (["chat", "--out=a.png"], "--out=a.png is no folder"),
        (["chat", "--out=../new"], "there is no folder ../new, and none is created outside the"),
        (["generate", "a", "--out=../new/a.png"], "create it first (mkdir -p ../new), or choose"),
        (["generate", "a", "--save-steps=../new/a.gif"], "there is no folder ../new"),
        (["ask", "a", "--layout-temperature=1"], "unrecognized arguments: --layout-temperature=1"),
        (["edit", "a.png", "a", "--layout-temperature=1"], "unrecognized arguments"),
        (["edit", "a.png"], "needs an image and a prompt"),
        (["ask", __file__], f"`sparse-lavida ask` needs a question after the image {__file__}."),
        (["genrate", "a"], "there is no command 'genrate'. Did you mean 'generate'?"),
        (["xyz"], "there is no command 'xyz'. `sparse-lavida --help` lists all commands."),
        (["inpaint", "a.png", "b", "--box=1,x"], "--box: '1,x' is not a box such as 16,16,48,48."),
        (["ground", "a.png"], "the following arguments are required: phrases"),
        (["doctor", "--sed"], "unrecognized arguments: --sed. See `sparse-lavida doctor --help`."),
        (["generate", "a", "--sed=1"], "unrecognized arguments: --sed=1. Did you mean --seed?"),
        (["verify", "a", "--dst=b"], "`sparse-lavida verify` takes the argument src. See"),
    ],
)
def test_a_command_line_with_a_mistake_is_reported(asked, capsys, tmp_path, words, part):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mixture.json").touch()
    assert part in complaint(capsys, *words)


def test_a_turn_takes_no_words_that_mean_nothing(asked, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("caption in words of mine\n"))
    assert "'caption' takes no words: leave 'in" in complaint(capsys, "chat", "--image=a.png")


def test_lines_of_a_conversation_may_start_with_a_byte_order_mark(asked, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffgenerate a\n\ufeffgenerate b\u2028c\n"))
    assert run("chat") == 0
    assert [call[1] for call in asked if call[0] == "generate"] == ["a", "b\u2028c"]


def test_a_typed_conversation_goes_on_after_a_mistake(asked, capsys, monkeypatch):
    typed = io.StringIO("hello there\ncaption in words of mine\n")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)
    assert run("chat", "--image=a.png") == 0
    first, second, third = capsys.readouterr().err.splitlines()
    assert "such as: generate two red circles" in first
    assert "there is no task 'hello'" in second
    assert "'caption' takes no words" in third


def test_the_version_is_reported(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"{sparse_lavida_jax.__version__}\n"


def test_a_device_that_is_not_there_is_reported_with_what_to_do(monkeypatch, capsys):
    def missing(*_):
        raise RuntimeError("Unable to initialize backend 'cuda': no such platform.")

    monkeypatch.setattr(commands, "run", missing)
    said = complaint(capsys, "doctor", code=1)
    assert "jax cannot use the device that was asked for: Unable to initialize backend" in said
    assert "JAX_PLATFORMS=cpu takes the CPU" in said


def test_a_platform_without_a_package_is_reported_with_what_to_do():
    """Then jax fails an assertion of its own, without a message."""
    words = [sys.executable, "-m", "sparse_lavida_jax", "doctor"]
    surroundings = os.environ | {"JAX_PLATFORMS": "cuda"}
    done = subprocess.run(words, env=surroundings, capture_output=True, text=True)
    if done.returncode == 0:
        pytest.skip("needs a machine without a CUDA GPU")
    assert "jax cannot use the device that was asked for: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("trouble", "code", "told"),
    [
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (model_folder.WriteError("the disk has 0 MB free."), 1, "has 0 MB free"),
        (model_folder.CheckpointError("there is no model."), 2, "there is no model"),
        (MemoryError(), 1, "there is not enough memory: lower train.batch_size"),
        (ValueError("five"), 1, "an error of the program: ValueError: five Run it with --debug"),
        (KeyboardInterrupt(), 130, "stopped."),
    ],
)
def test_a_mode_that_fails_says_so_as_a_command_does(monkeypatch, capsys, trouble, code, told):
    seen = []

    def fail(name, asked):
        seen.append((name, asked.config, asked.overrides))
        raise trouble

    monkeypatch.setattr(modes, "run", fail)
    words = ["train", "configs/scenes.py", "--config.seed=1"]
    assert told in complaint(capsys, *words, code=code)
    with pytest.raises(type(trouble)):
        run(*words, "--debug")
    assert seen == [("train", "configs/scenes.py", ["--config.seed=1"])] * 2


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("train", "What is finished is kept, and the same command goes on."),
        ("prepare", "What is finished is kept, and the same command goes on."),
        ("convert", "Nothing was written."),
    ],
)
def test_a_mode_that_is_stopped_says_what_is_kept(monkeypatch, capsys, mode, told):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(modes.RUN, mode, stop)
    words = ["configs/scenes.py"] if mode == "train" else ["--src=mixture.yaml", "--dst=b"]
    assert complaint(capsys, mode, *words, code=130).endswith(f": stopped. {told}\n")


@pytest.mark.parametrize(("found", "told"), [("0.4.30", "this is jax 0.4.30"), (None, "is none")])
def test_an_old_jax_is_reported_with_what_to_install(monkeypatch, found, told):
    def version(_):
        if found is None:
            raise importlib.metadata.PackageNotFoundError
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ImportError, match=f"{told}: pip install -U 'jax>=0.10.2'"):
        sparse_lavida_jax._check_jax()


@pytest.mark.parametrize("found", ["0.10.2", "0.11.0.dev20260101", "1.0"])
def test_a_new_jax_is_fine(monkeypatch, found):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: found)
    sparse_lavida_jax._check_jax()


def test_options_are_handed_on(asked, capsys):
    words = ["generate", "a", "--steps=3", "--guidance=2", "--sampler=pr", "--registers=4:1"]
    words += ["--layout-temperature=0.5", "--style-seed=7"]
    assert run(*words, "--temperature=0", "--order=halton", "--no-layout", "--num-images=2") == 0
    loaded, (task, prompts, shown, given) = asked
    assert loaded == ("load", "scenes", 16)
    assert (task, prompts, shown) == ("generate", ["a"], None)
    assert given == {
        "steps": 3,
        "guidance": 2.0,
        "sampler": "pr",
        "registers": (4, 1),
        "temperature": 0.0,
        "layout_temperature": 0.5,
        "order": "halton",
        "layout": False,
        "num_images": 2,
        "style_seed": 7,
    }


def test_a_quality_stands_for_steps_in_the_command_line(asked, capsys):
    assert run("generate", "a", "--quality=low") == 0
    assert asked[-1][-1] == {"quality": "low", "num_images": 1}
    assert run("generate", "a", "--quality=low", "--steps=3") == 2
    assert "not allowed with" in capsys.readouterr().err


def test_options_have_the_names_of_other_libraries_too(asked, capsys):
    assert run("generate", "a", "--num-inference-steps=3", "--guidance-scale=2") == 0
    assert asked[-1][-1] == {"steps": 3, "guidance": 2.0, "num_images": 1}


def test_a_question_may_be_about_an_image_or_none(asked, capsys):
    words = ["--steps=3", "--sampler=fast_dllm_dual", "--temperature=0.5", "--seed=4"]
    assert run("ask", "a.png", "why?", *words) == 0
    assert run("ask", "why?") == 0
    _, (_, prompts, shown, given), _, alone = asked
    assert prompts == ["why?"] and str(shown[0].path) == "a.png"
    wanted = {"steps": 3, "sampler": "fast_dllm_dual", "temperature": 0.5, "seed": 4}
    assert given == wanted
    assert alone == ("ask", ["why?"], None, {})
    assert capsys.readouterr().out == "b\nb\n"


def test_an_answer_is_written_to_no_file(asked, tmp_path, capsys):
    words = "why?", "a.png", tmp_path / "unused", "scenes"
    commands.sample("ask", *words)
    assert capsys.readouterr().out == "b\n"
    with pytest.raises(image_files.ImageError, match="its name must end in"):
        commands.sample("edit", *words)


# ---------------------------------------------------------------------------------------------
# Batches.


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--num-images=2"], "out-1.png: that is a folder"),
        (["--save-steps=x/y.gif"], "x: No space left on device"),
        (["--out=x/a.png"], "x: No space left on device"),
        (["--num-images=2", f"--out={'x' * 250}.png"], "File name too long"),
    ],
)
def test_what_cannot_be_written_is_reported_before_a_model_is_loaded(
    asked, capsys, monkeypatch, tmp_path, words, told
):
    (tmp_path / "out-1.png").mkdir()
    (tmp_path / "x").mkdir()

    def check(folder):
        if folder.name == "x":
            raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(files, "check_place", check)
    code = 1 if "space" in told else 2
    assert told in complaint(capsys, "generate", "a", *words, code=code)
    assert asked == []


def test_what_fails_to_be_written_does_not_lose_the_rest(asked, capsys, monkeypatch, tmp_path):
    def full(path, *_):
        raise image_files.ImageWriteError(f"the image cannot be written to {path}: full.")

    monkeypatch.setattr(image_files, "write_animation", full)
    assert run("generate", "a", "--save-steps=a.gif") == 1
    printed = capsys.readouterr()
    assert printed.out == "out.png: a (b)\n" and "a.gif: full." in printed.err
    monkeypatch.setattr(image_files, "write", lambda path, *_, **more: full(path))
    assert run("generate", "a", "--json") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["texts"] == ["b"] and "out.png: full." in printed.err


def test_a_batch_of_lines(tmp_path, asked):
    (tmp_path / "prompts.txt").write_text("\ufeffa\n\n  b \n")  # some editors start files like this
    assert run("generate", "--batch=prompts.txt", "--seed=5", "--num-images=2", "--grid") == 0
    _, prompts, _, given = asked[-1]
    assert prompts == ["a", "b"]
    assert given == {"seed": [5, 6], "num_images": 2}


def test_a_batch_of_objects(tmp_path, asked):
    for name in ("1.png", "2.png"):
        image_files.write(tmp_path / name, IMAGE)
    lines = [{"prompt": "a", "image": "1.png", "seed": 9}, {"prompt": "b", "image": "2.png"}]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert run("ask", "--batch=asked.jsonl") == 0
    _, prompts, shown, given = asked[-1]
    assert [str(one.path) for one in shown] == ["1.png", "2.png"]
    assert (prompts, given) == (["a", "b"], {"seed": [9, 1]})


def test_lines_of_a_batch_may_have_a_temperature_and_a_guidance_scale(tmp_path, asked, capsys):
    lines = [{"prompt": "a", "temperature": 0, "guidance_scale": 1.5}, {"prompt": "b"}]
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert run("generate", f"--batch={path}", "--num-images=2", "--grid") == 0
    given = asked[-1][-1]
    assert (given["temperature"], given["guidance"]) == ([0, None], [1.5, None])
    capsys.readouterr()
    assert "draws no image, so it takes no guidance" in complaint(capsys, "ask", f"--batch={path}")
    path.write_text('{"prompt": "a", "temperature": 0.5}')
    for name in ("ask", "infill"):
        assert run(name, f"--batch={path}") == 0
        assert asked[-1][-1]["temperature"] == [0.5]


ROWS = [
    {"prompt": "a\u2028b\x0cc\x85d", "seed": 7},
    {"prompt": "圆"},
    {"prompt": "c", "image": "a.png"},
]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]


@pytest.mark.parametrize(
    "contents",
    [
        "\n".join(LINES),
        "\ufeff" + "\r\n".join(LINES) + "\r\n",
        "\r".join(LINES),
        "\n\n" + " \n\x0c\n".join(LINES),
        "\n".join(json.dumps({"guidance": None, "image": None} | row) for row in ROWS[:2])
        + "\n" + LINES[2],
        "\n".join(LINES).replace("7", "7.0"),
    ],
    ids=["plain", "mark and CRLF", "CR", "empty lines", "null", "whole numbers of pandas"],
)  # fmt: skip
def test_a_batch_is_the_same_however_it_was_written(tmp_path, contents):
    path = tmp_path / "asked.jsonl"
    path.write_text(contents, newline="", encoding="utf-8")
    assert commands.read_batch(path) == ROWS
    path = path.with_suffix(".txt")
    lines = re.sub(r"\{.*?\}", lambda found: json.loads(found[0])["prompt"], contents)
    path.write_text(lines, newline="", encoding="utf-8")
    assert commands.read_batch(path) == [{"prompt": row["prompt"]} for row in ROWS]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no prompt"),
        ("{", "line 1 is no JSON"),
        ('{"prompt": "a"}\n[]', "line 2: it must be an object with a prompt"),
        ('{"prompt": " "}', "line 1: it must be an object with a prompt"),
        ('{"prompt": null}', "line 1: it must be an object with a prompt"),
        ('{"prompt": "a"}\n{"prompt": "\\ud800"}', "line 2: character 1 of the prompt is half"),
        ('{"prompt": 5}', "line 1: prompt=5 is a int"),
        ('{"prompt": "a", "seed": 7.5}', "line 1: seed=7.5 is out of range: it must be a whole"),
        ('{"prompt": "a", "sed": 1}', "line 1: Line has no sed. It has: prompt, image, seed"),
        ('{"prompt": "a", "seed": true}', "line 1: seed=True is out of range: it must be a whole"),
        ('{"prompt": "a", "guidance": "1"}', "guidance='1' is a str; it must be a float"),
        ('{"prompt": "a", "guidance": 1.0, "guidance_scale": 2.0}', "given twice, under two names"),
        (
            '{"prompt": "a", "guidance": Infinity}',
            "guidance=inf is out of range: it must .* finite",
        ),
        ('{"prompt": "a", "temperature": -1}', "temperature=-1.0 is out of range: it must"),
    ],
)
def test_a_batch_with_a_mistake_names_the_line(tmp_path, text, told):
    path = tmp_path / "asked.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        commands.read_batch(path)


# ---------------------------------------------------------------------------------------------
# Output.


def test_steps_are_shown_on_a_terminal_and_elsewhere_if_it_takes_long(monkeypatch, capsys):
    with outputs.shown_progress() as callback:
        callback(staged.after("image", 0))
    assert capsys.readouterr().err == ""
    with monkeypatch.context() as patch:
        patch.setattr(terminal, "LINE_SECONDS", 0)
        with outputs.shown_progress() as callback:
            callback(staged.after("image", 1))
        with terminal.progress("a -> b", in_bytes=True) as update:
            update(2_000_000, 7_000_000)
        with terminal.quiet(True), outputs.shown_progress() as callback:
            callback(staged.after("image", 2))
    image, file = capsys.readouterr().err.splitlines()
    assert image.startswith("sparse_lavida_jax: image: 1 of 3")
    assert file.startswith("sparse_lavida_jax: a -> b: 2 of 7 MB")
    screen, seen = io.StringIO(), []
    console = rich.console.Console(file=screen, force_terminal=True)
    monkeypatch.setattr(rich.console, "Console", lambda **_: console)
    with outputs.shown_progress(seen.append) as callback:
        for steps in range(3):
            callback(staged.after("image", steps))
    assert [state.steps for state in seen] == [0, 1, 2]
    assert "image" in screen.getvalue()


def test_a_warning_of_the_package_is_said_once(capsys, monkeypatch):
    log = logging.getLogger("sparse_lavida_jax.inference.requests")
    monkeypatch.setattr(commands, "run", lambda *_: log.warning("unknown: 'dragon'.") or 0)
    assert run("caption", "a.png") == 0
    assert capsys.readouterr().err == "sparse_lavida_jax: unknown: 'dragon'.\n"
    assert run("caption", "a.png", "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_a_quiet_command_says_what_is_wrong_and_nothing_else(capsys, monkeypatch):
    monkeypatch.setattr(commands, "run", lambda *_: terminal.say("a remark") or 0)
    assert run("caption", "a.png") == 0
    assert "a remark" in capsys.readouterr().err
    assert run("caption", "a.png", "--quiet") == 0
    assert capsys.readouterr().err == ""
    assert "there is no model in nowhere" in complaint(capsys, "verify", "nowhere", "--quiet")
    assert "unrecognized arguments" in complaint(capsys, "caption", "a.png", "--sed", "--quiet")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("gen", ["generate"]),
        ("generate --num-", ["--num-images", "--num-inference-steps"]),
        ("train --init", ["--init-from"]),
        ("edit a.p", ["a.png"]),
        ("verify a.p", ["a.png"]),
    ],
)
def test_a_shell_completes_commands_options_and_files(tmp_path, capsys, words, found):
    pytest.importorskip("shtab", reason="pip install 'sparse-lavida-jax[completion]'")
    bash = shutil.which("bash") or pytest.skip("needs bash")
    assert run("completion", "bash") == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "a.png").touch()
    typed = f"COMP_WORDS=(sparse-lavida {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))"
    tell = f'. ./script; {typed}; _shtab_sparse_lavida; printf "%s\n" "${{COMPREPLY[@]}}"'
    told = subprocess.run([bash, "-c", tell], cwd=tmp_path, capture_output=True, text=True)
    assert told.stdout.split() == found


def test_without_its_package_nothing_is_completed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "sparse-lavida-jax[completion]" in complaint(capsys, "completion", "bash")
    assert "invalid choice: 'fish'" in complaint(capsys, "completion", "fish")


def test_the_doctor_says_what_fits(capsys):
    assert run("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][0]["platform"] == "cpu"
    assert found["packages"]["jax"] != "missing"
    assert {"scenes", "LaViDa-O in 8 bits (export --dtype=int8)"} <= {*found["fits"]}
    found["fits"] = {"small": True, "large": False}
    assert "fits one device: small\ndoes not fit one device: large" in doctor.text(found)
    assert run("doctor") == 0
    assert "device 0: cpu" in capsys.readouterr().out


def test_a_result_with_nothing_in_it_says_so(capsys):
    def told(task, files=(), **found):
        result = Result(task, ("a",), (0,), config.Sampling(), Origin(), {}, **found)
        outputs.print_result(result, [*map(pathlib.Path, files)])
        return capsys.readouterr()

    assert told("ask", texts=("",)) == ("\n", "sparse_lavida_jax: the answer is empty.\n")
    assert told("ask", texts=("two",)) == ("two\n", "")
    nothing = told("ground", ["boxes.png"], boxes=(None,))
    assert nothing.out == "a: not found\n"
    assert "nothing was found: boxes.png shows the image without boxes." in nothing.err
    assert told("ground", ["boxes.png"], boxes=((1.0, 2.0, 3.0, 4.0),)).err == ""


def test_results_are_saved_with_what_drew_them(tmp_path):
    record = {"seed": 3}
    result = Result(
        "generate", ("a",), (3,), config.Sampling(), Origin("scenes", "ab"), {"image": 1.0},
        pixels=(IMAGE,), records=(record,),
    )  # fmt: skip
    result.save(tmp_path / "a.png")
    assert image_files.read_record(tmp_path / "a.png") == record
    assert result.image.size == (6, 4)
    written = json.loads(json.dumps(result.as_json()))
    assert written["checkpoint"] == {"name": "scenes", "sha256": "ab", "adapters": ""}
    assert (written["task"], written["seeds"]) == ("generate", [3])
    lean = json.loads(json.dumps(result.as_json(full=False)))
    assert lean.items() <= written.items()
    assert not {"checkpoint", "sampling", "seconds"} & lean.keys()


def test_the_package_is_light_until_it_is_used():
    code = "import sys, sparse_lavida_jax; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert sparse_lavida_jax.SparseLaViDa is SparseLaViDa
    with pytest.raises(AttributeError, match="no attribute 'SparseLavida'"):
        sparse_lavida_jax.SparseLavida  # noqa: B018
