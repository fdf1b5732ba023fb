#!/usr/bin/env bash
# doc.sh: makes the pictures and tables of README.md and doc/ again, from runs on this machine. `make doc` builds first.
# It writes into the working tree: look at the result, then commit it.
set -eu
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.."
pictures=doc/pictures
. dev/launch.sh

build/tools/figures $pictures
build/tools/study dev/scale/rows_a100.csv $pictures

mkdir -p build/out
make --no-print-directory DEVICE=cpu run-train | tee build/out/console.txt
cp build/out/timeline.svg $pictures/main.svg
cp build/out/profile.svg $pictures/profile.svg

dev/plot/schedules.sh build/cpu-fp32 $pictures

for browser in chromium chromium-browser google-chrome; do
    command -v $browser >/dev/null || continue
    profile=$(mktemp -d)
    {   # the page's load event, and so the picture, waits for the last curve
        cat doc/explorer.html
        echo '<script>const hold = document.createElement("iframe"); document.body.append(hold); hold.hidden = true;'
        echo 'hold.contentDocument.open(); setInterval(() => { if ($("curves").dataset.done) hold.remove(); }, 50);'
        echo '</script>'
    } >"$profile/page.html"
    $browser --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1280,1180 \
        --user-data-dir="$profile" --screenshot=$pictures/explorer.png "file://$profile/page.html#layout" 2>/dev/null
    rm -rf "$profile"
    break
done
make --no-print-directory DEVICE=cpu PRECISION=fp32 experts
cp build/out/experts.svg $pictures/experts.svg

dev/test/run_experiments.sh build/cpu-fp32
for layers in 4 24; do
    for trainer in train_gpt build/experiments/post_ln; do
        build/cpu-fp32/$trainer --layers $layers --heads 2 --channels 64 --seq 64 --micro-batch 4 --global-batch 8 \
            --train-data build/corpus/train.bin --steps 100 --lr 2e-3 --warmup 10 --val-every 0 \
            --log build/out/${trainer##*/}-$layers.jsonl >/dev/null
    done
done
build/tools/loss --title 'Layer norm before (pre) or behind (post) the residual sum' --out $pictures/post-ln.svg \
    'pre, 4 layers=build/out/train_gpt-4.jsonl' 'post, 4 layers=build/out/post_ln-4.jsonl' \
    'pre, 24 layers=build/out/train_gpt-24.jsonl' 'post, 24 layers=build/out/post_ln-24.jsonl'
for layers in 4 24; do
    for trainer in train_gpt_tp build/experiments/parallel_block; do
        build/cpu-fp32/$trainer --layers $layers --heads 2 --channels 64 --seq 64 --micro-batch 4 --global-batch 8 \
            --train-data build/corpus/train.bin --steps 100 --lr 2e-3 --warmup 10 --val-every 0 \
            --log build/out/${trainer##*/}-$layers.jsonl >/dev/null
    done
done
build/tools/loss --title 'Sequential and parallel blocks' --out $pictures/parallel-block.svg \
    'sequential, 4 layers=build/out/train_gpt_tp-4.jsonl' 'parallel, 4 layers=build/out/parallel_block-4.jsonl' \
    'sequential, 24 layers=build/out/train_gpt_tp-24.jsonl' 'parallel, 24 layers=build/out/parallel_block-24.jsonl'
rm -f build/test-logs/test_gpt_fp32.log  # tables.sh then runs the layouts
dev/plot/tables.sh write build/cpu-fp32 all
