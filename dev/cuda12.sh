#!/usr/bin/env bash
# cuda12.sh [NVCC]: compiles trainers against the headers of CUDA 12.1 and NCCL 2.19, from NVIDIA's
# wheels on PyPI. The compiler is the installed one, with its own headers (crt/). So this finds
# calls, types and constants that CUDA 12 lacks, but does not run CUDA 12's compiler. Without nvcc
# or PyPI there is nothing to do. Ends with `N passed, N failed`.
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
. "$(dirname "$0")/test/report.sh"
nvcc=${1:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
[ -x "$nvcc" ] || skip cuda12 'there is no nvcc'
headers=build/cuda12

if [ ! -e $headers/nccl.h ]; then
    python3 -m pip download -q --no-deps -d "$dir" nvidia-cuda-runtime-cu12==12.1.105 \
        nvidia-cublas-cu12==12.1.3.1 \
        nvidia-nccl-cu12==2.19.3 >"$dir/out" 2>&1 ||
            skip cuda12 "the headers of CUDA 12 cannot be had: $(tail -n 1 "$dir/out")"
    mkdir -p "$dir/headers" build
    for wheel in "$dir"/*.whl; do
        python3 -c 'import sys, zipfile
z = zipfile.ZipFile(sys.argv[1])
z.extractall(sys.argv[2], [name for name in z.namelist() if "/include/" in name])' "$wheel" "$dir"
        rm "$wheel"
    done
    cp -r "$dir"/nvidia/*/include/. "$dir/headers" && rm -rf $headers &&
        mv "$dir/headers" $headers || exit 1
fi

mpi=$(mpicxx --showme:compile 2>/dev/null | tr ' ' '\n' | grep '^-I' | xargs)
# compiles PROGRAM PRECISION FLAG...: to PTX, without the assembler, and not optimized.
compiles() {
    local program=$1 precision=$2 name=${1##*/}
    shift 2
    # shellcheck disable=SC2086
    "$nvcc" -std=c++17 -Xcicc -O0 -gencode arch=compute_80,code=compute_80 -c -o "$dir/$name.o" \
        -diag-suppress 177 \
        -Xcompiler -O0,-fopenmp -I$headers "$@" -I. "-DPRECISION_$precision" $mpi "$program" \
            >"$dir/$name.out" 2>&1
}

# CUDA 12.5 introduced this call.
printf '#include <cuda_runtime.h>\nvoid *call = (void *)&cudaGetDriverEntryPointByVersion;\n' \
    >"$dir/newer.cu"
! compiles "$dir/newer.cu" BF16 && grep -q cudaGetDriverEntryPointByVersion "$dir/newer.cu.out"
report $? 'a call that CUDA 12.1 lacks is refused'
shown=$dir/train_gpt_3d.cu.out
compiles train_gpt_3d.cu BF16
report $? 'train_gpt_3d bf16'
compiles train_gpt_3d.cu FP32 -Illmc/mpi
report $? 'train_gpt_3d fp32, NCCL=mpi'
for lesson in dev/lessons/*.cu; do
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
    (
        compiles "$lesson" BF16
        echo $? >"$dir/${lesson##*/}.code"
    ) &
done
wait
for lesson in dev/lessons/*.cu; do
    shown=$dir/${lesson##*/}.out
    report "$(cat "$dir/${lesson##*/}.code")" "$lesson bf16"
done
shown="$dir/matmul.cu.out $dir/attention.cu.out"
compiles dev/cuda/matmul.cu BF16 && compiles dev/cuda/attention.cu FP32
report $? 'the laboratory: matmul bf16, attention fp32'
finish
