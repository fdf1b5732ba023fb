#!/usr/bin/env bash
# run_mpich.sh [BUILD]: MPICH instead of Open MPI, if both are installed as Debian does it
# (mpicxx.mpich and mpicxx.openmpi). Runs the checks of the NCCL calls, and trains on 8 ranks with
# the bits of the same run under Open MPI. If MPICH is the only MPI, the whole suite runs on it
# anyway. Ends with `N passed, N failed`.
# needs: fp32/train_gpt_3d
. "$(dirname "$0")/report.sh"
cpu_only 'its test is for DEVICE=cpu'
[ -z "${MPI:-}" ] || skip "the whole suite runs on MPI=$MPI"
mpirun --version 2>/dev/null | grep -q 'Open MPI' ||
    skip 'the whole suite runs on an MPI that is not Open MPI'
command -v mpicxx.mpich >/dev/null && command -v mpirun.mpich >/dev/null ||
    skip 'no MPICH beside Open MPI (apt-get install mpich libmpich-dev)'

export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41

# Not optimised as the suite's own: the bits are the same, the compiler is sooner done.
make MPI=mpich OPTIMIZE=-O1 "$build-mpich/train_gpt_3d" "$build-mpich/dev/test/test_nccl" \
    >"$dir/out" 2>&1
report $? 'builds against MPICH'

verdicts "NCCL's calls at 4 ranks" timeout -k 5 120 mpirun.mpich -n 4 \
    "$build-mpich/dev/test/test_nccl"

# shellcheck disable=SC2054
flags=(--init dev/test/golden --train-data dev/test/golden/train.bin --seq 24 --global-batch 8
       --micro-batch 1 --steps 5 --lr 1e-3 --lr-final 1 --val-every 0
       --tensor 2 --data 2 --pipeline 2 --virtual 2)
trains() {  # trains NAME BUILD MPIRUN...: leaves NAME.jsonl and NAME.out
    local name=$dir/$1 trainer=$2/train_gpt_3d
    shift 2
    timeout -k 5 120 "$@" -n 8 "$trainer" "${flags[@]}" --log "$name.jsonl" --out "$name.out" \
        >"$dir/out" 2>&1
}
trains mpich "$build-mpich" mpirun.mpich
report $? 'trains on 8 ranks'
# shellcheck disable=SC2086
trains open "$build" $launch
report $? 'trains on 8 ranks under Open MPI'
diff <(numbers "$dir/mpich.jsonl") <(numbers "$dir/open.jsonl") >"$dir/out" 2>&1 &&
    [ "$(wc -l <"$dir/mpich.jsonl")" = 5 ]
report $? 'losses and norms have the same bits under both'
for name in mpich open; do sha256sum <"$dir/$name.out/step-00000005/model.safetensors"; done \
    >"$dir/out" 2>&1
[ "$(sort -u "$dir/out" | grep -c -)" = 1 ]
report $? 'weights have the same bits under both'

finish
