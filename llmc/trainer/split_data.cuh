// split_data.cuh: groups of some of the data ranks, which share what all data ranks have in the four trainers.
// lesson: moe
//
// defines: job_split_data
#ifndef LLMC_SPLIT_DATA_CUH
#define LLMC_SPLIT_DATA_CUH

#include "llmc/trainer/ranks.cuh"

// Splits the data ranks: this rank's group has `count` of them, the first and every step-th after it.
static inline ncclComm_t job_split_data(Job *job, const Grid *grid, size_t first, size_t count, size_t step,
                                        const char *purpose, bool waited) {
    int *ranks = (int *)host_alloc(count, sizeof(int));
    for (size_t i = 0; i < count; i++) ranks[i] = grid_rank_at(grid, 0, first + i * step, 0);
    ncclComm_t comm = job_split(job, ranks, count, purpose, 0, grid->d / count, waited);
    free(ranks);
    return comm;
}

#endif
