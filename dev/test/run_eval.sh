#!/usr/bin/env bash
# run_eval.sh [BUILD]: --eval in every trainer: text in overlapping windows, cloze and choices,
# prepared by prepare.py from files made here. Every layout must find the sums of one rank. So must
# Hugging Face's transformers, if installed, on the same weights. Bad files are refused. PYTHON
# names another interpreter.
# needs: fp32/train_gpt fp32/train_gpt_tp fp32/train_gpt_pp fp32/train_gpt_3d fp32/train_zero_bubble
# needs: fp32/train_context fp32/train_fsdp
. "$(dirname "$0")/report.sh"
python=${PYTHON:-python3}
need_gpus 8
command -v "$python" >/dev/null || skip "no $python"
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-SSE41} PYTHONDONTWRITEBYTECODE=1

# ---- the files -----------------------------------------------------------------------------------

prepare() { "$python" dev/data/prepare.py "$@" --seq 24 --out "$dir" >"$dir/out" 2>&1; }
head -c 600 LICENSE >"$dir/text"
prepare windows --text "$dir/text" --stride 8
report $? "prepare.py windows: $(cat "$dir/out")"
length=$(stat -c %s "$dir/text")
grep -q "$(((length - 24 + 7) / 8 + 1)) rows, $length tokens count" "$dir/out"
report $? 'every byte counts once, in windows that are 8 tokens apart'
printf 'The cat sat on the mat\nWe went home again\n' >"$dir/passages"
prepare cloze --text "$dir/passages" && grep -q '2 rows, 10 tokens count' "$dir/out"
report $? "prepare.py cloze: the last words and the blanks before them: $(cat "$dir/out")"
printf '{"ctx": "Sky is %d", "endings": ["blue", "grey as a", "on", "sat"], "label": %d}\n' 1 0 2 \
    3 3 "1" 4 2 5 2 6 1 \
    >"$dir/examples"
prepare choices --text "$dir/examples" && grep -q '6 examples' "$dir/out"
report $? "prepare.py choices: $(cat "$dir/out")"
# Cloze rows of single tokens of the golden case's vocabulary: a random model guesses some.
"$python" - "$dir/golden.bin" <<'PYTHON' >"$dir/out" 2>&1
import array, sys
sys.path.insert(0, "dev/data")
import eval_rows
tokens = array.array("H", open("dev/test/golden/train.bin", "rb").read()[1024:]).tolist()
rows = [(tokens[i : i + 6 + i % 19], 5 + i % 19, 1) for i in range(0, 600, 2)]
eval_rows.write_rows(sys.argv[1], eval_rows.CLOZE, 61, 0, rows)
PYTHON
report $? "300 rows of one token: $(cat "$dir/out")"

# ---- one rank, then layouts ----------------------------------------------------------------------

# A model that has learned a little, so that losses are not all alike.
"$build/train_gpt" --train-data dev/test/golden/train.bin --vocab 257 --layers 4 --channels 16 \
    --seq 24 --steps 3 \
    --lr 0.03 --out "$dir/model" >"$dir/out" 2>&1 && mv "$dir/model/step-00000003" "$dir/bytes"
report $? 'a model of bytes'

# measure RANKS TRAINER MODEL FILE FLAGS...: leaves the log
measure() {
    local n=$1 trainer=$2 model=$3 file=$4 start=()
    shift 4
    rm -f "$dir/log"
    # shellcheck disable=SC2206
    [ "$n" = 1 ] || start=($launch -n "$n")
    timeout -k 5 120 "${start[@]}" "$build/$trainer" --init "$model" --eval "$file" \
        --log "$dir/log" "$@" >"$dir/out" 2>&1 </dev/null
}
# like FILE: is the log's loss sum within 1e-6 of the one in FILE, and the rest the same?
like() {
    cat "$1" "$dir/log" 2>/dev/null | tr -d '{}"' | tr ',' '\n' | awk -F: '
        /loss_sum|perplexity/ {
            if ($1 in a) {
                d = a[$1] - $2
                if (d < 0) d = -d
                if (d > 1e-6 * $2) bad = 1
                n++
            }
            a[$1] = $2
            next
        }
        { if (($1 in a) && a[$1] != $2) bad = 1; a[$1] = $2; n++ }
        END { exit bad || n < 5 }'
}
models=("$dir/bytes" "$dir/bytes" "$dir/bytes" dev/test/golden)
files=("$dir/windows.bin" "$dir/cloze.bin" "$dir/choices.bin" "$dir/golden.bin")
for i in 0 1 2 3; do
    measure 1 train_gpt "${models[$i]}" "${files[$i]}" && [ -s "$dir/log" ] &&
        cp "$dir/log" "$dir/one.$i"
    report $? "one rank: $(cat "$dir/log")"
done
grep -qF "{\"step\":3,\"model\":\"$dir/bytes\",\"eval\":\"$dir/choices.bin\",\"eval_rows\":" \
    "$dir/one.2" &&
    grep -qF '{"step":0,"model":"dev/test/golden",' "$dir/one.3"
report $? 'a line has the step of the checkpoint, its folder and the file'
right=$(sed -n 's/.*"eval_right":\([0-9]*\),"eval_of":300.*/\1/p' "$dir/one.3")
[ "${right:-0}" -gt 0 ] && [ "${right:-300}" -lt 300 ]
report $? "of the 300 single tokens ${right:-none} are the model's first guess: some, not all"
while read -r n trainer i flags; do
    [[ $trainer = *context ]] && name="mean over a part: " || name=
    # shellcheck disable=SC2086
    measure "$n" "$trainer" "${models[$i]}" "${files[$i]}" $flags && like "$dir/one.$i"
    report $? "$name$trainer $flags: the same sums of $(basename "${files[$i]}")"
done <<'LAYOUTS'
1 train_gpt 0 --micro-batch 3 --global-batch 21
2 train_gpt_tp 3 --tensor 2 --sequence-parallel 1
2 train_zero_bubble 2 --pipeline 2 --schedule zb-h1 --dropout 0.1 --micro-batch 2 --global-batch 8
4 train_gpt_pp 1 --tensor 2 --pipeline 2 --virtual 2 --micro-batch 1 --global-batch 2
8 train_gpt_3d 0 --tensor 2 --data 2 --pipeline 2 --micro-batch 2 --global-batch 16
2 train_gpt_3d 3 --data 2 --micro-batch 4
4 train_fsdp 0 --shard 3 --micro-batch 2 --global-batch 16
4 train_context 0 --context 2 --context-by ring --micro-batch 2 --global-batch 8
2 train_context 2 --context 2 --context-by ulysses --micro-batch 3 --global-batch 6
2 train_context 3 --context 2 --context-layout contiguous --micro-batch 4
LAYOUTS

# ---- what the sums stand on ----------------------------------------------------------------------

# Validation computes windows without overlap: the same mean loss.
"$python" - "$dir/plain.bin" <<'PYTHON' >"$dir/out" 2>&1
import array, sys
sys.path.insert(0, "dev/data")
import eval_rows
tokens = array.array("H", open("dev/test/golden/train.bin", "rb").read()[1024:]).tolist()
rows = [(tokens[24 * i : 24 * i + 25], 1, 24) for i in range(16)]
eval_rows.write_rows(sys.argv[1], eval_rows.TEXT, 61, 0, rows)
PYTHON
measure 1 train_gpt dev/test/golden "$dir/plain.bin"
sum=$(sed -n 's/.*"eval_loss_sum":\([^,]*\),.*/\1/p' "$dir/log")
"$build/train_gpt" --init dev/test/golden --train-data dev/test/golden/train.bin \
    --val-data dev/test/golden/train.bin --seq 24 --micro-batch 4 --global-batch 8 --val-batches 2 \
    --steps 0 --val-every 1 --log "$dir/val" >"$dir/out" 2>&1
mean=$(sed -n 's/.*"val_loss":\([^,}]*\).*/\1/p' "$dir/val")
awk -v s="$sum" -v m="$mean" \
    'BEGIN { d = s / 384 - m; exit !(m > 0 && d < 1e-7 * m && -d < 1e-7 * m) }'
report $? "16 whole samples: the sum $sum is 384 times the validation loss $mean"

check() { "$python" dev/data/check_transformers.py "$@" >"$dir/out" 2>&1; }
if "$python" -c 'import torch, transformers' 2>/dev/null; then
    check "$dir/hf" --random 2,4,32,257,24
    report $? 'transformers makes a random GPT-2'
    for file in windows cloze choices; do
        measure 1 train_gpt "$dir/hf" "$dir/$file.bin" &&
            check "$dir/hf" "$dir/$file.bin" --log "$dir/log"
        report $? "$file: $(tail -n 1 "$dir/out")"
    done
    measure 1 train_gpt dev/test/golden "$dir/golden.bin" &&
        check dev/test/golden "$dir/golden.bin" --log "$dir/log"
    report $? "golden: $(tail -n 1 "$dir/out")"
else
    echo 'skip check_transformers.py: torch and transformers are not installed'
fi

# ---- what is refused -----------------------------------------------------------------------------

# refused PATTERN FLAGS...: exit code 2, one sentence, nothing written.
refused() {
    local pattern=$1
    shift
    rm -f "$dir/log"
    "$build/train_gpt" --log "$dir/log" "$@" >"$dir/stdout" 2>"$dir/out" </dev/null
    [ $? = 2 ] && [ "$(wc -l <"$dir/out")" = 1 ] && grep -q "^error: .*$pattern" "$dir/out" &&
        [ ! -e "$dir/log" ]
    report $? "refused: $(sed "s|$dir/||g" "$dir/out")"
}
refused 'has token [0-9]* in row 0, but the model.s vocabulary is 61' --init dev/test/golden \
    --eval "$dir/windows.bin"
refused 'needs the weights that it measures' --eval "$dir/windows.bin"
refused 'is no evaluation file' --init dev/test/golden --eval dev/test/golden/train.bin
refused 'seq 12 takes 13' --init "$dir/bytes" --eval "$dir/windows.bin" --seq 12
refused 'would overwrite' --init "$dir/bytes" --eval "$dir/windows.bin" --trace "$dir/windows.bin"
prepare windows --text "$dir/nothing"
[ $? = 1 ] && grep -q '^error: ' "$dir/out" && ! grep -q Traceback "$dir/out"
report $? "refused: $(sed "s|$dir/||g" "$dir/out")"
printf '{"ctx": 3}\n' >"$dir/broken"
prepare choices --text "$dir/broken"
[ $? = 1 ] && grep -q '^error: ' "$dir/out" && ! grep -q Traceback "$dir/out"
report $? "refused: $(sed "s|$dir/||g" "$dir/out")"
finish
