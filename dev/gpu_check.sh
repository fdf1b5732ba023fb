#!/usr/bin/env bash
# gpu_check.sh: one command for a machine with a GPU. Builds for CUDA in both precisions, runs the whole suite there,
# times every kernel, and measures GPT-2 124M at T = 1024 in bf16: tokens/s and MFU of train_gpt, and PyTorch's tokens/s
# beside it where PyTorch is installed. Everything, with commands, versions, GPU and date, goes to dev/results/.
#
#   MICRO_BATCH=32 STEPS=40 dev/gpu_check.sh
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
exec </dev/null

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if [ "$gpus" -eq 0 ]; then
    echo "no GPU here: nvidia-smi lists none, and this check is for a machine with one (make test needs none)"
    exit 1
fi
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
if [ ! -x "$nvcc" ]; then
    echo "no nvcc in PATH or /usr/local/cuda/bin: install the CUDA toolkit, version 12 or later"
    exit 1
fi

steps=${STEPS:-40}
seq=1024
name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
base=dev/results/$(printf '%s' "$name" | tr -cs 'A-Za-z0-9' '-')-$(date -u +%Y-%m-%d)
report=$base.txt
work=build/gpu-check
mkdir -p dev/results "$work"
: >"$report"
failed=0

say() { echo "$*" | tee -a "$report"; }

# run COMMAND...: runs it, shows and keeps command and output; its exit code is the command's.
run() {
    say ""
    say "\$ $*"
    "$@" 2>&1 | tee -a "$report"
    local code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || say "(exit code $code)"
    return "$code"
}

# ---- what this machine is ----------------------------------------------------------------------------------

# The first line of a command's output that matches, or "not found".
version() {
    local pattern=$1 line
    shift
    line=$("$@" 2>/dev/null | grep -m1 -E "$pattern")
    echo "${line:-not found}"
}
say "date:     $(date -u '+%Y-%m-%d %H:%M UTC')"
say "commit:   $(git describe --always --dirty 2>/dev/null || echo 'no git')"
say "GPU:      $name ($gpus of them), driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)"
say "clocks:   $(nvidia-smi --query-gpu=clocks.max.sm,clocks.max.memory,power.limit --format=csv,noheader | head -n 1)"
say "CUDA:     $(version release "$nvcc" --version)"
say "compiler: $(version . "${CXX:-g++}" --version)"
say "MPI:      $(version . mpirun --version)"
say "PyTorch:  $(version . python3 -c 'import torch; print(torch.__version__, "CUDA", torch.version.cuda)')"

# ---- the suite and the kernels -----------------------------------------------------------------------------
# NCCL refuses ranks that share a GPU; its calls are then carried by MPI.

carrier=()
if [ "$gpus" -lt 8 ]; then
    carrier=(NCCL=mpi)
    say "NCCL:     carried by MPI, because the tests start 8 ranks"
fi
find build -maxdepth 1 -name 'cuda-*' -exec rm -rf {} +  # what another carrier has built
run make test DEVICE=cuda "${carrier[@]}" || failed=1
LOG=$base-kernels.jsonl run make bench DEVICE=cuda "${carrier[@]}" || failed=1

# ---- a whole training step ---------------------------------------------------------------------------------

# A number as four bytes, the lowest first.
int32() {
    local i
    for i in 0 8 16 24; do printf '%b' "\\x$(printf '%02x' $((($1 >> i) & 255)))"; done
}

# shard FILE TOKENS: random tokens in the format of the data shards. Every byte is below 196, so that every token is
# below 50257.
shard() {
    {
        int32 20240520
        int32 1
        int32 "$2"
        head -c 1012 /dev/zero
        head -c $(($2 * 2)) /dev/urandom | LC_ALL=C tr '\304-\377' '\000-\073'
    } >"$1"
}

trainer=build/cuda-bf16/train_gpt
micro=${MICRO_BATCH:-32}
shard "$work/tokens.bin" $((micro * seq * (steps + 1) + 1))
while :; do
    rm -f "$work/log.jsonl"
    begin=$(($(wc -l <"$report") + 1))
    run "$trainer" --model d12 --max-seq $seq --seq $seq --micro-batch "$micro" --global-batch "$micro" --steps "$steps" \
        --train-data "$work/tokens.bin" --log "$work/log.jsonl" && break
    if [ "$micro" -le 1 ]; then
        failed=1
        break
    fi
    micro=$((micro / 2))
    say "trying $micro sequences at a time"
done

say ""
if [ -s "$work/log.jsonl" ]; then
    # The median step; the first ten warm up.
    median=$(tail -n +"$begin" "$report" | grep -aE '^step +[0-9]+/' | grep -a 'tokens/s' | tail -n +11 |
             sed -E 's/.* ([0-9.]+) ms .*/\1 &/' | sort -n | awk '{ line[NR] = $0 } END { print line[int((NR + 1) / 2)] }' |
             cut -d' ' -f2-)
    say "train_gpt d12, B $micro, T $seq, bf16, the median step: ${median:-none}"
else
    say "train_gpt d12: no result"
    failed=1
fi

if python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    run python3 dev/torch_gpt2.py --micro-batch "$micro" --seq $seq --steps "$steps" || failed=1
else
    say "PyTorch with CUDA is not installed: nothing to compare with"
fi

rm -f "$work/tokens.bin"
say ""
if [ "$failed" -eq 0 ]; then say "all of it passed"; else say "something failed: see above"; fi
echo "written: $report, $base-kernels.jsonl"
exit "$failed"
