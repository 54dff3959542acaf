# SPDX-License-Identifier: Apache-2.0
"""Kernels that are wrong, crash or hang are refused with a reason; a correct one is admitted."""

import dataclasses
import json
import pathlib
import shutil
import sys
import types

import jax
import pytest
import tiny
from jax._src import distributed, xla_bridge

from sparse_lavida_jax import runtime, visibility
from sparse_lavida_jax.cli import doctor, program
from sparse_lavida_jax.inference import provenance
from sparse_lavida_jax.kernels import admission, attention, devices, trial
from sparse_lavida_jax.models.stack import implementation_of
from sparse_lavida_jax.programs import side_by_side

HERE = ("0x10de:0x2335",)
GPU = {"device": "a GPU", "kernel": "pallas_gpu"}
ADMITTED = admission.Verdict("a GPU", "pallas_gpu")

# The TPU kernel, interpreted, tried as in the child process; `planted` may change it.
CHILD = """
import os, time
from sparse_lavida_jax.kernels import attention, pallas_tpu, trial

attention.device_kernel = lambda: "pallas_tpu"
trial.CHECKED = (trial.Trial("t2i_1536", gradients=True, heads=1, head_dim=8, every=12),)
trial.RACED = ()
sound = pallas_tpu.forward

def forward(*given):
    out, lse = sound(*given)
    {planted}
    return out, lse

pallas_tpu.forward = forward
trial.main()
"""
ON = "gradients of t2i_1536, 1 heads of 8 in bfloat16"


def child(planted: str) -> list[str]:
    return [sys.executable, "-c", CHILD.format(planted=planted)]


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine with an unused accelerator, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(devices, "accelerators", lambda: HERE)
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    forget()
    yield
    monkeypatch.undo()
    forget()


def forget():
    """Makes this process a new one, which has to choose an implementation again."""
    admission._verdicts.clear()
    attention._default.cache_clear()
    attention._announce.cache_clear()
    attention._announce_plain_steps.cache_clear()


def admit(**changes):
    """Loads a model with heads that the kernels take."""
    attention.admit_kernel(
        **{"head_dim": 128, "dtype": "bfloat16", "implementation": None} | changes
    )


def chosen_for_a_long_call():
    return attention._chosen(None, 4096, 4096, 128, "bfloat16")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that jax reports when it is used."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    device = types.SimpleNamespace(compute_capability="9.0", device_kind="a GPU")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))


PLANTED = {
    "sound": ("", ""),
    "wrong": ("out = 1.5 * out", "it is off by 0.49"),
    "crashes": ("os.abort()", "the check ended with status -6"),
    "fails": ("raise ValueError('no such layout')", "(ValueError: no such layout), at " + ON),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_kernel_is_refused_and_a_sound_one_admitted(name):
    planted, why = PLANTED[name]
    verdict = admission.check(HERE, child(planted))
    assert (verdict.device, verdict.kernel) == ("cpu", "pallas_tpu")
    assert why in verdict.why and bool(why) == bool(verdict.why)
    assert [found["check"] for found in verdict.checks] == [ON]
    assert admission.remembered(HERE) == verdict
    if name == "sound":
        assert verdict.checks[0]["same_bits"] and verdict.checks[0]["off"] < admission.MOST_OFF


@pytest.mark.slow
def test_a_kernel_that_hangs_is_refused_once_its_time_is_over():
    verdict = admission.check(HERE, child("time.sleep(600)"), limit_s=60.0)
    assert verdict.why == (
        f"pallas_tpu is refused on cpu: the check did not end within 60 s, at {ON}"
    )


def printing(*lines, then=""):
    """A child process that prints lines, and then runs `then`."""
    said = "\n".join(f"print({json.dumps(line)!r}, flush=True)" for line in lines)
    return [sys.executable, "-c", f"import os, time\n{said}\n{then}"]


def test_a_child_that_hangs_is_killed_and_remembered():
    hangs = printing(GPU, {"check": "a"}, {"check": "a", "off": 0.0}, {"check": "b"},
        then="time.sleep(600)")  # fmt: skip
    verdict = admission.check(HERE, hangs, limit_s=3.0)
    assert verdict.why.endswith("did not end within 3 s, at b")
    assert admission.remembered(HERE) == verdict


def test_a_device_that_cannot_be_used_is_tried_again_the_next_time():
    verdict = admission.check(HERE, printing(then="raise RuntimeError('it is busy')"))
    assert verdict == admission.Verdict(
        why="the device could not be used: ended with status 1 (RuntimeError: it is busy)"
    )
    assert admission.remembered(HERE) is None


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"off": 0.01, "same_bits": True}, ""),
        ({"off": float("nan"), "same_bits": True}, "it is off by nan on a"),
        ({"off": 0.01, "same_bits": False}, "it gives other bits the second time on a"),
        ({"kernel_us": 10.0, "blocks_us": 40.0}, ""),
        (
            {"kernel_us": 50.0, "blocks_us": 40.0},
            "it takes 1.25 times as long as blockwise attention",
        ),
    ],
)
def test_what_is_wrong_is_reported(found, why):
    verdict = admission.judged([GPU, {"check": "a", **found}], "")
    assert verdict.why == (why and f"pallas_gpu is refused on a GPU: {why}")


def test_a_device_is_checked_once(gpu, monkeypatch):
    ran = []
    monkeypatch.setattr(admission, "_run", lambda *given: ran.append(given) or ([GPU], ""))
    for _ in range(2):  # two processes
        forget()
        admit()
        assert attention.default_implementation() == "pallas_gpu"
    assert len(ran) == 1


@pytest.fixture
def children(monkeypatch):
    """Children that admit what is asked of them; returns the words of their commands."""
    words = []

    def run(command, limit_s):
        own = command[len(admission.CHILD) :]
        words.append(own)
        kernel = {"kernel": own[1]} if len(own) > 1 else {}
        return [GPU | kernel, {"check": f"{own[0]} of it", "off": 0.01, "same_bits": True}], ""

    monkeypatch.setattr(admission, "_run", run)
    return words


def test_gradients_are_checked_only_before_training_and_complete_a_verdict(children, gpu):
    admit()
    assert children == [("sampling",)]
    first = admission.remembered(HERE)
    assert not first.gradients
    for _ in range(2):
        forget()
        admit(gradients=True)
        whole = admission.remembered(HERE)
        assert whole.gradients and whole.checks == (*first.checks, {**first.checks[0],
            "check": "gradients of it"})  # fmt: skip
        assert attention.default_implementation() == "pallas_gpu"
    forget()
    admit()
    assert children == [("sampling",), ("gradients", "pallas_gpu")]


def test_wrong_gradients_refuse_a_kernel_that_was_admitted_for_sampling(children, monkeypatch):
    admit()
    forget()
    sound = admission._run

    def run(command, limit_s):
        lines, ended = sound(command, limit_s)
        if command[-1] == "pallas_gpu":
            lines[1]["off"] = 0.3
        return lines, ended

    monkeypatch.setattr(admission, "_run", run)
    admit(gradients=True)
    verdict = admission.remembered(HERE)
    assert (verdict.kernel, verdict.why, verdict.gradients) == ("pallas_triton", "", True)
    assert "off by 0.3 on gradients of it" in verdict.passed_over
    assert children[-1] == ("all", "pallas_triton")


def test_a_device_in_use_keeps_its_verdict_and_one_line_names_what_was_not_checked(
    children, monkeypatch, caplog
):
    admit()
    forget()
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    caplog.clear()
    admit(gradients=True)
    (said,) = caplog.messages
    assert "gradients of pallas_gpu were never checked" in said and admission.COMMAND in said
    assert not admission.admitted(HERE, True).why and len(children) == 1


@pytest.mark.parametrize(
    "changes",
    [{"head_dim": 48}, {"dtype": "float32"}, {"implementation": "reference"}],
)
def test_a_model_that_uses_no_kernel_waits_for_no_check(changes, children):
    admit(**changes)
    assert children == []


def test_a_tpu_takes_all_heads(children, monkeypatch):
    monkeypatch.setattr(devices, "accelerators", lambda: ("0x1ae0:0x0063",))
    admit(head_dim=48, dtype="float32")
    assert children == [("sampling",)]


def test_a_shipped_verdict_is_found_by_the_code_and_not_by_the_version(monkeypatch, tmp_path):
    monkeypatch.setattr(admission, "SHIPPED", tmp_path / "verdicts")
    assert admission.remembered(HERE) is None
    admission._remember(ADMITTED, admission.SHIPPED / admission.memory(HERE).name)
    assert admission.remembered(HERE) == ADMITTED
    own = dataclasses.replace(ADMITTED, why="refused by a check on this machine")
    admission._remember(own, admission.memory(HERE))
    assert admission.remembered(HERE) == own
    copy, released = tmp_path / "package", admission.memory(HERE)
    shutil.copytree(pathlib.Path(admission.__file__).parent, copy / "kernels")
    shutil.copy(pathlib.Path(visibility.__file__), copy)
    with monkeypatch.context() as patch:
        patch.setattr(admission, "__file__", str(copy / "kernels" / "admission.py"))
        (copy / "kernels" / "verdicts" / "a.json").write_text("{}")
        seen = [admission.memory(HERE)]
        assert seen == [released]
        for changed in ("visibility.py", "kernels/tile_lists.py"):
            (copy / changed).write_text("other code")
            assert admission.memory(HERE) not in seen
            seen.append(admission.memory(HERE))


def test_what_the_child_compiles_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(admission, "LOOK_S", 0.05)
    monkeypatch.setattr(side_by_side, "QUIET_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    compiled = printing(GPU, {"program": 2, "of": 7}, then="time.sleep(1)")
    lines, ended = admission._run(compiled, 60.0)
    assert not ended and admission.judged(lines, ended) == ADMITTED
    assert "\rattention's kernel is checked: program 3 of 7, " in capsys.readouterr().err


def test_programs_are_compiled_side_by_side_and_then_run(monkeypatch, capsys):
    monkeypatch.setattr(trial.attention, "device_kernel", lambda: "blockwise")
    small = {"heads": 1, "head_dim": 8, "every": 12}
    checked = [trial.Trial("t2i_1536", **small), trial.Trial("t2i_1536", True, **small)]
    monkeypatch.setattr(trial, "CHECKED", checked)
    monkeypatch.setattr(trial, "RACED", checked[:1])
    monkeypatch.setattr(side_by_side, "are_made_ahead", lambda: True)
    trial.main("sampling")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    compiled = sorted(line["program"] for line in lines if line.get("of") == 2)
    assert compiled == [1, 2]
    names = [checked[0].name, f"race: {checked[0].name}"]
    assert [line["check"] for line in lines if "check" in line] == [names[0]] * 2 + [names[1]] * 2
    verdict = admission.judged(lines, "")
    assert verdict.kernel == "blockwise" and verdict.checks[0]["off"] < admission.MOST_OFF


def test_another_version_of_jax_or_another_device_is_checked_again(monkeypatch):
    before = admission.memory(HERE)
    assert before == admission.memory(HERE)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version__", "0.99")
        assert admission.memory(HERE) != before
    assert admission.memory(("0x10de:0x2330",)) != before


def test_a_refused_kernel_gives_way_to_blocks_and_one_line_says_so(gpu, monkeypatch, caplog):
    wrong = [GPU, {"check": "a", "off": 0.3, "same_bits": True}]
    monkeypatch.setattr(admission, "_run", lambda *_: (wrong, ""))
    admit()
    caplog.clear()
    for _ in range(2):
        attention._default.cache_clear()
        assert chosen_for_a_long_call() == "blockwise"
    (said,) = caplog.messages
    assert "off by 0.3 on a" in said and "please report what `sparse-lavida doctor" in said
    assert not attention.runs_here("pallas_gpu") and attention.runs_here("blockwise")


def test_a_second_kernel_is_checked_if_the_first_is_refused(gpu, monkeypatch, caplog, capsys):
    """In a child that is told its name; on a device with one kernel, nothing else is tried."""

    def run(command, limit_s):
        second = command[-1] == "pallas_triton"
        assert command[len(admission.CHILD)] in ("all", "sampling")
        kernel = GPU | ({"kernel": "pallas_triton"} if second else {})
        return [kernel, {"check": "a", "off": 0.01 if second else 0.3, "same_bits": True}], ""

    monkeypatch.setattr(admission, "_run", run)
    for _ in range(2):
        attention._default.cache_clear()
        assert attention.default_implementation() == "pallas_triton"
        assert attention.runs_here("pallas_triton") and not attention.runs_here("pallas_gpu")
    said = caplog.messages[-1]
    assert "runs with pallas_triton: pallas_gpu is refused on a GPU: it is off by 0.3" in said
    assert program.main(["sparse-lavida", "doctor", "--kernels"]) == 0
    told = capsys.readouterr().out
    assert "pallas_triton is admitted, since pallas_gpu is refused on a GPU: it is off" in told


def test_a_device_that_is_in_use_gets_blocks_and_one_line_names_the_command(
    gpu, monkeypatch, caplog
):
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    assert chosen_for_a_long_call() == "blockwise"
    (said,) = caplog.messages
    assert "never checked" in said and admission.COMMAND in said


def test_what_was_found_of_another_device_does_not_count(gpu, monkeypatch):
    other = dataclasses.replace(ADMITTED, device="another GPU")
    monkeypatch.setattr(admission, "remembered", lambda _: other)
    assert attention.default_implementation() == "blockwise"


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_process_decides_for_all(number, monkeypatch):
    """The second process checks nothing, and uses the verdict of the first."""
    said = {"sparse_lavida_jax/attention": "as the first found"} if number else {}
    client = types.SimpleNamespace(
        key_value_set=said.__setitem__, blocking_key_value_get=lambda key, wait_ms: said[key]
    )
    state = types.SimpleNamespace(client=client, process_id=number)
    monkeypatch.setattr(distributed, "global_state", state)
    found = runtime.first_decides("attention", lambda: f"found by {number}", 1.0)
    assert found == ("as the first found" if number else "found by 0")


def test_a_record_asks_for_the_attention_that_drew_it(caplog):
    """One that does not run here is replaced, and a warning says so."""
    model = tiny.denoiser(tiny.model_settings())
    assert provenance.attending({}, model) is provenance.attending(
        {"attention": "reference"}, model
    )
    again = provenance.attending({"attention": "blockwise"}, model)
    assert (
        again.settings.attention_implementation == "blockwise" != implementation_of(model.settings)
    )
    assert not caplog.messages
    assert provenance.attending({"attention": "pallas_tpu"}, model) is model
    (said,) = caplog.messages
    assert "attention by pallas_tpu, which does not run here: single bits may differ" in said


def test_a_record_asks_for_the_kernels_of_its_steps(caplog):
    """Older records name none: they were drawn without."""
    model = tiny.denoiser(tiny.model_settings())
    assert provenance.attending({"step": "plain"}, model) is model and not caplog.messages
    assert provenance.attending({"step": "pallas_gpu"}, model) is model
    (said,) = caplog.messages
    assert "between the products of a step by pallas_gpu, which does not run here" in said


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "plain"),
        ({"checks": ({"check": f"{admission.STEP}a"},)}, "pallas_gpu"),
        ({"checks": ({"check": f"{admission.STEP}a"},), "step_why": "it is wrong"}, "plain"),
        ({"checks": ({"check": f"{admission.STEP}a"},), "why": "it is slow"}, "plain"),
        ({"checks": ({"check": f"{admission.STEP}a"},), "kernel": "pallas_triton"}, "plain"),
    ],
)
def test_steps_have_kernels_where_these_were_admitted(changes, wanted, gpu, caplog):
    admission._verdicts[HERE, True] = dataclasses.replace(ADMITTED, **changes)
    assert attention.default_step_implementation() == wanted
    if not changes or "step_why" in changes:
        why = changes.get("step_why", "never checked")
        assert any("between their products" in said and why in said for said in caplog.messages)


def test_a_cpu_has_nothing_to_check(monkeypatch):
    monkeypatch.undo()  # no accelerator
    monkeypatch.setattr(admission, "admitted", lambda *_: pytest.fail("checked"))
    assert devices.accelerators() == ()
    admit()
    assert attention.default_implementation() == "reference"


def test_accelerators_are_told_by_their_numbers_and_by_what_is_installed(monkeypatch, tmp_path):
    monkeypatch.undo()
    for name, vendor, number in (("a", "0x10de", "0x2335"), ("b", "0x1ae0", "0x0063")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "device").write_text(f"{number}\n")
    monkeypatch.setattr(devices, "PCI", tmp_path)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name == "libtpu" or None)
    for platforms, found in (("", ("0x1ae0:0x0063",)), ("cpu", ()), ("cpu,tpu", ())):
        monkeypatch.setattr(
            jax, "config", types.SimpleNamespace(values={"jax_platforms": platforms})
        )
        assert devices.accelerators() == found


def test_the_doctor_prints_a_table_and_remembers(monkeypatch, capsys):
    lines = [GPU, {"check": "a", "off": 0.0123, "same_bits": True},
        {"check": "race: a", "kernel_us": 10.0, "blocks_us": 40.0}]  # fmt: skip
    monkeypatch.setattr(admission, "_run", lambda *_: (lines, ""))
    assert program.main(["sparse-lavida", "doctor", "--kernels"]) == 0
    told = capsys.readouterr().out
    assert "a GPU: pallas_gpu is admitted" in told
    assert "| a | yes | 0.0123 | | |" in told and "| race: a | | | 10 | 40 |" in told
    judged = dataclasses.replace(admission.judged(lines, ""), gradients=True)
    assert admission.remembered(HERE) == judged


def test_the_doctor_says_where_there_is_no_kernel():
    found = {"version": "1", "jax": "2", **dataclasses.asdict(admission.Verdict("cpu"))}
    told = doctor.kernels_text(found)
    assert told.endswith("cpu: there is no kernel for it, and nothing to check")


def test_a_race_is_timed_on_both_sides():
    small = trial.Trial("t2i_1536", heads=1, head_dim=8, every=12)
    taken = trial.race(small, "blockwise")
    assert set(taken) == {"kernel_us", "blocks_us"} and min(taken.values()) > 0


@pytest.mark.parametrize("shape", ["t2i_1536", "decode_late"])
def test_the_triton_kernel_passes_its_trial_when_interpreted(shape):
    gradients = not shape.startswith("decode")
    small = trial.Trial(shape, gradients=gradients, heads=1, head_dim=64, every=4)
    found = trial.agreement(small, "pallas_triton")
    assert found["same_bits"] and found["off"] < admission.MOST_OFF
