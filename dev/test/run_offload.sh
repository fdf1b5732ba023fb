#!/usr/bin/env bash
# run_offload.sh [BUILD]: activations on the host; test_gpt checks their bits. This test has bytes
# by a formula, missing host memory, and a cluster without a host bandwidth. On the virtual clock it
# checks that copies hide. Ends with `N passed, N failed`.
# needs: fp32/train_offload fp32/train_gpt bf16/train_offload tools/byte_corpus
. "$(dirname "$0")/report.sh"
cpu_only 'the virtual clock belongs to the stand-ins'
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41
offload=$build/train_offload
bf16=${build/fp32/bf16}/train_offload
a100='--simulate dev/clusters/dgx-a100.json --ranks 1'
seven='--layers 6 --heads 32 --channels 4096 --vocab 50257 --micro-batch 1 --seq 16384'

# ---- bytes ---------------------------------------------------------------------------------------

# A layer's input, attention's output and log-sum-exp are 2 C w + 4 NH bytes for each token. A token
# that travels has 14 C w + 16 more, or 10 C w + 16 if GELU is computed again.
pinned() {  # pinned PROGRAM WIDTH SHARE GELU FLAGS...
    local program=$1 width=$2 share=$3 gelu=$4
    shift 4
    $program --layers 5 --heads 4 --channels 64 --seq 256 --micro-batch 4 --dry-run \
        --train-data "$dir/train.bin" --offload "$share" "$@" >"$dir/out" 2>"$dir/err" &&
        awk -v w="$width" -v a="$share" -v gelu="$gelu" '
            /^pinned host/ {
                N = 4 * 256
                moved = int(a * N)
                bytes = 3 * (N * (2 * 64 * w + 4 * 4) + moved * ((14 - gelu) * 64 * w + 16))
                near = $3 - bytes / 1048576
                good = near < 0.06 && near > -0.06
            }
            END { exit !good }' "$dir/out"
    report $? "--offload $share $*: $(grep '^pinned' "$dir/out") with $width bytes a number"
}
build/tools/byte_corpus "$dir/train.bin" "$dir/val.bin" README.md >/dev/null || exit 1
pinned "$offload" 4 0 0
pinned "$offload" 4 0.5 0
pinned "$offload" 4 1 4 --recompute gelu
pinned "$bf16" 2 1 0

# ---- refusals ------------------------------------------------------------------------------------

refused() {  # refused NAME PATTERN COMMAND...
    local name=$1 pattern=$2
    shift 2
    "$@" >"$dir/out" 2>"$dir/err"
    [ $? = 2 ] && [ "$(grep -c '^error' "$dir/err")" = 1 ] && grep -q "$pattern" "$dir/err"
    report $? "$name: $(cat "$dir/err")"
}
refused 'a cluster without a host bandwidth' 'laptop has no "host_bandwidth"' \
    "$offload" --simulate dev/clusters/laptop.json --ranks 1
sed 's/"host_memory": {"value": [0-9.e+]*/"host_memory": {"value": 8e9/' \
    dev/clusters/dgx-a100.json >"$dir/small.json"
# shellcheck disable=SC2086
refused 'a node with little memory' 'MiB of host memory are needed' \
    "$bf16" --simulate "$dir/small.json" --ranks 1 $seven --offload 0.2
# shellcheck disable=SC2086
refused 'two ranks' 'this trainer is one rank, but 2 were started' \
    $launch -n 2 "$offload" --train-data "$dir/train.bin"

# ---- the virtual clock ---------------------------------------------------------------------------

step() {  # step FLAGS...: milliseconds of the last step, and its idle time in percent
    # shellcheck disable=SC2086
    "$bf16" $a100 $seven "$@" >"$dir/out" 2>"$dir/err" &&
        awk '/^ +0 +[0-9.]+ / { print $2, $11 }' "$dir/out"
}
read -r auto idle < <(step --offload auto)
share=$(sed -n 's/^offload  *\([0-9.]*\) of.*/\1/p' "$dir/out")
more=$(awk -v a="$share" 'BEGIN { print a + 0.05 }')
read -r ms_more idle_more < <(step --offload "$more")
read -r zero idle_zero < <(step --offload 0)
read -r all idle_all < <(step --offload 1)
awk -v i="$idle" -v more="$idle_more" -v all="$idle_all" -v zero="$idle_zero" \
    'BEGIN { exit !(i == 0 && zero == 0 && more > 0.3 && all > more) }'
report $? "copies of a share of $share hide: idle $idle%; of $more: $idle_more%; of 1: $idle_all%"
awk -v a="$auto" -v m="$ms_more" -v z="$zero" -v o="$all" \
    'BEGIN { exit !(a > 0 && a < m && m < o && a < z) }'
report $? "ms a step: $auto with auto, $ms_more above, $zero with 0, $all with 1"
sed 's/"host_bandwidth": {"value": [0-9.e+]*/"host_bandwidth": {"value": 3.5e11/' \
    dev/clusters/dgx-a100.json >"$dir/fast.json"
a100="--simulate $dir/fast.json --ranks 1"
read -r fast idle < <(step --offload auto)
grep -q '^offload  *1.000 of' "$dir/out" && [ "$idle" = 0.0 ]
report $? "with 350 GB/s everything travels, and hides: $fast ms"
for run in train simulate; do
    flags='--layers 4 --heads 4 --channels 64 --seq 64 --micro-batch 2 --global-batch 4 --steps 2'
    clock="--virtual-time dev/clusters/dgx-a100.json --train-data $dir/train.bin"
    [ $run = simulate ] && clock='--simulate dev/clusters/dgx-a100.json --ranks 1'
    # shellcheck disable=SC2086
    "$offload" $clock $flags --offload 0.5 --log "$dir/$run" >"$dir/out" 2>"$dir/err"
    sed -i 's/.*"ms":\([0-9.]*\).*/\1/' "$dir/$run"
done
[ -s "$dir/train" ] && cmp -s "$dir/train" "$dir/simulate"
report $? "--simulate has the times of a run: $(xargs <"$dir/train") ms"
finish
