#!/usr/bin/env bash
# run_tests.sh cpu|cuda [PATTERN]: runs every test program that `make test` has built. When one
# ends, prints a line with its counts, its time and the time left, and shows what failed. Sums up at
# the end: the slowest programs, then the counts. With a pattern, only those whose title contains
# it. The whole output of each is kept in build/test-logs. On a CPU one more runs at a time than
# there are cores, as many of them mostly start programs and wait. On a GPU one does.
# With AGAIN=1, as continuous integration sets it, a program that failed runs once more by itself,
# and its second result counts: on a busy machine a check that waits for a second may fail. Both
# results are shown. If more than two programs failed, none runs again.
# run_tests.sh --plan cpu|cuda [PATTERN]: prints what these programs need, as targets of make. This
# is all that `make test` builds.
# run_tests.sh --titles cpu|cuda [PATTERN]: prints the titles of these programs.
# run_tests.sh --building PROGRAM: says that make begins to build it, with the time left.
# Times left are estimates, from the time that has passed and dev/test/seconds.txt: seconds of a
# core, 2 for names that are not in it.
set -u
cd "$(dirname "$0")/../.."

# progress ALL DONE SECONDS [BEGUN]: prints `DONE/ALL` and the time left after SECONDS. ALL and DONE
# are files with a name on each line. BEGUN more count as done, but not their time. At first the
# estimate trusts the table, which was measured on two cores, later this machine.
progress() {
    awk -v passed="$3" -v begun="${4:-0}" '
        FILENAME == ARGV[1] { s = $1; sub(/^[0-9]+ /, ""); seconds[$0] = s; next }
        { count[FILENAME]++; sum[FILENAME] += $0 in seconds ? seconds[$0] : 2 }
        END {
            all = ARGV[2]
            done = ARGV[3]
            slower = (passed + 60) / (sum[done] / 2 + 60)
            left = slower * (sum[all] - sum[done]) / 2
            printf "%*d/%d|%s left", length(count[all]), count[done] + begun, count[all],
                left < 100 ? sprintf("%.0f s", left) : sprintf("%.0f min", left / 60)
        }' dev/test/seconds.txt "$1" "$2"
}

if [ "${1:-}" = --building ]; then
    passed=$(($(date +%s) - $(stat -c %Y build/test-unbuilt)))
    line=$(progress build/test-unbuilt build/test-built $passed 1)
    echo "$2" >>build/test-built
    printf '%s  %-46s %s\n' "${line%|*}" "$2" "${line#*|}"
    exit
fi

plan=
case ${1:-} in --plan | --titles) plan=${1#--} && shift ;; esac
device=${1:-} pattern=${2:-}
if [ "$device" != cpu ] && [ "$device" != cuda ]; then
    echo 'usage: dev/test/run_tests.sh [--plan] cpu|cuda [PATTERN]' >&2
    exit 2
fi
# The Makefile names its folders alike, also with MPI=mpich.
fp32=build/$device-fp32${MPI:+-$MPI} bf16=build/$device-bf16${MPI:+-$MPI}
asan=$fp32-asan
logs=build/test-logs
passed=0 failed=0 started=0 ended=0 times=
failing=()
declare -A commands=()
lanes=1
export NCCL_ALGO=Ring  # adds in one order; the reductions in H100's switches need not
export OMP_WAIT_POLICY=passive  # threads that wait leave their core to the other programs
[ "$device" = cpu ] && lanes=$(($(nproc 2>/dev/null || echo 2) + 1))
if [ -z "$plan" ]; then
    mkdir -p "$logs"
    rm -f "$logs"/*.report "$logs/done"
    dev/test/run_tests.sh --titles "$device" "$pattern" >"$logs/titles"
    trap 'kill $(jobs -p) 2>/dev/null; wait; exit 130' INT TERM
    . dev/launch.sh
    export MPIRUN=$launch
fi

# one TITLE SECONDS COMMAND...: runs one program, which ends with a line `N passed, N failed`, and
# leaves a report: these numbers, then what is to be shown. The exit code counts as well: a program
# that reports no failure and then crashes has failed. COMMAND may begin with NAME=value words.
one() {
    local title=$1 limit=$2 name log begin child code tenths last ok=0 bad=1 why=
    shift 2
    name="$logs/${title//[^A-Za-z0-9_.-]/_}"
    log=$name.log
    # Temporary files in a folder of its own: Open MPI's jobs have a common one there, and one that
    # ends may remove it while another one starts, which then fails.
    TMPDIR=$(mktemp -d) && chmod 1777 "$TMPDIR" && export TMPDIR
    begin=$(date +%s%N)
    timeout --kill-after=5 "$limit" env "$@" </dev/null >"$log" 2>&1 &
    child=$!
    trap 'kill $child 2>/dev/null; rm -rf "$TMPDIR"; exit 130' TERM
    wait $child
    code=$?
    rm -rf "$TMPDIR"
    tenths=$((($(date +%s%N) - begin) / 100000000))
    last=$(tail -n 1 "$log" | tr -d '\0')
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
        ok=${BASH_REMATCH[1]} bad=${BASH_REMATCH[2]}
    else
        last='no result'
    fi
    if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
        why="stopped after $limit s"
    elif [ "$code" -ne 0 ]; then
        why="exit code $code"
    fi
    [ -n "$why" ] && [ "$bad" -eq 0 ] && bad=1
    [ $((ok + bad)) -eq 0 ] && why=$(grep -am1 '^skip ' "$log")
    {
        echo "$ok $bad $tenths $title"
        printf '%-46s %-21s %4d.%d s' "$title" "$last" $((tenths / 10)) $((tenths % 10))
        echo "${why:+  $why}"
        if [ "$bad" -ne 0 ]; then
            # With the output that a shell test shows
            grep -a -A 30 '^FAIL' "$log" | grep -av '^ok ' | head -n 60
            [ -n "$why" ] && tail -n 15 "$log" | sed 's/^/  | /'
            echo "  the whole output is in $log"
        fi
    } >"$name.new"
    mv "$name.new" "$name.report"
}

# Waits until one of the running programs has ended, and shows the reports that are there.
reap() {
    local report ok bad tenths title line
    wait -n 2>/dev/null
    for report in "$logs"/*.report; do
        [ -f "$report" ] || continue
        read -r ok bad tenths title <"$report"
        grep -sqxF "$title" "$logs/done" || echo "$title" >>"$logs/done"
        line=$(progress "$logs/titles" "$logs/done" $SECONDS)
        echo "${line%|*}  $(sed -n 2p "$report"), ${line#*|}"
        tail -n +3 "$report"
        rm "$report"
        passed=$((passed + ok)) failed=$((failed + bad)) ended=$((ended + 1))
        [ "$bad" = 0 ] || failing+=("$ok $bad $title")
        times+="$tenths $title"$'\n'
    done
}

# run TITLE SECONDS COMMAND...: as soon as there is room for it. `also` names what it needs besides
# its program.
run() {
    [[ $1 == *"$pattern"* ]] || return 0
    if [ "$plan" = titles ]; then
        echo "$1"
        return 0
    fi
    if [ -n "$plan" ]; then
        # shellcheck disable=SC2086
        printf '%s\n' "${@:3}" | grep -m1 "^build/.*/"
        [ -z "${also:-}" ] || printf '%s\n' $also
        return 0
    fi
    while [ "$(jobs -rp | wc -l)" -ge "$lanes" ]; do reap; done
    started=$((started + 1))
    commands[$1]=$(printf '%q ' "$@")
    one "$@" &
}

# Names of the sources under a folder, without what follows the first dot; nothing if there are
# none.
programs() {
    local source
    for source in "$@"; do
        [ -f "$source" ] && echo "${source%.*}"
    done
}

# needs SCRIPT: the programs that a script starts, which it names itself: `# needs:
# fp32/train_gpt_3d tools/loss`.
needs() {
    local word
    for word in $(sed -n 's/^# needs: //p' "$1"); do
        case $device-$word in
            cuda-*asan/* | cuda-*queue/* | cuda-*/test_nccl*) ;;  # these are for the CPU
            *-tools/*) echo "build/$word" ;;
            *) echo "${fp32/fp32/${word%%/*}}/${word#*/}" ;;
        esac
    done
}

# A test that a script starts is not run without it; kernels are checked all the same.
has_script() { [[ $1 == dev/test/* ]] && grep -q "^# needs:.*/$1\b" dev/test/run_*.sh; }

sources=(dev/test/test_*.c dev/test/test_mma.cu)
# The stand-ins' tests, too; plain C runs sanitized, below
[ "$device" = cpu ] && sources=(dev/test/test_*.cu)
parallel=dev/test/test_parallel llama=dev/test/test_llama  # are given the trainers, like test_gpt
runs_trainers() { [ "$1" = "$parallel" ] || [ "$1" = "$llama" ]; }
trainers() { for name in $(programs train_gpt*.cu dev/lessons/*.cu); do echo "$1/${name##*/}"; \
    done; }

for name in $(programs "${sources[@]}"); do
    has_script "$name" || runs_trainers "$name" || run "$name" 300 "$fp32/$name"
done
# The long ones first, so that the short ones fill what is left.
for folder in "$fp32" "$bf16"; do
    precision=${folder#*-} precision=${precision%%-*}
    also=$(trainers "$folder") run "test_gpt $precision" 1200 "$folder/test_gpt" "$folder"
    also="$(trainers "$folder") build/tools/timeline" \
        run "test_parallel $precision" 1200 "$folder/$parallel" "$folder"
    also=$folder/train_llama run "test_llama $precision" 600 "$folder/$llama" "$folder"
done
script() { also=$(needs "$1") run "$1" "${2:-600}" "$1" "$fp32"; }
# It builds a program for each trainer, with all answers to its puzzles.
long=dev/test/run_puzzles.sh
script $long 1200
# These measure how long something takes, so each has the machine for itself.
alone=(dev/test/run_signals.sh dev/test/run_kill.sh dev/test/run_explorer.sh)
last=(dev/test/run_ptx.sh dev/test/run_asm.sh)  # have one thread each
for name in dev/test/run_*.sh; do
    [[ " dev/test/run_tests.sh $long ${alone[*]} ${last[*]} " == *" $name "* ]] || script "$name"
done
if [ "$device" = cpu ]; then
    # Libraries keep memory to the end (oneDNN its kernels), so leaks are looked for in the plain C
    # programs only.
    for name in $(programs dev/test/test_*.c); do
        has_script "$name" || runs_trainers "$name" || run "$name sanitized" 600 "$asan/$name"
    done
    for name in $(programs dev/test/test_*.cu dev/cuda/*.cu); do
        has_script "$name" || run "$name sanitized" 600 ASAN_OPTIONS=detect_leaks=0 "$asan/$name"
    done
    # Rows, lanes and threads as a GPU has them: other code of the same kernels, and in another
    # order.
    for name in attention layernorm classifier encoder moe muon global_norm; do
        run "$name, shapes of a GPU" 600 CPU_THREAD_ORDER=random:1 "$fp32-shapes/dev/cuda/$name"
    done
    for name in layernorm moe; do run "$name bf16, shapes of a GPU" 600 \
        "$bf16-shapes/dev/cuda/$name"; done
    also="$fp32/test_gpt $fp32-shapes/train_gpt" run "test_gpt, shapes of a GPU" 600 \
        "$fp32/test_gpt" "$fp32-shapes" shapes
    # Only where a floatX is no float can a wrapper be seen to count one as the other.
    run 'dev/test/test_work bf16' 300 "$bf16/dev/test/test_work"
    # With hostile input a trainer might read past a buffer, and 8 ranks use all of its buffers.
    also=$asan/train_gpt_3d \
        run "test_gpt refusals sanitized" 1200 ASAN_OPTIONS=detect_leaks=0 "$asan/test_gpt" \
            "$asan" refusals
    also=$asan/train_gpt_3d \
        run "test_parallel replicas sanitized" 1200 ASAN_OPTIONS=detect_leaks=0 "$asan/$parallel" \
            "$asan" replicas
    for group in shapes refusals; do
        also=$asan/train_llama run "test_llama $group sanitized" 600 ASAN_OPTIONS=detect_leaks=0 \
            "$asan/$llama" "$asan" \
            "$group"
    done
fi
for name in $(programs dev/cuda/*.cu); do
    run "$name fp32" 300 "$fp32/$name"
    run "$name bf16" 300 "$bf16/$name"
    [ "$device" = cpu ] && run "$name fp32, random thread order" 300 CPU_THREAD_ORDER=random:1 \
        "$fp32/$name"
done
finish_all() { while [ -z "$plan" ] && [ -n "$(jobs -rp)" ]; do reap; done; }
finish_all
for name in "${alone[@]}"; do
    script "$name"
    finish_all
done
lanes=$((lanes < 2 ? lanes : 2))
for name in "${last[@]}"; do script "$name"; done
[ -n "$plan" ] && exit 0
finish_all
reap

if [ -n "${AGAIN:-}" ] && [ ${#failing[@]} -gt 0 ] && [ ${#failing[@]} -le 2 ]; then
    first=("${failing[@]}")
    failing=()
    for result in "${first[@]}"; do
        read -r ok bad title <<<"$result"
        echo "once more, by itself: $title ($ok passed, $bad failed)"
        passed=$((passed - ok)) failed=$((failed - bad)) ended=$((ended - 1))
        (eval "one ${commands[$title]}")
        reap
    done
    echo "${#first[@]} of the programs failed at first, ${#failing[@]} of them twice"
fi

if [ $started -eq 0 ]; then
    echo "no test program matches '$pattern'"
    failed=1
elif [ $ended -ne $started ]; then
    echo "$((started - ended)) programs left no report"
    failed=$((failed + started - ended))
fi
[ "$ended" -lt 2 ] || sort -rn <<<"$times" | head -n 8 |
    awk '
        {
            s = $1 / 10
            sub(/^[0-9]+ /, "")
            all = all (NR > 1 ? ", " : "") sprintf("%s %.0f s", $0, s)
        }
        END { print "slowest: " all }'
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
