#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains on rented GPUs through SkyPilot, as a managed job (pip install skypilot[aws,gcp,...]).
#
#   NODES=1 GPUS=H200:8 launch/skypilot.sh [--dry-run] --config=... --workdir=... [other flags]
#
# What is run on the machines stands in skypilot.yaml. A preempted job is started again and goes on
# from the state in --workdir, which must outlive the machines: a bucket or a mounted volume.
set -euo pipefail

dry=false
[ "${1:-}" = --dry-run ] && dry=true && shift
if [ $# = 0 ]; then
    sed -n '3,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

printf -v flags '%q ' "$@"
launch=(sky jobs launch --yes "--num-nodes=${NODES:-1}" "--gpus=${GPUS:-H200:8}"
    "--env=FLAGS=$flags" "$(dirname "$0")/skypilot.yaml")
if $dry; then
    printf '%q ' "${launch[@]}"
    echo
else
    "${launch[@]}"
fi
