// context_ranks.cuh: causal attention over the c ranks that share each sequence. The ring and
// Ulysses of train_context, with fewer heads of keys than of queries.
// lesson: 5d
//
// B sequences have T tokens each on this rank, and N = B T. A channels of queries are in NH
// heads of HS, and K channels of keys in KV heads. S = A + 2K channels hold queries, keys and
// values together.
//
// defines: ContextRanks, ContextKeys, ContextSizes, context_sizes_of, take_context,
//          context_create, context_connect, context_steps, context_rows, context_forward,
//          context_backward
#ifndef LLMC_CONTEXT_RANKS_CUH
#define LLMC_CONTEXT_RANKS_CUH

#include "llmc/kernels/documents.cuh"
#include "llmc/trainer/split_data.cuh"

// The ranks of a sequence, and the buffers of their messages.
struct ContextRanks {
    Context cut;           // of the tokens at hand: a sample of text is not cut
    ncclComm_t comm;       // these ranks; NULL: not connected yet
    ncclComm_t sums;       // the same, for sums
    cudaStream_t stream;   // the ring's messages
    cudaEvent_t computed;  // what the ring sends has been read and written
    cudaEvent_t arrived;   // and what it brings is there

    Ring ring;         // keys, values and their gradients, which go round
    floatX *leaving;   // (N, S)         Ulysses: what an all-to-all sends
    floatX *arriving;  // (N, S)         and receives
    floatX *dout;      // (B, cT, A/c)   gradients of this rank's heads
    floatX *dqkv;      // (B, cT, S/c)
};

// The first key that each query of a micro-batch sees, as a row of the keys of the step: first
// (c, B, T) for each step of a ring, else (B, cT). NULL: all keys before it.
struct ContextKeys {
    const int *first;
    const double *scores;  // [c] pairs of a query and a key that it sees, of each step
};

struct ContextSizes {
    size_t B, T, A, NH, KV, K, S;
};

static inline ContextSizes context_sizes_of(size_t B, size_t T, size_t A, size_t NH,
                                            size_t KV) {
    size_t K = KV * (A / NH);
    return {B, T, A, NH, KV, K, A + 2 * K};
}

// Takes memory for the messages of the ring or of Ulysses.
static inline void take_context(Arena *arena, ContextRanks *x, size_t N, size_t A, size_t NH,
                                size_t K) {
    size_t rows = context_is_ulysses(x->cut) ? N : 0;
    size_t S = A + 2 * K;
    take_ring(arena, &x->ring, context_is_ring(x->cut) ? N : 0, A, NH, K);
    take(arena, x->leaving, rows * S);
    take(arena, x->arriving, rows * S);
    take(arena, x->dout, rows * A);
    take(arena, x->dqkv, rows * S);
}

// Makes everything but the messages' communicator, before the warm-up, which has no messages.
static inline void context_create(Trainer *m, ContextRanks *x) {
    size_t c = x->cut.c, first = m->grid.d_rank - x->cut.rank;
    if (c > 1) x->sums = job_split_data(&m->job, &m->grid, first, c, 1, "context sums", true);
    x->stream = stream_create(m, "context", true);
    event_create(&x->computed);
    event_create(&x->arrived);
}

// Makes the messages' communicator: from here on a rank may wait for another one.
static inline void context_connect(Trainer *m, ContextRanks *x) {
    size_t c = x->cut.c, first = m->grid.d_rank - x->cut.rank;
    if (c > 1) x->comm = trainer_connect_data(m, first, c, 1, "context");
}

// ---- windows and documents -------------------------------------------------------------

// Returns the number of steps; in each the queries meet other keys.
static inline size_t context_steps(Context cut) {
    return context_is_ring(cut) ? cut.c : 1;
}

// Writes first (micros, c, B, T) and scores [micros][c] for sequence i of a batch. begin [cT]
// has the first key of each of its tokens. A micro-batch's first sequence sets the scores, and
// others add to them.
static inline void context_rows(Context cut, int *first, double *scores, const int *begin,
                                size_t i, size_t B, size_t T) {
    bool ring = context_is_ring(cut);
    size_t steps = context_steps(cut);
    size_t rows = context_is_ulysses(cut) ? T * cut.c : T;
    Tokens all = {0, {0, 0}};
    for (size_t step = 0; step < steps; step++) {
        size_t at = i / B * steps + step;
        RingStep now = ring ? ring_step(cut, step, B, T, 1, 1) : RingStep();
        double pairs = document_rows(first + (at * B + i % B) * rows, begin,
                                     ring ? now.mine : all, ring ? now.others : all, rows);
        scores[at] = pairs + (i % B ? scores[at] : 0);
    }
}

// Returns the keys of a step; N: rows of a rank.
static inline FirstKeys keys_of_step(ContextKeys keys, size_t step, size_t N) {
    if (!keys.first) return {NULL, 0};
    return {keys.first + step * N, keys.scores[step]};
}

// ---- Ulysses ---------------------------------------------------------------------------

// Sends part i of leaving[c, count] to rank i of the sequence. Its part arrives in place i of
// arriving.
static inline void context_all_to_all(Trainer *m, ContextRanks *x, size_t count) {
    if (!x->comm) return;
    size_t here = x->cut.rank * count;
    Span span(m, m->stream, "all-to-all");
    trainer_copy(m, x->arriving + here, x->leaving + here, count);

    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < x->cut.c; i++) {
        if (i == x->cut.rank) continue;
        floatX *to = x->leaving + i * count;
        floatX *from = x->arriving + i * count;
        NCCL_CHECK(ncclSend(to, count, NCCL_FLOATX, (int)i, x->comm, m->stream));
        NCCL_CHECK(ncclRecv(from, count, NCCL_FLOATX, (int)i, x->comm, m->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
}

// Turns local (N, S), all heads of this rank's tokens, into whole (B, cT, S/c), 1/c of the
// heads of all tokens. Without `keys` local has only queries, or outputs: (N, A).
static inline void gather_tokens(Trainer *m, ContextRanks *x, floatX *whole,
                                 const floatX *local, ContextSizes z, bool keys) {
    size_t c = x->cut.c;
    size_t width = (keys ? z.S : z.A) / c;
    heads_move(x->leaving, local, z.B * z.T, z.NH, keys ? z.KV : 0, z.A / z.NH, c, false,
               m->stream);
    context_all_to_all(m, x, z.B * z.T * width);
    tokens_join(whole, x->arriving, z.B, z.T * c, width, c, x->cut.zigzag, m->stream);
}

// Does the reverse.
static inline void scatter_tokens(Trainer *m, ContextRanks *x, floatX *local,
                                  const floatX *whole, ContextSizes z, bool keys) {
    size_t c = x->cut.c;
    size_t width = (keys ? z.S : z.A) / c;
    tokens_cut(x->leaving, whole, z.B, z.T * c, width, c, x->cut.zigzag, m->stream);
    context_all_to_all(m, x, z.B * z.T * width);
    heads_move(local, x->arriving, z.B * z.T, z.NH, keys ? z.KV : 0, z.A / z.NH, c, true,
               m->stream);
}

// ---- the ring --------------------------------------------------------------------------

// Sends the keys and values of a step to the next rank while this rank computes with them, and
// receives the next step's. Gradients follow one step behind.
static inline void ring_pass(Trainer *m, ContextRanks *x, ContextSizes z, size_t step,
                             bool keys, bool gradients) {
    if (!x->comm || (!keys && !gradients)) return;
    size_t c = x->cut.c;
    size_t count = z.B * z.T * 2 * z.K;
    size_t now = step % 2, later = 1 - now;
    int next = (int)((x->cut.rank + 1) % c);
    int previous = (int)((x->cut.rank + c - 1) % c);
    floatX **kv = x->ring.kv;
    float **dkv = x->ring.dkv;
    cudaStream_t s = x->stream;
    CUDA_CHECK(cudaEventRecord(x->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, x->computed, 0));

    // All four are one group: no rank waits in its send for a neighbour that sends, too.
    Span span(m, s, "ring");
    NCCL_CHECK(ncclGroupStart());
    if (keys) {
        NCCL_CHECK(ncclSend(kv[now], count, NCCL_FLOATX, next, x->comm, s));
        NCCL_CHECK(ncclRecv(kv[later], count, NCCL_FLOATX, previous, x->comm, s));
    }
    if (gradients) {
        NCCL_CHECK(ncclSend(dkv[later], count, ncclFloat, next, x->comm, s));
        NCCL_CHECK(ncclRecv(dkv[now], count, ncclFloat, previous, x->comm, s));
    }
    NCCL_CHECK(ncclGroupEnd());
    CUDA_CHECK(cudaEventRecord(x->arrived, s));
}

// Returns a step, without its pair of ranks if none of the queries sees a key.
static inline RingStep ring_step_of(const ContextRanks *x, size_t step, ContextKeys keys,
                                    ContextSizes z) {
    RingStep now = ring_step(x->cut, step, z.B, z.T, z.A, z.NH, z.KV);
    return keys.first ? document_step(now, keys.scores) : now;
}

// Puts this rank's keys and values into the ring.
static inline void ring_begin(Trainer *m, ContextRanks *x, const floatX *qkv,
                              ContextSizes z) {
    columns_move<false>(x->ring.kv[0], 2 * z.K, qkv + z.A, z.S, z.B, z.T, 0, z.T, 2 * z.K,
                        m->stream);
}

static inline void ring_forward(Trainer *m, ContextRanks *x, floatX *out, float *lse,
                                const floatX *qkv, ContextKeys keys, ContextSizes z) {
    cudaStream_t s = m->stream;
    ring_begin(m, x, qkv, z);
    for (size_t step = 0; step < x->cut.c; step++) {
        RingStep now = ring_step_of(x, step, keys, z);
        FirstKeys seen = keys_of_step(keys, step, z.B * z.T);

        // The next keys travel while attention to these is computed.
        ring_pass(m, x, z, step, step + 1 < x->cut.c, false);
        if (seen.first)
            attention_document_forward(x->ring, lse, qkv, now, seen, s, Dropout());
        else
            attention_pair_forward(x->ring, lse, qkv, now, s, Dropout());
        attention_merge(x->ring, lse, now, s);
        wait_for(m, x->arrived, "wait context");
    }
    columns_move<false>(out, z.A, x->ring.sum, z.A, z.B, z.T, 0, z.T, z.A, s);
}

static inline void ring_backward(Trainer *m, ContextRanks *x, floatX *dqkv, float *dot,
                                 const floatX *dout, const floatX *out, const float *lse,
                                 const floatX *qkv, ContextKeys keys, ContextSizes z) {
    size_t c = x->cut.c;
    cudaStream_t s = m->stream;
    ring_begin(m, x, qkv, z);
    for (size_t step = 0; step < c; step++) {
        RingStep now = ring_step_of(x, step, keys, z);
        FirstKeys seen = keys_of_step(keys, step, z.B * z.T);

        // A rank adds its part to the gradients of these keys once the earlier ranks' sum has
        // arrived.
        ring_pass(m, x, z, step, step + 1 < c, step > 0);
        if (seen.first)
            attention_document_backward(x->ring, dot, dout, out, lse, qkv, now, seen, s,
                                        Dropout());
        else
            attention_pair_backward(x->ring, dot, dout, out, lse, qkv, now, s, Dropout());
        wait_for(m, x->arrived, "wait context");
        ring_add(x->ring, now, s);
    }

    // The gradients have gone round, except for the last step, which brings them home.
    ring_pass(m, x, z, c, false, true);
    wait_for(m, x->arrived, "wait context");
    const float *dkv = x->ring.dkv[c % 2];
    columns_move<false>(dqkv, z.S, x->ring.sum, z.A, z.B, z.T, 0, z.T, z.A, s);
    columns_move<false>(dqkv + z.A, z.S, dkv, 2 * z.K, z.B, z.T, 0, z.T, 2 * z.K, s);
}

// ---- attention -------------------------------------------------------------------------

// Computes out (N, A) and lse from qkv (N, S) of this rank's tokens. Under Ulysses qkv and lse
// change to the ones of this rank's heads and of all tokens. whole (B, cT, A/c) has their
// outputs, for backward.
static inline void context_forward(Trainer *m, ContextRanks *x, floatX *out, floatX *whole,
                                   float *lse, floatX *qkv, ContextKeys keys, size_t B,
                                   size_t T, size_t A, size_t NH, size_t KV) {
    size_t c = x->cut.c;
    cudaStream_t s = m->stream;
    FirstKeys seen = keys_of_step(keys, 0, B * T);
    ContextSizes z = context_sizes_of(B, T, A, NH, KV);
    if (context_is_ring(x->cut)) {
        ring_forward(m, x, out, lse, qkv, keys, z);
    } else if (context_is_ulysses(x->cut)) {
        gather_tokens(m, x, qkv, qkv, z, true);
        attention_first_forward(whole, lse, qkv, seen, B, T * c, A / c, NH / c, s, Dropout(),
                                KV / c);
        scatter_tokens(m, x, out, whole, z, false);
    } else {
        attention_first_forward(out, lse, qkv, seen, B, T, A, NH, s, Dropout(), KV);
    }
}

// Computes dqkv (N, S) from dout (N, A), the gradient of out. dot is scratch: as large as lse.
static inline void context_backward(Trainer *m, ContextRanks *x, floatX *dqkv, float *dot,
                                    const floatX *dout, const floatX *out,
                                    const floatX *whole, const float *lse, const floatX *qkv,
                                    ContextKeys keys, size_t B, size_t T, size_t A,
                                    size_t NH, size_t KV) {
    size_t c = x->cut.c;
    cudaStream_t s = m->stream;
    FirstKeys seen = keys_of_step(keys, 0, B * T);
    ContextSizes z = context_sizes_of(B, T, A, NH, KV);
    if (context_is_ring(x->cut)) {
        ring_backward(m, x, dqkv, dot, dout, out, lse, qkv, keys, z);
    } else if (context_is_ulysses(x->cut)) {
        gather_tokens(m, x, x->dout, dout, z, false);
        attention_first_backward(x->dqkv, dot, x->dout, whole, lse, qkv, seen, B, T * c, A / c,
                                 NH / c, s, Dropout(), KV / c);
        scatter_tokens(m, x, dqkv, x->dqkv, z, true);
    } else {
        attention_first_backward(dqkv, dot, dout, out, lse, qkv, seen, B, T, A, NH, s,
                                 Dropout(), KV);
    }
}

#endif
