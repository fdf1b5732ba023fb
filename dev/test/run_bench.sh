#!/usr/bin/env bash
# run_bench.sh [FOLDER]: `--bench` of the kernel laboratory. Every kernel's row has the bytes and
# FLOPs that the wrappers of llmc/ state, and its share of the roofline. Then `make tune`, and the
# table of dev/cpu_speed.py.
# needs: fp32/dev/cuda/layernorm fp32/train_gpt fp32/train_gpt_tp fp32-tune/train_gpt
# needs: tools/byte_corpus
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

# ---- make tune: the stand-in for cuBLASLt proposes three algorithms, each with its own bits ----

mkdir "$dir/tune"
build/tools/byte_corpus "$dir/tune/train.bin" "$dir/tune/val.bin" train_gpt_3d.cu >"$dir/out" 2>&1
programs=$PWD/$build algorithms=build/gemm-CPU--stand-in-.json
pushd "$dir/tune" >/dev/null || exit 1
train() {  # train PROGRAM FLAGS...
    OMP_NUM_THREADS=1 "$programs$1" --train-data train.bin --layers 1 --heads 2 --channels 64 \
        --seq 32 --micro-batch 2 --global-batch 4 --steps 2 "${@:2}" >"$dir/out" 2>"$dir/err"
}
weights() { cksum <"$1/step-00000002/model.safetensors"; }

train /train_gpt --out plain && ! grep -q '^products' "$dir/out" &&
    grep -q '"tuned": ""' plain/*/trainer.json
report $? 'without a file a trainer takes the first algorithm of each product'
train -tune/train_gpt
timed=$(sed -n 's/^tuned  *\([0-9]*\) products, \1 in .*/\1/p' "$dir/out")
[ "${timed:-0}" -ge 14 ] && [ "$(grep -c ' TFLOP/s, algorithm [0-2]$' "$dir/out")" = "$timed" ] &&
    [ "$(grep -cE ' 16":	[0-2],?$' $algorithms)" = "$timed" ] && ls -A build >"$dir/out" &&
    [ "$(cat "$dir/out")" = "${algorithms#build/}" ]
report $? "make tune times $timed products and writes $algorithms"
train -tune/train_gpt --micro-batch 1
more=$(grep -cE ' 16":	[0-2],?$' $algorithms)
[ "$more" -gt "$timed" ] && grep -q "^tuned  *$((more - timed)) products, $more in" "$dir/out"
report $? "another micro-batch adds $((more - timed)) products"
train -tune/train_gpt && ! grep -q '^tuned' "$dir/out"
report $? 'products of the file are not timed again'

# every NUMBER: a file that has this algorithm for each product.
every() { sed -i "s/ 16\":	[0-9]/ 16\":	$1/" $algorithms; }
every 0
train /train_gpt --out zero &&
    grep -q "^products  *$more by the algorithms of $algorithms" "$dir/out" &&
    [ "$(weights zero)" = "$(weights plain)" ]
report $? "the file's algorithm 0 has the bits of a run without it"
every 1
train /train_gpt --out one && train /train_gpt --out again &&
    [ "$(weights one)" = "$(weights again)" ] && [ "$(weights one)" != "$(weights plain)" ]
report $? 'algorithm 1 has other bits, and twice the same'
sum=$(sed -n 's/.*"tuned": "\([0-9a-f]\{16\}\)".*/\1/p' one/*/trainer.json)
[ -n "$sum" ] && train /train_gpt --resume one/step-00000002 --steps 3 &&
    grep -q '^resuming' "$dir/out" && ! grep -q 'note: .*tuned' "$dir/out"
report $? "trainer.json has the file's checksum ($sum), and a resumed run finds the same"
every 2
train /train_gpt --resume one/step-00000002 --steps 3 &&
    grep -qE "^note: .* tuned = \"$sum\", this run has \"[0-9a-f]{16}\"$" "$dir/out"
report $? "a run that resumes with another file says so"
train /train_gpt_tp --out alone --tensor 1 && train /train_gpt --out two &&
    [ "$(weights alone)" = "$(weights two)" ]
report $? 'train_gpt_tp on one rank has the bits of train_gpt with this file'

# Any other file ends the run, on each of two ranks.
refused() {  # refused PATTERN SED
    cp $algorithms good.json
    sed -i "$2" $algorithms
    OMP_NUM_THREADS=1 $launch -n 2 "$programs/train_gpt_tp" --train-data train.bin --layers 1 \
        --heads 2 --channels 64 --seq 32 --tensor 2 --steps 1 >"$dir/out" 2>"$dir/err"
    [ $? = 2 ] && [ "$(grep -c '^error: ' "$dir/err")" = 1 ] && grep -q "^error: .*$1" "$dir/err"
    report $? "refused: $(grep -a '^error: ' "$dir/err")"
    mv good.json $algorithms
}
refused 'not of CPU (stand-in) with cuBLASLt 1' 's/CPU (stand-in)/NVIDIA H200/'
refused 'not of CPU (stand-in) with cuBLASLt 1' 's/"cublaslt":	1/"cublaslt":	130200/'
refused 'is damaged, or' '5s/	[0-9],/	8,/'
refused 'not valid JSON' '$d'
refused 'not valid JSON' d
every 7
train /train_gpt
[ $? = 1 ] && grep -q 'cuBLASLt has no algorithm 7' "$dir/err"
report $? 'an algorithm that cuBLASLt does not propose ends the run'
popd >/dev/null || exit 1

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
