#!/usr/bin/env bash
# run.sh [SECONDS] [TARGET...]: fuzzes every target of dev/fuzz/targets.h with libFuzzer under the
# address and undefined-behaviour sanitizers, SECONDS (default 120) in all. It starts from
# dev/fuzz/corpus and the findings of earlier runs (build/fuzz/corpus). A failing input is left in
# build/fuzz; add it to dev/fuzz/corpus when the bug is fixed. Ends with a line of counts; the exit
# code is 1 if anything was found.
set -u
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.." || exit 1
seconds=${1:-120}
[ $# -gt 0 ] && shift
case $seconds in '' | *[!0-9]*) echo "error: SECONDS=$seconds is no number" >&2; exit 2 ;; esac
clang=${CLANG:-clang}
if ! command -v "$clang" >/dev/null; then
    echo "error: make fuzz needs clang with libFuzzer (Debian: apt-get install clang)" >&2
    exit 2
fi
mkdir -p build/fuzz
"$clang" -std=gnu11 -g -O1 -Wall -Wextra -I. \
    -fsanitize=fuzzer,address,undefined,float-cast-overflow -fno-sanitize-recover=all \
    -ffp-contract=off -o build/fuzz/fuzz dev/fuzz/fuzz.c -lcjson -lpcre2-8 -lm || exit 1
pattern=$(IFS='|'; echo "${*:-.}")
mapfile -t targets < <(build/fuzz/fuzz | grep -E "^($pattern)")
each=$((seconds / ${#targets[@]}))
[ $each -ge 1 ] || each=1
total=0 failed=0
for line in "${targets[@]}"; do
    read -r name longest leaks <<<"$line"
    corpus=build/fuzz/corpus/$name log=build/fuzz/$name.log
    mkdir -p "$corpus"
    FUZZ_TARGET=$name ASAN_OPTIONS=detect_leaks=$((1 - leaks)) \
        build/fuzz/fuzz -max_total_time=$each -timeout=10 -rss_limit_mb=2048 \
        -malloc_limit_mb=300 -max_len="$longest" -detect_leaks=$((1 - leaks)) \
        -dict=dev/fuzz/words.dict -close_fd_mask=3 -print_final_stats=1 \
        -artifact_prefix="build/fuzz/$name-" "$corpus" "dev/fuzz/corpus/$name" \
        >"$log" 2>&1 </dev/null
    code=$?
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n 1)
    total=$((total + ${runs:-0}))
    found=$(sed -n 's/.*Test unit written to //p' "$log" | head -n 1)
    if [ $code = 0 ] && [ -n "$runs" ]; then
        printf '%-12s %10d executions in %d s, nothing found\n' "$name" "$runs" $each
    else
        failed=$((failed + 1))
        printf '%-12s FAILED after %s executions: %s, see %s\n' "$name" "${runs:-?}" \
            "$(grep -m1 -E 'ERROR|runtime error|deadly' "$log" | head -c 200)" "${found:-$log}"
    fi
done
echo "$total executions, $failed of ${#targets[@]} targets failed"
[ $failed = 0 ]
