#!/usr/bin/env bash
# run_collectives.sh [FOLDER]: the checks of FOLDER/dev/cuda/collectives at 1, 2, 3, 4 and 8 ranks.
# Runs them in bf16 too if that is built.
# needs: fp32/dev/cuda/collectives bf16/dev/cuda/collectives
. "$(dirname "$0")/report.sh"
export OMP_NUM_THREADS=1
ranks='1 2 3 4 8'
# Real NCCL wants a GPU for each rank.
[ "$device" = cpu ] || ranks=$(nvidia-smi -L 2>/dev/null |
    awk '/^GPU/ { n++ } END { print n > 1 ? "1 " n : 1 }')

for folder in $(printf '%s\n' "$build" "$(echo "$build" | sed 's/fp32/bf16/')" | sort -u); do
    program=$folder/dev/cuda/collectives
    [ -x "$program" ] || [ "$folder" = "$build" ] || continue
    for n in $ranks; do verdicts "$program at $n ranks" timeout -k 5 120 $launch -n "$n" \
        "$program"; done
done
finish
