// connect.cuh: how the ranks of a job come together before training, so that nothing waits for ever in its first step.
//
// On GPUs some things happen at first use, on the host, and may wait for all that is in flight: NCCL connects two ranks
// at their first message, and a communicator at its first collective of each kind and size; CUDA loads a kernel at its
// first launch. Beside a receive whose sender waits for us, that is a circle. So, before any training traffic:
//   1. the trainer's connect: a first message on each link, in ascending order, waited for;
//   2. job_warm_up: every kind of collective on every communicator, small and large, waited for;
//   3. the trainer's connect: a micro-batch forward and backward, twice: the second has dropout, and adds to gradients.
// The stand-ins refuse what does not keep to this (llmc/mpi/communicator.h), so that it is tested without a GPU.
//
// defines: GPU_RESERVE, DEVICE_RESERVE, job_split_link, job_warm_up, job_reset_traffic, job_check_ranks
#ifndef LLMC_CONNECT_CUH
#define LLMC_CONNECT_CUH

#include "llmc/trainer/job.cuh"
#include "llmc/trainer/timeline.cuh"

enum { LINK_BLOCKS = 4 };  // of a link's kernels: each fills a multiprocessor, and a receive waits long

static constexpr size_t WARM_UP_BYTES = 64 << 20;  // of the largest message in job_warm_up

// Bytes of a GPU that the plan of memory leaves to the driver and to libraries: CUDA's context, kernels, cuBLASLt's
// workspace, and the buffers of up to 8 communicators. An estimate, and the "reserve" of every GPU in dev/clusters.
static constexpr size_t GPU_RESERVE = 3000000000;

#ifdef __CUDACC__
static constexpr size_t DEVICE_RESERVE = GPU_RESERVE;
#else
static constexpr size_t DEVICE_RESERVE = 0;  // a CPU needs none
#endif

// Returns the communicator of a link, two ranks of which 0 sends to 1, if this rank is at one of its ends; else NULL.
// All ranks call it. from, to: stages; ranks of the same tensor and data coordinates are linked.
static inline ncclComm_t job_split_link(Job *job, const Grid *grid, int from, int to) {
    bool mine = (int)grid->p_rank == from || (int)grid->p_rank == to;
    int ends[2] = {grid_rank_at(grid, grid->t_rank, grid->d_rank, (size_t)from),
                   grid_rank_at(grid, grid->t_rank, grid->d_rank, (size_t)to)};
    return job_split(job, ends, mine ? 2 : 0, "pipeline", LINK_BLOCKS, 0, false);
}

// Connects a communicator for collectives: a few bytes, then as many as the rank with the least can send. scratch:
// `bytes` on the device, which are overwritten.
static inline void job_warm_up(ncclComm_t comm, void *scratch, size_t bytes, cudaStream_t stream) {
    int n = 1, rank = 0;
    NCCL_CHECK(ncclCommCount(comm, &n));
    NCCL_CHECK(ncclCommUserRank(comm, &rank));
    if (n == 1) return;
    CUDA_CHECK(cudaMemcpy(scratch, &bytes, sizeof bytes, cudaMemcpyHostToDevice));
    NCCL_CHECK(ncclAllReduce(scratch, scratch, 1, ncclInt64, ncclMin, comm, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaMemcpy(&bytes, scratch, sizeof bytes, cudaMemcpyDeviceToHost));
    for (int large = 0; large < 2; large++) {
        size_t part = large ? bytes / sizeof(floatX) / (size_t)n : 1, count = part * (size_t)n;
        floatX *x = (floatX *)scratch, *mine = x + (size_t)rank * part;
        NCCL_CHECK(ncclAllReduce(x, x, count, NCCL_FLOATX, ncclSum, comm, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        NCCL_CHECK(ncclReduceScatter(x, mine, part, NCCL_FLOATX, ncclSum, comm, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        NCCL_CHECK(ncclAllGather(mine, x, part, NCCL_FLOATX, comm, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        NCCL_CHECK(ncclBroadcast(x, x, count, NCCL_FLOATX, 0, comm, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
    }
}

// What was sent so far is not training traffic: NCCL_TRAFFIC=1 counts from here. CPU_FIRST_USES=1 lists from here.
static inline void job_reset_traffic(const Job *job) {
#ifndef __CUDACC__
    cpu_runtime().warm = true;
#endif
#ifdef NCCL_OVER_MPI
    for (size_t i = 0; i < job->group_count; i++) ncclMpiResetCounters(job->groups[i]);
    ncclMpiResetCounters(job->world);
#else
    (void)job;
#endif
}

// Fails when NCCL has found that another rank is gone.
static inline void job_check_ranks(const Job *job) {
    for (size_t i = 0; i <= job->group_count; i++) {
        ncclResult_t result = ncclSuccess;
        NCCL_CHECK(ncclCommGetAsyncError(i == 0 ? job->world : job->groups[i - 1], &result));
        if (result == ncclSuccess || result == ncclInProgress) continue;
        Error err;
        error_set(&err, "another rank has ended, or the network between them: %s", ncclGetErrorString(result));
        job_fail(job, &err);
    }
}

#endif
