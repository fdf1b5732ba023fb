#!/usr/bin/env bash
# moe.sh predict|table [BUILD] [ID...]: published steps of mixtures of experts (rows_moe.csv),
# simulated by train_5d of BUILD (build/cpu-bf16) on eos-2025.json. `predict` runs the rows and
# prints CSV. `table` puts predicted_moe.csv beside the published numbers, in Markdown.
#
# Each row is run as it was published, with --capacity 1 (Megatron's pad to capacity), sequence
# parallelism and ZeRO-1. If the source says nothing else, the micro-batch is one sequence, each
# chunk is one layer, and as little is recomputed as fits.
set -eu
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.."
mode=${1:-table} build=${2:-build/cpu-bf16}
shift $(($# < 2 ? $# : 2))

# simulate: reads one row from its standard input. Prints seconds, MFU in percent and the value of
# --recompute.
simulate() {
    local id source gpus L C NH KV F E k V T G b t c e p v recompute metric value note
    IFS=, read -r id source gpus L C NH KV F E k V T G b t c e p v recompute metric value note
    local model="--model mixtral --layers $L --channels $C --heads $NH --kv-heads $KV --hidden $F"
    model+=" --experts $E --top-k $k --vocab $V --seq $T --capacity 1"
    local layout="--tensor $t --context $c --expert-parallel $e --pipeline $p --virtual $v"
    layout+=" --data $((gpus / t / p)) --sequence-parallel 1 --global-batch $G --micro-batch $b"
    local tries=$recompute try
    [ "$recompute" != '?' ] || tries='none gelu layer'
    for try in $tries; do
        # shellcheck disable=SC2086
        "$build/train_5d" --simulate dev/clusters/eos-2025.json --ranks "$gpus" --steps 2 $model \
            $layout --recompute "$try" 2>&1 |
            sed -nE "s/^step ([0-9.]+) s .* MFU ([0-9.]+)%.*/\1 \2 $try/p"
    done | head -n 1
}

# rows [ID...]: the rows of these names, or all.
rows() {
    local id
    if [ $# = 0 ]; then
        tail -n +2 dev/scale/rows_moe.csv
    else
        for id in "$@"; do grep "^$id," dev/scale/rows_moe.csv; done
    fi
}

if [ "$mode" = predict ]; then
    echo 'id,predicted step s,predicted MFU %,recompute'
    rows "$@" | while read -r row; do
        said=$(simulate <<<"$row" || true)
        read -r seconds mfu recompute <<<"${said:-none none refused}"
        echo "${row%%,*},$seconds,$mfu,$recompute"
    done
    exit
fi

echo '| run | GPUs | t, c, e, p, v | recomputed | published | predicted | time is off |'
echo '|---|--:|---|---|--:|--:|--:|'
awk -F, '
    FNR == 1 { next }
    NR == FNR { seconds[$1] = $2; mfu[$1] = $3; recompute[$1] = $4; next }
    {
        id = $1
        unit = $21 == "mfu" ? "%" : " s"
        ours = $21 == "mfu" ? mfu[id] : seconds[id]
        off = $21 == "mfu" ? $22 / ours : ours / $22
        sizes = $15 ", " $16 ", " $17 ", " $18 ", " $19
        printf "| %s | %d | %s | %s ", id, $3, sizes, recompute[id]
        printf "| %.1f%s | %.1f%s | %+.1f%% |\n", $22, unit, ours, unit, 100 * (off - 1)
        group = id
        while (sub(/-(large|[0-9]+k?)$/, "", group)) {}
        e = off < 1 ? 1 - off : off - 1
        if (!(group in n)) order[++groups] = group
        sum[group] += e
        n[group]++
        total += e
        rows++
    }
    END {
        for (i = 1; i <= groups; i++) {
            group = order[i]
            name = group == "mixtral" ? "mixtral, long" : group
            printf "| %s, mean of %d | | | | | | %.1f%% |\n", name, n[group],
                   100 * sum[group] / n[group]
        }
        printf "| all, mean of %d | | | | | | %.1f%% |\n", rows, 100 * total / rows
    }' \
    dev/scale/predicted_moe.csv dev/scale/rows_moe.csv
