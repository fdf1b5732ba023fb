# shellcheck shell=sh
# report.sh: how the shell tests start ranks (`launch`), count and report. Sourced with `. dev/test/report.sh` in the
# root of the repository. `shown` names files whose ends are printed when a check fails.
. dev/launch.sh
passed=0
failed=0
shown=

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

# finish: the last line, and the exit code.
finish() {
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
    exit
}

# skip TEST WHY: nothing was checked, and that is no failure.
skip() {
    echo "skip $1: $2"
    finish
}
