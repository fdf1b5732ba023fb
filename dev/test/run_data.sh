#!/usr/bin/env bash
# run_data.sh [BUILD]: the Python programs of dev/data. prepare.py makes shards of small texts that stand in for the data
# sets (file:// instead of a network), which are compared token by token and trained on; check_transformers.py must find
# a checkpoint's loss where Hugging Face's transformers is installed. PYTHON names another interpreter.
# needs: fp32/train_gpt
set -u
cd "$(dirname "$0")/../.." || exit 1
. dev/test/report.sh
build=$(realpath -m "${1:-build/cpu-fp32}")
python=${PYTHON:-python3}
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
shown="$dir/out"

if ! command -v "$python" >/dev/null; then
    skip data "no $python"
fi

prepare() { "$python" dev/data/prepare.py "$@" >"$dir/out" 2>&1; }

# shard FILE: its header and its tokens, one a line.
shard() {
    od -An -v -td4 -N12 "$1" | awk '{print $1, $2, $3}'
    od -An -v -tu2 -j1024 -w2 "$1" | tr -d ' '
}

# document FORMAT NUMBER: the tokens of a document as bytes, with <|endoftext|> before it.
document() {
    echo 256
    # shellcheck disable=SC2059
    printf "$1" "$2" | od -An -v -tu1 -w1 | tr -d ' '
}

# holds SHARD FIRST LAST TOKENS: the shard has lines FIRST .. LAST of TOKENS, and says so.
holds() {
    sed -n "$2,$3p" "$4" >"$dir/want"
    [ -f "$1" ] && { echo "20240520 1 $(($3 - $2 + 1))"; cat "$dir/want"; } | cmp - <(shard "$1") >>"$dir/out" 2>&1
}

# ---- tinyshakespeare: speeches between empty lines, a 20th of them for validation ------------------------------------

source=$dir/source out=$dir/shards
mkdir -p "$source"
speech='Speaker %d:\nNaïve words.\nAnd a last line.\n\n'
for ((i = 1; i <= 40; i++)); do
    # shellcheck disable=SC2059
    printf "$speech" $i >>"$source/input.txt"
    document "$speech" $i
done >"$dir/tokens"
total=$(wc -l <"$dir/tokens")
split=$(grep -n '^256$' "$dir/tokens" | sed -n '3s/:.*//p')  # where the third speech begins

prepare tinyshakespeare --source "file://$source" --out "$out"
report $? 'prepare.py tinyshakespeare'
holds "$out/tinyshakespeare_val_000000.bin" 1 $((split - 1)) "$dir/tokens"
report $? "its first 20th, $((split - 1)) tokens, is validation"
holds "$out/tinyshakespeare_train_000001.bin" "$split" "$total" "$dir/tokens"
report $? "the rest, $((total - split + 1)) tokens, is training: each speech after <|endoftext|>, in its bytes"

"$build/train_gpt" --train-data "$out/tinyshakespeare_train_*.bin" --val-data "$out/tinyshakespeare_val_*.bin" --layers 1 \
    --channels 16 --seq 8 --micro-batch 2 --steps 2 --val-every 2 --out "$dir/checkpoint" >"$dir/out" 2>&1
report $? 'train_gpt trains and validates on them'

mv "$source" "$dir/moved"
rm "$out"/*.bin
prepare tinyshakespeare --source "file://$source" --out "$out" --shard-tokens 600
report $? 'what has been downloaded is not fetched again'
holds "$out/tinyshakespeare_train_000001.bin" "$split" $((split + 599)) "$dir/tokens" &&
    holds "$out/tinyshakespeare_train_000002.bin" $((split + 600)) $((split + 1199)) "$dir/tokens" &&
    holds "$out/tinyshakespeare_train_000003.bin" $((split + 1200)) "$total" "$dir/tokens"
report $? '--shard-tokens 600: two whole shards and a rest'
mv "$dir/moved" "$source"

out=$dir/again
mkdir -p "$out/download"
head -c 100 "$source/input.txt" >"$out/download/input.txt.part"
prepare tinyshakespeare --source "file://$source" --out "$out"
holds "$out/tinyshakespeare_train_000001.bin" "$split" "$total" "$dir/tokens"
report $? 'a download that was interrupted begins again'

# ---- tinystories: stories between lines of <|endoftext|> --------------------------------------------------------------

out=$dir/stories
for ((i = 1; i <= 30; i++)); do
    printf '<|endoftext|>\n\nOnce there was %d.\n\nIt went on.\n' $i >>"$source/TinyStoriesV2-GPT4-train.txt"
    document 'Once there was %d.\n\nIt went on.' $i
done >"$dir/tokens"
printf 'One.\n<|endoftext|>\nTwo.\n<|endoftext|>\n' >"$source/TinyStoriesV2-GPT4-valid.txt"
prepare tinystories --source "file://$source" --out "$out" --shard-tokens 200 --shards 2
report $? 'prepare.py tinystories --shards 2'
holds "$out/tinystories_train_000001.bin" 1 200 "$dir/tokens" &&
    holds "$out/tinystories_train_000002.bin" 201 400 "$dir/tokens" && [ ! -e "$out/tinystories_train_000003.bin" ]
report $? 'two training shards of 200 tokens, and no more'
{ document 'One.' 0; document 'Two.' 0; } >"$dir/tokens"
holds "$out/tinystories_val_000000.bin" 1 10 "$dir/tokens"
report $? 'validation is the other file; nothing stands behind the last separator'

# ---- fineweb, already in tokens -----------------------------------------------------------------------------------------

out=$dir/fineweb
mkdir -p "$out"
echo '{}' >"$out/tokenizer.json"  # which comes from elsewhere and is not fetched again
cp "$dir/stories/tinystories_val_000000.bin" "$source/fineweb_val_000000.bin"
cp "$dir/stories/tinystories_train_000001.bin" "$source/fineweb_train_000001.bin"
prepare fineweb --pretokenized --source "file://$source" --out "$out" &&
    cmp "$source/fineweb_val_000000.bin" "$out/fineweb_val_000000.bin" &&
    cmp "$source/fineweb_train_000001.bin" "$out/fineweb_train_000001.bin"
report $? 'prepare.py fineweb --pretokenized takes the shards as they are'

# ---- what is refused ------------------------------------------------------------------------------------------------------

# refused CODE PATTERN ARGUMENTS...: one line on stderr, and no traceback.
refused() {
    local code=$1 pattern=$2
    shift 2
    prepare "$@"
    [ $? = "$code" ] && grep -q "^error: .*$pattern" "$dir/out" && ! grep -q Traceback "$dir/out"
    report $? "refused: $(grep -m1 '^error: ' "$dir/out" | sed "s|$dir||g")"
}

refused 1 'cannot be downloaded' tinyshakespeare --source "file://$dir/nowhere" --out "$dir/none"
[ ! -e "$dir/none/download/input.txt" ] && [ -z "$(ls "$dir"/none/*.bin 2>/dev/null)" ]
report $? 'and nothing is left that looks like data'
refused 1 'pretokenized is for fineweb' tinystories --pretokenized
refused 1 '--shards must not be negative' tinystories --shards -1
refused 1 'shard-tokens must lie between' tinystories --shard-tokens 0
refused 1 "$dir/tokens" tinyshakespeare --source "file://$source" --out "$dir/tokens"
if ! "$python" -c 'import tokenizers' 2>/dev/null; then
    refused 1 'pip install tokenizers' tinystories --tokenizer "$dir/tokenizer.json" --source "file://$source" --out "$dir/none"
fi
if ! "$python" -c 'import pyarrow' 2>/dev/null; then
    refused 1 'pip install pyarrow' fineweb --tokenizer bytes --source "file://$source" --out "$dir/none"
fi

# ---- check_transformers.py ------------------------------------------------------------------------------------------------

checkpoint=$dir/checkpoint/step-00000002 golden=dev/test/golden
check() { "$python" dev/data/check_transformers.py "$@" >"$dir/out" 2>&1; }
if ! "$python" -c 'import torch, transformers' 2>/dev/null; then
    check $golden $golden/train.bin --seq 24
    [ $? = 1 ] && grep -q '^error: .*pip install torch transformers' "$dir/out"
    report $? 'check_transformers.py says what to install'
    echo 'skip check_transformers.py: torch and transformers are not installed'
else
    "$build/train_gpt" --init $golden --train-data $golden/train.bin --seq 24 --global-batch 8 --steps 3 --val-every 3 \
        --val-data $golden/train.bin --val-batches 2 --out "$dir/trained" --log "$dir/log" >"$dir/out" 2>&1
    report $? 'train_gpt makes a checkpoint'
    loss=$(sed -n 's/.*"step":3,"val_loss":\([^},]*\).*/\1/p' "$dir/log")
    check "$dir/trained/step-00000003" $golden/train.bin --seq 24 --batch 16 --loss "$loss" --tolerance 1e-6
    report $? "transformers loads it and finds its validation loss $loss: $(tail -n 1 "$dir/out")"
    check "$dir/trained/step-00000003" $golden/train.bin --seq 24 --batch 16 --loss "1$loss"
    [ $? = 1 ] && grep -q '^error: the losses differ' "$dir/out"
    report $? 'and says so when it is another'
    check "$checkpoint" "$golden/model.safetensors" --seq 8
    [ $? = 1 ] && grep -q '^error: .*is no token shard' "$dir/out"
    report $? 'a file that is no shard is refused'
fi

finish
