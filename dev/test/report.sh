# shellcheck shell=bash
# report.sh: begins every shell test: `. "$(dirname "$0")/report.sh"`. Goes to the root of the
# repository and sets `build` (the test's argument: the folder of the programs), `device` (cpu or
# cuda), `launch` (starts ranks) and `dir` (a temporary folder, removed at the end). `shown` names
# files whose ends are printed when a check fails.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
. dev/launch.sh
build=${1:-build/cpu-fp32}
device=${build##*/} device=${device%%-*}
dir=$(mktemp -d) || exit 1
# shellcheck disable=SC2064  # a test may have another $dir
trap "rm -rf '$dir'" EXIT
shown="$dir/out $dir/err"
# The flags of the make that runs the tests would change what an inner make does
unset MAKEFLAGS MFLAGS MAKELEVEL
passed=0
failed=0

report() {  # report STATUS NAME
    if [ "$1" = 0 ]; then
        passed=$((passed + 1))
        echo "ok   $2"
        return
    fi
    failed=$((failed + 1))
    echo "FAIL $2"
    for file in $shown; do
        [ -f "$file" ] && tail -n 20 "$file" | sed 's/^/  | /'
    done
}

# verdicts NAME COMMAND...: runs a program that ends with `N passed, N failed`, and adds its checks
# to the test's.
verdicts() {
    local name=$1 last ok=1
    shift
    "$@" >"$dir/out" 2>"$dir/err" && ok=0
    sed '$d' "$dir/out"
    last=$(tail -n 1 "$dir/out")
    case $last in
        [1-9]*" passed, "*" failed")
            passed=$((passed + ${last%% *}))
            last=${last#*passed, }
            failed=$((failed + ${last%% *}))
            ;;
        *) ok=1 ;;
    esac
    report $ok "$name: every check"
}

# await COMMAND...: waits until it succeeds, at most 60 s.
await() {
    local left=3000
    until "$@" >/dev/null 2>&1; do
        left=$((left - 1))
        [ $left -gt 0 ] || return 1
        sleep 0.02
    done
}

# numbers LOG: its lines without the times.
numbers() { sed 's/,"ms".*//' "$1"; }

# finish: the last line, and the exit code.
finish() {
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
    exit
}

# skip WHY: the rest is not checked, and that is no failure.
skip() {
    echo "skip ${0##*/}: $1"
    finish
}
cpu_only() { [ "$device" = cpu ] || skip "$1"; }  # cpu_only WHY
need_gpus() {  # need_gpus RANKS: NCCL wants a GPU for each
    [ "$device" = cpu ] || [ "$(nvidia-smi -L 2>/dev/null | grep -c GPU)" -ge "$1" ] ||
        skip "$1 ranks need $1 GPUs"
}
