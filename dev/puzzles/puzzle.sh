#!/usr/bin/env bash
# puzzle.sh list | begin N | check N | hint N | diff N | give-up N | again N: the commands behind
# `make puzzles` and `make puzzle... N=5`. The learner edits a copy in puzzles/, which git ignores.
# puzzles/progress has a line for each puzzle. README.md beside this file has a puzzle's format.
# Authors of puzzles use two more: puzzle.sh record N NAME makes NAME.patch of the copy, and refresh
# makes all patches again after the real files have changed.
set -u
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.." || exit 1
progress=puzzles/progress
command=${1:-list} number=${2:-}

die() {
    echo "error: $1" >&2
    exit 2
}

# ---- a puzzle ------------------------------------------------------------------------------------

# find_puzzle N: sets nn (two digits), puzzle (its folder) and copy (the learner's).
find_puzzle() {
    [[ $1 =~ ^0*([0-9]{1,2})$ ]] || die "which puzzle? make puzzle N=5; \`make puzzles\` lists them"
    nn=$(printf '%02d' "${BASH_REMATCH[1]}")
    puzzle=$(find dev/puzzles -maxdepth 1 -type d -name "$nn-*" | head -n 1)
    [ -n "$puzzle" ] || die "there is no puzzle ${BASH_REMATCH[1]}: \`make puzzles\` lists them"
    copy=puzzles/$nn
    n=$((10#$nn))
}

# part FILE TITLE: the part of a text.md below that heading, with paths from the root.
part() {
    awk -v title="## $2" '/^## / { on = $0 == title; next } on' "$1" |
        sed '/./,$!d; s|](\.\./\.\./\.\./|](|g'
}
title() { sed -n '1s/^# //p' "$1"; }
minutes() { sed -n 's/^\([0-9]*\) minutes.*/\1/p' "$1" | head -n 1; }
# The real files that a patch changes.
patched() { sed -n 's|^+++ b/||p' "$1"; }
programs() { sed -n 's/^program //p' "$puzzle/check.txt"; }

# source PROGRAM: the real file of a trainer.
source_of() {
    local file
    for file in "$1.cu" "dev/lessons/$1.cu"; do [ -f "$file" ] && echo "$file"; done
}

# make_copy FOLDER PATCH: copies the real files that PATCH changes, and changes them. Files of the
# puzzle's folder `start` are copied as they are.
make_copy() {
    local file
    mkdir -p "$1"
    [ ! -d "$puzzle/start" ] || cp -r "$puzzle/start/." "$1"
    [ -f "$2" ] || return 0
    for file in $(patched "$2"); do
        [ -f "$file" ] || continue
        mkdir -p "$1/$(dirname "$file")"
        cp "$file" "$1/$file"
    done
    patch -s -p1 --no-backup-if-mismatch -d "$1" <"$2"
}

# ---- puzzles/progress ----------------------------------------------------------------------------

# get KEY [ELSE]: a value of this puzzle's line.
get() {
    local value
    value=$(sed -n "s/^$nn .*\b$1=\([^ ]*\).*/\1/p" $progress 2>/dev/null)
    echo "${value:-${2:-0}}"
}

# put KEY VALUE
put() {
    mkdir -p puzzles
    touch $progress
    grep -q "^$nn " $progress ||
        echo "$nn stars=0 of=0 checks=0 hints=0 shown=0 first=$(date +%F)" >>$progress
    if grep -q "^$nn .*\b$1=" $progress; then
        sed -i "/^$nn /s|\b$1=[^ ]*|$1=$2|" $progress
    else
        sed -i "/^$nn /s|\$| $1=$2|" $progress
    fi
    sort -o $progress $progress
}

# picture STARS OF: `**-`
picture() {
    local i
    for ((i = 1; i <= $2; i++)); do
        if [ "$i" -le "$1" ]; then printf '*'; else printf -- '-'; fi
    done
}

# ---- the commands --------------------------------------------------------------------------------

list() {
    local folder all=0 earned=0 next='' note levels
    printf '%3s  %-34s %7s  %-5s  %s\n' '' puzzle minutes stars ''
    for folder in dev/puzzles/[0-9]*/; do
        find_puzzle "$(basename "$folder" | cut -d- -f1)"
        levels=$(grep -c '^level ' "$puzzle/check.txt")
        all=$((all + levels)) earned=$((earned + $(get stars)))
        note=$(sed -n 's/^[0-9]* minutes[.,] *//p' "$puzzle/text.md" | head -n 1 |
            sed 's/\[\([^]]*\)\]([^)]*)/\1/g; s/\.$//; s/^After/after/')
        [ "$(get hints)" = 0 ] || note="$note; hints taken: $(get hints)"
        [ "$(get shown)" = 0 ] || note="$note; solution shown"
        [ -z "$next" ] && [ "$(get stars)" = 0 ] && [ "$(get shown)" = 0 ] && next=$n
        printf '%3d  %-34s %7s  %-5s  %s\n' "$n" \
            "$(title "$puzzle/text.md" | sed 's/^Puzzle [0-9]*\. //')" \
            "$(minutes "$puzzle/text.md")" "$(picture "$(get stars)" "$levels")" "$note"
    done
    echo
    echo "$earned of $all stars.${next:+ Next: make puzzle N=$next}"
}

# Prints where the holes of the copy are.
show_holes() {
    local file
    (
        cd "$copy" || exit
        grep -rnE --include='*.cu' --include='*.cuh' --include='*.h' '// PUZZLE [0-9]' . |
            sed -E "s|^\./|    $copy/|; s|:([0-9]+):.*// PUZZLE [0-9]+ ?(\([a-z]\))?.*|:\1  \2|
                s| *$||"
        for file in ./*.txt; do [ ! -f "$file" ] || echo "    $copy/${file#./}"; done
    )
}

begin() {
    local fresh=1 holes
    if [ -d "$copy" ]; then fresh=; else
        make_copy "$copy" "$puzzle/hole.patch" || die "$puzzle/hole.patch does not apply"
        put started "$(date +%F)"
    fi
    printf '%s (%s minutes)\n\n' "$(title "$puzzle/text.md")" "$(minutes "$puzzle/text.md")"
    part "$puzzle/text.md" Idea
    echo 'Read first:'
    part "$puzzle/text.md" 'Read first'
    echo 'Write here, in the place of what stands between PUZZLE and END:'
    holes=$(show_holes)
    echo "${holes:-    in $copy, where the marks are gone}"
    echo
    [ -n "$fresh" ] ||
        echo "($copy is as you left it. make puzzle-again N=$n begins with a new copy.)"
    echo "Then:   make puzzle-check N=$n      builds it and says what is right and what is not"
    echo "Stuck?  make puzzle-hint N=$n       three hints, one at a time"
}

# outside FRESH COPY: prints the first line at which they differ outside the holes of FRESH.
outside() {
    diff "$1" "$2" | sed -nE 's/^([0-9]+)(,([0-9]+))?[acd].*/\1 \3/p' |
        awk -v fresh="$1" '
            BEGIN {
                while ((getline line < fresh) > 0) {
                    n++
                    if (line ~ /\/\/ PUZZLE [0-9]/) on = 1
                    if (on) inside[n] = inside[n - 1] = 1
                    if (line ~ /\/\/ END [0-9]/) on = 0
                }
            }
            !inside[$1] || !inside[$2 ? $2 : $1] { print $1; exit }'
}

# Says if the copy differs from the real file outside the holes.
compare_outside() {
    local file line fresh=build/puzzles/$nn/fresh
    rm -rf "$fresh"
    [ -f "$puzzle/hole.patch" ] || return 0
    make_copy "$fresh" "$puzzle/hole.patch" >/dev/null || {
        echo "note: the repository's file has changed since; your copy is whole and is checked"
        return 0
    }
    for file in $(patched "$puzzle/hole.patch"); do
        [ -f "$copy/$file" ] || die "$copy/$file is not there: make puzzle-again N=$n"
        line=$(outside "$fresh/$file" "$copy/$file")
        [ -z "$line" ] ||
            echo "note: $copy/$file differs from the repository's file outside the hole, too" \
                "(near line $line)"
    done
}

# Builds the programs of the puzzle, each from the copy where it has it, else from the real file
# with the copy's headers. Links them in build/puzzles/NN/programs.
build() {
    local program targets=() path build=build/cpu-fp32-gdb/
    rm -rf "build/puzzles/$nn/programs"
    mkdir -p "build/puzzles/$nn/programs"
    for program in $(programs); do
        path=$copy/$program
        [ -f "$path.cu" ] || path=$copy/dev/lessons/$program
        if [ ! -f "$path.cu" ]; then
            path=build/puzzles/$nn/$program
            ln -sf "$PWD/$(source_of "$program")" "$path.cu"
        fi
        targets+=("$build$path")
        ln -sf "$PWD/$build$path" "build/puzzles/$nn/programs/$program"
    done
    make --no-print-directory -s DEVICE=cpu PRECISION=fp32 GDB= build/cpu-fp32/dev/puzzles/check ||
        return
    [ ${#targets[@]} = 0 ] ||
        make --no-print-directory -s -j2 DEVICE=cpu PRECISION=fp32 GDB=1 \
            OPTIMIZE="-O0 -g -Wno-unused-function -Wno-unused-parameter -I$copy" "${targets[@]}"
}

check() {
    local log=build/puzzles/$nn/build.log seconds=$SECONDS out=build/puzzles/$nn/check.out stars of
    [ -d "$copy" ] || die "there is no $copy yet: make puzzle N=$n"
    mkdir -p "build/puzzles/$nn"
    title "$puzzle/text.md"
    compare_outside
    put checks $(($(get checks) + 1))
    put last "$(date +%F)"
    if ! build >"$log" 2>&1; then
        grep -v '^build/' "$log" | head -n 40
        echo "It does not compile yet: the compiler's messages stand above."
        return 1
    fi
    grep -v '^build/' "$log" | head -n 15
    echo "built in $((SECONDS - seconds)) s"
    . dev/launch.sh
    MPIRUN=$launch build/cpu-fp32/dev/puzzles/check "$puzzle" "$copy" "build/puzzles/$nn/programs" |
        tee "$out" | grep -v '^stars '
    read -r stars of < <(sed -n 's/^stars \([0-9]*\) of \([0-9]*\)$/\1 \2/p' "$out")
    [ -n "${of:-}" ] || die 'the checker ended without a result'
    [ "$stars" -le "$(get stars)" ] || put stars "$stars"
    put of "$of"
    echo
    if [ "$stars" = "$of" ]; then
        printf 'All stars: %s\n\n' "$(picture "$stars" "$of")"
        part "$puzzle/text.md" Afterwards
        echo "make puzzle-diff N=$n shows your lines beside the repository's. Next: make puzzles"
    else
        echo "$(picture "$stars" "$of")  Edit and check again, or: make puzzle-hint N=$n"
        return 1
    fi
}

all_stars() { [ "$(get of)" -gt 0 ] && [ "$(get stars)" = "$(get of)" ]; }

hint() {
    local taken
    taken=$(get hints)
    # Behind all stars they are read, and not counted.
    if [ "$taken" -ge 3 ] || all_stars; then
        for taken in 1 2 3; do
            printf 'Hint %d of 3.\n' $taken
            part "$puzzle/text.md" "Hint $taken"
        done
        all_stars ||
            echo "There are no more. make puzzle-give-up N=$n shows the solution."
        return
    fi
    put hints $((taken + 1))
    printf 'Hint %d of 3.\n' $((taken + 1))
    part "$puzzle/text.md" "Hint $((taken + 1))"
}

show_diff() {
    local file
    [ -d "$copy" ] || die "there is no $copy yet: make puzzle N=$n"
    [ "$(get stars)" -gt 0 ] || [ "$(get shown)" = 1 ] ||
        die "this shows the solution, and you have no star yet: make puzzle-give-up N=$n"
    for file in $(patched "$puzzle/hole.patch"); do
        diff -u --label "yours: $copy/$file" --label "the repository's: $file" \
            "$copy/$file" "$file" &&
            echo "$copy/$file is the repository's $file, line for line"
    done
}

give_up() {
    put shown 1
    if [ -f "$puzzle/hole.patch" ]; then
        echo "The lines that puzzle $n has taken out:"
        echo
        sed -n '/^--- /d; s|^+++ b/|in |p; /^@@/s/.*//p; s/^-/  /p' "$puzzle/hole.patch"
    else
        echo "A right answer to puzzle $n:"
        echo
        sed -n 's|^+++ b/|in |p; /^@@/s/.*//p; s/^+/  /p' "$puzzle"/right-1-*.patch |
            grep -v '^  ++ '
    fi
    echo
    part "$puzzle/text.md" Afterwards
}

again() {
    local i=1
    if [ -d "$copy" ]; then
        while [ -e "$copy.$i" ]; do i=$((i + 1)); done
        mv "$copy" "$copy.$i"
        echo "your copy is now $copy.$i"
        echo
    fi
    begin
}

# ---- for authors of puzzles ----------------------------------------------------------------------

# record N NAME: the copy's difference from the real files.
record() {
    local file base
    (cd "$copy" && find . -type f | sed 's|^\./||' | sort) | while read -r file; do
        base=$file
        [ -f "$base" ] || base=$puzzle/start/$file
        diff -u --label "a/$file" --label "b/$file" "$base" "$copy/$file"
    done >"$puzzle/$1.patch"
    wc -l "$puzzle/$1.patch"
}

# refresh: applies each patch with fuzz to today's files and writes it again.
refresh() {
    local patch file new=build/puzzles/refresh
    for patch in dev/puzzles/[0-9]*/*.patch; do
        puzzle=$(dirname "$patch")
        rm -rf $new
        make_copy $new "$patch" >/dev/null || {
            echo "$patch does not apply"
            continue
        }
        for file in $(patched "$patch"); do
            [ -f "$file" ] || continue
            diff -u --label "a/$file" --label "b/$file" "$file" "$new/$file"
        done >$new.patch
        [ ! -s $new.patch ] || cmp -s $new.patch "$patch" || {
            cp $new.patch "$patch"
            echo "$patch"
        }
    done
}

case $command in
    list) list ;;
    refresh) refresh ;;
    begin | check | hint | again | record)
        find_puzzle "$number"
        "$command" "${@:3}"
        ;;
    diff)
        find_puzzle "$number"
        show_diff
        ;;
    give-up)
        find_puzzle "$number"
        give_up
        ;;
    *) die "usage: $0 list | begin N | check N | hint N | diff N | give-up N | again N" ;;
esac
