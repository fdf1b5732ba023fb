#!/usr/bin/env bash
# run_moe.sh [BUILD]: the mixture of experts as a whole. dev/test/test_moe compares it with the
# reference. Then come validation, samples, --eval, both clocks, the log and its picture. Ends with
# `N passed, N failed`.
# needs: fp32/train_moe fp32/train_gpt fp32/train_gpt_3d fp32/dev/test/test_moe tools/byte_corpus
# needs: tools/experts
# needs: bf16/train_moe bf16/dev/test/test_moe
. "$(dirname "$0")/report.sh"
need_gpus 8
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41

verdicts 'test_moe fp32' "$build/dev/test/test_moe" "$build"
bf16=${build/fp32/bf16}
for group in layouts traffic; do verdicts "test_moe bf16 $group" "$bf16/dev/test/test_moe" "$bf16" \
    $group; done

build/tools/byte_corpus "$dir/train.bin" "$dir/val.bin" README.md doc/*/*.md >/dev/null || exit 1
flags="--train-data $dir/train.bin --layers 2 --heads 2 --channels 32 --seq 32 --global-batch 8
    --micro-batch 1 --top-k 2"

# samples E: the text that a run on 4 ranks with E expert ranks prints.
samples() {
    # shellcheck disable=SC2086
    $launch -n 4 "$build/train_moe" $flags --steps 3 --val-data "$dir/val.bin" --val-every 3 \
        --sample-every 3 \
        --sample-tokens 40 --expert-parallel "$1" --log "$dir/log-$1" --out "$dir/out-$1" \
            >"$dir/out" 2>&1 || return 1
    sed -n '/^sample: /,$p' "$dir/out"
    grep -c 'validation loss' "$dir/out"
}
one=$(samples 1) && four=$(samples 4) && [ "$(wc -c <<<"$one")" -gt 40 ] && [ "$one" = "$four" ]
report $? 'validation and samples: one expert rank and four print the same text'
tokens() { grep layer "$dir/log-$1" | sed 's/"\(balance\|z\)":[^,]*//g'; }
cmp -s <(tokens 1) <(tokens 4)
report $? 'and --log has the same tokens of every expert'
awk -F'[][,:}]' '/"layer"/ { sum = 0; rows++
        for (i = 1; i <= NF; i++) if ($i == "\"tokens\"") for (j = i + 2; j < i + 10; j++) sum += $j
        if (sum != 8 * 32 * 2) bad = 1 }
    END { exit bad || rows != 6 }' "$dir/log-4"
report $? 'which add up to k choices of every token, a line for each layer and step'

build/tools/experts --out "$dir/moe.svg" "$dir/log-4" 2>"$dir/out" &&
    [ "$(grep -c '<polyline' "$dir/moe.svg")" = 18 ] &&
        [ "$(grep -c 'stroke-dasharray="1.5,3"' "$dir/moe.svg")" = 2 ] &&
        [ "$(tail -n 1 "$dir/moe.svg")" = '</svg>' ]
report $? 'build/tools/experts draws a line for each expert in each layer, and what was dropped'
grep -v layer "$dir/log-4" >"$dir/no-experts"
! build/tools/experts --out "$dir/none.svg" "$dir/no-experts" 2>"$dir/out" &&
    [ ! -e "$dir/none.svg" ] &&
    grep -q 'has no lines of experts' "$dir/out"
report $? 'and refuses a log without experts in a sentence'

# evaluate E: on as many ranks, whose micro-batches and slots are others.
evaluate() {
    $launch -n "$1" "$build/train_moe" --layers 2 --heads 2 --channels 32 --seq 32 \
        --global-batch 8 --micro-batch 2 --top-k 2 --expert-parallel "$1" \
        --init "$dir/out-4/step-00000003" --eval "$dir/windows.bin" 2>"$dir/out" |
        grep '^eval loss'
}
if command -v python3 >/dev/null; then
    head -c 600 LICENSE >"$dir/text"
    python3 dev/data/prepare.py windows --text "$dir/text" --stride 8 --seq 32 --out "$dir" \
        >"$dir/out" 2>&1
    one=$(evaluate 1) && four=$(evaluate 4) && [ -n "$one" ] && [ "$one" = "$four" ]
    report $? "--eval: one expert rank and four measure the same: $one"
fi

[[ ${build##*/} == cuda* ]] && finish  # the virtual clock belongs to the stand-ins
# shellcheck disable=SC2086
"$build/train_moe" --simulate dev/clusters/dgx-a100.json --ranks 8 --layers 2 --heads 16 \
    --channels 1024 --seq 1024 \
    --expert-parallel 8 >"$dir/out" 2>&1 && grep -q 'virtual time on dgx-a100' "$dir/out"
report $? '--simulate: 8 GPUs without data'
# shellcheck disable=SC2086
for run in 1 2; do
    $launch -n 2 "$build/train_moe" $flags --steps 2 --expert-parallel 2 \
        --virtual-time dev/clusters/laptop.json 2>&1 | grep '^step 0' >"$dir/virtual-$run"
done
[ -s "$dir/virtual-1" ] && cmp -s "$dir/virtual-1" "$dir/virtual-2"
report $? '--virtual-time: the same command has the same nanoseconds'
finish
