#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains on TPU slices of a GKE cluster through xpk (pip install xpk).
#
# Deprecated, as xpk is by its owners: use launch/gcluster.sh. The next release drops this script.
#
#   CLUSTER=my-cluster IMAGE=gcr.io/my/image launch/xpk.sh [--dry-run] --config=... --workdir=/mnt/share/runs/... [other flags]
#
# IMAGE contains this project, installed with its extra `tpu`, and starts in its folder. A workload
# whose slice is preempted is restarted, at most RESTARTS times, and resumes from the state in
# --workdir.
#
# --workdir, --config.train.init_from and --config.data.folder have to be on a file system that all
# hosts share and that outlives them. Attach one to the cluster, once:
#
#   xpk storage attach share --cluster=my-cluster --type=gcpfilestore --vol=default \
#       --mount-point=/mnt/share --readonly=false --auto-mount=true
#
# A bucket cannot replace it: it has no locks, and does not rename folders atomically.
#
#   NAME (sparse-lavida), TYPE (v5p-128: 64 chips), SLICES (1), RESTARTS (100)
set -euo pipefail

dry=false
[ "${1:-}" = --dry-run ] && dry=true && shift
if [ $# = 0 ] || [ -z "${CLUSTER:-}" ] || [ -z "${IMAGE:-}" ]; then
    sed -n '3,21s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

# For the flag see OVER_TPUS in programs/persistent_jit.py. 75: stopped by a signal before its end, so that the
# workload counts as failed and is restarted (EX_TEMPFAIL of sysexits.h).
printf -v train '%q ' env LIBTPU_INIT_ARGS=--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000 \
    python3 -m sparse_lavida_jax.main --distributed --stopped_exit_code=75 "$@"
echo "xpk is deprecated by its owners: launch/gcluster.sh replaces this script" >&2
create=(xpk workload create "--cluster=$CLUSTER" "--workload=${NAME:-sparse-lavida}"
    "--tpu-type=${TYPE:-v5p-128}" "--num-slices=${SLICES:-1}" "--docker-image=$IMAGE"
    "--max-restarts=${RESTARTS:-100}" "--command=$train")
if $dry; then
    printf '%q ' "${create[@]}"
    echo
else
    "${create[@]}"
fi
