#!/usr/bin/env bash
# run_detectives.sh [BUILD]: the detective cases (dev/puzzles/d*) and `make break`. Each bug applies
# to today's file and compiles. The instruments that the case's page calls quiet stay quiet, and the
# loud one reports. Places are judged. The experiments' changes apply, and one of them runs. All of
# it happens in a copy: the checkout and the learner's folder puzzles/ stay as they are.
. "$(dirname "$0")/report.sh"
cpu_only 'they are about the stand-ins'
export OMP_NUM_THREADS=1

check() { # check TEXT COMMAND...
    local text=$1
    shift
    "$@"
    report $? "$text"
}

# A copy of the files that are compiled, and of the probed settings of this machine.
root=$PWD
copy=$dir/copy
mkdir -p "$copy/build"
cp -r Makefile train_gpt*.cu llmc dev doc "$copy"
cp build/probe-*.mk "$copy/build"
cd "$copy" || exit 1

# ---- the cases -----------------------------------------------------------------------------------

detective() { dev/puzzles/detective.sh "$@" >"$dir/out" 2>"$dir/err" </dev/null; }
field() { sed -n "s/^d$1 .*\b$2=\([^ ]*\).*/\1/p" puzzles/progress; } # field N NAME

for folder in dev/puzzles/d[1-9]-*; do
    n=${folder#dev/puzzles/d} n=${n%%-*}
    # Two at a time: a compiler has one thread.
    while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n; done
    dev/puzzles/detective.sh open "$n" >"$dir/open$n" 2>&1 </dev/null &
done
wait
for folder in dev/puzzles/d[1-9]-*; do
    n=${folder#dev/puzzles/d} n=${n%%-*}
    detective open "$n"  # again, as two at a time may overwrite each other's line of progress
    shown="$dir/open$n"
    check "case $n: the bug applies, compiles, and leaves no source" \
        test -x "puzzles/d$n/suspect" -a ! -e "build/d$n" -a "$(ls "puzzles/d$n")" = suspect
    parts=$(grep -cE '^## (Symptom|Begin with|Hint [123]|Afterwards)$' "$folder/text.md")
    check "case $n: its page has all parts, and names a bug that was shipped" \
        eval "[ $parts = 6 ] && grep -qE '#[0-9]+' $folder/text.md"
done
shown="$dir/out $dir/err"

golden='--init dev/test/golden --train-data dev/test/golden/train.bin --global-batch 8'
golden+=' --val-every 0'
# suspect N RANKS FLAGS: its steps, as "loss norm" each, on one line. A run that ends with an
# error leaves it in $dir/err.
suspect() {
    local n=$1 ranks=$2
    shift 2
    # shellcheck disable=SC2086
    $launch -n "$ranks" "puzzles/d$n/suspect" "$@" >"$dir/out" 2>"$dir/err" </dev/null
    sed -n 's/^step.*| loss \([0-9.]*\) | norm \([0-9.]*\).*/\1 \2/p' "$dir/out" | xargs
}
right2='4.164296 1.0699 4.145645 1.0039'
same() { check "$1: $2" test "$2" = "$3"; } # same TEXT GOT WANTED
other() { check "$1: $2" test -n "$2" -a "$2" != "$3"; }

# 1: a hang
# shellcheck disable=SC2086
{
    same 'case 1: quiet on one rank' "$(suspect 1 1 $golden --micro-batch 2 --steps 2)" "$right2"
    same 'case 1: quiet with Ulysses' \
        "$(suspect 1 2 $golden --micro-batch 2 --steps 2 --context 2)" "$right2"
    export CPU_STALL_SECONDS=2
    suspect 1 2 $golden --micro-batch 2 --steps 2 --context 2 --context-by ring >"$dir/steps"
    unset CPU_STALL_SECONDS
}
waits=$(cat "$dir/out" "$dir/err" |
    grep -aoE 'rank [01] waits in ncclSend[^;]*\(context\) in ring; not received' | sort -u | wc -l)
check "case 1: the stall report has both ranks of the ring in a send" \
    test "$waits" = 2 -a -z "$(cat "$dir/steps")"

# 2: a race
order() { CPU_STREAM_ORDER=$1 suspect 2 "$2" $golden --micro-batch 1 --steps 4 --lr 1e-2 $3; }
right4='4.164296 1.0699 4.168674 0.8158 4.126393 0.8286 4.091195 0.8791'
same 'case 2: quiet on one rank' "$(order random:1 1 '')" "$right4"
same 'case 2: quiet without overlap' "$(order random:1 2 '--overlap 0')" "$right4"
check 'case 2: the replicas agree' test -n "$(order random:1 2 '--debug-replicas 1')" -a \
    "$(grep -c differs "$dir/err")" = 0
wrong=0 first=right
for seed in 1 2 3 4 5 6; do
    steps=$(order "random:$seed" 2 '')
    [ "$steps" = "$right4" ] || wrong=$((wrong + 1))
    [ "${steps:0:15}" = "${right4:0:15}" ] || first=wrong
done
check "case 2: $wrong of 6 orders of streams are wrong, and step 1 is $first in all" \
    test $wrong -ge 1 -a $first = right

# 3: wte differs
# shellcheck disable=SC2086
{
    one="$golden --micro-batch 1 --steps 2"
    same 'case 3: quiet with replicas alone' "$(suspect 3 2 $one --data 2)" "$right2"
    same 'case 3: quiet with stages alone' "$(suspect 3 2 $one --pipeline 2)" "$right2"
    same 'case 3: quiet without ZeRO' \
        "$(suspect 3 4 $one --data 2 --pipeline 2 --zero 0)" "$right2"
    same 'case 3: the loss of step 2 is off by 1e-3' \
        "$(suspect 3 4 $one --data 2 --pipeline 2)" '4.164296 1.0699 4.146619 1.0020'
    suspect 3 4 $one --data 2 --pipeline 2 --debug-replicas 1 >"$dir/steps"
}
check 'case 3: --debug-replicas names wte' grep -q '^error: wte.weight differs' "$dir/err"

# 4: bytes
# shellcheck disable=SC2086
{
    export NCCL_TRAFFIC=1
    same 'case 4: all numbers are right' \
        "$(CPU_STREAM_ORDER=random:1 suspect 4 4 $one)" "$right2"
    unset NCCL_TRAFFIC
}
sent() { sed -n "s/.*data rank 0 of 4, $1: \(.*\) sent,.*/\1/p" "$dir/err"; }
same 'case 4: reduce-scatters of two steps' "$(sent ncclReduceScatter)" '22 calls, 657408 bytes'
same 'case 4: all-gathers of two steps, for 31 calls and 907776 bytes' "$(sent ncclAllGather)" \
    '39 calls, 1221120 bytes'

# 5: masks
# shellcheck disable=SC2086
{
    drop="$golden --micro-batch 2 --steps 1 --dropout 0.2"
    same 'case 5: quiet on one rank' "$(suspect 5 1 $drop)" '4.179637 1.0457'
    same 'case 5: quiet on tensor ranks' "$(suspect 5 2 $drop --tensor 2)" '4.179637 1.0457'
    same 'case 5: quiet without dropout' "$(suspect 5 2 $drop --pipeline 2 --dropout 0)" \
        '4.164296 1.0699'
    same 'case 5: two stages have other masks' "$(suspect 5 2 $drop --pipeline 2)" \
        '4.158865 1.0442'
    same 'case 5: and two chunks on each, too' "$(suspect 5 2 $drop --pipeline 2 --virtual 2)" \
        '4.153860 0.9790'
}

# 6: a resume
# shellcheck disable=SC2086
{
    rest="${golden#*golden } --micro-batch 2 --steps 6 --lr-final 1 --warmup 0"
    six="$right2 4.080332 0.8925 4.020036 1.2591 4.083057 1.3072 3.850948 1.4883"
    same 'case 6: quiet without a resume' \
        "$(suspect 6 1 --init dev/test/golden $rest --save-every 3 --out "$dir/saved")" "$six"
    same 'case 6: the first resumed step is right, the next ones are not' \
        "$(suspect 6 1 --resume "$dir/saved/step-00000003" $rest)" \
        '4.020036 1.2591 4.072508 1.4047 3.819661 1.7460'
}

# 7: time
same 'case 7: all numbers are right' \
    "$(CPU_STREAM_ORDER=random:1 suspect 7 2 $golden --micro-batch 1 --steps 2)" "$right2"
puzzles/d7/suspect --simulate dev/clusters/dgx-a100.json --ranks 32 --layers 16 --heads 16 \
    --channels 2048 --seq 512 --micro-batch 1 --global-batch 32 >"$dir/out" 2>"$dir/err"
same 'case 7: the simulated step, for 243.1 ms' \
    "$(sed -n 's/^step 2.2 | \([0-9.]* ms\).*/\1/p' "$dir/out")" '256.1 ms'

# ---- answers -------------------------------------------------------------------------------------

line=$(grep -n 'use_bucket(m, bucket_count(m) - 1);' dev/lessons/train_data.cu | cut -d : -f 1)
head=$(grep -n '^static void forward(' dev/lessons/train_data.cu | cut -d : -f 1)
detective answer 2 train_gpt.cu:100
check 'an answer in another file' grep -q 'in another file than train_gpt.cu' "$dir/out"
detective answer 2 train_data.cu:$((head + 2))
check 'the function but not the line: one star' \
    eval "grep -q 'The function is right, forward' $dir/out && [ $(field 2 stars) = 1 ]"
detective answer 2 "train_data.cu:$line"
check 'the place at the third try: one star, and the case is closed' \
    test "$(field 2 stars) $(field 2 closed)" = '1 found'
detective answer 7 "dev/lessons/train_data.cu:$((head + 5))"
detective answer 7 train_data.cu:306
check 'another function of the right file, or the place: nothing else is said' \
    grep -qE '^No: the file is right|^The function|That is the place' "$dir/out"
detective answer 4 train_fsdp.cu:1
detective answer 4 "train_fsdp.cu:$(grep -n 'if (\*holds == 1 + b)' dev/lessons/train_fsdp.cu |
    cut -d : -f 1)"
check 'the place at the second try: two stars' test "$(field 4 stars)" = 2
detective answer 5 "trainer.cuh:$(grep -n 'return dropout_for(m->dropout' llmc/trainer.cuh |
    cut -d : -f 1)"
check 'the place at once, in a header: three stars' test "$(field 5 stars)" = 3
for i in 1 2 3 4 5; do detective answer 6 "train_gpt.cu:$i"; done
tries=$(field 6 tries)
detective answer 6 train_gpt.cu:6
check 'a sixth answer on one day is not judged' \
    eval "grep -q 'Five answers a day' $dir/out && [ $tries = 5 ] && [ $(field 6 tries) = 5 ]"
for i in 1 2 3 4; do detective hint 6; done
check 'three hints, which are counted' \
    eval "grep -q 'Hint 3 of 3' $dir/out && [ $(field 6 hints) = 3 ]"
detective give-up 6
check 'giving up shows the bug' \
    eval "grep -q '^-.*report->step' $dir/out && [ $(field 6 closed) = shown ]"
detective answer 9 train_gpt.cu:1
code=$?
check "a case that is not there: $(cat "$dir/err")" test $code = 2
for bad in train_gpt.cu train_gpt.cu:0 nowhere.cu:3 train_gpt.cu:99999; do
    detective answer 3 $bad
    code=$?
    check "a bad answer: $(cat "$dir/err")" test $code = 2 -a "$(wc -l <"$dir/err")" = 1
done

# ---- the lessons' pages --------------------------------------------------------------------------

# named WORD FILE...: prints the errors between these pages of puzzles or cases and the lessons. A
# lesson names each with its minutes: `make puzzle N=1` (a title, 10 minutes) and `N=2` (another
# one, 20).
named() {
    local word=$1 target=$2 page text n lesson minutes all=
    shift 2
    for text in "$@"; do
        n=$(sed -n "1s/^# $word \([0-9]*\)\..*/\1/p" "$text")
        minutes=$(sed -n '3s/^\([0-9]*\) minutes.*/\1/p' "$text")
        lesson=$(sed -n '3s|.*/\(doc/course/[^)]*\)).*|\1|p' "$text")
        all+=" $n "
        sentence "$target" "$lesson" | grep -qE "N=$n\`[^N]*[ (]$minutes\b" ||
            echo "$lesson does not name $target N=$n, $minutes minutes"
    done
    for page in doc/course/[0-9]*.md; do
        for n in $(sentence "$target" "$page" | grep -oE 'N=[0-9]+' | sed 's/N=//'); do
            [[ $all == *" $n "* ]] || echo "$page names $target N=$n, which is not there"
        done
    done
}

# sentence TARGET PAGE: from `make TARGET N=...` to the end of that sentence.
sentence() { tr '\n' ' ' <"$2" | grep -oE "\`make $1 N=[0-9][^.]*\."; }

wrong=$(named Puzzle puzzle dev/puzzles/[0-9]*/text.md
    named Case detective dev/puzzles/d[0-9]*/text.md)
check "the lessons name their puzzles and cases, with the minutes${wrong:+
$wrong}" test -z "$wrong"

# ---- make break ----------------------------------------------------------------------------------

before=$(cat train_gpt*.cu dev/lessons/*.cu | cksum)
listed=$(grep -v '^#' doc/experiments/list.txt | awk '{ print $1 }' | sort)
blocks=$(awk '/^<!-- run / { name = $3 } /^(sed -i|patch -o)/ { print name }' doc/*/*.md | sort)
same 'make break lists every experiment that changes a trainer' "$(xargs <<<"$listed")" \
    "$(xargs <<<"$blocks")"
missing=
while read -r name page _; do
    grep -qx "<!-- run $name -->" "$page" || missing+=" $name"
    dev/break.sh "$(grep -v '^#' doc/experiments/list.txt | grep -n "^$name " | cut -d : -f 1)" \
        change >"$dir/out" 2>"$dir/err" || missing+=" $name"
done < <(grep -v '^#' doc/experiments/list.txt)
check "each one's change fits today's files$missing" test -z "$missing"
dev/break.sh 2 >"$dir/out" 2>"$dir/err" </dev/null
check 'make break N=2 shows the change, and what it does' eval \
    "grep -q '^-.*cudaStreamWaitEvent' $dir/out && grep -q '^error: step 1: the loss' $dir/out"
check 'and no trainer of the checkout has changed' test "$before" = \
    "$(cat train_gpt*.cu dev/lessons/*.cu | cksum)"
dev/break.sh 99 >"$dir/out" 2>"$dir/err"
code=$?
check "an experiment that is not there: $(cat "$dir/err")" test $code = 2
cd "$root" || exit 1
finish
