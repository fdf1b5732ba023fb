#!/usr/bin/env bash
# run_train.sh [BUILD]: `make train` as a newcomer runs it, but into a folder of its own. It must
# end with 0, learn what 500 steps of a sound trainer learn, and leave every file that it announces.
# Ends with `N passed, N failed`.
# needs: fp32/train_gpt_3d tools/byte_corpus tools/timeline tools/profile tools/loss
. "$(dirname "$0")/report.sh"
need_gpus 8
shown="$dir/output"

# A newcomer has none of dev/launch.sh's settings.
env -u OMP_NUM_THREADS -u OMPI_MCA_pml -u OMPI_MCA_btl -u HWLOC_COMPONENTS -u HWLOC_PLUGINS_PATH \
    make train DEVICE="$device" OUT="$dir" >"$dir/output" 2>&1
code=$?
report $code "make train ends with exit code $code"

# value STEP: the validation loss that was printed after this step.
value() { sed -n "s|^step $1/500 . validation loss \\([0-9.]*\\)\$|\\1|p" "$dir/output"; }
within() { awk -v x="$1" -v lo="$2" -v hi="$3" 'BEGIN { exit !(x != "" && x > lo && x < hi) }'; }

first=$(value 0) last=$(value 500)
within "$first" 5.4 5.7
report $? "validation loss before the first step ${first:-not printed}; a model that knows nothing has ln 257 = 5.549"
# The text is this repository's, and with it the outcome of 500 steps changes: 2.04 to 2.31 have
# been seen, and 2.5 after 300 steps. A table of pairs of bytes has 2.74.
within "$last" 1.7 2.4
report $? "validation loss after 500 steps ${last:-not printed}, between 1.7 and 2.4"
steps=$(grep -c '"loss":' "$dir/log.jsonl" 2>/dev/null)
[ "$steps" = 500 ]
report $? "the log has ${steps:-no} of 500 steps"

# Everything that is announced is there: the words with the folder's name in four lines before the
# last three.
announced=$(tail -n 7 "$dir/output" | head -n 4 | grep -o "$dir/[^ ,]*")
[ "$(wc -l <<<"$announced")" = 7 ]
report $? "seven files are announced: ${announced//$'\n'/ }"
[ "$(tail -n 3 "$dir/output" | grep -c '^next: ')" = 3 ]
report $? 'the last three lines say where to look next'
grep -q 'static inline ' "$dir/output"
report $? 'the sample is shown'
! grep -q 'Nothing to be done' "$dir/output"
report $? 'make says nothing of targets that are up to date'
for file in $announced; do
    case $file in
        *.svg) tail -c 16 "$file" 2>/dev/null | grep -q '</svg>' ;;
        *.json) [ "$(tail -c 4 "$file" 2>/dev/null)" = $'\n]}' ] ;;
        */step-*) [ -s "$file/model.safetensors" ] && [ -s "$file/optimizer.safetensors" ] && [ -s "$file/config.json" ]
            ;;
        *) [ -s "$file" ] ;;
    esac
    report $? "${file##*/} is there, and whole as far as its end tells"
done

finish
