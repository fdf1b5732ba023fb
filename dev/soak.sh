#!/usr/bin/env bash
# soak.sh BUILD [MINUTES] [SEED]: one training run, interrupted at random until the time is up, and
# resumed at another layout each time. The interruptions:
#   - ranks and launchers killed, signals, Ctrl-Z, ranks that stand still, slow messages;
#   - full disks, damaged checkpoints, copied folders, removed locks;
#   - a second run in the same folder, clocks that jump.
# Every announced save must be there and sound. Beside it, runs with large matrix products get
# signals. At the end the losses of all steps are compared with the losses of one calm run. The seed
# makes the same choices (their effect depends on the machine's speed). Ends with counts; the exit
# code is 1 if anything was lost.
set -u
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.." || exit 1
build=$(realpath -m "${1:-build/cpu-fp32}")
minutes=${2:-10} seed=${3:-$(($(date +%s) % 100000))}
case $minutes in '' | *[!0-9]*) echo "error: MINUTES=$minutes is no number" >&2; exit 2 ;; esac
RANDOM=$seed
end=$((SECONDS + 60 * minutes))
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41
. dev/launch.sh
dir=$(mktemp -d) || exit 1
mkdir "$dir/disk" "$dir/pids" "$dir/tmp"
export TMPDIR=$dir/tmp
# A disk of its own, which can be full. Without the right to mount one there are no full disks.
mount -t tmpfs -o size=24m soak "$dir/disk" 2>/dev/null && disk=1 || disk=0
job=''
cleanup() {
    local pid
    for pid in $(cat "$dir"/pids/* 2>/dev/null) $job; do kill -KILL "$pid" 2>/dev/null; done
    [ "$disk" = 1 ] && umount -l "$dir/disk"
    rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 1' HUP INT TERM

build/tools/byte_corpus "$dir/train.bin" "$dir/val.bin" README.md llmc/*.h llmc/host/*.h \
    >/dev/null || exit 1
out=$dir/disk/out log=$dir/log.jsonl
model="--layers 4 --heads 4 --channels 32 --vocab 61 --train-data dev/test/golden/train.bin
       --seq 24 --micro-batch 1 --global-batch 8 --lr 1e-3 --lr-final 1 --val-every 0 --shuffle 1"
layouts=('1' '2 --data 2' '2 --pipeline 2' '2 --tensor 2 --sequence-parallel 1'
         '4 --tensor 2 --pipeline 2' '4 --data 4'
         '4 --data 2 --pipeline 2 --zero 0' '6 --tensor 2 --pipeline 3'
         '8 --tensor 2 --data 2 --pipeline 2 --virtual 2' '4 --pipeline 4 --schedule gpipe')
events=(calm kill launcher signal signal stop slow second disk damage clock copy suspend unlock \
    large)
declare -A counts
# Checkpoints that were damaged here, and may stay among the newest for some runs
declare -A spoiled
bump() { counts[$1]=$((${counts[$1]:-0} + 1)); }

failures=0
failed() {
    failures=$((failures + 1))
    echo "FAIL run $run ($what, $ranks ranks): $1"
    tail -n 5 "$dir/out" "$dir/err" | sed 's/^/  | /'
}

# train RANKS FLAGS...: in the background; each rank leaves its process id. Sets job.
train() {
    local count=$1 command
    shift
    rm -f "$dir"/pids/*
    : >"$dir/out"
    # shellcheck disable=SC2206,SC2086
    command=("$build/train_gpt_3d" $model "$@" --out "$out" --log "$log" --resume auto --keep 3)
    [ "$count" = 1 ] && command[0]=$build/train_gpt
    # shellcheck disable=SC2016
    command=(sh -c 'echo $$ >"$0/$$" && exec "$@"' "$dir/pids" "${command[@]}")
    # shellcheck disable=SC2206
    [ "$count" -gt 1 ] && command=($launch -n "$count" "${command[@]}")
    "${command[@]}" >"$dir/out" 2>"$dir/err" </dev/null &
    job=$!
}
alive() { case $(sed 's/.*) \(.\).*/\1/' "/proc/$1/stat" 2>/dev/null) in '' | Z) return 1 ;; esac; }
# send SIGNAL PROCESS: that it has ended, or that there was none, is no failure; any other reason
# is.
send() { [ -z "$2" ] || kill -"$1" "$2" 2>/dev/null || ! alive "$2" ||
    failed "SIG$1 cannot be sent to process $2"; }
# ends: waits until the job and all its ranks are gone; false after 5 minutes, which a loaded
# machine may need.
ends() {
    local limit=$((SECONDS + 300)) pid left=1
    while [ $left = 1 ]; do
        left=0
        for pid in $job $(cat "$dir"/pids/* 2>/dev/null); do alive "$pid" && left=1; done
        [ $SECONDS -ge $limit ] && return 1
        [ $left = 0 ] || sleep 0.05
    done
    wait "$job" 2>/dev/null
    code=$?
    job=''
}
started() {  # waits until all ranks have left their process ids
    until [ "$(find "$dir/pids" -type f | wc -l)" -ge "$ranks" ] ||
        ! alive "$job"; do sleep 0.01; done
}
milliseconds() { sleep "$(printf '%d.%03d' $(($1 / 1000)) $(($1 % 1000)))"; }
some_rank() { find "$dir/pids" -type f -printf '%f\n' | sort -n |
    sed -n "$((1 + RANDOM % ranks))p"; }
await() {  # await TEXT: until the trainer has printed it, or has ended
    while ! grep -q "$1" "$dir/out" && alive "$job"; do sleep 0.02; done
}
step_of() { local name=${1##*step-}; name=${name%%/*}; echo $((10#$name)); }
sound() {
    "$build/train_gpt" --resume "$1" --dry-run --seq 24 --micro-batch 1 --global-batch 8 \
        --shuffle 1 >/dev/null 2>&1
}

# large: starts a run of its own, sends it 1 to 100 signals in a row, and checks that it saves. Its
# products are large enough for kernels that no handler may interrupt.
large() {
    local signal i
    signal=$(printf 'TERM\nINT\nHUP\nUSR1' | sed -n "$((1 + RANDOM % 4))p") ranks=1
    rm -rf "$dir/large" "$dir"/pids/*
    : >"$dir/out"
    ONEDNN_MAX_CPU_ISA=ALL "$build/train_gpt" --layers 4 --heads 4 --channels 128 --seq 128 \
        --micro-batch 8 --global-batch 8 --train-data "$dir/train.bin" --steps 100000 \
        --val-every 0 --out "$dir/large" >"$dir/out" 2>"$dir/err" </dev/null &
    job=$!
    await '^step '
    milliseconds "$((RANDOM % 400))"
    for ((i = RANDOM % 3 ? 0 : RANDOM % 100; i >= 0; i--)); do
        send "$signal" "$job"
        sleep 0.001
    done
    ends || { failed 'still runs after 5 minutes'; return; }
    { [ "$code" = 0 ] && grep -q '^saved ' "$dir/out"; } ||
        failed "SIG$signal into large products: exit code $code"
}

run=0 last=0 announced=0
while [ $SECONDS -lt $end ]; do
    run=$((run + 1))
    what=${events[RANDOM % ${#events[@]}]}
    read -ra layout <<<"${layouts[RANDOM % ${#layouts[@]}]}"
    ranks=${layout[0]} delay=$((RANDOM % 1500)) every=$((1 + RANDOM % 3)) more=$((3 + RANDOM % 12))
    [ "$what" = disk ] && [ "$disk" = 0 ] && what=calm
    if [ "$what" = large ]; then
        large
        bump large
        continue
    fi
    [ "$what" = second ] && more=100000  # it ends by a signal
    newest='' damaged='' whole=0
    for folder in "$out"/step-*; do
        [ -d "$folder" ] && [ -z "${spoiled[$folder]:-}" ] && newest=$folder whole=$((whole + 1))
    done
    [ "$what" = damage ] && [ $whole -lt 2 ] && what=calm
    if [ "$what" = damage ]; then  # one byte of the newest one
        file=$newest/$([ $((RANDOM % 2)) = 0 ] && echo model || echo optimizer).safetensors
        at=$((9000 + RANDOM * 5 % ($(stat -c %s "$file") - 9000)))
        byte=$(od -An -tu1 -j"$at" -N1 "$file")
        # shellcheck disable=SC2059
        printf "\\$(printf %03o $((byte ^ 16)))" |
            dd of="$file" bs=1 seek="$at" conv=notrunc 2>/dev/null
        damaged=$newest spoiled[$newest]=1
        announced=0  # what is left is looked up below
    fi
    if [ "$what" = disk ]; then
        left=$(($(df --output=avail -B1 "$dir/disk" | tail -n 1) - RANDOM * 40))
        fallocate -l "$left" "$dir/disk/full" 2>/dev/null
    fi
    if [ "$what" = clock ]; then  # each file is of a year between 1970 and 2074
        for file in "$out"/step-*/trainer.json; do [ ! -f "$file" ] ||
            touch -d @$((RANDOM * 100000)) "$file"; done
    fi
    if [ "$what" = copy ] && [ -d "$out" ]; then
        rm -rf "$out.copy"
        cp -r "$out" "$out.copy" && rm -rf "$out" && mv "$out.copy" "$out" ||
            { failed 'cannot copy'; break; }
    fi
    [ "$what" = slow ] && export NCCL_DELAY=random:$seed:2000
    train "$ranks" "${layout[@]:1}" --steps $((last + more)) --save-every "$every"
    started
    case "$what" in
        kill)
            await '^device'  # a rank that dies in MPI_Init can hang Open MPI's mpirun
            milliseconds "$delay"; send KILL "$(some_rank)"
            ;;
        launcher) milliseconds "$delay"; send KILL "$job" ;;
        signal)
            await '^step '
            milliseconds "$((delay / 8))"
            signal=$(printf 'TERM\nINT\nHUP\nUSR1' | sed -n "$((1 + RANDOM % 4))p")
            if [ $((RANDOM % 2)) = 0 ] && [ "$signal" != HUP ]; then send "$signal" "$job"
            else send "$signal" "$(some_rank)"; fi
            ;;
        stop)
            milliseconds "$delay"
            victim=$(some_rank)
            send STOP "$victim"; sleep 1; send CONT "$victim"
            ;;
        suspend)  # mpirun passes Ctrl-Z on to its ranks
            await '^step '
            send TSTP "$job"; sleep 1; send CONT "$job"
            ;;
        unlock)
            await '^step '
            rm -f "$out/.lock"
            ;;
        second)
            await '^step '
            # shellcheck disable=SC2086
            "$build/train_gpt" $model --steps 1 --out "$out" >"$dir/second" 2>&1
            second=$?
            { [ "$second" = 2 ] && grep -q 'is in use by another run' "$dir/second"; } ||
                failed "a second run in the folder ended with $second"
            send TERM "$(some_rank)"
            ;;
    esac
    # 2: the shell's notice that a job was killed
    ends 2>/dev/null || { failed 'still runs after 5 minutes'; break; }
    unset NCCL_DELAY
    rm -f "$dir/disk/full"
    bump "$what"
    # Checks after every interruption
    case "$what" in
        calm | stop | slow | second | damage | clock | copy | suspend | unlock)
            [ "$code" = 0 ] || failed "exit code $code"
            ;;
        signal)
            steps=$(grep -c '^step ' "$dir/out")
            first=$(sed -n 's/^resuming .* after step \([0-9]*\).*/\1/p' "$dir/out")
            saved=$(sed -n 's/^saved .*step-\(.*\)/\1/p' "$dir/out" | tail -n 1)
            [ "$steps" = 0 ] || [ $((10#${saved:-0})) = $((${first:-0} + steps)) ] ||
                failed "SIG$signal: $steps steps after step ${first:-0}, saved is ${saved:-none}"
            ;;
    esac
    if [ -n "$damaged" ]; then
        grep -q "^note: the checkpoint ${damaged##*/} is passed over: .* is damaged" "$dir/out" ||
            failed "the damaged $damaged was not named"
    fi
    said=$(sed -n 's/^saved .*step-\([0-9]\{8\}\)$/\1/p' "$dir/out" | tail -n 1)
    [ -n "$said" ] && announced=$((10#$said))
    saves=$((${saves:-0} + $(grep -c '^saved ' "$dir/out")))
    last=0
    for folder in "$out"/step-*/; do
        folder=${folder%/}
        [ -d "$folder" ] || continue
        if sound "$folder"; then
            last=$(step_of "$folder")
            unset "spoiled[$folder]"  # saved again
        elif [ -z "${spoiled[$folder]:-}" ]; then
            failed "$folder is not sound"
        fi
    done
    for folder in "${!spoiled[@]}"; do [ -d "$folder" ] || unset "spoiled[$folder]"; done
    [ "$last" -ge "$announced" ] || failed \
        "step $announced was announced as saved, and the newest sound one is $last"
done

# The log has every step once, and the losses equal a calm run's up to the order of sums, for 300
# steps. Later this model knows its few samples by heart, and two calm runs of different layouts
# part as well.
steps=$last what=compare ranks=1
if [ "$steps" -gt 0 ]; then
    # shellcheck disable=SC2086
    "$build/train_gpt" $model --steps "$steps" --log "$dir/calm.jsonl" >"$dir/out" 2>"$dir/err"
    numbers() { sed -nE 's/.*"step":([0-9]+),"loss":([^,]+),"grad_norm":.*/\1 \2/p' "$1" |
        head -n "$steps"; }
    paste -d ' ' <(numbers "$log") <(numbers "$dir/calm.jsonl") | awk -v steps="$steps" '
        {
            d = ($2 - $4) / $4
            if (d < 0) d = -d
            if (NR <= 300 && d > most) most = d
            if ($1 != NR || $3 != NR) bad = 1
        }
        END {
            printf "%d steps; in the first 300 ", NR
            printf "a loss differs from a calm run by at most %.1e\n", most
            exit bad || NR != steps || most > 1e-4
        }'
    [ "${PIPESTATUS[1]}" = 0 ] || failed 'the losses are not those of a calm run'
fi
for name in "${!counts[@]}"; do printf '%s %d, ' "$name" "${counts[$name]}"; done
echo "seed $seed: $run runs, ${saves:-0} saves announced, $failures failures"
[ $failures = 0 ]
