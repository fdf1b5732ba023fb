#!/usr/bin/env bash
# run_attack.sh [BUILD]: attacks on files and processes that once succeeded must fail. These are a
# second run in one folder, folders that are not ours, inputs named as outputs, and an older run's
# checkpoints. Devices, links and pipes take the place of files, and a prompt cannot be encoded.
# Ends with `N passed, N failed`.
# needs: fp32/train_gpt fp32/train_gpt_3d tools/timeline tools/loss tools/profile tools/schedule
. "$(dirname "$0")/report.sh"
build=$(realpath -m "$build")
trainer=$build/train_gpt data=$PWD/dev/test/golden/train.bin tools=$PWD/build/tools
[ -x "$trainer" ] || { report 1 "attack: $trainer is not built"; finish; }
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41
read -ra launch <<<"$launch"
job=
trap '[ -z "$job" ] || kill -KILL "$job" 2>/dev/null; rm -rf "$dir"' EXIT
cd "$dir" || exit 1
cp "$data" shard
tiny="--train-data shard --layers 1 --heads 2 --channels 4 --vocab 61 --seq 3 --max-seq 3"
tiny+=" --micro-batch 1"

# trains FLAGS...: runs train_gpt; sets code.
trains() {
    # shellcheck disable=SC2086
    timeout 60 "$trainer" $tiny "$@" >out 2>err </dev/null
    code=$?
    [ $code = 0 ]
}
# refused CODE PATTERN FLAGS...: one sentence, which has the pattern.
refused() {
    local want=$1 pattern=$2
    shift 2
    trains "$@"
    [ $code = "$want" ] && [ "$(grep -c '^error: ' err)" = 1 ] && [ "$(wc -l <err)" = 1 ] &&
        grep -q "$pattern" err
}
said() { cut -c 1-120 err | head -n 1; }

# ---- two runs with one --out ---------------------------------------------------------------------

# live FLAGS...: starts a long run and waits for its first step. ended: waits for its end and sets
# code.
live() {
    rm -f first  # else what the run before has printed may be taken for this one's
    # shellcheck disable=SC2086
    "$trainer" $tiny --steps 100000000 "$@" >first 2>first.err </dev/null &
    job=$!
    await grep -q '^step ' first
}
ended() {
    for ((i = 0; i < 300; i++)); do kill -0 $job 2>/dev/null || break; sleep 0.1; done
    kill -KILL $job 2>/dev/null
    wait $job
    code=$?
    job=
}
shown="$shown $dir/first $dir/first.err"

live --save-every 1000 --out shared --log first.jsonl
refused 2 'is in use by another run' --steps 1 --seed 2 --out shared
report $? "a second run in one --out is refused: $(said)"
kill -TERM $job
ended
[ $code = 0 ] && trains --resume auto --out shared --dry-run
report $? "and the first one ends as if nobody had been there (code $code)"

live --save-every 500 --out unlocked
kill -STOP $job  # else its next save may take the folder again before the second start
rm -rf unlocked
trains --steps 1 --seed 2 --out unlocked
kill -CONT $job
saves=$(grep -c '^saved ' first)
await eval '[ "$(grep -c "^saved " first)" -gt $((saves + 1)) ]'
[ "$(grep -c '^note: the lock of unlocked was removed or replaced' first)" = 1 ]
report $? "rm -r of a live run's --out, and a second start: the first says so, and locks it again"
refused 2 'is in use by another run' --steps 1 --out unlocked
report $? "so a third start is refused: $(said)"
kill -STOP $job
rm -f unlocked/.lock
# shellcheck disable=SC2086
"$trainer" $tiny --steps 100000000 --out unlocked >second 2>&1 </dev/null &
other=$!
await grep -q '^step ' second
kill -CONT $job
ended
{ kill -KILL $other; wait $other; } 2>/dev/null
[ $code = 1 ] && grep -q '^error: unlocked is in use by another run' first.err
report $? "a lock removed under a live run, and another: the first ends ($(tail -n 1 first.err))"
echo text >thesis.tex
mkdir -p linked-lock
ln -s ../thesis.tex linked-lock/.lock
refused 2 'it is a symbolic link' --steps 1 --out linked-lock && [ "$(cat thesis.tex)" = text ]
report $? "a link .lock in --out leads nowhere: $(said)"
mkdir -p foreign-lock
echo text >foreign-lock/.lock
trains --steps 1 --out foreign-lock && [ "$(cat foreign-lock/.lock)" = text ]
report $? "and a file .lock that was there stays as it was"
# shellcheck disable=SC2086
timeout 60 "${launch[@]}" -n 4 "$trainer" $tiny --steps 3 --save-every 1 --out four >out 2>err \
    </dev/null
code=$?
[ $code = 2 ] && [ "$(grep -c '^error: ' err)" = 1 ] &&
    grep -q 'this trainer is one rank, but 4 were started' err &&
    [ ! -e four/step-00000001 ]
report $? "train_gpt under mpirun -n 4 is refused, once: $(grep -m1 '^error' err)"

TMPDIR=/dev/null/none trains --steps 1
report $? "one rank without mpirun needs no folder for temporary files that others could remove"

# ---- what is not ours stays ----------------------------------------------------------------------

mkdir -p ours/tmp-2024 ours/step-1 ours/step-00000002 ours/tmp-00000001-host-1
for file in tmp-2024/thesis.tex step-1/notes step-00000002/notes tmp-00000001-host-1/notes; do
    echo mine >ours/$file
done
trains --steps 5 --save-every 1 --keep 1 --out ours
[ "$(cat ours/*/{thesis.tex,notes} 2>/dev/null | grep -c mine)" -ge 3 ] &&
    [ -f ours/tmp-2024/thesis.tex ] &&
    [ -f ours/step-1/notes ] && [ "$(find ours -name notes | wc -l)" = 3 ]
report $? "files in folders that are not checkpoints stay, whatever they are called"

# ---- a file system without locks -----------------------------------------------------------------

if command -v cc >/dev/null; then
    cat >nolock.c <<'C'
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/syscall.h>
long syscall(long number, ...);
int fcntl(int fd, int command, ...) {
    va_list arguments;
    va_start(arguments, command);
    if (command != F_SETLK) return (int)syscall(SYS_fcntl, fd, command, va_arg(arguments, void *));
    errno = ENOLCK;
    return -1;
}
C
    cc -shared -fPIC -o nolock.so nolock.c
    trains --steps 2 --save-every 1 --out nolock
    mkdir nolock/tmp-00000003-elsewhere-1
    cp nolock/step-00000002/config.json nolock/tmp-00000003-elsewhere-1
    mv nolock/step-00000002 nolock/tmp-00000002-elsewhere-1
    LD_PRELOAD=$PWD/nolock.so trains --steps 3 --out nolock --resume auto &&
        grep -q '^note: nolock cannot be locked (No locks available)' out &&
        grep -q '^resuming .*step-00000001 ' out && [ -f nolock/step-00000003/trainer.json ] &&
        [ -f nolock/tmp-00000002-elsewhere-1/trainer.json ] &&
            [ -f nolock/tmp-00000003-elsewhere-1/config.json ]
    report $? "without locks: unfinished saves, which may be another run's, stay"
    trains --steps 3 --out nolock --resume auto && [ -f nolock/step-00000002/trainer.json ] &&
        [ "$(find nolock -name 'tmp-*' | wc -l)" = 0 ]
    report $? "with them they get their name or go"
fi

# ---- devices, links and pipes in the place of files ----------------------------------------------

if mknod null c 1 3 2>/dev/null; then
    trains --steps 2 --dump-gradients null
    [ $code = 2 ] && [ -c null ]
    report $? "--dump-gradients onto a device is refused, and the device stays one: $(said)"
    refused 2 'not a regular file' --steps 2 --log null && [ -c null ]
    report $? "so is --log into one: $(said)"
fi
: >target.jsonl
ln -s target.jsonl link.jsonl
trains --steps 2 --out linked --log link.jsonl &&
    trains --steps 4 --out linked --resume auto --log link.jsonl &&
    [ -L link.jsonl ] && [ "$(wc -l <target.jsonl)" = 4 ]
report $? "--log through a link, and a resume: the link stays, the file has all steps"
mkfifo pipe
mkdir shards
cp shard shards/a.bin
mkfifo shards/b.bin
for flags in '--train-data pipe' "--train-data shards/*.bin" '--val-data pipe --val-every 1' \
    '--log pipe' \
    '--trace pipe' '--dump-gradients pipe'; do
    # shellcheck disable=SC2086
    set -f
    timeout 20 "$trainer" $tiny --steps 1 $flags >out 2>err </dev/null
    code=$?
    set +f
    [ $code = 2 ] && [ "$(wc -l <err)" = 1 ] && grep -q '^error: ' err
    report $? "$flags is refused at once (code $code): $(said)"
done

(ulimit -f 1024; refused 1 'File too large' --steps 2000 --trace-steps 2000 --trace large.json \
    --out traced) &&
    [ -f traced/step-00002000/trainer.json ]
report $? "--trace onto a full disk: $(said), and the run is saved"

# ---- inputs named as outputs, and logs of runs that are refused ----------------------------------

printf '{"step":1,"loss":1}\n' >old.jsonl
refused 2 'does not fit' --layers 50 --heads 1024 --channels 131072 --log old.jsonl &&
    [ "$(cat old.jsonl)" = '{"step":1,"loss":1}' ]
report $? "a run that does not fit leaves the log as it was: $(said)"
for flag in --log --trace --dump-gradients; do
    refused 2 '.' --steps 1 $flag shard && cmp -s shard "$data"
    report $? "$flag is a shard of the run: refused, and the shard stays (code $code): $(said)"
    cp "$data" shard
done
printf '\0\1binary' >binary
cp binary before
refused 2 'is no former output' --steps 1 --log binary && cmp -s binary before
report $? "--log onto a file that begins with a 0 byte: $(said)"
refused 2 'are both' --steps 1 --log one --trace ./one
report $? "--log and --trace into one file: $(said)"

cp thesis.tex before
for flags in '--trace thesis.tex' '--dump-gradients thesis.tex' \
    '--out used2 --trace linked/step-00000002/trainer.json' \
    '--dump-gradients linked/step-00000002/model.safetensors' '--dump-gradients g2'; do
    ln -sf thesis.tex g2.unfinished
    sums=$(cat linked/step-00000002/*.json linked/step-00000002/*.safetensors | cksum)
    # shellcheck disable=SC2086
    refused 2 'is no former output\|is not a regular file' --steps 2 $flags &&
        cmp -s thesis.tex before &&
        [ "$(cat linked/step-00000002/*.json linked/step-00000002/*.safetensors | cksum)" = \
            "$sums" ]
    report $? "$flags, which no run wrote: refused, and the file stays (code $code): $(said)"
done
trains --steps 2 --trace again.json --dump-gradients again &&
    trains --steps 2 --trace again.json --dump-gradients again
report $? "a former trace and a former dump are written again (code $code)"
live --log busy.jsonl
refused 2 'is in use by another run' --steps 3 --log busy.jsonl
report $? "the log of a live run is refused to a second one: $(said)"
kill -TERM $job
ended
[ $code = 0 ] && ! sed 's/^{"step":\([0-9]*\),.*/\1/' busy.jsonl | awk '$1 != NR' | grep -q .
report $? "and has each of its $(wc -l <busy.jsonl) steps"
cp busy.jsonl before
trains --steps 3 --log busy.jsonl && cmp -s busy.jsonl.1 before && [ "$(wc -l <busy.jsonl)" = 3 ]
report $? "a fresh start keeps a finished log: $(grep -m1 '^note: the log' out)"
trains --steps 4 --save-every 2 --out torn --log torn.jsonl && head -c 4096 /dev/zero >>torn.jsonl
trains --steps 6 --out torn --resume auto --log torn.jsonl &&
    [ "$(tr -d '\0' <torn.jsonl | wc -l)" = 6 ] &&
    [ "$(wc -c <torn.jsonl)" = "$(tr -d '\0' <torn.jsonl | wc -c)" ]
report $? "a log whose end a power loss has torn is continued"

# ---- ranks that were not started alike -----------------------------------------------------------

three=${trainer}_3d
# unlike PATTERN FLAGS OTHER-FLAGS [PROGRAM]: refused in one sentence that has the pattern.
unlike() {
    # shellcheck disable=SC2086
    timeout 30 "${launch[@]}" -n 1 "$three" $tiny --steps 2 $2 : -n 1 "${4:-$three}" $tiny \
        --steps 2 $3 >out 2>err </dev/null
    code=$?
    [ $code = 2 ] && [ "$(grep -c '^error: ' err)" = 1 ] && grep -q "^error: .*$1" err
    report $? \
        "ranks with${2:+ $2} and with $3${4:+ of ${4##*/}}: $(grep -m1 '^error' err | cut -c 1-100)"
}
for flags in '--lr 1e-4' '--seed 2' '--steps 3' '--out other' '--schedule gpipe' '--help' \
    '--dry-run' '--log other.jsonl'; do
    unlike 'run different .* command lines' '' "$flags"
done
unlike 'run different .* command lines' '--out unlike' '--out unlike --resume auto'
unlike 'run different .* command lines' '' --lrr
unlike 'run different trainers' '' '' "${trainer}_tp"
mkdir -p here there
cp shard here/data.bin
(head -c 1024 shard; head -c 200 <(tail -c +1025 shard)) >there/data.bin
printf '\144\0\0\0' | dd of=there/data.bin bs=1 seek=8 conv=notrunc 2>/dev/null  # 100 tokens
# shellcheck disable=SC2086
timeout 30 "${launch[@]}" -n 1 -wdir here "$three" ${tiny/shard/data.bin} --steps 2 : -n 1 -wdir \
    there "$three" ${tiny/shard/data.bin} --steps 2 >out 2>err </dev/null
code=$?
[ $code = 2 ] && grep -q \
    '^error: the ranks see different files under the name that --train-data gives' err
report $? "ranks whose nodes have other data under one name (code $code): $(grep -m1 '^error' err)"

# ---- what is too large, and an --eval without a result -------------------------------------------

refused 2 'from 1 to 131072' --channels 262144 --heads 4096 --dry-run
report $? "more channels than config.json may name are refused: $(said)"
trains --steps 1 --out model && python3 - <<'END'
import array
row = [4, 1, 3, 1, 2, 3, 4]
with open("rows.bin", "wb") as file:
    array.array("i", [20261122, 1, 2000000, 1, 61, 6000000] + [0] * 250).tofile(file)
    array.array("H", row * 2000000).tofile(file)
END
rm -f first
# shellcheck disable=SC2086
"$trainer" ${tiny#* shard} --init model/step-00000001 --eval rows.bin >first 2>first.err \
    </dev/null &
job=$!
await grep -q '^weights' first
sleep 1
kill -TERM $job
ended
[ $code = 143 ] && ! grep -q '^eval' first
report $? "a signal ends an --eval without a result (code $code)"

# ---- what can be known is known before training --------------------------------------------------

refused 2 'vocabulary has 61' --steps 50 --sample-every 1000 --out lost
[ $? = 0 ] && ! ls -d lost/step-* >/dev/null 2>&1 && ! grep -q '^step ' out
report $? "a prompt that the model has no tokens for: $(said)"
model='{"type":"BPE","vocab":{"a":0,"b":1},"merges":[]}'
echo "{\"pre_tokenizer\":{\"type\":\"ByteLevel\"},\"model\":$model}" >two.json
refused 2 'endoftext' --vocab 300 --steps 50 --sample-every 1000 --tokenizer two.json &&
    ! grep -q '^step ' out
report $? "a tokenizer without <|endoftext|>: $(said)"
long=$(printf 'x%.0s' $(seq 250))
path=$PWD
while [ ${#path} -lt 3649 ]; do path=$path/$long; done
path=$path/${long:$((${#path} - 3649))}  # of 3900 characters, however long $dir is
kept=0 lost=0
# The longest that fits has room for a host's name of 64
for ((length = 3970; length <= 4090; length += 5)); do
    out=$path/$(printf 'y%.0s' $(seq $((length - ${#path} - 1))))
    timeout 60 "$trainer" $tiny --steps 1 --out "$out" >out 2>err </dev/null
    code=$?
    [ $code = 0 ] && kept=$((kept + 1))
    [ $code = 1 ] && lost=$((lost + 1))
done
[ $kept -gt 0 ] && [ $lost = 0 ]
report $? \
    "--out of 3970 to 4090 characters: $kept saved, the others refused before work, $lost lost"
refused 2 'two?lines' --steps 1 --train-data $'two\nlines'
report $? "a line's end in a flag's value makes one sentence: $(said)"

# ---- an older run's checkpoints ------------------------------------------------------------------

trains --steps 10 --out used && trains --steps 5 --out used --lr 5e-4 &&
    trains --steps 12 --out used --lr 5e-4 \
    --resume auto && grep -q '^resuming .*step-00000005 ' out
report $? "--resume auto in a used --out takes the newer run's: $(grep '^resuming' out)"
trains --steps 3 --save-every 1 --keep 0 --out emptied && : >emptied/step-00000003/trainer.json
trains --steps 4 --out emptied --resume auto && grep -q '^resuming .*step-00000002 ' out
report $? "--resume auto passes over a checkpoint whose trainer.json is empty"
trains --steps 20 --save-every 10 --out ahead && touch -d 2030-01-01 ahead/step-*/trainer.json
trains --steps 50 --save-every 10 --out ahead --resume auto && [ "$(echo ahead/step-*)" = \
    'ahead/step-00000040 ahead/step-00000050' ]
report $? "a clock that was ahead does not take what is saved after it: $(echo ahead/step-*)"
touch -d 2030-01-01 ahead/step-00000040/trainer.json
trains --steps 60 --out ahead --resume auto && grep -q '^resuming .*step-00000050 ' out
report $? "--resume auto goes by the saves, whatever the times say"
trains --steps 10 --out year1970 && touch -d @0 year1970/step-*/trainer.json
trains --steps 20 --out year1970 --resume auto && grep -q '^resuming .*step-00000010 ' out
report $? "--resume auto takes a checkpoint whose time is 0"
if [ "$(id -u)" = 0 ] && command -v setpriv >/dev/null; then
    mkdir -m 755 readonly
    chmod 755 "$dir"
    # shellcheck disable=SC2086
    setpriv --reuid=65534 --regid=65534 --clear-groups "$trainer" $tiny --out readonly/x >out \
        2>err </dev/null
    [ $? = 2 ] && grep -q 'Permission denied' err
    report $? "--out without the right to write names the reason: $(said)"
fi

# ---- pictures of logs that no trainer writes -----------------------------------------------------

draws() { (ulimit -f 20000; timeout 20 "$@" >out 2>err </dev/null); code=$?; [ $code -lt 2 ]; }
echo '[{"ph":"X","ts":1,"dur":0,"pid":0,"args":{"kind":"forward","micro":0,"chunk":0,"step":0}}]' \
    >zero.trace
draws "$tools/timeline" --step 0 --out zero.svg zero.trace
report $? "a trace of no time (code $code)"
printf '{"step":1,"loss":1e308}\n{"step":3,"val_loss":2}\n' >long.jsonl
printf '{"step":1,"loss":3}\n{"step":2,"loss":2}\n' >label.jsonl
draws "$tools/loss" --out label.svg $'\377\302\233\303\251=label.jsonl' &&
    iconv -f UTF-8 -t UTF-8 label.svg >/dev/null 2>err
report $? "a label that is no UTF-8 leaves a picture that is"
draws "$tools/loss" --out long.svg long.jsonl && [ $code = 0 ] && grep -q '</svg>' long.svg
report $? "a loss of 300 digits (code $code)"

echo 'F0 B0' >list
for case in 'loss --out far2.jsonl a=./far2.jsonl' 'timeline --out some.trace ./some.trace' \
    'profile --skip 0 --out some.trace some.trace' 'schedule --trace list list'; do
    printf '{"step":1,"loss":3}\n{"step":2,"loss":2}\n' >far2.jsonl
    event='{"ph":"X","ts":%d,"dur":2,"pid":0,"tid":0,'
    event+='"args":{"kind":"%s","micro":0,"chunk":0,"step":0}}'
    # shellcheck disable=SC2059
    printf "[$event,$event]" 1 forward 3 backward >some.trace
    sums=$(cat far2.jsonl some.trace list | cksum)
    # shellcheck disable=SC2086
    "$tools"/$case >out 2>err </dev/null
    [ $? = 1 ] && grep -q 'would overwrite' err &&
        [ "$(cat far2.jsonl some.trace list | cksum)" = "$sums" ]
    report $? "$case: $(said)"
done

finish
