#!/usr/bin/env bash
# run_experiments.sh [BUILD]: runs the commands by which the lessons' pages break a trainer. It runs
# them as they stand there, on copies of the trainers, and checks the pages' claims. Their output
# stays in build/experiments/NAME.out for `make doc`.
# needs: fp32/train_gpt fp32/train_gpt_tp fp32/train_gpt_3d bf16/train_gpt_3d tools/byte_corpus
. "$(dirname "$0")/report.sh"
dir=build/experiments
cpu_only 'they are about the stand-ins'
export OMP_NUM_THREADS=1
mkdir -p $dir

check() { # check TEXT COMMAND...
    local text=$1
    shift
    "$@"
    report $? "$text"
}

# The commands of an experiment: the block of code behind `<!-- run NAME -->`.
commands() {
    awk -v begin="<!-- run $1 -->" \
        '$0 == begin { on = 1 } on && /^```$/ { exit } on && !/^(<!--|```)/' doc/*/*.md
}

# change NAME [TARGET]: makes build/experiments/NAME.cu as the sed or patch line of its page says,
# and builds it.
change() {
    local words file code
    eval "words=($(commands "$1" | head -n 1))"
    case ${words[0]} in
        sed) file=${words[3]} && sed "${words[2]}" "$file" >"$dir/$1.cu" ;;
        patch) file=${words[3]} && patch -s -o "$dir/$1.cu" "$file" "${words[4]}" >>"$dir/$1.log" ;;
    esac
    code=$?
    check "$1: the ${words[0]} line changes $file" eval "[ $code = 0 ] && ! cmp -s $file $dir/$1.cu"
    make DEVICE=cpu PRECISION=fp32 OPTIMIZE=-O0 "$build/$dir/$1" ${2:-} >>"$dir/$1.log" 2>&1
    check "$1: it compiles" test $? = 0
}

# run NAME OUTPUT PROGRAM OTHER: the commands but sed, patch and make, with another program in the
# place of the page's.
run() {
    commands "$1" | grep -vE '^(sed -i|patch|make|git checkout) ' |
        sed "s|mpirun --oversubscribe|$launch|; s|$3|$4|" >"$dir/$1.sh"
    bash "$dir/$1.sh" >"$dir/$2" 2>"$dir/$1.err" </dev/null
}

change no_wait
run no_wait no_wait.out build/cpu-fp32/train_gpt_tp "$build/$dir/no_wait"
run no_wait with_wait.out build/cpu-fp32/train_gpt_tp "$build/train_gpt_tp"
# order FILE N: prints the output of order number N.
order() { awk -v n="$2" '/^order/ { i++ } i == n && !/^order/' "$dir/$1.out"; }
right=$(order with_wait 1)
for n in 2 3 4; do
    check "no_wait: with the wait, order $n gives the numbers of order 1" \
        test -n "$right" -a "$(order with_wait $n)" = "$right"
done
check "no_wait: without it, the default order happens to be right" test "$(order no_wait 1)" = \
    "$right"
wrong=$(for n in 2 3 4; do [ "$(order no_wait $n)" = "$right" ] || echo $n; done)
check "no_wait: and a random order shows that it is wrong" test -n "$wrong"

change no_add
run no_add no_add.out build/cpu-fp32-gdb/train_gpt "$build/$dir/no_add"
run no_add with_add.out build/cpu-fp32-gdb/train_gpt "$build/train_gpt"
first() { sed -n "1s/.*| $2 \([0-9.]*\).*/\1/p" "$dir/$1.out"; } # first NAME loss|norm: of step 1
check "no_add: the loss of step 1 stays right: $(first no_add loss)" \
    test -n "$(first no_add loss)" -a "$(first no_add loss)" = "$(first with_add loss)"
check "no_add: and the norm is less than half: $(first no_add norm), $(first with_add norm)" \
    awk -v a="$(first no_add norm)" -v b="$(first with_add norm)" \
        'BEGIN { exit !(a > 0 && 2 * a < b) }'

change no_end
for attempt in 1 2 3; do
    run no_end "no_end$attempt.out" build/cpu-fp32/train_gpt_tp "$build/$dir/no_end"
done
other=$(grep -h '^step 1' $dir/no_end[123].out | grep -vxF "$(head -n 1 <<<"$right")")
check "no_end: without the wait for the sum, the default order shows another norm" test -n "$other"

change one_stream
run one_stream one_stream.out build/cpu-fp32/train_gpt_pp "$build/$dir/one_stream"
says() { sed -n "$1p" $dir/one_stream.out | grep -q "$2"; } # says LINE PATTERN
check "one_stream: rank 0 is in the send of micro-batch 1" \
    says 1 'rank 0 waits in ncclSend.*micro-batch 1.*not received'
check "one_stream: behind it is the receive of micro-batch 0" \
    says 2 'rank 0 waits in ncclRecv.*micro-batch 0.*behind'
check "one_stream: rank 1 is in the send of micro-batch 0" \
    says 3 'rank 1 waits in ncclSend.*micro-batch 0.*not received'
check "one_stream: behind it is the receive of micro-batch 1" \
    says 4 'rank 1 waits in ncclRecv.*micro-batch 1.*behind'
$launch -n 2 "$build/$dir/one_stream" --pipeline 2 --schedule gpipe --init dev/test/golden \
    --micro-batch 2 --train-data dev/test/golden/train.bin --global-batch 8 --steps 2 \
    --val-every 0 >$dir/gpipe.out 2>&1 </dev/null
check "one_stream: GPipe runs to its end" test $? = 0

change swapped_sums
run swapped_sums swapped_sums.out build/cpu-fp32/train_gpt_3d "$build/$dir/swapped_sums"
run swapped_sums right_sums.out build/cpu-fp32/train_gpt_3d "$build/train_gpt_3d"
norms="$(first swapped_sums norm), $(first right_sums norm)"
check "swapped_sums: the loss of step 1 stays right and its norm does not: $norms" \
    test "$(first swapped_sums loss)" = "$(first right_sums loss)" -a "$(first swapped_sums norm)" \
        != "$(first right_sums norm)"
check "swapped_sums: --debug-replicas names wte" grep -q '^error: wte.weight differs' \
    $dir/swapped_sums.out
check "swapped_sums: and nothing else on the right trainer" test \
    "$(grep -c ^step $dir/right_sums.out)" = 4

run zero zero.out 'build/cpu-$precision' "${build/fp32/\$precision}"
# sent N OPERATION: bytes that data rank 0 sent in run number N.
sent() { awk -v n="$1" -v op="$2:" '/^(fp32|bf16)/ { i++ } i == n && $6 == op { print $9 }' \
    $dir/zero.out; }
for n in 1 2 3 4; do
    share=$((n == 4 ? 2 : 1)) # weights in bf16
    gathered=$(sent $n ncclAllGather)
    check "zero: run $n of 4 gathers 1/$share of what all of them scatter" \
        test "$(sent $n ncclReduceScatter) $(sent 1 ncclReduceScatter)" = \
        "$(sent 1 ncclReduceScatter) $((share * ${gathered:-0}))"
done

change post_ln
ln -sf "$PWD/$build"/train_gpt{,_tp} "$build/$dir"
run post_ln post_ln.out 'build/cpu-fp32/$trainer' "$build/$dir/\$trainer"
norm() { sed -n "s/^$1 --layers $2: .*norm //p" $dir/post_ln.out; } # norm TRAINER LAYERS
norms="$(norm train_gpt 4), $(norm train_gpt 24)"
check "post_ln: with 24 layers for 4 the pre-LN norm doubles at least: $norms" \
    awk -v a="$(norm train_gpt 4)" -v b="$(norm train_gpt 24)" \
        'BEGIN { exit !(a > 0 && b > 2 * a) }'
norms="$(norm post_ln 4), $(norm post_ln 24)"
check "post_ln: and the post-LN norm differs by less than a tenth: $norms" \
    awk -v a="$(norm post_ln 4)" -v b="$(norm post_ln 24)" \
        'BEGIN { exit !(a > 0 && b < 1.1 * a && b > 0.9 * a) }'

change parallel_block
run parallel_block parallel_block.out 'build/cpu-fp32/$trainer' "$build/$dir/\$trainer"
sed -i 's/--tensor 2/& --sequence-parallel 1/' $dir/parallel_block.sh
bash $dir/parallel_block.sh >$dir/parallel_block1.out 2>>$dir/parallel_block.err </dev/null
# calls TRAINER SP OPERATION: of one run; SP: empty or 1.
calls() {
    awk -v run="$1" -v op="$3:" \
        '/^(train|par)/ { on = $0 == run } on && $6 == op { print $7 }' \
        "$dir/parallel_block$2.out"
}
fewer=$(calls parallel_block '' ncclAllReduce)
check "parallel_block: 4 layers * 4 micro-batches * 2 all-reduces fewer: $fewer" \
    test "$fewer" = $(($(calls train_gpt_tp '' ncclAllReduce) - 32))
check "parallel_block: as many reduce-scatters fewer: $(calls parallel_block 1 ncclReduceScatter)" \
    test "$(calls parallel_block 1 ncclReduceScatter)" = \
        $(($(calls train_gpt_tp 1 ncclReduceScatter) - 32))
check "parallel_block: and 3 all-gathers a layer for 6: $(calls parallel_block 1 ncclAllGather)" \
    test "$(calls parallel_block 1 ncclAllGather)" = $(($(calls train_gpt_tp 1 ncclAllGather) - 48))
"$build/$dir/parallel_block" --init dev/test/golden --train-data dev/test/golden/train.bin \
    --micro-batch 2 --global-batch 8 --steps 1 --val-every 0 >$dir/parallel_one.out 2>&1 \
    </dev/null
one=$(grep -oE '^step.*norm [0-9.]+' $dir/parallel_one.out)
check "parallel_block: on 1 rank, 2, and with sequence parallelism the numbers are: $one" \
    test -n "$one" -a "$(cat $dir/parallel_block{,1}.out | grep -c -xF "$one")" = 2

finish
