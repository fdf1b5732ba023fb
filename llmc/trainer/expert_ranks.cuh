// expert_ranks.cuh: the e ranks that share out the experts, and train_moe's all-to-all.
// lesson: 5d
//
// defines: ExpertRanks, experts_create, experts_connect, experts_tensor,
//          experts_exchange
#ifndef LLMC_EXPERT_RANKS_CUH
#define LLMC_EXPERT_RANKS_CUH

#include "llmc/kernels/moe.cuh"
#include "llmc/trainer/split_data.cuh"

// e neighbours of the data ranks. Every e-th data rank holds the same experts.
struct ExpertRanks {
    size_t e;
    ncclComm_t exchanging;  // the e ranks; NULL: not connected yet
    ncclComm_t alike;       // the d/e ranks that hold the same experts
    ncclComm_t tensor;      // the t ranks that share each expert
};

// Makes the communicator for sums, before the warm-up. `tensor` is the communicator of the
// tensor ranks.
static inline void experts_create(Trainer *m, ExpertRanks *x, ncclComm_t tensor) {
    size_t rank = m->grid.d_rank % x->e, count = m->grid.d / x->e;
    x->tensor = tensor;
    x->alike = job_split_data(&m->job, &m->grid, rank, count, x->e, "expert data", false);
}

// Makes the communicator for messages: from here on a rank may wait for another one.
static inline void experts_connect(Trainer *m, ExpertRanks *x) {
    size_t first = m->grid.d_rank / x->e * x->e;
    x->exchanging = trainer_connect_data(m, first, x->e, 1, "experts");
}

// Gathers or sums blocks of `count` elements over the tensor ranks, one block for each of El
// experts. Works in place in buffers (El, t, count), which have this rank's blocks at
// [i][t_rank].
static inline void experts_tensor(Trainer *m, const ExpertRanks *x, floatX *rows, size_t El,
                                  size_t count, bool sum) {
    size_t t = m->grid.t, mine = m->grid.t_rank * count;
    cudaStream_t s = m->stream;
    Span span(m, s, sum ? "reduce-scatter" : "all-gather");

    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < El; i++) {
        floatX *all = rows + i * t * count;
        if (sum)
            NCCL_CHECK(ncclReduceScatter(all, all + mine, count, NCCL_FLOATX, ncclSum,
                                         x->tensor, s));
        else
            NCCL_CHECK(ncclAllGather(all + mine, all, count, NCCL_FLOATX, x->tensor, s));
    }
    NCCL_CHECK(ncclGroupEnd());
}

// Does the all-to-all of e ranks. On the way there, it takes the rows (E, B slots, C) of
// this rank's tokens to their experts. They arrive as (El, parts, e, B slots / parts, C), so
// that an expert's rows are one matrix. back: takes them to their tokens again. Empty places
// travel, too. So no rank needs another one's number of tokens, and the host only enqueues.
// Nothing overlaps with it.
//
// The t tensor ranks have the same rows, and a link between nodes is slower than one within
// a node. So each rank sends one part of t, and the ranks at the experts gather the parts.
// On the way back they first sum their summands of the results, each its own part. A rank
// leaves 0 in the parts of others. If t does not divide the rows, each rank sends all rows.
static inline void experts_exchange(Trainer *m, const ExpertRanks *x, const Moe &moe,
                                    floatX *out, floatX *in, size_t B, bool back) {
    size_t El = moe.E / x->e, rows = B * moe.slots, C = m->config.C;
    size_t parts = x->e > 1 && rows % m->grid.t == 0 ? m->grid.t : 1;
    size_t mine = parts > 1 ? m->grid.t_rank : 0;
    size_t count = rows / parts * C;  // elements of a part: of one expert, from one rank
    size_t block = x->e * count;      // and from all e of them
    cudaStream_t s = m->stream;

    if (back && parts > 1) {
        experts_tensor(m, x, in, El, block, true);
        CUDA_CHECK(cudaMemsetAsync(out, 0, moe.E * rows * C * sizeof(floatX), s));
    }

    if (x->exchanging) {
        Span span(m, s, back ? "combine" : "dispatch");
        NCCL_CHECK(ncclGroupStart());
        for (size_t rank = 0; rank < x->e; rank++) {
            for (size_t i = 0; i < El; i++) {
                size_t by_token = ((rank * El + i) * parts + mine) * count;
                size_t by_expert = (i * parts + mine) * block + rank * count;
                const floatX *from = in + (back ? by_expert : by_token);
                floatX *to = out + (back ? by_token : by_expert);
                NCCL_CHECK(ncclSend(from, count, NCCL_FLOATX, (int)rank, x->exchanging, s));
                NCCL_CHECK(ncclRecv(to, count, NCCL_FLOATX, (int)rank, x->exchanging, s));
            }
        }
        trainer_group_end(m);
    }

    if (!back && parts > 1) experts_tensor(m, x, out, El, block, false);
}

#endif
