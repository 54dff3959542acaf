#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains on the GPUs of several nodes under SLURM, one process per GPU.
#
#   NODES=8 GPUS=8 launch/slurm.sh [--dry-run] --config=... --workdir=/shared/runs/... [other flags]
#
# Three minutes before its time limit, and when SLURM preempts it, the job saves its state, ends and
# is queued again; it then resumes. --workdir must be on a file system that all nodes share. JAX
# finds its peers by SLURM's own variables.
#
#   NODES (1), GPUS per node (8), TIME (24:00:00), PARTITION, ACCOUNT
#   PER=node  one process per node instead, with all of its GPUs
#   PYTHON    the interpreter on the nodes (python)
#   XLA_FLAGS (--xla_gpu_deterministic_ops=true: slower, but a resumed run is bit-identical)
set -euo pipefail

dry=false
[ "${1:-}" = --dry-run ] && dry=true && shift
if [ $# = 0 ]; then
    sed -n '3,14s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

gpus=${GPUS:-8}
tasks=$gpus
# The compiler's autotuning results are kept with the compiled programs (--compilation_cache), so
# that a resumed run finds the same.
environment=(env "XLA_FLAGS=${XLA_FLAGS---xla_gpu_deterministic_ops=true}")
if [ "${PER:-gpu}" = node ]; then
    tasks=1
    # By default a process under SLURM uses only the GPU with its own local number.
    environment+=("JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((gpus - 1)))")
fi
printf -v step '%q ' srun --kill-on-bad-exit=1 \
    "${environment[@]}" "${PYTHON:-python}" -m sparse_lavida_jax.main --distributed "$@"

# The step runs in the background, as the shell could not react to a signal otherwise. SIGTERM makes
# every process save and end with status 0.
job="#!/bin/bash
again() {
    kill -TERM \$step
    wait \$step && scontrol requeue \$SLURM_JOB_ID
}
trap again USR1 TERM
$step&
step=\$!
wait \$step"

submit=(sbatch --job-name=sparse-lavida --requeue --open-mode=append --signal=B:USR1@180
    "--nodes=${NODES:-1}" "--ntasks-per-node=$tasks" "--gpus-per-node=$gpus"
    "--time=${TIME:-24:00:00}")
[ -n "${PARTITION:-}" ] && submit+=("--partition=$PARTITION")
[ -n "${ACCOUNT:-}" ] && submit+=("--account=$ACCOUNT")

if $dry; then
    printf '%q ' "${submit[@]}"
    printf '<<JOB\n%s\nJOB\n' "$job"
else
    "${submit[@]}" <<<"$job"
fi
