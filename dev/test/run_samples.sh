#!/usr/bin/env bash
# run_samples.sh [BUILD]: which tokenizer a run has. It is the tokenizer beside its weights, or
# beside the weights that its training began with. Bytes are only for the vocabulary of bytes.
# Without a tokenizer, text is refused, and all else works. Ends with `N passed, N failed`.
# needs: fp32/train_gpt
. "$(dirname "$0")/report.sh"
export OMP_NUM_THREADS=1
need_gpus 1

# A tokenizer that has no x: as bytes, "axb" would come back whole.
model='{"type":"BPE","vocab":{"a":0,"b":1},"merges":[]}'
letters="{\"pre_tokenizer\":{\"type\":\"ByteLevel\"},\"model\":$model}"
normalizer='{"type":"Sequence","normalizers":[]}'
sentences="{\"normalizer\":$normalizer,\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}"
train() {
    "$build/train_gpt" --train-data dev/test/golden/train.bin --seq 4 --micro-batch 1 \
        --global-batch 1 "$@" >"$dir/out" 2>"$dir/err" </dev/null
}
text() { train --sample-every 1 --sample-tokens 1 --prompt axb "$@"; }
sampled() { grep -q '^sample: ab' "$dir/out"; }
refused() {  # refused PATTERN NAME FLAGS...: exit code 2 and one sentence
    local pattern=$1 name=$2
    shift 2
    "$@"
    [ $? = 2 ] && [ "$(wc -l <"$dir/err")" = 1 ] && grep -q "^error: .*$pattern" "$dir/err"
    report $? "$name: $(sed "s|$dir/||g" "$dir/err")"
}

# ---- where it is found ---------------------------------------------------------------------------

mkdir "$dir/model"
cp dev/test/golden/config.json dev/test/golden/model.safetensors "$dir/model"
echo "$letters" >"$dir/model/tokenizer.json"
text --init "$dir/model" --steps 1 && sampled
report $? 'a tokenizer beside the weights of --init'
job() { text --init "$dir/model" --resume auto --out "$dir/job" --save-every 1 "$@"; }
job --steps 1 && sampled
report $? 'a job begins with these weights'
rm -f "$dir"/job/step-*/tokenizer.json  # whether or not a save brings it along
job --steps 2 && sampled
report $? 'it is started again with the same command, resumes, and still has their tokenizer'
cp "$dir/model/tokenizer.json" "$dir/job/step-00000002"
text --resume "$dir/job/step-00000002" --steps 3 && sampled
report $? 'a tokenizer beside a checkpoint'
rm "$dir/job/step-00000002/tokenizer.json"
text --resume "$dir/job/step-00000002" --tokenizer "$dir/model/tokenizer.json" --steps 3 && sampled
report $? 'a tokenizer that is named'
text --vocab 257 --layers 1 --channels 8 --heads 1 --steps 1 && grep -q '^sample: axb' "$dir/out"
report $? 'the vocabulary of bytes has bytes'

# ---- where there is none -------------------------------------------------------------------------

refused 'vocabulary has 61 .*job/step-00000002 has none' 'a checkpoint without one' \
    text --resume "$dir/job/step-00000002" --steps 3
refused 'vocabulary has 61 .*this run has none' 'a new model' text --vocab 61 --layers 1 \
    --channels 8 --heads 1 --steps 1
rm "$dir/model/tokenizer.json"
refused 'model has none' 'a folder without one' text --init "$dir/model" --steps 1
train --init "$dir/model" --steps 1
report $? 'which trains without text'
touch "$dir/model/vocab.json" "$dir/model/merges.txt"
refused 'model has only vocab.json and merges.txt' 'a folder of the slow kind' text \
    --init "$dir/model" --steps 1
ln -s "$dir/nowhere" "$dir/model/tokenizer.json"
refused 'model/tokenizer.json' 'a link that leads nowhere' text --init "$dir/model" --steps 1
train --init "$dir/model" --steps 1
report $? 'which trains without text, too'

# ---- weights alone -------------------------------------------------------------------------------

bytes="--vocab 257 --layers 1 --channels 8 --heads 1"
# shellcheck disable=SC2086
text $bytes --steps 1 --out "$dir/bytes"
look() {  # look FLAGS...: no data, no step
    "$build/train_gpt" --init "$dir/bytes/step-00000001" --steps 0 --sample-every 1 \
        --sample-tokens 8 --prompt axb "$@" >"$dir/out" 2>"$dir/err" </dev/null
}
before=$(cat "$dir"/bytes/step-00000001/* | cksum)
look && [ "$(grep -c '^sample: axb' "$dir/out")" = 1 ] && [ ! -s "$dir/err" ]
sample=$(grep -a '^sample' "$dir/out" | head -c 40 | tr -cd ' -~')
report $? "a checkpoint is sampled without data: $sample"
first=$(cksum <"$dir/out")
look && [ "$first" = "$(cksum <"$dir/out")" ]
report $? 'twice the same'
look --seed 2 && [ "$first" != "$(cksum <"$dir/out")" ] && grep -q '^sample: axb' "$dir/out"
report $? 'another seed, another sample'
[ "$before" = "$(cat "$dir"/bytes/step-00000001/* | cksum)" ] &&
    [ "$(ls "$dir/bytes")" = step-00000001 ]
report $? 'the checkpoint stays as it was'
refused 'train-data is missing' 'with a step' look --steps 1
refused 'train-data is missing' 'with a folder to save to' look --out "$dir/other"

# ---- one that cannot be read, beside sound weights -----------------------------------------------

rm "$dir/model/tokenizer.json"
echo "$sentences" >"$dir/model/tokenizer.json"
train --init "$dir/model" --dry-run
report $? 'a tokenizer of another kind: --dry-run'
train --init "$dir/model" --steps 1 --prompt axb
report $? 'training'
python=${PYTHON:-python3}
if command -v "$python" >/dev/null; then
    "$python" - "$dir/rows.bin" >"$dir/out" <<'P'
import sys
sys.path.insert(0, "dev/data")
import eval_rows
eval_rows.write_rows(sys.argv[1], eval_rows.CLOZE, 61, 0, [([1, 2, 3], 2, 1)])
P
    "$build/train_gpt" --init "$dir/model" --eval "$dir/rows.bin" --seq 4 >"$dir/out" 2>"$dir/err" \
        </dev/null
    report $? '--eval'
fi
refused 'model/tokenizer.json' 'text' text --init "$dir/model" --steps 1
refused 'model/tokenizer.json' 'or its name' train --init dev/test/golden \
    --tokenizer "$dir/model/tokenizer.json"
finish
