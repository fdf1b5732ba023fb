#!/usr/bin/env bash
# offload.sh BUILD FOLDER: draws the pictures of lesson 13: a step of 6 layers on the virtual clock,
# with the share of tokens whose copies hide, and with all tokens. BUILD holds the bf16 trainers.
set -eu
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
build=$1 out=$2
cd "$(dirname "$0")/../.."
trace=$(mktemp)
trap 'rm -f "$trace"' EXIT
for share in auto 1; do
    "$build/train_offload" --simulate dev/clusters/dgx-a100.json --ranks 1 --offload $share \
        --layers 6 --heads 32 --channels 4096 --vocab 50257 --micro-batch 1 --seq 16384 --steps 1 \
        --trace "$trace" >/dev/null
    build/tools/timeline --width 1000 --title "offload $share: chunk l is layer l" \
        --out "$out/offload-$share.svg" "$trace" 2>/dev/null
done
