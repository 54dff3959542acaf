#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures everything that this project wants to know about a new accelerator, most valuable first.
#
#   launch/device_day.sh [--dry-run] [RESULTS]
#
# Each part may take nine minutes. Run the command again to continue parts that failed or ran out of
# time; finished parts are not repeated. At the end it prints the outcome of each part and which
# bars were met. Status 0: all parts are done; 143: it was stopped, and the part that ran with it.
#
# RESULTS is a folder that can be committed as it is, by default sparse_lavida_jax/bench/results,
# where the tables find the rows; RESULTS/device_day holds the output of each part, and parts.tsv.
# Tuning also rewrites sparse_lavida_jax/kernels/tile_sizes.json.
#
# --dry-run runs every part with a tiny model on a CPU; RESULTS must then be given.
#
#   PYTHON  the interpreter (python); needs pip install -e '.[gpu,test]', or tpu
#   PARTS   the parts to run, separated by spaces; by default all
set -euo pipefail

dry=false
[ "${1:-}" = --dry-run ] && dry=true && shift
if [ $# -gt 1 ] || { $dry && [ $# = 0 ]; } || [[ "${1:-}" = -* ]]; then
    sed -n '3,19s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

mkdir -p "${1:-"$(dirname "$0")/../sparse_lavida_jax/bench/results"}"
results=$(cd "${1:-"$(dirname "$0")/../sparse_lavida_jax/bench/results"}" && pwd)
cd "$(dirname "$0")/.."
export SPARSE_LAVIDA_RESULTS=$results
day=$results/device_day
ledger=$day/parts.tsv
mkdir -p "$day"
touch "$ledger"

python=${PYTHON:-python}
attention=("$python" -m sparse_lavida_jax.bench.attention)
sampling=("$python" -m sparse_lavida_jax.bench.sampling --random-weights --missing --minutes=7)
training=("$python" -m sparse_lavida_jax.bench.training)
check=("$python" -m sparse_lavida_jax doctor --kernels)
suites=(headline ablation edit reasoning quant fastpath batch)

child=
trap '[ -z "$child" ] || kill "$child" || true; exit 143' INT TERM HUP

# Runs a part, given its name and its command, unless it is done.
part() {
    local name=$1 begin=$SECONDS status=0 became log
    shift
    [[ " ${PARTS:-$name} " = *" $name "* ]] || return 0
    grep -q "^$name	done" "$ledger" && return
    echo "== $name: $*"
    # In the background, so that a signal is handled at once: timeout passes it to the command.
    exec {log}> >(tee "$day/$name.log")
    local writer=$!
    timeout --kill-after=20 520 "$@" >&"$log" 2>&1 &
    child=$!
    exec {log}>&-
    wait "$child" || status=$?
    wait "$writer" || true
    child=
    became="done"
    grep -q '^no time for' "$day/$name.log" && became="to go on"
    [ "$status" = 0 ] || became="failed ($status)"
    [ "$status" != 124 ] || became="out of time"
    sed -i "/^$name	/d" "$ledger"
    printf '%s\t%s\t%d s\n' "$name" "$became" $((SECONDS - begin)) >>"$ledger"
}

if $dry; then
    export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_backend_optimization_level=0 # quick to compile
    tiny=configs/lavida_o_tiny.py
    part admission "${check[@]}"
    part tests "$python" -m pytest -q tests/gpu
    part attention "${attention[@]}" --dry-run --shapes=decode_mid --batches=1
    part tune "${attention[@]}" --tune --dry-run
    for suite in "${suites[@]}"; do
        part "$suite" "${sampling[@]}" --minutes=0 --config="$tiny" --runs=5 --suite="$suite"
    done
    part training "${training[@]}" --config="$tiny" --batch=2 --runs=2
    part lora "${training[@]}" --config="$tiny:lora" --batch=2 --runs=2
else
    full=configs/lavida_o.py
    part admission "${check[@]}"
    part tests "$python" -m pytest -q tests/gpu
    part attention "${attention[@]}" --batches=1 --shapes=t2i_1536,decode_early,decode_mid,decode_late
    part attention_long "${attention[@]}" --batches=1 \
        --shapes=single_8152,packed_8192,edit_3456,full_8192
    part headline "${sampling[@]}" --config="$full" --suite=headline
    part tune "${attention[@]}" --tune --shapes=t2i_1536,decode_early,decode_mid,decode_late
    part tune_long "${attention[@]}" --tune --shapes=single_8152,packed_8192,edit_3456
    part admission_tuned "${check[@]}"
    for suite in "${suites[@]:1}"; do
        part "$suite" "${sampling[@]}" --config="$full" --suite="$suite"
    done
    part training "${training[@]}"
    part lora "${training[@]}" --config=configs/lavida_o_lora.py --batch=8 --runs=12
    part attention_rows "${attention[@]}" --batches=2
fi

echo "== what became of the parts"
cat "$ledger"
grep -hE ' is (admitted|refused)' "$day"/admission*.log || true
echo "== bars"
"$python" -m sparse_lavida_jax.bench.table | awk '/^## /{of_bars = /bars$/} of_bars' |
    tee "$day/bars.md"
! cut -f2 "$ledger" | grep -qv '^done$'
