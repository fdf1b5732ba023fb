#!/usr/bin/env bash
# nearest.sh WORD NAME...: prints the NAME from which the fewest letters differ, if these are at
# most a third of WORD's.
set -eu
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
word=$1
shift
printf '%s\n' "$@" | awk -v word="$word" '
    function least(a, b) { return a < b ? a : b }
    function distance(a, b,    i, j, row, diagonal, before) {
        for (j = 0; j <= length(b); j++) row[j] = j
        for (i = 1; i <= length(a); i++) {
            diagonal = row[0]
            row[0] = i
            for (j = 1; j <= length(b); j++) {
                before = row[j]
                change = diagonal + (substr(a, i, 1) != substr(b, j, 1))
                row[j] = least(change, least(before, row[j - 1]) + 1)
                diagonal = before
            }
        }
        return row[length(b)]
    }
    BEGIN { best = length(word) / 3 + 0.5 }
    { d = distance(word, $0); if (d < best) { best = d; name = $0 } }
    END { if (name) print name }'
