#!/usr/bin/env bash
# break.sh [N [change]]: breaks a trainer as an experiment of the course does, builds it
# unoptimised, and runs the page's commands. It works on a copy, build/break/NAME, so the checkout
# stays as it is. Without N: the list of experiments, doc/experiments/list.txt. `change` makes the
# copy only. The commands are a block of code of the page, behind `<!-- run NAME -->`. Its sed or
# patch line makes the change, and its make line names the programs.
set -eu
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
unset MAKEFLAGS MFLAGS MAKELEVEL  # the flags of an outer make would change what make does here
list=doc/experiments/list.txt

if [ $# = 0 ] || [ -z "$1" ]; then
    grep -v '^#' $list | awk '{ name = $1; page = $2; sub(/^[^ ]+ +[^ ]+ +/, "")
        printf "%4d  %-76s %s\n", NR, $0, page }'
    echo 'make break N=2 breaks a copy, builds it and runs it'
    exit
fi
read -r name page what < <(grep -v '^#' $list | sed -n "$1p" 2>/dev/null) || {
    echo "error: there is no experiment '$1': \`make break\` lists them" >&2
    exit 2
}
copy=build/break/$name programs=build/cpu-fp32${MPI:+-$MPI}/build/break/$name

# The block of commands, one command a line.
commands() {
    awk -v begin="<!-- run $name -->" '
        $0 == begin { on = 1 } on && /^```$/ { exit } on && !/^(<!--|```)/' "$page" |
        sed -e ':a' -e '/\\$/N; s/\\\n */ /; ta'
}

# The page's change, made on a copy.
eval "words=($(commands | grep -m 1 -E '^(sed -i|patch) '))"
mkdir -p "$copy"
case ${words[0]} in
    sed)
        source=${words[3]} target=$copy/$(basename "${words[3]}")
        sed "${words[2]}" "$source" >"$copy/new"
        ;;
    patch)
        source=${words[3]} target=$copy/${words[2]}
        patch -s -o "$copy/new" "$source" "${words[4]}"
        ;;
esac
if cmp -s "$source" "$copy/new"; then
    echo "error: the change of $name does not fit $source any more" >&2
    exit 1
fi
cmp -s "$copy/new" "$target" 2>/dev/null || cp "$copy/new" "$target"  # else nothing is built again
rm "$copy/new"
echo "$what ($page):"
diff -U 1 "$source" "$target" | tail -n +3 | grep -v '^@@' || true
[ "${2:-}" != change ] || exit 0
echo

# The programs of the page's make line, unoptimised: the broken one and the right one.
wanted=()
for word in $(commands | grep '^make '); do
    case $word in
        build/tools/*) wanted+=("$word") ;;
        build/cpu-*)
            wanted+=("$programs/${word##*/}")
            [ -f "$copy/${word##*/}.cu" ] || cp "${word##*/}.cu" "$copy"
            ;;
    esac
done
echo "building $target"
make --no-print-directory DEVICE=cpu PRECISION=fp32 OPTIMIZE='-O0 -g0' "${wanted[@]}" \
    >"$copy/log" 2>&1 || {
    cat "$copy/log" >&2
    exit 1
}

# The other commands, with these programs and this machine's launcher.
. dev/launch.sh
commands | grep -vE '^(sed -i|patch|make|git checkout) ' |
    sed "s|mpirun --oversubscribe|$launch|; s|build/cpu-[a-z0-9-]*/|$programs/|g" >"$copy/run.sh"
OMP_NUM_THREADS=1 bash "$copy/run.sh"
echo
echo "Why? $page explains it. The broken trainer is $target; the checkout is as it was."
