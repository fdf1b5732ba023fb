#!/usr/bin/env bash
# run_ptx.sh: kernels as nvcc compiles them for a GPU, in dev/ptx.py's interpreter: the programs of dev/cuda check their
# results, and the interpreter bounds, alignment, races and values that nobody wrote. Without nvcc or numpy there is
# nothing to run. `run_ptx.sh all` (make ptx) runs more programs. Ends with `N passed, N failed`.
set -u
cd "$(dirname "$0")/../.." || exit 1
. dev/test/report.sh
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
[ -x "$nvcc" ] || skip ptx 'there is no nvcc'
python3 -c 'import numpy' 2>/dev/null || skip ptx 'there is no numpy for python3'
export NVCC=$nvcc OMP_NUM_THREADS=1
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT

shown="$dir/out"
# interpret PROGRAM PRECISION: every check of the program passes.
interpret() {
    python3 dev/ptx.py --precision "$2" "dev/cuda/$1.cu" >"$dir/out" 2>&1
    report $? "$1 $2: $(grep -aoE '^[0-9]+ passed, .*|^[0-9]+ kernels of [0-9]+ ran' "$dir/out" | xargs)"
    [ "$all" = all ] && sed -n '/^launches/,$p' "$dir/out"
}

all=${1:-}
programs='gelu classifier adamw moe'
[ "$all" = all ] && programs+=' encoder global_norm layernorm'
for program in $programs; do
    for precision in bf16 fp32; do interpret "$program" $precision; done
done

# planted PROGRAM FILE SED WHAT: with the bug that sed makes in a copy of the header, the interpreter says WHAT.
planted() {
    rm -rf "$dir/copy" && mkdir -p "$dir/copy/dev/test" && cp -r llmc "$dir/copy" && cp -r dev/cuda "$dir/copy/dev" &&
        cp dev/test/check.h "$dir/copy/dev/test" && sed -i "$3" "$dir/copy/$2" && ! cmp -s "$2" "$dir/copy/$2" &&
        ! python3 dev/ptx.py --source "$dir/copy" "dev/cuda/$1.cu" >"$dir/out" 2>&1 && grep -q "^FAULT .*$4" "$dir/out"
    report $? "a bug in ${2##*/}, $3, is found: $(grep -am1 -oE "$4.*" "$dir/out")"
}
planted gelu llmc/kernels/packs.cuh 's/const int4 \*>(p)/const int4 *>(p + 1)/' 'misaligned'
finish
