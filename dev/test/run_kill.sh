#!/usr/bin/env bash
# run_kill.sh [BUILD] [SEED]: kill -9 of a random rank at a random moment, often during a save, 20
# times. Each time the job must end by itself within 35 s with an error and leave no process.
# `--resume auto` with fewer ranks must then continue from the newest complete checkpoint, no older
# than the last one that was announced. The whole chain of killed and resumed runs must have the
# losses of one undisturbed run. So must a run of all five dimensions, killed in a save and resumed
# in another layout. The seed is printed; the same seed makes the same choices and
# delays (but the moment of a kill depends on the machine's speed). Ends with `N passed, N failed`.
# needs: fp32/train_gpt_3d fp32/train_data fp32/train_fsdp fp32/train_5d
. "$(dirname "$0")/report.sh"
seed=${2:-$(($(date +%s) % 100000))}
trainers=$build/train_
rounds=20 patience=35
need_gpus 8
for name in gpt_3d data fsdp 5d; do
    [ -x "$trainers$name" ] || { report 1 "kill: $trainers$name is not built"; finish; }
done
RANDOM=$seed
echo "seed $seed"

mkdir "$dir/pids" "$dir/tmp"
export TMPDIR=$dir/tmp OMP_NUM_THREADS=1
# Every process generates its kernels again. The plainest ones take a fraction of the time
export ONEDNN_MAX_CPU_ISA=SSE41
end_all() {  # of this test's ranks: for when it is interrupted
    local pid
    for pid in $(cat "$dir"/pids/* 2>/dev/null); do
        grep -qsz "^$trainers" "/proc/$pid/cmdline" && kill -KILL "$pid"
    done
    [ -n "${job:-}" ] && kill -KILL "$job" 2>/dev/null
    rm -rf "$dir"
}
trap end_all EXIT

model="--layers 4 --heads 4 --channels 32 --vocab 61 --train-data dev/test/golden/train.bin
       --seq 24 --micro-batch 1 --global-batch 8 --lr 1e-3 --lr-final 1 --val-every 0 --shuffle 1"

# train RANKS NAME FLAGS...: starts train_NAME in the background. Each rank leaves its process id in
# pids/ before it becomes the trainer. Sets job.
train() {
    local ranks=$1 name=$2
    shift 2
    rm -f "$dir"/pids/*
    # shellcheck disable=SC2016,SC2086
    $launch -n "$ranks" sh -c 'echo $$ >"$0/$$" && exec "$@"' "$dir/pids" "$trainers$name" $model \
        "$@" \
        >"$dir/out" 2>"$dir/err" </dev/null &
    job=$!
}

# ends SECONDS: waits until the job has ended and no rank of it is left; sets code. False if that
# takes longer.
ends() {
    local deadline=$((SECONDS + $1)) pid left
    while :; do
        left=0
        for pid in $job $(cat "$dir"/pids/* 2>/dev/null); do
            case $(sed 's/.*) \(.\).*/\1/' "/proc/$pid/stat" 2>/dev/null) in
                '' | Z) ;;
                *) left=$((left + 1)) ;;
            esac
        done
        [ $left = 0 ] && break
        [ $SECONDS -ge $deadline ] && return 1
        sleep 0.05
    done
    wait "$job" 2>/dev/null
    code=$?
    job=
}

milliseconds() { sleep "$(printf '%d.%03d' $(($1 / 1000)) $(($1 % 1000)))"; }

# newest FOLDER: the step of its newest complete checkpoint, 0 if there is none. One that lacks only
# its name, which the next run gives it, is complete: its trainer.json, which is written last, ends.
newest() {
    local name best=0 step
    for name in "$1"/{step,tmp}-*/trainer.json; do
        [ -f "$name" ] && [ "$(tail -c 2 "$name")" = '}' ] || continue
        step=${name#"$1"/*-}
        step=$((10#${step:0:8}))
        [ $step -gt $best ] && best=$step
    done
    echo $best
}

# announced: the step of the last `saved` line, 0 if there is none. A line can be cut off by the
# kill.
announced() {
    local step
    step=$(sed -n 's/^saved .*step-\([0-9]\{8\}\)$/\1/p' "$dir/out" | tail -n 1)
    echo $((10#${step:-0}))
}

all_started() { pids=("$dir"/pids/*) && [ ${#pids[@]} = "$1" ] && [ -f "${pids[0]}" ]; }
stepped() { [ "$(grep -c '^step ' "$dir/out")" -ge "$1" ]; }

# strike RANKS HOW FOLDER: kills one of the ranks. HOW: `start` while they start, `step` at any time
# of the first steps, `save` soon after the temporary folder of a save has appeared.
strike() {
    local ranks=$1 how=$2 folder=$3 pids=() victim=$((RANDOM % $1)) steps=$((1 + RANDOM % 4)) \
        delay=$RANDOM
    await all_started "$ranks"
    case $how in
        start)  # not in MPI_Init: a rank that dies there can hang Open MPI's mpirun
            await grep -q '^device' "$dir/out"
            milliseconds $((delay % 500))
            ;;
        step)
            await stepped 1
            milliseconds $((delay % 700))
            ;;
        save)
            await stepped $steps
            await compgen -G "$folder/tmp-*"
            milliseconds $((delay % 12))
            ;;
    esac
    kill -KILL "${pids[victim]##*/}"
}

# ---- kill, resume with fewer ranks, kill again ---------------------------------------------------

many=('8 gpt_3d --tensor 2 --data 2 --pipeline 2 --virtual 2'
      '8 gpt_3d --tensor 2 --data 4 --sequence-parallel 1'
      '4 fsdp --shard 3' '6 gpt_3d --data 2 --pipeline 3 --zero 0' '4 data --data 4'
      '8 gpt_3d --tensor 4 --pipeline 2')
few=('2 data --data 2' '1 gpt_3d --tensor 1' '2 gpt_3d --pipeline 2' '2 fsdp --shard 2' \
    '3 gpt_3d --pipeline 3')
hows=(step save start save step save)
out=$dir/chain log=$dir/chain.jsonl
torn=0  # kills that left an unfinished save behind
slowest=0
for ((round = 0; round < rounds; round++)); do
    read -r ranks flags <<<"${many[round % ${#many[@]}]}"
    how=${hows[RANDOM % ${#hows[@]}]}
    before=$(newest "$out")
    # shellcheck disable=SC2086
    train "$ranks" $flags --steps 100000 --save-every 1 --out "$out" --resume auto --log "$log"
    strike "$ranks" "$how" "$out"
    begin=$(date +%s%N)
    ends $patience
    status=$?
    took=$((($(date +%s%N) - begin) / 1000000))
    [ $took -gt $slowest ] && slowest=$took
    said=$(announced) there=$(newest "$out") what=
    compgen -G "$out/tmp-*" >/dev/null && torn=$((torn + 1)) && what=', in a save'
    [ $status = 0 ] && [ "$code" != 0 ]
    what="kill $((round + 1)) ($how$what) of $ranks ranks"
    report $? "$what, ${flags//--/}: ended after $took ms, code ${code:-none}"
    [ $status = 0 ] || break
    read -r ranks flags <<<"${few[RANDOM % ${#few[@]}]}"
    # shellcheck disable=SC2086
    train "$ranks" $flags --steps $((there + 1)) --out "$out" --resume auto --log "$log"
    ends $patience
    status=$?
    from=$(sed -n 's/^resuming .* after step \([0-9]*\).*/\1/p' "$dir/out")
    [ $status = 0 ] && [ "$code" = 0 ] && [ "${from:-0}" = "$there" ] && [ "$there" -ge "$said" ] &&
        [ "$there" -ge "$before" ] && [ "$(newest "$out")" = $((there + 1)) ] &&
            ! compgen -G "$out/tmp-*" >/dev/null
    report $? "     resumed by $ranks, ${flags//--/}: ${from:-0}; newest $there, announced $said"
    [ $status = 0 ] || break
done
[ $torn -gt 0 ]
report $? "$torn of $rounds kills came in the middle of a save; the slowest end took $slowest ms"

# ---- against undisturbed runs --------------------------------------------------------------------

# numbers LOG: prints step, loss and norm of each line, which do not depend on the clock.
numbers() {
    sed -nE 's/.*"step":([0-9]+),"loss":([^,]+),"grad_norm":([^,]+),.*/\1 \2 \3/p' "$1"
}

# near LOG CALM STEPS: has each step once, with losses within 1e-5 of the calm run's. Other layouts
# add in another order, and training amplifies the difference: hence a bound here, and bits below.
near() {
    paste -d ' ' <(numbers "$1") <(numbers "$2") | awk -v steps="$3" '
        function off(a, b) { return a > b ? (a - b) / b : (b - a) / b }
        { if ($1 != NR || $4 != NR || NF != 6) bad = 1
          if (off($2, $5) > most) most = off($2, $5) }
        END { printf "steps %d, largest relative difference of a loss %.1e\n", NR, most
              exit bad || NR != steps || most > 1e-5 }'
}

steps=$(newest "$out")
train 1 gpt_3d --steps "$steps" --log "$dir/calm.jsonl"
ends 200
near "$log" "$dir/calm.jsonl" "$steps" >"$dir/err"
report $? "the losses of the chain are those of one calm run: $(cat "$dir/err"), bound 1e-5"

flags='--tensor 2 --data 2 --steps 14 --save-every 1'
out=$dir/same log=$dir/same.jsonl
# shellcheck disable=SC2086
train 4 gpt_3d $flags --out "$dir/whole" --log "$dir/whole.jsonl"
ends 100
for how in save step save; do
    # shellcheck disable=SC2086
    train 4 gpt_3d $flags --out "$out" --resume auto --log "$log"
    strike 4 $how "$out"
    ends $patience
    killed_at=$(newest "$out")
    echo "     same layout: killed ($how) after step $killed_at"
done
# shellcheck disable=SC2086
train 4 gpt_3d $flags --out "$out" --resume auto --log "$log"
ends 100
status=$?
[ $status = 0 ] && [ "$code" = 0 ] && [ "$(numbers "$log" | wc -l)" = 14 ] &&
    cmp <(numbers "$log") <(numbers "$dir/whole.jsonl") &&
    cmp "$out/step-00000014/model.safetensors" "$dir/whole/step-00000014/model.safetensors" &&
    cmp "$out/step-00000014/optimizer.safetensors" "$dir/whole/step-00000014/optimizer.safetensors"
report $? 'killed three times and resumed: losses, weights and optimizer have the same bits'

# ---- five dimensions -----------------------------------------------------------------------------

five="--model qwen3-moe --kv-heads 4 --hidden 24 --experts 4 --documents 1 --eot 10"
out=$dir/five log=$dir/five.jsonl
# shellcheck disable=SC2086
train 8 5d $five --tensor 2 --data 2 --pipeline 2 --context 2 --expert-parallel 2 --steps 100000 \
    --save-every 1 --out "$out" --log "$log"
await grep -q '^saved ' "$dir/out"  # there is a step to resume from
strike 8 save "$out"
ends $patience && [ "$code" != 0 ]
report $? "kill of a rank of 8 with all five dimensions, in a save: ended with code ${code:-none}"
there=$(newest "$out")
steps=$((there + 3))
# shellcheck disable=SC2086
train 4 5d $five --data 4 --context 4 --context-by ulysses --expert-parallel 2 --steps $steps \
    --out "$out" --resume auto --log "$log"
ends 100
[ "$code" = 0 ] && grep -q "^resuming .* after step $there\$" "$dir/out"
report $? "     resumed by 4 ranks, which share each sequence another way, after step $there"
# shellcheck disable=SC2086
train 1 5d $five --steps $steps --log "$dir/calm.jsonl"
ends 100
near "$log" "$dir/calm.jsonl" $steps >"$dir/err"
report $? "     with the losses of one calm run: $(cat "$dir/err"), bound 1e-5"

# ---- a damaged checkpoint: each rank reads a share -----------------------------------------------

# A bit of each of the last four tensors, which are read by four ranks.
file=$dir/whole/step-00000014/optimizer.safetensors
flip() {  # flip OFFSET-FROM-END
    local at=$(($(stat -c %s "$file") - $1)) byte
    byte=$(od -An -tu1 -j$at -N1 "$file")
    # shellcheck disable=SC2059
    printf "\\$(printf %03o $((byte ^ 4)))" | dd of="$file" bs=1 seek=$at conv=notrunc 2>/dev/null
}
for place in 30 160 290 420; do
    flip $place
    # shellcheck disable=SC2086
    train 4 gpt_3d $flags --resume "${file%/*}"
    ends 60
    [ "$code" = 2 ] && [ "$(grep -c '^error: .*optimizer.safetensors is damaged: ' "$dir/err")" = \
        1 ] &&
        [ "$(grep -c '^error:' "$dir/err")" = 1 ]
    damage=$(sed -n 's/^error: .*damaged: //p' "$dir/err")
    report $? "4 ranks refuse a damaged checkpoint in one sentence: $damage"
    [ $place = 420 ] || flip $place
done
train 4 gpt_3d --tensor 2 --data 2 --resume auto --out "$dir/whole" --dry-run
ends 60
[ "$code" = 0 ] &&
    [ "$(grep -c '^note: the checkpoint step-00000014 is passed over: .* is damaged' "$dir/out")" \
        = 1 ] &&
    grep -q '^resuming .*step-00000013 ' "$dir/out"
report $? '--resume auto on 4 ranks says so, and takes the one before'

echo "seed $seed"
finish
