#!/usr/bin/env bash
# reproduce.sh [small] [BUILD]: a run that one can believe. Trains a GPT-2 of 10.8 million parameters on text that is in
# a package of Debian, for as many steps as fit into REPRODUCE_SECONDS (default 480) on this machine, and prints its
# validation curve; compares the first steps of 1 rank with those of 8 ranks; and, where PyTorch is installed, 300 steps
# of a small model with PyTorch's own training. `small` does the same in seconds with a tiny model, for `make test`.
#
# The text: the modules of Perl (package perl-modules-5.*, licensed as Perl itself: Artistic or GPL), or, where they are
# not installed, the licenses that every Debian has in /usr/share/common-licenses (package base-files; verbatim copies
# are permitted).
set -eu
cd "$(dirname "$0")/.."
small=
[ "${1:-}" = small ] && small=1 && shift
build=$(realpath -m "${1:-build/cpu-fp32}")
out=${OUT:-build/reproduce${small:+-small}}
python=${PYTHON:-python3}
export OMP_WAIT_POLICY=passive
launch=${MPIRUN:-mpirun}
if [ -z "${MPIRUN:-}" ] && mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
    launch="mpirun --oversubscribe --bind-to none"
    [ "$(id -u)" = 0 ] && launch="$launch --allow-run-as-root"
fi
mkdir -p "$out"

# ---- the text --------------------------------------------------------------------------------------------------------

mapfile -t files < <(find -L /usr/share/perl/ -name '*.p[om]*' -type f 2>/dev/null | LC_ALL=C sort)
what='modules of Perl (package perl-modules-5.*, Artistic or GPL)'
if [ ${#files[@]} -lt 100 ]; then
    mapfile -t files < <(find -L /usr/share/common-licenses/ -type f 2>/dev/null | LC_ALL=C sort)
    what='licenses (package base-files, verbatim copies permitted)'
fi
[ ${#files[@]} -gt 0 ] || { echo 'error: neither /usr/share/perl nor /usr/share/common-licenses is there' >&2; exit 2; }
[ -z "$small" ] || files=("${files[@]:0:20}")
build/tools/byte_corpus "$out/train.bin" "$out/val.bin" "${files[@]}" >"$out/corpus"
echo "text         ${#files[@]} files: $what"
sed 's/^/             /' "$out/corpus"

# ---- one run ---------------------------------------------------------------------------------------------------------

model='--layers 6 --heads 6 --channels 384 --seq 128'
batch='--micro-batch 8 --global-batch 8'
every=50 steps=0
[ -z "$small" ] || { model='--layers 4 --heads 4 --channels 32 --seq 32'; every=10 steps=30; }
# shellcheck disable=SC2086
train() { "$build/train_gpt" --train-data "$out/train.bin" $model $batch "$@" >"$out/output" 2>&1 </dev/null; }
if [ $steps = 0 ]; then
    train --shuffle 1 --steps 4 --log "$out/speed.jsonl"
    ms=$(sed -n 's/.*"step":4,.*"ms":\([0-9]*\).*/\1/p' "$out/speed.jsonl")
    steps=$((1000 * ${REPRODUCE_SECONDS:-480} / (ms > 0 ? ms : 1)))
    steps=$((steps < 50 ? 50 : steps > 3000 ? 3000 : steps))
fi
train --val-data "$out/val.bin" --shuffle 1 --steps $steps --lr 1e-3 --warmup $((steps / 20)) --val-every $every \
    --val-batches 20 --log "$out/main.jsonl"
grep -m1 '^model' "$out/output"
echo "run          $steps steps of 8 sequences, one rank; step and validation loss:"
sed -n 's/.*"step":\([0-9]*\),"val_loss":\([^,}]*\).*/             \1 \2/p' "$out/main.jsonl"
build/tools/loss --out "$out/loss.svg" "$out/main.jsonl" >/dev/null 2>&1 && echo "             curve: $out/loss.svg"

# ---- one rank and eight ----------------------------------------------------------------------------------------------

ranks=20
train --shuffle 1 --steps $ranks --lr 1e-3 --lr-final 1 --warmup 5 --log "$out/one.jsonl" --micro-batch 2
# shellcheck disable=SC2086
OMP_NUM_THREADS=1 $launch -n 8 "$build/train_gpt_3d" --train-data "$out/train.bin" $model --global-batch 8 \
    --micro-batch 2 --shuffle 1 --steps $ranks --lr 1e-3 --lr-final 1 --warmup 5 --log "$out/eight.jsonl" \
    --tensor 2 --data 2 --pipeline 2 >"$out/output" 2>&1 </dev/null
losses() { sed -n 's/.*"loss":\([^,]*\),.*/\1/p' "$1"; }
paste -d' ' <(losses "$out/one.jsonl") <(losses "$out/eight.jsonl") | awk -v n=$ranks '
    { d = $1 - $2; if (d < 0) d = -d; if (d > worst) worst = d }
    END { printf "1 and 8 ranks the losses of %d steps differ by at most %.1e\n", NR, worst; exit NR != n || worst > 1e-4 }'

# ---- PyTorch ---------------------------------------------------------------------------------------------------------

if "$python" -c 'import torch, transformers' 2>/dev/null; then
    [ -n "$small" ] && n=20 || n=300
    model='--layers 2 --heads 4 --channels 64 --seq 64'
    rm -rf "$out/start"
    train --shuffle 0 --steps 0 --out "$out/start"
    train --shuffle 0 --steps $n --lr 1e-3 --lr-final 1 --log "$out/torch.jsonl" --init "$out/start/step-00000000"
    "$python" dev/data/compare_torch.py "$out/start/step-00000000" "$out/train.bin" "$out/torch.jsonl" --seq 64 --batch 8 \
        --lr 1e-3 --steps $n 2>"$out/torch.err" || { tail -n 3 "$out/torch.err" >&2; exit 1; }
else
    echo 'PyTorch      torch and transformers are not installed: not compared'
fi
