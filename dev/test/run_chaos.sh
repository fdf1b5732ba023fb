#!/usr/bin/env bash
# run_chaos.sh [BUILD]: late messages, a rank that stands still for 3 s and a rank that is ten times
# slower. They must change no bit, and the profile of its trace must name the slow rank. Ends with
# `N passed, N failed`.
# needs: fp32/train_gpt_3d tools/profile
. "$(dirname "$0")/report.sh"
cpu_only 'a stopped process does not stop its GPU'
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41
job=
end_all() {
    local pid
    for pid in $(cat "$dir"/pids/* 2>/dev/null) $job; do kill -KILL "$pid" 2>/dev/null; done
    rm -rf "$dir"
}
trap end_all EXIT
mkdir "$dir/pids"
slow_rank=2

# train NAME: starts 12 steps of 4 ranks. Each rank writes its process id to a file named by its
# number. Sets job.
train() {
    # shellcheck disable=SC2016,SC2086
    $launch -n 4 sh -c 'echo $$ >"$0/${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" && exec "$@"' "$dir/pids" \
        "$build/train_gpt_3d" --tensor 2 --data 2 --layers 2 --heads 4 --channels 64 --vocab 61 \
        --seq 24 --train-data dev/test/golden/train.bin --micro-batch 2 --global-batch 16 \
        --steps 12 --trace "$dir/trace.json" --out "$dir/$1" --log "$dir/$1.jsonl" \
        >"$dir/out" 2>"$dir/err" </dev/null &
    job=$!
}
# same NAME: do weights, optimizer and losses have the bits of the calm run?
same() {
    local name
    for name in model optimizer; do
        cmp "$dir/$1/step-00000012/$name.safetensors" "$dir/calm/step-00000012/$name.safetensors" ||
            return 1
    done
    cmp <(numbers "$dir/$1.jsonl") <(numbers "$dir/calm.jsonl")
}
said() { build/tools/profile "$dir/trace.json" | grep 'as long as the median rank'; }

: >"$dir/out"
train calm
wait $job
[ $? = 0 ] && [ "$(wc -l <"$dir/calm.jsonl")" = 12 ] && [ -n "$(said)" ]
report $? "a calm run. $(said)"

: >"$dir/out"
NCCL_DELAY=random:5:4000 train late
wait $job
[ $? = 0 ] && same late
report $? 'messages up to 4 ms late: the same bits'

: >"$dir/out"
train still
await grep -q '^step  *2/' "$dir/out"
pid=$(cat "$dir/pids/$slow_rank")
kill -STOP "$pid"
sleep 3
kill -CONT "$pid"
wait $job
[ $? = 0 ] && same still
report $? "rank $slow_rank stands still for 3 s: the same bits"

: >"$dir/out"
train slow
# Before 12 quick steps begin
until grep -q '^device' "$dir/out" || ! kill -0 $job 2>/dev/null; do sleep 0.01; done
pid=$(cat "$dir/pids/$slow_rank")
while kill -STOP "$pid" 2>/dev/null; do  # a tenth of the time
    sleep 0.045
    kill -CONT "$pid"
    sleep 0.005
done
wait $job
[ $? = 0 ] && same slow && [[ $(said) == "The others wait for rank $slow_rank, which "* ]]
report $? "rank $slow_rank is ten times slower: the same bits. $(said)"

finish
