#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains on TPU slices of a GKE cluster through gcluster, of Google's Cluster Toolkit.
#
#   CLUSTER=my-cluster IMAGE=us-docker.pkg.dev/my/repo/image:1 SHARE=my-claim \
#       launch/gcluster.sh [--dry-run] --config=... --workdir=/mnt/share/runs/... [other flags]
#
# IMAGE contains this project, installed with its extra `tpu`, and starts in its folder: see
# Containerfile. A workload whose slice is preempted is restarted, at most RESTARTS times, and
# resumes from the state in --workdir.
#
# SHARE is a volume claim of the cluster, such as one of Filestore; it is mounted at /mnt/share.
# --workdir, --config.train.init_from and --config.data.folder have to be on it, since the state
# must outlive the hosts. A bucket cannot replace it: it has no locks, and does not rename folders
# atomically.
#
# Project and zone are those of `gcluster job config set project` and `... location`.
#
#   NAME (sparse-lavida), SLICES (1), RESTARTS (100), GRACE (3m): time to save when preempted
#   TYPE (ct5p-hightpu-4t), TOPOLOGY (4x4x4: 64 chips); shorthands such as v6e-8 need no topology
set -euo pipefail

dry=false
[ "${1:-}" = --dry-run ] && dry=true && shift
if [ $# = 0 ] || [ -z "${CLUSTER:-}" ] || [ -z "${IMAGE:-}" ] || [ -z "${SHARE:-}" ]; then
    sed -n '3,21s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

# For the flag see OVER_TPUS in programs/persistent_jit.py. 75: stopped by a signal before its end, so that the
# workload counts as failed and is restarted (EX_TEMPFAIL of sysexits.h).
printf -v train '%q ' env LIBTPU_INIT_ARGS=--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000 \
    python3 -m sparse_lavida_jax.main --distributed --stopped_exit_code=75 "$@"
topology=${TOPOLOGY-4x4x4}
[ -n "${TYPE:-}" ] && topology=${TOPOLOGY:-}
submit=(gcluster job submit "--cluster=$CLUSTER" "--name=${NAME:-sparse-lavida}"
    "--compute-type=${TYPE:-ct5p-hightpu-4t}" "--num-slices=${SLICES:-1}" "--image=$IMAGE"
    "--restarts=${RESTARTS:-100}" "--grace-period=${GRACE:-3m}" "--mount=$SHARE;/mnt/share;rw"
    "--command=$train")
[ -n "$topology" ] && submit+=("--topology=$topology")
if $dry; then
    printf '%q ' "${submit[@]}"
    echo
else
    "${submit[@]}"
fi
