#!/usr/bin/env bash
# run_launcher.sh [BUILD]: refuses a rank if its launcher started others that its MPI does not know:
# srun without PMIx, or the mpirun of another MPI. Accepts one rank in a batch script or under
# mpirun. Ends with `N passed, N failed`.
# needs: fp32/train_gpt fp32/train_gpt_3d
. "$(dirname "$0")/report.sh"
export OMP_NUM_THREADS=1
size="--layers 1 --heads 2 --channels 16 --seq 16 --micro-batch 1 --vocab 61"
size+=" --train-data dev/test/golden/train.bin"

# runs CODE START...: the command with the trainer ends with the code, 2 with one sentence.
runs() {
    local wanted=$1
    shift
    # shellcheck disable=SC2086
    "$@" $size --steps 1 --val-every 0 >"$dir/out" 2>"$dir/err"
    code=$?
    [ $code = "$wanted" ] || return 1
    [ $code = 0 ] || grep -q \
        '^error: [48] ranks were started, but MPI finds only this one: use srun --mpi=pmix' \
        "$dir/err"
}
for name in train_gpt train_gpt_3d; do
    runs 2 env SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 "$build/$name"
    report $? "$name in a step of 4 tasks without PMIx: code $code: $(cat "$dir/err")"
done
runs 2 env PMI_SIZE=8 PMI_RANK=0 OMPI_MCA_pmix=isolated "$build/train_gpt_3d"
report $? "8 ranks of another MPI's launcher: code $code"
runs 0 env SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 "$build/train_gpt"
report $? "a batch script with 4 tasks, which starts one trainer: code $code"
runs 0 env SLURM_JOB_ID=7 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 "$build/train_gpt"
report $? "a step of one task: code $code"
export SLURM_STEP_NUM_TASKS=4
# shellcheck disable=SC2086
runs 0 $launch -n 1 "$build/train_gpt_3d"
report $? "mpirun -n 1 on a node where a step of 4 tasks has started it: code $code"
finish
