#!/usr/bin/env bash
# lessons.sh [LESSON]: prints every edge of the tree of trainers, or the edge to one. An edge is
# the diff of the two files, one function at a time, each under its name. Line 2 of a lesson names
# its parent; the four at the top follow each other.
set -eu
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

# On a terminal a long diff is read in a pager, in colours.
if [ -t 1 ] && command -v less >/dev/null; then
    export LESSONS_COLOR=1
    "$0" "$@" | less -FRX && rc=${PIPESTATUS[0]}
    [ "$rc" = 141 ] && rc=0  # the reader has seen enough
    exit "$rc"
fi
paint=
if [ -n "${LESSONS_COLOR:-}" ] || [ -t 1 ]; then
    paint=$(printf '; s/^-.*/\033[31m&\033[m/; s/^+.*/\033[32m&\033[m/')
fi

# Cuts a trainer into a folder: a file for each function, struct or other part, named by its place
# and its name.
cut_parts() {  # cut_parts FILE FOLDER
    awk -v folder="$2" '
        function flush() {
            printf "%s", text > (folder "/" name)
            close(folder "/" name)
            text = ""
        }
        /^\/\/ -----/ && !parts++ { name = "head of the file"; flush() }
        { text = text $0 "\n" }
        /^(static |int main|struct ).*[({]/ {
            name = $0
            if (/^struct/) sub(/ [:{].*/, "", name)
            else { sub(/[[(].*/, "", name); sub(/.*[ *]/, "", name) }
            if (/}$/) flush()
        }
        /^}/ { flush() }' "$1"
}

edge() {  # edge PARENT CHILD
    local old new part
    old=$(mktemp -d) new=$(mktemp -d)
    cut_parts "$1" "$old"
    cut_parts "$2" "$new"
    printf '==== %s -> %s: %s lines added, %s removed ====\n' "$1" "$2" \
        "$(diff "$1" "$2" | grep -c '^>' || true)" "$(diff "$1" "$2" | grep -c '^<' || true)"
    # in the order of the child; a function that only the parent has comes last
    { ls -tr "$new"; ls -tr "$old"; } | awk '!seen[$0]++' | while IFS= read -r part; do
        touch "$old/$part" "$new/$part"
        cmp -s "$old/$part" "$new/$part" && continue
        printf -- '---- %s\n' "$part"
        diff -U2 "$old/$part" "$new/$part" | sed "1,3d; s/^@@.*/ .../$paint"
    done
    rm -rf "$old" "$new"
}

edges=('train_gpt.cu train_gpt_tp.cu' 'train_gpt_tp.cu train_gpt_pp.cu' \
    'train_gpt_pp.cu train_gpt_3d.cu')
for lesson in dev/lessons/*.cu; do
    edges+=("$(sed -n '2s,^// parent: ,,p' "$lesson") $lesson")
done
shown=""
names=()
for pair in "${edges[@]}"; do
    read -r parent child <<<"$pair"
    name=$(basename "$child" .cu)
    names+=("$(sed 's/^train_//; s/^gpt_//' <<<"$name")")
    [ -z "${1:-}" ] || [ "$1" = "${name#train_}" ] || [ "train_gpt_$1" = "$name" ] || continue
    edge "$parent" "$child"
    shown=1
done
[ -n "$shown" ] || { echo "no lesson '$1': there are" "${names[@]}" >&2; exit 2; }
