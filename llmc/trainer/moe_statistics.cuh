// moe_statistics.cuh: how the tokens of a step fell on the experts, summed over all ranks
// for --log.
// lesson: moe
//
// defines: MoeStatistics, take_statistics, statistics_begin, statistics_add, statistics_end
#ifndef LLMC_MOE_STATISTICS_CUH
#define LLMC_MOE_STATISTICS_CUH

#include "llmc/host/moe_log.h"
#include "llmc/kernels/moe.cuh"
#include "llmc/trainer/ranks.cuh"

typedef struct {
    double *sums;  // (L, 4, E) on the device, see moe_statistics
    double *host;  // the same
    size_t count;  // of all
} MoeStatistics;

static inline void take_statistics(Arena *arena, MoeStatistics *x, size_t L,
                                   const Moe &moe) {
    x->count = L * moe_statistics_count(moe);
    take(arena, x->sums, x->count);
    host_array(x->host, x->count);
}

// Sets the sums to 0 at the beginning of a step.
static inline void statistics_begin(Trainer *m, const MoeStatistics *x) {
    if (x->count == 0) return;  // no experts
    CUDA_CHECK(cudaMemsetAsync(x->sums, 0, x->count * sizeof(double), m->stream));
}

// Counts the choices of the router of layer l in a micro-batch. c ranks share its sequences.
static inline void statistics_add(Trainer *m, const MoeStatistics *x, size_t l,
                                  const Routing &r, const Moe &moe, size_t B, size_t T,
                                  size_t c = 1) {
    double *sums = x->sums + l * moe_statistics_count(moe);
    moe_statistics(sums, r, moe, B, T, m->stream, c);
}

// Sums over all ranks and logs at the end of a step. Synchronises.
static inline void statistics_end(Trainer *m, const MoeStatistics *x, const Moe &moe) {
    if (!m->opt.log || x->count == 0) return;
    double *sums = x->sums, tokens = (double)m->batch * (double)m->opt.seq;
    size_t bytes = x->count * sizeof(double);
    NCCL_CHECK(
        ncclAllReduce(sums, sums, x->count, ncclDouble, ncclSum, m->job.world, m->stream));
    trainer_synchronize(m, m->stream);
    CUDA_CHECK(cudaMemcpy(x->host, sums, bytes, cudaMemcpyDeviceToHost));
    if (m->log.json && !m->opt.simulate)
        moe_log(&m->log, m->progress.step, x->host, m->config.L, moe.E, tokens);
}

#endif
