#!/bin/sh
# run_bench.sh [FOLDER]: `--bench` of the kernel laboratory. Every kernel's row has the bytes and FLOPs that the
# wrappers of llmc/ state, and its share of the roofline.
# needs: fp32/dev/cuda/layernorm
cd "$(dirname "$0")/../.." || exit 1
. dev/test/report.sh
folder=${1:-build/cpu-fp32}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
shown="$dir/out"
OMP_NUM_THREADS=1 "$folder/dev/cuda/layernorm" --bench --log "$dir/log" >"$dir/out" 2>&1
report $? 'layernorm --bench'

# Of N x 768 floats, residual + layernorm reads two matrices and writes two, 10 FLOPs an element; so does layernorm
# backward, 17 FLOPs. N: 1024 on the CPU, 32768 on a GPU.
sed 's/[{}"]//g; s/,/\n/g' "$dir/log" | awk -F: '
    $1 == "operation" { operation = $2 } $1 == "ms" { ms = $2 } $1 == "must_bytes" { bytes = $2 }
    $1 == "asks_bytes" { asks = $2 } $1 == "flops" { flops = $2 } $1 == "gb_per_s" { gb = $2 }
    $1 == "tflop_per_s" { tflop = $2 } $1 == "share" { share = $2 } $1 == "device" { n = $2 ~ /^CPU/ ? 1024 : 32768 }
    $1 == "peak_gb_per_s" { copy = gb / $2 }
    $1 == "peak_tflop_per_s" {
        product = tflop / $2
        roof = copy > product ? copy : product
        rows[operation]++
        values = n * 768
        if (bytes != 4 * values * 4 || flops != values * (operation ~ /backward/ ? 17 : 10) || asks < bytes) bad = 1
        if (!(ms > 0 && gb > 0.99e-6 * bytes / ms && gb < 1.01e-6 * bytes / ms)) bad = 1
        if (!(share > 0.99 * roof && share < 1.01 * roof)) bad = 1
    }
    END { exit bad || rows["residual + layernorm"] < 3 || rows["layernorm backward"] < 4 }'
report $? 'all kernels of an operation have the bytes that it must move, its FLOPs, and their share of the nearer roof'
grep -q '^residual + layernorm .* 12.58 ' "$dir/out" || ! grep -q '^CPU' "$dir/out"
report $? 'and so does the table'
finish
