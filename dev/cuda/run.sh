#!/usr/bin/env bash
# run.sh check|bench cpu|cuda PRECISION...: runs the programs of the kernel laboratory that `make
# kernels` and `make bench` have built.
#
#   check  Prints a row for each kernel. On the CPU it runs them again with the threads of a block
#          in random order. The last line is `N passed, N failed`.
#   bench  Prints times, with the share of the roofline measured in the same run. JSON Lines go to
#          $LOG, else to build/bench-DEVICE.jsonl.
set -u
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.." || exit 1

what=$1 device=$2
shift 2
if [ "$device" = cuda ] && ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo "no GPU here: the kernels are compiled, but cannot run" \
        "(make DEVICE=cpu $what runs them without one)"
    exit 1
fi

# Several ranks where the program is for them: all GPUs, or two on the CPU.
ranks=2
[ "$device" = cuda ] && ranks=$(nvidia-smi -L | grep -c GPU)
. dev/launch.sh
start() {
    local program=$1
    shift
    if [ "${program##*/}" = collectives ] && [ "$ranks" -gt 1 ]; then
        OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} $launch -n "$ranks" "$program" "$@"
    else
        "$program" "$@"
    fi
}

row='^(ok  |FAIL) .{26} [ 0-9][0-9]  '
passed=0 failed=0
count() {  # count CODE OUTPUT TITLE
    local last
    last=$(tail -n 1 <<<"$2")
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
        passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2]))
        [ "$1" -eq 0 ] || [ "${BASH_REMATCH[2]}" -gt 0 ] || failed=$((failed + 1))
    else
        failed=$((failed + 1))
    fi
    [ "$1" -eq 0 ] && return
    echo "FAIL $3: exit code $1"
    grep -a '^FAIL' <<<"$2" || tail -n 5 <<<"$2"
}

check() {
    local precision program output code head=
    for precision in "$@"; do
        head=
        for program in dev/cuda/*.cu; do
            program=build/$device-$precision${MPI:+-$MPI}/${program%.cu}
            output=$(start "$program" </dev/null 2>&1)
            code=$?
            [ -n "$head" ] || { head=$(grep -am1 '^     operation' <<<"$output"); [ -n "$head" ] &&
                echo "$head"; }
            grep -aE "$row" <<<"$output"
            count $code "$output" "$program"
            [ "$device" = cpu ] || continue
            output=$(CPU_THREAD_ORDER=random:1 CPU_STREAM_ORDER=random:1 start "$program" \
                </dev/null 2>&1)
            count $? "$output" "$program, random order of threads and streams"
        done
    done
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
}

bench() {
    local log=${LOG:-build/bench-$device.jsonl} precision program failures=0
    rm -f "$log"
    for precision in "$@"; do
        for program in dev/cuda/*.cu; do
            program=build/$device-$precision${MPI:+-$MPI}/${program%.cu}
            echo "$program --bench"
            start "$program" --bench --log "$log" </dev/null ||
                { echo "FAIL $program --bench"; failures=1; }
            echo
        done
    done
    echo "every block size, as JSON Lines: $log"
    return $failures
}

"$what" "$@"
