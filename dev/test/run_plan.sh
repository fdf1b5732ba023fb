#!/usr/bin/env bash
# run_plan.sh [BUILD]: compares the planner's layouts with the trainer and with known answers. The
# trainer must accept its layouts, count the same memory for them and, on its own virtual clock, put
# them in the same order. On three made clusters the right choice is known, and so is the reason why
# nothing fits. Ends with `N passed, N failed`.
# needs: tools/plan bf16/train_gpt_3d bf16/train_zero_bubble bf16/train_fsdp bf16/train_llama
# needs: bf16/train_muon bf16/train_v bf16/train_5d
# shellcheck disable=SC2086  # flags are words
. "$(dirname "$0")/report.sh"
cpu_only 'it simulates, on the CPU'
trainer() {
    local name=train_gpt_3d
    [[ $* == *zb-* ]] && name=train_zero_bubble
    [[ $* =~ zb-v|v-half|dualpipe-v ]] && name=train_v
    [[ $* == *--shard* ]] && name=train_fsdp
    [[ $* == *--data* && $* != *--tensor* && $* != *--shard* ]] && name=train_muon
    [[ $* == *--model* ]] && name=train_llama
    [[ $* == *--expert-parallel* ]] && name=train_5d
    "${build/fp32/bf16}/$name" "$@"
}

plan() { build/tools/plan --light "$@" 2>"$dir/err"; }
# values NAME: the numbers or words of a member, one for each of the best, out of JSON on stdin.
values() { sed -n "s/^\t*\"$1\":\t//p" | sed 's/,$//; s/^"//; s/"$//'; }
# seconds_of_step: the time of a step that a simulation on stdin prints.
seconds_of_step() { sed -n 's/^step \([0-9.]*\) s .*/\1/p'; }
# farthest: percent by which two numbers on a line of stdin differ at most.
farthest() {
    awk '{ e = $1 / $2 - 1; if (e < 0) e = -e; if (e > most) most = e }
         END { printf "%.1f", 100 * most }'
}

# ---- the trainer agrees --------------------------------------------------------------------------

model='--layers 24 --heads 16 --channels 1024 --vocab 50257 --seq 1024'
plan $model --cluster dgx-a100 --gpus 8 --batch 64 --pipeline 4 --json >"$dir/best.json"
report $? 'a plan for 8 GPUs with 4 stages'
mapfile -t flags < <(values flags <"$dir/best.json")
mapfile -t memory < <(values memory_bytes <"$dir/best.json")
mapfile -t seconds < <(values step_seconds <"$dir/best.json")
[ ${#flags[@]} = 10 ] && [ ${#memory[@]} = 10 ] && [ ${#seconds[@]} = 10 ]
report $? 'the JSON has ten layouts'
accepted=0 as_large=0
for i in "${!flags[@]}"; do
    trainer --simulate dev/clusters/dgx-a100.json --ranks 8 --steps 2 $model --global-batch 64 \
        ${flags[i]} \
        >"$dir/out" 2>"$dir/err" && accepted=$((accepted + 1))
    awk -v want="${memory[i]}" '
        $1 ~ /^[0-9]+$/ && NF == 12 && $12 > most { most = $12 }
        END { e = most - want / 2^30; exit !(most > 0 && e < 0.006 && e > -0.006) }' \
        "$dir/out" && as_large=$((as_large + 1))
    step=$(seconds_of_step <"$dir/out")
    echo "${seconds[i]} ${step:-0}" >>"$dir/times"
done
[ $accepted = 10 ]
report $? "never recommends what the trainer refuses: it accepts $accepted of 10"
[ $as_large = 10 ]
report $? "the trainer counts the same memory for $as_large of 10"
wrong=$(awk '{ plan[NR] = $1; real[NR] = $2 }
    END { for (i = 1; i <= NR; i++) for (j = i + 1; j <= NR; j++)
              if (plan[j] > 1.03 * plan[i] && real[j] <= real[i]) n++
          print n + 0 }' "$dir/times")
[ "$wrong" = 0 ]
report $? "the trainer's clock has the same order where plans differ by 3% ($wrong pairs do not)"
far=$(awk '{ print $2, $1 }' "$dir/times" | farthest)
awk -v far="$far" 'BEGIN { exit !(far < 6) }'
report $? "the trainer's step times are within 6% of the plan's (worst $far%)"

# beside MODEL CLUSTER GPUS BATCH START [FLAG...]: prints a line for each plan. It has 1 if the
# plan's flags begin with START and the trainer counts the same memory on its largest stage. Then
# comes the relative error of the trainer's step.
beside() {
    local model=$1 cluster=$2 gpus=$3 batch=$4 start=$5 i flags memory seconds
    shift 5
    plan $model --cluster "$cluster" --gpus "$gpus" --batch "$batch" "$@" --json >"$dir/plans.json"
    mapfile -t flags < <(values flags <"$dir/plans.json")
    mapfile -t memory < <(values memory_bytes <"$dir/plans.json")
    mapfile -t seconds < <(values step_seconds <"$dir/plans.json")
    for i in "${!flags[@]}"; do
        trainer --simulate "dev/clusters/$cluster.json" --ranks "$gpus" --steps 2 $model \
            --global-batch "$batch" ${flags[i]} >"$dir/out" 2>"$dir/err"
        awk -v start="$start" -v flags="${flags[i]}" -v want="${memory[i]}" \
            -v plan="${seconds[i]}" '
            $1 ~ /^[0-9]+$/ && NF == 12 && $12 > gib { gib = $12 }
            /^step [0-9.]* s / { step = $2 }
            END { e = step / plan - 1; g = gib - want / 2^30
                  good = index(flags, start) == 1 && g < 0.006 && g > -0.006
                  print good + 0, (e < 0 ? -e : e) }' "$dir/out"
    done
}
# agree WHAT PLANS PERCENT: reads beside's lines. Are there this many plans, all with the trainer's
# memory, and steps within PERCENT?
agree() {
    local plans good far
    read -r plans good far < \
        <(awk '{ good += $1 } $2 > most { most = $2 } END { print NR, good, 100 * most }')
    [ "$plans" -ge "$2" ] && [ "$good" = "$plans" ] &&
        awk -v far="$far" -v most="$3" 'BEGIN { exit !(far < most) }'
    report $? "$1: memory as the trainer counts it for $good of $plans plans, steps within $far%"
}

# FSDP is a layout of its own. train_fsdp must accept it, count the same memory and take the same
# time. This holds if it gathers for every micro-batch and waits for the network or not.
agree FSDP 20 4 < <(for shard in 2 3; do
    for batch in 8 64; do beside "$model" dgx-a100 8 $batch "--shard $shard" --shard $shard; done
done)
agree 'FSDP in replicas' 12 4 < <(for batch in 16 64; do
    beside "$model" dgx-a100 16 $batch '--shard 3' --shard 3 --replicas 2
done)
# Muon: the owners' momenta, Newton-Schulz and the broadcasts behind it. Of 3 ranks the first owns
# less than others, and the plan counts the fullest.
agree Muon 13 4 < <(
    beside "$model" dgx-a100 8 64 --data --optimizer muon
    beside "$model" dgx-a100 4 16 --data --optimizer muon --micro-batch 1)
small='--layers 4 --heads 4 --channels 128 --vocab 256 --seq 64 --micro-batch 1'
planned=$(plan $small --cluster dgx-a100 --gpus 3 --batch 3 --optimizer muon --recompute none \
    --json | values memory_bytes)
OMP_NUM_THREADS=1 $launch -n 3 "${build/fp32/bf16}/train_muon" $small --global-batch 3 --dry-run \
    2>"$dir/err" | awk -v plan="${planned:-0}" '
    $1 ~ /^[0-2]$/ && NF == 5 { sum[$1] = $2 + $3 + $4 + $5; if (sum[$1] > most) most = sum[$1] }
    END { e = most - (plan - 3e9) / 2^20; exit !(most > sum[0] && e < 0.3 && e > -0.3) }'
report $? "and for the fullest of 3 unlike owners: $planned bytes with 3 GB of libraries"
# Models of train_llama by their names: a tied head, grouped heads, a gate, and neither; norms of
# heads, a window.
agree 'Llama, Qwen2 and 3, Mistral, Nemotron-4' 60 4 < <(
    beside '--model llama-3.2-1b --seq 4096' dgx-h100 16 64 '--tensor'
    beside '--model qwen2.5-0.5b --seq 4096' dgx-h100 8 64 '--tensor' --pipeline 2
    beside '--model llama-3.1-70b --seq 8192' dgx-h100 256 512 '--tensor'
    beside '--model qwen3-1.7b --seq 4096' dgx-h100 16 64 '--tensor'
    beside '--model mistral-7b --seq 8192' dgx-h100 32 64 '--tensor'
    beside '--model nemotron-4-15b --seq 4096' dgx-h100 64 256 '--tensor')
# Mixtures of experts by train_5d, with and without tensor ranks. Experts and sequences are cut over
# ranks of a node and of several nodes. Another group has the places and gradients of experts.
agree 'mixtures of experts' 7 3 < <(
    qwen='--model qwen3-30b-a3b --seq 4096' mixtral='--model mixtral-8x7b --seq 4096'
    one='--tensor 1 --micro-batch 1 --zero 1'
    two='--tensor 2 --micro-batch 1 --zero 1 --sequence-parallel 1 --pipeline 2'
    beside "$qwen" dgx-h100 64 64 --tensor $one --pipeline 1 --expert-parallel 16 --context 1 \
        --recompute layer
    beside "$qwen" dgx-h100 64 64 --tensor $one --pipeline 2 --expert-parallel 8 --context 4 \
        --recompute gelu --virtual 6
    beside "$mixtral" dgx-h100 64 128 --tensor $one --pipeline 4 --expert-parallel 8 --context 1 \
        --recompute none --virtual 8
    beside "$mixtral" dgx-h100 64 64 --tensor $two --expert-parallel 8 --context 4 \
        --recompute layer --schedule 1f1b
    beside '--model mixtral-8x7b --seq 8192 --layers 4' dgx-h100 16 4 --tensor $one --pipeline 1 \
        --expert-parallel 8 --context 16 --recompute layer
    beside "$mixtral" dgx-h100 64 64 --tensor $two --expert-parallel 2 --context 2 \
        --recompute layer --virtual 4
    beside "$qwen" dgx-a100 64 128 --tensor --tensor 2 --pipeline 1 --micro-batch 1 --zero 1 \
        --expert-parallel 32 --context 1 --recompute layer --sequence-parallel 0)
# The best plan of 235B parameters, with its reasons. Half a minute is its bound on a quiet machine.
began=$SECONDS
build/tools/plan --model qwen3-235b-a22b --cluster eos-2025 --gpus 512 --batch 1536 --seq 4096 \
    >"$dir/out" 2>"$dir/err"
[ $? = 0 ] && [ $((SECONDS - began)) -le 90 ]
report $? "Qwen3-235B on 512 GPUs has a plan within $((SECONDS - began)) s"
e=$(sed -n 's/^train: .*--expert-parallel \([0-9]*\) .*/\1/p' "$dir/out")
grep -qE "^  e = ${e:-0} .* MB .* experts, .* GiB with their gradients" "$dir/out" &&
    grep -qE '^  c = [0-9]+ .* of 4096 tokens' "$dir/out"
report $? "it says what experts and sequences send: e = $e"
grep -qE '^  half e +(does not fit|\+[0-9])' "$dir/out" &&
    grep -qE '^  twice e +\+[0-9.]+%' "$dir/out" &&
    grep -qE '^  twice c +\+[0-9.]+%' "$dir/out" &&
    grep -qE '^  drop no token +does not fit' "$dir/out"
report $? "and why no others: $(grep -E '^  (half|twice) [ce]' "$dir/out" | tr '\n' ';')"

# Two chunks a stage in a V. Stage 0 holds both ends of the model, and twice as many pairs of
# micro-batch and chunk.
agree 'chunks in a V' 25 4 < <(
    for schedule in zb-v dualpipe-v; do
        beside "$model" dgx-a100 8 64 '--tensor' --pipeline 4 --schedule $schedule
    done
    beside "$model" dgx-a100 8 64 '--tensor' --tensor 2 --pipeline 4 --schedule v-half)
plan $model --cluster dgx-a100 --gpus 8 --batch 8 --tensor 2 --pipeline 4 --micro-batch 2 \
    --schedule zb-v >"$dir/out"
[ $? = 1 ] && grep -q 'twice as many micro-batches, not with 4 and 4' "$dir/err"
report $? 'a V with fewer than 2 p micro-batches is left out with a sentence'
plan --model llama-3.1-8b --cluster dgx-h100 --gpus 16 --batch 64 --schedule zb-h1 >"$dir/out"
[ $? = 1 ] && grep -q '^error: .*train_llama has the schedules gpipe, 1f1b and interleaved' \
    "$dir/err"
report $? 'a schedule that train_llama does not have is refused by name'
# kind FLAGS...: prints the trainer of the best layout, and the plan's comparison with the other
# kind.
kind() {
    plan --cluster dgx-a100 "$@" >"$dir/out"
    sed -n 's/^train: .*bf16\/\([a-z0-9_]*\) .*/\1/p
            s/^  \(no FSDP\|FSDP\) [^%]*\([-+][0-9.]*%\).*/\1 \2/p' "$dir/out" |
        sort | tr '\n' ' '
}
got=$(kind --model ptdp-39b --gpus 128 --batch 1024)
[[ $got =~ ^no\ FSDP\ \+[1-9][.0-9]*%\ train_fsdp\ $ ]]
report $? "39B on 128 A100: FSDP, and how much a grid takes: $got"
grep -qE '^  Muon +(does not fit|\+[1-9])' "$dir/out"
report $? "and what Muon takes: $(grep '^  Muon' "$dir/out")"
got=$(kind --model gpt3-175b --gpus 1024 --batch 1024)
[[ $got =~ ^FSDP\ \+[1-9][.0-9]*%\ train_gpt_3d\ $ ]]
report $? "175B on 1024: a grid, and how much FSDP takes: $got"

# ---- invariants ----------------------------------------------------------------------------------

plan $model --cluster dgx-a100 --gpus 8 --batch 64 --pipeline 4 --json --no-v >"$dir/no_v.json"
report $? 'a plan without a V'
! grep -qE 'zb-v|v-half|dualpipe-v' "$dir/no_v.json" && grep -q dualpipe-v "$dir/best.json"
report $? '--no-v leaves out what is among the best otherwise'
plan $model --cluster dgx-a100 --gpus 8 --batch 64 --pipeline 4 --json | cmp -s - "$dir/best.json"
report $? 'the same question has the same answer'
same=0
for i in 0 4 9; do
    pinned=${flags[i]}
    if [[ $pinned == *zb-auto* ]]; then  # tried for the best of a search only
        same=$((same + 1))
        continue
    fi
    again=$(plan $model --cluster dgx-a100 --gpus 8 --batch 64 $pinned --json |
        values step_seconds | head -n 1)
    [ "$again" = "${seconds[i]}" ] && same=$((same + 1))
done
[ $same = 3 ]
report $? "a layout's flags, given back to the planner, have the same step time ($same of 3)"
sizes=
pinned='--tensor 2 --pipeline 2 --micro-batch 2 --schedule 1f1b --zero 0 --recompute none
    --sequence-parallel 0'
for gpus in 8 16 64; do
    sizes+=" $(plan $model --cluster dgx-a100 --gpus $gpus --batch $((8 * gpus)) $pinned --json |
        values memory_bytes | head -n 1)"
done
set -- $sizes
awk -v a="${1:-0}" -v b="${2:-0}" -v c="${3:-0}" 'BEGIN {
    exit !(a > 0 && b / a > 0.9995 && b / a < 1.0005 && c / a > 0.9995 && c / a < 1.0005) }'
report $? "more data ranks at equal layout leave a rank's memory, but for padded buckets:$sizes"

# The trainer's clock ranks the ten best. Its times must equal the times of a run of their own.
build/tools/plan $model --cluster dgx-a100 --gpus 8 --batch 64 --pipeline 4 --json \
    >"$dir/ranked.json" 2>"$dir/err"
mapfile -t clock < <(values clock_seconds <"$dir/ranked.json")
mapfile -t ranked < <(values flags <"$dir/ranked.json")
step=$(trainer --simulate dev/clusters/dgx-a100.json --ranks 8 --steps 2 $model \
    --global-batch 64 ${ranked[0]} 2>"$dir/err" | seconds_of_step)
printf '%s\n' "${clock[@]}" | awk -v step="${step:-0}" '
    NR == 1 && (e = $1 / step - 1) * e > 1e-8 { exit bad = 1 }
    $1 > 0 && $1 < last { exit bad = 1 }
    $1 > 0 { last = $1 }
    END { exit bad || NR != 10 || last == 0 }'
report $? "the ten best are in the order of the trainer's clock, which says $step s of the first"

double=$(for at in best ranked; do
    values flags <"$dir/$at.json" |
        sed 's/ --order ...//; s/ --schedule [a-z0-9-]*//; s/ --max-in-flight [0-9]*//' |
        paste <(values step_seconds <"$dir/$at.json") - | sort | uniq -d
done)
[ -z "$double" ]
report $? "no layout is listed twice under another order or schedule: ${double:-none}"

# plans of random sizes: the trainer must accept all of them
RANDOM=31
tried=0 found=0 accepted=0 dry=0
while [ $tried -lt 200 ]; do
    tried=$((tried + 1))
    heads=$((4 * (1 + RANDOM % 4))) layers=$((1 + RANDOM % 9)) gpus=$((1 + RANDOM % 24))
    sizes="--layers $layers --heads $heads --channels $((64 * heads)) --vocab 1000"
    sizes+=" --seq $((64 * (1 + RANDOM % 3)))"
    batch=$((gpus * (1 + RANDOM % 6)))
    kinds=('' '' --schedule\ {gpipe,1f1b,interleaved,zb-h1,zb-auto} '--tensor 2' '--pipeline 3' \
        '--virtual 2')
    random=$(plan $sizes --cluster dgx-a100 --gpus $gpus --batch $batch \
        ${kinds[RANDOM % ${#kinds[@]}]} --json |
        values flags | sed -n "$((1 + RANDOM % 3))p")
    [ -n "$random" ] || continue
    found=$((found + 1))
    if [ $((tried % 10)) = 0 ] && [ $gpus -le 8 ]; then
        case $random in
            *zb-*) program=train_zero_bubble ;;
            *--shard*) program=train_fsdp ;;
            *) program=train_gpt_3d ;;
        esac
        OMP_NUM_THREADS=1 ${mpirun:-mpirun --oversubscribe --bind-to none --allow-run-as-root} \
            -n $gpus "${build/fp32/bf16}/$program" \
            $sizes --global-batch $batch $random --dry-run >"$dir/out" 2>"$dir/err" </dev/null &&
            dry=$((dry + 1))
    fi
    trainer --simulate dev/clusters/dgx-a100.json --ranks $gpus --steps 1 $sizes --global-batch \
        $batch $random \
        >"$dir/out" 2>"$dir/err" && accepted=$((accepted + 1)) || cp "$dir/err" "$dir/refused"
done
[ -f "$dir/refused" ] && cp "$dir/refused" "$dir/err"
[ $accepted = $found ] && [ $found -gt 100 ] && [ $dry -gt 0 ]
report $? "the trainer accepts $accepted of $found plans of 200 random questions, $dry on ranks"
got=$(plan --schedule zb-auto --pipeline 8 --tensor 8 --micro-batch 1 --model gpt3-175b \
    --cluster dgx-a100 --gpus 1024 --batch 256 --json | values flags)
grep -q -- '--max-in-flight 8 ' <<<"$got" && grep -q -- '--max-in-flight 16 ' <<<"$got" &&
    ! grep -q -- '--max-in-flight 0' <<<"$got"
report $? 'zb-auto is tried with p and 2 p micro-batches in flight, and never with 0'

# Layouts by hand. Among random layouts that a trainer accepts, none is 1% faster on its clock than
# the first of the plan. By default a few are tried for each of six settings; PLAN_BY_HAND=200
# dev/test/run_plan.sh tries 200. pick NAME VALUES...: sets a variable to one of the values.
pick() {
    local name=$1
    shift $((1 + RANDOM % ($# - 1)))
    printf -v "$name" %s "$1"
}
while read -r cluster gpus batch sizes; do
    first=$(build/tools/plan $sizes --cluster "$cluster" --gpus "$gpus" --batch "$batch" --json \
        2>"$dir/err" | values clock_seconds | head -n 1)
    ran=0
    for ((i = 0; i < 500 && ran < (${PLAN_BY_HAND:-24} + 5) / 6; i++)); do
        pick t 1 2 4 8 && pick p 1 1 2 4 8 && pick b 1 1 2 2 4 8 && pick v 1 1 2 3 &&
            pick zero 1 1 0 && pick sp 1 0
        pick schedule 1f1b gpipe zb-h1 && pick recompute none none gelu layer layer &&
            pick shard 0 0 0 0 0 2 3
        [ $((gpus % (t * p))) = 0 ] || continue
        flags="--tensor $t --pipeline $p --data $((gpus / t / p)) --zero $zero"
        flags+=" --sequence-parallel $sp"
        if [ "$p" -gt 1 ] && [ "$v" -gt 1 ]; then flags+=" --virtual $v"; fi
        if [ "$p" -gt 1 ] && [ "$v" = 1 ]; then flags+=" --schedule $schedule"; fi
        [ "$shard" = 0 ] || flags="--shard $shard"
        trainer --simulate "dev/clusters/$cluster.json" --ranks "$gpus" --steps 2 $sizes \
            --global-batch "$batch" $flags \
            --micro-batch "$b" --recompute "$recompute" >"$dir/out" 2>"$dir/err" || continue
        ran=$((ran + 1))
        echo "$(seconds_of_step <"$dir/out") ${first:-0} $cluster $flags"
    done
done >"$dir/by_hand" <<'ROWS'
dgx-a100 8 64 --layers 48 --heads 32 --channels 1600 --vocab 50257 --seq 1024
dgx-a100 32 128 --layers 36 --heads 32 --channels 4096 --vocab 51200 --seq 2048
dgx-h100 16 64 --layers 36 --heads 32 --channels 4096 --vocab 51200 --seq 2048
selene-2020 64 256 --layers 40 --heads 48 --channels 6144 --vocab 51200 --seq 2048
roce-a100 16 128 --layers 36 --heads 16 --channels 1280 --vocab 50257 --seq 1024
eos-2025 64 128 --layers 48 --heads 64 --channels 8192 --vocab 51200 --seq 2048
ROWS
read -r ran least < <(awk '
    $2 > 0 { e = $1 / $2 - 1; if (!n++ || e < least) least = e }
    END { print n, 100 * least }' "$dir/by_hand")
[ "$ran" -ge 24 ] && awk -v least="$least" 'BEGIN { exit !(least > -1) }'
report $? "of $ran layouts by hand the best takes $least% more than the plan's first"

# ---- three clusters ------------------------------------------------------------------------------

# best CLUSTER FLAGS...: the flags of the best layout.
best() {
    local cluster=$1
    shift
    plan --cluster "$cluster" --json "$@" | values flags | head -n 1
}
# cluster NAME SED: dgx-a100 with changes.
cluster() { sed "$2" dev/clusters/dgx-a100.json >"$dir/$1.json"; }

cluster islands 's/^    "gpus_per_node"/    "gpus_per_island": {"value": 16, "source": "made"},\
    "island_bandwidth": {"value": 1e9, "source": "made: one 10 Gb\/s Ethernet link"},\
    "island_latency": {"value": 1e-4, "source": "made"},\
&/'
got=$(best "$dir/islands.json" --model gpt2-xl --gpus 32 --batch 512)
[[ $got == *'--pipeline '[2-9]* && $got != *--order* ]]
report $? "two islands joined by Ethernet: stages, not data ranks, on either side of the link: $got"
[[ $got =~ --pipeline\ ([0-9]+)\ .*--max-in-flight\ ([0-9]+) ]] &&
    [ "${BASH_REMATCH[2]}" = $((3 * BASH_REMATCH[1])) ]
report $? 'where 3 p micro-batches in flight are best'
two_replicas() {
    plan --cluster "$dir/islands.json" --model gpt2-xl --gpus 32 --batch 512 --data 2 "$@" --json |
        values step_seconds |
        head -n 1
}
slow=$(two_replicas --order ptd) fast=$(two_replicas --order tdp)
awk -v slow="$slow" -v fast="$fast" 'BEGIN { exit !(slow > 2 * fast && fast > 0) }'
report $? "with the data ranks across it a step takes longer: $slow s against $fast s"

cluster pcie '/"node_bandwidth"/s/2.31e11/1.2e10/; /"node_p2p_bandwidth"/s/2e11/1.2e10/'
got=$(best "$dir/pcie.json" --model gpt2-large --gpus 8 --batch 64)
[[ -n $got && $got != *'--tensor '[2-9]* ]]
report $? "PCIe nodes without NVLink: no tensor parallelism: $got"

cluster nvl '/"gpus_per_node"/s/8/64/; /"nics_per_node"/s/8/64/'
got=$(best "$dir/nvl.json" --model ptdp-7.5b --gpus 64 --batch 64)
[[ $got == *'--pipeline 1 '* ]]
report $? \
    "64 GPUs on one switch and a sequence for each: no pipeline, which nothing would fill: $got"

# ---- groups that leave nodes ---------------------------------------------------------------------

# Nodes of 4, 6, 12, 16 and 72 GPUs. Tensor groups fill them, straddle two of them or lie across
# many, and data groups share a NIC for two GPUs. Plan and trainer cost the group for which the job
# waits.
model='--layers 12 --heads 32 --channels 4096 --vocab 51200 --seq 2048'
for node in 4 6 12 16 72; do
    for shape in 'tdp 4 6 4 1' 'dtp 8 4 3 1' 'tdp 16 2 3 1' 'tdp 2 12 4 2' 'tdp 4 24 1 2'; do
        read -r order t d p share <<<"$shape"
        cluster "node$node" \
            "/\"gpus_per_node\"/s/8,/$node,/; /\"nics_per_node\"/s/8,/$((node / share)),/"
        flags="--tensor $t --pipeline $p --micro-batch 1 --schedule 1f1b --order $order"
        flags+=" --sequence-parallel 1 --zero 1"
        light=$(plan $model --cluster "$dir/node$node.json" --gpus 96 --batch 96 $flags \
            --recompute none --json | values step_seconds)
        step=$(trainer --simulate "$dir/node$node.json" --ranks 96 --steps 2 $model \
            --global-batch 96 --data $d $flags 2>>"$dir/err" | seconds_of_step)
        echo "$node $shape ${light:-0} ${step:-1}"
    done
done >"$dir/nodes"
# most SHARE: the largest difference of the two in percent, for shapes with a NIC for SHARE GPUs.
most() {
    awk -v share="$1" '
        $6 == share { e = $7 / $8 - 1; if (e < 0) e = -e; if (e > most) most = e; n++ }
        END { printf "%.1f", n ? 100 * most : 100 }' "$dir/nodes"
}
alone=$(most 1) shared=$(most 2)
awk -v most="$alone" 'BEGIN { exit !(most < 4) }'
report $? "on nodes of 4, 6, 12, 16 and 72 GPUs plan and trainer differ by at most $alone%"
awk -v most="$shared" 'BEGIN { exit !(most < 12) }'
report $? "and by $shared% where data groups share a NIC for two GPUs, and the step waits for them"

# ---- unlike nodes --------------------------------------------------------------------------------

# 4 nodes with InfiniBand and 4 with RoCE: data groups inside a kind of node, stages across, layers
# by the stages' speed.
model='--layers 36 --heads 32 --channels 4096 --vocab 51200 --seq 2048'
unlike() {
    plan $model --cluster holmes-a100 --gpus 64 --batch 768 --tensor 4 --micro-batch 6 \
        --recompute none "$@"
}
unlike --json >"$dir/unlike.json"
mapfile -t flags < <(values flags <"$dir/unlike.json")
mapfile -t seconds < <(values step_seconds <"$dir/unlike.json")
mapfile -t memory < <(values memory_bytes <"$dir/unlike.json")
best=${flags[0]:-}
[[ $best == *'--pipeline 2 '*'--layers-per-stage '* && $best != *--order* ]]
report $? "InfiniBand and RoCE: stages on either side, and the faster one has more layers: $best"
read -r more fewer < <(sed -n 's/.*--layers-per-stage \([0-9]*\),\([0-9]*\) .*/\1 \2/p' <<<"$best")
[ "${more:-0}" -gt "${fewer:-99}" ] && [ $((more + fewer)) = 36 ]
report $? "$more layers with InfiniBand, $fewer with RoCE and the head"
again=$(unlike $best --json | values step_seconds | head -n 1)
equal=$(unlike --layers-per-stage 18,18 --pipeline 2 --json | values step_seconds | head -n 1)
[ -n "$again" ] && [ "$again" = "${seconds[0]}" ] &&
    awk -v equal="${equal:-0}" -v best="$again" 'BEGIN { exit !(equal > best) }'
report $? "these flags have the same step again, ${again:-none} s, and equal stages $equal s"
accepted=0
for at in 0 1 2; do
    trainer --simulate dev/clusters/holmes-a100.json --ranks 64 --steps 2 $model \
        --global-batch 768 ${flags[at]} >"$dir/out" 2>"$dir/err"
    awk -v want="${memory[at]}" '
        /^step [0-9.]* s / { step = $2 }
        $1 ~ /^[0-9]+$/ && NF == 12 && $12 > gib { gib = $12 }
        END { e = gib - want / 2^30; exit !(step > 0 && e < 0.006 && e > -0.006) }' \
        "$dir/out" && accepted=$((accepted + 1))
done
[ $accepted = 3 ]
report $? "the trainer accepts $accepted of the first 3 and counts the same memory"
for row in '2 --order tdp' '2 --order ptd' '2 --layers-per-stage 24,12' \
    '4 --layers-per-stage 12,10,8,6' '4 --order tpd'; do
    read -r p more <<<"$row"
    shape="--tensor 4 --pipeline $p --micro-batch 6 --schedule 1f1b --sequence-parallel 1"
    shape+=" --zero 1 $more"
    light=$(unlike $shape --json | values step_seconds | head -n 1)
    step=$(trainer --simulate dev/clusters/holmes-a100.json --ranks 64 --steps 2 $model \
        --global-batch 768 $shape --data $((16 / p)) 2>>"$dir/err" | seconds_of_step)
    echo "$p ${more// /} ${light:-0} ${step:-1}"
done >"$dir/networks"
most=$(cut -d' ' -f3,4 "$dir/networks" | farthest)
awk -v most="$most" 'BEGIN { exit !(most < 6) }' &&
    awk '{ s[NR] = $4 } END { exit !(s[2] > 1.5 * s[1] && NR == 5) }' "$dir/networks"
networks=$(tr '\n' ';' <"$dir/networks")
report $? "plan and trainer differ by $most%, groups across both kinds take longer: $networks"

# ---- bad input -----------------------------------------------------------------------------------

# refused CODE WORD FLAGS...: one sentence and the exit code.
refused() {
    local want=$1 word=$2 code
    shift 2
    plan "$@" >"$dir/out"
    code=$?
    [ $code = "$want" ] && [ "$(grep -c '^error: ' "$dir/err")" = 1 ] &&
        grep -q -- "$word" "$dir/err"
    report $? "refused with exit code $want: $*"
}
refused 2 'no model' --model gpt9 --cluster dgx-a100 --gpus 8 --batch 8
refused 2 'no flag' --model gpt2 --cluster dgx-a100 --gpus 8 --batch 8 --color red
refused 2 'whole number' --model gpt2 --cluster dgx-a100 --gpus 0 --batch 8
refused 2 'whole number' --model gpt2 --cluster dgx-a100 --gpus -8 --batch 8
refused 2 'from 1 to 1000000' --model gpt2 --cluster dgx-a100 --gpus 8 --batch 100000000
refused 2 'cannot be' --model gpt2 --cluster dgx-a100 --gpus 8 --batch 8 --recompute all
refused 2 'order' --model gpt2 --cluster dgx-a100 --gpus 8 --batch 8 --order tdd
refused 2 'are needed' --model gpt2 --gpus 8 --batch 8
refused 2 'name a --model' --cluster dgx-a100 --gpus 8 --batch 8
refused 2 "no cluster 'nowhere'" --model gpt2 --cluster nowhere --gpus 8 --batch 8
refused 2 "'1'" --model gpt2 --cluster dgx-a100 --gpus 8 --batch 8 --shard 1
refused 2 'for FSDP' --model gpt2 --cluster dgx-a100 --gpus 8 --batch 8 --replicas 2
refused 2 'does not divide 8' --model gpt2 --cluster dgx-a100 --gpus 8 --batch 8 --shard 3 \
    --replicas 3
refused 1 'leave out --tensor' --model gpt2 --cluster dgx-a100 --gpus 8 --batch 8 --shard 3 \
    --tensor 2
refused 2 'leave out --tensor' --model gpt2 --cluster dgx-a100 --gpus 8 --batch 8 \
    --optimizer muon --tensor 2
refused 2 'leave out --tensor' --model llama-3.2-1b --cluster dgx-a100 --gpus 8 --batch 8 \
    --optimizer muon
refused 1 'expert-parallel 3 does not divide --experts 8' --model mixtral-8x7b \
    --cluster dgx-h100 --gpus 64 --batch 64 --expert-parallel 3
refused 1 'context 3 does not divide the 64 data ranks' --model mixtral-8x7b \
    --cluster dgx-h100 --gpus 64 --batch 64 --context 3 --tensor 1 --pipeline 1
refused 1 'needs --zero 1' --model mixtral-8x7b --cluster dgx-h100 --gpus 64 --batch 64 \
    --expert-parallel 8 --zero 0 --data 64
refused 1 'train_5d has the schedules gpipe, 1f1b and interleaved' --model mixtral-8x7b \
    --cluster dgx-h100 --gpus 64 --batch 64 --schedule zb-h1
refused 2 'for a mixture of experts' --model llama-3.1-8b --cluster dgx-h100 --gpus 64 \
    --batch 64 --expert-parallel 2
refused 2 'from 0 to 128' --model mixtral-8x7b --cluster dgx-h100 --gpus 64 --batch 64 \
    --capacity none
refused 1 'muon makes data ranks of all 8 GPUs' --model gpt2 --cluster dgx-a100 --gpus 8 \
    --batch 12 --optimizer muon
refused 1 'no number of GPUs' --model ptdp-39b --cluster dgx-a100 --gpus 64 --batch 64 \
    --optimizer muon
refused 1 'all 8 GPUs, and the batch of 12' --model gpt2 --cluster dgx-a100 --gpus 8 --batch 12 \
    --shard 3
refused 1 'does not fit\|nothing fits' --model gpt3-175b --cluster dgx-a100 --gpus 32 --batch 32 \
    --shard 3
refused 2 'needs --pipeline' --model gpt2 --cluster dgx-a100 --gpus 8 --batch 8 \
    --layers-per-stage 6,6
refused 2 'sum to the 12' --model gpt2 --cluster dgx-a100 --gpus 8 --batch 8 --pipeline 2 \
    --layers-per-stage 6,5
refused 2 'value is missing' --model gpt2 --cluster dgx-a100 --gpus
refused 1 'no layout' --model gpt2 --cluster dgx-a100 --gpus 7 --batch 8 --tensor 7
refused 1 't = 7, p = 1, d = 1 .* no divisor of 1024' --model gpt3-175b --cluster dgx-a100 \
    --gpus 1024 --batch 1536 --tensor 7
refused 1 '1020 and 1024 GPUs are' --model gpt3-175b --cluster dgx-a100 --gpus 1021 --batch 1536
began=$SECONDS
refused 1 '48 GPUs would do, and no fewer' --model gpt3-175b --cluster dgx-a100 --gpus 8 --batch 64
refused 1 'another layout of these GPUs would do' --model gpt3-175b --cluster dgx-a100 --gpus 1021 \
    --batch 1021 --shard 0
refused 1 '48 GPUs would do, and no fewer' --model gpt3-175b --cluster dgx-a100 --gpus 47 --batch 64
[ $((SECONDS - began)) -le 10 ]
report $? "which takes less than 10 s: $((SECONDS - began))"
plan --model gpt3-175b --cluster dgx-a100 --gpus 48 --batch 64 --json >"$dir/out"
report $? 'and on 48 it fits'
[[ $(best dgx-a100 --model gpt3-175b --gpus 1021 --batch 1021) == '--shard 3 --data 1021 '* ]]
report $? 'on 1021, which no t and p divide, FSDP does'
# Few tokens a micro-batch, so gathers across nodes are exposed in each of four.
short='--layers 32 --heads 32 --channels 4096 --vocab 50257 --seq 512 --micro-batch 1'
[[ $(best dgx-a100 $short --gpus 64 --batch 256 --shard 3 --recompute layer) == *' --replicas '* ]]
report $? 'FSDP whose gathers cross nodes and do not hide is sharded within nodes instead'
refused 1 'recomputation would do' --model gpt2-xl --cluster dgx-a100 --gpus 1 --batch 64 \
    --recompute none --micro-batch 32
finish
