#!/usr/bin/env bash
# schedules.sh BUILD FOLDER: draws the pictures of the schedules, all in one scale. Each is one
# step of 4 stages and 8 micro-batches on the virtual clock, with a laptop for each stage. The
# same source gives the same picture on every machine.
set -eu
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
build=$1 out=$2
cd "$(dirname "$0")/../.."
trace=$(mktemp)
trap 'rm -f "$trace"' EXIT
for schedule in gpipe 1f1b interleaved zb-h1 zb-auto zb-v; do
    chunks=1 title="$schedule: 4 stages, 8 micro-batches" trainer=train_gpt_pp
    [ $schedule = interleaved ] && chunks=2 title="$title, 2 chunks a stage"
    [[ $schedule = zb-* ]] && trainer=train_zero_bubble
    [ $schedule = zb-v ] && chunks=2 title="$title, 2 chunks a stage" trainer=train_v
    "$build/$trainer" --simulate dev/clusters/laptop.json --ranks 4 --pipeline 4 \
        --schedule $schedule --virtual $chunks --layers 8 --heads 8 --channels 512 --vocab 128 \
        --seq 256 --micro-batch 2 --global-batch 16 --trace "$trace" >/dev/null
    build/tools/timeline --title "$title" --out "$out/$schedule.svg" "$trace"
done
