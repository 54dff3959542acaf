#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains on a Cloud TPU slice, requested as a queued resource.
#
#   ZONE=us-east5-a SHARE=10.0.0.2:/share launch/tpu_pod.sh [--dry-run] --config=... [other flags]
#
# Requests the slice, waits for it, mounts SHARE, installs what is committed here on all of its
# hosts, and trains. A preempted spot slice is deleted and requested again, until training has
# ended. Needs gcloud, logged in, with a project.
#
# SHARE is an NFS export, such as one of Filestore, with write access for the user who logs in. The
# folders runs, models and prepared are on the share, so the state outlives the slice. A bucket
# cannot replace it: it has no locks, and does not rename folders atomically.
#
#   NAME (sparse-lavida), ZONE, TYPE (v5p-128: 64 chips), RUNTIME (v2-alpha-tpuv5), SPOT (true)
#   NOTICE  seconds between a slice's preemption signal and the change of its state (180)
set -euo pipefail

dry=false
[ "${1:-}" = --dry-run ] && dry=true && shift
if [ $# = 0 ] || [ -z "${ZONE:-}" ] || [ -z "${SHARE:-}" ]; then
    sed -n '3,16s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

name=${NAME:-sparse-lavida}
queue=(gcloud compute tpus queued-resources)
ask=("${queue[@]}" create "$name" "--node-id=$name" "--zone=$ZONE"
    "--accelerator-type=${TYPE:-v5p-128}" "--runtime-version=${RUNTIME:-v2-alpha-tpuv5}")
[ "${SPOT:-true}" = true ] && ask+=(--spot)
state=("${queue[@]}" describe "$name" "--zone=$ZONE" '--format=value(state.state)')
delete=("${queue[@]}" delete "$name" "--zone=$ZONE" --force --quiet)
vm=(gcloud compute tpus tpu-vm)
archive=$(mktemp -u).tar.gz
pack=(git -C "$(dirname "$0")/.." archive --format=tar.gz --output="$archive" HEAD)
copy=("${vm[@]}" scp "$archive" "$name:project.tar.gz" "--zone=$ZONE" --worker=all)
ssh=("${vm[@]}" ssh "$name" "--zone=$ZONE" --worker=all)
share=/mnt/share
mount=(--command="sudo apt-get -qq -o DPkg::Lock::Timeout=300 install -y nfs-common\
 && sudo mkdir -p $share && (mountpoint -q $share || sudo mount -t nfs $(printf %q "$SHARE") $share)\
 && mkdir -p sparse-lavida-jax $share/runs $share/models $share/prepared\
 && ln -sfn $share/runs $share/models $share/prepared sparse-lavida-jax")
install=(--command="mkdir -p sparse-lavida-jax && tar xzf project.tar.gz -C sparse-lavida-jax\
 && cd sparse-lavida-jax && python3 -m pip install -q -e '.[tpu]'")
# Hosts of a slice find each other by themselves. For the flag see OPTIONS in benchmarks/aot.py.
# 75: stopped by a signal before its end (EX_TEMPFAIL of sysexits.h).
printf -v train '%q ' env LIBTPU_INIT_ARGS=--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000 \
    python3 -m sparse_lavida_jax.main --distributed --stopped_exit_code=75 "$@"
train=(--command="cd sparse-lavida-jax && $train")

if $dry; then
    for what in ask state pack copy; do
        declare -n command=$what
        printf '%q ' "${command[@]}"
        echo
    done
    for what in mount install train; do
        declare -n command=$what
        printf '%q ' "${ssh[@]}" "${command[@]}"
        echo
    done
    printf '%q ' "${delete[@]}"
    echo
    exit
fi

"${pack[@]}"
while true; do
    "${ask[@]}"
    until [ "$("${state[@]}")" = ACTIVE ]; do
        case "$("${state[@]}")" in
        FAILED | SUSPENDED) "${delete[@]}" && "${ask[@]}" ;;
        esac
        sleep 30
    done
    if "${copy[@]}" && "${ssh[@]}" "${mount[@]}" && "${ssh[@]}" "${install[@]}" &&
        "${ssh[@]}" "${train[@]}"; then
        "${delete[@]}"
        exit
    fi
    # If the slice is still there after this, it was not preempted, and trying again would not help.
    # (Training learns of a preemption before the state of the slice shows it.)
    sleep "${NOTICE:-180}"
    if [ "$("${state[@]}")" = ACTIVE ]; then
        echo "training failed; the slice $name is left as it is: ${delete[*]}" >&2
        exit 1
    fi
    "${delete[@]}"
done
