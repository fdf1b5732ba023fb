#!/usr/bin/env bash
# run_puzzles.sh [BUILD] [PATTERN]: are the puzzles sound? Each patch applies to today's files and
# reversed gives them back; each hole and each wrong answer compiles and fails at the level and with
# the words of its verdict lines; the solution, which is the real lines, gets all stars, and budgets
# are its numbers; no hint has a line of the solution. With a pattern, only the puzzles whose
# folders have it. All answers to the puzzles of a trainer are in one program, which
# dev/puzzles/answers.py writes.
# Of an answer only the level of its verdict is run, up to the first line that is wrong, and each
# ninth answer has its turn on every ninth day. ALL=1 takes all answers, as each night's run does,
# and FULL=1 all that a learner would see of them.
# needs: fp32/dev/puzzles/check
pattern=${2:-}
. "$(dirname "$0")/report.sh"
cpu_only 'they run on the stand-ins'
out=build/puzzles/answers
gdb=build/cpu-fp32-gdb
lanes=$(nproc 2>/dev/null || echo 2)
export MPIRUN=$launch OMP_NUM_THREADS=1
today=$(date +%-j)  # asked once: the day may end beside this run
rm -rf $out $gdb/$out
mkdir -p $out/programs $out/checks
mapfile -t puzzles < <(find dev/puzzles -maxdepth 1 -type d -name '[0-9]*' | grep -e "$pattern" |
    sort)

# ---- patches and texts ---------------------------------------------------------------------------

# round_trip PATCH FOLDER: applies it to copies of the real files in FOLDER, and back in another.
round_trip() {
    local file start
    start=$(dirname "$1")/start
    rm -rf "$2" "$dir/back"
    mkdir -p "$2"
    [ ! -d "$start" ] || cp -r "$start/." "$2"
    for file in $(sed -n 's|^+++ b/||p' "$1"); do
        [ -f "$file" ] || continue
        mkdir -p "$2/$(dirname "$file")" && cp "$file" "$2/$file"
    done
    cp -r "$2" "$dir/before"
    patch -s -p1 -F0 --no-backup-if-mismatch -d "$2" <"$1" &&
        cp -r "$2" "$dir/back" &&
        patch -s -R -p1 -F0 --no-backup-if-mismatch -d "$dir/back" <"$1" &&
        diff -r "$dir/before" "$dir/back"
    local code=$?
    rm -rf "$dir/before"
    return $code
}

# The lines that a hole takes out, without blanks; short ones are no giveaway.
solution_lines() {
    sed -n '/^---/d; s/^-//p' "$1" | sed 's|//.*||' | tr -d ' ' | awk 'length > 12' | sort -u
}

for puzzle in "${puzzles[@]}"; do
    name=${puzzle##*/}
    : >"$dir/why"
    parts=$(sed -n 's/^## //p' "$puzzle/text.md" | paste -sd,)
    [ "$parts" = 'Idea,Read first,Hint 1,Hint 2,Hint 3,Afterwards' ] ||
        echo "parts: $parts" >>"$dir/why"
    grep -qE '^# Puzzle [0-9]+\. ' "$puzzle/text.md" || echo 'no title' >>"$dir/why"
    grep -qE '^[0-9]+ minutes\. ' "$puzzle/text.md" || echo 'no minutes' >>"$dir/why"
    if [ -f "$puzzle/hole.patch" ]; then
        sed '/^## Afterwards/,$d' "$puzzle/text.md" | tr -d ' ' |
            grep -nFf <(solution_lines "$puzzle/hole.patch") >>"$dir/why"
    fi
    shown="$dir/why"
    [ ! -s "$dir/why" ]
    report $? "$name: text.md has its parts, and no line of the solution"
    bad=
    for patch in "$puzzle"/*.patch; do
        round_trip "$patch" "$out/copies/$name/$(basename "$patch" .patch)" >>"$dir/why" 2>&1 ||
            bad="$bad ${patch##*/}"
    done
    mkdir -p "$out/copies/$name/solution"
    if [ -f "$puzzle/hole.patch" ]; then
        for file in $(sed -n 's|^+++ b/||p' "$puzzle/hole.patch"); do
            [ -f "$file" ] || continue
            mkdir -p "$out/copies/$name/solution/$(dirname "$file")"
            cp "$file" "$out/copies/$name/solution/$file"
        done
    fi
    [ -z "$bad" ]
    report $? "$name: its patches apply to today's files and back${bad:+, but not$bad}"
    missing=$(cd "$puzzle" && for patch in *.patch; do
        grep -q "^verdict ${patch%.patch} " check.txt || echo "$patch"
    done | xargs)
    [ -z "$missing" ]
    report $? "$name: check.txt has a verdict on each answer${missing:+, but not on $missing}"
done

# ---- programs ------------------------------------------------------------------------------------

FLAGS='-O0 -g0 -Wno-unused-function -Wno-unused-parameter'

# build LOG FOLDER PROGRAM...: programs of a folder, whose headers come first.
build() {
    local log=$1 folder=$2 program targets=()
    shift 2
    for program in "$@"; do targets+=("$gdb/$folder/$program"); done
    make --no-print-directory DEVICE=cpu PRECISION=fp32 GDB=1 OPTIMIZE="$FLAGS -I$folder" \
        "${targets[@]}" >"$log" 2>&1
}

mapfile -t programs < <(for puzzle in "${puzzles[@]}"; do
    sed -n 's/^program //p' "$puzzle/check.txt" | tr ' ' '\n'
done | sort -u)
: >$out/numbers
for program in "${programs[@]}"; do
    python3 dev/puzzles/answers.py "$out/$program" "$program" >>$out/numbers 2>"$dir/err"
    report $? "$program with all answers: written"
    build "$out/$program.log" "$out/$program" "$program" &
    ln -s "$PWD/$gdb/$out/$program/$program" "$out/programs/$program"
    while [ "$(jobs -rp | wc -l)" -ge "$lanes" ]; do wait -n; done
done
wait
for program in "${programs[@]}"; do
    shown=$out/$program.log
    [ -x "$out/programs/$program" ] && ! grep -qE '(warning|error):' "$out/$program.log"
    report $? "$program with all answers: compiles without a warning"
done

# answers PUZZLE: the hole, and the answers whose turn it is.
answers() {
    local patch turn
    turn=$today
    for patch in "$1"/*.patch; do
        turn=$((turn + 1))
        patch=${patch##*/}
        [ "$patch" = hole.patch ] || [ $((turn % 9)) = 0 ] || [ -n "${ALL:-}${FULL:-}" ] || continue
        echo "${patch%.patch}"
    done
}

# Answers that change more than the bodies of functions have programs of their own.
for puzzle in "${puzzles[@]}"; do
    name=${puzzle##*/}
    for answer in $(sed -n "s/^apart $name //p" $out/numbers | sort -u |
        grep -xFf <(answers "$puzzle")); do
        (
            folder=$out/copies/$name/$answer
            mkdir -p "$folder/programs"
            for program in $(sed -n 's/^program //p' "$puzzle/check.txt"); do
                if [ ! -f "$folder/$program.cu" ]; then
                    for file in "$folder/dev/lessons/$program.cu" "$program.cu" \
                        "dev/lessons/$program.cu"; do
                        [ -f "$file" ] && [ ! -e "$folder/$program.cu" ] || continue
                        ln -s "$PWD/$file" "$folder/$program.cu"
                    done
                fi
                build "$folder.log" "$folder" "$program"
                ln -s "$PWD/$gdb/$folder/$program" "$folder/programs/$program"
            done
        ) &
        while [ "$(jobs -rp | wc -l)" -ge "$lanes" ]; do wait -n; done
    done
done
wait

# ---- verdicts ------------------------------------------------------------------------------------

# check NAME ANSWER: lets the checker judge an answer; its output goes to a file.
check() {
    local programs=$out/programs number level
    number=$(awk -v name="$1" -v answer="$2" '$2 == name && $3 == answer { print $1; exit }' \
        $out/numbers)
    [ "$number" != apart ] || programs=$out/copies/$1/$2/programs
    [[ $number =~ ^[0-9]+$ ]] || number=0
    level=$(sed -n "s/^verdict $2 level \([0-9]*\):.*/\1/p" "dev/puzzles/$1/check.txt" | head -n 1)
    [ -z "${FULL:-}" ] || level=
    local tries=1
    # A race shows itself in most checks, and in one of two.
    ! grep -q "^verdict $2 race:" "dev/puzzles/$1/check.txt" || tries=2
    for ((; tries > 0; tries--)); do
        PUZZLE_ANSWER=$number timeout 200 "$build/dev/puzzles/check" "dev/puzzles/$1" \
            "$out/copies/$1/$2" "$programs" ${3:-} ${level:+--level "$level"} \
            >"$out/checks/$1.$2" 2>&1
        ! grep -qxE 'stars ([0-9]+) of \1' "$out/checks/$1.$2" || continue
        break
    done
}

for puzzle in "${puzzles[@]}"; do
    name=${puzzle##*/}
    [ ! -f "$puzzle/hole.patch" ] || check "$name" solution --exact &
    for answer in $(answers "$puzzle"); do
        while [ "$(jobs -rp | wc -l)" -ge "$lanes" ]; do wait -n; done
        check "$name" "$answer" &
    done
done
wait

# failed_level FILE: the level that a check has ended in.
failed_level() { sed -n 's/^level \([0-9]*\):.*/\1/p' "$1" | tail -n 1; }
# The largest share of the runs of one line that an answer has failed: 100 if there is but one run.
share() {
    sed -n 's/.*; wrong in \([0-9]*\) of \([0-9]*\) runs$/\1 \2/p' "$1" |
        awk 'BEGIN { most = -1 }
            100 * $1 / $2 > most { most = 100 * $1 / $2 }
            END { print most < 0 ? 100 : most }'
}

for puzzle in "${puzzles[@]}"; do
    name=${puzzle##*/}
    levels=$(grep -c '^level ' "$puzzle/check.txt")
    if [ -f "$puzzle/hole.patch" ]; then
        shown=$out/checks/$name.solution
        grep -qx "stars $levels of $levels" "$shown"
        report $? "$name: the solution gets all $levels stars, and its numbers are the budgets"
    fi
    for answer in $(answers "$puzzle"); do
        shown=$out/checks/$name.$answer
        why=
        stars=$(sed -n 's/^stars \([0-9]*\) of .*/\1/p' "$shown")
        while read -r rule; do
            case $rule in
                'stars '*)
                    [ "$rule" = "stars $stars" ] || why="$why; not $rule but ${stars:-none}"
                    ;;
                'race: '*)
                    [ "${stars:-$levels}" -lt "$levels" ] || why="$why; it passes"
                    [[ $(failed_level "$shown") == [12] ]] || why="$why; not at level 1 or 2"
                    grep -qF -- "${rule#*: }" "$shown" || why="$why; no '${rule#*: }'"
                    ;;
                'level '*)
                    level=${rule%%:*} level=${level#level }
                    [ "${stars:-$levels}" -lt "$levels" ] || why="$why; it passes"
                    [ "$(failed_level "$shown")" = "$level" ] || why="$why; not at level $level"
                    grep -qF -- "${rule#*: }" "$shown" || why="$why; no '${rule#*: }'"
                    ;;
            esac
        done < <(sed -n "s/^verdict $answer //p" "$puzzle/check.txt")
        grep -q "^verdict $answer race:" "$puzzle/check.txt" ||
            [ "$(share "$shown" | cut -d. -f1)" -ge 50 ] ||
            why="$why; only $(share "$shown")% of the runs"
        rule=$(sed -n "s/^verdict $answer //p" "$puzzle/check.txt" | head -n 1)
        [ -z "$why" ]
        report $? "$name: $answer: $rule${why:+, but${why#;}}"
    done
done

finish
