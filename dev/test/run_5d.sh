#!/usr/bin/env bash
# run_5d.sh [BUILD]: train_5d against the reference, at each of its five dimensions and at several
# together (dev/test/test_5d; ALL=1: every pair and more); the published models' sizes; a simulated
# step. Ends with `N passed, N failed`.
# needs: fp32/train_5d fp32/dev/test/test_5d
. "$(dirname "$0")/report.sh"
need_gpus 8
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41

verdicts 'test_5d fp32' "$build/dev/test/test_5d" "$build"

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
