#!/usr/bin/env bash
# run_signals.sh [BUILD]: a run that is asked to end completes the step that it is in, saves it and
# ends; validation ends at once. A run with a closed output or damaged data loses nothing. Each
# checkpoint is resumed from. Ends with `N passed, N failed`.
# needs: fp32/train_gpt fp32/train_gpt_3d tools/byte_corpus
. "$(dirname "$0")/report.sh"
need_gpus 4
open_mpi=$("${launch%% *}" --version 2>/dev/null | grep -c 'Open MPI')
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41
job=
trap '[ -n "$job" ] && kill -KILL "$job" 2>/dev/null; rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM

build/tools/byte_corpus "$dir/train.bin" "$dir/val.bin" README.md llmc/*.h llmc/host/*.h \
    >/dev/null || exit 1
data="--train-data $dir/train.bin"
quick="--layers 2 --heads 2 --channels 32 $data --seq 32 --micro-batch 1 --global-batch 4"
slow="--layers 4 --heads 4 --channels 128 $data --seq 128 --micro-batch 2 --global-batch 48"

# train RANKS FLAGS...: starts a run in the background, and sets job and out.
train() {
    local ranks=$1 program=train_gpt_3d
    shift
    out=$dir/run-$((++runs))
    local command=("$build/$program" --val-every 0 "$@" --out "$out" --log "$out.jsonl")
    [ "$ranks" = 1 ] && command[0]=$build/train_gpt
    # shellcheck disable=SC2206
    [ "$ranks" -gt 1 ] && command=($launch -n "$ranks" "${command[@]}")
    setsid "${command[@]}" >"$dir/out" 2>"$dir/err" </dev/null &
    job=$!
}
runs=0
steps() { [ ! -f "$out.jsonl" ] && echo 0 || grep -c '"loss"' "$out.jsonl"; }
newest() { find "$1" -name trainer.json 2>/dev/null | sed 's|.*step-0*\([0-9]*\)/.*|\1|' | sort -n |
    tail -n 1; }
have_steps() { [ "$(steps)" -ge "$1" ]; }
now() { date +%s%N; }

# ends MILLISECONDS: waits for the job, sets code and took; false if it needs longer than that.
ends() {
    local begin
    begin=$(now)
    { sleep 60; kill -KILL "$job"; } >/dev/null 2>&1 &  # which ends its ranks, too
    local guard=$!
    wait "$job" 2>/dev/null
    code=$?
    # By no signal that this shell has a trap for: one right behind the fork would run the trap
    # there, and remove $dir.
    { kill -KILL $guard && wait $guard; } 2>/dev/null
    took=$((($(now) - begin) / 1000000)) job=
    [ $took -le "$1" ]
}

# whole STEPS: as many steps are logged as saved, which was announced, and the checkpoint is sound.
whole() {
    [ "$(newest "$out")" = "$1" ] && [ "$(steps)" = "$1" ] &&
        grep -q "^saved .*step-$(printf %08d "$1")$" "$dir/out" &&
            ! ls -d "$out"/tmp-* 2>/dev/null &&
        "$build/train_gpt" --resume "$out/step-$(printf %08d "$1")" ${2:-$slow} --dry-run \
            >>"$dir/out" 2>>"$dir/err"
}

# ---- in the middle of a step of seconds ----------------------------------------------------------

# One step tells how long they are here.
train 2 $slow --pipeline 2 --steps 100 --save-every 1
await have_steps 1
begin=$(now)
await have_steps 2
step=$((($(now) - begin) / 1000000))
sleep "$(awk "BEGIN { print $step / 4000 }")"
pkill -TERM -o -P "$job" -x train_gpt_3d
ends $((2 * step + 500)) && [ $code = 0 ] && whole 3
report $? "SIGTERM to one of 2 ranks in a step of $step ms: code $code after $took ms, step 3 saved"

for signal in INT USR1; do
    [ $signal$open_mpi = INT0 ] && continue
    # mpirun passes an interrupt on 8 s later, kills the ranks after 8 more, and reports the job as
    # failed. A step and its checkpoint take up to 3 s on a busy machine.
    [ $signal = INT ] && export OMPI_MCA_odls_base_sigkill_timeout=8
    train 4 $slow --tensor 2 --pipeline 2 --steps 100
    await have_steps 1
    sleep "$(awk "BEGIN { print $step / 4000 }")"
    before=$(steps)
    kill -$signal "$job"
    ends 30000 && last=$(steps) && whole "$last"
    status=$?
    [ $signal = INT ] || [ "$code $last" = "0 $((before + 1))" ] || status=1
    unset OMPI_MCA_odls_base_sigkill_timeout
    report $status \
        "SIG$signal to mpirun in a step, 4 ranks: code $code after $took ms, step $last saved"
done

for signal in INT HUP; do
    train 1 $slow --steps 100
    await have_steps 1
    kill -$signal "$job"
    ends 10000 && [ $code = 0 ] && whole 2
    report $? "SIG$signal to the one rank of train_gpt: code $code after $took ms, step 2 saved"
done

# A validation of hours: the data is read again and again.
train 4 $quick --data 4 --val-data "$dir/train.bin" --val-every 2 --val-batches 1000000 --steps 4
await have_steps 2
sleep 0.2
pkill -TERM -o -P "$job" -x train_gpt_3d
ends 5000 && [ $code = 0 ] && whole 2 "$quick"
report $? "SIGTERM in a long validation: code $code after $took ms, step 2 saved"

# ---- validations and samples that a signal keeps from being done ---------------------------------

# steps_of KEY: prints the steps of all lines of the log that have KEY.
steps_of() { sed -n "s/^{\"step\":\([0-9]*\),.*\"$1\":.*/\1/p" "$out.jsonl" | tr '\n' ' '; }
due="$quick --val-data $dir/val.bin --val-every 1 --val-batches 2"
due+=" --sample-every 1 --sample-tokens 2"
ok=0
for ((i = 0; i < 3; i++)); do
    train 1 $due --steps 40
    await have_steps $((3 + i))
    kill -USR1 "$job"
    ends 10000
    first=$(grep -c '^sample: ' "$dir/out")
    "$build/train_gpt" $due --steps 40 --resume auto --out "$out" --log "$out.jsonl" >"$dir/out" \
        2>"$dir/err"
    [ "$code$?" = 00 ] && [ "$(steps_of val_loss)" = "$(seq -s ' ' 0 40) " ] &&
        [ $((first + $(grep -c '^sample: ' "$dir/out"))) = 40 ] && ok=$((ok + 1))
done
[ $ok = 3 ]
report $? "a signal, and a resume: $ok of 3 runs have a validation and a sample of every step, once"

due="$slow --val-data $dir/val.bin --val-every 5 --val-batches 1 --sample-every 5 --sample-tokens 2"
train 1 $due --steps 2
await have_steps 1
kill -USR1 "$job"
ends 10000
stopped=$code$(newest "$out")$(steps_of val_loss)
again() { "$build/train_gpt" $due --steps 2 --resume auto --out "$out" --log "$out.jsonl" \
    >"$dir/out" 2>"$dir/err"; }
again && [ "$stopped$(steps_of val_loss)" = '020 0 2 ' ] &&
    [ "$(grep -c '^sample: ' "$dir/out")" = 1 ]
report $? "a signal in the last step, and a resume: the last validation and sample are done"

# ---- signals in large products, and before training ----------------------------------------------

# The kernels that oneDNN makes for these sizes use the stack pointer for a buffer of theirs: the
# frame of a handler would overwrite the heap. So the trainer has none: one thread waits for the
# signals, and all others block them.
large="--layers 4 --heads 4 --channels 128 $data --seq 128 --micro-batch 8 --global-batch 16"
# Bits PROCESS NAME
bits() { sed -n "s/^$2:[[:space:]]*/0x/p" "/proc/$1/status" 2>/dev/null || echo 0; }
asked=$((1 << 14 | 1 << 1 | 1 << 9 | 1))  # TERM, INT, USR1, HUP
# Handlers of the fault itself (ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS), and the C library's own
# three.
allowed=$((1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 10 | 1 << 30 | 7 << 31))
ok=0 threads=0
for signal in TERM INT USR1 HUP; do
    ONEDNN_MAX_CPU_ISA=ALL train 1 $large --steps 1000
    await have_steps 1
    caught=$(($(bits "$job" SigCgt) & ~allowed)) open=0
    for thread in "/proc/$job/task"/*; do
        threads=$((threads + 1))
        [ $(($(bits "$job/task/${thread##*/}" SigBlk) & asked)) = $asked ] || open=$((open + 1))
    done
    for ((i = 0; i < 100; i++)); do
        kill -$signal "$job" 2>/dev/null || break
        sleep 0.001
    done
    ends 20000 && [ "$code $caught $open" = '0 0 1' ] && whole "$(steps)" "$large" && ok=$((ok + 1))
done
[ $ok = 4 ]
report $? "a hundred signals in a row into large products: $ok of 4 runs have no handler and save"
[ $threads -ge 8 ]
report $? "$threads threads were looked at: one of each run takes the signals"

ONEDNN_MAX_CPU_ISA=ALL train 4 $large --tensor 2 --pipeline 2 --micro-batch 4 --steps 1000
await have_steps 1
ranks=$(pgrep -P "$job" -x train_gpt_3d)
for ((i = 0; i < 100; i++)); do
    # shellcheck disable=SC2086
    kill -USR1 $ranks 2>/dev/null || break
    sleep 0.001
done
ends 30000 && [ $code = 0 ] && whole "$(steps)" "${large/batch 8/batch 4}"
report $? "the same into all of 4 ranks: code $code, step $(steps) saved"

for signal in TERM USR1; do  # 130 million weights take seconds to make
    train 1 $large --channels 1024 --layers 10 --steps 1
    is_blocked() { [ $(($(bits "$job" SigBlk) & asked)) = $asked ]; }
    await is_blocked
    sleep 0.2
    kill -$signal "$job"
    ends 2000 && [ $code = $((128 + $(kill -l $signal))) ] && [ ! -e "$out.jsonl" ]
    report $? "SIG$signal before training ends the run at once (code $code after $took ms)"
done

# ---- stopped, and told to go on ------------------------------------------------------------------

for pair in 'TSTP mpirun' 'STOP mpirun' 'STOP all' 'CONT all'; do
    read -r signal who <<<"$pair"
    [ $open_mpi = 1 ] || continue
    train 2 $quick --pipeline 2 --steps 400
    await have_steps 5
    ranks=$(pgrep -P "$job" -x train_gpt_3d | tr '\n' ' ')
    [ "$who" = all ] || ranks=
    # shellcheck disable=SC2086
    kill -$signal $ranks "$job"
    sleep 0.5
    # shellcheck disable=SC2086
    kill -CONT $ranks "$job"
    ends 60000 && [ $code = 0 ] && [ "$(steps)" = 400 ] && ! grep -q '^stopped' "$dir/out"
    report $? "SIG$signal to $who, and SIGCONT: the run ends (code $code after $(steps) steps)"
done

# One rank alone, for three times the seconds after which the others would report a deadlock.
CPU_STALL_SECONDS=2 train 4 $quick --tensor 2 --pipeline 2 --steps 400
await have_steps 5
rank=$(pgrep -P "$job" -x train_gpt_3d | sed -n 3p)
kill -STOP "$rank"
sleep 6
kill -CONT "$rank"
ends 60000 && [ $code = 0 ] && [ "$(steps)" = 400 ]
report $? "SIGSTOP to one rank of 4, and SIGCONT after 6 s: the others wait ($code, $(steps) steps)"

# ---- quick steps: nothing is lost, whatever the signal meets -------------------------------------

ok=0 tries=6
for ((i = 0; i < tries; i++)); do
    flags=(--tensor 2 --pipeline 2)
    [ $((i % 2)) = 1 ] && flags=(--data 4 --save-every 3 --sample-every 2 --sample-tokens 40)
    train 4 $quick "${flags[@]}" --steps 1000000
    await have_steps 2
    sleep 0.0$((i * 17))
    pkill -TERM -P "$job" -x train_gpt_3d  # all four
    ends 10000 && [ $code = 0 ] && whole "$(steps)" "$quick" && ok=$((ok + 1))
done
[ $ok = $tries ]
report $? "SIGTERM to all 4 ranks at any time: $ok of $tries saved the last step that was logged"

# ---- no reader, no open output -------------------------------------------------------------------

out=$dir/pipe
"$build/train_gpt" $quick --steps 20 --out "$out" --log "$out.jsonl" 2>"$dir/err" |
    head -n 1 >"$dir/out"
code=${PIPESTATUS[0]}
[ "$code" = 0 ] && [ "$(newest "$out")" = 20 ]
report $? "| head -n 1 with --out: code $code, the last step is saved"

out=$dir/full
"$build/train_gpt" $quick --steps 3 --out "$out" --log "$out.jsonl" >/dev/full 2>"$dir/err"
code=$?
[ $code = 1 ] && [ "$(newest "$out")" = 3 ] && [ "$(wc -l <"$out.jsonl")" = 3 ] &&
    grep -q '^error: what was printed is incomplete' "$dir/err"
report $? "> /dev/full: code $code, said so, the last step is saved"

ok=0
for closed in '>&-' '2>&-' '<&-' '>&- 2>&-' '<&- >&- 2>&-'; do
    out=$dir/closed
    rm -rf "$out" "$out.jsonl"
    saves="--out $out --log $out.jsonl"
    eval "\"$build/train_gpt\" $quick --steps 3 --save-every 1 $saves $closed" \
        >"$dir/out" 2>"$dir/err"
    [ $? = 0 ] && [ "$(newest "$out")" = 3 ] && [ "$(wc -l <"$out.jsonl")" = 3 ] &&
        [ "$(steps)" = 3 ] &&
        "$build/train_gpt" $quick --steps 4 --resume auto $saves >"$dir/out" 2>&1 &&
        ok=$((ok + 1))
done
[ $ok = 5 ]
report $? "closed descriptors: $ok of 5 combinations leave a log of their steps that is resumed"
# Nothing that the trainer or MPI opens may get their numbers.
# shellcheck disable=SC2086
(exec <&- >&- 2>&-; exec "$build/train_gpt" $quick --steps 1000000 --log "$dir/numbers.jsonl") &
job=$!
await [ -s "$dir/numbers.jsonl" ]
null=$(readlink "/proc/$job/fd/0" "/proc/$job/fd/1" "/proc/$job/fd/2" | grep -c '^/dev/null$')
kill -KILL $job
wait $job 2>/dev/null
job=
[ -s "$dir/numbers.jsonl" ] && [ "$null" = 3 ]
report $? "closed descriptors: $null of 3 are /dev/null while the trainer runs"

# ---- data that turns out to be damaged -----------------------------------------------------------

# foreign FILE TOKEN: gives it an id that no vocabulary has.
foreign() { printf '\377\377' | dd of="$1" bs=1 seek=$((1024 + 2 * $2)) conv=notrunc 2>/dev/null; }
# The 20th sample has one: step 5 of 4 samples.
cp "$dir/train.bin" "$dir/foreign.bin"
foreign "$dir/foreign.bin" $((32 * 19 + 7))
for ranks in 1 4; do
    flags=()
    [ $ranks = 4 ] && flags=(--data 4)
    train $ranks $quick --train-data "$dir/foreign.bin" "${flags[@]}" --steps 50
    ends 20000
    [ $code = 1 ] && [ "$(grep -c '^error: .*foreign.bin has token 65535' "$dir/err")" = 1 ] &&
        [ "$(grep -c '^error' "$dir/err")" = 1 ] && whole 4 "$quick"
    report $? "a foreign token in step 5 of $ranks ranks: one sentence, code $code, step 4 is saved"
done
train 4 $quick --data 4 --val-data "$dir/val.bin" --val-every 5 --val-batches 2 --steps 1000000
await have_steps 2
foreign "$dir/val.bin" 50
ends 20000
[ $code = 1 ] && [ "$(grep -c '^error: .*val.bin has token 65535' "$dir/err")" = 1 ] &&
    whole "$(steps)" "$quick"
report $? "a foreign token in validation data: code $code, the last step is saved"

finish
