# SPDX-License-Identifier: Apache-2.0
"""A kernel is admitted before it is trusted: what was found of it on this machine's device.

Before a process first uses the device, `admitted` has a child with a time limit run
`kernels.trial`: attention by the kernel of the device, next to the reference and to blocks. The
child has ended before the device is used here, since a TPU belongs to one process at a time, and
on a GPU the first process takes most of the memory. What was found is remembered in the user's
cache for these devices, this jax and this code. A kernel that is wrong, slower than blocks, hangs
or crashes is refused, and attention runs in blocks (`attention.default_implementation`).
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax._src import xla_bridge  # no public name tells whether a device is in use

from sparse_lavida_jax import runtime
from sparse_lavida_jax.version import __version__

COMMAND = "sparse-lavida doctor --kernels"
CHILD = (sys.executable, "-m", "sparse_lavida_jax.kernels.trial")
LIMIT_S = 300.0  # of the child: some twenty programs are compiled
END_S = 10.0  # that a killed child has to end; one that waits for its driver may not
MOST_OFF = 2e-2  # from the reference, of bfloat16
SLOWER = 1.05  # times the time of blocks: less may be noise

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a child found.

    Attributes:
        device: its kind; empty where the child did not get as far.
        kernel: the kernel for it; None where there is none.
        why: why that is refused; empty where it is admitted.
        checks: what each found (`trial.main`).
    """

    device: str = ""
    kernel: str | None = None
    why: str = ""
    checks: tuple[dict[str, Any], ...] = ()


def refusal(kernel: str, device: str, accelerators: tuple[str, ...]) -> str | None:
    """Returns why a kernel is not to be used on a kind of device; None: it is admitted."""
    verdict = admitted(accelerators)
    if verdict is None:
        return (
            f"{kernel} was never checked on this machine, and its device is in use already: once it"
            f" is not, `{COMMAND}` checks it"
        )
    why = verdict.why
    if not why and (verdict.device, verdict.kernel) != (device, kernel):
        why = f"{verdict.kernel} was checked on {verdict.device}, and this is {kernel} on {device}"
    return (why and f"{why}; please report what `{COMMAND}` prints, which checks it again") or None


@functools.cache
def admitted(accelerators: tuple[str, ...]) -> Verdict | None:
    """Returns what is known of this machine's kernel, checking it first if nothing is.

    None where nothing is known and the device is in use already. Over several processes, all of
    which have to come here, the first one decides for all.

    Args:
        accelerators: of this machine (`devices.accelerators`); likewise below.
    """

    def decide() -> str:
        verdict = remembered(accelerators)
        if verdict is None and not xla_bridge.backends_are_initialized():
            log.warning("attention's kernel is checked, once for this device: some minutes.")
            verdict = check(accelerators)
        return json.dumps(verdict and dataclasses.asdict(verdict))

    found = runtime.first_decides("attention", decide, 2 * LIMIT_S)
    return _verdict(json.loads(found))


def check(
    accelerators: tuple[str, ...], command: Sequence[str] = CHILD, limit_s: float = LIMIT_S
) -> Verdict:
    """Has a child check the kernel, and remembers what it found.

    Args:
        command: of the child, which prints what `trial.main` does.
        limit_s: seconds until it is killed.
    """
    verdict = judged(*_run(command, limit_s))
    if verdict.kernel or (verdict.device and accelerators):
        with contextlib.suppress(OSError):  # a cache that cannot be written is none
            _remember(verdict, memory(accelerators))
    return verdict


def judged(lines: Iterable[dict[str, Any]], ended: str) -> Verdict:
    """Returns the verdict on what a child printed.

    Args:
        lines: of `trial.main`.
        ended: how the child ended, if not well.
    """
    found, checks = {}, {}
    for line in lines:
        if "check" in line:
            checks.setdefault(line["check"], {}).update(line)
        else:
            found = line
    if not found:
        return Verdict(why=f"the device could not be used: {ended or 'nothing was printed'}")
    faults = [*filter(None, map(_fault, checks.values()))]
    if ended:
        faults.append(f"the check {ended}, at {[*checks][-1] if checks else 'its beginning'}")
    raced = [each for each in checks.values() if "kernel_us" in each]
    if raced and not faults:
        times = statistics.geometric_mean(one["kernel_us"] / one["blocks_us"] for one in raced)
        if times > SLOWER:
            faults.append(f"it takes {times:.2f} times as long as blocks")
    why = f"{found['kernel']} is refused on {found['device']}: {faults[0]}" if faults else ""
    return Verdict(found["device"], found["kernel"], why, tuple(checks.values()))


def remembered(accelerators: tuple[str, ...]) -> Verdict | None:
    """Returns what an earlier process found; None if nothing, or nothing that can be read."""
    try:
        return _verdict(json.loads(memory(accelerators).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def memory(accelerators: tuple[str, ...]) -> pathlib.Path:
    """Returns the file that remembers the verdict on these devices, this jax and this code."""
    digest = hashlib.sha256(repr((accelerators, jax.__version__, __version__)).encode())
    for path in sorted(pathlib.Path(__file__).parent.glob("*.*")):
        digest.update(path.read_bytes())
    folder = runtime.programs_folder().expanduser() / "kernels"
    return folder / f"{digest.hexdigest()[:16]}.json"


def _remember(verdict: Verdict, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(dataclasses.asdict(verdict), indent=1), encoding="utf-8")
    unfinished.replace(path)


def _verdict(values: dict[str, Any] | None) -> Verdict | None:
    return (values and Verdict(**values | {"checks": tuple(values["checks"])})) or None


def _fault(found: dict[str, Any]) -> str:
    """Returns what is wrong with one check; one that has not ended found nothing."""
    if not found.get("off", 0.0) <= MOST_OFF:  # NaN too
        return f"it is off by {found['off']:.3g} on {found['check']}"
    if not found.get("same_bits", True):
        return f"it gives other bits the second time on {found['check']}"
    return ""


def _run(command: Sequence[str], limit_s: float) -> tuple[list[dict[str, Any]], str]:
    """Returns the lines of a child, and how it ended, if not well."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=_environment()
        )
        try:
            status = child.wait(limit_s)
            ended = "" if status == 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"did not end within {limit_s:g} s"
        finally:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_S)
        out.seek(0), err.seek(0)
        last = [line.strip() for line in err if line.strip()][-1:]
        if ended and last:
            ended += f" ({last[0][:200]})"
        return [json.loads(line) for line in out if line.startswith("{") and "}\n" in line], ended


def _environment() -> dict[str, str]:
    """Returns the variables of a child: it finds this package, and takes one device."""
    more = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_TRACEBACK_FILTERING": "off",  # the last line of an error is then the error
    }
    if jax.config.jax_platforms:
        more["JAX_PLATFORMS"] = jax.config.jax_platforms
    if jax.distributed.is_initialized():  # a slice of TPUs would wait for all of its processes
        more |= {
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_VISIBLE_DEVICES": "0",
        }
    return os.environ | more
