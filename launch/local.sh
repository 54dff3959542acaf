#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains on this machine, on all of its devices.
#
#   launch/local.sh [--dry-run] --config=configs/scenes.py [--workdir=runs/scenes] [other flags]
#
# Flags are those of sparse_lavida_jax.main. Ctrl-C and SIGTERM save the state and end the run; the
# same command resumes it. A run that was killed is restarted, at most RESTARTS times.
#
#   PYTHON    the interpreter (python)
#   RESTARTS  0: never (0)
set -euo pipefail

dry=false
[ "${1:-}" = --dry-run ] && dry=true && shift
if [ $# = 0 ]; then
    sed -n '3,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

command=("${PYTHON:-python}" -m sparse_lavida_jax.main "$@")
if $dry; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi

# A signal to this shell is passed on to training, which saves and ends; it may come before training
# has started. Training has its own process group: Ctrl-C, which reaches a whole group, would be a
# second signal and end it at once.
set -m
child=
early=false
tell() {
    if [ -n "$child" ]; then
        kill -TERM "$child" 2>/dev/null || true
    else
        early=true
    fi
}
trap tell TERM INT
for ((left = ${RESTARTS:-0}; ; left--)); do
    child=
    "${command[@]}" &
    child=$!
    if $early; then
        tell
    fi
    status=0
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do # a signal interrupted the wait
        status=0
        wait "$child" || status=$?
    done
    # 137: killed, for example because the machine ran out of memory. Errors of ours are not worth
    # another try.
    if [ "$status" != 137 ] || [ "$left" -le 0 ]; then
        exit "$status"
    fi
    echo "killed; starting again from the last saved state, $((left - 1)) more times" >&2
done
