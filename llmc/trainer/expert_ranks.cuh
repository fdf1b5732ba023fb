// expert_ranks.cuh: the e ranks that share out the experts, and train_moe's all-to-all.
// lesson: 5d
//
// defines: ExpertRanks, experts_create, experts_connect, experts_exchange
#ifndef LLMC_EXPERT_RANKS_CUH
#define LLMC_EXPERT_RANKS_CUH

#include "llmc/kernels/moe.cuh"
#include "llmc/trainer/split_data.cuh"

// e neighbours of the data ranks. Every e-th data rank holds the same experts.
struct ExpertRanks {
    size_t e;
    ncclComm_t exchanging;  // the e ranks; NULL: not connected yet
    ncclComm_t alike;       // the d/e ranks that hold the same experts
};

// Makes the communicator for sums, before the warm-up.
static inline void experts_create(Trainer *m, ExpertRanks *x) {
    size_t rank = m->grid.d_rank % x->e, count = m->grid.d / x->e;
    x->alike = job_split_data(&m->job, &m->grid, rank, count, x->e, "expert data", false);
}

// Makes the one for messages: from here on a rank may wait for another one.
static inline void experts_connect(Trainer *m, ExpertRanks *x) {
    size_t first = m->grid.d_rank / x->e * x->e;
    x->exchanging = trainer_connect_data(m, first, x->e, 1, "experts");
}

// The all-to-all of e ranks. It takes the rows (E, B slots, C) of this rank's tokens to their
// experts, where they arrive as (El, e, B slots, C), so that an expert's rows are one matrix;
// or it takes them back. Empty places travel, too: so no rank need know how many tokens
// another one sends, and the host only enqueues. Nothing overlaps with it.
static inline void experts_exchange(Trainer *m, const ExpertRanks *x, const Moe &moe,
                                    floatX *out, const floatX *in, size_t B, bool back) {
    if (!x->exchanging) return;
    size_t El = moe.E / x->e, count = B * moe.slots * m->config.C;
    cudaStream_t s = m->stream;
    Span span(m, s, back ? "combine" : "dispatch");

    NCCL_CHECK(ncclGroupStart());
    for (size_t rank = 0; rank < x->e; rank++) {
        for (size_t i = 0; i < El; i++) {
            size_t by_token = (rank * El + i) * count;
            size_t by_expert = (i * x->e + rank) * count;
            const floatX *from = in + (back ? by_expert : by_token);
            floatX *to = out + (back ? by_token : by_expert);
            NCCL_CHECK(ncclSend(from, count, NCCL_FLOATX, (int)rank, x->exchanging, s));
            NCCL_CHECK(ncclRecv(to, count, NCCL_FLOATX, (int)rank, x->exchanging, s));
        }
    }
    trainer_group_end(m);
}

#endif
