#!/usr/bin/env bash
# calibrate.sh FOLDER DATA: measures the constants of dev/clusters/laptop.json, for one rank with
# one thread on this machine, and writes build/laptop.json. It trains FOLDER-profile/train_gpt
# (`make PROFILE=1`) at two shapes. The constants are ratios of the printed bytes, FLOPs and times
# of each class of kernels. Then it predicts five other shapes and prints the error of each.
# `calibrate.sh check FOLDER DATA` only predicts, with dev/clusters/laptop.json or CLUSTER=FILE.
# CALIBRATE_RUN='chrt -f 50' runs it undisturbed on a busy machine.
set -eu
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.."
check=
[ "${1:-}" = check ] && check=1 && shift
[ $# = 2 ] || { echo 'usage: calibrate.sh [check] FOLDER DATA' >&2; exit 2; }
folder=$1 data=$2
cluster=build/laptop.json
[ -z "$check" ] || cluster=${CLUSTER:-dev/clusters/laptop.json}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export OMP_NUM_THREADS=1 LC_ALL=C

train() {  # train PROGRAMS LAYERS HEADS CHANNELS SEQ MICRO_BATCH STEPS FLAGS...
    local programs=$1
    shift
    # shellcheck disable=SC2086
    ${CALIBRATE_RUN:-} "$programs/train_gpt" --train-data "$data" --layers "$1" --heads "$2" \
        --channels "$3" --seq "$4" --micro-batch "$5" --global-batch $((2 * $5)) --steps "$6" \
        "${@:7}"
}

# Of the table of kernels: class, calls, seconds, GB and GFLOP of each class of kernels; attention
# by forward and backward.
classes() {
    awk '/^[a-z]/ && match($0, / [0-9]+ +[0-9.]+ +[0-9.]+%/) {
        split(substr($0, RSTART), row)  # calls, ms, share, GB/s, TFLOP/s, the share of the roof
        class = "elementwise"
        if ($1 == "matrix") class = "gemm"
        else if ($1 ~ /attention_forward/) class = "flash_forward"
        else if ($1 ~ /attention_backward/) class = "flash_backward"
        else if ($1 ~ /gelu/) class = "softmax"
        else if ($1 ~ /layernorm_forward/) class = "layernorm_forward"
        else if ($1 ~ /layernorm_backward/) class = "layernorm_backward"
        else if ($1 ~ /adamw|global_norm/) class = "optimizer"
        else if ($1 ~ /classifier/) class = "classifier"
        calls[class] += row[1]; seconds[class] += row[2] / 1e3
        gb[class] += row[4] * row[2] / 1e3; gflop[class] += row[5] * row[2]
    } END { for (c in calls) print c, calls[c], seconds[c], gb[c], gflop[c] }' "$1"
}

# quickest FILE SHAPE...: the table of the quickest of five runs, which the machine disturbed least.
quickest() {
    local file=$1 least= total
    shift
    for _ in 1 2 3 4 5; do
        train "$folder-profile" "$@" --trace "$file.json" >"$file.run"
        total=$(awk '$1 == "all" { print int(1000 * $3) }' "$file.run")
        if [ -z "$least" ] || [ "$total" -lt "$least" ]; then least=$total &&
            cp "$file.run" "$file"; fi
    done
}

set_constant() {  # set_constant KEY VALUE SOURCE
    sed -i "s|^\( *\"$1\": {\"value\": \)[^,]*, \"source\": \"[^\"]*\"|\1$2, \"source\": \"$3\"|" \
        "$cluster"
}

if [ -z "$check" ]; then
    cp dev/clusters/laptop.json $cluster
    quickest "$dir/small" 2 4 128 64 4 24
    quickest "$dir/large" 2 8 512 256 2 6
    classes "$dir/small" >"$dir/small.classes"
    classes "$dir/large" >"$dir/large.classes"
    how="make calibrate, one rank with one thread"
    # A product: start + FLOPs / rate; two shapes give both. Other kernels: bytes / rate at the
    # large shape.
    while read -r key value; do
        set_constant "$key" "$value" "$how"
    done < <(awk 'FNR == NR { n[$1] = $2; t[$1] = $3; f[$1] = $5; next }
        { N[$1] = $2; T[$1] = $3; B[$1] = $4; F[$1] = $5 }
        END {
            flops = F["gemm"] / N["gemm"] - f["gemm"] / n["gemm"]
            rate = flops / (T["gemm"] / N["gemm"] - t["gemm"] / n["gemm"])
            start = t["gemm"] / n["gemm"] - f["gemm"] / n["gemm"] / rate
            printf "peak_bf16 %.4g\npeak_fp32 %.4g\n", 1e9 * rate, 1e9 * rate
            printf "gemm_start %.3g\n", (start > 0 ? start : 0)
            memory = B["elementwise"] / T["elementwise"]
            printf "hbm_bandwidth %.4g\n", 1e9 * memory * 4  # others are faster
            print "elementwise_efficiency 0.25"
            split("layernorm_forward layernorm_backward softmax", classes, " ")
            for (i in classes) {
                c = classes[i]
                printf "%s_efficiency %.3g\n", c, B[c] / T[c] / memory / 4
            }
            printf "optimizer_efficiency 0.25\n"
            parameters = B["optimizer"] / 32  # what is stated of an update, and of the norm
            printf "optimizer_bytes %.3g\n", T["optimizer"] * memory / parameters
            logits = B["classifier"] / 8  # read and written once
            printf "classifier_bytes %.3g\n", T["classifier"] * memory / logits
            split("flash_forward flash_backward", laws, " ")
            for (i in laws) {
                c = laws[i]
                both = 1e9 * (f[c] + F[c]) / (t[c] + T[c])
                printf "%s_64 %.3g\n%s_128 %.3g\n", c, both, c, both
            }
        }' "$dir/small.classes" "$dir/large.classes")
    set_constant launch_device 3e-6 "$how: the shortest kernels take 2 to 4 us"
    set_constant launch_host 0 "the host is the device: what a launch costs is in the kernels"
    for key in sms gemm_efficiency gemm_sustained; do set_constant $key 1 \
        "one thread; the rate is in peak_fp32"; done
    for key in gemm_wave gemm_depth; do set_constant $key 0 "one thread"; done
    set_constant accumulate_bytes 0 "the product adds; $how measures it so"
    if ! "$folder/train_gpt" --simulate "$cluster" --ranks 1 --steps 1 >/dev/null; then
        rm $cluster  # a class of kernels was not found, or measured nonsense
        exit 1
    fi
fi

printf '%-44s %10s %10s %8s\n' 'layers heads channels seq micro-batch' measured predicted error
worst=0
while read -r shape; do
    # shellcheck disable=SC2086
    measured=$(train "$folder" $shape 9 | awk '
        /^step/ { for (i = 1; i < NF; i++) if ($(i + 1) == "ms") print $i }' |
        tail -n +2 | sort -n | sed -n 4p)
    # shellcheck disable=SC2086
    predicted=$(train "$folder" $shape 2 --virtual-time "$cluster" | awk '
        /^step 2/ { for (i = 1; i < NF; i++) if ($(i + 1) == "ms") print $i }')
    awk -v s="$shape" -v a="$measured" -v b="$predicted" \
        'BEGIN { printf "%-44s %7.1f ms %7.1f ms %+6.1f %%\n", s, a, b, 100 * (b / a - 1) }'
    worst=$(awk -v w="$worst" -v a="$measured" -v b="$predicted" \
        'BEGIN { e = b / a - 1; e = e < 0 ? -e : e; print (e > w ? e : w) }')
done <<'END'
4 4 128 64 4
2 8 256 128 4
3 8 384 128 2
1 12 768 128 4
6 4 256 256 2
END
awk -v w="$worst" 'BEGIN { printf "largest error %.1f %%\n", 100 * w }'
[ -n "$check" ] || echo "written: $cluster, for --virtual-time and --simulate"
