#!/usr/bin/env bash
# run_muon.sh [BUILD]: Muon as a whole. dev/test/test_muon compares it with the reference and with
# PyTorch. Then come validation, samples and both clocks. Ends with `N passed, N failed`.
# needs: fp32/train_muon fp32/train_data fp32/dev/test/test_muon tools/byte_corpus
# needs: bf16/train_muon bf16/train_data bf16/dev/test/test_muon
. "$(dirname "$0")/report.sh"
need_gpus 8
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41

verdicts 'test_muon fp32' "$build/dev/test/test_muon" "$build"
bf16=${build/fp32/bf16}
for group in layouts checkpoints costs; do
    verdicts "test_muon bf16 $group" "$bf16/dev/test/test_muon" "$bf16" $group
done

build/tools/byte_corpus "$dir/train.bin" "$dir/val.bin" README.md doc/*/*.md >/dev/null || exit 1
model='--layers 2 --heads 2 --channels 32 --seq 32 --global-batch 8 --micro-batch 2'
flags="--train-data $dir/train.bin $model"

# samples DISTRIBUTE: the text and the validation that a run on 4 ranks prints.
samples() {
    # shellcheck disable=SC2086
    $launch -n 4 "$build/train_muon" $flags --distribute "$1" --steps 3 --val-data "$dir/val.bin" \
        --val-every 3 --sample-every 3 --sample-tokens 40 >"$dir/out" 2>&1 || return 1
    sed -n '/^sample: /,$p' "$dir/out"
    grep 'validation loss' "$dir/out"
}
whole=$(samples whole) && gathered=$(samples gathered) && [ "$(wc -c <<<"$whole")" -gt 40 ] &&
    [ "$whole" = "$gathered" ]
report $? 'validation and samples: whole matrices and gathered updates print the same'

[[ ${build##*/} == cuda* ]] && finish  # the virtual clock belongs to the stand-ins
# simulated DISTRIBUTE: the milliseconds of the last step of 8 GPUs.
simulated() {
    "$build/train_muon" --simulate dev/clusters/dgx-a100.json --ranks 8 --layers 4 --heads 16 \
        --channels 1024 --seq 1024 --micro-batch 4 --distribute "$1" 2>"$dir/err" |
        sed -n 's/^step 2.* \([0-9.]*\) ms,.*/\1/p'
}
whole=$(simulated whole) gathered=$(simulated gathered)
awk -v a="$whole" -v b="$gathered" 'BEGIN { exit !(a > 0 && a < b) }'
report $? "--simulate: 8 GPUs, $whole ms a step with whole matrices, $gathered gathered"
# The ranks' own matrices cost unlike launches; a simulation shows rank 0.
trained() {
    # shellcheck disable=SC2086
    $launch -n 4 "$build/train_muon" $flags --steps 2 --distribute "$1" --log "$dir/clock-$1" \
        --virtual-time dev/clusters/dgx-a100.json >"$dir/out" 2>"$dir/err" &&
        "$build/train_muon" $model --simulate dev/clusters/dgx-a100.json --ranks 4 \
            --distribute "$1" --log "$dir/simulated-$1" >"$dir/out" 2>"$dir/err" &&
        paste <(sed 's/.*"ms":\([0-9.]*\).*/\1/' "$dir/clock-$1") \
            <(sed 's/.*"ms":\([0-9.]*\).*/\1/' "$dir/simulated-$1") |
        awk '!($1 > 0 && $2 > 0.998 * $1 && $2 < 1.002 * $1) { bad = 1 }
            END { exit bad || NR != 2 }'
}
for distribute in whole gathered; do
    trained $distribute
    report $? "--simulate has the times of a run of all ranks, to 0.2%: 4 ranks, $distribute"
done
for run in 1 2; do
    # shellcheck disable=SC2086
    $launch -n 4 "$build/train_muon" $flags --steps 2 --virtual-time dev/clusters/laptop.json \
        2>&1 | grep '^step 0' >"$dir/virtual-$run"
done
[ -s "$dir/virtual-1" ] && cmp -s "$dir/virtual-1" "$dir/virtual-2"
report $? '--virtual-time: the same command has the same nanoseconds'
finish
