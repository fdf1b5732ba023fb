#!/usr/bin/env bash
# run_threads.sh [BUILD]: a short training has the same bits with 1, 2 and 3 threads, in both
# precisions. It compares every loss and norm in the log, every weight and every moment. Products
# are cut into tiles, and kernels into blocks, by their sizes alone. MPI's waits call the stand-ins'
# sched_yield. Ends with `N passed, N failed`.
# needs: fp32/train_gpt bf16/train_gpt
. "$(dirname "$0")/report.sh"
cpu_only 'a GPU has the threads that a launch names'
shown=$dir/output

# Widths that tiles and vectors do not divide, and enough rows that every product has several tiles.
train() {  # train PRECISION THREADS
    local out=$dir/$1-$2
    OMP_NUM_THREADS=$2 "${build/fp32/$1}/train_gpt" --train-data dev/test/golden/train.bin \
        --layers 2 --heads 3 \
        --channels 120 --vocab 257 --seq 60 --micro-batch 5 --steps 4 --val-every 0 --out "$out" \
            --log "$out.jsonl" \
        >"$dir/output" 2>&1 && sed -i 's/,"ms":.*//' "$out.jsonl" &&
            [ "$(grep -c '"loss"' "$out.jsonl")" = 4 ]
}
equal() {  # equal PRECISION THREADS: as with one thread
    cmp "$dir/$1-1.jsonl" "$dir/$1-$2.jsonl" &&
        cmp "$dir/$1-1"/step-*/model.safetensors "$dir/$1-$2"/step-*/model.safetensors &&
        cmp "$dir/$1-1"/step-*/optimizer.safetensors "$dir/$1-$2"/step-*/optimizer.safetensors
} >>"$dir/output" 2>&1

for precision in fp32 bf16; do
    train $precision 1
    report $? "$precision: four steps with 1 thread"
    for threads in 2 3; do
        train $precision $threads && equal $precision $threads
        report $? "$precision: the bits of 1 thread with $threads"
    done
done

# A tensor of more than 65536 elements gets its first weights from all threads.
first() {  # first PRECISION THREADS
    OMP_NUM_THREADS=$2 "${build/fp32/$1}/train_gpt" --train-data dev/test/golden/train.bin \
        --layers 1 --heads 2 --channels 150 --vocab 500 --seq 8 --steps 0 --out "$dir/first-$1-$2" \
        >"$dir/output" 2>&1
}
for precision in fp32 bf16; do
    first $precision 1
    report $? "$precision: first weights with 1 thread"
    for threads in 2 3; do
        first $precision $threads &&
            cmp "$dir/first-$precision-1/step-00000000/model.safetensors" \
                "$dir/first-$precision-$threads/step-00000000/model.safetensors" &&
            cmp "$dir/first-$precision-1/step-00000000/optimizer.safetensors" \
                "$dir/first-$precision-$threads/step-00000000/optimizer.safetensors"
        report $? "$precision: the same first weights with $threads"
    done
done
# The loader says to which file it binds a name. A library bound to libc would yield as before.
LD_BIND_NOW=1 LD_DEBUG=bindings "$build/train_gpt" --version 2>&1 | grep 'sched_yield' \
    >"$dir/output"
[ -s "$dir/output" ] && ! grep -v ' to .*/train_gpt ' "$dir/output"
report $? "each library that yields calls the stand-ins' sched_yield"

finish
