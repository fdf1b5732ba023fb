#!/usr/bin/env bash
# gpu_check.sh: one command for a machine with a GPU, in stages. Each has a time limit and writes
# its part of dev/results/NAME.md at once. A stage that fails, hangs or is cut off takes nothing
# from the others.
#
#   machine    This machine's hardware and software.
#   build      Programs for CUDA in both precisions, and train_gpt with a timer around each kernel.
#   checks     Every kernel against plain loops in double, in both precisions.
#   sanitizer  The small kernels again under compute-sanitizer.
#   golden     One rank's losses and gradients against PyTorch's in float64, in both precisions.
#   d12        GPT-2 124M, T 1024, bf16: tokens/s and MFU, a table of its kernels. Beside it PyTorch
#              and llm.c.
#   d48        GPT-2 XL, the same.
#   bench      Every kernel's time in bf16, and its share of the roofline measured in the same run.
#   ranks      Eight ranks on this machine's GPUs, in six layouts, against one rank.
#   suite      `make test`, if STAGES names it.
#
# Sized for some five minutes on an H200, without the build: the sanitizer and PyTorch's compiler
# take most of them.
#
#   dev/gpu_check.sh                       All but the suite.
#   STAGES='machine golden' dev/gpu_check.sh
#   BUILD=0 dev/gpu_check.sh               A machine without nvcc: the programs that --pack has put
#                                          together elsewhere.
#   dev/gpu_check.sh --pack                Compiles for CUDA (no GPU needed). Programs and libraries
#                                          go to build/gpu-pack.tar.gz.
#   LLMC=path dev/gpu_check.sh             Times path/train_gpt2cu, a build of llm.c, as well.
#   REHEARSE=1 dev/gpu_check.sh            The same stages without a GPU: small, on the stand-ins.
#
#   STEPS                  Steps that are timed (40).
#   D12_BATCH, D48_BATCH   Sequences at a time (64, 16), halved until they fit.
#   KERNELS                Programs of dev/cuda.
#   LIMITS                 Seconds of stages: 'd12=600 bench=60'.
#   NAME                   The name of the report.
set -uo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.." || exit 1
exec </dev/null

work=build/gpu-check libraries=build/gpu-libs pack=build/gpu-pack.tar.gz
rehearse=${REHEARSE:-} device=${REHEARSE:+cpu}
device=${device:-cuda}
fp32=build/$device-fp32 bf16=build/$device-bf16
kernels='adamw attention classifier encoder gelu global_norm layernorm matmul'
kernels+=' moe rmsnorm rope swiglu'
kernels=${KERNELS:-$kernels}
mkdir -p "$work"

# ---- what is built, and packed for a machine without compiler, MPI, cJSON and PCRE2 --------------

# programs PRECISION: the programs of the stages.
programs() {
    local kernel
    printf "build/$device-$1/%s\n" train_gpt train_gpt_3d
    [ "$1" = bf16 ] || echo "$fp32/test_gpt"
    for kernel in $kernels; do echo "build/$device-$1/dev/cuda/$kernel"; done
}
build_all() {  # build_all [VARIABLE=VALUE]...: of make
    local precision carrier=("$@")
    # Real NCCL refuses ranks that share a GPU; another build of the trainer may have it.
    [ "$device" = cuda ] && carrier+=(NCCL=mpi) && rm -f "$fp32/train_gpt_3d" "$bf16/train_gpt_3d"
    for precision in bf16 fp32; do
        # shellcheck disable=SC2046
        make -j"$(nproc)" DEVICE=$device PRECISION=$precision "${carrier[@]}" \
            $(programs $precision) || return 1
    done
    make DEVICE=$device PRECISION=bf16 "${carrier[@]}" PROFILE=1 "$bf16-profile/train_gpt"
}

# copy_libraries PROGRAM...: copies the programs' libraries. Leaves out the C library and the ones
# that come with a driver or with PyTorch.
copy_libraries() {
    ldd "$@" 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
        grep -vE '/(libc|libm|libdl|libpthread|librt|libcublas.*|libnccl.*|libcuda.*)\.so' |
        while read -r library; do cp -Lu "$library" $libraries/; done
}
make_pack() {
    local path plugins
    # Another machine runs them, so nothing is compiled for this one's processor: all is built
    # again.
    # shellcheck disable=SC2046
    rm -f $(programs fp32) $(programs bf16) "$bf16-profile/train_gpt"
    build_all NATIVE= || return 1
    rm -rf $libraries
    mkdir -p $libraries/usr/bin $libraries/usr/share
    # shellcheck disable=SC2046
    copy_libraries $(programs fp32) $(programs bf16)
    plugins=$(ompi_info --path pkglibdir 2>/dev/null | sed 's/.*: //')
    if [ -d "$plugins" ]; then
        mkdir -p "$libraries$plugins"
        cp "$plugins"/*.so "$libraries$plugins/"
        copy_libraries "$plugins"/mca_pmix_*.so
        # Has plugins of its own
        path=$(ldd "$plugins"/mca_pmix_*.so | awk '/libpmix/ { print $3; exit }')
        [ -z "$path" ] || cp -r "$(dirname "$(readlink -f "$path")")/pmix" $libraries/usr/lib/
        for path in orterun orted; do cp -L "$(command -v $path)" $libraries/usr/bin/ &&
            copy_libraries "$(command -v $path)"; done
        mv $libraries/usr/bin/orterun $libraries/usr/bin/mpirun
        cp -r "$(ompi_info --path pkgdatadir | sed 's/.*: //')" $libraries/usr/share/
    fi
    # shellcheck disable=SC2046
    tar czf $pack $libraries $(programs fp32) $(programs bf16) "$bf16-profile/train_gpt"
    ls -l $pack
}
unpack() {
    [ "${BUILD:-1}" = 0 ] || return 0
    [ -e $pack ] && [ ! -d $libraries ] && tar xzf $pack
    [ -d $libraries ] || return 0
    local wheels
    wheels=$(python3 -c 'import glob, os, torch; d = os.path.dirname(torch.__file__)
print(":".join([d + "/lib"] + glob.glob(os.path.dirname(d) + "/nvidia/*/lib")))' 2>/dev/null)
    export LD_LIBRARY_PATH=$PWD/$libraries${wheels:+:$wheels}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export OPAL_PREFIX=$PWD/$libraries/usr PMIX_LIBDIR=$PWD/$libraries/usr/lib \
        OMPI_MCA_mca_base_component_show_load_errors=0
    MPIRUN="$PWD/$libraries/usr/bin/mpirun --oversubscribe --bind-to none --allow-run-as-root"
    export MPIRUN
}

# ---- stages --------------------------------------------------------------------------------------
# Each prints its part of the report. Exit code 3: there is nothing to do here, and the last line
# says why.

# The first line of a command's output that matches, or "not found".
version() {
    local pattern=$1 line
    shift
    line=$("$@" 2>/dev/null | grep -m1 -E "$pattern")
    echo "${line:-not found}"
}
gpu() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }
nothing() { echo "$*"; exit 3; }

stage_machine() {
    echo "date      $(date -u '+%Y-%m-%d %H:%M UTC')"
    echo "commit    $(git describe --always --dirty 2>/dev/null || echo 'no git')"
    local gpus torch='import torch; print(torch.__version__, "CUDA", torch.version.cuda)'
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
    echo "GPU       $(gpu name), driver $(gpu driver_version), $gpus of them"
    echo "clocks    $(gpu clocks.max.sm,clocks.max.memory,power.limit)"
    echo "nvcc      $(version release "${NVCC:-nvcc}" --version)"
    echo "MPI       $(version . ${MPIRUN:-mpirun} --version)"
    echo "PyTorch   $(version . python3 -c "$torch")"
}

stage_build() {
    [ "${BUILD:-1}" = 1 ] || nothing "BUILD=0: the programs were brought"
    [ "$device" = cpu ] || [ -n "$(command -v nvcc)" ] || [ -x /usr/local/cuda/bin/nvcc ] ||
        nothing "no nvcc here: dev/gpu_check.sh --pack on a machine that has it, then BUILD=0 here"
    build_all 2>&1 | grep -aE 'error|warning|found|\*\*\*'
    return "${PIPESTATUS[0]}"
}

stage_checks() {
    local kernel folder program started=() bad=0
    for folder in "$fp32" "$bf16"; do
        for kernel in $kernels; do
            program=$folder/dev/cuda/$kernel
            [ -x "$program" ] || { echo "$program: not built"; continue; }
            started+=("$program")
        done
    done
    [ ${#started[@]} -gt 0 ] || nothing "no program of dev/cuda is built"
    # Several at once: most of the time their plain loops run, and each has a core.
    # shellcheck disable=SC2016
    printf '%s\n' "${started[@]}" | xargs -P "$(nproc)" -I '{}' sh -c '
        out=$1/$(echo "$2" | tr / _).output
        "$2" >"$out" 2>&1 || echo "FAIL $2: exit code $?" >>"$out.code"' - "$work" '{}'
    for program in "${started[@]}"; do
        folder=$work/$(echo "$program" | tr / _).output
        echo "$program: $(tail -n 1 "$folder")"
        grep -a '^FAIL' "$folder"
        cat "$folder.code" 2>/dev/null && bad=1
        rm -f "$folder" "$folder.code"
    done
    return $bad
}

stage_sanitizer() {
    local tool program bad=0
    command -v compute-sanitizer >/dev/null || nothing "compute-sanitizer is not installed"
    for program in $bf16/dev/cuda/{layernorm,gelu,adamw,attention}; do
        [ -x "$program" ] || continue
        for tool in memcheck racecheck; do
            said=$(compute-sanitizer --tool $tool --error-exitcode 1 "$program" 2>&1 |
                grep -a 'SUMMARY') || { bad=1; said=failed; }
            echo "$tool $program: $said"
        done
    done
    return $bad
}

stage_golden() {
    local folder bad=0
    for folder in "$fp32" "$bf16"; do
        [ -x "$folder/train_gpt" ] || continue
        "$fp32/test_gpt" "$folder" golden || bad=1
    done
    return $bad
}

# A number as four bytes, the lowest first.
int32() {
    local i
    for i in 0 8 16 24; do printf '%b' "\\x$(printf '%02x' $((($1 >> i) & 255)))"; done
}

# shard FILE TOKENS: random tokens in the format of the data shards. Every byte is below 196, so
# that every token is below 50257.
shard() {
    {
        int32 20240520
        int32 1
        int32 "$2"
        head -c 1012 /dev/zero
        head -c $(($2 * 2)) /dev/urandom | LC_ALL=C tr '\304-\377' '\000-\073'
    } >"$1"
}

# trains NAME BATCH SEQ FLAGS...: prints the median of STEPS steps, without the first ten, with the
# largest batch that fits. Then prints the table of kernels, and the same model by others. LAYERS,
# HEADS, CHANNELS and VOCAB are the model's.
trains() {
    local name=$1 batch=$2 seq=$3 steps=${STEPS:-40} timed median
    shift 3
    while :; do
        shard "$work/tokens.bin" $((batch * seq * (steps + 1) + 1))
        run=("$@" --max-seq "$seq" --seq "$seq" --micro-batch "$batch" --global-batch "$batch" \
            --train-data "$work/tokens.bin")
        echo "\$ train_gpt ${run[*]} --steps $steps"
        "$bf16/train_gpt" "${run[@]}" --steps "$steps" >"$work/output" 2>&1 && break
        tail -n 2 "$work/output"
        [ "$batch" -gt 1 ] && grep -aq 'does not fit\|out of memory' "$work/output" || return 1
        batch=$((batch / 2))
    done
    grep -a '^device' "$work/output"
    median=$(grep -aE '^step +[0-9]+/.* tok/s' "$work/output" |
        tail -n +$((steps > 20 ? 11 : 2)) | sed -E 's/.* ([0-9.]+) ms,.*/\1 &/' | sort -n |
        awk '{ line[NR] = $0 } END { print line[int((NR + 1) / 2)] }' | cut -d' ' -f2-)
    echo "$name, B $batch, T $seq, bf16, the median step: ${median:-none}"
    timed=$bf16-profile/train_gpt
    if [ -x "$timed" ]; then
        echo
        "$timed" "${run[@]}" --steps 8 --trace "$work/trace.json" 2>&1 |
            sed -n '/^kernel  /,/^all  /p'
    else
        echo "$timed is not built: no table of kernels"
    fi
    echo
    if python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        python3 dev/torch_gpt2.py --micro-batch "$batch" --seq "$seq" --steps "$steps" \
            --layers "$LAYERS" --heads "$HEADS" --channels "$CHANNELS" --vocab "$VOCAB"
    else
        echo "PyTorch with CUDA is not installed: nothing to compare with"
    fi
    # Validates every -v steps, which must not be 0, and at the end (-m batches)
    if [ -x "${LLMC:-}/train_gpt2cu" ]; then
        "$LLMC/train_gpt2cu" -i "$work/tokens.bin" -j "$work/tokens.bin" -e "${name%% *}" -b \
            "$batch" -t "$seq" -d $((batch * seq)) \
            -x "$steps" -v 1000000000 -m 1 -s 0 -h 0 2>&1 | grep -a '^step' | tail -n 5
    fi
    rm -f "$work/tokens.bin"
    [ -n "$median" ]
}
stage_d12() {
    LAYERS=12 HEADS=12 CHANNELS=768 VOCAB=50257
    if [ -n "$rehearse" ]; then
        trains 'small model' 2 32 --layers 2 --heads 2 --channels 32 --vocab 50257
    else
        trains d12 "${D12_BATCH:-64}" 1024 --model d12
    fi
}
stage_d48() {
    LAYERS=48 HEADS=25 CHANNELS=1600 VOCAB=50257
    [ -z "$rehearse" ] || nothing "too large to rehearse: d12's stage does the same"
    trains d48 "${D48_BATCH:-16}" 1024 --model d48
}

stage_bench() {
    local kernel folder=$bf16 bad=0 ran=0
    [ -z "$rehearse" ] || folder=$fp32  # of which the rehearsal has a program
    for kernel in $kernels; do
        [ -x "$folder/dev/cuda/$kernel" ] || continue
        ran=1
        "$folder/dev/cuda/$kernel" --bench --log "$base-kernels.jsonl" || bad=1
    done
    [ $ran = 1 ] || nothing "no program of dev/cuda is built"
    return $bad
}

# Losses of the first steps with these flags, of `mpirun -n RANKS train_gpt_3d`.
losses() {
    local ranks=$1
    shift
    rm -f "$work/log.jsonl"
    # shellcheck disable=SC2086
    OMP_NUM_THREADS=1 $launch -n "$ranks" "$fp32/train_gpt_3d" --init dev/test/golden \
        --train-data dev/test/golden/train.bin --seq 24 --global-batch 8 --steps 3 --val-every 0 \
        --log "$work/log.jsonl" "$@" >"$work/output" 2>&1 || return 1
    sed -n 's/.*"loss":\([0-9.]*\).*/\1/p' "$work/log.jsonl" | xargs
}
stage_ranks() {
    local layout one eight bad=0 launch
    [ -x "$fp32/train_gpt_3d" ] || nothing "$fp32/train_gpt_3d is not built"
    . dev/launch.sh
    command -v "${launch%% *}" >/dev/null || nothing "no mpirun here"
    one=$(losses 1 --micro-batch 1) || { tail -n 5 "$work/output"; return 1; }
    echo "1 rank: losses $one"
    for layout in '--tensor 2 --data 4' '--tensor 2 --data 4 --sequence-parallel 1' \
        '--data 8 --zero 0' '--pipeline 2 --data 4' \
        '--tensor 2 --data 2 --pipeline 2 --sequence-parallel 1' \
        '--tensor 2 --data 2 --pipeline 2 --virtual 1 --schedule gpipe'; do
        # shellcheck disable=SC2086
        eight=$(losses 8 --micro-batch 1 $layout) || { tail -n 5 "$work/output"; bad=1; continue; }
        # The sums are taken in another order.
        echo "$one $eight" | awk -v layout="$layout" '{
            n = NF / 2
            bad = !n
            for (i = 1; i <= n; i++) {
                d = $i - $(i + n)
                if (d < 0) d = -d
                if (d > worst) worst = d
                bad = bad || d > 2e-5 * $i
            }
            printf "%-66s losses differ by %.1e%s\n", layout, worst, bad ? ": FAIL" : ""
            exit bad }' || bad=1
    done
    return $bad
}

stage_suite() {
    local carrier=()
    [ "$device" = cuda ] && [ "$(nvidia-smi -L | grep -c '^GPU')" -lt 8 ] && carrier=(NCCL=mpi)
    make test DEVICE=$device "${carrier[@]}"
}

# ---- the report ----------------------------------------------------------------------------------

case ${1:-} in
    --pack) make_pack; exit ;;
    --stage) base=$3 && unpack && "stage_$2"; exit ;;  # started below
    '') ;;
    *)
        echo "usage: dev/gpu_check.sh [--pack]; the head of the script names its variables"
        exit 2
        ;;
esac
[ -z "$rehearse" ] && ! nvidia-smi -L 2>/dev/null | grep -q '^GPU' && {
    echo "no GPU here: nvidia-smi lists none, and this check is for a machine with one" \
        "(REHEARSE=1 does without)"
    exit 1
}
name=$(gpu name)
name=${NAME:-$(printf '%s' "${name:-rehearsal}" | tr -cs 'A-Za-z0-9' '-')-$(date -u +%Y-%m-%d)}
base=dev/results/$name
[ -z "$rehearse" ] || base=$work/$name
mkdir -p dev/results "$(dirname "$base")"
[ -z "$rehearse" ] || rmdir dev/results 2>/dev/null
report=$base.md
echo "# $name" | tee "$report"
summary=

limit() {
    case " ${LIMITS:-} " in
        *" $1="*)
            echo " $LIMITS " | sed "s/.* $1=\([0-9]*\) .*/\1/"
            return
            ;;
    esac
    case $1 in
        build) echo 1200 ;;
        bench | d12 | d48) echo 300 ;;
        suite) echo 7200 ;;
        *) echo 180 ;;
    esac
}
failed=0
for stage in ${STAGES:-machine build checks sanitizer golden d12 d48 bench ranks}; do
    declare -F "stage_$stage" >/dev/null || { echo "there is no stage $stage"; exit 2; }
    seconds=$(limit "$stage") begin=$(date +%s)
    printf '\n## %s\n\n```\n' "$stage" | tee -a "$report"
    timeout -k 10 "$seconds" "$0" --stage "$stage" "$base" 2>&1 | tee -a "$report"
    case ${PIPESTATUS[0]} in
        0) verdict=passed ;;
        3) verdict='nothing done' ;;
        124 | 137) verdict="stopped after $seconds s" failed=1 ;;
        *) verdict=failed failed=1 ;;
    esac
    verdict="$verdict, $(($(date +%s) - begin)) s"
    printf '```\n\n%s\n' "$verdict" | tee -a "$report"
    summary+="| $stage | $verdict |"$'\n'
done
printf '\n## Summary\n\n| stage | |\n|---|---|\n%s' "$summary" | tee -a "$report"
echo "written: $report"
exit $failed
