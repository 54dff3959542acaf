# SPDX-License-Identifier: Apache-2.0
"""The command `sparse-lavida`, also as `python -m sparse_lavida_jax`."""

import gc
import os
import signal
import sys
import types

OBJECTS = 50_000  # new ones between two collections; tracing makes many, and nearly all stay


def _stop(number: int, frame: types.FrameType | None) -> None:
    """Ends the process at once: while modules are imported, an exception may be lost or abort."""
    os.write(sys.stderr.fileno(), b"sparse_lavida_jax: stopped.\n")
    os._exit(130)


def main() -> int:
    """Runs the command line of this process, and returns the exit code."""
    usual = signal.default_int_handler
    is_heard = signal.getsignal(signal.SIGINT) is usual  # not with nohup
    if is_heard:
        signal.signal(signal.SIGINT, _stop)
    gc.disable()  # nothing of what importing makes is garbage
    try:
        from sparse_lavida_jax.cli import program  # takes a second, in which Ctrl-C may be pressed
    except ValueError as error:  # of jax, such as for JAX_ENABLE_X64=maybe
        print(f"sparse_lavida_jax: jax refuses a variable of its own: {error}", file=sys.stderr)
        return 2
    gc.freeze()
    gc.set_threshold(OBJECTS)
    gc.enable()
    if is_heard:
        signal.signal(signal.SIGINT, usual)
    try:
        code = program.main()
        gc.freeze()  # the process ends: to look for garbage once more takes half a second
        return code
    except SystemExit as stop:  # SIGTERM; everything is cleared up
        sys.stdout.flush()
        # The usual exit crashes while XLA computes.
        os._exit(stop.code if isinstance(stop.code, int) else 1)


if __name__ == "__main__":
    sys.exit(main())
