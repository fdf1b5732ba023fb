#!/usr/bin/env bash
# traced.sh BUILD FOLDER: draws steps of 6 layers on the virtual clock. Lesson 6: FSDP in two
# replicas, of a node each. Lesson 13: the share of tokens whose copies hide, and all tokens. BUILD
# holds the bf16 trainers.
set -eu
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
build=$1 out=$2
cd "$(dirname "$0")/../.."
trace=$(mktemp)
trap 'rm -f "$trace"' EXIT

# step TRAINER FLAG...: leaves the step's trace.
step() {
    local trainer=$1
    shift
    "$build/$trainer" --simulate dev/clusters/dgx-a100.json --layers 6 --heads 32 --channels 4096 \
        --vocab 50257 --micro-batch 1 --steps 1 --trace "$trace" "$@" >/dev/null
}
draw() { build/tools/timeline --width "$1" --title "$2" --out "$out/$3.svg" "$trace" 2>/dev/null; }

step train_fsdp --ranks 16 --shard 3 --replicas 2 --seq 2048 --global-batch 32
draw 900 'train_fsdp --replicas 2: 16 GPUs in two nodes, two micro-batches' hsdp
for share in auto 1; do
    step train_offload --ranks 1 --offload $share --seq 16384
    draw 1000 "offload $share: chunk l is layer l" "offload-$share"
done
