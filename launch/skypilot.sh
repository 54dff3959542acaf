#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains on rented GPUs through SkyPilot, as a managed job (pip install skypilot[aws,gcp,...]).
#
#   NODES=1 GPUS=H200:8 SHARE=10.0.0.2:/share launch/skypilot.sh [--dry-run] --config=... \
#       --workdir=/mnt/share/runs/... [other flags]
#
# skypilot.yaml says what is run on the machines. A preempted job is restarted and resumes from the
# state in --workdir, which must outlive the machines, as must the inputs of training
# (--config.train.init_from, --config.data.folder).
#
#   SHARE  an NFS export that the machines can reach; it is mounted at /mnt/share. Without it the
#          folders have to be on another volume. A bucket will not do: it has no locks, and does not
#          rename folders atomically
set -euo pipefail

dry=false
[ "${1:-}" = --dry-run ] && dry=true && shift
if [ $# = 0 ]; then
    sed -n '3,14s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

printf -v flags '%q ' "$@"
launch=(sky jobs launch --yes "--num-nodes=${NODES:-1}" "--gpus=${GPUS:-H200:8}"
    "--env=FLAGS=$flags" "--env=SHARE=${SHARE:-}" "$(dirname "$0")/skypilot.yaml")
if $dry; then
    printf '%q ' "${launch[@]}"
    echo
else
    "${launch[@]}"
fi
