#!/bin/sh
# run_collectives.sh [FOLDER]: the checks of FOLDER/dev/cuda/collectives at 1, 2, 3, 4 and 8 ranks, and in bf16 too if
# that is built.
# needs: fp32/dev/cuda/collectives bf16/dev/cuda/collectives
cd "$(dirname "$0")/../.." || exit 1
. dev/test/report.sh
folder=${1:-build/cpu-fp32}
OMP_NUM_THREADS=1
export OMP_NUM_THREADS
ranks='1 2 3 4 8'
# Real NCCL wants a GPU for each rank.
case $folder in
    *cuda*) ranks=$(nvidia-smi -L 2>/dev/null | awk '/^GPU/ { n++ } END { print n > 1 ? "1 " n : 1 }') ;;
esac

for program in "$folder/dev/cuda/collectives" "$(echo "$folder" | sed 's/fp32/bf16/')/dev/cuda/collectives"; do
    [ -x "$program" ] || continue
    for n in $ranks; do
        output=$(timeout -k 5 120 $launch -n "$n" "$program" 2>&1)
        code=$?
        echo "$output" | grep '^FAIL'
        line=$(echo "$output" | tail -n 1)
        case $line in
            *" passed, "*" failed") passed=$((passed + ${line%% *}))
                                    line=${line#*passed, }
                                    failed=$((failed + ${line%% *})) ;;
            *) code=1 ;;
        esac
        if [ $code = 0 ]; then
            echo "ok   $program at $n ranks"
        else
            echo "FAIL $program at $n ranks: exit code $code"
            echo "$output" | tail -n 10
            failed=$((failed + 1))
        fi
    done
    [ "$program" = "$folder/dev/cuda/collectives" ] && case $folder in *bf16*) break ;; esac
done
[ "$passed" -gt 0 ] || report 1 "$folder/dev/cuda/collectives checked nothing"
finish
