#!/usr/bin/env bash
# run_ptx.sh [all]: kernels as nvcc compiles them for a GPU, in dev/ptx.py's interpreter. Programs
# of dev/cuda check their results, attention's are compared with a CPU's, and planted bugs must be
# found. `all` (make ptx) runs more programs, and prints which kernels ran. Without nvcc or numpy
# there is nothing to run. Ends with `N passed, N failed`.
# needs: bf16/dev/ptx_attention
. "$(dirname "$0")/report.sh"
all=${1:-}
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
[ -x "$nvcc" ] || skip 'there is no nvcc'
python3 -c 'import numpy' 2>/dev/null || skip 'there is no numpy for python3'
[ -x build/cpu-bf16/dev/ptx_attention ] || skip 'there is no CPU build to compare with'
export NVCC=$nvcc OMP_NUM_THREADS=1

# close FILE: its line of sums is within 1% of the CPU's.
build/cpu-bf16/dev/ptx_attention >"$dir/cpu"
close() {
    paste -d ' ' "$dir/cpu" <(grep -a '^sum ' "$1") |
        awk '{ exit !(NF == 10 && $5 > 0 && ($10 - $5) ^ 2 < ($5 / 100) ^ 2) }'
}

python3 dev/ptx.py dev/ptx_attention.cu >"$dir/out" 2>&1 && close "$dir/out"
report $? "attention on tensor cores has a CPU's results: $(grep -a '^sum ' "$dir/out")"
[ "$all" = all ] && sed -n '/^launches/,$p' "$dir/out"

# copy SED FILE: a copy of the sources in which sed has planted a bug.
copy() {
    rm -rf "$dir/copy" && mkdir -p "$dir/copy/dev/test" && cp -r llmc "$dir/copy" &&
        cp -r dev/cuda "$dir/copy/dev" &&
        cp dev/*.cu "$dir/copy/dev" && cp dev/test/check.h "$dir/copy/dev/test" &&
            sed -i "$1" "$dir/copy/$2" &&
        ! cmp -s "$2" "$dir/copy/$2"
}

# planted SED HEADER WHAT [PROGRAM]: the interpreter stops attention, or a program, with a sentence.
planted() {
    copy "$1" "llmc/kernels/$2" &&
        ! python3 dev/ptx.py --source "$dir/copy" "${4:-dev/ptx_attention.cu}" >"$dir/out" 2>&1 &&
        grep -q "^FAULT .*$3" "$dir/out"
    report $? "$2 with $1: $(grep -am1 -oE "$3.*" "$dir/out")"
}
planted 's/copy_async_wait<1>/copy_async_wait<2>/' attention_mma.cuh \
    'bytes that a cp.async has yet to bring'
planted '/copy_async_wait<1>();/{n;d}' attention_mma.cuh 'race: reads what another thread wrote'
planted 's/"l"(global), "r"(exists ? 16/"l"((const char *)global + 2), "r"(exists ? 16/' mma.cuh \
    'misaligned'
# A wrong lane: rows are summed over 8 lanes, not over the 4 that have one.
copy 's/offset = 1; offset < 4/offset = 1; offset < 8/' llmc/kernels/mma.cuh &&
    python3 dev/ptx.py --source "$dir/copy" dev/ptx_attention.cu >"$dir/out" 2>&1 &&
        ! close "$dir/out"
report $? \
    "mma.cuh with a wrong lane in quad_reduce has other results: $(grep -a '^sum ' "$dir/out")"

# interpret PROGRAM PRECISION: every check of the program passes.
interpret() {
    python3 dev/ptx.py --precision "$2" "dev/cuda/$1.cu" >"$dir/out" 2>&1
    report $? \
        "$1 $2: $(grep -aoE '^[0-9]+ passed, .*|^[0-9]+ kernels of [0-9]+ ran' "$dir/out" | xargs)"
    [ "$all" = all ] && sed -n '/^launches/,$p' "$dir/out"
}
interpret gelu bf16
interpret classifier bf16
interpret moe bf16
interpret adamw bf16
if [ "$all" = all ]; then
    # cases PRECISION BOUND: every line of results is as on a CPU, relative to a value and its
    # line's mean square.
    cases() {
        "build/cpu-$1/dev/ptx_cases" | grep '^result ' >"$dir/cpu"
        python3 dev/ptx.py --precision "$1" dev/ptx_cases.cu >"$dir/out" 2>&1 &&
            grep -a '^result ' "$dir/out" >"$dir/got" &&
            paste -d '\n' "$dir/cpu" "$dir/got" | awk -v bound="$2" '
                NR % 2 { split($0, want); n = NF; next }
                {
                    square = 0
                    for (i = 3; i <= n; i++) square += want[i] ^ 2 / (n - 2)
                    bad += NF != n || $2 != want[2]
                    for (i = 3; i <= n; i++) {
                        most = bound ^ 2 * (want[i] ^ 2 + square)
                        if (!(($i - want[i]) ^ 2 <= most)) bad++
                    }
                }
                END { exit !(NR > 100) || bad }'
        report $? "$1: attention of all capacities and variants, kernels of lessons: as on a CPU"
        sed -n '/^launches/,$p' "$dir/out"
    }
    cases bf16 0.02
    cases fp32 1e-4
    for program in gelu classifier moe adamw; do interpret $program fp32; done
    for program in context encoder global_norm layernorm rmsnorm swiglu; do
        interpret $program bf16
        interpret $program fp32
    done
    # A lane that reads what lane 0 then changes.
    planted 's/row_lane() == 0 ? lse\[stat\] : 0.0f/lse[stat]/' context.cuh \
        'race: writes what another thread read' dev/cuda/context.cu
fi
finish
