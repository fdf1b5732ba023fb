#!/usr/bin/env bash
# run_documents.sh [BUILD]: train_documents as a whole. dev/test/test_documents compares it with the
# reference. Then come validation and samples, and the virtual clock, which sees the tiles and pairs
# of ranks that are skipped. Ends with `N passed, N failed`.
# needs: fp32/train_documents fp32/train_data fp32/dev/test/test_documents
# needs: bf16/train_documents bf16/dev/test/test_documents
. "$(dirname "$0")/report.sh"
need_gpus 4
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41

verdicts 'test_documents fp32' "$build/dev/test/test_documents" "$build"
bf16=${build/fp32/bf16}
verdicts 'test_documents bf16 layouts' "$bf16/dev/test/test_documents" "$bf16" layouts

golden=dev/test/golden
flags="--init $golden --train-data $golden/train.bin --val-data $golden/train.bin --global-batch 8
    --micro-batch 2 --steps 2 --val-every 2"

# validated FLAG...: the validation's loss and the norms of a run.
validated() {
    # shellcheck disable=SC2086
    "$@" $flags 2>&1 | grep -oE 'validation loss [0-9.]+|norm [0-9.]+'
}
alone=$(validated "$build/train_documents" --eot 7)
ring=$(validated $launch -n 4 "$build/train_documents" --eot 7 --context 4 --context-by ring)
[ "$(wc -l <<<"$alone")" -ge 3 ] && [ "$alone" = "$ring" ]
report $? "validation and norms: the same on 1 rank and on a ring of 4: ${alone//$'\n'/, }"

model='--layers 2 --heads 4 --channels 32 --seq 64 --global-batch 4 --micro-batch 1'
samples() {
    # shellcheck disable=SC2086
    "$@" --train-data $golden/train.bin $model --steps 1 --val-every 0 --sample-every 1 \
        --sample-tokens 30 2>&1 | sed -n '/^sample: /,$p' | grep -v '^step'
}
one=$(samples "$build/train_documents") four=$(samples $launch -n 4 "$build/train_documents" \
    --context 2 --context-by ring)
[ ${#one} -gt 10 ] && [ "$one" = "$four" ]
report $? 'a sample of text is the same on 1 rank and on 4'

[[ ${build##*/} == cuda* ]] && finish  # the virtual clock belongs to the stand-ins
# clock EOT: milliseconds of step 2 on a ring of 4 A100, of golden tokens in longer sequences.
clock() {
    $launch -n 4 "$build/train_documents" --train-data $golden/train.bin --eot "$1" --layers 1 \
        --heads 4 --channels 64 --seq 512 --global-batch 1 --micro-batch 1 --steps 2 \
        --val-every 0 --context 4 --context-by ring --virtual-time dev/clusters/laptop.json \
        2>&1 | sed -n 's/^step 2.* \([0-9.]*\) ms,.*/\1/p'
}
whole=$(clock 256) short=$(clock 7)
awk -v a="$whole" -v b="$short" 'BEGIN { exit !(b > 0 && b < 0.98 * a) }'
report $? "virtual clock: $short ms a step with short documents, $whole ms with whole sequences"
finish
