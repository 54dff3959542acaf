# SPDX-License-Identifier: Apache-2.0
"""Checks the attention kernel on this machine's device before it is used.

Before a process first uses the device, `admitted` runs `kernels.trial` in a child process with a
time limit; it compares the device's kernel with the reference and with blockwise attention. The
child must end before the device is used here, since a TPU belongs to one process at a time, and
on a GPU the first process takes most of the memory. The verdict is kept in the user's cache, for
these devices, this version of jax and this code; those of some devices are part of the package
(`SHIPPED`). A kernel that is wrong, slower than blockwise attention, hangs or crashes is refused;
the next one in line (`SECOND`) is then checked in the same way, and if there is none, attention
runs blockwise (`attention.default_implementation`). The kernels of `step_gpu` are checked and
refused apart from it. Gradients are checked before training only; a verdict without them is then
completed.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import IO, Any

import jax
from jax._src import xla_bridge  # no public function tells whether a device is in use

from sparse_lavida_jax import runtime
from sparse_lavida_jax.programs import side_by_side

COMMAND = "sparse-lavida doctor --kernels"
CHILD = (sys.executable, "-m", "sparse_lavida_jax.kernels.trial")
LIMIT_S = 300.0  # time limit of the child, which compiles some twenty programs
END_S = 10.0  # wait for a killed child; one stuck in its driver may not end
LOOK_S = 0.5  # between looks at what the child has printed
SHIPPED = pathlib.Path(__file__).with_name("verdicts")
SECOND = {"pallas_gpu": "pallas_triton"}  # what is checked if a device's kernel is refused
MOST_OFF = 2e-2  # largest error against the reference, for bfloat16
STEP = "step: "  # begins the names of the checks of `step_gpu`
SLOWER = 1.05  # refused above this multiple of blockwise attention's time; less may be noise

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the child found.

    Attributes:
        device: its kind; empty if the child failed before it was known.
        kernel: the kernel for the device; None if there is none.
        why: why the kernel is refused; empty if it is admitted.
        checks: the result of each check (`trial.main`).
        passed_over: why the device's first kernel was refused, if this is its second.
        gradients: whether they were checked too.
        step_why: why the kernels of `step_gpu` are refused; empty if they are not.
    """

    device: str = ""
    kernel: str | None = None
    why: str = ""
    checks: tuple[dict[str, Any], ...] = ()
    passed_over: str = ""
    gradients: bool = False
    step_why: str = ""

    @property
    def lacks_gradients(self) -> bool:
        """Whether the kernel is admitted, and its gradients were not checked."""
        return bool(self.kernel and not self.why and not self.gradients)

    @property
    def admits_step(self) -> bool:
        """Whether the kernels of `step_gpu` were checked too, and are admitted."""
        checked = any(check["check"].startswith(STEP) for check in self.checks)
        return checked and not self.why and not self.step_why


# Of this process, by accelerators and whether gradients were asked for.
_verdicts: dict[tuple[tuple[str, ...], bool], Verdict | None] = {}


def chosen(kernel: str, device: str, accelerators: tuple[str, ...]) -> tuple[str | None, str]:
    """Returns the kernel that runs on a kind of device, and why it is not the given one.

    None: no kernel may run.
    """
    verdict = admitted(accelerators)
    if verdict is None:
        return None, (
            f"{kernel} was never checked on this machine, and its device is in use already: once it"
            f" is not, `{COMMAND}` checks it"
        )
    why, found = verdict.why, verdict.kernel
    if not why and (verdict.device != device or found not in (kernel, SECOND.get(kernel))):
        why = f"{found} was checked on {verdict.device}, and this is {kernel} on {device}"
    told = why or verdict.passed_over
    told = told and f"{told}; please report what `{COMMAND}` prints, which checks it again"
    return None if why else found, told


def admitted(accelerators: tuple[str, ...], gradients: bool = False) -> Verdict | None:
    """Returns the verdict on this machine's kernel, checking the kernel first if there is none.

    None if there is no verdict and the device is already in use. In a run of several processes, all
    of them must call this, and the first one decides for all.

    Args:
        accelerators: of this machine (`devices.accelerators`); likewise below.
        gradients: whether they are checked too, if the device is not in use.
    """
    for asked in (True, gradients):
        if (accelerators, asked) in _verdicts:
            return _verdicts[accelerators, asked]

    def decide() -> str:
        verdict = remembered(accelerators)
        if verdict is None or (gradients and verdict.lacks_gradients):
            if not xla_bridge.backends_are_initialized():
                log.warning("attention's kernel is checked, once for this device.")
                verdict = check(accelerators, gradients=gradients, known=verdict)
            elif verdict is not None:
                log.warning(
                    "the gradients of %s were never checked on this device, which is in use:"
                    " once it is not, `%s` checks them.", verdict.kernel, COMMAND,
                )  # fmt: skip
        return json.dumps(verdict and dataclasses.asdict(verdict))

    question = "attention and its gradients" if gradients else "attention"
    found = runtime.first_decides(question, decide, 3 * LIMIT_S)
    _verdicts[accelerators, gradients] = verdict = _verdict(json.loads(found))
    return verdict


def check(
    accelerators: tuple[str, ...],
    command: Sequence[str] = CHILD,
    limit_s: float = LIMIT_S,
    *,
    gradients: bool = True,
    known: Verdict | None = None,
) -> Verdict:
    """Checks the kernel in a child process, or a second one if it is refused; caches the verdict.

    Args:
        command: of the child, which prints the same lines as `trial.main` called with further
            words: what is checked and, unless it is the device's first kernel, its name.
        limit_s: seconds until the child is killed.
        gradients: whether they are checked too.
        known: the verdict that admitted a kernel without its gradients: only these are checked.
    """
    part = "all" if gradients else "sampling"
    if known is None:
        verdict = judged(*_run((*command, part), limit_s))
    else:
        verdict = judged(*_run((*command, "gradients", str(known.kernel)), limit_s))
        checks = (*known.checks, *verdict.checks)
        more = {"passed_over": known.passed_over, "step_why": known.step_why}
        verdict = dataclasses.replace(verdict, checks=checks, **more)
    if verdict.why and (second := SECOND.get(verdict.kernel or "")):
        other = judged(*_run((*command, part, second), limit_s))
        if other.kernel == second and not other.why:
            verdict = dataclasses.replace(other, passed_over=verdict.why)
    verdict = dataclasses.replace(verdict, gradients=gradients and verdict.kernel is not None)
    if verdict.kernel or (verdict.device and accelerators):
        with contextlib.suppress(OSError):  # without a writable cache, nothing is remembered
            _remember(verdict, memory(accelerators))
    return verdict


def judged(lines: Iterable[dict[str, Any]], ended: str) -> Verdict:
    """Returns the verdict on what a child printed.

    Args:
        lines: from `trial.main`.
        ended: how the child failed; empty if it did not.
    """
    found, checks = {}, {}
    for line in lines:
        if "check" in line:
            checks.setdefault(line["check"], {}).update(line)
        elif "kernel" in line:
            found = line
    if not found:
        return Verdict(why=f"the device could not be used: {ended or 'nothing was printed'}")
    last, of_steps = [*checks][-1] if checks else "its beginning", {}
    for name in [name for name in checks if name.startswith(STEP)]:
        of_steps[name] = checks.pop(name)

    def refused(kernel: str, own: dict[str, Any], other: str) -> str:
        """Returns why the kernels of some checks are refused, which are timed against another."""
        faults = [*filter(None, map(_fault, own.values()))]
        if ended and (own is of_steps) == last.startswith(STEP):
            faults.append(f"the check {ended}, at {last}")
        raced = [each for each in own.values() if "kernel_us" in each]
        if raced and not faults:
            times = statistics.geometric_mean(
                one["kernel_us"] / one.get("blocks_us", one.get("plain_us")) for one in raced
            )
            if times > SLOWER:
                faults.append(f"it takes {times:.2f} times as long as {other}")
        return f"{kernel} is refused on {found['device']}: {faults[0]}" if faults else ""

    why = refused(found["kernel"], checks, "blockwise attention")
    step_why = refused("step_gpu", of_steps, "the step without it")
    every = *checks.values(), *of_steps.values()
    return Verdict(found["device"], found["kernel"], why, every, step_why=step_why)


def remembered(accelerators: tuple[str, ...]) -> Verdict | None:
    """Returns the cached or the shipped verdict; None if there is none that can be read."""
    cached = memory(accelerators)
    for path in (cached, SHIPPED / cached.name):
        with contextlib.suppress(OSError, ValueError, TypeError):
            return _verdict(json.loads(path.read_text(encoding="utf-8")))
    return None


def memory(accelerators: tuple[str, ...]) -> pathlib.Path:
    """Returns the cache file of the verdict for these devices, this jax version and this code."""
    digest = hashlib.sha256(repr((accelerators, jax.__version__)).encode())
    here = pathlib.Path(__file__).parent
    for path in (*sorted(here.glob("*.*")), here.parent / "visibility.py"):
        digest.update(path.read_bytes())
    folder = runtime.programs_folder().expanduser() / "kernels"
    return folder / f"{digest.hexdigest()[:16]}.json"


def _remember(verdict: Verdict, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(dataclasses.asdict(verdict), indent=1), encoding="utf-8")
    unfinished.replace(path)


def _verdict(values: dict[str, Any] | None) -> Verdict | None:
    if not values:
        return None
    values["checks"] = tuple(values["checks"])
    return Verdict(**values)


def _fault(found: dict[str, Any]) -> str:
    """Returns the fault that one check found; a check that did not end found none."""
    if not found.get("off", 0.0) <= MOST_OFF:  # NaN too
        return f"it is off by {found['off']:.3g} on {found['check']}"
    if not found.get("same_bits", True):
        return f"it gives other bits the second time on {found['check']}"
    return ""


def _run(command: Sequence[str], limit_s: float) -> tuple[list[dict[str, Any]], str]:
    """Returns the lines that a child printed, and how it failed; empty if it did not."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=_environment()
        )
        try:
            status = _wait(child, out, limit_s)
            ended = "" if status == 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"did not end within {limit_s:g} s"
        finally:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_S)
        out.seek(0)
        err.seek(0)
        last = [line.strip() for line in err if line.strip()][-1:]
        if ended and last:
            ended += f" ({last[0][:200]})"
        return [json.loads(line) for line in out if line.startswith("{") and "}\n" in line], ended


def _wait(child: subprocess.Popen, out: IO[str], limit_s: float) -> int:
    """Waits for a child, and shows which of its programs is compiled; returns its status."""
    end = time.monotonic() + limit_s
    with side_by_side.ProgressLine(0, "attention's kernel is checked") as progress:
        while True:
            try:
                return child.wait(max(0, min(LOOK_S, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= end:
                    raise
            # Read without moving the place in the file where the child writes.
            printed = os.pread(out.fileno(), os.fstat(out.fileno()).st_size, 0).splitlines()
            found = [json.loads(line) for line in printed if line.startswith(b'{"program"')]
            if found:
                progress.number = found[-1]["of"]
                progress.show([_DONE] * found[-1]["program"])


_DONE: concurrent.futures.Future = concurrent.futures.Future()
_DONE.set_result(None)


def _environment() -> dict[str, str]:
    """Returns the environment of a child: it finds this package, and takes one device."""
    more = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_TRACEBACK_FILTERING": "off",  # so that the last line of a traceback is the error
    }
    if platforms := jax.config.values["jax_platforms"]:
        more["JAX_PLATFORMS"] = platforms
    if jax.distributed.is_initialized():  # or a TPU slice would wait for all processes
        more |= {
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_VISIBLE_DEVICES": "0",
        }
    return os.environ | more
