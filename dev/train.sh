#!/usr/bin/env bash
# train.sh COMMAND... [then COMMAND...]: the steps of `make train` around its runs. Starts the
# first command. After Ctrl-C it prints the command that continues. At its end it starts the second
# (on the virtual clock), draws pictures and shows the results. The Makefile gives OUT, DIR (of the
# programs), RANKS, LAYOUT, TRACE (of the run to draw) and RESUME in the environment.
set -u
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac

# value KEY FILE: a number of a trainer.json.
value() { sed -n "s/^  \"$1\": \([0-9]*\),*\$/\1/p" "$2"; }

# Sets checkpoint, the one in $OUT that was saved last, and its step; empty if there is none. False
# if its run is over.
unfinished() {
    local file saved last=-1
    checkpoint='' step=''
    for file in "$OUT"/step-*/trainer.json; do
        [ -f "$file" ] || continue
        saved=$(value save "$file")
        [ "${saved:-0}" -gt "$last" ] || continue
        last=${saved:-0}
        checkpoint=${file%/*}
        step=$(value step "$file")
    done
    [ -n "$checkpoint" ] && [ "$step" -lt "$(value steps "$checkpoint/trainer.json")" ]
}

# Prints a command as it can be pasted, in lines of at most 100 columns.
show() {
    local word line=
    for word in "$@"; do
        word=$(printf '%q' "$word")
        if [ $((${#line} + ${#word})) -gt 97 ]; then
            echo "$line \\"
            line=$'    '$word
        else
            line+=${line:+ }$word
        fi
    done
    echo "$line"
}

# size FLAG: the number that LAYOUT gives to it, or 1.
size() {
    local value
    value=$(sed -n "s/.*--$1[ =]\([0-9]*\).*/\1/p" <<<"$LAYOUT")
    echo "${value:-1}"
}

# The work of the ranks, in one sentence.
story() {
    local t p d said
    t=$(size tensor) p=$(size pipeline)
    d=$((RANKS / (t * p)))
    said="$RANKS ranks trained one model of $parameters parameters:"
    [ "$RANKS" != 1 ] || said="One rank trained a model of $parameters parameters"
    [ "$t" = 1 ] || said+=" each matrix was cut into $t (tensor),"
    [ "$p" = 1 ] || said+=" the layers into $p stages (pipeline),"
    [ "$d" = 1 ] || said+=" the batch into $d shares (data),"
    fold -s -w 80 <<<"${said%,}."
}

# The row of the mean over the ranks, in two lines.
times() {
    local clock=
    [[ $TRACE == */virtual.json ]] && clock=' on the virtual clock, where each rank has a device'
    awk -v clock="$clock" '
        $1 == "mean" {
            printf "A step took %.1f ms%s:\n", $2, clock
            printf "%.0f%% compute, %.0f%% optimizer; waiting: ", $4, $6
            printf "%.0f%% for tensor ranks, %.0f%% for stages, ", $8, $10
            printf "%.0f%% for data ranks, %.0f%% else.\n", $12, $14
        }' "$OUT/profile.txt"
}

train=()
while [ $# -gt 0 ] && [ "$1" != 'then' ]; do
    train+=("$1")
    shift
done
[ $# -eq 0 ] || shift

before=0  # steps that an earlier run has done
if unfinished && [ -z "$RESUME" ]; then
    echo "note: $checkpoint is of a run that was stopped. This one starts anew;" \
        "make train RESUME=1 would go on"
fi
[ -z "$RESUME" ] || before=${step:-0}
show "${train[@]}"
# After Ctrl-C the ranks save, and the trainer's sentence comes; then ours.
trap 'stopped=1' INT TERM HUP
stopped=
env "${train[@]}"
code=$?
if unfinished && { [ -n "$stopped" ] || [ $code = 0 ]; }; then
    echo "make train RESUME=1 goes on from step $step"
    exit 0
fi
[ -z "$stopped" ] || exit 130
[ $code = 0 ] || exit $code
trap - INT TERM HUP

set -e
[ $# -eq 0 ] || { env "$@" >/dev/null && before=0; }
build/tools/timeline --step $((before + 5)) --pipeline "$(size pipeline)" \
    --out "$OUT/timeline.svg" "$TRACE" 2>"$OUT/timeline.txt"
build/tools/profile --out "$OUT/profile.svg" "$TRACE" >"$OUT/profile.txt"
echo
build/tools/loss --text --out "$OUT/loss.svg" "$OUT/log.jsonl"
echo
look=("$DIR/train_gpt" --init "$checkpoint" --steps 0 --sample-every 1)
parameters=$("${look[@]}" --dry-run | sed -n 's/.*: \([0-9]*\) parameters$/\1/p')
story
times
echo "It learns byte by byte, has read half a megabyte, and writes words that nearly exist:"
for prompt in 'static inline ' 'The tensor ' 'int '; do
    "${look[@]}" --sample-tokens 76 --prompt "$prompt" | sed -n '/^sample: /,$p' |
        sed 's/^sample: //' | tr -s ' \n' ' ' | sed 's/^/    /'
    echo
done
echo
echo "checkpoint   $checkpoint"
echo "log          $OUT/log.jsonl    loss curve $OUT/loss.svg"
echo "trace        $OUT/trace.json   timeline   $OUT/timeline.svg"
echo "profile      $OUT/profile.txt   drawn in   $OUT/profile.svg"
echo "next: ${look[*]} --seed 2 --prompt 'int main(': let it write more"
echo "next: doc/explorer.html#tour in a browser: ten questions about what you have just run"
echo "next: README.md#the-course, and make lessons: what each trainer adds"
echo "next: make train LAYOUT='--tensor 4 --pipeline 2': another layout;" \
    "the losses differ by rounding alone"
