// context.cuh: sequences cut over c ranks: rows in the order of Ulysses' all-to-all, and
// the ring's partial attention.
// lesson: context
//
// defines: heads_cut, heads_join, tokens_join, tokens_cut, heads_move, RingStep,
//          ring_step, Ring, take_ring, AttentionPair, attention_pair_cost, pair_forward_of,
//          pair_backward_of, attention_pair_forward, attention_pair_backward,
//          attention_merge, columns_move, ring_add
#ifndef LLMC_CONTEXT_CUH
#define LLMC_CONTEXT_CUH

#include "llmc/host/context.h"
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/packs.cuh"
#include "llmc/trainer/arena.cuh"

// ---- Ulysses (Jacobs et al. 2023) ------------------------------------------------------

// apart[c, B, n/c] <-> joined[B, n]: the n = T width elements of a sequence, by ranks and
// by their position.
template <int W>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    tokens_kernel(floatX *to, const floatX *from, size_t B, size_t n, size_t c, bool zigzag,
                  bool join) {
    Share s = element_share<W>(B * n);
    size_t held = n / c;
    for (size_t i = s.begin; i < s.end; i += s.step) {
        size_t apart = i * W, part = apart / held;
        size_t joined = part % B * n +
                        tokens_position(tokens_of(n, c, part / B, zigzag), apart % held);
        floatX *y = to + (join ? joined : apart);
        const floatX *x = from + (join ? apart : joined);
        if constexpr (W == (int)x128::size)
            store128(y, load128(x));
        else
            *y = *x;
    }
}

static inline void tokens_move(floatX *to, const floatX *from, size_t B, size_t T,
                               size_t width, size_t c, bool zigzag, bool join,
                               cudaStream_t stream) {
    kernel_cost(KERNEL_ELEMENTWISE, B * T * width, 2 * sizeof(floatX), 0);
    by_packs(width, [&](auto W) {
        LAUNCH(tokens_kernel<W>, element_blocks(B * T * width), ELEMENT_THREADS, stream)
        (to, from, B, T * width, c, zigzag, join);
    });
}

// Writes apart[c, B, T/c, width], which came from c ranks, as joined[B, T, width].
static inline void tokens_join(floatX *joined, const floatX *apart, size_t B, size_t T,
                               size_t width, size_t c, bool zigzag, cudaStream_t stream) {
    tokens_move(joined, apart, B, T, width, c, zigzag, true, stream);
}

// Does the reverse: apart has the tokens for each rank.
static inline void tokens_cut(floatX *apart, const floatX *joined, size_t B, size_t T,
                              size_t width, size_t c, bool zigzag, cudaStream_t stream) {
    tokens_move(apart, joined, B, T, width, c, zigzag, false, stream);
}

// Writes joined[N, parts, A] as apart[c, N, parts, A/c], the heads for each of c ranks. A
// row's heads are cut as a sequence of c tokens would be.
static inline void heads_cut(floatX *apart, const floatX *joined, size_t N, size_t parts,
                             size_t A, size_t c, cudaStream_t stream) {
    tokens_cut(apart, joined, N * parts, c, A / c, c, false, stream);
}

// Does the reverse: apart has the heads from each rank.
static inline void heads_join(floatX *joined, const floatX *apart, size_t N, size_t parts,
                              size_t A, size_t c, cudaStream_t stream) {
    tokens_join(joined, apart, N * parts, c, A / c, c, false, stream);
}

// apart[c, N, heads/c] <-> joined[N, heads]: NH heads of q, then KV of k and of v. Each of c
// ranks has 1/c of each kind.
template <int W>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    heads_kernel(floatX *to, const floatX *from, size_t N, size_t NH, size_t KV, size_t HS,
                 size_t c, bool join) {
    size_t heads = NH + 2 * KV;
    size_t held = heads / c;
    size_t queries = NH / c, keys = KV / c;
    Share s = element_share<W>(N * heads * HS);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        size_t apart = i * W;
        size_t channel = apart % HS;
        size_t head = apart / HS % held;
        size_t n = apart / HS / held % N;
        size_t rank = apart / HS / held / N;

        size_t among = rank * queries + head;
        if (head >= queries) {  // a key's or a value's
            size_t which = head - queries;
            among = NH + which / keys * KV + rank * keys + which % keys;
        }
        size_t joined = (n * heads + among) * HS + channel;

        floatX *y = to + (join ? joined : apart);
        const floatX *x = from + (join ? apart : joined);
        if constexpr (W == (int)x128::size)
            store128(y, load128(x));
        else
            *y = *x;
    }
}

// Writes joined as apart, or (join) the reverse. KV 0: there are no keys.
static inline void heads_move(floatX *to, const floatX *from, size_t N, size_t NH, size_t KV,
                              size_t HS, size_t c, bool join, cudaStream_t stream) {
    size_t count = N * (NH + 2 * KV) * HS;
    kernel_cost(KERNEL_ELEMENTWISE, count, 2 * sizeof(floatX), 0);
    by_packs(HS, [&](auto W) {
        LAUNCH(heads_kernel<W>, element_blocks(count), ELEMENT_THREADS, stream)
        (to, from, N, NH, KV, HS, c, join);
    });
}

// ---- the ring (Liu et al. 2023; Li et al. 2023) ----------------------------------------

// A step of the ring. Each rank has T rows of each of B sequences. Queries have A channels in
// NH heads, and keys K channels in KV heads.
typedef struct {
    size_t step;
    TokenPair pair;
    size_t B, T, A, NH, KV, K, whole;  // whole: tokens of a sequence
    Tokens mine, others;  // positions of this rank's rows, and of those of the keys at hand
} RingStep;

// Returns step s: a rank has its own queries, and the keys of the rank that is s before it.
// KV: 0 for as many heads of keys as of queries.
static inline RingStep ring_step(Context part, size_t step, size_t B, size_t T, size_t A,
                                 size_t NH, size_t KV = 0) {
    if (KV == 0) KV = NH;
    Context other = part;
    other.rank = (part.rank + part.c - step) % part.c;
    TokenPair pair = token_pair(T, part.rank, other.rank, part.zigzag);
    return {step, pair, B, T, A, NH, KV, KV * (A / NH), part.T, context_tokens(part),
            context_tokens(other)};
}

typedef struct {
    floatX *kv[2];           // (B, T, 2, K) keys and values at hand, and those that arrive
    float *dkv[2];           // (B, T, 2, K) their gradients by the ranks before
    float *sum;              // (B, T, A) outputs by the keys so far; in backward dq
    float *part, *part_lse;  // (B, T, A) and (B, NH, T) by the keys at hand
    float *part_dkv;         // (B, T, 2, K) gradients of the keys at hand by this rank
} Ring;

// Takes the buffers of the ring. K: channels of the keys, 0 for A.
static inline void take_ring(Arena *arena, Ring *r, size_t N, size_t A, size_t NH,
                             size_t K = 0) {
    if (K == 0) K = A;
    take(arena, r->sum, N * A);
    take(arena, r->part, N * A);
    take(arena, r->part_lse, N * NH);
    take(arena, r->part_dkv, 2 * N * K);
    for (int i = 0; i < 2; i++) {
        take(arena, r->kv[i], 2 * N * K);
        take(arena, r->dkv[i], 2 * N * K);
    }
}

// Attention between the rows of two ranks. Its results are in fp32; dq is in the rows of
// out, not of q.
struct AttentionPair : Attention {
    static constexpr bool PAIR = true;
    bool full;
    float *out, *dq, *dk, *dv;
    Tokens q_tokens, k_tokens;       // for dropout: the positions of their rows, from rows
                                     // q_first and k_first on,
    size_t q_first, k_first, whole;  // in sequences of `whole` tokens
    __device__ __forceinline__ Philox scores_block(const Dropout &d, size_t b, size_t h,
                                                   size_t q, size_t k) const {
        return dropout_probability_block(&d, b, h, tokens_position(q_tokens, q_first + q),
                                         tokens_position(k_tokens, k_first + k), whole);
    }
};

// Declares the work of the causal attention that has as many scores, in B sequences.
static inline void attention_pair_cost(const AttentionPair &a, bool backward,
                                       double scores) {
    size_t T = (size_t)(sqrt(2 * scores / (double)a.B) + 0.5);
    attention_cost(backward, a.B, T, a.NH, a.KV, a.HS, sizeof(floatX));
}

// Returns the scores of a pair: all of them, or the half that a causal mask leaves.
static inline double pair_scores(const RingStep &s) {
    return (s.pair.full ? 1.0 : 0.5) * (double)(s.B * s.pair.Tq) * (double)s.pair.Tk;
}

static inline AttentionPair attention_of_pair(const Ring &r, const RingStep &s,
                                              const floatX *qkv) {
    const TokenPair &pair = s.pair;
    AttentionPair a = {};
    size_t S = s.A + 2 * s.K;
    (Attention &)a = attention_of(qkv + pair.q * S, s.B, pair.Tq, s.A, s.NH, s.KV);
    a.k = r.kv[s.step % 2] + pair.k * 2 * s.K;
    a.v = a.k + s.K;
    a.k_stride = 2 * s.K;
    a.Tk = pair.Tk;
    a.rows = s.T;
    a.full = pair.full;
    a.q_tokens = s.mine;
    a.k_tokens = s.others;
    a.q_first = pair.q;
    a.k_first = pair.k;
    a.whole = s.whole;
    return a;
}

// Describes the outputs of the queries of qkv[B, T, A + 2K] by this step's keys alone, in
// fp32, and their lse[B, NH, T]. Step 0 writes the sum. A later step writes a part, which
// attention_merge adds to it.
static inline AttentionPair pair_forward_of(const Ring &r, float *lse, const floatX *qkv,
                                            const RingStep &s) {
    AttentionPair a = attention_of_pair(r, s, qkv);
    a.out = (s.step ? r.part : r.sum) + s.pair.q * s.A;
    a.lse = (s.step ? r.part_lse : lse) + s.pair.q;
    return a;
}

// Computes them.
static inline void attention_pair_forward(const Ring &r, float *lse, const floatX *qkv,
                                          const RingStep &s, cudaStream_t stream,
                                          Dropout d) {
    if (s.pair.Tq == 0) return;
    AttentionPair a = pair_forward_of(r, lse, qkv, s);
    attention_pair_cost(a, false, pair_scores(s));
    attention_launch(a, d, false, stream);
}

// Describes a step's parts of dq and dkv, in fp32, from the outputs and lse of all keys. Step
// 0 writes the sums. A later step writes parts, which ring_add adds to them. dot[B, NH, T] is
// scratch.
static inline AttentionPair pair_backward_of(const Ring &r, float *dot, const floatX *dout,
                                             const floatX *out, const float *lse,
                                             const floatX *qkv, const RingStep &s) {
    AttentionPair a = attention_of_pair(r, s, qkv);
    a.y = out + s.pair.q * s.A;
    a.lse = (float *)lse + s.pair.q;  // lse is only read
    a.dout = dout + s.pair.q * s.A;
    a.dot = dot + s.pair.q;
    a.dq = (s.step ? r.part : r.sum) + s.pair.q * s.A;
    a.dk = (s.step ? r.part_dkv : r.dkv[0]) + s.pair.k * 2 * s.K;
    a.dv = a.dk + s.K;
    return a;
}

// Computes them.
static inline void attention_pair_backward(const Ring &r, float *dot, const floatX *dout,
                                           const floatX *out, const float *lse,
                                           const floatX *qkv, const RingStep &s,
                                           cudaStream_t stream, Dropout d) {
    if (s.pair.Tq == 0) return;
    AttentionPair a = pair_backward_of(r, dot, dout, out, lse, qkv, s);
    attention_pair_cost(a, true, pair_scores(s));
    attention_launch(a, d, true, stream);
}

// A warp for each head of a row.
__global__ void __launch_bounds__(ROW_THREADS)
    attention_merge_kernel(float *sum, float *lse, const float *part, const float *part_lse,
                           TokenPair pair, size_t B, size_t T, size_t NH, size_t HS) {
    size_t n = block_row();
    if (n >= B * pair.Tq * NH) return;
    size_t head = n % NH, row = pair.q + n / NH % pair.Tq, b = n / NH / pair.Tq;
    size_t stat = (b * NH + head) * T + row, from = ((b * T + row) * NH + head) * HS;
    float before = row_lane() == 0 ? lse[stat] : 0.0f, other = part_lse[stat];
    if constexpr (ROW_LANES == 32)
        before = __shfl_sync(0xFFFFFFFFu, before, 0);  // whoever changes it alone reads it
    float larger = before > other ? before : other;
    float smaller = before > other ? other : before;
    float weight = 1.0f / (1.0f + expf(before - other));  // of the part
    Share s = row_share(HS);
    for (size_t i = s.begin; i < s.end; i += s.step)
        sum[from + i] -= weight * (sum[from + i] - part[from + i]);
    if (row_lane() == 0) lse[stat] = larger + log1pf(expf(smaller - larger));
}

// Merges the sum and lse[B, NH, T] of the earlier steps' keys with the results of this step.
// In this form nothing overflows: o = o1 - sigmoid(l2 - l1) (o1 - o2), l = log(exp(l1) +
// exp(l2)).
static inline void attention_merge(const Ring &r, float *lse, const RingStep &s,
                                   cudaStream_t stream) {
    size_t heads = s.B * s.pair.Tq * s.NH;
    if (heads == 0 || s.step == 0) return;
    kernel_cost(KERNEL_ELEMENTWISE, heads * (s.A / s.NH), 3 * sizeof(float), 3);
    LAUNCH(attention_merge_kernel, row_blocks(heads), ROW_THREADS, stream)
    (r.sum, lse, r.part, r.part_lse, s.pair, s.B, s.T, s.NH, s.A / s.NH);
}

template <class To, class From, bool ADD>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    columns_kernel(To *to, size_t to_stride, const From *from, size_t from_stride, size_t B,
                   size_t T, size_t first, size_t count, size_t width) {
    Share s = element_share<1>(B * count * width);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        size_t column = i % width, n = i / width, row = n / count * T + first + n % count;
        To *y = to + row * to_stride + column;
        float x = to_float(from[row * from_stride + column]);
        *y = from_float<To>(ADD ? to_float(*y) + x : x);
    }
}

// Copies (ADD: adds) `width` columns of rows first .. first + count - 1 of B sequences of T
// rows. To, From: floatX or float.
template <bool ADD, class To, class From>
static inline void columns_move(To *to, size_t to_stride, const From *from,
                                size_t from_stride, size_t B, size_t T, size_t first,
                                size_t count, size_t width, cudaStream_t stream) {
    if (count == 0) return;
    kernel_cost(KERNEL_ELEMENTWISE, B * count * width,
                sizeof(To) * (ADD ? 2 : 1) + sizeof(From), ADD);
    LAUNCH((columns_kernel<To, From, ADD>), element_blocks(B * count * width),
           ELEMENT_THREADS, stream)
    (to, to_stride, from, from_stride, B, T, first, count, width);
}

// Adds a step's parts of dq and dkv to the sums. The first step's parts are there already.
static inline void ring_add(const Ring &r, const RingStep &s, cudaStream_t stream) {
    if (s.step == 0) return;
    columns_move<true>(r.sum, s.A, r.part, s.A, s.B, s.T, s.pair.q, s.pair.Tq, s.A, stream);
    columns_move<true>(r.dkv[s.step % 2], 2 * s.K, r.part_dkv, 2 * s.K, s.B, s.T, s.pair.k,
                       s.pair.Tk, 2 * s.K, stream);
}

#endif
