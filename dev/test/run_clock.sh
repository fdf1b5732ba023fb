#!/usr/bin/env bash
# run_clock.sh [FOLDER]: the virtual clock. Runs cases worked out by hand (test_clock), then the
# trainers. --virtual-time changes no bit, and its times do not depend on the order of streams and
# messages. --simulate gives the times of a run of all ranks. Links count, bubbles follow the
# formulas of the schedules, and bad input is refused.
# needs: fp32/dev/test/test_clock fp32/train_gpt fp32/train_gpt_tp fp32/train_gpt_pp
# needs: fp32/train_gpt_3d
# needs: fp32/train_context fp32/train_data fp32/train_fsdp fp32/train_zero_bubble fp32/train_moe
# needs: fp32/train_v fp32/train_llama bf16/train_gpt_3d bf16/train_fsdp bf16/train_zero_bubble
# needs: bf16/train_context bf16-profile/train_gpt tools/byte_corpus tools/scale tools/bubbles
# needs: tools/profile
. "$(dirname "$0")/report.sh"
cpu_only 'the virtual clock belongs to the stand-ins: DEVICE=cpu'
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive ONEDNN_MAX_CPU_ISA=SSE41
build/tools/byte_corpus "$dir/train.bin" "$dir/val.bin" doc/*/*.md >/dev/null || exit 1

# ---- by hand -------------------------------------------------------------------------------------

program=$build/dev/test/test_clock
# As the trainers set it for one rank: no daemon, and no folders that other programs share.
verdicts 'by hand, one rank' env OMPI_MCA_ess_singleton_isolated=1 \
    OMPI_MCA_orte_create_session_dirs=0 "$program"
verdicts 'by hand, 2 ranks' $launch -n 2 "$program"
verdicts 'by hand, 4 ranks' $launch -n 4 "$program"
verdicts 'by hand, 4 ranks, messages delayed, streams in random order' \
    env NCCL_DELAY=random:3:2000 CPU_STREAM_ORDER=random:5 $launch -n 4 "$program"

# ---- trainers ------------------------------------------------------------------------------------

model="--layers 4 --heads 4 --channels 32 --seq 16 --micro-batch 2 --global-batch 16 --steps 2"
cluster=dev/clusters/dgx-a100.json
times() { sed 's/.*"ms":\([0-9.e+]*\).*/\1/' "$1"; }
losses() { grep -o '"\(loss\|grad_norm\)":[^,}]*' "$1"; }
trained() {  # trained RANKS LOG TRAINER FLAGS...: a real run on the virtual clock, or off it
    local ranks=$1 log=$2 trainer=$3
    shift 3
    $launch -n "$ranks" "$build/$trainer" --train-data "$dir/train.bin" $model --log "$dir/$log" \
        "$@" >"$dir/out" 2>"$dir/err"
}
simulated() {  # simulated RANKS LOG TRAINER FLAGS...
    local ranks=$1 log=$2 trainer=$3
    shift 3
    "$build/$trainer" --simulate "$cluster" --ranks "$ranks" --log "$dir/$log" "$@" >"$dir/out" \
        2>"$dir/err"
}

layout='--tensor 2 --data 2 --pipeline 2 --virtual 2'
trained 8 plain train_gpt_3d $layout && trained 8 virtual train_gpt_3d $layout \
    --virtual-time $cluster &&
    [ -n "$(losses "$dir/plain")" ] && [ "$(losses "$dir/plain")" = "$(losses "$dir/virtual")" ]
report $? '--virtual-time changes no bit of losses and gradient norms: 8 ranks'
[ "$(grep -c '"simulated":true' "$dir/virtual")" = 2 ] && ! grep -q simulated "$dir/plain"
report $? 'the log of a run on the virtual clock says "simulated":true, and no other one does'
NCCL_DELAY=random:7:1000 CPU_STREAM_ORDER=random:11 trained 8 again train_gpt_3d $layout \
    --virtual-time $cluster &&
    [ "$(times "$dir/again")" = "$(times "$dir/virtual")" ]
report $? 'delayed messages and another order of the streams have the same times to the nanosecond'

# Software that overlaps nothing, drops out, and has unfused attention.
other=dev/clusters/selene-2021.json
trained 8 whole train_gpt_3d $layout --recompute layer --virtual-time $other &&
    [ "$(losses "$dir/whole")" = "$(losses "$dir/plain")" ]
report $? 'nor does a cluster with other software, with layers computed again'

# Ranks that share a layer differ by nanoseconds (the first adds the positions). So may the two
# times. same_as_all_ranks RANKS TRAINER FLAGS...: a simulation has the times of a run of all ranks
same_as_all_ranks() {
    trained "$1" all "$2" --virtual-time $cluster "${@:3}" &&
        simulated "$1" symmetric "$2" $model "${@:3}" &&
        paste <(times "$dir/all") <(times "$dir/symmetric") |
        awk '
            !($1 > 0 && $2 > 0.9999 * $1 && $2 < 1.0001 * $1) { bad = 1 }
            END { exit bad || NR != 2 }'
    report $? "--simulate has all ranks' times: $1 x $2 ${*:3}: $(times "$dir/all" | tail -n 1) ms"
}
same_as_all_ranks 1 train_gpt
same_as_all_ranks 1 train_gpt --recompute layer
same_as_all_ranks 2 train_gpt_tp
same_as_all_ranks 4 train_gpt_tp --sequence-parallel 1
same_as_all_ranks 4 train_data
same_as_all_ranks 8 train_data --zero 0 --overlap 0 --recompute layer
same_as_all_ranks 4 train_fsdp
same_as_all_ranks 8 train_fsdp --shard 2 --overlap 0 --recompute layer
same_as_all_ranks 4 train_context --context 4
same_as_all_ranks 4 train_context --context 2 --context-by ring --recompute rest
same_as_all_ranks 4 train_context --context 4 --context-by ring --context-layout contiguous
same_as_all_ranks 4 train_zero_bubble --tensor 2 --pipeline 2 --schedule zb-h1
same_as_all_ranks 4 train_v --tensor 2 --pipeline 2 --schedule v-half
same_as_all_ranks 3 train_gpt_pp --pipeline 3 --layers 5 --schedule gpipe
same_as_all_ranks 8 train_gpt_3d $layout
same_as_all_ranks 8 train_gpt_3d --tensor 2 --data 4
same_as_all_ranks 8 train_gpt_3d --tensor 2 --data 4 --zero 0 --overlap 0 --recompute layer
grep -q 'bubble 0.0%' "$dir/out"
report $? 'and without a pipeline there is no bubble'
same_as_all_ranks 4 train_gpt_3d --data 2 --pipeline 2 --order pdt --sequence-parallel 1
cluster=$other
same_as_all_ranks 8 train_gpt_3d --tensor 2 --data 2 --pipeline 2 --zero 0 --overlap 0
same_as_all_ranks 4 train_gpt_pp --tensor 2 --recompute layer
# Nodes of 3 GPUs, which tensor groups of 2 and stages of 4 ranks straddle: some of the ranks sit
# worse than the first.
sed 's/"gpus_per_node": {"value": 8/"gpus_per_node": {"value": 3/' dev/clusters/dgx-a100.json \
    >"$dir/three.json"
cluster=$dir/three.json
same_as_all_ranks 8 train_gpt_3d --tensor 2 --data 4
same_as_all_ranks 8 train_gpt_3d --data 4 --pipeline 2
# Nodes of 2: one with InfiniBand, one with RoCE, two with Ethernet alone; stages of unequal length.
sed '/"gpus_per_node"/s/8/2/; /"\(infiniband\|roce\)_nodes"/s/4/1/' dev/clusters/holmes-a100.json \
    >"$dir/unlike.json"
cluster="$dir/unlike.json"
same_as_all_ranks 8 train_gpt_3d --data 4 --pipeline 2 --layers-per-stage 3,1
slow=$(times "$dir/symmetric" | tail -n 1)
same_as_all_ranks 8 train_gpt_3d --tensor 2 --pipeline 4
# The last of four nodes is another: messages of half of the data ranks go by Ethernet.
sed '/"infiniband_nodes"/s/1/3/' "$dir/unlike.json" >"$dir/odd.json"
cluster="$dir/odd.json"
same_as_all_ranks 8 train_gpt_3d --data 4 --pipeline 2
sed '/"infiniband_nodes"/s/1/4/' "$dir/unlike.json" >"$dir/like.json"
cluster="$dir/like.json"
same_as_all_ranks 8 train_gpt_3d --data 4 --pipeline 2 --layers-per-stage 3,1
awk -v slow="$slow" -v fast="$(times "$dir/symmetric" | tail -n 1)" \
    'BEGIN { exit !(fast > 0 && slow > 1.02 * fast) }'
report $? 'which takes longer than with InfiniBand everywhere'
cluster=dev/clusters/dgx-a100.json

# If the network is fast enough, all gathers that train_fsdp repeats hide: no sum waits in front of
# a gather that could have waited.
d24='--model d24 --seq 1024 --micro-batch 4 --recompute layer'
simulated 8 again train_fsdp $d24 --shard 3 && simulated 8 once train_fsdp $d24 --shard 2
paste <(times "$dir/again") <(times "$dir/once") | tail -n 1 |
    awk '{ bad = !($2 > 0 && $1 < 1.0005 * $2) } END { exit bad || NR != 1 }'
report $? "--shard 3 takes no longer than --shard 2: $(times "$dir/again" | tail -n 1) ms"

for i in 1 2 3; do simulated 8 "run$i" train_gpt_3d $model $layout; done
cmp -s "$dir/run1" "$dir/run2" && cmp -s "$dir/run1" "$dir/run3"
report $? 'three simulations have the same log'

# ---- bubbles -------------------------------------------------------------------------------------
# With this many layers the embedding and the head hardly count. Bubbles are idle over working time,
# as build/tools/profile measures it.

bubble() {  # bubble NAME PERCENT FLAGS...
    local name=$1 formula=$2 measured
    shift 2
    simulated 4 bubble train_gpt_3d --pipeline 4 --layers 512 --heads 4 --channels 64 --vocab 100 \
        --seq 32 --micro-batch 2 --global-batch 16 --steps 2 --trace "$dir/bubble.json" "$@"
    measured=$(build/tools/profile "$dir/bubble.json" | awk '$1 == "mean" { print $NF }')
    awk -v a="$measured" -v b="$formula" 'BEGIN { exit !(a > 0.97 * b && a < 1.03 * b) }'
    report $? "$name at p = 4, m = 8: a bubble of $measured%, by the formula $formula%"
}
cluster=dev/clusters/laptop.json
bubble gpipe 37.5 --schedule gpipe
bubble 1f1b 37.5 --schedule 1f1b
bubble 'interleaved, v = 2' 18.75 --virtual 2

# ---- context parallelism -------------------------------------------------------------------------
# A layer of a long sequence is nearly all attention.

# attention FLAGS...: ms of it on each rank of a ring
attention() {
    simulated "$1" ring train_context --layers 1 --heads 4 --channels 256 --vocab 512 --seq 131072 \
        --micro-batch 1 --global-batch 1 --steps 1 --context "$1" --context-by ring "${@:2}"
    awk '$1 ~ /^[0-9]+$/ && NF == 12 { printf "%.0f ", $2 * $4 / 100 }' "$dir/out"
}
cluster=dev/clusters/dgx-a100.json
for c in 2 4 8; do
    zigzag=$(attention $c) contiguous=$(attention $c --context-layout contiguous)
    awk -v c=$c '
        {
            for (i = 1; i <= NF; i++) {
                if (i == 1 || $i < least) least = $i
                if ($i > most) most = $i
            }
        }
        END { exit !(NF == c && least > 0 && most < 1.02 * least) }' <<<"$zigzag"
    report $? \
        "--context-layout zigzag, c = $c: attention takes all ranks as long within 2%: $zigzag ms"
    awk -v c=$c '{
            n = NF / 2
            for (i = 1; i <= n; i++) sum += $i
            ratio = n * $NF / sum
            formula = 2 - 1 / c
            print ratio " times as long, 2 - 1/c = " formula
            exit !(n == c && ratio > 0.98 * formula && ratio < 1.02 * formula) }' \
        <<<"$zigzag $contiguous" >"$dir/ratio"
    report $? "contiguous, c = $c: the last rank takes $(cat "$dir/ratio")"
done

# A step of the ring computes 2 A n^2 FLOPs with n tokens a rank, and sends 2 n A elements of 2
# bytes. Both take equally long if n = 2 rate / bandwidth. Compute beside communication keeps its
# speed here.
constant() { sed -n "s/.*\"$1\": {\"value\": \([0-9.e+]*\),.*/\1/p" "$cluster"; }
waits() {  # waits TOKENS: does the first rank's forward wait for keys?
    "${build/fp32/bf16}/train_context" --simulate "$cluster" --ranks 4 --layers 1 --heads 32 \
        --channels 4096 --vocab 512 --seq $((4 * $1)) --micro-batch 1 --global-batch 1 --steps 1 \
        --context 4 --context-by ring --trace "$dir/ring.json" >"$dir/out" 2>"$dir/err"
    local event='.*"name":"([^"]*)".*"ts":([0-9.]*),"dur":([0-9.]*),"pid":([0-9]*).*'
    sed -E "s/$event/\4|\1|\2|\3/" "$dir/ring.json" | awk -F'|' '
        $1 == 0 && $2 == "forward 0" { end = $3 + $4 }
        $1 == 0 && $2 == "wait context" { at[n++] = $3 }
        END { for (i = 0; i < n; i++) waits += at[i] < end; exit !(end > 0 && waits > 0) }'
}
overlap() {  # overlap NAME BANDWIDTH
    local least=64 most=65536 middle
    while [ $((most - least)) -gt 64 ]; do
        middle=$(((least + most) / 128 * 64))
        if waits $middle; then least=$middle; else most=$middle; fi
    done
    awk -v n=$most -v rate="$(constant flash_forward_128)" -v bandwidth="$(constant "$2")" '
        BEGIN { formula = 2 * rate / bandwidth; printf "%d, 2 rate / bandwidth = %.0f", n, formula
                exit !(n > 0.9 * formula && n < 1.1 * formula) }' >"$dir/found"
    report $? \
        "$1: the ring hides behind attention from so many tokens a rank on: $(cat "$dir/found")"
}
sed 's/"overlap_slowdown": {"value": [0-9.]*/"overlap_slowdown": {"value": 1/' \
    dev/clusters/dgx-a100.json >"$dir/one.json"
cluster=$dir/one.json overlap 'links of a node' node_p2p_bandwidth
sed 's/"gpus_per_node": {"value": 8/"gpus_per_node": {"value": 1/' "$dir/one.json" >"$dir/far.json"
cluster=$dir/far.json overlap 'one network card each' nic_bandwidth

# ---- the roof ------------------------------------------------------------------------------------
# Of the kernels that a build with PROFILE=1 times. A cluster counts the norm in the time of the
# update.

build=build/cpu-bf16-profile cluster=dev/clusters/dgx-a100.json simulated 1 roof train_gpt \
    --layers 2 --heads 16 --channels 2048 --seq 1024 --steps 1 --trace "$dir/roof.json"
roof=$(awk '/^matrix product/ { print $NF + 0 }' "$dir/out" | sort -n | tail -n 1)
awk -v roof="${roof:-0}" 'BEGIN { exit !(roof > 60 && roof <= 100) }'
report $? "the best product reaches $roof% of the peak"
highest=$(awk '!/^global_norm/ && /% +[0-9.e+]+ +[0-9.e+]+ +[0-9.]+%$/ { print $NF + 0 }' \
    "$dir/out" | sort -n | tail -n 1)
awk -v highest="${highest:-0}" 'BEGIN { exit !(highest >= 60 && highest <= 100) }'
report $? "and no kernel is above the roof: the best reaches $highest% of it"

# ---- links ---------------------------------------------------------------------------------------

# nanoseconds CONSTANT VALUE FLAGS...: of a step on the laptop with one constant changed
nanoseconds() {
    sed "s/\"$1\": {\"value\": [^,]*/\"$1\": {\"value\": $2/" dev/clusters/laptop.json \
        >"$dir/changed.json"
    cluster=$dir/changed.json simulated 2 link train_gpt_3d --layers 4 --heads 4 --channels 64 \
        --seq 32 --micro-batch 2 --steps 1 "${@:3}"
    times "$dir/link" | awk '{ printf "%.0f", 1e6 * $1 }'
}
# twice NAME CONSTANT VALUES FLAGS...: at 1/2 and 1/4 of the bandwidth, 1 and 3 times as much more
twice() {
    local name=$1 constant=$2 values=$3 full half quarter
    shift 3
    read -r full half quarter < \
        <(for v in $values; do nanoseconds "$constant" "$v" "$@"; echo -n ' '; done; echo)
    [ "${full:-0}" -gt 0 ] && [ "$half" -gt "$full" ] &&
        awk -v a="$full" -v b="$half" -v c="$quarter" \
            'BEGIN { x = c - a - 3 * (b - a); exit !(x < 20 && x > -20) }'
    report $? "$name: half the bandwidth doubles the time that it adds: $full, $half, $quarter ns"
}
twice 'messages between stages' node_p2p_bandwidth '4e9 2e9 1e9' --pipeline 2 --global-batch 2
twice 'sums over tensor ranks' node_bandwidth '4e7 2e7 1e7' --tensor 2 --global-batch 2

# ---- large ---------------------------------------------------------------------------------------

cluster=dev/clusters/selene-2021.json
gpt3='--layers 96 --heads 96 --channels 12288 --vocab 51200 --seq 2048'
gpt3+=' --micro-batch 1 --tensor 8 --recompute layer'
begin=$(date +%s%N)
simulated 1024 large train_gpt_3d $gpt3 --pipeline 16 --global-batch 256 --steps 1 \
    --trace "$dir/large.json"
code=$?
[ $code = 0 ] && grep -q '"simulated":true' "$dir/large" &&
    [ "$(grep -c '^ *[0-9][0-9]* .* [0-9.]*$' "$dir/out")" -ge 16 ]
took=$((($(date +%s%N) - begin) / 1000000))
report $? "175B parameters on 1024 GPUs: a row for each of 16 stages, in $took ms"
head -c 1 "$dir/large.json" | grep -q '{' && [ "$(grep -c '"process_name"' "$dir/large.json")" = \
    16 ]
report $? 'the trace has the stages that were simulated, and no other rank'

# No dimension of a grid but x may grow with the tokens of a micro-batch: y and z end at 65535
# blocks. The stand-in refuses such a launch as a GPU does.
many() {  # many TRAINER RANKS FLAGS...: a million tokens a micro-batch
    simulated "$2" many "$1" --layers 2 --heads 2 --channels 8 --vocab 8 --seq 8 \
        --micro-batch 131072 --steps 1 "${@:3}"
    code=$?
    report $code \
        "$1 launches all kernels for 1048576 tokens a micro-batch ${*:3}: $(tail -n 1 "$dir/err")"
}
many train_gpt 1
many train_gpt_tp 2 --sequence-parallel 1
many train_gpt_3d 2 --pipeline 2
many train_fsdp 2
many train_zero_bubble 2 --pipeline 2 --schedule zb-h1
many train_context 2 --context 2
many train_context 2 --context 2 --context-by ring
many train_moe 2 --experts 2 --expert-parallel 2
many train_llama 1 --model llama
many train_llama 1 --model nemotron
cluster=dev/clusters/eos-2025.json
simulated 64 long train_llama --tensor 8 --pipeline 8 --sequence-parallel 1 --model llama-3.2-1b \
    --seq 131072 --micro-batch 4 --global-batch 8 --recompute layer
report $? \
    "Llama 3.2 1B with 4 sequences of 131072 tokens at a time, on 64 GPUs: $(tail -n 1 "$dir/err")"
cluster=dev/clusters/selene-2021.json

# Perfetto drops an event that begins before another one of its track has ended, and ends after it.
# In ns, and bounded: the steps of a trace are long and its times are floats where they are
# measured.
overlapping() {
    local n='([0-9]*)'
    local event=".*\"ph\":\"X\",\"ts\":$n\.$n,\"dur\":$n\.$n,\"pid\":$n,\"tid\":$n.*"
    sed -nE "s/$event/\5 \6 \1\2 \3\4/p" "$1" |
        sort -k1,1n -k2,2n -k3,3n -k4,4nr |
        awk '{ if ($1 " " $2 != track) depth = 0; track = $1 " " $2; end = $3 + $4; n++
               while (depth > 0 && ends[depth] <= $3) depth--
               if (depth > 0 && end > ends[depth]) bad++
               ends[++depth] = end }
             END { print n + 0, bad + 0 }'
}
read -r events bad < <(overlapping "$dir/large.json")
[ "${events:-0}" -gt 10000 ] && [ "$bad" = 0 ]
report $? "of $events events none overlaps another one of its track but to lie in it ($bad do)"

# The light simulation of dev/scale has kernel lists of its own. With the trainers' software its
# times must be those of the trainer's kernels, and near the published ones if the published run had
# that software.
bf16=${build/fp32/bf16}
build/tools/scale --trainers "$bf16" dev/scale/rows_a100.csv dev/scale/rows_more.csv \
    $cluster:ptd-t1-3,ptd-t1-7,ptd-f12-v4-B12 dev/clusters/selene-2022.json:kor-t5-22B \
    dev/clusters/dgx-a100.json:llmc-124M >"$dir/out" 2>"$dir/err"
read -r rows _ _ _ mean _ _ _ most _ < <(tail -n 1 "$dir/out")
[ "${rows:-0}" = 8 ] && awk -v mean="$mean" -v most="$most" \
    'BEGIN { exit !(mean < 0.5 && most < 1) }'
report $? "8 published runs: the trainer and the light simulation: $(tail -n 1 "$dir/out")"
error=$(awk '/^llm.c/ { print $NF }' "$dir/out")
awk -v error="${error:-100}" 'BEGIN { exit !(error < 5) }'
report $? "llm.c's published run, which needs no other software: the trainer's error is $error%"

# FSDP: large models and small ones, short sequences and long ones, and one whose step waits for the
# network.
a100_80=mpt-a100-80-70b,mpt-a100-80-7b-1024,mpt-a100-80-1b-65536,claim-a100-80
build/tools/scale --trainers "$bf16" dev/scale/rows_fsdp.csv dev/scale/rows_claims.csv \
    dev/clusters/foundry-a100-80.json:$a100_80 \
    dev/clusters/foundry-a100-40.json:mpt-a100-40-350m,mpt-a100-40-3b-2048 \
    dev/clusters/foundry-h100.json:mpt-h100-70b,mpt-h100-1b-2048 >"$dir/out" 2>"$dir/err"
read -r rows _ _ _ mean _ _ _ most _ < <(tail -n 1 "$dir/out")
[ "${rows:-0}" -ge 12 ] && awk -v mean="$mean" -v most="$most" \
    'BEGIN { exit !(mean < 0.6 && most < 1) }'
report $? \
    "$rows published runs under FSDP: train_fsdp and the light simulation: $(tail -n 1 "$dir/out")"

# It runs the trainer with a temporary file, where TMPDIR says.
mkdir "$dir/tmp"
bubbles="build/tools/bubbles formulas $bf16 dev/clusters/dgx-a100.json 4"
TMPDIR=$dir/tmp $bubbles >"$dir/out" 2>"$dir/err" && [ -z "$(ls "$dir/tmp")" ]
report $? 'bubbles leaves no temporary file'
! TMPDIR=$dir/none $bubbles >"$dir/out" 2>"$dir/err" &&
    grep -q "cannot make a temporary file in $dir/none (TMPDIR): No such file" "$dir/out" "$dir/err"
report $? 'bubbles refuses a TMPDIR that is not there'

# ---- refused -------------------------------------------------------------------------------------

refused() {  # refused WORDS FLAGS...: exit code 2 and one sentence that has the words
    local words=$1
    shift
    "$build/train_gpt_3d" "$@" >"$dir/out" 2>"$dir/err"
    [ $? = 2 ] && [ "$(wc -l <"$dir/err")" = 1 ] && grep -q "^error: .*$words" "$dir/err"
    report $? "refused: $(cat "$dir/err")"
}
refused 'does not fit: .* MiB are needed' --simulate $cluster --ranks 8 $gpt3 --pipeline 1
sed 's/"memory": {"value": 8/"memory": {"value": -8/' $cluster >"$dir/negative.json"
grep -v '"sms"' $cluster >"$dir/missing.json"
refused '"memory" must be a number from 1 to 1e+18' --simulate "$dir/negative.json" --ranks 1
refused 'has no "sms"' --simulate "$dir/missing.json" --ranks 1
refused 'cannot open' --simulate "$dir/none.json" --ranks 1
refused 'makes 6, but the job has 8 ranks' --simulate $cluster --ranks 8 --tensor 2 --pipeline 3 \
    --data 1
refused 'does not divide' --simulate $cluster --ranks 8 --tensor 3
refused 'multiple of 4 (stages) micro-batches' --simulate $cluster --ranks 4 --pipeline 4 \
    --layers 8 --virtual 2 --global-batch 24
refused 'needs --ranks' --simulate $cluster
refused 'needs --simulate' --ranks 8
refused 'at most 1024, not 2048' --simulate $cluster --ranks 2048 --pipeline 2048 --layers 2048 \
    --global-batch 2048
refused 'exclude each other' --simulate $cluster --ranks 1 --virtual-time $cluster
for flag in '--train-data x' '--val-data x' '--init x' '--resume x' '--out x' '--sample-every 1' \
    '--dump-gradients x' \
    '--eval x'; do
    refused "${flag%% *} has no meaning under --simulate" --simulate $cluster --ranks 1 $flag
done
refused 'cannot open' --virtual-time "$dir/none.json" --train-data "$dir/train.bin"
finish
