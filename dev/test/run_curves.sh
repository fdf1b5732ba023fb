#!/usr/bin/env bash
# run_curves.sh [BUILD]: two data sets blended by weight over several shuffled epochs. The batch
# grows (--ramp), and the learning rate counts samples. Every layout must have the curve of one
# rank, and a resume its bits. Ends with `N passed, N failed`.
# needs: fp32/train_gpt fp32/train_gpt_tp fp32/train_gpt_pp fp32/train_gpt_3d fp32/train_zero_bubble
# needs: tools/byte_corpus
. "$(dirname "$0")/report.sh"
build=$(realpath -m "$build")
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-SSE41}

need_gpus 8

build/tools/byte_corpus "$dir/a.bin" "$dir/a_val.bin" Makefile >"$dir/out" 2>&1 &&
    build/tools/byte_corpus "$dir/b.bin" "$dir/b_val.bin" LICENSE >>"$dir/out" 2>&1 || exit 1
cd "$dir" || exit 1

# train RANKS TRAINER FLAGS...
train() {
    local n=$1 trainer=$2 start=()
    shift 2
    # shellcheck disable=SC2206
    [ "$n" = 1 ] || start=($launch -n "$n")
    timeout -k 5 120 "${start[@]}" "$build/$trainer" --train-data '0.9:b.bin,0.1:a.bin' \
        --shuffle 1 --layers 4 --heads 4 --channels 16 --seq 32 --micro-batch 2 --global-batch 32 \
        --ramp 8,8,90 --warmup 4 --lr 1e-2 --steps 14 "$@" >out 2>&1 </dev/null
}
# curve LOG: step, loss, norm and learning rate of each line.
curve() { sed -n \
    's/.*"step":\([0-9]*\),"loss":\([^,]*\),"grad_norm":\([^,]*\),"lr":\([^,]*\),.*/\1 \2 \3 \4/p' \
    "$1"; }
# differ LOG: prints the largest relative difference of losses and of norms from one rank's, if the
# rates are the same.
differ() {
    paste -d' ' <(curve one.log) <(curve "$1") | awk '
        function off(a, b) { return (a > b ? a - b : b - a) / a }
        NF != 8 || $1 != $5 || $4 != $8 { bad = 1 }
        { if (off($2, $6) > loss) loss = off($2, $6); if (off($3, $7) > norm) norm = off($3, $7) }
        END {
            if (bad || NR != 14) print "none"
            else printf "%.1e %.1e %d\n", loss, norm, (loss > 1e-5 || norm > 1e-3)
        }'
}

train 1 train_gpt --log one.log --save-every 5 --keep 0 --out whole
report $? 'one rank trains'
grep -q 'ramp         from 8 sequences by 8 over 90 samples' out
report $? "it says how the batch grows: $(grep '^ramp' out)"

# The text that weighs 0.9 has fewer samples than the run reads of it: several epochs.
samples=$((($(od -An -td4 -j8 -N4 b.bin) - 1) / 32))
[ $((304 * 9 / 10)) -gt $((3 * samples)) ]
report $? "the larger source has $samples samples and gives 273: several epochs, each shuffled anew"

# Checks the learning rate by the rule, and tokens/s times the time in the log. The batch is 8, 16,
# 24, then 32.
sed 's/.*"ms":\([^,]*\),"tokens_per_s":\([^,}]*\).*/\1 \2/' one.log |
    paste -d' ' <(curve one.log) - |
    awk 'BEGIN { seen = 0; pi = atan2(0, -1) }
    { batch = seen >= 90 ? 32 : 8 + 8 * int(seen * 3 / 90)
      lr = $1 <= 4 ? 1e-2 * $1 / 4 : 1e-3 + 9e-3 * 0.5 * (1 + cos(pi * ($1 - 4) / 10))
      tokens = $5 * $6 / 1000
      if ($4 < lr * (1 - 1e-8) || $4 > lr * (1 + 1e-8)) bad = 1
      if (tokens < 31.99 * batch || tokens > 32.01 * batch) bad = 1
      seen += batch }
    END { exit bad || seen != 304 }'
report $? 'warm-up and decay follow the steps, and the batch grows with the samples seen'

while read -r n trainer flags; do
    rm -f log
    # shellcheck disable=SC2086
    train "$n" "$trainer" $flags --log log && read -r loss norm bad <<<"$(differ log)" &&
        [ "${bad:-1}" = 0 ]
    report $? "$trainer $flags: losses differ by $loss, norms by $norm, rates not at all"
done <<'LAYOUTS'
2 train_gpt_tp --tensor 2
2 train_zero_bubble --pipeline 2 --schedule zb-h1
4 train_gpt_pp --tensor 2 --pipeline 2 --virtual 2
8 train_gpt_3d --tensor 2 --data 2 --pipeline 2 --virtual 2
4 train_gpt_3d --data 4
LAYOUTS

# Step 5 is in the middle of the ramp.
train 1 train_gpt --resume whole/step-00000005 --out part --log part.log
same=$?
for file in model optimizer; do
    [ $same = 0 ] && cmp "whole/step-00000014/$file.safetensors" \
        "part/step-00000014/$file.safetensors" >>out 2>&1
    same=$?
done
report $same 'a resume on the ramp has the same bits'
sed 's/"lr_unit": 0/"lr_unit": 1/' whole/step-00000005/trainer.json >trainer.json
cp -r whole/step-00000005 samples && mv trainer.json samples/trainer.json
train 1 train_gpt --resume samples --steps 6
[ $? = 2 ] && grep -q '^error: .*"lr_unit" is malformed' out
report $? 'a checkpoint of a version that counted the warm-up in samples is refused'

# With other weights, sets or sizes of sets sample k is another one: a resume is refused. The files
# may move.
train 1 train_gpt --resume whole/step-00000005 --train-data '9:b.bin,1:a.bin' --steps 6
report $? 'a resume with the same weights in other words'
ln -s b.bin moved.bin
train 1 train_gpt --resume whole/step-00000005 --train-data '0.9:moved.bin,0.1:a.bin' --steps 6
report $? 'a resume with data that have moved'
weights="weight x samples: 9 x $samples + 1 x [0-9]*, each in an order of its own"
for data in '0.8:b.bin,0.2:a.bin' '0.9:a.bin,0.1:b.bin' b.bin '0.9:[ab].bin,0.1:a.bin'; do
    train 1 train_gpt --resume whole/step-00000005 --train-data "$data" --out other --log other.log
    [ $? = 2 ] && [ "$(grep -c '^error: ' out)" = 1 ] && [ ! -e other.log ] &&
        ! ls other/step-* >/dev/null 2>&1 &&
        grep -q "^error: the checkpoint was trained on other data ($weights) than" out
    report $? "a resume with $data is refused: $(grep '^error: ' out)"
done
train 1 train_gpt --resume whole/step-00000005 --train-data '0.8:b.bin,0.2:a.bin' --verify 0 \
    --steps 6
report $? '--verify 0 goes on with them'

finish
