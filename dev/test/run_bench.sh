#!/usr/bin/env bash
# run_bench.sh [FOLDER]: `--bench` of the kernel laboratory. Every kernel's row has the bytes and
# FLOPs that the wrappers of llmc/ state, and its share of the roofline. Then the table of
# dev/cpu_speed.py.
# needs: fp32/dev/cuda/layernorm fp32/train_gpt
. "$(dirname "$0")/report.sh"
OMP_NUM_THREADS=1 "$build/dev/cuda/layernorm" --bench --log "$dir/log" >"$dir/out" 2>&1
report $? 'layernorm --bench'

# Of N x 768 floats, residual + layernorm reads two matrices and writes two, 10 FLOPs an element; so
# does layernorm backward, 17 FLOPs. N: 1024 on the CPU, 32768 on a GPU.
sed 's/[{}"]//g; s/,/\n/g' "$dir/log" | awk -F: '
    $1 == "operation" { operation = $2 }
    $1 == "ms" { ms = $2 }
    $1 == "must_bytes" { bytes = $2 }
    $1 == "asks_bytes" { asks = $2 }
    $1 == "flops" { flops = $2 }
    $1 == "gb_per_s" { gb = $2 }
    $1 == "tflop_per_s" { tflop = $2 }
    $1 == "share" { share = $2 }
    $1 == "device" { n = $2 ~ /^CPU/ ? 1024 : 32768 }
    $1 == "peak_gb_per_s" { copy = gb / $2 }
    $1 == "peak_tflop_per_s" {
        product = tflop / $2
        roof = copy > product ? copy : product
        rows[operation]++
        values = n * 768
        want = values * (operation ~ /backward/ ? 17 : 10)
        if (bytes != 4 * values * 4 || flops != want || asks < bytes) bad = 1
        if (!(ms > 0 && gb > 0.99e-6 * bytes / ms && gb < 1.01e-6 * bytes / ms)) bad = 1
        if (!(share > 0.99 * roof && share < 1.01 * roof)) bad = 1
    }
    END { exit bad || rows["residual + layernorm"] < 3 || rows["layernorm backward"] < 4 }'
report $? 'the kernels of an operation have its bytes, its FLOPs, and their share of the roof'
grep -q '^residual + layernorm .* 12.58 ' "$dir/out" || ! grep -q '^CPU' "$dir/out"
report $? 'and so does the table'

# A GPU knows registers and occupancy; elsewhere there is a dash for each. A kernel's name has
# blanks.
awk -v cpu="$(grep -c '^CPU' "$dir/out")" '
    $1 == "operation" { good = $5 == "regs" && $6 == "occup." }
    /%$/ {
        rows++
        registers = $(NF - 7)
        share = $(NF - 6)
        if (cpu) bad = bad || registers != "-" || share != "-"
        else bad = bad || registers < 8 || registers > 255 || share !~ /^[1-9][0-9]*%$/
    }
    END { exit !good || bad || rows < 7 }' "$dir/out"
report $? 'each row has registers and occupancy, or a dash for each on a CPU'

# One kernel by its number.
"$build/dev/cuda/layernorm" --list >"$dir/out" 2>&1 &&
    [ "$(grep -c '^residual + layernorm  *[1-9]' "$dir/out")" -ge 3 ] &&
    ! grep -q 'GB/s' "$dir/out"
report $? 'layernorm --list prints its kernels'
rm -f "$dir/log"
OMP_NUM_THREADS=1 "$build/dev/cuda/layernorm" --bench --kernel 2 --log "$dir/log" >"$dir/out" 2>&1 \
    &&
    [ -s "$dir/log" ] && ! grep -v '"number":2,' "$dir/log"
report $? 'layernorm --bench --kernel 2 times the kernels of that number only'
"$build/dev/cuda/layernorm" --list --kernel 99 >"$dir/out" 2>&1
[ $? = 2 ] && grep -q 'there is no kernel 99' "$dir/out"
report $? "a kernel that is not there is refused: $(tail -n 1 "$dir/out")"
[ "$device" = cpu ] || finish
command -v python3 >/dev/null || finish

# ---- a step on a CPU beside its products ----

PYTHONDONTWRITEBYTECODE=1 python3 -c '
import sys
sys.path.insert(0, "dev")
from cpu_speed import products
L, C, V, N = 12, 768, 50304, 256
flops = sum(2 * m * n * k for m, n, k, _, _ in products(L, C, V, N))
assert flops == 6 * N * (12 * L * C * C + C * V)' >"$dir/out" 2>&1
report $? 'the products of the floor have 6 FLOPs a token and weight'
TURNS=1 PEER=false dev/cpu_speed.py "$build" 'make train' >"$dir/out" 2>&1
report $? "a step of make train's model beside its products"
grep -q 'false has no torch' "$dir/out"
report $? 'it says that there is no PyTorch to compare with'
# The columns: work, ours, floor, ours / floor, which is the ratio of the two where there is one
# turn.
grep -q '^| work | ours | floor |' "$dir/out" || skip 'there is no oneDNN'
awk -F'|' '
    /make train/ { rows++; x = $3 / $4; good = $4 > 0 && x > 1 && x > $5 - 0.02 && x < $5 + 0.02 }
    END { exit !(rows == 1 && good) }' "$dir/out"
report $? "its row: $(tail -n 1 "$dir/out")"
finish
