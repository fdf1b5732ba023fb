#!/usr/bin/env bash
# other_layers.sh BUILD FOLDER: draws the losses of doc/lab/architectures.md. It runs 100 steps
# of each layer with 4 and 24 layers, on doc/experiments/pages.txt, a text that stays as it is.
# dev/test/run_experiments.sh has built the patched trainers.
set -eu
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
build=$1 out=$2
cd "$(dirname "$0")/../.."
build/tools/byte_corpus build/pages.bin build/rest.bin doc/experiments/pages.txt >/dev/null

draw() {  # draw NAME TITLE USUAL OTHER 'WORD OF USUAL' 'WORD OF OTHER'
    local layers trainer curves=()
    for layers in 4 24; do
        for trainer in "$3" "build/experiments/$4"; do
            "$build/$trainer" --layers $layers --heads 2 --channels 64 --seq 64 --micro-batch 4 \
                --global-batch 8 --train-data build/pages.bin --shuffle 1 --steps 100 --lr 2e-3 \
                --warmup 10 --val-every 0 --log "build/out/${trainer##*/}-$layers.jsonl" \
                >/dev/null
        done
        curves+=("$5, $layers layers=build/out/$3-$layers.jsonl" \
            "$6, $layers layers=build/out/$4-$layers.jsonl")
    done
    build/tools/loss --title "$2" --out "$out/$1.svg" "${curves[@]}"
}
draw post-ln 'Layer norm before (pre) or behind (post) the residual sum' train_gpt post_ln pre post
draw parallel-block 'Sequential and parallel blocks' train_gpt_tp parallel_block sequential parallel
