#!/usr/bin/env bash
# tables.sh check|write [BUILD] [NAME...]: the tables and outputs of README.md, doc/, dev/scale and
# dev/results that come from commands. A table stands between the lines `<!-- table NAME -->` and
# `<!-- end -->`. The function table_NAME below prints it. `check` compares the page with the
# command's output, `write` puts the output there. BUILD (build/cpu-fp32) holds the trainers, the
# folder next to it the bf16 ones. Without names: all tables that take seconds. `all`: also the slow
# tables of `make doc`.
set -u
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.." || exit 1

quick=(tensor_bytes tensor_memory tensor_ratio schedule_memory pipeline_bytes data_bytes
       lesson_data_bytes lesson_data_memory lesson_data_clock
       lesson_fsdp_bytes lesson_fsdp_memory lesson_fsdp_clock
       lesson_moe_bytes lesson_moe_clock lesson_context_recompute lesson_context_longest
       lesson_offload_longest
       schedules schedules_norm refused bubbles study plan
       scale scale_bands scale_claims scale_moe holmes holmes_plan cuda_lines
       files pipeline_unrolled layouts_agree zero_memory tensor_calls tensor_reach schedules_drawn
       context_agrees context_balance llama_grid zb_steps v_steps offload_share offload_deep
       documents_agree documents_clock five_agrees five_memory
       five_plan puzzles cases)
slow=(layouts main errors no_wait one_stream zero no_add swapped_sums expert_balance post_ln
      parallel_block bubbles_paper plan_table1 plan_clock plan_fsdp scale_trainers cpu_speed
      v_models)

mode=${1:-check} build=${2:-build/cpu-fp32}
shift $(($# < 2 ? $# : 2))
names=("$@")
[ ${#names[@]} -eq 0 ] && names=("${quick[@]}")
[ "${names[0]}" = all ] && names=("${quick[@]}" "${slow[@]}")

. dev/launch.sh
# Starting is most of the time here
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-SSE41}
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT

# ranks N PRECISION TRAINER FLAGS: runs it; its output goes to $dir/out and $dir/err.
ranks() {
    local how=
    [ "$1" = 1 ] || how="$launch -n $1"
    # shellcheck disable=SC2086
    $how "${build/fp32/$2}/$3" $4 >"$dir/out" 2>"$dir/err" </dev/null || {
        echo "failed: $3 $4" >&2
        head -n 5 "$dir/err" >&2
        return 1
    }
}

# dry N TRAINER FLAGS: MiB of weights, gradients, optimizer and activations of rank 0, by the plan
# of a run.
dry() {
    ranks "$1" fp32 "$2" "--dry-run $3" || return 1
    awk '$3 == "MiB" && NF == 3 { mib[$1] = $2 }
         END { print mib["weights"], mib["gradients"], mib["optimizer"], mib["activations"] }' \
        "$dir/out"
}

# traffic COMMUNICATOR OPERATION: calls and bytes that all ranks together sent in the last run.
traffic() {
    awk -v comm="$1" -v op="$2:" '
        $1 == "traffic:" && $2 == comm && $7 == op { calls += $8; bytes += $10 }
        END { printf "%d %d\n", calls, bytes }' "$dir/err"
}

# 1234567 -> 1,234,567
comma() { sed -E ':a; s/^([0-9]+)([0-9]{3})/\1,\2/; ta' <<<"$1"; }

golden_data="--train-data dev/test/golden/train.bin"
golden="--init dev/test/golden $golden_data --global-batch 8 --steps 1 --val-every 0"
narrow="--heads 2 --channels 64 --vocab 128 --seq 32 --micro-batch 1 $golden_data"
large="--heads 16 --channels 1024 --vocab 50257 --seq 512"
dgx="--simulate dev/clusters/dgx-a100.json"
export NCCL_TRAFFIC=1

# ---- the tables ----------------------------------------------------------------------------------

# The puzzles and the detective cases, by the first lines of their pages.
list_pages() { # list_pages WORD FILE...
    local word=$1 text number title minutes lesson
    shift
    for text in "$@"; do
        read -r number title < <(sed -n "1s/^# $word \([0-9]*\)\. /\1 /p" "$text")
        minutes=$(sed -n '3s/^\([0-9]*\) minutes.*/\1/p' "$text")
        lesson=$(sed -n '3{ s/^[0-9]* minutes\. After //; s/)\..*/)/
            s|(\.\./\.\./\.\./doc/course/|(|g; p }' "$text")
        echo "| $number | $title | $lesson | $minutes |"
    done
}

table_puzzles() {
    echo '| N | puzzle | after | minutes |'
    echo '|--:|---|---|--:|'
    list_pages Puzzle dev/puzzles/[0-9]*/text.md
}

table_cases() {
    echo '| N | case | after | minutes |'
    echo '|--:|---|---|--:|'
    list_pages Case dev/puzzles/d[0-9]*/text.md
}

# L = 4, C = 32, m = 4 micro-batches of N = 48 tokens, fp32.
table_tensor_bytes() {
    local N=48 C=32 L=4 m=4 calls bytes
    ranks 2 fp32 train_gpt_tp "$golden --micro-batch 2 --tensor 2" || return 1
    read -r calls bytes < <(traffic tensor ncclAllReduce)
    local layers=$((4 * N * C * 4 * L * m)) ends=$((2 * N * C * 4 * m)) loss=$((3 * N * 4 * m))
    echo '| t = 2 | all-reduces a step | bytes a rank sends |'
    echo '|---|---|---|'
    row() { echo "| $1 | $2 | $(comma "$3") |"; }
    row 'layers: 4 a layer and micro-batch, 8 N C (t-1)/t elements together' $((4 * L * m)) $layers
    row 'embedding (g) and head (f): 4 N C (t-1)/t elements a micro-batch' $((2 * m)) $ends
    row 'loss: maximum, then sum and target: 6 N (t-1)/t numbers a micro-batch' $((2 * m)) $loss
    row 'together, by formula' $((4 * L * m + 4 * m)) $((layers + ends + loss))
    row 'together, measured' $((calls / 2)) $((bytes / 2))
}

table_tensor_memory() {
    local t sp all half flags row
    echo '| t | weights | gradients | optimizer | activations of a layer' \
        '| with sequence parallelism |'
    echo '|---|---|---|---|---|---|'
    for t in 1 2 4 8; do
        row=
        for sp in 0 1; do
            flags="--tensor $t --sequence-parallel $sp $large --micro-batch 4"
            all=$(dry $t train_gpt_tp "$flags --layers 8") || return 1
            half=$(dry $t train_gpt_tp "$flags --layers 4") || return 1
            row="$row $(awk '{ printf "%.1f", ($4 - $8) / 4 }' <<<"$all $half") |"
        done
        awk -v t=$t -v row="$row" '{ printf "| %d | %s | %s | %s |%s\n", t, $1, $2, $3, row }' \
            <<<"$all"
    done
}

# Forward of a layer: 24 N C^2 / t FLOPs of GEMMs, and two all-reduces that send 4 (t-1)/t N C
# elements of 2 bytes. A100: 312 TFLOP/s in bf16, NVLink 300 GB/s each way, a 200 Gb/s adapter for
# each GPU. Percent: 100 x 312e12 = 31.2e15.
table_tensor_ratio() {
    echo '| C | t | FLOPs a byte sent | inside a node, 300 GB/s | across nodes, 25 GB/s |'
    echo '|---|---|---|---|---|'
    awk 'BEGIN {
        split("1600 4096 12288", widths); split("2 4 8", sizes)
        for (i = 1; i <= 3; i++) for (j = 1; j <= 3; j++) {
            C = widths[i]; t = sizes[j]
            ratio = 24 * C ^ 2 / t / (2 * 4 * (t - 1) / t * C)
            near = 31.2e15 / 300e9 / ratio; far = 31.2e15 / 25e9 / ratio
            printf "| %d | %d | %.0f | %.0f%% | %.0f%% |\n", C, t, ratio, near, far
        }
    }'
}

table_schedule_memory() {
    local m row flags mib
    echo '| micro-batches | GPipe | 1F1B | interleaved, v = 2 |'
    echo '|---|---|---|---|'
    for m in 4 8 16; do
        row="| $m |"
        for flags in '--schedule gpipe' '--schedule 1f1b' '--virtual 2'; do
            flags="--pipeline 4 $flags $large --layers 8 --micro-batch 1 --global-batch $m"
            mib=$(dry 4 train_gpt_pp "$flags") || return 1
            row="$row ${mib##* } |"
        done
        echo "$row"
    done
}

# Micro-batches of N = 24 tokens, C = 32, fp32: a message is N C elements. Each of t ranks sends 1/t
# of it.
table_pipeline_bytes() {
    local t p v m=8 calls bytes messages
    echo '| t | p | v | m | messages a step: 2 m (p v - 1) | sends: t a message' \
        '| bytes a send: 4 N C / t | measured |'
    echo '|---|---|---|---|---|---|---|---|'
    while read -r t p v; do
        ranks $((t * p)) fp32 train_gpt_pp \
            "$golden --micro-batch 1 --tensor $t --pipeline $p --virtual $v" ||
            return 1
        read -r calls bytes < <(traffic pipeline ncclSend)
        messages=$((2 * m * (p * v - 1)))
        echo "| $t | $p | $v | $m | $messages | $((t * messages)) | $((24 * 32 * 4 / t)) |" \
            "$calls x $((bytes / calls)) |"
    done <<'ROWS'
1 4 1
1 2 2
2 4 1
2 2 2
ROWS
}

# Data parallelism: the bytes that a rank sends in a step of the golden model.
table_data_bytes() {
    local precision zero scatter gather what
    echo '| d = 4 | `--zero` | reduce-scatter of gradients | all-gather | together' \
        '| bytes a parameter, over (d-1)/d |'
    echo '|---|---|---|---|---|---|'
    for precision in fp32 bf16; do
        for zero in 0 1; do
            ranks 4 $precision train_gpt_3d "$golden --micro-batch 1 --data 4 --zero $zero" ||
                return 1
            read -r _ scatter < <(traffic data ncclReduceScatter)
            read -r _ gather < <(traffic data ncclAllGather)
            what=$([ $zero = 0 ] && echo 'gradients, fp32' || echo "weights, $precision")
            echo "| $precision | $zero | $(comma $((scatter / 4)))" \
                "| $(comma $((gather / 4))): $what" \
                "| $(comma $(((scatter + gather) / 4)))" \
                "| $((4 * (scatter + gather) / scatter)) |"
        done
    done
}

# Bytes that a rank of train_data sends in a step, over the parameters; neither vocabulary nor
# buckets are padded much.
table_lesson_data_bytes() {
    local d zero scatter gather P after
    echo '| d | `--zero` | reduce-scatter | all-gather | together | formula |'
    echo '|---|---|---|---|---|---|'
    for d in 2 4 8; do
        for zero in 0 1; do
            ranks "$d" bf16 train_data \
                "--layers 2 $narrow --global-batch 8 --steps 1 --zero $zero" || return 1
            read -r _ scatter < <(traffic data ncclReduceScatter)
            read -r _ gather < <(traffic data ncclAllGather)
            P=$(awk '$1 == "model" { print $(NF - 1) }' "$dir/out") after=$((zero ? 2 : 4))
            awk -v d="$d" -v zero="$zero" -v P="$((P * d))" -v s="$scatter" -v g="$gather" \
                -v after=$after 'BEGIN {
                printf "| %d | %d | %.2f | %.2f | %.2f ", d, zero, s / P, g / P, (s + g) / P
                printf "| (4 + %d)(d-1)/d = %.2f |\n", after, (4 + after) * (d - 1) / d }'
        done
    done
}

# Bytes a parameter that a rank of train_data holds.
table_lesson_data_memory() {
    local d zero
    echo '| d | `--zero` | weights | gradients | optimizer | together | formula |'
    echo '|---|---|---|---|---|---|---|'
    for d in 2 8; do
        for zero in 0 1; do
            ranks "$d" bf16 train_data \
                "--dry-run $large --layers 8 --micro-batch 1 --global-batch 8 --zero $zero" ||
                return 1
            awk -v d="$d" -v zero="$zero" '$1 == "model" { P = $(NF - 1) / 1048576 }
                $3 == "MiB" && NF == 3 { mib[$1] = $2 / P }
                END { w = mib["weights"]; g = mib["gradients"]; o = mib["optimizer"]
                      printf "| %d | %d | %.2f | %.2f | %.2f ", d, zero, w, g, o
                      printf "| %.2f | 6 + 12%s = %.2f |\n", w + g + o, zero ? "/d" : "",
                          6 + 12 / (zero ? d : 1) }' "$dir/out"
        done
    done
}

# Elements that a rank of train_moe sends in the exchanges of a layer, for each of its tokens: C =
# 64, capacity 1.
table_lesson_moe_bytes() {
    local row e k sent
    echo '| e | k | sent | 4 k C (e-1)/e | t = e tensor ranks: 4 t C (t-1)/t |'
    echo '|---|---|---|---|---|'
    for row in '2 1' '4 2' '8 2' '8 8'; do
        read -r e k <<<"$row"
        ranks "$e" fp32 train_moe "--layers 2 $narrow --steps 1 --capacity 1 --top-k $k
            --expert-parallel $e" || return 1
        read -r _ sent < <(traffic experts ncclSend)
        awk -v e="$e" -v k="$k" -v s="$sent" 'BEGIN {
            printf "| %d | %d | %.0f | %.0f | %.0f |\n", e, k, s / (4 * 2 * 32 * e),
                4 * k * 64 * (e - 1) / e, 4 * e * 64 * (e - 1) / e }'
    done
}

# Milliseconds of the second step on 8 simulated GPUs, and how many of them a GPU talks to the
# others about layers.
table_lesson_moe_clock() {
    local k
    of_step() {  # of_step NAME COLUMN: the share of the time is in that column of rank 0's row
        awk -v name="$1" -v column="$2" '/^step .* TFLOP/ { ms = 1000 * $2 }
            $1 == "0" && NF == 12 {
                printf "| %s | %.1f | %.1f |\n", name, ms, ms * $column / 100 }' "$dir/out"
    }
    echo '| | step, ms | of it between ranks of a layer |'
    echo '|---|---|---|'
    for k in 1 2 4 8; do
        ranks 1 bf16 train_moe "$dgx --ranks 8 --model d24 --seq 1024 --micro-batch 4
            --capacity 1 --expert-parallel 8 --top-k $k" || return 1
        of_step "8 experts on e = 8, k = $k" 7
    done
    ranks 1 bf16 train_gpt_tp "$dgx --ranks 8 --tensor 8 --model d24 --seq 1024
        --micro-batch 32" || return 1
    of_step 'one MLP on t = 8' 6
}

# Milliseconds of the second step of train_data, simulated.
table_lesson_data_clock() {
    local flags row d m
    echo '| | d = 8, m = 1 | d = 8, m = 4 | d = 64, m = 1 | d = 64, m = 4 |'
    echo '|---|---|---|---|---|'
    for flags in '--zero 1 --overlap 1' '--zero 1 --overlap 0' '--zero 0 --overlap 1' \
        '--zero 0 --overlap 0'; do
        row="| \`$flags\` |"
        for d in 8 64; do
            for m in 1 4; do
                ranks 1 bf16 train_data "$dgx --ranks $d --model d24 --seq 1024
                    --micro-batch 4 --global-batch $((4 * m * d)) $flags" || return 1
                row="$row $(awk '/^step [0-9.]* s / { printf "%.1f", 1000 * $2 }' "$dir/out") |"
            done
        done
        echo "$row"
    done
}

# Bytes that a rank of train_fsdp sends in its second step, over the parameters: 8 layers, and
# embeddings of 2.5%.
table_lesson_fsdp_bytes() {
    local d m shard scatter gather first_scatter first_gather P
    echo '| d | m | `--shard` | reduce-scatter | all-gather | together' \
        '| all layers gathered | 2 stay |'
    echo '|---|---|---|---|---|---|---|---|'
    for d in 2 4; do
        for m in 1 4; do
            for shard in 2 3; do
                for steps in 1 2; do
                    first_scatter=${scatter:-0} first_gather=${gather:-0}
                    ranks "$d" bf16 train_fsdp "--layers 8 $narrow --steps $steps
                        --global-batch $((d * m)) --shard $shard" || return 1
                    read -r _ scatter < <(traffic data ncclReduceScatter)
                    read -r _ gather < <(traffic data ncclAllGather)
                done
                P=$(awk '$1 == "model" { print $(NF - 1) }' "$dir/out")
                awk -v d="$d" -v m="$m" -v shard="$shard" -v P="$((P * d))" -v \
                    s="$((scatter - first_scatter))" \
                    -v g="$((gather - first_gather))" 'BEGIN {
                    L = 8; part = (d - 1) / d
                    printf "| %d | %d | %d | %.2f | %.2f ", d, m, shard, s / P, g / P
                    printf "| %.2f | %.2f | %.2f |\n",
                        (s + g) / P, (4 * m + (shard == 2 ? 2 : 4 * m)) * part,
                        (4 * m + 2 * (shard == 2 ? 1 : (2 * m * (L - 2) + 2) / L)) * part }'
            done
        done
    done
}

# Bytes a parameter that a rank of train_fsdp holds, GPT-2 medium. Windows: embeddings, ln_f and two
# layers, or all.
table_lesson_fsdp_memory() {
    local d shard
    echo '| d | `--shard` | weights | gradients | optimizer | together | 18/d + windows |'
    echo '|---|---|---|---|---|---|---|'
    for d in 2 8; do
        for shard in 2 3; do
            ranks "$d" bf16 train_fsdp "--dry-run --model d24 --seq 1024 --micro-batch 1
                --global-batch 8 --shard $shard" || return 1
            awk -v d="$d" -v shard="$shard" '$1 == "model" { P = $(NF - 1) / 1048576 }
                $3 == "MiB" && NF == 3 { mib[$1] = $2 / P }
                END { w = mib["weights"]; g = mib["gradients"]; o = mib["optimizer"]; C = 1024
                      gathered = (50304 + 1024) * C + 2 * C + 2 * (12 * C * C + 13 * C)
                      part = gathered / (P * 1048576)
                      windows = shard == 2 ? 2 + 4 * part : 6 * part
                      printf "| %d | %d | %.2f | %.2f | %.2f ", d, shard, w, g, o
                      printf "| %.2f | %.2f + %.2f = %.2f |\n", w + g + o, 18 / d, windows,
                          18 / d + windows }' "$dir/out"
        done
    done
}

# Tokens a second and GPU of train_fsdp, simulated.
table_lesson_fsdp_clock() {
    local model gpus seq micro flags row layers
    echo '| model | GPUs | tokens a GPU | `--shard 3` | `--shard 3 --overlap 0` | `--shard 2`' \
        '| GiB, `--shard 3` |'
    echo '|---|---|---|---|---|---|---|'
    while read -r model gpus seq micro; do
        layers='--layers 32 --heads 32 --channels 4096'
        [ "$model" = 7B ] || layers='--layers 80 --heads 64 --channels 8192'
        row="| $model | $gpus | $((seq * micro)) |"
        for flags in '--shard 3' '--overlap 0' '--shard 2'; do
            ranks 1 bf16 train_fsdp "$dgx --ranks $gpus $layers --vocab 50368 --seq $seq
                --micro-batch $micro --recompute layer $flags" 2>/dev/null || {
                grep -q 'does not fit' "$dir/err" && row="$row does not fit |" && continue
                return 1
            }
            [ "$flags" != '--shard 3' ] ||
                gib=$(awk '/^ *0 / { gib = $NF } END { print gib }' "$dir/out")
            row="$row $(awk -v n="$gpus" '/^step [0-9.]* s/ { printf "%.0f", $5 / n }' \
                "$dir/out") |"
        done
        echo "$row $gib |"
    done <<'ROWS'
7B 8 2048 18
7B 128 2048 18
7B 128 2048 1
7B 128 512 1
70B 64 2048 2
70B 128 2048 4
ROWS
}

# long_run TRAINER HEADS FLAGS: a step of 4096 channels, or 33 heads of 128, on 8 GPUs, a sequence a
# micro-batch; false if it does not fit.
long_run() {
    ranks 1 bf16 "$1" "$dgx --ranks 8 --heads $2 --channels $((128 * $2)) --vocab 50304
        --micro-batch 1 --steps 1 $3" 2>/dev/null
}

# Compares --recompute rest with layer: seconds of a step and GiB, beside the ratio for the same
# change in DistFlashAttn's Table 5.
table_lesson_context_recompute() {
    local seq published how seconds='' gib=''
    echo '| tokens | on a GPU | `layer`, s | GiB | `rest`, s | GiB | `layer` / `rest` | LightSeq |'
    echo '|---|---|---|---|---|---|---|---|'
    while read -r seq published; do
        for how in layer rest; do
            long_run train_context 32 \
                "--layers 16 --seq $seq --context 8 --context-by ring --recompute $how" || return 1
            seconds="$seconds $(awk '/^step [0-9.]* s/ { print $2 }' "$dir/out")"
            gib="$gib $(awk '$1 == 0 { gib = $NF } END { print gib }' "$dir/out")"
        done
        awk -v tokens="$((seq / 1024))K" -v n="$((seq / 8192))K" -v s="$seconds" -v g="$gib" \
            -v published="$published" '
            BEGIN { split(s, t, " "); split(g, m, " ")
                    printf "| %s | %s | %.2f | %s ", tokens, n, t[1], m[1]
                    printf "| %.2f | %s | %.2f | %s |\n", t[2], m[2], t[1] / t[2], published }'
        seconds='' gib=''
    done <<'ROWS'
32768 1.06
65536 1.16
131072 1.24
262144 1.31
ROWS
}

# The longest sequence, in units of 4096 tokens, whose step fits, and its tokens a second.
table_lesson_context_longest() {
    local heads trainer flags how least most middle base=
    echo '| heads | a sequence is on | flags | longest, K tokens | times | tokens/s |'
    echo '|---|---|---|---|---|---|'
    while IFS='|' read -r heads how trainer flags; do
        least=0 most=1024
        while [ $((most - least)) -gt 1 ]; do
            middle=$(((least + most) / 2))
            if long_run "$trainer" "$heads" "--layers 32 --seq $((4096 * middle)) $flags"; then \
                least=$middle; else
                grep -q 'does not fit' "$dir/err" || return 1
                most=$middle
            fi
        done
        long_run "$trainer" "$heads" "--layers 32 --seq $((4096 * least)) $flags" || return 1
        [ "$how" != 'one GPU' ] || base=$least
        awk -v heads="$heads" -v how="$how" -v flags="$flags" -v least=$least -v base="$base" '
            /^step [0-9.]* s/ {
                printf "| %s | %s | `%s` | %d ", heads, how, flags, 4 * least
                printf "| %.1f | %.0f |\n", least / base, $5 }' "$dir/out"
    done <<'ROWS'
32|one GPU|train_context|--recompute layer
32|8 tensor ranks|train_gpt_3d|--tensor 8 --sequence-parallel 1 --recompute layer
32|8 context ranks|train_context|--context 8 --context-by ulysses --recompute layer
32|8 context ranks|train_context|--context 8 --context-by ring --recompute layer
32|8 context ranks|train_context|--context 8 --context-by ring --recompute rest
33|one GPU|train_context|--recompute layer
33|8 context ranks|train_context|--context 8 --context-by ring --recompute layer
ROWS
}

# The largest sizes that fit an A100 of 80 GB with 8 of a 7B model's 32 layers. These are the
# longest sequence in units of 1024 tokens, and the most sequences of 4096. Then a step of each.
table_lesson_offload_longest() {
    local trainer flags sizes least most middle row
    local head='s a step | MFU % | share | host, GiB'
    echo "| \`train_\` | longest, K tokens | $head | most of 4096 | $head |"
    echo '|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|'
    while IFS='|' read -r trainer flags; do
        row="| \`$trainer $flags\` |"
        for sizes in '--micro-batch 1 --seq 1024' '--seq 4096 --micro-batch 1'; do
            least=0 most=160
            while [ $((most - least)) -gt 1 ]; do
                middle=$(((least + most) / 2))
                if seven_wide; then least=$middle; else
                    grep -q 'does not fit' "$dir/err" || return 1
                    most=$middle
                fi
            done
            middle=$least
            seven_wide || return 1
            row+=$(awk -v least="$least" -v share="${flags##* }" '
                /^pinned host/ { mib = $3 }
                /^offload / { share = $2; mib = $(NF - 2) }
                /^step [0-9]+\// { ms = $4; mfu = $(NF - 3); sub("%", "", mfu) }
                END { if (mib == "") share = ""
                      host = mib == "" ? "" : sprintf("%.1f ", mib / 1024)
                      printf " %d | %.2f | %.1f | %s | %s|", least, ms / 1000, mfu, share, host
                }' "$dir/out")
        done
        echo "$row"
    done <<'ROWS'
gpt|--recompute none
gpt|--recompute layer
offload|--offload 0
offload|--offload auto
offload|--offload 1
ROWS
}

# Simulates a step of these layers, with the last of the sizes times `middle`.
seven_wide() {
    ranks 1 bf16 "train_$trainer" "--simulate dev/clusters/dgx-a100.json --ranks 1 --layers 8
        --heads 32 --channels 4096 --vocab 50257 --steps 1 ${sizes% *} $((${sizes##* } * middle))
        $flags" 2>/dev/null
}

# The lists of every schedule in virtual time, with F = B = W.
table_schedules() { build/tools/schedule --table; }

# With other times the stage that takes longest, alone, under zb-auto with 2p micro-batches, beside
# ZB-H2's formula.
table_schedules_norm() {
    build/tools/schedule --table --forward 1.11 --backward 1.28 >"$dir/out" || return 1
    echo '| p | m | zb-auto, 2p | ZB-H2 formula |'
    echo '|---|---|---|---|'
    awk -F' *[|] *' '
        /^The stage that takes longest/ { on = 1 }
        on && $2 ~ /^[0-9]+$/ && $3 >= 2 * $2 {
        formula = 100 * ($2 - 1) * (1.11 + 1.28 - 2) / ($3 * (1.11 + 1.28 + 1))
        printf "| %d | %d | %s | %.2f |\n", $2, $3, $(NF - 1), formula
    }' "$dir/out"
}

# One list for each kind of mistake, and why it is refused.
table_refused() {
    local list
    while read -r list; do
        echo "$list"
        build/tools/schedule "$list" 2>&1 | fold -s -w 112 | sed 's/^/    /; s/ *$//'
    done <<'LISTS' | fenced
F0 F1 X0
F0 F1 B0
F0 F1 F0 B0
B0 F0
F0 W0 B0
F0 F1 B1 B0
F0 F1 B0 B1 W1 W0
F0 F1 B0 B1; F1 F0 B0 B1
F0 B0 F1 B1; F0 F1 B0 B1
F0.0 B0.0 F0.1 B0.1
LISTS
}

# Every schedule on the trainer's own clock, beside the formulas; and the models of Zero Bubble,
# beside its Table 5.
bubbles() { build/tools/bubbles "$1" "${build/fp32/bf16}" dev/clusters/dgx-a100.json; }
table_bubbles() { bubbles formulas; }
table_bubbles_paper() { bubbles paper; }

# ---- what only `make doc` makes ------------------------------------------------------------------

# GPT-2 medium in bf16 on 8 ranks: GiB on the fullest rank.
table_layouts() {
    local t d p flags
    echo '| t x d x p | flags | weights | gradients | optimizer | activations | together |'
    echo '|---|---|---|---|---|---|---|'
    while read -r t d p flags; do
        ranks 8 bf16 train_gpt_3d "--dry-run --model d24 --seq 1024 --global-batch 64
            --micro-batch 4 --tensor $t --data $d --pipeline $p $flags" || return 1
        awk -v name="$t x $d x $p | $flags" '/^MiB per rank/ { on = 1; next } on && NF == 5 {
                sum = $2 + $3 + $4 + $5
                if (sum > most) { most = sum; for (i = 2; i <= 5; i++) gib[i] = $i / 1024 }
            }
            END {
                printf "| %s | %.1f | %.1f | %.1f | %.1f |", name, gib[2], gib[3], gib[4], gib[5]
                printf " %.1f |\n", most / 1024
            }' "$dir/out"
    done <<'ROWS'
1 8 1
1 8 1 --recompute gelu
1 8 1 --recompute layer
1 8 1 --zero 0
2 4 1 --sequence-parallel 1
8 1 1
8 1 1 --sequence-parallel 1
1 2 4
1 1 8
2 2 2 --sequence-parallel 1
ROWS
}

fenced() { printf '```\n%s\n```\n' "$(cat)"; }

# The run of `make train`, as it printed it.
table_main() {
    awk '/^step +2\/500/ { print "..." } /^step +[0-9]+\/500/ && !/^step +(0|1|500)\/500/ { next }
         /^(device|model|batch|[0-9]+ ranks|stage|    [0-9 ]*[0-9]$|step)/ &&
             !/MiB/' build/out/console.txt | fenced
}

# Worst gradient tensor of some layouts against the reference, from the log of test_gpt.
table_errors() {
    local log=build/test-logs/test_gpt_fp32.log bound layout
    [ -f $log ] || { mkdir -p build/test-logs && "$build/test_gpt" "$build" layouts >$log; }
    bound=$(sed -n 's/.*With 4 layers \([^,]*\),.*/\1/p' $log | head -n 1)
    echo '| t x d x p of micro-batches of 1 | worst tensor | error | one rank, same tensor' \
        '| bound |'
    echo '|---|---|---|---|---|'
    while read -r layout; do
        awk -v layout="$layout" -v bound="$bound" '/^ok / {
            name = substr($0, 10, 58); sub(/ +$/, "", name); sub(/^[a-z0-9]+ +/, "", name)
            if (name != layout || seen++) next
            split(substr($0, 69), x, " "); sub(/ of 1/, "", name)
            printf "| %s | %s | %s | %s | %s |\n", name, x[3], x[1], x[2], bound
        }' $log
    done <<'ROWS'
1x1x1 of 1
2x1x1 of 1
4x1x1 of 1
2x1x1 of 1 --sequence-parallel 1
4x1x1 of 1 --sequence-parallel 1
1x1x4 of 1
1x4x1 of 1
2x2x2 of 1
2x2x2 of 1 --sequence-parallel 1 --virtual 2
ROWS
}

# PTD-P's figures, and the cost of growing.
table_cuda_lines() { dev/cuda_lines.sh; }
table_study() { build/tools/study --table dev/scale/rows_a100.csv; }

# groups TITLE COLUMNS: prints the table of a tool's output that begins with TITLE. Its rows end in
# COLUMNS columns.
groups() {
    sed -n "/^$1/,/^\$/p" |
        awk -v title="$1" -v columns="$2" '
            function row(first) {
                line = "| " first
                for (i = NF - columns + 1; i <= NF; i++) line = line " | " $i
                print line " |"
            }
            index($0, title) == 1 {
                sub(/held out/, "held-out")
                sub(/at most/, "at-most")
                row(title)
                line = "|"
                for (i = 0; i <= columns; i++) line = line "---|"
                print line
                next
            }
            NF > columns {
                name = $0
                for (i = 0; i < columns; i++) sub(/ +[^ ]+$/, "", name)
                row(name)
            }'
}
table_scale() { make -s scale 2>/dev/null | groups 'mean absolute error, %' 8; }
table_scale_bands() { make -s scale 2>/dev/null | groups 'published over predicted, %' 4; }
# Tokens a second and GPU of the runs about which predictions were made: published, and predicted
# for two networks.
table_scale_claims() {
    local clusters='dev/clusters/foundry-a100-40.json:claim-a100-40
        dev/clusters/foundry-a100-80.json:claim-a100-80'
    # shellcheck disable=SC2086
    build/tools/scale --csv "$dir/all" dev/scale/rows_claims.csv $clusters >/dev/null 2>&1 &&
        build/tools/scale --set nic_collective_bandwidth=3.125e9 --csv "$dir/one" \
            dev/scale/rows_claims.csv $clusters \
            >/dev/null 2>&1 || return 1
    echo '| model | device | GPUs | tokens a GPU | published | predicted' \
        '| predicted, 25 GB/s a node |'
    echo '|---|---|---|---|---|---|---|'
    awk -F, 'FNR == 1 { file++; next }
        file == 1 { rate[$1] = $8 * $6 / $3; tokens[$1] = $6 * $9 }
        file == 1 { model[$1] = $18; device[$1] = $17; gpus[$1] = $3 }
        file > 1 { gsub(/"/, "", $1); step[file, $1] = $4 }
        file == 2 { order[++n] = $1; published[$1] = $5 }
        END { for (i = 1; i <= n; i++) { id = order[i]
                  printf "| %s | %s | %d | %d ", model[id], device[id], gpus[id], tokens[id]
                  printf "| %.0f | %.0f | %.0f |\n", rate[id] / published[id],
                         rate[id] / step[2, id], rate[id] / step[3, id] } }' \
        dev/scale/rows_claims.csv "$dir/all" "$dir/one"
}
# Published steps of mixtures, beside the prediction that was made beforehand.
table_scale_moe() { dev/scale/moe.sh table; }
table_scale_trainers() {
    local recipe
    recipe=$(make -n scale-trainers 2>/dev/null | sed -n '/--trainers/,$p')
    [ -n "$recipe" ] || return 1
    bash -c "$recipe" >"$dir/trainers" 2>/dev/null
    groups 'trainer and light simulation, %' 4 <"$dir/trainers"
    echo
    tail -n 1 "$dir/trainers"
}

gpt3='--model gpt3-175b --cluster dgx-a100 --gpus 1024 --batch 1536'
# shellcheck disable=SC2086
table_plan() { build/tools/plan $gpt3 2>/dev/null | grep -v '^train: \|^simulate: ' | fenced; }

# Published rates on unlike nodes, and the light simulation's.
table_holmes() { dev/scale/holmes.sh; }

# The best layout on such nodes, and its neighbours that differ in the deal of layers and in the
# order.
table_holmes_plan() {
    build/tools/plan --light --model ptdp-7.5b --cluster holmes-a100 --gpus 64 --batch 768 \
        --tensor 4 --micro-batch 6 --recompute none 2>/dev/null |
        sed -n '2,4p; /^  equal stages/p; /^  half p, twice d/p; /^  order/p' | fenced
}

# The best of these layouts on the trainer's own clock.
table_plan_clock() {
    local command
    # shellcheck disable=SC2086
    command=$(build/tools/plan $gpt3 2>/dev/null | sed -n 's/^simulate: //p')
    $command 2>/dev/null | sed -n '/^virtual time on/,$p' | fenced
}

# The best layouts with FSDP and without.
table_plan_fsdp() {
    local model cluster gpus batch flags
    echo '| model | cluster | GPUs | batch | best without FSDP | step s | best with FSDP | step s' \
        '| FSDP takes |'
    echo '|---|---|---|---|---|---|---|---|---|'
    while read -r model cluster gpus batch; do
        for flags in 0 2 3; do
            build/tools/plan --model "$model" --cluster "$cluster" --gpus "$gpus" --batch "$batch" \
                --shard $flags --light --json 2>/dev/null |
                awk -F'\t' '
                    $(NF - 1) == "\"flags\":" && !f { f = $NF }
                    $(NF - 1) == "\"step_seconds\":" && !s { s = $NF }
                    END { gsub(/[",]/, "", f)
                          gsub(/--/, "", f)
                          gsub(/data [0-9]+ |shard [23] /, "", f)
                          gsub(/ schedule/, "", f)
                          gsub(/ zero [01]/, "", f)
                          gsub(/micro-batch/, "b", f)
                          gsub(/tensor/, "t", f)
                          gsub(/pipeline/, "p", f)
                          gsub(/virtual/, "v", f)
                          gsub(/ sequence-parallel 1/, ", sp", f)
                          gsub(/ recompute/, ", recompute", f)
                          gsub(/ max-in-flight [0-9]+/, "", f)
                          print s + 0 "\t" (s ? f : "none") }'
        done | awk -F'\t' -v name="$model | $cluster | $gpus | $batch" '
            { s[NR] = $1; f[NR] = (NR > 1 && $1 ? NR ": " : "") $2 }
            END { k = s[2] && (!s[3] || s[2] <= s[3]) ? 2 : 3
                  printf "| %s | %s | %.2f | %s | %s | %s |\n", name, f[1], s[1], f[k],
                         s[k] ? sprintf("%.2f", s[k]) : "-",
                         s[k] ? sprintf("%+.1f%%", 100 * (s[k] / s[1] - 1)) : "-" }'
    done <<'ROWS'
ptdp-7.5b dgx-a100 64 512
ptdp-7.5b dgx-a100 64 64
ptdp-7.5b selene-2020 64 512
ptdp-39b dgx-a100 128 1024
ptdp-39b dgx-a100 512 512
ptdp-39b roce-a100 128 1024
gpt3-175b dgx-a100 1024 1024
gpt3-175b dgx-a100 1024 4096
gpt3-175b dgx-a100 1024 512
ROWS
}

# Published layouts under every schedule, on the trainers' clock: seconds of a step, and GiB of the
# largest stage.
table_v_models() {
    local name gpus t p v batch b sizes schedule flags trainer
    local schedules='1f1b interleaved zb-h1 zb-v v-half dualpipe-v'
    echo "| model | t, d, p | m | ${schedules// / | } |"
    echo '|---|---|--:|---|---|---|---|---|---|'
    while read -r name gpus t p v batch b sizes; do
        printf '| %s | %s, %s, %s | %s |' "$name" "$t" $((gpus / t / p)) "$p" \
            $((batch * t * p / gpus / b))
        for schedule in $schedules; do
            trainer=train_gpt_3d flags="--schedule $schedule"
            case $schedule in
                interleaved) flags="--virtual $v" ;;
                zb-h1) trainer=train_zero_bubble ;;
                *v*) trainer=train_v ;;
            esac
            # shellcheck disable=SC2086
            "${build/fp32/bf16}/$trainer" $dgx --ranks "$gpus" --steps 2 $sizes --tensor "$t" \
                --pipeline "$p" --data $((gpus / t / p)) --global-batch "$batch" \
                --micro-batch "$b" --sequence-parallel $((t > 1)) --recompute gelu $flags \
                2>/dev/null |
                awk '$1 ~ /^[0-9]+$/ && NF == 12 && $12 > most { most = $12 }
                     /^step [0-9.]+ s / { step = $2 }
                     END { printf " %.2f (%.0f) |", step, most }'
        done
        echo
    done <<'ROWS'
6.2B 8 1 8 4 72 3 --layers 32 --heads 32 --channels 4096 --vocab 32000 --seq 1024
145B 1536 8 8 2 2304 2 --model ptdp-145b
175B 64 8 8 3 64 1 --model gpt3-175b
310B 1920 8 16 2 2160 1 --model ptdp-310b
530B 280 8 35 3 280 1 --model ptdp-530b
ROWS
}

# The published layouts of PTD-P's Table 1, and the planner's best ones with the features of
# Megatron in 2021.
table_plan_table1() {
    local model gpus batch t p v b schedule
    local plan='build/tools/plan --cluster selene-2021 --recompute layer --sequence-parallel 0
        --zero 0 --no-v --light --json'
    echo '| model | GPUs | published t, p, v, b | step s | best t, p, v, b | step s' \
        '| published takes |'
    echo '|---|---|---|---|---|---|---|'
    while read -r model gpus batch t p v b; do
        schedule=1f1b
        [ "$v" -gt 1 ] && schedule=interleaved
        $plan --model "$model" --gpus "$gpus" --batch "$batch" 2>/dev/null >"$dir/best"
        $plan --model "$model" --gpus "$gpus" --batch "$batch" --tensor "$t" --pipeline "$p" \
            --virtual "$v" --micro-batch "$b" --schedule $schedule --order tdp 2>/dev/null \
            >"$dir/published"
        awk -F'\t' -v name="$model" -v gpus="$gpus" -v layout="$t, $p, $v, $b" '
            FNR == 1 { file++; seen = 0 }
            { key = $(NF - 1); value = $NF; sub(/,$/, "", value) }
            key == "\"tensor\":" && !seen { t[file] = value }
            key == "\"pipeline\":" && !seen { p[file] = value }
            key == "\"virtual\":" && !seen { v[file] = value }
            key == "\"micro_batch\":" && !seen { b[file] = value }
            key == "\"step_seconds\":" && !seen { s[file] = value; seen = 1 }
            END { printf "| %s | %d | %s | %.2f ", name, gpus, layout, s[2]
                  printf "| %d, %d, %d, %d | %.2f ", t[1], p[1], v[1], b[1], s[1]
                  printf "| %+.1f%% |\n", 100 * (s[2] / s[1] - 1) }' "$dir/best" "$dir/published"
    done <<'ROWS'
ptdp-1.7b 32 512 1 1 1 16
ptdp-3.6b 64 512 2 1 1 16
ptdp-7.5b 128 512 4 1 1 16
ptdp-18b 256 1024 8 1 1 8
ptdp-39b 512 1536 8 2 1 4
ptdp-76b 1024 1792 8 4 3 2
ptdp-145b 1536 2304 8 8 2 2
ptdp-310b 1920 2160 8 16 2 1
ptdp-530b 2520 2520 8 35 3 1
ptdp-1t 3072 3072 8 64 1 1
ROWS
}

# A step's time on this CPU, beside its products and PyTorch. With the instructions that this CPU
# has.
table_cpu_speed() {
    env -u ONEDNN_MAX_CPU_ISA PEER="${PEER:-python3}" dev/cpu_speed.py "$build"
}

# Of dev/test/run_experiments.sh, which leaves them there.
table_no_add() { fenced <build/experiments/no_add.out; }
table_no_wait() { fenced <build/experiments/no_wait.out; }
table_swapped_sums() { fenced <build/experiments/swapped_sums.out; }
table_one_stream() { fenced <build/experiments/one_stream.out; }
table_zero() { fenced <build/experiments/zero.out; }
table_post_ln() { fenced <build/experiments/post_ln.out; }
table_parallel_block() { fenced <build/experiments/parallel_block.out; }

# ---- commands that the lessons' pages print ------------------------------------------------------

# The commands behind `<!-- run NAME -->` on a page.
commands() {
    awk -v begin="<!-- run $1 -->" \
        '$0 == begin { on = 1 } on && /^```$/ { exit } on && !/^(<!--|```)/' doc/*/*.md
}

# Runs the page's commands with the programs of $build. Leaves out commands that build or change a
# file.
printed() {
    mkdir -p build
    commands "$1" | grep -vE '^(make|sed -i|git checkout) ' |
        sed "s|mpirun --oversubscribe|$launch|; s|build/cpu-fp32/|$build/|
             s|build/cpu-bf16/|${build/fp32/bf16}/|" >"$dir/run.sh"
    [ -s "$dir/run.sh" ] && bash "$dir/run.sh" </dev/null >"$dir/run.out" 2>"$dir/run.err" ||
        return 1
    fenced <"$dir/run.out"
}
for name in layouts_agree zero_memory tensor_calls tensor_reach schedules_drawn \
    context_agrees context_balance expert_balance llama_grid zb_steps v_steps offload_share \
    offload_deep documents_agree documents_clock five_agrees five_memory \
    five_plan; do
    eval "table_$name() { printed $name; }"
done

# The list of stage 0 of 2, with 2 chunks and 4 micro-batches, by the code that makes it.
table_pipeline_unrolled() {
    cat >"$dir/unrolled.c" <<'END'
#include <stdio.h>
#include "llmc/pipeline_lists.h"
int main(void) {
    enum { P = 2, M = 4, V = 2, TOTAL = M * V };
    int warmup = pipeline_warmup(SCHEDULE_INTERLEAVED, P, 0, M, V);
    PipelineLists l = pipeline_empty(P, M, V);
    l.counts[0] = pipeline_steps(P, M, V, warmup, l.steps[0]);
    size_t slot[2 * TOTAL], n = 0;
    pipeline_slots(&l, 0, slot);
    char text[2][TOTAL + warmup][8];
    memset(text, 0, sizeof(text));
    for (int i = 0; i < TOTAL + warmup; i++) {
        for (int kind = 0; kind < 2; kind++) {
            int number = i - kind * warmup;
            if (number < 0 || number >= TOTAL) continue;
            const PipelineStep *s = &l.steps[0][n];
            sprintf(text[kind][i], "%d,%d,%zu", s->micro, s->chunk, slot[n++]);
        }
    }
    for (int row = 0; row < 3; row++) {
        printf("%-8s", row == 0 ? "i" : row == 1 ? "forward" : "backward");
        for (int i = 0; i < TOTAL + warmup; i++) {
            if (row == 0) printf(" %-5d", i);
            else printf(" %-5s", text[row - 1][i]);
        }
        puts("");
    }
    return 0;
}
END
    ${CC:-cc} -std=gnu11 -I. -o "$dir/unrolled" "$dir/unrolled.c" -lm &&
        "$dir/unrolled" | sed 's/ *$//' | fenced
}

# Lines and tokens (names, numbers, texts, operators outside comments) of each trainer, and the
# lines of its diff.
table_files() {
    local file parent changes
    local names='[A-Za-z_][A-Za-z0-9_]*|[0-9][A-Za-z0-9_.]*'
    local token='"(\\.|[^"\\])*"|'"'(\\\\.|[^'\\\\])*'|$names|[^[:space:]]"
    echo '| file | lines | tokens | its diff | lines of it |'
    echo '|---|--:|--:|---|--:|'
    for file in train_gpt.cu train_gpt_{tp,pp,3d}.cu \
        dev/lessons/train_{data,fsdp,context,moe,llama,zero_bubble,muon,v,offload,documents}.cu \
        dev/lessons/train_5d.cu; do
        parent=$(sed -n '2s,^// parent: ,,p' "$file")
        [[ $file == train_gpt_*.cu ]] && parent=${PARENTS[$file]}
        changes=
        if [ -n "$parent" ]; then
            diff "$parent" "$file" >"$dir/diff"
            changes="+$(grep -c '^>' "$dir/diff") -$(grep -c '^<' "$dir/diff")"
        fi
        printf '| [%s](%s) | %s | %s | %s | %s |\n' "${file##*/}" "$file" "$(wc -l <"$file")" \
            "$(comma "$(sed 's,//.*,,' "$file" | grep -oE "$token" | wc -l)")" \
            "${parent:+to ${parent##*/}}" "$changes"
    done
}
declare -A PARENTS=([train_gpt_tp.cu]=train_gpt.cu [train_gpt_pp.cu]=train_gpt_tp.cu \
    [train_gpt_3d.cu]=train_gpt_pp.cu)

# ---- comparing and writing -----------------------------------------------------------------------

passed=0 failed=0
for name in "${names[@]}"; do
    page=$(grep -l "^<!-- table $name -->$" README.md doc/*/*.md dev/scale/README.md \
        dev/results/*.md)
    if [ -z "$page" ] || ! "table_$name" >"$dir/new"; then
        echo "FAIL table $name: ${page:-is on no page}"
        failed=$((failed + 1))
        continue
    fi
    if [ "$mode" = write ]; then
        awk -v begin="<!-- table $name -->" -v new="$dir/new" '
            $0 == begin { print; inside = 1; while ((getline line < new) > 0) print line; next }
            $0 == "<!-- end -->" { inside = 0 }
            !inside' "$page" >"$dir/page" && cat "$dir/page" >"$page"
    fi
    if awk -v begin="<!-- table $name -->" \
        '$0 == "<!-- end -->" { inside = 0 } inside; $0 == begin { inside = 1 }' \
        "$page" | diff - "$dir/new" >"$dir/diff"; then
        echo "ok   table $name of $page"
        passed=$((passed + 1))
    else
        echo "FAIL table $name of $page: < is written there, > is what the command gives" \
            "(make doc writes it)"
        cat "$dir/diff"
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
