#!/usr/bin/env bash
# run_flags.sh [BUILD]: every flag of every trainer is in a checkpoint (trainer.json or
# config.json), or on one of the lists below. The flags of these lists change no result. Then: a
# run that resumes with another value is told or refused. Ends with `N passed, N failed`.
# needs: fp32/train_gpt fp32/train_gpt_tp fp32/train_gpt_pp fp32/train_gpt_3d tools/byte_corpus
# needs: fp32/train_context fp32/train_data fp32/train_fsdp fp32/train_llama fp32/train_moe
# needs: fp32/train_zero_bubble fp32/train_muon fp32/train_v fp32/train_offload
# needs: fp32/train_documents fp32/train_5d
. "$(dirname "$0")/report.sh"
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41
build/tools/byte_corpus "$dir/train.bin" "$dir/val.bin" README.md >/dev/null || exit 1

# Which steps are taken, what is read, written and printed, and when. --val-data and --eval only
# measure.
about='init resume verify out save-every keep val-data tokenizer val-every val-batches sample-every
    sample-tokens prompt log trace trace-steps dump-gradients eval dry-run help version virtual-time
    simulate ranks debug-replicas'
# The layout: the order of sums at most, and a checkpoint continues at any.
layout='micro-batch recompute tensor sequence-parallel pipeline virtual layers-per-stage schedule
    schedule-file max-in-flight data zero overlap order context context-by context-layout shard
    replicas expert-parallel offload'

# key FLAG: the name that a flag has in a checkpoint, where it is another one.
key() {
    case $1 in
        layers) echo n_layer num_hidden_layers ;;
        heads) echo n_head num_attention_heads ;;
        channels) echo n_embd hidden_size ;;
        vocab) echo vocab_size ;;
        max-seq) echo n_positions max_position_embeddings ;;
        model) echo model_type ;;
        kv-heads) echo num_key_value_heads ;;
        hidden) echo intermediate_size ;;
        window) echo sliding_window ;;
        experts) echo num_local_experts ;;
        top-k) echo num_experts_per_tok ;;
        train-data) echo data ;;
        ramp) echo ramp_start ;;
        *) echo "${1//-/_}" ;;
    esac
}
# flags TRAINER: the flags that it has. keys FOLDER: the names in its files, with a lesson's own
# options.
flags() { "$build/$1" --help all | sed -n 's/^  --\([a-z0-9-]*\).*/\1/p'; }
keys() {
    sed -n 's/^  "\([a-z0-9_]*\)":.*/\1/p' "$1/config.json" "$1/trainer.json"
    sed -n 's/^  "lesson": "\(.*\)",*$/\1/p' "$1/trainer.json" | tr ',' '\n' |
        sed 's/ = .*//; s/ //g; s/-/_/g'
}
has() { [[ " ${*:2} " == *" $1 "* ]]; }  # has WORD WORDS...

model="--train-data $dir/train.bin --layers 2 --heads 2 --channels 32 --seq 32 --global-batch 8"
all=
for source in train_gpt*.cu dev/lessons/train_*.cu; do
    trainer=$(basename "$source" .cu) missing= kind=
    [ "$trainer" = train_llama ] && kind='--model mistral'  # which has all of its flags
    # shellcheck disable=SC2086
    "$build/$trainer" $model $kind --steps 0 --out "$dir/$trainer" >"$dir/out" 2>"$dir/err"
    report $? "$trainer saves a checkpoint"
    # shellcheck disable=SC2046
    saved=$(echo $(keys "$dir/$trainer/step-00000000"))
    own=$(echo $(flags "$trainer"))
    for flag in $own; do
        # shellcheck disable=SC2086
        has "$flag" $about $layout && continue
        # Only mistral has a window, and it has no experts.
        [ "$trainer $flag" = 'train_5d window' ] && continue
        found=
        for name in $(key "$flag"); do has "$name" $saved && found=1; done
        [ -n "$found" ] || missing+=" --$flag"
    done
    [ "$(wc -w <<<"$own")" -gt 40 ] && [ -z "$missing" ]
    report $? "$trainer: $(wc -w <<<"$own") flags are kept or change nothing, but:${missing:- none}"
    all+=" $own"
done
for flag in $about $layout; do
    # shellcheck disable=SC2086
    has "$flag" $all || report 1 "no trainer has --$flag, which is on a list here"
done

# told TRAINER FLAG VALUE: a resume with another value prints a note of it, or is refused for it.
told() {
    # shellcheck disable=SC2086
    "$build/$1" $model --steps 0 --resume "$dir/$1/step-00000000" "--$2" "$3" >"$dir/out" \
        2>"$dir/err"
    local key status said
    key=$(key "$2" | tr ' ' '|')
    grep -qE "(note|error): the checkpoint was trained with (${2//-/_}|$2|$key) = " \
        "$dir/out" "$dir/err"
    status=$?
    said=$(grep -hE '^(note|error): the checkpoint' "$dir/out" "$dir/err" | head -n 1)
    report $status "$1 --resume with --$2 $3: $said"
}
for change in 'seed 7' 'shuffle 1' 'global-batch 4' 'warmup 1' 'lr-schedule linear' 'lr 0.1' \
    'lr-final 0.5' \
    'weight-decay 0' 'clip 0' 'beta1 0.8' 'beta2 0.9' 'eps 1e-6' 'ramp 4,4,8' 'dropout 0.1'; do
    # shellcheck disable=SC2086
    told train_gpt $change
done
for change in 'capacity 0.5' 'balance-loss 0' 'z-loss 0' 'lr 0.1'; do
    # shellcheck disable=SC2086
    told train_moe $change
done
told train_documents eot 7
told train_documents documents 0
told train_llama documents 1
told train_5d documents 1
for change in 'muon-momentum 0.9' 'muon-steps 3' 'weight-decay 0'; do
    # shellcheck disable=SC2086
    told train_muon $change
done

# The capacity of a mixture of experts counts in an evaluation, too, and stands in config.json.
moe="$build/train_moe $model --experts 4 --top-k 2"
rm -rf "$dir/train_moe"
$moe --steps 2 --save-every 1 --capacity 0.5 --out "$dir/train_moe" --log "$dir/whole" >"$dir/out" \
    2>"$dir/err" &&
    $moe --steps 2 --resume "$dir/train_moe/step-00000001" --log "$dir/again" >"$dir/out" \
        2>"$dir/err" &&
    ! grep -q '^note: .*capacity' "$dir/out" &&
    [ "$(numbers "$dir/whole" | grep -v layer | tail -n 1)" = \
        "$(numbers "$dir/again" | grep -v layer | tail -n 1)" ]
report $? 'without --capacity a resume takes the one of the checkpoint, and has the same numbers'
if command -v python3 >/dev/null; then
    head -c 3000 README.md >"$dir/text"
    python3 dev/data/prepare.py windows --text "$dir/text" --stride 8 --seq 32 --out "$dir" \
        >"$dir/out" 2>&1
    loss() { $moe --resume "$dir/train_moe/step-00000002" --eval "$dir/windows.bin" "$@" \
        2>"$dir/err" | tee "$dir/out" | grep '^eval loss'; }
    left_out=$(loss) && same=$(loss --capacity 0.5) && ! grep -q '^note' "$dir/out" &&
        other=$(loss --capacity 4) &&
        grep -q '^note: the checkpoint was trained with capacity = 0.5, this run has 4$' \
            "$dir/out" &&
        [ -n "$left_out" ] && [ "$left_out" = "$same" ] && [ "$same" != "$other" ]
    report $? "--eval takes the checkpoint's capacity, and notes another one: $left_out; $other"
fi
sed -i 's/"capacity_factor": 0.5/"capacity_factor": 500/' "$dir/train_moe/step-00000002/config.json"
$moe --init "$dir/train_moe/step-00000002" --steps 1 >"$dir/out" 2>"$dir/err"
[ $? = 2 ] && grep -q '"capacity_factor" must be a number from 0.01 to 128' "$dir/err"
report $? "a senseless one is refused: $(cat "$dir/err")"
finish
