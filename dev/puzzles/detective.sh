#!/usr/bin/env bash
# detective.sh open|answer|hint|give-up|list [N] [AT]: the detective cases. A case is a trainer
# with one planted bug. Its folder dev/puzzles/dN-NAME has the bug as a patch of the real file, and
# the page text.md. `open` builds the suspect, puzzles/dN/suspect, and deletes its source. An
# answer is a place in the real files, FILE:LINE. puzzles/progress has a line for each case:
#
#     d1 stars=2 tries=2 today=2026-11-27:2 hints=1 closed=found
set -eu
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.."
unset MAKEFLAGS MFLAGS MAKELEVEL  # the flags of an outer make would change what make does here
what=$1 number=${2:-} at=${3:-}
progress=puzzles/progress
tries_a_day=5
near=3  # lines around the bug that count as the place

fail() { # fail MESSAGE: bad input
    echo "error: $1" >&2
    exit 2
}

# ---- the case -----------------------------------------------------------------------------------

cases() { echo dev/puzzles/d[1-9]-*; }
title() { sed -n '1s/^# Case [0-9]\. //p' "$1/text.md"; }
trainer() { sed -n '3s/.*The suspect is `\([a-z0-9_]*\)`.*/\1/p' "$1/text.md"; }
minutes() { sed -n '3s/^\([0-9]*\) minutes.*/\1/p' "$1/text.md"; }
suspected() { sed -n '1s,^--- a/,,p' "$1/bug.patch"; } # the file that the patch changes
section() { # section HEADING: of the case's page
    awk -v heading="## $1" '/^## / { on = $0 == heading; next } on' "$folder/text.md"
}

if [ "$what" != list ]; then
    folder=$(echo "dev/puzzles/d$number"-*)
    [ -n "$number" ] && [ -f "$folder/text.md" ] ||
        fail "there is no case '$number': make detective lists them, make detective N=1 opens one"
    key=d$number
fi

# ---- progress -----------------------------------------------------------------------------------

field() { # field KEY NAME: of the line of a case; nothing if there is none
    [ -f "$progress" ] || return 0
    awk -v key="$1" -v name="$2=" '$1 == key {
        for (i = 2; i <= NF; i++) if (index($i, name) == 1) print substr($i, length(name) + 1)
    }' "$progress"
}

number_of() { # number_of NAME: the same for this case, as a number
    local value
    value=$(field "$key" "$1")
    echo "${value:-0}"
}

save() { # save STARS TRIES TODAY HINTS CLOSED: replaces the line of this case
    mkdir -p puzzles
    touch "$progress"
    {
        grep -v "^$key " "$progress" || true
        echo "$key stars=$1 tries=$2 today=$3 hints=$4 closed=$5"
    } | sort >"$progress.new"
    mv "$progress.new" "$progress"
}

drawn() { printf '%.*s%.*s' "$1" '***' $((3 - $1)) '---'; } # drawn STARS

# ---- the suspect --------------------------------------------------------------------------------

# Builds the suspect from copies below build/, and deletes the copies. A patched header hides the
# real one, because -I comes first.
build() {
    local copy=build/$key program=build/cpu-fp32${MPI:+-$MPI}/build/$key file source
    file=$(suspected "$folder")
    source=$(trainer "$folder").cu
    [ -f "$source" ] || source=dev/lessons/$source
    rm -rf "$copy"
    mkdir -p "$copy/$(dirname "$file")" "puzzles/$key"
    cp "$source" "$copy"
    if [ "$file" = "$source" ]; then
        file=${file##*/}
        source=$copy/$file.real
        cp "$copy/$file" "$source"
    else
        source=$file
    fi
    patch -s --no-backup-if-mismatch -o "$copy/$file.new" "$source" "$folder/bug.patch" ||
        fail "the bug does not fit this version of $(suspected "$folder")"
    mv "$copy/$file.new" "$copy/$file"
    make --no-print-directory DEVICE=cpu PRECISION=fp32 OPTIMIZE="-O0 -g0 -I$copy" \
        "$program/$(trainer "$folder")" >"$copy/log" 2>&1 || { cat "$copy/log" >&2 && exit 1; }
    mv "$program/$(trainer "$folder")" "puzzles/$key/suspect"
    rm -rf "$copy" "$program"
}

# Root must tell Open MPI so.
commands() {
    . dev/launch.sh
    case $launch in
        *--allow-run-as-root*) sed 's/mpirun /&--allow-run-as-root /' ;;
        *) cat ;;
    esac
}

open_case() {
    if [ ! -x "puzzles/$key/suspect" ]; then
        echo "building the suspect, which takes some 15 seconds"
        build
    fi
    [ -n "$(field "$key" stars)" ] || save 0 0 - 0 no
    echo
    echo "Case $number: $(title "$folder") ($(minutes "$folder") minutes)"
    section Symptom
    echo "puzzles/$key/suspect is $(trainer "$folder") with one bug, in its file or in a header of"
    echo 'llmc/. The files of this checkout do not have the bug. Begin with:'
    section 'Begin with' | commands
    cat <<END
You know the place? make detective-answer N=$number AT=FILE:LINE, a line of this checkout's files.
You are stuck?      make detective-hint N=$number
END
}

# ---- an answer ----------------------------------------------------------------------------------

# Prints the first and the last line of the real file that the bug changes.
changed_lines() {
    local bad
    bad=$(mktemp)
    patch -s --no-backup-if-mismatch -o "$bad" "$file" "$folder/bug.patch"
    diff "$file" "$bad" | sed -n 's/^\([0-9]*\),\{0,1\}\([0-9]*\)[acd].*/\1 \2/p' |
        awk 'NR == 1 { first = $1 } { last = NF > 1 ? $2 : $1 } END { print first, last }'
    rm -f "$bad"
}

# Prints the name of the function that has a line, or comes next after it.
function_at() { # function_at FILE LINE
    awk -v line="$2" '
        /^[a-z].*\(/ && !/;$/ { name = $0; sub(/\(.*/, "", name); sub(/.*[ *]/, "", name) }
        /^}/ && NR >= line { print name; exit }' "$1"
}

answer_file() { # answer_file PATH: the file of this checkout that a path or a bare name means
    local found
    found=$(find train_gpt*.cu dev/lessons llmc -type f \( -path "*/$1" -o -path "$1" \))
    head -n 1 <<<"$found"
}

reward() { # reward STARS SENTENCE: the case is solved
    save "$1" "$tries" "$today" "$(number_of hints)" found
    echo "$(drawn "$1")  $2"
    explain
}

explain() {
    echo
    sed '1,2d' "$folder/bug.patch"
    section Afterwards
}

# Judges an answer by its place: the hunk, the function, the file.
answer() {
    local said line first last date tries today stars
    [ -n "$(field "$key" stars)" ] || fail "open the case first: make detective N=$number"
    [[ $at =~ ^([^:]+):([0-9]+)$ ]] ||
        fail "an answer is FILE:LINE: make detective-answer N=$number AT=train_gpt_3d.cu:437"
    said=$(answer_file "${BASH_REMATCH[1]}") line=${BASH_REMATCH[2]}
    [ -n "$said" ] || fail "there is no file ${BASH_REMATCH[1]} among the trainers and llmc/"
    [ "$line" -ge 1 ] && [ "$line" -le "$(wc -l <"$said")" ] ||
        fail "$said has $(wc -l <"$said") lines"

    file=$(suspected "$folder")
    stars=$(number_of stars) tries=$(number_of tries)
    if [ "$(field "$key" closed)" != no ]; then
        echo "This case is closed: $(drawn "$stars")"
        explain
        return
    fi
    date=$(date +%F) today=$(field "$key" today)
    [ "${today%:*}" = "$date" ] || today=$date:0
    if [ "${today#*:}" -ge $tries_a_day ]; then
        echo "Five answers a day are judged: more tomorrow. A hint: make detective-hint N=$number"
        return
    fi
    today=$date:$((${today#*:} + 1)) tries=$((tries + 1))

    read -r first last <<<"$(changed_lines)"
    if [ "$said" = "$file" ] && [ "$line" -ge $((first - near)) ] &&
        [ "$line" -le $((last + near)) ]; then
        reward $((tries < 3 ? 4 - tries : 1)) "That is the place: answer number $tries."
        return
    fi
    if [ "$said" != "$file" ]; then
        echo "No: the bug is in another file than $said."
    elif [ "$(function_at "$file" "$line")" != "$(function_at "$file" "$first")" ]; then
        echo "No: the file is right, but the bug is in another function than" \
            "$(function_at "$file" "$line")."
    else
        echo "The function is right, $(function_at "$file" "$line"), but not the line."
        [ "$stars" -gt 0 ] || stars=1
    fi
    save "$stars" "$tries" "$today" "$(number_of hints)" no
    echo "$((tries_a_day - ${today#*:})) answers are left for today."
}

hint() {
    local next
    [ -n "$(field "$key" stars)" ] || fail "open the case first: make detective N=$number"
    next=$(($(number_of hints) + 1))
    [ $next -le 3 ] || next=3
    save "$(number_of stars)" "$(number_of tries)" "$(field "$key" today)" $next \
        "$(field "$key" closed)"
    echo "Hint $next of 3:"
    section "Hint $next"
}

give_up() {
    [ -n "$(field "$key" stars)" ] || fail "open the case first: make detective N=$number"
    [ "$(field "$key" closed)" != no ] ||
        save "$(number_of stars)" "$(number_of tries)" "$(field "$key" today)" \
            "$(number_of hints)" shown
    echo "The bug of case $number is in $(suspected "$folder"):"
    explain
}

list() {
    local name stars
    for folder in $(cases); do
        name=${folder#dev/puzzles/} name=${name%%-*}
        stars=$(field "$name" stars)
        printf '%4s  %-50s %3d min  %s  %s\n' "${name#d}" "$(title "$folder")" \
            "$(minutes "$folder")" "$(drawn "${stars:-0}")" \
            "$(field "$name" closed | sed 's/^no$/open/')"
    done
    echo 'make detective N=1 opens a case'
}

case $what in
    open) open_case ;;
    answer) answer ;;
    hint) hint ;;
    give-up) give_up ;;
    list) list ;;
    *) fail 'usage: detective.sh open|answer|hint|give-up|list [N] [AT]' ;;
esac
