#!/usr/bin/env bash
# run_nccl.sh [FOLDER]: runs FOLDER/dev/test/test_nccl at 2, 3, 4, 5 and 8 ranks (sanitized too, if
# that is built) and test_nccl_replicas. Then it makes the job fail in several ways: it must end
# quickly, with a message, and leave no process behind. Checks the programs that GPU_QUEUE=1 builds.
# needs: fp32/dev/test/test_nccl fp32/dev/test/test_nccl_replicas fp32-asan/dev/test/test_nccl
# needs: fp32-queue/dev/test/test_nccl fp32-queue/train_gpt_3d fp32/train_gpt_3d
. "$(dirname "$0")/report.sh"
program=$build/dev/test/test_nccl
cpu_only 'the stand-ins are tested with DEVICE=cpu'
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41

# A job that must end with an error by itself, within 35 s. Its output is in $dir/out and $dir/err.
# When a rank ends with an error mpirun ends the others; by default a second after it has asked them
# to.
must_fail() {  # must_fail RANKS ARGUMENTS...
    ranks=$1
    shift
    OMPI_MCA_odls_base_sigkill_timeout=0 timeout -k 5 35 $launch -n "$ranks" "$program" "$@" \
        >"$dir/out" 2>"$dir/err"
    code=$?
    [ $code != 0 ] && [ $code != 124 ] && [ $code != 137 ]
}

said() { grep -q -- "$1" "$dir/err"; }
# Open MPI and MPICH say the same, but for capitals
launcher_said() { grep -qi -- "$1" "$dir/err"; }

lives() { case $(sed 's/.*) //; s/ .*//' "/proc/$1/stat" 2>/dev/null) in '' | Z) return 1 ;; esac; }

gone() {  # none of these processes is left; they get 35 s
    for _ in $(seq 350); do
        left=0
        for pid in "$@"; do lives "$pid" && left=1; done
        [ $left = 0 ] && return 0
        sleep 0.1
    done
    return 1
}

for n in 2 3 4 5 8; do verdicts "$n ranks" timeout -k 5 300 $launch -n $n "$program"; done
if [ -x "$build-asan/dev/test/test_nccl" ]; then
    ASAN_OPTIONS=detect_leaks=0  # MPI keeps memory to the end
    export ASAN_OPTIONS
    verdicts '3 ranks, sanitized' timeout -k 5 300 $launch -n 3 "$build-asan/dev/test/test_nccl"
fi

verdicts 'the check of replicas on 3 ranks' timeout -k 5 300 $launch -n 3 "${program}_replicas"

# No progress: every rank says what it waits for.
CPU_STALL_SECONDS=2
export CPU_STALL_SECONDS
must_fail 4 deadlock
ok=$?
for rank in 0 1 2 3; do
    peer=$((rank ^ 1))
    waits="rank $rank waits in ncclSend of 16 float32 to rank $peer (world)"
    said "$waits.*not received by rank $peer" || ok=1
done
report $ok "order of send and receive: a deadlock is reported by all four ranks"
must_fail 3 absent && said \
    'disagree on communicator "world": rank 0 is in ncclCommSplit, rank 1 is in ncclCommDestroy'
report $? "a rank that does not take part in ncclCommSplit is reported"
must_fail 2 destroy && said "rank 0 waits on the host in ncclCommDestroy of even" &&
    said "rank 1 waits on the host in ncclCommDestroy of odd"
report $? "communicators destroyed in different orders are reported"
unset CPU_STALL_SECONDS

must_fail 2 use kernel && said \
    "add_one is used for the first time while ncclRecv of 8 float32 from rank 0 (world)" &&
    said "in forward micro-batch 3"
report $? "the first launch of a kernel beside a receive is reported"
must_fail 2 use product && said \
    "a matrix product 8 x 8 x 8 is used for the first time while ncclRecv"
report $? "the first use of a matrix product beside a receive is reported"

# Disagreement: both sides' values.
mismatch() {  # mismatch KIND PATTERN PATTERN
    must_fail 2 mismatch "$1" && said 'ranks disagree on communicator "world"' && said "$2" &&
        said "$3"
    report $? "unequal $1 is reported with both values"
}
mismatch count "ncclAllReduce of 100 float32, sum" "ncclAllReduce of 101 float32, sum"
mismatch type "ncclAllReduce of 100 float32, sum" "ncclAllReduce of 100 float64, sum"
mismatch reduction "ncclAllReduce of 100 float32, sum" "ncclAllReduce of 100 float32, max"
mismatch root "ncclBroadcast of 100 float32 from root 0" "ncclBroadcast of 100 float32 from root 1"
mismatch owner "ncclReduce of 100 float32, sum to root 0" "ncclReduce of 100 float32, sum to root 1"
mismatch operation "ncclAllReduce of 100 float32, sum" "ncclAllGather of 100 float32"
mismatch message "ncclRecv of 101 float32 from rank 0" "ncclSend of 100 float32 to rank 1"

for order in ring ring: ring:x ring:-1 any:1: ring:1x tree:0; do
    NCCL_ORDER=$order must_fail 2 all && said \
        "^NCCL_ORDER=$order is not understood: write ring:SEED or any:SEED\$"
    report $? "NCCL_ORDER=$order is refused"
done

must_fail 3 exit && launcher_said 'exit code: *1$'
report $? "a rank that exits takes the job down, and its exit code is said"

# Starts four ranks that all-reduce until killed; sets job (mpirun) and pids (the ranks).
start_loop() {
    $launch -n 4 "$program" loop >"$dir/out" 2>"$dir/err" &
    job=$!
    for _ in $(seq 100); do
        pids=$(sed -n 's/^pid //p' "$dir/out")
        [ "$(echo "$pids" | wc -w)" = 4 ] && break
        sleep 0.2
    done
    sleep 0.5
}

start_loop
kill -KILL "$(echo "$pids" | tail -n 1)"
gone $pids && wait $job
code=$?
[ $code != 0 ] && launcher_said 'signal 9' && gone $pids "$job"
report $? "a rank killed in the middle: the job ends and says by which signal, no process is left"

start_loop
kill -KILL $job
{ wait $job; } 2>/dev/null
gone $pids
report $? "mpirun killed: no rank is left"
for pid in $pids; do kill -KILL "$pid" 2>/dev/null; done

CPU_STALL_SECONDS=2
export CPU_STALL_SECONDS
start_loop
kill -USR2 "$(echo "$pids" | tail -n 1)"
gone $pids && wait $job
code=$?
[ $code != 0 ] && said "waits in ncclAllReduce" && gone $pids
report $? "a rank that hangs: the others end the job"
for pid in $pids $job; do kill -KILL "$pid" 2>/dev/null; done
{ wait $job; } 2>/dev/null

start_loop
last=$(echo "$pids" | tail -n 1) others=$(echo "$pids" | sed '$d')
kill -STOP "$last"
sleep 0.2  # until the others wait for it
kill -STOP $others
sleep 3
kill -CONT $others
sleep 0.2
kill -CONT "$last"
sleep 1
left=0
for pid in $pids; do lives "$pid" && left=$((left + 1)); done
[ $left = 4 ] && ! said 'no progress'
report $? "ranks that were all stopped for longer than that go on"
for pid in $pids $job; do kill -KILL "$pid" 2>/dev/null; done

# A GPU's queue (llmc/mpi/gpu_queue.h), with so little pinned memory that groups wait for it.
queue=$build-queue
program=$queue/dev/test/test_nccl
NCCL_MPI_PINNED_MIB=4
export NCCL_MPI_PINNED_MIB
for n in 2 4; do verdicts "$n ranks with a GPU's queue" timeout -k 5 300 $launch -n $n "$program"; \
    done
must_fail 2 deadlock && said \
    "rank 1 waits in ncclSend of 16 float32 to rank 0 (world).*not received by rank 0"
report $? "a GPU's queue: a deadlock is reported"
unset CPU_STALL_SECONDS
NCCL_MPI_PINNED_MIB=1 must_fail 4 all && said \
    'a group of [0-9]* bytes does not fit: raise NCCL_MPI_PINNED_MIB'
report $? "a GPU's queue: pinned memory that is too small is reported"
train() {  # train FOLDER LOG
    timeout -k 5 300 $launch -n 8 "$1/train_gpt_3d" --train-data dev/test/golden/train.bin \
        --tensor 2 --data 2 --pipeline 2 --virtual 2 --sequence-parallel 1 --layers 4 --heads 2 \
        --channels 64 --vocab 257 --seq 32 --micro-batch 2 --global-batch 16 --steps 4 \
        --val-every 0 --log "$2" >"$dir/out" 2>"$dir/err" &&
        sed -i 's/,"ms":.*//' "$2" && [ "$(grep -c '"loss"' "$2")" = 4 ]
}
train "$build" "$dir/cpu" && train "$queue" "$dir/gpu" && cmp "$dir/cpu" "$dir/gpu"
report $? "a GPU's queue: 2 x 2 x 2 ranks train to the bits of a CPU's queue"

finish
