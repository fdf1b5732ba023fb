// attention_first.cuh: causal attention in which each query has a first key: the first of its
// document, or of a window (Beltagy et al. 2020). A block of queries skips tiles of keys that
// none of them sees. A block of keys skips tiles of queries that see none of them.
// lesson: documents
//
// The kernels are the templates of attention.cuh. `first` never falls from a query to the
// next. So a block's first query tells where its keys begin, and bisection finds the last
// query that sees a block of keys. Hopper's asynchronous kernels know causal masks only. A
// GPU takes the other kernels.
//
// defines: WithFirst, AttentionFirst, attention_first_forward, attention_first_backward
#ifndef LLMC_ATTENTION_FIRST_CUH
#define LLMC_ATTENTION_FIRST_CUH

#include "llmc/host/first_keys.h"
#include "llmc/kernels/attention.cuh"

// Base has two functions:
//   query_at(b, q)     the place in `first` of query q of sequence b,
//   key_row(position)  the first row of k at a position or behind it.
// first_key() is called for queries that exist.
template <class Base>
struct WithFirst : Base {
    static constexpr bool FIRST = true;
    // A query may meet a tile that it does not see before any that it does. Its maximum is
    // then finite, and below any score's.
    static constexpr float LEAST = -1e30f;
    const int *first;  // of each query, the position of the first key that it sees

    // Returns the first row of k that query q of sequence b sees, or Tk if there is none.
    __device__ __forceinline__ int first_key(unsigned b, int q) const {
        return this->key_row(first[this->query_at(b, (size_t)q)]);
    }

    // Leaves out rows of the other side that the block does not meet.
    __device__ __forceinline__ void narrow(AttentionPlace &p, bool keys, int rows) const {
        if (!keys) {  // at a block of dropout's numbers
            p.begin = first_key(p.b, p.block_row) / DROPOUT_BLOCK * DROPOUT_BLOCK;
            return;
        }
        int last = p.block_row + rows < p.T ? p.block_row + rows - 1 : p.T - 1;
        int low = p.begin, high = p.end;
        while (low < high) {  // the first query that sees none of the keys
            int middle = (low + high) / 2;
            if (first_key(p.b, middle) <= last)
                low = middle + 1;
            else
                high = middle;
        }
        p.end = low;
    }

    // Hides keys key, key + 1, ... of the rows kernels from queries row, row + 1, ...
    template <class A>
    __device__ __forceinline__ void hide_rows(typename A::V (&s)[A::TILE],
                                              const AttentionPlace &at, int key) const {
        for (int r = 0; r < A::R; r++) {
            int query = at.row + r < at.T ? at.row + r : at.T - 1;
            int end = first_key(at.b, query) - key;
            if (end <= 0) continue;
            for (int j = 0; j < A::TILE; j++)
                if (j < end) row_of(s[j], r) = -INFINITY;
        }
    }

    // Hides keys row, row + 1, ... from one query.
    template <class A>
    __device__ __forceinline__ void hide_row(typename A::V &s, const AttentionPlace &at,
                                             int query) const {
        int end = first_key(at.b, query) - at.row;
        for (int r = 0; r < A::R; r++)
            if (r < end) row_of(s, r) = -INFINITY;
    }

    // Hides scores of the tensor cores, as the function of this name does for a causal mask.
    template <bool KEYS, int N8>
    __device__ __forceinline__ void hide_fragments(float (&s)[N8][4], const MmaPlace &at,
                                                   int tile) const {
        if (KEYS) {
            int begin[2];
            for (int i = 0; i < 2; i++) {
                int query = at.row + i * 8 < at.T ? at.row + i * 8 : at.T - 1;
                begin[i] = first_key(at.b, query);
            }
            if (tile >= begin[1]) return;
            UNROLL
            for (int i = 0; i < 4 * N8; i++)
                if (tile + i / 4 * 8 + at.pair + i % 2 < begin[i % 4 / 2])
                    s[i / 4][i % 4] = -INFINITY;
            return;
        }
        int last = tile + 8 * N8 < at.others ? tile + 8 * N8 - 1 : at.others - 1;
        if (first_key(at.b, last) <= at.warp_row) return;
        UNROLL
        for (int i = 0; i < 4 * N8; i++) {
            int query = tile + i / 4 * 8 + at.pair + i % 2;
            if (at.row + i % 4 / 2 * 8 < first_key(at.b, query < last ? query : last))
                s[i / 4][i % 4] = -INFINITY;
        }
    }
};

// Of whole sequences: first[B, T] holds rows of k.
struct AttentionWhole : Attention {
    __device__ __forceinline__ size_t query_at(size_t b, size_t q) const {
        return b * T + q;
    }
    __device__ __forceinline__ int key_row(int position) const { return position; }
};
typedef WithFirst<AttentionWhole> AttentionFirst;

// Declares the work of causal attention with the same number of scores.
static inline void attention_first_cost(bool backward, const Attention &a, double scores) {
    size_t T = (size_t)(sqrt(2 * scores / (double)a.B) + 0.5);
    attention_cost(backward, a.B, T, a.NH, a.KV, a.HS, sizeof(floatX));
}

// Does the work of attention_forward with the keys that each query sees.
static inline void attention_first_forward(floatX *out, float *lse, const floatX *qkv,
                                           FirstKeys keys, size_t B, size_t T, size_t C,
                                           size_t NH, cudaStream_t stream,
                                           Dropout d = Dropout{}, size_t KV = 0) {
    if (!keys.first) return attention_forward(out, lse, qkv, B, T, C, NH, stream, d, KV);
    AttentionFirst a = {};
    (Attention &)a = attention_of(qkv, B, T, C, NH, KV);
    a.first = keys.first;
    a.out = out;
    a.lse = lse;
    attention_first_cost(false, a, keys.scores);
    attention_launch(a, d, false, stream);
}

// Computes what attention_backward does.
static inline void attention_first_backward(floatX *dqkv, float *dot, const floatX *dout,
                                            const floatX *out, const float *lse,
                                            const floatX *qkv, FirstKeys keys, size_t B,
                                            size_t T, size_t C, size_t NH,
                                            cudaStream_t stream, Dropout d = Dropout{},
                                            size_t KV = 0) {
    if (!keys.first)
        return attention_backward(dqkv, dot, dout, out, lse, qkv, B, T, C, NH, stream, d,
                                  KV);
    AttentionFirst a = {};
    (Attention &)a = attention_of(qkv, B, T, C, NH, KV);
    a.first = keys.first;
    a.y = out;
    a.lse = (float *)lse;  // only read
    a.dout = dout;
    a.dot = dot;
    a.dq = dqkv;
    a.dk = dqkv + C;
    a.dv = a.dk + a.KV * a.HS;
    attention_first_cost(true, a, keys.scores);
    attention_launch(a, d, true, stream);
}

#endif
