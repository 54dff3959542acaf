# SPDX-License-Identifier: Apache-2.0
"""The command line does its work, and reports errors in one sentence."""

import os
import signal
import types

import numpy as np
import pytest

import sparse_lavida_jax
from sparse_lavida_jax import config, main, runtime
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.inference.requests import Request
from sparse_lavida_jax.inference.results import Origin, Result
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs import folder as folder_of_programs

CONFIG = """
import ml_collections

def get_config():
    c = ml_collections.ConfigDict()
    c.name = "toy"
    c.train = dict(train_steps=7, stage="{stage}")
    c.vq = dict(channels=(8, 16))
    return c
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with `configs/toy.py` and `configs/toy_vq.py`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "toy.py").write_text(CONFIG.format(stage="denoiser"))
    (tmp_path / "configs" / "toy_vq.py").write_text(CONFIG.format(stage="vq"))
    return tmp_path


def complaint(capsys, *words):
    """The output of a command line that must fail."""
    assert main.main(["main", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("sparse_lavida_jax: ")
    assert "Traceback" not in printed.err
    return printed.err


def test_training_without_a_config_lists_the_configs(folder, capsys):
    message = complaint(capsys)
    told = "needs --config or --data=FOLDER. There are: configs/toy.py, configs/toy_vq.py."
    assert told in message


def test_a_mistyped_path_lists_the_configs(folder, capsys):
    message = complaint(capsys, "--config=configs/tou.py")
    assert "no config file configs/tou.py. There are: configs/toy.py" in message


def test_without_a_checkout_it_says_where_configs_are(folder, capsys):
    message = complaint(capsys, "--config=elsewhere/scenes.py")
    assert "There is none in " in message
    assert "in the folder configs/ of its repository, not in the package" in message


def test_a_mode_that_there_is_not_is_reported_with_those_there_are(folder, capsys):
    told = "--mode=trian is not a mode: choose one of train, sample, evaluate, "
    assert told in complaint(capsys, "--mode=trian")


def test_a_mistyped_setting_lists_the_settings_of_its_section(folder, capsys):
    message = complaint(capsys, "--config=configs/toy.py", "--config.train.train_step=5")
    assert "config.train has no 'train_step'. It has: stage, train_steps" in message


def test_a_setting_within_a_value_is_reported(folder, capsys):
    message = complaint(capsys, "--config=configs/toy.py", "--config.seed.first=5")
    assert "config.seed has no 'first'. It has: no parts: it is a value." in message


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("--config.optimizer.b2=7", "out of range: it must lie in [0, 1]"),
        ("--config.train.train_steps=many", "--config.train.train_steps=many"),
        ("--config.train.train_steps=1.5", "--config.train.train_steps=1.5"),
        ("--config.sampling.order=spiral", "choose one of stratified"),
        ("--mode=paint", "train, sample, evaluate"),
        ("--date=x", "unrecognized arguments: --date=x. Did you mean --data?"),
        ("--stopped_exit_code=x", "--stopped-exit-code: 'x' is not a whole number."),
        ("--stopped_exit_code=256", "--stopped-exit-code=256 is out of range: 0 to 255."),
        ("200", "unrecognized arguments: 200. --mode=train takes --config, --data, "),
    ],
)
def test_a_mistyped_value_is_reported(folder, capsys, word, part):
    assert part in complaint(capsys, "--config=configs/toy.py", word)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--config=configs/toy.py --seed=1", "arguments: --seed=1. --mode=train takes --config, "),
        ("--config=configs/toy.py --checkpoint=scenes", "arguments: --checkpoint=scenes. "),
        ("--config=configs/toy.py --image=a.png", "arguments: --image=a.png. --mode"),
        ("--config=configs/toy.py:x", "configs/toy.py takes nothing after a colon: leave :x out."),
        ("--mode=verify --src=a --dst=b", "arguments: --dst=b. --mode=verify takes --src."),
        ("--mode=evaluate --checkpoint=a --seed=0", "arguments: --seed=0. --mode=evaluate takes "),
        ("--mode=prepare --src=a --dst=b --dtype=float32", "arguments: --dtype=float32. "),
        (
            "--mode=sample --checkpoint=scenes --prompt=a --task=ask --out=a.png",
            "--task=ask prints its answer: leave --out out.",
        ),
    ],
)
def test_what_a_mode_or_a_config_would_pass_over_is_refused(folder, capsys, words, told):
    assert told in complaint(capsys, *words.split())


def test_a_config_file_with_a_mistake_names_it(folder, capsys):
    (folder / "configs" / "toy.py").write_text("def get_config():\n    return 1 / 0\n")
    message = complaint(capsys, "--config=configs/toy.py")
    assert "configs/toy.py failed: ZeroDivisionError" in message
    (folder / "configs" / "toy.py").write_text("def get_config(:\n")
    assert "SyntaxError" in complaint(capsys, "--config=configs/toy.py")


def test_sampling_without_a_model_lists_the_bundled_ones(folder, capsys, monkeypatch):
    (folder / "models" / "scenes" / "params").mkdir(parents=True)
    monkeypatch.setattr(model_folder, "BUNDLED", folder / "models")
    assert "Bundled are: scenes" in complaint(capsys, "--mode=sample", "--prompt=x")
    message = complaint(capsys, "--mode=sample", "--checkpoint=nowhere", "--prompt=x")
    assert "there is no model in nowhere" in message


def test_sampling_without_a_prompt_asks_for_one(folder, capsys):
    assert "--prompt" in complaint(capsys, "--mode=sample", "--checkpoint=scenes")


def test_a_run_directory_of_another_config_is_reported(folder, capsys, monkeypatch):
    trained = []

    def train(settings, run, profile):
        trained.append(settings)
        run.metrics_path.write_text("")

    fake = types.SimpleNamespace(train=train)
    monkeypatch.setattr(sparse_lavida_jax, "train", fake, raising=False)
    assert main.main(["main", "--config=configs/toy.py"]) == 0
    message = complaint(capsys, "--config=configs/toy.py", "--config.seed=1")
    assert "seed was 0 and is 1" in message
    assert len(trained) == 1


def test_training_gets_the_settings_and_the_run_directory(folder, monkeypatch):
    seen = {}

    def train(settings, run, profile):
        seen.update(settings=settings, folder=run.folder)

    fake = types.SimpleNamespace(train=train)
    monkeypatch.setattr(sparse_lavida_jax, "train", fake, raising=False)
    words = ["--config.train.train_steps=9", "--config.vq.channels=(16, 8, 8)"]
    assert main.main(["main", "--config=configs/toy.py", *words]) == 0
    assert seen["settings"].name == "toy"
    assert seen["settings"].train.train_steps == 9
    assert seen["settings"].vq.channels == (16, 8, 8)
    assert str(seen["folder"]) == "runs/toy"
    assert model_folder.read_config(folder / "runs" / "toy") == seen["settings"]


@pytest.mark.parametrize(
    "word",
    [
        "--workdir=gs://bucket/run",
        "--config.train.init_from=gs://b/c",
        "--config.data.folder=s3://d",
    ],
)
def test_an_address_is_no_folder(folder, capsys, word):
    message = complaint(capsys, "--config=configs/toy.py", word)
    told = f"{word.removeprefix('--config.')} is an address, and only folders are read and written"
    assert f"{told}: mount a file system" in message
    assert not (folder / "gs:").exists() and not (folder / "runs").exists()


def test_the_image_tokenizer_has_its_own_stage(folder, monkeypatch):
    seen = []
    fake = types.SimpleNamespace(train=lambda settings, workdir, stop: seen.append(workdir))
    monkeypatch.setattr(sparse_lavida_jax.training, "train_vq", fake, raising=False)
    assert main.main(["main", "--config=configs/toy_vq.py", "--workdir=elsewhere"]) == 0
    assert [str(path) for path in seen] == ["elsewhere"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_stopped_run_says_how_to_go_on(folder, monkeypatch, capsys, number, code):
    def train(settings, run, profile):
        os.kill(os.getpid(), number)
        run.save_and_stop(3, {"x": np.zeros(2)})

    fake = types.SimpleNamespace(train=train)
    monkeypatch.setattr(sparse_lavida_jax, "train", fake, raising=False)
    assert main.main(["main", "--config=configs/toy.py"]) == code
    assert "after step 3, everything is saved: the same command" in capsys.readouterr().err
    other = main.main(["main", "--config=configs/toy.py", "--stopped_exit_code=75"])
    assert other == (code or 75)


def test_a_full_disk_is_a_sentence(folder, monkeypatch, capsys):
    def train(settings, run, profile):
        raise OSError(28, "No space left on device", "runs/toy/images/000001.png")

    fake = types.SimpleNamespace(train=train)
    monkeypatch.setattr(sparse_lavida_jax, "train", fake, raising=False)
    assert main.main(["main", "--config=configs/toy.py"]) == 1
    printed = capsys.readouterr()
    assert "No space left on device" in printed.err and "Traceback" not in printed.err


def test_a_mistake_of_ours_keeps_its_traceback(folder, monkeypatch):
    def train(settings, run, profile):
        raise ZeroDivisionError

    fake = types.SimpleNamespace(train=train)
    monkeypatch.setattr(sparse_lavida_jax, "train", fake, raising=False)
    with pytest.raises(ZeroDivisionError):
        main.main(["main", "--config=configs/toy.py"])


def test_help_is_printed(capsys):
    assert main.main(["main", "--help"]) == 0
    assert "--config=configs/scenes.py" in capsys.readouterr().out


def test_sampling_writes_an_image_with_the_settings_of_the_checkpoint(folder, monkeypatch, capsys):
    """The pipeline is replaced: only its arguments are tested here."""
    asked = []

    class Pipeline(SparseLaViDa):
        def __init__(self, name, batch_size, **_):
            asked.append(name)

        def requests(self, task, words, shown=None, **options):
            asked.append((task, words, shown, options))
            return [Request(task=task, words=words)]

        def run(self, requests):
            made = {"pixels": (np.zeros((4, 4, 3), np.uint8),), "records": ({},)}
            words = requests[0].words
            return Result("generate", (words,), (3,), config.Sampling(), Origin(), {}, **made)

    model = folder / "trained"
    (model / "params").mkdir(parents=True)
    model_folder.write_config(model, config.Config(sampling=config.Sampling(num_steps=5)))
    monkeypatch.setattr(SparseLaViDa, "from_pretrained", Pipeline)
    words = ["--mode=sample", "--checkpoint=trained", "--prompt=a red circle", "--seed=3"]
    words += ["--out=out/image.png", "--config.sampling.temperature=0.5"]
    assert main.main(["main", *words]) == 0
    assert (folder / "out" / "image.png").is_file()
    assert capsys.readouterr().out == "out/image.png: a red circle\n"
    sampling = config.Sampling(num_steps=5, temperature=0.5)
    wanted = ("generate", "a red circle", None, {"seed": 3, "sampling": sampling})
    assert asked == ["trained", wanted]


def test_steps_to_trace_are_read(folder, monkeypatch):
    seen = []
    fake = types.SimpleNamespace(train=lambda settings, run, profile: seen.append(profile))
    monkeypatch.setattr(sparse_lavida_jax, "train", fake, raising=False)
    assert main.main(["main", "--config=configs/toy.py", "--profile_steps=10:13"]) == 0
    assert main.main(["main", "--config=configs/toy.py"]) == 0
    assert [[*steps] for steps in seen] == [[10, 11, 12], []]


@pytest.mark.parametrize("words", ["10", "13:10", "a:b", "5:5"])
def test_steps_to_trace_that_are_none_are_reported(folder, capsys, words):
    told = complaint(capsys, "--config=configs/toy.py", f"--profile_steps={words}")
    assert f"--profile-steps={words} is not a range of steps: write 10:13" in told


def test_processes_are_told_of_each_other_or_not_at_all(folder, capsys, monkeypatch):
    met = []
    monkeypatch.setattr(runtime, "connect", lambda *where: met.append(where))
    monkeypatch.setattr(runtime, "disconnect", lambda: None)
    fake = types.SimpleNamespace(train=lambda settings, run, profile: None)
    monkeypatch.setattr(sparse_lavida_jax, "train", fake, raising=False)
    whole = ["--coordinator=10.0.0.2:8476", "--num_processes=2", "--process_id=1"]
    for words in ([], ["--distributed"], whole):
        assert main.main(["main", "--config=configs/toy.py", *words]) == 0
    assert met == [("", 0, -1), ("10.0.0.2:8476", 2, 1)]
    for missing in whole:
        words = [word for word in whole if word != missing]
        assert "go together" in complaint(capsys, "--config=configs/toy.py", *words)
    assert "by one process" in complaint(capsys, "--config=configs/toy_vq.py", "--distributed")
    evaluating = ("--mode=evaluate", "--config=configs/evaluate.py:scenes")
    for words in (["--distributed"], whole):
        assert "evaluate with --shard=i/n each" in complaint(capsys, *evaluating, *words)


def test_processes_that_do_not_meet_are_a_sentence(folder, capsys, monkeypatch):
    def initialize(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(runtime.jax.distributed, "initialize", initialize)
    told = complaint(capsys, "--config=configs/toy.py", "--distributed")
    assert "do not find each other: coordinator_address should be defined" in told
    assert "--coordinator=ADDRESS:PORT" in told


def test_compiled_programs_are_kept_unless_told_otherwise(folder, monkeypatch):
    fake = types.SimpleNamespace(train=lambda settings, run, profile: None)
    monkeypatch.setattr(sparse_lavida_jax, "train", fake, raising=False)
    updates = {}
    monkeypatch.setattr(runtime.jax.config, "update", updates.__setitem__)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_MAX_SIZE", raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert main.main(["main", "--config=configs/toy.py", "--compilation_cache="]) == 0
    assert updates == {"jax_enable_compilation_cache": False}
    assert main.main(["main", "--config=configs/toy.py"]) == 0
    cache = os.environ["XDG_CACHE_HOME"]
    assert updates["jax_compilation_cache_dir"] == f"{cache}/sparse-lavida-jax"
    assert updates["jax_compilation_cache_max_size"] == folder_of_programs.MOST_BYTES
