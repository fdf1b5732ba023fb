#!/usr/bin/env bash
# run_5d.sh [BUILD]: compares train_5d with the reference (dev/test/test_5d), in fp32 and in bf16.
# It does so at each of the five dimensions and at several together. Also checks the published
# models' sizes and a simulated step. ALL=1: every pair of dimensions and more, 16 and 32 ranks,
# and, if fp32-asan/train_5d is built, with sanitizers. Ends with `N passed, N failed`.
# needs: fp32/train_5d fp32/dev/test/test_5d bf16/train_5d
. "$(dirname "$0")/report.sh"
need_gpus 8
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41

verdicts 'test_5d fp32' "$build/dev/test/test_5d" "$build"
verdicts 'test_5d bf16 layouts' "$build/dev/test/test_5d" "${build/fp32/bf16}" layouts
if [ -n "${ALL:-}" ] && [ -x "$build-asan/train_5d" ]; then
    ALL='' ASAN_OPTIONS=detect_leaks=0 verdicts 'test_5d layouts sanitized' \
        "$build/dev/test/test_5d" "$build-asan" layouts
fi

# More ranks than test_5d's 8, against one.
many="--model qwen3-moe --layers 4 --heads 8 --kv-heads 4 --channels 32 --hidden 24 --experts 8
    --vocab 61 --seq 32 --train-data dev/test/golden/train.bin --micro-batch 1 --global-batch 16
    --steps 3 --val-every 0 --documents 1 --eot 10"
printed() { grep -oE '^step.*norm [0-9.]+' "$dir/out"; }
if [ -n "${ALL:-}" ] && [ "$device" = cpu ]; then
    # shellcheck disable=SC2086
    "$build/train_5d" $many >"$dir/out" 2>"$dir/err"
    one=$(printed)
    while read -r ranks flags; do
        # shellcheck disable=SC2086
        $launch -n "$ranks" "$build/train_5d" $many $flags >"$dir/out" 2>"$dir/err" </dev/null &&
            [ "$(wc -l <<<"$one")" = 3 ] && [ "$(printed)" = "$one" ]
        report $? "$ranks ranks print one rank's losses and norms: ${flags//--/}"
    done <<END
16 --tensor 2 --data 4 --pipeline 2 --context 2 --expert-parallel 4 --sequence-parallel 1
32 --tensor 2 --data 8 --pipeline 2 --context 4 --expert-parallel 8 --virtual 2 --recompute layer
32 --tensor 2 --data 4 --pipeline 4 --context 2 --expert-parallel 2 --context-by ulysses
END
fi

# The published totals, which the names' sizes must make.
while read -r name count; do
    "$build/train_5d" --model "$name" --dry-run --seq 64 --micro-batch 1 --capacity 1.25 \
        >"$dir/out" 2>"$dir/err"
    grep -q " $count parameters" "$dir/out"
    report $? "--model $name: $count parameters"
done <<END
mixtral-8x7b 46702792704
mixtral-8x22b 140630071296
qwen3-30b-a3b 30532122624
qwen3-235b-a22b 235093634560
END

cpu_only 'a simulated step'
"$build/train_5d" --model qwen3-30b-a3b --simulate dev/clusters/eos-2025.json --ranks 64 \
    --tensor 2 --data 16 --pipeline 2 --context 2 --expert-parallel 8 --sequence-parallel 1 \
    --capacity 1.25 --recompute layer --seq 4096 --micro-batch 1 --global-batch 32 >"$dir/out" 2>&1
code=$?
[ $code = 0 ] && grep -q 'of 64 ranks' "$dir/out"
report $? 'a step of qwen3-30b-a3b on 64 simulated ranks'

finish
