#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures what this project wants to know about a new accelerator first, most valuable first.
#
#   launch/device_day.sh [--dry-run] [RESULTS]
#
# Takes 40 minutes at most. Each part has a budget, of nine minutes at most, and is skipped if that is
# more than the time that is left. Run the command again to go on: with a new 40 minutes, and without
# the parts that are done. At the end it prints the outcome of each part, and a table of what was
# measured, its bars, and what was measured by hand before (RESULTS/device_day/table.md). Status 0: all
# parts are done; 143: it was stopped, and the part that ran with it.
#
# RESULTS is a folder that can be committed as it is, by default benchmarks/results,
# where the tables find the rows. RESULTS/device_day holds the output of each part, and parts.tsv;
# everything else, such as compiled programs, is in RESULTS/device_day/scratch, which git ignores.
#
# --dry-run runs every part with a tiny model on a CPU; RESULTS must then be given.
#
#   PYTHON      the interpreter (python); needs pip install -e '.[gpu,test]', or tpu
#   PYTHONPATH  folders of packages, for a machine without a network: pip install --target FOLDER
#   MINUTES     instead of 40
#   PARTS       the parts to run, separated by spaces; by default all
set -euo pipefail

dry=false
[ "${1:-}" = --dry-run ] && dry=true && shift
if [ $# -gt 1 ] || { $dry && [ $# = 0 ]; } || [[ "${1:-}" = -* ]]; then
    sed -n '3,24s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

mkdir -p "${1:-"$(dirname "$0")/../benchmarks/results"}"
results=$(cd "${1:-"$(dirname "$0")/../benchmarks/results"}" && pwd)
cd "$(dirname "$0")/.."
export SPARSE_LAVIDA_RESULTS=$results
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
day=$results/device_day
scratch=$day/scratch
ledger=$day/parts.tsv
mkdir -p "$scratch"
chmod 700 "$scratch"
echo '*' >"$scratch/.gitignore"
export XDG_CACHE_HOME=$scratch/cache
touch "$ledger"
end=$((SECONDS + ${MINUTES:-40} * 60))

python=${PYTHON:-python}
sampling=("$python" -m benchmarks.sampling --random-weights --missing)

child=
trap '[ -z "$child" ] || kill "$child" || true; exit 143' INT TERM HUP

# Notes what became of a part, and its seconds.
note() {
    sed -i "/^$1	/d" "$ledger"
    printf '%s\t%s\t%d s\n' "$1" "$2" "$3" >>"$ledger"
}

# Whether a part is asked for, and not done.
is_due() {
    [[ " ${PARTS:-$1} " = *" $1 "* ]] && ! grep -q "^$1	done" "$ledger"
}

# Runs a part, given its name, its budget in seconds and its command, unless it is done.
part() {
    local name=$1 budget=$2 begin=$SECONDS status=0 became log left=$((end - SECONDS))
    shift 2
    is_due "$name" || return 0
    if [ "$budget" -gt "$left" ]; then
        echo "== $name: skipped, since it may take $budget s and $left s are left"
        note "$name" "skipped: no time" 0
        return
    fi
    [ "$left" -lt 520 ] || left=520
    echo "== $name ($budget s): $*"
    # In the background, so that a signal is handled at once: timeout passes it to the command.
    exec {log}> >(tee "$day/$name.log")
    local writer=$!
    timeout --kill-after=20 "$left" "$@" >&"$log" 2>&1 &
    child=$!
    exec {log}>&-
    wait "$child" || status=$?
    wait "$writer" || true
    child=
    became="done"
    grep -q '^no time for' "$day/$name.log" && became="to go on"
    [ "$status" = 0 ] || became="failed ($status)"
    [ "$status" != 124 ] || became="out of time"
    note "$name" "$became" $((SECONDS - begin))
}

# Measures rows of a suite: the part, its budget, the suite and the ids of rows.
rows() {
    local minutes=$(($2 / 60))
    ! $dry || minutes=0
    part "$1" "$2" "${sampling[@]}" --config="$config" --runs="$runs" --suite="$3" --rows="$4" \
        --minutes=$minutes
}

if $dry; then
    export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_backend_optimization_level=0 # quick to compile
    config=configs/lavida_o_tiny.py runs=5 image=t2i64 edit=edit64 few=k4
    attention=(--dry-run --shapes=decode_mid --batches=1)
    lora=(--config="$config:lora" --batch=2 --runs=2) scenes=(--seconds=400 --reports=2)
    large=configs/scenes_gpu.py:tiny
else
    config=configs/lavida_o.py runs=7 image=t2i1024 edit=edit1024 few=k8
    attention=(--batches=1 --minutes=2 --shapes="decode_mid,t2i_1536,decode_early,decode_late")
    lora=(--config=configs/lavida_o_lora.py --batch=8 --runs=12) scenes=(--seconds=60)
    large=configs/scenes_gpu.py
fi
sparse=sparse/b1 dense=dense_lean/b1

part admission 90 "$python" -m sparse_lavida_jax doctor --kernels
part first_image 150 "$python" -m benchmarks.first_image --config="$config"
rows image 180 headline "$image/$sparse,$image/$dense,$image/dense_released/b1"
rows edit 180 edit "$edit/$sparse,$edit/$dense"
rows reasoning 180 reasoning "reasoning/sparse/b1/$few,reasoning/dense_cached/b1/$few"
rows batch 150 batch "$image/sparse/b8,$image/dense_lean/b8"
part generate 60 "$python" -m benchmarks.first_image
part scenes 90 "$python" -m benchmarks.steps --config=configs/scenes.py "${scenes[@]}"
part attention 150 "$python" -m benchmarks.attention "${attention[@]}"
part profile 90 "${sampling[@]}" --config="$config" --suite=headline --rows="$image/$sparse" --profile
part tests_1 300 "$python" -m pytest -q tests/gpu --half=1
part tests_2 300 "$python" -m pytest -q tests/gpu --half=2
part lora 240 "$python" -m benchmarks.training "${lora[@]}"

# Trains as long as there is time, in pieces: the same command goes on with the run until it has
# scored itself.
for piece in 1 2 3 4 5; do
    seconds=$((end - SECONDS - 60))
    [ $seconds -lt 440 ] || seconds=440
    [ $seconds -gt 180 ] || seconds=180
    part scenes_gpu $((seconds + 60)) "$python" -m benchmarks.steps --config="$large" \
        --seconds=$seconds --workdir="$scratch/scenes_gpu"
    if [ -f "$scratch/scenes_gpu/report.md" ]; then
        cp "$scratch/scenes_gpu/report.md" "$day/scenes_gpu.md"
        ! is_due scenes_gpu || note scenes_gpu "done" $((piece * seconds))
        break
    fi
    if $dry || ! grep -q "^scenes_gpu	done" "$ledger"; then
        break
    fi
    note scenes_gpu "to go on" $((piece * seconds))
done

echo "== what became of the parts"
cat "$ledger"
grep -hE ' is (admitted|refused)' "$day/admission.log" || true
echo "== measured, bars, and before"
"$python" -m benchmarks.device_day "$day" | tee "$day/table.md"
! cut -f2 "$ledger" | grep -qv '^done'
