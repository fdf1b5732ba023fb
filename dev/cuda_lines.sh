#!/usr/bin/env bash
# cuda_lines.sh: counts the lines of llmc/ that only nvcc compiles, for the table of
# dev/results/sass.md. A row for each file also names the test that executes them without a GPU.
set -u
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.." || exit 1

# Lines between #ifdef __CUDACC__ (or a condition with it) and its #else or #endif; with #ifndef,
# those behind #else. Lines that GPU_SHAPES=1 or GPU_QUEUE=1 compiles too do not count.
lines() {
    awk 'FNR == 1 { depth = 0 }
        /^#if/ { depth++; on[depth] = 0; other[depth] = 0
                 if (/__CUDACC__/ && !/GPU_(SHAPES|QUEUE)/) {
                     negative = /ifndef __CUDACC__|!defined\(__CUDACC__\)|!\(.*__CUDACC__/
                     on[depth] = !negative; other[depth] = negative } next }
        /^#else|^#elif/ { on[depth] = other[depth]; next }
        /^#endif/ { depth--; next }
        { for (i = 1; i <= depth; i++) if (on[i]) { if ($0 != "") count++; break } }
        END { print count + 0 }' "$1"
}
executed() {
    case $1 in
        llmc/kernels/matmul.cuh) echo 'a constant' ;;
        llmc/kernels/wgmma.cuh) echo 'nothing; `llmc/cpu/warpgroup.h` stands for it' ;;
        llmc/kernels/attention.cuh) echo 'nothing; it chooses `wgmma.cuh`' ;;
        llmc/kernels/mma.cuh) echo '`dev/ptx.py`' ;;
        llmc/kernels/*) echo '`make ptx`' ;;
        llmc/trainer/start.cuh) echo 'a constant' ;;
        llmc/host/rand.h | llmc/mpi/operation.h) echo 'a declaration' ;;
        *) echo 'nothing' ;;
    esac
}
table() {
    local file count all=0
    echo '| file | lines that only nvcc compiles | executed without a GPU by |'
    echo '|---|--:|---|'
    for file in $(find llmc -type f -not -path 'llmc/cpu/*' | LC_ALL=C sort); do
        count=$(lines "$file")
        [ "$count" -gt 0 ] || continue
        all=$((all + count))
        echo "| $file | $count | $(executed "$file") |"
    done
    echo "| all | $all | |"
}
table
