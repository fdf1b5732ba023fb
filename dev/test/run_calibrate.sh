#!/usr/bin/env bash
# run_calibrate.sh [BUILD]: the cluster file of a GPU from its rows of `make bench`. The published
# rows must give the published file, and the missing constants must be named. Ends with `N passed,
# N failed`.
# needs: bf16/train_gpt
. "$(dirname "$0")/report.sh"
cpu_only 'it simulates, on the CPU'
bf16=${build/fp32/bf16}
rows=dev/results/h200-2026-11-27-bench.jsonl

calibrate() {  # calibrate ROWS ARGUMENTS...
    python3 dev/scale/calibrate_gpu.py h200-1 "$1" dev/clusters/dgx-h100.json "${@:2}" >"$dir/out" \
        2>"$dir/err"
}
refused() {  # refused PATTERN ROWS: exit code 2 and one line on stderr
    calibrate "$2"
    [ $? = 2 ] && [ ! -s "$dir/out" ] && [ "$(wc -l <"$dir/err")" = 1 ] && grep -q "$1" "$dir/err"
    report $? "refused: $1"
}

calibrate $rows memory 1.41e11 'NVIDIA H200 SXM datasheet' &&
    cmp -s "$dir/out" dev/clusters/h200-1.json
report $? "dev/clusters/h200-1.json is what $rows gives"

# A slower kernel gives a slower constant, and only that.
sed '/"operation":"attention"/s/"ms":0.13104/"ms":0.26208/' $rows >"$dir/slow.jsonl"
calibrate "$dir/slow.jsonl" memory 1.41e11 'NVIDIA H200 SXM datasheet'
values() { sed -n 's/^ *"\([a-z0-9_]*\)": {"value": \([^,]*\),.*/\1 \2/p' "$1"; }
diff <(values "$dir/out") <(values dev/clusters/h200-1.json) | sed -n 's/^< //p' >"$dir/changed"
[ "$(cut -d' ' -f1 "$dir/changed" | tr '\n' ' ')" = 'flash_forward_64 flash_forward_128 ' ] &&
    awk '$2 < 0.99e14 || $2 > 1.01e14 { bad = 1 } END { exit bad }' "$dir/changed"
report $? "twice the time of attention is half its rate: $(tr '\n' ' ' <"$dir/changed")"

grep -v '"operation":"adamw"' $rows >"$dir/few.jsonl"
refused 'no row of adamw' "$dir/few.jsonl"
sed '1s/NVIDIA H200/NVIDIA A100/' $rows >"$dir/two.jsonl"
refused 'rows of several devices: NVIDIA A100, NVIDIA H200' "$dir/two.jsonl"
: >"$dir/none.jsonl"
refused 'has no rows of llmc' "$dir/none.jsonl"

# Steps of GPT-2 as measured on that GPU (dev/results/h200-2026-11-27.md): within 13%.
while read -r model batch measured; do
    "$bf16/train_gpt" --model "$model" --max-seq 1024 --seq 1024 --micro-batch "$batch" \
        --global-batch "$batch" --simulate dev/clusters/h200-1.json --ranks 1 --steps 2 \
        >"$dir/out" 2>"$dir/err"
    predicted=$(sed -n 's/^step 2\/2 | *\([0-9.]*\) ms.*/\1/p' "$dir/out")
    awk -v a="$measured" -v b="$predicted" \
        'BEGIN { e = b / a - 1; exit !(b > 0 && e < 0.13 && e > -0.13) }'
    report $? "$model, B $batch: $predicted ms, measured $measured"
done <<'END'
d12 64 117.6
d12 16 32.2
d12 4 10.3
d48 16 328.5
END

finish
