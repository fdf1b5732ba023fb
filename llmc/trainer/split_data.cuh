// split_data.cuh: groups of some of the data ranks. They share work or tensors that all
// data ranks share in the four trainers.
// lesson: moe
//
// defines: job_split_data, trainer_connect_data, trainer_group_end
#ifndef LLMC_SPLIT_DATA_CUH
#define LLMC_SPLIT_DATA_CUH

#include "llmc/trainer/ranks.cuh"

// Splits the data ranks of this rank's tensor and pipeline coordinates: its group has
// `count` of them, the first and every step-th after it.
static inline ncclComm_t job_split_data(Job *job, const Grid *grid, size_t first,
                                        size_t count, size_t step, const char *purpose,
                                        bool waited) {
    int *ranks = (int *)host_alloc(count, sizeof(int));
    for (size_t i = 0; i < count; i++)
        ranks[i] = grid_rank_at(grid, grid->t_rank, first + i * step, grid->p_rank);
    ncclComm_t comm = job_split(job, ranks, count, purpose, 0, grid->world / count,
                                waited);
    free(ranks);
    return comm;
}

// Makes such a group for messages that compute waits for. It has no collectives. NCCL
// connects two ranks at their first message, so each rank has sent one element to each
// other one, and the host has waited for it.
static inline ncclComm_t trainer_connect_data(Trainer *m, size_t first, size_t count,
                                              size_t step, const char *purpose) {
    ncclComm_t comm = job_split_data(&m->job, &m->grid, first, count, step, purpose, true);
    double *from = m->totals, *to = m->totals + 1;
    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < count; i++) {
        if (first + i * step == m->grid.d_rank) continue;
        NCCL_CHECK(ncclSend(from, 1, ncclDouble, (int)i, comm, m->stream));
        NCCL_CHECK(ncclRecv(to, 1, ncclDouble, (int)i, comm, m->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    return comm;
}

// Ends a group of messages on the compute stream. While a sample of text runs the host
// waits for them: products of new shapes follow, which load kernels.
static inline void trainer_group_end(Trainer *m) {
    NCCL_CHECK(ncclGroupEnd());
    if (m->sample.running) trainer_synchronize(m);
}

#endif
