#!/usr/bin/env bash
# reproduce.sh [small] [BUILD]: a run to reproduce. Trains a GPT-2 of 10.8 million parameters on
# text that is in a package of Debian, on 1 rank and on 8. It takes as many steps as fit into
# REPRODUCE_SECONDS (default 600) on this machine, and prints both validation curves. If PyTorch is
# installed, it also trains a small model for 300 steps with PyTorch's own training. The last
# sentence has the largest difference of the losses. More than 1e-4 in the first 20 steps of 1 and 8
# ranks, or from PyTorch, is an error. `small` does the same in seconds with a tiny model, for `make
# test`.
#
# The text is the modules of Perl (package perl-modules-5.*, licensed as Perl itself: Artistic or
# GPL). If they are not installed, it is the licenses that every Debian has in
# /usr/share/common-licenses (package base-files; verbatim copies are permitted).
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
small=
[ "${1:-}" = small ] && small=1 && shift
build=$(realpath -m "${1:-build/cpu-fp32}")
out=${OUT:-build/reproduce${small:+-small}}
python=${PYTHON:-python3}
export OMP_WAIT_POLICY=passive
. dev/launch.sh
if ! [[ ${REPRODUCE_SECONDS:-600} =~ ^[1-9][0-9]{0,7}$ ]]; then
    echo "error: REPRODUCE_SECONDS must be a whole number of seconds, not '$REPRODUCE_SECONDS'" >&2
    exit 2
fi
mkdir -p "$out"

# ---- the text ------------------------------------------------------------------------------------

mapfile -t files < <(find -L /usr/share/perl/ -name '*.p[om]*' -type f 2>/dev/null | LC_ALL=C sort)
what='modules of Perl (package perl-modules-5.*, Artistic or GPL)'
if [ ${#files[@]} -lt 100 ]; then
    mapfile -t files < <(find -L /usr/share/common-licenses/ -type f 2>/dev/null | LC_ALL=C sort)
    what='licenses (package base-files, verbatim copies permitted)'
fi
[ ${#files[@]} -gt 0 ] || { echo \
    'error: neither /usr/share/perl nor /usr/share/common-licenses is there' >&2; exit 2; }
[ -z "$small" ] || files=("${files[@]:0:20}")
build/tools/byte_corpus "$out/train.bin" "$out/val.bin" "${files[@]}" >"$out/corpus"
echo "text         ${#files[@]} files: $what"
sed 's/^/             /' "$out/corpus"

# ---- the runs ------------------------------------------------------------------------------------

model='--layers 6 --heads 6 --channels 384 --seq 128'
every=50 steps=0
[ -z "$small" ] || { model='--layers 4 --heads 4 --channels 32 --seq 32'; every=10 steps=30; }

# Runs a command with its output in $out/output. Shows one in ten of the steps that it reports, with
# the time left, and the end of the output if it fails.
show() {
    local line step of shown=0
    : >"$out/output"
    "$@" 2>&1 </dev/null | while IFS= read -r line; do
        printf '%s\n' "$line" >>"$out/output"
        [[ $line =~ ^step\ +([0-9]+)/([0-9]+)\ .*loss.*left ]] || continue
        step=${BASH_REMATCH[1]} of=${BASH_REMATCH[2]}
        [ $((10 * step / of)) -gt "$shown" ] || continue
        shown=$((10 * step / of))
        echo "             $line"
    done || { tail -n 5 "$out/output" >&2; return 1; }
}
# shellcheck disable=SC2086
train() { show "$build/train_gpt" --train-data "$out/train.bin" $model --micro-batch 8 \
    --global-batch 8 "$@"; }
# shellcheck disable=SC2086
train_on_8() {
    OMP_NUM_THREADS=1 show $launch -n 8 "$build/train_gpt_3d" --train-data "$out/train.bin" $model \
        --global-batch 8 --micro-batch 2 --tensor 2 --data 2 --pipeline 2 "$@"
}
# Prints the ms of the last of four steps of a log.
fourth() { sed -n 's/.*"step":4,.*"ms":\([0-9]*\).*/\1/p' "$1"; }
if [ $steps = 0 ]; then
    echo 'speed        four steps of each, to know how many fit:'
    train --shuffle 1 --steps 4 --log "$out/one.jsonl"
    train_on_8 --shuffle 1 --steps 4 --log "$out/eight.jsonl"
    both=$(($(fourth "$out/one.jsonl") + $(fourth "$out/eight.jsonl") + 1))
    steps=$((1000 * ${REPRODUCE_SECONDS:-600} / both))
    steps=$((steps < 50 ? 50 : steps > 3000 ? 3000 : steps))
fi
flags="--val-data $out/val.bin --shuffle 1 --steps $steps --lr 1e-3 --warmup $((steps / 20))"
flags+=" --val-every $every --val-batches 20"
echo "1 rank       $steps steps of 8 sequences:"
# shellcheck disable=SC2086
train $flags --log "$out/one.jsonl"
grep -m1 '^model' "$out/output"
echo '8 ranks      the same on 2 tensor x 2 data x 2 pipeline:'
# shellcheck disable=SC2086
train_on_8 $flags --log "$out/eight.jsonl"

# ---- the curves ----------------------------------------------------------------------------------

# both NAME: of each step that both logs have NAME of: the step, and the two numbers.
both() {
    LC_ALL=C join \
        <(sed -n 's/.*"step":\([0-9]*\),.*"'"$1"'":\([^,}]*\).*/\1 \2/p' "$out/one.jsonl" |
        LC_ALL=C sort) \
        <(sed -n 's/.*"step":\([0-9]*\),.*"'"$1"'":\([^,}]*\).*/\1 \2/p' "$out/eight.jsonl" |
            LC_ALL=C sort) | sort -n
}
# The largest difference between two columns of at least N rows.
differ() {
    LC_ALL=C awk -v n="$1" '
        { d = $2 - $3; if (d < 0) d = -d; if (!(d <= worst)) worst = d; if (NF != 3) bad = 1 }
        END { if (bad || NR < n) exit 1; printf "%.1e", worst }' ||
        { echo "error: not all losses of 1 and 8 ranks are in $out" >&2; exit 1; }
}
echo 'curve        step, validation loss of 1 rank and of 8 ranks:'
both val_loss | sed 's/^/             /'
build/tools/loss --out "$out/loss.svg" "$out/one.jsonl" "$out/eight.jsonl" >/dev/null 2>&1 &&
    echo "             curves: $out/loss.svg"
compared=20
of_ranks=$(both loss | head -n $compared | differ $compared)
of_curves=$(both val_loss | differ 2)

# ---- PyTorch -------------------------------------------------------------------------------------

if "$python" -c 'import torch, transformers' 2>/dev/null; then
    [ -n "$small" ] && n=20 || n=300
    echo "PyTorch      $n steps of a small model, here and there:"
    model='--layers 2 --heads 4 --channels 64 --seq 64'
    rm -rf "$out/start"
    train --shuffle 0 --steps 0 --out "$out/start"
    train --shuffle 0 --steps $n --lr 1e-3 --lr-final 1 --log "$out/torch.jsonl" \
        --init "$out/start/step-00000000"
    "$python" dev/data/compare_torch.py "$out/start/step-00000000" "$out/train.bin" \
        "$out/torch.jsonl" --seq 64 \
        --batch 8 --lr 1e-3 --steps $n 2>"$out/torch.err" | tee "$out/torch" ||
        { tail -n 3 "$out/torch.err" >&2; exit 1; }
    of_torch=$(sed -n 's/.*losses differ by at most \([^ ]*\) .*/\1/p' "$out/torch")
    : "${of_torch:?what compare_torch.py found is not in $out/torch}"
    with_torch="those of PyTorch in $n steps by at most $of_torch"
else
    with_torch='PyTorch was not compared: torch and transformers are not installed'
fi

# ---- the result ----------------------------------------------------------------------------------

echo "The losses of 1 and 8 ranks differ by at most $of_ranks in $compared steps," \
    "their validation losses by at most $of_curves in $steps; $with_torch."
LC_ALL=C awk -v a="$of_ranks" 'BEGIN { exit !(a + 0 <= 1e-4) }' ||
    { echo 'error: more than 1e-4' >&2; exit 1; }
