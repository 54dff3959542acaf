# SPDX-License-Identifier: Apache-2.0
"""Every launcher calls the same main with its flags, as its dry run shows."""

import itertools
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import yaml

from sparse_lavida_jax.cli import hosting, parser

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
TRAINING = [path for path in SCRIPTS if path.stem != "device_day"]
FLAGS = ["--config=configs/scenes.py", "--workdir=a folder/run", "--config.name='x y'"]
ENVIRONMENT = {
    "ZONE": "us-east5-a", "SHARE": "10.0.0.2:/share",
    "CLUSTER": "mine", "IMAGE": "registry/mine:1",
}  # fmt: skip
MAIN = ["-m", "sparse_lavida_jax.main"]
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
# Where a process that ends also ends the run, a stopped process needs another exit code.
STOPPED = {name: ["--stopped_exit_code=75"] for name in ("tpu_pod.sh", "xpk.sh", "gcluster.sh")}


def run(script, *words, **environment):
    return subprocess.run(
        ["bash", str(LAUNCH / script), *words],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]} | ENVIRONMENT | environment,
    )


def trained(text: str) -> list[str]:
    """Returns the arguments of the call of main, which may be quoted as one word of a command."""
    words = shlex.split(text)
    for word in words:
        if " -m sparse_lavida_jax.main " in word:
            words = shlex.split(word)
    start = words.index("sparse_lavida_jax.main")
    return words[start - 1 : start + 7]


@pytest.mark.parametrize("script", [path.name for path in TRAINING if path.stem != "skypilot"])
def test_a_dry_run_shows_the_call_of_main(script):
    shown = run(script, "--dry-run", *FLAGS)
    assert shown.returncode == 0, shown.stderr
    found = trained(shown.stdout)
    distributed = [] if script == "local.sh" else ["--distributed", *STOPPED.get(script, [])]
    assert found[: 2 + len(distributed) + len(FLAGS)] == MAIN + distributed + FLAGS


@pytest.mark.parametrize("script", [path.name for path in TRAINING])
def test_without_flags_a_script_says_what_it_takes(script):
    shown = run(script)
    assert shown.returncode == 2
    said = " ".join(shown.stderr.split())
    assert f"launch/{script} [--dry-run] --config=" in said
    lines = (LAUNCH / script).read_text().splitlines()[2:]
    header = itertools.takewhile(lambda line: line.startswith("#"), lines)
    assert shown.stderr.splitlines() == [line[1:].removeprefix(" ") for line in header]
    assert "://" not in shown.stderr  # no run stores its state in a bucket


def test_a_tpu_slice_keeps_its_runs_on_the_share(tmp_path):
    """This machine replaces the hosts, and a local folder the share."""
    share, home = tmp_path / "share", tmp_path / "home"
    home.mkdir()
    shown = run("tpu_pod.sh", "--dry-run", *FLAGS).stdout.splitlines()
    (words,) = [shlex.split(line) for line in shown if "nfs-common" in line]
    path = stand_in(tmp_path, "sudo", f'echo "$@" >> {tmp_path}/log')
    stand_in(tmp_path, "mountpoint", "exit 1")
    command = words[-1].removeprefix("--command=").replace("/mnt/share", str(share))
    for _ in range(2):
        subprocess.run(["bash", "-c", command], cwd=home, env={"PATH": path}, check=True)
    assert f"mount -t nfs 10.0.0.2:/share {share}" in (tmp_path / "log").read_text()
    for name in ("runs", "models", "prepared"):
        assert (home / "sparse-lavida-jax" / name).resolve() == share / name
        assert not list((share / name).iterdir())


def stand_in(folder: pathlib.Path, name: str, script: str) -> str:
    """Puts a fake program first on PATH."""
    program = folder / name
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_skypilot_passes_the_flags_through_its_yaml(tmp_path):
    shown = run("skypilot.sh", "--dry-run", *FLAGS, NODES="2")
    words = shlex.split(shown.stdout)
    (flags,) = [word.removeprefix("--env=FLAGS=") for word in words if "FLAGS=" in word]
    task = yaml.safe_load(pathlib.Path(words[-1]).read_text())
    assert "--num-nodes=2" in words and list(task["envs"]) == ["FLAGS", "SHARE", "XLA_FLAGS"]
    assert task["envs"]["XLA_FLAGS"] == DETERMINISTIC
    assert "--env=SHARE=10.0.0.2:/share" in words and "mount -t nfs" in task["setup"]
    path = stand_in(tmp_path, "python", 'printf "%s\\n" "$@"; env')
    machine = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "4",
    }  # fmt: skip
    ran = subprocess.run(
        ["bash", "-c", task["run"]],
        capture_output=True,
        text=True,
        check=True,
        env=machine | {"PATH": path, "FLAGS": flags, "SHARE": "10.0.0.2:/share"},
    ).stdout.splitlines()
    ours = ["--distributed", "--stopped_exit_code=75", "--compilation_cache=/mnt/share/programs"]
    assert ran[:8] == [*MAIN, *ours, *FLAGS]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert {"SLURM_STEP_NODELIST=10.0.0.1", "SLURM_PROCID=1", "SLURM_NTASKS=2"} < set(ran)
    assert "JAX_LOCAL_DEVICE_IDS=0,1,2,3" in ran


def test_a_gke_cluster_gets_a_slice_with_the_share_on_it():
    def submitted(**environment):
        shown = run("gcluster.sh", "--dry-run", *FLAGS, **environment)
        return shlex.split(shown.stdout)

    usual = submitted(SHARE="claim")
    assert usual[:3] == ["gcluster", "job", "submit"]
    assert {"--mount=claim;/mnt/share;rw", "--cluster=mine", "--restarts=100"} < set(usual)
    assert "--topology=4x4x4" in usual
    small = submitted(TYPE="v6e-8", SLICES="2")
    assert {"--compute-type=v6e-8", "--num-slices=2"} < set(small)
    assert not any(word.startswith("--topology") for word in small)
    assert "--topology=8x16" in submitted(TYPE="ct6e-standard-4t", TOPOLOGY="8x16")


def test_a_killed_run_is_started_again_and_a_failed_one_is_not(tmp_path):
    path = stand_in(tmp_path, "python", f"echo run >> {tmp_path}/runs; kill -9 $$")
    assert run("local.sh", *FLAGS, PATH=path, RESTARTS="2").returncode == 137
    assert (tmp_path / "runs").read_text().count("run") == 3
    path = stand_in(tmp_path, "python", "exit 3")
    assert run("local.sh", *FLAGS, PATH=path, RESTARTS="2").returncode == 3


@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_for_the_script_reaches_training(tmp_path, to_all):
    """Training takes a while to save, and the script returns its exit status.

    Ctrl-C in a terminal signals a whole process group; even then training gets a single signal.
    """
    saving = "trap 'echo twice; exit 9' INT TERM; sleep 0.2; exit 7"
    # Traps run only between commands, so use many short ones.
    works = "echo up; for i in {1..200}; do sleep 0.1; done"
    path = stand_in(tmp_path, "python", f'trap "{saving}" TERM; trap "exit 8" INT; {works}')
    process = subprocess.Popen(
        ["bash", str(LAUNCH / "local.sh"), *FLAGS],
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": path},
        start_new_session=True,
        # A shell ignores SIGINT for background processes, which may include this test.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    if to_all:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()
    assert process.wait(timeout=10) == 7
    assert process.stdout.read() == ""


@pytest.mark.slow
def test_a_preempted_slurm_job_saves_and_stands_in_the_queue_again(tmp_path):
    stand_in(tmp_path, "srun", f"trap 'echo saved >> {tmp_path}/log; exit 0' TERM; sleep 20 & wait")
    stand_in(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/log')
    # A background process has no standard input, so the job is passed in a file.
    path = stand_in(
        tmp_path, "sbatch", f"cat > {tmp_path}/job; bash {tmp_path}/job & sleep 0.5;"
        " kill -USR1 $!; wait $!"
    )  # fmt: skip
    run("slurm.sh", *FLAGS, PATH=path, SLURM_JOB_ID="12")
    assert (tmp_path / "log").read_text().splitlines() == ["saved", "requeue 12"]


def test_slurm_runs_a_process_a_gpu_or_a_process_a_node():
    assert "--ntasks-per-node=4" in run("slurm.sh", "--dry-run", *FLAGS, GPUS="4").stdout
    node = run("slurm.sh", "--dry-run", *FLAGS, GPUS="4", PER="node").stdout
    assert "--ntasks-per-node=1" in node and "JAX_LOCAL_DEVICE_IDS=0\\,1\\,2\\,3" in node


def test_a_slurm_job_that_goes_on_has_the_same_bits_unless_told_otherwise():
    def flags(**environment):
        shown = run("slurm.sh", "--dry-run", *FLAGS, **environment).stdout
        (told,) = [word for word in shlex.split(shown) if word.startswith("XLA_FLAGS=")]
        return told.removeprefix("XLA_FLAGS=")

    assert flags() == DETERMINISTIC
    assert flags(XLA_FLAGS="") == ""


def test_a_preempted_tpu_slice_is_asked_for_again_until_training_has_ended(tmp_path):
    """The notice stops training twice; the state of the slice changes only later."""
    stand_in(tmp_path, "git", "true")
    path = stand_in(
        tmp_path, "gcloud", f"""cd {tmp_path}
case "$*" in
    *create*) echo create >> log; echo ACTIVE > state ;;
    *describe*) cat state ;;
    *delete*) echo delete >> log ;;
    *sparse_lavida_jax.main*)
        echo train >> log
        [ "$(grep -c train log)" = 3 ] && exit 0
        (sleep 0.3; echo SUSPENDED > state) &
        exit 75 ;;
esac"""
    )  # fmt: skip
    ended = run("tpu_pod.sh", *FLAGS, PATH=path, NOTICE="1")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "log").read_text().split() == ["create", "train", "delete"] * 3


def test_a_tpu_slice_on_which_training_fails_is_left(tmp_path):
    stand_in(tmp_path, "git", "true")
    fails = 'case "$*" in *describe*) echo ACTIVE ;; *sparse_lavida_jax.main*) exit 2 ;; esac'
    ended = run("tpu_pod.sh", *FLAGS, PATH=stand_in(tmp_path, "gcloud", fails), NOTICE="0")
    assert ended.returncode == 1
    assert "the slice sparse-lavida is left as it is" in ended.stderr


NEXT_TO_PYTHON = pathlib.Path(sys.executable).with_name("shellcheck")
SHELLCHECK = str(NEXT_TO_PYTHON) if NEXT_TO_PYTHON.exists() else shutil.which("shellcheck")


@pytest.mark.skipif(
    SHELLCHECK is None, reason="reading shell scripts needs shellcheck: pip install -e '.[dev]'"
)
def test_shellcheck_finds_nothing():
    scripts = [*SCRIPTS, LAUNCH.with_name(".ci") / "run"]
    found = subprocess.run([SHELLCHECK, *map(str, scripts)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_what_containers_start_is_a_command_line_of_ours():
    """The image's own command, and that of the KServe manifest, whose probes ask the server."""
    said = (LAUNCH.parent / "Containerfile").read_text()
    lines = [line.split(maxsplit=1) for line in said.splitlines() if line[:1].isupper()]
    started = {word: rest for word, rest in lines}
    assert json.loads(started["ENTRYPOINT"]) == ["sparse-lavida"]
    service = yaml.safe_load((LAUNCH / "kserve.yaml").read_text())
    (container,) = service["spec"]["predictor"]["containers"]
    for words in (json.loads(started["CMD"]), container["args"]):
        asked = parser.Parser(words[0]).parse_args(words[1:])
        assert hosting.warms_up("serve", asked.warmup) and asked.host == "0.0.0.0"
    assert asked.port == container["ports"][0]["containerPort"]
    assert container["env"][0]["name"] == "SPARSE_LAVIDA_API_KEY"
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    paths = [container[probe]["httpGet"]["path"] for probe in probes]
    assert paths == ["/health", "/ready", "/health"]
    assert {container[probe]["httpGet"]["port"] for probe in probes} == {asked.port}
    for line in said.splitlines():
        if line.startswith("COPY "):
            assert all((LAUNCH.parent / name).exists() for name in line.split()[1:-1]), line
